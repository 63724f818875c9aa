"""The choice of a path for each parameter: how its per-example norms are found."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrordp.privacy.ghost import _cost, _factors
from mirrordp.privacy.ghost._cost import Machine, Task
from mirrordp.privacy.ghost._layers import Layer, MatrixProduct, OuterProducts, layer_at
from mirrordp.privacy.ghost._short import Short
from mirrordp.privacy.ghost._tracing import Form, Program
from mirrordp.privacy.turns import Turn

SHORTENS = {"gpu": True}
"""The backends whose matrix units shorten float32 inputs to 11 bits, unless told otherwise."""


class Use(NamedTuple):
    """A layer that uses a parameter.

    Attributes:
        number: of the layer's site.
        layer: the layer.
        swapped: whether its sides are swapped to match the parameter's other uses.
    """

    number: int
    layer: OuterProducts
    swapped: bool


class TurnedUse(NamedTuple):
    """A layer whose factors are turned, instead of its gradient, on one side or both.

    Attributes:
        use: the layer; its sides are swapped if they lie along the columns and rows of the leaf.
        left: whether the factors along the leaf's rows are turned, not the gradient.
        right: likewise along its columns.
        formed: whether the gradient is formed; with a single position it is not.
    """

    use: Use
    left: bool
    right: bool
    formed: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The path of each trainable leaf.

    Attributes:
        layers: the program's sites, each read as a layer.
        gram: the uses of leaves whose norms are found by Gram matrices.
        product: the use of leaves whose gradients are formed at that place.
        turned: the use of leaves whose factors are turned.
        lookups: further uses of some of these leaves, by lookups, whose gradients are not formed.
        explicit: leaves whose per-example gradients are pulled back through the parameters' own
            computation.
        unused: leaves that no site depends on; their gradient is zero.
        short: the sites whose gradients are formed with 11 bits.
    """

    layers: tuple[Layer, ...]
    gram: dict[int, tuple[Use, ...]]
    product: dict[int, Use]
    turned: dict[int, TurnedUse]
    lookups: dict[int, tuple[Use, ...]]
    explicit: tuple[int, ...]
    unused: tuple[int, ...]
    short: frozenset[int]

    @staticmethod
    def of(
        program: Program,
        batch_size: int,
        machine: Machine | None = None,
        turns: Sequence[Turn] | None = None,
    ) -> "Plan":
        """Chooses the path of every leaf of a program, for batches of this size on this machine.

        With `turns`, every leaf has its gradients turned.
        """
        machine = machine or _cost.machine()
        layers = tuple(map(layer_at, program.sites))
        gram, product, turned, lookups, explicit, unused = {}, {}, {}, {}, [], []
        for leaf in range(program.num_leaves):
            numbers = [number for number, layer in enumerate(layers) if leaf in layer.site.leaves]
            found = [layer for layer in (layers[n] for n in numbers) if _has_factors(layer)]
            if not numbers:
                unused.append(leaf)
                continue
            if len(found) < len(numbers) or (turns is not None and len(numbers) > 1):
                explicit.append(leaf)
                continue
            if turns is not None:
                shape = program.jaxpr.in_avals[leaf].shape
                if early := _turned_use(numbers[0], found[0], turns[leaf], shape):
                    turned[leaf] = early
                else:
                    explicit.append(leaf)
                continue
            swaps = _common_layout(found)
            uses = tuple(map(Use, numbers, found, swaps or [False] * len(found)))
            if swaps and _prefers_gram(task_of(found, batch_size, machine), machine):
                gram[leaf] = uses
            elif len(uses) == 1:
                product[leaf] = uses[0]
            elif tied := _tied(uses):
                product[leaf], lookups[leaf] = tied
            else:
                explicit.append(leaf)
        short = frozenset(
            number
            for number, layer in enumerate(layers)
            if isinstance(layer, OuterProducts) and task_of([layer], batch_size, machine).short
        )
        return Plan(layers, gram, product, turned, lookups, tuple(explicit), tuple(unused), short)

    def results_probed(self, number: int) -> bool:
        """Returns whether a site needs the cotangent of its result, not of its PARAM operands."""
        return (
            self.never_formed(number)
            or self.layers[number].by_factors
            or any(turned.use.number == number for turned in self.turned.values())
        )

    def never_formed(self, number: int) -> bool:
        """Returns whether a site's gradients are not formed."""
        turned = tuple(of.use for of in self.turned.values() if not of.formed)
        without = (*self.gram.values(), *self.lookups.values(), turned)
        return any(use.number == number for uses in without for use in uses)

    def is_short(self, leaf: int) -> bool:
        """Returns whether all formed gradients that make up a leaf's are short."""
        return all(n in self.short for n, at in enumerate(self.layers) if leaf in at.site.leaves)

    def is_bfloat16(self, leaf: int) -> bool:
        """Whether each site of a leaf has a weight of 16 bits with the range of float32."""
        sites = [layer for layer in self.layers if leaf in layer.site.leaves]
        return all(
            isinstance(layer, OuterProducts) and layer.weight.dtype == jnp.bfloat16
            for layer in sites
        )

    def forms(self) -> dict[int, Form]:
        """Returns how gradients are formed at sites where JAX's own derivative has more bits."""
        found = {}
        for number in self.short:
            layer = self.layers[number]
            if not self.results_probed(number) and isinstance(layer, OuterProducts):
                found[number] = layer.short_gradient
        return found

    def gradient_shapes(self, number: int) -> list[Any]:
        """Returns shapes and types of an example's gradients that are formed at a site."""
        shapes = self.layers[number].site.operand_shapes()
        if number not in self.short:
            return list(shapes)
        (shape,), (param,) = shapes, self.layers[number].site.param_shapes
        lead = shape.shape[: len(shape.shape) - len(param.shape)]
        zeros = lambda: Short(jnp.zeros(shape.shape, jnp.float16), jnp.zeros(lead))  # noqa: E731
        return [jax.eval_shape(zeros)]

    def reason(self, leaf: int) -> str:
        """Returns in words why a leaf takes explicit gradients."""
        for layer in self.layers:
            if leaf in layer.site.leaves and not _has_factors(layer):
                if isinstance(layer, OuterProducts):
                    return f"behind a function of parameters, before {layer.site.name}"
                return f"enters through {layer.site.name}"
        if self.had_a_choice(leaf):
            return "used several times, and cheaper than Gram matrices"
        return "used several times in layouts that differ"

    def had_a_choice(self, leaf: int) -> bool:
        """Returns whether a leaf could have Gram matrices."""
        uses = [layer for layer in self.layers if leaf in layer.site.leaves]
        found = list(filter(_has_factors, uses))
        return len(found) == len(uses) and _common_layout(found) is not None


