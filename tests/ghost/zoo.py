"""Small models of every kind that ghost clipping must get right: name -> (loss, params, batch)."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import models

ROWS = 5
MODELS = {}


def model(function):
    """Registers a function that returns (loss, params, batch)."""
    MODELS[function.__name__] = function
    return function


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Standard normal numbers, in float64 so that tests choose the precision."""
    return scale * np.random.default_rng(seed).normal(size=shape)


def integers(seed: int, high: int, *shape: int) -> np.ndarray:
    """Uniform integers below `high`."""
    return np.random.default_rng(seed).integers(0, high, shape)


def weights(init, *args):
    """Random weights in the shapes that `init(key, *args)` returns, without compiling `init`."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(init, jax.random.key(0), *args))
    sizes = [np.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 9 for leaf in leaves]
    numbers = [
        normal(seed, *leaf.shape, scale=size**-0.5)
        for seed, (leaf, size) in enumerate(zip(leaves, sizes, strict=True))
    ]
    return jax.tree.unflatten(tree, numbers)


def cross_entropy(logits, label):
    return jax.nn.logsumexp(logits) - logits[label]


def conv(x, kernel, *, stride=1, padding="SAME", groups=1, dilation=1):
    return lax.conv_general_dilated(
        x[None],
        kernel,
        (stride, stride),
        padding,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )[0]


def layer_norm(x, gain, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain + shift


@model
def mlp():
    def loss(p, e):
        return cross_entropy(jnp.tanh(e[0] @ p["w"] + p["b"]) @ p["v"] + p["c"], e[1])

    params = {
        "w": normal(0, 6, 8, scale=0.5),
        "b": normal(1, 8, scale=0.5),
        "v": normal(2, 8, 3, scale=0.5),
        "c": normal(3, 3, scale=0.5),
    }
    return loss, params, (normal(4, ROWS, 6), integers(5, 3, ROWS))


@model
def cifar10_cnn():
    """The paper's network, narrow and on images of a quarter of the size, so that it is quick."""
    net = models.cifar10_cnn((4, 4, 8, 8, 24, 24), hidden=16)
    params = weights(net.init)
    params["hidden"]["kernel"] = params["hidden"]["kernel"][:24]
    return net.loss, params, (normal(1, 3, 8, 8, 3), integers(2, 10, 3))


@model
def emnist_cnn():
    net = models.emnist_cnn()
    return net.loss, weights(net.init), (normal(1, 3, 28, 28, 1), integers(2, 47, 3))


@model
def wikitext2_lstm():
    net = models.lstm_language_model(vocabulary=60, width=10)
    return net.loss, weights(net.init), integers(1, 60, ROWS, 9)


@model
def paper_stackoverflow_lstm():
    """The network of the experiments itself, small."""
    network = models.stackoverflow_lstm(tokens=40, embedding=6, width=9)
    return network.loss, weights(network.init), integers(5, 40, ROWS, 8)


@model
def stackoverflow_lstm():
    """One LSTM layer wider than its embedding, a projection, and tied output weights."""
    vocabulary, width, hidden = 40, 6, 9
    params = {
        "embedding": normal(0, vocabulary, width, scale=0.5),
        "input": normal(1, width, 4 * hidden, scale=0.5),
        "state": normal(2, hidden, 4 * hidden, scale=0.5),
        "first": normal(3, hidden),
        "project": normal(4, hidden, width, scale=0.5),
    }

    def loss(p, tokens):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["input"] + h @ p["state"], 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = (p["first"], jnp.zeros_like(p["first"]))
        _, states = lax.scan(step, start, p["embedding"][tokens[:-1]])
        logits = states @ p["project"] @ p["embedding"].T
        return jnp.mean(jax.vmap(cross_entropy)(logits, tokens[1:]))

    return loss, params, integers(5, vocabulary, ROWS, 8)


