"""One budget for many runs on the same data: a privacy filter at fixed Rényi orders.

Users choose runs after they have seen the results of earlier ones, so the costs must add up in a
way that holds for fully adaptive composition. When a budget (ε, δ) is made, it fixes orders
α_1, ..., α_k and shares δ_1 + ... + δ_k = δ, and with them one limit per order,

    B_j = ε + log(α_j δ_j) / (α_j − 1) − log(1 − 1/α_j).

A run is admitted if at *some* order the Rényi divergences of everything charged, plus those of the
whole run, stay within the limit. Then everything ever released on the budget is together
(ε, δ)-differentially private; docs/ledger.md has the proof. With one order this is the filter of
Feldman and Zrnic (2021, "Individual Privacy Accounting via a Rényi Filter") and Lécuyer (2021,
"Practical Privacy Filters and Odometers with Rényi Differential Privacy"). Which order decides in
the end may depend on what was seen; sharing δ among the orders pays for that.

There is no such theorem for PLD accounting. It is used only for the report of a single run that was
fixed beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import dp_accounting
import numpy as np

from mirrordp import _validate
from mirrordp._rounding import floored, percent_upwards
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import UNITS, Adjacency, DpEvent
from mirrordp.spending import files as _files, fingerprint as _fingerprint
from mirrordp.spending.ledger import Block, FileLedger, LedgerError, Position

if TYPE_CHECKING:
    from mirrordp.data import PrivateClients, PrivateData
    from mirrordp.privacy.mechanism import Mechanism

LEDGER_FILE = "ledger.jsonl"
# The best order for Gaussians is also the best for Poisson sampling with enough noise. With little
# noise, Rényi divergences explode at high orders, and one of these lower ones decides. Each number
# scales the best order, less one.
_LOWER = (0.8, 0.65, 0.5)
# The sum of many small charges may differ by rounding from the sum that was admitted. A run is
# admitted only if it leaves this share of a limit free, so that its charges never meet the limit.
_ROUNDING = 1e-9


Data: TypeAlias = "str | os.PathLike[str] | PrivateData | PrivateClients"
"""The data that a budget can be for: a file, rows or users."""


class BudgetError(LedgerError):
    """A run that the budget does not admit.

    Attributes:
        problem: the message without its advice, if there is too little left for the run.
        room: ε of the largest full-batch run that would fit, if there is too little left.
    """

    problem: str | None = None
    room: float = 0.0

    def advising(self, advice: str) -> BudgetError:
        """Returns a refusal for lack of room with other advice; any other error as it is."""
        if self.problem is None:
            return self
        advice = f"{advice}, or stop here" if self.room > 0 else "Stop here"
        error = BudgetError(f"{self.problem} {advice}. {_WHY_MORE}")
        error.problem, error.room = self.problem, self.room
        return error


_WHY_MORE = (
    "Costs add up at fixed Renyi orders, which takes a little more than the epsilon of each run "
    "alone suggests."
)


def renyi_limit(epsilon: float, delta: float, order: float) -> float:
    """Returns the largest Rényi divergence at an order that implies (ε, δ)-differential privacy.

    B = ε + log(α δ) / (α − 1) − log(1 − 1/α); Canonne, Kamath and Steinke (2020), Proposition 12.
    """
    return epsilon + math.log(order * delta) / (order - 1) - math.log1p(-1 / order)


def choose_orders(epsilon: float, delta: float) -> dict[float, float]:
    """Returns Rényi orders and their shares of δ.

    Half of δ goes to the best order for Gaussians, the rest to lower ones. The Rényi divergence of
    a Gaussian is proportional to α, so the best order for it maximises B(α)/α.
    """
    candidates = 1 + np.geomspace(0.02, 2e6, 4000)
    half = delta / 2
    values = [renyi_limit(epsilon, half, order) / order for order in candidates]
    best = float(candidates[int(np.argmax(values))])
    lower = [round(1 + factor * (best - 1), 6) for factor in _LOWER]
    useful = [order for order in lower if renyi_limit(epsilon, half / len(_LOWER), order) > 0]
    shares = {order: half / len(useful) for order in useful}
    return {round(best, 6): delta - sum(shares.values()), **shares}


@dataclasses.dataclass(frozen=True)
class BudgetStatus:
    """The promise of a budget, and how much of it is used.

    Attributes:
        epsilon: ε of everything that is ever charged, together.
        delta: δ.
        adjacency: the neighbours.
        unit: what one record is.
        runs: the number of runs that were charged.
        charges: the number of charges in the ledger.
        used: the share of the limit that is used up, at the order where it is smallest.
        largest_epsilon: ε at `delta`, rounded down, of the largest full-batch run that fits.
        position: the length and head of the ledger.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: str
    runs: int
    charges: int
    used: float
    largest_epsilon: float
    position: Position


