"""Schedules of α_t, the weight of the private gradient at step t, which is always in [0, 1].

The paper's first-order step mixes the noisy private gradient with the public one,
α_t (g + b) + (1 − α_t) ∇Ψ. α is fixed before the run and must not depend on private data. A step
with α_t = 0 reads no private data and is not charged.

A schedule is a function of the step number t = 0, 1, .... The paper counts in epochs in places;
here the number of steps in an epoch is an explicit argument.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from mirrordp import _validate
from mirrordp.types import AlphaSchedule


def constant(alpha: float) -> AlphaSchedule:
    """Returns the schedule α_t = alpha."""
    _in_unit_interval(np.asarray([alpha], float))
    return lambda step: jnp.full(jnp.shape(step), alpha, jnp.float32)


def cosine(
    *,
    decay_steps: float | None = None,
    decay_epochs: float | None = None,
    steps_per_epoch: float | None = None,
) -> AlphaSchedule:
    """Returns the schedule α_t = cos(π t / 2K) for t < K, and 0 from then on.

    K is given in exactly one unit. The paper writes K without a unit; only epochs keep its α
    positive (K = 2000 on CIFAR-10, where training takes 100 epochs of 96 steps).

    Args:
        decay_steps: K in steps.
        decay_epochs: K in epochs; needs `steps_per_epoch`.
        steps_per_epoch: the number of private examples over the expected batch size.
    """
    if (decay_steps is None) == (decay_epochs is None):
        raise ValueError(
            "cosine needs K in exactly one unit, got "
            f"decay_steps={decay_steps!r} and decay_epochs={decay_epochs!r}. Pass one of them."
        )
    if decay_epochs is not None:
        if steps_per_epoch is None:
            raise ValueError(
                "decay_epochs needs steps_per_epoch, got None. Pass num_examples / batch_size."
            )
        _validate.positive(decay_epochs=decay_epochs, steps_per_epoch=steps_per_epoch)
        decay_steps = decay_epochs * steps_per_epoch
    _validate.positive(decay_steps=decay_steps)
    decay = float(decay_steps or 1.0)

    def schedule(step):
        angle = jnp.minimum(jnp.asarray(step) / decay, 1.0) * (math.pi / 2)
        # cos(π/2) is not zero in floating point, and exact zeros decide which steps are charged.
        return jnp.where(jnp.asarray(step) >= decay, 0.0, jnp.clip(jnp.cos(angle), 0.0, 1.0))

    return schedule


def linear(start: float, end: float, *, num_steps: int) -> AlphaSchedule:
    """Returns the line from α = `start` at t = 0 to `end` at t = num_steps − 1, then `end`."""
    _in_unit_interval(np.asarray([start, end], float))
    _validate.positive_integer(num_steps=num_steps)

    def schedule(step):
        share = jnp.clip(jnp.asarray(step) / max(num_steps - 1, 1), 0.0, 1.0)
        return start * (1 - share) + end * share

    return schedule


def table(values: Sequence[float]) -> AlphaSchedule:
    """Returns the schedule α_t = values[t]; a run longer than the table is refused."""
    array = np.asarray(values, np.float32)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"a table of alphas must be a non-empty list, got shape {array.shape}. Pass one number "
            "for each step."
        )
    _in_unit_interval(array)
    # Beyond its end the table is NaN, which `evaluate` refuses before a run begins.
    return lambda step: jnp.where(
        jnp.asarray(step) < array.size,
        jnp.asarray(array)[jnp.minimum(step, array.size - 1)],
        jnp.nan,
    )


def as_schedule(alpha: float | Sequence[float] | AlphaSchedule) -> AlphaSchedule:
    """Returns a schedule from a number, a list of numbers, or a schedule."""
    if callable(alpha):
        return alpha
    return table(alpha) if isinstance(alpha, Sequence | np.ndarray) else constant(alpha)


def evaluate(schedule: AlphaSchedule, num_steps: int) -> np.ndarray:
    """Returns α_0, ..., α_{T−1} as numbers after checking that all of them lie in [0, 1]."""
    try:
        values = np.asarray(schedule(jnp.arange(num_steps)), np.float32)
    except Exception:
        values = np.asarray([schedule(step) for step in range(num_steps)], np.float32)
    values = np.broadcast_to(values, (num_steps,))
    missing = np.flatnonzero(np.isnan(values))
    if missing.size:
        raise ValueError(
            f"the alpha schedule must cover all {num_steps} steps, but ends before step "
            f"{missing[0]}. Give a longer schedule or run fewer steps."
        )
    _in_unit_interval(values)
    # Devices read subnormal numbers as zero, and must agree with the host on what is charged.
    return np.where(values < np.finfo(np.float32).tiny, np.float32(0), values)


def _in_unit_interval(values: np.ndarray) -> None:
    outside = values[~((values >= 0) & (values <= 1))]
    if outside.size:
        raise ValueError(
            f"alpha must be in [0, 1], got {float(outside[0])}. It weighs the private against the "
            "public gradient: 1 is DP-SGD, 0 uses public data only."
        )
