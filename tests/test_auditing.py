"""Audits stay below the claim on honest runs and pass it without noise; replays find leaks."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import mirrordp
from mirrordp import Adjacency, Mechanism, TrainStep, auditing, cli
from mirrordp.auditing import Algorithm, Attack, attacks
from mirrordp.privacy.sums import ExactSum
from mirrordp.training import engine, federated
from tests import tools

FEDERATED = Algorithm.FEDERATED

SIGMA, STEPS, CANARIES = 3.0, 16, 240
SAMPLING = mirrordp.PoissonSampling.for_batch_size(60, num_examples=CANARIES)
FEW = mirrordp.PoissonSampling.for_batch_size(15, num_examples=60)


def made(kind=Mechanism, **options):
    defaults = {
        "sampling": SAMPLING,
        "l2_clip_norm": 1.0,
        "noise_multiplier": SIGMA,
        "num_steps": STEPS,
    }
    return kind(**(defaults | options))


class NoiseOff(Mechanism):
    def add_noise(self, clipped_sum, state, *, weight=None):
        return self.noise.add(clipped_sum, state, 0.0, weight=weight)


def with_noise(factor):
    """Makes a mechanism whose noise is `factor` times what it states."""

    class Deviating(Mechanism):
        def add_noise(self, clipped_sum, state, *, weight=None):
            return self.noise.add(clipped_sum, state, factor * self.noise_stddev, weight=weight)

    return Deviating


def with_clip(factor):
    """Makes a mechanism that clips at `factor` times the norm that it states."""

    class Deviating(Mechanism):
        def clipped_grad(self, loss_fn, **options):
            wrong = mirrordp.clipped_grad(
                loss_fn, l2_clip_norm=factor * self.l2_clip_norm, **options
            )

            def exact_sum(*args, **keywords):
                total, stats = wrong.exact_sum(*args, **keywords)
                return ExactSum.of(total.floats(), self.l2_clip_norm), stats

            return dataclasses.replace(wrong, exact_sum=exact_sum)

    return Deviating


ClippingOff = with_clip(1e6)


class NoiseReused(Mechanism):
    """A mechanism in which every step adds the noise of the first."""

    def add_noise(self, clipped_sum, state, *, weight=None):
        return super().add_noise(clipped_sum, state, weight=weight)[0], state


class NoiseNotProportional(Mechanism):
    """A mechanism with the stated noise at the tests' multiplier, and less at smaller ones."""

    def add_noise(self, clipped_sum, state, *, weight=None):
        return self.noise.add(clipped_sum, state, self.noise_stddev**2 / SIGMA, weight=weight)


def altered(alter):
    """Makes a mechanism that adds `alter(noise)`, a function of the noise as a tree."""

    class Altered(Mechanism):
        def add_noise(self, clipped_sum, state, *, weight=None):
            noise, state = super().add_noise(clipped_sum.zeros(), state)
            noise = alter(noise, self.noise_stddev)
            return jax.tree.map(jnp.add, clipped_sum.floats(), noise), state

    return Altered


def without_one_coordinate(noise, stddev):
    return noise | {"first": noise["first"].at[3].set(0)}


def without_one_leaf(noise, stddev):
    return noise | {"second": jnp.zeros_like(noise["second"])}


def same_in_both_leaves(noise, stddev):
    return noise | {"second": noise["first"]}


def uniform(noise, stddev):
    return jax.tree.map(
        lambda leaf: stddev * 12**0.5 * (jax.scipy.stats.norm.cdf(leaf / stddev) - 0.5), noise
    )


def cut_off(noise, stddev):
    return jax.tree.map(lambda leaf: jnp.clip(leaf, -2.9 * stddev, 2.9 * stddev), noise)


def one_number_for_all(noise, stddev):
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, noise["first"][0]), noise)


def clips_at(factor, right, delta, l2_clip_norm):
    return right(delta, factor * l2_clip_norm)


