"""The clipped sum of a microbatch: backward pass, norms, clip factors and weighted sums."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrordp.privacy import clipping, sums
from mirrordp.privacy.clipping import ClipStats, Summed, with_key
from mirrordp.privacy.ghost import _factors, _tracing
from mirrordp.privacy.ghost._layers import OuterProducts
from mirrordp.privacy.ghost._plan import Plan
from mirrordp.privacy.ghost._tracing import Program
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import LossFn, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Split:
    """A loss function over flat lists: trainable leaves, constants, and a batch's rows."""

    program: Program
    plan: Plan
    leaves: list[jax.Array]
    constants: list[jax.Array]
    rows: list[jax.Array]
    treedef: Any

    @staticmethod
    def of(loss_fn: LossFn, params: Params, batch: PyTree, trainable: Trainable) -> "Split":
        """Traces a loss function and chooses the path of every trainable leaf.

        Args:
            loss_fn: as in `clipped_grad`.
            params: all parameters.
            batch: a batch and the keys of its examples (or None).
            trainable: which parameters are trained.

        Raises:
            UnrecognisedError: if the loss cannot be split into sites.
        """
        part = trainable.part(params)
        leaves, treedef = jax.tree.flatten(part)
        # Where a leaf is trainable its frozen copy is never read: a scalar stands in for it.
        frozen = jax.tree.map(
            lambda new, old: old if new is None else 0.0,
            part,
            params,
            is_leaf=lambda leaf: leaf is None,
        )
        constants, frozen_def = jax.tree.flatten(frozen)
        rows, rows_def = jax.tree.flatten(batch)

        def flat_loss(*arguments):
            given = iter(arguments)
            take = lambda tree, like: jax.tree.unflatten(tree, [next(given) for _ in like])  # noqa: E731
            new, old = take(treedef, leaves), take(frozen_def, constants)
            example, key = take(rows_def, rows)
            return with_key(loss_fn)(trainable.merge(new, old), example, key)

        leaves = [jnp.asarray(leaf) for leaf in leaves]
        constants = [jnp.asarray(constant) for constant in constants]
        rows = [jnp.asarray(row) for row in rows]
        shapes = [jax.ShapeDtypeStruct(row.shape[1:], row.dtype) for row in rows]
        program = _tracing.trace(flat_loss, leaves, constants, shapes)
        return Split(program, Plan.of(program), leaves, constants, rows, treedef)


def clipped_sum(
    split: Split, rows: list[jax.Array], is_padding: jax.Array, l2_clip_norm: float
) -> Summed:
    """Returns the clipped sum, and losses and (upper bounds on) norms, of one microbatch."""
    plan, batch_size = split.plan, is_padding.shape[0]
    exponent = sums.grain_exponent(l2_clip_norm)
    found = [sums.nothing(leaf.shape) for leaf in split.leaves]

    def summed(losses: jax.Array, norms: jax.Array) -> Summed:
        total = sums.ExactSum.from_halves(split.treedef, found, exponent, split.leaves)
        return Summed(total, ClipStats(losses, norms.astype(jnp.float32)))

    if batch_size == 0:
        return summed(jnp.zeros(0), jnp.zeros(0))
    losses, captured, cotangents = _backward(split, rows, batch_size)
    uses = (*(use for uses in plan.gram.values() for use in uses), *plan.product.values())
    layers = {use.number: use.layer for use in uses}
    parts = {n: layer.factors(captured[n], cotangents[n][0]) for n, layer in layers.items()}
    products = {n: layer.product(parts[n]) for n, layer, _ in plan.product.values()}
    explicit = _explicit_gradients(split, captured, cotangents) if plan.explicit else []
    # The norm is that of the very numbers that are summed: nothing is computed twice.
    products, explicit = lax.optimization_barrier((products, explicit))

    norms_squared = [clipping.squared_norm(g) for g in (*products.values(), *explicit)]
    taken = []
    roundoffs = {
        leaf: sum_roundoff([use.layer for use in uses], batch_size)
        for leaf, uses in plan.gram.items()
    }
    for leaf, shared in plan.gram.items():
        oriented = [parts[n].swapped() if swapped else parts[n] for n, _, swapped in shared]
        squared, underflow = _factors.gram(oriented, roundoff=roundoffs[leaf], exponent=exponent)
        norms_squared.append(squared)
        taken.append(underflow)
    dtype = jnp.result_type(jnp.float32, *(jnp.finfo(leaf.dtype).dtype for leaf in split.leaves))
    factors, norms = clipping.clip_factors(
        norms_squared,
        is_padding,
        l2_clip_norm,
        dtype,
        reserve=sums.RESERVE + _factors.disturbance(roundoffs.values()),
        taken=taken,
    )

    weight_sums = {
        n: layer.weighted_sum(parts[n], factors, block=roundoffs[leaf].block, exponent=exponent)
        for leaf, shared in plan.gram.items()
        for n, layer, _ in shared
    } | {n: sums.halves(clipping.scaled(g, factors), exponent) for n, g in products.items()}
    for number, halves in weight_sums.items():
        leaf, total = _leaf_sum(split, layers[number], halves)
        found[leaf] = sums.added(found[leaf], total)
    for leaf, gradient in zip(plan.explicit, explicit, strict=True):
        found[leaf] = sums.halves(clipping.scaled(gradient, factors), exponent)
    return summed(losses, norms)


