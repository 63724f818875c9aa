"""Tables and figures of the deep networks, from made-up result lines."""

import copy
import dataclasses
import functools
import json
import re

import pytest
from matplotlib import image

from experiments import __main__ as dispatcher, records, sections
from experiments.deep import figures, paper, results, table
from tests.experiments.deep_lines import SAMPLE, line

# Searched values as they are here, whatever a sweep has written into the files.
SETTINGS = {
    name: dataclasses.replace(
        settings, learning_rate=0.2, decay=2000.0 if settings.algorithm == "pda" else None
    )
    for name, settings in results.configurations().items()
}
SAMPLED = {"label": SAMPLE, "is_complete": False, "num_private": 95_851}


def settings_of(name):
    return SETTINGS[name]


def cifar_lines():
    """Final runs of cold, warm and PDA-DPMD with σ = 1.51: three, two and three seeds."""
    losses = {"cold": 1.5, "warm": 1.3, "pda": 1.2}
    return [
        line(settings_of(f"cifar10/{name}-s1.51"), seed, loss=loss + 0.01 * seed, accuracy=0.6)
        for name, loss in losses.items()
        for seed in (1, 2, 3)
        if (name, seed) != ("warm", 3)
    ]


def blocks(lines, problems=()):
    return {name: text for name, (_, text) in table.blocks(lines, SETTINGS, problems).items()}


def rows(text, *starts):
    """The rows of Markdown tables that begin with these cells, as lists of cells."""
    found = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in text.splitlines()]
    return [row for row in found if row[: len(starts)] == list(starts)]


# Paper


def test_the_papers_numbers_are_those_of_its_source():
    """Best in every column is PDA-DPMD, which is what the paper prints in bold."""
    for setting in paper.SETTINGS[:6]:
        cold, warm, pda = (
            paper.CELLS[setting.dataset, setting.noise_multiplier, name]
            for name in ("cold", "warm", "pda")
        )
        assert cold.loss > warm.loss > pda.loss
        if setting.dataset == "wikitext2":
            assert cold.accuracy is warm.accuracy is pda.accuracy is None
        else:
            assert cold.accuracy < warm.accuracy < pda.accuracy
    assert len(paper.CELLS) == 18 + 4
    for epsilon in (3.0, 1.0):
        [setting] = [s for s in paper.SETTINGS if s.other_text and s.epsilon == epsilon]
        ours = [
            paper.CELLS["wikitext2", setting.noise_multiplier, name].loss
            for name in ("cold", "warm")
        ]
        # The paper: "already better than Asi et al."
        assert ours[1] < paper.ASI_LARGE_AUX[epsilon] < paper.ASI_COLD[epsilon]


# Table 2


def test_every_cell_of_table_2_is_there_even_without_a_run():
    text = blocks([])["table2"]
    printed = [row for row in text.splitlines() if "DP-SGD |" in row or "PDA-DPMD |" in row]
    assert len(printed) == 18
    for (_, sigma, _), cell in paper.CELLS.items():
        if sigma not in (0.83, 1.49):
            assert f"{cell.loss:.4f}" in text
    assert all(row.count(table.MISSING) == 4 and "0 of 3" in row for row in printed)
    assert "Tuning is not charged" in text


def test_a_row_has_mean_and_deviation_over_its_seeds():
    text = blocks(cifar_lines())["table2"]
    [cold] = rows(text, "1.51", "cold DP-SGD")
    assert cold[2:4] == ["3.51 (1e-5)", "62.96 / 1.4225"]
    assert cold[4] == "7.531 / 6.421 (1e-5)"
    assert cold[5:9] == ["60.00 ± 0.00", "1.5200 ± 0.0100", "61.00 ± 0.00", "1.5100 ± 0.0100"]
    assert cold[9] == "3"
    [warm] = rows(text, "1.51", "warm DP-SGD")
    assert warm[6] == "1.3150 ± 0.0071"
    assert warm[9] == "2 of 3"
    assert warm[-1] == "complete"
    [pda] = rows(text, "1.51", "PDA-DPMD")
    assert pda[11].endswith(" epochs")
    assert rows(text, "20", "cold DP-SGD")[0][9] == "0 of 3"
    assert "zero-out adjacency, unit: example" in text


