"""The paper's networks as plain JAX: `init(key) -> params` and `loss(params, example) -> scalar`.

An example of the image networks is `(image, label)`, with the image as float32 [height, width,
channels]; one of the language models is a row of token numbers, of which each predicts the next.
Where the paper's table is silent, field practice decides: tanh activations, "same" padding for
CIFAR-10, and two 2x2 stride-1 max-pools in the EMNIST network of Papernot et al.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mirrordp.types import LossFn, Params


class Network(NamedTuple):
    """A network: how to initialise it, what it predicts, and its loss on one example."""

    init: "callable"
    predict: "callable"
    loss: LossFn


def _dense_init(key: jax.Array, fan_in: int, *shape: int) -> jax.Array:
    """Returns Glorot-uniform weights."""
    limit = math.sqrt(6 / (fan_in + shape[-1]))
    return jax.random.uniform(key, shape, minval=-limit, maxval=limit)


def _conv(x: jax.Array, layer: Params, *, stride: int = 1, padding: str = "SAME") -> jax.Array:
    out = lax.conv_general_dilated(
        x[None],
        layer["kernel"],
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )[0]
    return jnp.tanh(out + layer["bias"])


def _conv_init(key: jax.Array, size: int, inputs: int, outputs: int) -> Params:
    fan_in, fan_out = size * size * inputs, size * size * outputs
    limit = math.sqrt(6 / (fan_in + fan_out))
    kernel = jax.random.uniform(key, (size, size, inputs, outputs), minval=-limit, maxval=limit)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _dense(x: jax.Array, layer: Params) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _linear_init(key: jax.Array, inputs: int, outputs: int) -> Params:
    return {"kernel": _dense_init(key, inputs, inputs, outputs), "bias": jnp.zeros(outputs)}


def _max_pool(x: jax.Array, *, stride: int) -> jax.Array:
    """Returns the maxima over windows of 2x2."""
    if stride == 1:
        # Windows overlap, and what a compiler makes of the gradient is slow: neighbours instead.
        x = jnp.maximum(x[1:], x[:-1])
        return jnp.maximum(x[:, 1:], x[:, :-1])
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1), (stride, stride, 1), "VALID")


def _cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits) - logits[label]


def cifar10_cnn(widths: Sequence[int] = (32, 32, 64, 64, 128, 128), hidden: int = 128) -> Network:
    """Makes a network of six 3x3 convolutions, three max-pools and a hidden layer.

    By default it is the paper's, with 550,570 parameters; tests use smaller ones.
    """

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 8)
        inputs = (3, *widths[:-1])
        convs = [_conv_init(k, 3, a, b) for k, a, b in zip(keys[:6], inputs, widths, strict=True)]
        return {
            "convs": convs,
            "hidden": _linear_init(keys[6], 4 * 4 * widths[-1], hidden),
            "out": _linear_init(keys[7], hidden, 10),
        }

    def predict(params: Params, image: jax.Array) -> jax.Array:
        x = image
        for number, layer in enumerate(params["convs"]):
            x = _conv(x, layer)
            if number % 2 == 1:
                x = _max_pool(x, stride=2)
        x = jnp.tanh(_dense(x.reshape(-1), params["hidden"]))
        return _dense(x, params["out"])

    return _classifier(init, predict)


def emnist_cnn(widths: tuple[int, int] = (16, 32), hidden: int = 32) -> Network:
    """Makes a network of two convolutions (8x8 and 4x4, stride 2) and a hidden layer.

    By default it is the paper's, with 27,231 parameters; tests use smaller ones.
    """

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 4)
        return {
            "conv1": _conv_init(keys[0], 8, 1, widths[0]),
            "conv2": _conv_init(keys[1], 4, *widths),
            "hidden": _linear_init(keys[2], 4 * 4 * widths[1], hidden),
            "out": _linear_init(keys[3], hidden, 47),
        }

    def predict(params: Params, image: jax.Array) -> jax.Array:
        x = _max_pool(_conv(image, params["conv1"], stride=2), stride=1)
        x = _max_pool(_conv(x, params["conv2"], stride=2, padding="VALID"), stride=1)
        x = jnp.tanh(_dense(x.reshape(-1), params["hidden"]))
        return _dense(x, params["out"])

    return _classifier(init, predict)


def _classifier(init, predict) -> Network:
    def loss(params: Params, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        image, label = example
        return _cross_entropy(predict(params, image), label)

    return Network(init, predict, loss)


def lstm_language_model(vocabulary: int = 8000, width: int = 120, layers: int = 2) -> Network:
    """Makes WikiText-2's network: embedding, LSTM layers of equal width, dense output."""

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 2 + 2 * layers)
        cells = [
            {
                "input": _dense_init(keys[2 + 2 * n], width, width, 4 * width),
                "state": _dense_init(keys[3 + 2 * n], width, width, 4 * width),
                # A forget gate that starts open lets gradients through from the first step.
                "bias": jnp.zeros(4 * width).at[width : 2 * width].set(1.0),
            }
            for n in range(layers)
        ]
        return {
            "embedding": jax.random.uniform(keys[0], (vocabulary, width), minval=-0.1, maxval=0.1),
            "cells": cells,
            "out": _linear_init(keys[1], width, vocabulary),
        }

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        return _next_word_loss(_language_model(params, tokens[:-1]), tokens[1:])

    return Network(init, _language_model, loss)


