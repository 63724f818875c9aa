"""Time and memory of `mirrordp fit` against the number of rows: `python -m benchmarks.fit_on_disk`.

Makes CSV and Parquet files of ten columns (eight numbers, a category and a target), fits a linear
model to each in a process of its own, and adds one line of JSON per fit: seconds, the peak of
resident memory (which includes the mapped pages of temporary files), epsilon and the score on test
rows. Fits that the file has already are not made again. Tables are removed as soon as they were
used; a CSV file takes 74 bytes per row, and a fit 240 bytes per row in TMPDIR.

    python -m benchmarks.fit_on_disk --out FILE [--rows 100_000 1_000_000 3_000_000] [--folder DIR]
                                     [--formats csv parquet] [--model linear] [--figure PNG]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS, CATEGORIES = 8, ("north", "south", "east", "west")
FORMATS = {"csv": "CSV", "parquet": "Parquet"}
# Twelve features and the target.
ROW_BYTES = 8 * (NUMBERS + len(CATEGORIES) + 1)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
_BATCH = 2**18


def make(path: Path, rows: int, seed: int) -> None:
    """Writes a table, part by part."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    rng = np.random.default_rng(seed)
    slopes = np.linspace(-1, 1, NUMBERS)
    writer: Any = None
    for start in range(0, rows, _BATCH):
        size = min(_BATCH, rows - start)
        x = np.round(rng.normal(size=(size, NUMBERS)), 4)
        place = rng.integers(len(CATEGORIES), size=size)
        y = np.round(x @ slopes + 0.5 * place + rng.normal(size=size), 4)
        columns = {f"x{k}": x[:, k] for k in range(NUMBERS)}
        table = pa.table({**columns, "place": np.array(CATEGORIES)[place], "y": y})
        if writer is None:
            kind = pa.parquet.ParquetWriter if path.suffix == ".parquet" else pa.csv.CSVWriter
            writer = kind(path, table.schema)
        writer.write_table(table)
    writer.close()


def measure(private: Path, folder: Path, model: str) -> dict[str, Any]:
    """Fits a model in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [
            *(sys.executable, "-m", "mirrordp", "fit", "--private", private),
            *("--public", folder / "public.csv", "--test", folder / "test.csv"),
            *("--target", "y", "--task", "regression", "--epsilon", "1", "--delta", "1e-9"),
            *("--model", model, "--out", Path(out) / "model", "--json", "--quiet"),
        ]
        began = time.perf_counter()
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE)
        assert process.stdout is not None
        printed = process.stdout.read()
        # The usage of this process alone, which `resource` does not tell of one among several.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"the fit of {private.name} failed with status {status}")
    found = json.loads(printed)
    return {
        "seconds": round(seconds, 1),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "epsilon": found["epsilon"],
        "rmse": next(iter(found["test"].values()))["rmse"]["value"],
    }


def figure(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws time and memory against the number of rows."""
    from matplotlib.figure import Figure

    whole = Figure(figsize=(8, 3.2), layout="constrained")
    axes = whole.subplots(1, 2)
    for one, name, label in zip(
        axes, ("seconds", "peak_mib"), ("seconds", "peak of resident memory, MiB"), strict=True
    ):
        for kind, colour, marker in zip(FORMATS, (BLUE, ORANGE), ("o", "s"), strict=True):
            points = sorted((line["rows"], line[name]) for line in lines if line["format"] == kind)
            one.loglog(*zip(*points, strict=True), marker=marker, color=colour, label=FORMATS[kind])
        one.set(xlabel="private rows", ylabel=label)
        one.grid(color="#dddddd", linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    rows = sorted({line["rows"] for line in lines})
    encoded = [ROW_BYTES * count / 2**20 for count in rows]
    axes[1].loglog(rows, encoded, "--", color=GREY, label="the rows as float64")
    axes[1].set_ylim(bottom=100)
    axes[0].legend(frameon=False)
    axes[1].legend(frameon=False)
    whole.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[10**5, 10**6, 3 * 10**6])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--model", default="linear")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    lines = []
    if args.out.exists():
        lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    known = {(line["rows"], line["format"], line["model"]) for line in lines}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make(folder / "public.csv", 1000, 1)
        make(folder / "test.csv", 10_000, 2)
        for rows in args.rows:
            for kind in args.formats:
                if (rows, kind, args.model) in known:
                    continue
                private = folder / f"private.{kind}"
                make(private, rows, 3)
                size = private.stat().st_size
                found = measure(private, folder, args.model)
                private.unlink()
                line = {"rows": rows, "format": kind, "model": args.model, "bytes": size, **found}
                lines.append(line)
                print(json.dumps(line), flush=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    if args.figure is not None:
        figure([line for line in lines if line["model"] == args.model], args.figure)


if __name__ == "__main__":
    main()
