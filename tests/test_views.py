"""The mean loss over random views of an example is one unit of privacy, and fast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mirrordp
from mirrordp.privacy import clipping, ghost
from tests import tools
from tests.ghost.test_parity import relative_error
from tests.ghost.zoo import conv, cross_entropy, integers, normal

VIEWS, ROWS = 3, 4
KEYS = jax.random.split(jax.random.key(7), ROWS)
IMAGES = jnp.asarray(normal(0, ROWS, 6, 6, 2), jnp.float32)
LABELS = jnp.asarray(integers(1, 3, ROWS))
PARAMS = {
    "kernel": jnp.asarray(normal(2, 3, 3, 2, 4, scale=0.3), jnp.float32),
    "dense": jnp.asarray(normal(3, 36, 30, scale=0.3), jnp.float32),
    "bias": jnp.zeros(30),
    "out": jnp.asarray(normal(4, 30, 3, scale=0.3), jnp.float32),
}


def shifted(key, example):
    image, label = example
    padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
    row, column = jax.random.randint(key, (2,), 0, 3)
    return lax.dynamic_slice(padded, (row, column, 0), image.shape), label


def network_loss(params, example):
    image, label = example
    x = jnp.tanh(conv(image, params["kernel"], stride=2)).reshape(-1)
    return cross_entropy(jnp.tanh(x @ params["dense"] + params["bias"]) @ params["out"], label)


def loss_with_dropout(params, example, key):
    image, label = example
    kept = jax.random.bernoulli(key, 0.8, image.shape)
    return network_loss(params, (kept * image, label))


def one_by_one(params, example, key, *, kind):
    """The same mean in a plain loop, written without the library."""
    total = 0.0
    for own in jax.random.split(key, VIEWS):
        if kind == "key":
            total += loss_with_dropout(params, example, own)
        elif kind == "augment":
            total += network_loss(params, shifted(own, example))
        else:
            first, second = jax.random.split(own)
            total += loss_with_dropout(params, shifted(first, example), second)
    return total / VIEWS


KINDS = {
    "key": mirrordp.averaged_over_views(loss_with_dropout, VIEWS),
    "augment": mirrordp.averaged_over_views(network_loss, VIEWS, augment=shifted),
    "both": mirrordp.averaged_over_views(loss_with_dropout, VIEWS, augment=shifted),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_plain_loop(kind):
    arguments = PARAMS, (IMAGES[0], LABELS[0]), KEYS[0]
    found, gradient = jax.jit(jax.value_and_grad(KINDS[kind]))(*arguments)
    wanted, wanted_gradient = jax.jit(
        jax.value_and_grad(lambda *given: one_by_one(*given, kind=kind))
    )(*arguments)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert relative_error(gradient, wanted_gradient) < 1e-6


def test_every_view_of_every_example_has_randomness_of_its_own():
    """With ⟨θ, u⟩ for random u, the gradient is the mean of what the views drew."""
    drawn = mirrordp.averaged_over_views(
        lambda theta, x, key: jnp.dot(theta, x + jax.random.normal(key, theta.shape)), 1_000
    )
    gradients = jax.jit(jax.vmap(jax.grad(drawn), (None, 0, 0)))(
        jnp.zeros(3), jnp.zeros((ROWS, 3)), KEYS
    )
    # Views that shared a key would leave numbers of size 1, and examples that did equal rows.
    assert np.all(np.abs(gradients) < 0.15)
    assert len(np.unique(gradients)) == gradients.size


def test_the_two_halves_of_a_key_are_independent():
    drawn = mirrordp.averaged_over_views(
        lambda theta, x, key: theta * (x - jax.random.normal(key)),
        1,
        augment=lambda key, x: jax.random.normal(key),
    )
    assert float(jax.grad(drawn)(1.0, 0.0, KEYS[0])) != 0


@pytest.mark.parametrize("module", [clipping, ghost], ids=["plain", "ghost"])
def test_an_example_is_clipped_once(module):
    """Not view by view: opposite views cancel before the clip, and C bounds all of them."""
    signs = lambda key, x: jnp.where(jax.random.bernoulli(key), 1.0, -1.0) * x  # noqa: E731
    loss = mirrordp.averaged_over_views(lambda w, x: jnp.sum(x @ w), 9, augment=signs)
    clipped = jax.jit(module.clipped_grad(loss, l2_clip_norm=1.0).__call__)
    only_first = np.array([False, True, True])
    for key in jax.random.split(jax.random.key(0), 5):
        keys = jax.random.split(key, 3)
        # Each view has a gradient of norm 200 and would be clipped; so is their mean, to C.
        large = clipped(jnp.zeros((2, 2)), jnp.full((3, 2), 100.0), only_first, keys=keys)
        assert 0.98 < np.linalg.norm(large) <= 1.0
        # Of norm 2, each view would be clipped, but their mean need not be: nine signs cancel.
        mean = np.mean([signs(own, 1.0) for own in jax.random.split(keys[0], 9)])
        norm = min(1.0, 2 * abs(mean))
        small = clipped(jnp.zeros((2, 2)), jnp.ones((3, 2)), only_first, keys=keys)
        np.testing.assert_allclose(small, np.full((2, 2), np.sign(mean) * norm / 2), rtol=0.01)


@pytest.mark.usefixtures("nothing_reserved")
@pytest.mark.parametrize("kind", KINDS)
def test_ghost_clipping_agrees(kind):
    loss = KINDS[kind]
    batch, is_padding = (IMAGES, LABELS), jnp.zeros(ROWS, bool)
    plain = jax.jit(mirrordp.clipped_grad(loss, l2_clip_norm=1e6).with_stats)
    _, stats = plain(PARAMS, batch, is_padding, keys=KEYS)
    clip = float(np.median(stats.unprivatized_norms))
    found, wanted = (
        jax.jit(module.clipped_grad(loss, l2_clip_norm=clip).with_stats)(
            PARAMS, batch, is_padding, keys=KEYS
        )
        for module in (ghost, mirrordp)
    )
    is_clipped = wanted[1].unprivatized_norms > clip
    assert is_clipped.any()
    assert not is_clipped.all()
    assert relative_error(found[0], wanted[0]) < 1e-5


def test_no_layer_is_slow(capsys):
    paths = ghost.explain(KINDS["augment"], PARAMS, (IMAGES, LABELS))
    found = {path.name: path.path for path in paths}
    # The gradient of a bias has as few numbers as its cotangent.
    assert found.pop("['bias']") == "explicit"
    assert set(found) == {"['kernel']", "['dense']", "['out']"}
    assert "explicit" not in found.values()
    assert "dense" in capsys.readouterr().out


def test_private_and_public_losses_of_a_run():
    """A run's own keys reach the views; the public loss may have another number of them."""
    noisy = lambda key, x: x + jax.random.normal(key, x.shape)  # noqa: E731
    private, public = tools.features(), tools.features(8, seed=1)

    def run(views):
        return tools.last(
            tools.train(
                mirrordp.averaged_over_views(tools.squared_distance, views, augment=noisy),
                jnp.zeros(3),
                mirrordp.PrivateData(private),
                mirrordp.PublicData(public),
                public_loss_fn=mirrordp.averaged_over_views(
                    tools.squared_distance, 2, augment=noisy
                ),
                mechanism=tools.mechanism(num_steps=4, noise_multiplier=1e-3),
                optimizer=optax.sgd(0.1),
                alpha=0.5,
                seed=0,
                show_unprivatized=True,
            )
        )

    (_, one), (_, many) = run(1), run(400)
    # E ½‖θ − x − u‖² is 3/2 more than ½‖θ − x‖², and with many views close to it in every batch.
    assert np.all(np.isfinite(one.public_loss))
    assert np.ptp(many.unprivatized.loss) < np.ptp(one.unprivatized.loss)
    assert one.charged_steps == many.charged_steps == 4


