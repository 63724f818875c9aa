"""The closed-form descent against its oracles, and the estimators against their contract."""

import dataclasses
import re
import tracemalloc
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest
from joblib import _parallel_backends
from scipy.sparse import csr_array
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import mirrordp
from mirrordp.data import UNPROTECTED, UnprotectedWarning, sources
from mirrordp.linear import _inputs, descent, estimators, tuning
from mirrordp.linear._planning import Scaling
from mirrordp.linear.descent import ClippedSum, Rows
from mirrordp.linear.estimators import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateOrdinalRegression,
    PrivatePoissonRegressor,
)
from mirrordp.mirror.families import LOGISTIC, MULTINOMIAL, POISSON, SQUARED_ERROR
from mirrordp.training.checkpoint import CheckpointError
from tests import remembered

# Most tests fit twice to compare; TestRepeatedFits is about what is then said.
pytestmark = pytest.mark.filterwarnings("ignore:this is one of [0-9]+ private fits:UserWarning")

WIDTH = 5


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)
    remembered.plans(monkeypatch)


def softmax_loss(theta, example):
    scores = example["u"] @ theta
    return jax.nn.logsumexp(scores) - jnp.dot(example["y"], scores)


LOSSES = {
    "squared error": (SQUARED_ERROR, lambda t, e: 0.5 * jnp.sum((e["u"] @ t - e["y"]) ** 2)),
    "logistic": (
        LOGISTIC,
        lambda t, e: optax.sigmoid_binary_cross_entropy((e["u"] @ t)[0], e["y"][0]),
    ),
    "multinomial": (MULTINOMIAL, softmax_loss),
    "Poisson": (POISSON, lambda t, e: jnp.sum(jnp.exp(e["u"] @ t) - e["y"] * (e["u"] @ t))),
}


def problem(family, rows=40, seed=0, width=WIDTH):
    """Scaled rows of one family's kind, and parameters."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, width)) * np.arange(1, width + 1) ** -1.0
    outputs = 3 if family is MULTINOMIAL else 1
    theta = rng.normal(size=(width, outputs))
    scores = features @ theta
    targets = {
        "squared error": lambda: scores + rng.normal(size=scores.shape),
        "logistic": lambda: (rng.random(scores.shape) < LOGISTIC.mean(scores)).astype(float),
        "multinomial": lambda: np.eye(3)[np.argmax(scores + rng.gumbel(size=scores.shape), axis=1)],
        "Poisson": lambda: rng.poisson(POISSON.mean(scores)).astype(float),
    }[family.name]()
    return Rows(features, targets), theta


def full_batch(rows, *, num_steps=1, noise_multiplier=1.0, l2_clip_norm=1.0):
    return mirrordp.Mechanism(
        sampling=mirrordp.privacy.FullBatch.of(rows),
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=noise_multiplier,
        num_steps=num_steps,
    )


class TestClippedSum:
    @pytest.mark.parametrize("name", LOSSES)
    @pytest.mark.parametrize("l2_clip_norm", [0.05, 1.0, 1e3])
    @pytest.mark.usefixtures("nothing_reserved")
    def test_equals_the_general_clipped_gradient(self, name, l2_clip_norm):
        family, loss_fn = LOSSES[name]
        rows, theta = problem(family)
        theta = theta + 0.3
        counts = np.arange(len(rows)) % 4 != 0
        with jax.enable_x64(True):
            oracle = mirrordp.clipped_grad(loss_fn, l2_clip_norm=l2_clip_norm)
            expected = oracle(
                jnp.asarray(theta), {"u": rows.features, "y": rows.targets}, jnp.asarray(~counts)
            )
        found = ClippedSum(family, l2_clip_norm)(theta, Rows(rows.features, rows.targets, counts))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("name", LOSSES)
    @pytest.mark.usefixtures("nothing_reserved")
    def test_many_parameters_side_by_side(self, name):
        family, _ = LOSSES[name]
        rows, theta = problem(family)
        many = np.stack([theta, 2 * theta, theta - 1], axis=2)
        limits = np.array([0.1, 1.0, 10.0])
        found = ClippedSum(family, limits)(many, rows)
        for k, limit in enumerate(limits):
            one = ClippedSum(family, float(limit))(many[:, :, k], rows)
            np.testing.assert_allclose(found[:, :, k], one, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("name", LOSSES)
    @pytest.mark.parametrize("size", [1.0, 1e6, 1e160, 1e308])
    def test_neighbours_differ_by_at_most_the_clip_norm(self, name, size):
        """Zero-out: one row, however large, moves the sum by at most C, and never spoils it."""
        family, _ = LOSSES[name]
        rows, theta = problem(family, seed=1)
        features = rows.features.copy()
        features[3] = size * np.sign(features[3])
        clipped_sum = ClippedSum(family, 0.7)
        with_row = clipped_sum(theta, Rows(features, rows.targets))
        without = clipped_sum(theta, Rows(features, rows.targets, np.arange(len(rows)) != 3))
        assert np.isfinite(with_row).all()
        assert np.linalg.norm(with_row - without) <= 0.7 * (1 + 1e-9)
        assert clipped_sum.sensitivity(mirrordp.Adjacency.ZERO_OUT) == 0.7
        assert clipped_sum.sensitivity(mirrordp.Adjacency.REPLACE) == 1.4

    @pytest.mark.parametrize("l2_clip_norm", [1e-25, 1e-12, 1.0])
    @pytest.mark.parametrize("target", [1.0, 1e100, 1e153, 1e170])
    @pytest.mark.parametrize("size", [1e-308, 1e-170, 1e-161, 1e-100, 1e60, 1e150])
    def test_squares_that_underflow_or_overflow_hide_no_norm(self, size, target, l2_clip_norm):
        """Where all public residuals are rounding, the clip norm that they suggest is tiny."""
        theta = np.zeros((8, 1))
        features = size * np.random.default_rng(0).normal(size=(1, 8))
        found = ClippedSum(SQUARED_ERROR, l2_clip_norm)(theta, Rows(features, np.array([[target]])))
        # In units of C, where squares are harmless.
        assert np.linalg.norm(found / l2_clip_norm) <= 1 + 1e-9

    @pytest.mark.parametrize("l2_clip_norm", [1e-25, 1e-15])
    def test_a_residual_whose_square_underflows_hides_no_norm(self, l2_clip_norm):
        """A sure prediction has a residual of 1e-163; a long row makes 1e-13 of it."""
        theta = np.array([[0.0], [1.0]])
        rows = Rows(np.array([[1e150, -375.0]]), np.zeros((1, 1)))
        found = ClippedSum(LOGISTIC, l2_clip_norm)(theta, rows)
        assert np.linalg.norm(found / l2_clip_norm) <= 1 + 1e-9

    def test_a_row_that_overflows_contributes_zero(self):
        rows, theta = problem(LOGISTIC)
        features = rows.features.copy()
        features[3] = np.inf
        clipped_sum = ClippedSum(LOGISTIC, 1.0)
        found = clipped_sum(theta, Rows(features, rows.targets))
        mask = np.arange(len(rows)) != 3
        np.testing.assert_array_equal(
            found, clipped_sum(theta, Rows(rows.features, rows.targets, mask))
        )


class TestPrivateDescent:
    @staticmethod
    def noise_only(num_steps, noise_multiplier=3.0, l2_clip_norm=0.5, learning_rate=2.0):
        """Rows of zero features have gradient zero: what moves Θ is the noise."""
        n, width = 50, 4000
        rows = Rows(np.zeros((n, width)), np.ones((n, 1)))
        mechanism = full_batch(
            n, num_steps=num_steps, noise_multiplier=noise_multiplier, l2_clip_norm=l2_clip_norm
        )
        moved = descent.private_descent(
            SQUARED_ERROR, np.zeros((width, 1)), rows, mechanism, learning_rate=learning_rate,
            key=jax.random.key(num_steps),
        )  # fmt: skip
        return moved.ravel() / (learning_rate * noise_multiplier * l2_clip_norm / n)

    def test_noise_has_the_stated_scale(self):
        unit = self.noise_only(num_steps=1)
        # The standard deviation of 4000 draws is known to 1.1%: five of those, and a wrong
        # mechanism with two thirds or three halves of the noise fails.
        assert abs(unit.std() - 1) < 5 * 0.012
        assert not abs(unit.std() * 2 / 3 - 1) < 5 * 0.012
        assert not abs(unit.std() * 3 / 2 - 1) < 5 * 0.012
        assert abs(unit.mean()) < 5 / np.sqrt(4000)

    def test_noise_is_fresh_in_each_step_and_iterates_are_averaged(self):
        """The mean of z_1, ..., z_1 + ... + z_4 has variance (16 + 9 + 4 + 1)/16."""
        unit = self.noise_only(num_steps=4)
        assert unit.std() == pytest.approx(np.sqrt(30 / 16), rel=0.06)

    def test_is_gradient_descent_and_forgets_the_first_eighth(self):
        rows, theta = problem(SQUARED_ERROR)
        mechanism = full_batch(len(rows), num_steps=16, noise_multiplier=1e-6, l2_clip_norm=1e2)
        found = descent.private_descent(
            SQUARED_ERROR, np.zeros_like(theta), rows, mechanism, learning_rate=0.5,
            key=jax.random.key(0),
        )  # fmt: skip
        theta, kept = np.zeros_like(theta), []
        for _ in range(16):
            grad = rows.features.T @ (rows.features @ theta - rows.targets) / len(rows)
            theta = theta - 0.5 * grad
            kept.append(theta)
        np.testing.assert_allclose(found, np.mean(kept[2:], axis=0), atol=1e-4)

    def test_refuses_another_mechanism(self):
        rows, theta = problem(SQUARED_ERROR)
        for mechanism in (
            full_batch(len(rows) + 1),
            mirrordp.Mechanism(
                sampling=mirrordp.PoissonSampling.for_batch_size(8, num_examples=len(rows)),
                l2_clip_norm=1.0,
                noise_multiplier=1.0,
                num_steps=1,
            ),
            full_batch(len(rows), noise_multiplier=0.0),
        ):
            with pytest.raises(ValueError, match=r"full batches|noise"):
                descent.private_descent(
                    SQUARED_ERROR, theta, rows, mechanism, learning_rate=1.0, key=jax.random.key(0)
                )


class TestPublicObjective:
    @pytest.mark.parametrize("name", LOSSES)
    def test_minimizer_is_stationary(self, name):
        family, loss_fn = LOSSES[name]
        rows, theta = problem(family, rows=60)
        ridge = np.array([0.01] * (WIDTH - 1) + [0.0])
        objective = tuning.PublicObjective(family, rows, ridge, np.zeros_like(theta))
        with jax.enable_x64(True):
            batch = {"u": jnp.asarray(rows.features), "y": jnp.asarray(rows.targets)}
            grad = jax.jit(jax.grad(lambda t: jnp.mean(jax.vmap(loss_fn, (None, 0))(t, batch))))
            left = grad(jnp.asarray(objective.minimizer)) + ridge[:, None] * objective.minimizer
        assert np.abs(left).max() < 1e-4

    @pytest.mark.parametrize("name", ["squared error", "logistic", "Poisson"])
    def test_whitening_makes_the_hessian_the_identity(self, name):
        family, loss_fn = LOSSES[name]
        rows, theta = problem(family, rows=200)
        objective = tuning.PublicObjective(family, rows, np.full(WIDTH, 1e-3), np.zeros_like(theta))
        with jax.enable_x64(True):
            batch = {"u": jnp.asarray(rows.features), "y": jnp.asarray(rows.targets)}

            def mean_loss(flat):
                return jnp.mean(jax.vmap(loss_fn, (None, 0))(flat[:, None], batch))

            hessian = jax.jit(jax.hessian(mean_loss))(jnp.asarray(objective.minimizer[:, 0]))
        basis = objective.whitening
        whitened = basis @ (np.asarray(hessian) + 1e-3 * np.eye(WIDTH)) @ basis
        np.testing.assert_allclose(whitened, np.eye(WIDTH), atol=1e-8)

    def test_settings_follow_the_budget(self):
        """Hopeless noise: stay at the public model. Hardly any: go far."""
        rows, _ = problem(LOGISTIC, rows=100)

        def choose(noise):
            public = tuning.PublicObjective.cross_validated(
                LOGISTIC, rows, penalized=np.ones(WIDTH), rng=np.random.default_rng(0)
            )
            return tuning.choose_settings(
                public, lambda objective: objective.whitening, num_private=1000,
                one_step_noise=noise, rng=np.random.default_rng(0),
            )  # fmt: skip

        assert choose(1e6).num_steps == 0
        small, large = choose(100.0), choose(0.1)
        assert large.num_steps * large.learning_rate > small.num_steps * small.learning_rate
        assert large.l2_clip_norm >= small.l2_clip_norm


# --- the estimators -------------------------------------------------------------------------------

TASKS = {
    "regression": PrivateLinearRegression,
    "binary": PrivateLogisticRegression,
    "multinomial": PrivateLogisticRegression,
    "count": PrivatePoissonRegressor,
}
FEATURES = 6
SCALES = np.arange(1, FEATURES + 1) ** -1.5


def draw(task, rows, seed=0):
    """Features of very different scale, not centred, and targets of the task's kind."""
    truth = np.random.default_rng(123).normal(size=(FEATURES, 3)) / SCALES[:, None] / 2
    rng = np.random.default_rng([seed, rows])
    x = rng.normal(size=(rows, FEATURES))
    scores = (x * SCALES) @ truth
    y = {
        "regression": lambda: 7 + 3 * (scores[:, 0] + 0.7 * rng.normal(size=rows)),
        "binary": lambda: (rng.random(rows) < 1 / (1 + np.exp(-2 * scores[:, 0]))).astype(int),
        "multinomial": lambda: np.argmax(2 * scores + rng.gumbel(size=scores.shape), axis=1),
        "count": lambda: rng.poisson(np.exp(0.7 * scores[:, 0] + 1)),
    }[task]()
    return x * SCALES + 5 * SCALES, y


