"""Per-example gradients of a weight as sums of outer products, and their norms.

At a dot product, a convolution or an embedding lookup, example i's gradient of the weight is

    G_i = Σ_t L_t ⊗ R_t,        t over positions (and loop iterations),

with L the layer's input (patches of it; one-hot rows of a lookup) and R the cotangent of its
output. Two ways lead to ‖G_i‖², and the cheaper one is taken:

    explicit    form G_i, sum its squares                 T·K·N operations, K·N numbers
    gram        Σ_{t,s} ⟨L_t, L_s⟩ ⟨R_t, R_s⟩             T²·(K+N) operations, 2·T² numbers

Gram sums cancel, so norms are accumulated in float64, and `spread` S = Σ_t ‖L_t‖·‖R_t‖ comes with
each: whatever computes Σ_t L_t ⊗ R_t in lower precision errs by at most (unit roundoff)·S, which
is added to the norm before clipping.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrordp.ghost._tracing import Site

Array = jax.Array


class Side(NamedTuple):
    """One side of the outer products: rows [B, G, T, K], or row numbers of one-hot rows [B, 1, T].

    Attributes:
        rows: the vectors, or None for one-hot rows.
        ones: for one-hot rows, where the one is; -1 for a row of zeros.
    """

    rows: Array | None
    ones: Array | None = None


class Factors(NamedTuple):
    """G_i of one site: left ⊗ right summed over positions, for each of G groups of the weight."""

    left: Side
    right: Side

    def swapped(self) -> "Factors":
        """The factors of the transposed weight."""
        return Factors(self.right, self.left)


class Axes(NamedTuple):
    """Which axes of the weight each side spans, in order, and which ones are groups."""

    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


class Sizes(NamedTuple):
    """What a site's gradient costs, per example: T positions, K and N entries, G groups."""

    positions: int
    left: int
    right: int
    groups: int


def is_factored(site: Site) -> bool:
    """Whether a site's gradient is a sum of outer products that `factors` can form."""
    if len(site.param_positions) != 1:
        return False
    match site.name:
        case "dot_general":
            return True
        case "conv_general_dilated":
            return site.param_positions == (1,) and site.params["batch_group_count"] == 1
        case "gather":
            return site.param_positions == (0,) and _is_row_lookup(site)
        case _:
            return False


def _is_row_lookup(site: Site) -> bool:
    """A gather of whole rows along the first axis, which is what embeddings do."""
    numbers = site.params["dimension_numbers"]
    (weight,) = site.param_shapes
    (out,) = site.out_shapes
    rank = len(weight.shape)
    trailing = tuple(range(len(out.shape) - (rank - 1), len(out.shape)))
    return (
        rank >= 1
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == trailing
        and tuple(site.params["slice_sizes"]) == (1, *weight.shape[1:])
    )


