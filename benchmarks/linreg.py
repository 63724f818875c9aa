"""Cost of one step of the Figure 1 simulation against p and n, beside plain NumPy.

`python -m benchmarks.linreg [--backend jax]` prints a Markdown table. "Plain NumPy" is the
algorithm as one would write it first: one grid point at a time, a dense design, one matrix-vector
product for the residuals and one for the gradient. "Ours" is `experiments.linreg`: many grid
points as the columns of one matrix, clipping in closed form, and a sparse design on a CPU. Both
start from the same trial with the same noise, and the losses are compared before the times are
printed.
"""

import argparse
import os
import time
from functools import partial

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one core for everybody

import numpy as np

from experiments.linreg.backends import Columns, JaxBackend, SparseBackend, mirror_scaling
from experiments.linreg.simulation import make_trial

NOISE_MULTIPLIER = 10.0


def plain_numpy(
    design, row_norms, targets, start, preconditioner, learning_rate, clip_norm, noises
):
    """Runs Algorithm 1 for one grid point; returns the average of the iterates."""
    theta, total = start.copy(), np.zeros_like(start)
    for noise in noises:
        residuals = design @ theta - targets
        norms = np.abs(residuals) * row_norms
        weights = residuals * np.minimum(1, clip_norm / np.maximum(norms, 1e-30))
        gradient = design.T @ weights / len(design)
        gradient += NOISE_MULTIPLIER * clip_norm / len(design) * noise
        if preconditioner is not None:
            gradient = preconditioner @ gradient
        theta -= learning_rate * gradient
        total += theta
    return total / len(noises)


def measure(dimension, rows, width, steps, backend, clock):
    """Returns milliseconds per step and grid point, (plain, ours), for both algorithms."""
    trial = make_trial(SparseBackend(1).decompose, dimension, 0, seed=0, num_private=rows)
    trial.extend_noise(steps)
    ridge = 0.3 * np.median(trial.eigenvalues)
    scaling = mirror_scaling(trial.eigenvalues, ridge).astype(np.float32)
    design = trial.design.toarray()
    clip_norms = np.geomspace(0.01, 0.1, width)
    start = np.repeat(trial.public_model[:, None], width, axis=1)
    results = []
    for mirrored in (False, True):
        rate = np.median(scaling * trial.eigenvalues) if mirrored else np.median(trial.eigenvalues)
        learning_rates = 0.1 / (steps * clip_norms * rate)
        columns = Columns(
            start,
            learning_rates,
            clip_norms,
            np.repeat(scaling[:, None], width if mirrored else 0, axis=1),
        )
        backend.run(trial, columns, 1, NOISE_MULTIPLIER)
        began = clock()
        iterates = backend.run(trial, columns, steps, NOISE_MULTIPLIER)
        ours = (clock() - began) / (steps * width)

        vectors = trial.eigenvectors
        preconditioner = (vectors * scaling) @ vectors.T if mirrored else None
        plain_run = partial(
            plain_numpy,
            design,
            trial.row_norms,
            trial.targets,
            trial.public_model,
            preconditioner,
            np.float32(learning_rates[-1]),
            np.float32(clip_norms[-1]),
        )
        plain_run(trial.noise[:1])
        began = clock()
        average = plain_run(trial.noise[:steps])
        plain = (clock() - began) / steps
        loss = np.mean((design @ average - trial.targets) ** 2)
        np.testing.assert_allclose(iterates.empirical_losses[0, -1], loss, rtol=1e-3)
        results.append((1e3 * plain, 1e3 * ours))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--rows", type=int, nargs="+", default=[2500, 10_000, 40_000])
    parser.add_argument("--columns", type=int, default=48, help="grid points that run together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", choices=("sparse", "jax"), default="sparse")
    arguments = parser.parse_args()
    if arguments.backend == "sparse":
        backend, clock, timed = SparseBackend(1), time.process_time, "CPU time of one thread"
    else:
        backend, clock, timed = JaxBackend(), time.perf_counter, "wall-clock time"
    print(f"{backend.device}; {timed}; {arguments.columns} grid points, {arguments.steps} steps\n")
    print("| p | n | warm: plain NumPy | ours | ratio | PDA-DPMD: plain NumPy | ours | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    cases = [(p, 10_000) for p in arguments.dims]
    cases += [(arguments.dims[1], n) for n in arguments.rows if n != 10_000]
    for dimension, rows in cases:
        cells = [f"{dimension} | {rows}"]
        for plain, ours in measure(
            dimension, rows, arguments.columns, arguments.steps, backend, clock
        ):
            cells.append(f"{plain:.2f} ms | {ours:.3f} ms | {plain / ours:.1f}x")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
