"""The clipped sum at about the price of an ordinary gradient, derived from the jaxpr.

`clipped_grad` has the contract of `mirrordp.clipped_grad`, for any loss function and without the
model's cooperation. For a batch it takes four steps:

1. One forward pass and one backward pass: to the outputs of some layers, to the weights of others.
2. Each example's squared gradient norm, weight by weight: from the inputs and cotangents of a
   layer, by Gram matrices, or of the gradient itself where it is cheaper to form it.
3. Clip factors c_i = min(1, C / (norm_i + bound on the rounding of step 4)).
4. Σ_i c_i G_i, of the gradients that were formed, or as ordinary training computes a weight's
   gradient, from scaled cotangents: a few examples at a time, and all of it is added up exactly.

Which is cheaper depends on sizes and on the machine (`_cost`). A parameter whose use is not
recognised always has its gradients formed, in JAX's own way. A loss whose structure is not
recognised (a `while` loop over parameters and data, parameters that are not floats, no dependence
on the example) is left to `mirrordp.privacy.clipping` as a whole.
`explain` prints the path that each parameter takes.

`_tracing` separates parameters from data, `_layers` has a class for each kind of layer, `_cost` and
`_plan` choose the path of each parameter, `_sides` and `_factors` have the mathematics of norms and
sums, `_sum` carries out the four steps, and `_memory` says how many examples fit at a time.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.privacy import clipping
from mirrordp.privacy.clipping import ClippedGrad, Summed, checked_keys, in_microbatches
from mirrordp.privacy.ghost import _memory
from mirrordp.privacy.ghost._explain import ParameterPath as ParameterPath, explain, leaf_names
from mirrordp.privacy.ghost._memory import device_memory as device_memory
from mirrordp.privacy.ghost._sum import Split, clipped_sum
from mirrordp.privacy.ghost._tracing import UnrecognisedError
from mirrordp.privacy.trainable import Trainable
from mirrordp.privacy.turns import Turn
from mirrordp.types import Batch, LossFn, Params, PyTree

__all__ = ["ParameterPath", "clipped_grad", "explain"]

LARGE = 2**26
"""Explicit per-example gradients of this many numbers (256 MiB in float32) cause a warning."""


def clipped_grad(
    loss_fn: LossFn,
    *,
    l2_clip_norm: float,
    trainable: PyTree | Trainable | None = None,
    microbatch_size: int | None = None,
    groups: Sequence[int] | None = None,
    turns: Sequence[Turn] | None = None,
    automatic: bool = False,
) -> ClippedGrad:
    """Returns the sum of per-example gradients of `loss_fn`, each clipped to `l2_clip_norm`.

    Arguments, result and guarantees are those of `mirrordp.clipped_grad`; time and memory differ.
    Without a `microbatch_size`, as many examples are taken at a time as fit into the device's
    memory by the traced program's own account (`_memory`).
    Where a large parameter is not recognised and takes explicit per-example gradients, a warning
    says so.
    """
    chosen = Trainable.of(trainable)
    oracle = clipping.clipped_grad(
        loss_fn,
        l2_clip_norm=l2_clip_norm,
        trainable=chosen,
        microbatch_size=microbatch_size,
        groups=groups,
        turns=turns,
        automatic=automatic,
    )
    l2_clip_norm, microbatch_size = oracle.l2_clip_norm, _validate.plain(microbatch_size)

    def exact_sum(
        params: Params, batch: Batch, is_padding: jax.Array, *, keys: jax.Array | None = None
    ) -> Summed:
        count = is_padding.shape[0]
        if oracle.takes_key:
            keys = checked_keys(loss_fn, keys, count)
        clipping.check_isolated(loss_fn, params, chosen, batch, keys)
        at_a_time = clipping.even_size(count, microbatch_size)
        part = chosen.part(params)
        try:
            split = Split.of(loss_fn, params, (batch, keys), chosen, at_a_time, turns)
        except UnrecognisedError as error:
            numbers = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(part))
            _warn_if_large({"all parameters": (numbers, str(error))}, at_a_time)
            return oracle.exact_sum(params, batch, is_padding, keys=keys)
        if microbatch_size is None:
            split = _memory.fitted(split)
        names, plan = leaf_names(part), split.plan
        formed = {
            names[leaf]: (math.prod(split.leaves[leaf].shape), plan.reason(leaf))
            for leaf in plan.explicit
            if not plan.had_a_choice(leaf)
        }
        _warn_if_large(formed, split.microbatch_size)
        run = functools.partial(
            clipped_sum, split, l2_clip_norm=l2_clip_norm, groups=groups, automatic=automatic
        )
        return in_microbatches(run, split.rows, is_padding, split.microbatch_size)

    return ClippedGrad(exact_sum, l2_clip_norm, oracle.takes_key)


def _warn_if_large(formed: Mapping[str, tuple[int, str]], rows: int) -> None:
    """Warns once of all parameters whose gradients, of `rows` examples, take much memory."""
    large = {name: of for name, of in formed.items() if rows * of[0] >= LARGE}
    if not large:
        return
    name, (most, reason) = max(large.items(), key=lambda item: item[1][0])
    others = f", and for {len(large) - 1} more" if len(large) > 1 else ""
    warn(
        f"ghost clipping forms explicit gradients of {rows} examples for {name} "
        f"({rows * most / 2**18:,.0f} MiB in float32){others}: {reason}. The result is correct, "
        "but takes long to compute. microbatch_size bounds the memory, and "
        "mirrordp.privacy.ghost.explain(loss_fn, params, batch) shows the path of each "
        "parameter.",
    )
