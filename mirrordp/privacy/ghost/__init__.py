"""The clipped sum without per-example gradients in memory, derived from the jaxpr.

`clipped_grad` has the contract of `mirrordp.clipped_grad`, for any loss function and
without the model's cooperation. See `_tracing` for how parameters are separated from data, and
`_factors` for how norms are found. In short, for a batch:

1. One forward pass and one backward pass to the outputs of the layers (not to the weights).
2. Each example's squared gradient norm, weight by weight, from layer inputs and cotangents.
3. Clip factors c_i = min(1, C / (norm_i + bound on the rounding of step 4)).
4. Σ_i c_i G_i, as ordinary training computes a weight's gradient, from the scaled cotangents: a few
   examples at a time, and these blocks are added up exactly.

A parameter whose use is not recognised gets explicit per-example gradients, that parameter only. A
loss whose structure is not recognised (a `while` loop over parameters and data, parameters that
are not floats, no dependence on the example) is left to `mirrordp.privacy.clipping` as a whole.
`explain` prints the path that each parameter takes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.privacy import clipping, sums
from mirrordp.privacy.clipping import (
    ClippedGrad,
    ClipStats,
    Summed,
    checked_keys,
    in_microbatches,
    merge,
    takes_key,
    trainable_part,
    with_key,
)
from mirrordp.privacy.ghost import _factors, _tracing
from mirrordp.privacy.ghost._factors import Factors
from mirrordp.privacy.ghost._tracing import Program, Site, UnrecognisedError
from mirrordp.types import Batch, LossFn, Params, PyTree

LARGE = 2**26
"""Explicit per-example gradients of so many numbers (256 MiB in float32) are worth a warning."""


def clipped_grad(
    loss_fn: LossFn,
    *,
    l2_clip_norm: float,
    trainable: PyTree | None = None,
    microbatch_size: int | None = None,
) -> ClippedGrad:
    """The sum of per-example gradients of `loss_fn`, each clipped to `l2_clip_norm`.

    Arguments, result and guarantees are those of `mirrordp.clipped_grad`; what differs is
    time and memory. Where a large parameter is not recognised and takes explicit per-example
    gradients, a warning says so.
    """
    sums.check_clip_norm(l2_clip_norm)
    if microbatch_size is not None:
        _validate.positive_integer(microbatch_size=microbatch_size)
    keyed_loss = with_key(loss_fn)
    needs_key = takes_key(loss_fn)
    oracle = clipping.clipped_grad(
        loss_fn, l2_clip_norm=l2_clip_norm, trainable=trainable, microbatch_size=microbatch_size
    )

    def exact_sum(
        params: Params, batch: Batch, is_padding: jax.Array, *, keys: jax.Array | None = None
    ) -> Summed:
        if needs_key:
            keys = checked_keys(loss_fn, keys, is_padding.shape[0])
        clipping.check_isolated(loss_fn, params, trainable, batch, keys)
        at_a_time = min(is_padding.shape[0], microbatch_size or is_padding.shape[0])
        try:
            split = _Split.of(keyed_loss, params, (batch, keys), trainable)
        except UnrecognisedError as error:
            everything = jax.tree.leaves(trainable_part(params, trainable))
            _warn_if_large("all parameters", everything, at_a_time, str(error))
            return oracle.exact_sum(params, batch, is_padding, keys=keys)
        for leaf in split.plan.fallback:
            _warn_if_large(
                _names(params, trainable)[leaf],
                [split.leaves[leaf]],
                at_a_time,
                _reason(split, leaf),
            )
        run = lambda rows, padding: _clipped_sum(split, rows, padding, l2_clip_norm)  # noqa: E731
        return in_microbatches(run, split.rows, is_padding, microbatch_size)

    return ClippedGrad(exact_sum, float(l2_clip_norm), needs_key)


def _names(params: Params, trainable: PyTree | None) -> list[str]:
    """The names of the trainable leaves, in order."""
    found = jax.tree_util.tree_leaves_with_path(trainable_part(params, trainable))
    return [jax.tree_util.keystr(path) or "params" for path, _ in found]


def _warn_if_large(name: str, leaves: Sequence[Any], rows: int, reason: str) -> None:
    numbers = rows * sum(math.prod(jnp.shape(leaf)) for leaf in leaves)
    if numbers >= LARGE:
        warn(
            f"ghost clipping forms explicit gradients of {rows} examples for {name} "
            f"({numbers / 2**18:,.0f} MiB in float32): {reason}. The result is right, but slow; "
            "microbatch_size bounds the memory, and mirrordp.privacy.ghost.explain(loss_fn, "
            "params, batch) shows the path of every parameter.",
        )


class ParameterPath(NamedTuple):
    """How one parameter's norm is found, and what that takes per example.

    Attributes:
        name: the parameter's place in the tree.
        shape: its shape.
        path: "gram", "product" (its gradient is formed from factors), "explicit" (its gradient is
            pulled back example by example) or "unused".
        reason: why it is not a Gram matrix or a product.
        operations: multiplications and additions for the norm.
        numbers: entries that are held for it at a time.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    reason: str
    operations: int
    numbers: int


