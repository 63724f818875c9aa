"""Ghost clipping of networks as people write them: equal to plain clipping, and where it is slow.

Each model is a function that returns (loss, params, batch). It is registered with a clip norm that
clips some of its examples, and with the parameters that take explicit per-example gradients. The
`small` ones, such as a bias or a gain, do so at no cost. The `slow` ones are large in a network of
real size, and stand there with the reason that `explain` gives.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mirrordp
from mirrordp.privacy import ghost
from tests.ghost.test_parity import relative_error
from tests.ghost.zoo import conv, integers, layer_norm, normal, weights

ROWS, LENGTH, WIDTH, HEADS, SIZE, HIDDEN, WORDS = 5, 6, 8, 4, 2, 12, 20
MODELS = {}


class Model(NamedTuple):
    make: Callable
    clip: float
    small: Sequence[str]
    slow: Mapping[str, str]


def model(clip, *, small=(), slow=None):
    """Registers a model; `small` has last or whole names, `slow` whole ones and why they are."""

    def register(make):
        MODELS[make.__name__] = Model(make, clip, small, slow or {})
        return make

    return register


def cross_entropy(logits, labels):
    """Mean over positions."""
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


def tokens(seed=100):
    return integers(seed, WORDS, ROWS, LENGTH + 1)


def matrix(seed, *shape):
    return normal(seed, *shape, scale=shape[-2] ** -0.5)


def attention_weights(*, kv_heads=HEADS):
    return {
        "query": matrix(1, WIDTH, HEADS * SIZE),
        "key": matrix(2, WIDTH, kv_heads * SIZE),
        "value": matrix(3, WIDTH, kv_heads * SIZE),
        "out": matrix(4, HEADS * SIZE, WIDTH),
    }


def heads(x):
    return x.reshape(x.shape[0], -1, SIZE)


def attend(p, x, turn=lambda x: x, causal=True):
    q, k, v = (heads(x @ p[name]) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=causal)
    return mixed.reshape(x.shape[0], -1) @ p["out"]


def rms_norm(x, gain):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain


def rotate(x):
    """RoPE over [positions, heads, size]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[0])[:, None, None] * 100.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def glu(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def glu_weights():
    return {
        "gate": matrix(5, WIDTH, HIDDEN),
        "up": matrix(6, WIDTH, HIDDEN),
        "down": matrix(7, HIDDEN, WIDTH),
    }


def language_model(block, inner, *, head=True):
    """A loss around `block(inner, x)`: a table before it, a head after it, tied or not."""
    params = {"table": normal(0, WORDS, WIDTH), "inner": inner}
    if head:
        params["head"] = matrix(9, WIDTH, WORDS)

    def loss(p, example):
        x = block(p["inner"], p["table"][example[:-1]])
        return cross_entropy(x @ (p["head"] if head else p["table"].T), example[1:])

    return loss, params, tokens()


@model(1.9)
def dot_product_attention():
    return language_model(lambda p, x: x + attend(p, x), attention_weights())


@model(1.5)
def grouped_query_heads():
    return language_model(lambda p, x: x + attend(p, x), attention_weights(kv_heads=2))


@model(3, small=["qkv_bias", "out_bias"])
def fused_projections_with_biases():
    """As in GPT-2: one matrix for queries, keys and values, which is split after the product."""

    def block(p, x):
        q, k, v = map(heads, jnp.split(x @ p["qkv"] + p["qkv_bias"], 3, axis=-1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.reshape(x.shape) @ p["out"] + p["out_bias"]

    inner = {
        "qkv": matrix(1, WIDTH, 3 * WIDTH),
        "qkv_bias": normal(2, 3 * WIDTH),
        "out": matrix(3, WIDTH, WIDTH),
        "out_bias": normal(4, WIDTH),
    }
    return language_model(block, inner)


@model(7.6, small=["norm1", "norm2"])
def llama_block():
    """RMSNorm, RoPE, grouped-query heads, a gated layer, and a tied head."""

    def block(p, x):
        x = x + attend(p, rms_norm(x, p["norm1"]), rotate)
        return x + glu(p, rms_norm(x, p["norm2"]))

    inner = attention_weights(kv_heads=2) | glu_weights()
    inner |= {
        name: 1 + normal(seed, WIDTH, scale=0.1) for seed, name in enumerate(["norm1", "norm2"])
    }
    return language_model(block, inner, head=False)


@model(5.9, small=["position", "gain", "shift"])
def tied_head_with_learned_positions():
    params = {
        "table": normal(0, WORDS, WIDTH),
        "position": normal(1, LENGTH, WIDTH),
        "gain": 1 + normal(2, WIDTH, scale=0.1),
        "shift": normal(3, WIDTH, scale=0.1),
        "dense": matrix(4, WIDTH, WIDTH),
    }

    def loss(p, example):
        x = p["table"][example[:-1]] * WIDTH**0.5 + p["position"]
        x = layer_norm(jnp.tanh(x @ p["dense"]), p["gain"], p["shift"])
        return cross_entropy(x @ p["table"].T, example[1:])

    return loss, params, tokens()


@model(1.008, small=["first"], slow={"['table']": "dynamic_slice"})
def lookup_inside_a_loop():
    """A recurrence that reads its table at one word after the other."""
    params = {
        "table": normal(0, WORDS, WIDTH),
        "state": matrix(1, WIDTH, WIDTH),
        "first": normal(2, WIDTH),
        "head": matrix(3, WIDTH, WORDS),
    }

    def loss(p, example):
        def step(state, word):
            state = jnp.tanh(state @ p["state"] + p["table"][word])
            return state, state

        _, states = lax.scan(step, p["first"], example[:-1])
        return cross_entropy(states @ p["head"], example[1:])

    return loss, params, tokens()


@model(0.78)
def lookup_mapped_over_positions():
    params = {"table": normal(0, WORDS, WIDTH), "head": matrix(1, WIDTH, WORDS)}

    def loss(p, example):
        x = jax.vmap(lambda word: p["table"][word])(example[:-1])
        return cross_entropy(jnp.tanh(x) @ p["head"], example[1:])

    return loss, params, tokens()


@model(3.4, small=["position", "class_token", "bias", "gain", "shift"])
def vision_transformer():
    """Patches by a convolution, a class token, positions, and a head on the token."""
    inner = attention_weights()
    params = {
        "patches": normal(5, 2, 2, 3, WIDTH, scale=0.3),
        "bias": normal(6, WIDTH, scale=0.1),
        "class_token": normal(7, 1, WIDTH),
        "position": normal(8, 10, WIDTH),
        "gain": 1 + normal(9, WIDTH, scale=0.1),
        "shift": normal(10, WIDTH, scale=0.1),
        "inner": inner,
        "head": matrix(11, WIDTH, 3),
    }

    def loss(p, example):
        x = conv(example["image"], p["patches"], stride=2, padding="VALID") + p["bias"]
        x = jnp.concatenate([p["class_token"], x.reshape(-1, WIDTH)]) + p["position"]
        x = x + attend(p["inner"], layer_norm(x, p["gain"], p["shift"]), causal=False)
        return cross_entropy(x[:1] @ p["head"], example["label"][None])

    return loss, params, {"image": normal(12, ROWS, 6, 6, 3), "label": integers(13, 3, ROWS)}


@model(1.8, small=["relative"])
def relative_positions():
    """As in T5: a learned number for each distance and head, added to the scores."""

    def block(p, x):
        q, k, v = (heads(x @ p[name]) for name in ("query", "key", "value"))
        places = jnp.arange(LENGTH)
        bias = p["relative"][places[:, None] - places + LENGTH - 1].transpose(2, 0, 1)
        mixed = jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)
        return x + mixed.reshape(x.shape) @ p["out"]

    inner = attention_weights() | {"relative": normal(5, 2 * LENGTH - 1, HEADS)}
    return language_model(block, inner)


def experts():
    return {
        "router": matrix(1, WIDTH, 3),
        "up": matrix(2, 3, WIDTH, HIDDEN),
        "down": matrix(3, 3, HIDDEN, WIDTH),
    }


@model(1.4, slow={"['inner']['up']": "cond", "['inner']['down']": "cond"})
def experts_chosen_by_cond_for_an_example():
    """`cond` becomes a selection where it is mapped over examples."""

    def block(p, x):
        def expert(number):
            return lambda x: jax.nn.gelu(x @ p["up"][number]) @ p["down"][number]

        odds = jax.nn.softmax(x.mean(0) @ p["router"])
        chosen = odds[1] > odds[0]
        return x + odds.max() * lax.cond(chosen, expert(1), expert(0), x)

    return language_model(block, experts())


@model(1.3, slow={"['inner']['up']": "cond", "['inner']['down']": "cond"})
def experts_chosen_by_switch_for_an_example():
    def block(p, x):
        branches = [
            functools.partial(lambda up, down, x: jax.nn.gelu(x @ up) @ down, up, down)
            for up, down in zip(p["up"], p["down"], strict=True)
        ]
        odds = jax.nn.softmax(x.mean(0) @ p["router"])
        return x + odds.max() * lax.switch(jnp.argmax(odds), branches, x)

    return language_model(block, experts())


@model(1.5, slow={"['inner']['up']": "select_n", "['inner']['down']": "select_n"})
def experts_chosen_by_cond_for_a_position():
    """Under `vmap` over positions a `cond` computes both branches and selects."""

    def block(p, x):
        def one(x):
            expert = lambda number: lambda x: jax.nn.gelu(x @ p["up"][number]) @ p["down"][number]  # noqa: E731
            odds = jax.nn.softmax(x @ p["router"])
            return odds.max() * lax.cond(odds[1] > odds[0], expert(1), expert(0), x)

        return x + jax.vmap(one)(x)

    return language_model(block, experts())


@model(0.71, slow={"['inner']['w']": "cond"})
def branch_that_is_not_a_number():
    """The branch that is not taken must not spoil the gradient of the one that is."""

    def block(p, x):
        root = lambda x: jnp.sqrt(x[0, 0]) * jnp.tanh(x @ p["w"])  # noqa: E731
        return lax.cond(x[0, 0] > 0, root, lambda x: jnp.tanh(x @ p["w"]), x)

    return language_model(block, {"w": matrix(1, WIDTH, WIDTH)})


@model(1.5)
def experts_gathered_for_a_position():
    """Every position takes the matrices of its own expert."""

    def block(p, x):
        odds = jax.nn.softmax(x @ p["router"])
        chosen = jnp.argmax(odds, axis=1)
        hidden = jax.nn.gelu(jnp.einsum("td,tdh->th", x, p["up"][chosen]))
        return x + odds.max(1, keepdims=True) * jnp.einsum("th,thd->td", hidden, p["down"][chosen])

    return language_model(block, experts())


@model(1.5)
def experts_dispatched_by_one_hot_vectors():
    """As in Switch Transformers: einsums with a tensor of who goes where, without capacity."""

    def block(p, x):
        odds = jax.nn.softmax(x @ p["router"])
        weight, chosen = lax.top_k(odds, 2)
        combine = jnp.einsum("tk,tke->te", weight, jax.nn.one_hot(chosen, 3, dtype=x.dtype))
        sent = jnp.einsum("te,td->etd", (combine > 0).astype(x.dtype), x)
        hidden = jax.nn.gelu(jnp.einsum("etd,edh->eth", sent, p["up"]))
        return x + jnp.einsum("te,eth,ehd->td", combine, hidden, p["down"])

    return language_model(block, experts())


@model(1.5)
def map_over_positions():
    def block(p, x):
        return x + lax.map(lambda row: glu(p, row), x)

    return language_model(block, glu_weights())


@model(1.5)
def map_over_chunks_of_positions():
    def block(p, x):
        return x + lax.map(lambda row: glu(p, row), x, batch_size=4)

    return language_model(block, glu_weights())


@model(1.7)
def attention_in_chunks_of_queries():
    """Each chunk of queries against all keys, in a loop."""

    def block(p, x):
        k, v = heads(x @ p["key"]), heads(x @ p["value"])

        def chunk(x):
            scores = jnp.einsum("qhs,khs->hqk", heads(x @ p["query"]), k)
            return jnp.einsum("hqk,khs->qhs", jax.nn.softmax(scores), v)

        mixed = lax.map(chunk, x.reshape(3, 2, WIDTH))
        return x + mixed.reshape(x.shape) @ p["out"]

    return language_model(block, attention_weights())


@jax.custom_vjp
def stable_cross_entropy(logits, labels):
    return cross_entropy(logits, labels)


def _stable_forward(logits, labels):
    return cross_entropy(logits, labels), (logits, labels)


def _stable_backward(kept, cotangent):
    logits, labels = kept
    one_hot = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    return cotangent * (jax.nn.softmax(logits) - one_hot) / len(labels), None


stable_cross_entropy.defvjp(_stable_forward, _stable_backward)


@model(1.2)
def custom_loss_of_logits():
    params = {"table": normal(0, WORDS, WIDTH), "head": matrix(1, WIDTH, WORDS)}

    def loss(p, example):
        return stable_cross_entropy(p["table"][example[:-1]] @ p["head"], example[1:])

    return loss, params, tokens()


def head_in_chunks(x, head, labels):
    """The cross-entropy of x @ head, two positions at a time."""
    chunks = x.reshape(-1, 2, WIDTH), labels.reshape(-1, 2)
    return jnp.mean(lax.map(lambda chunk: cross_entropy(chunk[0] @ head, chunk[1]), chunks))


@model(1.2)
def head_in_remat_chunks():
    params = {"table": normal(0, WORDS, WIDTH), "head": matrix(1, WIDTH, WORDS)}
    loss = lambda p, e: jax.checkpoint(head_in_chunks)(p["table"][e[:-1]], p["head"], e[1:])  # noqa: E731
    return loss, params, tokens()


@jax.custom_vjp
def fused_cross_entropy(x, head, labels):
    return head_in_chunks(x, head, labels)


def _fused_forward(x, head, labels):
    loss, gradients = jax.value_and_grad(head_in_chunks, (0, 1))(x, head, labels)
    return loss, gradients


def _fused_backward(gradients, cotangent):
    return cotangent * gradients[0], cotangent * gradients[1], None


fused_cross_entropy.defvjp(_fused_forward, _fused_backward)


@model(1.2, slow={"['head']": "custom_vjp"})
def custom_loss_that_takes_the_head():
    """A fused, chunked cross-entropy that forms the gradient of the head in the forward pass."""
    params = {"table": normal(0, WORDS, WIDTH), "head": matrix(1, WIDTH, WORDS)}
    loss = lambda p, e: fused_cross_entropy(p["table"][e[:-1]], p["head"], e[1:])  # noqa: E731
    return loss, params, tokens()


@model(2.4, small=["norm"])
def remat_block():
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def block(p, x):
        x = x + attend(p, rms_norm(x, p["norm"]))
        return x + glu(p, x)

    inner = attention_weights() | glu_weights() | {"norm": 1 + normal(8, WIDTH, scale=0.1)}
    return language_model(block, inner)


@model(35, small=["norm"])
def scan_over_remat_layers():
    def block(p, x):
        @jax.checkpoint
        def layer(x, p):
            x = x + attend(p, rms_norm(x, p["norm"]), rotate)
            return x + glu(p, x), None

        return lax.scan(layer, x, p)[0]

    one = attention_weights() | glu_weights() | {"norm": 1 + normal(8, WIDTH, scale=0.1)}
    layers = jax.tree.map(lambda leaf: np.stack([leaf, leaf[::-1], -leaf]), one)
    return language_model(block, layers, head=False)


@model(
    6.1,
    small=["bias"],
    slow={"['inner']['up']": "function of parameters", "['inner']['down']": "function of"},
)
def loop_over_slices_of_stacked_layers():
    """A Python loop that takes layer after layer out of stacked arrays."""

    def block(p, x):
        for number in range(2):
            layer = jax.tree.map(lambda leaf: leaf[number], p)  # noqa: B023
            x = x + jax.nn.gelu(x @ layer["up"] + layer["bias"]) @ layer["down"]
        return x

    inner = {
        "up": matrix(1, 2, WIDTH, HIDDEN),
        "bias": normal(2, 2, HIDDEN),
        "down": matrix(3, 2, HIDDEN, WIDTH),
    }
    return language_model(block, inner)


@model(1.93, slow={"['inner']": "dynamic_slice"})
def counted_loop_over_stacked_layers():
    def block(p, x):
        return lax.fori_loop(0, 2, lambda number, x: x + jnp.tanh(x @ p[number]), x)

    return language_model(block, matrix(1, 2, WIDTH, WIDTH))


def framework_loss(predict):
    return lambda p, e: cross_entropy(predict(p, e[:-1]), e[1:])


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS)(y, mask=nn.make_causal_mask(x[:, 0]))
        y = nn.RMSNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(y)))


