"""The best of a random number of runs: its distribution, its cost, and audits that see cheating.

The theorems are written out again here, from the paper and without dp-accounting, over Rényi
divergences that are integrated numerically. The audits are exact: the distribution of the best
output is a function of the distribution of one output.
"""

import functools
import json
import math

import dp_accounting
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution

from mirrordp import Adjacency, Budget, FileLedger, Ledger, Mechanism, PrivateData, RunReport
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Accountant, UnsupportedError
from mirrordp.privacy.selection import NumberOfRuns
from mirrordp.spending.budget import BudgetError
from mirrordp.spending.ledger import LedgerError, event_from_dict, event_to_dict
from tests import tools

LOGARITHMIC, GEOMETRIC, POISSON = NumberOfRuns, NumberOfRuns.geometric, NumberOfRuns.poisson
ZERO_OUT = Adjacency.ZERO_OUT
SEVERAL = [
    NumberOfRuns(5), NumberOfRuns(30), NumberOfRuns.geometric(10), NumberOfRuns(10, 0.5),
    NumberOfRuns(4, 3.0), NumberOfRuns.poisson(5),
]  # fmt: skip


class TestDistribution:
    @pytest.mark.parametrize("runs", [*SEVERAL, NumberOfRuns(1), NumberOfRuns(1.01)], ids=str)
    def test_adds_up_to_one_and_has_its_mean(self, runs):
        found = runs.probabilities(20_000)
        assert found.sum() == pytest.approx(1, abs=1e-9)
        assert found @ np.arange(20_001) == pytest.approx(runs.mean, rel=1e-9)

    def test_is_what_the_paper_defines(self):
        """P[K = k] = (1 - γ)^k / (γ^-η - 1) Π_{l<k} (l + η)/(l + 1)."""
        runs = NumberOfRuns(7, 0.5)
        gamma = runs.stopping_probability
        product = [math.prod((j + 0.5) / (j + 1) for j in range(k)) for k in range(1, 30)]
        expected = (1 - gamma) ** np.arange(1, 30) / (gamma**-0.5 - 1) * product
        np.testing.assert_allclose(runs.probabilities(29)[1:], expected, rtol=1e-9)
        small = NumberOfRuns(7, 0.01).probabilities(50)
        np.testing.assert_allclose(small, NumberOfRuns(7).probabilities(50), rtol=0.2, atol=1e-3)

    @pytest.mark.parametrize("runs", SEVERAL, ids=str)
    def test_draws_follow_it_and_not_one_with_another_mean(self, runs):
        rng = np.random.default_rng(1)
        drawn = np.array([runs.draw(rng) for _ in range(4000)])

        def p_value(claimed):
            expected = claimed.probabilities(400)
            edges = np.unique(np.searchsorted(np.cumsum(expected), np.linspace(0.05, 0.95, 10)))
            cells = np.searchsorted(edges, np.arange(401))
            seen = np.bincount(np.searchsorted(edges, np.minimum(drawn, 400)))
            wanted = np.bincount(cells, expected)
            seen = np.pad(seen, (0, len(wanted) - len(seen)))
            return scipy.stats.chisquare(seen, wanted / wanted.sum() * len(drawn)).pvalue

        assert p_value(runs) > 1e-3
        assert p_value(NumberOfRuns(1.5 * runs.mean, runs.shape)) < 1e-6

    def test_refuses_what_has_no_meaning(self):
        for mean in (0.5, 0, math.inf, math.nan, 1 + 1e-10, 1e15):
            with pytest.raises(ValueError, match="mean"):
                NumberOfRuns(mean)
        with pytest.raises(ValueError, match="0 or at least"):
            NumberOfRuns(5, 1e-6)
        with pytest.raises(ValueError, match="non-negative"):
            NumberOfRuns(5, -1.0)
        with pytest.raises(ValueError, match="no stopping probability"):
            _ = POISSON(3).stopping_probability


CIFAR10 = accounting.poisson_event(1.51, sampling_prob=500 / 48_000, num_steps=9_600)


def epsilon_of(event, delta=1e-5, **options):
    return accounting.epsilon(event, delta, adjacency=ZERO_OUT, **options).epsilon