def sizes(site: Site) -> Sizes:
    """The sizes of a factored site, from shapes alone."""
    (weight,) = site.param_shapes
    (out,) = site.out_shapes
    loops = math.prod(site.loops)
    total = math.prod(out.shape)
    match site.name:
        case "dot_general":
            groups, left, right = (math.prod(weight.shape[i] for i in part) for part in axes(site))
            return Sizes(loops * total // max(groups * right, 1), left, right, groups)
        case "conv_general_dilated":
            groups = site.params["feature_group_count"]
            outputs = weight.shape[site.params["dimension_numbers"].rhs_spec[0]]
            left = math.prod(weight.shape) // outputs
            return Sizes(loops * total // outputs, left, outputs // groups, groups)
        case "gather":
            right = math.prod(weight.shape[1:])
            return Sizes(loops * total // max(right, 1), weight.shape[0], right, 1)
    raise AssertionError(site.name)


def axes(site: Site) -> Axes:
    """How the factors of a site lie in its weight."""
    (weight,) = site.param_shapes
    everything = range(len(weight.shape))
    match site.name:
        case "dot_general":
            (contract, batch), side = site.params["dimension_numbers"], site.param_positions[0]
            contract, batch = tuple(contract[side]), tuple(batch[side])
            return Axes(batch, contract, tuple(i for i in everything if i not in contract + batch))
        case "conv_general_dilated":
            out, inputs, *window = site.params["dimension_numbers"].rhs_spec
            grouped = site.params["feature_group_count"] > 1
            return Axes((out,) if grouped else (), (*window, inputs), (out,))
        case "gather":
            return Axes((), (0,), tuple(everything[1:]))
    raise AssertionError(site.name)


def factors(site: Site, captured: Sequence[Array], cotangent: Array) -> Factors:
    """The factors of a factored site, for all examples.

    Args:
        site: the site.
        captured: its BATCH operand, [B, *loops, ...].
        cotangent: of its output, [B, *loops, ...].
    """
    match site.name:
        case "dot_general":
            return _dot_factors(site, captured[0], cotangent)
        case "conv_general_dilated":
            return _conv_factors(site, captured[0], cotangent)
        case "gather":
            return _gather_factors(site, captured[0], cotangent)
    raise AssertionError(site.name)


def _dot_factors(site: Site, operand: Array, cotangent: Array) -> Factors:
    side = site.param_positions[0]
    contracts, batches = site.params["dimension_numbers"]
    batch, _, free = axes(site)
    data_contract, data_batch = contracts[1 - side], batches[1 - side]

    first = 1 + len(site.loops)
    data_rank = operand.ndim - first
    data_free = [i for i in range(data_rank) if i not in (*data_contract, *data_batch)]
    left = _arrange(operand, first, data_batch, data_free, data_contract)
    # The output's axes are: batch, free axes of the left operand, free axes of the right one.
    num_batch = len(batch)
    ours = range(num_batch, num_batch + len(free))
    theirs = range(num_batch, num_batch + len(data_free))
    if side == 1:
        ours = [i + len(data_free) for i in ours]
    else:
        theirs = [i + len(free) for i in theirs]
    right = _arrange(cotangent, first, range(num_batch), theirs, ours)
    return Factors(Side(left), Side(right))


def _arrange(array: Array, first: int, groups, positions, entries) -> Array:
    """[B, *loops, ...] as [B, groups, loops and positions, entries]."""
    groups, positions, entries = (
        [first + i for i in part] for part in (groups, positions, entries)
    )
    array = array.transpose([0, *groups, *range(1, first), *positions, *entries])
    shape = array.shape
    num_groups, num_positions = len(groups), first - 1 + len(positions)
    return array.reshape(
        shape[0],
        math.prod(shape[1 : 1 + num_groups]),
        math.prod(shape[1 + num_groups : 1 + num_groups + num_positions]),
        math.prod(shape[1 + num_groups + num_positions :]),
    )


def _conv_factors(site: Site, operand: Array, cotangent: Array) -> Factors:
    (weight,) = site.param_shapes
    params = site.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    window = [weight.shape[i] for i in rhs_spec[2:]]
    groups = params["feature_group_count"]
    batch, first = operand.shape[0], 1 + len(site.loops)

    # Images of all examples, iterations and inner batch rows side by side: [M, spatial..., C].
    images = operand.reshape(-1, *operand.shape[first:])
    images = images.transpose([0, 1 + lhs_spec[0], *(1 + i for i in lhs_spec[2:]), 1 + lhs_spec[1]])
    images = images.reshape(-1, *images.shape[2:])
    deltas = cotangent.reshape(-1, *cotangent.shape[first:])
    deltas = deltas.transpose([0, 1 + out_spec[0], *(1 + i for i in out_spec[2:]), 1 + out_spec[1]])
    deltas = deltas.reshape(-1, *deltas.shape[2:])

    out_spatial = deltas.shape[1:-1]
    patches = _patches(images, window, out_spatial, params)  # [M, out spatial, window, C]
    channels = images.shape[-1] // groups
    per_group = deltas.shape[-1] // groups
    left = patches.reshape(batch, -1, math.prod(window), groups, channels)
    left = left.transpose(0, 3, 1, 2, 4).reshape(batch, groups, -1, math.prod(window) * channels)
    right = deltas.reshape(batch, -1, groups, per_group).transpose(0, 2, 1, 3)
    return Factors(Side(left), Side(right))


def _patches(images: Array, window: Sequence[int], out_spatial: Sequence[int], params) -> Array:
    """[M, spatial..., C] to [M, out spatial..., window, C], as a stack of shifted slices."""
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    low_high = params["padding"]
    zero = jnp.zeros([], images.dtype)
    config = [(0, 0, 0)]
    for (low, high), interior in zip(low_high, params["lhs_dilation"], strict=True):
        config.append((low, high, interior - 1))
    padded = lax.pad(images, zero, [*config, (0, 0, 0)])
    slices = []
    for offset in np.ndindex(*window):
        start = [o * d for o, d in zip(offset, dilation, strict=True)]
        stop = [
            s + (n - 1) * stride + 1
            for s, n, stride in zip(start, out_spatial, strides, strict=True)
        ]
        slices.append(
            lax.slice(
                padded,
                [0, *start, 0],
                [padded.shape[0], *stop, padded.shape[-1]],
                [1, *strides, 1],
            )
        )
    return jnp.stack(slices, axis=-2)


def _gather_factors(site: Site, index: Array, cotangent: Array) -> Factors:
    (weight,) = site.param_shapes
    batch, rows = index.shape[0], weight.shape[0]
    index = index.reshape(batch, 1, -1)
    if site.params["mode"] == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, rows - 1)
    # Lookups outside the table are filled with a constant: their row of the gradient is zero.
    index = jnp.where((index >= 0) & (index < rows), index, -1)
    right = cotangent.reshape(batch, 1, index.shape[-1], math.prod(weight.shape[1:]))
    right = jnp.where(index[..., None] >= 0, right, 0)
    return Factors(Side(None, index), Side(right))


def gram(parts: Sequence[Factors]) -> tuple[Array, Array]:
    """‖Σ_parts G_i‖² and the spread S_i, by Gram matrices; all parts lie in one layout.

    Returns two float64 (where the backend has it) arrays of shape [B].
    """
    with jax.enable_x64(True):
        batch_size = _lengths(parts[0].left).shape[0]
        total = spread = jnp.zeros([batch_size], wide_dtype())
        for number, one in enumerate(parts):
            spread += _spread(one)
            for other in parts[: number + 1]:
                product = _inner(one.left, other.left) * _inner(one.right, other.right)
                total += (1.0 if other is one else 2.0) * product.sum(axis=(1, 2, 3))
        if wide_dtype() == jnp.float32:
            # No float64 here (TPU): the sums' own rounding, at worst, is added to them.
            left, right = (side.rows.shape[-1] if side.rows is not None else 1 for side in parts[0])
            total += (left + right) * 2.0**-24 * spread**2
        return jnp.maximum(total, 0.0), spread


def _inner(one: Side, other: Side) -> Array:
    """Inner products of all rows of one side with all rows of another: [B, G, T, S]."""
    if one.rows is not None and other.rows is not None:
        return _wide_products(one.rows, other.rows)
    if one.ones is not None and other.ones is not None:
        same = one.ones[..., :, None] == other.ones[..., None, :]
        return (same & (one.ones[..., :, None] >= 0)).astype(wide_dtype())
    if one.ones is None:
        return _inner(other, one).swapaxes(-1, -2)
    assert other.rows is not None
    # One-hot rows pick entries: ⟨e_k, x⟩ = x_k, for index [B, 1, T] and rows [B, 1, S, K].
    picked = jnp.take_along_axis(
        other.rows[:, :, None], jnp.maximum(one.ones, 0)[..., :, None, None], axis=-1
    )[..., 0]
    return _wide(jnp.where(one.ones[..., :, None] >= 0, picked, 0))


@jax.custom_batching.custom_vmap
def _wide_products(one: Array, other: Array) -> Array:
    """[b, g, t, k] and [b, g, s, k] to their inner products [b, g, t, s], in float64."""
    with jax.enable_x64(True):
        if one.shape[2] == other.shape[2] == 1:
            # A single position: a fused reduction, where a batch of tiny products would be slow.
            return (_wide(one) * _wide(other)).sum(axis=-1, keepdims=True)
        return jnp.einsum("bgtk,bgsk->bgts", _wide(one), _wide(other))


@_wide_products.def_vmap
def _wide_products_vmap(axis_size, in_batched, one, other):
    # JAX's own rule for a dot product runs later, outside `enable_x64`, and drops to float32.
    one, other = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip((one, other), in_batched, strict=True)
    )
    result = _wide_products(one.reshape(-1, *one.shape[2:]), other.reshape(-1, *other.shape[2:]))
    return result.reshape(axis_size, -1, *result.shape[1:]), True


def _spread(part: Factors) -> Array:
    """sqrt(Σ_groups (Σ_t ‖L_t‖ ‖R_t‖)²)."""
    per_group = (_lengths(part.left) * _lengths(part.right)).sum(axis=-1)
    return jnp.sqrt((per_group**2).sum(axis=-1))


def _lengths(side: Side) -> Array:
    if side.rows is None:
        assert side.ones is not None
        return (side.ones >= 0).astype(wide_dtype())
    return jnp.sqrt((_wide(side.rows) ** 2).sum(axis=-1))


def explicit(site: Site, part: Factors) -> Array:
    """G_i itself, [B, G, K, N], in float32 or wider and at the precision of the site.

    Both the norm and the clipped sum are taken of what this returns, so its rounding does not
    matter for the bound.
    """
    left, right = part.left.rows, part.right.rows
    assert left is not None
    assert right is not None
    return _product("bgtk,bgtn->bgkn", site, left, right)


def weighted_sum(site: Site, part: Factors, weights: Array) -> Array:
    """Σ_i c_i G_i, [G, K, N], without the G_i: one matrix product, or one scatter of rows.

    Rows of weight zero take no part whatever they hold: 0 · NaN is not 0.
    """
    right = scaled(part.right.rows, weights)
    if part.left.rows is not None:
        return _product("bgtk,bgtn->gkn", site, scaled(part.left.rows, weights > 0), right)
    assert part.left.ones is not None
    (weight,) = site.param_shapes
    # A row outside the table is dropped; -1 would count from the end.
    index = jnp.where(part.left.ones >= 0, part.left.ones, weight.shape[0]).reshape(-1)
    table = jnp.zeros((weight.shape[0], right.shape[-1]), right.dtype)
    return table.at[index].add(right.reshape(-1, right.shape[-1]), mode="drop")[None]


def scaled(array: Array | None, weights: Array) -> Array:
    """c_i · array_i in float32 or wider, exactly zero where c_i is zero."""
    assert array is not None
    array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    weights = weights.reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.where(weights > 0, array * weights.astype(array.dtype), jnp.zeros([], array.dtype))


def _product(formula: str, site: Site, left: Array, right: Array) -> Array:
    dtype = jnp.promote_types(left.dtype, jnp.float32)
    precision = site.params.get("precision")
    return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=dtype)


