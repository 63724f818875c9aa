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
import itertools
import operator
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.data import (
    Overlap,
    PrivateClients,
    PrivateData,
    PublicData,
    excluded_rows,
    have_same_structure,
    require_private,
    require_public,
)
from mirrordp.privacy import _isolation
from mirrordp.privacy._convolutions import where_faster
from mirrordp.privacy.clipping import (
    ClippedGrad,
    check_trainable,
    example_key,
    example_of,
    frozen_mask,
    merge,
    thawed_mask,
    trainable_part,
    value_and_grad_program,
    with_key,
    zero_sum,
)
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import interruptible
from mirrordp.privacy.sampling import PADDING, passes
from mirrordp.privacy.secure import SecureRandom
from mirrordp.privacy.sums import ExactSum
from mirrordp.spending import fingerprint as _fingerprint
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger, ledger_for
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.bookkeeping import Books, Kept, check_books
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.types import AlphaSchedule, Batch, LossFn, Params, PyTree
from mirrordp.updates import mix_gradients, schedules
from mirrordp.updates.averages import Average, ExponentialAverage, UniformAverage
from mirrordp.updates.public import public_grad

Prepared = TypeVar("Prepared")


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

    @classmethod
    def zero(cls) -> "Unprivatized":
        """Of nobody, or where nobody asked."""
        return cls(*jnp.zeros([3]))

    @classmethod
    def sums(
        cls, losses: jax.Array, is_clipped: jax.Array, is_padding: jax.Array
    ) -> "Unprivatized":
        """Sums over the records of one pass; `per_record` turns those of a step into means."""
        real = ~is_padding
        return cls(
            loss=jnp.sum(jnp.where(real, losses, 0.0), dtype=jnp.float32),
            clip_fraction=jnp.sum(real & is_clipped, dtype=jnp.float32),
            batch_size=jnp.sum(real, dtype=jnp.float32),
        )

    def per_record(self) -> "Unprivatized":
        """Loss and clip fraction divided by the number of records."""
        count = jnp.maximum(self.batch_size, 1)
        return Unprivatized(self.loss / count, self.clip_fraction / count, self.batch_size)


