"""Coordinates in which gradients are clipped: what public data can do before the clip.

A *chart* writes the parameters around θ_t as θ_t + M φ with a linear M, and may have a centre v.
Each example's gradient is taken in φ, at φ = 0, and clipped there:

    h_i = ∇_φ (ℓ(θ_t + M φ; d_i) − ⟨v, φ⟩) = Mᵀ ∇ℓ(θ_t; d_i) − v,     s = Σ_i clip(h_i, C).

After the noise, `release` turns the noisy mean of h into a gradient of θ, as post-processing.

**Privacy.** M and v are made of public data and of released values, so in a step they are
constants, and h_i is the gradient of a loss function of one example. All that `ClippedGrad`
guarantees holds for this loss as for any other: s has sensitivity C, and the accounting does not
change.

The charts themselves are in `mirrordp.updates.before_clip`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mirrordp.privacy.clipping import takes_key
from mirrordp.privacy.trainable import Trainable
from mirrordp.privacy.turns import Turn
from mirrordp.types import LossFn, Params, PyTree


class Chart(NamedTuple):
    """A chart, as pure functions. `part` is the tree of trainable parameters.

    Attributes:
        init: `init(part) -> state`, the chart's arrays; they must come from public data.
        like: `like(part) -> φ`, a tree of zeros in the form of φ. If it has leaves beside those of
            `part`, the latter come first.
        move: `move(state, φ) -> M φ`, linear in φ, in the form of `part`.
        centre: `centre(state) -> v`, in the form of φ; None is zero.
        release: `release(state, mean) -> gradient` of θ from the noisy mean of h.
        prepare: `prepare(state, public_grad) -> state` before each step, with ∇Ψ(θ_t); None for a
            chart that stays what it is.
        groups: `groups(part) -> numbers`, a group for each leaf of φ. Groups are clipped
            separately, each to C/√(number of groups); None clips φ as a whole.
        turns: `turns(state) -> a Turn for each leaf of φ`, where these are all that M does. A step
            then takes them in place of `move`, since it knows how to turn with less work; None
            for other charts. A chart with turns has neither a centre nor groups.
    """

    init: Callable[[PyTree], PyTree]
    like: Callable[[PyTree], PyTree]
    move: Callable[[PyTree, PyTree], PyTree]
    centre: Callable[[PyTree], PyTree] | None
    release: Callable[[PyTree, PyTree], PyTree]
    prepare: Callable[[PyTree, PyTree], PyTree] | None = None
    groups: Callable[[PyTree], tuple[int, ...]] | None = None
    turns: Callable[[PyTree], Sequence[Turn]] | None = None


CHARTED = Trainable.of((True, False))
"""The part of `charted_params` that is trained: φ."""


def charted_params(chart: Chart, params: Params, state: PyTree, trainable: Trainable) -> Params:
    """Returns the parameters of `charted_loss` at φ = 0."""
    return chart.like(trainable.part(params)), (params, state)


def charted_loss(chart: Chart, loss_fn: LossFn, trainable: Trainable) -> LossFn:
    """Returns ℓ(θ + M φ; d) − ⟨v, φ⟩, as a function of `charted_params` and one example."""

    def loss_of(charted: Params, example: PyTree, *key: Any) -> jax.Array:
        phi, (params, state) = charted
        part = trainable.part(params)
        change = chart.move(state, phi)
        moved = jax.tree.map(lambda p, c: p + c.astype(p.dtype), part, change)
        loss = loss_fn(trainable.merge(moved, params), example, *key)
        if chart.centre is None:
            return loss
        products = jax.tree.leaves(jax.tree.map(jnp.vdot, chart.centre(state), phi))
        return loss - functools.reduce(jnp.add, products).astype(loss.dtype)

    if takes_key(loss_fn):
        return lambda charted, example, key: loss_of(charted, example, key)
    return lambda charted, example: loss_of(charted, example)
