"""The contract of `clipped_grad(loss_fn, *, l2_clip_norm, trainable, microbatch_size)`.

Subclass `ClipperContract` in a test file and give it a fixture `make` that returns the function
under test. The oracle is a plain Python loop over examples in float64.
"""

import functools

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import pytest

from mirrordp import Adjacency
from mirrordp.privacy.trainable import Trainable

CLIP = 0.7
ROUNDING = 1e-6  # A relative error that the accounting may neglect.

# Multiplies a row's loss, and so its gradient: huge, tiny, of either sign, or not a number.
EXTREMES = (1.0, -1.0, 1e3, 1e20, -1e20, 1e30, -1e30, 3e38, 1e-3, 1e-20, -1e-20, 1e-30, 1e-38, 0.0)
NON_FINITE = (np.nan, np.inf, -np.inf)


def make_params(dtype=np.float32) -> dict:
    rng = np.random.default_rng(1)
    return {
        "hidden": {
            "w": jnp.asarray(rng.normal(size=(3, 4)), dtype),
            "b": jnp.asarray(rng.normal(size=4), dtype),
        },
        "out": jnp.asarray(rng.normal(size=(4, 2)), dtype),
    }


def make_batch(rows: int, scale=None, dtype=np.float32) -> dict:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(rows, 3)), rng.integers(0, 2, rows)
    # About half of the gradients are above the clip norm and half below.
    scale = rng.choice([0.1, 3.0], rows) if scale is None else np.broadcast_to(scale, (rows,))
    return {"x": x.astype(dtype), "y": y.astype(np.int32), "scale": np.asarray(scale, dtype)}


