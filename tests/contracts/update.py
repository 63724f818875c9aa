"""What every update that mixes in a public gradient must obey.

Subclass `UpdateContract` and give it a fixture `make`: a function of α that returns an optax
transformation whose `update` takes the keyword `public_grad`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PARAMS = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}


def gradient(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), PARAMS)


def assert_equal_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


class UpdateContract:
    """Inherit, name the class Test..., and provide the fixture `make`."""

    def test_forgetting_the_public_gradient_is_a_type_error(self, make):
        update = make(0.5)
        with pytest.raises(TypeError, match="public_grad"):
            update.update(gradient(0), update.init(PARAMS), PARAMS)
        with pytest.raises(TypeError):
            update.update(gradient(0), update.init(PARAMS), PARAMS, gradient(1))

    @pytest.mark.parametrize("bad", [1.0, np.nan, np.inf])
    def test_at_alpha_one_the_public_gradient_cannot_matter(self, make, bad):
        update = make(1.0)
        public = jax.tree.map(lambda leaf: jnp.full_like(leaf, bad), PARAMS)
        found, _ = jax.jit(update.update)(
            gradient(0), update.init(PARAMS), PARAMS, public_grad=public
        )
        assert_equal_bits(found, gradient(0))

    def test_at_alpha_zero_only_the_public_gradient_matters(self, make):
        update = make(0.0)
        zero = jax.tree.map(jnp.zeros_like, PARAMS)  # what a step that reads no private data gives
        found, _ = update.update(zero, update.init(PARAMS), PARAMS, public_grad=gradient(1))
        assert_equal_bits(found, gradient(1))

    def test_keeps_structure_and_dtype(self, make):
        update = make(0.3)
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), gradient(0))
        found, _ = update.update(narrow, update.init(PARAMS), PARAMS, public_grad=narrow)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}

    def test_frozen_leaves_may_be_none(self, make):
        update = make(0.3)
        part, other = gradient(0) | {"b": None}, gradient(1) | {"b": None}
        found, _ = update.update(part, update.init(PARAMS), PARAMS, public_grad=other)
        assert found["b"] is None

    def test_bad_alpha(self, make):
        for bad in (-0.1, 1.5, np.nan):
            with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
                make(bad)
