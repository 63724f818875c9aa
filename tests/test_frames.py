"""Data frames: what the estimators and `PublicEncoder` make of them, and what they refuse."""

import datetime
import io
import pickle
import re
import warnings
from concurrent import futures

import joblib
import numpy as np
import pandas
import polars
import pytest
from sklearn.base import BaseEstimator, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_transformer
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    StackingClassifier,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import cross_val_predict, permutation_test_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, Normalizer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from mirrordp.data import UNPROTECTED, UnprotectedWarning
from mirrordp.linear import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
)
from mirrordp.linear.descent import private_descent
from mirrordp.tables import PublicEncoder, TableError, learn_encoding, read_table
from mirrordp.tables.columns import positions
from mirrordp.tables.files import in_seconds, seconds_of
from mirrordp.tables.frames import needs_encoding, table_of
from tests import remembered

pytestmark = [
    pytest.mark.filterwarnings("ignore:this is one of [0-9]+ private fits:UserWarning"),
]


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)
    remembered.plans(monkeypatch)


def draw(rows, seed=0):
    """A frame of every kind of column, and a target that follows from all of them."""
    rng = np.random.default_rng(seed)
    size = rng.normal(10, 2, rows)
    colour = rng.choice(["red", "blue", "green"], rows)
    member = rng.random(rows) < 0.5
    when = np.datetime64("2023-01-01T00", "us") + rng.integers(0, 8760, rows) * np.timedelta64(
        1, "h"
    )
    code = rng.choice([101, 205, 310], rows)
    weekend = (when.astype("M8[D]").astype(int) + 3) % 7 >= 5
    y = size / 2 + 2 * (colour == "red") - member + weekend + 2 * (code == 205)
    frame = pandas.DataFrame(
        {
            "size": np.where(rng.random(rows) < 0.1, np.nan, size),
            "colour": pandas.Series(colour).where(rng.random(rows) > 0.1),
            "member": member,
            "when": when,
            "code": pandas.Categorical(code),
        }
    )
    return frame, y + 0.1 * rng.normal(size=rows)


def as_polars(frame):
    return polars.from_pandas(frame.astype({"code": str})).with_columns(
        polars.col("code").cast(polars.Categorical)
    )


