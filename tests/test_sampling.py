"""Samplers draw what their events say: frequencies, independence, separation, capacity."""

import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mirrordp import Adjacency, PoissonSampling
from mirrordp.privacy import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullBatch,
    UnsupportedError,
    accounting,
    sampling,
)
from mirrordp.privacy.secure import SecureRandom
from tests import statistical
from tests.contracts.sampler import SamplerContract, participation

ROWS = 60
SAMPLERS = [
    PoissonSampling.for_batch_size(6, num_examples=ROWS),
    PoissonSampling(sampling_prob=0.1, expected_batch_size=6, capacity=4),
    CyclicPoissonSampling.for_batch_size(6, num_examples=ROWS, num_groups=4),
    CyclicPoissonSampling(sampling_prob=0.4, num_groups=4, expected_batch_size=6),
    CyclicPoissonSampling.for_batch_size(15, num_examples=ROWS, num_groups=4),
    FixedSizeSampling(batch_size=6, num_examples=ROWS),
    FullBatch.of(ROWS),
    FullBatch(expected_batch_size=ROWS, capacity=7),
]


class TestSamplers(SamplerContract):
    @pytest.fixture(params=SAMPLERS, ids=lambda sampler: f"{sampler.name} {sampler.num_examples}")
    def sampler(self, request):
        return request.param

    @pytest.fixture
    def rows(self):
        return ROWS


class PoissonStatistics:
    """Statistics of a participation table that together characterise Poisson sampling.

    Each has a false-alarm rate of 1e-6 (see `tests.statistical`).
    """

    def __init__(self, table: np.ndarray, q: float):
        self.table, self.q = table, q
        self.steps, self.rows = table.shape

    def frequency(self) -> bool:
        """The total number of participations is Bin(T·n, q)."""
        return statistical.accepts_frequency(int(self.table.sum()), self.table.size, self.q)

    def equal_frequencies(self) -> bool:
        """Each record takes part Bin(T, q) times."""
        return statistical.accepts_equal_frequencies(self.table.sum(axis=0), self.steps, self.q)

    def batch_sizes(self) -> bool:
        """Batch sizes are Bin(n, q): the covariances between all records add up to zero."""
        return statistical.accepts_equal_frequencies(self.table.sum(axis=1), self.rows, self.q)

    def pairs(self) -> bool:
        """Neighbouring records meet with probability q²."""
        met = self.table[:, 0::2] & self.table[:, 1::2]
        return statistical.accepts_frequency(int(met.sum()), met.size, self.q**2)

    def steps_independent(self) -> bool:
        """A record takes part in two neighbouring steps with probability q²."""
        again = self.table[0::2] & self.table[1::2]
        return statistical.accepts_frequency(int(again.sum()), again.size, self.q**2)

    def ends(self) -> bool:
        """The first and the last record take part Bin(T, q) times each."""
        return all(
            statistical.accepts_frequency(int(self.table[:, end].sum()), self.steps, self.q)
            for end in (0, -1)
        )

    def sizes_and_halves(self) -> bool:
        """Records of the first half are Bin(n/2, q), whatever those of the second half are."""
        half = self.rows // 2
        first, second = self.table[:, :half].sum(axis=1), self.table[:, half:].sum(axis=1)
        return (
            statistical.accepts_equal_frequencies(first, half, self.q)
            and statistical.accepts_equal_frequencies(second, self.rows - half, self.q)
            and statistical.accepts_uncorrelated(first, second)
        )

    def all(self) -> bool:
        return (
            self.ends()
            and self.sizes_and_halves()
            and self.frequency()
            and self.equal_frequencies()
            and self.batch_sizes()
            and self.pairs()
            and self.steps_independent()
        )


