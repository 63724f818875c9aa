"""ε of known mechanisms: golden values, closed forms, the table of what is supported."""

import decimal
import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings, strategies as st
from scipy import integrate, optimize, stats

from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Accountant, Adjacency, UnsupportedError

PLD, RDP = Accountant.PLD, Accountant.RDP
ADD_REMOVE, ZERO_OUT, REPLACE = Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE


# Fewer orders than the default: looser, and much faster where only the search matters.
INTEGER_ORDERS = tuple(float(order) for order in (*range(2, 33), 64, 128, 256, 512, 1024, 2048))
FRACTIONAL_ORDERS = (1.1, 1.25, 1.5, 1.75, *INTEGER_ORDERS)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Closed form, written anew: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Balle and Wang 2018)."""

    def excess(eps):
        first = stats.norm.cdf(mu / 2 - eps / mu)
        return first - math.exp(eps + stats.norm.logcdf(-mu / 2 - eps / mu)) - delta

    return optimize.brentq(excess, 0, mu**2 / 2 + 10 * mu + 10, xtol=1e-12)


def poisson_epsilon(noise_multiplier, n, batch, num_steps, delta, accountant, **options):
    event = accounting.poisson_event(noise_multiplier, sampling_prob=batch / n, num_steps=num_steps)
    options = {"adjacency": ADD_REMOVE} | options
    return accounting.epsilon(event, delta, accountant=accountant, **options).epsilon


# Section 1 of the field notes: n, batch, steps, σ, δ, ε by RDP (low, high), ε by PLD.
PAPER = {
    "CIFAR-10 1.51": (48_000, 500, 9_600, 1.51, 1e-5, (3.508, 3.508), 3.230),
    "CIFAR-10 20": (48_000, 500, 9_600, 20.0, 1e-5, (0.185, 0.185), 0.164),
    "EMNIST 0.41": (670_014, 500, 67_001, 0.41, 1e-6, (25.88, 25.93), 23.06),
    "EMNIST 1.89": (670_014, 500, 67_001, 1.89, 1e-6, (0.478, 0.478), 0.443),
    "WikiText-2 0.5": (46_813, 250, 3_745, 0.5, 1e-5, (15.72, 15.72), 13.76),
    "WikiText-2 1.08": (46_813, 250, 3_745, 1.08, 1e-5, (1.712, 1.712), 1.550),
    "WikiText-2/103 0.83": (48_764, 250, 3_901, 0.83, 1e-5, (3.026, 3.026), 2.632),
    "WikiText-2/103 1.49": (48_764, 250, 3_901, 1.49, 1e-5, (1.006, 1.006), 0.916),
    "StackOverflow 0.4": (342_477, 100, 1_600, 0.4, 1e-6, (7.513, 7.513), 6.052),
}


class TestGoldenValues:
    @pytest.mark.parametrize("row", PAPER.values(), ids=PAPER)
    def test_paper_by_rdp(self, row):
        n, batch, steps, sigma, delta, (low, high), _ = row
        found = poisson_epsilon(sigma, n, batch, steps, delta, RDP)
        assert low - 0.01 <= found <= high + 0.01
        assert poisson_epsilon(sigma, n, batch, steps, delta, RDP, adjacency=ZERO_OUT) == found

    @pytest.mark.parametrize("row", PAPER.values(), ids=PAPER)
    def test_paper_by_pld(self, row):
        n, batch, steps, sigma, delta, _, expected = row
        assert poisson_epsilon(sigma, n, batch, steps, delta, PLD) == pytest.approx(
            expected, abs=0.01
        )

    def test_stackoverflow_with_the_coarse_orders(self):
        n, batch, steps, sigma, delta, *_ = PAPER["StackOverflow 0.4"]
        found = poisson_epsilon(sigma, n, batch, steps, delta, RDP, orders=accounting.COARSE_ORDERS)
        assert found == pytest.approx(8.3208, abs=5e-5)

    def test_coarse_orders_are_those_of_the_notes(self):
        orders = accounting.COARSE_ORDERS
        assert orders[:3] == (1.25, 1.5, 1.75)
        assert orders[-4:] == (63, 128, 256, 512)
        assert 4.5 in orders
        assert 64 not in orders

    def test_section_four(self):
        event = accounting.poisson_event(1.5, sampling_prob=0.04, num_steps=2_250)
        by = {
            kind: accounting.epsilon(event, 1e-5, adjacency=ADD_REMOVE, accountant=kind).epsilon
            for kind in Accountant
        }
        assert by[RDP] == pytest.approx(7.3293347, rel=1e-6)
        assert by[PLD] == pytest.approx(6.768787, rel=1e-6)
        first = poisson_epsilon(1.3, 60_000, 150, 15 * 400, 1e-5, RDP)
        assert first == pytest.approx(0.7242234, rel=1e-6)
        second = poisson_epsilon(1.0, 100_000, 100, 30 * 1_000, 1e-7, RDP)
        assert second == pytest.approx(1.4154988, rel=1e-6)

    def test_fixed_size_under_replace_has_twice_the_sensitivity(self):
        """22.16, not the 7.77 that a doubled noise of 3.02 would give."""
        event = accounting.fixed_size_event(
            1.51, num_examples=48_000, batch_size=500, num_steps=9_600
        )
        found = accounting.epsilon(event, 1e-5, adjacency=REPLACE)
        assert found.accountant is RDP
        assert found.epsilon == pytest.approx(22.16, abs=0.01)
        doubled = accounting.fixed_size_event(
            3.02, num_examples=48_000, batch_size=500, num_steps=9_600
        )
        assert accounting.epsilon(doubled, 1e-5, adjacency=REPLACE).epsilon == pytest.approx(
            7.77, abs=0.01
        )


class TestFullBatch:
    @pytest.mark.parametrize("adjacency", Adjacency)
    @pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (0.5, 3), (20.0, 100), (300.0, 7)])
    def test_pld_is_the_closed_form(self, adjacency, sigma, steps):
        event = accounting.full_batch_event(sigma, num_steps=steps)
        found = accounting.epsilon(event, 1e-5, adjacency=adjacency)
        distance = 2 if adjacency is REPLACE else 1
        expected = gaussian_epsilon(distance * math.sqrt(steps) / sigma, 1e-5)
        assert found.accountant is PLD
        assert found.epsilon == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("adjacency", Adjacency)
    def test_rdp_and_dp_accountings_pld_lie_above_the_closed_form(self, adjacency):
        """Both readers agree on what replace-one means, although dp-accounting's do not."""
        event = accounting.full_batch_event(4.0, num_steps=5)
        exact = accounting.epsilon(event, 1e-5, adjacency=adjacency, accountant=PLD).epsilon
        by_rdp = accounting.epsilon(event, 1e-5, adjacency=adjacency, accountant=RDP).epsilon
        discretised = accounting._pld_epsilon(event, 1e-5, adjacency)
        assert exact - 1e-9 <= discretised <= 1.001 * exact
        assert discretised <= by_rdp <= 1.2 * exact

    def test_poisson_at_q_one_and_fixed_size_at_n_are_full_batches(self):
        full = accounting.full_batch_event(2.0, num_steps=3)
        assert accounting.poisson_event(2.0, sampling_prob=1.0, num_steps=3) == full
        fixed = accounting.fixed_size_event(2.0, num_examples=9, batch_size=9, num_steps=3)
        assert fixed == full

    def test_a_composition_of_different_gaussians_is_one_gaussian(self):
        event = dp_accounting.ComposedDpEvent(
            [
                accounting.full_batch_event(3.0, num_steps=2),
                dp_accounting.NoOpDpEvent(),
                dp_accounting.GaussianDpEvent(5.0),
            ]
        )
        mu = math.sqrt(2 / 9 + 1 / 25)
        for adjacency in Adjacency:
            distance = 2 if adjacency is REPLACE else 1
            found = accounting.epsilon(event, 1e-6, adjacency=adjacency).epsilon
            assert found == pytest.approx(gaussian_epsilon(distance * mu, 1e-6), rel=1e-6)


