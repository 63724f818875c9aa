"""Any strongly convex JAX function as a mirror map, inverted by Newton's method with CG.

In: a function of the flat parameter vector. Out: a map whose step solves ∇Ψ(θ) = ∇Ψ(θ_t) − η g to
the precision of the dtype. It uses Hessian-vector products only and forms no p × p matrix.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mirrordp import _validate
from mirrordp.mirror import projection
from mirrordp.mirror.base import (
    Solution,
    as_float64,
    as_vector,
    closed_form,
    rounded,
)
from mirrordp.mirror.projection import Ball, Constraint, WholeSpace
from mirrordp.privacy._float64 import float64_call

MAX_ITERATIONS = 50
_SUFFICIENT_DECREASE = 1e-4
_MAX_HALVINGS = 30
# A projection finds the root of the multiplier to 1e-10, for which the solver must be finer.
_PROJECTION_TOLERANCE = 1e-12


def default_tolerance(dtype: Any) -> float:
    """Returns the residual that the solver can reach: 2e-6 in float32, 1e-11 in float64."""
    return 1e-11 if jnp.finfo(dtype).bits == 64 else 2e-6


class _NewtonState(NamedTuple):
    theta: jax.Array
    value: jax.Array
    grad: jax.Array
    size: jax.Array
    num_iterations: jax.Array
    stalled: jax.Array


def solve_gradient_equation(
    function: Callable[[jax.Array], jax.Array],
    dual: jax.Array,
    init: jax.Array,
    *,
    tolerance: float,
    max_iterations: int = MAX_ITERATIONS,
) -> Solution:
    """Finds the θ with ∇Ψ(θ) = z, as the minimiser of φ(θ) = Ψ(θ) − ⟨z, θ⟩.

    Newton's method solves H d = −∇φ by conjugate gradients to the relative accuracy
    min(½, √(‖∇φ‖/size)), which makes the convergence superlinear. It halves d until φ decreases
    sufficiently or ‖∇φ‖ is halved. The second test is needed at the end of the run, where the
    decrease of φ is smaller than its rounding error.

    The residual is ‖∇Ψ(θ) − z‖ / size with size = ‖z‖ + ‖∇Ψ(0)‖ + ‖∇²Ψ(θ) θ‖. The last term is the
    effect of a relative error in θ on ∇Ψ. Together the terms give the level below which the
    gradient is rounding error, and none depends on the start. At least one iteration is made, so
    that a step too small for the test is still taken.

    Args:
        function: Ψ, strongly convex.
        dual: z.
        init: the start.
        tolerance: the residual to reach.
        max_iterations: the largest number of Newton iterations.
    """
    value_and_grad = jax.value_and_grad(lambda theta: function(theta) - jnp.dot(dual, theta))
    gradient = jax.grad(function)
    norm = jnp.linalg.norm
    at_zero = norm(gradient(jnp.zeros_like(init)))
    fixed_size = norm(dual) + jnp.where(jnp.isfinite(at_zero), at_zero, 0)

    def size_at(theta: jax.Array) -> jax.Array:
        size = fixed_size + norm(jax.jvp(gradient, (theta,), (theta,))[1])
        # All terms vanish only where θ = 0 solves the equation exactly.
        return jnp.where(size == 0, 1, size)

    def unfinished(state: _NewtonState):
        left = norm(state.grad) > tolerance * state.size
        left |= (state.num_iterations == 0) & (norm(state.grad) > 0)
        return left & ~state.stalled & (state.num_iterations < max_iterations)

    def iterate(state: _NewtonState) -> _NewtonState:
        hessian = jax.linearize(gradient, state.theta)[1]
        grad_norm = norm(state.grad)
        accuracy = jnp.minimum(0.5, jnp.sqrt(grad_norm / state.size)) * grad_norm
        direction = _conjugate_gradients(hessian, -state.grad, accuracy)
        slope = jnp.dot(state.grad, direction)

        def accepted(rate, value, grad):
            decrease = value <= state.value + _SUFFICIENT_DECREASE * rate * slope
            # Strictly, since a step too small to change anything is no success.
            decrease &= value < state.value
            return decrease | (norm(grad) <= 0.5 * grad_norm)

        def search(carry):
            rate = carry[0] / 2
            return rate, *value_and_grad(state.theta + rate * direction)

        def searching(carry):
            return ~accepted(*carry) & (carry[0] > 2.0**-_MAX_HALVINGS)

        # The first pass of the loop halves the rate to one.
        start = (
            jnp.full_like(grad_norm, 2.0),
            jnp.full_like(state.value, jnp.inf),
            jnp.full_like(state.grad, jnp.inf),
        )
        rate, value, grad = jax.lax.while_loop(searching, search, start)
        moved = accepted(rate, value, grad)
        theta = jnp.where(moved, state.theta + rate * direction, state.theta)
        return _NewtonState(
            theta,
            jnp.where(moved, value, state.value),
            jnp.where(moved, grad, state.grad),
            size_at(theta),
            state.num_iterations + 1,
            ~moved,
        )

    start = _NewtonState(
        init,
        *value_and_grad(init),
        size_at(init),
        jnp.zeros([], jnp.int32),
        jnp.zeros([], bool),
    )
    end = jax.lax.while_loop(unfinished, iterate, start)
    residual = norm(end.grad) / end.size
    solution = Solution(end.theta, residual <= tolerance, end.num_iterations, residual)
    return rounded(solution, init.dtype)


def _conjugate_gradients(
    hessian: Callable[[jax.Array], jax.Array], target: jax.Array, accuracy: jax.Array
) -> jax.Array:
    """Returns d with ‖H d − target‖ ≤ accuracy, or the best found in p + 10 iterations.

    If rounding (or a function that is not convex) gives a curvature that is not positive, the
    iteration ends with the current d; in the first iteration this is the steepest descent
    direction.
    """

    def unfinished(carry):
        _, residual, _, num_iterations, stopped = carry
        left = jnp.linalg.norm(residual) > accuracy
        return left & ~stopped & (num_iterations < len(target) + 10)

    def iterate(carry):
        solution, residual, direction, num_iterations, _ = carry
        image = hessian(direction)
        curvature = jnp.dot(direction, image)
        usable = curvature > 0
        squared = jnp.dot(residual, residual)
        length = jnp.where(usable, squared / jnp.where(usable, curvature, 1), 0)
        first = num_iterations == 0
        solution = jnp.where(usable | ~first, solution + length * direction, target)
        updated = residual - length * image
        direction = updated + (jnp.dot(updated, updated) / squared) * direction
        return solution, updated, direction, num_iterations + 1, ~usable

    start = (jnp.zeros_like(target), target, target, jnp.zeros([], jnp.int32), jnp.zeros([], bool))
    return jax.lax.while_loop(unfinished, iterate, start)[0]


class SmoothMap(abc.ABC):
    """The base of maps that are defined by `value`; the rest follows by autodiff and Newton–CG.

    Attributes:
        tolerance: the residual at which `inverse` and `step` count as converged. By default it
            follows from the dtype.
        max_iterations: the largest number of Newton iterations.
    """

    tolerance: float | None
    max_iterations: int
    num_params: Any

    @abc.abstractmethod
    def value(self, theta: Any) -> jax.Array:
        """Returns Ψ(θ)."""

    def grad(self, theta: Any) -> jax.Array:
        """Returns ∇Ψ(θ)."""
        return jax.grad(self.value)(as_vector(self.num_params, theta=theta))

    def inverse(self, dual: Any, init: Any) -> Solution:
        """Returns (∇Ψ)⁻¹(dual), found by Newton–CG from `init`."""
        init = as_vector(self.num_params, init=init)
        dual = as_vector(self.num_params, dual=dual).astype(init.dtype)
        tolerance = default_tolerance(init.dtype) if self.tolerance is None else self.tolerance
        return _invert(self, dual, init, tolerance, self.max_iterations)

    def divergence(self, theta: Any, other: Any) -> jax.Array:
        """Computes B_Ψ(θ, θ') in float64; a negative rounding error becomes zero."""
        theta = as_vector(self.num_params, theta=theta)
        other = as_vector(self.num_params, other=other)

        def from_definition(mirror_map: SmoothMap, theta: jax.Array, other: jax.Array) -> jax.Array:
            left, right = theta.astype(jnp.float64), other.astype(jnp.float64)
            linear = mirror_map.value(right) + jnp.dot(mirror_map.grad(right), left - right)
            divergence = mirror_map.value(left) - linear
            return jnp.where(divergence < 0, 0.0, divergence).astype(theta.dtype)

        return float64_call(from_definition, self, theta, other)

    def step(self, theta: Any, grad: Any, learning_rate: Any) -> Solution:
        """Returns (∇Ψ)⁻¹(∇Ψ(θ) − η g); the solver starts at θ."""
        theta = as_vector(self.num_params, theta=theta)
        grad = as_vector(self.num_params, grad=grad)
        return self.inverse(self.grad(theta) - learning_rate * grad, theta)

    def project(self, theta: Any, constraint: Constraint) -> Solution:
        """Computes the Bregman projection in float64.

        The projection onto a ball solves ∇Ψ(x) + μ x = ∇Ψ(θ), with μ ≥ 0 such that ‖x‖ = r. As
        ‖x(μ)‖ decreases in μ, a bracketing root finder gives μ; each evaluation is a Newton solve
        that starts at the last solution.
        """
        theta = as_vector(self.num_params, theta=theta)
        if isinstance(constraint, WholeSpace):
            return closed_form(theta)
        if not isinstance(constraint, Ball):
            raise projection.refuse(constraint, type(self).__name__)
        return _onto_ball(self, theta, as_float64(constraint.radius))

    def minimizer(self, constraint: Constraint) -> Solution:
        """Returns argmin over C of Ψ in float64, by projecting the unconstrained minimiser."""
        dtype = jnp.result_type(float)
        with jax.enable_x64(True):
            zero = jnp.zeros(self.num_params)
            free = self.inverse(zero, zero)
            projected = self.project(free.params, constraint)
            solution = Solution(
                projected.params,
                projected.converged & free.converged,
                projected.num_iterations + free.num_iterations,
                jnp.maximum(projected.residual, free.residual),
            )
            return rounded(solution, dtype)


# Compiled here so that eager callers do not pay for a compilation at each call.
@functools.partial(jax.jit, static_argnames=("tolerance", "max_iterations"))
def _invert(mirror_map, dual, init, tolerance, max_iterations) -> Solution:
    return solve_gradient_equation(
        mirror_map.value, dual, init, tolerance=tolerance, max_iterations=max_iterations
    )


@jax.jit
def _onto_ball(mirror_map: SmoothMap, theta: jax.Array, radius: jax.Array) -> Solution:
    def solve(mirror_map: SmoothMap, theta: jax.Array, radius: jax.Array) -> Solution:
        wide = theta.astype(jnp.float64)
        dual = mirror_map.grad(wide)

        def mismatch(multiplier, last):
            def penalized(point):
                return mirror_map.value(point) + 0.5 * multiplier * jnp.sum(point**2)

            solution = solve_gradient_equation(
                penalized, dual, last[0], tolerance=_PROJECTION_TOLERANCE
            )
            point = solution.params
            return radius / jnp.linalg.norm(point) - 1, (point, solution.residual)

        # This μ is large enough: monotonicity of ∇Ψ gives μ‖x‖² ≤ ⟨∇Ψ(θ) − ∇Ψ(0), x⟩.
        upper = jnp.linalg.norm(dual - mirror_map.grad(jnp.zeros_like(wide))) / radius
        start = (wide, jnp.zeros_like(upper))
        root = projection.increasing_root(mismatch, upper, start, tolerance=1e-10)
        point, inner_residual = root.aux
        inside = jnp.linalg.norm(wide) <= radius
        residual = jnp.where(inside, 0.0, jnp.maximum(inner_residual, jnp.abs(root.value)))
        solution = Solution(
            jnp.where(inside, wide, point),
            residual <= projection.TOLERANCE,
            root.num_iterations,
            residual,
        )
        return rounded(solution, theta.dtype)

    return float64_call(solve, mirror_map, theta, radius)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConvexMap(SmoothMap):
    """The map whose Ψ is the given function.

    Args:
        function: Ψ, from flat parameters to a scalar: a strongly convex JAX function that computes
            in the dtype of its argument. (Adding a ridge makes a convex loss strongly convex.) The
            projection calls it in float64.
        num_params: the length p of the parameter vector.
        tolerance: see `SmoothMap`.
        max_iterations: see `SmoothMap`.
    """

    function: Callable[[jax.Array], jax.Array] = dataclasses.field(metadata={"static": True})
    num_params: int = dataclasses.field(metadata={"static": True})
    tolerance: float | None = dataclasses.field(default=None, metadata={"static": True})
    max_iterations: int = dataclasses.field(default=MAX_ITERATIONS, metadata={"static": True})

    def __post_init__(self):
        _validate.positive_integer(num_params=self.num_params, max_iterations=self.max_iterations)
        if self.tolerance is not None:
            _validate.positive(tolerance=self.tolerance)

    def regularized(self, weight: float = 1.0) -> "ConvexMap":
        """Returns Ψ + ½ weight ‖θ‖²; weight = 1 gives the Ψ̂ of the paper's appendix."""
        _validate.positive(weight=weight)

        def function(theta: jax.Array) -> jax.Array:
            return self.function(theta) + 0.5 * weight * jnp.sum(theta**2)

        return dataclasses.replace(self, function=function)

    def value(self, theta: Any) -> jax.Array:
        """Returns Ψ(θ)."""
        return self.function(as_vector(self.num_params, theta=theta))
