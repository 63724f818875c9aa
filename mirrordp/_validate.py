"""Checks of arguments, whose messages say what was expected, what was given and what to do.

Every check takes its values as keywords, so that the message can name the argument:
`positive(l2_clip_norm=1.0)`.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any


def _require_numbers(
    values: dict[str, Any],
    advice: str,
    expected: str,
    holds: Callable[[Any], bool],
    kind: type = numbers.Real,
) -> None:
    advice = f" {advice}" if advice else ""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(
                f"{name} must be {expected}, got {value!r} of type {type(value).__name__}.{advice}"
            )
        if not holds(value):
            raise ValueError(f"{name} must be {expected}, got {value!r}.{advice}")


def plain(value: Any) -> Any:
    """Returns a number as an `int` or `float` of Python's, and anything else as it is.

    NumPy computes in the width of its own scalars: `np.int8(100) * np.int8(3)` is 44. What decides
    privacy is therefore made plain before anything is computed from it.

    >>> import numpy as np
    >>> plain(np.int8(100)) * plain(np.int8(3)), plain(None)
    (300, None)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def make_plain(instance: Any) -> None:
    """Makes the numbers among the fields of a frozen dataclass plain; see `plain`."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if (found := plain(value)) is not value:
            object.__setattr__(instance, field.name, found)


def positive(advice: str = "", **values: Any) -> None:
    """Raises unless each value is a finite number greater than zero."""
    _require_numbers(values, advice, "a positive finite number", lambda x: 0 < x < math.inf)


def non_negative(advice: str = "", **values: Any) -> None:
    """Raises unless each value is a finite number of at least zero."""
    _require_numbers(values, advice, "a non-negative finite number", lambda x: 0 <= x < math.inf)


def positive_integer(advice: str = "", **values: Any) -> None:
    """Raises unless each value is an integer of at least one."""
    _require_numbers(values, advice, "a positive integer", lambda x: x >= 1, numbers.Integral)


def probability(advice: str = "", **values: Any) -> None:
    """Raises unless each value lies in (0, 1]."""
    _require_numbers(values, advice, "a probability in (0, 1]", lambda x: 0 < x <= 1)


def open_unit_interval(advice: str = "", **values: Any) -> None:
    """Raises unless each value lies in (0, 1)."""
    _require_numbers(values, advice, "a number in (0, 1)", lambda x: 0 < x < 1)


def instance_of(kind: type | tuple[type, ...], advice: str = "", **values: Any) -> None:
    """Raises unless each value is an instance of `kind`."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    for name, value in values.items():
        if not isinstance(value, kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise TypeError(
                f"{name} must be {expected}, got {type(value).__name__}."
                f"{' ' + advice if advice else ''}"
            )
