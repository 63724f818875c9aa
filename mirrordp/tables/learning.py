"""Learning an encoding: public rows in, `TableEncoding` out. No private row is read here."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from mirrordp.tables.columns import (
    CategoryColumn,
    ClassTarget,
    Column,
    NumberColumn,
    NumberTarget,
    Target,
    count_texts,
    distinct_texts,
    has_decimal_comma,
    label_of,
    not_counts,
    number,
    number_text,
    numbers,
)
from mirrordp.tables.encoding import TableEncoding
from mirrordp.tables.files import Cells, Table, TableError, listed

TASKS = ("regression", "classification", "count")

MAX_CATEGORIES = 100
"""The largest number of categories of a column with a feature of their own, commonest first."""
MAX_CLASSES = 100


@dataclasses.dataclass(frozen=True)
class LearnedEncoding:
    """An encoding, and the columns left out of it with the reasons, all from public data."""

    encoding: TableEncoding
    left_out: Mapping[str, str]


def learn_encoding(
    public: Table,
    *,
    target: str,
    task: str,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> LearnedEncoding:
    """Learns from the public table how rows become arrays.

    A column holds numbers if every filled cell is a number, and otherwise categories. A category
    gets a feature if it fills 1% of the rows (at least 2 cells; 10 are enough), up to
    `MAX_CATEGORIES`, commonest first. A column that is constant, empty or without any such category
    is left out.

    Args:
        public: the public rows.
        target: the column to predict; rows without it are ignored.
        task: one of `TASKS`.
        categorical: columns whose numbers are codes of categories.
        ignore: columns to leave out, such as identifiers.
    """
    if task not in TASKS:
        raise TableError(f"expected a task among {listed(TASKS)}, got {task!r}; choose one.")
    for name in (target, *categorical, *ignore):
        if name not in public.columns:
            raise TableError(
                f"expected column {name!r} in {public.source!r}, got columns "
                f"{listed(list(public.columns))}; check the name."
            )
    if target in ignore or target in categorical:
        raise TableError(
            f"expected the target {target!r} to be neither ignored nor declared categorical, got "
            "both; leave one out."
        )
    present = np.array([text != "" for text in _texts(public.columns[target])])
    if not present.any():
        raise TableError(
            f"expected a filled target {target!r} in {public.source!r}, got none in any row; "
            "check the column."
        )
    public = public.rows(present)
    learned_target = _learn_target(public, target, task)
    columns: list[Column] = []
    left_out = dict.fromkeys(ignore, "ignored on request")
    for name, cells in public.columns.items():
        if name == target or name in left_out:
            continue
        found = _learn_column(public, name, cells, force_categories=name in categorical)
        if isinstance(found, str):
            left_out[name] = found
        else:
            columns.append(found)
    if not columns:
        raise TableError(
            f"expected a column besides the target in {public.source!r} that varies, got none; "
            "check the file."
        )
    return LearnedEncoding(TableEncoding(tuple(columns), learned_target), left_out)


def _texts(cells: Cells) -> list[str]:
    texts, which = distinct_texts(cells)
    return [texts[index] for index in which.tolist()]


def _learn_target(public: Table, name: str, task: str) -> Target:
    cells = public.columns[name]
    if task == "classification":
        return _learn_classes(public, name)
    values, wrong = numbers(cells)
    if wrong.any():
        _refuse_decimal_commas(public, name, cells, wrong, otherwise="")
        example = next(itertools.compress(cells, wrong))
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
        return NumberTarget(name, is_count=True)
    if values.min() == values.max():
        raise TableError(
            f"expected a target {name!r} that varies in {public.source!r}, got "
            f"{number_text(values[0])} in every row; add public rows."
        )
    return NumberTarget(name, is_count=False)


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
    texts = list(itertools.compress(cells, wrong))
    if all(map(has_decimal_comma, texts)):
        raise TableError(
            f"expected numbers with a decimal point in column {name!r} of {public.source!r}, got "
            f"{texts[0]!r}; write 1.5 for 1,5 in all files{otherwise}."
        )


def _learn_column(
    public: Table, name: str, cells: Cells, *, force_categories: bool
) -> Column | str:
    """Returns the learned column, or the reason why it is left out."""
    if not force_categories:
        values, wrong = numbers(cells)
        present = values[~np.isnan(values)]
        if not wrong.any():
            if len(present) == 0:
                return "empty in the public table"
            low, high, scale = (float(v) for v in (present.min(), present.max(), present.std()))
            if not (scale > 0 and math.isfinite(scale)):
                return "constant in the public table"
            marks = len(present) < len(values)
            return NumberColumn(name, float(present.mean()), scale, low, high, marks)
        _refuse_decimal_commas(public, name, cells, wrong)
        texts = {text for text in distinct_texts(cells)[0] if text}
        if len(texts) > MAX_CATEGORIES and 2 * len(present) > len(present) + wrong.sum():
            example = next(itertools.compress(cells, wrong))
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
    kept = [text for text in ranked if counts[text] >= least][:MAX_CATEGORIES]
    if not kept:
        return "no category is common enough in the public table"
    return CategoryColumn(name, tuple(sorted(kept)), ranked[0], missing > 0)