class TestReplace:
    def test_poisson_under_replace_costs_more_than_under_zero_out_and_less_than_full(self):
        event = accounting.poisson_event(2.0, sampling_prob=0.1, num_steps=20)
        full = accounting.full_batch_event(2.0, num_steps=20)
        replace = accounting.epsilon(event, 1e-5, adjacency=REPLACE)
        zero_out = accounting.epsilon(event, 1e-5, adjacency=ZERO_OUT)
        assert replace.accountant is PLD
        assert 1.2 * zero_out.epsilon < replace.epsilon
        assert replace.epsilon < accounting.epsilon(full, 1e-5, adjacency=REPLACE).epsilon

    def test_poisson_under_replace_approaches_the_closed_form_as_q_approaches_one(self):
        event = accounting.poisson_event(4.0, sampling_prob=1 - 1e-9, num_steps=4)
        found = accounting.epsilon(event, 1e-5, adjacency=REPLACE).epsilon
        assert found == pytest.approx(gaussian_epsilon(2 * 2 / 4, 1e-5), rel=1e-3)
        # At distance C instead of 2C it would have been far from it.
        assert found > 1.5 * gaussian_epsilon(2 / 4, 1e-5)


POISSON = accounting.poisson_event(3.0, sampling_prob=0.1, num_steps=2)
FIXED = accounting.fixed_size_event(3.0, num_examples=20, batch_size=2, num_steps=2)
FULL = accounting.full_batch_event(3.0, num_steps=2)
SUPPORTED = {
    ("poisson", ADD_REMOVE): {PLD, RDP},
    ("poisson", ZERO_OUT): {PLD, RDP},
    ("poisson", REPLACE): {PLD},
    ("fixed", ADD_REMOVE): set(),
    ("fixed", ZERO_OUT): set(),
    ("fixed", REPLACE): {RDP},
    ("full", ADD_REMOVE): {PLD, RDP},
    ("full", ZERO_OUT): {PLD, RDP},
    ("full", REPLACE): {PLD, RDP},
}
EVENTS = {"poisson": POISSON, "fixed": FIXED, "full": FULL}


