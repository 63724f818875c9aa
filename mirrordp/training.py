"""Private training: a pure step, and a generator that takes many steps per compiled call.

One logical step of the paper's first-order form, with everything private inside one mechanism:

    s = Σ_{i ∈ batch} clip(∇ℓ(θ; d_i), C)        reads private data, one example at a time
    g = (s + noise) / B                           the release; all below is post-processing
    u = α_t g + (1 − α_t) ∇Ψ(θ)                   public gradient mixed in
    θ ← θ + optimizer(u)

Compiled code sees *passes*: rows of `capacity` indices. Nearly always one pass is one step; a draw
above the capacity is finished in further passes of the same shape before the noise is added, once.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _fingerprint, _validate, schedules
from mirrordp import checkpoint as checkpoints
from mirrordp.budget import Budget
from mirrordp.checkpoint import Checkpoint
from mirrordp.clipping import ClippedGrad, merge, trainable_part, with_key
from mirrordp.data import (
    Overlap,
    PrivateData,
    PublicData,
    excluded_rows,
    require_private,
    require_public,
)
from mirrordp.ledger import Block, FileLedger, Ledger
from mirrordp.mechanism import Mechanism
from mirrordp.public import public_grad
from mirrordp.sampling import PADDING, passes
from mirrordp.types import AlphaSchedule, Batch, LossFn, Params, PyTree
from mirrordp.updates import Average, ExponentialAverage, UniformAverage, mix_gradients


class TrainState(NamedTuple):
    """What the next step needs. `noise_state` is secret: who holds it can subtract the noise."""

    step: jax.Array
    params: Params
    opt_state: PyTree
    noise_state: PyTree
    average: Params | None


class StepInfo(NamedTuple):
    """What one step may show. Everything but `unprivatized` follows from released values."""

    noisy_grad_norm: jax.Array
    public_loss: jax.Array
    unprivatized: "Unprivatized"


class Unprivatized(NamedTuple):
    """Quantities of the private batch *without* noise: for the operator's eyes only."""

    loss: jax.Array
    clip_fraction: jax.Array
    batch_size: jax.Array


