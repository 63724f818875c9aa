"""The table that shows users which path each of their parameters takes, and what it costs."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mirrordp.privacy.clipping import even_size, takes_key
from mirrordp.privacy.ghost import _cost, _memory
from mirrordp.privacy.ghost._plan import task_of
from mirrordp.privacy.ghost._sum import Split
from mirrordp.privacy.ghost._tracing import UnrecognisedError
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import Batch, LossFn, Params, PyTree


class ParameterPath(NamedTuple):
    """How the norms of one parameter are found, why, and what that takes.

    Attributes:
        name: the parameter's place in the tree.
        shape: its shape.
        path: "gram", "product" (its gradient is formed, example by example), "explicit" (formed,
            and pulled back through a function of parameters or added up over several uses) or
            "unused".
        reason: why this path.
        operations: the number of multiplications and additions for the norm, per example.
        numbers: the number of entries that are held for it at a time, per example.
        seconds: predicted for a microbatch, beyond an ordinary step (see `_cost`).
        memory: bytes that a microbatch holds for it until the clip factors are known.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    reason: str
    operations: int
    numbers: int
    seconds: float
    memory: int


def explain(
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    *,
    trainable: PyTree | Trainable | None = None,
    microbatch_size: int | None = None,
) -> list[ParameterPath]:
    """Prints the path that `clipped_grad` takes for each trainable parameter, its cost, and why.

    Times are predicted for a device of the kind in use, from sizes alone, and say what to expect
    rather than what a clock will show. The last line is about the whole step: the number of
    examples that are taken at a time, and the memory that they need in JAX's own account.

    Args:
        loss_fn: as in `clipped_grad`.
        params: the parameters, or their shapes.
        batch: a batch, or its shapes.
        trainable: as in `clipped_grad`.
        microbatch_size: as in `clipped_grad`.

    Returns:
        The printed rows, one per parameter.
    """
    found: list[tuple[list[ParameterPath], str]] = []

    def record(params: Params, batch: Batch) -> tuple[()]:
        found.append(_described(loss_fn, params, batch, Trainable.of(trainable), microbatch_size))
        return ()

    # Nothing is computed, so shapes are enough.
    jax.eval_shape(record, params, batch)
    ((paths, last_line),) = found
    header = ("parameter", "shape", "path", "time", "memory", "why")
    table = [
        (p.name, str(p.shape), p.path, f"{1000 * p.seconds:.3f} ms", _bytes(p.memory), p.reason)
        for p in paths
    ]
    widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
    for row in (header, *table):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print(last_line)
    return paths


def _described(
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    trainable: Trainable,
    microbatch_size: int | None,
) -> tuple[list[ParameterPath], str]:
    """Returns the paths of all parameters, and a line about the whole step."""
    rows = len(jax.tree.leaves(batch)[0])
    keys = jax.random.split(jax.random.key(0), rows) if takes_key(loss_fn) else None
    part = trainable.part(params)
    names = leaf_names(part)
    size = even_size(rows, microbatch_size)
    try:
        split = Split.of(loss_fn, params, (batch, keys), trainable, size)
        if microbatch_size is None:
            split = _memory.fitted(split)
        size = split.microbatch_size
        paths = [_path(split, leaf, name) for leaf, name in enumerate(names)]
        needed = f"{_bytes(_memory.need(split).of(size))} of memory"
    except UnrecognisedError as error:
        leaves = jax.tree.leaves(part)
        paths = [
            _formed(name, jnp.shape(leaf), str(error), 2 * jnp.size(leaf), jnp.size(leaf), size)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        needed = "memory for all activations besides"
    seconds = sum(path.seconds for path in paths)
    return paths, (
        f"{size} of {rows} examples at a time: about {1000 * seconds:.3f} ms more than an ordinary "
        f"step of them, and {needed}"
    )


def leaf_names(part: PyTree) -> list[str]:
    """Returns the names of a tree's leaves, in order."""
    found = jax.tree_util.tree_leaves_with_path(part)
    return [jax.tree_util.keystr(path) or "params" for path, _ in found]


def _path(split: Split, leaf: int, name: str) -> ParameterPath:
    plan, shape, size = split.plan, split.leaves[leaf].shape, split.microbatch_size
    if leaf in plan.unused:
        why = "no example's loss depends on it"
        return ParameterPath(name, shape, "unused", why, 0, 0, 0.0, 0)
    if leaf in plan.explicit:
        operations = sum(layer.operations() for layer in plan.layers if leaf in layer.site.leaves)
        return _formed(name, shape, plan.reason(leaf), operations, math.prod(shape), size)
    layers = [use.layer for use in plan.gram.get(leaf) or (plan.product[leaf],)]
    machine = _cost.machine()
    task = task_of(layers, size, machine)
    gram, formed = _cost.gram_cost(task, machine), _cost.product_cost(task, machine)
    why = (
        f"{1000 * gram.seconds:.3f} ms by Gram matrices of {task.positions} positions, "
        f"{1000 * formed.seconds:.3f} ms if formed"
    )
    if leaf in plan.lookups:
        why += "; its lookups are not"
    if leaf in plan.product:
        operations, numbers, cost = layers[0].operations(), math.prod(shape), formed
        return ParameterPath(
            name, shape, "product", why, operations, numbers, cost.seconds, cost.memory
        )
    numbers = 2 * task.groups * task.positions**2
    # Inner products of one-hot vectors are comparisons.
    picked = any(layer.one_hot for layer in layers)
    operations = numbers * (task.right if picked else task.left + task.right)
    return ParameterPath(name, shape, "gram", why, operations, numbers, gram.seconds, gram.memory)


def _formed(
    name: str, shape: tuple[int, ...], reason: str, operations: int, numbers: int, size: int
) -> ParameterPath:
    """Returns the path of a parameter whose gradients are formed without a choice."""
    memory = 4 * size * numbers
    seconds = 3 * memory / _cost.machine().traffic
    return ParameterPath(name, shape, "explicit", reason, operations, numbers, seconds, memory)


def _bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
