"""Draws docs/figures/results.png from the stored result lines; computes no run.

Run with `python docs/figures/results.py` from the root of the repository.
"""

import json
import pathlib

import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's palette, which remains distinct for colour-blind readers and in grey.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "results"
EPSILONS = (0.1, 1.0, 3.0)


def lines(name: str) -> list[dict]:
    """The records of one file of result lines."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def draw_adult(axes) -> None:
    """Log-loss of logistic regression on UCI Adult against ε, mean over 20 splits."""
    # Other seeds belong to the search for the competitors' settings.
    fits = [
        line
        for line in lines("tabular/full.jsonl")
        if line["dataset"] == "adult" and 100 <= line["seed"] < 120
    ]

    def losses(method: str, epsilon: float | None) -> np.ndarray:
        found = [
            fit["metrics"]["log_loss"]
            for fit in fits
            if fit["method"] == method and fit["epsilon"] == epsilon
        ]
        assert len(found) == 20, (method, epsilon, len(found))
        return np.asarray(found)

    methods = [
        ("diffprivlib", PINK, "D", "diffprivlib (δ = 0)"),
        ("cold", BLUE, "s", "DP-SGD, no public data"),
        ("warm", ORANGE, "o", "DP-SGD from a public start"),
        ("ours", GREEN, "^", "mirrordp, with public rows"),
    ]
    for method, color, marker, label in methods:
        found = np.stack([losses(method, epsilon) for epsilon in EPSILONS])
        errors = found.std(axis=1, ddof=1) / np.sqrt(found.shape[1])
        axes.errorbar(
            EPSILONS, found.mean(axis=1), yerr=errors, color=color, marker=marker, label=label,
            linewidth=3 if method == "ours" else 1.6, markersize=7, capsize=3,
        )  # fmt: skip
    axes.axhline(
        losses("start", None).mean(), color="black", linestyle="--", label="public rows alone"
    )
    axes.axhline(
        losses("non-private", None).mean(), color="black", linewidth=1, label="without privacy"
    )
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set_xlabel("ε: less privacy to the right")
    axes.set_title("UCI Adult, logistic regression\ntest log-loss, 1,302 public rows")
    axes.legend(frameon=False, fontsize=9)


def draw_cifar(axes) -> None:
    """Test loss on CIFAR-10, mean and standard deviation over three seeds."""
    runs = [line for line in lines("deep/cifar10.jsonl") if line["kind"] == "final"]
    methods = [
        ("cold", BLUE, "DP-SGD, no public data"),
        ("warm", ORANGE, "DP-SGD from a public start"),
        ("pda", GREEN, "PDA-DPMD from the same start"),
    ]
    levels = [("s20", "ε = 0.165"), ("s1.51", "ε = 3.231")]
    for place, (method, color, label) in enumerate(methods):
        found = np.asarray(
            [
                [
                    run["final"]["average_test_loss"]
                    for run in runs
                    if run["config"] == f"cifar10/{method}-{level}" and run["seed"] in (1, 2, 3)
                ]
                for level, _ in levels
            ]
        )
        assert found.shape == (2, 3), (method, found.shape)
        positions = np.arange(2) + 0.27 * (place - 1)
        means = found.mean(axis=1)
        axes.bar(
            positions, means, 0.25, yerr=found.std(axis=1, ddof=1), color=color, capsize=3,
            label=label,
        )  # fmt: skip
        for position, mean in zip(positions, means, strict=True):
            axes.text(position, 0.04, f"{mean:.3f}", ha="center", color="white", fontsize=9)
    starts = [
        run["curve"]["average_test_loss"][0]
        for run in runs
        if run["config"] == "cifar10/warm-s1.51" and run["seed"] in (1, 2, 3)
    ]
    axes.axhline(np.mean(starts), color="black", linestyle="--", label="public images alone")
    axes.set_xticks(range(2), [name for _, name in levels])
    axes.set_ylim(0, 2.4)
    axes.set_title("CIFAR-10, the paper's network\ntest loss, 2,000 public images")
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def main() -> None:
    """Draws both panels."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), dpi=150, layout="constrained")
    draw_adult(axes[0])
    draw_cifar(axes[1])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="0.92")
        one.set_axisbelow(True)
    figure.suptitle("Lower is better", fontsize=11)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
