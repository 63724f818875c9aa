"""What every mirror map offers, and the small things that all of them share.

A mirror map is a strictly convex function Ψ on flat parameter vectors. In: a point θ, a gradient, a
learning rate. Out: the point that Algorithm 1 of the paper (line 5) moves to,

    θ_{t+1} = argmin_{θ ∈ C}  η ⟨g, θ⟩ + B_Ψ(θ, θ_t),
    B_Ψ(θ, θ') = Ψ(θ) − Ψ(θ') − ⟨∇Ψ(θ'), θ − θ'⟩,

in the paper's two parts: `step` solves ∇Ψ(θ) = ∇Ψ(θ_t) − η g without the constraint, and `project`
takes the Bregman projection onto C.

Maps are pytrees: give a large one to a jitted function as an argument rather than closing over it,
or its matrices become constants of the compiled program. What a map knows about the public data is
kept in float64 whatever `jax_enable_x64` says. `value`, `grad`, `inverse` and `step` compute in the
dtype of their argument; `project`, and `divergence` where it is not a sum of squares, compute in
float64 and round to that dtype; `minimizer` computes in float64 and rounds to JAX's default.

Input that is not finite never raises and never loops: `params` come back non-finite and `converged`
is False.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp.mirror.projection import Constraint


class Solution(NamedTuple):
    """A point, and how well it solves what it was asked to solve.

    Attributes:
        params: the flat parameter vector.
        converged: whether `residual` reached the solver's tolerance; always False for non-finite
            `params`.
        num_iterations: outer iterations; zero where a closed form was used.
        residual: what the stopping test looked at, relative to the size of the problem: the
            gradient that is left over (inverse, step) or the mismatch of the active constraints
            (project, minimizer). Zero for closed forms.
    """

    params: jax.Array
    converged: jax.Array
    num_iterations: jax.Array
    residual: jax.Array


@runtime_checkable
class MirrorMap(Protocol):
    """The protocol of mirror maps; `tests/contracts/test_mirror_map_contract.py` is its law."""

    @property
    def num_params(self) -> int:
        """The length p of the parameter vector."""
        ...

    def value(self, theta: Any) -> jax.Array:
        """Ψ(θ)."""
        ...

    def grad(self, theta: Any) -> jax.Array:
        """∇Ψ(θ), a point of the dual space."""
        ...

    def inverse(self, dual: Any, init: Any) -> Solution:
        """(∇Ψ)⁻¹(dual); iterative solvers start at `init`, closed forms ignore it."""
        ...

    def divergence(self, theta: Any, other: Any) -> jax.Array:
        """B_Ψ(θ, other) ≥ 0."""
        ...

    def step(self, theta: Any, grad: Any, learning_rate: Any) -> Solution:
        """argmin over the whole space of η ⟨g, θ'⟩ + B_Ψ(θ', θ)."""
        ...

    def project(self, theta: Any, constraint: Constraint) -> Solution:
        """argmin over C of B_Ψ(·, θ)."""
        ...

    def minimizer(self, constraint: Constraint) -> Solution:
        """argmin over C of Ψ: where Algorithm 1 starts."""
        ...


def as_vector(size: int, **values: Any) -> Any:
    """The one named value as a flat floating-point JAX vector of the given length."""
    ((name, value),) = values.items()
    value = jnp.asarray(value)
    if value.shape != (size,):
        raise ValueError(
            f"{name} must be a flat vector of length {size}, got shape {value.shape}. Ravel a "
            "pytree first (jax.flatten_util.ravel_pytree)."
        )
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)


def as_float64(value: Any) -> jax.Array:
    """A float64 JAX array, with or without `jax_enable_x64`."""
    with jax.enable_x64(True):
        return jnp.asarray(np.asarray(value, np.float64))


def finite_array(ndim: int, **values: Any) -> np.ndarray:
    """The one named value as a finite float64 NumPy array with `ndim` axes."""
    ((name, value),) = values.items()
    array = np.asarray(value, np.float64)
    if array.ndim != ndim or array.size == 0:
        raise ValueError(
            f"{name} must be a non-empty array with {ndim} axes, got shape {array.shape}."
        )
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} must be finite, got {np.count_nonzero(~np.isfinite(array))} values that are "
            "NaN or infinite. Remove or impute them."
        )
    return array


def closed_form(params: jax.Array) -> Solution:
    """The solution that a formula gives: exact, unless something was not finite."""
    converged = jnp.all(jnp.isfinite(params))
    residual = jnp.where(converged, 0.0, jnp.nan).astype(params.dtype)
    return Solution(params, converged, jnp.zeros([], jnp.int32), residual)


def rounded(solution: Solution, dtype: Any) -> Solution:
    """A float64 solution in the caller's dtype; NaN where there is no finite answer."""
    params, converged, num_iterations, residual = solution
    finite = jnp.isfinite(residual) & jnp.all(jnp.isfinite(params))
    return Solution(
        jnp.where(finite, params, jnp.nan).astype(dtype),
        converged & finite,
        num_iterations.astype(jnp.int32),
        jnp.where(finite, residual, jnp.nan).astype(dtype),
    )


def project_float64(mirror_map: MirrorMap, theta: jax.Array, constraint: Constraint) -> Solution:
    """The projection of a float64 point, rounded to JAX's default dtype only at the end."""
    dtype = jnp.result_type(float)
    with jax.enable_x64(True):
        return rounded(mirror_map.project(theta, constraint), dtype)


def matvec(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """matrix @ vector in the vector's dtype, without the TF32 that GPUs use by default."""
    return jnp.matmul(matrix.astype(vector.dtype), vector, precision=jax.lax.Precision.HIGHEST)
