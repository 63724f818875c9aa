"""Ghost clipping against explicit per-example gradients, on models of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.privacy import clipping, ghost
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


def both(loss, params, batch, *, clip, **options):
    rows = jax.tree.leaves(batch)[0].shape[0]
    is_padding = jnp.arange(rows) == rows - 1
    results = []
    for module in (ghost, clipping):
        clipped = module.clipped_grad(loss, l2_clip_norm=clip, **options)
        results.append(jax.jit(clipped.with_stats)(params, batch, is_padding))
    return results


def typical_norm(loss, params, batch) -> float:
    """Returns a clip norm that clips some examples and not others."""
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    squares = sum(
        np.sum(np.asarray(leaf, np.float64) ** 2, axis=tuple(range(1, leaf.ndim)))
        for leaf in jax.tree.leaves(grads)
    )
    return float(np.median(np.sqrt(squares)))


# Flax's LSTM starts from a float32 state whatever its parameters are.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "flax_lstm"])
def test_equals_explicit_gradients_in_float64(name):
    loss, params, batch = MODELS[name]()
    with jax.enable_x64(True):
        params, batch = cast(params, np.float64), cast(batch, np.float64)
        clip = typical_norm(loss, params, batch)
        (found, stats), (wanted, wanted_stats) = both(loss, params, batch, clip=clip)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert relative_error(found, wanted) < 1e-10
        np.testing.assert_allclose(
            stats.unprivatized_losses, wanted_stats.unprivatized_losses, rtol=1e-10
        )


@pytest.mark.parametrize("name", MODELS)
def test_equals_explicit_gradients_in_float32(name):
    loss, params, batch = MODELS[name]()
    params, batch = cast(params, np.float32), cast(batch, np.float32)
    clip = typical_norm(loss, params, batch)
    (found, stats), (wanted, wanted_stats) = both(loss, params, batch, clip=clip)
    assert relative_error(found, wanted) < 1e-5
    # The norm used for clipping is an upper bound, and a tight one.
    ratio = np.asarray(stats.unprivatized_norms / wanted_stats.unprivatized_norms)[:-1]
    assert np.all(ratio > 1 - 1e-6)
    assert np.all(ratio < 1 + 1e-4)


def test_a_wrong_norm_would_be_noticed():
    """The comparison above rejects a clipper that forgets the cross terms of a reused weight."""
    loss, params, batch = MODELS["one_weight_twice"]()
    split_loss = lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2].T) ** 2)  # noqa: E731
    params, batch = cast(params, np.float32), cast(batch, np.float32)
    clip = typical_norm(loss, params, batch)
    (_, _), (wanted, _) = both(loss, params, batch, clip=clip)
    (parts, _), _ = both(split_loss, [params] * 3, batch, clip=clip)
    assert relative_error(sum(parts), wanted) > 1e-2


def test_microbatches_change_nothing():
    loss, params, batch = MODELS["stackoverflow_lstm"]()
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
    total = clipped(jnp.ones(4), jnp.zeros(6), jnp.zeros(6, bool))
    np.testing.assert_allclose(total, 6 * 0.5 * np.ones(4), rtol=1e-6)


def test_parameters_that_nothing_depends_on_get_zero():
    loss = lambda p, x: jnp.sum(x @ p["used"])  # noqa: E731
    params = {"used": jnp.ones((3, 2)), "unused": jnp.ones(5)}
    total = ghost.clipped_grad(loss, l2_clip_norm=1.0)(params, jnp.ones((4, 3)), jnp.zeros(4, bool))
    assert np.all(np.asarray(total["unused"]) == 0)
    assert np.any(np.asarray(total["used"]) != 0)


def test_lookups_outside_the_table_have_no_gradient():
    def loss(table, index):
        rows = table.at[index].get(mode="fill", fill_value=0.0)
        return jnp.sum(jnp.sin(rows + 1))

    table = jnp.asarray(np.random.default_rng(0).normal(size=(6, 40)), jnp.float32)
    index = jnp.asarray([[0, 7, 5], [2, 2, -9]])
    results = [
        module.clipped_grad(loss, l2_clip_norm=0.3)(table, index, jnp.zeros(2, bool))
        for module in (ghost, clipping)
    ]
    assert relative_error(*results) < 1e-6
