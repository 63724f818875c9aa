"""A check that a program, mapped over records with `vmap`, computes each record by itself.

A loss is a function of one record, and `vmap` applies it to many. That keeps records apart as long
as the batching rule of every operation in it does. `check` takes the program of one record, as a
jaxpr, and raises an error that names the first operation that may not. Operations are allowed by
name: those listed here were examined, and everything else is refused. The bodies of loops, branches
and calls are examined too; custom derivative rules are seen where the program was traced through
`jax.grad`.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from mirrordp.privacy import _jaxprs
from mirrordp.privacy._convolutions import may_couple

# These act on single entries or on the record's own axes: their batching rules only add an axis.
_ARITHMETIC = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne
    neg nextafter not one_minus_square or polygamma polynomial population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
_ARRAYS = """
    approx_top_k argmax argmin broadcast_in_dim broadcast_to concatenate conv_general_dilated
    cumlogsumexp cummax cummin cumprod cumsum dot_general dynamic_slice dynamic_update_slice empty
    empty2 fft gather iota iota_2x32_shape pad ragged_dot_general reduce reduce_and reduce_max
    reduce_min reduce_or reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min
    reduce_window_sum reduce_xor reshape rev scatter scatter-add scatter-max scatter-min scatter-mul
    scatter-sub scatter_add scatter_max scatter_min scatter_mul scatter_sub select_and_gather_add
    select_and_scatter_add slice sort split squeeze stack tile top_k transpose unstack zeros_like
"""
_LINEAR_ALGEBRA = """
    cholesky eig eigh geqp3 geqrf hessenberg householder_product lu lu_pivots_to_permutation ormqr
    qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
"""
# These compute what the jaxprs in them say, which are examined as well.
_CALLS = """
    call checkpoint closed_call composite cond core_call custom_jvp_call custom_jvp_call_jaxpr
    custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr eval_jaxpr jit linear_call pjit remat
    remat2 remat_opt scan shard_map while xla_metadata_call
"""
# These are names, places and layouts; they compute nothing.
_PLACES = """
    dce_sink device_put inspect_sharding layout_constraint name optimization_barrier platform_index
    reshard shard_alike sharding_constraint stage tie xla_metadata_value
"""
# These use each key by itself, for the kinds of keys in `_KEYS`.
_RANDOM = """
    philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed
    random_split random_unwrap random_wrap threefry2x32 threefry4x32
"""
# These are safe over axes that the program makes itself (`shard_map` over the record's own axes).
# Over an axis from outside they have an effect, and are refused because of it.
_COLLECTIVES = """
    all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pmax pmin
    ppermute preduced psum psum_invariant pvary ragged_all_to_all reduce_scatter reduced_vary_cast_p
    unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast_p