def explain(
    loss_fn: LossFn, params: Params, batch: Batch, *, trainable: PyTree | None = None
) -> list[ParameterPath]:
    """Prints, per trainable parameter, the path that `clipped_grad` takes, its cost and memory.

    Args:
        loss_fn: as in `clipped_grad`.
        params: the parameters, or arrays of their shapes.
        batch: a batch; only its shapes matter.
        trainable: as in `clipped_grad`.

    Returns:
        What was printed, a row per parameter.
    """
    rows = len(jax.tree.leaves(batch)[0])
    keys = jax.random.split(jax.random.key(0), rows) if takes_key(loss_fn) else None
    leaves = jax.tree.leaves(trainable_part(params, trainable))
    named = list(zip(_names(params, trainable), leaves, strict=True))
    try:
        split = _Split.of(with_key(loss_fn), params, (batch, keys), trainable)
        paths = [_explain_leaf(split, number, name) for number, (name, _) in enumerate(named)]
    except UnrecognisedError as error:
        paths = [
            ParameterPath(name, jnp.shape(leaf), "explicit", str(error), 2 * size, size)
            for name, leaf in named
            for size in [math.prod(jnp.shape(leaf))]
        ]
    header = ("parameter", "shape", "path", "operations", "numbers", "why explicit")
    table = [
        (p.name, str(p.shape), p.path, f"{p.operations:,}", f"{p.numbers:,}", p.reason)
        for p in paths
    ]
    widths = [max(len(row[i]) for row in [header, *table]) for i in range(len(header))]
    for row in [header, *table]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return paths


def _explain_leaf(split: "_Split", leaf: int, name: str) -> ParameterPath:
    plan, sites = split.plan, split.program.sites
    shape = split.leaves[leaf].shape
    size = math.prod(shape)
    if leaf in plan.gram:
        parts = [_factors.sizes(sites[number]) for number, _ in plan.gram[leaf]]
        positions = sum(part.positions for part in parts)
        groups, entries = parts[0].groups, parts[0].left + parts[0].right
        if any(sites[number].name == "gather" for number, _ in plan.gram[leaf]):
            entries = parts[0].right
        operations = 2 * groups * positions**2 * entries
        return ParameterPath(name, shape, "gram", "", operations, 2 * groups * positions**2)
    if leaf in plan.explicit:
        operations = _gradient_operations(sites[plan.explicit[leaf]])
        return ParameterPath(name, shape, "product", "", operations, size)
    if leaf in plan.unused:
        return ParameterPath(name, shape, "unused", "no example's loss depends on it", 0, 0)
    operations = sum(_gradient_operations(site) for site in sites if leaf in site.leaves)
    return ParameterPath(name, shape, "explicit", _reason(split, leaf), operations, size)


def _gradient_operations(site: Site) -> int:
    """About what it costs to form one example's gradient at a site."""
    if _factors.is_factored(site):
        part = _factors.sizes(site)
        return 2 * part.groups * part.positions * part.left * part.right
    arrays = (*site.param_shapes, *site.out_shapes)
    return 2 * math.prod(site.loops) * max(math.prod(array.shape) for array in arrays)


def _reason(split: "_Split", leaf: int) -> str:
    """Why a leaf has no factors, in words."""
    for site in split.program.sites:
        if leaf not in site.leaves:
            continue
        if not _factors.is_factored(site):
            return f"enters through {site.name}"
        if site.views[0] is None:
            return f"behind a function of parameters, before {site.name}"
    return "used several times in layouts that differ"


