"""The only training loop: it takes a `Step` and knows nothing of examples or users.

    checks  →  randomness on disk  →  for each block of steps: draw, charge, compute, keep, yield

Compiled code sees *passes*: rows of `step.pass_size` record numbers. A step's sum is complete after
its last pass, and only then is the noise added, once. A draw above the capacity takes further
passes of the same shape, so nothing is dropped and nothing is compiled twice.

Several runs (`mirrordp.train_sweep`) are a leading axis of the same program. Several devices are a
matter of `mirrordp.training.placement`.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _validate
from mirrordp.data import Overlap
from mirrordp.data.sources import in_memory, on_disk
from mirrordp.privacy.clipping import example_key, example_of, with_key
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import interruptible
from mirrordp.privacy.sampling import PADDING, passes
from mirrordp.privacy.secure import SecureRandom
from mirrordp.spending import fingerprint as _fingerprint
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.bookkeeping import (
    PRIVATE_RECORDS,
    Books,
    Kept,
    SharedBooks,
    check_shared,
    check_spend,
)
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.training.placement import (
    Layout,
    Placement,
    off_mesh,
    on_mesh,
    placement_for,
    rows_per_shard,
)
from mirrordp.training.processes import Group, described_split, on_host
from mirrordp.training.step import (
    Private,
    PrivateSum,
    Public,
    PublicGradient,
    State,
    Step,
    StepInfo,
    TrainInfo,
    check_loss,
    info_of_run,
    needs_public_grad,
    record_keys,
    select,
    shown_arrays,
)
from mirrordp.types import AlphaSchedule, Batch, LossFn, Params, PyTree
from mirrordp.updates import schedules

Alpha = float | Sequence[float] | AlphaSchedule

# Enough to hide the host behind the device, few enough that idle passes do not cost much.
_MAX_PASSES_PER_CALL = 50

# Streamed records of one compiled call, in bytes, unless one pass alone has more. Three calls have
# theirs in memory at a time: one computes, one waits, and one is being read.
_MAX_STREAMED = 2**27


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a run is driven. No option changes what is computed, or what it costs.

    Args:
        steps_per_call: how many steps lie between two yields; by default what suits the step.
        stream: keeps private records in host memory or on disk and sends them pass by pass, read
            while the device computes; by default if they are on disk (memory maps and other
            sources) or do not fit on the device.
        overlap: what happens to private records that are public too. Rows of another structure
            (with `public_loss_fn`) are not compared; users are compared by name.
        shards: the number of parts into which private records are cut, one or more for each device
            of a mesh; by default, one. With equally many shards, clipped sums are the same on every
            mesh, on CPUs to the bit; what follows the noise may be rounded differently. With other
            numbers of shards, sums are rounded differently too.
    """

    steps_per_call: int | None = None
    stream: bool | None = None
    overlap: Overlap = Overlap.DROP
    shards: int | None = None

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.instance_of(Overlap, "Use Overlap.DROP.", overlap=self.overlap)
        if self.steps_per_call is not None:
            _validate.positive_integer(steps_per_call=self.steps_per_call)
        if self.shards is not None:
            _validate.positive_integer(shards=self.shards)


class SweepRun(NamedTuple):
    """What sets one run of a sweep apart.

    Attributes:
        alpha: α_t, as in `mirrordp.train`.
        hyperparams: settings of the optimiser by name, for an optimiser that keeps them in its
            state (`optax.inject_hyperparams`).
        params: where this run begins, if not at the common start.
        seed: as in `mirrordp.train`.
    """

    alpha: Alpha = 1.0
    hyperparams: Mapping[str, float] = {}
    params: Params | None = None
    seed: int | None = None


def train(
    step: Step,
    params: Params,
    private: Private,
    public: Public | None = None,
    *,
    alpha: Alpha = 1.0,
    num_steps: int | None = None,
    seed: int | None = None,
    spend: Ledger | Budget | None = None,
    checkpoint: Checkpoint | None = None,
    state: State | None = None,
    mesh: jax.sharding.Mesh | None = None,
    options: TrainOptions = TrainOptions(),
) -> Iterator[tuple[Any, TrainInfo]]:
    """Trains under the guarantee of `step.mechanism`; yields `(state, info)` every few steps.

    `mirrordp.train` describes the arguments, and calls this function if it is given a step.
    """
    run = SweepRun(alpha=alpha, seed=seed)
    blocks = start(
        step, params, private, public, [run], num_steps=num_steps, spend=spend,
        checkpoint=checkpoint, given=state, mesh=mesh, options=options,
    )  # fmt: skip
    return _only_run(blocks)


def _only_run(
    blocks: Iterator[tuple[Any, list[TrainInfo]]],
) -> Iterator[tuple[Any, TrainInfo]]:
    with contextlib.closing(blocks):  # pyright: ignore[reportArgumentType]
        for state, (info,) in blocks:
            yield state, info


