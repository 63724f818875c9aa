"""Per-example gradients of a weight as sums of outer products: their norms and clipped sums.

At a matrix product, a convolution or an embedding lookup, example i's gradient of the weight is

    G_i = Σ_t L_t ⊗ R_t,        t over positions (and loop iterations),

with L the layer's input (patches of it; one-hot rows of a lookup) and R the cotangent of its
output. There are two ways to ‖G_i‖², and the cheaper one is taken:

    product     form G_i, sum its squares                 T·K·N operations, K·N numbers
    gram        Σ_{t,s} ⟨L_t, L_s⟩ ⟨R_t, R_s⟩             T²·(K+N) operations, 2·T² numbers

The terms of a Gram sum cancel, so they are added in float64. The *spread* S = Σ_t ‖L_t‖·‖R_t‖ is
computed with it: any computation of Σ_t L_t ⊗ R_t in lower precision errs by at most
(T roundoffs)·S, which is added to the norm before clipping. On a GPU, Gram matrices are those of
vectors L', R' that were shortened first (`_sides.shortened`), and what this leaves out is measured:

    ‖Σ_t L_t ⊗ R_t‖ ≤ ‖Σ_t L'_t ⊗ R'_t‖ + Σ_t (‖L_t − L'_t‖ ‖R_t‖ + ‖L'_t‖ ‖R_t − R'_t‖).

The clipped sum Σ_i c_i G_i is a matrix product over positions *and* examples, whose rounding
couples examples. It is therefore computed in blocks of a few examples, b, and the blocks are added
as integers (`privacy.sums`), so that an example can disturb only the others of its block. There,
with n = b·T products of unit roundoff u added in any order, the computed P and the exact X differ
by at most n·u·Σ_i c_i S_i. An example is clipped by S_i/κ where that is larger than its norm, so
that c_i S_i ≤ κ C, and for two blocks that differ in one example

    ‖P − P'‖ ≤ (‖c_x G_x‖ + n·u·c_x S_x) + 2 (b − 1) n·u·κ C.

The norm of x is clipped by the first part. The second part, the *disturbance*, is kept below
`DISTURBANCE`·C by the choice of b and is subtracted from C beforehand. A lookup has no second part,
because its rows are scattered as integers.

With a single position, G_i may also be multiplied by public numbers s, entry by entry. All bounds
on rounding hold entry by entry, hence for s ⊙ P and s ⊙ X, with S_i = ‖s ⊙ (|L| ⊗ |R|)‖: the norm
of s ⊙ G_i itself. With more positions this S_i would take as long as to form G_i.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mirrordp.privacy import sums
from mirrordp.privacy._float64 import float64_call, wide_dtype
from mirrordp.privacy.clipping import scaled
from mirrordp.privacy.ghost._sides import (
    RUN,
    OneHot,
    Side,
    Vectors,
    inner,
    is_short,
    shortened,
    wide,
)

Array = jax.Array

DISTURBANCE = 2.0**-7
"""How far an example may change the rounding of others, as a share of C."""

SHORTENS = {"gpu": True}
"""The backends on which Gram matrices of shortened vectors are worth their margin."""

AT_A_TIME = {"cpu": 2**26, "gpu": 2**28}
"""The blocks of a sum are formed in groups of this many numbers (256 MiB, 1 GiB in float32)."""


class Factors(NamedTuple):
    """The gradients G_i of one layer: left ⊗ right summed over positions, group by group."""

    left: Side
    right: Side

    def swapped(self) -> "Factors":
        """Returns the factors of the transposed weight."""
        return Factors(self.right, self.left)


class Roundoff(NamedTuple):
    """What the rounding of a clipped sum requires of a norm, in units of the spread S_i.

    Attributes:
        own: bounds the rounding of the example's own contribution; it is added to the norm.
        spread: 1/κ; the norm is taken to be at least S_i/κ, for the sake of the other examples.
        block: b, the number of examples of a block.
        disturbance: 2 (b − 1) n·u·κ.
    """

    own: float
    spread: float
    block: int
    disturbance: float


def roundoff(positions: int, batch_size: int, unit: float, shortened: float) -> Roundoff:
    """Returns the largest block whose disturbance is small enough, and the bounds for it.

    κ = 3√T, and at least 16: positions without a common direction have a spread of √T times their
    norm. An example whose spread is more than κ times its norm may be clipped although its norm is
    below C. A single position has κ = 1.

    Args:
        positions: T, of all uses of a weight together.
        batch_size: the number of examples.
        unit: u, a bound on the relative error of one addition.
        shortened: the relative error of products of shortened inputs.
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
    # Blocks that leave no rest need no copy with rows of zeros at the end.
    even = max(size for size in range(1, block + 1) if batch_size % size == 0)
    block = even if 3 * even >= 2 * block else block
    return Roundoff(relative(block) + shortened, spread, block, disturbance(block))


