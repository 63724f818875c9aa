"""Weights, sparse rows, several outputs and ordered classes of the estimators."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sparse
from sklearn.linear_model import LinearRegression, LogisticRegression

import mirrordp
from mirrordp.data import UNPROTECTED, UnprotectedWarning
from mirrordp.linear import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateOrdinalRegression,
    PrivatePoissonRegressor,
    tuning,
)
from mirrordp.linear._planning import Scaling
from mirrordp.linear.descent import ClippedSum, Rows, SparseRows
from mirrordp.mirror.families import (
    CUMULATIVE,
    LOGISTIC,
    MULTINOMIAL,
    POISSON,
    SQUARED_ERROR,
    ordered_probabilities,
)
from tests import remembered

pytestmark = pytest.mark.filterwarnings("ignore:this is one of [0-9]+ private fits:UserWarning")
FAMILIES = {
    family.name: family for family in (SQUARED_ERROR, LOGISTIC, MULTINOMIAL, POISSON, CUMULATIVE)
}
PLENTY = 1e4
"""An ε at which noise does not matter, to compare with what is known without it."""


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)
    remembered.plans(monkeypatch)


def rows_of(family, rows=40, width=4, seed=0):
    rng = np.random.default_rng(seed)
    outputs = {"squared error": 2, "multinomial": 3, "cumulative": 3}.get(family.name, 1)
    features, theta = rng.normal(size=(rows, width)), rng.normal(size=(width, outputs))
    targets = {
        "squared error": lambda: rng.normal(size=(rows, outputs)),
        "logistic": lambda: rng.integers(2, size=(rows, 1)),
        "multinomial": lambda: np.eye(3)[rng.integers(3, size=rows)],
        "Poisson": lambda: rng.poisson(1.0, size=(rows, 1)),
        "cumulative": lambda: rng.integers(4, size=(rows, 1)) > np.arange(3),
    }[family.name]()
    return features, np.asarray(targets, float), theta


class TestClippedSum:
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("l2_clip_norm", [0.3, 1e3])
    @pytest.mark.usefixtures("nothing_reserved")
    def test_weights_and_outputs_equal_the_general_clipped_gradient(self, name, l2_clip_norm):
        family = FAMILIES[name]
        features, targets, theta = rows_of(family)
        weights = np.random.default_rng(1).exponential(size=len(features))

        def loss(theta, example):
            scores = (example["u"] @ theta)[None]
            return example["w"] * family.loss(scores, example["y"][None])[0]

        with jax.enable_x64(True):
            expected = mirrordp.clipped_grad(loss, l2_clip_norm=l2_clip_norm)(
                jnp.asarray(theta),
                {"u": features, "y": targets, "w": weights},
                jnp.zeros(len(features), bool),
            )
        found = ClippedSum(family, l2_clip_norm)(theta, Rows(features, targets, weights=weights))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("weight", [0.0, 1e-300, 1.0, 1e10, 1e300])
    def test_a_row_of_any_weight_moves_the_sum_by_at_most_the_clip_norm(self, name, weight):
        features, targets, theta = rows_of(FAMILIES[name])
        weights = np.ones(len(features))
        weights[3] = weight
        clipped_sum = ClippedSum(FAMILIES[name], 0.1)
        with_row = clipped_sum(theta, Rows(features, targets, weights=weights))
        others = np.arange(len(features)) != 3
        without = clipped_sum(theta, Rows(features, targets, others, weights))
        moved = np.linalg.norm(with_row - without)
        assert moved <= 0.1 * (1 + 1e-9)
        assert moved == pytest.approx({0.0: 0, 1e-300: 0, 1e300: 0}.get(weight, 0.1), rel=1e-3)

    @pytest.mark.parametrize("width", [4, 4000])
    def test_sparse_rows_are_the_rows(self, width):
        rng = np.random.default_rng(0)
        matrix = sparse.random_array(
            (5000, width), density=min(8 / width, 0.5), rng=rng, format="csr"
        )
        targets, theta = rng.normal(size=(5000, 1)), rng.normal(size=(width, 1))
        weights, counts = rng.random(5000), rng.random(5000) < 0.9
        lazy = SparseRows(matrix, lambda x: x * 2 - 0.1, targets, counts, weights)
        found = ClippedSum(SQUARED_ERROR, 0.5)(theta, lazy)
        dense = Rows(matrix.toarray() * 2 - 0.1, targets, counts, weights)
        np.testing.assert_allclose(
            found, ClippedSum(SQUARED_ERROR, 0.5)(theta, dense), rtol=1e-9, atol=1e-9
        )
        assert max(block.features.nbytes for block in lazy.blocks()) <= 2**26
        found = ClippedSum(SQUARED_ERROR, 0.5)(theta, Rows(matrix, targets, counts, weights))
        dense = Rows(matrix.toarray(), targets, counts, weights)
        np.testing.assert_allclose(
            found, ClippedSum(SQUARED_ERROR, 0.5)(theta, dense), rtol=1e-9, atol=1e-9
        )

    def test_a_sparse_row_that_overflows_contributes_zero(self):
        features, targets, theta = rows_of(SQUARED_ERROR)
        expected = ClippedSum(SQUARED_ERROR, 0.5)(
            theta, Rows(features, targets, np.arange(len(features)) != 3)
        )
        for value in (np.inf, np.nan, 1e200):
            features[3, 1] = value
            found = ClippedSum(SQUARED_ERROR, 0.5)(theta, Rows(sparse.csr_array(features), targets))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_public_rows_repeat_them(name):
    """A row of weight two is two rows, to the objective, its minimum and its curvature."""
    features, targets, _ = rows_of(FAMILIES[name], rows=60)
    times = np.random.default_rng(2).integers(1, 4, 60)

    def objective(rows):
        return tuning.PublicObjective(
            FAMILIES[name], rows, np.full(4, 0.1), np.zeros((4, targets.shape[1]))
        )

    repeated = Rows(np.repeat(features, times, axis=0), np.repeat(targets, times, axis=0))
    weighted = Rows(features, targets, weights=times / times.mean())
    one, other = objective(repeated), objective(weighted)
    np.testing.assert_allclose(one.minimizer, other.minimizer, atol=1e-5)
    np.testing.assert_allclose(one.hessian, other.hessian, atol=1e-5)


def draw(rows, seed=0, classes=2):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)) * [1, 2, 3] + [0, 1, 2]
    score = x @ [1.0, -0.5, 0.3] + rng.logistic(size=rows)
    return x, np.digitize(score, np.linspace(-1, 2, classes - 1))


class TestWeights:
    def fit(self, model, weights=None, public_weights=None, rows=400):
        (x, y), (public, y_public) = draw(rows), draw(100, 1)
        return model.fit(
            x, y, public, y_public, sample_weight=weights, sample_weight_public=public_weights
        )

    @pytest.mark.parametrize(
        "model", [PrivateLinearRegression, PrivateLogisticRegression, PrivatePoissonRegressor]
    )
    def test_zero_is_a_row_that_does_not_count(self, model):
        (x, y), (public, y_public) = draw(400), draw(100, 1)
        counts = np.arange(400) % 3 > 0
        fits = [
            model(5.0, random_state=0).fit(x, y, public, y_public, **options)
            for options in ({"sample_weight": counts.astype(float)}, {"counts": counts})
        ]
        np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
        assert fits[0].privacy_.epsilon == fits[1].privacy_.epsilon

    def test_a_weight_that_overflows_is_a_row_that_does_not_count(self):
        found = []
        for weight in (0.0, 1e308):
            weights = np.where(np.arange(400) == 7, weight, 1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                model = PrivateLinearRegression(random_state=0)
                found.append(self.fit(model, weights, np.full(100, 1e-8)).coef_)
        np.testing.assert_array_equal(*found)

    def test_they_move_the_model_as_without_privacy(self):
        (x, y), (public, y_public) = draw(4000), draw(400, 1)
        weights, public_weights = (10.0 * (rows[:, 0] > 0) + 1 for rows in (x, public))
        model = PrivateLogisticRegression(PLENTY, random_state=0).fit(
            x, y, public, y_public, sample_weight=weights, sample_weight_public=public_weights
        )
        oracle = LogisticRegression(C=1e6).fit(x, y, sample_weight=weights)
        np.testing.assert_allclose(model.coef_, oracle.coef_, atol=0.1)

    def test_the_unit_of_weights_is_that_of_public_ones(self):
        rng = np.random.default_rng(0)
        weights, public_weights = rng.random(400), rng.random(100)
        fits = [
            self.fit(
                PrivateLogisticRegression(5.0, random_state=0), c * weights, c * public_weights
            )
            for c in (1.0, 1024.0)
        ]
        np.testing.assert_allclose(fits[0].coef_, fits[1].coef_, rtol=1e-9)

    @pytest.mark.parametrize(
        ("weights", "words"),
        [
            (np.ones(399), "must have shape"),
            (np.ones((400, 1)), "must have shape"),
            (-np.ones(400), "at least 0, got 400 negative"),
            (np.full(400, np.nan), "must be finite"),
            (["a"] * 400, "must hold numbers"),
            (np.zeros(400), "non-zero"),
        ],
    )
    def test_mistakes(self, weights, words):
        with pytest.raises(ValueError, match=words) as error:
            self.fit(PrivateLinearRegression(), weights)
        assert (UNPROTECTED in str(error.value)) == ("shape" not in words)

    def test_public_weights_need_public_rows(self):
        with pytest.raises(ValueError, match="goes with X_public"):
            PrivateLinearRegression(row_norm_bound=1.0).fit(
                *draw(50), sample_weight_public=np.ones(50)
            )

    @pytest.mark.parametrize("text", ["1.500", "two"])
    def test_text_among_weights_is_refused(self, text):
        """A program may have left all of them as text for one: 1.500 was to be read as 1500."""
        weights = [1.0] * 49 + [text]
        for given in (weights, np.array(weights, object), np.array(weights, str)):
            with pytest.raises(ValueError, match="sample_weight must hold numbers") as error:
                PrivateLinearRegression(row_norm_bound=1.0).fit(*draw(50), sample_weight=given)
            assert UNPROTECTED in str(error.value)


class TestClassWeights:
    def test_balanced_by_public_rows_alone(self):
        (x, y), (public, y_public) = draw(1000), draw(200, 1)
        rare = np.flatnonzero(y_public == 1)[:-20]
        public, y_public = np.delete(public, rare, axis=0), np.delete(y_public, rare)
        shares = np.bincount(y_public) + 0.5
        expected = dict(enumerate(shares.sum() / (2 * shares)))
        fits = [
            PrivateLogisticRegression(5.0, class_weight=weight, random_state=0).fit(
                x, y, public, y_public
            )
            for weight in ("balanced", expected, None)
        ]
        np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
        assert fits[0].predict(public).mean() > fits[2].predict(public).mean()
        assert "class_weight" in fits[0].privacy_.tuning

    def test_labels_that_are_text(self):
        (x, y), (public, y_public) = draw(300), draw(100, 1)
        names = np.array(["no", "yes"])
        fits = [
            PrivateLogisticRegression(5.0, class_weight=weight, random_state=0).fit(
                x, labels, public, public_labels
            )
            for weight, labels, public_labels in (
                ({"yes": 3.0}, names[y], names[y_public]),
                ({1: 3.0, 0: 1.0}, y, y_public),
            )
        ]
        np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)

    @pytest.mark.parametrize(
        ("weight", "words"),
        [
            ({7: 1.0}, r"labels among the classes \[0, 1\], got \[7\]"),
            ({1: -1.0}, "class_weight"),
            ("even", "'balanced' or a dictionary"),
        ],
    )
    def test_mistakes(self, weight, words):
        (x, y), (public, y_public) = draw(100), draw(60, 1)
        with pytest.raises(ValueError, match=words):
            PrivateLogisticRegression(class_weight=weight).fit(x, y, public, y_public)

    def test_private_shares_of_classes_are_not_used(self):
        with pytest.raises(ValueError, match="'balanced' needs public rows"):
            PrivateLogisticRegression(class_weight="balanced", row_norm_bound=1.0).fit(*draw(50))


class TestSparse:
    @pytest.mark.parametrize("make", [sparse.csr_array, sparse.csr_matrix, sparse.coo_array])
    def test_is_the_same_as_dense(self, make):
        (x, y), (public, y_public) = draw(300), draw(100, 1)
        x, public = np.where(np.abs(x) < 1, 0, x), np.where(np.abs(public) < 1, 0, public)
        dense = PrivateLogisticRegression(5.0, random_state=0).fit(x, y, public, y_public)
        found = PrivateLogisticRegression(5.0, random_state=0).fit(
            make(x), y, make(public), y_public
        )
        np.testing.assert_array_equal(found.coef_, dense.coef_)
        np.testing.assert_allclose(found.predict_proba(make(x)), dense.predict_proba(x))

    @pytest.mark.parametrize("row_norm_bound", [None, 3.0])
    @pytest.mark.parametrize("fit_intercept", [True, False])
    def test_rows_that_stay_sparse_are_scaled_like_dense_ones(self, row_norm_bound, fit_intercept):
        x, _ = draw(30)
        scaling = Scaling.of(
            x, intercept=fit_intercept, row_norm_bound=row_norm_bound, stays_sparse=True
        )
        basis = 0.3 * np.eye(3 + fit_intercept)
        for each in (scaling, dataclasses.replace(scaling, basis=basis)):
            np.testing.assert_allclose(each.sparsely(sparse.csr_array(x)).toarray(), each(x))
        turned = dataclasses.replace(scaling, basis=basis + 0.1)
        assert turned.sparsely(sparse.csr_array(x)) is None

    def test_rows_that_stay_sparse_find_the_same_model(self):
        (x, y), (public, y_public) = draw(3000), draw(300, 1)
        model = PrivateLogisticRegression(PLENTY, method="dpsgd", random_state=0)
        model.fit(sparse.csr_array(x), y, sparse.csr_array(public), y_public)
        oracle = LogisticRegression(C=1e6).fit(x, y)
        np.testing.assert_allclose(model.coef_, oracle.coef_, atol=0.1)

    def test_copies_of_public_rows_and_other_units_are_noticed(self):
        (x, y), (public, y_public) = draw(300), draw(100, 1)
        x[:5], y[:5] = public[:5], y_public[:5]
        fits = []
        for make in (np.asarray, sparse.csr_array):
            with pytest.warns(UnprotectedWarning, match="5 private rows equal a public row"):
                fits.append(
                    PrivateLogisticRegression(5.0, random_state=0).fit(make(x), y, public, y_public)
                )
        np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
        with pytest.warns(UnprotectedWarning, match="beyond .* in column 1"):
            PrivateLogisticRegression(5.0, random_state=0).fit(
                sparse.csr_array(x + np.array([0, 100, 0])), y, public, y_public
            )
        with pytest.warns(UnprotectedWarning, match="beyond .* in column 1"):
            PrivateLogisticRegression(5.0, random_state=0).fit(
                sparse.csr_array(x * [1, 0, 1]), y, public + np.array([0, 100, 0]), y_public
            )

    def test_many_features_stay_sparse(self, monkeypatch):
        rng = np.random.default_rng(0)
        x = sparse.random_array((900, 300), density=0.01, rng=rng, format="csr")
        y, seen = np.asarray(x.sum(axis=1)) + 0.1 * rng.normal(size=900), []
        honest = ClippedSum._grains
        monkeypatch.setattr(
            ClippedSum,
            "_grains",
            lambda self, theta, rows: seen.append(rows.features) or honest(self, theta, rows),
        )
        model = PrivateLinearRegression(5.0, num_steps=2, learning_rate=0.1, random_state=0)
        model.fit(x, y, x[:50] * 1.5, y[:50] * 1.5)
        assert len(seen) == 2
        assert all(sparse.issparse(features) for features in seen)
        assert model.privacy_.results["method"] == "warm DP-SGD"

    def test_gaps_are_refused(self):
        x, y = draw(50)
        x[3, 1] = np.nan
        with pytest.raises(ValueError, match="X must be finite, got 1 values") as error:
            PrivateLogisticRegression(row_norm_bound=1.0).fit(sparse.csr_array(x), y)
        assert UNPROTECTED in str(error.value)


class TestSeveralOutputs:
    def rows(self, rows, seed=0):
        x, _ = draw(rows, seed)
        noise = np.random.default_rng(seed + 10).normal(size=(rows, 2))
        return x, x @ [[1.0, 0], [2, -1], [0, 3]] * [1, 100] + noise + [5, -700]

    def test_one_fit_for_all(self):
        (x, y), (public, y_public) = self.rows(1000), self.rows(200, 1)
        model = PrivateLinearRegression(PLENTY, random_state=0).fit(x, y, public, y_public)
        oracle = LinearRegression().fit(x, y)
        np.testing.assert_allclose(model.coef_, oracle.coef_, rtol=0.02, atol=0.05)
        np.testing.assert_allclose(model.intercept_, oracle.intercept_, rtol=0.02)
        assert model.predict(x).shape == (1000, 2)
        assert model.score(x, y) > 0.9
        listed = PrivateLinearRegression(PLENTY, random_state=0)
        listed.fit(x.tolist(), y.tolist(), public, y_public)
        np.testing.assert_array_equal(listed.coef_, model.coef_)

    def test_outputs_are_clipped_together(self, monkeypatch):
        """One row of all targets moves the sum of all outputs by at most C, not by C for each."""
        (x, y), (public, y_public) = self.rows(100), self.rows(60, 1)
        seen = []
        honest = ClippedSum.__call__
        monkeypatch.setattr(
            ClippedSum,
            "__call__",
            lambda self, theta, rows: (
                seen.append((self, rows, found := honest(self, theta, rows))) or found
            ),
        )
        for value in (0.0, 1e9):
            changed = y.copy()
            changed[3] = value
            PrivateLinearRegression(
                num_steps=1, l2_clip_norm=0.5, learning_rate=0.1, random_state=0
            ).fit(x, changed, public, y_public)
        private = [found for clipped, rows, found in seen if len(rows) == 100]
        assert private[0].shape == (4, 2)
        moved = np.linalg.norm(private[0] - private[1])
        assert 0.5 < moved <= 2 * 0.5 * (1 + 1e-9)

    def test_numbers_of_outputs_agree(self):
        (x, y), (public, y_public) = self.rows(100), self.rows(60, 1)
        with pytest.raises(ValueError, match="same outputs, got 2 and 1"):
            PrivateLinearRegression().fit(x, y, public, y_public[:, 0])

    def test_other_estimators_take_one(self):
        x, y = self.rows(60)
        with pytest.raises(ValueError, match="1d array"):
            PrivatePoissonRegressor(row_norm_bound=1.0).fit(x, np.abs(y))


class TestOrdinal:
    def test_thresholds_are_those_of_separate_models(self):
        (x, y), (public, y_public) = draw(3000, classes=4), draw(300, 1, classes=4)
        model = PrivateOrdinalRegression(PLENTY, random_state=0).fit(x, y, public, y_public)
        assert model.coef_.shape == (3, 3)
        for k in range(3):
            oracle = LogisticRegression(C=1e6).fit(x, y > k)
            np.testing.assert_allclose(model.coef_[k], oracle.coef_[0], atol=0.15)
        shares = model.predict_proba(x)
        assert (shares >= 0).all()
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        assert np.mean(np.abs(model.predict(x) - y)) < 0.8 * np.mean(np.abs(np.median(y) - y))

    def test_it_beats_a_guess_at_a_small_budget(self):
        (x, y), (public, y_public) = draw(3000, classes=4), draw(200, 1, classes=4)
        model = PrivateOrdinalRegression(1.0, random_state=0).fit(x, y, public, y_public)
        assert model.score(x, y) > np.bincount(y).max() / len(y) + 0.1
        assert model.privacy_.epsilon <= 1

    def test_probabilities_are_never_negative(self):
        shares = ordered_probabilities(np.array([[-1.0, 2.0, 0.5]]))
        p = 1 / (1 + np.exp(1))
        np.testing.assert_allclose(shares, [[1 - p, 0, 0, p]])

    def test_the_order_of_classes(self):
        (x, y), (public, y_public) = draw(300, classes=3), draw(100, 1, classes=3)
        names = np.array(["low", "middle", "high"])
        model = PrivateOrdinalRegression(5.0, classes=names, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(x, names[y], public, names[y_public])
        plain = PrivateOrdinalRegression(5.0, random_state=0).fit(x, y, public, y_public)
        np.testing.assert_array_equal(model.coef_, plain.coef_)
        assert model.classes_.tolist() == names.tolist()
        np.testing.assert_array_equal(model.predict(x), names[plain.predict(x)])
        with pytest.warns(UserWarning, match="alphabetical order"):
            PrivateOrdinalRegression(5.0, random_state=0).fit(x, names[y], public, names[y_public])