def unclipped(delta, l2_clip_norm):
    del l2_clip_norm
    return federated.ClippedDelta(delta, jnp.ones([]), jnp.ones([], bool))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawsMore(mirrordp.PoissonSampling):
    """A sampler that states one probability and draws with another."""

    factor: float

    def batches(self, num_examples, num_steps, rng):
        honest = mirrordp.PoissonSampling(
            sampling_prob=self.factor * self.sampling_prob,
            expected_batch_size=self.expected_batch_size,
        )
        return honest.batches(num_examples, num_steps, rng)


CLAIMED = {}
MANY_CANARIES = attacks._CANARIES


@pytest.fixture(autouse=True)
def _few_canaries(monkeypatch):
    """Runs in which each step is seen take a tenth of the time; the power is still stated.

    The Gaussian attack notices noise x 0.9 with probability 0.998, clip norm x 1.2 always; the
    noise attack notices noise x 0.95 with probability 0.99.
    """
    monkeypatch.setattr(attacks, "_CANARIES", 100)


@pytest.fixture
def many_canaries(monkeypatch, _few_canaries):
    """As many as users of the library have."""
    monkeypatch.setattr(attacks, "_CANARIES", MANY_CANARIES)


@pytest.fixture(autouse=True)
def _one_epsilon(monkeypatch):
    """Computes the claim, which all mechanisms here share, only once."""

    def epsilon(self, delta, *, num_steps=None):
        key = (self.event, delta)
        if key not in CLAIMED:
            CLAIMED[key] = self.guarantee(delta, num_steps=num_steps).epsilon
        return CLAIMED[key]

    monkeypatch.setattr(Mechanism, "epsilon", epsilon)


@functools.cache
def honest(algorithm):
    """All attacks; the test asks for `many_canaries`."""
    return auditing.audit(made(), algorithms=[algorithm], num_runs=100, seed=3)


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda a: a.value)
class TestAlgorithms:
    @pytest.mark.usefixtures("many_canaries")
    def test_an_honest_run_is_not_refuted(self, algorithm):
        found = honest(algorithm)
        expected = [a for a in Attack if algorithm is not FEDERATED or a is not Attack.PAIRED]
        assert [result.attack for result in found] == expected
        for result in found:
            assert result.lower_bound <= result.reported
            assert result.confidence == pytest.approx(1 - 0.05 / len(expected))
            assert result.problems == ()
            # None is idle: each would notice something, and three prove nearly all that is claimed.
            assert result.notices
            if result.measure != "epsilon":
                assert result.lower_bound > 0.95 * result.reported

    def test_noise_off(self, algorithm):
        on_the_whole = [Attack.ONE_RUN, Attack.PAIRED]
        found = auditing.audit(
            made(NoiseOff), algorithms=[algorithm], attacks=on_the_whole, num_runs=50, seed=3
        )
        assert all(result.refuted for result in found)

    def test_noise_halved(self, algorithm):
        (found,) = auditing.audit(
            made(with_noise(0.5)), algorithms=[algorithm], attacks=[Attack.GAUSSIAN], seed=3
        )
        assert found.measure == "mu"
        assert found.refuted

    def test_noise_a_tenth_less(self, algorithm):
        (found,) = auditing.audit(
            made(with_noise(0.9)), algorithms=[algorithm], attacks=[Attack.GAUSSIAN], seed=3
        )
        assert found.refuted

    def test_clip_a_fifth_more(self, algorithm, monkeypatch):
        if algorithm is FEDERATED:
            more = functools.partial(clips_at, 1.2, federated.clip_delta)
            monkeypatch.setattr(federated, "clip_delta", more)
        (found,) = auditing.audit(
            made(with_clip(1.2)), algorithms=[algorithm], attacks=[Attack.GAUSSIAN], seed=3
        )
        assert found.refuted

    def test_clipping_left_out(self, algorithm, monkeypatch):
        if algorithm is FEDERATED:
            monkeypatch.setattr(federated, "clip_delta", unclipped)
        found = auditing.audit(
            made(ClippingOff),
            algorithms=[algorithm],
            attacks=[Attack.ONE_RUN, Attack.PAIRED, Attack.GAUSSIAN],
            num_runs=50,
            seed=3,
        )
        assert all(result.refuted for result in found)


