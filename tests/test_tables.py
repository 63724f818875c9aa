import datetime
import json
import math
import warnings

import numpy as np
import pytest

from mirrordp.data import UNPROTECTED, UnprotectedWarning
from mirrordp.linear import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateOrdinalRegression,
    PrivatePoissonRegressor,
)
from mirrordp.tables import (
    CategoryColumn,
    ClassTarget,
    DateColumn,
    NumberColumn,
    NumberTarget,
    Table,
    TableEncoding,
    TableError,
    learn_encoding,
    read_batches,
    read_table,
    write_table,
)
from mirrordp.tables.columns import Tally, positions
from mirrordp.tables.encoding import by_column
from mirrordp.tables.fitting import TableModel, fit_files
from mirrordp.tables.scorers import LinearScorer

PUBLIC = """age,job,income,y
20,nurse,1.5,10
30,cook,,20
40,nurse,2.5,30
50,cook,?,40
60,nurse,3.5,
"""


def write(tmp_path, text, name="table.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


def table(tmp_path, text):
    return read_table(write(tmp_path, text))


def learn(tmp_path, text=PUBLIC, target="y", task="regression", **options):
    return learn_encoding(table(tmp_path, text), target=target, task=task, **options)


def encode(encoding, tmp_path, text, private=True):
    return encoding.encode(read_batches(write(tmp_path, text, "b.csv")), private=private)


# Reading.


def test_reads_columns_as_text(tmp_path):
    found = table(tmp_path, PUBLIC)
    assert list(found.columns) == ["age", "job", "income", "y"]
    assert len(found) == 5
    assert found.columns["income"] == ("1.5", "", "2.5", "?", "3.5")


@pytest.mark.parametrize(
    "text",
    [
        "a;b\n1;x,y\n",
        "a\tb\n1\tx,y\n",
        '\ufeffa, b\r\n1, "x,y"\r\n\r\n',
        'a,b\n1,"x,y"',
    ],
    ids=["semicolons", "tabs", "byte order mark, spaces, CRLF", "no final line end"],
)
def test_reads_dialects(tmp_path, text):
    found = table(tmp_path, text)
    assert dict(found.columns) == {"a": ("1",), "b": ("x,y",)}


def test_batches_are_the_whole(tmp_path):
    path = write(tmp_path, "a\n" + "".join(f"{i}\n" for i in range(10)))
    sizes = [len(batch) for batch in read_batches(path, batch_rows=4)]
    assert sizes == [4, 4, 2]
    assert read_table(path).columns["a"] == tuple(str(i) for i in range(10))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got an empty file"),
        ("a,b\n", "expected at least one row"),
        ("a,b\n1\n", "got 1 in row 1"),
        ("a,b\n1,2\n1,2,3\n", "got 3 in row 2"),
        ("a,a\n1,2\n", "'a' 2 times"),
        ("a,\n1,2\n", "position 2"),
        ('a,b\n1,"2\n', "expected a CSV table"),
        ("PAR1 but not really", "expected a Parquet table"),
    ],
    ids=["empty", "no rows", "short", "long", "twice", "unnamed", "open quote", "Parquet"],
)
def test_bad_files(tmp_path, text, words):
    with pytest.raises(TableError, match=words) as caught:
        table(tmp_path, text)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_other_bytes_are_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"a,b\n\xff\xfe\x00,2\n")
    with pytest.raises(TableError, match="UTF-8"):
        read_table(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(TableError, match="No such file"):
        read_table(tmp_path / "nothing.csv")
    with pytest.raises(TableError, match="directory"):
        read_table(tmp_path)


@pytest.mark.parametrize("text", ["a,b\n1\n", "7,7\n8,9\n", 'a,b\n1,"2\n', "a\n\udcff\n"])
def test_only_messages_about_private_rows_are_marked(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(TableError) as caught:
        list(read_batches(path, private=True))
    assert str(caught.value).startswith(UNPROTECTED)
    with pytest.raises(TableError) as caught:
        list(read_batches(path))
    assert UNPROTECTED not in str(caught.value)


# Learning and encoding.


def test_types_and_scales_come_from_the_public_table(tmp_path):
    found = learn(tmp_path).encoding
    # The last row has no target and is not looked at.
    assert found.columns == (
        NumberColumn("age", 35.0, math.sqrt(125.0), 20.0, 50.0, marks_missing=False),
        CategoryColumn("job", ("cook", "nurse"), "cook", marks_missing=False),
        NumberColumn("income", 2.0, 0.5, 1.5, 2.5, marks_missing=True),
    )
    assert found.target == NumberTarget("y", is_count=False)
    assert found.features == ("age", "job=cook", "job=nurse", "income", "income is missing")


@pytest.mark.filterwarnings("ignore:.*1 of 1 filled cells of column:UserWarning")
def test_rows_are_encoded_one_by_one(tmp_path):
    found = learn(tmp_path).encoding
    rows = [
        "35,nurse,2.0,1",  # all known
        "1000,judge,-7,2",  # beyond the public range; a category unknown to the public table
        ",,,3",  # missing: the mean, the most common category, the mark
        "inf,cook,3e400,4",  # no finite number: missing
    ]
    half = math.sqrt(125.0)
    expected = [
        [0, 0, 1, 0, 0],
        [15 / half, 0, 0, -1, 0],
        [0, 1, 0, 0, 1],
        [0, 1, 0, 0, 1],
    ]
    together = encode(found, tmp_path, "age,job,income,y\n" + "\n".join(rows))
    np.testing.assert_allclose(together.features, expected)
    np.testing.assert_array_equal(together.target, [1, 2, 3, 4])
    assert not together.unusable.any()
    # What one row becomes does not depend on the others, nor on the batch it is read in.
    for index, row in enumerate(rows):
        alone = encode(found, tmp_path, f"age,job,income,y\n{row}\n")
        np.testing.assert_array_equal(alone.features[0], together.features[index])
    path = write(tmp_path, "age,job,income,y\n" + "\n".join(rows))
    split = found.encode(read_batches(path, batch_rows=1), private=True)
    np.testing.assert_array_equal(split.features, together.features)


def test_other_order_and_further_columns_do_not_matter(tmp_path):
    found = learn(tmp_path).encoding
    one = encode(found, tmp_path, "age,job,income,y\n35,nurse,2,1\n")
    other = encode(found, tmp_path, "y,secret,income,job,age\n1,zzz,2,nurse,35\n")
    np.testing.assert_array_equal(one.features, other.features)


def test_missing_category_of_a_column_with_missing_public_cells(tmp_path):
    text = "c,y\n" + "a,1\nb,2\n,3\na,4\n" * 3
    found = learn(tmp_path, text).encoding
    assert found.columns == (CategoryColumn("c", ("a", "b"), "a", marks_missing=True),)
    features = encode(found, tmp_path, "c,y\na,1\n,1\nq,1\n").features
    np.testing.assert_array_equal(features, [[1, 0, 0], [0, 0, 1], [0, 0, 0]])


def test_rare_categories_count_as_unknown(tmp_path):
    text = "c,y\n" + "a,1\nb,2\n" * 200 + "rare,3\n" * 3
    (column,) = learn(tmp_path, text).encoding.columns
    assert isinstance(column, CategoryColumn)
    assert column.categories == ("a", "b")
    text = "c,y\n" + "a,1\nb,2\n" * 20 + "rare,3\n" * 3
    (column,) = learn(tmp_path, text).encoding.columns
    assert isinstance(column, CategoryColumn)
    assert column.categories == ("a", "b", "rare")


def test_columns_that_say_nothing_are_left_out(tmp_path):
    rows = "".join(f"{i},person {i},7,same,,{i % 3},{i}\n" for i in range(30))
    found = learn(tmp_path, "x,name,seven,word,void,code,y\n" + rows, ignore=["code"])
    assert [column.name for column in found.encoding.columns] == ["x"]
    assert set(found.left_out) == {"name", "seven", "word", "void", "code"}
    assert found.left_out["code"] == "ignored on request"
    assert "common enough" in found.left_out["name"]


def test_numbers_without_a_deviation_are_not_called_constant(tmp_path):
    public = "x,large,small,y\n" + "".join(f"{i},{i}e200,{i}e-200,{i}\n" for i in range(30))
    found = learn(tmp_path, public)
    assert [column.name for column in found.encoding.columns] == ["x"]
    reason = "it holds numbers from 0 to 2.9e+201, whose squares are beyond float64"
    assert found.left_out["large"] == reason
    assert "squares are beyond float64" in found.left_out["small"]


def clock_table(values):
    cells = tuple(map(str, values))
    return Table("t", {"departs": cells, "y": tuple(str(i % 7) for i in range(len(cells)))})


def test_hours_and_minutes_are_minutes():
    times = [100 * hour + minute for hour in range(5, 24) for minute in range(0, 60, 5)]
    encoding = learn_encoding(clock_table(times), target="y", task="regression").encoding
    assert encoding.features == ("departs (minutes)",)
    rows = encoding.encode([clock_table([759, 800, 801, 2355, 2400])], private=False).features[:, 0]
    assert json.loads(json.dumps(encoding.to_dict()))
    steps = np.diff(rows) * encoding.columns[0].scale
    # Later than any public time counts as the last one.
    np.testing.assert_allclose(steps, [1, 1, 15 * 60 + 54, 0], atol=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        range(200, 1400),
        range(60),
        [100 * k for k in range(1, 25)],
        [1000 + k / 2 for k in range(100)],
        [100 * k + j for k in range(40) for j in range(60)],
    ],
)
def test_other_numbers_stay_as_they_are(values):
    encoding = learn_encoding(clock_table(values), target="y", task="regression").encoding
    assert encoding.features == ("departs",)
    assert json.loads(json.dumps(encoding.to_dict()))


def test_codes_can_be_declared_categories(tmp_path):
    text = "code,y\n" + "1,1\n2,2\n10,3\n" * 4
    (column,) = learn(tmp_path, text, categorical=["code"]).encoding.columns
    assert isinstance(column, CategoryColumn)
    assert column.categories == ("1", "10", "2")


def test_mixed_columns_are_categories_if_few_and_refused_if_many(tmp_path):
    few = "c,y\n" + "0,1\n1,2\n2,3\n3+,4\n" * 5
    (column,) = learn(tmp_path, few).encoding.columns
    assert isinstance(column, CategoryColumn)
    many = "c,y\n" + "".join(f"{i},{i}\n" for i in range(200)) + "broken,1\n"
    with pytest.raises(TableError, match="text such as 'broken'"):
        learn(tmp_path, many)


# Targets.


def test_classes_come_from_the_public_table(tmp_path):
    text = "x,y\n1,b\n2,a\n3,b\n"
    found = learn(tmp_path, text, task="classification").encoding
    assert found.target == ClassTarget("y", ("a", "b"), are_numbers=False)
    with pytest.warns(UnprotectedWarning, match="others in 1 of 3 filled"):
        encoded = encode(found, tmp_path, "x,y\n1,a\n2,b\n3,c\n4,\n")
    np.testing.assert_array_equal(encoded.target[:2], [0, 1])
    np.testing.assert_array_equal(encoded.unusable, [False, False, True, True])


def test_class_labels_that_are_numbers_are_compared_as_numbers(tmp_path):
    found = learn(tmp_path, "x,y\n1,10\n2,9\n3,1.0\n", task="classification").encoding
    assert found.target == ClassTarget("y", ("1", "9", "10"), are_numbers=True)
    encoded = encode(found, tmp_path, "x,y\n1,1\n2,10.0\n3,9e0\n")
    np.testing.assert_array_equal(encoded.target, [0, 2, 1])
    codes = learn(tmp_path, "x,y\n1,007\n2,7\n", task="classification").encoding.target
    assert isinstance(codes, ClassTarget)
    assert codes.classes == ("007", "7")


@pytest.mark.parametrize("task", ["regression", "count"])
def test_rows_without_a_usable_target_are_marked(tmp_path, task):
    found = learn(tmp_path, "x,y\n1,1\n2,2\n3,0\n", task=task).encoding
    with pytest.warns(UnprotectedWarning) as caught:
        encoded = encode(found, tmp_path, "x,y\n1,1\n2,\n3,many\n4,2\n5,1\n6,0\n")
    (warning,) = caught
    assert "contribute nothing" in str(warning.message)
    np.testing.assert_array_equal(encoded.unusable, [False, True, True, False, False, False])
    assert np.isfinite(encoded.target).all()


def test_counts_are_whole_and_not_negative(tmp_path):
    found = learn(tmp_path, "x,y\n1,1\n2,2\n3,0\n", task="count").encoding
    with pytest.warns(UnprotectedWarning, match="2 of 5 filled cells"):
        encoded = encode(found, tmp_path, "x,y\n1,1\n2,-1\n3,0.5\n4,2\n5,1\n")
    np.testing.assert_array_equal(encoded.unusable, [False, True, True, False, False])


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("x,y\n1,a\n2,b\n", {}, "expected numbers in the target 'y' for --task regression"),
        ("x,y\n1,a\n2,b\n", {"task": "count"}, "got 'a'"),
        ("x,y\n1,-1\n2,3\n", {"task": "count"}, "got -1"),
        ("x,y\n1,.5\n2,3\n", {"task": "count"}, "use --task regression"),
        ("x,y\n1,5\n2,5\n", {}, "got 5 in every row"),
        ("x,y\n1,1e200\n2,3\n", {}, "got numbers from 3 to 1e\\+200, .* beyond float64, in"),
        ("x,y\n1,1e-200\n2,3e-200\n", {}, "use another unit in all files"),
        ("x,y\n1,1e200\n2,3\n", {"task": "count"}, "at most 9007199254740992 .* got 1e\\+200"),
        ("x,y\n1,a\n2,a\n", {"task": "classification"}, "got 'a' alone"),
        (
            "x,y\n" + "".join(f"1,{i}.5\n" for i in range(101)),
            {"task": "classification"},
            "use --task regression",
        ),
        ("x,y\n1,a\n2,b\n", {"task": "ordinal"}, "number the classes from lowest to highest"),
        ("x,y\n1,\n2,?\n", {}, "got none in any row"),
        ("x,y\n1,1\n1,2\n", {}, "that varies"),
        ("y\n1\n2\n", {}, "besides the target"),
        ("x,y\n1,1\n2,2\n", {"target": "z"}, "expected column 'z'"),
        ("x,y\n1,1\n2,2\n", {"categorical": ["z"]}, "expected column 'z'"),
        ("x,y\n1,1\n2,2\n", {"ignore": ["y"]}, "target 'y' to be neither"),
        ("x,y\n1,1\n2,2\n", {"task": "ranking"}, "got 'ranking'"),
        ("x;y\n1,5;1\n2;2\n-,25;3\n", {}, "decimal point in column 'x' .* got '1,5'"),
        ("x;y\n1;1,5\n2;2\n", {}, "decimal point in column 'y'"),
    ],
)
def test_public_tables_that_do_not_fit_the_task(tmp_path, text, options, words):
    with pytest.raises(TableError, match=words) as caught:
        learn(tmp_path, text, **options)
    assert UNPROTECTED not in str(caught.value)


