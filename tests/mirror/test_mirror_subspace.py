"""The subspace map and the Euclidean map against the algorithms they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.mirror import Ball, EuclideanMap, SubspaceMap

# A float64 that is silently cut to float32 announces itself as a warning.
pytestmark = pytest.mark.filterwarnings("error")


def directions():
    rng = np.random.default_rng(0)
    return rng.normal(size=(20, 3)) @ rng.normal(size=(3, 7)) + 0.01 * rng.normal(size=(20, 7))


def test_limit_is_projected_gradient_descent():
    rows = directions()
    top = np.linalg.svd(rows)[2][:3]
    theta, grad = np.random.default_rng(1).normal(size=(2, 7))
    with jax.enable_x64(True):
        stepped = SubspaceMap.from_directions(rows, 3).step(theta, grad, 0.4).params
    np.testing.assert_allclose(stepped, theta - 0.4 * top.T @ (top @ grad), atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1, 1.0, 6.0])
@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_many_columns_have_the_same_span(decay, scale):
    """A Gram matrix finds it where it can: with a decay of 6, the fourth is 1e-8 of the first."""
    rng = np.random.default_rng(3)
    left, right = (np.linalg.qr(rng.normal(size=(n, 12)))[0] for n in (12, 500))
    rows = scale * (left * np.exp(-decay * np.arange(12))) @ right.T
    mirror_map = SubspaceMap.from_directions(rows, 4)
    basis = np.asarray(mirror_map.basis)
    np.testing.assert_allclose(basis.T @ basis, np.eye(4), atol=1e-13)
    vectors = np.linalg.svd(rows, full_matrices=False)[2][:4]
    if decay:
        np.testing.assert_allclose(basis @ basis.T, vectors.T @ vectors, atol=1e-6)
    else:  # any four directions of the twelve are as good
        np.testing.assert_allclose(right @ (right.T @ basis), basis, atol=1e-12)


def test_small_rho_tends_to_the_limit():
    theta, grad, center = np.random.default_rng(2).normal(size=(3, 7))
    with jax.enable_x64(True):
        limit = SubspaceMap.from_directions(directions(), 3, center=center)

        def results(mirror_map):
            return (
                mirror_map.step(theta, grad, 0.4).params,
                mirror_map.inverse(grad).params,
                # Radii above and below the length 2.4 of the part outside the subspace.
                mirror_map.project(theta, Ball(2.8)).params,
                mirror_map.project(theta, Ball(2.2)).params,
            )

        errors = []
        for rho in (1e-2, 1e-4, 1e-6):
            near = SubspaceMap.from_directions(directions(), 3, rho=rho, center=center)
            pairs = zip(results(near), results(limit), strict=True)
            errors.append([np.linalg.norm(ours - exact) for ours, exact in pairs])
        assert 2.2 < np.linalg.norm(theta - limit.along(theta)) < 2.8
    errors = np.array(errors)
    assert (errors[1:] < 0.05 * errors[:-1]).all()
    assert (errors[-1] < 1e-4).all()


def test_full_rank_or_rho_one_is_gradient_descent():
    rng = np.random.default_rng(4)
    theta, grad = rng.normal(size=(2, 7))
    for rank, rho in ((7, 0.0), (2, 1.0)):
        mirror_map = SubspaceMap.from_directions(rng.normal(size=(20, 7)), rank, rho=rho)
        np.testing.assert_allclose(
            mirror_map.step(theta, grad, 0.4).params, theta - 0.4 * grad, atol=1e-6
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "at most 7"),
        ({"rho": 1.5}, "at most 1"),
        ({"rho": -0.1}, "rho"),
        ({"center": np.zeros(6)}, "length 7"),
        ({"directions": np.full((3, 7), np.nan)}, "finite"),
    ],
)
def test_says_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        SubspaceMap.from_directions(**({"directions": directions(), "rank": 3} | change))


def test_euclidean_step_is_gradient_descent_to_the_bit():
    rng = np.random.default_rng(5)
    theta, grad = (jnp.asarray(v, jnp.float32) for v in rng.normal(size=(2, 1000)))
    mirror_map = EuclideanMap(1000)
    for rate in (0.1, 1.0, 1e-8, jnp.float32(0.37)):
        np.testing.assert_array_equal(
            mirror_map.step(theta, grad, rate).params, theta - rate * grad
        )
        np.testing.assert_array_equal(
            jax.jit(mirror_map.step)(theta, grad, rate).params,
            jax.jit(lambda t, g, r: t - r * g)(theta, grad, rate),
        )


def test_euclidean_projection_survives_huge_vectors():
    solution = EuclideanMap(2).project(jnp.asarray([3e30, 4e30]), Ball(5.0))
    np.testing.assert_allclose(solution.params, [3.0, 4.0], rtol=1e-6)
