"""A cost model of training on many devices: `python -m benchmarks.scaling`.

What is measured and what is computed are kept apart. Measured on one H200 beforehand: the private
step of models (results/models-h200.jsonl) and the noise (results/training-wikitext2-h200.json).
Measured here, on the CPU: the drawing of batches, the reading of rows from a memory map, the bytes
of the reduction in the compiled program, and a reduction over two processes. Computed from them,
with the assumptions of `Cluster`, is the time of a step on p devices:

    step = max(device, host),    device = compute + noise + reduction,    host = sampling + reading
    compute = padded batch of a device / measured batch · measured step
    reduction = 2 (p − 1)/p · 8d / bandwidth + 2 (p − 1) · latency      for d trainable parameters

The host draws and reads the next batch while the device computes. The reduction follows the last
record of a step, so nothing hides it. Between machines it is a ring of machines, after a ring
inside each.

    python -m benchmarks.scaling --measure      measures and writes results/scaling.json
    python -m benchmarks.scaling --figure PNG   the table from that file, and a figure
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp.privacy.sampling import default_capacity

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "scaling.json"
BYTES = 8  # of an integer of the clipped sum

MODELS = {"gpt2-small-512": 162_643_968, "gpt2-medium-512": 405_762_048, "vit-base": 86_567_656}
"""The trainable parameters of the models that are computed; `parameters` counts them again."""
ROW_BYTES = {"gpt2-small-512": 513 * 4, "gpt2-medium-512": 513 * 4, "vit-base": 224 * 224 * 3 * 4}
WEAK_BATCH = 256  # expected examples of each device
STRONG_BATCH = 32_768  # expected examples of all devices together
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines that nobody has run this on: what their makers state, and what of it is assumed.

    Attributes:
        devices: H200s of a machine.
        nvlink: bytes per second of a device in each direction (NVLink 4: 900 GB/s both ways).
        network: bytes per second of a machine in each direction (one adapter of 400 Gbit/s).
        share: the part of both that a reduction reaches.
        nvlink_latency: seconds of one step of a ring inside a machine.
        network_latency: seconds of one step of a ring of machines.
    """

    devices: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    share: float = 0.8
    nvlink_latency: float = 5e-6
    network_latency: float = 15e-6

    def reduction(self, size: float, devices: int) -> float:
        """Returns the seconds of one reduction of so many bytes over devices."""
        inside = min(devices, self.devices)
        machines = math.ceil(devices / self.devices)
        return ring(inside, size, self.share * self.nvlink, self.nvlink_latency) + ring(
            machines, size, self.share * self.network, self.network_latency
        )


def ring(count: int, size: float, bandwidth: float, latency: float) -> float:
    """Returns the seconds of a reduction in a ring: each sends 2 (p − 1)/p of all bytes."""
    return 2 * (count - 1) / count * size / bandwidth + 2 * (count - 1) * latency


# Measured here.


