"""`python -m experiments methods`: every use of public data, beside plain DP-SGD, at one ε.

All methods begin at the same public start and have the same network, data, batches, number of steps
and ε. Searched are the learning rate, the clip norm and one setting of the method's own, on private
validation images (not charged to ε, as in the paper): as many runs for every method, of one seed,
at the middle number of public images. Methods without a setting of their own try more clip norms.
On the EMNIST sample these are 30 runs at each ε; on the others 20 at ε = 2, whose clip norm and
setting the other ε take over, and five learning rates there.
The final runs use other seeds, the same ones for every method, so that methods can be compared pair
by pair; only they look at test images. Their differences from warm DP-SGD go into `table.md` and,
as heat maps, into `methods.png`.

Work that is done has its line in the result file, so a run that was interrupted, or whose minutes
are over, goes on with the same command.
"""

import argparse
import dataclasses
import functools
import io
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import scipy.stats
from jax.flatten_util import ravel_pytree

import mirrordp
from experiments import datasets, records, sections
from experiments.deep import tasks
from experiments.deep.titles import DATASETS
from experiments.deep.training import EVALUATION_BATCH, PACKAGES, public_start
from experiments.options import add_result_options, at_least
from mirrordp import (
    Mechanism,
    PoissonSampling,
    PrivateData,
    PublicData,
    SweepRun,
    TrainStep,
    updates,
)
from mirrordp.mirror import KroneckerMap, SubspaceMap
from mirrordp.types import Params

