"""`python -m experiments tuning`: settings chosen by hand, free, paid or not at all, at one ε.

A small network on real tables, or the paper's networks on images or text, from a public start. By
hand means as everybody does it: every candidate is trained with all of ε on four fifths of the
private rows, the others judge without noise, and the best one is trained once more on all rows. Its
ε does not cover the search. The others are `mirrordp.tune`, whose ε does. A finished run is a line
of the result file at once, and is not done again.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import threadpoolctl

import mirrordp
from experiments import datasets, models, records, sections
from experiments.deep import tasks
from experiments.deep.training import public_start
from experiments.options import add_result_options, at_least
from experiments.shift import DELTA, PACKAGES
from experiments.stackoverflow import command as stackoverflow, data as users
from experiments.table_models import TABLES, measured, split_table
from mirrordp import tuning
from mirrordp.training.sweep import run_state
from mirrordp.tuning.trials import model_of
from mirrordp.types import LossFn, Params, PyTree

RESULTS = Path(__file__).parent / "results" / "tuning"
METHODS = {
    "start": "public rows alone",
    "hand": "by hand, not charged",
    "free": "`Free()`",
    "paid": "`Paid()`",
    "both": "`Both()`",
    "none": "no settings given",
}
HIDDEN, BATCH_SIZE, EPOCHS = 64, 512, 20
LEARNING_RATES, CLIP_NORMS, ALPHAS = (0.01, 0.03, 0.1, 0.3), (2.0, 8.0), (0.5, 1.0)
TOGETHER = 8
Rows = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Deep:
    """Short runs of one of the paper's networks, and settings around those of `methods.py`."""

    delta: float
    batch_size: int
    epochs: float
    rates: tuple[float, ...]
    clip_norms: tuple[float, ...] = (2.0, 8.0)
    alphas: tuple[float, ...] = (0.85, 1.0)
    largest_loss: float = 3.0
    public_batch_size: int = 128

    def space(self, num_private: int) -> list[tuning.Settings]:
        """Returns the candidates."""
        return tuning.grid(
            learning_rate=self.rates,
            l2_clip_norm=self.clip_norms,
            batch_size=self.batch_size,
            num_steps=int(self.epochs * num_private // self.batch_size),
            alpha=self.alphas,
        )


DEEP = {
    "cifar10": Deep(1e-5, 1000, 6.25, (0.025, 0.1, 0.4, 1.6)),
    "emnist": Deep(1e-6, 2000, 10.0, (0.15, 0.5, 1.5, 4.0)),
    "wikitext2": Deep(1e-5, 250, 2.0, (0.4, 1.6, 6.4, 25.0), (0.8,), largest_loss=8.0),
    "stackoverflow": Deep(
        1e-6, 100, 8.4, (0.4, 1.6, 6.4, 25.0), (0.5,), largest_loss=8.0, public_batch_size=16
    ),
}
SENTENCES_PER_USER, MICROBATCH_SIZE = 16, 50
DIVERGED = 1e9  # the loss of a model that has none


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What is to be learned, and how well a model does on test rows.

    Attributes:
        loss: the loss of one row.
        start: learns the start from public rows.
        private: the private rows.
        public: the public rows.
        space: the candidates.
        measured: `measured(params)` returns measures on test rows.
        delta: δ.
        largest_loss: losses beyond count as this much where private rows judge.
        public_batch_size: public rows in a step.
        step_options: further arguments of `TrainStep`, of all methods.
    """

    loss: LossFn
    start: Callable[[mirrordp.PublicData], Params]
    private: PyTree
    public: PyTree
    space: list[tuning.Settings]
    measured: Callable[[Params], dict[str, float]]
    delta: float
    largest_loss: float = 3.0
    public_batch_size: int = 128
    step_options: dict[str, Any] = dataclasses.field(default_factory=dict)


def rows_of(data: Any, part: str, task: str) -> Rows:
    """Returns rows of a part, scaled by the public ones."""
    mean, std = data["public_x"].mean(axis=0), data["public_x"].std(axis=0)
    # A row far outside of the public range would be nothing but clipped.
    x = np.clip((data[f"{part}_x"] - mean) / np.where(std > 0, std, 1.0), -5, 5)
    y = data[f"{part}_y"].astype(float)
    if task == "regression":
        y = (y - data["public_y"].mean()) / data["public_y"].std()
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def network(width: int, task: str):
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


def _some(rows: PyTree, most: int | None, seed: int) -> PyTree:
    # At random: the rows of a table may be in an order, as those of housing are.
    numbers = np.random.default_rng(seed).permutation(len(jax.tree.leaves(rows)[0]))[:most]
    return jax.tree.map(lambda leaf: leaf[np.sort(numbers)], rows)


def table_problem(name: str, folder: Path, seed: int, most_rows: int | None = None) -> Problem:
    """Returns a network on a table; of the private rows, at most `most_rows` random ones."""
    data, task, _ = split_table(TABLES[name][2](folder / "tabular"), name, seed)
    private, public, test = (rows_of(data, part, task) for part in ("private", "public", "test"))
    private = _some(private, most_rows, seed)
    score, loss, cold = network(private["x"].shape[1], task)

    def measures(params: Params) -> dict[str, float]:
        found = np.asarray(jax.vmap(score, (None, 0))(params, test["x"]))
        if task == "regression":
            found = found * data["public_y"].std() + data["public_y"].mean()
        else:
            found = 1 / (1 + np.exp(-found))
        return measured(task, data["test_y"], found)

    space = tuning.grid(
        learning_rate=LEARNING_RATES,
        l2_clip_norm=CLIP_NORMS,
        batch_size=BATCH_SIZE,
        num_steps=EPOCHS * len(private["y"]) // BATCH_SIZE,
        alpha=ALPHAS,
    )
    return Problem(
        loss,
        lambda rows: mirrordp.warm_start(loss, cold, rows, seed=0).params,
        private, public, space, measures, DELTA,
    )  # fmt: skip


def deep_problem(name: str, folder: Path, seed: int, most_rows: int | None = None) -> Problem:
    """Returns the paper's network on images or text, pre-trained on public ones."""
    prepared, task, chosen = datasets.prepare(name, folder, seed=seed), tasks.task(name), DEEP[name]
    private = _some(prepared.private, most_rows, seed)
    cold = task.network.init(jax.random.key(seed))

    def measures(params: Params) -> dict[str, float]:
        stacked = jax.tree.map(lambda leaf: leaf[None], params)
        test = jax.device_put(prepared.test)
        found = tasks.evaluate(task, stacked, test, batch_size=500)
        return {key: float(value[0]) for key, value in found.items()}

    options = {
        "public_loss_fn": task.augmented_loss,
        "average": mirrordp.ExponentialAverage(0.99),
    }
    return Problem(
        task.network.loss,
        _once_for_equal_rows(lambda rows: public_start(name, cold, rows, seed=seed)),
        private, prepared.public, chosen.space(len(jax.tree.leaves(private)[0])), measures,
        chosen.delta, chosen.largest_loss, chosen.public_batch_size, options,
    )  # fmt: skip


def users_problem(name: str, folder: Path, seed: int, most_rows: int | None = None) -> Problem:
    """Returns the paper's StackOverflow network, on users: a row is a user with some sentences."""
    prepared, chosen = users.prepare(folder / "stackexchange" / "users.tsv", seed=seed), DEEP[name]
    # Words are counted over public users, who have fewer than the network has tokens.
    network = models.stackoverflow_lstm(pad=users.PAD)
    private = _some(_sentences(prepared.private), most_rows, seed)
    cold = network.init(jax.random.key(seed))

    def loss(params: Params, sentences: jax.Array) -> jax.Array:
        losses = jax.vmap(network.loss, (None, 0))(params, sentences)
        is_real = jnp.any(sentences != users.PAD, axis=1)
        return jnp.sum(losses * is_real) / jnp.maximum(1, jnp.sum(is_real))

    def start(rows: mirrordp.PublicData) -> Params:
        flat = np.concatenate(list(rows.arrays))
        flat = mirrordp.PublicData(flat[(flat != users.PAD).any(axis=1)])
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(5.0))
        options: dict[str, Any] = {"batch_size": 16, "patience": 4, "max_epochs": 40}
        return mirrordp.warm_start(
            network.loss, cold, flat, optimizer=optimizer, seed=seed, **options
        ).params

    def measures(params: Params) -> dict[str, float]:
        found = stackoverflow.evaluate(network, params, prepared.test)
        perplexity, accuracy = found["perplexity"], found["accuracy"]
        # A model that diverged has neither.
        return {
            "loss": DIVERGED if perplexity is None else math.log(perplexity),
            "accuracy": accuracy or 0.0,
        }

    return Problem(
        loss, _once_for_equal_rows(start), private, _sentences(prepared.public),
        chosen.space(len(private)), measures, chosen.delta, chosen.largest_loss,
        chosen.public_batch_size,
        # The scores of all words take much memory.
        {"average": mirrordp.ExponentialAverage(0.99), "microbatch_size": MICROBATCH_SIZE},
    )  # fmt: skip


