"""The public gradient and the warm start."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mirrordp import ExponentialAverage, PrivateData, PublicData, UniformAverage, warm_start
from mirrordp.updates.public import public_grad
from tests import statistical, tools

KEY = jax.random.key(0)
X = tools.features(rows=20, seed=3)


class TestPublicGrad:
    def test_full_set_is_the_mean(self):
        theta = jnp.array([1.0, 2.0, 3.0])
        loss, grad = jax.jit(public_grad(tools.squared_distance))(theta, X, KEY)
        np.testing.assert_allclose(grad, theta - X.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(loss, 0.5 * ((theta - X) ** 2).sum(axis=1).mean(), rtol=1e-5)

    def test_a_mini_batch_is_unbiased_and_varies(self):
        gradient = jax.jit(
            jax.vmap(public_grad(tools.squared_distance, batch_size=5), (None, None, 0))
        )
        _, grads = gradient(jnp.zeros(3), X, jax.random.split(KEY, 2000))
        error = np.asarray(grads) + X.mean(axis=0)
        variance = X.var(axis=0) / 5
        for column in range(3):
            z = error[:, column].mean() / np.sqrt(variance[column] / 2000)
            assert abs(z) < 5
        assert statistical.accepts_stddev(error[:, 0], np.sqrt(variance[0]), 1e-9)
        assert not statistical.accepts_stddev(error[:, 0], np.sqrt(X.var(axis=0)[0] / 20), 1e-9)

    def test_a_batch_of_all_rows_is_the_full_set(self):
        gradient = public_grad(tools.squared_distance, batch_size=50)
        full = public_grad(tools.squared_distance)
        np.testing.assert_array_equal(
            jax.jit(gradient)(jnp.zeros(3), X, KEY)[1], jax.jit(full)(jnp.zeros(3), X, KEY)[1]
        )

    def test_frozen_leaves_have_no_gradient(self):
        params = {"a": jnp.zeros(3), "b": jnp.ones(3)}
        loss = lambda p, x: jnp.sum((p["a"] + p["b"] - x) ** 2)  # noqa: E731
        _, grad = jax.jit(public_grad(loss, trainable={"a": True, "b": False}))(params, X, KEY)
        assert grad["b"] is None
        assert grad["a"].shape == (3,)

    def test_keyed_loss(self):
        loss = lambda p, x, key: jnp.dot(p, jax.random.normal(key, (3,)))  # noqa: E731
        gradient = jax.jit(public_grad(loss))
        first = gradient(jnp.zeros(3), X, KEY)[1]
        np.testing.assert_array_equal(first, gradient(jnp.zeros(3), X, KEY)[1])
        assert (first != gradient(jnp.zeros(3), X, jax.random.key(1))[1]).all()

    @pytest.mark.parametrize("bad", [0, -1])
    def test_bad_batch_size(self, bad):
        with pytest.raises(ValueError, match="public_batch_size must be a positive integer"):
            public_grad(tools.squared_distance, batch_size=bad)


class TestWarmStart:
    def test_finds_the_minimum(self):
        found = warm_start(
            tools.squared_distance,
            jnp.full(3, 5.0),
            PublicData(X),
            optimizer=optax.sgd(0.5),
            batch_size=None,
            max_epochs=100,
            patience=5,
            holdout_fraction=0.1,
        )
        assert found.converged
        assert len(found.train_losses) == len(found.holdout_losses) == found.num_epochs < 100
        assert np.linalg.norm(found.params - X.mean(axis=0)) < 0.3

    def test_returns_the_best_epoch_by_the_holdout(self):
        """With a learning rate that overshoots later epochs get worse; the best is kept."""
        found = warm_start(
            tools.squared_distance,
            jnp.full(3, 5.0),
            PublicData(X),
            optimizer=optax.sgd(optax.schedules.linear_schedule(0.5, 3.0, 10)),
            batch_size=None,
            max_epochs=30,
            patience=4,
        )
        assert found.converged
        best = int(np.argmin(found.holdout_losses))
        assert found.num_epochs == best + 1 + 4
        assert found.holdout_losses[-1] > found.holdout_losses[best]
        assert np.linalg.norm(found.params) < 3

    def test_says_when_it_did_not_converge(self):
        advice = "did not converge: after 3 passes .* larger learning rate .*max_epochs"
        with pytest.warns(RuntimeWarning, match=advice) as caught:
            found = warm_start(
                tools.squared_distance,
                jnp.full(3, 5.0),
                PublicData(X),
                optimizer=optax.sgd(1e-3),
                max_epochs=3,
            )
        assert len(caught) == 1
        assert not found.converged
        assert found.num_epochs == 3

    def test_says_nothing_when_it_converged(self, recwarn):
        found = warm_start(
            tools.squared_distance, jnp.zeros(3), PublicData(X), optimizer=optax.sgd(0.5)
        )
        assert found.converged
        assert not recwarn.list

    def test_a_loss_that_is_never_finite_did_not_converge(self):
        with pytest.warns(RuntimeWarning, match="did not converge: .* not finite .* smaller"):
            found = warm_start(
                lambda p, x: jnp.sum(p) * jnp.nan,
                jnp.zeros(3),
                PublicData(X),
                max_epochs=20,
                patience=3,
            )
        assert not found.converged
        np.testing.assert_array_equal(found.params, np.zeros(3))

    def test_same_seed_same_bits_and_frozen_leaves(self):
        params = {"a": jnp.zeros(3), "b": jnp.ones(3)}

        def loss(p, x):
            return jnp.sum((p["a"] + p["b"] - x) ** 2)

        def run(seed):
            with pytest.warns(RuntimeWarning, match="did not converge"):
                return warm_start(
                    loss,
                    params,
                    PublicData(X),
                    batch_size=4,
                    max_epochs=2,
                    trainable={"a": True, "b": False},
                    seed=seed,
                ).params

        first, again, other = run(0), run(0), run(1)
        np.testing.assert_array_equal(first["a"], again["a"])
        assert (first["a"] != other["a"]).any()
        np.testing.assert_array_equal(first["b"], params["b"])

    def test_refit_learns_from_every_public_row(self):
        """Rows that lie far off move the minimum, and only a refit can see the ones held out."""
        options = {
            "optimizer": optax.sgd(0.5),
            "batch_size": None,
            "max_epochs": 60,
            "holdout_fraction": 0.5,
        }
        held = warm_start(tools.squared_distance, jnp.zeros(3), PublicData(X), **options)
        again = warm_start(
            tools.squared_distance, jnp.zeros(3), PublicData(X), **options, refit=True
        )
        np.testing.assert_array_equal(held.holdout_losses, again.holdout_losses)
        np.testing.assert_allclose(again.params, X.mean(axis=0), atol=0.1)
        assert np.linalg.norm(held.params - X.mean(axis=0)) > 0.1

    @pytest.mark.parametrize("average", [ExponentialAverage(0.5), UniformAverage(start=2)])
    @pytest.mark.parametrize("refit", [False, True])
    def test_average_is_judged_and_returned(self, average, refit):
        """A plain loop; the last iterate would be elsewhere."""
        with pytest.warns(RuntimeWarning, match="did not converge"):
            found = warm_start(
                tools.squared_distance,
                jnp.full(3, 5.0),
                PublicData(X),
                holdout=PublicData(X),
                optimizer=optax.sgd(0.1),
                batch_size=None,
                max_epochs=6,
                average=average,
                refit=refit,
            )

        def mean_loss(theta):
            return jnp.mean(jax.vmap(tools.squared_distance, (None, 0))(theta, X))

        theta = averaged = jnp.full(3, 5.0)
        losses = []
        for step in range(1, 7):
            theta = theta - 0.1 * jax.grad(mean_loss)(theta)
            averaged = average.update(averaged, theta, step)
            losses.append(mean_loss(averaged))
        np.testing.assert_allclose(found.holdout_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(found.params, averaged, rtol=1e-5)
        assert np.linalg.norm(averaged - theta) > 0.05

    def test_the_holdout_has_a_loss_of_its_own(self):
        """Rows are learned as they are, and judged by the distance to 2: there it stops."""
        found = warm_start(
            tools.squared_distance,
            jnp.full(3, 5.0),
            PublicData(np.zeros((20, 3), np.float32)),
            holdout_loss_fn=lambda theta, x: jnp.sum((theta - 2.0) ** 2),
            optimizer=optax.sgd(0.1),
            batch_size=None,
            patience=3,
        )
        iterates = 5 * 0.9 ** np.arange(1, found.num_epochs + 1)
        np.testing.assert_allclose(found.holdout_losses, 3 * (iterates - 2) ** 2, rtol=1e-4)
        np.testing.assert_allclose(found.params, iterates[np.argmin(abs(iterates - 2))], rtol=1e-4)
        assert found.converged
        assert found.num_epochs < 20

    def test_average_of_another_kind_is_refused(self):
        with pytest.raises(TypeError, match="average must be"):
            warm_start(tools.squared_distance, jnp.zeros(3), PublicData(X), average=0.9)

    def test_private_data_is_a_type_error(self):
        with pytest.raises(TypeError, match="public must be PublicData, got PrivateData"):
            warm_start(tools.squared_distance, jnp.zeros(3), PrivateData(X))

    def test_bad_input(self):
        start = lambda **options: warm_start(  # noqa: E731
            tools.squared_distance, jnp.zeros(3), PublicData(X), **options
        )
        with pytest.raises(ValueError, match="holdout_fraction must be"):
            start(holdout_fraction=0.0)
        with pytest.raises(ValueError, match="patience must be a positive integer"):
            start(patience=0)
        with pytest.raises(ValueError, match="max_epochs must be a positive integer"):
            start(max_epochs=0)
        with pytest.raises(ValueError, match="batch_size must be a positive integer"):
            start(batch_size=0)
        with pytest.raises(ValueError, match="at least 2 public rows"):
            warm_start(tools.squared_distance, jnp.zeros(3), PublicData(X[:1]))
