"""A model on test rows, and its coefficients: results of a report in, tables and figures out.

`mirrordp fit` writes `results["test"]` and `results["coefficients"]`. A report may hold anything
under these names, so that what is not of the expected form is left to the page's list of results.
"""

import dataclasses
import io
import math
from collections.abc import Mapping
from typing import Any

from mirrordp.report.charts import PALETTE, shortened
from mirrordp.report.stored import ReportError

DIAGONAL_LABEL = "prediction = observation"
COEFFICIENTS_CAPTION = "coefficient; bars are two standard deviations of the noise to either side"


@dataclasses.dataclass(frozen=True)
class Score:
    """One measure of one model, with the ends of its interval where it has one."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return _with_commas(self.value)
        low, high = _with_commas(self.low), _with_commas(self.high)
        return f"{_with_commas(self.value)} ({low} to {high})"


def _with_commas(value: float) -> str:
    """Returns four digits of a number, written as 90,560 rather than 9.056e+04."""
    text = f"{value:.4g}"
    return f"{float(text):,.0f}" if 1e4 <= abs(value) < 1e9 else text


@dataclasses.dataclass(frozen=True)
class Point:
    """What was observed where something was predicted, with an interval."""

    predicted: float
    observed: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class TestCurve:
    """What was observed on test rows against what was predicted.

    Attributes:
        is_calibration: whether the curve shows shares of events, not numbers.
        event: what is predicted, in words.
        points: the curve.
    """

    __test__ = False  # pytest would take the name for a test.

    is_calibration: bool
    event: str
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """The name of the figure."""
        return "Calibration" if self.is_calibration else "Predicted and observed"

    @property
    def caption(self) -> str:
        """What the curve shows."""
        if self.is_calibration:
            return (
                "Test rows in groups of about equal size by predicted probability; bars are 95% "
                "intervals of the observed share. A calibrated model is on the line."
            )
        return (
            "Test rows in groups of about equal size by prediction: their mean, and the range that "
            "holds the middle 80%. An unbiased model is on the line."
        )

    @property
    def labels(self) -> tuple[str, str]:
        """The labels of the two axes."""
        if self.is_calibration:
            return f"predicted probability ({self.event})", "observed share"
        return f"predicted {self.event}", f"observed {self.event}"

    @property
    def diagonal(self) -> list[float]:
        """The ends of the line on which prediction and observation agree."""
        if self.is_calibration:
            return [0.0, 1.0]
        predicted = [point.predicted for point in self.points]
        return [min(predicted), max(predicted)]


@dataclasses.dataclass(frozen=True)
class TestResults:
    """The results on test rows.

    Attributes:
        rows: their number.
        interval: how the intervals were found, in words.
        models: the scores by name of the model and of the measure.
        curves: one curve for each target.
    """

    __test__ = False

    rows: int
    interval: str
    models: Mapping[str, Mapping[str, Score]]
    curves: tuple[TestCurve, ...]

    @property
    def measures(self) -> list[str]:
        """The names of all measures."""
        return list(dict.fromkeys(name for scores in self.models.values() for name in scores))


@dataclasses.dataclass(frozen=True)
class Coefficient:
    """One coefficient, and the standard deviation that noise alone gives it, if it is known."""

    name: str
    value: float
    noise_stddev: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """Two standard deviations to either side."""
        reach = 2 * (self.noise_stddev or 0.0)
        return self.value - reach, self.value + reach


def results_on_test_rows(results: Mapping[str, Any]) -> TestResults | None:
    """Returns the results on test rows, or None if there are none of the expected form."""
    try:
        content = results["test"]
        found = TestResults(
            rows=int(content["rows"]),
            interval=str(content["interval"]),
            models={
                str(model): {str(name): _score(score) for name, score in scores.items()}
                for model, scores in content["models"].items()
            },
            curves=tuple(_curve(curve) for curve in content["curves"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    has_points = bool(found.curves) and all(curve.points for curve in found.curves)
    return found if found.measures and has_points else None


def lines_of_scores(models: Mapping[str, Mapping[str, Score]]) -> list[str]:
    """Returns a table as text: one line for each measure, one column for each model."""
    names = dict.fromkeys(name for scores in models.values() for name in scores)
    table = [["", *models]]
    for name in names:
        cells = [scores.get(name) for scores in models.values()]
        table.append([name, *("-" if cell is None else str(cell) for cell in cells)])
    table = [[_printable(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _curve(content: Mapping[str, Any]) -> TestCurve:
    return TestCurve(
        is_calibration=content["kind"] == "calibration",
        event=str(content["event"]),
        points=tuple(
            Point(*(_finite(point[field.name]) for field in dataclasses.fields(Point)))
            for point in content["points"]
        ),
    )


def _score(content: Mapping[str, Any]) -> Score:
    low, high = content["low"], content["high"]
    if low is None or high is None:
        return Score(_finite(content["value"]), None, None)
    return Score(_finite(content["value"]), _finite(low), _finite(high))


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


def coefficients(results: Mapping[str, Any]) -> dict[str, list[Coefficient]]:
    """Returns the largest coefficients by target, "" if there is one target.

    If there are none of the expected form, the result is empty.
    """
    found: dict[str, list[Coefficient]] = {}
    try:
        content = results["coefficients"]
        several = len({one["output"] for one in content if "target" not in one}) > 1
        for one in content:
            stddev = one["noise_stddev"]
            found.setdefault(str(one.get("target", "")), []).append(
                Coefficient(
                    f"{one['feature']} ({one['output']})" if several else str(one["feature"]),
                    _finite(one["value"]),
                    None if stddev is None else _finite(stddev),
                )
            )
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    return found


def evaluation_figures(results: Mapping[str, Any]) -> dict[str, bytes]:
    """Draws the results on test rows and the coefficients, as PNG images by the name of their file.

    Raises:
        ReportError: if there is nothing to draw.
    """
    found = {}
    tested, largest = results_on_test_rows(results), coefficients(results)
    if tested is not None:
        for number, curve in enumerate(tested.curves, start=1):
            name = "calibration" if curve.is_calibration else "residuals"
            found[_file(name, number, len(tested.curves))] = _curve_figure(curve, tested.rows)
    for number, (target, own) in enumerate(largest.items(), start=1):
        found[_file("coefficients", number, len(largest))] = _coefficients_figure(target, own)
    if not found:
        raise ReportError(
            "expected results on test rows or coefficients to draw, as mirrordp fit writes them, "
            "got none; leave --figures out."
        )
    return found


def _file(name: str, number: int, count: int) -> str:
    return f"{name}.png" if count == 1 else f"{name}_{number}.png"


def _curve_figure(tested: TestCurve, rows: int) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        tested.diagonal, tested.diagonal, color=PALETTE[0], ls="--", lw=1.2, label=DIAGONAL_LABEL
    )
    x = [point.predicted for point in tested.points]
    y = [point.observed for point in tested.points]
    if tested.is_calibration:
        below = [point.observed - point.low for point in tested.points]
        above = [point.high - point.observed for point in tested.points]
        label = "this model, with 95% intervals"
        axes.errorbar(
            x, y, yerr=[below, above], color=PALETTE[2], marker="o", capsize=4, label=label
        )
    else:
        low, high = [p.low for p in tested.points], [p.high for p in tested.points]
        axes.fill_between(x, low, high, color=PALETTE[2], alpha=0.2, lw=0, label="middle 80%")
        axes.plot(x, y, color=PALETTE[2], marker="o", label="this model, mean")
    across, up = (_plain(label, 44) for label in tested.labels)
    axes.set(xlabel=across, ylabel=up)
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    _label_plainly(axes.xaxis, 6)
    _label_plainly(axes.yaxis, 6)
    return _png(figure, axes, f"{tested.title} on {rows:,} test rows")


def _coefficients_figure(target: str, largest: list[Coefficient]) -> bytes:
    from matplotlib.figure import Figure

    names = [_plain(one.name) for one in largest]
    # The room of the names comes on top of that of the bars.
    size = (4.6 + 0.075 * max(map(len, names)), 1.6 + 0.32 * len(largest))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=PALETTE[0], lw=1)
    for place, one in enumerate(largest):
        low, high = one.ends
        axes.plot([low, high], [place, place], color=PALETTE[2], lw=2.2)
        axes.plot(one.value, place, color=PALETTE[2], marker="o")
    axes.set_yticks(range(len(largest)), names, fontsize=9)
    axes.set(ylim=(len(largest) - 0.4, -0.6))
    _label_plainly(axes.xaxis, 4)
    figure.supxlabel(COEFFICIENTS_CAPTION, fontsize=9)
    title = "Largest coefficients"
    return _png(figure, axes, f"{title}: {_plain(target, 30)}" if target else title)


def _label_plainly(axis: Any, most: int) -> None:
    """Writes few numbers along an axis, 200,000 rather than 2e5, so that none overlap."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def text(value: float, position: int | None) -> str:
        shown = f"{value:,.10g}" if abs(value) < 1e7 else f"{value:.3g}"
        return shown.replace("-", "−")

    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(text))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _plain(text: str, longest: int = 60) -> str:
    """Returns text that matplotlib does not take for mathematics, on one line."""
    return shortened(_printable(text), longest).replace("$", r"\$")


def _png(figure: Any, axes: Any, title: str) -> bytes:
    # Above the names too, so that it has the whole width.
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
