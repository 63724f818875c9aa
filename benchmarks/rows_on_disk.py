"""Memory of training on more rows than memory: `python -m benchmarks.rows_on_disk`.

Makes a sparse file of 50 million rows of 100 features (20 GB as a process sees it), trains a linear
model on it with checks, overlap, and optionally a checkpoint, whose fingerprint reads all rows once
more, and prints how long each part took and the peak of resident memory, which includes the pages
of the file that are mapped. Then the same for a million users. Each is a process of its own. Files
are removed at the end.

    python -m benchmarks.rows_on_disk --folder FOLDER [--rows 50_000_000] [--users 1_000_000]
                                      [--checkpoint] [--filled]

A sparse file holds zeros, which the kernel still maps page by page; `--filled` writes random rows,
which takes as much disk as it says.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

FEATURES, ROWS_OF_USER, FEATURES_OF_USER = 100, 50, 20


def make(path: Path, shape: tuple[int, ...], *, filled: bool) -> None:
    """Makes a file of float32; without `filled` it takes no room on the disk."""
    file = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    if filled:
        rng = np.random.default_rng(0)
        for start in range(0, shape[0], 2**16):
            part = file[start : start + 2**16]
            part[:] = rng.standard_normal(part.shape, np.float32)


class Clock:
    """Seconds of the parts of a run, one after the other."""

    def __init__(self):
        self.seconds, self._begin = {}, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._begin = round(now - self._begin, 1), now


def rows(folder: Path, batch: int, steps: int, with_checkpoint: bool) -> dict:
    """Trains on the rows of a memory map."""
    import jax.numpy as jnp
    import optax

    import mirrordp

    clock = Clock()
    table = np.load(folder / "rows.npy", mmap_mode="r")
    private = mirrordp.PrivateData(table)
    clock.lap("finiteness")
    public = mirrordp.PublicData(np.random.default_rng(1).standard_normal((1000, FEATURES), "f4"))
    mechanism = mirrordp.Mechanism(
        sampling=mirrordp.PoissonSampling.for_batch_size(batch, num_examples=len(table)),
        l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=steps,
    )  # fmt: skip
    step = mirrordp.TrainStep(
        lambda theta, x: 0.5 * (jnp.dot(theta, x[:-1]) - x[-1]) ** 2, mechanism, optax.sgd(0.1)
    )
    with tempfile.TemporaryDirectory(dir=folder) as run:
        checkpoint = mirrordp.Checkpoint(Path(run) / "run") if with_checkpoint else None
        blocks = mirrordp.train(
            step, np.zeros(FEATURES - 1, "f4"), private, public, alpha=0.5, checkpoint=checkpoint
        )
        clock.lap("overlap and fingerprint" if with_checkpoint else "overlap")
        for _ in blocks:
            pass
    clock.lap(f"{steps} steps")
    return {"rows": len(table), "file GB": round(table.nbytes / 1e9, 1), "batch": batch} | figures(
        clock
    )


def users(folder: Path, batch: int, steps: int) -> dict:
    """Trains on users whose rows lie in a memory map, one user after the other."""
    import jax.numpy as jnp

    import mirrordp

    clock = Clock()
    table = np.load(folder / "users.npy", mmap_mode="r")
    counts = np.full(len(table) // ROWS_OF_USER, ROWS_OF_USER)
    private = mirrordp.PrivateClients(table, counts, None, ROWS_OF_USER)
    mechanism = mirrordp.Mechanism(
        sampling=mirrordp.PoissonSampling.for_batch_size(batch, num_examples=len(private)),
        l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=steps, unit="user",
    )  # fmt: skip
    step = mirrordp.FederatedStep(
        lambda theta, x: 0.5 * (jnp.dot(theta, x[:-1]) - x[-1]) ** 2,
        mechanism,
        client_learning_rate=0.1,
    )
    for _ in mirrordp.train(step, np.zeros(FEATURES_OF_USER - 1, "f4"), private):
        pass
    clock.lap(f"{steps} steps")
    return {"users": len(private), "file GB": round(table.nbytes / 1e9, 1), "cohort": batch} | (
        figures(clock)
    )


def figures(clock: Clock) -> dict:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": clock.seconds, "peak MiB": round(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--filled", action="store_true")
    parser.add_argument("--measure", choices=("rows", "users"), help="used for the processes")
    args = parser.parse_args()
    if args.measure == "rows":
        print(json.dumps(rows(args.folder, args.batch, args.steps, args.checkpoint)))
        return
    if args.measure == "users":
        print(json.dumps(users(args.folder, args.cohort, args.steps)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        for kind, shape in (
            ("rows", (args.rows, FEATURES)),
            ("users", (args.users * ROWS_OF_USER, FEATURES_OF_USER)),
        ):
            make(folder / f"{kind}.npy", shape, filled=args.filled)
            command = [sys.executable, "-m", "benchmarks.rows_on_disk", "--measure", kind]
            for option in ("batch", "cohort", "steps"):
                command += [f"--{option}", str(getattr(args, option))]
            command += ["--folder", name] + ["--checkpoint"] * args.checkpoint
            subprocess.run(command, check=True)
            (folder / f"{kind}.npy").unlink()


if __name__ == "__main__":
    main()
