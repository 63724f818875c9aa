"""Trees, networks and the choice among them: sensitivity, noise, use of public rows, quality."""

import dataclasses
import warnings

import numpy as np
import pytest
from sklearn.base import clone

import mirrordp
from mirrordp.linear import (
    PrivateAutoClassifier,
    PrivateAutoRegressor,
    PrivateLinearRegression,
    PrivateNetworkRegressor,
    PrivateTreesClassifier,
    PrivateTreesPoissonRegressor,
    PrivateTreesRegressor,
    _network,
    boosting,
    nonlinear,
)
from mirrordp.linear._noting import told
from mirrordp.linear._planning import plan_warm
from mirrordp.linear.descent import ClippedSum, Rows, descend
from mirrordp.mirror.families import LOGISTIC, MULTINOMIAL, POISSON, SQUARED_ERROR
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.spending import FileLedger
from mirrordp.spending.budget import BudgetError
from mirrordp.tables import cells
from mirrordp.tables.cells import Cut, TreesScorer
from mirrordp.tables.network import NetworkScorer

DELTA = 1e-6
FAMILIES = {"squared": (SQUARED_ERROR, 1), "logistic": (LOGISTIC, 1), "several": (MULTINOMIAL, 3)}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # Many fits of one shape are what searches look like.
        warnings.filterwarnings("ignore", "this is one of")
        yield


