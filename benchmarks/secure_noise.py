"""What secure noise costs: `python -m benchmarks.secure_noise [--batch-size 500] [--json FILE]`.

The network is the paper's for CIFAR-10, with made-up images. Timed side by side, in rounds that
alternate: the clipped sum of one batch, and the noise of one step in both modes, each as one
compiled call. The host's part of the secure noise is shown on its own, and so is the drawing of
batches from 50,000 rows. The share is relative to a whole step in the default mode: clipped sum
plus default noise.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clipping import versions, write_json
from benchmarks.timing import Contender, measure
from benchmarks.training import problem
from mirrordp import GaussianNoise, Mechanism, PoissonSampling, SecureGaussianNoise
from mirrordp.privacy.secure import SecureRandom

ROWS = 50_000


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured part: milliseconds per step, and its share of a default step."""

    part: str
    milliseconds: float
    share: float


def contender(name: str, function, *arguments) -> Contender:
    """Makes a compiled call to be timed."""
    compiled = jax.jit(function).lower(*arguments).compile()
    out = [compiled(*arguments)]

    def run():
        out[0] = compiled(*arguments)

    return Contender("JAX", name, run, lambda: jax.block_until_ready(out), None, None)


def rows(batch_size: int, rounds: int, seconds_per_round: float) -> list[Row]:
    """Measures all parts side by side."""
    net, arrays = problem("cifar10", batch_size)
    params = net.init(jax.random.key(1))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    secure = SecureGaussianNoise(num_params=num_params)
    sampling = PoissonSampling.for_batch_size(batch_size, num_examples=ROWS)
    made = {
        name: Mechanism(
            sampling=sampling, l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=100, noise=noise
        )
        for name, noise in (("default", GaussianNoise()), ("secure", secure))
    }
    clipped = made["default"].clipped_grad(net.loss)
    is_padding = jnp.zeros(batch_size, bool)
    timed = [contender("clipped sum", clipped, params, jax.device_put(arrays), is_padding)]
    for name, mechanism in made.items():

        def noisy(sums, mechanism=mechanism):
            return mechanism.add_noise(sums, mechanism.init_noise(jax.random.key(2), sums))[0]

        timed.append(contender(f"noise, {name}", noisy, params))
    times = dict(
        zip(
            [c.method for c in timed],
            measure(timed, rounds=rounds, seconds_per_round=seconds_per_round),
            strict=True,
        )
    )
    times["of it: drawing on the host"] = host_milliseconds(
        lambda: SecureRandom().rounded_gaussian(1.5 * 2**20, num_params)
    )
    for name, rng in (("default", np.random.default_rng(0)), ("secure", SecureRandom())):
        draws = made[name].batches(ROWS, rng)
        times[f"batch, {name} (while the device computes)"] = host_milliseconds(
            lambda d=draws: next(d)
        )
    step = times["clipped sum"] + times["noise, default"]
    found = [Row(part, value, value / step) for part, value in times.items()]
    extra = times["noise, secure"] - times["noise, default"]
    return [*found, Row("secure step over default step", extra, extra / step)]


def host_milliseconds(function, repeats: int = 20) -> float:
    """Returns the median time of a call on the host."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds-per-round", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    found = rows(arguments.batch_size, arguments.rounds, arguments.seconds_per_round)
    print(f"batch of {arguments.batch_size}, {versions(device)}")
    print("| part | ms | share of a default step |\n|---|---|---|")
    for row in found:
        print(f"| {row.part} | {row.milliseconds:.2f} | {100 * row.share:.1f}% |")
    if arguments.json:
        write_json(arguments.json, device, found)


if __name__ == "__main__":
    main()
