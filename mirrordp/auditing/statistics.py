"""Statistics of audits: scores, noisy sums or tables of participation in, bounds or findings out.

The lower bounds are those of `jax_privacy.auditing`:

- `one_run_epsilon`: many canaries in one run (Steinke, Nasr and Jagielski 2023);
- `paired_epsilon`: one canary, many runs with and without it, Clopper-Pearson bounds;
- `gaussian_mu`: the same bounds as the μ of Gaussian differential privacy, if the noise of a single
  full-batch step is seen. It finds a tenth less noise, for which the others have no power.

Two checks look at the parts instead of the whole, and see more: `repeated_noise` compares the noise
of steps, and `not_poisson` the batches in which records took part.
"""

import math
from typing import Any

import numpy as np
from jax_privacy import auditing
from scipy import stats

from mirrordp import _validate


def one_run_epsilon(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    delta: float,
    significance: float,
    num_guesses: int | None = None,
) -> float:
    """Bounds ε from below by one run in which each canary took part with probability one half.

    The `num_guesses` canaries of the highest score are guessed to have taken part. Their number is
    fixed beforehand, so no correction for the choice of a threshold is needed.

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
            f"{included.shape}. Pass two vectors of the same length."
        )
    guesses = len(scores) // 3 if num_guesses is None else num_guesses
    _validate.positive_integer(num_guesses=guesses)
    if included.all() or not included.any():
        return 0.0
    # Ties are broken by position, which knows nothing of who took part.
    ranked = np.empty(len(scores))
    ranked[np.argsort(scores, kind="stable")] = np.arange(len(scores))
    auditor = auditing.CanaryScoreAuditor(ranked[included], ranked[~included])
    return float(
        auditor.epsilon_one_run(
            significance,
            delta,
            threshold_strategy=auditing.Explicit(len(scores) - guesses),
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
    """Bounds ε from below by scores of independent runs with and without one canary.

    Args:
        with_canary: scores of the runs in which the canary took part.
        without: scores of the other runs.
        threshold: a run that scores at least this much is guessed to be one with the canary; fixed
            beforehand.
        delta: δ of the claim.
        significance: the probability with which the bound may be above the true ε.
    """
    auditor = auditing.CanaryScoreAuditor(with_canary, without)
    return float(
        auditor.epsilon_clopper_pearson(
            significance,
            delta,
            one_sided=False,
            threshold_strategy=auditing.Explicit(threshold),
        )
    )


def gaussian_mu(
    with_canary: np.ndarray, without: np.ndarray, *, threshold: float, significance: float
) -> float:
    """Bounds the μ of Gaussian differential privacy from below by independent scores.

    A μ-private mechanism allows no test whose rates of false alarms and of misses, a and b, satisfy
    Φ⁻¹(1 − a) − Φ⁻¹(b) > μ. Both rates are replaced by Clopper-Pearson upper bounds, each at half
    of `significance`. The arguments are those of `paired_epsilon`.
    """
    alarms = _rate_at_most(int(np.sum(without >= threshold)), len(without), significance / 2)
    misses = _rate_at_most(int(np.sum(with_canary < threshold)), len(with_canary), significance / 2)
    return max(0.0, float(stats.norm.isf(alarms) - stats.norm.ppf(misses)))


def _rate_at_most(count: int, trials: int, significance: float) -> float:
    if count == trials:
        return 1.0
    return float(stats.beta.ppf(1 - significance, count + 1, trials - count))


def repeated_noise(
    released: np.ndarray, stddev: float, *, significance: float = 1e-6
) -> list[tuple[int, int]]:
    """Finds pairs of steps whose noise cannot have been independent.

    The difference of two releases is a difference of sums plus N(0, 2·stddev² I). Its squared norm
    over 2·stddev² is χ² with one degree of freedom per coordinate, or larger. A value far *below*
    shows that noise was used twice, whatever the sums were.

    Args:
        released: noisy sums, [steps, coordinates].
        stddev: the standard deviation of the noise on each coordinate.
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


def not_poisson(
    took_part: np.ndarray, sampling_prob: float, *, significance: float = 1e-6
) -> list[str]:
    """Describes what in a table of participation contradicts Poisson sampling.

    Under Poisson sampling each record joins each step independently with probability q. The tests
    look at the frequency of all participations, the number of steps of each record and its spread
    over records, the spread of batch sizes, how often neighbouring steps share a record, and how
    much any two steps, and any two records, have in common.

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
    if _p_value(table.sum(), table.size, q) < share:
        found.append(f"records joined {table.mean():.4g} of all steps instead of {q:.4g}")
    odd = int(np.argmin(_p_value(per_record, steps, q)))
    if _p_value(per_record[odd], steps, q) * records < share:
        found.append(f"record {odd} joined {per_record[odd]} of {steps} steps")
    if _p_value_of_spread(per_record, steps, q) < share:
        found.append("records differ in how often they joined by too much or too little")
    if _p_value_of_spread(per_step, records, q) < share:
        found.append("batches differ in size by too much or too little")
    if _p_value(again.sum(), again.size, q**2) < share:
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


def _p_value(count: Any, trials: int, probability: float) -> Any:
    """Returns the two-sided p-values of binomial counts."""
    below = stats.binom.cdf(count, trials, probability)
    above = stats.binom.sf(np.asarray(count) - 1, trials, probability)
    return np.minimum(1, 2 * np.minimum(below, above))


def _p_value_of_spread(counts: np.ndarray, trials: int, probability: float) -> float:
    """Returns the two-sided p-value of the squared deviations of independent binomial counts.

    The distribution of their sum is taken to be a gamma of the right mean and variance, which for
    many trials is χ².
    """
    variance = trials * probability * (1 - probability)
    squares = np.sum((counts - trials * probability) ** 2) / variance
    scale = 2 + (1 - 6 * probability * (1 - probability)) / variance
    spread = stats.gamma(len(counts) / scale, scale=scale)
    return float(min(1, 2 * min(spread.cdf(squares), spread.sf(squares))))


def _closest(rows: np.ndarray) -> tuple[int, int, int]:
    """Returns the two rows that have most in common, and how much."""
    common = rows.astype(np.float32) @ rows.astype(np.float32).T
    np.fill_diagonal(common, -1)
    first, second = np.unravel_index(np.argmax(common), common.shape)
    return int(first), int(second), int(common[first, second])
