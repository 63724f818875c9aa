"""The kinds of layers whose gradients ghost clipping knows, one class each.

A layer is a site of the loss (see `_tracing`) read as one of `KINDS`. A kind that is a sum of outer
products (see `_factors`) says which sites it recognises, how the two sides of the products lie in
the weight, and how to make them from the layer's input and cotangent; everything else follows. A
new kind is one class and its entry in `KINDS`, before `AnyOperation`.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrordp.privacy import sums
from mirrordp.privacy.ghost import _factors, _short
from mirrordp.privacy.ghost._factors import Factors
from mirrordp.privacy.ghost._short import Short
from mirrordp.privacy.ghost._sides import OneHot, Patches, Vectors
from mirrordp.privacy.ghost._tracing import Site

Array = jax.Array

MANY_POSITIONS = 32
"""From so many positions on, an iteration's product is worth the sum of two gradients."""


class Axes(NamedTuple):
    """The axes of the weight that each side spans, in order, and those that are groups."""

    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


class Sizes(NamedTuple):
    """The sizes of one example's gradient: T positions, K and N entries, G groups."""

    positions: int
    left: int
    right: int
    groups: int


@dataclasses.dataclass(frozen=True)
class Layer(abc.ABC):
    """A place where parameters meet data, read as a layer of some kind."""

    site: Site

    @classmethod
    @abc.abstractmethod
    def recognises(cls, site: Site) -> bool:
        """Returns whether a site is a layer of this kind."""

    @property
    def by_factors(self) -> bool:
        """Whether G_i is better formed from factors than by JAX's own derivative."""
        return False

    def operations(self) -> int:
        """Returns about how many operations one example's gradient takes."""
        arrays = (*self.site.param_shapes, *self.site.out_shapes)
        return 2 * math.prod(self.site.loops) * max(math.prod(array.shape) for array in arrays)


class AnyOperation(Layer):
    """An operation about which nothing is known but how JAX differentiates it."""

    @classmethod
    def recognises(cls, site: Site) -> bool:
        return True


