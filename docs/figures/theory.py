"""Draws docs/figures/theory.png: the paper's two theorems on linear regression, made visible.

Run with `python docs/figures/theory.py`; fixed seeds, about ten seconds.
"""

import math
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mirrordp.mirror import QuadraticMap, theory

# Okabe and Ito's palette, which remains distinct for colour-blind readers and in grey.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"

NUM_PARAMS = 40
LEARNING_RATE = 0.5
NOISE_STDDEV = 1.0
NUM_DRAWS = 2_000


def measured_noise() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled eigenvalues, and mean and standard error of |⟨θ̂ − θ̄, v_i⟩| over draws of the noise."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, NUM_PARAMS)) * np.logspace(0, -1, NUM_PARAMS)
    mirror_map = QuadraticMap.from_data(features, features @ rng.normal(size=NUM_PARAMS))
    theta, grad = rng.normal(size=(2, NUM_PARAMS))
    noise = NOISE_STDDEV * rng.normal(size=(NUM_DRAWS, NUM_PARAMS))
    noisy = jax.vmap(lambda b: mirror_map.step(theta, grad + b, LEARNING_RATE).params)
    shifts = noisy(jnp.asarray(noise)) - mirror_map.step(theta, grad, LEARNING_RATE).params
    along = np.abs(np.asarray(shifts) @ np.asarray(mirror_map.eigenvectors))
    eigenvalues = np.asarray(mirror_map.eigenvalues) * float(mirror_map.scale)
    return eigenvalues, along.mean(axis=0), along.std(axis=0) / math.sqrt(NUM_DRAWS)


def draw_noise(axes) -> None:
    """Predicted against measured noise per eigen-direction."""
    eigenvalues, mean, error = measured_noise()
    line = np.geomspace(eigenvalues.min(), eigenvalues.max(), 100)
    predicted = theory.predicted_noise_per_direction(
        line, learning_rate=LEARNING_RATE, noise_stddev=NOISE_STDDEV
    )
    plain = theory.predicted_noise([1.0], [1.0], learning_rate=LEARNING_RATE, noise_stddev=1.0)
    axes.plot(line, predicted, color=BLUE, label="PDA-DPMD, predicted: $\\propto 1/\\lambda_i$")
    axes.errorbar(
        eigenvalues,
        mean,
        yerr=2 * error,
        fmt="o",
        color=BLUE,
        markerfacecolor="white",
        markersize=5,
        linewidth=1,
        label=f"PDA-DPMD, measured ({NUM_DRAWS:,} draws)",
    )
    axes.axhline(plain, color=ORANGE, linestyle="--", label="DP-SGD: the same everywhere")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="curvature $\\lambda_i$ of the scaled public loss along $v_i$",
        ylabel="mean shift $E\\,|\\langle\\hat\\theta-\\bar\\theta, v_i\\rangle|$ by one step",
        title="Noise shrinks where the public loss is curved",
    )
    axes.legend(frameon=False, loc="lower left")


def draw_bounds(axes) -> None:
    """The privacy terms of both bounds against n_pub: one eigenvalue 1/p^1.5, the rest 1/p."""
    settings = {"num_private": 10**14, "epsilon": 1.0, "delta": 1e-5}
    for p, color in ((10**3, BLUE), (10**4, ORANGE), (10**5, GREEN)):
        eigenvalues = np.array([p**-1.5] + [1 / p] * (p - 1))
        sizes = np.geomspace(p**1.5, p**2.8, 200)
        pda = np.array(
            [
                theory.excess_risk_bound_pda(eigenvalues, num_public=round(n), **settings).privacy
                for n in sizes
            ]
        )
        dpsgd = theory.excess_risk_bound_dpsgd(eigenvalues, **settings).privacy
        axes.plot(sizes, np.full(len(sizes), dpsgd), color=color, linestyle="--", linewidth=1.2)
        axes.plot(sizes, pda, color=color, linewidth=2)
        starts = p**2 * math.log(1 / settings["delta"])
        axes.plot([starts, p**2.5], np.interp([starts, p**2.5], sizes, pda), "o", color=color)
        axes.annotate(
            f"$p = 10^{{{round(math.log10(p))}}}$",
            (sizes[0], dpsgd),
            xytext=(2, 6),
            textcoords="offset points",
            color=color,
        )
    for style, label in (
        ({"linestyle": "--", "linewidth": 1.2}, "DP-SGD: $p^{2.5}$"),
        ({"linewidth": 2}, "PDA-DPMD: $\\chi$"),
        (
            {"linestyle": "none", "marker": "o"},
            "$n_{\\mathrm{pub}} = p^2 \\log(1/\\delta)$ and $p^{2.5}$",
        ),
    ):
        axes.plot([], [], color=GREY, label=label, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="public examples $n_{\\mathrm{pub}}$",
        ylabel="privacy term of the bound, up to constants",
        title="What enough public data do for the bound",
    )
    axes.set_ylim(3e-22, 3e-14)
    axes.legend(frameon=False, loc="lower right")


def main() -> None:
    """Writes the figure beside this file."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    draw_noise(left)
    draw_bounds(right)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