def rows_of(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes rows whose target depends on the product of two columns."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4))
    x[:, 3] = x[:, 3] > 0
    return x, np.sign(x[:, 0]) * np.sign(x[:, 1]) + 0.5 * x[:, 2] + 0.3 * rng.normal(size=n)


def rmse(model, x, y) -> float:
    return float(np.sqrt(np.mean((model.predict(x) - y) ** 2)))


@pytest.fixture(scope="module")
def tables():
    return rows_of(600, 0), rows_of(30_000, 1), rows_of(4000, 2)


class TestCells:
    def test_a_number_falls_between_edges(self):
        cut = Cut((1,), np.array([0.0, 1.0]))
        assert cut(np.array([[9.0, -1.0], [9.0, 0.0], [9.0, 0.5], [9.0, 7.0]])).tolist() == [
            0, 1, 1, 2,
        ]  # fmt: skip
        assert cut.size == 3

    def test_a_category_is_its_indicator(self):
        cut = Cut((0, 2), np.zeros(0))
        assert cut(np.array([[0.0, 5.0, 0.0], [1.0, 5.0, 0.0], [0.0, 5.0, 1.0]])).tolist() == [
            0, 1, 2,
        ]  # fmt: skip

    def test_scores_add_up(self):
        cuts = (Cut((0,), np.array([0.0])), Cut((1,), np.array([0.0])))
        values = (np.array([[1.0], [2.0]]), np.array([[10.0], [20.0], [30.0], [40.0]]))
        model = TreesScorer(np.array([[0.5, 0.0]]), np.ones(1), cuts, ((0,), (0, 1)), values)
        x = np.array([[-2.0, -1.0], [2.0, -1.0], [2.0, 1.0]])
        assert model(x)[:, 0].tolist() == [-1 + 1 + 1 + 10, 1 + 1 + 2 + 30, 1 + 1 + 2 + 40]
        assert (TreesScorer.from_dict(model.to_dict())(x) == model(x)).all()

    @pytest.mark.parametrize(
        "change",
        [
            {"values": (np.zeros((3, 1)),)},
            {"terms": ((5,),)},
            {"intercepts": np.zeros(2)},
            {"values": (np.full((2, 1), np.nan),)},
        ],
    )
    def test_damage_is_refused(self, change):
        good = TreesScorer(
            np.zeros((1, 1)), np.zeros(1), (Cut((0,), np.zeros(1)),), ((0,),), (np.zeros((2, 1)),)
        )
        with pytest.raises(ValueError):
            dataclasses.replace(good, **change)

    def test_categories_are_one_column_and_constants_none(self):
        rng = np.random.default_rng(0)
        x = np.column_stack([np.eye(3)[rng.integers(3, size=90)], rng.normal(size=90), np.ones(90)])
        model = cells.without_values(
            np.zeros((1, 5)),
            np.zeros(1),
            x,
            np.zeros((90, 1)),
            groups=[(0, 1, 2)],
            largest=1e6,
            most=99,
        )
        assert {cut.features for cut in model.cuts} == {(0, 1, 2), (3,)}
        assert len(model.terms) == 3

    def test_many_columns_are_limited_to_useful_terms(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(400, 25))
        residuals = (np.sign(x[:, 3]) * np.sign(x[:, 17]))[:, None]
        model = cells.without_values(
            np.zeros((1, 25)), np.zeros(1), x, residuals, groups=None, largest=1e6, most=9
        )
        pairs = {tuple(model.cuts[k].features[0] for k in term) for term in model.terms}
        assert len(model.terms) == 9
        assert (3, 17) in pairs

    def test_gains_are_those_of_each_term_by_itself(self, monkeypatch):
        monkeypatch.setattr(cells, "_LARGEST_BLOCK", 100)  # several blocks of rows
        rng = np.random.default_rng(0)
        x = np.column_stack([np.eye(4)[rng.integers(4, size=90)], rng.normal(size=(90, 3))])
        residuals = rng.normal(size=(90, 2)) + x[:, :1]
        model = cells.without_values(
            np.zeros((2, 7)),
            np.zeros(2),
            x,
            residuals,
            groups=[(0, 1, 2, 3)],
            largest=1e6,
            most=99,
        )

        def gain(where):
            found = 0.0
            for cell in set(where.tolist()):
                some = residuals[where == cell]
                found += np.sum(some.sum(axis=0) ** 2) / len(some) - residuals.var(axis=0).sum()
            return found

        bins = model.bins(x)
        expected = [gain(model.cells(bins, term)) for term in model.terms]
        assert len(expected) == 10
        np.testing.assert_allclose(
            cells._gains(model, model.terms, x, residuals), expected, rtol=1e-9
        )
        shuffled = model.terms[::-1]
        np.testing.assert_allclose(
            cells._gains(model, shuffled, x, residuals), expected[::-1], rtol=1e-9
        )

    def test_noise_makes_cells_coarse(self):
        x = np.random.default_rng(0).normal(size=(400, 2))
        few, many = (
            cells.without_values(
                np.zeros((1, 2)),
                np.zeros(1),
                x,
                np.zeros((400, 1)),
                groups=None,
                largest=largest,
                most=99,
            )
            for largest in (9.0, 1e6)
        )
        assert all(len(term) == 1 for term in few.terms)
        assert max(map(many.num_cells, many.terms)) > max(map(few.num_cells, few.terms))


class TestSensitivity:
    """A row moves what is released by at most the clip norm, whatever it holds."""

    @pytest.mark.parametrize("name", FAMILIES)
    def test_a_row_moves_a_release_by_the_clip_norm(self, name):
        family, outputs = FAMILIES[name]
        rng = np.random.default_rng(0)
        targets = rng.normal(size=(50, outputs)) if family == SQUARED_ERROR else np.eye(4)[
            rng.integers(4, size=50), :outputs
        ]  # fmt: skip
        scores = 3 * rng.normal(size=(50, outputs))
        release = boosting.Release.of(family, scores[:10], targets[:10])
        where = rng.integers(7, size=50)
        moved = []
        for row in range(50):
            for target, score in ((1e300, 0.0), (-3.0, 900.0), (0.0, -900.0), (1.0, np.nan)):
                both = []
                for counts in (np.ones(50, bool), np.arange(50) != row):
                    other_targets, other_scores = targets.copy(), scores.copy()
                    other_targets[row], other_scores[row] = target, score
                    rows = Rows(np.zeros((50, 1)), other_targets, counts)
                    both.append(
                        boosting.release_sums(release, family, other_scores, rows, where, 7)
                    )
                moved.append(np.linalg.norm(both[0] - both[1]))
        assert max(moved) <= release.l2_clip_norm
        # The bound is used, so that a smaller one would be wrong.
        assert max(moved) > 0.9 * release.clip_norm

    def test_weights_cannot_lengthen_a_row(self):
        rows = Rows(np.zeros((2, 1)), np.ones((2, 1)), weights=np.array([1e9, 1.0]))
        release = boosting.Release(1.0, 1.0, 1.0, np.inf)
        total = boosting.release_sums(
            release, SQUARED_ERROR, np.zeros((2, 1)), rows, np.array([0, 1]), 2
        )
        assert np.linalg.norm(total[0]) <= release.l2_clip_norm

    def test_sums_do_not_depend_on_the_order(self):
        rng = np.random.default_rng(0)
        release = boosting.Release(1.0, 1.0, 1.0, np.inf)
        scores, where = rng.normal(size=(5000, 1)), rng.integers(3, size=5000)

        def total(order):
            rows = Rows(np.zeros((5000, 1)), np.zeros((5000, 1)))
            return boosting.release_sums(
                release, SQUARED_ERROR, scores[order], rows, where[order], 3
            )

        assert (total(np.arange(5000)) == total(rng.permutation(5000))).all()

    def test_every_release_has_the_noise_of_the_mechanism(self, tables, monkeypatch):
        """Sees the noise of each release; half of it, or noise on G alone, would be seen too."""
        (xp, yp), (x, y), _ = tables
        seen = []
        before = boosting.NoiseStream.__call__

        def spy(stream, total):
            noisy = before(stream, total)
            seen.append(((noisy - total) / spied["stddev"]).ravel())
            return noisy

        spied = {}
        original = boosting.private_values

        def values(*arguments):
            spied["mechanism"] = arguments[-2]
            spied["stddev"] = arguments[-2].noise_stddev
            return original(*arguments)

        monkeypatch.setattr(boosting.NoiseStream, "__call__", spy)
        monkeypatch.setattr(boosting, "private_values", values)
        model = PrivateTreesRegressor(1.0, DELTA, random_state=0).fit(x, y, xp, yp)
        noise = np.concatenate(seen)
        assert len(seen) == model.n_iter_ == spied["mechanism"].num_steps
        assert abs(noise.std() - 1) < 4 / np.sqrt(2 * len(noise))
        assert spied["mechanism"].epsilon(DELTA) <= 1
        assert model.privacy_.epsilon <= 1


class TestShrinkage:
    def test_noise_alone_leaves_almost_nothing(self):
        rng = np.random.default_rng(0)
        release = boosting.Release(1.0, 1.0, 1.0, np.inf)
        noisy = rng.normal(size=(400, 2)) * 50
        noisy[:, 1] += 0.15 * 1000
        naive = noisy[:, 0] / 1000
        found = boosting._shrunk(noisy, release, 50.0)[:, 0]
        assert np.std(found) < 0.3 * np.std(naive)

    def test_signal_survives(self):
        rng = np.random.default_rng(0)
        release = boosting.Release(1.0, 1.0, 0.01, np.inf)
        truth = rng.normal(size=400)
        noisy = rng.normal(size=(400, 2)) * 50 + np.column_stack(
            [1000 * truth, np.full(400, 0.15 * 1000)]
        )
        found = boosting._shrunk(noisy, release, 50.0)[:, 0]
        assert np.corrcoef(found, truth)[0, 1] > 0.9
        assert 0.5 < np.std(found) < 1.5


class TestLinearPart:
    def test_its_unit_changes_nothing_else(self, tables):
        """The same descent in the unit of the release ends at the same model."""
        (xp, yp), (x, y), _ = tables
        plan = plan_warm(
            SQUARED_ERROR,
            xp,
            yp[:, None],
            follows_hessian=True,
            intercept=True,
            row_norm_bound=None,
            num_private=len(x),
            one_step_noise=1.0,
            given={"num_steps": 5},
        )
        found = []
        for factor in (1.0, 7.3):
            part = boosting.LinearPart.of(plan, factor * plan.settings.l2_clip_norm)
            rows = Rows(part.scaling(x), y[:, None])
            total = ClippedSum(SQUARED_ERROR, factor * plan.settings.l2_clip_norm)
            theta = descend(
                lambda theta, total=total, rows=rows: total(theta, rows) / len(rows),
                part.theta,
                num_steps=part.num_steps,
                learning_rate=part.learning_rate,
            )
            found.append(np.concatenate([a.ravel() for a in part.scaling.original(theta)]))
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6)

    def test_private_rows_correct_a_public_line(self):
        rng = np.random.default_rng(0)
        truth = np.arange(8.0)
        x = rng.normal(size=(8060, 8))
        y = x @ truth + 5 * rng.normal(size=8060)
        model = PrivateTreesRegressor(3.0, DELTA, random_state=0).fit(
            x[60:], y[60:], x[:60], y[:60]
        )
        slopes, public = (
            scorer.coefficients[0] - truth for scorer in (model.scorer_, model.public_scorer_)
        )
        assert np.linalg.norm(slopes) < 0.5 * np.linalg.norm(public)