def draw_line(rows):
    x = np.random.default_rng(1).normal(size=(rows, 1))
    return x, x[:, 0] + np.random.default_rng(2).normal(size=rows)


def test_loss(task, model, x, y):
    if task == "regression":
        return np.mean((model.predict(x) - y) ** 2)
    if task == "count":
        mean = model.predict(x)
        return np.mean(mean - y * np.log(mean))
    return -np.mean(np.log(model.predict_proba(x)[np.arange(len(y)), y]))


test_loss.__test__ = False


@pytest.fixture(params=TASKS)
def task(request):
    return request.param


class TestContract:
    @pytest.mark.parametrize(
        "estimator",
        [
            PrivateLinearRegression(random_state=0),
            PrivateLogisticRegression(num_steps=4, random_state=0),
            PrivateOrdinalRegression(num_steps=4, random_state=0),
            PrivatePoissonRegressor(num_steps=4, random_state=0),
        ],
        ids=lambda estimator: type(estimator).__name__,
    )
    def test_scikit_learn(self, estimator):
        """The checks set random_state, which makes fits repeatable.

        Two are excepted: they expect a weight of zero to be the removal of a row, which would
        change n and the noise. `poor_score` is declared, because they ask for good predictions from
        a few dozen rows, which no private estimator can make at ε = 1.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_estimator(
                estimator,
                on_skip=None,
                expected_failed_checks={
                    f"check_sample_weight_equivalence_on_{kind}_data": "a row is never removed"
                    for kind in ("dense", "sparse")
                },
            )

    def test_plans_follow_from_public_rows_and_settings_alone(self, task, monkeypatch):
        """The other tests rely on it, since they compute a plan once."""
        monkeypatch.undo()
        found = []

        def record(family, x, targets, **options):
            plan = remembered.honest_plan(family, x, targets, **options)
            again = remembered._plan(family, x, targets, **options)
            found.append((plan, again))
            return plan

        monkeypatch.setattr(estimators, "plan_warm", record)
        monkeypatch.setattr(descent, "private_descent", lambda family, theta, *_, **__: theta)
        public = draw(task, 60, seed=1)
        TASKS[task](random_state=0).fit(*draw(task, 100), *public)
        TASKS[task](random_state=1).fit(*draw(task, 100, seed=5), *public)
        (plan, again), (other, other_again) = found
        assert again is other_again
        for same in (again, other):
            assert same.settings == plan.settings
            np.testing.assert_array_equal(same.theta, plan.theta)
            for name in ("shift", "factor", "basis"):
                np.testing.assert_array_equal(
                    getattr(same.scaling, name), getattr(plan.scaling, name)
                )

    def test_attributes(self, task):
        x, y = draw(task, 300)
        model = TASKS[task](random_state=0).fit(x, y, *draw(task, 60, seed=1))
        classes = {"binary": 1, "multinomial": 3}.get(task)
        assert model.coef_.shape == ((FEATURES,) if classes is None else (classes, FEATURES))
        assert np.shape(model.intercept_) == (() if classes is None else (classes,))
        assert model.n_features_in_ == FEATURES
        assert isinstance(model.privacy_, mirrordp.RunReport)
        assert model.privacy_.charged_steps == model.n_iter_ > 0
        assert 0.99 < model.privacy_.epsilon <= 1.0
        assert "exact mirror descent" in model.privacy_.to_json()
        assert model.predict(x).shape == (300,)
        if classes is not None:
            np.testing.assert_allclose(model.predict_proba(x).sum(axis=1), 1)
            assert list(model.classes_) == list(range(max(classes, 2)))
        assert np.isfinite(model.score(x, y))

    def test_without_intercept(self, task):
        x, y = draw(task, 300)
        model = TASKS[task](fit_intercept=False, random_state=0)
        model.fit(x, y, *draw(task, 60, seed=1))
        np.testing.assert_array_equal(model.intercept_, 0)

    def test_randomness(self):
        x, y = draw("regression", 100)
        public = draw("regression", 30, seed=1)
        fit = lambda seed: PrivateLinearRegression(random_state=seed).fit(x, y, *public)  # noqa: E731
        first, second, fixed, again = fit(None), fit(None), fit(3), fit(3)
        assert not np.allclose(first.coef_, second.coef_)
        np.testing.assert_array_equal(fixed.coef_, again.coef_)
        assert first.privacy_.seed is None
        assert (first.privacy_.seeded, fixed.privacy_.seeded) == (False, True)
        assert "not for release" in fixed.privacy_.privacy_card()
        assert fit(np.random.default_rng(0)).privacy_.seed is not None
        with pytest.raises(ValueError, match="random_state"):
            fit("yes")

    def test_the_seed_in_the_report_repeats_the_fit(self):
        data = (*draw("regression", 300), *draw("regression", 50, seed=1))
        options = {"epsilon": 1.0, "num_steps": 5}
        drawn = PrivateLinearRegression(**options, random_state=np.random.default_rng(0)).fit(*data)
        again = PrivateLinearRegression(**options, random_state=drawn.privacy_.seed).fit(*data)
        np.testing.assert_array_equal(drawn.coef_, again.coef_)

    def test_settings_can_be_given(self):
        x, y = draw("binary", 200)
        model = PrivateLogisticRegression(
            num_steps=5, l2_clip_norm=0.5, learning_rate=0.3, random_state=0
        )
        report = model.fit(x, y, *draw("binary", 40, seed=1)).privacy_
        assert (report.charged_steps, report.l2_clip_norm) == (5, 0.5)
        assert report.results["learning_rate"] == 0.3

    @pytest.mark.parametrize(
        ("rows", "delta"), [(60, 1e-5), (10_000, 1e-5), (10_001, 1e-6), (300_000, 1e-7)]
    )
    def test_delta_follows_from_the_number_of_rows(self, rows, delta):
        """At 1e-5 and 300,000 rows, publishing one row at random would pass."""
        x = np.random.default_rng(0).normal(size=(rows, 1))
        model = PrivateLinearRegression(num_steps=1, random_state=0)
        model.fit(x, x[:, 0], *draw_line(60))
        assert model.privacy_.delta == delta
        assert model.delta is None
        assert model.privacy_.epsilon <= 1

    def test_a_delta_above_1_over_n_is_refused_before_anything_is_spent(self, tmp_path):
        x, y = draw("regression", 60)
        public = draw("regression", 60, seed=1)
        with mirrordp.Budget.create(
            tmp_path / "budget", epsilon=9.0, delta=0.02, data=mirrordp.PrivateData(x)
        ) as budget:
            with pytest.raises(ValueError, match=r"delta of at most 1/n = 0.017 .* got 0.02"):
                PrivateLinearRegression(delta=0.02).fit(x, y, *public, spend=budget)
            assert budget.status.charges == 0
            model = PrivateLinearRegression(delta=0.02, allow_large_delta=True)
            with pytest.warns(UserWarning, match="delta of at most 1/n"):
                model.fit(x, y, *public, spend=budget)
            assert budget.status.charges == 1
        assert "above one over the number of records" in model.privacy_.privacy_card()
        PrivateLinearRegression(delta=1 / 60, random_state=0).fit(x, y, *public)

    def test_replace_needs_twice_the_noise(self):
        x, y = draw("binary", 200)
        public = draw("binary", 40, seed=1)
        sigma = [
            PrivateLogisticRegression(num_steps=4, adjacency=adjacency, random_state=0)
            .fit(x, y, *public)
            .privacy_.noise_multiplier
            for adjacency in ("zero-out", "replace")
        ]
        assert sigma[1] == pytest.approx(2 * sigma[0], rel=0.02)


@pytest.fixture
def sums(monkeypatch):
    """What each step would release before its noise; the noise itself is left out."""
    found = []

    class NoNoise:
        def __init__(self, mechanism, size, key):
            del size, key
            self.mechanism = mechanism

        def __call__(self, clipped_sum):
            found.append((clipped_sum, self.mechanism))
            return clipped_sum

    monkeypatch.setattr(descent, "NoiseStream", NoNoise)
    return found


class TestNeighbours:
    """End to end: what one private row can do to the sum that the noise has to hide."""

    CLIP_NORM = 0.5
    ROW = 3
    EXTREMES = ("usual", "features", "opposite", "target", "overflow", "nan", "inf")

    def rows(self, task, extreme):
        """Private rows; the model is surprised by the one in question, so that it does matter."""
        x, y = draw(task, 40)
        centre = 5 * SCALES
        truth = np.random.default_rng(123).normal(size=(FEATURES, 3))[:, 0]
        x[self.ROW] = centre + 0.5 * SCALES * np.sign(truth)
        y[self.ROW] = {"regression": -30, "binary": 0, "multinomial": 2, "count": 0}[task]
        if extreme == "features":
            x[self.ROW] = centre + 1e4 * (x[self.ROW] - centre)
        elif extreme == "opposite":
            x[self.ROW] = centre - 1e4 * (x[self.ROW] - centre)
            y[self.ROW] = {"binary": 1, "count": 40}.get(task, y[self.ROW])
        elif extreme == "target":
            y[self.ROW] = 17 if task in ("binary", "multinomial") else 10**9
        elif extreme == "overflow":
            x[self.ROW] = 1e307 * np.sign(x[self.ROW])
        elif extreme in ("nan", "inf"):
            x[self.ROW, 2] = float(extreme)
        return x, y

    def fit(self, task, x, y, *, counts=None, adjacency="zero-out", **options):
        model = TASKS[task](
            num_steps=1, l2_clip_norm=self.CLIP_NORM, learning_rate=0.1, adjacency=adjacency,
            random_state=0, **options,
        )  # fmt: skip
        return model.fit(x, y, *draw(task, 60, seed=1), counts=counts)

    @pytest.mark.filterwarnings("ignore::mirrordp.data.UnprotectedWarning")
    @pytest.mark.parametrize("extreme", EXTREMES)
    def test_one_row_moves_the_sum_by_at_most_the_clip_norm(self, task, extreme, sums, monkeypatch):
        """Zero-out: with and without the row. Replace: the usual row and the extreme one."""
        if extreme in ("nan", "inf"):
            # Refused already when the rows are checked; here the second line of defence is meant.
            monkeypatch.setattr(_inputs, "refuse_non_finite", lambda *arguments: None)
            monkeypatch.setattr(_inputs, "copies", lambda x, *others: np.zeros(len(x), bool))
        x, y = self.rows(task, extreme)
        models = [
            self.fit(task, x, y),
            self.fit(task, x, y, counts=np.arange(len(x)) != self.ROW),
            self.fit(task, *self.rows(task, "usual")),
        ]
        (whole, mechanism), (without, _), (usual, _) = sums
        # Only the sums differ: clip norm, noise, divisor and settings are the same.
        assert [other for _, other in sums] == [mechanism] * 3
        assert mechanism.l2_clip_norm == self.CLIP_NORM
        assert mechanism.sampling.expected_batch_size == len(x)
        assert all(np.isfinite(model.coef_).all() for model in models)
        zero_out = np.linalg.norm(whole - without) / self.CLIP_NORM
        replace = np.linalg.norm(whole - usual) / self.CLIP_NORM
        assert zero_out <= 1 + 1e-9
        assert replace <= 2 + 1e-9
        is_unknown_class = extreme == "target" and task in ("binary", "multinomial")
        if is_unknown_class or extreme in ("overflow", "nan", "inf"):
            np.testing.assert_array_equal(whole, without)
        else:
            assert zero_out > 0.01
        if extreme != "usual":
            assert replace > 0.01

    def test_the_noise_is_for_that_distance(self, task, sums):
        """Zero-out: C. Replace: twice as much."""
        x, y = self.rows(task, "usual")
        for adjacency in ("zero-out", "replace"):
            self.fit(task, x, y, adjacency=adjacency)
        (_, zero_out), (_, replace) = sums
        assert replace.noise_stddev == pytest.approx(2 * zero_out.noise_stddev, rel=0.02)
        assert zero_out.epsilon(1e-5) <= 1

    def test_the_sum_is_divided_by_the_number_of_all_rows(self, sums):
        """Rows that do not count leave the divisor alone."""
        x, y = self.rows("regression", "usual")
        start = self.fit("regression", x, y, counts=np.zeros(len(x), bool))
        half = self.fit("regression", x, y, counts=np.arange(len(x)) % 2 == 0)
        twice = self.fit(
            "regression", np.concatenate([x, x]), np.concatenate([y, y]),
            counts=np.tile(np.arange(len(x)) % 2 == 0, 2),
        )  # fmt: skip
        np.testing.assert_array_equal(sums[0][0], 0)
        np.testing.assert_allclose(sums[2][0], 2 * sums[1][0])
        assert not np.allclose(start.coef_, half.coef_)
        np.testing.assert_allclose(half.coef_, twice.coef_)
        # As many that count among twice as many: the same sum takes half the step.
        among_more = self.fit(
            "regression", np.concatenate([x, x]), np.concatenate([y, y]),
            counts=np.arange(2 * len(x)) % 2 == np.repeat([0, 2], len(x)),
        )  # fmt: skip
        np.testing.assert_allclose(sums[3][0], sums[1][0])
        np.testing.assert_allclose(
            start.coef_ - among_more.coef_, (start.coef_ - half.coef_) / 2, rtol=1e-6
        )


class TestCopies:
    """Private rows that are public too."""

    @pytest.mark.parametrize("copied", [(), (0,), (0, 7, 8)])
    def test_a_copy_of_a_public_row_contributes_nothing(self, task, copied, sums):
        x, y = draw(task, 40)
        public = draw(task, 60, seed=1)
        copied = np.array(copied, int)
        x[copied], y[copied] = public[0][copied], public[1][copied]
        counts = ~np.isin(np.arange(len(x)), copied)
        options = {"num_steps": 1, "random_state": 0}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = TASKS[task](**options).fit(x, y, *public)
        said = [str(w.message) for w in seen if w.category is UnprotectedWarning]
        expected = [f"{UNPROTECTED} {len(copied)} private rows equal a public row; they contribute"]
        assert [line[: len(expected[0])] for line in said] == (expected if len(copied) else [])
        x[copied] += 1
        TASKS[task](**options).fit(x, y, *public, counts=counts)
        np.testing.assert_array_equal(sums[0][0], sums[1][0])
        assert model.privacy_.num_examples == len(x)
        assert UNPROTECTED not in model.privacy_.to_json()

    @pytest.mark.parametrize("public", ["all", "shuffled", "half and others"])
    def test_private_rows_are_refused_as_public_ones(self, task, public, tmp_path):
        x, y = draw(task, 60)
        budget = mirrordp.Budget.create(
            tmp_path / "budget", epsilon=1.0, delta=1e-5, data=mirrordp.PrivateData(x)
        )
        others = draw(task, 20, seed=1)
        order = {
            "all": np.arange(60),
            "shuffled": np.random.default_rng(0).permutation(60),
            "half and others": np.arange(0, 60, 2),
        }[public]
        public_x, public_y = x[order], y[order]
        if public == "half and others":
            public_x, public_y = np.concatenate([public_x, others[0]]), [*public_y, *others[1]]
        expected = f"{len(order)} of {len(public_x)} public rows that equal a private row"
        with budget, pytest.raises(ValueError, match=expected) as error:
            TASKS[task](random_state=0).fit(x, y, public_x, public_y, spend=budget)
        assert UNPROTECTED in str(error.value)
        assert budget.status.charges == 0

    def test_the_same_table_is_refused_also_where_rows_repeat(self):
        rng = np.random.default_rng(0)
        x = np.eye(3)[rng.integers(3, size=200)]
        y = x[:, 0].astype(int)
        order = rng.permutation(200)
        with pytest.raises(ValueError, match="200 of 200 public rows that equal a private row"):
            PrivateLogisticRegression(random_state=0).fit(x, y, x[order], y[order])

    def test_different_public_rows_of_few_values_are_no_private_rows(self, sums):
        """Ten rows that differ, and every one of them is common among the private ones."""
        rng = np.random.default_rng(0)
        x_public = np.arange(10.0)[:, None]
        x = rng.integers(10, size=(300, 1)).astype(float)
        with pytest.warns(UnprotectedWarning, match="300 private rows equal a public row"):
            PrivateLinearRegression(num_steps=1, random_state=0).fit(
                x, x[:, 0], x_public, x_public[:, 0]
            )
        assert len(sums) == 1

    def test_equal_features_with_another_target_are_no_copy(self, sums):
        x, y = draw("binary", 40)
        public = draw("binary", 60, seed=1)
        x[0], y[0] = public[0][0], 1 - public[1][0]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprotectedWarning)
            PrivateLogisticRegression(num_steps=1, random_state=0).fit(x, y, *public)

    def test_where_values_repeat_by_chance_nothing_is_left_out(self, sums):
        """Three categories: nearly every private row equals a public one, and still counts."""
        rng = np.random.default_rng(0)
        x, x_public = (np.eye(3)[rng.integers(3, size=rows)] for rows in (200, 30))
        labels = np.array(["no", "yes"])
        y, y_public = (labels[part[:, 0].astype(int)] for part in (x, x_public))
        options = {"num_steps": 1, "l2_clip_norm": 1e6, "random_state": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprotectedWarning)
            model = PrivateLogisticRegression(**options).fit(x, y, x_public, y_public)
        assert np.linalg.norm(sums[0][0]) > 0
        assert list(model.classes_) == ["no", "yes"]


class TestNobodyChangesTheNumbersOfAnother:
    """What one row holds must not decide how the numbers of the others are read."""

    ROW = 3
    ODD = (7, True, np.float32(0.1), Fraction(1, 3), Decimal("0.1"), 2**70, np.float16(2))

    def rows(self, monkeypatch, estimator, x, y, public):
        """What the descent is given: features, targets and which rows count."""
        seen = []

        def record(family, theta, rows, mechanism, **options):
            seen.append(rows)
            return theta

        monkeypatch.setattr(descent, "private_descent", record)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnprotectedWarning)
            estimator.fit(x, y, *public)
        others = np.arange(len(seen[0].targets)) != self.ROW
        counts = np.ones(len(others), bool) if seen[0].counts is None else seen[0].counts
        return [part[others].tobytes() for part in (seen[0].features, seen[0].targets, counts)]

    @pytest.mark.parametrize("odd", ODD, ids=repr)
    @pytest.mark.parametrize("form", [list, "objects", "frame"])
    @pytest.mark.parametrize("fit_intercept", [True, False])
    def test_one_feature_of_another_type(self, monkeypatch, odd, form, fit_intercept):
        import pandas

        x, y = draw("regression", 40)
        public = draw("regression", 60, seed=1)
        found = []
        for cell in (0.5, odd):
            rows = x.astype(np.float32).tolist()
            rows[self.ROW][2] = cell
            if form == "objects":
                rows = np.array(rows, object)
            elif form == "frame":
                rows = pandas.DataFrame(rows)
            estimator = PrivateLinearRegression(5.0, fit_intercept=fit_intercept, random_state=0)
            found.append(self.rows(monkeypatch, estimator, rows, y, public))
        assert found[0] == found[1]

    @pytest.mark.parametrize("odd", ODD, ids=repr)
    @pytest.mark.parametrize("kind", [int, float, np.float32, np.float16, np.uint8, bool])
    def test_one_target_of_another_type(self, monkeypatch, odd, kind):
        """Among float32 numbers a text made text of all: 0.1 was read back as another number."""
        x, y = draw("count", 40)
        public = draw("count", 60, seed=1)
        found = []
        for target in (kind(1), odd):
            targets = [kind(value / 3) for value in y.tolist()]
            targets[self.ROW] = target
            estimator = PrivatePoissonRegressor(5.0, random_state=0)
            found.append(self.rows(monkeypatch, estimator, x, targets, public))
        assert found[0] == found[1]

    @pytest.mark.parametrize("form", [list, "objects", "frame"])
    def test_text_among_numbers_is_refused(self, form):
        """A program may have left a column as text for one cell: 1.500 was to be read as 1500."""
        import pandas

        x, y = draw("regression", 40)
        rows, targets = x.tolist(), y.tolist()
        rows[self.ROW][2] = targets[self.ROW] = "1.500"
        if form == "objects":
            rows, targets = np.array(rows, object), np.array(targets, object)
        elif form == "frame":
            rows, targets = pandas.DataFrame(rows), pandas.Series(targets)
        for arguments in ((rows, y), (rows, y, x, y), (x, targets), (x, targets, x, y)):
            with pytest.raises(ValueError, match="must hold numbers"):
                PrivateLinearRegression(row_norm_bound=1.0).fit(*arguments)

    @pytest.mark.parametrize("public", [True, False])
    @pytest.mark.parametrize(
        ("labels", "classes", "refused"),
        [
            (["yes", "no", "yes", "maybe"], [False, True], True),
            (["True", "False", "True", "maybe"], [False, True], False),
            ([True, False, True, False], ["no", "yes"], True),
            ([True, "no", "yes", "no"], ["no", "yes"], False),
            (["1.500", "2000", "1.500", "2000"], [1500, 2000], True),
            (["1.000", "1", "1.000", "odd"], [1, 1000], True),
            (["1", "1000", "1.0", "odd"], [1, 1000], False),
        ],
    )
    def test_labels_that_were_to_be_read_otherwise(self, labels, classes, refused, public):
        x, _ = draw("binary", 40)
        y = np.array(labels * 10, object)
        estimator = PrivateLogisticRegression(row_norm_bound=1.0, classes=classes)
        given = (x, y, x + 1, np.array(classes * 20)) if public else (x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if refused:
                with pytest.raises(ValueError, match=r"y must hold .* as the classes do") as error:
                    estimator.fit(*given)
                assert UNPROTECTED in str(error.value)
            else:
                estimator.fit(*given)

    def test_a_rate_that_overflows_is_refused_before_the_charge(self):
        x, y = draw("regression", 40)
        ledger = mirrordp.Ledger(mirrordp.Adjacency.ZERO_OUT)
        model = PrivateLinearRegression(row_norm_bound=1.0, learning_rate=1e300)
        with pytest.raises(ValueError, match="learning_rate must be at most 1e"):
            model.fit(x, y, spend=ledger)
        assert ledger.epsilon(1e-5).epsilon == 0

    def test_labels_of_which_only_one_value_occurs(self):
        """Read as true and false, they are none of the public words; as text, all of them are."""
        x, _ = draw("binary", 40)
        model = PrivateLogisticRegression(row_norm_bound=1.0, classes=["maybe", "no", "yes"])
        with pytest.raises(ValueError, match="y must hold text, as the classes do"):
            model.fit(x, np.ones(40, bool))

    def test_masked_arrays_are_refused(self):
        x, y = draw("regression", 40)
        for given in ((np.ma.masked_array(x, x > 1), y), (x, np.ma.masked_array(y, y > 1))):
            with pytest.raises(ValueError, match="masked array"):
                PrivateLinearRegression(row_norm_bound=1.0).fit(*given)

    @pytest.mark.parametrize("odd", ["secret", 0.5, None, b"1", 1j, np.datetime64("2020-01-01")])
    @pytest.mark.parametrize("kind", [int, np.uint8, np.float32, str, np.bool_])
    def test_one_label_of_another_type(self, monkeypatch, odd, kind):
        x, y = draw("binary", 40)
        public_x, public_y = draw("binary", 60, seed=1)
        public = (public_x, np.array([kind(label) for label in public_y.tolist()]))
        found = []
        for label in (kind(1), odd):
            labels = [kind(label) for label in y.tolist()]
            labels[self.ROW] = label
            estimator = PrivateLogisticRegression(5.0, random_state=0)
            found.append(self.rows(monkeypatch, estimator, x, labels, public))
        assert found[0] == found[1]

    @pytest.mark.parametrize("kind", ["M8[D]", "m8[s]", "M8[ns]", str, bytes])
    def test_arrays_whose_unit_or_spelling_follows_from_all_rows_are_refused(self, kind):
        """One time in seconds among days counts all of them in seconds, 86,400 times as much."""
        import pandas

        x, y = draw("regression", 50)
        odd = np.round(x).astype(int).astype(kind)
        text = np.round(y).astype(int).astype(kind)
        rows = [odd] if kind in (str, bytes) else [odd, pandas.DataFrame(odd)]
        for bad in rows:
            with pytest.raises(ValueError, match=r"X must hold numbers, got (dates|text)") as error:
                PrivateLinearRegression().fit(bad, y)
            assert UNPROTECTED in str(error.value)
            with pytest.raises(ValueError, match="X_public must hold numbers"):
                PrivateLinearRegression().fit(x, y, bad, y)
        with pytest.raises(ValueError, match="y must hold numbers"):
            PrivateLinearRegression().fit(x, text)
        if kind not in (str, bytes):
            with pytest.raises(ValueError, match="y_public must hold numbers or text, got dates"):
                PrivateLogisticRegression().fit(x, y, x, text)

    def test_labels_that_are_times_are_refused(self):
        x, y = draw("binary", 40)
        public = draw("binary", 60, seed=1)
        with pytest.raises(ValueError, match="y must hold numbers or text, got dates"):
            PrivateLogisticRegression().fit(x, y.astype("M8[ns]"), *public)


class TestPrivacy:
    @pytest.mark.filterwarnings("ignore:.*beyond the range of public ones")
    def test_private_rows_decide_neither_bounds_nor_scaling(self, task, monkeypatch):
        """Private rows a million times as large: the same C, T, η, σ, start and coordinates."""
        seen = []

        def record(family, theta, rows, mechanism, **options):
            seen.append((theta, mechanism, options["learning_rate"], rows.features))
            return theta

        monkeypatch.setattr(descent, "private_descent", record)
        x, y = draw(task, 200)
        public = draw(task, 60, seed=1)
        for factor in (1.0, 1e6):
            TASKS[task](random_state=0).fit(factor * x, y, *public)
        (theta, mechanism, rate, rows), (other_theta, other, other_rate, other_rows) = seen
        np.testing.assert_array_equal(theta, other_theta)
        assert mechanism == other
        assert rate == other_rate
        # u = ((x − shift) · factor, 1) B is affine in x, with the same shift, factor and B.
        at_zero = rows - (other_rows - rows) / (1e6 - 1)
        np.testing.assert_allclose(at_zero, np.broadcast_to(at_zero[0], at_zero.shape), atol=1e-6)

    def test_a_private_row_of_unknown_class_contributes_nothing(self):
        x, y = draw("multinomial", 200)
        public = draw("multinomial", 60, seed=1)
        y[5] = 17
        changed = x.copy()
        changed[5] = 1e5
        coefficients = []
        for rows in (x, changed):
            with pytest.warns(UnprotectedWarning, match="1 private rows"):
                model = PrivateLogisticRegression(random_state=0).fit(rows, y, *public)
            coefficients.append(model.coef_)
            assert model.privacy_.num_examples == 200
        np.testing.assert_array_equal(*coefficients)
        known = y.copy()
        known[5] = 0
        other = PrivateLogisticRegression(random_state=0).fit(changed, known, *public)
        assert not np.array_equal(other.coef_, coefficients[0])

    def test_the_seed_in_the_report_is_the_one_that_was_used(self):
        x, y = draw("regression", 200)
        public = draw("regression", 40, seed=1)
        drawn = PrivateLinearRegression(5.0, random_state=np.random.default_rng(3))
        drawn.fit(x, y, *public)
        again = PrivateLinearRegression(5.0, random_state=drawn.privacy_.seed).fit(x, y, *public)
        assert drawn.n_iter_ > 0
        np.testing.assert_array_equal(drawn.coef_, again.coef_)

    def test_where_the_classes_come_from(self):
        x, y = draw("binary", 200)
        labels = np.array(["no", "yes"])[y]
        public_x, public_y = draw("binary", 40, seed=1)
        public = (public_x, np.array(["no", "yes"])[public_y])
        with_public = PrivateLogisticRegression(random_state=0).fit(x, labels, *public)
        assert list(with_public.classes_) == ["no", "yes"]
        assert set(with_public.predict(x)) == {"no", "yes"}
        assert with_public.privacy_.shown_without_protection == ()
        given = PrivateLogisticRegression(
            classes=["maybe", "no", "yes"], row_norm_bound=10.0, random_state=0
        ).fit(x, labels)
        assert list(given.classes_) == ["maybe", "no", "yes"]
        assert given.privacy_.shown_without_protection == ()
        private_only = PrivateLogisticRegression(row_norm_bound=10.0, random_state=0).fit(x, labels)
        (line,) = private_only.privacy_.shown_without_protection
        assert "set of labels" in line
        # A class that public rows lack is possible all the same.
        absent = PrivateLogisticRegression(classes=["maybe", "no", "yes"], random_state=0)
        absent.fit(x, labels, *public)
        assert np.isfinite(absent.coef_).all()
        assert absent.predict_proba(x)[:, 0].min() > 0

    @pytest.mark.filterwarnings("ignore:.*beyond the range of public ones")
    @pytest.mark.filterwarnings("ignore:divide by zero encountered in log1p:RuntimeWarning")
    def test_a_hopeless_budget_returns_the_public_model_and_spends_nothing(self, task):
        x, y = draw(task, 100)
        model = TASKS[task](epsilon=1e-5, random_state=0).fit(x, y, *draw(task, 60, seed=1))
        other = TASKS[task](epsilon=1e-5, random_state=1).fit(-x, y, *draw(task, 60, seed=1))
        assert model.n_iter_ == 0
        assert model.privacy_.epsilon == 0
        np.testing.assert_array_equal(model.coef_, other.coef_)

    def test_a_column_that_is_constant_on_public_rows_is_left_out(self):
        x, y = draw("regression", 100)
        public_x, public_y = draw("regression", 40, seed=1)
        x, public_x = (np.column_stack([part, np.full(len(part), 3.0)]) for part in (x, public_x))
        x[:, -1] = np.arange(100)
        model = PrivateLinearRegression(random_state=0).fit(x, y, public_x, public_y)
        assert model.coef_[-1] == 0

    @pytest.mark.parametrize("unit", [1e-300, 1e200])
    def test_public_numbers_without_a_standard_deviation_are_refused(self, unit):
        x, y = draw("regression", 100)
        public_x, public_y = draw("regression", 40, seed=1)
        with pytest.raises(ValueError, match="whose squares are within float64"):
            PrivateLinearRegression(random_state=0).fit(x, y, public_x * unit, public_y)


class TestRepeatedFits:
    """Twenty fits to choose from are twenty releases; the report of the best must not hide it."""

    GRID: ClassVar = {"l2_clip_norm": [0.5, 1.0], "num_steps": [2, 4]}

    def search(self, kind, x, y, public, pipeline=False, **options):
        """Returns the best estimator's report, and what the operator was told of repeated fits."""
        estimator = PrivateLinearRegression(random_state=0)
        grid = self.GRID
        named = dict(zip(("X_public", "y_public"), public, strict=True))
        if pipeline:
            estimator = make_pipeline(FunctionTransformer(), estimator)
            name = "privatelinearregression"
            grid = {f"{name}__{key}": value for key, value in grid.items()}
            named = {f"{name}__{key}": value for key, value in named.items()}
        search = kind(estimator, grid, cv=5, **options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            search.fit(x, y, **named)
        best = search.best_estimator_
        told = [str(w.message) for w in seen if "private fits" in str(w.message)]
        return (best[-1] if pipeline else best).privacy_, told

    @staticmethod
    def together(fits, epsilon=1.0, delta=1e-5):
        """ε of so many fits at ε each, by the accountant of a ledger."""
        one = mirrordp.Mechanism.calibrate(
            epsilon=epsilon, delta=delta, sampling=mirrordp.privacy.FullBatch.of(100), num_steps=1,
            l2_clip_norm=1.0,
        )  # fmt: skip
        ledger = mirrordp.Ledger(mirrordp.Adjacency.ZERO_OUT)
        for _ in range(fits):
            ledger.charge(one.event)
        return ledger.epsilon(delta).epsilon

    @pytest.mark.parametrize("pipeline", [False, True])
    def test_a_search_says_what_all_of_its_fits_cost(self, pipeline):
        data = (*draw("regression", 100), draw("regression", 60, seed=1))
        report, told = self.search(GridSearchCV, *data, pipeline)
        total = self.together(21)
        assert report.tuning.startswith("not charged: num_steps, l2_clip_norm: given by the caller")
        assert "one of 21 fits" in report.tuning
        (stated,) = map(float, re.findall(r"epsilon (\d+\.\d+) together", report.tuning))
        assert total * 0.98 < stated < total * 1.02
        assert not stated < self.together(20) * 0.98
        first, last = told
        assert "one of 2 private fits" in first
        assert "one of 21 private fits" in last
        assert re.findall(r"epsilon (\d+\.\d+) together", last) == [f"{stated:.4g}"]
        assert any("not charged" in warned.title for warned in report.warnings())

    def test_a_search_in_other_processes(self, monkeypatch):
        """Their fits are not seen here; that copies were made for them is."""
        # One other process will do, since each of them imports JAX.
        executor = _parallel_backends.get_memmapping_executor
        monkeypatch.setattr(
            _parallel_backends,
            "get_memmapping_executor",
            lambda n_jobs, **options: executor(1, **options),
        )
        data = (*draw("regression", 100), draw("regression", 60, seed=1))
        report, told = self.search(GridSearchCV, *data, n_jobs=2)
        (fits,) = map(int, re.findall(r"one of (\d+) fits", report.tuning))
        assert 21 <= fits <= 23
        assert "in other processes" in told[-1]

    def test_cross_validation_warns_once(self):
        x, y = draw("regression", 102)
        x_public, y_public = draw("regression", 60, seed=1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = cross_validate(
                PrivateLinearRegression(random_state=0), x, y, cv=5, return_estimator=True,
                params={"X_public": x_public, "y_public": y_public},
            )["estimator"]  # fmt: skip
        told = [str(w.message) for w in seen if "private fits" in str(w.message)]
        assert len(told) == 1
        assert "one of 2 private fits" in told[0]
        assert f"20 fits like this one have {self.together(20):.1f}"[:-1] in told[0]
        assert "one of 5 fits" in found[-1].privacy_.tuning

    def test_fits_in_a_loop(self):
        x, y = draw("binary", 100)
        public = draw("binary", 60, seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            PrivateLogisticRegression(random_state=0).fit(x, y, *public)
        with pytest.warns(UserWarning, match="one of 2 private fits"):
            second = PrivateLogisticRegression(random_state=1).fit(x, y, *public)
        assert "one of 2 fits" in second.privacy_.tuning
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            third = PrivateLogisticRegression(random_state=2).fit(x, y, *public)
            other = PrivateLogisticRegression(random_state=2).fit(x[:70], y[:70], *public)
        assert "one of 3 fits" in third.privacy_.tuning
        assert other.privacy_.tuning.startswith("nothing to charge: all settings follow from")

    def test_a_report_tells_the_same_whoever_is_in_two_tables(self):
        """Whether rows of two fits are equal depends on private rows: it decides nothing here."""
        public = draw("regression", 60, seed=1)
        texts = []
        for seed in (0, 5):
            estimators._FITS.clear()
            PrivateLinearRegression(random_state=0).fit(*draw("regression", 100), *public)
            with pytest.warns(UserWarning, match="one of 2 private fits"):
                model = PrivateLinearRegression(random_state=0).fit(
                    *draw("regression", 100, seed=seed), *public
                )
            texts.append(model.privacy_.tuning)
        assert texts[0] == texts[1]

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            (
                {},
                "nothing to charge: all settings follow from public rows and the budget; a "
                "rehearsal on public rows chose clip norm, steps and learning rate",
            ),
            ({"num_steps": 3}, "not charged: num_steps: given by the caller, and how they were"),
            ({"fit_intercept": False, "method": "dpsgd"}, "not charged: method, fit_intercept: "),
            ({"target_range": np.array([0, 15])}, "not charged: target_range: given"),
            ({"epsilon": 2.0, "adjacency": "replace"}, "nothing to charge"),
        ],
    )
    def test_settings_that_were_given(self, settings, text):
        model = PrivateLinearRegression(**settings, random_state=0)
        model.fit(*draw("regression", 100), *draw("regression", 60, seed=1))
        assert model.privacy_.tuning.startswith(text)

    def test_fits_on_a_budget_are_charged(self, tmp_path):
        x, y = draw("regression", 100)
        public = draw("regression", 60, seed=1)
        with (
            mirrordp.Budget.create(
                tmp_path / "budget", epsilon=3.0, delta=1e-5, data=mirrordp.PrivateData(x)
            ) as budget,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            for steps in (2, 4):
                model = PrivateLinearRegression(0.5, num_steps=steps).fit(
                    x, y, *public, spend=budget
                )
        assert model.privacy_.tuning.startswith("charged, if it was made from results of runs")
        assert "share one budget" in model.privacy_.privacy_card()

    def test_fits_on_a_ledger_are_charged_and_reported_together(self, tmp_path):
        data = (*draw("regression", 100), *draw("regression", 60, seed=1))
        ledger = mirrordp.Ledger(mirrordp.Adjacency.ZERO_OUT)
        fit = PrivateLinearRegression(0.5, num_steps=2, random_state=0).fit
        first = fit(*data, spend=ledger).privacy_
        assert first.epsilon == pytest.approx(ledger.epsilon(1e-5).epsilon)
        assert first.epsilon <= 0.5
        # A ledger adds up fits that were fixed beforehand; whether they were is not known.
        with pytest.warns(UserWarning, match="one of 2 private fits"):
            second = fit(*data, spend=ledger).privacy_
        assert second.epsilon == ledger.epsilon(1e-5).epsilon > 1.3 * first.epsilon
        with pytest.raises(TypeError, match="spend must be Ledger or Budget"):
            fit(*data, spend=1.0)
        with pytest.raises(ValueError, match="survives a crash, got one in memory"):
            fit(*data, spend=ledger, checkpoint=mirrordp.Checkpoint(tmp_path / "run"))
        other = mirrordp.Ledger(mirrordp.Adjacency.REPLACE)
        with pytest.raises(ValueError, match="one ledger has one adjacency"):
            fit(*data, spend=other)
        assert other.event == mirrordp.Ledger(mirrordp.Adjacency.REPLACE).event


class TestExtremeTargets:
    """Public targets may be refused, before a charge; a private one must not end a fit."""

    @pytest.mark.parametrize(
        ("kind", "task", "words"),
        [
            (PrivateLinearRegression, "regression", r"y_public .* to 1e\+200, whose squares"),
            (PrivatePoissonRegressor, "count", r"y_public must hold counts of at most"),
        ],
    )
    def test_public_ones_are_refused_before_anything_is_charged(self, kind, task, words, tmp_path):
        (x, y), (x_public, y_public) = draw(task, 60), draw(task, 60, seed=1)
        y_public = y_public.astype(float)
        y_public[3] = 1e200
        with mirrordp.Budget.create(
            tmp_path / "budget", epsilon=9.0, delta=1e-5, data=mirrordp.PrivateData(x)
        ) as budget:
            with pytest.raises(ValueError, match=words) as caught:
                kind().fit(x, y, x_public, y_public, spend=budget)
            assert UNPROTECTED not in str(caught.value)
            assert budget.status.charges == 0

    @pytest.mark.parametrize("value", [1e40, 1e200, -1e200, 1.7e308])
    def test_a_private_one_counts_at_most_as_much_as_any_other(self, value):
        (x, y), public = draw("regression", 60), draw("regression", 60, seed=1)
        y[3] = value
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = PrivateLinearRegression(epsilon=100.0, random_state=0).fit(x, y, *public)
        assert np.isfinite(model.coef_).all()
        ordinary = PrivateLinearRegression(epsilon=100.0, random_state=0)
        without = ordinary.fit(x, draw("regression", 60)[1], *public)
        np.testing.assert_allclose(model.coef_, without.coef_, atol=0.3)


class TestMistakes:
    def test_what_is_not_finite_is_refused_for_the_operator_only(self, task):
        x, y = draw(task, 50)
        bad = x.copy()
        bad[3, 2] = np.nan
        with pytest.raises(ValueError, match=r"1 values that are NaN.*columns \[2\]") as error:
            TASKS[task]().fit(bad, y)
        assert UNPROTECTED in str(error.value)
        with pytest.raises(ValueError, match="X_public must be finite") as error:
            TASKS[task]().fit(x, y, bad, y)
        assert UNPROTECTED not in str(error.value)

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"epsilon": 0}, "epsilon"),
            ({"epsilon": -1.0}, "epsilon"),
            ({"epsilon": np.inf}, "epsilon"),
            ({"delta": 0.0}, "delta"),
            ({"delta": 1.0}, "delta"),
            ({"method": "magic"}, "method"),
            ({"num_steps": 0}, "num_steps"),
            ({"l2_clip_norm": -1.0}, "l2_clip_norm"),
            ({"learning_rate": 0.0}, "learning_rate"),
            ({"row_norm_bound": 0.0}, "row_norm_bound"),
            ({"adjacency": "add-remove"}, "adjacency"),
            ({"target_range": (1.0, 1.0)}, "target_range"),
        ],
    )
    def test_parameters(self, parameters, message):
        x, y = draw("regression", 50)
        with pytest.raises(ValueError, match=message):
            PrivateLinearRegression(**parameters).fit(x, y, x, y)

    def test_shapes(self, task):
        x, y = draw(task, 50)
        model = TASKS[task]()
        with pytest.raises(ValueError, match="go together"):
            model.fit(x, y, X_public=x)
        with pytest.raises(ValueError, match="the same number of rows"):
            model.fit(x, y[:-1])
        with pytest.raises(ValueError, match="y_public must have the same number of rows"):
            model.fit(x, y, x, y[:-1])
        with pytest.raises(ValueError, match="features"):
            model.fit(x, y, x[:, 1:], y)
        with pytest.raises(ValueError, match="50 booleans"):
            model.fit(x, y, x, y, counts=np.ones(49, bool))

    def test_targets(self):
        x, y = draw("binary", 50)
        with pytest.raises(ValueError, match="must hold numbers"):
            PrivateLinearRegression().fit(x, np.array(["a", "b"])[y])
        with pytest.raises(ValueError, match=r"counts of at least 0") as error:
            PrivatePoissonRegressor().fit(x, -y)
        assert UNPROTECTED in str(error.value)
        with pytest.raises(ValueError, match="two classes, got one class"):
            PrivateLogisticRegression().fit(x, y, x, np.zeros(50, int))
        with pytest.raises(ValueError, match=r"y_public must hold labels out of classes"):
            PrivateLogisticRegression(classes=[0, 1]).fit(x, y, x, y + 1)

    def test_a_private_label_of_any_kind_is_only_unknown(self):
        """Where the classes are known, one odd label must not decide whether there is a model."""
        x, y = draw("binary", 50)
        public = draw("binary", 40, seed=1)
        odd = y.astype(float)
        odd[3] = 0.5
        with pytest.warns(UnprotectedWarning, match="1 private rows"):
            model = PrivateLogisticRegression(random_state=0).fit(x, odd, *public)
        assert list(model.classes_) == [0, 1]
        with pytest.raises(ValueError, match="Unknown label type"):
            PrivateLogisticRegression().fit(x, odd)
        with pytest.raises(ValueError, match="Unknown label type"):
            PrivateLogisticRegression().fit(x, y, x, odd)

    @pytest.mark.parametrize("kind", [int, str, lambda label: "TRUE" if label else "FALSE"])
    @pytest.mark.parametrize("odd", [[1], {}, Decimal("sNaN"), pandas.NA], ids=repr)
    def test_a_private_label_that_cannot_be_compared_is_unknown(self, kind, odd):
        x, y = draw("binary", 50)
        public = draw("binary", 40, seed=1)
        labels = np.array([*map(kind, y), None], object)[:-1]
        labels[3] = odd
        with pytest.warns(UnprotectedWarning, match="not covered.* 1 private rows"):
            model = PrivateLogisticRegression(random_state=0).fit(x, labels, *public)
        expected = PrivateLogisticRegression(random_state=0).fit(
            x, y, *public, counts=np.arange(50) != 3
        )
        np.testing.assert_array_equal(model.coef_, expected.coef_)

    @pytest.mark.parametrize("odd", [10**400, pandas.NA, {}, [1.0], Decimal("sNaN"), 1j], ids=repr)
    def test_messages_about_private_values_that_are_no_numbers_are_marked(self, odd):
        x, y = draw("regression", 50)
        for part in ("X", "y", "sample_weight"):
            given = {"X": x.astype(object), "y": y.astype(object), "sample_weight": np.ones(50)}
            given[part] = given[part].astype(object)
            given[part][(3, 0) if part == "X" else 3] = odd
            with pytest.raises((ValueError, TypeError, OverflowError)) as error:
                PrivateLinearRegression(row_norm_bound=1.0).fit(**given)
            assert str(error.value).endswith(UNPROTECTED)
        with pytest.raises(ValueError, match="counts must be 50 booleans") as error:
            PrivateLinearRegression().fit(x, y, counts=np.array([odd, *[True] * 49], object))
        assert str(error.value).endswith(UNPROTECTED)

    def test_complex_labels_are_not_shown(self):
        x, _ = draw("binary", 50)
        with pytest.raises(ValueError, match="Complex data not supported") as error:
            PrivateLogisticRegression().fit(x, np.full(50, 98765j), *draw("binary", 40, seed=1))
        assert str(error.value).endswith(UNPROTECTED)
        assert "98765" not in str(error.value)

    @pytest.mark.parametrize("kind", [int, float, bool, str])
    @pytest.mark.parametrize("odd", ["secret", 17, None])
    def test_one_label_of_another_type_leaves_the_others_as_they_are(self, kind, odd):
        """NumPy turns a list with one text in it into text, all of it."""
        x, y = draw("binary", 200)
        public_x, public_y = draw("binary", 40, seed=1)
        labels, public_labels = ([kind(label) for label in part] for part in (y, public_y))
        labels[3] = odd
        kept = np.arange(200) != 3
        with pytest.warns(UnprotectedWarning, match="not covered.* 1 private rows"):
            model = PrivateLogisticRegression(random_state=0).fit(
                x, labels, public_x, public_labels
            )
        expected = PrivateLogisticRegression(random_state=0).fit(
            x, y, public_x, public_y, counts=kept
        )
        np.testing.assert_array_equal(model.coef_, expected.coef_)

    @pytest.mark.parametrize(
        ("public", "private", "odd"),
        [
            (str, int, 0.5),
            (str, int, "secret"),
            (str, int, None),
            (str, float, "secret"),
            (lambda label: str(float(label)), int, 0.5),
            (lambda label: str(bool(label)), bool, 17),
            (lambda label: str(bool(label)), bool, "secret"),
            (str, lambda label: str(label).encode(), "secret"),
            (int, str, None),
            (str, int, 1j),
            (int, float, 1j),
        ],
    )
    def test_one_label_does_not_decide_which_class_the_others_are(self, public, private, odd):
        """One label of another type changes the dtype of all; it may change no other row's class.

        As strings 1 and 1.0 differ: with public labels of text, a single 0.5 among private integers
        once made every other label unknown, which no noise was made for.
        """
        _, y = draw("binary", 60)
        _, public_y = draw("binary", 40, seed=1)
        labels = [private(label) for label in y.tolist()]
        model = PrivateLogisticRegression()
        counted = []
        for label in (labels[3], odd):
            with_label = [*labels[:3], label, *labels[4:]]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnprotectedWarning)
                problem = model._encode(
                    np.asarray(with_label), np.array([public(label) for label in public_y.tolist()])
                )
            counted.append((problem.targets, problem.counts))
        (usual, counts), (changed, changed_counts) = counted
        assert counts.all()
        np.testing.assert_array_equal(usual[:, 0], y)
        np.testing.assert_array_equal(np.flatnonzero(~changed_counts), [3])
        others = np.arange(60) != 3
        np.testing.assert_array_equal(changed[others], usual[others])

    @pytest.mark.parametrize("classes", [[2**53, 2**53 + 1], ["1", "1.0", "2"], ["True", "1"]])
    def test_classes_that_another_dtype_would_merge_are_refused(self, classes):
        x, _ = draw("binary", 60)
        y = np.array(classes)[np.arange(60) % len(classes)]
        with pytest.raises(ValueError, match="classes must differ as float64 numbers"):
            PrivateLogisticRegression().fit(x, y, x, y)

    def test_messages_quote_no_private_value(self):
        x, y = draw("regression", 50)
        text = x.astype(object)
        text[3, 2] = "secret"
        target = y.astype(object)
        target[3] = "secret"
        for arguments in ((text, y), (x, target)):
            with pytest.raises(ValueError, match="must hold numbers") as error:
                PrivateLinearRegression().fit(*arguments)
            assert "secret" not in str(error.value)
            assert UNPROTECTED in str(error.value)
            assert error.value.__cause__ is None
            assert error.value.__suppress_context__ or error.value.__context__ is None
        one_column = np.full(50, 1234.5)
        for rows, message in ((one_column, "got 1D array"), (1j * x + 1234.5, "Complex data")):
            with pytest.raises(ValueError, match=message) as error:
                PrivateLinearRegression().fit(rows, y)
            assert "1234.5" not in str(error.value)
            assert str(error.value).endswith(UNPROTECTED)
            assert error.value.__suppress_context__

    def test_gaps_in_targets_of_any_dtype_are_refused(self):
        x, y = draw("count", 50)
        gaps = y.astype(object)
        gaps[3] = None
        for estimator in (PrivateLinearRegression, PrivatePoissonRegressor):
            with pytest.raises(ValueError, match="y must be finite") as error:
                estimator().fit(x, gaps)
            assert UNPROTECTED in str(error.value)
            with pytest.raises(ValueError, match="y_public must be finite"):
                estimator().fit(x, y, x, gaps)

    def test_other_units_than_on_public_rows_are_mentioned(self, task):
        """As in a Pipeline, whose steps transform X and leave X_public as it is."""
        estimator = TASKS[task](random_state=0)
        x, y = draw(task, 200)
        x_public, y_public = draw(task, 60, seed=1)
        x[:, 1] += 100
        with pytest.warns(UnprotectedWarning, match="beyond .* in column 1. Give both") as caught:
            estimator.fit(x, y, x_public, y_public)
        assert str(caught[0].message).startswith(UNPROTECTED)

    def test_another_unit_of_the_target_is_mentioned(self):
        x, y = draw("regression", 200)
        x_public, y_public = draw("regression", 60, seed=1)
        with pytest.warns(UnprotectedWarning, match="public ones in y"):
            PrivateLinearRegression(random_state=0).fit(x, y + 1000, x_public, y_public)
        unusable = np.arange(200) < 150  # such as rows without a target, which have a zero there
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprotectedWarning)
            PrivateLinearRegression(random_state=0).fit(
                x, np.where(unusable, -99, y), x_public, y_public, counts=~unusable
            )

    def test_public_columns_in_another_order(self):
        import pandas

        x, y = draw("regression", 60)
        frame = pandas.DataFrame(x).rename(columns="x{}".format)
        public = pandas.DataFrame(draw("regression", 60, seed=1)[0], columns=frame.columns)
        first = PrivateLinearRegression(random_state=0).fit(frame, y, public, y)
        turned = frame[frame.columns[::-1]]
        second = PrivateLinearRegression(random_state=0).fit(turned, y, public, y)
        np.testing.assert_array_equal(first.coef_, second.coef_)
        expected = first.predict(frame)
        np.testing.assert_array_equal(second.predict(turned.assign(more=1.0)), expected)
        with pytest.warns(UnprotectedWarning, match="'more' of X are not in X_public"):
            PrivateLinearRegression(random_state=0).fit(turned.assign(more=1.0), y, public, y)
        with pytest.raises(ValueError, match="got none named 'x0'"):
            PrivateLinearRegression(random_state=0).fit(frame.drop(columns="x0"), y, public, y)
        with pytest.raises(ValueError, match="got none named 'x0'"):
            first.predict(frame.drop(columns="x0"))

    def test_without_public_rows_or_bounds_there_is_a_warning(self, task):
        x, y = draw(task, 50)
        with pytest.warns(UserWarning, match="nothing is scaled"):
            TASKS[task](random_state=0).fit(x, y)
        estimators._FITS.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            known = {"target_range": (-9.0, 9.0)} if task == "regression" else {}
            TASKS[task](row_norm_bound=10.0, random_state=0, **known).fit(x, y)
        if task == "regression":
            estimators._FITS.clear()
            with pytest.warns(UserWarning, match="without target_range"):
                TASKS[task](row_norm_bound=10.0, random_state=0).fit(x, y)


