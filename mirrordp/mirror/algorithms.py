"""Two relatives of the mirror step, as pure state and step functions.

The accelerated method keeps two sequences on the same map, after Wang, Ye and Xu (2017,
"Differentially private empirical risk minimization revisited") and the linear coupling of Allen-Zhu
and Orecchia (2014). The lazy method is the dual-averaging form of the paper's appendix, exact or
linearised.

All of this happens after the noise: `grad` is the noisy gradient, which may be used repeatedly.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mirrordp.mirror.base import MirrorMap, Solution
from mirrordp.mirror.projection import Constraint, WholeSpace


class AcceleratedState(NamedTuple):
    """The state (y_k, z_k, k): the last y is the result, and z is the mirror sequence."""

    y: jax.Array
    z: jax.Array
    num_steps: jax.Array


def accelerated_init(theta: Any) -> AcceleratedState:
    """Starts both sequences at θ_0."""
    theta = jnp.asarray(theta)
    return AcceleratedState(theta, theta, jnp.zeros([], jnp.int32))


def accelerated_query(state: AcceleratedState) -> jax.Array:
    """Returns x_{k+1} = τ z_k + (1 − τ) y_k, τ = 2/(k + 2), where step k needs its gradient."""
    weight = jnp.asarray(2 / (state.num_steps + 2), state.y.dtype)
    return weight * state.z + (1 - weight) * state.y


def accelerated_step(
    mirror_map: MirrorMap,
    state: AcceleratedState,
    grad: Any,
    learning_rate: Any,
    *,
    constraint: Constraint | None = None,
) -> tuple[AcceleratedState, jax.Array]:
    """Takes one step of accelerated mirror descent, with the gradient at `accelerated_query`:

        y_{k+1} = argmin_{y ∈ C} η ⟨g, y⟩ + B_Ψ(y, x_{k+1}),
        z_{k+1} = argmin_{z ∈ C} (k + 2)/2 · η ⟨g, z⟩ + B_Ψ(z, z_k).

    For quadratic Ψ, a convex loss f that is (1/η)-smooth in the norm of Ψ, and no noise,

        f(y_T) − min f ≤ 4 B_Ψ(θ*, θ_0) / (η T²).

    For other maps the scheme runs, but acceleration is not proved. The weight of the noise grows
    with k, so that few steps are best.

    Args:
        mirror_map: Ψ.
        state: y_k, z_k and k.
        grad: g, the noisy gradient at x_{k+1}.
        learning_rate: η.
        constraint: C, by default the whole space.

    Returns:
        The next state, and whether all solvers converged.
    """
    constraint = WholeSpace() if constraint is None else constraint
    coupling = jnp.asarray((state.num_steps + 2) / 2, state.y.dtype)
    y, y_converged = _constrained_step(
        mirror_map, accelerated_query(state), grad, learning_rate, constraint
    )
    z, z_converged = _constrained_step(
        mirror_map, state.z, grad, coupling * learning_rate, constraint
    )
    return AcceleratedState(y, z, state.num_steps + 1), y_converged & z_converged


def _constrained_step(mirror_map, theta, grad, learning_rate, constraint):
    free = mirror_map.step(theta, grad, learning_rate)
    projected = mirror_map.project(free.params, constraint)
    return projected.params, free.converged & projected.converged


class LazyState(NamedTuple):
    """The sum Σ η_i g_i over the steps so far."""

    weighted_grad_sum: jax.Array


def lazy_init(theta: Any) -> LazyState:
    """Returns the state before the first gradient; θ should be argmin Ψ̂, see `lazy_step`."""
    return LazyState(jnp.zeros_like(jnp.asarray(theta)))


def lazy_step(
    mirror_map: MirrorMap, state: LazyState, theta: Any, grad: Any, learning_rate: Any
) -> tuple[LazyState, Solution]:
    """Takes one step of the lazy form of the paper's appendix, solved exactly:

        θ_{t+1} = argmin_θ ⟨Σ_{i ≤ t} η_i g_i, θ⟩ + Ψ̂(θ) = (∇Ψ̂)⁻¹(−Σ_{i ≤ t} η_i g_i).

    From θ_1 = argmin Ψ̂ and without constraint, the iterates are those of mirror steps on Ψ̂.

    Args:
        mirror_map: Ψ̂. The paper's Ψ̂ = Ψ + ½‖θ‖² is `regularized()` of the map of Ψ.
        state: the weighted sum of the gradients before this step.
        theta: θ_t, where an iterative inverse starts.
        grad: g_t, the noisy gradient at θ_t.
        learning_rate: η_t.
    """
    state = LazyState(state.weighted_grad_sum + learning_rate * jnp.asarray(grad))
    return state, mirror_map.inverse(-state.weighted_grad_sum, theta)


class LinearizedLazyState(NamedTuple):
    """The sums Σ η_i g_i and Σ ∇Ψ(θ_i), and the number t of steps so far."""

    weighted_grad_sum: jax.Array
    public_grad_sum: jax.Array
    num_steps: jax.Array


def linearized_lazy_init(theta: Any) -> LinearizedLazyState:
    """Returns the state before the first gradient."""
    zero = jnp.zeros_like(jnp.asarray(theta))
    return LinearizedLazyState(zero, zero, jnp.zeros([], jnp.int32))


def linearized_lazy_step(
    state: LinearizedLazyState, grad: Any, public_grad: Any, learning_rate: Any
) -> tuple[LinearizedLazyState, jax.Array]:
    """Takes one step of the lazy form with Ψ linearised at each θ_i, an update without α:

        θ_{t+1} = argmin_θ Σ_{i ≤ t} η_i ⟨g_i + ∇Ψ(θ_i) / (t η_i), θ⟩ + ½‖θ‖²
                = −Σ_{i ≤ t} η_i g_i − 1/t Σ_{i ≤ t} ∇Ψ(θ_i).

    It needs gradients of the public loss only, and no map. It equals `lazy_step` if Ψ is linear.

    Args:
        state: both sums and t before this step.
        grad: g_t, the noisy gradient at θ_t.
        public_grad: ∇Ψ(θ_t).
        learning_rate: η_t.

    Returns:
        The next state and θ_{t+1}.
    """
    state = LinearizedLazyState(
        state.weighted_grad_sum + learning_rate * jnp.asarray(grad),
        state.public_grad_sum + jnp.asarray(public_grad),
        state.num_steps + 1,
    )
    return state, -state.weighted_grad_sum - state.public_grad_sum / state.num_steps
