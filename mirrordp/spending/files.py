"""Files that survive a crash: atomic writes, and locks that name their holder.

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
RUN_LOCK = "lock"
"""The lock of a run folder, which stays there."""

HAS_LOCKS = importlib.util.find_spec("fcntl") is not None
"""Whether the system has the file locks that ledger files, budgets and checkpoints need."""


class StorageError(Exception):
    """A file that is damaged, locked or not writable.

    The message says what was expected, what was found and what to do.
    """


class LockedError(StorageError):
    """Another process holds the folder."""


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Makes durable what was created, renamed or removed in a folder."""
    if os.name == "nt":  # Windows cannot open a folder.
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
    """Writes a file through a temporary one beside it, so that nobody ever sees half of it.

    The file is durable when the function returns.

    Args:
        path: the file; its folder is made if it does not exist.
        content: the whole content.
        mode: the permissions; by default those of any new file.
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
    """Removes the temporary files that `write_atomically` left if it was killed.

    Only the holder of the folder's lock may call it, since another process may be writing.

    Args:
        folder: the folder.
        name: how the names of the files begin.
    """
    for path in Path(folder).iterdir():
        if path.name.startswith(f".{name}"):
            path.unlink(missing_ok=True)


def write_all(handle: int, content: bytes) -> None:
    """Calls `os.write` until everything is written."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def absolute(path: str | os.PathLike[str]) -> Path:
    """Returns a path that stays the same wherever the process goes (`os.chdir`)."""
    return Path(os.path.abspath(path))


def identity(found: os.stat_result) -> tuple[int, int]:
    """Returns what stays the same as long as a file is there, whatever it is called."""
    return found.st_dev, found.st_ino


def make_private_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a folder, or changes an existing one, so that only its owner can enter it."""
    folder = Path(folder)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        sync_folder(folder.parent)
    os.chmod(folder, PRIVATE_FOLDER)
    return folder


class Lock:
    """An exclusive lock on a file, held until `close` or the end of the process, however it ends.

    The file stays, with a line that names its holder (or the last one).

    Args:
        path: the lock file; its folder must exist.
        what: what is locked, for messages.
        wait: seconds to wait for another holder; with 0 it gives up at once.
    """

    def __init__(self, path: str | os.PathLike[str], what: str, *, wait: float = 0.0):
        if not HAS_LOCKS:
            raise StorageError(
                f"expected a system with file locks for {what}, got {sys.platform}. Use Linux or "
                "macOS, or train without a budget, ledger file and checkpoint."
            )
        import fcntl

        self._path = absolute(path)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        self._process = os.getpid()
        try:
            deadline = time.monotonic() + wait
            while True:
                try:
                    # flock, unlike lockf, locks out a second handle in the same process.
                    fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise LockedError(
                            f"expected {what} to be free, got one in use by {_holder(path)}. Wait "
                            "until it ends; --wait SECONDS (wait=...) waits for a budget."
                        ) from None
                time.sleep(0.05)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            holder = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
            os.ftruncate(self._handle, 0)
            with contextlib.suppress(OSError):  # The lock holds on a full disk, too.
                os.pwrite(self._handle, json.dumps(holder).encode(), 0)
        except BaseException:
            self.close()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process holds the lock; a fork of it has the handle, but not the lock."""
        return self._handle >= 0 and self._process == os.getpid()

    @property
    def is_in_place(self) -> bool:
        """Whether the file at the path is still the one that is locked."""
        try:
            return identity(os.fstat(self._handle)) == identity(os.stat(self._path))
        except OSError:
            return False

    def __reduce__(self):
        raise TypeError(
            "a lock belongs to one process and cannot be copied. Open the folder or file by its "
            "path where it is used."
        )

    def close(self, _close=os.close) -> None:
        """Releases the lock."""
        # `_close` still exists when the interpreter shuts down, and `os` may not.
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