class TestQuality:
    @pytest.mark.filterwarnings("ignore:divide by zero encountered in log1p:RuntimeWarning")
    def test_better_than_cold_and_than_public_alone(self, task):
        """Paired over five data sets: the mean gain is many times its standard error."""
        gains = {"cold": [], "public": []}
        for seed in range(5):
            x, y = draw(task, 3000, seed=3 * seed)
            public = draw(task, 60, seed=3 * seed + 1)
            test = draw(task, 3000, seed=3 * seed + 2)
            models = {
                "ours": TASKS[task](random_state=seed).fit(x, y, *public),
                "cold": TASKS[task](row_norm_bound=10.0, random_state=seed).fit(x, y),
                "public": TASKS[task](epsilon=1e-6, random_state=seed).fit(x, y, *public),
            }
            losses = {name: test_loss(task, model, *test) for name, model in models.items()}
            for name, values in gains.items():
                values.append(losses[name] - losses["ours"])
        for values in gains.values():
            error = np.std(values, ddof=1) / np.sqrt(len(values))
            assert np.mean(values) > 3 * error > 0

    def test_a_larger_budget_is_not_worse(self, task):
        x, y = draw(task, 3000)
        public, test = draw(task, 60, seed=1), draw(task, 3000, seed=2)
        losses = [
            np.mean(
                [
                    test_loss(
                        task,
                        TASKS[task](epsilon=epsilon, random_state=seed).fit(x, y, *public),
                        *test,
                    )
                    for seed in range(3)
                ]
            )
            for epsilon in (0.05, 5.0)
        ]
        assert losses[1] < losses[0]

    def test_warm_dp_sgd_is_offered_for_comparison(self):
        x, y = draw("regression", 500)
        model = PrivateLinearRegression(method="dpsgd", random_state=0)
        model.fit(x, y, *draw("regression", 60, seed=1))
        assert model.privacy_.results["method"] == "warm DP-SGD"

    def test_target_range_scales_and_clips(self):
        x, y = draw("regression", 2000)
        y[0] = 1e9
        model = PrivateLinearRegression(
            epsilon=5.0, row_norm_bound=10.0, target_range=(0, 15), random_state=0
        ).fit(x, y)
        assert np.mean((model.predict(x[1:]) - y[1:]) ** 2) < np.var(y[1:])