def disturbance(roundoffs: Iterable[Roundoff]) -> float:
    """Returns the disturbance of all weights together, as a share of C.

    Σ_w (c_i S_i / κ)² ≤ C² over the weights w of an example i, so weights with the same blocks
    together have the largest of their disturbances. Weights with blocks of another size may share
    their blocks with other examples, so their disturbance counts in addition.
    """
    by_block: dict[int, float] = {}
    for one in roundoffs:
        by_block[one.block] = max(one.disturbance, by_block.get(one.block, 0.0))
    return math.hypot(*by_block.values())


def gram(parts: Sequence[Factors], *, roundoff: Roundoff, exponent: int) -> tuple[Array, Array]:
    """Returns max(‖Σ_parts G_i‖ + own · S_i, S_i / κ)² in float64, and a bound on underflow.

    Both have shape [B]. The norms are taken by Gram matrices. The bound says how much the clipped
    sum can add to a contribution because numbers below the smallest normal one are rounded, or not
    kept at all, and because the rows of a lookup are truncated to grains one by one.

    Args:
        parts: factors that lie in one layout.
        roundoff: the rounding of the clipped sum of the G_i.
        exponent: log₂ of the grain.
    """
    return float64_call(
        functools.partial(_gram, roundoff=roundoff, grain=2.0**exponent), tuple(parts)
    )


def _gram(parts: Sequence[Factors], roundoff: Roundoff, grain: float) -> tuple[Array, Array]:
    spread = _spread(parts)
    if _shortens(parts):
        norm = _shortened_norm(parts)
    else:
        parts = [_longer(part) for part in parts]
        norm = _norm([(part, 1.0) for part in parts], _gram_roundoff(parts) * spread**2)
    underflow = functools.reduce(jnp.add, [_underflow(part, roundoff.block) for part in parts])
    if _shortens(parts):
        # What rounding left out of the norm may underflow as well, and then is not measured.
        underflow *= 2
    underflow += grain * sum(map(_truncations, parts))
    norm, least = norm + roundoff.own * spread, roundoff.spread * spread
    return jnp.where(norm < least, least, norm) ** 2, underflow


def scaled_norm(
    part: Factors, scale: Array, *, roundoff: Roundoff, exponent: int
) -> tuple[Array, Array]:
    """Returns (‖s ⊙ (L_i ⊗ R_i)‖ (1 + own))² in float64, and a bound on underflow, both [B].

    There is a single position, so ‖s ⊙ (L ⊗ R)‖² = Σ_kn L_k² s_kn² R_n², and no terms cancel.

    The norm is taken to be at least ‖L_i‖ ‖R_i‖ max(2⁻¹⁰⁰, C 2⁻¹¹⁵). So a sum of 2⁸ of the
    c_i L_i ⊗ R_i does not overflow before it is multiplied by a tiny s, and what an s below the
    smallest normal number adds is less than 2⁻²⁶·C, whether the norm shows it or not.

    Args:
        part: the factors, of which both are vectors.
        scale: s, [K, N].
        roundoff: the rounding of the clipped sum.
        exponent: log₂ of the grain.
    """
    least_scale = max(2.0**-100, 2.0 ** (exponent + sums.GRAIN_BITS + 1 - 115))

    def compute(part: Factors, scale: Array) -> tuple[Array, Array]:
        left, right = (wide(side.array[:, 0, 0]) ** 2 for side in part)  # pyright: ignore
        rows = jnp.matmul(left, wide(scale) ** 2, precision="highest")
        terms = sum(scale.shape) + 8
        own = roundoff.own + terms * float(jnp.finfo(wide_dtype()).eps)
        norm = jnp.sqrt((rows * right).sum(axis=-1)) * (1 + own)
        least = least_scale * jnp.sqrt(left.sum(axis=-1)) * jnp.sqrt(right.sum(axis=-1))
        norm = jnp.where(norm < least, least, norm)
        # What underflows before the product with s is multiplied by it, or underflows after it.
        largest = jnp.maximum(wide(jnp.abs(scale)).max(), 1.0)
        return norm**2, 2 * largest * _underflow(part, roundoff.block)

    return float64_call(compute, part, scale)