def dp_sgd(mechanism, *attacks, seed=3, **options):
    return auditing.audit(
        mechanism, algorithms=[Algorithm.DP_SGD], attacks=attacks, seed=seed, **options
    )


class TestDefaultAudit:
    """All attacks together, at a noise multiplier at which the first two have no power.

    The Gaussian attack has a fifth of the error, and notices noise x 0.9 with probability 0.98.
    """

    @pytest.mark.parametrize(
        ("kind", "attack"),
        [
            (with_noise(0.9), "gaussian"),
            (with_clip(1.2), "gaussian"),
            (NoiseReused, "noise"),
        ],
        ids=["noise x 0.9", "clip x 1.2", "noise reused"],
    )
    def test_finds(self, kind, attack):
        found = dp_sgd(made(kind, sampling=FEW), *Attack, num_runs=20)
        assert attack in [result.attack.value for result in found if result.refuted]


class TestNoise:
    """Findings of the attack on the noise alone."""

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            (NoiseReused, "not independent in 2450 pairs of steps, such as 0 and 1"),
            (NoiseNotProportional, "what is stated at noise multiplier 0.32"),
            (NoiseOff, "there is at most"),
            (altered(without_one_coordinate), "1 of 100 coordinates have less noise than others"),
            (altered(without_one_leaf), "50 of 100 coordinates have less noise than others"),
            (altered(same_in_both_leaves), "in 50 pairs of coordinates, such as 0 and 50"),
            (altered(one_number_for_all), "noise is not independent in"),
            (altered(cut_off), "too short tails at noise multiplier 3"),
            (altered(uniform), "not of Gaussian shape at noise multiplier 3"),
        ],
    )
    def test_finds(self, kind, problem):
        (found,) = dp_sgd(made(kind), Attack.NOISE)
        assert any(problem in text for text in found.problems), found.problems
        assert found.refuted

    def test_a_wrong_clip_norm_is_none_of_its_business(self):
        assert not dp_sgd(made(with_clip(5.0)), Attack.NOISE)[0].refuted

    def test_too_little_noise_is_not_taken_for_repeated_noise(self):
        (found,) = dp_sgd(made(with_noise(0.5)), Attack.NOISE)
        assert found.lower_bound == pytest.approx(2 * found.reported, rel=0.05)
        (problem,) = found.problems
        assert "noise is at most 0.5" in problem

    def test_noise_of_two_runs_is_compared(self, monkeypatch):
        """Runs of different noise multipliers begin with the same key."""
        right = engine.randomness
        monkeypatch.setattr(engine, "randomness", lambda seed, **options: right(1, **options))
        (found,) = dp_sgd(made(), Attack.NOISE)
        assert "in 50 pairs of steps, such as 0 and 50" in found.problems[0]

    @pytest.mark.parametrize("sigma", [0.1, 3.0, 300.0])
    def test_any_noise_multiplier(self, sigma):
        assert not dp_sgd(made(noise_multiplier=sigma), Attack.NOISE)[0].refuted
        (found,) = dp_sgd(made(with_noise(0.95), noise_multiplier=sigma), Attack.NOISE)
        assert found.lower_bound > found.reported


def clips_leaves(loss_fn, *, l2_clip_norm, **options):
    """Clips each of the two leaves to C, so that together they reach √2 C."""
    parts = {
        name: mirrordp.clipped_grad(
            loss_fn, l2_clip_norm=l2_clip_norm, trainable={**NONE, name: True}, **options
        )
        for name in NONE
    }

    def exact_sum(params, batch, is_padding, *, keys=None):
        found = {
            name: part.with_stats(params, batch, is_padding, keys=keys)
            for name, part in parts.items()
        }
        total = {name: total[name] for name, (total, _) in found.items()}
        return ExactSum.of(total, l2_clip_norm), found["first"][1]

    return dataclasses.replace(parts["first"], exact_sum=exact_sum)


