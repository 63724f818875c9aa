"""What a run promises: a mechanism and the caller's statements in, a `RunReport` out.

A report is made of public constants (the mechanism, the number of charged steps, δ) and of what the
caller states about the run. It holds nothing that depends on private rows without noise: the number
of rows appears only where the adjacency makes it public, and a seed only where the caller gave one.
Whether there was a seed comes from the run itself (`info`); if nobody states it, the report says
that it is not known.
"""

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mirrordp import _show, _validate
from mirrordp._rounding import upwards
from mirrordp._versions import library_versions
from mirrordp.privacy.accounting import Adjacency
from mirrordp.report import card, stored
from mirrordp.report.figures import Curve
from mirrordp.spending.files import write_atomically

# Reading a stored report needs none of these, and they import JAX.
if TYPE_CHECKING:
    from mirrordp.privacy.accounting import DpEvent, Epsilon
    from mirrordp.privacy.mechanism import Mechanism
    from mirrordp.spending.budget import Budget
    from mirrordp.spending.ledger import Ledger

SECURE_NOISE = "independent Gaussian, secure: exact on a lattice, keyed by the operating system"
TUNING_NOT_CHARGED = (
    "not charged: epsilon covers this training alone, not runs made to choose its settings"
)


class RunInfo(Protocol):
    """A run's account of itself: a `TrainInfo`, a `FederatedInfo` or an `ExactResult`."""

    @property
    def seeded(self) -> bool:
        """Whether its randomness came from a seed that the caller gave."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """The privacy statement of one run; make it with `RunReport.of`.

    Attributes:
        title: what was trained.
        epsilon: ε at `delta`; infinite if no noise was added.
        delta: δ.
        adjacency: which data sets count as neighbours.
        unit: what one record is: "example" or "user".
        sampling: how batches were drawn.
        sampling_prob: q.
        noise: the kind of noise, independent or correlated.
        noise_multiplier: σ, relative to the clip norm.
        charged_multiplier: the multiplier that the accountant was told if it is less than σ, as
            secure noise has it, which charges for its lattice. None if it is σ.
        l2_clip_norm: C.
        divisor: the public constant by which the noisy sum was divided.
        charged_steps: the number of steps that read private data.
        accountant: the accountant that found ε.
        accountant_method: how it found ε.
        scope: what ε covers: this run, or everything charged to a ledger.
        num_examples_is_public: whether the adjacency treats n as public.
        num_examples: n if it is public and known to the mechanism, else None.
        tuning: whether the search for settings was charged, in words.
        shown_without_protection: what the caller printed or plotted about private rows.
        seed: the seed that the caller gave, if it was stated.
        seeded: whether the randomness came from a seed (True) or from the operating system (False);
            None if it is not known.
        versions: library versions.
        epsilon_over_steps: numbers of charged steps, each with the ε that they cost together at
            `delta`, for this run alone; computed from the mechanism, not measured.
        curves: how a released quantity developed, one `Curve` for each method.
        results: released quantities, such as the accuracy on public test rows.
        ledger: length and head of the ledger file, and the budget, that the run was charged to.
        selection: the distribution of the number of runs of which this is the best, in words, if ε
            covers them all; how many there were is secret. None if this is the only run.
    """

    title: str
    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: str
    sampling: str
    sampling_prob: float
    noise: str
    noise_multiplier: float
    l2_clip_norm: float
    divisor: float
    charged_steps: int
    accountant: str
    accountant_method: str
    scope: str
    num_examples_is_public: bool
    num_examples: int | None
    tuning: str
    shown_without_protection: tuple[str, ...]
    seed: int | None = None
    versions: Mapping[str, str]
    seeded: bool | None = None
    charged_multiplier: float | None = None
    epsilon_over_steps: tuple[tuple[int, float], ...] = ()
    curves: tuple[Curve, ...] = ()
    results: Mapping[str, Any]
    ledger: Mapping[str, Any] | None = None
    selection: str | None = None

    def __post_init__(self):
        known = True if self.seed is not None else False if self.is_secure else self.seeded
        if None not in (known, self.seeded) and known != self.seeded:
            raise ValueError(
                f"seed={self.seed!r} with {self.noise} noise means seeded={known}, got "
                f"seeded={self.seeded}. State what was given to the run."
            )
        object.__setattr__(self, "seeded", known)

    def __repr__(self) -> str:
        return (
            f"RunReport({self.title!r}: epsilon {upwards(self.epsilon)} at delta "
            f"{upwards(self.delta, 6)}, {self.adjacency.value}, one {self.unit}, "
            f"{self.charged_steps} steps{'' if self.is_for_release else '; not for release'})"
        )

    def _repr_html_(self) -> str:
        grave = [(caution.title, caution.text) for caution in self.warnings() if caution.grave]
        rows = [*grave, *card.numbers(self), ("covers", self.scope), ("settings", self.tuning)]
        return _show.table(self.title, rows, self.statement())

    @classmethod
    def of(
        cls,
        mechanism: "Mechanism",
        delta: float,
        *,
        info: RunInfo | None = None,
        charged_steps: int | None = None,
        event: "DpEvent | None" = None,
        spend: "Ledger | Budget | None" = None,
        title: str = "A model trained with mirrordp",
        scope: str | None = None,
        tuning: str = TUNING_NOT_CHARGED,
        shown_without_protection: Sequence[str] = (),
        seed: int | None = None,
        seeded: bool | None = None,
        curves: Sequence[Curve] = (),
        results: Mapping[str, Any] | None = None,
    ) -> "RunReport":
        """Makes the report of a run of `mechanism`.

        Args:
            mechanism: the mechanism that ran.
            delta: δ in (0, 1).
            info: what `train` yielded last, or the result of `exact_mirror_descent`; it knows
                whether the run had a seed. For a sweep, pass the info of the reported run.
            charged_steps: the number of steps that read private data (`info.charged_steps`); by
                default all that the mechanism was made for. Leave it out if a run ended early
                because of what it had released: then ε of all steps that it might have taken is
                the promise.
            event: the cost of a search of which this run is the best, as `NumberOfRuns.event` in
                `mirrordp.privacy.selection` states it; ε is then that of the whole search.
            spend: the ledger or the budget that the run was charged to. With a `Ledger`, ε covers
                everything that was charged to it, which holds for runs that were fixed beforehand.
                With a `Budget`, which is for runs chosen after earlier ones were seen, ε remains
                that of this run, and the report also states what the budget promises for all of
                its runs together.
            title: what was trained.
            scope: what ε covers, in words, if "this run" (or, with a ledger, "everything charged to
                the ledger") does not say it well enough.
            tuning: whether the search for settings was charged, in words.
            shown_without_protection: what was printed or plotted about private rows without noise,
                for example "batch loss, on the operator's terminal".
            seed: the seed given to `train`, if it shall be written down.
            seeded: whether there was a seed, for a training loop of your own, which has no info.
                Without `info`, `seed` and `seeded` the report says that it is not known.
            curves: released quantities over training, for the page of `mirrordp report`. The same
                rule holds for them as for results.
            results: released quantities to keep beside the statement. They must follow from
                released values and public rows; names that say `unprivatized` are refused.
        """
        from mirrordp.privacy.mechanism import Mechanism

        _validate.instance_of(Mechanism, "Pass the mechanism that ran.", mechanism=mechanism)
        if isinstance(shown_without_protection, str):
            raise TypeError(
                "shown_without_protection must be a list of strings, got one string. Wrap it: "
                f"[{shown_without_protection!r}]."
            )
        steps = mechanism.num_steps if charged_steps is None else charged_steps
        found = mechanism.guarantee(delta, num_steps=steps)
        covered, position, selection = "this run", None, None
        if event is not None:
            found, covered, selection = _of_search(event, mechanism, delta, found)
        if spend is not None:
            found, spent_on, position = _charged_to(spend, mechanism, delta, found)
            covered = spent_on or covered
        if info is not None:
            seeded = _agreed(info, seed, seeded)
        bands = mechanism.noise.num_bands
        charged = mechanism.noise.accounted_multiplier(
            mechanism.noise_multiplier, mechanism.l2_clip_norm
        )
        public_n = mechanism.adjacency.num_examples_is_public
        return cls(
            title=title,
            epsilon=found.epsilon,
            delta=float(delta),
            adjacency=mechanism.adjacency,
            unit=mechanism.unit,
            sampling=mechanism.sampling.name,
            sampling_prob=float(mechanism.sampling.sampling_prob),
            noise=SECURE_NOISE
            if mechanism.is_secure
            else "independent Gaussian"
            if bands == 1
            else f"correlated Gaussian, {bands} bands",
            noise_multiplier=float(mechanism.noise_multiplier),
            charged_multiplier=None if charged == mechanism.noise_multiplier else float(charged),
            l2_clip_norm=float(mechanism.l2_clip_norm),
            divisor=float(mechanism.sampling.expected_batch_size),
            charged_steps=int(steps),
            accountant=found.accountant.value,
            accountant_method=found.method,
            scope=scope or covered,
            num_examples_is_public=public_n,
            num_examples=mechanism.sampling.num_examples if public_n else None,
            tuning=tuning,
            shown_without_protection=tuple(shown_without_protection),
            seed=seed,
            seeded=seeded,
            versions=library_versions(),
            epsilon_over_steps=()
            if selection is not None
            else _epsilon_over_steps(mechanism, delta, steps),
            curves=tuple(curves),
            results=stored.plain(results or {}, "results"),
            ledger=position,
            selection=selection,
        )

    @property
    def is_secure(self) -> bool:
        """Whether noise and batches came from a cryptographic generator."""
        return self.noise == SECURE_NOISE

    @property
    def is_for_release(self) -> bool:
        """Whether there was noise and, as far as is known, no seed."""
        return not any(caution.grave for caution in self.warnings())

    @property
    def certainty(self) -> float:
        """The bound (e^ε + δ)/(1 + e^ε) on how often a guess at one record's use can be right.

        It holds for a guesser who would have to toss a fair coin before seeing the model.
        """
        odds = math.exp(min(self.epsilon, 700))
        return min((odds + self.delta) / (1 + odds), 1.0)

    def statement(self) -> str:
        """Returns the guarantee in two sentences."""
        return card.statement(self)

    def warnings(self) -> list[card.Caution]:
        """Returns what to know before relying on the guarantee, the gravest first."""
        return card.cautions(self)

    def privacy_card(self) -> str:
        """Returns the statement in plain words, as Markdown."""
        return card.privacy_card(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types in a fixed order; an infinite ε becomes None, which JSON can hold."""
        return stored.to_dict(self)

    def to_json(self) -> str:
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, content: Any, source: str = "report.json") -> "RunReport":
        """Inverts `to_dict`; also reads reports of schema versions 1 and 2.

        If those state no seed, it is not known whether there was one.

        Args:
            content: what `to_dict` returned.
            source: where it comes from, for messages.

        Raises:
            ReportError: if it is not a report, or was changed.
        """
        return stored.from_dict(cls, content, source)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "RunReport":
        """Reads `report.json` from a folder that `write` made.

        Raises:
            ReportError: if there is none, or it was changed or cut.
        """
        return stored.read(cls, folder)

    def write(self, directory: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Writes `report.json` and `privacy_card.md`, and returns their paths.

        Each file appears whole or not at all. The directory is made if it does not exist.
        """
        folder = Path(directory)
        report, words = folder / "report.json", folder / "privacy_card.md"
        write_atomically(report, self.to_json().encode())
        write_atomically(words, self.privacy_card().encode())
        return report, words


def _of_search(
    event: "DpEvent", mechanism: "Mechanism", delta: float, run: "Epsilon"
) -> tuple["Epsilon", str, str]:
    """Returns ε of a search, what it covers, and the distribution of the number of its runs."""
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    from mirrordp.privacy import accounting
    from mirrordp.privacy.selection import NumberOfRuns

    _validate.instance_of(RepeatAndSelectDpEvent, "Use NumberOfRuns(...).event(run).", event=event)
    assert isinstance(event, RepeatAndSelectDpEvent)
    found = accounting.epsilon(event, delta, adjacency=mechanism.adjacency, orders=mechanism.orders)
    if found.epsilon < run.epsilon * (1 - 1e-6):
        raise ValueError(
            f"a search costs at least as much as one of its runs, epsilon {run.epsilon:.4g}, got "
            f"an event of epsilon {found.epsilon:.4g}. Pass the event that the search was charged "
            "with."
        )
    runs = str(NumberOfRuns(event.mean, event.shape))
    covered = f"the whole search: a random number of runs ({runs}), their scores and the choice"
    return found, covered, runs


def _charged_to(
    spend: "Ledger | Budget", mechanism: "Mechanism", delta: float, run: "Epsilon"
) -> tuple["Epsilon", str | None, dict[str, Any] | None]:
    """Returns ε, what it covers if not the run alone, and length and head of the charged file.

    Length and head make it noticeable if the end of the file is cut off later. They say nothing
    about the data.
    """
    from mirrordp.spending.budget import Budget
    from mirrordp.spending.ledger import FileLedger, Ledger

    _validate.instance_of((Ledger, Budget), spend=spend)
    if isinstance(spend, Budget):
        spend.check_kind(mechanism)
        status = spend.status
        budget = {name: getattr(status, name) for name in ("epsilon", "delta", "runs", "used")}
        return run, None, {**status.position._asdict(), "budget": budget}
    if spend.adjacency is not mechanism.adjacency:
        raise ValueError(
            f"ledger and mechanism must share one adjacency, got {spend.adjacency.value!r} and "
            f"{mechanism.adjacency.value!r}. Pass the ledger that the run was charged to."
        )
    found = spend.epsilon(delta, accountant=mechanism.accountant, orders=mechanism.orders)
    if found.epsilon < run.epsilon * (1 - 1e-6):
        raise ValueError(
            f"the ledger must hold at least this run, epsilon {run.epsilon:.4g}, got a ledger of "
            f"epsilon {found.epsilon:.4g}. Pass the ledger given to train."
        )
    covered = "everything charged to the ledger, by runs that were fixed beforehand"
    return found, covered, spend.position._asdict() if isinstance(spend, FileLedger) else None


def _agreed(info: RunInfo, seed: int | None, seeded: bool | None) -> bool:
    """Returns what the run says about its seed, which the caller must not contradict."""
    found = getattr(info, "seeded", None)
    if not isinstance(found, bool):
        raise TypeError(
            f"info must be what train yielded for this run, got {type(info).__name__}. Pass the "
            "last info; for run i of a sweep, pass infos[i]."
        )
    if (seed is not None and not found) or seeded not in (None, found):
        given = "a seed" if found else "no seed"
        raise ValueError(
            f"the run says that it was given {given}, got seed={seed!r} and seeded={seeded!r}. "
            "Leave both out, or pass the info of the run that they belong to."
        )
    return found


def _epsilon_over_steps(
    mechanism: "Mechanism", delta: float, charged_steps: int, points: int = 8
) -> tuple[tuple[int, float], ...]:
    """Returns ε after about `points` numbers of steps, which lie closer where ε grows faster."""
    if charged_steps == 0:
        return ()
    # ε grows about as the square root of the number of steps.
    counts = {math.ceil(charged_steps * (i / points) ** 2) for i in range(1, points + 1)}
    with warnings.catch_warnings():
        # A delta that is too large has been warned about already.
        warnings.simplefilter("ignore")
        return tuple((count, mechanism.epsilon(delta, num_steps=count)) for count in sorted(counts))