class TestSupported:
    @pytest.mark.parametrize("accountant", [None, PLD, RDP])
    @pytest.mark.parametrize(("kind", "adjacency"), SUPPORTED)
    def test_exactly_the_table_of_the_issue(self, kind, adjacency, accountant):
        event, supported = EVENTS[kind], SUPPORTED[kind, adjacency]
        allowed = bool(supported) if accountant is None else accountant in supported
        if allowed:
            found = accounting.epsilon(event, 1e-3, adjacency=adjacency, accountant=accountant)
            best = PLD if PLD in supported else RDP
            assert found.accountant is (accountant or best)
            assert found.adjacency is adjacency
            assert found.delta == 1e-3
            assert math.isfinite(found.epsilon)
            assert found.method.startswith(found.accountant.name)
        else:
            advice = "Use (PLD|RDP)" if supported else "There are analyses of Poisson"
            with pytest.raises(UnsupportedError, match=advice) as caught:
                accounting.epsilon(event, 1e-3, adjacency=adjacency, accountant=accountant)
            assert f"under {adjacency.value} adjacency" in str(caught.value)

    def test_distance_and_public_n(self):
        assert [kind.distance for kind in Adjacency] == [1, 1, 2]
        assert [kind.num_examples_is_public for kind in Adjacency] == [False, True, True]

    def test_add_remove_and_zero_out_cost_the_same_under_poisson(self):
        for accountant in Accountant:
            values = {
                accounting.epsilon(POISSON, 1e-5, adjacency=kind, accountant=accountant).epsilon
                for kind in (ADD_REMOVE, ZERO_OUT)
            }
            assert max(values) == pytest.approx(min(values), rel=1e-9)


