"""`python -m experiments linreg`: settings, records and the command line of Figure 1."""

import argparse
import dataclasses
import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import records
from experiments.linreg.backends import Backend, JaxBackend, SparseBackend, noise_multiplier
from experiments.linreg.search import (
    ALGORITHMS,
    AXES,
    OUTPUTS,
    Lattice,
    Outcome,
    Point,
    axes_of,
    centre,
    ends,
    evaluate,
    search,
)
from experiments.linreg.simulation import ACTIVE_FEATURES, Trial, make_trial
from experiments.options import at_least, existing_file

FULL_DIMENSIONS = (500, 1000, 1500, 2000, 3000, 4000, 5000, 6000)
QUICK_DIMENSIONS = (500, 1000, 1500)
RESULTS = Path(__file__).parents[1] / "results" / "linreg"


@dataclasses.dataclass(frozen=True)
class LinregSettings:
    """Everything that decides the numbers, apart from the dimension.

    `start` lists, for each algorithm, the indices of the starting grid on each axis of the lattice.
    """

    num_trials: int
    seed: int
    lattice: Lattice
    start: dict[str, dict[str, tuple[int, ...]]]
    tolerance: float = 0.005
    max_rounds: int = 40
    epsilon: float = 1.0
    delta: float = 1e-5
    num_private: int = 10_000

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as plain JSON values; the record's key is their fingerprint."""
        return dataclasses.asdict(self)

    def starts(self) -> list[Point]:
        """Returns the points of the starting grid."""
        return [
            Point(algorithm, *indices)
            for algorithm, axes in self.start.items()
            for indices in itertools.product(*(axes.get(axis, (0,)) for axis in AXES))
        ]


def full_settings(*, num_trials: int = 20, seed: int = 0) -> LinregSettings:
    """Returns the figure's settings: axes in steps of √2 (travel, clip), 2 (steps), √10 (ridge)."""
    wide = {
        "travel": tuple(range(-16, 3, 2)),
        "clip_norm": (-1, 1, 3, 5),
        "num_steps": (-2, 0, 2),
    }
    return LinregSettings(
        num_trials,
        seed,
        Lattice(2**0.5, 2**0.5, 2.0, 10**0.5, base_steps=100, max_steps=6400),
        {"cold": wide, "warm": wide, "pda-dpmd": {**wide, "ridge": (-1, 1)}},
    )


def quick_settings(*, num_trials: int = 5, seed: int = 0) -> LinregSettings:
    """Returns settings of under a minute on two cores: at most 144 steps, one widening."""
    return LinregSettings(
        num_trials,
        seed,
        Lattice(2**0.5, 2.0, 4.0, 10**0.5, base_steps=36, max_steps=144),
        {
            "cold": {"travel": (-5, -4, -3), "clip_norm": (0, 2, 3), "num_steps": (1,)},
            "warm": {"travel": (-9, -8, -7, -6), "clip_norm": (-1,), "num_steps": (1,)},
            "pda-dpmd": {
                "travel": (-9, -8, -7, -4, -3, -2),
                "clip_norm": (-1,),
                "num_steps": (0,),
                "ridge": (1, 2),
            },
        },
        tolerance=0.01,
        max_rounds=1,
    )


