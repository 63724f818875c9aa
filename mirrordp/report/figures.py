"""Learning curves of released quantities, and a figure that compares methods."""

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mirrordp.report.charts import PALETTE

_MARKERS = ("s", "^", "o", "D", "v", "P")


@dataclasses.dataclass(frozen=True)
class Curve:
    """The repeated runs of one method, for `comparison_figure` and the page of `mirrordp report`.

    Attributes:
        label: the method's name.
        steps: the step numbers at which the quantity was evaluated.
        values: [trials, len(steps)], where smaller is better; made of released values only.
        quantity: what was evaluated, such as "test loss".
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    quantity: str = "loss"

    def __post_init__(self):
        steps, values = np.asarray(self.steps), np.asarray(self.values, float)
        if steps.ndim != 1 or values.ndim != 2 or values.shape[1:] != steps.shape or not len(steps):
            raise ValueError(
                f"values of curve {self.label!r} must have the shape [trials, {len(steps)}], got "
                f"{list(values.shape)}. Give one row per trial, one column per step."
            )
        if "unprivatized" in f"{self.label} {self.quantity}".lower():
            raise ValueError(
                f"curves must hold released values only, got {self.quantity!r} of {self.label!r}, "
                "which is not covered by the privacy guarantee. Leave it out."
            )
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "values", values)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types, with None for values that are not finite."""
        values = [[x if math.isfinite(x) else None for x in row] for row in self.values.tolist()]
        return {
            "label": self.label,
            "quantity": self.quantity,
            "steps": self.steps.tolist(),
            "values": values,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Curve":
        """Inverts `to_dict`, with NaN for None."""
        values = [[math.nan if x is None else x for x in row] for row in content["values"]]
        label, quantity = content["label"], content["quantity"]
        if not isinstance(label, str) or not isinstance(quantity, str):
            raise TypeError("label and quantity of a curve must be strings")
        steps = np.array(content["steps"])
        if steps.dtype.kind not in "iuf":
            raise TypeError("steps of a curve must be numbers")
        return cls(label, steps, np.array(values, float), quantity)

    @property
    def mean(self) -> np.ndarray:
        """The mean over trials at each step."""
        return self.values.mean(axis=0)

    @property
    def standard_error(self) -> np.ndarray:
        """The standard error of that mean, which is zero for a single trial."""
        trials = len(self.values)
        if trials < 2:
            return np.zeros(self.values.shape[1])
        return self.values.std(axis=0, ddof=1) / math.sqrt(trials)


def comparison_figure(
    curves: Sequence[Curve], *, title: str, quantity: str, subtitle: str = ""
) -> bytes:
    """Draws each method's curve on the left and its final value with error bars on the right.

    Args:
        curves: the methods, at most six.
        title: the finding, in one line.
        quantity: what is measured; smaller is better.
        subtitle: the circumstances, in one line.

    Returns:
        A PNG image.
    """
    from matplotlib.figure import Figure

    if not 1 <= len(curves) <= len(PALETTE):
        raise ValueError(
            f"a figure shows 1 to {len(PALETTE)} methods, got {len(curves)}. Draw several figures."
        )
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    course, final = figure.subplots(1, 2, width_ratios=(3, 2))
    ends = [curve.mean[-1] for curve in curves]
    best = int(np.argmin(ends))
    for index, curve in enumerate(curves):
        colour, marker = PALETTE[index], _MARKERS[index]
        mean, error = curve.mean, curve.standard_error
        every = max(1, len(curve.steps) // 6)
        course.plot(
            curve.steps, mean, color=colour, marker=marker, markevery=every, ms=5,
            lw=2.6 if index == best else 1.8, label=curve.label,
        )  # fmt: skip
        course.fill_between(
            curve.steps, mean - 2 * error, mean + 2 * error, color=colour, alpha=0.18, lw=0
        )
        final.errorbar(
            mean[-1], index, xerr=2 * error[-1], color=colour, marker=marker, ms=9, capsize=5,
            lw=2.4,
        )  # fmt: skip
        final.annotate(
            f"{mean[-1]:.3f}{'  best' if index == best else ''}",
            (mean[-1], index), xytext=(0, 13), textcoords="offset points", ha="center",
            fontsize=10, fontweight="bold" if index == best else "normal",
        )  # fmt: skip
    course.set(xlabel="training step", ylabel=f"{quantity} (lower is better)")
    course.legend(frameon=False, fontsize=10)
    final.set(xlabel=f"{quantity} at the end", ylim=(len(curves) - 0.4, -0.7))
    final.set_yticks(range(len(curves)), [curve.label for curve in curves], fontsize=10)
    final.margins(x=0.2)
    for axes in (course, final):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes is final else "y", alpha=0.25)
    if subtitle:
        figure.supxlabel(subtitle, fontsize=9, color="#444444", x=0.01, ha="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
