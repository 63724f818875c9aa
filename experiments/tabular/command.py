"""`python -m experiments tabular`: what to run, records, and the command line."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

import mirrordp
from experiments import records
from experiments.options import at_least, existing_file
from experiments.tabular import report
from experiments.tabular.data import (
    DATASETS,
    PUBLIC_FRACTION,
    TEST_FRACTION,
    Dataset,
    split_dataset,
)
from experiments.tabular.methods import (
    COLD,
    DELTA,
    EPSILONS,
    NON_PRIVATE,
    OURS,
    PEER,
    PUBLIC,
    START,
    WARM,
    Job,
    Outcome,
    candidates,
    primary,
    run,
    run_peer,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "tabular"
# Splits of smaller numbers were looked at while the estimators' rules were chosen.
FIRST_SEED = 100
TUNING_SEED = 1000
PACKAGES = ("mirrordp", "jax", "jaxlib", "numpy", "scipy", "scikit-learn", "dp-accounting")


def key(dataset: str) -> str:
    """Identifies the settings that every line of a data set shares."""
    return records.fingerprint(
        {
            "dataset": dataset,
            "delta": DELTA,
            "public_fraction": PUBLIC_FRACTION,
            "test_fraction": TEST_FRACTION,
        }
    )


def job_of(record: records.Record) -> Job:
    """Returns the job that a line is the outcome of."""
    settings = tuple(record["settings"].items())
    return Job(record["method"], record["epsilon"], record["seed"], settings)


class Log:
    """The lines of one data set: what is finished, and where the next ones go."""

    def __init__(self, path: Path, dataset: str, provenance: records.Record):
        self._path, self._dataset, self._provenance = path, dataset, provenance
        self._outcomes: dict[Job, dict[str, Any]] = {
            job_of(record): record["metrics"]
            for record in records.read(path)
            if record.get("key") == key(dataset)
        }

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """Returns the jobs that have no line yet."""
        return [job for job in jobs if job not in self._outcomes]

    def add(self, job: Job, outcome: Outcome, versions: dict[str, str] | None = None) -> None:
        """Writes one line."""
        provenance = self._provenance
        if versions is not None:
            provenance = provenance | {"packages": versions}
        record = {
            "experiment": "tabular",
            "key": key(self._dataset),
            "dataset": self._dataset,
            "method": job.method,
            "epsilon": job.epsilon,
            "delta": 0.0 if job.method == PEER else DELTA if job.epsilon is not None else None,
            "seed": job.seed,
            "settings": dict(job.settings),
            "metrics": outcome.metrics,
            "details": outcome.details,
            "seconds": outcome.seconds,
            "provenance": provenance,
        }
        records.append(self._path, record)
        self._outcomes[job] = outcome.metrics

    def loss(self, job: Job, metric: str) -> float:
        """Returns the loss of a finished job; infinite where it diverged."""
        value = self._outcomes[job][metric]
        return np.inf if value is None else value


def provenance() -> records.Record:
    """Returns code and versions; must be called before the code can change on disk."""
    package = Path(mirrordp.__file__).parent
    sources = sorted([*Path(__file__).parent.glob("*.py"), *package.rglob("*.py")])
    return records.provenance(PACKAGES, sources, "cpu")


def tuning_jobs(dataset: Dataset, methods: Sequence[str], num_seeds: int) -> list[Job]:
    """Returns every candidate of the methods that are tuned, at every ε."""
    return [
        Job(method, epsilon, TUNING_SEED + trial, settings)
        for trial in range(num_seeds)
        for method in methods
        for epsilon in EPSILONS
        for settings in candidates(method, dataset.task)
    ]


def chosen(log: Log, dataset: Dataset, method: str, epsilon: float, num_seeds: int) -> tuple:
    """Returns the candidate with the least mean test loss over the tuning seeds."""
    return min(
        candidates(method, dataset.task),
        key=lambda settings: np.mean(
            [
                log.loss(Job(method, epsilon, TUNING_SEED + trial, settings), primary(dataset.task))
                for trial in range(num_seeds)
            ]
        ),
    )


def main_jobs(
    log: Log, dataset: Dataset, tuned: Sequence[str], seeds: Sequence[int], num_tuning_seeds: int
) -> list[Job]:
    """Returns the jobs of the table."""
    settings: dict[tuple[str, float | None], tuple] = {
        (method, epsilon): chosen(log, dataset, method, epsilon, num_tuning_seeds)
        for method in tuned
        for epsilon in EPSILONS
    }
    return [
        Job(method, epsilon, seed, settings.get((method, epsilon), ()))
        for seed in seeds
        for method in (OURS, WARM, *tuned, START, PUBLIC, NON_PRIVATE)
        for epsilon in ((None,) if method in (START, PUBLIC, NON_PRIVATE) else EPSILONS)
    ]


def execute(jobs: Sequence[Job], dataset: Dataset, log: Log, peer_python: Path | None) -> None:
    """Runs the jobs that have no line yet, seed by seed."""
    missing = log.missing(jobs)
    for seed in sorted({job.seed for job in missing}):
        rows = split_dataset(dataset, seed)
        own = [job for job in missing if job.seed == seed]
        for job in own:
            if job.method != PEER:
                log.add(job, run(job, rows))
        others = [job for job in own if job.method == PEER]
        if others and peer_python is not None:
            results = run_peer(others, rows, peer_python)
            for job, (outcome, versions) in zip(others, results, strict=True):
                log.add(job, outcome, versions)
        print(f"{dataset.name}, seed {seed}: {len(own)} fits done", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes table and figure; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments tabular",
        description="Linear models of real tables, 4% of the training rows public.",
    )
    parser.add_argument("--quick", action="store_true", help="3 seeds, 1 tuning seed")
    parser.add_argument("--seeds", type=at_least(1), help="number of seeds (20; quick: 3)")
    parser.add_argument(
        "--first-seed", type=int, default=FIRST_SEED, help="the seeds start at %(default)s"
    )
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument(
        "--data-root",
        type=Path,
        default=Path("data"),
        help="folder given to unpack.py; its folder tabular/ holds the files",
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        default=Path(".peer/bin/python"),
        help="interpreter that has diffprivlib and scikit-learn<1.6 (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--plot-only", action="store_true", help="compute nothing")
    parser.add_argument(
        "--readme",
        type=existing_file,
        help="also write the tables into the marked section of this file",
    )
    arguments = parser.parse_args(argv)
    folder = arguments.data_root / "tabular"
    if not arguments.plot_only and not folder.is_dir():
        parser.error(
            f"expected the data in {folder}, got no such folder; run unpack.py "
            f"{arguments.data_root} tabular, or give --data-root"
        )
    name = "quick" if arguments.quick else "full"
    num_seeds = arguments.seeds or (3 if arguments.quick else 20)
    num_tuning_seeds = 1 if arguments.quick else 2
    seeds = range(arguments.first_seed, arguments.first_seed + num_seeds)
    if not 0 <= seeds.start < seeds.stop <= TUNING_SEED:
        parser.error(
            f"expected seeds from 0 to {TUNING_SEED - 1}, got {seeds.start} to {seeds.stop - 1}; "
            "the others are for tuning"
        )
    peer_python = arguments.peer_python if arguments.peer_python.exists() else None
    if peer_python is None:
        print(f"no {arguments.peer_python}: diffprivlib is left out", file=sys.stderr)
    path = arguments.out / f"{name}.jsonl"
    running = provenance()
    found = []
    for dataset_name in arguments.datasets:
        if not arguments.plot_only:
            dataset = DATASETS[dataset_name](folder)
            log = Log(path, dataset_name, running)
            tuned = (COLD, PEER) if peer_python is not None else (COLD,)
            # Small matrices: a second BLAS thread only waits for the first.
            with threadpoolctl.threadpool_limits(1, user_api="blas"):
                tuning = tuning_jobs(dataset, tuned, num_tuning_seeds)
                execute(tuning, dataset, log, peer_python)
                jobs = main_jobs(log, dataset, tuned, seeds, num_tuning_seeds)
                execute(jobs, dataset, log, peer_python)
        found += [
            record
            for record in records.read(path)
            if record.get("key") == key(dataset_name) and record["seed"] in seeds
        ]
    report.write(found, arguments.out, name, readme=arguments.readme)
    return 0
