"""Any Flax, Equinox or Haiku model fits: a loss is a plain function of parameters and one row."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirrordp
from tests import tools

ROWS = 40
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, ROWS)
DATA = {
    "x": (RNG.normal(size=(ROWS, 3)) + 2 * LABELS[:, None]).astype(np.float32),
    "y": LABELS.astype(np.int32),
}
PUBLIC = {"x": DATA["x"][:8] + 0.01, "y": DATA["y"][:8]}
OPTIMIZER = optax.sgd(0.3)


def cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def trained(loss, params, **options):
    """Trains a few steps and returns the parameters after them."""
    mechanism = tools.mechanism(noise_multiplier=0.2, num_steps=20, sampling=tools.poisson(20))
    ledger = mirrordp.Ledger(mechanism.adjacency)
    state, info = tools.last(
        tools.train(
            loss,
            params,
            mirrordp.PrivateData(DATA),
            mirrordp.PublicData(PUBLIC),
            mechanism=mechanism,
            optimizer=OPTIMIZER,
            alpha=0.7,
            seed=0,
            steps_per_call=20,
            spend=ledger,
            **options,
        )
    )
    assert info.charged_steps == 20
    assert ledger.event == mechanism.event
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    return state.params


def mean_loss(loss, params):
    return float(jax.jit(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, DATA)))(params))


def test_flax_linen_with_dropout_through_the_key():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.tanh(nn.Dense(4)(x))
            x = nn.Dropout(0.3, deterministic=not train)(x)
            return nn.Dense(2)(x)

    network = Network()
    params = network.init(jax.random.key(0), DATA["x"][0], train=False)

    def loss(params, example, key):
        logits = network.apply(params, example["x"], train=True, rngs={"dropout": key})
        return cross_entropy(logits, example["y"])

    def evaluate(params, example):
        return cross_entropy(network.apply(params, example["x"], train=False), example["y"])

    found = trained(loss, params)
    assert mean_loss(evaluate, found) < mean_loss(evaluate, params)
    # Dropout draws from the run's own key: the same seed gives the same bits.
    again = trained(loss, params)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(left, right)


def test_flax_nnx():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)

    def loss(params, example):
        restored = nnx.merge(graph, nnx.State(params))
        return cross_entropy(restored(example["x"]), example["y"])

    assert mean_loss(loss, trained(loss, params)) < mean_loss(loss, params)


def test_equinox():
    model = eqx.nn.MLP(3, 2, width_size=4, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, example):
        return cross_entropy(eqx.combine(params, static)(example["x"]), example["y"])

    found = trained(loss, params)
    assert mean_loss(loss, found) < mean_loss(loss, params)
    assert eqx.combine(found, static)(DATA["x"][0]).shape == (2,)


def test_haiku_with_a_frozen_backbone():
    def forward(x):
        return hk.Linear(2, name="head")(jnp.tanh(hk.Linear(4, name="backbone")(x)))

    network = hk.without_apply_rng(hk.transform(forward))
    params = network.init(jax.random.key(0), DATA["x"][0])

    def loss(params, example):
        return cross_entropy(network.apply(params, example["x"]), example["y"])

    found = trained(loss, params, trainable={"backbone": False, "head": True})
    assert mean_loss(loss, found) < mean_loss(loss, params)
    for name in ("w", "b"):
        np.testing.assert_array_equal(found["backbone"][name], params["backbone"][name])
    assert (found["head"]["w"] != params["head"]["w"]).all()


def test_batch_normalisation_cannot_couple_examples():
    """The loss sees one row: statistics over a batch axis do not exist for it."""

    def loss(params, example):
        normalised = example["x"] - jnp.mean(example["x"], axis=0)
        return jnp.dot(params, normalised)

    other = {"x": DATA["x"].copy(), "y": DATA["y"]}
    other["x"][1:] += 100.0
    clipped = jax.jit(mirrordp.clipped_grad(loss, l2_clip_norm=1.0))
    only_first = np.arange(ROWS) > 0
    theta = jnp.ones(3)
    np.testing.assert_array_equal(
        clipped(theta, DATA, only_first), clipped(theta, other, only_first)
    )


def test_a_loss_over_a_batch_axis_is_refused():
    with pytest.raises(ValueError, match="must return one scalar"):
        trained(lambda params, example: jnp.tanh(example["x"]) * params, jnp.ones(3))


class TestRandomKeysInTheState:
    """nnx keeps the keys of dropout beside the parameters."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

    GRAPH, STATE = nnx.split(Network(nnx.Rngs(0)))

    def loss(self, state, example):
        return cross_entropy(nnx.merge(self.GRAPH, state).linear(example["x"]), example["y"])

    def started(self, **options):
        # Few passes: whether it converges is no matter here.
        return mirrordp.warm_start(
            self.loss, self.STATE, mirrordp.PublicData(PUBLIC), optimizer=optax.sgd(0.3), **options
        )

    def test_trainable_keys_are_refused_in_words(self):
        with pytest.raises(TypeError, match=r"floating point, got uint32 .*nnx.split"):
            self.started()
        with pytest.raises(TypeError, match=r"floating point, got uint32 .*nnx.split"):
            trained(self.loss, self.STATE)

    @pytest.mark.parametrize("average", [None, mirrordp.ExponentialAverage(0.5)])
    def test_frozen_keys_stay_what_they_are(self, average):
        floats = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), self.STATE)
        found = self.started(trainable=floats, average=average).params
        assert mean_loss(self.loss, found) < mean_loss(self.loss, self.STATE)
        before, after = (state["dropout"]["rngs"] for state in (self.STATE, found))
        assert after["key"][...] == before["key"][...]
        assert after["count"][...] == before["count"][...]
