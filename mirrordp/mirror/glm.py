"""Generalised linear models as mirror maps: logistic, multinomial and Poisson public losses.

In: public features and targets. Out: a map whose Ψ is the public negative log-likelihood plus a
ridge. The inverse map is found by Newton–CG, which needs only products by X and Xᵀ.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _validate
from mirrordp.mirror import families
from mirrordp.mirror.base import as_float64, as_vector, finite_array
from mirrordp.mirror.convex import MAX_ITERATIONS, SmoothMap
from mirrordp.mirror.families import Family
from mirrordp.mirror.quadratic import RELATIVE_RIDGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GLMMap(SmoothMap):
    """The map Ψ(θ) = s (1/n Σ_i (A(u_i) − ⟨y_i, u_i⟩) + ½ ridge ‖θ‖²), with u_i = Θᵀ x_i.

    A is the family's cumulant function: log(1 + eᵘ), log Σ eᵘ or eᵘ. Θ is θ reshaped to (d, m),
    features times outputs; m is the number of classes in the multinomial case and otherwise 1. An
    intercept is a column of ones in the features. Build a map with `logistic`, `multinomial` or
    `poisson`.

    The ridge makes Ψ strongly convex. The choice s = 1/ridge bounds the inverse Hessian by the
    identity, as the paper's scaling does for linear regression.

    Attributes:
        features: X, shape (n, d).
        targets: y, shape (n, m).
        family: the family of the loss, which defines A.
        ridge: the weight of ½‖θ‖².
        scale: s.
        tolerance: see `SmoothMap`.
        max_iterations: see `SmoothMap`.
    """

    features: jax.Array
    targets: jax.Array
    family: Family = dataclasses.field(metadata={"static": True})
    ridge: float = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    tolerance: float | None = dataclasses.field(default=None, metadata={"static": True})
    max_iterations: int = dataclasses.field(default=MAX_ITERATIONS, metadata={"static": True})

    @classmethod
    def logistic(
        cls, features: Any, labels: Any, *, ridge: float | None = None, scale: float = 1.0
    ) -> "GLMMap":
        """Makes the map of the logistic loss for labels 0 and 1.

        Args:
            features: X, shape (n, d).
            labels: n zeros and ones.
            ridge: a positive number. The default is `RELATIVE_RIDGE` times the mean eigenvalue of
                the Hessian at θ = 0. (The mean follows from the trace; the median would need all
                eigenvalues.)
            scale: s.
        """
        y = finite_array(1, labels=labels)
        if not np.isin(y, (0.0, 1.0)).all():
            raise ValueError(f"labels must be 0 or 1, got {np.unique(y)[:5]}. Encode them first.")
        return cls._build(features, y[:, None], families.LOGISTIC, 0.25, ridge, scale)

    @classmethod
    def multinomial(
        cls,
        features: Any,
        labels: Any,
        num_classes: int,
        *,
        ridge: float | None = None,
        scale: float = 1.0,
    ) -> "GLMMap":
        """Makes the map of the softmax loss for labels 0, ..., num_classes − 1.

        Its θ has d · num_classes entries.

        Args:
            features: X, shape (n, d).
            labels: n integers.
            num_classes: m. A class may be absent from the public labels.
            ridge: as in `logistic`.
            scale: s.
        """
        _validate.positive_integer(num_classes=num_classes)
        y = finite_array(1, labels=labels)
        if not np.isin(y, np.arange(num_classes)).all():
            raise ValueError(
                f"labels must be integers from 0 to {num_classes - 1}, got {np.unique(y)[:5]}. "
                "Encode them first."
            )
        spread = (1 - 1 / num_classes) / num_classes
        one_hot = np.eye(num_classes)[y.astype(int)]
        return cls._build(features, one_hot, families.MULTINOMIAL, spread, ridge, scale)

    @classmethod
    def poisson(
        cls, features: Any, counts: Any, *, ridge: float | None = None, scale: float = 1.0
    ) -> "GLMMap":
        """Makes the map of the Poisson loss with logarithmic link for counts ≥ 0.

        Args:
            features: X, shape (n, d).
            counts: n non-negative numbers.
            ridge: as in `logistic`.
            scale: s.
        """
        y = finite_array(1, counts=counts)
        if (y < 0).any():
            raise ValueError(f"counts must be non-negative, got {y.min()}. Drop such rows.")
        return cls._build(features, y[:, None], families.POISSON, 1.0, ridge, scale)

    @classmethod
    def _build(cls, features, targets, family, curvature, ridge, scale) -> "GLMMap":
        x = finite_array(2, features=features)
        if len(x) != len(targets):
            raise ValueError(
                f"features and targets must have the same number of rows, got {len(x)} and "
                f"{len(targets)}. Pass one target per row."
            )
        if ridge is None:
            ridge = RELATIVE_RIDGE * curvature * float(np.mean(x**2))
            if ridge == 0:
                raise ValueError("features must not all be zero: zeros define no geometry.")
        _validate.positive(ridge=ridge, scale=scale)
        return cls(as_float64(x), as_float64(targets), family, float(ridge), float(scale))

    @property
    def num_params(self) -> int:
        """The length d · m of the parameter vector."""
        return self.features.shape[1] * self.targets.shape[1]

    def regularized(self, weight: float = 1.0) -> "GLMMap":
        """Returns Ψ + ½ weight ‖θ‖²; weight = 1 gives the Ψ̂ of the paper's appendix."""
        _validate.positive(weight=weight)
        return dataclasses.replace(self, ridge=self.ridge + weight / self.scale)

    def value(self, theta: Any) -> jax.Array:
        """Returns Ψ(θ)."""
        theta = as_vector(self.num_params, theta=theta)
        x, y = self.features.astype(theta.dtype), self.targets.astype(theta.dtype)
        matrix = theta.reshape(x.shape[1], y.shape[1])
        scores = jnp.matmul(x, matrix, precision=jax.lax.Precision.HIGHEST)
        loss = jnp.mean(self.family.loss(scores, y))
        return self.scale * (loss + 0.5 * self.ridge * jnp.sum(theta**2))
