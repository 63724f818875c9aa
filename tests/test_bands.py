"""Correlated noise that is shaped by the public curvature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import mirrordp
from mirrordp import Mechanism, PoissonSampling, PrivateData, PublicData, TrainStep, tuning
from mirrordp.privacy import BandedNoise, CyclicPoissonSampling
from mirrordp.tuning import bands
from mirrordp.tuning.rules import public_spectrum
from tests import tools

VALUES, COUNTS = np.array([2.0, 0.5, 0.01, 0.0]), np.array([1.0, 3.0, 40.0, 7.0])
STEPS, RATE = 40, 0.3


def dense(coefficients, values=VALUES, counts=COUNTS, rate=RATE, steps=STEPS):
    """The mean loss of the noise by matrices."""
    column = np.zeros(steps)
    column[: len(coefficients)] = coefficients
    inverse = np.linalg.inv(scipy.linalg.toeplitz(column, np.zeros(steps)))
    total = 0.0
    for value, count in zip(values, counts, strict=True):
        powers = rate * (1 - rate * value) ** np.arange(steps)
        shifts = scipy.linalg.toeplitz(powers, np.zeros(steps)) @ inverse
        total += count * value / 2 * (shifts**2).sum(axis=1).mean()
    return total * np.sum(np.square(coefficients))


class TestHarm:
    @pytest.mark.parametrize("coefficients", [(1.0,), (1.0, 0.5), (2.0, 0.7, -0.1, 0.3)])
    def test_is_that_of_the_matrices(self, coefficients):
        found, _ = bands._harm(np.array(coefficients), VALUES, COUNTS, RATE, STEPS)
        np.testing.assert_allclose(found, dense(coefficients), rtol=1e-10)

    def test_the_gradient_is_that_of_differences(self):
        at = np.array([1.0, 0.6, 0.2, -0.1])
        _, gradient = bands._harm(at, VALUES, COUNTS, RATE, STEPS)
        for place, slope in enumerate(gradient):
            step = 1e-6 * np.eye(4)[place]
            by_difference = (dense(at + step) - dense(at - step)) / 2e-6
            np.testing.assert_allclose(slope, by_difference, rtol=1e-5)


class TestShapedBands:
    @pytest.mark.parametrize("num_bands", [2, 5, 12])
    def test_beats_independent_noise_and_prefix_sums(self, num_bands):
        plain = BandedNoise.optimal(STEPS, num_bands)
        found = bands.shaped_bands(plain, VALUES, COUNTS, RATE, STEPS)
        assert found.num_bands == num_bands
        assert dense(found.coefficients) < 0.995 * dense(plain.coefficients)
        assert dense(found.coefficients) < 0.995 * dense([1.0])
        # A minimum: no random change of the coefficients is better.
        rng = np.random.default_rng(0)
        for size in (0.01, 0.1):
            other = np.asarray(found.coefficients) + size * rng.normal(size=num_bands)
            assert dense(other) > dense(found.coefficients)

    def test_without_curvature_it_is_the_noise_of_prefix_sums(self):
        plain = BandedNoise.optimal(STEPS, 6)
        found = bands.shaped_bands(plain, np.array([1e-7]), np.ones(1), RATE, STEPS)
        expected = np.asarray(plain.coefficients) / plain.coefficients[0]
        np.testing.assert_allclose(found.coefficients, expected, atol=5e-3)
        flat = bands.shaped_bands(plain, np.zeros(2), np.ones(2), RATE, STEPS)
        assert flat == plain

    def test_refuses_a_rate_at_which_training_diverges(self):
        with pytest.raises(ValueError, match="learning_rate must be below 1,"):
            bands.shaped_bands(BandedNoise.optimal(8, 2), VALUES, COUNTS, 1.0, 8)


SCALES = np.array([3.0, 1.0, 0.3], np.float32)
PUBLIC = PublicData(tools.features(rows=50, seed=1))
PRIVATE = PrivateData(np.zeros((64, 3), np.float32))


def bowl(params, row):
    """Has the same curvature for every row, and no gradient at zero for a row of zeros."""
    return 0.5 * jnp.sum(jnp.asarray(SCALES) * params**2) - 0.0 * jnp.sum(row * params)


def noisy(noise, groups=4, **options):
    sampling = CyclicPoissonSampling.for_batch_size(8, num_examples=64, num_groups=groups)
    given = {"sampling": sampling, "l2_clip_norm": 1.0, "noise_multiplier": 0.5, "num_steps": 30}
    return Mechanism(noise=noise, **(given | options))


def test_the_spectrum_of_a_quadratic_is_exact():
    values, counts = public_spectrum(bowl, jnp.zeros(3), PUBLIC)
    for function in (np.ones_like, np.square, lambda x: np.exp(-x)):
        expected = function(SCALES.astype(float)).sum()
        # Each random direction weighs eigenvalues by its own squares.
        np.testing.assert_allclose(counts @ function(values), expected, rtol=0.8)
    assert set(np.round(values, 3)) <= {3.0, 1.0, 0.3}


def test_the_loss_of_noise_is_that_of_training():
    """Noise of every step, as training adds it, on a quadratic: its mean loss is as predicted."""
    rate = 0.3
    noise = tuning.public_bands(
        bowl, jnp.zeros(3), PUBLIC, learning_rate=rate, num_steps=30, num_bands=4
    )
    mechanism = noisy(noise)
    size = mechanism.noise_stddev / 8
    predicted = size**2 * dense(noise.coefficients, SCALES, np.ones(3), rate, 30)

    def of_run(key):
        def step(carry, _):
            theta, state = carry
            release, state = noise.add(jnp.zeros(3), state, mechanism.noise_stddev)
            theta = theta - rate * (jnp.asarray(SCALES) * theta + release / 8)
            return (theta, state), 0.5 * jnp.sum(jnp.asarray(SCALES) * theta**2)

        start = (jnp.zeros(3), noise.init(key, jnp.zeros(3)))
        return jax.lax.scan(step, start, None, length=30)[1].mean()

    losses = np.asarray(jax.jit(jax.vmap(of_run))(jax.random.split(jax.random.key(0), 300)))
    error = losses.std() / np.sqrt(len(losses))
    assert abs(losses.mean() - predicted) < 4 * error
    # Sees noise that is not scaled by the columns of C, or independent.
    unscaled = predicted / np.sum(np.square(noise.coefficients))
    independent = size**2 * dense([1.0], SCALES, np.ones(3), rate, 30)
    for wrong in (unscaled, independent):
        assert abs(losses.mean() - wrong) > 4 * error


def test_mechanisms_of_one_epsilon_can_be_compared():
    about = {"learning_rate": 0.3}
    shaped = tuning.public_bands(bowl, jnp.zeros(3), PUBLIC, num_steps=30, num_bands=4, **about)
    plain = BandedNoise.optimal(30, 4)
    found = [
        tuning.public_noise_loss(bowl, jnp.zeros(3), PUBLIC, noisy(noise), **about)
        for noise in (shaped, plain, mirrordp.GaussianNoise())
    ]
    # Noise for prefix sums cancels what this curvature takes back by itself.
    assert found[0] < found[2] < found[1]
    values, counts = public_spectrum(bowl, jnp.zeros(3), PUBLIC)
    expected = (0.5 / 8) ** 2 * dense([1.0], values, counts, 0.3, 30)
    np.testing.assert_allclose(found[2], expected, rtol=1e-9)


def test_the_guarantee_is_that_of_banded_noise():
    """The coefficients come from public rows; too few groups are refused, as for any bands."""
    shaped = tuning.public_bands(
        bowl, jnp.zeros(3), PUBLIC, learning_rate=0.3, num_steps=30, num_bands=4
    )
    assert noisy(shaped).event == noisy(BandedNoise.optimal(30, 4)).event
    with pytest.raises(ValueError, match="num_groups"):
        noisy(shaped, groups=3)
    poisson = PoissonSampling.for_batch_size(8, num_examples=64)
    with pytest.raises(ValueError, match="CyclicPoissonSampling"):
        noisy(shaped, sampling=poisson)


def test_trains():
    noise = tuning.public_bands(
        bowl, jnp.zeros(3), PUBLIC, learning_rate=0.3, num_steps=30, num_bands=4
    )
    step = TrainStep(bowl, noisy(noise), tools.sgd(0.3))
    *_, (state, _) = mirrordp.train(step, jnp.ones(3), PRIVATE, seed=0)
    assert np.isfinite(state.params).all()
