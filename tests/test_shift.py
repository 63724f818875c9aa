"""Private rows that are not of the kind of the public ones: the descent must stay stable."""

import functools
import math

import numpy as np
import pytest

from mirrordp import cli
from mirrordp.data import UNPROTECTED
from mirrordp.linear import descent
from mirrordp.linear.descent import Rows, descend, descend_safely, mean_loss
from mirrordp.linear.estimators import PrivateLinearRegression, PrivateLogisticRegression
from mirrordp.mirror.families import LOGISTIC, SQUARED_ERROR
from mirrordp.report import RunReport

pytestmark = pytest.mark.filterwarnings(
    "ignore:this is one of", "ignore:.*most private values are beyond"
)


def quadratic(curvatures, noise, seed):
    """Returns the noisy gradient of ½ Σ λ_j (θ_j − 1)², and a list that counts its calls."""
    rng, calls = np.random.default_rng(seed), []

    def gradient(theta):
        calls.append(theta)
        return curvatures * (theta - 1) + rng.normal(size=theta.shape) * noise

    return gradient, calls


class TestDescent:
    def test_rows_of_the_same_kind_give_the_plain_descent_to_the_bit(self):
        curvatures = np.linspace(0.3, 1.2, 12).reshape(6, 2)
        for seed, noise in enumerate([0.0, 1e-3, 0.1, 10.0]):
            plain, safe = (
                function(
                    quadratic(curvatures, noise, seed)[0],
                    np.zeros((6, 2)),
                    num_steps=24,
                    learning_rate=0.8,
                    **options,
                )
                for function, options in ((descend, {}), (descend_safely, {"noise": noise}))
            )
            assert plain.tobytes() == safe.tobytes()

    @pytest.mark.parametrize("num_steps", [1, 2, 9, 64])
    def test_takes_as_many_gradients_as_are_paid_for(self, num_steps):
        gradient, calls = quadratic(np.array([[1.0], [300.0]]), 0.01, 0)
        descend_safely(
            gradient, np.zeros((2, 1)), num_steps=num_steps, learning_rate=0.8, noise=0.01
        )
        assert len(calls) == num_steps

    @pytest.mark.parametrize("steepest", [4.0, 30.0, 1000.0])
    def test_stable_where_plain_steps_diverge(self, steepest):
        curvatures = np.ones((40, 1))
        curvatures[3], curvatures[7] = steepest, math.sqrt(steepest)
        options = {"num_steps": 64, "learning_rate": 0.8}

        def error(function, **more):
            gradient, _ = quadratic(curvatures, 0.001, 1)
            end = function(gradient, np.zeros((40, 1)), **options, **more)
            return float(np.max(np.abs(end - 1)))

        assert error(descend) > 10
        assert error(descend_safely, noise=0.001) < 0.1

    def test_noise_alone_seldom_looks_like_curvature(self):
        """With a tenth of the three standard errors, many runs would change."""

        def share_of_changed_runs(stated_noise):
            changed = 0
            for seed in range(60):
                plain, safe = (
                    function(
                        quadratic(np.full((10, 1), 0.9), 1.0, seed)[0],
                        np.ones((10, 1)),
                        num_steps=64,
                        learning_rate=0.8,
                        **options,
                    )
                    for function, options in (
                        (descend, {}),
                        (descend_safely, {"noise": stated_noise}),
                    )
                )
                changed += plain.tobytes() != safe.tobytes()
            return changed / 60

        assert share_of_changed_runs(1.0) < 0.1
        assert share_of_changed_runs(0.1) > 0.5


def draw(shift, n, rng, *, classify):
    """Rows of five features; `shift` says how the private ones differ from the public ones."""
    x = rng.normal(size=(n, 5)) * [1.0, 1.0, 1.0, 1.0, 0.3]
    weights, level = np.array([1.0, -1.0, 0.5, 0.0, 1.0]), 0.0
    if shift == "mean":
        x += np.array([3.0, 0.0, 0.0, 2.0, 0.0])
    elif shift == "scale":
        x[:, 4] *= 12
    elif shift == "class balance":
        level = 2.5
    elif shift == "relation":
        weights = np.array([-1.0, -1.0, 0.5, 1.5, 1.0])
    scores = x @ weights + level
    if not classify:
        return x, scores + rng.normal(size=n)
    return x, (rng.random(n) < 1 / (1 + np.exp(-scores))).astype(int)


