"""Text of many cells at once, in Arrow arrays: plain pieces of CSV in, columns out.

Python's csv module and float() decide what a cell is and which number it holds. pyarrow, where it
is installed, does the same several times as fast for the pieces of a file and for the cells whose
form leaves no doubt; all the others are left to Python. Which way a cell took cannot be seen in
the result.
"""

import codecs
import functools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, overload

import numpy as np

LONGEST_CELL = 2**26
"""Longer cells of a CSV file are an error; a quote that is never closed makes one of the rest."""


class PackedText(Sequence[str]):
    """One column of text in an Arrow array without nulls, which can be read cell by cell too."""

    def __init__(self, array: Any):
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._array.to_pylist())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "PackedText": ...
    def __getitem__(self, index: int | slice) -> "str | PackedText":
        found = self._array[index]
        return PackedText(found) if isinstance(index, slice) else found.as_py()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def select(self, keep: np.ndarray) -> tuple[str, ...]:
        """Returns the cells for which the mask `keep` is true."""
        return tuple(self._array.filter(_arrow().array(keep)).to_pylist())

    def of_lines(self) -> list[str]:
        """Returns the cells that have line ends."""
        several = _compute().match_substring_regex(self._array, pattern="[\\r\\n]")
        return self._array.filter(several).to_pylist()

    def distinct(self) -> tuple[list[str], np.ndarray]:
        """Returns the distinct cells in the order of their first rows, and the index of each."""
        found = self._array.dictionary_encode()
        return found.dictionary.to_pylist(), found.indices.to_numpy().astype(np.intp)

    def plain_numbers(
        self, decimal: str, thousands: str, missing: Collection[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers, NaN for missing cells, and a mask of the cells left to Python.

        A cell that Arrow takes and finds finite is the same number for float(), because both round
        correctly and float() knows every notation of Arrow's. The reverse does not hold.

        Args:
            decimal: what stands before the fraction.
            thousands: what separates groups of three digits; may be empty.
            missing: the texts that count as missing.
        """
        arrow, compute = _arrow(), _compute()
        cells = self._array
        if (decimal, thousands) == (".", ""):
            try:
                return _finite(cells.cast(arrow.float64()))
            except arrow.ArrowInvalid:
                pass
        # Blanks around a number do not matter to float(), nor around a word for missing.
        cells = compute.ascii_trim(cells, characters=" \t")
        is_missing = compute.is_in(cells, arrow.array(sorted(missing), cells.type))
        nothing = arrow.scalar(None, cells.type)
        cells = compute.if_else(is_missing, nothing, cells)
        if (decimal, thousands) == (".", ""):
            try:
                return _finite(cells.cast(arrow.float64()))
            except arrow.ArrowInvalid:
                pass
        plain = compute.match_substring_regex(cells, _plain_number(decimal, thousands))
        cells = compute.if_else(plain, cells, nothing)
        if thousands:
            cells = compute.replace_substring(cells, thousands, "")
        if decimal != ".":
            cells = compute.replace_substring(cells, decimal, ".")
        values, _ = _finite(cells.cast(arrow.float64()))
        return values, ~compute.fill_null(plain, True).to_numpy(zero_copy_only=False)


def _finite(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values with NaN for null, and a mask of those that are infinite or not a number.

    Arrow reads nan(1) as NaN, which is text for Python.
    """
    values = column.to_numpy(zero_copy_only=False)
    odd = ~np.isfinite(values)
    if column.null_count:
        odd &= column.is_valid().to_numpy(zero_copy_only=False)
    return values, odd


@functools.cache
def _plain_number(decimal: str, thousands: str) -> str:
    """Returns the pattern of the cells that are surely finite numbers, whatever reads them."""
    whole = "[0-9]{1,99}"
    if thousands:
        whole = rf"(?:[0-9]{{1,3}}(?:{re.escape(thousands)}[0-9]{{3}}){{1,30}}|{whole})"
    point = re.escape(decimal)
    number = rf"(?:{whole}(?:{point}[0-9]{{0,99}})?|{point}[0-9]{{1,99}})"
    return rf"\A-?{number}(?:[eE][+-]?[0-9]{{1,2}})?\z"


def concatenated(parts: Sequence[PackedText]) -> PackedText:
    """Returns several columns below one another."""
    return PackedText(_arrow().concat_arrays([part._array for part in parts]))


def parse_plain(piece: bytes, delimiter: str, width: int) -> list[PackedText] | None:
    """Returns the columns of some lines of CSV, or None if they are left to Python's csv module.

    These are all lines in which it may find something else than Arrow does: quotes at odd places,
    carriage returns by themselves, rows of another length, cells that are too long, other bytes
    than UTF-8, and whatever Arrow refuses. The first line must begin a row.

    Args:
        piece: the lines, blank ones included.
        delimiter: what separates cells.
        width: the number of columns.
    """
    rest = piece
    has_quotes = b'"' in piece
    if has_quotes:
        # Every quote must open a cell, close one, or be doubled inside of one.
        rest = _quoted_cells(delimiter).sub(b"", piece)
    if b'"' in rest or b"\0" in piece:
        return None
    # Arrow would drop a byte order mark that is part of a cell.
    if piece.startswith(codecs.BOM_UTF8):
        return None
    if b"\r" in rest and rest.count(b"\r") != rest.count(b"\r\n"):
        return None
    has_spaces = rest.startswith(b" ") or b"\n " in rest or f"{delimiter} ".encode() in rest
    if has_quotes and has_spaces:
        return None
    arrow, compute, reader = _arrow(), _compute(), _csv()
    names = [str(index) for index in range(width)]
    # A row with line ends in its cells must not be cut.
    block = len(piece) + 1 if has_quotes else 2**20
    try:
        table = reader.read_csv(
            arrow.py_buffer(piece),
            reader.ReadOptions(column_names=names, block_size=block),
            reader.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if has_quotes else False,
                newlines_in_values=has_quotes,
            ),
            reader.ConvertOptions(
                column_types=dict.fromkeys(names, arrow.string()), null_values=[]
            ),
        )
    except arrow.ArrowException:
        return None
    columns = [column.combine_chunks() for column in table.columns]
    if has_spaces:
        columns = [compute.ascii_ltrim(column, characters=" ") for column in columns]
    if any(_longest(column) > LONGEST_CELL for column in columns):
        return None
    return [PackedText(column) for column in columns]


def _longest(column: Any) -> int:
    """Returns an upper bound of the number of characters in a cell."""
    if column.nbytes <= LONGEST_CELL:
        return column.nbytes
    return _compute().max(_compute().binary_length(column)).as_py() or 0


@functools.cache
def _quoted_cells(delimiter: str) -> re.Pattern[bytes]:
    return re.compile(rf'(?<![^{delimiter}\n])"(?:[^"]++|"")*+"(?![^{delimiter}\r\n])'.encode())


@functools.cache
def has_arrow() -> bool:
    """Returns whether pyarrow is installed."""
    try:
        _arrow()
    except ImportError:
        return False
    return True


def _arrow() -> Any:
    import pyarrow

    return pyarrow


def _compute() -> Any:
    import pyarrow.compute

    return pyarrow.compute


def _csv() -> Any:
    import pyarrow.csv

    return pyarrow.csv
