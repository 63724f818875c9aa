"""One process at a time, where several share a folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes at once are not kept apart there.
    fcntl = None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that the operating system releases when the process ends, however it ends."""
    with open(path, "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
