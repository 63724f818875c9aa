"""Tables in files: reads CSV or Parquet into columns of cells, and writes them."""

import codecs
import collections
import csv
import dataclasses
import datetime
import difflib
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from mirrordp.data import UNPROTECTED
from mirrordp.tables import packed
from mirrordp.tables.packed import PackedText

_BATCH_ROWS = 65_536
# A cell of text takes about 70 bytes, so that a batch takes some 70 MB however wide the table is.
_BATCH_CELLS = 1_000_000
_PIECE_BYTES = 8 * 2**20
# It takes longer to import pyarrow than to read a small file without it.
_LEAST_PACKED = 2**16
_PARQUET_MAGIC = b"PAR1"

Cells: TypeAlias = Sequence[str] | np.ndarray
"""One column: the text of the file; or float64 numbers, with NaN for missing cells; or dates and
times as datetime64[us] (in UTC if they had a zone), with NaT for missing cells."""


class ValueText(str):
    """The text of a cell that was a number, a time or a truth value before, as Python writes it.

    It is read as such whatever separators and formats other texts of the column have.
    """


class TableError(ValueError):
    """The error for a table that cannot be used. Its message is one sentence for the operator."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Some rows of a file or frame, as columns of equal length in their order.

    Attributes:
        source: the name of the file or frame, for messages.
        columns: the cells of each column.
        unreadable: the columns that cannot be used, such as lists, and what they hold.
        is_text: whether all cells are text because the file has nothing else, as CSV files.
    """

    source: str
    columns: Mapping[str, Cells]
    unreadable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_text: bool = False

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def rows(self, keep: np.ndarray) -> "Table":
        """Returns the rows for which the mask `keep` is true."""
        columns = {}
        for name, cells in self.columns.items():
            if isinstance(cells, np.ndarray):
                columns[name] = cells[keep]
            elif isinstance(cells, PackedText):
                columns[name] = cells.select(keep)
            else:
                columns[name] = tuple(itertools.compress(cells, keep))
        return dataclasses.replace(self, columns=columns)


def read_table(path: str | Path) -> Table:
    """Reads a whole table, for files that fit in memory as text."""
    batches = list(read_batches(path))
    columns: dict[str, Cells] = {}
    for name in batches[0].columns:
        parts = [batch.columns[name] for batch in batches]
        columns[name] = _joined(parts)
    return Table(batches[0].source, columns, batches[0].unreadable)


def _joined(parts: Sequence[Cells]) -> Cells:
    """Returns cells of several batches below one another."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    texts = [part for part in parts if isinstance(part, PackedText)]
    if len(texts) == len(parts):
        return packed.concatenated(texts)
    return tuple(itertools.chain.from_iterable(parts))


def read_batches(
    path: str | Path,
    *,
    private: bool = False,
    batch_rows: int = _BATCH_ROWS,
    names: str | None = None,
) -> Iterator[Table]:
    """Reads a table in one or more pieces of at most `batch_rows` rows, fewer if they are wide.

    A Parquet file is recognised by its first bytes. Any other file is read as UTF-8 text with a
    header line; the separator is the most frequent of comma, semicolon and tab in the header.

    Args:
        path: the file.
        private: whether messages about its rows need the mark `UNPROTECTED`.
        batch_rows: the largest number of rows in a piece.
        names: a column of names, whose cells are text as it is written, or the numbers of a Parquet
            file as Python has them. As float64, two long whole numbers would be one name.

    Raises:
        TableError: if the file cannot be read as a table with at least one row.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        batches = (
            _parquet_batches(path, batch_rows, private, names)
            if is_parquet
            else _csv_batches(path, batch_rows, private)
        )
        empty = True
        for batch in batches:
            empty = False
            yield batch
    except OSError as error:
        raise TableError(
            f"expected a file that can be read, got {str(path)!r} ({error.strerror or error}); "
            "check the path."
        ) from None
    if empty:
        raise TableError(f"expected at least one row in {str(path)!r}, got none; check the file.")