class TestGoldenCosts:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            (LOGARITHMIC, (5.25, 5.66, 6.20, 6.72)),
            (GEOMETRIC, (5.93, 6.58, 7.46, 8.30)),
            (POISSON, (5.68, 7.68, 15.2, 34.6)),
        ],
    )
    def test_of_the_search_around_the_papers_images(self, kind, expected):
        found = [epsilon_of(kind(mean).event(CIFAR10)) for mean in (5, 10, 30, 100)]
        assert found == pytest.approx(expected, rel=1e-3)

    def test_are_far_below_those_of_composition(self):
        ten = dp_accounting.SelfComposedDpEvent(CIFAR10.event, 10 * CIFAR10.count)
        assert epsilon_of(ten, accountant=Accountant.RDP) == pytest.approx(13.4, abs=0.05)


# The theorems once more.


@functools.cache
def integrated_divergences(sigma, q):
    """Rényi divergences of one Poisson-sampled Gaussian, the larger of both directions."""
    x = np.linspace(-14 * sigma, 14 * sigma + 2, 200_001)
    log_p = scipy.stats.norm.logpdf(x, 0, sigma)
    log_q = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2)) + log_p

    def divergence(a, b, order):
        with np.errstate(over="ignore"):
            return math.log(np.trapezoid(np.exp(order * a + (1 - order) * b), x)) / (order - 1)

    return np.array([max(divergence(log_q, log_p, o), divergence(log_p, log_q, o)) for o in ORDERS])


def mean_of_runs(gamma, shape):
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 / gamma - 1) / (1 - gamma**shape)


def searched_gamma(mean, shape):
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if mean_of_runs(middle, shape) < mean else (middle, high)
    return low


def converted(orders, divergences, delta):
    """Canonne, Kamath and Steinke (2020), Proposition 12."""
    found = divergences + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return max(0.0, float(found.min()))


def delta_of(orders, divergences, epsilon):
    """The same proposition, solved for δ."""
    logs = (orders - 1) * (divergences - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    return min(1.0, math.exp(logs.min()))


def theorem(runs, orders, divergences):
    """Theorems 2 and 6 of Papernot and Steinke."""
    if runs.shape == math.inf:
        hats = [delta_of(orders, divergences, math.log(1 + 1 / (o - 1))) for o in orders]
        return divergences + runs.mean * np.array(hats) + math.log(runs.mean) / (orders - 1)
    gamma = searched_gamma(runs.mean, runs.shape)
    terms = (1 - 1 / orders) * divergences + math.log(1 / gamma) / orders
    return divergences + (1 + runs.shape) * terms.min() + math.log(runs.mean) / (orders - 1)


ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(11, 64)])


class TestTheorems:
    @pytest.mark.parametrize("runs", SEVERAL, ids=str)
    def test_agree_with_what_is_charged(self, runs):
        base = accounting.poisson_event(2.0, sampling_prob=0.05, num_steps=200)
        divergences = 200 * integrated_divergences(2.0, 0.05)
        expected = converted(ORDERS, theorem(runs, ORDERS, divergences), 1e-6)
        assert epsilon_of(runs.event(base), 1e-6) == pytest.approx(expected, rel=2e-3)

    @pytest.mark.parametrize("runs", SEVERAL, ids=str)
    def test_agree_for_a_run_analysed_by_its_privacy_loss(self, runs):
        """Rényi divergences from the PLD of a step, as sums over privacy losses."""
        base = accounting.poisson_event(1.5, sampling_prob=0.2, num_steps=10)
        pld = privacy_loss_distribution.from_gaussian_mechanism(
            1.5, sampling_prob=0.2, value_discretization_interval=1e-4
        )
        sides = [pld._pmf_remove.to_dense_pmf(), pld._pmf_add.to_dense_pmf()]
        orders = ORDERS[ORDERS < 20]

        def divergence(side, order):
            losses = (side._lower_loss + np.arange(len(side._probs))) * side._discretization
            terms = (order - 1) * losses
            return scipy.special.logsumexp(terms, b=np.maximum(side._probs, 0)) / (order - 1)

        divergences = 10 * np.array([max(divergence(s, order) for s in sides) for order in orders])
        expected = converted(orders, theorem(runs, orders, divergences), 1e-5)
        found = epsilon_of(runs.event(base), orders=tuple(orders))
        assert found == pytest.approx(expected, rel=0.02)

    def test_count_several_searches_and_other_runs(self):
        search = NumberOfRuns(5).event(accounting.full_batch_event(5.0, num_steps=3))
        other = accounting.full_batch_event(9.0, num_steps=2)
        both = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(search, 2), other])
        orders = (2.0, 5.0, 11.0, 20.0)
        one, rest = (
            accounting.renyi_divergences(event, orders, adjacency=ZERO_OUT)
            for event in (search, other)
        )
        together = accounting.renyi_divergences(both, orders, adjacency=ZERO_OUT)
        np.testing.assert_allclose(together, 2 * one + rest)

    def test_replacing_a_record_doubles_the_distance(self):
        search = NumberOfRuns(5).event(accounting.full_batch_event(6.0, num_steps=1))
        half = NumberOfRuns(5).event(accounting.full_batch_event(3.0, num_steps=1))
        found = accounting.epsilon(search, 1e-5, adjacency=Adjacency.REPLACE).epsilon
        assert found == pytest.approx(epsilon_of(half))
        assert found > 1.5 * epsilon_of(search)

    def test_refuse_runs_without_a_renyi_analysis(self):
        search = NumberOfRuns(5).event(CIFAR10)
        with pytest.raises(UnsupportedError, match=r"best of a random number.*one by RDP"):
            accounting.epsilon(search, 1e-5, adjacency=Adjacency.REPLACE)
        with pytest.raises(UnsupportedError, match="Use RDP"):
            epsilon_of(search, accountant=Accountant.PLD)

    def test_orders_of_a_budget_get_the_best_bound_and_not_their_own_few(self):
        search = NumberOfRuns(10).event(CIFAR10)
        few = accounting.renyi_divergences(search, (4.0, 6.0), adjacency=ZERO_OUT)
        many = accounting.renyi_divergences(search, (4.0, 6.0, *ORDERS), adjacency=ZERO_OUT)
        np.testing.assert_allclose(few, many[:2])


