"""Steps that follow the noise, as optax transformations. All of this is post-processing.

The paper's first-order form of mirror descent (its equation for θ_{t+1} in the section "First-order
Approximation to Mirror Descent") is

    θ_{t+1} = θ_t − η (α_t (g_t + b_t) + (1 − α_t) ∇Ψ(θ_t)),

that is `optax.chain(mix_public_gradient(alpha), optax.sgd(eta))`. With α = 1 it is DP-SGD.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mirrordp import _validate, schedules
from mirrordp.types import AlphaSchedule, Params, PyTree


class MixPublicGradientState(NamedTuple):
    """The number of steps taken, from which α_t follows."""

    step: jax.Array


def mix_gradients(
    private_grad: PyTree, public_grad: PyTree, *, alpha: jax.Array, scale_noise: bool = True
) -> PyTree:
    """α (g + b) + (1 − α) ∇Ψ; with `scale_noise=False`, where the input is α g + b, its sum with
    (1 − α) ∇Ψ. At α = 1 it is the private gradient to the bit, whatever the public one holds.
    """

    def mix(private, public):
        mixed = (alpha if scale_noise else 1.0) * private + (1 - alpha) * public
        return jnp.where(alpha == 1, private, mixed).astype(private.dtype)

    return jax.tree.map(mix, private_grad, public_grad)


def mix_public_gradient(
    alpha: float | Sequence[float] | AlphaSchedule, *, scale_noise: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Mixes the noisy private gradient with the public one: α_t (g + b) + (1 − α_t) ∇Ψ.

    `update(private_grad, state, params, *, public_grad)` takes the public gradient as a required
    keyword: forgetting it is a TypeError, not a silent zero.

    Args:
        alpha: a number, a list, or a schedule; see `mirrordp.schedules`.
        scale_noise: True is the paper: the update is given g + b and multiplies both by α_t. False
            is the variant of the authors' federated code, α_t g + b + (1 − α_t) ∇Ψ: the update
            must then be given α_t g + b, the sum weighted *before* its noise, as
            `mirrordp.train(..., scale_noise=False)` does.

    Returns:
        An optax transformation; any optimiser may follow it in `optax.chain`.
    """
    schedule = schedules.as_schedule(alpha)

    def init(params: Params) -> MixPublicGradientState:
        del params
        return MixPublicGradientState(jnp.zeros([], jnp.int32))

    def update(
        updates: PyTree,
        state: MixPublicGradientState,
        params: Params | None = None,
        *,
        public_grad: PyTree,
        **extra_args,
    ) -> tuple[PyTree, MixPublicGradientState]:
        del params, extra_args
        weight = jnp.asarray(schedule(state.step), jnp.float32)
        mixed = mix_gradients(updates, public_grad, alpha=weight, scale_noise=scale_noise)
        return mixed, MixPublicGradientState(state.step + 1)

    # The extra-args protocol cannot be spelled in types: optax leaves the keywords open.
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class UniformAverage:
    """The mean of the iterates θ_{s+1}, ..., θ_t, as Algorithm 1 returns it.

    Args:
        start: s, the number of first iterates to leave out.
    """

    start: int = 0

    def __post_init__(self):
        if self.start != 0:
            _validate.positive_integer(start=self.start)

    def update(self, average: PyTree, params: PyTree, step: jax.Array) -> PyTree:
        """The average after the iterate number `step` = 1, 2, ..."""
        weight = 1 / jnp.maximum(step - self.start, 1)
        return _move(average, params, weight)


@dataclasses.dataclass(frozen=True)
class ExponentialAverage:
    """average ← decay · average + (1 − decay) · θ, starting from θ_0.

    Early on the decay is capped at t / (t + 9), so that the start point is soon forgotten.

    Args:
        decay: in (0, 1).
    """

    decay: float

    def __post_init__(self):
        _validate.open_unit_interval(decay=self.decay)

    def update(self, average: PyTree, params: PyTree, step: jax.Array) -> PyTree:
        """The average after the iterate number `step` = 1, 2, ..."""
        return _move(average, params, 1 - jnp.minimum(self.decay, step / (step + 9)))


Average = UniformAverage | ExponentialAverage


def _move(average: PyTree, params: PyTree, weight: jax.Array) -> PyTree:
    return jax.tree.map(lambda a, p: (a + weight * (p - a)).astype(a.dtype), average, params)
