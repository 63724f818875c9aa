"""`python -m experiments methods`."""

from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from experiments import methods, models, records
from experiments.deep import tasks
from experiments.methods import METHODS, Setting


@pytest.fixture
def small(monkeypatch):
    setting = Setting(32, 3, 1e-6, clips=(1.0,), many_clips=(1.0,), rates=(0.1, 0.5))
    monkeypatch.setattr(methods, "SETTINGS", {"emnist": setting})
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
    # Two commands of one code and machine.
    (maker,) = records.read(tmp_path / "provenance.jsonl")
    assert {x["made_by"] for x in lines} == {maker["id"]}
    assert maker["packages"]["jax"]
    assert "±" in capsys.readouterr().out
    assert (tmp_path / "methods.png").exists()


def test_every_method_makes_its_parts():
    problem = methods.Problem("emnist", *(None,) * 6)
    for name in ("warm", "pda", "constant", "momentum", "sizes", "recentred", "adadps"):
        for value in METHODS[name].values:
            assert isinstance(METHODS[name].parts(problem, value), methods.Parts)


@pytest.mark.parametrize("data", methods.SETTINGS)
def test_every_method_has_the_same_number_of_trials(data):
    found = {len({*methods.choices([], data, name, 2.0)}) for name in METHODS}
    assert found == {6 if data == "emnist" else 4}


def test_other_epsilons_take_over_the_clip_norm_and_the_setting_of_the_one_that_is_searched():
    assert methods.choices([], "cifar10", "pda", 8.0) == []
    lines = searched("pda", (8.0, 2.5, 0.4), data="cifar10")
    assert methods.choices(lines[:-1], "cifar10", "pda", 8.0) == []
    assert methods.choices(lines, "cifar10", "pda", 8.0) == [(8.0, 2.5)]
    assert methods.chosen(lines, "cifar10", "pda", 8.0) is None
    lines += searched("pda", (8.0, 2.5, 0.1), 8.0, data="cifar10", choices=[(8.0, 2.5)])
    assert methods.chosen(lines, "cifar10", "pda", 8.0) == (8.0, 2.5, 0.1)
    assert methods.chosen(lines, "cifar10", "pda", 2.0) == (8.0, 2.5, 0.4)


def finals(accuracies, **other):
    """Final runs of seeds 0, 1, ...: a loss is one minus the accuracy."""
    shared = {"data": "emnist", "epsilon": 2.0, "num_public": 500, "kind": "final"}
    shared |= {"clip_norm": 2.0, "value": None, "rate": 0.5}
    return [
        shared
        | {"method": name, "seed": seed, "test_accuracy": value, "test_loss": 1 - value}
        | other
        for name, values in accuracies.items()
        for seed, value in enumerate(values)
    ]


def searched(method, best, epsilon=2.0, *, data="emnist", choices=None):
    """All runs of a search, of which `best` has the least loss."""
    shared = {"data": data, "method": method, "epsilon": epsilon, "kind": "search"}
    choices = choices or methods.choices([], data, method, epsilon)
    rates = methods.SETTINGS[data].rates
    settings = [(*choice, rate) for choice in choices for rate in rates]
    return [
        shared
        | {"clip_norm": c, "value": v, "rate": r, "validation_loss": float((c, v, r) != best)}
        for c, v, r in settings
    ]


def tables(lines):
    """The cells of each table, by the title of the row."""
    found = []
    for part in methods.table_of(lines).split("\n\n"):
        if part.startswith("|"):
            rows = [line.strip("| ").split(" | ") for line in part.splitlines()]
            found.append({title: cells for title, *cells in rows})
    return found


WARM = [0.5, 0.7, 0.6]


def test_differences_are_paired():
    lines = finals({"warm": WARM, "pda": [0.51, 0.72, 0.63]})
    half = 4.302653 * np.std([1, 2, 3], ddof=1) / np.sqrt(3)
    accuracy, loss, _ = tables(lines)
    assert accuracy["warm DP-SGD"] == ["60.00"]
    assert accuracy["PDA-DPMD, cosine"] == [f"+2.00 ± {half:.2f}"]
    assert accuracy["embedded (GEP)"] == ["not run"]
    assert loss["warm DP-SGD"] == ["0.4000"]
    assert loss["PDA-DPMD, cosine"] == [f"-0.0200 ± {half / 100:.4f}"]


def test_intervals_are_those_of_a_paired_t_test():
    own = [0.53, 0.69, 0.66, 0.58]
    runs = methods.final_runs(finals({"warm": [*WARM, 0.55], "pda": own}))
    found = methods.difference(runs, "pda", ("emnist", 2.0, 500), methods.LOSS)
    assert found is not None
    test = scipy.stats.ttest_rel([*WARM, 0.55], own)  # a loss is one minus the accuracy
    interval = test.confidence_interval(0.95)
    np.testing.assert_allclose(
        [found.mean - found.half, found.mean + found.half], [interval.low, interval.high]
    )
    assert found.is_clear == (test.pvalue < 0.05)


