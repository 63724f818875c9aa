"""What a run promises, in writing: `RunReport` in, JSON, a privacy card and a figure out.

A report is made of public constants (the mechanism, the number of charged steps, δ) and of what the
caller states about the run. It holds nothing that depends on private rows without noise: the number
of rows appears only where the adjacency makes it public, and a seed only where the caller gave one.
Whether there was a seed comes from the run itself (`info`); where nobody says it, the report says
that it is not known.
"""

import dataclasses
import io
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mirrordp import _show, _validate
from mirrordp._versions import library_versions
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import UNITS, Mechanism
from mirrordp.report.charts import PALETTE
from mirrordp.spending.budget import Budget
from mirrordp.spending.files import write_atomically
from mirrordp.spending.ledger import FileLedger, Ledger

SECURE_NOISE = "independent Gaussian, secure: exact on a lattice, keyed by the operating system"
NOT_FOR_RELEASE = "reproducible, not for release"
WEAK_EPSILON = 10.0
"""Above it the certainty bound is 99.99%: the guarantee by itself says next to nothing."""
TUNING_NOT_CHARGED = (
    "not charged: epsilon covers this training alone, not runs made to choose its settings"
)

SCHEMA_VERSION = 3
"""Of report.json: 2 added `epsilon_over_steps` and `curves`, 3 added `seeded`; reports without a
version are 1."""

Results = Mapping[str, Any]


class Ran(Protocol):
    """What a run says about itself: a `TrainInfo`, a `FederatedInfo` or an `ExactResult`."""

    @property
    def seeded(self) -> bool:
        """Whether its randomness came from a seed of the caller's."""
        ...


