"""What a private step costs: `python -m benchmarks.clipping [--device cpu|gpu] [--peers] [--json]`.

One step is the clipped gradient of one batch and an SGD update, without sampling and noise, on the
paper's networks. All methods run in one process and their timed rounds alternate, so that a slow
moment of the machine hits everyone; the ratio is to the non-private step of the same framework.
Peak memory is what the compiled program (JAX) or the allocator (PyTorch) needs on top of its
inputs.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import Contender, measure

NETWORKS = {"cifar10": 500, "emnist": 500, "wikitext2": 250}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured method."""

    network: str
    batch_size: int
    framework: str
    method: str
    milliseconds: float | None
    ratio: float | None
    compile_seconds: float | None
    peak_megabytes: float | None
    error: str | None = None


def jax_contenders(
    network: str, batch_size: int, methods: list[str]
) -> Iterator[Contender | tuple[str, str, str]]:
    """Makes the JAX steps: ordinary, `jax_privacy.clipped_grad` and ours, or error rows."""
    import jax
    import jax.numpy as jnp
    import jax_privacy

    from experiments import models
    from mirrordp.privacy import ghost

    key = jax.random.key(0)
    if network == "wikitext2":
        net = models.lstm_language_model()
        batch = jax.random.randint(key, (batch_size, 36), 0, 8000)
    else:
        net = models.cifar10_cnn() if network == "cifar10" else models.emnist_cnn()
        shape = (32, 32, 3) if network == "cifar10" else (28, 28, 1)
        batch = (jax.random.normal(key, (batch_size, *shape)), jnp.arange(batch_size) % 10)
    params = net.init(jax.random.key(1))
    is_padding = jnp.zeros(batch_size, bool)
    theirs = jax_privacy.clipped_grad(net.loss, l2_clip_norm=1.0, keep_batch_dim=False)
    ours = ghost.clipped_grad(net.loss, l2_clip_norm=1.0)

    def mean_loss(params, batch):
        return jax.vmap(net.loss, (None, 0))(params, batch).mean()

    gradients = {
        "not private": lambda params, batch: jax.grad(mean_loss)(params, batch),
        "mirrordp": lambda params, batch: ours(params, batch, is_padding),
        "jax-privacy": lambda params, batch: theirs(params, batch),
    }
    for method in methods:

        def step(params, batch, gradient=gradients[method]):
            grad = gradient(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 / batch_size * g, params, grad)

        try:
            start = time.perf_counter()
            compiled = jax.jit(step).lower(params, batch).compile()
            seconds = time.perf_counter() - start
            memory = compiled.memory_analysis()
            state = [compiled(params, batch)]
            jax.block_until_ready(state[0])
        except Exception as error:
            yield "JAX", method, f"{type(error).__name__}: {error}"[:120]
            continue

        def run(state=state, compiled=compiled):
            state[0] = compiled(params, batch)

        yield Contender(
            "JAX",
            method,
            run,
            lambda state=state: jax.block_until_ready(state[0]),
            seconds,
            memory.temp_size_in_bytes / 2**20 if memory else None,
        )


def benchmark(
    network: str, batch_size: int, *, methods: list[str], peers: bool, device: str, rounds: int
) -> list[Row]:
    """Measures all rows of one network and batch size."""
    contenders, rows = [], []
    found = list(jax_contenders(network, batch_size, methods))
    if peers:
        from benchmarks.opacus_peers import opacus_contenders

        found += list(opacus_contenders(network, batch_size, device))
    for item in found:
        if isinstance(item, Contender):
            contenders.append(item)
        else:
            framework, method, error = item
            rows.append(Row(network, batch_size, framework, method, None, None, None, None, error))
    times = measure(contenders, rounds=rounds, seconds_per_round=0.3 if device == "gpu" else 1.0)
    base = {
        c.framework: t for c, t in zip(contenders, times, strict=True) if c.method == "not private"
    }
    measured = [
        Row(
            network,
            batch_size,
            c.framework,
            c.method,
            t,
            t / base[c.framework] if c.framework in base else None,
            c.compile_seconds,
            c.peak_megabytes,
        )
        for c, t in zip(contenders, times, strict=True)
    ]
    return measured + rows


def versions(device: str) -> dict[str, str]:
    """Returns the versions and the device of a measurement."""
    import jax
    import jax_privacy
    import jaxlib

    found = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax-privacy": jax_privacy.__version__,
        "python": platform.python_version(),
        "device": str(jax.devices()[0].device_kind),
        "cores": str(os.cpu_count()),
        "matmul": "float32 (TF32 on GPU)",
    }
    if "torch" in sys.modules:
        import opacus
        import torch

        found |= {"torch": torch.__version__, "opacus": opacus.__version__}
    return found


def write_json(path: Path, device: str, rows: Sequence[Any]) -> None:
    """Writes measured rows, versions and device."""
    found = {"versions": versions(device), "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[Row]) -> str:
    """Formats the rows as Markdown."""
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    lines = [
        "| network | batch | framework | method | ms per step | ratio | compile s | memory MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = row.error or number(row.milliseconds, ".3f")
        lines.append(
            f"| {row.network} | {row.batch_size} | {row.framework} | {row.method} | {shown} | "
            f"{number(row.ratio, '.2f')} | {number(row.compile_seconds, '.1f')} | "
            f"{number(row.peak_megabytes, '.0f')} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark as the command line says."""
    parser = argparse.ArgumentParser(prog="benchmarks.clipping", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--peers", action="store_true", help="also Opacus (needs torch)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument(
        "--scales",
        nargs="+",
        type=int,
        help="multiples of the paper's batch sizes (1 4 8; on the CPU, where that takes hours, 1)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=["not private", "mirrordp", "jax-privacy"],
        default=["not private", "mirrordp", "jax-privacy"],
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_PLATFORMS"] = "cpu" if options.device == "cpu" else "cuda"
    rows = []
    for network in options.networks:
        for scale in options.scales or ([1] if options.device == "cpu" else [1, 4, 8]):
            rows += benchmark(
                network,
                scale * NETWORKS[network],
                methods=options.methods,
                peers=options.peers,
                device=options.device,
                rounds=options.rounds,
            )
            print(table(rows[-8:]), file=sys.stderr, flush=True)
    found = versions(options.device)
    if options.json:
        print(json.dumps({"versions": found, "rows": [dataclasses.asdict(row) for row in rows]}))
    else:
        print(table(rows))
        print("\n" + ", ".join(f"{name} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
