"""Rows of many kinds as columns of cells: data frames of pandas or polars, or mappings of columns.

Each cell becomes what it would be in a CSV file, by itself. No data frame library is needed here,
because this code is also part of exported predictors.
"""

import datetime
import decimal
import math
import numbers as abstract
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mirrordp.tables.files import ValueText, in_seconds, seconds_of


def columns_of(rows: Any) -> dict[str, Sequence[str] | np.ndarray]:
    """Returns columns of text, of float64 numbers with NaN for missing cells, or of times.

    Args:
        rows: a data frame of pandas or polars, or a mapping from names to columns of equal length.

    Raises:
        ValueError: if it is something else, or a cell is neither a number, nor text, nor true or
            false, nor a date, nor missing.
    """
    names = list(rows) if isinstance(rows, Mapping) else list(getattr(rows, "columns", ()))
    if not names or not hasattr(rows, "__getitem__"):
        raise ValueError(
            "expected a data frame or a dictionary of columns, got "
            f"{type(rows).__name__} without columns; pass columns with names."
        )
    found: dict[str, Sequence[str] | np.ndarray] = {}
    for name in names:
        if not isinstance(name, str) or name in found:
            raise ValueError(
                f"expected different column names that are text, got {name!r}; rename the column."
            )
        found[name] = _column_cells(name, rows[name])
    lengths = {len(cells) for cells in found.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"expected columns of equal length, got {min(lengths)} to {max(lengths)} cells; "
            "complete the short ones."
        )
    return found


def _column_cells(name: str, values: Any) -> Sequence[str] | np.ndarray:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise ValueError(
            f"expected a list or an array of cells in column {name!r}, got "
            f"{type(values).__name__}; for one row, write a list with one cell."
        )
    if isinstance(values, list | tuple):
        # NumPy would turn every cell into text if one of them is.
        array = np.fromiter(values, object, len(values))
    else:
        array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(
            f"expected one cell per row in column {name!r}, got an array of shape {array.shape}; "
            "give each column a name of its own."
        )
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return array.astype("M8[us]")
    if array.dtype.kind == "m":
        return in_seconds(array)
    cells = [_seconds(cell) for cell in array.tolist()]
    if all(_is_number(cell) or _is_missing(cell) for cell in cells):
        return np.array([_as_float(cell) for cell in cells], np.float64)
    return tuple(_cell_text(name, cell) for cell in cells)


def _seconds(cell: Any) -> Any:
    """Returns a duration or a time of day in seconds, as files and frames have it."""
    return seconds_of(cell) if isinstance(cell, datetime.time | datetime.timedelta) else cell


def _is_missing(cell: Any) -> bool:
    """Returns whether a cell is None, NaN, or one of the marks that pandas has for missing ones."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, float) and math.isnan(cell)


def _is_number(cell: Any) -> bool:
    return isinstance(cell, abstract.Real | decimal.Decimal) and not isinstance(
        cell, bool | np.bool_
    )


def _as_float(cell: Any) -> float:
    try:
        return math.nan if _is_missing(cell) else float(cell)
    except OverflowError:
        return math.inf


def _cell_text(name: str, cell: Any) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool | np.bool_):
        return "true" if cell else "false"
    if _is_missing(cell):
        return ""
    if _is_number(cell):
        value = _as_float(cell)
        short = format(value, ".15g")
        return ValueText(short if float(short) == value else repr(value))
    if isinstance(cell, datetime.date):
        return ValueText(cell.isoformat())
    raise ValueError(
        f"expected numbers, text, true or false, dates or missing cells in column {name!r}, got "
        f"{type(cell).__name__}; convert it or leave the column out."
    )
