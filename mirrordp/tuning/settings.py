"""The settings of a private run, and lists of them to choose from."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from mirrordp import _validate
from mirrordp.types import AlphaSchedule
from mirrordp.updates import schedules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What there is to choose about a private run at a given ε; the noise follows from it.

    Attributes:
        learning_rate: η, which the optimiser is made with.
        l2_clip_norm: C.
        batch_size: the expected number of private rows of a step, which are drawn by Poisson
            sampling; it need not be whole.
        num_steps: T.
        alpha: the weight of the private gradient, as a number or a schedule.
    """

    learning_rate: float
    l2_clip_norm: float
    batch_size: float
    num_steps: int
    alpha: float | AlphaSchedule = 1.0

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.positive(
            learning_rate=self.learning_rate,
            l2_clip_norm=self.l2_clip_norm,
            batch_size=self.batch_size,
        )
        _validate.positive_integer(num_steps=self.num_steps)
        if self.charged_steps == 0:
            raise ValueError(
                f"alpha must be above 0 at some step, since nothing private is learned at 0, got "
                f"{self.alpha!r}. Use mirrordp.warm_start to learn from public rows alone."
            )

    @property
    def alphas(self) -> np.ndarray:
        """α_t of every step."""
        return schedules.evaluate(schedules.as_schedule(self.alpha), self.num_steps)

    @property
    def charged_steps(self) -> int:
        """The number of steps that read private rows."""
        return int((self.alphas > 0).sum())

    @property
    def described(self) -> str:
        """All digits of all fields, and a hash of α_t, for comparisons."""
        numbers = (self.learning_rate, self.l2_clip_norm, self.batch_size)
        exact = hashlib.sha256(self.alphas.tobytes()).hexdigest()
        return f"{[float(number) for number in numbers]} {self.num_steps} {exact}"

    def __str__(self) -> str:
        alpha = f"{self.alpha:g}" if isinstance(self.alpha, int | float) else "a schedule"
        return (
            f"learning_rate={self.learning_rate:.3g}, l2_clip_norm={self.l2_clip_norm:.3g}, "
            f"batch_size={self.batch_size:g}, num_steps={self.num_steps}, alpha={alpha}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for reports; a schedule becomes its first and last value."""
        alphas = self.alphas
        alpha: Any = float(alphas[0])
        if not isinstance(self.alpha, int | float):
            alpha = [float(alphas[0]), float(alphas[-1])]
        return {
            "learning_rate": float(self.learning_rate),
            "l2_clip_norm": float(self.l2_clip_norm),
            "batch_size": float(self.batch_size),
            "num_steps": int(self.num_steps),
            "alpha": alpha,
        }


def grid(**values: Any) -> list[Settings]:
    """Returns all combinations of the given values; a value that is no list is common to all.

    >>> len(grid(learning_rate=[0.1, 0.3], l2_clip_norm=1.0, batch_size=50, num_steps=[10, 20]))
    4

    Args:
        **values: a value, or a list of values, for each field of `Settings`.
    """
    names = [field.name for field in dataclasses.fields(Settings)]
    unknown = [name for name in values if name not in names]
    if unknown:
        raise TypeError(f"expected values of {', '.join(names)}, got some of {unknown[0]!r}.")
    missing = [name for name in names if name not in values and name != "alpha"]
    if missing:
        raise TypeError(
            f"a grid needs at least one value of every setting but alpha, got none of "
            f"{', '.join(missing)}."
        )
    lists = [list(value) if isinstance(value, Iterable) else [value] for value in values.values()]
    found = [
        Settings(**dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*lists)
    ]
    if not found:
        raise ValueError("a grid needs at least one value of every setting, got an empty list.")
    return found