def fitted(frame, y, public, y_public, estimator=None):
    estimator = estimator or PrivateLinearRegression(5.0, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        return estimator.fit(frame, y, public, y_public)


@pytest.mark.filterwarnings("ignore:column:UserWarning")
class TestEstimators:
    def test_frames_of_pandas_polars_and_arrow_are_the_same_rows(self):
        (x, y), (public, y_public), (test, y_test) = draw(800), draw(200, 1), draw(200, 2)
        first = fitted(x, y, public, y_public)
        assert first.score(test, y_test) > 0.9
        second = fitted(as_polars(x), y, as_polars(public), polars.Series(y_public))
        np.testing.assert_array_equal(first.coef_, second.coef_)
        third = fitted(as_polars(x).to_arrow(), y, as_polars(public).to_arrow(), y_public)
        np.testing.assert_array_equal(first.coef_, third.coef_)
        np.testing.assert_array_equal(first.predict(test), second.predict(as_polars(test)))
        assert first.feature_names_in_.tolist() == list(x.columns)
        assert first.n_features_in_ == 5
        assert first.coef_.shape == (len(first.encoding_.features),)
        assert {"colour=red", "member=true", "code=205"} < set(first.encoding_.features)

    def test_the_encoding_is_that_of_files(self, tmp_path):
        x, y = draw(200)
        path = tmp_path / "public.csv"
        x.assign(y=y).to_csv(path, index=False)
        # A file has no categorical type, and pandas writes True where Arrow writes true.
        path.write_text(path.read_text().replace("True", "true").replace("False", "false"))
        table = read_table(path)
        learned = learn_encoding(table, target="y", task="regression", categorical=["code"])
        encoder = PublicEncoder().fit(x)
        assert encoder.encoding_.columns == learned.encoding.columns
        np.testing.assert_array_equal(encoder.transform(x), learned.encoding.encode_features(table))

    @pytest.mark.parametrize("library", ["pandas", "polars"])
    def test_numbers_alone_are_not_encoded(self, library, monkeypatch):
        """Bit for bit: what the descent gets from a frame is what it gets from its numbers."""
        seen = []

        def record(family, theta, rows, mechanism, **options):
            seen.append(rows.features.tobytes())
            return private_descent(family, theta, rows, mechanism, **options)

        monkeypatch.setattr("mirrordp.linear.descent.private_descent", record)
        rng = np.random.default_rng(0)
        numbers = {"a": rng.normal(size=260), "b": rng.integers(9, size=260), "c": rng.random(260)}
        numbers["d"] = rng.random(260) < 0.5
        y = numbers["a"] + numbers["b"] + rng.normal(size=260)
        frame = pandas.DataFrame(numbers)
        array = frame.to_numpy(np.float64)
        rows = frame if library == "pandas" else polars.DataFrame(numbers)
        fits = [fitted(one[:200], y[:200], one[200:], y[200:]) for one in (array, rows)]
        assert fits[1].encoding_ is None
        assert fits[0].coef_.tobytes() == fits[1].coef_.tobytes()
        assert seen[0] == seen[1]

    def test_classes_and_counts(self):
        (x, y), (public, y_public), (test, y_test) = draw(800), draw(200, 1), draw(200, 2)
        labels = [np.where(target > 5, "high", "low") for target in (y, y_public, y_test)]
        model = PrivateLogisticRegression(5.0, random_state=0)
        fitted(x, pandas.Series(labels[0]), public, pandas.Series(labels[1]), model)
        assert model.score(test, labels[2]) > 0.8
        assert model.predict_proba(test).shape == (200, 2)
        counts = [np.round(np.abs(target)) for target in (y, y_public)]
        model = fitted(
            x, counts[0], public, counts[1], PrivatePoissonRegressor(5.0, random_state=0)
        )
        assert (model.predict(test) > 0).all()

    def test_columns_are_found_by_name(self):
        (x, y), (public, y_public), (test, _) = draw(300), draw(100, 1), draw(50, 2)
        first = fitted(x, y, public, y_public)
        second = fitted(x[x.columns[::-1]], y, public, y_public)
        np.testing.assert_array_equal(first.coef_, second.coef_)
        expected = first.predict(test)
        np.testing.assert_array_equal(first.predict(test[test.columns[::-1]]), expected)
        np.testing.assert_array_equal(first.predict(test.assign(more=1)), expected)
        with pytest.raises(TableError, match="expected column 'when' in 'X'"):
            first.predict(test.drop(columns="when"))
        with pytest.raises(ValueError, match="X must be a data frame with the columns 'size'"):
            first.predict(test.to_numpy())
        with pytest.warns(UnprotectedWarning) as caught:
            PrivateLinearRegression(5.0, random_state=0).fit(x.assign(more=1), y, public, y_public)
        assert any("'more' of X are not in X_public" in str(w.message) for w in caught)

    def test_columns_that_make_no_feature_are_named(self):
        (x, y), (public, y_public) = draw(300), draw(100, 1)
        x, public = (part.assign(id=[f"n{i}" for i in range(len(part))]) for part in (x, public))
        with pytest.warns(UserWarning, match=r"'id' \(no category is common enough"):
            PrivateLinearRegression(5.0, random_state=0).fit(x, y, public, y_public)

    def test_what_public_rows_do_not_cover_is_counted(self):
        (x, y), (public, y_public) = draw(300), draw(100, 1)
        x.loc[:2, "size"], x.loc[:4, "colour"] = 1000.0, "secret"
        with pytest.warns(UnprotectedWarning, match="column 'colour': 5 of") as caught:
            model = PrivateLinearRegression(5.0, random_state=0).fit(x, y, public, y_public)
        assert all(str(w.message).startswith(UNPROTECTED) for w in caught)
        assert not any("secret" in str(w.message) or "1000" in str(w.message) for w in caught)
        assert model.unprotected_cells_["colour"].endswith("treated as unknown")
        assert "moved to its ends" in model.unprotected_cells_["size"]
        assert "moved to its ends" not in str(model.privacy_.to_dict())
        stored = pickle.loads(pickle.dumps(model))
        assert stored.unprotected_cells_ == {}, "counts of private cells leave with no model"
        with pytest.warns(UserWarning, match="column 'colour': 5 of") as caught:
            predicted = model.predict(x)
        assert not any(UNPROTECTED in str(w.message) for w in caught)
        np.testing.assert_array_equal(stored.predict(x), predicted)

    def test_no_public_rows(self):
        x, y = draw(50)
        for frame in (x, as_polars(x)):
            for names in (["colour"], ["when"], ["code"], list(x.columns)):
                with pytest.raises(ValueError, match=r"Pass public rows .*PublicEncoder") as error:
                    PrivateLinearRegression().fit(frame[names], y)
                assert UNPROTECTED in str(error.value)
            with pytest.raises(ValueError, match="must be finite"):
                PrivateLinearRegression(row_norm_bound=1.0).fit(frame[["size"]], y)

    def test_public_numbers_and_private_text(self):
        """If the private frame could ask for an encoding, one row would change all others."""
        (x, y), (public, y_public) = draw(50), draw(60, 1)
        text = x[["colour"]].rename(columns={"colour": "member"})
        with pytest.raises(ValueError, match="X must hold numbers, got text") as error:
            PrivateLinearRegression().fit(text, y, public[["member"]], y_public)
        assert UNPROTECTED in str(error.value)
        with pytest.raises(ValueError, match="X_public must hold numbers as X does, got"):
            PrivateLinearRegression().fit(x[["member"]].to_numpy(), y, public, y_public)

    def test_codes_are_offered_as_categories(self):
        rng = np.random.default_rng(0)
        code = rng.choice([101, 205, 310, 417], 300)
        frame = pandas.DataFrame({"code": code, "colour": rng.choice(["a", "b"], 300)})
        y = np.where((code == 205) | (code == 417), 5.0, -5.0) + rng.normal(size=300)
        offer = r"column 'code' in 'X_public' may be codes: .* frame.astype\({'code': 'category'}\)"
        with pytest.warns(UserWarning, match=offer):
            fitted(frame[:200], y[:200], frame[200:], y[200:])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*may be codes")
            frame = frame.astype({"code": "category"})
            fitted(frame[:200], y[:200], frame[200:], y[200:])

    def test_no_column_varies(self):
        x, y = draw(50)
        with pytest.raises(ValueError, match="must have a column that varies"):
            PrivateLinearRegression().fit(x, y, x[["colour"]].assign(colour="red")[:20], y[:20])


ODD = ("text", None, True, 7, 0.1, -0.0, datetime.datetime(2024, 2, 1), datetime.date(2024, 2, 1))


@pytest.mark.parametrize("column", ["size", "colour", "member", "when"])
@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
def test_one_odd_cell_changes_no_other_row(column, odd):
    """pandas makes a column of objects of it; every other cell must still mean the same."""
    encoder = PublicEncoder().fit(draw(100, 1)[0])
    x, _ = draw(50)
    expected = encoder.transform(x)
    cells = x[column].tolist()
    cells[3] = odd
    found = encoder.transform(x.assign(**{column: pandas.Series(cells, dtype=object)}))
    np.testing.assert_array_equal(np.delete(found, 3, axis=0), np.delete(expected, 3, axis=0))
    inferred = encoder.transform(x.assign(**{column: pandas.Series(cells)}))
    np.testing.assert_array_equal(inferred, found)


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (("True", "False"), "maybe"),
        (("TRUE", "FALSE"), "maybe"),
        (("1.0", "2.0"), "A"),
        (("007", "08"), "A"),
        (("1e3", "2e3"), "A"),
        (("1234567890123456789", "17"), "A"),
        (("inf", "2.5", "3.5"), "A"),
    ],
)
@pytest.mark.parametrize("public_has_odd", [False, True])
@pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
def test_one_odd_cell_of_a_file_that_pandas_read_changes_no_other_row(usual, odd, public_has_odd):
    """pandas makes numbers, or true and false, of texts unless one cell is something else."""

    def read(*cells):
        frame = pandas.read_csv(io.StringIO("\n".join(["code", *cells])))
        return frame.assign(code=frame["code"].astype("category"))

    encoder = PublicEncoder().fit(read(*usual * 20, *[odd] * 20 * public_has_odd))
    if not public_has_odd and usual[0] in ("007", "1e3", "1234567890123456789"):
        # As text these may be names, or have been read with other separators.
        with pytest.raises(TableError, match="got text"):
            encoder.transform(read(*usual * 5, odd))
        return
    expected, found = (encoder.transform(read(*usual * 5, cell)) for cell in (usual[0], odd))
    np.testing.assert_array_equal(found[:-1], expected[:-1])
    assert len(np.unique(expected, axis=0)) == len(usual)