@model
def transformer_block():
    """Attention, layer norm, a remat'd feed-forward layer and tied embeddings."""
    words, width, heads, size, length = 30, 8, 2, 4, 7
    params = {
        "embedding": normal(0, words, width, scale=0.5),
        "position": normal(1, length, width, scale=0.1),
        "qkv": normal(2, 3, width, heads, size, scale=0.5),
        "out": normal(3, heads, size, width, scale=0.5),
        "gain": 1 + normal(4, width, scale=0.1),
        "shift": normal(5, width, scale=0.1),
        "up": normal(6, width, 16, scale=0.3),
        "down": normal(7, 16, width, scale=0.3),
    }

    def loss(p, tokens):
        x = p["embedding"][tokens[:-1]] + p["position"]
        y = layer_norm(x, p["gain"], p["shift"])
        q, k, v = jnp.einsum("td,ndhs->nths", y, p["qkv"])
        scores = jax.nn.softmax(jnp.einsum("ths,rhs->htr", q, k))
        x = x + jnp.einsum("htr,rhs,hsd->td", scores, v, p["out"])
        feed = jax.checkpoint(lambda x: jax.nn.gelu(x @ p["up"]) @ p["down"])
        logits = (x + feed(x)) @ p["embedding"].T
        return jnp.mean(jax.vmap(cross_entropy)(logits, tokens[1:]))

    return loss, params, integers(8, words, ROWS, length + 1)


@model
def group_norm():
    params = {"kernel": normal(0, 3, 3, 2, 4), "gain": normal(1, 4), "shift": normal(2, 4)}

    def loss(p, image):
        x = conv(image, p["kernel"])
        grouped = x.reshape(*x.shape[:2], 2, 2)
        centred = grouped - grouped.mean((0, 1, 3), keepdims=True)
        scaled = centred / jnp.sqrt((centred**2).mean((0, 1, 3), keepdims=True) + 1e-5)
        return jnp.sum(jnp.tanh(scaled.reshape(x.shape) * p["gain"] + p["shift"]) ** 2)

    return loss, params, normal(3, ROWS, 6, 6, 2)


@model
def weight_standardised_convolution():
    params = {"kernel": normal(0, 3, 3, 2, 4), "gain": 1 + normal(1, 4, scale=0.1)}

    def loss(p, image):
        centred = p["kernel"] - p["kernel"].mean((0, 1, 2))
        kernel = p["gain"] * centred / jnp.sqrt((centred**2).mean((0, 1, 2)) + 1e-5)
        return jnp.sum(jnp.tanh(conv(image, kernel)) ** 2)

    return loss, params, normal(2, ROWS, 6, 6, 2)


@model
def grouped_depthwise_dilated_strided_convolutions():
    params = [
        normal(0, 3, 3, 2, 8, scale=0.3),
        normal(1, 3, 3, 2, 8, scale=0.3),
        normal(2, 3, 3, 1, 8, scale=0.3),
        normal(3, 2, 3, 8, 16, scale=0.3),
    ]

    def loss(p, image):
        x = jnp.tanh(conv(image, p[0], groups=2))
        x = jnp.tanh(conv(x, p[1], groups=4, dilation=2))
        x = jnp.tanh(conv(x, p[2], groups=8, stride=2))
        return jnp.sum(jnp.tanh(conv(x, p[3], padding="VALID")) ** 2)

    return loss, params, normal(4, ROWS, 8, 8, 4)


@model
def convolution_over_a_sequence():
    def loss(kernel, sequence):
        numbers = ("NWC", "WIO", "NWC")
        out = lax.conv_general_dilated(
            sequence[None], kernel, (2,), ((1, 2),), dimension_numbers=numbers
        )
        return jnp.sum(jnp.tanh(out) ** 2)

    return loss, normal(0, 4, 3, 5), normal(1, ROWS, 12, 3)


