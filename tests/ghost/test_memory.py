"""Large layers have no per-example gradients, as the jaxpr shows."""

import math
import warnings

import jax
import jax.numpy as jnp
import pytest

from experiments import models
from mirrordp.privacy import clipping, ghost
from tests.ghost.test_odd_programs import PROGRAMS


def shapes(jaxpr) -> set[tuple[int, ...]]:
    """Returns the shapes of all intermediate values, inner jaxprs included."""
    found = set()
    for eqn in jaxpr.eqns:
        found |= {tuple(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape")}
        for value in eqn.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    found |= shapes(inner)
    return found


def per_example_gradients(module, loss, params, batch, large: int) -> list:
    rows = len(jax.tree.leaves(batch)[0])
    clipped = module.clipped_grad(loss, l2_clip_norm=1.0)
    jaxpr = jax.make_jaxpr(clipped)(params, batch, jnp.zeros(rows, bool))
    sizes = {leaf.size for leaf in jax.tree.leaves(params) if leaf.size >= large}
    found = shapes(jaxpr.jaxpr)
    return [s for s in found if s and s[0] == rows and math.prod(s[1:]) in sizes]


def test_the_language_model():
    net = models.lstm_language_model(vocabulary=8000)
    params = jax.eval_shape(net.init, jax.random.key(0))
    batch = jnp.zeros((13, 36), int)
    large = 120 * 480
    assert not per_example_gradients(ghost, net.loss, params, batch, large)
    assert per_example_gradients(clipping, net.loss, params, batch, large)


@pytest.mark.usefixtures("by_gram")
def test_the_image_network():
    net = models.cifar10_cnn()
    params = jax.eval_shape(net.init, jax.random.key(0))
    batch = (jnp.zeros((13, 32, 32, 3)), jnp.zeros(13, int))
    large = 9 * 128 * 128
    assert not per_example_gradients(ghost, net.loss, params, batch, large)
    assert per_example_gradients(clipping, net.loss, params, batch, large)


def test_stacked_layers():
    layers, width = 3, 64
    params = {"w": jnp.zeros((layers, width, width)), "b": jnp.zeros((layers, width))}

    def loss(params, x):
        layer = lambda h, p: (jnp.tanh(h @ p["w"] + p["b"]), None)  # noqa: E731
        h, _ = jax.lax.scan(layer, x, params)
        return jnp.sum(h**2)

    batch = jnp.zeros((13, 5, width))
    large = layers * width * width
    assert not per_example_gradients(ghost, loss, params, batch, large)
    assert per_example_gradients(clipping, loss, params, batch, large)
    paths = {p.name: p.path for p in ghost.explain(loss, params, batch)}
    assert paths == {"['b']": "explicit", "['w']": "gram"}


def test_what_a_model_computes_again_is_not_kept():
    """With `jax.checkpoint` around each layer, activations inside the layers take no memory."""
    layers, width, positions, rows = 6, 32, 512, 4

    def layer(h, p):
        wide = jnp.tanh(h @ p["into"])
        return h + jnp.sin(wide) @ p["out"], None

    params = {
        "into": jnp.ones((layers, width, 8 * width)),
        "out": jnp.ones((layers, 8 * width, width)),
    }
    batch = jnp.ones((rows, positions, width))

    def temporary(layer) -> int:
        loss = lambda p, x: jnp.sum(jax.lax.scan(layer, x, p)[0] ** 2)  # noqa: E731
        clipped = jax.jit(ghost.clipped_grad(loss, l2_clip_norm=1.0).__call__)
        lowered = clipped.lower(params, batch, jnp.zeros(rows, bool))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    kept = 4 * rows * positions * 8 * width
    plain, again = temporary(layer), temporary(jax.checkpoint(layer, prevent_cse=False))
    assert plain - again > layers * kept / 2
    assert again < 6 * kept


def test_explain_names_every_parameter_and_its_path(capsys):
    net = models.lstm_language_model(vocabulary=8000)
    shapes = jax.eval_shape(net.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
    paths = {p.name: p for p in ghost.explain(net.loss, params, jnp.zeros((2, 36), int))}
    printed = capsys.readouterr().out
    assert len(paths) == len(jax.tree.leaves(params))
    assert all(name in printed for name in paths)
    assert paths["['embedding']"].path == "gram"
    assert paths["['out']['kernel']"].path == "gram"
    assert paths["['out']['kernel']"].numbers < 120 * 8000 / 100
    assert paths["['out']['bias']"].path == "explicit"
    assert "add" in paths["['out']['bias']"].reason


def test_explain_says_why_a_parameter_is_explicit(capsys):
    def loss(w, x):
        return jnp.sum(x @ (w / jnp.linalg.norm(w)))

    (path,) = ghost.explain(loss, jnp.ones((3, 2)), jnp.ones((2, 3)))
    assert path.path == "explicit"
    assert "function of parameters" in path.reason
    assert "function of parameters" in capsys.readouterr().out
    assert path.operations == 2 * 3 * 2


def test_explain_counts_the_positions_of_an_explicit_gradient():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ (w / jnp.linalg.norm(w))))

    (path,) = ghost.explain(loss, jnp.ones((30, 20)), jnp.ones((2, 7, 30)))
    assert path.path == "explicit"
    assert path.operations == 2 * 7 * 30 * 20
    assert path.numbers == 30 * 20


def test_large_explicit_gradients_are_announced(monkeypatch):
    """The warning names the parameter and the reason, and depends on the microbatch size."""

    def loss(params, x):
        scaled = params["scaled"] / jnp.linalg.norm(params["scaled"])
        return jnp.sum(jnp.tanh(x @ params["plain"]) @ scaled)

    params = {"plain": jnp.ones((3, 4)), "scaled": jnp.ones((4, 2))}
    batch, padding = jnp.ones((6, 3)), jnp.zeros(6, bool)

    def warned(size=None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=size)
            jax.eval_shape(clipped, params, batch, padding)
        return [str(one.message) for one in caught if "explicit gradients" in str(one.message)]

    assert warned() == []
    monkeypatch.setattr(ghost, "LARGE", 6 * 8)
    (message,) = warned()
    assert "of 6 examples for ['scaled']" in message
    assert "behind a function of parameters" in message
    assert "['plain']" not in message
    assert warned(size=5) == []


def test_large_explicit_gradients_are_announced_once(monkeypatch):
    """A network with many such layers, as with standardised weights, does not fill the screen."""

    def loss(params, x):
        for name in "abc":
            x = jnp.tanh(x @ (params[name] / jnp.linalg.norm(params[name])))
        return jnp.sum(x)

    def warned(**sizes):
        params = {name: jnp.ones((3, 3)) for name in "abc"} | {"c": jnp.ones((3, 5))}
        monkeypatch.setattr(ghost, "LARGE", sizes["large"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0)
            jax.eval_shape(clipped, params, jnp.ones((6, 3)), jnp.zeros(6, bool))
        (message,) = [str(one.message) for one in caught]
        return message

    assert "['c'] (0 MiB in float32), and for 2 more: behind" in warned(large=6 * 9)
    assert "['c'] (0 MiB in float32): behind" in warned(large=6 * 15)


def test_a_tied_weight_that_is_formed_by_choice_is_not_announced(monkeypatch):
    monkeypatch.setattr(ghost, "LARGE", 1)
    loss = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w.T) @ w))  # noqa: E731
    batch = jnp.zeros((2, 200, 4))
    (path,) = ghost.explain(loss, jnp.ones((9, 4)), batch)
    assert (path.path, path.reason[:18]) == ("explicit", "used several times")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0)
        jax.eval_shape(clipped, jnp.ones((9, 4)), batch, jnp.zeros(2, bool))


def test_a_loss_that_is_not_recognised_at_all_is_announced(monkeypatch):
    loss, params, batch = PROGRAMS["fixed_point_without_gradient"]
    monkeypatch.setattr(ghost, "LARGE", 1)
    clipped = ghost.clipped_grad(loss, l2_clip_norm=1.0)
    with pytest.warns(UserWarning, match="for all parameters .* while"):
        jax.eval_shape(clipped, params, batch, jnp.zeros(len(batch), bool))
