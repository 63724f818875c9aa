"""Measures on test rows and their intervals, against plain formulas and repeated samples."""

import numpy as np
import pytest

from mirrordp.tables import (
    CategoryColumn,
    ClassTarget,
    NumberColumn,
    NumberTarget,
    TableEncoding,
    evaluation,
)

NUMBER = NumberTarget("y", is_count=False)
COUNT = NumberTarget("y", is_count=True)
BINARY = ClassTarget("y", ("no", "yes"), False)
THREE = ClassTarget("y", ("a", "b", "c"), False)


def binary(rng, rows, slope=1.0):
    """Probabilities, and classes that follow them."""
    score = rng.normal(size=rows)
    p = 1 / (1 + np.exp(-slope * score))
    truth = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(int)
    return truth, np.column_stack([1 - p, p])


def test_measures_of_numbers():
    rng = np.random.default_rng(0)
    y, p = rng.poisson(3, 40).astype(float), rng.uniform(1, 5, 40)
    found = {name: value.value for name, value in evaluation.measure(COUNT, y, p).items()}
    error = np.abs(y - p)
    logs = y * np.log(np.where(y > 0, y, 1) / p)
    assert found == pytest.approx(
        {
            "rmse": np.sqrt(np.mean(error**2)),
            "mae": error.mean(),
            "r2": 1 - np.sum(error**2) / np.sum((y - y.mean()) ** 2),
            "median_error": np.median(error),
            "error_90": np.quantile(error, 0.9),
            "deviance": 2 * np.mean(logs - y + p),
        }
    )
    assert "deviance" not in evaluation.measure(NUMBER, y, p)


def test_measures_of_two_classes():
    rng = np.random.default_rng(0)
    truth, shares = binary(rng, 60)
    found = {name: value.value for name, value in evaluation.measure(BINARY, truth, shares).items()}
    p = shares[:, 1]
    pairs = p[truth == 1][:, None] - p[truth == 0][None, :]
    assert found["loss"] == pytest.approx(-np.mean(np.log(np.where(truth, p, 1 - p))))
    assert found["accuracy"] == np.mean((p > 0.5) == truth)
    assert found["auc"] == pytest.approx(np.mean(pairs > 0))
    order = np.argsort(-p)
    hits = np.cumsum(truth[order])
    precision = hits / np.arange(1, 61)
    assert found["average_precision"] == pytest.approx(precision[truth[order] == 1].mean())


def test_measures_of_three_classes():
    rng = np.random.default_rng(0)
    truth, scores = rng.integers(3, size=90), rng.normal(size=(90, 3))
    scores[np.arange(90), truth] += 1
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    found = evaluation.measure(THREE, truth, shares)
    areas = [
        np.mean(shares[truth == k, k][:, None] > shares[truth != k, k][None, :]) for k in range(3)
    ]
    assert found["auc"].value == pytest.approx(np.mean(areas))
    assert set(found) == {"loss", "accuracy", "auc", "average_precision", "calibration_error"}
    # A class without test rows is left out of the means.
    assert np.isfinite(evaluation.measure(THREE, truth % 2, shares)["auc"].value)


def test_calibration():
    rng = np.random.default_rng(0)
    truth, shares = binary(rng, 20_000)
    honest = evaluation.measure(BINARY, truth, shares)["calibration_error"]
    assert honest.value < 0.02
    truth, shares = binary(rng, 20_000, slope=3.0)
    assert evaluation.measure(BINARY, truth, shares)["calibration_error"].value > 0.1
    # A constant is off by the difference to the share of hits, whatever the bins.
    constant = np.tile([0.1, 0.9], (20_000, 1))
    found = evaluation.measure(BINARY, truth, constant)["calibration_error"].value
    assert found == pytest.approx(abs(0.9 - truth.mean()))
    points = evaluation.calibration_curve(truth, shares)
    assert len(points) == 10
    assert sum(point["rows"] for point in points) == 20_000
    assert all(point["low"] <= point["observed"] <= point["high"] for point in points)
    assert points[0]["predicted"] < 0.1 < points[0]["observed"]
    assert len(evaluation.calibration_curve(truth, constant)) == 1


def test_residuals():
    rng = np.random.default_rng(0)
    predicted = rng.normal(size=5000)
    points = evaluation.residual_curve(predicted + rng.normal(size=5000), predicted)
    assert len(points) == 20
    # Normal noise has its 90% quantile at 1.28.
    spread = np.mean([point["high"] - point["low"] for point in points])
    assert spread == pytest.approx(2 * 1.2816, rel=0.05)
    assert abs(np.mean([p["observed"] - p["predicted"] for p in points])) < 0.05


@pytest.mark.parametrize("name", ["auc", "loss", "rmse", "error_90"])
def test_standard_errors_are_those_of_repeated_samples(name, monkeypatch):
    target = NUMBER if name in ("rmse", "error_90") else BINARY
    only = evaluation._measures(target)[name]
    monkeypatch.setattr(evaluation, "_measures", lambda _: {name: only})

    def sample(seed):
        rng = np.random.default_rng(seed)
        if target is BINARY:
            return binary(rng, 150)
        return rng.normal(size=1500), np.zeros(1500)

    values = [only[0](*sample(seed)) for seed in range(200)]
    errors = [evaluation.measure(target, *sample(k))[name].standard_error for k in range(25)]
    stated = np.sqrt(np.mean(np.square(errors)))

    def agrees(ratio):
        return abs(np.log(ratio)) < 0.25

    ratio = stated / np.std(values, ddof=1)
    assert agrees(ratio)
    assert not agrees(ratio * 2 / 3)
    assert not agrees(ratio * 3 / 2)