def test_docstrings_name_every_parameter():
    for cls in (*TASKS.values(), PrivateOrdinalRegression):
        for name in cls().get_params():
            assert f"        {name}: " in cls.__doc__
        assert "privacy_: " in cls.__doc__
    assert estimators.METHODS == ("auto", "exact", "dpsgd")


def test_scaled_rows_and_their_norms_take_no_second_copy(monkeypatch):
    x = np.random.default_rng(0).normal(size=(3000, 100))
    scaling = Scaling.of(x, intercept=True, row_norm_bound=None, stays_sparse=False)
    scaling = dataclasses.replace(scaling, basis=np.linalg.qr(np.ones((101, 101)) + np.eye(101))[0])
    whole = Rows(scaling(x), np.zeros((len(x), 1)))
    monkeypatch.setattr(sources, "_BLOCK_NUMBERS", 2**14)
    tracemalloc.start()
    rows = Rows(scaling(x), np.zeros((len(x), 1)))
    norms = rows.norms
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(rows.features, whole.features, rtol=0, atol=1e-12)
    np.testing.assert_allclose(norms, whole.norms, rtol=1e-12)
    assert peak < 1.5 * x.nbytes


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_fit_is_not_resumed_with_other_public_rows(tmp_path, is_sparse):
    """Shifted by a whole number, they give the same start: only the private sum would differ."""
    rng = np.random.default_rng(0)
    half = rng.integers(1, 9, size=(64, 4))
    public = np.vstack([10 + half, 10 - half]).astype(float)
    public_targets = public.sum(axis=1) + rng.normal(size=128)
    rows = (rng.random((500, 4)) < 0.5) * rng.integers(1, 20, size=(500, 4)).astype(float)
    targets = rows.sum(axis=1) + rng.normal(size=500)
    ledger = mirrordp.FileLedger.create(tmp_path / "ledger", mirrordp.Adjacency.ZERO_OUT)

    def fit(public, *, resume):
        model = PrivateLinearRegression(
            epsilon=0.1, delta=1e-5, num_steps=1, l2_clip_norm=1.0, learning_rate=1.0
        )
        return model.fit(
            csr_array(rows) if is_sparse else rows, targets,
            X_public=public, y_public=public_targets, spend=ledger,
            checkpoint=mirrordp.Checkpoint(tmp_path / "secret", resume=resume, keep=True),
        )  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = fit(public, resume=False)
        np.testing.assert_array_equal(fit(public, resume=True).coef_, first.coef_)
        with pytest.raises(CheckpointError, match=r"differs in: .*public rows"):
            fit(public + 64, resume=True)


