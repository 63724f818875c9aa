"""Several runs at a time: one compiled call trains models that differ in what is cheap to vary.

A small network leaves most of an accelerator idle. `train_sweep` is `mirrordp.train` with an axis
for runs that differ in seed, starting point, α schedule and settings of the optimiser. Each run has
its own batches and its own noise: it is the run that `train` would have made, up to rounding, and
it costs as much privacy.

Choosing the best of the runs is not covered by the guarantee of one run. A ledger or a budget is
charged for each of them, before a block of steps of all runs begins, which covers a choice by
public rows. A choice by private rows, such as a validation set cut from them, is one more release,
without noise, and nothing here covers it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mirrordp import _validate
from mirrordp.privacy._convolutions import where_faster
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.training import engine
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.training.engine import SweepRun, TrainOptions
from mirrordp.training.step import Private, Public, Step, TrainInfo
from mirrordp.types import Params


def train_sweep(
    step: Step,
    params: Params,
    private: Private,
    public: Public | None = None,
    *,
    runs: Sequence[SweepRun],
    num_steps: int | None = None,
    spend: Ledger | Budget | None = None,
    checkpoint: Checkpoint | None = None,
    mesh: jax.sharding.Mesh | None = None,
    options: TrainOptions = TrainOptions(),
) -> Iterator[tuple[Any, list[TrainInfo]]]:
    """Trains all `runs` together; yields `(states, infos)` every few steps.

    Runs of one seed share batches and noise, which suits a comparison. They must not be released
    together, since the noise cancels in their differences.

    >>> import optax
    >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    >>> runs = [SweepRun(hyperparams={"learning_rate": rate}, seed=1) for rate in (0.1, 0.2, 0.5)]

    Args:
        step: what is trained, common to all runs. Settings named in a run's `hyperparams` must be
            in the state of its optimiser. The whole sweep costs as much as all of its runs.
        params: where a run begins that has no `params` of its own.
        private: the sensitive records.
        public: the public records; needed where α < 1 in any run.
        runs: what sets the runs apart.
        num_steps: the number of steps of each run.
        spend: a ledger or budget that is charged for every step of every run. Each run then needs a
            seed of its own, or none, since costs add up for independent noise only. A budget
            refuses the sweep before any record is used if all of its runs together do not fit.
        checkpoint: as in `mirrordp.train`, one folder for the whole sweep.
        mesh: as in `mirrordp.train`; every device computes its records' part of all runs.
        options: how the sweep is driven; see `TrainOptions`.

    Returns:
        An iterator. `states` is a state whose leaves have one row per run; `infos` has one
        `TrainInfo` per run. `run_state(states, i)` is the state of run i.
    """
    if len(runs) == 0:
        raise ValueError("a sweep needs at least one run, got none.")
    for number, run in enumerate(runs):
        _validate.instance_of(
            SweepRun, "Use SweepRun(alpha=..., seed=...).", **{f"runs[{number}]": run}
        )
    if getattr(getattr(step, "mechanism", None), "is_secure", False):
        raise ValueError(
            "a sweep is made for experiments and has no secure mode, got SecureGaussianNoise. Use "
            "GaussianNoise(), and train once with secure noise for the release."
        )
    if spend is not None or checkpoint is not None:
        _refuse_shared_noise(runs)
    if len(runs) > 1 and dataclasses.is_dataclass(step):
        losses = {
            name: where_faster(getattr(step, name), side_by_side=True)
            for name in ("loss_fn", "public_loss_fn")
            if getattr(step, name) is not None
        }
        step = dataclasses.replace(step, **losses)  # pyright: ignore[reportArgumentType]
    return engine.start(
        step, params, private, public, runs, num_steps=num_steps, spend=spend,
        checkpoint=checkpoint, mesh=mesh, options=options, is_sweep=True,
    )  # fmt: skip


def _refuse_shared_noise(runs: Sequence[SweepRun]) -> None:
    seeds = [run.seed for run in runs if run.seed is not None]
    twice = [seed for seed in seeds if seeds.count(seed) > 1]
    if twice:
        raise ValueError(
            f"a ledger adds up runs that do not share their noise, got seed {twice[0]} twice. "
            "Give each run a seed of its own, or leave spend and checkpoint out."
        )


def run_state(states: Any, number: int) -> Any:
    """Returns the state of one run of a sweep."""
    return jax.tree.map(lambda leaf: leaf[number], states)