@dataclasses.dataclass(frozen=True)
class TrainInfo:
    """What may be plotted, one entry per step of the call that just finished.

    Attributes:
        step: steps done so far.
        charged_steps: how many of them read private data, which are those with α_t > 0;
            `mechanism.epsilon(delta, num_steps=charged_steps)` is what they cost, and
            `RunReport.of(mechanism, delta, charged_steps=charged_steps)` reports it.
        alpha: α_t.
        noisy_grad_norm: norm of the released gradient (zero where α_t = 0).
        public_loss: Ψ(θ_t) on the public batch; NaN where no public gradient was computed.
        unprivatized: quantities without noise, if the caller asked for them, else None.
        seeded: whether the run was given a seed, and is therefore not for release.
    """

    step: int
    charged_steps: int
    alpha: np.ndarray
    noisy_grad_norm: np.ndarray
    public_loss: np.ndarray
    unprivatized: Unprivatized | None
    seeded: bool


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
        trainable: frozen form of the tree of booleans; see `mirrordp.privacy.clipping.frozen_mask`.
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

    def __post_init__(self):
        check_options(self, "Use optax.sgd(...), for one.")
        if self.noisy_clip_norm is not None:
            _validate.positive(noisy_clip_norm=self.noisy_clip_norm)
        if self.microbatch_size is not None:
            _validate.positive_integer(microbatch_size=self.microbatch_size)

    @property
    def _mask(self) -> PyTree | None:
        return thawed_mask(self.trainable)

    @property
    def clipped_grad(self) -> ClippedGrad:
        """The clipped sum of the private loss."""
        return self.mechanism.clipped_grad(
            where_faster(self.loss_fn), trainable=self._mask, microbatch_size=self.microbatch_size
        )

    def init(self, params: Params, key: jax.Array) -> TrainState:
        """The state before the first step; `key` seeds the noise and must be secret."""
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=self.optimizer.init(trainable_part(params, self._mask)),
            noise_state=self.mechanism.privatizer(key).init(zero_sum(params, self._mask)),
            average=None if self.average is None else params,
        )

    def nothing_yet(self, params: Params) -> tuple[ExactSum, Unprivatized]:
        """What `private_sum` gives for an empty batch."""
        zeros = zero_sum(params, self._mask)
        return ExactSum.zero(zeros, self.mechanism.l2_clip_norm), Unprivatized.zero()

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
    ) -> tuple[ExactSum, Unprivatized]:
        """The clipped sum of one pass, not yet private, with *sums* of the unprivatized values."""
        clipped_sum, stats = self.clipped_grad.exact_sum(params, batch, is_padding, keys=keys)
        if not self.show_unprivatized:
            return clipped_sum, Unprivatized.zero()
        is_clipped = stats.unprivatized_norms > self.mechanism.l2_clip_norm
        return clipped_sum, Unprivatized.sums(stats.unprivatized_losses, is_clipped, is_padding)

    def finish(
        self,
        state: TrainState,
        clipped_sum: ExactSum,
        unprivatized: Unprivatized,
        public: Batch | None,
        alpha: jax.typing.ArrayLike,
        public_key: jax.Array | None,
    ) -> tuple[TrainState, StepInfo]:
        """Adds the noise to a whole step's sum and takes the step; at α = 0 without either."""
        alpha = jnp.asarray(alpha, jnp.float32)

        def release(noise_state):
            # A public constant of at most 1: the weighted sum has sensitivity at most C.
            weight = None if self.scale_noise else jnp.clip(alpha, 0, 1)
            # The privatizer's key lives in its state; the one given here is never used.
            noisy_sum, noise_state = self.mechanism.privatizer(jax.random.key(0)).update(
                cast(Any, clipped_sum), noise_state, weight=weight
            )
            return self.mechanism.mean(noisy_sum), noise_state

        # Where α = 0 nothing is released and no noise is used up.
        private_grad, noise_state = _select(
            alpha > 0,
            release(state.noise_state),
            (clipped_sum.zeros(), state.noise_state),
        )
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

        step = state.step + 1
        params, opt_state, average = updated(self, state, update, step)
        info = StepInfo(
            noisy_grad_norm=noisy_grad_norm.astype(jnp.float32),
            public_loss=public_loss.astype(jnp.float32),
            unprivatized=unprivatized.per_record(),
        )
        return TrainState(step, params, opt_state, noise_state, average), info


def check_options(step: Any, optimizer_advice: str) -> None:
    """Raises for what is wrong in a `TrainStep` as in a `FederatedStep`."""
    _validate.instance_of(Mechanism, "Use Mechanism.calibrate(...).", mechanism=step.mechanism)
    _validate.instance_of(optax.GradientTransformation, optimizer_advice, optimizer=step.optimizer)
    if step.average is not None:
        _validate.instance_of((UniformAverage, ExponentialAverage), average=step.average)
    if step.public_batch_size is not None:
        _validate.positive_integer(public_batch_size=step.public_batch_size)


def updated(
    train_step: Any, state: Any, update: PyTree, number: jax.Array
) -> tuple[Params, PyTree, Params | None]:
    """What the optimiser makes of a (mixed) gradient: parameters, its state, and their average.

    Args:
        train_step: a `TrainStep`, or the `FederatedStep` of a round.
        state: what was before.
        update: the gradient.
        number: of the new iterate, 1, 2, ...
    """
    trainable = thawed_mask(train_step.trainable)
    part = trainable_part(state.params, trainable)
    update = jax.tree.map(lambda u, p: u.astype(p.dtype), update, part)
    update, opt_state = train_step.optimizer.update(update, state.opt_state, part)
    part = optax.apply_updates(part, update)
    average = state.average
    if train_step.average is not None:
        kept = trainable_part(average, trainable)
        average = merge(train_step.average.update(kept, part, number), average)
    return merge(part, state.params), opt_state, average


def add_sums(
    one: tuple[ExactSum, Unprivatized], other: tuple[ExactSum, Unprivatized]
) -> tuple[ExactSum, Unprivatized]:
    """The sums of two passes together."""
    return one[0] + other[0], jax.tree.map(jnp.add, one[1], other[1])


