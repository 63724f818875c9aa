"""Models for other places: a `TableModel` in, a Python file that needs NumPy alone or ONNX out.

Both compute what `TableModel.predict` does. The Python file is the library's own code for columns,
rows and scores, copied; ONNX says the same in operators. A new kind of column or model needs one
function for ONNX, in `_COLUMNS` or `_SCORES`.
"""

import ast
import functools
import importlib
import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mirrordp._versions import VERSION
from mirrordp.report import write_atomically
from mirrordp.tables.cells import TreesScorer
from mirrordp.tables.columns import (
    MISSING,
    WEEKDAYS,
    CategoryColumn,
    ClassTarget,
    DateColumn,
    NumberColumn,
    distinct_texts,
    moments,
    number,
    number_text,
    numbers,
    positions,
)
from mirrordp.tables.encoding import require_columns
from mirrordp.tables.files import TableError, listed
from mirrordp.tables.fitting import TableModel, as_table
from mirrordp.tables.network import NetworkScorer
from mirrordp.tables.scorers import LinearScorer

FORMATS = ("numpy", "onnx")
NO_DATE = int(np.iinfo(np.int64).min)
"""The input of an ONNX graph for a missing date, which NumPy has for NaT."""
_DAY = 86_400_000_000
_STANDALONE = "mirrordp.tables._standalone"
_REST = "mirrordp.tables.files"
_HEADER = '''"""A model of table rows, exported by mirrordp. It needs Python 3.11 and NumPy.

In Python, with a data frame or a dictionary of columns:

    predict({"column": [1.0, 2.0], ...})["prediction"]

As a command: python FILE < rows.csv > predictions.csv
"""

import json
from typing import Any

# What the code below takes from modules that are not copied.
Cells = Any
TableError = ValueError


class ValueText(str):
    """The text of a cell that was a number or a time before."""


class PackedText:
    """Text of a large file, which this module does not read."""


'''


_FOOTER = '''

def predict(rows: Any) -> dict[str, np.ndarray]:
    """Returns the prediction for each row of a data frame or a dictionary of columns."""
    return predicted(rows, COLUMNS, TARGETS, CLASSES, TASK, SCORER)


if __name__ == "__main__":
    filter_csv(predict)
'''


def export_model(model: TableModel, kind: str, path: str | Path) -> None:
    """Writes a model as one file.

    Args:
        model: the model.
        kind: one of `FORMATS`.
        path: the file to write.

    Raises:
        TableError: if the model cannot be expressed, or a package is missing.
    """
    path = Path(path)
    content = numpy_source(model).encode() if kind == "numpy" else onnx_bytes(model)
    write_atomically(path, content)


# A Python file that needs NumPy alone.


def numpy_source(model: TableModel) -> str:
    """Returns the source of a module with a function `predict`, which imports NumPy alone."""
    target = model.encoding.target
    classes = target.classes if isinstance(target, ClassTarget) else ()
    names = tuple(one.name for one in model.encoding.targets)
    columns = "".join(f"    {column!r},\n" for column in model.encoding.columns)
    scorer = json.dumps(model.scorer.to_dict(), allow_nan=False)
    learned = [
        _comment(f"The model: {model.task} of {listed(names)}, from mirrordp {VERSION}."),
        _comment(_promise(model)),
        f"COLUMNS = (\n{columns})",
        f"TARGETS = {names!r}",
        f"CLASSES = {classes!r}",
        f"TASK = {model.task!r}",
        f"SCORER = {type(model.scorer).__name__}.from_dict(json.loads({scorer!r}))",
    ]
    return "\n".join([_HEADER, *_copied(_STANDALONE, set()), *learned, _FOOTER])


def _promise(model: TableModel) -> str:
    """Returns the guarantee of the run in a line, as far as the model states one."""
    stated = [model.privacy.get(name) for name in ("epsilon", "delta", "adjacency", "unit")]
    if None in stated:
        return "It states no privacy guarantee."
    return "Privacy: epsilon {:.6g}, delta {:.6g}, adjacency {}, unit {}.".format(*stated)


def _comment(text: str) -> str:
    # The file of a model may come from anywhere: what it says must not become a line of code.
    return f"# {' '.join(text.split())}"