def linen(block):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, words):
            table = nn.Embed(WORDS, WIDTH)
            return table.attend(block(table(words)))

    net = Network()
    return framework_loss(net.apply), weights(net.init, jnp.zeros(LENGTH, int)), tokens()


@model(1.1, small=["bias", "scale"])
def flax_linen():
    return linen(lambda x: nn.remat(LinenBlock)()(x))


@model(2.4, small=["bias", "scale"])
def flax_linen_scanned():
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return LinenBlock()(x), None

    layers = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    return linen(lambda x: layers()(x, None)[0])


@model(1.3, small=["bias", "scale"])
def flax_nnx():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs)
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, words):
            x = self.table(words)
            x = x + self.attention(self.norm(x))
            return self.table.attend(jnp.tanh(self.dense(x)))

    graph, state, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    predict = lambda p, words: nnx.merge(graph, nnx.State(p), rest)(words)  # noqa: E731
    return framework_loss(predict), nnx.to_pure_dict(state), tokens()


@model(1.3, small=["bias", ".norm.weight"])
def equinox():
    class Network(eqx.Module):
        table: eqx.nn.Embedding
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        dense: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.table = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[1])
            self.dense = eqx.nn.Linear(WIDTH, WORDS, key=keys[2])

        def __call__(self, words):
            x = jax.vmap(self.table)(words)
            y = jax.vmap(self.norm)(x)
            return jax.vmap(self.dense)(x + self.attention(y, y, y))

    params, static = eqx.partition(Network(jax.random.key(0)), eqx.is_inexact_array)
    predict = lambda p, words: eqx.combine(p, static)(words)  # noqa: E731
    return framework_loss(predict), params, tokens()