class OuterProducts(Layer):
    """A layer with one weight, whose gradient is G_i = Σ_t L_t ⊗ R_t for each group of the weight.

    Attributes:
        one_hot: whether L is one-hot. G_i is then never formed, and Σ_i c_i G_i is exact.
    """

    one_hot: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def axes(self) -> Axes:
        """How the factors lie in the weight."""

    @abc.abstractmethod
    def factors_of(self, operand: Array, cotangent: Array) -> Factors:
        """Returns the factors for all examples; the iterations of loops are positions.

        Args:
            operand: the site's BATCH operand, [B, *loops, ...].
            cotangent: the cotangent of its output, [B, *loops, ...].
        """

    @classmethod
    def recognises(cls, site: Site) -> bool:
        """Returns whether a site has one weight, and only numbers that are real and exist."""
        arrays = (*site.param_shapes, *site.out_shapes)
        return (
            len(site.param_positions) == 1
            and 0 not in site.loops
            and all(array.size and jnp.issubdtype(array.dtype, jnp.floating) for array in arrays)
        )

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        """The shape and type of the weight, as one iteration of a loop sees it."""
        return self.site.param_shapes[0]

    @property
    def num_groups(self) -> int:
        """The number of groups of the weight, as one iteration of a loop sees it."""
        return math.prod(self.weight.shape[i] for i in self.axes.groups)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the gradient, from shapes alone."""
        stacks, loops = (math.prod(lengths) for lengths in self._loops)
        left = math.prod(self.weight.shape[i] for i in self.axes.left)
        right = self.weight.size // (self.num_groups * left)
        positions = loops * self.site.out_shapes[0].size // (self.num_groups * right)
        return Sizes(positions, left, right, stacks * self.num_groups)

    @property
    def by_factors(self) -> bool:
        # In a loop, JAX would add up whole gradients, one iteration's few positions at a time.
        loops = math.prod(self._loops[1])
        return loops > 1 and self.sizes.positions < MANY_POSITIONS * loops

    @property
    def overlap(self) -> int:
        """How many patches an entry of the layer's input is in, about."""
        return 1

    @property
    def precision(self) -> lax.Precision:
        """The site's precision, or the highest where the site names an algorithm instead."""
        chosen = self.site.params.get("precision")
        chosen = chosen[0] if isinstance(chosen, tuple) else chosen
        if chosen is None:
            return lax.Precision.DEFAULT
        return chosen if isinstance(chosen, lax.Precision) else lax.Precision.HIGHEST

    @property
    def _loops(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths of the loops in which the weight differs, and of the others."""
        lengths = list(zip(self.site.loops, self.site.varies[0], strict=True))
        return tuple(n for n, varies in lengths if varies), tuple(n for n, v in lengths if not v)

    def factors(self, captured: Sequence[Array], cotangent: Array) -> Factors:
        """Returns the factors for all examples; see `factors_of`.

        Iterations of a loop that see one weight are positions. Where each sees its own (a loop over
        stacked layers), they are groups.
        """
        stacks, loops = self._loops
        if not stacks:
            return self.factors_of(captured[0], cotangent)
        site = self.site
        order = sorted(range(len(site.loops)), key=lambda depth: not site.varies[0][depth])
        batch = captured[0].shape[0]

        def with_stacks_in_batch(array: Array) -> Array:
            array = array.transpose(0, *(1 + i for i in order), *range(1 + len(order), array.ndim))
            return array.reshape(-1, *array.shape[1 + len(stacks) :])

        def with_stacks_in_groups(array: Array) -> Array:
            groups = math.prod(stacks) * array.shape[1]
            return array.reshape(batch, groups, *array.shape[2:])

        inner = dataclasses.replace(site, loops=loops, varies=((False,) * len(loops),))
        arrays = (with_stacks_in_batch(array) for array in (captured[0], cotangent))
        return jax.tree.map(with_stacks_in_groups, type(self)(inner).factors_of(*arrays))

    @property
    def is_shared(self) -> bool:
        """Whether several iterations of a loop see the same weight."""
        return math.prod(self._loops[1]) > 1

    def short_gradient(self, operand: Array, cotangent: Array) -> Short:
        """Returns the weight's gradient of one example, in one iteration of each loop."""
        site = dataclasses.replace(self.site, loops=(), varies=((),))
        layer = type(self)(site)
        values, exponent = layer.short_product(layer.factors([operand[None]], cotangent[None]))
        return Short(values[0], exponent[0])

    def short_product(self, part: Factors) -> Short:
        """Returns the weight's gradients of all examples, in the weight's own layout."""
        values, exponent = _short.product(part)
        return Short(self.weight_gradient(values), exponent)

    def product(self, part: Factors) -> Array:
        """Returns G_i itself, [B, G, K, N]."""
        return _factors.product(part, self.precision)

    def weighted_sum(
        self, part: Factors, weights: Array, *, block: int, exponent: int
    ) -> sums.Halves:
        """Returns Σ_i c_i G_i, [G, K, N], as halves of integers; see `_factors.block_sum`."""
        return _factors.block_sum(
            part, weights, precision=self.precision, block=block, exponent=exponent
        )

    def weight_gradient(self, gradient: Array) -> Array:
        """Returns [..., G, K, N] in the weight's own layout, [..., *stacks, *weight.shape]."""
        stacks, _ = self._loops
        gradient = gradient.reshape(*gradient.shape[:-3], *stacks, -1, *gradient.shape[-2:])
        return self._laid_out(gradient)

    def _laid_out(self, gradient: Array) -> Array:
        groups, left, right = self.axes
        return self._in_order(gradient, gradient.shape[:-3], (*groups, *left, *right))

    def _in_order(self, gradient: Array, lead: Sequence[int], order: Sequence[int]) -> Array:
        """Brings the axes of the weight, which follow `lead` in this order, into their own."""
        gradient = gradient.reshape(*lead, *(self.weight.shape[i] for i in order))
        first = len(lead)
        return gradient.transpose(*range(first), *(first + int(i) for i in np.argsort(order)))

    def operations(self) -> int:
        positions, left, right, groups = self.sizes
        return 2 * groups * positions * left * right


class MatrixProduct(OuterProducts):
    """A dense layer, or any other product of a weight with data that `dot_general` computes."""

    @classmethod
    def recognises(cls, site: Site) -> bool:
        return site.name == "dot_general" and super().recognises(site)

    @property
    def axes(self) -> Axes:
        side = self.site.param_positions[0]
        contract, batch = (tuple(part[side]) for part in self.site.params["dimension_numbers"])
        everything = range(len(self.weight.shape))
        return Axes(batch, contract, tuple(i for i in everything if i not in contract + batch))

    def factors_of(self, operand: Array, cotangent: Array) -> Factors:
        side = self.site.param_positions[0]
        contracts, batches = self.site.params["dimension_numbers"]
        data_contract, data_batch = contracts[1 - side], batches[1 - side]
        first = 1 + len(self.site.loops)
        data_free = [
            i for i in range(operand.ndim - first) if i not in (*data_contract, *data_batch)
        ]
        left = _arrange(operand, first, data_batch, data_free, data_contract)
        # The output's axes are: batch, free axes of the left operand, free axes of the right one.
        num_batch, num_free = len(data_batch), len(self.axes.right)
        ours = range(num_batch, num_batch + num_free)
        theirs = range(num_batch, num_batch + len(data_free))
        if side == 1:
            ours = [i + len(data_free) for i in ours]
        else:
            theirs = [i + num_free for i in theirs]
        right = _arrange(cotangent, first, range(num_batch), theirs, ours)
        return Factors(Vectors(left), Vectors(right))


def _arrange(array: Array, first: int, groups, positions, entries) -> Array:
    """[B, *loops, ...] as [B, groups, loops and positions, entries]."""
    groups, positions, entries = (
        [first + i for i in part] for part in (groups, positions, entries)
    )
    array = array.transpose([0, *groups, *range(1, first), *positions, *entries])
    cuts = [1, 1 + len(groups), len(groups) + first + len(positions), array.ndim]
    parts = (math.prod(array.shape[i:j]) for i, j in itertools.pairwise(cuts))
    return array.reshape(array.shape[0], *parts)


class Convolution(OuterProducts):
    """A convolution with a kernel of any number of axes, groups, strides and dilations."""

    @classmethod
    def recognises(cls, site: Site) -> bool:
        return (
            site.name == "conv_general_dilated"
            and super().recognises(site)
            and site.param_positions == (1,)
            and len(site.param_shapes[0].shape) > 2
            and site.params["batch_group_count"] == 1
        )

    @property
    def by_factors(self) -> bool:
        # JAX's derivative for each example is a convolution with as many groups as examples.
        return True

    @property
    def overlap(self) -> int:
        window = math.prod(self.weight.shape[i] for i in self.axes.left[:-1])
        return max(1, window // math.prod(self.site.params["window_strides"]))

    @property
    def axes(self) -> Axes:
        # The output axis runs over the groups and over the outputs of each.
        out, inputs, *window = self.site.params["dimension_numbers"].rhs_spec
        return Axes((out,) if self.num_groups > 1 else (), (*window, inputs), (out,))

    @property
    def num_groups(self) -> int:
        return self.site.params["feature_group_count"]

    def factors_of(self, operand: Array, cotangent: Array) -> Factors:
        params = self.site.params
        lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
        groups = self.num_groups
        batch, first = operand.shape[0], 1 + len(self.site.loops)

        def channels_last(array: Array, spec: Sequence[int]) -> Array:
            """All examples, iterations and inner batch rows side by side: [M, spatial..., C]."""
            array = array.reshape(-1, *array.shape[first:])
            array = array.transpose([0, 1 + spec[0], *(1 + i for i in spec[2:]), 1 + spec[1]])
            return array.reshape(-1, *array.shape[2:])

        images, deltas = channels_last(operand, lhs_spec), channels_last(cotangent, out_spec)
        config = [
            (low, high, interior - 1)
            for (low, high), interior in zip(params["padding"], params["lhs_dilation"], strict=True)
        ]
        padded = lax.pad(images, jnp.zeros([], images.dtype), [(0, 0, 0), *config, (0, 0, 0)])
        padded = padded.reshape(batch, -1, *padded.shape[1:-1], groups, padded.shape[-1] // groups)
        left = Patches(
            jnp.moveaxis(padded, -2, 1),
            tuple(self.weight.shape[i] for i in rhs_spec[2:]),
            deltas.shape[1:-1],
            tuple(params["window_strides"]),
            tuple(params["rhs_dilation"]),
        )
        right = deltas.reshape(batch, -1, groups, deltas.shape[-1] // groups).transpose(0, 2, 1, 3)
        return Factors(left, Vectors(right))

    def _laid_out(self, gradient: Array) -> Array:
        _, left, right = self.axes
        lead = gradient.shape[:-3]
        window = [self.weight.shape[i] for i in left]
        gradient = gradient.reshape(*lead, gradient.shape[-3], *window, -1)
        # The axis of groups goes before the outputs of each.
        first, last = len(lead), gradient.ndim - 1
        gradient = gradient.transpose(*range(first), *range(first + 1, last), first, last)
        return self._in_order(gradient, lead, (*left, *right))


class Lookup(OuterProducts):
    """A lookup of whole rows of a table, as in an embedding."""

    one_hot = True

    @property
    def by_factors(self) -> bool:
        return False

    @classmethod
    def recognises(cls, site: Site) -> bool:
        if (
            site.name != "gather"
            or not super().recognises(site)
            or site.param_positions != (0,)
            or any(site.varies[0])
        ):
            return False
        numbers = site.params["dimension_numbers"]
        shape, out = site.param_shapes[0].shape, site.out_shapes[0].shape
        starts, collapsed = tuple(numbers.start_index_map), tuple(numbers.collapsed_slice_dims)
        trailing = tuple(range(len(out) - len(shape) + len(collapsed), len(out)))
        # A mapped `dynamic_slice` also says where in a row to begin, which is clipped to 0 because
        # rows are whole, and keeps the first axis.
        clips = site.params["mode"] == lax.GatherScatterMode.CLIP
        return (
            len(shape) >= 1
            and collapsed in ((0,), ())
            and (starts == (0,) or (clips and starts[:1] == (0,)))
            and not numbers.operand_batching_dims
            and tuple(numbers.offset_dims) == trailing
            and tuple(site.params["slice_sizes"]) == (1, *shape[1:])
        )

    @property
    def axes(self) -> Axes:
        return Axes((), (0,), tuple(range(1, len(self.weight.shape))))

    def factors_of(self, operand: Array, cotangent: Array) -> Factors:
        batch, (rows, *row) = operand.shape[0], self.weight.shape
        index = _signed(operand)[..., 0].reshape(batch, 1, -1)
        if self.site.params["mode"] == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, rows - 1)
        # Lookups outside the table are filled with a constant: their row of the gradient is zero.
        index = jnp.where((index >= 0) & (index < rows), index, -1)
        right = cotangent.reshape(batch, 1, index.shape[-1], math.prod(row))
        right = jnp.where(index[..., None] >= 0, right, 0)
        return Factors(OneHot(index), Vectors(right))

    def weighted_sum(
        self, part: Factors, weights: Array, *, block: int, exponent: int
    ) -> sums.Halves:
        del block
        rows = self.weight.shape[0]
        return _factors.scattered_sum(part, weights, rows=rows, exponent=exponent)


def _signed(index: Array) -> Array:
    """Returns indices in a type that holds -1 and the number of rows of any table."""
    if index.dtype in (jnp.int32, jnp.int64):
        return index
    largest = min(jnp.iinfo(index.dtype).max, jnp.iinfo(jnp.int32).max)
    return jnp.minimum(index, jnp.asarray(largest, index.dtype)).astype(jnp.int32)


KINDS: tuple[type[Layer], ...] = (MatrixProduct, Convolution, Lookup, AnyOperation)
"""The kinds of layers; the first that recognises a site is taken."""


def layer_at(site: Site) -> Layer:
    """Returns a site as a layer of the first kind that recognises it."""
    return next(kind(site) for kind in KINDS if kind.recognises(site))