def task_of(layers: Sequence[OuterProducts], batch_size: int, machine: Machine) -> Task:
    """Returns the sizes of a parameter's gradients, for the layers that use it."""
    first = layers[0].sizes
    task = Task(
        examples=batch_size,
        positions=sum(layer.sizes.positions for layer in layers),
        left=first.left,
        right=first.right,
        groups=first.groups,
        inputs=first.left // layers[0].overlap,
        block=sum_roundoff(layers, batch_size).block,
        width=max(jnp.dtype(layer.weight.dtype).itemsize for layer in layers),
        picked=all(layer.one_hot for layer in layers),
    )
    # In a loop, gradients of all iterations are kept while the residuals of others are.
    looped = all(layer.site.loops for layer in layers)
    short = all(map(_may_be_short, layers)) and _cost.prefers_short(task, machine, looped)
    return task._replace(short=short)


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


def _tied(uses: Sequence[Use]) -> tuple[Use, tuple[Use, ...]] | None:
    """Parts the uses of a table into one product and lookups; None if they are others."""
    products = [use for use in uses if not use.layer.one_hot]
    lookups = tuple(use for use in uses if use.layer.one_hot)
    views = [use.layer.site.views[0] for use in uses]
    # Rows must be found in the product's own layout.
    found = all(view and view.axes and sorted(view.axes) == [0, 1] for view in views)  # pyright: ignore
    plain = all(use.layer.site.views[0].axes == (0, 1) for use in lookups)  # pyright: ignore
    if len(products) != 1 or not lookups or not found or not plain:
        return None
    return products[0], lookups


