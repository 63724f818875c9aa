"""Where the milliseconds of private training go: `python -m benchmarks.training [--json FILE]`.

For each of the paper's networks: the parts of a step, each as a compiled program of its own; the
whole step inside `mirrordp.train`, everything included, with and without a public gradient and with
rows in memory maps; and sweeps, in which several runs share one compiled call. Parts do not have to
add up to the whole: the compiler overlaps and fuses them. With `--whole-runs STEPS` sweeps are also
timed from start to end, compilation included, which runs together share.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp
from benchmarks.clipping import NETWORKS, write_json
from benchmarks.timing import Contender, measure
from experiments import models
from mirrordp import Mechanism, PoissonSampling, PrivateData, PublicData, SweepRun, TrainStep
from mirrordp.updates.public import public_grad

SWEEP_SIZES = {"cifar10": (1, 2, 4), "emnist": (1, 2, 4, 8), "wikitext2": (1, 2, 4)}
STEPS = {"gpu": 400, "cpu": 12}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured part: milliseconds per step, or of a whole run where the part says so."""

    network: str
    part: str
    milliseconds: float


def problem(network: str, rows: int, seed: int = 0):
    """Makes a network and rows of the right shape."""
    rng = np.random.default_rng(seed)
    if network == "wikitext2":
        net = models.lstm_language_model()
        return net, rng.integers(0, 8000, (rows, 35), dtype=np.int32)
    net = models.cifar10_cnn() if network == "cifar10" else models.emnist_cnn()
    shape = (32, 32, 3) if network == "cifar10" else (28, 28, 1)
    images = rng.standard_normal((rows, *shape), np.float32)
    return net, (images, rng.integers(0, 10, rows, dtype=np.int32))


def parts(network: str, batch_size: int, rounds: int, seconds_per_round: float) -> list[Row]:
    """Measures the parts of a step side by side."""
    found = mechanism(batch_size, 100 * batch_size, num_steps=100)
    capacity = found.sampling.capacity
    net, arrays = problem(network, 4 * capacity)
    params = net.init(jax.random.key(1))
    arrays = jax.device_put(arrays)
    rows = jnp.arange(capacity)[::-1]
    batch = jax.tree.map(lambda leaf: leaf[rows], arrays)
    is_padding = jnp.arange(capacity) >= batch_size
    clipped = found.clipped_grad(net.loss)
    noise_state = found.init_noise(jax.random.key(2), params)
    optimizer = optax.sgd(0.1)
    opt_state = optimizer.init(params)
    average = mirrordp.ExponentialAverage(0.999)
    gradient = public_grad(net.loss, batch_size=batch_size)

    def mean_loss(params, batch):
        return jax.vmap(net.loss, (None, 0))(params, batch).mean()

    def update(params, grad):
        updates, _ = optimizer.update(grad, opt_state, params)
        new = optax.apply_updates(params, updates)
        return new, average.update(params, new, jnp.asarray(100))

    functions: dict[str, tuple[Callable, tuple]] = {
        "not private: gradient": (jax.grad(mean_loss), (params, batch)),
        "gather of the batch": (
            lambda arrays: jax.tree.map(lambda leaf: leaf[rows], arrays),
            (arrays,),
        ),
        "clipped sum": (clipped, (params, batch, is_padding)),
        "noise": (lambda grad: found.add_noise(grad, noise_state)[0], (params,)),
        "public gradient": (gradient, (params, arrays, jax.random.key(3))),
        "update and average": (update, (params, params)),
    }
    contenders = []
    for name, (function, arguments) in functions.items():
        compiled = jax.jit(function).lower(*arguments).compile()
        out = [compiled(*arguments)]

        def run(out=out, compiled=compiled, arguments=arguments):
            out[0] = compiled(*arguments)

        contenders.append(
            Contender("JAX", name, run, lambda out=out: jax.block_until_ready(out), None, None)
        )
    times = measure(contenders, rounds=rounds, seconds_per_round=seconds_per_round)
    found_rows = [Row(network, c.method, t) for c, t in zip(contenders, times, strict=True)]
    start = time.perf_counter()
    draws = list(found.batches(100 * batch_size, np.random.default_rng(0)))
    sampling = 1e3 * (time.perf_counter() - start) / len(draws)
    return [*found_rows, Row(network, "sampling, on the host, overlapped", sampling)]


def mechanism(batch_size: int, num_examples: int, num_steps: int) -> Mechanism:
    """Makes a mechanism of the paper's shape."""
    return Mechanism(
        sampling=PoissonSampling.for_batch_size(batch_size, num_examples=num_examples),
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        num_steps=num_steps,
    )


