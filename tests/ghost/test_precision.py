"""No example may add more than the clip norm, however its positions cancel."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.privacy import clipping, ghost
from mirrordp.privacy._jaxprs import equations
from mirrordp.privacy.ghost import _factors, _sides, _sum


@pytest.fixture(autouse=True, params=["wide", "short"])
def _arithmetic(request, by_gram, monkeypatch):
    """Every test runs with Gram matrices in float64, and of shortened vectors as on a GPU."""
    monkeypatch.setitem(_factors.SHORTENS, "cpu", request.param == "short")
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def bilinear(weight, example):
    """Has the gradient Σ_t left_t ⊗ right_t, whatever the weight."""
    left, right = example
    return jnp.sum((left @ weight) * right)


def cancelling(positions: int, scale: float, gap: float, seed: int = 0):
    """Returns pairs of positions that cancel to `gap` of their size; K·N is large, for Gram."""
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


@pytest.mark.parametrize("_arithmetic", ["wide"], indirect=True)
def test_a_float32_gram_matrix_would_let_an_example_pass(monkeypatch):
    """The same search finds the fault if norms are summed in float32 without a margin."""
    monkeypatch.setattr(_sides, "wide_dtype", lambda: jnp.float32)
    none = lambda layers, rows: _factors.Roundoff(0.0, 0.0, rows, 0.0)  # noqa: E731
    monkeypatch.setattr(_sum, "sum_roundoff", none)
    monkeypatch.setattr(_factors, "_gram_roundoff", lambda parts: 0.0)
    compiled.cache_clear()
    worst = max(
        np.linalg.norm(np.asarray(compiled(ghost, 1.0)(cancelling(17, 1e3, gap)), np.float64))
        for gap in (1e-6, 1e-5, 1e-4, 1e-3)
    )
    compiled.cache_clear()
    assert worst > 1 + 1e-3


def rounded_down(positions: int, size: float = 1.0):
    """Returns vectors whose entries all lose almost half a unit of 11 bits, towards zero."""
    entry = size * (1 + 2.0**-11 - 2.0**-20)
    shapes = ((1, positions, 90), (1, positions, 60))
    return tuple(np.full(shape, entry, np.float32) for shape in shapes)


def norm_bound(example) -> tuple[float, float]:
    """Returns the norm of an example's gradient as found by ghost clipping, and in float64."""
    clipped = ghost.clipped_grad(bilinear, l2_clip_norm=1.0)
    found = clipped.with_stats(jnp.zeros((90, 60)), example, jnp.zeros(1, bool))[1]
    left, right = (np.asarray(side[0], np.float64) for side in example)
    return float(found.unprivatized_norms[0]), float(np.linalg.norm(left.T @ right))


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e8])
def test_a_norm_is_never_found_too_small(size):
    """And hardly too large: rounding to 11 bits costs less than a hundredth."""
    rng = np.random.default_rng(0)
    spread_out = tuple(
        (size * rng.normal(size=side.shape) * np.exp(4 * rng.normal(size=side.shape))).astype(
            np.float32
        )
        for side in rounded_down(40)
    )
    for example in (rounded_down(2, size), rounded_down(40, size), spread_out):
        found, true = norm_bound(example)
        assert true * (1 - 1e-6) <= found <= 1.01 * true


@pytest.mark.parametrize("_arithmetic", ["short"], indirect=True)
def test_shortened_vectors_alone_would_find_it_too_small(monkeypatch):
    shortened = _sides.shortened
    careless = lambda side: (found := shortened(side))._replace(lost=0 * found.lost)  # noqa: E731
    monkeypatch.setattr(_factors, "shortened", careless)
    monkeypatch.setattr(_factors, "_gram_roundoff", lambda parts: 0.0)
    found, true = norm_bound(rounded_down(40))
    assert found < true * (1 - 2.0**-12)


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


def test_a_non_finite_example_changes_no_other_block():
    """Nor the program that the others run in: another one might round them differently."""
    rng = np.random.default_rng(0)
    batch = tuple(rng.normal(size=(64, 20, n)).astype(np.float32) for n in (90, 60))
    clipped = ghost.clipped_grad(bilinear, l2_clip_norm=1.0)
    weight, nobody = jnp.zeros((90, 60)), jnp.zeros(64, bool)
    run = jax.jit(lambda *rows: clipped.exact_sum(weight, *rows)[0])
    spoiled = (batch[0].copy(), batch[1])
    spoiled[0][17, 3, 5] = np.nan
    found, wanted = run(spoiled, nobody), run(batch, jnp.arange(64) == 17)
    np.testing.assert_array_equal(found.high, wanted.high)
    np.testing.assert_array_equal(found.low, wanted.low)
    program = jax.make_jaxpr(lambda *rows: clipped.exact_sum(weight, *rows)[0])(batch, nobody)
    assert not {"cond", "while"} & {eqn.primitive.name for eqn in equations(program)}


