"""Table and figure from the records; computes no experiment."""

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import sections
from experiments.records import Record
from mirrordp.report import upwards

LABELS = {"cold": "DP-FedAvg cold", "warm": "DP-FedAvg warm", "pda": "PDA-DPMD warm"}
PAPER = {"cold": (18.52, 116.21), "warm": (21.2, 85.03), "pda": (21.77, 80.51)}
# What is larger is shown as "> 1e6".
LARGEST = 1e6
# Okabe and Ito's palette; markers tell the lines apart in grey.
STYLES = {"cold": ("#0072B2", "s"), "warm": ("#D55E00", "o"), "pda": ("#009E73", "^")}


def final(found: Sequence[Record]) -> list[Record]:
    """Returns the runs to compare: of the most rounds, at the settings of the newest.

    A later search may have chosen other settings than an earlier one; means never mix them.
    """
    runs = _longest([record for record in found if record["job"]["stage"] == "final"])
    runs = [record for record in runs if _rates(record) == _rates(runs[-1])]
    divisors = [record["job"]["divisor"] for record in runs if record["job"]["divisor"] is not None]
    return [record for record in runs if record["job"]["divisor"] in (None, *divisors[-1:])]


def _rates(record: Record) -> list[float]:
    return [record["job"][name] for name in ("server_rate", "client_rate", "clip")]


def _longest(runs: Sequence[Record]) -> list[Record]:
    most = max((record["job"]["rounds"] for record in runs), default=0)
    return [record for record in runs if record["job"]["rounds"] == most]


def newest(found: Sequence[Record]) -> list[Record]:
    """Returns the lines that share data and sizes with the newest; others cannot be compared."""
    return [record for record in found if record["key"] == found[-1]["key"]]


def title(record: Record) -> str:
    """Returns a title for the numbers, with the ε that belongs to them."""
    facts, job = record["facts"], record["job"]
    name = "STAND-IN for StackOverflow (Stack Exchange)" if facts["stand_in"] else "StackOverflow"
    epsilon = "infinite" if record["epsilon"] is None else upwards(record["epsilon"])
    return (
        f"{name}: {facts['private_users']:,} private and {facts['public_users']} public users, "
        f"{job['rounds']} rounds, noise multiplier {job['noise_multiplier']:.3f}, "
        f"ε = {epsilon} at δ = {record['delta']:g} per {record['unit']} "
        f"({record['adjacency']}, {record['sampling']}, {record['accountant']}; tuning not charged)"
    )


def _number(value: float, digits: int) -> str:
    """Formats a number, or says that it is useless: a perplexity can have a hundred digits."""
    if abs(value) <= LARGEST:
        return f"{value:.{digits}f}"
    return "> 1e6" if value > 0 else "< -1e6"


def _mean(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    if len(values) == 1 or abs(mean) > LARGEST:
        return _number(mean, 2)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}"


def _gain(runs: Sequence[Record], metric: str, scale: float) -> str:
    """Returns PDA-DPMD minus warm, seed by seed: both have the same start, cohorts and noise."""
    by_seed: dict[int, dict[str, float]] = {}
    for record in runs:
        by_seed.setdefault(record["job"]["seed"], {})[record["job"]["method"]] = record["metrics"][
            metric
        ]
    pairs = [own for own in by_seed.values() if None not in (own.get("pda"), own.get("warm"))]
    return _mean([scale * (own["pda"] - own["warm"]) for own in pairs]) if pairs else "unknown"


def _search(found: Sequence[Record], runs: Sequence[Record]) -> list[str]:
    """Describes how the settings of the final runs were chosen."""
    noise = runs[0]["job"]["noise_multiplier"]
    lines = []
    for stage, name in (("rates", "server rate, client rate, clip"), ("alpha", "i")):
        points = _longest(
            [
                record
                for record in found
                if record["job"]["stage"] == stage
                and math.isclose(record["job"]["noise_multiplier"], noise, rel_tol=1e-5)
                and (stage == "rates" or _rates(record) == _rates(runs[0]))
            ]
        )
        if not points:
            continue
        lines += [
            "",
            f"Search of {name}: seed 0, {points[0]['job']['rounds']} rounds, perplexity of "
            "held-out private users (not covered by the guarantee):",
            "",
            f"| {name} | perplexity |",
            "|---|---|",
        ]
        for record in sorted(points, key=lambda r: r["validation"]["perplexity"] or float("inf")):
            perplexity = record["validation"]["perplexity"]
            values = _rates(record) if stage == "rates" else [record["job"]["divisor"]]
            setting = ", ".join(f"{value:g}" for value in values)
            shown = "diverged" if perplexity is None else _number(perplexity, 1)
            lines.append(f"| {setting} | {shown} |")
    return lines


def _check(found: Sequence[Record]) -> list[str]:
    """Describes the run with the paper's noise, whose ε means nothing on few users."""
    lines = []
    for record in found:
        if record["job"]["stage"] == "check":
            epsilon = "infinite" if record["epsilon"] is None else upwards(record["epsilon"])
            lines += [
                "",
                f"Mechanics only, not a result: {record['job']['rounds']} rounds with the paper's "
                f"noise multiplier {record['job']['noise_multiplier']:g} have ε = {epsilon} here.",
            ]
    return lines