class TestEpsilon:
    def test_nothing_costs_nothing(self):
        event = accounting.poisson_event(1.0, sampling_prob=0.1, num_steps=0)
        for adjacency in Adjacency:
            assert accounting.epsilon(event, 1e-5, adjacency=adjacency).epsilon == 0

    @pytest.mark.parametrize(
        "event_of",
        [
            lambda sigma: accounting.poisson_event(sigma, sampling_prob=0.1, num_steps=3),
            lambda sigma: accounting.full_batch_event(sigma, num_steps=3),
        ],
    )
    @pytest.mark.parametrize("accountant", Accountant)
    def test_no_noise_is_no_privacy(self, event_of, accountant):
        found = accounting.epsilon(event_of(0.0), 1e-5, adjacency=ZERO_OUT, accountant=accountant)
        assert found.epsilon == math.inf

    @settings(max_examples=10, deadline=None)
    @given(
        sigma=st.floats(0.6, 5.0),
        q=st.floats(1e-3, 0.3),
        steps=st.integers(1, 200),
        delta=st.floats(1e-8, 1e-3),
    )
    def test_rdp_is_monotone(self, sigma, q, steps, delta):
        """More noise, fewer steps, smaller q, larger δ: never a larger ε."""

        def value(sigma=sigma, q=q, steps=steps, delta=delta):
            event = accounting.poisson_event(sigma, sampling_prob=q, num_steps=steps)
            return accounting.epsilon(
                event, delta, adjacency=ZERO_OUT, accountant=RDP, orders=INTEGER_ORDERS
            ).epsilon

        base = value() * (1 + 1e-9) + 1e-12
        assert value(sigma=1.1 * sigma) <= base
        assert value(q=0.9 * q) <= base
        assert value(steps=max(1, steps - 1)) <= base
        assert value(delta=1.5 * delta) <= base

    @settings(max_examples=6, deadline=None)
    @given(
        sigma=st.floats(1.5, 5.0),
        q=st.floats(5e-3, 0.3),
        steps=st.integers(1, 100),
    )
    def test_pld_never_exceeds_rdp_nor_full_batches(self, sigma, q, steps):
        event = accounting.poisson_event(sigma, sampling_prob=q, num_steps=steps)
        full = accounting.full_batch_event(sigma, num_steps=steps)
        by_pld = accounting.epsilon(event, 1e-5, adjacency=ZERO_OUT, accountant=PLD).epsilon
        by_rdp = accounting.epsilon(event, 1e-5, adjacency=ZERO_OUT, accountant=RDP).epsilon
        # A PLD is discretised upwards, by 1e-4 at most per composition.
        assert by_pld <= by_rdp * 1.001 + 1e-3
        assert by_pld <= accounting.epsilon(full, 1e-5, adjacency=ZERO_OUT).epsilon + 1e-3

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, math.inf])
    def test_delta_outside_the_open_interval_is_refused(self, delta):
        with pytest.raises(ValueError, match=r"delta must be a number in \(0, 1\)"):
            accounting.epsilon(POISSON, delta, adjacency=ZERO_OUT)

    def test_orders_belong_to_rdp(self):
        with pytest.raises(ValueError, match="orders belong to the RDP accountant"):
            accounting.epsilon(POISSON, 1e-5, adjacency=ZERO_OUT, orders=[2.0, 3.0])

    def test_an_adjacency_that_is_not_one_is_a_type_error(self):
        with pytest.raises(TypeError, match="adjacency must be Adjacency"):
            accounting.epsilon(POISSON, 1e-5, adjacency="replace")

    def test_an_accountant_that_is_not_one_is_a_type_error(self):
        with pytest.raises(TypeError, match="accountant must be Accountant"):
            accounting.epsilon(POISSON, 1e-5, adjacency=ZERO_OUT, accountant="pld")