@pytest.mark.parametrize("positions", [2, 40], ids=["gram", "product"])
@pytest.mark.parametrize(
    "shortened",
    [lambda w: w.astype(jnp.bfloat16), lambda w: jax.lax.reduce_precision(w, 8, 7)],
    ids=["cast", "reduce_precision"],
)
def test_sums_are_not_rounded_where_the_model_shortens_its_weights(shortened, positions):
    """The transpose of a cast is a cast: the sum of clipped gradients must not go through it."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(30, 30)), jnp.float32)
    loss = lambda w, x: jnp.sum(jnp.tanh(x.astype(w.dtype) @ w).astype(jnp.float32) ** 2)  # noqa: E731
    clipped = jax.jit(
        ghost.clipped_grad(lambda w, x: loss(shortened(w), x), l2_clip_norm=0.1).__call__
    )
    for _ in range(8):
        example = jnp.asarray(rng.normal(size=(1, positions, 30)), jnp.float32)
        total = clipped(weight, example, jnp.zeros(1, bool))
        assert np.linalg.norm(np.asarray(total, np.float64)) <= 0.1 * (1 + 1e-6)


def test_bfloat16_weights_behind_a_function_of_weights():
    params = {"w": jnp.ones((4, 3), jnp.bfloat16), "gain": jnp.ones(3, jnp.bfloat16)}
    loss = lambda p, x: jnp.sum(x @ (p["w"] * 0.5 * p["gain"])).astype(jnp.float32)  # noqa: E731
    batch = jnp.ones((2, 4), jnp.bfloat16)
    trainable = {"w": True, "gain": False}
    clippers = [
        module.clipped_grad(loss, l2_clip_norm=0.3, trainable=trainable)
        for module in (ghost, clipping)
    ]
    results = [
        jax.jit(clipped.__call__)(params, batch, jnp.zeros(2, bool))["w"] for clipped in clippers
    ]
    np.testing.assert_allclose(*results, rtol=1e-2)


def test_cancelling_positions_in_float64():
    """There is no type wider than float64, so the rounding of Gram sums counts."""
    with jax.enable_x64(True):
        clipped = jax.jit(ghost.clipped_grad(bilinear, l2_clip_norm=1.0).__call__)
        rng = np.random.default_rng(0)
        for gap in (1e-10, 1e-9, 1e-8, 1e-6):
            left, right = rng.normal(size=(5, 90)), rng.normal(size=(5, 60))
            nearly = left * (1 + gap * rng.normal(size=left.shape))
            left = 1e10 * np.concatenate([left, nearly])[None]
            right = np.concatenate([right, -right])[None]
            total = clipped(jnp.zeros((90, 60)), (left, right), jnp.zeros(1, bool))
            assert np.linalg.norm(total) <= 1 + 1e-6


@pytest.mark.parametrize(("left", "right"), [(1e34, 1e-34), (1e20, 1e20), (1e-43, 1e38)])
def test_numbers_that_underflow_on_the_way(left, right):
    """Scaled cotangents, or clip factors, may be subnormal where the result is not."""
    for seed in range(8):
        one, other = cancelling(5, 1.0, 1.0, seed)
        with np.errstate(over="ignore"):
            example = (one * np.float32(left), other * np.float32(right))
        total = compiled(ghost, 1.0)(example)
        assert np.linalg.norm(np.asarray(total, np.float64)) <= 1 + 1e-6


def test_others_that_underflow_alone_do_not_add_to_a_row():
    """A fused multiply-add keeps a product that underflows, where there is something to add to."""
    rows, side, clip = 16, 512, 1e-30
    vectors = np.full((rows, 1, side), np.sqrt(0.999 * np.finfo("f4").tiny), np.float32)
    vectors[0] = np.sqrt(1.5 * clip / side)
    run = jax.jit(ghost.clipped_grad(bilinear, l2_clip_norm=clip).exact_sum)
    weight = jnp.zeros((side, side))
    with_it, without = (
        np.asarray(run(weight, (vectors, vectors), is_padding).total.floats(), np.float64)
        for is_padding in (np.zeros(rows, bool), np.arange(rows) == 0)
    )
    assert np.linalg.norm((with_it - without) / clip) <= 1


def test_shortened_algorithms_are_not_used_for_norms_and_sums():
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        clipped = jax.jit(ghost.clipped_grad(bilinear, l2_clip_norm=1.0).__call__)
        for seed in range(4):
            example = cancelling(5, 1e3, 1e-3, seed)
            total = clipped(jnp.zeros((90, 60)), example, jnp.zeros(1, bool))
            assert np.linalg.norm(np.asarray(total, np.float64)) <= 1 + 1e-6


def looked_up(table, example):
    """Looks up, at every position, the row whose number is the first entry."""
    left, right = example
    return jnp.sum(table[left[:, 0].astype(jnp.int32)] * right)


def convolved(kernel, example):
    left, right = example
    out = jax.lax.conv_general_dilated(left[None], kernel[None], (1,), "VALID",
                                       dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip
    return jnp.sum(out[0] * right)


def one_entry(left, right, width: int):
    """Returns positions of which only the first entry differs from zero."""
    arrays = [np.zeros((len(right), width), np.float32) for _ in range(2)]
    arrays[0][:, 0], arrays[1][:, 0] = left, right
    return tuple(arrays)


def below_half_a_unit(positions: int):
    """Returns 1, then terms that a running sum of 1 rounds up to twice their size, then -1."""
    small = 2.0**-24 * (1 + 2.0**-10)
    return one_entry(1.0, [1.0, *[small] * (positions - 2), -1.0], 3 * positions // 2)


@pytest.mark.parametrize("loss_fn", [bilinear, looked_up, convolved])
@pytest.mark.parametrize("positions", [20, 66, 200])
def test_a_running_sum_may_round_every_position_up(loss_fn, positions):
    """An accumulation may err by T roundoffs in the worst case, not by the usual √T."""
    example = [array[None] for array in below_half_a_unit(positions)]
    width = example[0].shape[-1]
    weight = jnp.zeros((width, width))
    assert ghost.explain(loss_fn, weight, example)[0].path == "gram"

    def clipped(clip):
        found = ghost.clipped_grad(loss_fn, l2_clip_norm=clip)
        return jax.jit(found.with_stats)(weight, example, jnp.zeros(1, bool))

    bound = float(clipped(1.0)[1].unprivatized_norms[0])
    true = np.sum(example[1].astype(np.float64))
    assert bound >= true
    total = np.linalg.norm(np.asarray(clipped(1.0001 * bound)[0], np.float64))
    assert total <= 1.0001 * bound


@pytest.mark.parametrize("positions", [66, 200])
def test_rows_that_cancel_leave_the_others_alone(positions):
    """The sums with and without another row differ by at most the clip norm.

    The positions of the row that stays just do not fit into a running sum; what the other row adds
    before them changes how each of them is rounded.
    """
    unit, width = 2.0**-23, 3 * positions // 2
    small = np.full(positions - 2, -0.6 * unit)
    stays = one_entry(1.0, [2 - unit, *small, -(2 - unit + small.sum())], width)
    weight = jnp.zeros((width, width))
    lone = [array[None] for array in stays]
    norms = jax.jit(ghost.clipped_grad(bilinear, l2_clip_norm=1.0).with_stats)(
        weight, lone, jnp.zeros(1, bool)
    )
    clip = 1.001 * float(norms[1].unprivatized_norms[0])
    clipped = jax.jit(ghost.clipped_grad(bilinear, l2_clip_norm=clip).__call__)
    first = np.arange(positions) == 0
    for size in (3 * unit, 4 * unit, 0.5 * clip, 0.99 * clip):
        comes = one_entry(first, size * first, width)
        both = [np.stack(pair) for pair in zip(comes, stays, strict=True)]
        with_it, without = (
            np.asarray(clipped(weight, both, jnp.array([absent, False])), np.float64)
            for absent in (False, True)
        )
        assert np.linalg.norm(with_it - without) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("_arithmetic", ["wide"], indirect=True)
def test_no_margin_would_let_both_pass(monkeypatch):
    """The same rows find the fault if the rounding is assumed to have its usual size."""

    def usual(layers, rows):
        return _factors.Roundoff(math.sqrt(200) * 2.0**-24, 0.0, rows, 0.0)

    monkeypatch.setattr(_sum, "sum_roundoff", usual)
    with pytest.raises(AssertionError):
        test_a_running_sum_may_round_every_position_up(bilinear, 200)
    with pytest.raises(AssertionError):
        test_rows_that_cancel_leave_the_others_alone(200)


@pytest.mark.parametrize(("backend", "bits"), [("cpu", None), ("gpu", 11), ("tpu", 8)])
def test_the_margin_covers_inputs_that_the_machine_shortens(backend, bits, monkeypatch):
    """Both factors of a product are rounded to `bits` bits, at worst by half a unit each."""
    seen = []
    original = _factors.gram

    def gram(parts, *, roundoff, exponent):
        seen.append(roundoff)
        return original(parts, roundoff=roundoff, exponent=exponent)

    monkeypatch.setattr(_factors, "gram", gram)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    clipped = ghost.clipped_grad(bilinear, l2_clip_norm=1.0)
    jax.eval_shape(clipped, jnp.zeros((90, 60)), cancelling(17, 1.0, 0.1), jnp.zeros(1, bool))
    (roundoff,) = seen
    unit = 0.0 if bits is None else 2.0**-bits
    assert roundoff.own >= (1 + unit) ** 2 - 1 + 34 * 2.0**-24
    assert (roundoff.own > 1e-4) == (bits is not None)


@pytest.mark.parametrize("automatic", [False, True])
def test_clip_factors_are_rounded_down(automatic):
    """A factor below 1e-38 has few bits left: rounded up, it would let a contribution exceed C."""
    norms = np.geomspace(1.1, 1e44, 1000)
    nobody = jnp.zeros(1000, bool)
    with jax.enable_x64(True):
        squares = jnp.asarray(norms**2)
        factors, _ = clipping.clip_factors(
            [squares], nobody, 1.0, jnp.float32, reserve=0.0, automatic=automatic
        )
    excess = np.float64(factors) * (np.sqrt(np.float64(squares)) + automatic)
    assert excess.max() <= 1 + 1e-15
    assert excess[norms < 1e37].min() > 1 - 1e-6


@pytest.mark.parametrize("clip", [1e-12, 0.01, 1.0])
@pytest.mark.parametrize(("width", "out"), [(10_000, 1), (1_000, 10), (10, 10)])
def test_float64_inputs_whose_squares_underflow(width, out, clip):
    """Float64 rounds the norm of inputs of 1e-154 to zero, but a large cotangent restores them."""
    with jax.enable_x64(True):
        rows = (jnp.full((1, 1, width), 1.4e-154), jnp.full((1, 1, out), 1e153))
        clipped = jax.jit(ghost.clipped_grad(bilinear, l2_clip_norm=clip).__call__)
        total = clipped(jnp.zeros((width, out)), rows, jnp.zeros(1, bool))
        assert np.linalg.norm(total) <= clip


@pytest.mark.parametrize("module", [ghost, clipping], ids=["ghost", "explicit"])
def test_clip_norms_near_the_ends_of_floating_point_are_refused(module):
    for clip in (1e-154, 1e-31, 1e31):
        with pytest.raises(ValueError, match="between 1e-30 and 1e30"):
            module.clipped_grad(bilinear, l2_clip_norm=clip)


@pytest.mark.parametrize("kind", ["dense", "convolution", "lookup"])
def test_norms_and_sums_read_what_was_computed_once(kind):
    """Whatever waits for the clip factors passes a barrier, so that no reader computes it again."""

    def loss(weight, example):
        x, y = example
        if kind == "dense":
            return jnp.sum((x @ weight) * (x[:, :3] * y))
        if kind == "lookup":
            return jnp.sum(weight[x[:, 0].astype(int)] * (x[:, :3] * y))
        numbers = ("NWC", "WIO", "NWC")
        out = jax.lax.conv_general_dilated(x[None], weight, (1,), "SAME", dimension_numbers=numbers)
        return jnp.sum(out[0] * (x[:, :3] * y))

    weight = jnp.ones((2, 4, 3) if kind == "convolution" else (4, 3))
    example = (jnp.ones((6, 5, 4)), jnp.ones((6, 5, 3)))
    run = ghost.clipped_grad(loss, l2_clip_norm=1.0)
    traced = jax.make_jaxpr(lambda e: run(weight, e, jnp.zeros(6, bool)))(example)
    kept = {
        var.aval.size
        for eqn in equations(traced)
        if eqn.primitive.name == "optimization_barrier"
        for var in eqn.invars
    }
    inputs = 6 * 5 * (1 if kind == "lookup" else 4)
    assert {inputs, 6 * 5 * 3} <= kept
