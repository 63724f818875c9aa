"""The low-rank public-subspace map, which projects noisy gradients onto public directions.

In: k directions found on public data. Out: a map whose step keeps the part of the gradient (and of
the noise) inside their span and damps the rest by ρ. At ρ = 0 this is the projected DP-SGD of Zhou,
Wu and Banerjee (2020) and Kairouz et al. (2020), which the paper names as special cases.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from mirrordp import _validate
from mirrordp.mirror import projection
from mirrordp.mirror.base import (
    Solution,
    as_float64,
    as_vector,
    closed_form,
    finite_array,
    matvec,
    project_float64,
    rounded,
)
from mirrordp.mirror.projection import Ball, Constraint, WholeSpace
from mirrordp.privacy._float64 import float64_call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SubspaceMap:
    """The map Ψ(θ) = ½ (θ − c)ᵀ (P + (I − P)/ρ) (θ − c); P projects onto public directions.

    The step is θ − η (P g + ρ (I − P) g).

    ρ = 0 stands for the exact limit, not for a small number. Ψ is then ½‖P(θ − c)‖² on the affine
    set c + im P and infinite elsewhere; a step never leaves this set. `value`, `grad` and
    `divergence` use the component in im P alone, which determines them on that set: ∇Ψ(θ) =
    P(θ − c), (∇Ψ)⁻¹(z) = c + Pz. The projection onto a ball keeps the component outside im P (and
    shrinks it only if it alone is longer than the radius), as the limit of the projections for
    ρ → 0 does.

    Attributes:
        basis: orthonormal columns that span im P, shape (p, k).
        center: c, for instance the public pre-training result.
        rho: ρ in [0, 1].
    """

    basis: jax.Array
    center: jax.Array
    rho: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_directions(
        cls, directions: Any, rank: int, *, rho: float = 0.0, center: Any | None = None
    ) -> "SubspaceMap":
        """Makes the map of the span of the top right singular vectors of public directions.

        Args:
            directions: public per-example gradients or features, one per row, shape (m, p); not
                centred, so that their mean counts as a direction.
            rank: k, the number of singular vectors to keep.
            rho: ρ, the factor of a gradient outside the span.
            center: c, by default the origin.
        """
        rows = finite_array(2, directions=directions)
        _validate.positive_integer(rank=rank)
        _validate.non_negative(rho=rho)
        if rho > 1:
            raise ValueError(
                f"rho must be at most 1, got {rho!r}. Above 1 it would amplify the gradient "
                "outside the span."
            )
        p = rows.shape[1]
        start = np.zeros(p) if center is None else finite_array(1, center=center)
        if len(start) != p:
            raise ValueError(f"center must have length {p}, got {len(start)}.")
        return cls(as_float64(_span(rows, rank)), as_float64(start), float(rho))

    @property
    def num_params(self) -> int:
        """The length p of the parameter vector."""
        return self.basis.shape[0]

    def along(self, vector: jax.Array) -> jax.Array:
        """Returns P vector."""
        return matvec(self.basis, matvec(self.basis.T, vector))

    def value(self, theta: Any) -> jax.Array:
        """Returns Ψ(θ)."""
        theta = as_vector(self.num_params, theta=theta)
        return self._half_square(theta - self.center.astype(theta.dtype))

    def _half_square(self, shift: jax.Array) -> jax.Array:
        along = self.along(shift)
        inside = 0.5 * jnp.sum(along**2)
        if self.rho == 0:
            return inside
        return inside + 0.5 * jnp.sum((shift - along) ** 2) / self.rho

    def grad(self, theta: Any) -> jax.Array:
        """Returns ∇Ψ(θ) = (P + (I − P)/ρ)(θ − c)."""
        theta = as_vector(self.num_params, theta=theta)
        shift = theta - self.center.astype(theta.dtype)
        along = self.along(shift)
        return along if self.rho == 0 else along + (shift - along) / self.rho

    def _damp(self, vector: jax.Array) -> jax.Array:
        """Returns (P + ρ (I − P)) vector."""
        along = self.along(vector)
        return along if self.rho == 0 else along + self.rho * (vector - along)

    def inverse(self, dual: Any, init: Any = None) -> Solution:
        """Returns (∇Ψ)⁻¹(z) = c + P z + ρ (I − P) z; `init` is ignored."""
        del init
        dual = as_vector(self.num_params, dual=dual)
        return closed_form(self.center.astype(dual.dtype) + self._damp(dual))

    def divergence(self, theta: Any, other: Any) -> jax.Array:
        """Returns B_Ψ(θ, θ') = Ψ(c + θ − θ'), a sum of squares."""
        theta = as_vector(self.num_params, theta=theta)
        other = as_vector(self.num_params, other=other)
        return self._half_square(theta - other)

    def step(self, theta: Any, grad: Any, learning_rate: Any) -> Solution:
        """Returns θ − η (P g + ρ (I − P) g)."""
        theta = as_vector(self.num_params, theta=theta)
        grad = as_vector(self.num_params, grad=grad)
        return closed_form(theta - learning_rate * self._damp(grad))

    def project(self, theta: Any, constraint: Constraint) -> Solution:
        """Returns the Bregman projection, in float64; ρ = 0 gives the limit described above."""
        theta = as_vector(self.num_params, theta=theta)
        if isinstance(constraint, WholeSpace):
            return closed_form(theta)
        if not isinstance(constraint, Ball):
            raise projection.refuse(constraint, "SubspaceMap")
        return _onto_ball(self, theta, constraint.radius)

    def minimizer(self, constraint: Constraint) -> Solution:
        """Returns argmin over C of Ψ, the projection of c."""
        return project_float64(self, self.center, constraint)


# Compiled here so that eager callers do not pay for a compilation at each call.
@functools.partial(jax.jit, static_argnames="radius")
def _onto_ball(mirror_map: SubspaceMap, theta: jax.Array, radius: float) -> Solution:
    def solve(mirror_map: SubspaceMap, theta: jax.Array) -> Solution:
        wide = theta.astype(jnp.float64)
        along = mirror_map.along(wide)
        rest = wide - along
        # There are two eigenvalues, so that the problem is one of the two lengths.
        lengths = jnp.stack([jnp.linalg.norm(along), jnp.linalg.norm(rest)])
        if mirror_map.rho == 0:
            kept = jnp.minimum(lengths[1], radius)
            left = jnp.sqrt((radius - kept) * (radius + kept))
            shrunk = jnp.stack([jnp.minimum(lengths[0], left), kept])
            num_iterations, residual = jnp.zeros([], jnp.int32), jnp.sum(0 * lengths)
        else:
            eigenvalues = jnp.asarray([1.0, 1 / mirror_map.rho])
            shrunk, num_iterations, residual = projection.onto_ball(lengths, eigenvalues, radius)
        factors = jnp.where(lengths > 0, shrunk / lengths, 1.0)
        params = wide + (factors[0] - 1) * along + (factors[1] - 1) * rest
        solution = Solution(params, residual <= projection.TOLERANCE, num_iterations, residual)
        return rounded(solution, theta.dtype)

    return float64_call(solve, mirror_map, theta)


LEAST_BY_GRAM = 1e-4
"""Singular values above this share of the largest are found by a Gram matrix."""


def _span(rows: np.ndarray, rank: int) -> np.ndarray:
    """Returns the top right singular vectors of m rows as orthonormal columns, shape (p, rank).

    With far more columns than rows, A Aᵀ = U Σ² Uᵀ is small, and Aᵀ U Σ⁻¹ takes a fraction of the
    time of a decomposition of A. Squares have half as many digits: with σ_k > 1e-4 σ_1 they leave
    eight, and what that takes from orthogonality a Cholesky factor of VᵀV gives back.

    Raises:
        ValueError: the rows span fewer directions.
    """
    largest = max(rows.max(), -rows.min())
    if rank <= len(rows) < rows.shape[1] and 1e-100 < largest < 1e100:
        squares, left = scipy.linalg.eigh(rows @ rows.T)
        squares, left = squares[::-1][:rank], left[:, ::-1][:, :rank]
        if squares[-1] > LEAST_BY_GRAM**2 * squares[0]:
            span = rows.T @ (left / np.sqrt(squares))
            factor = scipy.linalg.cholesky(span.T @ span)
            return scipy.linalg.solve_triangular(factor, span.T, trans=1).T
    _, singular_values, vectors = scipy.linalg.svd(rows, full_matrices=False)
    cutoff = max(rows.shape) * np.finfo(np.float64).eps * singular_values[0]
    spanned = int(np.count_nonzero(singular_values > cutoff))
    if rank > spanned:
        raise ValueError(
            f"rank must be at most {spanned}, the number of directions that the {len(rows)} "
            f"rows span, got {rank}. Use a smaller rank or more public data."
        )
    return vectors[:rank].T
