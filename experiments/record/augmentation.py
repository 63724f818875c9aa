"""Random changes of images, each with a key of its own.

Functions of one image [32, 32, 3] can be part of the loss of one private example. Functions of a
batch mix images and are for public ones alone.
"""

import jax
import jax.numpy as jnp
from jax import lax


def shift_and_mirror(key: jax.Array, image: jax.Array, *, margin: int = 4) -> jax.Array:
    """Shifts an image by up to `margin` pixels, reflected at its edges; mirrors half of them."""
    shift_key, mirror_key = jax.random.split(key)
    padded = jnp.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="reflect")
    row, column = jax.random.randint(shift_key, (2,), 0, 2 * margin + 1)
    image = lax.dynamic_slice(padded, (row, column, 0), image.shape)
    return jnp.where(jax.random.bernoulli(mirror_key), image[:, ::-1], image)


def cut_out(key: jax.Array, image: jax.Array, *, size: int) -> jax.Array:
    """Sets a square to zero, the public mean; its centre is anywhere in the image."""
    height, width, _ = image.shape
    return jnp.where(_square(key, height, width, size)[..., None], 0.0, image)


def change_colours(key: jax.Array, image: jax.Array, *, strength: float) -> jax.Array:
    """Changes brightness, contrast and saturation by factors and shifts of up to `strength`."""
    shift, contrast, saturation = jax.random.uniform(key, (3,), minval=-strength, maxval=strength)
    grey = image.mean(-1, keepdims=True)
    image = grey + (1 + saturation) * (image - grey)
    mean = image.mean()
    return mean + (1 + contrast) * (image - mean) + shift


def warp(key: jax.Array, image: jax.Array, *, strength: float) -> jax.Array:
    """Turns, scales and shears an image; strength 1 is up to 20 degrees, 25% and 0.2."""
    keys = jax.random.split(key, 3)
    angle = strength * 0.35 * jax.random.uniform(keys[0], minval=-1, maxval=1)
    scale = jnp.exp(strength * 0.22 * jax.random.uniform(keys[1], (2,), minval=-1, maxval=1))
    shear = strength * 0.2 * jax.random.uniform(keys[2], minval=-1, maxval=1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    matrix = jnp.array([[cos, -sin], [sin, cos]]) @ jnp.array([[1.0, shear], [0.0, 1.0]])
    matrix *= scale[:, None]
    height, width, _ = image.shape
    centre = jnp.array([(height - 1) / 2, (width - 1) / 2])
    grid = jnp.stack(jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij"), -1)
    places = (grid - centre) @ matrix.T + centre
    return _read(image, jnp.clip(places, 0, jnp.array([height - 1, width - 1])))


def mix_up(
    key: jax.Array, images: jax.Array, targets: jax.Array, *, concentration: float
) -> tuple[jax.Array, jax.Array]:
    """Mixes each image, and its target, with the next one's; weights are Beta-distributed."""
    weights = jax.random.beta(key, concentration, concentration, (len(images),))
    others, other_targets = jnp.roll(images, 1, 0), jnp.roll(targets, 1, 0)
    by = weights[:, None, None, None]
    return (
        by * images + (1 - by) * others,
        weights[:, None] * targets + (1 - weights[:, None]) * other_targets,
    )


def cut_mix(
    key: jax.Array, images: jax.Array, targets: jax.Array, *, concentration: float
) -> tuple[jax.Array, jax.Array]:
    """Pastes a square of the next image into each one; targets are mixed by area."""
    weight_key, square_key = jax.random.split(key)
    count, height, width, _ = images.shape
    weights = jax.random.beta(weight_key, concentration, concentration, (count,))
    sizes = height * jnp.sqrt(1 - weights)
    keys = jax.random.split(square_key, count)
    pasted = jax.vmap(lambda k, size: _square(k, height, width, size))(keys, sizes)
    images = jnp.where(pasted[..., None], jnp.roll(images, 1, 0), images)
    share = pasted.mean((1, 2))[:, None]
    return images, (1 - share) * targets + share * jnp.roll(targets, 1, 0)


def _square(key: jax.Array, height: int, width: int, size: jax.typing.ArrayLike) -> jax.Array:
    """Returns a mask [height, width] of a square about a random pixel."""
    row, column = jax.random.uniform(key, (2,)) * jnp.array([height, width])
    rows = jnp.abs(jnp.arange(height) + 0.5 - row) <= size / 2
    columns = jnp.abs(jnp.arange(width) + 0.5 - column) <= size / 2
    return rows[:, None] & columns[None, :]


def _read(image: jax.Array, places: jax.Array) -> jax.Array:
    """Returns bilinear values at places [..., 2], which must lie inside the image."""
    low = jnp.floor(places).astype(jnp.int32)
    high = jnp.minimum(low + 1, jnp.array(image.shape[:2]) - 1)
    down, right = jnp.split(places - low, 2, axis=-1)
    top = (1 - right) * image[low[..., 0], low[..., 1]] + right * image[low[..., 0], high[..., 1]]
    bottom = (1 - right) * image[high[..., 0], low[..., 1]] + right * image[
        high[..., 0], high[..., 1]
    ]
    return (1 - down) * top + down * bottom
