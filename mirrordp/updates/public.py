"""Everything that is learned from public data: its gradient ∇Ψ, and the warm start argmin Ψ.

Ψ(θ) = (1/n_pub) Σ_d ℓ_pub(θ; d) is the public loss. Nothing here costs privacy.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.data import PublicData, require_public
from mirrordp.privacy._convolutions import where_faster
from mirrordp.privacy.clipping import with_key
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import Batch, LossFn, Params, PyTree
from mirrordp.updates.averages import Average, ExponentialAverage, UniformAverage

PublicGrad = Callable[[Params, Batch, jax.Array], tuple[jax.Array, PyTree]]


def public_grad(
    loss_fn: LossFn,
    *,
    batch_size: int | None = None,
    trainable: PyTree | Trainable | None = None,
) -> PublicGrad:
    """A function `(params, arrays, key) -> (Ψ(θ), ∇Ψ(θ))`, on all public rows or a random batch.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        batch_size: rows drawn (with replacement) for each call; None takes the full public set.
        trainable: as in `mirrordp.clipped_grad`.
    """
    keyed_loss, trained = with_key(where_faster(loss_fn)), Trainable.of(trainable)
    if batch_size is not None:
        _validate.positive_integer(public_batch_size=batch_size)

    def mean_loss(part: PyTree, params: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        merged = trained.merge(part, params)
        return jnp.mean(jax.vmap(keyed_loss, in_axes=(None, 0, 0))(merged, batch, keys))

    def value_and_grad(params: Params, arrays: Batch, key: jax.Array):
        batch_key, loss_key = jax.random.split(key)
        rows = jax.tree.leaves(arrays)[0].shape[0]
        if batch_size is not None and batch_size < rows:
            chosen = jax.random.randint(batch_key, (batch_size,), 0, rows)
            arrays, rows = jax.tree.map(lambda leaf: leaf[chosen], arrays), batch_size
        keys = jax.random.split(loss_key, rows)
        return jax.value_and_grad(mean_loss)(trained.part(params), params, arrays, keys)

    return value_and_grad


class WarmStart(NamedTuple):
    """The result of pre-training on public data.

    Attributes:
        params: the best parameters by the held-out loss; those given if that was never finite.
        converged: whether the held-out loss stopped improving before the last epoch allowed.
        num_epochs: how many passes were made.
        train_losses: the mean loss of each pass.
        holdout_losses: the held-out loss after each pass.
    """

    params: Params
    converged: bool
    num_epochs: int
    train_losses: np.ndarray
    holdout_losses: np.ndarray


@functools.cache
def _adam() -> optax.GradientTransformation:
    # One object, because an optimiser is equal to itself only and another one compiles anew.
    return optax.adam(1e-3)


class _Reached(NamedTuple):
    """Where pre-training is: the last iterate, what is judged and returned, and how it goes on."""

    params: Params
    judged: Params
    opt_state: optax.OptState
    num_steps: jax.Array


@functools.partial(
    jax.jit, static_argnames=("loss_fn", "holdout_loss_fn", "optimizer", "average", "trainable")
)
def _epoch(
    loss_fn, holdout_loss_fn, optimizer, average, trainable, reached, rows, key, train, holdout
):
    """One pass over `train` in the order of `rows`, and the loss on `holdout` after it."""
    gradient = public_grad(loss_fn, trainable=trainable)

    def step(reached, inputs):
        params, judged, opt_state, num_steps = reached
        batch_rows, batch_key = inputs
        batch = jax.tree.map(lambda leaf: leaf[batch_rows], train)
        loss, grad = gradient(params, batch, batch_key)
        part = trainable.part(params)
        updates, opt_state = optimizer.update(grad, opt_state, part)
        part, num_steps = optax.apply_updates(part, updates), num_steps + 1
        params = trainable.merge(part, params)
        if average is None:
            judged = params
        else:
            # Frozen leaves may be integers or random keys, which have no average.
            kept = average.update(trainable.part(judged), part, num_steps)
            judged = trainable.merge(kept, judged)
        return _Reached(params, judged, opt_state, num_steps), loss

    keys = jax.random.split(key, rows.shape[0])
    reached, losses = jax.lax.scan(step, reached, (rows, keys))
    # A fixed key: epochs are compared under the same dropout or augmentation.
    keyed_loss = with_key(where_faster(holdout_loss_fn))
    judge_keys = jax.random.split(
        jax.random.split(jax.random.key(0))[1], jax.tree.leaves(holdout)[0].shape[0]
    )
    # A part at a time: all rows of a language model at once take gigabytes.
    holdout_losses = jax.lax.map(
        lambda judge: keyed_loss(reached.judged, *judge), (holdout, judge_keys), batch_size=512
    )
    return reached, jnp.mean(losses), jnp.mean(holdout_losses)


def warm_start(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    *,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int | None = 32,
    holdout_fraction: float = 0.2,
    holdout: PublicData | None = None,
    holdout_loss_fn: LossFn | None = None,
    patience: int = 10,
    max_epochs: int = 500,
    trainable: PyTree | None = None,
    average: Average | None = None,
    refit: bool = False,
    seed: int = 0,
) -> WarmStart:
    """Pre-trains on public data until a held-out part of it stops improving.

    Algorithm 1 starts at θ_0 = argmin Ψ. A network that is trained to zero loss on a few thousand
    public rows starts worse than one that is stopped in time, so each epoch is judged by the loss
    on rows that were set aside, and the best parameters are returned. Public data only: no cost.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        params: where to begin.
        public: the public rows.
        optimizer: an optax optimiser; by default Adam with learning rate 1e-3. For recurrent
            networks SGD with a clipped gradient left a start that DP-SGD could go on from.
        batch_size: rows of a mini-batch; None takes all at once.
        holdout_fraction: the share of the public rows that judges.
        holdout: public rows of your own that judge; all of `public` is then learned from, and
            `refit` adds them to it.
        holdout_loss_fn: what judges, of the same form as `loss_fn` and by default the same. Give
            the loss without dropout where `loss_fn` has dropout.
        patience: stop after this many epochs without improvement.
        max_epochs: stop after this many epochs at the latest. If the held-out loss is then still
            improving, `converged` is False and a warning says what to do about it.
        trainable: as in `mirrordp.clipped_grad`.
        average: `ExponentialAverage(decay)` or `UniformAverage()` of the iterates, which is then
            judged and returned instead of the last one. With a rate that stays large it ends lower.
        refit: begin again with all public rows, for as many epochs as were best.
        seed: decides holdout and order of rows.

    Returns:
        A `WarmStart`.

    Warns:
        RuntimeWarning: if it did not converge.
    """
    require_public(public)
    _validate.open_unit_interval(holdout_fraction=holdout_fraction)
    _validate.positive_integer(patience=patience, max_epochs=max_epochs)
    if batch_size is not None:
        _validate.positive_integer(batch_size=batch_size)
    if holdout is not None:
        require_public(holdout, "holdout")
        together = jax.tree.map(
            lambda *leaves: np.concatenate(leaves), holdout.arrays, public.arrays
        )
        public = PublicData(together)
    elif len(public) < 2:
        raise ValueError("warm_start needs at least 2 public rows: one to learn and one to judge.")
    if average is not None:
        _validate.instance_of((UniformAverage, ExponentialAverage), average=average)
    params = jax.tree.map(jnp.asarray, params)
    chosen = Trainable.of(trainable)
    chosen.check(params)
    optimizer = optimizer or _adam()
    key = jax.random.key(seed)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(public))
    if holdout is not None:
        order, num_holdout = np.arange(len(public)), len(holdout)
    else:
        num_holdout = min(max(1, round(holdout_fraction * len(public))), len(public) - 1)
    take = lambda rows: jax.tree.map(lambda leaf: jnp.asarray(leaf[rows]), public.arrays)  # noqa: E731
    judges, train = take(order[:num_holdout]), take(order[num_holdout:])
    num_train = len(public) - num_holdout

    def epochs(train, num_train, rng, key):
        """The parameters and losses after each epoch, without end."""
        opt_state = optimizer.init(chosen.part(params))
        reached = _Reached(params, params, opt_state, jnp.zeros([], jnp.int32))
        size = num_train if batch_size is None else min(batch_size, num_train)
        for number in itertools.count():
            rows = rng.permutation(num_train)[: num_train // size * size].reshape(-1, size)
            reached, train_loss, holdout_loss = _epoch(
                loss_fn, holdout_loss_fn or loss_fn, optimizer, average, chosen, reached, rows,
                jax.random.fold_in(key, number), train, judges,
            )  # fmt: skip
            yield reached.judged, float(train_loss), float(holdout_loss)

    best, best_loss, best_epoch, number = params, np.inf, 0, 0
    train_losses, holdout_losses = [], []
    for number, (reached, train_loss, holdout_loss) in enumerate(
        itertools.islice(epochs(train, num_train, rng, key), max_epochs)
    ):
        train_losses.append(train_loss)
        holdout_losses.append(holdout_loss)
        if holdout_loss < best_loss:
            best, best_loss, best_epoch = reached, holdout_loss, number
        if number - best_epoch >= patience:
            break
    if refit and np.isfinite(best_loss):
        everything = take(np.arange(len(public)))
        again = epochs(everything, len(public), rng, jax.random.fold_in(key, max_epochs))
        best, *_ = next(itertools.islice(again, best_epoch, None))
    converged = number - best_epoch >= patience and bool(np.isfinite(best_loss))
    if not converged:
        _warn_not_converged(np.asarray(holdout_losses), patience)
    return WarmStart(
        best,
        converged,
        number + 1,
        np.asarray(train_losses),
        np.asarray(holdout_losses),
    )


def _warn_not_converged(holdout_losses: np.ndarray, patience: int) -> None:
    if not np.isfinite(holdout_losses).any():
        warn(
            f"the warm start did not converge: the held-out loss was not finite after any of "
            f"{len(holdout_losses)} passes over the public rows, and the parameters are those that "
            "you gave. Use a smaller learning rate (optimizer=optax.adam(1e-4)), or look for the "
            "NaN in the loss function.",
            RuntimeWarning,
        )
        return
    warn(
        f"the warm start did not converge: after {len(holdout_losses)} passes over the public rows "
        f"the held-out loss still improves (it is {np.nanmin(holdout_losses):.4g}; {patience} "
        "passes without improvement end the warm start). Use a larger learning rate "
        "(optimizer=optax.adam(1e-2), say; the default has 1e-3), another optimizer, or more "
        "passes (max_epochs).",
        RuntimeWarning,
    )