class ReportError(ValueError):
    """A stored report that cannot be read; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Warned:
    """Something that a reader of a report must know before relying on it.

    Attributes:
        grave: whether the model should not be released as it is.
        title: what it is about, in a few words.
        text: what it means and what to do, in sentences.
    """

    grave: bool
    title: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """The privacy statement of one run; make it with `RunReport.of`.

    Attributes:
        title: what was trained.
        epsilon: ε at `delta`; infinite where no noise was added.
        delta: δ.
        adjacency: the neighbours that ε speaks of.
        unit: what one record is: "example" or "user".
        sampling: how batches were drawn.
        sampling_prob: q.
        noise: independent or correlated noise.
        noise_multiplier: σ, relative to the clip norm.
        charged_multiplier: what the accountant was told instead of σ, where that is less: secure
            noise charges for its lattice. None where it is σ.
        l2_clip_norm: C.
        divisor: the public constant by which the noisy sum was divided.
        charged_steps: steps that read private data.
        accountant: which accountant found ε.
        accountant_method: how.
        scope: what ε covers: this run, or everything charged to a ledger.
        num_examples_is_public: whether the adjacency treats n as public.
        num_examples: n where it is public and known to the mechanism, else None.
        tuning: whether the search for settings was charged, in words.
        shown_without_protection: what the caller printed or plotted about private rows.
        seed: the seed that the caller gave, where it was stated.
        seeded: whether the randomness came from a seed (True) or from the operating system (False);
            None where it is not known.
        versions: library versions.
        epsilon_over_steps: pairs of charged steps and of the ε that they cost together at `delta`,
            of this run alone; computed from the mechanism, not measured.
        curves: how a released quantity developed, one `Curve` for each method.
        results: released quantities, such as the accuracy on public test rows.
        ledger: length and head of the ledger file, and the budget, that the run was charged to.
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
    seed: int | None
    versions: Mapping[str, str]
    seeded: bool | None = None
    charged_multiplier: float | None = None
    epsilon_over_steps: tuple[tuple[int, float], ...] = ()
    curves: tuple["Curve", ...] = ()
    results: Results
    ledger: Mapping[str, Any] | None = None

    def __post_init__(self):
        known = True if self.seed is not None else False if self.is_secure else self.seeded
        if None not in (known, self.seeded) and known != self.seeded:
            raise ValueError(
                f"seed={self.seed!r} with {self.noise} noise means seeded={known}, got "
                f"seeded={self.seeded}. State what was given to the run."
            )
        object.__setattr__(self, "seeded", known)

    def __repr__(self) -> str:
        release = "; not for release" * any(warned.grave for warned in self.warnings())
        return (
            f"RunReport({self.title!r}: epsilon {upwards(self.epsilon)} at delta "
            f"{upwards(self.delta, 6)}, {self.adjacency.value}, one {self.unit}, "
            f"{self.charged_steps} steps{release})"
        )

    def _repr_html_(self) -> str:
        warned = [(one.title, one.text) for one in self.warnings() if one.grave]
        rows = [*warned, *self.numbers(), ("covers", self.scope), ("settings", self.tuning)]
        return _show.table(self.title, rows, self.statement())

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        delta: float,
        *,
        info: Ran | None = None,
        charged_steps: int | None = None,
        ledger: Ledger | None = None,
        budget: Budget | None = None,
        title: str = "A model trained with mirrordp",
        scope: str | None = None,
        tuning: str = TUNING_NOT_CHARGED,
        shown_without_protection: Sequence[str] = (),
        seed: int | None = None,
        seeded: bool | None = None,
        curves: Sequence["Curve"] = (),
        results: Results | None = None,
    ) -> "RunReport":
        """The report of a run of `mechanism`.

        Args:
            mechanism: what ran.
            delta: δ in (0, 1).
            info: what `train` yielded last, or the result of `exact_mirror_descent`: it
                knows whether the run had a seed. Of a sweep, the info of the reported run.
            charged_steps: how many steps read private data (`info.charged_steps`); by default all
                that the mechanism was made for. Leave it out where a run ended early because of
                what it had released: then ε of all steps that it might have taken is the promise.
            ledger: everything that was charged, where that is more than this run; ε then covers
                all of it. This holds for runs that were fixed beforehand; for runs chosen after
                earlier ones were seen use a budget.
            budget: the budget that the run was charged to. ε remains that of this run; what the
                budget promises for all of its runs together is stated beside it.
            title: what was trained.
            scope: what ε covers, in words, where "this run" (or, with a ledger, "everything charged
                to the ledger") does not say it well enough.
            tuning: whether the search for settings was charged, in words.
            shown_without_protection: what was printed or plotted about private rows without noise,
                for example "batch loss, on the operator's terminal".
            seed: the seed given to `train`, to be written down.
            seeded: whether there was a seed, for a loop of your own, which has no info. Without
                `info`, `seed` and `seeded` the report says that it is not known.
            curves: released quantities over training, for the page of `mirrordp report`. The same
                rule holds for them as for results.
            results: released quantities to keep beside the statement. They must follow from
                released values and public rows; names that say `unprivatized` are refused.
        """
        _validate.instance_of(Mechanism, "Pass the mechanism that ran.", mechanism=mechanism)
        if isinstance(shown_without_protection, str):
            raise TypeError(
                "shown_without_protection must be a list of strings, got one string. Wrap it: "
                f"[{shown_without_protection!r}]."
            )
        steps = mechanism.num_steps if charged_steps is None else charged_steps
        if ledger is not None and budget is not None:
            raise ValueError("a run is charged to a ledger or a budget, got both. Leave one out.")
        if ledger is not None and ledger.adjacency is not mechanism.adjacency:
            raise ValueError(
                f"ledger and mechanism must share one adjacency, got {ledger.adjacency.value!r} "
                f"and {mechanism.adjacency.value!r}. Report the run with the ledger it was "
                "charged to."
            )
        found = mechanism.guarantee(delta, num_steps=steps)
        covered = "this run"
        if ledger is not None:
            run = found
            found = ledger.epsilon(delta, accountant=mechanism.accountant, orders=mechanism.orders)
            covered = "everything charged to the ledger, by runs that were fixed beforehand"
            if found.epsilon < run.epsilon * (1 - 1e-6):
                raise ValueError(
                    f"the ledger must hold at least this run, epsilon {run.epsilon:.4g}, got a "
                    f"ledger of epsilon {found.epsilon:.4g}. Pass the ledger given to train."
                )
        if info is not None:
            seeded = _agreed(info, seed, seeded)
        bands = mechanism.noise.num_bands
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
            charged_multiplier=_charged_multiplier(mechanism),
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
            epsilon_over_steps=_spending(mechanism, delta, steps),
            curves=tuple(curves),
            results=_plain(results or {}, "results"),
            ledger=_ledger_statement(ledger, budget),
        )

    @classmethod
    def from_dict(cls, content: Any, source: str = "report.json") -> "RunReport":
        """The inverse of `to_dict`; also reads reports of schema versions 1 and 2.

        Those did not say whether there was a seed where none was stated; it is then not known.

        Args:
            content: what `to_dict` returned.
            source: where it comes from, for messages.

        Raises:
            ReportError: if it is anything else.
        """
        if not isinstance(content, dict) or not {"epsilon", "delta", "adjacency"} <= set(content):
            raise ReportError(
                f"expected a report written by mirrordp, got something else in {source!r}; check "
                "the path."
            )
        version = content.get("schema_version", 1)
        if version not in range(1, SCHEMA_VERSION + 1):
            raise ReportError(
                f"expected a report of schema version 1 to {SCHEMA_VERSION}, got {version!r} in "
                f"{source!r}; use the mirrordp that wrote it."
            )
        try:
            return cls(**_stored_fields(cls, content))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ReportError(
                f"expected an intact report, got changed or missing parts in {source!r} "
                f"({error}); write it again."
            ) from None

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "RunReport":
        """Reads `report.json` from a folder that `write` made.

        Raises:
            ReportError: if there is none, or it was changed or cut.
        """
        path = Path(folder) / "report.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            content = None
        except OSError as error:
            raise ReportError(
                f"expected a folder with report.json as written by mirrordp, got {str(folder)!r} "
                f"({error.strerror}); check the path."
            ) from None
        return cls.from_dict(content, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain types in a fixed order; an infinite ε is None, which JSON can hold."""
        fields = {"schema_version": SCHEMA_VERSION} | {
            field.name: _plain(getattr(self, field.name), field.name)
            for field in dataclasses.fields(self)
        }
        fields["randomness"] = self._randomness
        for name in ("seed", "ledger", "charged_multiplier"):
            if fields[name] is None:
                del fields[name]
        results = fields.pop("results")
        return fields | {"results": results}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    @property
    def is_secure(self) -> bool:
        """Whether noise and batches came from a cryptographic generator."""
        return self.noise == SECURE_NOISE

    @property
    def _randomness(self) -> str:
        if self.is_secure:
            return (
                "noise and batches from AES-256, keyed by the operating system afresh for every "
                "draw; there is no seed, and nobody can repeat the run"
            )
        if self.seeded is None:
            return (
                "not known: whether a seed was given to the run is not stated. With a seed it "
                f"would be {NOT_FOR_RELEASE}"
            )
        if self.seeded:
            return f"from the seed given by the caller: {NOT_FOR_RELEASE}"
        return "from the operating system; it is no part of what is released"

    def privacy_card(self) -> str:
        """The statement in plain words, as Markdown."""
        return "\n".join(
            [
                f"# Privacy card: {_cell(self.title)}",
                "",
                *self._opening(),
                "",
                "| question | answer |",
                "|---|---|",
                *(f"| {question} | {_cell(answer)} |" for question, answer in self.answers()),
                "",
                "## What is not protected",
                "",
                *(f"- {line}" for line in self.limits()),
                "",
                "## The numbers",
                "",
                "| quantity | value |",
                "|---|---|",
                *(f"| {name} | {_cell(value)} |" for name, value in self.numbers()),
                "",
                "Versions: " + ", ".join(f"{k} {v}" for k, v in self.versions.items()) + ".",
                "",
            ]
        )

    def _opening(self) -> list[str]:
        lines = []
        for warned in self.warnings():
            if warned.grave:
                lines += [f"**{warned.title}**: {warned.text}", ""]
        return [*lines, self.statement()] if math.isfinite(self.epsilon) else lines[:-1]

    def warnings(self) -> list[Warned]:
        """What to know before relying on the guarantee, the gravest first."""
        found = []
        if self.seeded:
            found.append(
                Warned(
                    True,
                    f"This run is {NOT_FOR_RELEASE}",
                    "all of its randomness comes from a seed, and who knows the seed can subtract "
                    "the noise. Train without a seed before you publish.",
                )
            )
        if not math.isfinite(self.epsilon):
            found.append(Warned(True, "No protection", f"{self._why_infinite}."))
        elif self.epsilon > WEAK_EPSILON:
            found.append(
                Warned(
                    False,
                    f"Epsilon {upwards(self.epsilon)} is large",
                    "the guarantee rules out little by itself. Use more noise, fewer steps or more "
                    "records if the records are sensitive.",
                )
            )
        if self.seeded is None:
            found.append(
                Warned(
                    False,
                    "Whether there was a seed is not known",
                    "whoever knows the seed of a run can subtract its noise. State it: "
                    "RunReport.of(..., info=info) with what the run yielded last.",
                )
            )
        if self._has_large_delta:
            found.append(
                Warned(
                    False,
                    f"Delta {_number(self.delta)} is above one over the number of records",
                    "a mechanism that publishes a record at random would pass. Choose a smaller "
                    "delta.",
                )
            )
        if self.shown_without_protection:
            found.append(
                Warned(
                    False,
                    "Something was shown without protection",
                    "; ".join(self.shown_without_protection) + ". Epsilon does not cover it.",
                )
            )
        if self.tuning.startswith("not charged"):
            found.append(Warned(False, "The choice of settings was not charged", self.tuning + "."))
        return found

    @property
    def certainty(self) -> float:
        """(e^ε + δ)/(1 + e^ε): how often the best guess at one record's use can be right.

        Before seeing the model the guesser would have to toss a fair coin.
        """
        odds = math.exp(min(self.epsilon, 700))
        return min((odds + self.delta) / (1 + odds), 1.0)

    def statement(self) -> str:
        """The guarantee in two sentences."""
        if not math.isfinite(self.epsilon):
            return f"There is no guarantee: {self._why_infinite}."
        if self.charged_steps == 0 and self.epsilon == 0:
            return "No step of training read private records: the model says nothing about them."
        return (
            f"Training looked at private records, one {self.unit} each, through noise. Whoever "
            f"studies the model learns nearly the same whether or not {self._difference}: the "
            f"guarantee is differential privacy with epsilon = {upwards(self.epsilon)} and "
            f"delta = {upwards(self.delta, 6)}. For scale: someone who would have to toss a coin "
            f"to tell which of the two it was is right at most {percent_upwards(self.certainty)} "
            "of the time after seeing the model, whatever else they know."
        )

    @property
    def _why_infinite(self) -> str:
        if self.noise_multiplier == 0:
            return "no noise was added, so epsilon is infinite"
        return "the accountant found no finite epsilon for so little noise"

    @property
    def _difference(self) -> str:
        return {
            Adjacency.ADD_REMOVE: f"any one {self.unit} was in the data",
            Adjacency.ZERO_OUT: f"any one {self.unit} was used",
            Adjacency.REPLACE: f"any one {self.unit} was exchanged for another",
        }[self.adjacency]

    @property
    def _neighbours(self) -> str:
        return {
            Adjacency.ADD_REMOVE: f"any two of which one has one {self.unit} more (add-remove)",
            Adjacency.ZERO_OUT: f"any two that differ in whether one {self.unit} counts or is "
            "blank (zero-out)",
            Adjacency.REPLACE: f"any two that differ in what one {self.unit} contains (replace)",
        }[self.adjacency]

    @property
    def _reading(self) -> str:
        if self.charged_steps == 0:
            return "not at all: no step read private records"
        return (
            f"in {self.charged_steps} steps, by {self.sampling} sampling with probability "
            f"{_number(self.sampling_prob)}. Each contribution was cut to norm "
            f"{_number(self.l2_clip_norm)}, and "
            f"{'independent Gaussian' if self.is_secure else self.noise} noise of "
            f"{_number(self.noise_multiplier)} times that norm was added to their sum"
            + (", in integers on a lattice" if self.is_secure else "")
        )

    @property
    def _has_large_delta(self) -> bool:
        return self.num_examples is not None and self.delta > 1 / self.num_examples

    @property
    def _size_of_delta(self) -> str:
        if self._has_large_delta:
            return (
                "here above one over the number of records, where a mechanism that publishes a "
                "record at random would pass"
            )
        return "to be kept far below one over the number of records"

    def answers(self) -> list[tuple[str, str]]:
        """What a reader asks, and the answers."""
        whom = {
            "example": "every single example (row). A person with several rows is protected less",
            "user": "every user, with all of the user's rows together",
        }[self.unit]
        count = (
            "no: the number of records counts as public"
            if self.num_examples_is_public
            else "yes: the number of records is not revealed either"
        )
        return [
            ("What is protected?", "what the private records contain"),
            ("For whom?", whom),
            (
                "Against what?",
                "anyone who has the model, every gradient released in training and any other "
                "knowledge, with any computing power short of what breaks the random generator",
            ),
            (
                "How strongly?",
                f"epsilon {upwards(self.epsilon)}, delta {upwards(self.delta, 6)}. Epsilon bounds "
                "how much more likely any outcome can become through one record; delta is a small "
                f"allowance on top, {self._size_of_delta}",
            ),
            ("Which data sets must look alike?", self._neighbours),
            ("How were records read?", self._reading),
            ("How was epsilon found?", f"by the accountant {self.accountant_method}"),
            ("What does this cover?", self.scope),
            *self._together(),
            ("Is the number of records hidden?", count),
            ("Was the choice of settings charged?", self.tuning),
            (
                "What was shown without protection?",
                "; ".join(self.shown_without_protection)
                or "nothing, as stated by whoever ran this",
            ),
            ("Where did the randomness come from?", self._randomness),
        ]

    def _together(self) -> list[tuple[str, str]]:
        if self.ledger is None or "budget" not in self.ledger:
            return []
        budget = self.ledger["budget"]
        return [
            (
                "What do all runs on these records cost together?",
                f"at most epsilon {upwards(budget['epsilon'], 6)}, delta "
                f"{upwards(budget['delta'], 6)}, however they were chosen: they share one budget, "
                f"of which {percent_upwards(budget['used'])} was used after this run",
            )
        ]

    @property
    def _delta_of_two(self) -> float:
        """(1 + e^ε) δ, which with 2ε holds for data sets that differ in two records."""
        return min((1 + math.exp(min(self.epsilon, 700))) * self.delta, 1.0)

    def limits(self) -> list[str]:
        """What the guarantee does not cover."""
        return [
            "The public records: everything about them may be learned from the model.",
            "What follows from the population as a whole. A model may rightly reveal that smoking "
            "causes cancer, also to the insurer of a smoker whose record was never used.",
            f"Groups: what ties k records together is protected k times less (epsilon "
            f"{upwards(2 * self.epsilon)} for two, at delta {upwards(self._delta_of_two)}).",
            "The private data itself, the machine it lies on, and anything else that was computed "
            "from it outside this run.",
            "Error messages and warnings about private records. They go to the operator's "
            "terminal, marked as not covered, and do not belong in what is published.",
            "An adversary who breaks AES-256, or who measures how long a step takes."
            if self.is_secure
            else "The noise is drawn in floating point by a pseudo-random generator; the guarantee "
            "is for the exact Gaussian that it stands for.",
        ]

    def numbers(self) -> list[tuple[str, str]]:
        """Everything that epsilon depends on, named."""
        n = "not stated" if self.num_examples is None else f"{self.num_examples}"
        public = "yes" if self.num_examples_is_public else "no"
        return [
            ("epsilon", upwards(self.epsilon)),
            ("delta", upwards(self.delta, 6)),
            ("adjacency (which data sets are neighbours)", self.adjacency.value),
            ("unit (what one record is)", self.unit),
            ("sampling", f"{self.sampling}, probability {_number(self.sampling_prob)}"),
            ("steps that read private data", f"{self.charged_steps}"),
            ("noise multiplier (noise over clip norm)", _number(self.noise_multiplier)),
            *self._charged_numbers(),
            ("noise", self.noise),
            ("clip norm", _number(self.l2_clip_norm)),
            ("divisor of the noisy sum (a constant)", _number(self.divisor)),
            ("number of records", n),
            ("number of records counts as public", public),
            ("accountant", self.accountant_method),
            *self._ledger_numbers(),
        ]

    def _charged_numbers(self) -> list[tuple[str, str]]:
        if self.charged_multiplier is None:
            return []
        # Rounded down: less noise, a larger epsilon.
        shown = math.floor(1e6 * self.charged_multiplier) / 1e6
        return [("the same as charged, for the lattice", f"{shown:.10g}")]

    def _ledger_numbers(self) -> list[tuple[str, str]]:
        if self.ledger is None:
            return []
        return [("ledger", f"{self.ledger['length']} records, head {self.ledger['head']}")]

    def write(self, directory: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Writes `report.json` and `privacy_card.md`; returns their paths.

        Each file appears whole or not at all. The directory is made if it is not there.
        """
        folder = Path(directory)
        report, card = folder / "report.json", folder / "privacy_card.md"
        write_atomically(report, self.to_json().encode())
        write_atomically(card, self.privacy_card().encode())
        return report, card


def _charged_multiplier(mechanism: Mechanism) -> float | None:
    charged = mechanism.noise.accounted_multiplier(
        mechanism.noise_multiplier, mechanism.l2_clip_norm
    )
    return None if charged == mechanism.noise_multiplier else float(charged)


def _ledger_statement(ledger: Ledger | None, budget: Budget | None) -> dict[str, Any] | None:
    """Length and head, so that a tail that is cut later is noticed; nothing about the data."""
    if budget is not None:
        status = budget.status
        return {
            **status.position._asdict(),
            "budget": {
                "epsilon": status.epsilon,
                "delta": status.delta,
                "runs": status.runs,
                "used": status.used,
            },
        }
    return ledger.position._asdict() if isinstance(ledger, FileLedger) else None


@dataclasses.dataclass(frozen=True)
class Curve:
    """One method's repeated runs, for `comparison_figure` and the page of `mirrordp report`.

    Attributes:
        label: the method's name.
        steps: the step numbers at which it was evaluated.
        values: [trials, len(steps)], smaller is better; made of released values only.
        quantity: what was evaluated, such as "test loss".
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    quantity: str = "loss"

    def __post_init__(self):
        steps, values = np.asarray(self.steps), np.asarray(self.values, float)
        if steps.ndim != 1 or values.ndim != 2 or values.shape[1:] != steps.shape or not len(steps):
            raise ValueError(
                f"values of curve {self.label!r} must have the shape [trials, {len(steps)}], got "
                f"{list(values.shape)}. Give one row per trial, one column per step."
            )
        if "unprivatized" in f"{self.label} {self.quantity}".lower():
            raise ValueError(
                f"curves must hold released values only, got {self.quantity!r} of {self.label!r}, "
                "which is not covered by the privacy guarantee. Leave it out."
            )
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "values", values)

    def to_dict(self) -> dict[str, Any]:
        """Plain types; a value that is not finite is None."""
        values = [[x if math.isfinite(x) else None for x in row] for row in self.values.tolist()]
        return {
            "label": self.label,
            "quantity": self.quantity,
            "steps": self.steps.tolist(),
            "values": values,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Curve":
        """The inverse of `to_dict`, with NaN for None."""
        values = [[math.nan if x is None else x for x in row] for row in content["values"]]
        label, quantity = content["label"], content["quantity"]
        if not isinstance(label, str) or not isinstance(quantity, str):
            raise TypeError("label and quantity of a curve must be strings")
        steps = np.array(content["steps"])
        if steps.dtype.kind not in "iuf":
            raise TypeError("steps of a curve must be numbers")
        return cls(label, steps, np.array(values, float), quantity)

    @property
    def mean(self) -> np.ndarray:
        """The mean over trials at each step."""
        return self.values.mean(axis=0)

    @property
    def standard_error(self) -> np.ndarray:
        """The standard error of that mean; zero for a single trial."""
        trials = len(self.values)
        if trials < 2:
            return np.zeros(self.values.shape[1])
        return self.values.std(axis=0, ddof=1) / math.sqrt(trials)


_MARKERS = ("s", "^", "o", "D", "v", "P")


def comparison_figure(
    curves: Sequence[Curve], *, title: str, quantity: str, subtitle: str = ""
) -> bytes:
    """A PNG: each method's course on the left, where it ended with error bars on the right.

    Args:
        curves: the methods, at most six.
        title: the finding, in a line.
        quantity: what is measured; smaller is better.
        subtitle: the circumstances, in a line.
    """
    from matplotlib.figure import Figure

    if not 1 <= len(curves) <= len(PALETTE):
        raise ValueError(f"a figure shows 1 to {len(PALETTE)} methods, got {len(curves)}.")
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    course, final = figure.subplots(1, 2, width_ratios=(3, 2))
    ends = [curve.mean[-1] for curve in curves]
    best = int(np.argmin(ends))
    for index, curve in enumerate(curves):
        colour, marker = PALETTE[index], _MARKERS[index]
        mean, error = curve.mean, curve.standard_error
        every = max(1, len(curve.steps) // 6)
        course.plot(
            curve.steps, mean, color=colour, marker=marker, markevery=every, ms=5,
            lw=2.6 if index == best else 1.8, label=curve.label,
        )  # fmt: skip
        course.fill_between(
            curve.steps, mean - 2 * error, mean + 2 * error, color=colour, alpha=0.18, lw=0
        )
        final.errorbar(
            mean[-1], index, xerr=2 * error[-1], color=colour, marker=marker, ms=9, capsize=5,
            lw=2.4,
        )  # fmt: skip
        final.annotate(
            f"{mean[-1]:.3f}{'  best' if index == best else ''}",
            (mean[-1], index), xytext=(0, 13), textcoords="offset points", ha="center",
            fontsize=10, fontweight="bold" if index == best else "normal",
        )  # fmt: skip
    course.set(xlabel="training step", ylabel=f"{quantity} (lower is better)")
    course.legend(frameon=False, fontsize=10)
    final.set(xlabel=f"{quantity} at the end", ylim=(len(curves) - 0.4, -0.7))
    final.set_yticks(range(len(curves)), [curve.label for curve in curves], fontsize=10)
    final.margins(x=0.2)
    for axes in (course, final):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes is final else "y", alpha=0.25)
    if subtitle:
        figure.supxlabel(subtitle, fontsize=9, color="#444444", x=0.01, ha="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _agreed(info: Ran, seed: int | None, seeded: bool | None) -> bool:
    """What the run says about its seed; what the caller says besides must not contradict it."""
    found = getattr(info, "seeded", None)
    if not isinstance(found, bool):
        raise TypeError(
            f"info must be what train or federated_train yielded for this run, got "
            f"{type(info).__name__}. Pass the last info; of a sweep, infos[i] of run i."
        )
    if (seed is not None and not found) or seeded not in (None, found):
        given = "a seed" if found else "no seed"
        raise ValueError(
            f"the run says that it was given {given}, got seed={seed!r} and seeded={seeded!r}. "
            "Leave both out, or pass the info of the run that they belong to."
        )
    return found


def _spending(
    mechanism: Mechanism, delta: float, charged_steps: int, points: int = 8
) -> tuple[tuple[int, float], ...]:
    """ε after about `points` step counts up to the last, closer together where it grows faster."""
    if charged_steps == 0:
        return ()
    # ε grows about as the square root of the number of steps.
    counts = {math.ceil(charged_steps * (i / points) ** 2) for i in range(1, points + 1)}
    with warnings.catch_warnings():
        # A delta that is too large has been warned about.
        warnings.simplefilter("ignore")
        return tuple((count, mechanism.epsilon(delta, num_steps=count)) for count in sorted(counts))


def _stored_fields(cls: type[RunReport], content: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `RunReport` from JSON, with every type checked."""
    checks: dict[str, tuple[type | tuple[type, ...], Any]] = {
        "epsilon": ((int, float, type(None)), lambda x: math.inf if x is None else float(x)),
        "adjacency": (str, Adjacency),
        "unit": (str, lambda x: UNITS[UNITS.index(x)]),
        "shown_without_protection": (list, lambda x: tuple(map(_text, x))),
        "versions": (dict, lambda x: {_text(k): _text(v) for k, v in x.items()}),
        "epsilon_over_steps": (list, lambda x: tuple(map(_spent, x))),
        "curves": (list, lambda x: tuple(map(Curve.from_dict, x))),
        "num_examples_is_public": (bool, bool),
        "num_examples": ((int, type(None)), lambda x: x),
        "seed": ((int, type(None)), lambda x: x),
        "seeded": ((bool, type(None)), lambda x: x),
        "charged_steps": (int, int),
        "charged_multiplier": ((int, float), float),
        "ledger": ((dict, type(None)), _ledger_stated),
    }
    checks |= {
        name: ((int, float), float)
        for name in ("delta", "sampling_prob", "noise_multiplier", "l2_clip_norm", "divisor")
    }
    checks |= {
        name: (str, str)
        for name in (
            *("title", "sampling", "noise", "accountant", "accountant_method", "scope", "tuning"),
        )
    }
    optional = {"seed": None}
    found = {}
    for field in dataclasses.fields(cls):
        name = field.name
        if name not in content and (name in optional or field.default is not dataclasses.MISSING):
            found[name] = optional.get(name, field.default)
            continue
        value = _plain(content[name], name)
        kinds, convert = checks.get(name, ((dict, type(None)), lambda x: x))
        is_stray = isinstance(value, bool) and name not in ("num_examples_is_public", "seeded")
        if not isinstance(value, kinds) or is_stray:
            raise TypeError(f"{name} is of the wrong type")
        found[name] = convert(value)
    negative = [k for k, v in found.items() if isinstance(v, int | float) and v < 0]
    if negative or not 0 < found["delta"] < 1:
        raise ValueError(f"{(*negative, 'delta')[0]} is out of range")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text is of the wrong type")
    return value


def _spent(pair: Any) -> tuple[int, float]:
    steps, epsilon = pair
    if not isinstance(steps, int) or not isinstance(epsilon, int | float | None):
        raise TypeError("epsilon_over_steps is of the wrong type")
    return steps, math.inf if epsilon is None else float(epsilon)


def _ledger_stated(content: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The ledger's position, and the budget where there is one; anything else is refused."""
    if content is None:
        return None
    found: dict[str, Any] = {"length": int(content["length"]), "head": _text(content["head"])}
    if "budget" in content:
        names = ("epsilon", "delta", "runs", "used")
        budget = {name: content["budget"][name] for name in names}
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in budget.values()):
            raise TypeError("the budget must hold finite numbers")
        found["budget"] = budget
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _plain(value: Any, name: str) -> Any:
    """Numbers, strings, lists and dictionaries only; anything else does not belong in a report."""
    if isinstance(value, Adjacency):
        return value.value
    if isinstance(value, Curve):
        return value.to_dict()
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float | np.number):
        number = value.item() if isinstance(value, np.number) else value
        return number if math.isfinite(number) else None
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys of {name} must be strings, got {key!r}.")
            if "unprivatized" in key.lower():
                raise ValueError(
                    f"{name} must hold released values only, got {key!r}, which is not covered by "
                    "the privacy guarantee. Leave it out."
                )
        return {key: _plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{name} must be a number, a string, or a list or dictionary of such, got "
        f"{type(value).__name__}. Convert it with float(...) or .tolist()."
    )


def _number(value: float) -> str:
    return f"{value:.6g}"


def upwards(epsilon: float, digits: int = 4) -> str:
    """So many digits, rounded up: a guarantee must not read stronger than it is.

    >>> upwards(1.23412)
    '1.235'
    """
    if epsilon == 0 or not math.isfinite(epsilon):
        return "0" if epsilon == 0 else "infinite"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - digits + 1)
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:.{digits}g}"


def percent_upwards(share: float) -> str:
    """A percentage, rounded up for the same reason.

    >>> percent_upwards(0.1 + 0.2)
    '30%'
    """
    return f"{min(math.ceil(1000 * share - 1e-9) / 10, 100):g}%"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
