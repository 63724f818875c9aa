"""Neighbouring data sets through the whole pipeline under the same randomness.

The parameters stand still (the optimiser only records), so step by step the released gradients of
two runs differ by the difference of their clipped sums alone. It must never exceed the sensitivity
that the accounting assumed: C for zero-out and add-remove, 2C for replace. The same check, on
pipelines broken in the usual ways, must fail.
"""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrordp
from mirrordp import Adjacency, Mechanism, PrivateData
from mirrordp.privacy.sums import ExactSum
from tests import tools

ROWS, STEPS, CLIP, BATCH = 24, 40, 0.5, 6.0
X = tools.features(rows=ROWS, seed=4)
SECRET_N = mirrordp.PoissonSampling(sampling_prob=0.25, expected_batch_size=BATCH, capacity=4)
PUBLIC_N = mirrordp.PoissonSampling.for_batch_size(BATCH, num_examples=ROWS, capacity=4)
LOSSES = pytest.mark.parametrize(
    "loss", [tools.weighted_distance, tools.keyed_distance], ids=["plain", "keyed"]
)
# The rows that an adversary would add: enormous, opposite, tiny, or with a gradient of NaN.
EXTREME = [
    (np.full(3, 1e18), 1e18),
    (np.full(3, -1e18), 1e18),
    (np.array([1e4, 0, 0]), 1.0),
    (np.array([0.1, 0.1, -0.1]), 1.0),
    (np.full(3, 3e38), 3e38),
]


def rows(weight=None, **changed):
    """The data set with unit weights, and row 0 replaced where `changed` says so."""
    x, weights = X.copy(), np.ones(ROWS, np.float32)
    if weight is not None:
        weights[0] = weight
    if "x" in changed:
        x[0] = changed["x"]
    return {"x": x, "weight": weights}


def one_more(x, weight):
    """The data set with unit weights and one row more."""
    return {
        "x": np.concatenate([X, x[None].astype(np.float32)]),
        "weight": np.append(np.ones(ROWS, np.float32), np.float32(weight)),
    }


def sums(data, sampling, loss, *, adjacency, kind=Mechanism, noise=0.0, seed=3):
    """B times the released gradient of each step: the clipped sums (plus noise)."""
    mechanism = kind(
        sampling=sampling,
        l2_clip_norm=CLIP,
        noise_multiplier=noise,
        num_steps=STEPS,
        adjacency=adjacency,
    )
    run = tools.train(
        loss,
        jnp.ones(3),
        PrivateData(data),
        mechanism=mechanism,
        optimizer=tools.recorder(STEPS),
        seed=seed,
        steps_per_call=STEPS,
    )
    return BATCH * tools.released_gradients(run).astype(np.float64)


def largest_distance(left, right) -> float:
    return float(np.linalg.norm(left - right, axis=1).max())


# Sums of up to twenty terms of norm C in single precision.
SLACK = 1e-5 * CLIP * 20


@pytest.fixture(scope="module")
def draws():
    """Draws over ROWS + 1 records; some exceed the capacity, and some contain the last record."""
    sampled = SECRET_N.batches(ROWS + 1, STEPS, np.random.default_rng(0))
    found = tuple(tuple(int(row) for row in draw) for draw in sampled)
    assert max(map(len, found)) > 8
    assert 0 < sum(ROWS in draw for draw in found) < STEPS
    return found


@LOSSES
class TestNeighbours:
    def test_zero_out(self, loss):
        base = sums(rows(weight=0.0), PUBLIC_N, loss, adjacency=Adjacency.ZERO_OUT)
        distances = [
            largest_distance(
                sums(rows(weight, x=x), PUBLIC_N, loss, adjacency=Adjacency.ZERO_OUT), base
            )
            for x, weight in EXTREME
        ]
        assert max(distances) <= CLIP + SLACK
        assert max(distances) >= CLIP - SLACK

    def test_add_remove(self, loss, draws):
        """The larger set has one row more; common rows are drawn by the same coins."""
        without = tuple(tuple(row for row in draw if row != ROWS) for draw in draws)
        small = sums(
            rows(), tools.Replay(base=SECRET_N, draws=without), loss, adjacency=Adjacency.ADD_REMOVE
        )
        distances = []
        for x, weight in EXTREME:
            replay = tools.Replay(base=SECRET_N, draws=draws)
            large = sums(one_more(x, weight), replay, loss, adjacency=Adjacency.ADD_REMOVE)
            distance = np.linalg.norm(large - small, axis=1)
            taking_part = np.array([ROWS in draw for draw in draws])
            # Steps without the record are the same sum, whatever the passes.
            assert distance[~taking_part].max() <= SLACK
            distances.append(distance.max())
        assert max(distances) <= CLIP + SLACK
        assert max(distances) >= CLIP - SLACK

    def test_replace(self, loss):
        found = [
            sums(rows(weight, x=x), PUBLIC_N, loss, adjacency=Adjacency.REPLACE)
            for x, weight in EXTREME
        ]
        distances = [largest_distance(a, b) for a in found for b in found]
        assert max(distances) <= 2 * CLIP + SLACK
        assert max(distances) >= 2 * CLIP - SLACK

    def test_the_noise_is_the_same_and_independent_of_the_data(self, loss):
        """With noise in place too: same seed, same draws, same noise, whatever row 0 holds."""
        adjacency = Adjacency.ZERO_OUT
        base = sums(rows(weight=0.0), PUBLIC_N, loss, adjacency=adjacency, noise=2.0)
        x, weight = EXTREME[0]
        other = sums(rows(weight, x=x), PUBLIC_N, loss, adjacency=adjacency, noise=2.0)
        assert CLIP - SLACK <= largest_distance(base, other) <= CLIP + SLACK
        quiet = sums(rows(weight=0.0), PUBLIC_N, loss, adjacency=adjacency)
        assert largest_distance(base, quiet) > 2 * CLIP


