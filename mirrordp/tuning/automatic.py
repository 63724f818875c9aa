"""Candidates that follow from public rows and ε alone, for a search without any given settings.

Batch size and number of steps come from `plan`, the clip norm from `public_clip_norm`, and a
first learning rate and one of two values of α from `public_learning_rate` and
`public_alpha`. No private row is read.

The rates reach further down than up. For networks, the quadratic near the start says little about
where a long run ends, and the rule's rate has been ten times too large; one that is too small costs
less than one that is too large. Where the first or the last rate is ahead in a rehearsal, the list
goes on in that direction.
"""

import dataclasses
from collections.abc import Sequence

from mirrordp.data import PublicData
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.privacy.trainable import Trainable
from mirrordp.tuning.planning import plan
from mirrordp.tuning.rules import public_alpha, public_clip_norm, public_learning_rate
from mirrordp.tuning.settings import Settings, grid
from mirrordp.types import LossFn, Params, PyTree

_AROUND = (0.03, 0.1, 0.3, 1.0, 3.0)
_BEYOND = (0.3, 0.1)


def automatic_space(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    *,
    epsilon: float,
    delta: float,
    num_examples: int,
    epochs: float = 20.0,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    trainable: PyTree | Trainable | None = None,
) -> list[Settings]:
    """Returns ten candidates: five learning rates around the rule's, with α by rule and α = 1.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`.
        params: where the private run begins.
        public: the public rows.
        epsilon: ε.
        delta: δ.
        num_examples: the number of private rows, which is public.
        epochs: compute, in passes over the private rows.
        adjacency: the neighbours.
        trainable: as in `mirrordp.clipped_grad`.
    """
    chosen = plan(
        epsilon=epsilon, delta=delta, num_examples=num_examples, epochs=epochs, adjacency=adjacency
    ).chosen
    clip_norm = public_clip_norm(loss_fn, params, public, trainable=trainable)
    mechanism = Mechanism(
        sampling=PoissonSampling.for_batch_size(chosen.batch_size, num_examples=num_examples),
        l2_clip_norm=clip_norm,
        noise_multiplier=chosen.noise_multiplier,
        num_steps=chosen.num_steps,
        adjacency=adjacency,
    )
    rate = public_learning_rate(loss_fn, params, public, mechanism, trainable=trainable)
    alpha = public_alpha(loss_fn, params, public, mechanism, trainable=trainable)
    return grid(
        learning_rate=[factor * rate for factor in _AROUND],
        l2_clip_norm=clip_norm,
        batch_size=chosen.batch_size,
        num_steps=chosen.num_steps,
        alpha=sorted({1.0, round(alpha, 3)} - {0.0}),
    )


def further_rates(candidates: Sequence[Settings], best: Settings) -> list[Settings]:
    """Returns the best candidate with rates beyond the list's, if its own ends the list.

    Args:
        candidates: all candidates so far.
        best: the one that is ahead.
    """
    rates = [
        each.learning_rate
        for each in candidates
        if dataclasses.replace(each, learning_rate=best.learning_rate) == best
    ]
    if best.learning_rate not in (min(rates), max(rates)):
        return []
    factors = _BEYOND if best.learning_rate == min(rates) else [1 / each for each in _BEYOND]
    return [
        dataclasses.replace(best, learning_rate=factor * best.learning_rate) for factor in factors
    ]
