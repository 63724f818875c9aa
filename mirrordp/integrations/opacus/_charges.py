# pyright: reportMissingImports=false
"""What the steps of a run were charged.

Each step is charged to a ledger or budget before its noise is drawn. So are steps that only Opacus'
accountant knows of, such as those of another optimiser of the same engine.
"""

import collections
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import dp_accounting
from opacus.accountants.accountant import IAccountant

from mirrordp.integrations.opacus._batches import Draws, on_grid
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Accountant, Adjacency, DpEvent
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Block, FileLedger, Ledger, event_from_dict


class Charge(NamedTuple):
    """Consecutive steps of one kind that were charged.

    Attributes:
        noise_multiplier: σ, relative to the clip norm.
        sampling_prob: q.
        num_steps: their number.
    """

    noise_multiplier: float
    sampling_prob: float
    num_steps: int

    @property
    def event(self) -> DpEvent:
        """Their cost."""
        return accounting.poisson_event(
            self.noise_multiplier, sampling_prob=self.sampling_prob, num_steps=self.num_steps
        )


# For each accountant of Opacus and each ledger or budget, which several optimisers may share: the
# steps in the accountant's history that are in the ledger, whoever charged them.
_KNOWN: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, list[Charge]]] = (
    weakref.WeakKeyDictionary()
)


class Books:
    """The charges of one run."""

    def __init__(
        self,
        spend: Ledger | Budget,
        accountant: IAccountant,
        accountant_rate: float,
        draws: Draws,
        *,
        is_shared: bool,
    ):
        self.spend, self.draws = spend, draws
        self.is_shared = is_shared  # whether other runs may charge the ledger
        self.name = secrets.token_hex(8)  # of the run, in files
        self.charges: list[Charge] = []
        self._accountant, self._accountant_rate = accountant, accountant_rate
        self._known = _KNOWN.setdefault(accountant, weakref.WeakKeyDictionary())

    @property
    def _history(self) -> list[Charge]:
        """The steps that Opacus' accountant knows of."""
        return [Charge(float(noise), float(q), int(n)) for noise, q, n in self._accountant.history]

    @property
    def _file(self) -> FileLedger | None:
        found = self.spend.ledger if isinstance(self.spend, Budget) else self.spend
        return found if isinstance(found, FileLedger) else None

    @property
    def charged_steps(self) -> int:
        """The number of charged steps."""
        return _count(self.charges)

    @property
    def sampling_prob(self) -> float:
        """q: the larger of what is sampled with and what Opacus' accountant is told.

        They differ where 1/q is not a whole number in floating point, and in the 24 binary digits
        of torch.rand.
        """
        return max(self.draws.largest_rate, on_grid(self._accountant_rate))

    def charge_step(self, noise_multiplier: float) -> None:
        """Charges a step, which may be taken once this returns."""
        self.reconcile()
        self._charge(Charge(noise_multiplier, self.sampling_prob, 1))

    def reconcile(self) -> None:
        """Charges what Opacus' accountant knows of and the ledger does not."""
        # The history may also have been replaced by that of another run, or by a shorter one.
        known, unknown = _compare(self._history, self._known.get(self.spend, []))
        for charge in unknown:
            self._charge(charge._replace(sampling_prob=on_grid(charge.sampling_prob)))
            self._known[self.spend] = known = [*known, charge]
        self._known[self.spend] = known

    def note_accounted(self) -> None:
        """Notes that the accountant was told of the last step."""
        self._known[self.spend] = self._history

    def _charge(self, charge: Charge) -> None:
        file = self._file
        start = self.charged_steps if file is None else file.charged_steps(self.name)
        self.spend.charge(charge.event, block=Block(self.name, start, start + charge.num_steps))
        self._keep(charge)

    def _keep(self, charge: Charge) -> None:
        if self.charges and self.charges[-1][:2] == charge[:2]:
            charge = charge._replace(num_steps=charge.num_steps + self.charges.pop().num_steps)
        self.charges.append(charge)

    def saved(self) -> dict[str, Any]:
        """Returns what `restore` needs, as plain types."""
        self.reconcile()
        return {
            "run": self.name,
            "charges": [list(charge) for charge in self.charges],
            "accounted": [list(charge) for charge in self._history],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues a run that was saved; nothing that was charged since is taken back."""
        if saved["run"] == self.name:
            return
        before, here = [Charge(*each) for each in saved["charges"]], self.charges
        self.name, self.charges = saved["run"], []
        paid = 0 if self._file is None else self._file.charged_steps(self.name)
        unpaid = _count(before) - paid
        if self._file is not None and unpaid <= 0:
            # The file may also have steps that were taken after the state was saved.
            before = _charges_in(self._file, self.name)
        for charge in reversed(before):
            if unpaid > 0:
                taken = min(charge.num_steps, unpaid)
                unpaid -= taken
                self._charge(charge._replace(num_steps=taken))
        self.charges = []
        for charge in (*before, *here):
            self._keep(charge)
        # The ledger now also has the steps that the accountant knew of when the state was saved.
        # A history that does not begin with them has other steps, which are charged.
        accounted = [Charge(*each) for each in saved.get("accounted", [])]
        _, missing = _compare(accounted, self._history)
        if not missing and _count(accounted) > _count(self._known.get(self.spend, [])):
            self._known[self.spend] = accounted

    @property
    def varies(self) -> bool:
        """Whether not all steps were alike."""
        return len({charge[:2] for charge in self.charges}) > 1

    @property
    def accountant(self) -> Accountant | None:
        """RDP for steps that were not alike, where PLD would take seconds for each kind of step."""
        has_rdp = self.spend.adjacency is not Adjacency.REPLACE
        return Accountant.RDP if self.varies and has_rdp else None

    def ledger_of_run(self, stop: int | None = None) -> Ledger:
        """Returns a ledger of this run alone, or of its first `stop` charges."""
        found = Ledger(self.spend.adjacency)
        for charge in self.charges[:stop]:
            found.charge(charge.event)
        return found


def _count(charges: Sequence[Charge]) -> int:
    return sum(charge.num_steps for charge in charges)


def _compare(
    history: Sequence[Charge], other: Sequence[Charge]
) -> tuple[list[Charge], list[Charge]]:
    """Returns the first steps of a history that another one begins with too, and the rest."""
    shared, rest, others = [], collections.deque(history), collections.deque(other)
    while rest and others and rest[0][:2] == others[0][:2]:
        count = min(rest[0].num_steps, others[0].num_steps)
        shared.append(rest[0]._replace(num_steps=count))
        for steps in (rest, others):
            first = steps.popleft()
            if first.num_steps > count:
                steps.appendleft(first._replace(num_steps=first.num_steps - count))
    return shared, list(rest)


def _charges_in(file: FileLedger, run: str) -> list[Charge]:
    """Returns what a file says was charged for a run."""
    found = []
    for record in file.records:
        if record["kind"] == "charge" and record.get("run") == run:
            event = cast(dp_accounting.SelfComposedDpEvent, event_from_dict(record["event"]))
            step: Any = event.event
            rate = 1.0
            if isinstance(step, dp_accounting.PoissonSampledDpEvent):
                rate, step = step.sampling_probability, step.event
            found.append(Charge(step.noise_multiplier, rate, event.count))
    return found