@dataclasses.dataclass(frozen=True)
class TrainInfo:
    """What may be plotted, one entry per step of the call that just finished.

    Attributes:
        step: steps done so far.
        charged_steps: how many of them read private data; `mechanism.epsilon(delta,
            num_steps=charged_steps)` is what they cost.
        alpha: α_t.
        noisy_grad_norm: norm of the released gradient (zero where α_t = 0).
        public_loss: Ψ(θ_t) on the public batch; NaN where no public gradient was computed.
        unprivatized: quantities without noise, if the caller asked for them, else None.
    """

    step: int
    charged_steps: int
    alpha: np.ndarray
    noisy_grad_norm: np.ndarray
    public_loss: np.ndarray
    unprivatized: Unprivatized | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The pure functions of one training step; a value, so that equal steps compile once.

    For a loop of your own: `state = step.init(params, key)`, then
    `state, info = step(state, batch, is_padding, public, alpha=..., keys=...)` for each batch that
    `mechanism.batches` draws. `train` does this, many steps per compiled call.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        mechanism: samples, clips, adds noise, accounts.
        optimizer: an optax transformation; receives the (mixed) gradient.
        public_loss_fn: ℓ_pub, if it differs from the private loss.
        public_batch_size: public rows per step; None takes all.
        scale_noise: see `mirrordp.mix_public_gradient`.
        noisy_clip_norm: clip the released gradient once more, as the paper does for images.
        average: an average of the iterates to keep, or None.
        trainable: frozen form of the tree of booleans; see `frozen_mask`.
        microbatch_size: as in `mirrordp.clipped_grad`.
        show_unprivatized: compute `info.unprivatized`; zeros otherwise.
    """

    loss_fn: LossFn
    mechanism: Mechanism
    optimizer: optax.GradientTransformation
    public_loss_fn: LossFn | None = None
    public_batch_size: int | None = None
    scale_noise: bool = True
    noisy_clip_norm: float | None = None
    average: Average | None = None
    trainable: Any = None
    microbatch_size: int | None = None
    show_unprivatized: bool = False

    @property
    def _mask(self) -> PyTree | None:
        if self.trainable is None:
            return None
        treedef, leaves = self.trainable
        return jax.tree.unflatten(treedef, leaves)

    @property
    def clipped_grad(self) -> ClippedGrad:
        """The clipped sum of the private loss."""
        return self.mechanism.clipped_grad(
            self.loss_fn, trainable=self._mask, microbatch_size=self.microbatch_size
        )

    def init(self, params: Params, key: jax.Array) -> TrainState:
        """The state before the first step; `key` seeds the noise and must be secret."""
        part = trainable_part(params, self._mask)
        wide = jax.tree.map(lambda leaf: leaf.astype(_wide(leaf.dtype)), part)
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=self.optimizer.init(part),
            noise_state=self.mechanism.privatizer(key).init(wide),
            average=None if self.average is None else params,
        )

    def zero_sum(self, params: Params) -> PyTree:
        """The sum over an empty batch."""
        part = trainable_part(params, self._mask)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _wide(leaf.dtype)), part)

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        is_padding: jax.Array,
        public: Batch | None = None,
        *,
        alpha: jax.typing.ArrayLike = 1.0,
        keys: jax.Array | None = None,
        public_key: jax.Array | None = None,
    ) -> tuple[TrainState, StepInfo]:
        """One whole step on one padded batch; without public rows α must be left at 1."""
        if public is None and not (isinstance(alpha, int | float) and alpha == 1):
            raise ValueError(
                f"alpha={alpha!r} mixes in a public gradient, but no public rows came. Pass "
                "public=arrays, or leave alpha at 1 for DP-SGD."
            )
        clipped_sum, unprivatized = self.private_sum(state.params, batch, is_padding, keys)
        return self.finish(state, clipped_sum, unprivatized, public, alpha, public_key)

    def private_sum(
        self, params: Params, batch: Batch, is_padding: jax.Array, keys: jax.Array | None
    ) -> tuple[PyTree, Unprivatized]:
        """The clipped sum of one pass, not yet private, with *sums* of the unprivatized values."""
        clipped_sum, stats = self.clipped_grad.with_stats(params, batch, is_padding, keys=keys)
        if not self.show_unprivatized:
            return clipped_sum, Unprivatized(*jnp.zeros([3]))
        real = ~is_padding
        unprivatized = Unprivatized(
            loss=jnp.sum(jnp.where(real, stats.unprivatized_losses, 0.0), dtype=jnp.float32),
            clip_fraction=jnp.sum(
                real & (stats.unprivatized_norms > self.mechanism.l2_clip_norm), dtype=jnp.float32
            ),
            batch_size=jnp.sum(real, dtype=jnp.float32),
        )
        return clipped_sum, unprivatized

    def finish(
        self,
        state: TrainState,
        clipped_sum: PyTree,
        unprivatized: Unprivatized,
        public: Batch | None,
        alpha: jax.typing.ArrayLike,
        public_key: jax.Array | None,
    ) -> tuple[TrainState, StepInfo]:
        """Adds the noise to a whole step's sum and takes the step; at α = 0 without either."""
        alpha = jnp.asarray(alpha, jnp.float32)

        def release(noise_state):
            weighted = clipped_sum
            if not self.scale_noise:
                # α ≤ 1 is a public constant, so the weighted sum has sensitivity at most C.
                weighted = jax.tree.map(lambda leaf: alpha.astype(leaf.dtype) * leaf, clipped_sum)
            # The privatizer's key lives in its state; the one given here is never used.
            noisy_sum, noise_state = self.mechanism.privatizer(jax.random.key(0)).update(
                weighted, noise_state
            )
            return self.mechanism.mean(noisy_sum), noise_state

        def skip(noise_state):
            return jax.tree.map(jnp.zeros_like, clipped_sum), noise_state

        private_grad, noise_state = jax.lax.cond(alpha > 0, release, skip, state.noise_state)
        noisy_grad_norm = optax.tree.norm(private_grad)
        if self.noisy_clip_norm is not None:
            clip = optax.clip_by_global_norm(self.noisy_clip_norm)
            private_grad, _ = clip.update(private_grad, clip.init(private_grad))

        update, public_loss = private_grad, jnp.full([], jnp.nan)
        if public is not None:
            gradient = public_grad(
                self.public_loss_fn or self.loss_fn,
                batch_size=self.public_batch_size,
                trainable=self._mask,
            )
            key = jax.random.key(0) if public_key is None else public_key
            public_loss, public_gradient = gradient(state.params, public, key)
            update = mix_gradients(
                private_grad, public_gradient, alpha=alpha, scale_noise=self.scale_noise
            )

        part = trainable_part(state.params, self._mask)
        update = jax.tree.map(lambda u, p: u.astype(p.dtype), update, part)
        update, opt_state = self.optimizer.update(update, state.opt_state, part)
        part = optax.apply_updates(part, update)
        params = merge(part, state.params)
        step = state.step + 1
        average = state.average
        if self.average is not None:
            kept = trainable_part(average, self._mask)
            average = merge(self.average.update(kept, part, step), average)
        count = jnp.maximum(unprivatized.batch_size, 1)
        info = StepInfo(
            noisy_grad_norm=noisy_grad_norm.astype(jnp.float32),
            public_loss=public_loss.astype(jnp.float32),
            unprivatized=Unprivatized(
                unprivatized.loss / count,
                unprivatized.clip_fraction / count,
                unprivatized.batch_size,
            ),
        )
        return TrainState(step, params, opt_state, noise_state, average), info


