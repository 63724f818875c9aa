"""Products of patches give the values and gradients of convolutions, also in training loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core

import mirrordp
from mirrordp import PrivateData
from mirrordp.privacy import _isolation, ghost
from mirrordp.privacy._convolutions import apart, as_products
from mirrordp.privacy.clipping import takes_key
from mirrordp.training.central import TrainStep
from mirrordp.training.federated import local_update
from mirrordp.training.sweep import SweepRun, run_state
from mirrordp.updates.public import public_grad
from tests import tools
from tests.tools import last, mechanism

NHWC = ("NHWC", "HWIO", "NHWC")
CASES = {
    "plain": ((7, 6, 3), (3, 3, 3, 4), NHWC, {}),
    "valid, even window": ((8, 8, 1), (4, 2, 1, 5), NHWC, {"padding": "VALID"}),
    "strided": ((9, 8, 2), (3, 3, 2, 4), NHWC, {"window_strides": (2, 3)}),
    "dilated": ((9, 9, 2), (3, 2, 2, 4), NHWC, {"rhs_dilation": (2, 3)}),
    "of a dilated image": (
        (5, 5, 2),
        (3, 3, 2, 4),
        NHWC,
        {"lhs_dilation": (2, 2), "padding": ((1, 2), (2, 0))},
    ),
    "lopsided padding": ((6, 6, 2), (3, 3, 2, 4), NHWC, {"padding": ((2, 0), (0, 3))}),
    "cropping": ((8, 8, 2), (3, 3, 2, 4), NHWC, {"padding": ((-1, 0), (0, -2))}),
    "channels first": ((2, 6, 7), (4, 2, 3, 3), ("NCHW", "OIHW", "NCHW"), {}),
    "channels first to last": ((2, 6, 7), (4, 2, 3, 3), ("NCHW", "OIHW", "NHWC"), {}),
    "sequence": ((11, 3), (4, 3, 5), ("NWC", "WIO", "NWC"), {"window_strides": (2,)}),
    "volume": ((4, 5, 6, 2), (2, 3, 2, 2, 3), ("NDHWC", "DHWIO", "NDHWC"), {}),
    "grouped": ((7, 6, 4), (3, 3, 2, 6), NHWC, {"feature_group_count": 2}),
}
GROUPED = {
    "grouped": CASES["grouped"],
    "depthwise": ((7, 6, 4), (3, 2, 1, 4), NHWC, {"feature_group_count": 4}),
    "strided, dilated": (
        (4, 9, 8),
        (6, 2, 3, 2),
        ("NCHW", "OIHW", "NHWC"),
        {"feature_group_count": 2, "window_strides": (2, 1), "rhs_dilation": (1, 2)},
    ),
    "sequence": ((11, 6), (4, 2, 9), ("NWC", "WIO", "NWC"), {"feature_group_count": 3}),
}


def convolutions(jaxpr) -> list:
    """Returns all convolutions of a jaxpr and of those inside it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            found.append(eqn)
        for inner in core.jaxprs_in_params(eqn.params):
            found += convolutions(inner)
    return found


def problem(name, cases=CASES):
    image, weights, layout, options = cases[name]
    rank = len(image) - 1
    options = {"window_strides": (1,) * rank, "padding": "SAME"} | options
    rng = np.random.default_rng(0)

    def loss(params, example):
        call = jax.jit(
            lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=layout, **options)
        )
        return (jnp.sin(call(example[None], params)) ** 2).sum()

    return loss, jnp.asarray(rng.normal(size=weights)), jnp.asarray(rng.normal(size=image))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_agree(name):
    with jax.enable_x64(True):
        loss, params, example = problem(name)
        both = [jax.value_and_grad(each, argnums=(0, 1)) for each in (as_products(loss), loss)]
        ours, want = jax.jit(lambda *given: [each(*given) for each in both])(params, example)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12), ours, want
        )


@pytest.mark.parametrize("name", CASES)
def test_only_grouped_convolutions_remain(name):
    loss, params, example = problem(name)
    left = convolutions(jax.make_jaxpr(as_products(loss))(params, example).jaxpr)
    assert len(left) == (1 if name == "grouped" else 0)
    assert len(convolutions(jax.make_jaxpr(loss)(params, example).jaxpr)) == 1


