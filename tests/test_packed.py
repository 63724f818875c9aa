"""pyarrow reads files faster, and nothing else: Python's csv module and float() are the oracle."""

import csv
import math
import random

import numpy as np
import pytest

from mirrordp.tables import TableError, files, read_batches, read_table
from mirrordp.tables.columns import distinct_texts, number, numbers
from mirrordp.tables.files import PackedText

pytest.importorskip("pyarrow")

# Cells that are likely to be read in two ways. Most are numbers, so that whole files can be plain.
CELLS = (
    *("1", "-2.5", "3e4", ".5", "5.", "007", "7", "1e-7", "123456789.123456789", "-0", "0.1"),
    *("", " ", "  1", "1 ", "\t2", "?", "NA", " NA ", "nan", "NaN", "null", "-nan", "nan(1)"),
    *("inf", "-Infinity", "1e400", "-1e400", "1e-400", "1_000", "_1", "0x10", "1e", "e1", "+3"),
    *("--1", "1,5", "1.000,5", "1.234", "12.34,5", "1 000", "1'000", "\u0661\u0662", "\u22125"),
    *("\u20093", "\xa04", "4\u2003", "\x1c5", "a", "a b", "é", "\U0001f600", "\ufeff6", "text\x0b"),
    *("true", "1d", "1f", "1.5.2", ".", "-", "+", "1" * 400, "0." + "1" * 400, "2024-05-31"),
)
QUOTED = ('"1"', '""', '" 2"', '"a,b"', '"a;b"', '"a""b"', '"line\nend"', '"line\r\nend"', '"é"')
ODD = (
    '5"',
    'a"b, c"',
    '"6',
    '"7" ',
    '"8"9',
    ' "9"',
    '""""',
    '"',
    '""x',
    "\0",
    "\r",
    "\udcff",
    "x" * 200_000,
)
ENDS = ("\n", "\n", "\n", "\r\n", "\n\n", "\n \n", "\r")


def random_file(rng: random.Random) -> bytes:
    """Returns some rows, from plain ones to odd ones."""
    cells = [*CELLS[:11], *rng.sample(CELLS, 5)]
    cells += rng.sample(QUOTED, 3) * rng.choice((0, 0, 1, 3))
    cells += rng.sample(ODD, 1) * rng.choice((0, 0, 0, 1))
    end = rng.choice(ENDS)
    delimiter, width = rng.choice((",", ",", ";", "\t")), rng.choice((1, 2, 3, 5))
    names = [f"c{index}" for index in range(width)]
    names[0] = rng.choice((names[0], f'"{names[0]}"', f' "{names[0]}\nx"'))
    lines = [delimiter.join(names)]
    for _ in range(rng.randrange(9)):
        row = rng.choices(cells, k=width)
        if delimiter == ",":
            row = [cell if '"' in cell else cell.replace(",", "") for cell in row]
        lines.append(delimiter.join(row + ["1"] * (rng.random() < 0.02)))
    text = "".join(line + (end if rng.random() < 0.95 else rng.choice(ENDS)) for line in lines)
    text = rng.choice(("", "", "\ufeff")) + (text.rstrip("\r\n") if rng.random() < 0.3 else text)
    return text.encode("utf-8", "surrogateescape")


def plain_columns(path) -> dict[str, tuple[str, ...]] | str:
    """Returns the columns as the csv module reads them, or what is wrong with them."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            rows = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
            names = [name.strip() for name in next(rows)]
            found = [row for row in rows if row]
    except UnicodeDecodeError:
        return "other bytes"
    except csv.Error as error:
        return str(error)
    for index, row in enumerate(found, start=1):
        if len(row) != len(names):
            return f"{len(row)} in row {index}"
    return dict(zip(names, zip(*found, strict=True), strict=True)) if found else "got none"


def read_columns(path) -> dict[str, tuple[str, ...]] | str:
    try:
        batches = list(read_batches(path))
    except TableError as error:
        return str(error)
    return {
        name: tuple(cell for batch in batches for cell in batch.columns[name])
        for name in batches[0].columns
    }


def check_numbers(cells: PackedText) -> None:
    """Compares all at once with one by one, for all separators."""
    for decimal, thousands in ((".", ""), (",", ""), (",", "."), (".", ","), (".", "'")):
        values, wrong = numbers(cells, decimal, thousands)
        for cell, value, is_wrong in zip(cells, values.tolist(), wrong.tolist(), strict=True):
            (plain,), (is_text,) = numbers((cell,), decimal, thousands)
            assert (repr(value), is_wrong) == (repr(float(plain)), is_text), cell
            if (decimal, thousands) == (".", ""):
                expected = number(cell)
                assert is_wrong == (expected is None)
                assert repr(value) == repr(math.nan if expected is None else expected)
    texts, which = distinct_texts(cells)
    plain_texts, plain_which = distinct_texts(tuple(cells))
    assert texts == plain_texts
    np.testing.assert_array_equal(which, plain_which)


@pytest.mark.parametrize("seed", range(2))
def test_arrow_reads_what_python_reads(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(files, "_LEAST_PACKED", 0)
    taken = compared = 0
    path = tmp_path / "table.csv"
    for _ in range(400):
        path.write_bytes(random_file(rng))
        monkeypatch.setattr(files, "_PIECE_BYTES", rng.choice((1, 7, 40, 2**20)))
        expected, found = plain_columns(path), read_columns(path)
        compared += isinstance(expected, dict)
        if isinstance(expected, str):
            assert isinstance(found, str), path.read_bytes()
            # A file with two faults may be refused for either.
            assert expected in found or path.read_bytes().count(b'"') > 0, path.read_bytes()
            continue
        assert found == expected, path.read_bytes()
        for cells in read_table(path).columns.values():
            if isinstance(cells, PackedText):
                taken += 1
                check_numbers(cells)
    # The comparison would be idle if files were left to Python, or refused.
    assert taken > 200
    assert compared > 100
