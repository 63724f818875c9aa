"""`python -m experiments figures`: losses and accuracies against steps, and PDA-DPMD's gain over K.

Draws result lines into PNG files beside them; computes no run.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.deep import results
from experiments.deep.results import Place
from experiments.deep.settings import ALGORITHMS, DeepSettings
from experiments.deep.sweep import loss
from experiments.deep.titles import DATASETS, LABELS, order, title_of
from experiments.records import Record
from mirrordp.report import upwards

# Okabe and Ito's palette, told apart by readers with any common colour blindness.
COLOURS = {"cold": "#0072B2", "warm": "#D55E00", "pda": "#009E73"}
RATE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RATE_MARKERS = "osD^vPX"
# Drawn in this order: a curve that lies on another one leaves its edges in sight.
WIDTHS = {"cold": 1.9, "warm": 2.8, "pda": 1.6}
ITERATES = {
    "average": ("-", 1.0, "averaged iterate, ± std over seeds"),
    "last": (":", 0.7, "last iterate"),
}
PARTS = ("validation", "test")
OTHER_STARTS = "\nwarm and PDA-DPMD did not begin at the same warm start"
# Rows of a figure: metric, algorithms, label. Cold DP-SGD's curves span so much that the others
# need panels without it.
ROWS = (
    ("loss", ALGORITHMS, "loss"),
    ("loss", ("warm", "pda"), "loss, without cold"),
    ("accuracy", ALGORITHMS, "accuracy, %"),
    ("accuracy", ("warm", "pda"), "accuracy, %, without cold"),
)


def curve(lines: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns steps, mean and standard deviation over runs; None where no line has the curve.

    Runs of one settings file have the same steps; one that was cut short is left out, and a value
    that is not finite becomes a gap.
    """
    there = [line["curve"] for line in lines if name in line["curve"]]
    if not there:
        return None
    steps = max((line["step"] for line in there), key=len)
    rows = [line[name] for line in there if line["step"] == steps]
    values = np.array(rows, float)
    spread = values.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros(len(steps))
    return np.array(steps), values.mean(axis=0), spread


def chosen_sweep_line(
    lines: Sequence[Record], settings: DeepSettings, finals: Sequence[Record] = ()
) -> list[Record]:
    """Returns the sweep's line at the settings of the file, on the final runs' data, or none."""
    identity = settings.identity()
    labels = {line["data"]["label"] for line in finals}
    found = [line for line in lines if line["kind"] == "sweep" and line["settings"] == identity]
    return [line for line in found if not labels or line["data"]["label"] in labels][:1]


def _of_one_data_set(lines: Sequence[Record]) -> list[Record]:
    """Returns the lines with the most common label: one curve never mixes data."""
    labels = [(line["data"]["label"], line["data"]["num_private"]) for line in lines]
    if not labels:
        return []
    most = max(labels, key=labels.count)
    return [line for line, label in zip(lines, labels, strict=True) if label == most]


def training_figure(lines: Sequence[Record], algorithms: dict[str, DeepSettings]) -> Figure | None:
    """Draws validation and test loss and accuracy against steps, for one noise level.

    Final runs of images have no validation part (all private images are trained on), so their
    validation curve is that of the sweep's run with the same settings.

    Args:
        lines: result lines.
        algorithms: settings by algorithm.

    Returns:
        The figure; None without a final run, since a search that has begun is no result.
    """
    if not any(results.final_lines(lines, settings) for settings in algorithms.values()):
        return None
    figure = Figure(figsize=(10.5, 13.2), layout="constrained")
    panels = figure.subplots(len(ROWS), len(PARTS), sharex=True)
    drawn: list[Record] = []
    for column, part in enumerate(PARTS):
        kinds: dict[str, set[int]] = {}
        shown_lines: dict[str, list[Record]] = {}
        for algorithm in (name for name in ALGORITHMS if name in algorithms):
            settings = algorithms[algorithm]
            own = _of_one_data_set(results.final_lines(lines, settings))
            own = results.own_seeds(own, settings)
            kind = "final runs"
            if part == "validation" and not any("last_validation_loss" in r["curve"] for r in own):
                own, kind = chosen_sweep_line(lines, settings, own), "run of the sweep"
            if any(f"last_{part}_loss" in line["curve"] for line in own):
                drawn += own
                shown_lines[algorithm] = own
                kinds.setdefault(kind, set()).add(len(own))
            for row, (metric, shown, _) in enumerate(ROWS):
                if algorithm in shown:
                    _draw_curves(panels[row, column], own, part, metric, algorithm)
        for axes in panels[:, column]:
            if not axes.lines:
                axes.text(0.5, 0.5, "no run yet", ha="center", va="center",
                          transform=axes.transAxes)  # fmt: skip
                axes.set_yticks([])
        said = ", ".join(f"{kind}, {_seeds(counts)}" for kind, counts in sorted(kinds.items()))
        said = f"{part} ({said or 'no run yet'})"
        said += _other_starts(shown_lines.get("warm", []), shown_lines.get("pda", []))
        panels[0, column].set_title(said, fontsize=10.5)
    for row, (_, _, label) in enumerate(ROWS):
        for axes in panels[row]:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.set_ylabel(label)
    for axes in panels[-1]:
        axes.set_xlabel("steps")
    there = {line["settings"]["algorithm"] for line in drawn}
    handles = [
        Line2D([], [], color=COLOURS[name], lw=WIDTHS[name],
               label=LABELS[name] + ("" if name in there else " (no run yet)"))
        for name in algorithms
    ]  # fmt: skip
    handles += [
        Line2D([], [], color="#555555", ls=style, lw=1.9 * width, label=label)
        for style, width, label in ITERATES.values()
    ]
    columns = len(handles) if there >= set(algorithms) else 3  # "no run yet" makes labels long
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    what = title_of(next(iter(algorithms.values()))) + _epsilon(drawn)
    figure.suptitle(_title(what, drawn), fontweight="bold")
    return figure


