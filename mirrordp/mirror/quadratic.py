"""The quadratic mirror map: least squares on public data, the case of the paper's theory.

In: public features and targets, or a Hessian and a minimiser. Out: a map whose step is
θ − η H⁻¹ g, computed from one eigendecomposition (line 5 of Algorithm 1 for linear regression).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.core import Tracer

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
from mirrordp.mirror.projection import Ball, Constraint, TheoremSet, WholeSpace
from mirrordp.privacy._float64 import float64_call

RELATIVE_RIDGE = 0.03
"""The default ridge relative to the median eigenvalue. It is the geometric middle of 0.01 to 0.1,
the range in which the paper's simulation shows the advantage of the geometry. A larger ridge hides
the geometry; with a smaller one the scale below would follow one badly estimated eigenvalue."""

# A set whose only point meets its bound exactly must not be called empty because of rounding.
_SLACK = 1 + projection.TOLERANCE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuadraticMap:
    """The map Ψ(θ) = s (½ (θ − c)ᵀ H (θ − c) + Ψ₀), with H = V diag(λ) Vᵀ + λ_⊥ (I − V Vᵀ).

    Build it with `from_data` or `from_hessian`. V has k ≤ p columns; with fewer public examples
    than parameters the remaining p − k directions share one eigenvalue λ_⊥, the ridge. A step then
    costs O(pk).

    The default scale s is the paper's: the inverse of sH has largest eigenvalue one, so that for
    H ∝ I a step is plain gradient descent with the same learning rate. It changes only the unit of
    the learning rate; minimisers and projections do not depend on it. The theorem and `TheoremSet`
    refer to the unscaled Ψ, which is `unscaled`.

    Attributes:
        eigenvalues: λ, shape (k,), of the unscaled Hessian, ridge included.
        eigenvectors: V, shape (p, k), orthonormal columns.
        tail_eigenvalue: λ_⊥, which has no meaning if k = p.
        center: c, the minimiser of Ψ.
        offset: Ψ₀, the unscaled minimum.
        scale: s.
    """

    eigenvalues: jax.Array
    eigenvectors: jax.Array
    tail_eigenvalue: jax.Array
    center: jax.Array
    offset: jax.Array
    scale: jax.Array

    @classmethod
    def from_data(
        cls,
        features: Any,
        targets: Any,
        *,
        ridge: float | None = None,
        ridge_center: Any | None = None,
        scale: float | None = None,
    ) -> "QuadraticMap":
        """Makes the map of least squares, Ψ(θ) = 1/(2n) ‖Xθ − y‖² + ½ ridge ‖θ − θ_r‖².

        This takes one decomposition in float64: the eigendecomposition of XᵀX for n ≥ p, and
        otherwise the thin singular value decomposition of X.

        Args:
            features: X, shape (n, p).
            targets: y, shape (n,).
            ridge: a number that is added to every eigenvalue of the Hessian XᵀX/n. Zero is allowed
                if the Hessian has full rank. The default is `RELATIVE_RIDGE` times the median of
                its non-zero eigenvalues.
            ridge_center: θ_r, the point that the ridge pulls to. The default is the minimum-norm
                least-squares solution, so that, as in the paper, the ridge conditions the Hessian
                and does not move the minimiser. A vector of zeros gives ordinary ridge regression,
                the better start if public examples are few.
            scale: s. The default is the paper's, one over the smallest eigenvalue of H.
        """
        x = finite_array(2, features=features)
        y = finite_array(1, targets=targets)
        n, p = x.shape
        if len(y) != n:
            raise ValueError(f"targets must have one entry for each of {n} rows, got {len(y)}.")
        if n < p:
            _, singular_values, rows = scipy.linalg.svd(x, full_matrices=False)
            values, vectors = singular_values**2 / n, rows.T
        else:
            with jax.enable_x64(True):
                gram = jnp.asarray(x).T @ jnp.asarray(x) / n
            values, vectors = _eigh(gram)
        # A smaller eigenvalue of a Gram matrix is rounding error and counts as zero.
        nonzero = values > max(n, p) * np.finfo(np.float64).eps * values.max()
        if not nonzero.any():
            raise ValueError("features must not all be zero: zeros define no geometry.")
        if ridge is None:
            ridge = RELATIVE_RIDGE * float(np.median(values[nonzero]))
        _validate.non_negative(ridge=ridge)
        if ridge == 0 and np.count_nonzero(nonzero) < p:
            raise ValueError(
                f"ridge must be positive when the {n} public examples span only "
                f"{np.count_nonzero(nonzero)} of {p} directions, got 0. Leave it out for the "
                "default."
            )
        values = np.where(nonzero, values, 0.0)
        moment = vectors.T @ (x.T @ y / n)
        if ridge_center is None:
            center = vectors @ np.divide(moment, values, out=np.zeros_like(moment), where=nonzero)
            pull = center
        else:
            pull = finite_array(1, ridge_center=ridge_center)
            if len(pull) != p:
                raise ValueError(f"ridge_center must have length {p}, got {len(pull)}.")
            along = vectors.T @ pull
            center = vectors @ ((moment + ridge * along) / (values + ridge))
            center += pull - vectors @ along
        offset = 0.5 * np.mean((x @ center - y) ** 2) + 0.5 * ridge * np.sum((center - pull) ** 2)
        return cls._assemble(values + ridge, vectors, ridge, center, offset, scale)

    @classmethod
    def from_hessian(
        cls, hessian: Any, minimizer: Any, *, ridge: float = 0.0, scale: float | None = None
    ) -> "QuadraticMap":
        """Makes the map Ψ(θ) = ½ (θ − c)ᵀ (H + ridge I) (θ − c) for a given H and minimiser c.

        Args:
            hessian: H, shape (p, p), symmetric, and positive definite once the ridge is added.
            minimizer: c, shape (p,).
            ridge: a number that is added to every eigenvalue.
            scale: s. The default is the paper's, one over the smallest eigenvalue.
        """
        matrix = finite_array(2, hessian=hessian)
        center = finite_array(1, minimizer=minimizer)
        p = len(center)
        if matrix.shape != (p, p):
            raise ValueError(f"hessian must have shape ({p}, {p}), got {matrix.shape}.")
        if not np.allclose(matrix, matrix.T, rtol=1e-6, atol=1e-6 * np.abs(matrix).max()):
            raise ValueError("hessian must be symmetric, got one that is not. Pass (H + H.T) / 2.")
        _validate.non_negative(ridge=ridge)
        values, vectors = _eigh((matrix + matrix.T) / 2)
        return cls._assemble(values + ridge, vectors, ridge, center, 0.0, scale)

    @classmethod
    def _assemble(cls, values, vectors, tail, center, offset, scale) -> "QuadraticMap":
        smallest = float(min(values.min(), tail) if len(values) < len(center) else values.min())
        if smallest <= 0:
            raise ValueError(
                f"the Hessian must be positive definite, got smallest eigenvalue {smallest:.3g}. "
                "Add a positive ridge."
            )
        if scale is None:
            scale = 1 / smallest
        _validate.positive(scale=scale)
        return cls(*map(as_float64, (values, vectors, tail, center, offset, scale)))

    @property
    def num_params(self) -> int:
        """The length p of the parameter vector."""
        return self.eigenvectors.shape[0]

    @property
    def unscaled(self) -> "QuadraticMap":
        """The same map with s = 1, which is the public loss itself."""
        return dataclasses.replace(self, scale=jnp.ones_like(self.scale))

    @property
    def scaled_eigenvalues(self) -> np.ndarray:
        """All p eigenvalues of sH, smallest first: the curvature that a step divides by."""
        values, tail = np.asarray(self.eigenvalues), np.asarray(self.tail_eigenvalue)
        rest = np.full(self.num_params - len(values), tail)
        return np.sort(np.concatenate([values, rest])) * np.asarray(self.scale)

    def regularized(self, weight: float = 1.0) -> "QuadraticMap":
        """Returns Ψ + ½ weight ‖θ‖² with scale one; weight = 1 gives the paper's Ψ̂ (appendix)."""
        _validate.positive(weight=weight)
        with jax.enable_x64(True):
            values = self.scale * self.eigenvalues + weight
            tail = self.scale * self.tail_eigenvalue + weight
            # ∇Ψ̂(θ) = sH(θ − c) + weight θ vanishes at ĉ = c − weight (sH + weight I)⁻¹ c.
            shift = weight * _apply(self.eigenvectors, 1 / values, 1 / tail, self.center)
            center = self.center - shift
            offset = self.value(center) + 0.5 * weight * jnp.sum(center**2)
            one = jnp.ones_like(self.scale)
        return QuadraticMap(values, self.eigenvectors, tail, center, offset, one)

    def _curvature(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the eigenvalues of sH, and that of the tail."""
        scale = self.scale.astype(dtype)
        return scale * self.eigenvalues.astype(dtype), scale * self.tail_eigenvalue.astype(dtype)

    def _hessian(self, vector: jax.Array) -> jax.Array:
        values, tail = self._curvature(vector.dtype)
        return _apply(self.eigenvectors, values, tail, vector)

    def _inverse_hessian(self, vector: jax.Array) -> jax.Array:
        values, tail = self._curvature(vector.dtype)
        return _apply(self.eigenvectors, 1 / values, 1 / tail, vector)

    def value(self, theta: Any) -> jax.Array:
        """Returns Ψ(θ)."""
        theta = as_vector(self.num_params, theta=theta)
        shift = theta - self.center.astype(theta.dtype)
        minimum = (self.scale.astype(theta.dtype)) * self.offset.astype(theta.dtype)
        return 0.5 * jnp.dot(shift, self._hessian(shift)) + minimum

    def grad(self, theta: Any) -> jax.Array:
        """Returns ∇Ψ(θ) = sH (θ − c)."""
        theta = as_vector(self.num_params, theta=theta)
        return self._hessian(theta - self.center.astype(theta.dtype))

    def inverse(self, dual: Any, init: Any = None) -> Solution:
        """Returns (∇Ψ)⁻¹(z) = c + (sH)⁻¹ z; `init` is ignored."""
        del init
        dual = as_vector(self.num_params, dual=dual)
        return closed_form(self.center.astype(dual.dtype) + self._inverse_hessian(dual))

    def divergence(self, theta: Any, other: Any) -> jax.Array:
        """Returns B_Ψ(θ, θ') = ½ (θ − θ')ᵀ sH (θ − θ'), a sum of squares."""
        theta = as_vector(self.num_params, theta=theta)
        other = as_vector(self.num_params, other=other)
        # For a sum of squares the dtype of the argument is precise enough.
        along, rest = _split(self.eigenvectors, theta - other)
        values, tail = self._curvature(theta.dtype)
        return 0.5 * (jnp.sum(values * along**2) + tail * jnp.sum(rest**2))

    def step(self, theta: Any, grad: Any, learning_rate: Any) -> Solution:
        """Returns θ − η (sH)⁻¹ g."""
        theta = as_vector(self.num_params, theta=theta)
        grad = as_vector(self.num_params, grad=grad)
        return closed_form(theta - learning_rate * self._inverse_hessian(grad))

    def project(self, theta: Any, constraint: Constraint) -> Solution:
        """Returns the Bregman projection, computed in float64.

        Raises:
            ValueError: if a `TheoremSet` is empty and the map's arrays are known at trace time. If
                they are traced, the solution is NaN and has not converged.
        """
        theta = as_vector(self.num_params, theta=theta)
        if isinstance(constraint, WholeSpace):
            return closed_form(theta)
        if isinstance(constraint, Ball):
            return _onto_ball(self, theta, as_float64(constraint.radius))
        if isinstance(constraint, TheoremSet):
            self._refuse_empty(constraint)
            radius, bound = as_float64(constraint.radius), as_float64(constraint.gradient_bound)
            return _onto_theorem_set(self, theta, radius, bound)
        raise projection.refuse(constraint, "QuadraticMap")

    def minimizer(self, constraint: Constraint) -> Solution:
        """Returns argmin over C of Ψ, the projection of c."""
        return project_float64(self, self.center, constraint)

    def _refuse_empty(self, constraint: TheoremSet) -> None:
        if isinstance(self.center, Tracer):
            return
        # The set does not depend on θ, so that this is known before a program is compiled.
        with jax.ensure_compile_time_eval():
            least = float(_smallest_gradient_norm(self, as_float64(constraint.radius)))
        if least > constraint.gradient_bound * _SLACK:
            raise ValueError(
                f"the constraint set is empty: in the ball of radius {constraint.radius:g} the "
                f"gradient of the public loss is at least {least:.3g}, but its bound is "
                f"{constraint.gradient_bound:.3g}. Use a larger radius or a larger constant."
            )


# Compiled here so that eager callers do not pay for a compilation at each call. The numbers of the
# constraint are arguments, so that another radius needs no other compilation.
@jax.jit
def _onto_ball(mirror_map: QuadraticMap, theta: jax.Array, radius: jax.Array) -> Solution:
    def solve(mirror_map, theta, radius):
        frame = _Frame(mirror_map, theta.astype(jnp.float64))
        return frame.solution(theta, projection.onto_ball(frame.point, frame.eigenvalues, radius))

    return float64_call(solve, mirror_map, theta, radius)


@jax.jit
def _smallest_gradient_norm(mirror_map: QuadraticMap, radius: jax.Array) -> jax.Array:
    def solve(mirror_map, radius):
        return _Frame(mirror_map, mirror_map.center).smallest_gradient_norm(radius)

    return float64_call(solve, mirror_map, radius)


@jax.jit
def _onto_theorem_set(
    mirror_map: QuadraticMap, theta: jax.Array, radius: jax.Array, gradient_bound: jax.Array
) -> Solution:
    def solve(mirror_map, theta, radius, gradient_bound):
        frame = _Frame(mirror_map, theta.astype(jnp.float64))
        projected = projection.onto_theorem_set(
            frame.point, frame.center, frame.eigenvalues, radius, gradient_bound
        )
        empty = frame.smallest_gradient_norm(radius) > gradient_bound * _SLACK
        residual = jnp.where(empty, jnp.nan, projected.residual)
        return frame.solution(theta, projected._replace(residual=residual))

    return float64_call(solve, mirror_map, theta, radius, gradient_bound)


def _eigh(matrix: np.ndarray | jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns eigenvalues and eigenvectors in float64, on JAX's device (a GPU is far faster)."""
    with jax.enable_x64(True):
        values, vectors = jnp.linalg.eigh(jnp.asarray(matrix))
    return np.asarray(values), np.asarray(vectors)


def _split(vectors: jax.Array, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the coordinates in the columns of V, and the part outside their span."""
    along = matvec(vectors.T, vector)
    if vectors.shape[0] == vectors.shape[1]:
        return along, jnp.zeros_like(vector)
    return along, vector - matvec(vectors, along)


def _apply(vectors: jax.Array, values: jax.Array, tail: jax.Array, vector: jax.Array) -> jax.Array:
    """Returns (V diag(values) Vᵀ + tail (I − V Vᵀ)) vector, in the vector's dtype."""
    along, rest = _split(vectors, vector)
    inside = matvec(vectors, values.astype(vector.dtype) * along)
    if vectors.shape[0] == vectors.shape[1]:
        return inside
    return inside + tail.astype(vector.dtype) * rest


class _Frame:
    """A point and the map's centre in eigen-coordinates, for use in float64 only.

    Outside the span of V the two vectors span at most two directions, which become two further
    coordinates with eigenvalue λ_⊥.
    """

    def __init__(self, mirror_map: QuadraticMap, point: jax.Array):
        self._vectors = mirror_map.eigenvectors
        along, rest = _split(self._vectors, point)
        center, center_rest = _split(self._vectors, mirror_map.center)
        if self._vectors.shape[0] == self._vectors.shape[1]:
            self._extra = None
            self.point, self.center, self.eigenvalues = along, center, mirror_map.eigenvalues
            return
        first = _unit(center_rest, mirror_map.center)
        second = _unit(rest - first * jnp.dot(first, rest), point)
        self._extra = jnp.stack([first, second], axis=1)
        self.point = jnp.concatenate([along, self._extra.T @ rest])
        self.center = jnp.concatenate([center, self._extra.T @ center_rest])
        tail = jnp.broadcast_to(mirror_map.tail_eigenvalue, (2,))
        self.eigenvalues = jnp.concatenate([mirror_map.eigenvalues, tail])

    def lift(self, coordinates: jax.Array) -> jax.Array:
        """Returns the vector with these coordinates."""
        if self._extra is None:
            return matvec(self._vectors, coordinates)
        return matvec(self._vectors, coordinates[:-2]) + self._extra @ coordinates[-2:]

    def solution(self, theta: jax.Array, projected: projection.Projected) -> Solution:
        """Returns the projection as a point, in the dtype of θ."""
        coordinates, num_iterations, residual = projected
        # A point inside the set is returned unchanged, not converted to the eigenbasis and back.
        params = theta + self.lift(coordinates - self.point)
        converged = residual <= projection.TOLERANCE
        return rounded(Solution(params, converged, num_iterations, residual), theta.dtype)

    def smallest_gradient_norm(self, radius: jax.Array) -> jax.Array:
        """Returns the least ‖H (θ − c)‖ in the ball."""
        return projection.smallest_gradient_norm(self.center, self.eigenvalues, radius)


def _unit(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Scales a part of a vector to length one, or to zero if the part is rounding error."""
    norm = jnp.linalg.norm(part)
    return jnp.where(norm > 1e-12 * jnp.linalg.norm(whole), part / norm, 0.0)
