"""The table and the figure of the simulation, from its records; computes no experiment.

In: records of `experiments.linreg.command`. Out: a PNG, a Markdown table, and on request the marked
section of a README.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import scipy.stats

from experiments import sections
from experiments.linreg.simulation import TARGET_STD
from experiments.records import Record

LABELS = {"cold": "cold DP-SGD", "warm": "warm DP-SGD", "pda-dpmd": "PDA-DPMD"}
# Okabe and Ito's palette, told apart by readers with any common colour blindness, and in grey by
# marker.
STYLES = {
    "cold": {"color": "#0072B2", "marker": "s"},
    "warm": {"color": "#D55E00", "marker": "o"},
    "pda-dpmd": {"color": "#009E73", "marker": "^"},
}
OPTIMUM = TARGET_STD**2


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and half of its 95% interval by Student's t (NaN for a single value)."""
    count = len(values)
    if count < 2:
        return float(np.mean(values)), float("nan")
    error = np.std(values, ddof=1) / count**0.5
    return float(np.mean(values)), float(scipy.stats.t.ppf(0.975, count - 1) * error)


def by_dimension(found: Sequence[Record]) -> dict[int, dict[str, Record]]:
    """Groups records by dimension (ascending) and algorithm; the last of several wins."""
    table: dict[int, dict[str, Record]] = {}
    for record in found:
        table.setdefault(record["dimension"], {})[record["algorithm"]] = record
    return dict(sorted(table.items()))


def eigenvalue_ratios(record: Record) -> np.ndarray:
    """Returns the largest over the smallest non-zero public eigenvalue, per trial."""
    spectrum = record["spectrum"]
    return np.array(spectrum["largest"]) / np.array(spectrum["smallest_nonzero"])


