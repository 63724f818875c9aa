"""Federated PDA-DPMD in plain loops: no vmap, no scan, no padding. Slow, and easy to check.

`mirrordp.train` does the same in compiled calls of many steps; the tests hold one against the
other. Randomness comes from the library, so that both draw the same users in the same order.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mirrordp
from mirrordp import schedules
from mirrordp.training import federated
from mirrordp.training.engine import randomness


def local_training(loss_fn, params, user_rows, width, key, *, learning_rate, batch_size, epochs):
    """Returns θ − θ_local, the change that a user's local SGD makes."""
    num_examples = len(jax.tree.leaves(user_rows)[0])
    local = params
    for epoch_key in jax.random.split(key, epochs):
        order_key, _ = jax.random.split(epoch_key)
        order = federated.local_order(order_key, width, num_examples)[:num_examples]
        for start in range(0, num_examples, batch_size):
            chosen = np.asarray(order[start : start + batch_size])
            batch = jax.tree.map(lambda leaf, chosen=chosen: jnp.asarray(leaf[chosen]), user_rows)

            def mean_loss(local, batch=batch):
                return jnp.mean(jax.vmap(loss_fn, (None, 0))(local, batch))

            grad = jax.grad(mean_loss)(local)
            local = jax.tree.map(lambda p, g: p - learning_rate * g, local, grad)
    return jax.tree.map(lambda old, new: old - new, params, local)


def clip(delta, norm_bound):
    """Returns Δ · min(1, C/‖Δ‖), and zero if Δ holds a NaN or an infinity."""
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(delta)))
    if not np.isfinite(norm):
        return jax.tree.map(jnp.zeros_like, delta)
    return jax.tree.map(lambda leaf: leaf * min(1.0, norm_bound / max(norm, 1e-30)), delta)


def add(left, right):
    return jax.tree.map(jnp.add, left, right)


def train(
    loss_fn,
    params,
    private,
    public,
    *,
    mechanism,
    client_learning_rate,
    server_learning_rate=1.0,
    momentum=0.9,
    alpha=1.0,
    num_steps=None,
    batch_size=16,
    epochs=1,
    seed,
):
    """Takes all steps of `mechanism`, or `num_steps` of them; returns the parameters."""
    rng, keys = randomness(seed)
    cohorts = mechanism.batches(len(private), rng)
    num_steps = num_steps or mechanism.num_steps
    alphas = schedules.evaluate(schedules.as_schedule(alpha), num_steps)
    zeros = jax.tree.map(jnp.zeros_like, params)
    noise_state = mechanism.init_noise(keys.noise, federated.Contribution(zeros, None))
    velocity = zeros

    def clipped_delta(clients, user, key):
        delta = local_training(
            loss_fn,
            params,
            clients.user(user),
            clients.max_examples_per_user,
            jax.random.fold_in(key, user),
            learning_rate=client_learning_rate,
            batch_size=batch_size,
            epochs=epochs,
        )
        return clip(delta, mechanism.l2_clip_norm)

    for number in range(num_steps):
        weight = float(alphas[number])
        private_grad, public_grad = zeros, zeros
        if weight > 0:
            total = zeros
            for user in next(cohorts):
                key = jax.random.fold_in(keys.loss, number)
                total = add(total, clipped_delta(private, int(user), key))
            contributions = federated.Contribution(total, None)
            noisy, noise_state = mechanism.add_noise(contributions, noise_state)
            private_grad = mechanism.mean(noisy.delta)
        if weight < 1:
            _, key = jax.random.split(jax.random.fold_in(keys.public, number))
            for user in range(len(public)):
                public_grad = add(public_grad, clipped_delta(public, user, key))
            public_grad = jax.tree.map(lambda leaf: leaf / len(public), public_grad)
        mixed = jax.tree.map(
            lambda g, p, weight=weight: weight * g + (1 - weight) * p, private_grad, public_grad
        )
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, mixed)
        params = jax.tree.map(lambda p, v: p - server_learning_rate * v, params, velocity)
    return params


def main():
    rng = np.random.default_rng(0)
    rule = np.array([1.0, -2.0, 0.5], np.float32)

    def users(sizes):
        def rows(size):
            x = rng.normal(size=(size, 3)).astype(np.float32)
            return {"x": x, "y": (x @ rule + rng.normal(size=size)).astype(np.float32)}

        return [rows(size) for size in sizes]

    def loss_fn(params, example):
        return 0.5 * (example["x"] @ params - example["y"]) ** 2

    private = mirrordp.PrivateClients.from_users(users(rng.integers(0, 9, 40)))
    public = mirrordp.PublicClients.from_users(users([4, 7]))
    mechanism = mirrordp.Mechanism(
        sampling=mirrordp.PoissonSampling.for_batch_size(4, num_examples=len(private)),
        l2_clip_norm=0.5,
        noise_multiplier=1.0,
        num_steps=3,
        unit="user",
    )
    slow = train(
        loss_fn, jnp.zeros(3), private, public, mechanism=mechanism, client_learning_rate=0.1,
        batch_size=4, alpha=0.8, seed=1,
    )  # fmt: skip
    step = mirrordp.FederatedStep(loss_fn, mechanism, client_learning_rate=0.1, client_batch_size=4)
    *_, (state, _) = mirrordp.train(step, jnp.zeros(3), private, public, alpha=0.8, seed=1)
    print(f"by hand {slow}, compiled {state.params}")
    np.testing.assert_allclose(slow, state.params, atol=1e-3)


if __name__ == "__main__":
    main()
