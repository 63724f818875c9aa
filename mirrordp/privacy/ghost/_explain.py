"""The table that shows users which path each of their parameters takes, and what it costs."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mirrordp.privacy.clipping import takes_key
from mirrordp.privacy.ghost._sum import Split
from mirrordp.privacy.ghost._tracing import UnrecognisedError
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import Batch, LossFn, Params, PyTree


class ParameterPath(NamedTuple):
    """How the norms of one parameter are found, and what that takes per example.

    Attributes:
        name: the parameter's place in the tree.
        shape: its shape.
        path: "gram", "product" (its gradient is formed from factors), "explicit" (its gradient is
            pulled back example by example) or "unused".
        reason: why it is neither a Gram matrix nor a product.
        operations: the number of multiplications and additions for the norm.
        numbers: the number of entries that are held for it at a time.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    reason: str
    operations: int
    numbers: int


def explain(
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    *,
    trainable: PyTree | Trainable | None = None,
) -> list[ParameterPath]:
    """Prints the path that `clipped_grad` takes for each trainable parameter, with its cost.

    Args:
        loss_fn: as in `clipped_grad`.
        params: the parameters, or arrays of their shapes.
        batch: a batch; only its shapes matter.
        trainable: as in `clipped_grad`.

    Returns:
        The printed rows, one per parameter.
    """
    rows = len(jax.tree.leaves(batch)[0])
    keys = jax.random.split(jax.random.key(0), rows) if takes_key(loss_fn) else None
    chosen = Trainable.of(trainable)
    part = chosen.part(params)
    names = leaf_names(part)
    try:
        split = Split.of(loss_fn, params, (batch, keys), chosen)
        paths = [_path(split, leaf, name) for leaf, name in enumerate(names)]
    except UnrecognisedError as error:
        shapes = map(jnp.shape, jax.tree.leaves(part))
        paths = [
            ParameterPath(
                name, shape, "explicit", str(error), 2 * math.prod(shape), math.prod(shape)
            )
            for name, shape in zip(names, shapes, strict=True)
        ]
    header = ("parameter", "shape", "path", "operations", "numbers", "why explicit")
    table = [
        (p.name, str(p.shape), p.path, f"{p.operations:,}", f"{p.numbers:,}", p.reason)
        for p in paths
    ]
    widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
    for row in (header, *table):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return paths


def leaf_names(part: PyTree) -> list[str]:
    """Returns the names of a tree's leaves, in order."""
    found = jax.tree_util.tree_leaves_with_path(part)
    return [jax.tree_util.keystr(path) or "params" for path, _ in found]


def _path(split: Split, leaf: int, name: str) -> ParameterPath:
    plan, shape = split.plan, split.leaves[leaf].shape
    if leaf in plan.gram:
        layers = [use.layer for use in plan.gram[leaf]]
        _, left, right, groups = layers[0].sizes
        numbers = 2 * groups * sum(layer.sizes.positions for layer in layers) ** 2
        # Inner products of one-hot vectors are comparisons.
        entries = right if any(layer.one_hot for layer in layers) else left + right
        return ParameterPath(name, shape, "gram", "", numbers * entries, numbers)
    if leaf in plan.product:
        operations = plan.product[leaf].layer.operations()
        return ParameterPath(name, shape, "product", "", operations, math.prod(shape))
    if leaf in plan.unused:
        return ParameterPath(name, shape, "unused", "no example's loss depends on it", 0, 0)
    operations = sum(layer.operations() for layer in plan.layers if leaf in layer.site.leaves)
    return ParameterPath(name, shape, "explicit", plan.reason(leaf), operations, math.prod(shape))