RESULTS = Path(__file__).parent / "results" / "methods"
EPSILONS = (0.5, 2.0, 8.0)
RANK, DIRECTIONS = 64, 256
HOLDOUT = 2000


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all methods have in common on one data set.

    Attributes:
        batch_size: expected size of a Poisson batch.
        num_steps: number of steps.
        delta: δ.
        training: number of training examples, public and private.
        holdout: private examples that judge the search.
        charted: examples at a time of a method that acts before the clip; None is all.
        public: numbers of public examples; the middle one has the search.
        clips: clip norms that are searched.
        many_clips: likewise, for methods without a setting of their own.
        rates: learning rates that are searched.
        values: the values of methods' own settings, where they are not all of `METHODS`.
        searched_at: the only ε with a search of clip norm and own setting; None: all have one.
    """

    batch_size: int
    num_steps: int
    delta: float
    training: int = 0
    holdout: int = 0
    charted: int | None = None
    public: tuple[int, int, int] = (500, 2000, 8000)
    clips: tuple[float, ...] = (2.0, 8.0)
    many_clips: tuple[float, ...] = (2.0, 3.0, 5.0, 8.0)
    rates: tuple[float, ...] = (0.025, 0.1, 0.4, 1.6, 6.4)
    values: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict, hash=False)
    searched_at: float | None = None

    @property
    def middle(self) -> int:
        """The number of public examples at which settings are searched."""
        return self.public[1]


# The two values that won most often on the EMNIST sample.
LIKELY = {
    "pda": (2.5, 6.0), "constant": (0.95, 0.85), "momentum": (0.1, 0.3), "sizes": (0.5, 2.0),
    "projected": (0.3, 0.7), "mirror": (10.0, 1.0), "adadps": (0.1, 2.0), "kronecker": (1.0, 0.1),
    "embedded": (0.5, 1.0),
}  # fmt: skip
SETTINGS = {
    "emnist": Setting(
        2000, 480, 1e-6, 99_845, HOLDOUT, None,
        clips=(2.0, 6.0), many_clips=(0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
        rates=(0.15, 0.5, 1.5, 4.0, 12.0),
    ),
    "cifar10": Setting(
        1000, 300, 1e-5, 50_000, HOLDOUT, 250, values=LIKELY, searched_at=2.0
    ),
    # Its validation text is public. The gradients of a chart are large. 1,815 sequences are 4%.
    "wikitext2": Setting(
        250, 300, 1e-5, 45_358, 0, 50, (454, 1815, 7258),
        clips=(0.5, 2.0), many_clips=(0.5, 0.8, 1.2, 2.0),
        rates=(0.1, 0.4, 1.6, 6.4, 25.0), values=LIKELY, searched_at=2.0,
    ),
}  # fmt: skip


class Problem(NamedTuple):
    """A data set with its public start."""

    name: str
    task: tasks.Task
    private: PrivateData
    public: PublicData
    validation: Any
    test: Any
    start: Params


class Parts(NamedTuple):
    """What a method adds to a step.

    Attributes:
        before: an optax transformation of the released gradient, before SGD.
        chart: what acts before the clip.
        alpha: α.
    """

    before: optax.GradientTransformation = optax.identity()
    chart: Any = None
    alpha: Any = 1.0


class Method(NamedTuple):
    """A method: its name in tables, its own setting with its values, and what these make."""

    title: str
    knob: str | None
    values: tuple[float | None, ...]
    parts: Callable[[Problem, Any], Parts]


def _cosine(problem: Problem, share: float) -> Parts:
    steps = SETTINGS[problem.name].num_steps
    return Parts(alpha=mirrordp.schedules.cosine(decay_steps=share * steps))


def _curvature(problem: Problem, damping: float) -> KroneckerMap:
    return KroneckerMap.from_public(
        problem.task.network.loss, problem.start, problem.public, damping=damping
    )


def _mirror_map(problem: Problem, damping: float) -> Parts:
    # Steps of a quadratic map are proportional to the rate, which SGD multiplies by.
    return Parts(
        optax.chain(updates.mirror_descent(_curvature(problem, damping), 1.0), optax.scale(-1))
    )


def _subspace(problem: Problem, rho: float = 0.0) -> SubspaceMap:
    loss, start = problem.task.network.loss, problem.start
    rows = jax.tree.map(lambda leaf: leaf[:DIRECTIONS], problem.public.arrays)
    flat = jax.jit(jax.vmap(lambda row: ravel_pytree(jax.grad(loss)(start, row))[0]))
    directions = np.asarray(flat(rows), np.float64)
    return SubspaceMap.from_directions(directions, min(RANK, len(directions) // 2), rho=rho)


def _projected(problem: Problem, rho: float) -> Parts:
    return Parts(optax.chain(updates.mirror_descent(_subspace(problem, rho), 1.0), optax.scale(-1)))


METHODS = {
    "warm": Method("warm DP-SGD", None, (None,), lambda p, v: Parts()),
    "pda": Method("PDA-DPMD, cosine", "K/T", (1.0, 2.5, 6.0), _cosine),
    "constant": Method("constant α (Semi-DP)", "α", (0.95, 0.85, 0.6), lambda p, v: Parts(alpha=v)),
    "momentum": Method(
        "public momentum", "weight", (0.1, 0.3, 1.0),
        lambda p, v: Parts(updates.add_public_momentum(v)),
    ),
    "sizes": Method(
        "divided by public sizes, after the noise", "ε̄", (0.1, 0.5, 2.0),
        lambda p, v: Parts(updates.scale_by_public_gradients(epsilon=v)),
    ),
    "projected": Method("projected (PDP-SGD)", "ρ", (0.1, 0.3, 0.7), _projected),
    "mirror": Method("Kronecker mirror map", "damping", (10.0, 1.0, 0.1), _mirror_map),
    "recentred": Method(
        "recentred (DOPE-SGD)", None, (None,), lambda p, v: Parts(chart=updates.recentred())
    ),
    "adadps": Method(
        "divided before the clip (AdaDPS)", "ε̄", (0.1, 0.5, 2.0),
        lambda p, v: Parts(chart=updates.scaled_by_public_gradients(epsilon=v)),
    ),
    "kronecker": Method(
        "Kronecker before the clip (DP-KFC)", "damping", (10.0, 1.0, 0.1),
        lambda p, v: Parts(chart=updates.kronecker(_curvature(p, v))),
    ),
    "embedded": Method(
        "embedded (GEP)", "ρ", (0.25, 0.5, 1.0),
        lambda p, v: Parts(chart=updates.embedded(_subspace(p), residual_weight=v)),
    ),
}  # fmt: skip


def prepared(name: str, num_public: int, data_root: Path | None, *, synthetic: bool) -> Problem:
    """Reads a data set and trains the public start that all methods share."""
    if synthetic:
        data = datasets.synthetic(name, num_public=64)
    else:
        setting = SETTINGS[name]
        data = datasets.prepare(
            name, data_root, holdout=setting.holdout, public_fraction=num_public / setting.training
        )
    task, public = tasks.task(name), PublicData(data.public)
    start = public_start(
        name, task.network.init(jax.random.key(0)), public, max_epochs=2 if synthetic else 200
    )
    return Problem(
        name, task, PrivateData(data.private), public, jax.device_put(data.validation),
        jax.device_put(data.test), start,
    )  # fmt: skip


@functools.cache
def _noise_multiplier(epsilon: float, setting: Setting, num_private: int) -> float:
    return Mechanism.calibrate(
        epsilon=epsilon,
        delta=setting.delta,
        l2_clip_norm=1.0,
        num_steps=setting.num_steps,
        sampling=PoissonSampling.for_batch_size(setting.batch_size, num_examples=num_private),
    ).noise_multiplier


def trained(
    problem: Problem,
    parts: Parts,
    clip_norm: float,
    epsilon: float,
    points: Sequence[tuple[float, int]],
    *,
    is_final: bool,
) -> list[dict[str, float]]:
    """Trains one run for each learning rate and seed; returns what the judging images say.

    The average of the iterates is judged, as in the paper's experiments: on validation images, and
    on test images only after a final run.
    """
    setting, count = SETTINGS[problem.name], len(problem.private)
    mechanism = Mechanism(
        sampling=PoissonSampling.for_batch_size(setting.batch_size, num_examples=count),
        l2_clip_norm=clip_norm,
        noise_multiplier=_noise_multiplier(epsilon, setting, count),
        num_steps=setting.num_steps,
    )
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    step = TrainStep(
        problem.task.network.loss,
        mechanism,
        optax.chain(parts.before, sgd),
        public_loss_fn=problem.task.augmented_loss,
        public_batch_size=min(256, len(problem.public)),
        chart=parts.chart,
        microbatch_size=None if parts.chart is None else setting.charted,
        average=mirrordp.ExponentialAverage(0.99),
    )
    runs = [
        SweepRun(alpha=parts.alpha, hyperparams={"learning_rate": rate}, seed=seed)
        for rate, seed in points
    ]
    options = mirrordp.TrainOptions(steps_per_call=setting.num_steps)
    *_, (states, _) = mirrordp.train_sweep(
        step, problem.start, problem.private, problem.public, runs=runs, options=options
    )
    judges = {"validation": problem.validation} | ({"test": problem.test} if is_final else {})
    found: list[dict[str, float]] = [{} for _ in points]
    for part, examples in judges.items():
        size = min(EVALUATION_BATCH[problem.name], len(jax.tree.leaves(examples)[0]))
        metrics = tasks.evaluate(problem.task, states.average, examples, batch_size=size)
        for name, values in metrics.items():
            for own, value in zip(found, values, strict=True):
                # A run that diverged is the worst of all.
                own[f"{part}_{name}"] = float(value) if math.isfinite(value) else 1e9
    return found


KEYS = ("data", "method", "epsilon", "num_public", "kind", "clip_norm", "value", "rate", "seed")


def work(
    problem: Problem,
    method: str,
    epsilon: float,
    num_public: int,
    lines: Sequence[records.Record],
    seeds: int,
) -> Iterator[records.Record]:
    """Yields the lines of a method that are missing: those of the search, or of final runs.

    Final runs of other numbers of public images wait for the search at the middle one.
    """
    shared = {"data": problem.name, "method": method, "epsilon": epsilon, "num_public": num_public}
    done = {tuple(line[key] for key in KEYS) for line in lines}

    def run(kind: str, clip_norm: float, value: float | None, points: Sequence[tuple[float, int]]):
        same = shared | {"kind": kind, "clip_norm": clip_norm, "value": value}
        own = [same | {"rate": rate, "seed": seed} for rate, seed in points]
        own = [line for line in own if tuple(line[key] for key in KEYS) not in done]
        if not own:
            return
        begun = time.perf_counter()
        parts = METHODS[method].parts(problem, value)
        points = [(line["rate"], line["seed"]) for line in own]
        found = trained(problem, parts, clip_norm, epsilon, points, is_final=kind == "final")
        seconds = round((time.perf_counter() - begun) / len(own), 2)
        for line, measured in zip(own, found, strict=True):
            yield line | {k: round(v, 6) for k, v in measured.items()} | {"seconds": seconds}

    best = chosen(lines, problem.name, method, epsilon)
    if best is not None:
        clip_norm, value, rate = best
        yield from run("final", clip_norm, value, [(rate, seed) for seed in range(1, seeds + 1)])
    elif num_public == SETTINGS[problem.name].middle:
        rates = SETTINGS[problem.name].rates
        for choice in choices(lines, problem.name, method, epsilon):
            yield from run("search", *choice, [(rate, 0) for rate in rates])


def choices(
    lines: Sequence[records.Record], data: str, method: str, epsilon: float
) -> list[tuple[float, float | None]]:
    """Returns the pairs of a clip norm and a value that are searched; none if it is too early."""
    setting, own = SETTINGS[data], METHODS[method]
    if setting.searched_at not in (None, epsilon):
        best = chosen(lines, data, method, setting.searched_at)
        return [] if best is None else [best[:2]]
    values = setting.values.get(method, own.values)
    return list(itertools.product(setting.clips if own.knob else setting.many_clips, values))


def chosen(
    lines: Sequence[records.Record], data: str, method: str, epsilon: float
) -> tuple[float, float | None, float] | None:
    """Returns clip norm, setting and rate with the least validation loss, once all are searched."""
    pairs = choices(lines, data, method, epsilon)
    searched = [
        line
        for line in lines
        if line["kind"] == "search"
        and (line["data"], line["method"], line["epsilon"]) == (data, method, epsilon)
        and (line["clip_norm"], line["value"]) in pairs
    ]
    if not pairs or len(searched) < len(SETTINGS[data].rates) * len(pairs):
        return None
    best = min(searched, key=lambda line: line["validation_loss"])
    return best["clip_norm"], best["value"], best["rate"]


Place = tuple[str, float, int]  # data set, ε and number of public images
Runs = dict[tuple[str, Place], dict[int, records.Record]]  # by method and place, then by seed


class Metric(NamedTuple):
    """A measure of quality on test images, and how tables show it."""

    key: str
    title: str
    scale: float
    digits: int
    sign: int


ACCURACY = Metric("test_accuracy", "test accuracy (%, differences in points)", 100.0, 2, 1)
LOSS = Metric("test_loss", "test loss", 1.0, 4, -1)
# The figure has short names, and no deeper colours beyond these points of accuracy.
SHORT = {
    "sizes": "public sizes, after noise",
    "adadps": "public sizes (AdaDPS)",
    "kronecker": "Kronecker (DP-KFC)",
}
LIMIT = 3.0


class Difference(NamedTuple):
    """A method's mean difference from warm DP-SGD; ± `half` is a 95% interval (NaN: one seed)."""

    mean: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.mean) > self.half


