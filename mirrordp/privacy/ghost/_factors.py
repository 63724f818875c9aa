"""Per-example gradients of a weight as sums of outer products, and their norms.

At a dot product, a convolution or an embedding lookup, example i's gradient of the weight is

    G_i = Σ_t L_t ⊗ R_t,        t over positions (and loop iterations),

with L the layer's input (patches of it; one-hot rows of a lookup) and R the cotangent of its
output. Two ways lead to ‖G_i‖², and the cheaper one is taken:

    explicit    form G_i, sum its squares                 T·K·N operations, K·N numbers
    gram        Σ_{t,s} ⟨L_t, L_s⟩ ⟨R_t, R_s⟩             T²·(K+N) operations, 2·T² numbers

Gram sums cancel, so norms are accumulated in float64, and `spread` S = Σ_t ‖L_t‖·‖R_t‖ comes with
each: whatever computes Σ_t L_t ⊗ R_t in lower precision errs by at most (T roundoffs)·S, which is
added to the norm before clipping.

The clipped sum Σ_i c_i G_i is a matrix product over positions *and* examples, whose rounding
couples examples. So it is taken in blocks of a few examples, b, and the blocks are added as
integers (`privacy.sums`): an example can disturb the others of its block only. There, with n = b·T
products of unit roundoff u added in any order, the computed P and the exact X differ by at most
n·u·Σ_i c_i S_i. An example is clipped by S_i/κ where that is larger than its norm, so that
c_i S_i ≤ κ C, and for two blocks that differ in one example

    ‖P − P'‖ ≤ (‖c_x G_x‖ + n·u·c_x S_x) + 2 (b − 1) n·u·κ C.

The first part is what x's own norm is clipped by; the second, the *disturbance*, is kept below
`DISTURBANCE`·C by the choice of b and subtracted from C beforehand. A lookup has no such part: its
rows are scattered as integers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrordp.privacy import sums
from mirrordp.privacy._float64 import float64_call, wide_dtype
from mirrordp.privacy.clipping import scaled
from mirrordp.privacy.ghost._tracing import Site

Array = jax.Array

DISTURBANCE = 2.0**-7
"""How far an example may change the rounding of others, over C."""

AT_A_TIME = 2**26
"""Blocks of a sum are formed so many numbers at a time (256 MiB in float32)."""

PIECE = 2**15
"""Patches of a convolution are formed so many numbers per example at a time."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pixels"],
    meta_fields=["window", "out", "strides", "dilation"],
)
@dataclasses.dataclass(frozen=True)
class Images:
    """The input of a convolution, of which the patches are copies.

    Attributes:
        pixels: padded images [B, G, n, spatial..., C], n of them per example.
        window: the size of the kernel, axis by axis.
        out: the positions of the kernel, axis by axis.
        strides: between positions.
        dilation: between the weights of the kernel.
    """

    pixels: Array
    window: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    def seen(self, array: Array, axis: int, offset: int, at: int) -> Array:
        """What the weights at `offset` of an axis of the window see along axis `at` of an array."""
        start = offset * self.dilation[axis]
        stride = self.strides[axis]
        stop = start + (self.out[axis] - 1) * stride + 1
        return lax.slice_in_dim(array, start, stop, stride, axis=at)