def in_a_loop(loss):
    return lambda params, example: jax.lax.fori_loop(
        0, 3, lambda i, total: total + loss(params, example * i), jnp.zeros([], params.dtype)
    )


def in_a_scan(loss):
    def over(params, example):
        step = lambda total, scale: (total + loss(params, scale * example), None)  # noqa: E731
        scales = jnp.arange(3, dtype=params.dtype)
        return jax.lax.scan(step, jnp.zeros([], params.dtype), scales)[0]

    return over


def in_a_branch(loss):
    return lambda params, example: lax.cond(
        example.sum() > 0, loss, lambda params, example: -loss(params, 2 * example), params, example
    )


def with_own_kernel(loss):
    return lambda params, example: loss(params * jnp.tanh(example.sum()), example)


def beside_a_while_loop(loss):
    def both(params, example):
        bound = jnp.max(jnp.abs(example))
        halvings = lax.while_loop(lambda n: bound / 2**n > 1, lambda n: n + 1, 0)
        return loss(params, example) + halvings * (params**2).sum()

    return both


PLACES = {
    "as it is": lambda loss: loss,
    "in a call": jax.jit,
    "in a loop": in_a_loop,
    "in a scan": in_a_scan,
    "in a branch": in_a_branch,
    "computed again": jax.checkpoint,
    "with a kernel of its own": with_own_kernel,
    "beside a while loop": beside_a_while_loop,
}