def final_runs(lines: Sequence[records.Record]) -> Runs:
    """Returns the final runs; those of settings that a later search gave up are left out."""
    best, found = functools.cache(functools.partial(chosen, lines)), {}
    for line in lines:
        data, method, epsilon = line["data"], line["method"], line["epsilon"]
        if line["kind"] != "final" or method not in METHODS:
            continue
        settings = line["clip_norm"], line["value"], line["rate"]
        if best(data, method, epsilon) in (None, settings):
            place = data, epsilon, line["num_public"]
            found.setdefault((method, place), {})[line["seed"]] = line
    return found


def difference(runs: Runs, method: str, place: Place, metric: Metric) -> Difference | None:
    """Returns the difference from warm DP-SGD over the seeds that both have; None without any."""
    own, base = (runs.get((name, place), {}) for name in (method, "warm"))
    values = [
        metric.scale * (own[seed][metric.key] - base[seed][metric.key])
        for seed in sorted(own.keys() & base.keys())
    ]
    if not values:
        return None
    count, half = len(values), math.nan
    if count > 1:
        error = np.std(values, ddof=1) / math.sqrt(count)
        half = float(scipy.stats.t.ppf(0.975, count - 1) * error)
    return Difference(float(np.mean(values)), half)


def table_of(lines: Sequence[records.Record]) -> str:
    """Returns Markdown tables: differences from warm DP-SGD in accuracy and loss, and settings."""
    runs = final_runs(lines)
    if not runs:
        return "No final runs yet.\n"
    parts = [
        f"All numbers are means over {_seeds(runs)}. Below the row of warm DP-SGD are differences "
        "from it, paired by seed, with 95% intervals (Student's t, not corrected for the number of "
        "cells). Differences in bold are better, and their intervals exclude zero."
    ]
    for data in sorted({place[0] for _, place in runs}):
        places = sorted({place for _, place in runs if place[0] == data})
        titles = [f"ε = {epsilon:g}, {count:,} public" for _, epsilon, count in places]
        for metric in (ACCURACY, LOSS):
            cells = {
                name: [_cell(runs, name, place, metric) for place in places] for name in METHODS
            }
            parts += [f"**{DATASETS[data]}: {metric.title}**", _markdown(titles, cells)]
        epsilons = sorted({place[1] for place in places})
        cells = {name: [_settings(lines, data, name, e) for e in epsilons] for name in METHODS}
        parts += [
            f"**{DATASETS[data]}: settings that the search chose**: clip norm C, the method's own "
            "setting and learning rate η. An asterisk marks the smallest or largest value that was "
            "searched (of two values, each is one).",
            _markdown([f"ε = {epsilon:g}" for epsilon in epsilons], cells),
        ]
    return "\n\n".join(parts) + "\n"


