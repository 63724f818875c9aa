"""The processes of one run: what they tell each other besides the clipped sum.

Each process of `jax.distributed` holds records of its own, which never leave it. What goes between
them, outside the compiled program, are short messages: how many records each holds, what each is
about to run, the seed of the run, and that a block of steps is charged. They go through the store
of JAX's coordinator, which process 0 hosts. Nothing of it is released, and nothing of it is
protected: all processes belong to one operator, who trusts the network between them.

A process that has ended is noticed by the others: at once where it takes part in a reduction, and
otherwise because its sign of life stays away. JAX notices some of it too, and then aborts this
process from within; a shell that waits for that says in one sentence what it means.
"""

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mirrordp.types import PyTree

# Seconds. A process that compiles or reads still gives signs of life, from a thread of its own.
_SIGN_EVERY = 2.0
_SILENCE = 20.0
_ARRIVAL = 600.0
_POLL = 1.0
# A loop that waits for a message raises; only what cannot is ended from outside, a little later.
_GRACE = 4.0

_runs = itertools.count()
_lost = threading.Event()


class ProcessLost(RuntimeError):
    """A run that cannot go on because one of its processes has ended or failed."""


class Group:
    """The processes of one run, as one of them sees the others.

    All processes make the same calls in the same order.

    Attributes:
        index: the number of this process.
        count: the number of processes.
    """

    def __init__(self):
        self.index, self.count = jax.process_index(), jax.process_count()
        self._client = _client()
        self._name = f"mirrordp/{next(_runs)}"
        self._messages = itertools.count()
        self._signs = _signs(self._client, self.index)

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the ledger and the checkpoints."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes in their order; values are those that JSON knows.

        Raises:
            ProcessLost: if a process ended or failed before it gave its value.
        """
        return self._received(self._sent(value), value)

    def to_first(self, value: Any) -> list[Any]:
        """Returns the values of all processes to process 0, and nothing to the others."""
        place = self._sent(value)
        if not self.is_first:
            return []
        found = self._received(place, value)
        with _named_errors():
            # There is one such message for every block of a run.
            self._client.key_value_delete(place)
        return found

    def from_first(self, value: Any) -> Any:
        """Returns the value of process 0; the others need none."""
        place = f"{self._name}/{next(self._messages)}/0"
        if self.is_first:
            with _named_errors():
                self._client.key_value_set(place, json.dumps(value))
            return value
        return json.loads(self._wait(place, 0))

    def _sent(self, value: Any) -> str:
        place = f"{self._name}/{next(self._messages)}"
        with _named_errors():
            self._client.key_value_set(f"{place}/{self.index}", json.dumps(value))
        return place

    def _received(self, place: str, own: Any) -> list[Any]:
        return [
            own if each == self.index else json.loads(self._wait(f"{place}/{each}", each))
            for each in range(self.count)
        ]

    def _wait(self, place: str, sender: int) -> str:
        while True:
            try:
                return self._client.blocking_key_value_get(place, int(1000 * _POLL))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error) and "NOT_FOUND" not in str(error):
                    raise _lost_because(error) from error
            failed = _found(self._client, f"{self._name}/failed/{sender}")
            if failed is not None:
                raise ProcessLost(f"process {sender} stopped the run: {failed}")
            if self._signs.overdue(sender) > 0.0:
                _lost.set()
                raise ProcessLost(self._signs.missing(sender))

    @contextlib.contextmanager
    def telling(self, *, is_running: bool = False) -> Iterator[None]:
        """Tells the others of an error inside, and names the loss of a process as such.

        Args:
            is_running: whether the others may be waiting in a reduction, where only the end of this
                process reaches them.
        """
        done = threading.Event()
        threading.Thread(target=self._watch, args=(done,), daemon=True).start()
        _guard.take(sentence := _ABRUPT.format(self.index))
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise _lost_because(error) from error
        except (ProcessLost, GeneratorExit):
            raise
        except BaseException as error:
            if is_running:
                _lost.set()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(
                    f"{self._name}/failed/{self.index}", f"{type(error).__name__}: {error}"
                )
            raise
        finally:
            done.set()
            # JAX may abort before Python has shown the error of a lost process.
            if not _lost.is_set():
                _guard.withdraw(sentence)

    def _watch(self, done: threading.Event) -> None:
        """Ends this process if another one is silent, since a reduction may wait for it forever."""
        others = [each for each in range(self.count) if each != self.index]
        while not done.wait(_POLL):
            for each in others:
                if self._signs.overdue(each) > _GRACE and not done.is_set():
                    _guard.dismiss()
                    print(f"ProcessLost: {self._signs.missing(each)}", file=sys.stderr, flush=True)
                    os._exit(1)

    def compare(self, described: Mapping[str, str]) -> None:
        """Raises on every process if processes are about to run different things.

        Args:
            described: what must be the same everywhere, by name.
        """
        every = self.gather(dict(described))
        names = dict.fromkeys(name for each in every for name in each)
        different = []
        for name in names:
            values = [each.get(name, "nothing") for each in every]
            if len(set(values)) > 1:
                is_long = max(map(len, values)) > 100 or _is_digest(values[0])
                shown = ", ".join(f"{value} in process {n}" for n, value in enumerate(values[:4]))
                different.append(name if is_long else f"{name} ({shown})")
        if different:
            raise ValueError(
                "all processes of a run must be given the same, except for their own private "
                f"records, got differences in: {'; '.join(different)}. Start the same program with "
                "the same arguments everywhere; nothing was charged."
            )


_ADVICE = (
    "The steps that were begun are charged. Start all processes again, with a checkpoint to go on "
    "from where it stands."
)
_ABRUPT = (
    "ProcessLost: process {} was killed or crashed, or JAX ended it because another one was lost "
    f"(see above). {_ADVICE}"
)


class _Guard:
    """A shell that says a sentence on standard error if this process ends without warning.

    JAX ends a process by an abort when its coordinator is gone, and neither Python's `finally` nor
    `atexit` sees that. The shell reads lines from a pipe until it is closed, as the kernel does for
    a process that has ended, and then says the last of them.
    """

    _SCRIPT = (
        'while IFS= read -r line; do said=$line; done; [ -z "$said" ] || printf "%s\\n" "$said" >&2'
    )

    def __init__(self):
        self._lock = threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = None
        self._sentences: list[str] = []

    def take(self, sentence: str) -> None:
        """Has a sentence said if this process ends without warning from now on."""
        self._tell(self._sentences.append, sentence)

    def withdraw(self, sentence: str) -> None:
        """Undoes one `take`."""
        self._tell(self._sentences.remove, sentence)

    def dismiss(self) -> None:
        """Lets the shell go without a word."""
        with (
            self._lock,
            contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired),
        ):
            if self._shell is not None and self._shell.stdin is not None:
                self._shell.stdin.write(b"\n")
                self._shell.stdin.close()
                self._shell.wait(1.0)

    def _tell(self, change: Callable[[str], None], sentence: str) -> None:
        # Without a shell, what JAX says has to do.
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._shell is None:
                # In a session of its own, since Ctrl-C is for this process.
                self._shell = subprocess.Popen(
                    ["sh", "-c", self._SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                )
            change(sentence)
            assert self._shell.stdin is not None
            said = self._sentences[-1] if self._sentences else ""
            self._shell.stdin.write(f"{said}\n".encode())


_guard = _Guard()


def _lost_because(error: Exception) -> ProcessLost:
    _lost.set()
    text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return ProcessLost(f"the processes of the run lost each other ({text}). {_ADVICE}")


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise _lost_because(error) from error


@atexit.register
def _end_if_lost() -> None:
    """Ends this process if others are gone, since JAX would wait minutes for them to say goodbye.

    What was registered with `atexit` after this module was imported has run by now.
    """
    if _lost.is_set():
        if jax.process_index() == 0:
            # The coordinator ends with this process; the others shall hear the reason before.
            time.sleep(3 * _POLL)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        _guard.dismiss()
        os._exit(1)
    for signs in _started:
        signs.end()
    _guard.dismiss()


def _client() -> Any:
    # JAX has no public name for the store of its coordinator; Orbax uses this one too.
    from jax._src import distributed

    return distributed.global_state.client


def _found(client: Any, place: str) -> str | None:
    try:
        return client.key_value_try_get(place)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise _lost_because(error) from error


class _Signs:
    """Signs of life: a thread gives those of this process, and notes those of the others."""

    _FOLDER = "mirrordp/alive/"

    def __init__(self, client: Any, index: int):
        self._began = time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(client, index), name="mirrordp signs of life", daemon=True
        )
        self._thread.start()

    def _run(self, client: Any, index: int) -> None:
        for number in itertools.count():
            if self._ended.is_set():
                return
            try:
                client.key_value_set(f"{self._FOLDER}{index}", str(number), allow_overwrite=True)
                found = client.key_value_dir_get(self._FOLDER)
            except jax.errors.JaxRuntimeError:
                return  # Nothing is heard any more, and process 0 is found silent.
            for place, sign in found:
                each = int(place.rpartition("/")[2])
                if sign != self._heard.get(each, (None, 0.0))[0]:
                    self._heard[each] = (sign, time.monotonic())
            self._ended.wait(_SIGN_EVERY)

    def end(self) -> None:
        """Ends the thread; JAX's store crashes if it is asked while JAX shuts down."""
        self._ended.set()
        self._thread.join(_SIGN_EVERY)

    def overdue(self, index: int) -> float:
        """Returns how many seconds ago a sign of a process should have come; negative: not yet."""
        limit = _SILENCE if index in self._heard else _ARRIVAL
        return self._silence(index) - limit

    def _silence(self, index: int) -> float:
        return time.monotonic() - self._heard.get(index, ("", self._began))[1]

    def missing(self, index: int) -> str:
        """Returns what there is to say of a process that is silent."""
        return (
            f"process {index} has given no sign of life for {self._silence(index):.0f} seconds. "
            f"{_ADVICE}"
        )


_started: list[_Signs] = []


@functools.cache
def _signs(client: Any, index: int) -> _Signs:
    _started.append(_Signs(client, index))
    return _started[-1]


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def source_digest() -> str:
    """Returns a hash of the source of this package."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


# Arrays.


def described_split(tree: PyTree) -> str:
    """Returns in words which arrays are split over processes, and how: what `on_host` gathers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return str(
        {jax.tree_util.keystr(path): str(leaf.sharding) for path, leaf in leaves if _is_split(leaf)}
    )


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    )


def on_host(tree: PyTree) -> PyTree:
    """Returns a tree of arrays that lie on devices of several processes as arrays of this process.

    All processes call it together, since what is sharded is gathered.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = gathered(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
        if _is_split(leaf):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(gathered, tree)


def from_first(tree: PyTree) -> PyTree:
    """Returns process 0's arrays, given arrays of the same shapes; of this process, on the host."""

    def received(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = received(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        # As bytes: JAX broadcasts by a sum, which would lose the sign of a zero.
        data = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        data = np.asarray(multihost_utils.broadcast_one_to_all(data))
        return data.view(host.dtype).reshape(host.shape)

    return jax.tree.map(received, tree)
