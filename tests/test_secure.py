"""The secure mode: exact distributions, rounding that is charged, no seed, nothing repeated."""

import decimal
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import mirrordp
from mirrordp import Adjacency, SecureGaussianNoise, cli
from mirrordp.linear import descent as linear
from mirrordp.linear.estimators import PrivateLinearRegression
from mirrordp.privacy import UnsupportedError, accounting, noise, secure
from mirrordp.privacy._float64 import float64_call
from mirrordp.privacy.secure import SecureRandom
from mirrordp.report.page import report_page
from mirrordp.training.engine import randomness
from tests import statistical, tools
from tests.test_cli_fit import fit_options, two_tables

SECURE = SecureRandom()
WIDE = 1.5 * 2**20


def accepts_rounded_gaussian(draws: np.ndarray, stddev: float) -> bool:
    """χ² test of integer draws against Φ((k + ½)/s) − Φ((k − ½)/s), tails gathered."""
    reach = int(3 * stddev)
    edges = np.arange(-reach, reach + 2) - 0.5
    expected = np.diff(stats.norm.cdf(np.r_[-np.inf, edges, np.inf] / stddev)) * draws.size
    observed = np.histogram(draws, np.r_[-np.inf, edges, np.inf])[0]
    assert expected.min() > 5
    return bool(stats.chisquare(observed, expected, sum_check=False).pvalue >= 1e-6)


