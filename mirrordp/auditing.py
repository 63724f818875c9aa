"""Attacks that try to prove a stated ε wrong, and a replay that measures sensitivity.

An audit inserts *canaries*, records made to be noticed, trains, and guesses from the result which
of them took part. Whoever guesses too well for an (ε, δ)-private mechanism has refuted the claim,
at a stated confidence: the audit is a lower bound on ε. A bound below the reported ε proves
nothing; one above it proves a mistake. The statistics are those of `jax_privacy.auditing`:

- `one_run_epsilon`: many canaries in one run (Steinke, Nasr and Jagielski 2023);
- `paired_epsilon`: one canary, many runs with and without it, Clopper-Pearson bounds;
- `gaussian_mu`: the same bounds as the μ of Gaussian differential privacy, where the noise of a
  single full-batch step is seen. A tenth less noise is found here, where the others have no power.

Two checks look at the parts instead of the whole, and see more: `repeated_noise` compares the noise
of steps, and `not_poisson` the batches that records took part in.

`audit` runs all of these on the library's own algorithms and says which deviation each of them
would have noticed. `neighbour_replay` asks another question, of any loss function: under the same
randomness, how far apart are the releases of two neighbouring data sets, at worst? What each of
them can and cannot find is in docs/auditing.md.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import auditing as statistics
from scipy import stats

from mirrordp import _validate, mirror
from mirrordp.data import PrivateClients, PrivateData, PublicData
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise
from mirrordp.privacy.sampling import FullBatch, PoissonSampling
from mirrordp.privacy.sums import ExactSum
from mirrordp.training.central import TrainStep
from mirrordp.training.engine import SweepRun, train
from mirrordp.training.federated import ClientArrays, FederatedStep, UserBatch, pad_users
from mirrordp.training.step import PublicGradient, record_keys
from mirrordp.training.sweep import train_sweep
from mirrordp.types import Batch, Params, PyTree
from mirrordp.updates import mirror_descent


def one_run_epsilon(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    delta: float,
    significance: float,
    num_guesses: int | None = None,
) -> float:
    """A lower bound on ε from one run in which each canary took part with probability one half.

    The `num_guesses` canaries of the highest score are guessed to have taken part. How many are
    guessed is fixed beforehand, so no correction for the choice of a threshold is needed.

    Args:
        scores: one per canary, a function of what the run released alone; higher means "took part".
        included: which canaries took part, drawn independently with probability one half.
        delta: δ of the claim.
        significance: the probability with which the bound may be above the true ε.
        num_guesses: by default a third of the canaries.
    """
    scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
    if scores.shape != included.shape or scores.ndim != 1:
        raise ValueError(
            f"scores and included must have one entry per canary, got shapes {scores.shape} and "
            f"{included.shape}."
        )
    guesses = len(scores) // 3 if num_guesses is None else num_guesses
    _validate.positive_integer(num_guesses=guesses)
    if included.all() or not included.any():
        return 0.0
    # Ties are broken by position, which knows nothing of who took part.
    ranked = np.empty(len(scores))
    ranked[np.argsort(scores, kind="stable")] = np.arange(len(scores))
    auditor = statistics.CanaryScoreAuditor(ranked[included], ranked[~included])
    return float(
        auditor.epsilon_one_run(
            significance,
            delta,
            threshold_strategy=statistics.Explicit(len(scores) - guesses),
        )
    )


def paired_epsilon(
    with_canary: np.ndarray,
    without: np.ndarray,
    *,
    threshold: float,
    delta: float,
    significance: float,
) -> float:
    """A lower bound on ε from scores of independent runs with and without one canary.

    Args:
        with_canary: scores of the runs in which it took part.
        without: scores of the others.
        threshold: a run scoring at least this is guessed to be one with the canary; fixed
            beforehand.
        delta: δ of the claim.
        significance: the probability with which the bound may be above the true ε.
    """
    auditor = statistics.CanaryScoreAuditor(with_canary, without)
    return float(
        auditor.epsilon_clopper_pearson(
            significance,
            delta,
            one_sided=False,
            threshold_strategy=statistics.Explicit(threshold),
        )
    )


def gaussian_mu(
    with_canary: np.ndarray, without: np.ndarray, *, threshold: float, significance: float
) -> float:
    """A lower bound on the μ of Gaussian differential privacy from independent scores.

    A μ-private mechanism allows no test whose rates of false alarms and of misses, a and b, satisfy
    Φ⁻¹(1 − a) − Φ⁻¹(b) > μ. Both rates are replaced by Clopper-Pearson upper bounds, each at half
    of `significance`. Arguments as in `paired_epsilon`.
    """
    alarms = _rate_at_most(int(np.sum(without >= threshold)), len(without), significance / 2)
    misses = _rate_at_most(int(np.sum(with_canary < threshold)), len(with_canary), significance / 2)
    return max(0.0, float(stats.norm.isf(alarms) - stats.norm.ppf(misses)))


def _rate_at_most(count: int, trials: int, significance: float) -> float:
    if count == trials:
        return 1.0
    return float(stats.beta.ppf(1 - significance, count + 1, trials - count))


class Algorithm(enum.Enum):
    """What can be audited."""

    DP_SGD = "dp-sgd"
    FIRST_ORDER = "pda-dpmd"
    EXACT = "exact-pda-dpmd"
    FEDERATED = "federated-pda-dpmd"


class Attack(enum.Enum):
    """How."""

    ONE_RUN = "one-run"
    PAIRED = "paired"
    GAUSSIAN = "gaussian"
    NOISE = "noise"
    SAMPLING = "sampling"


@dataclasses.dataclass(frozen=True)
class Audit:
    """What one attack on one algorithm found, and what it could have found.

    Attributes:
        algorithm: who was attacked.
        attack: how.
        measure: what is bounded: "epsilon" at `delta`, "mu" of one step, or "q", the probability
            of a record to join a step.
        reported: what is claimed.
        lower_bound: what was proved; the claim is refuted where this is larger.
        confidence: with which, after correction for the number of audits made together.
        delta: δ of the claim.
        problems: whatever else contradicts the claim, in words; it is refuted where there are any.
        notices: the power. For each kind of deviation the factor, relative to what is stated, at
            which the attack notices it with probability `POWER`: "noise" at this factor or below,
            "clip" and "q" at this factor or above; "correlation" of the noise of two steps at this
            value or above. A kind that is missing is not noticed at any size.
    """

    algorithm: Algorithm
    attack: Attack
    measure: str
    reported: float
    lower_bound: float
    confidence: float
    delta: float
    problems: tuple[str, ...] = ()
    notices: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def refuted(self) -> bool:
        """Whether the claim was proved wrong."""
        return self.lower_bound > self.reported or bool(self.problems)


# The probability with which a deviation of the stated size is noticed.
POWER = 0.95

# Where a Gaussian mechanism is attacked with a threshold halfway, the relative error of μ is least
# when each rate of errors is Φ(−1.576): a noise multiplier of 1 / (2 · 1.576).
AUDIT_NOISE = 0.32

# At this noise multiplier a release shows who took part: half a clip norm is ten deviations.
_SAMPLING_NOISE = 0.05


def audit(
    mechanism: Mechanism,
    *,
    algorithms: Sequence[Algorithm] = tuple(Algorithm),
    attacks: Sequence[Attack] = tuple(Attack),
    delta: float = 1e-5,
    confidence: float = 0.95,
    num_runs: int = 200,
    seed: int | None = None,
) -> list[Audit]:
    """Attacks the library's algorithms, run with `mechanism`; all bounds hold together.

    Canary i pulls in a direction of its own, harder than the clip norm allows, at every step that
    draws it, and the attacker sees the parameters. With probability at least `confidence` no lower
    bound is above what is true, and no problem is reported where there is none (each audit has its
    share of the error, Bonferroni).

    The Gaussian attack has little power at the noise of an ordinary mechanism, so it runs the same
    mechanism at the noise multiplier `AUDIT_NOISE`. What it finds there, an excess of sensitivity
    over noise, holds at the stated multiplier if noise is proportional to it; the noise attack
    measures the noise at both.

    Args:
        mechanism: Poisson or full-batch sampling of a public number of rows; there are as many
            canaries as rows. The Gaussian and the noise attack use it with full batches of their
            own, the sampling attack with little noise and as many steps as it needs.
        algorithms: which to attack.
        attacks: how.
        delta: δ of the claim.
        confidence: of all bounds together.
        num_runs: runs with, and as many without, the canary of the paired attack.
        seed: makes the audit repeatable.
    """
    _validate.instance_of(Mechanism, mechanism=mechanism)
    _validate.instance_of((PoissonSampling, FullBatch), sampling=mechanism.sampling)
    _validate.positive(noise_multiplier=mechanism.noise_multiplier)
    _validate.instance_of(
        GaussianNoise, "Audit it with GaussianNoise(), which has a seed.", noise=mechanism.noise
    )
    _validate.open_unit_interval(delta=delta, confidence=confidence)
    _validate.positive_integer(num_runs=num_runs)
    if mechanism.sampling.num_examples is None or mechanism.adjacency is not Adjacency.ZERO_OUT:
        raise ValueError(
            "an audit needs a public number of rows and adjacency='zero-out': canaries that take "
            "no part are rows of zeros. Use PoissonSampling.for_batch_size(...)."
        )
    made = [
        (algorithm, attack)
        for algorithm in algorithms
        for attack in attacks
        if (algorithm, attack) != (Algorithm.FEDERATED, Attack.PAIRED)
        and (attack is not Attack.SAMPLING or mechanism.sampling.sampling_prob < 1)
    ]
    if not made:
        raise ValueError(
            "expected an attack on an algorithm, got none: the federated algorithm has no paired "
            "attack (its runs are not made side by side), and nothing is drawn where every record "
            "joins every step. Use Attack.ONE_RUN, Attack.GAUSSIAN or Attack.NOISE."
        )
    # The statistics take less than one half; to err less often than is allowed is no error.
    significance = min((1 - confidence) / len(made), 0.49)
    rng = np.random.default_rng(seed)
    epsilon = None
    if any(attack in (Attack.ONE_RUN, Attack.PAIRED) for _, attack in made):
        epsilon = mechanism.epsilon(delta)
    found = []
    for algorithm in dict.fromkeys(algorithms):
        looks = functools.cache(functools.partial(_looks, mechanism, algorithm, rng))
        for attack in [attack for one, attack in made if one is algorithm]:
            if attack is Attack.GAUSSIAN:
                found_here = _gaussian(looks, significance)
            elif attack is Attack.NOISE:
                found_here = _noise(looks, mechanism.noise_multiplier, significance)
            elif attack is Attack.SAMPLING:
                found_here = _sampling(mechanism, algorithm, significance, rng)
            elif attack is Attack.ONE_RUN:
                found_here = _one_run(mechanism, algorithm, epsilon, delta, significance, rng)
            else:
                found_here = _paired(
                    mechanism, algorithm, epsilon, delta, significance, num_runs, rng
                )
            found.append(
                Audit(
                    algorithm, attack, confidence=1 - significance, delta=delta,
                    **found_here._asdict(),
                )
            )  # fmt: skip
    return found


class _Found(NamedTuple):
    """The part of an `Audit` that an attack fills in."""

    measure: str
    reported: float
    lower_bound: float
    notices: Mapping[str, float]
    problems: tuple[str, ...] = ()


def _limit(notices: Callable[[float], Any], low: float, high: float) -> float | None:
    """Where `notices`, a probability that falls from `low` to `high`, passes `POWER`; or None.

    The answer lies on the side of `low`, where the probability is large enough.
    """
    if notices(low) < POWER:
        return None
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if notices(middle) >= POWER else (low, middle)
    return low


def _powers(**limits: float | None) -> dict[str, float]:
    return {name: limit for name, limit in limits.items() if limit is not None}


# Canaries are longer than the clip norm, so that they show where clipping is left out.
_LENGTH = 100.0

# Of the runs in which each step is seen. Their full batches hold as many canaries as coordinates.
_CANARIES, _STEPS = 400, 50

_RATE = 0.1


def _start(dims: int) -> Params:
    """Two leaves: noise that misses one of them, or is the same in both, shows."""
    return {"first": jnp.zeros(dims // 2), "second": jnp.zeros(dims - dims // 2)}


def _joined(params: Params) -> Any:
    return jnp.concatenate([params["first"], params["second"]], axis=-1)


def _pull(params, example):
    """−⟨θ, x⟩: a record pulls in its own direction, wherever θ is."""
    return -jnp.dot(_joined(params), example)


def _public_pull(params, example):
    """½‖θ − z‖², for the public gradient."""
    return 0.5 * jnp.sum((_joined(params) - example) ** 2)


@functools.cache
def _setting(algorithm: Algorithm, dims: int) -> tuple[dict[str, Any], np.ndarray]:
    """Options for `train`, and the matrix that turns parameters into scores.

    Public data is known to the attacker, who subtracts its effect; it is made to have none: public
    rows come in opposite pairs, and the mirror map has its centre at the start.
    """
    rng = np.random.default_rng(1)
    if algorithm is Algorithm.EXACT:
        hessian = _directions(dims).T * np.linspace(1, 4, dims) @ _directions(dims)
        mirror_map = mirror.QuadraticMap.from_hessian(hessian, np.zeros(dims))
        return {"optimizer": mirror_descent(mirror_map, _RATE)}, hessian
    options: dict[str, Any] = {"optimizer": optax.sgd(_RATE)}
    if algorithm in (Algorithm.FIRST_ORDER, Algorithm.FEDERATED):
        half = rng.normal(size=(2, dims)).astype(np.float32)
        options |= {
            "public": PublicData(np.concatenate([half, -half])),
            "public_loss_fn": _public_pull,
            "alpha": 0.5,
        }
    return options, np.eye(dims)


@functools.lru_cache(maxsize=4)
def _directions(dims: int) -> np.ndarray:
    """Orthogonal unit vectors as rows, each with something in every coordinate."""
    return np.linalg.qr(np.random.default_rng(1).normal(size=(dims, dims)))[0]


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**62))


def _trained(
    algorithm: Algorithm, rows: np.ndarray, mechanism: Mechanism, seed: int, options: dict[str, Any]
) -> Any:
    """The last state of a run from zero in which every row is a record, or a user."""
    optimizer, public_loss_fn = options["optimizer"], options.get("public_loss_fn")
    if algorithm is Algorithm.FEDERATED:
        # A user's update after one local step at rate 1 is its row.
        private = PrivateClients.from_users(list(rows[:, None]), max_examples_per_user=1)
        step = FederatedStep(
            _pull,
            dataclasses.replace(mechanism, unit="user"),
            optimizer,
            client_learning_rate=1.0,
            client_batch_size=1,
            public_loss_fn=public_loss_fn,
        )
    else:
        private = PrivateData(rows)
        step = TrainStep(_pull, mechanism, optimizer, public_loss_fn=public_loss_fn)
    *_, (state, _) = train(
        step,
        _start(rows.shape[1]),
        private,
        options.get("public"),
        alpha=options.get("alpha", 1.0),
        seed=seed,
    )
    return state


def _noisy_sums(
    algorithm: Algorithm, rows: np.ndarray, mechanism: Mechanism, seed: int
) -> np.ndarray:
    """The noisy sum that each step of a run released, [steps, coordinates]."""
    options, _ = _setting(algorithm, rows.shape[1])
    # Where θ stands still the public gradient is zero.
    still = options["optimizer"] if algorithm is Algorithm.EXACT else _STILL
    recorded = options | {"optimizer": _recording(still, mechanism.num_steps)}
    state = _trained(algorithm, rows, mechanism, seed, recorded)
    kept = np.asarray(_joined(state.opt_state[1]), np.float64)
    return -kept * mechanism.sampling.expected_batch_size / options.get("alpha", 1.0)


_STILL = optax.sgd(0.0)


@functools.lru_cache(maxsize=8)
def _recording(
    optimizer: optax.GradientTransformation, num_steps: int
) -> optax.GradientTransformation:
    """The same optimiser, keeping the gradient of each step: state (inner, gradients, count)."""

    def init(params):
        kept = jax.tree.map(lambda leaf: jnp.zeros((num_steps, *leaf.shape), leaf.dtype), params)
        return optimizer.init(params), kept, jnp.zeros([], jnp.int32)

    def update(updates, state, params=None):
        inner, kept, count = state
        kept = jax.tree.map(lambda all_, one: all_.at[count].set(one), kept, updates)
        updates, inner = optimizer.update(updates, inner, params)
        return updates, (inner, kept, count + 1)

    return optax.GradientTransformation(init, update)


def _canaries(mechanism: Mechanism, included: np.ndarray) -> np.ndarray:
    """Canary i pulls on coordinate i, or is a row of zeros."""
    return _LENGTH * mechanism.l2_clip_norm * np.diag(included).astype(np.float32)


def _one_run(mechanism, algorithm, reported, delta, significance, rng) -> _Found:
    canaries = mechanism.sampling.num_examples
    included = rng.random(canaries) < 0.5
    rows = _canaries(mechanism, included)
    options, to_scores = _setting(algorithm, canaries)
    state = _trained(algorithm, rows, mechanism, _seed(rng), options)
    scores = to_scores @ np.asarray(_joined(state.params), np.float64)
    bound = functools.partial(one_run_epsilon, delta=delta, significance=significance)

    guesses = canaries // 3
    needed = _fewest(lambda right: bound(*_guessed(canaries, right)) > reported, guesses)
    took_part, noise = _simulated(mechanism, algorithm, (100, canaries))
    present = np.arange(canaries) % 2 == 0

    def notices(factor):
        order = np.argsort(-(took_part * present + factor * noise), axis=1)[:, :guesses]
        return np.mean(present[order].sum(axis=1) >= needed)

    return _Found(
        "epsilon", reported, bound(scores, included), _powers(noise=_limit(notices, 0.0, 1.0))
    )


def _fewest(is_enough: Callable[[int], bool], most: int) -> int:
    """The smallest number up to `most` that is enough, or more than `most` if none is."""
    low, high = 0, most + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle <= most and is_enough(middle) else (middle + 1, high)
    return low


def _guessed(canaries: int, right: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and facts of a run in which `right` guesses of a third of the canaries were right."""
    included = np.arange(canaries) % 2 == 0
    included[canaries - canaries // 3 :] = False
    included[canaries - right :] = True
    return np.arange(canaries), included


def _simulated(
    mechanism: Mechanism, algorithm: Algorithm, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of canaries that take part, without noise, and the noise, as both are stated."""
    rng = np.random.default_rng(1)
    weights = _weights(mechanism, algorithm)
    pool = sum(w * (rng.random(10_000) < mechanism.sampling.sampling_prob) for w in weights)
    took_part = mechanism.l2_clip_norm * rng.choice(pool, shape)
    return took_part, mechanism.noise_stddev * np.linalg.norm(weights) * rng.normal(size=shape)


def _weights(mechanism: Mechanism, algorithm: Algorithm) -> np.ndarray:
    """The weight of each step's noisy sum in the score at the end."""
    alpha = 0.5 if algorithm in (Algorithm.FIRST_ORDER, Algorithm.FEDERATED) else 1.0
    kept = (1 - _RATE * (1 - alpha)) ** np.arange(mechanism.num_steps)[::-1]
    return _RATE * alpha * kept / mechanism.sampling.expected_batch_size


def _paired(mechanism, algorithm, reported, delta, significance, num_runs, rng) -> _Found:
    rows = mechanism.sampling.num_examples
    options, to_scores = _setting(algorithm, 2)
    step = TrainStep(
        _pull, mechanism, options["optimizer"], public_loss_fn=options.get("public_loss_fn")
    )
    alpha = options.get("alpha", 1.0)
    scores = []
    for present in (True, False):
        private = np.zeros((rows, 2), np.float32)
        private[0, 0] = _LENGTH * mechanism.l2_clip_norm * present
        *_, (states, _) = train_sweep(
            step,
            _start(2),
            PrivateData(private),
            options.get("public"),
            runs=[SweepRun(alpha=alpha, seed=_seed(rng)) for _ in range(num_runs)],
        )
        scores.append((np.asarray(_joined(states.params), np.float64) @ to_scores.T)[:, 0])
    sampling = mechanism.sampling
    signal = mechanism.l2_clip_norm * sampling.sampling_prob * _weights(mechanism, algorithm).sum()
    bound = functools.partial(
        paired_epsilon, threshold=signal / 2, delta=delta, significance=significance
    )

    @functools.cache
    def bound_of(hits, alarms):
        ranks = np.arange(num_runs)
        return bound(np.where(ranks < hits, signal, 0.0), np.where(ranks < alarms, signal, 0.0))

    took_part, noise = _simulated(mechanism, algorithm, (2, 100, num_runs))

    def notices(factor):
        hits = np.sum(took_part[0] + factor * noise[0] >= signal / 2, axis=1)
        alarms = np.sum(factor * noise[1] >= signal / 2, axis=1)
        return np.mean([bound_of(*both) > reported for both in zip(hits, alarms, strict=True)])

    return _Found("epsilon", reported, bound(*scores), _powers(noise=_limit(notices, 0.0, 1.0)))


class _Looks(NamedTuple):
    """What a run with full batches released, step by step.

    Attributes:
        noisy_sums: [steps, coordinates].
        claimed: the sum without noise, up to the clip norm.
        directions: of the canaries, one per row.
        included: which canaries took part.
        l2_clip_norm: C, as stated.
        noise_multiplier: the stated one of this run.
    """

    noisy_sums: np.ndarray
    claimed: np.ndarray
    directions: np.ndarray
    included: np.ndarray
    l2_clip_norm: float
    noise_multiplier: float

    @property
    def noise(self) -> np.ndarray:
        """The noise in standard deviations, as stated; a wrong clip norm makes no difference."""
        unit = self.claimed / np.linalg.norm(self.claimed)
        sums = (self.noisy_sums @ unit).mean() * unit
        return (self.noisy_sums - sums) / (self.noise_multiplier * self.l2_clip_norm)


def _looks(mechanism, algorithm, rng, noise_multiplier: float) -> _Looks:
    """Half of the canaries take part in full batches; every step shows each through fresh noise.

    A canary has something in every coordinate and in both leaves, so that clipping of single
    coordinates or leaves is seen.
    """
    full = dataclasses.replace(
        mechanism,
        sampling=FullBatch.of(_CANARIES),
        noise_multiplier=noise_multiplier,
        num_steps=_STEPS,
        accountant=None,
        orders=None,
    )
    included, directions = np.arange(_CANARIES) % 2 == 0, _directions(_CANARIES)
    taking_part = mechanism.l2_clip_norm * included[:, None] * directions
    rows = (_LENGTH * taking_part).astype(np.float32)
    return _Looks(
        noisy_sums=_noisy_sums(algorithm, rows, full, _seed(rng)),
        claimed=taking_part.sum(axis=0),
        directions=directions,
        included=included,
        l2_clip_norm=mechanism.l2_clip_norm,
        noise_multiplier=noise_multiplier,
    )


def _gaussian(looks: Callable[[float], _Looks], significance: float) -> _Found:
    run = looks(AUDIT_NOISE)
    scores = run.noisy_sums @ run.directions.T / run.l2_clip_norm
    with_canary, without = scores[:, run.included].ravel(), scores[:, ~run.included].ravel()
    bound = gaussian_mu(with_canary, without, threshold=0.5, significance=significance)
    return _Found("mu", 1 / AUDIT_NOISE, bound, _gaussian_power(len(without), significance))


@functools.lru_cache(maxsize=8)
def _gaussian_power(trials: int, significance: float) -> Mapping[str, float]:
    """Computed, not simulated: errors are binomial, and the attack looks at nothing else."""
    counts = np.arange(trials)
    # The attack refutes where the two upper bounds on the rates are small enough together.
    rates = stats.beta.ppf(1 - significance / 2, counts + 1, trials - counts)
    enough = stats.norm.cdf(stats.norm.isf(rates) - 1 / AUDIT_NOISE)
    misses_allowed = np.searchsorted(rates, enough) - 1

    def refutes(noise: float, clip: float) -> float:
        alarms = stats.norm.sf(0.5 / (noise * AUDIT_NOISE))
        misses = stats.norm.cdf((0.5 - clip) / (noise * AUDIT_NOISE))
        allowed = stats.binom.cdf(misses_allowed, trials, misses)
        return float(stats.binom.pmf(counts, trials, alarms) @ allowed)

    return _powers(
        noise=_limit(lambda noise: refutes(noise, 1.0), 0.1, 1.0),
        clip=_limit(lambda clip: refutes(1.0, clip), 2.0, 1.0),
    )


def _noise(
    looks: Callable[[float], _Looks], noise_multiplier: float, significance: float
) -> _Found:
    """Noise as large as stated, everywhere, of Gaussian shape, and never the same twice.

    It is measured at the stated multiplier, and at that of the Gaussian attack: whether noise is
    proportional to the multiplier decides what that attack says of the stated one.
    """
    runs = [looks(noise_multiplier), looks(AUDIT_NOISE)]
    steps, coordinates = runs[0].noise.shape
    # Ten tests: two of both runs together, and four of each.
    share = significance / 10
    degrees, pairs_of_steps = steps * coordinates, math.comb(2 * steps, 2)
    least = stats.chi2.ppf(share, degrees)
    closest = stats.chi2.ppf(share / pairs_of_steps, coordinates)
    notices = {
        "noise": math.sqrt(least / stats.chi2.ppf(POWER, degrees)),
        "correlation": 1 - float(closest / stats.chi2.ppf(POWER, coordinates)),
    }
    # In units of its own scale where that is too small, which is a finding by itself.
    scales = [float(np.sqrt(np.mean(run.noise**2))) for run in runs]
    if min(scales) < 1e-3:
        problem = f"there is at most {min(scales):.1g} of the noise that is stated"
        return _Found("mu", 1 / noise_multiplier, 0.0, notices, (problem,))
    noise = np.concatenate(
        [run.noise / min(scale, 1.0) for run, scale in zip(runs, scales, strict=True)]
    )
    if pairs := repeated_noise(noise, 1.0, significance=share):
        # All that follows is for steps of independent noise.
        problems = (_dependent(pairs, "steps"),)
        return _Found("mu", 1 / noise_multiplier, 0.0, notices, problems)
    problems, is_loud = [], np.ones(coordinates, bool)
    largest = [scale * math.sqrt(degrees / least) for scale in scales]
    if largest[1] < 1:
        problems.append(
            f"noise is at most {largest[1]:.3f} of what is stated at noise multiplier "
            f"{AUDIT_NOISE:g}"
        )
    for run, scale in zip(runs, scales, strict=True):
        at = f"at noise multiplier {run.noise_multiplier:g}"
        values = run.noise / min(scale, 1.0)
        is_quiet = np.sum(values**2, axis=0) < stats.chi2.ppf(share / coordinates, steps)
        is_loud &= ~is_quiet
        if is_quiet.any():
            problems.append(
                f"{is_quiet.sum()} of {coordinates} coordinates have less noise than others {at}"
            )
        values = run.noise.ravel() / scale
        if stats.kstest(values, "norm").pvalue < share:
            problems.append(f"noise is not of Gaussian shape {at}")
        if stats.binom.cdf(np.sum(np.abs(values) > 3), degrees, 2 * stats.norm.sf(3)) < share:
            problems.append(f"noise has too short tails {at}")
    if pairs := repeated_noise(noise.T[is_loud], 1.0, significance=share):
        problems.append(_dependent(pairs, "coordinates"))
    bound = 1 / (noise_multiplier * largest[0])
    return _Found("mu", 1 / noise_multiplier, bound, notices, tuple(problems))


def _dependent(pairs: Sequence[tuple[int, int]], what: str) -> str:
    return (
        f"noise is not independent in {len(pairs)} pairs of {what}, such as {pairs[0][0]} and "
        f"{pairs[0][1]}"
    )


def _sampling(mechanism, algorithm, significance, rng) -> _Found:
    """Reads from releases with little noise who took part in which step."""
    q, records = mechanism.sampling.sampling_prob, mechanism.sampling.num_examples
    steps = int(np.clip(math.ceil(50 / q), 100, 2000))
    visible = dataclasses.replace(
        mechanism, noise_multiplier=_SAMPLING_NOISE, num_steps=steps, accountant=None, orders=None
    )
    rows = _canaries(mechanism, np.ones(records, bool))
    times = _noisy_sums(algorithm, rows, visible, _seed(rng)) / mechanism.l2_clip_norm
    took_part = times > 0.5
    # One half for the frequency, whose bound is reported, and one for all the rest.
    problems = not_poisson(took_part, q, significance=significance / 2)
    if (times > 1.5).any():
        problems.append("a record counted more than once in a step")
    total, trials = int(took_part.sum()), took_part.size
    at_least = stats.beta.ppf(significance / 2, total, trials - total + 1) if total else 0.0
    most = stats.binom.isf(significance / 2, trials, q)
    return _Found(
        "q",
        q,
        float(at_least),
        _powers(q=_limit(lambda factor: stats.binom.sf(most, trials, factor * q), 1 / q, 1.0)),
        tuple(problems),
    )


def not_poisson(
    took_part: np.ndarray, sampling_prob: float, *, significance: float = 1e-6
) -> list[str]:
    """What in a table of participations contradicts Poisson sampling, in words.

    Under Poisson sampling each record joins each step independently with probability q. Tested are
    the frequency of all participations, the number of steps of each record and its spread over
    records, the spread of batch sizes, how often neighbouring steps share a record, and for all
    pairs of steps, and of records, how much they have in common.

    Args:
        took_part: booleans, [steps, records].
        sampling_prob: q, below 1.
        significance: the probability of a false alarm, over all tests together.
    """
    _validate.open_unit_interval(sampling_prob=sampling_prob, significance=significance)
    table, q, share = np.asarray(took_part, bool), sampling_prob, significance / 7
    steps, records = table.shape
    per_record, per_step = table.sum(axis=0), table.sum(axis=1)
    again = table[0 : steps - 1 : 2] & table[1:steps:2]
    found = []
    if _unlikely(table.sum(), table.size, q) < share:
        found.append(f"records joined {table.mean():.4g} of all steps instead of {q:.4g}")
    odd = int(np.argmin(_unlikely(per_record, steps, q)))
    if _unlikely(per_record[odd], steps, q) * records < share:
        found.append(f"record {odd} joined {per_record[odd]} of {steps} steps")
    if _spread_is_unlikely(per_record, steps, q) < share:
        found.append("records differ in how often they joined by too much or too little")
    if _spread_is_unlikely(per_step, records, q) < share:
        found.append("batches differ in size by too much or too little")
    if _unlikely(again.sum(), again.size, q**2) < share:
        found.append(
            f"records of a step joined the next one with frequency "
            f"{again.sum() / max(1, per_step[0 : steps - 1 : 2].sum()):.4g} instead of {q:.4g}"
        )
    for what, rows, trials in (("steps", table, records), ("records", table.T, steps)):
        first, second, common = _closest(rows)
        pairs = math.comb(len(rows), 2)
        if pairs * stats.binom.sf(common - 1, trials, q**2) < share:
            found.append(f"{what} {first} and {second} have {common} participations in common")
    return found


def _unlikely(count: Any, trials: int, probability: float) -> Any:
    """The two-sided p-value of binomial counts."""
    below = stats.binom.cdf(count, trials, probability)
    above = stats.binom.sf(np.asarray(count) - 1, trials, probability)
    return np.minimum(1, 2 * np.minimum(below, above))


def _spread_is_unlikely(counts: np.ndarray, trials: int, probability: float) -> float:
    """The two-sided p-value of the sum of squared deviations of independent binomial counts.

    Its distribution is taken to be a gamma of the right mean and variance: χ² for many trials.
    """
    variance = trials * probability * (1 - probability)
    squares = np.sum((counts - trials * probability) ** 2) / variance
    scale = 2 + (1 - 6 * probability * (1 - probability)) / variance
    spread = stats.gamma(len(counts) / scale, scale=scale)
    return float(min(1, 2 * min(spread.cdf(squares), spread.sf(squares))))


def _closest(rows: np.ndarray) -> tuple[int, int, int]:
    """The two rows that have most in common, and how much."""
    common = rows.astype(np.float32) @ rows.astype(np.float32).T
    np.fill_diagonal(common, -1)
    first, second = np.unravel_index(np.argmax(common), common.shape)
    return int(first), int(second), int(common[first, second])


def repeated_noise(
    released: np.ndarray, stddev: float, *, significance: float = 1e-6
) -> list[tuple[int, int]]:
    """Pairs of steps whose noise cannot have been independent.

    The difference of two releases is a difference of sums plus N(0, 2·stddev² I). Its squared norm
    over 2·stddev² is χ² with as many degrees as coordinates, or larger: a value far *below* shows
    that noise was used twice, whatever the sums were.

    Args:
        released: noisy sums, [steps, coordinates].
        stddev: of the noise on each coordinate.
        significance: the probability of a false alarm, over all pairs together.
    """
    _validate.positive(stddev=stddev)
    steps, coordinates = released.shape
    limit = stats.chi2.ppf(significance / max(1, math.comb(steps, 2)), coordinates)
    found = []
    for first in range(steps - 1):
        gaps = np.sum((released[first + 1 :] - released[first]) ** 2, axis=1) / (2 * stddev**2)
        found += [(first, first + 1 + int(later)) for later in np.flatnonzero(gaps < limit)]
    return found


@dataclasses.dataclass(frozen=True)
class Replay:
    """The worst pair of neighbours that a search found.

    Attributes:
        largest: the largest distance between the two sums, before noise.
        allowed: the distance that the accountant assumes: C, or 2C for replace.
        description: how the worst pair came about.
        num_pairs: how many were tried.
    """

    largest: float
    allowed: float
    description: str
    num_pairs: int

    def exceeded(self, tolerance: float = 1e-3) -> bool:
        """Whether the sensitivity is more than is charged, beyond a relative rounding error."""
        return not self.largest <= (1 + tolerance) * self.allowed


def neighbour_replay(
    step: TrainStep | FederatedStep,
    params: Params,
    rows: Batch | PrivateClients,
    *,
    public: Batch | None = None,
    alpha: float = 1.0,
    num_pairs: int = 200,
    seed: int = 0,
) -> Replay:
    """Searches neighbouring data sets for the largest difference of what is released.

    Both data sets go through the whole step with the same batch, the same noise and the same keys,
    so what differs between the released gradients, times the divisor B over α, is the difference
    of the clipped sums: it must stay below C (2C for replace), whatever the rows are. For your own
    loss function:

        step = TrainStep(loss_fn=my_loss, mechanism=mechanism, optimizer=optax.sgd(0.1))
        assert not neighbour_replay(step, my_params, my_rows).exceeded()

    In a `FederatedStep` a record is a user with all of its rows, and the sums are compared before
    the noise too: what a user adds to the count of an adaptive clip is a part of them.

    The search begins with rows from `rows` and hostile ones (NaN, infinities, huge, tiny and zero
    values, the extremes of integers, duplicates; users with none, one and all of their rows), in
    batches drawn by the mechanism, alone, and in crowds; then it varies the worst pair found so
    far: scaled, negated, mixed with other rows.

    Args:
        step: of central training or, for users, a federated round; its optimiser is replaced by one
            that keeps the gradient.
        params: where to look.
        rows: arrays with at least two rows, as the mechanism would sample from; for a federated
            step `PrivateClients` of at least two users.
        public: public rows, where α < 1.
        alpha: the weight of the private gradient.
        num_pairs: how many pairs of neighbours to try.
        seed: of the search.
    """
    _validate.instance_of((TrainStep, FederatedStep), step=step)
    _validate.positive_integer(num_pairs=num_pairs)
    _validate.probability("A step at α = 0 releases nothing.", alpha=alpha)
    if alpha < 1 and public is None:
        raise ValueError(
            f"alpha={alpha:g} mixes in a public gradient, got no public rows. Pass public=arrays, "
            "or leave alpha at 1."
        )
    mechanism = step.mechanism
    if not isinstance(mechanism.noise, GaussianNoise):
        mechanism = dataclasses.replace(mechanism, noise=GaussianNoise())
    step = dataclasses.replace(step, mechanism=mechanism, optimizer=_LAST_GRADIENT, average=None)
    params = jax.tree.map(jnp.asarray, params)
    if isinstance(step, FederatedStep):
        _validate.instance_of(PrivateClients, "A record of a federated step is a user.", rows=rows)
        records, what = _users(rows), "users"
        released = _released_by_users(step, params, public, alpha, seed)
    else:
        records, what = jax.tree.map(np.asarray, rows), "rows"
        released = _released_by_rows(step, params, records, public, alpha, seed)
    count = len(jax.tree.leaves(records)[0])
    if count < 2:
        raise ValueError(f"a replay needs at least two {what}, got {count}.")
    rng = np.random.default_rng(seed)
    worst, description, best, tried = 0.0, "none", None, 0
    while tried < num_pairs and worst < math.inf:
        victim, other, how = _propose(records, count, rng, best)
        drawn = _company(mechanism, count, rng, tried)
        place = rng.choice(drawn)
        tried += 1
        data = _with_row(records, place, victim)
        index, is_padding = _padded(drawn, count)
        # A record that does not count may hold anything: what it holds must not reach the others.
        neighbour, hidden = _with_row(records, place, other), is_padding | (index == place)
        if mechanism.adjacency is Adjacency.REPLACE:
            hidden = is_padding
        one = released(data, index, is_padding)
        two = released(neighbour, index, hidden)
        distance = max(map(_distance, one, two))
        if not distance <= worst:
            worst = math.inf if math.isnan(distance) else distance
            description = f"{how}; {len(set(drawn))} of {count} {what} in the batch"
            best = (victim, other, how)
    allowed = mechanism.adjacency.distance * mechanism.l2_clip_norm
    return Replay(worst, allowed, description, tried)


def _released_by_rows(
    step: TrainStep, params: Params, rows: Batch, public: Batch | None, alpha: float, seed: int
) -> Callable[..., list[PyTree]]:
    """What a step releases, in units of the clipped sum."""
    state = step.init(params, jax.random.key(seed))
    count = len(jax.tree.leaves(rows)[0])
    takes_key = step.clipped_grad.takes_key
    keys = jax.random.split(_replay_key(seed + 1), count) if takes_key else None
    arguments = {} if public is None else {"public": public, "alpha": alpha}
    unit = step.mechanism.sampling.expected_batch_size / alpha

    @jax.jit
    def run(data, index, is_padding):
        batch = jax.tree.map(lambda leaf: leaf[index], data)
        batch_keys = None if keys is None else keys[index]
        after, _ = step(state, batch, is_padding, keys=batch_keys, **arguments)
        return after.opt_state

    return lambda *batch: [_scaled(run(*batch), unit)]


def _users(clients: PrivateClients) -> UserBatch:
    """Users as a replay changes them: all of their rows, padded, and how many are real."""
    return pad_users(ClientArrays.of(clients), np.arange(len(clients)))


def _released_by_users(
    step: FederatedStep, params: Params, public: Batch | None, alpha: float, seed: int
) -> Callable[..., list[PyTree]]:
    """The sum of a round, and what the round releases of it in the same units."""
    state = step.init(params, jax.random.key(seed))
    round_key, public_key = jax.random.split(_replay_key(seed + 1))
    public_gradient: PublicGradient | None = None
    if public is not None:
        public_gradient = step.public_grad(state, public, public_key)
    # The norm that a clipped delta has in the sum, over the norm that it has in the gradient.
    share = 0.0 if step.adaptive_clip is None else step.adaptive_clip.budget_share
    mechanism = step.mechanism
    unit = math.sqrt(1 - share) * mechanism.sampling.expected_batch_size / alpha

    @jax.jit
    def run(data, index, is_padding):
        users = jax.tree.map(lambda leaf: leaf[index], data)
        total = step.private_sum(state, users, is_padding, record_keys(round_key, index))
        after, _ = step.finish(state, total, public_gradient, alpha)
        return total.total, after.opt_state

    def released(*batch):
        total, gradient = run(*batch)
        return [_numbers(total), _scaled(gradient, unit)]

    return released


def _replay_key(seed: int) -> jax.Array:
    """A key as training has it, whatever the default kind of keys is."""
    return jax.random.key(seed, impl="threefry2x32")


def _numbers(total: ExactSum) -> PyTree:
    """The sum of a round of users as numbers."""
    return jax.tree.map(np.asarray, total.floats())


def _scaled(tree: PyTree, factor: float) -> PyTree:
    return jax.tree.map(lambda leaf: factor * np.asarray(leaf, np.float64), tree)


def _keep_last(updates, state, params=None):
    del state, params
    return jax.tree.map(jnp.zeros_like, updates), updates


_LAST_GRADIENT = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params),
    _keep_last,
)