def standardised(kernel, gain):
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - kernel.mean(axes)
    return centred * gain * lax.rsqrt((centred**2).sum(axes) + 1e-4)


@model(0.68, small=["gain"], slow={"['kernel']": "function of parameters"})
def weight_standardised_convolution():
    params = {
        "kernel": normal(0, 3, 3, 2, 6),
        "gain": 1 + normal(1, 6, scale=0.1),
        "head": matrix(2, 6, 3),
    }

    def loss(p, example):
        x = jax.nn.relu(conv(example["image"], standardised(p["kernel"], p["gain"])))
        return cross_entropy((x.mean((0, 1)) @ p["head"])[None], example["label"][None])

    return loss, params, {"image": normal(3, ROWS, 6, 6, 2), "label": integers(4, 3, ROWS)}


@model(2, small=["gain"], slow={"['inner']['up']": "function of parameters"})
def weight_standardised_dense():
    block = lambda p, x: x + jnp.tanh(x @ standardised(p["up"], p["gain"])) @ p["down"]  # noqa: E731
    inner = {
        "up": matrix(1, WIDTH, HIDDEN),
        "gain": 1 + normal(2, HIDDEN, scale=0.1),
        "down": matrix(3, HIDDEN, WIDTH),
    }
    return language_model(block, inner)