class TestBits:
    def test_bytes_are_uniform_and_calls_differ(self):
        first, second = SECURE.words(50_000), SECURE.words(50_000)
        counts = np.bincount(np.r_[first, second].view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue >= 1e-6
        assert not np.isin(first, second).any()
        low_bit_stuck = (np.r_[first, second] | np.uint64(1)).view(np.uint8)
        assert stats.chisquare(np.bincount(low_bit_stuck, minlength=256)).pvalue < 1e-6

    def test_a_coin_is_decided_by_the_exact_threshold(self, monkeypatch):
        q = 0.1
        threshold = int(math.ldexp(q, 64))
        assert threshold == q * 2**64
        words = np.array([threshold - 1, threshold, 0, 2**64 - 1], np.uint64)
        monkeypatch.setattr(SecureRandom, "words", lambda self, count: words[:count])
        assert SECURE.bernoulli(q, 4).tolist() == [True, False, True, False]
        assert SECURE.bernoulli(1.0, 3).all()

    def test_a_probability_below_the_resolution_is_rounded_down(self, monkeypatch):
        q = 1e-19 * 7.7  # 14.2 in units of 2⁻⁶⁴
        words = np.array([13, 14, 15], np.uint64)
        monkeypatch.setattr(SecureRandom, "words", lambda self, count: words[:count])
        assert SECURE.bernoulli(q, 3).tolist() == [True, False, False]

    def test_subsets_are_uniform(self):
        draws = [tuple(sorted(SECURE.subset(2, 4))) for _ in range(6000)]
        counts = np.unique(draws, axis=0, return_counts=True)[1]
        assert len(counts) == 6
        assert stats.chisquare(counts).pvalue >= 1e-6

    def test_equal_words_are_drawn_again(self, monkeypatch):
        draws = iter([np.array([5, 5, 1], np.uint64), np.array([9, 4, 6], np.uint64)])
        monkeypatch.setattr(SecureRandom, "words", lambda self, count: next(draws))
        assert SECURE.subset(2, 3).tolist() == [1, 2]


class TestRoundedGaussian:
    @pytest.mark.parametrize("stddev", [0.4, 1.3, 20.0])
    def test_every_probability(self, stddev):
        draws = SECURE.rounded_gaussian(stddev, 200_000)
        assert draws.dtype == np.int32
        if stddev > 1:
            assert accepts_rounded_gaussian(draws, stddev)
            assert not accepts_rounded_gaussian(draws, 1.03 * stddev)
            # Rounded towards zero, one step off, and the sign forgotten.
            exact = stddev * np.random.default_rng(0).normal(size=200_000)
            assert accepts_rounded_gaussian(np.rint(exact), stddev)
            assert not accepts_rounded_gaussian(np.trunc(exact), stddev)
            assert not accepts_rounded_gaussian(np.rint(exact) + 1, stddev)
            assert not accepts_rounded_gaussian(np.abs(np.rint(exact)), stddev)
        else:
            zero = 1 - 2 * stats.norm.sf(0.5 / stddev)
            assert statistical.accepts_frequency(int((draws == 0).sum()), draws.size, zero)

    def test_mean_variance_and_tails_on_a_fine_lattice(self):
        draws = SECURE.rounded_gaussian(WIDE, 400_000)
        assert statistical.accepts_stddev(draws, WIDE)
        assert not statistical.accepts_stddev(draws, 1.02 * WIDE)
        assert statistical.accepts_normal(draws, WIDE)
        assert abs(draws.mean()) <= 5 * WIDE / math.sqrt(draws.size)
        assert abs((draws + 0.02 * WIDE).mean()) > 5 * WIDE / math.sqrt(draws.size)
        beyond = int((np.abs(draws) > 4 * WIDE).sum())
        assert statistical.accepts_frequency(beyond, draws.size, 2 * stats.norm.sf(4))
        assert not statistical.accepts_frequency(0, draws.size, 2 * stats.norm.sf(4))
        # The lowest digits are used: on a lattice of two, half of the draws would be missing.
        assert statistical.accepts_frequency(int((draws % 2).sum()), draws.size, 0.5)

    def test_draws_are_independent_over_coordinates(self):
        draws = SECURE.rounded_gaussian(WIDE, 3 * 2**16)  # several chunks, each with its own key
        for lag in (1, 2, 2**16):
            assert statistical.accepts_uncorrelated(draws[:-lag], draws[lag:])
        assert not statistical.accepts_uncorrelated(
            draws[:-1] + 0.05 * draws[1:], draws[1:].astype(float)
        )

    def test_the_fast_path_agrees_with_many_digits(self):
        words = SECURE.words(200)
        fast = secure.rounded_gaussian_of(words, WIDE, SECURE)
        exact = [secure._exact_magnitude(int(word) >> 1, WIDE, SECURE) for word in words]
        np.testing.assert_array_equal(np.abs(fast), exact)
        np.testing.assert_array_equal(np.signbit(fast) | (fast == 0), (words & 1) == 1)
        # An inverse in single precision is noticed.
        tail = ((words >> np.uint64(1)).astype(float) + 0.5) * 2.0**-64
        single = np.rint(-WIDE * special.ndtri(tail.astype(np.float32)))
        assert np.any(single != exact)

    def test_next_to_a_boundary_the_bits_decide(self):
        """Words on both sides of the probability where |K| changes from k to k + 1."""
        for k in (0, 1, 1000, 2**20, 5 * 2**20):
            with decimal.localcontext() as context:
                context.prec = 80
                boundary = secure.normal_tail(k + 0.5, WIDE) * 2**64
            last_outside = int(boundary) - 1
            words = np.array([last_outside, last_outside + 2], np.uint64) << np.uint64(1)
            draws = secure.rounded_gaussian_of(words, WIDE, SECURE)
            assert draws.tolist() == [k + 1, k]

    def test_where_the_bits_do_not_decide_more_are_read(self, monkeypatch):
        with decimal.localcontext() as context:
            context.prec = 80
            boundary = secure.normal_tail(1000.5, WIDE) * 2**64
            undecided = int(boundary)
            threshold = int((boundary - undecided) * 2**64)
        word = np.array([undecided << 1], np.uint64)
        asked = []

        def more(value):
            def words(self, count):
                asked.append(count)
                return np.array([value], np.uint64)

            return words

        for value, expected in ((threshold - 1, 1001), (threshold + 1, 1000)):
            monkeypatch.setattr(SecureRandom, "words", more(value))
            assert secure.rounded_gaussian_of(word, WIDE, SECURE).tolist() == [expected]
        assert asked == [1, 1]

    def test_the_far_tail_is_reached(self, monkeypatch):
        """63 zero bits are no end of the distribution: the next word decides how far out."""
        monkeypatch.setattr(SecureRandom, "words", lambda self, count: np.full(count, 7, np.uint64))
        (far,) = secure.rounded_gaussian_of(np.zeros(1, np.uint64), WIDE, SECURE)
        assert far / WIDE == pytest.approx(-special.ndtri(7.5 * 2.0**-128), rel=1e-2)
        assert far > 12 * WIDE

    def test_many_digits_of_the_normal_tail(self):
        with decimal.localcontext() as context:
            context.prec = 60
            for z in (0.0, 0.3, 1.0, 4.0, 9.0):
                assert float(secure.normal_tail(z, 1.0)) == pytest.approx(stats.norm.sf(z), 1e-12)
            # Φ(−1) to 40 digits (Abramowitz and Stegun agree to their 15).
            known = decimal.Decimal("0.1586552539314570514147674543679620775")
            assert abs(secure.normal_tail(1.0, 1.0) - known) < decimal.Decimal("1e-36")

    def test_scipys_inverse_is_as_good_as_assumed(self):
        """The rounding margin allows for 2⁻³⁹; a hundredth of that is already never seen."""
        rng = np.random.default_rng(0)
        tails = np.r_[rng.uniform(0, 0.5, 100), 2.0 ** rng.uniform(-24, -1, 100)]
        worst = 0.0
        with decimal.localcontext() as context:
            context.prec = 50
            for tail in tails:
                z = -float(special.ndtri(tail))
                error = secure.normal_tail(z, 1.0) - decimal.Decimal(float(tail))
                worst = max(worst, abs(float(error)) / stats.norm.pdf(z))
        assert worst < secure._QUANTILE_ERROR / 100

    def test_scales_beyond_the_integers_are_refused(self):
        with pytest.raises(ValueError, match="stddev must be at most"):
            SECURE.rounded_gaussian(2.0**26, 1)


def stream(stddev, num_steps, size=2000):
    """Noise on sums of zero, [steps, coordinates], from one compiled scan."""
    zeros = {"a": jnp.zeros(size // 2), "b": jnp.zeros((2, size // 4))}
    noise = SecureGaussianNoise(num_params=size)

    def step(state, _):
        noisy, state = noise.add(zeros, state, stddev)
        return state, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(noisy)])

    start = noise.init(jax.random.key(0), zeros)
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, start, length=num_steps)[1])())


