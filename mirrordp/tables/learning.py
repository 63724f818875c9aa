"""Learning an encoding: public rows in, `TableEncoding` out. No private row is read here."""

import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.special

from mirrordp._warn import warn
from mirrordp.tables.columns import (
    CategoryColumn,
    ClassTarget,
    Column,
    DateColumn,
    NumberColumn,
    NumberTarget,
    Tally,
    Target,
    clock_minutes,
    count_texts,
    days_of,
    distinct_texts,
    find_date_format,
    has_decimal_comma,
    label_of,
    moments,
    months_of,
    not_counts,
    number,
    number_text,
    numbers,
    same_numbers,
)
from mirrordp.tables.encoding import FeatureEncoding, TableEncoding
from mirrordp.tables.files import Cells, Table, TableError, listed, nearest

TASKS = ("regression", "classification", "count", "ordinal")

MAX_CATEGORIES = 100
"""The largest number of categories of a column with a feature of their own, commonest first."""
MAX_CLASSES = 100
LARGEST_COUNT = 2**53
"""The largest public count. Beyond it, float64 leaves out whole numbers."""
MAX_CODES = 50
"""The largest number of distinct whole numbers that are offered as categories."""
LEAST_GAIN = 0.01
"""The least share of the target's variance that groups explain beyond a line, to be offered."""
THOUSANDS = (".", ",", " ", "'", "_", "\u00a0", "\u202f", "\u2019")
"""Separators of thousands that can be asked for: also narrow and unbreakable spaces."""
_CLOCK_HOURS, _CLOCK_MINUTES = 8, 10
LEAST_MONTHS = 9
"""A public table with fewer months tells nothing about the time of the year."""


@dataclasses.dataclass(frozen=True)
class LearnedEncoding:
    """An encoding, and the columns left out of it with the reasons, all from public data."""

    encoding: TableEncoding
    left_out: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class LearnedFeatures:
    """An encoding of features, and the columns left out of it with the reasons."""

    encoding: FeatureEncoding
    left_out: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Separators:
    """How numbers are written in cells of text.

    Attributes:
        decimal: what stands before the fraction, "." or ",".
        thousands: what stands between groups of three digits, or nothing.
    """

    decimal: str = "."
    thousands: str = ""

    def __post_init__(self):
        if self.decimal not in (".", ","):
            raise TableError(
                f"expected a decimal separator among '.' and ',', got {self.decimal!r}; choose one."
            )
        allowed = set(THOUSANDS) - {self.decimal}
        if self.thousands and self.thousands not in allowed:
            raise TableError(
                f"expected a thousands separator among {listed(sorted(allowed))}, got "
                f"{self.thousands!r}; choose one, or leave it out."
            )


def learn_encoding(
    public: Table,
    *,
    target: str | Sequence[str],
    task: str,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
    decimal: str = ".",
    thousands: str = "",
) -> LearnedEncoding:
    """Learns from the public table how rows become arrays.

    A column holds numbers if every filled cell is a number, dates if every filled cell is a date of
    one format, and otherwise categories. A category gets a feature if it fills 1% of the rows (at
    least 2 cells; 10 are enough), up to `MAX_CATEGORIES`, commonest first. A column that is
    constant, empty or without any such category is left out.

    Args:
        public: the public rows.
        target: the column to predict, or several for regression; rows that lack one are ignored.
        task: one of `TASKS`.
        categorical: columns whose numbers are codes of categories.
        ignore: columns to leave out, such as identifiers. They need not be in the public table.
        decimal: what stands before the fraction of a number, "." or ",".
        thousands: what stands between groups of three digits; nothing by default.
    """
    separators = Separators(decimal, thousands)
    if task not in TASKS:
        raise TableError(f"expected a task among {listed(TASKS)}, got {task!r}; choose one.")
    names = target_names(target, task)
    _require(public, (*names, *categorical))
    for name in names:
        if name in ignore or name in categorical:
            raise TableError(
                f"expected the target {name!r} to be neither ignored nor declared categorical, got "
                "both; leave one out."
            )
    texts = zip(*(_texts(public.columns[name]) for name in names), strict=True)
    present = np.array([all(cells) for cells in texts])
    if not present.any():
        raise TableError(
            f"expected a filled target {listed(names)} in {public.source!r}, got none in any row; "
            "check the column."
        )
    public = public.rows(present)
    learned: list[Any] = [_learn_target(public, name, task, separators) for name in names]
    columns, left_out = _learn_columns(
        public, categorical=categorical, ignore=ignore, separators=separators, targets=names
    )
    if not columns:
        raise TableError(
            f"expected a column besides the target in {public.source!r} that varies, got none; "
            "check the file."
        )
    encoding = TableEncoding(tuple(columns), learned[0], tuple(learned[1:]))
    _offer_categories(public, encoding)
    return LearnedEncoding(encoding, left_out)