def fastest(run: Callable[[], Any], repeats: int) -> float:
    """Returns the shortest time of a call, since other work on the machine only adds to it."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def sampling_rows() -> list[dict[str, float]]:
    """Measures the draw of a batch of all devices and its division among them."""
    from mirrordp import Mechanism, PoissonSampling
    from mirrordp.training.placement import Layout, rows_per_shard

    found = []
    sizes = {(WEAK_BATCH * p, p) for p in DEVICES} | {(STRONG_BATCH, p) for p in DEVICES}
    for num_examples in (10**6, 10**8):
        for batch, shards in sorted(sizes):
            sampling = PoissonSampling.for_batch_size(batch, num_examples=num_examples)
            mechanism = Mechanism(
                sampling=sampling, l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=1
            )
            size = rows_per_shard(mechanism, shards)
            layout = Layout.of(mechanism, num_examples, shards, size=size, entropy=0)
            batches = sampling.batches(num_examples, 11, np.random.default_rng(0))
            next(batches)

            def one(batches=batches, layout=layout):
                return layout.passes(next(batches), lambda numbers: numbers)

            seconds = fastest(one, 10)
            line = {"n": num_examples, "batch": batch, "devices": shards, "ms": 1e3 * seconds}
            found.append(line)
    return found


def reading_rows(folder: Path) -> list[dict[str, float | str]]:
    """Measures how fast random rows of a memory map are read, from the disk and from memory."""
    from mirrordp import PrivateData
    from mirrordp.data.sources import read_rows

    found = []
    for row_bytes in sorted(set(ROW_BYTES.values())):
        count = 2**31 // row_bytes
        path = folder / "rows.npy"
        file = np.lib.format.open_memmap(path, "w+", np.int32, (count, row_bytes // 4))
        for start in range(0, count, 2**12):
            file[start : start + 2**12] = start
        file.flush()
        del file
        rng, batch = np.random.default_rng(0), min(2048, 2**28 // row_bytes)
        rows = PrivateData(np.load(path, mmap_mode="r"), check_finite=False).arrays
        for state in ("disk", "memory"):
            if state == "disk":
                with open(path, "rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                read_rows(rows, np.arange(count, dtype=np.int32))

            def one(rows=rows, count=count, batch=batch, rng=rng):
                return read_rows(rows, rng.choice(count, batch, replace=False).astype(np.int32))

            seconds = fastest(one, 3)
            gigabytes = batch * row_bytes / seconds / 1e9
            line = {"row bytes": row_bytes, "rows": batch, "from": state, "GB/s": gigabytes}
            found.append(line)
        path.unlink()
    return found


def reduction_bytes() -> dict[str, float]:
    """Counts what one step sends in the compiled program of a small network on two devices."""
    import optax

    import mirrordp
    from mirrordp.training import engine

    params = {"w": jnp.zeros((30, 20)), "v": jnp.zeros(20)}
    sampling = mirrordp.PoissonSampling.for_batch_size(8, num_examples=64)
    step = mirrordp.TrainStep(
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"],
        mirrordp.Mechanism(sampling=sampling, l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=1),
        optax.sgd(0.1),
    )
    real, texts = engine._run_passes, []

    def look(*args):
        texts.append(real.lower(*args).compile().as_text())
        return real(*args)

    engine._run_passes = look
    private = mirrordp.PrivateData(np.ones((64, 30), np.float32))
    next(mirrordp.train(step, params, private, mesh=jax.make_mesh((2,), ("data",))))
    (sent,) = re.findall(r"= \(?(.*?)\)? all-reduce(?:-start)?\(", texts[0])
    shapes = re.findall(r"s64\[([\d,]*)\]", sent)
    numbers = sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
    count = sum(leaf.size for leaf in params.values())
    return {"parameters": count, "bytes": BYTES * numbers}


def reduce(index: int, port: int) -> None:
    """One of two processes that add arrays of int64; process 0 prints a line for each size."""
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    mesh = jax.make_mesh((2,), ("data",))
    spec = PartitionSpec("data")
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
        )
    )
    for exponent in range(14, 26):
        local = np.ones((1, 2**exponent), np.int64)
        array = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
        run = functools.partial(lambda array: jax.block_until_ready(add(array)), array)
        run()
        seconds = fastest(run, 15)
        if index == 0:
            line = {"bytes": BYTES * 2**exponent, "ms": 1e3 * seconds}
            print(json.dumps(line), flush=True)


def reduction_rows() -> list[dict[str, float]]:
    """Measures reductions over two processes of this machine, by Gloo."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.scaling", "--reduce"]
    # Otherwise glibc maps arrays from 32 MiB on anew in every call, which takes half of the time.
    keeps = {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "4000000000",
        "MALLOC_ARENA_MAX": "1",
    }
    processes = [
        subprocess.Popen(
            [*command, str(index), port], stdout=subprocess.PIPE, text=True, env=os.environ | keeps
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in processes]
    return [json.loads(line) for line in said[0].splitlines() if line.startswith("{")]


def parameters(name: str) -> int:
    """Counts the trainable parameters of a model."""
    from benchmarks import large_models
    from mirrordp.privacy.trainable import Trainable

    model = large_models.make(name, "full")
    part = Trainable.of(model.trainable).part(model.params)
    return sum(leaf.size for leaf in jax.tree.leaves(part))


def measure(folder: Path) -> dict[str, Any]:
    """Measures everything that this machine can say."""
    counted = {name: parameters(name) for name in MODELS}
    assert counted == MODELS, counted
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "jax": jax.__version__,
        "reduction in the program": reduction_bytes(),
        "sampling": sampling_rows(),
        "reading": reading_rows(folder),
        "reduction over two processes": reduction_rows(),
    }


# Computed.