class TestEvents:
    @pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
    def test_noise_multiplier(self, bad):
        with pytest.raises(ValueError, match="noise_multiplier must be a non-negative"):
            accounting.poisson_event(bad, sampling_prob=0.1, num_steps=1)

    @pytest.mark.parametrize("bad", [0.0, -0.1, 1.1, math.nan])
    def test_sampling_prob(self, bad):
        with pytest.raises(ValueError, match=r"sampling_prob must be a probability in \(0, 1\]"):
            accounting.poisson_event(1.0, sampling_prob=bad, num_steps=1)

    @pytest.mark.parametrize("bad", [-1, 2.9])
    def test_the_number_of_steps_is_never_rounded_down(self, bad):
        """2.9 steps charged as 2 would be a cost below what was spent."""
        with pytest.raises((ValueError, TypeError), match="num_steps must be"):
            accounting.poisson_event(1.0, sampling_prob=0.1, num_steps=bad)
        with pytest.raises((ValueError, TypeError), match="num_steps must be"):
            accounting.fixed_size_event(1.0, num_examples=9, batch_size=2, num_steps=bad)

    def test_a_batch_larger_than_the_data(self):
        with pytest.raises(ValueError, match="batch_size must be at most num_examples"):
            accounting.fixed_size_event(1.0, num_examples=10, batch_size=11, num_steps=1)


def calibrated(target, *, event_of, delta=1e-5, **options):
    options = {"adjacency": ZERO_OUT} | options
    sigma = accounting.calibrate(event_of, epsilon_target=target, delta=delta, **options)
    return accounting.epsilon(event_of(sigma), delta, **options).epsilon


TARGETS = [0.01, 0.1, 1.0, 3.0, 8.0, 50.0]


class TestCalibrate:
    @pytest.mark.parametrize(
        ("target", "adjacency"),
        [
            (0.01, ZERO_OUT),
            (0.1, ADD_REMOVE),
            (1.0, ZERO_OUT),
            (4.0, ZERO_OUT),
            (2.0, REPLACE),
        ],
    )
    def test_poisson_by_pld(self, target, adjacency):
        found = calibrated(
            target,
            adjacency=adjacency,
            event_of=lambda s: accounting.poisson_event(s, sampling_prob=0.2, num_steps=20),
        )
        assert 0.99 * target <= found <= target

    @pytest.mark.parametrize("target", TARGETS)
    def test_poisson_by_rdp(self, target):
        found = calibrated(
            target,
            accountant=RDP,
            orders=FRACTIONAL_ORDERS,
            event_of=lambda s: accounting.poisson_event(s, sampling_prob=0.01, num_steps=1000),
        )
        assert 0.99 * target <= found <= target

    @pytest.mark.parametrize("target", TARGETS)
    @pytest.mark.parametrize("adjacency", Adjacency)
    def test_full_batch(self, target, adjacency):
        found = calibrated(
            target,
            adjacency=adjacency,
            event_of=lambda s: accounting.full_batch_event(s, num_steps=50),
        )
        assert 0.99 * target <= found <= target

    @pytest.mark.parametrize("target", [0.1, 3.0, 50.0])
    def test_fixed_size(self, target):
        found = calibrated(
            target,
            adjacency=REPLACE,
            orders=INTEGER_ORDERS,
            event_of=lambda s: accounting.fixed_size_event(
                s, num_examples=1000, batch_size=10, num_steps=100
            ),
        )
        assert 0.99 * target <= found <= target

    def test_below_the_floor_of_the_orders_the_answer_is_safe(self):
        """RDP at finitely many orders cannot state 0.01 here: its ε jumps past it, to zero."""
        found = calibrated(
            0.01,
            adjacency=REPLACE,
            orders=(2.0, 8.0, 32.0),
            event_of=lambda s: accounting.fixed_size_event(
                s, num_examples=1000, batch_size=10, num_steps=100
            ),
        )
        assert found <= 0.01

    @settings(max_examples=8, deadline=None)
    @given(
        target=st.floats(0.05, 30.0),
        q=st.floats(1e-3, 1.0),
        steps=st.integers(1, 2000),
        delta=st.floats(1e-9, 1e-3),
    )
    def test_anywhere_by_rdp(self, target, q, steps, delta):
        found = calibrated(
            target,
            delta=delta,
            accountant=RDP,
            orders=FRACTIONAL_ORDERS,
            event_of=lambda s: accounting.poisson_event(s, sampling_prob=q, num_steps=steps),
        )
        assert 0.99 * target <= found <= target

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
    def test_a_target_that_is_not_positive(self, bad):
        with pytest.raises(ValueError, match="epsilon must be a positive finite number"):
            accounting.calibrate(
                lambda s: POISSON, epsilon_target=bad, delta=1e-5, adjacency=ZERO_OUT
            )

    def test_an_unreachable_target_is_refused(self):
        constant = accounting.full_batch_event(1.0, num_steps=1)
        with pytest.raises(UnsupportedError, match="no noise multiplier up to"):
            accounting.calibrate(
                lambda s: constant, epsilon_target=0.1, delta=1e-5, adjacency=ZERO_OUT
            )


