"""Files that survive a crash: atomic writes, durable appends, locks that name their holder.

Durable means that the bytes and the directory entry that leads to them were handed to the disk
(`fsync`) before the function returns.
"""

import contextlib
import datetime
import errno
import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


HAS_LOCKS = importlib.util.find_spec("fcntl") is not None
"""Whether the system has the file locks that ledger files, budgets and checkpoints need."""


class StorageError(Exception):
    """Something about files that were or are to be kept: damaged, locked, not writable.

    The message says what was expected, what came and what to do.
    """


class LockedError(StorageError):
    """Another process holds the folder."""


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Makes the entries of a folder durable: what was created, renamed or removed in it."""
    if os.name == "nt":  # there a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_replaceable(path: Path) -> None:
    """Refuses devices, pipes and folders: a rename would put an ordinary file in their place."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))


def write_atomically(
    path: str | os.PathLike[str], content: bytes, *, mode: int | None = None
) -> None:
    """Writes a file through a temporary one beside it: durable, and never seen by half.

    Args:
        path: where to; its folder is made if it is not there.
        content: all of it.
        mode: permissions; by default those of any new file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_replaceable(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        try:
            write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        # mkstemp makes the file readable by its owner only.
        os.chmod(temporary, 0o666 & ~_umask() if mode is None else mode)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def remove_leftovers(folder: str | os.PathLike[str], name: str) -> None:
    """Removes what `write_atomically` left of files whose names begin so, if it was killed.

    For whoever holds the folder's lock: another process may be writing otherwise.
    """
    for path in Path(folder).iterdir():
        if path.name.startswith(f".{name}"):
            path.unlink(missing_ok=True)


def write_all(handle: int, content: bytes) -> None:
    """`os.write` until everything is written."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def make_private_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a folder that only its owner can enter, or takes that right from everybody else."""
    folder = Path(folder)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        sync_folder(folder.parent)
    os.chmod(folder, PRIVATE_FOLDER)
    return folder


class Lock:
    """An exclusive lock on a file, held until `close` or the end of the process, however it ends.

    The file stays, with a line that says who holds it (or held it last).

    Args:
        path: the lock file; its folder must exist.
        what: what is locked, for messages.
        wait: seconds to wait for another holder; 0 gives up at once.
    """

    def __init__(self, path: str | os.PathLike[str], what: str, *, wait: float = 0.0):
        if not HAS_LOCKS:
            raise StorageError(
                f"expected a system with file locks for {what}, got {sys.platform}. Use Linux or "
                "macOS, or train without a budget, ledger file and checkpoint."
            )
        import fcntl

        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        self._process = os.getpid()
        try:
            deadline = time.monotonic() + wait
            while True:
                try:
                    # flock, not lockf: a second handle in this very process is a second holder too.
                    fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise LockedError(
                            f"expected {what} for one process alone, got one that is in use by "
                            f"{_holder(path)}. Wait for it to end; for a budget --wait SECONDS "
                            "(wait=) does so."
                        ) from None
                time.sleep(0.05)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            holder = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
            os.ftruncate(self._handle, 0)
            with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
                os.pwrite(self._handle, json.dumps(holder).encode(), 0)
        except BaseException:
            self.close()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process holds it: one that was forked off has the handle, not the lock."""
        return self._handle >= 0 and self._process == os.getpid()

    def __reduce__(self):
        raise TypeError(
            "a lock belongs to one process, got a request for a copy. Open the folder or file by "
            "its path where it is used."
        )

    def close(self, _close=os.close) -> None:
        """Lets the next one in."""
        # `_close` is still there when the interpreter shuts down and `os` is not.
        if self._handle >= 0:
            _close(self._handle)
            self._handle = -1

    def __del__(self):
        if getattr(self, "_handle", -1) >= 0:
            self.close()


def _holder(path: str | os.PathLike[str]) -> str:
    try:
        found = json.loads(Path(path).read_text())
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