@model(1.3)
def lora():
    block = lambda p, x: jnp.tanh(x @ FIXED + (x @ p["a"]) @ p["b"])  # noqa: E731
    return language_model(block, {"a": matrix(1, WIDTH, 2), "b": normal(2, 2, WIDTH)})


FIXED = jnp.asarray(matrix(11, WIDTH, WIDTH), jnp.float32)


@model(0.91, slow={"['inner']['a']": "function of parameters", "['inner']['b']": "function of"})
def merged_lora():
    block = lambda p, x: jnp.tanh(x @ (FIXED + 0.5 * p["a"] @ p["b"]))  # noqa: E731
    return language_model(block, {"a": matrix(1, WIDTH, 2), "b": normal(2, 2, WIDTH)})


@model(0.79, slow={"['inner']['w']": "function of parameters"})
def scaled_by_a_constant():
    """As with maximal-update or equalised learning rates."""
    block = lambda p, x: jnp.tanh(x @ (WIDTH**-0.5 * p["w"]))  # noqa: E731
    return language_model(block, {"w": normal(1, WIDTH, WIDTH)})


@model(0.22, small=["gain"], slow={"['inner']['w']": "function of parameters"})
def spectrally_scaled():
    """Divided by the largest singular value, with its gradient."""

    def block(p, x):
        return jnp.tanh(x @ (p["gain"] * p["w"] / jnp.linalg.norm(p["w"], ord=2)))

    return language_model(block, {"w": matrix(1, WIDTH, WIDTH), "gain": normal(2)})