class Side(NamedTuple):
    """One side of the outer products, as one of three.

    Attributes:
        vectors: the vectors, [B, G, T, K].
        ones: for one-hot vectors, [B, 1, T]; -1 for a vector of zeros.
        images: for patches of images, the images.
    """

    vectors: Array | None = None
    ones: Array | None = None
    images: Images | None = None


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
    arrays = (*site.param_shapes, *site.out_shapes)
    if 0 in site.loops or not all(
        array.size and jnp.issubdtype(array.dtype, jnp.floating) for array in arrays
    ):
        return False
    match site.name:
        case "dot_general":
            return True
        case "conv_general_dilated":
            return (
                site.param_positions == (1,)
                and len(site.param_shapes[0].shape) > 2
                and site.params["batch_group_count"] == 1
            )
        case "gather":
            is_stacked = any(site.varies[0])
            return site.param_positions == (0,) and not is_stacked and _is_row_lookup(site)
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
    stacks, loops = (math.prod(lengths) for lengths in _loops(site))
    total = math.prod(out.shape)
    match site.name:
        case "dot_general":
            groups, left, right = (math.prod(weight.shape[i] for i in part) for part in axes(site))
            return Sizes(loops * total // max(groups * right, 1), left, right, stacks * groups)
        case "conv_general_dilated":
            groups = site.params["feature_group_count"]
            outputs = weight.shape[site.params["dimension_numbers"].rhs_spec[0]]
            left = math.prod(weight.shape) // outputs
            return Sizes(loops * total // outputs, left, outputs // groups, stacks * groups)
        case "gather":
            right = math.prod(weight.shape[1:])
            return Sizes(loops * total // max(right, 1), weight.shape[0], right, 1)
    raise AssertionError(site.name)


def _loops(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of the loops in which a factored site's weight differs, and of the others."""
    (varies,) = site.varies
    chosen = [[n for n, v in zip(site.loops, varies, strict=True) if v == w] for w in (True, False)]
    return tuple(chosen[0]), tuple(chosen[1])


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

    Iterations of a loop that see one weight are positions; where each sees its own (a loop over
    stacked layers), they are groups.

    Args:
        site: the site.
        captured: its BATCH operand, [B, *loops, ...].
        cotangent: of its output, [B, *loops, ...].
    """
    stacks, loops = _loops(site)
    if not stacks:
        return _factors_of(site, captured[0], cotangent)
    depths = range(len(site.loops))
    order = sorted(depths, key=lambda depth: not site.varies[0][depth])
    batch = captured[0].shape[0]

    def with_stacks_in_batch(array: Array) -> Array:
        array = array.transpose(0, *(1 + i for i in order), *range(1 + len(order), array.ndim))
        return array.reshape(-1, *array.shape[1 + len(stacks) :])

    def with_stacks_in_groups(array: Array) -> Array:
        groups = math.prod(stacks) * array.shape[1]
        return array.reshape(batch, groups, *array.shape[2:])

    inner = dataclasses.replace(site, loops=loops, varies=((False,) * len(loops),))
    found = _factors_of(inner, *(with_stacks_in_batch(array) for array in (captured[0], cotangent)))
    return jax.tree.map(with_stacks_in_groups, found)


def _factors_of(site: Site, operand: Array, cotangent: Array) -> Factors:
    match site.name:
        case "dot_general":
            return _dot_factors(site, operand, cotangent)
        case "conv_general_dilated":
            return _conv_factors(site, operand, cotangent)
        case "gather":
            return _gather_factors(site, operand, cotangent)
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
    # Without the barrier the compiler makes patches of the images as soon as these exist, in the
    # forward pass, and keeps those of all layers until the cotangents come.
    operand, cotangent = lax.optimization_barrier((operand, cotangent))
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

    config = [
        (low, high, interior - 1)
        for (low, high), interior in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    padded = lax.pad(images, jnp.zeros([], images.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    padded = padded.reshape(batch, -1, *padded.shape[1:-1], groups, padded.shape[-1] // groups)
    seen = Images(
        jnp.moveaxis(padded, -2, 1),
        tuple(window),
        deltas.shape[1:-1],
        tuple(params["window_strides"]),
        tuple(params["rhs_dilation"]),
    )
    right = deltas.reshape(batch, -1, groups, deltas.shape[-1] // groups).transpose(0, 2, 1, 3)
    return Factors(Side(images=seen), Side(right))


def _map_pieces(function: Callable[[Array], Array], side: Side) -> list[Array]:
    """`function` of a side's vectors [B, G, T, K], of patches piece by piece along K.

    Patches repeat their images many times over, so one piece is in memory at a time: the barrier
    keeps the compiler from making all of them first.
    """
    if side.images is None:
        assert side.vectors is not None
        return [function(side.vectors)]
    source, cuts = _patches(side.images)
    results = []
    for cut in cuts:
        result = function(cut(source))
        if len(cuts) > 1:
            source, result = lax.optimization_barrier((source, result))
        results.append(result)
    return results


def _patches(images: Images) -> tuple[Array, list[Callable[[Array], Array]]]:
    """What the weights of the window see, weight by weight: an array, and how pieces come of it.

    Stacking all shifts of the images at once is slow on a GPU when they are many (each entry of the
    result searches for its operand), so the axes of the window are stacked one after the other,
    last axis first. Only where a row of the window is too large a piece its shifts are taken one by
    one.
    """
    pixels, window = images.pixels, images.window
    rank, channels = len(window), pixels.shape[-1]
    shift = max(1, math.prod((*pixels.shape[1:3], *images.out, channels)))
    rows = PIECE // (shift * math.prod(window[1:]))
    positions = pixels.shape[2] * math.prod(images.out)

    def stacked(parts: list[Array]) -> Array:
        return jnp.stack(parts, axis=3 + rank)

    def flat(part: Array) -> Array:
        """[B, G, n, out..., shifts..., C] as [B, G, T, K]."""
        return part.reshape(*pixels.shape[:2], positions, -1)

    def shifts(offsets: Sequence[tuple[int, ...]], source: Array) -> Array:
        seen = []
        for offset in offsets:
            part = source
            for axis, i in enumerate(offset):
                part = images.seen(part, axis, i, at=3 + axis)
            seen.append(part)
        return flat(stacked(seen))

    def some_rows(offsets: Sequence[int], source: Array) -> Array:
        return flat(stacked([images.seen(source, 0, i, at=3) for i in offsets]))

    if not rows:
        offsets = list(np.ndindex(*window))
        cuts = [functools.partial(shifts, some) for some in _chunks(offsets, PIECE // shift)]
        return pixels, cuts
    source = pixels
    for axis in reversed(range(1, rank)):
        source = stacked([images.seen(source, axis, i, at=3 + axis) for i in range(window[axis])])
        # Without the barrier the compiler would merge the stages into one.
        source = lax.optimization_barrier(source)
    cuts = [functools.partial(some_rows, some) for some in _chunks(range(window[0]), rows)]
    return source, cuts


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    size = max(1, size)
    return [items[start : start + size] for start in range(0, len(items), size)]


def _gather_factors(site: Site, index: Array, cotangent: Array) -> Factors:
    (weight,) = site.param_shapes
    batch, rows = index.shape[0], weight.shape[0]
    index = _signed(index).reshape(batch, 1, -1)
    if site.params["mode"] == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, rows - 1)
    # Lookups outside the table are filled with a constant: their row of the gradient is zero.
    index = jnp.where((index >= 0) & (index < rows), index, -1)
    right = cotangent.reshape(batch, 1, index.shape[-1], math.prod(weight.shape[1:]))
    right = jnp.where(index[..., None] >= 0, right, 0)
    return Factors(Side(ones=index), Side(right))


def _signed(index: Array) -> Array:
    """Indices in a type that holds -1 and the number of rows of any table."""
    if index.dtype in (jnp.int32, jnp.int64):
        return index
    largest = min(jnp.iinfo(index.dtype).max, jnp.iinfo(jnp.int32).max)
    return jnp.minimum(index, jnp.asarray(largest, index.dtype)).astype(jnp.int32)


class Roundoff(NamedTuple):
    """What the rounding of the clipped sum asks of a norm, in units of the spread S_i.

    Attributes:
        own: of the example's own contribution; added to its norm.
        spread: 1/κ, the least norm that S_i may go with; for the sake of the other examples.
        block: b, the examples of a block.
        disturbance: 2 (b − 1) n·u·κ.
    """

    own: float
    spread: float
    block: int
    disturbance: float


def roundoff(positions: int, batch_size: int, unit: float, shortened: float) -> Roundoff:
    """The largest block whose disturbance is small enough, and what goes with it.

    κ = 3√T, at least 16: positions without a common direction have a spread of √T times their norm.
    An example whose spread is more than κ times its norm may be clipped although its norm is
    below C. A single position has κ = 1.

    Args:
        positions: T, of all uses of a weight together.
        batch_size: examples there are.
        unit: u, a bound on the relative error of one addition.
        shortened: relative error of products of shortened inputs.
    """
    spread = 1.0 if positions == 1 else 1 / max(16, 3 * math.sqrt(positions))

    def relative(block: int) -> float:
        """n·u to all orders, of sums of products of rounded factors."""
        first_order = (block * positions + 3) * unit
        return first_order / (1 - first_order) if first_order < 0.5 else math.inf

    def disturbance(block: int) -> float:
        return 2 * (block - 1) * relative(block) / spread if block > 1 else 0.0

    block = 1
    while block < batch_size and disturbance(block + 1) <= DISTURBANCE:
        block += 1
    return Roundoff(relative(block) + shortened, spread, block, disturbance(block))


def disturbance(roundoffs: Iterable[Roundoff]) -> float:
    """Of all weights together, over C.

    Σ_w (c_i S_i / κ)² ≤ C² over the weights w of an example i, so weights with the same blocks
    together have the largest of their disturbances; those of other blocks may have other examples
    in them, and count beside it.
    """
    by_block: dict[int, float] = {}
    for one in roundoffs:
        by_block[one.block] = max(one.disturbance, by_block.get(one.block, 0.0))
    return math.hypot(*by_block.values())


def gram(parts: Sequence[Factors], *, roundoff: Roundoff, exponent: int) -> tuple[Array, Array]:
    """max(‖Σ_parts G_i‖ + own · S_i, S_i / κ)² by Gram matrices, in float64; a bound on underflow.

    Both have shape [B]. The second bounds what `weighted_sum` can add to a contribution because
    numbers below the smallest normal one are rounded, or not kept at all, and because the rows of a
    lookup are truncated to grains one by one.

    Args:
        parts: factors that lie in one layout.
        roundoff: of whatever will sum the G_i.
        exponent: log₂ of the grain.
    """
    return float64_call(
        functools.partial(_gram, roundoff=roundoff, grain=2.0**exponent), tuple(parts)
    )


def _gram(parts: Sequence[Factors], roundoff: Roundoff, grain: float) -> tuple[Array, Array]:
    spread = functools.reduce(jnp.add, [_spread(part) for part in parts])
    total = jnp.zeros_like(spread)
    for number, one in enumerate(parts):
        for other in parts[: number + 1]:
            product = _inner(one.left, other.left) * _inner(one.right, other.right)
            total += (1.0 if other is one else 2.0) * product.sum(axis=(1, 2, 3))
    total += _gram_roundoff(parts) * spread**2
    # Written so that a NaN stays one, which `maximum` would not promise.
    norm = jnp.sqrt(jnp.where(total < 0, 0.0, total))
    underflow = functools.reduce(jnp.add, [_underflow(part) for part in parts])
    underflow += grain * sum(map(_truncations, parts))
    norm, least = norm + roundoff.own * spread, roundoff.spread * spread
    return jnp.where(norm < least, least, norm) ** 2, underflow


def _gram_roundoff(parts: Sequence[Factors]) -> float:
    """The rounding of the Gram sums themselves: of inner products at worst, and of adding them."""
    terms = sum(_entries(side) for side in parts[0]) + sum(_positions(part) for part in parts)
    return terms * float(jnp.finfo(wide_dtype()).eps) / 2


def _underflow(part: Factors) -> Array:
    """ε (√N Σ_t ‖L_t‖ + √K Σ_t ‖R_t‖ + T √(K N)), with ε the smallest normal number of the sum.

    An error of ε in each entry of c·R, of L, and of their products. ε is at least 2⁻⁵¹⁰: entries
    below that have squares which float64 rounds to zero, so that no norm shows them.
    """
    left, right = (math.sqrt(_entries(side)) for side in part)
    inputs = right * _lengths(part.left) + left * _lengths(part.right) + left * right
    vectors = part.left.vectors if part.right.vectors is None else part.right.vectors
    assert vectors is not None
    smallest = float(jnp.finfo(jnp.promote_types(vectors.dtype, jnp.float32)).tiny)
    return max(smallest, 2.0**-510) * inputs.sum(axis=(1, 2))


def _truncations(part: Factors) -> float:
    """T·√N for a lookup, whose rows are truncated one by one; a bound in grains."""
    sides = [side for side in part if side.ones is None]
    if len(sides) == len(part):
        return 0.0
    return _positions(part) * math.sqrt(_entries(sides[0]))


def _inner(one: Side, other: Side) -> Array:
    """Inner products of all vectors of one side with all of another: [B, G, T, S]."""
    if one.ones is None and other.ones is None:
        if one.images and other.images and _prefers_pixels(one.images, other.images):
            return _pixel_products(one.images, other.images)
        ours, theirs = (jnp.concatenate(_map_pieces(_wide, side), axis=-1) for side in (one, other))
        return _products(ours, theirs)
    if one.ones is not None and other.ones is not None:
        same = one.ones[..., :, None] == other.ones[..., None, :]
        return (same & (one.ones[..., :, None] >= 0)).astype(wide_dtype())
    if one.ones is None:
        return _inner(other, one).swapaxes(-1, -2)
    # One-hot vectors pick entries: ⟨e_k, x⟩ = x_k, for ones [B, 1, T] and vectors [B, 1, S, K].
    assert other.vectors is not None
    picked = jnp.take_along_axis(
        other.vectors[:, :, None], jnp.maximum(one.ones, 0)[..., :, None, None], axis=-1
    )[..., 0]
    return _wide(jnp.where(one.ones[..., :, None] >= 0, picked, 0))


def _prefers_pixels(one: Images, other: Images) -> bool:
    """Whether inner products of all pixels are at most half the work of those of all patches."""
    pixels = math.prod(one.pixels.shape[2:-1]) * math.prod(other.pixels.shape[2:-1])
    patches = (
        math.prod(one.out) * math.prod(other.out) * one.pixels.shape[2] * other.pixels.shape[2]
    )
    return 2 * pixels <= patches * math.prod(one.window)


def _pixel_products(one: Images, other: Images) -> Array:
    """Inner products of all patches of one side with all of another, [B, G, T, S], from pixels.

    ⟨patch_t, patch_s⟩ = Σ_δ ⟨x_{t+δ}, y_{s+δ}⟩: inner products of pixels, summed over the window,
    one axis of it at a time.
    """
    x, y = one.pixels, other.pixels
    rank = len(one.window)
    flat = lambda array: _wide(array.reshape(*array.shape[:2], -1, array.shape[-1]))  # noqa: E731
    products = jnp.einsum("bgpc,bgqc->bgpq", flat(x), flat(y), precision="highest")
    products = products.reshape(*x.shape[:-1], *y.shape[2:-1])
    for axis in reversed(range(rank)):
        # Axes: B, G, n, spatial..., m, spatial...
        terms = [
            other.seen(one.seen(products, axis, i, at=3 + axis), axis, i, at=4 + rank + axis)
            for i in range(one.window[axis])
        ]
        products = functools.reduce(jnp.add, terms)
    return products.reshape(*x.shape[:2], x.shape[2] * math.prod(one.out), -1)


def _products(one: Array, other: Array) -> Array:
    """[b, g, t, k] and [b, g, s, k] to their inner products [b, g, t, s]."""
    if one.shape[2] == other.shape[2] == 1:
        # A single position: a fused reduction, where a batch of tiny products would be slow.
        return (_wide(one) * _wide(other)).sum(axis=-1, keepdims=True)
    # Unless told otherwise, `jax.default_matmul_precision` may shorten even float64.
    return jnp.einsum("bgtk,bgsk->bgts", _wide(one), _wide(other), precision="highest")


def _spread(part: Factors) -> Array:
    """sqrt(Σ_groups (Σ_t ‖L_t‖ ‖R_t‖)²)."""
    per_group = (_lengths(part.left) * _lengths(part.right)).sum(axis=-1)
    return jnp.sqrt((per_group**2).sum(axis=-1))


def _lengths(side: Side) -> Array:
    if side.ones is not None:
        return (side.ones >= 0).astype(wide_dtype())
    if side.images is not None:
        return jnp.sqrt(_patch_squares(side.images))
    assert side.vectors is not None
    return jnp.sqrt((_wide(side.vectors) ** 2).sum(axis=-1))


def _patch_squares(images: Images) -> Array:
    """Squared lengths of all patches, [B, G, T]: those of the pixels, summed over the window."""
    squares = (_wide(images.pixels) ** 2).sum(axis=-1)
    for axis in reversed(range(len(images.window))):
        terms = [images.seen(squares, axis, i, at=3 + axis) for i in range(images.window[axis])]
        squares = functools.reduce(jnp.add, terms)
    return squares.reshape(*squares.shape[:2], -1)


def _entries(side: Side) -> int:
    if side.images is not None:
        return math.prod(side.images.window) * side.images.pixels.shape[-1]
    return 1 if side.vectors is None else side.vectors.shape[-1]


def _positions(part: Factors) -> int:
    side = part.left if part.right.vectors is None else part.right
    assert side.vectors is not None
    return side.vectors.shape[2]


def explicit(site: Site, part: Factors) -> Array:
    """G_i itself, [B, G, K, N], in float32 or wider and at the precision of the site.

    Both the norm and the clipped sum are taken of what this returns, so its rounding does not
    matter for the bound.
    """
    right = part.right.vectors
    assert right is not None
    products = _map_pieces(lambda left: _product("bgtk,bgtn->bgkn", site, left, right), part.left)
    return jnp.concatenate(products, axis=-2)


def weighted_sum(
    site: Site, part: Factors, weights: Array, *, block: int, exponent: int
) -> tuple[Array, Array]:
    """Σ_i c_i G_i, [G, K, N], without the G_i, as halves of integers (see `mirrordp.privacy.sums`).

    Rows of weight zero take no part whatever they hold: 0 · NaN is not 0.

    Args:
        site: the site.
        part: its factors.
        weights: c_i.
        block: examples whose products are added in floating point.
        exponent: log₂ of the grain.
    """
    assert part.right.vectors is not None
    right = scaled(part.right.vectors, weights)
    if part.left.ones is not None:
        return _scattered(site, part.left.ones, right, exponent)
    right = _in_blocks(right, block)

    def product(left: Array) -> Array:
        return _block_sums(site, _in_blocks(scaled(left, weights > 0), block), right, exponent)

    # Both halves side by side, so that pieces are what `_map_pieces` expects: one array each.
    pieces = _map_pieces(product, part.left)
    high, low = jnp.concatenate(pieces, axis=-2)
    return high, lax.bitcast_convert_type(low, jnp.uint32)


def _in_blocks(array: Array, block: int) -> Array:
    """[B, ...] as [blocks, block, ...], with rows of zeros at the end."""
    extra = -array.shape[0] % block
    if extra:
        array = jnp.pad(array, ((0, extra), *((0, 0),) * (array.ndim - 1)))
    return array.reshape(-1, block, *array.shape[1:])


def _block_sums(site: Site, left: Array, right: Array, exponent: int) -> Array:
    """Both halves, [2, G, K, N] in int32, of the sum of all blocks, a few blocks at a time."""

    def some(left: Array, right: Array) -> tuple[Array, Array]:
        return sums.halves(_product("mbgtk,mbgtn->mgkn", site, left, right), exponent)

    blocks, _, groups, _, entries = left.shape
    numbers = groups * entries * right.shape[-1]
    at_a_time = max(1, AT_A_TIME // numbers)
    if blocks <= at_a_time:
        high, low = some(left, right)
    else:
        left, right = (_in_blocks(array, at_a_time) for array in (left, right))
        add = lambda total, rows: (sums.added(total, some(*rows)), None)  # noqa: E731
        zero = sums.nothing((groups, entries, right.shape[-1]))
        (high, low), _ = lax.scan(add, zero, (left, right))
    return jnp.stack([high, lax.bitcast_convert_type(low, jnp.int32)])


def _scattered(site: Site, ones: Array, right: Array, exponent: int) -> tuple[Array, Array]:
    """One scatter of rows, as integers: in any order they add up to the same."""
    (weight,) = site.param_shapes
    rows, width = weight.shape[0], right.shape[-1]

    def scatter(ones, right):
        # A row outside the table is dropped; -1 would count from the end.
        index = jnp.where(ones >= 0, ones, rows).reshape(-1)
        table = jnp.zeros((rows, width), jnp.int64)
        grains = sums.grains(right.reshape(-1, width), exponent)
        return sums.split(table.at[index].add(grains, mode="drop")[None])

    return float64_call(scatter, ones, right)


def _product(formula: str, site: Site, left: Array, right: Array) -> Array:
    dtype = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    return jnp.einsum(formula, left, right, precision=precision(site), preferred_element_type=dtype)


def precision(site: Site) -> lax.Precision:
    """That of the site, for sums of its weight's gradient too; algorithms become the highest."""
    chosen = site.params.get("precision")
    chosen = chosen[0] if isinstance(chosen, tuple) else chosen
    if chosen is None:
        return lax.Precision.DEFAULT
    return chosen if isinstance(chosen, lax.Precision) else lax.Precision.HIGHEST


def weight_gradient(site: Site, gradient: Array) -> Array:
    """[..., G, K, N] in the weight's own layout [..., *stacks, *weight.shape]."""
    (weight,) = site.param_shapes
    stacks, _ = _loops(site)
    gradient = gradient.reshape(*gradient.shape[:-3], *stacks, -1, *gradient.shape[-2:])
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
