"""Programs that ghost clipping once got wrong or refused, each as small as possible."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mirrordp.privacy import clipping, ghost
from tests.ghost.test_parity import relative_error
from tests.ghost.zoo import normal

pytestmark = pytest.mark.usefixtures("nothing_reserved")

PROGRAMS = {}
EMPTY = np.zeros((0, 3))


def program(params, batch=None):
    """Registers a loss function with its parameters and batch."""

    def register(loss):
        PROGRAMS[loss.__name__] = (loss, params, normal(9, 4, 4) if batch is None else batch)
        return loss

    return register


@program(normal(0, 4, 8))
def halves_of_a_weight(w, x):
    first, second = jnp.split(w, 2, axis=1)
    return jnp.sum(jnp.tanh(x @ first) @ second)


@program(normal(0, 4, 4))
def orthogonal_weight(w, x):
    return jnp.sum(jnp.tanh(x @ jnp.linalg.qr(w)[0]))


@program(normal(0, 4, 4))
def fixed_point_without_gradient(w, x):
    step = lambda z: jnp.tanh(0.1 * z @ w + x)  # noqa: E731
    _, z = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))
    return jnp.sum(step(lax.stop_gradient(z)))


@program(normal(0, 4, 4))
def while_loop_over_stopped_weights(w, x):
    v = lax.stop_gradient(w)
    z = lax.while_loop(lambda z: jnp.sum(z) > 1, lambda z: 0.5 * jnp.tanh(z @ v), x)
    return jnp.sum(jnp.tanh(lax.stop_gradient(z) @ w + x))


@program(normal(0, 4, 5))
def real_weight_of_complex_data(w, x):
    return jnp.sum(jnp.abs(jnp.fft.fft(x) @ w) ** 2)


@program({"w": normal(0, 4, 4), "z": EMPTY, "v": np.zeros((4, 0)), "layers": np.zeros((0, 4, 4))})
def empty_weights(p, x):
    h, _ = lax.scan(lambda h, w: (h @ w, None), jnp.tanh(x @ p["w"]), p["layers"])
    return jnp.sum(h) + jnp.sum(x[:0] @ p["z"]) + jnp.sum(x @ p["v"])


@program({"layers": normal(0, 3, 4, 4), "shared": normal(1, 4, 4)})
def penalties_that_a_loop_returns(p, x):
    """The output of an iteration depends on parameters alone."""

    def layer(h, w):
        return jnp.tanh(h @ w + h @ p["shared"]), (jnp.sum(w**2), p["shared"])

    h, (penalties, copies) = lax.scan(layer, x, p["layers"])
    return jnp.sum(h) + 0.1 * jnp.sum(penalties) + 0.1 * jnp.sum(copies)


@program(normal(0, 4))
def a_carry_that_becomes_a_parameter(w, x):
    (last, before), _ = lax.scan(lambda c, _: ((jnp.sin(w), c[0]), None), (x, x), length=3)
    return jnp.sum(last * x) + jnp.sum(before)


@program(normal(0, 2, 3, 4))
def penalties_that_nested_loops_return(w, x):
    def outer(h, rows):
        return lax.scan(lambda h, row: (jnp.tanh(h * row), jnp.sum(row**3)), h, rows)

    h, penalties = lax.scan(outer, x, w, reverse=True)
    return jnp.sum(h) + jnp.sum(penalties)


@program(normal(0, 300, 40), np.array([[1, 254, 3], [2, 2, 200]], np.uint8))
def unsigned_lookup(table, index):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    rows = lax.gather(table, index[:, None], numbers, (1, 40), mode="clip")
    return jnp.sum(jnp.sin(rows))


@program(normal(0, 6, 40), np.array([[1, 254, 3], [2, 2, 200]], np.uint8))
def unsigned_lookup_outside_the_table(table, index):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    rows = lax.gather(table, index[:, None], numbers, (1, 40), mode="fill", fill_value=0.0)
    return jnp.sum(jnp.sin(rows))


@program(normal(0, 5, 4))
def convolution_without_space(w, x):
    numbers = lax.ConvDimensionNumbers((0, 1), (0, 1), (0, 1))
    return jnp.sum(
        jnp.tanh(lax.conv_general_dilated(x[None], w, (), [], dimension_numbers=numbers))
    )


@program({"k": normal(0, 5, 2, 3), "w": normal(1, 2, 3)}, normal(2, 4, 3, 2))
def window_larger_than_the_image(p, x):
    numbers = ("NWC", "WIO", "NWC")
    out = lax.conv_general_dilated(x[None], p["k"], (3,), "VALID", dimension_numbers=numbers)
    return jnp.sum(out) + jnp.sum(jnp.tanh(x @ p["w"]))


@program(normal(0, 5, 4))
def weight_in_another_order(w, x):
    return jnp.sum(jnp.tanh(x @ jnp.reshape(w, (4, 5), order="F")) ** 2)


@program({"w": normal(0, 2, 3, 4), "k": normal(1, 4, 4)})
def axes_reordered_by_a_reshape(p, x):
    mixed = lax.reshape(p["w"], (4, 6), dimensions=(2, 0, 1))
    return jnp.sum(jnp.tanh(x @ mixed) ** 2) + jnp.sum(
        jnp.tanh(p["k"].T.reshape(2, 8) @ x.repeat(2))
    )


@program(normal(0, 3, 2, 3, 4), normal(1, 4, 4, 5, 2))
def convolutions_with_weights_of_their_own(w, x):
    def one(image, kernel):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            image[None], kernel, (1,), "SAME", dimension_numbers=numbers
        )

    return jnp.sum(jnp.tanh(jax.vmap(one, in_axes=(0, 3))(x, w)) ** 2)


FLAGS = os.environ.get("XLA_FLAGS", "")


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_explicit_gradients(name):
    with jax.enable_x64(True):
        loss, params, batch = PROGRAMS[name]
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        # Without them XLA leaves out the rows of unsigned numbers above half of their range.
        options = {name: True for name in ["xla_cpu_use_fusion_emitters"] if name in FLAGS}
        found, wanted = (
            jax.jit(module.clipped_grad(loss, l2_clip_norm=0.7).__call__, compiler_options=options)(
                params, batch, jnp.zeros(len(batch), bool)
            )
            for module in (ghost, clipping)
        )
        views = jax.tree.map(lambda leaf: jnp.stack([leaf.real, leaf.imag]), (found, wanted))
        assert relative_error(*views) < 1e-10


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: x @ w,
        lambda w, x: jnp.sum(x @ w)[None],
        lambda w, x: (jnp.sum(x @ w), x),
        lambda w, x: jnp.sum(x @ w).astype(int),
        lambda w, x: jnp.sum(x @ w.astype(float)),
    ],
    ids=["vector", "array of one", "pair", "integer", "integer weight"],
)
def test_what_has_no_gradient_is_refused(loss, request):
    dtype = int if "weight" in request.node.callspec.id else float
    clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0)
    with pytest.raises(TypeError):
        jax.eval_shape(clipped, jnp.ones((4, 4), dtype), jnp.ones((3, 4)), jnp.zeros(3, bool))


def test_no_rows_give_zero():
    loss, params, batch = PROGRAMS["unsigned_lookup"]
    clipped = jax.jit(ghost.clipped_grad(loss, l2_clip_norm=1.0).__call__)
    total = clipped(params, batch[:0], jnp.zeros(0, bool))
    assert total.shape == params.shape
    assert not np.any(total)


def test_explain_says_when_nothing_is_recognised():
    loss, params, batch = PROGRAMS["fixed_point_without_gradient"]
    (path,) = ghost.explain(loss, params, batch)
    assert path.path == "explicit"
    assert "while" in path.reason


@pytest.mark.parametrize("module", [ghost, clipping], ids=["ghost", "explicit"])
def test_complex_weights_are_refused(module):
    """Noise is real, so the imaginary part of a sum would be released without noise."""
    clipped = module.clipped_grad(
        lambda w, x: jnp.sum(jnp.abs(jnp.fft.fft(x) @ w) ** 2), l2_clip_norm=1.0
    )
    with pytest.raises(TypeError, match="expected real parameters, got complex64"):
        jax.eval_shape(
            clipped, jnp.ones((4, 5), jnp.complex64), jnp.ones((2, 4)), jnp.zeros(2, bool)
        )