def on_disk(arrays: Any, folder: Path) -> Any:
    """Returns the arrays as memory maps of files that it writes."""
    leaves, tree = jax.tree.flatten(arrays)
    paths = [folder / f"{number}.npy" for number in range(len(leaves))]
    for path, leaf in zip(paths, leaves, strict=True):
        np.save(path, leaf)
    return tree.unflatten([np.load(path, mmap_mode="r") for path in paths])


def whole(network: str, batch_size: int, num_steps: int, sweep_sizes: Sequence[int]) -> list[Row]:
    """Measures whole steps inside `train` and `train_sweep`, without compilation."""
    num_examples = 20 * batch_size
    net, arrays = problem(network, num_examples)
    private, public = PrivateData(arrays), PublicData(problem(network, 2000, seed=1)[1])
    params = net.init(jax.random.key(1))
    block = max(2, num_steps // 4)
    found = mechanism(batch_size, num_examples, num_steps=num_steps + block)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = TrainStep(
        net.loss,
        found,
        optimizer,
        average=mirrordp.ExponentialAverage(0.999),
        public_batch_size=batch_size,
    )
    options = mirrordp.TrainOptions(steps_per_call=block)

    def timed(steps) -> float:
        """Returns milliseconds per step, the median over the blocks after the first one."""
        times = []
        state, _ = next(steps)
        jax.block_until_ready(state.params)
        start = time.perf_counter()
        for state, _ in steps:
            jax.block_until_ready(state.params)
            times.append((time.perf_counter() - start) / block)
            start = time.perf_counter()
        return 1e3 * statistics.median(times)

    rows = []
    for name, alpha in (("train: DP-SGD", 1.0), ("train: PDA-DPMD", 0.9)):
        steps = mirrordp.train(step, params, private, public, alpha=alpha, options=options)
        rows.append(Row(network, name, timed(steps)))
    with tempfile.TemporaryDirectory() as folder:
        mapped = PrivateData(on_disk(arrays, Path(folder)))
        steps = mirrordp.train(step, params, mapped, options=options)
        rows.append(Row(network, "train: DP-SGD, rows in memory maps", timed(steps)))
    for size in sweep_sizes:
        runs = [
            SweepRun(seed=number, hyperparams={"learning_rate": 0.1 + number})
            for number in range(size)
        ]
        steps = mirrordp.train_sweep(step, params, private, runs=runs, options=options)
        rows.append(Row(network, f"train_sweep: {size} runs of DP-SGD", timed(steps)))
    return rows


def whole_runs(
    network: str, batch_size: int, num_examples: int, num_steps: int, sweep_sizes: Sequence[int]
) -> list[Row]:
    """Measures sweeps from start to end, compilation included."""
    net, arrays = problem(network, num_examples)
    private, params = PrivateData(arrays), net.init(jax.random.key(1))
    rows = []
    for size in sweep_sizes:
        jax.clear_caches()
        start = time.perf_counter()
        step = TrainStep(
            net.loss,
            mechanism(batch_size, num_examples, num_steps),
            optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
            average=mirrordp.ExponentialAverage(0.999),
        )
        for state, _ in mirrordp.train_sweep(
            step,
            params,
            private,
            runs=[SweepRun(seed=i, hyperparams={"learning_rate": 0.1 + i}) for i in range(size)],
            options=mirrordp.TrainOptions(steps_per_call=max(1, num_steps // 20)),
        ):
            jax.block_until_ready(state.params)
        total = 1e3 * (time.perf_counter() - start)
        rows.append(Row(network, f"{size} runs of {num_steps} steps, compilation included", total))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument(
        "--sweep-sizes", nargs="*", type=int, help="runs that train together (none: no sweeps)"
    )
    parser.add_argument(
        "--whole-runs", type=int, metavar="STEPS", help="also time whole sweeps of this many steps"
    )
    parser.add_argument("--examples", type=int, default=95851, help="rows of whole sweeps")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    rows = []
    for network in arguments.networks:
        batch_size, sizes = NETWORKS[network], arguments.sweep_sizes
        if sizes is None:
            sizes = SWEEP_SIZES[network]
        measured = [
            parts(network, batch_size, 5, 0.3 if device == "gpu" else 1.0),
            whole(network, batch_size, STEPS[device], sizes),
        ]
        if (steps := arguments.whole_runs) is not None:
            measured.append(whole_runs(network, batch_size, arguments.examples, steps, sizes))
        for found in measured:
            rows += found
            for row in found:
                print(f"{row.network}: {row.part} {row.milliseconds:.3f} ms", file=sys.stderr)
    print("| network | part | ms |\n|---|---|---|")
    for row in rows:
        print(f"| {row.network} | {row.part} | {row.milliseconds:.3f} |")
    if arguments.json:
        write_json(arguments.json, device, rows)


if __name__ == "__main__":
    main()