@pytest.mark.parametrize(
    ("num_steps", "adjacency"),
    [(1, ADD_REMOVE), (7, ADD_REMOVE), (7, ZERO_OUT), (7, REPLACE), (300, REPLACE)],
)
def test_kept_step_gives_what_the_accountant_gives(adjacency, num_steps):
    event = accounting.poisson_event(2.0, sampling_prob=0.05, num_steps=num_steps)
    accountant = PLDAccountant(adjacency.neighboring_relation).compose(event)
    found = accounting.epsilon(event, 1e-5, adjacency=adjacency, accountant=Accountant.PLD)
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)


class TestNotANumber:
    """A computation that failed promises nothing: it must not pass for a small ε."""

    def test_epsilon_is_infinite(self, monkeypatch):
        monkeypatch.setattr(accounting, "_rdp_epsilon", lambda *_: math.nan)
        event = accounting.full_batch_event(1.0, num_steps=1)
        found = accounting.epsilon(
            event, 1e-5, adjacency=Adjacency.ZERO_OUT, accountant=Accountant.RDP
        )
        assert found.epsilon == math.inf

    def test_calibration_takes_it_for_unsafe(self, monkeypatch):
        honest = accounting._rdp_epsilon

        def fails_below_two(event, *options):
            sigma = event.event.noise_multiplier
            return honest(event, *options) if sigma >= 2 else math.nan

        monkeypatch.setattr(accounting, "_rdp_epsilon", fails_below_two)
        found = accounting.calibrate(
            lambda sigma: accounting.full_batch_event(sigma, num_steps=1),
            epsilon_target=8.0,
            delta=1e-5,
            adjacency=Adjacency.ZERO_OUT,
            accountant=Accountant.RDP,
        )
        assert found >= 2


def sampled(kind, sigma):
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    return {
        "full": gaussian,
        "poisson": dp_accounting.PoissonSampledDpEvent(0.01, gaussian),
        "fixed": dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, gaussian),
        "best": dp_accounting.dp_event.RepeatAndSelectDpEvent(gaussian, 10.0, 1.0),
    }[kind]


