"""Attacks on the library's own algorithms: a mechanism in, one `Audit` per attack out.

Every attack also states its power: by which factor noise, clip norm or sampling probability would
have to differ from what is stated for the attack to notice it with probability `POWER`.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from mirrordp import _validate
from mirrordp.auditing import canaries
from mirrordp.auditing.canaries import Algorithm
from mirrordp.auditing.statistics import (
    gaussian_mu,
    not_poisson,
    one_run_epsilon,
    paired_epsilon,
    repeated_noise,
)
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise
from mirrordp.privacy.sampling import FullBatch, PoissonSampling

POWER = 0.95
"""The probability with which a deviation of the stated size is noticed."""

AUDIT_NOISE = 0.32
"""The noise multiplier of the Gaussian attack.

If a Gaussian mechanism is attacked with a threshold halfway, the relative error of μ is least when
each rate of errors is Φ(−1.576), which means a noise multiplier of 1 / (2 · 1.576).
"""

# At this noise multiplier a release shows who took part: half a clip norm is ten deviations.
_SAMPLING_NOISE = 0.05

# The size of the runs in which each step is seen. Their full batches hold one canary for each
# coordinate.
_CANARIES, _STEPS = 400, 50


class Attack(enum.Enum):
    """The attacks that an audit makes."""

    ONE_RUN = "one-run"
    PAIRED = "paired"
    GAUSSIAN = "gaussian"
    NOISE = "noise"
    SAMPLING = "sampling"


@dataclasses.dataclass(frozen=True)
class Audit:
    """The findings of one attack on one algorithm, and what it could have found.

    Attributes:
        algorithm: the algorithm that was attacked.
        attack: the attack.
        measure: what is bounded: "epsilon" at `delta`, "mu" of one step, or "q", the probability
            of a record to join a step.
        reported: what is claimed.
        lower_bound: what was proved; the claim is refuted if this is larger.
        confidence: the confidence of the bound, after correction for the number of audits made
            together.
        delta: δ of the claim.
        problems: whatever else contradicts the claim, in words; any problem refutes it.
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
    bound is above what is true, and no problem is reported that does not exist (each audit has its
    share of the error, Bonferroni).

    The Gaussian attack has little power at the noise of an ordinary mechanism, so it runs the same
    mechanism at the noise multiplier `AUDIT_NOISE`. An excess of sensitivity over noise that it
    finds there holds at the stated multiplier too if noise is proportional to the multiplier; the
    noise attack measures the noise at both.

    Args:
        mechanism: Poisson or full-batch sampling of a public number of rows; there are as many
            canaries as rows. The Gaussian and the noise attack use it with full batches of their
            own, the sampling attack with little noise and as many steps as it needs.
        algorithms: the algorithms to attack.
        attacks: the attacks to make.
        delta: δ of the claim.
        confidence: the confidence of all bounds together.
        num_runs: the number of runs with the canary of the paired attack, and of runs without it.
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
            "an audit needs a public number of rows and adjacency='zero-out', because canaries "
            "that take no part are rows of zeros; got num_examples="
            f"{mechanism.sampling.num_examples} and adjacency={mechanism.adjacency.value!r}. Use "
            "PoissonSampling.for_batch_size(...)."
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
            "attack (its runs are not made side by side), and the sampling attack needs a sampling "
            "probability below 1. Use Attack.ONE_RUN, Attack.GAUSSIAN or Attack.NOISE."
        )
    # The statistics need less than one half; a smaller error than is allowed does no harm.
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
                findings = _gaussian(looks, significance)
            elif attack is Attack.NOISE:
                findings = _noise(looks, mechanism.noise_multiplier, significance)
            elif attack is Attack.SAMPLING:
                findings = _sampling(mechanism, algorithm, significance, rng)
            elif attack is Attack.ONE_RUN:
                findings = _one_run(mechanism, algorithm, epsilon, delta, significance, rng)
            else:
                findings = _paired(
                    mechanism, algorithm, epsilon, delta, significance, num_runs, rng
                )
            found.append(
                Audit(
                    algorithm, attack, confidence=1 - significance, delta=delta,
                    **findings._asdict(),
                )
            )  # fmt: skip
    return found


class _Findings(NamedTuple):
    """The part of an `Audit` that an attack fills in."""

    measure: str
    reported: float
    lower_bound: float
    notices: Mapping[str, float]
    problems: tuple[str, ...] = ()


