"""Results on test rows and coefficients: on the page, as figures and in comparisons."""

import itertools
import json

import numpy as np
import pytest

from mirrordp import cli
from mirrordp.report import ReportError, RunReport, charts, evaluation_figures
from mirrordp.report.comparison import Comparison
from mirrordp.report.evaluation import (
    Score,
    coefficients,
    lines_of_scores,
    results_on_test_rows,
)
from mirrordp.report.page import report_page
from mirrordp.tables import ClassTarget, NumberTarget, evaluation
from tests import remembered
from tests.test_page import HOSTILE, Page, fast_mechanism
from tests.test_report import DELTA


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)


def results(kind="class", name="y", several=False):
    """As `mirrordp fit` writes them."""
    rng = np.random.default_rng(0)
    score = rng.normal(size=80)
    if kind == "class":
        target, truth = ClassTarget(name, ("no", "yes"), False), (score > 0).astype(int)
        p = 1 / (1 + np.exp(-score - rng.normal(size=80)))
        predicted = np.column_stack([1 - p, p])
    else:
        target, truth, predicted = NumberTarget(name, False), score, score + rng.normal(size=80)
    found = evaluation.evaluate(
        [target],
        truth,
        {
            evaluation.MODEL: predicted,
            evaluation.PUBLIC: predicted[::-1],
            evaluation.GUESS: evaluation.guess(target, truth, 80),
        },
    )
    found["coefficients"] = [
        {"feature": f"{name} {k}", "output": f"o{k * several}", "value": k - 2.5, "noise_stddev": s}
        for k, s in enumerate([0.5, None, 0.0])
    ]
    return found


def make_report(**options):
    return RunReport.of(
        fast_mechanism(), DELTA, title="a model", seeded=False, results=results(**options)
    )


@pytest.mark.parametrize("kind", ["class", "number"])
def test_the_page_shows_models_curve_and_coefficients(kind):
    report = make_report(kind=kind)
    text = report_page(report, run="run")
    page = Page(text)
    for model in ("this model", "public rows alone", "guess without features"):
        assert model in page.text
    test = report.results["test"]
    for name, score in test["models"]["this model"].items():
        shown = f"{score['value']:.4g} ({score['low']:.4g} to {score['high']:.4g})"
        assert name in page.text
        assert shown in page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "95%, by a jackknife over test rows" in page.text
    assert ("Calibration" in page.text) == (kind == "class")
    # A curve and the coefficients, each wide and narrow, beside the epsilon over steps.
    labels = [value for tag, key, value in page.attributes if (tag, key) == ("svg", "aria-label")]
    assert sum("against predicted" in label for label in labels) == 2
    assert sum("largest coefficients" in label for label in labels) == 2
    assert "y 0" in page.text
    # The numbers of the table are not repeated among the settings.
    configuration = text[text.index("<h2>Configuration") :]
    assert "baseline" not in configuration
    assert "coefficients" not in configuration


def test_the_text_ends_with_the_scores(tmp_path, capsys):
    report = make_report()
    report.write(tmp_path / "run")
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(report.privacy_card())
    scores = printed[len(report.privacy_card()) :]
    assert scores.startswith("\nOn 80 test rows (intervals: 95%, by a jackknife over test rows):\n")
    models = report.results["test"]["models"]
    assert scores.splitlines()[2].split("  ")[-1].strip() == "guess without features"
    for name in models["this model"]:
        (line,) = [line for line in scores.splitlines() if line.startswith(f"  {name} ")]
        assert all(f"{scores[name]['value']:.4g}" in line for scores in models.values())


def test_names_of_models_cannot_move_the_cursor():
    lines = lines_of_scores({"a\x1b[2J\n": {"m\r": Score(1.0, None, None)}})
    assert lines == ["      a?[2J?", "  m?  1"]


def test_hostile_names_stay_text():
    report = make_report(name=HOSTILE)
    page = Page(report_page(report, run="run"))
    assert set(page.tags).isdisjoint({"script", "img"})
    assert evaluation_figures(report.results)["coefficients.png"].startswith(b"\x89PNG")


def test_bars_have_the_right_ends():
    drawn = charts.bars(
        [("a", 1.0, -1.0, 3.0), ("b" * 200, 0.0, 0.0, 0.0)], describe="d", x_label="x", width=760
    )
    page = Page(drawn)
    assert "…" in page.text
    lines = [value for tag, key, value in page.attributes if (tag, key) == ("path", "d")]
    (bar, *_) = [line for line in lines if "H" in line]
    low, high = (float(part) for part in (bar[1:].split()[0], bar.split("H")[1]))
    zero = next(
        float(line[1:].split()[0]) for line in lines if "V" in line and line.startswith("M")
    )
    assert zero <= low < high <= 742
    assert "-1" in page.text
    assert "3" in page.text


