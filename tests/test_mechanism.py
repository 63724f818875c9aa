"""The one object that couples sampler, clip, noise and event."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mirrordp
from mirrordp import Adjacency, Ledger, Mechanism, PoissonSampling
from mirrordp.privacy import (
    Accountant,
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullBatch,
    UnsupportedError,
)
from tests import statistical, tools

CYCLIC = CyclicPoissonSampling.for_batch_size(5, num_examples=40, num_groups=4)
SAMPLINGS = {
    "Poisson": (tools.poisson(), Adjacency.ZERO_OUT),
    "Poisson, secret n": (
        PoissonSampling(sampling_prob=0.2, expected_batch_size=8),
        Adjacency.ADD_REMOVE,
    ),
    "cyclic": (CYCLIC, Adjacency.ZERO_OUT),
    "fixed size": (FixedSizeSampling(batch_size=8, num_examples=40), Adjacency.REPLACE),
    "full batch": (FullBatch.of(40), Adjacency.REPLACE),
}
ANY_SAMPLING = pytest.mark.parametrize(("sampling", "adjacency"), SAMPLINGS.values(), ids=SAMPLINGS)


class TestCost:
    @ANY_SAMPLING
    def test_the_cost_is_that_of_the_sampler(self, sampling, adjacency):
        found = tools.mechanism(sampling=sampling, adjacency=adjacency, noise_multiplier=3.0)
        assert found.event == sampling.event(3.0, 12)
        guarantee = found.guarantee(1e-3)
        assert guarantee.epsilon == found.epsilon(1e-3)
        assert guarantee.adjacency is adjacency
        assert guarantee.delta == 1e-3

    @ANY_SAMPLING
    def test_no_steps_cost_nothing_and_the_cost_grows(self, sampling, adjacency):
        found = tools.mechanism(sampling=sampling, adjacency=adjacency, noise_multiplier=3.0)
        values = [found.epsilon(1e-3, num_steps=steps) for steps in (0, 1, 5, 12)]
        assert values[0] == 0
        assert values == sorted(values)
        assert values[1] < values[3]

    def test_the_clip_norm_scales_the_noise_and_leaves_epsilon(self):
        small, large = tools.mechanism(l2_clip_norm=0.1), tools.mechanism(l2_clip_norm=10.0)
        assert small.epsilon(1e-3) == large.epsilon(1e-3)
        assert (small.noise_stddev, large.noise_stddev) == pytest.approx((0.4, 40.0))

        def noise(mechanism):
            zeros = jnp.zeros(20_000)
            noisy, _ = mechanism.add_noise(zeros, mechanism.init_noise(jax.random.key(0), zeros))
            return np.asarray(mechanism.mean(noisy))

        assert statistical.accepts_stddev(noise(small), 0.4 / 8)
        assert statistical.accepts_stddev(noise(large), 40.0 / 8)
        assert not statistical.accepts_stddev(noise(large), 4.0 / 8)

    def test_replace_at_the_same_noise_costs_more(self):
        zero_out = tools.mechanism()
        replace = dataclasses.replace(zero_out, adjacency=Adjacency.REPLACE)
        assert replace.noise_stddev == zero_out.noise_stddev
        assert replace.epsilon(1e-3) > 1.3 * zero_out.epsilon(1e-3)

    def test_the_accountant_is_named(self):
        assert tools.mechanism().guarantee(1e-3).accountant is Accountant.PLD
        by_rdp = tools.mechanism(accountant=Accountant.RDP)
        assert by_rdp.guarantee(1e-3).accountant is Accountant.RDP
        assert by_rdp.epsilon(1e-3) > tools.mechanism().epsilon(1e-3)

    def test_orders(self):
        few = tools.mechanism(accountant=Accountant.RDP, orders=(2.0, 4.0))
        assert few.epsilon(1e-3) > tools.mechanism(accountant=Accountant.RDP).epsilon(1e-3)
        assert "2 orders" in few.guarantee(1e-3).method

    def test_the_mean_divides_by_the_public_constant(self):
        found = tools.mechanism(sampling=PoissonSampling(sampling_prob=0.2, expected_batch_size=7))
        np.testing.assert_allclose(found.mean({"a": jnp.full(2, 14.0)})["a"], [2.0, 2.0])

    def test_clipped_grad_uses_the_clip_norm(self):
        found = tools.mechanism(l2_clip_norm=0.3).clipped_grad(tools.squared_distance)
        assert found.l2_clip_norm == 0.3
        assert found.sensitivity(Adjacency.REPLACE) == 0.6

    def test_is_a_hashable_value(self):
        assert hash(tools.mechanism()) == hash(tools.mechanism())
        assert tools.mechanism() == tools.mechanism()
        listed = tools.mechanism(accountant=Accountant.RDP, orders=[2.0, 4.0])
        assert hash(listed) == hash(tools.mechanism(accountant=Accountant.RDP, orders=(2.0, 4.0)))


class TestEventBetween:
    @ANY_SAMPLING
    @settings(max_examples=10, deadline=None)
    @given(cuts=st.sets(st.integers(1, 11)))
    def test_blocks_add_up(self, sampling, adjacency, cuts):
        """Charging block by block is charging the whole, at every moment."""
        found = tools.mechanism(sampling=sampling, adjacency=adjacency)
        ledger, edges = Ledger(adjacency), [0, *sorted(cuts), 12]
        for start, stop in itertools.pairwise(edges):
            ledger.charge(found.event_between(start, stop))
            assert ledger.event == found.event_between(0, stop)
        assert ledger.event == found.event

    def test_cyclic_rounds_are_charged_when_they_are_entered(self):
        found = tools.mechanism(sampling=CYCLIC)
        counts = [getattr(found.event_between(start, start + 1), "count", 0) for start in range(12)]
        assert counts == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]

    def test_more_steps_than_made_for(self):
        found = tools.mechanism()
        with pytest.raises(ValueError, match="made for 12 steps, got a request for step 13"):
            found.event_between(0, 13)
        with pytest.raises(ValueError, match="made for 12 steps"):
            found.epsilon(1e-3, num_steps=13)

    @pytest.mark.parametrize(("start", "stop"), [(5, 3), (-1, 3)])
    def test_steps_that_do_not_exist(self, start, stop):
        with pytest.raises(ValueError, match="step"):
            tools.mechanism().event_between(start, stop)

    @pytest.mark.parametrize("bad", [2.9, -1])
    @pytest.mark.parametrize("sampling", [tools.poisson(), CYCLIC], ids=["Poisson", "cyclic"])
    def test_epsilon_of_a_part_of_a_step(self, sampling, bad):
        """2.9 steps must not cost what 2 steps cost."""
        with pytest.raises((ValueError, TypeError), match="steps"):
            tools.mechanism(sampling=sampling).epsilon(1e-3, num_steps=bad)


class TestCalibrate:
    @ANY_SAMPLING
    def test_reaches_the_target_from_below(self, sampling, adjacency):
        target = 0.5
        options = {"orders": tuple(map(float, range(2, 65)))}
        found = Mechanism.calibrate(
            epsilon=target,
            delta=1e-3,
            sampling=sampling,
            num_steps=12,
            l2_clip_norm=0.5,
            adjacency=adjacency,
            **(options if sampling.name == "fixed size" else {}),
        )
        assert 0.99 * target <= found.epsilon(1e-3) <= target
        assert found.noise_stddev == 0.5 * found.noise_multiplier

    def test_banded_noise(self):
        found = Mechanism.calibrate(
            epsilon=0.5,
            delta=1e-3,
            sampling=CYCLIC,
            num_steps=12,
            l2_clip_norm=1.0,
            noise=mirrordp.privacy.BandedNoise((1.0, 0.5)),
        )
        assert 0.495 <= found.epsilon(1e-3) <= 0.5

    @pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf])
    def test_epsilon(self, bad):
        with pytest.raises(ValueError, match="epsilon must be a positive finite number"):
            self.calibrate(epsilon=bad)

    @pytest.mark.parametrize("bad", [0.0, 1.0, -1.0, 3.0, math.nan])
    def test_delta(self, bad):
        with pytest.raises(ValueError, match=r"delta must be a number in \(0, 1\)"):
            self.calibrate(delta=bad)

    @pytest.mark.parametrize(
        ("name", "value"), [("epsilon", "2"), ("delta", "1e-5"), ("epsilon", None)]
    )
    def test_not_a_number(self, name, value):
        with pytest.raises(TypeError, match=f"{name} must be a"):
            self.calibrate(**{name: value})

    def test_unknown_options(self):
        with pytest.raises(TypeError, match="momentum"):
            self.calibrate(momentum=0.9)

    def test_an_unsupported_combination_is_refused_before_the_search(self):
        with pytest.raises(UnsupportedError, match="Use 'replace'"):
            self.calibrate(sampling=FixedSizeSampling(batch_size=8, num_examples=40))

    def calibrate(self, **options):
        defaults = {
            "epsilon": 1.0,
            "delta": 1e-5,
            "sampling": tools.poisson(),
            "num_steps": 5,
            "l2_clip_norm": 1.0,
        }
        return Mechanism.calibrate(**(defaults | options))


class TestLargeDelta:
    def test_above_one_over_n_is_a_warning(self):
        with pytest.warns(UserWarning, match=r"at most 1/n = 0.025 .* got 0.05"):
            tools.mechanism().epsilon(0.05)

    def test_calibration_warns_too(self):
        with pytest.warns(UserWarning, match="at most 1/n"):
            Mechanism.calibrate(
                epsilon=5.0,
                delta=0.05,
                sampling=FullBatch.of(40),
                num_steps=1,
                l2_clip_norm=1.0,
            )

    @pytest.mark.filterwarnings("error")
    def test_at_or_below_or_with_secret_n_it_is_not(self):
        tools.mechanism().epsilon(1 / 40)
        secret = PoissonSampling(sampling_prob=0.2, expected_batch_size=8)
        tools.mechanism(sampling=secret).epsilon(0.05)


class TestBadInput:
    @pytest.mark.parametrize("clip", [1e-37, 1e39])
    def test_clip_norms_at_the_ends_of_float32(self, clip):
        """At C = 1e-37 and small multipliers the noise is zero in float32, the sums are not."""
        with pytest.raises(ValueError, match="between 1e-30 and 1e30"):
            tools.mechanism(l2_clip_norm=clip)

    @pytest.mark.parametrize("name", ["l2_clip_norm"])
    @pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf])
    def test_positive(self, name, bad):
        with pytest.raises(ValueError, match=f"{name} must be a positive finite number"):
            tools.mechanism(**{name: bad})

    @pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
    def test_noise_multiplier(self, bad):
        with pytest.raises(ValueError, match="noise_multiplier must be a non-negative finite"):
            tools.mechanism(noise_multiplier=bad)

    def test_num_steps(self):
        with pytest.raises(ValueError, match="num_steps must be a positive integer, got 0"):
            tools.mechanism(num_steps=0)
        with pytest.raises(TypeError, match=r"num_steps must be a positive integer, got 2\.5"):
            tools.mechanism(num_steps=2.5)
        with pytest.raises(TypeError, match="num_steps must be a positive integer, got True"):
            tools.mechanism(num_steps=True)

    @pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 2.0, math.nan])
    def test_delta(self, bad):
        with pytest.raises(ValueError, match=r"delta must be a number in \(0, 1\)"):
            tools.mechanism().epsilon(bad)

    @pytest.mark.parametrize(
        ("name", "bad", "message"),
        [
            ("adjacency", "zero-out", "adjacency must be Adjacency, got str"),
            ("sampling", 0.1, "sampling must be Sampling, got float"),
            ("accountant", "rdp", "accountant must be Accountant"),
        ],
    )
    def test_wrong_types(self, name, bad, message):
        with pytest.raises(TypeError, match=message):
            tools.mechanism(**{name: bad})

    def test_unit(self):
        assert tools.mechanism(unit="user").unit == "user"
        with pytest.raises(ValueError, match=r"unit must be one of .*got 'row'"):
            tools.mechanism(unit="row")

    def test_unknown_options(self):
        with pytest.raises(TypeError, match="clip"):
            tools.mechanism(clip=1.0)

    def test_orders_without_rdp_are_refused_at_once(self):
        with pytest.raises(ValueError, match="orders belong to the RDP accountant"):
            tools.mechanism(orders=(2.0, 3.0))

    @pytest.mark.parametrize(
        ("sampling", "adjacency", "accountant", "advice"),
        [
            (tools.poisson(), Adjacency.ADD_REMOVE, None, "use adjacency='zero-out'"),
            (tools.poisson(), Adjacency.REPLACE, Accountant.RDP, "Use PLD"),
            (
                FixedSizeSampling(batch_size=8, num_examples=40),
                Adjacency.REPLACE,
                Accountant.PLD,
                "Use RDP",
            ),
            (
                FixedSizeSampling(batch_size=8, num_examples=40),
                Adjacency.ZERO_OUT,
                None,
                "Use 'replace'",
            ),
            (FullBatch.of(40), Adjacency.ADD_REMOVE, None, "State sampling_prob"),
            (CYCLIC, Adjacency.REPLACE, None, "Use 'zero-out'"),
        ],
    )
    def test_unsupported_combinations_come_with_advice(
        self, sampling, adjacency, accountant, advice
    ):
        with pytest.raises(UnsupportedError, match=advice):
            tools.mechanism(sampling=sampling, adjacency=adjacency, accountant=accountant)

    @pytest.mark.parametrize("rows", [39, 41])
    def test_data_of_another_size(self, rows):
        with pytest.raises(ValueError, match=f"made for num_examples=40.*rows, {rows}"):
            tools.mechanism().batches(rows, np.random.default_rng(0))

    def test_batches_are_as_many_as_steps(self):
        draws = list(tools.mechanism().batches(40, np.random.default_rng(0)))
        assert len(draws) == 12
