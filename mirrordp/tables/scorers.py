"""What a stored model computes: encoded features in, one score per output out.

A kind of model is one class here with `kind`, `shape`, `__call__`, `to_dict` and `from_dict`, named
in `SCORERS`, and one function in `mirrordp.tables.export` that says the same in ONNX. Only NumPy is
used, because this code is also part of exported predictors.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from mirrordp.tables.cells import TreesScorer
from mirrordp.tables.network import NetworkScorer


class Scorer(Protocol):
    """A function from features of shape (rows, features) to scores of shape (rows, outputs)."""

    kind: ClassVar[str]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and of features."""
        ...

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns the scores of each row."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        ...

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Scorer":
        """Inverts `to_dict`; raises ValueError, TypeError or KeyError for anything else."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class LinearScorer:
    """A linear function of the features.

    Attributes:
        coefficients: an array of shape (outputs, features).
        intercepts: an array of shape (outputs,).
    """

    coefficients: np.ndarray
    intercepts: np.ndarray
    kind: ClassVar[str] = "linear"

    def __post_init__(self):
        if self.coefficients.ndim != 2 or self.intercepts.shape != self.coefficients.shape[:1]:
            raise ValueError("expected coefficients of shape (outputs, features)")
        if not (np.isfinite(self.coefficients).all() and np.isfinite(self.intercepts).all()):
            raise ValueError("expected finite coefficients")

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and of features."""
        return self.coefficients.shape

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns the scores of each row."""
        return features @ self.coefficients.T + self.intercepts

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        return {
            "coefficients": self.coefficients.tolist(),
            "intercepts": self.intercepts.tolist(),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "LinearScorer":
        """Inverts `to_dict`; raises ValueError, TypeError or KeyError for anything else."""
        return cls(
            np.array(value["coefficients"], np.float64), np.array(value["intercepts"], np.float64)
        )


SCORERS: dict[str, type[Scorer]] = {
    kind.kind: kind for kind in (LinearScorer, TreesScorer, NetworkScorer)
}
"""The kinds of models by name."""