@dataclasses.dataclass(frozen=True)
class _Split:
    """A loss function over flat lists: trainable leaves, constants, and a batch's rows."""

    program: Program
    plan: "_Plan"
    leaves: list[jax.Array]
    constants: list[jax.Array]
    rows: list[jax.Array]
    treedef: Any

    @staticmethod
    def of(loss: LossFn, params: Params, batch: PyTree, trainable: PyTree | None) -> "_Split":
        part = trainable_part(params, trainable)
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
            return loss(merge(new, old), example, key)

        leaves = [jnp.asarray(leaf) for leaf in leaves]
        constants = [jnp.asarray(constant) for constant in constants]
        rows = [jnp.asarray(row) for row in rows]
        shapes = [jax.ShapeDtypeStruct(row.shape[1:], row.dtype) for row in rows]
        program = _tracing.trace(flat_loss, leaves, constants, shapes)
        return _Split(program, _plan(program), leaves, constants, rows, treedef)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which path each trainable leaf takes.

    Attributes:
        gram: leaf -> its sites (number, whether left and right are swapped).
        explicit: leaf -> its one site; the gradient is formed from factors.
        fallback: leaves whose per-example gradients are pulled back through the parameters' own
            computation.
        unused: leaves that no site depends on; their gradient is zero.
    """

    gram: dict[int, tuple[tuple[int, bool], ...]]
    explicit: dict[int, int]
    fallback: tuple[int, ...]
    unused: tuple[int, ...]


def _plan(program: Program) -> _Plan:
    gram, explicit, fallback, unused = {}, {}, [], []
    for leaf in range(program.num_leaves):
        uses = [number for number, site in enumerate(program.sites) if leaf in site.leaves]
        sites = [program.sites[number] for number in uses]
        recognised = all(_factors.is_factored(site) and site.views[0] is not None for site in sites)
        if not uses:
            unused.append(leaf)
        elif not recognised:
            fallback.append(leaf)
        elif (swaps := _common_layout(sites)) is not None and _prefers_gram(sites):
            gram[leaf] = tuple(zip(uses, swaps, strict=True))
        elif len(uses) == 1 and sites[0].name != "gather":
            explicit[leaf] = uses[0]
        elif swaps is not None and any(site.name == "gather" for site in sites):
            gram[leaf] = tuple(zip(uses, swaps, strict=True))
        else:
            fallback.append(leaf)
    return _Plan(gram, explicit, tuple(fallback), tuple(unused))


def _prefers_gram(sites: Sequence[Site]) -> bool:
    """Whether Gram matrices over all positions hold fewer numbers than the gradient itself."""
    sizes = [_factors.sizes(site) for site in sites]
    positions = sum(size.positions for size in sizes)
    return 2 * positions**2 <= sizes[0].left * sizes[0].right


def _common_layout(sites: Sequence[Site]) -> list[bool] | None:
    """For each site whether its sides must be swapped to match the first; None if they cannot."""

    def canonical(site: Site) -> tuple:
        view, (groups, left, right) = site.views[0], _factors.axes(site)
        assert view is not None
        if view.axes is None:
            return tuple((view.layout, part) for part in (groups, left, right))
        named = view.axes
        groups, left, right = (
            tuple(named[i] for i in part if named[i] is not None) for part in (groups, left, right)
        )
        return view.stacked + groups, left, right

    first = canonical(sites[0])
    swaps = []
    for site in sites:
        groups, left, right = canonical(site)
        if (groups, left, right) == first:
            swaps.append(False)
        elif (groups, right, left) == first and not _factors.axes(site).groups:
            swaps.append(True)
        else:
            return None
    return swaps


def _clipped_sum(
    split: _Split, rows: list[jax.Array], is_padding: jax.Array, l2_clip_norm: float
) -> Summed:
    """Clipped sum of each leaf, losses and (upper bounds on) norms of one microbatch."""
    program, plan = split.program, split.plan
    sites = program.sites
    batch_size = is_padding.shape[0]
    exponent = sums.grain_exponent(l2_clip_norm)
    found = [sums.nothing(leaf.shape) for leaf in split.leaves]

    def summed(losses: jax.Array, norms: jax.Array) -> Summed:
        total = sums.ExactSum.from_halves(split.treedef, found, exponent, split.leaves)
        return Summed(total, ClipStats(losses, norms.astype(jnp.float32)))

    if batch_size == 0:
        return summed(jnp.zeros(0), jnp.zeros(0))
    losses, captured, cotangents = _backward(split, rows, batch_size)
    parts: dict[int, Factors] = {
        number: _factors.factors(sites[number], captured[number], cotangents[number][0])
        for number in (
            *(number for uses in plan.gram.values() for number, _ in uses),
            *plan.explicit.values(),
        )
    }
    explicit = {
        number: _factors.explicit(sites[number], parts[number]) for number in plan.explicit.values()
    }
    fallback = _fallback_gradients(split, captured, cotangents) if plan.fallback else []
    # The norm is that of the very numbers that are summed: nothing is computed twice.
    explicit, fallback = lax.optimization_barrier((explicit, fallback))

    norms_squared = [clipping.squared_norm(g) for g in (*explicit.values(), *fallback)]
    taken = []
    roundoffs = {
        leaf: _sum_roundoff([sites[number] for number, _ in uses], batch_size)
        for leaf, uses in plan.gram.items()
    }
    for leaf, uses in plan.gram.items():
        oriented = [parts[n].swapped() if swap else parts[n] for n, swap in uses]
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
        number: _factors.weighted_sum(
            sites[number],
            parts[number],
            factors,
            block=roundoffs[leaf].block,
            exponent=exponent,
        )
        for leaf, uses in plan.gram.items()
        for number, _ in uses
    } | {
        number: sums.halves(clipping.scaled(gradient, factors), exponent)
        for number, gradient in explicit.items()
    }
    for number, halves in weight_sums.items():
        leaf, total = _leaf_sum(split, number, halves)
        found[leaf] = sums.added(found[leaf], total)
    for leaf, gradient in zip(plan.fallback, fallback, strict=True):
        found[leaf] = sums.halves(clipping.scaled(gradient, factors), exponent)
    return summed(losses, norms)


def _backward(split: _Split, rows: list[jax.Array], batch_size: int):
    """Losses, captured operands and cotangents of all sites, example by example.

    The probes are made inside the map over examples: given from outside they would force their
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


