"""Exported models compute what `TableModel.predict` does."""

import ast
import collections
import dataclasses
import datetime
import importlib.util
import itertools
import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

from mirrordp import cli
from mirrordp.tables import (
    CategoryColumn,
    ClassTarget,
    DateColumn,
    NumberColumn,
    NumberTarget,
    Table,
    TableEncoding,
    TableError,
    export,
)
from mirrordp.tables.cells import Cut, TreesScorer
from mirrordp.tables.columns import MISSING, Tally
from mirrordp.tables.fitting import TableModel
from mirrordp.tables.network import NetworkScorer
from mirrordp.tables.scorers import SCORERS, LinearScorer

KINDS = ("linear", "trees", "network")
TASKS = ("regression", "count", "two classes", "five classes", "ordered classes")
WORDS = ("red", "blue", "a,b", 'quote "', "ü", "back\\slash", "line\nbreak")


def make_scorer(kind, outputs, groups, rng):
    """A scorer of any kind with random numbers; some bins and cells are never met."""
    width = groups[-1][-1] + 1
    linear = rng.normal(size=(outputs, width)), rng.normal(size=outputs)
    if kind == "trees":
        edges = (np.array([-0.5, 0.2, 0.9]), np.array([0.1]))
        cuts = (Cut((0,), edges[0]), Cut((1,), edges[1]), Cut(groups[2], np.zeros(0)))
        terms = ((0,), (2,), (0, 1), (2, 0))
        sizes = [np.prod([cuts[k].size for k in term]) for term in terms]
        values = tuple(rng.normal(size=(size, outputs)) for size in sizes)
        return TreesScorer(*linear, cuts, terms, values)
    if kind == "network":
        edges = (np.array([-1.0, 0.0, 0.5]), np.array([-2.0, 0.3, 1.0, 4.0]))
        sizes = (width + 5, 6, 4, outputs)
        layers = tuple(
            (rng.normal(size=s), rng.normal(size=s[1])) for s in itertools.pairwise(sizes)
        )
        scale = rng.normal(size=width), rng.uniform(0.5, 2, width)
        return NetworkScorer(*scale, (0, 1), edges, layers, rng.normal(size=(sizes[0], outputs)))
    return LinearScorer(*linear)


def make_model(task, seed=0, names=("x", "half", "colour", "code", "letter"), kind="linear"):
    """Numbers and categories, with and without a feature for missing cells."""
    rng = np.random.default_rng(seed)
    encoding = TableEncoding(
        (
            NumberColumn(names[0], 0.3, 2.0, -4.0, 5.0, False),
            NumberColumn(names[1], -1e3, 1e-3, -1001.0, -999.0, True),
            CategoryColumn(names[2], tuple(sorted(WORDS)), "red", False),
            CategoryColumn(names[3], ("-1", "0", "0.3", "2", "1e+20"), "2", True),
            CategoryColumn(names[4], ("007", "7", "b"), "b", True),
        ),
        {
            "regression": NumberTarget("y", is_count=False),
            "count": NumberTarget("y", is_count=True),
            "two classes": ClassTarget("y", ("no", "yes"), False),
            "five classes": ClassTarget("y", ("0", "1", "2", "10", "11"), True),
            "ordered classes": ClassTarget("y", ("1", "2", "3"), True),
        }[task],
    )
    outputs = {"five classes": 5, "ordered classes": 2}.get(task, 1)
    scorer = make_scorer(kind, outputs, encoding.groups, rng)
    kinds = {"ordered classes": "ordinal"}
    task = kinds.get(task, "classification") if "classes" in task else task
    privacy = {"epsilon": 1.0, "delta": 1e-6, "adjacency": "zero-out", "unit": "example"}
    return TableModel(task=task, encoding=encoding, scorer=scorer, privacy=privacy)


