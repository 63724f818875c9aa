"""Warnings that point at the caller's line, however deep in the library they arise.

A fixed `stacklevel` is right for one path through the library and wrong for all others.
"""

import sys
import warnings

# Packages that stand between the caller and the library, or between two functions of the library.
_BETWEEN = frozenset(
    {"mirrordp", "jax", "optax", "sklearn", "joblib", "contextlib", "functools", "threading"}
    | {"concurrent"}
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that belongs neither to the library nor to one it works through.

    Args:
        message: what happened, what it means and what to do.
        category: the kind of warning.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _BETWEEN:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _package(namespace: dict) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]