def target_names(target: str | Sequence[str], task: str) -> tuple[str, ...]:
    """Returns the names of the targets.

    Raises:
        TableError: if there is none, one is named twice, or the task takes a single one.
    """
    names = (target,) if isinstance(target, str) else tuple(target)
    if not names or len(set(names)) < len(names):
        raise TableError(f"expected different targets, got {listed(names)}; name each one once.")
    if len(names) > 1 and task != "regression":
        raise TableError(
            f"expected one target for --task {task}, got {listed(names)}; fit a model for each. "
            "Only --task regression takes several."
        )
    return names


def learn_features(
    public: Table,
    *,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
    decimal: str = ".",
    thousands: str = "",
) -> LearnedFeatures:
    """Learns from a public table without a target how rows become features.

    See `learn_encoding` for the rules and the arguments. The result may have no column.
    """
    _require(public, categorical)
    columns, left_out = _learn_columns(
        public,
        categorical=categorical,
        ignore=ignore,
        separators=Separators(decimal, thousands),
    )
    return LearnedFeatures(FeatureEncoding(tuple(columns)), left_out)


def _require(public: Table, names: Sequence[str]) -> None:
    for name in names:
        if name in public.unreadable:
            raise TableError(
                f"expected numbers, text, dates or true/false in column {name!r} of "
                f"{public.source!r}, got {public.unreadable[name]}; convert it."
            )
        if name not in public.columns:
            raise TableError(
                f"expected column {name!r} in {public.source!r}, got columns "
                f"{listed(list(public.columns))}{nearest(name, public.columns)}; check the name."
            )


def _learn_columns(
    public: Table,
    *,
    categorical: Sequence[str],
    ignore: Sequence[str],
    separators: Separators,
    targets: Sequence[str] = (),
) -> tuple[list[Column], dict[str, str]]:
    """Returns the columns to use, and the others with the reasons."""
    columns: list[Column] = []
    left_out = {}
    for name in ignore:
        known = name in public.columns or name in public.unreadable
        left_out[name] = "ignored on request" + ("" if known else "; not in the public table")
    for name, kind in public.unreadable.items():
        left_out.setdefault(name, f"it holds {kind}, which no feature can be made of")
    for name, cells in public.columns.items():
        if name in targets or name in left_out:
            continue
        found = _learn_column(
            public, name, cells, force_categories=name in categorical, separators=separators
        )
        if isinstance(found, str):
            left_out[name] = found
        else:
            columns.append(found)
    return columns, left_out


def _offer_categories(public: Table, encoding: TableEncoding) -> None:
    """Tells the operator of numbers that public rows suggest to be codes."""
    parts = []
    for target in encoding.targets:
        outcomes, _ = target.encode(public.columns[target.name], Tally())
        if isinstance(target, ClassTarget):
            outcomes = np.eye(len(target.classes))[outcomes]
        # Several targets count alike, whatever their units.
        parts.append(outcomes.reshape(len(public), -1) / (outcomes.std() or 1.0))
    for name in likely_codes(public, encoding, np.concatenate(parts, axis=1)):
        warn(f"{maybe_codes(name, public.source)}, add --categorical {name}.")


def maybe_codes(name: str, source: str) -> str:
    """Returns the beginning of a message about a column of numbers that may be codes."""
    return (
        f"the whole numbers of column {name!r} in {source!r} may be codes: public rows suggest "
        "that the target does not rise or fall with them; to give each a feature of its own"
    )


def likely_codes(public: Table, encoding: FeatureEncoding, outcomes: np.ndarray) -> list[str]:
    """Returns the columns of numbers that public rows suggest to be codes of categories.

    These are columns of a few whole numbers, each in several rows, whose groups explain clearly
    more of the target than a line through them does, by an F test on public rows.

    Args:
        public: the public rows.
        encoding: their encoding.
        outcomes: their targets as numbers, shape (rows, m).
    """
    found = []
    for column in encoding.columns:
        if isinstance(column, NumberColumn):
            cells = public.columns[column.name]
            values, _ = numbers(cells, column.decimal, column.thousands)
            filled = ~np.isnan(values)
            if _groups_matter(values[filled], outcomes[filled]):
                found.append(column.name)
    return found


