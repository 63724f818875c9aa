"""Plain DP-SGD: a training loop in your own hands, and a report of what it costs.

The data is generated, so that the example needs no download. On real data leave `seed` out: a run
that can be repeated is not for release.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp

rng = np.random.default_rng(0)
truth = rng.normal(size=10)
x = rng.normal(size=(5_000, 10)).astype(np.float32)
y = (x @ truth > 0).astype(np.int32)
private, test = {"x": x[:4_000], "y": y[:4_000]}, {"x": x[4_000:], "y": y[4_000:]}


def loss_fn(params, example):
    """Returns the loss of one example; the library forms the batches."""
    logit = example["x"] @ params["w"] + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


mechanism = mirrordp.Mechanism.calibrate(
    epsilon=1.0,
    delta=1e-5,
    sampling=mirrordp.PoissonSampling.for_batch_size(200, num_examples=4_000),
    num_steps=200,
    l2_clip_norm=1.0,
)
step = mirrordp.TrainStep(loss_fn, mechanism, optax.sgd(2.0))
params = {"w": jnp.zeros(10), "b": jnp.zeros(())}
for state, info in mirrordp.train(step, params, mirrordp.PrivateData(private), seed=0):  # noqa: B007
    epsilon = mechanism.epsilon(1e-5, num_steps=info.charged_steps)
    # The norm of the noisy gradient is released, so it may be printed.
    print(f"step {info.step:3d}  epsilon {epsilon:.3f}  |g| {info.noisy_grad_norm[-1]:.3f}")

accuracy = float(jnp.mean((test["x"] @ state.params["w"] + state.params["b"] > 0) == test["y"]))
report = mirrordp.RunReport.of(mechanism, 1e-5, info=info)
with tempfile.TemporaryDirectory() as folder:
    report_path, card_path = report.write(folder)
    assert "not for release" in card_path.read_text()
print(f"test accuracy {accuracy:.3f} at epsilon {report.epsilon:.3f}")

assert 0.99 < report.epsilon <= 1.0
assert accuracy > 0.9
assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))
