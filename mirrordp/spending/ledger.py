"""Ledgers of what was spent: events in the order in which they were charged, in memory or on disk.

A run charges a block of steps *before* it executes them, so the ledger never says less than what
results can reveal. A ledger keeps events only; ε is computed from them on request and never stored.

`FileLedger` keeps them in a file of JSON lines that is only ever appended to. Record i is

    {"index": i, "previous": h_{i-1}, "kind": ..., ..., "hash": h_i},    h_i = SHA-256(the rest),

so that a changed, lost or swapped record breaks the chain. The number of records and the last hash
are repeated in a file beside the ledger, so that a cut tail is noticed. `charge` returns when both
files are on disk. A record beyond that number therefore belongs to a `charge` that never returned:
it counts if it is whole, and is dropped if it is torn. Any other damage is an error. None of this
stops a malicious person who can write to the folder.
"""

import datetime
import hashlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from mirrordp import _validate
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Accountant, Adjacency, DpEvent, Epsilon
from mirrordp.spending import files as _files
from mirrordp.spending.files import StorageError

FORMAT = "mirrordp ledger"
VERSION = 1
_NO_RECORD = "0" * 64


class LedgerError(StorageError):
    """A ledger file that cannot be read, written or trusted."""


class Block(NamedTuple):
    """The steps `start` to `stop` − 1 of a run, which a charge pays for.

    Only steps that read private data are numbered.
    """

    run: str
    start: int
    stop: int


class Position(NamedTuple):
    """The length of a ledger file in records, and the hash of the last record."""

    length: int
    head: str


class Covers(NamedTuple):
    """Whom a statement about ε protects: one record of this unit, and against whom."""

    unit: str
    participation_is_seen: bool

    def __str__(self) -> str:
        seen = "who see" if self.participation_is_seen else "who do not see"
        return f"one {self.unit} against those {seen} who takes part"


class Ledger:
    """An append-only list of charged events under one adjacency, of runs that cover the same.

    Threads of one process may share it. A process that was forked off may not charge it, and it
    cannot be copied or pickled: what a copy is charged would be missing here.
    """

    def __init__(self, adjacency: Adjacency):
        self._adjacency = adjacency
        self._covers: Covers | None = None
        self._users: str | None = None
        self._blocks: list[tuple[DpEvent, int]] = []
        self._process = os.getpid()
        self.mutex = threading.RLock()
        """A lock that is held from a look at what was charged to the charge that relies on it."""

    @property
    def adjacency(self) -> Adjacency:
        """The neighbours that ε refers to."""
        return self._adjacency

    def require(self, covers: Covers) -> None:
        """Raises unless the runs before cover the same; the first run decides.

        ε of a run on examples says nothing about users, nor one whose participants are secret about
        those who see them: a sum of both would be no statement at all.
        """
        with self.mutex:
            if self._covers is None:
                self._keep(covers)
        if self._covers != covers:
            raise ValueError(
                f"all runs on one ledger cover the same, got a ledger that covers {self._covers} "
                f"and a run that covers {covers}. Use another ledger."
            )

    def _keep(self, covers: Covers) -> None:
        self._covers = covers

    def require_users(self, column: str) -> None:
        """Raises unless the fits before had the users that this column names; the first decides.

        What is one user under one column may be many under another.
        """
        with self.mutex:
            if self._users is None:
                self._keep_users(column)
            if self._users != column:
                raise ValueError(
                    f"all fits on one ledger protect the same users, got a ledger of those in "
                    f"column {self._users!r} and a fit of those in {column!r}. Use another ledger; "
                    "what two of them promise adds up."
                )

    def _keep_users(self, column: str) -> None:
        self._users = column

    def charge(self, event: DpEvent, *, block: Block | None = None) -> None:
        """Appends an event; equal consecutive events are kept as one with a count.

        Args:
            event: the cost.
            block: the steps that it pays for; a ledger in memory does not keep them.
        """
        del block
        _check_counts(event)
        accounting.check_noise(event)
        event = accounting.plain_event(event)
        if isinstance(event, dp_accounting.NoOpDpEvent):
            return
        if self._process != os.getpid():
            raise LedgerError(
                "expected a charge from the process that made this ledger, got one from a process "
                "that was forked from it, whose charge would be lost. Charge one process's ledger, "
                "or a FileLedger that each process opens for its own run."
            )
        inner, count = event, 1
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            inner, count = event.event, event.count
        with self.mutex:
            if self._blocks and self._blocks[-1][0] == inner:
                count += self._blocks.pop()[1]
            self._blocks.append((inner, count))

    def __reduce__(self):
        raise TypeError(
            "a ledger in memory belongs to one process and cannot be copied: what a copy is "
            "charged would be missing in it. Run in this process (n_jobs=1), or open a Budget or "
            "FileLedger by its path in each process."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'; '.join(value for _, value in self._described())})"

    def _repr_html_(self) -> str:
        from mirrordp import _show

        return _show.table(type(self).__name__, self._described())

    def _described(self) -> list[tuple[str, str]]:
        total = sum(count for _, count in self._blocks)
        charged = f"{total} event{'s' * (total != 1)} charged" if total else "nothing charged"
        return [("adjacency", self._adjacency.value), ("charged", charged)]

    @property
    def event(self) -> DpEvent:
        """Everything charged so far, as one event."""
        with self.mutex:
            parts: list[DpEvent] = [
                dp_accounting.SelfComposedDpEvent(event, count) for event, count in self._blocks
            ]
        if not parts:
            return dp_accounting.NoOpDpEvent()
        return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)

    def epsilon(
        self,
        delta: float,
        *,
        accountant: Accountant | None = None,
        orders: Sequence[float] | None = None,
    ) -> Epsilon:
        """Returns ε of everything charged so far, and changes nothing.

        It holds for runs that were fixed beforehand. If a run is chosen after the results of
        earlier ones were seen, use `mirrordp.Budget`, which adds up at fixed Rényi orders.
        """
        return accounting.epsilon(
            self.event, delta, adjacency=self._adjacency, accountant=accountant, orders=orders
        )