def _groups_matter(values: np.ndarray, outcomes: np.ndarray) -> bool:
    if (values != np.floor(values)).any():
        return False
    codes, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    free = len(values) - len(codes)
    if not 3 <= len(codes) <= MAX_CODES or counts.min() < 5:
        return False
    outcomes = outcomes - outcomes.mean(axis=0)
    sums = np.stack([np.bincount(which, weights=outcome) for outcome in outcomes.T])
    centered = values - values.mean()
    by_groups = np.sum(sums**2 / counts)
    by_line = np.sum((centered @ outcomes) ** 2) / np.sum(centered**2)
    total = np.sum(outcomes**2)
    gain, left = by_groups - by_line, total - by_groups
    if gain < LEAST_GAIN * total:
        return False
    ratio = (gain / (len(codes) - 2)) / max(left / free, 1e-300)
    return bool(scipy.special.fdtrc(len(codes) - 2, free, ratio) < 1e-4)


def _texts(cells: Cells) -> list[str]:
    texts, which = distinct_texts(cells)
    return [texts[index] for index in which.tolist()]


def _learn_target(public: Table, name: str, task: str, separators: Separators) -> Target:
    spelled = dataclasses.asdict(separators)
    cells = public.columns[name]
    if task in ("classification", "ordinal"):
        classes = _learn_classes(public, name)
        if task == "ordinal" and not classes.are_numbers:
            raise TableError(
                f"expected numbers that order the classes of {name!r} for --task ordinal, got "
                f"{classes.classes[0]!r} in {public.source!r}; number the classes from lowest to "
                "highest in all files, or use --task classification."
            )
        return classes
    values, wrong = numbers(cells, **spelled)
    if wrong.any():
        if separators.decimal == ".":
            _refuse_decimal_commas(public, name, cells, wrong, otherwise="")
        example = _texts(cells)[int(np.argmax(wrong))]
        raise TableError(
            f"expected numbers in the target {name!r} for --task {task}, got {example!r} in "
            f"{public.source!r}; use --task classification or repair the column."
        )
    if task == "count":
        bad = not_counts(values)
        if bad.any():
            raise TableError(
                f"expected whole numbers of at least zero in the target {name!r} for --task count, "
                f"got {number_text(values[bad][0])} in {public.source!r}; use --task regression."
            )
        if values.max() > LARGEST_COUNT:
            raise TableError(
                f"expected counts of at most {LARGEST_COUNT} in the target {name!r}, got "
                f"{number_text(values.max())} in {public.source!r}; repair the column, or use "
                "--task regression."
            )
        return NumberTarget(name, is_count=True, **spelled)
    if values.min() == values.max():
        raise TableError(
            f"expected a target {name!r} that varies in {public.source!r}, got "
            f"{number_text(values[0])} in every row; add public rows."
        )
    if (extreme := too_extreme(values)) is not None:
        raise TableError(
            f"expected a target {name!r} that can be computed with, got {extreme}, in "
            f"{public.source!r}; use another unit in all files, or repair the column."
        )
    return NumberTarget(name, is_count=False, **spelled)


def _learn_classes(public: Table, name: str) -> ClassTarget:
    found = count_texts(public.columns[name])
    # Codes such as 007 are names, not numbers.
    are_numbers = all(
        number(text) is not None and not re.match(r"[+-]?0\d", text) for text in found
    )
    labels = {label_of(text, are_numbers) for text in found}
    classes = sorted(labels, key=float) if are_numbers else sorted(labels)
    if len(classes) < 2:
        raise TableError(
            f"expected at least two classes in the target {name!r} of {public.source!r}, got "
            f"{classes[0]!r} alone; add public rows of the others."
        )
    if len(classes) > MAX_CLASSES:
        raise TableError(
            f"expected at most {MAX_CLASSES} classes in the target {name!r}, got {len(classes)} in "
            f"{public.source!r}; use --task regression or merge classes."
        )
    return ClassTarget(name, tuple(classes), are_numbers)


def _refuse_decimal_commas(
    public: Table,
    name: str,
    cells: Cells,
    wrong: np.ndarray,
    *,
    otherwise: str = ", or ignore the column or declare it categorical",
) -> None:
    """Refuses a column that decimal commas would turn into too many categories."""
    texts = list(itertools.compress(_texts(cells), wrong))
    if all(map(has_decimal_comma, texts)):
        raise TableError(
            f"expected numbers with a decimal point in column {name!r} of {public.source!r}, got "
            f"{texts[0]!r}; add --decimal , if all files have commas{otherwise}."
        )