class TestApart:
    """Records do not meet in the gradients of grouped convolutions."""

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("name", GROUPED)
    def test_values_and_gradients_agree(self, name, place):
        with jax.enable_x64(True):
            loss, params, example = problem(name, GROUPED)
            loss = PLACES[place](loss)
            both = [jax.value_and_grad(each) for each in (apart(loss), loss)]
            ours, want = jax.jit(lambda *given: [each(*given) for each in both])(params, example)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), ours, want)
            traced = jax.make_jaxpr(jax.value_and_grad(apart(loss)))(params, example)
            assert not convolutions(traced.jaxpr)
            assert convolutions(jax.make_jaxpr(loss)(params, example).jaxpr)

    def test_groups_of_a_batch(self):
        def loss(params, images):
            made = lax.conv_general_dilated(
                images, params, (1, 1), "SAME", dimension_numbers=NHWC, batch_group_count=3
            )
            return (jnp.sin(made) ** 2).sum()

        with jax.enable_x64(True):
            rng = np.random.default_rng(0)
            params, images = rng.normal(size=(3, 3, 2, 6)), rng.normal(size=(6, 5, 4, 2))
            ours, want = (jax.grad(each, (0, 1))(params, images) for each in (apart(loss), loss))
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), ours, want)
            traced = jax.make_jaxpr(jax.grad(apart(loss)))(params, images)
            assert not convolutions(traced.jaxpr)

    def test_without_groups_nothing_changes(self):
        loss, params, example = problem("plain")
        ours, want = (
            jax.make_jaxpr(jax.grad(each))(params, example) for each in (apart(loss), loss)
        )
        assert str(ours) == str(want)

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("make", [mirrordp.clipped_grad, ghost.clipped_grad])
    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("grouped", jnp.float32),
            ("strided, dilated", jnp.float32),
            ("sequence", jnp.float64),
            ("plain", jnp.float64),
            ("plain", jnp.bfloat16),
        ],
    )
    def test_a_record_cannot_erase_others(self, make, name, dtype, place):
        """XLA's gradient of all records is one convolution, where 0 · inf is another one's NaN."""
        with jax.enable_x64(True):
            loss, params, example = problem(name, GROUPED | {"plain": CASES["plain"]})
            rng = np.random.default_rng(1)
            rows = jnp.asarray(rng.normal(size=(6, *example.shape)), dtype)
            total = jax.jit(make(PLACES[place](loss), l2_clip_norm=1.0))
            sums = [
                np.asarray(total(params.astype(dtype), given, np.zeros(6, bool)), np.float64)
                for given in (rows, rows.at[2].set(jnp.inf))
            ]
        assert np.linalg.norm(sums[0]) > 1e-3
        assert np.linalg.norm(sums[0] - sums[1]) <= 1

    def test_runs_side_by_side_do_not_meet(self):
        """Wide images meet even in a forward pass, where the weights of runs differ."""
        with jax.enable_x64(True):

            @jax.checkpoint
            def convolved(params, row):
                return lax.conv_general_dilated(
                    row[None], params, (1, 1), "SAME", dimension_numbers=NHWC
                )

            total = ghost.clipped_grad(
                lambda params, row: jnp.sum(convolved(params, row**2) ** 2), l2_clip_norm=1.0
            )
            rng = np.random.default_rng(0)
            params, rows = rng.normal(size=(2, 3, 3, 1, 4)), rng.normal(size=(2, 8, 6, 6, 1))
            both = jax.jit(jax.vmap(lambda p, rows: total(p, rows, jnp.zeros(8, bool))))
            before, rows[0, 0] = both(params, rows), 1e200
            np.testing.assert_array_equal(both(params, rows)[1], before[1])
            traced = jax.make_jaxpr(total)(params[0], rows[0], jnp.zeros(8, bool))
            assert not convolutions(traced.jaxpr)

    def test_kernels_of_a_users_own_rows(self):
        """Mapped over the rows of a user, one convolution of float32 is one of groups."""
        plain, params, example = problem("plain")

        @jax.checkpoint
        def loss(params, row):
            return plain(params * jnp.tanh(row.mean()), row)

        rows = jnp.stack([example] * 4).astype(jnp.float32)
        params, key = params.astype(jnp.float32), jax.random.key(0)
        program = jax.make_jaxpr(
            lambda params: local_update(loss, params, rows, 4, key, learning_rate=0.1, batch_size=2)
        )(params)
        _isolation.check("a user", program)

    def test_a_user_cannot_erase_others(self):
        loss, params, example = problem("grouped", GROUPED)
        rows = np.random.default_rng(1).normal(size=(6, 2, *example.shape)).astype(np.float32)

        @jax.jit
        def deltas(rows):
            def update(rows, key):
                return local_update(
                    loss, params.astype(jnp.float32), rows, 2, key, learning_rate=0.1
                )

            return jax.vmap(update)(rows, jax.random.split(jax.random.key(0), 6))[0]

        before, rows[2] = deltas(rows), np.inf
        after = deltas(rows)
        others = [0, 1, 3, 4, 5]
        np.testing.assert_array_equal(before[np.array(others)], after[np.array(others)])

    def test_ghost_clipping_keeps_convolutions_where_records_cannot_meet(self):
        """The layer's own, and those of frozen layers: only their images differ."""
        loss, params, example = problem("grouped", GROUPED)
        params, rows = params.astype(jnp.bfloat16), jnp.stack([example] * 3).astype(jnp.bfloat16)

        def after_a_frozen_layer(trained, row):
            seen = lax.conv_general_dilated(
                row[None], params, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=2
            )
            return loss(trained, seen[0, ..., :4])

        total = ghost.clipped_grad(after_a_frozen_layer, l2_clip_norm=1.0)
        traced = jax.make_jaxpr(total)(params, rows, jnp.zeros(3, bool))
        # Both forward, and the gradient of what is between them.
        assert len(convolutions(traced.jaxpr)) >= 2
        explicit = mirrordp.clipped_grad(after_a_frozen_layer, l2_clip_norm=1.0)
        traced = jax.make_jaxpr(explicit)(params, rows, jnp.zeros(3, bool))
        assert not convolutions(traced.jaxpr)

    @pytest.mark.parametrize("make", [mirrordp.clipped_grad, ghost.clipped_grad])
    def test_in_a_linear_solve_it_is_refused(self, make):
        _, params, example = problem("grouped", GROUPED)

        def loss(params, example):
            def smoothed(image):
                made = lax.conv_general_dilated(
                    image[None],
                    params,
                    (1, 1),
                    "SAME",
                    dimension_numbers=NHWC,
                    feature_group_count=2,
                )
                return image + 0.01 * made[0, ..., :4]

            return lax.custom_linear_solve(smoothed, example, lambda _, b: b, symmetric=True).sum()

        with pytest.raises(ValueError, match="a convolution of groups"):
            make(loss, l2_clip_norm=1.0)(params, example[None], jnp.zeros(1, bool))

    @pytest.mark.parametrize("make", [mirrordp.clipped_grad, ghost.clipped_grad])
    def test_in_a_rule_of_a_custom_derivative_it_is_refused(self, make):
        plain, params, example = problem("grouped", GROUPED)

        @jax.custom_jvp
        def loss(params, example):
            return plain(params, example)

        loss.defjvp(lambda given, tangents: jax.jvp(plain, given, tangents))
        with pytest.raises(ValueError, match="a convolution of groups"):
            make(loss, l2_clip_norm=1.0)(params, example[None], jnp.zeros(1, bool))


