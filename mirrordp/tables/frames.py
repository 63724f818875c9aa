"""Data frames as tables: pandas, polars, pyarrow and whatever else narwhals knows come in.

A frame has one type per column, and one row can decide it: a gap makes integers floats, and a word
makes objects of all numbers. Cells are therefore read so that each means the same in either column,
as in files: a number is a number, true and false are words, and a time is a time.
"""

import datetime
import decimal
import fractions
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import narwhals
import numpy as np

from mirrordp.tables.files import (
    Cells,
    Table,
    TableError,
    ValueText,
    arrow_cells,
    mark,
    seconds_of,
    temporal_cells,
)

_NUMBER = (numbers.Number, decimal.Decimal, fractions.Fraction)
_NESTED = ("List", "Array", "Struct", "Binary")


class FrameTable(NamedTuple):
    """The rows of a frame as a `Table`, and its columns of a categorical type."""

    table: Table
    categorical: tuple[str, ...]


def is_frame(rows: Any) -> bool:
    """Returns whether the rows are a data frame."""
    return _frame(rows) is not None


def _frame(rows: Any) -> Any:
    if isinstance(rows, np.ndarray | list | tuple):
        return None
    try:
        found = narwhals.from_native(rows, eager_only=True, pass_through=True)
    except narwhals.exceptions.DuplicateError:
        raise TableError(
            "expected different column names in a data frame, got two that are the same; give each "
            "column a name of its own."
        ) from None
    except (TypeError, ValueError):
        return None
    if type(found).__name__ == "LazyFrame":
        raise TableError("expected a data frame in memory, got a lazy one; collect it.")
    return found if isinstance(found, narwhals.DataFrame) else None


def names_of(rows: Any) -> list[str]:
    """Returns the names of the columns of a frame."""
    return [str(name) for name in _frame(rows).columns]


def with_columns(rows: Any, names: Sequence[str]) -> Any:
    """Returns a frame of the same kind with these columns, in this order."""
    frame = _frame(rows)
    places = {str(name): name for name in frame.columns}
    return frame.select([places[name] for name in names]).to_native()


def needs_encoding(rows: Any) -> str | None:
    """Returns what a frame holds besides numbers and true or false, or None if that is all."""
    frame = _frame(rows)
    for series in () if frame is None else frame.iter_columns():
        kind = series.dtype
        if kind.is_numeric() or kind == narwhals.Boolean:
            # An infinite number is left to the estimators, which refuse it.
            if series.is_null().any() or (kind.is_float() and series.is_nan().any()):
                return "missing values"
        elif kind in (narwhals.Object, narwhals.Unknown):
            cells = series.to_list()
            if not all(isinstance(cell, _NUMBER) and cell == cell for cell in cells):
                return "missing values" if all(map(_is_number_or_gap, cells)) else "text"
        else:
            return "dates or durations" if kind.is_temporal() else "text"
    return None


def foreign_type(rows: Any) -> str | None:
    """Returns what columns hold besides numbers, or None if they hold nothing else.

    A column of objects may hold numbers alone.
    """
    for series in _frame(rows).iter_columns():
        kind = series.dtype
        numeric = kind.is_numeric() or kind == narwhals.Boolean
        if kind in (narwhals.Object, narwhals.Unknown):
            if any(isinstance(cell, str) for cell in series.to_list()):
                return "text"
        elif not numeric:
            return "dates or durations" if kind.is_temporal() else "text"
    return None


def _is_number_or_gap(cell: Any) -> bool:
    return isinstance(cell, _NUMBER) or _text(cell) == ""


def table_of(rows: Any, source: str, *, private: bool) -> FrameTable:
    """Returns a frame, or an array whose columns are called x0, x1, ..., as a table.

    Args:
        rows: the frame or array.
        source: its name, for messages.
        private: whether messages about it need the mark `UNPROTECTED`.

    Raises:
        TableError: if two names are the same as text.
    """
    if isinstance(rows, np.ndarray):
        return FrameTable(
            Table(source, {f"x{i}": _array_cells(column) for i, column in enumerate(rows.T)}), ()
        )
    series = list(_frame(rows).iter_columns())
    names = [str(column.name) for column in series]
    if len(set(names)) < len(names):
        raise TableError(
            f"{mark(private)}expected different column names in {source}, got two that are the "
            "same; rename one."
        )
    columns: dict[str, Cells] = {}
    unreadable: dict[str, str] = {}
    categorical = []
    for name, column in zip(names, series, strict=True):
        kind = column.dtype
        if type(kind).__name__ in _NESTED:
            unreadable[name] = type(kind).__name__.lower()
            continue
        columns[name] = _cells(column)
        if kind in (narwhals.Categorical, narwhals.Enum):
            categorical.append(name)
    return FrameTable(Table(source, columns, unreadable), tuple(categorical))


