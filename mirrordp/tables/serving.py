"""A model behind HTTP: a `TableModel` in, a Starlette application out.

    GET  /health   {"status": "ok"}
    GET  /model    task, target, columns and privacy statement of the model
    POST /predict  one row as an object, or several as a list of objects

A row names every column of the model; null stands for a missing cell, and other names are ignored.
The answer is the prediction of the row, or a list of them, with what the public table does not
cover. A row that cannot be read is answered with 422, the column and the reason.

Nothing of a row is logged, and no answer repeats a cell: not even an unexpected error does, which
is logged as its type and place. Size, rows and time of a request are bounded by `Limits`.
"""

import collections
import dataclasses
import json
import logging
import math
import os
from typing import Any

import numpy as np

from mirrordp import _validate
from mirrordp._versions import VERSION
from mirrordp.tables.columns import (
    MISSING,
    CategoryColumn,
    ClassTarget,
    Column,
    DateColumn,
    NumberColumn,
    Tally,
    differ_as_numbers,
    moment,
    number,
    number_text,
    numbers,
)
from mirrordp.tables.files import Cells, Table, TableError
from mirrordp.tables.fitting import TableModel

_MOST_PROBLEMS = 100
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest request that is answered.

    Attributes:
        max_bytes: the largest body in bytes.
        max_rows: the largest number of rows.
        seconds: the longest time for a request from the end of its headers on. The headers are the
            server's business; `mirrordp serve` gives them the same time.
    """

    max_bytes: int = 1_000_000
    max_rows: int = 10_000
    seconds: float = 10.0

    def __post_init__(self):
        _validate.positive_integer(max_bytes=self.max_bytes)
        _validate.positive_integer(max_rows=self.max_rows)
        _validate.positive(seconds=self.seconds)


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, error: str, problems: list[dict[str, Any]] | None = None):
        super().__init__(error)
        self.status = status
        self.content: dict[str, Any] = {"error": error}
        if problems:
            self.content["problems"] = problems


def make_app(model: TableModel, limits: Limits | None = None) -> Any:
    """Returns the application, for uvicorn or any other ASGI server.

    Args:
        model: the model to serve.
        limits: the largest request that is answered.

    Raises:
        TableError: if Starlette is not installed.
    """
    framework = require_starlette()
    import anyio
    import anyio.to_thread

    limits = Limits() if limits is None else limits
    about = _about(model)
    reply = framework.responses.JSONResponse

    async def health(request: Any) -> Any:
        return reply({"status": "ok", "version": VERSION})

    async def describe(request: Any) -> Any:
        return reply(about)

    async def predict(request: Any) -> Any:
        try:
            with anyio.fail_after(limits.seconds):
                body = await _body(request, limits.max_bytes)
                # A thread that takes too long is left to its end, which the other limits bound.
                found = await anyio.to_thread.run_sync(
                    answer, model, body, limits.max_rows, abandon_on_cancel=True
                )
            return reply(found)
        except _Refused as refusal:
            return reply(refusal.content, refusal.status)
        except TimeoutError:
            error = f"expected a request that takes at most {limits.seconds:g} s, got a longer one"
            return reply({"error": f"{error}; send fewer rows at once."}, 503)
        except framework.requests.ClientDisconnect:
            return reply({"error": "the connection was closed before the end of the request"}, 400)
        except Exception as error:
            # The message of an error may quote a cell, and so may a traceback.
            _logger.error("unexpected %s at %s", type(error).__name__, _place(error))
            return reply({"error": "an unexpected error occurred; see the log for its place"}, 500)

    async def refuse(request: Any, error: Any) -> Any:
        text = f"{error.detail}: POST /predict, GET /model and GET /health are answered"
        return reply({"error": text}, error.status_code, headers=error.headers)

    route = framework.routing.Route
    return framework.applications.Starlette(
        routes=[
            route("/health", health, methods=["GET"]),
            route("/model", describe, methods=["GET"]),
            route("/predict", predict, methods=["POST"]),
        ],
        exception_handlers={framework.exceptions.HTTPException: refuse},
    )


async def _body(request: Any, max_bytes: int) -> bytes:
    """Reads the body as far as it is allowed to go, whatever length its header states."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _Refused(
                413, f"expected at most {max_bytes} bytes, got more; send fewer rows at once."
            )
    return bytes(body)