class TestMuchNoise:
    """The analyses of dp-accounting overflow, fail or cancel to nothing where noise is huge."""

    @pytest.mark.parametrize("sigma", [1e7, 1e9, 1e12, 1e154, 1e160, 1e300, 1.7e308])
    @pytest.mark.parametrize("kind", ["full", "poisson", "fixed"])
    def test_it_costs_next_to_nothing_and_not_nothing(self, kind, sigma):
        event = dp_accounting.SelfComposedDpEvent(sampled(kind, sigma), 10)
        adjacency = REPLACE if kind == "fixed" else ZERO_OUT
        for accountant in (None, RDP):
            found = accounting.epsilon(event, 1e-5, adjacency=adjacency, accountant=accountant)
            assert 0 <= found.epsilon < 1e-2
        orders = (1.5, 2.0, 2.5, 7.77, 32.2, 512.0)
        found = accounting.renyi_divergences(event, orders, adjacency=adjacency)
        # q² is the least that sampling can make of it.
        least = [10 * 1e-4 * order / 2 / sigma / sigma for order in orders]
        assert (found >= least).all()
        assert (found > 0).all()
        # At high orders the analysis of fixed-size batches is loose.
        assert (found[:-1] < 1e-4).all()

    def test_the_best_of_runs_with_much_noise_costs_what_the_choice_does(self):
        found, least = (
            accounting.epsilon(sampled("best", sigma), 1e-5, adjacency=ZERO_OUT).epsilon
            for sigma in (1e300, 1e6)
        )
        assert found == pytest.approx(least, rel=1e-3)

    @pytest.mark.parametrize("bad", [math.inf, math.nan, -1.0])
    @pytest.mark.parametrize("kind", ["full", "poisson", "fixed", "best"])
    def test_noise_that_is_no_finite_number_is_refused(self, kind, bad):
        event = dp_accounting.SelfComposedDpEvent(sampled(kind, bad), 10)
        adjacency = REPLACE if kind == "fixed" else ZERO_OUT
        with pytest.raises(ValueError, match=r"noise multipliers are finite .* got"):
            accounting.epsilon(event, 1e-5, adjacency=adjacency)
        with pytest.raises(ValueError, match=r"noise multipliers are finite .* got"):
            accounting.renyi_divergences(event, (2.0, 8.0), adjacency=adjacency)


class TestLittlePrivacyLoss:
    """Where ε is tiny, the exact formula subtracts two numbers that are equal to all digits."""

    @staticmethod
    def delta_of(mu, epsilon):
        """δ = E[(1 − e^(ε−L))₊] for L ~ N(μ²/2, μ²), by an integral that subtracts nothing."""
        start = epsilon / mu - mu / 2
        end = 40 / max(1.0, start)
        return integrate.quad(
            lambda t: -math.expm1(-mu * t) * stats.norm.pdf(start + t), 0, end, epsabs=0
        )[0]

    @pytest.mark.parametrize("log_sigma", [2.5, 4, 6, 9, 11, 13, 13.9])
    @pytest.mark.parametrize("log_delta", [-16, -12, -9, -6, -3])
    def test_epsilon_is_never_too_small(self, log_sigma, log_delta):
        sigma, delta = 10.0**log_sigma, 10.0**log_delta
        event = accounting.full_batch_event(sigma, num_steps=1)
        found = accounting.epsilon(event, delta, adjacency=Adjacency.ZERO_OUT).epsilon
        assert self.delta_of(1 / sigma, found) <= delta * (1 + 1e-8)
        if found > 1e-10:
            assert self.delta_of(1 / sigma, 0.99 * found) > delta

    def test_a_target_that_integer_orders_do_not_reach(self):
        sigma = accounting.calibrate(
            lambda sigma: accounting.full_batch_event(sigma, num_steps=7),
            epsilon_target=0.01, delta=1e-12, adjacency=Adjacency.ZERO_OUT,
        )  # fmt: skip
        mu = math.sqrt(7) / sigma
        assert self.delta_of(mu, 0.01) <= 1e-12 * (1 + 1e-8)
        assert self.delta_of(1.01 * mu, 0.01) > 1e-12


