"""The bookkeeping of a run: charges and checkpoints, in one order.

    write the randomness to disk,  then for each block of steps:  charge, compute, keep, yield

So nothing is seen before it is charged, and nothing that was seen is drawn again with other
randomness. `train`, sweeps, the estimators and Flower all keep their books here, with or without a
checkpoint.
"""

import contextvars
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import jax
import numpy as np

from mirrordp import _validate
from mirrordp.data import PrivateClients, PrivateData
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.secure import SecureRandom
from mirrordp.spending.budget import Budget, identify
from mirrordp.spending.ledger import Block, FileLedger, Ledger, ledger_for
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.checkpoint import Checkpoint, RunFolder
from mirrordp.training.processes import Group, from_first, on_host, source_digest
from mirrordp.training.shown import digest
from mirrordp.types import PyTree

# The log depends on the mechanism and the clock, and on no private record.
_log = logging.getLogger("mirrordp")

is_silent = contextvars.ContextVar("is_silent", default=False)
"""Set by a search, whose number of runs is secret and which has charged them as a whole."""


class Kept(NamedTuple):
    """Where the runs stand after a block of steps.

    Attributes:
        step: the number of steps that are done.
        charged_steps: for each run, how many of them read private data.
        shown: the arrays of the infos by name, with an axis for runs first.
    """

    step: int
    charged_steps: tuple[int, ...]
    shown: Mapping[str, np.ndarray]