def _array_cells(column: np.ndarray) -> Cells:
    return tuple(map(_text, column.tolist())) if column.dtype == object else column.astype(float)


def _cells(series: Any) -> Cells:
    kind = series.dtype
    if kind == narwhals.Decimal:
        exact = (math.nan if value is None else float(value) for value in series.to_list())
        return np.fromiter(exact, np.float64, len(series))
    if kind.is_numeric():
        try:
            return np.asarray(series.cast(narwhals.Float64).to_numpy(), np.float64)
        except ValueError:
            # Arrow refuses to round an integer beyond 2⁵³, and quotes it.
            cells = series.to_list()
        return np.array([math.nan if _is_missing(cell) else float(cell) for cell in cells])
    if kind == narwhals.Datetime:
        if kind.time_zone is not None:
            series = series.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        return temporal_cells(series.to_numpy())
    if kind == narwhals.Time and not series.implementation.is_polars():
        # Arrow's times may lie beyond a day, or beyond what Python can say.
        cells = arrow_cells(series.to_arrow())
        assert cells is not None
        return cells
    if kind == narwhals.Duration or kind == narwhals.Date:
        values = series.to_numpy()
        if values.dtype.kind in "mM":
            return temporal_cells(values)
    return tuple(map(_text, series.to_list()))


def _is_missing(cell: Any) -> bool:
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


def _text(cell: Any) -> str:
    """Returns one cell as it would stand in a file; a cell of an unknown type is text."""
    if _is_missing(cell):
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool | np.bool_):
        return ValueText("true" if cell else "false")
    # What pandas has of its own becomes what a whole column of it would be.
    for conversion in ("to_datetime64", "to_timedelta64"):
        if hasattr(cell, conversion):
            cell = getattr(cell, conversion)()
    if isinstance(cell, np.datetime64 | np.timedelta64):
        cell = _plain_time(cell)
    if isinstance(cell, datetime.datetime):
        return ValueText(_in_utc(cell).isoformat())
    if isinstance(cell, datetime.date):
        return ValueText(cell.isoformat())
    if isinstance(cell, datetime.time | datetime.timedelta):
        cell = seconds_of(cell)
    if isinstance(cell, _NUMBER):
        return _number_text(cell)
    return f"<{type(cell).__name__}>"


def _plain_time(cell: Any) -> Any:
    """Returns a time of NumPy as a datetime, or a duration as seconds; NaN for NaT."""
    if np.isnat(cell):
        return math.nan
    try:
        return temporal_cells(np.array([cell])).tolist()[0]  # pyright: ignore[reportAttributeAccessIssue]
    except TypeError:  # A duration of months or years, which are no number of seconds.
        return ()


def _in_utc(moment: datetime.datetime) -> datetime.datetime:
    """Returns a time without its zone; beyond the first and last year it stays at their ends."""
    if moment.tzinfo is None:
        return moment
    try:
        return moment.astimezone(datetime.UTC).replace(tzinfo=None)
    except OverflowError:
        return datetime.datetime.min if moment.year == 1 else datetime.datetime.max


def _number_text(cell: Any) -> str:
    if isinstance(cell, complex | np.complexfloating):
        # One complex number makes complex numbers of the whole column.
        return _number_text(float(cell.real)) if cell.imag == 0 else "<complex>"
    try:
        value = float(cell)
    except OverflowError:
        value = math.inf
    except (TypeError, ValueError):
        return f"<{type(cell).__name__}>"
    if not math.isfinite(value):
        return ""
    # The name of a category or class is 1, not 1.0, as for columns that are all numbers.
    return ValueText(int(value) if value.is_integer() and abs(value) < 1e15 else repr(value))