def _copied(module: str, done: set[str]) -> list[str]:
    """Returns the sources of a module and of those that it imports, without these imports."""
    done.add(module)
    source = inspect.getsource(importlib.import_module(module))
    lines, before = source.splitlines(), []
    tree = ast.parse(source)
    leave_out = [tree.body[0]]  # the docstring
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mirrordp"):
            leave_out.append(node)
            if node.module not in (*done, _REST):
                before += _copied(str(node.module), done)
    for node in leave_out:
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # pyright: ignore[reportOptionalOperand]
    return [*before, f"# {module}\n", "\n".join(lines).strip("\n") + "\n"]


# ONNX.


class _Graph:
    """Nodes and constants under construction; the values between them have numbers as names."""

    def __init__(self, taken: set[str]):
        self.onnx = _onnx()
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._names = (name for k in itertools.count() if (name := f"value {k}") not in taken)

    def constant(self, value: Any, dtype: Any = np.float64) -> str:
        """Adds a constant and returns its name; dtype object stands for text."""
        array = np.array(value, dtype)
        name = next(self._names)
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Adds a node and returns the name of its output."""
        name = next(self._names) if output is None else output
        node = self.onnx.helper.make_node(op, inputs, [name], **attributes)
        self.nodes.append(node)
        return name


def onnx_bytes(model: TableModel) -> bytes:
    """Returns the model as an ONNX graph in float64.

    It has one input per column, of shape (rows,): float64 for numbers, where NaN stands for
    missing, text for categories, where "" does, and int64 for dates, in microseconds since
    1970-01-01, where `NO_DATE` does; `onnx_inputs` makes them of rows. The outputs
    are "prediction" of shape (rows,), or (rows, targets) of several targets, and, for classes,
    "probabilities" of shape (rows, classes).

    Raises:
        TableError: if the package onnx is missing, or there is no rule for a part of the model.
    """
    columns, target = model.encoding.columns, model.encoding.target
    taken = {column.name for column in columns}
    graph = _Graph(taken | set(_outputs(taken)))
    helper, types = graph.onnx.helper, graph.onnx.TensorProto
    features, inputs = [], []
    for column in columns:
        rule = _rule(_COLUMNS, column)
        kind = {NumberColumn: types.DOUBLE, DateColumn: types.INT64}.get(type(column), types.STRING)
        inputs.append(helper.make_tensor_value_info(column.name, kind, ["rows"]))
        features += rule(graph, column)
    scores = _SCORES[type(model.scorer)](
        graph, model.scorer, graph.add("Concat", *features, axis=1)
    )
    prediction, probabilities = _outputs(taken)
    outputs = [helper.make_tensor_value_info(prediction, types.DOUBLE, ["rows"])]
    if isinstance(target, ClassTarget):
        if model.task == "ordinal":
            shares = _ordered(graph, scores, len(target.classes) - 1, probabilities)
        else:
            if len(target.classes) == 2:
                zero = graph.add("Mul", scores, graph.constant(0.0))
                scores = graph.add("Concat", zero, scores, axis=1)
            shares = graph.add("Softmax", scores, axis=1, output=probabilities)
        best = graph.add("ArgMax", shares, axis=1, keepdims=0)
        graph.add("Gather", graph.constant(target.classes, object), best, output=prediction)
        shape = ["rows", len(target.classes)]
        outputs = [
            helper.make_tensor_value_info(prediction, types.STRING, ["rows"]),
            helper.make_tensor_value_info(probabilities, types.DOUBLE, shape),
        ]
    elif model.encoding.further_targets:
        shape = ["rows", len(model.encoding.targets)]
        outputs = [helper.make_tensor_value_info(prediction, types.DOUBLE, shape)]
        graph.add("Identity", scores, output=prediction)
    else:
        if model.task == "count":
            scores = graph.add("Exp", graph.add("Min", scores, graph.constant(100.0)))
        graph.add("Squeeze", scores, graph.constant([1], np.int64), output=prediction)
    made = helper.make_model(
        helper.make_graph(graph.nodes, "mirrordp", inputs, outputs, graph.constants),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)],
        ir_version=8,
        producer_name="mirrordp",
        producer_version=VERSION,
    )
    classes = target.classes if isinstance(target, ClassTarget) else ()
    names = [one.name for one in model.encoding.targets]
    stated = {"task": model.task, "privacy": _promise(model)}
    lists = {"targets": json.dumps(names), "classes": json.dumps(classes)}
    helper.set_model_props(made, stated | lists)
    graph.onnx.checker.check_model(made)
    return made.SerializeToString()


def onnx_inputs(model: TableModel, rows: Any) -> dict[str, np.ndarray]:
    """Returns rows as the inputs of the model's ONNX graph.

    Spaces around categories are removed, and numbers among them are written as `onnx_bytes` expects
    them. Without this function, write 1 for 1.0 where categories are whole numbers.

    Args:
        model: the model.
        rows: what `TableModel.predict` takes.
    """
    table = as_table(rows)
    require_columns(table, [column.name for column in model.encoding.columns], private=False)
    found = {}
    for column in model.encoding.columns:
        cells = table.columns[column.name]
        if isinstance(column, NumberColumn):
            found[column.name] = numbers(cells, column.decimal, column.thousands)[0]
        elif isinstance(column, CategoryColumn):
            texts, which = distinct_texts(cells)
            places = positions(column.categories, texts)
            labels = [
                text if place < 0 else column.categories[place]
                for text, place in zip(texts, places, strict=True)
            ]
            found[column.name] = np.array(labels, object)[which]
        else:
            times, _ = moments(cells, column.date_format)
            found[column.name] = times.astype("M8[us]").astype(np.int64)
    return found


def _outputs(taken: set[str]) -> tuple[str, str]:
    """Returns the names of the outputs, which must differ from those of the columns."""
    suffix = "_" * max((len(name) for name in taken), default=0)
    clash = taken & {"prediction", "probabilities"}
    return ("prediction" + suffix, "probabilities" + suffix) if clash else _OUTPUTS


_OUTPUTS = ("prediction", "probabilities")


def _number(graph: _Graph, column: NumberColumn) -> list[str]:
    missing = graph.add("Or", graph.add("IsNaN", column.name), graph.add("IsInf", column.name))
    ends = (graph.constant(column.low), graph.constant(column.high))
    units = graph.add("Clip", column.name, *ends)
    if column.is_clock:
        hours = graph.add("Floor", graph.add("Div", units, graph.constant(100.0)))
        units = graph.add("Sub", units, graph.add("Mul", hours, graph.constant(40.0)))
    shifted = graph.add("Sub", units, graph.constant(column.mean))
    scaled = graph.add("Div", shifted, graph.constant(column.scale))
    axis = graph.constant([1], np.int64)
    found = [graph.add("Unsqueeze", graph.add("Where", missing, graph.constant(0.0), scaled), axis)]
    if column.marks_missing:
        mark = graph.add("Cast", missing, to=graph.onnx.TensorProto.DOUBLE)
        found.append(graph.add("Unsqueeze", mark, axis))
    return found


def _category(graph: _Graph, column: CategoryColumn) -> list[str]:
    """Looks up the row of features that belongs to a text; the last row is that of unknown ones."""
    categories = column.categories
    # Further spellings, for callers who do not use `onnx_inputs`: 1.0 for 1, and true for True.
    values = [value for value in map(number, categories) if value is not None]
    texts = [*map(repr, values), *map(number_text, values), "true", "false", *categories]
    known = zip(texts, positions(categories, texts), strict=True)
    missing = len(categories) if column.marks_missing else column.missing_position
    codes = dict.fromkeys(sorted(MISSING), missing) | {text: k for text, k in known if k >= 0}
    width = len(column.features)
    code = graph.add(
        "LabelEncoder",
        column.name,
        domain="ai.onnx.ml",
        keys_strings=list(codes),
        values_int64s=list(codes.values()),
        default_int64=width,
    )
    table = np.vstack([np.eye(width), np.zeros((1, width))])
    return [graph.add("Gather", graph.constant(table), code)]


def _date(graph: _Graph, column: DateColumn) -> list[str]:
    """Expresses `DateColumn.encode`, in integers as far as the calendar goes."""
    types = graph.onnx.TensorProto
    integer = functools.partial(graph.constant, dtype=np.int64)
    missing = graph.add("Equal", column.name, integer(NO_DATE))
    time = graph.add("Where", missing, integer(0), column.name)
    in_day = graph.add("Mod", time, integer(_DAY))
    day = _floor_divided(graph, time, _DAY)

    def divided(one: str, other: str) -> str:
        return graph.add("Div", *(graph.add("Cast", x, to=types.DOUBLE) for x in (one, other)))

    ends = (graph.constant(column.low), graph.constant(column.high))
    clamped = graph.add("Clip", divided(time, integer(_DAY)), *ends)
    shifted = graph.add("Sub", clamped, graph.constant(column.mean))
    parts = [graph.add("Div", shifted, graph.constant(column.scale))]
    if column.has_months:
        begin, end = _year_around(graph, day)
        since = graph.add("Mul", graph.add("Sub", day, begin), integer(_DAY))
        length = graph.add("Mul", graph.add("Sub", end, begin), integer(_DAY))
        parts += _around(graph, divided(graph.add("Add", since, in_day), length))
    if column.has_hours:
        parts += _around(graph, divided(in_day, integer(_DAY)))
    axis = graph.constant([1], np.int64)
    parts = [graph.add("Unsqueeze", part, axis) for part in parts]
    if column.has_weekdays:
        # 1970-01-01 was a Thursday.
        weekday = graph.add("Mod", graph.add("Add", day, integer(3)), integer(7))
        every = integer(np.arange(len(WEEKDAYS))[None])
        same = graph.add("Equal", graph.add("Unsqueeze", weekday, axis), every)
        parts.append(graph.add("Cast", same, to=types.DOUBLE))
    is_missing = graph.add("Unsqueeze", missing, axis)
    known = graph.add("Concat", *parts, axis=1)
    found = [graph.add("Where", is_missing, graph.constant(0.0), known)]
    if column.marks_missing:
        found.append(graph.add("Cast", is_missing, to=types.DOUBLE))
    return found


def _floor_divided(graph: _Graph, number: str, divisor: int) -> str:
    """Divides integers and rounds down, whatever a runtime does with negative ones."""
    by = graph.constant(divisor, np.int64)
    return graph.add("Div", graph.add("Sub", number, graph.add("Mod", number, by)), by)


def _year_around(graph: _Graph, day: str) -> tuple[str, str]:
    """Returns the first day of the year of a day, and that of the next; 1970-01-01 is day 0."""
    types = graph.onnx.TensorProto
    integer = functools.partial(graph.constant, dtype=np.int64)

    def first(year: str) -> str:
        before = graph.add("Sub", year, integer(1))
        days = graph.add("Mul", before, integer(365))
        days = graph.add("Add", days, _floor_divided(graph, before, 4))
        days = graph.add("Sub", days, _floor_divided(graph, before, 100))
        days = graph.add("Add", days, _floor_divided(graph, before, 400))
        return graph.add("Sub", days, integer(719_162))

    def as_integer(condition: str) -> str:
        return graph.add("Cast", condition, to=types.INT64)

    # 400 years have 146,097 days. By that rule a year is wrong by at most one, in either direction.
    since_year_one = graph.add("Mul", graph.add("Add", day, integer(719_162)), integer(400))
    guess = graph.add("Add", _floor_divided(graph, since_year_one, 146_097), integer(1))
    next_guess = graph.add("Add", guess, integer(1))
    too_late = as_integer(graph.add("Greater", first(guess), day))
    too_early = as_integer(graph.add("LessOrEqual", first(next_guess), day))
    year = graph.add("Add", graph.add("Sub", guess, too_late), too_early)
    return first(year), first(graph.add("Add", year, integer(1)))


def _around(graph: _Graph, share: str) -> list[str]:
    """Returns sine and cosine; the latter as a sine, since runtimes lack it in float64."""
    angle = graph.add("Mul", share, graph.constant(2 * np.pi))
    return [
        graph.add("Sin", angle),
        graph.add("Sin", graph.add("Add", angle, graph.constant(np.pi / 2))),
    ]


def _ordered(graph: _Graph, scores: str, thresholds: int, output: str) -> str:
    """Expresses `families.ordered_probabilities`."""
    beyond = graph.add("Sigmoid", scores)
    columns = [
        graph.add("Gather", beyond, graph.constant([k], np.int64), axis=1)
        for k in range(thresholds)
    ]
    # What is beyond a threshold is at most what is beyond the one before.
    smallest = list(itertools.accumulate(columns, lambda a, b: graph.add("Min", a, b)))
    zero = graph.add("Mul", columns[0], graph.constant(0.0))
    ends = [graph.add("Add", zero, graph.constant(1.0)), *smallest, zero]
    shares = [graph.add("Sub", a, b) for a, b in itertools.pairwise(ends)]
    return graph.add("Concat", *shares, axis=1, output=output)


def _linear(graph: _Graph, scorer: LinearScorer, features: str) -> str:
    product = graph.add("MatMul", features, graph.constant(scorer.coefficients.T))
    return graph.add("Add", product, graph.constant(scorer.intercepts))


def _cells(graph: _Graph, scorer: TreesScorer, features: str) -> str:
    """Looks up the values of the cells, as `TreesScorer.__call__` does."""
    product = graph.add("MatMul", features, graph.constant(scorer.coefficients.T))
    scores = graph.add("Add", product, graph.constant(scorer.intercepts))
    types = graph.onnx.TensorProto
    bins = []
    for cut in scorer.cuts:
        part = graph.add("Gather", features, graph.constant(cut.features, np.int64), axis=1)
        if len(cut.edges):
            # The bin is the number of edges that are not above the feature.
            beyond = graph.add("GreaterOrEqual", part, graph.constant(cut.edges[None]))
            numbers = graph.add("Cast", beyond, to=types.INT64)
        else:
            is_set = graph.add("Greater", part, graph.constant(0.5))
            places = graph.constant(np.arange(1, cut.size)[None], np.int64)
            numbers = graph.add("Mul", graph.add("Cast", is_set, to=types.INT64), places)
        axis = graph.constant([1], np.int64)
        bins.append(graph.add("ReduceSum", numbers, axis, keepdims=0))
    for term, values in zip(scorer.terms, scorer.values, strict=True):
        where = bins[term[0]]
        if len(term) == 2:
            size = graph.constant(scorer.cuts[term[1]].size, np.int64)
            where = graph.add("Add", graph.add("Mul", where, size), bins[term[1]])
        scores = graph.add("Add", scores, graph.add("Gather", graph.constant(values), where))
    return scores


def _network(graph: _Graph, scorer: NetworkScorer, features: str) -> str:
    """Expresses `NetworkScorer.__call__`."""
    shifted = graph.add("Sub", features, graph.constant(scorer.shift))
    scaled = graph.add("Mul", shifted, graph.constant(scorer.factor))
    parts = [scaled]
    for feature, borders in zip(scorer.cut, scorer.edges, strict=True):
        one = graph.add("Gather", scaled, graph.constant([feature], np.int64), axis=1)
        above = graph.add("Sub", one, graph.constant(borders[None, :-1]))
        share = graph.add("Div", above, graph.constant(np.diff(borders)[None]))
        inside = graph.add("Clip", share, graph.constant(0.0), graph.constant(1.0))
        parts.append(graph.add("Sub", inside, graph.constant(0.5)))
    inputs = hidden = graph.add("Concat", *parts, axis=1)
    for index, (weights, bias) in enumerate(scorer.layers):
        hidden = graph.add("MatMul", hidden, graph.constant(weights))
        hidden = graph.add("Add", hidden, graph.constant(bias))
        if index + 1 < len(scorer.layers):
            hidden = graph.add("Max", hidden, graph.constant(0.0))
    return graph.add("Add", hidden, graph.add("MatMul", inputs, graph.constant(scorer.skip)))


_COLUMNS: dict[type, Callable[[_Graph, Any], list[str]]] = {
    NumberColumn: _number,
    CategoryColumn: _category,
    DateColumn: _date,
}
_SCORES: dict[type, Callable[[_Graph, Any, str], str]] = {
    LinearScorer: _linear,
    TreesScorer: _cells,
    NetworkScorer: _network,
}


def _rule(rules: Mapping[type, Any], part: Any) -> Any:
    """Returns the function that expresses a part of the model."""
    if type(part) not in rules:
        raise TableError(
            f"expected a model that ONNX can express, got {type(part).__name__}; export to "
            "numpy instead."
        )
    return rules[type(part)]


def _onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError:
        raise TableError(
            "expected the package onnx for this export, but it is not installed; run pip install "
            "'mirrordp[onnx]', or export to numpy."
        ) from None
    return onnx
