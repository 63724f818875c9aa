"""Each kind of layer against JAX's own derivative, and how a new kind is added."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mirrordp.privacy import clipping, ghost, sums
from mirrordp.privacy.ghost import _factors, _layers, _sides, _sum
from mirrordp.privacy.ghost._layers import AnyOperation, Axes, Convolution, Lookup, MatrixProduct
from mirrordp.privacy.ghost._sides import Vectors
from mirrordp.privacy.trainable import Trainable
from tests.ghost.test_parity import relative_error
from tests.ghost.zoo import conv, integers, normal

LAYERS = {
    "dense": (MatrixProduct, lambda w, x: x @ w, normal(0, 4, 3), normal(1, 5, 4)),
    "dense over positions": (
        MatrixProduct,
        lambda w, x: x @ w,
        normal(0, 4, 3),
        normal(1, 5, 6, 4),
    ),
    "weight on the left": (MatrixProduct, lambda w, x: w @ x, normal(0, 3, 4), normal(1, 5, 4, 6)),
    "heads": (
        MatrixProduct,
        lambda w, x: jnp.einsum("hts,hsd->td", x, w),
        normal(0, 2, 4, 3),
        normal(1, 5, 2, 6, 4),
    ),
    "recurrent": (
        MatrixProduct,
        lambda w, x: lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros(4), x)[1],
        normal(0, 4, 4),
        normal(1, 5, 6, 4),
    ),
    "stacked": (
        MatrixProduct,
        lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0],
        normal(0, 3, 4, 4),
        normal(1, 5, 4),
    ),
    "convolution": (
        Convolution,
        lambda w, x: conv(x, w, stride=2),
        normal(0, 3, 3, 2, 4),
        normal(1, 5, 6, 6, 2),
    ),
    "grouped convolution": (
        Convolution,
        lambda w, x: conv(x, w, groups=2, dilation=2),
        normal(0, 3, 3, 2, 6),
        normal(1, 5, 6, 6, 4),
    ),
    "rows by dynamic_slice": (
        Lookup,
        # Beyond the table, and beginning within a row: both are clipped.
        lambda w, x: jax.vmap(lambda i: lax.dynamic_slice(w, (2 * i, i - 3), (1, 3))[0])(x),
        normal(0, 7, 3),
        integers(1, 7, 5, 6),
    ),
    "lookup": (Lookup, lambda w, x: w[x], normal(0, 7, 3), integers(1, 7, 5, 6)),
    "scale": (AnyOperation, lambda w, x: x * w, normal(0, 4), normal(1, 5, 4)),
}


def split_of(function, weight, batch):
    """A loss with one weight, split; it has one layer."""
    weight, batch = jnp.asarray(weight, jnp.float32), jnp.asarray(batch)
    if jnp.issubdtype(batch.dtype, jnp.floating):
        batch = batch.astype(jnp.float32)
    loss = lambda w, x: jnp.sum(jnp.sin(function(w, x)))  # noqa: E731
    return _sum.Split.of(loss, weight, (batch, None), Trainable.of(None), len(batch))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_agrees_with_the_derivative(name):
    kind, *problem = LAYERS[name]
    split = split_of(*problem)
    (layer,) = split.plan.layers
    assert type(layer) is kind
    factors = np.array([0.5, 0.0, 1.0, 0.25, 0.1], np.float32)
    nothing = _factors.Roundoff(0.0, 0.0, 1, 0.0)

    def probed(results, rows):
        plan = dataclasses.replace(split.plan, product={}, gram={})
        object.__setattr__(plan, "results_probed", lambda number: results)
        chosen = dataclasses.replace(split, plan=plan)
        _, (captured,), (gradients,) = _sum._backward(chosen, rows, len(factors))
        return captured, gradients

    @jax.jit
    def compute(rows):
        _, gradients = probed(False, rows)
        (wanted,) = gradients.operands
        if kind is AnyOperation:
            return wanted, wanted
        captured, gradients = probed(True, rows)
        part = layer.factors(captured, gradients.results[0])
        found = wanted if layer.one_hot else layer.weight_gradient(layer.product(part))
        squared, _ = _factors.gram([part], roundoff=nothing, exponent=-40)
        halves = layer.weighted_sum(part, factors, block=2, exponent=-40)
        total = sums.ExactSum.from_halves(split.treedef, [halves], -40, split.leaves)
        return wanted, found, part, squared, layer.weight_gradient(total.floats())

    wanted, found, *others = compute(split.rows)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    if others:
        part, squared, total = others
        positions, left, right, groups = layer.sizes
        assert part.left.positions == part.right.positions == positions
        assert part.right.values.shape == (len(factors), groups, positions, right)
        assert layer.one_hot or part.left.entries == left
        norms = np.linalg.norm(wanted.reshape(len(factors), -1), axis=1)
        np.testing.assert_allclose(np.sqrt(squared), norms, rtol=1e-5)
        np.testing.assert_allclose(total, np.tensordot(factors, wanted, 1), rtol=1e-4, atol=1e-5)


class Scale(_layers.OuterProducts):
    """x * w, entry by entry: every entry of the weight is a group of its own."""

    @classmethod
    def recognises(cls, site):
        return site.name == "mul" and super().recognises(site)

    @property
    def axes(self):
        return Axes(tuple(range(len(self.weight.shape))), (), ())

    def factors_of(self, operand, cotangent):
        size, rows = self.weight.size, len(operand)
        sides = (array.reshape(rows, -1, size) for array in (operand, cotangent))
        left, right = (Vectors(side.swapaxes(1, 2)[..., None]) for side in sides)
        return _factors.Factors(left, right)


@pytest.mark.usefixtures("nothing_reserved")
def test_a_new_kind_is_one_class(monkeypatch, capsys):
    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(h * w["state"] + x * w["input"]), None)  # noqa: E731
        h, _ = lax.scan(step, xs[0], xs)
        return jnp.sum(h**2)

    params = {"state": jnp.asarray(normal(0, 2, 3)), "input": jnp.asarray(normal(1, 2, 3))}
    batch, nobody = jnp.asarray(normal(2, 5, 4, 2, 3)), jnp.zeros(5, bool)
    assert [row.path for row in ghost.explain(loss, params, batch)] == ["explicit"] * 2
    monkeypatch.setattr(_layers, "KINDS", (Scale, *_layers.KINDS))
    assert [row.path for row in ghost.explain(loss, params, batch)] == ["product"] * 2
    assert "mul" not in capsys.readouterr().out.splitlines()[-1]
    results = [
        jax.jit(module.clipped_grad(loss, l2_clip_norm=0.5).__call__)(params, batch, nobody)
        for module in (ghost, clipping)
    ]
    assert relative_error(*results) < 1e-6


def test_the_last_kind_recognises_every_site():
    *others, last = _layers.KINDS
    assert last is AnyOperation
    (site,) = split_of(*LAYERS["dense"][1:]).program.sites
    for change in ({"name": "lift"}, {"loops": (0,)}, {"param_positions": (0, 1)}):
        odd = dataclasses.replace(site, **change)
        assert type(_layers.layer_at(odd)) is last
        assert not any(kind.recognises(odd) for kind in others)


def test_patches_of_few_examples_come_in_one_piece(monkeypatch):
    """On a GPU, as long as all together take no more bytes than they may."""
    pixels = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 2, 10, 10, 4)), jnp.float32)
    patches = _sides.Patches(pixels, (3, 3), (8, 8), (1, 1), (1, 1))
    together = 3 * 2 * 64 * 36 * 4
    found = {}
    for bytes_in_all in (together, together // 3, together // 9, 0):
        monkeypatch.setitem(_sides.PATCHES, jax.default_backend(), bytes_in_all)
        monkeypatch.setitem(_sides.PIECE, jax.default_backend(), 1)
        found[bytes_in_all] = patches.pieces(lambda piece: piece)
    assert [len(pieces) for pieces in found.values()] == [1, 3, 9, 9]
    for pieces in found.values():
        whole = jnp.concatenate(pieces, axis=-1)
        np.testing.assert_array_equal(whole, found[together][0])


@pytest.mark.parametrize("path", ["product", "behind a function"])
def test_formed_gradients_of_bfloat16_weights_have_as_many_bits(path):
    """Half the memory; and the numbers whose norm is taken are those that are summed."""
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(3, 3, 2, 8)), jnp.float32)
    images = jnp.asarray(rng.normal(size=(1, 2, 9, 9, 2)), jnp.float32)

    def loss(kernel, images):
        if path != "product":
            kernel = kernel / jnp.linalg.norm(kernel)
        convolve = jax.vmap(conv, (0, None))
        out = convolve(images.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))
        return jnp.tanh(out.astype(jnp.float32)).sum()

    split = _sum.Split.of(loss, kernel, (images, None), Trainable.of(None), 1)
    assert (split.plan.explicit == (0,)) == (path != "product")
    clipped = jax.jit(ghost.clipped_grad(loss, l2_clip_norm=1e6).with_stats)
    total, stats = clipped(kernel, images, jnp.zeros(1, bool))
    np.testing.assert_array_equal(total, total.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(stats.unprivatized_norms[0], np.linalg.norm(total), rtol=1e-6)
    exact = jax.grad(lambda kernel: loss(kernel, images[0]))(kernel)
    assert relative_error(total, exact) < 0.01