def _limit(notices: Callable[[float], Any], low: float, high: float) -> float | None:
    """Finds where `notices`, a probability that falls from `low` to `high`, passes `POWER`.

    The answer lies on the side of `low`, where the probability is large enough. It is None if the
    probability is too small at `low` already.
    """
    if notices(low) < POWER:
        return None
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if notices(middle) >= POWER else (low, middle)
    return low


def _powers(**limits: float | None) -> dict[str, float]:
    return {name: limit for name, limit in limits.items() if limit is not None}


def _one_run(mechanism, algorithm, reported, delta, significance, rng) -> _Findings:
    count = mechanism.sampling.num_examples
    included = rng.random(count) < 0.5
    rows = canaries.one_per_coordinate(mechanism, included)
    scores = canaries.scores(mechanism, algorithm, rows, rng)
    bound = functools.partial(one_run_epsilon, delta=delta, significance=significance)

    guesses = count // 3
    needed = _fewest(lambda right: bound(*_guessed(count, right)) > reported, guesses)
    took_part, noise = _simulated(mechanism, algorithm, (100, count))
    present = np.arange(count) % 2 == 0

    def notices(factor):
        order = np.argsort(-(took_part * present + factor * noise), axis=1)[:, :guesses]
        return np.mean(present[order].sum(axis=1) >= needed)

    return _Findings(
        "epsilon", reported, bound(scores, included), _powers(noise=_limit(notices, 0.0, 1.0))
    )


def _fewest(is_enough: Callable[[int], bool], most: int) -> int:
    """Returns the smallest number up to `most` that is enough, or more than `most` if none is."""
    low, high = 0, most + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle <= most and is_enough(middle) else (middle + 1, high)
    return low


