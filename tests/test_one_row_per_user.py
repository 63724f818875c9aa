"""One row of each user: whatever rows a user has, one row of what is trained on changes."""

import contextlib
import decimal
import json
import random
import re
import shutil
import warnings

import numpy as np
import pandas
import pytest

from mirrordp import cli
from mirrordp.data import UNPROTECTED, PrivateClients, UnprotectedWarning, one_row_per_user
from mirrordp.data.users import _name_order, _spelling
from mirrordp.linear import PrivateLinearRegression, descent, estimators, nonlinear
from mirrordp.privacy.accounting import Adjacency, default_delta
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.tables import TableError, files as tables, fitting
from mirrordp.tables.fitting import fit_files


def chosen(owners, values=None, **options):
    """The rows that are trained on, as owner and value."""
    rows = one_row_per_user(owners, **options)
    values = range(len(owners)) if values is None else values
    return [(owners[row], values[row]) for row in rows]


class TestTheChoice:
    def test_each_user_has_one_row_in_the_order_of_names(self):
        owners = [10, 9, 9, "b", "a", "b", 9]
        rows = one_row_per_user(owners)
        assert [owners[row] for row in rows] == [9, 10, "a", "b"]
        assert rows.tolist() == one_row_per_user(owners).tolist()

    def test_it_varies_with_the_name(self):
        """A choice of the first row, say, would be a choice by time."""
        owners = [name for _ in range(10) for name in range(1000)]
        counts = np.bincount(one_row_per_user(owners) // 1000, minlength=10)
        assert counts.min() > 60
        assert counts.max() < 150

    @pytest.mark.parametrize("seed", range(40))
    def test_the_rows_of_one_user_change_one_row(self, seed):
        rng = random.Random(seed)
        names = ["ann", "Ann", "anna", 7, "8", "7.5", "08", "é", 2**53, 2**53 + 1]
        victim = rng.choice(names)
        others = [(name, (name, k)) for name in names for k in range(rng.randint(1, 4))]
        others = [row for row in others if row[0] != victim]
        rng.shuffle(others)
        found = []
        for _ in range(5):
            table = list(others)
            for k in range(rng.randint(1, 5)):
                table.insert(rng.randint(0, len(table)), (victim, ("victim", rng.random(), k)))
            usable = np.array([row[1][-1] != 1 for row in table])
            owners, values = zip(*table, strict=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnprotectedWarning)  # 8 and 08
                found.append(chosen(owners, values, usable=usable))
        places = [[i for i, row in enumerate(rows) if row[0] == victim] for rows in found]
        assert places == [places[0]] * 5
        assert len(places[0]) == 1
        for rows in found:
            assert len(rows) == len(names)
            del rows[places[0][0]]
        assert found == [found[0]] * 5

    def test_a_user_who_joins_changes_nobody_else(self):
        owners = ["c", "a", "c", "b", "a", "c"]
        assert [row for row in chosen([*owners, "aa", "aa"]) if row[0] != "aa"] == chosen(owners)

    def test_usable_rows_come_first(self):
        owners = ["a"] * 5 + ["b"] * 3
        usable = np.array([False, False, False, True, False] + [False] * 3)
        rows = one_row_per_user(owners, usable)
        assert rows[0] == 3
        assert rows[1] in (5, 6, 7)

    def test_names_are_those_of_clients(self):
        owners = ["é", "e\u0301", " é ", 7, 7.0, "7", b"7", "7 ", ("a", 7), ("a", 7.0), "x"]
        clients = PrivateClients.from_rows(np.arange(11.0), owners, max_examples_per_user=99)
        found = [owners[row] for row in one_row_per_user(owners)]
        assert clients.ids is not None
        assert list(map(_spelling, found)) == list(map(_spelling, clients.ids))
        assert len(found) == 4

    @pytest.mark.parametrize("missing", [None, "", "  ", np.nan, pandas.NA, pandas.NaT, ("a", "")])
    def test_rows_without_an_owner_are_refused(self, missing):
        with pytest.raises(ValueError, match=r"must have an owner, got 1 rows") as error:
            one_row_per_user(["a", missing, "b"])
        assert UNPROTECTED in str(error.value)

    def test_decimals_are_known_by_their_value(self):
        """One name with more digits gives all names of a column more of them."""
        names = ["7", "7.0", "7.00", "0.50", "0.5", "100", "1E+2", "-0", "0", "1e-30"]
        spelled = [_spelling(decimal.Decimal(name)) for name in names]
        assert spelled == ["7"] * 3 + ["0.5"] * 2 + ["100"] * 2 + ["0"] * 2 + [
            "0." + 29 * "0" + "1"
        ]
        assert _spelling(decimal.Decimal(7)) == _spelling(7) == _spelling(7.0) == "7"
        long = decimal.Decimal("9" * 76)
        assert _spelling(long) == "9" * 76
        assert len(one_row_per_user([decimal.Decimal("7"), decimal.Decimal("7.0"), 7])) == 1

    def test_words_for_missing_names_are_named(self):
        with pytest.warns(UnprotectedWarning, match="users named '<na>' and 'none'"):
            assert len(one_row_per_user(["None", "<NA>", "Bob"])) == 3

    def test_masked_names_are_refused(self):
        with pytest.raises(ValueError, match="must have an owner, got 1 rows"):
            one_row_per_user(np.ma.array([1, 2, 3], mask=[False, True, False]))

    def test_one_name_per_row_and_a_mask(self):
        for arguments in (([[1, 2]],), ([1, 2], [1.0, np.nan]), ([1, 2], [True])):
            with pytest.raises(ValueError, match="Pass one name per row"):
                one_row_per_user(np.array(arguments[0]), *arguments[1:])

    def test_one_number_in_two_ways_is_named(self):
        with pytest.warns(UnprotectedWarning, match="2 names are the same number as another"):
            assert len(one_row_per_user(["7", "7.0", "07", "x", "y"])) == 5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one_row_per_user(["7", "8.0", "x", "inf", "nan1", "infinity"])
            assert len(one_row_per_user(["9007199254740993", 9007199254740992, "1e400"])) == 3


ESTIMATORS = [
    getattr(module, name)
    for module in (estimators, nonlinear)
    for name in vars(module)
    if name.startswith("Private") and getattr(module, name).__module__ == module.__name__
]


def draw(rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    return x, (x[:, 0] - x[:, 1] + 0.1 * rng.normal(size=rows) > 0).astype(int)


@pytest.mark.filterwarnings("ignore:this is one of")
class TestTheUnitOfAnEstimator:
    @pytest.mark.parametrize("kind", ESTIMATORS, ids=lambda kind: kind.__name__)
    def test_it_is_stated_and_charged(self, kind):
        options = {"steps": 5} if "Network" in kind.__name__ else {}
        model = kind(1.0, 1e-5, unit="user", random_state=0, **options)
        ledger = Ledger(Adjacency.ZERO_OUT)
        model.fit(*draw(1000, 0), *draw(100, 1), spend=ledger)
        assert model.n_iter_ > 0
        assert model.privacy_.unit == "user"
        assert "every user" in model.privacy_.privacy_card()
        assert "one user each" in model.privacy_.statement()
        with pytest.raises(ValueError, match="a ledger that covers one user"):
            kind(1.0, 1e-5, **options).fit(*draw(1000, 0), *draw(100, 1), spend=ledger)

    def test_it_changes_no_number(self):
        found = [
            PrivateLinearRegression(unit=unit, random_state=0).fit(*draw(900, 0), *draw(80, 1))
            for unit in ("example", "user")
        ]
        np.testing.assert_array_equal(found[0].coef_, found[1].coef_)
        assert found[0].privacy_.epsilon == found[1].privacy_.epsilon
        assert found[0].privacy_.unit == "example"

    def test_other_units_are_refused(self):
        with pytest.raises(ValueError, match=r"unit must be one of \('example', 'user'\)"):
            PrivateLinearRegression(unit="person").fit(*draw(9, 0), *draw(9, 1))


class _Reached(Exception):
    """What an estimator would be fitted to."""


@pytest.fixture
def trained_on(monkeypatch):
    """Returns a function that gives the rows which `fit_files` trains on, and their targets."""

    class Estimator:
        def fit(self, features, target, *, counts, **others):
            del others
            raise _Reached(np.array(features), np.array(target), np.array(counts))

    monkeypatch.setattr(fitting, "_estimator", lambda *_, **options: Estimator())

    def rows(private, public, **options):
        options = {"target": "y", "task": "regression", "epsilon": 1.0, "user": "who", **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnprotectedWarning)
            with pytest.raises(_Reached) as reached:
                fit_files(private, public, **options)
        return reached.value.args

    return rows


def write(path, columns):
    if path.suffix == ".csv":
        tables.write_table(path, columns)
    else:
        pandas.DataFrame(columns).to_parquet(path)
    return path


def public_table(path, **columns):
    rng = np.random.default_rng(9)
    x = rng.normal(size=40)
    colour, y = ["red", "blue"] * 20, 2 * x + 0.3 * rng.normal(size=40)
    return write(path, {"x": x.tolist(), "colour": colour, "y": y.tolist(), **columns})


def visits(rng, names, most=4):
    """Rows of several users in any order."""
    rows = [
        {"who": name, "x": rng.random(), "colour": rng.choice(["red", "blue", "odd"]), "y": y}
        for name in names
        for y in (rng.choice([rng.random(), rng.random(), None]) for _ in range(most))
        if y is None or y > 0.2 or name == names[0]
    ]
    rng.shuffle(rows)
    return rows


def as_columns(rows, order=("who", "x", "colour", "y")):
    return {name: [row[name] for row in rows] for name in order}


def most_rows_of_one_user(path, odd):
    row = {"x": 0.1, "colour": "red", "y": 1.0}
    rows = [{"who": f"{number % 30}", **row} for number in range(60)]
    return write(path, as_columns(rows + [{"who": "vic", **row, **odd}] * 200))


def in_many_batches(monkeypatch):
    monkeypatch.setattr(tables, "_LEAST_PACKED", 0)
    monkeypatch.setattr(tables, "_PIECE_BYTES", 700)
    read = tables.read_batches
    monkeypatch.setattr(
        fitting, "read_batches", lambda *a, **options: read(*a, **options, batch_rows=7)
    )


class TestFilesOfVisits:
    NAMES = ("10", "9", "ann", "Ann", "é", "x, y", '"q"', "a b")

    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    @pytest.mark.parametrize("seed", range(6))
    def test_the_rows_of_one_user_change_one_row(
        self, trained_on, tmp_path, monkeypatch, suffix, seed
    ):
        """More or fewer rows, elsewhere, with or without a target, and columns in any order."""
        rng = random.Random(seed)
        if seed % 2:
            in_many_batches(monkeypatch)
        names = [f"{name}{k}" for name in self.NAMES for k in range(3)]
        rng.shuffle(names)
        victim, *_ = names
        others = [row for row in visits(rng, names) if row["who"] != victim]
        public = public_table(tmp_path / "public.csv")
        found = []
        for number in range(4):
            rows = list(others)
            for row in visits(rng, [victim], most=rng.randint(1, 6)):
                rows.insert(rng.randint(0, len(rows)), row)
            order = rng.sample(["who", "x", "colour", "y"], 4)
            private = write(tmp_path / f"{number}{suffix}", as_columns(rows, order))
            found.append(trained_on(private, public))
        present = {row["who"] for row in others} | {victim}
        for arrays in found:
            assert {len(array) for array in arrays} == {len(present)}
        differ = np.zeros(len(present), bool)
        for arrays in found[1:]:
            for one, other in zip(arrays, found[0], strict=True):
                differ |= (one != other).reshape(len(present), -1).any(axis=1)
        assert np.count_nonzero(differ) == 1
        place = sorted(present, key=lambda name: _name_order(name)).index(victim)
        assert differ[place]

    @pytest.mark.parametrize("seed", range(3))
    def test_however_the_file_is_read(self, trained_on, tmp_path, monkeypatch, seed):
        rng = random.Random(seed)
        rows = visits(rng, [f"{name}{k}" for name in self.NAMES for k in range(20)])
        public = public_table(tmp_path / "public.csv")
        paths = [write(tmp_path / f"a{kind}", as_columns(rows)) for kind in (".csv", ".parquet")]
        head, *lines = paths[0].read_text().splitlines()
        lines = [re.sub('^([^",]+),', r'  "\1",', line) for line in lines]
        assert any(line.startswith('  "9') for line in lines)
        paths.append(tmp_path / "blank.csv")
        paths[2].write_text("\n\n".join([head, *lines]))
        found = [trained_on(path, public) for path in paths]
        found += [trained_on(path, public, memory=100) for path in paths]
        in_many_batches(monkeypatch)
        found += [trained_on(path, public) for path in paths]
        for arrays in found[1:]:
            for one, other in zip(arrays, found[0], strict=True):
                np.testing.assert_array_equal(one, other)

    def test_rows_are_those_of_their_users(self, trained_on, tmp_path):
        """The feature tells the user."""
        names = [f"{k}" for k in range(300)]
        rng = np.random.default_rng(0)
        rows = [{"who": n, "x": int(n) / 300, "colour": "red", "y": int(n)} for n in names * 3]
        rng.shuffle(rows)
        private = write(tmp_path / "a.csv", as_columns(rows))
        public = public_table(tmp_path / "b.csv")
        _, target, counts = trained_on(private, public)
        np.testing.assert_array_equal(target, np.arange(300))
        assert counts.all()

    def test_a_user_without_a_target_contributes_nothing(self, trained_on, tmp_path):
        rows = [
            {"who": who, "x": 0.5, "colour": "red", "y": y}
            for who, y in (("a", 1.0), ("b", None), ("a", None), ("b", None), ("a", None))
        ]
        private = write(tmp_path / "a.csv", as_columns(rows))
        _, target, counts = trained_on(private, public_table(tmp_path / "b.csv"))
        assert counts.tolist() == [True, False]
        assert target[0] == 1.0

    @pytest.mark.parametrize("missing", ["", " ", "NA", "nan", "?", "NULL"])
    def test_rows_without_an_owner_are_refused(self, tmp_path, missing):
        rows = visits(random.Random(0), list("abc"))
        for number in (0, 3):
            rows[number]["who"] = missing
        private = write(tmp_path / "a.csv", as_columns(rows))
        public = public_table(tmp_path / "b.csv")
        with pytest.raises(TableError, match=r"a user in column 'who' for.*got 2 rows") as error:
            fit_files(private, public, target="y", task="regression", epsilon=1.0, user="who")
        assert UNPROTECTED in str(error.value)

    def test_names_in_a_csv_file_are_text(self, trained_on, tmp_path):
        """No cell decides how the names of others are read."""
        rows = visits(random.Random(0), ["7", "07", "7.0", "1e3", "1000", "2024-01-01", "true"])
        public = public_table(tmp_path / "b.csv")
        features, *_ = trained_on(write(tmp_path / "a.csv", as_columns(rows)), public)
        assert len(features) == 7
        further = (" 7 ", "odd ", "\xe9", "e\u0301")
        rows += [{"who": name, "x": 0.1, "colour": "red", "y": 1.0} for name in further]
        features, *_ = trained_on(write(tmp_path / "a.csv", as_columns(rows)), public)
        assert len(features) == 9

    def test_names_in_a_parquet_file(self, trained_on, tmp_path):
        pyarrow = pytest.importorskip("pyarrow")
        save = pytest.importorskip("pyarrow.parquet").write_table
        public = public_table(tmp_path / "b.csv")
        near = [2**60, 2**60 + 1, 2**60, 5]
        columns = {"x": [0.1, 0.2, 0.3, 0.4], "colour": ["red"] * 4, "y": [1.0, 2.0, 1.0, 4.0]}
        table = pyarrow.table(columns)
        kinds = [
            (pyarrow.array(near), 3),
            (pyarrow.array(near, pyarrow.uint64()).dictionary_encode(), 3),
            (pyarrow.array(near).cast(pyarrow.decimal128(20, 0)), 3),
            (pyarrow.array([7.0, 8.0, 7.0, 0.5]), 3),
            (pyarrow.array([7.0, 8.0, 7.0, 0.5], pyarrow.float32()), 3),
            (pyarrow.array(["7", "8", " 7", "x"]), 3),
            (pyarrow.array(["7", "8", "7", "x"], pyarrow.large_string()), 3),
        ]
        path = tmp_path / "a.parquet"
        for names, users in kinds:
            save(table.append_column("who", names), path)
            features, *_ = trained_on(path, public)
            assert len(features) == users, names.type
        for names in (
            pyarrow.array(near).cast(pyarrow.timestamp("us")),
            pyarrow.array([True, False, True, False]),
            pyarrow.array([[1], [2], [3], [4]]),
            pyarrow.array([2.0**53, 1.0, 2.0, 3.0]),
            pyarrow.array([2.0**24, 1.0, 2.0, 3.0], pyarrow.float32()),
        ):
            save(table.append_column("who", names), path)
            with pytest.raises(TableError, match="text or numbers that name the users") as error:
                fit_files(path, public, target="y", task="regression", epsilon=1.0, user="who")
            assert UNPROTECTED in str(error.value)
        save(table.append_column("who", pyarrow.array([1, None, 1, 2])), path)
        with pytest.raises(TableError, match=r"a user in column 'who' for.*got 1 rows"):
            fit_files(path, public, target="y", task="regression", epsilon=1.0, user="who")

    def test_one_decimal_does_not_rename_others(self, trained_on, tmp_path):
        pyarrow = pytest.importorskip("pyarrow")
        save = pytest.importorskip("pyarrow.parquet").write_table
        path, public = tmp_path / "a.parquet", public_table(tmp_path / "b.csv")
        names = [decimal.Decimal(number % 30) for number in range(90)]
        x = [number / 100 for number in range(90)]
        found = []
        for first in ("0", "0.0"):
            names[0] = decimal.Decimal(first)
            columns = {"who": pyarrow.array(names), "x": x, "colour": ["red"] * 90, "y": x}
            save(pyarrow.table(columns), path)
            found.append(trained_on(path, public)[1])
        assert len(found[0]) == 30
        np.testing.assert_array_equal(*found)

    @pytest.mark.parametrize("odd", [{"x": "odd"}, {"y": "odd"}])
    def test_one_user_with_most_rows_ends_no_fit(self, trained_on, tmp_path, odd):
        """What is refused follows from the chosen rows."""
        private = most_rows_of_one_user(tmp_path / "a.csv", odd)
        features, *_ = trained_on(private, public_table(tmp_path / "b.csv"))
        assert len(features) == 31

    @pytest.mark.filterwarnings("ignore:.*beyond the range of")
    def test_the_operator_is_told_of_the_chosen_rows(self, tmp_path):
        private = most_rows_of_one_user(tmp_path / "a.csv", {"x": 1e6})
        public = public_table(tmp_path / "b.csv")
        fitted = fit_files(private, public, target="y", task="regression", epsilon=1.0, user="who")
        assert fitted.unprotected_cells["x"].startswith("1 of 31 numbers beyond")

    def test_a_file_that_changes_while_it_is_read_is_refused(self, tmp_path, monkeypatch):
        rows = visits(random.Random(0), [f"{k}" for k in range(12)])
        private = write(tmp_path / "a.csv", as_columns(rows))
        read, count = tables.read_batches, 0

        def changing(path, **options):
            nonlocal count
            if path == private and (count := count + 1) == 2:
                write(private, as_columns(rows[::-1]))
            return read(path, **options)

        monkeypatch.setattr(fitting, "read_batches", changing)
        with pytest.raises(TableError, match="to stay as it is while it is read"):
            fit_files(
                private, public_table(tmp_path / "b.csv"),
                target="y", task="regression", epsilon=1.0, user="who",
            )  # fmt: skip

    def test_the_column_is_no_feature(self, trained_on, tmp_path):
        """Whoever the public rows belong to."""
        rows = visits(random.Random(0), [f"{k}" for k in range(12)])
        private = write(tmp_path / "a.csv", as_columns(rows))
        found = [
            trained_on(private, public_table(tmp_path / f"{number}.csv", **columns))
            for number, columns in enumerate(
                [{}, {"who": [k % 12 for k in range(40)]}, {"who": ["a", "b"] * 20}]
            )
        ]
        assert found[0][0].shape == (12, 3)
        for arrays in found[1:]:
            for one, other in zip(arrays, found[0], strict=True):
                np.testing.assert_array_equal(one, other)

    def test_public_and_test_rows_are_compared_with_all_private_rows(self, tmp_path):
        rng = random.Random(0)
        rows = [row for row in visits(rng, [f"{k}" for k in range(40)]) if row["y"] is not None]
        private = write(tmp_path / "a.csv", as_columns(rows))
        other = write(tmp_path / "b.csv", as_columns(rows[:60]))
        public = public_table(tmp_path / "c.csv")
        options = {"target": "y", "task": "regression", "epsilon": 1.0, "user": "who"}
        with pytest.raises(ValueError, match="public rows must be other rows than the private"):
            fit_files(private, other, **options)
        with pytest.raises(ValueError, match="test rows must be other rows than the private"):
            fit_files(private, public, test=other, **options)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"user": "wo"}, r"name the users in column 'wo'.*did you mean 'who'"),
            ({"user": "y"}, "a column of its own that names the users, got 'y'"),
            ({"user": "colour", "categorical": ["colour"]}, "a column of its own"),
        ],
    )
    def test_other_columns_are_refused(self, tmp_path, options, expected):
        private = write(tmp_path / "a.csv", as_columns(visits(random.Random(0), ["a", "b"])))
        public = public_table(tmp_path / "b.csv")
        with pytest.raises(TableError, match=expected):
            fit_files(private, public, target="y", task="regression", epsilon=1.0, **options)