def ledger_for(
    adjacency: Adjacency, ledger: Ledger | None, unit: str, *, participation_is_seen: bool = False
) -> Ledger:
    """Returns the caller's ledger, if its runs cover the same as this one, or a new one."""
    if ledger is None:
        return Ledger(adjacency)
    _validate.instance_of(Ledger, ledger=ledger)
    if ledger.adjacency is not adjacency:
        raise ValueError(
            f"one ledger has one adjacency, got a ledger of {ledger.adjacency.value!r} and a "
            f"mechanism of {adjacency.value!r}. Use the same adjacency for all runs."
        )
    ledger.require(Covers(unit, participation_is_seen))
    return ledger


class FileLedger(Ledger):
    """A ledger in a file; make one with `create`, open it with `open` or `read`.

    It is locked for one process while it is open; use it as a context or `close` it. Threads of
    that process may share it. A process that was forked off may not use it, and it cannot be
    pickled.
    """

    def __init__(
        self,
        path: Path,
        records: list[dict[str, Any]],
        lock: _files.Lock | None,
        *,
        size: int | None = None,
    ):
        self._path = path
        self._records: list[dict[str, Any]] = []
        self._charged: dict[str, int] = {}
        self._num_charges = 0
        self._lock = lock
        found = os.stat(path)
        self._file, self._size = _files.identity(found), found.st_size if size is None else size
        try:
            super().__init__(Adjacency(records[0]["adjacency"]))
            for record in records:
                self._take(record)
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise LedgerError(
                f"expected records as mirrordp writes them in {str(path)!r}, got others ({error!r})"
                ". Restore the file from a copy."
            ) from None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        adjacency: Adjacency,
        *,
        header: Mapping[str, Any] | None = None,
        wait: float = 0.0,
    ) -> "FileLedger":
        """Creates an empty ledger.

        Args:
            path: a file that does not exist, in a folder that does.
            adjacency: the neighbours that ε will refer to.
            header: further entries of the first record, as JSON.
            wait: seconds to wait for another process.
        """
        path = _files.absolute(path)
        _validate.instance_of(Adjacency, "Use Adjacency.ZERO_OUT.", adjacency=adjacency)
        with _named_errors(path):
            lock = _files.Lock(_beside(path, ".lock"), f"the ledger {str(path)!r}", wait=wait)
        # A crash in this function may leave a head of one record without a ledger.
        if path.exists() or (_beside(path, ".head").exists() and _read_head(path).length > 1):
            lock.close()
            raise LedgerError(
                f"expected a new ledger at {str(path)!r}, got one that exists. Open it, or choose "
                "another place; what was charged stays charged."
            )
        first = _sealed(
            0,
            _NO_RECORD,
            {
                **(header or {}),
                "kind": "ledger",
                "format": FORMAT,
                "version": VERSION,
                "adjacency": adjacency.value,
                "id": secrets.token_hex(8),
                "time": _now(),
            },
        )
        with _named_errors(path):
            _files.remove_leftovers(path.parent, path.name)
            # The head is written first: without one, a new ledger would look like one that was cut.
            _write_head(path, Position(1, first["hash"]))
            _files.write_atomically(path, _line(first), mode=_files.PRIVATE_FILE)
        return cls(path, [first], lock)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, wait: float = 0.0) -> "FileLedger":
        """Opens an existing ledger in order to charge it.

        Args:
            path: the file.
            wait: seconds to wait for another process that has it open.

        Raises:
            LedgerError: if it does not exist, or was changed or cut.
            LockedError: if another process has it open.
        """
        path = _files.absolute(path)
        if not path.is_file():
            raise LedgerError(
                f"expected a ledger at {str(path)!r}, got no such file. Check the path, or restore "
                "it from a copy."
            )
        with _named_errors(path):
            lock = _files.Lock(_beside(path, ".lock"), f"the ledger {str(path)!r}", wait=wait)
        try:
            with _named_errors(path):
                _files.remove_leftovers(path.parent, path.name)
                records, intact, size = _read(path)
                if path.stat().st_size != size:
                    # Without locks that work: what was appended since is no torn record.
                    raise LedgerError(
                        f"expected {str(path)!r} to stay as it is while it is opened, got another "
                        "process that writes to it. Use a file system with locks."
                    )
                if intact < size:
                    os.truncate(path, intact)
                position = Position(len(records), records[-1]["hash"])
                if position != _read_head(path):
                    _write_head(path, position)
        except BaseException:
            lock.close()
            raise
        return cls(path, records, lock, size=intact)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "FileLedger":
        """Returns a view of a ledger as it is now. It takes no lock and cannot be charged."""
        path = _files.absolute(path)
        if not path.is_file():
            raise LedgerError(
                f"expected a ledger at {str(path)!r}, got no such file. Check the path."
            )
        for attempt in range(5):
            try:
                with _named_errors(path):
                    return cls(path, _read(path)[0], None)
            except LedgerError:
                # Another process may have appended after we read the head and before the ledger.
                if attempt == 4:
                    raise
                time.sleep(0.05)
        raise AssertionError("unreachable")

    def _described(self) -> list[tuple[str, str]]:
        return [("file", repr(str(self._path))), *super()._described()]

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    @property
    def position(self) -> Position:
        """The number of records and the hash of the last."""
        return Position(len(self._records), self._records[-1]["hash"])

    @property
    def records(self) -> tuple[Mapping[str, Any], ...]:
        """All records; the first one describes the ledger."""
        return tuple(self._records)

    @property
    def num_charges(self) -> int:
        """The number of records of a charge."""
        return self._num_charges

    def charged_steps(self, run: str) -> int:
        """Returns how many steps of a run have been paid for."""
        return self._charged.get(run, 0)

    def charge(
        self,
        event: DpEvent,
        *,
        block: Block | None = None,
        further: Mapping[str, Any] | None = None,
    ) -> None:
        """Appends an event, and returns when it is on disk. Only then may its result be computed.

        Args:
            event: the cost.
            block: the steps that it pays for; they must follow those paid for before.
            further: other entries of the record, as JSON, which are on disk if the charge is.

        Raises:
            LedgerError: if it cannot be written. Then nothing may run.
        """
        if isinstance(event, dp_accounting.NoOpDpEvent) and block is None and not further:
            return
        content: dict[str, Any] = {**(further or {}), "event": event_to_dict(event)}
        # What could not be read again would close the ledger for ever.
        event_from_dict(content["event"])
        with self.mutex:
            if block is not None:
                charged = self.charged_steps(block.run)
                if block.start != charged or block.stop <= block.start:
                    raise ValueError(
                        f"expected a block that begins at step {charged} of run {block.run}, got "
                        f"steps {block.start} to {block.stop}. Charge in order."
                    )
                content |= block._asdict()
            self.append("charge", content)

    def append(self, kind: str, content: Mapping[str, Any]) -> None:
        """Appends a record of another kind, which is durable when the function returns."""
        with self.mutex:
            if self._lock is None:
                raise LedgerError(
                    f"expected a ledger that is open for charges, got a view of "
                    f"{str(self._path)!r} or a closed one. Use FileLedger.open."
                )
            if not self._lock.is_ours:
                # This process does not know what the other one has charged since.
                raise LedgerError(
                    f"expected the process that opened the ledger {str(self._path)!r}, got one "
                    "that was forked from it. Open the ledger in the process that charges it, and "
                    "in one process at a time."
                )
            length, head = self.position
            record = _sealed(length, head, {**content, "kind": kind, "time": _now()})
            try:
                with _named_errors(self._path):
                    if _read_head(self._path) != self.position:
                        # A file system may give another file the number of one that was removed.
                        raise LedgerError(
                            f"expected the ledger {str(self._path)!r} as this process left it, got "
                            "another head beside it. Nothing runs; find out who writes to it, and "
                            "open it again."
                        )
                    self._write(_line(record))
                    _write_head(self._path, Position(length + 1, record["hash"]))
            except BaseException:
                # The next `open` finds out what the file holds now.
                self.close()
                raise
            self._take(record)

    def _write(self, line: bytes) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            found = os.fstat(handle)
            if _files.identity(found) != self._file:
                # A charge in another file would leave this ledger as if nothing had been spent.
                raise LedgerError(
                    f"expected the file that was opened at {str(self._path)!r}, got another one in "
                    "its place. Nothing runs; find out who moved it, and open the ledger again."
                )
            before = found.st_size
            if before != self._size:
                # Without locks that work, two processes would each spend all that is left.
                raise LedgerError(
                    f"expected the ledger {str(self._path)!r} as this process left it, with "
                    f"{self._size} bytes, got {before}: another process writes to it, or it was "
                    "cut. Nothing runs; use a file system with locks, and leave the lock file "
                    "alone."
                )
            try:
                _files.write_all(handle, line)
                os.fsync(handle)
            except OSError:
                # Half a line is not a record. If this fails as well, `open` drops it.
                os.ftruncate(handle, before)
                raise
            self._size = before + len(line)
        finally:
            os.close(handle)

    def _take(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        if record["kind"] == "covers":
            self._covers = Covers(str(record["unit"]), bool(record["participation_is_seen"]))
        if record["kind"] == "users":
            self._users = str(record["column"])
        if record["kind"] != "charge":
            return
        super().charge(event_from_dict(record["event"]))
        self._num_charges += 1
        if "run" in record:
            self._charged[str(record["run"])] = int(record["stop"])

    def _keep(self, covers: Covers) -> None:
        self.append("covers", covers._asdict())

    def _keep_users(self, column: str) -> None:
        self.append("users", {"column": column})

    def close(self) -> None:
        """Unlocks the ledger."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __reduce__(self):
        raise TypeError(
            f"the ledger {str(self._path)!r} belongs to one process and cannot be copied. Open it "
            "by its path where it is used."
        )

    def __enter__(self) -> "FileLedger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_position(ledger: FileLedger, position: Position, where: str) -> None:
    """Raises a `LedgerError` unless the ledger still holds what it held at `position`."""
    records = ledger.records
    if len(records) < position.length:
        raise LedgerError(
            f"expected a ledger of at least {position.length} records, as {where} says, got "
            f"{len(records)} in {str(ledger.path)!r}. Its tail was cut or an old copy restored; "
            "restore the newest copy."
        )
    if records[position.length - 1]["hash"] != position.head:
        raise LedgerError(
            f"expected record {position.length - 1} to have the hash that {where} states, got "
            f"another one in {str(ledger.path)!r}. It is another ledger, or was rewritten; restore "
            "the newest copy."
        )


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _now() -> str:
    # The day alone: seconds between charges would tell how many runs a paid search had.
    return datetime.datetime.now(datetime.UTC).date().isoformat()


class _named_errors:
    """A context that turns an `OSError` into a `LedgerError` that says what to do."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):
            raise LedgerError(
                f"expected a ledger file that can be read and written at {str(self._path)!r}, got "
                f"{error.strerror or error}. Make room or give access, then try again; nothing ran."
            ) from error


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    ).encode()


