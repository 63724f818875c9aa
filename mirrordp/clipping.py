"""The clipped sum: per-example gradients, each clipped to norm C, added up.

    s(θ) = Σ_i clip(∇ℓ(θ; d_i), C),     clip(v, C) = v · min(1, C / ‖v‖₂)

A record changes s by at most C (2C when it is replaced): `ClippedGrad.sensitivity` says so, and
nobody derives it again. This is the oracle, over `jax_privacy.clipped_grad`, for any JAX function;
`mirrordp.ghost` obeys the same contract without per-example gradients in memory.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
from jax.extend import core

from mirrordp import _isolation, _validate
from mirrordp.accounting import Adjacency
from mirrordp.types import Batch, LossFn, Params, PyTree


class ClipStats(NamedTuple):
    """Per-example quantities *without* noise: for the operator's eyes only."""

    unprivatized_losses: jax.Array
    unprivatized_norms: jax.Array


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """A callable that computes a clipped sum and knows its sensitivity.

    Call it as `clipped(params, batch, is_padding)`, with `keys=` (one per example) if the loss
    takes a random key. `with_stats` also returns each example's loss and gradient norm.

    Formal guarantees, for every value of the arguments:

    - Each example adds a tree of norm at most `l2_clip_norm` (up to rounding), which depends on
      this example and its key only. A loss with an operation that could see other examples, such as
      a host callback, is refused with a ValueError when it is traced.
    - A padding example adds exactly zero, and so does one whose gradient holds a NaN or an
      infinity.
    - The sum is float32, or wider where the parameters are.
    - The microbatch size has no effect beyond rounding.
    """

    with_stats: Callable[..., tuple[PyTree, ClipStats]]
    l2_clip_norm: float
    takes_key: bool

    def __call__(
        self,
        params: Params,
        batch: Batch,
        is_padding: jax.Array,
        *,
        keys: jax.Array | None = None,
    ) -> PyTree:
        """The sum of clipped gradients over the examples that are not padding."""
        return self.with_stats(params, batch, is_padding, keys=keys)[0]

    def sensitivity(self, adjacency: Adjacency) -> float:
        """The largest distance between the sums of neighbouring batches."""
        _validate.instance_of(Adjacency, adjacency=adjacency)
        return adjacency.distance * self.l2_clip_norm


def takes_key(loss_fn: LossFn) -> bool:
    """Whether `loss_fn` has a third required positional argument, the random key."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(required) == 3


def with_key(loss_fn: LossFn) -> LossFn:
    """`loss_fn` in the three-argument form, ignoring the key if it takes none."""
    if takes_key(loss_fn):
        return loss_fn
    return lambda params, example, key: loss_fn(params, example)


def example_of(arrays: Batch) -> PyTree:
    """Shapes and types of one example."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        ),
        arrays,
    )


def example_key() -> jax.Array:
    """A key of the kind that a run hands to its loss, for tracing."""
    return jax.random.key(0, impl="threefry2x32")


def value_and_grad_program(
    loss_fn: LossFn, params: Params, trainable: PyTree | None, example: PyTree, key: Any
) -> core.ClosedJaxpr:
    """The loss of one example and its gradient as JAX traces them, custom rules applied.

    Args:
        loss_fn: a loss function, of two arguments or three.
        params: the parameters, or their shapes.
        trainable: as in `clipped_grad`.
        example: shapes and types of one example.
        key: a key, or its shape.

    Returns:
        A program whose outputs are the loss, then one gradient for each trainable leaf.
    """

    def loss_of_part(part: PyTree, rest: Params, example: PyTree, key: Any) -> jax.Array:
        return with_key(loss_fn)(merge(part, rest), example, key)

    part = trainable_part(params, trainable)
    return jax.make_jaxpr(jax.value_and_grad(loss_of_part))(part, params, example, key)


def check_isolated(
    loss_fn: LossFn, params: Params, trainable: PyTree | None, batch: Batch, keys: Any
) -> None:
    """Raises if the loss or its gradient, mapped over a batch, could see other examples.

    Args:
        loss_fn: a loss function, of two arguments or three.
        params: the parameters.
        trainable: as in `clipped_grad`.
        batch: arrays with an axis of examples first; only shapes and types matter.
        keys: one for each example, or None.
    """
    key = example_key() if keys is None else example_of(keys)
    program = value_and_grad_program(loss_fn, params, trainable, example_of(batch), key)
    _isolation.check("the loss function", program)


def frozen_mask(trainable: PyTree | None, params: Params) -> Any:
    """A hashable form of a tree (or prefix) of booleans over `params`, for static arguments."""
    if trainable is None:
        return None
    leaves, treedef = jax.tree.flatten(jax.tree.broadcast(trainable, params))
    return treedef, tuple(bool(leaf) for leaf in leaves)


def thawed_mask(frozen: Any) -> PyTree | None:
    """The tree of booleans that `frozen_mask` made hashable."""
    return None if frozen is None else jax.tree.unflatten(*frozen)