class Keys(NamedTuple):
    """Independent randomness for the parts of a run, none of it shared with sampling."""

    noise: jax.Array
    loss: jax.Array
    public: jax.Array


def randomness(
    seed: int | None, *, secure: bool = False
) -> tuple[np.random.Generator | SecureRandom, Keys]:
    """Returns a host generator for sampling and keys for everything else, all independent.

    Without a seed the operating system provides the entropy, which is written down nowhere. Anyone
    who knows the seed of a run can repeat it, noise included, so such a run is not for release. A
    secure run has no seed, and its noise uses none of the keys.
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


class _Plan(NamedTuple):
    """A checked request: everything that training needs except randomness."""

    step: Step
    params: Params
    runs: Sequence[SweepRun]
    alphas: np.ndarray  # [runs, steps]
    private: Private
    public: Public | None
    needs_public_grad: bool
    excluded: np.ndarray
    steps_per_call: int
    stream: bool
    is_sweep: bool
    placement: Placement | None = None
    layout: Layout | None = None
    group: Group | None = None
    counts: Sequence[int] = ()  # the number of private records of each process

    @property
    def first(self) -> int:
        """The number of the first private record of this process among those of all."""
        return 0 if self.group is None else sum(self.counts[: self.group.index])

    def local(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the numbers of records of this process as it numbers them itself."""
        if self.first == 0:
            return numbers
        return np.where(numbers == PADDING, PADDING, numbers - self.first)

    @property
    def may_skip(self) -> bool:
        """Whether a pass may have no private records to compute."""
        return self.step.branches or bool((self.alphas == 0).any())

    @property
    def passes_per_call(self) -> int:
        """The passes of one compiled call, chosen so that few are idle in a block's last call."""
        if self.placement is None or self.layout is None:
            capacity, size = self.step.mechanism.sampling.capacity, self.step.pass_size
        else:
            capacity = rows_per_shard(self.step.mechanism, self.placement.shards)
            size = self.layout.size
        per_step = -(-capacity // size)
        wanted = self.steps_per_call * per_step
        most = _MAX_PASSES_PER_CALL
        if self.stream:
            shards = 1 if self.placement is None else self.placement.shards
            per_pass = len(self.runs) * shards * size * self._record_bytes
            most = max(1, min(most, _MAX_STREAMED // max(1, per_pass)))
        calls = -(-wanted // most)
        return -(-wanted // calls)

    @property
    def _record_bytes(self) -> int:
        """The size of one record as `Step.take` returns it, padding included."""
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            self.step.records(self.private),
        )
        one = jax.eval_shape(self.step.take, like, jax.ShapeDtypeStruct((1,), jnp.int32))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))

    def on_device(self) -> tuple[PyTree | None, PyTree | None]:
        """Private records unless they are streamed, and public records."""
        private = None if self.stream else self.step.records(self.private)
        public = None if self.public is None else self.step.records(self.public)
        if self.placement is None or self.layout is None:
            return jax.device_put((in_memory(private), public))
        if private is not None:
            private = self.placement.put_records(self.step, private, self.layout, self.group)
        return private, self.placement.put(public)

    def passes(self, draw: np.ndarray, *salt: int) -> np.ndarray:
        """Returns the records of one draw by pass, and by shard if there are several.

        Records that are left out become padding where they are, so that no other record moves. Of
        several processes, each knows how many passes all shards need, and gets its own shards.
        """
        order = functools.partial(self.step.ordered, private=self.private)
        if self.layout is None or self.placement is None:
            rows = passes(order(draw), self.step.pass_size)
        elif self.group is None:
            rows = self.layout.passes(draw, order, *salt)
        else:
            rows = self.layout.passes(draw, self._order_own, *salt)[:, self.placement.own_shards]
        return np.where((rows != PADDING) & self.excluded[self.local(rows)], PADDING, rows)

    def _order_own(self, numbers: np.ndarray) -> np.ndarray:
        """Orders records of one shard; those of other processes stay as they are."""
        if len(numbers) == 0 or not 0 <= numbers[0] - self.first < len(self.private):
            return numbers
        return self.step.ordered(numbers - self.first, self.private) + self.first

    def block(self, start: int) -> np.ndarray:
        """α of the steps of one block."""
        return self.alphas[:, start : start + self.steps_per_call]


def start(
    step: Step,
    params: Params,
    private: Private,
    public: Public | None,
    runs: Sequence[SweepRun],
    *,
    num_steps: int | None,
    spend: Ledger | Budget | None,
    checkpoint: Checkpoint | None,
    options: TrainOptions,
    given: State | None = None,
    mesh: jax.sharding.Mesh | None = None,
    is_sweep: bool = False,
) -> Iterator[tuple[Any, list[TrainInfo]]]:
    """Checks a request, opens its books, and returns the blocks of its runs; see `train`.

    All that does not need private records is checked first; then the books are opened, where a
    budget may refuse; only then are private records compared with public ones.
    """
    _check_kinds(step, options)
    placement = placement_for(mesh, options.shards)
    group = None
    if placement is not None and placement.spans_processes:
        group = Group()
    with contextlib.nullcontext() if group is None else group.telling():
        return _start(
            step, params, private, public, runs, placement, group, num_steps=num_steps, spend=spend,
            checkpoint=checkpoint, options=options, given=given, is_sweep=is_sweep,
        )  # fmt: skip


def _start(
    step: Step,
    params: Params,
    private: Private,
    public: Public | None,
    runs: Sequence[SweepRun],
    placement: Placement | None,
    group: Group | None,
    *,
    num_steps: int | None,
    spend: Ledger | Budget | None,
    checkpoint: Checkpoint | None,
    options: TrainOptions,
    given: State | None,
    is_sweep: bool,
) -> Iterator[tuple[Any, list[TrainInfo]]]:
    """Does what `start` says, with the devices and processes known."""
    mechanism = step.mechanism
    if group is None or group.is_first:
        check_spend(mechanism, spend, checkpoint)
    total = mechanism.num_steps if num_steps is None else num_steps
    _validate.positive_integer(num_steps=total)
    total = int(total)
    alphas = np.stack([schedules.evaluate(schedules.as_schedule(run.alpha), total) for run in runs])
    for row in alphas:
        check_charged_steps(row, mechanism)
    if placement is not None:
        placement.check(mechanism, len(private))
    if group is not None:
        check_shared(group, mechanism, spend)
    with on_mesh(placement):
        params = _placed(params, placement)
        step.check(params, private, public)
        gather = None if group is None else group.gather
        counts = [len(private)] if gather is None else gather(len(private))
        mechanism.check_num_examples(sum(counts))
        if group is not None:
            group.compare(_forms(private, public))
        needs_grad = needs_public_grad(step, params, has_public=public is not None)
        reads_public = needs_grad or bool((alphas < 1).any())
        if reads_public:
            _check_public(step, params, public, alphas, needs_grad=needs_grad)
        first = _check_state(given, runs, checkpoint, alphas)
        starts = [_starting_point(step, params, run, placement) for run in runs]
        step = step.fitted(params, private, gather=gather)
    with on_mesh(placement), contextlib.ExitStack() as stack:
        open_books = Books.open
        if group is not None:
            open_books = functools.partial(SharedBooks.open, group)
        books = open_books(
            mechanism,
            private,
            num_steps=[int(count) for count in (alphas > 0).sum(axis=1)],
            seeds=[run.seed for run in runs],
            spend=spend,
            checkpoint=checkpoint,
            first=first,
        )
        stack.callback(books.close)
        plan = _Plan(
            step=step,
            params=params,
            runs=runs,
            alphas=alphas,
            private=private,
            public=public if reads_public else None,
            needs_public_grad=needs_grad,
            excluded=step.excluded(private, public, options.overlap, gather=gather),
            steps_per_call=min(options.steps_per_call or step.steps_per_call, total),
            stream=_streams(private, placement) if options.stream is None else options.stream,
            is_sweep=is_sweep,
            placement=placement,
            group=group,
            counts=counts,
        )
        entropies = books.verified(functools.partial(_configuration, plan, starts, given))
        random = [randomness(entropy, secure=mechanism.is_secure) for entropy in entropies]
        if placement is not None:
            plan = plan._replace(layout=_layout(plan, placement, entropies[0]))
        blocks = _generate(plan, starts, given, random, books)
        stack.pop_all()  # from here on the generator closes the books
    return blocks


def _placed(params: Params, placement: Placement | None) -> Params:
    params = jax.tree.map(jnp.asarray, params)
    return jax.tree.map(off_mesh, params) if placement is None else placement.put_params(params)


def _layout(plan: _Plan, placement: Placement, entropy: int | None) -> Layout:
    step = plan.step
    return Layout.of(
        step.mechanism,
        plan.counts,
        placement.shards_of_processes,
        size=min(step.pass_size, rows_per_shard(step.mechanism, placement.shards)),
        entropy=secrets.randbits(128) if entropy is None else entropy,
        first=plan.first,
    )


def _check_public(
    step: Step, params: Params, public: Public | None, alphas: np.ndarray, *, needs_grad: bool
) -> None:
    if public is None:
        reason = f"alpha goes down to {float(alphas.min()):g}"
        if needs_grad:
            reason = f"the {'chart' if step.prepares else 'optimizer'} takes a public gradient"
        raise ValueError(
            f"{reason}, so public data is needed, got none. Pass public=..., or train on private "
            "data alone: alpha=1, with an optimizer of private gradients."
        )
    check_loss("public_loss_fn", step.public_loss_fn or step.loss_fn, params, public.arrays)


def _check_kinds(step: Any, options: Any) -> None:
    if not hasattr(step, "private_sum"):
        raise TypeError(
            f"step must be a TrainStep or a FederatedStep, got {type(step).__name__}. Put the loss "
            "into one: TrainStep(loss_fn, mechanism, optimizer)."
        )
    _validate.instance_of(TrainOptions, "Use TrainOptions(stream=...).", options=options)


def _check_state(
    given: State | None,
    runs: Sequence[SweepRun],
    checkpoint: Checkpoint | None,
    alphas: np.ndarray,
) -> int:
    """Returns how many charged steps lie before the state that the run goes on from."""
    if given is None:
        return 0
    if runs[0].seed is None:
        raise ValueError(
            "to go on from a state the run needs the seed it began with, got seed=None: other "
            "draws would follow than the ones that the state belongs to."
        )
    if checkpoint is not None:
        raise ValueError("a run goes on from a state or a checkpoint, got both. Leave one out.")
    return int((alphas[0, : int(given.step)] > 0).sum())


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


class _Start(NamedTuple):
    params: Params
    opt_state: PyTree


def _starting_point(
    step: Step, params: Params, run: SweepRun, placement: Placement | None = None
) -> _Start:
    if run.params is not None:
        own = _placed(run.params, placement)
        if jax.tree.map(jnp.shape, own) != jax.tree.map(jnp.shape, params):
            raise ValueError(
                "the params of a run must have the structure and shapes of the common params, got "
                f"{jax.tree.map(jnp.shape, own)}. Give every run the same network."
            )
        params = own
    opt_state = step.optimizer.init(step.trainable.part(params))
    if not run.hyperparams:
        return _Start(params, opt_state)
    try:
        changed = optax.tree.set(opt_state, **dict(run.hyperparams))
    except KeyError as error:
        raise ValueError(
            f"the optimiser keeps no setting of the names {sorted(run.hyperparams)} in its state. "
            "Make it with optax.inject_hyperparams, e.g. "
            "optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)."
        ) from error

    # A mirror map in the state keeps its float64, which JAX alone would warn of.
    def as_before(new: Any, old: Any) -> Any:
        return old if new is old else jnp.asarray(new, old.dtype)

    return _Start(params, jax.tree.map(as_before, changed, opt_state))


# The compiled part.


class _Passes(NamedTuple):
    """Inputs of a compiled call: one row per pass, padded with idle passes to a fixed number.

    Leaves have an axis for runs first, except `is_last`, which all runs share. With several shards,
    an axis for shards follows that for passes.
    """

    numbers: Any  # [passes, pass_size] of records, PADDING where there is none
    places: Any  # where these records lie on their device, if there are several shards
    batch: Any  # the records themselves where they are streamed, otherwise None
    alpha: Any  # [passes], 0 in an idle pass
    is_last: Any  # [passes] True where a step's sum is complete, never in an idle pass


def _scan_passes(
    step: Step,
    may_skip: bool,
    needs_public_grad: bool,
    placement: Placement | None,
    state: State,
    partial_sum: PrivateSum,
    inputs: _Passes,
    private: PyTree | None,
    public: PyTree | None,
    keys: Keys,
) -> tuple[State, PrivateSum, StepInfo]:
    """Scans over passes; carries the state and the sum of the step in progress.

    What a pass must not touch is put back by selection unless the step asks for branches; only
    where α = 0 occurs (`may_skip`) is there always a branch, around the private sum.
    """
    zero = jax.tree.map(jnp.zeros_like, partial_sum)

    def add_pass(state, partial_sum, x):
        # Keys are bound to a record, not to its place in the batch: others cannot change them.
        step_key = jax.random.fold_in(keys.loss, state.step)
        if placement is not None:
            return placement.private_sum(step, state, partial_sum, x, private, step_key)
        batch = x.batch if private is None else step.take(private, x.numbers)
        is_padding = x.numbers == PADDING
        new = step.private_sum(state, batch, is_padding, record_keys(step_key, x.numbers))
        return partial_sum + new

    def public_side(state, alpha):
        def compute():
            found = step.public_grad(state, public, jax.random.fold_in(keys.public, state.step))
            return found._replace(loss=found.loss.astype(jnp.float32))

        if public is None:
            return None
        if needs_public_grad or not step.branches:
            return compute()
        # At α = 1 the public gradient has no weight, so it is not computed.
        nothing = PublicGradient(step.trainable.zero_sum(state.params), jnp.full([], jnp.nan))
        return jax.lax.cond(alpha < 1, compute, lambda: nothing)

    def body(carry, x):
        state, partial_sum = carry
        prepared, public_gradient = state, None
        if step.prepares:
            # Every pass of a step prepares it anew, from the same state and with the same key.
            public_gradient = public_side(state, x.alpha)
            assert public_gradient is not None
            prepared = step.prepare(state, public_gradient)
        if may_skip:
            partial_sum = jax.lax.cond(
                x.alpha > 0, lambda: add_pass(prepared, partial_sum, x), lambda: partial_sum
            )
        else:
            partial_sum = add_pass(prepared, partial_sum, x)

        def finish():
            total = partial_sum
            if placement is not None:
                total = placement.total(step, prepared, partial_sum)
            # The optimiser may show what it is given: not the sum of half a step under the noise of
            # the whole one. At α = 0 it gets neither.
            alpha = x.alpha if step.branches else jnp.where(x.is_last, x.alpha, 0)
            found = public_gradient if step.prepares else public_side(state, x.alpha)
            finished, info = step.finish(prepared, total, found, alpha)
            return (finished, zero), info

        if step.branches:
            found, info = jax.lax.cond(
                x.is_last, finish, lambda: ((state, partial_sum), StepInfo.zero())
            )
        else:
            finished, info = finish()
            found = select(x.is_last, finished, (state, partial_sum))
        if placement is not None:
            found = (placement.kept(found[0]), found[1])
        return found, info

    (state, partial_sum), infos = jax.lax.scan(body, (_strong(state), partial_sum), inputs)
    state = _strong(state)
    if placement is not None:
        state, infos = placement.kept(state), placement.seen(infos)
    return state, partial_sum, infos


@functools.partial(jax.jit, static_argnames=("step", "may_skip", "needs_public_grad", "placement"))
def _run_passes(
    step, may_skip, needs_public_grad, placement, state, partial_sum, inputs, private, public, keys
):
    """`_scan_passes` for every run; what a single run carries has no axis for runs."""
    scan = functools.partial(_scan_passes, step, may_skip, needs_public_grad, placement)
    own = inputs._replace(is_last=None)
    if inputs.alpha.shape[0] == 1:
        # Mapping over an axis of length one would only cost.
        only = jax.tree.map(lambda leaf: leaf[0], own)._replace(is_last=inputs.is_last)
        return scan(state, partial_sum, only, private, public, keys)
    # `is_last` belongs to all runs: mapped over, it would turn one selection into many.
    axes = (0, 0, jax.tree.map(lambda _: 0, own), None, None, 0)
    return jax.vmap(scan, in_axes=axes)(state, partial_sum, inputs, private, public, keys)


# The loop.


def _generate(
    plan: _Plan,
    starts: Sequence[_Start],
    given: State | None,
    random: Sequence[tuple[np.random.Generator | SecureRandom, Keys]],
    books: Books | SharedBooks,
) -> Iterator[tuple[Any, list[TrainInfo]]]:
    step, total = plan.step, plan.alphas.shape[1]
    telling = contextlib.nullcontext()
    if plan.group is not None:
        telling = plan.group.telling(is_running=True)
    with contextlib.closing(books), telling:
        batches = books.batches(sum(plan.counts), [rng for rng, _ in random])
        keys = _stacked([keys for _, keys in random])
        placement, make = plan.placement, functools.partial(_first_state, step)
        if placement is not None:
            placement = placement.with_specs(_like_first(step, starts[0], random[0][1].noise))
            make = functools.partial(placement.made, make)
        states = [make(start, own.noise) for start, (_, own) in zip(starts, random, strict=True)]
        partial_sum = _stacked([step.zero_sum(states[0])] * len(states))
        if placement is not None:
            partial_sum = placement.put_sum(partial_sum, is_stacked=len(states) > 1)
            if placement.spans_processes:
                keys = placement.put(keys)
        begin = 0
        if given is None:
            state, kept = books.begin(_stacked(states), batches)
            if kept is not None:
                begin = kept.step
                state = _in_place(placement, state, len(states))
                yield _shown(plan, state), _infos(kept, total, books.seeds)
        else:
            state, begin = given, int(given.step)
            before = int((plan.alphas[0, :begin] > 0).sum())
            _check_chart(step, states[0], given)
            _check_noise_state(step, states[0], before, given)
            # Another run from this state would have the same noise.
            books.claim()
            for _ in range(before):
                next(batches[0])
        charged = (plan.alphas[:, :begin] > 0).sum(axis=1)
        state = _in_place(placement, state, len(states))
        arrays = plan.on_device()
        calls = _prepared_calls(plan, batches, begin)
        for start in range(begin, total, plan.steps_per_call):
            block = plan.block(start)
            before, charged = charged, charged + (block > 0).sum(axis=1)
            books.charge(before, charged)
            infos, is_last = [], []
            with interruptible(), on_mesh(placement):
                for inputs in _until_end(calls):
                    if plan.stream and infos:
                        # Otherwise the records of all calls of a block would be in memory.
                        jax.block_until_ready(infos[-1])
                    state, partial_sum, info = _run_passes(
                        step, plan.may_skip, plan.needs_public_grad, placement, state, partial_sum,
                        inputs, *arrays, keys,
                    )  # fmt: skip
                    infos.append(info)
                    is_last.append(inputs.is_last)
                    del inputs
                info = _whole_steps(is_last, infos)
            shown = shown_arrays(info, unprivatized=step.show_unprivatized) | {"alpha": block}
            kept = Kept(start + block.shape[1], tuple(int(count) for count in charged), shown)
            books.keep(state, kept, start // plan.steps_per_call, is_last=kept.step == total)
            yield _shown(plan, state), _infos(kept, total, books.seeds)
        books.finish()


def _check_chart(step: Step, first: State, given: State) -> None:
    """Raises a ValueError unless a state was made with the step's chart."""
    ours, theirs = (getattr(state, "chart", None) for state in (first, given))
    is_same = jax.tree.structure(ours) == jax.tree.structure(theirs) and (
        jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, theirs)
    )
    chart = getattr(step, "chart", None)
    if is_same and chart is not None and chart.prepare is None:
        pairs = zip(*map(jax.tree.leaves, on_host((ours, theirs))), strict=True)
        is_same = all(np.array_equal(one, other) for one, other in pairs)
    if not is_same:
        raise ValueError(
            "expected a state of a run with the chart of this step, got one that was made with "
            "another chart, or with none. Go on with the same chart, or begin anew from its params."
        )


def _check_noise_state(step: Step, first: State, charged_steps: int, given: State) -> None:
    """Raises a ValueError unless a state's noise is that of the run's seed after so many steps.

    The run that the state is from, with another seed or none, would have the same noise from there
    on, and other batches under it.
    """

    @jax.jit
    def advanced(state: State) -> PyTree:
        total = step.zero_sum(state).total

        leaves, tree = jax.tree.flatten(state.noise_state)
        floating = [_is_floating(leaf) for leaf in leaves]

        def add(_: Any, found: list[Any]) -> list[Any]:
            # Keys do not depend on earlier noise, which the compiler therefore leaves out.
            whole = [a if kept else b for a, b, kept in zip(leaves, found, floating, strict=True)]
            noise_state = step.mechanism.add_noise(total, tree.unflatten(whole))[1]
            return put_back(jax.tree.leaves(noise_state))

        def put_back(found: list[Any]) -> list[Any]:
            return [None if kept else leaf for leaf, kept in zip(found, floating, strict=True)]

        found = jax.lax.fori_loop(0, charged_steps, add, put_back(leaves))
        return [leaf for leaf in found if leaf is not None]

    def keys(noise_state: PyTree) -> list[np.ndarray]:
        # The numbers of correlated noise follow from them.
        leaves = [leaf for leaf in jax.tree.leaves(noise_state) if not _is_floating(leaf)]
        return [np.asarray(_key_data(leaf)) for leaf in on_host(leaves)]

    for expected, found in zip(keys(advanced(first)), keys(given.noise_state), strict=True):
        if not np.array_equal(expected, found):
            raise ValueError(
                "expected a state of a run with the seed that is given now, got one whose noise "
                "comes from another seed, or from none: the run that it is from would have the "
                "same noise. Give the seed which that run began with; to be able to go on without "
                "a seed, train with a Checkpoint."
            )


def _key_data(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _stacked(trees: Sequence[Any]) -> Any:
    """Returns the trees of several runs as one with an axis for runs; of a single run, its own."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _first_state(step: Step, start: _Start, key: jax.Array) -> State:
    return _strong(step.init(start.params, key)._replace(opt_state=start.opt_state))


def _strong(state: State) -> State:
    """Returns the state without weak types, of which a checkpoint knows nothing.

    A number of a weak type takes the type of what it meets, so that a run would round otherwise
    once it is resumed.
    """

    def strong(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.lax.convert_element_type(leaf, leaf.dtype) if leaf.weak_type else leaf

    return jax.tree.map(strong, state)


def _like_first(step: Step, start: _Start, key: jax.Array) -> State:
    """Returns the first state with shapes in place of the arrays that are not made yet."""
    like = jax.eval_shape(functools.partial(_first_state, step), start, key)
    average = None if like.average is None else start.params
    return like._replace(params=start.params, opt_state=start.opt_state, average=average)


def _in_place(placement: Placement | None, state: State, num_runs: int) -> State:
    if placement is None:
        return jax.tree.map(off_mesh, state)
    return placement.put_state(state, is_stacked=num_runs > 1)


def _shown(plan: _Plan, state: State) -> State:
    if plan.is_sweep and len(plan.runs) == 1:
        return jax.tree.map(lambda leaf: leaf[None], state)
    return state


def _infos(kept: Kept, num_steps: int, seeds: Sequence[int | None]) -> list[TrainInfo]:
    return [
        info_of_run(
            kept.shown,
            run,
            step=kept.step,
            num_steps=num_steps,
            charged_steps=kept.charged_steps[run],
            seeded=seed is not None,
        )
        for run, seed in enumerate(seeds)
    ]


def _prepared_calls(
    plan: _Plan, batches: Sequence[Iterator[np.ndarray]], begin: int
) -> Iterator[tuple[_Passes, bool]]:
    """Yields the inputs of each call, and whether it ends a block of steps.

    The next one is drawn, and its records are read, while the device is still busy.
    """
    starts = range(begin, plan.alphas.shape[1], plan.steps_per_call)
    calls = itertools.chain.from_iterable(_packed(plan, start, batches) for start in starts)
    executor = ThreadPoolExecutor(max_workers=1)
    is_finalizing = sys.is_finalizing  # at the end of the interpreter `sys` may be gone
    try:
        upcoming = executor.submit(next, calls, None)
        while (prepared := upcoming.result()) is not None:
            upcoming = executor.submit(next, calls, None)
            yield prepared
            del prepared
    finally:
        # A run that was left unfinished may end with the interpreter, when no thread can be joined.
        executor.shutdown(wait=not is_finalizing())


def _until_end(calls: Iterator[tuple[_Passes, bool]]) -> Iterator[_Passes]:
    """Yields the calls of one block of steps."""
    for inputs, is_end in calls:
        yield inputs
        if is_end:
            return


def _packed(
    plan: _Plan, start: int, batches: Sequence[Iterator[np.ndarray]]
) -> Iterator[tuple[_Passes, bool]]:
    """Draws the batches of a block of steps and lays them out as calls of one fixed shape.

    Yields the calls one by one, since their records may need much memory, and whether each is the
    last of the block.

    Several runs go in step: where one needs a further pass, the others pad. Where one call does not
    have enough passes, another one is filled up with idle passes.

    Args:
        plan: what is to run.
        start: the first step of the block.
        batches: for each run, the draws to come.
    """
    step, alphas = plan.step, plan.block(start)
    numbers, lengths = [], []
    for number, weights in enumerate(alphas.T, start):
        # A step that reads no private data draws no batch either.
        draws = [
            plan.passes(next(draw) if weight > 0 else np.zeros(0, "i4"), run, number)
            for run, (weight, draw) in enumerate(zip(weights, batches, strict=True))
        ]
        rows = np.full((len(draws), max(map(len, draws)), *draws[0].shape[1:]), PADDING, "i4")
        for run, draw in enumerate(draws):
            rows[run, : len(draw)] = draw
        numbers.append(rows)
        lengths.append(rows.shape[1])
    is_last = np.zeros(sum(lengths), bool)
    is_last[np.cumsum(lengths) - 1] = True
    per_call = plan.passes_per_call
    idle = -len(is_last) % per_call
    is_last = np.pad(is_last, (0, idle))
    alpha = np.pad(np.repeat(alphas, lengths, axis=1), ((0, 0), (0, idle)))
    all_numbers = np.concatenate(numbers, axis=1)
    rest = ((0, 0),) * (all_numbers.ndim - 2)
    all_numbers = np.pad(all_numbers, ((0, 0), (0, idle), *rest), constant_values=PADDING)
    host = step.records(plan.private) if plan.stream else None
    for first in range(0, len(is_last), per_call):
        part = slice(first, first + per_call)
        rows = all_numbers[:, part]
        batch = None if host is None else step.take(host, plan.local(rows))
        places = None
        if plan.placement is not None and plan.layout is not None:
            if host is None:
                places = plan.layout.places(rows, plan.placement.devices)
            rows, places, batch = plan.placement.put_inputs((rows, places, batch))
        weights = alpha[:, part]
        # `is_last` stays on the host: it also says which results are those of a whole step.
        if plan.group is None:
            rows, places, batch, weights = jax.device_put((rows, places, batch, weights))
        yield _Passes(rows, places, batch, weights, is_last[part]), part.stop >= len(is_last)


def _whole_steps(is_last: Sequence[np.ndarray], infos: Sequence[StepInfo]) -> StepInfo:
    """Returns what the last passes of the steps report, as arrays [runs, steps]."""

    def of_steps(*leaves: Any) -> np.ndarray:
        kept = [
            np.atleast_2d(np.asarray(leaf))[:, last]
            for last, leaf in zip(is_last, leaves, strict=True)
        ]
        return np.concatenate(kept, axis=-1)

    return jax.tree.map(of_steps, *infos)


# What a checkpoint compares before it resumes a run.

# More than one, so that a batching rule shows.
_MAPPED = 2


def _configuration(
    plan: _Plan, starts: Sequence[_Start], given: State | None, key: bytes | None
) -> dict[str, str]:
    """Returns everything that decides what the run computes, in words or as a fingerprint.

    Args:
        plan: what is to run.
        starts: where the runs begin.
        given: the state that a run of several processes goes on from, or None.
        key: the key of the fingerprints; None leaves out the private records, which would have to
            be read.
    """
    has_records, key = key is not None, key or b"no secret"
    if plan.group is not None:
        # Gathering waits for everyone, so all must have the same arrays to gather.
        plan.group.compare(
            {
                "placement of the starting parameters": described_split(starts),
                "placement of the state": described_split(given),
            }
        )
        starts, given = on_host(starts), on_host(given)
    # What lies on several devices would be part of the text of a program.
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type),
        plan.params,
    )
    step, placement = plan.step, plan.placement
    programs = ("loss_fn", "mechanism", "optimizer", "public_loss_fn", "chart")
    names = [f.name for f in dataclasses.fields(step) if f.name not in programs]  # pyright: ignore[reportArgumentType]
    records = step.records(plan.private)
    described = {
        **checkpoints.fields("mechanism", step.mechanism),
        "loss_fn": described_loss("loss_fn", step, step.loss_fn, params, plan.private),
        "optimizer": described_optimizer(step, params, has_public=plan.public is not None),
        "starting parameters": _fingerprint.of_arrays(key, [tuple(start) for start in starts]),
        **{name: str(getattr(step, name)) for name in names},
        "alpha": checkpoints.outline(plan.alphas),
        "steps_per_call": str(plan.steps_per_call),
        "stream": str(plan.stream),
        "shards": str(1 if placement is None else placement.shards),
        checkpoints.PLACEMENT: "one device"
        if placement is None
        else placement.described(plan.params),
        "form of the private data": str(jax.tree.structure(records)),
        # TrainStep alone has one; that of other steps is decided when they are fitted.
        checkpoints.MACHINE: checkpoints.machine(
            sizes_follow_memory=getattr(step, "microbatch_size", 0) is None
        ),
    }
    if given is not None:
        described["step of the state"] = str(int(given.step))
        described["state"] = _fingerprint.of_arrays(key, given)
    described |= described_chart(step, params, key, [start.params for start in starts])
    if has_records:
        described[PRIVATE_RECORDS] = _fingerprint.of_arrays(key, (records, plan.excluded))
    if plan.public is not None:
        loss_fn = step.public_loss_fn or step.loss_fn
        public = step.records(plan.public)
        described |= {
            "form of the public data": str(jax.tree.structure(public)),
            "public data": _fingerprint.of_arrays(key, public),
            "public_loss_fn": described_loss("public_loss_fn", step, loss_fn, params, plan.public),
        }
    return described


def _forms(private: Private, public: Public | None) -> dict[str, str]:
    """Returns the types and forms of records, which decide what processes ask each other."""
    found = {"private": type(private).__name__, "public": type(public).__name__}
    for name, data in (("private", private), ("public", public)):
        arrays = [] if data is None else jax.tree_util.tree_leaves_with_path(data.arrays)
        for path, leaf in arrays:
            found[f"{name}{jax.tree_util.keystr(path)}"] = f"{leaf.dtype}{list(leaf.shape[1:])}"
    return found


def described_chart(
    step: Step, params: Params, key: bytes, starts: Sequence[Params]
) -> dict[str, str]:
    """Returns the program of a step's chart as a hash, and a fingerprint of its arrays."""
    chart = getattr(step, "chart", None)
    if chart is None:
        return {}
    part = step.trainable.part(params)
    like = chart.like(part)
    states = [chart.init(step.trainable.part(start)) for start in starts]

    def program(state: PyTree, phi: PyTree, public_grad: PyTree) -> tuple[PyTree, ...]:
        if chart.prepare is not None:
            state = chart.prepare(state, public_grad)
        centre = None if chart.centre is None else chart.centre(state)
        # A step takes turns in place of moves.
        turns = None if chart.turns is None else chart.turns(state)
        return chart.move(state, phi), centre, chart.release(state, phi), turns

    return {
        "chart": checkpoints.program("chart", program, states[0], like, part),
        "groups of the chart": str(None if chart.groups is None else chart.groups(part)),
        "arrays of the chart": _fingerprint.of_arrays(key, states),
    }


def described_optimizer(step: Step, params: Params, *, has_public: bool) -> str:
    """Returns the program of the optimiser's update as a hash."""
    part = step.trainable.part(params)
    optimizer = optax.with_extra_args_support(step.optimizer)
    return checkpoints.program(
        "optimizer",
        lambda *args: optimizer.update(*args[:-1], **args[-1]),
        part,
        jax.eval_shape(optimizer.init, part),
        part,
        {"public_grad": part} if has_public else {},
    )


def described_loss(
    name: str, step: Step, loss_fn: LossFn, params: Params, data: Private | Public
) -> str:
    """Returns the program of a loss and of its gradient, mapped over examples, as a hash."""
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((_MAPPED, *leaf.shape), leaf.dtype),
        example_of(data.arrays),
    )
    keys = jax.random.split(example_key(), _MAPPED)

    def mean_loss(part: PyTree, rest: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        mapped = jax.vmap(with_key(loss_fn), (None, 0, 0))
        return jnp.mean(mapped(step.trainable.merge(part, rest), batch, keys))

    def both(*args: Any) -> tuple[Any, jax.Array]:
        # Custom rules replace a function where there is a gradient; elsewhere it runs itself.
        return jax.value_and_grad(mean_loss)(*args), mean_loss(*args)

    return checkpoints.program(name, both, step.trainable.part(params), params, batch, keys)


def _streams(private: Private, placement: Placement | None) -> bool:
    """Returns whether records are on disk, or take more than half of the memory of a device."""
    if on_disk(private.arrays):
        return True
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    devices = 1 if placement is None else placement.devices
    return limit is not None and private.nbytes / devices > limit / 2