class TestAdd:
    @pytest.mark.parametrize("stddev", [0.3, 25.0])
    def test_scale_and_independence(self, stddev):
        samples = stream(stddev, 20)
        assert statistical.accepts_stddev(samples, stddev)
        for factor in (2 / 3, 0.95, 1.05, 3 / 2):
            assert not statistical.accepts_stddev(samples, factor * stddev)
        assert statistical.accepts_normal(samples, stddev)
        for lag in (1, 2, 7):
            assert statistical.accepts_uncorrelated(samples[:-lag], samples[lag:])
        assert statistical.accepts_uncorrelated(samples[:, :1000], samples[:, 1000:])
        assert not statistical.accepts_uncorrelated(samples[1:] + 0.1 * samples[:-1], samples[:-1])

    def test_releases_lie_on_the_lattice_whatever_the_sum(self):
        secure_noise = SecureGaussianNoise(num_params=1000)
        granularity = secure_noise.granularity(3.0)
        assert granularity == 2.0 ** (1 - 20)
        sums = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
        state = secure_noise.init(jax.random.key(0), sums)
        noisy, _ = jax.jit(lambda sums, state: secure_noise.add(sums, state, 3.0))(sums, state)
        steps = np.asarray(noisy, np.float64) / granularity
        np.testing.assert_array_equal(steps, np.rint(steps))
        # The default noise does not.
        plain = mirrordp.GaussianNoise()
        noisy, _ = plain.add(sums, plain.init(jax.random.key(0), sums), 3.0)
        steps = np.asarray(noisy, np.float64) / granularity
        assert np.any(steps != np.rint(steps))

    def test_the_same_key_and_state_give_other_noise(self):
        zeros = jnp.zeros(50)
        noise = SecureGaussianNoise(num_params=50)
        add = jax.jit(lambda state: noise.add(zeros, state, 1.0)[0])
        first, second = (add(noise.init(jax.random.key(0), zeros)) for _ in range(2))
        assert np.all(np.asarray(first) != np.asarray(second))

    def test_mapped_steps_have_their_own_noise(self):
        zeros = jnp.zeros(50)
        noise = SecureGaussianNoise(num_params=50)
        states = jnp.zeros(2, jnp.int32)
        noisy = jax.vmap(lambda state: noise.add(zeros, state, 1.0)[0])(states)
        assert np.all(np.asarray(noisy[0]) != np.asarray(noisy[1]))

    def test_more_coordinates_than_charged(self):
        noise = SecureGaussianNoise(num_params=3)
        with pytest.raises(ValueError, match="made for num_params=3 coordinates, got 4"):
            noise.init(jax.random.key(0), jnp.zeros(4))
        with pytest.raises(ValueError, match="made for num_params=3 coordinates, got 4"):
            noise.add(jnp.zeros(4), jnp.zeros([], jnp.int32), 1.0)


