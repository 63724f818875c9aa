"""Pages and comparisons made of stored reports; `test_browser.py` looks at them in Chromium."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from mirrordp import cli
from mirrordp.privacy import FullBatch
from mirrordp.report import Curve, ReportError, RunReport, card, charts, page
from mirrordp.report.comparison import BARS, Comparison
from mirrordp.report.page import comparison_page, report_page
from tests import remembered
from tests.test_report import DELTA, make_mechanism


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)


HOSTILE = "</title><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\u202e\x07" + "x" * 80


def fast_mechanism(**options):
    """Makes a mechanism with full batches, for which ε has a closed form."""
    options = {"sampling": FullBatch.of(1_000), "accountant": None} | options
    return make_mechanism(**options)


def make_report(epsilon_scale=1.0, name="loss", **options):
    steps = np.arange(0, 21, 5)
    rng = np.random.default_rng(0)
    labels = (f"{name} one", f"{name} two")
    curves = [
        Curve(label, steps, 2 - 0.05 * steps + rng.normal(size=(4, 5)) / 10, "test loss")
        for label in labels
    ]
    methods = {
        f"m{i}": {"label": label, "test_loss": 1.0 + i, "test_loss_standard_error": 0.1}
        for i, label in enumerate(labels)
    }
    options = {
        "title": "a small run",
        "curves": curves,
        "results": {"methods": methods, "settings": {"rate": 0.5, "sizes": list(range(20))}},
    } | options
    mechanism = fast_mechanism(noise_multiplier=20 / epsilon_scale)
    return RunReport.of(mechanism, DELTA, **options)


class Page(HTMLParser):
    """Tags, attributes and text of a page; complains about tags that are not closed."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def pages(report):
    yield report_page(report, run="run")
    yield comparison_page(Comparison.of({"run": report, "other": report}))


@pytest.mark.parametrize("seed", [None, 7])
def test_page_says_what_the_card_says(seed):
    report = make_report(seed=seed)
    text = Page(report_page(report, run="run")).text
    for words in (
        report.statement(),
        *(limit for limit in card.limits(report)),
        *(value for _, value in card.numbers(report)),
        *(label for label, _ in card.answers(report)),
        "The budget spent over time",
        "Mean of 4 trials; bands are two standard errors",
        "loss one (best)",
        "1 ± 0.1",
        "settings: rate",
    ):
        assert words in text
    assert ("Not for release" in text) is (seed is not None)


def test_every_warning_is_shown():
    report = dataclasses.replace(
        make_report(seed=1, shown_without_protection=["batch loss"]), epsilon=20.0, delta=0.01
    )
    text = Page(report_page(report, run="run")).text
    titles = [caution.title for caution in report.warnings()]
    assert len(titles) == 5
    assert all(title in text for title in titles)


def test_nothing_is_loaded_and_nothing_runs():
    for text in pages(make_report()):
        page = Page(text)
        assert not {"script", "iframe", "img", "object", "form", "base"} & set(page.tags)
        assert {name for _, name, _ in page.attributes if name.startswith("on")} == set()
        sources = [v for _, name, v in page.attributes if name in ("src", "href", "action")]
        assert sources == ["data:,"]
        # The name space of SVG is a name, not an address that is opened.
        addresses = re.findall(r"(?:https?:)?//[\w.]+[\w/]*", text)
        assert set(addresses) == {"http://www.w3.org/2000/svg"}
        assert "url(" not in text
        assert "default-src 'none'" in text


def hostile_report():
    """Makes a report in which every free text tries to break out of the page."""
    report = make_report(name=HOSTILE)
    texts = {"title", "sampling", "noise", "accountant_method", "scope", "tuning"}
    return dataclasses.replace(
        report,
        **dict.fromkeys(texts, HOSTILE),
        shown_without_protection=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
        curves=tuple(dataclasses.replace(c, quantity=HOSTILE) for c in report.curves),
        results={
            **report.results,
            "measured": HOSTILE,
            "choice_of_setting": HOSTILE,
            HOSTILE: {HOSTILE: [HOSTILE]},
            "methods": {HOSTILE: {"label": HOSTILE, f"loss{HOSTILE}": 1.0}, "b": {"loss": 1.0}},
        },
    )


