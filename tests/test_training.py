"""The training loop: formulas, randomness, compilation, charging, what is shown, bad input."""

import functools
import inspect
import math
import subprocess
import sys
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp import Adjacency, Ledger, PrivateData, PublicData
from mirrordp.data import Overlap, UnprotectedWarning
from mirrordp.training import engine
from mirrordp.training.central import TrainStep
from tests import statistical, tools
from tests.tools import last, mechanism, poisson, recorder, released_gradients, sgd

X = tools.features()
PRIVATE = PrivateData(X)
PUBLIC = PublicData(tools.features(rows=10, seed=1))
THETA = jnp.array([0.5, -0.5, 0.25])


def run(public=PUBLIC, loss=tools.squared_distance, params=THETA, private=PRIVATE, **options):
    defaults = {"mechanism": mechanism(), "optimizer": sgd(0.1), "seed": 0, "steps_per_call": 5}
    return tools.train(loss, params, private, public, **(defaults | options))


def clip(gradient, norm=1.0):
    return gradient * np.minimum(1, norm / np.linalg.norm(gradient, axis=-1, keepdims=True))


def bits(tree):
    leaves = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(tree)
    ]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


FULL = functools.partial(
    mechanism, sampling=mirrordp.privacy.FullBatch.of(40), noise_multiplier=0.0
)


UNFINISHED = """
from tests import test_federated, test_training
unfinished = [test_training.run(num_steps=10), test_federated.run()]
for run in unfinished:
    next(run)
"""


def test_a_run_left_unfinished_ends_quietly_with_the_interpreter():
    done = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("function", [engine.train, mirrordp.train_sweep])
def test_signatures_stay_short(function):
    assert len(inspect.signature(function).parameters) <= 12


def test_what_takes_a_loss_in_place_of_a_step_adds_the_guarantee_alone():
    added = {"epsilon", "delta", "allow_large_delta"}
    own, loop = (inspect.signature(f).parameters for f in (mirrordp.train, engine.train))
    assert [name for name in own if name not in added] == list(loop)
    assert set(own) - set(loop) == added