"""
# These return nothing, so they cannot change what is computed.
_PRINTS = "debug_callback debug_print"

KEEP_APART = frozenset(
    " ".join(
        (_ARITHMETIC, _ARRAYS, _LINEAR_ALGEBRA, _CALLS, _PLACES, _RANDOM, _COLLECTIVES, _PRINTS)
    ).split()
)

_CALLBACK = (
    "a host callback, which can receive the whole batch",
    "Compute it with JAX, or for each row before training; jax.debug.print is allowed",
)
_FOREIGN = (
    "a foreign call, which can receive the whole batch",
    "Compute it with JAX, or for each row before training",
)
_KERNEL = (
    "a custom kernel (Pallas), whose reads beyond its block cannot be checked",
    "Use operations of jax.numpy and jax.lax",
)
_SHARED_BITS = (
    "a generator that draws the random bits of a whole batch from one of its keys",
    'Use keys of jax.random.key(seed, impl="threefry2x32"); jax_default_prng_impl decides the kind '
    "of keys made without impl",
)
_ATTENTION = (
    "cuDNN's attention with dropout or with the gradient of a bias, which its batching rule sums "
    "over the batch",
    'Use jax.nn.dot_product_attention(..., implementation="xla")',
)
_CONVOLUTION = (
    "a convolution of groups, or of a wider type than float32, in a place (such as the rule of a "
    "custom derivative) where compilers may compute it for all records at once",
    "Leave it to JAX to derive the gradient, or use a convolution of float32 without groups",
)
_UNKNOWN = (
    "which is not known to keep the records of a batch apart",
    "Use operations of jax.numpy and jax.lax",
)
_OUTSIDE = (
    "an operation over something outside the function (an axis of devices, a mutable array)",
    "Compute with the arguments of the function alone",
)

COUPLE: dict[str, tuple[str, str]] = {
    "custom_vmap_call": (
        "a custom_vmap rule, which receives the whole batch",
        "Remove the rule: JAX can map the function itself",
    ),
    "pure_callback": _CALLBACK,
    "io_callback": _CALLBACK,
    "buffer_callback": _FOREIGN,
    "ffi_call": _FOREIGN,
    "pallas_call": _KERNEL,
    "core_map": _KERNEL,
    "mpmd_map": _KERNEL,
    "tpu_custom_call": _KERNEL,
    "rng_bit_generator": _SHARED_BITS,
    "rng_uniform": _SHARED_BITS,
    "regularized_incomplete_beta": (
        "the incomplete beta function, which iterates on all rows until the last has converged",
        "Compute it for each row before training",
    ),
    "dot_product_attention_fp8_fwd_wrapper": _ATTENTION,
    "dot_product_attention_fp8_bwd_wrapper": _ATTENTION,
}
"""Operations that show a record the batch, or may; each with the reason and advice."""

_OPAQUE = {"pure_callback", "io_callback", "buffer_callback", "ffi_call"}

# Under `vmap`, keys of these kinds draw the same bits as alone. Keys of kinds rbg and urbg do not.
_KEYS = {"key<fry>", "key<phx2>", "key<phx4>"}
_ATTENTIONS = {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"}


def check(name: str, program: core.ClosedJaxpr) -> None:
    """Raises unless the program of one record, mapped over many, keeps them apart.

    Args:
        name: a name of the program, for the message.
        program: the program as traced for one record, without a batch axis; with its gradient, if
            the gradient will be mapped.

    Raises:
        ValueError: if an operation may couple records; the message names it.
    """
    for operation, (why, advice) in _findings(program):
        raise ValueError(
            f"{name} must compute each record by itself, got the operation {operation!r}: {why}. "
            f"{advice}."
        )


def is_opaque(operation: str) -> bool:
    """Returns whether an operation is unknown, or runs code that the program does not hold."""
    known = operation in KEEP_APART or operation in COUPLE or operation in _ATTENTIONS
    return not known or operation in _OPAQUE


def _findings(program: core.ClosedJaxpr) -> Iterator[tuple[str, tuple[str, str]]]:
    for eqn in _jaxprs.equations(program):
        operation = eqn.primitive.name
        if operation in COUPLE:
            yield operation, COUPLE[operation]
        elif operation in _ATTENTIONS:
            if eqn.params["dropout_rate"] > 0 or eqn.params["variadic_args"][1]:
                yield operation, _ATTENTION
        elif operation not in KEEP_APART:
            yield operation, _UNKNOWN
        elif may_couple(eqn):
            yield operation, _CONVOLUTION
        elif operation.startswith("random_") and _shares_bits(eqn):
            yield operation, _SHARED_BITS
    for effect in program.effects:
        if type(effect).__name__ not in ("DebugEffect", "OrderedDebugEffect"):
            yield str(effect), _OUTSIDE


def _shares_bits(eqn: Any) -> bool:
    kinds = {str(getattr(atom.aval, "dtype", "")) for atom in (*eqn.invars, *eqn.outvars)}
    return any(kind.startswith("key<") for kind in kinds - _KEYS)