def test_further_seeds_pair_an_ablation_and_are_not_in_the_row():
    base, ablation = settings_of("cifar10/pda-s20"), settings_of("cifar10/pda-s20-one-clip")
    lines = [line(base, seed, loss=1.0) for seed in (1, 2, 3)]
    lines += [line(base, 4, loss=9.0), line(ablation, 4, loss=9.5)]
    found = blocks(lines)
    [row] = rows(found["table2"], "20", "PDA-DPMD")
    assert row[6] == "1.0000 ± 0.0000"
    assert row[9] == "3"
    [_, row] = [row for row in rows(found["ablations"], "CIFAR-10, σ = 20", "PDA-DPMD")
                if row[2] in ("as in the table", "no second clip")]  # fmt: skip
    assert row[3] == "+0.5000 (1)"
    assert row[9] == "1 of 3"
    figure = figures.training_figure(lines, {"pda": base})
    assert figure.axes[1].get_title() == "test (final runs, 3 seeds)"
    assert [curve.get_ydata()[-1] for curve in figure.axes[1].lines] == pytest.approx([0.99, 1.0])
    # While one of the file's own seeds is missing, all count.
    [row] = rows(blocks(lines[1:])["table2"], "20", "PDA-DPMD")
    assert row[9] == "3"
    assert row[6].startswith("3.6667")


def test_one_seed_has_no_deviation_and_a_diverged_run_is_not_averaged_away():
    settings = settings_of("cifar10/cold-s20")
    [row] = rows(blocks([line(settings, loss=1.7)])["table2"], "20", "cold DP-SGD")
    assert row[6] == "1.7000"
    lines = [line(settings, 1), line(settings, 2, loss=None, accuracy=None)]
    [row] = rows(blocks(lines)["table2"], "20", "cold DP-SGD")
    assert row[6] == "1 of 2 diverged"


def test_a_sample_has_its_label_and_never_the_papers_epsilon():
    lines = cifar_lines() + [
        line(settings_of(f"emnist/{name}-s1.89"), seed, **SAMPLED)
        for name in ("cold", "warm", "pda")
        for seed in (1, 2, 3)
    ]
    text = blocks(lines)["table2"]
    cifar, emnist = text[: text.index("**EMNIST**")], text[text.index("**EMNIST**") :]
    emnist, wikitext = emnist.split("**WikiText-2**")
    assert "paper: ε" in cifar
    assert SAMPLE not in cifar
    assert "paper: ε" not in emnist
    assert not re.search(r"25\.8|\b0\.48\b", emnist)
    assert "paper: ε" in wikitext
    for algorithm in ("cold DP-SGD", "warm DP-SGD", "PDA-DPMD"):
        [row] = rows(emnist, "1.89", algorithm)
        assert row[-1] == f"**{SAMPLE}**"
        assert f"{paper.CELLS['emnist', 1.89, 'pda'].loss:.4f}" in emnist


def test_runs_on_other_data_are_never_averaged():
    settings = settings_of("emnist/cold-s1.89")
    lines = [line(settings, 1, loss=1.0), line(settings, 2, loss=3.0, **SAMPLED)]
    found = rows(blocks(lines)["table2"], "1.89", "cold DP-SGD")
    assert [row[5] for row in found] == ["1.0000", "3.0000"]
    assert [row[-1] for row in found] == ["complete", f"**{SAMPLE}**"]


def test_runs_of_old_settings_are_not_shown_as_runs_of_the_new_ones():
    settings = settings_of("cifar10/cold-s20")
    old = dataclasses.replace(settings, learning_rate=123.0)
    found = blocks([line(old, seed) for seed in (1, 2)])
    assert rows(found["table2"], "20", "cold DP-SGD")[0][9] == "0 of 3"
    assert "2 final lines of cifar10/cold-s20 have other settings" in found["unusable"]
    assert blocks(cifar_lines())["unusable"] == "None."


