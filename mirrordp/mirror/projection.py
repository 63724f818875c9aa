"""Constraint sets, and Bregman projections onto them for quadratic Ψ.

In: a point in the eigenbasis of the Hessian of Ψ. Out: the point of the set that is nearest in
B_Ψ. By Lagrange duality each projection is a root of an increasing function of one multiplier (two
nested ones for `TheoremSet`), found by bracketing in float64.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from mirrordp import _validate

TOLERANCE = 1e-8
"""The largest relative mismatch of an active constraint that still counts as solved."""


@dataclasses.dataclass(frozen=True)
class WholeSpace:
    """The set of all parameters: no constraint."""


@dataclasses.dataclass(frozen=True)
class Ball:
    """The ball {θ: ‖θ‖ ≤ r}.

    Args:
        radius: r.
    """

    radius: float

    def __post_init__(self):
        _validate.positive(radius=self.radius)


@dataclasses.dataclass(frozen=True)
class TheoremSet:
    """The set of the paper's theorem on linear regression, for `QuadraticMap` only:

        {θ: ‖θ‖ ≤ r,  ‖∇Ψ(θ)‖ ≤ c √(log(1/δ) / n_pub)}.

    Ψ is the public loss itself (ridge included), not the rescaled one. For other losses the set
    need not be convex, so that other maps refuse it.

    Args:
        radius: r, a bound on the norm of the population minimiser.
        num_public: n_pub.
        delta: δ, the probability with which the set may miss the population minimiser.
        constant: c, hidden in the paper's O(·).
    """

    radius: float
    num_public: int
    delta: float
    constant: float = 1.0

    def __post_init__(self):
        _validate.positive(radius=self.radius, constant=self.constant)
        _validate.positive_integer(num_public=self.num_public)
        _validate.open_unit_interval(delta=self.delta)

    @property
    def gradient_bound(self) -> float:
        """The bound c √(log(1/δ) / n_pub)."""
        return self.constant * math.sqrt(math.log(1 / self.delta) / self.num_public)


Constraint: TypeAlias = WholeSpace | Ball | TheoremSet


def refuse(constraint: Any, map_name: str) -> TypeError:
    """Returns the error for a constraint that a map cannot project onto."""
    if isinstance(constraint, TheoremSet):
        return TypeError(
            f"TheoremSet is defined for QuadraticMap only, got {map_name}: for other maps the set "
            "need not be convex. Use Ball(radius)."
        )
    return TypeError(
        f"constraint must be WholeSpace, Ball or TheoremSet, got {type(constraint).__name__}."
    )


class Root(NamedTuple):
    """A root of an increasing function, with the function's last value and by-product there.

    If the function is already positive at zero, `value` is zero: a constraint that is slack has no
    mismatch.
    """

    point: jax.Array
    value: jax.Array
    aux: Any
    num_iterations: jax.Array


class _Bracket(NamedTuple):
    low: jax.Array
    low_value: jax.Array
    high: jax.Array
    high_value: jax.Array
    found: jax.Array
    last_side: jax.Array


def increasing_root(
    function: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    upper: jax.Array,
    aux: Any,
    *,
    tolerance: float = 1e-14,
    max_iterations: int = 200,
) -> Root:
    """Finds where an increasing function crosses zero on [0, ∞), by the Illinois method.

    This is regula falsi that halves the value of an end point that was kept twice: the bracket is
    never lost, and the convergence is superlinear. It is meant for r/‖θ(μ)‖ − 1, which is nearly
    linear in μ.

    Args:
        function: maps (point, aux) to (value, aux). Each call gets the aux of the last one, which
            allows warm starts.
        upper: a guess of a point where the function is not negative; it grows until it is one.
        aux: the first by-product, which fixes shapes and dtypes.
        tolerance: the search stops at |value| ≤ tolerance.
        max_iterations: the largest number of evaluations.

    Returns:
        The root, which is 0 if the function is not negative there.
    """

    def unfinished(carry):
        root, bracket = carry
        width = bracket.high - bracket.low
        wide = ~bracket.found | (width > 4 * jnp.finfo(upper.dtype).eps * bracket.high)
        return (jnp.abs(root.value) > tolerance) & wide & (root.num_iterations < max_iterations)

    # The value at 0, the search for an upper end and the iteration itself share one loop body, so
    # that a function that contains a whole solver is compiled once.
    def improve(carry):
        root, (low, low_value, high, high_value, found, last_side) = carry
        first = root.num_iterations == 0
        secant = (low * high_value - high * low_value) / (high_value - low_value)
        # If rounding puts the secant point outside of the bracket, bisect.
        secant = jnp.where((secant > low) & (secant < high), secant, 0.5 * (low + high))
        point = jnp.where(first, 0.0, jnp.where(found, secant, high))
        value, aux = function(point, root.aux)
        right = value >= 0
        side = jnp.where(right, 1, -1).astype(jnp.int32)
        shrink = jnp.where(found & (side == last_side), 0.5, 1.0)
        bracket = _Bracket(
            low=jnp.where(right, low, point),
            low_value=jnp.where(right, shrink * low_value, value),
            high=jnp.where(right, point, jnp.where(found | first, high, 16 * high)),
            high_value=jnp.where(right, value, shrink * high_value),
            found=found | right,
            last_side=side,
        )
        value = jnp.where(first & right, 0.0, value)
        return Root(point, value, aux, root.num_iterations + 1), bracket

    nothing, infinity = jnp.zeros_like(upper), jnp.full_like(upper, jnp.inf)
    start = Root(nothing, infinity, aux, jnp.zeros([], jnp.int32))
    bracket = _Bracket(
        nothing, -infinity, upper, infinity, jnp.zeros([], bool), jnp.zeros([], jnp.int32)
    )
    return jax.lax.while_loop(unfinished, improve, (start, bracket))[0]


class Projected(NamedTuple):
    """A projection in eigen-coordinates."""

    coordinates: jax.Array
    num_iterations: jax.Array
    residual: jax.Array


def _solve_ball(weighted: jax.Array, curvature: jax.Array, radius: jax.Array | float) -> Root:
    """Finds μ ≥ 0 with ‖weighted / (curvature + μ)‖ ≤ r, tight unless μ = 0; aux is the vector."""

    def mismatch(multiplier, _):
        point = weighted / (curvature + multiplier)
        return radius / jnp.linalg.norm(point) - 1, point

    # This μ is large enough: ‖weighted / (curvature + μ)‖ ≤ ‖weighted‖ / μ.
    return increasing_root(mismatch, jnp.linalg.norm(weighted) / radius, weighted)


def onto_ball(point: jax.Array, eigenvalues: jax.Array, radius: jax.Array | float) -> Projected:
    """Minimises ½ Σ λ_i (x_i − a_i)² over ‖x‖ ≤ r, by x_i = λ_i a_i / (λ_i + μ)."""
    root = _solve_ball(eigenvalues * point, eigenvalues, radius)
    inside = root.point == 0
    return Projected(jnp.where(inside, point, root.aux), root.num_iterations, jnp.abs(root.value))


def smallest_gradient_norm(
    center: jax.Array, eigenvalues: jax.Array, radius: jax.Array | float
) -> jax.Array:
    """Returns the least ‖H (x − c)‖ over ‖x‖ ≤ r; above the gradient bound the set is empty."""
    nearest = onto_ball(center, eigenvalues**2, radius).coordinates
    return jnp.linalg.norm(eigenvalues * (nearest - center))


def onto_theorem_set(
    point: jax.Array,
    center: jax.Array,
    eigenvalues: jax.Array,
    radius: jax.Array,
    gradient_bound: jax.Array,
) -> Projected:
    """Minimises ½ Σ λ_i (x_i − a_i)² over ‖x‖ ≤ r and ‖H (x − c)‖ ≤ b.

    Stationarity with multipliers μ, ν ≥ 0 gives x_i = (λ_i a_i + ν λ_i² c_i) / (λ_i + μ + ν λ_i²).
    For each ν the inner problem finds μ(ν). The dual function is concave, so that the gradient
    constraint's value at (μ(ν), ν) is monotone in ν, and an outer bracket finds ν.
    """

    def mismatch(nu, _):
        curvature = eigenvalues + nu * eigenvalues**2
        weighted = eigenvalues * point + nu * eigenvalues**2 * center
        root = _solve_ball(weighted, curvature, radius)
        gradient = jnp.linalg.norm(eigenvalues * (root.aux - center))
        return gradient_bound / gradient - 1, (root.aux, jnp.abs(root.value))

    # Without the ball ν = (‖H(a − c)‖/b − 1)/λ_min is enough; with it ν may have to be larger.
    distance = jnp.linalg.norm(eigenvalues * (point - center))
    upper = jnp.maximum(distance / gradient_bound, 1.0) / jnp.min(eigenvalues)
    # The inner solution is exact to about 1e-14, which limits the accuracy of the outer value.
    root = increasing_root(mismatch, upper, (point, jnp.zeros_like(upper)), tolerance=1e-12)
    coordinates, ball_residual = root.aux
    # With μ = ν = 0 the formula returns a up to rounding; a point inside must not move at all.
    inside = (jnp.linalg.norm(point) <= radius) & (distance <= gradient_bound)
    return Projected(
        jnp.where(inside, point, coordinates),
        root.num_iterations,
        jnp.maximum(ball_residual, jnp.abs(root.value)),
    )
