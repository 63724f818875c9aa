"""The clipped sum: per-example gradients, each clipped to norm C, added up.

    s(θ) = Σ_i clip(∇ℓ(θ; d_i), C),     clip(v, C) = v · min(1, C / ‖v‖₂)

With automatic clipping (Bu et al., 2022, arXiv:2206.07136) it is v · C / (‖v‖₂ + C) instead, whose
norm is below C for every v. The paper has v / (‖v‖₂ + γ) and a sum of sensitivity one: that is this
one with C = γ, divided by γ, so that a learning rate times γ makes the same steps. Written this
way, no gradient is ever lengthened, and what bounds the rounding of clipped gradients holds here.

A record changes s by at most C (2C when it is replaced). `ClippedGrad.sensitivity` says so, and no
other code derives it again. The statement holds for the numbers that are computed, not only for the
formula: norms are taken in float64, factors are rounded down, and sums are exact
(`mirrordp.privacy.sums`). This module forms every per-example gradient, for any JAX function;
`mirrordp.privacy.ghost` obeys the same contract without per-example gradients in memory.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from mirrordp import _validate
from mirrordp.privacy import _isolation, sums
from mirrordp.privacy._convolutions import apart
from mirrordp.privacy._float64 import float64_call, wide_dtype
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.sums import ExactSum, float32_or_wider
from mirrordp.privacy.trainable import Trainable
from mirrordp.privacy.turns import Turn
from mirrordp.types import Batch, LossFn, Params, PyTree


class ClipStats(NamedTuple):
    """Per-example quantities *without* noise, which only the operator may see."""

    unprivatized_losses: jax.Array
    unprivatized_norms: jax.Array


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """A callable that computes a clipped sum and knows its sensitivity.

    Call it as `clipped(params, batch, is_padding)`, with `keys=` (one per example) if the loss
    takes a random key. `with_stats` also returns each example's loss and gradient norm. Both return
    floating-point numbers for inspection; noise is added to the result of `exact_sum`.

    Formal guarantees, for every value of the arguments:

    - Each example adds a tree of norm at most `l2_clip_norm`, which depends only on this example,
      its key and its place in the batch. A loss with an operation that could see other examples,
      such as a host callback, is refused with a ValueError when it is traced.
    - Exact sums of two batches that differ in one row (one of them may have padding there) differ
      by at most `l2_clip_norm`, or by twice as much where both rows are real, whatever the other
      rows are and however many. Passes, microbatches and runs add up without rounding.
    - A padding example adds exactly zero, and so does one whose gradient holds a NaN or an
      infinity.
    - The sum as floating-point numbers is float32, or wider where the parameters are.
    - The microbatch size has no effect beyond rounding and the share of C that is left for it.

    Attributes:
        exact_sum: `(params, batch, is_padding, *, keys=None) -> (ExactSum, ClipStats)`.
        l2_clip_norm: C.
        takes_key: whether the loss takes a random key.
    """

    exact_sum: "Callable[..., Summed]"
    l2_clip_norm: float
    takes_key: bool

    def with_stats(
        self,
        params: Params,
        batch: Batch,
        is_padding: jax.Array,
        *,
        keys: jax.Array | None = None,
    ) -> tuple[PyTree, ClipStats]:
        """Returns the sum as floating-point numbers, and each example's loss and gradient norm."""
        total, stats = self.exact_sum(params, batch, is_padding, keys=keys)
        return total.floats(), stats

    def __call__(
        self,
        params: Params,
        batch: Batch,
        is_padding: jax.Array,
        *,
        keys: jax.Array | None = None,
    ) -> PyTree:
        """Returns the sum of clipped gradients over the examples that are not padding."""
        return self.with_stats(params, batch, is_padding, keys=keys)[0]

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the largest distance between the sums of neighbouring batches."""
        _validate.instance_of(Adjacency, adjacency=adjacency)
        return adjacency.distance * self.l2_clip_norm


def takes_key(loss_fn: LossFn) -> bool:
    """Returns whether `loss_fn` has a third required positional argument, the random key."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(required) == 3


def with_key(loss_fn: LossFn) -> LossFn:
    """Returns `loss_fn` in the three-argument form, which ignores a key that it does not take."""
    if takes_key(loss_fn):
        return loss_fn
    return lambda params, example, key: loss_fn(params, example)


