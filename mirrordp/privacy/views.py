"""The loss over several random views of one example, as one unit of privacy.

In goes a loss of one example that draws random numbers, or a loss and an `augment` function; out
comes the mean of that loss over K independent draws, which is again a loss of one example:

    L(θ; d, κ) = (1/K) Σ_k ℓ(θ; a(d, κ_k)),        κ_1, ..., κ_K split from κ.

Clipping sees ∇L = (1/K) Σ_k ∇ℓ(θ; a(d, κ_k)) as the gradient of d. The K views of an example are
clipped once and together, so the example adds at most C to the sum, whatever K is: the sensitivity,
the noise and ε are those of a single view. (Views that were clipped one by one, as rows of their
own, would be K units of privacy.) What more views bring is a gradient that depends less on chance,
and that is therefore clipped less for the same signal.

S. De, L. Berrada, J. Hayes, S. L. Smith, B. Balle. Unlocking High-Accuracy Differentially Private
Image Classification through Scale. arXiv:2204.13650, 2022 ("augmentation multiplicity").
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mirrordp import _validate
from mirrordp.privacy.clipping import takes_key
from mirrordp.types import Example, LossFn, Params


def averaged_over_views(
    loss_fn: LossFn,
    views: int = 16,
    *,
    augment: Callable[[jax.Array, Example], Example] | None = None,
) -> LossFn:
    """Returns the mean of `loss_fn` over independent random views of one example.

    The result takes a random key as its third argument and can be used wherever a loss can: in a
    `TrainStep` or `FederatedStep`, as a public loss, in `warm_start`, and with either
    `clipped_grad`. The views of an example are clipped together: they are one unit of privacy.

    >>> import jax, jax.numpy as jnp
    >>> def shifted(key, x):
    ...     return x + jax.random.normal(key)
    >>> squared_error = lambda theta, x: 0.5 * (theta - x) ** 2
    >>> loss_fn = averaged_over_views(squared_error, 100_000, augment=shifted)
    >>> round(float(loss_fn(3.0, 1.0, jax.random.key(0))), 1)  # (2² + 1) / 2
    2.5

    Each view has a key of its own, one of `jax.random.split(key, views)`. It goes to `augment`, or
    to a `loss_fn` that takes a key; where both want one, it is split once more, and `augment`
    receives the first half.

    An example's K views take the time and the memory of K examples; `microbatch_size` bounds the
    memory.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key, for
            dropout or for an augmentation that is part of the loss.
        views: K.
        augment: `augment(key, example) -> example`, a random change of one example. It must not use
            anything that was learned from private data. Needed unless the loss takes a key.

    Returns:
        `L(params, example, key) -> scalar`.
    """
    _validate.positive_integer(views=views)
    for name, function in {"loss_fn": loss_fn, "augment": augment}.items():
        if not (callable(function) or function is augment is None):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}.")
    keyed = takes_key(loss_fn)
    if augment is None and not keyed:
        raise ValueError(
            "the views of an example must differ, but loss_fn takes no random key and there is no "
            "augment. Give the loss a third argument, key, or pass augment=, a function of a key "
            "and an example."
        )

    def one_view(params: Params, example: Example, key: jax.Array) -> jax.Array:
        if augment is None:
            return loss_fn(params, example, key)
        if not keyed:
            return loss_fn(params, augment(key, example))
        augment_key, loss_key = jax.random.split(key)
        return loss_fn(params, augment(augment_key, example), loss_key)

    def loss_of_views(params: Params, example: Example, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, views)
        losses = jax.vmap(one_view, in_axes=(None, None, 0))(params, example, keys)
        # Over the views only: a loss that is no scalar stays none, and is refused later.
        return jnp.mean(losses, axis=0)

    return loss_of_views
