"""What a clipped sum moves on a GPU, without a GPU: `python -m benchmarks.traffic`.

XLA compiles for a GPU that it is only told about (needs `pip install --no-deps jax-cuda13-plugin
jax-cuda13-pjrt` of JAX's version; no CUDA library, no device). The compiled program names every
kernel with its operands and results, so their bytes can be added up: traffic between kernels, if
nothing stays in a cache. Large networks are bound by it. No kernel is timed or tuned here, and
cuDNN and cuBLAS may be chosen in place of some of them on the machine itself.
"""

import argparse
import collections
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.training import problem
from experiments.record.network import WideResNet
from experiments.record.private import loss_of_views
from mirrordp.privacy import ghost

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 149250113536
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""

BYTES = {"pred": 1, "bf16": 2} | {f"{kind}{8 * n}": n for kind in "fsu" for n in (1, 2, 4, 8)}
WITHOUT_TRAFFIC = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "opt-barrier", "while",
}  # fmt: skip
INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")


def traffic(program: str) -> collections.Counter[str]:
    """Returns the bytes that a compiled program's kernels read and write, by their kind.

    Args:
        program: the text of an optimised HLO module.
    """
    computations: dict[str, list[str]] = {}
    entry = current = ""
    for line in program.splitlines():
        if begun := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = begun[2]
            entry = current if begun[1] else entry
            computations[current] = []
        elif line.startswith("  ") and current:
            computations[current].append(line.strip())
    found: collections.Counter[str] = collections.Counter()

    def add(name: str, times: int) -> None:
        types: dict[str, str] = {}
        for line in computations[name]:
            if not (read := INSTRUCTION.match(line)):
                continue
            result, types[result], operation, rest = read[1], read[2], read[3], read[4]
            if operation == "while":
                body = re.search(r"body=%?([\w.\-]+)", line)
                count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                assert body is not None
                add(body[1], times * int(count[1] if count else 1))
            if operation in WITHOUT_TRAFFIC:
                continue
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            moved = _bytes(types[result]) + sum(_bytes(types.get(one, "")) for one in operands)
            found[re.sub(r"[\d.]+$", "", result)] += times * moved

    add(entry, 1)
    return found


def _bytes(shapes: str) -> int:
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
    return sum(
        BYTES[kind] * math.prod(map(int, filter(None, sizes.split(","))))
        for kind, sizes in arrays
        if kind in BYTES
    )


def compiled(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Compiles for an H200 that need not be there."""
    chip = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    )
    there = SingleDeviceSharding(chip.devices[0])
    # The clipped sum chooses its paths by the name of the backend that programs run on.
    backend, jax.default_backend = jax.default_backend, lambda: "gpu"
    try:
        return (
            jax.jit(function, in_shardings=there, out_shardings=there).lower(*arguments).compile()
        )
    finally:
        jax.default_backend = backend


def contender(network: str, rows: int, views: int, *, clipped: bool):
    """Returns a function and the shapes of its arguments."""
    if network == "wrn-16-4":
        net = WideResNet(16, 4, dtype="bfloat16")
        loss, arrays = loss_of_views(net, views, 0), problem("cifar10", rows)[1]
    else:
        net, arrays = problem(network, rows)
        loss = net.loss
    shape = lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype)  # noqa: E731
    params = jax.eval_shape(net.init, jax.random.key(0))
    takes_key = network == "wrn-16-4"
    key = jax.eval_shape(lambda: jax.random.key(0))

    def keys_of(key):
        return jax.random.split(key, rows) if takes_key else None

    def private(params, batch, padding, key):
        found = ghost.clipped_grad(loss, l2_clip_norm=1.0).exact_sum(
            params, batch, padding, keys=keys_of(key)
        )
        return found.total.high, found.total.low, found.stats

    def ordinary(params, batch, padding, key):
        def mean(params):
            each = (batch, keys_of(key)) if takes_key else (batch,)
            return jax.vmap(loss, (None, *(0 for _ in each)))(params, *each).mean()

        return jax.grad(mean)(params)

    arguments = params, jax.tree.map(shape, arrays), jax.ShapeDtypeStruct((rows,), jnp.bool_), key
    return private if clipped else ordinary, arguments


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--network", default="wrn-16-4", help="wrn-16-4, cifar10, emnist, wikitext2"
    )
    parser.add_argument("--rows", type=int, default=512, help="examples of a microbatch (512)")
    parser.add_argument("--views", type=int, default=2, help="of an example, for wrn-16-4 (2)")
    parser.add_argument("--kinds", type=int, default=0, help="kinds of kernels to list (0)")
    options = parser.parse_args(argv)
    for clipped in (False, True):
        what = contender(options.network, options.rows, options.views, clipped=clipped)
        program = compiled(*what)
        found, memory = traffic(program.as_text()), program.memory_analysis()
        print(
            f"{'clipped sum' if clipped else 'ordinary gradient':17} {found.total() / 1e9:8.2f} GB "
            f"moved, {memory.temp_size_in_bytes / 2**20:8.0f} MiB of memory"
        )
        for kind, moved in found.most_common(options.kinds):
            print(f"    {kind:40} {moved / 1e9:8.2f} GB")


if __name__ == "__main__":
    main()