def _sealed(index: int, previous: str, content: Mapping[str, Any]) -> dict[str, Any]:
    record = {**content, "index": index, "previous": previous}
    return record | {"hash": hashlib.sha256(_canonical(record)).hexdigest()}


def _line(record: Mapping[str, Any]) -> bytes:
    return _canonical(record) + b"\n"


def _write_head(path: Path, position: Position) -> None:
    content = {"length": position.length, "head": position.head}
    check = hashlib.sha256(_canonical(content)).hexdigest()
    _files.write_atomically(
        _beside(path, ".head"), _line(content | {"sha256": check}), mode=_files.PRIVATE_FILE
    )


def _read_head(path: Path) -> Position:
    file = _beside(path, ".head")
    try:
        content = json.loads(file.read_bytes())
        check = content.pop("sha256")
        if check != hashlib.sha256(_canonical(content)).hexdigest():
            raise ValueError
        return Position(int(content["length"]), str(content["head"]))
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
        raise LedgerError(
            f"expected {str(file)!r} to repeat the length and head of the ledger, got a damaged or "
            "missing file. Without it nobody could notice a cut tail; restore it from a copy."
        ) from None


def _read(path: Path) -> tuple[list[dict[str, Any]], int, int]:
    """Returns the records, their size in bytes, and that of the file.

    Any bytes beyond the records belong to a torn one.
    """
    position = _read_head(path)
    content = path.read_bytes()
    records: list[dict[str, Any]] = []
    intact, previous = 0, _NO_RECORD
    while intact < len(content):
        end = content.find(b"\n", intact)
        record = None if end < 0 else _opened(content[intact:end], len(records), previous)
        if record is None:
            break
        records.append(record)
        intact, previous = end + 1, record["hash"]
    if len(records) < position.length:
        raise LedgerError(
            f"expected {position.length} intact records in the ledger {str(path)!r}, got "
            f"{len(records)}; record {len(records)} is "
            f"{'missing: the tail was cut' if intact == len(content) else 'damaged or was changed'}"
            ". Restore the file from a copy."
        )
    if records[position.length - 1]["hash"] != position.head or len(records) > position.length + 1:
        raise LedgerError(
            f"expected the ledger {str(path)!r} and the head beside it to agree, got another "
            "history. One of the two was replaced; restore both from a copy."
        )
    if b"\n" in content[intact:-1]:
        raise LedgerError(
            f"expected at most one torn record at the end of the ledger {str(path)!r}, got more. "
            "Restore it from a copy."
        )
    return records, intact, len(content)