class TestFormula:
    """Full batches without noise are plain projected formulas, which numpy can follow."""

    def expected(self, alphas, eta, steps):
        theta, iterates = np.asarray(THETA, np.float64), []
        for alpha in alphas[:steps]:
            private = clip(theta - X).sum(axis=0) / 40
            public = theta - PUBLIC.arrays.mean(axis=0)
            theta = theta - eta * (alpha * private + (1 - alpha) * public)
            iterates.append(theta)
        return np.array(iterates)

    @pytest.mark.parametrize("scale_noise", [True, False])
    def test_the_papers_step(self, scale_noise):
        alphas = list(np.linspace(1, 0.1, 12))
        state, info = last(run(mechanism=FULL(), alpha=alphas, scale_noise=scale_noise))
        np.testing.assert_allclose(state.params, self.expected(alphas, 0.1, 12)[-1], rtol=1e-4)
        np.testing.assert_allclose(info.alpha, np.float32(alphas[-2:]))
        assert int(state.step) == info.step == 12

    def test_a_step_by_hand_equals_train(self):
        step = TrainStep(loss_fn=tools.squared_distance, mechanism=FULL(), optimizer=sgd(0.1))
        state = step.init(THETA, jax.random.key(0))
        once = jax.jit(functools.partial(step, alpha=0.5))
        for _ in range(3):
            state, info = once(state, X, np.zeros(40, bool), PUBLIC.arrays)
        theirs, _ = last(run(mechanism=FULL(), alpha=0.5, num_steps=3))
        np.testing.assert_allclose(state.params, theirs.params, rtol=1e-6)
        assert info.noisy_grad_norm > 0

    def test_an_alpha_above_one_does_not_enlarge_the_sum_before_its_noise(self):
        """`train` refuses it, but a loop that calls the step itself may pass anything."""
        step = TrainStep(
            loss_fn=tools.squared_distance, mechanism=FULL(), optimizer=sgd(0.1), scale_noise=False
        )
        state = step.init(THETA, jax.random.key(0))
        once = jax.jit(step)
        norms = [
            float(once(state, X, np.zeros(40, bool), PUBLIC.arrays, alpha=alpha)[1].noisy_grad_norm)
            for alpha in (1.0, 50.0)
        ]
        assert norms[1] == pytest.approx(norms[0])

    def test_dp_sgd_is_alpha_one_to_the_bit(self):
        with_public, _ = last(run(alpha=1.0))
        without, _ = last(run(public=None, alpha=1.0))
        assert bits(with_public.params) == bits(without.params)

    def test_a_public_gradient_of_nan_cannot_matter_while_alpha_is_one(self):
        poisoned = lambda params, example: jnp.nan * jnp.sum(params)  # noqa: E731
        alphas = [1.0] * 4 + [0.5]
        states = [
            state.params
            for state, _ in run(
                alpha=alphas, num_steps=5, public_loss_fn=poisoned, steps_per_call=1
            )
        ]
        plain = [state.params for state, _ in run(public=None, num_steps=4, steps_per_call=1)]
        assert bits(states[:4]) == bits(plain)
        assert np.isnan(states[4]).all()

    def test_clipping_the_noisy_gradient_once_more(self):
        options = {"mechanism": mechanism(noise_multiplier=50.0), "optimizer": recorder(12)}
        free = released_gradients(run(**options))
        clipped = released_gradients(run(noisy_clip_norm=0.5, **options))
        assert np.linalg.norm(free, axis=1).min() > 0.6
        np.testing.assert_allclose(clipped, clip(free, 0.5), rtol=1e-4)
        infos = [info.noisy_grad_norm for _, info in run(noisy_clip_norm=0.5, **options)]
        np.testing.assert_allclose(np.concatenate(infos), np.linalg.norm(free, axis=1), rtol=1e-5)

    def test_automatic_clipping_scales_every_gradient(self):
        options = {"mechanism": FULL(), "optimizer": recorder(12), "public": None}
        found = released_gradients(run(automatic_clip=True, **options))
        gradients, limit = THETA - X, FULL().l2_clip_norm
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        expected = (gradients * limit / (norms + limit)).mean(axis=0)
        np.testing.assert_allclose(found[0], expected, rtol=1e-4)

    def test_any_optimiser_follows(self):
        optimizer = optax.chain(optax.trace(0.9), optax.adam(0.1))
        gradients = released_gradients(run(optimizer=recorder(12), mechanism=FULL()))
        state, _ = last(run(optimizer=optimizer, mechanism=FULL(), num_steps=1))
        updates, _ = optimizer.update(gradients[0], optimizer.init(THETA), THETA)
        np.testing.assert_allclose(state.params, THETA + updates, rtol=1e-5)

    def test_averages(self):
        iterates = np.array([state.params for state, _ in run(steps_per_call=1)])
        uniform, _ = last(run(average=mirrordp.UniformAverage(start=3)))
        np.testing.assert_allclose(uniform.average, iterates[3:].mean(axis=0), rtol=1e-5)
        assert bits(uniform.params) == bits(iterates[-1])
        exponential, _ = last(run(average=mirrordp.ExponentialAverage(0.5)))
        kept = np.asarray(THETA)
        for number, iterate in enumerate(iterates, start=1):
            rate = min(0.5, number / (number + 9))
            kept = rate * kept + (1 - rate) * iterate
        np.testing.assert_allclose(exponential.average, kept, rtol=1e-4)
        assert last(run())[0].average is None


