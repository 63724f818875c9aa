"""What every mirror map must obey, in float32 and in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import mirrordp
from mirrordp.mirror import (
    Ball,
    ConvexMap,
    EuclideanMap,
    GLMMap,
    KroneckerMap,
    MirrorMap,
    QuadraticMap,
    SubspaceMap,
    TheoremSet,
    WholeSpace,
)

# A float64 that is silently cut to float32 announces itself as a warning.
pytestmark = pytest.mark.filterwarnings("error")

P = 6
RADIUS = 0.5


def _data(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_rows, P)) * np.linspace(1, 0.4, P)
    scores = features @ rng.normal(size=P)
    return rng, features, scores


def _quadratic():
    rng, features, scores = _data(40)
    return QuadraticMap.from_data(features, scores + 0.1 * rng.normal(size=40), ridge=0.05)


def _quadratic_thin():
    _, features, scores = _data(4)
    return QuadraticMap.from_data(features, scores, ridge=0.3, ridge_center=np.zeros(P))


def _quadratic_from_hessian():
    rng, features, _ = _data(20)
    return QuadraticMap.from_hessian(features.T @ features / 20, rng.normal(size=P), scale=2.0)


def _logistic():
    rng, features, scores = _data(40)
    labels = rng.uniform(size=40) < 1 / (1 + np.exp(-scores))
    return GLMMap.logistic(features, labels, ridge=0.1)


def _multinomial():
    _, features, scores = _data(40)
    return GLMMap.multinomial(features[:, :3], np.digitize(scores, [0.3]), 2, ridge=0.1, scale=3.0)


def _poisson():
    rng, features, scores = _data(40)
    return GLMMap.poisson(0.5 * features, rng.poisson(np.exp(0.5 * scores)), ridge=0.1)


def _bowl(theta):
    return jnp.sum(jnp.cosh(theta)) + 0.5 * (theta[0] - theta[1] - 0.7) ** 2


def _subspace(rho):
    rng, features, _ = _data(10)
    return SubspaceMap.from_directions(features, 3, rho=rho, center=0.1 * rng.normal(size=P))


def _kronecker():
    rng, features, scores = _data(40)
    rows = {"x": features[:, :2].astype("f4"), "y": scores.astype("f4")}
    params = {"b": np.ones(2, "f4"), "w": rng.normal(size=(2, 2)).astype("f4")}

    def loss_fn(params, row):
        return jnp.sum((row["x"] @ params["w"] + params["b"] - row["y"]) ** 2)

    return KroneckerMap.from_public(loss_fn, params, mirrordp.PublicData(rows), damping=0.3)


MAPS = {
    "euclidean": EuclideanMap(P),
    "quadratic": _quadratic(),
    "quadratic thin": _quadratic_thin(),
    "quadratic from hessian": _quadratic_from_hessian(),
    "subspace": _subspace(0.2),
    "subspace limit": _subspace(0.0),
    "logistic": _logistic(),
    "multinomial": _multinomial(),
    "poisson": _poisson(),
    "convex": ConvexMap(_bowl, P),
    "kronecker": _kronecker(),
}


@pytest.fixture(params=list(MAPS))
def mirror_map(request):
    return MAPS[request.param]


@pytest.fixture(params=["float32", "float64"])
def tolerance(request):
    with jax.enable_x64(request.param == "float64"):
        yield {"float32": 2e-4, "float64": 1e-8}[request.param]


def domain_points(mirror_map, num_points, size=0.8, seed=1):
    """Random points where Ψ is finite: for the subspace limit, on its affine set."""
    points = size * np.random.default_rng(seed).normal(size=(num_points, P))
    if isinstance(mirror_map, SubspaceMap) and mirror_map.rho == 0:
        basis, center = np.asarray(mirror_map.basis), np.asarray(mirror_map.center)
        points = center + (points - center) @ basis @ basis.T
    return jnp.asarray(points)


def visible(mirror_map, dual):
    """The part of a dual vector that acts on the domain."""
    if isinstance(mirror_map, SubspaceMap) and mirror_map.rho == 0:
        return mirror_map.along(jnp.asarray(dual))
    return jnp.asarray(dual)


def test_has_the_protocol(mirror_map):
    assert isinstance(mirror_map, MirrorMap)
    assert mirror_map.num_params == P


def test_grad_is_the_derivative_of_value(mirror_map, tolerance):
    (theta,) = domain_points(mirror_map, 1)
    expected = jax.grad(mirror_map.value)(theta)
    np.testing.assert_allclose(mirror_map.grad(theta), expected, rtol=tolerance, atol=tolerance)


def test_inverse_undoes_grad(mirror_map, tolerance):
    for theta in domain_points(mirror_map, 3):
        solution = mirror_map.inverse(mirror_map.grad(theta), jnp.zeros(P))
        assert solution.converged
        np.testing.assert_allclose(solution.params, theta, rtol=tolerance, atol=tolerance)


def test_grad_undoes_inverse(mirror_map, tolerance):
    (dual,) = visible(mirror_map, jnp.asarray([[0.3, -0.5, 0.2, 0.9, -0.4, 0.1]])[0])[None]
    solution = mirror_map.inverse(dual, jnp.zeros(P))
    assert solution.converged
    np.testing.assert_allclose(mirror_map.grad(solution.params), dual, atol=tolerance)


def test_divergence_is_positive_and_zero_only_at_equality(mirror_map, tolerance):
    points = domain_points(mirror_map, 4)
    for i, theta in enumerate(points):
        for j, other in enumerate(points):
            divergence = float(mirror_map.divergence(theta, other))
            assert (divergence > 1e-3) if i != j else (divergence == 0)


def test_three_point_identity(mirror_map, tolerance):
    a, b, c = domain_points(mirror_map, 3)
    left = mirror_map.divergence(a, b) + mirror_map.divergence(b, c) - mirror_map.divergence(a, c)
    right = jnp.dot(mirror_map.grad(c) - mirror_map.grad(b), a - b)
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def test_step_satisfies_the_first_order_condition(mirror_map, tolerance):
    (theta,) = domain_points(mirror_map, 1)
    grad = jnp.asarray([0.3, -0.5, 0.2, 0.9, -0.4, 0.1])
    solution = mirror_map.step(theta, grad, 0.7)
    assert solution.converged
    condition = mirror_map.grad(solution.params) - mirror_map.grad(theta) + 0.7 * grad
    np.testing.assert_allclose(visible(mirror_map, condition), np.zeros(P), atol=tolerance)


def test_step_minimises_its_objective(mirror_map):
    theta, *others = domain_points(mirror_map, 20)
    grad = jnp.asarray([0.3, -0.5, 0.2, 0.9, -0.4, 0.1])

    @jax.jit
    def objective(point):
        return 0.7 * jnp.dot(grad, point) + mirror_map.divergence(point, theta)

    best = mirror_map.step(theta, grad, 0.7).params
    least = objective(best)
    for other in others:
        for size in (1.0, 0.1):
            assert least < objective(best + size * (other - theta))


def test_jit_vmap_and_scan_agree_with_eager(mirror_map):
    points = domain_points(mirror_map, 2)
    grad = jnp.asarray([0.3, -0.5, 0.2, 0.9, -0.4, 0.1])

    def two_steps(theta, mirror_map):
        def body(theta, _):
            return mirror_map.step(theta, grad, 0.3).params, None

        return jax.lax.scan(body, theta, length=2)[0]

    eager = []
    for theta in points:
        for _ in range(2):
            theta = mirror_map.step(theta, grad, 0.3).params
        eager.append(theta)
    # vmap of something jitted, with the map as argument: the most that a caller can ask for.
    batched = jax.vmap(jax.jit(two_steps), (0, None))(points, mirror_map)
    np.testing.assert_allclose(batched, np.stack(eager), atol=2e-4)


# Projections compute in float64 in any case; eager calls in float64 share their compiled programs.


def test_projection_leaves_points_inside_alone(mirror_map):
    with jax.enable_x64(True):
        theta = 0.2 * jnp.asarray([1.0, -0.5, 0.3, 0.2, -0.1, 0.4])
        for constraint in (Ball(RADIUS), WholeSpace()):
            solution = mirror_map.project(theta, constraint)
            assert solution.converged
            np.testing.assert_array_equal(solution.params, theta)


def test_projection_is_feasible_and_idempotent(mirror_map):
    with jax.enable_x64(True):
        (theta,) = domain_points(mirror_map, 1, size=2.0)
        once = mirror_map.project(theta, Ball(RADIUS))
        twice = mirror_map.project(once.params, Ball(RADIUS))
    assert once.converged
    assert twice.converged
    np.testing.assert_allclose(np.linalg.norm(once.params), RADIUS, rtol=1e-9)
    np.testing.assert_allclose(twice.params, once.params, atol=1e-9)


def test_projection_satisfies_the_kkt_conditions(mirror_map):
    with jax.enable_x64(True):
        (theta,) = domain_points(mirror_map, 1, size=2.0)
        nearest = mirror_map.project(theta, Ball(RADIUS)).params
        pull = visible(mirror_map, mirror_map.grad(theta) - mirror_map.grad(nearest))
        normal = visible(mirror_map, nearest)
        multiplier = jnp.dot(pull, normal) / jnp.dot(normal, normal)
        assert multiplier > 0
        scale = float(jnp.linalg.norm(mirror_map.grad(theta)))
        np.testing.assert_allclose(pull, multiplier * normal, atol=1e-8 * scale)


@pytest.mark.parametrize("target", ["projection", "minimizer"])
def test_agrees_with_an_independent_solver(mirror_map, target):
    with jax.enable_x64(True):
        # The subspace limit is compared inside its affine set, so that set must meet the ball.
        radius = 1.0 if isinstance(mirror_map, SubspaceMap) else 0.3
        (theta,) = domain_points(mirror_map, 1, size=2.0)
        objective = mirror_map.value
        if target == "projection":
            slope = mirror_map.grad(theta)
            objective = lambda point: mirror_map.value(point) - jnp.dot(slope, point)  # noqa: E731
            solution = mirror_map.project(theta, Ball(radius))
        else:
            solution = mirror_map.minimizer(Ball(radius))
        value_and_grad = jax.jit(jax.value_and_grad(objective))
        constraints = [
            {
                "type": "ineq",
                "fun": lambda point: radius**2 - point @ point,
                "jac": lambda point: -2 * point,
            }
        ]
        if isinstance(mirror_map, SubspaceMap) and mirror_map.rho == 0:
            off = np.eye(P) - np.asarray(mirror_map.basis @ mirror_map.basis.T)
            vectors = np.linalg.svd(off)[0][:, : P - 3].T
            start = np.asarray(mirror_map.center)
            constraints.append(
                {
                    "type": "eq",
                    "fun": lambda point: vectors @ (point - start),
                    "jac": lambda _: vectors,
                }
            )
        reference = scipy.optimize.minimize(
            lambda point: tuple(map(np.asarray, value_and_grad(jnp.asarray(point)))),
            np.full(P, 0.01),
            jac=True,
            method="SLSQP",
            constraints=constraints,
            options={"ftol": 1e-15, "maxiter": 500},
        )
        # At this ftol SLSQP often ends with a line search that finds nothing better.
        assert reference.status in (0, 8)
        assert solution.converged
        np.testing.assert_allclose(solution.params, reference.x, atol=2e-6)
        assert objective(solution.params) <= reference.fun + 1e-10


def test_projection_and_divergence_keep_float64_inside_jit_and_vmap(mirror_map):
    points = np.asarray(domain_points(mirror_map, 2, size=2.0), np.float32)

    def both(theta, mirror_map):
        nearest = mirror_map.project(theta, Ball(RADIUS)).params
        return nearest, mirror_map.divergence(nearest, theta)

    with jax.enable_x64(True):
        wide = jnp.asarray(points, jnp.float64)
        expected = [np.stack(r) for r in zip(*[both(t, mirror_map) for t in wide], strict=True)]
    # Batching what is already traced is where float64 could be lost.
    batched = jax.vmap(jax.jit(both), (0, None))(points, mirror_map)
    for result, reference in zip(batched, expected, strict=True):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_input_that_is_not_finite_is_answered_so(mirror_map, bad):
    (theta,) = domain_points(mirror_map, 1)
    grad = jnp.zeros(P).at[2].set(bad)
    for solution in (
        mirror_map.step(theta, grad, 0.1),
        mirror_map.inverse(grad, theta),
        mirror_map.step(theta.at[1].set(bad), jnp.zeros(P), 0.1),
        mirror_map.project(theta.at[1].set(bad), Ball(RADIUS)),
        mirror_map.project(theta.at[1].set(bad), WholeSpace()),
    ):
        assert not solution.converged
        assert not np.isfinite(solution.params).all()


def test_wrong_length_and_foreign_constraints_are_refused(mirror_map):
    with pytest.raises(ValueError, match="flat vector of length 6"):
        mirror_map.grad(jnp.zeros(P + 1))
    with pytest.raises(ValueError, match="flat vector of length 6"):
        mirror_map.step(jnp.zeros(P), jnp.zeros((P, 1)), 0.1)
    with pytest.raises(TypeError, match="WholeSpace, Ball or TheoremSet"):
        mirror_map.project(jnp.zeros(P), 1.0)
    if not isinstance(mirror_map, QuadraticMap):
        with pytest.raises(TypeError, match="QuadraticMap only"):
            mirror_map.project(jnp.zeros(P), TheoremSet(1.0, num_public=10, delta=0.1))