class TestTrees:
    def test_beat_a_linear_model_where_columns_interact(self, tables):
        (xp, yp), (x, y), test = tables
        linear = PrivateLinearRegression(1.0, DELTA, random_state=0).fit(x, y, xp, yp)
        trees = PrivateTreesRegressor(1.0, DELTA, random_state=0).fit(x, y, xp, yp)
        public = float(np.sqrt(np.mean((trees.public_scorer_(test[0])[:, 0] - test[1]) ** 2)))
        assert rmse(trees, *test) < 0.7 * rmse(linear, *test)
        assert rmse(trees, *test) < 0.7 * public
        # With next to no budget nothing is learned, and nothing is spoilt.
        timid = PrivateTreesRegressor(1e-4, DELTA, random_state=0).fit(x, y, xp, yp)
        assert rmse(timid, *test) < 1.05 * public

    def test_classes_and_counts(self, tables):
        (xp, yp), (x, y), test = tables
        labels = [np.digitize(part, [-0.5, 0.5]) for part in (yp, y, test[1])]
        model = PrivateTreesClassifier(2.0, DELTA, random_state=0).fit(x, labels[1], xp, labels[0])
        assert np.mean(model.predict(test[0]) == labels[2]) > 0.65
        assert np.allclose(model.predict_proba(test[0]).sum(axis=1), 1)
        counts = [np.random.default_rng(3).poisson(np.exp(part / 2)) for part in (yp, y, test[1])]
        trees = PrivateTreesPoissonRegressor(2.0, DELTA, random_state=0)
        trees.fit(x, counts[1], xp, counts[0])
        expected = np.exp(test[1] / 2)
        assert np.corrcoef(trees.predict(test[0]), expected)[0, 1] > 0.7

    def test_repeatable_cloned_and_charged_once(self, tables):
        (xp, yp), (x, y), test = tables
        ledger = mirrordp.Ledger(Adjacency.ZERO_OUT)
        one = PrivateTreesRegressor(1.0, DELTA, random_state=5)
        one.fit(x[:3000], y[:3000], xp, yp, spend=ledger)
        two = clone(one).fit(x[:3000], y[:3000], xp, yp)
        assert (one.predict(test[0]) == two.predict(test[0])).all()
        assert ledger.epsilon(DELTA).epsilon == pytest.approx(one.privacy_.epsilon, rel=1e-6)

    def test_a_private_row_that_is_not_finite_or_does_not_count_adds_nothing(self, tables):
        (xp, yp), (x, y), test = tables
        x, y = x[:3000].copy(), y[:3000].copy()
        counts = np.arange(3000) != 7
        one = PrivateTreesRegressor(1.0, DELTA, random_state=5).fit(x, y, xp, yp, counts=counts)
        x[7], y[7] = 1e200, 1e9
        two = PrivateTreesRegressor(1.0, DELTA, random_state=5).fit(x, y, xp, yp, counts=counts)
        assert (one.predict(test[0]) == two.predict(test[0])).all()

    def test_a_row_that_overflows_is_not_mentioned(self, tables):
        (xp, _), (x, _), _ = tables
        x = x[:300].copy()
        labels, x[7] = x[:, 0] + x[:, 1] > 0, 1.7e308
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            model = PrivateTreesClassifier(50.0, DELTA, random_state=0)
            model.fit(x, labels, xp, xp[:, 0] + xp[:, 1] > 0)

    def test_public_rows_are_needed(self, tables):
        with pytest.raises(ValueError, match="needs public rows"):
            PrivateTreesRegressor(1.0, DELTA).fit(*tables[1])

    def test_groups_are_checked(self, tables):
        (xp, yp), (x, y), _ = tables
        with pytest.raises(ValueError, match="groups must hold different features"):
            PrivateTreesRegressor(1.0, DELTA, groups=[(0, 9)]).fit(x, y, xp, yp)

    def test_frames_with_categories(self):
        pd = pytest.importorskip("pandas")
        rng = np.random.default_rng(0)

        def frame(n):
            return pd.DataFrame(
                {"kind": rng.choice(["a", "b", "c"], n), "size": rng.uniform(-1, 1, n)}
            )

        def target(f):
            return np.where(f["kind"] == "a", f["size"].abs(), 0.0)

        public, private, test = frame(600), frame(20_000), frame(1000)
        public.loc[:1, "size"] = [-1.0, 1.0]
        model = PrivateTreesRegressor(1.0, DELTA, random_state=0)
        model.fit(private, target(private), public, target(public))
        error = np.sqrt(np.mean((model.predict(test) - target(test)) ** 2))
        assert error < 0.5 * np.std(target(test))


