"""Several targets of one table: one fit and one guarantee, from the command line to each export."""

import csv
import dataclasses
import json

import numpy as np
import onnxruntime
import pytest

import mirrordp
from mirrordp import cli
from mirrordp.data import UNPROTECTED
from mirrordp.linear import _network, nonlinear
from mirrordp.report.comparison import Comparison, higher_is_better
from mirrordp.tables import NumberTarget, TableError, export, learn_encoding, read_table, serving
from mirrordp.tables.fitting import TableModel
from tests import remembered
from tests.test_export import load

TARGETS = ["price", "score, old_one"]


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)
    remembered.plans(monkeypatch)


def make_table(path, rows, seed, empty=()):
    """Two targets with different units, which follow from x and colour."""
    rng = np.random.default_rng(seed)
    x, red = rng.normal(size=rows), rng.integers(2, size=rows)
    price = [f"{value:.1f}" for value in 1e5 * (x + red) + 1e3 * rng.normal(size=rows)]
    score = [f"{value:.4f}" for value in 2 - 3 * x + 0.1 * rng.normal(size=rows)]
    for row in empty:
        score[row] = ""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x", "colour", *TARGETS])
        colours = np.where(red, "red", "blue")
        writer.writerows(zip(x, colours, price, score, strict=True))
    return path


