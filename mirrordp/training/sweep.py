"""Several runs at a time: one compiled call trains models that differ in what is cheap to vary.

A small network leaves most of an accelerator idle. `train_sweep` maps the step of `mirrordp.train`
over runs that differ in seed, starting point, α schedule and optimiser settings. Each run has its
own batches and its own noise: it is the run that `train` would have made, up to rounding, and it
costs as much privacy. Choosing the best of them is not covered by the guarantee of one run: ledger
and budget are charged for each of them, before a block of steps of all runs begins, which covers a
choice by public rows. A choice by private rows, such as a validation set cut from them, is one more
release, without noise, and covered by nothing here. A sweep keeps no checkpoints; one that was cut
off begins again, and is charged again.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _validate
from mirrordp.data import Overlap, PrivateData, PublicData
from mirrordp.privacy._convolutions import where_faster
from mirrordp.privacy.clipping import frozen_mask
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger, ledger_for
from mirrordp.training.bookkeeping import Books, check_books
from mirrordp.training.central import (
    TrainInfo,
    TrainState,
    TrainStep,
    plan_runs,
    prepared_blocks,
    randomness,
    scan_passes,
    whole_steps,
)
from mirrordp.types import AlphaSchedule, LossFn, Params, PyTree
from mirrordp.updates.averages import Average


class SweepRun(NamedTuple):
    """What sets one run of a sweep apart.

    Attributes:
        alpha: α_t, as in `mirrordp.train`.
        hyperparams: optimiser settings by name, for an optimiser that keeps them in its state
            (`optax.inject_hyperparams`).
        params: where this run begins, if not at the common start.
        seed: as in `mirrordp.train`.
    """

    alpha: float | Sequence[float] | AlphaSchedule = 1.0
    hyperparams: Mapping[str, float] = {}
    params: Params | None = None
    seed: int | None = None


def train_sweep(
    loss_fn: LossFn,
    params: Params,
    private: PrivateData,
    public: PublicData | None = None,
    *,
    runs: Sequence[SweepRun],
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    num_steps: int | None = None,
    public_loss_fn: LossFn | None = None,
    public_batch_size: int | None = None,
    scale_noise: bool = True,
    noisy_clip_norm: float | None = None,
    average: Average | None = None,
    trainable: PyTree | None = None,
    microbatch_size: int | None = None,
    overlap: Overlap = Overlap.DROP,
    steps_per_call: int = 50,
    stream: bool | None = None,
    ledger: Ledger | None = None,
    budget: Budget | None = None,
    show_unprivatized: bool = False,
) -> Iterator[tuple[TrainState, list[TrainInfo]]]:
    """Trains all `runs` together; yields `(states, infos)` every few steps.

    Runs of one seed share batches and noise, which suits a comparison; they must not be released
    together, since the noise cancels in their differences.

    >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    >>> runs = [SweepRun(hyperparams={"learning_rate": rate}, seed=1) for rate in (0.1, 0.2, 0.5)]

    Args:
        loss_fn: as in `mirrordp.train`, like all arguments that are not listed here.
        params: where a run begins that has no `params` of its own.
        private: the sensitive rows.
        public: the public rows.
        runs: what sets the runs apart.
        mechanism: of each run; the whole sweep costs as much as all of them.
        optimizer: common to all; settings named in a run's `hyperparams` must be in its state.
        num_steps: steps of each run.
        public_loss_fn: see `mirrordp.train`.
        public_batch_size: see `mirrordp.train`.
        scale_noise: see `mirrordp.train`.
        noisy_clip_norm: see `mirrordp.train`.
        average: see `mirrordp.train`.
        trainable: see `mirrordp.train`.
        microbatch_size: see `mirrordp.train`.
        overlap: see `mirrordp.train`.
        steps_per_call: see `mirrordp.train`.
        stream: see `mirrordp.train`.
        ledger: where every step of every run is charged; each run then needs a seed of its own, or
            none, since costs add up for independent noise only.
        budget: charge to a budget that spans runs instead; the sweep is refused before any row is
            used if all of its runs together do not fit.
        show_unprivatized: see `mirrordp.train`.

    Returns:
        An iterator. `states` is a `TrainState` whose leaves have one row per run; `infos` has one
        `TrainInfo` per run. `run_state(states, i)` is the state of run i.
    """
    if len(runs) == 0:
        raise ValueError("a sweep needs at least one run, got none.")
    if isinstance(mechanism, Mechanism) and mechanism.is_secure:
        raise ValueError(
            "a sweep is made for experiments and has no secure mode, got SecureGaussianNoise. Use "
            "GaussianNoise(), and train once with secure noise for the release."
        )
    for number, run in enumerate(runs):
        _validate.instance_of(
            SweepRun, "Use SweepRun(alpha=..., seed=...).", **{f"runs[{number}]": run}
        )
    check_books(mechanism, ledger, budget, None)
    if ledger is not None or budget is not None:
        _refuse_shared_noise(runs)

    def admit(alphas: np.ndarray) -> None:
        if budget is not None:
            budget.admit_all(mechanism, [int(count) for count in (alphas > 0).sum(axis=1)])
            budget.check_rows(private)

    if len(runs) > 1:
        loss_fn = where_faster(loss_fn, side_by_side=True)
        if public_loss_fn is not None:
            public_loss_fn = where_faster(public_loss_fn, side_by_side=True)
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
    plan = plan_runs(
        train_step, params, private, public, [run.alpha for run in runs], num_steps=num_steps,
        overlap=overlap, steps_per_call=steps_per_call, stream=stream, ledger=ledger, admit=admit,
    )  # fmt: skip
    charged_to = ledger_for(mechanism.adjacency, ledger)
    books = [Books(mechanism, ledger=charged_to, budget=budget) for _ in runs]
    if budget is not None:
        for run in runs:
            budget.check_seed(run.seed, "")
    for book, run in zip(books, runs, strict=True):
        book.claim(run.seed)
    random = [randomness(run.seed) for run in runs]
    states = _stack([_start(plan, run, keys.noise) for run, (_, keys) in zip(runs, random)])  # noqa: B905
    batches = [mechanism.batches(len(private), rng) for rng, _ in random]
    seeded = [run.seed is not None for run in runs]
    return _generate(plan, states, batches, _stack([keys for _, keys in random]), books, seeded)


def _refuse_shared_noise(runs: Sequence[SweepRun]) -> None:
    seeds = [run.seed for run in runs if run.seed is not None]
    twice = [seed for seed in seeds if seeds.count(seed) > 1]
    if twice:
        raise ValueError(
            f"a ledger adds up runs that do not share their noise, got seed {twice[0]} twice. "
            "Give each run a seed of its own, or leave ledger and budget out."
        )


def run_state(states: TrainState, number: int) -> TrainState:
    """The state of one run of a sweep."""
    return jax.tree.map(lambda leaf: leaf[number], states)


def _start(plan, run: SweepRun, noise_key: jax.Array) -> TrainState:
    begin = plan.params
    if run.params is not None:
        begin = jax.tree.map(jnp.asarray, run.params)
        if jax.tree.map(jnp.shape, begin) != jax.tree.map(jnp.shape, plan.params):
            raise ValueError(
                "the params of a run must have the structure and shapes of the common params, got "
                f"{jax.tree.map(jnp.shape, begin)}. Give every run the same network."
            )
    state = plan.train_step.init(begin, noise_key)
    if not run.hyperparams:
        return state
    try:
        opt_state = optax.tree.set(state.opt_state, **dict(run.hyperparams))
    except KeyError as error:
        raise ValueError(
            f"the optimiser keeps no setting of the names {sorted(run.hyperparams)} in its state. "
            "Make it with optax.inject_hyperparams, e.g. "
            "optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)."
        ) from error
    like = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), opt_state, state.opt_state)
    return state._replace(opt_state=like)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@functools.partial(jax.jit, static_argnames=("train_step", "may_skip"))
def _run_all(train_step, may_skip, states, partial_sums, inputs, private, excluded, public, keys):
    scan = functools.partial(scan_passes, train_step, may_skip)
    if inputs.alpha.shape[0] == 1:
        # Mapping over an axis of length one would only cost.
        state, partial_sum, key = jax.tree.map(lambda leaf: leaf[0], (states, partial_sums, keys))
        found = scan(state, partial_sum, inputs.first_run(), private, excluded, public, key)
        return jax.tree.map(lambda leaf: leaf[None], found)
    # `is_last` belongs to all runs: mapped over, it would turn one selection into many.
    axes = jax.tree.map(lambda _: 0, inputs._replace(is_last=None))
    return jax.vmap(scan, in_axes=(0, 0, axes, None, None, None, 0))(
        states, partial_sums, inputs, private, excluded, public, keys
    )


def _generate(
    plan, states, batches, keys, books, seeded
) -> Iterator[tuple[TrainState, list[TrainInfo]]]:
    nothing = plan.train_step.nothing_yet(plan.params)
    partial_sums = _stack([nothing] * len(batches))
    arrays = plan.on_device()
    charged = np.zeros(len(batches), int)
    for start, calls in prepared_blocks(plan, batches):
        block = plan.block(start)
        reads = (block > 0).sum(axis=1)
        for one, before, count in zip(books, charged, reads, strict=True):
            one.charge(int(before), int(before + count))
        charged = charged + reads
        infos = []
        for inputs in calls:
            states, partial_sums, info = _run_all(
                plan.train_step, plan.may_skip, states, partial_sums, inputs, *arrays, keys
            )
            infos.append(info)
        info = whole_steps(calls, infos)
        shown = plan.train_step.show_unprivatized
        yield (
            states,
            [
                TrainInfo(
                    step=start + block.shape[1],
                    charged_steps=int(charged[i]),
                    alpha=block[i],
                    noisy_grad_norm=info.noisy_grad_norm[i],
                    public_loss=info.public_loss[i],
                    unprivatized=jax.tree.map(lambda leaf, i=i: leaf[i], info.unprivatized)
                    if shown
                    else None,
                    seeded=seeded[i],
                )
                for i in range(len(batches))
            ],
        )
