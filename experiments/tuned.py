"""`python -m experiments tuning`: settings chosen by hand, free, paid or not at all, at one ε.

A small network on real tables, from a public start. By hand means as everybody does it: every
candidate is trained with all of ε on four fifths of the private rows, the others judge without
noise, and the best one is trained once more on all rows. Its ε does not cover the search. The
others are `mirrordp.tune`, whose ε does.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import threadpoolctl

import mirrordp
from experiments import records, sections
from experiments.options import at_least, existing_file
from experiments.shift import DELTA, PACKAGES
from experiments.table_models import TABLES, measured, split_table
from mirrordp import tuning
from mirrordp.tables import Table

RESULTS = Path(__file__).parent / "results" / "tuning"
METHODS = {
    "hand": "by hand, not charged",
    "free": "`Free()`",
    "paid": "`Paid()`",
    "both": "`Both()`",
    "none": "no settings given",
}
HIDDEN, BATCH_SIZE, EPOCHS = 64, 512, 20
LEARNING_RATES, CLIP_NORMS, ALPHAS = (0.01, 0.03, 0.1, 0.3), (1.0, 4.0, 16.0), (0.5, 1.0)
# Losses beyond count as this much where private rows judge.
LARGEST_LOSS = 3.0

Rows = dict[str, np.ndarray]


def rows_of(data: Any, part: str, task: str) -> Rows:
    """Returns rows of a part, scaled by the public ones."""
    mean, std = data["public_x"].mean(axis=0), data["public_x"].std(axis=0)
    # A row far outside of the public range would be nothing but clipped.
    x = np.clip((data[f"{part}_x"] - mean) / np.where(std > 0, std, 1.0), -5, 5)
    y = data[f"{part}_y"].astype(float)
    if task == "regression":
        y = (y - data["public_y"].mean()) / data["public_y"].std()
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def problem(width: int, task: str):
    """Returns the scores of a network, their loss, and cold parameters."""
    keys = jax.random.split(jax.random.key(0))
    cold = {
        "hidden": (jax.random.normal(keys[0], (width, HIDDEN)) / np.sqrt(width), jnp.zeros(HIDDEN)),
        "out": (jax.random.normal(keys[1], (HIDDEN,)) / np.sqrt(HIDDEN), jnp.zeros(())),
    }

    def score(params, x):
        (first, bias), (last, shift) = params["hidden"], params["out"]
        return jnp.tanh(x @ first + bias) @ last + shift

    def loss(params, row):
        found = score(params, row["x"])
        if task == "regression":
            return 0.5 * (found - row["y"]) ** 2
        return jnp.logaddexp(0.0, found) - row["y"] * found

    return score, loss, cold


def fit(method: str, private: Rows, public: Rows, task: str, epsilon: float, seed: int):
    """Returns the scores of a trained network as a function, and the settings."""
    score, loss, cold = problem(private["x"].shape[1], task)

    def start(rows):
        return mirrordp.warm_start(loss, cold, rows, seed=0).params

    space = tuning.grid(
        learning_rate=LEARNING_RATES,
        l2_clip_norm=CLIP_NORMS,
        batch_size=BATCH_SIZE,
        num_steps=EPOCHS * len(private["y"]) // BATCH_SIZE,
        alpha=ALPHAS,
    )
    privately = tuning.PrivateScore(lambda params, row: -loss(params, row), -LARGEST_LOSS, 0.0)
    paid = tuning.Paid(tuning.NumberOfRuns(10), privately)
    ways = {
        "free": tuning.Free(),
        "paid": paid,
        "both": tuning.Both(paid=tuning.Paid(tuning.NumberOfRuns(5), privately)),
        "none": tuning.Free(),
    }
    known = mirrordp.PublicData(public)
    if method == "hand":
        params, settings = _by_hand(loss, start(known), private, known, space, epsilon, seed)
    else:
        found = mirrordp.tune(
            loss, start, mirrordp.PrivateData(private), known, epsilon=epsilon, delta=DELTA,
            space=None if method == "none" else space, way=ways[method], seed=seed,
        )  # fmt: skip
        assert found.report.epsilon <= epsilon
        params, settings = found.params, found.settings
    return lambda x: np.asarray(jax.vmap(score, (None, 0))(params, x)), settings


def _by_hand(loss, start, private, public, space, epsilon, seed):
    order = np.random.default_rng(seed).permutation(len(private["y"]))
    judges, known = np.split(order, [len(order) // 5])

    @functools.cache
    def calibrated(num_examples):
        return mirrordp.Mechanism.calibrate(
            epsilon=epsilon, delta=DELTA,
            sampling=mirrordp.PoissonSampling.for_batch_size(
                space[0].batch_size, num_examples=num_examples
            ),
            num_steps=space[0].num_steps, l2_clip_norm=1.0,
        )  # fmt: skip

    def trained(rows, settings, seed):
        # The noise multiplier is relative to the clip norm.
        mechanism = dataclasses.replace(
            calibrated(len(rows["y"])), l2_clip_norm=settings.l2_clip_norm
        )
        step = mirrordp.TrainStep(loss, mechanism, optax.sgd(settings.learning_rate))
        *_, (state, _) = mirrordp.train(
            step, start, mirrordp.PrivateData(rows), public, alpha=settings.alpha, seed=seed
        )
        return state.params

    losses = []
    for settings in space:
        params = trained({k: v[known] for k, v in private.items()}, settings, seed)
        rows = {k: v[judges] for k, v in private.items()}
        losses.append(float(jax.vmap(loss, (None, 0))(params, rows).mean()))
    best = space[int(np.nanargmin(losses))]
    return trained(private, best, seed + 1000), best


def run(table: Table, name: str, method: str, epsilon: float, seed: int) -> records.Record:
    """Trains by one method; returns what the test rows say."""
    data, task, _ = split_table(table, name, seed)
    private, public, test = (rows_of(data, part, task) for part in ("private", "public", "test"))
    began = time.perf_counter()
    scores, settings = fit(method, private, public, task, epsilon, seed)
    seconds = time.perf_counter() - began
    found = scores(test["x"])
    if task == "regression":
        found = found * data["public_y"].std() + data["public_y"].mean()
    else:
        found = 1 / (1 + np.exp(-found))
    return {
        **measured(task, data["test_y"], found),
        "settings": None if settings is None else settings.to_dict(),
        "seconds": round(seconds, 1),
    }


def table_of(found: Sequence[records.Record]) -> str:
    """Returns a Markdown table: a row per table and ε, mean and spread over seeds."""
    lines = [f"| table | ε | measure | seeds | {' | '.join(METHODS.values())} |"]
    lines.append("|---" * (4 + len(METHODS)) + "|")
    for name, epsilon in sorted({(line["table"], line["epsilon"]) for line in found}):
        here = [line for line in found if (line["table"], line["epsilon"]) == (name, epsilon)]
        for measure, digits in (("rmse", ".0f"), ("loss", ".4f"), ("auc", ".4f")):
            cells, counts = [], set()
            for method in METHODS:
                values = [x[measure] for x in here if x["method"] == method and measure in x]
                counts.add(len(values))
                text = f"{np.mean(values):{digits}}" if values else "not run"
                cells.append(text + (f" ± {np.std(values):{digits}}" if len(values) > 1 else ""))
            if counts != {0}:
                shown = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else max(counts)
                lines.append(
                    f"| {name} | {epsilon:g} | {measure} | {shown} | {' | '.join(cells)} |"
                )
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes the table; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m experiments tuning", description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=["adult", "housing"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--seeds", type=at_least(1), default=3, help="number of seeds")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="as for tabular")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--readme", type=existing_file, help="rewrite the section of this file")
    arguments = parser.parse_args(argv)
    path = arguments.out / "runs.jsonl"
    sources = sorted([Path(__file__), *Path(mirrordp.__file__).parent.rglob("*.py")])
    provenance = records.provenance((*PACKAGES, "optax"), sources, "cpu")
    keys = ("table", "method", "epsilon", "seed")
    done = {tuple(line[key] for key in keys) for line in records.read(path)}
    tables: dict[str, Table] = {}
    options = (arguments.tables, arguments.epsilons, arguments.methods)
    for seed, (name, epsilon, method) in itertools.product(
        range(arguments.seeds), itertools.product(*options)
    ):
        if (name, method, epsilon, seed) in done:
            continue
        if name not in tables:
            tables[name] = TABLES[name][2](arguments.data_root / "tabular")
        with threadpoolctl.threadpool_limits(1, user_api="blas"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run(tables[name], name, method, epsilon, seed)
        line = dict(zip(keys, (name, method, epsilon, seed), strict=True)) | {"delta": DELTA}
        line = {"experiment": "tuning"} | line | found | {"provenance": provenance}
        records.append(path, line)
        print(f"{name}, ε = {epsilon:g}, {method}, seed {seed}: done", file=sys.stderr, flush=True)
    text = table_of(records.read(path))
    sections.publish(text, "tuning", arguments.out, arguments.readme)
    return 0