@pytest.mark.filterwarnings("ignore:.*beyond the range of")
@pytest.mark.parametrize("user", ["who", None])
def test_a_user_moves_the_sum_by_at_most_the_clip_norm(tmp_path, monkeypatch, user):
    """Thirty rows of one user count as one with the option, and as thirty without it."""
    sums = []

    def noiseless(stream, clipped_sum):
        sums.append(clipped_sum / stream.l2_clip_norm)
        return clipped_sum

    def init(stream, mechanism, *_):
        stream.l2_clip_norm = mechanism.l2_clip_norm

    monkeypatch.setattr(descent.NoiseStream, "__init__", init)
    monkeypatch.setattr(descent.NoiseStream, "__call__", noiseless)
    others = [row for row in visits(random.Random(0), [f"{k}" for k in range(300)]) if row["y"]]
    public = public_table(tmp_path / "public.csv")
    first = []
    for y in (None, 1e6):
        rows = [*others, *({"who": "v", "x": 1.0, "colour": "red", "y": y} for _ in range(30))]
        private = write(tmp_path / "private.csv", as_columns(rows))
        options = {"target": "y", "task": "regression", "model": "linear", "epsilon": 9.0}
        sums.clear()
        fit_files(private, public, user=user, ignore=["who"], seed=0, **options)
        first.append(sums[0])
    moved = np.linalg.norm(first[1] - first[0])
    assert 0.99 < moved <= 1 if user else moved > 29