def _distance(one: PyTree, two: PyTree) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return math.hypot(*(np.linalg.norm(np.ravel(np.float64(a) - np.float64(b))) for a, b in pairs))


def _company(mechanism: Mechanism, count: int, rng: np.random.Generator, number: int) -> np.ndarray:
    """A batch of at least one row: as drawn by the mechanism, of one row, or of all."""
    drawn = np.asarray(next(iter(mechanism.sampling.batches(count, 1, rng))), int)
    if number % 4 == 2:
        return np.arange(count)
    return rng.integers(count, size=1) if number % 4 == 1 or len(drawn) == 0 else drawn


def _padded(drawn: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    room = max(2 * count, len(drawn))
    index = np.zeros(room, np.int32)
    index[: len(drawn)] = drawn
    is_padding = np.arange(room) >= len(drawn)
    return index, is_padding


def _with_row(rows: Batch, place: int, row: PyTree) -> Batch:
    def put(leaf, value):
        changed = leaf.copy()
        changed[place] = value
        return changed

    return jax.tree.map(put, rows, row)


_HOSTILE = (
    *("nan", "one nan", "inf", "-inf", "huge", "-huge", "one large", "tiny", "zero", "duplicate"),
    "as it is",
)


def _hostile(kind: str, row: PyTree, other: PyTree) -> PyTree:
    """A row made to break things. Integers take their extremes where floats take infinities."""
    if isinstance(row, UserBatch):
        return row._replace(examples=_hostile(kind, row.examples, other.examples))
    if kind in ("duplicate", "as it is"):
        return other if kind == "duplicate" else row

    def make(leaf):
        leaf = np.array(leaf)
        if np.issubdtype(leaf.dtype, np.floating):
            limits = np.finfo(leaf.dtype)
            value = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": limits.max,
                     "-huge": -limits.max, "tiny": limits.tiny, "zero": 0}  # fmt: skip
            if kind.startswith("one "):
                # Large: finite in the row, and infinite once it is squared.
                leaf.ravel()[:1] = np.nan if kind == "one nan" else np.sqrt(limits.max)
                return leaf
            return np.full_like(leaf, value[kind])
        if np.issubdtype(leaf.dtype, np.integer):
            limits = np.iinfo(leaf.dtype)
            extremes = {"huge": limits.max, "inf": limits.max, "-huge": limits.min,
                        "-inf": limits.min, "zero": 0}  # fmt: skip
            return np.full_like(leaf, extremes[kind]) if kind in extremes else leaf
        return leaf

    return jax.tree.map(make, row)