def _seeds(runs: Runs) -> str:
    fewest, most = min(map(len, runs.values())), max(map(len, runs.values()))
    return f"{f'{fewest} to ' * (fewest < most)}{most} seed{'s' * (most > 1)}"


def _markdown(titles: Sequence[str], cells: dict[str, list[str]]) -> str:
    rows = [["method", *titles], ["---"] * (1 + len(titles))]
    rows += [[METHODS[name].title, *own] for name, own in cells.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(runs: Runs, method: str, place: Place, metric: Metric) -> str:
    own, base = (runs.get((name, place), {}) for name in (method, "warm"))
    if not own:
        return "not run"
    for whose, group in (("", own), ("of warm, ", base)):
        # Such a loss is that of a run that diverged: its mean would say nothing.
        if lost := sum(line[metric.key] >= 1e9 for line in group.values()):
            return f"{whose}{lost} of {len(group)} diverged"
    if method == "warm":
        mean = np.mean([metric.scale * line[metric.key] for line in own.values()])
        return f"{mean:.{metric.digits}f}"
    found = difference(runs, method, place, metric)
    if found is None:
        return "no pair"
    text = f"{found.mean:+z.{metric.digits}f}"
    if not math.isnan(found.half):
        text += f" ± {found.half:.{metric.digits}f}"
    return f"**{text}**" if found.is_clear and metric.sign * found.mean > 0 else text


def _settings(lines: Sequence[records.Record], data: str, method: str, epsilon: float) -> str:
    best = chosen(lines, data, method, epsilon)
    if best is None:
        return "not run"
    searched_at = SETTINGS[data].searched_at or epsilon
    pairs = zip(*choices(lines, data, method, searched_at), strict=True)
    grids = *pairs, SETTINGS[data].rates
    return ", ".join(
        f"{name} = {value:g}" + ("" if min(grid) < value < max(grid) else "\\*")
        for name, value, grid in zip(("C", METHODS[method].knob, "η"), best, grids, strict=True)
        if value is not None
    )


def figure(lines: Sequence[records.Record], path: Path) -> None:
    """Draws differences in accuracy from warm DP-SGD, best methods first; no file without any."""
    from matplotlib.figure import Figure
    from PIL import Image

    runs = final_runs(lines)
    found = {
        (method, place): pair
        for method, place in runs
        if method != "warm" and (pair := difference(runs, method, place, ACCURACY))
    }
    if not found:
        return
    shown = []
    for data in sorted({place[0] for _, place in found}):
        means: dict[str, list[float]] = {}
        for (method, place), pair in found.items():
            if place[0] == data:
                means.setdefault(method, []).append(pair.mean)
        ranked = sorted(means, key=lambda method: -float(np.mean(means[method])))
        shown.append((["warm", *ranked], sorted({p for _, p in found if p[0] == data})))
    width = 2.6 + 0.68 * max(5, *(len(places) for _, places in shown))
    height = 1.2 + sum(0.9 + 0.28 * len(methods) for methods, _ in shown)
    drawing = Figure(figsize=(width, height))
    drawing.set_layout_engine("constrained", hspace=0.08)
    heights = [len(methods) for methods, _ in shown]
    panels = drawing.subplots(len(shown), squeeze=False, height_ratios=heights)[:, 0]
    images = [
        _heat_map(axes, runs, found, *rows_and_columns)
        for axes, rows_and_columns in zip(panels, shown, strict=True)
    ]
    for axes in panels:
        # Columns of all panels have one width.
        axes.set_xlim(-0.5, max(5, *(len(places) for _, places in shown)) - 0.5)
    bar = drawing.colorbar(
        images[0], ax=panels, location="bottom", extend="both", shrink=0.6, aspect=35, pad=0.03
    )
    bar.set_label(
        "points of test accuracy above warm DP-SGD\n"
        f"({_seeds(runs)}; pale numbers: the 95% interval includes zero)"
    )
    bar.outline.set_visible(False)
    # Without the version of matplotlib the same lines give the same file.
    drawing.savefig(buffer := io.BytesIO(), dpi=130, metadata={"Software": None})
    # A palette makes the file a third as large; Pillow comes with matplotlib.
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)