def run_dimension(
    dimension: int, settings: LinregSettings, backend: Backend
) -> list[records.Record]:
    """Draws the trials of one dimension, searches, and returns one record per algorithm."""
    began, cpu_began = time.perf_counter(), time.process_time()
    draw = partial(
        make_trial,
        backend.decompose,
        dimension,
        seed=settings.seed,
        num_private=settings.num_private,
    )
    with ThreadPoolExecutor(backend.workers) as pool:
        trials = list(pool.map(draw, range(settings.num_trials)))
    prepared = time.perf_counter()
    run = partial(
        evaluate,
        trials=trials,
        lattice=settings.lattice,
        backend=backend,
        epsilon=settings.epsilon,
        delta=settings.delta,
    )
    outcomes = search(
        run,
        settings.starts(),
        settings.lattice,
        tolerance=settings.tolerance,
        max_rounds=settings.max_rounds,
    )
    seconds = {
        "prepare": round(prepared - began, 2),
        "search": round(time.perf_counter() - prepared, 2),
        "cpu": round(time.process_time() - cpu_began, 2),
    }
    backend.release()
    folder = Path(__file__).parent
    source = records.provenance(
        ("mirrordp", "jax", "jaxlib", "numpy", "scipy", "dp-accounting"),
        [folder / name for name in ("simulation.py", "backends.py", "search.py", "command.py")],
        backend.device,
    )
    common = {
        "experiment": "linreg",
        "key": records.fingerprint(settings.as_json()),
        "dimension": dimension,
        "spectrum": _spectrum(trials),
        "seconds": seconds,
        "settings": settings.as_json(),
        "provenance": source,
    }
    return [
        {"algorithm": algorithm, **common, **_summary(algorithm, outcomes, trials, settings)}
        for algorithm in ALGORITHMS
    ]


def _spectrum(trials: Sequence[Trial]) -> dict[str, list[float]]:
    """Describes the public Hessian of each trial; the ratio omits the exact null direction."""
    nonzero = [trial.eigenvalues[trial.eigenvalues > 0] for trial in trials]
    return {
        "largest": [float(values[-1]) for values in nonzero],
        "median": [float(np.median(trial.eigenvalues)) for trial in trials],
        "smallest_nonzero": [float(values[0]) for values in nonzero],
        "null_directions": [
            len(trial.eigenvalues) - len(values)
            for trial, values in zip(trials, nonzero, strict=True)
        ],
    }


def _summary(
    algorithm: str,
    outcomes: Mapping[Point, Outcome],
    trials: Sequence[Trial],
    settings: LinregSettings,
) -> dict[str, Any]:
    """Returns the part of a record about one algorithm: its grid, its best point, its losses."""
    lattice = settings.lattice
    own = {point: outcome for point, outcome in outcomes.items() if point.algorithm == algorithm}
    losses = {point: float(outcome.mean.min()) for point, outcome in own.items()}
    best = min(own, key=lambda point: losses[point])

    def describe(point: Point, output: int) -> dict[str, Any]:
        outcome = own[point]
        num_steps = lattice.num_steps(point)
        return {
            "output": OUTPUTS[output],
            "learning_rate": float(outcome.learning_rates.mean()),
            "clip_norm": lattice.clip_norm(point),
            "num_steps": num_steps,
            "noise_multiplier": noise_multiplier(settings.epsilon, settings.delta, num_steps),
            "ridge": lattice.ridge(point) if "ridge" in axes_of(algorithm) else None,
            "travel": lattice.travel(point),
            "losses": outcome.empirical[:, output].tolist(),
            "population_losses": outcome.population[:, output].tolist(),
        }

    middle = centre(losses, algorithm, lattice, settings.tolerance)
    reached = ends(losses, middle, lattice, settings.tolerance)
    start = np.zeros_like if algorithm == "cold" else np.copy
    start_losses = [
        float(np.mean((trial.design @ start(trial.public_model) - trial.targets) ** 2))
        for trial in trials
    ]
    return {
        "best": describe(best, int(np.argmin(own[best].mean))),
        "best_by_output": {
            name: describe(min(own, key=lambda point: own[point].mean[output]), output)
            for output, name in enumerate(OUTPUTS)
        },
        "ends": {
            name: [reached[name, sign][0] for sign in (-1, 1)] for name, sign in reached if sign > 0
        },
        "start_losses": start_losses,
        "grid": [
            {
                "travel": lattice.travel(point),
                "clip_norm": lattice.clip_norm(point),
                "num_steps": lattice.num_steps(point),
                "ridge": lattice.ridge(point) if "ridge" in axes_of(algorithm) else None,
                "mean_losses": [
                    float(f"{m:.6g}") if np.isfinite(m) else None for m in outcome.mean
                ],
            }
            for point, outcome in sorted(own.items())
        ],
    }


