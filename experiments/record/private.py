"""Learning from private images: DP-SGD or PDA-DPMD by `mirrordp.train`, many views per example."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.record import augmentation, pretraining
from experiments.record.data import Examples
from experiments.record.network import WideResNet
from experiments.record.settings import PrivateSettings, PublicSettings
from mirrordp import (
    ExponentialAverage,
    Mechanism,
    PoissonSampling,
    PrivateData,
    PublicData,
    TrainOptions,
    TrainStep,
    train,
    updates,
)
from mirrordp.mirror import KroneckerMap
from mirrordp.privacy import Accountant, BandedNoise, CyclicPoissonSampling, GaussianNoise
from mirrordp.types import LossFn, Params


def mechanism(settings: PrivateSettings, num_private: int) -> Mechanism:
    """Makes Poisson-sampled Gaussian sums with the noise that the target ε needs.

    With several bands, the noise of a step takes back part of the noise of the steps before.
    """
    bands, size = settings.bands, settings.batch_size
    if bands == 1:
        noise = GaussianNoise()
        sampling = PoissonSampling.for_batch_size(size, num_examples=num_private)
    else:
        noise = BandedNoise.optimal(settings.steps, bands)
        sampling = CyclicPoissonSampling.for_batch_size(
            size, num_examples=num_private, num_groups=bands
        )
    return Mechanism.calibrate(
        epsilon=settings.target_epsilon,
        delta=settings.delta,
        sampling=sampling,
        num_steps=settings.steps,
        l2_clip_norm=settings.l2_clip_norm,
        noise=noise,
        accountant=Accountant.PLD,
    )


@functools.cache
def loss_of_views(network: WideResNet, views: int, cutout: int) -> LossFn:
    """Makes the mean loss over random views of *one* example, the unit that is clipped.

    An example is an image, its label and, where public networks predict too, what they add to the
    logits: a function of this image alone.
    """

    def view(key: jax.Array, image: jax.Array) -> jax.Array:
        shift_key, cut_key = jax.random.split(key)
        image = augmentation.shift_and_mirror(shift_key, image)
        return augmentation.cut_out(cut_key, image, size=cutout) if cutout else image

    def loss(params: Params, example: tuple[jax.Array, ...], key: jax.Array) -> jax.Array:
        image, label, *added = example
        images = jax.vmap(view, in_axes=(0, None))(jax.random.split(key, views), image)
        logits = sum(added, start=network.predict(params, images))
        return (jax.nn.logsumexp(logits, axis=1) - logits[:, label]).mean()

    return loss


def loss_of_mixed(network: WideResNet, settings: PublicSettings, public: Examples) -> LossFn:
    """Makes the loss that a public start minimises: of a public image mixed with a random other."""
    images, labels = jnp.asarray(public[0]), jnp.asarray(public[1])

    def loss(params: Params, example: tuple[jax.Array, ...], key: jax.Array) -> jax.Array:
        other_key, change_key = jax.random.split(key)
        other = jax.random.randint(other_key, (), 0, len(labels))
        pair = jnp.stack([example[0], images[other]])
        targets = jax.nn.one_hot(jnp.stack([example[1], labels[other]]), network.num_classes)
        pair, targets = pretraining.changed(settings, change_key, pair, targets)
        return optax.softmax_cross_entropy(network.predict(params, pair[:1]), targets[:1])[0]

    return loss


def learning_rates(settings: PrivateSettings) -> optax.Schedule | float:
    """Returns a schedule that rises from zero in `warm_up` steps and then follows `rate`.

    A rate that stays the same is a number: as a part of the state, it needs no program of its own.
    """
    peak, rest = settings.learning_rate, max(1, settings.steps - settings.warm_up)
    if settings.rate == "constant" and not settings.warm_up:
        return peak
    match settings.rate:
        case "constant":
            after = optax.constant_schedule(peak)
        case "linear":
            after = optax.linear_schedule(peak, settings.last_rate * peak, rest)
        case _:
            after = optax.cosine_decay_schedule(peak, rest, settings.last_rate)
    if not settings.warm_up:
        return after
    # The first step has a rate above zero: it costs as much privacy as the others.
    rise = optax.linear_schedule(peak / settings.warm_up, peak, settings.warm_up - 1)
    return optax.join_schedules([rise, after], [settings.warm_up])


Seen = Callable[[int, dict[str, Params]], None]


def train_privately(
    network: WideResNet,
    settings: PrivateSettings,
    public_settings: PublicSettings,
    found: Mechanism,
    start: Params,
    private: Examples,
    public: Examples,
    *,
    seed: int,
    on_progress: Seen = lambda step, iterates: None,
    every: int = 50,
    deadline: float | None = None,
) -> tuple[dict[str, Params], dict[str, Any]]:
    """Trains; returns the last iterate and averages by name, and what was seen on the way.

    Args:
        network: to train.
        settings: how.
        public_settings: how the public start was made, for `public_mix`.
        found: the mechanism.
        start: where to begin; from public images alone.
        private: scaled images, labels and, if public networks are a part of the loss, what they
            add to the logits.
        public: likewise; used where alpha is below 1, and for a geometry.
        seed: makes the run reproducible.
        on_progress: called with the step and all iterates every `every` steps.
        every: the number of steps between two such calls.
        deadline: when to give up, by `time.monotonic`.

    Raises:
        TimeoutError: the deadline has passed.
    """
    mixes = settings.alpha < 1
    decays = (settings.average_decay, *settings.other_decays)
    averages = {f"average {decay:g}": ExponentialAverage(decay) for decay in decays}
    kept = {name: start for name in averages}
    if settings.public_mix:
        public_loss = loss_of_mixed(network, public_settings, public)
    else:
        public_loss = loss_of_views(network, 1, settings.cutout)
    optimizer = optax.inject_hyperparams(optax.sgd)(
        learning_rate=learning_rates(settings), momentum=settings.momentum or None
    )
    chart = None
    if settings.geometry != "none":
        curvature = KroneckerMap.from_public(
            public_loss,
            start,
            PublicData(public),
            damping=settings.damping,
            largest_side=settings.largest_side,
        )
        if settings.geometry == "chart":
            chart = updates.kronecker(curvature)
        else:
            # Steps of a quadratic map are proportional to the rate, which SGD multiplies by.
            shaped = optax.chain(updates.mirror_descent(curvature, 1.0), optax.scale(-1))
            optimizer = optax.chain(shaped, optimizer)
    step = TrainStep(
        loss_of_views(network, settings.views, settings.cutout),
        found,
        optimizer,
        public_loss_fn=public_loss if mixes else None,
        chart=chart,
        public_batch_size=settings.public_batch_size if mixes else None,
        microbatch_size=settings.microbatch_size,
        show_unprivatized=True,
    )
    states = train(
        step,
        start,
        PrivateData(private),
        PublicData(public) if mixes else None,
        alpha=settings.alpha,
        seed=seed,
        options=TrainOptions(steps_per_call=1),
    )
    norms, unprivatized, iterates, begun = [], [], {"last": start}, time.monotonic()
    for state, info in states:
        kept = {
            name: _moved(average, kept[name], state.params, info.step)
            for name, average in averages.items()
        }
        iterates = {"last": state.params, **kept}
        norms.append(float(info.noisy_grad_norm[-1]))
        assert info.unprivatized is not None
        unprivatized.append([float(np.asarray(v)[-1]) for v in info.unprivatized[:2]])
        if info.step == 2:
            begun = time.monotonic()  # the steps before were mostly compilation
        if info.step % every == 0 or info.step == settings.steps:
            on_progress(info.step, iterates)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
    seconds = (time.monotonic() - begun) / max(1, settings.steps - 2)
    losses, clipped = np.mean(unprivatized, axis=0)
    seen = {
        "seconds_per_step": round(seconds, 4),
        "noisy_grad_norm": round(float(np.mean(norms)), 4),
        # Means over all steps, without noise: for the operator's eyes, not for release.
        "unprivatized_loss": round(float(losses), 4),
        "unprivatized_clip_fraction": round(float(clipped), 4),
    }
    return iterates, seen


@functools.partial(jax.jit, static_argnames="average")
def _moved(average: ExponentialAverage, kept: Params, params: Params, step: int) -> Params:
    return average.update(kept, params, jnp.asarray(step))
