"""Noise of the right scale, fresh at each step, independent of sampling; correlated: C⁻¹z."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp import GaussianNoise
from mirrordp.privacy import BandedNoise, CyclicPoissonSampling, UnsupportedError
from mirrordp.privacy.sums import ExactSum
from mirrordp.training.engine import randomness
from tests import statistical, tools

ZEROS = {"a": np.zeros((40, 25), np.float32), "b": np.zeros(500, np.float32)}
COEFFICIENTS = (1.0, 0.5, 0.3)
ROWS, PADDING = jnp.zeros((2, 500)), jnp.zeros(2, bool)


@functools.cache
def stream(noise, stddev: float, num_steps: int, seed: int = 0) -> np.ndarray:
    """Noise of `num_steps` steps on sums of zero, as a table [steps, coordinates]."""

    def step(state, _):
        noisy, state = noise.add(ZEROS, state, stddev)
        return state, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(noisy)])

    start = noise.init(jax.random.key(seed), ZEROS)
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, start, length=num_steps)[1])())


def noisy(noise, sums, stddev: float = 1.0):
    """The first release of a stream of sums."""
    return noise.add(sums, noise.init(jax.random.key(0), sums), stddev)[0]


def assert_scale(samples, stddev):
    """Accepted at the right scale, rejected at 2/3 and 3/2 of it, and at 2% off."""
    assert statistical.accepts_stddev(samples, stddev)
    for factor in (2 / 3, 0.95, 1.05, 3 / 2):
        assert not statistical.accepts_stddev(samples, factor * stddev)


class TestGaussian:
    @pytest.mark.parametrize("stddev", [0.3, 1.0, 25.0])
    def test_scale(self, stddev):
        samples = stream(GaussianNoise(), stddev, 20)
        assert_scale(samples, stddev)
        assert_scale(samples[:, :1000], stddev)
        assert_scale(samples[:, 1000:], stddev)

    @pytest.mark.parametrize("make", [jnp.asarray, lambda sums: ExactSum.of(sums, 1e7)])
    def test_large_sums_do_not_swallow_noise(self, make):
        """Above 2²⁴ float32 has gaps of two: what is rounded must be the sum and all of its noise.

        Of four parts of half the size, added one by one, 84% would leave the sum as it was.
        """
        large = 1.5 * 2**24
        sums = make(jnp.full(20_000, large))
        released = jax.jit(functools.partial(noisy, GaussianNoise()))(sums)
        share = np.mean(np.asarray(released) == large)
        assert share == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.015)

    def test_noise_near_the_grain_of_sums_is_refused(self):
        tools.mechanism(noise_multiplier=0.0)
        tools.mechanism(noise_multiplier=2.0**-20)
        with pytest.raises(ValueError, match=r"must be 0 .* or at least 1e-06, got 1e-07"):
            tools.mechanism(noise_multiplier=1e-7)

    @pytest.mark.parametrize("noise", [GaussianNoise(), BandedNoise(COEFFICIENTS)], ids=str)
    def test_complex_sums_are_refused(self, noise):
        """Real noise leaves the imaginary part as it was."""
        state, sums = noise.init(jax.random.key(0), jnp.ones(3)), jnp.ones(3, jnp.complex64)
        with pytest.raises(TypeError, match="expected real sums, got complex64"):
            noise.add(sums, state, 1.0)
        with pytest.raises(TypeError, match="expected real sums, got complex64"):
            noise.init(jax.random.key(0), sums)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "bool"])
    @pytest.mark.parametrize("noise", [GaussianNoise(), BandedNoise(COEFFICIENTS)], ids=str)
    def test_sums_of_few_digits_are_refused(self, noise, dtype):
        """bfloat16 has gaps of 4 at 1000: each of the four parts of the noise is rounded away."""
        sums = {"fine": jnp.ones(2), "coarse": jnp.full(3, 1000, dtype)}
        state = noise.init(jax.random.key(0), jax.tree.map(lambda leaf: jnp.ones(leaf.shape), sums))
        with pytest.raises(TypeError, match=f"expected float32 or wider, got {dtype}"):
            noise.add(sums, state, 1.0)
        with pytest.raises(TypeError, match=f"expected float32 or wider, got {dtype}"):
            noise.init(jax.random.key(0), sums)

    def test_is_normal(self):
        samples = stream(GaussianNoise(), 1.0, 20)
        assert statistical.accepts_normal(samples, 1.0)
        uniform = np.random.default_rng(0).uniform(-math.sqrt(3), math.sqrt(3), samples.size)
        assert not statistical.accepts_normal(uniform, 1.0)

    def test_tails_are_those_of_a_normal(self):
        """A tail cut at 5.2 standard deviations hands δ to whoever sees an output beyond it."""
        noise, zeros = GaussianNoise(), jnp.zeros(500_000)

        @jax.jit
        def extremes(seed):
            drawn, _ = noise.add(zeros, noise.init(jax.random.key(seed), zeros), 1.0)
            return drawn.min(), drawn.max()

        # Two keys that are known to reach far, so that the test is short; others if JAX draws
        # differently one day. A normal passes 5.25 on either side in 1.5e8 draws except with
        # probability 1e-5.
        low = high = 0.0
        for seed in (87, 280, *range(300)):
            lowest, highest = extremes(seed)
            low, high = min(low, float(lowest)), max(high, float(highest))
            if low < -5.25 and high > 5.25:
                break
        assert high > 5.25
        assert low < -5.25

    def test_no_reuse_between_steps_or_leaves(self):
        samples = stream(GaussianNoise(), 1.0, 20)
        for lag in (1, 2, 7):
            assert statistical.accepts_uncorrelated(samples[:-lag], samples[lag:])
        assert statistical.accepts_uncorrelated(samples[:, :500], samples[:, 1000:])
        # A mechanism that reuses a tenth of its last noise is caught.
        reused = samples[1:] + 0.1 * samples[:-1]
        assert not statistical.accepts_uncorrelated(reused, samples[:-1])

    def test_one_band_is_gaussian_noise(self):
        for coefficient in (1.0, 4.0):
            samples = stream(BandedNoise((coefficient,)), 2.0, 20)
            assert_scale(samples, 2.0)
            assert statistical.accepts_uncorrelated(samples[:-1], samples[1:])

    def test_narrow_parameters_get_single_precision_noise(self):
        """Noise in bfloat16 would have gaps of 1/256; the sum is widened before."""
        step = mirrordp.TrainStep(tools.squared_distance, tools.mechanism(), tools.sgd(0.0))
        state = step.init(jnp.zeros(1000, jnp.bfloat16), jax.random.key(0))
        zero_sum = step.zero_sum(state).total
        assert zero_sum.floats().dtype == jnp.float32
        released, _ = step.mechanism.add_noise(zero_sum, state.noise_state)
        assert released.dtype == jnp.float32
        assert len(np.unique(released)) > 990

    @pytest.mark.parametrize("noise", [GaussianNoise(), BandedNoise(COEFFICIENTS)])
    def test_small_leaves_share_one_draw(self, noise):
        """A kernel for each leaf made a small network take half a minute to compile on a CPU."""
        tree = [jnp.zeros((3, size)) for size in range(1, 9)]
        program = jax.make_jaxpr(functools.partial(noisy, noise))(tree)
        assert str(program).count(" erf_inv ") == 1

    def test_every_leaf_gets_its_own_back(self, monkeypatch):
        monkeypatch.setattr("mirrordp.privacy.noise._LARGE_LEAF", 50)
        shapes = {"a": (3, 4), "large": (60, 2), "b": (), "empty": (0, 3), "c": (5,)}
        sums = {name: jnp.full(shape, 10.0 + i) for i, (name, shape) in enumerate(shapes.items())}
        with jax.enable_x64(True):
            sums |= {"wide": jnp.full((2, 2), 20.0), "also": jnp.full(3, 30.0)}
            released = noisy(GaussianNoise(), sums, 1e-3)
        assert {str(leaf.dtype) for leaf in released.values()} == {"float32", "float64"}
        assert jax.tree.map(jnp.shape, released) == jax.tree.map(jnp.shape, sums)
        for name, leaf in released.items():
            assert leaf.dtype == sums[name].dtype
            np.testing.assert_allclose(leaf, sums[name], atol=0.01)
        zeros = jax.tree.map(jnp.zeros_like, {name: sums[name] for name in shapes})
        drawn = noisy(GaussianNoise(), zeros, 1e-3)
        drawn = np.concatenate([np.ravel(leaf) for leaf in drawn.values()])
        assert len(np.unique(drawn)) == len(drawn) == 138  # no two coordinates share their noise

    def test_double_precision(self):
        with jax.enable_x64(True):
            drawn = noisy(GaussianNoise(), jnp.zeros(1000))
            assert drawn.dtype == jnp.float64
            # Drawn in double precision, not widened afterwards.
            assert np.any(np.asarray(drawn, np.float32) != np.asarray(drawn))


class TestIndependenceOfSampling:
    def test_keys_and_draws_come_from_different_streams(self):
        rng, keys = randomness(0)
        data = [np.asarray(jax.random.key_data(key)).tolist() for key in keys]
        assert len({tuple(words) for words in data}) == 3
        # Noise drawn with the key of one run is not a function of its draws: correlate over seeds.
        noise, sizes = [], []
        sampler = tools.poisson(20, rows=200)
        normal = jax.jit(lambda key: jax.random.normal(key, (4,)))
        for seed in range(400):
            rng, keys = randomness(seed)
            noise.append(np.asarray(normal(keys.noise)))
            sizes.append([len(draw) for draw in sampler.batches(200, 4, rng)])
        noise, sizes = np.array(noise), np.array(sizes)
        assert statistical.accepts_uncorrelated(noise, sizes)
        assert not statistical.accepts_uncorrelated(noise + sizes, sizes)

    def test_no_seed_means_fresh_entropy(self):
        states = {
            tuple(np.asarray(jax.random.key_data(randomness(None)[1].noise)).tolist())
            for _ in range(5)
        }
        assert len(states) == 5

    def test_the_key_has_no_default(self):
        with pytest.raises(TypeError, match="key"):
            GaussianNoise().init(like=jnp.zeros(3))
        with pytest.raises(TypeError, match="key"):
            tools.mechanism().init_noise(like=jnp.zeros(3))


def toeplitz(coefficients, size):
    matrix = np.zeros((size, size))
    for band, value in enumerate(coefficients):
        matrix += value * np.eye(size, k=-band)
    return matrix


class TestBanded:
    def test_covariance_is_that_of_c_inverse_z(self):
        steps, stddev = 8, 1.5
        samples = stream(BandedNoise(COEFFICIENTS), stddev, steps)
        inverse = np.linalg.inv(toeplitz(COEFFICIENTS, steps))
        scale = stddev * math.hypot(*COEFFICIENTS)
        covariance = scale**2 * inverse @ inverse.T
        assert statistical.accepts_covariance(samples.T, covariance)
        assert not statistical.accepts_covariance(samples.T, np.diag(np.diag(covariance)))
        assert not statistical.accepts_covariance(samples.T, (2 / 3) ** 2 * covariance)
        assert not statistical.accepts_covariance(samples.T, 1.5**2 * covariance)
        # Without the column norm of C, the guarantee would be false and the scale too small.
        assert not statistical.accepts_covariance(samples.T, stddev**2 * inverse @ inverse.T)

    def test_z_has_the_stated_scale_for_one_participation(self):
        """Multiplying by C gives back z; one record moves it by ‖c‖·C at most, and z has σC‖c‖."""
        steps, stddev = 8, 1.5
        samples = stream(BandedNoise(COEFFICIENTS), stddev, steps)
        z = toeplitz(COEFFICIENTS, steps) @ samples
        assert_scale(z / math.hypot(*COEFFICIENTS), stddev)
        for lag in (1, 2, 3):
            assert statistical.accepts_uncorrelated(z[:-lag], z[lag:])
        assert not statistical.accepts_uncorrelated(samples[:-1], samples[1:])

    def test_unamplified_sensitivity(self):
        """With separation ≥ bands, k participations move C·sums by sqrt(k)·‖c‖: k Gaussians."""
        steps, groups = 12, 4
        matrix = toeplitz(COEFFICIENTS, steps)
        column = math.hypot(*COEFFICIENTS)
        for group in range(groups):
            signs = np.zeros(steps)
            signs[group::groups] = np.random.default_rng(group).choice([-1, 1], 3)
            moved = np.linalg.norm(matrix @ signs)
            assert moved <= math.sqrt(3) * column * (1 + 1e-12)
        # One group fewer than bands and the participations overlap: more than the event says.
        overlapping = np.zeros(steps)
        overlapping[::2] = 1
        assert np.linalg.norm(matrix @ overlapping) > math.sqrt(6) * column

    def test_optimal_coefficients_cancel_in_prefix_sums(self):
        noise = BandedNoise.optimal(num_steps=16, num_bands=4)
        assert noise.num_bands == 4
        inverse = np.linalg.inv(toeplitz(noise.coefficients, 16)) * math.hypot(*noise.coefficients)
        prefix = np.tril(np.ones((16, 16)))
        assert np.linalg.norm(prefix @ inverse) < 0.9 * np.linalg.norm(prefix)

    @pytest.mark.parametrize("bad", [(), (math.nan,), (1.0, math.inf)])
    def test_coefficients_must_be_finite(self, bad):
        with pytest.raises(ValueError, match="coefficients must be finite numbers, at least one"):
            BandedNoise(bad)

    @pytest.mark.parametrize("bad", [0.0, -1.0])
    def test_the_first_coefficient_must_be_positive(self, bad):
        with pytest.raises(ValueError, match="must be a positive finite number"):
            BandedNoise((bad, 1.0))

    def test_more_bands_than_steps(self):
        with pytest.raises(ValueError, match="num_bands must be at most num_steps=3, got 4"):
            BandedNoise.optimal(num_steps=3, num_bands=4)


class TestGrowth:
    """Noise that grows without bound is lost, together with the guarantee, in its own rounding."""

    @pytest.mark.parametrize(
        ("coefficients", "steps"), [((1.0, 2.0), 60), ((1.0, 1.05), 400), ((3.0, -9.0, 1.0), 30)]
    )
    def test_without_bound_is_refused(self, coefficients, steps):
        with pytest.raises(UnsupportedError, match="256 times"):
            cyclic(BandedNoise(coefficients), steps)

    def test_of_good_coefficients_is_small(self):
        for bands in (2, 8):
            noise = BandedNoise.optimal(200, bands)
            assert 1 < noise.growth(200) < 4
            cyclic(noise, 200)

    def test_is_that_of_the_noise(self):
        noise = BandedNoise((2.0, 1.0))
        row = 0.5 * (-0.5) ** np.arange(20)
        assert noise.growth(20) == pytest.approx(math.sqrt(5) * np.linalg.norm(row))
        spread = np.std([stream(noise, 1.0, 20, seed=seed)[-1] for seed in range(60)])
        assert abs(spread / noise.growth(20) - 1) < 0.1
        assert BandedNoise((1.0,)).growth(5) == 1.0


def cyclic(noise, steps):
    sampling = CyclicPoissonSampling(
        sampling_prob=0.5, num_groups=8, expected_batch_size=5.0, num_examples=80
    )
    return mirrordp.Mechanism(
        sampling=sampling, l2_clip_norm=1.0, noise_multiplier=2.0, num_steps=steps, noise=noise
    )


BANDED = BandedNoise(COEFFICIENTS)


class TestWhereCorrelatedNoiseIsRefused:
    @pytest.mark.parametrize(
        ("sampling", "why"),
        [
            (tools.poisson(), "drawn in neighbouring steps"),
            (mirrordp.privacy.FullBatch.of(40), "every record takes part in every step"),
        ],
        ids=["Poisson", "full batch"],
    )
    def test_without_separation(self, sampling, why):
        with pytest.raises(
            UnsupportedError, match=f"{why}.*CyclicPoissonSampling with num_groups=3"
        ):
            tools.mechanism(sampling=sampling, noise=BANDED)

    def test_fixed_size(self):
        with pytest.raises(UnsupportedError, match="drawn in neighbouring steps"):
            tools.mechanism(
                sampling=mirrordp.privacy.FixedSizeSampling(batch_size=8, num_examples=40),
                adjacency=mirrordp.Adjacency.REPLACE,
                noise=BANDED,
            )

    def test_fewer_groups_than_bands(self):
        cyclic = CyclicPoissonSampling.for_batch_size(8, num_examples=40, num_groups=2)
        with pytest.raises(UnsupportedError, match="needs at least 3 groups, got num_groups=2"):
            tools.mechanism(sampling=cyclic, noise=BANDED)

    @pytest.mark.parametrize("groups", [3, 4])
    @pytest.mark.parametrize("share", [0.5, 1.0], ids=["amplified", "unamplified"])
    def test_enough_groups_are_accepted(self, groups, share):
        size = 40 // groups
        cyclic = CyclicPoissonSampling.for_batch_size(
            share * size, num_examples=40, num_groups=groups
        )
        found = tools.mechanism(sampling=cyclic, noise=BANDED)
        assert found.epsilon(1e-3) == tools.mechanism(sampling=cyclic).epsilon(1e-3)

    def test_skipped_steps(self):
        cyclic = CyclicPoissonSampling.for_batch_size(8, num_examples=40, num_groups=3)
        data = mirrordp.PrivateData(tools.features())
        public = mirrordp.PublicData(tools.features(seed=1))
        ledger = mirrordp.Ledger(mirrordp.Adjacency.ZERO_OUT)
        with pytest.raises(ValueError, match="correlated noise needs every step to be a private"):
            tools.train(
                tools.squared_distance,
                jnp.zeros(3),
                data,
                public,
                mechanism=tools.mechanism(sampling=cyclic, noise=BANDED),
                optimizer=tools.sgd(0.1),
                alpha=[1.0] * 11 + [0.0],
                spend=ledger,
            )
        assert ledger.epsilon(1e-5).epsilon == 0

    def test_a_noise_of_unknown_making_is_refused(self):
        """Its cost is not analysed, and `train` relies on the key living in its state."""

        class Silent:
            num_bands = 1

            def init(self, key, like):
                return GaussianNoise().init(key, like)

            def add(self, total, state, stddev, *, weight=None):
                return GaussianNoise().add(total, state, 0.0, weight=weight)

        with pytest.raises(TypeError, match="noise must be GaussianNoise or BandedNoise"):
            tools.mechanism(noise=Silent())


class TestOwnLoop:
    """`step(state, batch, ...)` by hand, where α may be 0 on some turns."""

    STEPS = 8

    @classmethod
    def step(cls, noise):
        mechanism = mirrordp.Mechanism(
            sampling=CyclicPoissonSampling.for_batch_size(2, num_examples=8, num_groups=3),
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            num_steps=cls.STEPS,
            noise=noise,
        )
        return mirrordp.TrainStep(lambda w, x: w @ x, mechanism, optax.sgd(1.0))

    @classmethod
    def releases(cls, noise, alphas):
        """Noise alone: the rows are zero, the public ones too."""
        step = cls.step(noise)
        run = jax.jit(lambda state, alpha: step(state, ROWS, PADDING, ROWS, alpha=alpha)[0])
        state, found = step.init(jnp.zeros(500), jax.random.key(0)), []
        for alpha in alphas:
            before, state = state, run(state, alpha)
            found.append(np.asarray(state.params - before.params))
        return np.array(found)

    @pytest.mark.parametrize("private", [[0, 3, 6], [1, 2, 7], [5]])
    def test_correlated_noise_keeps_the_turns_of_the_sampling(self, private):
        """Else the turns of one record, three steps apart, would be neighbours in the noise."""
        noise = BandedNoise(COEFFICIENTS)
        alphas = np.isin(np.arange(self.STEPS), private).astype(np.float32)
        always, found = (self.releases(noise, a) for a in (np.ones(self.STEPS), alphas))
        np.testing.assert_allclose(found[private], always[private], atol=1e-5)
        assert not found[alphas == 0].any()
        # Independent noise is fresh wherever it is drawn, and none is drawn for nothing.
        always, found = (self.releases(GaussianNoise(), a) for a in (np.ones(8), alphas))
        np.testing.assert_allclose(found[private], always[: len(private)], atol=1e-5)

    @pytest.mark.parametrize("alpha", [0, 0.0, 1e-39, -1.0, math.nan, jnp.zeros([])])
    def test_an_alpha_of_zero_is_refused_where_it_is_known(self, alpha):
        step = self.step(BandedNoise(COEFFICIENTS))
        state = step.init(jnp.zeros(500), jax.random.key(0))
        with pytest.raises(ValueError, match="every step to be a private one"):
            step(state, ROWS, PADDING, ROWS, alpha=alpha)