def frozen_mask(trainable: PyTree | None, params: Params) -> Any:
    """A hashable form of a tree (or prefix) of booleans over `params`."""
    if trainable is None:
        return None
    leaves, treedef = jax.tree.flatten(jax.tree.broadcast(trainable, params))
    return treedef, tuple(bool(leaf) for leaf in leaves)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


class _Keys(NamedTuple):
    """Independent randomness for the parts of a run, none of it shared with sampling."""

    noise: jax.Array
    loss: jax.Array
    public: jax.Array


def randomness(seed: int | None) -> tuple[np.random.Generator, _Keys]:
    """A host generator for sampling and keys for everything else, all independent.

    Without a seed the operating system provides the entropy, which is written down nowhere. A run
    with a seed can be repeated by anyone who knows it, noise included: it is not for release.
    """
    entropy = secrets.randbits(128) if seed is None else seed
    sampling, *rest = np.random.SeedSequence(entropy).spawn(4)
    keys = [
        jax.random.wrap_key_data(jnp.asarray(part.generate_state(2)), impl="threefry2x32")
        for part in rest
    ]
    return np.random.default_rng(sampling), _Keys(*keys)


class _Passes(NamedTuple):
    """Inputs of a compiled call: one row per pass, padded with idle passes to a fixed number."""

    indices: Any  # [passes, capacity], PADDING where there is no example
    batch: Any  # the examples themselves where data is streamed, else None
    alpha: Any  # [passes]
    is_active: Any  # [passes] False for idle passes at the end of a call
    is_last: Any  # [passes] True where a step's sum is complete


