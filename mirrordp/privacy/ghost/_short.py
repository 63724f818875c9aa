"""Per-example gradients whose numbers have 16 bits.

A matrix unit that takes float32 inputs shortens them to 11 bits anyway (TF32). Where it does, a
gradient is better formed of inputs in float16, which have as many bits: the products are the same,
they take half the time, and a result that is kept in float16 takes half the memory and traffic.
float16 has few exponents, so inputs are scaled by powers of two, example by example. Gradients that
were pulled back through a function of parameters afterwards are kept in bfloat16.

Any rounding is allowed here, because the norm is taken of the very numbers that are summed.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mirrordp.privacy._float64 import float64_call, wide_dtype
from mirrordp.privacy.ghost._factors import Factors
from mirrordp.privacy.ghost._sides import OneHot, Patches, Vectors, power_of_two

Array = jax.Array

LONGEST_RUN = 4096
"""Up to so many squares are added in float32 before float64 takes over."""


class Short(NamedTuple):
    """An array 2^exponent · values.

    Attributes:
        values: float16 or bfloat16, [*lead, ...].
        exponent: whole numbers in float32, [*lead]: gradients are floats.
    """

    values: Array
    exponent: Array

    def floats(self) -> Array:
        """Returns the array in float32, where it may overflow."""
        half = jnp.floor(self.exponent / 2)
        found = _read(self.values)
        for part in (half, self.exponent - half):
            found *= _over_rest(power_of_two(part), found)
        return found


def wide(array: Array | Short) -> Array:
    """Returns an array in float64 if there is one; to be called where 64-bit types are on."""
    if not isinstance(array, Short):
        return lax.convert_element_type(array, wide_dtype())
    values = lax.convert_element_type(_read(array.values), jnp.float64)
    return values * _over_rest(_wide_power_of_two(array.exponent), values)


def product(part: Factors) -> Short:
    """Returns G_i = Σ_t L_t ⊗ R_t of shortened inputs, [B, G, K, N], with an exponent for each i.

    |G_i| ≤ T · max |L| · max |R|, which is scaled to at most 2¹⁵.
    """
    assert not isinstance(part.left, OneHot)
    assert isinstance(part.right, Vectors)
    room = 15 - math.ceil(math.log2(part.left.positions))
    left, left_exponent = _scaled(part.left, room // 2)
    right, right_exponent = _scaled(part.right, room - room // 2)
    products = left.pieces(lambda piece: jnp.einsum("bgtk,bgtn->bgkn", piece, right.array))
    values = products[0] if len(products) == 1 else jnp.concatenate(products, axis=-2)
    return Short(values, (left_exponent + right_exponent).astype(jnp.float32))


def rounded(array: Array) -> Short:
    """Returns an array [B, ...] in bfloat16."""
    return Short(array.astype(jnp.bfloat16), jnp.zeros(array.shape[0], jnp.float32))


def _scaled(side: Vectors | Patches, top: int) -> tuple[Vectors | Patches, Array]:
    """Returns vectors in float16 of which the largest entry is below 2^top, and an exponent [B]."""
    array = lax.convert_element_type(side.array, jnp.float32)
    largest = jnp.abs(array).max(axis=tuple(range(1, array.ndim)))
    exponent = jnp.clip(jnp.frexp(largest)[1] - top, -120, 120)
    array *= _over_rest(power_of_two(-exponent), array)
    return side.holding(array.astype(jnp.float16)), exponent


def squared_norm(array: Short) -> Array:
    """Returns a bound on ‖array_i‖², over all but the first axis, in float64."""

    def sum_of_squares(array: Short) -> Array:
        values, first = _read(array.values), array.exponent.ndim
        runs = [axis for axis in range(first, values.ndim) if values.shape[axis] <= LONGEST_RUN]
        if array.values.dtype == jnp.float16 and runs:
            # Squares of float16 neither overflow nor underflow in float32, and all are positive,
            # so that a sum of n of them is short by less than n roundoffs, in any order.
            run = lax.convert_element_type((values**2).sum(axis=runs[-1]), jnp.float64)
            squares = run * (1 + values.shape[runs[-1]] * 2.0**-23)
        else:
            squares = lax.convert_element_type(values, jnp.float64) ** 2
        sums = squares.sum(axis=tuple(range(first, squares.ndim)))
        sums *= _wide_power_of_two(array.exponent) ** 2
        return sums.sum(axis=tuple(range(1, sums.ndim)))

    return float64_call(sum_of_squares, array)


def scaled(array: Short, weights: Array) -> Array:
    """Returns c_i · array_i in float32, exactly zero where c_i is zero."""

    def product(array: Short, weights: Array) -> Array:
        exact = _wide_power_of_two(array.exponent)
        exact *= _over_rest(lax.convert_element_type(weights, jnp.float64), exact)
        # Multiplication by a power of two is exact, unless the result leaves float32's range.
        limits = jnp.finfo(jnp.float32)
        inside = (exact >= float(limits.tiny)) & (exact <= float(limits.max))
        factors = lax.convert_element_type(jnp.where(inside, exact, 0.0), jnp.float32)
        # Without the barrier the compiler would compute a factor again for each number.
        factors = _over_rest(lax.optimization_barrier(factors), array.values)
        return jnp.where(factors > 0, _read(array.values) * factors, jnp.zeros([], jnp.float32))

    return float64_call(product, array, weights)


def _wide_power_of_two(exponent: Array) -> Array:
    """Returns 2^exponent in float64, exactly, for whole numbers of moderate size."""
    shifted = (lax.convert_element_type(exponent, jnp.int64) + 1023) << 52
    return lax.bitcast_convert_type(shifted, jnp.float64)


def _read(values: Array) -> Array:
    """Returns short numbers in float32.

    The compiler is free to leave out a cast to fewer bits and the one that undoes it, so that one
    reader would see bits that another does not. It must not leave out `reduce_precision`.
    """
    bits = jnp.finfo(values.dtype).nmant
    return lax.reduce_precision(lax.convert_element_type(values, jnp.float32), 8, bits)


def _over_rest(lead: Array, array: Array) -> Array:
    """Gives an array of leading axes as many axes as another one."""
    return lead.reshape(*lead.shape, *(1,) * (array.ndim - lead.ndim))