def _guessed(count: int, right: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores and facts of a run that guesses a third of the canaries, `right` correctly."""
    included = np.arange(count) % 2 == 0
    included[count - count // 3 :] = False
    included[count - right :] = True
    return np.arange(count), included


def _simulated(
    mechanism: Mechanism, algorithm: Algorithm, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draws scores of canaries that take part, without noise, and the noise, both as stated."""
    rng = np.random.default_rng(1)
    weights = canaries.weights(mechanism, algorithm)
    pool = sum(w * (rng.random(10_000) < mechanism.sampling.sampling_prob) for w in weights)
    took_part = mechanism.l2_clip_norm * rng.choice(pool, shape)
    return took_part, mechanism.noise_stddev * np.linalg.norm(weights) * rng.normal(size=shape)


def _paired(mechanism, algorithm, reported, delta, significance, num_runs, rng) -> _Findings:
    num_examples = mechanism.sampling.num_examples
    scores = canaries.paired_scores(mechanism, algorithm, num_examples, num_runs, rng)
    weight = canaries.weights(mechanism, algorithm).sum()
    signal = mechanism.l2_clip_norm * mechanism.sampling.sampling_prob * weight
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

    return _Findings("epsilon", reported, bound(*scores), _powers(noise=_limit(notices, 0.0, 1.0)))


class _Looks(NamedTuple):
    """The releases of a run with full batches, step by step.

    Attributes:
        noisy_sums: [steps, coordinates].
        claimed: the sum without noise, up to the clip norm.
        directions: the directions of the canaries, one per row.
        included: which canaries took part.
        l2_clip_norm: C, as stated.
        noise_multiplier: the noise multiplier of this run, as stated.
    """

    noisy_sums: np.ndarray
    claimed: np.ndarray
    directions: np.ndarray
    included: np.ndarray
    l2_clip_norm: float
    noise_multiplier: float

    @property
    def noise(self) -> np.ndarray:
        """The noise over its stated standard deviation; a wrong clip norm makes no difference."""
        unit = self.claimed / np.linalg.norm(self.claimed)
        sums = (self.noisy_sums @ unit).mean() * unit
        return (self.noisy_sums - sums) / (self.noise_multiplier * self.l2_clip_norm)


def _looks(mechanism, algorithm, rng, noise_multiplier: float) -> _Looks:
    """Trains with half of the canaries; every step shows each of them through fresh noise.

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
    included, directions = np.arange(_CANARIES) % 2 == 0, canaries.directions(_CANARIES)
    taking_part = mechanism.l2_clip_norm * included[:, None] * directions
    rows = (canaries.LENGTH * taking_part).astype(np.float32)
    return _Looks(
        noisy_sums=canaries.noisy_sums(full, algorithm, rows, rng),
        claimed=taking_part.sum(axis=0),
        directions=directions,
        included=included,
        l2_clip_norm=mechanism.l2_clip_norm,
        noise_multiplier=noise_multiplier,
    )


def _gaussian(looks: Callable[[float], _Looks], significance: float) -> _Findings:
    run = looks(AUDIT_NOISE)
    scores = run.noisy_sums @ run.directions.T / run.l2_clip_norm
    with_canary, without = scores[:, run.included].ravel(), scores[:, ~run.included].ravel()
    bound = gaussian_mu(with_canary, without, threshold=0.5, significance=significance)
    return _Findings("mu", 1 / AUDIT_NOISE, bound, _gaussian_power(len(without), significance))


@functools.lru_cache(maxsize=8)
def _gaussian_power(trials: int, significance: float) -> Mapping[str, float]:
    """Computes the power exactly: errors are binomial, and the attack looks at nothing else."""
    counts = np.arange(trials)
    # The attack refutes if the two upper bounds on the rates are small enough together.
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
) -> _Findings:
    """Tests that noise is as large as stated, Gaussian, and independent everywhere.

    It is measured at the stated multiplier and at that of the Gaussian attack: whether noise is
    proportional to the multiplier decides what that attack says about the stated one.
    """
    runs = [looks(noise_multiplier), looks(AUDIT_NOISE)]
    steps, coordinates = runs[0].noise.shape
    # There are ten tests: two on both runs together, and four on each.
    share = significance / 10
    degrees, pairs_of_steps = steps * coordinates, math.comb(2 * steps, 2)
    least = stats.chi2.ppf(share, degrees)
    closest = stats.chi2.ppf(share / pairs_of_steps, coordinates)
    notices = {
        "noise": math.sqrt(least / stats.chi2.ppf(POWER, degrees)),
        "correlation": 1 - float(closest / stats.chi2.ppf(POWER, coordinates)),
    }
    # Noise that is too small, which is a finding by itself, is compared in units of its own scale.
    scales = [float(np.sqrt(np.mean(run.noise**2))) for run in runs]
    if min(scales) < 1e-3:
        problem = f"there is at most {min(scales):.1g} of the noise that is stated"
        return _Findings("mu", 1 / noise_multiplier, 0.0, notices, (problem,))
    noise = np.concatenate(
        [run.noise / min(scale, 1.0) for run, scale in zip(runs, scales, strict=True)]
    )
    if pairs := repeated_noise(noise, 1.0, significance=share):
        # All further tests need steps of independent noise.
        problems = (_dependent(pairs, "steps"),)
        return _Findings("mu", 1 / noise_multiplier, 0.0, notices, problems)
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
    return _Findings("mu", 1 / noise_multiplier, bound, notices, tuple(problems))


def _dependent(pairs: Sequence[tuple[int, int]], what: str) -> str:
    return (
        f"noise is not independent in {len(pairs)} pairs of {what}, such as {pairs[0][0]} and "
        f"{pairs[0][1]}"
    )


def _sampling(mechanism, algorithm, significance, rng) -> _Findings:
    """Reads from releases with little noise which records took part in which step."""
    q, records = mechanism.sampling.sampling_prob, mechanism.sampling.num_examples
    steps = int(np.clip(math.ceil(50 / q), 100, 2000))
    visible = dataclasses.replace(
        mechanism, noise_multiplier=_SAMPLING_NOISE, num_steps=steps, accountant=None, orders=None
    )
    rows = canaries.one_per_coordinate(mechanism, np.ones(records, bool))
    times = canaries.noisy_sums(visible, algorithm, rows, rng) / mechanism.l2_clip_norm
    took_part = times > 0.5
    # One half of the error is for the frequency, whose bound is reported, one for all the rest.
    problems = not_poisson(took_part, q, significance=significance / 2)
    if (times > 1.5).any():
        problems.append("a record counted more than once in a step")
    total, trials = int(took_part.sum()), took_part.size
    at_least = stats.beta.ppf(significance / 2, total, trials - total + 1) if total else 0.0
    most = stats.binom.isf(significance / 2, trials, q)
    return _Findings(
        "q",
        q,
        float(at_least),
        _powers(q=_limit(lambda factor: stats.binom.sf(most, trials, factor * q), 1 / q, 1.0)),
        tuple(problems),
    )
