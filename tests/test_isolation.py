"""Operations that could show a loss the whole batch are refused before anything runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback, pallas
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, PartitionSpec

import mirrordp
from mirrordp import Ledger, PrivateData, TrainStep
from mirrordp.privacy import _isolation, clipping, ghost
from mirrordp.training.federated import FederatedStep, UserBatch
from mirrordp.training.sweep import SweepRun
from tests import one_record, test_federated, tools

THETA = jnp.array([0.5, -0.5, 0.25])
ROWS = tools.features()


@custom_vmap
def centred(x):
    return x


centred.def_vmap(lambda size, batched, x: (x - jnp.mean(x, axis=0), True))


def drawn(impl):
    """Draws noise with a key that the example itself decides."""

    def function(x):
        words = 4 if "rbg" in impl else 2
        seed = jax.lax.bitcast_convert_type(jnp.resize(x, words), jnp.uint32)
        return x + jax.random.normal(jax.random.wrap_key_data(seed, impl=impl), x.shape)

    return function


def raw_bits(x):
    seed = jax.lax.bitcast_convert_type(jnp.resize(x, 4), jnp.uint32)
    return x + jax.lax.rng_bit_generator(seed, (3,))[1].astype(jnp.float32)


def kernel(x):
    def body(given, out):
        out[...] = given[...]

    return pallas.pallas_call(body, out_shape=x, interpret=True)(x)


# An operation of another package, with its own batching rule.
theirs = Primitive("theirs")
theirs.def_abstract_eval(lambda x: x)
theirs.def_impl(lambda x: x)
mlir.register_lowering(theirs, lambda context, x: [x])
batching.primitive_batchers[theirs] = lambda given, axes: (given[0] - given[0].mean(0), axes[0])


SEE_OTHERS = {
    "custom_vmap_call": centred,
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x, vmap_method="broadcast_all"),
    "io_callback": lambda x: io_callback(np.sin, x, x),
    "ffi_call": lambda x: jax.ffi.ffi_call("absent", x, vmap_method="broadcast_all")(x),
    "random_wrap": drawn("rbg"),
    "random_wrap ": drawn("unsafe_rbg"),
    "rng_bit_generator": raw_bits,
    "pallas_call": kernel,
    "theirs": theirs.bind,
}


def in_scan(function):
    return lambda x: jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=2)[0]


def in_while(function):
    def looped(x):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, function(c[1])), (0, x))

    return lambda x: looped(x)[1]


def in_cond(function):
    return lambda x: jax.lax.cond(x[0] > 0, function, lambda x: x, x)


def in_custom_jvp(function):
    called = jax.custom_jvp(function)
    called.defjvp(lambda primals, tangents: (called(*primals), tangents[0]))
    return called


def in_backward(function):
    """Couples examples in the backward rule only."""
    called = jax.custom_vjp(lambda x: x)
    called.defvjp(lambda x: (x, None), lambda _, g: (function(g),))
    return called


def in_tangents(function):
    """Couples examples in the derivative rule only."""
    called = jax.custom_jvp(lambda x: x)
    called.defjvp(lambda primals, tangents: (primals[0], function(primals[0]) * tangents[0]))
    return called


def in_tree(function):
    return lambda x: jax.tree.map(function, {"a": x})["a"]


PLACES = [
    in_tree, jax.jit, jax.checkpoint, in_scan, in_while, in_cond, in_custom_jvp, in_backward,
    in_tangents,
]  # fmt: skip


def loss_with(function, place=in_tree):
    function = place(function)
    if place in (in_backward, in_tangents):
        return lambda params, x: jnp.sum(function(params) * x)
    return lambda params, x: jnp.sum(params * jax.lax.stop_gradient(function(x)))


def refused(operation=""):
    return pytest.raises(ValueError, match=f"by itself, got the operation .{operation.strip()}")


@pytest.mark.parametrize("operation", SEE_OTHERS)
@pytest.mark.parametrize("clipped_grad", [clipping.clipped_grad, ghost.clipped_grad])
def test_refused(operation, clipped_grad):
    clipped = clipped_grad(loss_with(SEE_OTHERS[operation]), l2_clip_norm=1.0)
    with refused(operation):
        clipped(THETA, ROWS, jnp.zeros(len(ROWS), bool))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operation", ["custom_vmap_call", "pure_callback"])
def test_refused_wherever_it_is(operation, place):
    clipped = ghost.clipped_grad(loss_with(SEE_OTHERS[operation], place), l2_clip_norm=1.0)
    with refused(operation):
        clipped(THETA, ROWS, jnp.zeros(len(ROWS), bool))


def keyed(params, x, key):
    return jnp.sum(params * (x + jax.random.normal(key, (3,))))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_are_given(impl):
    """The keys come from the caller's own loop; `train` makes keys of another kind."""
    keys = jax.random.split(jax.random.key(0, impl=impl), len(ROWS))
    nobody = jnp.zeros(len(ROWS), bool)
    with refused("random_bits"):
        ghost.clipped_grad(keyed, l2_clip_norm=1.0)(THETA, ROWS, nobody, keys=keys)
    step = users(tools.squared_distance)
    state = step.init(THETA, jax.random.key(0))
    with refused("random"):
        step.private_sum(state, UserBatch(ROWS[:, None], jnp.ones(len(ROWS))), nobody, keys)