@functools.partial(jax.jit, static_argnames="train_step")
def _run_passes(
    train_step: TrainStep,
    state: TrainState,
    partial_sum: tuple[PyTree, Unprivatized],
    inputs: _Passes,
    private: Batch | None,
    excluded: jax.Array,
    public: Batch | None,
    keys: _Keys,
):
    """Scans over passes; carries the state and the sum of the step in progress."""
    zero = (train_step.zero_sum(state.params), Unprivatized(*jnp.zeros([3])))
    no_info = StepInfo(jnp.zeros([]), jnp.zeros([]), zero[1])
    takes_key = train_step.clipped_grad.takes_key

    def add_pass(state, partial_sum, x):
        rows = jnp.maximum(x.indices, 0)
        is_padding = (x.indices == PADDING) | excluded[rows]
        batch = x.batch
        if private is not None:
            batch = jax.tree.map(lambda leaf: leaf[rows], private)
        example_keys = None
        if takes_key:
            # Bound to the example, not to its place in the batch: other rows cannot change it.
            step_key = jax.random.fold_in(keys.loss, state.step)
            example_keys = jax.vmap(lambda row: jax.random.fold_in(step_key, row))(rows)
        new = train_step.private_sum(state.params, batch, is_padding, example_keys)
        return jax.tree.map(jnp.add, partial_sum, new)

    def body(carry, x):
        def active(carry):
            state, partial_sum = carry
            partial_sum = jax.lax.cond(
                x.alpha > 0, lambda: add_pass(state, partial_sum, x), lambda: partial_sum
            )

            def finish():
                public_key = jax.random.fold_in(keys.public, state.step)
                new_state, info = train_step.finish(
                    state, partial_sum[0], partial_sum[1], public, x.alpha, public_key
                )
                return (new_state, zero), info

            return jax.lax.cond(x.is_last, finish, lambda: ((state, partial_sum), no_info))

        return jax.lax.cond(x.is_active, active, lambda carry: (carry, no_info), carry)

    (state, partial_sum), infos = jax.lax.scan(body, (state, partial_sum), inputs)
    return state, partial_sum, infos