def _csv_batches(path: Path, batch_rows: int, private: bool) -> Iterator[Table]:
    try:
        with open(path, "rb") as file:
            lines = _Lines(file)
            delimiter = max(",;\t", key=lines.first().count)
            names = [name.strip() for name in next(_reader(lines, delimiter), [])]
            _check_names(path, names, private)
            seen = 0
            for columns in _csv_columns(lines, delimiter, len(names), batch_rows):
                if isinstance(columns, _OddRow):
                    raise TableError(
                        f"{mark(private)}expected {len(names)} cells in every row of "
                        f"{str(path)!r} as in its header, got {columns.width} in row "
                        f"{seen + columns.number}; repair the file."
                    )
                seen += len(columns[0])
                if any(_holds_rows(column, delimiter, len(names)) for column in columns):
                    raise TableError(
                        f"{mark(private)}expected one row of {str(path)!r} in each of its lines, "
                        "got a cell with lines that look like rows of their own; look for a quote "
                        "without a second one, or leave out columns of text in several lines."
                    )
                yield Table(str(path), dict(zip(names, columns, strict=True)), is_text=True)
    except UnicodeDecodeError:
        raise TableError(
            f"{mark(private)}expected Parquet or UTF-8 text, got other bytes in {str(path)!r}; "
            "save the file as CSV in UTF-8."
        ) from None
    except csv.Error as error:
        raise TableError(
            f"{mark(private)}expected a CSV table, got {str(path)!r} ({error}); repair it."
        ) from None


def _holds_rows(cells: Cells, delimiter: str, width: int) -> bool:
    """Returns whether a cell has further lines with as many delimiters as a row.

    A stray quote in one row takes all rows up to the next quote into its cell.
    """
    if width == 1 or isinstance(cells, np.ndarray):
        return False
    of_lines = cells.of_lines() if isinstance(cells, PackedText) else cells
    return any(
        line.count(delimiter) == width - 1
        for cell in of_lines
        if "\n" in cell or "\r" in cell
        for line in cell.splitlines()[1:]
    )


class _OddRow(NamedTuple):
    """A row with another number of cells than the header, counted from 1 within its batch."""

    number: int
    width: int