def with_lookups(
    squared: Array, met: Array, part: Factors, *, unit: float, entries: int, exponent: int
) -> tuple[Array, Array]:
    """Returns a bound on ‖H_i + E_i‖², for E_i the gradient of lookups; and one on underflow, [B].

    H_i is formed, and E_i = Σ_t e_t ⊗ R_t has few rows, so it is not:

        ‖H + E‖² = ‖H‖² + 2 Σ_t ⟨H[k_t], R_t⟩ + Σ_{t,s: k_t = k_s} ⟨R_t, R_s⟩,    e_t one at k_t.

    H and E may cancel, so that the rounding of c·H and of c·R, which are summed separately, is not
    small against C by itself. It is bounded by 8 u (‖H‖ + Σ_t ‖R_t‖).

    Args:
        squared: ‖H_i‖², or a bound on it.
        met: the rows H_i[k_t], [B, T, N].
        part: the factors of the lookups.
        unit: u, the unit roundoff of c·H and c·R.
        entries: the number of entries of the table.
        exponent: log₂ of the grain.
    """

    def compute(squared, met, part):
        cross = (met * wide(part.right.values[:, 0])).sum(axis=(1, 2))
        own = (inner(part.left, part.left) * inner(part.right, part.right)).sum(axis=(1, 2, 3))
        size = jnp.sqrt(squared) + _spread([part])
        terms = part.right.positions * (part.right.positions + part.right.entries)
        roundoff = 8 * terms * float(jnp.finfo(wide_dtype()).eps)
        total = squared + 2 * cross + own + roundoff * size**2
        norm = jnp.sqrt(jnp.where(total < 0, 0.0, total)) + 8 * unit * size
        # Where c·H underflows, it no longer cancels what c·R has there.
        underflow = _underflow(part) + _smallest(part.right.values) * math.sqrt(entries)
        return norm**2, underflow + 2.0**exponent * _truncations(part)

    return float64_call(compute, squared, met, part)


def lookups_together(parts: Sequence[Factors]) -> Factors:
    """Returns lookups in one table as one, with all their positions."""
    ones = jnp.concatenate([part.left.ones for part in parts], axis=2)  # pyright: ignore
    rows = jnp.concatenate([part.right.values for part in parts], axis=2)  # pyright: ignore
    return Factors(OneHot(ones), Vectors(rows))


def _norm(parts: Sequence[tuple[Factors, Array | float]], error: Array) -> Array:
    """Returns sqrt(‖Σ_parts scale · Σ_t L_t ⊗ R_t‖² + error), [B], by Gram matrices."""
    total = error
    for number, (one, scale) in enumerate(parts):
        for other, its_scale in parts[: number + 1]:
            product = inner(one.left, other.left) * inner(one.right, other.right)
            product *= scale * its_scale
            total += (1.0 if other is one else 2.0) * product.sum(axis=(1, 2, 3))
    # Written so that a NaN stays one, which `maximum` would not promise.
    return jnp.sqrt(jnp.where(total < 0, 0.0, total))


def _longer(part: Factors) -> Factors:
    """Returns factors that are not taken for shortened ones because the model has 16 bits."""

    def one_side(side: Side) -> Side:
        if isinstance(side, OneHot) or not is_short(side):
            return side
        return side.holding(side.array.astype(jnp.float32))

    return Factors(*map(one_side, part))


