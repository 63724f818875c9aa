"""The explicit clipper, and the contract that every clipper shares."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrordp
from mirrordp.privacy import clipping, ghost
from mirrordp.privacy._jaxprs import equations
from mirrordp.privacy.sums import ExactSum
from mirrordp.privacy.trainable import Trainable
from tests.contracts import clipper
from tests.contracts.clipper import ClipperContract

# Every function of this signature obeys the same contract and belongs in this list.
CLIPPERS = [mirrordp.clipped_grad, ghost.clipped_grad]


@pytest.mark.usefixtures("nothing_reserved")
class TestClippers(ClipperContract):
    @pytest.fixture(params=CLIPPERS, ids=lambda function: function.__module__)
    def make(self, request):
        return request.param


def _broken(change, loss_fn, **options):
    """Returns a clipper whose sum is changed by `change(params, batch, is_padding, sum)`."""
    right = mirrordp.clipped_grad(loss_fn, **options)

    def exact_sum(params, batch, is_padding, *, keys=None):
        total, stats = right.exact_sum(params, batch, is_padding, keys=keys)
        changed = change(params, batch, is_padding, total.floats())
        return ExactSum.of(changed, right.l2_clip_norm), stats

    return dataclasses.replace(right, exact_sum=exact_sum)


def _plain_sum(params, batch, is_padding):
    grads = jax.vmap(jax.grad(clipper.loss), (None, 0))(params, batch)
    return jax.tree.map(lambda leaf: jnp.tensordot(~jnp.asarray(is_padding), leaf, 1), grads)


def _clip_after_sum(params, batch, is_padding, total):
    del total
    grad = _plain_sum(params, batch, is_padding)
    size = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grad)))
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, clipper.CLIP / size), grad)


def _divide_by_realised_batch(params, batch, is_padding, total):
    del params, batch
    return jax.tree.map(lambda leaf: leaf * 3 / jnp.maximum(jnp.sum(~is_padding), 1), total)


def _slightly_too_large(params, batch, is_padding, total):
    del params, batch, is_padding
    return jax.tree.map(lambda leaf: leaf * 1.00001, total)


@pytest.mark.parametrize(
    ("change", "tests"),
    [
        (
            _clip_after_sum,
            [
                "test_equals_a_loop_over_examples",
                "test_a_non_finite_gradient_adds_zero_and_spares_the_others",
            ],
        ),
        (
            _divide_by_realised_batch,
            ["test_neighbours_differ_by_at_most_the_sensitivity_and_attain_it"],
        ),
        (_slightly_too_large, ["test_no_contribution_exceeds_the_clip_norm"]),
    ],
    ids=["clip after sum", "realised batch", "too large by 1e-5"],
)
def test_the_contract_rejects_a_broken_clipper(change, tests):
    make = functools.partial(_broken, change)
    for name in tests:
        arguments = (np.nan,) if "non_finite" in name else ()
        with pytest.raises(AssertionError):
            getattr(ClipperContract(), name)(make, *arguments)


AUTOMATIC = [functools.partial(make, automatic=True) for make in CLIPPERS]


@pytest.mark.usefixtures("nothing_reserved")
@pytest.mark.parametrize("make", AUTOMATIC, ids=["explicit", "ghost"])
class TestAutomaticClipping:
    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("test_no_contribution_exceeds_the_clip_norm", ()),
            ("test_neighbours_differ_by_at_most_the_sensitivity_and_attain_it", ()),
            ("test_padding_adds_exactly_zero_whatever_it_holds", ()),
            ("test_a_non_finite_gradient_adds_zero_and_spares_the_others", (np.nan,)),
            ("test_microbatches_change_nothing", (3,)),
        ],
    )
    def test_keeps_the_promises_of_clipping(self, make, name, arguments):
        getattr(ClipperContract(), name)(make, *arguments)

    def test_scales_every_gradient_by_its_norm(self, make):
        """Tiny gradients are left alone, and one of norm C is halved."""
        for scale in (1e-8, 0.1, 1.0, 10.0):
            plain = _plain_sum(clipper.make_params(), clipper.make_batch(1, scale), [False])
            norm = clipper.norm(plain)
            expected = norm * clipper.CLIP / (norm + clipper.CLIP)
            assert clipper.norm(clipper.one(make, scale)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("nothing_reserved")
def test_a_factor_that_is_too_large_is_seen(monkeypatch):
    right = clipping.clip_factors

    def broken(*arguments, automatic, **options):
        factors, norms = right(*arguments, automatic=automatic, **options)
        return factors * 1.00001, norms

    monkeypatch.setattr(clipping, "clip_factors", broken)
    for make in CLIPPERS:
        with pytest.raises(AssertionError):
            ClipperContract().test_no_contribution_exceeds_the_clip_norm(
                functools.partial(make, automatic=True)
            )


def test_norms_of_a_long_gradient_are_not_lost_to_rounding():
    """A float32 sum of a million equal squares would be off by far more than 1e-6."""
    size = 1_000_000
    clipped = jax.jit(mirrordp.clipped_grad(lambda p, x: jnp.sum(p * x), l2_clip_norm=1.0))
    found = np.asarray(
        clipped(jnp.zeros(size), jnp.full([1, 1], 0.1), jnp.array([False])), np.float64
    )
    assert 1 - 1e-5 < np.linalg.norm(found) <= 1


class TestTakesKey:
    def test_third_required_argument(self):
        assert clipping.takes_key(lambda params, example, key: 0.0)
        assert clipping.takes_key(jax.jit(lambda params, example, key: 0.0))

    def test_two_arguments_or_a_default(self):
        assert not clipping.takes_key(lambda params, example: 0.0)
        assert not clipping.takes_key(lambda params, example, key=None: 0.0)
        keyed = functools.partial(clipper.keyed_loss, key=jax.random.key(0))
        assert not clipping.takes_key(keyed)

    def test_callable_objects(self):
        class Model:
            def __call__(self, params, example, key):
                return 0.0

        assert clipping.takes_key(Model())


class TestTrainable:
    def test_everything_by_default(self):
        params = clipper.make_params()
        assert Trainable.of(None).part(params) is params

    def test_merge_undoes_part(self):
        params = clipper.make_params()
        chosen = Trainable.of({"hidden": False, "out": True})
        part = chosen.part(params)
        assert part["hidden"] == {"w": None, "b": None}
        merged = chosen.merge(jax.tree.map(lambda leaf: leaf + 1, part), params)
        np.testing.assert_array_equal(merged["out"], params["out"] + 1)
        np.testing.assert_array_equal(merged["hidden"]["w"], params["hidden"]["w"])

    def test_equal_masks_are_one_static_argument(self):
        mask = {"hidden": False, "out": True}
        chosen = Trainable.of(mask)
        assert Trainable.of(chosen) is chosen
        for same in (dict(reversed(mask.items())), jax.tree.map(np.bool_, mask)):
            assert Trainable.of(same) == chosen
            assert hash(Trainable.of(same)) == hash(chosen)
        others = [None, {"hidden": True, "out": True}, {"hidden": False, "in": True}]
        assert all(Trainable.of(other) != chosen for other in others)
        assert Trainable.of(None) == Trainable.of(True)

        traces = []

        @functools.partial(jax.jit, static_argnums=0)
        def part_of(chosen, params):
            traces.append(chosen)
            return chosen.part(params)

        for same in (mask, dict(mask)):
            part_of(Trainable.of(same), clipper.make_params())
        assert len(traces) == 1

    def test_zero_sum_has_the_trainable_leaves_in_float32_or_wider(self):
        params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.arange(3)}
        zero = Trainable.of({"a": True, "b": False}).zero_sum(params)
        assert zero["b"] is None
        assert zero["a"].dtype == jnp.float32
        assert not zero["a"].any()

    def test_check_names_a_trainable_leaf_that_is_not_a_real_number(self):
        for leaf in (jnp.arange(2), jnp.ones(2, jnp.complex64)):
            params = {"w": jnp.ones(2), "odd": leaf}
            Trainable.of({"w": True, "odd": False}).check(params)
            with pytest.raises(TypeError, match=r"floating point, got .* at params\['odd'\]"):
                Trainable.of(None).check(params)

    @pytest.mark.parametrize("mask", [False, {"hidden": {"w": False, "b": False}, "out": False}])
    def test_nothing_trainable_is_refused(self, mask):
        clipped = mirrordp.clipped_grad(clipper.loss, l2_clip_norm=1.0, trainable=mask)
        with pytest.raises(ValueError, match="trainable must be True for at least one"):
            clipped(clipper.make_params(), clipper.make_batch(2), np.zeros(2, bool))

    def test_a_mask_of_another_shape_is_refused(self):
        with pytest.raises(ValueError, match="prefix"):
            Trainable.of({"hidden": True}).part(clipper.make_params())


def test_an_empty_batch_of_groups_adds_nothing():
    clipped = clipping.clipped_grad(
        lambda p, x: p["a"] * x + p["b"] * x, l2_clip_norm=1.0, groups=(0, 1)
    )
    found = clipped({"a": 1.0, "b": 2.0}, jnp.zeros(0), jnp.zeros(0, bool))
    assert jax.tree.leaves(found) == [0.0, 0.0]


def test_factors_of_a_wider_type_are_rounded_down():
    """Of a tree with float64 and float32 leaves: nearest would be up for half of the factors."""
    with jax.enable_x64(True):
        weights = jnp.asarray(np.random.default_rng(0).uniform(size=1000))
        found = clipping.scaled(jnp.ones(1000, jnp.float32), weights)
        assert found.dtype == jnp.float32
        assert np.all(np.asarray(found, np.float64) <= np.asarray(weights))
        np.testing.assert_allclose(found, weights, rtol=2.0**-22)


@pytest.mark.parametrize("clipped_grad", CLIPPERS, ids=["explicit", "ghost"])
def test_microbatches_are_alike_and_hold_little_padding(clipped_grad):
    """Ten rows at most four at a time are 3 x 4, and nine are 3 x 3, not 3 x 4."""
    loss = lambda w, x: jnp.sum((x @ w) ** 2)  # noqa: E731
    for rows, size in ((10, 4), (9, 3), (8, 4), (6, 3)):
        clipped = clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=4)
        arguments = jnp.ones((5, 2)), jnp.ones((rows, 5)), jnp.zeros(rows, bool)
        program = jax.make_jaxpr(clipped.exact_sum)(*arguments)
        scans = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
        shapes = {var.aval.shape for eqn in scans for var in eqn.invars}
        assert (-(-rows // size), size, 5) in shapes
