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
from mirrordp import Mechanism, PrivateData, PublicData, TrainStep, auditing
from mirrordp.auditing import Algorithm, Attack
from mirrordp.privacy import _isolation, sampling as sampling_module
from mirrordp.privacy.sums import ExactSum
from mirrordp.report import NOT_FOR_RELEASE
from mirrordp.training import bookkeeping, engine, federated
from mirrordp.training.federated import FederatedStep
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

        def exact_sum(params, batch, is_padding, *, keys=None):
            total, stats = right.exact_sum(params, batch, is_padding, keys=keys)
            share = BATCH / jnp.maximum(jnp.sum(~is_padding), 1)
            return ExactSum.of(total.floats() * share, CLIP), stats

        return dataclasses.replace(right, exact_sum=exact_sum)


class ForgetsToClip(Mechanism):
    def clipped_grad(self, loss_fn, **options):
        return mirrordp.clipped_grad(loss_fn, l2_clip_norm=1e6, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawsTwice(mirrordp.PoissonSampling):
    def batches(self, num_examples, num_steps, rng):
        return (np.append(draw, draw[:1]) for draw in super().batches(num_examples, num_steps, rng))


class CountsTheFirstTwice(TrainStep):
    def private_sum(self, state, batch, is_padding, keys):
        found = super().private_sum(state, batch, is_padding, keys)
        alone = is_padding | (jnp.arange(len(is_padding)) > 0)
        return found + super().private_sum(state, batch, alone, keys)


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


def fit(params, example):
    """A squared error: rows that are large enough overflow on the second local batch."""
    return 0.5 * (jnp.dot(params["w"], example["x"]) + params["b"] - example["y"]) ** 2


def users(count=12, columns=3):
    rng = np.random.default_rng(0)
    tables = [
        {"x": rng.normal(size=(n, columns)).astype(np.float32), "y": np.ones(n, np.float32)}
        for n in rng.integers(0, 7, count)
    ]
    return mirrordp.PrivateClients.from_users(tables, max_examples_per_user=6)


def replay_users(step_kind=FederatedStep, columns=3, replayed=None, **options):
    mechanism = Mechanism(
        sampling=tools.poisson(BATCH, rows=12), l2_clip_norm=CLIP, noise_multiplier=1.0,
        num_steps=5, unit="user",
    )  # fmt: skip
    federated_step = step_kind(
        loss_fn=fit, mechanism=mechanism, optimizer=mirrordp.training.federated.server_sgd(1.0),
        client_learning_rate=0.5, client_batch_size=2, **options,
    )  # fmt: skip
    params = {"w": jnp.full(columns, 0.1), "b": jnp.zeros([])}
    return auditing.neighbour_replay(
        federated_step, params, users(columns=columns), **({"num_pairs": 80} | (replayed or {}))
    )


@pytest.mark.parametrize(
    ("options", "replayed"),
    [
        ({}, {}),
        ({"adaptive_clip": mirrordp.training.AdaptiveClip(budget_share=0.2)}, {}),
        ({"local_epochs": 2}, {}),
        ({}, {"public": {"x": tools.features(5), "y": np.zeros(5, np.float32)}, "alpha": 0.25}),
    ],
)
def test_replay_accepts_federated_rounds(options, replayed):
    found = replay_users(**options, replayed=replayed)
    assert found.allowed == CLIP
    assert found.largest > 0.99 * CLIP
    assert not found.exceeded()
    assert "users in the batch" in found.description


def test_replay_of_users_whose_data_may_be_replaced():
    found = auditing.neighbour_replay(
        FederatedStep(
            loss_fn=fit,
            mechanism=Mechanism(
                sampling=tools.poisson(BATCH, rows=12), l2_clip_norm=CLIP, noise_multiplier=1.0,
                num_steps=5, unit="user", adjacency=mirrordp.Adjacency.REPLACE,
            ),
            optimizer=mirrordp.training.federated.server_sgd(1.0), client_learning_rate=0.5,
        ),
        {"w": jnp.full(3, 0.1), "b": jnp.zeros([])},
        users(),
    )  # fmt: skip
    assert found.allowed == 2 * CLIP
    assert found.largest > 1.5 * CLIP
    assert not found.exceeded()


def test_replay_finds_a_user_who_turns_the_sum_into_nan(monkeypatch):
    """What is not finite has weight zero, and is added as it is."""
    monkeypatch.setattr(
        federated, "scaled", lambda array, weights: jnp.where(weights > 0, weights, 1) * array
    )
    assert replay_users().exceeded()


def test_replay_accepts_users_of_large_models():
    """A maximum over many numbers may drop a NaN; so the smallest model shows nothing."""

    def fit_slope(params, example):
        return 0.5 * (jnp.dot(params, example["x"]) - example["y"]) ** 2

    federated_step = FederatedStep(
        loss_fn=fit_slope, mechanism=dataclasses.replace(step().mechanism, unit="user"),
        optimizer=mirrordp.training.federated.server_sgd(1.0), client_learning_rate=0.5,
    )  # fmt: skip
    found = auditing.neighbour_replay(
        federated_step, jnp.full(100_000, 0.1), users(6, 100_000), num_pairs=12
    )
    assert not found.exceeded(), found


def test_replay_finds_users_who_are_not_clipped(monkeypatch):
    def unclipped(delta, l2_clip_norm):
        del l2_clip_norm
        delta = jax.tree.map(jnp.nan_to_num, delta)
        return federated.ClippedDelta(delta, jnp.ones([]), jnp.ones([], bool))

    monkeypatch.setattr(federated, "clip_delta", unclipped)
    assert replay_users().exceeded(0.5)


class CountsRows(FederatedStep):
    """A user counts as often as it has rows, as the mean over rows would have it."""

    def private_sum(self, state, batch, is_padding, keys):
        width = jax.tree.leaves(batch.examples)[0].shape[1]
        times = jnp.repeat(jnp.arange(width), len(is_padding))
        batch, hidden, keys = jax.tree.map(
            lambda leaf: jnp.concatenate([leaf] * width), (batch, is_padding, keys)
        )
        return super().private_sum(state, batch, hidden | (batch.num_examples <= times), keys)


def test_replay_finds_users_who_count_by_their_rows():
    assert replay_users(CountsRows).largest == pytest.approx(6 * CLIP, rel=1e-3)


class CentresDeltas(FederatedStep):
    """What each user sends is taken relative to the mean of all."""

    def local_updates(self, *args, **options):
        deltas, losses = super().local_updates(*args, **options)
        finite = jax.tree.map(lambda leaf: jnp.nan_to_num(leaf, posinf=0, neginf=0), deltas)
        return jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0), finite), losses


