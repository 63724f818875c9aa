"""The update alone, as an optax transformation, for a training loop that already exists.

Nothing is private here: `private_grad` stands for the noisy gradient that your own loop releases.
"""

import contextlib

import jax
import jax.numpy as jnp
import optax

import mirrordp

private_optimum, public_optimum = jnp.array([1.0, -2.0]), jnp.array([0.8, -1.5])
transform = optax.chain(
    mirrordp.mix_public_gradient(mirrordp.schedules.cosine(decay_steps=400)),
    optax.sgd(0.1, momentum=0.9),
)


@jax.jit
def step(params, state, key):
    private_grad = params - private_optimum + 0.5 * jax.random.normal(key, params.shape)
    public_grad = params - public_optimum
    updates, state = transform.update(private_grad, state, params, public_grad=public_grad)
    return optax.apply_updates(params, updates), state


params = jnp.zeros(2)
state = transform.init(params)
for key in jax.random.split(jax.random.key(0), 500):
    params, state = step(params, state, key)
print("after 500 steps:", params)

# After step 400 alpha is zero: the public gradient alone decides, so the public optimum is reached.
assert jnp.allclose(params, public_optimum, atol=0.05)

# At alpha = 1 the private gradient passes unchanged, whatever the public one holds.
plain = mirrordp.mix_public_gradient(1.0)
mixed, _ = plain.update(params, plain.init(params), public_grad=jnp.full(2, jnp.nan))
assert (mixed == params).all()

# Forgetting the public gradient is an error, not a silent zero.
with contextlib.suppress(TypeError):
    transform.update(params, state, params)
    raise AssertionError("expected a TypeError")