def _backward(split: Split, rows: list[jax.Array], batch_size: int):
    """Returns losses, captured operands and cotangents of all sites, example by example.

    The probes are made inside the map over examples. Given from outside they would force their
    batch axis on the layers' outputs, and a scan's outputs (time first) would be transposed.
    """
    program = split.program

    def one_example(rows):
        probes = [
            [jnp.zeros(shape.shape, shape.dtype) for shape in site.probe_shapes()]
            for site in program.sites
        ]
        forward = lambda probes: program.forward(split.leaves, split.constants, rows, probes)  # noqa: E731
        loss, pull, captured = jax.vjp(forward, probes, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(loss))
        return loss, captured, cotangents

    return jax.vmap(one_example, axis_size=batch_size)(rows)


def _explicit_gradients(split: Split, captured, cotangents) -> list[jax.Array]:
    """Returns per-example gradients [B, *leaf.shape] of the leaves that have no better path."""
    program, plan = split.program, split.plan
    used = [
        (number, layer)
        for number, layer in enumerate(plan.layers)
        if not layer.site.leaves.isdisjoint(plan.explicit)
    ]

    def operands(chosen):
        leaves = list(split.leaves)
        for leaf, value in zip(plan.explicit, chosen, strict=True):
            leaves[leaf] = value
        everything = program.operands(leaves, split.constants)
        return [everything[number] for number, _ in used]

    values, pull = jax.vjp(operands, [split.leaves[leaf] for leaf in plan.explicit])

    def one_example(captured, cotangents):
        weights = [
            layer.gradients(value, inputs, deltas)
            for (_, layer), value, inputs, deltas in zip(
                used, values, captured, cotangents, strict=True
            )
        ]
        (gradients,) = pull(weights)
        return gradients

    return jax.vmap(one_example)([captured[n] for n, _ in used], [cotangents[n] for n, _ in used])


def _leaf_sum(split: Split, layer: OuterProducts, halves: sums.Halves) -> tuple[int, sums.Halves]:
    """Returns the leaf of a layer's weight, and a sum [G, K, N] in the layout of that leaf.

    The sum is rearranged only: where the model casts a weight to fewer bits, a transposed cast
    would round the sum, and a contribution could exceed the clip norm.
    """
    view = layer.site.views[0]
    assert view is not None
    shape = split.leaves[view.leaf].shape
    high, low = (view.restored(layer.weight_gradient(half), shape) for half in halves)
    return view.leaf, (high, low)


def sum_roundoff(layers: Sequence[OuterProducts], batch_size: int) -> _factors.Roundoff:
    """Bounds the rounding of Σ_i c_i Σ_t L_t ⊗ R_t as it is computed, for the uses of a weight.

    With u the unit roundoff (twice that where matrix units truncate), n products of rounded factors
    that are added in any order err by less than (n + 2)·u of the sum of their sizes, to first
    order. A matrix unit that shortens both inputs to b bits adds (1 + 2⁻ᵇ)² − 1: 11 bits are left
    by TF32 on a GPU, 8 by bfloat16 on a TPU. Lookups are summed as integers: only the product with
    the clip factor is rounded, and blocks do not matter.
    """
    backend = jax.default_backend()
    positions = sum(layer.sizes.positions for layer in layers)
    wide = all(
        jnp.promote_types(layer.site.out_shapes[0].dtype, jnp.float32) == jnp.float64
        for layer in layers
    )
    unit = 2.0**-53 if wide else 2.0**-24
    if backend != "cpu":
        unit *= 2
    products = [layer for layer in layers if not layer.one_hot]
    if not products:
        return _factors.Roundoff(own=3 * unit, spread=0.0, block=batch_size, disturbance=0.0)
    shortens = any(layer.precision is not lax.Precision.HIGHEST for layer in products)
    shortened = 0.0
    if not wide and backend != "cpu" and shortens:
        shortened = (1 + 2.0 ** -(8 if backend == "tpu" else 11)) ** 2 - 1
    return _factors.roundoff(positions, batch_size, unit, shortened)
