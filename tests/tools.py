"""Small pieces that several test files share: a tiny problem, a recording optimiser, replays."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp
from mirrordp.privacy.accounting import DpEvent

ROWS = 40
FEATURES = 3


def features(rows: int = ROWS, seed: int = 0, columns: int = FEATURES) -> np.ndarray:
    """Standard normal features."""
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def squared_distance(params, example):
    """½‖θ − x‖², whose gradient is θ − x."""
    return 0.5 * jnp.sum((params - example) ** 2)


def zero_loss(params, example):
    """A loss whose gradient is exactly zero."""
    return 0.0 * jnp.sum(params) + 0.0 * jnp.sum(example)


def weighted_distance(params, example):
    """⟨θ, x⟩ times the row's own weight: a row of weight zero has gradient zero."""
    return example["weight"] * jnp.dot(params, example["x"])


def keyed_distance(params, example, key):
    """As `weighted_distance`, with a random mask over the coordinates."""
    mask = jax.random.bernoulli(key, 0.5, params.shape)
    return example["weight"] * jnp.dot(params, mask * example["x"])


@functools.cache
def recorder(num_steps: int) -> optax.GradientTransformation:
    """Moves nothing, and keeps the gradient of each step in its state: `(count, gradients)`."""

    def init(params):
        kept = jax.tree.map(lambda leaf: jnp.zeros((num_steps, *leaf.shape), leaf.dtype), params)
        return jnp.zeros([], jnp.int32), kept

    def update(updates, state, params=None):
        del params
        count, kept = state
        kept = jax.tree.map(lambda all_, one: all_.at[count].set(one), kept, updates)
        return jax.tree.map(jnp.zeros_like, updates), (count + 1, kept)

    return optax.GradientTransformation(init, update)


@functools.cache
def sgd(learning_rate: float) -> optax.GradientTransformation:
    """One object per learning rate, so that equal training steps compile once."""
    return optax.sgd(learning_rate)


def poisson(batch_size: float = 8, rows: int = ROWS, capacity: int = 0):
    return mirrordp.PoissonSampling.for_batch_size(batch_size, num_examples=rows, capacity=capacity)


def mechanism(**options) -> mirrordp.Mechanism:
    """A small mechanism; options replace its parts."""
    defaults = {
        "sampling": poisson(),
        "l2_clip_norm": 1.0,
        "noise_multiplier": 4.0,  # a PLD of much less noise takes seconds
        "num_steps": 12,
    }
    return mirrordp.Mechanism(**(defaults | options))


def last(run: Iterator) -> tuple[mirrordp.training.TrainState, mirrordp.training.TrainInfo]:
    """What the last call of a run yields."""
    *_, result = run
    return result


def released_gradients(run: Iterator) -> np.ndarray:
    """The gradient of each step of a run that was given `recorder` as its optimiser."""
    state, _ = last(run)
    return np.asarray(state.opt_state[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A sampler that hands out given draws and accounts like the sampler it stands in for.

    Two neighbouring data sets of different length cannot be drawn from with the same generator
    state; the coupling of the proof (the same coin for each common record) is stated as draws.
    Draws are made on the host, so samplers that differ in them alone share one compiled program.
    """

    base: mirrordp.PoissonSampling
    draws: tuple[tuple[int, ...], ...] = dataclasses.field(compare=False)

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def sampling_prob(self) -> float:
        return self.base.sampling_prob

    @property
    def expected_batch_size(self) -> float:
        return self.base.expected_batch_size

    @property
    def capacity(self) -> int:
        return self.base.capacity

    @property
    def num_examples(self) -> int | None:
        return self.base.num_examples

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        return self.base.event(noise_multiplier, num_steps)

    def check(self, adjacency: mirrordp.Adjacency) -> None:
        self.base.check(adjacency)

    def batches(self, num_examples, num_steps, rng) -> Iterator[np.ndarray]:
        del num_examples, rng
        return (np.asarray(draw, np.int64) for draw in self.draws[:num_steps])


STEP_OPTIONS = {
    kind: {field.name for field in dataclasses.fields(kind)}
    for kind in (mirrordp.TrainStep, mirrordp.FederatedStep)
}
DRIVE_OPTIONS = {field.name for field in dataclasses.fields(mirrordp.TrainOptions)}


def _train(kind, loss, params, private, public, options, train=mirrordp.train):
    of_step = {name: options.pop(name) for name in [*options] if name in STEP_OPTIONS[kind]}
    drive = {name: options.pop(name) for name in [*options] if name in DRIVE_OPTIONS}
    step = kind(loss, of_step.pop("mechanism"), of_step.pop("optimizer", None), **of_step)
    drive = mirrordp.TrainOptions(**drive)
    return train(step, params, private, public, options=drive, **options)


def train(loss, params, private, public=None, **options):
    """`mirrordp.train` with the options of a `TrainStep` and of `TrainOptions` side by side."""
    return _train(mirrordp.TrainStep, loss, params, private, public, options)


def federated_train(loss, params, private, public=None, **options):
    """The same with a `FederatedStep`."""
    return _train(mirrordp.FederatedStep, loss, params, private, public, options)


def train_sweep(loss, params, private, public=None, **options):
    """`mirrordp.train_sweep`, as `train`."""
    return _train(mirrordp.TrainStep, loss, params, private, public, options, mirrordp.train_sweep)