class TestPoisson:
    q, rows, steps = 0.1, 200, 2000

    @pytest.mark.parametrize("seed", [0, 1, 2])
    @pytest.mark.parametrize("capacity", [0, 5])
    def test_is_poisson(self, seed, capacity):
        sampler = PoissonSampling.for_batch_size(20, num_examples=self.rows, capacity=capacity)
        assert sampler.sampling_prob == self.q
        table = participation(sampler, self.rows, self.steps, seed)
        assert PoissonStatistics(table, self.q).all()

    @pytest.mark.parametrize("factor", [0.9, 0.95, 1.05, 1.1])
    def test_a_wrong_q_is_rejected(self, factor):
        sampler = PoissonSampling(sampling_prob=factor * self.q, expected_batch_size=20)
        table = participation(sampler, self.rows, self.steps)
        assert not PoissonStatistics(table, self.q).frequency()

    def test_fixed_size_batches_are_rejected(self):
        sampler = FixedSizeSampling(batch_size=20, num_examples=self.rows)
        statistics = PoissonStatistics(participation(sampler, self.rows, self.steps), self.q)
        assert statistics.frequency()
        assert not statistics.batch_sizes()

    def test_dropping_what_exceeds_the_capacity_is_rejected(self):
        sampler = PoissonSampling.for_batch_size(20, num_examples=self.rows)
        table = participation(sampler, self.rows, self.steps)
        for row in table:
            row[np.flatnonzero(row)[22:]] = False
        assert not PoissonStatistics(table, self.q).frequency()

    def test_shuffled_epochs_are_rejected(self):
        """The usual shortcut: each record exactly once per epoch of ten steps."""
        rng = np.random.default_rng(0)
        table = np.zeros((self.steps, self.rows), bool)
        for epoch in range(self.steps // 10):
            order = rng.permutation(self.rows).reshape(10, -1)
            for step in range(10):
                table[10 * epoch + step, order[step]] = True
        statistics = PoissonStatistics(table, self.q)
        assert not statistics.steps_independent()
        assert not statistics.equal_frequencies()

    def test_records_that_come_in_pairs_are_rejected(self):
        rng = np.random.default_rng(0)
        table = np.repeat(rng.random((self.steps, self.rows // 2)) < self.q, 2, axis=1)
        statistics = PoissonStatistics(table, self.q)
        assert statistics.frequency()
        assert not statistics.pairs()

    def test_a_record_that_is_never_drawn_is_rejected(self):
        sampler = PoissonSampling.for_batch_size(20, num_examples=self.rows)
        table = participation(sampler, self.rows, self.steps)
        table[:, 17] = False
        assert not PoissonStatistics(table, self.q).equal_frequencies()

    def test_q_one_is_everyone(self):
        sampler = PoissonSampling.for_batch_size(ROWS, num_examples=ROWS)
        assert participation(sampler, ROWS, 5).all()

    def test_draws_above_the_capacity_and_empty_draws_happen(self):
        sampler = PoissonSampling(sampling_prob=0.05, expected_batch_size=3, capacity=3)
        sizes = participation(sampler, ROWS, 400).sum(axis=1)
        assert sizes.max() > 6
        assert sizes.min() == 0

    def test_the_event_is_the_sampled_gaussian(self):
        event = PoissonSampling.for_batch_size(6, num_examples=ROWS).event(1.5, 7)
        expected = dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.5)), 7
        )
        assert event == expected

    def test_capacity_and_divisor_do_not_depend_on_the_data(self):
        sampler = PoissonSampling(sampling_prob=0.1, expected_batch_size=100)
        assert sampler.capacity == sampling.default_capacity(100) == 136
        assert sampler.num_examples is None
        assert participation(sampler, 7, 3).shape == (3, 7)


class TestPoissonSample:
    """The number first, then the records: by Floyd, by a partial shuffle, and by secure words."""

    # NumPy shuffles above 10,000 records and a fiftieth of them; secure words below a quarter.
    CASES = ((200, 0.1, 2000), (30, 0.45, 3000), (10_002, 0.03, 150), (10_002, 0.001, 1500))
    RANDOM = (np.random.default_rng, lambda seed: SecureRandom())

    def table(self, draw, rows, steps) -> np.ndarray:
        table = np.zeros((steps, rows), bool)
        for row in table:
            chosen = draw()
            assert len(np.unique(chosen)) == len(chosen)
            row[chosen] = True
        return table

    @pytest.mark.parametrize("rng", RANDOM, ids=["generator", "secure"])
    @pytest.mark.parametrize(("rows", "q", "steps"), CASES)
    def test_is_poisson(self, rng, rows, q, steps):
        rng = rng(7)
        table = self.table(lambda: sampling.poisson_sample(q, rows, rng), rows, steps)
        assert PoissonStatistics(table, q).all()

    @pytest.mark.parametrize(
        ("broken", "caught_by"),
        [
            (lambda n, q, rng: rng.choice(n, round(n * q), replace=False), "batch_sizes"),
            (lambda n, q, rng: rng.choice(n - 1, rng.binomial(n, q), replace=False), "ends"),
            (lambda n, q, rng: 1 + rng.choice(n - 1, rng.binomial(n, q), replace=False), "ends"),
            (lambda n, q, rng: rng.choice(n, rng.poisson(n * q), replace=False), "batch_sizes"),
            # With replacement: duplicates are lost.
            (lambda n, q, rng: np.unique(rng.integers(n, size=rng.binomial(n, q))), "frequency"),
            # Geometric gaps that begin one place late.
            (lambda n, q, rng: _gaps(n, q, rng, late=1), "ends"),
            # A set of neighbours.
            (lambda n, q, rng: (rng.integers(n) + np.arange(rng.binomial(n, q))) % n, "pairs"),
            # As many of each half.
            (lambda n, q, rng: _halves(n, rng.binomial(n, q), rng), "sizes_and_halves"),
        ],
        ids=["fixed size", "no last", "no first", "Poisson", "replaced", "late", "run", "halves"],
    )
    def test_broken_ones_are_rejected(self, broken, caught_by):
        rng = np.random.default_rng(3)
        table = np.zeros((3000, 30), bool)
        for row in table:
            row[broken(30, 0.3, rng)] = True
        statistics = PoissonStatistics(table, 0.3)
        assert not getattr(statistics, caught_by)()
        assert not statistics.all()

    def test_gaps_that_begin_in_time_are_accepted(self):
        """So that the tests above reject the mistake and not the method."""
        rng = np.random.default_rng(3)
        table = self.table(lambda: _gaps(30, 0.3, rng, late=0), 30, 3000)
        assert PoissonStatistics(table, 0.3).all()

    @pytest.mark.parametrize("rng", RANDOM, ids=["generator", "secure"])
    def test_time_follows_the_batch_and_not_the_table(self, rng):
        """A permutation of two billion records would take minutes and 16 GB."""
        found = sampling.poisson_sample(1e-7, 2 * 10**9, rng(0))
        assert statistical.accepts_frequency(len(found), 2 * 10**9, 1e-7)
        assert len(set(found.tolist())) == len(found)
        assert found.max() > 10**9

    @pytest.mark.parametrize("q", [2.0**-64, 1e-30, 1.0, 0.5, 0.75])
    def test_secure_coins_of_any_probability(self, q):
        counts = [len(SecureRandom().poisson_sample(q, 101)) for _ in range(300)]
        assert statistical.accepts_frequency(sum(counts), 101 * 300, q)

    @pytest.mark.parametrize(("size", "count"), [(3, 5), (3, 40), (0, 7), (7, 7)])
    def test_secure_subsets_are_uniform_and_in_random_order(self, size, count):
        draws = np.stack([SecureRandom().subset(size, count) for _ in range(2000)])
        assert draws.shape == (2000, size)
        for place in draws.T:
            # Each place of the order is uniform by itself; a sorted subset is not.
            counts = np.bincount(place, minlength=count)
            assert all(statistical.accepts_frequency(c, 2000, 1 / count) for c in counts)

    def test_secure_numbers_below_a_bound_are_uniform(self):
        """Words have 8 parts of 2⁶¹ numbers; remainders alone would favour two parts of three."""
        found = SecureRandom().below(3 * 2**61, 10_000)
        assert found.min() >= 0
        assert statistical.accepts_frequency(int((found < 2**61).sum()), 10_000, 1 / 3)
        naive = SecureRandom().words(10_000) % np.uint64(3 * 2**61)
        assert not statistical.accepts_frequency(int((naive < 2**61).sum()), 10_000, 1 / 3)


def _gaps(n: int, q: float, rng: np.random.Generator, late: int) -> np.ndarray:
    """Successes of n coins by the gaps between them."""
    places = np.cumsum(rng.geometric(q, size=4 * n)) - 1 + late
    return places[places < n]


def _halves(n: int, size: int, rng: np.random.Generator) -> np.ndarray:
    half = n // 2
    first = rng.choice(half, min(half, size // 2), replace=False)
    return np.append(first, half + rng.choice(n - half, size - len(first), replace=False))


class TestCyclicPoisson:
    @pytest.mark.parametrize("n", [ROWS, None], ids=["equal groups", "independent groups"])
    def test_a_record_takes_part_only_in_its_groups_turn(self, n):
        sampler = CyclicPoissonSampling(
            sampling_prob=0.5, num_groups=4, expected_batch_size=7.5, num_examples=n
        )
        table = participation(sampler, ROWS, 400)
        for row in table.T:
            steps = np.flatnonzero(row)
            assert steps.size == 0 or len(set(steps % 4)) == 1
            assert steps.size < 2 or np.diff(steps).min() >= 4
        # Plain Poisson sampling does not keep such a distance.
        plain = participation(SAMPLERS[0], ROWS, 400)
        assert np.any(plain[1:] & plain[:-1])

    def test_within_its_turn_a_record_joins_with_probability_q(self):
        sampler = CyclicPoissonSampling.for_batch_size(6, num_examples=ROWS, num_groups=4)
        assert sampler.sampling_prob == 0.4
        counts = participation(sampler, ROWS, 4000).sum(axis=0)
        assert statistical.accepts_equal_frequencies(counts, 1000, 0.4)
        assert statistical.accepts_frequency(counts.sum(), 1000 * ROWS, 0.4)
        assert not statistical.accepts_frequency(counts.sum(), 1000 * ROWS, 0.1)
        assert not statistical.accepts_frequency(counts.sum(), 1000 * ROWS, 0.42)

    def test_equal_groups_leave_the_remainder_out(self):
        sampler = CyclicPoissonSampling.for_batch_size(15, num_examples=62, num_groups=4)
        table = participation(sampler, 62, 8)
        assert set(table.sum(axis=1)) == {15}
        assert (table.sum(axis=0) == 0).sum() == 2

    def test_independent_groups_are_uniform(self):
        sampler = CyclicPoissonSampling(sampling_prob=1.0, num_groups=4, expected_batch_size=15)
        first = np.array([participation(sampler, ROWS, 4, seed)[0] for seed in range(300)])
        assert statistical.accepts_equal_frequencies(first.sum(axis=0), 300, 0.25)
        # Their sizes vary as independent choices do, unlike those of equal groups.
        assert statistical.accepts_equal_frequencies(first.sum(axis=1), ROWS, 0.25)
        equal = CyclicPoissonSampling.for_batch_size(15, num_examples=ROWS, num_groups=4)
        sizes = [participation(equal, ROWS, 4, seed)[0].sum() for seed in range(300)]
        assert not statistical.accepts_equal_frequencies(sizes, ROWS, 0.25)

    @pytest.mark.parametrize(("steps", "rounds"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
    def test_charges_the_rounds_entered(self, steps, rounds):
        sampler = CyclicPoissonSampling.for_batch_size(6, num_examples=ROWS, num_groups=4)
        event = sampler.event(1.0, steps)
        assert event.count == rounds
        assert event.event.sampling_probability == 0.4

    def test_q_one_is_not_amplified(self):
        sampler = CyclicPoissonSampling.for_batch_size(15, num_examples=ROWS, num_groups=4)
        expected = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), 3)
        assert sampler.event(1.0, 12) == expected

    def test_replace_is_refused_with_amplification_and_with_secret_n(self):
        amplified = CyclicPoissonSampling.for_batch_size(6, num_examples=ROWS, num_groups=4)
        with pytest.raises(UnsupportedError, match="no analysis of cyclic Poisson sampling"):
            amplified.check(Adjacency.REPLACE)
        secret = CyclicPoissonSampling(sampling_prob=1.0, num_groups=4, expected_batch_size=15)
        with pytest.raises(UnsupportedError, match="State num_examples"):
            secret.check(Adjacency.REPLACE)
        public = CyclicPoissonSampling.for_batch_size(15, num_examples=ROWS, num_groups=4)
        public.check(Adjacency.REPLACE)

    def test_more_groups_than_records(self):
        with pytest.raises(ValueError, match="num_groups must be at most num_examples=3"):
            CyclicPoissonSampling.for_batch_size(1, num_examples=3, num_groups=4)

    def test_a_batch_larger_than_a_group(self):
        with pytest.raises(ValueError, match=r"num_examples // num_groups \(15\), got 16"):
            CyclicPoissonSampling.for_batch_size(16, num_examples=ROWS, num_groups=4)


class TestFixedSize:
    def test_is_a_uniform_subset_of_exact_size(self):
        sampler = FixedSizeSampling(batch_size=20, num_examples=200)
        table = participation(sampler, 200, 2000)
        assert set(table.sum(axis=1)) == {20}
        statistics = PoissonStatistics(table, 0.1)
        # Each record still takes part Bin(T, q) times, and records meet with 20·19 / (200·199).
        assert statistics.equal_frequencies()
        assert statistics.steps_independent()
        met = table[:, 0::2] & table[:, 1::2]
        assert statistical.accepts_frequency(met.sum(), met.size, 20 * 19 / (200 * 199))

    @pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT])
    def test_only_replace_is_analysed(self, adjacency):
        with pytest.raises(UnsupportedError, match="Use 'replace', or PoissonSampling"):
            FixedSizeSampling(batch_size=6, num_examples=ROWS).check(adjacency)


class TestPublicConstants:
    @pytest.mark.parametrize(
        "sampler", [s for s in SAMPLERS if s.num_examples and s.name != "fixed size"]
    )
    def test_add_remove_refuses_a_sampler_that_knows_n(self, sampler):
        with pytest.raises(UnsupportedError, match="the number of records is secret"):
            sampler.check(Adjacency.ADD_REMOVE)
        sampler.check(Adjacency.ZERO_OUT)

    @pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s.num_examples is None])
    def test_add_remove_accepts_stated_constants(self, sampler):
        sampler.check(Adjacency.ADD_REMOVE)

    def test_an_expected_batch_size_may_be_a_fraction_and_a_fixed_one_may_not(self):
        poisson = PoissonSampling.for_batch_size(6.5, num_examples=ROWS)
        assert poisson.sampling_prob == 6.5 / ROWS
        assert poisson.expected_batch_size == 6.5
        assert isinstance(poisson.capacity, int)
        for make in (
            lambda size: FixedSizeSampling(batch_size=size, num_examples=ROWS),
            lambda size: accounting.fixed_size_event(
                1.0, num_examples=ROWS, batch_size=size, num_steps=1
            ),
        ):
            with pytest.raises(TypeError, match=r"integer, got 6.5 .* Poisson sampling may be"):
                make(6.5)

    def test_batch_larger_than_the_data(self):
        with pytest.raises(ValueError, match=r"at most num_examples \(60\), got 61"):
            PoissonSampling.for_batch_size(61, num_examples=ROWS)
        with pytest.raises(ValueError, match=r"at most num_examples \(60\), got 61"):
            FixedSizeSampling(batch_size=61, num_examples=ROWS)

    @pytest.mark.parametrize("bad", [0.0, -0.1, 1.5, math.nan])
    def test_sampling_prob(self, bad):
        with pytest.raises(ValueError, match=r"sampling_prob must be a probability in \(0, 1\]"):
            PoissonSampling(sampling_prob=bad, expected_batch_size=1)

    @pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf])
    def test_divisor(self, bad):
        with pytest.raises(ValueError, match="expected_batch_size must be a positive finite"):
            PoissonSampling(sampling_prob=0.1, expected_batch_size=bad)
        with pytest.raises(ValueError, match="expected_batch_size must be a positive finite"):
            FullBatch(expected_batch_size=bad)

    def test_capacity(self):
        with pytest.raises(ValueError, match="capacity must be a positive integer, got -1"):
            PoissonSampling(sampling_prob=0.1, expected_batch_size=1, capacity=-1)
        with pytest.raises(TypeError, match=r"capacity must be a positive integer, got 2\.5"):
            PoissonSampling(sampling_prob=0.1, expected_batch_size=1, capacity=2.5)

    def test_unknown_options(self):
        with pytest.raises(TypeError, match="truncate"):
            PoissonSampling(sampling_prob=0.1, expected_batch_size=1, truncate=True)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 50), st.integers(1, 20))
def test_passes_cover_every_index_exactly_once(size, capacity):
    draw = np.random.default_rng(size).permutation(50)[:size]
    table = sampling.passes(draw, capacity)
    assert table.shape == (max(1, math.ceil(size / capacity)), capacity)
    np.testing.assert_array_equal(table[table != sampling.PADDING], draw)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.5, 1e5))
def test_the_default_capacity_leaves_room_for_the_spread(batch):
    capacity = sampling.default_capacity(batch)
    assert capacity % 8 == 0
    wanted = batch + 3.5 * math.sqrt(batch)
    assert wanted <= capacity < wanted + 9
