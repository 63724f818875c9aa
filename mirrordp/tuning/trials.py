"""Runs with different settings, side by side where one compiled program can hold them.

Everything that a trial needs is in a `Makings`. Runs of equal batch size, step count and clip norm
differ only in learning rate, α and seed, and are trained together (`mirrordp.train_sweep`).
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from mirrordp import _show, _validate
from mirrordp.data import (
    PrivateData,
    PublicData,
    have_same_structure,
    require_private,
    require_public,
)
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise, Noise
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.training.bookkeeping import is_silent
from mirrordp.training.central import TrainState, TrainStep
from mirrordp.training.engine import SweepRun, TrainOptions
from mirrordp.training.step import needs_public_grad
from mirrordp.training.sweep import run_state, train_sweep
from mirrordp.tuning.settings import Settings
from mirrordp.types import LossFn, Params

MakeOptimizer = Callable[[Any], optax.GradientTransformation]
Start = Params | Callable[[PublicData], Params]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Makings:
    """What all runs of a search have in common; see `mirrordp.tune`."""

    loss_fn: LossFn
    start: Start
    private: PrivateData
    public: PublicData | None
    optimizer: MakeOptimizer
    adjacency: Adjacency
    noise: Noise
    step_options: Mapping[str, Any]
    options: TrainOptions
    mesh: jax.sharding.Mesh | None
    together: int

    def __post_init__(self):
        require_private(self.private)
        if self.public is not None:
            require_public(self.public)
        _validate.positive_integer(together=self.together)
        accepted = [field.name for field in dataclasses.fields(TrainStep)]
        for name in self.step_options:
            if name not in accepted:
                near = difflib.get_close_matches(name, accepted, n=1)
                hint = f"Did you mean {near[0]}=?" if near else "Settings go into space=."
                raise TypeError(
                    f"further arguments are those of TrainStep, got {name}=, which is none. {hint}"
                )
        if self.adjacency is Adjacency.ADD_REMOVE:
            raise ValueError(
                "a search draws batches from a public number of rows, which add-remove adjacency "
                "keeps secret, got Adjacency.ADD_REMOVE. Use Adjacency.ZERO_OUT, which has the "
                "same epsilon."
            )

    @property
    def is_secure(self) -> bool:
        """Whether the noise of a run cannot be repeated."""
        return not isinstance(self.noise, GaussianNoise)

    def begin(self, public: PublicData | None) -> Params:
        """Returns the start of a run that knows these public rows."""
        if not callable(self.start):
            return self.start
        if public is None:
            raise ValueError(
                "a start that is learned from public rows needs some, got none. Pass public=..., "
                "or parameters as start."
            )
        return self.start(public)

    def playing(self) -> PublicData:
        """Returns the public rows, which are to play private ones."""
        if self.public is None:
            raise ValueError(
                "settings are chosen on public rows that are like the private ones, got none. Pass "
                "public=..., or candidates as space=tuning.grid(...) with way=Paid(...)."
            )
        # With a loss of their own, public rows may have arrays of their own beside the others.
        has_own_loss = self.step_options.get("public_loss_fn") is not None
        if not has_own_loss and not have_same_structure(self.private, self.public):
            private, public = (
                _show.listed_kinds(_show.array_kinds(data.arrays, rows="n"))
                for data in (self.private, self.public)
            )
            raise ValueError(
                "settings are chosen on public rows that play the private ones, so both need the "
                f"same arrays, got private rows with {private} and public rows with {public}."
            )
        return self.public

    def uses_public(self, candidates: Sequence[Settings]) -> bool:
        """Returns whether any run learns from public rows."""
        if callable(self.start) or any((each.alphas < 1).any() for each in candidates):
            return True
        params = jax.tree.map(jax.numpy.asarray, self.start)
        step = self.step(self.mechanism(candidates[0], 1.0))
        return needs_public_grad(step, params, has_public=self.public is not None)

    def mechanism(self, settings: Settings, noise_multiplier: float) -> Mechanism:
        """Returns the mechanism of a private run."""
        return Mechanism(
            sampling=PoissonSampling.for_batch_size(
                settings.batch_size, num_examples=len(self.private)
            ),
            l2_clip_norm=settings.l2_clip_norm,
            noise_multiplier=noise_multiplier,
            num_steps=settings.charged_steps,
            adjacency=self.adjacency,
            noise=self.noise,
        )

    def step(self, mechanism: Mechanism, learning_rate: float | None = None) -> TrainStep:
        """Returns the training step; without a learning rate, it is in the optimiser's state."""
        if learning_rate is None:
            optimizer = _with_rate_in_state(self.optimizer)
        else:
            optimizer = self.optimizer(learning_rate)
        return TrainStep(self.loss_fn, mechanism, optimizer, **self.step_options)


@functools.lru_cache(maxsize=16)
def _with_rate_in_state(make: MakeOptimizer) -> optax.GradientTransformation:
    # One object for each maker, because equal steps compile once.
    def named(learning_rate):
        return make(learning_rate)

    return optax.inject_hyperparams(named)(learning_rate=1.0)


class Trial(NamedTuple):
    """One run of a search: its settings and the seed of its randomness."""

    settings: Settings
    seed: int

    @property
    def run(self) -> SweepRun:
        """The same for `train_sweep`."""
        hyperparams = {"learning_rate": float(self.settings.learning_rate)}
        return SweepRun(alpha=self.settings.alpha, hyperparams=hyperparams, seed=self.seed)


def kind_of(settings: Settings) -> tuple:
    """Returns what a compiled program is made for; runs of one kind can be trained together."""
    kind = (settings.batch_size, settings.num_steps, settings.l2_clip_norm)
    return (*kind, settings.charged_steps)


def batched(trials: Sequence[Trial], most: int) -> list[list[int]]:
    """Returns the numbers of trials that run together, at most so many at a time."""
    groups: dict[tuple, list[int]] = {}
    for number, (settings, _) in enumerate(trials):
        groups.setdefault(kind_of(settings), []).append(number)
    return [
        group[first : first + most]
        for group in groups.values()
        for first in range(0, len(group), most)
    ]


def trained(
    makings: Makings,
    mechanism: Mechanism,
    trials: Sequence[Trial],
    params: Params,
    private: PrivateData,
    public: PublicData | None,
) -> Iterator[Params]:
    """Trains runs together, and yields their models in order. It charges nothing.

    Args:
        makings: what they have in common.
        mechanism: the mechanism of each run, which are of one kind; see `batched`.
        trials: what sets them apart.
        params: where they begin.
        private: the private rows, or public rows that play them.
        public: the public rows that they learn from.
    """
    states: TrainState | None = None
    token = is_silent.set(True)
    try:
        for states, _ in train_sweep(  # noqa: B007
            makings.step(mechanism), params, private, public,
            runs=[trial.run for trial in trials], num_steps=trials[0].settings.num_steps,
            mesh=makings.mesh, options=makings.options,
        ):  # fmt: skip
            pass
    finally:
        is_silent.reset(token)
    assert states is not None
    for number in range(len(trials)):
        yield model_of(run_state(states, number))


def model_of(state: TrainState) -> Params:
    """Returns the average of the iterates if there is one, else the last iterate."""
    return state.params if state.average is None else state.average
