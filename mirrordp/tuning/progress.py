"""A line that tells the operator how far a search is."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from tqdm import tqdm


class Show(Protocol):
    """Shows a line of text, and how many of how many runs are done if both are known."""

    def __call__(self, text: str, *, done: int = 0, total: int | None = None) -> None: ...  # noqa: D102


def nothing_shown(text: str, *, done: int = 0, total: int | None = None) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def shown_if(asked: bool) -> Iterator[Show]:
    """Yields what shows a line on standard error if it was asked for, and nothing otherwise.

    On a terminal it is one line that changes, with a bar where the number of runs is known.
    Elsewhere each text is a line of its own.
    """
    if not asked:
        yield nothing_shown
        return
    if not sys.stderr.isatty():
        yield lambda text, *, done=0, total=None: print(
            f"tune: {text}", file=sys.stderr, flush=True
        )
        return
    with tqdm(desc="tune", bar_format="{desc}", file=sys.stderr) as bar:

        def show(text: str, *, done: int = 0, total: int | None = None) -> None:
            bar.n, bar.total = done, total
            bar.bar_format = "{desc}" if total is None else "{percentage:3.0f}%|{bar:20}| {desc}"
            bar.set_description_str(f"tune: {text}")

        yield show
