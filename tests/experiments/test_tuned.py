"""`python -m experiments tuning`."""

import types

import numpy as np
import pytest

from experiments import tuned


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(tuned, "LEARNING_RATES", (1e-6, 0.3))
    monkeypatch.setattr(tuned, "CLIP_NORMS", (1.0,))
    monkeypatch.setattr(tuned, "ALPHAS", (1.0,))
    monkeypatch.setattr(tuned, "BATCH_SIZE", 200)
    monkeypatch.setattr(tuned, "EPOCHS", 6)
    monkeypatch.setattr(tuned, "HIDDEN", 4)


def rows(count, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2)).astype(np.float32)
    return {"x": x, "y": x[:, 0] - x[:, 1]}


def test_a_rate_that_learns_is_chosen_by_hand(small, monkeypatch):
    private, public, test = rows(1000, 1), rows(80, 2), rows(500, 3)
    cold = types.SimpleNamespace
    monkeypatch.setattr(
        tuned.mirrordp, "warm_start", lambda loss, params, rows, seed: cold(params=params)
    )
    scores, settings = tuned.fit("hand", private, public, "regression", 8.0, 0)
    assert settings.learning_rate == 0.3
    assert np.mean((scores(test["x"]) - test["y"]) ** 2) < 0.5 * np.var(test["y"])


def test_rows_are_scaled_by_public_ones():
    data = {
        "public_x": np.array([[0.0, 1.0], [2.0, 1.0]]),
        "public_y": np.array([10.0, 30.0]),
        "test_x": np.array([[1.0, 1.0], [1e9, 1.0]]),
        "test_y": np.array([20.0, 40.0]),
    }
    found = tuned.rows_of(data, "test", "regression")
    assert found["x"].tolist() == [[0.0, 0.0], [5.0, 0.0]]
    assert found["y"].tolist() == [0.0, 2.0]
    assert tuned.rows_of(data, "test", "classification")["y"].tolist() == [20.0, 40.0]


def test_table_says_what_was_not_run():
    shared = {"table": "adult", "epsilon": 1.0}
    lines = [
        shared | {"method": "hand", "auc": 0.9, "loss": 0.3},
        shared | {"method": "hand", "auc": 0.8, "loss": 0.3},
        shared | {"method": "free", "auc": 0.7, "loss": 0.4},
    ]
    *_, loss, auc = tuned.table_of(lines).splitlines()
    assert loss.startswith("| adult | 1 | loss | 0 to 2 | 0.3000 ± 0.0000 | 0.4000 | not run |")
    assert auc.startswith("| adult | 1 | auc | 0 to 2 | 0.8500 ± 0.0500 | 0.7000 | not run |")