class TestReleasedNoise:
    """The whole pipeline on a loss without gradient: what comes out is σC/B of noise."""

    size = 500
    options: ClassVar = {
        "loss": lambda params, example: 0.0 * jnp.sum(params),
        "public": None,
        "params": jnp.zeros(size),
        "steps_per_call": 20,
    }

    def gradients(self, seed=0, **choices):
        choices = {"noise_multiplier": 1.5, "l2_clip_norm": 0.3, "num_steps": 40} | choices
        found = mechanism(**choices)
        return released_gradients(
            run(mechanism=found, optimizer=recorder(40), seed=seed, **self.options)
        )

    def test_scale(self):
        samples = self.gradients()
        assert samples.shape == (40, self.size)
        stddev = 1.5 * 0.3 / 8
        assert statistical.accepts_stddev(samples, stddev)
        assert statistical.accepts_normal(samples, stddev)
        for factor in (2 / 3, 0.95, 1.05, 3 / 2):
            assert not statistical.accepts_stddev(samples, factor * stddev)

    def test_noise_is_added_once_per_step_also_over_several_passes(self):
        """Capacity 2 makes steps of four passes: noise per pass would double the deviation."""
        samples = self.gradients(sampling=poisson(capacity=2))
        assert statistical.accepts_stddev(samples, 1.5 * 0.3 / 8)
        assert not statistical.accepts_stddev(samples, 2 * 1.5 * 0.3 / 8)

    def test_fresh_at_each_step(self):
        samples = self.gradients()
        for lag in (1, 2, 20):
            assert statistical.accepts_uncorrelated(samples[:-lag], samples[lag:])
        assert not statistical.accepts_uncorrelated(samples[:-1], samples[1:] + 0.1 * samples[:-1])

    def test_another_seed_is_independent(self):
        assert statistical.accepts_uncorrelated(self.gradients(), self.gradients(seed=1))
        assert not statistical.accepts_uncorrelated(self.gradients(), self.gradients())

    def test_banded_noise_has_its_covariance(self):
        coefficients = (1.0, 0.6)
        cyclic = mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
            8, num_examples=40, num_groups=2
        )
        samples = self.gradients(sampling=cyclic, noise=mirrordp.privacy.BandedNoise(coefficients))
        inverse = np.linalg.inv(np.eye(40) + 0.6 * np.eye(40, k=-1))
        scale = 1.5 * 0.3 / 8 * math.hypot(*coefficients)
        covariance = scale**2 * inverse @ inverse.T
        assert statistical.accepts_covariance(samples.T, covariance)
        assert not statistical.accepts_covariance(samples.T, np.diag(np.diag(covariance)))

    def test_half_precision_parameters(self):
        found = run(
            mechanism=mechanism(num_steps=40),
            optimizer=recorder(40),
            **(self.options | {"params": jnp.zeros(self.size, jnp.bfloat16)}),
        )
        samples = released_gradients(found)
        assert samples.dtype == jnp.bfloat16
        assert statistical.accepts_stddev(samples.astype(np.float64), 4 / 8)
        assert not statistical.accepts_stddev(samples.astype(np.float64), 1.05 * 4 / 8)


class TestAlphaZero:
    def test_private_data_cannot_influence_such_steps(self):
        other = PrivateData(100 * tools.features(seed=9))
        found = [last(run(private=data, alpha=0.0, num_steps=20))[0] for data in (PRIVATE, other)]
        assert bits(found[0].params) == bits(found[1].params)
        theta = np.asarray(THETA)
        for _ in range(20):
            theta = theta - 0.1 * (theta - PUBLIC.arrays.mean(axis=0))
        np.testing.assert_allclose(found[0].params, theta, rtol=1e-4)

    def test_the_private_loss_is_never_evaluated_on_them(self):
        seen = []

        def spying(params, example):
            jax.debug.callback(lambda x: seen.append(1), example[0])
            return tools.squared_distance(params, example)

        alphas = [0.0, 0.5, 0.0, 0.0, 1.0, 0.0]
        options = {"loss": spying, "public_loss_fn": tools.squared_distance, "num_steps": 6}
        list(run(alpha=0.0, **options))
        jax.effects_barrier()
        assert not seen
        list(run(alpha=alphas, **options))
        jax.effects_barrier()
        assert seen

    def test_they_are_not_charged_and_leave_the_noise_alone(self):
        alphas = [0.0, 0.5, 0.0, 0.0, 1.0, 0.0]
        ledger = Ledger(Adjacency.ZERO_OUT)
        infos = [info for _, info in run(alpha=alphas, num_steps=6, spend=ledger, steps_per_call=2)]
        assert [info.charged_steps for info in infos] == [1, 1, 2]
        assert ledger.event == mechanism().event_between(0, 2)
        norms = np.concatenate([info.noisy_grad_norm for info in infos])
        np.testing.assert_array_equal(norms == 0, np.array(alphas) == 0)

    def test_skipped_steps_take_neither_draw_nor_noise(self):
        """The private steps of a run with gaps release what a run without gaps releases."""
        gaps = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
        loss = tools.weighted_distance  # its gradient does not depend on the parameters
        data = {"x": X, "weight": np.ones(40, np.float32)}
        other = {"x": PUBLIC.arrays, "weight": np.zeros(10, np.float32)}
        options = {"loss": loss, "private": PrivateData(data), "public": PublicData(other)}
        with_gaps = released_gradients(
            run(alpha=gaps, num_steps=6, optimizer=recorder(6), **options)
        )
        without = released_gradients(run(alpha=1.0, num_steps=3, optimizer=recorder(6), **options))
        np.testing.assert_array_equal(with_gaps[[1, 4, 5]], without[:3])
        assert not with_gaps[[0, 2, 3]].any()

    def test_steps_beyond_the_mechanism_are_free_while_alpha_is_zero(self):
        schedule = mirrordp.updates.schedules.cosine(decay_steps=12)
        _, info = last(run(alpha=schedule, num_steps=30))
        assert (info.step, info.charged_steps) == (30, 12)