# Files that do not fit together.


def test_missing_columns_are_named(tmp_path):
    found = learn(tmp_path).encoding
    with pytest.raises(TableError, match="expected columns 'job', 'y' in") as caught:
        encode(found, tmp_path, "age,income\n1,2\n")
    # Without a header line these would be the cells of a private row.
    assert str(caught.value).startswith(UNPROTECTED)
    assert "got columns 'age', 'income'" in str(caught.value)


@pytest.mark.parametrize("name", ["incme", "Income"])
def test_nearest_column_is_named_even_if_it_is_not_among_the_first(name):
    columns = [*(f"column{number}" for number in range(14)), "income"]
    table = Table("public.csv", {column: ["1", "2", "3"] for column in columns})
    with pytest.raises(TableError, match=r"and 7 more \(did you mean 'income'\?\); check the name"):
        learn_encoding(table, target=name, task="regression")
    with pytest.raises(TableError, match="and 7 more; check the name"):
        learn_encoding(table, target="price", task="regression")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("old,nurse,1,1", "expected numbers as in the public table, got text in 3 of 3"),
        ("1,5,1,1", "expected categories as in the public table, got numbers in 3 of 3"),
        ("1,nurse,1,high", "column 'y'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*beyond the range of the public table")
def test_a_column_of_another_type_is_refused(tmp_path, row, words):
    found = learn(tmp_path).encoding
    with pytest.raises(TableError, match=words) as caught:
        encode(found, tmp_path, "age,job,income,y\n" + f"{row}\n" * 3)
    assert str(caught.value).startswith(UNPROTECTED)