@pytest.mark.parametrize("views", [0, -2])
def test_a_number_of_views_below_one_is_refused(views):
    with pytest.raises(ValueError, match="views must be a positive integer, got"):
        mirrordp.averaged_over_views(loss_with_dropout, views)


@pytest.mark.parametrize("views", [2.0, "4", True, None])
def test_a_number_of_views_that_is_no_integer_is_refused(views):
    with pytest.raises(TypeError, match="views must be a positive integer, got"):
        mirrordp.averaged_over_views(loss_with_dropout, views)


def test_views_that_cannot_differ_are_refused():
    with pytest.raises(ValueError, match=r"takes no random key .* pass augment="):
        mirrordp.averaged_over_views(network_loss, 4)


@pytest.mark.parametrize(
    ("loss", "augment", "name"), [(3.0, shifted, "loss_fn"), (network_loss, "shift", "augment")]
)
def test_what_is_no_function_is_refused(loss, augment, name):
    with pytest.raises(TypeError, match=f"{name} must be a function"):
        mirrordp.averaged_over_views(loss, 4, augment=augment)


def test_a_loss_that_is_no_scalar_is_still_refused():
    """The mean over views must not hide that a loss was written for a batch."""
    loss = mirrordp.averaged_over_views(
        lambda theta, x, key: theta * x + jax.random.normal(key), VIEWS
    )
    step = mirrordp.TrainStep(loss, tools.mechanism(), optax.sgd(0.1))
    with pytest.raises(ValueError, match="must return one scalar"):
        mirrordp.train(step, jnp.zeros(3), mirrordp.PrivateData(tools.features()))