def table(found: Sequence[Record]) -> str:
    """Tabulates mean ± standard deviation over seeds, with the paper's numbers beside them."""
    runs = final(found)
    if not runs:
        return "\n".join(["No final run yet.", *_check(found)]) + "\n"
    lines = [
        title(runs[0]),
        "",
        "| method | seeds | accuracy, % | perplexity | in-vocabulary perplexity "
        "| paper, StackOverflow, ε 8.32 |",
        "|---|---|---|---|---|---|",
    ]
    for method, label in LABELS.items():
        own = [record for record in runs if record["job"]["method"] == method]
        whole = [r["metrics"] for r in own if None not in r["metrics"].values()]
        if not own:
            continue
        cells = ["diverged"] * 3
        if len(whole) == len(own):
            cells = [
                _mean([100 * metrics["accuracy"] for metrics in whole]),
                _mean([metrics["perplexity"] for metrics in whole]),
                _mean([metrics["word_perplexity"] for metrics in whole]),
            ]
        lines.append(
            f"| {label} | {len(own)} | {' | '.join(cells)} | "
            f"{PAPER[method][0]}% / {PAPER[method][1]} |"
        )
    job, facts = runs[0]["job"], runs[0]["facts"]
    divisors = {r["job"]["divisor"] for r in runs if r["job"]["divisor"] is not None}
    lines += [
        "",
        f"Server rate {job['server_rate']:g}, client rate {job['client_rate']:g}, clip "
        f"{job['clip']:g}, α_t = cos(πt/(iT)) with i = {', '.join(map(str, sorted(divisors)))}. "
        f"Vocabulary of {facts['vocabulary_words']:,} words from {facts['vocabulary_from']} "
        f"users; {100 * facts['test_unknown']:.1f}% of test words are unknown. Public users: "
        f"{facts['public_from']}. Not covered by the guarantee: {'; '.join(facts['not_covered'])}.",
    ]
    if {"warm", "pda"} <= {record["job"]["method"] for record in runs}:
        lines += [
            "",
            f"PDA-DPMD minus warm, seed by seed: accuracy {_gain(runs, 'accuracy', 100)} points, "
            f"perplexity {_gain(runs, 'perplexity', 1)}.",
        ]
    return "\n".join(lines + _search(found, runs) + _check(found)) + "\n"


def figure(found: Sequence[Record], path: Path) -> None:
    """Draws accuracy and perplexity on test users against rounds: mean and range over seeds."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    runs = final(found)
    drawing = Figure(figsize=(9, 3.6), layout="constrained")
    panels = drawing.subplots(1, 2)
    for axes, metric, label in zip(
        panels, ("accuracy", "perplexity"), ("accuracy, in-vocabulary", "perplexity"), strict=True
    ):
        for method, (color, marker) in STYLES.items():
            curves = [
                {point["round"]: point[metric] for point in record["curve"]}
                for record in runs
                if record["job"]["method"] == method
            ]
            common = sorted(set.intersection(*map(set, curves))) if curves else []
            seen = {number: [curve[number] for curve in curves] for number in common}
            seen = {number: values for number, values in seen.items() if None not in values}
            # A cold start begins at the size of the vocabulary, which would hide all the rest.
            seen = {
                number: values
                for number, values in seen.items()
                if metric == "accuracy" or statistics.mean(values) < 2000
            }
            if seen:
                means = [statistics.mean(values) for values in seen.values()]
                axes.plot(list(seen), means, color=color, marker=marker, label=LABELS[method])
                lowest, highest = zip(*((min(v), max(v)) for v in seen.values()), strict=True)
                axes.fill_between(list(seen), lowest, highest, color=color, alpha=0.2, linewidth=0)
        axes.set(xlabel="round", ylabel=label)
    panels[1].set_yscale("log")
    panels[1].yaxis.set_major_formatter(ScalarFormatter())
    panels[1].yaxis.set_minor_formatter(ScalarFormatter())
    panels[0].legend(frameon=False)
    record = runs[0]
    stand_in = "STAND-IN (Stack Exchange)" if record["facts"]["stand_in"] else "StackOverflow"
    drawing.suptitle(
        f"{stand_in}, {record['facts']['private_users']:,} private users, "
        f"ε = {upwards(record['epsilon'])} at δ = {record['delta']:g} per user",
        fontsize=10,
    )
    # Text stays text, and the same lines give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stackoverflow"}):
        drawing.savefig(path, metadata={"Date": None})


def write(found: Sequence[Record], out: Path, *, readme: Path | None = None) -> None:
    """Writes table.md, the marked section of `readme`, and, with matplotlib there, figure.svg."""
    text = table(found)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text)
    print(text)
    if readme is not None:
        whole = sections.replaced(readme.read_text(encoding="utf-8"), "stackoverflow", text)
        readme.write_text(whole, encoding="utf-8")
    if not final(found):
        return
    try:
        figure(found, out / "figure.svg")
    except ModuleNotFoundError as error:
        print(f"no figure: {error}", file=sys.stderr)