def example_of(arrays: Batch) -> PyTree:
    """Returns the shapes and types of one example."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        ),
        arrays,
    )


def example_key() -> jax.Array:
    """Returns a key of the kind that a run passes to its loss, for tracing."""
    return jax.random.key(0, impl="threefry2x32")


def value_and_grad_program(
    loss_fn: LossFn, params: Params, trainable: PyTree | Trainable | None, example: PyTree, key: Any
) -> core.ClosedJaxpr:
    """Traces the loss of one example, with its gradient and without.

    Grouped convolutions are those that the clippers run; see `_convolutions.apart`.

    With the gradient, JAX applies custom derivative rules, and the functions that they replace are
    not part of the program. Ghost clipping differentiates with respect to other values, so it may
    run those functions; hence the loss without a gradient.

    Args:
        loss_fn: a loss function of two or three arguments.
        params: the parameters, or their shapes.
        trainable: as in `clipped_grad`.
        example: shapes and types of one example.
        key: a key, or its shape.

    Returns:
        A program whose outputs are the loss, one gradient for each trainable leaf, and the loss
        once more, traced without a gradient.
    """

    chosen = Trainable.of(trainable)

    keyed_loss = apart(with_key(loss_fn))

    def loss_of_part(part: PyTree, rest: Params, example: PyTree, key: Any) -> jax.Array:
        return keyed_loss(chosen.merge(part, rest), example, key)

    def both(*args: Any) -> tuple[Any, jax.Array]:
        return jax.value_and_grad(loss_of_part)(*args), loss_of_part(*args)

    return jax.make_jaxpr(both)(chosen.part(params), params, example, key)


def check_isolated(
    loss_fn: LossFn, params: Params, trainable: PyTree | Trainable | None, batch: Batch, keys: Any
) -> None:
    """Raises if the loss or its gradient, mapped over a batch, could see other examples.

    Args:
        loss_fn: a loss function of two or three arguments.
        params: the parameters.
        trainable: as in `clipped_grad`.
        batch: arrays with an axis of examples first; only shapes and types matter.
        keys: one key for each example, or None.
    """
    key = example_key() if keys is None else example_of(keys)
    program = value_and_grad_program(loss_fn, params, trainable, example_of(batch), key)
    _isolation.check("the loss function", program)


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

    >>> import jax.numpy as jnp
    >>> squared_error = lambda theta, x: 0.5 * (theta - x) ** 2
    >>> clipped = clipped_grad(squared_error, l2_clip_norm=2.0)
    >>> float(clipped(3.0, jnp.array([0.0, 7.0, 2.0]), jnp.array([False, False, True])))
    0.0
    >>> clipped.sensitivity(Adjacency.REPLACE)
    4.0

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        l2_clip_norm: C.
        trainable: a tree of booleans over the parameters, a prefix of one, or a `Trainable`;
            gradients are taken, clipped and returned for the true leaves only, with None in place
            of the others.
        microbatch_size: the largest number of examples whose gradients are computed at a time; a
            smaller one takes less memory.
        groups: the number 0, 1, ... of the group of each trainable leaf, in order. Each of k groups
            is then clipped by itself, to C/√k, so that the whole has norm at most C. By default the
            gradient is clipped as a whole.
        turns: coordinates in which gradients are clipped and returned, made of public data, for
            each trainable leaf in order. By default they are the parameters' own.
        automatic: scales each gradient v by C / (‖v‖ + C) in place of min(1, C / ‖v‖).

    Returns:
        A `ClippedGrad`.
    """
    sums.check_clip_norm(l2_clip_norm)
    if microbatch_size is not None:
        _validate.positive_integer(microbatch_size=microbatch_size)
    l2_clip_norm, microbatch_size = map(_validate.plain, (l2_clip_norm, microbatch_size))
    keyed_loss = apart(with_key(loss_fn))
    chosen = Trainable.of(trainable)

    def with_padding(params: Params, rows: PyTree, is_padding: jax.Array) -> Summed:
        batch, keys = rows
        part = chosen.part(params)
        jax.tree.map(sums.require_real, part)

        def loss_of(part: PyTree, example: PyTree, key: jax.Array) -> jax.Array:
            return keyed_loss(chosen.merge(part, params), example, key)

        losses, grads = jax.vmap(jax.value_and_grad(loss_of), (None, 0, 0))(part, batch, keys)
        if turns is not None:
            leaves, tree = jax.tree.flatten(grads)
            pairs = zip(turns, leaves, strict=True)
            grads = tree.unflatten([turn.of_gradients(leaf) for turn, leaf in pairs])
        # The norm is that of the very numbers that are summed: nothing is computed twice.
        grads = lax.optimization_barrier(grads)
        leaves = jax.tree.leaves(grads)
        numbers = checked_groups(groups, len(leaves))
        squares = by_group(numbers, list(map(squared_norm, leaves)))
        dtype = jnp.result_type(jnp.float32, *leaves)
        factors, norms = group_factors(
            squares, is_padding, l2_clip_norm, dtype, automatic=automatic
        )
        clipped = [scaled(leaf, factors[n]) for leaf, n in zip(leaves, numbers, strict=True)]
        clipped = jax.tree.unflatten(jax.tree.structure(grads), clipped)
        return Summed(ExactSum.over(clipped, l2_clip_norm), ClipStats(losses, norms))

    def exact_sum(
        params: Params, batch: Batch, is_padding: jax.Array, *, keys: jax.Array | None = None
    ) -> Summed:
        keys = checked_keys(loss_fn, keys, is_padding.shape[0])
        check_isolated(loss_fn, params, chosen, batch, keys)
        run = functools.partial(with_padding, params)
        return in_microbatches(run, (batch, keys), is_padding, microbatch_size)

    return ClippedGrad(exact_sum, l2_clip_norm, takes_key(loss_fn))


