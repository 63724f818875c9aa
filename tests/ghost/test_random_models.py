"""Ghost clipping against per-example gradients on random programs.

A model is a chain of layers drawn from `LAYERS`, each of which maps [T, D] to [T, D]. Matrices are
often drawn from those that other layers use already, so that one weight meets data in several
layouts and the cross terms of its norm matter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mirrordp.privacy import ghost

pytestmark = pytest.mark.usefixtures("nothing_reserved")

T, D, ROWS = 3, 4, 4
LAYERS = []


def layer(function):
    LAYERS.append(function)
    return function


def often(function):
    """Registers a layer whose weights have factors; it is drawn four times as often as others."""
    LAYERS.extend([function] * 4)
    return function


class Weights:
    """Draws parameters, or returns earlier ones again, while a model is set up."""

    def __init__(self, rng):
        self.rng, self.values = rng, []

    def new(self, *shape):
        self.values.append(self.rng.normal(size=shape) / max(1.0, np.sqrt(shape[-1:]).sum()))
        return len(self.values) - 1

    def matrix(self, again=0.2):
        old = [i for i, value in enumerate(self.values) if value.shape == (D, D)]
        return int(self.rng.choice(old)) if old and self.rng.random() < again else self.new(D, D)


@often
def product(weights, rng):
    w = weights.matrix(again=0.7)
    formula = rng.choice(["td,de->te", "td,ed->te", "de,td->te", "ed,td->te"])

    def apply(p, h, e):
        operands = (h, p[w]) if formula[0] == "t" else (p[w], h)
        return jnp.tanh(jnp.einsum(formula, *operands))

    return apply


@often
def there_and_back(weights, rng):
    w = weights.matrix(again=0.7)
    return lambda p, h, e: jnp.tanh(h @ p[w]) @ p[w].T


@layer
def heads(weights, rng):
    w = weights.new(D, 2, D // 2) if rng.random() < 0.5 else weights.matrix()

    def apply(p, h, e):
        split = h.reshape(T, 2, D // 2)
        each = jnp.einsum("thi,jhi->thj", split, p[w].reshape(D // 2 * 2, 2, D // 2))
        return h + each.sum(1)

    return apply


@often
def batched(weights, rng):
    w = weights.new(2, D // 2, D // 2)
    formula = rng.choice(["thi,hij->thj", "thi,hji->thj", "thi,hij->tjh"])
    return lambda p, h, e: jnp.einsum(formula, h.reshape(T, 2, D // 2), p[w]).reshape(T, D)


@layer
def parts_of_a_weight(weights, rng):
    w, v = weights.matrix(), weights.matrix()
    return rng.choice(
        np.array(
            [
                lambda p, h, e: jnp.tanh(h @ jnp.concatenate([p[w][:, :2], p[v][:, 2:]], axis=1)),
                lambda p, h, e: h[:, :2] @ jnp.split(p[w], 2)[1],
                lambda p, h, e: h @ lax.dynamic_update_slice(p[w], p[v][:2, :3], (1, 0)),
                lambda p, h, e: h @ jnp.cumsum(jnp.sort(p[w], axis=1), axis=0),
            ],
            dtype=object,
        )
    )


@layer
def function_of_a_weight(weights, rng):
    w, v = weights.matrix(), weights.matrix()
    return rng.choice(
        np.array(
            [
                lambda p, h, e: h @ (p[w] / jnp.linalg.norm(p[w], axis=0)),
                lambda p, h, e: h @ jax.nn.softmax(p[w]),
                lambda p, h, e: h @ (p[w] + 0.1 * p[v][:, :1] @ p[v][:1]),
                lambda p, h, e: h @ lax.stop_gradient(p[w]) + h @ p[v],
                lambda p, h, e: jnp.where(p[w][:T] > 0, h @ p[v], h),
                lambda p, h, e: h[:, jnp.argsort(p[w][0])] @ p[v],
                lambda p, h, e: jnp.fft.irfft(jnp.fft.rfft(h) * jnp.fft.rfft(p[w][0]), n=D),
            ],
            dtype=object,
        )
    )


@often
def lookup(weights, rng):
    w, mode = weights.matrix(again=0.7), str(rng.choice(["clip", "fill", "promise_in_bounds"]))
    over = 0 if mode == "promise_in_bounds" else 2

    def apply(p, h, e):
        index = (e[1] + over) % (D + over)
        return h + p[w].at[index].get(mode=mode, fill_value=0.0)

    return apply


@layer
def entries_chosen_by_data(weights, rng):
    w = weights.matrix()
    return rng.choice(
        np.array(
            [
                lambda p, h, e: h * p[w][e[1], e[1][::-1]][:, None],
                lambda p, h, e: h + lax.dynamic_slice(p[w], (e[1][0], 0), (T, D)),
                lambda p, h, e: h + p[w][:, e[1]].T,
                lambda p, h, e: jnp.zeros((T, D), h.dtype).at[e[1] % T].add(h @ p[w]),
            ],
            dtype=object,
        )
    )


@layer
def shift_and_scale(weights, rng):
    a, b, c = weights.new(D), weights.new(T, 1), weights.new()
    return lambda p, h, e: p[a] - (h - h.mean()) * p[b] / p[c]


@often
def convolution(weights, rng):
    groups, taps = int(rng.choice([1, 1, 2, 4])), int(rng.choice([1, 2, 3]))
    first = rng.random() < 0.5
    shape = (D, D // groups, taps) if first else (taps, D // groups, D)
    numbers = ("NCW", "OIW", "NWC") if first else ("NWC", "WIO", "NWC")
    w = weights.new(*shape)
    options = {
        "window_strides": (int(rng.choice([1, 2])),),
        "rhs_dilation": (int(rng.choice([1, 2])),),
        "lhs_dilation": (int(rng.choice([1, 2])),),
        "padding": [(int(rng.choice([4, 5])), int(rng.choice([-1, 3])))],
    }

    def apply(p, h, e):
        images = jnp.stack([h, jnp.sin(h)])
        images = images.swapaxes(1, 2) if first else images
        out = lax.conv_general_dilated(
            images, p[w], dimension_numbers=numbers, feature_group_count=groups, **options
        )
        return jnp.tanh(out.sum(0)[:1]) + h

    return apply


@often
def loop_over_time(weights, rng):
    w, u, reverse = weights.matrix(again=0.7), weights.matrix(again=0.7), bool(rng.random() < 0.5)

    def apply(p, h, e):
        def step(state, x):
            state = jnp.tanh(state @ p[w] + x @ p[u].T)
            return state, state * x

        return lax.scan(step, h[0], h, reverse=reverse)[1]

    return apply


@often
def loop_over_layers(weights, rng):
    w, shared = weights.new(2, D, D), weights.matrix()
    reverse, remat = bool(rng.random() < 0.5), bool(rng.random() < 0.5)

    def apply(p, h, e):
        def one(h, v):
            mask = v > -1  # a constant that differs between the iterations
            return jnp.tanh(h @ v + h @ (p[shared] * mask)) @ v.T, None

        h, _ = lax.scan(jax.checkpoint(one) if remat else one, h, p[w], reverse=reverse)
        return h

    return apply


@layer
def loop_that_carries_parameters(weights, rng):
    w = weights.matrix()

    def apply(p, h, e):
        def one(i, carry):
            v, h = carry
            return v, jnp.tanh(h @ v + p[w][i])

        return lax.fori_loop(0, 2, one, (p[w], h))[1]

    return apply


@layer
def branches(weights, rng):
    w, v = weights.matrix(), weights.matrix()
    return lambda p, h, e: lax.switch(e[1][0] % 2, [lambda h: h @ p[w], lambda h: p[v][:T]], h)


@layer
def own_derivative(weights, rng):
    w = weights.matrix()

    @jax.custom_vjp
    def rounded(w, h):
        return jnp.round(h @ w)

    rounded.defvjp(
        lambda w, h: (rounded(w, h), (w, h)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T)
    )
    return lambda p, h, e: h + 0.1 * rounded(p[w], h)


def random_model(seed):
    rng = np.random.default_rng(seed)
    weights = Weights(rng)
    weights.new(5)  # a parameter that nothing depends on
    chain = [LAYERS[i](weights, rng) for i in rng.integers(0, len(LAYERS), 5)]

    def loss(params, example):
        h = example[0]
        for apply in chain:
            h = jnp.broadcast_to(apply(params, h, example), (T, D))
        return jnp.sum(jnp.sin(h))

    batch = (rng.normal(size=(ROWS, T, D)), rng.integers(0, D, (ROWS, T)))
    return loss, weights.values, batch


@pytest.mark.parametrize("path", ["gram", "cheaper"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_clipped_per_example_gradients(seed, path, request):
    """Weights of this size rarely prefer Gram matrices, so half of the tests force them."""
    if path == "gram":
        request.getfixturevalue("by_gram")
    with jax.enable_x64(True):
        loss, params, batch = random_model(10 * seed + (path == "gram"))
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params, batch)
        squares = [np.sum(np.square(g), axis=tuple(range(1, g.ndim))) for g in gradients]
        norms = np.sqrt(sum(squares))
        clip = float(np.median(norms))
        clipped = jax.jit(ghost.clipped_grad(loss, l2_clip_norm=clip).with_stats)
        sums, stats = clipped(params, batch, jnp.zeros(ROWS, bool))
    factors = np.minimum(1, clip / norms)
    for found, gradient in zip(sums, gradients, strict=True):
        wanted = np.tensordot(factors, gradient, axes=1)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * clip)
    np.testing.assert_allclose(stats.unprivatized_losses, losses, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(stats.unprivatized_norms, norms, rtol=1e-6)
