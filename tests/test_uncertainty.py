"""The standard deviations that noise gives coefficients, against many fits of the same rows."""

import jax
import numpy as np
import pytest

from mirrordp.linear import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateOrdinalRegression,
    PrivatePoissonRegressor,
    descent,
    uncertainty,
)
from mirrordp.linear._planning import Scaling
from mirrordp.linear.descent import ClippedSum, Rows
from mirrordp.mirror import families

FITS = 200
OUTPUTS = {"three classes": 3, "ordered classes": 2}
KINDS = {
    "regression": PrivateLinearRegression,
    "two classes": PrivateLogisticRegression,
    "three classes": PrivateLogisticRegression,
    "count": PrivatePoissonRegressor,
    "ordered classes": PrivateOrdinalRegression,
}


def rows(task, count, seed):
    rng = np.random.default_rng(seed)
    # Columns of different scales that depend on each other, and an indicator.
    x = rng.normal(size=(count, 3)) @ np.array([[1.0, 0.5, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.1]])
    x = np.column_stack([x, rng.random(count) < 0.2])
    score = x @ np.array([1.0, -0.2, 3.0, 0.5])
    if task == "regression":
        return x, score + rng.normal(size=count)
    if task == "count":
        return x, rng.poisson(np.exp(0.5 * score))
    noisy = score + rng.logistic(size=count)
    return x, (noisy > 0).astype(int) if task == "two classes" else np.digitize(noisy, [-1, 1])


def spread_over_fits(monkeypatch, task, **options):
    """The empirical standard deviations of coefficients over fits, and those that a fit states.

    The fits share all that comes before the descent, and differ in the key of its noise.
    """
    calls = []
    descend, original = descent.private_descent, Scaling.original

    def remember(*arguments, key, **settings):
        calls.append(lambda key: descend(*arguments, key=key, **settings))
        return calls[0](key)

    monkeypatch.setattr(descent, "private_descent", remember)
    maps = []
    monkeypatch.setattr(Scaling, "original", lambda *args: maps.append(args) or original(*args))
    x, y = rows(task, 1500, 0)
    x_public, y_public = rows(task, 1500, 1)
    model = KINDS[task](1.0, 1e-5, random_state=0, **options)
    model.fit(x, y, X_public=x_public, y_public=y_public)
    scaling, theta = maps[0]
    np.testing.assert_array_equal(
        original(scaling, theta)[0] * scale_of(model, y_public), np.atleast_2d(model.coef_)
    )
    keys = jax.random.split(jax.random.key(1), FITS)
    found = [original(scaling, calls[0](key))[0] * scale_of(model, y_public) for key in keys]
    # A linear function of coefficients has the norm of that function of the root: a sum, here.
    sums = np.std(np.sum(found, axis=2), axis=0, ddof=1)
    stated = np.linalg.norm(model.noise_root_.sum(axis=1), axis=1)
    assert agrees(sums, stated)
    assert not agrees(sums, np.linalg.norm(model.noise_stddev_.sum(axis=1, keepdims=True), axis=1))
    return np.std(found, axis=0, ddof=1), model.noise_stddev_


def scale_of(model, y_public):
    """Targets of regression are divided by their public deviation."""
    return np.std(y_public) if isinstance(model, PrivateLinearRegression) else 1.0


def agrees(empirical, stated):
    """Whether the ratio of all coefficients together is one, up to its own error.

    A sample deviation of k fits has a relative error of 1/√(2k), 5% here. Public rows in place of
    private ones add about as much; deviations of one model are not independent of each other.
    """
    ratios = np.log(empirical / stated)
    return bool(abs(ratios.mean()) < 0.12 and abs(ratios).max() < 0.25)


