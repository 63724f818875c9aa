"""Table and figure of the comparison, from its records; computes no experiment."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments import sections
from experiments.records import Record
from experiments.tabular.methods import (
    COLD,
    EPSILONS,
    LABELS,
    NON_PRIVATE,
    OURS,
    PEER,
    PRIVATE,
    PUBLIC,
    START,
    WARM,
)

METRICS = {
    "housing": (("rmse", "RMSE, dollars", ".0f", -1), ("r2", "R²", ".4f", 1)),
    "adult": (("log_loss", "log-loss", ".4f", -1), ("accuracy", "accuracy", ".4f", 1)),
}
TITLES = {"housing": "California housing", "adult": "UCI Adult"}
# Okabe and Ito's palette, told apart by readers with any common colour blindness, and in grey by
# marker.
STYLES = {
    OURS: {"color": "#009E73", "marker": "^"},
    WARM: {"color": "#D55E00", "marker": "o"},
    COLD: {"color": "#0072B2", "marker": "s"},
    PEER: {"color": "#CC79A7", "marker": "D"},
}
LINES = {START: ("#000000", "--"), PUBLIC: ("#56B4E9", ":")}
# Axes are logarithmic, but linear around zero.
LINEAR_BELOW = {"rmse": 100.0, "r2": 0.001, "log_loss": 0.001, "accuracy": 0.001}


def values(
    found: Sequence[Record], dataset: str, method: str, epsilon: float | None, metric: str
) -> dict[int, float]:
    """Returns the metric by seed; a fit that diverged is NaN."""
    return {
        record["seed"]: math.nan if record["metrics"][metric] is None else record["metrics"][metric]
        for record in found
        if (record["dataset"], record["method"], record["epsilon"]) == (dataset, method, epsilon)
    }


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error (NaN for a single value)."""
    if not numbers:
        return math.nan, math.nan
    error = np.std(numbers, ddof=1) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan
    return float(np.mean(numbers)), float(error)


def advantage(
    found: Sequence[Record], dataset: str, other: str, epsilon: float, metric: str, sign: int
) -> tuple[float, float]:
    """Returns how much better ours is than `other`, paired by seed: mean and standard error."""
    ours = values(found, dataset, OURS, epsilon, metric)
    own_epsilon = epsilon if other in PRIVATE else None
    theirs = values(found, dataset, other, own_epsilon, metric)
    return mean_and_error([sign * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs])