# Exact audits.


def generating(runs, x):
    """E x^K."""
    if runs.shape == math.inf:
        return np.exp(runs.mean * (x - 1))
    gamma = runs.stopping_probability
    if runs.shape == 0:
        return np.log1p(-(1 - gamma) * x) / math.log(gamma)
    return ((1 - (1 - gamma) * x) ** -runs.shape - 1) / (gamma**-runs.shape - 1)


def hockey_stick(p, q, epsilon):
    """The smallest δ for two vectors of probabilities, both ways."""
    ways = ((p, q), (q, p))
    return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ways)


def best_gaussian(generated, shift, sigma):
    """Probabilities of fine cells for the best of K Gaussians; the last stands for no run."""
    x = np.linspace(-9 * sigma, 9 * sigma + 1, 20_001)
    cdf = generated(scipy.stats.norm.cdf(x, shift, sigma))
    none = generated(np.zeros(1))
    return np.diff(cdf, prepend=none, append=1.0).clip(0), none


SIGMA, DELTA = 1.5, 1e-5
ONE_GAUSSIAN = accounting.full_batch_event(SIGMA, num_steps=1)


def exact_delta(generated, epsilon):
    """δ at ε of releasing the best of K noisy sums, where the sum of a record's presence is 1."""
    pairs = [best_gaussian(generated, shift, SIGMA)[0] for shift in (0.0, 1.0)]
    return hockey_stick(*pairs, epsilon)


class TestExactAudit:
    """The score is the output itself, so that the best output is the largest."""

    @pytest.mark.parametrize("runs", SEVERAL, ids=str)
    def test_never_exceeds_what_was_charged(self, runs):
        charged = epsilon_of(runs.event(ONE_GAUSSIAN), DELTA)
        assert exact_delta(lambda x: generating(runs, x), charged) <= DELTA

    @pytest.mark.parametrize("runs", [NumberOfRuns(30), NumberOfRuns.poisson(30)], ids=str)
    def test_sees_a_selection_that_was_not_charged(self, runs):
        one = epsilon_of(ONE_GAUSSIAN, DELTA)
        assert exact_delta(lambda x: x, one) == pytest.approx(DELTA, rel=0.01)
        assert exact_delta(lambda x: generating(runs, x), one) > 1.5 * DELTA

    def test_sees_a_number_of_runs_that_was_chosen_after_looking(self):
        """Whoever goes on until a run is good enough has seen all runs before it."""
        claimed = NumberOfRuns(5)
        charged = epsilon_of(claimed.event(randomized_response(1.0)), DELTA)

        def until_a_one(p):
            """At most ten runs, stopped at the first output 1; the output is the last."""
            return np.array([(1 - p) ** 10, 1 - (1 - p) ** 10])

        def as_claimed(p):
            none = float(generating(claimed, 1 - p))
            return np.array([none, 1 - none])

        # A record that is blank answers by a fair coin.
        present, blank = math.e / (1 + math.e), 0.5
        assert hockey_stick(as_claimed(present), as_claimed(blank), charged) <= DELTA
        assert hockey_stick(until_a_one(present), until_a_one(blank), charged) > 10 * DELTA


