"""Which parameters are trained: a choice of leaves as one hashable value.

Gradients are taken, clipped, summed and noised for the trainable leaves only; the other leaves are
frozen. A step is a static argument of `jax.jit`, so the choice has to be hashable, which a tree of
booleans is not.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mirrordp.privacy.sums import float32_or_wider
from mirrordp.types import Params, PyTree

_ONE_LEAF = jax.tree.structure(True)


@dataclasses.dataclass(frozen=True)
class Trainable:
    """A choice of trainable leaves, made from a tree of booleans or from a prefix of one.

    >>> head_only = Trainable.of({"backbone": False, "head": True})
    >>> head_only.part({"backbone": [1.0, 2.0], "head": {"w": 3.0}})
    {'backbone': [None, None], 'head': {'w': 3.0}}
    >>> head_only == Trainable.of({"head": True, "backbone": False})
    True

    Two choices are equal if the trees they were made from are equal; a prefix differs from the full
    tree that it stands for.

    Attributes:
        treedef: the structure of the tree of booleans.
        flags: the leaves of the tree of booleans.
    """

    treedef: Any = _ONE_LEAF
    flags: tuple[bool, ...] = (True,)

    @staticmethod
    def of(mask: "PyTree | Trainable | None") -> "Trainable":
        """Makes a choice from a mask.

        Args:
            mask: a tree of booleans over the parameters, or a prefix of one, in which a boolean
                covers a whole subtree; None, like True, if every leaf is trainable; or a
                `Trainable`, which is returned unchanged.
        """
        if isinstance(mask, Trainable):
            return mask
        if mask is None:
            return Trainable()
        flags, treedef = jax.tree.flatten(mask)
        return Trainable(treedef, tuple(bool(flag) for flag in flags))

    def part(self, params: Params) -> PyTree:
        """Returns `params` with None, which JAX reads as an empty subtree, for its frozen leaves.

        Raises:
            ValueError: if no leaf is trainable, or if the mask is not a prefix of `params`.
        """
        if self == Trainable():
            return params
        mask = jax.tree.broadcast(jax.tree.unflatten(self.treedef, self.flags), params)
        if not any(jax.tree.leaves(mask)):
            raise ValueError(
                "trainable must be True for at least one parameter, got False for all of them. "
                "Pass trainable=None to train every parameter."
            )
        return jax.tree.map(lambda leaf, keep: leaf if keep else None, params, mask)

    def merge(self, part: PyTree, params: Params) -> Params:
        """Returns `params` with the leaves of `part` in the place of the trainable ones."""
        return jax.tree.map(
            lambda new, old: old if new is None else new, part, params, is_leaf=lambda x: x is None
        )

    def zero_sum(self, params: Params) -> PyTree:
        """Returns the clipped sum over an empty batch: zeros in float32, or wider as `params`."""
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, float32_or_wider(leaf)), self.part(params)
        )

    def check(self, params: Params) -> None:
        """Raises a TypeError unless all trainable leaves are real floating-point numbers.

        Noise is real, so it would not cover the imaginary part of a complex parameter.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.part(params)):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"trainable parameters must be floating point, got {leaf.dtype} at "
                    f"params{jax.tree_util.keystr(path)}. Keep random keys and counters out "
                    "of params (nnx.split(model, nnx.Param, ...)), or freeze them with trainable=."
                )


def children(part: PyTree) -> list[str]:
    """Returns, for each leaf, the name of the tree's child (such as a layer) that it is part of."""
    return [_child(path) for path, _ in jax.tree_util.tree_leaves_with_path(part)]


def _child(path: tuple) -> str:
    if not path:
        return "params"
    for attribute in ("key", "name", "idx"):
        if hasattr(path[0], attribute):
            return str(getattr(path[0], attribute))
    return str(path[0])