@pytest.mark.parametrize("missing", [False, True])
def test_an_integer_that_no_float_holds_is_rounded(missing):
    """Arrow refuses to, in words that quote it."""
    values = [1, None if missing else 2, 2**53 + 1]
    frame = pandas.DataFrame({"n": pandas.array(values, dtype="int64[pyarrow]")})
    (column,) = table_of(frame, "rows", private=True).table.columns.values()
    np.testing.assert_array_equal(column, [1.0, np.nan if missing else 2.0, 2.0**53])


@pytest.mark.parametrize("odd", [-(2**63), 86_400_000_005, None])
def test_a_time_of_arrow_that_is_none_in_python_changes_no_other_row(odd):
    import pyarrow as arrow

    times = arrow.array([22_603_000_001, 7, odd], arrow.time64("us"))
    for frame in (
        arrow.table({"t": times}),
        pandas.DataFrame({"t": pandas.Series(times, dtype=pandas.ArrowDtype(times.type))}),
    ):
        (column,) = table_of(frame, "rows", private=True).table.columns.values()
        expected = [22603.000001, 7e-6, np.nan if odd is None else odd / 1e6]
        np.testing.assert_array_equal(column, expected)


def test_numbers_cannot_stand_for_names_that_are_the_same_number():
    encoder = PublicEncoder().fit(pandas.DataFrame({"code": ["007", "7", "A"] * 20}))
    with pytest.raises(TableError, match=r"expected categories .*, got numbers in 5 of 5"):
        encoder.transform(pandas.DataFrame({"code": [7] * 5}))


