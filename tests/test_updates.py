"""Updates against numpy, α = 1 to the bit, optax after them, inside `train`, averages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp import ExponentialAverage, UniformAverage, mix_public_gradient
from mirrordp.mirror import QuadraticMap
from mirrordp.updates import (
    accelerated_mirror_descent,
    lazy_mirror_descent,
    linearized_lazy_mirror_descent,
    mirror_descent,
    schedules,
)
from tests import tools
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


MAP = QuadraticMap.from_hessian(
    np.diag([1.0, 2.0, 3.0]) + 0.1, np.array([0.2, 0.1, -0.3]), scale=1.0
)
OPTIMIZERS = {
    "mirror descent": mirror_descent(MAP, 0.3),
    "lazy": lazy_mirror_descent(MAP, 0.3),
    "linearized lazy": linearized_lazy_mirror_descent(0.3),
    "accelerated": accelerated_mirror_descent(MAP, 0.3),
    "mixing": optax.chain(mix_public_gradient(0.5), optax.sgd(0.1)),
}
NEEDY = ("linearized lazy", "mixing")
SCHEDULE = (1.0, 0.5, 1.0, 0.25)
X, OTHER = tools.features(rows=12), tools.features(rows=5, seed=1)
START = jnp.array([0.5, -0.5, 0.25])
LOCAL_RATE = 0.25


class Examples:
    """Full batches without noise, whose gradients are θ − mean."""

    private, public = mirrordp.PrivateData(X), mirrordp.PublicData(OTHER)
    rate = 1.0

    @staticmethod
    def step(optimizer, noise_multiplier=0.0):
        made = mirrordp.Mechanism(
            sampling=mirrordp.privacy.FullBatch.of(len(X)),
            l2_clip_norm=100.0,
            noise_multiplier=noise_multiplier,
            num_steps=len(SCHEDULE),
        )
        return mirrordp.TrainStep(tools.squared_distance, made, optimizer)


class Users(Examples):
    """Users of one row each: their pseudo-gradients are the same but for the local rate."""

    private, public = (
        kind.from_users(list(rows[:, None]), max_examples_per_user=1)
        for kind, rows in ((mirrordp.PrivateClients, X), (mirrordp.PublicClients, OTHER))
    )
    rate = LOCAL_RATE

    @staticmethod
    def step(optimizer, noise_multiplier=0.0):
        central = Examples.step(optimizer, noise_multiplier)
        made = dataclasses.replace(central.mechanism, unit="user")
        return mirrordp.FederatedStep(
            tools.squared_distance, made, optimizer, client_learning_rate=LOCAL_RATE,
            client_batch_size=1, users_per_pass=4,
        )  # fmt: skip


@functools.cache
def jitted(optimizer):
    return jax.jit(optax.with_extra_args_support(optimizer).update)


def by_hand(optimizer, alphas, rate):
    """A plain loop: the optimiser is given the mixed gradient and the public one."""
    theta, state, iterates = np.asarray(START), optimizer.init(START), []
    for alpha in alphas:
        private, public = (rate * (theta - rows.mean(axis=0)) for rows in (X, OTHER))
        mixed = np.float32(alpha) * private + np.float32(1 - alpha) * public
        change, state = jitted(optimizer)(mixed, state, theta, public_grad=public)
        theta = theta + np.asarray(change)
        iterates.append(theta)
    return np.array(iterates)


class TestInsideTrain:
    """`train` hands the optimiser the mixed gradient, and the public one as `public_grad`."""

    @pytest.mark.parametrize("kind", [Examples, Users])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_equals_a_plain_loop(self, kind, name):
        step, options = kind.step(OPTIMIZERS[name]), mirrordp.TrainOptions(steps_per_call=1)
        public_at_one = kind.public if name in NEEDY else None
        for alpha, public in ((SCHEDULE, kind.public), (1.0, public_at_one)):
            run = mirrordp.train(
                step, START, kind.private, public, alpha=alpha, seed=0, options=options
            )
            found = np.array([state.params for state, _ in run])
            alphas = np.broadcast_to(alpha, len(SCHEDULE))
            expected = by_hand(OPTIMIZERS[name], alphas, kind.rate)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
            assert np.abs(found[-1] - START).max() > 0.02

    @pytest.mark.parametrize("kind", [Examples, Users])
    def test_mixing_is_the_alpha_of_train(self, kind):
        """With noise, which both scale by α."""
        own, mixed = (
            tools.last(
                mirrordp.train(
                    kind.step(optimizer, 2.0), START, kind.private, kind.public, alpha=alpha, seed=0
                )
            )[0].params
            for optimizer, alpha in ((tools.sgd(0.1), 0.5), (OPTIMIZERS["mixing"], 1.0))
        )
        np.testing.assert_allclose(mixed, own, rtol=1e-6)
        quiet = by_hand(tools.sgd(0.1), [0.5] * len(SCHEDULE), kind.rate)[-1]
        assert np.abs(own - quiet).max() > 1e-3

    @pytest.mark.parametrize("kind", [Examples, Users])
    @pytest.mark.parametrize("name", NEEDY)
    def test_without_public_data_it_is_refused(self, kind, name):
        ledger = mirrordp.Ledger(mirrordp.Adjacency.ZERO_OUT)
        message = "the optimizer takes a public gradient, so public data is needed, got none"
        with pytest.raises(ValueError, match=message):
            mirrordp.train(kind.step(OPTIMIZERS[name]), START, kind.private, spend=ledger)
        assert ledger.epsilon(1e-3).epsilon == 0

    @staticmethod
    def recorded(updates, state, params=None, *, public_grad=None, **extra_args):
        del params, extra_args
        seen = jnp.full(3, jnp.nan) if public_grad is None else public_grad
        return jnp.zeros_like(updates), (state[0] + 1, state[1].at[state[0]].set(seen))

    recording = optax.GradientTransformationExtraArgs(
        lambda params: (jnp.zeros([], int), jnp.zeros((len(SCHEDULE), 3))), recorded
    )

    @pytest.mark.parametrize("kind", [Examples, Users])
    def test_an_optional_public_gradient_comes_at_every_step(self, kind):
        """Also where α = 1, where a step of users would not compute it on its own account."""
        step = kind.step(self.recording)
        run = functools.partial(mirrordp.train, step, START, kind.private, seed=0)
        expected = np.tile(kind.rate * (START - OTHER.mean(axis=0)), (len(SCHEDULE), 1))
        for alpha in (1.0, SCHEDULE):
            state, _ = tools.last(run(kind.public, alpha=alpha))
            np.testing.assert_allclose(state.opt_state[1], expected, rtol=1e-5, atol=1e-6)

    def test_an_optional_public_gradient_may_be_missing(self):
        step = Examples.step(self.recording)
        state, _ = tools.last(mirrordp.train(step, START, Examples.private, seed=0))
        assert np.isnan(state.opt_state[1]).all()


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
