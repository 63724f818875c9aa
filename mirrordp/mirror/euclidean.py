"""The Euclidean map ½‖θ‖², on which mirror descent is DP-SGD to the bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mirrordp import _validate
from mirrordp.mirror import projection
from mirrordp.mirror.base import Solution, as_vector, closed_form, rounded
from mirrordp.mirror.projection import Ball, Constraint, WholeSpace
from mirrordp.privacy._float64 import float64_call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EuclideanMap:
    """The map Ψ(θ) = ½‖θ‖², whose gradient and inverse are the identity.

    Args:
        num_params: the length p of the parameter vector.
    """

    num_params: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        _validate.positive_integer(num_params=self.num_params)

    def value(self, theta: Any) -> jax.Array:
        """Returns ½‖θ‖²."""
        theta = as_vector(self.num_params, theta=theta)
        return 0.5 * jnp.sum(theta**2)

    def grad(self, theta: Any) -> jax.Array:
        """Returns θ."""
        return as_vector(self.num_params, theta=theta)

    def inverse(self, dual: Any, init: Any = None) -> Solution:
        """Returns the dual point itself; `init` is ignored."""
        del init
        return closed_form(as_vector(self.num_params, dual=dual))

    def divergence(self, theta: Any, other: Any) -> jax.Array:
        """Returns ½‖θ − θ'‖²."""
        return self.value(
            as_vector(self.num_params, theta=theta) - as_vector(self.num_params, other=other)
        )

    def step(self, theta: Any, grad: Any, learning_rate: Any) -> Solution:
        """Returns θ − η g, computed as written."""
        theta = as_vector(self.num_params, theta=theta)
        return closed_form(theta - learning_rate * as_vector(self.num_params, grad=grad))

    def project(self, theta: Any, constraint: Constraint) -> Solution:
        """Returns the nearest point, θ · min(1, r/‖θ‖) for a ball."""
        theta = as_vector(self.num_params, theta=theta)
        if isinstance(constraint, WholeSpace):
            return closed_form(theta)
        if not isinstance(constraint, Ball):
            raise projection.refuse(constraint, "EuclideanMap")

        def shrink(theta: jax.Array) -> Solution:
            wide = theta.astype(jnp.float64)
            norm = jnp.linalg.norm(wide)
            shrunk = wide * (constraint.radius / jnp.maximum(norm, constraint.radius))
            return rounded(closed_form(shrunk), theta.dtype)

        return float64_call(shrink, theta)

    def minimizer(self, constraint: Constraint) -> Solution:
        """Returns the origin."""
        return self.project(jnp.zeros(self.num_params), constraint)