def _other_starts(warm: Sequence[Record], pda: Sequence[Record]) -> str:
    """Returns a warning if runs of one seed did not begin at the same point."""
    pairs = [(one, two) for one in warm for two in pda if one["seed"] == two["seed"]]
    return "" if all(results.same_start(*pair) for pair in pairs) else OTHER_STARTS


def _seeds(counts: set[int]) -> str:
    """Returns how many seeds the algorithms of a panel have."""
    fewest, most = min(counts), max(counts)
    many = f"{fewest} to {most}" if fewest < most else f"{most}"
    return f"{many} seed{'s' * (most > 1)}"


def _draw_curves(
    axes: Axes, lines: Sequence[Record], part: str, metric: str, algorithm: str
) -> None:
    scale = 100.0 if metric == "accuracy" else 1.0
    for iterate, (style, width, _) in ITERATES.items():
        found = curve(lines, f"{iterate}_{part}_{metric}")
        if found is None:
            continue
        steps, mean, spread = found
        width *= WIDTHS[algorithm]
        axes.plot(steps, scale * mean, color=COLOURS[algorithm], ls=style, lw=width)
        if iterate == "average":
            axes.fill_between(
                steps, scale * (mean - spread), scale * (mean + spread),
                color=COLOURS[algorithm], alpha=0.2, lw=0,
            )  # fmt: skip


def _epsilon(lines: Sequence[Record]) -> str:
    """Returns ε of the final runs; that of a sweep is for fewer examples."""
    found = {
        f", ε = {upwards(line['privacy']['epsilon_pld'])} (PLD, δ = {line['privacy']['delta']:g})"
        for line in lines
        if line["kind"] == "final"
    }
    return found.pop() if len(found) == 1 else ""


def _title(what: str, lines: Sequence[Record]) -> str:
    """Returns a title: what is drawn, and on which data if it is not the published data."""
    labels = sorted({line["data"]["label"] for line in lines if not line["data"]["is_complete"]})
    return "\n".join([what, *labels])


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No matter when a drawing is interrupted, the file is the old one or the new one.
    partial = path.with_suffix(".part.png")
    # Without the version of matplotlib the same lines give the same file.
    figure.savefig(partial, dpi=130, metadata={"Software": None})
    os.replace(partial, path)
    return path


def gain_over_warm(
    lines: Sequence[Record], pda: DeepSettings, warm: DeepSettings
) -> dict[float, dict[float, tuple[float, bool]]]:
    """Returns warm's validation loss minus PDA-DPMD's, by rate and K, and if both began alike."""
    baseline = {
        line["settings"]["learning_rate"]: line for line in results.sweep_lines(lines, warm)
    }
    found: dict[float, dict[float, tuple[float, bool]]] = {}
    for line in results.sweep_lines(lines, pda):
        rate, decay = line["settings"]["learning_rate"], line["settings"]["decay"]
        other = baseline.get(rate)
        if other is not None and math.isfinite(gain := loss(other) - loss(line)):
            found.setdefault(rate, {})[decay] = gain, results.same_start(line, other)
    return found


