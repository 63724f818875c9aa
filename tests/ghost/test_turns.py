"""Gradients that are clipped in turned coordinates, s ⊙ (Uᵀ G V), or in groups, by definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.privacy import clipping, ghost
from mirrordp.privacy.ghost import _cost, _factors, _plan, _sum
from mirrordp.privacy.trainable import Trainable
from mirrordp.privacy.turns import Turn
from tests.ghost.test_parity import cast, relative_error
from tests.ghost.zoo import MODELS

RNG = np.random.default_rng(0)


def random_turns(params, *, spread=1.0):
    """Returns a turn for each leaf; some have no U or no V, and none is symmetric."""
    found = []
    for number, leaf in enumerate(jax.tree.leaves(params)):
        columns = leaf.shape[-1] if leaf.ndim else 1
        rows = leaf.size // columns
        left, right = (RNG.normal(size=(n, n)) / np.sqrt(n) for n in (rows, columns))
        scale = np.exp(spread * RNG.normal(size=(rows, columns)))
        kept = (None if number % 5 == 3 else left, None if number % 5 == 4 else right, scale)
        found.append(Turn(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), kept)))
    return found


def turned_by_definition(turn, gradients):
    """Returns s ⊙ (Uᵀ G_i V) in float64, one example after the other."""
    left, right, scale = jax.tree.map(lambda part: np.asarray(part, np.float64), tuple(turn))
    rows = []
    for gradient in np.asarray(gradients, np.float64):
        matrix = gradient.reshape(scale.shape)
        matrix = matrix if left is None else left.T @ matrix
        matrix = matrix if right is None else matrix @ right
        rows.append((scale * matrix).reshape(gradient.shape))
    return np.stack(rows)


def expected(loss, params, batch, chosen):
    """Returns a clip norm, each example's norm, and the clipped sum without the last example."""
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    leaves, tree = jax.tree.flatten(grads)
    turned = [turned_by_definition(*pair) for pair in zip(chosen, leaves, strict=True)]
    norms = np.sqrt(sum(np.sum(one**2, axis=tuple(range(1, one.ndim))) for one in turned))
    clip = float(np.median(norms))
    factors = np.minimum(1, clip / norms)[:-1]
    return clip, norms, tree.unflatten([np.tensordot(factors, one[:-1], 1) for one in turned])


def clipped(module, loss, params, batch, chosen, clip):
    found = module.clipped_grad(loss, l2_clip_norm=clip, turns=chosen)
    rows = len(jax.tree.leaves(batch)[0])
    return jax.jit(found.with_stats)(params, batch, jnp.arange(rows) == rows - 1)


def singles(name):
    loss, params, batch = MODELS[name]()
    return loss, cast(params, np.float32), cast(batch, np.float32)


@pytest.mark.usefixtures("nothing_reserved")
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_definition(name):
    loss, params, batch = singles(name)
    chosen = random_turns(params)
    clip, norms, wanted = expected(loss, params, batch, chosen)
    modules = [ghost, clipping] if name in ("mlp", "branches") else [ghost]
    for module in modules:
        found, stats = clipped(module, loss, params, batch, chosen, clip)
        assert relative_error(found, wanted) < 2e-5
        np.testing.assert_allclose(stats.unprivatized_norms[:-1], norms[:-1], rtol=1e-4)


def norm_without_scale(part, scale, *, roundoff, exponent):
    del scale
    return _factors.gram([part], roundoff=roundoff, exponent=exponent)


BROKEN = {
    "transposed": (_sum, "of_vectors", lambda vectors, matrix: vectors @ matrix.T),
    "norm without s": (_factors, "scaled_norm", norm_without_scale),
}


@pytest.mark.usefixtures("nothing_reserved")
@pytest.mark.parametrize("how", BROKEN)
def test_a_wrong_turn_would_be_noticed(monkeypatch, how):
    monkeypatch.setattr(*BROKEN[how])
    loss, params, batch = singles("mlp")
    chosen = random_turns(params)
    clip, _, wanted = expected(loss, params, batch, chosen)
    found, _ = clipped(ghost, loss, params, batch, chosen, clip)
    assert relative_error(found, wanted) > 1e-2


def layers(params, x):
    hidden = jnp.tanh(x @ params["several"])
    return jnp.sum(jnp.tanh(hidden.mean(0) @ params["transposed"].T) @ params["one"])


LAYERS = {
    "several": RNG.normal(size=(5, 8)).astype("f4"),
    "transposed": RNG.normal(size=(6, 8)).astype("f4"),
    "one": RNG.normal(size=(6, 3)).astype("f4"),
}


def plan_of(positions):
    batch = jnp.zeros((4, positions, 5))
    chosen = random_turns(LAYERS)
    return _sum.Split.of(layers, LAYERS, (batch, None), Trainable.of(None), 4, chosen).plan


@pytest.mark.parametrize(
    ("positions", "sides"),
    [(1, (True, True)), (4, (True, True)), (6, (True, False)), (9, None)],
)
def test_the_smaller_side_is_turned(positions, sides):
    """T·K² beside K²·N on the left, and T·N² beside K·N² on the right."""
    plan = plan_of(positions)
    names = sorted(LAYERS)
    several, transposed, one = (plan.turned.get(names.index(n)) for n in LAYERS)
    assert one is not None
    assert not one.formed
    assert transposed is not None
    assert transposed.use.swapped
    assert not transposed.formed
    if sides is None:
        assert several is None
        assert names.index("several") in plan.explicit
    else:
        assert several is not None
        assert (several.left, several.right) == sides
        assert several.formed == (positions > 1)


def dense(params, x):
    return jnp.sum(jnp.tanh(x @ params))


CLIP = 0.7