def test_single_cells_of_another_type_count_as_missing(tmp_path):
    found = learn(tmp_path).encoding
    rows = "35,nurse,2,1\n" * 3
    with pytest.warns(UnprotectedWarning, match="text in 1 of 4 filled") as caught:
        encoded = encode(found, tmp_path, f"age,job,income,y\n{rows}old,nurse,2,1\n")
    assert UNPROTECTED in str(caught[0].message)
    assert "old" not in str(caught[0].message)
    np.testing.assert_array_equal(encoded.features[3], encoded.features[0])
    with pytest.warns(UserWarning, match="counts as missing") as caught:
        encode(found, tmp_path, f"age,job,income,y\n{rows}old,nurse,2,1\n", private=False)
    assert UNPROTECTED not in str(caught[0].message)


def test_a_target_with_decimal_commas_cannot_be_ignored(tmp_path):
    text = "x;y\n" + "1;1,5\n2;1,6\n" * 3
    with pytest.raises(TableError, match=r"add --decimal , if all files have commas\.$"):
        learn(tmp_path, text, task="regression")


def test_decimal_commas_may_be_codes(tmp_path):
    text = "x;y\n" + "1,5;1\n" * 3 + "1,6;2\n" * 3
    (column,) = learn(tmp_path, text, categorical=["x"]).encoding.columns
    assert column.features == ("x=1,5", "x=1,6")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("3500,nurse,2,1", "3 of 4 filled cells of column 'age' .* beyond the range .* units"),
        ("35,Nurse,2,1", "3 of 3 filled cells of column 'job' .* none of .* spelling, or"),
    ],
)
def test_columns_beyond_what_the_public_table_has_are_mentioned(tmp_path, row, words):
    """They are clamped or have no feature: a model of other units looks as if all was well."""
    found = learn(tmp_path).encoding
    rows = "age,job,income,y\n" + f"{row}\n" * 3 + "30,,,\n"
    with pytest.warns(UnprotectedWarning, match=words) as caught:
        encode(found, tmp_path, rows)
    assert [UNPROTECTED in str(each.message) for each in caught] == [True]
    with pytest.warns(UserWarning, match=words) as caught:
        encode(found, tmp_path, rows, private=False)
    assert UNPROTECTED not in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:.*beyond the range of the public table")
