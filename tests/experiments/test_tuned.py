"""`python -m experiments tuning`."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import datasets, models, records, tuned
from experiments.datasets.prepared import Prepared
from experiments.deep import tasks
from experiments.stackoverflow import data as users
from mirrordp import tuning


def rows(count, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2)).astype(np.float32)
    return {"x": x, "y": x[:, 0] - x[:, 1]}


def test_a_rate_that_learns_is_chosen_by_hand(monkeypatch):
    monkeypatch.setattr(tuned, "HIDDEN", 4)
    test = rows(500, 3)
    score, loss, cold = tuned.network(2, "regression")

    def measures(params):
        found = [score(params, x) for x in test["x"][:50]]
        return {"loss": float(np.mean((np.array(found) - test["y"][:50]) ** 2))}

    space = tuning.grid(learning_rate=[1e-6, 0.3], l2_clip_norm=1.0, batch_size=200, num_steps=30)
    problem = tuned.Problem(
        loss, lambda rows: cold, rows(1000, 1), rows(80, 2), space, measures, 1e-5
    )
    found = tuned.run(problem, "hand", 8.0, 0)
    assert found["settings"]["learning_rate"] == 0.3
    assert found["loss"] < 0.5 * tuned.run(problem, "start", 8.0, 0)["loss"]


@pytest.fixture
def tiny_images(monkeypatch):
    """Images of which the brighter ones have label one, and a network for them."""
    rng = np.random.default_rng(0)

    def images(count):
        labels = rng.integers(0, 2, count).astype(np.int32)
        found = rng.normal(size=(count, 28, 28, 1)) + labels[:, None, None, None]
        return found.astype(np.float32), labels

    prepared = Prepared(images(1000), images(60), None, images(40), "tiny", False, {})
    monkeypatch.setattr(datasets, "prepare", lambda name, root, **options: prepared)
    task = tasks.with_network("emnist", models.emnist_cnn((2, 2), 4))
    monkeypatch.setattr(tasks, "task", lambda name: task)
    monkeypatch.setitem(tuned.DEEP, "emnist", tuned.Deep(1e-6, 500, 1, (0.1, 0.2), (1.0,), (1.0,)))
    quick = functools.partial(tuned.public_start, max_epochs=2)
    monkeypatch.setattr(tuned, "public_start", quick)


def test_images_are_run_and_what_is_done_is_not_repeated(tiny_images, tmp_path, capsys):
    command = ["--tasks", "emnist", "--methods", "start", "free", "--seeds", "1", "--epsilons", "8"]
    command += ["--out", str(tmp_path)]
    tuned.main(command)
    first = (tmp_path / "runs.jsonl").read_text()
    assert first.count("\n") == 2
    assert "| emnist | 1,000 | 8 | accuracy |" in capsys.readouterr().out
    tuned.main(command)
    assert (tmp_path / "runs.jsonl").read_text() == first
    tuned.main([*command, "--methods", "start", "--first-seed", "4"])
    assert [line["seed"] for line in records.read(tmp_path / "runs.jsonl")] == [0, 0, 4]


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
    shared = {"task": "adult", "private_rows": 1000, "epsilon": 1.0}
    lines = [
        shared | {"method": "hand", "seed": 0, "auc": 0.9, "loss": 0.3},
        shared | {"method": "hand", "seed": 1, "auc": 0.8, "loss": 0.2},
        shared | {"method": "free", "seed": 1, "auc": 0.6, "loss": 0.3},
    ]
    *_, loss, auc = tuned.table_of(lines).splitlines()
    start = "| adult | 1,000 | 1 | {} | 2 | not run |"
    by_hand, free = " 0.2500 ± 0.0500 |", " 0.3000 (1 of 2 seeds; +50.0%) | not run |"
    assert loss.startswith(start.format("loss") + by_hand + free)
    by_hand, free = " 0.8500 ± 0.0500 |", " 0.6000 (1 of 2 seeds; -25.0%) | not run |"
    assert auc.startswith(start.format("auc") + by_hand + free)


def test_table_counts_models_that_diverged():
    shared = {"task": "stackoverflow", "private_rows": 1000, "epsilon": 8.0, "method": "paid"}
    lines = [shared | {"seed": seed, "loss": loss} for seed, loss in enumerate((5.0, 1e9, 6.0))]
    lines += [shared | {"method": "hand", "seed": seed, "loss": 5.0} for seed in range(3)]
    assert " 5.5000 ± 0.5000 (without 1 that diverged; +10.0%) |" in tuned.table_of(lines)
    lines = [shared | {"seed": 0, "loss": 1e9}]
    assert "| diverged |" in tuned.table_of(lines)


def test_users_are_rows_and_a_mean_over_their_sentences_is_the_loss(monkeypatch, tmp_path):
    folder = tmp_path / "stackexchange"
    folder.mkdir()
    lines = [f"u{user}\tword{user % 5} is here\n" * (1 + user % 20) for user in range(200)]
    (folder / "users.tsv").write_text("".join(lines))
    tiny = functools.partial(models.stackoverflow_lstm, 40, 3, 4)
    monkeypatch.setattr(models, "stackoverflow_lstm", tiny)
    monkeypatch.setattr(tuned.mirrordp, "warm_start", _no_training)
    problem = tuned.users_problem("stackoverflow", tmp_path, 0, 50)
    network = tiny(pad=users.PAD)
    params = network.init(jax.random.key(0))
    counts = (problem.private != users.PAD).any(axis=2).sum(axis=1)
    assert counts.max() == tuned.SENTENCES_PER_USER
    assert counts.min() < tuned.SENTENCES_PER_USER
    for row, count in zip(problem.private[:5], counts, strict=False):
        mean = np.mean([network.loss(params, sentence) for sentence in row[:count]])
        np.testing.assert_allclose(problem.loss(params, row), mean, rtol=1e-5)
    assert problem.loss(params, np.zeros_like(problem.private[0])) == 0
    found = tuned.run(problem, "start", 8.0, 0)
    assert 0 < found["loss"] < 10
    assert found["private_rows"] == 50


def _no_training(loss_fn, params, rows, **options):
    return SimpleNamespace(params=params)