def largest_changes(size):
    """Returns the most that a row adds by itself, and beside rows that cancel each other.

    s covers twelve orders of magnitude.
    """
    rows = 40
    params = jnp.zeros((30, 20), jnp.float32)
    x = (size * RNG.normal(size=(rows, 30))).astype("f4")
    x[1::2] = -x[::2]
    chosen = random_turns(params, spread=7.0)
    run = jax.jit(ghost.clipped_grad(dense, l2_clip_norm=CLIP, turns=chosen).exact_sum)

    def summed(is_padding):
        return np.asarray(run(params, x, is_padding).total.floats(), np.float64)

    everyone, one = summed(np.zeros(rows, bool)), [np.arange(rows) == row for row in range(8)]
    alone = [np.linalg.norm(summed(~is_row)) for is_row in one]
    beside = [np.linalg.norm(everyone - summed(is_row)) for is_row in one]
    return max(alone), max(beside)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_no_row_adds_more_than_the_clip_norm(size):
    alone, beside = largest_changes(size)
    assert max(alone, beside) <= CLIP * (1 + 2e-7)
    assert size < 1 or alone > 0.98 * CLIP


def test_a_norm_without_the_scale_would_let_a_row_add_more(monkeypatch):
    monkeypatch.setattr(_factors, "scaled_norm", norm_without_scale)
    assert max(largest_changes(1.0)) > 2 * CLIP


def test_a_row_that_is_not_finite_counts_as_zero():
    params = jnp.zeros((30, 20), jnp.float32)
    chosen = random_turns(params)
    x = RNG.normal(size=(6, 30)).astype("f4")
    run = jax.jit(ghost.clipped_grad(dense, l2_clip_norm=1.0, turns=chosen).__call__)
    expected = run(params, x, np.arange(6) == 2)
    for bad in (np.nan, np.inf, 3e38):
        poisoned = x.copy()
        poisoned[2, 3] = bad
        found = run(params, poisoned, np.zeros(6, bool))
        if bad == 3e38:
            assert np.linalg.norm(found - expected) <= 1.0
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["mlp", "emnist_cnn", "transformer_block"])
def test_groups_are_those_of_explicit_gradients(name):
    """Neighbouring leaves in different groups, on all paths that a leaf can take."""
    loss, params, batch = singles(name)
    groups = [number % 3 for number in range(len(jax.tree.leaves(params)))]
    is_padding = jnp.zeros(len(jax.tree.leaves(batch)[0]), bool)
    found, other, whole = (
        jax.jit(module.clipped_grad(loss, l2_clip_norm=0.1, groups=given).__call__)(
            params, batch, is_padding
        )
        for module, given in ((ghost, groups), (clipping, groups), (ghost, None))
    )
    # Blocks of several examples leave 2⁻⁷ of each limit to their rounding.
    assert relative_error(found, other) < 1e-2
    assert relative_error(whole, other) > 5e-2


def test_groups_of_which_no_leaf_is_in_use():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    summed = ghost.clipped_grad(lambda params, x: jnp.sum(x), l2_clip_norm=1.0, groups=[0, 1])
    found = summed(params, jnp.ones((4, 2)), jnp.zeros(4, bool))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found))


def test_short_gradients_are_turned_too(monkeypatch):
    """As on a GPU: gradients are formed with 11 bits and kept with 8."""
    monkeypatch.setitem(_plan.SHORTENS, "cpu", True)
    monkeypatch.setattr(_cost, "prefers_short", lambda task, machine, matters: True)
    loss, params, batch = singles("emnist_cnn")
    chosen = random_turns(params)
    clip, _, wanted = expected(loss, params, batch, chosen)
    found, _ = clipped(ghost, loss, params, batch, chosen, clip)
    assert 1e-5 < relative_error(found, wanted) < 4e-3


def product_of_rows(params, row):
    """A loss whose gradient is the outer product of two given vectors."""
    left, right = row
    return left @ params @ right


def change_by_the_first(left, right, clip, scale):
    """Returns the norm of what the first row adds beside the others, in units of the clip norm."""
    params = jnp.zeros(scale.shape, jnp.float32)
    chosen = [Turn(None, None, jnp.asarray(scale, jnp.float32))]
    run = jax.jit(ghost.clipped_grad(product_of_rows, l2_clip_norm=clip, turns=chosen).exact_sum)
    batch = (np.float32(left), np.float32(right))
    rows = np.arange(len(left))
    with_it, without = (
        np.asarray(run(params, batch, is_padding).total.floats(), np.float64)
        for is_padding in (rows < 0, rows == 0)
    )
    return np.linalg.norm((with_it - without) / clip)


@pytest.mark.parametrize(("tiny", "clip"), [(1e-10, 1e30), (1e-20, 1e20), (1e-30, 1e10)])
@pytest.mark.parametrize("size", [1e20, 1e25, 1e30])
def test_a_product_does_not_overflow_before_a_tiny_scale(tiny, clip, size):
    """C / s is beyond float32: the outer product would be infinite, with s it is not."""
    vectors = np.full((1, 8), size)
    change = change_by_the_first(vectors, vectors, clip, np.full((8, 8), tiny))
    assert 0 < change <= 1


@pytest.mark.parametrize("scale", [1e30, 1e32, 1e33, 1e34])
def test_others_that_underflow_alone_do_not_add_to_a_row(scale):
    """A fused multiply-add keeps a product that underflows, where there is something to add to."""
    vectors = np.full((255, 32), np.sqrt(0.999 * np.finfo("f4").tiny))
    vectors[0] = np.sqrt(1.5 / 32 / scale)
    assert change_by_the_first(vectors, vectors, 1.0, np.full((32, 32), scale)) <= 1
