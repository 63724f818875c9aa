"""Federated learning with user-level privacy: DP-FedAvg cold and warm, and PDA-DPMD.

One record is one user with all of its rows. 2,000 private users own 0 to 39 rows each, of which at
most 16 are used; 30 public users train on the server. All three runs cost the same epsilon.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp
from mirrordp.training import server_sgd

FEATURES, CLASSES, STEPS, DELTA = 60, 10, 40, 1e-5
rng = np.random.default_rng(1)
scales = np.arange(1, FEATURES + 1) ** -0.5
scales /= np.linalg.norm(scales)
rule = rng.normal(size=(FEATURES, CLASSES))


def draw(rows):
    x = rng.normal(size=(rows, FEATURES)) * scales
    y = np.argmax(20 * x @ rule + rng.gumbel(size=(rows, CLASSES)), axis=1)
    return {"x": x.astype(np.float32), "y": y.astype(np.int32)}


def users(count):
    owners = np.repeat(np.arange(count), rng.integers(0, 40, count))
    return {"arrays": draw(len(owners)), "user_ids": owners, "users": range(count)}


def loss_fn(params, example):
    logits = example["x"] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


private = mirrordp.PrivateClients.from_rows(**users(2_000), max_examples_per_user=16)
# No public user is one of the private users.
public = mirrordp.PublicClients.from_users(
    [draw(size) for size in rng.integers(1, 16, 30)], max_examples_per_user=16
)
test = draw(4_000)


def test_loss(params):
    return float(jnp.mean(jax.vmap(loss_fn, in_axes=(None, 0))(params, test)))


mechanism = mirrordp.Mechanism.calibrate(
    epsilon=0.4,
    delta=DELTA,
    sampling=mirrordp.PoissonSampling.for_batch_size(100, num_examples=len(private)),
    num_steps=STEPS,
    l2_clip_norm=0.3,
    unit="user",
)
cold = {"w": jnp.zeros((FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}
warm = mirrordp.warm_start_clients(
    loss_fn, cold, public, optimizer=optax.adam(0.03), batch_size=None, patience=20
)
step = mirrordp.FederatedStep(loss_fn, mechanism, server_sgd(3.0), client_learning_rate=1.0)


def train(params, alpha=1.0):
    *_, (state, info) = mirrordp.train(step, params, private, public, alpha=alpha, seed=0)
    assert info.charged_steps == STEPS
    return test_loss(state.params)


# The paper's schedule cos(pi t / (i T)) with i = 3.
losses = {
    "cold": train(cold),
    "warm": train(warm.params),
    "pda": train(warm.params, mirrordp.schedules.cosine(decay_steps=3 * STEPS / 2)),
}
print(
    f"epsilon {mechanism.epsilon(DELTA):.2f} at delta {DELTA:g}, unit: user; start "
    f"{test_loss(warm.params):.3f}, " + ", ".join(f"{k} {v:.3f}" for k, v in losses.items())
)

assert warm.converged
assert mechanism.epsilon(DELTA) <= 0.4
assert losses["pda"] < losses["warm"] - 0.01
assert losses["warm"] < losses["cold"] - 0.01
assert losses["pda"] < test_loss(warm.params)