@functools.cache
def losses(shift, classify):
    """Test losses of the public model, and of the default and warm DP-SGD for two seeds each."""
    estimator = PrivateLogisticRegression if classify else PrivateLinearRegression
    family = LOGISTIC if classify else SQUARED_ERROR
    rng = np.random.default_rng(0)
    public = draw(None, 150, rng, classify=classify)
    private = draw(shift, 8000, rng, classify=classify)
    test = draw(shift, 4000, rng, classify=classify)

    def loss(model):
        theta = np.append(model.coef_.ravel(), model.intercept_)[:, None]
        rows = Rows(np.column_stack([test[0], np.ones(len(test[0]))]), test[1][:, None])
        return float(mean_loss(family, theta, rows))

    # Too little budget for anything: the public model.
    found = {"public": [loss(estimator(1e-5).fit(*private, *public))]}
    for method in ("auto", "dpsgd"):
        found[method] = [
            loss(estimator(1.0, method=method, random_state=seed).fit(*private, *public))
            for seed in range(2)
        ]
    return found


@pytest.mark.parametrize(
    ("shift", "classify"),
    [
        *((shift, True) for shift in (None, "mean", "scale", "class balance", "relation")),
        *((shift, False) for shift in ("mean", "scale", "relation")),
    ],
)
def test_not_worse_than_the_public_model_and_warm_dp_sgd(shift, classify):
    found = losses(shift, classify)
    rival = min(np.mean(found["public"]), np.mean(found["dpsgd"]))
    spread = np.std(found["auto"]) + np.std(found["dpsgd"])
    assert np.mean(found["auto"]) < rival + 3 * spread + 0.01 * abs(rival)


def test_plain_steps_would_be_worse(monkeypatch):
    """The test above notices a descent that trusts the public curvature."""
    losses.cache_clear()
    monkeypatch.setattr(
        descent, "descend_safely", lambda *args, noise, **options: descend(*args, **options)
    )
    with pytest.raises(AssertionError):
        test_not_worse_than_the_public_model_and_warm_dp_sgd("scale", True)
    losses.cache_clear()


