"""Convolutions as matrix products of patches, where those are faster. Values agree up to rounding.

- Under `vmap` over runs or clients, a convolution whose images and weights both differ becomes a
  grouped one, for which compilers have slow programs. Patches times weights becomes a batch of
  matrix products instead. On a GPU this pays where patches are small: on one H200, eight EMNIST
  networks train 1.6 times as fast, but four of the larger CIFAR-10 networks 1.14 times as slowly.
- On the CPU, XLA's convolutions are slow inside a loop, such as training: the gradient of the
  weights takes ten times as long or more.
- Mapped over records, convolutions whose weights differ, such as those of a gradient, become
  convolutions of groups. If they had groups before, or are wider than float32, compilers may make
  one large convolution of all groups, in which records meet at zeros, and zero times the infinity
  of one record is the NaN of another. `apart` avoids it: this is for privacy, not for speed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from mirrordp.privacy import _jaxprs
from mirrordp.privacy._jaxprs import bind, called
from mirrordp.types import LossFn

SMALL = 2**15
CALLS = {"jit", "pjit", "closed_call", "core_call"}
_KEPT_APART = {jnp.dtype(kind) for kind in (jnp.float16, jnp.bfloat16, jnp.float32)}
_WITH_BODIES = {
    *CALLS, "scan", "while", "cond", "checkpoint", "remat", "remat2", "custom_jvp_call",
    "custom_vjp_call",
}  # fmt: skip


def where_faster(loss_fn: LossFn, *, side_by_side: bool = False) -> LossFn:
    """Returns `loss_fn` in the form that is faster in a training loop on the present backend.

    Args:
        loss_fn: a loss function.
        side_by_side: whether several networks with different weights are trained under `vmap`.
    """
    if jax.default_backend() == "cpu":
        return as_products(loss_fn)
    return as_products(loss_fn, SMALL) if side_by_side else loss_fn


def as_products(loss_fn: LossFn, largest: int | None = None) -> LossFn:
    """Returns `loss_fn` with its ordinary convolutions computed as matrix products of patches.

    Grouped convolutions, and those inside loops and custom derivatives, are left unchanged.

    Args:
        loss_fn: a loss function.
        largest: the largest number of entries that the patches of one image may have; convolutions
            with larger patches are left unchanged. None for no limit.
    """
    try:
        return _as_products(loss_fn, largest)
    except TypeError:  # `loss_fn` is not hashable.
        return _as_products.__wrapped__(loss_fn, largest)


# The result is cached because JAX finds compiled programs by the function they were made from.
@functools.lru_cache(maxsize=16)
def _as_products(loss_fn: LossFn, largest: int | None) -> LossFn:
    @functools.wraps(loss_fn)
    def same_loss(*arguments):
        program, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(*arguments)
        inputs = jax.tree.leaves(arguments)
        by = functools.partial(_bind_product, largest=largest)
        outputs = _evaluate(program.jaxpr, program.consts, inputs, by)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return same_loss


def apart(loss_fn: LossFn) -> LossFn:
    """Returns `loss_fn` with those convolutions as products of patches in which records could meet.

    They are found in loops, branches and calls, and not within rules of custom derivatives, maps
    over devices or linear solves. `_isolation.check` refuses what is left.
    """

    @functools.wraps(loss_fn)
    def same_loss(*arguments):
        program, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(*arguments)
        if not any(map(may_couple, _jaxprs.equations(program))):
            return loss_fn(*arguments)
        inputs = jax.tree.leaves(arguments)
        outputs = _evaluate(program.jaxpr, program.consts, inputs, bind_apart)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return same_loss


def may_couple(eqn: Any) -> bool:
    """Returns whether an equation is a convolution in which mapped records could meet.

    See the module's docstring. Of those that are not wide, none is where only images are mapped.
    """
    is_convolution = eqn.primitive.name == "conv_general_dilated"
    return is_convolution and (is_wide(eqn) or _num_groups(eqn.params) > 1)


def is_wide(eqn: Any) -> bool:
    """Returns whether an equation is a convolution of other types than compilers keep apart."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    return not {atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars)} <= _KEPT_APART


def bind_apart(eqn: Any, operands: Any) -> list[jax.Array]:
    """Returns the outputs of an equation, with `apart` applied to it and to what it calls."""
    if may_couple(eqn):
        if eqn.outvars[0].aval.size == 0:
            return [jnp.zeros(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)]
        return [_product_of_patches(*operands, **eqn.params)]
    if eqn.primitive.name in _WITH_BODIES and any(map(may_couple, _jaxprs.equations_in(eqn))):
        params = {name: _apart_in(value) for name, value in eqn.params.items()}
        eqn = eqn.replace(params=params)
    return bind(eqn, operands)