def checked_groups(groups: Sequence[int] | None, count: int) -> list[int]:
    """Returns the group of each of `count` leaves; without groups, all are in one.

    Raises:
        ValueError: if they are not numbered from 0 without gaps, leaf by leaf.
    """
    numbers = [0] * count if groups is None else list(groups)
    if len(numbers) != count or set(numbers) != set(range(len(set(numbers)))):
        raise ValueError(
            f"groups must be numbers 0, 1, ... for {count} trainable leaves, got {numbers}."
        )
    return numbers


def by_group(numbers: Sequence[int], values: Sequence[Any]) -> list[list[Any]]:
    """Returns the values of each group's leaves."""
    pairs = list(zip(numbers, values, strict=True))
    return [[value for own, value in pairs if own == group] for group in sorted(set(numbers))]


def group_factors(
    norms_squared: Sequence[Sequence[jax.Array]],
    is_padding: jax.Array,
    l2_clip_norm: float,
    dtype: Any,
    *,
    taken: Sequence[Sequence[jax.Array]] | None = None,
    **options: Any,
) -> tuple[list[jax.Array], jax.Array]:
    """Returns each group's clip factors, and norms that exceed C where a group is clipped.

    Each of k groups is clipped to C/√k. Arguments are those of `clip_factors`, with one list of
    `norms_squared` and `taken` for each group.
    """
    count = len(norms_squared)
    taken = [()] * count if taken is None else taken
    if count == 1:
        factors, norms = clip_factors(
            norms_squared[0], is_padding, l2_clip_norm, dtype, taken=taken[0], **options
        )
        return [factors], norms

    def is_finite(norms_squared: Sequence[Sequence[jax.Array]]) -> jax.Array:
        # None of the leaves may be in use.
        return jnp.isfinite(functools.reduce(jnp.add, [s for of in norms_squared for s in of], 0.0))

    # A gradient with a NaN anywhere counts as a whole as zero.
    skipped = is_padding | ~float64_call(is_finite, [list(of) for of in norms_squared])
    limit = _limit_of_group(l2_clip_norm, count)
    found = [
        clip_factors(squares, skipped, limit, dtype, taken=own, **options)
        for squares, own in zip(norms_squared, taken, strict=True)
    ]
    largest = functools.reduce(jnp.maximum, [norms for _, norms in found])
    return [factors for factors, _ in found], largest * math.sqrt(count)


def _limit_of_group(l2_clip_norm: float, count: int) -> float:
    """Returns C/√k: k parts of this norm have norm C together."""
    # The quotient may be rounded up, by less than this.
    return l2_clip_norm / math.sqrt(count) * (1 - 1e-12)


class Summed(NamedTuple):
    """The result of `ClippedGrad.exact_sum`."""

    total: ExactSum
    stats: ClipStats


def checked_keys(loss_fn: LossFn, keys: jax.Array | None, count: int) -> jax.Array:
    """Returns `keys`, or placeholders for a loss that takes none."""
    if keys is not None:
        return keys
    if takes_key(loss_fn):
        raise TypeError(
            "the loss function takes a random key, so the clipped gradient needs keys=, "
            "one per example. Pass jax.random.split(key, batch_size)."
        )
    return jnp.zeros(count)


def squared_norm(array: jax.Array) -> jax.Array:
    """Returns sums of squares over all but the first axis, in float64, which do not overflow."""

    def sum_of_squares(array):
        parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
        squares = [lax.convert_element_type(part, wide_dtype()) ** 2 for part in parts]
        return functools.reduce(jnp.add, squares).sum(axis=tuple(range(1, array.ndim)))

    return float64_call(sum_of_squares, array)


