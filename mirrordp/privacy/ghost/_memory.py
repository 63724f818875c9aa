"""How many examples fit into a device's memory at a time.

The need of a microbatch is read off the traced program, before anything is compiled:

    fixed           the parameters, and their sums as integers and as floats
    residuals       what the backward pass needs of the forward pass, in JAX's own accounting, in
                    which `jax.checkpoint` keeps little
    kept            inputs and cotangents of layers that wait for the clip factors
    formed          gradients that are formed, example by example

Residuals die while gradients are born, so a microbatch of m examples needs about

    fixed + m (max(residuals, formed) + kept).

The compiler may do with less, for it fuses operations, or take somewhat more.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mirrordp._warn import warn
from mirrordp.privacy._jaxprs import jaxprs_in
from mirrordp.privacy.clipping import even_size
from mirrordp.privacy.ghost._sum import Split, probes_of

SHARE = 0.75
"""The share of a device's memory that a step may take by this account."""


class Need(NamedTuple):
    """Bytes that a step needs: at any size of microbatches, and for each example of one."""

    fixed: int
    residuals: int
    kept: int
    formed: int

    @property
    def per_example(self) -> int:
        return max(self.residuals, self.formed) + self.kept

    def of(self, examples: int) -> int:
        """Returns the need of a microbatch of this size."""
        return self.fixed + examples * self.per_example


def need(split: Split) -> Need:
    """Returns the need of a traced loss."""
    return _need(split, _residuals(split))


def _without_tracing(split: Split, count: int) -> int:
    """Returns more than a step needs: as if every intermediate value were a residual, twice."""
    return _need(split, 2 * _bytes_of_values(split.program.jaxpr)).of(count)


def _bytes_of_values(program: Any) -> int:
    """Returns the bytes of all values that a program computes, with all iterations of loops."""
    total = 0
    for eqn in program.eqns:
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = [_bytes_of_values(jaxpr) for jaxpr in jaxprs_in(eqn.params)]
        arrays = [var.aval for var in eqn.outvars if hasattr(var.aval, "dtype")]
        total += length * sum(inner) + _bytes_of(arrays)
    return total


def _need(split: Split, residuals: int) -> Need:
    size = _bytes_of(split.leaves)
    entries = sum(leaf.size for leaf in split.leaves)
    kept = formed = 0
    for number, layer in enumerate(split.plan.layers):
        if split.plan.results_probed(number):
            results = _bytes_of(layer.site.result_shapes())
            kept += results + _input_bytes(layer)
            if not split.plan.never_formed(number):
                formed += _bytes_of(jax.tree.leaves(split.plan.gradient_shapes(number)))
        else:
            formed += _bytes_of(jax.tree.leaves(split.plan.gradient_shapes(number)))
    return Need(2 * size + 12 * entries, residuals, kept, formed)


def _input_bytes(layer) -> int:
    sizes = getattr(layer, "sizes", None)
    if sizes is None or layer.one_hot:
        return 0
    width = jnp.dtype(layer.weight.dtype).itemsize
    return width * sizes.groups * sizes.positions * sizes.left // layer.overlap


def _residuals(split: Split) -> int:
    """Returns the bytes that one more example adds to what the backward pass needs."""

    def pull(rows):
        run = jax.vmap(lambda row, probes: split.forward(row, probes)[0], in_axes=(0, None))
        return jax.vjp(lambda probes: run(rows, probes), probes_of(split))[1]

    def total(count: int) -> int:
        rows = [jax.ShapeDtypeStruct((count, *row.shape[1:]), row.dtype) for row in split.rows]
        return _bytes_of(jax.tree.leaves(jax.eval_shape(pull, rows)))

    return max(0, total(3) - total(2))


def _bytes_of(arrays: Sequence[Any]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def device_memory() -> int | None:
    """Returns the bytes that programs can use on the default device, or None if it does not say.

    The memory of a computer is rounded down to three binary digits, so that it does not depend on
    what its kernel keeps for itself: how a step is computed follows from it.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu":
        return None
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    found = min(physical, int(text)) if text.isdigit() else physical
    digits = max(0, found.bit_length() - 3)
    return found >> digits << digits


def fitted(split: Split) -> Split:
    """Returns a split with a plan for as many of its rows at a time as fit into memory.

    Raises:
        MemoryError: as in `largest_microbatch`.
    """
    count = len(split.rows[0])
    size = largest_microbatch(split, count)
    return split if size == split.microbatch_size else split.in_microbatches_of(size)


def largest_microbatch(split: Split, count: int, memory: int | None = None) -> int:
    """Returns the number of examples, at most `count`, that fit into the device's memory.

    Raises:
        MemoryError: if not even the parameters and the gradients formed for one example do.
    """
    memory = memory or device_memory()
    if memory is None or count == 0:
        return count
    room = SHARE * memory
    if _without_tracing(split, count) <= room:
        return count
    found = need(split)
    if found.of(count) <= room:
        return count
    # How sums share memory is up to the compiler, so only what is certain is refused.
    if (least := _bytes_of(split.leaves) + found.formed) > memory:
        raise MemoryError(
            f"a private step of this model needs at least {_gib(least)} of "
            f"memory for one example at a time, and the device has {_gib(memory)}. Train fewer "
            "parameters (trainable=, LoRA) or use a device with more memory."
        )
    size = int((room - found.fixed) // found.per_example)
    if size < 1:
        warn(
            f"a private step may need {_gib(found.of(1))} of memory for one example at a time, "
            f"and the device has {_gib(memory)}. Wrap the model's layers in jax.checkpoint."
        )
    return even_size(count, max(1, size))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