def test_no_usable_target_at_all(tmp_path):
    found = learn(tmp_path).encoding
    with pytest.raises(TableError, match="got none in any row"):
        encode(found, tmp_path, "age,job,income,y\n1,nurse,1,\n")


def test_prediction_rows_need_no_target(tmp_path):
    found = learn(tmp_path).encoding
    features = found.encode_features(table(tmp_path, "age,job,income\n35,nurse,2\n"))
    np.testing.assert_array_equal(features, [[0, 0, 1, 0, 0]])


# Storing.


def test_round_trip_through_json(tmp_path):
    for task in ("regression", "classification", "count"):
        found = learn(tmp_path, task=task).encoding
        again = TableEncoding.from_dict(json.loads(json.dumps(found.to_dict())))
        assert again == found


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("target"),
        lambda d: d["columns"][0].update(kind="os.system"),
        lambda d: d["columns"][0].update(mean="1"),
        lambda d: d["columns"][0].update(scale=math.inf),
        lambda d: d["columns"][0].update(scale=0),
        lambda d: d["columns"][0].update(scale=-1.0),
        lambda d: d["columns"][0].update(scale=1e-320),
        lambda d: d["columns"][1].update(categories=[]),
        lambda d: d["columns"][1].update(categories="cook"),
        lambda d: d.update(target=d["columns"][0]),
    ],
)
def test_damaged_encodings_are_refused(tmp_path, change):
    content = learn(tmp_path).encoding.to_dict()
    change(content)
    with pytest.raises((KeyError, TypeError, ValueError)):
        TableEncoding.from_dict(content)


def test_numbers_survive_writing(tmp_path):
    path = tmp_path / "out.csv"
    write_table(path, {"id": ["a,b", "c"], "x": np.array([0.1 + 0.2, 1e-300])})
    assert path.read_text() == 'id,x\n"a,b",0.30000000000000004\nc,1e-300\n'


# Parquet.


def test_parquet_is_read_like_csv(tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet

    path = tmp_path / "no-suffix-needed"
    parquet.write_table(
        arrow.table(
            {
                "age": arrow.array([20, 30, None, 50], arrow.int64()),
                "job": arrow.array(["nurse", "cook", None, "cook"]).dictionary_encode(),
                "member": [True, False, None, True],
                "price": arrow.array([1, 2, 3, 4]).cast(arrow.decimal128(21, 2)),
                "void": arrow.nulls(4),
                "large": arrow.array([2**60, 2**60 + 1, 2**60, 2**61], arrow.int64()),
                "y": [1.0, 2.0, math.nan, 4.0],
            }
        ),
        path,
    )
    found = read_table(path)
    assert found.columns["job"] == ("nurse", "cook", "", "cook")
    assert found.columns["member"] == ("true", "false", "", "true")
    rows = ("20,nurse,true,1,,9,1", "30,cook,false,2,,9,2", ",,,3,,9,", "50,cook,true,4,,9,4")
    text = "age,job,member,price,void,large,y\n" + "\n".join(rows)
    options = {"target": "y", "task": "regression", "categorical": ["price"], "ignore": ["large"]}
    from_csv = learn_encoding(table(tmp_path, text), **options)
    assert learn_encoding(found, **options) == from_csv
    encoding = from_csv.encoding
    np.testing.assert_array_equal(
        encoding.encode([found], private=False).features,
        encoding.encode([table(tmp_path, text)], private=False).features,
    )


def write_parquet(path, **columns):
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), path)
    return path


def test_times_of_parquet_are_seconds_whatever_their_unit(tmp_path):
    import pyarrow as arrow

    times = [22603, None, 0]
    columns = {
        f"t{unit}": arrow.array([t and t * each + part for t in times], kind)
        for unit, each, part, kind in (
            ("s", 1, 0, arrow.time32("s")),
            ("ms", 10**3, 1, arrow.time32("ms")),
            ("us", 10**6, 1, arrow.time64("us")),
            ("ns", 10**9, 1, arrow.time64("ns")),
        )
    }
    columns["beyond"] = arrow.array([10**6 * 90_000] * 3).cast(arrow.time64("us"))
    (table,) = read_batches(write_parquet(tmp_path / "t.parquet", **columns))
    for name in ("ts", "tms", "tus", "tns"):
        found = table.columns[name]
        np.testing.assert_allclose(found, [22603, np.nan, 0], atol=2e-3)
    assert table.columns["tns"][0] == pytest.approx(22603 + 1e-9, abs=1e-11)
    assert (table.columns["beyond"] == 90_000).all()


def test_a_cell_of_parquet_that_is_no_text_ends_nothing(tmp_path):
    import pyarrow as arrow

    for kind, binary in (
        (arrow.string(), arrow.binary()),
        (arrow.large_string(), arrow.large_binary()),
        (arrow.string_view(), arrow.binary_view()),
    ):
        cells = arrow.array([b"good", b"b\xffd", None], binary)
        texts = arrow.Array.from_buffers(kind, 3, cells.buffers())
        (table,) = read_batches(write_parquet(tmp_path / "t.parquet", a=texts, x=[1, 2, 3]))
        assert table.columns["a"] == ("good", "b\ufffdd", "")


def test_texts_of_parquet_are_texts_whatever_their_layout(tmp_path):
    import pyarrow as arrow

    texts = ["short", None, "longer than twelve bytes", "short"]
    kinds = (arrow.string(), arrow.large_string(), arrow.string_view())
    columns = {str(kind): arrow.array(texts, kind) for kind in kinds}
    # Arrow can neither write nor decode a dictionary of views.
    columns |= {f"{kind} once": arrow.array(texts, kind).dictionary_encode() for kind in kinds[:2]}
    found = read_table(write_parquet(tmp_path / "t.parquet", **columns))
    assert not found.unreadable
    for name in columns:
        assert found.columns[name] == tuple(text or "" for text in texts), name
    # Bytes are no text, whatever their layout.
    binary = arrow.array([b"a", b"b"], arrow.binary_view())
    found = read_table(write_parquet(tmp_path / "t.parquet", a=binary, x=[1, 2]))
    assert found.unreadable == {"a": "binary_view"}