def clip_factors(
    norms_squared: Sequence[jax.Array],
    is_padding: jax.Array,
    l2_clip_norm: jax.typing.ArrayLike,
    dtype: Any,
    *,
    reserve: float | None = None,
    taken: Sequence[jax.Array] = (),
    automatic: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns c_i = min(1, R_i / ‖g_i‖) with R_i = C (1 - reserve) - taken_i, and ‖g_i‖.

    Automatic clipping has c_i = R_i / (‖g_i‖ + C). Either way c_i is at most 1, and c_i ‖g_i‖ is at
    most R_i.

    Padding has factor zero, and so has an example whose norm is not finite or for which `taken`
    leaves nothing of C. The factors are rounded down.

    Args:
        norms_squared: terms of ‖g_i‖², each of shape [B].
        is_padding: which examples do not count.
        l2_clip_norm: C; may be traced.
        dtype: the type of the factors.
        reserve: the share of C that the rounding of the sum may need; `sums.RESERVE` by default.
        taken: bounds on what an example may add to the sum otherwise, each of shape [B].
        automatic: whether to scale every gradient.
    """

    def compute(norms_squared, taken, is_padding, traced):
        norms = jnp.sqrt(functools.reduce(jnp.add, norms_squared))
        # A Python number becomes float64 here, because float32 might round it up.
        limit = jnp.asarray(traced[0] if traced else l2_clip_norm, norms.dtype)
        room = limit * (1 - (sums.RESERVE if reserve is None else reserve))
        room = functools.reduce(jnp.subtract, taken, jnp.broadcast_to(room, norms.shape))
        usable = jnp.isfinite(norms) & (room > 0) & ~is_padding
        exact = room / (norms + limit) if automatic else jnp.minimum(1.0, room / norms)
        exact = jnp.where(usable, exact, 0.0)
        factors = lax.convert_element_type(exact, dtype)
        # A subnormal factor has few bits: if rounded up, it would add more than 1e-6.
        too_large = lax.convert_element_type(factors, exact.dtype) > exact
        factors = jnp.where(too_large, jnp.nextafter(factors, 0), factors)
        return factors, lax.convert_element_type(norms, dtype)

    if not norms_squared:
        return jnp.zeros(is_padding.shape, dtype), jnp.zeros(is_padding.shape, dtype)
    traced = [l2_clip_norm] if isinstance(l2_clip_norm, jax.Array) else []
    return float64_call(compute, list(norms_squared), list(taken), is_padding, traced)


def scaled(array: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns c_i · array_i in float32 or wider, exactly zero where c_i is zero."""
    array = array.astype(float32_or_wider(array))
    weights = weights.reshape(-1, *(1,) * (array.ndim - 1))
    narrow = weights.astype(array.dtype)
    if weights.dtype == jnp.float64 and array.dtype == jnp.float32:
        # Rounded down, as the factors are: a subnormal one has few bits.
        too_large = narrow.astype(weights.dtype) > weights
        narrow = jnp.where(too_large, jnp.nextafter(narrow, jnp.zeros_like(narrow)), narrow)
    return jnp.where(weights > 0, array * narrow, jnp.zeros([], array.dtype))


def even_size(count: int, most: int | None) -> int:
    """Returns the size of as few microbatches of at most `most` rows as hold `count`, all alike.

    2,208 rows, at most 512 at a time, are five times 442: five times 512 would have 352 rows of
    padding.

    >>> even_size(2208, 512), even_size(64, 60), even_size(5, 8)
    (442, 32, 5)
    """
    if most is None or most >= count:
        return count
    return -(-count // -(-count // most))


def in_microbatches(
    run: Callable[[PyTree, jax.Array], Summed],
    rows: PyTree,
    is_padding: jax.Array,
    size: int | None,
) -> Summed:
    """Runs all rows at once, or at most `size` rows at a time and adds up the sums."""
    count = is_padding.shape[0]
    size = even_size(count, size)
    if size == count:
        return run(rows, is_padding)
    extra = -count % size
    index = np.concatenate([np.arange(count), np.zeros(extra, int)])
    blocks = jax.tree.map(lambda row: row[index].reshape(-1, size, *row.shape[1:]), rows)
    padding = jnp.concatenate([is_padding, jnp.ones(extra, bool)]).reshape(-1, size)

    def step(total, block):
        found = run(*block)
        return total + found.total, found.stats

    shapes = jax.eval_shape(run, *jax.tree.map(lambda block: block[0], (blocks, padding))).total
    zero = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    total, stats = lax.scan(step, zero, (blocks, padding))
    return Summed(total, jax.tree.map(lambda stat: stat.reshape(-1)[:count], stats))