def options(folder, **others):
    given = {
        "private": folder / "private.csv",
        "public": folder / "public.csv",
        "task": "regression",
        "epsilon": 3,
        "delta": 1e-4,
        "out": folder / "model",
        "seed": 0,
    } | others
    named = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["fit", *named, *(word for name in TARGETS for word in ("--target", name))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    make_table(folder / "private.csv", 1000, 0)
    make_table(folder / "public.csv", 100, 1)
    make_table(folder / "test.csv", 60, 2)
    assert cli.main([*options(folder, test=folder / "test.csv"), "--ceiling"]) == 0
    return folder


def test_predictions_are_those_of_each_target(folder):
    output = folder / "output.csv"
    command = ["predict", "--model", folder / "model", "--input", folder / "test.csv"]
    assert cli.main([*map(str, command), "--output", str(output), "--keep", "price"]) == 0
    found, truth = read_table(output).columns, read_table(folder / "test.csv").columns
    assert list(found) == ["price", *(f"prediction of {name}" for name in TARGETS)]
    results = json.loads((folder / "model" / "report.json").read_text())["results"]
    assert results["target"] == "price, score, old_one"
    for name, spread in zip(TARGETS, (1e5, 3.0), strict=True):
        gaps = np.array(truth[name], float) - np.array(found[f"prediction of {name}"], float)
        rmse = np.sqrt(np.mean(gaps**2))
        assert rmse < 0.2 * spread
        assert results[f"test_rmse of {name}"] == pytest.approx(rmse, rel=1e-6)
        assert results[f"baseline_rmse of {name}"] > 0.8 * spread
        assert f"public_r2 of {name}" in results


def test_each_target_has_its_own_curve_and_coefficients(folder, tmp_path, capsys):
    files = [f"{kind}_{k}.png" for kind in ("residuals", "coefficients") for k in (1, 2)]
    page = tmp_path / "page.html"
    command = ["report", folder / "model", "--figures", tmp_path, "--html", page]
    assert cli.main([str(word) for word in command]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {*files, "page.html"}
    text = page.read_text()
    for name in TARGETS:
        assert f"<h3>{name}</h3>" in text
        assert f"predicted {name}" in text
    capsys.readouterr()
    assert cli.main(["compare", str(folder / "model"), "--metric", "rmse of price"]) == 0
    assert "test_rmse of price" in capsys.readouterr().out
    assert Comparison.read([folder / "model"]).metric == "test_rmse of price"


def test_the_name_of_a_target_does_not_decide_what_is_better():
    assert higher_is_better("test_r2 of loss")
    assert not higher_is_better("test_rmse of score")


def test_what_is_printed(folder, tmp_path, capsys):
    command = options(folder, test=folder / "test.csv", out=tmp_path / "model")
    assert cli.main([*command, "--ceiling"]) == 0
    captured = capsys.readouterr()
    assert "Fitted regression of 'price', 'score, old_one' on 2 columns" in captured.out
    for name in TARGETS:
        assert f"\n  rmse of {name} " in captured.out
        assert f"rmse of {name} " in captured.err.partition(UNPROTECTED)[2]
    assert cli.main([*options(folder, out=tmp_path / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == TARGETS


def test_exports_and_service_compute_the_same(folder, tmp_path):
    model = mirrordp.load_model(folder / "model")
    rows = {"x": [0.5, None, -1.0], "colour": ["red", "blue", "green"]}
    expected = model.predict(rows)
    both = np.column_stack([expected[f"prediction of {name}"] for name in TARGETS])
    assert np.ptp(both, axis=0).min() > 1
    found = load(export.numpy_source(model), tmp_path).predict(rows)
    assert list(found) == list(expected)
    np.testing.assert_allclose(np.column_stack(list(found.values())), both, rtol=1e-12)
    session = onnxruntime.InferenceSession(export.onnx_bytes(model))
    (found,) = session.run(None, export.onnx_inputs(model, rows))
    np.testing.assert_allclose(found, both, rtol=1e-9)
    assert json.loads(session.get_modelmeta().custom_metadata_map["targets"]) == TARGETS
    body = json.dumps({name: cells[0] for name, cells in rows.items()}).encode()
    answer = serving.answer(model, body, 10)
    assert answer["prediction"] == dict(zip(TARGETS, both[0].tolist(), strict=True))


def test_a_row_that_lacks_a_target_contributes_nothing(folder, tmp_path):
    """Whichever target it lacks, and whatever the others say."""
    models = []
    for number, text in enumerate(("1e9", "-1e9")):
        make_table(tmp_path / "private.csv", 1000, 0, empty=[3])
        lines = (tmp_path / "private.csv").read_text().splitlines()
        cells = lines[4].split(",")
        lines[4] = ",".join([*cells[:2], text, *cells[3:]])
        (tmp_path / "private.csv").write_text("\n".join(lines) + "\n")
        out = tmp_path / f"model {number}"
        assert cli.main(options(folder, private=tmp_path / "private.csv", out=out)) == 0
        models.append(mirrordp.load_model(out))
    np.testing.assert_array_equal(models[0].coefficients, models[1].coefficients)
    whole = mirrordp.load_model(folder / "model")
    assert (models[0].coefficients != whole.coefficients).any()


@pytest.mark.parametrize("kind", ["trees", "network"])
def test_trees_and_networks_take_several_targets(folder, kind, monkeypatch):
    monkeypatch.setattr(_network, "_LOOKS", 8)
    fits = {"trees": nonlinear.PrivateTreesRegressor, "network": nonlinear.PrivateNetworkRegressor}
    tables = {name: read_table(folder / f"{name}.csv") for name in ("private", "public", "test")}
    encoding = learn_encoding(tables["public"], target=TARGETS, task="regression").encoding
    rows = {name: encoding.encode([table], private=False) for name, table in tables.items()}
    settings = {"steps": 5} if kind == "network" else {}
    estimator = fits[kind](3.0, 1e-4, random_state=0, groups=encoding.groups, **settings)
    estimator.fit(
        rows["private"].features,
        rows["private"].target,
        X_public=rows["public"].features,
        y_public=rows["public"].target,
    )
    model = TableModel("regression", encoding, estimator.scorer_, privacy={})
    read = TableModel.from_json(model.to_json(), "here")
    assert read.encoding == encoding
    gaps = read.expected(rows["test"].features) - rows["test"].target
    spread = rows["test"].target.std(axis=0)
    assert (np.sqrt(np.mean(gaps**2, axis=0)) < 0.5 * spread).all()


@pytest.mark.parametrize(
    ("others", "targets", "message"),
    [
        ({"task": "classification"}, TARGETS, "expected one target for --task classification"),
        ({"task": "count"}, TARGETS, "Only --task regression takes several"),
        ({}, ["price", "price"], "expected different targets, got 'price', 'price'"),
        ({}, ["price", "colour"], "got 'blue'"),
        ({}, ["price", "other"], "expected column 'other'"),
        ({"ignore": "score, old_one"}, TARGETS, "neither ignored nor declared categorical"),
    ],
)
def test_wrong_targets_are_refused_before_private_rows_are_read(
    folder, tmp_path, capsys, others, targets, message
):
    first = options(folder, out=tmp_path / "model", private=tmp_path / "none.csv", **others)
    command = first[: first.index("--target")]
    assert cli.main([*command, *(word for name in targets for word in ("--target", name))]) == 2
    assert message in capsys.readouterr().err


def test_only_regression_may_have_several(folder):
    model = mirrordp.load_model(folder / "model")
    with pytest.raises(ValueError, match="outputs"):
        dataclasses.replace(model, task="count")
    counts = tuple(NumberTarget(name, is_count=True) for name in TARGETS)
    encoding = dataclasses.replace(model.encoding, target=counts[0], further_targets=counts[1:])
    with pytest.raises(ValueError, match="outputs"):
        dataclasses.replace(model, task="count", encoding=encoding)
    with pytest.raises(TableError, match="changed or missing parts"):
        TableModel.from_json(model.to_json().replace('"price"', '"prices"'), "here")