def randomized_response(epsilon):
    return dp_accounting.RandomizedResponseDpEvent(2 / (1 + math.exp(epsilon)), 2)


# Ledgers, budgets, reports.


@pytest.fixture(params=[NumberOfRuns(5), NumberOfRuns.poisson(2.5)], ids=str)
def search(request):
    run = dp_accounting.ComposedDpEvent(
        [tools.mechanism().event, dp_accounting.GaussianDpEvent(20.0)]
    )
    return request.param.event(run)


class TestBooks:
    def test_events_survive_as_text(self, search):
        text = json.dumps(event_to_dict(search), allow_nan=False)
        assert event_from_dict(json.loads(text)) == search

    def test_changed_text_is_refused(self, search):
        content = event_to_dict(search)
        for change in ({"mean": 0.5}, {"shape": -1.0}, {"shape": "0"}, {"mean": 5}, {"more": 1}):
            with pytest.raises(LedgerError):
                event_from_dict(content | change)
        inner = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), 1.5)
        with pytest.raises(LedgerError, match="whole number"):
            Ledger(ZERO_OUT).charge(NumberOfRuns(3).event(inner))

    def test_ledgers_keep_them(self, tmp_path, search):
        ledger = Ledger(ZERO_OUT)
        with FileLedger.create(tmp_path / "ledger.jsonl", ZERO_OUT) as file:
            for each in (ledger, file):
                each.charge(search)
                each.charge(search)
        twice = dp_accounting.SelfComposedDpEvent(search, 2)
        again = FileLedger.read(tmp_path / "ledger.jsonl")
        assert again.event == ledger.event == twice
        assert again.epsilon(1e-5).epsilon == epsilon_of(twice) > 1.3 * epsilon_of(search)

    def test_a_budget_admits_them_by_its_filter(self, tmp_path, search):
        rows = PrivateData(tools.features())
        alone = epsilon_of(search, 1e-5)
        with Budget.create(tmp_path, epsilon=1.5 * alone, delta=1e-5, data=rows) as budget:
            budget.admit_event(search)
            budget.charge(search)
            used = budget.status.used
            assert 0.3 < used < 1
            with pytest.raises(BudgetError):
                budget.admit_event(search)
        with Budget.open(tmp_path, data=rows) as budget:
            assert budget.status.used == used

    def test_reports_state_the_whole_search(self, search):
        mechanism = tools.mechanism()
        report = RunReport.of(mechanism, 1e-5, event=search, seeded=False, tuning="charged")
        assert report.epsilon == epsilon_of(search)
        assert report.epsilon > 1.2 * mechanism.epsilon(1e-5)
        card = report.privacy_card()
        assert "the whole search" in card
        assert "in each of a random number of runs" in card
        assert RunReport.from_dict(report.to_dict()) == report
        assert report.to_dict()["selection"] == report.selection
        assert "selection" not in RunReport.of(mechanism, 1e-5).to_dict()
        ledger = Ledger(ZERO_OUT)
        ledger.charge(search)
        charged = RunReport.of(mechanism, 1e-5, event=search, spend=ledger)
        assert charged.epsilon == report.epsilon

    def test_reports_refuse_an_event_of_another_search(self):
        weaker = NumberOfRuns(2).event(accounting.full_batch_event(1e4, num_steps=1))
        with pytest.raises(ValueError, match="at least as much as one of its runs"):
            RunReport.of(tools.mechanism(), 1e-5, event=weaker)
        with pytest.raises(TypeError, match="NumberOfRuns"):
            RunReport.of(tools.mechanism(), 1e-5, event=tools.mechanism().event)
        ledger = Ledger(ZERO_OUT)
        ledger.charge(tools.mechanism().event)
        whole = NumberOfRuns(5).event(tools.mechanism().event)
        with pytest.raises(ValueError, match="at least this run"):
            RunReport.of(tools.mechanism(), 1e-5, event=whole, spend=ledger)


def test_a_search_can_be_calibrated():
    sigma = accounting.calibrate(
        lambda sigma: NumberOfRuns(10).event(
            accounting.poisson_event(sigma, sampling_prob=0.01, num_steps=500)
        ),
        epsilon_target=2.0, delta=1e-5, adjacency=ZERO_OUT,
    )  # fmt: skip
    base = Mechanism(
        sampling=tools.poisson(10, rows=1000), l2_clip_norm=1.0, noise_multiplier=sigma,
        num_steps=500,
    )  # fmt: skip
    assert 1.98 < epsilon_of(NumberOfRuns(10).event(base.event)) <= 2.0