def squared_norm(array: Array) -> Array:
    """Σ of squares over all but the first axis, in float64: no cancellation, no overflow."""
    with jax.enable_x64(True):
        return (_wide(array) ** 2).reshape(array.shape[0], -1).sum(axis=-1)


def weight_gradient(site: Site, gradient: Array) -> Array:
    """[..., G, K, N] in the weight's own layout [..., *weight.shape]."""
    (weight,) = site.param_shapes
    lead, shape = gradient.shape[:-3], weight.shape
    groups, left, right = axes(site)
    order = (*groups, *left, *right)
    if site.name == "conv_general_dilated":
        # The weight's output axis runs over groups and over the outputs of each.
        left_shape = [shape[i] for i in left]
        gradient = gradient.reshape(*lead, gradient.shape[-3], *left_shape, -1)
        gradient = jnp.moveaxis(gradient, len(lead), -2)
        order = (*left, *right)
    gradient = gradient.reshape(*lead, *(shape[i] for i in order))
    return gradient.transpose(*range(len(lead)), *(len(lead) + int(i) for i in np.argsort(order)))


def _wide(array: Array) -> Array:
    return lax.convert_element_type(array, wide_dtype())


def wide_dtype() -> Any:
    """float64, or float32 where the backend has nothing wider."""
    return jnp.float32 if jax.default_backend() == "tpu" else jnp.float64