class TestRandomness:
    def test_same_seed_same_bits(self):
        first, second = (last(run(alpha=0.5)) for _ in range(2))
        assert bits(first[0]) == bits(second[0])
        np.testing.assert_array_equal(first[1].noisy_grad_norm, second[1].noisy_grad_norm)

    def test_another_seed_differs(self):
        assert bits(last(run(seed=0))[0].params) != bits(last(run(seed=1))[0].params)

    def test_without_a_seed_runs_differ(self):
        assert bits(last(run(seed=None))[0].params) != bits(last(run(seed=None))[0].params)

    @pytest.mark.parametrize("steps_per_call", [1, 4, 50])
    def test_the_length_of_a_call_changes_nothing(self, steps_per_call):
        found = last(run(alpha=0.5, steps_per_call=steps_per_call))[0]
        assert bits(found.params) == bits(last(run(alpha=0.5))[0].params)

    @pytest.mark.parametrize("loss", [tools.weighted_distance, tools.keyed_distance])
    def test_streaming_equals_data_on_the_device_to_the_bit(self, loss):
        data = PrivateData({"x": X.astype(np.float64), "weight": np.ones(40)})
        options = {"loss": loss, "private": data, "public": None}
        streamed = last(run(stream=True, **options))[0]
        assert bits(streamed) == bits(last(run(stream=False, **options))[0])

    @pytest.mark.parametrize(
        ("capacity", "microbatch_size"), [(1, None), (3, 64), (64, 1), (64, 3)]
    )
    def test_capacity_and_microbatch_change_nothing(self, capacity, microbatch_size):
        options = {"mechanism": mechanism(sampling=poisson(capacity=capacity))}
        found = last(run(**options, microbatch_size=microbatch_size))[0]
        np.testing.assert_allclose(found.params, last(run())[0].params, rtol=1e-5)

    def test_an_examples_key_does_not_depend_on_its_place_or_company(self):
        """Dropout of a row is the same in any draw of that step."""
        data = PrivateData({"x": np.ones((6, 3), np.float32), "weight": np.ones(6, np.float32)})
        base = mirrordp.PoissonSampling(sampling_prob=0.5, expected_batch_size=1, capacity=2)

        def sums(draws):
            found = mechanism(
                sampling=tools.Replay(base=base, draws=draws),
                noise_multiplier=0.0,
                num_steps=8,
                l2_clip_norm=9.0,
            )
            return released_gradients(
                run(
                    loss=tools.keyed_distance,
                    private=data,
                    public=None,
                    mechanism=found,
                    optimizer=recorder(8),
                )
            )

        # Over eight steps a key that belonged to a place would show: alone, each row comes first.
        together = sums(((3, 1, 5), *[(3, 1)] * 7))
        first, second = sums(((5,), *[(1,)] * 7)), sums(((1, 3), *[(3,)] * 7))
        np.testing.assert_array_equal(together, first + second)
        # The masks differ between rows or steps, or the equality would say nothing.
        assert len({row.tobytes() for row in (*first, *second)}) >= 2

    @pytest.mark.parametrize("banded", [False, True])
    def test_a_state_goes_on_with_the_seed_of_its_run_alone(self, banded):
        """With another seed, its noise would meet the sums of other batches."""
        options = {}
        if banded:
            sampling = mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
                5, num_examples=40, num_groups=3
            )
            noise = mirrordp.privacy.BandedNoise((1.0, 0.5, 0.2))
            options["mechanism"] = mechanism(sampling=sampling, noise=noise)
        seeded, _ = next(run(**options))
        unseeded, _ = next(run(seed=None, **options))
        for state, seed in ((seeded, 1), (unseeded, 0), (next(run(seed=1, **options))[0], 0)):
            with pytest.raises(ValueError, match="noise comes from another seed, or from none"):
                next(run(seed=seed, state=state, **options))
        found, _ = last(run(state=seeded, **options))
        assert bits(found) == bits(last(run(**options))[0])