def test_a_window_larger_than_the_image_sees_nothing():
    def loss(params, example):
        sees = lax.conv_general_dilated(
            example[None], params, (2, 2), "VALID", dimension_numbers=NHWC
        )
        return sees.sum() + example.sum()

    params, example = jnp.ones((5, 2, 2, 4)), jnp.ones((3, 3, 2))
    value, gradient = jax.value_and_grad(as_products(loss))(params, example)
    assert value == example.sum()
    assert not np.any(gradient)


def test_large_ones_can_be_left():
    loss, params, example = problem("plain")
    patches = 7 * 6 * 3 * 3 * 3
    for largest, left in ((patches - 1, 1), (patches, 0)):
        traced = jax.make_jaxpr(as_products(loss, largest))(params, example)
        assert len(convolutions(traced.jaxpr)) == left


def test_low_precision_is_kept():
    def loss(params, example):
        return lax.conv_general_dilated(
            example[None], params, (1, 1), "SAME", dimension_numbers=NHWC
        ).sum(dtype=jnp.float32)

    params, example = jnp.ones((3, 3, 2, 4), jnp.bfloat16), jnp.ones((5, 5, 2), jnp.bfloat16)
    assert jax.grad(as_products(loss))(params, example).dtype == jnp.bfloat16
    np.testing.assert_allclose(as_products(loss)(params, example), loss(params, example), rtol=1e-2)


def test_one_loss_function_gives_one_function_of_its_signature():
    def keyed(params, example, key):
        return params.sum() * example

    assert as_products(keyed) is as_products(keyed)
    assert takes_key(as_products(keyed))


def test_not_hashable_is_fine():
    class Loss:
        __hash__ = None  # pyright: ignore

        def __call__(self, params, example):
            return problem("plain")[0](params, example)

    _, params, example = problem("plain")
    traced = jax.make_jaxpr(as_products(Loss()))(params, example)
    assert not convolutions(traced.jaxpr)


def test_training_loops_have_no_convolutions_on_the_cpu():
    assert jax.default_backend() == "cpu"
    loss, params, example = problem("plain")
    rows, key = jnp.stack([example] * 4), jax.random.key(0)
    step = TrainStep(loss_fn=loss, mechanism=mechanism(), optimizer=optax.sgd(0.1))
    traced = [
        jax.make_jaxpr(step.clipped_grad)(params, rows, jnp.zeros(4, bool)),
        jax.make_jaxpr(public_grad(loss))(params, rows, key),
        jax.make_jaxpr(lambda params: local_update(loss, params, rows, 4, key, learning_rate=0.1))(
            params
        ),
    ]
    assert [len(convolutions(one.jaxpr)) for one in traced] == [0, 0, 0]


def test_networks_side_by_side_are_the_networks_one_by_one(monkeypatch):
    """The runs one by one use the loss function unchanged."""
    loss, params, example = problem("strided")
    params, example = params.astype(jnp.float32), example.astype(jnp.float32)
    rows = np.random.default_rng(1).normal(size=(40, *example.shape)).astype(np.float32)
    common = {"mechanism": mechanism(), "optimizer": optax.sgd(0.01)}
    runs = [SweepRun(seed=1), SweepRun(seed=2, params=2 * params)]
    states, _ = last(tools.train_sweep(loss, params, PrivateData(rows), runs=runs, **common))
    monkeypatch.setattr("mirrordp.training.central.where_faster", lambda loss_fn: loss_fn)
    for number, begin in enumerate((params, 2 * params)):
        state, _ = last(tools.train(loss, begin, PrivateData(rows), seed=number + 1, **common))
        np.testing.assert_allclose(
            run_state(states, number).params, state.params, rtol=1e-4, atol=1e-5
        )
