"""No example may add more than the clip norm, however its positions cancel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp import clipping, ghost
from mirrordp.ghost import _factors


def bilinear(weight, example):
    """Its gradient is Σ_t left_t ⊗ right_t, whatever the weight."""
    left, right = example
    return jnp.sum((left @ weight) * right)


def cancelling(positions: int, scale: float, gap: float, seed: int = 0):
    """Positions in pairs that cancel to `gap` of their size; K·N is large enough for Gram."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(positions, 90))
    right = rng.normal(size=(positions, 60))
    nearly = left * (1 + gap * rng.normal(size=left.shape))
    return (
        (scale * np.concatenate([left, nearly])).astype(np.float32)[None],
        np.concatenate([right, -right]).astype(np.float32)[None],
    )


@functools.cache
def compiled(module, clip: float):
    clipped = module.clipped_grad(bilinear, l2_clip_norm=clip)
    return jax.jit(lambda e: clipped(jnp.zeros((90, 60)), e, jnp.zeros(1, bool)))


@pytest.mark.parametrize("module", [ghost, clipping], ids=["ghost", "explicit"])
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1.0, 1e10, 1e20])
def test_a_contribution_never_exceeds_the_clip_norm(module, scale):
    for gap in (1e-6, 1e-4, 1e-2):
        for clip in (1e-6, 1.0):
            total = compiled(module, clip)(cancelling(17, scale, gap))
            assert np.linalg.norm(np.asarray(total, np.float64)) <= clip * (1 + 1e-6)


def test_a_float32_gram_matrix_would_let_an_example_pass(monkeypatch):
    """The same search finds the fault if norms are summed in float32 without a margin."""
    monkeypatch.setattr(_factors, "wide_dtype", lambda: jnp.float32)
    monkeypatch.setattr(ghost, "_sum_roundoff", lambda site: 0.0)
    monkeypatch.setattr(_factors, "_entries", lambda side: 0)
    compiled.cache_clear()
    worst = max(
        np.linalg.norm(np.asarray(compiled(ghost, 1.0)(cancelling(17, 1e3, gap)), np.float64))
        for gap in (1e-6, 1e-5, 1e-4, 1e-3)
    )
    compiled.cache_clear()
    assert worst > 1 + 1e-3


def test_half_precision_models_obey_the_bound():
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(30, 20)), jnp.bfloat16)
    batch = jnp.asarray(100 * rng.normal(size=(6, 4, 30)), jnp.bfloat16)
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w).astype(jnp.float32) ** 2)  # noqa: E731
    clipped = jax.jit(ghost.clipped_grad(loss, l2_clip_norm=0.1).with_stats)
    for row in range(6):
        total, _ = clipped(params, batch, jnp.arange(6) != row)
        assert total.dtype == jnp.float32
        assert np.linalg.norm(np.asarray(total, np.float64)) <= 0.1 * (1 + 1e-6)


def test_a_non_finite_example_never_reaches_the_sum():
    rng = np.random.default_rng(0)
    batch = (rng.normal(size=(5, 3, 90)), rng.normal(size=(5, 3, 60)))
    batch = tuple(jnp.asarray(part, jnp.float32) for part in batch)
    clipped = jax.jit(ghost.clipped_grad(bilinear, l2_clip_norm=1.0).__call__)
    weight, none = jnp.zeros((90, 60)), jnp.zeros(5, bool)
    wanted = clipped(weight, batch, jnp.arange(5) == 2)
    for bad in (np.nan, np.inf, -np.inf):
        for side in range(2):
            spoiled = list(batch)
            spoiled[side] = batch[side].at[2, 1, 4].set(bad)
            np.testing.assert_array_equal(clipped(weight, tuple(spoiled), none), wanted)
