"""The vectors on one side of a sum of outer products Σ_t L_t ⊗ R_t, example by example.

A side holds T vectors of K entries for each of B examples and each of G groups of the weight. It
comes in three forms: vectors as they are, one-hot vectors (a lookup), or the patches of an image (a
convolution). Each form knows its number of `positions` T, the number of `entries` of a vector that
may differ from zero, and the `lengths` of all vectors, [B, G, T]. `pieces` applies a function to
the vectors [B, G, T, K], in pieces along K. Lengths are taken in float64, and inner products of all
vectors with each other in the cheapest way for each form: in float64, or (`shortened`) of vectors
that were rounded to 11 bits before, where the hardware multiplies those much faster. Then the
products are exact, they are added in float32 in runs of `RUN` entries and the runs in float64.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrordp.privacy._float64 import wide_dtype

Array = jax.Array

PIECE = {"cpu": 2**15, "gpu": 2**18}
"""The patches of a convolution are formed in pieces of this many numbers per example, or more."""

PATCHES = {"gpu": 2**30}
"""Pieces may be larger as long as those of all examples together take at most so many bytes."""

RUN = 256
"""The products of shortened numbers are added in float32 this many at a time."""


class Vectors(NamedTuple):
    """Vectors as they are, [B, G, T, K]."""

    values: Array

    @property
    def positions(self) -> int:
        return self.values.shape[2]

    @property
    def entries(self) -> int:
        return self.values.shape[3]

    def lengths(self) -> Array:
        return jnp.sqrt((wide(self.values) ** 2).sum(axis=-1))

    @property
    def array(self) -> Array:
        return self.values

    def holding(self, array: Array) -> "Vectors":
        return Vectors(array)

    def pieces(self, function: Callable[[Array], Array]) -> list[Array]:
        return [function(self.values)]


class OneHot(NamedTuple):
    """One-hot vectors, given by the places of the ones, [B, 1, T]; -1 is a vector of zeros."""

    ones: Array

    @property
    def positions(self) -> int:
        return self.ones.shape[2]

    entries = 1

    def lengths(self) -> Array:
        return (self.ones >= 0).astype(wide_dtype())


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pixels"],
    meta_fields=["window", "out", "strides", "dilation"],
)
@dataclasses.dataclass(frozen=True)
class Patches:
    """The patches of images that a kernel sees, given by the images.

    Attributes:
        pixels: padded images [B, G, n, spatial..., C], n of them per example.
        window: the size of the kernel along each axis.
        out: the number of positions of the kernel along each axis.
        strides: the distance between positions.
        dilation: the distance between the weights of the kernel.
    """

    pixels: Array
    window: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> int:
        return self.pixels.shape[2] * math.prod(self.out)

    @property
    def entries(self) -> int:
        return math.prod(self.window) * self.pixels.shape[-1]

    @property
    def array(self) -> Array:
        return self.pixels

    def holding(self, array: Array) -> "Patches":
        return dataclasses.replace(self, pixels=array)

    def lengths(self) -> Array:
        squares = (wide(self.pixels) ** 2).sum(axis=-1)
        for axis in reversed(range(len(self.window))):
            terms = [self.seen(squares, axis, i, at=3 + axis) for i in range(self.window[axis])]
            squares = functools.reduce(jnp.add, terms)
        return jnp.sqrt(squares.reshape(*squares.shape[:2], -1))

    def pieces(self, function: Callable[[Array], Array]) -> list[Array]:
        # Patches repeat their images many times over, so one piece is in memory at a time: the
        # barrier keeps the compiler from making all of them first.
        source, cuts = self._cuts()
        results = []
        for cut in cuts:
            result = function(cut(source))
            if len(cuts) > 1:
                source, result = lax.optimization_barrier((source, result))
            results.append(result)
        return results

    def seen(self, array: Array, axis: int, offset: int, at: int) -> Array:
        """Returns what the weights at an offset of a window's axis see on axis `at` of an array."""
        start = offset * self.dilation[axis]
        stride = self.strides[axis]
        stop = start + (self.out[axis] - 1) * stride + 1
        return lax.slice_in_dim(array, start, stop, stride, axis=at)

    def _cuts(self) -> tuple[Array, list[Callable[[Array], Array]]]:
        """Returns an array and the functions that cut pieces of the patches out of it.

        Stacking all shifts of the images at once is slow on a GPU when there are many of them,
        because each entry of the result searches for its operand. The axes of the window are
        therefore stacked one after the other, the last axis first. The shifts are taken one by one
        only where a row of the window is too large for a piece.
        """
        rank = len(self.window)
        backend = jax.default_backend()
        per_example = self.pixels.dtype.itemsize * self.pixels.shape[0]
        room = max(PIECE.get(backend, PIECE["cpu"]), PATCHES.get(backend, 0) // per_example)
        shift = max(1, math.prod((*self.pixels.shape[1:3], *self.out, self.pixels.shape[-1])))
        rows = room // (shift * math.prod(self.window[1:]))

        def stacked(parts: list[Array]) -> Array:
            return jnp.stack(parts, axis=3 + rank)

        def flat(part: Array) -> Array:
            """[B, G, n, out..., shifts..., C] as [B, G, T, K]."""
            return part.reshape(*self.pixels.shape[:2], self.positions, -1)

        def shifts(offsets: Sequence[tuple[int, ...]], source: Array) -> Array:
            seen = []
            for offset in offsets:
                part = source
                for axis, i in enumerate(offset):
                    part = self.seen(part, axis, i, at=3 + axis)
                seen.append(part)
            return flat(stacked(seen))

        def some_rows(offsets: Sequence[int], source: Array) -> Array:
            return flat(stacked([self.seen(source, 0, i, at=3) for i in offsets]))

        if not rows:
            offsets = list(np.ndindex(*self.window))
            cuts = [functools.partial(shifts, some) for some in _chunks(offsets, room // shift)]
            return self.pixels, cuts
        source = self.pixels
        for axis in reversed(range(1, rank)):
            source = stacked(
                [self.seen(source, axis, i, at=3 + axis) for i in range(self.window[axis])]
            )
            # Without the barrier the compiler would merge the stages into one.
            source = lax.optimization_barrier(source)
        cuts = [functools.partial(some_rows, some) for some in _chunks(range(self.window[0]), rows)]
        return source, cuts


Side: TypeAlias = Vectors | OneHot | Patches


class Shortened(NamedTuple):
    """A side whose numbers were rounded to 11 bits: scale · side, and what that left out.

    Attributes:
        side: the rounded vectors, in float16; or a side as it was, with a scale of one.
        scale: a power of two for each example and group, [B, G, 1, 1].
        lost: the lengths of what rounding left out, [B, G, T].
    """

    side: Side
    scale: Array
    lost: Array


def shortened(side: Side) -> Shortened:
    """Rounds a side's vectors to 11 bits.

    The largest number of an example is scaled to [2¹⁴, 2¹⁵), so that numbers which are 2²⁹ times
    smaller still have all bits. Nothing is assumed about the rounding: `lost` is measured.
    """
    if isinstance(side, OneHot):
        ones = jnp.ones((*side.ones.shape[:2], 1, 1), wide_dtype())
        return Shortened(side, ones, jnp.zeros(side.ones.shape, wide_dtype()))
    array = lax.convert_element_type(side.array, jnp.float32)
    largest = jnp.abs(array).max(axis=tuple(range(2, array.ndim)), keepdims=True)
    exponent = jnp.clip(jnp.frexp(largest)[1] - 15, -110, 113)
    # Not `astype(float16)` and back, which the compiler is free to leave out.
    rounded = lax.reduce_precision(array * power_of_two(-exponent), 5, 10)
    lost = array - rounded * power_of_two(exponent)
    scale = wide(power_of_two(exponent)).reshape(*array.shape[:2], 1, 1)
    short = lax.convert_element_type(rounded, jnp.float16)
    return Shortened(side.holding(short), scale, side.holding(lost).lengths())


def power_of_two(exponent: Array) -> Array:
    """Returns 2^exponent in float32, exactly, for exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def is_short(side: Side) -> bool:
    """Returns whether a side's vectors are in float16 because they were shortened."""
    return not isinstance(side, OneHot) and side.array.dtype == jnp.float16


def inner(one: Side, other: Side) -> Array:
    """Returns the inner products of all vectors of one side with all of another, [B, G, T, S]."""
    if isinstance(other, OneHot):
        if not isinstance(one, OneHot):
            return inner(other, one).swapaxes(-1, -2)
        same = one.ones[..., :, None] == other.ones[..., None, :]
        return (same & (one.ones[..., :, None] >= 0)).astype(wide_dtype())
    if isinstance(one, OneHot):
        # One-hot vectors pick entries: ⟨e_k, x⟩ = x_k, for ones [B, 1, T] and x [B, 1, S, K].
        assert isinstance(other, Vectors)
        picked = jnp.take_along_axis(
            other.values[:, :, None], jnp.maximum(one.ones, 0)[..., :, None, None], axis=-1
        )[..., 0]
        return wide(jnp.where(one.ones[..., :, None] >= 0, picked, 0))
    if isinstance(one, Patches) and isinstance(other, Patches) and _prefers_pixels(one, other):
        return _pixel_products(one, other)
    ours, theirs = (
        jnp.concatenate(side.pieces(lambda piece: piece), axis=-1) for side in (one, other)
    )
    if ours.shape[2] == theirs.shape[2] == 1:
        # A single position: a fused reduction, where a batch of tiny products would be slow.
        return (wide(ours) * wide(theirs)).sum(axis=-1, keepdims=True)
    return _products("bgtk,bgsk->bgts", ours, theirs)


def _products(formula: str, one: Array, other: Array) -> Array:
    """Returns products that are summed over the last axis of both, in float64.

    Shortened numbers are added in float32, in runs of `RUN`.
    """
    if not one.dtype == other.dtype == jnp.float16:
        # Without an explicit precision, `jax.default_matmul_precision` may shorten even float64.
        return jnp.einsum(formula, wide(one), wide(other), precision="highest")
    extra = -one.shape[-1] % RUN if one.shape[-1] > RUN else 0
    run = min(one.shape[-1], RUN)

    def in_runs(array: Array) -> Array:
        array = jnp.pad(array, (*((0, 0),) * (array.ndim - 1), (0, extra)))
        return array.reshape(*array.shape[:-1], -1, run)

    inputs, output = formula.split("->")
    left, right = (part[:-1] + "z" + part[-1] for part in inputs.split(","))
    found = jnp.einsum(
        f"{left},{right}->z{output}",
        in_runs(one),
        in_runs(other),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return wide(found).sum(axis=0)


def _prefers_pixels(one: Patches, other: Patches) -> bool:
    """Returns whether inner products of all pixels are at most half the work of all patches'."""
    pixels = math.prod(one.pixels.shape[2:-1]) * math.prod(other.pixels.shape[2:-1])
    return 2 * pixels <= one.positions * other.positions * math.prod(one.window)


def _pixel_products(one: Patches, other: Patches) -> Array:
    """Returns the inner products of all patches of two sides, [B, G, T, S], from pixels.

    ⟨patch_t, patch_s⟩ = Σ_δ ⟨x_{t+δ}, y_{s+δ}⟩: the inner products of pixels are summed over the
    window, one axis of it at a time.
    """
    x, y = one.pixels, other.pixels
    rank = len(one.window)
    flat = lambda array: array.reshape(*array.shape[:2], -1, array.shape[-1])  # noqa: E731
    products = _products("bgpc,bgqc->bgpq", flat(x), flat(y))
    products = products.reshape(*x.shape[:-1], *y.shape[2:-1])
    for axis in reversed(range(rank)):
        # Axes: B, G, n, spatial..., m, spatial...
        terms = [
            other.seen(one.seen(products, axis, i, at=3 + axis), axis, i, at=4 + rank + axis)
            for i in range(one.window[axis])
        ]
        products = functools.reduce(jnp.add, terms)
    return products.reshape(*x.shape[:2], one.positions, -1)


def wide(array: Array) -> Array:
    return lax.convert_element_type(array, wide_dtype())


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    size = max(1, size)
    return [items[start : start + size] for start in range(0, len(items), size)]