def rounded(values: np.ndarray, granularity: float) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(
            float64_call(lambda v: noise.to_lattice(v, granularity), jnp.asarray(values))
        )


class TestSensitivity:
    def test_rounding_moves_neighbours_apart_by_no_more_than_is_charged(self):
        rng = np.random.default_rng(0)
        p, clip, granularity = 400, 1.0, 2.0**-6
        largest = 0.0
        for _ in range(200):
            total = rng.normal(size=p)
            # The worst sums lie next to a boundary between two lattice points.
            total = (np.rint(total / granularity) + 0.5) * granularity - 1e-9
            change = rng.normal(size=p) * rng.choice([1e-6, 1e-3, 1.0])
            change *= min(1.0, clip / np.linalg.norm(change))
            difference = rounded(total + change, granularity) - rounded(total, granularity)
            moved = granularity * np.linalg.norm(difference)
            assert moved <= np.linalg.norm(change) + granularity * math.sqrt(p) + 1e-9
            largest = max(largest, moved)
        # Without the charge the claim would be false.
        assert largest > 1.01 * clip

    def test_large_sums_do_not_wrap_around(self):
        values = rounded(np.array([1e30, -1e30, np.inf, 3.0]), 1.0)
        assert values.tolist() == [2**62, -(2**62), 2**62, 3]

    def test_epsilon_is_that_of_the_enlarged_distance(self):
        made_for = SecureGaussianNoise(num_params=10_000, bits=10)
        found = tools.mechanism(noise=made_for, l2_clip_norm=0.5)
        granularity = 2.0 ** (1 - 10)  # noise of 2.0
        assert made_for.granularity(found.noise_stddev) == granularity
        distance = 0.5 + granularity * 100
        explicit = tools.mechanism(noise_multiplier=4.0 * 0.5 / distance)
        assert found.epsilon(1e-5) == explicit.epsilon(1e-5)
        assert found.epsilon(1e-5) > 1.1 * tools.mechanism().epsilon(1e-5)
        assert found.event_between(0, 5) == explicit.event_between(0, 5)

    @pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
    def test_the_price_of_the_default_lattice_is_small(self, adjacency):
        sampling = mirrordp.privacy.FullBatch.of(100)
        options = {"sampling": sampling, "adjacency": adjacency}
        plain = tools.mechanism(**options).epsilon(1e-5)
        found = tools.mechanism(**options, noise=SecureGaussianNoise(num_params=10**6))
        assert plain < found.epsilon(1e-5) < 1.01 * plain

    def test_calibration_keeps_the_target(self):
        options = {
            "epsilon": 1.0,
            "delta": 1e-3,
            "sampling": mirrordp.privacy.FullBatch.of(40),
            "num_steps": 12,
            "l2_clip_norm": 0.7,
        }
        made_for = SecureGaussianNoise(num_params=10**6, bits=15)
        found = mirrordp.Mechanism.calibrate(**options, noise=made_for)
        assert 0.98 < found.epsilon(1e-3) <= 1.0
        plain = mirrordp.Mechanism.calibrate(**options)
        assert found.noise_multiplier > 1.05 * plain.noise_multiplier


MECHANISM = tools.mechanism(noise=SecureGaussianNoise(num_params=3))


def run(mechanism=MECHANISM, **options):
    return tools.train(
        tools.squared_distance,
        jnp.zeros(3),
        mirrordp.PrivateData(tools.features()),
        mechanism=mechanism,
        optimizer=tools.recorder(12),
        **options,
    )


