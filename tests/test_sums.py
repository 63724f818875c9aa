"""Neighbouring sums differ by at most C, however many rows there are and whatever they are.

The attack: rows that bring a running sum to just below a power of two, a victim who lifts it above,
and many rows of a bit less than half a unit in the last place there, which count only below.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp.linear.descent import ClippedSum, Rows
from mirrordp.mirror.families import SQUARED_ERROR
from mirrordp.privacy import clipping, ghost, sums
from mirrordp.privacy.ghost import _factors
from mirrordp.privacy.sampling import PADDING, in_random_places
from mirrordp.privacy.sums import ExactSum
from mirrordp.training import federated
from tests import tools


def attack(power: int, followers: int, *, side_by_side: int = 1) -> tuple[np.ndarray, int]:
    """Returns numbers of size at most one, and the place of the victim.

    `side_by_side` repeats every number, for sums that are taken in so many parts.
    """
    numbers = np.concatenate(
        [np.ones(2**power - 1), [0.5], [1.0], np.full(followers, -0.9 * 2.0 ** (power - 24))]
    )
    numbers = np.repeat(numbers, side_by_side).astype(np.float32)
    victim = 2**power * side_by_side
    numbers[victim + 1 : victim + side_by_side] = 0
    return numbers, victim


def integers(total: ExactSum) -> np.ndarray:
    """Returns the sum in grains, all leaves in one vector."""
    parts = [
        (np.asarray(high, np.int64) << 32) + np.asarray(low, np.int64)
        for high, low in total.leaves()
    ]
    return np.concatenate([part.ravel() for part in parts])


def distance(one: ExactSum, other: ExactSum) -> float:
    moved = (integers(one) - integers(other)).astype(np.float64)
    return float(np.linalg.norm(moved)) * 2.0**one.exponent


def elementwise(weight, row):
    return jnp.sum(weight * row)


def dense(weight, row):
    return jnp.sum(row @ weight)


def neighbours(count: int, victim: int) -> tuple[np.ndarray, np.ndarray]:
    nobody = np.zeros(count, bool)
    return nobody, np.arange(count) == victim


def test_the_attack_breaks_a_running_sum():
    numbers, victim = attack(8, 250)
    run = jax.jit(lambda rows: jax.lax.scan(lambda total, x: (total + x, None), 0.0, rows)[0])
    without = numbers.copy()
    without[victim] = 0
    assert float(run(numbers)) - float(run(without)) > 1.003


@pytest.mark.parametrize("module", [ghost, clipping], ids=["ghost", "explicit"])
@pytest.mark.parametrize("loss", [elementwise, dense], ids=["elementwise", "dense"])
@pytest.mark.parametrize(
    ("power", "followers", "side_by_side", "microbatch_size"),
    [(12, 2500, 1, None), (12, 2500, 8, None), (8, 250, 1, 1), (9, 500, 1, 7)],
    ids=["one part", "eight parts", "microbatches of one", "microbatches of seven"],
)
def test_clipped_sums_withstand_the_attack(
    module, loss, power, followers, side_by_side, microbatch_size
):
    numbers, victim = attack(power, followers, side_by_side=side_by_side)
    weight = jnp.zeros(8) if loss is elementwise else jnp.zeros((8, 1))
    rows = np.zeros((len(numbers), 8), np.float32)
    rows[:, 0] = numbers
    clipped = module.clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=microbatch_size)
    run = jax.jit(lambda padding: clipped.exact_sum(weight, rows, padding)[0])
    found = distance(*map(run, neighbours(len(rows), victim)))
    assert 0.99 < found <= 1


def test_passes_withstand_the_attack():
    """A draw of more rows than the capacity takes a step of many passes."""
    numbers, victim = attack(8, 250)
    step = mirrordp.TrainStep(
        loss_fn=lambda weight, x: weight * x,
        mechanism=tools.mechanism(l2_clip_norm=1.0),
        optimizer=optax.sgd(0.1),
    )
    state = step.init(jnp.zeros([]), jax.random.key(0))

    @jax.jit
    def run(is_padding):
        def one_pass(total, row):
            return total + step.private_sum(state, *row, None), None

        rows = (jnp.asarray(numbers)[:, None], is_padding[:, None])
        return jax.lax.scan(one_pass, step.zero_sum(state), rows)[0].total

    assert 0.99 < distance(*map(run, neighbours(len(numbers), victim))) <= 1


def federated_step(**options):
    return federated.FederatedStep(
        loss_fn=lambda params, x: 0.0 * jnp.sum(params),
        mechanism=tools.mechanism(l2_clip_norm=1.0, unit="user"),
        optimizer=federated.server_sgd(1.0),
        client_learning_rate=1.0,
        **options,
    )


def test_users_one_by_one_withstand_the_attack():
    """Adds up users one by one, as a Flower server adds up replies."""
    numbers, victim = attack(8, 250)
    step = federated_step()
    start = step.zero_sum(step.init(jnp.zeros(1), jax.random.key(0)))

    @jax.jit
    def run(is_padding):
        def one_user(total, user):
            number, is_padding = user
            delta = jnp.where(is_padding, 0.0, number) * jnp.ones(1)
            return total + step.one_sum(step.contribution(delta, 1.0)[0]), None

        users = (jnp.asarray(numbers), is_padding)
        return jax.lax.scan(one_user, start, users)[0].total

    assert 0.99 < distance(*map(run, neighbours(len(numbers), victim))) <= 1


def test_a_user_adds_the_same_in_every_place():
    """Where a product is wide enough; see test_federated.py for one that is not."""
    rng = np.random.default_rng(0)
    examples = {
        "x": rng.normal(size=(7, 5, 6)).astype(np.float32),
        "y": rng.normal(size=(7, 5)).astype(np.float32),
    }

    def loss(params, example):
        hidden = jnp.tanh(example["x"] @ params["w"])
        return (jax.nn.softmax(hidden) @ params["v"] - example["y"]) ** 2

    params = {"w": rng.normal(size=(6, 9)), "v": rng.normal(size=9)}
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    step = federated_step(client_batch_size=2)
    step = dataclasses.replace(step, loss_fn=loss, client_learning_rate=0.1)
    state = step.init(params, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 7)

    @jax.jit
    def alone(order, place):
        rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[order], examples)
        users = federated.UserBatch(rows, jnp.full(7, 5))
        return step.private_sum(state, users, jnp.arange(7) != place, keys[order]).total

    for user in (0, 3):
        orders = [np.roll(np.arange(7), shift) for shift in range(7)]
        found = [integers(alone(order, int(np.flatnonzero(order == user)[0]))) for order in orders]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])


def test_linear_models_withstand_the_attack():
    """In float64 the attack takes 2²⁹ times as many rows, so the rows are made larger instead."""
    numbers, victim = attack(8, 250)
    scale = np.where(np.arange(len(numbers)) > victim, 2.0**-29, 1.0)
    features = (numbers * scale)[:, None]
    clipped_sum = ClippedSum(SQUARED_ERROR, 1.0)
    with_all, without = (
        clipped_sum(np.zeros((1, 1)), Rows(features, np.full((len(numbers), 1), -1.0), ~padding))
        for padding in neighbours(len(numbers), victim)
    )
    assert 0.99 < (with_all - without).item() <= 1
    running = np.cumsum(features[:, 0])[-1] - np.cumsum(np.delete(features[:, 0], victim))[-1]
    assert running > 1


@functools.cache
def _bilinear(positions: int, batch: int, microbatch_size: int | None = None):
    """Returns the sum of clipped gradients Σ_t left_t ⊗ right_t, through Gram matrices."""

    def loss(weight, example):
        left, right = example
        return jnp.sum((left @ weight) * right)

    clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=microbatch_size)
    weight = jnp.zeros((48, 40))
    paths = ghost.explain(
        loss, weight, (jnp.zeros((batch, positions, 48)), jnp.zeros((batch, positions, 40)))
    )
    assert paths[0].path == "gram"
    return jax.jit(lambda rows, padding: clipped.exact_sum(weight, rows, padding)[0])


@pytest.mark.usefixtures("by_gram")
@pytest.mark.parametrize("positions", [1, 4, 16])
def test_blocks_keep_what_an_example_does_to_others_small(positions):
    """Rows in one direction with cancelling positions disturb the rounding the most."""
    rng = np.random.default_rng(positions)
    batch = 96
    run = _bilinear(positions, batch)
    for _ in range(5):
        left = np.abs(rng.normal(size=(1, positions, 48))) * np.ones((batch, 1, 1))
        right = np.abs(rng.normal(size=(1, positions, 40))) * np.ones((batch, 1, 1))
        if positions > 1:
            left[:, 1::2] = left[:, ::2] * (1 + 0.1 * rng.normal(size=left[:, ::2].shape))
            right[:, 1::2] = -right[:, ::2]
        left *= np.exp(rng.normal(size=(batch, 1, 1)))
        rows = (left.astype(np.float32), right.astype(np.float32))
        with_all, without = (run(rows, jnp.asarray(p)) for p in neighbours(batch, 17))
        assert distance(with_all, without) <= 1


def test_the_bound_of_a_block_is_the_proven_one():
    for unit in (2.0**-24, 2.0**-23):
        for positions in (1, 2, 35, 64, 1000, 10**6):
            found = _factors.roundoff(positions, 4096, unit, 0.0)
            size = found.block * positions + 3
            kappa = 1 / found.spread
            assert found.own >= size * unit
            assert found.disturbance >= 2 * (found.block - 1) * size * unit * kappa
            assert found.disturbance <= _factors.DISTURBANCE
            assert kappa >= (1 if positions == 1 else 2 * math.sqrt(positions))
    assert _factors.roundoff(1, 4096, 2.0**-24, 0.0).block >= 64
    assert _factors.roundoff(1, 16, 2.0**-24, 0.0).block == 16
    # Blocks of different sizes hold different examples, and each may spend all of C on one weight.
    one, two = (_factors.Roundoff(0.0, 1.0, block, 1e-3) for block in (2, 3))
    assert _factors.disturbance([one, one]) == 1e-3
    assert _factors.disturbance([one, two]) == pytest.approx(math.sqrt(2) * 1e-3)
    assert _factors.disturbance([]) == 0


def test_sums_in_float32_would_not_pass(monkeypatch):
    def added(one, other):
        total = sum(jnp.float32(high) * 2.0**32 + jnp.float32(low) for high, low in (one, other))
        return sums.halves(total[None], 0)

    monkeypatch.setattr(sums, "added", added)
    numbers, victim = attack(8, 250)
    clipped = clipping.clipped_grad(lambda w, x: w * x, l2_clip_norm=1.0, microbatch_size=1)
    run = jax.jit(lambda padding: clipped.exact_sum(jnp.zeros([]), numbers, padding)[0])
    assert distance(*map(run, neighbours(len(numbers), victim))) > 1.003


class TestExactSum:
    @pytest.mark.parametrize("other", [0.1, np.full(1, 0.1), np.full((3, 1), 0.1)])
    def test_a_number_counts_once(self, other):
        """Spread over all coordinates, a reply of one number would move the sum by √p C."""
        total = ExactSum.zero({"w": np.zeros(3, np.float32)}, 1.0)
        added = ExactSum.of({"w": np.asarray(other, np.float32)}, 1.0)
        with pytest.raises(ValueError, match="of the same arrays"):
            total + added
        with pytest.raises(ValueError, match="of the same arrays"):
            total + ExactSum.of({"v": np.zeros(3, np.float32)}, 1.0)

    def test_any_order_and_grouping_gives_the_same_integers(self):
        rng = np.random.default_rng(0)
        values = {"a": rng.normal(size=(60, 3)), "b": rng.normal(size=(60, 2, 2)) * 1e-6}
        values = jax.tree.map(lambda leaf: leaf.astype(np.float32) / 10, values)
        whole = integers(ExactSum.over(values, 0.7))
        order = rng.permutation(60)
        shuffled = jax.tree.map(lambda leaf: leaf[order], values)
        parts = [
            ExactSum.over(jax.tree.map(lambda leaf, part=part: leaf[part], shuffled), 0.7)
            for part in np.array_split(np.arange(60), 7)
        ]
        np.testing.assert_array_equal(whole, integers(functools.reduce(lambda a, b: a + b, parts)))
        exact = np.concatenate(
            [np.trunc(v.astype(np.float64) / 2.0**-35).sum(axis=0).ravel() for v in values.values()]
        )
        np.testing.assert_array_equal(whole, exact)

    def test_halves_carry_in_both_directions(self):
        numbers = np.array([[0.75], [-0.75], [2.0**-30], [-1.0], [0.5]], np.float32)
        for some in range(1, len(numbers) + 1):
            one_by_one = [ExactSum.of(jnp.asarray(row), 1.0) for row in numbers[:some]]
            total = functools.reduce(lambda a, b: a + b, one_by_one)
            assert integers(total)[0] == int(numbers[:some].astype(np.float64).sum() * 2**34)
            assert float(total.floats()[0]) == np.float32(numbers[:some].sum(dtype=np.float64))

    @pytest.mark.parametrize("clip", [1e-30, 3e-4, 1.0, 0.7, 1e30])
    def test_scales(self, clip):
        rng = np.random.default_rng(0)
        values = (rng.normal(size=(100, 7)) * clip / 5).astype(np.float32)
        found = np.asarray(ExactSum.over(values, clip).floats(), np.float64)
        np.testing.assert_allclose(found, values.astype(np.float64).sum(axis=0), atol=2e-6 * clip)

    def test_the_largest_number_of_records_fits(self):
        largest = 2.0 ** (sums.GRAIN_BITS + 1) * sums.MAX_RECORDS
        assert largest < 2.0**63
        sums.check_count(sums.MAX_RECORDS)
        with pytest.raises(ValueError, match="at most 134,217,728 records, got 134,217,729"):
            sums.check_count(sums.MAX_RECORDS + 1)

    def test_sums_of_another_kind_are_not_added(self):
        one = ExactSum.of(jnp.ones(3), 1.0)
        for other in (ExactSum.of(jnp.ones(3), 4.0), ExactSum.of(jnp.ones(3, jnp.bfloat16), 8.0)):
            with pytest.raises(ValueError, match="only sums of the same grain"):
                _ = one + other

    def test_side_by_side(self):
        """Sweeps map over runs, and 64-bit integers must keep their 64 bits."""
        values = np.random.default_rng(0).normal(size=(3, 50, 4)).astype(np.float32)

        def total(rows):
            body = lambda total, row: (total + ExactSum.of(row, 1.0), None)  # noqa: E731
            return jax.lax.scan(body, ExactSum.zero(rows[0], 1.0), rows)[0]

        mapped = jax.jit(jax.vmap(total))(values)
        alone = [total(rows) for rows in values]
        np.testing.assert_array_equal(mapped.low, [one.low for one in alone])
        np.testing.assert_array_equal(mapped.high, [one.high for one in alone])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 5_000, 300_000])
class TestNotFinite:
    """XLA on a CPU drops a NaN from the maximum of 4,096 or more numbers."""

    def test_one_user(self, bad, size):
        delta = np.ones(size, np.float32)
        delta[size // 2] = bad
        step = federated_step(adaptive_clip=federated.AdaptiveClip())
        for run in (step.contribution, jax.jit(step.contribution, static_argnums=1)):
            contribution, clipped = run(jnp.asarray(delta), 0.5)
            assert not np.any(contribution.delta)
            assert contribution.below_clip == 0
            assert not clipped.unprivatized_is_finite

    def test_among_other_users(self, bad, size):
        deltas = np.ones((3, size), np.float32)
        deltas[1, size // 2] = bad
        found = jax.jit(jax.vmap(lambda delta: federated.clip_delta(delta, 0.5).delta))(deltas)
        assert not np.any(found[1])
        np.testing.assert_allclose(np.linalg.norm(found[::2], axis=1), 0.5, rtol=1e-3)

    @pytest.mark.parametrize("module", [ghost, clipping], ids=["ghost", "explicit"])
    def test_one_example(self, bad, size, module):
        rows = np.ones((3, size), np.float32)
        clipped = jax.jit(module.clipped_grad(elementwise, l2_clip_norm=0.5).exact_sum)
        spoiled = rows.copy()
        spoiled[1, size // 2] = bad
        weight, nobody = jnp.zeros(size), jnp.zeros(3, bool)
        expected = clipped(weight, rows, jnp.arange(3) == 1)[0]
        assert distance(clipped(weight, spoiled, nobody)[0], expected) == 0


def test_a_user_cannot_turn_the_model_into_nan():
    """A finite feature overflows local SGD in a model of 5,000 parameters."""
    rows = {"x": np.ones((40, 5_000), np.float32)}
    rows["x"][7] = 1e15
    *_, (state, _) = tools.federated_train(
        lambda params, row: jnp.sum((params * row["x"]) ** 2),
        jnp.ones(5_000),
        mirrordp.PrivateClients.from_rows(rows, np.arange(40) // 2),
        mechanism=mirrordp.Mechanism(
            sampling=mirrordp.privacy.FullBatch.of(20),
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            num_steps=2,
            unit="user",
        ),
        client_learning_rate=0.1,
        seed=0,
    )
    assert np.all(np.isfinite(state.params))


def test_a_norm_of_many_equal_numbers_is_not_underestimated():
    """A running float32 sum of equal squares stops growing after 2²⁴ terms."""
    delta = jnp.full(2**25, 1.0)
    found = federated.clip_delta(delta, 1.0).delta
    assert np.linalg.norm(np.asarray(found, np.float64)) <= 1


class TestPlaces:
    def test_every_index_once_and_whole_passes(self):
        rng = np.random.default_rng(0)
        for count in (0, 1, 7, 8, 9, 20):
            found = in_random_places(np.arange(count), 8, rng)
            assert len(found) == 8 * max(1, math.ceil(count / 8))
            np.testing.assert_array_equal(np.sort(found[found != PADDING]), np.arange(count))

    def test_places_are_uniform_and_not_those_of_the_others(self):
        rng = np.random.default_rng(0)
        places = np.stack([np.argsort(in_random_places(np.arange(6), 8, rng)) for _ in range(8000)])
        counts = np.bincount(places[:, 2], minlength=8)
        assert np.all(np.abs(counts - 1000) < 5 * math.sqrt(1000))

    @pytest.mark.parametrize("adjacency", list(mirrordp.Adjacency))
    def test_gaps_under_add_remove_alone(self, adjacency):
        is_secret = adjacency is mirrordp.Adjacency.ADD_REMOVE
        mechanism = mirrordp.Mechanism(
            sampling=mirrordp.PoissonSampling(sampling_prob=0.3, expected_batch_size=12.0),
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            num_steps=20,
            adjacency=adjacency,
        )
        batches = list(mechanism.batches(40, np.random.default_rng(0)))
        assert any((batch == PADDING).any() for batch in batches) == is_secret
        drawn = np.concatenate([batch[batch != PADDING] for batch in batches])
        assert abs(len(drawn) - 240) < 5 * math.sqrt(240)
        if is_secret:
            assert all(len(batch) % mechanism.sampling.capacity == 0 for batch in batches)
