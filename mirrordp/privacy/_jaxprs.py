"""Functions that read and evaluate jaxprs, equation by equation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core


def bind(eqn, operands: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation for other operands than it was traced with."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Releases of JAX before 0.10 return functions to bind apart from the parameters.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*subfuns, *operands, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def called(eqn) -> tuple[Any, list[Any]]:
    """Returns the jaxpr that a call such as `jit` runs, and that jaxpr's constants."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(inner, core.ClosedJaxpr):
        return inner.jaxpr, inner.consts
    return inner, []


def equations(program: core.ClosedJaxpr | core.Jaxpr) -> Iterator[Any]:
    """Yields the equations of a program and of all jaxprs in it: loops, branches, calls."""
    for eqn in program.eqns:
        yield eqn
        yield from equations_in(eqn)


def equations_in(eqn: Any) -> Iterator[Any]:
    """Yields the equations of all jaxprs in an equation, which is not among them."""
    for inner in jaxprs_in(eqn.params):
        yield from equations(inner)


def constants(program: core.ClosedJaxpr | core.Jaxpr) -> list[Any]:
    """Returns the arrays that a program and all jaxprs in it hold, in order."""
    held = list(program.consts) if isinstance(program, core.ClosedJaxpr) else []
    for eqn in program.eqns:
        held += [atom.val for atom in eqn.invars if isinstance(atom, core.Literal)]
        for inner in jaxprs_in(eqn.params):
            held += constants(inner)
    return held


def jaxprs_in(value: Any) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    """Yields the jaxprs among an equation's parameters, not those inside of them."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from jaxprs_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from jaxprs_in(item)
