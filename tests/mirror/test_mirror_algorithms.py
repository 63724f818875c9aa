"""The accelerated and the lazy form against what they must equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.mirror import (
    Ball,
    ConvexMap,
    GLMMap,
    QuadraticMap,
    WholeSpace,
    accelerated_init,
    accelerated_query,
    accelerated_step,
    lazy_init,
    lazy_step,
    linearized_lazy_init,
    linearized_lazy_step,
)

# A float64 that is silently cut to float32 announces itself as a warning.
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def ill_conditioned(seed=0):
    """A private quadratic and a map that fits it badly: relative condition number 2500."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    hessian = basis @ np.diag(np.logspace(0, -3.4, 20)) @ basis.T
    optimum = rng.normal(size=20)
    mirror_map = QuadraticMap.from_hessian(np.diag(np.linspace(1, 2, 20)), np.zeros(20))
    # 1/η is the smoothness of the private loss in the norm of Ψ.
    smoothness = np.linalg.eigvals(np.diag(1 / np.linspace(1, 2, 20)) @ hessian).real.max()
    return mirror_map, hessian, optimum, 1 / smoothness


def risk(hessian, optimum, theta):
    return float(0.5 * (theta - optimum) @ hessian @ (theta - optimum))


def test_accelerated_keeps_its_bound_and_beats_plain_mirror_descent():
    mirror_map, hessian, optimum, learning_rate = ill_conditioned()
    state = accelerated_init(np.zeros(20))
    plain = jnp.zeros(20)
    distance = float(mirror_map.divergence(optimum, np.zeros(20)))

    @jax.jit
    def advance(state, plain):
        grad = hessian @ (accelerated_query(state) - optimum)
        state, converged = accelerated_step(mirror_map, state, grad, learning_rate)
        plain = mirror_map.step(plain, hessian @ (plain - optimum), learning_rate).params
        return state, converged, plain

    for step in range(1, 101):
        state, converged, plain = advance(state, plain)
        assert converged
        bound = 4 * distance / (learning_rate * step**2)
        assert risk(hessian, optimum, state.y) <= bound
    assert risk(hessian, optimum, state.y) < 0.2 * risk(hessian, optimum, plain)


def test_accelerated_stays_in_its_constraint_set():
    mirror_map, hessian, optimum, learning_rate = ill_conditioned()
    constraint = Ball(0.5 * float(np.linalg.norm(optimum)))
    state = accelerated_init(np.zeros(20))

    @jax.jit
    def advance(state):
        grad = hessian @ (accelerated_query(state) - optimum)
        return accelerated_step(mirror_map, state, grad, learning_rate, constraint=constraint)[0]

    for _ in range(400):
        state = advance(state)
    assert np.linalg.norm(state.y) <= constraint.radius * (1 + 1e-9)
    private = QuadraticMap.from_hessian(hessian, optimum)
    best = private.minimizer(constraint).params
    assert risk(hessian, optimum, state.y) <= 1.001 * risk(hessian, optimum, best)


def test_first_accelerated_step_is_a_mirror_step():
    mirror_map, _, _, _ = ill_conditioned()
    theta, grad = np.random.default_rng(1).normal(size=(2, 20))
    state, _ = accelerated_step(mirror_map, accelerated_init(theta), grad, 0.3)
    expected = mirror_map.step(theta, grad, 0.3).params
    np.testing.assert_allclose(state.y, expected, atol=1e-12)
    np.testing.assert_allclose(state.z, expected, atol=1e-12)


def maps():
    rng = np.random.default_rng(2)
    features, targets = rng.normal(size=(30, 5)), rng.normal(size=30)
    return {
        "quadratic": QuadraticMap.from_data(features, targets),
        "quadratic thin": QuadraticMap.from_data(features[:3], targets[:3]),
        "logistic": GLMMap.logistic(features, targets > 0),
        "convex": ConvexMap(lambda t: jnp.sum(jnp.cosh(t)) + t[0], 5),
    }


@pytest.mark.parametrize("name", list(maps()))
def test_lazy_form_equals_mirror_steps_on_the_regularised_map(name):
    regularized = maps()[name].regularized()
    rng = np.random.default_rng(3)
    lazy = eager = regularized.minimizer(WholeSpace()).params
    state = lazy_init(lazy)
    for step in range(8):
        learning_rate = 0.5 / (step + 1)
        grad = rng.normal(size=5) + 0.3 * np.asarray(lazy)
        state, solution = lazy_step(regularized, state, lazy, grad, learning_rate)
        lazy = solution.params
        eager = regularized.step(eager, grad, learning_rate).params
        np.testing.assert_allclose(lazy, eager, atol=1e-8)
    # Elsewhere the two differ for good: the lazy form forgets where it started.
    shifted = regularized.step(regularized.minimizer(WholeSpace()).params + 0.1, grad, 0.1).params
    _, solution = lazy_step(regularized, lazy_init(lazy), lazy, grad, 0.1)
    assert np.abs(solution.params - shifted).max() > 1e-3


def test_linearised_lazy_form_is_exact_for_a_linear_public_loss():
    rng = np.random.default_rng(4)
    slope = rng.normal(size=5)
    regularized = ConvexMap(lambda t: jnp.dot(slope, t) + 0.5 * jnp.sum(t**2), 5)
    exact = linearized = regularized.minimizer(WholeSpace()).params
    exact_state, state = lazy_init(exact), linearized_lazy_init(exact)
    for step in range(6):
        grad = rng.normal(size=5) + np.asarray(exact)
        rate = 0.3 / (step + 1)
        exact_state, solution = lazy_step(regularized, exact_state, exact, grad, rate)
        exact = solution.params
        state, linearized = linearized_lazy_step(state, grad, slope, rate)
        np.testing.assert_allclose(linearized, exact, atol=1e-9)


def test_linearised_lazy_form_weights_public_gradients_by_one_over_t():
    rng = np.random.default_rng(5)
    grads, public_grads, rates = (
        rng.normal(size=(4, 5)),
        rng.normal(size=(4, 5)),
        [1, 0.5, 0.2, 0.1],
    )
    state = linearized_lazy_init(np.zeros(5))
    for grad, public_grad, rate in zip(grads, public_grads, rates, strict=True):
        state, theta = linearized_lazy_step(state, grad, public_grad, rate)
    weighted = [
        rate * (grad + public_grad / (4 * rate))
        for grad, public_grad, rate in zip(grads, public_grads, rates, strict=True)
    ]
    np.testing.assert_allclose(theta, -np.sum(weighted, axis=0), atol=1e-12)