class TestTraining:
    def test_two_runs_share_nothing_and_have_the_stated_noise(self):
        granularity = MECHANISM.noise.granularity(MECHANISM.noise_stddev)
        sums = np.stack([8.0 * tools.released_gradients(run()) for _ in range(20)])
        steps = sums.astype(np.float64) / granularity
        np.testing.assert_array_equal(steps, np.rint(steps))
        # All three coordinates: single ones of 240 draws meet on this lattice now and then.
        assert len(np.unique(sums.reshape(240, 3), axis=0)) == 240
        # Differences of runs: noise of two, and batches that vary by less than 1. Five standard
        # errors of 360 draws are 19%.
        spread = np.std(sums[::2] - sums[1::2]) / math.sqrt(2)
        assert 3.3 < spread < 4.9

    def test_poisson_batches(self):
        draws = list(tools.mechanism(
            num_steps=600, noise=SecureGaussianNoise(num_params=3)
        ).batches(40, SECURE))  # fmt: skip
        table = np.zeros((600, 40), bool)
        for row, draw in zip(table, draws, strict=True):
            row[draw] = True
        assert statistical.accepts_frequency(int(table.sum()), table.size, 0.2)
        assert not statistical.accepts_frequency(int(table.sum()), table.size, 0.24)
        assert statistical.accepts_equal_frequencies(table.sum(axis=0), 600, 0.2)
        sizes = table.sum(axis=1)
        assert statistical.accepts_equal_frequencies(sizes, 40, 0.2)
        assert not statistical.accepts_equal_frequencies(np.full(600, 8), 40, 0.2)
        assert statistical.accepts_uncorrelated(table[1:], table[:-1])

    def test_fixed_size_and_full_batches(self):
        fixed = mirrordp.privacy.FixedSizeSampling(batch_size=8, num_examples=40)
        for sampling, size in ((fixed, 8), (mirrordp.privacy.FullBatch.of(40), 40)):
            draws = list(
                tools.mechanism(
                    sampling=sampling,
                    adjacency=Adjacency.REPLACE,
                    noise=SecureGaussianNoise(num_params=3),
                ).batches(40, SECURE)
            )
            assert all(len(set(draw.tolist())) == size for draw in draws)

    def test_federated_rounds(self):
        mechanism = tools.mechanism(noise=SecureGaussianNoise(num_params=3), unit="user")
        users = mirrordp.PrivateClients.from_users(
            list(tools.features()[:, None]), max_examples_per_user=1
        )

        def rounds(**options):
            return tools.federated_train(
                tools.squared_distance,
                jnp.zeros(3),
                users,
                mechanism=mechanism,
                client_learning_rate=1.0,
                **options,
            )

        first, second = (np.asarray(tools.last(rounds())[0].params) for _ in range(2))
        assert np.all(np.isfinite(first))
        assert np.all(first != second)
        with pytest.raises(ValueError, match="cannot be repeated, got seed=3"):
            rounds(seed=3)

    def test_the_report_says_so(self):
        found = mirrordp.RunReport.of(MECHANISM, 1e-5)
        assert "secure" in found.noise
        assert "AES-256" in found.privacy_card()
        assert "pseudo-random" not in found.privacy_card()
        assert "there is no seed" in found.to_dict()["randomness"]
        again = mirrordp.RunReport.from_dict(found.to_dict())
        assert again.is_secure
        assert again == found
        page = report_page(again, run="run")
        assert "AES-256" in page
        assert "as charged, for the lattice" in page
        plain = mirrordp.RunReport.of(tools.mechanism(), 1e-5)
        assert not plain.is_secure
        assert plain.charged_multiplier is None
        assert "charged_multiplier" not in plain.to_dict()

    def test_epsilon_over_steps_includes_the_lattice(self):
        noise = SecureGaussianNoise(num_params=10_000, bits=10)
        mechanism = tools.mechanism(noise=noise, sampling=mirrordp.privacy.FullBatch.of(40))
        found = mirrordp.RunReport.of(mechanism, 1e-5)
        assert found.charged_multiplier < 0.8 * found.noise_multiplier
        for steps, epsilon in found.epsilon_over_steps:
            event = accounting.full_batch_event(found.charged_multiplier, num_steps=steps)
            stated = accounting.epsilon(event, 1e-5, adjacency=Adjacency.ZERO_OUT).epsilon
            assert epsilon == pytest.approx(stated, rel=1e-9)
        assert found.epsilon_over_steps[-1][1] == found.epsilon
        unrounded = tools.mechanism(sampling=mirrordp.privacy.FullBatch.of(40)).epsilon(1e-5)
        assert found.epsilon > 1.2 * unrounded

    def test_an_interruption_while_noise_is_drawn_stays_one(self, monkeypatch):
        """JAX wraps what its callbacks raise into an error of its own."""

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(SecureRandom, "rounded_gaussian", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(run())
        add_noise = linear.NoiseStream(secure_descent(), 600, jax.random.key(0))
        with pytest.raises(KeyboardInterrupt):
            add_noise(np.zeros(600))

    def test_made_for_a_model(self):
        params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2), "scale": jnp.zeros(())}
        assert SecureGaussianNoise.of(params).num_params == 9
        trainable = {"w": True, "b": False, "scale": True}
        found = SecureGaussianNoise.of(params, trainable=trainable, bits=22)
        assert found == SecureGaussianNoise(num_params=7, bits=22)