# Further tables


def test_gains_are_paired_by_seed():
    text = blocks(cifar_lines())["gains"]
    [row] = rows(text, "CIFAR-10, σ = 1.51", "warm − pda")
    assert row[2:] == ["+0.0936", "+0.1000 ± 0.0000", "+0.1000 ± 0.0000", "2", "all", "complete"]
    lines = cifar_lines()
    lines[-1]["warm_start"]["seconds"] = 99
    lines[-2]["warm_start"]["holdout_loss"] = 9.0
    [row] = rows(blocks(lines)["gains"], "CIFAR-10, σ = 1.51", "warm − pda")
    assert row[-2] == "1 of 2"


def test_further_tables_show_what_differs():
    names = ("", "-steps", "-unscaled", "-one-clip", "-no-augmentation")
    lines = [
        line(settings_of(f"cifar10/pda-s20{name}"), seed, loss=1 + 0.1 * number)
        for number, name in enumerate(names)
        for seed in (1, 2, 3)
    ]
    found = blocks(lines)
    reading = rows(found["k"], "CIFAR-10, σ = 20", "PDA-DPMD")
    assert len(reading) == 2
    # K = 2000 epochs of 100 hardly leaves 1; K = 2000 of 9,600 steps has long reached 0.
    assert [row[3] for row in reading] == ["0.997", "0.000"]
    ablations = rows(found["ablations"], "CIFAR-10, σ = 20", "PDA-DPMD")
    shown = {row[2]: row[6] for row in ablations}
    assert shown == {
        "as in the table": "1.0000 ± 0.0000",
        "noise not scaled by α": "1.2000 ± 0.0000",
        "no second clip": "1.3000 ± 0.0000",
        "public images not augmented": "1.4000 ± 0.0000",
    }
    assert [row[3] for row in ablations if row[2] == "as in the table"] == ["–"]
    text = [line(settings_of("wikitext2/pda-s0.5-plain"), **SAMPLED)]
    what = "no dropout on public text, no average in the warm start"
    assert what in blocks(text)["ablations"]


def test_ablations_are_compared_from_the_same_start():
    names = ("", "-unscaled", "-no-augmentation")
    base, unscaled, plain = (settings_of(f"cifar10/pda-s20{name}") for name in names)
    lines = [line(base, 1, loss=1.0), line(base, 2, loss=1.5), line(base, 4, loss=9.0)]
    lines += [line(unscaled, 1, loss=1.25), line(unscaled, 2, loss=1.5, start=1.4)]
    # What pre-trains otherwise cannot begin at the same point.
    lines += [line(plain, 1, loss=1.25, start=1.4), line(plain, 2, loss=2.25, start=1.4)]
    ablations = rows(blocks(lines)["ablations"], "CIFAR-10, σ = 20", "PDA-DPMD")
    changes = {row[2]: row[3] for row in ablations}
    assert changes["noise not scaled by α"] == "+0.2500 (1)"
    assert changes["public images not augmented"] == "+0.5000 ± 0.3536 (2)"
    assert changes["no second clip"] == "–"


def test_the_public_vocabulary_has_its_unknown_rate_and_no_number_of_the_paper():
    lines = [
        line(settings_of(f"wikitext2/public-vocabulary-{name}-s0.5"), loss=4.0, **SAMPLED)
        for name in ("cold", "warm", "pda")
    ]
    found = blocks(lines)
    text = found["public-vocabulary"]
    [row] = rows(text, "WikiText-2, public vocabulary, σ = 0.5", "PDA-DPMD")
    assert row[2] == "20.7%"
    assert row[-1] == f"**{SAMPLE}**"
    assert not any(f"{cell.loss:.4f}" in text for cell in paper.CELLS.values())
    [row] = rows(found["gains"], "WikiText-2, public vocabulary, σ = 0.5", "warm − pda")
    assert row[2] == table.NONE
    assert "4.0000" not in found["table2"]


