"""A table that a product and lookups share: only the product's gradient is formed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.privacy import clipping, ghost
from mirrordp.privacy.ghost import _cost, _factors, _plan, _sum
from mirrordp.privacy.trainable import Trainable

ROWS, WIDTH, POSITIONS = 9, 6, 5
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)


@pytest.fixture(autouse=True, params=["all bits", "11 bits"])
def bits(request, monkeypatch):
    monkeypatch.setattr(_plan, "_prefers_gram", lambda task, machine: task.picked)
    if request.param == "11 bits":
        monkeypatch.setitem(_plan.SHORTENS, "cpu", True)
        monkeypatch.setattr(_cost, "prefers_short", lambda task, machine, matters: True)
    return request.param


def language_model(table, tokens):
    x = jnp.tanh(table[tokens]) + 0.1 * table[(tokens + 1) % ROWS]
    return -jax.nn.log_softmax(x @ table.T)[jnp.arange(POSITIONS), tokens].mean()


def other_layout(table, tokens):
    return jnp.sum(jnp.sin(jnp.einsum("vd,td->tv", table, jnp.tanh(table[tokens]))))


def in_a_loop(table, tokens):
    def step(x, token):
        return jnp.tanh(x + table[token][0]), None

    x, _ = jax.lax.scan(step, jnp.zeros(WIDTH), tokens[:, None])
    return jnp.sum(jnp.sin(table @ x))


def tokens_of(examples):
    return jnp.asarray(RNG.integers(ROWS, size=(examples, POSITIONS)), jnp.int32)


@pytest.mark.parametrize("loss", [language_model, other_layout, in_a_loop])
@pytest.mark.parametrize("clip", [0.3, 100.0])
def test_sums_and_norms_are_those_of_explicit_clipping(loss, clip, bits):
    tokens = tokens_of(7)
    split = _sum.Split.of(loss, TABLE, (tokens, None), Trainable.of(None), 7)
    assert list(split.plan.lookups) == [0]
    (ours, stats), (theirs, expected) = (
        module.clipped_grad(loss, l2_clip_norm=clip).with_stats(TABLE, tokens, jnp.zeros(7, bool))
        for module in (ghost, clipping)
    )
    tolerance = 2e-6 if bits == "all bits" else 1e-3
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max())
    norms, exact = stats.unprivatized_norms, expected.unprivatized_norms
    np.testing.assert_allclose(norms, exact, rtol=tolerance)
    if bits == "all bits":
        assert np.all(np.asarray(norms) >= np.asarray(exact) * (1 - 1e-7))


def crossing(table, example):
    """Has the gradient Σ_t e_{k_t} ⊗ lookup_t + Σ_t out_t ⊗ x_t, whatever the table."""
    tokens, lookup, x, out = example
    return jnp.sum(table[tokens] * lookup) + jnp.sum((x @ table.T) * out)


def cancelling(seed, gap, scale):
    """Returns an example whose lookups cancel what the product gives to their rows."""
    rng = np.random.default_rng(seed)
    tokens = rng.permutation(ROWS)[:POSITIONS]
    x = rng.normal(size=(POSITIONS, WIDTH))
    out = np.zeros((POSITIONS, ROWS))
    out[:, tokens] = rng.normal(size=(POSITIONS, POSITIONS))
    lookup = -(out.T @ x)[tokens] * (1 + gap * rng.normal(size=(POSITIONS, WIDTH)))
    arrays = (scale * lookup, scale * x, out)
    return (jnp.asarray(tokens)[None], *(jnp.asarray(a[None], jnp.float32) for a in arrays))


def largest_contribution():
    found = 0.0
    for clip in (1e-4, 1.0):
        run = ghost.clipped_grad(crossing, l2_clip_norm=clip)
        total = jax.jit(lambda e: run(TABLE, e, jnp.zeros(1, bool)))  # noqa: B023
        for scale in (1e-3, 1.0, 1e6):
            for seed, gap in enumerate((1e-7, 1e-5, 1e-3, 1.0, 10.0)):
                norm = np.linalg.norm(np.asarray(total(cancelling(seed, gap, scale)), np.float64))
                found = max(found, norm / clip)
    return found


def test_a_contribution_never_exceeds_the_clip_norm():
    found = largest_contribution()
    assert 0.9 < found <= 1 + 1e-6


def test_lookups_that_are_left_out_of_the_norm_would_be_seen(monkeypatch):
    honest = _factors.with_lookups

    def without(squared, met, part, **options):
        return squared, honest(squared, met, part, **options)[1]

    monkeypatch.setattr(_factors, "with_lookups", without)
    assert largest_contribution() > 1.01


def test_padding_and_broken_examples_add_nothing():
    tokens = tokens_of(4)
    run = ghost.clipped_grad(language_model, l2_clip_norm=1.0).exact_sum
    alone = run(TABLE, tokens[:2], jnp.zeros(2, bool)).total
    padded = run(TABLE, tokens, jnp.arange(4) >= 2).total
    assert jnp.array_equal(alone.high, padded.high)
    assert jnp.array_equal(alone.low, padded.low)


def test_no_gradient_of_a_lookup_is_formed():
    """The only arrays of the table's size are the product's gradient and what becomes of it."""
    split = _sum.Split.of(language_model, TABLE, (tokens_of(3), None), Trainable.of(None), 3)
    probes = _sum.probes_of(split)
    numbers = [use.number for use in split.plan.lookups[0]]
    assert len(numbers) == 2
    for number in numbers:
        assert not probes[number].operands
        assert [r.shape for r in probes[number].results] == [(POSITIONS, WIDTH)]
