"""Several runs side by side: reports in; a table, a privacy-utility figure and notes out.

Everything here follows from stored reports. A quantity can be compared if all rows name it in the
results of the run, or in those of each of its methods. A name with `_standard_error` appended holds
the error of a quantity.
"""

import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrordp._rounding import upwards
from mirrordp.report.charts import PALETTE
from mirrordp.report.statement import RunReport
from mirrordp.report.stored import ReportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARS = "Bars are one standard error to either side, where the runs state it."
_ERROR = "_standard_error"
_HIGHER_IS_BETTER = re.compile(r"accuracy|auc|r2|score|precision|recall|f1")
# More names beside points would overlap.
_MOST_NAMES = 12
_UTILITY = re.compile(
    r"loss|accuracy|auc|r2|score|error|rmse|mae|mse|perplexity|deviance|risk|f1|precision|recall"
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One model or one group of trials, as a row of a table.

    Attributes:
        run: the run's name.
        label: the method's name.
        report: the statement of the run.
        values: released quantities by name.
        errors: the standard errors of the quantities that have one.
    """

    run: str
    label: str
    report: RunReport
    values: Mapping[str, float]
    errors: Mapping[str, float]

    @property
    def target(self) -> str | None:
        """What the model predicts, or None if the report does not say."""
        target, task = (self.report.results.get(name) for name in ("target", "task"))
        if not isinstance(target, str):
            return None
        return f"{task} of {target!r}" if isinstance(task, str) else repr(target)

    def with_error(self, name: str) -> str:
        """Returns a quantity as text, with its standard error if it has one."""
        error = f" ± {self.errors[name]:.2g}" if name in self.errors else ""
        return f"{self.values[name]:.4g}{error}"


def outcomes(report: RunReport, run: str) -> list[Outcome]:
    """Returns the rows of one run: one for each method that it compared, or a single one."""
    methods = report.results.get("methods")
    if isinstance(methods, dict) and methods and all(isinstance(m, dict) for m in methods.values()):
        rows = [(str(one.get("label", name)), one) for name, one in methods.items()]
    else:
        rows = [(str(report.results.get("method", report.title)), report.results)]
    return [Outcome(run, label, report, *_quantities(content)) for label, content in rows]


def _quantities(content: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    numbers = {
        name: float(value)
        for name, value in content.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    values = {name: value for name, value in numbers.items() if not name.endswith(_ERROR)}
    errors = {name: numbers[name + _ERROR] for name in values if name + _ERROR in numbers}
    return values, errors


def metrics(rows: Sequence[Outcome]) -> list[str]:
    """Returns the names that sound like the quality of a model and occur in every row."""
    shared = [name for name in rows[0].values if all(name in row.values for row in rows)]
    return [name for name in shared if _UTILITY.search(name.lower())]


def higher_is_better(metric: str) -> bool:
    """Judges by the name of a quantity whether higher values are better."""
    # A measure of one of several targets ends with its name, which says nothing.
    return bool(_HIGHER_IS_BETTER.search(metric.partition(" of ")[0].lower()))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rows of several runs, and the quantity by which they are compared, if there is one."""

    rows: tuple[Outcome, ...]
    metric: str | None

    @classmethod
    def of(cls, reports: Mapping[str, RunReport], metric: str | None = None) -> "Comparison":
        """Gathers the rows of all runs.

        Args:
            reports: the reports by name of the run.
            metric: the quantity to compare by, where "auc" also finds "test_auc"; by default the
                first that all rows have and that sounds like the quality of a model.

        Raises:
            ReportError: if a row does not have `metric`.
        """
        rows = tuple(row for run, report in reports.items() for row in outcomes(report, run))
        if metric is None:
            return cls(rows, next(iter(metrics(rows)), None))
        names = metric, f"test_{metric}"
        for name in names:
            if all(name in row.values for row in rows):
                return cls(rows, name)
        lacks = min(rows, key=lambda row: sum(name in row.values for name in names))
        raise ReportError(
            f"expected quantity {metric!r} in every run, got {', '.join(lacks.values) or 'none'} "
            f"in {lacks.run!r}; choose another --metric, or judge that run by it too (fit --test)."
        )

    @classmethod
    def read(cls, folders: Sequence[Path], metric: str | None = None) -> "Comparison":
        """Reads the reports in these folders and names each by the end of its path."""
        names = _short_names(folders)
        reports = [RunReport.read(folder) for folder in folders]
        return cls.of(dict(zip(names, reports, strict=True)), metric)

    @property
    def _targets(self) -> list[str]:
        """The different targets that the rows predict, as far as their reports say."""
        return sorted({row.target for row in self.rows if row.target is not None})

    @property
    def has_errors(self) -> bool:
        """Whether a run states the standard error of what is compared."""
        return any(self.metric in row.errors for row in self.rows)

    def label(self, row: Outcome) -> str:
        """Returns the method of a row, with its target if the rows have different ones."""
        if len(self._targets) < 2 or row.target is None:
            return row.label
        return f"{row.label}, {row.target}"

    def names(self, rows: Sequence[Outcome]) -> list[str] | None:
        """Returns the run of each point in a figure; None for a single run or too many points."""
        runs = {row.run for row in self.rows}
        if len(runs) < 2 or len(self.rows) > _MOST_NAMES:
            return None
        return [_shortened(_one_line(row.run)) for row in rows]

    def header(self) -> list[str]:
        """Returns the names of the columns of `cells`."""
        names = ["run", "method", "epsilon", "delta", "adjacency", "unit", "steps"]
        return [*names, *([] if self.metric is None else [self.metric]), "for release"]

    def cells(self, row: Outcome) -> list[str]:
        """Returns one row of the table."""
        report = row.report
        cells = [
            row.run,
            self.label(row),
            upwards(report.epsilon),
            upwards(report.delta, 6),
            report.adjacency.value,
            report.unit,
            f"{report.charged_steps}",
        ]
        if self.metric is not None:
            cells.append(row.with_error(self.metric))
        return [*cells, "yes" if report.is_for_release else "no"]

    def notes(self) -> list[str]:
        """Returns what to keep in mind when comparing these runs."""
        found = []
        for name, values in (
            ("adjacency", {row.report.adjacency.value for row in self.rows}),
            ("unit", {row.report.unit for row in self.rows}),
            ("delta", {f"{row.report.delta:g}" for row in self.rows}),
        ):
            if len(values) > 1:
                found.append(
                    f"The runs differ in {name} ({', '.join(sorted(values))}): their epsilons do "
                    "not mean the same thing."
                )
        titles = sorted({row.report.title for row in self.rows})
        if len(self._targets) > 1:
            found.append(
                f"The runs predict different targets ({', '.join(self._targets)}): their quality "
                "cannot be compared."
            )
        elif len(titles) > 1 and not self._targets:
            found.append(
                f"The runs have different titles ({'; '.join(titles)}): compare their quality only "
                "if they predict the same thing."
            )
        if self.metric is None:
            found.append("The runs share no measure of model quality, so only their cost is shown.")
        elif self.has_errors:
            found.append("± is one standard error.")
        found += self._together()
        if not all(row.report.is_for_release for row in self.rows):
            found.append("A run with a seed, or without noise, is not for release.")
        return found

    def _together(self) -> list[str]:
        """States the cost of all runs by addition, which holds however they were chosen.

        A choice among the models is covered if it follows from them and from public rows. How well
        a model does on private rows is one more release, without noise.
        """
        epsilon = sum(row.report.epsilon for row in self.rows)
        delta = sum(row.report.delta for row in self.rows)
        kinds = {(row.report.adjacency, row.report.unit) for row in self.rows}
        if len(self.rows) < 2 or len(kinds) > 1 or not math.isfinite(epsilon) or delta >= 1:
            return []
        seeds = {row.run: row.report.seed for row in self.rows if row.report.seed is not None}
        if len(set(seeds.values())) < len(seeds):
            return ["Runs of one seed may share their noise, so together they promise nothing."]
        trials = any(len(curve.values) > 1 for row in self.rows for curve in row.report.curves)
        notes = []
        unsure = {row.run: row.report.seed for row in self.rows if row.report.seeded is not False}
        if len(unsure) > 1 and None in unsure.values():
            notes.append(
                "Not every report states the seed: runs that share one promise nothing together."
            )
        return [
            *notes,
            f"If all {len(self.rows)} models{', one trial of each row,' * trials} come from the "
            "same private records, publishing all of them, or one that was chosen by its results "
            f"on public rows, costs at most epsilon {upwards(epsilon)}, delta {upwards(delta)} (by "
            "addition; a ledger or budget that they share states less). A choice that looks at "
            "private records is not covered.",
        ]

    def text(self) -> str:
        """Returns the table and the notes for a terminal."""
        table = [self.header(), *(self.cells(row) for row in self.rows)]
        table = [[_one_line(cell) for cell in row] for row in table]
        widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
        numeric = {"epsilon", "delta", "steps", self.metric}
        lines = []
        for row in table:
            cells = [
                cell.rjust(width) if name in numeric else cell.ljust(width)
                for name, cell, width in zip(table[0], row, widths, strict=True)
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, "", *self.notes()]).replace("±", "+-")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types for `--json`."""
        return {
            "metric": self.metric,
            "rows": [
                {
                    "run": row.run,
                    "title": row.report.title,
                    "target": row.target,
                    "method": row.label,
                    "epsilon": row.report.epsilon if math.isfinite(row.report.epsilon) else None,
                    "delta": row.report.delta,
                    "adjacency": row.report.adjacency.value,
                    "unit": row.report.unit,
                    "steps": row.report.charged_steps,
                    "for_release": row.report.is_for_release,
                    **({} if self.metric is None else {self.metric: row.values[self.metric]}),
                    **{
                        name + _ERROR: error
                        for name, error in row.errors.items()
                        if name == self.metric
                    },
                }
                for row in self.rows
            ],
            "notes": self.notes(),
        }

    def groups(self) -> dict[str, list[Outcome]]:
        """Returns the rows that can be drawn by method, in the order of ε."""
        if self.metric is None:
            return {}
        found: dict[str, list[Outcome]] = {}
        for row in self.rows:
            if 0 < row.report.epsilon < math.inf and math.isfinite(row.values[self.metric]):
                found.setdefault(self.label(row), []).append(row)
        return {
            label: sorted(rows, key=lambda row: row.report.epsilon) for label, rows in found.items()
        }

    def figure(self) -> bytes:
        """Draws the privacy-utility plot as a PNG.

        Raises:
            ReportError: if there is no quantity to draw, or no run with a finite ε.
        """
        buffer = io.BytesIO()
        self._drawn().savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()

    def _drawn(self) -> "Figure":
        from matplotlib.figure import Figure

        groups = self.groups()
        if self.metric is None or not groups:
            raise ReportError(
                "expected runs with a common measure of quality and a finite epsilon to draw, got "
                "none; choose other folders or a --metric."
            )
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.subplots()
        for index, (label, rows) in enumerate(groups.items()):
            axes.errorbar(
                [row.report.epsilon for row in rows],
                [row.values[self.metric] for row in rows],
                yerr=[row.errors.get(self.metric, 0.0) for row in rows],
                color=PALETTE[index % len(PALETTE)],
                marker="s^oDvP"[index % 6],
                ls=("-", "--", ":", "-.")[index % 4],
                ms=8,
                capsize=4,
                label=_one_line(label).replace("$", r"\$"),
            )
            for row, name in zip(rows, self.names(rows) or [], strict=False):
                axes.annotate(
                    name.replace("$", r"\$"),
                    (row.report.epsilon, row.values[self.metric]),
                    xytext=(6, 6),
                    textcoords="offset points",
                    fontsize=8,
                )
        if spans_decades(self):
            axes.set_xscale("log")
        better = "higher" if higher_is_better(self.metric) else "lower"
        quantity = _one_line(self.metric).replace("$", r"\$")
        axes.set(
            xlabel="epsilon (smaller protects more)", ylabel=f"{quantity} ({better} is better)"
        )
        axes.set_title("Privacy and utility", loc="left", fontweight="bold")
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if self.has_errors:
            figure.supxlabel(BARS, fontsize=9, color="#444444", x=0.01, ha="left")
        return figure


def spans_decades(comparison: Comparison) -> bool:
    """Returns whether ε spans so wide a range that a logarithmic axis shows it better."""
    drawn = [row.report.epsilon for rows in comparison.groups().values() for row in rows]
    return bool(drawn) and max(drawn) > 4 * min(drawn)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of paths that differ; numbers them if a folder occurs twice."""
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, 1)]


def _one_line(text: str) -> str:
    """Replaces characters that would move a terminal's cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _shortened(text: str, length: int = 24) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