NONE = {"first": False, "second": False}


class ClipsLeaves(Mechanism):
    def clipped_grad(self, loss_fn, *, trainable=None, **options):
        return clips_leaves(loss_fn, l2_clip_norm=self.l2_clip_norm, **options)


@pytest.mark.usefixtures("many_canaries")
def test_gaussian_attack_finds_leaves_that_are_clipped_one_by_one():
    (found,) = dp_sgd(made(ClipsLeaves), Attack.GAUSSIAN)
    assert found.lower_bound == pytest.approx(2**0.5 / 0.32, rel=0.1)


class TestPower:
    """A deviation of exactly the stated size is noticed in 19 of 20 cases, a third of it is not."""

    @staticmethod
    def times_noticed(mechanism, attack, runs, **options):
        return sum(
            dp_sgd(mechanism, attack, seed=seed, **options)[0].refuted for seed in range(runs)
        )

    @pytest.mark.usefixtures("many_canaries")
    def test_small_deviations_of_parts_and_large_ones_of_the_whole(self):
        one_run, paired, gaussian, noise, sampling = (a.notices for a in honest(Algorithm.DP_SGD))
        assert 0.05 < one_run["noise"] < 0.2
        assert 0.05 < paired["noise"] < 0.2
        assert 0.95 < gaussian["noise"] < noise["noise"] < 1
        assert 1 < gaussian["clip"] < 1.05
        assert 1 < sampling["q"] < 1.05

    @pytest.mark.parametrize(
        ("attack", "deviation", "deviating"),
        [
            (Attack.GAUSSIAN, "noise", with_noise),
            (Attack.GAUSSIAN, "clip", with_clip),
            (Attack.NOISE, "noise", with_noise),
        ],
    )
    def test_stated_deviation_is_noticed(self, attack, deviation, deviating):
        (result,) = dp_sgd(made(), attack)
        factor = result.notices[deviation]
        assert 0.9 < factor < 1.1
        assert self.times_noticed(made(deviating(factor)), attack, 20) >= 17
        a_third = 1 + (factor - 1) / 3
        assert self.times_noticed(made(deviating(a_third)), attack, 10) <= 7

    def test_stated_frequency_is_noticed(self):
        (result,) = dp_sgd(made(sampling=FEW), Attack.SAMPLING)
        factor = result.notices["q"]
        assert 1 < factor < 1.1

        def times_noticed(factor, runs):
            sampling = DrawsMore(**dataclasses.asdict(FEW), factor=factor)
            return self.times_noticed(made(sampling=sampling), Attack.SAMPLING, runs)

        assert times_noticed(factor, 20) >= 17
        assert times_noticed(1.0, 10) <= 2

    @pytest.mark.usefixtures("many_canaries")
    def test_stated_correlation_is_noticed(self):
        """The later of two steps has a share of the noise of the earlier."""
        noise_attack = honest(Algorithm.DP_SGD)[3]
        correlation = noise_attack.notices["correlation"]
        share = (1 - noise_attack.confidence) / 10
        rng = np.random.default_rng(0)
        noticed = 0
        for _ in range(40):
            noise = rng.normal(size=(100, 400))
            noise[60] = correlation * noise[7] + (1 - correlation**2) ** 0.5 * noise[60]
            noticed += (7, 60) in auditing.repeated_noise(noise, 1.0, significance=share)
        assert noticed >= 0.85 * 40

    @pytest.mark.usefixtures("many_canaries")
    def test_attacks_on_the_whole_notice_little(self):
        """The factor that one run states is tried on scores of its own."""
        one_run = honest(Algorithm.DP_SGD)[0]
        mechanism = made(with_noise(one_run.notices["noise"]))
        options = {"confidence": one_run.confidence}
        assert self.times_noticed(mechanism, Attack.ONE_RUN, 20, **options) >= 17

    def test_no_power_is_said(self):
        few = mirrordp.PoissonSampling.for_batch_size(2, num_examples=30)
        (found,) = dp_sgd(made(sampling=few, num_steps=2), Attack.ONE_RUN)
        assert found.notices == {}