class TestCompilation:
    def test_nothing_compiles_after_the_first_call(self):
        """Draws above the capacity, empty draws and a short last block all have one shape."""
        base = mirrordp.PoissonSampling(sampling_prob=0.5, expected_batch_size=3, capacity=3)
        draws = ((0, 1), (), tuple(range(11)), (5,), (), (1, 2, 3, 4), tuple(range(40)), (7,))
        found = mechanism(sampling=tools.Replay(base=base, draws=draws), num_steps=8)
        steps = run(mechanism=found, steps_per_call=3, alpha=0.5)
        next(steps)
        compiled = engine._run_passes._cache_size()
        rest = list(steps)
        assert [info.step for _, info in rest] == [6, 8]
        assert engine._run_passes._cache_size() == compiled

    def test_no_compilation_of_anything_at_all_after_the_second_call(self, caplog):
        steps = run(steps_per_call=3, alpha=[0.5] * 6 + [0.0] * 3 + [1.0] * 2, num_steps=11)
        next(steps)
        next(steps)
        with jax.log_compiles(True), caplog.at_level("WARNING"):
            assert len(list(steps)) == 2
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]

    def test_an_equal_run_compiles_nothing(self):
        list(run())
        compiled = engine._run_passes._cache_size()
        list(run(seed=5))
        assert engine._run_passes._cache_size() == compiled

    def test_draws_above_the_capacity_lose_nothing(self):
        base = mirrordp.PoissonSampling(sampling_prob=0.5, expected_batch_size=4, capacity=3)
        draws = (tuple(range(40)), (), (0, 39))
        found = mechanism(
            sampling=tools.Replay(base=base, draws=draws), num_steps=3, noise_multiplier=0.0
        )
        sums = 4 * released_gradients(run(mechanism=found, optimizer=recorder(3)))
        contributions = clip(np.asarray(THETA) - X)
        for step, draw in enumerate(draws):
            expected = contributions[list(draw)].sum(axis=0) if draw else np.zeros(3)
            np.testing.assert_allclose(sums[step], expected, rtol=1e-4, atol=1e-5)

    def test_empty_batches_are_ordinary_steps(self):
        base = mirrordp.PoissonSampling(sampling_prob=0.01, expected_batch_size=1)
        found = mechanism(sampling=tools.Replay(base=base, draws=((),) * 12))
        state, info = last(run(mechanism=found))
        assert info.charged_steps == 12
        assert np.all(info.noisy_grad_norm > 0)
        assert np.isfinite(state.params).all()


class TestFrozen:
    params: ClassVar = {"backbone": jnp.arange(3.0), "head": {"w": jnp.ones(3), "b": jnp.zeros([])}}

    @staticmethod
    def loss(params, example):
        prediction = jnp.dot(params["head"]["w"] * params["backbone"], example)
        return (prediction + params["head"]["b"]) ** 2

    def test_frozen_leaves_are_unchanged_to_the_bit(self):
        state, _ = last(
            run(
                loss=self.loss,
                params=self.params,
                trainable={"backbone": False, "head": True},
                alpha=[1.0, 0.5] * 6,
                average=mirrordp.UniformAverage(),
            )
        )
        assert bits(state.params["backbone"]) == bits(self.params["backbone"])
        assert bits(state.average["backbone"]) == bits(self.params["backbone"])
        assert (np.asarray(state.params["head"]["w"]) != 1).all()

    def test_a_frozen_integer_leaf(self):
        params = {"w": jnp.ones(3), "step": jnp.arange(2)}
        loss = lambda p, x: jnp.dot(p["w"], x) * p["step"][1]  # noqa: E731
        state, _ = last(run(loss=loss, params=params, trainable={"w": True, "step": False}))
        assert state.params["step"].dtype == params["step"].dtype
        with pytest.raises(TypeError, match=r"trainable parameters must be floating point.*'step'"):
            run(loss=loss, params=params)

    def test_nothing_trainable(self):
        with pytest.raises(ValueError, match="trainable must be True for at least one"):
            run(trainable=False)

    def test_steps_of_equal_masks_are_equal(self):
        """They then compile once."""
        step, same, other = (
            TrainStep(self.loss, mechanism(), sgd(0.1), trainable=mask)
            for mask in (
                {"backbone": False, "head": True},
                {"head": True, "backbone": False},
                {"backbone": True, "head": False},
            )
        )
        assert step == same != other
        assert hash(step) == hash(same)


