"""What the two ways to a parameter's norm take: `python -m benchmarks.paths [--device cpu|gpu]`.

One layer at a time, ghost clipping runs with Gram matrices and with each example's gradient formed
("product"), and beside ordinary training, in alternating rounds. The planner's choice
(`mirrordp.privacy.ghost`) is a function of the same sizes, so the last columns tell where it is
wrong and what that costs. With --out, lines of JSON are written, which
tests/ghost/test_planner.py holds the planner to.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.timing import Contender, measure
from mirrordp.privacy import ghost
from mirrordp.privacy.ghost import _cost, _plan, _sum
from mirrordp.privacy.trainable import Trainable


class Case(NamedTuple):
    """A layer: a dense one with T positions, or a 3 x 3 convolution of T = side² positions."""

    kind: str
    examples: int
    positions: int
    left: int
    right: int
    dtype: str = "float32"


CASES = {
    "cpu": [
        Case("dense", 256, 1, 128, 128),
        Case("dense", 32, 1, 512, 512),
        Case("dense", 32, 16, 256, 256),
        Case("dense", 64, 20, 96, 670),
        Case("dense", 16, 35, 200, 800),
        Case("dense", 32, 32, 512, 512),
        Case("dense", 32, 64, 512, 512),
        Case("dense", 16, 128, 512, 512),
        Case("dense", 16, 256, 512, 512),
        Case("dense", 8, 512, 768, 768),
        Case("convolution", 32, 1024, 32, 32),
        Case("convolution", 32, 256, 64, 64),
        Case("convolution", 32, 64, 128, 128),
        Case("convolution", 32, 16, 256, 256),
    ],
    "gpu": [
        *(
            Case("dense", 8192 // t, t, k, n, dtype)
            for t in (64, 128, 256, 512, 1024)
            for k, n in ((768, 768), (768, 3072), (3072, 768))
            for dtype in ("float32", "bfloat16")
            if dtype == "float32" or k == n
        ),
        Case("dense", 64, 197, 768, 768),
        Case("dense", 64, 197, 768, 3072),
        Case("dense", 64, 128, 768, 50257),
        Case("dense", 16, 512, 768, 50257),
        Case("dense", 4096, 1, 512, 512),
        Case("dense", 64, 128, 1280, 5120),
        Case("convolution", 512, 1024, 16, 64),
        Case("convolution", 512, 1024, 64, 64),
        Case("convolution", 512, 256, 128, 128),
        Case("convolution", 512, 64, 256, 256),
        Case("convolution", 256, 64, 128, 128),
    ],
}


def problem(case: Case) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the loss of one layer, its weight and a batch."""
    dtype = jnp.dtype(case.dtype)
    draw = functools.partial(jax.random.normal, jax.random.key(0), dtype=dtype)
    if case.kind == "dense":
        loss = lambda w, x: jnp.sum(jnp.sin(x @ w).astype(jnp.float32))  # noqa: E731
        weight = 0.02 * draw((case.left, case.right))
        return loss, weight, draw((case.examples, case.positions, case.left))

    def convolved(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(jnp.sin(out).astype(jnp.float32))

    side = round(case.positions**0.5)
    weight = 0.02 * draw((3, 3, case.left, case.right))
    return convolved, weight, draw((case.examples, side, side, case.left))


def contender(name: str, gradient, weight: jax.Array, batch: jax.Array) -> Contender:
    """Compiles a gradient; its result is kept so that nothing of it can be left out."""
    compiled = jax.jit(gradient).lower(weight, batch).compile()
    state: list[Any] = [None]

    def run():
        state[0] = compiled(weight, batch)

    run()
    jax.block_until_ready(state[0])
    return Contender("JAX", name, run, lambda: jax.block_until_ready(state[0]), 0.0, None)


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Returns the milliseconds of ordinary training and of both paths, and the planner's choice."""
    loss, weight, batch = problem(case)
    nobody = jnp.zeros(case.examples, bool)
    clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0)
    plain = jax.grad(lambda w, x: jax.vmap(loss, (None, 0))(w, x).sum())
    split = _sum.Split.of(loss, weight, (batch, None), Trainable.of(None), len(batch))
    task = _plan.task_of(split.plan.layers, case.examples, _cost.machine())  # type: ignore[arg-type]
    chosen = "gram" if split.plan.gram else "product"
    contenders = [contender("plain", plain, weight, batch)]
    prefers = _plan._prefers_gram
    try:
        for path in ("gram", "product"):
            _plan._prefers_gram = lambda *_, path=path: path == "gram"
            private = lambda w, x: clipped(w, x, nobody)  # noqa: E731
            contenders.append(contender(path, private, weight, batch))
    finally:
        _plan._prefers_gram = prefers
    times = measure(contenders, rounds=rounds, seconds_per_round=0.1)
    machine = _cost.machine()
    costs = {"gram": _cost.gram_cost(task, machine), "product": _cost.product_cost(task, machine)}
    return {
        "device": jax.default_backend(),
        "case": case._asdict(),
        "task": task._asdict(),
        "ms": dict(zip(("plain", "gram", "product"), times, strict=True)),
        "predicted_ms": {path: 1000 * cost.seconds for path, cost in costs.items()},
        "chosen": chosen,
    }


def row(line: dict[str, Any]) -> str:
    """Formats a line: measured and predicted times beyond ordinary training."""
    case, ms, predicted = Case(**line["case"]), line["ms"], line["predicted_ms"]
    sizes = f"{case.kind} {case.examples} x {case.positions} x {case.left} x {case.right}"
    extra = {path: ms[path] - ms["plain"] for path in predicted}
    loss = ms[line["chosen"]] / min(ms["gram"], ms["product"])
    return (
        f"{sizes + ' ' + case.dtype:48} {ms['plain']:9.3f} ms"
        + "".join(f"  {path} +{extra[path]:8.3f} ({predicted[path]:8.3f})" for path in predicted)
        + f"  chosen {line['chosen']:8} {loss:.2f}x the best"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.paths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="appends lines of JSON")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu" if options.device == "cpu" else "cuda")
    for case in CASES[options.device]:
        line = measured(case, options.rounds)
        print(row(line), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
