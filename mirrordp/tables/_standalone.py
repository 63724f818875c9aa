"""Predictions with NumPy alone, for exported models.

`mirrordp.tables.export` copies this module and those that it imports into one file and adds what
the model has learned.
"""

import csv
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mirrordp.tables.columns import Column, Tally
from mirrordp.tables.rows import columns_of
from mirrordp.tables.scorers import Scorer


def predicted(
    rows: Any, columns: Sequence[Column], classes: Sequence[str], is_count: bool, scorer: Scorer
) -> dict[str, np.ndarray]:
    """Returns columns: the expected value, or the class and every class's probability.

    Args:
        rows: a data frame of pandas or polars, or a dictionary of columns.
        columns: how columns become features.
        classes: the classes; none if the target is a number.
        is_count: whether the target is a count.
        scorer: the function from features to scores.
    """
    cells = columns_of(rows)
    missing = [column.name for column in columns if column.name not in cells]
    if missing:
        raise ValueError(f"expected columns {missing}, got {list(cells)}; add what is missing.")
    parts = []
    for column in columns:
        part = np.empty((len(cells[column.name]), len(column.features)))
        column.encode(cells[column.name], part, Tally())
        parts.append(part)
    scores = scorer(np.concatenate(parts, axis=1))
    if not classes:
        # No count could be observed whose logarithm is larger.
        return {"prediction": (np.exp(np.minimum(scores, 100.0)) if is_count else scores)[:, 0]}
    if len(classes) == 2:
        scores = np.column_stack([np.zeros(len(scores)), scores[:, 0]])
    shares = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    shares /= shares.sum(axis=1, keepdims=True)
    found = {"prediction": np.array(classes)[shares.argmax(axis=1)]}
    return found | {f"probability of {name}": shares[:, k] for k, name in enumerate(classes)}


def filter_csv(predict: Callable[[Any], dict[str, np.ndarray]]) -> None:
    """Reads a CSV table from standard input, and writes predictions to standard output."""
    lines = csv.reader(sys.stdin)
    names = [name.strip() for name in next(lines, [])]
    cells = zip(*lines, strict=True)
    found = predict(dict(zip(names, cells, strict=True)))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(found)
    writer.writerows(zip(*(column.tolist() for column in found.values()), strict=True))