class TestBadRows:
    def test_a_nan_gradient_never_reaches_the_model(self):
        data = {"x": X, "weight": np.ones(40, np.float32)}

        def sometimes_nan(params, example):
            return jnp.dot(params, example["x"]) * jnp.sqrt(example["weight"])

        options = {
            "loss": sometimes_nan,
            "public": None,
            "mechanism": mechanism(sampling=mirrordp.privacy.FullBatch.of(40)),
        }
        bad = data["weight"].copy()
        bad[7] = -1.0  # the square root of which is not a number
        zero = data["weight"].copy()
        zero[7] = 0.0
        found, expected = (
            last(run(private=PrivateData(data | {"weight": weight}), **options))[0]
            for weight in (bad, zero)
        )
        assert np.isfinite(found.params).all()
        np.testing.assert_allclose(found.params, expected.params, rtol=1e-6)


class TestCharging:
    def test_a_block_is_charged_before_it_can_be_seen(self):
        ledger = Ledger(Adjacency.ZERO_OUT)
        steps = run(spend=ledger)
        assert ledger.epsilon(1e-3).epsilon == 0
        for done in (5, 10, 12):
            next(steps)
            assert ledger.event == mechanism().event_between(0, done)

    def test_a_run_that_breaks_off_has_been_charged(self):
        ledger = Ledger(Adjacency.ZERO_OUT)

        def breaks_at_run_time(params, example):
            def fail(_):
                raise RuntimeError("the machine broke")

            jax.debug.callback(fail, example[0])
            return tools.squared_distance(params, example)

        def consume():
            for state, _ in run(loss=breaks_at_run_time, public=None, spend=ledger):
                jax.block_until_ready(state)
            jax.effects_barrier()

        with pytest.raises(Exception, match="the machine broke"):
            consume()
        assert ledger.event.count >= 5

    def test_a_run_that_is_left_has_been_charged_for_what_it_showed(self):
        ledger = Ledger(Adjacency.ZERO_OUT)
        for _, info in run(spend=ledger):
            if info.step >= 5:
                break
        assert ledger.event == mechanism().event_between(0, 5)

    def test_charged_steps_and_epsilon(self):
        ledger = Ledger(Adjacency.ZERO_OUT)
        _, info = last(run(spend=ledger, num_steps=7))
        assert info.charged_steps == info.step == 7
        assert ledger.epsilon(1e-3).epsilon == mechanism().epsilon(1e-3, num_steps=7)

    def test_runs_compose(self):
        ledger = Ledger(Adjacency.ZERO_OUT)
        for _ in range(2):
            list(run(spend=ledger))
        assert ledger.event.count == 24

    def test_cyclic_sampling_charges_rounds(self):
        cyclic = mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
            8, num_examples=40, num_groups=4
        )
        ledger = Ledger(Adjacency.ZERO_OUT)
        steps = run(mechanism=mechanism(sampling=cyclic), spend=ledger)
        counts = [(next(steps), ledger.event.count)[1] for _ in range(3)]
        assert counts == [2, 3, 3]

    def test_one_ledger_has_one_adjacency(self):
        with pytest.raises(ValueError, match="a ledger of 'replace' and a mechanism of 'zero-out'"):
            run(spend=Ledger(Adjacency.REPLACE))

    def test_the_public_data_does_not_change_the_cost(self):
        ledgers = [Ledger(Adjacency.ZERO_OUT) for _ in range(2)]
        list(run(spend=ledgers[0], alpha=0.5))
        list(run(spend=ledgers[1], alpha=0.5, public=PublicData(X[:3] + 1)))
        assert ledgers[0].event == ledgers[1].event


