"""The paper's networks: their sizes, and pooling against the textbook form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from experiments import models
from experiments.deep import tasks


@pytest.mark.parametrize(
    ("network", "size"),
    [
        (models.cifar10_cnn(), 550_570),
        (models.emnist_cnn(), 27_231),
        # Embedding, two LSTM layers of width 120, output: V·120 + 2(2·120·480 + 480) + 121·V.
        (models.lstm_language_model(), 8000 * 241 + 2 * (2 * 120 * 480 + 480)),
    ],
    ids=["cifar10", "emnist", "wikitext2"],
)
def test_number_of_parameters(network, size):
    params = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size


def textbook_conv(x, layer, stride=1, padding="SAME"):
    """tanh of a convolution, one filter tap at a time."""
    kernel, bias = (np.asarray(layer[name], np.float64) for name in ("kernel", "bias"))
    size = kernel.shape[0]
    if padding == "SAME":
        total = [max((-(-n // stride) - 1) * stride + size - n, 0) for n in x.shape[:2]]
        x = np.pad(x, [(n // 2, n - n // 2) for n in total] + [(0, 0)])
    height, width = ((n - size) // stride + 1 for n in x.shape[:2])
    out = np.zeros((height, width, kernel.shape[-1])) + bias
    for row in range(size):
        for column in range(size):
            taps = x[
                row : row + stride * height : stride, column : column + stride * width : stride
            ]
            out += taps[:height, :width] @ kernel[row, column]
    return np.tanh(out)


def textbook_pool(x, stride):
    rows, columns = (range(0, n - 1, stride) for n in x.shape[:2])
    windows = [[x[i : i + 2, j : j + 2].max((0, 1)) for j in columns] for i in rows]
    return np.array(windows)


def textbook_dense(x, layer):
    return x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)


def test_cifar10_network_layer_by_layer():
    """The appendix's table: two convolutions and a max-pool, three times, then 128 units."""
    network = models.cifar10_cnn()
    params = jax.tree.map(lambda leaf: leaf + 0.01, jax.jit(network.init)(jax.random.key(0)))
    image = np.asarray(jax.random.normal(jax.random.key(1), (32, 32, 3)), np.float64)
    x = image
    for first, second in zip(params["convs"][::2], params["convs"][1::2], strict=True):
        x = textbook_pool(textbook_conv(textbook_conv(x, first), second), 2)
    assert x.shape == (4, 4, 128)
    logits = textbook_dense(np.tanh(textbook_dense(x.ravel(), params["hidden"])), params["out"])
    found = jax.jit(network.predict)(params, jnp.asarray(image, jnp.float32))
    np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-4)


def test_emnist_network_layer_by_layer():
    """The appendix's table with the two max-pools of stride 1 that it leaves out."""
    network = models.emnist_cnn()
    params = jax.tree.map(lambda leaf: leaf + 0.01, jax.jit(network.init)(jax.random.key(0)))
    image = np.asarray(jax.random.normal(jax.random.key(1), (28, 28, 1)), np.float64)
    x = textbook_pool(textbook_conv(image, params["conv1"], 2), 1)
    x = textbook_pool(textbook_conv(x, params["conv2"], 2, "VALID"), 1)
    logits = textbook_dense(np.tanh(textbook_dense(x.ravel(), params["hidden"])), params["out"])
    found = jax.jit(network.predict)(params, jnp.asarray(image, jnp.float32))
    np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-4)


def test_lstm_step_by_step():
    """Gates in the order input, forget, candidate, output; logits of the word after each one."""
    network = models.lstm_language_model(vocabulary=7, width=3, layers=2)
    params = jax.tree.map(lambda leaf: 2 * leaf + 0.1, jax.jit(network.init)(jax.random.key(0)))
    tokens = np.array([1, 5, 0, 5])
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    x = exact["embedding"][tokens]
    for cell in exact["cells"]:
        hidden, memory, outputs = np.zeros(3), np.zeros(3), []
        for word in x:
            gates = np.split(word @ cell["input"] + hidden @ cell["state"] + cell["bias"], 4)
            memory = sigmoid(gates[1]) * memory + sigmoid(gates[0]) * np.tanh(gates[2])
            hidden = sigmoid(gates[3]) * np.tanh(memory)
            outputs.append(hidden)
        x = np.array(outputs)
    logits = textbook_dense(x, exact["out"])
    found = jax.jit(network.predict)(params, tokens)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)
    # The last word is a target only, the first one an input only.
    likelihoods = jax.nn.log_softmax(logits[:-1])[np.arange(3), tokens[1:]]
    loss = jax.jit(network.loss)(params, tokens)
    np.testing.assert_allclose(loss, -likelihoods.mean(), rtol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_max_pool(stride):
    x = jax.random.normal(jax.random.key(0), (7, 6, 3))

    def textbook(x):
        strides = (stride, stride, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1), strides, "VALID")

    def ours(x):
        return models._max_pool(x, stride=stride)

    np.testing.assert_array_equal(ours(x), textbook(x))
    weigh = lambda pool: jax.grad(lambda x: jnp.sum(jnp.sin(pool(x))))(x)  # noqa: E731
    np.testing.assert_allclose(weigh(ours), weigh(textbook), rtol=1e-6)


@pytest.mark.parametrize("change", [tasks.warp, tasks.shift_and_mirror])
def test_changes_of_public_images(change):
    """A bar in the middle stays a bar, about where it was and about as heavy, and moves."""
    image = np.zeros((28, 28, 1), np.float32)
    image[8:20, 13:15] = 1
    compiled = jax.jit(jax.vmap(change, in_axes=(None, 0)))
    seen = compiled(image, jax.random.split(jax.random.key(0), 64))
    assert seen.shape == (64, 28, 28, 1)
    rows, columns = np.mgrid[:28, :28]
    mass = seen.sum(axis=(1, 2, 3))
    assert np.all(np.abs(mass / image.sum() - 1) < 0.35)
    for places in (rows, columns):
        middles = (seen[..., 0] * places).sum(axis=(1, 2)) / mass
        assert np.all(np.abs(middles - 13.5) < 4.6)
        assert middles.std() > 0.5
    ones = jax.jit(change)(jnp.ones((28, 28, 3)), jax.random.key(1))
    np.testing.assert_allclose(ones, 1.0, rtol=1e-5)


def test_dropout_masks_what_enters_and_leaves_the_lstm():
    network = models.lstm_language_model(vocabulary=20, width=16, layers=2)
    params = jax.tree.map(lambda leaf: 3 * leaf, jax.jit(network.init)(jax.random.key(0)))
    tokens, key = jnp.arange(8) % 5, jax.random.key(1)

    @jax.jit
    def loss(params, tokens, key, rate):
        masks = [
            jax.random.bernoulli(one, 1 - rate, (7, 16)) / (1 - rate)
            for one in jax.random.split(key, 3)
        ]
        x = params["embedding"][tokens[:-1]] * masks[0]
        for cell, mask in zip(params["cells"], masks[1:], strict=True):
            x = models._lstm(cell, x) * mask
        logits = x @ params["out"]["kernel"] + params["out"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(7), tokens[1:]])

    dropout_loss = jax.jit(models.dropout_loss)
    for rate in (0.0, 0.3):
        found = dropout_loss(params, tokens, key, rate=rate)
        np.testing.assert_allclose(found, loss(params, tokens, key, rate), rtol=1e-5)
    plain = jax.jit(network.loss)(params, tokens)
    np.testing.assert_allclose(dropout_loss(params, tokens, key, rate=0.0), plain, rtol=1e-6)
    assert abs(found - plain) > 1e-3