def _fallback_gradients(split: _Split, captured, cotangents) -> list[jax.Array]:
    """Per-example gradients [B, *leaf.shape] of the leaves without a better way."""
    program, plan = split.program, split.plan
    numbers = [
        number
        for number, site in enumerate(program.sites)
        if not site.leaves.isdisjoint(plan.fallback)
    ]

    def operands(chosen):
        leaves = list(split.leaves)
        for leaf, value in zip(plan.fallback, chosen, strict=True):
            leaves[leaf] = value
        everything = program.operands(leaves, split.constants)
        return [everything[number] for number in numbers]

    chosen = [split.leaves[leaf] for leaf in plan.fallback]
    values, pull = jax.vjp(operands, chosen)

    def one_example(captured, cotangents):
        weights = [
            _one_weight_gradient(program.sites[number], value, inputs, deltas)
            for number, value, inputs, deltas in zip(
                numbers, values, captured, cotangents, strict=True
            )
        ]
        (gradients,) = pull(weights)
        return gradients

    return jax.vmap(one_example)(
        [captured[number] for number in numbers], [cotangents[number] for number in numbers]
    )


def _one_weight_gradient(site: Site, weights, captured, cotangents) -> list[jax.Array]:
    """Gradient of one example with respect to a site's PARAM operands."""
    if _factors.is_factored(site) and site.name != "gather":
        part = _factors.factors(site, [a[None] for a in captured], cotangents[0][None])
        gradient = _factors.weight_gradient(site, _factors.explicit(site, part)[0])
        return [gradient.astype(weights[0].dtype)]
    _, pull = jax.vjp(lambda weights: site.applied()(weights, list(captured)), weights)
    (gradients,) = pull(list(cotangents))
    return gradients


def _leaf_sum(split: _Split, number: int, halves: sums.Halves) -> tuple[int, sums.Halves]:
    """A sum with respect to a site's weight, [G, K, N], brought back to the parameter leaf.

    It is rearranged only: where the model casts a weight to fewer bits, a transposed cast would
    round the sum, and a contribution could exceed the clip norm.
    """
    site = split.program.sites[number]
    view = site.views[0]
    assert view is not None
    shape = split.leaves[view.leaf].shape
    high, low = (view.restored(_factors.weight_gradient(site, half), shape) for half in halves)
    return view.leaf, (high, low)


def _sum_roundoff(sites: Sequence[Site], batch_size: int) -> _factors.Roundoff:
    """Rounding of Σ_i c_i Σ_t L_t ⊗ R_t as it is computed, for the uses of a weight.

    With u the unit roundoff (twice that where matrix units truncate), n products of rounded factors
    that are added in any order err by less than (n + 2)·u of the sum of their sizes, to first
    order. A matrix unit that shortens both inputs to b bits adds (1 + 2⁻ᵇ)² − 1: 11 bits are left
    by TF32 on a GPU, 8 by bfloat16 on a TPU. Lookups are summed as integers: only the product with
    the clip factor is rounded, and blocks do not matter.
    """
    positions = sum(_factors.sizes(site).positions for site in sites)
    wide = all(
        jnp.promote_types(site.out_shapes[0].dtype, jnp.float32) == jnp.float64 for site in sites
    )
    unit = 2.0**-53 if wide else 2.0**-24
    if jax.default_backend() != "cpu":
        unit *= 2
    if all(site.name == "gather" for site in sites):
        return _factors.Roundoff(own=3 * unit, spread=0.0, block=batch_size, disturbance=0.0)
    shortened = 0.0
    if not wide and any(map(_rounds_inputs, sites)):
        shortened = (1 + 2.0 ** -(8 if jax.default_backend() == "tpu" else 11)) ** 2 - 1
    return _factors.roundoff(positions, batch_size, unit, shortened)


def _rounds_inputs(site: Site) -> bool:
    """Whether float32 products of this site are computed from shortened inputs."""
    if site.name == "gather" or jax.default_backend() == "cpu":
        return False
    return _factors.precision(site) is not lax.Precision.HIGHEST