def secure_descent(**options):
    return tools.mechanism(
        sampling=mirrordp.privacy.FullBatch.of(40),
        noise=SecureGaussianNoise(num_params=600),
        **options,
    )


def private_model(**options):
    return PrivateLinearRegression(1.0, num_steps=20, **options)


class TestEstimators:
    @pytest.fixture
    def data(self):
        rng = np.random.default_rng(0)
        x, public = rng.normal(size=(300, 3)), rng.normal(size=(50, 3))
        weights = np.array([1.0, -1.0, 2.0])
        return x, x @ weights + rng.normal(size=300), public, public @ weights

    def test_a_descent_adds_lattice_noise_of_the_stated_scale(self):
        """What the lattice costs was charged for σC: not for a lattice in other units."""
        mechanism = secure_descent(l2_clip_norm=0.7)
        add_noise = linear.NoiseStream(mechanism, 600, jax.random.key(0))
        sums = np.random.default_rng(0).normal(size=(60, 600))
        noisy = np.stack([add_noise(row) for row in sums])
        steps = noisy / mechanism.noise.granularity(mechanism.noise_stddev)
        np.testing.assert_array_equal(steps, np.rint(steps))
        assert statistical.accepts_stddev(noisy - sums, 2.8)
        for factor in (2 / 3, 0.95, 1.05, 3 / 2):
            assert not statistical.accepts_stddev(noisy - sums, 2.8 * factor)
        assert statistical.accepts_uncorrelated((noisy - sums)[1:], (noisy - sums)[:-1])

    def test_a_fit(self, data):
        first = private_model(secure=True).fit(*data)
        with pytest.warns(UserWarning, match="one of 2 private fits"):
            second = private_model(secure=True).fit(*data)
        assert np.all(first.coef_ != second.coef_)
        found = first.privacy_
        assert found.is_secure
        assert 0.98 < found.epsilon <= 1.0
        assert found.charged_multiplier < found.noise_multiplier
        plain = private_model().fit(*data).privacy_
        assert found.noise_multiplier > plain.noise_multiplier * 0.995
        event = accounting.full_batch_event(found.charged_multiplier, num_steps=20)
        stated = accounting.epsilon(event, 1e-5, adjacency=Adjacency.ZERO_OUT).epsilon
        assert found.epsilon == pytest.approx(stated, rel=1e-9)

    def test_what_cannot_be_repeated_is_refused_before_anything_is_charged(self, data, tmp_path):
        rows = mirrordp.PrivateData(data[0])
        with mirrordp.Budget.create(tmp_path / "b", epsilon=3, delta=1e-5, data=rows) as budget:
            with pytest.raises(ValueError, match="cannot be repeated, got random_state=3"):
                private_model(secure=True, random_state=3).fit(*data, spend=budget)
            with pytest.raises(ValueError, match="secure noise cannot be repeated"):
                private_model(secure=True).fit(
                    *data, spend=budget, checkpoint=mirrordp.Checkpoint(tmp_path / "run")
                )
            assert budget.status.charges == 0
            with pytest.raises(TypeError, match="secure must be bool"):
                private_model(secure="yes").fit(*data)
            private_model(secure=True).fit(*data, spend=budget)
            assert budget.status.charges == 1
        assert not (tmp_path / "run").exists()

    def test_without_the_library(self, data, monkeypatch):
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
        with pytest.raises(ImportError, match=r"pip install 'mirrordp\[secure\]'"):
            private_model(secure=True).fit(*data)


