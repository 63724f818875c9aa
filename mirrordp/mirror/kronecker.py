"""A quadratic mirror map for networks, with a Kronecker-factored curvature of the public loss.

In: a loss, the public start and public rows. Out: a map whose step is θ − η (F + λI)⁻¹ g, where F
stands for the public loss's curvature: the paper's mirror step (line 5 of Algorithm 1), not its
first-order form, at the price of two small matrix products per weight matrix.

A weight matrix with gradients G_i, of K rows and N columns, has the curvature

    F = L ⊗ R / tr(L),     L = mean of G_i G_iᵀ,     R = mean of G_iᵀ G_i,

over public rows i. It has the trace of the mean of vec(G_i) vec(G_i)ᵀ, the empirical Fisher matrix,
and is equal to it where the rows' gradients vary independently along both sides. Parameters of
different arrays count as independent. No layer has to be known: a convolution's kernel is a matrix
whose columns are output channels, a bias one with a single row.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from mirrordp import _validate
from mirrordp.data import PublicData, require_public
from mirrordp.mirror import projection
from mirrordp.mirror.base import (
    Solution,
    as_float64,
    as_vector,
    closed_form,
    project_float64,
    rounded,
)
from mirrordp.mirror.projection import Ball, Constraint, WholeSpace
from mirrordp.privacy._float64 import float64_call
from mirrordp.privacy.clipping import with_key
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import LossFn, Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KroneckerMap:
    """The map Ψ(θ) = ½ s (θ − c)ᵀ (F + λI) (θ − c), with F = U diag(f) Uᵀ and U of Kronecker form.

    Build it with `from_public`. The scale s is one over the smallest eigenvalue of F + λI, as in
    `QuadraticMap`: along the flattest direction a step is that of gradient descent, and steeper
    ones are taken with more care.

    Attributes:
        left: for each array of parameters, eigenvectors of its L, [K, K]; None for the unit matrix.
        right: likewise of its R, [N, N].
        curvature: f, the eigenvalues of F, in the order of the parameters.
        damping: λ.
        center: c.
        shapes: (K, N) of each array.
    """

    left: tuple[jax.Array | None, ...]
    right: tuple[jax.Array | None, ...]
    curvature: jax.Array
    damping: jax.Array
    center: jax.Array
    shapes: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_public(
        cls,
        loss_fn: LossFn,
        params: Params,
        public: PublicData,
        *,
        damping: float = 1.0,
        largest_side: int = 1024,
        trainable: PyTree | Trainable | None = None,
        seed: int = 0,
    ) -> "KroneckerMap":
        """Makes the map from the gradients of public rows at `params`, which becomes its centre.

        Args:
            loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
            params: the public start.
            public: the public rows.
            damping: λ in units of the mean eigenvalue of F. Most directions have none of the public
                curvature, so λ decides how far these are ahead of the steep ones.
            largest_side: of a side with more rows or columns, such as a vocabulary, only the
                diagonal of L or R is used.
            trainable: as in `mirrordp.clipped_grad`; the map is for the trainable parameters.
            seed: decides the keys of a loss that takes one.
        """
        require_public(public)
        _validate.positive(damping=damping)
        _validate.positive_integer(largest_side=largest_side)
        chosen = Trainable.of(trainable)
        params = jax.tree.map(jnp.asarray, params)
        center, _ = ravel_pytree(chosen.part(params))
        shapes = tuple(_sides(leaf.shape) for leaf in jax.tree.leaves(chosen.part(params)))
        factors = _public_factors(
            loss_fn, chosen, shapes, largest_side, params, public.arrays, jax.random.key(seed)
        )
        if not all(np.isfinite(side).all() for side in jax.tree.leaves(factors)):
            raise ValueError(
                "the public rows need finite gradients, got some that are not. Begin elsewhere, or "
                "look for the NaN in the loss."
            )
        left, right, curvature = [], [], []
        for pair in factors:
            (rows, u), (columns, v) = (_eigen(np.asarray(side, np.float64)) for side in pair)
            trace = rows.sum()
            values = np.outer(rows, columns) / trace if trace > 0 else np.outer(rows, columns)
            left.append(u)
            right.append(v)
            curvature.append(values.ravel())
        values = np.concatenate(curvature)
        mean = values.mean()
        if not np.isfinite(mean) or mean == 0:
            raise ValueError(
                "the public rows need gradients that are not all zero, got a mean squared gradient "
                f"of {mean:g}. Begin elsewhere."
            )
        return cls(
            tuple(left),
            tuple(right),
            as_float64(values),
            as_float64(damping * mean),
            as_float64(center),
            shapes,
        )

    def require(self, params: PyTree) -> None:
        """Raises unless these are parameters of the shapes that the map was made for."""
        found = tuple(_sides(leaf.shape) for leaf in jax.tree.leaves(params))
        if found != self.shapes:
            raise ValueError(
                f"the map is for arrays with sides {self.shapes!s:.200}, got trained ones with "
                f"{found!s:.200}. Build it with the same params and trainable."
            )

    @property
    def num_params(self) -> int:
        """The length p of the parameter vector."""
        return self.center.shape[0]

    @property
    def eigenvalues(self) -> jax.Array:
        """The eigenvalues of the scaled map, of which the smallest is 1, in float64."""
        return float64_call(_eigenvalues, self.curvature, self.damping)

    def to_coordinates(self, vector: jax.Array) -> jax.Array:
        """Returns Uᵀ vector: its parts along the eigenvectors."""
        return self._turned(vector, transposed=True)

    def from_coordinates(self, coordinates: jax.Array) -> jax.Array:
        """Returns U coordinates."""
        return self._turned(coordinates, transposed=False)

    def _turned(self, vector: jax.Array, *, transposed: bool) -> jax.Array:
        found, first = [], 0
        for u, v, (rows, columns) in zip(self.left, self.right, self.shapes, strict=True):
            block = vector[first : first + rows * columns].reshape(rows, columns)
            first += rows * columns
            found.append(turned(block, u, v, transposed=transposed).ravel())
        return jnp.concatenate(found)

    def _times(self, vector: jax.Array, power: int) -> jax.Array:
        """Returns H^power vector, where H is the scaled Hessian."""
        weights = self.eigenvalues.astype(vector.dtype)
        turned = self.to_coordinates(vector)
        return self.from_coordinates(turned * weights if power == 1 else turned / weights)

    def value(self, theta: Any) -> jax.Array:
        """Returns Ψ(θ)."""
        theta = as_vector(self.num_params, theta=theta)
        return self._half_square(theta - self.center.astype(theta.dtype))

    def _half_square(self, shift: jax.Array) -> jax.Array:
        weights = self.eigenvalues.astype(shift.dtype)
        return 0.5 * jnp.sum(weights * self.to_coordinates(shift) ** 2)

    def grad(self, theta: Any) -> jax.Array:
        """Returns ∇Ψ(θ) = s (F + λI)(θ − c)."""
        theta = as_vector(self.num_params, theta=theta)
        return self._times(theta - self.center.astype(theta.dtype), 1)

    def inverse(self, dual: Any, init: Any = None) -> Solution:
        """Returns (∇Ψ)⁻¹(z) = c + (F + λI)⁻¹ z / s; `init` is ignored."""
        del init
        dual = as_vector(self.num_params, dual=dual)
        return closed_form(self.center.astype(dual.dtype) + self._times(dual, -1))

    def divergence(self, theta: Any, other: Any) -> jax.Array:
        """Returns B_Ψ(θ, θ') = Ψ(c + θ − θ'), a sum of squares."""
        theta = as_vector(self.num_params, theta=theta)
        other = as_vector(self.num_params, other=other)
        return self._half_square(theta - other)

    def step(self, theta: Any, grad: Any, learning_rate: Any) -> Solution:
        """Returns θ − (η/s) (F + λI)⁻¹ g."""
        theta = as_vector(self.num_params, theta=theta)
        grad = as_vector(self.num_params, grad=grad)
        return closed_form(theta - learning_rate * self._times(grad, -1))

    def project(self, theta: Any, constraint: Constraint) -> Solution:
        """Returns the Bregman projection onto a ball, in float64."""
        theta = as_vector(self.num_params, theta=theta)
        if isinstance(constraint, WholeSpace):
            return closed_form(theta)
        if not isinstance(constraint, Ball):
            raise projection.refuse(constraint, "KroneckerMap")
        return _onto_ball(self, theta, as_float64(constraint.radius))

    def minimizer(self, constraint: Constraint) -> Solution:
        """Returns argmin over C of Ψ, the projection of c."""
        return project_float64(self, self.center, constraint)


def turned(
    block: jax.Array, u: jax.Array | None, v: jax.Array | None, *, transposed: bool = False
) -> jax.Array:
    """Returns U block Vᵀ, or Uᵀ block V if `transposed`; None stands for the identity."""
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    if u is not None:
        u = u.astype(block.dtype)
        block = product(u.T if transposed else u, block)
    if v is not None:
        v = v.astype(block.dtype)
        block = product(block, v if transposed else v.T)
    return block


def _eigenvalues(curvature: jax.Array, damping: jax.Array) -> jax.Array:
    damped = curvature + damping
    return damped / jnp.min(damped)


@jax.jit
def _onto_ball(mirror_map: KroneckerMap, theta: jax.Array, radius: jax.Array) -> Solution:
    def solve(mirror_map: KroneckerMap, theta: jax.Array, radius: jax.Array) -> Solution:
        turned = mirror_map.to_coordinates(theta.astype(jnp.float64))
        values = _eigenvalues(mirror_map.curvature, mirror_map.damping)
        projected = projection.onto_ball(turned, values, radius)
        # A point inside stays to the bit.
        inside = jnp.all(projected.coordinates == turned)
        params = mirror_map.from_coordinates(projected.coordinates)
        params = jnp.where(inside, theta.astype(jnp.float64), params)
        converged = projected.residual <= projection.TOLERANCE
        solution = Solution(params, converged, projected.num_iterations, projected.residual)
        return rounded(solution, theta.dtype)

    return float64_call(solve, mirror_map, theta, radius)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns an array's shape as a matrix, whose columns are the last axis."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _eigen(side: np.ndarray) -> tuple[np.ndarray, jax.Array | None]:
    """Returns eigenvalues and eigenvectors of L or R; a vector is a diagonal."""
    if side.ndim == 1:
        return side, None
    values, vectors = scipy.linalg.eigh(side)
    return np.maximum(values, 0.0), as_float64(vectors)


@functools.partial(jax.jit, static_argnames=("loss_fn", "trainable", "shapes", "largest_side"))
def _public_factors(loss_fn, trainable, shapes, largest_side, params, arrays, key):
    """Returns L and R of every array of parameters; a long side's is a vector, the diagonal."""
    keyed = with_key(loss_fn)
    part = trainable.part(params)
    rows = jax.tree.leaves(arrays)[0].shape[0]
    keys = jax.random.split(key, rows)

    def loss_of(part: PyTree, example: PyTree, key: jax.Array) -> jax.Array:
        return keyed(trainable.merge(part, params), example, key)

    def side(matrix: jax.Array) -> jax.Array:
        if matrix.shape[0] > largest_side:
            return jnp.sum(matrix**2, axis=1)
        return matrix @ matrix.T

    def of_row(row: tuple[PyTree, jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        leaves = jax.tree.leaves(jax.grad(loss_of)(part, *row))
        matrices = [
            leaf.astype(jnp.float32).reshape(shape)
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return [(side(matrix), side(matrix.T)) for matrix in matrices]

    zero = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, shape.dtype),
        jax.eval_shape(of_row, jax.tree.map(lambda leaf: leaf[0], (arrays, keys))),
    )

    # One row after the other: the kernel gradients of many at once are grouped convolutions, which
    # took more than twice as long on a CPU.
    def add(total, row):
        return jax.tree.map(lambda t, f: t + f / rows, total, of_row(row)), None

    return jax.lax.scan(add, zero, (arrays, keys))[0]