def measured_steps() -> dict[str, dict[str, float]]:
    """Returns batch, seconds and memory of the private steps that were measured on one H200."""
    found = {}
    for text in (RESULTS / "models-h200.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["model"] in MODELS:
            ours = line["methods"]["mirrordp"]
            found[line["model"]] = {
                "batch": line["batch"], "seconds": ours["ms"] / 1e3, "gib": ours["gib"],
            }  # fmt: skip
    return found


def noise_seconds_per_parameter() -> float:
    """Returns the noise of the WikiText-2 network on one H200, divided by its parameters.

    An upper bound for larger models, since part of the time does not grow.
    """
    from experiments import models

    rows = json.loads((RESULTS / "training-wikitext2-h200.json").read_text())["rows"]
    (found,) = [row["milliseconds"] for row in rows if row["part"] == "noise"]
    shapes = jax.eval_shape(models.lstm_language_model().init, jax.random.key(0))
    return found / 1e3 / sum(leaf.size for leaf in jax.tree.leaves(shapes))


def padded(batch: float, devices: int) -> int:
    """Returns the rows that a device computes: its share and room for larger draws."""
    if devices == 1:
        return default_capacity(batch)
    share = batch / devices
    return 8 * math.ceil((share + 4.5 * math.sqrt(share)) / 8)


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds of the parts of a step."""

    compute: float
    noise: float
    reduction: float
    sampling: float

    @property
    def step(self) -> float:
        """The seconds of a step: the host draws the next batch while the devices compute."""
        return max(self.compute + self.noise + self.reduction, self.sampling)


def computed(
    measured: dict[str, Any], model: str, batch: int, devices: int, cluster: Cluster = Cluster()
) -> Times:
    """Returns the times of a step of all devices together, of rows in memory.

    Args:
        measured: the content of the file.
        model: the name of a model.
        batch: the expected batch of all devices together.
        devices: the number of devices.
        cluster: the machines.
    """
    one = measured_steps()[model]
    (draw,) = [
        line["ms"]
        for line in measured["sampling"]
        if (line["n"], line["batch"], line["devices"]) == (10**8, batch, devices)
    ]
    return Times(
        compute=padded(batch, devices) / one["batch"] * one["seconds"],
        noise=noise_seconds_per_parameter() * MODELS[model],
        reduction=cluster.reduction(BYTES * MODELS[model], devices),
        sampling=draw / 1e3,
    )


def must_read(times: Times, model: str, batch: int, devices: int) -> float:
    """Returns the bytes per second that a machine must read so that the devices do not wait."""
    rows = batch / devices * min(devices, Cluster().devices)
    return rows * ROW_BYTES[model] / times.step


def straight_line(lines: list[dict[str, float]]) -> tuple[float, float]:
    """Returns latency and seconds per byte, from the smallest and the largest reduction alone."""
    first, last = lines[0], lines[-1]
    slope = (last["ms"] - first["ms"]) / 1e3 / (last["bytes"] - first["bytes"])
    return first["ms"] / 1e3 - slope * first["bytes"], slope


def table(measured: dict[str, Any]) -> str:
    """Returns what was measured and what was computed, as two lists and a table."""
    steps, out = measured_steps(), ["Measured on one H200 (results/models-h200.jsonl):", ""]
    out += [
        "| model | parameters | batch | private step, ms | memory, GiB |",
        "|---|---|---|---|---|",
    ]
    for name, count in MODELS.items():
        one = steps[name]
        shown = f"{1e3 * one['seconds']:.1f} | {one['gib']:.1f}"
        out.append(f"| {name} | {count / 1e6:.0f} M | {one['batch']} | {shown} |")
    out += ["", "Measured here, the draw of a batch out of 10^8 rows and its division, ms:", ""]
    out += [
        f"{line['batch']} rows for {line['devices']} devices: {line['ms']:.2f}"
        for line in measured["sampling"]
        if line["n"] == 10**8
    ]
    out += ["", "Measured here, random rows of a memory map:", ""]
    out += [
        f"rows of {line['row bytes']} bytes from {line['from']}: {line['GB/s']:.2f} GB/s"
        for line in measured["reading"]
    ]
    latency, slope = straight_line(measured["reduction over two processes"])
    out += ["", "Measured here, reductions over two processes, and the line through both ends:", ""]
    out += [
        f"{line['bytes'] / 2**20:.3f} MiB: {line['ms']:.2f} ms, "
        f"line {1e3 * (latency + slope * line['bytes']):.2f}"
        for line in measured["reduction over two processes"]
    ]
    out += ["", "Computed:", ""]
    out += [
        "| model | devices | batch | compute | noise | reduction | sampling (hidden) | step | "
        "share of the measured speed | reading, GB/s per machine |",
        "|" + "---|" * 10,
    ]
    for kind, batches in scalings().items():
        for name in MODELS:
            for devices in (1, 8, 64, 512):
                times = computed(measured, name, batches[devices], devices)
                parts = [times.compute, times.noise, times.reduction, times.sampling, times.step]
                shown = " | ".join(f"{1e3 * part:,.1f}" for part in parts)
                share = share_of_measured(times, name, batches[devices] / devices)
                rate = must_read(times, name, batches[devices], devices) / 1e9
                out.append(
                    f"| {name} ({kind}) | {devices} | {batches[devices]:,} | {shown} | "
                    f"{share:.0%} | {rate:.3g} |"
                )
    return "\n".join(out)


def scalings() -> dict[str, dict[int, int]]:
    """Returns the expected batch of all devices, by their number, with weak and strong scaling."""
    return {
        "weak": {devices: WEAK_BATCH * devices for devices in DEVICES},
        "strong": dict.fromkeys(DEVICES, STRONG_BATCH),
    }


def share_of_measured(times: Times, model: str, examples: float) -> float:
    """Returns the examples per second of a device, relative to the measured step of one H200.

    Args:
        times: what is computed.
        model: the name of the model.
        examples: how many examples a device is expected to compute in a step.
    """
    one = measured_steps()[model]
    return examples / times.step / (one["batch"] / one["seconds"])


def figure(measured: dict[str, Any], path: Path) -> None:
    """Draws the measured reductions with their line, and what is computed for many devices."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 4.2), layout="constrained")
    first, *others = drawn.subplots(1, 3)
    lines = measured["reduction over two processes"]
    sizes = np.array([line["bytes"] for line in lines])
    latency, slope = straight_line(lines)
    first.loglog(
        sizes / 2**20, [line["ms"] for line in lines], "ko", label="measured (2 processes, Gloo)"
    )
    first.loglog(
        sizes / 2**20,
        1e3 * (latency + slope * sizes),
        "k--",
        lw=1,
        label="latency + bytes / bandwidth,\nthrough the two ends",
    )
    first.set_xlabel("clipped sum, MiB")
    first.set_ylabel("reduction, ms")
    first.set_title("Form of the model (CPU)")
    first.legend(fontsize=8)
    for axes, batches in zip(others, scalings().values(), strict=True):
        for name, style in zip(MODELS, ("C0-.", "C1:", "C2--"), strict=True):
            shares = [
                share_of_measured(computed(measured, name, batches[p], p), name, batches[p] / p)
                for p in DEVICES
            ]
            axes.semilogx(DEVICES, shares, style, lw=2, base=2, label=f"{name}, computed")
        axes.plot([1], [1.0], "ko", label="measured: the private step of one H200")
        axes.axvspan(8, DEVICES[-1], color="0.93", zorder=0)
        axes.text(9, 0.04, "several machines of 8", fontsize=8)
        axes.set_xticks(DEVICES, map(str, DEVICES), fontsize=8)
        axes.set_ylim(0, 1.08)
        axes.set_xlabel("H200s")
        axes.set_ylabel("examples/s of a device, relative to the measured step", fontsize=9)
    others[0].set_title(f"Weak scaling: {WEAK_BATCH} examples per device")
    others[1].set_title(f"Strong scaling: {STRONG_BATCH:,} examples in all")
    others[1].legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 0.1))
    drawn.savefig(path, dpi=150)


def main() -> None:
    """Measures if asked to, then prints the table and draws the figure."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--measure", action="store_true", help="measure again, on this machine")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--figure", type=Path, help="draw into this file")
    parser.add_argument("--reduce", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reduce is not None:
        return reduce(*options.reduce)
    if options.measure:
        jax.config.update("jax_num_cpu_devices", 2)
        with tempfile.TemporaryDirectory() as folder:
            options.file.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n")
    measured = json.loads(options.file.read_text())
    print(table(measured))
    if options.figure is not None:
        figure(measured, options.figure)
    return None


if __name__ == "__main__":
    main()
