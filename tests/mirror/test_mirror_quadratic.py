"""The quadratic map: construction, scaling, rates, and the theorem's set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from mirrordp.mirror import Ball, QuadraticMap, TheoremSet, WholeSpace
from mirrordp.mirror.quadratic import RELATIVE_RIDGE

# A float64 that is silently cut to float32 announces itself as a warning.
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def regression(num_rows, num_columns, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_rows, num_columns)) * np.linspace(1, 0.2, num_columns)
    targets = features @ rng.normal(size=num_columns) + 0.1 * rng.normal(size=num_rows)
    return features, targets


def dense_hessian(mirror_map):
    """sH, one column at a time."""
    center = np.asarray(mirror_map.center)
    return np.stack([mirror_map.grad(center + e) for e in np.eye(len(center))], axis=1)


@pytest.mark.parametrize("num_rows", [30, 8, 3])
@pytest.mark.parametrize("ridge", [0.5, None])
def test_is_the_public_loss_plus_ridge(num_rows, ridge):
    features, targets = regression(num_rows, 8)
    ordinary = QuadraticMap.from_data(
        features, targets, ridge=ridge, ridge_center=np.zeros(8)
    ).unscaled
    singular_values = np.linalg.svd(features)[1]
    if ridge is None:
        ridge = RELATIVE_RIDGE * np.median(singular_values**2 / num_rows)
    theta = np.random.default_rng(1).normal(size=8)
    residual = features @ theta - targets
    loss = residual @ residual / (2 * num_rows) + ridge / 2 * theta @ theta
    gradient = features.T @ residual / num_rows + ridge * theta
    np.testing.assert_allclose(ordinary.value(theta), loss, rtol=1e-9)
    np.testing.assert_allclose(ordinary.grad(theta), gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("num_rows", [30, 3])
def test_by_default_the_ridge_does_not_move_the_minimiser(num_rows):
    features, targets = regression(num_rows, 8)
    mirror_map = QuadraticMap.from_data(features, targets, ridge=0.5)
    expected = np.linalg.pinv(features) @ targets
    np.testing.assert_allclose(mirror_map.minimizer(WholeSpace()).params, expected, atol=1e-10)
    hessian = features.T @ features / num_rows + 0.5 * np.eye(8)
    np.testing.assert_allclose(dense_hessian(mirror_map.unscaled), hessian, atol=1e-10)


@pytest.mark.parametrize("num_rows", [30, 3])
def test_inverse_hessian_has_largest_eigenvalue_one(num_rows):
    mirror_map = QuadraticMap.from_data(*regression(num_rows, 8))
    eigenvalues = np.linalg.eigvalsh(dense_hessian(mirror_map))
    np.testing.assert_allclose(eigenvalues.min(), 1.0, rtol=1e-10)
    np.testing.assert_allclose(mirror_map.scaled_eigenvalues, eigenvalues, rtol=1e-8)
    np.testing.assert_allclose(
        dense_hessian(mirror_map), mirror_map.scale * dense_hessian(mirror_map.unscaled)
    )


def test_collinear_columns_need_a_ridge():
    features, targets = regression(30, 4)
    features[:, 3] = features[:, 0]
    with pytest.raises(ValueError, match="span only 3 of 4 directions"):
        QuadraticMap.from_data(features, targets, ridge=0.0)
    mirror_map = QuadraticMap.from_data(features, targets)
    np.testing.assert_allclose(mirror_map.center[3], mirror_map.center[0], atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.zeros((5, 2))}, "all be zero"),
        ({"features": np.full((5, 2), np.nan)}, "10 values that are NaN"),
        ({"features": np.ones(5)}, "2 axes"),
        ({"targets": np.ones(4)}, "one entry for each of"),
        ({"ridge": -1.0}, "ridge"),
        ({"ridge_center": np.zeros(3)}, "length 2"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_says_what_is_wrong_with_the_data(change, message):
    features, targets = regression(5, 2)
    arguments = {"features": features, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        QuadraticMap.from_data(**arguments)


@pytest.mark.parametrize(
    ("hessian", "message"),
    [
        (np.diag([1.0, 0.0]), "positive definite"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (np.eye(3), "shape"),
    ],
)
def test_says_what_is_wrong_with_the_hessian(hessian, message):
    with pytest.raises(ValueError, match=message):
        QuadraticMap.from_hessian(hessian, np.zeros(2))


@pytest.mark.parametrize("curvature", [0.3, 7.0])
def test_with_a_hessian_like_the_identity_a_step_is_gradient_descent(curvature):
    rng = np.random.default_rng(2)
    theta, grad = rng.normal(size=(2, 5))
    from_hessian = QuadraticMap.from_hessian(curvature * np.eye(5), rng.normal(size=5))
    orthogonal = np.linalg.qr(rng.normal(size=(20, 5)))[0]
    from_data = QuadraticMap.from_data(orthogonal, rng.normal(size=20))
    for mirror_map in (from_hessian, from_data):
        stepped = mirror_map.step(theta, grad, 0.2).params
        np.testing.assert_allclose(stepped, theta - 0.2 * grad, rtol=1e-12, atol=1e-12)
    other = QuadraticMap.from_hessian(np.diag([1.0, 1, 1, 1, 2]), np.zeros(5))
    assert np.abs(other.step(theta, grad, 0.2).params - (theta - 0.2 * grad)).max() > 1e-3


def test_without_noise_it_converges_to_least_squares_at_the_rate_of_theory():
    public = regression(200, 6, seed=3)
    features, targets = regression(500, 6, seed=4)
    optimum = np.linalg.lstsq(features, targets)[0]
    mirror_map = QuadraticMap.from_data(*public, ridge=1e-3)
    hessian = features.T @ features / 500
    # θ_{t+1} − θ* = (I − η (sH_pub)⁻¹ H_priv)(θ_t − θ*), symmetric in the norm of H_pub.
    relative = np.linalg.eigvals(np.linalg.solve(dense_hessian(mirror_map), hessian)).real
    learning_rate = 2 / (relative.min() + relative.max())
    rate = (relative.max() - relative.min()) / (relative.max() + relative.min())

    theta = mirror_map.minimizer(WholeSpace()).params
    distances = [float(mirror_map.divergence(theta, optimum))]
    for _ in range(15):
        grad = features.T @ (features @ theta - targets) / 500
        theta = mirror_map.step(theta, grad, learning_rate).params
        distances.append(float(mirror_map.divergence(theta, optimum)))
    ratios = np.sqrt(np.array(distances[1:]) / np.array(distances[:-1]))
    assert (ratios <= rate * (1 + 1e-6)).all()
    # The rate is sharp, and far better than that of gradient descent on the private loss.
    assert ratios[-1] > 0.9 * rate
    eigenvalues = np.linalg.eigvalsh(hessian)
    plain = (eigenvalues.max() - eigenvalues.min()) / (eigenvalues.max() + eigenvalues.min())
    assert rate < 0.4 < 0.8 < plain
    np.testing.assert_allclose(theta, optimum, atol=1e-6)


@pytest.mark.parametrize("num_rows", [30, 3])
def test_regularized_adds_half_the_squared_norm(num_rows):
    mirror_map = QuadraticMap.from_data(
        *regression(num_rows, 8), ridge=0.2, ridge_center=np.ones(8)
    )
    theta = np.random.default_rng(5).normal(size=8)
    added = mirror_map.regularized(3.0)
    np.testing.assert_allclose(
        added.value(theta), mirror_map.value(theta) + 1.5 * theta @ theta, rtol=1e-10
    )
    np.testing.assert_allclose(added.grad(theta), mirror_map.grad(theta) + 3 * theta, rtol=1e-8)


# The projection onto the theorem's set.


def theorem_case(num_rows, radius, constant, seed):
    features, targets = regression(num_rows, 7, seed=seed)
    mirror_map = QuadraticMap.from_data(features, targets, ridge=0.05, ridge_center=np.full(7, 0.2))
    constraint = TheoremSet(radius, num_public=num_rows, delta=0.05, constant=constant)
    far = 3 * np.random.default_rng(seed + 50).normal(size=7)
    return mirror_map, constraint, far


CASES = [
    (30, 2.6, 0.3, 0),
    (30, 50.0, 0.3, 1),
    (30, 1.5, 50.0, 2),
    (30, 1.9, 0.7, 3),
    (4, 2.6, 0.8, 4),
    (4, 50.0, 0.05, 5),
    (4, 0.5, 50.0, 6),
    (4, 1.5, 1.0, 7),
]


def test_the_cases_cover_every_pattern_of_active_constraints():
    patterns = set()
    for case in CASES:
        mirror_map, constraint, far = theorem_case(*case)
        nearest = np.asarray(mirror_map.project(far, constraint).params)
        gradient = np.linalg.norm(mirror_map.unscaled.grad(nearest))
        patterns.add(
            (
                case[0] < 7,
                bool(np.linalg.norm(nearest) > 0.999 * constraint.radius),
                bool(gradient > 0.999 * constraint.gradient_bound),
            )
        )
    thin = {(True, True, True), (True, True, False), (True, False, True)}
    assert patterns == thin | {(False, *rest) for _, *rest in thin}


@pytest.mark.parametrize("case", CASES)
def test_projection_onto_the_theorem_set_satisfies_kkt(case):
    mirror_map, constraint, far = theorem_case(*case)
    solution = mirror_map.project(far, constraint)
    assert solution.converged
    nearest = np.asarray(solution.params)
    hessian = dense_hessian(mirror_map.unscaled)
    gradient = hessian @ (nearest - np.asarray(mirror_map.center))
    ball_slack = constraint.radius - np.linalg.norm(nearest)
    gradient_slack = constraint.gradient_bound - np.linalg.norm(gradient)
    assert min(ball_slack, gradient_slack) > -1e-8
    # H(a − x) = μ x + ν H² (x − c) with μ, ν ≥ 0, each zero where its constraint is slack.
    normals = np.stack([nearest, hessian @ gradient], axis=1)
    normals *= np.array([ball_slack < 1e-7, gradient_slack < 1e-7])
    pull = hessian @ (far - nearest)
    _, misfit = scipy.optimize.nnls(normals, pull)
    assert misfit < 1e-8 * np.linalg.norm(pull)


@pytest.mark.parametrize("case", CASES)
def test_projection_onto_the_theorem_set_agrees_with_slsqp(case):
    mirror_map, constraint, far = theorem_case(*case)
    nearest = np.asarray(mirror_map.project(far, constraint).params)
    hessian, center = dense_hessian(mirror_map.unscaled), np.asarray(mirror_map.center)
    squared = hessian @ hessian

    def objective(x):
        return 0.5 * (x - far) @ hessian @ (x - far), hessian @ (x - far)

    bound = constraint.gradient_bound**2
    reference = scipy.optimize.minimize(
        objective,
        0.9 * nearest,
        jac=True,
        method="SLSQP",
        constraints=[
            {
                "type": "ineq",
                "fun": lambda x: constraint.radius**2 - x @ x,
                "jac": lambda x: -2 * x,
            },
            {
                "type": "ineq",
                "fun": lambda x: bound - (x - center) @ squared @ (x - center),
                "jac": lambda x: -2 * squared @ (x - center),
            },
        ],
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    assert reference.status in (0, 8)
    np.testing.assert_allclose(nearest, reference.x, atol=1e-5)
    assert objective(nearest)[0] <= reference.fun + 1e-9


@pytest.mark.parametrize("num_rows", [30, 4])
def test_projection_onto_the_theorem_set_keeps_points_inside_and_is_idempotent(num_rows):
    mirror_map, constraint, far = theorem_case(num_rows, 2.6, 0.8, 0)
    once = mirror_map.project(far, constraint).params
    inside = 0.999 * once + 0.001 * mirror_map.minimizer(constraint).params
    np.testing.assert_array_equal(mirror_map.project(inside, constraint).params, inside)
    np.testing.assert_allclose(mirror_map.project(once, constraint).params, once, atol=1e-9)


def test_minimizer_over_the_theorem_set():
    mirror_map, constraint, _ = theorem_case(30, 1.9, 0.7, 3)
    start = mirror_map.minimizer(constraint).params
    assert float(jnp.linalg.norm(start)) <= constraint.radius * (1 + 1e-9)
    other = mirror_map.minimizer(Ball(constraint.radius)).params
    gradient = jnp.linalg.norm(mirror_map.unscaled.grad(start))
    assert gradient <= constraint.gradient_bound * (1 + 1e-8)
    assert mirror_map.value(start) >= mirror_map.value(other) - 1e-12


def test_an_empty_theorem_set_is_named_and_under_tracing_answered_with_nan():
    mirror_map, _, far = theorem_case(30, 1.0, 1.0, 0)
    empty = TheoremSet(0.01, num_public=30, delta=0.05, constant=1e-3)
    with pytest.raises(ValueError, match="empty"):
        mirror_map.project(far, empty)
    with pytest.raises(ValueError, match="empty"):
        mirror_map.minimizer(empty)
    with pytest.raises(ValueError, match="empty"):
        jax.jit(lambda theta: mirror_map.project(theta, empty))(far)
    traced = jax.jit(lambda mirror_map, theta: mirror_map.project(theta, empty))(mirror_map, far)
    assert not traced.converged
    assert np.isnan(traced.params).all()


@pytest.mark.parametrize("constraint", [Ball(0.7), TheoremSet(0.7, 4, 0.05, constant=1.2)])
def test_projection_with_fewer_examples_than_parameters_agrees_with_the_full_hessian(constraint):
    """Also where the centre lies in the span of the data, up to rounding, or the point does."""
    features, targets = regression(4, 7)
    thin = QuadraticMap.from_data(features, targets, ridge=0.05, ridge_center=np.zeros(7))
    full = QuadraticMap.from_hessian(dense_hessian(thin.unscaled), thin.center)
    for theta in (np.linspace(-2, 3, 7), features.T @ np.array([1.0, -2, 3, 1])):
        left, right = (m.project(theta, constraint) for m in (thin, full))
        assert left.converged
        np.testing.assert_allclose(left.params, right.params, atol=1e-9)


def test_projection_does_not_depend_on_the_scale():
    mirror_map, constraint, far = theorem_case(30, 1.9, 0.7, 3)
    np.testing.assert_allclose(
        mirror_map.project(far, constraint).params,
        mirror_map.unscaled.project(far, constraint).params,
        atol=1e-12,
    )
