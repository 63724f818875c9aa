"""`python -m experiments bands`."""

import numpy as np
import pytest

from experiments import bands, records, tuned
from mirrordp import Mechanism

EPSILONS = ["--epsilons", "8"]


@pytest.fixture
def small(monkeypatch):
    rng = np.random.default_rng(0)

    def rows(count):
        x = rng.normal(size=(count, 2)).astype(np.float32)
        return {"x": x, "y": x[:, 0] - x[:, 1]}

    monkeypatch.setattr(tuned, "HIDDEN", 4)
    for name, value in {"BATCH_SIZE": 20, "EPOCHS": 1, "RATES": (0.1,), "BANDS": (2,)}.items():
        monkeypatch.setattr(bands, name, value)

    def uncalibrated(*, epsilon, delta, **options):
        return Mechanism(noise_multiplier=1.0, **options)

    monkeypatch.setattr(bands.Mechanism, "calibrate", uncalibrated)
    score, loss, cold = tuned.network(2, "regression")
    test = rows(20)

    def measures(params):
        found = np.array([score(params, x) for x in test["x"]])
        return {"rmse": float(np.sqrt(np.mean((found - test["y"]) ** 2)))}

    problem = tuned.Problem(loss, lambda _: cold, rows(200), rows(40), [], measures, 1e-5)
    monkeypatch.setattr(bands, "table_problem", lambda *_: problem)
    return problem


def test_runs_are_paired_and_not_done_twice(small, tmp_path, capsys):
    command = ["--tasks", "housing", *EPSILONS, "--out", str(tmp_path), "--seeds"]
    for seeds in ("2", "3"):
        assert bands.main([*command, seeds]) == 0
    lines = records.read(tmp_path / "runs.jsonl")
    assert sorted((x["kind"], x["seed"]) for x in lines) == sorted(
        (kind, seed) for kind in bands.KINDS for seed in range(3)
    )
    assert all((x["bands"] == 1) == (x["kind"] == "independent") for x in lines)
    table = capsys.readouterr().out
    assert table.count("±") >= 4


def test_the_number_of_bands_has_the_least_loss_by_noise(small, monkeypatch):
    found = [(0.3, "a"), (0.1, "b"), (0.2, "c")]
    seen = []
    monkeypatch.setattr(bands, "candidates", lambda *_: found)
    monkeypatch.setattr(
        bands.mirrordp, "TrainStep", lambda loss, mechanism, _: seen.append(mechanism) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        bands.run(small, "prefix", 8.0, 0.1, [0])
    assert seen == ["b"]
