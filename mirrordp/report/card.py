"""The privacy card: a report in plain words, as Markdown.

Every function takes a `RunReport` and returns text. The page of `mirrordp report` and the table of
a notebook are made of the same texts.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from mirrordp._rounding import floored, percent_upwards, upwards
from mirrordp.privacy.accounting import Adjacency

if TYPE_CHECKING:
    from mirrordp.report.statement import RunReport

NOT_FOR_RELEASE = "reproducible, not for release"
WEAK_EPSILON = 10.0
"""Above this ε the certainty bound is 99.99%: the guarantee by itself says next to nothing."""
WHO_IS_PROTECTED = {
    "example": "every single example (row). A person with several rows is protected less",
    "user": "every user, with all of the user's rows together",
}
"""The answer for each unit of privacy."""


@dataclasses.dataclass(frozen=True)
class Caution:
    """Something that a reader of a report must know before relying on it.

    Attributes:
        grave: whether the model should not be released as it is.
        title: what it is about, in a few words.
        text: what it means and what to do, in sentences.
        weakens: whether the guarantee is weak, so that whoever reads it must know.
    """

    grave: bool
    title: str
    text: str
    weakens: bool = False


def privacy_card(report: "RunReport") -> str:
    """Returns the whole card."""
    return "\n".join(
        [
            f"# Privacy card: {_cell(report.title)}",
            "",
            *_opening(report),
            "",
            "| question | answer |",
            "|---|---|",
            *(f"| {question} | {_cell(answer)} |" for question, answer in answers(report)),
            "",
            "## What is not protected",
            "",
            *(f"- {line}" for line in limits(report)),
            "",
            "## The numbers",
            "",
            "| quantity | value |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in numbers(report)),
            "",
            "Versions: " + ", ".join(f"{k} {v}" for k, v in report.versions.items()) + ".",
            "",
        ]
    )


def _opening(report: "RunReport") -> list[str]:
    lines = []
    for caution in cautions(report):
        if caution.grave or caution.weakens:
            lines += [f"**{caution.title}**: {caution.text}", ""]
    return [*lines, statement(report)] if math.isfinite(report.epsilon) else lines[:-1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float) -> str:
    return f"{value:.6g}"


def cautions(report: "RunReport") -> list[Caution]:
    """Returns what to know before relying on the guarantee, the gravest first."""
    found = []
    if report.seeded:
        found.append(
            Caution(
                True,
                f"This run is {NOT_FOR_RELEASE}",
                "all of its randomness comes from a seed, and anyone who knows the seed can "
                "subtract the noise. Train without a seed before you publish.",
            )
        )
    if not math.isfinite(report.epsilon):
        found.append(Caution(True, "No protection", f"{_why_infinite(report)}."))
    elif report.epsilon > WEAK_EPSILON:
        found.append(
            Caution(
                False,
                f"Epsilon {upwards(report.epsilon)} is large",
                "the guarantee rules out little by itself. Use more noise, fewer steps or more "
                "records if the records are sensitive.",
                weakens=True,
            )
        )
    if report.seeded is None:
        found.append(
            Caution(
                False,
                "Whether there was a seed is not known",
                "anyone who knows the seed of a run can subtract its noise. Pass the last info of "
                "the run, which states it: RunReport.of(..., info=info).",
            )
        )
    if _has_large_delta(report):
        found.append(
            Caution(
                False,
                f"Delta {_number(report.delta)} is above one over the number of records",
                "a mechanism that publishes a record at random would pass. Choose a smaller delta.",
                weakens=True,
            )
        )
    if report.shown_without_protection:
        found.append(
            Caution(
                False,
                "Something was shown without protection",
                "; ".join(report.shown_without_protection) + ". Epsilon does not cover it.",
            )
        )
    if report.tuning.startswith("not charged"):
        found.append(Caution(False, "The choice of settings was not charged", f"{report.tuning}."))
    return found


def statement(report: "RunReport") -> str:
    """Returns the guarantee in two sentences."""
    if not math.isfinite(report.epsilon):
        return f"There is no guarantee: {_why_infinite(report)}."
    if report.charged_steps == 0 and report.epsilon == 0:
        return "No step of training read private records: the model says nothing about them."
    difference = {
        Adjacency.ADD_REMOVE: f"any one {report.unit} was in the data",
        Adjacency.ZERO_OUT: f"any one {report.unit} was used",
        Adjacency.REPLACE: f"any one {report.unit} was exchanged for another",
    }[report.adjacency]
    return (
        f"The model learned from private records, one {report.unit} each, through noise alone. "
        f"Anyone who studies it learns nearly the same whether or not {difference}: the "
        f"guarantee is differential privacy with epsilon = {upwards(report.epsilon)} and "
        f"delta = {upwards(report.delta, 6)}. For scale: someone who could only guess which of the "
        f"two it was, and be right half the time, is right at most "
        f"{percent_upwards(report.certainty)} of the time with the model, whatever else they know."
    )


def _why_infinite(report: "RunReport") -> str:
    if report.noise_multiplier == 0:
        return "no noise was added, so epsilon is infinite"
    return "the accountant found no finite epsilon for so little noise"


def _has_large_delta(report: "RunReport") -> bool:
    return bool(report.num_examples) and report.delta > 1 / report.num_examples


def answers(report: "RunReport") -> list[tuple[str, str]]:
    """Returns the questions that a reader asks, each with its answer."""
    size_of_delta = (
        "here above one over the number of records, where a mechanism that publishes a record at "
        "random would pass"
        if _has_large_delta(report)
        else "to be kept far below one over the number of records"
    )
    neighbours = {
        Adjacency.ADD_REMOVE: f"any two, one of which has one {report.unit} more (add-remove)",
        Adjacency.ZERO_OUT: f"any two that differ in whether one {report.unit} counts or is "
        "blank (zero-out)",
        Adjacency.REPLACE: f"any two that differ in what one {report.unit} contains (replace)",
    }[report.adjacency]
    count = (
        "no: the number of records counts as public"
        if report.num_examples_is_public
        else "yes: the number of records is not revealed either"
    )
    return [
        ("What is protected?", "what the private records contain"),
        ("For whom?", WHO_IS_PROTECTED[report.unit]),
        (
            "Against what?",
            "anyone who has the model, every gradient released in training and any other "
            "knowledge, with any computing power short of what breaks the random generator",
        ),
        (
            "How strongly?",
            f"epsilon {upwards(report.epsilon)}, delta {upwards(report.delta, 6)}. Epsilon bounds "
            "how much more likely any outcome can become through one record; delta is a small "
            f"allowance on top, {size_of_delta}",
        ),
        ("Which data sets must look alike?", neighbours),
        ("How were records read?", _reading(report)),
        ("How was epsilon found?", f"by the accountant {report.accountant_method}"),
        ("What does this cover?", report.scope),
        *_together(report),
        ("Is the number of records hidden?", count),
        ("Was the choice of settings charged?", report.tuning),
        (
            "What was shown without protection?",
            "; ".join(report.shown_without_protection) or "nothing, as stated by whoever ran this",
        ),
        ("Where did the randomness come from?", randomness(report)),
    ]


def _reading(report: "RunReport") -> str:
    if report.charged_steps == 0:
        return "not at all: no step read private records"
    each = ""
    if report.selection is not None:
        each = f"in each of a random number of runs ({report.selection}), whose best this is: "
    return (
        f"{each}in {report.charged_steps} steps, by {report.sampling} sampling with probability "
        f"{_number(report.sampling_prob)}. Each contribution was cut to norm "
        f"{_number(report.l2_clip_norm)}, and "
        f"{'independent Gaussian' if report.is_secure else report.noise} noise of "
        f"{_number(report.noise_multiplier)} times that norm was added to their sum"
        + (", in integers on a lattice" if report.is_secure else "")
    )


def _together(report: "RunReport") -> list[tuple[str, str]]:
    if report.ledger is None or "budget" not in report.ledger:
        return []
    budget = report.ledger["budget"]
    return [
        (
            "What do all runs on these records cost together?",
            f"at most epsilon {upwards(budget['epsilon'], 6)}, delta "
            f"{upwards(budget['delta'], 6)}, however they were chosen: they share one budget, "
            f"of which {percent_upwards(budget['used'])} was used after this run",
        )
    ]


def randomness(report: "RunReport") -> str:
    """Returns where noise and batches came from."""
    if report.is_secure:
        return (
            "noise and batches from AES-256, keyed by the operating system afresh for every draw; "
            "there is no seed, and nobody can repeat the run"
        )
    if report.seeded is None:
        return (
            "not known: whether a seed was given to the run is not stated. With a seed it would be "
            f"{NOT_FOR_RELEASE}"
        )
    if report.seeded:
        return f"from the seed given by the caller: {NOT_FOR_RELEASE}"
    return "from the operating system; it is no part of what is released"


def limits(report: "RunReport") -> list[str]:
    """Returns what the guarantee does not cover."""
    # Data sets that differ in two records: 2ε and (1 + e^ε) δ.
    delta_of_two = min((1 + math.exp(min(report.epsilon, 700))) * report.delta, 1.0)
    return [
        "The public records: everything about them may be learned from the model.",
        "What follows from the population as a whole. A model may rightly reveal that smoking "
        "causes cancer, also to the insurer of a smoker whose record was never used.",
        f"Groups: what k records have in common is protected k times less (epsilon "
        f"{upwards(2 * report.epsilon)} for two, at delta {upwards(delta_of_two)}).",
        "The private data itself, the machine it lies on, and anything else that was computed "
        "from it outside this run.",
        "Error messages and warnings about private records. They go to the operator's "
        "terminal, marked as not covered, and do not belong in what is published.",
        "An adversary who breaks AES-256, or who measures how long a step takes."
        if report.is_secure
        else "The noise is drawn in floating point by a pseudo-random generator; the guarantee "
        "is for the exact Gaussian that it stands for.",
    ]


def numbers(report: "RunReport") -> list[tuple[str, str]]:
    """Returns everything that ε depends on, each with its name."""
    charged, ledger = [], []
    if report.charged_multiplier is not None:
        # Rounded down: less noise means a larger ε.
        shown = floored(report.charged_multiplier, 6)
        charged = [("noise multiplier as charged, for the lattice", f"{shown:.10g}")]
    if report.ledger is not None:
        position = f"{report.ledger['length']} records, head {report.ledger['head']}"
        ledger = [("ledger", position)]
    n = "not stated" if report.num_examples is None else f"{report.num_examples}"
    public = "yes" if report.num_examples_is_public else "no"
    return [
        ("epsilon", upwards(report.epsilon)),
        ("delta", upwards(report.delta, 6)),
        ("adjacency (which data sets are neighbours)", report.adjacency.value),
        ("unit (what one record is)", report.unit),
        ("sampling", f"{report.sampling}, probability {_number(report.sampling_prob)}"),
        ("steps that read private data", f"{report.charged_steps}"),
        *([("number of runs to choose from", report.selection)] if report.selection else []),
        ("noise multiplier (noise over clip norm)", _number(report.noise_multiplier)),
        *charged,
        ("noise", report.noise),
        ("clip norm", _number(report.l2_clip_norm)),
        ("divisor of the noisy sum (a constant)", _number(report.divisor)),
        ("number of records", n),
        ("number of records counts as public", public),
        ("accountant", report.accountant_method),
        *ledger,
    ]