def _shortened_norm(parts: Sequence[Factors]) -> Array:
    """Returns a bound on ‖Σ_parts Σ_t L_t ⊗ R_t‖ by Gram matrices of shortened vectors."""
    shorts = [tuple(map(shortened, part)) for part in parts]
    lengths = [
        (part.left.lengths(), left.lost, part.right.lengths(), right.lost)
        for part, (left, right) in zip(parts, shorts, strict=True)
    ]
    spread = _over_positions([(x + dx) * (y + dy) for x, dx, y, dy in lengths])
    lost = _over_positions([dx * y + (x + dx) * dy for x, dx, y, dy in lengths])
    rounded = [(Factors(left.side, right.side), left.scale * right.scale) for left, right in shorts]
    error = _gram_roundoff([part for part, _ in rounded]) * spread**2
    return _norm(rounded, error) + lost


def _shortens(parts: Sequence[Factors]) -> bool:
    """Returns whether Gram matrices are those of shortened vectors."""
    sides = [side for part in parts for side in part if not isinstance(side, OneHot)]
    return SHORTENS.get(jax.default_backend(), False) and all(
        side.positions > 1 and side.array.dtype.itemsize <= 4 for side in sides
    )


def _gram_roundoff(parts: Sequence[Factors]) -> float:
    """Bounds the rounding of the Gram sums themselves: of inner products, and of adding them.

    A matrix unit that adds in float32 may truncate, which loses twice as much as rounding.
    """
    terms = sum(side.entries for side in parts[0]) + sum(part.right.positions for part in parts)
    found = terms * float(jnp.finfo(wide_dtype()).eps) / 2
    for side in (0, 1):
        if any(is_short(part[side]) for part in parts):
            found += 1.01 * min(RUN, max(part[side].entries for part in parts)) * 2.0**-23
    return found


def _underflow(part: Factors, block: int = 1) -> Array:
    """ε (√N Σ_t ‖L_t‖ + √K Σ_t ‖R_t‖ + 4 b T √(K N)), with ε the smallest normal number of the sum.

    This allows for an error of ε in each entry of c·R and of L; and in all n = b·T products of a
    block and in their additions, with the example and without it: the products of others may
    underflow by themselves, but not if they are added to the example's before they are rounded. ε
    is at least 2⁻⁵¹⁰: float64 rounds the squares of smaller entries to zero, so that no norm shows
    them.
    """
    left, right = (math.sqrt(side.entries) for side in part)
    # A lookup's rows are not added in floating point.
    count = 1 if any(isinstance(side, OneHot) for side in part) else 4 * block
    inputs = right * part.left.lengths() + left * part.right.lengths() + count * left * right
    vectors = next(side for side in reversed(part) if isinstance(side, Vectors))
    return _smallest(vectors.values) * inputs.sum(axis=(1, 2))


def _smallest(values: Array) -> float:
    """Returns ε; see `_underflow`."""
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    return max(float(jnp.finfo(dtype).tiny), 2.0**-510)


def _truncations(part: Factors) -> float:
    """T·√N for a lookup, whose rows are truncated one by one; a bound in grains."""
    rows = [side for side in part if not isinstance(side, OneHot)]
    if len(rows) == len(part):
        return 0.0
    return rows[0].positions * math.sqrt(rows[0].entries)


def _spread(parts: Sequence[Factors]) -> Array:
    """Σ_parts sqrt(Σ_groups (Σ_t ‖L_t‖ ‖R_t‖)²)."""
    return _over_positions([part.left.lengths() * part.right.lengths() for part in parts])


def _over_positions(terms: Sequence[Array]) -> Array:
    """Bounds the norm of sums of terms with these norms, each [B, G, T]; [B]."""
    per_part = [jnp.sqrt((term.sum(axis=-1) ** 2).sum(axis=-1)) for term in terms]
    return functools.reduce(jnp.add, per_part)