@pytest.fixture(scope="module")
def fitted(tables):
    (xp, yp), (x, y), _ = tables
    ledger = mirrordp.Ledger(Adjacency.ZERO_OUT)
    model = PrivateNetworkRegressor(3.0, DELTA, steps=60, random_state=0)
    return model.fit(x[:8000], y[:8000], xp, yp, spend=ledger), ledger


class TestNetwork:
    def test_is_charged_for_what_ran(self, fitted):
        model, ledger = fitted
        assert ledger.epsilon(DELTA).epsilon <= 3
        assert model.privacy_.epsilon == pytest.approx(ledger.epsilon(DELTA).epsilon, rel=1e-6)
        assert model.privacy_.charged_steps == model.n_iter_ == 60

    def test_is_not_worse_than_its_start(self, fitted, tables):
        model, _ = fitted
        x, y = tables[2]
        public = float(np.sqrt(np.mean((model.public_scorer_(x)[:, 0] - y) ** 2)))
        assert rmse(model, x, y) < public

    def test_noise_beyond_the_signal_does_not_spoil_the_start(self, tables):
        (xp, yp), (x, y), test = tables
        model, noted = PrivateNetworkRegressor(1e-3, DELTA, steps=60, random_state=0), []
        with told(noted.append):
            model.fit(x[:3000], y[:3000], xp, yp)
        assert noted[-1] == "step 60 of 60"
        public = float(np.sqrt(np.mean((model.public_scorer_(test[0])[:, 0] - test[1]) ** 2)))
        assert rmse(model, *test) < 1.05 * public

    @pytest.mark.parametrize(("excess", "rows"), [(3.0, 2000), (0.5, 2000), (3.0, 10)])
    def test_scores_that_are_too_sure_are_shrunk_by_public_rows(self, excess, rows):
        """Clipped gradients make such scores. Others stay, and few public rows say little."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(5 * rows, 3))
        y = (rng.uniform(size=5 * rows) < 1 / (1 + np.exp(-2 * x[:, 0]))).astype(float)
        start = _network.Start.of(LOGISTIC, Rows(x, y[:, None]))
        (true,) = [np.zeros((len(start.network.skip), 1))]
        true[0] = 2 * excess
        layers = tuple((0 * weights, 0 * bias) for weights, bias in start.network.layers)
        network = dataclasses.replace(start.network, layers=layers, skip=true)
        found = _network._tempered(start, network)
        expected = {(3.0, 2000): 3.0, (0.5, 2000): 1.0}.get((excess, rows))
        temperature = true[0] / found.skip[0]
        if expected is None:
            assert 1 <= temperature < 3
        else:
            np.testing.assert_allclose(temperature, expected, rtol=0.15)
        assert (found.layers[0][0] == layers[0][0]).all()

    def test_stored_and_read(self, fitted, tables):
        scorer = fitted[0].scorer_
        x = tables[2][0]
        assert isinstance(scorer, NetworkScorer)
        assert (NetworkScorer.from_dict(scorer.to_dict())(x) == scorer(x)).all()
        with pytest.raises(ValueError):
            dataclasses.replace(scorer, skip=scorer.skip[:-1])

    def test_a_row_that_float32_cannot_hold_adds_nothing(self, tables):
        (xp, yp), (x, y), test = tables
        x, y = x[:500].copy(), y[:500].copy()
        found = []
        for value in (1e200, -1e300):
            x[7] = value
            model = PrivateNetworkRegressor(3.0, DELTA, steps=3, random_state=0)
            found.append(model.fit(x, y, xp, yp).predict(test[0]))
        assert (found[0] == found[1]).all()

    def test_interrupted_and_resumed(self, tables, tmp_path, monkeypatch):
        (xp, yp), (x, y), _ = tables
        monkeypatch.setattr(_network, "_LOOKS", 2)
        start = _network.Start.of(SQUARED_ERROR, Rows(xp, yp[:, None]))
        mechanism = Mechanism(
            sampling=PoissonSampling.for_batch_size(50, num_examples=1500),
            noise_multiplier=0.5,
            num_steps=20,
            l2_clip_norm=start.clip_norm,
        )
        train, charged = _network.train, []

        def fit(name, stop, resume=False):
            def interrupted(*args, **options):
                for number, (state, info) in enumerate(train(*args, **options)):
                    yield state, info
                    if number == stop:
                        raise KeyboardInterrupt

            monkeypatch.setattr(_network, "train", interrupted)
            path = tmp_path / f"{name}.jsonl"
            with (
                FileLedger.open(path) if resume else FileLedger.create(path, Adjacency.ZERO_OUT)
            ) as ledger:
                try:
                    return _network.train_privately(
                        start,
                        Rows(x[:1500], y[:1500, None]),
                        mechanism,
                        learning_rate=5e-3,
                        seed=0,
                        spend=ledger,
                        checkpoint=mirrordp.Checkpoint(tmp_path / name, resume=resume),
                    )
                finally:
                    charged.append(ledger.event)

        whole = fit("whole", stop=None)
        with pytest.raises(KeyboardInterrupt):
            fit("part", stop=5)
        assert fit("part", stop=None, resume=True).to_dict() == whole.to_dict()
        assert charged[0] == charged[2] != charged[1]

    def test_rows_of_few_values_are_not_taken_for_copies(self):
        """If public rows equal each other, private rows that equal them are no copies."""
        rng = np.random.default_rng(0)
        (x, y), (xp, yp) = (
            (rng.integers(0, 2, (n, 3)).astype(float), rng.integers(0, 2, n).astype(float))
            for n in (300, 60)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", mirrordp.data.UnprotectedWarning)
            PrivateNetworkRegressor(3.0, DELTA, steps=1, random_state=0).fit(x, y, xp, yp)

    def test_replace_is_refused(self, tables):
        (xp, yp), (x, y), _ = tables
        with pytest.raises(ValueError, match="samples its batches"):
            PrivateNetworkRegressor(1.0, DELTA, adjacency="replace").fit(x, y, xp, yp)


@pytest.mark.parametrize(
    "kind", [PrivateLinearRegression, PrivateTreesRegressor, PrivateNetworkRegressor]
)
def test_a_budget_of_rows_pays_for_a_model_of_any_kind(kind, tmp_path):
    """A network sees scaled rows, which are not those that the budget was made for."""
    (x, y), public = rows_of(200, 0), rows_of(100, 1)
    data = mirrordp.PrivateData({"x": x, "y": y})
    with mirrordp.Budget.create(tmp_path / "budget", epsilon=5.0, delta=1e-5, data=data) as budget:
        kind(0.5, delta=1e-5).fit(x, y, *public, spend=budget)
        assert budget.ledger.num_charges > 0
        # Other runs are compared as before.
        with pytest.raises(BudgetError, match="differs from it"):
            budget.check_rows(mirrordp.PrivateData({"x": x + 1, "y": y}))


class TestAuto:
    def test_reads_no_private_row_to_choose(self, tables, monkeypatch):
        (xp, yp), (x, y), _ = tables
        seen = {}
        original = nonlinear.rehearse

        def spy(family, rows, groups, **options):
            seen.update(options, rows=len(rows))
            return original(family, rows, groups, **options)

        monkeypatch.setattr(nonlinear, "rehearse", spy)
        monkeypatch.setattr(nonlinear, "_NUM_STEPS", 20)
        model = PrivateAutoRegressor(1.0, DELTA, random_state=0)
        model.steps = 20
        model.fit(x, y, xp, yp)
        assert seen["rows"] == len(xp)
        assert set(seen) == {"rows", "num_private", "one_step_noise"}
        assert model.model_ == model.rehearsal_.chosen != "linear"
        assert f"chose the kind of model, {model.model_}; " in model.privacy_.tuning
        assert set(model.rehearsal_.losses) == {"linear", "trees", "network"}

    def test_stays_linear_where_noise_would_drown_cells(self):
        rng = np.random.default_rng(0)
        xp, x = rng.normal(size=(600, 5)), rng.normal(size=(700, 5))
        coefficients = np.arange(1.0, 6.0)
        yp, y = xp @ coefficients + rng.normal(size=600), x @ coefficients + rng.normal(size=700)
        model = PrivateAutoRegressor(0.05, DELTA, random_state=0).fit(x, y, xp, yp)
        assert model.model_ == "linear"
        assert model.predict(x).shape == (700,)

    @pytest.mark.parametrize(("wrong", "folds"), [(0.0, 4), (5.0, 1)])
    def test_a_network_far_behind_is_given_up(self, monkeypatch, wrong, folds):
        # A network that is the truth, or far from it; only the latter is not tried again.
        starts = []

        class Start:
            @classmethod
            def of(cls, family, rows):
                starts.append(len(rows))
                found = cls()
                found.network = lambda x: x[:, :1] * x[:, 1:2] + wrong
                return found

        monkeypatch.setattr(nonlinear._network, "Start", Start)
        x = np.random.default_rng(0).normal(size=(600, 3))
        rows = Rows(x, (x[:, 0] * x[:, 1] > 0)[:, None].astype(float))
        found = nonlinear.rehearse(LOGISTIC, rows, None, num_private=10_000, one_step_noise=500.0)
        assert starts == [450] * folds
        assert (found.chosen == "network") == (wrong == 0)
        assert found.losses["network"] > 0

    @staticmethod
    def rehearsed(monkeypatch, family, targets, *, learns=1.0, **wrong):
        """Rehearses models that are wrong by given amounts; a network more so with fewer rows."""
        targets = targets[:, None]

        def models(family, rows, *others):
            factor = {"network": learns if len(rows) < len(targets) // 2 else 1.0}
            offsets = {n: factor.get(n, 1.0) * np.broadcast_to(o, 600) for n, o in wrong.items()}
            return {
                name: lambda x, off=off: (targets[:, 0] + off)[x[:, 0].astype(int), None]
                for name, off in offsets.items()
            }

        monkeypatch.setattr(nonlinear, "_rehearsed", models)
        rows = Rows(np.arange(600.0)[:, None], targets)
        return nonlinear.rehearse(family, rows, None, num_private=10_000, one_step_noise=1.0)

    def test_losses_of_exact_predictions_are_zero(self, monkeypatch):
        y = np.random.default_rng(0).normal(size=600)
        wrong = {"linear": 0.5, "trees": 0.2, "network": 0.0}
        found = self.rehearsed(monkeypatch, SQUARED_ERROR, y, **wrong)
        assert found.losses == pytest.approx({n: 0.5 * off**2 for n, off in wrong.items()})
        scaled = nonlinear._Problem(SQUARED_ERROR, y, y, scale=np.array([1000.0]))
        shown = nonlinear._measured(scaled, found)
        assert shown.measure == "rmse"
        assert shown.values == pytest.approx({n: 1000 * off for n, off in wrong.items()}, abs=1e-3)
        several = nonlinear._Problem(SQUARED_ERROR, y, y, scale=np.array([1000.0, 2.0]))
        shown = nonlinear._measured(several, found)
        assert shown.measure == "rmse in standard deviations of each target"
        assert shown.values["linear"] == pytest.approx(0.5 / 2**0.5)

    def test_losses_of_counts_are_deviances(self, monkeypatch):
        from sklearn.metrics import mean_poisson_deviance

        y = np.random.default_rng(0).poisson(2.0, 600).astype(float)
        wrong = {"linear": 0.5, "trees": 0.2, "network": -0.3}
        found = self.rehearsed(monkeypatch, POISSON, y, **wrong)
        shown = nonlinear._measured(nonlinear._Problem(POISSON, y, y), found)
        assert shown.measure == "deviance"
        for name, off in wrong.items():
            expected = mean_poisson_deviance(y, np.exp(y + off))
            assert shown.values[name] == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("linear", "trees", "network", "learns", "chosen", "reason"),
        [
            (0.1, 0.5, 1.0, 1.0, "linear", "trees are worse by more than one standard error"),
            (0.5, 0.1, 1.0, 1.0, "trees", "they are better than the linear model"),
            (0.1, "near", 1.0, 1.0, "trees", nonlinear._CONTAINED),
            (0.5, 0.5, 0.1, 1.0, "network", nonlinear._NOW),
            (0.5, 0.5, 0.5, 2.0, "network", nonlinear._LATER),
            (
                *(0.5, 0.1, "nearer", 1.0, "trees"),
                "they are better than the linear model, and the network is not ahead of both by "
                "more than one standard error",
            ),
        ],
    )
    def test_says_why(self, monkeypatch, linear, trees, network, learns, chosen, reason):
        # Squares that differ much from row to row, and in the mean by less than a standard error.
        sign = np.where(np.random.default_rng(0).permutation(600) % 2, 1.0, -1.0)
        amounts = {
            "near": 0.1 * np.sqrt(1.005 + 0.9 * sign),
            "nearer": 0.1 * np.sqrt(0.995 + 0.9 * sign),
        }
        found = self.rehearsed(
            monkeypatch,
            SQUARED_ERROR,
            np.random.default_rng(1).normal(size=600),
            learns=learns,
            linear=linear,
            trees=amounts.get(trees, trees),
            network=amounts.get(network, network),
        )
        assert (found.chosen, found.reason) == (chosen, reason)

    def test_few_public_rows_are_linear(self, tables):
        (xp, yp), (x, y), _ = tables
        model = PrivateAutoClassifier(1.0, DELTA, random_state=0)
        model.fit(x[:2000], y[:2000] > 0, xp[:100], yp[:100] > 0)
        assert model.model_ == "linear"
        assert model.rehearsal_ is None
        assert model.predict_proba(x[:5]).shape == (5, 2)


def test_poisson_release_bounds_the_curvature():
    release = boosting.Release.of(POISSON, np.zeros((20, 1)), np.ones((20, 1)) * 3)
    rows = Rows(np.zeros((1, 1)), np.zeros((1, 1)))
    total = boosting.release_sums(
        release, POISSON, np.full((1, 1), 80.0), rows, np.zeros(1, int), 1
    )
    assert np.linalg.norm(total) <= release.l2_clip_norm


def test_edges_lie_between_values():
    """A feature may be rounded in another way where an exported model runs."""
    hours = np.arange(3000) % 24
    x = np.column_stack([np.sin(2 * np.pi * hours / 24), np.arange(3000.0), hours**2.0])
    for feature in range(3):
        for num_bins in (4, 8, 16):
            cut = cells._cut(x, (feature,), num_bins)
            values = np.unique(x[:, feature])
            gaps = np.abs(cut.edges[:, None] - values).min(axis=1)
            assert (gaps > 1e-6 * np.ptp(values) / len(values)).all()
            # Cells hold about as many rows as those at quantiles.
            counts = np.bincount(cut(x), minlength=cut.size)
            assert counts.max() <= 2.1 * len(x) / num_bins
