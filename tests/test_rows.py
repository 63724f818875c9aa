"""Rows from data frames and dictionaries: each cell as it would be in a CSV file."""

import datetime
import decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest

import mirrordp
from mirrordp.tables import CategoryColumn, NumberColumn, NumberTarget, TableEncoding, TableError
from mirrordp.tables.columns import numbers
from mirrordp.tables.fitting import TableModel, as_table
from mirrordp.tables.rows import columns_of
from mirrordp.tables.scorers import LinearScorer

CELLS = {
    "x": [1.0, None, 3.5],
    "n": [1, 2, 3],
    "word": ["a", None, "b"],
    "yes": [True, False, None],
    "code": [1, "1.5", None],
}


def model():
    """The prediction is x / 2, and 10 more for code 1."""
    encoding = TableEncoding(
        (
            NumberColumn("x", 0.0, 1.0, -9.0, 9.0, False),
            CategoryColumn("code", ("1", "2"), "2", False),
        ),
        NumberTarget("y", is_count=False),
    )
    scorer = LinearScorer(np.array([[0.5, 10.0, 0.0]]), np.zeros(1))
    return TableModel(task="regression", encoding=encoding, scorer=scorer, privacy={})


def expected():
    return {
        "x": [1.0, np.nan, 3.5],
        "n": [1.0, 2.0, 3.0],
        "word": ("a", "", "b"),
        "yes": ("true", "false", ""),
        "code": ("1", "1.5", ""),
    }


@pytest.mark.parametrize("kind", ["dictionary", "pandas", "polars", "nullable"])
def test_cells_of_every_kind(kind):
    cells = {k: v for k, v in CELLS.items() if kind != "polars" or k != "code"}
    rows = {
        "dictionary": lambda: cells,
        "pandas": lambda: pd.DataFrame(cells),
        "polars": lambda: pl.DataFrame(cells),
        "nullable": lambda: pd.DataFrame(cells).convert_dtypes(),
    }[kind]()
    found = columns_of(rows)
    assert list(found) == list(cells)
    for name in cells:
        np.testing.assert_array_equal(found[name], expected()[name])


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        (pd.Series(["a", None, "b"], dtype="category"), ("a", "", "b")),
        (pl.Series(["a", None, "b"], dtype=pl.Categorical), ("a", "", "b")),
        (pd.Series(pd.to_datetime(["2020-01-02"])), np.array(["2020-01-02"], "M8[us]")),
        (pl.Series([datetime.date(2020, 1, 2)]), np.array(["2020-01-02"], "M8[us]")),
        ([datetime.date(2020, 1, 2), None], ("2020-01-02", "")),
        ([decimal.Decimal("0.1"), pd.NA], (0.1, np.nan)),
        ([10**400, np.float32(0.5)], (np.inf, 0.5)),
        (["a", 0.1 + 0.2, 2.0, float("nan")], ("a", "0.30000000000000004", "2", "")),
        (np.array(["a", "b"]), ("a", "b")),
        ([], ()),
    ],
)  # fmt: skip
def test_single_columns(column, cells):
    found = columns_of({"column": column})["column"]
    np.testing.assert_array_equal(found, cells)


@pytest.mark.parametrize("kind", [list, pd.Series, pl.Series])
@pytest.mark.parametrize(
    "cells",
    [
        [datetime.time(1, 2, 3, 500_000), None],
        [datetime.timedelta(hours=1, milliseconds=-500), None],
    ],
)
def test_durations_and_times_are_seconds_for_either_reader(kind, cells):
    """Frames go through `as_table`, and in an exported file through `columns_of`."""
    expected = {datetime.time: 3723.5, datetime.timedelta: 3599.5}[type(cells[0])]
    rows = {"column": kind(cells)}
    frames = {pd.Series: pd.DataFrame, pl.Series: pl.DataFrame}
    tables = [rows, frames[kind](rows)] if kind in frames else [rows]
    for found in (columns_of(tables[0]), *(as_table(table).columns for table in tables)):
        values, wrong = numbers(found["column"])
        np.testing.assert_array_equal(values, [expected, np.nan])
        assert not wrong.any()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({}, "without columns"),
        (None, "without columns"),
        ([[1, 2]], "without columns"),
        ({"x": 1.0}, "for one row, write a list"),
        ({"x": "abc"}, "for one row, write a list"),
        ({1: [1.0]}, "column names that are text"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "a name of its own"),
        ({"x": [1.0], "y": [1.0, 2.0]}, "equal length"),
        ({"x": np.zeros((2, 2))}, "one cell per row"),
        ({"x": [1.0, [2.0]]}, "got list"),
        ({"x": [1j, "a"]}, "got complex"),
    ],
)
def test_other_rows_are_refused(rows, words):
    with pytest.raises(TableError, match=words):
        as_table(rows)


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pl.DataFrame])
def test_a_loaded_model_predicts_for_frames(tmp_path, kind):
    (tmp_path / "model.json").write_text(model().to_json())
    rows = {"x": [2.0, 4.0, None], "code": [1, 2, 3], "other": ["p", "q", "r"]}
    found = mirrordp.load_model(tmp_path).predict(kind(rows))
    assert list(found) == ["prediction"]
    assert found["prediction"].tolist() == [11.0, 2.0, 0.0]


def test_no_rows_and_missing_columns():
    assert len(model().predict({"x": [], "code": []})["prediction"]) == 0
    with pytest.raises(TableError, match="expected column 'code' in 'the rows'"):
        model().predict({"x": [1.0]})
    with pytest.raises(TypeError, match="only a linear model"):
        _ = TableModel(
            task="regression", encoding=model().encoding, scorer=_Constant(), privacy={}
        ).coefficients


class _Constant:
    """A kind of model that is not linear."""

    kind = "constant"
    shape = (1, 3)