class Budget:
    """A budget in a folder; make one with `create` and use it with `open`.

    While it is open, no other process can charge it. Use it as a context:

        with Budget.open("budget", data="private.csv") as budget:
            for state, info in mirrordp.train(..., spend=budget): ...
    """

    def __init__(self, folder: Path, ledger: FileLedger):
        self._folder, self._ledger = folder, ledger
        self._verified = self._may_change = self._rows_are_made = False
        self._file: Path | None = None
        # Data that the caller acknowledges to have changed, and the parts of other processes: the
        # next charge binds the budget to them.
        self._changed: Mapping[str, Any] | None = None
        self._changed_parts: list[str] | None = None
        try:
            header = ledger.records[0]["budget"]
            self._epsilon, self._delta = float(header["epsilon"]), float(header["delta"])
            self._unit = str(header["unit"])
            self._orders = tuple(float(pair[0]) for pair in header["orders"])
            shares = np.array([float(pair[1]) for pair in header["orders"]])
            valid = (
                self._epsilon > 0
                and 0 < self._delta < 1
                and self._unit in UNITS
                and len(shares) > 0
                and min(self._orders) > 1
                and (shares > 0).all()
                and shares.sum() <= self._delta * (1 + 1e-12)
            )
            if not valid:
                raise ValueError
        except (KeyError, TypeError, ValueError, IndexError):
            ledger.close()
            raise LedgerError(
                f"expected a budget made by 'mirrordp budget init' or Budget.create, got another "
                f"ledger in {str(folder)!r}. Check the path."
            ) from None
        self._limits = np.array(
            [
                renyi_limit(self._epsilon, share, order)
                for order, share in zip(self._orders, shares, strict=True)
            ]
        )
        self._known = self._divergences(ledger.event)
        self._num_charges = ledger.num_charges

    @property
    def _spent(self) -> np.ndarray:
        """The divergence of everything that the ledger holds, at each order."""
        if self._num_charges != self._ledger.num_charges:
            # Charged by somebody else who holds the ledger.
            self._known = self._divergences(self._ledger.event)
            self._num_charges = self._ledger.num_charges
        return self._known

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        epsilon: float,
        delta: float,
        data: Data,
        adjacency: Adjacency = Adjacency.ZERO_OUT,
        unit: str = "example",
        orders: Mapping[float, float] | None = None,
    ) -> Budget:
        """Creates a budget that is bound to a data set.

        Args:
            folder: a new folder; only its owner will be able to read it.
            epsilon: ε of all runs together.
            delta: δ.
            data: the private data, which is a file (identified by its bytes), rows or users.
            adjacency: the neighbours; all runs on the budget have the same.
            unit: what one record is, "example" or "user"; all runs on the budget have the same.
            orders: Rényi orders with the share of δ of each; by default those of `choose_orders`.
                They are fixed here, before any result is seen.
        """
        _validate.positive(epsilon=epsilon)
        _validate.open_unit_interval(delta=delta)
        _validate.instance_of(Adjacency, "Use Adjacency.ZERO_OUT.", adjacency=adjacency)
        if unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, got {unit!r}.")
        epsilon, delta = float(epsilon), float(delta)
        shares = choose_orders(epsilon, delta) if orders is None else dict(orders)
        for share in shares.values():
            _validate.positive(share_of_delta=share)
        shares = dict(
            zip(accounting.checked_orders(shares), map(float, shares.values()), strict=True)
        )
        if not shares or sum(shares.values()) > delta * (1 + 1e-12):
            raise ValueError(
                f"the shares of delta must add up to at most delta={delta:g}, got "
                f"{sum(shares.values()):g} over {len(shares)} orders."
            )
        folder = _files.absolute(folder)
        if (folder / LEDGER_FILE).exists():
            raise LedgerError(
                f"expected a new folder for the budget, got {str(folder)!r}, which holds one. "
                "Continue with it: a budget is never made afresh for the same data."
            )
        if (folder / _files.RUN_LOCK).exists():
            raise LedgerError(
                f"expected a folder of the budget's own, got {str(folder)!r}, the checkpoint of a "
                "run, which takes its key away when it ends. Choose another."
            )
        _require_usable(data)
        try:
            _files.make_private_folder(folder)
            key = _fingerprint.make_key(folder)
        except OSError as error:
            raise LedgerError(
                f"expected a folder that can be made and written, got {str(folder)!r} "
                f"({error.strerror}). Choose another."
            ) from error
        header = {
            "epsilon": epsilon,
            "delta": delta,
            "unit": unit,
            "orders": sorted([order, share] for order, share in shares.items()),
        }
        ledger = FileLedger.create(
            folder / LEDGER_FILE,
            adjacency,
            header={"budget": header, "data": identify(key, data)},
        )
        budget = cls(folder, ledger)
        budget._note(data)
        return budget

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        data: Data | None = None,
        data_changed: bool = False,
        wait: float = 0.0,
    ) -> Budget:
        """Opens an existing budget in order to charge it.

        Args:
            folder: the budget's folder.
            data: the file, rows or users that the run will use. They are compared with the data
                that the budget is for. Leave it out to let the run compare its rows or users.
            data_changed: whether to continue with changed data; what was spent stays spent.
            wait: seconds to wait for another process that has it open.
        """
        _require_ledger(Path(folder), "Make one with 'mirrordp budget init', or check the path.")
        folder = _files.absolute(folder)
        budget = cls(folder, FileLedger.open(folder / LEDGER_FILE, wait=wait))
        if data is not None:
            try:
                budget.check_data(data, data_changed=data_changed)
            except BaseException:
                budget.close()
                raise
        return budget

    @classmethod
    def status_of(cls, folder: str | os.PathLike[str]) -> BudgetStatus:
        """Returns the status of a budget, even while another process uses it."""
        return cls.view(folder).status

    @classmethod
    def view(cls, folder: str | os.PathLike[str]) -> Budget:
        """Returns a budget as it is now, which may be in use elsewhere and cannot be charged."""
        _require_ledger(Path(folder), "Check the path.")
        folder = _files.absolute(folder)
        return cls(folder, FileLedger.read(folder / LEDGER_FILE))

    def __repr__(self) -> str:
        rows = "; ".join(value for _, value in self._described())
        return f"Budget({str(self._folder)!r}; {rows})"

    def _repr_html_(self) -> str:
        from mirrordp import _show

        return _show.table(f"Budget {str(self._folder)!r}", self._described())

    def _described(self) -> list[tuple[str, str]]:
        status = self.status
        runs = f"{status.runs} run{'s' * (status.runs != 1)}"
        return [
            ("promise", f"epsilon {status.epsilon:g}, delta {status.delta:g}"),
            ("used", f"{percent_upwards(status.used)} used by {runs}"),
            ("guarantee", f"{status.adjacency.value}, one {status.unit}"),
        ]

    @property
    def ledger(self) -> FileLedger:
        """The ledger of everything that was charged."""
        return self._ledger

    @property
    def folder(self) -> Path:
        """The folder of the budget."""
        return self._folder

    @property
    def adjacency(self) -> Adjacency:
        """The neighbours that the promise refers to."""
        return self._ledger.adjacency

    @property
    def unit(self) -> str:
        """What one record is."""
        return self._unit

    @property
    def kind_of_data(self) -> str:
        """What the budget was made for, "file", "rows" or "users"."""
        return self._bound["kind"]

    @property
    def status(self) -> BudgetStatus:
        """The promise of the budget, and how much of it is used."""
        charges = [record for record in self._ledger.records if record["kind"] == "charge"]
        runs = {record.get("run", record["index"]) for record in charges}
        usable = self._limits > 0
        used = (self._spent[usable] / self._limits[usable]).min() if usable.any() else math.inf
        return BudgetStatus(
            epsilon=self._epsilon,
            delta=self._delta,
            adjacency=self.adjacency,
            unit=self._unit,
            runs=len(runs),
            charges=len(charges),
            used=float(used),
            largest_epsilon=self.largest_epsilon(self._delta),
            position=self._ledger.position,
        )

    @property
    def least_noise(self) -> float:
        """σ of the strongest single Gaussian that still fits, or infinity if none does.

        The Rényi divergence of a Gaussian at order α is α d² / 2σ², where d is the distance between
        neighbours over C.
        """
        room = float(((self._limits - self._spent) / np.array(self._orders)).max())
        distance = self.adjacency.distance
        return distance / math.sqrt(2 * room) if room > 0 else math.inf

    def largest_epsilon(self, delta: float) -> float:
        """Returns ε at δ, rounded down, of the largest full-batch run that still fits."""
        if math.isinf(self.least_noise):
            return 0.0
        event = dp_accounting.GaussianDpEvent(self.least_noise)
        found = accounting.epsilon(event, delta, adjacency=self.adjacency).epsilon
        return floored(found, 3)

    def check_data(self, data: Data, *, data_changed: bool = False) -> None:
        """Raises a `BudgetError` unless the budget is for this data or the change is acknowledged.

        Args:
            data: the file, rows or users to compare.
            data_changed: whether the caller acknowledges that the data has changed.
        """
        self._may_change = data_changed
        self._compare(data, data_changed)
        self._note(data)

    def _note(self, data: Data) -> None:
        self._verified = True
        self._file = _files.absolute(data) if isinstance(data, str | os.PathLike) else None

    def check_rows(self, rows: PrivateData | PrivateClients) -> None:
        """Compares the rows or users of a run; or the file, if the budget was opened with one.

        Every run is compared: the one before may have had other rows, and a file may have changed
        since. That rows come from the file is the caller's word.
        """
        if self._rows_are_made:
            return self.require_data()
        data = rows if self._file is None else self._file
        self._compare(data, data_changed=False)
        self._note(data)

    @contextlib.contextmanager
    def with_made_rows(self) -> Iterator[None]:
        """Within, the rows of a run are others that the caller made of the data, by public rules.

        They are not compared with the data. That they come from it is the caller's word.
        """
        self._rows_are_made = True
        try:
            yield
        finally:
            self._rows_are_made = False

    @property
    def _bound(self) -> Mapping[str, Any]:
        """The kind and the fingerprint of the data that the budget is for."""
        changed = self._changed
        if changed is not None:
            return changed
        return [record for record in self._ledger.records if "data" in record][-1]["data"]

    def _compare(self, data: Data, data_changed: bool) -> None:
        bound, found = self._bound, identify(self.key, data)
        if found["kind"] != bound["kind"]:
            raise BudgetError(
                f"expected the {bound['kind']} that the budget {str(self._folder)!r} was made for, "
                f"got {found['kind']}. Open it with data=..., of the same kind as at the beginning."
            )
        if found != bound:
            if not data_changed:
                raise BudgetError(
                    f"expected the data that the budget {str(self._folder)!r} is for, got data "
                    "that differs from it. Changed data gets no fresh budget, since most records "
                    "are the same people. Use the data as it was, or acknowledge the change "
                    "(mirrordp fit --data-changed, or Budget.open(..., data_changed=True)) to use "
                    "what is left of this budget."
                )
            self._changed = found

    def check_parts(self, parts: Sequence[str]) -> None:
        """Raises a `BudgetError` if processes hold other rows than in the first run of several.

        The data of the budget are those of process 0, which makes it. The first run of several
        processes also binds it to the rows of the others.

        Args:
            parts: the fingerprints of the rows of processes 1, 2, ..., under `key`.
        """
        bound = self._parts
        if bound is not None and bound != list(parts) and not self._may_change:
            others = [
                n for n, pair in enumerate(zip(bound, parts, strict=False), 1) if len({*pair}) > 1
            ]
            which = f"in process {', '.join(map(str, others))}"
            if len(bound) != len(parts):
                which = f"in {len(parts) + 1} processes instead of {len(bound) + 1}"
            raise BudgetError(
                f"expected the rows that earlier runs on the budget {str(self._folder)!r} had in "
                f"each process, got others {which}. Changed data gets no fresh budget. Use the "
                "data as it was, or open the budget with data_changed=True to use what is left."
            )

    def claim_parts(self, parts: Sequence[str]) -> None:
        """Records the rows of other processes durably, if `check_parts` allows it."""
        with self._ledger.mutex:
            self.check_parts(parts)
            if self._changed is not None:
                self._changed_parts = list(parts)
            elif self._parts != list(parts):
                self._ledger.append("parts", {"parts": list(parts)})

    @property
    def _parts(self) -> list[str] | None:
        found = [record["parts"] for record in self._ledger.records if "parts" in record]
        return found[-1] if found else None

    def require_data(self) -> None:
        """Raises a `BudgetError` unless the budget was opened with the data that it is for.

        A file is compared again: it may have changed since.
        """
        self._require_opened()
        if self._file is not None:
            self._compare(self._file, data_changed=False)

    def _require_opened(self) -> None:
        if not self._verified:
            raise BudgetError(
                f"expected the budget {str(self._folder)!r} to be opened with the data that it is "
                "for, got none. Use Budget.open(folder, data=...)."
            )

    def check_seed(self, seed: int | None, run: str) -> None:
        """Raises a `BudgetError` for a seed that another run on this budget had.

        Costs add up only if the noise of one run is independent of that of the others.

        Args:
            seed: the seed of the run, or None if its randomness comes from the operating system.
            run: the run's name; a run that is resumed keeps it.
        """
        if seed is not None and any(name != run for name in self._runs_with(seed)):
            raise BudgetError(
                f"expected a seed that no other run on the budget {str(self._folder)!r} had, since "
                f"costs add up only if noise is independent, got seed {seed} again. Leave the seed "
                "out, or take another."
            )

    def claim_seed(self, seed: int | None, run: str) -> None:
        """Records the seed of a run durably, if `check_seed` allows it."""
        with self._ledger.mutex:
            self.check_seed(seed, run)
            if seed is not None and not self._runs_with(seed):
                content = {"run": run, "fingerprint": _fingerprint.of_seed(self.key, seed)}
                self._ledger.append("seed", content)

    def _runs_with(self, seed: int) -> list[str]:
        fingerprint = _fingerprint.of_seed(self.key, seed)
        claims = [record for record in self._ledger.records if record["kind"] == "seed"]
        return [record["run"] for record in claims if record["fingerprint"] == fingerprint]

    @property
    def key(self) -> bytes:
        """The key of the fingerprints, which is secret."""
        return _fingerprint.read_key(self._folder)

    def admit(self, mechanism: Mechanism, *, charged_steps: int = 0, num_steps: int) -> None:
        """Raises unless steps `charged_steps` to `num_steps` of the mechanism fit. Charges nothing.

        Args:
            mechanism: the mechanism of the run.
            charged_steps: the number of its steps that were charged before, if it is resumed.
            num_steps: the number of steps of the run that read private data.

        Raises:
            BudgetError: if the run would exceed the budget, or is of another kind.
        """
        self.check_kind(mechanism)
        cost = self._divergences(mechanism.event_between(charged_steps, num_steps))
        if not self._fits(cost, margin=_ROUNDING):
            self._refuse(cost, advice=self._advice(mechanism, charged_steps, num_steps))

    def admit_all(self, mechanism: Mechanism, num_steps: Sequence[int]) -> None:
        """Raises unless several runs of the mechanism fit together. Charges nothing.

        Args:
            mechanism: the mechanism of every run.
            num_steps: for each run, the number of steps that read private data.

        Raises:
            BudgetError: if they would exceed the budget together, or are of another kind.
        """
        self.check_kind(mechanism)

        def event(runs: int, mechanism: Mechanism = mechanism) -> DpEvent:
            parts = [mechanism.event_between(0, count) for count in num_steps[:runs]]
            return dp_accounting.ComposedDpEvent(parts)

        cost = self._divergences(event(len(num_steps)))
        if self._fits(cost, margin=_ROUNDING):
            return
        noise = accounting.least_noise(
            lambda sigma: self.fits(event(len(num_steps), mechanism.with_noise(sigma)))
        )
        most = accounting.most_steps(lambda runs: runs <= len(num_steps) and self.fits(event(runs)))
        fewer = f", or the first {most} as they are" if most else ""
        every = f" All {len(num_steps)} runs would fit at noise_multiplier={noise:g}{fewer}."
        self._refuse(cost, advice="" if noise is None else every)

    def fits(self, event: DpEvent, *, fraction: float = 1.0) -> bool:
        """Returns whether something is left and an event costs at most a fraction of it.

        Args:
            event: the event of the run.
            fraction: a share of what is left, at the order where the event fits best.
        """
        _validate.probability(fraction=fraction)
        fraction = float(fraction)
        if math.isinf(self.least_noise):
            return False
        return self._fits(self._divergences(event), margin=_ROUNDING, fraction=fraction)

    def most_steps(self, mechanism: Mechanism, *, fraction: float = 1.0) -> int:
        """Returns how many steps of a mechanism a fraction of what is left allows.

        Args:
            mechanism: the mechanism; its own number of steps does not matter.
            fraction: the share of what is left.
        """
        self.check_kind(mechanism)
        return accounting.most_steps(
            lambda steps: self.fits(
                dataclasses.replace(mechanism, num_steps=steps).event, fraction=fraction
            )
        )

    def _advice(self, mechanism: Mechanism, charged_steps: int, num_steps: int) -> str:
        """Says what would fit instead of a run that does not, with the same sampling."""
        noise, most = None, self.most_steps(mechanism)
        if charged_steps == 0:
            wanted = dataclasses.replace(mechanism, num_steps=num_steps)
            noise = accounting.least_noise(lambda sigma: self.fits(wanted.with_noise(sigma).event))
        present = f"{most}{' more' * (charged_steps > 0)} steps as it is"
        if noise is None:
            return f" {present[0].upper()}{present[1:]} would fit." if most else ""
        return (
            f" With its own sampling {num_steps} steps would fit at noise_multiplier={noise:g}"
            f"{f', or {present}' if most else ''}; Mechanism.calibrate(spend=budget, ...) finds "
            "the noise."
        )

    def check_kind(self, mechanism: Mechanism) -> None:
        """Raises a `BudgetError` for a mechanism of another adjacency or unit."""
        if mechanism.adjacency is not self.adjacency or mechanism.unit != self._unit:
            raise BudgetError(
                f"expected {self.adjacency.value} adjacency and one {self._unit} as unit, which "
                f"the budget {str(self._folder)!r} is for, got {mechanism.adjacency.value} and "
                f"one {mechanism.unit}. One budget has one of each; make the mechanism to match."
            )

    def admit_event(self, event: DpEvent, *, delta: float | None = None) -> None:
        """Raises a `BudgetError` unless an event fits. Charges nothing.

        Args:
            event: the event of the run.
            delta: δ at which the message states what would still fit; by default the budget's.
        """
        cost = self._divergences(event)
        if self._fits(cost, margin=_ROUNDING):
            return
        self._refuse(cost, delta=delta)

    def _refuse(
        self, cost: np.ndarray, *, delta: float | None = None, advice: str = ""
    ) -> NoReturn:
        delta = self._delta if delta is None else delta
        usable = self._limits > 0
        with np.errstate(invalid="ignore"):
            share = float((cost[usable] / self._limits[usable]).min()) if usable.any() else math.inf
        room = self.largest_epsilon(delta)
        left = "nothing is left"
        if room > 0:
            left = f"a full-batch run of at most epsilon {room:g} at delta {delta:g} would fit"
        problem = (
            f"expected a run within the budget of epsilon {self._epsilon:g}, delta "
            f"{self._delta:g}, of which {percent_upwards(self.status.used)} is used, got one that "
            f"takes {percent_upwards(share)}; {left}."
        )
        error = BudgetError(
            f"{problem}{advice} Add noise, take fewer steps, or stop here. {_WHY_MORE}"
        )
        error.problem, error.room = problem, room
        raise error

    def charge(self, event: DpEvent, *, block: Block | None = None) -> None:
        """Charges an event, and returns when it is on disk. See `FileLedger.charge`.

        Raises:
            BudgetError: if it does not fit.
        """
        self._require_opened()
        cost = self._divergences(event)
        with self._ledger.mutex:
            if not self._fits(cost):
                self._refuse(cost)
            spent = self._spent + cost
            self._ledger.charge(event, block=block, further=self._changes())
            self._changed = self._changed_parts = None
            self._known, self._num_charges = spent, self._ledger.num_charges

    def _changes(self) -> dict[str, Any]:
        """Returns the changed data that the budget will be for, if that was acknowledged.

        One record holds the charge, the data and the parts of other processes. After a crash, all
        of them are on disk or none is, and the budget is never for rows of two different runs.
        """
        found: dict[str, Any] = {}
        if self._changed is not None:
            found["data"] = self._changed
            if self._changed_parts is not None:
                found["parts"] = self._changed_parts
        return found

    def _fits(self, cost: np.ndarray, *, margin: float = 0.0, fraction: float = 1.0) -> bool:
        limits = self._limits * (1 - margin)
        if fraction < 1:
            limits = self._spent + fraction * (limits - self._spent)
        return bool(((self._spent + cost <= limits) & (self._limits > 0)).any())

    def _divergences(self, event: DpEvent) -> np.ndarray:
        if isinstance(event, dp_accounting.ComposedDpEvent):
            parts = [self._divergences(part) for part in event.events]
            return np.sum(parts, axis=0) if parts else np.zeros(len(self._orders))
        try:
            if isinstance(event, dp_accounting.SelfComposedDpEvent):
                return event.count * self._divergences(event.event)
            if accounting.has_selection(event):
                # It may hold a list, which cannot be looked up in a cache.
                return accounting.renyi_divergences(event, self._orders, adjacency=self.adjacency)
            return _divergences(event, self._orders, self.adjacency)
        except accounting.UnsupportedError as error:
            raise BudgetError(
                f"expected a mechanism with a Renyi analysis, which a budget needs, got one "
                f"without: {error}"
            ) from None

    def close(self) -> None:
        """Lets other processes use the budget."""
        self._ledger.close()

    def __reduce__(self):
        # A copy would know only its own charges, and spend the rest a second time.
        raise TypeError(
            f"the budget {str(self.folder)!r} belongs to one process and cannot be copied. Open it "
            "by its folder where it is used."
        )

    def __enter__(self) -> Budget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def identify(key: bytes, data: Data) -> dict[str, Any]:
    """Returns the kind of some data and its fingerprint under a key."""
    _require_usable(data)
    if isinstance(data, str | os.PathLike):
        return {"kind": "file", "fingerprint": _fingerprint.of_file(key, data)}

    from mirrordp.data import PrivateData

    if isinstance(data, PrivateData):
        return {"kind": "rows", "fingerprint": _fingerprint.of_arrays(key, data.arrays)}
    users = (data.arrays, data.num_examples)
    return {"kind": "users", "fingerprint": _fingerprint.of_arrays(key, users)}


def _require_ledger(folder: Path, advice: str) -> None:
    if (folder / LEDGER_FILE).is_file():
        return
    came = f"a folder without {LEDGER_FILE}" if folder.is_dir() else "no such folder"
    raise LedgerError(f"expected a budget in {str(folder)!r}, got {came}. {advice}")


def _require_usable(data: Data) -> None:
    if not isinstance(data, str | os.PathLike):
        from mirrordp.data import PrivateClients, PrivateData

        _validate.instance_of(
            (PrivateData, PrivateClients), "Or pass the path of a file.", data=data
        )
        return
    try:
        with open(data, "rb") as file:
            file.read(1)
    except OSError as error:
        raise LedgerError(
            f"expected a data file that can be read, got {str(data)!r} ({error.strerror}). Check "
            "the path."
        ) from error


@functools.lru_cache(maxsize=64)
def _divergences(event: DpEvent, orders: tuple[float, ...], adjacency: Adjacency) -> np.ndarray:
    found = accounting.renyi_divergences(event, orders, adjacency=adjacency)
    found.flags.writeable = False
    return found