def test_parquet_columns_without_a_meaning_are_left_out(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", a=[[1, 2], [3]], x=[1, 2], y=[1, 2])
    public = read_table(path)
    learned = learn_encoding(public, target="y", task="regression")
    assert learned.left_out == {"a": "it holds list, which no feature can be made of"}
    ignored = learn_encoding(public, target="y", task="regression", ignore=["a", "z"])
    assert ignored.left_out["a"] == "ignored on request"
    assert ignored.left_out["z"] == "ignored on request; not in the public table"
    with pytest.raises(TableError, match=r"in column 'a' .* got list"):
        learn_encoding(public, target="a", task="regression")


def test_parquet_columns_of_another_kind_are_an_error_only_if_needed(tmp_path):
    # One row decides which fields a column of structures has, and their names may be personal.
    rows = [{"a": 1}, {"diagnosis of Alice": 2}]
    path = write_parquet(tmp_path / "t.parquet", x=[1, 2], income=rows, y=[1, 2])
    needs_it = learn(tmp_path, "x,income,y\n1,2,3\n2,1,4\n").encoding
    with pytest.raises(TableError, match="got struct") as error:
        needs_it.encode(read_batches(path, private=True), private=True)
    assert UNPROTECTED in str(error.value)
    assert "Alice" not in str(error.value)
    does_not = learn(tmp_path, "x,y\n1,3\n2,4\n").encoding
    assert len(does_not.encode(read_batches(path, private=True), private=True).target) == 2


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(TableError, match=r"mirrordp\[parquet\]"):
        read_table(write(tmp_path, "PAR1"))
    with pytest.raises(TableError, match=r"mirrordp\[parquet\]"):
        write_table(tmp_path / "out.parquet", {"a": [1]})


def test_parquet_output(tmp_path):
    write_table(tmp_path / "out.parquet", {"a": np.array([1.5]), "b": ["x"]})
    found = read_table(tmp_path / "out.parquet")
    np.testing.assert_array_equal(found.columns["a"], [1.5])
    assert found.columns["b"] == ("x",)


def test_good_tables_cause_no_warning(tmp_path):
    found = learn(tmp_path).encoding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode(found, tmp_path, PUBLIC)
    assert isinstance(table(tmp_path, PUBLIC), Table)


# One row among others: what it says decides nothing about how the others are read.


ODD_CELLS = ("x", "", "NA", "1e400", "-7", "0.1", "1_0", " 5 ", "٣", "12345678901234567890", "True")


@pytest.mark.parametrize("odd", ODD_CELLS)
@pytest.mark.parametrize("categorical", [False, True])
def test_an_odd_cell_changes_no_other_row(tmp_path, odd, categorical):
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal():.17g},{rng.integers(3)},{rng.integers(9)}" for _ in range(60)]
    learned = learn_encoding(
        table(tmp_path, "\n".join(["a,b,y", *rows])),
        target="y",
        task="classification",
        categorical=["b"] if categorical else [],
    )
    found = []
    for cells in ("0.5,1,3", f"{odd},{odd},{odd}"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnprotectedWarning)
            text = "\n".join(["a,b,y", *rows[:7], cells, *rows[7:]])
            found.append(encode(learned.encoding, tmp_path, text))
    others = np.arange(61) != 7
    for name in ("features", "target", "unusable"):
        usual, changed = (getattr(table, name)[others] for table in found)
        assert usual.dtype == changed.dtype
        assert usual.tobytes() == changed.tobytes()


@pytest.mark.parametrize("count", [15, 300, 3000])
def test_a_negative_zero_does_not_name_the_other_zeros(count):
    """NumPy takes -0.0 and 0.0 for one number, and keeps whichever comes first after sorting."""
    rng = np.random.default_rng(0)
    codes = {"c": tuple("012" * 20), "y": tuple("01" * 30)}
    learned = learn_encoding(
        Table("public", codes), target="y", task="classification", categorical=["c"]
    ).encoding
    usual = {"c": rng.integers(0, 3, count).astype(float), "y": rng.integers(0, 2, count) * 1.0}
    expected = learned.encode([Table("private", usual)], private=True)
    for place in {0, 1, count // 2, count - 1, *np.flatnonzero(usual["c"] == 0)[:20].tolist()}:
        odd = {name: cells.copy() for name, cells in usual.items()}
        odd["c"][place] = odd["y"][place] = -0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnprotectedWarning)
            found = learned.encode([Table("private", odd)], private=True)
        others = np.arange(count) != place
        for name in ("features", "target", "unusable"):
            np.testing.assert_array_equal(
                getattr(found, name)[others], getattr(expected, name)[others]
            )
        # It is a zero itself, too.
        assert not found.unusable[place]
        assert found.target[place] == 0
        assert found.features[place].any()


@pytest.mark.parametrize("text", ["-0", "-0.0", "-0e5"])
def test_text_of_a_negative_zero_is_zero(text):
    assert positions(["0", "1"], [text]) == [0]


def test_one_long_cell_is_no_reason_to_refuse(tmp_path):
    long = "x" * 9_000_000
    for written in (long, f'"{long}"'):
        path = tmp_path / "long.csv"
        path.write_text("a,b\n1,2\n" + f"3,{written}\n5,6\n" + "7,8\n" * 20_000)
        found = read_table(path)
        assert tuple(found.columns["a"])[:4] == ("1", "3", "5", "7")
        assert len(tuple(found.columns["b"])[1]) == len(long)


@pytest.mark.parametrize("digits", [0, 4, 14, 26])
def test_the_digits_of_one_decimal_do_not_round_the_others(tmp_path, digits):
    """The type of a Parquet column of decimals has as many digits as its longest number."""
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    from decimal import Decimal

    rng = np.random.default_rng(0)
    texts = [f"{rng.random() * 10 ** rng.integers(0, 8):.6f}" for _ in range(500)]
    odd = Decimal("0.500000" + "0" * (digits - 1) + "1" * (digits > 0))
    values = arrow.array([*map(Decimal, texts), odd, None])
    parquet.write_table(arrow.table({"x": values}), tmp_path / "d.parquet")
    cells = read_table(tmp_path / "d.parquet").columns["x"]
    np.testing.assert_array_equal(cells[:-2], [float(text) for text in texts])
    assert np.isnan(cells[-1])