def test_other_text_stands_beside_asi_et_al():
    text = blocks([])["other-text"]
    [cold] = rows(text, "3", "cold DP-SGD")
    assert cold[2:4] == ["5.4030", "5.4819"]
    [warm] = rows(text, "1", "warm DP-SGD")
    assert warm[2:4] == ["5.5141", "5.5254"]
    lines = [line(settings_of("wikitext2/other-text-warm-e1"), loss=5.0, **SAMPLED)]
    text = blocks(lines)["other-text"]
    [warm] = rows(text, "1", "warm DP-SGD")
    assert "**not covered by the guarantee**" in text
    assert f"- {SAMPLE}: vocabulary: read without noise" in text
    assert warm[2:4] == ["5.5141", "5.5254"]
    assert "5.0000" in warm


def test_calibrated_runs_have_their_own_sigma():
    lines = [line(settings_of("emnist/pda-e0.48"), **SAMPLED)]
    [row] = rows(blocks(lines)["calibrated"], "EMNIST, σ for ε = 0.48 (PLD)", "PDA-DPMD")
    assert row[2:4] == ["0.77", "7.531 / 6.421 (1e-6)"]
    assert "zero-out adjacency, unit: example" in blocks(lines)["calibrated"]


def sweep_lines(accuracies):
    warm = settings_of("cifar10/warm-s1.51")
    return [
        line(
            dataclasses.replace(warm, learning_rate=rate),
            0,
            kind="sweep",
            loss=None if accuracy is None else 1.0 + rate,
            accuracy=accuracy,
        )
        for rate, accuracy in accuracies.items()
    ]


def test_what_was_searched():
    finished = {0.1: 0.5, 0.2: 0.6, 0.5: 0.4}
    [row] = rows(blocks(sweep_lines(finished))["searched"], "`cifar10/warm-s1.51`")
    assert row[1:] == [
        "η = 0.1: 51.00 / 1.0900; η = 0.2: **61.00 / 1.1900**; η = 0.5: 41.00 / 1.4900",
        "finished",
        "complete",
    ]
    [row] = rows(blocks(sweep_lines({0.1: 0.5, 0.2: 0.6}))["searched"], "`cifar10/warm-s1.51`")
    assert row[2] == "not finished"
    other = finished | {0.5: 0.7, 1.0: None}
    [row] = rows(blocks(sweep_lines(other))["searched"], "`cifar10/warm-s1.51`")
    assert "finished with η = 0.5, which is not in the settings file" in row
    assert "η = 1: diverged" in row[1]
    assert "`cifar10/cold-s20`" in blocks([])["searched"]


def test_what_was_searched_marks_other_warm_starts():
    lines = sweep_lines({0.1: 0.5, 0.2: 0.6, 0.5: 0.4})
    lines[2]["warm_start"] = lines[2]["warm_start"] | {"digest": "another"}
    [row] = rows(blocks(lines)["searched"], "`cifar10/warm-s1.51`")
    assert row[1] == (
        "η = 0.1: 51.00 / 1.0900; η = 0.2: **61.00 / 1.1900**; η = 0.5: 41.00 / 1.4900 †"
    )


def test_a_search_on_other_data_finishes_nothing():
    lines = sweep_lines({0.1: 0.5, 0.2: 0.6})
    other = sweep_lines({0.5: 0.4})
    other[0]["data"] |= {"label": SAMPLE, "is_complete": False}
    found = rows(blocks(lines + other)["searched"], "`cifar10/warm-s1.51`")
    assert [row[2] for row in found] == ["not finished", "not finished"]


