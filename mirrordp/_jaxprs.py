"""Evaluating jaxprs, equation by equation."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core


def bind(eqn, operands: Sequence[Any]) -> list[Any]:
    """The outputs of an equation for other operands than it was traced with."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Releases of JAX before 0.10 return functions to bind apart from the parameters.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*subfuns, *operands, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def called(eqn) -> tuple[Any, list[Any]]:
    """The jaxpr that a call such as `jit` runs, and that jaxpr's constants."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(inner, core.ClosedJaxpr):
        return inner.jaxpr, inner.consts
    return inner, []
