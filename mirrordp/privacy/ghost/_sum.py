"""The clipped sum of a microbatch: backward pass, norms, clip factors and weighted sums."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrordp.privacy import clipping, sums
from mirrordp.privacy._float64 import float64_call
from mirrordp.privacy.clipping import ClipStats, Summed, with_key
from mirrordp.privacy.ghost import _factors, _short, _tracing
from mirrordp.privacy.ghost._factors import Factors
from mirrordp.privacy.ghost._layers import OuterProducts
from mirrordp.privacy.ghost._plan import Plan, TurnedUse, Use, sum_roundoff
from mirrordp.privacy.ghost._short import Short
from mirrordp.privacy.ghost._sides import OneHot, Vectors
from mirrordp.privacy.ghost._tracing import Probes, Program
from mirrordp.privacy.trainable import Trainable
from mirrordp.privacy.turns import Turn, of_vectors
from mirrordp.types import LossFn, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Split:
    """A loss function over flat lists: trainable leaves, constants, and a batch's rows.

    The plan is one for microbatches of `microbatch_size` rows. `turns` are the coordinates of the
    trainable leaves in which gradients are clipped, if they are others than the leaves' own.
    """

    program: Program
    plan: Plan
    leaves: list[jax.Array]
    constants: list[jax.Array]
    rows: list[jax.Array]
    treedef: Any
    microbatch_size: int
    turns: Sequence[Turn] | None = None

    @staticmethod
    def of(
        loss_fn: LossFn,
        params: Params,
        batch: PyTree,
        trainable: Trainable,
        microbatch_size: int,
        turns: Sequence[Turn] | None = None,
    ) -> "Split":
        """Traces a loss function and chooses the path of every trainable leaf.

        Args:
            loss_fn: as in `clipped_grad`.
            params: all parameters.
            batch: a batch and the keys of its examples (or None).
            trainable: which parameters are trained.
            microbatch_size: the number of rows that are taken at a time.
            turns: as in `clipped_grad`.

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
        plan = Plan.of(program, microbatch_size, turns=turns)
        return Split(program, plan, leaves, constants, rows, treedef, microbatch_size, turns)

    def forward(self, rows: Sequence[jax.Array], probes: Sequence[Probes]):
        """Returns the loss of one example with probes added; see `Program.forward`."""
        return self.program.forward(self.leaves, self.constants, rows, probes, self.plan.forms())

    def in_microbatches_of(self, size: int) -> "Split":
        """Returns the same loss with a plan for microbatches of another size."""
        plan = Plan.of(self.program, size, turns=self.turns)
        return dataclasses.replace(self, plan=plan, microbatch_size=size)


