"""Algorithm 1 of the paper in one call: exact mirror descent on noisy clipped gradients.

In: a private loss and rows, a mirror map made from public data, a mechanism. Out: the averaged
iterate, and what is needed to report it.

    θ_0 = argmin_{θ ∈ C} Ψ(θ)
    g_t = (Σ_{i ∈ batch} clip(∇ℓ_priv(θ_t; d_i), L) + noise) / B
    θ_{t+1} = argmin_{θ ∈ C} η_t ⟨g_t, θ⟩ + B_Ψ(θ, θ_t),            t = 0, ..., T − 1
    return (θ_1 + ... + θ_T) / T

The mechanism decides batches, L, T and the noise. `Mechanism.calibrate` with `FullBatch` is the
exact composition, one Gaussian; `paper_mechanism` has the noise of the paper's formula, which is
looser. `theory.theorem_schedule` gives the theorem's T and η_t. ℓ_pub, inside Ψ, may differ from
ℓ_priv.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.data import PrivateData, PublicData
from mirrordp.mirror import Constraint, MirrorMap, WholeSpace, theory
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import FullBatch
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.training.central import TrainStep
from mirrordp.training.engine import train
from mirrordp.types import LossFn, Params
from mirrordp.updates import (
    LearningRate,
    accelerated_mirror_descent,
    accelerated_result,
    mirror_descent,
)
from mirrordp.updates.averages import UniformAverage


class ExactResult(NamedTuple):
    """What Algorithm 1 returns, and what a report needs.

    `RunReport.of(result.mechanism, delta, info=result, charged_steps=result.charged_steps)` is the
    statement of what was promised.

    Attributes:
        params: the averaged iterate; y_T of the accelerated variant.
        last_params: θ_T.
        start: θ_0, the public optimum over C.
        converged: whether every solver converged. If not, the steps were inexact; the guarantee
            does not depend on it.
        charged_steps: steps that read private rows.
        mechanism: what ran.
        seeded: whether it was given a seed, and is therefore not for release.
    """

    params: Params
    last_params: Params
    start: Params
    converged: bool
    charged_steps: int
    mechanism: Mechanism
    seeded: bool


def exact_mirror_descent(
    loss_fn: LossFn,
    private: PrivateData,
    mirror_map: MirrorMap,
    *,
    mechanism: Mechanism,
    learning_rate: LearningRate,
    constraint: Constraint | None = None,
    accelerated: bool = False,
    like: Params | None = None,
    public: PublicData | None = None,
    seed: int | None = None,
    spend: Ledger | Budget | None = None,
) -> ExactResult:
    """Runs Algorithm 1 for all the steps that the mechanism was made for.

    Args:
        loss_fn: ℓ_priv(params, example), a function of one example.
        private: the sensitive rows.
        mirror_map: Ψ, on the raveled parameters; made from public data.
        mechanism: sampling, clip norm L, T and noise.
        learning_rate: η_t, a number or a function of t = 0, 1, ..., such as
            `theory.theorem_schedule(...).learning_rate`.
        constraint: C; the whole space by default.
        accelerated: two sequences instead of one, see `accelerated_mirror_descent`.
        like: any tree with the structure and shapes of the parameters that `loss_fn` takes; by
            default they are one vector.
        public: if given, private rows that equal one of these rows contribute nothing.
        seed: makes the run reproducible and therefore not for release.
        spend: the ledger or budget to charge, as in `mirrordp.train`.

    Raises:
        ValueError: if θ_0 cannot be found; nothing is spent then.

    Warns:
        RuntimeWarning: if a mirror step did not converge.
    """
    _validate.instance_of(MirrorMap, "Use QuadraticMap.from_data(...).", mirror_map=mirror_map)
    template = jnp.zeros(mirror_map.num_params) if like is None else like
    flat, unravel = ravel_pytree(template)
    if len(flat) != mirror_map.num_params:
        raise ValueError(
            f"like must have as many numbers as the mirror map, {mirror_map.num_params}, got "
            f"{len(flat)}. Make the map on the raveled parameters."
        )
    constraint = WholeSpace() if constraint is None else constraint
    minimum = mirror_map.minimizer(constraint)
    if not bool(minimum.converged):
        raise ValueError(
            f"the minimiser of the public loss was not found: residual {float(minimum.residual):g} "
            f"after {int(minimum.num_iterations)} iterations. Add a ridge, or raise "
            "max_iterations; nothing was spent."
        )
    start = unravel(minimum.params.astype(flat.dtype))
    make = accelerated_mirror_descent if accelerated else mirror_descent
    optimizer = make(mirror_map, learning_rate, constraint=constraint)
    step = TrainStep(loss_fn, mechanism, optimizer, average=UniformAverage())
    *_, (state, info) = train(step, start, private, public, seed=seed, spend=spend)
    converged = bool(state.opt_state.converged)
    if not converged:
        warn(
            "a mirror step did not converge: the iterates are not exactly those of Algorithm 1. "
            "Raise max_iterations or the ridge of the map, or lower the learning rate.",
            RuntimeWarning,
        )
    result = accelerated_result(state.opt_state, start) if accelerated else state.average
    return ExactResult(
        params=jax.tree.map(jnp.asarray, result),
        last_params=state.params,
        start=start,
        converged=converged,
        charged_steps=info.charged_steps,
        mechanism=mechanism,
        seeded=info.seeded,
    )


def paper_mechanism(
    *,
    epsilon: float,
    delta: float,
    num_private: int,
    num_steps: int,
    l2_clip_norm: float,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> Mechanism:
    """Full batches with the noise of Algorithm 1, σ² = 8 L² T log(1/δ) / (ε n)² on the mean.

    For comparison with the paper: the ε that `mechanism.epsilon(delta)` finds is well below the
    one asked for. `Mechanism.calibrate` adds only as much noise as needed.

    Args:
        epsilon: ε, at most 8 log(1/δ).
        delta: δ.
        num_private: n, which counts as public.
        num_steps: T.
        l2_clip_norm: L.
        adjacency: zero-out; where the formula does not hold it is refused.

    Raises:
        UnsupportedError: where the formula does not give (ε, δ).
    """
    stddev = theory.paper_noise_stddev(
        l2_clip_norm=l2_clip_norm,
        num_steps=num_steps,
        num_private=num_private,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
    )
    mechanism = Mechanism(
        sampling=FullBatch.of(num_private),
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=stddev * num_private / l2_clip_norm,
        num_steps=num_steps,
        adjacency=adjacency,
    )
    reached = mechanism.epsilon(delta)
    if reached > epsilon:
        raise AssertionError(f"the paper's noise gives {reached} > {epsilon}; please report.")
    return mechanism