def test_many_rows_are_sampled_for_the_standard_error(monkeypatch):
    rng = np.random.default_rng(0)
    truth, predicted = rng.normal(size=16_000), np.zeros(16_000)
    whole = evaluation.measure(NUMBER, truth, predicted)["mae"]
    monkeypatch.setattr(evaluation, "_MAX_ROWS", 1000)
    part = evaluation.measure(NUMBER, truth, predicted)["mae"]
    assert part.value == whole.value
    # The deviation of |normal|, over the root of all rows, not of the sample.
    exact = np.sqrt(1 - 2 / np.pi) / np.sqrt(16_000)
    for found in (whole, part):
        assert abs(np.log(found.standard_error / exact)) < 0.5
        assert abs(np.log(4 * found.standard_error / exact)) > 0.5


def test_intervals_stay_within_bounds():
    truth = np.array([0, 1] * 20)
    truth[0] = 1
    right = np.eye(2)[truth] * 0.98 + 0.01
    right[1] = right[1, ::-1]
    found = evaluation.measure(BINARY, truth, right)
    assert found["accuracy"].value == 0.975
    assert found["accuracy"].low < 0.975
    assert found["accuracy"].high == 1.0


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows(rows):
    """What is not defined is left out, and there is no warning."""
    truth, shares = binary(np.random.default_rng(0), rows)
    found = evaluation.measure(BINARY, truth * 0, shares)
    assert "auc" not in found
    assert (found["loss"].low is None) == (rows < 3)
    numbers = evaluation.measure(NUMBER, np.arange(rows, dtype=float), np.ones(rows))
    assert ("r2" in numbers) == (rows > 1)


def test_what_a_report_gets():
    rng = np.random.default_rng(0)
    truth, shares = binary(rng, 100)
    guess = evaluation.guess(BINARY, np.array([0, 0, 0, 1]), 100)
    assert guess[0].tolist() == [0.75, 0.25]
    found = evaluation.evaluate(
        [BINARY], truth, {evaluation.MODEL: shares, evaluation.GUESS: guess}
    )
    assert found["test_auc"] > found["baseline_auc"] == 0.5
    assert found["test_auc_standard_error"] > 0
    assert "public_auc" not in found
    assert found["test"]["models"]["this model"]["auc"]["value"] == found["test_auc"]
    assert found["test"]["curves"][0]["event"] == "y = yes"
    assert evaluation.guess(NUMBER, np.array([1.0, 3.0]), 2).tolist() == [2.0, 2.0]


def encoding_of(*columns):
    return TableEncoding(columns, NUMBER)


def number(name):
    return NumberColumn(name, 0.0, 1.0, -1.0, 1.0, False)


def test_largest_coefficients():
    root = np.zeros((1, 2, 3))
    root[0, 1] = [3.0, 0.0, 4.0]
    found = evaluation.largest_effects(
        encoding_of(number("p"), number("q")), ("y",), np.array([[1.0, -3.0]]), root
    )
    assert [(one["feature"], one["value"], one["noise_stddev"]) for one in found] == [
        ("q", -3.0, 5.0),
        ("p", 1.0, 0.0),
    ]
    wide = evaluation.largest_effects(
        encoding_of(*map(number, map(str, range(50)))), ("y",), np.ones((1, 50)), None
    )
    assert len(wide) == 20
    assert wide[0]["noise_stddev"] is None


def test_effects_leave_out_what_changes_no_prediction():
    """A constant on all categories of a column, or on all classes, and the noise in it."""
    colours = CategoryColumn("colour", ("blue", "red"), "red", False)
    encoding = encoding_of(number("x"), colours)
    coefficients = np.array([[2.0, 1.0, 5.0]])
    root = np.array([[[0.0, 0.0], [100.0, 1.0], [100.0, -1.0]]])
    by_name = {
        one["feature"]: (one["value"], one["noise_stddev"])
        for one in evaluation.largest_effects(encoding, ("y",), coefficients, root)
    }
    assert by_name == {"x": (2.0, 0.0), "colour=blue": (-2.0, 1.0), "colour=red": (2.0, 1.0)}
    classes = np.array([[2.0], [4.0], [0.0]])
    found = evaluation.largest_effects(encoding_of(number("x")), ("a", "b", "c"), classes + 7, None)
    assert {one["output"]: one["value"] for one in found} == {"a": 0.0, "b": 2.0, "c": -2.0}
    assert coefficients.tolist() == [[2.0, 1.0, 5.0]]


@pytest.mark.parametrize("target", [NUMBER, COUNT, BINARY, THREE])
def test_the_model_without_protection(target):
    """It finds the coefficients that made the rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 2))
    slopes = np.array([[0.5, -1.0], [0.0, 0.0], [1.0, 1.0]])[: 3 if target is THREE else 1]
    scores = x @ slopes.T
    if target is NUMBER:
        y = scores[:, 0] + rng.normal(size=4000)
    elif target is COUNT:
        y = rng.poisson(np.exp(scores[:, 0]))
    elif target is BINARY:
        y = (scores[:, 0] + rng.logistic(size=4000) > 0).astype(int)
    else:
        y = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    found, intercepts = evaluation.fit_without_protection("", target, x, y)
    assert found.shape == slopes.shape
    assert intercepts.shape == slopes.shape[:1]
    np.testing.assert_allclose(found - found[-1:], slopes - slopes[-1:], atol=0.15)
