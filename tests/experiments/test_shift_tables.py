"""The experiment on public rows that are no random sample."""

import numpy as np
import pytest

from experiments import shift
from mirrordp.tables import Table


@pytest.fixture
def table(monkeypatch):
    """A small table of people, in which the young are another kind."""
    rng = np.random.default_rng(0)
    age = rng.integers(20, 60, 1500)
    income = np.where(rng.random(1500) < 1 / (1 + np.exp((40 - age) / 5)), "high", "low")
    columns = {"age": age, "noise": rng.normal(size=1500).round(3), "income": income}
    monkeypatch.setattr(shift, "NUM_PUBLIC", 200)
    return Table("people", {name: tuple(map(str, cells)) for name, cells in columns.items()})


def test_public_rows_follow_the_rule_and_no_row_is_used_twice(table):
    parts = shift.split_table(table, shift.SHIFTS["age"], seed=0)
    public, private, test = parts
    assert len(public) == 200
    assert all(int(cell) < 30 for cell in public.columns["age"])
    assert any(int(cell) >= 30 for cell in private.columns["age"])
    rows = [row for part in parts for row in zip(*part.columns.values(), strict=True)]
    assert sorted(rows) == sorted(zip(*table.columns.values(), strict=True))
    again = shift.split_table(table, shift.SHIFTS["age"], seed=1)[2]
    assert again.columns != test.columns


@pytest.mark.filterwarnings("ignore:this is one of", "ignore:.*beyond the range")
def test_every_method_has_a_line(table):
    methods = ["public", "warm", "ours", "trees"]
    found = shift.run(table, "age", seed=0, methods=methods)
    assert [line["method"] for line in found] == methods
    losses = {line["method"]: line["loss"] for line in found}
    assert losses["ours"] < losses["public"]
    assert found[0]["steps"] == 0
    assert found[2]["steps"] > 0


@pytest.mark.parametrize(
    ("ours", "words"), [(0.5, "No model is anywhere worse"), (0.7, "people under 30: pub")]
)
def test_the_table_says_where_ours_is_worse(ours, words):
    lines = [
        {"shift": "age", "method": method, "loss": loss + 0.01 * seed, "num_private": 5}
        for method, loss in (("public", 0.55), ("warm", 0.6), ("ours", ours))
        for seed in range(3)
    ]
    assert words in shift.table_of(lines)


def test_every_shift_has_its_table():
    assert {each.table for each in shift.SHIFTS.values()} == set(shift.TABLES)
