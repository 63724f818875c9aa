"""From settings to result lines: trains one run, or several in one compiled call."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp
from experiments import records
from experiments.datasets import Prepared
from experiments.deep import tasks
from experiments.deep.settings import DeepSettings, point_id
from experiments.locks import locked
from mirrordp import (
    Mechanism,
    PoissonSampling,
    PrivateData,
    PublicData,
    SweepRun,
    TrainOptions,
    TrainStep,
    train_sweep,
)
from mirrordp.privacy import Accountant
from mirrordp.types import Params

NUM_EVALUATIONS = 20
EVALUATION_BATCH = {"cifar10": 2000, "emnist": 8000, "wikitext2": 250}
PACKAGES = ("mirrordp", "jax", "jaxlib", "optax", "jax-privacy", "dp-accounting", "numpy")


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A data set in the form that training needs, made once for many runs."""

    prepared: Prepared
    private: PrivateData
    public: PublicData
    validation: Any
    test: Any

    @classmethod
    def of(cls, prepared: Prepared) -> "Loaded":
        """Puts the examples that are evaluated on the device."""
        return cls(
            prepared,
            PrivateData(prepared.private),
            PublicData(prepared.public),
            None if prepared.validation is None else jax.device_put(prepared.validation),
            jax.device_put(prepared.test),
        )


def mechanism(settings: DeepSettings, num_private: int) -> Mechanism:
    """Returns the mechanism of a run: Poisson batches, zero-out adjacency (n is public)."""
    sampling = PoissonSampling.for_batch_size(settings.batch_size, num_examples=num_private)
    num_steps = int(num_private * settings.epochs / settings.batch_size)
    common = {
        "sampling": sampling,
        "num_steps": num_steps,
        "l2_clip_norm": settings.l2_clip_norm,
    }
    if settings.target_epsilon is not None:
        return _calibrated(settings.target_epsilon, settings.delta, tuple(common.items()))
    return Mechanism(noise_multiplier=settings.noise_multiplier, **common)


@functools.cache
def _calibrated(epsilon: float, delta: float, common: tuple) -> Mechanism:
    return Mechanism.calibrate(epsilon=epsilon, delta=delta, **dict(common))


@functools.cache
def privacy(found: Mechanism, delta: float) -> dict[str, Any]:
    """Returns ε at δ by both accountants, and the terms that it is stated in."""
    by = {
        accountant: dataclasses.replace(found, accountant=accountant).epsilon(delta)
        for accountant in (Accountant.RDP, Accountant.PLD)
    }
    return {
        "epsilon_rdp": by[Accountant.RDP],
        "epsilon_pld": by[Accountant.PLD],
        "delta": delta,
        "noise_multiplier": found.noise_multiplier,
        "num_steps": found.num_steps,
        "sampling_prob": found.sampling.sampling_prob,
        "adjacency": found.adjacency.value,
        "unit": found.unit,
        "tuning_charged": False,
    }


def train_step(settings: DeepSettings, found: Mechanism) -> TrainStep:
    """Returns the training step of a run; only PDA-DPMD looks at public data."""
    task = tasks.task(settings.dataset)
    mixes = settings.algorithm == "pda"
    return TrainStep(
        task.network.loss,
        found,
        _sgd(),
        public_loss_fn=task.augmented_loss if mixes and settings.augment_public else None,
        public_batch_size=settings.public_batch_size if mixes else None,
        scale_noise=settings.scale_noise,
        noisy_clip_norm=settings.noisy_clip_norm or None,
        average=mirrordp.ExponentialAverage(settings.average_decay),
    )


def alpha(settings: DeepSettings, num_private: int) -> float | Callable:
    """Returns α_t of the run."""
    if settings.algorithm != "pda":
        return 1.0
    if settings.decay_unit == "steps":
        return mirrordp.schedules.cosine(decay_steps=settings.decay)
    return mirrordp.schedules.cosine(
        decay_epochs=settings.decay, steps_per_epoch=num_private / settings.batch_size
    )