@pytest.mark.parametrize(
    "content",
    [
        None,
        3,
        {},
        {"models": {}},
        {"rows": 1, "interval": "", "models": {"m": 3}, "curves": [{}]},
        {
            "rows": 1,
            "interval": "i",
            "models": {},
            "curves": [{"kind": "", "event": "", "points": []}],
        },
    ],
)
def test_results_of_another_form_are_listed_as_they_are(content):
    found = {"test": content, "coefficients": content, "test_loss": 1.0}
    assert results_on_test_rows(found) is None
    assert coefficients(found) == {}
    report = RunReport.of(fast_mechanism(), DELTA, title="other", results=found)
    assert "test loss" in Page(report_page(report, run="run")).text
    with pytest.raises(ReportError, match="expected results on test rows"):
        evaluation_figures(found)


@pytest.mark.parametrize("number", [None, "1", float("nan")])
def test_changed_numbers_are_noticed(number):
    changed = json.loads(json.dumps(results()))
    changed["test"]["curves"][0]["points"][0]["low"] = number
    changed["coefficients"][0]["value"] = number
    assert results_on_test_rows(changed) is None
    assert coefficients(changed) == {}


def test_several_outputs_are_named():
    assert [one.name for one in coefficients(results(several=True))[""]] == [
        "y 0 (o0)",
        "y 1 (o1)",
        "y 2 (o2)",
    ]
    first, second, _ = coefficients(results())[""]
    assert first.name == "y 0"
    assert first.ends == (-3.5, -1.5)
    assert second.ends == (-1.5, -1.5)


@pytest.mark.parametrize(("kind", "name"), [("class", "calibration"), ("number", "residuals")])
def test_figures_as_files(tmp_path, capsys, kind, name):
    make_report(kind=kind).write(tmp_path)
    assert cli.main(["report", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    assert "Wrote" in capsys.readouterr().out
    found = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert set(found) == {f"{name}.png", "coefficients.png"}
    assert all(content.startswith(b"\x89PNG") for content in found.values())


def test_no_figures_without_results(tmp_path, capsys):
    RunReport.of(fast_mechanism(), DELTA).write(tmp_path)
    assert cli.main(["report", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 2
    assert "leave --figures out" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_the_run_without_the_measure_is_named():
    without = RunReport.of(fast_mechanism(), DELTA)
    with pytest.raises(ReportError, match="in 'second'; choose another --metric, or judge"):
        Comparison.of({"first": make_report(), "second": without}, "auc")


@pytest.mark.parametrize("metric", ["auc", "test_auc", "average_precision", "public_loss"])
def test_any_measure_can_be_compared(metric):
    found = Comparison.of({"one": make_report(), "two": make_report()}, metric)
    name = metric if metric.startswith(("test", "public")) else f"test_{metric}"
    assert found.metric == name
    assert found.rows[0].errors[name] > 0
    assert f"{results()[name]:.4g} +-" in found.text()
    with pytest.raises(ReportError, match="choose another"):
        Comparison.of({"one": make_report()}, "rmse")


def drawn_figures(content, monkeypatch):
    """The figures that `evaluation_figures` draws, instead of their images."""
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    evaluation_figures(content)
    for figure in figures:
        figure.set_dpi(150)
        figure.draw_without_rendering()
    return figures


def visible_ticks(axis):
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


@pytest.mark.parametrize("name", ["y", "WIDE" * 30, "a target with a name of 40 letters, wide"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_nothing_in_a_figure_is_cut_off_or_overlaps(name, scale, monkeypatch):
    content = results(kind="number", name=name)
    for point in content["test"]["curves"][0]["points"]:
        point.update({key: scale * point[key] for key in ("predicted", "observed", "low", "high")})
    for one in content["coefficients"]:
        one.update(value=scale * one["value"], target=name)
    found = drawn_figures(content, monkeypatch)
    assert len(found) == 2
    for figure in found:
        (axes,) = figure.axes
        ticks = visible_ticks(axes.xaxis)
        every = {*ticks, *visible_ticks(axes.yaxis)}
        every |= {axes.xaxis.label, axes.yaxis.label}
        every |= {text for text in (figure._suptitle, figure._supxlabel) if text is not None}
        for text in (text for text in every if text.get_text()):
            box = text.get_window_extent()
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
        boxes = sorted((text.get_window_extent() for text in ticks), key=lambda box: box.x0)
        assert len(boxes) >= 3
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_numbers_and_names_as_they_are_read():
    assert str(Score(90563.2, 87912.0, 1.2e10)) == "90,560 (87,910 to 1.2e+10)"
    assert str(Score(-0.00123456, None, None)) == "-0.001235"
    assert charts.shortened("column=category (class)", 11) == "colum…lass)"
    assert charts.shortened("column", 6) == "column"
