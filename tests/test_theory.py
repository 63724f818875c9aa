"""The theory's numbers: the paper's special cases, Monte Carlo, and refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from mirrordp.mirror import EuclideanMap, QuadraticMap, theory
from mirrordp.privacy.accounting import Adjacency, UnsupportedError

DELTA = math.exp(-1)  # log(1/δ) = 1, so that only the powers of p remain


def two_level_spectrum(p):
    return np.array([p**-1.5] + [1 / p] * (p - 1))


def exponent(values, sizes):
    """The power with which values grow."""
    return np.polyfit(np.log(sizes), np.log(values), 1)[0]


SIZES = np.array([10**4, 10**5, 10**6])


def test_chi_of_an_isotropic_spectrum_is_p_squared():
    for p in (10, 1000):
        assert theory.chi(np.full(p, 1 / p), p, DELTA) == pytest.approx(p**2)


@pytest.mark.parametrize("c", [2.0, 2.25, 2.5])
def test_chi_of_the_two_level_spectrum_has_the_papers_exponent(c):
    values = [theory.chi(two_level_spectrum(p), round(p**c), DELTA) for p in SIZES]
    assert exponent(values, SIZES) == pytest.approx(4.5 - c, abs=0.02)


def test_bounds_have_the_papers_exponents():
    arguments = {"num_private": 10**9, "epsilon": 1.0, "delta": DELTA}
    dpsgd = [theory.excess_risk_bound_dpsgd(two_level_spectrum(p), **arguments) for p in SIZES]
    pda = [
        theory.excess_risk_bound_pda(two_level_spectrum(p), num_public=round(p**2.5), **arguments)
        for p in SIZES
    ]
    assert exponent([bound.privacy for bound in dpsgd], SIZES) == pytest.approx(2.5)
    assert exponent([bound.privacy for bound in pda], SIZES) == pytest.approx(2.0, abs=0.02)
    assert [bound.sampling for bound in pda] == [bound.sampling for bound in dpsgd]
    assert exponent([bound.sampling for bound in pda], SIZES) == pytest.approx(1.5)
    assert dpsgd[0].total == dpsgd[0].privacy + dpsgd[0].sampling


def test_bounds_meet_where_the_spectrum_is_flat():
    p, arguments = 100, {"num_private": 10**5, "epsilon": 0.5, "delta": 1e-5}
    flat = np.full(p, 1 / p)
    pda = theory.excess_risk_bound_pda(flat, num_public=p, **arguments)
    assert pda == pytest.approx(theory.excess_risk_bound_dpsgd(flat, **arguments))


def test_bound_values_by_hand():
    eigenvalues = [0.5, 0.1]
    # max{10, 0.5·200} = 100; log(1/δ) = 2: min{1, 2/(0.25·200)} + min{1, 2/(0.01·200)} = 1.04.
    delta = math.exp(-2)
    assert theory.chi(eigenvalues, 200, delta) == pytest.approx(104.0)
    bound = theory.excess_risk_bound_pda(
        eigenvalues, num_public=200, num_private=1000, epsilon=2.0, delta=delta
    )
    assert bound == pytest.approx((104 * 2 / 4e6, 1 / 100))


@pytest.mark.parametrize(
    "radii", [[2.0], [1.0, 1.0], [1.0] * 50, [1.0, 0.1, 0.0], [5.0, 3.0, 1e-3]]
)
def test_gaussian_width_against_monte_carlo(radii):
    samples = np.linalg.norm(
        np.random.default_rng(0).normal(size=(200_000, len(radii))) * radii, axis=1
    )
    error = 4 * samples.std() / math.sqrt(len(samples))
    width = theory.gaussian_width_ellipsoid(radii)
    assert abs(width - samples.mean()) < error
    # The estimate √(Σ r²) would not pass, except for many axes; it is an upper bound.
    estimate = np.linalg.norm(radii)
    assert math.sqrt(2 / math.pi) * estimate * (1 - 1e-12) <= width <= estimate
    if len(radii) < 50:
        assert abs(estimate - samples.mean()) > error


def test_gaussian_width_closed_forms():
    for p in (1, 2, 7, 500):
        log_ratio = scipy.special.gammaln((p + 1) / 2) - scipy.special.gammaln(p / 2)
        expected = 3 * math.sqrt(2) * math.exp(log_ratio)
        assert theory.gaussian_width_ellipsoid([3.0] * p) == pytest.approx(expected, rel=1e-10)
    assert theory.gaussian_width_ellipsoid([0.0, 0.0]) == 0


# Local noise stability, by Monte Carlo on the mirror maps themselves.


def stability_setup():
    rng = np.random.default_rng(7)
    features = rng.normal(size=(60, 5)) * np.linspace(1.5, 0.3, 5)
    mirror_map = QuadraticMap.from_data(features, rng.normal(size=60))
    direction = rng.normal(size=5)
    return mirror_map, direction / np.linalg.norm(direction)


def measured_shifts(step, direction, learning_rate, noise_stddev, num_samples=20_000):
    """|⟨θ̂ − θ̄, v⟩| over many draws of the noise."""
    rng = np.random.default_rng(8)
    theta, grad = rng.normal(size=(2, len(direction)))
    noise = noise_stddev * rng.normal(size=(num_samples, len(direction)))
    with jax.enable_x64(True):
        noisy = jax.vmap(lambda b: step(theta, grad + b, learning_rate).params)(jnp.asarray(noise))
        exact = step(theta, grad, learning_rate).params
    return np.abs(np.asarray(noisy - exact) @ direction)


def agrees(samples, predicted, sigmas=4.0):
    error = sigmas * samples.std() / math.sqrt(len(samples))
    assert error < 0.03 * samples.mean(), "too few samples for the check to mean anything"
    return abs(samples.mean() - predicted) < error


def prediction(mirror_map, direction, learning_rate, noise_stddev):
    coefficients = np.asarray(mirror_map.eigenvectors).T @ direction
    return theory.predicted_noise(
        coefficients,
        np.asarray(mirror_map.scale * mirror_map.eigenvalues),
        learning_rate=learning_rate,
        noise_stddev=noise_stddev,
    )


def test_local_noise_stability_holds_and_wrong_maps_fail_it():
    mirror_map, direction = stability_setup()
    predicted = prediction(mirror_map, direction, 0.3, 1.7)
    assert agrees(measured_shifts(mirror_map.step, direction, 0.3, 1.7), predicted)
    # The same check rejects: no map at all, another geometry, a forgotten scale, other noise.
    wrong_geometry = QuadraticMap.from_data(
        np.random.default_rng(9).normal(size=(60, 5)), np.zeros(60)
    )
    for wrong in (EuclideanMap(5), wrong_geometry, mirror_map.unscaled, mirror_map.regularized()):
        assert not agrees(measured_shifts(wrong.step, direction, 0.3, 1.7), predicted)
    for factor in (2 / 3, 3 / 2):
        samples = measured_shifts(mirror_map.step, direction, 0.3, factor * 1.7)
        assert not agrees(samples, predicted)


def test_dpsgd_has_the_same_noise_in_every_direction():
    _, direction = stability_setup()
    predicted = theory.predicted_noise(direction, np.ones(5), learning_rate=0.3, noise_stddev=1.7)
    assert predicted == pytest.approx(0.3 * 1.7 * math.sqrt(2 / math.pi))
    assert agrees(measured_shifts(EuclideanMap(5).step, direction, 0.3, 1.7), predicted)


def test_noise_per_direction_is_the_noise_along_each_eigenvector():
    mirror_map, _ = stability_setup()
    eigenvalues = mirror_map.scaled_eigenvalues
    each = theory.predicted_noise_per_direction(eigenvalues, learning_rate=0.3, noise_stddev=2.0)
    for i, unit in enumerate(np.eye(5)):
        along = theory.predicted_noise(unit, eigenvalues, learning_rate=0.3, noise_stddev=2.0)
        assert each[i] == pytest.approx(along)
    assert each.max() == pytest.approx(0.6 * math.sqrt(2 / math.pi))


# The schedule of the proof.


def test_theorem_schedule():
    eigenvalues = [0.5, 0.1]
    delta = math.exp(-2)
    schedule = theory.theorem_schedule(
        eigenvalues, num_public=800, num_private=1000, epsilon=0.5, delta=delta, scale=10.0
    )
    # Half-axes √(2/800)/λ = 0.1 and 0.5.
    assert schedule.radius == pytest.approx(0.5)
    assert schedule.gaussian_width == pytest.approx(math.sqrt(0.26))
    assert schedule.strong_convexity == pytest.approx(min(0.5 * 0.01, 0.1 * 0.25))
    assert schedule.num_steps == round(0.25 * 500**2 / (0.25 + 0.26))
    np.testing.assert_allclose(schedule.learning_rate(np.arange(3)), [10, 5, 10 / 3])


def test_theorem_schedule_is_what_the_proof_asks_of_the_rescaled_map():
    """η'_t = 1/(Δt) on Ψ' = Ψ/Δ takes the same steps as the schedule on Ψ."""
    mirror_map, _ = stability_setup()
    public = mirror_map.unscaled
    schedule = theory.theorem_schedule(
        np.asarray(public.eigenvalues), num_public=60, num_private=1000, epsilon=1.0, delta=0.01
    )
    delta = schedule.strong_convexity
    vectors = np.asarray(public.eigenvectors)
    hessian = vectors @ np.diag(public.eigenvalues) @ vectors.T
    proof_map = QuadraticMap.from_hessian(hessian, public.center, scale=1 / delta)
    theta, grad = np.random.default_rng(1).normal(size=(2, 5))
    with jax.enable_x64(True):
        for step in (0, 4):
            ours = public.step(theta, grad, schedule.learning_rate(step)).params
            proof = proof_map.step(theta, grad, 1 / (delta * (step + 1))).params
            np.testing.assert_allclose(ours, proof, rtol=1e-6)


# The paper's noise formula.


def exact_delta(epsilon, mu):
    """δ(ε) of a Gaussian mechanism with sensitivity over standard deviation μ."""
    normal = scipy.stats.norm
    return normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(
        -mu / 2 - epsilon / mu
    )


def sigma(epsilon, adjacency=Adjacency.ADD_REMOVE):
    return theory.paper_noise_stddev(
        l2_clip_norm=2.0,
        num_steps=50,
        num_private=300,
        epsilon=epsilon,
        delta=1e-5,
        adjacency=adjacency,
    )


def test_paper_noise_is_the_formula():
    expected = math.sqrt(8 * 4 * 50 * math.log(1e5)) / (0.7 * 300)
    assert sigma(0.7) == pytest.approx(expected)
    assert sigma(0.7, Adjacency.ZERO_OUT) == pytest.approx(expected)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 40.0, 8 * math.log(1e5)])
def test_paper_noise_suffices_for_add_remove(epsilon):
    mu = math.sqrt(50) * 2.0 / 300 / sigma(epsilon)
    assert exact_delta(epsilon, mu) <= 1e-5


def test_paper_noise_does_not_suffice_where_it_is_refused():
    mu = 2 * math.sqrt(50) * 2.0 / 300 / sigma(20.0)
    assert exact_delta(20.0, mu) > 1e-5
    with pytest.raises(UnsupportedError, match="replace"):
        sigma(20.0, Adjacency.REPLACE)
    with pytest.raises(UnsupportedError, match=r"8 log\(1/delta\)"):
        sigma(8 * math.log(1e5) + 0.01)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.chi([0.1, 0.0], 10, 0.1),
        lambda: theory.chi([], 10, 0.1),
        lambda: theory.chi([0.1], 10, 1.0),
        lambda: theory.chi([0.1], 0, 0.1),
        lambda: theory.predicted_noise([1.0], [1.0, 2.0], learning_rate=1.0, noise_stddev=1.0),
        lambda: theory.gaussian_width_ellipsoid([-1.0]),
        lambda: theory.excess_risk_bound_dpsgd([0.1], num_private=5, epsilon=0.0, delta=0.1),
    ],
)
def test_bad_arguments_are_refused(call):
    with pytest.raises(ValueError, match="must"):
        call()