EAST, WEST = (datetime.timezone(datetime.timedelta(hours=hours)) for hours in (5, -5))


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ([1.5, 2.5, -7.0], 1j),
        ([1.5, 2.5, -7.0], np.complex128(1j)),
        (list(np.array(["2023-05-01T07", "2024-02-03T11"], "M8[h]")), "text"),
        (list(np.array(["9999-12-31T23:59:59", "2023-05-01T07:00:00"], "M8[s]")), "text"),
        (list(np.array(["20000-01-01", "2023-05-01"], "M8[s]")), "text"),
        (pandas.Series(np.array(["20000-01-01", "2023-05-01"], "M8[s]")).tolist(), "text"),
        ([datetime.datetime(2023, 5, 1, 7)] * 3, datetime.datetime(1, 1, 1, tzinfo=EAST)),
        ([datetime.datetime(2023, 5, 1, 7)] * 3, datetime.datetime(9999, 12, 31, 23, tzinfo=WEST)),
        (list(np.array([1234567, 7654321], "m8[us]")), "text"),
        (list(np.array([1234567, 7654321], "m8[us]")), np.timedelta64(1, "Y")),
        (list(np.array([1234567, 7654321], "m8[us]")), np.timedelta64("NaT")),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
def test_numbers_and_times_of_numpy_mean_the_same_among_objects(usual, odd):
    public = {
        "c": [1.0, 2.0, 5.0] * 20,
        "f": [1.0, 2.0, 5.0] * 20,
        "M": pandas.date_range("2023-01-01T05", "2024-12-01", 60),
        "m": pandas.to_timedelta(np.arange(60), "s"),
    }
    kind = pandas.Series(usual).dtype.kind
    encoder = PublicEncoder().fit(pandas.DataFrame({"a": public[kind], "b": ["u", "v"] * 30}))
    column = pandas.Series([*usual, odd], dtype=complex if isinstance(odd, complex) else object)
    expected, found = (
        encoder.transform(pandas.DataFrame({"a": cells, "b": "u"}))
        for cells in (pandas.Series(usual), column)
    )
    np.testing.assert_array_equal(found[:-1], expected)


@pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
def test_numbers_among_texts_with_commas_are_numbers():
    public = pandas.DataFrame({"price": ["1,5", "2,5", "1.000", "7"]})
    encoder = PublicEncoder(decimal=",", thousands=".").fit(public)
    numbers = pandas.DataFrame({"price": [1.5, 2.5, 1000.0, 7.0]})
    np.testing.assert_array_equal(encoder.transform(numbers), encoder.transform(public))
    mixed = pandas.DataFrame({"price": [1.5, "2,5", "1.000", 7]})
    np.testing.assert_array_equal(encoder.transform(mixed), encoder.transform(public))


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ([1, 2], None),
        ([True, False], None),
        ([1.5, np.inf], None),
        (np.array([1, 2.5], object), None),
        ([1.5, np.nan], "missing values"),
        (np.array([1, None], object), "missing values"),
        (pandas.array([1, None], "Int64"), "missing values"),
        (["a", "b"], "text"),
        (np.array([1, "b"], object), "text"),
        (pandas.Categorical([1, 2]), "text"),
        (pandas.to_datetime(["2020-01-01", "2020-01-02"]), "dates or durations"),
    ],
)
def test_what_needs_an_encoding(column, what):
    assert needs_encoding(pandas.DataFrame({"a": column})) == what


def test_columns_of_the_same_name_and_of_lists():
    twice = pandas.DataFrame([[1, 2]], columns=[1, "1"])
    with pytest.raises(TableError, match="different column names"):
        table_of(twice, "X", private=True)
    lists = polars.DataFrame({"a": [[1], [2]], "b": ["x", "y"], "c": [1, 2]})
    encoder = PublicEncoder().fit(lists)
    assert encoder.left_out_["a"] == "it holds list, which no feature can be made of"
    assert encoder.get_feature_names_out().tolist() == ["c"]


@pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
class TestPublicEncoder:
    def test_scikit_learn(self):
        check_estimator(PublicEncoder(), on_skip=None)

    @pytest.mark.parametrize("library", ["pandas", "polars"])
    def test_output_frames(self, library):
        x, _ = draw(60)
        encoder = PublicEncoder(ignore=["when"]).set_output(transform=library).fit(x)
        found = encoder.transform(x)
        assert list(found.columns) == encoder.get_feature_names_out().tolist()
        assert not any("when" in name for name in found.columns)

    def test_inside_other_transformers(self):
        x, _ = draw(60)
        encoder = FrozenEstimator(PublicEncoder().fit(x[["colour", "code"]]))
        both = make_column_transformer((encoder, ["colour", "code"]), ("passthrough", ["member"]))
        found = both.fit(x).transform(x)
        assert found.shape == (60, encoder.transform(x).shape[1] + 1)
        names = both.get_feature_names_out().tolist()
        assert names[0] == "frozenestimator__colour=blue"

    @pytest.mark.filterwarnings("ignore:column:UserWarning")
    def test_in_a_pipeline(self):
        (x, y), (public, y_public), (test, y_test) = draw(800), draw(200, 1), draw(200, 2)
        encoder = PublicEncoder().fit(public)
        model = PrivateLinearRegression(5.0, random_state=0)
        pipeline = make_pipeline(FrozenEstimator(encoder), model)
        pipeline.fit(
            x,
            y,
            privatelinearregression__X_public=encoder.transform(public),
            privatelinearregression__y_public=y_public,
        )
        direct = fitted(x, y, public, y_public)
        assert pipeline.score(test, y_test) == pytest.approx(direct.score(test, y_test))

    def test_arrays_that_cannot_be_read_cell_by_cell(self):
        for kind in ("U3", "M8[D]", "m8[s]"):
            with pytest.raises(ValueError, match="Pass a data frame"):
                PublicEncoder().fit(np.zeros((3, 1)).astype(int).astype(kind))

    @pytest.mark.parametrize("odd", ["secret", b"secret", 1j, [1, 2], None], ids=repr)
    @pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
    def test_lists_are_read_cell_by_cell(self, odd):
        public, rows = ([[float(k), 0.1 * k] for k in range(n)] for n in (20, 6))
        encoder = PublicEncoder().fit(public)
        expected = encoder.transform(np.array(rows))
        np.testing.assert_array_equal(encoder.transform(rows), expected)
        rows[3][1] = odd
        found = encoder.transform(rows)
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(expected, 3, 0))

    @pytest.mark.parametrize("shape", [(8,), (4, 2)])
    def test_refused_rows_are_not_shown(self, shape):
        encoder = PublicEncoder().fit(np.arange(20.0).reshape(10, 2))
        rows = np.full(shape, 98765.0) * (1 if len(shape) == 1 else 1j)
        with pytest.raises(ValueError, match=r"Expected 2D|Complex") as error:
            encoder.transform(rows)
        assert UNPROTECTED in str(error.value)
        assert "98765" not in str(error.value)


def numbers(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)) * [1, 5, 20] + [0, 30, 100]
    return x, x @ [1.0, 0.2, 0.05] + rng.normal(size=rows)


class Elsewhere(BaseEstimator):
    """A model around another one that has a thread of its own do something with it."""

    def __init__(self, model, away):
        self.model = model
        self.away = away

    def fit(self, x, y):
        with futures.ThreadPoolExecutor(1) as thread:
            thread.submit(self.away, self.model).result()
        return self


