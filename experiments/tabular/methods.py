"""The methods of the comparison: one split in, predictions for its test rows out.

All see the same features, encoded by rules from the public rows. That favours the two that use no
public rows otherwise: cold DP-SGD and diffprivlib.
"""

import dataclasses
import itertools
import json
import math
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from experiments.tabular.data import Split
from mirrordp.linear import PrivateLinearRegression, PrivateLogisticRegression

DELTA = 1e-5
EPSILONS = (0.1, 1.0, 3.0)

OURS, WARM, COLD, PEER = "ours", "warm", "cold", "diffprivlib"
START, PUBLIC, NON_PRIVATE = "start", "public", "non-private"
PRIVATE = (OURS, WARM, COLD, PEER)
LABELS = {
    OURS: "mirrordp (ours)",
    WARM: "warm DP-SGD",
    COLD: "cold DP-SGD",
    PEER: "diffprivlib (pure ε, δ = 0)",
    START: "public only (our start)",
    PUBLIC: "public only (scikit-learn)",
    NON_PRIVATE: "not private",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One fit: a method, its ε (None where it has none), a seed and settings."""

    method: str
    epsilon: float | None
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a fit achieved on the test rows.

    Attributes:
        metrics: `rmse` and `r2`, or `log_loss` and `accuracy`; None where a fit diverged.
        seconds: of the fit.
        details: of the run, for the record.
    """

    metrics: dict[str, float | None]
    seconds: float
    details: dict[str, Any]


def candidates(method: str, task: str) -> list[tuple[tuple[str, Any], ...]]:
    """Returns the settings to try for a competitor that has no public rows to choose them by."""
    if method == COLD:
        grid = {
            # Rows have norm one: the loss has curvature up to one, the logistic loss a quarter.
            "learning_rate": (0.5, 1.5, 4.5) if task == "regression" else (5.0, 15.0, 45.0),
            "num_steps": (100, 400, 1600),
            # Up to 1.5: with its intercept a row has norm √2, and nothing is clipped any more.
            "l2_clip_norm": (0.1, 0.3, 1.0) if task == "regression" else (0.3, 1.0, 1.5),
        }
    elif method == PEER and task == "regression":
        grid = {"num_features": (1, 2, 4, 8, 1000)}
    elif method == PEER:
        grid = {
            "norm_quantile": (0.25, 0.5, 0.95, 1.0),
            "inverse_ridge": (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 1.0),
        }
    else:
        return [()]
    return [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def primary(task: str) -> str:
    """Returns the loss that settings are chosen by."""
    return "rmse" if task == "regression" else "log_loss"


def run(job: Job, split: Split) -> Outcome:
    """Fits and evaluates every method but diffprivlib."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, details = _fit(job, split)
    seconds = time.perf_counter() - began
    if split.dataset.task == "regression":
        predicted = model.predict(split.test.features)
    else:
        predicted = model.predict_proba(split.test.features)
    return Outcome(evaluate(predicted, split), round(seconds, 3), details)


def _fit(job: Job, split: Split) -> tuple[Any, dict[str, Any]]:
    private, public = split.private, split.public
    if job.method in (PUBLIC, NON_PRIVATE):
        features, target = public.features, public.target
        if job.method == NON_PRIVATE:
            features = np.concatenate([features, private.features])
            target = np.concatenate([target, private.target])
        return _scikit_learn(job, split).fit(features, target), {}
    if job.method == COLD:
        model = _cold(job, split).fit(private.features, private.target)
    else:
        options: dict[str, Any] = {"epsilon": job.epsilon}
        if job.method == WARM:
            options["method"] = "dpsgd"
        if job.method == START:
            # A private step of no length: what is left is where the private runs start.
            options = {"epsilon": 1.0, "num_steps": 1, "learning_rate": 1e-300}
        model = _private_model(split)(delta=DELTA, random_state=job.seed, **options)
        model.fit(
            private.features, private.target, X_public=public.features, y_public=public.target
        )
    report = model.privacy_
    return model, {
        "epsilon_reported": report.epsilon,
        "num_steps": report.charged_steps,
        "l2_clip_norm": report.l2_clip_norm,
        "noise_multiplier": report.noise_multiplier,
        "learning_rate": report.results["learning_rate"],
    }


def _private_model(split: Split) -> Any:
    is_regression = split.dataset.task == "regression"
    return PrivateLinearRegression if is_regression else PrivateLogisticRegression


def _cold(job: Job, split: Split) -> Any:
    """Fits by DP-SGD from zero, with bounds that hold for any data.

    Features are standardised and categories are 0 or 1, so that the square root of the number of
    columns is the usual size of a row; a larger row is scaled down.
    """
    options = dict(job.settings) | {
        "row_norm_bound": math.sqrt(len(split.encoding.columns)),
        "epsilon": job.epsilon,
        "delta": DELTA,
        "random_state": job.seed,
    }
    if split.dataset.task == "regression":
        return PrivateLinearRegression(target_range=split.dataset.target_range, **options)
    return PrivateLogisticRegression(classes=[0, 1], **options)


def _scikit_learn(job: Job, split: Split) -> Any:
    model: Any
    if split.dataset.task == "regression":
        model = RidgeCV(np.logspace(-2, 4, 25))
    elif job.method == NON_PRIVATE:
        model = LogisticRegression(C=1.0, max_iter=2000)
    else:
        options: dict[str, Any] = {"l1_ratios": (0.0,), "use_legacy_attributes": False}
        model = LogisticRegressionCV(
            Cs=np.logspace(-3, 2, 11).tolist(),  # pyright: ignore[reportArgumentType]
            cv=5,
            scoring="neg_log_loss",
            max_iter=2000,
            **options,
        )
    return make_pipeline(StandardScaler(), model)


def run_peer(jobs: Sequence[Job], split: Split, python: Path) -> list[tuple[Outcome, dict]]:
    """Fits diffprivlib's models in their own interpreter; also returns its versions."""
    if not jobs:
        return []
    arrays = {
        f"{name}_{axis}": array
        for name in ("private", "public", "test")
        for axis, array in (
            ("x", getattr(split, name).features),
            ("y", getattr(split, name).target),
        )
        if (name, axis) != ("test", "y")
    }
    described = [
        {
            "task": split.dataset.task,
            "epsilon": job.epsilon,
            "seed": job.seed,
            "settings": dict(job.settings),
        }
        for job in jobs
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.npz"
        np.savez(path, jobs=json.dumps(described), **arrays)
        script = Path(__file__).with_name("peer.py")
        finished = subprocess.run(
            [python, script, path], capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise RuntimeError(f"diffprivlib failed: {finished.stderr.strip()[-500:]}")
        answer = json.loads(finished.stdout)
        with np.load(f"{path}.out.npz", allow_pickle=False) as found:
            predictions = [found[f"job{index}"] for index in range(len(jobs))]
    return [
        (Outcome(evaluate(predicted, split), seconds, {}), answer["versions"])
        for predicted, seconds in zip(predictions, answer["seconds"], strict=True)
    ]


def evaluate(predicted: np.ndarray, split: Split) -> dict[str, float | None]:
    """Returns metrics on the test rows; nothing else uses these rows."""
    target = split.test.target
    with np.errstate(over="ignore", invalid="ignore"):
        if split.dataset.task == "regression":
            mean_square = float(np.mean((predicted - target) ** 2))
            found = {"rmse": math.sqrt(mean_square), "r2": 1 - mean_square / float(target.var())}
        else:
            shares = np.clip(predicted, 1e-15, 1.0)
            loss = -np.log(shares[np.arange(len(target)), target])
            found = {
                "log_loss": float(loss.mean()),
                "accuracy": float(np.mean(predicted.argmax(axis=1) == target)),
            }
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
