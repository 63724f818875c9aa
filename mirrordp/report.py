"""What a run promises, in writing: `RunReport` in, JSON, a privacy card and a figure out.

A report is made of public constants (the mechanism, the number of charged steps, δ) and of what the
caller states about the run. It holds nothing that depends on private rows without noise: the number
of rows appears only where the adjacency makes it public, and a seed only where the caller gave one.
"""

import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mirrordp import _validate
from mirrordp._files import write_atomically
from mirrordp._versions import library_versions
from mirrordp.accounting import Adjacency
from mirrordp.budget import Budget
from mirrordp.ledger import FileLedger, Ledger
from mirrordp.mechanism import Mechanism

SECURE_NOISE = "independent Gaussian, secure: exact on a lattice, keyed by the operating system"
NOT_FOR_RELEASE = "reproducible, not for release"
TUNING_NOT_CHARGED = (
    "not charged: epsilon covers this training alone, not runs made to choose its settings"
)

Results = Mapping[str, Any]


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
        seed: the seed that the caller gave; None where the operating system provided randomness.
        versions: library versions.
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
    results: Results
    ledger: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        delta: float,
        *,
        charged_steps: int | None = None,
        ledger: Ledger | None = None,
        budget: Budget | None = None,
        title: str = "A model trained with mirrordp",
        scope: str | None = None,
        tuning: str = TUNING_NOT_CHARGED,
        shown_without_protection: Sequence[str] = (),
        seed: int | None = None,
        results: Results | None = None,
    ) -> "RunReport":
        """The report of a run of `mechanism`.

        Args:
            mechanism: what ran.
            delta: δ in (0, 1).
            charged_steps: how many steps read private data (`info.charged_steps`); by default all
                that the mechanism was made for.
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
            seed: the seed given to `train`, if any.
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
            versions=library_versions(),
            results=_plain(results or {}, "results"),
            ledger=_ledger_statement(ledger, budget),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types in a fixed order; an infinite ε is None, which JSON can hold."""
        fields = {
            field.name: _plain(getattr(self, field.name), field.name)
            for field in dataclasses.fields(self)
        }
        fields["randomness"] = self._randomness
        if self.seed is None:
            del fields["seed"]
        if self.ledger is None:
            del fields["ledger"]
        results = fields.pop("results")
        return fields | {"results": results}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    @property
    def _randomness(self) -> str:
        if self.seed is None:
            return "from the operating system; it is no part of what is released"
        return f"from the seed given by the caller: {NOT_FOR_RELEASE}"

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
                *(f"| {question} | {answer} |" for question, answer in self._answers()),
                "",
                "## What is not protected",
                "",
                *(f"- {line}" for line in self._limits()),
                "",
                "## The numbers",
                "",
                "| quantity | value |",
                "|---|---|",
                *(f"| {name} | {value} |" for name, value in self._numbers()),
                "",
                "Versions: " + ", ".join(f"{k} {v}" for k, v in self.versions.items()) + ".",
                "",
            ]
        )

    def _opening(self) -> list[str]:
        lines = []
        if self.seed is not None:
            lines += [
                f"**This run is {NOT_FOR_RELEASE}**: all of its randomness comes from a seed, and "
                "who knows the seed can subtract the noise. Train without a seed before you "
                "publish.",
                "",
            ]
        if not math.isfinite(self.epsilon):
            return [*lines, "**No protection**: no noise was added, so epsilon is infinite."]
        certainty = (math.exp(min(self.epsilon, 700)) + self.delta) / (
            1 + math.exp(min(self.epsilon, 700))
        )
        return [
            *lines,
            f"Training looked at private records, one {self.unit} each, through noise. Whoever "
            f"studies the model learns nearly the same whether or not {self._difference}: the "
            f"guarantee is differential privacy with epsilon = {upwards(self.epsilon)} and "
            f"delta = {_number(self.delta)}. For scale: someone who would have to toss a coin to "
            f"tell which of the two it was is right at most {_percent(certainty)} of the time "
            "after seeing the model, whatever else they know.",
        ]

    @property
    def _difference(self) -> str:
        return {
            Adjacency.ADD_REMOVE: f"any one {self.unit} was in the data",
            Adjacency.ZERO_OUT: f"any one {self.unit} was used",
            Adjacency.REPLACE: f"any one {self.unit} was exchanged for another",
        }[self.adjacency]

    def _answers(self) -> list[tuple[str, str]]:
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
                "knowledge, with any computing power",
            ),
            ("How strongly?", f"epsilon {upwards(self.epsilon)}, delta {_number(self.delta)}"),
            ("What does this cover?", _cell(self.scope)),
            *self._together(),
            ("Is the number of records hidden?", count),
            ("Was the choice of settings charged?", _cell(self.tuning)),
            (
                "What was shown without protection?",
                _cell("; ".join(self.shown_without_protection))
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
                f"at most epsilon {_number(budget['epsilon'])}, delta {_number(budget['delta'])}, "
                f"however they were chosen: they share one budget, of which "
                f"{_percent(budget['used'])} was used after this run",
            )
        ]

    def _limits(self) -> list[str]:
        return [
            "The public records: everything about them may be learned from the model.",
            "What follows from the population as a whole. A model may rightly reveal that smoking "
            "causes cancer, also to the insurer of a smoker whose record was never used.",
            f"Groups: what ties k records together is protected k times less (epsilon "
            f"{upwards(2 * self.epsilon)} for two, at a somewhat larger delta).",
            "The private data itself, the machine it lies on, and anything else that was computed "
            "from it outside this run.",
            "Error messages and warnings about private records. They go to the operator's "
            "terminal, marked as not covered, and do not belong in what is published.",
            "Errors of floating-point arithmetic beyond the allowance that was charged, and an "
            "adversary who breaks AES-256."
            if self.noise == SECURE_NOISE
            else "The noise is drawn in floating point by a pseudo-random generator; the guarantee "
            "is for the exact Gaussian that it stands for.",
        ]

    def _numbers(self) -> list[tuple[str, str]]:
        n = "not stated" if self.num_examples is None else f"{self.num_examples}"
        public = "yes" if self.num_examples_is_public else "no"
        return [
            ("epsilon", upwards(self.epsilon)),
            ("delta", _number(self.delta)),
            ("adjacency (which data sets are neighbours)", self.adjacency.value),
            ("unit (what one record is)", self.unit),
            ("sampling", f"{self.sampling}, probability {_number(self.sampling_prob)}"),
            ("steps that read private data", f"{self.charged_steps}"),
            ("noise multiplier (noise over clip norm)", _number(self.noise_multiplier)),
            ("noise", self.noise),
            ("clip norm", _number(self.l2_clip_norm)),
            ("divisor of the noisy sum (a constant)", _number(self.divisor)),
            ("number of records", n),
            ("number of records counts as public", public),
            ("accountant", self.accountant_method),
            *self._ledger_numbers(),
        ]

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
    """One method's repeated runs, for `comparison_figure`.

    Attributes:
        label: the method's name.
        steps: the step numbers at which it was evaluated.
        values: [trials, len(steps)], smaller is better; made of released values only.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray

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


# Okabe and Ito's palette, told apart under every common colour blindness.
_COLOURS = ("#7f7f7f", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9")
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

    if not 1 <= len(curves) <= len(_COLOURS):
        raise ValueError(f"a figure shows 1 to {len(_COLOURS)} methods, got {len(curves)}.")
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    course, final = figure.subplots(1, 2, width_ratios=(3, 2))
    ends = [curve.mean[-1] for curve in curves]
    best = int(np.argmin(ends))
    for index, curve in enumerate(curves):
        colour, marker = _COLOURS[index], _MARKERS[index]
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


def _plain(value: Any, name: str) -> Any:
    """Numbers, strings, lists and dictionaries only; anything else does not belong in a report."""
    if isinstance(value, Adjacency):
        return value.value
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


def _percent(share: float) -> str:
    """Rounded up, for the same reason."""
    return f"{min(math.ceil(1000 * share) / 10, 100):g}%"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