@pytest.mark.parametrize("written", ["{}", "{}.0", "{}.00", "+{}", "{}e0"])
def test_codes_are_known_however_a_program_wrote_the_numbers(tmp_path, written):
    """One gap, and pandas writes 1.0 for every 1 of the column: all rows had unknown codes."""
    public = "c,y\n" + "".join(f"{k % 3},{k % 5}\n" for k in range(60))
    encoding = learn(tmp_path, public, categorical=["c"]).encoding
    private = "c,y\n" + "".join(f"{written.format(k % 3)},1\n" for k in range(12))
    found = encode(encoding, tmp_path, private).features
    np.testing.assert_array_equal(found, np.eye(3)[np.arange(12) % 3])


@pytest.mark.parametrize("codes", [("1", "1.0"), ("007", "7"), ("01", "2")])
def test_codes_that_are_names_stay_names(tmp_path, codes):
    public = "c,y\n" + "".join(f"{codes[k % 2]},{k % 5}\n" for k in range(60))
    encoding = learn(tmp_path, public, categorical=["c"]).encoding
    assert encoding.columns[0].categories == tuple(sorted(codes))
    found = encode(encoding, tmp_path, f"c,y\n{codes[0]},1\n{codes[1]},1\n7.00,1\n").features
    np.testing.assert_array_equal(found.sum(axis=1), [1, 1, 0])
    assert (found[0] != found[1]).any()


@pytest.mark.parametrize("rare", ["7", "07", "7.0"])
def test_a_rare_name_does_not_count_as_a_common_one_of_the_same_number(tmp_path, rare):
    """It was left out of the vocabulary, and every private 7 was then taken for 007."""
    cells = [*["007"] * 40, *["A"] * 40, rare]
    public = "c,y\n" + "".join(f"{cell},{k % 5}\n" for k, cell in enumerate(cells))
    encoding = learn(tmp_path, public).encoding
    categories = encoding.columns[0].categories
    assert set(categories) == {"007", "A", rare}
    private = "c,y\n" + "".join(f"{cell},1\n" for cell in ("007", rare, "A", "+7", "B"))
    found = encode(encoding, tmp_path, private).features
    expected = [[name == cell for name in categories] for cell in ("007", rare, "A", "+7", "B")]
    np.testing.assert_array_equal(found, expected)
    # Where public rows have one of them alone, any spelling of the number is that category.
    alone = learn(tmp_path, public.rsplit(rare, 1)[0] + "A,1\n").encoding
    found = encode(alone, tmp_path, f"c,y\n007,1\n{rare},1\n").features
    np.testing.assert_array_equal(found[0], found[1])


def test_names_that_are_one_number_are_kept_together_within_the_most_categories(tmp_path):
    # 99 categories, of which the last has a second name: both are left out, as there is one place.
    cells = [f"c{k}" for k in range(99) for _ in range(20)] + ["7"] * 15 + ["007"] * 12
    public = "c,y\n" + "".join(f"{cell},{k % 5}\n" for k, cell in enumerate(cells))
    categories = learn(tmp_path, public).encoding.columns[0].categories
    assert len(categories) == 99
    assert not {"7", "007"} & set(categories)


def test_a_column_of_007_and_7_alone_holds_numbers(tmp_path):
    public = "c,y\n" + "".join(f"{('007', '7', '8')[k % 3]},{k % 5}\n" for k in range(60))
    encoding = learn(tmp_path, public).encoding
    found = encode(encoding, tmp_path, "c,y\n007,1\n7,1\n8,1\n").features
    assert found[0] == found[1] < found[2]


# Predicting.


@pytest.mark.parametrize("factor", [1.0, 30.0, 300.0, 1e6])
@pytest.mark.parametrize("task", ["regression", "count", "binary", "multinomial", "ordinal"])
def test_a_stored_model_predicts_what_the_estimator_predicts(tmp_path, task, factor):
    """Extreme scores included: both must guard the same functions in the same way."""
    kind, labels = {
        "regression": (PrivateLinearRegression, "1234"),
        "count": (PrivatePoissonRegressor, "1234"),
        "binary": (PrivateLogisticRegression, "abab"),
        "multinomial": (PrivateLogisticRegression, "abca"),
        "ordinal": (PrivateOrdinalRegression, "12341"),
    }[task]
    rows = table(tmp_path, "x,y\n" + "".join(f"{k},{label}\n" for k, label in enumerate(labels)))
    is_class = kind in (PrivateLogisticRegression, PrivateOrdinalRegression)
    name = "classification" if kind is PrivateLogisticRegression else task
    encoding = learn_encoding(rows, target="y", task=name).encoding
    outputs = 3 if task in ("multinomial", "ordinal") else 1
    coefficients = factor * np.array([[1.0], [-2.0], [0.5]][:outputs])
    model = TableModel(
        task=name,
        encoding=encoding,
        scorer=LinearScorer(coefficients, np.zeros(outputs)),
        privacy={},
    )
    estimator = kind()
    estimator.n_features_in_ = 1
    estimator.coef_, estimator.intercept_ = coefficients, np.zeros(outputs)
    features = encoding.encode_features(rows)
    found = model.predict(rows)
    if not is_class:
        np.testing.assert_array_equal(found["prediction"], estimator.predict(features))
        return
    estimator.classes_ = np.array(sorted(set(labels)))
    np.testing.assert_array_equal(found["prediction"], estimator.predict(features))
    shares = np.column_stack([found[f"probability of {name}"] for name in estimator.classes_])
    np.testing.assert_array_equal(shares, estimator.predict_proba(features))


# Dates.


DATES = ("2024-01-15", "2024-03-02", "2024-05-20", "2024-12-31")


def dated(dates, times=None):
    times = times or [""] * len(dates)
    rows = "".join(
        f"{date}{time},{i}\n" for i, (date, time) in enumerate(zip(dates, times, strict=True))
    )
    return "when,y\n" + rows


def spelled(date, how):
    return datetime.date.fromisoformat(date).strftime(how)