def answer(model: TableModel, body: bytes, max_rows: int) -> dict[str, Any]:
    """Returns the answer to the body of a request to `/predict`, as plain types.

    Raises:
        _Refused: if the request cannot be answered.
    """
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _Refused(
            400, "expected JSON in UTF-8, got something else; NaN is written as null."
        ) from None
    if not isinstance(content, dict | list):
        raise _Refused(422, f"expected a row (an object) or a list of rows, got {_kind(content)}.")
    rows = content if isinstance(content, list) else [content]
    if len(rows) > max_rows:
        raise _Refused(
            413, f"expected at most {max_rows} rows, got {len(rows)}; send fewer at once."
        )
    tallies: dict[str, Tally] = collections.defaultdict(Tally)
    found = model.predict(_table(model, rows), tallies)
    predictions = _listed(model, found)
    unfamiliar = model.encoding.unfamiliar(tallies)
    if isinstance(content, dict):
        return {**predictions[0], "unfamiliar": unfamiliar}
    return {"predictions": predictions, "unfamiliar": unfamiliar}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _table(model: TableModel, rows: list[Any]) -> Table:
    """Returns the rows as a table, or refuses them with all that is wrong with them."""
    problems: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            problem = f"expected an object with a value for each column, got {_kind(row)}"
            problems.append({"row": index, "column": None, "problem": problem})
    if not problems:
        columns: dict[str, Cells] = {}
        for column in model.encoding.columns:
            cells = []
            for index, row in enumerate(rows):
                try:
                    cells.append(_cell(column, row))
                except ValueError as error:
                    problem = {"row": index, "column": column.name, "problem": str(error)}
                    problems.append(problem)
            is_number = isinstance(column, NumberColumn)
            columns[column.name] = np.array(cells, np.float64) if is_number else tuple(cells)
        if not problems:
            return Table("the request", columns)
    problems.sort(key=lambda problem: problem["row"])
    more = "" if len(problems) <= _MOST_PROBLEMS else f" (the first {_MOST_PROBLEMS} are listed)"
    raise _Refused(
        422,
        f"expected rows that fit the model, got {len(problems)} problems{more}; GET /model "
        "describes the columns.",
        problems[:_MOST_PROBLEMS],
    )


def _cell(column: Column, row: dict[str, Any]) -> Any:
    """Returns a float for a column of numbers, else text; a ValueError says what is wrong."""
    if column.name not in row:
        raise ValueError("expected a value or null, got no such name in the row")
    value = row[column.name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(column, NumberColumn):
        if value is None:
            return math.nan
        try:
            found = float(value) if is_number else _read(column, value)
        except OverflowError:
            found = math.inf
        if found is None:
            raise ValueError(f"expected a number or null, got {_kind(value)}")
        if math.isinf(found):
            raise ValueError("expected a finite number, got one beyond float64")
        return found
    if isinstance(column, DateColumn):
        return _date(column, value)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "true" if value else "false"
    # Of categories 007 and 7, a number does not say which it is.
    text_only = isinstance(column, CategoryColumn) and (
        all(number(category) is None for category in column.categories)
        or not differ_as_numbers(column.categories)
    )
    if not is_number or text_only:
        raise ValueError(f"expected text or null, got {_kind(value)}")
    try:
        return number_text(float(value))
    except OverflowError:
        return str(value)


def _read(column: NumberColumn, value: Any) -> float | None:
    """Returns the number that a text holds, with the separators of the column."""
    if not isinstance(value, str):
        return None
    (found,), (is_text,) = numbers([value], column.decimal, column.thousands)
    return None if is_text else float(found)


def _date(column: DateColumn, value: Any) -> str:
    if value is None or (isinstance(value, str) and value.strip() in MISSING):
        return ""
    if not isinstance(value, str) or moment(value, column.date_format) is None:
        raise ValueError(f"expected a date ({column.date_format}) or null, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    """Returns what a JSON value is, without the value."""
    return "null" if value is None else _KINDS.get(type(value), "a number")


def _listed(model: TableModel, found: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Returns one object per row; null stands for a number that is not finite."""
    target = model.encoding.target
    if model.encoding.further_targets:
        names = [one.name for one in model.encoding.targets]
        rows = zip(*(map(_finite, values.tolist()) for values in found.values()), strict=True)
        return [{"prediction": dict(zip(names, row, strict=True))} for row in rows]
    if not isinstance(target, ClassTarget):
        return [{"prediction": _finite(x)} for x in found["prediction"].tolist()]
    shares = np.column_stack([found[f"probability of {name}"] for name in target.classes])
    return [
        {"prediction": label, "probabilities": dict(zip(target.classes, row, strict=True))}
        for label, row in zip(found["prediction"].tolist(), shares.tolist(), strict=True)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _about(model: TableModel) -> dict[str, Any]:
    return {"task": model.task, **model.encoding.to_dict(), "privacy": dict(model.privacy)}


def _place(error: Exception) -> str:
    """Returns the file and line of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown place"
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}, line {trace.tb_lineno}"


def require_starlette() -> Any:
    """Returns the package starlette, or says how to install it."""
    try:
        import starlette.applications
        import starlette.exceptions
        import starlette.requests
        import starlette.responses
        import starlette.routing
    except ImportError:
        raise TableError(
            "expected the packages starlette and uvicorn for a service, but they are not "
            "installed; run pip install 'mirrordp[serve]'."
        ) from None
    return starlette
