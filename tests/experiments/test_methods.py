"""`python -m experiments methods`."""

import numpy as np
import pytest

from experiments import methods, models, records
from experiments.deep import tasks
from experiments.methods import METHODS, Setting


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(methods, "SETTINGS", {"emnist": Setting(32, 3, 1e-6)})
    monkeypatch.setattr(methods, "RATES", (0.1, 0.5))
    monkeypatch.setattr(methods, "CLIPS", (1.0,))
    monkeypatch.setattr(methods, "MANY_CLIPS", (1.0,))
    task = tasks.with_network("emnist", models.emnist_cnn((2, 2), 4))
    monkeypatch.setattr(tasks, "task", lambda name: task)
    short = {
        name: METHODS[name]._replace(values=METHODS[name].values[:1])
        for name in ("warm", "kronecker")
    }
    monkeypatch.setattr(methods, "METHODS", short)


def test_searches_then_takes_final_runs_with_paired_seeds_and_goes_on(small, tmp_path, capsys):
    command = ["--epsilons", "8", "--public", "2000", "--seeds", "2", "--synthetic", "--methods"]
    out = ["--out", str(tmp_path)]
    assert methods.main([*command, "warm", *out]) == 0
    assert methods.main([*command, "warm", "kronecker", *out]) == 0
    lines = records.read(tmp_path / "runs.jsonl")
    assert [(x["method"], x["kind"]) for x in lines] == [
        (name, kind) for name in ("warm", "kronecker") for kind in ("search",) * 2 + ("final",) * 2
    ]
    assert {x["seed"] for x in lines if x["kind"] == "final"} == {1, 2}
    assert all(("test_loss" in x) == (x["kind"] == "final") for x in lines)
    assert "±" in capsys.readouterr().out


def test_every_method_makes_its_parts():
    problem = methods.Problem("emnist", *(None,) * 6)
    for name in ("warm", "pda", "constant", "momentum", "sizes", "recentred", "adadps"):
        for value in METHODS[name].values:
            assert isinstance(METHODS[name].parts(problem, value), methods.Parts)


def test_every_method_has_the_same_number_of_trials():
    assert {len(method.choices) for method in METHODS.values()} == {6}
    assert {len({*method.choices}) for method in METHODS.values()} == {6}


def test_differences_are_paired():
    shared = {"data": "emnist", "epsilon": 2.0, "num_public": 500, "kind": "final"}
    lines = [
        shared | {"method": name, "seed": seed, "test_accuracy": a, "test_loss": 1.0}
        for name, values in {"warm": [0.5, 0.7, 0.6], "pda": [0.51, 0.72, 0.63]}.items()
        for seed, a in enumerate(values)
    ]
    half = 4.302653 * np.std([1, 2, 3], ddof=1) / np.sqrt(3)
    assert f"(+2.00 ± {half:.2f})" in methods.table_of(lines)
    assert "not run" in methods.table_of(lines)