class WarmStarts:
    """Pre-trained parameters by seed, computed once for all runs that begin there.

    On a GPU two processes that pre-train alike do not end alike, by as much as what is to be
    measured: the parameters are kept in files, so that runs which are compared begin at one point,
    also where several processes share the folder.

    Args:
        folder: where the files are; None keeps nothing beyond this process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._found: dict[Any, tuple[Params, dict[str, Any]]] = {}

    def get(self, settings: DeepSettings, data: Loaded, seed: int) -> tuple[Params, dict[str, Any]]:
        """Returns the starting parameters of a run, and facts about them."""
        network = tasks.task(settings.dataset).network
        cold = network.init(jax.random.key(seed))
        if settings.algorithm == "cold":
            return cold, {}
        # Data sets of one process may differ in what is public (other text, another vocabulary).
        public = (data.prepared.label, settings.vocabulary, settings.public_text)
        chosen = settings.warm_start.identity()
        key = records.fingerprint(
            [settings.dataset, public, chosen, settings.augment_public, len(data.public), seed]
        )
        if key not in self._found:
            with self._only_one(key):
                self._found[key] = self._read(key, cold) or _warm_start(settings, data, cold, seed)
                self._write(key, *self._found[key])
        return self._found[key]

    @contextlib.contextmanager
    def _only_one(self, key: str) -> Iterator[None]:
        """Lets one process pre-train; others that want the same start wait for its file."""
        if self._folder is None:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / f"{key}.lock"):
            yield

    def _read(self, key: str, like: Params) -> tuple[Params, dict[str, Any]] | None:
        if self._folder is None or not (self._folder / f"{key}.npz").exists():
            return None
        leaves, structure = jax.tree.flatten(like)
        with np.load(self._folder / f"{key}.npz", allow_pickle=False) as file:
            found = [jnp.asarray(file[str(number)]) for number in range(len(leaves))]
            about = json.loads(str(file["about"]))
        return jax.tree.unflatten(structure, found), about

    def _write(self, key: str, params: Params, about: dict[str, Any]) -> None:
        if self._folder is None or (self._folder / f"{key}.npz").exists():
            return
        arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(params))}
        draft = self._folder / f"{key}.draft.npz"
        np.savez(draft, about=json.dumps(about), **arrays)
        draft.replace(self._folder / f"{key}.npz")


def _warm_start(settings: DeepSettings, data: Loaded, cold: Params, seed: int):
    start = time.perf_counter()
    task = tasks.task(settings.dataset)
    chosen = settings.warm_start
    found = mirrordp.warm_start(
        task.augmented_loss if settings.augment_public else task.network.loss,
        cold,
        data.public,
        holdout_loss_fn=task.judging_loss if settings.augment_public else None,
        optimizer=_pretraining(chosen.optimizer, chosen.learning_rate),
        batch_size=chosen.batch_size,
        patience=chosen.patience,
        max_epochs=chosen.max_epochs,
        average=mirrordp.ExponentialAverage(chosen.average_decay) if chosen.average_decay else None,
        refit=chosen.refit,
        seed=seed,
    )
    about = {
        "converged": found.converged,
        "num_epochs": found.num_epochs,
        "holdout_loss": float(np.min(found.holdout_losses)),
        "seconds": round(time.perf_counter() - start, 2),
        "digest": _digest(found.params),
    }
    return found.params, about


def _digest(params: Params) -> str:
    """Returns twelve hexadecimal digits that tell whether two runs began at the same point."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:12]


def public_start(
    dataset: str, cold: Params, public: mirrordp.PublicData, *, max_epochs: int = 200, seed: int = 0
) -> Params:
    """Pre-trains the network of a data set on public examples, as other experiments need it."""
    task = tasks.task(dataset)
    options: dict[str, Any] = {"batch_size": 64, "patience": 20}
    if dataset == "wikitext2":
        options = {
            "batch_size": 32,
            "patience": 8,
            "optimizer": _pretraining("sgd", 5.0),
            "average": mirrordp.ExponentialAverage(0.99),
        }
    return mirrordp.warm_start(
        task.augmented_loss,
        cold,
        public,
        holdout_loss_fn=task.judging_loss,
        max_epochs=max_epochs,
        seed=seed,
        **options,
    ).params


@functools.cache
def _pretraining(optimizer: str, learning_rate: float) -> optax.GradientTransformation:
    if optimizer == "adam":
        return optax.adam(learning_rate)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(learning_rate))


@functools.cache
def _sgd() -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)