class TestWhatIsShown:
    def test_nothing_unprivatized_by_default(self):
        for _, info in run():
            assert info.unprivatized is None

    def test_on_request_the_operator_sees_the_batch(self):
        found = mechanism(
            sampling=mirrordp.privacy.FullBatch.of(40, capacity=16), noise_multiplier=5.0
        )
        (_, info), *_ = run(mechanism=found, show_unprivatized=True)
        gradient = np.asarray(THETA) - X
        norms = np.linalg.norm(gradient, axis=1)
        shown = info.unprivatized
        assert shown.batch_size.tolist() == [40] * 5
        assert shown.loss[0] == pytest.approx(0.5 * (norms**2).mean(), rel=1e-5)
        assert shown.clip_fraction[0] == pytest.approx((norms > 1).mean())

    def test_showing_changes_nothing(self):
        shown = last(run(show_unprivatized=True))[0]
        np.testing.assert_allclose(shown.params, last(run())[0].params, rtol=1e-6)

    def test_the_public_loss_is_shown(self):
        _, info = last(run(alpha=0.5, steps_per_call=12, optimizer=sgd(0.0)))
        expected = 0.5 * ((np.asarray(THETA) - PUBLIC.arrays) ** 2).sum(axis=1).mean()
        np.testing.assert_allclose(info.public_loss, expected, rtol=1e-5)
        assert np.isnan(last(run())[1].public_loss).all()

    def test_public_mini_batches(self):
        found = mechanism(noise_multiplier=0.0)
        _, info = last(
            run(
                alpha=0.5,
                steps_per_call=12,
                mechanism=found,
                optimizer=sgd(0.0),
                public_batch_size=3,
            )
        )
        assert len(set(info.public_loss.tolist())) > 3

    @pytest.mark.parametrize("charted", [False, True])
    def test_half_a_step_under_the_noise_of_the_whole_one_is_not(self, charted):
        """An optimiser or a chart may log what it is given; two sums under one noise differ by
        records."""
        logged = []

        def log(gradient):
            jax.debug.callback(lambda g: logged.append(np.asarray(g)), gradient)
            return gradient

        def update(gradient, state, params=None):
            return log(gradient), state

        options = {"optimizer": optax.GradientTransformation(lambda _: optax.EmptyState(), update)}
        if charted:
            chart = mirrordp.updates.recentred()
            logging = chart._replace(release=lambda centre, mean: chart.release(centre, log(mean)))
            # Where half a step is done, an optimiser with public data is given what is public.
            options = {"chart": logging}
        found = mechanism(sampling=mirrordp.privacy.FullBatch.of(40, capacity=16))
        _, info = last(run(mechanism=found, **options))
        jax.effects_barrier()
        # Three passes make a step.
        shown = {gradient.tobytes() for gradient in logged if gradient.any()}
        assert len(shown) == info.charged_steps


class TestOverlap:
    overlapping = PublicData(np.concatenate([X[[3, 8, 8]], 2 * X[:3]]))

    def test_masked_rows_contribute_nothing_and_n_stays(self):
        found = FULL()
        options = {"mechanism": found, "optimizer": recorder(12), "num_steps": 1}
        with pytest.warns(UnprotectedWarning, match="2 private rows equal a public row"):
            masked = 40 * released_gradients(run(public=self.overlapping, **options))[0]
        whole = 40 * released_gradients(run(**options))[0]
        contributions = clip(np.asarray(THETA) - X)
        np.testing.assert_allclose(
            whole - masked, contributions[[3, 8]].sum(axis=0), rtol=1e-3, atol=1e-4
        )

    def test_refuse(self):
        ledger = Ledger(Adjacency.ZERO_OUT)
        with pytest.raises(ValueError, match="2 private rows equal a public row"):
            run(public=self.overlapping, overlap=Overlap.REFUSE, spend=ledger)
        assert ledger.epsilon(1e-3).epsilon == 0

    def test_a_public_loss_of_its_own_does_not_hide_an_overlap(self):
        own = {"public": self.overlapping, "public_loss_fn": lambda p, row: jnp.sum(p * row)}
        with pytest.raises(ValueError, match="2 private rows equal a public row"):
            run(**own, overlap=Overlap.REFUSE)
        with pytest.warns(UnprotectedWarning, match="2 private rows equal a public row"):
            list(run(**own, num_steps=1))

    def test_without_overlap_nothing_is_said(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprotectedWarning)
            list(run(overlap=Overlap.REFUSE))