def train(
    loss_fn: LossFn,
    params: Params,
    private: PrivateData,
    public: PublicData | None = None,
    *,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    alpha: float | Sequence[float] | AlphaSchedule = 1.0,
    num_steps: int | None = None,
    public_loss_fn: LossFn | None = None,
    public_batch_size: int | None = None,
    scale_noise: bool = True,
    noisy_clip_norm: float | None = None,
    average: Average | None = None,
    trainable: PyTree | None = None,
    microbatch_size: int | None = None,
    overlap: Overlap = Overlap.DROP,
    seed: int | None = None,
    steps_per_call: int = 50,
    stream: bool | None = None,
    ledger: Ledger | None = None,
    budget: Budget | None = None,
    checkpoint: Checkpoint | None = None,
    show_unprivatized: bool = False,
) -> Iterator[tuple[TrainState, TrainInfo]]:
    """Trains under the guarantee of `mechanism`; yields `(state, info)` every few steps.

    With the default `alpha=1` this is DP-SGD: cold, or warm if `params` come from
    `mirrordp.warm_start`. With `alpha` below one it is PDA-DPMD in the paper's first-order form.

    Everything is checked, and a mistake raised, before the first row of private data is used. A
    block of steps is charged to `ledger` (or `budget`) before it runs.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, a function of *one* example; optionally with
            a third argument, a random key, for dropout or augmentation.
        params: where to begin; must not come from private data.
        private: the sensitive rows.
        public: the public rows; needed where α < 1.
        mechanism: decides sampling, clipping, noise and cost.
        optimizer: any optax transformation.
        alpha: α_t as a number, a list or a schedule (`mirrordp.schedules`), fixed beforehand.
        num_steps: steps to take; by default as many as the mechanism was made for. Steps with
            α_t = 0 read no private data, are not charged, and do not count against the mechanism.
        public_loss_fn: ℓ_pub, if it differs from `loss_fn`; public rows may then have another
            structure.
        public_batch_size: public rows per step, at random; None takes all of them.
        scale_noise: True for α(g + b), the paper; False for αg + b, the authors' federated code.
        noisy_clip_norm: clip the released gradient to this norm once more.
        average: `UniformAverage()` or `ExponentialAverage(decay)` of the iterates, in
            `state.average`.
        trainable: a tree of booleans over `params` (or a prefix of it); the rest stays frozen.
        microbatch_size: examples whose gradients are in memory at a time.
        overlap: what to do about private rows that equal a public row.
        seed: makes the run reproducible and therefore not for release; by default all randomness
            comes from the operating system.
        steps_per_call: steps per compiled call, and between two yields.
        stream: keep private rows in host memory and send them batch by batch, prepared while the
            device computes; by default only if they do not fit on the device.
        ledger: where to charge; pass one to compose several runs.
        budget: charge to a budget that spans runs instead; the run is refused before any row is
            used if all of it does not fit.
        checkpoint: keep what is needed to go on after a crash, in a folder of the run's own. A
            resumed run first yields the state of its checkpoint once more, and ends as the run
            that was never interrupted, to the bit.
        show_unprivatized: fill `info.unprivatized` with the batch's loss, clip fraction and size,
            which are not covered by the guarantee.

    Returns:
        An iterator of `(TrainState, TrainInfo)`.
    """
    require_private(private)
    _validate.instance_of(Mechanism, "Use Mechanism.calibrate(...).", mechanism=mechanism)
    _validate.instance_of(Overlap, "Use Overlap.DROP.", overlap=overlap)
    _validate.positive_integer(steps_per_call=steps_per_call)
    total = mechanism.num_steps if num_steps is None else num_steps
    _validate.positive_integer(num_steps=total)
    _validate.instance_of(
        optax.GradientTransformation, "Use optax.sgd(...), for one.", optimizer=optimizer
    )
    if average is not None:
        _validate.instance_of((UniformAverage, ExponentialAverage), average=average)
    _check_ledger(ledger, budget, checkpoint, mechanism)
    if noisy_clip_norm is not None:
        _validate.positive(noisy_clip_norm=noisy_clip_norm)
    if public_batch_size is not None:
        _validate.positive_integer(public_batch_size=public_batch_size)
    if microbatch_size is not None:
        _validate.positive_integer(microbatch_size=microbatch_size)
    alphas = schedules.evaluate(schedules.as_schedule(alpha), total)
    _check_charged_steps(alphas, mechanism)
    public_arrays = _check_public(public, alphas, needs_rows=bool((alphas < 1).any()))
    mechanism.check_num_examples(len(private))
    params = jax.tree.map(jnp.asarray, params)
    train_step = TrainStep(
        loss_fn=loss_fn,
        mechanism=mechanism,
        optimizer=optimizer,
        public_loss_fn=public_loss_fn,
        public_batch_size=public_batch_size,
        scale_noise=scale_noise,
        noisy_clip_norm=noisy_clip_norm,
        average=average,
        trainable=frozen_mask(trainable, params),
        microbatch_size=microbatch_size,
        show_unprivatized=show_unprivatized,
    )
    _check_loss("loss_fn", loss_fn, params, private.arrays)
    if public_arrays is not None:
        _check_loss("public_loss_fn", public_loss_fn or loss_fn, params, public_arrays)
    _check_trainable(train_step, params)
    with contextlib.ExitStack() as stack:
        run = None
        if checkpoint is not None:
            file = ledger if isinstance(ledger, FileLedger) else None
            run = checkpoint.open(mechanism.adjacency, ledger=file, budget=budget)
            stack.callback(run.close)
            ledger = run.ledger
        if budget is not None:
            # Before any private row is used: all of the run fits, or none of it begins.
            budget.admit(
                mechanism,
                charged_steps=0 if run is None else run.charged_steps,
                num_steps=int((alphas > 0).sum()),
            )
            budget.check_rows(private)
        excluded = np.zeros(len(private), bool)
        if public is not None and public_loss_fn is None:
            excluded = excluded_rows(private, public, overlap)
        entropy = seed
        if run is not None:
            described = _configuration(
                train_step, params, private, public_arrays, excluded, alphas, steps_per_call,
                run.key,
            )  # fmt: skip
            entropy = run.verify(described, seed)
        rng, keys = randomness(entropy)
        stream = not _fits_on_device(private) if stream is None else stream
        steps = _generate(
            train_step, params, private, public_arrays, excluded, alphas, rng, keys,
            steps_per_call, stream, ledger or Ledger(mechanism.adjacency), budget, run,
            1 if checkpoint is None else checkpoint.every,
        )  # fmt: skip
        stack.pop_all()
    return steps