@pytest.mark.parametrize("impl", ["threefry2x32", "philox2x32", "philox4x32", "rbg", "unsafe_rbg"])
def test_which_keys_draw_alone_what_they_draw_together(impl):
    keys = jax.vmap(lambda i: jax.random.key(i, impl=impl))(jnp.arange(5))

    def draw(key):
        return jax.random.normal(jax.random.split(jax.random.fold_in(key, 1))[1], (7,))

    alone = jnp.stack([draw(key) for key in keys])
    is_same = bool((jax.vmap(draw)(keys) == alone).all())
    assert is_same is (str(keys.dtype) in _isolation._KEYS)


def central(loss, **options):
    return TrainStep(loss_fn=loss, mechanism=tools.mechanism(), optimizer=tools.sgd(0.1), **options)


def users(loss):
    return FederatedStep(
        loss_fn=loss,
        mechanism=test_federated.mechanism(),
        optimizer=tools.sgd(0.1),
        client_learning_rate=0.1,
    )


class TestRuns:
    """The loss is refused before anything is charged."""

    options = {"mechanism": tools.mechanism(), "optimizer": tools.sgd(0.1)}  # noqa: RUF012

    @pytest.mark.parametrize("operation", ["custom_vmap_call", "io_callback", "random_wrap"])
    def test_central(self, operation):
        loss = loss_with(SEE_OTHERS[operation])
        ledger = Ledger(self.options["mechanism"].adjacency)
        with refused(operation):
            tools.train(loss, THETA, PrivateData(ROWS), spend=ledger, **self.options)
        with refused(operation):
            tools.train_sweep(
                loss,
                THETA,
                PrivateData(ROWS),
                runs=[SweepRun(), SweepRun()],
                spend=ledger,
                **self.options,
            )
        assert ledger.epsilon(1e-5).epsilon == 0
        step = central(loss)
        state = step.init(THETA, jax.random.key(0))
        with refused(operation):
            step(state, ROWS, jnp.zeros(len(ROWS), bool))

    @pytest.mark.parametrize("operation", ["pure_callback", "random_wrap", "rng_bit_generator"])
    def test_federated(self, operation):
        ledger = Ledger(test_federated.mechanism().adjacency)
        loss = loss_with(SEE_OTHERS[operation])
        if operation == "pure_callback":
            loss = loss_with(lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential"))
        with refused(operation):
            test_federated.run(loss=loss, start=THETA, spend=ledger)
        assert ledger.epsilon(1e-5).epsilon == 0

    def test_rows_of_one_user_may_see_each_other(self):
        """Here the user is the record, and a rule over its own rows keeps users apart."""
        step = users(loss_with(centred))
        state = step.init(THETA, jax.random.key(0))
        rows = ROWS.reshape(8, 5, 3)
        keys = jax.random.split(jax.random.key(1), 8)

        @jax.jit
        def total(chosen):
            users = UserBatch(jnp.asarray(rows)[chosen], jnp.full(len(chosen), 5))
            padding = jnp.zeros(len(chosen), bool)
            return step.private_sum(state, users, padding, keys[chosen]).total.floats().delta

        alone = sum(total(np.array([user])) for user in range(8))
        np.testing.assert_allclose(total(np.arange(8)), alone, atol=1e-6)
        assert jnp.linalg.norm(alone) > 0.01

    def test_keys_of_another_default_kind(self):
        """The loss receives keys that keep examples apart, whatever the default is."""
        data = {"x": ROWS, "weight": np.ones(len(ROWS), np.float32)}
        before = jax.config.jax_default_prng_impl
        expected, _ = tools.last(
            tools.train(tools.keyed_distance, THETA, PrivateData(data), seed=1, **self.options)
        )
        jax.config.update("jax_default_prng_impl", "rbg")
        try:
            found, _ = tools.last(
                tools.train(
                    lambda p, x, key: tools.keyed_distance(p, x, key), THETA, PrivateData(data),
                    seed=1, **self.options,
                )
            )  # fmt: skip
            with refused("random"):
                tools.train(
                    lambda p, x: keyed(p, x, jax.random.key(3)), THETA, PrivateData(ROWS),
                    **self.options,
                )  # fmt: skip
        finally:
            jax.config.update("jax_default_prng_impl", before)
        np.testing.assert_array_equal(found.params, expected.params)


def test_axes_from_outside():
    """Batch normalisation in a caller's own loop sums over devices."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))

    def loss(params, x):
        return jnp.sum(params * (x - jax.lax.pmean(x, "rows")))

    clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0)
    spec = PartitionSpec("rows")

    def total(rows):
        return clipped(THETA, rows, jnp.zeros(len(rows), bool))

    with refused("NamedAxisEffect"):
        jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(ROWS)


def test_mutable_arrays():
    kept = jax.new_ref(jnp.zeros(3))

    def loss(params, x):
        kept[...] = x
        return jnp.sum(params * x)

    with refused():
        ghost.clipped_grad(loss, l2_clip_norm=1.0)(THETA, ROWS, jnp.zeros(len(ROWS), bool))


def shards(x):
    mesh = jax.make_mesh((1,), ("parts",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("parts")
    normalised = lambda x: x / jax.lax.psum(jnp.sum(x**2), "parts")  # noqa: E731
    return jax.shard_map(normalised, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def printed(x):
    jax.debug.print("{}", x[0])
    jax.debug.callback(lambda _: None, x)
    return x


def linear_algebra(x):
    matrix = jnp.outer(x, x) + jnp.eye(3)
    return jnp.linalg.solve(matrix, x) + jnp.linalg.eigh(matrix)[0] + jnp.linalg.svd(matrix)[1]


def random(x):
    key = jax.random.key(0, impl="threefry2x32")
    return jax.random.permutation(key, x) * jax.random.bernoulli(key, 0.5, (3,))


def attention(x):
    rows = jnp.outer(jnp.arange(1.0, 3.0), x)[:, None]
    return jax.nn.dot_product_attention(rows, rows, rows)[0, 0]


ALONE = {
    "prints": printed,
    "shards of its own axes": shards,
    "linear algebra": linear_algebra,
    "random numbers": random,
    "attention": attention,
    "sorting": lambda x: jnp.sort(x) + jnp.median(x) + jnp.cumsum(x) + jax.lax.top_k(x, 3)[0],
    "a branch and loops": lambda x: (
        in_cond(in_scan(jnp.sin))(x) + jax.lax.stop_gradient(in_while(jnp.sin)(x))
    ),
    "custom rules": in_backward(in_tangents(jnp.cos)),
    "activations": lambda x: jax.nn.gelu(x) + jax.nn.softplus(x) + jax.nn.relu(x),
    "rematerialised": jax.checkpoint(jnp.tanh),
    "an axis of its own": lambda x: jax.vmap(lambda a: a / jax.lax.psum(a, "own"), axis_name="own")(
        x
    ),
    "an inner custom_vmap": lambda x: jax.vmap(centred)(x[:, None])[:, 0],
}


@pytest.mark.parametrize("name", ALONE)
def test_allowed(name):
    """The operations are rightly allowed: a row contributes what it contributes alone."""

    def loss(params, x):
        return jnp.sum((params - ALONE[name](x)) ** 2) + jnp.sum(ALONE[name](params * x))

    rows = jnp.abs(ROWS[:4]) + 0.1
    clipped = jax.jit(ghost.clipped_grad(loss, l2_clip_norm=1.0))
    together = clipped(THETA, rows, jnp.zeros(4, bool))
    alone = sum(clipped(THETA, rows[i : i + 1], jnp.zeros(1, bool)) for i in range(4))
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    for value in (np.nan, np.inf, -1e30, 0.0):
        spoiled = rows.at[0].set(value)
        others = clipped(THETA, spoiled, jnp.array([True, False, False, False]))
        kept = clipped(THETA, rows, jnp.array([True, False, False, False]))
        np.testing.assert_array_equal(others, kept)


@pytest.mark.parametrize("name", one_record.PROGRAMS)
def test_nothing_in_a_record_changes_another_one(name):
    assert not list(one_record.disturbances(name, sizes=[5], values=[np.inf, np.nan]))


def test_a_disturbance_is_found(monkeypatch):
    """The gradient of a grouped convolution, as JAX derives it, is one for the whole batch."""
    monkeypatch.setattr(one_record, "apart", lambda loss: loss)
    assert list(one_record.disturbances("convolution, grouped", sizes=[5], values=[np.inf]))


# Operations of JAX that were examined and are in neither list.
LEFT_OUT = {
    "addupdate", "freeze", "get", "new_ref", "swap",  # mutable arrays
    "custom_lin",  # before it is transposed, a function and no program
    "call_hi_primitive", "call_hi_primitive_linearized", "check", "from_edtype", "to_edtype",
    "global_array_to_host_local_array", "host_local_array_to_global_array",
    "precv", "program_order", "psend", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper",
    "pbroadcast_dynamic", "reduced_vary_cast", "vary_unreduced_cast",  # between devices
    "with_memory_space_constraint",
}  # fmt: skip


def test_every_operation_of_jax_was_looked_at():
    """Fails when a release of JAX adds operations; examine them and add them to a list."""
    rules = jax.interpreters.batching.fancy_primitive_batchers
    known = _isolation.KEEP_APART | set(_isolation.COUPLE) | _isolation._ATTENTIONS | LEFT_OUT
    found = {primitive.name for primitive in rules if _is_of_jax(primitive)}
    assert found - known == set()
    assert len(found) > 150
    assert "theirs" not in found


def _is_of_jax(primitive):
    """Returns whether the batching rule is JAX's; other packages register theirs there too."""
    rule = jax.interpreters.batching.fancy_primitive_batchers[primitive]
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    rules = [getattr(part, "func", part) for part in (rule, *cells) if callable(part)]
    return all(part.__module__.startswith("jax._src") for part in rules)


@dataclasses.dataclass
class Equation:
    """Traces cuDNN's attention as on a machine with a GPU for it."""

    primitive: Primitive
    params: dict
    invars: tuple = ()
    outvars: tuple = ()


@pytest.mark.parametrize(
    ("dropout_rate", "with_bias", "allowed"),
    [(0.0, False, True), (0.1, False, False), (0.0, True, False)],
)
def test_attention_by_cudnn(dropout_rate, with_bias, allowed):
    """For the gradient of a shared bias, the batching rule gives every example the sum."""
    params = {"dropout_rate": dropout_rate, "variadic_args": (with_bias, with_bias)}
    eqn = Equation(Primitive("dot_product_attention_bwd_wrapper"), params)

    class Program:
        eqns = [eqn]  # noqa: RUF012
        effects = ()

    if allowed:
        _isolation.check("a loss", Program())
    else:
        with refused("dot_product_attention_bwd_wrapper"):
            _isolation.check("a loss", Program())


def _centred_primal(kind):
    """Returns a product whose plain form sees the batch although its derivative rules do not."""

    @custom_vmap
    def centred(row):
        return row

    @centred.def_vmap
    def _(size, batched, rows):
        return rows - jnp.mean(rows, axis=0), True

    def plain(params, row):
        return jnp.sum(params * centred(row))

    if kind == "custom_vjp":
        function = jax.custom_vjp(plain)
        function.defvjp(
            lambda params, row: (jnp.sum(params * row), (params, row)),
            lambda kept, cotangent: (cotangent * kept[1], cotangent * kept[0]),
        )
        return function
    function = jax.custom_jvp(plain)
    function.defjvp(
        lambda primals, tangents: (
            jnp.sum(primals[0] * primals[1]),
            jnp.sum(tangents[0] * primals[1] + primals[0] * tangents[1]),
        )
    )
    return function


@pytest.mark.parametrize("module", [ghost, clipping], ids=["ghost", "explicit"])
@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_what_custom_rules_replace_is_looked_at(kind, module):
    """Ghost clipping takes no derivative there, so it runs the function that the rules replace."""
    clipped = module.clipped_grad(_centred_primal(kind), l2_clip_norm=1.0)
    with pytest.raises(ValueError, match="custom_vmap"):
        clipped(jnp.ones(3), jnp.ones((4, 3)), jnp.zeros(4, bool))


def test_a_function_that_loops_until_the_whole_batch_has_converged():
    """The incomplete beta function iterates on all rows until the last has converged."""
    clipped = mirrordp.clipped_grad(
        lambda p, row: p * jax.scipy.special.betainc(row[0], row[1], row[2]), l2_clip_norm=1.0
    )
    with pytest.raises(ValueError, match="regularized_incomplete_beta"):
        clipped(jnp.ones([]), jnp.full((4, 3), 0.5), jnp.zeros(4, bool))
