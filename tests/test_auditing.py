"""Audits: below the claim on honest runs, above it with the noise off; replays find leaks."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import mirrordp
from mirrordp import Adjacency, Mechanism, TrainStep, auditing, cli, federated
from mirrordp.auditing import Algorithm, Attack
from tests import tools

FEDERATED = Algorithm.FEDERATED

SIGMA, STEPS, CANARIES = 3.0, 16, 240
SAMPLING = mirrordp.PoissonSampling.for_batch_size(60, num_examples=CANARIES)


def made(kind=Mechanism, **options):
    defaults = {
        "sampling": SAMPLING,
        "l2_clip_norm": 1.0,
        "noise_multiplier": SIGMA,
        "num_steps": STEPS,
    }
    return kind(**(defaults | options))


class NoiseOff(Mechanism):
    def privatizer(self, key):
        return self.noise.privatizer(0.0, key)


class NoiseHalved(Mechanism):
    def privatizer(self, key):
        return self.noise.privatizer(self.noise_stddev / 2, key)


class ClippingOff(Mechanism):
    def clipped_grad(self, loss_fn, **options):
        return mirrordp.clipped_grad(loss_fn, l2_clip_norm=1e6, **options)


def unclipped(delta, l2_clip_norm):
    del l2_clip_norm
    return federated.ClippedDelta(delta, jnp.ones([]), jnp.ones([], bool))


CLAIMED = {}


@pytest.fixture(autouse=True)
def _one_epsilon(monkeypatch):
    """The claim is the same for all mechanisms here; its PLD is computed once."""

    def epsilon(self, delta, *, num_steps=None):
        key = (self.event, delta)
        if key not in CLAIMED:
            CLAIMED[key] = self.guarantee(delta, num_steps=num_steps).epsilon
        return CLAIMED[key]

    monkeypatch.setattr(Mechanism, "epsilon", epsilon)


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda a: a.value)
class TestAlgorithms:
    def test_an_honest_run_is_not_refuted(self, algorithm):
        found = auditing.audit(made(), algorithms=[algorithm], num_runs=100, seed=3)
        expected = [a for a in Attack if algorithm is not FEDERATED or a is not Attack.PAIRED]
        assert [result.attack for result in found] == expected
        for result in found:
            assert result.lower_bound <= result.reported
            assert result.confidence == pytest.approx(1 - 0.05 / len(expected))
        # The Gaussian attack is not idle: it proves about half of what is claimed.
        assert found[-1].lower_bound > 0.3 * found[-1].reported

    def test_noise_off(self, algorithm):
        attacks = [Attack.ONE_RUN, Attack.PAIRED]
        found = auditing.audit(
            made(NoiseOff), algorithms=[algorithm], attacks=attacks, num_runs=100, seed=3
        )
        assert all(result.refuted for result in found)

    def test_noise_halved(self, algorithm):
        (found,) = auditing.audit(
            made(NoiseHalved), algorithms=[algorithm], attacks=[Attack.GAUSSIAN], seed=3
        )
        assert found.measure == "mu"
        assert found.refuted

    def test_clipping_left_out(self, algorithm, monkeypatch):
        if algorithm is FEDERATED:
            monkeypatch.setattr(federated, "clip_delta", unclipped)
        found = auditing.audit(
            made(ClippingOff),
            algorithms=[algorithm],
            attacks=[Attack.ONE_RUN, Attack.PAIRED, Attack.GAUSSIAN],
            num_runs=100,
            seed=3,
        )
        assert all(result.refuted for result in found)


class TestStatistics:
    """Each bound on mechanisms whose ε or μ is known."""

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
        """Randomised response at ε = 1: both rates are at the limit."""
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
        """The statistics take errors below one half only."""
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
        assert "--attack one-run or gaussian for the federated" in capsys.readouterr().err

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
    """Cubic in the row: gradients of every size, and NaN and infinity where the row has them."""
    return jnp.dot(params["w"], example["x"]) ** 3 + params["b"] * example["y"]


def dropout_loss(params, example, key):
    import jax

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
    def test_honest(self, capsys):
        options = ["--algorithm", "dp-sgd", "--attack", "gaussian", "--seed", "1"]
        code = cli.main(["audit", "--canaries", "60", *options])
        assert code == 0
        out = capsys.readouterr().out
        assert len(out.splitlines()) == 4
        assert "dp-sgd" in out
        assert "REFUTED" not in out
        assert "No claim was refuted" in out

    def test_a_bound_reads_no_larger_than_it_is(self, capsys, monkeypatch):
        def audit(mechanism, **options):
            return [auditing.Audit(Algorithm.EXACT, Attack.ONE_RUN, "epsilon", 1.23412, 1.2349, 0.9,
                                   1e-5)]  # fmt: skip

        monkeypatch.setattr(auditing, "audit", audit)
        assert cli.main(["audit"]) == 1
        assert "    1.235     1.234  REFUTED" in capsys.readouterr().out

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

    def test_too_few_canaries(self, capsys):
        assert cli.main(["audit", "--canaries", "5"]) == 2
        assert "at least 30, got 5" in capsys.readouterr().err
