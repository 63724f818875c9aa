"""The experiment on models of tables and their peers."""

import numpy as np
import pytest

from experiments import table_models as models
from mirrordp.tables import Table


@pytest.fixture
def table(monkeypatch):
    rng = np.random.default_rng(0)
    age, hours = rng.integers(20, 60, 3000), rng.integers(10, 50, 3000)
    share = 1 / (1 + np.exp(-np.where((age > 40) == (hours > 30), 2, -2)))
    income = np.where(rng.random(3000) < share, "high", "low")
    columns = {"age": age, "hours": hours, "noise": rng.normal(size=3000), "income": income}
    monkeypatch.setitem(models.NUM_PUBLIC, "adult", 600)
    return Table("people", {name: tuple(map(str, cells)) for name, cells in columns.items()})


@pytest.mark.filterwarnings("ignore:this is one of", "ignore:.*beyond the range", "ignore:.*equal")
def test_methods_are_judged_on_the_same_rows(table):
    data, task, groups = models.split_table(table, "adult", seed=0)
    assert task == "classification"
    assert [len(data[f"{part}_y"]) for part in ("public", "private", "test")] == [600, 2100, 300]
    assert groups == ((0,), (1,), (2,))
    found = {}
    for method in ("linear", "trees", "boosting"):
        values, name = models.FITS[method](data, task, groups, 3.0, 0)
        assert name == method
        found[method] = models.measured(task, data["test_y"], values)
    assert found["trees"]["auc"] > found["linear"]["auc"] + 0.1
    again = models.split_table(table, "adult", seed=1)[0]
    assert not np.array_equal(again["test_x"], data["test_x"])


def test_the_table_marks_the_best_private_method():
    lines = [
        {"table": "housing", "epsilon": 1.0, "method": method, "seed": seed, "rmse": value + seed}
        for method, value in (("linear", 70.0), ("trees", 60.0), ("boosting", 50.0))
        for seed in (0, 2)
    ]
    text = models.table_of(lines)
    assert "| housing | 1 | RMSE | 2 | 71 ± 1 | **61** ± 1 | not run | not run | 51 ± 1 |" in text


def test_a_method_with_fewer_seeds_is_not_the_best():
    lines = [
        {"table": "housing", "epsilon": 1.0, "method": method, "seed": seed, "rmse": value}
        for method, value, seeds in (("linear", 70.0, 2), ("trees", 60.0, 2), ("network", 50.0, 1))
        for seed in range(seeds)
    ]
    text = models.table_of(lines)
    assert "| 70 ± 0 | **60** ± 0 | 50 (1 of 2 seeds) | not run |" in text
