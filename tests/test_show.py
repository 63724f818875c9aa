"""A prompt and a notebook show only what is public, briefly and escaped."""

import dataclasses

import dp_accounting
import numpy as np
import pytest

import mirrordp
from mirrordp import Adjacency, Budget, PrivateClients, PrivateData, PublicClients, PublicData
from mirrordp.spending.ledger import FileLedger
from tests import tools
from tests.test_page import HOSTILE, Page

ROWS = 47
SECRET = 31.4159
ARRAYS = {"x": np.full((ROWS, 3), SECRET, np.float32), "y": np.full(ROWS, 271, np.int32)}
# User 3 owns most rows, so that neither number can be read from the other.
OWNERS = np.repeat(np.arange(5), [2, 3, 4, 29, 9])
PRIVATE = {
    "rows": PrivateData(ARRAYS),
    "users": PrivateClients.from_rows(ARRAYS, OWNERS, max_examples_per_user=30),
}


def shown(thing):
    return repr(thing), str(thing), thing._repr_html_()


@pytest.mark.parametrize("private", PRIVATE.values(), ids=PRIVATE.keys())
def test_private_data_show_neither_rows_nor_their_number(private):
    """Under add-remove adjacency the number is a secret, and the data do not know the adjacency."""
    for text in shown(private):
        assert "float32[n, 3]" in text
        assert "int32[n]" in text
        for secret in (str(ROWS), "5 users", "31.4", "271"):
            assert secret not in text.replace("int32", "")
    assert len(repr(private)) < 200


def test_private_data_of_other_rows_look_the_same():
    fewer = PrivateData({"x": ARRAYS["x"][:9] + 1, "y": ARRAYS["y"][:9] + 1})
    assert shown(fewer) == shown(PRIVATE["rows"])


def test_the_bound_of_users_is_public():
    assert "at most 30 of a user" in repr(PRIVATE["users"])


def test_public_data_show_their_size():
    assert repr(PublicData(ARRAYS)) == "PublicData(x: float32[47, 3], y: int32[47])"
    assert repr(PublicData(ARRAYS["x"])) == "PublicData(float32[47, 3])"
    users = PublicClients.from_rows(ARRAYS, OWNERS)
    assert repr(users) == "PublicClients(5 users, x: float32[47, 3], y: int32[47])"
    assert "5 users" in users._repr_html_()


def test_many_arrays_are_not_all_listed():
    many = PublicData({f"column {i}": np.zeros(3, np.float32) for i in range(30)})
    assert repr(many).endswith("column 11: float32[3], 26 more arrays)")
    assert len(repr(many)) < 200


def test_a_mechanism_shows_what_decides_epsilon():
    made = tools.mechanism(noise_multiplier=1.23456789)
    assert repr(made) == (
        "Mechanism(Poisson sampling, q=0.2, expected batch 8 of 40; noise_multiplier=1.23457, "
        "l2_clip_norm=1; num_steps=12; zero-out, one example)"
    )
    secret = dataclasses.replace(
        made,
        adjacency=Adjacency.ADD_REMOVE,
        sampling=mirrordp.PoissonSampling(sampling_prob=0.2, expected_batch_size=8),
    )
    assert "expected batch 8;" in repr(secret)


def test_a_report_shows_its_statement_and_whether_it_is_for_release():
    report = mirrordp.RunReport.of(tools.mechanism(), 1e-6, title="a run")
    assert repr(report).startswith("RunReport('a run': epsilon ")
    assert repr(report).endswith("at delta 1e-06, zero-out, one example, 12 steps)")
    assert report.statement() in Page(report._repr_html_()).text
    seeded = dataclasses.replace(report, seed=3)
    assert "not for release" in repr(seeded)
    assert "not for release" in seeded._repr_html_()


def test_a_ledger_and_a_budget_show_what_was_charged(tmp_path):
    ledger = mirrordp.Ledger(Adjacency.ZERO_OUT)
    assert repr(ledger) == "Ledger(zero-out; nothing charged)"
    ledger.charge(tools.mechanism().event)
    assert repr(ledger) == "Ledger(zero-out; 12 events charged)"
    with FileLedger.create(tmp_path / "l", Adjacency.ZERO_OUT) as file:
        assert repr(file) == f"FileLedger({str(tmp_path / 'l')!r}; zero-out; nothing charged)"
    with Budget.create(tmp_path / "b", epsilon=3, delta=1e-6, data=PRIVATE["rows"]) as budget:
        budget.charge(dp_accounting.GaussianDpEvent(8.0))
        used = f"{100 * budget.status.used:.2g}"
        assert repr(budget).startswith(f"Budget({str(tmp_path / 'b')!r}; epsilon 3, delta 1e-06; ")
        assert repr(budget).endswith("% used by 1 run; zero-out, one example)")
        assert used[0] in repr(budget)
        assert "used by 1 run" in Page(budget._repr_html_()).text


def test_what_a_notebook_shows_is_escaped(tmp_path):
    public = PublicData({HOSTILE: np.zeros(3, np.float32)})
    private = PrivateData({HOSTILE: np.zeros(3, np.float32)})
    report = mirrordp.RunReport.of(tools.mechanism(), 1e-6, title=HOSTILE, tuning=HOSTILE)
    folder = tmp_path / "<script>"
    with Budget.create(folder, epsilon=3, delta=1e-6, data=private) as budget:
        for thing in (public, private, report, budget, budget.ledger, tools.mechanism()):
            page = Page(thing._repr_html_())
            assert set(page.tags) <= {"div", "b", "table", "tr", "th", "td", "p"}
            assert {name for _, name, _ in page.attributes} <= {"style"}
            assert len(repr(thing)) < 600
