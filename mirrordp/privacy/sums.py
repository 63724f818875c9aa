"""Sums of clipped contributions that carry no rounding from one record to another.

A running sum in floating point is not the sum of the records' contributions: the rounding of each
term depends on all terms before it, so that one record can change how thousands of others
contribute. Neighbouring sums of 10⁵ rows in float32 can differ by ten times the clip norm. Here a
sum is a sum of integers instead. With g = 2^(⌊log₂ C⌋ − 34), the *grain*,

    total = Σ_j trunc(P_j / g),         sum ≈ g · total,

for partial sums P_j, each made of one record or of a few records (a block). Integer addition is
exact, whatever the order, so a record changes the term of its own block and nothing else:

- A block of one record: truncation towards zero never lengthens a vector. The sum changes by at
  most the norm of the record's contribution.
- A block of several records: the sum changes by at most ‖P_j − P'_j‖ + g·√p. The code that
  computes P_j has to bound the rounding inside a block; see `privacy.ghost`.

The integers have 64 bits, in two halves of 32 so that nothing depends on `jax_enable_x64`. They
hold the sum over `MAX_RECORDS` records. `RESERVE` is the share of C that clipping leaves free for
everything that is rounded once per record or once per sum: the clip factor and the product with it
(2⁻²²), g·√p for p up to 2³⁰ coordinates (2⁻¹⁹), and the conversion of two whole sums to float64
(2⁻²⁵).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrordp import _validate
from mirrordp.privacy._float64 import float64_call
from mirrordp.types import PyTree

Halves = tuple[jax.Array, jax.Array]
"""Integers of 64 bits: the upper 32 bits as int32, the lower ones as uint32."""

GRAIN_BITS = 34
MAX_RECORDS = 2**27
RESERVE = 2.0**-18


def grain_exponent(l2_clip_norm: float) -> int:
    """Returns log₂ g for contributions of norm at most C: C / g lies in [2³⁴, 2³⁵)."""
    return math.frexp(l2_clip_norm)[1] - 1 - GRAIN_BITS


def check_count(count: int) -> None:
    """Raises if the integers of a sum might not hold this number of records."""
    if count > MAX_RECORDS:
        raise ValueError(
            f"one sum holds at most {MAX_RECORDS:,} records, got {count:,}. Use smaller batches."
        )


def check_clip_norm(l2_clip_norm: float) -> None:
    """Raises for clip norms near the ends of floating point.

    In float32, noise would be rounded to zero there but sums would not. In float64, the squares of
    gradients that must be clipped would be rounded to zero.
    """
    _validate.positive(l2_clip_norm=l2_clip_norm)
    if not 1e-30 <= float(l2_clip_norm) <= 1e30:
        raise ValueError(
            f"l2_clip_norm must be between 1e-30 and 1e30, got {l2_clip_norm:g}. Scale the loss, "
            "and with it the gradients."
        )


def float32_or_wider(leaf: Any) -> Any:
    """Returns the dtype in which contributions like `leaf` are computed and summed."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["high", "low"],
    meta_fields=["exponent", "dtypes"],
)
@dataclasses.dataclass(frozen=True)
class ExactSum:
    """A tree of sums, each an integer of 64 bits times g = 2^exponent.

    Sums are added with `+`. A sum is not private, because noise has not been added yet.

    Attributes:
        high: the upper 32 bits, int32.
        low: the lower 32 bits, uint32.
        exponent: log₂ g.
        dtypes: the types of the leaves as floating-point numbers, in order.
    """

    high: PyTree
    low: PyTree
    exponent: int
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, contributions: PyTree, l2_clip_norm: float) -> "ExactSum":
        """Returns the sum of one contribution, truncated to whole grains."""
        return cls.over(jax.tree.map(lambda leaf: leaf[None], contributions), l2_clip_norm)

    @classmethod
    def over(cls, contributions: PyTree, l2_clip_norm: float) -> "ExactSum":
        """Returns the sum over the first axis, of at most `MAX_RECORDS` finite contributions."""
        exponent = grain_exponent(l2_clip_norm)
        leaves, tree = jax.tree.flatten(contributions)
        return cls.from_halves(tree, [halves(leaf, exponent) for leaf in leaves], exponent, leaves)

    @classmethod
    def zero(cls, like: PyTree, l2_clip_norm: float) -> "ExactSum":
        """Returns the sum over no records, for contributions of the shapes of `like`."""
        leaves, tree = jax.tree.flatten(like)
        zeros = [nothing(leaf.shape) for leaf in leaves]
        return cls.from_halves(tree, zeros, grain_exponent(l2_clip_norm), leaves)

    @classmethod
    def from_halves(
        cls, tree: Any, pairs: Sequence[Halves], exponent: int, like: Sequence[Any]
    ) -> "ExactSum":
        """Makes a sum from its leaves' halves; `like` gives their dtypes."""
        return cls(
            high=jax.tree.unflatten(tree, [high for high, _ in pairs]),
            low=jax.tree.unflatten(tree, [low for _, low in pairs]),
            exponent=exponent,
            dtypes=tuple(np.dtype(float32_or_wider(leaf)).name for leaf in like),
        )

    def __add__(self, other: "ExactSum") -> "ExactSum":
        if (self.exponent, self.dtypes) != (other.exponent, other.dtypes):
            raise ValueError(
                "only sums of the same grain and types can be added, got "
                f"{(self.exponent, self.dtypes)} and {(other.exponent, other.dtypes)}. "
                "Make both with the same clip norm and parameters."
            )
        ours, theirs = self.leaves(), other.leaves()
        shapes = [
            (jax.tree.structure(one.high), [leaf.shape for leaf, _ in leaves])
            for one, leaves in ((self, ours), (other, theirs))
        ]
        if shapes[0] != shapes[1]:
            # One number that is spread over an array would count once for each of its numbers.
            raise ValueError(
                f"only sums of the same arrays can be added, got shapes {shapes[0][1]} and "
                f"{shapes[1][1]}. Check what clients send."
            )
        pairs = [added(one, two) for one, two in zip(ours, theirs, strict=True)]
        tree = jax.tree.structure(self.high)
        high, low = (jax.tree.unflatten(tree, part) for part in zip(*pairs, strict=True))
        return dataclasses.replace(self, high=high, low=low)

    def leaves(self) -> list[Halves]:
        """Returns the halves of each leaf."""
        return list(zip(*map(jax.tree.leaves, (self.high, self.low)), strict=True))

    def map_integers(self, functions: Sequence[Callable[[jax.Array], jax.Array]]) -> "ExactSum":
        """Returns the sum with a function of 64-bit integers applied to each leaf."""

        def applied(function: Callable[[jax.Array], jax.Array], high: Any, low: Any) -> Halves:
            return split(function(whole(high, low)))

        pairs = [
            float64_call(functools.partial(applied, function), *halves)
            for function, halves in zip(functions, self.leaves(), strict=True)
        ]
        tree = jax.tree.structure(self.high)
        high, low = (jax.tree.unflatten(tree, part) for part in zip(*pairs, strict=True))
        return dataclasses.replace(self, high=high, low=low)

    def zeros(self) -> PyTree:
        """Returns floating-point zeros of the shapes and types of `floats()`."""
        leaves, tree = jax.tree.flatten(self.high)
        return jax.tree.unflatten(
            tree,
            [jnp.zeros(leaf.shape, dtype) for leaf, dtype in zip(leaves, self.dtypes, strict=True)],
        )

    def floats(self) -> PyTree:
        """Returns the sum as rounded floating-point numbers, to which no noise may be added."""
        return self.map_wide(lambda wide: wide)

    def map_wide(self, function: Callable[..., jax.Array], *trees: PyTree) -> PyTree:
        """Returns `function(sum in float64, *leaves)`, rounded to each leaf's dtype at the end."""

        def rounded(dtype: str, high: jax.Array, low: jax.Array, *others: jax.Array) -> jax.Array:
            wide = function(joined(high, low, self.exponent), *others)
            return lax.convert_element_type(wide, dtype)

        structure = jax.tree.structure(self.high)
        flat = [jax.tree.leaves(tree) for tree in (self.high, self.low, *trees)]
        return jax.tree.unflatten(
            structure,
            [
                float64_call(functools.partial(rounded, dtype), *leaves)
                for dtype, *leaves in zip(self.dtypes, *flat, strict=True)
            ],
        )