def table(found: Sequence[Record]) -> str:
    """Tabulates the metrics, then ours against each other method by paired differences."""
    lines: list[str] = []
    for dataset, metrics in METRICS.items():
        if not any(record["dataset"] == dataset for record in found):
            continue
        seeds = sorted(values(found, dataset, OURS, EPSILONS[0], metrics[0][0]))
        which = f"{len(seeds)} splits (seeds {seeds[0]} to {seeds[-1]})"
        lines += [f"**{TITLES[dataset]}**, mean ± standard error over {which}", ""]
        heads = [f"{label}, ε = {e:g}" for _, label, _, _ in metrics for e in EPSILONS]
        lines += ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for method, label in LABELS.items():
            cells = []
            for metric, _, digits, _ in metrics:
                for epsilon in EPSILONS:
                    own = epsilon if method in PRIVATE else None
                    numbers = list(values(found, dataset, method, own, metric).values())
                    mean, error = mean_and_error(numbers)
                    text = f"{mean:{digits}} ± {error:{digits}}" if numbers else "–"
                    cells.append(f"**{text}**" if method == OURS else text)
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines += ["", "How much better ours is, paired by seed (negative: worse):", ""]
        lines += ["| than | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for method in (*PRIVATE[1:], START, PUBLIC):
            cells = []
            for metric, _, digits, sign in metrics:
                for epsilon in EPSILONS:
                    mean, error = advantage(found, dataset, method, epsilon, metric, sign)
                    cells.append(
                        f"{mean:+{digits}} ± {error:{digits}}" if math.isfinite(mean) else "–"
                    )
            lines.append(f"| {LABELS[method]} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def verdict(found: Sequence[Record]) -> list[str]:
    """Lists where ours does not beat a private competitor, or loses to public rows alone."""
    missed = []
    for dataset, metrics in METRICS.items():
        for metric, label, _, sign in metrics:
            for epsilon in EPSILONS:
                for method in (*PRIVATE[1:], START, PUBLIC):
                    mean, error = advantage(found, dataset, method, epsilon, metric, sign)
                    allowed = 0.0 if method in PRIVATE else -error
                    if math.isfinite(mean) and mean < allowed:
                        missed.append(
                            f"{TITLES[dataset]}, {label}, ε = {epsilon:g}: {LABELS[method]} is "
                            f"better by {-mean:.4g} (standard error {error:.2g})"
                        )
    return missed


def ties(found: Sequence[Record]) -> list[str]:
    """Lists where ours beats a private competitor by no more than two standard errors."""
    tied = []
    for dataset, metrics in METRICS.items():
        for metric, label, _, sign in metrics:
            for epsilon in EPSILONS:
                for method in PRIVATE[1:]:
                    mean, error = advantage(found, dataset, method, epsilon, metric, sign)
                    if 0 <= mean <= 2 * error:
                        tied.append(
                            f"{TITLES[dataset]}, {label}, ε = {epsilon:g}: {LABELS[method]} is "
                            f"worse by only {mean:.4g} (standard error {error:.2g})"
                        )
    return tied


def excess(
    found: Sequence[Record],
    dataset: str,
    method: str,
    epsilon: float | None,
    metric: str,
    sign: int,
) -> tuple[float, float]:
    """Returns how much worse a method is than the non-private model: mean and error, by seed."""
    best = values(found, dataset, NON_PRIVATE, None, metric)
    own = values(found, dataset, method, epsilon, metric)
    return mean_and_error([sign * (best[seed] - own[seed]) for seed in own if seed in best])


def draw(found: Sequence[Record], path: Path) -> None:
    """Draws the price of privacy, one panel per data set and metric, with two standard errors.

    Differences by seed, because what the seed decides for all methods alike, such as the choice of
    test rows, would hide what they differ in.
    """
    datasets = [name for name in METRICS if any(record["dataset"] == name for record in found)]
    figure = Figure(figsize=(5.6 * len(datasets), 7.4), layout="constrained")
    panels = figure.subplots(2, len(datasets), squeeze=False)
    for column, dataset in enumerate(datasets):
        for row, (metric, label, _, sign) in enumerate(METRICS[dataset]):
            axes = panels[row, column]
            for shift, method in enumerate(PRIVATE):
                points = [excess(found, dataset, method, e, metric, sign) for e in EPSILONS]
                means, errors = (np.array(part) for part in zip(*points, strict=True))
                axes.errorbar(
                    np.arange(len(EPSILONS)) + 0.06 * (shift - 1.5), means, yerr=2 * errors,
                    lw=2.8 if method == OURS else 1.6, ms=8, capsize=4, label=LABELS[method],
                    zorder=3 if method == OURS else 2, **STYLES[method],
                )  # fmt: skip
            for method, (colour, dashes) in LINES.items():
                level, error = excess(found, dataset, method, None, metric, sign)
                axes.axhline(level, color=colour, ls=dashes, lw=1.6, label=LABELS[method])
                axes.axhspan(level - 2 * error, level + 2 * error, color=colour, alpha=0.1, lw=0)
            axes.set_yscale("symlog", linthresh=LINEAR_BELOW[metric])
            axes.axhline(0, color="#7f7f7f", lw=0.8)
            axes.set_xticks(range(len(EPSILONS)), [f"{e:g}" for e in EPSILONS])
            direction = "above" if sign < 0 else "below"
            axes.set(xlabel="ε", ylabel=f"{label}: {direction} the non-private model")
            axes.set_title(TITLES[dataset] if row == 0 else "", fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.25)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Lower is better everywhere; zero is the model without privacy", fontsize=11)
    figure.savefig(path, dpi=130)


def made_by(found: Sequence[Record]) -> str:
    """Describes which code, versions and machine made the records."""
    own = [record["provenance"] for record in found if record["method"] != PEER]
    peer = [record["provenance"] for record in found if record["method"] == PEER]
    commits = ", ".join(sorted({str(origin["commit"]) for origin in own}))
    sources = ", ".join(sorted({origin["source"] for origin in own}))
    beside = f"; beside it {_versions(peer)}" if peer else ""
    seconds = sum(record["seconds"] for record in found)
    return (
        f"Made by: cpu, Python {own[0]['python']}, {_versions(own)}{beside}; commit {commits}, "
        f"source {sources}. {len(found)} fits, {seconds:.0f} s in all.\n"
    )


def _versions(origins: Sequence[Record]) -> str:
    found = {item for origin in origins for item in origin["packages"].items()}
    return ", ".join(f"{name} {version}" for name, version in sorted(found) if version)


def write(found: Sequence[Record], folder: Path, name: str, *, readme: Path | None = None) -> None:
    """Writes NAME.md and NAME.png, and on request the marked section of a README."""
    if not found:
        raise SystemExit("expected finished lines to draw, got none; run without --plot-only.")
    folder.mkdir(parents=True, exist_ok=True)
    text = table(found) + "\n"
    missed = verdict(found)
    text += "\n".join(
        ["The goal is missed at:", "", *(f"- {line}" for line in missed), ""]
        if missed
        else [
            "The goal is met: ours is better than every private competitor at every ε, and never "
            "worse than public-only by more than one standard error.",
            "",
        ]
    )
    tied = ties(found)
    if tied:
        text += "\n".join(["", "Too close to call:", "", *(f"- {line}" for line in tied), ""])
    text += f"\n{made_by(found)}"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    draw(found, folder / f"{name}.png")
    print(text)
    if readme is not None:
        whole = sections.replaced(readme.read_text(encoding="utf-8"), f"tabular {name}", text)
        readme.write_text(whole, encoding="utf-8")