def test_a_fit_that_may_have_been_seen_is_not_computed_again_on_a_device_that_rounds_anew(
    tmp_path, monkeypatch
):
    """The second sum would meet the noise of the first."""
    rng = np.random.default_rng(0)
    x, public = rng.normal(size=(200, 2)), rng.normal(size=(50, 2))

    def fit(*, keep, resume):
        model = PrivateLinearRegression(epsilon=1.0, delta=1e-5)
        checkpoint = mirrordp.Checkpoint(tmp_path / f"keep {keep}", resume=resume, keep=keep)
        return model.fit(
            x, x.sum(axis=1), X_public=public, y_public=public.sum(axis=1), checkpoint=checkpoint
        )

    fit(keep=True, resume=False)
    # Without `keep`, only what nobody has seen is computed again.
    with monkeypatch.context() as patch:
        patch.setattr(PrivateLinearRegression, "_learn", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(keep=False, resume=False)
    with monkeypatch.context() as patch:
        patch.setattr("mirrordp.training.checkpoint._is_exact", lambda: False)
        fit(keep=False, resume=True)
        with pytest.raises(CheckpointError, match="replay steps to the bit"):
            fit(keep=True, resume=True)
    # Whatever else makes it round otherwise is seen by what comes out.
    learn = PrivateLinearRegression._learn
    monkeypatch.setattr(
        PrivateLinearRegression, "_learn", lambda *args: np.nextafter(learn(*args), 9.0)
    )
    with pytest.raises(CheckpointError, match="got other values"):
        fit(keep=True, resume=True)
