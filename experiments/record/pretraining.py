"""Learning from public images alone: nothing here costs privacy."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.record import augmentation
from experiments.record.network import WideResNet
from experiments.record.settings import PublicSettings
from mirrordp.types import Params

STEPS_PER_CALL = 250
Seen = Callable[[int, Params, Params], None]


def pretrain(
    network: WideResNet,
    settings: PublicSettings,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    seed: int,
    start: Params | None = None,
    teachers: Sequence[tuple[WideResNet, Params]] = (),
    on_progress: Seen = lambda step, last, average: None,
    deadline: float | None = None,
) -> Params:
    """Returns the average of the iterates of SGD on changed and mixed images.

    Args:
        network: to train.
        settings: how.
        images: scaled public images.
        labels: theirs.
        seed: decides initialisation, order and changes.
        start: where to begin, instead of random parameters.
        teachers: networks whose mean prediction for a changed image is a part of its target.
        on_progress: is told the step, the last iterate and the average every few hundred steps.
        deadline: when to give up, by `time.monotonic`.

    Raises:
        TimeoutError: the deadline has passed.
    """
    begin_key, key = jax.random.split(jax.random.key(seed))
    params = network.init(begin_key) if start is None else start
    if settings.steps == 0:
        return params
    optimizer = _optimizer(settings)
    state = (params, params, optimizer.init(params), jnp.zeros([], jnp.int32))
    networks, weights = tuple(net for net, _ in teachers), [params for _, params in teachers]
    arrays = jnp.asarray(images), jax.nn.one_hot(labels, network.num_classes)
    rows = _rows(len(images), settings, np.random.default_rng(seed))
    for first in range(0, len(rows), STEPS_PER_CALL):
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        some = rows[first : first + STEPS_PER_CALL]
        state = _steps(network, settings, networks, state, some, arrays, weights, key)
        on_progress(first + len(some), state[0], state[1])
    return state[1]


def _rows(count: int, settings: PublicSettings, rng: np.random.Generator) -> np.ndarray:
    """Returns which images each step sees, [steps, batch_size]: successive permutations."""
    steps = min(settings.stop or settings.steps, settings.steps)
    wanted = steps * settings.batch_size
    order = np.concatenate([rng.permutation(count) for _ in range(-(-wanted // count))])
    return order[:wanted].reshape(steps, settings.batch_size).astype(np.int32)


@functools.cache
def _optimizer(settings: PublicSettings) -> optax.GradientTransformation:
    def kernels(params: Params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)

    rate = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    return optax.chain(
        optax.add_decayed_weights(settings.weight_decay, mask=kernels),
        optax.sgd(rate, momentum=settings.momentum or None, nesterov=settings.momentum > 0),
    )


@functools.partial(jax.jit, static_argnames=("network", "settings", "networks"))
def _steps(network, settings, networks, state, rows, arrays, weights, key):
    optimizer = _optimizer(settings)

    def loss(params, images, targets):
        logits = network.predict(params, images)
        return optax.softmax_cross_entropy(logits, targets).mean()

    def step(state, rows):
        params, average, opt_state, number = state
        step_key = jax.random.fold_in(key, number)
        images, targets = jax.tree.map(lambda leaf: leaf[rows], arrays)
        images, targets = changed(settings, step_key, images, targets)
        if networks:
            taught = [
                jax.nn.softmax(net.predict(theirs, images))
                for net, theirs in zip(networks, weights, strict=True)
            ]
            share = settings.distillation
            targets = (1 - share) * targets + share * sum(taught) / len(taught)
        gradient = jax.grad(loss)(params, images, targets)
        if settings.sharpness:
            by = settings.sharpness / (optax.tree.norm(gradient) + 1e-12)
            worst = jax.tree.map(lambda p, g: p + by * g, params, gradient)
            gradient = jax.grad(loss)(worst, images, targets)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        number += 1
        decay = jnp.minimum(settings.average_decay, number / (number + 9))
        average = jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), average, params)
        return (params, average, opt_state, number), None

    return jax.lax.scan(step, state, rows)[0]


def changed(
    settings: PublicSettings, key: jax.Array, images: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a batch of public images and its targets after all random changes."""
    keys = jax.random.split(key, 6)
    each = lambda number: jax.random.split(keys[number], len(images))  # noqa: E731
    if settings.warp:
        turn = functools.partial(augmentation.warp, strength=settings.warp)
        images = jax.vmap(turn)(each(0), images)
    if settings.colours:
        paint = functools.partial(augmentation.change_colours, strength=settings.colours)
        images = jax.vmap(paint)(each(1), images)
    images = jax.vmap(augmentation.shift_and_mirror)(each(2), images)
    if settings.cutout:
        cut = functools.partial(augmentation.cut_out, size=settings.cutout)
        images = jax.vmap(cut)(each(3), images)
    targets = (1 - settings.smoothing) * targets + settings.smoothing / targets.shape[1]
    up, paste = (
        functools.partial(mix, keys[4], images, targets, concentration=settings.mix_concentration)
        for mix in (augmentation.mix_up, augmentation.cut_mix)
    )
    match settings.mix:
        case "mixup":
            return up()
        case "cutmix":
            return paste()
        case "both":
            return jax.lax.cond(jax.random.bernoulli(keys[5]), up, paste)
    return images, targets