@model
def one_weight_twice():
    """The same matrix forwards, again, and transposed: the cross terms matter."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w.T) ** 2)

    return loss, normal(0, 6, 6), normal(1, ROWS, 6)


@model
def one_kernel_at_two_resolutions():
    def loss(kernel, image):
        fine, coarse = conv(image, kernel), conv(image[::2, ::2], kernel)
        return jnp.sum(jnp.tanh(fine) ** 2) + jnp.sum(jnp.tanh(coarse))

    return loss, normal(0, 3, 3, 2, 40), normal(1, ROWS, 4, 4, 2)


@model
def scan_inside_scan():
    params = {"w": normal(0, 4, 4), "s": normal(1, 4), "u": normal(2, 4, 4)}

    def loss(p, blocks):
        def outer(h, block):
            def inner(h, x):
                return jnp.tanh(h @ p["w"] + x * p["s"]), None

            h, _ = lax.scan(inner, h, block, reverse=True)
            return jnp.tanh(h @ p["u"]), h

        h, states = lax.scan(outer, jnp.zeros(4, blocks.dtype), blocks)
        return jnp.sum(states * h)

    return loss, params, normal(3, ROWS, 3, 2, 4)


@model
def scan_over_layers():
    """Stacked weights as a loop's inputs."""

    def loss(stacked, x):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stacked)
        return jnp.sum(h**2)

    return loss, normal(0, 3, 4, 4), normal(1, ROWS, 4)


@model
def stacked_transformer_layers():
    """A loop over layers, each one remat'd, with one weight that all layers share."""
    words, width, size, length, layers = 20, 8, 6, 5, 3
    params = {
        "embedding": normal(0, words, width, scale=0.5),
        "shared": normal(1, width, width, scale=0.3),
        "layers": {
            "qkv": normal(2, layers, 3, width, size, scale=0.5),
            "out": normal(3, layers, size, width, scale=0.5),
            "gain": 1 + normal(4, layers, width, scale=0.1),
            "shift": normal(5, layers, width, scale=0.1),
            "up": normal(6, layers, width, 40, scale=0.3),
            "down": normal(7, layers, 40, width, scale=0.3),
        },
    }

    def loss(p, tokens):
        @jax.checkpoint
        def layer(x, w):
            y = layer_norm(x, w["gain"], w["shift"])
            q, k, v = jnp.einsum("td,nds->nts", y, w["qkv"])
            x = x + jax.nn.softmax(q @ k.T) @ v @ w["out"]
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"] + x @ p["shared"], None

        x, _ = lax.scan(layer, p["embedding"][tokens[:-1]], p["layers"])
        return jnp.mean(jax.vmap(cross_entropy)(x @ p["embedding"].T, tokens[1:]))

    return loss, params, integers(8, words, ROWS, length + 1)


@model
def stacked_recurrent_layers():
    """A loop over layers around a loop over time; one stacked weight is used twice, transposed."""
    params = {"in": normal(0, 3, 4, 12), "state": normal(1, 3, 12, 12, scale=0.3)}

    def loss(p, xs):
        def layer(xs, w):
            def step(h, x):
                h = jnp.tanh(x @ w["in"] + h @ w["state"])
                return h, h

            _, hs = lax.scan(step, jnp.zeros(12, xs.dtype), xs)
            return hs @ w["in"].T, None

        xs, _ = lax.scan(layer, xs, p, reverse=True)
        return jnp.sum(xs**2)

    return loss, params, normal(2, ROWS, 3, 4)


@model
def stacked_convolutions():
    """Loops over blocks of layers, with a kernel that is standardised inside the loop."""
    params = {"plain": normal(0, 2, 2, 3, 3, 4, 4, scale=0.3), "scaled": normal(1, 2, 3, 3, 4, 4)}

    def loss(p, image):
        def block(x, w):
            x, _ = lax.scan(lambda x, k: (jnp.tanh(conv(x, k)), None), x, w["plain"])
            kernel = w["scaled"] / jnp.sqrt(jnp.sum(w["scaled"] ** 2))
            return x + conv(x, kernel), None

        x, _ = lax.scan(block, image, p)
        return jnp.sum(x**2)

    return loss, params, normal(2, ROWS, 6, 6, 4)