def draw(found: Sequence[Record], path: Path) -> None:
    """Draws cold against warm, warm against PDA-DPMD, and the spread of the eigenvalues."""
    table = by_dimension(found)
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    for panel, algorithms, bottom, title in (
        (panels[0], ("cold", "warm"), 0, "(a) What the warm start gains"),
        (panels[1], ("warm", "pda-dpmd"), 0.9 * OPTIMUM, "(b) What the public mirror map gains"),
    ):
        for algorithm in algorithms:
            rows = {p: row[algorithm] for p, row in table.items() if algorithm in row}
            if not rows:
                continue
            losses = [mean_and_interval(record["best"]["losses"]) for record in rows.values()]
            panel.errorbar(
                list(rows),
                [mean for mean, _ in losses],
                yerr=np.nan_to_num([interval for _, interval in losses]),
                label=LABELS[algorithm],
                linewidth=1.8,
                markersize=5.5,
                capsize=3,
                **STYLES[algorithm],
            )
        panel.axhline(OPTIMUM, color="black", linestyle="--", linewidth=1, label="optimum, 0.01")
        panel.set(title=title, ylabel="mean squared error, private data", ylim=(bottom, None))
        panel.legend(frameon=False)
    ratios = {p: eigenvalue_ratios(next(iter(row.values()))) for p, row in table.items()}
    panels[2].errorbar(
        list(ratios),
        [values.mean() for values in ratios.values()],
        yerr=np.nan_to_num([mean_and_interval(values)[1] for values in ratios.values()]),
        color="#555555",
        marker="D",
        linewidth=1.8,
        markersize=5,
        capsize=3,
    )
    panels[2].set(
        title="(c) Spread of the eigenvalues of $X^\\top X$",
        ylabel="largest / smallest non-zero eigenvalue",
        ylim=(0, None),
    )
    for panel in panels:
        panel.set_xlabel("dimension p")
        panel.set_xlim(0, None)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    settings = found[0]["settings"]
    figure.suptitle(
        f"ε = {settings['epsilon']:g}, δ = {settings['delta']:g}, "
        f"n = {settings['num_private']:,}, mean and 95% interval over {settings['num_trials']} "
        "trials, best grid point each (tuning not charged)",
        fontsize=10,
        color="#333333",
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def losses_table(found: Sequence[Record]) -> str:
    """Tabulates losses by dimension, PDA-DPMD's paired gain over warm, and the spread."""
    lines = [
        "| p | public data only | cold | warm | PDA-DPMD | warm − PDA-DPMD, paired | "
        "population: cold / warm / PDA-DPMD | λ_max / λ_min |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dimension, row in by_dimension(found).items():
        cells = [str(dimension)]
        warm, mirror = row.get("warm"), row.get("pda-dpmd")
        cells.append(_interval(warm["start_losses"]) if warm else "")
        cells += [_interval(row[a]["best"]["losses"]) if a in row else "" for a in LABELS]
        paired = ""
        if warm and mirror:
            gains = np.subtract(warm["best"]["losses"], mirror["best"]["losses"])
            paired = _interval(gains)
        cells.append(paired)
        population = [row[a]["best"]["population_losses"] for a in LABELS if a in row]
        cells.append(" / ".join(f"{np.mean(losses):.5f}" for losses in population))
        cells.append(f"{eigenvalue_ratios(next(iter(row.values()))).mean():,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choices_table(found: Sequence[Record]) -> str:
    """Tabulates the chosen grid points, the best of either output, and where the grid ended."""
    lines = [
        "| p | algorithm | η | C | T | ridge / median λ | iterate | averaged | last | points | "
        "grid ends at |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dimension, row in by_dimension(found).items():
        for algorithm in (a for a in LABELS if a in row):
            record, best = row[algorithm], row[algorithm]["best"]
            outputs = record["best_by_output"]
            ridge = "" if best["ridge"] is None else f"{best['ridge']:.2g}"
            cells = [
                str(dimension),
                LABELS[algorithm],
                f"{best['learning_rate']:.3g}",
                f"{best['clip_norm']:.2g}",
                str(best["num_steps"]),
                ridge,
                best["output"],
                f"{np.mean(outputs['average']['losses']):.5f}",
                f"{np.mean(outputs['last']['losses']):.5f}",
                str(len(record["grid"])),
                _unfinished(record["ends"]),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(found: Sequence[Record]) -> str:
    """Returns both tables and the origin of the records."""
    made = sorted({_maker(record["provenance"]) for record in found})
    seconds = {r["dimension"]: r["seconds"]["prepare"] + r["seconds"]["search"] for r in found}
    spent = ", ".join(f"p={p} {value:.0f} s" for p, value in sorted(seconds.items()))
    cpu = sum({r["dimension"]: r["seconds"]["cpu"] for r in found}.values())
    return "\n\n".join(
        [
            losses_table(found),
            choices_table(found),
            "Made by: " + "; ".join(made) + f". Wall-clock time: {spent}; "
            f"{sum(seconds.values()):.0f} s in all, {cpu:.0f} s of CPU time.",
        ]
    )


def write(found: Sequence[Record], folder: Path, name: str, *, readme: Path | None = None) -> None:
    """Writes `<name>.png` and `<name>.md` into `folder`, and the section `name` of `readme`."""
    if not found:
        print("no record with these settings; nothing to draw")
        return
    draw(found, folder / f"{name}.png")
    content = markdown(found)
    (folder / f"{name}.md").write_text(content + "\n")
    if readme is not None:
        text = sections.replaced(readme.read_text(), f"linreg {name}", f"\n{content}\n\n")
        readme.write_text(text)
    print(losses_table(found))


def _maker(provenance: Record) -> str:
    packages = [f"{name} {version}" for name, version in provenance["packages"].items() if version]
    parts = [provenance["machine"]["device"], f"Python {provenance['python']}", *packages]
    return ", ".join([*parts, f"source {provenance['source']}"])


def _interval(values: Sequence[float] | np.ndarray) -> str:
    mean, half_width = mean_and_interval(values)
    return f"{mean:.5f} ± {half_width:.5f}"


def _unfinished(ends: Mapping[str, Sequence[str]]) -> str:
    """Returns the directions in which the grid ends at the best point; a dash for none."""
    names = [f"{name} ({s})" for name, both in ends.items() for s in both if s in ("limit", "open")]
    return ", ".join(dict.fromkeys(names)) or "-"