def _heat_map(axes, runs: Runs, found: dict, methods: Sequence[str], places: Sequence[Place]):
    from matplotlib.colors import LinearSegmentedColormap

    # Okabe and Ito's orange and blue, told apart by readers with any common colour blindness.
    colours = LinearSegmentedColormap.from_list("", ["#D55E00", "#FFFFFF", "#0072B2"])
    values = np.full((len(methods), len(places)), np.nan)
    for (row, method), (column, place) in itertools.product(enumerate(methods), enumerate(places)):
        style, text = {"color": "#999999"}, "–"
        if pair := found.get((method, place)):
            values[row, column] = pair.mean
            text = f"{pair.mean:+z.{1 if abs(pair.mean) >= 9.995 else 2}f}".replace("-", "−")
            strong = {"fontweight": "bold"} if pair.is_clear else {"alpha": 0.6}
            style = {"color": "white" if pair.mean > 0.85 * LIMIT else "black"} | strong
        elif method == "warm":
            own = [line["test_accuracy"] for line in runs["warm", place].values()]
            style, text = {"color": "black"}, f"{100 * np.mean(own):.1f}%"
        axes.text(column, row, text, ha="center", va="center", fontsize=8.5, **style)
    image = axes.imshow(values, cmap=colours, vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    labels = [SHORT.get(method, METHODS[method].title) for method in methods]
    axes.set_yticks(range(len(methods)), labels)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(places)), [f"{count:,}" for *_, count in places])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    above = {"textcoords": "offset points", "va": "bottom", "annotation_clip": False}
    rows = "public sequences" if places[0][0] == "wikitext2" else "public images"
    axes.annotate(rows, (-0.5, -0.5), xytext=(-3.5, 3.5), ha="right", **above)
    title = {"fontweight": "bold", "fontsize": 12}
    axes.annotate(
        DATASETS[places[0][0]], (-0.5, -0.5), xytext=(-3.5, 20), ha="right", **above, **title
    )
    # Columns of one ε form a group.
    for epsilon in {place[1] for place in places}:
        group = [column for column, place in enumerate(places) if place[1] == epsilon]
        middle = (group[0] + group[-1]) / 2
        axes.annotate(f"ε = {epsilon:g}", (middle, -0.5), xytext=(0, 20), ha="center", **above)
        axes.axvline(group[0] - 0.5, color="white", lw=5)
    for row in range(1, len(methods)):
        axes.axhline(row - 0.5, color="white", lw=1)
    return image


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes tables and figure; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m experiments methods", description=__doc__)
    parser.add_argument("--data", nargs="+", choices=SETTINGS, default=["emnist"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument(
        "--public", nargs="+", type=at_least(1), help="numbers of public examples (all)"
    )
    parser.add_argument("--seeds", type=at_least(1), default=10, help="number of final runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after them")
    parser.add_argument("--data-root", type=Path, default=None, help="see the README")
    parser.add_argument("--synthetic", action="store_true", help="made-up data, for a trial")
    add_result_options(parser, RESULTS)
    arguments = parser.parse_args(argv)
    begun, path = time.perf_counter(), arguments.out / "runs.jsonl"
    makers = arguments.out / "provenance.jsonl"
    sources = sorted([Path(__file__), *Path(mirrordp.__file__).parent.rglob("*.py")])
    provenance = records.provenance(PACKAGES, sources, str(jax.devices()[0].device_kind))

    # The middle number of public images first: it has the search. Then all final runs.
    places = [
        (name, size)
        for name in arguments.data
        for size in sorted(
            arguments.public or SETTINGS[name].public,
            key=lambda size: size != SETTINGS[name].middle,
        )
    ]
    for name, num_public in places:
        if time.perf_counter() - begun > 60 * arguments.minutes:
            break
        problem = prepared(name, num_public, arguments.data_root, synthetic=arguments.synthetic)
        for epsilon, method in itertools.product(arguments.epsilons, arguments.methods):
            # Twice: final runs at the middle number follow from the search there.
            for _ in range(2):
                if time.perf_counter() - begun > 60 * arguments.minutes:
                    break
                lines = records.read(path)
                for line in work(problem, method, epsilon, num_public, lines, arguments.seeds):
                    made_by = records.keep_provenance(makers, provenance)
                    records.append(path, line | {"made_by": made_by})
            print(f"{name}, {num_public} public, ε = {epsilon:g}: {method}", file=sys.stderr)
    lines = records.read(path)
    sections.publish(table_of(lines), "methods", arguments.out, arguments.readme)
    figure(lines, arguments.out / "methods.png")
    return 0