class Books:
    """Charges each block of a run, or of the runs of a sweep, before it runs; keeps checkpoints.

    Args:
        mechanism: decides what a step costs.
        spend: the ledger or budget that is charged.
        seeds: the caller's seed of each run, or None where there is none.
        folder: the open run folder, or None for runs without checkpoints.
        every: the number of blocks from one checkpoint to the next.
        first: the number of charged steps that the mechanism took before this run.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        spend: Ledger | Budget,
        *,
        seeds: Sequence[int | None] = (None,),
        folder: RunFolder | None = None,
        every: int = 1,
        first: int = 0,
    ):
        self._mechanism, self._spend, self._folder = mechanism, spend, folder
        self._every, self._first = every, first
        self._budget = spend if isinstance(spend, Budget) else None
        self.seeds = tuple(seeds)
        self._parts: Sequence[str] = ()
        name = secrets.token_hex(8) if folder is None else folder.id
        self._names = run_names(name, len(self.seeds))
        # Where the generators stand after each number of draws: blocks are drawn ahead of time.
        self._drawn: list[dict[int, str]] = [{} for _ in self.seeds]

    @classmethod
    def open(
        cls,
        mechanism: Mechanism,
        private: PrivateData | PrivateClients | None,
        *,
        num_steps: Sequence[int],
        seeds: Sequence[int | None],
        spend: Ledger | Budget | None,
        checkpoint: Checkpoint | None,
        first: int = 0,
    ) -> "Books":
        """Opens the run folder, if any, and asks the budget to admit everything; reads no record.

        Args:
            mechanism: decides what a step costs.
            private: the data, to be compared with the budget's; None if the caller compares it.
            num_steps: the number of steps of each run that read private data.
            seeds: the caller's seed of each run, or None.
            spend: what to charge; see `check_spend`.
            checkpoint: where to keep checkpoints.
            first: the number of charged steps that the mechanism took before this run.

        Raises:
            StorageError: if a folder cannot be used or the budget does not admit the run.
        """
        ledger = spend if isinstance(spend, Ledger) else None
        ledger_for(mechanism.adjacency, ledger, mechanism.unit)
        folder = None if checkpoint is None else checkpoint.open(mechanism.adjacency, spend)
        try:
            if spend is None:
                spend = Ledger(mechanism.adjacency) if folder is None else folder.ledger
            every = 1 if checkpoint is None else checkpoint.every
            books = cls(mechanism, spend, seeds=seeds, folder=folder, every=every, first=first)
            books.admit(num_steps, private)
            return books
        except BaseException:
            if folder is not None:
                folder.close()
            raise

    @property
    def key(self) -> bytes | None:
        """The key of the fingerprints of a run with checkpoints."""
        return None if self._folder is None else self._folder.key

    def admit(
        self, num_steps: Sequence[int], private: PrivateData | PrivateClients | None = None
    ) -> None:
        """Raises a BudgetError unless all uncharged steps fit and no other run has the seeds.

        Args:
            num_steps: the number of steps of each run that read private data.
            private: the data, to be compared with the budget's; None if the caller compares it.
        """
        budget = self._budget
        if budget is None:
            return
        # Earlier steps of the mechanism are not part of what is charged here; see `charge`.
        left = [max(0, count - self._first) for count in num_steps]
        # A request for fewer steps than were charged is refused later, as another run.
        charged = [
            min(count, self._charged_steps(name))
            for name, count in zip(self._names, left, strict=True)
        ]
        if len(left) == 1:
            budget.admit(self._mechanism, charged_steps=charged[0], num_steps=left[0])
        elif not any(charged):
            budget.admit_all(self._mechanism, left)
        else:
            budget.check_kind(self._mechanism)
            rest = map(self._mechanism.event_between, charged, left)
            budget.admit_event(dp_accounting.ComposedDpEvent(list(rest)))
        if private is not None:
            budget.check_rows(private)
        for seed, name in zip(self.seeds, self._names, strict=True):
            budget.check_seed(seed, name)

    @property
    def budget_key(self) -> bytes | None:
        """The key of the budget's fingerprints, or None without a budget."""
        return None if self._budget is None else self._budget.key

    def compare_parts(self, parts: Sequence[str]) -> None:
        """Compares the records of other processes with those of earlier runs on the budget.

        `claim` notes them with the budget.

        Args:
            parts: the fingerprints of the records of processes 1, 2, ..., under `budget_key`.
        """
        assert self._budget is not None
        self._budget.check_parts(parts)
        self._parts = parts

    def _charged_steps(self, name: str) -> int:
        return 0 if self._folder is None else self._folder.ledger.charged_steps(name)

    def verified(self, configuration: Callable[[bytes], Mapping[str, str]]) -> list[int | None]:
        """Returns the seed of each run's randomness: the caller's, or one kept with the run.

        Args:
            configuration: given the key of the fingerprints, returns what must be unchanged.

        Raises:
            CheckpointError: if anything differs from the run that is to be resumed.
        """
        if self._folder is None:
            return list(self.seeds)
        return list(self._folder.verify(configuration(self._folder.key), self.seeds))

    def claim(self) -> None:
        """Notes the seeds with the budget, which refuses them to any other run."""
        if self._budget is not None:
            if self._parts:
                self._budget.claim_parts(self._parts)
            for seed, name in zip(self.seeds, self._names, strict=True):
                self._budget.claim_seed(seed, name)

    def batches(
        self, num_records: int, generators: Sequence[np.random.Generator | SecureRandom]
    ) -> list[Iterator[np.ndarray]]:
        """Returns each run's batches; notes where its generator stands after each of them."""
        batches = [self._mechanism.batches(num_records, rng) for rng in generators]
        if self._folder is None:
            return batches
        return [self._noted(*each) for each in zip(batches, generators, self._drawn, strict=True)]

    def _noted(
        self,
        batches: Iterator[np.ndarray],
        rng: np.random.Generator | SecureRandom,
        drawn: dict[int, str],
    ) -> Iterator[np.ndarray]:
        drawn[0] = _sampling_state(rng)

        def noting() -> Iterator[np.ndarray]:
            for count, batch in enumerate(batches, 1):
                drawn[count] = _sampling_state(rng)
                yield batch

        return noting()

    def begin(
        self, state: PyTree, batches: Sequence[Iterator[np.ndarray]] = ()
    ) -> tuple[PyTree, Kept | None]:
        """Returns the state to start from, once it is on disk, and where a resumed run stands.

        Args:
            state: the state before the first step.
            batches: the iterators of `batches`, which are advanced past the steps that are done.
        """
        saved = None if self._folder is None else self._folder.saved
        if self._folder is not None and saved is None:
            # The run's randomness is on disk before anything is charged.
            self._save(state, Kept(0, (0,) * len(self.seeds), {}))
        # Only now that the run can be resumed: a claimed seed is refused to every other run.
        self.claim()
        if saved is None:
            return state, None
        state, kept = restored(saved, state)
        for draws, count in zip(batches, kept.charged_steps, strict=bool(batches)):
            for _ in range(count):
                next(draws)
        if batches and self._sampling(kept) != saved.position["sampling"]:
            raise checkpoints.CheckpointError(
                "expected the batches of the run to be drawn again as they were, got others. "
                "Resume on the machine and with the libraries it began with."
            )
        _log.info("run %s: resumed after step %d", self._names[0], kept.step)
        if kept.step == 0:
            return state, None
        # It is about to be shown once more, or for the first time.
        self.show(kept.step, digest((state, kept.shown)))
        return state, kept

    def show(self, step: int, found: str) -> None:
        """Compares what follows from a step with what was shown before, and notes it, by digest."""
        if self._folder is not None:
            self._folder.compare_shown(step, found)
            self._folder.note_shown(step, found)

    def charge(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Charges the private steps of each run from number `before` to `after` − 1.

        The steps may run once this returns. Steps that were charged before a crash are not charged
        again.
        """
        for name, *steps in zip(self._names, before, after, strict=True):
            # Counted from where this run begins. Who pays for the steps before it may be another
            # ledger, and a round of cyclic sampling that began there has not been paid for here.
            start, stop = (int(step) - self._first for step in steps)
            start = max(start, self._charged_steps(name))
            if stop > start:
                event = self._mechanism.event_between(start, stop)
                self._spend.charge(event, block=Block(name, start, stop))
                if not is_silent.get():
                    first, last = (step + self._first for step in (start + 1, stop))
                    _log.info("run %s: charged private steps %d to %d", name, first, last)

    def keep(self, state: PyTree, kept: Kept, block: int, *, is_last: bool) -> None:
        """Writes a checkpoint after block number `block` if one is due.

        Raises:
            CheckpointError: if this state was shown before a crash, and was another one.
        """
        if self._folder is None:
            return
        self.keep_digested(digest((state, kept.shown)), state, kept, block, is_last=is_last)

    def keep_digested(
        self, shown: str, state: PyTree, kept: Kept, block: int, *, is_last: bool
    ) -> None:
        """Does what `keep` does, with the digest of the state and of what is shown beside it."""
        assert self._folder is not None
        self._folder.compare_shown(kept.step, shown)
        if is_last or (block + 1) % self._every == 0:
            self._save(state, kept)
        # After the checkpoint: until this returns nobody has seen the state, and a device that
        # rounds anew may compute it again.
        self._folder.note_shown(kept.step, shown)

    def _save(self, state: PyTree, kept: Kept) -> None:
        assert self._folder is not None
        position = {
            "sampling": self._sampling(kept),
            "step": kept.step,
            "charged_steps": list(kept.charged_steps),
        }
        shown = {f"info.{name}": array for name, array in kept.shown.items()}
        self._folder.save(position, checkpoints.to_arrays(state, "state") | shown)
        _log.debug("run %s: checkpoint after step %d", self._names[0], kept.step)

    def _sampling(self, kept: Kept) -> list[str]:
        """Returns the states of the generators, empty for those that draw no batches."""
        return [
            drawn.get(count, "")
            for drawn, count in zip(self._drawn, kept.charged_steps, strict=True)
        ]

    def finish(self) -> None:
        """Removes the secrets of a run that has ended."""
        if self._folder is not None:
            self._folder.finish()

    def close(self) -> None:
        """Unlocks the run folder; an unfinished run can be resumed."""
        if self._folder is not None:
            self._folder.close()


class SharedBooks:
    """The books of a run of several processes: process 0 keeps them, and the others wait for it.

    Process 0 alone charges the caller's ledger or budget and writes checkpoints. The others learn
    of each charge before they compute, and of each checkpoint before they yield; each also charges
    a ledger in memory, which so says what was spent.

    Args:
        books: the books of this process.
        group: the processes.
        checkpoint: where process 0 keeps checkpoints, or None.
    """

    def __init__(self, books: Books, group: Group, checkpoint: Checkpoint | None):
        self._own, self._group = books, group
        self._every = None if checkpoint is None else checkpoint.every
        self.seeds = books.seeds

    @classmethod
    def open(
        cls,
        group: Group,
        mechanism: Mechanism,
        private: PrivateData | PrivateClients,
        **options: Any,
    ) -> "SharedBooks":
        """Opens the books on process 0, as `Books.open` does, and a copy of them elsewhere.

        A budget compares the records of all processes; the key of its fingerprints goes to the
        others, as that of a checkpoint does.
        """
        if group.is_first:
            own = Books.open(mechanism, private, **options)
        else:
            ledger = options["spend"] or Ledger(mechanism.adjacency)
            own = Books(mechanism, ledger, seeds=options["seeds"], first=options["first"])
        try:
            key = group.from_first(own.budget_key.hex() if own.budget_key else None)
            if key is not None:
                part = (
                    "" if group.is_first else identify(bytes.fromhex(key), private)["fingerprint"]
                )
                _, *parts = group.gather(part)
                if group.is_first:
                    own.compare_parts(parts)
        except BaseException:
            own.close()
            raise
        return cls(own, group, options["checkpoint"])

    def verified(self, configuration: Callable[[bytes | None], Mapping[str, str]]) -> list[int]:
        """Returns the seeds of the runs' randomness: those of process 0.

        Before, all processes compare what they are about to run. With a checkpoint, process 0 also
        compares it, and a fingerprint of every process's records, with the run that is resumed.

        Args:
            configuration: given the key of the fingerprints, or None to leave out the private
                records, returns what decides what the run computes.

        Raises:
            ValueError: if processes differ.
            CheckpointError: if anything differs from the run that is to be resumed.
        """
        key = self._group.from_first(self._own.key.hex() if self._own.key else None)
        described = dict(configuration(None if key is None else bytes.fromhex(key)))
        records = described.pop(PRIVATE_RECORDS, None)
        # Processes may differ in their machines, each of which must stay as it is. Where CPUs round
        # differently, their copies of the parameters drift apart, and steps that are repeated begin
        # from those of process 0: other sums would follow than the first time.
        machine = described.pop(checkpoints.MACHINE)
        machines = self._group.gather(machine)
        repeats = self._every is not None and self._every > 1
        is_shared = repeats and jax.default_backend() == "cpu"
        self._group.compare(
            described
            | ({checkpoints.MACHINE: machine} if is_shared else {})
            | checkpoints.surroundings(self.seeds)
            | {"source of mirrordp": source_digest(), "checkpoint every": str(self._every)}
        )
        if records is not None:
            described |= {
                f"{PRIVATE_RECORDS} of process {number}": found
                for number, found in enumerate(self._group.gather(records))
            }
        described |= {
            f"{checkpoints.MACHINE} of process {number}": found
            for number, found in enumerate(machines)
        }
        described[checkpoints.PROCESSES] = str(self._group.count)
        entropies: list[int] = []
        if self._group.is_first:
            found = self._own.verified(lambda _: described)
            entropies = [secrets.randbits(128) if each is None else int(each) for each in found]
        return [int(each) for each in self._group.from_first([str(each) for each in entropies])]

    def batches(
        self, num_records: int, generators: Sequence[np.random.Generator | SecureRandom]
    ) -> list[Iterator[np.ndarray]]:
        """Returns each run's batches, of the records of all processes."""
        return self._own.batches(num_records, generators)

    def begin(
        self, state: PyTree, batches: Sequence[Iterator[np.ndarray]] = ()
    ) -> tuple[PyTree, Kept | None]:
        """Returns the state to start from, as process 0 has it on disk, and where it stands."""
        host, kept = on_host(state), None
        if self._group.is_first:
            host, kept = self._own.begin(host, batches)
        position = None
        if kept is not None:
            shown = {name: (str(a.dtype), a.tolist()) for name, a in kept.shown.items()}
            position = [kept.step, list(kept.charged_steps), shown]
        position = self._group.from_first(position)
        if position is None:
            return state, None
        if not self._group.is_first:
            step, charged, shown = position
            arrays = {name: np.asarray(a, dtype) for name, (dtype, a) in shown.items()}
            kept = Kept(step, tuple(charged), arrays)
            for draws, count in zip(batches, charged, strict=bool(batches)):
                for _ in range(count):
                    next(draws)
            self._own.charge([0] * len(charged), charged)
        return from_first(host), kept

    def claim(self) -> None:
        """Notes the seeds with the budget of process 0."""
        self._own.claim()

    def charge(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Charges steps; returns on no process before it is done on process 0."""
        self._agree(before, after)
        if self._group.is_first:
            self._own.charge(before, after)
        self._group.from_first("charged")
        if not self._group.is_first:
            self._own.charge(before, after)

    def _agree(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Raises before a charge if processes are about to compute different steps."""
        own = [[int(count) for count in counts] for counts in (before, after)]
        every = self._group.to_first(own)
        if any(each != own for each in every):
            raise RuntimeError(
                "all processes of a run must be about to compute the same private steps, got "
                f"{every}. Start the same program with the same arguments everywhere."
            )

    def keep(self, state: PyTree, kept: Kept, block: int, *, is_last: bool) -> None:
        """Writes a checkpoint if one is due; returns on no process before it is on disk."""
        if self._every is None:
            return
        shown = digest((state, kept.shown))
        is_due = is_last or (block + 1) % self._every == 0
        host = on_host(state) if is_due else None
        if self._group.is_first:
            self._own.keep_digested(shown, host, kept, block, is_last=is_last)
        self._group.from_first(kept.step)

    def finish(self) -> None:
        """Removes the secrets of a run once all processes have come to its end."""
        self._group.gather("done")
        self._own.finish()

    def close(self) -> None:
        """Unlocks the run folder; an unfinished run can be resumed."""
        self._own.close()


PRIVATE_RECORDS = "private data"
"""The name of what a configuration says about the private records."""


def run_names(name: str, count: int) -> list[str]:
    """Returns the names of the runs of a sweep, or of a single run, in a ledger."""
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


def restored(saved: checkpoints.Saved, like: PyTree) -> tuple[PyTree, Kept]:
    """Returns the state and position of a checkpoint, given a state of the same structure."""
    state = checkpoints.from_arrays(like, saved.arrays, "state")
    shown = {
        name.removeprefix("info."): array
        for name, array in saved.arrays.items()
        if name.startswith("info.")
    }
    return state, Kept(saved.position["step"], tuple(saved.position["charged_steps"]), shown)


def _sampling_state(rng: np.random.Generator | SecureRandom) -> str:
    """Returns a digest of the state of a sampler's generator; a secure one has none."""
    if isinstance(rng, SecureRandom):
        return ""
    state = json.dumps(rng.bit_generator.state, sort_keys=True, default=lambda a: a.tolist())
    return hashlib.sha256(state.encode()).hexdigest()


def check_spend(
    mechanism: Any, spend: Ledger | Budget | None, checkpoint: Checkpoint | None
) -> None:
    """Refuses combinations that cannot work, before anything is opened."""
    if spend is not None:
        _validate.instance_of((Ledger, Budget), "Use Budget.open(folder, data=...).", spend=spend)
    if isinstance(spend, FileLedger) and "budget" in spend.records[0]:
        raise ValueError(
            "the ledger of a budget is charged through the budget, which refuses what does not "
            f"fit, got {str(spend.path)!r} as spend=. Pass the Budget itself."
        )
    if checkpoint is not None:
        _validate.instance_of(Checkpoint, "Use Checkpoint(folder).", checkpoint=checkpoint)
        if isinstance(mechanism, Mechanism):
            require_repeatable(mechanism)
        if isinstance(spend, Ledger) and not isinstance(spend, FileLedger):
            raise ValueError(
                "a run with a checkpoint needs a ledger that survives a crash, got one in memory. "
                "Use FileLedger, or leave spend out for one in the checkpoint's folder."
            )


def check_shared(group: Group, mechanism: Mechanism, spend: Ledger | Budget | None) -> None:
    """Refuses what several processes cannot do together."""
    if mechanism.is_secure:
        raise ValueError(
            "secure noise is drawn by one process from its operating system, got a run of "
            f"{group.count} processes. Use GaussianNoise(), or one process with several devices."
        )
    if group.is_first:
        return
    if isinstance(spend, FileLedger | Budget):
        raise ValueError(
            "process 0 alone keeps the ledger of a run, got a file in process "
            f"{group.index} too. Pass spend=... if jax.process_index() == 0 else None."
        )
    ledger_for(mechanism.adjacency, spend, mechanism.unit)


def require_repeatable(mechanism: Mechanism) -> None:
    """Raises for a mechanism whose runs cannot be resumed."""
    if mechanism.is_secure:
        raise ValueError(
            "a resumed run repeats the steps after its checkpoint, and secure noise cannot be "
            "repeated, got both. Leave checkpoint out, or use GaussianNoise(). After a crash, "
            "start again from the last released parameters; all steps are charged."
        )