def _check_ledger(
    ledger: Ledger | None,
    budget: Budget | None,
    checkpoint: Checkpoint | None,
    mechanism: Mechanism,
) -> None:
    if ledger is not None:
        _validate.instance_of(Ledger, "A Budget goes into budget=.", ledger=ledger)
        if budget is not None:
            raise ValueError(
                "a run is charged to a ledger or to a budget, got both. Leave one out."
            )
        if ledger.adjacency is not mechanism.adjacency:
            raise ValueError(
                f"one ledger has one adjacency, got a ledger of {ledger.adjacency.value!r} and a "
                f"mechanism of {mechanism.adjacency.value!r}. Use the same for all runs."
            )
        if checkpoint is not None and not isinstance(ledger, FileLedger):
            raise ValueError(
                "a run with a checkpoint needs a ledger that survives a crash, got one in memory. "
                "Use FileLedger, or leave ledger out for one in the checkpoint's folder."
            )
    if budget is not None:
        _validate.instance_of(Budget, "Use Budget.open(folder, data=...).", budget=budget)
    if checkpoint is not None:
        _validate.instance_of(Checkpoint, "Use Checkpoint(folder).", checkpoint=checkpoint)


def _configuration(
    train_step: TrainStep,
    params: Params,
    private: PrivateData,
    public_arrays: Batch | None,
    excluded: np.ndarray,
    alphas: np.ndarray,
    steps_per_call: int,
    key: bytes,
) -> dict[str, str]:
    """Everything that decides what the run computes, in words or as a fingerprint."""

    def example_of(arrays: Batch) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype)
            ),
            arrays,
        )

    part = trainable_part(params, train_step._mask)
    opt_state = train_step.optimizer.init(part)
    plain = ("public_batch_size", "scale_noise", "noisy_clip_norm", "average", "microbatch_size",
             "show_unprivatized", "trainable")  # fmt: skip
    described = {
        "mechanism": repr(train_step.mechanism),
        "alpha": checkpoints.outline(alphas),
        "steps_per_call": str(steps_per_call),
        "loss_fn": checkpoints.program(
            with_key(train_step.loss_fn), params, example_of(private.arrays), jax.random.key(0)
        ),
        "optimizer": checkpoints.program(train_step.optimizer.update, part, opt_state, part),
        "starting parameters": _fingerprint.of_arrays(key, (params, opt_state)),
        "private data": _fingerprint.of_arrays(key, (private.arrays, excluded)),
        "public data": _fingerprint.of_arrays(key, public_arrays),
        **{name: str(getattr(train_step, name)) for name in plain},
    }
    if train_step.public_loss_fn is not None and public_arrays is not None:
        described["public_loss_fn"] = checkpoints.program(
            with_key(train_step.public_loss_fn), params, example_of(public_arrays),
            jax.random.key(0),
        )  # fmt: skip
    return described