class TestSearches:
    """The searches behind budgets, whose answers were seen to fit."""

    @pytest.mark.parametrize("least", [0.0123, 0.4, 1.0, 3.7, 900.0])
    def test_least_noise(self, least):
        found = accounting.least_noise(lambda sigma: sigma >= least)
        assert least <= found <= 1.0012 * least
        assert found == float(f"{found:.5g}")

    def test_noise_that_is_never_enough(self):
        tried = []
        assert accounting.least_noise(lambda sigma: tried.append(sigma)) is None
        assert max(tried) == 2**30

    @pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 1000, 123_457])
    def test_most_steps(self, most):
        asked = []

        def fits(steps):
            asked.append(steps)
            return steps <= most

        assert accounting.most_steps(fits) == most
        assert len(asked) <= 2 * math.log2(most + 2) + 2

    def test_a_delta_of_one_over_n_is_the_largest(self):
        accounting.require_small_delta(1e-3, 1000)
        with pytest.raises(ValueError, match="expected delta of at most"):
            accounting.require_small_delta(1.01e-3, 1000)


class Dial:
    """A number that can be turned, such as a tensor of another library; its hash stays."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value

    def __le__(self, other):
        return self.value <= other

    def __lt__(self, other):
        return self.value < other

    def __ge__(self, other):
        return self.value >= other

    def __gt__(self, other):
        return self.value > other


@pytest.mark.parametrize("accountant", [PLD, RDP])
def test_an_event_that_was_changed_gets_its_own_epsilon(accountant):
    dial = Dial(2.0)
    sampled_sum = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(dial))
    event = dp_accounting.SelfComposedDpEvent(sampled_sum, 10)
    options = {"adjacency": ZERO_OUT, "accountant": accountant}
    before = accounting.epsilon(event, 1e-5, **options).epsilon
    dial.value = 0.5
    after = accounting.epsilon(event, 1e-5, **options).epsilon
    fresh = accounting.poisson_event(0.5, sampling_prob=0.01, num_steps=10)
    assert after == accounting.epsilon(fresh, 1e-5, **options).epsilon > before


class TestRounding:
    """Sampled sums with much noise: their divergences are differences of nearly equal numbers."""

    @pytest.mark.parametrize(
        ("sigma", "q", "delta"), [(1e7, 0.0212, 1e-10), (1e6, 5e-4, 1e-10), (3e6, 3e-3, 1e-7)]
    )
    def test_epsilon_is_not_zero_because_an_order_was_rounded_below_zero(self, sigma, q, delta):
        event = accounting.poisson_event(sigma, sampling_prob=q, num_steps=10**6)
        found = accounting.epsilon(event, delta, adjacency=ZERO_OUT, accountant=RDP).epsilon
        # A million such steps are as good as one Gaussian.
        single = dp_accounting.GaussianDpEvent(sigma / q / 1e3)
        assert found > 0.9 * accounting.epsilon(single, delta, adjacency=ZERO_OUT).epsilon > 0

    @pytest.mark.parametrize("order", [2, 3, 5, 32, 64, 128])
    @pytest.mark.parametrize(("sigma", "q"), [(1e6, 0.5), (1e6, 0.9), (1e5, 0.1), (3, 1e-6)])
    def test_a_divergence_is_not_below_the_exact_one(self, sigma, q, order):
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        found = accounting.renyi_divergences(event, [order], adjacency=ZERO_OUT)[0]
        with decimal.localcontext(prec=60):
            share, noise = decimal.Decimal(q), decimal.Decimal(sigma)
            moment = sum(
                math.comb(order, k)
                * (1 - share) ** (order - k)
                * share**k
                * (decimal.Decimal(k * k - k) / (2 * noise * noise)).exp()
                for k in range(order + 1)
            )
            exact = moment.ln() / (order - 1)
        assert exact <= decimal.Decimal(float(found))
        assert float(found) < max(1.02 * float(exact), 1.1e-12)


@pytest.mark.parametrize("accountant", list(Accountant))
def test_a_probability_below_the_smallest_normal_number_is_counted_as_that_number(accountant):
    event = accounting.poisson_event(1.0, sampling_prob=1e-320, num_steps=10)
    found = accounting.epsilon(event, 1e-5, adjacency=Adjacency.ADD_REMOVE, accountant=accountant)
    assert 0 <= found.epsilon < 1e-3
