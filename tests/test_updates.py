"""The first-order step against numpy, α = 1 to the bit, optax after it, averages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mirrordp import ExponentialAverage, UniformAverage, mix_public_gradient
from mirrordp.updates import schedules
from tests.contracts.update import PARAMS, UpdateContract, assert_equal_bits, gradient

UPDATES = [
    mix_public_gradient,
    functools.partial(mix_public_gradient, scale_noise=False),
    lambda alpha: optax.chain(mix_public_gradient(alpha), optax.identity()),
]


class TestUpdates(UpdateContract):
    @pytest.fixture(params=UPDATES, ids=["paper", "unscaled noise", "in a chain"])
    def make(self, request):
        return request.param


def steps(transformation, num_steps, params=PARAMS):
    """Applies a transformation to a fixed stream of private and public gradients."""

    def step(carry, seeds):
        params, state = carry
        private, public = seeds
        updates, state = transformation.update(private, state, params, public_grad=public)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    stack = lambda seeds: jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(gradient, seeds))  # noqa: E731
    streams = stack(range(num_steps)), stack(range(100, 100 + num_steps))
    run = jax.jit(lambda: jax.lax.scan(step, (params, transformation.init(params)), streams)[1])
    return jax.tree.map(np.asarray, run())


class TestFirstOrderStep:
    @pytest.mark.parametrize("scale_noise", [True, False])
    def test_the_papers_formula(self, scale_noise):
        """θ ← θ − η(α(g + b) + (1 − α)∇Ψ), and with unscaled noise on an input αg + b."""
        alphas, eta = [1.0, 0.75, 0.5, 0.0], 0.3
        chain = optax.chain(mix_public_gradient(alphas, scale_noise=scale_noise), optax.sgd(eta))
        found = steps(chain, 4)
        theta = jax.tree.map(np.asarray, PARAMS)
        for t, alpha in enumerate(alphas):
            weight = alpha if scale_noise else 1.0
            theta = jax.tree.map(
                lambda p, g, h, w=weight, a=alpha: p - eta * (w * g + (1 - a) * h),
                theta,
                gradient(t),
                gradient(100 + t),
            )
            for name in PARAMS:
                np.testing.assert_allclose(found[name][t], theta[name], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        "optimizer",
        [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)],
        ids=["sgd", "momentum", "adam"],
    )
    def test_any_optimiser_may_follow_and_alpha_one_is_dp_sgd_to_the_bit(self, optimizer):
        mixed = steps(optax.chain(mix_public_gradient(1.0), optimizer), 5)
        plain = steps(optax.with_extra_args_support(optimizer), 5)
        assert_equal_bits(mixed, plain)
        other = steps(optax.chain(mix_public_gradient(0.9), optimizer), 5)
        assert np.abs(other["a"] - plain["a"]).max() > 1e-3

    def test_the_schedule_follows_the_count(self):
        update = mix_public_gradient(schedules.linear(1, 0, num_steps=3))
        state = update.init(PARAMS)
        ones = jax.tree.map(jnp.ones_like, PARAMS)
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        weights = []
        for _ in range(4):
            found, state = update.update(ones, state, PARAMS, public_grad=zeros)
            weights.append(float(found["a"][0]))
        assert weights == [1, 0.5, 0, 0]
        assert int(state.step) == 4


class TestAverages:
    iterates = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)

    def run(self, average):
        kept, found = jnp.full(3, 100.0), []  # the start point must be forgotten
        update = jax.jit(average.update)
        for number, iterate in enumerate(self.iterates, start=1):
            kept = update(kept, iterate, number)
            found.append(np.asarray(kept))
        return np.array(found)

    def test_uniform(self):
        expected = np.cumsum(self.iterates, axis=0) / np.arange(1, 13)[:, None]
        np.testing.assert_allclose(self.run(UniformAverage()), expected, rtol=1e-4, atol=1e-6)

    def test_uniform_with_a_late_start(self):
        found = self.run(UniformAverage(start=4))
        np.testing.assert_allclose(found[-1], self.iterates[4:].mean(axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[4], self.iterates[4], rtol=1e-5)

    def test_exponential(self):
        decay = 0.6
        kept = np.full(3, 100.0)
        for number, iterate in enumerate(self.iterates, start=1):
            rate = min(decay, number / (number + 9))
            kept = rate * kept + (1 - rate) * iterate
        np.testing.assert_allclose(self.run(ExponentialAverage(decay))[-1], kept, rtol=1e-4)
        # The start point, a hundred, has been forgotten.
        assert np.abs(kept).max() < 2

    def test_narrow_parameters_keep_their_dtype(self):
        average = jnp.zeros(3, jnp.bfloat16)
        assert UniformAverage().update(average, average, 2).dtype == jnp.bfloat16

    @pytest.mark.parametrize("bad", [0.0, 1.0, -0.5, np.nan])
    def test_decay(self, bad):
        with pytest.raises(ValueError, match=r"decay must be a number in \(0, 1\)"):
            ExponentialAverage(bad)

    @pytest.mark.parametrize("bad", [-1, 0.5])
    def test_start(self, bad):
        with pytest.raises((ValueError, TypeError), match="start must be"):
            UniformAverage(start=bad)