def random_table(model, seed, rows=200):
    """Known, unknown, odd and missing cells, as text or as numbers."""
    rng = np.random.default_rng(seed)
    odd = [*sorted(MISSING), " NA ", "1e400", "-inf", "x1", "1,5", "  2 ", "2.0", "0", "-0", "0.30"]
    columns = {}
    for column in model.encoding.columns:
        if isinstance(column, NumberColumn):
            values = rng.normal(column.mean, 3 * column.scale, rows)
            known = [repr(value) for value in values.tolist()]
        else:
            known = [*(" " * k + text for k in (0, 1) for text in column.categories), "unknown"]
        cells = np.where(
            rng.random(rows) < 0.7, rng.choice(known, rows), rng.choice(odd, rows)
        ).tolist()
        if seed % 2 and column.name in ("x", "half", "code"):
            numbers = [0.3, 0.1 + 0.2, 2.0, -1.0, 1e20, np.nan, np.inf, -np.inf, 17.0]
            cells = np.where(
                rng.random(rows) < 0.5, rng.choice(numbers, rows), rng.normal(size=rows)
            )
        columns[column.name] = cells
    return Table("random", columns)


def expected_of(model, table):
    # What judge says about such tables is not in question here.
    return model.predict(table, collections.defaultdict(Tally))


def agrees(model, found, expected, tolerance):
    """Labels are compared where two classes do not have the same share."""
    for name, values in expected.items():
        if name != "prediction" or values.dtype.kind == "f":
            np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance)
    if len(expected) > 1:
        shares = np.sort(np.column_stack([v for k, v in expected.items() if k != "prediction"]))
        clear = shares[:, -1] - shares[:, -2] > 1e-6
        assert clear.mean() > 0.9
        assert (found["prediction"] == expected["prediction"])[clear].all()


def load(source, tmp_path):
    path = tmp_path / "predictor.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("exported_predictor", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_the_numpy_file_computes_the_same(task, kind, tmp_path):
    model = make_model(task, kind=kind)
    predictor = load(export.numpy_source(model), tmp_path)
    for seed in range(6):
        table = random_table(model, seed)
        agrees(model, predictor.predict(dict(table.columns)), expected_of(model, table), 1e-12)
    assert len(predictor.predict({name: [] for name in table.columns})["prediction"]) == 0
    with pytest.raises(ValueError, match="expected columns"):
        predictor.predict({"x": [1.0]})


def test_nothing_in_a_model_becomes_code(tmp_path):
    injected = "x.\nINJECTED = 1\r\nINJECTED = 2\x0cINJECTED = 3\n#"
    model = make_model("regression")
    privacy = {"epsilon": 1.0, "delta": 1e-5, "adjacency": injected, "unit": injected}
    evil = dataclasses.replace(model, privacy=privacy)
    assert not hasattr(load(export.numpy_source(evil), tmp_path), "INJECTED")


def with_clock():
    """The first column holds hours and minutes."""
    model = make_model("regression")
    clock, *others = model.encoding.columns
    clock = dataclasses.replace(clock, mean=700.0, scale=300.0, low=0.0, high=2359.0, is_clock=True)
    encoding = dataclasses.replace(model.encoding, columns=(clock, *others))
    return dataclasses.replace(model, encoding=encoding)


def test_hours_and_minutes_in_both_files(tmp_path):
    model = with_clock()
    table = random_table(model, 0)
    expected = expected_of(model, table)
    module = load(export.numpy_source(model), tmp_path)
    agrees(model, module.predict(table.columns), expected, 1e-12)
    agrees(model, run_onnx(model, table), expected, 1e-9)
    as_numbers = dataclasses.replace(model.encoding.columns[0], is_clock=False)
    other = dataclasses.replace(model.encoding, columns=(as_numbers, *model.encoding.columns[1:]))
    without = expected_of(dataclasses.replace(model, encoding=other), table)
    assert not np.allclose(without["prediction"], expected["prediction"])


def with_dates(task="regression", has=(True, True, True)):
    encoding = make_model(task).encoding
    date = DateColumn("when", "%d.%m.%Y", 19_000.0, 100.0, 18_000.0, 20_000.0, *has, has[0])
    encoding = TableEncoding((*encoding.columns, date), encoding.target)
    coefficients = np.random.default_rng(1).normal(size=(1, len(encoding.features)))
    scorer = LinearScorer(coefficients, np.zeros(1))
    return TableModel(task=task, encoding=encoding, scorer=scorer, privacy={})