def _sentences(clients: mirrordp.PrivateClients | mirrordp.PublicClients) -> np.ndarray:
    """Returns the first sentences of each user, [users, sentences, tokens], padded with zeros."""
    own = np.split(np.asarray(clients.arrays), np.cumsum(clients.num_examples)[:-1])
    found = np.full((len(own), SENTENCES_PER_USER, own[0].shape[1]), users.PAD, np.int32)
    for place, sentences in zip(found, own, strict=True):
        place[: len(sentences)] = sentences[:SENTENCES_PER_USER]
    return found


def _once_for_equal_rows(start: Callable[[mirrordp.PublicData], Params]):
    """Returns a function that learns a start once: all methods begin and rehearse alike."""
    known: dict[tuple[bytes, ...], Params] = {}

    def cached(rows: mirrordp.PublicData) -> Params:
        key = tuple(
            hashlib.sha256(np.asarray(leaf).tobytes()).digest()
            for leaf in jax.tree.leaves(rows.arrays)
        )
        if key not in known:
            known[key] = start(rows)
        return known[key]

    return cached


MAKERS = {"stackoverflow": users_problem}


def fit(method: str, problem: Problem, epsilon: float, seed: int):
    """Returns the parameters of a trained network, and the settings."""
    privately = tuning.PrivateScore(_minus(problem.loss), -problem.largest_loss, 0.0)
    ways = {
        "free": tuning.Free(),
        "paid": tuning.Paid(tuning.NumberOfRuns(10), privately),
        "both": tuning.Both(paid=tuning.Paid(tuning.NumberOfRuns(5), privately)),
        "none": tuning.Free(),
    }
    public = mirrordp.PublicData(problem.public)
    if method == "start":
        return problem.start(public), None
    if method == "hand":
        return _by_hand(problem, public, epsilon, seed)
    found = mirrordp.tune(
        problem.loss, problem.start, mirrordp.PrivateData(problem.private), public,
        epsilon=epsilon, delta=problem.delta, space=None if method == "none" else problem.space,
        way=ways[method], seed=seed, public_batch_size=problem.public_batch_size, together=TOGETHER,
        **problem.step_options,
    )  # fmt: skip
    assert found.report.epsilon <= epsilon
    return found.params, found.settings


