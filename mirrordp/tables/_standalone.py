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
    rows: Any,
    columns: Sequence[Column],
    targets: Sequence[str],
    classes: Sequence[str],
    task: str,
    scorer: Scorer,
) -> dict[str, np.ndarray]:
    """Returns columns: the expected values, or the class and every class's probability.

    Args:
        rows: a data frame of pandas or polars, or a dictionary of columns.
        columns: how columns become features.
        targets: the names of the targets.
        classes: the classes; none if the target is a number.
        task: the task, which decides what scores mean.
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
        means = np.exp(np.minimum(scores, 100.0)) if task == "count" else scores
        if len(targets) == 1:
            return {"prediction": means[:, 0]}
        return {f"prediction of {name}": means[:, k] for k, name in enumerate(targets)}
    shares = _ordered(scores) if task == "ordinal" else _softmax(scores)
    found = {"prediction": np.array(classes)[shares.argmax(axis=1)]}
    return found | {f"probability of {name}": shares[:, k] for k, name in enumerate(classes)}


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Returns the probability of each class; a single score is that of the second of two."""
    if scores.shape[1] == 1:
        scores = np.column_stack([np.zeros(len(scores)), scores[:, 0]])
    shares = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    return shares / shares.sum(axis=1, keepdims=True)


def _ordered(scores: np.ndarray) -> np.ndarray:
    """Returns the probability of each ordered class, from the log odds to be beyond thresholds."""
    beyond = np.minimum.accumulate(0.5 + 0.5 * np.tanh(0.5 * scores), axis=1)
    ends = np.ones((len(scores), 1)), np.zeros((len(scores), 1))
    return -np.diff(np.column_stack([ends[0], beyond, ends[1]]), axis=1)


def filter_csv(predict: Callable[[Any], dict[str, np.ndarray]]) -> None:
    """Reads a CSV table from standard input, and writes predictions to standard output."""
    lines = csv.reader(sys.stdin)
    names = [name.strip() for name in next(lines, [])]
    cells = zip(*lines, strict=True)
    found = predict(dict(zip(names, cells, strict=True)))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(found)
    writer.writerows(zip(*(column.tolist() for column in found.values()), strict=True))
