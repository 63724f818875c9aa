"""How a trained model is judged: on public rows, at no cost, or on private rows through noise.

A score is a mean over rows, and larger is better. What a private score releases is

    (1/n) [Σ_i clip(s(θ; d_i) − m) + N(0, σ²h²)] + m,

where m is the middle of the interval in which the scores lie and h is half its length, so that a
row contributes at most h. It is a mechanism of its own, and its cost is part of the cost of a run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _validate
from mirrordp.data import PrivateData, PublicData, require_public
from mirrordp.data.sources import read_rows
from mirrordp.privacy import _isolation
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.clipping import (
    clipped_grad,
    example_key,
    example_of,
    value_and_grad_program,
    with_key,
)
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import FullBatch
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.step import check_loss
from mirrordp.types import Batch, LossFn, Params

ScoreFn = Callable[[Params, Any], Any]

_ROWS_AT_A_TIME = 512


@dataclasses.dataclass(frozen=True)
class PublicScore:
    """A score on public rows, which costs nothing.

    Args:
        score_fn: `score_fn(params, example) -> number`, larger is better; by default minus the
            loss.
        rows: public rows that judge and are used for nothing else; by default a part of the public
            rows is set aside.
        fraction: the share of the public rows that is set aside.
    """

    score_fn: ScoreFn | None = None
    rows: PublicData | None = None
    fraction: float = 0.25

    def __post_init__(self):
        _validate.open_unit_interval(fraction=self.fraction)
        if self.rows is not None:
            require_public(self.rows, "rows")


@dataclasses.dataclass(frozen=True)
class PrivateScore:
    """A score on all private rows, released with noise of its own, which is charged.

    The standard deviation of the released mean is noise_multiplier · (high − low) / (2n); with
    10,000 rows, an accuracy and the default noise it is 0.05 percentage points.

    Args:
        score_fn: `score_fn(params, example) -> number`, larger is better, such as 1.0 where the
            prediction is right.
        low: the smallest score that counts; smaller ones, and NaN, are raised to it.
        high: the largest score that counts.
        noise_multiplier: σ, relative to (high − low)/2, the most that a row contributes.
    """

    score_fn: ScoreFn
    low: float = 0.0
    high: float = 1.0
    noise_multiplier: float = 10.0

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.positive(
            "Give the interval in which scores lie.", high_minus_low=self.high - self.low
        )
        _validate.positive(noise_multiplier=self.noise_multiplier)

    @property
    def half_width(self) -> float:
        """h: the most that a row contributes."""
        return (self.high - self.low) / 2

    @property
    def middle(self) -> float:
        """m: what a blank row counts as."""
        return (self.high + self.low) / 2

    def mechanism(self, num_examples: int, adjacency: Adjacency) -> Mechanism:
        """Returns the mechanism that releases one score."""
        return Mechanism(
            sampling=FullBatch.of(num_examples),
            l2_clip_norm=self.half_width,
            noise_multiplier=self.noise_multiplier,
            num_steps=1,
            adjacency=adjacency,
        )

    def release(self, params: Params, private: PrivateData, key: jax.Array) -> float:
        """Returns the noisy mean score. The caller has charged for it.

        Args:
            params: the model.
            private: the rows.
            key: seeds the noise; secret, and used for nothing else.
        """
        # The adjacency decides what a score costs, and not what is computed.
        mechanism = self.mechanism(len(private), Adjacency.ZERO_OUT)
        add = _score_sums(self.score_fn, self.middle, self.half_width)
        model = {"score": jnp.zeros([]), "model": params}
        total, size = None, min(_ROWS_AT_A_TIME, len(private))
        for first in range(0, len(private), size):
            numbers = np.arange(first, first + size)
            rows = read_rows(private.arrays, numbers.clip(0, len(private) - 1))
            part = add(model, rows, jnp.asarray(numbers >= len(private)))
            total = part if total is None else total + part
        return float(_noisy_mean(mechanism, total, key)["score"]) + self.middle


@functools.partial(jax.jit, static_argnames="mechanism")
def _noisy_mean(mechanism: Mechanism, total: Any, key: jax.Array) -> Any:
    noisy, _ = mechanism.add_noise(total, mechanism.init_noise(key, total.zeros()))
    return mechanism.mean(noisy)


_ONLY_SCORE = {"score": True, "model": False}


def _times_score(score_fn: ScoreFn, middle: float, half_width: float) -> LossFn:
    def times_score(params: Params, example: Any) -> jax.Array:
        score = jnp.asarray(score_fn(params["model"], example), jnp.float32)
        # The clip bounds the length of what follows anyway, but it counts NaN and infinity as
        # nothing, which is the middle: a model that diverged would be neither good nor bad.
        score = jnp.where(jnp.isnan(score), -jnp.inf, score)
        return params["score"] * jnp.clip(score - middle, -half_width, half_width)

    return times_score


@functools.lru_cache(maxsize=16)
def _score_sums(score_fn: ScoreFn, middle: float, half_width: float):
    """Returns a compiled function that sums the clipped scores of a part of the rows.

    A score is the gradient of score · t in t, so that clipping, exact sums and the check that a row
    sees no other row are those of gradients.
    """

    clipped = clipped_grad(
        _times_score(score_fn, middle, half_width),
        l2_clip_norm=half_width,
        trainable=_ONLY_SCORE,
    )
    return jax.jit(lambda *args: clipped.exact_sum(*args).total)


@functools.partial(jax.jit, static_argnames="score_fn")
def example_scores(score_fn: ScoreFn, params: Params, arrays: Batch) -> jax.Array:
    """Returns the score of each public row."""
    return jax.lax.map(
        lambda example: jnp.asarray(score_fn(params, example), jnp.float32),
        arrays,
        batch_size=_ROWS_AT_A_TIME,
    )


@functools.lru_cache(maxsize=16)
def minus_loss(loss_fn: LossFn) -> ScoreFn:
    """Returns minus the loss as a score; a loss with dropout is given one fixed key."""
    keyed = with_key(loss_fn)
    return lambda params, example: -keyed(params, example, jax.random.key(0))


def check_score(score_fn: ScoreFn, params: Params, rows: PrivateData | PublicData) -> None:
    """Raises for a score that does not fit, by its program for one row; it reads no row.

    Of private rows, a score must not see more than one at a time either.
    """
    number = lambda params, example: jnp.asarray(score_fn(params, example), jnp.float32)  # noqa: E731
    check_loss("score_fn", number, params, rows.arrays)
    if isinstance(rows, PrivateData):
        model = {"score": jnp.zeros([]), "model": params}
        times_score, row = _times_score(score_fn, 0.0, 1.0), example_of(rows.arrays)
        traced = value_and_grad_program(times_score, model, _ONLY_SCORE, row, example_key())
        _isolation.check("the score function", traced)


def described_score(score_fn: ScoreFn, params: Params, rows: PrivateData | PublicData) -> str:
    """Returns the program of a score, mapped over rows, as a hash; it reads no row."""
    batch = jax.tree.map(
        # More than one, so that a batching rule shows.
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype),
        example_of(rows.arrays),
    )
    return checkpoints.program("score_fn", jax.vmap(score_fn, (None, 0)), params, batch)
