"""Fine-tuning: a Flax network whose body stays frozen while its head is trained privately.

The body is trained on public rows of a related task. `trainable` says which leaves may move; the
others have no gradient, no noise and no share of the clip norm.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp

rng = np.random.default_rng(0)
directions = rng.normal(size=(20, 3))


def draw(rows, shift):
    """Draws rows of one of two tasks with the same features; `shift` permutes the labels."""
    x = rng.normal(size=(rows, 20))
    y = np.argmax(x @ directions, axis=1)
    return {"x": x.astype(np.float32), "y": np.asarray((y + shift) % 3, np.int32)}


public = mirrordp.PublicData(draw(3_000, shift=0))
private = mirrordp.PrivateData(draw(4_000, shift=1))
test = draw(4_000, shift=1)


class Network(nn.Module):
    """A network of two layers, of which the last is the head."""

    @nn.compact
    def __call__(self, x):
        """Returns the logits of one example."""
        x = nn.tanh(nn.Dense(32, name="body")(x))
        return nn.Dense(3, name="head")(x)


network = Network()


def loss_fn(params, example):
    logits = network.apply(params, example["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


def accuracy(params):
    guesses = jnp.argmax(network.apply(params, test["x"]), axis=1)
    return float(jnp.mean(guesses == test["y"]))


start = network.init(jax.random.key(0), jnp.zeros(20))
pretrained = mirrordp.warm_start(
    loss_fn, start, public, optimizer=optax.adam(3e-3), batch_size=100, max_epochs=60
).params
mechanism = mirrordp.Mechanism.calibrate(
    epsilon=2.0,
    delta=1e-5,
    sampling=mirrordp.PoissonSampling.for_batch_size(400, num_examples=len(private)),
    num_steps=150,
    l2_clip_norm=1.0,
)
step = mirrordp.TrainStep(
    loss_fn, mechanism, optax.sgd(2.0), trainable={"params": {"body": False, "head": True}}
)
*_, (state, info) = mirrordp.train(step, pretrained, private, seed=0)
before, after = accuracy(pretrained), accuracy(state.params)
print(f"accuracy {before:.3f} before and {after:.3f} after, epsilon {mechanism.epsilon(1e-5):.2f}")

body = lambda params: params["params"]["body"]  # noqa: E731
assert jax.tree.all(
    jax.tree.map(lambda a, b: bool((a == b).all()), body(pretrained), body(state.params))
)
assert before < 0.4 < 0.7 < after
