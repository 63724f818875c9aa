"""Float64 inside traced code, whatever `jax_enable_x64` says."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def float64_call(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`, traced with 64-bit types whatever `jax_enable_x64` says.

    `jax.enable_x64` alone is not enough: where `vmap` meets a function that is already traced (a
    scan, a jitted function), it traces the operations again outside the scope, and float64 would
    silently become float32. The batching rule here enters the scope again.
    """
    leaves, tree = jax.tree.flatten(args)

    @custom_vmap
    def call(*leaves):
        with jax.enable_x64(True):
            return function(*jax.tree.unflatten(tree, leaves))

    @call.def_vmap
    def _(axis_size, batched, *leaves):
        del axis_size
        axes = tuple(0 if is_batched else None for is_batched in batched)
        mapped = jax.vmap(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), axes)
        out = float64_call(mapped, *leaves)
        return out, jax.tree.map(lambda _: True, out)

    with jax.enable_x64(True):
        return call(*leaves)


def wide_dtype() -> Any:
    """Returns float64, or float32 where the backend has nothing wider."""
    return jnp.float32 if jax.default_backend() == "tpu" else jnp.float64