def clipped_sum(
    split: Split,
    rows: list[jax.Array],
    is_padding: jax.Array,
    l2_clip_norm: float,
    *,
    groups: Sequence[int] | None = None,
    automatic: bool = False,
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
    losses, captured, probed = _backward(split, rows, batch_size)
    parts = {
        n: layer.factors(*_computed_once(captured[n], probed[n].results[0]))
        for n, layer in enumerate(plan.layers)
        if isinstance(layer, OuterProducts) and probed[n].results
    }

    def at_operands(number: int) -> Sequence[jax.Array | Short]:
        """Per-example gradients of a site's PARAM operands."""
        if number not in parts:
            return probed[number].operands
        layer = plan.layers[number]
        assert isinstance(layer, OuterProducts)
        if number in plan.short:
            return [layer.short_product(parts[number])]
        return [layer.weight_gradient(layer.product(parts[number]))]

    products = {
        leaf: _with_bits_of_sites(plan, leaf, at_operands(use.number)[0])
        for leaf, use in plan.product.items()
    }
    explicit = _explicit_gradients(split, at_operands) if plan.explicit else {}
    turned = {
        leaf: _turned_factors(split, leaf, of, parts[of.use.number])
        for leaf, of in plan.turned.items()
    }
    for leaf, (part, turn) in turned.items():
        if plan.turned[leaf].formed:
            explicit[leaf] = _turned_gradient(split, leaf, part, turn)
    # The norm is that of the very numbers that are summed: nothing is computed twice.
    products, explicit = lax.optimization_barrier((products, explicit))

    looked_up = {
        leaf: _factors.lookups_together([parts[use.number] for use in uses])
        for leaf, uses in plan.lookups.items()
    }
    norms_squared = {leaf: _squared_norm(gradient) for leaf, gradient in explicit.items()}
    taken = {}
    for leaf, gradient in products.items():
        squared = _squared_norm(gradient)
        if (part := looked_up.get(leaf)) is not None:
            met = _rows_met(plan.product[leaf], gradient, part)
            squared, underflow = _factors.with_lookups(
                squared,
                met,
                part,
                unit=_unit(gradient, part),
                entries=split.leaves[leaf].size,
                exponent=exponent,
            )
            taken[leaf] = underflow
        norms_squared[leaf] = squared
    unformed = {leaf: of for leaf, of in turned.items() if not plan.turned[leaf].formed}
    roundoffs = {
        leaf: sum_roundoff([use.layer for use in uses], batch_size)
        for leaf, uses in plan.gram.items()
    }
    for leaf, (part, turn) in unformed.items():
        roundoffs[leaf] = sum_roundoff([plan.turned[leaf].use.layer], batch_size)
        norms_squared[leaf], taken[leaf] = _factors.scaled_norm(
            part, turn.scale, roundoff=roundoffs[leaf], exponent=exponent
        )
    for leaf, shared in plan.gram.items():
        oriented = [parts[n].swapped() if swapped else parts[n] for n, _, swapped in shared]
        norms_squared[leaf], taken[leaf] = _factors.gram(
            oriented, roundoff=roundoffs[leaf], exponent=exponent
        )
    dtype = jnp.result_type(jnp.float32, *(jnp.finfo(leaf.dtype).dtype for leaf in split.leaves))
    numbers = clipping.checked_groups(groups, len(split.leaves))

    def of_groups(values: dict[int, jax.Array]) -> list[list[jax.Array]]:
        found = clipping.by_group(numbers, [values.get(leaf) for leaf in range(len(numbers))])
        return [[value for value in of if value is not None] for of in found]

    # The disturbance of all weights is at least that of one group's, as a share of its limit.
    factors, norms = clipping.group_factors(
        of_groups(norms_squared),
        is_padding,
        l2_clip_norm,
        dtype,
        reserve=sums.RESERVE + _factors.disturbance(roundoffs.values()),
        taken=of_groups(taken),
        automatic=automatic,
    )

    for leaf, shared in plan.gram.items():
        for n, layer, _ in shared:
            halves = layer.weighted_sum(
                parts[n], factors[numbers[leaf]], block=roundoffs[leaf].block, exponent=exponent
            )
            high, low = map(layer.weight_gradient, halves)
            found[leaf] = sums.added(found[leaf], _in_leaf_layout(split, layer, (high, low)))
    for leaf, (part, turn) in unformed.items():
        halves = _factors.block_sum(
            part,
            factors[numbers[leaf]],
            precision=plan.turned[leaf].use.layer.precision,
            block=roundoffs[leaf].block,
            exponent=exponent,
            scale=turn.scale,
        )
        high, low = (half.reshape(split.leaves[leaf].shape) for half in halves)
        found[leaf] = high, low
    for leaf, gradient in (products | explicit).items():
        halves = sums.halves(_scaled(gradient, factors[numbers[leaf]]), exponent)
        # One after the other: the compiler would make a few slow programs of all sums together.
        halves, factors = lax.optimization_barrier((halves, factors))
        use = plan.product.get(leaf)
        found[leaf] = halves if use is None else _in_leaf_layout(split, use.layer, halves)
        if (part := looked_up.get(leaf)) is not None:
            count = split.leaves[leaf].shape[0]
            high, low = _factors.scattered_sum(
                part, factors[numbers[leaf]], rows=count, exponent=exponent
            )
            found[leaf] = sums.added(found[leaf], (high[0], low[0]))
    return summed(losses, norms)


def _backward(split: Split, rows: list[jax.Array], batch_size: int):
    """Returns losses, captured operands and gradients of all probes, example by example.

    The probes are made inside the map over examples. Given from outside they would force their
    batch axis on the layers' outputs, and a scan's outputs (time first) would be transposed.
    """

    def one_example(rows):
        probes = probes_of(split)
        forward = functools.partial(split.forward, rows)
        loss, pull, captured = jax.vjp(forward, probes, has_aux=True)
        (gradients,) = pull(jnp.ones_like(loss))
        return loss, captured, gradients

    return jax.vmap(one_example, axis_size=batch_size)(rows)


def probes_of(split: Split) -> list[Probes]:
    """Returns the zeros that are added at each site, for one example."""

    def zeros(shapes: Any) -> Any:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    return [
        Probes(results=zeros(site.result_shapes()))
        if split.plan.results_probed(number)
        else Probes(operands=zeros(split.plan.gradient_shapes(number)))
        for number, site in enumerate(split.program.sites)
    ]


def _computed_once(captured: Sequence[jax.Array], cotangent: jax.Array):
    """Keeps the compiler from computing a layer's input or cotangent again for each reader.

    Computed again, in another program, a difference of large numbers may be rounded differently,
    and then the norm would be that of other numbers than those that are summed. For convolutions,
    patches would also be made in the forward pass, and be kept until the cotangents are known.
    """
    return lax.optimization_barrier((captured, cotangent))


def _squared_norm(gradient: jax.Array | Short) -> jax.Array:
    if isinstance(gradient, Short):
        return _short.squared_norm(gradient)
    return clipping.squared_norm(gradient)


def _scaled(gradient: jax.Array | Short, factors: jax.Array) -> jax.Array:
    if isinstance(gradient, Short):
        return _short.scaled(gradient, factors)
    return clipping.scaled(gradient, factors)


def _turned_factors(split: Split, leaf: int, of: TurnedUse, part: Factors) -> tuple[Factors, Turn]:
    """Returns turned factors along a leaf's rows and columns, and how their gradient is turned."""
    assert split.turns is not None
    turn = split.turns[leaf]
    left, right = part.swapped() if of.use.swapped else part
    assert not isinstance(left, OneHot)
    assert isinstance(right, Vectors)
    if of.left or not of.formed:
        left = Vectors(jnp.concatenate(left.pieces(lambda piece: piece), axis=-1))
    if of.left:
        assert turn.left is not None
        left, turn = Vectors(of_vectors(left.array, turn.left)), turn._replace(left=None)
    if of.right:
        assert turn.right is not None
        right, turn = Vectors(of_vectors(right.values, turn.right)), turn._replace(right=None)
    dtype = jnp.result_type(jnp.float32, left.array, right.values)
    turn = turn._replace(scale=turn.scale.astype(dtype))
    # The norm is that of the very numbers that are summed: nothing is computed twice.
    return lax.optimization_barrier((Factors(left, right), turn))


def _turned_gradient(split: Split, leaf: int, part: Factors, turn: Turn) -> jax.Array | Short:
    """Returns turned gradients [B, *leaf.shape], formed of turned factors."""
    number, layer, _ = split.plan.turned[leaf].use
    short = number in split.plan.short
    formed = _floats(_short.product(part)) if short else layer.product(part)
    gradient = turn.of_gradients(formed.reshape(-1, *split.leaves[leaf].shape))
    return _short.rounded(gradient) if short else gradient


def _explicit_gradients(
    split: Split, at_operands: Callable[[int], Sequence[jax.Array | Short]]
) -> dict[int, jax.Array | Short]:
    """Returns per-example gradients [B, *leaf.shape] of the leaves that have no better path."""
    program, plan = split.program, split.plan
    used = [
        number
        for number, layer in enumerate(plan.layers)
        if not layer.site.leaves.isdisjoint(plan.explicit)
    ]

    def operands(chosen):
        leaves = list(split.leaves)
        for leaf, value in zip(plan.explicit, chosen, strict=True):
            leaves[leaf] = value
        everything = program.operands(leaves, split.constants)
        return [everything[number] for number in used]

    values, pull = jax.vjp(operands, [split.leaves[leaf] for leaf in plan.explicit])
    gradients = [
        [
            _floats(found).astype(value.dtype)
            for found, value in zip(at_operands(n), of, strict=True)
        ]
        for n, of in zip(used, values, strict=True)
    ]
    found = dict(zip(plan.explicit, jax.vmap(pull)(gradients)[0], strict=True))
    if split.turns is not None:
        found = {leaf: split.turns[leaf].of_gradients(array) for leaf, array in found.items()}
    return {leaf: _with_bits_of_sites(plan, leaf, gradient) for leaf, gradient in found.items()}


def _with_bits_of_sites(plan: Plan, leaf: int, gradient: jax.Array | Short) -> jax.Array | Short:
    """Returns a leaf's gradients with no more bits than ordinary training gives those of its sites.

    They take half the time to read where these have 16 bits.
    """
    if isinstance(gradient, Short) or gradient.ndim <= 2:
        return gradient
    return _short.rounded(gradient) if plan.is_short(leaf) or plan.is_bfloat16(leaf) else gradient


def _unit(gradient: jax.Array | Short, part: Factors) -> float:
    """Returns the unit roundoff in which a formed gradient, or lookups, are scaled."""
    arrays = [gradient.exponent if isinstance(gradient, Short) else gradient, part.right.values]  # pyright: ignore
    return max(float(jnp.finfo(sums.float32_or_wider(array)).eps) / 2 for array in arrays)


def _rows_met(use: Use, gradient: jax.Array | Short, part: Factors) -> jax.Array:
    """Returns the rows of a table's formed gradients that lookups refer to, float64, [B, T, N]."""
    view = use.layer.site.views[0]
    assert view is not None
    assert view.axes is not None
    place = view.axes.index(0)

    def rows(ones: jax.Array, gradient: jax.Array | Short) -> jax.Array:
        index = jnp.maximum(ones[0], 0)
        if isinstance(gradient, Short):
            gradient = gradient._replace(values=jnp.take(gradient.values, index, axis=place))
        else:
            gradient = jnp.take(gradient, index, axis=place)
        return jnp.moveaxis(_short.wide(gradient), place, 0)

    assert isinstance(part.left, OneHot)
    return float64_call(jax.vmap(rows), part.left.ones, gradient)


def _floats(gradient: jax.Array | Short) -> jax.Array:
    return gradient.floats() if isinstance(gradient, Short) else gradient


def _in_leaf_layout(split: Split, layer: OuterProducts, halves: sums.Halves) -> sums.Halves:
    """Returns a sum in the layout of the leaf of a layer's weight.

    The sum is rearranged only: where the model casts a weight to fewer bits, a transposed cast
    would round the sum, and a contribution could exceed the clip norm.
    """
    view = layer.site.views[0]
    assert view is not None
    shape = split.leaves[view.leaf].shape
    high, low = (view.restored(half, shape) for half in halves)
    return high, low
