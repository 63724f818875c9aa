"""What server and clients agree on: the model, its loss, and where rows come from."""

import jax.numpy as jnp
import numpy as np
import optax

FEATURES = 8
PARAMS = {"w": jnp.zeros(FEATURES), "b": jnp.zeros([])}


def loss_fn(params, example):
    logit = example["x"] @ params["w"] + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


def draw(rows, seed):
    """Rows of one rule; in an app of your own these come from a disk."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)) / np.sqrt(FEATURES)
    y = x @ np.linspace(-6, 6, FEATURES) + rng.logistic(size=rows) > 0
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def accuracy(params, rows):
    return float(np.mean((rows["x"] @ params["w"] + params["b"] > 0) == (rows["y"] > 0.5)))