@pytest.fixture
def files(tmp_path):
    rng = random.Random(0)
    write(tmp_path / "private.csv", as_columns(visits(rng, [f"p{k}" for k in range(400)])))
    public_table(tmp_path / "public.csv")
    return tmp_path


def fit(files, *options, out="model", user=("--user", "who")):
    paths = [str(files / name) for name in ("private.csv", "public.csv", out)]
    arguments = ["fit", "--private", paths[0], "--public", paths[1], "--out", paths[2]]
    arguments += ["--target", "y", "--task", "regression", "--epsilon", "1"]
    return cli.main([*arguments, *user, *options])


@pytest.mark.filterwarnings("ignore:.*beyond the range of the public table")
@pytest.mark.filterwarnings("ignore:this is one of")
class TestTheCommand:
    def test_it_states_users(self, files, capsys):
        owners = tables.read_table(files / "private.csv").columns["who"]
        users = len(set(owners))
        assert users < len(owners)
        assert fit(files) == 0
        captured = capsys.readouterr()
        assert (
            "for every user, of whom one row was used; the number of users counts as public."
            in captured.out
        )
        assert "Left out: 'who', it names the users." in captured.out
        # How many rows there are is a secret of users, and so are the names.
        words = captured.out + "".join(path.read_text() for path in (files / "model").iterdir())
        assert str(len(owners)) not in words
        assert f"{len(owners):,} rows" not in captured.err
        assert not any(name in words for name in ("p17", "p391"))
        report = json.loads((files / "model" / "report.json").read_text())
        assert report["unit"] == "user"
        assert report["num_examples"] == users
        assert report["delta"] == default_delta(users)
        assert report["divisor"] == users
        assert report["charged_steps"] > 0
        card = (files / "model" / "privacy_card.md").read_text()
        assert "every user, with all of the user's rows together" in card
        assert cli.main(["report", str(files / "model"), "--html", str(files / "a.html")]) == 0
        assert "one user" in (files / "a.html").read_text()
        capsys.readouterr()
        assert fit(files, "--json", out="again") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["unit"] == "user"
        assert "who" not in result["features"]

    def test_how_many_rows_there_are_is_not_shown(self, files):
        noted = []

        @contextlib.contextmanager
        def stage(doing):
            noted.append(doing)
            yield noted.append

        for user, expected in ((None, True), ("who", False)):
            noted.clear()
            fit_files(
                files / "private.csv", files / "public.csv", target="y", task="regression",
                epsilon=1.0, user=user, stage=stage, ignore=["who"],
            )  # fmt: skip
            rows = len(tables.read_table(files / "private.csv"))
            assert any(f"{rows:,}" in words or str(rows) in words for words in noted) == expected

    def test_without_it_rows_are_protected(self, files, capsys):
        assert fit(files, user=("--ignore", "who")) == 0
        assert "for every private row; the number of rows" in capsys.readouterr().out
        report = json.loads((files / "model" / "report.json").read_text())
        assert report["unit"] == "example"
        assert report["num_examples"] == len(tables.read_table(files / "private.csv"))

    def test_a_delta_above_one_over_the_users_is_refused(self, files, capsys):
        users = len(set(tables.read_table(files / "private.csv").columns["who"]))
        assert fit(files, "--delta", str(1.01 / users)) == 2
        assert "delta" in capsys.readouterr().err
        assert fit(files, "--delta", str(0.99 / users)) == 0

    def test_the_default_delta_is_that_of_users(self, tmp_path):
        who = np.arange(20_000) % 300
        x = np.random.default_rng(0).random(20_000)
        columns = {"who": who, "x": x, "colour": ["red"] * 20_000, "y": x}
        private, public = write(tmp_path / "a.csv", columns), public_table(tmp_path / "b.csv")
        fitted = fit_files(private, public, target="y", task="regression", epsilon=1.0, user="who")
        assert fitted.report.delta == default_delta(300) == 1e-5 > default_delta(20_000)

    @pytest.mark.parametrize("model", ["linear", "trees", "network"])
    def test_a_budget_for_users(self, files, capsys, model):
        folder = str(files / "b")
        data = ["--data", str(files / "private.csv")]
        init = ["budget", "init", folder, "--epsilon", "3", "--delta", "1e-5", *data]
        assert cli.main([*init, "--unit", "user"]) == 0
        assert "(mirrordp fit --user)" in capsys.readouterr().out
        with Budget.open(folder) as budget:
            before = budget.ledger.position
        assert fit(files, "--budget", folder, user=("--ignore", "who")) == 2
        message = capsys.readouterr().err
        assert "a budget for rows" in message
        assert "got unit user" in message
        assert "add --user COLUMN" in message
        with Budget.open(folder) as budget:
            assert budget.ledger.position == before
        assert fit(files, "--budget", folder, "--model", model) == 0
        report = json.loads((files / "model" / "report.json").read_text())
        assert report["ledger"]["budget"]["runs"] == 1
        assert report["delta"] == 1e-5

    def test_a_budget_is_for_the_users_of_one_column(self, files, capsys):
        """What one user is under one column may be many under another."""
        private = pandas.read_csv(files / "private.csv", dtype=str)
        private["visit"] = [f"visit {number}" for number in range(len(private))]
        private.to_csv(files / "private.csv", index=False)
        folder, data = str(files / "b"), str(files / "private.csv")
        init = ["budget", "init", folder, "--epsilon", "3", "--delta", "1e-5", "--data", data]
        assert cli.main([*init, "--unit", "user"]) == 0
        other = ("--user", "visit", "--ignore", "who")
        assert fit(files, "--budget", folder, "--ignore", "visit") == 0
        assert "each 'who'" in (files / "model" / "privacy_card.md").read_text()
        shutil.rmtree(files / "model")
        assert fit(files, "--budget", folder, user=other) == 2
        assert "a ledger of those in column 'who' and a fit" in capsys.readouterr().err
        with Budget.open(folder) as budget:
            assert budget.status.runs == 1

    def test_a_budget_for_rows_is_refused(self, files, capsys):
        folder, data = str(files / "b"), str(files / "private.csv")
        init = ["budget", "init", folder, "--epsilon", "3", "--delta", "1e-5", "--data", data]
        assert cli.main(init) == 0
        capsys.readouterr()
        assert fit(files, "--budget", folder) == 2
        message = capsys.readouterr().err
        assert "a budget for users" in message
        assert "--unit user" in message
        assert not (files / "model").exists()

    def test_a_run_that_was_cut_off(self, files, capsys, monkeypatch):
        def killed(*_, **__):
            raise SystemExit(9)

        folder, data = str(files / "b"), str(files / "private.csv")
        init = ["budget", "init", folder, "--epsilon", "3", "--delta", "1e-5", "--data", data]
        assert cli.main([*init, "--unit", "user"]) == 0
        with monkeypatch.context() as patch:
            patch.setattr(fitting, "_scorers", killed)
            with pytest.raises(SystemExit):
                fit(files, "--budget", folder)
        assert fit(files, "--budget", folder, "--resume", user=("--ignore", "who")) == 2
        assert fit(files, "--budget", folder, "--resume", "--keep-checkpoint") == 0
        with Budget.open(folder) as budget:
            assert budget.status.runs == budget.status.charges == 1

    def test_other_users_are_another_run(self, files, capsys, monkeypatch):
        def killed(*_, **__):
            raise SystemExit(9)

        with monkeypatch.context() as patch:
            patch.setattr(fitting, "_scorers", killed)
            with pytest.raises(SystemExit):
                fit(files)
        text = (files / "private.csv").read_text()
        (files / "private.csv").write_text(text.replace("p7,", "p8,"))
        assert fit(files, "--resume") == 2
        assert "private data" in capsys.readouterr().err
        (files / "private.csv").write_text(text)
        assert fit(files, "--resume") == 0