class TestCommandLine:
    @pytest.fixture
    def files(self, tmp_path):
        return two_tables(tmp_path)

    def test_fit(self, files, tmp_path, capsys):
        assert cli.main([*fit_options(files), "--secure", "--json"]) == 0
        assert "secure" in json.loads(capsys.readouterr().out)["noise"]
        assert not (tmp_path / "model.run").exists()
        assert mirrordp.RunReport.read(files["out"]).is_secure
        assert "AES-256" in (files["out"] / "privacy_card.md").read_text()

    @pytest.mark.parametrize("other", [["--seed", "3"], ["--resume"], ["--keep-checkpoint"]])
    def test_what_cannot_be_repeated_is_refused(self, files, capsys, other):
        assert cli.main([*fit_options(files), "--secure", *other]) == 2
        message = capsys.readouterr().err
        assert f"expected --secure or {other[0]}, got both" in message
        assert "cannot be repeated" in message
        assert not files["out"].exists()

    def test_an_interrupted_run_says_what_was_charged(self, files, tmp_path, capsys, monkeypatch):
        mirrordp.Budget.create(tmp_path / "b", epsilon=3, delta=1e-4, data=files["private"]).close()

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(linear, "private_descent", interrupt)
        assert cli.main([*fit_options(files), "--secure"]) == 130
        assert "Nothing was charged" in capsys.readouterr().err
        assert cli.main([*fit_options(files, epsilon=1, budget=tmp_path / "b"), "--secure"]) == 130
        message = capsys.readouterr().err
        assert "The run was charged, and a secure run cannot be resumed" in message
        assert "--resume" not in message
        assert mirrordp.Budget.status_of(tmp_path / "b").charges == 1

    def test_without_the_library(self, files, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
        assert cli.main([*fit_options(files), "--secure"]) == 2
        assert "run: pip install 'mirrordp[secure]'" in capsys.readouterr().err


class TestRefused:
    def test_a_seed(self):
        with pytest.raises(ValueError, match="cannot be repeated, got seed=3"):
            run(seed=3)

    def test_a_checkpoint(self, tmp_path):
        """A resumed run repeats steps without charging them again; secure noise cannot repeat."""
        with pytest.raises(ValueError, match="secure noise cannot be repeated"):
            run(checkpoint=mirrordp.Checkpoint(tmp_path))

    def test_an_ordinary_generator_and_the_reverse(self):
        with pytest.raises(TypeError, match="rng must be SecureRandom, got Generator"):
            MECHANISM.batches(40, np.random.default_rng(0))
        with pytest.raises(TypeError, match="rng must be Generator, got SecureRandom"):
            tools.mechanism().batches(40, SECURE)
        assert isinstance(randomness(None, secure=True)[0], SecureRandom)

    def test_a_model_larger_than_the_noise_was_made_for(self):
        ledger = mirrordp.Ledger(Adjacency.ZERO_OUT)
        mechanism = tools.mechanism(noise=SecureGaussianNoise(num_params=2))
        with pytest.raises(ValueError, match="num_params=2 coordinates, got 3"):
            next(run(mechanism, spend=ledger))
        assert ledger.epsilon(1e-5).epsilon == 0

    def test_no_noise(self):
        with pytest.raises(ValueError, match="noise_multiplier must be a positive finite number"):
            tools.mechanism(noise=SecureGaussianNoise(num_params=3), noise_multiplier=0.0)

    def test_cyclic_sampling(self):
        cyclic = mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
            8, num_examples=40, num_groups=3
        )
        with pytest.raises(UnsupportedError, match="got cyclic Poisson sampling"):
            tools.mechanism(sampling=cyclic, noise=SecureGaussianNoise(num_params=3))
        with pytest.raises(TypeError, match="no secure form"):
            cyclic.batches(40, 3, SECURE)

    def test_a_sweep(self):
        from mirrordp.training.sweep import SweepRun

        with pytest.raises(ValueError, match="has no secure mode"):
            tools.train_sweep(
                tools.squared_distance,
                jnp.zeros(3),
                mirrordp.PrivateData(tools.features()),
                runs=[SweepRun()],
                mechanism=MECHANISM,
                optimizer=tools.sgd(0.1),
            )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_params": 0}, "num_params must be a positive integer"),
            ({"num_params": 3, "bits": 25}, "bits must be at most 24"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            SecureGaussianNoise(**options)

    def test_without_the_library(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
        with pytest.raises(ImportError, match=r"pip install 'mirrordp\[secure\]'"):
            SecureGaussianNoise(num_params=3)