def _minus(loss: LossFn) -> LossFn:
    return lambda params, row: -loss(params, row)


def _by_hand(problem: Problem, public: mirrordp.PublicData, epsilon: float, seed: int):
    space, start = problem.space, problem.start(public)
    count = len(jax.tree.leaves(problem.private)[0])
    judges, known = np.split(np.random.default_rng(seed).permutation(count), [count // 5])

    def part(numbers: np.ndarray) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[numbers], problem.private)

    @functools.cache
    def calibrated(num_examples: int) -> mirrordp.Mechanism:
        return mirrordp.Mechanism.calibrate(
            epsilon=epsilon, delta=problem.delta,
            sampling=mirrordp.PoissonSampling.for_batch_size(
                space[0].batch_size, num_examples=num_examples
            ),
            num_steps=space[0].num_steps, l2_clip_norm=1.0,
        )  # fmt: skip

    def trained(rows: PyTree, some: Sequence[tuning.Settings], seed: int) -> list[Params]:
        """Trains runs of one clip norm together."""
        # The noise multiplier is relative to the clip norm.
        mechanism = dataclasses.replace(
            calibrated(len(jax.tree.leaves(rows)[0])), l2_clip_norm=some[0].l2_clip_norm
        )
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
        step = mirrordp.TrainStep(
            problem.loss,
            mechanism,
            optimizer,
            public_batch_size=problem.public_batch_size,
            **problem.step_options,
        )
        runs = [
            mirrordp.SweepRun(
                alpha=each.alpha, hyperparams={"learning_rate": each.learning_rate}, seed=seed
            )
            for each in some
        ]
        private = mirrordp.PrivateData(rows)
        *_, (states, _) = mirrordp.train_sweep(step, start, private, public, runs=runs)
        return [model_of(run_state(states, number)) for number in range(len(some))]

    losses: dict[tuning.Settings, float] = {}
    for clip_norm in {each.l2_clip_norm for each in space}:
        group = [each for each in space if each.l2_clip_norm == clip_norm]
        for first in range(0, len(group), TOGETHER):
            some = group[first : first + TOGETHER]
            for settings, params in zip(some, trained(part(known), some, seed), strict=True):
                losses[settings] = _mean_loss(problem.loss, params, part(judges))
    best = min(losses, key=lambda settings: np.nan_to_num(losses[settings], nan=np.inf))
    return trained(problem.private, [best], seed + 1000)[0], best


def _mean_loss(loss: LossFn, params: Params, rows: PyTree) -> float:
    return float(jax.lax.map(lambda row: loss(params, row), rows, batch_size=100).mean())


def run(problem: Problem, method: str, epsilon: float, seed: int) -> records.Record:
    """Trains by one method; returns what the test rows say."""
    began = time.perf_counter()
    params, settings = fit(method, problem, epsilon, seed)
    return {
        **problem.measured(params),
        "private_rows": len(jax.tree.leaves(problem.private)[0]),
        "settings": None if settings is None else settings.to_dict(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def table_of(found: Sequence[records.Record]) -> str:
    """Returns a Markdown table: a row per task and ε, means over seeds, compared with by hand."""
    lines = [f"| task | private rows | ε | measure | seeds | {' | '.join(METHODS.values())} |"]
    lines.append("|---" * (5 + len(METHODS)) + "|")
    keys = ("task", "private_rows", "epsilon")
    for values_of in sorted({tuple(line[key] for key in keys) for line in found}):
        here = [line for line in found if tuple(line[key] for key in keys) == values_of]
        name, rows, epsilon = values_of
        measures = (("rmse", ".0f"), ("loss", ".4f"), ("auc", ".4f"), ("accuracy", ".2%"))
        for measure, digits in measures:
            by_method = {
                method: {x["seed"]: x[measure] for x in here if x["method"] == method}
                for method in METHODS
                if any(measure in x for x in here)
            }
            most = max(map(len, by_method.values()), default=0)
            if most:
                cells = [
                    _cell(values, by_method["hand"], digits, most) for values in by_method.values()
                ]
                shown = [name, f"{rows:,}", f"{epsilon:g}", measure, str(most), *cells]
                lines.append(f"| {' | '.join(shown)} |")
    return "\n".join([*lines, ""])


def _cell(values: dict[int, float], by_hand: dict[int, float], digits: str, most: int) -> str:
    """Returns mean, spread, and how much larger it is than by hand on the seeds of both.

    Accuracies are compared in points, other measures as a share. Runs that diverged have no
    measure to average: they are counted.
    """
    if not values:
        return "not run"
    notes = [] if len(values) == most else [f"{len(values)} of {most} seeds"]
    finite = {seed: value for seed, value in values.items() if value < DIVERGED}
    if not finite:
        return "diverged"
    if len(finite) < len(values):
        notes.append(f"without {len(values) - len(finite)} that diverged")
    numbers = list(finite.values())
    text = f"{np.mean(numbers):{digits}}"
    if len(numbers) > 1:
        text += f" ± {np.std(numbers):{digits}}".removesuffix("%")
    shared = finite.keys() & by_hand.keys()
    if shared and values is not by_hand:
        pairs = [(finite[s], by_hand[s]) for s in shared]
        if digits.endswith("%"):
            notes.append(f"{100 * np.mean([own - base for own, base in pairs]):+.2f} points")
        else:
            notes.append(f"{np.mean([own / base - 1 for own, base in pairs]):+.1%}")
    return f"{text} ({'; '.join(notes)})" if notes else text


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes the table; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m experiments tuning", description=__doc__)
    parser.add_argument(
        "--tasks", nargs="+", choices=[*TABLES, *DEEP], default=["adult", "housing"]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0])
    parser.add_argument("--seeds", type=at_least(1), default=3, help="number of seeds")
    parser.add_argument(
        "--first-seed", type=at_least(0), default=0, help="the first of them, for runs side by side"
    )
    parser.add_argument("--most-rows", type=at_least(1000), help="private rows at most")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the data")
    add_result_options(parser, RESULTS)
    arguments = parser.parse_args(argv)
    path = arguments.out / "runs.jsonl"
    sources = sorted([Path(__file__), *Path(mirrordp.__file__).parent.rglob("*.py")])
    provenance = records.provenance((*PACKAGES, "optax"), sources, jax.default_backend())
    keys = ("task", "method", "epsilon", "seed", "most_rows")
    done = {tuple(line[key] for key in keys) for line in records.read(path)}
    rows = arguments.most_rows
    tasks_: list[str] = arguments.tasks
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for seed, name in itertools.product(seeds, tasks_):
        left = [
            (epsilon, method)
            for epsilon, method in itertools.product(arguments.epsilons, arguments.methods)
            if (name, method, epsilon, seed, rows) not in done
        ]
        if not left:
            continue
        make = MAKERS.get(name, table_problem if name in TABLES else deep_problem)
        problem = make(name, arguments.data_root, seed, rows)
        for epsilon, method in left:
            with threadpoolctl.threadpool_limits(1, user_api="blas"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = run(problem, method, epsilon, seed)
            line = dict(zip(keys, (name, method, epsilon, seed, rows), strict=True))
            line = {"experiment": "tuning"} | line | {"delta": problem.delta} | found
            records.append(path, line | {"provenance": provenance})
            print(f"{name}, ε = {epsilon:g}, {method}, seed {seed}: done", file=sys.stderr)
    text = table_of(records.read(path))
    sections.publish(text, "tuning", arguments.out, arguments.readme)
    return 0
