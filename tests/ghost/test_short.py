"""Gradients that are formed with 11 bits, as on a GPU: the same bound, about the same sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mirrordp.privacy import clipping, ghost
from mirrordp.privacy._float64 import float64_call
from mirrordp.privacy._jaxprs import equations
from mirrordp.privacy.ghost import _cost, _memory, _plan, _short, _sum
from mirrordp.privacy.ghost._factors import Factors
from mirrordp.privacy.ghost._short import Short
from mirrordp.privacy.ghost._sides import Vectors
from mirrordp.privacy.trainable import Trainable

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _shortens(monkeypatch):
    monkeypatch.setitem(_plan.SHORTENS, "cpu", True)
    monkeypatch.setattr(_cost, "prefers_short", lambda task, machine, matters: True)
    monkeypatch.setattr(_plan, "_prefers_gram", lambda task, machine: task.picked)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def dense(params, example):
    return jnp.sum(jnp.tanh(example @ params["w"]) @ params["out"] ** 2)


def scanned(params, example):
    @jax.checkpoint
    def layer(x, weights):
        return jnp.tanh(x @ weights["w"] + weights["b"]), None

    return jnp.sum(lax.scan(layer, example, params)[0] ** 2)


def convolved(params, example):
    out = lax.conv_general_dilated(
        example[None, ..., None], params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(jnp.sin(out))


def standardised(params, example):
    weights = (params - params.mean(axis=0)) / params.std(axis=0)
    return jnp.sum(jnp.tanh(example @ weights) ** 2)


def tied(params, example):
    rows = params[(jnp.abs(example[:, 0]) * 3).astype(jnp.int32)]
    return jnp.sum(jnp.tanh(rows @ params.T))


LOSSES = {
    "dense": (dense, {"w": normal(6, 8), "out": normal(8, 3)}),
    "scan and checkpoint": (scanned, {"w": normal(3, 6, 6), "b": normal(3, 6)}),
    "convolution": (convolved, normal(3, 3, 1, 4)),
    "standardised": (standardised, normal(6, 8)),
    "tied": (tied, normal(9, 6)),
}


def clipped(module, name, batch, clip=1.0, **options):
    loss, params = LOSSES[name]
    run = module.clipped_grad(loss, l2_clip_norm=clip, **options)
    return jax.jit(lambda batch: run(params, batch, jnp.zeros(len(batch), bool)))(batch)


def size(tree):
    return np.linalg.norm([np.linalg.norm(np.ravel(leaf)) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", LOSSES)
def test_sums_are_those_of_explicit_clipping(name):
    batch = normal(7, 5, 6)
    ours, theirs = (clipped(module, name, batch) for module in (ghost, clipping))
    difference = size(jax.tree.map(jnp.subtract, ours, theirs)) / size(theirs)
    # Explicit gradients are kept with 8 bits.
    assert 0 < difference < (3e-3 if name in ("standardised", "tied") else 1e-3)


@pytest.mark.parametrize("name", ["dense", "standardised", "convolution"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_contribution_never_exceeds_the_clip_norm(name, scale):
    for clip in (1e-4, 1.0):
        for seed in range(5):
            rows = np.random.default_rng(seed).normal(size=(1, 5, 6))
            # Most of each example cancels.
            rows[:, 2:4] = -rows[:, :2] * (1 + 1e-4 * rows[:, 2:4])
            total = clipped(ghost, name, jnp.asarray(scale * rows, jnp.float32), clip)
            assert size(total) <= clip * (1 + 1e-6)


def test_a_norm_that_is_too_small_would_be_seen(monkeypatch):
    honest = _short.squared_norm
    smaller = lambda array: float64_call(lambda norm: 0.99 * norm, honest(array))  # noqa: E731
    monkeypatch.setattr(_short, "squared_norm", smaller)
    with pytest.raises(AssertionError):
        test_a_contribution_never_exceeds_the_clip_norm("dense", 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_an_example_that_is_not_finite_changes_no_other(bad):
    batch = np.asarray(normal(6, 5, 6))
    spoilt = batch.copy()
    spoilt[2] = bad
    loss, params = LOSSES["dense"]
    run = ghost.clipped_grad(loss, l2_clip_norm=1.0)
    padding = jnp.arange(6) == 2
    without = run.exact_sum(params, jnp.asarray(batch), padding).total
    found = run.exact_sum(params, jnp.asarray(spoilt), jnp.zeros(6, bool)).total
    if np.isfinite(bad):
        # tanh is flat there, so the gradient of the first weight is zero, and that of `out` is not.
        assert jnp.array_equal(found.high["w"], without.high["w"])
    else:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), found.high, without.high)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), found.low, without.low)


@pytest.mark.parametrize("shift", [-230, -30, 0, 30, 230])
def test_exponents_of_any_size(shift):
    """The norm and the weighted numbers are exact where float32 alone would leave its range."""
    values = jnp.asarray(RNG.normal(size=(2, 3, 4)), jnp.float16)
    short = Short(values, jnp.asarray([shift, shift + 1.0]))
    exact = np.asarray(values, np.float64) * 2.0 ** np.asarray([shift, shift + 1])[:, None, None]
    with jax.enable_x64(True):
        found = np.asarray(_short.squared_norm(short))
    assert np.all(found >= (exact**2).sum(axis=(1, 2)))
    np.testing.assert_allclose(found, (exact**2).sum(axis=(1, 2)), rtol=1e-5)
    weights = np.float32(2.0 ** np.clip(-shift, -120, 120)) * np.asarray([1, 0.3], np.float32)
    scaled = np.asarray(_short.scaled(short, jnp.asarray(weights)), np.float64)
    np.testing.assert_allclose(scaled, exact * weights[:, None, None], rtol=1e-7)
    if abs(shift) <= 30:
        np.testing.assert_array_equal(np.asarray(short.floats(), np.float64), exact)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e15, 1e30])
def test_products_of_inputs_of_any_size(scale):
    left, right = normal(2, 1, 40, 5) * scale, normal(2, 1, 40, 7) / scale
    found = _short.product(Factors(Vectors(left), Vectors(right))).floats()
    exact = np.einsum("bgtk,bgtn->bgkn", *(np.asarray(side, np.float64) for side in (left, right)))
    np.testing.assert_allclose(found, exact, atol=5e-3 * np.abs(exact).max())


def program(precision):
    with jax.default_matmul_precision(precision):
        loss, params = LOSSES["dense"]
        run = ghost.clipped_grad(loss, l2_clip_norm=1.0)
        traced = jax.make_jaxpr(lambda x: run(params, x, jnp.zeros(4, bool)))(normal(4, 5, 6))
        return traced.jaxpr


def test_full_precision_is_kept_where_it_was_asked_for():
    types = {
        precision: {var.aval.dtype for eqn in equations(program(precision)) for var in eqn.outvars}
        for precision in ("default", "highest")
    }
    half = jnp.dtype("float16")
    assert half in types["default"]
    assert half not in types["highest"]


def test_norms_and_sums_read_the_same_bits():
    """Both go through `reduce_precision`, which no compiler may leave out."""
    found = equations(program("default"))
    bits = [e.params["mantissa_bits"] for e in found if e.primitive.name == "reduce_precision"]
    # `w` is read for its norm and for its sum. `out` is behind a square: its gradient is read once
    # to be pulled back, and what comes of that is read for its norm and for its sum.
    assert sorted(bits) == [7, 7, 10, 10, 10]


def test_short_gradients_need_half_the_memory(monkeypatch):
    loss, params = LOSSES["dense"]

    def formed():
        split = _sum.Split.of(loss, params, (normal(4, 5, 6), None), Trainable.of(None), 4)
        return _memory.need(split).formed

    short = formed()
    monkeypatch.setitem(_plan.SHORTENS, "cpu", False)
    assert short == formed() // 2 + 2 * 4
