"""The books of a run: what it owes besides its mathematics, and in which order.

    randomness on disk,  then for each block of steps:  charge, compute, checkpoint, yield

so that nothing can be seen that was not charged, and nothing that was seen is drawn anew. `train`
and `federated_train` keep theirs with a checkpoint or without, the runs of a sweep without.
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mirrordp import _validate
from mirrordp.data import PrivateClients, PrivateData
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.secure import SecureRandom
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Block, FileLedger, Ledger, ledger_for
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.types import PyTree

# What it is told follows from the mechanism and the clock: no row has a part in it.
_log = logging.getLogger("mirrordp")


class Kept(NamedTuple):
    """Where a resumed run stands.

    Attributes:
        step: steps that are done.
        charged_steps: how many of them read private data.
        shown: the arrays of the last info, by name.
    """

    step: int
    charged_steps: int
    shown: Mapping[str, np.ndarray]


class Books:
    """Charges the blocks of one run before they run, and keeps its checkpoints.

    Args:
        mechanism: what the steps cost.
        ledger: where they are charged,
        budget: unless there is a budget.
        run: the open run folder, or None for a run without checkpoints.
        every: a checkpoint is written after every so many blocks.
        first: charged steps of the same mechanism that lie before this run.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        ledger: Ledger,
        budget: Budget | None = None,
        run: checkpoints.RunFolder | None = None,
        every: int = 1,
        first: int = 0,
    ):
        self._mechanism, self._run, self._every, self._first = mechanism, run, every, first
        self._charged_to = ledger if budget is None else budget
        self._budget = budget
        self.seed: int | None = None
        """The caller's, from `verified` on."""
        self._name = secrets.token_hex(8) if run is None else run.id
        # Where the generator stands after so many draws: blocks are drawn ahead of time.
        self._drawn: dict[int, str] = {}

    @classmethod
    def open(
        cls,
        mechanism: Mechanism,
        private: PrivateData | PrivateClients,
        *,
        num_steps: int,
        ledger: Ledger | None,
        budget: Budget | None,
        checkpoint: Checkpoint | None,
        first: int = 0,
    ) -> "Books":
        """Opens the run folder, if any, and asks the budget for all of the run; reads no row first.

        Args:
            mechanism: what will run.
            private: on what; compared with the budget's data.
            num_steps: how many steps read private data.
            ledger: where to charge, as `check_books` allows.
            budget: or the budget.
            checkpoint: where to keep checkpoints.
            first: charged steps that lie before this run.

        Raises:
            StorageError: if a folder cannot be used or the budget does not admit the run.
        """
        run = None
        if checkpoint is not None:
            file = ledger if isinstance(ledger, FileLedger) else None
            run = checkpoint.open(mechanism.adjacency, ledger=file, budget=budget)
        try:
            if budget is not None:
                charged = first if run is None else run.charged_steps
                budget.admit(mechanism, charged_steps=charged, num_steps=num_steps)
                budget.check_rows(private)
            return cls(
                mechanism,
                ledger=ledger_for(mechanism.adjacency, ledger) if run is None else run.ledger,
                budget=budget,
                run=run,
                every=1 if checkpoint is None else checkpoint.every,
                first=first,
            )
        except BaseException:
            if run is not None:
                run.close()
            raise

    def verified(
        self, configuration: Callable[[bytes], Mapping[str, str]], seed: int | None
    ) -> int | None:
        """The seed of all randomness: the caller's, or one that is kept with the run.

        Args:
            configuration: what must be the same to go on, given the key of fingerprints.
            seed: the caller's, or None.

        Raises:
            CheckpointError: if anything differs from the run that is to be resumed.
            BudgetError: if another run on the budget had the seed.
        """
        self.check_seed(seed)
        self.seed = seed
        return seed if self._run is None else self._run.verify(configuration(self._run.key), seed)

    def check_seed(self, seed: int | None) -> None:
        """Raises a BudgetError if another run on the budget had the seed; notes nothing."""
        if self._budget is not None:
            self._budget.check_seed(seed, self._name)

    def claim(self, seed: int | None) -> None:
        """Notes the seed with the budget, which refuses it to any other run."""
        if self._budget is not None:
            self._budget.claim_seed(seed, self._name)

    def batches(
        self, num_records: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """The mechanism's batches; notes where the generator stands after each of them."""
        batches = self._mechanism.batches(num_records, rng)
        if self._run is None:
            return batches
        self._drawn[0] = _sampling_state(rng)
        return self._noted(batches, rng)

    def _noted(
        self, batches: Iterator[np.ndarray], rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        for count, batch in enumerate(batches, 1):
            self._drawn[count] = _sampling_state(rng)
            yield batch

    def begin(self, state: PyTree, batches: Iterator[np.ndarray]) -> tuple[PyTree, Kept | None]:
        """The state to go on from, once it is on disk, and where it stands if it is a later one.

        Args:
            state: the state before the first step.
            batches: what `batches` returned; those of the steps that are done are drawn again.
        """
        if self._run is None:
            self.claim(self.seed)
            return state, None
        saved = self._run.saved
        if saved is None:
            # From here on the run has its randomness, before anything is charged.
            self._save(state, Kept(0, 0, {}))
        # Not before the run can be resumed: nobody else could have the seed any more.
        self.claim(self.seed)
        if saved is None:
            return state, None
        state, kept = restored(saved, state)
        for _ in range(kept.charged_steps):
            next(batches)
        if self._drawn[kept.charged_steps] != saved.position["sampling"]:
            raise checkpoints.CheckpointError(
                "expected the batches of the run to be drawn again as they were, got others. "
                "Resume on the machine and with the libraries it began with."
            )
        _log.info("run %s: resumed after step %d", self._name, kept.step)
        return state, kept if kept.step > 0 else None

    def charge(self, start: int, stop: int) -> None:
        """Pays for charged steps number `start` to `stop` − 1; they may run when this returns."""
        if self._run is not None:
            # Steps that were charged before a crash are replayed, not charged again.
            start = max(start, self._run.charged_steps)
        if stop > start:
            event = self._mechanism.event_between(start, stop)
            block = Block(self._name, start - self._first, stop - self._first)
            self._charged_to.charge(event, block=block)
            _log.info("run %s: charged private steps %d to %d", self._name, start + 1, stop)

    def keep(self, state: PyTree, kept: Kept, block: int, *, is_last: bool) -> None:
        """Writes a checkpoint after block number `block`, if one is due."""
        if self._run is not None and (is_last or (block + 1) % self._every == 0):
            self._save(state, kept)

    def _save(self, state: PyTree, kept: Kept) -> None:
        assert self._run is not None
        position = {
            "sampling": self._drawn[kept.charged_steps],
            "step": kept.step,
            "charged_steps": kept.charged_steps,
        }
        shown = {f"info.{name}": array for name, array in kept.shown.items()}
        self._run.save(position, checkpoints.to_arrays(state, "state") | shown)
        _log.debug("run %s: checkpoint after step %d", self._name, kept.step)

    def finish(self) -> None:
        """Removes what is secret: the run has come to its end."""
        if self._run is not None:
            self._run.finish()

    def close(self) -> None:
        """Unlocks the run folder; what is in it can be resumed."""
        if self._run is not None:
            self._run.close()


def restored(saved: checkpoints.Saved, like: PyTree) -> tuple[PyTree, Kept]:
    """State and position of a checkpoint, for a state of the structure of `like`."""
    state = checkpoints.from_arrays(like, saved.arrays, "state")
    shown = {
        name.removeprefix("info."): array
        for name, array in saved.arrays.items()
        if name.startswith("info.")
    }
    return state, Kept(saved.position["step"], saved.position["charged_steps"], shown)


def _sampling_state(rng: np.random.Generator | SecureRandom) -> str:
    """A digest of where the sampler's generator stands; a secure one stands nowhere."""
    if isinstance(rng, SecureRandom):
        return ""
    state = json.dumps(rng.bit_generator.state, sort_keys=True, default=lambda a: a.tolist())
    return hashlib.sha256(state.encode()).hexdigest()


def check_books(
    mechanism: Any, ledger: Ledger | None, budget: Budget | None, checkpoint: Checkpoint | None
) -> None:
    """Refuses what cannot go together, before anything is opened."""
    if ledger is not None:
        _validate.instance_of(Ledger, "A Budget goes into budget=.", ledger=ledger)
        if isinstance(ledger, FileLedger) and "budget" in ledger.records[0]:
            raise ValueError(
                "the ledger of a budget is charged through the budget, which refuses what does not "
                f"fit, got {str(ledger.path)!r} as ledger=. Pass the Budget as budget=."
            )
    if budget is not None:
        _validate.instance_of(Budget, "Use Budget.open(folder, data=...).", budget=budget)
        if ledger is not None:
            raise ValueError("a run is charged to a ledger or a budget, got both. Leave one out.")
    if checkpoint is not None:
        _validate.instance_of(Checkpoint, "Use Checkpoint(folder).", checkpoint=checkpoint)
        if isinstance(mechanism, Mechanism):
            require_repeatable(mechanism)
        if ledger is not None and not isinstance(ledger, FileLedger):
            raise ValueError(
                "a run with a checkpoint needs a ledger that survives a crash, got one in memory. "
                "Use FileLedger, or leave ledger out for one in the checkpoint's folder."
            )


def require_repeatable(mechanism: Mechanism) -> None:
    """Raises for a mechanism whose runs cannot be resumed."""
    if mechanism.is_secure:
        raise ValueError(
            "a run with a checkpoint repeats the steps after it, to the bit, and secure noise "
            "cannot be repeated, got both. Leave checkpoint out, or use GaussianNoise(). After "
            "a crash begin again from the last released parameters; all steps are charged."
        )
