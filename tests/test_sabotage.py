"""The library broken in the usual ways: each is caught by a named check (docs/auditing.md).

Noise off and noise halved are in test_auditing.py, where the audits that find them are.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_batching import custom_vmap

import mirrordp
from mirrordp import Mechanism, PrivateData, PublicData, TrainStep, _books, auditing, training
from mirrordp import sampling as sampling_module
from mirrordp.auditing import Algorithm, Attack
from tests import tools
from tests.test_sampling import PoissonStatistics

ROWS = tools.features(16)
BATCH, CLIP = 4.0, 0.7


def step(kind=Mechanism, step_kind=TrainStep, sampling=None):
    return step_kind(
        loss_fn=tools.squared_distance,
        mechanism=kind(
            sampling=sampling or tools.poisson(BATCH, rows=16),
            l2_clip_norm=CLIP,
            noise_multiplier=1.0,
            num_steps=5,
        ),
        optimizer=optax.sgd(0.1),
    )


def replay(*args, **options):
    return auditing.neighbour_replay(step(*args), jnp.zeros(3), ROWS, num_pairs=60, **options)


class DividesByRealisedBatch(Mechanism):
    def clipped_grad(self, loss_fn, **options):
        right = super().clipped_grad(loss_fn, **options)

        def with_stats(params, batch, is_padding, *, keys=None):
            total, stats = right.with_stats(params, batch, is_padding, keys=keys)
            return total * BATCH / jnp.maximum(jnp.sum(~is_padding), 1), stats

        return dataclasses.replace(right, with_stats=with_stats)


class ForgetsToClip(Mechanism):
    def clipped_grad(self, loss_fn, **options):
        return mirrordp.clipped_grad(loss_fn, l2_clip_norm=1e6, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawsTwice(mirrordp.PoissonSampling):
    def batches(self, num_examples, num_steps, rng):
        return (np.append(draw, draw[:1]) for draw in super().batches(num_examples, num_steps, rng))


class CountsTheFirstTwice(TrainStep):
    def private_sum(self, params, batch, is_padding, keys):
        total, unprivatized = super().private_sum(params, batch, is_padding, keys)
        alone = is_padding | (jnp.arange(len(is_padding)) > 0)
        again, _ = super().private_sum(params, batch, alone, keys)
        return jax.tree.map(jnp.add, total, again), unprivatized


class Swapped(TrainStep):
    """Noise for the public rows, none for the private ones."""

    def __call__(self, state, batch, is_padding, public=None, **options):
        private = jax.tree.map(lambda leaf: leaf[: len(public)], batch)
        nobody = jnp.zeros(len(public), bool)
        return super().__call__(state, public, nobody, private, **options)


def test_replay_accepts_the_library():
    found = replay()
    assert found.largest > 0.99 * CLIP
    assert not found.exceeded()


def test_replay_finds_a_sum_divided_by_the_realised_batch():
    assert replay(DividesByRealisedBatch).exceeded(0.5)


def test_replay_finds_missing_clipping():
    assert replay(ForgetsToClip).exceeded(0.5)


@custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(axis_size, in_batched, x):
    """What batch normalisation would do, if a loss could see its batch."""
    del axis_size, in_batched
    return x - x.mean(axis=0, keepdims=True), True


def test_replay_finds_a_loss_that_sees_other_examples():
    def coupled(params, example):
        return jnp.sum(params * jax.lax.stop_gradient(centred(example)))

    broken = dataclasses.replace(step(), loss_fn=coupled)
    found = auditing.neighbour_replay(broken, jnp.zeros(3), ROWS, num_pairs=60)
    assert found.exceeded(0.5)


def test_replay_finds_an_example_counted_twice():
    assert replay(Mechanism, CountsTheFirstTwice).largest == pytest.approx(2 * CLIP, rel=1e-3)


def test_replay_finds_an_example_drawn_twice():
    sampling = DrawsTwice(sampling_prob=0.25, expected_batch_size=BATCH, num_examples=16)
    found = replay(Mechanism, TrainStep, sampling)
    assert found.largest == pytest.approx(2 * CLIP, rel=1e-3)


def test_replay_finds_public_and_private_swapped():
    public = tools.features(5, seed=3)
    assert not replay(public=public, alpha=0.5).exceeded()
    assert replay(Mechanism, Swapped, public=public, alpha=0.5).exceeded(0.5)


def test_types_refuse_public_and_private_swapped():
    with pytest.raises(TypeError, match="PrivateData"):
        mirrordp.train(
            tools.squared_distance,
            jnp.zeros(3),
            PublicData(ROWS),
            PrivateData(ROWS),
            mechanism=step().mechanism,
            optimizer=tools.sgd(0.1),
        )


def resumed(folder) -> np.ndarray:
    """The noisy sums of a run that was left after six of twelve steps and resumed."""
    x = tools.features(columns=60)
    options = {
        "mechanism": tools.mechanism(),
        "optimizer": tools.recorder(12),
        "seed": 5,
        "steps_per_call": 3,
    }

    def run(resume):
        return mirrordp.train(
            tools.squared_distance,
            jnp.zeros(60),
            PrivateData(x),
            checkpoint=mirrordp.Checkpoint(folder, resume=resume),
            **options,
        )

    first = run(resume=False)
    next(first), next(first)
    first.close()
    return 8.0 * tools.released_gradients(run(resume=True))


def test_repeated_noise_finds_a_noise_key_reused_on_resume(tmp_path, monkeypatch):
    stddev = tools.mechanism().noise_stddev
    honest = resumed(tmp_path / "honest")
    assert auditing.repeated_noise(honest, stddev) == []
    right = _books.restored

    def forgets_the_noise(saved, like):
        state, kept = right(saved, like)
        return state._replace(noise_state=like.noise_state), kept

    monkeypatch.setattr(_books, "restored", forgets_the_noise)
    broken = resumed(tmp_path / "broken")
    np.testing.assert_array_equal(broken[:6], honest[:6])
    assert auditing.repeated_noise(broken, stddev) == [(k, k + 6) for k in range(6)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledEpochs(mirrordp.PoissonSampling):
    """What most loaders do: each record once per epoch, in batches of one size."""

    def batches(self, num_examples, num_steps, rng):
        size = round(self.expected_batch_size)
        order = np.zeros(0, int)
        for _ in range(num_steps):
            if len(order) < size:
                order = rng.permutation(num_examples)
            yield order[:size]
            order = order[size:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawsMore(mirrordp.PoissonSampling):
    """With a probability a fifth above the stated one."""

    def batches(self, num_examples, num_steps, rng):
        honest = mirrordp.PoissonSampling(
            sampling_prob=1.2 * self.sampling_prob, expected_batch_size=self.expected_batch_size
        )
        return honest.batches(num_examples, num_steps, rng)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBatch(mirrordp.PoissonSampling):
    """The first draw again and again."""

    def batches(self, num_examples, num_steps, rng):
        draw = next(iter(super().batches(num_examples, num_steps, rng)))
        return (draw for _ in range(num_steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatsOne(mirrordp.PoissonSampling):
    """One draw of the run comes back later."""

    def batches(self, num_examples, num_steps, rng):
        draws = list(super().batches(num_examples, num_steps, rng))
        return iter([*draws[:-1], draws[num_steps // 3]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstRowAlways(mirrordp.PoissonSampling):
    def batches(self, num_examples, num_steps, rng):
        return (np.union1d(draw, [0]) for draw in super().batches(num_examples, num_steps, rng))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InPairs(mirrordp.PoissonSampling):
    """Records 2k and 2k + 1 share a coin."""

    def batches(self, num_examples, num_steps, rng):
        half = super().batches(num_examples // 2, num_steps, rng)
        return (np.concatenate([2 * draw, 2 * draw + 1]) for draw in half)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSize(mirrordp.PoissonSampling):
    def batches(self, num_examples, num_steps, rng):
        size = round(self.expected_batch_size)
        return (rng.permutation(num_examples)[:size] for _ in range(num_steps))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (DrawsMore, "of all steps instead of 0.25"),
        (ShuffledEpochs, "records differ in how often they joined by too much or too little"),
        (OneBatch, "records of a step joined the next one with frequency 1 instead of 0.25"),
        (RepeatsOne, "steps 66 and 199 have"),
        (FirstRowAlways, "record 0 joined 200 of 200 steps"),
        (InPairs, "participations in common"),
        (FixedSize, "batches differ in size by too much or too little"),
        (DrawsTwice, "a record counted more than once in a step"),
    ],
)
def test_sampling_attack_finds_batches_that_are_not_poisson(kind, problem):
    """From what is released, not from what the sampler says."""
    sampling = kind(sampling_prob=0.25, expected_batch_size=30.0, num_examples=120)
    (found,) = auditing.audit(
        tools.mechanism(sampling=sampling), algorithms=[Algorithm.DP_SGD],
        attacks=[Attack.SAMPLING], seed=1,
    )  # fmt: skip
    assert found.refuted
    assert any(problem in text for text in found.problems), found.problems


def test_sampling_attack_finds_rows_that_are_left_out_of_a_large_batch(monkeypatch):
    """The end of a draw above the capacity, which takes passes of its own, is dropped."""
    monkeypatch.setattr(
        training, "passes", lambda draw, size: sampling_module.passes(draw, size)[:1]
    )
    sampling = tools.poisson(30, rows=120, capacity=32)
    (found,) = auditing.audit(
        tools.mechanism(sampling=sampling), algorithms=[Algorithm.DP_SGD],
        attacks=[Attack.SAMPLING], seed=1,
    )  # fmt: skip
    assert found.refuted


def test_sampler_statistics_find_sampling_that_is_not_poisson():
    for kind, expected in ((mirrordp.PoissonSampling, True), (ShuffledEpochs, False)):
        sampling = kind(sampling_prob=0.1, expected_batch_size=20.0, num_examples=200)
        mechanism = tools.mechanism(sampling=sampling, num_steps=1000)
        table = np.zeros((1000, 200), bool)
        for row, draw in zip(table, mechanism.batches(200, np.random.default_rng(0)), strict=True):
            row[draw] = True
        assert PoissonStatistics(table, 0.1).all() is expected


def test_attacks_on_the_whole_do_not_see_sampling_that_is_not_poisson():
    """Not a wish: a reminder that an attack which finds nothing has proved nothing."""
    mechanism = tools.mechanism(
        sampling=ShuffledEpochs(sampling_prob=0.25, expected_batch_size=15.0, num_examples=60)
    )
    found = auditing.audit(
        mechanism,
        algorithms=[Algorithm.DP_SGD],
        attacks=[Attack.ONE_RUN, Attack.PAIRED, Attack.GAUSSIAN, Attack.NOISE],
        num_runs=50,
        seed=1,
    )
    assert not any(result.refuted for result in found)
