"""A small network on table rows: its form in NumPy, and how it is trained with `mirrordp.train`.

Each feature x enters as it is (scaled) and as its position between public quantiles, clamped to
[0, 1] per bin, which lets a first layer draw any curve along a column. Categories are indicators,
so that the weights of the first layer are their embeddings. Two hidden layers and a linear function
of the same inputs add up to the scores:

    z = (x, bins of x),     s = A z + W₃ relu(W₂ relu(W₁ z + b₁) + b₂) + b₃.

Training is warm: the network first learns from public rows, with early stopping on some of them
that are held out, and then goes on from there under differential privacy (PDA-DPMD by Adam, with
the public gradient weighted as the public rows are among all rows). Scores of classes are then
divided by a temperature from the held-out public rows, since clipping makes networks too sure.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

NUM_BINS = 16
HIDDEN = (64, 64)


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkScorer:
    """A scorer: a network with piecewise linear inputs.

    Attributes:
        shift: subtracted from the features, shape (d,).
        factor: multiplies them then, shape (d,).
        cut: the features that are also given as bins.
        edges: for each of them the borders of its bins, in scaled units.
        layers: weights (inputs, outputs) and biases of each layer.
        skip: A, shape (inputs, outputs).
    """

    shift: np.ndarray
    factor: np.ndarray
    cut: tuple[int, ...]
    edges: tuple[np.ndarray, ...]
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    skip: np.ndarray
    kind: ClassVar[str] = "network"

    def __post_init__(self):
        size = len(self.shift) + sum(len(edges) - 1 for edges in self.edges)
        if self.factor.shape != self.shift.shape or len(self.cut) != len(self.edges):
            raise ValueError("expected a scale and bins of the same features")
        if any(not 0 <= k < len(self.shift) for k in self.cut):
            raise ValueError("expected bins of features that exist")
        if any(len(edges) < 2 or (np.diff(edges) <= 0).any() for edges in self.edges):
            raise ValueError("expected increasing edges")
        if self.skip.ndim != 2 or len(self.skip) != size:
            raise ValueError("expected a linear part of all inputs")
        for weights, bias in self.layers:
            if weights.ndim != 2 or weights.shape[0] != size or bias.shape != weights.shape[1:]:
                raise ValueError("expected layers that fit each other")
            size = weights.shape[1]
        if size != self.skip.shape[1]:
            raise ValueError("expected as many scores as the linear part has")
        arrays = [self.shift, self.factor, self.skip, *self.edges]
        arrays += [array for layer in self.layers for array in layer]
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError("expected finite weights")

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and of features."""
        return self.skip.shape[1], len(self.shift)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns the scores of each row, shape (rows, outputs)."""
        scaled = (features - self.shift) * self.factor
        return forward(np, self.layers, self.skip, inputs(np, scaled, self.cut, self.edges))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        return {
            "shift": self.shift.tolist(),
            "factor": self.factor.tolist(),
            "cut": list(self.cut),
            "edges": [edges.tolist() for edges in self.edges],
            "layers": [[weights.tolist(), bias.tolist()] for weights, bias in self.layers],
            "skip": self.skip.tolist(),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "NetworkScorer":
        """Inverts `to_dict`; raises ValueError, TypeError or KeyError for anything else."""

        def array(numbers: Any) -> np.ndarray:
            return np.array(numbers, np.float64)

        return cls(
            array(value["shift"]),
            array(value["factor"]),
            tuple(map(int, value["cut"])),
            tuple(array(edges) for edges in value["edges"]),
            tuple((array(weights), array(bias)) for weights, bias in value["layers"]),
            array(value["skip"]),
        )


def inputs(xp: Any, scaled: Any, cut: Sequence[int], edges: Sequence[np.ndarray]) -> Any:
    """Returns z for scaled features of shape (..., d); `xp` is NumPy or jax.numpy."""
    if not cut:
        return scaled
    # All bins at once: a program that names every feature takes minutes to compile.
    feature = np.repeat(np.array(cut), [len(borders) - 1 for borders in edges])
    low = xp.concatenate([borders[:-1] for borders in edges])
    width = xp.concatenate([borders[1:] - borders[:-1] for borders in edges])
    bins = xp.clip((scaled[..., feature] - low) / width, 0.0, 1.0) - 0.5
    return xp.concatenate([scaled, bins], axis=-1)


def forward(xp: Any, layers: Any, skip: Any, z: Any) -> Any:
    """Returns the scores for inputs of shape (..., inputs); `xp` is NumPy or jax.numpy."""
    hidden = z
    for index, (weights, bias) in enumerate(layers):
        hidden = hidden @ weights + bias
        if index + 1 < len(layers):
            hidden = xp.maximum(hidden, 0.0)
    return hidden + z @ skip