def test_dates_in_the_numpy_file(tmp_path):
    model = with_dates()
    predictor = load(export.numpy_source(model), tmp_path)
    rows = {column.name: ["1", "2", "", "?"] for column in model.encoding.columns[:-1]}
    for when in (
        ["01.02.2020", "31.12.2030", "", "soon"],
        [datetime.date(2020, 2, 1), datetime.datetime(2022, 2, 1, 12), None, "01.02.2020"],
        np.array(["2020-02-01", "2022-02-01T12", "NaT", "1960-01-01"], "M8[s]"),
    ):
        found = predictor.predict(rows | {"when": when})["prediction"]
        expected = expected_of(model, rows | {"when": when})["prediction"]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_dates_in_onnx():
    """Ends of years, centuries with and without a leap day, and every day of 220 years."""
    model = with_dates()
    rng = np.random.default_rng(0)
    years = np.array([1, 4, 100, 400, 1600, 1899, 1900, 1969, 1970, 2000, 2023, 2024, 2100, 9999])
    starts = (years - 1970).astype("M8[Y]").astype("M8[us]")
    days = np.arange("1890-01-01", "2110-01-01", dtype="M8[D]").astype("M8[us]")
    times = np.concatenate(
        [
            *(starts + np.timedelta64(shift, "s") for shift in (-1, 0, 1)),
            days + rng.integers(86_400_000_000, size=len(days)).astype("m8[us]"),
            np.array(["NaT"], "M8[us]"),
        ]
    )
    rows = {column.name: np.full(len(times), "1") for column in model.encoding.columns[:-1]}
    table = rows | {"when": times}
    agrees(model, run_onnx(model, table), expected_of(model, table), 1e-9)
    assert export.onnx_inputs(model, table)["when"][-1] == export.NO_DATE
    # As text, in the format of the public table.
    table = {name: cells[:4] for name, cells in rows.items()}
    table |= {"when": ["01.02.2020", "31.12.2030", "", "soon"]}
    agrees(model, run_onnx(model, table), expected_of(model, table), 1e-9)


@pytest.mark.parametrize("has", list(itertools.product([False, True], repeat=3)))
def test_parts_of_dates_in_onnx(has):
    model = with_dates(has=has)
    rows = {column.name: ["1"] * 3 for column in model.encoding.columns[:-1]}
    table = rows | {"when": np.array(["2020-02-29T13", "1960-12-31T23:59", "NaT"], "M8[s]")}
    agrees(model, run_onnx(model, table), expected_of(model, table), 1e-9)


ALONE = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {folder!r})
sys.argv = ["predictor.py"]
import runpy
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("task", ["regression", "two classes"])
def test_the_numpy_file_runs_alone(task, tmp_path):
    """As a command, in a process that has NumPy and the standard library, and nothing else."""
    model = make_model(task)
    path = tmp_path / "predictor.py"
    export.export_model(model, "numpy", path)
    rows = {
        "x": ["1", "", "9"],
        "half": ["-1000", "?", "-999.5"],
        "colour": ["red", "pink", ""],
        "code": ["2.0", "", "x"],
        "letter": ["007", "b", "7"],
        "other": ["1", "2", "3"],
    }
    text = "\n".join([",".join(rows), *(",".join(row) for row in zip(*rows.values(), strict=True))])
    folder = str(importlib.util.find_spec("numpy").origin).rpartition("/numpy/")[0]
    blocked = ["mirrordp", "jax", "jaxlib", "sklearn", "scipy", "pandas", "polars", "onnx"]
    script = ALONE.format(blocked=blocked, folder=folder, path=str(path))
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], input=text, capture_output=True, text=True, check=True
    )
    header, *lines = done.stdout.splitlines()
    expected = model.predict(rows)
    assert header.split(",") == list(expected)
    cells = zip(*(line.split(",") for line in lines), strict=True)
    found = dict(zip(header.split(","), cells, strict=True))
    for name, values in expected.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(np.array(found[name], float), values, rtol=1e-12)
        else:
            assert list(found[name]) == values.tolist()


