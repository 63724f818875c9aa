"""How large public gradients are, number by number, and what an optimiser makes of them.

Everything here follows the noise; `mirrordp.updates.before_clip` uses the same sizes before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mirrordp import _validate
from mirrordp.types import Params, PyTree


class PublicSizes(NamedTuple):
    """A running mean of squared public gradients.

    Attributes:
        step: the number of gradients seen.
        squares: v, in the form of the parameters.
    """

    step: jax.Array
    squares: PyTree

    @classmethod
    def init(cls, part: PyTree) -> "PublicSizes":
        """Returns the mean of nothing."""
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), part)
        return cls(jnp.zeros([], jnp.int32), zeros)

    def updated(self, public_grad: PyTree, decay: float) -> "PublicSizes":
        """Returns the mean with one more gradient in it; at first, a plain mean."""
        step = self.step + 1
        weight = jnp.maximum(1 - decay, 1 / step.astype(jnp.float32))
        squares = jax.tree.map(
            lambda old, new: old + weight * (new.astype(old.dtype) ** 2 - old),
            self.squares,
            public_grad,
        )
        return PublicSizes(step, squares)

    def scales(self, epsilon: float) -> PyTree:
        """Returns c / (√v + ε̄), with c such that public gradients keep their mean squared norm.

        ε̄ is `epsilon` times the root mean square of √v. Before the first gradient, and where one
        was not finite, all scales are 1.
        """
        leaves = jax.tree.leaves(self.squares)
        total = sum(jnp.sum(leaf) for leaf in leaves)
        floor = epsilon * jnp.sqrt(total / sum(leaf.size for leaf in leaves))
        raw = jax.tree.map(lambda v: 1 / (jnp.sqrt(v) + floor), self.squares)
        kept = sum(jnp.sum(d**2 * v) for d, v in zip(jax.tree.leaves(raw), leaves, strict=True))
        usable = (total > 0) & (kept > 0) & jnp.isfinite(total) & jnp.isfinite(kept)
        c = jnp.sqrt(total / jnp.where(usable, kept, 1.0))
        return jax.tree.map(lambda d: jnp.where(usable, c * d, 1.0), raw)


def scale_by_public_gradients(
    *, decay: float = 0.99, epsilon: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    """Divides the released gradient by the size of public gradients, number by number.

        u = D g,     D = c / (√v + ε̄),

    with the running mean v of squared public gradients. Noise is divided along with the gradient,
    but unlike in Adam the sizes hold none. Before the clip, the same is
    `scaled_by_public_gradients`.

    Args:
        decay: of the running mean.
        epsilon: ε̄ in units of the root mean square of √v; a larger number scales less.

    Returns:
        A transformation for `optax.chain`, before `optax.sgd`; it needs `public_grad`.
    """
    _validate.probability(decay=decay)
    _validate.positive(epsilon=epsilon)

    def update(
        updates: PyTree,
        state: PublicSizes,
        params: Params | None = None,
        *,
        public_grad: PyTree,
        **extra_args,
    ) -> tuple[PyTree, PublicSizes]:
        del params, extra_args
        state = state.updated(public_grad, decay)
        scales = state.scales(epsilon)
        return jax.tree.map(lambda d, g: (d * g).astype(g.dtype), scales, updates), state

    return optax.GradientTransformationExtraArgs(PublicSizes.init, update)  # pyright: ignore[reportArgumentType]


def add_public_momentum(
    weight: float, *, decay: float = 0.9
) -> optax.GradientTransformationExtraArgs:
    """Adds a running mean of public gradients to the released gradient.

        m ← β m + (1 − β) ∇Ψ(θ),     u = g + w m.

    With β = 0 this is a constant mixture, up to the learning rate. With a random batch of public
    rows at each step, the mean has less noise than one batch has.

    Args:
        weight: w.
        decay: β.

    Returns:
        A transformation for `optax.chain`, before `optax.sgd`; it needs `public_grad`.
    """
    _validate.non_negative(weight=weight)
    _validate.non_negative(decay=decay)
    if decay >= 1:
        raise ValueError(f"decay must be below 1, got {decay!r}.")

    def update(
        updates: PyTree,
        state: PyTree,
        params: Params | None = None,
        *,
        public_grad: PyTree,
        **extra_args,
    ) -> tuple[PyTree, PyTree]:
        del params, extra_args
        state = jax.tree.map(
            lambda old, new: decay * old + (1 - decay) * new.astype(old.dtype), state, public_grad
        )
        return jax.tree.map(lambda g, m: g + weight * m.astype(g.dtype), updates, state), state

    def init(params: Params) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
