"""Products of patches give the values and gradients of convolutions, also in training loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core

from mirrordp import PrivateData
from mirrordp.privacy._convolutions import as_products
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


def convolutions(jaxpr) -> list:
    """Returns all convolutions of a jaxpr and of those inside it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            found.append(eqn)
        for inner in core.jaxprs_in_params(eqn.params):
            found += convolutions(inner)
    return found


def problem(name):
    image, weights, layout, options = CASES[name]
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