def test_method_and_learning_rate_on_the_command_line(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name, rows in (("private", 300), ("public", 40)):
        x, y = draw(None, rows, rng, classify=False)
        table = np.column_stack([x, y])
        header = "a,b,c,d,e,y"
        np.savetxt(tmp_path / f"{name}.csv", table, delimiter=",", header=header, comments="")
    command = [
        *("fit", "--private", f"{tmp_path}/private.csv", "--public", f"{tmp_path}/public.csv"),
        *("--target", "y", "--task", "regression", "--epsilon", "1", "--seed", "0"),
    ]
    options = ["--method", "dpsgd", "--learning-rate", "0.25", "--out", f"{tmp_path}/model"]
    assert cli.main([*command, *options]) == 0
    results = RunReport.read(tmp_path / "model").results
    assert results["method"] == "warm DP-SGD"
    assert results["learning_rate"] == 0.25
    assert "given by the caller" in capsys.readouterr().out
    assert cli.main([*command, "--method", "newton", "--out", f"{tmp_path}/other"]) == 2
    assert "newton" in capsys.readouterr().err


def test_cells_beyond_the_public_table_are_counted(tmp_path, capsys):
    """They are moved to the end of the public range, and nobody should have to guess that."""
    rng = np.random.default_rng(0)
    for name, rows, highest in (("private", 300, 3.0), ("public", 40, 1.0), ("new", 90_000, 2.0)):
        x = rng.uniform(0, 1, size=rows).round(3)
        x[:3] = [0.0, 1.0, highest]
        kind = np.where(np.arange(rows) % 2, "a", "b")
        kind[4] = "b" if name == "public" else "c"
        lines = [f"{value},{word},{value + 1}" for value, word in zip(x, kind, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,kind,y", *lines]) + "\n")
    command = [
        *("fit", "--private", f"{tmp_path}/private.csv", "--public", f"{tmp_path}/public.csv"),
        *("--target", "y", "--task", "regression", "--epsilon", "1", "--seed", "0"),
        *("--out", f"{tmp_path}/model"),
    ]
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    beyond = "numbers beyond the public range of 0 to 1, moved to its ends."
    assert f"{UNPROTECTED} column 'x': 1 of 300 {beyond}" in shown.err
    assert f"{UNPROTECTED} column 'kind': 1 of 300 cells of no common" in shown.err
    assert "of 300" not in shown.out
    for path in (tmp_path / "model").iterdir():
        assert "of 300" not in path.read_text()
    predict = ["predict", "--model", f"{tmp_path}/model", "--input", f"{tmp_path}/new.csv"]
    assert cli.main([*predict, "--output", f"{tmp_path}/out.csv"]) == 0
    shown = capsys.readouterr().out
    # One line for the whole file, which is read in several batches.
    assert f"Column 'x': 1 of 90000 {beyond}" in shown
    assert "Column 'kind': 1 of 90000 cells of no common public category" in shown


class TestGuard:
    """The private test of a result against the public model, which is part of the mechanism."""

    def make(self, better: bool):
        rng = np.random.default_rng(0)
        truth = np.array([1.0, -2.0, 0.5])
        x, xp = rng.normal(size=(4000, 3)), rng.normal(size=(400, 3))
        y = x @ (truth if better else truth / 2) + 0.1 * rng.normal(size=4000)
        yp = xp @ (truth / 2) + 0.1 * rng.normal(size=400)
        return x, y, xp, yp

    def test_costs_one_step_of_the_same_budget(self):
        x, y, xp, yp = self.make(better=True)
        plain, guarded = (
            PrivateLinearRegression(1.0, 1e-6, num_steps=8, guard=guard, random_state=0).fit(
                x, y, xp, yp
            )
            for guard in (False, True)
        )
        assert (plain.n_iter_, guarded.n_iter_) == (8, 9)
        assert guarded.privacy_.charged_steps == 9
        assert guarded.privacy_.noise_multiplier > plain.privacy_.noise_multiplier
        assert guarded.privacy_.epsilon <= 1

    def test_keeps_what_private_rows_fit_better(self):
        x, y, xp, yp = self.make(better=True)
        model = PrivateLinearRegression(1.0, 1e-6, guard=True, random_state=0).fit(x, y, xp, yp)
        assert model.privacy_.results["kept"] == "private model"
        assert not np.allclose(model.coef_, model.public_coef_)

    def test_falls_back_from_a_descent_that_went_wrong(self):
        x, y, xp, yp = self.make(better=False)
        options = {"num_steps": 8, "learning_rate": 100.0, "l2_clip_norm": 0.1}
        wrong = PrivateLinearRegression(0.1, 1e-6, random_state=0, **options)
        wrong.fit(x, y, xp, yp)
        model = PrivateLinearRegression(0.1, 1e-6, guard=True, random_state=0, **options)
        model.fit(x, y, xp, yp)
        assert model.privacy_.results["kept"] == "public model"
        assert (model.coef_ == model.public_coef_).all()
        assert np.linalg.norm(wrong.coef_ - model.coef_) > 0.03

    def test_a_row_moves_the_test_by_the_clip_norm(self):
        rng = np.random.default_rng(0)
        rows = descent.Rows(rng.normal(size=(50, 3)), rng.normal(size=(50, 1)))
        start, end = rng.normal(size=(3, 1)), rng.normal(size=(3, 1))
        totals = []
        for target in (1e200, -1e200, 0.0, np.nan, 3.0):
            targets = rows.targets.copy()
            targets[7] = target
            changed = descent.Rows(rows.features, targets)
            totals.append(descent.clipped_gain(SQUARED_ERROR, start, end, changed, 0.5, 2.0))
        without = descent.Rows(rows.features, rows.targets, np.arange(50) != 7)
        base = descent.clipped_gain(SQUARED_ERROR, start, end, without, 0.5, 2.0)
        moved = np.abs(np.array(totals) - base)
        assert moved.max() <= 2.0
        assert moved.max() > 1.9

    def test_needs_public_rows(self):
        x, y, _, _ = self.make(better=True)
        with pytest.raises(ValueError, match="guard=True compares"):
            PrivateLinearRegression(1.0, 1e-6, guard=True).fit(x, y)