@pytest.mark.parametrize("how", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%y", "%d %b %Y"])
def test_dates_become_the_same_features_in_every_format(tmp_path, how):
    texts = [spelled(date, how) for date in DATES]
    (column,) = learn(tmp_path, dated(texts)).encoding.columns
    plain = learn(tmp_path, dated(DATES)).encoding
    assert column.features == plain.features
    assert column.features[:2] == ("when: elapsed days", "when: weekday=Monday")
    features = encode(learn(tmp_path, dated(texts)).encoding, tmp_path, dated(texts)).features
    np.testing.assert_array_equal(features, encode(plain, tmp_path, dated(DATES)).features)
    # A Monday, a Saturday, a Monday and a Tuesday.
    np.testing.assert_array_equal(features[:, 1:].argmax(axis=1), [0, 5, 0, 1])
    days = np.array(DATES, "M8[D]").astype(float)
    np.testing.assert_allclose(features[:, 0], (days - days.mean()) / days.std())


def test_a_number_is_no_date(tmp_path):
    """In a column of numbers alone it could not be one, so that one cell would decide it."""
    public = "when,y\n" + "".join(f"2024-05-{k + 1:02},{k}\n" for k in range(20))
    encoding = learn(tmp_path, public).encoding
    with pytest.warns(UnprotectedWarning, match="got something else in 1 of 2"):
        found = encode(encoding, tmp_path, "when,y\n20240503,1\n2024-05-03,1\n").features
    assert not found[0].any()
    assert found[1].any()


def test_times_of_day_and_year_go_around(tmp_path):
    year = np.arange("2022-12-25", "2024-01-10", 7, dtype="M8[D]").astype(str)
    text = dated(year, [f" {i % 24:02}:30" for i in range(len(year))])
    encoding = learn(tmp_path, text).encoding
    found = encode(encoding, tmp_path, dated(["2023-12-31 23:59:59", "2023-01-01 00:00:01"]))
    first, second = found.features
    names = list(encoding.features)
    for part in ("month", "hour"):
        both = [names.index(f"when: {part} ({wave})") for wave in ("sine", "cosine")]
        np.testing.assert_allclose(first[both], second[both], atol=0.02)
        np.testing.assert_allclose(first[both], [0, 1], atol=0.02)
    assert first[0] > second[0] + 2


def test_dates_whose_day_and_month_cannot_be_told_apart_are_categories(tmp_path):
    text = "when,y\n" + "01/02/2024,1\n01/03/2024,2\n" * 3
    (column,) = learn(tmp_path, text).encoding.columns
    assert isinstance(column, CategoryColumn)


def test_only_the_public_format_is_read(tmp_path):
    encoding = learn(tmp_path, dated([spelled(date, "%d.%m.%Y") for date in DATES])).encoding
    rows = ["02.03.2024", "20.05.2024", "2024-05-20", ""]
    with pytest.warns(UnprotectedWarning, match="1 of 3 filled cells of column 'when'"):
        found = encode(encoding, tmp_path, dated(rows))
    np.testing.assert_array_equal(found.features[2:], 0)
    assert found.features[0].any()
    assert found.unfamiliar["when"].startswith("1 of 3 cells no dates")
    again = TableEncoding.from_dict(json.loads(json.dumps(encoding.to_dict())))
    assert again == encoding


def test_dates_beyond_the_public_ones_are_counted(tmp_path):
    encoding = learn(tmp_path, dated(DATES)).encoding
    found = encode(encoding, tmp_path, dated([*DATES, "2030-01-05"]))
    (days, *_) = np.array(encoding.columns[0].features) == "when: elapsed days"
    assert days
    assert found.features[-1, 0] == found.features[:, 0].max()
    assert found.features[-1, 1 + 5] == 1, "a Saturday"
    assert "2024-01-15 00:00 to 2024-12-31 00:00" in found.unfamiliar["when"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_dates_of_parquet_and_of_text_are_the_same(tmp_path, unit, zone):
    import pyarrow as arrow

    times = np.array(DATES, "M8[us]") + np.arange(4) * np.timedelta64(3, "h")
    texts = [str(time) for time in times]
    stored = arrow.array(times).cast(arrow.timestamp(unit)).cast(arrow.timestamp(unit, zone))
    path = write_parquet(tmp_path / "t.parquet", when=stored, y=[0, 1, 2, 3])
    found = learn_encoding(read_table(path), target="y", task="regression")
    assert found == learn(tmp_path, dated(texts))
    features = [
        found.encoding.encode([rows], private=False).features
        for rows in (read_table(path), table(tmp_path, dated(texts)))
    ]
    np.testing.assert_array_equal(*features)


def test_days_durations_and_times_of_day_of_parquet(tmp_path):
    path = write_parquet(
        tmp_path / "t.parquet",
        day=[datetime.date(2024, 1, day) for day in (1, 2, 4)],
        took=[datetime.timedelta(hours=hours) for hours in (1, 2, 4)],
        at=[datetime.time(hours, 30) for hours in (1, 2, 4)],
        y=[1, 2, 3],
    )
    rows = read_table(path)
    assert rows.columns["took"].tolist() == [3600, 7200, 14400]
    assert rows.columns["at"].tolist() == [5400, 9000, 16200]
    day, took, at = learn_encoding(rows, target="y", task="regression").encoding.columns
    assert (type(day), type(took), type(at)) == (DateColumn, NumberColumn, NumberColumn)
    assert not day.has_hours


# Separators and codes.


@pytest.mark.parametrize(
    ("cells", "decimal", "thousands"),
    [
        (("1,5", "-2", "1234567,25"), ",", ""),
        (("1,5", "-2", "1.234.567,25"), ",", "."),
        (("1.5", "-2", "1,234,567.25"), ".", ","),
        (("1.5", "-2", "1'234'567.25"), ".", "'"),
    ],
)
def test_separators_of_numbers(tmp_path, cells, decimal, thousands):
    text = "x;y\n" + "".join(f"{cell};{cell}\n" for cell in cells)
    learned = learn(tmp_path, text, decimal=decimal, thousands=thousands).encoding
    found = encode(learned, tmp_path, text)
    np.testing.assert_array_equal(found.target, [1.5, -2, 1234567.25])
    values = np.array([1.5, -2, 1234567.25])
    np.testing.assert_allclose(found.features[:, 0], (values - values.mean()) / values.std())
    assert TableEncoding.from_dict(json.loads(json.dumps(learned.to_dict()))) == learned


def test_numbers_with_other_separators_than_asked_for_count_as_text(tmp_path):
    learned = learn(tmp_path, "x;y\n1,5;1\n2,5;2\n1.000;3\n", decimal=",", thousands=".").encoding
    with pytest.warns(UnprotectedWarning, match="1 of 4 filled cells of column 'x'"):
        found = encode(learned, tmp_path, "x;y\n1,5;1\n2;2\n1.5;3\n3;4\n")
    assert found.features[2, 0] == 0


@pytest.mark.parametrize(("decimal", "thousands"), [(";", ""), (",", ","), (".", "x")])
def test_separators_that_cannot_be(tmp_path, decimal, thousands):
    with pytest.raises(TableError, match="separator among"):
        learn(tmp_path, decimal=decimal, thousands=thousands)


def test_models_of_earlier_versions_have_a_decimal_point(tmp_path):
    found = learn(tmp_path).encoding
    content = found.to_dict()
    for part in (*content["columns"], content["target"]):
        part.pop("decimal", None)
        part.pop("thousands", None)
    assert TableEncoding.from_dict(content) == found


def coded(effect):
    rng = np.random.default_rng(0)
    codes = rng.choice([101, 205, 310, 417], 200)
    noise = rng.normal(size=200)
    return "region,y\n" + "".join(
        f"{code},{effect(code) + extra}\n" for code, extra in zip(codes, noise, strict=True)
    )


def test_codes_are_offered_as_categories_and_not_turned_into_them(tmp_path):
    text = coded({101: 3, 205: -3, 310: 3, 417: -3}.__getitem__)
    with pytest.warns(UserWarning, match="column 'region' .* add --categorical region"):
        (column,) = learn(tmp_path, text).encoding.columns
    assert isinstance(column, NumberColumn)


@pytest.mark.parametrize("effect", [lambda code: code / 100, lambda code: 0])
def test_numbers_that_a_line_describes_are_not_offered(tmp_path, effect):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(tmp_path, coded(effect))


def test_batches_of_wide_tables_have_fewer_rows(tmp_path, monkeypatch):
    # A batch of text must not take more memory because a table has many columns.
    monkeypatch.setattr("mirrordp.tables.files._BATCH_CELLS", 12)
    path = tmp_path / "wide.csv"
    path.write_text("a,b,c,d,e\n" + "1,2,3,4,5\n" * 5)
    assert [len(batch) for batch in read_batches(path)] == [2, 2, 1]


def test_many_columns_with_clamped_numbers_take_few_lines():
    few = {"a": "1 of 9 numbers beyond, moved to its ends", "b": "2 of 9 cells of no category"}
    assert by_column(few) == [f"column {name!r}: {words}" for name, words in few.items()]
    clamped = {f"x{n}": f"{n} of 99 numbers beyond, moved to its ends" for n in range(1, 41)}
    others = {"c": "1 of 99 cells of no category", "y": "3 of 99 rows without a usable target"}
    others["z"] = "1 of 99 cells no numbers, left out; 9 of 99 numbers beyond, moved to its ends"
    lines = by_column(clamped | others)
    # Only clamped numbers lose their words, and no column its count.
    assert [line for line in lines if "column 'x" not in line][:-1] == [
        f"column {name!r}: {words}" for name, words in others.items()
    ]
    assert sum(line.startswith("column 'x") for line in lines) == 10
    assert lines[-1].startswith("30 more columns with numbers beyond the public range: 'x30' 30, ")
    assert all(f"{name!r}" in " ".join(lines) for name in clamped | others)


def test_the_last_microsecond_of_a_far_day_belongs_to_it():
    """Days since 1970 with their fraction have too few digits for it."""
    date = DateColumn("when", "ISO", 0.0, 1.0, 0.0, 1.0, False, True, False, False)
    moments = [f"{day}T23:59:59.999999" for day in ("2262-04-11", "2024-04-11", "9999-12-31")]
    out = np.zeros((3, len(date.features)))
    date.encode(np.array(moments, "M8[us]"), out, Tally())
    days = [datetime.date.fromisoformat(moment[:10]).weekday() for moment in moments]
    weekdays = [name.startswith("when: weekday=") for name in date.features]
    np.testing.assert_array_equal(out[:, weekdays].argmax(axis=1), days)


@pytest.mark.parametrize("rows", [20, 5000])
@pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
def test_a_stray_quote_takes_no_other_rows(tmp_path, rows):
    """One private cell '"24' made one row of all up to the next quote."""
    lines = [f"{i}.5,{i % 7},{20 + i % 9}" for i in range(rows)]
    lines[-3] += '"'
    for first, fine in (("24", True), ('"24', False)):
        path = tmp_path / "table.csv"
        path.write_text("\n".join(["y,x,size", f"1.5,2,{first}", *lines, ""]))
        if fine:
            assert len(read_table(path)) == rows + 1
        else:
            with pytest.raises(TableError, match="look like rows of their own"):
                read_table(path)
    path.write_text('y,note,x\n1,"two\nlines",3\n2,"a, b\nc",4\n')
    assert len(read_table(path)) == 2


def test_text_in_a_private_parquet_file_where_public_cells_are_values(tmp_path):
    """pandas writes text for a column that it could not read as numbers because of one cell."""
    pay = np.arange(1000.0, 1060.0)
    public = write_parquet(tmp_path / "public.parquet", pay=pay, y=pay + 1)
    fine = write_parquet(tmp_path / "fine.parquet", pay=np.sqrt(pay) + pay, y=pay)
    left = write_parquet(tmp_path / "left.parquet", pay=[f"1.{n:03d}" for n in range(60)], y=pay)
    fit_files(fine, public, target="y", task="regression", epsilon=1.0)
    # A CSV file has nothing but text, and each cell is read by itself.
    texts = tmp_path / "fine.csv"
    texts.write_text("pay,y\n" + "".join(f"{n**0.5 + n},{n}\n" for n in pay))
    fit_files(texts, public, target="y", task="regression", epsilon=1.0)
    with pytest.raises(TableError, match=r"expected numbers in column 'pay'.*got text") as error:
        fit_files(left, public, target="y", task="regression", epsilon=1.0)
    assert UNPROTECTED in str(error.value)
    with pytest.raises(TableError, match="expected numbers in column 'pay'"):
        fit_files(left, public, target="pay", task="regression", epsilon=1.0)