def decay_figure(
    lines: Sequence[Record], pairs: Sequence[tuple[DeepSettings, DeepSettings]]
) -> Figure | None:
    """Draws the gain of PDA-DPMD over warm DP-SGD against K, one panel per pair of settings."""
    gains = [(pda, gain_over_warm(lines, pda, warm)) for pda, warm in pairs]
    gains = [(pda, found) for pda, found in gains if found]
    if not gains:
        return None
    columns = 2
    rows = math.ceil(len(gains) / columns)
    figure = Figure(figsize=(5.0 * columns, 4.5 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for spare in panels[len(gains) :]:
        spare.remove()
    used: list[Record] = []
    for axes, (pda, found) in zip(panels, gains, strict=False):
        used += results.sweep_lines(lines, pda)
        for number, (rate, by_decay) in enumerate(sorted(found.items())):
            decays = sorted(by_decay)
            colour = RATE_COLOURS[number % len(RATE_COLOURS)]
            marker = RATE_MARKERS[number % len(RATE_MARKERS)]
            values = [by_decay[decay][0] for decay in decays]
            axes.plot(decays, values, color=colour, lw=1.7)
            for decay in decays:
                gain, same = by_decay[decay]
                axes.plot(decay, gain, marker, color=colour, mfc=colour if same else "white", ms=6)
            starts = {same for _, same in by_decay.values()}
            label = f"η = {rate:g}" + ("" if starts == {True} else " (hollow: another start)")
            axes.plot([], [], color=colour, lw=1.7, marker=marker, ms=6,
                      mfc=colour if True in starts else "white", label=label)  # fmt: skip
        if (chosen := found.get(pda.learning_rate, {}).get(pda.decay)) is not None:
            axes.plot(
                pda.decay, chosen[0], "o", ms=15, mfc="none", mec="#000000", mew=1.3, ls="",
                label="in the settings file",
            )  # fmt: skip
        axes.axhline(0, color="#7f7f7f", lw=1, ls="--", label="warm DP-SGD, same η")
        axes.set_xscale("log")
        ticks = sorted({decay for by_decay in found.values() for decay in by_decay})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.margins(x=0.08, y=0.12)
        axes.set(xlabel=f"K, {pda.decay_unit}", ylabel="loss of warm − loss of PDA-DPMD")
        axes.set_title(title_of(pda), fontsize=10.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        # Below its panel: inside, some points would lie among the legend's own.
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center",
                    bbox_to_anchor=(0.5, -0.16))  # fmt: skip
    what = "Validation loss gained by PDA-DPMD over warm DP-SGD, one seed (up is better)"
    figure.suptitle(_title(what, used), fontweight="bold", fontsize=11)
    return figure


def draw_all(
    lines: Sequence[Record], settings: dict[str, DeepSettings], folder: Path
) -> list[tuple[str, Path]]:
    """Draws all figures that the lines allow; returns what each shows and where it is."""
    drawn: list[tuple[str, Path]] = []
    groups: dict[tuple[str, str, str], dict[str, DeepSettings]] = {}
    pairs: dict[str, list[tuple[DeepSettings, DeepSettings]]] = {}
    placed = [(place, own) for name, own in settings.items() if (place := Place.of(name))]
    for place, own in sorted(placed, key=lambda item: order(item[0])):
        if not place.variant:
            key = place.dataset, place.family, place.level
            groups.setdefault(key, {})[place.algorithm] = own
        warm = settings.get(own.sweep.rate_from or "")
        if place.algorithm == "pda" and place.variant in ("", "steps") and warm is not None:
            pairs.setdefault(place.dataset, []).append((own, warm))
    for (dataset, family, level), algorithms in groups.items():
        ordered = {name: algorithms[name] for name in ALGORITHMS if name in algorithms}
        stem = "-".join(part for part in (dataset, family, level) if part)
        what = f"{title_of(next(iter(ordered.values())))}: loss and accuracy against steps"
        figure = training_figure(lines, ordered)
        if figure is not None:
            drawn.append((what, _save(figure, folder / f"{stem}.png")))
    for dataset, found in pairs.items():
        what = f"{DATASETS.get(dataset, dataset)}: PDA-DPMD's gain over warm DP-SGD against K"
        figure = decay_figure(lines, found)
        if figure is not None:
            drawn.append((what, _save(figure, folder / f"{dataset}-K.png")))
    return drawn


def links(drawn: Sequence[tuple[str, Path]], below: Path) -> str:
    """Returns Markdown that shows the figures in a file of the folder `below`."""
    if not drawn:
        return "No run yet."
    return "\n\n".join(
        f"![{what}]({Path(os.path.relpath(path, below)).as_posix()})" for what, path in drawn
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of results")
    parser.add_argument("--out", type=Path, help="folder of the PNG files (that of the results)")
    arguments = parser.parse_args(argv)
    lines, problems = results.collect(arguments.results)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    drawn = draw_all(lines, results.configurations(), arguments.out or arguments.results)
    for what, path in drawn:
        print(f"{path.name}: {what}")
    if not drawn:
        print("no result line with a curve; nothing to draw.")
    return 0
