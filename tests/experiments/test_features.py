"""The experiment on features of a public network, with features that are cheap to compute."""

import numpy as np
import pytest

from experiments import features, records
from experiments.record.data import synthetic

OPTIONS = ["--epsilons", "1", "--directions", "4", "--seeds", "2", "--sizes", "40"]


@pytest.fixture
def calls(monkeypatch):
    """Means of 4 x 4 pixels in place of the network; returns the numbers of images of its calls."""
    calls = []

    def cheap(images, size):
        assert size == 40
        calls.append(len(images))
        return images.reshape(-1, 8, 4, 8, 4, 3).mean(axis=(2, 4)).reshape(len(images), -1)

    monkeypatch.setattr(features.runpy, "run_path", lambda path: {"all_features": cheap})
    monkeypatch.setattr(features, "read_final", lambda root: synthetic(num_private=600))
    monkeypatch.setattr(features, "PART", 250)
    return calls


def test_every_run_is_a_line_and_runs_once(calls, tmp_path, capsys):
    where = ["--out", str(tmp_path), "--features", str(tmp_path / "features")]
    assert features.main([*OPTIONS, *where]) == 0
    assert sorted(calls) == [64, 64, 100, 250, 250]
    lines = records.read(tmp_path / "runs.jsonl")
    assert [(x["method"], x["epsilon"], x["seed"]) for x in lines] == [
        ("public images alone", None, 0),
        ("not private", None, 0),
        ("private", 1.0, 0),
        ("private", 1.0, 1),
    ]
    assert all(line["accuracy"] > 0.5 for line in lines)
    assert all(x["reached_epsilon"] <= 1 for x in lines if x["method"] == "private")
    table = (tmp_path / "table.md").read_text()
    assert "| pixels | directions | public images alone | private, ε = 1 | not private |" in table
    assert table.splitlines()[2].startswith("| 40 | 4 | ")
    assert " ± " in table
    # The same command again computes nothing; another number of directions needs no features.
    del calls[:]
    assert features.main([*OPTIONS, *where]) == 0
    assert features.main([*OPTIONS, *where, "--directions", "3"]) == 0
    assert calls == []
    assert len(records.read(tmp_path / "runs.jsonl")) == 8


def test_directions_are_those_of_public_images(calls, tmp_path):
    rows = features.all_rows(synthetic(num_private=300), 40, tmp_path)
    moved = {**rows, "private": (rows["private"][0] * 3 + 1, rows["private"][1])}
    before, after = features.in_directions(rows, 3), features.in_directions(moved, 3)
    np.testing.assert_array_equal(before["public"][0], after["public"][0])
    np.testing.assert_array_equal(before["test"][0], after["test"][0])
    np.testing.assert_allclose(before["public"][0].std(axis=0, ddof=1), 1, rtol=1e-3)