def test_hostile_text_stays_text():
    report = hostile_report()
    for text in (
        report_page(report, run=HOSTILE),
        comparison_page(Comparison.of({HOSTILE: report, "other": report})),
    ):
        page = Page(text)
        assert not {"script", "img"} & set(page.tags)
        assert {name for _, name, _ in page.attributes if name.startswith("on")} == set()
        assert "<script>alert(1)</script>" in page.text
        assert "\u202e" not in text
        assert "\x07" not in text
        assert "\\u202e\\u0007" in page.text


def test_without_escaping_the_test_above_would_fail(monkeypatch):
    monkeypatch.setattr("mirrordp.report.page.escaped", str)
    with pytest.raises(AssertionError):
        test_hostile_text_stays_text()


def test_reports_come_back_as_they_were(tmp_path):
    report = make_report(seed=3)
    report.write(tmp_path)
    again = RunReport.read(tmp_path)
    assert again.to_json() == report.to_json()
    assert again.privacy_card() == report.privacy_card()
    assert report_page(again, run="run") == report_page(report, run="run")


def test_epsilon_over_steps_is_that_of_the_mechanism():
    report = make_report()
    mechanism = fast_mechanism(noise_multiplier=20.0)
    assert report.epsilon_over_steps[-1] == (20, report.epsilon)
    for steps, epsilon in report.epsilon_over_steps:
        assert epsilon == mechanism.epsilon(DELTA, num_steps=steps)
    values = [epsilon for _, epsilon in report.epsilon_over_steps]
    assert values == sorted(values)
    assert RunReport.of(mechanism, DELTA, charged_steps=0).epsilon_over_steps == ()


def test_first_schema_is_read():
    content = make_report().to_dict()
    for name in ("schema_version", "epsilon_over_steps", "curves"):
        del content[name]
    report = RunReport.from_dict(content)
    text = Page(report_page(report, run="run")).text
    assert "The report does not hold this information." in text
    assert "Learning curves" not in text


def test_odd_reports_have_a_page(tmp_path):
    no_steps = RunReport.of(fast_mechanism(), DELTA, charged_steps=0)
    one_step = RunReport.of(fast_mechanism(), DELTA, charged_steps=1)
    no_noise = dataclasses.replace(make_report(), epsilon=math.inf)
    steps = np.array([0, 5])
    diverged = make_report(
        curves=[Curve("a", steps, np.array([[1.0, math.nan]])), Curve("b", steps, np.ones((1, 2)))]
    )
    nothing = make_report(curves=[Curve("a", steps, np.full((1, 2), math.nan))], results={})
    for report in (no_steps, one_step, no_noise, diverged, nothing):
        report.write(tmp_path)
        for text in pages(RunReport.read(tmp_path)):
            page = Page(text)
            assert "nan" not in re.sub(r"\bnan\b(?=</td>|\))", "", text.lower())
            assert "None" not in page.text
            assert "inf " not in page.text
    assert "No protection" in report_page(no_noise, run="r")


def test_unprivatized_curves_are_refused():
    with pytest.raises(ValueError, match="not covered"):
        Curve("a", np.arange(2), np.ones((1, 2)), "unprivatized loss")
    with pytest.raises(ValueError, match="one row per trial"):
        Curve("a", np.arange(2), np.ones(2))