def loss(params, example):
    """Returns the loss of a network of two layers, multiplied by the row's scale."""
    hidden = jnp.tanh(example["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["out"]
    return -example["scale"] * jax.nn.log_softmax(logits)[example["y"]]


def keyed_loss(params, example, key):
    """Returns the same loss with dropout of features."""
    # The type is fixed so that the oracle in float64 draws the same mask.
    keep = jax.random.uniform(key, example["x"].shape, np.float32) < 0.5
    return loss(params, example | {"x": jnp.where(keep, example["x"], 0)})


def norm(tree) -> float:
    """Returns the norm of a tree, in float64."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves)))


def difference(left, right):
    return jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), left, right
    )


def assert_close(left, right, tolerance=1e-5):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    assert norm(difference(left, right)) <= tolerance * max(norm(right), CLIP)


def assert_zero(tree):
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(tree))


def per_example_loop(loss_fn, params, batch, is_padding, clip=CLIP, keys=None, frozen=()):
    """Returns the clipped sum by its definition, one example at a time and in float64."""
    with jax.enable_x64(True):
        wide = lambda leaf: np.asarray(leaf, np.float64) if leaf.dtype.kind not in "iu" else leaf  # noqa: E731
        gradient = jax.jit(jax.grad(loss_fn))
        params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), params)
        total = jax.tree.map(np.zeros_like, params)
        for row in np.flatnonzero(~np.asarray(is_padding)):
            example = jax.tree.map(lambda leaf, row=row: wide(np.asarray(leaf))[row], batch)
            extra = () if keys is None else (keys[row],)
            grad = jax.tree.map(np.asarray, gradient(params, example, *extra))
            for name in frozen:
                grad[name] = jax.tree.map(np.zeros_like, grad[name])
            if not np.isfinite(norm(grad)):
                continue
            factor = min(1.0, clip / norm(grad)) if norm(grad) > 0 else 1.0
            total = jax.tree.map(lambda t, g, f=factor: t + f * g, total, grad)
        return total


@functools.lru_cache(maxsize=64)
def compiled(make, loss_fn=loss, *, clip=CLIP, microbatch_size=None):
    """Returns the jitted clipped sum, shared by the tests."""
    return jax.jit(make(loss_fn, l2_clip_norm=clip, microbatch_size=microbatch_size))


@functools.lru_cache(maxsize=64)
def compiled_stats(make, microbatch_size=None):
    """Returns the same with each example's statistics."""
    clipped = make(loss, l2_clip_norm=CLIP, microbatch_size=microbatch_size)
    return jax.jit(clipped.with_stats)


def one(make, scale) -> dict:
    """Returns the contribution of a single row of the given scale."""
    return compiled(make)(make_params(), make_batch(1, scale), np.zeros(1, bool))


class ClipperContract:
    """Tests for subclasses named Test... that provide a fixture `make`."""

    def test_equals_a_loop_over_examples(self, make):
        params, batch, is_padding = make_params(), make_batch(7), np.arange(7) >= 6
        expected = per_example_loop(loss, params, batch, is_padding)
        assert_close(compiled(make)(params, batch, is_padding), expected)
        # Both kinds of rows matter, so the comparison can fail.
        assert (
            norm(difference(expected, per_example_loop(loss, params, batch, is_padding, 1e9)))
            > CLIP
        )

    def test_equals_jax_privacy(self, make):
        params, batch, is_padding = make_params(), make_batch(7), np.arange(7) >= 6
        reference = jax_privacy.clipped_grad(loss, l2_clip_norm=CLIP, keep_batch_dim=False)
        expected = jax.jit(reference)(params, batch, is_padding_example=is_padding)
        assert_close(compiled(make)(params, batch, is_padding), expected)

    @pytest.mark.parametrize("clip", [1e-6, 1e6])
    def test_extreme_clip_norms(self, make, clip):
        params, batch, is_padding = make_params(), make_batch(7), np.zeros(7, bool)
        expected = per_example_loop(loss, params, batch, is_padding, clip)
        found = compiled(make, clip=clip)(params, batch, is_padding)
        assert norm(difference(found, expected)) <= 1e-5 * norm(expected)

    def test_padding_adds_exactly_zero_whatever_it_holds(self, make):
        params, batch = make_params(), make_batch(7)
        batch["scale"][:4] = [np.nan, np.inf, 1e30, 1.0]
        is_padding = np.arange(7) < 4
        found = compiled(make)(params, batch, is_padding)
        batch["scale"][:4] = 0.5
        assert_close(found, compiled(make)(params, batch, is_padding), 0.0)
        assert norm(found) > 0.1

    def test_an_empty_batch_sums_to_exactly_zero(self, make):
        assert_zero(compiled(make)(make_params(), make_batch(7, np.nan), np.ones(7, bool)))

    @pytest.mark.parametrize("bad", NON_FINITE)
    def test_a_non_finite_gradient_adds_zero_and_spares_the_others(self, make, bad):
        params, batch, is_padding = make_params(), make_batch(7), np.zeros(7, bool)
        batch["scale"][2] = bad
        found = compiled(make)(params, batch, is_padding)
        without = compiled(make)(params, batch, np.arange(7) == 2)
        assert_close(found, without, 1e-7)
        assert norm(found) > 0.1
        assert_zero(one(make, bad))

    def test_a_gradient_that_is_partly_nan_adds_zero_as_a_whole(self, make):
        def half_bad(params, example):
            return jnp.sum(params["a"] * example) + jnp.sum(jnp.sqrt(params["b"]) * example)

        params = {"a": jnp.ones(2), "b": jnp.zeros(2)}  # d sqrt(b)/db is infinite at zero
        clipped = compiled(make, half_bad)
        assert_zero(clipped(params, jnp.ones([1, 2]), jnp.array([False])))

    def test_no_contribution_exceeds_the_clip_norm(self, make):
        largest = 0.0
        for scale in EXTREMES:
            contribution = norm(one(make, scale))
            assert contribution <= CLIP * (1 + ROUNDING), scale
            largest = max(largest, contribution)
        assert largest >= CLIP * (1 - ROUNDING)

    @pytest.mark.parametrize("scale", [1e20, 1e30])
    def test_huge_gradients_are_scaled_down_not_lost(self, make, scale):
        assert norm(one(make, scale)) == pytest.approx(CLIP, rel=ROUNDING)

    def test_tiny_gradients_are_left_alone(self, make):
        params, batch = make_params(), make_batch(1, 1e-8)
        expected = per_example_loop(loss, params, batch, [False])
        assert 0 < norm(expected) < 1e-6
        assert norm(difference(one(make, 1e-8), expected)) <= 1e-5 * norm(expected)

    @pytest.mark.parametrize("size", [1, 3, 7, 16])
    def test_microbatches_change_nothing(self, make, size):
        params, batch = make_params(), make_batch(7)
        is_padding = np.array([False, True, False, False, True, False, False])
        total, stats = compiled_stats(make)(params, batch, is_padding)
        small_total, small_stats = compiled_stats(make, size)(params, batch, is_padding)
        assert_close(small_total, total, 1e-6)
        real = ~is_padding
        for small, large in zip(small_stats, stats, strict=True):
            assert small.shape == large.shape == (7,)
            np.testing.assert_allclose(small[real], large[real], rtol=1e-5)

    def test_statistics_are_those_of_each_example(self, make):
        params, batch, is_padding = make_params(), make_batch(5), np.zeros(5, bool)
        _, stats = compiled_stats(make)(params, batch, is_padding)
        gradient = jax.jit(jax.value_and_grad(loss))
        for row in range(5):
            example = jax.tree.map(lambda leaf, row=row: leaf[row], batch)
            value, grad = gradient(params, example)
            assert stats.unprivatized_losses[row] == pytest.approx(float(value), rel=1e-5)
            assert stats.unprivatized_norms[row] == pytest.approx(norm(grad), rel=1e-5)

    @pytest.mark.parametrize(
        "trainable",
        [
            {"hidden": {"w": True, "b": True}, "out": False},
            {"hidden": True, "out": False},
            Trainable.of({"hidden": True, "out": False}),
        ],
        ids=["full mask", "prefix mask", "value"],
    )
    def test_frozen_leaves_are_neither_returned_nor_counted_in_the_norm(self, make, trainable):
        params, batch, is_padding = make_params(), make_batch(7), np.zeros(7, bool)
        clipped = make(loss, l2_clip_norm=CLIP, trainable=trainable)
        found = jax.jit(clipped)(params, batch, is_padding)
        assert found["out"] is None
        expected = per_example_loop(loss, params, batch, is_padding, frozen=("out",))
        assert_close(found["hidden"], expected["hidden"])
        # Clipping with the frozen leaf in the norm would give another result.
        with_all = per_example_loop(loss, params, batch, is_padding)
        assert norm(difference(with_all["hidden"], expected["hidden"])) > 1e-2 * CLIP

    def test_a_keyed_loss_sees_its_own_key(self, make):
        params, batch, is_padding = make_params(), make_batch(5), np.zeros(5, bool)
        keys = jax.random.split(jax.random.key(3), 5)
        assert make(keyed_loss, l2_clip_norm=CLIP).takes_key
        clipped = compiled(make, keyed_loss)
        found = clipped(params, batch, is_padding, keys=keys)
        assert_close(found, per_example_loop(keyed_loss, params, batch, is_padding, keys=keys))
        other = clipped(params, batch, is_padding, keys=jax.random.split(jax.random.key(4), 5))
        assert norm(difference(found, other)) > 1e-2 * CLIP

    def test_a_keyed_loss_without_keys_is_a_type_error(self, make):
        clipped = make(keyed_loss, l2_clip_norm=CLIP)
        with pytest.raises(TypeError, match="keys=, one per example"):
            clipped(make_params(), make_batch(5), np.zeros(5, bool))

    def test_keyed_microbatches_change_nothing(self, make):
        params, batch, is_padding = make_params(), make_batch(5), np.zeros(5, bool)
        keys = jax.random.split(jax.random.key(3), 5)
        whole = compiled(make, keyed_loss)
        parts = compiled(make, keyed_loss, microbatch_size=2)
        assert_close(
            parts(params, batch, is_padding, keys=keys),
            whole(params, batch, is_padding, keys=keys),
            1e-6,
        )

    def test_half_precision_parameters_sum_in_single(self, make):
        params = make_params(jnp.bfloat16)
        batch, is_padding = make_batch(7), np.zeros(7, bool)
        found = compiled(make)(params, batch, is_padding)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
        expected = per_example_loop(loss, make_params(jnp.bfloat16), batch, is_padding)
        assert norm(difference(found, expected)) <= 0.02 * norm(expected)
        for scale in (1.0, 1e20, -1e30):
            single = compiled(make)(params, make_batch(1, scale), np.zeros(1, bool))
            assert norm(single) <= CLIP * (1 + ROUNDING)

    def test_double_precision(self, make):
        with jax.enable_x64(True):
            params = make_params(np.float64)
            batch, is_padding = make_batch(7, dtype=np.float64), np.arange(7) >= 6
            found = jax.jit(make(loss, l2_clip_norm=CLIP))(params, batch, is_padding)
            assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float64")}
            expected = per_example_loop(loss, params, batch, is_padding)
            assert norm(difference(found, expected)) <= 2e-8 * norm(expected)
        # Single precision would not meet this tolerance.
        narrow = compiled(make)(make_params(), make_batch(7), is_padding)
        assert norm(difference(narrow, expected)) > 2e-8 * norm(expected)

    def test_jit_and_vmap_over_parameters(self, make):
        clipped = make(loss, l2_clip_norm=CLIP)
        batch, is_padding = make_batch(4), np.arange(4) == 1
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), make_params())
        mapped = jax.jit(jax.vmap(lambda params: clipped(params, batch, is_padding)))(stacked)
        for index in range(2):
            take = lambda leaf, index=index: leaf[index]  # noqa: E731
            expected = compiled(make)(jax.tree.map(take, stacked), batch, is_padding)
            assert_close(jax.tree.map(take, mapped), expected, 1e-6)

    def test_states_its_sensitivity(self, make):
        clipped = make(loss, l2_clip_norm=CLIP)
        assert clipped.sensitivity(Adjacency.ADD_REMOVE) == CLIP
        assert clipped.sensitivity(Adjacency.ZERO_OUT) == CLIP
        assert clipped.sensitivity(Adjacency.REPLACE) == 2 * CLIP
        with pytest.raises(TypeError, match="adjacency must be Adjacency"):
            clipped.sensitivity("replace")

    def test_neighbours_differ_by_at_most_the_sensitivity_and_attain_it(self, make):
        """Searches adversarial rows; the other rows of the batch are arbitrary."""
        clipped, stated = compiled(make), make(loss, l2_clip_norm=CLIP).sensitivity
        params, base = make_params(), make_batch(6)
        everyone, without = np.zeros(6, bool), np.arange(6) == 0

        def sum_with(scale, is_padding=everyone):
            scales = base["scale"].copy()
            scales[0] = scale
            return clipped(params, base | {"scale": scales}, is_padding)

        sums = {scale: sum_with(scale) for scale in (*EXTREMES, *NON_FINITE)}
        removed = sum_with(1.0, without)
        zeroed = sum_with(0.0)
        added = [norm(difference(total, removed)) for total in sums.values()]
        zero_out = [norm(difference(total, zeroed)) for total in sums.values()]
        replaced = [norm(difference(a, b)) for a in sums.values() for b in sums.values()]
        # Single-precision rounding of a sum of six terms, not of the contribution, is allowed for.
        slack = 1e-5 * CLIP
        for adjacency, distances in (
            (Adjacency.ADD_REMOVE, added),
            (Adjacency.ZERO_OUT, zero_out),
            (Adjacency.REPLACE, replaced),
        ):
            assert max(distances) <= stated(adjacency) + slack
            assert max(distances) >= stated(adjacency) - slack

    @pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
    def test_refuses_a_clip_norm_that_is_not_positive(self, make, bad):
        with pytest.raises(ValueError, match="l2_clip_norm must be a positive finite number"):
            make(loss, l2_clip_norm=bad)

    @pytest.mark.parametrize("bad", [0, -1])
    def test_refuses_a_microbatch_size_below_one(self, make, bad):
        with pytest.raises(ValueError, match="microbatch_size must be a positive integer"):
            make(loss, l2_clip_norm=1.0, microbatch_size=bad)