def dropout_loss(params: Params, tokens: jax.Array, key: jax.Array, *, rate: float) -> jax.Array:
    """Returns `lstm_language_model`'s loss with dropout before and after its LSTM layers."""
    keys = jax.random.split(key, 1 + len(params["cells"]))

    def dropped(x: jax.Array, layer: int) -> jax.Array:
        kept = jax.random.bernoulli(keys[layer], 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0.0)

    return _next_word_loss(_language_model(params, tokens[:-1], dropped), tokens[1:])


def _language_model(params: Params, tokens: jax.Array, changed=lambda x, layer: x) -> jax.Array:
    """Returns the logits of the next word; `changed` may alter what leaves each layer."""
    x = changed(params["embedding"][tokens], 0)
    for number, cell in enumerate(params["cells"]):
        x = changed(_lstm(cell, x), 1 + number)
    return _dense(x, params["out"])


def _next_word_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


def _lstm(cell: Params, inputs: jax.Array) -> jax.Array:
    width = cell["state"].shape[0]
    projected = inputs @ cell["input"] + cell["bias"]

    def step(state, x):
        hidden, memory = state
        gates = x + hidden @ cell["state"]
        i, f, g, o = jnp.split(gates, 4)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
        return (hidden, memory), hidden

    zero = jnp.zeros(width, inputs.dtype)
    _, outputs = lax.scan(step, (zero, zero), projected)
    return outputs


def _fast_lstm(cell: Params, inputs: jax.Array) -> jax.Array:
    """Computes `_lstm` with a faster ordinary gradient: one matrix product after the scan.

    Differentiated as it stands, a scan adds to the gradient of a weight at every step, which reads
    and writes a matrix of that size 20 times; with a copy of the weights for every user that is
    most of the memory traffic of a local step.
    """
    fixed = lax.stop_gradient(cell["state"])
    projected = inputs @ cell["input"] + cell["bias"]

    def step(state, x):
        hidden, memory = state
        i, f, g, o = jnp.split(x + hidden @ fixed, 4)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        new = f * memory + i * g
        hidden = o * jnp.tanh(new)
        return (hidden, new), (hidden, (i, f, g, o, memory, new))

    zero = jnp.zeros(fixed.shape[0], inputs.dtype)
    _, (outputs, kept) = lax.scan(step, (zero, zero), lax.stop_gradient(projected))
    before = jnp.concatenate([jnp.zeros_like(outputs[:1]), outputs[:-1]])
    # The value of the gates is not used again: only their gradient goes this way.
    return _from_gates(projected + before @ cell["state"], outputs, kept, fixed)


@jax.custom_vjp
def _from_gates(gates, outputs, kept, weights):
    return outputs


def _from_gates_forward(gates, outputs, kept, weights):
    return outputs, (kept, weights)


def _from_gates_backward(residuals, cotangents):
    """Returns the gradient of all gates by the LSTM's recursion, from the last step on."""
    kept, weights = residuals

    def step(carry, x):
        later_gates, d_memory = carry
        d_output, (i, f, g, o, memory, new) = x
        d_hidden = d_output + later_gates @ weights.T
        squashed = jnp.tanh(new)
        d_memory = d_memory + d_hidden * o * (1 - squashed**2)
        d_gates = jnp.concatenate(
            [
                d_memory * g * i * (1 - i),
                d_memory * memory * f * (1 - f),
                d_memory * i * (1 - g**2),
                d_hidden * squashed * o * (1 - o),
            ]
        )
        return (d_gates, d_memory * f), d_gates

    width, dtype = weights.shape[0], cotangents.dtype
    start = (jnp.zeros(4 * width, dtype), jnp.zeros(width, dtype))
    _, d_gates = lax.scan(step, start, (cotangents, kept), reverse=True)
    return d_gates, None, None, None


_from_gates.defvjp(_from_gates_forward, _from_gates_backward)


# The same object for the same sizes, so that what was compiled for it is found again.
@functools.cache
def stackoverflow_lstm(
    tokens: int = 10_004, embedding: int = 96, width: int = 670, *, pad: int = 0
) -> Network:
    """Makes the StackOverflow network: embedding, LSTM, projection to its width, output.

    By default it has the paper's 4,050,748 parameters.

    A row of tokens is read up to its last but one, and each position predicts the next token. The
    loss is the sum over targets that are not padding, divided by the length of the row, so that
    every word counts alike whatever the length of its sentence.
    """

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 5)
        return {
            "embedding": jax.random.uniform(
                keys[0], (tokens, embedding), minval=-0.05, maxval=0.05
            ),
            "cell": {
                "input": _dense_init(keys[1], embedding, embedding, 4 * width),
                "state": _dense_init(keys[2], width, width, 4 * width),
                "bias": jnp.zeros(4 * width).at[width : 2 * width].set(1.0),
            },
            "projection": _linear_init(keys[3], width, embedding),
            "out": _linear_init(keys[4], embedding, tokens),
        }

    def predict(params: Params, row: jax.Array) -> jax.Array:
        x = _fast_lstm(params["cell"], params["embedding"][row])
        return _dense(_dense(x, params["projection"]), params["out"])

    def loss(params: Params, row: jax.Array) -> jax.Array:
        logits, targets = predict(params, row[:-1]), row[1:]
        picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=1) - picked
        return jnp.sum(jnp.where(targets == pad, 0.0, losses)) / targets.shape[0]

    return Network(init, predict, loss)