CHANGES = {
    "no field": lambda c: c.pop("sampling"),
    "text for a number": lambda c: c.update(delta="small"),
    "bool for a number": lambda c: c.update(charged_steps=True),
    "delta": lambda c: c.update(delta=2.0),
    "negative": lambda c: c.update(epsilon=-1.0),
    "adjacency": lambda c: c.update(adjacency="edit"),
    "unit": lambda c: c.update(unit="<b>"),
    "versions": lambda c: c.update(versions={"a": 1}),
    "curve": lambda c: c["curves"][0].update(values=[[1.0]]),
    "curve text": lambda c: c["curves"][0].update(values=[["a"] * 5]),
    "label": lambda c: c["curves"][0].update(label=3),
    "spent": lambda c: c.update(epsilon_over_steps=[[1]]),
    "spent text": lambda c: c.update(epsilon_over_steps=[["a", 1.0]]),
    "results": lambda c: c.update(results=[1]),
    "no results": lambda c: c.update(results=None),
    "unprivatized": lambda c: c.update(results={"unprivatized_loss": 1.0}),
    "unprivatized curve": lambda c: c["curves"][0].update(quantity="unprivatized loss"),
    "schema": lambda c: c.update(schema_version=99),
    "schema text": lambda c: c.update(schema_version="2"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_reports_are_refused(change):
    content = make_report().to_dict()
    RunReport.from_dict(content)
    change(content)
    with pytest.raises(ReportError, match="expected"):
        RunReport.from_dict(content)


@pytest.fixture
def folders(tmp_path):
    for number, scale in enumerate((0.5, 1.0, 2.0)):
        make_report(scale).write(tmp_path / f"run-{number}")
    return [tmp_path / f"run-{number}" for number in range(3)]


def test_report_command(capsys, folders, tmp_path):
    assert cli.main(["report", str(folders[0])]) == 0
    assert capsys.readouterr().out == (folders[0] / "privacy_card.md").read_text()
    path = tmp_path / "page.html"
    assert cli.main(["report", str(folders[0]), "--html", str(path)]) == 0
    assert capsys.readouterr().out == f"Wrote {path}\n"
    assert path.read_text() == report_page(RunReport.read(folders[0]), run="run-0")
    assert cli.main(["report", str(folders[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["charged_steps"] == 20


def test_compare_command(capsys, folders, tmp_path):
    names = [str(folder) for folder in folders]
    page, image = tmp_path / "page.html", tmp_path / "image.png"
    assert cli.main(["compare", *names, "--html", str(page), "--png", str(image)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == [
        *("run", "method", "epsilon", "delta", "adjacency", "unit", "steps", "test_loss"),
        *("for", "release"),
    ]
    assert len([line for line in lines if line.startswith("run-")]) == 6
    assert "at most epsilon" in out
    assert image.read_bytes().startswith(b"\x89PNG")
    assert "Privacy and utility" in Page(page.read_text()).text
    assert cli.main(["compare", *names, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == "test_loss"
    assert [row["test_loss"] for row in found["rows"]] == [1.0, 2.0] * 3
    total = sum(row["epsilon"] for row in found["rows"])
    [note] = [note for note in found["notes"] if "same private records" in note]
    stated = float(re.search(r"epsilon ([\d.]+),", note)[1])
    assert total <= stated <= 1.001 * total
    # The choice itself, where it looks at private rows, is a release that no addition covers.
    assert "A choice that looks at private records is not covered." in note
    assert "by private records" not in note


def test_delta_is_never_shown_smaller_than_it_is():
    """This holds on the page of one run, in the table of several, and in their sum."""
    one = dataclasses.replace(make_report(), delta=1.2345641e-6)
    shown = report_page(one, run="one")
    assert "1.23457e-06" in shown
    assert "1.23456e-06" not in shown
    comparison = Comparison.of({"a": one, "b": one})
    assert comparison.cells(comparison.rows[0])[3] == "1.23457e-06"
    (note,) = (note for note in comparison.notes() if "by addition" in note)
    stated = float(note.split("delta ")[1].split()[0])
    assert 4 * one.delta <= stated <= 1.001 * 4 * one.delta
    # Rows of several trials are several models each.
    assert "all 4 models, one trial of each row, come" in note
    single = dataclasses.replace(one, curves=())
    assert "all 4 models come" in " ".join(Comparison.of({"a": single, "b": single}).notes())


def test_runs_of_one_seed_do_not_add_up():
    one, other = (make_report(seed=seed) for seed in (1, 2))
    notes = " ".join(Comparison.of({"a": one, "b": other}).notes())
    assert "costs at most epsilon" in notes
    notes = " ".join(Comparison.of({"a": one, "b": one}).notes())
    assert "costs at most epsilon" not in notes
    assert "together they promise nothing" in notes
    known, unknown = (make_report(seeded=seeded) for seeded in (False, None))
    for other, is_noted in ((known, False), (unknown, True), (one, True)):
        notes = " ".join(Comparison.of({"a": unknown, "b": other}).notes())
        assert ("Not every report states the seed" in notes) is is_noted
        assert "costs at most epsilon" in notes


def test_comparing_what_cannot_be_compared_is_said(capsys):
    one = make_report()
    other = dataclasses.replace(one, unit="user", delta=1e-6, results={"accuracy": 0.5})
    comparison = Comparison.of({"a": one, "b": other})
    assert comparison.metric is None
    notes = " ".join(comparison.notes())
    assert "differ in unit (example, user)" in notes
    assert "differ in delta" in notes
    assert "nothing" not in notes
    assert "same private records" not in notes
    with pytest.raises(ReportError, match="to draw, got none"):
        comparison.figure()
    Page(comparison_page(comparison))
    with pytest.raises(ReportError, match="expected quantity 'accuracy'"):
        Comparison.of({"a": one, "b": other}, "accuracy")


def table_report(target, value, epsilon_scale=1.0, **options):
    """Makes a report like those of `mirrordp fit --test`."""
    results = {"method": "exact", "task": "regression", "target": target, "test_rmse": value}
    return make_report(epsilon_scale, curves=[], results=results, **options)


def test_models_of_different_targets_are_said_to_be():
    same = Comparison.of({"a": table_report("y", 1.0), "b": table_report("y", 2.0, 2.0)})
    assert "target" not in " ".join(same.notes())
    assert list(same.groups()) == ["exact"]
    other = Comparison.of({"a": table_report("y", 1.0), "b": table_report("income", 2.0, 2.0)})
    assert (
        "The runs predict different targets (regression of 'income', regression of 'y'): their "
        "quality cannot be compared."
    ) in other.notes()
    # No line joins them, and the table says which is which.
    assert list(other.groups()) == ["exact, regression of 'y'", "exact, regression of 'income'"]
    assert "exact, regression of 'income'" in other.text()
    assert [row["target"] for row in other.to_dict()["rows"]] == [
        "regression of 'y'", "regression of 'income'",
    ]  # fmt: skip


def test_models_of_different_titles_are_said_to_be():
    one = make_report(curves=[])
    assert "titles" not in " ".join(Comparison.of({"a": one, "b": one}).notes())
    other = dataclasses.replace(one, title="another model")
    notes = " ".join(Comparison.of({"a": one, "b": other}).notes())
    assert "different titles (a small run; another model)" in notes


def test_points_bear_the_names_of_their_runs(monkeypatch):
    import matplotlib.axes

    shown = []
    monkeypatch.setattr(
        matplotlib.axes.Axes, "annotate", lambda self, text, *_, **__: shown.append(text)
    )
    hostile = f"b$_{HOSTILE}"
    two = {"run-a": table_report("y", 1.0), hostile: table_report("y", 2.0, 2.0)}
    comparison = Comparison.of(two)
    comparison.figure()
    assert shown[0] == "run-a"
    assert shown[1].startswith(r"b\$_</title>")
    drawn = Page(comparison_page(comparison))
    assert "run-a" in drawn.text
    assert "script" not in drawn.tags
    assert comparison_page(comparison).count(">run-a</text>") > 0
    # One run with several methods has nothing to tell apart, and many runs have no room.
    assert Comparison.of({"one": make_report()}).names([]) is None
    many = Comparison.of({f"run {i}": table_report("y", 1.0, 1 + i) for i in range(13)})
    assert many.names(many.rows) is None


def test_folders_of_one_name_are_told_apart(tmp_path):
    paths = [tmp_path / "a" / "out", tmp_path / "b" / "out"]
    for path in paths:
        make_report().write(path)
    assert [row.run for row in Comparison.read(paths).rows] == ["a/out"] * 2 + ["b/out"] * 2
    twice = [row.run for row in Comparison.read([paths[0], paths[0]]).rows]
    assert len(set(twice)) == 2


BAD = {
    "no folder": lambda d, t: ["report", t / "none"],
    "no report": lambda d, t: ["report", t],
    "not JSON": lambda d, t: (d[0] / "report.json").write_text("{") and ["report", d[0]],
    "other JSON": lambda d, t: (d[0] / "report.json").write_text("[1]") and ["report", d[0]],
    "binary": lambda d, t: (d[0] / "report.json").write_bytes(b"\xff\x00") and ["report", d[0]],
    "NaN": lambda d, t: (d[0] / "report.json").write_text('{"epsilon": NaN}') and ["report", d[0]],
    "deep": lambda d, t: (d[0] / "report.json").write_text("[" * 10**5) and ["report", d[0]],
    "page is a folder": lambda d, t: ["report", d[0], "--html", t],
    "page below a file": lambda d, t: ["report", d[0], "--html", d[0] / "report.json" / "x"],
    "no folders": lambda d, t: ["compare"],
    "one is missing": lambda d, t: ["compare", d[0], t / "none"],
    "metric": lambda d, t: ["compare", d[0], "--metric", "beauty", "--html", t / "x.html"],
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence(capsys, folders, tmp_path, arguments):
    words = [str(word) for word in arguments(folders, tmp_path)]
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mirrordp: error: ")
    assert captured.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def seen(colour, matrix):
    """Returns CIELAB coordinates of a colour as seen with a deficiency of colour vision."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.asarray(matrix) @ linear, 0, 1)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]] @ linear
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(palette, matrix):
    points = [seen(colour, matrix) for colour in palette]
    return min(np.linalg.norm(a - b) for i, a in enumerate(points) for b in points[:i])


@pytest.mark.parametrize("matrix", DEFICIENCIES.values(), ids=DEFICIENCIES.keys())
def test_palette_can_be_told_apart(matrix):
    assert nearest(charts.PALETTE, matrix) > 14


def test_the_palette_test_rejects_red_and_green():
    assert nearest(["#b40000", "#3c8c00"], DEFICIENCIES["deuteranopia"]) < 35
    assert nearest(["#8c5a00", "#5a7800"], DEFICIENCIES["deuteranopia"]) < 10


def test_names_that_a_terminal_cannot_show(tmp_path):
    folders = [tmp_path / f"run-{number}" for number in range(2)]
    for folder in folders:
        make_report(name=HOSTILE + "ü@@").write(folder)
        path = folder / "report.json"
        # JSON can name half of a character, which no encoding can hold.
        path.write_text(path.read_text("utf-8").replace("@@", "\\ud800"), "utf-8")
    page, image = tmp_path / "page.html", tmp_path / "image.png"
    words = ["compare", *folders, "--html", page, "--png", image]
    result = subprocess.run(
        [sys.executable, "-m", "mirrordp", *map(str, words)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert b"error" not in result.stderr
    assert b"\x07" not in result.stdout
    assert "\\ud800" in Page(page.read_text("utf-8")).text


@pytest.mark.parametrize(
    "ledger",
    [
        {"length": 1},
        {"length": 1, "head": 2},
        {"length": 1, "head": "a", "budget": {"epsilon": 1.0}},
        {"length": 1, "head": "a", "budget": 3},
        {"length": "many", "head": "a"},
    ],
)
def test_changed_ledgers_are_refused(ledger):
    content = make_report().to_dict()
    budget = {"epsilon": 3.0, "delta": 1e-5, "runs": 2, "used": 0.25}
    report = RunReport.from_dict(
        content | {"ledger": {"length": 2, "head": HOSTILE, "budget": budget}}
    )
    assert "they share one budget, of which 25%" in Page(report_page(report, run="r")).text
    with pytest.raises(ReportError, match="changed or missing parts"):
        RunReport.from_dict(content | {"ledger": ledger})


def test_bars_are_as_long_as_the_text_says(monkeypatch):
    """One standard error in the table, in the figure and on the page, and both say so."""
    import matplotlib.axes
    import matplotlib.figure

    drawn, told = [], []
    original = matplotlib.axes.Axes.errorbar

    def errorbar(self, x, y, yerr, **options):
        drawn.append((y, yerr))
        return original(self, x, y, yerr, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "errorbar", errorbar)
    monkeypatch.setattr(
        matplotlib.figure.Figure, "supxlabel", lambda self, text, **_: told.append(text)
    )
    report = table_report("y", 0.3625)
    report = dataclasses.replace(
        report, results={**report.results, "test_rmse_standard_error": 0.02}
    )
    comparison = Comparison.of({"a": report})
    assert "0.3625 +- 0.02" in comparison.text()
    assert "+- is one standard error" in comparison.text()
    comparison.figure()
    assert drawn == [([0.3625], [0.02])]
    assert told == [BARS]
    assert BARS.startswith("Bars are one standard error to either side")
    series = []
    both_sizes = page.both_sizes

    def kept(found, **options):
        series.extend(found)
        return both_sizes(found, **options)

    monkeypatch.setattr(page, "both_sizes", kept)
    assert BARS in comparison_page(comparison)
    assert [*series[0].low, *series[0].high] == pytest.approx([0.3425, 0.3825])
    # Without errors there are no bars to speak of.
    assert BARS not in comparison_page(Comparison.of({"a": table_report("y", 0.3625)}))
