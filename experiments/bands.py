"""`python -m experiments bands`: noise that is correlated over steps, beside independent noise.

The small networks of `tuning` on real tables, from a public start, at the same ε. Independent noise
comes with Poisson sampling. Correlated noise needs cyclic Poisson sampling, and so a larger σ: once
with the best coefficients for prefix sums, once with those for the public curvature. Of 2, 4 and 8
bands each takes the number that `public_noise_loss` prefers, on public rows alone. Runs are paired
by seed. A finished run is a line of the result file, and is not done again.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import optax
import scipy.stats

import mirrordp
from experiments import records, sections
from experiments.options import add_result_options, at_least
from experiments.shift import PACKAGES
from experiments.tuned import Problem, table_problem
from mirrordp import Mechanism, PoissonSampling, tuning
from mirrordp.privacy import BandedNoise, CyclicPoissonSampling
from mirrordp.training.sweep import run_state

RESULTS = Path(__file__).parent / "results" / "bands"
TASKS = {"housing": "rmse", "adult": "loss"}
KINDS = {
    "independent": "independent",
    "prefix": "for prefix sums (BandMF)",
    "curvature": "for the public curvature",
}
CLIP_NORM, BATCH_SIZE, EPOCHS, PRIVATE_ROWS = 8.0, 512, 20, 10_000
RATES, BANDS, EPSILONS = (0.03, 0.1), (2, 4, 8), (1.0, 8.0)


def candidates(
    problem: Problem, start, public, kind: str, epsilon: float, rate: float
) -> list[tuple[float, Mechanism]]:
    """Returns mechanisms of one kind with their loss by noise on the public quadratic."""
    count = len(jax.tree.leaves(problem.private)[0])
    steps = EPOCHS * count // BATCH_SIZE
    found = []
    for number in (1,) if kind == "independent" else BANDS:
        sampling, noise = PoissonSampling.for_batch_size(BATCH_SIZE, num_examples=count), {}
        if kind != "independent":
            sampling = CyclicPoissonSampling.for_batch_size(
                BATCH_SIZE, num_examples=count, num_groups=number
            )
            noise["noise"] = BandedNoise.optimal(steps, number)
        if kind == "curvature":
            noise["noise"] = tuning.public_bands(
                problem.loss, start, public, learning_rate=rate, num_steps=steps, num_bands=number
            )
        mechanism = Mechanism.calibrate(
            epsilon=epsilon, delta=problem.delta, sampling=sampling, num_steps=steps,
            l2_clip_norm=CLIP_NORM, **noise,
        )  # fmt: skip
        harm = tuning.public_noise_loss(problem.loss, start, public, mechanism, learning_rate=rate)
        found.append((harm, mechanism))
    return found


def run(
    problem: Problem, kind: str, epsilon: float, rate: float, seeds: Sequence[int]
) -> list[records.Record]:
    """Trains one run for each seed; returns what test rows say."""
    public = mirrordp.PublicData(problem.public)
    start = problem.start(public)
    harm, mechanism = min(
        candidates(problem, start, public, kind, epsilon, rate), key=lambda pair: pair[0]
    )
    step = mirrordp.TrainStep(problem.loss, mechanism, optax.sgd(rate))
    runs = [mirrordp.SweepRun(seed=seed) for seed in seeds]
    private = mirrordp.PrivateData(problem.private)
    *_, (states, _) = mirrordp.train_sweep(step, start, private, runs=runs)
    about = {
        "bands": getattr(mechanism.noise, "num_bands", 1),
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_loss": harm,
    }
    return [
        {"seed": seed, **about, **problem.measured(run_state(states, number).params)}
        for number, seed in enumerate(seeds)
    ]


def table_of(lines: Sequence[records.Record]) -> str:
    """Returns Markdown: means, and differences from independent noise with 95% intervals."""
    shown = ["| table, measure | ε | rate | noise | bands | σ | predicted loss by noise | test |"]
    shown.append("|---" * 8 + "|")
    for task, epsilon, rate in itertools.product(TASKS, EPSILONS, RATES):
        here = [x for x in lines if (x["task"], x["epsilon"], x["rate"]) == (task, epsilon, rate)]
        by_kind = {
            kind: {x["seed"]: x for x in here if x["kind"] == kind}
            for kind in KINDS
            if any(x["kind"] == kind for x in here)
        }
        for kind, own in by_kind.items():
            line = next(iter(own.values()))
            cell = _cell(own, by_kind.get("independent", {}), TASKS[task])
            if kind == "independent":
                cell = f"{np.mean([x[TASKS[task]] for x in own.values()]):.5g}"
            shown.append(
                f"| {task}, {TASKS[task]} | {epsilon:g} | {rate:g} | {KINDS[kind]} | "
                f"{line['bands']} | {line['noise_multiplier']:.2f} | {line['noise_loss']:.2g} | "
                f"{cell} |"
            )
    return "\n".join([*shown, ""])


def _cell(own: dict, base: dict, measure: str) -> str:
    seeds = sorted(own.keys() & base.keys())
    if not seeds:
        return "no pair"
    values = [100 * (own[seed][measure] / base[seed][measure] - 1) for seed in seeds]
    text = f"{np.mean(values):+z.2f}%"
    if len(values) > 1:
        half = scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values)
        text += f" ± {half:.2f}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes the table; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m experiments bands", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=at_least(1), default=10, help="number of seeds")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the data")
    add_result_options(parser, RESULTS)
    arguments = parser.parse_args(argv)
    path = arguments.out / "runs.jsonl"
    sources = sorted([Path(__file__), *Path(mirrordp.__file__).parent.rglob("*.py")])
    provenance = records.provenance((*PACKAGES, "optax"), sources, jax.default_backend())
    keys = ("task", "kind", "epsilon", "rate")
    for task in arguments.tasks:
        problem = None
        for kind, epsilon, rate in itertools.product(KINDS, arguments.epsilons, RATES):
            same = dict(zip(keys, (task, kind, epsilon, rate), strict=True))
            done = {x["seed"] for x in records.read(path) if {key: x[key] for key in keys} == same}
            seeds = [seed for seed in range(arguments.seeds) if seed not in done]
            if not seeds:
                continue
            problem = problem or table_problem(task, arguments.data_root, 0, PRIVATE_ROWS)
            for line in run(problem, kind, epsilon, rate, seeds):
                whole = {"experiment": "bands"} | same | line | {"provenance": provenance}
                records.append(path, whole)
            print(f"{task}, ε = {epsilon:g}, rate {rate:g}, {kind}: done", file=sys.stderr)
    sections.publish(table_of(records.read(path)), "bands", arguments.out, arguments.readme)
    return 0
