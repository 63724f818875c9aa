"""One row of `benchmarks.models`: the ordinary and the private training step of one model.

`python -m benchmarks.model_steps NAME --sizes full --device gpu` prints one JSON object. All
methods run in this one process and their timed rounds alternate. Memory is what the compiled
program says that it needs: arguments, results and temporary buffers, where the new parameters take
the place of the old ones.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import io
import json
import platform
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mirrordp
from benchmarks import large_models
from benchmarks.large_models import Model
from benchmarks.timing import Contender, measure
from mirrordp.privacy import ghost
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import Batch, PyTree

NOT_PRIVATE, OURS, THEIRS = "not private", "mirrordp", "jax-privacy"
CLIP_NORM = 1.0
LEARNING_RATE = 0.01

Gradient = Callable[[PyTree, PyTree, Batch], PyTree]
"""A function of the trainable part of the parameters, the frozen rest, and a batch."""


def method_names(peers: bool, microbatch_size: int | None) -> list[str]:
    """Returns the methods in JAX that a row has."""
    private = [OURS, THEIRS] if peers else [OURS]
    small = [f"{name}, {microbatch_size} at a time" for name in private if microbatch_size]
    return [NOT_PRIVATE, *private, *small]


def gradient_of(method: str, model: Model) -> Gradient:
    """Returns the gradient of the mean loss, or the mean of clipped gradients."""
    name, _, size = method.removesuffix(" at a time").partition(", ")
    microbatch_size = int(size) if size else None
    merge = Trainable.of(model.trainable).merge

    def loss(part, rest, example):
        return model.loss(merge(part, rest), example)

    def mean_loss(part, rest, batch):
        return jax.vmap(loss, (None, None, 0))(part, rest, batch).mean()

    if name == NOT_PRIVATE:
        return jax.grad(mean_loss)
    if name == OURS:
        ours = ghost.clipped_grad(
            model.loss,
            l2_clip_norm=CLIP_NORM,
            trainable=model.trainable,
            microbatch_size=microbatch_size,
        )
        is_padding = jnp.zeros(batch_size(model.batch), bool)

        def mean_of_ours(part, rest, batch):
            total = ours(merge(part, rest), batch, is_padding)
            return jax.tree.map(lambda leaf: leaf / len(is_padding), total)

        return mean_of_ours
    import jax_privacy

    return jax_privacy.clipped_grad(
        loss,
        l2_clip_norm=CLIP_NORM,
        normalize_by=batch_size(model.batch),
        batch_argnums=2,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )


def batch_size(batch: Batch) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def parts(model: Model) -> tuple[PyTree, PyTree]:
    """Returns the trainable leaves and the frozen ones, each with None for the others."""
    part = Trainable.of(model.trainable).part(model.params)
    rest = jax.tree.map(
        lambda new, old: old if new is None else None,
        part,
        model.params,
        is_leaf=lambda leaf: leaf is None,
    )
    return part, rest


def contender(method: str, model: Model, rest: PyTree, batch: Batch) -> Contender:
    """Compiles one step of gradient and SGD, and runs it once.

    Every contender trains parameters of its own, which each step overwrites.
    """
    gradient = gradient_of(method, model)

    def step(part, rest, batch):
        grads = gradient(part, rest, batch)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, part, grads)

    state = [jax.device_put(parts(model)[0])]
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state[0], rest, batch).compile()
    seconds = time.perf_counter() - start

    def run():
        state[0] = compiled(state[0], rest, batch)

    def wait():
        jax.block_until_ready(state[0])

    run()
    wait()
    memory = compiled.memory_analysis()
    megabytes = None
    if memory is not None:
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes
        needed += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        megabytes = needed / 2**20
    return Contender("JAX", method, run, wait, seconds, megabytes)


def measured(
    model: Model, methods: list[str], *, rounds: int, seconds_per_round: float
) -> dict[str, dict[str, Any]]:
    """Measures all methods side by side.

    Returns:
        For each method milliseconds per step, GiB, and seconds of compilation; or "failed".
    """
    rest, batch = jax.device_put((parts(model)[1], model.batch))
    found, contenders = {}, []
    for method in methods:
        try:
            contenders.append(contender(method, model, rest, batch))
        except Exception as error:
            found[method] = {"failed": first_line(error)}
    times = measure(contenders, rounds=rounds, seconds_per_round=seconds_per_round)
    for item, milliseconds in zip(contenders, times, strict=True):
        megabytes = item.peak_megabytes
        found[item.method] = {
            "ms": milliseconds,
            "gib": None if megabytes is None else megabytes / 1024,
            "compile_s": item.compile_seconds,
        }
    return {method: found[method] for method in methods}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def plan(model: Model) -> list[ghost.ParameterPath]:
    """Prints and returns the path that ghost clipping takes for each parameter."""
    return ghost.explain(model.loss, model.params, model.batch, trainable=model.trainable)


def summary(paths: list[ghost.ParameterPath]) -> dict[str, dict[str, int]]:
    """Counts parameters by path, and explicit ones by name, with a star for the layer's number."""
    explicit = [
        re.sub(r"\[\d+\]", "[*]", path.name) + ": " + path.reason
        for path in paths
        if path.path == "explicit"
    ]
    return {
        "paths": collections.Counter(path.path for path in paths),
        "explicit": collections.Counter(explicit),
    }


def versions() -> dict[str, str]:
    # The version of this very code: another one may be installed beside it.
    found = {"mirrordp": mirrordp.__version__, "python": platform.python_version()}
    names = ("jax", "jaxlib", "jax-privacy")
    found |= {name: importlib.metadata.version(name) for name in names}
    return found | {"device": jax.devices()[0].device_kind}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.model_steps", description=__doc__)
    parser.add_argument("name", choices=large_models.MODELS, metavar="NAME")
    parser.add_argument("--sizes", choices=["full", "tiny"], default="full")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--microbatch-size", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu" if options.device == "cpu" else "cuda")
    model = large_models.make(options.name, options.sizes)
    with contextlib.redirect_stdout(io.StringIO()):
        paths = plan(model)
    methods = measured(
        model,
        method_names(options.peers, options.microbatch_size),
        rounds=options.rounds,
        seconds_per_round=0.3,
    )
    found = {"batch": batch_size(model.batch), "methods": methods, "versions": versions()}
    print(json.dumps(found | summary(paths)))


if __name__ == "__main__":
    main()