def trainable_part(params: Params, trainable: PyTree | None) -> PyTree:
    """`params` with its frozen leaves replaced by None, which JAX reads as "no leaf here".

    Args:
        params: all parameters.
        trainable: a tree of booleans, or a prefix of one (a single boolean covers a subtree);
            None means that everything is trainable.
    """
    if trainable is None:
        return params
    mask = jax.tree.broadcast(trainable, params)
    if not any(jax.tree.leaves(mask)):
        raise ValueError("trainable must be True for at least one parameter, got none.")
    return jax.tree.map(lambda leaf, keep: leaf if keep else None, params, mask)


def merge(part: PyTree, params: Params) -> Params:
    """`params` with the leaves that `part` holds put in their place."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, part, params, is_leaf=lambda x: x is None
    )


def float32_or_wider(leaf: Any) -> Any:
    """The dtype in which sums of gradients like `leaf` are taken and receive their noise."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def zero_sum(params: Params, trainable: PyTree | None) -> PyTree:
    """The clipped sum over nobody."""
    part = trainable_part(params, trainable)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, float32_or_wider(leaf)), part)


def clipped_grad(
    loss_fn: LossFn,
    *,
    l2_clip_norm: float,
    trainable: PyTree | None = None,
    microbatch_size: int | None = None,
) -> ClippedGrad:
    """The sum of per-example gradients of `loss_fn`, each clipped to `l2_clip_norm`.

    >>> import jax.numpy as jnp
    >>> squared_error = lambda theta, x: 0.5 * (theta - x) ** 2
    >>> clipped = clipped_grad(squared_error, l2_clip_norm=2.0)
    >>> float(clipped(3.0, jnp.array([0.0, 7.0, 2.0]), jnp.array([False, False, True])))
    0.0
    >>> clipped.sensitivity(Adjacency.REPLACE)
    4.0

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        l2_clip_norm: C.
        trainable: a tree of booleans over the parameters (or a prefix of it); gradients are taken,
            clipped and returned for the true leaves only, with None in place of the others.
        microbatch_size: compute per-example gradients for so many examples at a time; only memory
            changes.

    Returns:
        A `ClippedGrad`.
    """
    _validate.positive(l2_clip_norm=l2_clip_norm)
    if microbatch_size is not None:
        _validate.positive_integer(microbatch_size=microbatch_size)
    keyed_loss = with_key(loss_fn)

    # Clipping to norm one in units of C: squares of the large terms cannot underflow.
    clipped_in_units = jax_privacy.clipped_grad(
        lambda part, rest, example_and_key: keyed_loss(merge(part, rest), *example_and_key),
        l2_clip_norm=1.0,
        batch_argnums=2,
        keep_batch_dim=False,
        return_values=True,
        return_grad_norms=True,
        pre_clipping_transform=lambda grad: bounded(grad, l2_clip_norm),
        microbatch_size=microbatch_size,
    )

    def with_stats(
        params: Params, batch: Batch, is_padding: jax.Array, *, keys: jax.Array | None = None
    ) -> tuple[PyTree, ClipStats]:
        rows = is_padding.shape[0]
        if keys is None:
            if takes_key(loss_fn):
                raise TypeError(
                    "the loss function takes a random key, so the clipped gradient needs keys=, "
                    "one per example. Pass jax.random.split(key, batch_size)."
                )
            keys = jnp.zeros(rows)
        check_isolated(loss_fn, params, trainable, batch, keys)
        batch_and_keys, is_padding = _pad_rows((batch, keys), is_padding, microbatch_size)
        total, info = clipped_in_units(
            trainable_part(params, trainable),
            params,
            batch_and_keys,
            is_padding_example=is_padding,
        )
        total = jax.tree.map(lambda leaf: leaf * l2_clip_norm, total)
        return total, ClipStats(info.values[:rows], info.grad_norms[:rows])

    return ClippedGrad(with_stats, float(l2_clip_norm), takes_key(loss_fn))


def bounded(grad: PyTree, l2_clip_norm: Any) -> PyTree:
    """One example's gradient in units of C: finite, wide enough, and safe to square.

    Scaling a vector whose largest entry exceeds one down to largest entry one leaves
    clip(·, 1) unchanged, since its norm was above one and still is at least one.
    """
    wide = jax.tree.map(lambda leaf: leaf.astype(float32_or_wider(leaf)) / l2_clip_norm, grad)
    largest = jnp.max(
        jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(wide)])
    )
    # NaN propagates through max on every backend; an infinity or NaN anywhere zeroes all of it.
    finite = jnp.isfinite(largest)
    scale = jnp.where(largest > 1, 1 / largest, 1.0)
    return jax.tree.map(
        lambda leaf: jnp.where(finite, leaf * scale.astype(leaf.dtype), jnp.zeros_like(leaf)), wide
    )


def _pad_rows(
    batch: Batch, is_padding: jax.Array, microbatch_size: int | None
) -> tuple[Batch, jax.Array]:
    """Adds padding rows up to a multiple of the microbatch size."""
    rows = is_padding.shape[0]
    extra = -rows % (microbatch_size or 1)
    if extra == 0:
        return batch, is_padding
    index = np.concatenate([np.arange(rows), np.zeros(extra, int)])
    padded = jax.tree.map(lambda leaf: leaf[index], batch)
    return padded, jnp.concatenate([is_padding, jnp.ones(extra, bool)])