@model
def stacked_tables():
    """A loop over lookup tables, and over weights that were reshaped before."""
    params = {"tables": normal(0, 3, 7, 4), "flat": normal(1, 3 * 4 * 4, scale=0.5)}

    def loss(p, tokens):
        weights = p["flat"].reshape(3, 4, 4)
        layer = lambda h, w: (jnp.tanh(h @ w[1]) + w[0][tokens], None)  # noqa: E731
        h, _ = lax.scan(layer, jnp.ones((5, 4), p["flat"].dtype), (p["tables"], weights))
        return jnp.sum(h**2)

    return loss, params, integers(2, 7, ROWS, 5)


@model
def nested_vmap_and_jit():
    def loss(stacked, xs):
        one = jax.jit(lambda w, x: jnp.tanh(x @ w).sum())
        return jnp.sum(jax.vmap(one)(stacked, xs) ** 2)

    return loss, normal(0, 3, 4, 4), normal(1, ROWS, 3, 4)


@model
def custom_derivatives():
    """A custom_vjp whose rule is not the true derivative must be used as it stands."""

    @jax.custom_vjp
    def straight_through(w, x):
        return jnp.sign(x @ w)

    straight_through.defvjp(
        lambda w, x: (jnp.sign(x @ w), (w, x)),
        lambda kept, g: (jnp.outer(kept[1], g), kept[0] @ g),
    )

    def loss(p, x):
        return jnp.sum((straight_through(p["w"], jax.nn.relu(x @ p["v"])) - 0.3) ** 2)

    return loss, {"w": normal(0, 5, 3), "v": normal(1, 4, 5)}, normal(2, ROWS, 4)


@model
def branches():
    def loss(w, x):
        return lax.cond(x.sum() > 0, lambda: jnp.sum(jnp.tanh(x @ w)), lambda: 2 * jnp.sum(x @ w))

    return loss, normal(0, 4, 4), normal(1, ROWS, 4)


@model
def weight_decay_in_the_loss():
    inner, params, batch = mlp()
    return (
        lambda p, e: inner(p, e) + 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)),
        params,
        batch,
    )


@model
def flax_model():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Conv(4, (3, 3))(x))
            x = nn.LayerNorm()(x)
            return nn.Dense(3)(x.reshape(-1))

    net = Net()
    params = weights(net.init, jnp.zeros((5, 5, 1)))
    return (
        lambda p, e: cross_entropy(net.apply(p, e[0]), e[1]),
        params,
        (normal(0, ROWS, 5, 5, 1), integers(1, 3, ROWS)),
    )


@model
def flax_lstm():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.RNN(nn.LSTMCell(6))(nn.Embed(20, 5)(tokens)[None])[0]
            return nn.Dense(20)(x)

    net = Net()
    params = weights(net.init, jnp.zeros(6, int))
    return (
        lambda p, e: jnp.mean(jax.vmap(cross_entropy)(net.apply(p, e[:-1]), e[1:])),
        params,
        integers(1, 20, ROWS, 7),
    )


@model
def haiku_model():
    def forward(x):
        core = hk.LSTM(5)
        states, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
        return hk.Linear(3)(states[-1])

    net = hk.without_apply_rng(hk.transform(forward))
    params = weights(net.init, jnp.zeros((4, 3)))
    return (
        lambda p, e: cross_entropy(net.apply(p, e[0]), e[1]),
        params,
        (normal(0, ROWS, 4, 3), integers(1, 3, ROWS)),
    )


@model
def equinox_model():
    import equinox as eqx

    net = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)
    return (
        lambda p, e: cross_entropy(eqx.combine(p, static)(e[0]), e[1]),
        params,
        (normal(0, ROWS, 4), integers(1, 3, ROWS)),
    )
