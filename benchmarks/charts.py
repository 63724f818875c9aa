"""What acts before the clip, beside a plain step: `python -m benchmarks.charts [--network NAME]`.

Milliseconds per whole step (clipped sum, noise, optimiser; public gradient where a method needs
one) with random rows, and the ratio to the first of the methods. Networks are the paper's and
wrn-16-4, that of `experiments record`. Rounds of all methods alternate, after each was compiled,
which takes minutes for CIFAR-10: `--methods` picks some.
"""

import argparse
import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from benchmarks.clipping import write_json
from benchmarks.timing import Contender, measure
from benchmarks.training import problem
from experiments.record.network import WideResNet
from mirrordp import Mechanism, PoissonSampling, PublicData, TrainStep, updates
from mirrordp.mirror import KroneckerMap, SubspaceMap


@dataclasses.dataclass(frozen=True)
class Row:
    network: str
    method: str
    milliseconds: float
    ratio: float


NUM_PUBLIC = 256
NETWORKS = ("emnist", "cifar10", "wikitext2", "wrn-16-4")
METHODS = (
    "plain", "plain with a public gradient", "Kronecker mirror map", "recentred",
    "scaled by public gradients", "Kronecker chart", "embedded",
)  # fmt: skip


def network_and_rows(name: str, rows: int):
    """Makes a network, with `init` and `loss`, and rows of the right shape."""
    if name != "wrn-16-4":
        return problem(name, rows)
    net = WideResNet(16, 4, dtype="bfloat16")

    def loss(params, row):
        image, label = row
        return optax.softmax_cross_entropy_with_integer_labels(
            net.predict(params, image[None])[0], label
        )

    return types.SimpleNamespace(init=net.init, loss=loss), problem("cifar10", rows)[1]


def contenders(network: str, batch_size: int, rank: int, wanted: Sequence[str]) -> list[Contender]:
    net, arrays = network_and_rows(network, batch_size + NUM_PUBLIC)
    params = net.init(jax.random.key(1))
    rows = jax.device_put(jax.tree.map(lambda leaf: leaf[:batch_size], arrays))
    known = jax.tree.map(lambda leaf: leaf[batch_size:], arrays)
    public = PublicData(known)
    mechanism = Mechanism(
        sampling=PoissonSampling.for_batch_size(batch_size, num_examples=100 * batch_size),
        l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=10,
    )  # fmt: skip
    sgd = optax.sgd(0.1)

    # Made when they are wanted, since both take long for large networks.
    def curvature() -> KroneckerMap:
        return KroneckerMap.from_public(net.loss, params, public)

    def subspace() -> SubspaceMap:
        flat = jax.vmap(lambda row: ravel_pytree(jax.grad(net.loss)(params, row))[0])
        return SubspaceMap.from_directions(np.asarray(flat(known)), rank)

    made = [
        lambda: (sgd, None),
        lambda: (updates.mix_public_gradient(0.9), None),
        lambda: (updates.mirror_descent(curvature(), 0.1), None),
        lambda: (sgd, updates.recentred()),
        lambda: (sgd, updates.scaled_by_public_gradients()),
        lambda: (sgd, updates.kronecker(curvature())),
        lambda: (sgd, updates.embedded(subspace())),
    ]
    found = []
    for name, make in zip(METHODS, made, strict=True):
        if name not in wanted:
            continue
        optimizer, chart = make()
        step = TrainStep(net.loss, mechanism, optimizer, chart=chart)
        reads_public = step.prepares or name.endswith("public gradient")
        given = jax.device_put(known) if reads_public else None
        run = jax.jit(step.__call__)
        holder = [step.init(params, jax.random.key(2))]
        is_padding = jnp.zeros(batch_size, bool)

        def once(run=run, holder=holder, given=given, is_padding=is_padding):
            holder[0], _ = run(holder[0], rows, is_padding, given)

        found.append(
            Contender(
                "mirrordp", name, once, lambda h=holder: jax.block_until_ready(h[0]), None, None
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=["emnist", "cifar10"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for network in options.network:
        methods = contenders(network, options.batch_size, options.rank, options.methods)
        times = measure(methods, rounds=options.rounds, seconds_per_round=0.5)
        for method, time in zip(methods, times, strict=True):
            rows.append(Row(network, method.method, time, time / times[0]))
            print(
                f"{network:10} {method.method:30} {time:9.3f} ms {time / times[0]:6.2f}x",
                flush=True,
            )
    if options.json is not None:
        write_json(options.json, jax.default_backend(), rows)


if __name__ == "__main__":
    main()