def nothing(shape: tuple[int, ...]) -> Halves:
    """Returns zeros."""
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.uint32)


def require_real(values: jax.Array) -> None:
    """Raises for complex numbers."""
    if jnp.iscomplexobj(values):
        raise TypeError(
            f"noise is real and would not cover imaginary parts: expected real parameters, got "
            f"{values.dtype}. Use two real parameters for the real and the imaginary part."
        )


def halves(values: jax.Array, exponent: int) -> Halves:
    """Returns Σ_j trunc(values_j / 2^exponent) over the first axis, as halves of 32 bits."""
    require_real(values)

    def add_up(values):
        return split(grains(values, exponent).sum(axis=0))

    return float64_call(add_up, values)


def grains(values: jax.Array, exponent: int) -> jax.Array:
    """Returns trunc(values / 2^exponent); to be called where 64-bit types are on.

    Multiplying by a power of two is exact, and the conversion to integers truncates.
    """
    dtype = float32_or_wider(values)
    if not -126 <= exponent <= 126:
        # The factor alone would be out of float32's range.
        dtype = jnp.float64
    scaled = lax.convert_element_type(values, dtype) * jnp.asarray(2.0**-exponent, dtype)
    return lax.convert_element_type(scaled, jnp.int64)


def added(one: Halves, other: Halves) -> Halves:
    """Returns the sum of two numbers in halves: the lower halves wrap around, and carry."""
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]).astype(jnp.int32), low


def split(total: jax.Array) -> Halves:
    """Returns 64-bit integers as halves of 32 bits; to be called where 64-bit types are on."""
    high = lax.convert_element_type(total >> 32, jnp.int32)
    low = lax.convert_element_type(total & jnp.int64(0xFFFFFFFF), jnp.uint32)
    return high, low


def joined(high: jax.Array, low: jax.Array, exponent: int) -> jax.Array:
    """Returns the number in float64, rounded beyond 2⁵³ grains; needs 64-bit types switched on."""
    return lax.convert_element_type(whole(high, low), jnp.float64) * 2.0**exponent


def whole(high: jax.Array, low: jax.Array) -> jax.Array:
    """Inverts `split`; to be called where 64-bit types are on."""
    return (lax.convert_element_type(high, jnp.int64) << 32) | lax.convert_element_type(
        low, jnp.int64
    )