def make_backend(device: str) -> Backend:
    """Makes a backend: SciPy for 'cpu', JAX for 'jax'; 'auto' prefers an accelerator."""
    if device == "auto":
        device = "cpu" if jax.default_backend() == "cpu" else "jax"
    return SparseBackend() if device == "cpu" else JaxBackend()


def warn_about_ends(record: records.Record) -> None:
    """Warns where the grid ends at the best point although the loss may go on falling."""
    unfinished = [
        f"{name} ({status})"
        for name, statuses in record["ends"].items()
        for status in statuses
        if status in ("limit", "open")
    ]
    if unfinished:
        warnings.warn(
            f"p={record['dimension']}, {record['algorithm']}: the grid ends at the best point in "
            f"{', '.join(unfinished)}, so more tuning may lower the loss",
            stacklevel=2,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then draws; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments linreg",
        description="Figure 1: cold and warm DP-SGD and PDA-DPMD on simulated linear regression.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="p <= 1500, 5 trials, at most 144 steps"
    )
    parser.add_argument("--trials", type=int, help="trials per grid point (20; quick: 5)")
    parser.add_argument(
        "--dims",
        type=at_least(5 * ACTIVE_FEATURES[0]),
        nargs="+",
        help="dimensions p (500 to 6000)",
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--device", choices=("auto", "cpu", "jax"), default="auto")
    parser.add_argument(
        "--plot-only", action="store_true", help="compute nothing; draw what is there"
    )
    parser.add_argument(
        "--no-plot", action="store_true", help="compute only (no matplotlib needed)"
    )
    parser.add_argument(
        "--readme",
        type=existing_file,
        help="also write the table into the marked section of this file",
    )
    arguments = parser.parse_args(argv)
    if arguments.trials is not None and arguments.trials < 2:
        parser.error(f"--trials: an interval needs at least 2 trials, got {arguments.trials}")

    make_settings = quick_settings if arguments.quick else full_settings
    chosen = {"seed": arguments.seed}
    if arguments.trials is not None:
        chosen["num_trials"] = arguments.trials
    settings = make_settings(**chosen)
    name = "quick" if arguments.quick else "full"
    path = arguments.out / f"{name}.jsonl"
    key = records.fingerprint(settings.as_json())

    if not arguments.plot_only:
        dimensions = arguments.dims or (QUICK_DIMENSIONS if arguments.quick else FULL_DIMENSIONS)
        finished = {
            (record["dimension"], record["algorithm"])
            for record in records.read(path)
            if record.get("key") == key
        }
        backend = make_backend(arguments.device)
        for dimension in dimensions:
            if all((dimension, algorithm) in finished for algorithm in ALGORITHMS):
                print(f"p={dimension}: already in {path.name}, skipped", flush=True)
                continue
            for record in run_dimension(dimension, settings, backend):
                if (dimension, record["algorithm"]) not in finished:
                    records.append(path, record)
                warn_about_ends(record)
                best = record["best"]
                print(
                    f"p={dimension} {record['algorithm']:9} loss {np.mean(best['losses']):.5f} "
                    f"(population {np.mean(best['population_losses']):.5f}), "
                    f"start {np.mean(record['start_losses']):.5f}; T={best['num_steps']} "
                    f"C={best['clip_norm']:.3g} ridge={best['ridge']} travel={best['travel']:.3g} "
                    f"{best['output']}; {len(record['grid'])} points, {record['seconds']} s",
                    flush=True,
                )
    if not arguments.no_plot:
        from experiments.linreg import report  # matplotlib is needed here and nowhere else

        found = [record for record in records.read(path) if record.get("key") == key]
        report.write(found, arguments.out, name, readme=arguments.readme)
    return 0