class TestStatistics:
    """Each bound is tried on mechanisms whose ε or μ is known."""

    def test_one_run_on_randomised_response(self):
        """A guess that is right with probability e^ε / (1 + e^ε) is ε-private, and no less."""
        rng = np.random.default_rng(0)
        included = rng.random(3000) < 0.5
        right = rng.random(3000) < np.e / (1 + np.e)
        scores = np.where(right == included, 1.0, 0.0)
        bound = auditing.one_run_epsilon(scores, included, delta=1e-9, significance=0.05)
        assert 0.7 < bound < 1.0
        assert auditing.one_run_epsilon(scores, included, delta=1e-9, significance=1e-6) < bound

    def test_one_run_on_pure_guessing(self):
        rng = np.random.default_rng(0)
        included = rng.random(500) < 0.5
        bound = auditing.one_run_epsilon(
            rng.normal(size=500), included, delta=1e-6, significance=0.01
        )
        assert bound < 0.2

    def test_ties_prove_nothing(self):
        included = np.arange(300) % 2 == 0
        bound = auditing.one_run_epsilon(np.zeros(300), included, delta=1e-6, significance=0.05)
        assert bound < 0.2

    def test_paired_bound_of_a_gaussian(self):
        rng = np.random.default_rng(0)
        found = auditing.paired_epsilon(
            rng.normal(1.0, 1, 4000), rng.normal(0, 1, 4000),
            threshold=0.5, delta=0.0, significance=0.05,
        )  # fmt: skip
        at_threshold = np.log(stats.norm.sf(-0.5) / stats.norm.sf(0.5))
        assert 0.8 * at_threshold < found < at_threshold

    @pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
    def test_mu_of_a_gaussian(self, mu):
        rng = np.random.default_rng(0)
        with_canary, without = rng.normal(mu, 1, 3000), rng.normal(0, 1, 3000)
        found = auditing.gaussian_mu(with_canary, without, threshold=mu / 2, significance=0.01)
        assert mu - 0.3 < found < mu
        assert auditing.gaussian_mu(without, with_canary, threshold=mu / 2, significance=0.01) == 0

    def test_bounds_hold_as_often_as_they_say(self):
        rng = np.random.default_rng(1)
        wrong = sum(
            auditing.gaussian_mu(
                rng.normal(1, 1, 100), rng.normal(0, 1, 100), threshold=0.5, significance=0.2
            )
            > 1
            for _ in range(500)
        )
        assert wrong <= 0.2 * 500

    def test_one_run_holds_as_often_as_it_says(self):
        """No valid bound passes the ε of the mechanism more often than agreed."""
        rng = np.random.default_rng(2)
        wrong = 0
        for _ in range(300):
            included = rng.random(90) < 0.5
            right = rng.random(90) < np.e / (1 + np.e)
            scores = np.where(right == included, 1.0, 0.0) + 1e-3 * rng.random(90)
            wrong += auditing.one_run_epsilon(scores, included, delta=1e-9, significance=0.2) > 1
        assert 0 < wrong <= 0.2 * 300

    def test_paired_holds_as_often_as_it_says(self):
        """Both rates of randomised response at ε = 1 are at the limit."""
        rng = np.random.default_rng(2)
        wrong = 0
        for _ in range(500):
            alarms, hits = rng.random(100) < 1 / (1 + np.e), rng.random(100) < np.e / (1 + np.e)
            wrong += (
                auditing.paired_epsilon(
                    hits.astype(float), alarms.astype(float),
                    threshold=0.5, delta=0.0, significance=0.4,
                )
                > 1
            )  # fmt: skip
        assert wrong <= 0.4 * 500

    def test_low_confidence(self):
        """The statistics accept errors below one half only."""
        (found,) = auditing.audit(
            made(num_steps=1), algorithms=[Algorithm.DP_SGD], attacks=[Attack.PAIRED],
            confidence=0.3, num_runs=20, seed=1,
        )  # fmt: skip
        assert found.confidence >= 0.3

    def test_shapes(self):
        with pytest.raises(ValueError, match="one entry per canary"):
            auditing.one_run_epsilon(np.zeros(3), np.zeros(4, bool), delta=1e-5, significance=0.05)


