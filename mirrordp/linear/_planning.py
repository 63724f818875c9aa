"""The plan of a fit: how rows are scaled, where the descent starts, and with which settings.

In: public rows, or the bounds that the caller knows, and the noise that the budget allows. Out: a
`Plan`. No private row is read; their number counts as public.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import scipy.sparse

from mirrordp._warn import warn
from mirrordp.data.sources import computed_rows
from mirrordp.linear import tuning
from mirrordp.linear.descent import Rows, gradient_norms, row_gains
from mirrordp.linear.tuning import DescentSettings, PublicObjective
from mirrordp.mirror.families import Family

# The search on public rows need not be secret, and the same rows shall give the same settings.
_PUBLIC_SEED = 0
_GAIN_QUANTILE = 0.95
# The most steps of DP-SGD without public rows.
_MAX_COLD_STEPS = 300


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """The map x ↦ u = ((x − shift) · factor, 1) B, applied to a row before its gradient is taken.

    With a `row_norm_bound` R, a row x that is longer than R is first scaled down to norm R.
    """

    shift: np.ndarray
    factor: np.ndarray
    intercept: bool
    row_norm_bound: float | None = None
    basis: np.ndarray | None = None

    @classmethod
    def of(
        cls, x: np.ndarray, *, intercept: bool, row_norm_bound: float | None, stays_sparse: bool
    ) -> "Scaling":
        """Takes public mean and standard deviation; an indicator is divided by its range instead.

        The ridge assumes that all coefficients have about one size. Effects of categories have it
        per indicator, whether rare or not, and not per standard deviation: divided by its tiny
        standard deviation, a rare indicator would escape the ridge where public rows know least. A
        column that is constant on public rows becomes zero, because they do not tell its scale.

        Without an intercept nothing is shifted, since only an intercept can undo the shift. Nothing
        is either if rows shall stay sparse.
        """
        x = _bounded(x, row_norm_bound)
        shift = x.mean(axis=0) if intercept else np.zeros(x.shape[1])
        with np.errstate(over="ignore"):
            deviation = np.sqrt(np.mean((x - shift) ** 2, axis=0))
        low, high = x.min(axis=0), x.max(axis=0)
        is_indicator = ((x == low) | (x == high)).all(axis=0) & (low < high)
        scale = np.where(is_indicator, high - low, deviation)
        constant = high - low <= 10 * np.finfo(float).eps * np.abs(x).max(axis=0)
        for column in np.flatnonzero(~constant & ~((scale > 0) & np.isfinite(scale))):
            raise ValueError(
                "X_public must hold numbers whose squares are within float64, got "
                f"{low[column]:.3g} to {high[column]:.3g} in column {column}. Use another unit in "
                "X and X_public."
            )
        if not intercept:
            constant &= deviation == 0
        factor = np.where(constant, 0.0, 1 / np.where(constant, 1.0, scale))
        if stays_sparse:
            shift = np.zeros(x.shape[1])
        return cls(shift, factor, intercept, row_norm_bound)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return computed_rows(self._scaled, x)

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (_bounded(x, self.row_norm_bound) - self.shift) * self.factor
            if self.intercept:
                scaled = np.column_stack([scaled, np.ones(len(x))])
            return scaled if self.basis is None else _times(scaled, self.basis)

    def sparsely(self, x: Any) -> Any:
        """Does the same to a CSR array and keeps it sparse, or returns None if that cannot be."""
        basis = np.eye(len(self.factor) + self.intercept) if self.basis is None else self.basis
        if self.shift.any() or not _is_diagonal(basis):
            return None
        diagonal = np.diag(basis)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.row_norm_bound is not None:
                norms = np.sqrt(x.multiply(x).sum(axis=1))
                bounds = self.row_norm_bound / np.maximum(norms, self.row_norm_bound)
                x = scipy.sparse.dia_array((bounds[None], [0]), shape=(len(bounds),) * 2) @ x
            factors = (self.factor * diagonal[: len(self.factor)])[None]
            x = x @ scipy.sparse.dia_array((factors, [0]), shape=(len(self.factor),) * 2)
        if self.intercept:
            ones = np.full((x.shape[0], 1), diagonal[-1])
            x = scipy.sparse.hstack([x, scipy.sparse.csr_array(ones)])
        return scipy.sparse.csr_array(x)

    def original(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns coefficients (m, d) and intercepts (m,) for rows that are not scaled."""
        if self.basis is not None:
            theta = self.basis @ theta
        width = len(self.factor)
        coefficients = theta[:width] * self.factor[:, None]
        intercepts = theta[width] if self.intercept else np.zeros(theta.shape[1])
        return coefficients.T, intercepts - self.shift @ coefficients