def _csv_columns(
    lines: "_Lines", delimiter: str, width: int, batch_rows: int
) -> Iterator[Sequence[Cells] | _OddRow]:
    """Yields the columns of batches of at least one row, or what is wrong with one.

    Whether Arrow or Python reads a batch makes no difference to its cells; see `packed`.
    """
    while (piece := lines.take()) is not None:
        columns = None
        if len(piece) >= _LEAST_PACKED and packed.has_arrow():
            columns = packed.parse_plain(piece, delimiter, width)
        if columns is not None:
            for start in range(0, len(columns[0]), batch_rows):
                yield [column[start : start + batch_rows] for column in columns]
            continue
        lines.hold(piece)
        most = min(batch_rows, max(1, _BATCH_CELLS // width))
        rows = [row for row in itertools.islice(_reader(lines, delimiter), most) if row]
        for number, row in enumerate(rows, start=1):
            if len(row) != width:
                yield _OddRow(number, len(row))
        if rows:
            yield list(zip(*rows, strict=True))


def _reader(lines: "_Lines", delimiter: str) -> Iterator[list[str]]:
    """Yields rows, and takes no line before it is needed."""
    # One long cell of a private row must not end the run. Python has one limit for all readers.
    csv.field_size_limit(max(csv.field_size_limit(), packed.LONGEST_CELL))
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)


class _Lines:
    """The lines of a text file, which can also be taken as pieces of many lines."""

    def __init__(self, file: IO[bytes]):
        self._pieces = _pieces(file)
        self._text = io.StringIO()

    def __iter__(self) -> Iterator[str]:
        while True:
            # Not from the text itself, which this generator would close at its end.
            yield from iter(self._text.readline, "")
            if (piece := next(self._pieces, None)) is None:
                return
            self.hold(piece)

    def take(self) -> bytes | None:
        """Returns lines that were not read yet, None at the end of the file."""
        return self._text.read().encode() or next(self._pieces, None)

    def hold(self, piece: bytes) -> None:
        """Takes lines back, to be read next."""
        # The csv module wants the line ends as they are.
        self._text = io.StringIO(piece.decode(), newline="")

    def first(self) -> str:
        """Returns the line that is read next, without reading it."""
        self.hold(self.take() or b"")
        line = self._text.readline()
        self._text.seek(0)
        return line


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yields a file without its byte order mark, in pieces that end where a line does."""
    begin = file.read(len(codecs.BOM_UTF8))
    rest = [b"" if begin == codecs.BOM_UTF8 else begin]
    while block := file.read(_PIECE_BYTES):
        # A carriage return at the end of the block may be half a line end.
        end = block.rfind(b"\n") + 1 or block.rfind(b"\r", 0, -1) + 1
        if end:
            yield b"".join([*rest, block[:end]])
            rest = []
        rest.append(block[end:])
    if last := b"".join(rest):
        yield last


def _check_names(path: Path, names: Sequence[str], private: bool) -> None:
    """Refuses empty and repeated names, which are cells of a row if the header is missing."""
    if not names:
        raise TableError(
            f"expected a header line with column names in {str(path)!r}, got an empty file; add "
            "the names."
        )
    counts = collections.Counter(names)
    if "" in counts:
        raise TableError(
            f"expected a name for every column of {str(path)!r}, got an empty one at position "
            f"{names.index('') + 1}; add a header line."
        )
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise TableError(
            f"{mark(private)}expected different column names in {str(path)!r}, got {twice[0]!r} "
            f"{counts[twice[0]]} times; rename one, or add a header line."
        )


def _parquet_batches(
    path: Path, batch_rows: int, private: bool, names: str | None
) -> Iterator[Table]:
    arrow, parquet = _pyarrow()
    try:
        # Buffers that are filled ahead stay until the end, so the whole file would be in memory.
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            _check_names(path, file.schema_arrow.names, private)
            for batch in file.iter_batches(batch_size=batch_rows):
                if len(batch):
                    columns, unreadable = {}, {}
                    for name, column in zip(batch.schema.names, batch.columns, strict=True):
                        cells = _names(column) if name == names else arrow_cells(column)
                        if cells is None:
                            unreadable[name] = _kind(column.type)
                        else:
                            columns[name] = cells
                    yield Table(str(path), columns, unreadable)
    except arrow.ArrowException as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise TableError(
            f"{mark(private)}expected a Parquet table, got {str(path)!r} ({reason}); write "
            "it again."
        ) from None


def _names(column: Any) -> tuple[Any, ...] | None:
    """Returns text and numbers as Python has them, None if the type is none of these."""
    types, kind = _pyarrow()[0].types, column.type
    if types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if types.is_floating(kind):
        cells = column.to_pylist()
        # Beyond, whole numbers were rounded when the file was written: two names may be one.
        largest = 2.0 ** {16: 11, 32: 24}.get(kind.bit_width, 53)
        rounded = any(cell is not None and abs(cell) >= largest for cell in cells)
        return None if rounded else tuple(cells)
    if types.is_integer(kind) or types.is_decimal(kind):
        return tuple(column.to_pylist())
    if types.is_string(kind) or types.is_large_string(kind) or _is_string_view(kind):
        return tuple(_texts(column))
    return None


def arrow_cells(column: Any) -> Cells | None:
    """Returns the cells of a column, or None if its type has no meaning here."""
    arrow, _ = _pyarrow()
    types, kind = arrow.types, column.type
    if types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if types.is_null(kind):
        return ("",) * len(column)
    if types.is_boolean(kind):
        words = {True: ValueText("true"), False: ValueText("false"), None: ""}
        return tuple(words[value] for value in column.to_pylist())
    if types.is_decimal(kind):
        # Arrow's cast rounds to the digits of the column, which follow from its longest number.
        exact = (math.nan if value is None else float(value) for value in column.to_pylist())
        return np.fromiter(exact, np.float64, len(column))
    if types.is_integer(kind) or types.is_floating(kind):
        return column.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    if types.is_string(kind) or types.is_large_string(kind) or _is_string_view(kind):
        return tuple("" if value is None else value for value in _texts(column))
    if types.is_time(kind):
        # As whole numbers: neither nanoseconds nor times beyond a day are times in Python.
        whole = column.cast(arrow.int32() if types.is_time32(kind) else arrow.int64())
        units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        counts = whole.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
        seconds, rest = np.divmod(counts, units)
        return seconds + rest / units
    if types.is_temporal(kind):
        # Arrow counts a time with a zone in UTC.
        return temporal_cells(column.to_numpy(zero_copy_only=False))
    return None


def _texts(column: Any) -> list[str | None]:
    arrow, _ = _pyarrow()
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        # A cell of one row must not end a fit.
        kind = arrow.binary()
        if arrow.types.is_large_string(column.type):
            kind = arrow.large_binary()
        elif _is_string_view(column.type):
            kind = arrow.binary_view()
        cells = column.cast(kind).to_pylist()
        return [None if cell is None else cell.decode(errors="replace") for cell in cells]


def _is_string_view(kind: Any) -> bool:
    """Returns whether a type is text that other programs store as views, such as polars."""
    arrow, _ = _pyarrow()
    # Arrow 15 does not know it, nor can it read such a column.
    return hasattr(arrow, "string_view") and kind == arrow.string_view()


def temporal_cells(values: np.ndarray) -> Cells:
    """Returns dates as datetime64[us], and durations and times of day as seconds."""
    if values.dtype.kind == "m":
        return in_seconds(values)
    if values.dtype.kind == "M":
        if np.datetime_data(values.dtype)[0] != "ns":
            # Other units reach years that microseconds cannot count.
            low = np.datetime64("0001-01-01")
            high = np.datetime64("9999-12-31T23:59:59.999999")
            values = np.minimum(
                np.maximum(values, low.astype(values.dtype)), high.astype(values.dtype)
            )
        return values.astype("M8[us]")
    seconds = (math.nan if value is None else seconds_of(value) for value in values)
    return np.fromiter(seconds, np.float64, len(values))


def in_seconds(durations: np.ndarray) -> np.ndarray:
    """Returns durations as seconds, which do not depend on the unit that they are counted in.

    One cell may decide the unit of a whole column, and a quotient of large integers is rounded.
    """
    unit = np.datetime_data(durations.dtype)[0]
    if unit in ("ps", "fs", "as"):
        durations = durations.astype("m8[ns]")
    if unit not in ("ms", "us", "ns", "ps", "fs", "as"):
        return durations / np.timedelta64(1, "s")
    whole = durations.astype("m8[s]")
    second = np.timedelta64(1, "s")
    return whole / second + (durations - whole) / second


def seconds_of(time: datetime.time | datetime.timedelta) -> float:
    """Returns the seconds since midnight, or of a duration, as `in_seconds` does."""
    if isinstance(time, datetime.timedelta):
        return 86400 * time.days + time.seconds + time.microseconds / 1e6
    whole = 3600 * time.hour + 60 * time.minute + time.second
    return whole + time.microsecond / 1e6


def _kind(kind: Any) -> str:
    """Returns a type in words, without the names of its fields, which one row may have."""
    return re.split(r"[<\[(]", str(kind), maxsplit=1)[0]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TableError(
            "expected the package pyarrow for Parquet files, but it is not installed; run pip "
            "install 'mirrordp[parquet]', or use CSV."
        ) from None
    return pyarrow, pyarrow.parquet


def write_table(path: str | Path, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
    """Writes Parquet if the name ends in .parquet, else CSV; numbers keep all their digits."""
    path = Path(path)
    if path.suffix.lower() == ".parquet":
        arrow, parquet = _pyarrow()
        parquet.write_table(arrow.table({k: list(v) for k, v in columns.items()}), path)
        return
    plain = [v.tolist() if isinstance(v, np.ndarray) else v for v in columns.values()]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*plain, strict=True))


def mark(private: bool) -> str:
    """Returns the beginning of a message about private or other rows."""
    return f"{UNPROTECTED} " if private else ""


def listed(names: Sequence[str], most: int = 8) -> str:
    """Returns the first few names, for a message."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a question in parentheses if a name that is not there is close to one that is.

    >>> nearest("Incme", ["age", "income"])
    " (did you mean 'income'?)"
    """
    known = {each.lower(): each for each in names}
    found = difflib.get_close_matches(name.lower(), known, 1)
    return f" (did you mean {known[found[0]]!r}?)" if found else ""
