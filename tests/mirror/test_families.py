"""One definition of each family: derivatives that belong together, in NumPy as in JAX."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.mirror import families
from mirrordp.mirror.families import LOGISTIC, MULTINOMIAL, POISSON, SQUARED_ERROR

FAMILIES = {family.name: family for family in (SQUARED_ERROR, LOGISTIC, MULTINOMIAL, POISSON)}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def scores(family):
    outputs = 3 if family is MULTINOMIAL else 1
    return np.random.default_rng(0).normal(size=(20, outputs)) * 5


def test_mean_and_covariance_are_derivatives_of_the_cumulant(family, scores):
    with jax.enable_x64(True):
        row = jnp.asarray(scores[:1])
        cumulant = lambda s: family.cumulant(s)[0]  # noqa: E731
        grad = jax.grad(cumulant)(row)
        hessian = jax.hessian(cumulant)(row)[0, :, 0]
        np.testing.assert_allclose(family.mean(scores)[:1], grad, rtol=1e-12)
        np.testing.assert_allclose(family.covariance(scores)[0], hessian, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["cumulant", "mean", "covariance"])
def test_numpy_and_jax_agree(family, scores, name):
    function = getattr(family, name)
    assert isinstance(function(scores), np.ndarray)
    with jax.enable_x64(True):
        found = function(jnp.asarray(scores))
        assert isinstance(found, jax.Array)
        np.testing.assert_allclose(function(scores), found, rtol=1e-12, atol=1e-15)


def test_extreme_scores_overflow_nowhere(family, scores):
    with np.errstate(all="raise", under="ignore"):
        for size in (1e3, 1e150):
            extreme = size * np.sign(scores)
            for function in (family.cumulant, family.mean, family.covariance, family.curvature):
                assert np.isfinite(function(extreme)).all()


def test_the_mean_count_is_the_slope_of_the_loss_also_beyond_the_guard():
    for score in (50.0, 99.9, 100.1, 300.0):
        around = np.array([[score - 1e-3], [score + 1e-3]])
        low, high = POISSON.loss(around, np.zeros_like(around))
        slope = POISSON.mean(np.array([[score]]))[0, 0]
        assert (high - low) / 2e-3 == pytest.approx(slope, rel=1e-3)


def test_targets_meet_scores_with_further_axes(family, scores):
    targets = np.abs(scores)
    many = np.stack([scores, 2 * scores], axis=2)
    for k in range(2):
        one = many[:, :, k]
        np.testing.assert_allclose(family.loss(many, targets)[:, k], family.loss(one, targets))
        found = family.residuals(many, targets)[:, :, k]
        np.testing.assert_allclose(found, family.residuals(one, targets))


def test_two_classes_need_one_column():
    log_odds = np.array([[-1e4], [-1.0], [0.0], [3.0], [1e4]])
    found = families.class_probabilities(log_odds)
    np.testing.assert_allclose(found[:, 1:], LOGISTIC.mean(log_odds), rtol=1e-14)
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_families_survive_pickling(family):
    """They are static parts of mirror maps, which may be sent to another process."""
    again = pickle.loads(pickle.dumps(family))
    assert again == family
    assert hash(again) == hash(family)
