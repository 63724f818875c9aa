import csv
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import mirrordp
from mirrordp import cli
from mirrordp.data import UNPROTECTED
from mirrordp.linear import estimators
from mirrordp.tables import TableError, fitting as tabular, read_table, write_table
from tests import remembered

SECRET = "zanzibar"
"""A category that occurs in private rows only."""


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)
    remembered.plans(monkeypatch)


def make_table(path, rows, seed, *, task="regression", words=("red", "blue")):
    """A table whose target follows from x and colour."""
    rng = np.random.default_rng(seed)
    x, colour = rng.normal(size=rows), rng.integers(len(words), size=rows)
    score = 2 * x + 3 * (colour == 0) + 0.1 * rng.normal(size=rows)
    target = {
        "regression": lambda: [f"{value:.4f}" for value in score],
        "classification": lambda: np.array(["no", "yes"])[(score > 1).astype(int)],
        "count": lambda: rng.poisson(np.exp(0.3 * score)),
        "ordinal": lambda: np.digitize(score, [0, 2, 4]),
    }[task]()
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "x", "colour", "y"])
        writer.writerows(zip(range(rows), x, np.array(words)[colour], target, strict=True))
    return path


def two_tables(folder):
    """A private and a public table, and where a model goes."""
    return {
        "private": make_table(folder / "private.csv", 400, 0),
        "public": make_table(folder / "public.csv", 60, 1),
        "out": folder / "model",
    }


@pytest.fixture
def files(tmp_path):
    return {
        "private": make_table(tmp_path / "private.csv", 400, 0, words=("red", "blue", SECRET)),
        "public": make_table(tmp_path / "public.csv", 60, 1),
        "input": make_table(tmp_path / "input.csv", 20, 2),
        "out": tmp_path / "model",
    }


def fit_options(files, task: str | None = "regression", **others):
    options = {
        "private": files["private"],
        "public": files["public"],
        "target": "y",
        "task": task,
        "epsilon": 3,
        "delta": 1e-4,
        "ignore": "id",
        "out": files["out"],
    } | others
    given = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    return ["fit", *(word for pair in given for word in pair)]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """One fitted folder for the tests that only read it."""
    folder = tmp_path_factory.mktemp("fitted")
    files = {
        "private": make_table(folder / "private.csv", 400, 0, words=("red", "blue", SECRET)),
        "public": make_table(folder / "public.csv", 60, 1),
        "out": folder / "model",
    }
    assert cli.main(fit_options(files)) == 0
    return files["out"]


def test_numbers_with_commas(capsys, tmp_path):
    """The model remembers how numbers are written, so that predict needs no option."""
    files = two_tables(tmp_path) | {"input": make_table(tmp_path / "input.csv", 20, 2)}
    assert cli.main(fit_options(files, seed=1)) == 0
    predictions = []
    for model in ("model", "commas"):
        if model == "commas":
            for path in (files["private"], files["public"], files["input"]):
                path.write_text(path.read_text().replace(",", ";").replace(".", ","))
            files["out"] = tmp_path / model
            assert cli.main(fit_options(files, seed=1, decimal=",")) == 0
        output = tmp_path / f"{model}.csv"
        command = ["predict", "--model", tmp_path / model, "--input", files["input"]]
        assert cli.main([*map(str, command), "--output", str(output)]) == 0
        predictions.append(read_table(output).columns["prediction"])
    assert predictions[0] == predictions[1]
    files["out"] = tmp_path / "third"
    assert cli.main(fit_options(files, decimal=";")) == 2
    assert "decimal separator among" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["regression", "classification", "count", "ordinal"])