@pytest.mark.parametrize(
    ("task", "method"),
    [*((task, "exact") for task in KINDS), ("regression", "dpsgd"), ("two classes", "dpsgd")],
)
def test_the_spread_of_repeated_fits(monkeypatch, task, method):
    settings = {"num_steps": 12, "learning_rate": 0.4}
    empirical, stated = spread_over_fits(monkeypatch, task, method=method, **settings)
    assert empirical.shape == stated.shape == (OUTPUTS.get(task, 1), 4)
    assert agrees(empirical, stated)
    # Other formulas are noticed: noise that is too small or large, the last iterate in place of the
    # mean, and a descent in which no noise is forgotten.
    for wrong in (2 / 3, 3 / 2):
        assert not agrees(empirical, wrong * stated)
    if method == "exact":
        ones = np.ones(1)
        right = uncertainty.noise_gains(ones, **settings)
        last = 0.4 * np.sqrt(np.sum(0.6 ** (2 * np.arange(12))))
        walk = uncertainty.noise_gains(0 * ones, **settings)
        assert not agrees(empirical, stated * walk / right)
        assert not agrees(empirical, stated * last / right)


def test_gains_are_those_of_a_linear_recursion():
    """The influence of each noise, by running the recursion with that noise alone."""
    for h, num_steps, rate in [(1.0, 12, 0.4), (0.1, 8, 0.8), (2.0, 30, 0.1), (0.0, 5, 0.2)]:
        total = 0.0
        for j in range(num_steps):
            error, mean, first = 0.0, 0.0, num_steps // 8
            for step in range(num_steps):
                error -= rate * (h * error + (step == j))
                mean += error * (step >= first) / (num_steps - first)
            total += mean**2
        (found,) = uncertainty.noise_gains(np.array([h]), num_steps=num_steps, learning_rate=rate)
        assert found == pytest.approx(np.sqrt(total), rel=1e-12)


@pytest.mark.parametrize(
    ("family", "outputs"),
    [
        (families.SQUARED_ERROR, 1),
        (families.LOGISTIC, 1),
        (families.MULTINOMIAL, 3),
        (families.POISSON, 1),
    ],
)
@pytest.mark.parametrize("clip", [1.5, 1e6])
def test_the_jacobian_is_that_of_the_clipped_sum(family, outputs, clip):
    rng = np.random.default_rng(0)
    targets = np.eye(outputs)[rng.integers(outputs, size=50)] if outputs > 1 else None
    targets = rng.integers(2, size=(50, 1)).astype(float) if targets is None else targets
    some = Rows(rng.normal(size=(50, 2)), targets)
    theta = rng.normal(size=(2, outputs))
    clipped_sum = ClippedSum(family, np.array([clip]))

    def mean(theta):
        return clipped_sum(theta[:, :, None], some).ravel() / 50

    step = 1e-6
    columns = []
    for direction in np.eye(theta.size).reshape(-1, *theta.shape):
        difference = mean(theta + step * direction) - mean(theta - step * direction)
        columns.append(difference / (2 * step))
    expected = np.array(columns)
    found = uncertainty.clipped_jacobian(family, theta, some, clip)
    np.testing.assert_allclose(found, (expected + expected.T) / 2, atol=1e-4)
    if clip < 10:
        assert np.linalg.norm(found - uncertainty.clipped_jacobian(family, theta, some, 1e6)) > 0.01


def test_the_public_model_has_no_noise_and_large_models_state_none(monkeypatch):
    x, y = rows("regression", 30, 0)
    x_public, y_public = rows("regression", 300, 1)
    model = PrivateLinearRegression(0.01, 1e-5, random_state=0)
    model.fit(x, y, X_public=x_public, y_public=y_public)
    assert model.n_iter_ == 0
    assert model.noise_stddev_.tolist() == [[0.0] * 4]
    np.testing.assert_array_equal(model.coef_, model.public_coef_)
    assert model.intercept_ == model.public_intercept_
    monkeypatch.setattr(uncertainty, "MAX_PARAMETERS", 3)
    model = PrivateLinearRegression(1.0, 1e-5, random_state=0, num_steps=3, learning_rate=0.1)
    model.fit(x, y, X_public=x_public, y_public=y_public)
    assert model.noise_stddev_ is None
    assert model.noise_root_ is None
