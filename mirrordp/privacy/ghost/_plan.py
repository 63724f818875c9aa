"""The choice of a path for each parameter: how its per-example norms are found."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from mirrordp.privacy.ghost._layers import Layer, OuterProducts, layer_at
from mirrordp.privacy.ghost._tracing import Program


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


@dataclasses.dataclass(frozen=True)
class Plan:
    """The path of each trainable leaf.

    Attributes:
        layers: the program's sites, each read as a layer.
        gram: the uses of leaves whose norms are found by Gram matrices.
        product: the one use of leaves whose gradients are formed from factors.
        explicit: leaves whose per-example gradients are pulled back through the parameters' own
            computation.
        unused: leaves that no site depends on; their gradient is zero.
    """

    layers: tuple[Layer, ...]
    gram: dict[int, tuple[Use, ...]]
    product: dict[int, Use]
    explicit: tuple[int, ...]
    unused: tuple[int, ...]

    @staticmethod
    def of(program: Program) -> "Plan":
        """Chooses the path of every leaf of a program."""
        layers = tuple(map(layer_at, program.sites))
        gram, product, explicit, unused = {}, {}, [], []
        for leaf in range(program.num_leaves):
            numbers = [number for number, layer in enumerate(layers) if leaf in layer.site.leaves]
            found = [layer for layer in (layers[n] for n in numbers) if _has_factors(layer)]
            if not numbers:
                unused.append(leaf)
                continue
            if len(found) < len(numbers):
                explicit.append(leaf)
                continue
            swaps = _common_layout(found)
            uses = tuple(map(Use, numbers, found, swaps or [False] * len(found)))
            if swaps and _prefers_gram(found):
                gram[leaf] = uses
            elif len(uses) == 1 and not found[0].one_hot:
                product[leaf] = uses[0]
            elif swaps and any(layer.one_hot for layer in found):
                gram[leaf] = uses
            else:
                explicit.append(leaf)
        return Plan(layers, gram, product, tuple(explicit), tuple(unused))

    def reason(self, leaf: int) -> str:
        """Returns in words why a leaf takes explicit gradients."""
        for layer in self.layers:
            if leaf in layer.site.leaves and not _has_factors(layer):
                if isinstance(layer, OuterProducts):
                    return f"behind a function of parameters, before {layer.site.name}"
                return f"enters through {layer.site.name}"
        return "used several times in layouts that differ"


def _has_factors(layer: Layer) -> TypeGuard[OuterProducts]:
    """Returns whether a layer's factors give the gradient of a leaf, not of a function of it."""
    return isinstance(layer, OuterProducts) and layer.site.views[0] is not None


def _prefers_gram(layers: Sequence[OuterProducts]) -> bool:
    """Returns whether Gram matrices over all positions hold fewer numbers than the gradient."""
    positions = sum(layer.sizes.positions for layer in layers)
    return 2 * positions**2 <= layers[0].sizes.left * layers[0].sizes.right


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