def _generate(
    train_step, params, private, public_arrays, excluded, alphas, rng, keys,
    steps_per_call, stream, ledger, budget, run, every,
) -> Iterator[tuple[TrainState, TrainInfo]]:  # fmt: skip
    mechanism = train_step.mechanism
    name = secrets.token_hex(8) if run is None else run.id
    batches = mechanism.batches(len(private), rng)
    state = train_step.init(params, keys.noise)
    partial_sum = (train_step.zero_sum(params), Unprivatized(*jnp.zeros([3])))
    on_device = None if stream else jax.device_put(private.arrays)
    public_arrays = None if public_arrays is None else jax.device_put(public_arrays)
    excluded_on_device = jax.device_put(excluded)
    host_arrays = private.arrays if stream else None

    def prepare(start: int) -> tuple[list[_Passes], str]:
        block = alphas[start : start + steps_per_call]
        calls = _pack(block, batches, mechanism.sampling.capacity, steps_per_call, host_arrays)
        return calls, _sampling_state(rng)

    def charge(start: int, stop: int) -> None:
        if run is not None:
            # Steps that were charged before a crash are replayed, not charged again.
            start = max(start, run.charged_steps)
        if stop > start:
            charged_to = ledger if budget is None else budget
            event = mechanism.event_between(start, stop)
            charged_to.charge(event, block=Block(name, start, stop))

    with contextlib.ExitStack() as stack:
        begin, charged = 0, 0
        if run is not None:
            stack.callback(run.close)
            if run.saved is None:
                # From here on the run has its randomness, before anything is charged.
                _save(run, state, None, _sampling_state(rng))
            else:
                state, info = _restore(run.saved, state)
                if info is not None:
                    begin, charged = info.step, info.charged_steps
                for _ in range(charged):
                    next(batches)
                if charged and _sampling_state(rng) != run.saved.position["sampling"]:
                    raise checkpoints.CheckpointError(
                        "expected the batches of the run to be drawn again as they were, got "
                        "others. Resume on the machine and with the libraries it began with."
                    )
                if info is not None:
                    yield state, info
                if begin == len(alphas):
                    run.finish()
                    return
        executor = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        upcoming = executor.submit(prepare, begin)
        for start in range(begin, len(alphas), steps_per_call):
            calls, sampling = upcoming.result()
            if start + steps_per_call < len(alphas):
                upcoming = executor.submit(prepare, start + steps_per_call)
            block = alphas[start : start + steps_per_call]
            reads = int((block > 0).sum())
            charge(charged, charged + reads)
            charged += reads
            infos = []
            for inputs in calls:
                state, partial_sum, info = _run_passes(
                    train_step, state, partial_sum, inputs, on_device, excluded_on_device,
                    public_arrays, keys,
                )  # fmt: skip
                infos.append(jax.tree.map(lambda leaf, i=inputs: np.asarray(leaf)[i.is_last], info))
            info = jax.tree.map(lambda *parts: np.concatenate(parts), *infos)
            found = TrainInfo(
                step=start + len(block),
                charged_steps=charged,
                alpha=block,
                noisy_grad_norm=info.noisy_grad_norm,
                public_loss=info.public_loss,
                unprivatized=info.unprivatized if train_step.show_unprivatized else None,
            )
            done = found.step == len(alphas)
            if run is not None and (done or (start // steps_per_call + 1) % every == 0):
                _save(run, state, found, sampling)
            yield state, found
        if run is not None:
            run.finish()


def _sampling_state(rng: np.random.Generator) -> str:
    """A digest of where the sampler's generator stands."""
    state = json.dumps(rng.bit_generator.state, sort_keys=True, default=lambda a: a.tolist())
    return hashlib.sha256(state.encode()).hexdigest()


def _save(run: checkpoints.Run, state: TrainState, info: TrainInfo | None, sampling: str) -> None:
    arrays = checkpoints.to_arrays(state, "state")
    position = {"sampling": sampling, "step": 0, "charged_steps": 0}
    if info is not None:
        position |= {"step": info.step, "charged_steps": info.charged_steps}
        shown = (info.alpha, info.noisy_grad_norm, info.public_loss, info.unprivatized)
        arrays |= checkpoints.to_arrays(shown, "info")
    run.save(position, arrays)


def _restore(saved: checkpoints.Saved, like: TrainState) -> tuple[TrainState, TrainInfo | None]:
    state = checkpoints.from_arrays(like, saved.arrays, "state")
    step = saved.position["step"]
    if step == 0:
        return state, None
    unprivatized: Any = None
    if "info[3].loss" in saved.arrays:
        found: Any = [saved.arrays[f"info[3].{name}"] for name in Unprivatized._fields]
        unprivatized = Unprivatized(*found)
    return state, TrainInfo(
        step=step,
        charged_steps=saved.position["charged_steps"],
        alpha=saved.arrays["info[0]"],
        noisy_grad_norm=saved.arrays["info[1]"],
        public_loss=saved.arrays["info[2]"],
        unprivatized=unprivatized,
    )


def _pack(
    alphas: np.ndarray,
    batches: Iterator[np.ndarray],
    capacity: int,
    passes_per_call: int,
    host_arrays: Batch | None,
) -> list[_Passes]:
    """Draws the batches of a block of steps and lays them out as calls of one fixed shape."""
    indices, alpha, is_last = [], [], []
    for weight in alphas:
        # A step that reads no private data draws no batch either.
        rows = (
            passes(next(batches), capacity) if weight > 0 else np.full((1, capacity), PADDING, "i4")
        )
        indices.extend(rows)
        alpha.extend([weight] * len(rows))
        is_last.extend([False] * (len(rows) - 1) + [True])
    idle = -len(indices) % passes_per_call
    indices = np.concatenate([indices, np.full((idle, capacity), PADDING, "i4")])
    alpha = np.concatenate([alpha, np.zeros(idle)]).astype(np.float32)
    is_last = np.concatenate([is_last, np.zeros(idle, bool)])
    is_active = np.arange(len(indices)) < len(indices) - idle
    calls = []
    for start in range(0, len(indices), passes_per_call):
        part = slice(start, start + passes_per_call)
        rows = np.maximum(indices[part], 0)
        batch = None
        if host_arrays is not None:
            batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], host_arrays)
        calls.append(
            jax.device_put(
                _Passes(indices[part], batch, alpha[part], is_active[part], None)
            )._replace(is_last=is_last[part])
        )
    return calls