def run_points(
    points: Sequence[tuple[DeepSettings, int]],
    data: Loaded,
    warm_starts: WarmStarts,
    *,
    kind: str,
    on_progress: Callable[[int, int], None] = lambda step, total: None,
    max_steps: int | None = None,
    shared: bool = False,
) -> list[records.Record]:
    """Trains settings with seeds in one compiled call, and returns one result line for each.

    The settings may differ in learning rate and K only. A sweep (`kind="sweep"`) is judged by the
    validation part; the test part is looked at by final runs alone.

    Args:
        points: settings and seed of each run.
        data: the data.
        warm_starts: where to find or keep pre-trained parameters.
        kind: `sweep` or `final`.
        on_progress: called with steps done and steps in all.
        max_steps: stop early, for tests of the machinery.
        shared: other work runs on the same machine, so that seconds are no measure of cost.
    """
    begun = time.perf_counter()
    settings = points[0][0]
    if any(_common(other) != _common(settings) for other, _ in points):
        raise ValueError("runs that train together may differ in learning rate, K and seed only.")
    task = tasks.task(settings.dataset)
    num_private = len(data.private)
    found = mechanism(settings, num_private)
    starts = [warm_starts.get(setting, data, seed) for setting, seed in points]
    num_steps = found.num_steps if max_steps is None else min(max_steps, found.num_steps)
    runs = [
        SweepRun(
            alpha=alpha(setting, num_private),
            hyperparams={"learning_rate": setting.learning_rate},
            params=start,
            seed=seed,
        )
        for (setting, seed), (start, _) in zip(points, starts, strict=True)
    ]
    parts = {"validation": data.validation} if data.validation is not None else {}
    if kind == "final":
        parts["test"] = data.test
    curves = _Curves(task, parts, EVALUATION_BATCH[settings.dataset])
    curves.add(0, _stacked([start for start, _ in starts]), None)
    sweep = train_sweep(
        train_step(settings, found),
        starts[0][0],
        data.private,
        data.public if settings.algorithm == "pda" else None,
        runs=runs,
        num_steps=num_steps,
        options=TrainOptions(steps_per_call=math.ceil(num_steps / NUM_EVALUATIONS)),
    )
    for states, infos in sweep:
        curves.add(infos[0].step, states.params, states.average)
        on_progress(infos[0].step, num_steps)
    # A group may be filled up with repeated points, which are no runs of their own.
    num_runs = len({(setting.learning_rate, setting.decay, seed) for setting, seed in points})
    seconds = (time.perf_counter() - begun) / num_runs
    return [
        {
            "id": point_id(
                setting, kind=kind, seed=seed, num_private=num_private, label=data.prepared.label
            ),
            "kind": kind,
            "config": setting.name,
            "settings": setting.identity(),
            "seed": seed,
            "data": {
                "label": data.prepared.label,
                "is_complete": data.prepared.is_complete,
                "num_private": num_private,
                "num_public": len(data.public),
                **_shown_facts(data.prepared),
            },
            "privacy": privacy(found, settings.delta),
            "warm_start": starts[number][1],
            "curve": curves.of_run(number),
            "final": curves.last_of_run(number),
            "seconds": round(seconds, 2),
            "trained_together": len(points),
            "made_by": made_by(shared),
        }
        for number, (setting, seed) in enumerate(points)
    ]


def _shown_facts(prepared: Prepared) -> dict[str, Any]:
    """Returns what is not covered, and unknown words; the private rate is not shown."""
    notes = prepared.facts.get("not_covered", [])
    rates = prepared.facts.get("unknown_rate", {})
    shown = {part: rate for part, rate in rates.items() if part != "private"}
    return {
        "not_covered": [note for note in notes if not note.startswith("unknown_rate.private")],
        **({"unknown_rate": shown} if shown else {}),
    }


def _common(settings: DeepSettings) -> dict[str, Any]:
    values = settings.identity()
    for free in ("learning_rate", "decay"):
        values.pop(free, None)
    return values


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


class _Curves:
    """Metrics of the last iterate and of the average, for each run, along training."""

    def __init__(self, task: tasks.Task, parts: dict[str, Any], batch_size: int):
        self._task, self._parts, self._batch_size = task, parts, batch_size
        self._steps: list[int] = []
        self._values: list[dict[str, np.ndarray]] = []

    def add(self, step: int, last: Params, average: Params | None) -> None:
        """Evaluates both iterates; before the first step they are the same."""
        found = {}
        for iterate, params in (("last", last), ("average", average)):
            if params is None:
                continue
            for part, examples in self._parts.items():
                metrics = tasks.evaluate(self._task, params, examples, batch_size=self._batch_size)
                found |= {f"{iterate}_{part}_{name}": value for name, value in metrics.items()}
        if average is None:
            found |= {key.replace("last", "average", 1): value for key, value in found.items()}
        self._steps.append(step)
        self._values.append(found)

    def of_run(self, number: int) -> dict[str, list]:
        """Returns the curves of one run; a value that is not finite is null."""
        names = self._values[0]
        return {"step": self._steps} | {
            name: [_number(values[name][number]) for values in self._values] for name in names
        }

    def last_of_run(self, number: int) -> dict[str, float | None]:
        """Returns the values after the last step."""
        return {name: _number(value[number]) for name, value in self._values[-1].items()}


def _number(value: Any) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


@functools.cache
def made_by(shared: bool = False) -> records.Record:
    """Returns the versions of the code and the packages, and the machine."""
    root = Path(__file__).parents[2]
    patterns = (
        "mirrordp/**/*.py",
        "experiments/models.py",
        "experiments/datasets/*.py",
        "experiments/deep/*.py",
    )
    sources = sorted(path for pattern in patterns for path in root.glob(pattern))
    device = jax.devices()[0]
    where = f"{device.platform}, {device.device_kind}"
    if shared:
        where += " shared with other runs"
    return records.provenance(PACKAGES, sources, where)