def _times(rows: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Returns the product, which takes much less time if the basis is diagonal."""
    return rows * np.diag(basis) if _is_diagonal(basis) else rows @ basis


def _is_diagonal(basis: np.ndarray) -> bool:
    return np.count_nonzero(basis) == np.count_nonzero(np.diag(basis))


def _bounded(x: np.ndarray, row_norm_bound: float | None) -> np.ndarray:
    if row_norm_bound is None:
        return x
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x * (row_norm_bound / np.maximum(norms, row_norm_bound))


class FitPlan(Protocol):
    """What every plan of a fit has.

    Attributes:
        settings: clip norm, step count and learning rate.
        theta: arrays of the shape that is released.
    """

    @property
    def settings(self) -> DescentSettings: ...

    @property
    def theta(self) -> Any: ...


class Plan(NamedTuple):
    """The parts of a fit that are fixed before a private row is read.

    Attributes:
        scaling: what is done to each row.
        theta: Θ_0, in the coordinates of the scaled rows.
        settings: clip norm, step count and learning rate.
        guard: for parameters at the end, a bound on what a row can gain; None without public rows.
    """

    scaling: Scaling
    theta: np.ndarray
    settings: DescentSettings
    guard: Callable[[np.ndarray], float] | None = None


def plan_warm(
    family: Family,
    x: np.ndarray,
    targets: np.ndarray,
    *,
    follows_hessian: bool,
    intercept: bool,
    row_norm_bound: float | None,
    num_private: int,
    one_step_noise: float,
    given: Mapping[str, Any],
    weights: np.ndarray | None = None,
    stays_sparse: bool = False,
) -> Plan:
    """Plans a descent that starts at the public optimum.

    Args:
        family: the family of the loss.
        x: public features.
        targets: public targets, shape (n_pub, m).
        follows_hessian: whether clipping, noise and steps follow the public Hessian.
        intercept: whether to fit an intercept.
        row_norm_bound: R, see `Scaling`.
        num_private: n.
        one_step_noise: σ₁, see `tuning.choose_settings`.
        given: those of l2_clip_norm, num_steps and learning_rate that the caller has fixed.
        weights: the weights of public rows, if any.
        stays_sparse: whether rows shall be scaled without a shift, which would fill them.
    """
    rng = np.random.default_rng(_PUBLIC_SEED)
    scaling = Scaling.of(
        x, intercept=intercept, row_norm_bound=row_norm_bound, stays_sparse=stays_sparse
    )
    rows = Rows(scaling(x), targets, weights=weights)
    penalized = np.arange(rows.features.shape[1]) < x.shape[1]
    public = PublicObjective.cross_validated(
        family, rows, penalized=penalized.astype(float), rng=rng
    )

    def geometry(objective: PublicObjective) -> np.ndarray:
        if follows_hessian:
            return objective.whitening
        # A mean curvature of one, so that learning rates mean the same as with the Hessian.
        return np.eye(len(penalized)) / math.sqrt(np.mean(np.diag(objective.hessian)))

    settings = tuning.choose_settings(
        public, geometry, num_private=num_private, one_step_noise=one_step_noise, rng=rng, **given
    )
    basis = geometry(public)
    theta = np.linalg.solve(basis, public.minimizer)
    if "l2_clip_norm" not in given:
        rows = Rows(rows.features @ basis, targets, weights=weights)
        norms = gradient_norms(family, theta, rows)
        clip = float(np.quantile(norms, settings.l2_clip_norm))
        # If all public residuals are zero, any clip norm will do.
        settings = settings._replace(l2_clip_norm=clip if clip > 0 else 1.0)
    scaling = dataclasses.replace(scaling, basis=basis)

    def guard(end: np.ndarray) -> float:
        gains = row_gains(family, theta, end, Rows(scaling(x), targets))
        return float(np.quantile(np.abs(gains), _GAIN_QUANTILE)) or 1.0

    return Plan(scaling, theta, settings, guard)


def plan_cold(
    family: Family,
    width: int,
    outputs: int,
    *,
    intercept: bool,
    row_norm_bound: float | None,
    num_private: int,
    one_step_noise: float,
    given: Mapping[str, Any],
) -> Plan:
    """Plans DP-SGD from zero, in features as they are or divided by the caller's bound.

    Args:
        family: the family of the loss.
        width: d, the number of features.
        outputs: m, the number of scores per row.
        intercept: whether to fit an intercept.
        row_norm_bound: R, see `Scaling`.
        num_private: n.
        one_step_noise: σ₁, see `tuning.choose_settings`.
        given: those of l2_clip_norm, num_steps and learning_rate that the caller has fixed.
    """
    if row_norm_bound is None:
        warn(
            "without public rows and without row_norm_bound nothing is scaled, and the clip norm "
            "is a guess. Pass X_public and y_public, or bounds that you know beforehand.",
            UserWarning,
        )
    scaling = Scaling(
        shift=np.zeros(width),
        factor=np.full(width, 1.0 if row_norm_bound is None else 1 / row_norm_bound),
        intercept=intercept,
        row_norm_bound=row_norm_bound,
    )
    theta = np.zeros((width + intercept, outputs))
    clip = given.get("l2_clip_norm", 1.0)
    # With a bound, rows have norm at most √2; without one, entries are taken to be of order one.
    smoothness = (2.0 if row_norm_bound else width + 1.0) * family.largest_curvature
    # After T steps the noise has moved Θ by about η σ₁ C T √p / n, which should not exceed one.
    reach = num_private / (one_step_noise * clip * math.sqrt(theta.size))
    steps = given.get("num_steps")
    if steps is None:
        steps = int(np.clip(reach * smoothness, 5, _MAX_COLD_STEPS))
    rate = given.get("learning_rate") or min(1 / smoothness, reach / steps)
    return Plan(scaling, theta, DescentSettings(clip, steps, rate))