def test_copied_modules_do_not_overwrite_each_other():
    """They share one namespace in the exported file."""
    tree = ast.parse(export.numpy_source(make_model("regression")))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names += [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []
    modules = {
        node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    outside = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert outside == {"numpy"}


def run_onnx(model, table):
    session = onnxruntime.InferenceSession(
        export.onnx_bytes(model), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, export.onnx_inputs(model, table))
    names = [output.name for output in session.get_outputs()]
    columns = {"prediction": found[0]}
    if len(found) > 1:
        assert names[1].startswith("probabilities")
        for index, label in enumerate(model.encoding.target.classes):
            columns[f"probability of {label}"] = found[1][:, index]
    return columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_onnx_computes_the_same(task, kind):
    model = make_model(task, kind=kind)
    for seed in range(6):
        table = random_table(model, seed)
        agrees(model, run_onnx(model, table), expected_of(model, table), 1e-9)


def test_onnx_without_the_helper():
    """Plain arrays do: text as it stands, NaN for a missing number."""
    model = make_model("count")
    rows = {
        "x": np.array([1.0, np.nan, 2.0]),
        "half": np.array([np.inf, -1000.0, -999.5]),
        "colour": np.array(["red", "NA", "pink"], object),
        "code": np.array(["2.0", "0.3", "0.0"], object),
        "letter": np.array(["", "007", "7"], object),
    }
    session = onnxruntime.InferenceSession(export.onnx_bytes(model))
    (found,) = session.run(None, rows)
    np.testing.assert_allclose(found, model.predict(rows)["prediction"], rtol=1e-9)
    properties = session.get_modelmeta().custom_metadata_map
    assert json.loads(properties["targets"]) == ["y"]
    assert "epsilon 1, delta 1e-06" in properties["privacy"]


def test_columns_may_have_any_name(tmp_path):
    names = ("prediction", "probabilities", "value 0", 'a "b"\n"""', "{}")
    model = make_model("two classes", names=names)
    table = random_table(model, 2)
    expected = expected_of(model, table)
    agrees(model, run_onnx(model, table), expected, 1e-9)
    predictor = load(export.numpy_source(model), tmp_path)
    agrees(model, predictor.predict(dict(table.columns)), expected, 1e-12)


def test_a_wrong_export_is_noticed():
    """The comparison above can fail: one coefficient off by a little, one category renamed."""
    model, table = make_model("regression"), random_table(make_model("regression"), 0)
    changed = model.scorer.coefficients.copy()
    changed[0, 0] += 1e-5
    wrong = TableModel(
        task=model.task,
        encoding=model.encoding,
        scorer=LinearScorer(changed, model.scorer.intercepts),
        privacy={},
    )
    with pytest.raises(AssertionError):
        agrees(model, run_onnx(wrong, table), expected_of(model, table), 1e-6)


def test_what_onnx_cannot_express_is_said(monkeypatch):
    monkeypatch.delitem(export._COLUMNS, CategoryColumn)
    with pytest.raises(TableError, match="got CategoryColumn; export to numpy"):
        export.onnx_bytes(make_model("regression"))


def test_every_kind_of_model_can_be_exported():
    assert set(export._SCORES) == set(SCORERS.values())


def test_the_command(tmp_path, capsys):
    (tmp_path / "model.json").write_text(make_model("regression").to_json())
    for kind, name in (("numpy", "predictor.py"), ("onnx", "model.onnx")):
        output = tmp_path / name
        options = ["export", "--model", str(tmp_path), "--to", kind, str(output), "--json"]
        assert cli.main(options) == 0
        assert json.loads(capsys.readouterr().out) == {"output": str(output), "format": kind}
        assert output.stat().st_size > 1000
    assert cli.main([*options[:4], "pickle", str(output)]) == 2
    assert "one of numpy, onnx" in capsys.readouterr().err
    assert cli.main(["export", "--model", "none", "--to", "onnx", str(output)]) == 2


def test_onnx_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(TableError, match=r"mirrordp\[onnx\]"):
        export.onnx_bytes(make_model("regression"))
