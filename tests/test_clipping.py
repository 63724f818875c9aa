"""The explicit clipper, and the contract that every clipper shares."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrordp
from mirrordp.privacy import clipping, ghost
from mirrordp.privacy.sums import ExactSum
from tests.contracts import clipper
from tests.contracts.clipper import ClipperContract

# Every function of this signature obeys the same contract: add it here.
CLIPPERS = [mirrordp.clipped_grad, ghost.clipped_grad]


@pytest.mark.usefixtures("nothing_reserved")
class TestClippers(ClipperContract):
    @pytest.fixture(params=CLIPPERS, ids=lambda function: function.__module__)
    def make(self, request):
        return request.param


def _broken(change, loss_fn, **options):
    """`mirrordp.clipped_grad` with its sum changed by `change(params, batch, is_padding, sum)`."""
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


def test_norms_of_a_long_gradient_are_not_lost_to_rounding():
    """A million equal entries: a careless sum of squares would be off by far more than 1e-6."""
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


class TestTrainablePart:
    def test_everything_by_default(self):
        params = clipper.make_params()
        assert clipping.trainable_part(params, None) is params

    def test_merge_undoes_it(self):
        params = clipper.make_params()
        part = clipping.trainable_part(params, {"hidden": False, "out": True})
        assert part["hidden"] == {"w": None, "b": None}
        merged = clipping.merge(jax.tree.map(lambda leaf: leaf + 1, part), params)
        np.testing.assert_array_equal(merged["out"], params["out"] + 1)
        np.testing.assert_array_equal(merged["hidden"]["w"], params["hidden"]["w"])

    def test_nothing_trainable_is_refused(self):
        clipped = mirrordp.clipped_grad(clipper.loss, l2_clip_norm=1.0, trainable=False)
        with pytest.raises(ValueError, match="trainable"):
            clipped(clipper.make_params(), clipper.make_batch(2), np.zeros(2, bool))