def product(part: Factors, precision: lax.Precision) -> Array:
    """Returns G_i itself, [B, G, K, N], in float32 or wider.

    Both the norm and the clipped sum are taken of this result, so its rounding does not matter for
    the bound.
    """
    assert not isinstance(part.left, OneHot)
    assert isinstance(part.right, Vectors)
    right = part.right.values
    products = part.left.pieces(lambda left: _product("bgtk,bgtn->bgkn", left, right, precision))
    return jnp.concatenate(products, axis=-2)


def block_sum(
    part: Factors,
    weights: Array,
    *,
    precision: lax.Precision,
    block: int,
    exponent: int,
    scale: Array | None = None,
) -> sums.Halves:
    """Returns Σ_i c_i G_i, [G, K, N], as halves of integers and without forming the G_i.

    Examples of weight zero do not take part whatever they hold, because 0 · NaN is not 0.

    Args:
        part: the factors.
        weights: c_i.
        precision: of the products.
        block: the number of examples whose products are added in floating point.
        exponent: log₂ of the grain.
        scale: s, [K, N], of sums Σ_i c_i s ⊙ G_i whose left side are vectors.
    """
    left, right = part
    assert not isinstance(left, OneHot)
    assert isinstance(right, Vectors)
    assert scale is None or isinstance(left, Vectors)
    # All examples are masked, always. Another program for batches in which all are finite would be
    # faster, but it may round differently, and one example could change the sums of all blocks.
    left = left.holding(scaled(left.array, weights > 0))
    right = right.holding(scaled(right.array, weights))
    right = _in_blocks(right.array, block)

    def some(left: Array, right: Array) -> sums.Halves:
        products = _product("mbgtk,mbgtn->mgkn", left, right, precision)
        return sums.halves(products if scale is None else scale * products, exponent)

    def piece(left: Array) -> Array:
        """Both halves, [2, G, K, N] in int32, because a side's pieces are one array each."""
        left = _in_blocks(left, block)
        high, low = _added_up(some, left, right)
        return jnp.stack([high, lax.bitcast_convert_type(low, jnp.int32)])

    high, low = jnp.concatenate(left.pieces(piece), axis=-2)
    return high, lax.bitcast_convert_type(low, jnp.uint32)


def scattered_sum(part: Factors, weights: Array, *, rows: int, exponent: int) -> sums.Halves:
    """Returns Σ_i c_i G_i, [1, rows, N], for a lookup, as halves of integers.

    The rows are scattered as integers, whose sum is the same in any order. Arguments are those of
    `block_sum`, and the number of rows of the table.
    """
    assert isinstance(part.left, OneHot)
    assert isinstance(part.right, Vectors)
    right = scaled(part.right.values, weights)
    width = right.shape[-1]

    def scatter(index, right):
        # A row outside the table is dropped; -1 would count from the end.
        index = jnp.where(index >= 0, index, rows).reshape(-1)
        table = jnp.zeros((rows, width), jnp.int64)
        grains = sums.grains(right.reshape(-1, width), exponent)
        return sums.split(table.at[index].add(grains, mode="drop")[None])

    return float64_call(scatter, part.left.ones, right)


def _added_up(some, left: Array, right: Array) -> sums.Halves:
    """Returns `some(left, right)` over all blocks, a few blocks at a time."""
    blocks, _, groups, _, entries = left.shape
    room = AT_A_TIME.get(jax.default_backend(), AT_A_TIME["cpu"])
    at_a_time = max(1, room // (groups * entries * right.shape[-1]))
    if blocks <= at_a_time:
        return some(left, right)
    left, right = (_in_blocks(array, at_a_time) for array in (left, right))
    add = lambda total, rows: (sums.added(total, some(*rows)), None)  # noqa: E731
    zero = sums.nothing((groups, entries, right.shape[-1]))
    return lax.scan(add, zero, (left, right))[0]


def _in_blocks(array: Array, block: int) -> Array:
    """[B, ...] as [blocks, block, ...], with rows of zeros at the end."""
    extra = -array.shape[0] % block
    if extra:
        array = jnp.pad(array, ((0, extra), *((0, 0),) * (array.ndim - 1)))
    return array.reshape(-1, block, *array.shape[1:])


def _product(formula: str, left: Array, right: Array, precision: lax.Precision) -> Array:
    dtype = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=dtype)