def _turned_use(
    number: int, layer: OuterProducts, turn: Turn, shape: tuple[int, ...]
) -> TurnedUse | None:
    """Returns how factors are turned; None where turning the formed gradient is no more work.

    With T positions, to turn the left factors takes T·K² operations, and the gradient K²·N; to turn
    the right ones T·N², and the gradient K·N².
    """
    (rows, columns), positions = turn.scale.shape, layer.sizes.positions
    formed = positions > 1
    left = turn.left is not None and not (formed and positions >= columns)
    right = turn.right is not None and not (formed and positions >= rows)
    if formed and not left and not right:
        return None
    swapped = _swapped_in(layer, shape, rows, columns)
    return None if swapped is None else TurnedUse(Use(number, layer, swapped), left, right, formed)


def _swapped_in(
    layer: OuterProducts, shape: tuple[int, ...], rows: int, columns: int
) -> bool | None:
    """Returns whether a layer's sides must be swapped to be rows and columns of its leaf.

    None if they are not, because the leaf has groups or other axes between.
    """
    view, sizes = layer.site.views[0], layer.sizes
    assert view is not None
    if layer.one_hot or sizes.groups != 1:
        return None
    # Each entry's number in the leaf tells where the entry lies.
    numbers = np.arange(rows * columns)
    given = view.rearranged(numbers.reshape(shape))  # pyright: ignore[reportArgumentType]
    for swapped in (False, True):
        matrix = numbers.reshape(rows, columns)
        matrix = matrix.T if swapped else matrix
        if matrix.shape != (sizes.left, sizes.right):
            continue
        laid_out = layer.weight_gradient(matrix[None])  # pyright: ignore[reportArgumentType]
        # The patches of a convolution can only be on the left.
        if np.array_equal(laid_out, given) and (not swapped or isinstance(layer, MatrixProduct)):
            return swapped
    return None


def _may_be_short(layer: OuterProducts) -> bool:
    """Returns whether a layer's gradients, if formed, have 11 bits in ordinary training too."""
    return (
        SHORTENS.get(jax.default_backend(), False)
        and not layer.one_hot
        and layer.precision is lax.Precision.DEFAULT
        and layer.weight.dtype == layer.site.out_shapes[0].dtype == jnp.float32
        # Where iterations share a weight, JAX adds up their gradients.
        and (layer.by_factors or not layer.is_shared)
    )


def _has_factors(layer: Layer) -> TypeGuard[OuterProducts]:
    """Returns whether a layer's factors give the gradient of a leaf, not of a function of it."""
    return isinstance(layer, OuterProducts) and layer.site.views[0] is not None


def _prefers_gram(task: Task, machine: Machine) -> bool:
    """Returns whether Gram matrices are cheaper than forming each example's gradient."""
    by_gram, by_product = _cost.gram_cost(task, machine), _cost.product_cost(task, machine)
    return _cost.price(by_gram, machine) <= _cost.price(by_product, machine)


def _common_layout(layers: Sequence[OuterProducts]) -> list[bool] | None:
    """Returns which layers' sides must be swapped to match the first; None if they cannot."""

    def canonical(layer: OuterProducts) -> tuple:
        view = layer.site.views[0]
        assert view is not None
        if (named := view.axes) is None:
            return tuple((view.layout, part) for part in layer.axes)
        groups, left, right = (
            tuple(named[i] for i in part if named[i] is not None) for part in layer.axes
        )
        return view.stacked + groups, left, right

    first = canonical(layers[0])
    swaps = []
    for layer in layers:
        groups, left, right = canonical(layer)
        if (groups, left, right) == first:
            swaps.append(False)
        elif (groups, right, left) == first and not layer.axes.groups:
            swaps.append(True)
        else:
            return None
    return swaps
