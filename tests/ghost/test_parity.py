"""Ghost clipping against explicit per-example gradients, on models of every kind."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.privacy import clipping, ghost
from mirrordp.types import PyTree
from tests.ghost.zoo import MODELS

pytestmark = pytest.mark.usefixtures("nothing_reserved")


def cast(tree, dtype):
    def one(leaf):
        leaf = np.asarray(leaf)
        return jnp.asarray(leaf, dtype if np.issubdtype(leaf.dtype, np.floating) else None)

    return jax.tree.map(one, tree)


def relative_error(found, wanted) -> float:
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    as64 = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731
    error = sum(float(np.sum((as64(a) - as64(b)) ** 2)) for a, b in pairs)
    size = sum(float(np.sum(as64(b) ** 2)) for _, b in pairs)
    return float(np.sqrt(error / size))


def clipped(module, loss, params, batch, *, clip):
    """Returns the sum without the last example, which is padding, and the statistics."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    found = module.clipped_grad(loss, l2_clip_norm=clip)
    return jax.jit(found.with_stats)(params, batch, jnp.arange(rows) == rows - 1)


class Expected(NamedTuple):
    """What every example does by itself, and the sum of all but the last, clipped at `clip`."""

    clip: float
    total: PyTree
    losses: np.ndarray
    norms: np.ndarray


def expected(loss, params, batch) -> Expected:
    """Clips explicit gradients with NumPy, so that some examples are clipped and others not."""
    value_and_grad = jax.vmap(jax.value_and_grad(loss), (None, 0))
    losses, grads = jax.jit(value_and_grad)(params, batch)
    grads = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)
    squares = [np.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(grads)]
    norms = np.sqrt(sum(squares))
    clip = float(np.median(norms))
    factors = np.minimum(1, clip / norms)[:-1]
    total = jax.tree.map(lambda leaf: np.tensordot(factors, leaf[:-1], 1), grads)
    return Expected(clip, total, np.asarray(losses), norms)


# Explicit gradients clip whatever JAX can differentiate; trees of several kinds stand for all.
EXPLICIT_TOO = ("mlp", "stacked_tables", "flax_lstm", "equinox_model", "branches")


@pytest.mark.parametrize("name", MODELS)
def test_equals_explicit_gradients(name):
    """In both precisions: what is right in float32 is the exact result for the same numbers."""
    loss, params, batch = MODELS[name]()
    modules = [ghost, clipping] if name in EXPLICIT_TOO else [ghost]
    single = cast(params, np.float32), cast(batch, np.float32)
    # Flax's LSTM starts from a float32 state whatever its parameters are.
    if name == "flax_lstm":
        wanted = expected(loss, *single)
    else:
        with jax.enable_x64(True):
            double = cast(single[0], np.float64), cast(single[1], np.float64)
            wanted = expected(loss, *double)
            for module in modules:
                found, stats = clipped(module, loss, *double, clip=wanted.clip)
                assert jax.tree.structure(found) == jax.tree.structure(wanted.total)
                assert relative_error(found, wanted.total) < 1e-10
                np.testing.assert_allclose(stats.unprivatized_losses, wanted.losses, rtol=1e-10)
    for module in modules:
        found, stats = clipped(module, loss, *single, clip=wanted.clip)
        assert relative_error(found, wanted.total) < 1e-5
        # The norm used for clipping is that of the sum itself, or a tight upper bound of it.
        ratio = np.asarray(stats.unprivatized_norms / wanted.norms)[:-1]
        assert np.all(ratio > 1 - 3e-6)
        assert np.all(ratio < 1 + 1e-4)


def test_a_wrong_norm_would_be_noticed():
    """The comparison above rejects a clipper that forgets the cross terms of a reused weight."""
    loss, params, batch = MODELS["one_weight_twice"]()
    split_loss = lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2].T) ** 2)  # noqa: E731
    params, batch = cast(params, np.float32), cast(batch, np.float32)
    wanted = expected(loss, params, batch)
    parts, _ = clipped(ghost, split_loss, [params] * 3, batch, clip=wanted.clip)
    assert relative_error(sum(parts), wanted.total) > 1e-2


def test_microbatches_change_nothing():
    loss, params, batch = MODELS["stacked_tables"]()
    params, batch = cast(params, np.float32), cast(batch, np.float32)
    is_padding = jnp.zeros(len(batch), bool)
    whole, parts = (
        jax.jit(ghost.clipped_grad(loss, l2_clip_norm=0.5, microbatch_size=size).__call__)(
            params, batch, is_padding
        )
        for size in (None, 2)
    )
    # Other blocks have another margin for their rounding.
    assert relative_error(parts, whole) < 1e-5


def test_a_loss_that_ignores_the_example_falls_back_to_explicit_gradients():
    clipped = ghost.clipped_grad(lambda p, e: jnp.sum(p**2), l2_clip_norm=1.0)
    total = jax.jit(clipped.__call__)(jnp.ones(4), jnp.zeros(6), jnp.zeros(6, bool))
    np.testing.assert_allclose(total, 6 * 0.5 * np.ones(4), rtol=1e-6)


def test_parameters_that_nothing_depends_on_get_zero():
    loss = lambda p, x: jnp.sum(x @ p["used"])  # noqa: E731
    params = {"used": jnp.ones((3, 2)), "unused": jnp.ones(5)}
    clipped = jax.jit(ghost.clipped_grad(loss, l2_clip_norm=1.0).__call__)
    total = clipped(params, jnp.ones((4, 3)), jnp.zeros(4, bool))
    assert np.all(np.asarray(total["unused"]) == 0)
    assert np.any(np.asarray(total["used"]) != 0)


def test_lookups_outside_the_table_have_no_gradient():
    def loss(table, index):
        rows = table.at[index].get(mode="fill", fill_value=0.0)
        return jnp.sum(jnp.sin(rows + 1))

    table = jnp.asarray(np.random.default_rng(0).normal(size=(6, 40)), jnp.float32)
    index = jnp.asarray([[0, 7, 5], [2, 2, -9]])
    results = [
        jax.jit(module.clipped_grad(loss, l2_clip_norm=0.3).__call__)(
            table, index, jnp.zeros(2, bool)
        )
        for module in (ghost, clipping)
    ]
    assert relative_error(*results) < 1e-6
