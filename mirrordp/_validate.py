"""Checks of arguments: each message says what was expected, what came and what to do.

Every check takes its values as keywords, so that the message can name the argument:
`positive(l2_clip_norm=1.0)`.
"""

import math
import numbers
from typing import Any


def _fail(name: str, expected: str, value: Any, advice: str = "") -> None:
    raise ValueError(f"{name} must be {expected}, got {value!r}.{' ' + advice if advice else ''}")


def _number(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {expected}, got {value!r} of type {type(value).__name__}.")
    return float(value)


def positive(advice: str = "", **values: Any) -> None:
    """Each value is a finite number greater than zero."""
    for name, value in values.items():
        number = _number(name, value, "a positive number")
        if not (math.isfinite(number) and number > 0):
            _fail(name, "a positive finite number", value, advice)


def non_negative(advice: str = "", **values: Any) -> None:
    """Each value is a finite number of at least zero."""
    for name, value in values.items():
        number = _number(name, value, "a non-negative number")
        if not (math.isfinite(number) and number >= 0):
            _fail(name, "a non-negative finite number", value, advice)


def positive_integer(advice: str = "", **values: Any) -> None:
    """Each value is an integer of at least one."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(
                f"{name} must be a positive integer, got {value!r} of type {type(value).__name__}."
            )
        if value < 1:
            _fail(name, "a positive integer", value, advice)


def probability(advice: str = "", **values: Any) -> None:
    """Each value lies in (0, 1]."""
    for name, value in values.items():
        number = _number(name, value, "a probability in (0, 1]")
        if not 0 < number <= 1:
            _fail(name, "a probability in (0, 1]", value, advice)


def open_unit_interval(advice: str = "", **values: Any) -> None:
    """Each value lies in (0, 1)."""
    for name, value in values.items():
        number = _number(name, value, "a number in (0, 1)")
        if not 0 < number < 1:
            _fail(name, "a number in (0, 1)", value, advice)


def instance_of(kind: type | tuple[type, ...], advice: str = "", **values: Any) -> None:
    """Each value is an instance of `kind`."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    for name, value in values.items():
        if not isinstance(value, kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise TypeError(
                f"{name} must be {expected}, got {type(value).__name__}."
                f"{' ' + advice if advice else ''}"
            )
