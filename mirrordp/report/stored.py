"""The stored form of a report: `report.json`, and the checks of what is read back.

A stored report may have been changed or cut, so every field is checked before it is used. A report
that does not pass raises a `ReportError`.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mirrordp.privacy.accounting import Adjacency
from mirrordp.report import card
from mirrordp.report.figures import Curve

if TYPE_CHECKING:
    from mirrordp.report.statement import RunReport

    Report = TypeVar("Report", bound=RunReport)

SCHEMA_VERSION = 3
"""The version of report.json. Version 2 added `epsilon_over_steps` and `curves`, version 3 added
`seeded`. Reports without a version are of version 1."""


class ReportError(ValueError):
    """The error for a stored report that cannot be read; the message is one sentence."""


def to_dict(report: "RunReport") -> dict[str, Any]:
    """Returns plain types in a fixed order; an infinite ε becomes None, which JSON can hold."""
    fields = {"schema_version": SCHEMA_VERSION} | {
        field.name: plain(getattr(report, field.name), field.name)
        for field in dataclasses.fields(report)
    }
    fields["randomness"] = card.randomness(report)
    for name in ("seed", "ledger", "charged_multiplier", "selection"):
        if fields[name] is None:
            del fields[name]
    results = fields.pop("results")
    return fields | {"results": results}


def from_dict(kind: "type[Report]", content: Any, source: str) -> "Report":
    """Makes a report of what `to_dict` returned; `source` names its origin in messages."""
    if not isinstance(content, dict) or not {"epsilon", "delta", "adjacency"} <= set(content):
        raise ReportError(
            f"expected a report written by mirrordp, got something else in {source!r}; check the "
            "path."
        )
    version = content.get("schema_version", 1)
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ReportError(
            f"expected a report of schema version 1 to {SCHEMA_VERSION}, got {version!r} in "
            f"{source!r}; use the mirrordp that wrote it."
        )
    try:
        return kind(**_checked_fields(kind, content))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ReportError(
            f"expected an intact report, got changed or missing parts in {source!r} ({error}); "
            "write it again."
        ) from None


def read(kind: "type[Report]", folder: str | os.PathLike[str]) -> "Report":
    """Reads `report.json` from a folder."""
    path = Path(folder) / "report.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        content = None
    except OSError as error:
        raise ReportError(
            f"expected a folder with report.json as written by mirrordp, got {str(folder)!r} "
            f"({error.strerror}); check the path."
        ) from None
    return from_dict(kind, content, str(path))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def plain(value: Any, name: str) -> Any:
    """Returns a value as numbers, strings, lists and dictionaries; nothing else can be reported."""
    if isinstance(value, Adjacency):
        return value.value
    if isinstance(value, Curve):
        return value.to_dict()
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float | np.number):
        number = value.item() if isinstance(value, np.number) else value
        return number if math.isfinite(number) else None
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys of {name} must be strings, got {key!r}. Use str(...).")
            if "unprivatized" in key.lower():
                raise ValueError(
                    f"{name} must hold released values only, got {key!r}, which is not covered by "
                    "the privacy guarantee. Leave it out."
                )
        return {key: plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{name} must be a number, a string, or a list or dictionary of such, got "
        f"{type(value).__name__}. Convert it with float(...) or .tolist()."
    )


def _checked_fields(kind: "type[RunReport]", content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `RunReport` from JSON, with every type checked."""
    found = {}
    for field in dataclasses.fields(kind):
        name = field.name
        if name not in content and field.default is not dataclasses.MISSING:
            found[name] = field.default
            continue
        value = plain(content[name], name)
        kinds, convert = _CHECKS[name]
        # A bool is an int to Python.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name} is of the wrong type")
        found[name] = convert(value)
    negative = [k for k, v in found.items() if isinstance(v, int | float) and v < 0]
    if negative or not 0 < found["delta"] < 1:
        raise ValueError(f"{(*negative, 'delta')[0]} is out of range")
    return found


def _unit(value: str) -> str:
    if value not in card.WHO_IS_PROTECTED:
        raise ValueError(f"{value!r} is no unit of privacy")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text is of the wrong type")
    return value


def _steps_and_epsilon(pair: Any) -> tuple[int, float]:
    steps, epsilon = pair
    if not isinstance(steps, int) or not isinstance(epsilon, int | float | None):
        raise TypeError("epsilon_over_steps is of the wrong type")
    return steps, math.inf if epsilon is None else float(epsilon)


def _ledger(content: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns the ledger's position and, where there is one, the budget, and drops all else."""
    if content is None:
        return None
    found: dict[str, Any] = {"length": int(content["length"]), "head": _text(content["head"])}
    if "budget" in content:
        names = ("epsilon", "delta", "runs", "used")
        budget = {name: content["budget"][name] for name in names}
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in budget.values()):
            raise TypeError("the budget must hold finite numbers")
        found["budget"] = budget
    return found


def _as_it_is(value: Any) -> Any:
    return value


_NULL = type(None)

# The JSON types of each field, and the function that makes the field's value of them.
_CHECKS: dict[str, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
    "epsilon": ((int, float, _NULL), lambda x: math.inf if x is None else float(x)),
    "adjacency": ((str,), Adjacency),
    "unit": ((str,), _unit),
    "shown_without_protection": ((list,), lambda x: tuple(map(_text, x))),
    "versions": ((dict,), lambda x: {_text(k): _text(v) for k, v in x.items()}),
    "epsilon_over_steps": ((list,), lambda x: tuple(map(_steps_and_epsilon, x))),
    "curves": ((list,), lambda x: tuple(map(Curve.from_dict, x))),
    "num_examples_is_public": ((bool,), bool),
    "num_examples": ((int, _NULL), _as_it_is),
    "seed": ((int, _NULL), _as_it_is),
    "seeded": ((bool, _NULL), _as_it_is),
    "charged_steps": ((int,), int),
    "ledger": ((dict, _NULL), _ledger),
    "selection": ((str, _NULL), _as_it_is),
    "results": ((dict,), _as_it_is),
    **dict.fromkeys(
        (
            *("delta", "sampling_prob", "noise_multiplier", "charged_multiplier", "l2_clip_norm"),
            "divisor",
        ),
        ((int, float), float),
    ),
    **dict.fromkeys(
        ("title", "sampling", "noise", "accountant", "accountant_method", "scope", "tuning"),
        ((str,), _as_it_is),
    ),
}