@model(0.74, slow={"['inner']['w']": "function of parameters"})
def spectrally_scaled_by_power_iteration():
    """With vectors through which no gradient passes, as in most libraries."""

    def block(p, x):
        u = jnp.ones(WIDTH, x.dtype)
        for _ in range(3):
            v = p["w"].T @ u
            u = p["w"] @ (v / jnp.linalg.norm(v))
            u = u / jnp.linalg.norm(u)
        u, v = lax.stop_gradient((u, v / jnp.linalg.norm(v)))
        return jnp.tanh(x @ (p["w"] / (u @ p["w"] @ v)))

    return language_model(block, {"w": matrix(1, WIDTH, WIDTH)})


@functools.cache
def made(name):
    """The model in float32."""
    loss, params, batch = MODELS[name].make()
    cast = lambda leaf: jnp.asarray(  # noqa: E731
        leaf, jnp.float32 if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else None
    )
    return loss, jax.tree.map(cast, params), jax.tree.map(cast, batch)


@pytest.mark.usefixtures("nothing_reserved")
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_clipping(name):
    loss, params, batch = made(name)
    clip = MODELS[name].clip
    (found, _), (wanted, stats) = (
        jax.jit(module.clipped_grad(loss, l2_clip_norm=clip).with_stats)(
            params, batch, jnp.zeros(ROWS, bool)
        )
        for module in (ghost, mirrordp)
    )
    assert 0 < np.sum(stats.unprivatized_norms > clip) < ROWS, stats.unprivatized_norms
    assert all(np.any(leaf) for leaf in jax.tree.leaves(wanted))
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.usefixtures("by_gram")
@pytest.mark.parametrize("name", MODELS)
def test_what_takes_explicit_gradients(name, capsys):
    wanted = MODELS[name]
    paths = {path.name: path for path in ghost.explain(*made(name))}
    assert capsys.readouterr().out.count("\n") == len(paths) + 2
    small = {path for path in paths if {path, re.findall(r"\w+", path)[-1]} & {*wanted.small}}
    explicit = {path: found for path, found in paths.items() if found.path == "explicit"}
    assert set(explicit) == small | set(wanted.slow)
    for path, reason in wanted.slow.items():
        assert reason in explicit[path].reason