def _select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """One of two trees, leaf by leaf; leaves that are the same array are left as they are."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


class Keys(NamedTuple):
    """Independent randomness for the parts of a run, none of it shared with sampling."""

    noise: jax.Array
    loss: jax.Array
    public: jax.Array


def randomness(
    seed: int | None, *, secure: bool = False
) -> tuple[np.random.Generator | SecureRandom, Keys]:
    """A host generator for sampling and keys for everything else, all independent.

    Without a seed the operating system provides the entropy, which is written down nowhere. A run
    with a seed can be repeated by anyone who knows it, noise included: it is not for release. A
    secure run has no seed; its noise uses none of the keys.
    """
    if secure and seed is not None:
        raise ValueError(
            f"a run with SecureGaussianNoise draws everything from the operating system and cannot "
            f"be repeated, got seed={seed!r}. Leave seed out, or use GaussianNoise()."
        )
    # NumPy would take a list too, and draw from [5] what it draws from 5.
    entropy = secrets.randbits(128) if seed is None else operator.index(seed)
    sampling, *rest = np.random.SeedSequence(entropy).spawn(4)
    keys = [
        jax.random.wrap_key_data(jnp.asarray(part.generate_state(2)), impl="threefry2x32")
        for part in rest
    ]
    return SecureRandom() if secure else np.random.default_rng(sampling), Keys(*keys)


class Passes(NamedTuple):
    """Inputs of a compiled call: one row per pass, padded with idle passes to a fixed number."""

    indices: Any  # [passes, capacity], PADDING where there is no example
    batch: Any  # the examples themselves where data is streamed, else None
    alpha: Any  # [passes]
    is_last: Any  # [passes] True where a step's sum is complete, never in an idle pass

    def first_run(self) -> "Passes":
        """Of inputs with an axis for runs, those of the first."""
        one = jax.tree.map(lambda leaf: leaf[0], self._replace(is_last=None))
        return one._replace(is_last=self.is_last)


def scan_passes(
    train_step: TrainStep,
    may_skip: bool,
    state: TrainState,
    partial_sum: tuple[ExactSum, Unprivatized],
    inputs: Passes,
    private: Batch | None,
    excluded: jax.Array,
    public: Batch | None,
    keys: Keys,
):
    """Scans over passes; carries the state and the sum of the step in progress.

    What a pass must not touch is put back by selection, not by branching: a branch would make the
    host wait for the device at every step, and under `vmap` it becomes a selection anyway. Only
    where α = 0 occurs (`may_skip`) is there a branch, around the private gradient.
    """
    zero = train_step.nothing_yet(state.params)
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
        return add_sums(partial_sum, new)

    def body(carry, x):
        state, partial_sum = carry
        if may_skip:
            partial_sum = jax.lax.cond(
                x.alpha > 0, lambda: add_pass(state, partial_sum, x), lambda: partial_sum
            )
        else:
            partial_sum = add_pass(state, partial_sum, x)
        public_key = jax.random.fold_in(keys.public, state.step)
        finished, info = train_step.finish(
            state, partial_sum[0], partial_sum[1], public, x.alpha, public_key
        )
        # An idle pass holds padding alone: it adds zero, and is never the last of a step.
        return _select(x.is_last, (finished, zero), (state, partial_sum)), info

    (state, partial_sum), infos = jax.lax.scan(body, (state, partial_sum), inputs)
    return state, partial_sum, infos


_run_passes = jax.jit(scan_passes, static_argnames=("train_step", "may_skip"))


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
        public_batch_size: public rows per step, drawn at random with replacement, where computing
            the gradient of all of them would take too long; None takes all of them. Free of cost.
        scale_noise: True for α(g + b), the paper; False for αg + b, the authors' federated code.
        noisy_clip_norm: clip the released gradient to this norm once more.
        average: `UniformAverage()` or `ExponentialAverage(decay)` of the iterates, in
            `state.average`.
        trainable: a tree of booleans over `params` (or a prefix of it); the rest stays frozen.
        microbatch_size: examples whose gradients are in memory at a time.
        overlap: what to do about private rows that equal a public row. Rows of another structure
            (with `public_loss_fn`) are not compared.
        seed: makes the run reproducible and therefore not for release; by default all randomness
            comes from the operating system.
        steps_per_call: steps between two yields.
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
    check_books(mechanism, ledger, budget, checkpoint)
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
    with contextlib.ExitStack() as stack:
        books: list[Books] = []

        def admit(alphas: np.ndarray) -> None:
            steps = int((alphas > 0).sum())
            books.append(
                Books.open(
                    mechanism, private, num_steps=steps, ledger=ledger, budget=budget,
                    checkpoint=checkpoint,
                )
            )  # fmt: skip
            stack.callback(books[0].close)

        plan = plan_runs(
            train_step, params, private, public, [alpha], num_steps=num_steps, overlap=overlap,
            steps_per_call=steps_per_call, stream=stream, ledger=ledger, admit=admit,
        )  # fmt: skip
        entropy = books[0].verified(functools.partial(_configuration, plan), seed)
        rng, keys = randomness(entropy, secure=mechanism.is_secure)
        steps = _generate(plan, rng, keys, books[0])
        stack.pop_all()  # from here on the generator closes the books
    return steps


# Enough to hide the host behind the device, few enough that idle passes do not cost much.
_MAX_PASSES_PER_CALL = 50


class Plan(NamedTuple):
    """A checked request: all that training needs but randomness. One row of `alphas` per run."""

    train_step: TrainStep
    params: Params
    alphas: np.ndarray
    private: PrivateData
    public_arrays: Batch | None
    excluded: np.ndarray
    steps_per_call: int
    stream: bool

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of every run."""
        return self.train_step.mechanism

    @property
    def may_skip(self) -> bool:
        """Whether a step without private data occurs."""
        return bool((self.alphas == 0).any())

    @property
    def passes_per_call(self) -> int:
        """Passes of one compiled call: what has to be idle in the last one of a block is less."""
        calls = -(-self.steps_per_call // _MAX_PASSES_PER_CALL)
        return -(-self.steps_per_call // calls)

    def on_device(self) -> tuple[Batch | None, jax.Array, Batch | None]:
        """Private rows unless they are streamed, which of them are excluded, and public rows."""
        private = None if self.stream else self.private.arrays
        return jax.device_put((private, self.excluded, self.public_arrays))

    def block(self, start: int) -> np.ndarray:
        """α of the steps of one block."""
        return self.alphas[:, start : start + self.steps_per_call]


def plan_runs(
    train_step: TrainStep,
    params: Params,
    private: PrivateData,
    public: PublicData | None,
    alphas: Sequence[float | Sequence[float] | AlphaSchedule],
    *,
    num_steps: int | None,
    overlap: Overlap,
    steps_per_call: int,
    stream: bool | None,
    ledger: Ledger | None,
    admit: Callable[[np.ndarray], None],
) -> Plan:
    """Checks everything that can be checked before private data is used; see `train`.

    `alphas` holds one α for each run that shares the rest. `admit` is given their values when all
    but the private rows has been checked; it may refuse.
    """
    require_private(private)
    _validate.instance_of(Overlap, "Use Overlap.DROP.", overlap=overlap)
    _validate.positive_integer(steps_per_call=steps_per_call)
    mechanism, loss_fn = train_step.mechanism, train_step.loss_fn
    public_loss_fn = train_step.public_loss_fn
    total = mechanism.num_steps if num_steps is None else num_steps
    _validate.positive_integer(num_steps=total)
    table = np.stack([schedules.evaluate(schedules.as_schedule(a), total) for a in alphas])
    for row in table:
        check_charged_steps(row, mechanism)
    public_arrays = _check_public(public, table, needs_rows=bool((table < 1).any()))
    mechanism.check_num_examples(len(private))
    params = jax.tree.map(jnp.asarray, params)
    check_loss("loss_fn", loss_fn, params, private.arrays)
    if public_arrays is not None:
        check_loss("public_loss_fn", public_loss_fn or loss_fn, params, public_arrays)
    check_trainable(trainable_part(params, train_step._mask))
    check_gradient(loss_fn, params, train_step._mask, private.arrays)
    ledger_for(mechanism.adjacency, ledger)
    admit(table)
    excluded = np.zeros(len(private), bool)
    if public is not None and (public_loss_fn is None or have_same_structure(private, public)):
        excluded = excluded_rows(private, public, overlap)
    stream = not fits_on_device(private) if stream is None else stream
    return Plan(
        train_step=train_step,
        params=params,
        alphas=table,
        private=private,
        public_arrays=public_arrays,
        excluded=excluded,
        steps_per_call=min(steps_per_call, total),
        stream=stream,
    )


def _configuration(plan: Plan, key: bytes) -> dict[str, str]:
    """Everything that decides what the run computes, in words or as a fingerprint."""
    step, params = plan.train_step, plan.params
    described = described_step(step, params, plan.private.arrays, key) | {
        "alpha": checkpoints.outline(plan.alphas[0]),
        "steps_per_call": str(plan.steps_per_call),
        "private data": _fingerprint.of_arrays(key, (plan.private.arrays, plan.excluded)),
        "public data": _fingerprint.of_arrays(key, plan.public_arrays),
    }
    if plan.public_arrays is not None:
        described["public_loss_fn"] = described_loss(
            "public_loss_fn",
            step.public_loss_fn or step.loss_fn,
            params,
            step._mask,
            plan.public_arrays,
        )
    return described


def described_step(step: Any, params: Params, arrays: Batch, key: bytes) -> dict[str, str]:
    """What a `TrainStep` or `FederatedStep` decides of a run that begins at `params`."""
    mask = thawed_mask(step.trainable)
    part = trainable_part(params, mask)
    opt_state = step.optimizer.init(part)
    programs = ("loss_fn", "mechanism", "optimizer", "public_loss_fn")
    names = [field.name for field in dataclasses.fields(step) if field.name not in programs]
    return {
        **checkpoints.fields("mechanism", step.mechanism),
        "loss_fn": described_loss("loss_fn", step.loss_fn, params, mask, arrays),
        "optimizer": checkpoints.program("optimizer", step.optimizer.update, part, opt_state, part),
        "starting parameters": _fingerprint.of_arrays(key, (params, opt_state)),
        **{name: str(getattr(step, name)) for name in names},
    }


def described_loss(
    name: str, loss_fn: LossFn, params: Params, mask: PyTree | None, arrays: Batch
) -> str:
    """The program of a loss and of its gradient, mapped over examples of `arrays`."""
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((_MAPPED, *leaf.shape), leaf.dtype), example_of(arrays)
    )
    keys = jax.random.split(example_key(), _MAPPED)

    def mean_loss(part: PyTree, rest: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        mapped = jax.vmap(with_key(loss_fn), (None, 0, 0))
        return jnp.mean(mapped(merge(part, rest), batch, keys))

    def both(*args: Any) -> tuple[Any, jax.Array]:
        # Custom rules replace a function where there is a gradient; elsewhere it runs itself.
        return jax.value_and_grad(mean_loss)(*args), mean_loss(*args)

    part = trainable_part(params, mask)
    return checkpoints.program(name, both, part, params, batch, keys)


# More than one, so that a batching rule shows.
_MAPPED = 2


def _generate(
    plan: Plan, rng: np.random.Generator | SecureRandom, keys: Keys, books: Books
) -> Iterator[tuple[TrainState, TrainInfo]]:
    train_step, total = plan.train_step, plan.alphas.shape[1]
    with contextlib.closing(books):
        batches = books.batches(len(plan.private), rng)
        state, kept = books.begin(train_step.init(plan.params, keys.noise), batches)
        partial_sum = train_step.nothing_yet(plan.params)
        begin, charged = 0, 0
        if kept is not None:
            begin, charged = kept.step, kept.charged_steps
            shown = info_fields(kept.shown)
            yield state, TrainInfo(begin, charged, **shown, seeded=books.seed is not None)
        arrays = plan.on_device()
        for start, calls in prepared_blocks(plan, [batches], begin):
            block = plan.block(start)[0]
            reads = int((block > 0).sum())
            books.charge(charged, charged + reads)
            charged += reads
            infos = []
            with interruptible():
                for inputs in calls:
                    one = inputs.first_run()
                    state, partial_sum, info = _run_passes(
                        train_step, plan.may_skip, state, partial_sum, one, *arrays, keys
                    )
                    infos.append(info)
                info = whole_steps(calls, infos)
            found = TrainInfo(
                step=start + len(block),
                charged_steps=charged,
                alpha=block,
                noisy_grad_norm=info.noisy_grad_norm,
                public_loss=info.public_loss,
                unprivatized=info.unprivatized if train_step.show_unprivatized else None,
                seeded=books.seed is not None,
            )
            books.keep(
                state,
                Kept(found.step, charged, shown_arrays(found)),
                start // plan.steps_per_call,
                is_last=found.step == total,
            )
            yield state, found
        books.finish()


def shown_arrays(info: Any) -> dict[str, np.ndarray]:
    """The arrays of an info, by name."""
    fields = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    found = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    if info.unprivatized is not None:
        found |= {f"unprivatized.{k}": v for k, v in info.unprivatized._asdict().items()}
    return found


def info_fields(shown: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `shown_arrays`: what to make an info of, besides its counts."""
    names = [f"unprivatized.{name}" for name in Unprivatized._fields]
    unprivatized: Any = [shown[name] for name in names if name in shown]
    plain = {name: array for name, array in shown.items() if name not in names}
    return plain | {"unprivatized": Unprivatized(*unprivatized) if unprivatized else None}


def prepared_blocks(
    plan: Plan, batches: Sequence[Iterator[np.ndarray]], begin: int = 0
) -> Iterator[tuple[int, list[Passes]]]:
    """The first step of each block and its inputs, drawn while the device is busy with the last."""
    host_arrays = plan.private.arrays if plan.stream else None

    def prepare(start: int) -> list[Passes]:
        capacity = plan.mechanism.sampling.capacity
        return pack(plan.block(start), batches, capacity, plan.passes_per_call, host_arrays)

    return prepared_ahead(prepare, range(begin, plan.alphas.shape[1], plan.steps_per_call))


def prepared_ahead(
    prepare: Callable[[int], Prepared], starts: range
) -> Iterator[tuple[int, Prepared]]:
    """Each start with what `prepare` makes of it, in order, one ahead of who iterates."""
    if not starts:
        return
    executor = ThreadPoolExecutor(max_workers=1)
    try:
        upcoming = executor.submit(prepare, starts[0])
        for start, following in itertools.zip_longest(starts, starts[1:]):
            prepared = upcoming.result()
            if following is not None:
                upcoming = executor.submit(prepare, following)
            yield start, prepared
    finally:
        # A run that was left unfinished may end with the interpreter, when no thread can be joined.
        executor.shutdown(wait=not sys.is_finalizing())


def pack(
    alphas: np.ndarray,
    batches: Sequence[Iterator[np.ndarray]],
    capacity: int,
    passes_per_call: int,
    host_arrays: Batch | None,
) -> list[Passes]:
    """Draws the batches of a block of steps and lays them out as calls of one fixed shape.

    Several runs go in step: where one needs a further pass, the others pad. Leaves have an axis for
    runs first, except `is_last`, which is the same for all of them.

    Args:
        alphas: α of the block's steps, one row per run.
        batches: for each run, the draws to come.
        capacity: rows of one pass.
        passes_per_call: passes of one compiled call; where they are not enough, another call is
            filled up with idle passes.
        host_arrays: private rows, where they are sent batch by batch.
    """
    steps = []
    for weights in alphas.T:
        # A step that reads no private data draws no batch either.
        draws = [
            passes(next(draw) if weight > 0 else np.zeros(0, "i4"), capacity)
            for weight, draw in zip(weights, batches, strict=True)
        ]
        rows = np.full((len(draws), max(map(len, draws)), capacity), PADDING, "i4")
        for run, draw in enumerate(draws):
            rows[run, : len(draw)] = draw
        steps.append((rows, weights))
    lengths = np.asarray([rows.shape[1] for rows, _ in steps])
    indices = np.concatenate([rows for rows, _ in steps], axis=1)
    alpha = np.repeat(np.stack([weights for _, weights in steps], axis=1), lengths, axis=1)
    is_last = np.zeros(indices.shape[1], bool)
    is_last[np.cumsum(lengths) - 1] = True

    idle = -len(is_last) % passes_per_call
    indices = np.pad(indices, ((0, 0), (0, idle), (0, 0)), constant_values=PADDING)
    alpha = np.pad(alpha, ((0, 0), (0, idle)), "edge")
    is_last = np.pad(is_last, (0, idle))
    calls = []
    for start in range(0, len(is_last), passes_per_call):
        part = slice(start, start + passes_per_call)
        rows = indices[:, part]
        batch = None
        if host_arrays is not None:
            batch = jax.tree.map(lambda leaf, rows=rows: leaf[np.maximum(rows, 0)], host_arrays)
        # `is_last` stays on the host: it also says which results are those of a whole step.
        rows, batch, weights = jax.device_put((rows, batch, alpha[:, part]))
        calls.append(Passes(rows, batch, weights, is_last[part]))
    return calls


def whole_steps(calls: Sequence[Any], infos: Sequence[Any]) -> Any:
    """Of what the passes of several calls report, the part that belongs to whole steps."""
    kept = [
        jax.tree.map(lambda leaf, call=call: np.asarray(leaf)[..., call.is_last], info)
        for call, info in zip(calls, infos, strict=True)
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=-1), *kept)


def check_charged_steps(alphas: np.ndarray, mechanism: Mechanism) -> None:
    """Raises unless the mechanism was made for as many steps as read private data."""
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


def check_loss(name: str, loss_fn: LossFn, params: Params, arrays: Batch) -> None:
    """Traces the loss on one example's shape, so that mistakes surface before training."""
    example = example_of(arrays)
    try:
        result = jax.eval_shape(with_key(loss_fn), params, example, example_key())
    except Exception as error:
        # Most often the loss was written for a batch, and what JAX says of that is no help.
        shapes = jax.tree.map(lambda leaf: leaf.shape, (params, example))
        error.add_note(
            f"mirrordp called {name}(params, example) for a single example, without a batch axis; "
            "the shapes of params and example were {} and {}.".format(*shapes)
        )
        raise
    if getattr(result, "shape", None) != ():
        raise ValueError(
            f"{name}(params, example) must return one scalar for one example, got "
            f"{jax.tree.map(lambda leaf: leaf.shape, result)}. It sees a single example, without a "
            "batch axis."
        )


def check_gradient(loss_fn: LossFn, params: Params, mask: PyTree | None, arrays: Batch) -> None:
    """Refuses a gradient that could see other examples; warns where there is none.

    The gradient is read as a program, before it runs. `stop_gradient` freezes no parameter here,
    and neither do running averages of normalisation layers stay what they are: what is in `params`
    gets noise. A gradient that is zero for another reason than a missing dependence is not noticed.
    """
    traced = value_and_grad_program(loss_fn, params, mask, example_of(arrays), example_key())
    _isolation.check("the loss function", traced)
    warn_of_unused(traced, trainable_part(params, mask))


def warn_of_unused(traced: core.ClosedJaxpr, part: PyTree) -> None:
    """Warns of trainable parameters that the loss has no gradient in: noise alone moves them.

    Args:
        traced: the program of the loss and its gradient.
        part: the trainable parameters.
    """
    sources = {id(out): equation for equation in traced.eqns for out in equation.outvars}

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, core.Literal):
            return bool(np.all(atom.val == 0))
        equation = sources.get(id(atom))
        if equation is None or equation.primitive.name != "broadcast_in_dim":
            return False
        return is_zero(equation.invars[0])

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(part)]
    unused = [
        f"params{jax.tree_util.keystr(path)}"
        for path, gradient in zip(paths, traced.jaxpr.outvars[1:-1], strict=True)
        if is_zero(gradient)
    ]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        warn(
            f"the loss has no gradient in {', '.join(unused[:5])}{more}: noise alone will move it. "
            "Exclude it with trainable=, or keep it out of params.",
        )


def fits_on_device(private: PrivateData | PrivateClients) -> bool:
    """Whether the rows take at most half of the memory of the default device."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return limit is None or private.nbytes <= limit / 2