def test_replay_finds_users_who_are_coupled():
    assert replay_users(CentresDeltas).exceeded(0.5)


class CountsBesidesTheBudget(FederatedStep):
    """The count of the adaptive clip comes on top of a delta of the full norm."""

    @property
    def _budget(self):
        return CLIP, super()._budget[1]


def test_replay_finds_a_count_that_is_not_part_of_the_norm():
    adaptive = mirrordp.training.AdaptiveClip(budget_share=0.2)
    found = replay_users(CountsBesidesTheBudget, adaptive_clip=adaptive)
    assert found.largest == pytest.approx(1.2**0.5 * CLIP, rel=1e-3)


class LongestUser(FederatedStep):
    """Every user makes as many local batches as the longest one of its pass."""

    def local_updates(self, loss_fn, state, batch, keys):
        longest = jnp.full_like(batch.num_examples, jnp.max(batch.num_examples))
        return super().local_updates(loss_fn, state, batch._replace(num_examples=longest), keys)


def test_replay_finds_users_who_notice_the_length_of_others():
    assert replay_users(LongestUser, replayed={"num_pairs": 160}).exceeded(0.5)


def test_replay_wants_users_for_a_federated_step():
    with pytest.raises(TypeError, match="rows must be PrivateClients"):
        auditing.neighbour_replay(
            FederatedStep(
                loss_fn=fit, mechanism=dataclasses.replace(step().mechanism, unit="user"),
                optimizer=optax.sgd(1.0), client_learning_rate=0.5,
            ),
            {"w": jnp.zeros(3), "b": jnp.zeros([])}, ROWS,
        )  # fmt: skip


def test_types_refuse_public_and_private_swapped():
    with pytest.raises(TypeError, match="PrivateData"):
        tools.train(
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
        return tools.train(
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
    right = bookkeeping.restored

    def forgets_the_noise(saved, like):
        state, kept = right(saved, like)
        return state._replace(noise_state=like.noise_state), kept

    monkeypatch.setattr(bookkeeping, "restored", forgets_the_noise)
    with pytest.raises(mirrordp.training.checkpoint.CheckpointError, match="got other values"):
        resumed(tmp_path / "seen")
    monkeypatch.setattr("mirrordp.training.shown.Shown.agrees", lambda *_: True)
    broken = resumed(tmp_path / "broken")
    np.testing.assert_array_equal(broken[:6], honest[:6])
    assert auditing.repeated_noise(broken, stddev) == [(k, k + 6) for k in range(6)]


def test_a_seeded_run_cannot_be_reported_as_unseeded():
    def report(seed, **options):
        made = tools.mechanism()
        _, info = tools.last(
            tools.train(
                tools.squared_distance, jnp.zeros(3), PrivateData(ROWS),
                mechanism=dataclasses.replace(made, sampling=tools.poisson(BATCH, rows=16)),
                optimizer=tools.sgd(0.1), seed=seed,
            )
        )  # fmt: skip
        return mirrordp.RunReport.of(made, 1e-5, info=info, **options)

    seeded, unseeded = report(7), report(None)
    assert seeded.seeded is True
    assert NOT_FOR_RELEASE in seeded.privacy_card()
    with pytest.raises(ValueError, match="says that it was given a seed"):
        report(7, seeded=False)
    assert unseeded.seeded is False
    assert NOT_FOR_RELEASE not in unseeded.privacy_card()


def resumed_with(folder, first, second) -> np.ndarray:
    """Two releases of step 1: of a run with one backward rule, and of its replay with another."""

    def run(factor, resume):
        flipped = jax.custom_vjp(lambda theta: theta)
        flipped.defvjp(lambda theta: (theta, None), lambda _, g: (factor * g,))
        return tools.train(
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
    with pytest.raises(mirrordp.training.checkpoint.CheckpointError, match="differs in: loss_fn"):
        resumed_with(tmp_path / "refused", 1.0, -1.0)
    # If gradients were not compared, what comes out would be.
    monkeypatch.setattr(engine, "described_loss", lambda *_: "")
    with pytest.raises(mirrordp.training.checkpoint.CheckpointError, match="got other values"):
        resumed_with(tmp_path / "unseen", 1.0, -1.0)
    # As it would be without either: half the sum of the two is the noise alone.
    monkeypatch.setattr("mirrordp.training.shown.Shown.agrees", lambda *_: True)
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
    monkeypatch.setattr(engine, "passes", lambda draw, size: sampling_module.passes(draw, size)[:1])
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