class TestPrivateSteps:
    """A pipeline whose steps learn from private rows is refused, and no other."""

    def fit(self, *steps, scaled=lambda x: x):
        (x, y), (public, y_public) = numbers(200), numbers(60, 1)
        pipeline = make_pipeline(*steps, PrivateLinearRegression(5.0, random_state=0))
        return pipeline.fit(
            x,
            y,
            privatelinearregression__X_public=scaled(public),
            privatelinearregression__y_public=y_public,
        )

    @pytest.mark.parametrize(
        "step",
        [
            StandardScaler(),
            PCA(2),
            make_union(Normalizer(), StandardScaler()),
            ColumnTransformer([("scale", StandardScaler(), [0])], remainder="passthrough"),
            ColumnTransformer([("as it is", "passthrough", [0])], remainder=StandardScaler()),
            make_pipeline(FunctionTransformer(), StandardScaler()),
            PublicEncoder(),
        ],
        ids=lambda step: type(step).__name__,
    )
    def test_refused(self, step):
        with pytest.raises(ValueError, match=r"fitted its step .*FrozenEstimator\(step\)"):
            self.fit(step)
        with pytest.raises(ValueError, match="fitted its step"):
            make_pipeline(step, PrivateLinearRegression(row_norm_bound=1.0)).fit(*numbers(50))

    def test_a_pipeline_around_a_pipeline(self):
        inner = make_pipeline(FunctionTransformer(), PrivateLinearRegression(row_norm_bound=1.0))
        with pytest.raises(ValueError, match="fitted its step 'standardscaler'"):
            make_pipeline(StandardScaler(), inner).fit(*numbers(50))

    def test_targets(self):
        model = PrivateLinearRegression(row_norm_bound=1.0, random_state=0)
        with pytest.raises(ValueError, match="fitted its step 'transformer'"):
            TransformedTargetRegressor(model, transformer=StandardScaler()).fit(*numbers(50))
        TransformedTargetRegressor(model, func=np.arcsinh, inverse_func=np.sinh).fit(*numbers(50))

    def test_allowed(self):
        public, _ = numbers(60, 1)
        scaler = StandardScaler().fit(public)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprotectedWarning)
            self.fit()
            self.fit("passthrough", FunctionTransformer())
            self.fit(FunctionTransformer(np.arcsinh), scaled=np.arcsinh)
            self.fit(FrozenEstimator(scaler), scaled=scaler.transform)
            both = ColumnTransformer([("scale", FrozenEstimator(scaler), [0, 1, 2])])
            self.fit(both, scaled=scaler.transform)

    def test_a_search_around_a_pipeline_is_refused_as_well(self):
        from sklearn.model_selection import GridSearchCV

        model = make_pipeline(StandardScaler(), PrivateLinearRegression(row_norm_bound=1.0))
        search = GridSearchCV(model, {"standardscaler__with_std": [True]}, error_score="raise")
        with pytest.raises(ValueError, match="fitted its step 'standardscaler'"):
            search.fit(*numbers(50))

    def test_models_around_the_last_step_do_not_hide_it(self):
        from sklearn.model_selection import GridSearchCV

        model = PrivateLinearRegression(row_norm_bound=1.0)
        x, y = numbers(50)
        for outer in (
            MultiOutputRegressor(model),
            GridSearchCV(model, {"num_steps": [1]}, error_score="raise"),
        ):
            with pytest.raises(ValueError, match="fitted its step 'pca'"):
                make_pipeline(PCA(2), outer).fit(x, np.column_stack([y, y]))

    @pytest.mark.parametrize("way", [None, "threading", "loky"])
    @pytest.mark.parametrize(
        "outer",
        [
            lambda model, **jobs: VotingClassifier([("model", model)], **jobs),
            BaggingClassifier,
            OneVsRestClassifier,
            lambda model, **jobs: StackingClassifier([("model", model)], cv=2, **jobs),
            lambda model, **jobs: CalibratedClassifierCV(model, cv=2, **jobs),
        ],
    )
    def test_what_learns_beside_the_model(self, outer, way):
        """One private row with another label numbered the labels of all anew, for example."""
        model = PrivateLogisticRegression(row_norm_bound=1.0, classes=[0, 1, 2])
        x, y = numbers(50)
        jobs = {} if way is None else {"n_jobs": 2}
        # What other processes are sent is refused when it is made ready to be sent.
        with (
            joblib.parallel_config(way or "sequential"),
            pytest.raises((ValueError, pickle.PicklingError)) as error,
        ):
            outer(model, **jobs).fit(x, 1 + (y > np.median(y)))
        refused = error.value if way != "loky" else error.value.__cause__ or error.value
        assert re.search("which (numbers the labels|learns from the private)", str(refused))

    def test_what_chooses_rows_by_errors(self):
        with pytest.raises(ValueError, match="AdaBoostRegressor, which draws and weights rows"):
            AdaBoostRegressor(PrivateLinearRegression(row_norm_bound=1.0)).fit(*numbers(50))

    @pytest.mark.filterwarnings("ignore:.*have been fitted:UserWarning")
    def test_averages_of_models_are_allowed(self):
        model = PrivateLinearRegression(row_norm_bound=1.0)
        VotingRegressor([("a", model), ("b", clone(model))]).fit(*numbers(50))
        with pytest.raises(ValueError, match="BaggingRegressor, which draws rows"):
            BaggingRegressor(model).fit(*numbers(50))
        with pytest.raises(ValueError, match="permutation_test_score, which puts the target"):
            permutation_test_score(model, *numbers(50), cv=2, n_permutations=2)

    @pytest.mark.parametrize("jobs", [None, 2])
    def test_labels_numbered_for_probabilities(self, jobs):
        model = PrivateLogisticRegression(row_norm_bound=1.0, classes=[1, 2])
        x, y = numbers(60)
        labels = 1 + (y > np.median(y))
        with pytest.raises((ValueError, pickle.PicklingError)) as error:
            cross_val_predict(model, x, labels, method="predict_proba", n_jobs=jobs, cv=2)
        assert "cross_val_predict" in str(error.value.__cause__ or error.value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(cross_val_predict(model, x, labels, cv=2)) == 60

        class Other(LogisticRegression):
            def fit(self, x, y):
                pickle.dumps(model)
                return super().fit(x, y)

        # What happens to the rows of another model is no reason to refuse this one.
        assert len(cross_val_predict(Other(), x, labels, method="predict_proba", cv=2)) == 60

    @pytest.mark.parametrize("outer", [VotingRegressor, MultiOutputRegressor])
    def test_models_fitted_by_other_threads(self, outer):
        model = PrivateLinearRegression(row_norm_bound=1.0)
        several = outer([("model", model)] if outer is VotingRegressor else model, n_jobs=2)
        x, y = numbers(50)
        targets = np.column_stack([y, y]) if outer is MultiOutputRegressor else y
        with (
            joblib.parallel_config("threading"),
            pytest.raises(ValueError, match="fitted its step 'minmaxscaler'"),
        ):
            make_pipeline(MinMaxScaler(), several).fit(x, targets)

    @pytest.mark.parametrize("away", [pickle.dumps, clone])
    def test_models_fitted_by_other_processes(self, away):
        """They are copied and sent there, by any thread, while the pipeline is being fitted."""
        model = Elsewhere(PrivateLinearRegression(row_norm_bound=1.0), away)
        with pytest.raises(ValueError, match="fitted its step 'minmaxscaler'"):
            make_pipeline(MinMaxScaler(), model).fit(*numbers(50))
        copied = Elsewhere(clone(model.model), away)
        with pytest.raises(ValueError, match="fitted its step 'minmaxscaler'"):
            make_pipeline(MinMaxScaler(), copied).fit(*numbers(50))
        make_pipeline(FunctionTransformer(), model).fit(*numbers(50))
        held = Elsewhere(LinearRegression(), lambda _: away(model.model))
        held.somewhere = [model.model]
        with pytest.raises(ValueError, match="fitted its step 'minmaxscaler'"):
            make_pipeline(MinMaxScaler(), held).fit(*numbers(50))
        frozen = Elsewhere(FrozenEstimator(model.model), away)
        make_pipeline(MinMaxScaler(), frozen).fit(*numbers(50))
        # A pipeline of others is no reason to refuse this one.
        held = Elsewhere(LinearRegression(), lambda _: away(model.model))
        make_pipeline(MinMaxScaler(), held).fit(*numbers(50))

    @pytest.mark.filterwarnings("ignore:.*most private values:mirrordp.data.UnprotectedWarning")
    def test_rows_scaled_by_their_own_moments(self):
        (x, y), (public, y_public) = numbers(200), numbers(60, 1)
        scaler = StandardScaler().fit(x)
        for other in (public, scaler.transform(public)):
            with pytest.raises(ValueError, match=r"must not be scaled .* scaler\.fit") as error:
                PrivateLinearRegression(5.0).fit(scaler.transform(x), y, other, y_public)
            assert UNPROTECTED in str(error.value)

    def test_rows_scaled_by_public_or_all_rows_or_balanced_by_design(self):
        (x, y), (public, y_public) = numbers(200), numbers(60, 1)
        for seen in (public, np.concatenate([x, public])):
            scaler = StandardScaler().fit(seen)
            PrivateLinearRegression(5.0, random_state=0).fit(
                scaler.transform(x), y, scaler.transform(public), y_public
            )
        signs = np.tile([[1.0, -1], [-1, 1], [1, 1], [-1, -1]], (50, 1))
        PrivateLinearRegression(5.0, random_state=0).fit(signs, y, signs[:60], y_public)


def private_after_public(public, private):
    """What an encoder that has seen public cells makes of private ones of a column."""
    encoder = PublicEncoder().fit(pandas.DataFrame({"c": public, "x": range(len(public))}))
    rows = pandas.DataFrame({"c": private, "x": range(len(private))})
    return encoder.transform(rows)[:, :-1]


NUMBERS = [1500, 2000, 2500] * 20
DATES = [f"2024-0{1 + i % 3}-01 {i % 10}:30" for i in range(60)]
LEFT_AS_TEXT = {
    "thousands": (NUMBERS, ["1.500", "2.000", "k.A."]),
    "dates": (pandas.to_datetime(pandas.Series(DATES), format="%Y-%m-%d %H:%M"), [*DATES[:3], "-"]),
    "true": ([True, False] * 30, ["yes", "no", "maybe"]),
    "true, with a gap": ([True, False, None] * 20, ["yes", "no", "maybe"]),
    "categories": (pandas.Categorical(NUMBERS), ["1.500", "2.000", "k.A."]),
    "mixed": (NUMBERS, [1500, "2.000", 2500]),
    "true alone": ([True, False] * 30, ["yes", "yes", "?"]),
    "other numbers": (pandas.Categorical([1, 1000, 2000] * 20), ["1.000", "2.000", "k.A."]),
    "codes": (pandas.Categorical([7, 8, 9] * 20), ["007", "008", "A"]),
}
US = ["05/31/2024", "06/30/2024"]
TYPED = pandas.to_datetime(["2024-05-31", "2024-06-30", "2024-05-31"])
LEFT_AS_VALUES = {
    "true beside a word": (["yes", "no", "true"] * 20, [True, False, True]),
    "dates beside a number": ([*US, "0"] * 20, TYPED),
    "dates beside another": ([*US, "2024-05-31"] * 20, TYPED),
    "dates of another format": (["13/05/2024", "01/06/2024", "25/12/2024"] * 20, TYPED),
    "true": (["yes", "no", "maybe"] * 20, [True, False, True]),
    "numbers": (["1,500", "2,500", "abc"] * 20, [1500, 2500, 1500]),
    "dates": (
        ["31.05.2024", "30.06.2024", "-"] * 20,
        pandas.to_datetime(DATES[:3], format="mixed"),
    ),
}


@pytest.mark.parametrize("name", LEFT_AS_TEXT)
def test_text_in_place_of_values_is_refused(name):
    """pandas leaves a column as text for one cell, and forgets what it was told of the others."""
    public, private = LEFT_AS_TEXT[name]
    with pytest.raises(TableError, match="as in the public table, got text") as error:
        private_after_public(public, private)
    assert UNPROTECTED in str(error.value)
    x = pandas.DataFrame({"c": public, "k": ["a", "b"] * 30})
    rows = pandas.DataFrame({"c": private, "k": ["a"] * len(private)})
    with pytest.raises(TableError, match="got text"):
        PrivateLinearRegression().fit(rows, np.arange(len(rows)), x, np.arange(60))


@pytest.mark.parametrize("name", LEFT_AS_VALUES)
def test_values_that_public_text_does_not_name_are_refused(name):
    """The reverse: an odd public cell left the public column as text, and none the private one."""
    public, private = LEFT_AS_VALUES[name]
    with pytest.raises(TableError, match=r"expected text in column 'c'.*got values"):
        private_after_public(public, private)


@pytest.mark.parametrize(
    ("public", "private"),
    [
        (["A", "7", "8"] * 20, [7, 8, 9]),
        (["True", "False", "unknown"] * 20, [True, False, True]),
        (["2024-05-31", "2024-06-30", "-"] * 20, pandas.to_datetime(["2024-05-31"] * 3)),
        (["2024-05-31", "2024-06-30", "-"] * 20, [datetime.date(2024, 5, 31)] * 3),
        ([True, False] * 30, [True, "maybe", "maybe"]),
        (NUMBERS, [1500, "unknown", 2500]),
        ([True, False] * 30, [True, "maybe", False]),
        ([True, False] * 30, ["True", "maybe", "False"]),
        (["1500", "2000", "2500"] * 20, ["1500", "k.A.", "2500"]),
        (pandas.Categorical(NUMBERS), ["1500", "k.A.", "2500"]),
    ],
)
@pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
def test_single_odd_cells_are_not_refused(public, private):
    assert len(private_after_public(public, private)) == 3


@pytest.mark.parametrize("unit", ["ms", "us", "ns", "ps"])
def test_durations_do_not_depend_on_the_unit_of_their_column(unit):
    """One cell with nanoseconds has a whole column counted in them."""
    rng = np.random.default_rng(0)
    counts = np.r_[rng.integers(-(10**12), 10**12, 2000), rng.integers(-(10**6), 10**6, 100)]
    durations = counts.astype("m8[ms]") if unit != "ps" else (counts // 10**6).astype("m8[ms]")
    expected = in_seconds(durations)
    assert (in_seconds(durations.astype(f"m8[{unit}]")) == expected).all()
    one_by_one = [seconds_of(cell) for cell in durations.tolist()]
    assert (np.array(one_by_one) == expected).all()
    np.testing.assert_allclose(expected, durations / np.timedelta64(1, "s"), rtol=1e-15)


def test_gaps_in_durations_are_missing():
    assert np.isnan(in_seconds(np.array(["NaT", 3], "m8[ns]"))).tolist() == [True, False]


@pytest.mark.parametrize(
    ("labels", "other"),
    [
        (["2024-05-31", "2024-06-30"], ["2024-05-31 00:00:00", "2024-06-30T00:00:00"]),
        (["1 days", "2 days"], ["1 days 00:00:00", "2 days 00:00:00.000000"]),
        (["-1 days +23:00:00", "0 days"], ["-1 days +23:00:00.000", "0 days 00:00:00"]),
    ],
)
def test_categories_are_known_by_their_date_or_duration(labels, other):
    """pandas writes 2024-05-31 and 1 days with a time if one cell of the column has one."""
    assert positions(labels, labels) == positions(labels, other) == [0, 1]
    assert positions([*labels, *other], [*labels, *other]) == [0, 1, 2, 3]
    assert positions(labels, ["2024-05-31 00:00:01", "3 days", "1 day late"]) == [-1, -1, -1]


def test_frames_that_are_none_of_use_say_so():
    twice = pandas.DataFrame(np.zeros((5, 3)), columns=list("aab"))
    lazy = polars.LazyFrame({"a": [1.0, 2.0]})
    for rows, message in ((twice, "different column names"), (lazy, "lazy one; collect it")):
        for model in (PublicEncoder(), PrivateLinearRegression(row_norm_bound=1.0)):
            with pytest.raises(TableError, match=message):
                model.fit(rows, np.zeros(5))