def _check_charged_steps(alphas: np.ndarray, mechanism: Mechanism) -> None:
    charged = int((alphas > 0).sum())
    if charged > mechanism.num_steps:
        raise ValueError(
            f"the mechanism was made for {mechanism.num_steps} steps, got a run of {charged} steps "
            "that read private data. Make the mechanism for that many steps."
        )
    if mechanism.noise.num_bands > 1 and charged < len(alphas):
        raise ValueError(
            f"correlated noise needs every step to be a private one, got {len(alphas) - charged} "
            "steps with alpha = 0. Keep alpha above 0, or use GaussianNoise()."
        )


def _check_public(public: PublicData | None, alphas: np.ndarray, needs_rows: bool) -> Batch | None:
    if public is not None:
        require_public(public)
    elif needs_rows:
        raise ValueError(
            f"alpha goes down to {float(alphas.min()):g}, so public data is needed, got none. Pass "
            "public=PublicData(arrays), or alpha=1 for DP-SGD."
        )
    return public.arrays if public is not None and needs_rows else None


def _check_loss(name: str, loss_fn: LossFn, params: Params, arrays: Batch) -> None:
    """Traces the loss on one example's shape, so that mistakes surface before training."""
    example = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype)
        ),
        arrays,
    )
    result = jax.eval_shape(with_key(loss_fn), params, example, jax.random.key(0))
    if getattr(result, "shape", None) != ():
        raise ValueError(
            f"{name}(params, example) must return one scalar for one example, got "
            f"{jax.tree.map(lambda leaf: leaf.shape, result)}. It sees a single example, without a "
            "batch axis."
        )


def _check_trainable(train_step: TrainStep, params: Params) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainable_part(params, train_step._mask)):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"trainable parameters must be floating point, got {leaf.dtype} at "
                f"params{jax.tree_util.keystr(path)}. Exclude it with trainable=."
            )


def _fits_on_device(private: PrivateData) -> bool:
    """Whether the rows take at most half of the memory of the default device."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return limit is None or private.nbytes <= limit / 2