def test_cost_is_by_machine():
    lines = cifar_lines() + sweep_lines({0.1: 0.5})
    lines += [line(settings_of("emnist/cold-e0.48"), **SAMPLED, device="cpu")]
    text = blocks(lines)["cost"]
    assert rows(text, "gpu, NVIDIA H200, 16 cores", "Table 2: CIFAR-10")[0][2:] == [
        "8",
        "40",
        "320",
        "complete",
    ]
    assert rows(text, "gpu, NVIDIA H200, 16 cores", "Table 2: all of it")[0][4] == "320"
    assert rows(text, "gpu, NVIDIA H200, 16 cores", "sweeps: CIFAR-10")[0][2] == "1"
    assert rows(text, "cpu, 16 cores", "other final runs: EMNIST")[0][2] == "1"
    # Seconds on a sample are no seconds of the whole.
    assert rows(text, "cpu, 16 cores", "everything")[0][2:] == ["1", "40", "40", f"**{SAMPLE}**"]
    assert "54 final runs" in text


# Files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Result files with one damaged line and one that lacks something."""
    monkeypatch.setattr(results, "configurations", lambda: SETTINGS)
    for one in cifar_lines() + sweep_lines({0.1: 0.5, 0.2: 0.6}):
        records.append(tmp_path / "cifar10.jsonl", one)
    for one in [line(settings_of("emnist/pda-s1.89"), seed, **SAMPLED) for seed in (1, 2)]:
        records.append(tmp_path / "emnist.jsonl", one)
    with open(tmp_path / "cifar10.jsonl", "a") as file:
        file.write('{"id": "cut", "kind": "fin\n')
    incomplete = line(settings_of("cifar10/warm-s1.51"), 3)
    del incomplete["privacy"]["epsilon_pld"]
    records.append(tmp_path / "cifar10.jsonl", incomplete)
    # The same run twice counts once.
    records.append(tmp_path / "cifar10.jsonl", cifar_lines()[0])
    return tmp_path


