"""How far a fit is, for whoever watches it.

Steps are taken deep inside an estimator, whose `fit` has scikit-learn's parameters. So what is to
be told of them is a variable of the context, as a log would be.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_told: contextvars.ContextVar[Callable[[str], object]] = contextvars.ContextVar(
    "told", default=lambda _: None
)


@contextlib.contextmanager
def told(function: Callable[[str], object]) -> Iterator[None]:
    """Within it, `function` is told how far a fit is; it must not fail."""
    token = _told.set(function)
    try:
        yield
    finally:
        _told.reset(token)


def tell(so_far: str) -> None:
    """Says how far a fit is. Never anything that private rows decide, apart from their number."""
    _told.get()(so_far)
