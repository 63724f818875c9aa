"""Averages of iterates, as post-processing of released values or of public pre-training."""

import dataclasses

import jax
import jax.numpy as jnp

from mirrordp import _validate
from mirrordp.types import PyTree


@dataclasses.dataclass(frozen=True)
class UniformAverage:
    """The mean of the iterates θ_{s+1}, ..., θ_t, as Algorithm 1 returns it.

    Args:
        start: s, the number of iterates to leave out at the beginning.
    """

    start: int = 0

    def __post_init__(self):
        if self.start != 0:
            _validate.positive_integer(start=self.start)

    def update(self, average: PyTree, params: PyTree, step: jax.Array) -> PyTree:
        """Returns the average after the iterate with number `step` = 1, 2, ..."""
        weight = 1 / jnp.maximum(step - self.start, 1)
        return _move(average, params, weight)


@dataclasses.dataclass(frozen=True)
class ExponentialAverage:
    """The average that follows average ← decay · average + (1 − decay) · θ, starting from θ_0.

    Early on, the decay is capped at t / (t + 9), so that the start point is soon forgotten.

    Args:
        decay: a number in (0, 1).
    """

    decay: float

    def __post_init__(self):
        _validate.open_unit_interval(decay=self.decay)

    def update(self, average: PyTree, params: PyTree, step: jax.Array) -> PyTree:
        """Returns the average after the iterate with number `step` = 1, 2, ..."""
        return _move(average, params, 1 - jnp.minimum(self.decay, step / (step + 9)))


Average = UniformAverage | ExponentialAverage


def _move(average: PyTree, params: PyTree, weight: jax.Array) -> PyTree:
    return jax.tree.map(lambda a, p: (a + weight * (p - a)).astype(a.dtype), average, params)