def _apart_in(value: Any) -> Any:
    """Returns a parameter of an equation with `apart` applied to the jaxprs in it."""
    if isinstance(value, tuple | list):
        return type(value)(map(_apart_in, value))
    if isinstance(value, core.ClosedJaxpr):
        run = functools.partial(_evaluate, value.jaxpr, value.consts, by=bind_apart)
        inputs = [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
            )
            for aval in value.in_avals
        ]
        return jax.make_jaxpr(lambda *given: run(given))(*inputs)
    if isinstance(value, core.Jaxpr):
        # Since JAX 0.12 these are the same as closed ones.
        traced = _apart_in(core.ClosedJaxpr(value, ()))
        assert not traced.consts
        return traced.jaxpr
    return value


def _evaluate(
    jaxpr, consts, inputs, by: Callable[[Any, list[jax.Array]], list[jax.Array]]
) -> list[jax.Array]:
    """Evaluates a jaxpr with calls inlined, each other equation as `by` does."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            outputs = _evaluate(*called(eqn), operands, by)
        else:
            outputs = by(eqn, operands)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind_product(eqn, operands, *, largest: int | None) -> list[jax.Array]:
    if eqn.primitive.name == "conv_general_dilated" and _is_ordinary(eqn, largest):
        return [_product_of_patches(*operands, **eqn.params)]
    return bind(eqn, operands)


def _num_groups(params) -> int:
    # One of the two is one.
    return params["feature_group_count"] * params["batch_group_count"]


def _is_ordinary(eqn, largest: int | None) -> bool:
    if _num_groups(eqn.params) > 1:
        return False
    _, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    (result,), weights = eqn.outvars, eqn.invars[1]
    if result.aval.size == 0:
        return False
    positions = math.prod(result.aval.shape[i] for i in out_spec[2:])
    entries = weights.aval.size // max(1, weights.aval.shape[rhs_spec[0]])
    return largest is None or positions * entries <= largest


def _product_of_patches(
    images, weights, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
    feature_group_count, batch_group_count, precision, preferred_element_type, **_,
):  # fmt: skip
    """Computes a convolution as [n, out..., window·C] @ [window·C, N], for each group."""
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    images = images.transpose(lhs_spec[0], *lhs_spec[2:], lhs_spec[1])
    weights = weights.transpose(*rhs_spec[2:], rhs_spec[1], rhs_spec[0])
    window, channels = weights.shape[:-2], weights.shape[-2:]
    config = [(low, high, by - 1) for (low, high), by in zip(padding, lhs_dilation, strict=True)]
    padded = lax.pad(images, jnp.zeros([], images.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    out = tuple(
        (size - (taps - 1) * dilation - 1) // stride + 1
        for size, taps, dilation, stride in zip(
            padded.shape[1:-1], window, rhs_dilation, window_strides, strict=True
        )
    )
    if batch_group_count > 1:
        # Group after group of a batch's images: side by side they are channels.
        padded = padded.reshape(batch_group_count, -1, *padded.shape[1:])
        padded = jnp.moveaxis(padded, 0, -2).reshape(*padded.shape[1:-1], -1)
    patches = padded
    for axis in reversed(range(len(window))):
        stride, span = window_strides[axis], (out[axis] - 1) * window_strides[axis] + 1
        starts = [i * rhs_dilation[axis] for i in range(window[axis])]
        seen = [lax.slice_in_dim(patches, i, i + span, stride, axis=1 + axis) for i in starts]
        # The barrier keeps the axes apart: merged into one stack, many shifts are slow on a GPU.
        patches = lax.optimization_barrier(jnp.stack(seen, axis=1 + len(window)))
    groups, taps = feature_group_count * batch_group_count, math.prod(window)
    if groups == 1:
        product = jnp.matmul(
            patches.reshape(*patches.shape[: 1 + len(window)], taps * channels[0]),
            weights.reshape(taps * channels[0], channels[1]),
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    else:
        product = jnp.einsum(
            "n...wgc,wcgo->n...go",
            patches.reshape(*patches.shape[: 1 + len(window)], taps, groups, channels[0]),
            weights.reshape(taps, channels[0], groups, channels[1] // groups),
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        product = product.reshape(*product.shape[:-2], channels[1])
    order = [out_spec.index(i) for i in range(len(out_spec))]
    # The product's axes are n, out..., N; `out_spec` gives the places of n, N, out... .
    ours = [0, len(out_spec) - 1, *range(1, len(out_spec) - 1)]
    return product.transpose([ours[i] for i in order])