def _learn_column(
    public: Table, name: str, cells: Cells, *, force_categories: bool, separators: Separators
) -> Column | str:
    """Returns the learned column, or the reason why it is left out."""
    if not force_categories:
        values, wrong = numbers(cells, separators.decimal, separators.thousands)
        present = values[~np.isnan(values)]
        if not wrong.any():
            if len(present) == 0:
                return "empty in the public table"
            low, high = float(present.min()), float(present.max())
            is_clock = _is_clock(present)
            units = clock_minutes(present) if is_clock else present
            if (extreme := too_extreme(units)) is not None:
                return f"it holds {extreme}"
            scale = float(units.std())
            if not scale >= sys.float_info.min:
                return "constant in the public table"
            marks = len(present) < len(values)
            return NumberColumn(
                name, float(units.mean()), scale, low, high, marks,
                separators.decimal, separators.thousands, is_clock,
            )  # fmt: skip
        date_format = None if len(present) else find_date_format(cells)
        if date_format is not None:
            return _learn_dates(name, cells, date_format)
        if separators.decimal == ".":
            _refuse_decimal_commas(public, name, cells, wrong)
        texts = {text for text in distinct_texts(cells)[0] if text}
        if len(texts) > MAX_CATEGORIES and 2 * len(present) > len(present) + wrong.sum():
            example = next(itertools.compress(_texts(cells), wrong))
            raise TableError(
                f"expected numbers alone or categories alone in column {name!r} of "
                f"{public.source!r}, got mostly numbers and, in {int(wrong.sum())} cells, text "
                f"such as {example!r}; repair it, ignore it or declare it categorical."
            )
    counts = count_texts(cells)
    missing = counts.pop("", 0)
    if not counts:
        return "empty in the public table"
    if len(counts) == 1 and not missing:
        return "constant in the public table"
    least = min(max(0.01 * len(public), 2), 10)
    # By falling count and then by name, so that the order of rows does not matter.
    ranked = sorted(counts, key=lambda text: (-counts[text], text))
    # Names that are one number, such as 007 and 7, are kept together: if 7 were left out because it
    # is rare, cells of it would count as 007.
    same = same_numbers(ranked)
    kept: list[str] = []
    for text in itertools.takewhile(lambda text: counts[text] >= least, ranked):
        names = same.get(text, [text])
        if text not in kept and len(kept) + len(names) <= MAX_CATEGORIES:
            kept += names
    if not kept:
        return "no category is common enough in the public table"
    return CategoryColumn(name, tuple(sorted(kept)), ranked[0], missing > 0)


def too_extreme(values: np.ndarray) -> str | None:
    """Describes public numbers that differ, but have no standard deviation in float64."""
    with np.errstate(all="ignore"):
        spread = values.std()
    if values.min() == values.max() or sys.float_info.min <= spread < math.inf:
        return None
    low, high = (number_text(value) for value in (values.min(), values.max()))
    return f"numbers from {low} to {high}, whose squares are beyond float64"


def _is_clock(values: np.ndarray) -> bool:
    """Returns whether numbers are hours and minutes, such as 1745, by how many there are of each.

    All of them must be whole, from 0 to 2400, with last digits below 60. Other numbers of this
    range would have to miss 60 to 99 every time.
    """
    if (values != np.floor(values)).any() or values.min() < 0 or values.max() > 2400:
        return False
    hours, minutes = np.divmod(np.unique(values), 100)
    several = len(np.unique(hours)) >= _CLOCK_HOURS and len(np.unique(minutes)) >= _CLOCK_MINUTES
    return bool(several and 45 <= minutes.max() < 60)


def _learn_dates(name: str, cells: Cells, date_format: str) -> DateColumn | str:
    times, _ = moments(cells, date_format)
    times, marks = times[~np.isnat(times)], bool(np.isnat(times).any())
    days = days_of(times)
    low, high, scale = (float(v) for v in (days.min(), days.max(), days.std()))
    if not scale > 0:
        return "constant in the public table"
    return DateColumn(
        name,
        date_format,
        mean=float(days.mean()),
        scale=scale,
        low=low,
        high=high,
        # With fewer months, the time of the year would be a guess for all the others.
        has_months=len(np.unique(months_of(times))) >= LEAST_MONTHS,
        has_weekdays=len(np.unique(np.floor(days) % 7)) > 1,
        has_hours=bool((days % 1 != 0).any()),
        marks_missing=marks,
    )