def _opened(line: bytes, index: int, previous: str) -> dict[str, Any] | None:
    """Returns the record in a line, or None if it is not the next of this chain."""
    try:
        record = json.loads(line)
        found = dict(record)
        if _sealed(index, previous, {k: v for k, v in found.items() if k != "hash"}) != found:
            return None
        if _line(found)[:-1] != line:
            return None
    except (ValueError, TypeError, RecursionError):
        return None
    if index == 0:
        kind, version = found.get("format"), found.get("version")
        if kind != FORMAT or version != VERSION:
            raise LedgerError(
                f"expected a {FORMAT} of version {VERSION}, got {kind!r} of version {version!r}. "
                "Use the mirrordp that wrote it."
            )
    return found


# Events by explicit names. mirrordp makes no others, and a ledger file cannot hold others.


def _check_counts(event: DpEvent) -> None:
    """Raises unless all counts are whole numbers, since 1.9 would be stored as 1."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            _check_counts(part)
    if isinstance(event, RepeatAndSelectDpEvent):
        _check_counts(event.event)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        for size in (event.source_dataset_size, event.sample_size):
            if not isinstance(size, int | np.integer):
                raise LedgerError(
                    f"expected an event of batches with a whole number of records, got {size!r}. "
                    "Charge the batches that were drawn."
                )
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        if not isinstance(event.count, int | np.integer) or event.count < 1:
            raise LedgerError(
                f"expected an event that is repeated a whole number of times, at least once, got "
                f"{event.count!r} times. Charge the steps that ran."
            )
        _check_counts(event.event)


def event_to_dict(event: DpEvent) -> dict[str, Any]:
    """Returns an event as JSON that holds only numbers and names.

    Raises:
        LedgerError: for an event that mirrordp does not make.
    """
    _check_counts(event)
    accounting.check_noise(event)
    match event:
        case dp_accounting.NoOpDpEvent():
            return {"name": "nothing"}
        case dp_accounting.GaussianDpEvent():
            return {"name": "gaussian", "noise_multiplier": float(event.noise_multiplier)}
        case dp_accounting.PoissonSampledDpEvent():
            return {
                "name": "poisson-sampled",
                "sampling_prob": float(event.sampling_probability),
                "event": event_to_dict(event.event),
            }
        case dp_accounting.SampledWithoutReplacementDpEvent():
            return {
                "name": "sampled-without-replacement",
                "num_examples": int(event.source_dataset_size),
                "batch_size": int(event.sample_size),
                "event": event_to_dict(event.event),
            }
        case dp_accounting.SelfComposedDpEvent():
            return {
                "name": "repeated",
                "count": int(event.count),
                "event": event_to_dict(event.event),
            }
        case dp_accounting.ComposedDpEvent():
            return {"name": "composed", "events": [event_to_dict(part) for part in event.events]}
        case RepeatAndSelectDpEvent():
            # JSON has no infinity, which stands for the Poisson distribution.
            shape = None if event.shape == math.inf else float(event.shape)
            return {
                "name": "best-of-random-number",
                "mean": float(event.mean),
                "shape": shape,
                "event": event_to_dict(event.event),
            }
        case _:
            raise LedgerError(
                f"expected an event made by mirrordp, got {type(event).__name__}, which a ledger "
                "file cannot hold. Use the events of mirrordp.privacy.accounting."
            )


def event_from_dict(content: Any) -> DpEvent:
    """Returns the event that `event_to_dict` stored.

    Raises:
        LedgerError: for a name or a value that it does not write.
    """
    refused = LedgerError(
        f"expected an event that mirrordp writes, got {content!r:.200}. The ledger was written by "
        "something else; restore it from a copy."
    )
    if not isinstance(content, dict):
        raise refused
    match content:
        case {"name": "nothing", **rest}:
            event: DpEvent = dp_accounting.NoOpDpEvent()
        case {"name": "gaussian", "noise_multiplier": float(sigma), **rest}:
            if not (math.isfinite(sigma) and sigma >= 0):
                raise refused
            event = dp_accounting.GaussianDpEvent(sigma)
        case {"name": "poisson-sampled", "sampling_prob": float(q), "event": inner, **rest}:
            if not 0 < q <= 1:
                raise refused
            event = dp_accounting.PoissonSampledDpEvent(q, event_from_dict(inner))
        case {
            "name": "sampled-without-replacement",
            "num_examples": int(n),
            "batch_size": int(size),
            "event": inner,
            **rest,
        }:
            if not 1 <= size <= n:
                raise refused
            event = dp_accounting.SampledWithoutReplacementDpEvent(n, size, event_from_dict(inner))
        case {"name": "repeated", "count": int(count), "event": inner, **rest}:
            if count < 1 or isinstance(count, bool):
                raise refused
            event = dp_accounting.SelfComposedDpEvent(event_from_dict(inner), count)
        case {"name": "composed", "events": list(parts), **rest}:
            event = dp_accounting.ComposedDpEvent([event_from_dict(part) for part in parts])
        case {
            "name": "best-of-random-number",
            "mean": float(mean),
            "shape": (float() | None) as shape,
            "event": inner,
            **rest,
        }:
            shape = math.inf if shape is None else shape
            if not (1 <= mean < math.inf and shape >= 0):
                raise refused
            event = RepeatAndSelectDpEvent(event_from_dict(inner), mean, shape)
        case _:
            raise refused
    if set(rest) - {"name"}:
        raise refused
    return event
