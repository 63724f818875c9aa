"""Newton–CG, the GLM maps, and what happens when the solver cannot finish."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.mirror import Ball, ConvexMap, GLMMap, QuadraticMap, WholeSpace, families

# A float64 that is silently cut to float32 announces itself as a warning.
pytestmark = pytest.mark.filterwarnings("error")


def classification(num_rows=60, num_columns=4, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_rows, num_columns))
    return features, features @ rng.normal(size=num_columns) + rng.logistic(size=num_rows)


def test_values_are_negative_log_likelihoods():
    features, scores = classification()
    labels, classes = (scores > 0).astype(int), np.digitize(scores, [-1, 1])
    rng = np.random.default_rng(1)
    theta, matrix = rng.normal(size=4), rng.normal(size=(4, 3))
    counts = rng.poisson(1.5, size=60)
    u = features @ theta
    logistic = -np.mean(np.where(labels, -np.log1p(np.exp(-u)), -np.log1p(np.exp(u))))
    softmax = np.exp(features @ matrix)
    softmax /= softmax.sum(axis=1, keepdims=True)
    multinomial = -np.mean(np.log(softmax[np.arange(60), classes]))
    poisson = np.mean(np.exp(u) - counts * u)
    with jax.enable_x64(True):
        for mirror_map, point, loss in (
            (GLMMap.logistic(features, labels, ridge=0.2), theta, logistic),
            (GLMMap.multinomial(features, classes, 3, ridge=0.2), matrix.ravel(), multinomial),
            (GLMMap.poisson(features, counts, ridge=0.2), theta, poisson),
        ):
            np.testing.assert_allclose(mirror_map.value(point), loss + 0.1 * point @ point)


def test_default_ridge_is_relative_to_the_mean_eigenvalue_at_zero():
    features, scores = classification()
    for mirror_map, variance in (
        (GLMMap.logistic(features, scores > 0), 1 / 4),
        (GLMMap.multinomial(features, np.digitize(scores, [-1, 1]), 3), 2 / 9),
        (GLMMap.poisson(features, np.ones(60)), 1),
    ):
        mean_eigenvalue = variance * np.trace(features.T @ features / 60) / 4
        np.testing.assert_allclose(mirror_map.ridge, 0.03 * mean_eigenvalue, rtol=1e-10)


def test_quadratic_function_gives_the_quadratic_map():
    rng = np.random.default_rng(2)
    features, targets = rng.normal(size=(30, 5)), rng.normal(size=30)
    with jax.enable_x64(True):
        exact = QuadraticMap.from_data(features, targets, ridge=0.1, scale=1.0)
        center = exact.center
        by_newton = ConvexMap(
            lambda t: (
                jnp.mean((features @ t - targets) ** 2) / 2 + 0.05 * jnp.sum((t - center) ** 2)
            ),
            5,
        )
        theta, grad = rng.normal(size=(2, 5))
        for name in ("step", "project", "minimizer"):
            arguments = {
                "step": (theta, grad, 0.4),
                "project": (4 * theta, Ball(0.7)),
                "minimizer": (Ball(0.3),),
            }[name]
            left, right = (getattr(m, name)(*arguments) for m in (exact, by_newton))
            assert right.converged
            np.testing.assert_allclose(left.params, right.params, atol=1e-8)


def test_no_square_matrix_is_formed():
    features, scores = classification(num_rows=5, num_columns=300)
    mirror_map = GLMMap.logistic(features, scores > 0)
    program = jax.make_jaxpr(lambda t: mirror_map.step(t, t, 0.1).params)(jnp.zeros(300))
    assert "300,300" not in str(program)
    assert "5,300" in str(program)


def test_converges_from_far_away():
    features, scores = classification()
    logistic = GLMMap.logistic(features, scores > 0, ridge=1e-3)
    poisson = GLMMap.poisson(features, np.abs(np.round(scores)), ridge=1e-3)
    for mirror_map, init in ((logistic, 30.0), (poisson, 8.0)):
        with jax.enable_x64(True):
            solution = mirror_map.inverse(np.zeros(4), np.full(4, init))
            assert solution.converged
            np.testing.assert_allclose(mirror_map.grad(solution.params), np.zeros(4), atol=1e-8)


def test_a_solver_that_cannot_finish_says_so():
    features, scores = classification()
    capped = GLMMap(
        *jax.tree.leaves(GLMMap.logistic(features, scores > 0)),
        family=families.LOGISTIC,
        ridge=1e-4,
        max_iterations=1,
    )
    solution = jax.jit(capped.inverse)(np.zeros(4), np.full(4, 20.0))
    assert not solution.converged
    assert solution.num_iterations == 1
    assert solution.residual > 1e-3
    assert np.isfinite(solution.params).all()

    # The dual point 2 is no gradient of this function: its gradients stay below 1.
    bounded = ConvexMap(lambda t: jnp.sum(jnp.sqrt(1 + t**2)), 2)
    solution = bounded.inverse(np.array([2.0, 0.0]), np.zeros(2))
    assert not solution.converged


def test_a_concave_function_is_not_called_solved():
    upside_down = ConvexMap(lambda t: -jnp.sum(t**2), 3)
    assert not upside_down.inverse(np.ones(3), np.ones(3)).converged


def test_overflow_at_the_start_is_answered_with_nan():
    features, scores = classification()
    mirror_map = GLMMap.poisson(features, np.abs(np.round(scores)), ridge=1e-3)
    solution = mirror_map.inverse(np.zeros(4), np.full(4, 1e4))
    assert not solution.converged
    assert np.isnan(solution.params).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: GLMMap.logistic(x, [0, 1, 2]), "0 or 1"),
        (lambda x: GLMMap.multinomial(x, [0, 1, 3], 3), "from 0 to 2"),
        (lambda x: GLMMap.multinomial(x, [0, 1, 0.5], 3), "from 0 to 2"),
        (lambda x: GLMMap.poisson(x, [0, 1, -1]), "non-negative"),
        (lambda x: GLMMap.poisson(x, [0, 1]), "the same number of rows"),
        (lambda x: GLMMap.poisson(x, [0, 1, np.inf]), "finite"),
        (lambda x: GLMMap.poisson(0 * x, [0, 1, 2]), "all be zero"),
        (lambda x: GLMMap.logistic(x, [0, 1, 1], ridge=0.0), "ridge"),
        (lambda _: ConvexMap(jnp.sum, 0), "num_params"),
        (lambda _: ConvexMap(jnp.sum, 2, tolerance=-1.0), "tolerance"),
    ],
)
def test_says_what_is_wrong(build, message):
    with pytest.raises(ValueError, match=message):
        build(np.ones((3, 2)))


def test_regularized_adds_half_the_squared_norm():
    features, scores = classification()
    theta = np.array([0.5, -1.0, 0.3, 0.2])
    convex = ConvexMap(lambda t: jnp.sum(jnp.cosh(t)), 4)
    for mirror_map in (GLMMap.logistic(features, scores > 0, scale=5.0), convex):
        added = mirror_map.regularized(2.0).value(theta)
        np.testing.assert_allclose(added, mirror_map.value(theta) + theta @ theta, rtol=1e-6)


def test_public_and_private_loss_may_differ():
    """A logistic geometry for a private squared loss, and the fixed point is the private one."""
    features, scores = classification(num_rows=200)
    mirror_map = GLMMap.logistic(features, scores > 0, ridge=0.05)
    optimum = np.linalg.lstsq(features, scores)[0]
    theta = mirror_map.minimizer(WholeSpace()).params
    step = jax.jit(mirror_map.step)
    for _ in range(300):
        theta = step(theta, features.T @ (features @ theta - scores) / 200, 0.02).params
    np.testing.assert_allclose(theta, optimum, atol=1e-3)
