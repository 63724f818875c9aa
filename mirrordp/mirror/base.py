"""The protocol of mirror maps, and helpers that all of them share.

A mirror map is a strictly convex function Ψ on flat parameter vectors. In: a point θ, a gradient
and a learning rate. Out: the point that Algorithm 1 of the paper (line 5) moves to,

    θ_{t+1} = argmin_{θ ∈ C}  η ⟨g, θ⟩ + B_Ψ(θ, θ_t),
    B_Ψ(θ, θ') = Ψ(θ) − Ψ(θ') − ⟨∇Ψ(θ'), θ − θ'⟩,

in the paper's two parts: `step` solves ∇Ψ(θ) = ∇Ψ(θ_t) − η g without the constraint, and `project`
takes the Bregman projection onto C.

Maps are pytrees. Pass a large map to a jitted function as an argument; if the function closes over
it, its matrices become constants of the compiled program. A map keeps public data in float64,
regardless of `jax_enable_x64`. `value`, `grad`, `inverse` and `step` compute in the dtype of their
argument; `project`, and `divergence` if it is not a sum of squares, compute in float64 and round to
that dtype; `minimizer` computes in float64 and rounds to JAX's default dtype.

Input that is not finite raises no error and causes no endless loop: `params` are then not finite
either, and `converged` is False.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp.mirror.projection import Constraint


class Solution(NamedTuple):
    """The result of a solver, and how well it solves the problem.

    Attributes:
        params: the flat parameter vector.
        converged: whether `residual` reached the solver's tolerance; always False for non-finite
            `params`.
        num_iterations: the number of outer iterations, which is zero for closed forms.
        residual: the quantity of the stopping test, relative to the size of the problem: the
            remaining gradient (inverse, step) or the mismatch of the active constraints (project,
            minimizer). It is zero for closed forms.
    """

    params: jax.Array
    converged: jax.Array
    num_iterations: jax.Array
    residual: jax.Array


@runtime_checkable
class MirrorMap(Protocol):
    """The protocol of mirror maps, which `tests/contracts/test_mirror_map_contract.py` tests."""

    @property
    def num_params(self) -> int:
        """The length p of the parameter vector."""
        ...

    def value(self, theta: Any) -> jax.Array:
        """Returns Ψ(θ)."""
        ...

    def grad(self, theta: Any) -> jax.Array:
        """Returns ∇Ψ(θ), a point of the dual space."""
        ...

    def inverse(self, dual: Any, init: Any) -> Solution:
        """Returns (∇Ψ)⁻¹(dual); iterative solvers start at `init`, closed forms ignore it."""
        ...

    def divergence(self, theta: Any, other: Any) -> jax.Array:
        """Returns B_Ψ(θ, other) ≥ 0."""
        ...

    def step(self, theta: Any, grad: Any, learning_rate: Any) -> Solution:
        """Returns argmin over the whole space of η ⟨g, θ'⟩ + B_Ψ(θ', θ)."""
        ...

    def project(self, theta: Any, constraint: Constraint) -> Solution:
        """Returns argmin over C of B_Ψ(·, θ)."""
        ...

    def minimizer(self, constraint: Constraint) -> Solution:
        """Returns argmin over C of Ψ, where Algorithm 1 starts."""
        ...


def as_vector(size: int, **values: Any) -> Any:
    """Returns the one named value as a flat floating-point JAX vector of the given length."""
    ((name, value),) = values.items()
    value = jnp.asarray(value)
    if value.shape != (size,):
        raise ValueError(
            f"{name} must be a flat vector of length {size}, got shape {value.shape}. Ravel a "
            "pytree first (jax.flatten_util.ravel_pytree)."
        )
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)


def as_float64(value: Any) -> jax.Array:
    """Returns a float64 JAX array, with or without `jax_enable_x64`."""
    with jax.enable_x64(True):
        return jnp.asarray(np.asarray(value, np.float64))


def finite_array(ndim: int, **values: Any) -> np.ndarray:
    """Returns the one named value as a finite float64 NumPy array with `ndim` axes."""
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
    """Returns the solution of a formula, which is exact unless something was not finite."""
    converged = jnp.all(jnp.isfinite(params))
    residual = jnp.where(converged, 0.0, jnp.nan).astype(params.dtype)
    return Solution(params, converged, jnp.zeros([], jnp.int32), residual)


def rounded(solution: Solution, dtype: Any) -> Solution:
    """Rounds a float64 solution to the caller's dtype; it is NaN if the solution is not finite."""
    params, converged, num_iterations, residual = solution
    finite = jnp.isfinite(residual) & jnp.all(jnp.isfinite(params))
    return Solution(
        jnp.where(finite, params, jnp.nan).astype(dtype),
        converged & finite,
        num_iterations.astype(jnp.int32),
        jnp.where(finite, residual, jnp.nan).astype(dtype),
    )


def project_float64(mirror_map: MirrorMap, theta: jax.Array, constraint: Constraint) -> Solution:
    """Projects a float64 point, and rounds to JAX's default dtype only at the end."""
    dtype = jnp.result_type(float)
    with jax.enable_x64(True):
        return rounded(mirror_map.project(theta, constraint), dtype)


def matvec(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """Returns matrix @ vector in the vector's dtype, without the GPUs' default of TF32."""
    return jnp.matmul(matrix.astype(vector.dtype), vector, precision=jax.lax.Precision.HIGHEST)
