"""The ledger: append-only, asking changes nothing, equal neighbours are one event."""

import dp_accounting
import pytest

from mirrordp import Accountant, Adjacency, Ledger, accounting

POISSON = accounting.poisson_event(3.0, sampling_prob=0.1, num_steps=5)
GAUSSIAN = dp_accounting.GaussianDpEvent(2.0)


@pytest.fixture
def ledger():
    return Ledger(Adjacency.ZERO_OUT)


def test_an_empty_ledger_has_spent_nothing(ledger):
    assert ledger.event == dp_accounting.NoOpDpEvent()
    assert ledger.epsilon(1e-5).epsilon == 0
    assert ledger.adjacency is Adjacency.ZERO_OUT


def test_equal_blocks_are_one_event_with_a_count(ledger):
    for _ in range(3):
        ledger.charge(POISSON)
    assert ledger.event == dp_accounting.SelfComposedDpEvent(POISSON.event, 15)


def test_different_events_are_composed_in_order(ledger):
    for event in (POISSON, GAUSSIAN, GAUSSIAN, POISSON):
        ledger.charge(event)
    parts = ledger.event.events
    assert [part.event for part in parts] == [POISSON.event, GAUSSIAN, POISSON.event]
    assert [part.count for part in parts] == [5, 2, 5]


def test_nothing_charged_changes_nothing(ledger):
    ledger.charge(POISSON)
    ledger.charge(dp_accounting.NoOpDpEvent())
    assert ledger.event == POISSON


def test_asking_changes_nothing(ledger):
    ledger.charge(POISSON)
    before = ledger.event
    first = ledger.epsilon(1e-5)
    assert ledger.epsilon(1e-5) == first
    assert ledger.epsilon(1e-3).epsilon < first.epsilon
    assert ledger.event == before


def test_epsilon_is_that_of_the_composition(ledger):
    ledger.charge(POISSON)
    ledger.charge(accounting.poisson_event(5.0, sampling_prob=0.3, num_steps=4))
    for accountant in Accountant:
        found = ledger.epsilon(1e-5, accountant=accountant)
        composed = accounting.epsilon(
            ledger.event, 1e-5, adjacency=Adjacency.ZERO_OUT, accountant=accountant
        )
        assert found == composed
        alone = accounting.epsilon(
            POISSON, 1e-5, adjacency=Adjacency.ZERO_OUT, accountant=accountant
        )
        assert found.epsilon > alone.epsilon


def test_many_small_charges_cost_what_one_large_one_does(ledger):
    whole = Ledger(Adjacency.ZERO_OUT)
    whole.charge(accounting.poisson_event(3.0, sampling_prob=0.1, num_steps=40))
    for steps in (1, 7, 32):
        ledger.charge(accounting.poisson_event(3.0, sampling_prob=0.1, num_steps=steps))
    assert ledger.epsilon(1e-5) == whole.epsilon(1e-5)


def test_replace_counts_twice_the_distance():
    ledger = Ledger(Adjacency.REPLACE)
    ledger.charge(GAUSSIAN)
    single = accounting.epsilon(
        dp_accounting.GaussianDpEvent(1.0), 1e-5, adjacency=Adjacency.ZERO_OUT
    )
    assert ledger.epsilon(1e-5).epsilon == pytest.approx(single.epsilon, rel=1e-9)