class TestBadInput:
    """Each is refused before anything is computed or charged."""

    def refuse(
        self, error, message, *, private=PRIVATE, public=PUBLIC, loss=None, params=THETA, **options
    ):
        ledger = Ledger(Adjacency.ZERO_OUT)
        options = {"spend": ledger} | options
        with pytest.raises(error, match=message):
            run(
                private=private,
                public=public,
                loss=loss or tools.squared_distance,
                params=params,
                **options,
            )
        assert ledger.epsilon(1e-3).epsilon == 0

    def test_one_kind_of_data_for_the_other(self):
        self.refuse(TypeError, "private must be PrivateData, got PublicData", private=PUBLIC)
        self.refuse(TypeError, "public must be PublicData, got PrivateData", public=PRIVATE)
        self.refuse(TypeError, "private must be PrivateData, got ndarray", private=X)
        self.refuse(TypeError, "public must be PublicData, got ndarray", public=X)

    def test_public_rows_of_another_structure(self):
        other = PublicData({"x": X})
        self.refuse(ValueError, "same structure", public=other)
        list(
            run(
                public=other,
                alpha=0.5,
                num_steps=1,
                public_loss_fn=lambda p, row: tools.squared_distance(p, row["x"]),
            )
        )

    def test_public_data_is_needed_below_alpha_one(self):
        self.refuse(ValueError, "public data is needed, got none", public=None, alpha=0.5)

    @pytest.mark.parametrize("bad", [-0.1, 1.1, math.inf])
    def test_alpha(self, bad):
        self.refuse(ValueError, r"alpha must be in \[0, 1\]", alpha=bad)
        self.refuse(ValueError, r"alpha must be in \[0, 1\]", alpha=lambda t: bad + 0 * t)

    def test_a_schedule_shorter_than_the_run(self):
        self.refuse(ValueError, "cover all 12 steps, but ends before step 3", alpha=[1.0] * 3)

    def test_more_steps_than_the_mechanism_was_made_for(self):
        self.refuse(ValueError, "made for 12 steps, got a run of 13 steps", num_steps=13)

    def test_data_of_another_length(self):
        self.refuse(ValueError, "made for num_examples=40", private=PrivateData(X[:39]))

    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            ("num_steps", 0),
            ("num_steps", 2.5),
            ("steps_per_call", 0),
            ("microbatch_size", 0),
            ("noisy_clip_norm", 0.0),
            ("public_batch_size", 0),
            ("public_batch_size", 1.5),
            ("mechanism", None),
            ("overlap", "drop"),
            ("average", "uniform"),
            ("optimizer", "sgd"),
        ],
    )
    def test_options(self, name, bad):
        self.refuse((TypeError, ValueError), f"{name} must be", **{name: bad, "alpha": 0.5})

    def test_ledger_of_another_kind(self):
        with pytest.raises(TypeError, match="spend must be Ledger or Budget, got list"):
            run(spend=[])

    def test_a_loss_that_is_not_a_scalar(self):
        self.refuse(ValueError, "must return one scalar", loss=lambda p, x: p * x)
        self.refuse(
            ValueError,
            "must return one scalar",
            public_loss_fn=lambda p, x: p * x,
            alpha=0.5,
        )

    def test_a_loss_of_a_batch_is_told_that_it_sees_one_example(self):
        with pytest.raises(IndexError) as caught:
            run(loss=lambda params, batch: jnp.mean((batch[:, 0] - params[0]) ** 2))
        notes = "\n".join(caught.value.__notes__)  # JAX adds one of its own
        assert "single example, without a batch axis" in notes
        assert "(3,) and (3,)" in notes
        assert "random key" not in notes

    def test_a_target_as_third_argument_is_told_that_it_is_a_key(self):
        with pytest.raises(TypeError) as caught:
            run(loss=lambda params, x, y: jnp.mean((x @ params - y) ** 2))
        assert "third argument of loss_fn is a random key" in "\n".join(caught.value.__notes__)

    def test_parameters_that_only_noise_would_move(self):
        """A body behind `stop_gradient`, or running averages, would be destroyed silently."""
        params = {"body": THETA, "head": THETA, "more": {"scalar": jnp.ones(())}}

        @jax.jit
        def loss(params, x):
            return tools.squared_distance(params["head"] * jax.lax.stop_gradient(params["body"]), x)

        with pytest.warns(UserWarning, match=r"no gradient in params\['body'\], .*'scalar'\]:"):
            run(loss=loss, params=params)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(loss=loss, params=params, trainable={"body": False, "head": True, "more": False})

    def test_a_public_loss_that_does_not_fit_the_public_rows(self):
        self.refuse(
            (TypeError, IndexError),
            "indices must be integers|missing",
            public_loss_fn=lambda p, x: jnp.sum(p * x["missing"]),
            alpha=0.5,
        )

    def test_a_mask_of_another_tree(self):
        self.refuse(ValueError, "pytree structure error", trainable={"w": True})

    def test_unknown_options(self):
        with pytest.raises(TypeError, match="epochs"):
            run(epochs=3)