def test_a_damaged_line_is_reported_and_the_others_are_shown(folder, capsys):
    assert dispatcher.main(["table", "--results", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "warning: cifar10.jsonl, line 11: expected one JSON object" in printed.err
    assert "has no usable privacy.epsilon_pld" in printed.err
    tail = printed.out[printed.out.index("## Lines that no table shows") :]
    assert "- cifar10.jsonl, line 11" in tail
    assert rows(printed.out, "1.51", "cold DP-SGD")[0][9] == "3"
    assert rows(printed.out, "1.51", "warm DP-SGD")[0][9] == "2 of 3"


def values_of(line, path=()):
    """Every path below a line that leads to a value."""
    for key, value in line.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from values_of(value, (*path, key))


@pytest.mark.parametrize("damage", ["missing", None, "x", [1], float("nan"), {}], ids=str)
def test_no_damage_to_a_value_of_a_line_is_fatal(tmp_path, damage):
    whole = line(settings_of("cifar10/pda-s20"))
    lines = []
    for seed, path in enumerate(values_of(whole), start=10):
        damaged = copy.deepcopy(whole) | {"seed": seed}
        below = functools.reduce(dict.__getitem__, path[:-1], damaged)
        if damage == "missing":
            del below[path[-1]]
        else:
            below[path[-1]] = damage
        lines.append(damaged)
    text = "".join(json.dumps(one) + "\n" for one in [*lines, whole])
    (tmp_path / "cifar10.jsonl").write_text(text)
    found, problems = results.collect(tmp_path)
    assert whole in found
    assert problems
    assert len(found) + len(problems) == len(lines) + 1
    text = blocks(found, problems)
    # All that is left of a line's numbers is numbers.
    assert rows(text["table2"], "20", "PDA-DPMD")
    for one in found:
        assert figures.curve([one], "last_test_loss") is None or one["curve"]["step"]


def test_the_readme_is_rewritten_between_its_markers(folder, tmp_path):
    readme = tmp_path / "README.md"
    names = [*table.blocks([], SETTINGS, []), "figures"]
    markers = "\n".join(
        f"text {name}\n<!-- deep {name}: begin -->\nold\n<!-- deep {name}: end -->"
        for name in names
    )
    readme.write_text(markers + "\nthe end\n")
    command = ["table", "--results", str(folder), "--readme", str(readme)]
    assert dispatcher.main(command) == 0
    text = readme.read_text()
    assert "\nold\n" not in text
    assert text.endswith("the end\n")
    assert all(f"text {name}\n" in text for name in names)
    assert "](cifar10-s1.51.png)" in text
    assert SAMPLE in text
    assert dispatcher.main([*command, "--no-figures"]) == 0
    assert readme.read_text() == text
    readme.write_text("no marker")
    assert dispatcher.main([*command, "--no-figures"]) == 2
    assert readme.read_text() == "no marker"


def test_our_readme_has_all_markers():
    text = table.README.read_text()
    for name in [*table.blocks([], SETTINGS, []), "figures"]:
        text = sections.replaced(text, f"deep {name}", "x")
    with pytest.raises(ValueError, match="expected the markers"):
        sections.replaced(text, "deep nothing", "x")


# Figures


def test_figures_show_runs_with_bands_and_labels(folder, capsys):
    assert dispatcher.main(["figures", "--results", str(folder), "--out", str(folder / "out")]) == 0
    names = sorted(path.name for path in (folder / "out").iterdir())
    assert names == ["cifar10-s1.51.png", "emnist-s1.89.png"]
    assert image.imread(folder / "out" / names[0]).std() > 0.05
    assert "warning: cifar10.jsonl, line 11" in capsys.readouterr().err


def three(dataset, level):
    """Settings of the three algorithms."""
    return {name: settings_of(f"{dataset}/{name}-{level}") for name in ("cold", "warm", "pda")}


def test_a_figure_has_the_curves_and_bands_of_its_own_data():
    algorithms = three("emnist", "s1.89")
    lines = [
        line(settings, seed, loss=loss + 0.1 * seed, **SAMPLED)
        for settings, loss in zip(algorithms.values(), (3.0, 2.0, 1.0), strict=True)
        for seed in (1, 2, 3)
    ]
    # Runs on other data, and runs of a search, which have another ε and a validation part.
    lines += [line(algorithms["pda"], seed, loss=9.0) for seed in (1, 2)]
    searched = line(algorithms["pda"], 0, kind="sweep", loss=7.0, **SAMPLED)
    searched["privacy"]["epsilon_pld"] = 5.0
    figure = figures.training_figure([*lines, searched], algorithms)
    title = "EMNIST, σ = 1.89, ε = 6.421 (PLD, δ = 1e-06)"
    assert figure.get_suptitle() == f"{title}\n{SAMPLE}"
    validation, test = figure.axes[:2]
    assert validation.get_title() == "validation (run of the sweep, 1 seed)"
    assert test.get_title() == "test (final runs, 3 seeds)"
    # The averaged iterate of three algorithms, each with the last one beside it.
    ends = [curve.get_ydata()[-1] for curve in test.lines]
    assert ends == pytest.approx([3.19, 3.2, 2.19, 2.2, 1.19, 1.2])
    assert [curve.get_ydata()[-1] for curve in validation.lines] == pytest.approx([6.99, 7.0])
    heights = [band.get_paths()[0].get_extents().height for band in test.collections]
    # From one deviation below the end to one above the beginning.
    expected = [2 * mean - mean + 0.3 for mean in (3.19, 2.19, 1.19)]
    assert heights == pytest.approx(expected, rel=1e-3)
    without_cold = figure.axes[3]
    assert [curve.get_ydata()[-1] for curve in without_cold.lines] == pytest.approx(ends[2:])
    # A curve below another one is wider.
    widths = [curve.get_linewidth() for curve in without_cold.lines]
    assert widths[0] > 1.5 * widths[2]


def test_a_search_alone_makes_no_figure_of_results():
    algorithms = three("wikitext2", "s0.5")
    lines = [line(algorithms["warm"], 0, kind="sweep", **SAMPLED)]
    assert figures.training_figure(lines, algorithms) is None
    figure = figures.training_figure([*lines, line(algorithms["warm"], 1, **SAMPLED)], algorithms)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["cold DP-SGD (no run yet)", "warm DP-SGD", "PDA-DPMD (no run yet)"]


def test_nothing_to_draw_is_said(tmp_path, capsys):
    assert dispatcher.main(["figures", "--results", str(tmp_path)]) == 0
    assert "nothing to draw" in capsys.readouterr().out


def test_a_curve_is_mean_and_deviation_and_a_diverged_run_is_a_gap():
    settings = settings_of("cifar10/cold-s20")
    lines = [line(settings, seed, loss=loss) for seed, loss in ((1, 1.0), (2, 1.2))]
    steps, mean, spread = figures.curve(lines, "last_test_loss")
    assert steps.tolist() == [0, 2400, 4800, 7200, 9600]
    assert mean[-1] == pytest.approx(1.1)
    assert spread[-1] == pytest.approx(0.2 / 2**0.5)
    _, mean, _ = figures.curve([*lines, line(settings, 3, loss=None)], "last_test_loss")
    assert mean[-1] != mean[-1]
    assert figures.curve(lines, "last_validation_loss") is None


def test_titles_name_data_that_are_not_complete():
    settings = settings_of("emnist/pda-s1.89")
    assert figures._title("EMNIST", [line(settings)]) == "EMNIST"
    assert figures._title("EMNIST", [line(settings, **SAMPLED)]) == f"EMNIST\n{SAMPLE}"


def test_the_validation_curve_is_of_the_same_data_as_the_final_runs():
    settings = settings_of("emnist/pda-s1.89")
    lines = [line(settings, 0, kind="sweep"), line(settings, 0, kind="sweep", **SAMPLED)]
    finals = [line(settings, 1, **SAMPLED)]
    assert figures.chosen_sweep_line(lines, settings, finals) == lines[1:]
    assert figures.chosen_sweep_line(lines, settings) == lines[:1]
    assert figures.chosen_sweep_line(lines[:1], settings, finals) == []


def test_curves_from_other_warm_starts_say_so():
    warm, pda = (settings_of(f"cifar10/{name}-s1.51") for name in ("warm", "pda"))
    same = [line(warm, seed) for seed in (1, 2)], [line(pda, seed) for seed in (1, 2)]
    assert figures._other_starts(*same) == ""
    assert figures._other_starts(same[0], [line(pda, 3, start=9.0)]) == ""
    other = [line(pda, 1), line(pda, 2, start=9.0)]
    assert figures._other_starts(same[0], other) == figures.OTHER_STARTS


def test_the_gain_is_against_warm_at_the_same_rate():
    pda, warm = settings_of("cifar10/pda-s1.51"), settings_of("cifar10/warm-s1.51")

    def tried(settings, loss, start=1.5, **changes):
        settings = dataclasses.replace(settings, **changes)
        return line(settings, 0, kind="sweep", loss=loss, start=start)

    lines = [
        tried(warm, 1.3, learning_rate=0.2),
        tried(pda, 1.1, learning_rate=0.2, decay=200.0),
        tried(pda, 1.4, start=9.9, learning_rate=0.2, decay=500.0),
        tried(pda, None, learning_rate=0.2, decay=1000.0),
        tried(pda, 1.0, learning_rate=0.5, decay=200.0),
    ]
    found = figures.gain_over_warm(lines, pda, warm)
    assert list(found) == [0.2]
    assert found[0.2] == {
        200.0: (pytest.approx(0.2), True),
        500.0: (pytest.approx(-0.1), False),
    }


def test_epsilon_is_rounded_up():
    privacy = {"epsilon_rdp": 3.50801, "epsilon_pld": 3.23001, "delta": 1e-5}
    assert table._epsilon([{"privacy": privacy}]) == "3.509 / 3.231 (1e-5)"