def test_fit_and_predict(capsys, tmp_path, task):
    files = {
        "private": make_table(tmp_path / "private.csv", 2000, 0, task=task),
        "public": make_table(tmp_path / "public.csv", 100, 1, task=task),
        "out": tmp_path / "deep" / "model",
    }
    assert cli.main([*fit_options(files, task, seed=3), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["epsilon"] <= 3
    assert result["features"] == ["x", "colour=blue", "colour=red"]
    assert result["left_out"] == {"id": "ignored on request"}
    assert result["randomness"] == "reproducible, not for release"
    names = {path.name for path in files["out"].iterdir()}
    assert names == {"model.json", "report.json", "privacy_card.md"}
    report = json.loads((files["out"] / "report.json").read_text())
    assert report["seeded"] is True
    assert report["epsilon"] == result["epsilon"]
    assert report["num_examples"] == 2000
    assert "number of records counts as public" in (files["out"] / "privacy_card.md").read_text()

    source = make_table(tmp_path / "input.csv", 300, 2, task=task)
    output = tmp_path / "output.csv"
    options = ["--model", str(files["out"]), "--input", str(source), "--output", str(output)]
    assert cli.main(["predict", *options, "--keep", "id"]) == 0
    assert "Wrote 300 predictions" in capsys.readouterr().out
    found, truth = read_table(output).columns, read_table(source).columns["y"]
    assert found["id"] == tuple(str(i) for i in range(300))
    if task == "classification":
        assert np.mean(np.array(found["prediction"]) == np.array(truth)) > 0.85
        shares = [np.array(found[f"probability of {name}"], float) for name in ("no", "yes")]
        np.testing.assert_allclose(shares[0] + shares[1], 1)
    else:
        correlation = np.corrcoef(np.array(found["prediction"], float), np.array(truth, float))
        assert correlation[0, 1] > (0.9 if task == "regression" else 0.5)


@pytest.mark.filterwarnings("ignore:this is one of [0-9]+ private fits")
@pytest.mark.filterwarnings("ignore:.*beyond the range of the public table")
def test_predictions_are_those_of_the_estimator(files, monkeypatch):
    kept = {}
    make = tabular._estimator

    def remember(*arguments, **options):
        kept["estimator"] = make(*arguments, **options)
        return kept["estimator"]

    monkeypatch.setattr(tabular, "_estimator", remember)
    for task in ("regression", "count"):
        make_table(files["private"], 400, 0, task=task)
        make_table(files["public"], 60, 1, task=task)
        model = tabular.fit_files(
            files["private"], files["public"], target="y", task=task, epsilon=3, delta=1e-4, seed=0
        ).model
        table = read_table(files["input"])
        features = model.encoding.encode_features(table)
        np.testing.assert_allclose(
            model.predict(table)["prediction"], kept["estimator"].predict(features)
        )


class TestModels:
    """`--model`: trees and networks as well as linear models, and a choice among them."""

    @staticmethod
    def write(path, rows, seed):
        rng = np.random.default_rng(seed)
        x = rng.uniform(-1, 1, (rows, 2)).round(4)
        x[:2] = [[-1, -1], [1, 1]]
        y = np.sign(x[:, 0]) * np.sign(x[:, 1]) + 0.2 * rng.normal(size=rows)
        write_table(
            path,
            {
                "id": list(range(rows)),
                "a": x[:, 0].tolist(),
                "b": x[:, 1].tolist(),
                "y": y.tolist(),
            },
        )

    def test_trees_from_files(self, files, capsys, tmp_path):
        for name, rows in (("private", 6000), ("public", 600), ("input", 500)):
            self.write(files[name], rows, len(name))
        options = [*fit_options(files, epsilon=2), "--test", str(files["input"])]
        assert cli.main([*options, "--model", "trees", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["model"] == "trees"
        # 0.58 ± 0.015 over 24 seeds, where a linear model has 1.
        assert shown["test"]["this model"]["rmse"]["value"] < 0.7
        assert shown["test"]["public rows alone"]["rmse"]["value"] > 0.9
        model = mirrordp.load_model(files["out"])
        assert model.scorer.kind == "trees"
        with pytest.raises(TypeError, match="only a linear model has coefficients"):
            model.coefficients  # noqa: B018
        table = read_table(files["input"])
        found = model.predict(table)["prediction"]
        output = tmp_path / "p.csv"
        options = ["--model", files["out"], "--input", files["input"], "--output", output]
        assert cli.main(["predict", *map(str, options)]) == 0
        written = read_table(output).columns["prediction"]
        np.testing.assert_allclose(np.array(written, float), found)

    def test_the_choice_is_told(self, files, capsys):
        for name, rows in (("private", 6000), ("public", 600)):
            self.write(files[name], rows, len(name))
        assert cli.main(fit_options(files, "regression", epsilon=2)) == 0
        out = capsys.readouterr().out
        # The target is -1 or 1 with noise of 0.2, of which a linear model sees nothing.
        told = re.search(
            r"Rehearsal on public rows, rmse: linear (\S+), trees (\S+), network (\S+)\. "
            r"Taken: (trees|network), because (they are|it is) better than .+\.\n",
            out,
        )
        assert 0.95 < float(told[1]) < 1.1
        assert 0.15 < float(told[2]) < 0.95
        assert "(model: linear)" not in out
        rehearsal = json.loads((files["out"] / "report.json").read_text())["results"]["rehearsal"]
        assert rehearsal["measure"] == "rmse"
        assert set(rehearsal["models"]) == {"linear", "trees", "network"}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--model", "forest"], "--model"),
            (["--model", "trees", "--method", "exact"], "expected --method with a linear model"),
            (["--model", "network", "--guard"], "expected --guard with a linear model"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, files, capsys, options, message):
        assert cli.main([*fit_options(files), *options]) == 2
        assert message in capsys.readouterr().err
        assert not files["out"].exists()

    def test_guard(self, files):
        assert cli.main([*fit_options(files), "--guard"]) == 0
        report = json.loads((files["out"] / "report.json").read_text())
        assert report["results"]["kept"] in ("private model", "public model")


def test_without_a_usable_budget_the_public_model_is_returned(capsys, files):
    assert cli.main(fit_options(files, epsilon=1e-5)) == 0
    captured = capsys.readouterr()
    assert "the model of the public rows alone" in captured.out
    report = json.loads((files["out"] / "report.json").read_text())
    assert report["charged_steps"] == 0
    assert report["epsilon"] == 0


@pytest.mark.parametrize("task", ["regression", "classification", "count"])
def test_one_private_row(files, task):
    make_table(files["private"], 1, 0, task=task)
    make_table(files["public"], 30, 1, task=task)
    assert cli.main(fit_options(files, task)) == 0


def test_three_classes(files, tmp_path):
    rng = np.random.default_rng(0)
    for name, rows in (("private", 900), ("public", 90)):
        labels = rng.integers(3, size=rows)
        lines = [f"{rng.normal() + 3 * k:.3f},{'abc'[k]}" for k in labels]
        files[name].write_text("x,y\n" + "\n".join(lines) + "\n")
    assert cli.main(fit_options(files, "classification", ignore=None, seed=0)) == 0
    model = tabular.TableModel.load(files["out"])
    (tmp_path / "c.csv").write_text("x\n-1\n3\n7\n")
    found = model.predict(read_table(tmp_path / "c.csv"))
    assert found["prediction"].tolist() == ["a", "b", "c"]
    assert list(found) == ["prediction", *(f"probability of {name}" for name in "abc")]


def test_text_output_and_progress(capsys, files, monkeypatch):
    fit = tabular.fit_files

    def slow(*arguments, stage, **options):
        with stage("waiting for the test"):
            time.sleep(2.3)
        return fit(*arguments, stage=stage, **options)

    monkeypatch.setattr(tabular, "fit_files", slow)
    assert cli.main(fit_options(files)) == 0
    captured = capsys.readouterr()
    for words in ("Fitted regression of 'y'", "Left out: 'id'", "Privacy: epsilon", "model.json"):
        assert words in captured.out
    assert "Adjacency: zero-out. Sampling: full batch. Choice of settings: nothing" in captured.out
    assert "not for release" not in captured.out
    assert "mirrordp: waiting for the test ..." in captured.err


def test_nothing_of_the_private_rows_is_written(fitted):
    for path in fitted.iterdir():
        assert SECRET not in path.read_text()


def test_the_folder_depends_on_private_rows_through_the_coefficients_alone(files, tmp_path):
    """Other private rows, the same number: all but the noisy coefficients stays as it was."""
    contents = []
    for index, words in enumerate([("red", "blue"), ("blue", SECRET)]):
        make_table(files["private"], 400, 10 + index, words=words)
        estimators._FITS.clear()  # as in a process of its own
        out = tmp_path / f"out{index}"
        assert cli.main(fit_options(files, out=out, seed=1)) == 0
        model = json.loads((out / "model.json").read_text())
        assert set(model.pop("scorer")) == {"kind", "coefficients", "intercepts"}
        assert model.pop("sha256") is not None
        report = json.loads((out / "report.json").read_text())
        for content in (report, model["privacy"]):
            # The largest of the released coefficients; their noise follows from public rows here.
            coefficients = content["results"].pop("coefficients")
            assert {one["feature"] for one in coefficients} == set(model["features"])
        card = (out / "privacy_card.md").read_text()
        contents.append((model, report, card))
    assert contents[0] == contents[1]


@pytest.mark.parametrize("target", ["", "no number"])
def test_a_private_row_without_target_contributes_nothing(files, tmp_path, target):
    """Whatever else stands in it, the model is the same, and n still counts it."""
    models = []
    for index, x in enumerate(["0.5", "-400"]):
        make_table(files["private"], 400, 0)
        with open(files["private"], "a") as file:
            file.write(f"401,{x},blue,{target}\n")
        estimators._FITS.clear()  # as in a process of its own
        out = tmp_path / f"out{index}"
        assert cli.main(fit_options(files, out=out, seed=1)) == 0
        models.append((out / "model.json").read_text())
        assert json.loads((out / "report.json").read_text())["num_examples"] == 401
    assert models[0] == models[1]


def test_messages_about_private_rows_are_marked_and_on_standard_error(capsys, files):
    with open(files["private"], "a") as file:
        file.write("401,oops,blue,1\n")
    assert cli.main([*fit_options(files), "--json"]) == 0
    captured = capsys.readouterr()
    assert UNPROTECTED not in captured.out
    (line,) = [line for line in captured.err.splitlines() if f"warning: {UNPROTECTED}" in line]
    assert "1 of 401 filled cells" in line
    for path in files["out"].iterdir():
        assert UNPROTECTED not in path.read_text()


def test_a_column_of_the_private_table_alone_is_mentioned(capsys, files):
    """It would be left out without a word, although it may be the one that tells most."""
    lines = files["private"].read_text().splitlines()
    ends = ["size", "weight"], *([str(number), "1"] for number in range(len(lines) - 1))
    text = "\n".join(",".join([line, *end]) for line, end in zip(lines, ends, strict=True))
    files["private"].write_text(text + "\n")
    assert cli.main([*fit_options(files), "--json"]) == 0
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if f"warning: {UNPROTECTED}" in line]
    where = repr(str(files["private"]))
    assert f"columns 'size', 'weight' of {where} are not in the public table" in line
    assert "size" not in captured.out
    assert not any("weight" in path.read_text() for path in files["out"].iterdir())


def test_delta_follows_from_the_number_of_rows(capsys, files):
    assert cli.main([*fit_options(files, delta=None), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["delta"] == 1e-5
    files |= {"out": files["out"].with_name("second")}
    make_table(files["private"], 10_001, 0)
    assert cli.main([*fit_options(files, delta=None), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["delta"] == 1e-6


def test_a_large_delta_can_be_confirmed(capsys, files):
    assert cli.main([*fit_options(files, delta=0.01), "--allow-large-delta", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["delta"] == 0.01
    assert "warning: expected delta of at most 1/n" in captured.err
    assert "above one over the number" in (files["out"] / "privacy_card.md").read_text()


# Bad input.


def spoil(files, name, old, new):
    files[name].write_text(files[name].read_text().replace(old, new))


def reversed_rows(path):
    header, *rows = path.read_text().splitlines()
    copy = path.with_name("copy.csv")
    copy.write_text("\n".join([header, *reversed(rows)]) + "\n")
    return copy


BAD = {
    "no options": (lambda f: ["fit"], "arguments are required: --private, --public"),
    "no task": (lambda f: fit_options(f, task=None), "arguments are required: --task"),
    "unknown task": (lambda f: fit_options(f, task="ranking"), "one of regression"),
    "epsilon": (lambda f: fit_options(f, epsilon=0), "positive finite number, got '0'"),
    "epsilon huge": (lambda f: fit_options(f, epsilon=1e6), "at most 1000"),
    "delta": (lambda f: fit_options(f, delta=1), "between 0 and 1"),
    "seed": (lambda f: fit_options(f, seed=-1), "non-negative integer"),
    "no private file": (lambda f: fit_options(f, private="none.csv"), "'none.csv' (No such file"),
    "no public file": (lambda f: fit_options(f, public="none.csv"), "'none.csv' (No such file"),
    "a folder": (lambda f: fit_options(f, public=f["public"].parent), "directory"),
    "same file": (lambda f: fit_options(f, public=f["private"]), "two different files"),
    "private rows in another order": (
        lambda f: fit_options(f, public=reversed_rows(f["private"])),
        "400 of 400 public rows that equal a private row",
    ),
    "private rows to judge by": (
        lambda f: fit_options(f, test=reversed_rows(f["private"])),
        "400 of 400 test rows that equal a private row",
    ),
    "delta above 1/n": (
        lambda f: fit_options(f, delta=0.01),
        "expected delta of at most 1/n = 0.0025 for n = 400 records, got 0.01",
    ),
    "unknown target": (lambda f: fit_options(f, target="z"), "expected column 'z'"),
    "unknown column": (lambda f: fit_options(f, ignore="z"), "expected column 'z'"),
    "misspelt target": (lambda f: fit_options(f, target="Y"), "(did you mean 'y'?); check"),
    "misspelt column": (lambda f: fit_options(f, ignore="color"), "(did you mean 'colour'?)"),
    "text target": (lambda f: fit_options(f, target="colour"), "numbers in the target 'colour'"),
    "negative count": (lambda f: fit_options(f, task="count"), "whole numbers of at least zero"),
    "too many classes": (
        lambda f: (
            [spoil(f, "public", "", ""), make_table(f["public"], 200, 1)]
            and fit_options(f, task="classification")
        ),
        "at most 100 classes",
    ),
    "missing column": (
        lambda f: spoil(f, "private", "id,x,", "id,z,") or fit_options(f),
        "expected column 'x' in",
    ),
    "another type": (
        lambda f: spoil(f, "private", ".", "_point_") or fit_options(f),
        "expected numbers as in the public table, got text",
    ),
    "another type of category": (
        lambda f: (
            [spoil(f, "private", word, "7") for word in ("red", "blue", SECRET)] and fit_options(f)
        ),
        "expected categories as in the public table, got numbers",
    ),
    "ragged": (
        lambda f: spoil(f, "private", "\n3,", "\n3,3,") or fit_options(f),
        "expected 4 cells in every row",
    ),
    "empty": (lambda f: f["private"].write_text("") or fit_options(f), "got an empty file"),
    "header only": (
        lambda f: f["private"].write_text("id,x,colour,y\n") and fit_options(f),
        "at least one row",
    ),
    "few public rows": (
        lambda f: make_table(f["public"], 9, 1) and fit_options(f),
        "at least 10 rows",
    ),
    "binary": (
        lambda f: f["public"].write_bytes(b"\x89PNG\xff\xfe\x00") and fit_options(f),
        "UTF-8",
    ),
    "out is a file": (lambda f: fit_options(f, out=f["public"]), "not a folder"),
    "out is not empty": (lambda f: fit_options(f, out=f["public"].parent), "not empty"),
    "out under a file": (lambda f: fit_options(f, out=f["public"] / "m"), "no folder can be made"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_nothing_is_written(capsys, files, arguments, words):
    options = arguments(files)
    before = {path: path.read_bytes() for path in files["private"].parent.iterdir()}
    assert cli.main(options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mirrordp: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.endswith((".\n", "]\n"))
    assert {path: path.read_bytes() for path in files["private"].parent.iterdir()} == before


def test_no_mechanism_is_made_for_files_that_do_not_fit(capsys, files, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the private rows were used")

    monkeypatch.setattr(tabular, "_estimator", never)
    spoil(files, "private", "id,x,", "id,z,")
    assert cli.main(fit_options(files)) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_text(""), "got something else"),
        (lambda path: path.write_text("[1, 2]"), "got something else"),
        (lambda path: path.write_text("[" * 100_000), "got something else"),
        (lambda path: path.write_bytes(b"\x80\x04\x95pickle"), "got something else"),
        (lambda path: path.write_text(path.read_text()[:-100]), "got something else"),
        (
            lambda path: path.write_text(path.read_text().replace('"version": 2', '"version": 9')),
            "got version 9",
        ),
        (
            lambda path: path.write_text(path.read_text().replace('"red"', '"rot"')),
            "changed or missing parts",
        ),
    ],
    ids=["gone", "empty", "other JSON", "deep JSON", "pickle", "cut", "version", "changed"],
)
def test_predict_refuses_other_model_files(capsys, fitted, tmp_path, change, words):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.json").write_bytes((fitted / "model.json").read_bytes())
    change(folder / "model.json")
    source = make_table(tmp_path / "input.csv", 5, 2)
    output = tmp_path / "output.csv"
    options = ["--model", str(folder), "--input", str(source), "--output", str(output)]
    assert cli.main(["predict", *options]) == 2
    assert words in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(task="ranking"),
        lambda content: content.update(task="count"),
        lambda content: content["scorer"]["coefficients"][0].pop(),
        lambda content: content["scorer"]["intercepts"].append(0.0),
        lambda content: content["scorer"].update(intercepts=[10**400]),
        lambda content: content["encoding"]["columns"][0].update(scale=10**400),
        lambda content: content["scorer"].update(coefficients="many"),
        lambda content: content["scorer"].update(kind="oracle"),
        lambda content: content["encoding"].update(columns=[]),
        lambda content: content.pop("privacy"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(fitted, change):
    """Even with a checksum that fits."""
    content = json.loads((fitted / "model.json").read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = tabular._checksum(content)
    with pytest.raises(TableError, match="changed or missing parts"):
        tabular.TableModel.from_json(json.dumps(content), "model.json")


def test_model_round_trip(fitted):
    text = (fitted / "model.json").read_text()
    assert tabular.TableModel.load(fitted).to_json() == text


def test_models_of_version_1_are_read(fitted):
    """They had coefficients and intercepts beside the encoding, and were all linear."""
    content = json.loads((fitted / "model.json").read_text())
    del content["sha256"]
    scorer = content.pop("scorer")
    content |= {"version": 1, "coefficients": scorer["coefficients"]}
    content["intercepts"] = scorer["intercepts"]
    content["sha256"] = tabular._checksum(content)
    old = tabular.TableModel.from_json(json.dumps(content), "model.json")
    new = tabular.TableModel.load(fitted)
    np.testing.assert_array_equal(old.coefficients, new.coefficients)
    np.testing.assert_array_equal(old.intercepts, new.intercepts)


def renamed(path):
    """The table with a column that is called as predictions are."""
    path.write_text(path.read_text().replace("id,", "prediction,", 1))
    return path


def predict_options(fitted, source, output, *others):
    return ["predict", "--model", fitted, "--input", source, "--output", output, *others]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda m, d: predict_options(m, "none.csv", d / "o.csv"), "No such file"),
        (lambda m, d: predict_options(m, d / "in.csv", d / "in.csv"), "another file"),
        (lambda m, d: predict_options(m, d / "in.csv", d / "no" / "o.csv"), "can be written"),
        (lambda m, d: predict_options(m, d / "in.csv", d), "can be written"),
        (lambda m, d: predict_options(m, d / "in.csv", d / "o.csv", "--keep", "z"), "'z' to keep"),
        (
            lambda m, d: predict_options(m, d / "in.csv", d / "o.csv", "--keep", "color"),
            "did you mean 'colour'?",
        ),
        (
            lambda m, d: predict_options(
                m, renamed(d / "in.csv"), d / "o.csv", "--keep", "prediction"
            ),
            "other names than predictions",
        ),
        (lambda m, d: predict_options(m, d / "bad.csv", d / "o.csv"), "expected column 'colour'"),
        (lambda m, d: predict_options(m, d / "text.csv", d / "o.csv"), "expected numbers"),
        (lambda m, d: predict_options(d, d / "in.csv", d / "o.csv"), "with model.json"),
    ],
    ids=[
        "no input",
        "same",
        "no folder",
        "folder",
        "keep",
        "near",
        "twice",
        "column",
        "type",
        "no model",
    ],
)
def test_predict_with_bad_input(capsys, fitted, tmp_path, arguments, words):
    make_table(tmp_path / "in.csv", 5, 2)
    (tmp_path / "bad.csv").write_text("x\n1\n")
    (tmp_path / "text.csv").write_text("x,colour\none,red\ntwo,red\n")
    before = sorted(tmp_path.iterdir())
    assert cli.main([str(word) for word in arguments(fitted, tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert UNPROTECTED not in captured.err
    assert sorted(tmp_path.iterdir()) == before


def test_parquet_in_and_out(capsys, files, tmp_path):
    from pyarrow import csv as arrow_csv, parquet

    for name in ("private", "public", "input"):
        table = arrow_csv.read_csv(files[name])
        files[name] = files[name].with_suffix(".parquet")
        parquet.write_table(table, files[name])
    assert cli.main(fit_options(files, seed=0)) == 0
    output = tmp_path / "output.parquet"
    options = ["--model", files["out"], "--input", files["input"], "--output", output]
    assert cli.main(["predict", *(str(word) for word in options)]) == 0
    assert parquet.read_table(output).num_rows == 20


def test_installed_command(files):
    result = subprocess.run(
        [sys.executable, "-m", "mirrordp", *fit_options(files, target="z")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


NUMBERS = ("rmse", "mae", "r2", "median_error", "error_90")
METRICS = {
    "regression": NUMBERS,
    "classification": ("loss", "accuracy", "auc", "average_precision", "calibration_error"),
    "count": (*NUMBERS, "deviance"),
}


@pytest.mark.parametrize("task", METRICS)
def test_rows_to_judge_by(capsys, tmp_path, task):
    files = {
        "private": make_table(tmp_path / "private.csv", 400, 0, task=task),
        "public": make_table(tmp_path / "public.csv", 60, 1, task=task),
        "out": tmp_path / "model",
    }
    test = make_table(tmp_path / "test.csv", 50, 2, task=task)
    assert cli.main(fit_options(files, task, test=test, seed=0)) == 0
    shown = capsys.readouterr().out.split("On 50 test rows", 1)[1].splitlines()
    heads = ["this model", "public rows alone", "guess without features"]
    assert [shown[1].index(head) for head in heads] == sorted(
        shown[1].index(head) for head in heads
    )
    rows = [line for line in shown[2:] if line.startswith("  ")]
    for name, row in zip(METRICS[task], rows, strict=True):
        assert row.startswith(f"  {name} ")
    results = json.loads((files["out"] / "report.json").read_text())["results"]
    for prefix in ("test", "public", "baseline"):
        assert {f"{prefix}_{name}" for name in METRICS[task]} <= set(results)
        assert results[f"{prefix}_{METRICS[task][0]}_standard_error"] > 0
    assert results["test_rows"] == 50
    # The same from what predict writes.
    output = tmp_path / "output.csv"
    options = ["--model", files["out"], "--input", test, "--output", output, "--keep", "y"]
    assert cli.main(["predict", *(str(word) for word in options)]) == 0
    columns = read_table(output).columns
    if task == "classification":
        right = np.mean([a == b for a, b in zip(columns["y"], columns["prediction"], strict=True)])
        assert results["test_accuracy"] == pytest.approx(right)
        known = read_table(files["public"]).columns["y"]
        guess = max(sorted(set(known)), key=known.count)
        assert results["baseline_accuracy"] == pytest.approx(columns["y"].count(guess) / 50)
        shares = [
            float(columns[f"probability of {label}"][row]) for row, label in enumerate(columns["y"])
        ]
        assert results["test_loss"] == pytest.approx(-np.mean(np.log(shares)), rel=1e-6)
    else:
        gaps = np.array(columns["y"], float) - np.array(columns["prediction"], float)
        assert results["test_rmse"] == pytest.approx(np.sqrt(np.mean(gaps**2)), rel=1e-6)
        mean = np.mean([float(cell) for cell in read_table(files["public"]).columns["y"] if cell])
        gaps = np.array(columns["y"], float) - mean
        assert results["baseline_rmse"] == pytest.approx(np.sqrt(np.mean(gaps**2)), rel=1e-6)


def test_the_private_model_survives_a_ceiling_that_does_not(capsys, tmp_path):
    files = two_tables(tmp_path)
    rows = files["private"].read_text().splitlines()
    for number in range(1, 40):
        rows[number] = ",".join([*rows[number].split(",")[:-1], "1e308"])
    files["private"].write_text("\n".join(rows))
    test = make_table(tmp_path / "test.csv", 60, 3)
    assert cli.main([*fit_options(files, test=test, seed=0), "--ceiling"]) == 0
    said = capsys.readouterr().err
    assert "no model could be fitted without protection" in said
    assert "overflow" not in said
    assert (files["out"] / "model.json").exists()


def test_any_whole_numbers_fit(tmp_path):
    """A column that might be hours and minutes, and is not."""
    files = two_tables(tmp_path)
    rng = np.random.default_rng(0)
    for path in (files["private"], files["public"]):
        head, *rows = path.read_text().splitlines()
        numbers = rng.integers(0, 2400, len(rows))
        lines = [f"{number},{row}" for number, row in zip(numbers, rows, strict=True)]
        path.write_text("\n".join([f"departs,{head}", *lines]))
    assert cli.main(fit_options(files)) == 0
    assert (files["out"] / "model.json").exists()


@pytest.mark.parametrize("task", ["regression", "classification", "count"])
def test_the_ceiling_stays_with_the_operator(capsys, tmp_path, task):
    files = {
        "private": make_table(tmp_path / "private.csv", 400, 0, task=task),
        "public": make_table(tmp_path / "public.csv", 60, 1, task=task),
        "out": tmp_path / "model",
    }
    test = make_table(tmp_path / "test.csv", 50, 2, task=task)
    assert cli.main([*fit_options(files, task), "--ceiling"]) == 2
    assert "expected --test" in capsys.readouterr().err
    plain = tmp_path / "plain"
    assert cli.main(fit_options(files, task, test=test, out=plain, seed=0)) == 0
    estimators._FITS.clear()  # as in a process of its own
    before = capsys.readouterr().err.splitlines()
    assert cli.main([*fit_options(files, task, test=test, seed=0), "--ceiling"]) == 0
    captured = capsys.readouterr()
    assert "without protection" not in captured.out
    mark, *table = (line for line in captured.err.splitlines() if line not in before)
    assert mark == f"mirrordp: {UNPROTECTED} models without protection:"
    assert table[0].split() == ["a", "linear", "model"]
    # A terminal of 100 columns shows it as a table.
    assert max(map(len, (mark, *table))) <= 100
    name, value = table[1].split()[:2]
    assert name == {"classification": "loss"}.get(task, "rmse")
    # Nothing but the words that it was shown is in the report.
    report, other = (json.loads((out / "report.json").read_text()) for out in (files["out"], plain))
    assert report.pop("shown_without_protection") == [tabular.CEILING_SHOWN]
    assert other.pop("shown_without_protection") == []
    assert report == other
    assert float(value) <= 1.1 * report["results"][f"baseline_{name}"]


@pytest.mark.parametrize("task", ["regression", "classification", "count"])
def test_the_ceiling_of_trees_is_boosting(capsys, tmp_path, task):
    """A bent relation, of which a linear model sees nothing."""
    files = {"out": tmp_path / "model"}
    for seed, (name, rows) in enumerate({"private": 600, "public": 200, "test": 300}.items()):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=rows)
        y = {
            "regression": np.abs(x).round(4),
            "classification": np.abs(x) > 0.7,
            "count": rng.poisson(5 * np.abs(x)),
        }[task]
        files[name] = tmp_path / f"{name}.csv"
        write_table(files[name], {"x": x.tolist(), "y": y.tolist()})
    command = fit_options(files, task, test=files["test"], seed=0, ignore=None, model="trees")
    assert cli.main([*command, "--ceiling"]) == 0
    captured = capsys.readouterr()
    assert "without protection" not in captured.out
    name = {"classification": "auc", "count": "r2", "regression": "r2"}[task]
    lines = captured.err.splitlines()
    mark = lines.index(f"mirrordp: {UNPROTECTED} models without protection:")
    assert lines[mark + 1].split() == ["a", "linear", "model", "gradient", "boosting"]
    assert max(map(len, lines[mark:])) <= 100
    (row,) = (line for line in lines[mark:] if line.split()[0] == name)
    # Each value has an interval, (low to high).
    linear, boosting = (float(part.split()[-1]) for part in row.split(" (")[:2])
    assert boosting > max(linear + 0.2, 0.5)
    assert "gradient boosting" not in (files["out"] / "report.json").read_text()


@pytest.mark.parametrize("test", ["private", "copy", "none", "public"])
def test_bad_rows_to_judge_by_are_refused_before_training(
    capsys, files, monkeypatch, tmp_path, test
):
    monkeypatch.setattr(tabular, "_estimator", lambda *_, **__: pytest.fail("it trained"))
    copy = tmp_path / "copy.csv"
    copy.write_bytes(files["private"].read_bytes())
    path = {"copy": copy, "none": files["out"] / "none.csv"}.get(test) or files[test]
    assert cli.main(fit_options(files, test=path)) == 2
    assert not files["out"].exists()
    words = {"none": "No such file", "public": "the model does not see"}
    assert words.get(test, "need no protection") in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--learning-rate", "0.1"]])
def test_a_model_that_the_caller_chose_is_said_to_be(capsys, files, given):
    assert cli.main([*fit_options(files, model="linear", ignore=None), *given, "--json"]) == 0
    tuning = json.loads(capsys.readouterr().out)["tuning"]
    assert tuning.startswith("not charged: model")
    assert ("learning_rate" in tuning) == bool(given)


def test_a_large_epsilon_is_named_where_it_is_read(capsys, files):
    assert cli.main(fit_options(files, epsilon=50, ignore=None)) == 0
    assert re.search(r"Epsilon 4\S+ is large: the guarantee", capsys.readouterr().out)
    assert "is large**" in (files["out"] / "privacy_card.md").read_text()


def test_a_copy_of_the_private_table_is_not_public(capsys, files, monkeypatch, tmp_path):
    monkeypatch.setattr(tabular, "_estimator", lambda *_, **__: pytest.fail("it trained"))
    copy = tmp_path / "copy.csv"
    copy.write_bytes(files["private"].read_bytes())
    assert cli.main(fit_options(files, public=copy)) == 2
    assert "two different files" in capsys.readouterr().err


def test_predict_leaves_devices_and_links_alone(capsys, tmp_path, fitted):
    """A file that is renamed over a pipe or a device would take its place."""
    source = make_table(tmp_path / "input.csv", 5, 2)
    options = ["predict", "--model", str(fitted), "--input", str(source), "--output"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert cli.main([*options, str(pipe)]) == 2
    assert "not an ordinary file" in capsys.readouterr().err
    assert pipe.is_fifo()
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "behind.csv")
    assert cli.main([*options, str(link)]) == 0
    assert link.is_symlink()
    assert read_table(tmp_path / "behind.csv").columns["prediction"]