class TestRefused:
    def test_the_command_can_choose_any_algorithm(self, capsys):
        for algorithm in Algorithm:
            arguments = ["audit", "--algorithm", algorithm.value, "--canaries", "3"]
            assert cli.main(arguments) == 2
            assert "expected --canaries of at least 30" in capsys.readouterr().err
        arguments = ["audit", "--algorithm", "federated-pda-dpmd", "--attack", "paired"]
        assert cli.main(arguments) == 2
        assert "--attack one-run, gaussian, noise or sampling for" in capsys.readouterr().err
        assert cli.main(["audit", "--attack", "sampling", "--sampling-prob", "1"]) == 2
        assert "--sampling-prob below 1" in capsys.readouterr().err

    def test_sampling_of_everybody(self):
        with pytest.raises(ValueError, match="needs a sampling probability below 1"):
            auditing.audit(
                made(sampling=mirrordp.privacy.FullBatch.of(CANARIES)), attacks=[Attack.SAMPLING]
            )

    def test_a_paired_attack_on_federated_runs(self):
        with pytest.raises(ValueError, match="federated algorithm has no paired attack"):
            auditing.audit(made(), algorithms=[FEDERATED], attacks=[Attack.PAIRED])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"noise_multiplier": 0.0}, "noise_multiplier must be a positive"),
            ({"noise": mirrordp.SecureGaussianNoise(num_params=9)}, "noise must be GaussianNoise"),
            (
                {
                    "sampling": mirrordp.PoissonSampling(
                        sampling_prob=0.25, expected_batch_size=60.0
                    )
                },
                "public number of rows",
            ),
        ],
    )
    def test_mechanisms_that_cannot_be_audited(self, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            auditing.audit(made(**options), attacks=[Attack.GAUSSIAN])


def scaled_loss(params, example):
    """Is cubic in the row: gradients have every size, and NaN and infinity if the row has them."""
    return jnp.dot(params["w"], example["x"]) ** 3 + params["b"] * example["y"]


def dropout_loss(params, example, key):
    keep = jax.random.bernoulli(key, 0.5, example["x"].shape)
    return jnp.sum(params["w"] * keep * example["x"]) + params["b"] * example["y"]


ROWS = {"x": tools.features(16), "y": np.arange(16, dtype=np.int32) % 3}
PARAMS = {"w": jnp.ones(3), "b": jnp.zeros([])}


def step(loss=scaled_loss, kind=Mechanism, step_kind=TrainStep, **options):
    mechanism = kind(**(
        {"sampling": tools.poisson(4, rows=16), "l2_clip_norm": 0.7, "noise_multiplier": 1.0,
         "num_steps": 5} | options
    ))  # fmt: skip
    return step_kind(loss_fn=loss, mechanism=mechanism, optimizer=optax.sgd(0.1))


class TestReplay:
    @pytest.mark.parametrize("loss", [scaled_loss, dropout_loss])
    def test_no_neighbour_is_further_than_the_clip_norm(self, loss):
        found = auditing.neighbour_replay(step(loss), PARAMS, ROWS)
        assert found.allowed == 0.7
        assert not found.exceeded()
        assert found.largest > 0.69  # the search does find rows that are clipped
        assert found.num_pairs == 200

    def test_replace(self):
        found = auditing.neighbour_replay(step(adjacency=Adjacency.REPLACE), PARAMS, ROWS)
        assert found.allowed == 1.4
        assert found.largest > 1.3
        assert not found.exceeded()

    def test_the_public_gradient_cancels(self):
        public = {"x": tools.features(5, seed=2), "y": np.zeros(5, np.int32)}
        found = auditing.neighbour_replay(step(), PARAMS, ROWS, public=public, alpha=0.25)
        assert found.largest > 0.69
        assert not found.exceeded()

    def test_a_secure_mechanism_is_replayed_without_its_noise(self):
        secure = mirrordp.SecureGaussianNoise(num_params=4)
        assert not auditing.neighbour_replay(
            step(noise=secure), PARAMS, ROWS, num_pairs=20
        ).exceeded()

    def test_one_row(self):
        with pytest.raises(ValueError, match="at least two rows, got 1"):
            auditing.neighbour_replay(
                step(), PARAMS, {"x": tools.features(1), "y": np.zeros(1, np.int32)}
            )


class TestCommand:
    @pytest.mark.usefixtures("many_canaries")
    def test_honest(self, capsys):
        options = ["--algorithm", "dp-sgd", "--attack", "gaussian", "--seed", "1"]
        code = cli.main(["audit", "--canaries", "60", *options])
        assert code == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "dp-sgd gaussian mu 3.125" in out
        assert "noise x 0.96, clip norm x 1.05 A claim" in out
        assert "The lower bound holds with confidence 0.95." in out
        assert (
            "With probability 95% or more this audit would have noticed, in any algorithm above: "
            "noise below 0.96 of what is stated; a clip norm above 1.05 of what is stated." in out
        )
        assert "runs at a noise multiplier of its own, 0.32" in out
        assert "REFUTED" not in out
        assert "No claim was refuted" in out

    def test_all_attacks_on_one_algorithm(self, capsys):
        options = ["--algorithm", "federated-pda-dpmd", "--seed", "1"]
        assert cli.main(["audit", "--canaries", "60", *options]) == 0
        out = " ".join(capsys.readouterr().out.split())
        for attack in ("one-run epsilon", "gaussian mu", "noise mu 0.3334", "sampling q 0.25"):
            assert f"federated-pda-dpmd {attack}" in out
        assert "All 4 lower bounds hold together with confidence 0.95; epsilon is at delta" in out
        assert "a sampling probability above 1.0" in out
        assert "two steps with noise correlated above 0." in out

    def test_a_bound_reads_no_larger_than_it_is(self, capsys, monkeypatch):
        def audit(mechanism, **options):
            return [auditing.Audit(Algorithm.EXACT, Attack.ONE_RUN, "epsilon", 1.23412, 1.2349, 0.9,
                                   1e-5)]  # fmt: skip

        monkeypatch.setattr(auditing, "audit", audit)
        assert cli.main(["audit"]) == 1
        assert "   1.235     1.234  REFUTED" in capsys.readouterr().out

    def test_refuted(self, capsys, monkeypatch):
        def audit(mechanism, **options):
            return [
                auditing.Audit(Algorithm.EXACT, Attack.ONE_RUN, "epsilon", 1.0, 2.0, 0.99, 1e-5)
            ]

        monkeypatch.setattr(auditing, "audit", audit)
        assert cli.main(["audit"]) == 1
        assert "REFUTED" in capsys.readouterr().out
        assert cli.main(["audit", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["refuted"] is True
        assert found["audits"][0]["algorithm"] == "exact-pda-dpmd"
        assert found["audits"][0]["problems"] == []
        assert found["power"] == 0.95

    def test_problems_are_printed_below(self, capsys, monkeypatch):
        def audit(mechanism, **options):
            return [
                auditing.Audit(
                    Algorithm.DP_SGD, Attack.NOISE, "mu", 0.3, math.inf, 0.95, 1e-5,
                    problems=("noise has too short tails",), notices={"noise": 0.97},
                )
            ]  # fmt: skip

        monkeypatch.setattr(auditing, "audit", audit)
        assert cli.main(["audit"]) == 1
        row, problem, *_ = capsys.readouterr().out.splitlines()[1:]
        assert row.split()[-2:] == ["infinite", "REFUTED"]
        assert problem.strip() == "noise has too short tails"

    def test_too_few_canaries(self, capsys):
        assert cli.main(["audit", "--canaries", "5"]) == 2
        assert "at least 30, got 5" in capsys.readouterr().err
