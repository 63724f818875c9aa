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
    seen = jax.vmap(change, in_axes=(None, 0))(image, jax.random.split(jax.random.key(0), 64))
    assert seen.shape == (64, 28, 28, 1)
    rows, columns = np.mgrid[:28, :28]
    mass = seen.sum(axis=(1, 2, 3))
    assert np.all(np.abs(mass / image.sum() - 1) < 0.35)
    for places in (rows, columns):
        middles = (seen[..., 0] * places).sum(axis=(1, 2)) / mass
        assert np.all(np.abs(middles - 13.5) < 4.6)
        assert middles.std() > 0.5
    np.testing.assert_allclose(change(jnp.ones((28, 28, 3)), jax.random.key(1)), 1.0, rtol=1e-5)


def test_dropout_masks_what_enters_and_leaves_the_lstm():
    network = models.lstm_language_model(vocabulary=20, width=16, layers=2)
    params = jax.tree.map(lambda leaf: 3 * leaf, network.init(jax.random.key(0)))
    tokens, key = jnp.arange(8) % 5, jax.random.key(1)

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

    for rate in (0.0, 0.3):
        found = models.dropout_loss(params, tokens, key, rate=rate)
        np.testing.assert_allclose(found, loss(params, tokens, key, rate), rtol=1e-5)
    plain = network.loss(params, tokens)
    np.testing.assert_allclose(models.dropout_loss(params, tokens, key, rate=0.0), plain, rtol=1e-6)
    assert abs(found - plain) > 1e-3
