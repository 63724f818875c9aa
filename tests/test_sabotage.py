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
from mirrordp import (
    Mechanism,
    PrivateData,
    PublicData,
    TrainStep,
    _books,
    _isolation,
    auditing,
    training,
)
from mirrordp.auditing import Algorithm, Attack
from mirrordp.report import NOT_FOR_RELEASE
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


def coupled(params, example):
    return jnp.sum(params * jax.lax.stop_gradient(centred(example)))


def shared_bits(params, example):
    """Mapped over, keys of this kind draw the bits of all examples from one example's key."""
    own = jax.lax.bitcast_convert_type(jnp.tile(example[:2], 2), jnp.uint32)
    key = jax.random.wrap_key_data(own, impl="rbg")
    return jnp.sum(params * jax.random.normal(key, params.shape))


def test_a_loss_that_sees_other_examples_is_refused():
    """Two ways that get round `vmap`; see test_isolation.py for all."""
    for loss in (coupled, shared_bits):
        broken = dataclasses.replace(step(), loss_fn=loss)
        with pytest.raises(ValueError, match="must compute each record by itself"):
            auditing.neighbour_replay(broken, jnp.zeros(3), ROWS, num_pairs=60)


@pytest.mark.parametrize("loss", [coupled, shared_bits])
def test_replay_finds_a_loss_that_sees_other_examples(loss, monkeypatch):
    """As it would be, if the traced program were not looked at."""
    monkeypatch.setattr(_isolation, "check", lambda name, program: None)
    broken = dataclasses.replace(step(), loss_fn=loss)
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


def test_a_seeded_run_cannot_be_reported_as_unseeded():
    def report(seed, **options):
        made = tools.mechanism()
        _, info = tools.last(
            mirrordp.train(
                tools.squared_distance, jnp.zeros(3), PrivateData(ROWS),
                mechanism=dataclasses.replace(made, sampling=tools.poisson(BATCH, rows=16)),
                optimizer=tools.sgd(0.1), seed=seed,
            )
        )  # fmt: skip
        return mirrordp.RunReport.of(made, 1e-5, info=info, **options)

    assert report(7).seeded is True
    assert NOT_FOR_RELEASE in report(7).privacy_card()
    with pytest.raises(ValueError, match="says that it was given a seed"):
        report(7, seeded=False)
    assert report(None).seeded is False
    assert NOT_FOR_RELEASE not in report(None).privacy_card()


def resumed_with(folder, first, second) -> np.ndarray:
    """Two releases of step 1: of a run with one backward rule, and of its replay with another."""

    def run(factor, resume):
        flipped = jax.custom_vjp(lambda theta: theta)
        flipped.defvjp(lambda theta: (theta, None), lambda _, g: (factor * g,))
        return mirrordp.train(
            lambda theta, row: tools.squared_distance(flipped(theta), row),
            jnp.zeros(60),
            PrivateData(tools.features(columns=60)),
            mechanism=tools.mechanism(),
            optimizer=tools.recorder(12),
            seed=5,
            steps_per_call=1,
            checkpoint=mirrordp.Checkpoint(folder, every=5, resume=resume),
        )

    released = []
    for factor, resume in ((first, False), (second, True)):
        steps = run(factor, resume)
        state, _ = next(steps)
        released.append(8.0 * np.asarray(state.opt_state[1][0]))
        steps.close()
    return np.stack(released)


def test_a_run_resumed_with_another_gradient_is_refused(tmp_path, monkeypatch):
    np.testing.assert_array_equal(*resumed_with(tmp_path / "honest", 1.0, 1.0))
    with pytest.raises(mirrordp.checkpoint.CheckpointError, match="differs in: loss_fn"):
        resumed_with(tmp_path / "refused", 1.0, -1.0)
    # As it would be, if gradients were not compared: half the sum of the two is the noise alone.
    monkeypatch.setattr(training, "described_loss", lambda *_: "")
    released = resumed_with(tmp_path / "broken", 1.0, -1.0)
    assert auditing.repeated_noise(released, tools.mechanism().noise_stddev) == [(0, 1)]


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


def test_sampler_statistics_find_sampling_that_is_not_poisson():
    for kind, expected in ((mirrordp.PoissonSampling, True), (ShuffledEpochs, False)):
        sampling = kind(sampling_prob=0.1, expected_batch_size=20.0, num_examples=200)
        mechanism = tools.mechanism(sampling=sampling, num_steps=1000)
        table = np.zeros((1000, 200), bool)
        for row, draw in zip(table, mechanism.batches(200, np.random.default_rng(0)), strict=True):
            row[draw] = True
        assert PoissonStatistics(table, 0.1).all() is expected


def test_an_audit_does_not_see_sampling_that_is_not_poisson():
    """Not a wish: a reminder that an audit which finds nothing has proved nothing."""
    mechanism = tools.mechanism(
        sampling=ShuffledEpochs(sampling_prob=0.25, expected_batch_size=15.0, num_examples=60)
    )
    (found,) = auditing.audit(
        mechanism, algorithms=[Algorithm.DP_SGD], attacks=[Attack.ONE_RUN], seed=1
    )
    assert not found.refuted
