"""Families of generalised linear models: squared error, logistic, multinomial, Poisson, cumulative.

A family is defined by its cumulant function A: the loss of a row with scores s and targets y is
A(s) − ⟨y, s⟩, its expected targets are ∇A(s) and its curvature is ∇²A(s). The mirror maps, the
private descent and the predictions of estimators and stored models all take these from here, so
that estimators and stored models agree on every input, extreme scores included. NumPy arrays are
computed by NumPy and SciPy, all other arrays by JAX.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import scipy.special

# No count could be observed whose logarithm is larger, and the square of exp(100) is still finite.
_LARGEST_LOG_COUNT = 100.0


@dataclasses.dataclass(frozen=True)
class Family:
    """A cumulant function A and its derivatives. Scores have shape (rows, outputs, ...).

    Attributes:
        name: the name of the loss.
        cumulant: A, which sums over axis 1.
        mean: ∇A.
        covariance: ∇²A, from scores (rows, outputs) to (rows, outputs, outputs).
        largest_curvature: a bound on the eigenvalues of ∇²A, or a guess where there is no bound.
    """

    name: str
    cumulant: Callable[[Any], Any]
    mean: Callable[[Any], Any]
    covariance: Callable[[Any], Any]
    largest_curvature: float

    def loss(self, scores: Any, targets: Any) -> Any:
        """Returns A(s) − ⟨y, s⟩ for each row."""
        return self.cumulant(scores) - (_expand(targets, scores) * scores).sum(axis=1)

    def residuals(self, scores: Any, targets: Any) -> Any:
        """Returns ∇A(s) − y for each row."""
        return self.mean(scores) - _expand(targets, scores)

    def curvature(self, scores: np.ndarray) -> np.ndarray:
        """Returns the mean of the diagonal of ∇²A, one number per row."""
        return np.einsum("imm->i", self.covariance(scores)) / scores.shape[1]


def _expand(targets: Any, scores: Any) -> Any:
    """Reshapes targets of shape (rows, outputs) for scores that have further axes behind."""
    return targets.reshape(targets.shape + (1,) * (scores.ndim - 2))


def _libraries(scores: Any) -> tuple[Any, ModuleType]:
    """Returns the array library of the scores, and its module of special functions."""
    if isinstance(scores, np.ndarray):
        return np, scipy.special
    return jnp, jax.scipy.special


def _half_square(scores: Any) -> Any:
    return (0.5 * scores**2).sum(axis=1)


def _identity(scores: Any) -> Any:
    return scores


def _diagonal(slopes: Any) -> Any:
    """Returns matrices (rows, outputs, outputs) with these diagonals."""
    xp, _ = _libraries(slopes)
    return slopes[:, :, None] * xp.eye(slopes.shape[1], dtype=slopes.dtype)


def _one(scores: Any) -> Any:
    xp, _ = _libraries(scores)
    return _diagonal(xp.ones_like(scores))


def _log_one_plus_exp(scores: Any) -> Any:
    xp, _ = _libraries(scores)
    return xp.logaddexp(scores[:, 0], 0.0)


def _sum_of_log_one_plus_exp(scores: Any) -> Any:
    xp, _ = _libraries(scores)
    return xp.logaddexp(scores, 0.0).sum(axis=1)


def _sigmoid(scores: Any) -> Any:
    _, special = _libraries(scores)
    return special.expit(scores)


def _sigmoid_slope(scores: Any) -> Any:
    return _diagonal(_sigmoid(scores) * _sigmoid(-scores))


def _log_sum_exp(scores: Any) -> Any:
    xp, special = _libraries(scores)
    return xp.asarray(special.logsumexp(scores, axis=1))


def _softmax(scores: Any) -> Any:
    _, special = _libraries(scores)
    return special.softmax(scores, axis=1)


def _softmax_covariance(scores: Any) -> Any:
    xp, _ = _libraries(scores)
    mean = _softmax(scores)
    return mean[:, :, None] * xp.eye(mean.shape[1]) - mean[:, :, None] * mean[:, None, :]


def _exp(scores: Any) -> Any:
    xp, _ = _libraries(scores)
    return xp.exp(xp.minimum(scores, _LARGEST_LOG_COUNT))


def _exp_then_line(scores: Any) -> Any:
    """Computes the integral of `_exp`: exp, continued by its tangent where `_exp` is constant.

    The solvers of mirror maps need no guard, because they reject infinite values by themselves.
    """
    score = scores[:, 0]
    if not isinstance(scores, np.ndarray):
        return jnp.exp(score)
    return _exp(score) * (1.0 + np.maximum(score - _LARGEST_LOG_COUNT, 0.0))


def _exp_slope(scores: Any) -> Any:
    return _exp(scores)[:, :, None]


SQUARED_ERROR = Family("squared error", _half_square, _identity, _one, largest_curvature=1.0)
LOGISTIC = Family("logistic", _log_one_plus_exp, _sigmoid, _sigmoid_slope, largest_curvature=0.25)
MULTINOMIAL = Family(
    "multinomial", _log_sum_exp, _softmax, _softmax_covariance, largest_curvature=0.5
)
POISSON = Family("Poisson", _exp_then_line, _exp, _exp_slope, largest_curvature=1.0)
CUMULATIVE = Family(
    "cumulative", _sum_of_log_one_plus_exp, _sigmoid, _sigmoid_slope, largest_curvature=0.25
)
"""One logistic model per threshold between ordered classes: targets say whether y is beyond it."""


def class_probabilities(scores: np.ndarray) -> np.ndarray:
    """Returns the probability of each class, from one score per class.

    A single column of scores stands for two classes: it holds the log odds of the second.
    """
    if scores.shape[1] == 1:
        scores = np.column_stack([np.zeros(len(scores)), scores[:, 0]])
    return MULTINOMIAL.mean(scores)


def ordered_probabilities(scores: np.ndarray) -> np.ndarray:
    """Returns the probability of each of K ordered classes, from the K − 1 scores of `CUMULATIVE`.

    P[y > k] is the sigmoid of score k. Where noise makes it rise with k, it stays at its smallest
    value so far, so that no class has a negative probability.
    """
    beyond = np.minimum.accumulate(CUMULATIVE.mean(scores), axis=1)
    ends = np.ones((len(scores), 1)), np.zeros((len(scores), 1))
    return -np.diff(np.column_stack([ends[0], beyond, ends[1]]), axis=1)