def test_a_row_that_is_not_drawn_has_no_influence():
    base = sums(rows(weight=0.0), PUBLIC_N, tools.weighted_distance, adjacency=Adjacency.ZERO_OUT)
    x, weight = EXTREME[0]
    data = rows(weight, x=x)
    other = sums(data, PUBLIC_N, tools.weighted_distance, adjacency=Adjacency.ZERO_OUT)
    distance = np.linalg.norm(base - other, axis=1)
    # Row 0 takes part in about a quarter of the steps; in all others the sums are equal to the bit.
    assert 0 < np.sum(distance > 0) < STEPS / 2
    assert np.all((distance == 0) | (distance > 0.9 * CLIP))


@pytest.mark.parametrize("sampling", ["fixed", "full", "cyclic"])
def test_other_samplings_under_replace(sampling):
    sampler = {
        "fixed": mirrordp.privacy.FixedSizeSampling(batch_size=6, num_examples=ROWS, capacity=4),
        "full": mirrordp.privacy.FullBatch(
            expected_batch_size=BATCH, num_examples=ROWS, capacity=7
        ),
        "cyclic": mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
            6, num_examples=ROWS, num_groups=4, capacity=4
        ),
    }[sampling]
    found = [
        sums(rows(weight, x=x), sampler, tools.weighted_distance, adjacency=Adjacency.REPLACE)
        for x, weight in EXTREME[:2]
    ]
    assert 2 * CLIP - SLACK <= largest_distance(*found) <= 2 * CLIP + SLACK


class _Broken(Mechanism, abc.ABC):
    """A mechanism whose clipped sum is changed."""

    @abc.abstractmethod
    def change(self, params, batch, is_padding, total, loss_fn):
        """The sum as the broken mechanism has it."""

    def clipped_grad(self, loss_fn, **options):
        right = super().clipped_grad(loss_fn, **options)

        def exact_sum(params, batch, is_padding, *, keys=None):
            total, stats = right.exact_sum(params, batch, is_padding, keys=keys)
            changed = self.change(params, batch, is_padding, total.floats(), loss_fn)
            return ExactSum.of(changed, self.l2_clip_norm), stats

        return dataclasses.replace(right, exact_sum=exact_sum)


class DividesByRealisedBatch(_Broken):
    def change(self, params, batch, is_padding, total, loss_fn):
        return total * BATCH / jnp.maximum(jnp.sum(~is_padding), 1)


class ClipsAfterSumming(_Broken):
    def change(self, params, batch, is_padding, total, loss_fn):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        grad = jnp.sum(jnp.where(is_padding[:, None], 0, grads), axis=0)
        return grad * jnp.minimum(1, BATCH * CLIP / jnp.linalg.norm(grad))


class DoesNotMaskPadding(_Broken):
    """Padding repeats row 0: a row that fills the batch counts many times."""

    def change(self, params, batch, is_padding, total, loss_fn):
        right = Mechanism.clipped_grad(self, loss_fn)
        return right(params, batch, jnp.zeros_like(is_padding))


class CouplesExamples(_Broken):
    """As batch normalisation would: each row's gradient is scaled by a statistic of the batch."""

    def change(self, params, batch, is_padding, total, loss_fn):
        mean = jnp.sum(jnp.where(is_padding, 0, batch["weight"])) / 4
        return total * jnp.minimum(mean, 3.0)


@pytest.mark.parametrize(
    "kind", [DividesByRealisedBatch, ClipsAfterSumming, DoesNotMaskPadding, CouplesExamples]
)
def test_a_broken_pipeline_fails_the_check(kind, draws):
    compute = functools.partial(sums, loss=tools.weighted_distance, kind=kind)

    def distances():
        base = compute(rows(weight=0.0), PUBLIC_N, adjacency=Adjacency.ZERO_OUT)
        for x, weight in EXTREME[:3]:
            neighbour = compute(rows(weight, x=x), PUBLIC_N, adjacency=Adjacency.ZERO_OUT)
            yield largest_distance(base, neighbour)
        without = tuple(tuple(row for row in draw if row != ROWS) for draw in draws)
        small = compute(
            rows(), tools.Replay(base=SECRET_N, draws=without), adjacency=Adjacency.ADD_REMOVE
        )
        for x, weight in EXTREME[:3]:
            large = compute(
                one_more(x, weight),
                tools.Replay(base=SECRET_N, draws=draws),
                adjacency=Adjacency.ADD_REMOVE,
            )
            yield largest_distance(large, small)

    # The first violation decides; the other neighbours need not be computed then.
    assert any(not distance <= CLIP + SLACK for distance in distances())
