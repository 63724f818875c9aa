"""Statistical tests with a stated rate of false alarms.

Each function says whether the samples are *accepted* as coming from the stated distribution. The
default false-alarm rate is one in a million per call, so a suite with fixed seeds never flickers
and a fresh seed hardly ever fails. Each test that uses one of them also shows that it rejects a
wrong mechanism: a test that accepts everything proves nothing.
"""

import numpy as np
from scipy import stats

FALSE_ALARMS = 1e-6


def accepts_stddev(samples: np.ndarray, stddev: float, false_alarms: float = FALSE_ALARMS) -> bool:
    """Whether centred Gaussian samples have this standard deviation (exact χ² test)."""
    samples = np.asarray(samples, np.float64).ravel()
    statistic = np.sum(samples**2) / stddev**2
    low, high = stats.chi2.ppf([false_alarms / 2, 1 - false_alarms / 2], samples.size)
    return bool(low <= statistic <= high)


def accepts_normal(samples: np.ndarray, stddev: float, false_alarms: float = FALSE_ALARMS) -> bool:
    """Whether samples are N(0, stddev²) in distribution (Kolmogorov-Smirnov)."""
    samples = np.asarray(samples, np.float64).ravel()
    return bool(stats.kstest(samples / stddev, "norm").pvalue >= false_alarms)


def accepts_frequency(
    successes: int, trials: int, probability: float, false_alarms: float = FALSE_ALARMS
) -> bool:
    """Whether independent trials succeed with this probability (exact binomial test)."""
    low, high = stats.binom.ppf([false_alarms / 2, 1 - false_alarms / 2], trials, probability)
    return bool(low <= successes <= high)


def accepts_equal_frequencies(
    counts: np.ndarray, trials: int, probability: float, false_alarms: float = FALSE_ALARMS
) -> bool:
    """Whether each of many counts is Bin(trials, probability): neither spread nor bunched (χ²)."""
    counts = np.asarray(counts, np.float64)
    variance = trials * probability * (1 - probability)
    statistic = np.sum((counts - trials * probability) ** 2) / variance
    low, high = stats.chi2.ppf([false_alarms / 2, 1 - false_alarms / 2], counts.size)
    return bool(low <= statistic <= high)


def accepts_uncorrelated(
    left: np.ndarray, right: np.ndarray, false_alarms: float = FALSE_ALARMS
) -> bool:
    """Whether two samples are uncorrelated (Fisher's z transform)."""
    left, right = np.ravel(left), np.ravel(right)
    correlation = np.corrcoef(left, right)[0, 1]
    z = np.arctanh(np.clip(correlation, -1 + 1e-15, 1 - 1e-15)) * np.sqrt(left.size - 3)
    return bool(abs(z) <= stats.norm.isf(false_alarms / 2))


def accepts_covariance(
    samples: np.ndarray, covariance: np.ndarray, false_alarms: float = FALSE_ALARMS
) -> bool:
    """Whether rows of centred Gaussian samples have this covariance.

    Entry (i, j) of the empirical covariance of m rows has variance (Σ_ii Σ_jj + Σ_ij²) / m; all
    entries are compared, each at its share of the false-alarm rate.
    """
    samples = np.asarray(samples, np.float64)
    rows, size = samples.shape
    empirical = samples.T @ samples / rows
    diagonal = np.diag(covariance)
    standard_error = np.sqrt((np.outer(diagonal, diagonal) + covariance**2) / rows)
    limit = stats.norm.isf(false_alarms / (2 * size**2))
    return bool(np.all(np.abs(empirical - covariance) <= limit * standard_error))