def _propose(
    rows: Batch, count: int, rng: np.random.Generator, best: Any
) -> tuple[PyTree, PyTree, str]:
    """Two versions of a record and how they came about: hostile ones, or variations of the best."""

    def pick():
        place = rng.integers(count)
        record = jax.tree.map(lambda leaf: leaf[place], rows)
        if isinstance(record, UserBatch):
            width = len(jax.tree.leaves(record.examples)[0])
            own = rng.choice([record.num_examples, 0, 1, width], p=[0.4, 0.1, 0.1, 0.4])
            record = record._replace(num_examples=own)
        return record

    if best is None or rng.random() < 0.5:
        first, second = rng.choice(_HOSTILE, 2)
        return (
            _hostile(first, pick(), pick()),
            _hostile(second, pick(), pick()),
            f"{first} and, where it is replaced, {second}",
        )
    victim, other, what = best
    share = rng.choice([0.0, 0.0, 0.3])
    varied = _combined(victim, pick(), rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(-3, 3), share)
    if rng.random() < 0.5:
        other = _combined(varied, varied, -1.0, 0.0)
    return varied, other, f"a variation of: {what.removeprefix('a variation of: ')}"


def _combined(row: PyTree, other: PyTree, factor: float, share: float) -> PyTree:
    """factor · ((1 − share) · row + share · other) where there are floats, else the row."""

    def one(leaf, other_leaf):
        leaf = np.asarray(leaf)
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        with np.errstate(over="ignore", invalid="ignore"):
            mixed = leaf if share == 0 else (1 - share) * leaf + share * other_leaf
            return np.asarray(factor * mixed, leaf.dtype)

    return jax.tree.map(one, row, other)