def test_only_clearly_better_differences_are_bold():
    better, worse, unclear = (
        [value + shift + wobble for value, wobble in zip(WARM, (0.0, 0.001, 0.002), strict=True)]
        for shift in (0.02, -0.02, -0.0005)
    )
    lines = finals({"warm": WARM, "pda": better, "constant": worse, "momentum": unclear})
    accuracy, loss, _ = tables(lines)
    assert accuracy["PDA-DPMD, cosine"] == ["**+2.10 ± 0.25**"]
    assert accuracy["constant α (Semi-DP)"] == ["-1.90 ± 0.25"]
    assert accuracy["public momentum"] == ["+0.05 ± 0.25"]
    assert loss["PDA-DPMD, cosine"] == ["**-0.0210 ± 0.0025**"]
    assert loss["constant α (Semi-DP)"] == ["+0.0190 ± 0.0025"]


def test_a_table_has_the_places_of_one_data_set_and_says_how_many_seeds():
    assert methods.table_of(searched("warm", (2.0, None, 0.5))) == "No final runs yet.\n"
    lines = finals({"warm": WARM, "pda": WARM})
    lines += finals({"warm": WARM, "pda": [0.7]}, epsilon=0.5, num_public=8000)
    lines += finals({"warm": WARM}, data="cifar10")
    first, _, _, second, _, _ = tables(lines)
    assert first["method"] == ["ε = 2, 500 public"]
    assert second["method"] == ["ε = 0.5, 8,000 public", "ε = 2, 500 public"]
    assert second["PDA-DPMD, cosine"] == ["+20.00", "+0.00 ± 0.00"]  # one seed has no interval
    text = methods.table_of(lines)
    assert "means over 1 to 3 seeds" in text
    assert text.index("**CIFAR-10: test loss") < text.index("**EMNIST: test accuracy")


def test_cells_say_why_they_have_no_difference():
    lines = finals({"warm": WARM}) + finals({"pda": WARM, "constant": WARM}, num_public=2000)
    lines += finals({"warm": WARM, "constant": [0.5]}, num_public=8000)
    lines[-1]["test_loss"] = 1e9
    accuracy, loss, _ = tables(lines)
    assert accuracy["PDA-DPMD, cosine"] == ["not run", "no pair", "not run"]
    assert accuracy["constant α (Semi-DP)"] == ["not run", "no pair", "+0.00"]
    assert loss["constant α (Semi-DP)"][2] == "1 of 1 diverged"
    lines[0]["test_loss"] = 1e9
    assert tables([*lines, *finals({"pda": WARM})])[1]["PDA-DPMD, cosine"][0] == (
        "of warm, 1 of 3 diverged"
    )


def test_settings_on_the_edge_of_the_search_have_an_asterisk():
    lines = searched("warm", (0.5, None, 4.0)) + searched("pda", (2.0, 2.5, 12.0))
    lines += searched("warm", (4.0, None, 0.15), epsilon=8.0)
    lines += finals({"warm": WARM}, clip_norm=0.5, rate=4.0)
    *_, settings = tables(lines)
    assert settings["method"] == ["ε = 2"]  # no final runs at ε = 8
    assert settings["warm DP-SGD"] == ["C = 0.5\\*, η = 4"]
    assert settings["PDA-DPMD, cosine"] == ["C = 2\\*, K/T = 2.5, η = 12\\*"]
    assert settings["embedded (GEP)"] == ["not run"]


def test_final_runs_of_settings_that_are_no_longer_chosen_do_not_count():
    lines = searched("warm", (4.0, None, 0.5))
    lines += finals({"warm": [0.9]}, clip_norm=4.0) + finals({"warm": WARM}, clip_norm=2.0)
    assert tables(lines)[0]["warm DP-SGD"] == ["90.00"]


def test_the_figure_has_the_best_methods_first(tmp_path, monkeypatch):
    drawn, draw = [], methods._heat_map
    monkeypatch.setattr(methods, "_heat_map", lambda *a: drawn.append(a[-2:]) or draw(*a))
    path = tmp_path / "methods.png"
    methods.figure(finals({"warm": WARM}), path)
    assert not path.exists()
    lines = finals({"warm": WARM, "pda": [0.4, 0.7, 0.6], "momentum": [0.6, 0.8, 0.7]})
    lines += finals({"warm": WARM, "sizes": WARM}, num_public=8000)
    lines += finals({"warm": WARM, "pda": WARM}, data="cifar10")
    methods.figure([*lines, *finals({"warm": WARM}, epsilon=8.0)], path)
    assert drawn == [
        (["warm", "pda"], [("cifar10", 2.0, 500)]),
        (["warm", "momentum", "sizes", "pda"], [("emnist", 2.0, 500), ("emnist", 2.0, 8000)]),
    ]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 150_000


def test_the_guide_shows_the_figure_of_the_results():
    root = Path(__file__).parents[2]
    shown = (root / "docs/figures/methods.png").read_bytes()
    assert shown == (methods.RESULTS / "methods.png").read_bytes()
