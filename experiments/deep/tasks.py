"""What each data set is trained on: network, losses, metrics."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import models
from experiments.models import Network
from mirrordp.types import LossFn, Params

DROPOUT = 0.5
"""Of the language model, on public text only."""


class Task(NamedTuple):
    """A network with its private loss, its loss on augmented public examples, and its metrics.

    Attributes:
        network: how to begin, predict, and the loss on one example.
        augmented_loss: the loss with a random key, for public examples: images are changed, on text
            the network is (dropout).
        metrics: `(params, example) -> {name: value}`, averaged over examples.
        judging_loss: the loss on held-out public examples, if augmented ones are learned from:
            without dropout, but with changed images.
    """

    network: Network
    augmented_loss: LossFn
    metrics: Any
    judging_loss: LossFn


@functools.cache
def task(dataset: str) -> Task:
    """Returns the task of a data set; the same object each time, so that nothing compiles twice."""
    make = {
        "cifar10": models.cifar10_cnn,
        "emnist": models.emnist_cnn,
        "wikitext2": models.lstm_language_model,
    }
    return with_network(dataset, make[dataset]())


def with_network(dataset: str, network: Network) -> Task:
    """Returns the task of a data set with a network of the data set's kind, of any size."""
    if dataset == "wikitext2":

        def dropout_loss(params: Params, tokens: jax.Array, key: jax.Array) -> jax.Array:
            return models.dropout_loss(params, tokens, key, rate=DROPOUT)

        metrics = functools.partial(_text_metrics, network)
        return Task(network, dropout_loss, metrics, network.loss)
    changed = shift_and_mirror if dataset == "cifar10" else warp

    def augmented_loss(params: Params, example: Any, key: jax.Array) -> jax.Array:
        image, label = example
        return network.loss(params, (changed(image, key), label))

    metrics = functools.partial(_image_metrics, network)
    return Task(network, augmented_loss, metrics, augmented_loss)


def shift_and_mirror(image: jax.Array, key: jax.Array, *, margin: int = 4) -> jax.Array:
    """Shifts an image by up to `margin` pixels, edges repeated, and mirrors half of them."""
    shift_key, flip_key = jax.random.split(key)
    padded = jnp.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="edge")
    row, column = jax.random.randint(shift_key, (2,), 0, 2 * margin + 1)
    image = jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
    return jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)


def warp(image: jax.Array, key: jax.Array) -> jax.Array:
    """Turns a letter by up to 12 degrees, scales and shears it by 10%, shifts it by 2 pixels.

    Letters must not be mirrored. Every pixel of the result is interpolated at A(x − c) + c + shift.
    """
    turn, high, wide, shear, *shift = jax.random.uniform(key, (6,), minval=-1.0, maxval=1.0)
    angle = turn * jnp.pi / 15
    rotation = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
    scale = jnp.exp(0.1 * jnp.array([[high], [wide]]))
    matrix = scale * (rotation @ jnp.array([[1.0, 0.1 * shear], [0.0, 1.0]]))
    centre = jnp.array([(n - 1) / 2 for n in image.shape[:2]])
    grid = jnp.stack(jnp.meshgrid(*map(jnp.arange, image.shape[:2]), indexing="ij"), axis=-1)
    places = (grid - centre) @ matrix.T + centre + 2 * jnp.array(shift)
    one_channel = functools.partial(
        jax.scipy.ndimage.map_coordinates,
        coordinates=[places[..., 0], places[..., 1]],
        order=1,
        mode="nearest",
    )
    return jax.vmap(one_channel, in_axes=-1, out_axes=-1)(image)


def _image_metrics(network: Network, params: Params, example: Any) -> dict[str, jax.Array]:
    image, label = example
    logits = network.predict(params, image)
    loss = jax.nn.logsumexp(logits) - logits[label]
    return {"loss": loss, "accuracy": (jnp.argmax(logits) == label).astype(jnp.float32)}


def _text_metrics(network: Network, params: Params, tokens: jax.Array) -> dict[str, jax.Array]:
    logits = network.predict(params, tokens[:-1])
    targets = tokens[1:]
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    loss = jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)
    return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, axis=1) == targets)}


def evaluate(task_: Task, params: Params, examples: Any, *, batch_size: int) -> dict[str, Any]:
    """Returns the metrics of stacked parameters (one row per run) over all examples.

    Args:
        task_: whose metrics.
        params: parameters with a leading axis for runs.
        examples: arrays on the device.
        batch_size: examples at a time.
    """
    count = jax.tree.leaves(examples)[0].shape[0]
    totals: dict[str, Any] = {}
    for start in range(0, count, batch_size):
        stop = min(start + batch_size, count)
        # Full batches of one shape; what the last one counts twice is masked.
        first = max(0, stop - batch_size)
        rows = jax.tree.map(lambda leaf, first=first: leaf[first : first + batch_size], examples)
        fresh = np.arange(min(batch_size, count)) >= start - first
        for name, value in _sums(task_.metrics, params, rows, fresh).items():
            totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)
    return {name: value / count for name, value in totals.items()}


@functools.partial(jax.jit, static_argnames="metrics")
def _sums(metrics, params, examples, fresh):
    def one_run(params):
        values = jax.vmap(metrics, in_axes=(None, 0))(params, examples)
        return jax.tree.map(lambda leaf: jnp.sum(jnp.where(fresh, leaf, 0)), values)

    return jax.lax.map(one_run, params)
