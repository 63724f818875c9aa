"""The paper's first-order form of mirror descent, as an optax transformation.

The paper's equation for θ_{t+1} in the section "First-order Approximation to Mirror Descent" is

    θ_{t+1} = θ_t − η (α_t (g_t + b_t) + (1 − α_t) ∇Ψ(θ_t)),

which is `optax.chain(mix_public_gradient(alpha), optax.sgd(eta))`. With α = 1 it is DP-SGD. All of
this follows the noise, so it is post-processing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mirrordp.types import AlphaSchedule, Params, PyTree
from mirrordp.updates import schedules


class MixPublicGradientState(NamedTuple):
    """The number of steps taken, from which α_t follows."""

    step: jax.Array


def mix_gradients(
    private_grad: PyTree, public_grad: PyTree, *, alpha: jax.Array, scale_noise: bool = True
) -> PyTree:
    """Returns α (g + b) + (1 − α) ∇Ψ, where `private_grad` is g + b.

    With `scale_noise=False`, `private_grad` must be α g + b, and (1 − α) ∇Ψ is added to it. At
    α = 1 the result is the private gradient to the bit, whatever the public gradient holds.
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
    keyword, so that forgetting it is a TypeError and not a silent zero. Inside `mirrordp.train`,
    leave the `alpha` of `train` at 1: what `train` mixes is not to be mixed again.

    Args:
        alpha: a number, a list, or a schedule; see `mirrordp.updates.schedules`.
        scale_noise: True is the paper: the update is given g + b and multiplies both by α_t. False
            is the variant of the authors' federated code, α_t g + b + (1 − α_t) ∇Ψ: the update
            must then be given α_t g + b, the sum weighted *before* its noise, as a step with
            `scale_noise=False` does inside `mirrordp.train`.

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
