"""Settings of a private descent, chosen from public rows and the budget alone.

In: public rows and the noise that the budget allows. Out: the start and the geometry of the descent
(`PublicObjective`), and its clip norm, step count and learning rate (`choose_settings`), found by
rehearsing the private run on public rows with the noise that it will have. No private row is read,
so that the choice costs nothing.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.optimize

from mirrordp.linear.descent import (
    ClippedSum,
    Rows,
    descend,
    gradient_norms,
    mean_loss,
    scores_of,
)
from mirrordp.mirror.families import POISSON, SQUARED_ERROR, Family

RELATIVE_RIDGES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
"""Candidates for the ridge, relative to the mean curvature of the loss per feature."""

NUM_STEPS = (8, 24, 64)
LEARNING_RATES = (0.03, 0.1, 0.2, 0.4, 0.8)
CLIP_QUANTILES = (0.6, 0.85, 0.95, 0.98, 0.995, 1.0)

_SMALLEST_EIGENVALUE = 0.01
_FOLDS = 5
_MAX_NEWTON_STEPS = 50
_MAX_NEWTON_SIZE = 400
_MAX_ROWS = 1000
_REPETITIONS = 3
_AS_GOOD_AS_BEST = 0.99


@dataclasses.dataclass(frozen=True, eq=False)
class PublicObjective:
    """The objective Ψ(Θ) = mean weighted loss over public rows + ½ Σ_j ridge_j ‖Θ_j‖².

    Its minimiser is the start of a descent, and its Hessian is the geometry.

    Attributes:
        family: the family of the loss.
        rows: the public rows.
        ridge: the weights ridge_j, shape (d,), which are zero for an intercept.
        init: the start of the minimisation, shape (d, m).
    """

    family: Family
    rows: Rows
    ridge: np.ndarray
    init: np.ndarray

    @functools.cached_property
    def minimizer(self) -> np.ndarray:
        """The minimiser of Ψ, found by a linear system (squared error), Newton or L-BFGS."""
        features, targets = self.rows.features, self.rows.targets
        if self.family == SQUARED_ERROR:
            weighted = self.rows.weighted
            gram = features.T @ weighted(features) / len(features) + np.diag(self.ridge)
            return _solve(gram, features.T @ weighted(targets) / len(features))
        if self.init.size <= _MAX_NEWTON_SIZE:
            return _newton(self)
        penalty = self.ridge[:, None]

        def value_and_grad(flat: np.ndarray) -> tuple[float, np.ndarray]:
            theta = flat.reshape(self.init.shape)
            scores = features @ theta
            losses = self.rows.weighted(self.family.loss(scores, targets))
            value = losses.mean() + 0.5 * np.sum(penalty * theta**2)
            residuals = self.rows.weighted(self.family.residuals(scores, targets))
            return value, (features.T @ residuals / len(features) + penalty * theta).ravel()

        found = scipy.optimize.minimize(
            value_and_grad, self.init.ravel(), jac=True, method="L-BFGS-B",
            options={"maxiter": 500, "gtol": 1e-6},
        )  # fmt: skip
        return found.x.reshape(self.init.shape)

    @functools.cached_property
    def hessian(self) -> np.ndarray:
        """The Hessian ∇²Ψ at the minimiser, shape (d, d), averaged over several outputs."""
        weights = self.rows.weighted(self.family.curvature(self.rows.features @ self.minimizer))
        weighted = self.rows.features * weights[:, None]
        return weighted.T @ self.rows.features / len(self.rows) + np.diag(self.ridge)

    @functools.cached_property
    def whitening(self) -> np.ndarray:
        """The symmetric matrix B = (∇²Ψ)^{-1/2}.

        In features u' = Bu the Hessian is the identity, and a gradient step on Θ' = B⁻¹Θ is the
        mirror step (∇²Ψ)⁻¹ g on Θ. Clipping and noise then follow the geometry too, which is the
        best choice: if the noise is isotropic after a change of coordinates by B, and K = BBᵀ, then
        typical gradients have squared norm tr(KH), and noise of that size costs a loss of
        tr(KH) tr((KH)⁻¹) ≥ d² up to a factor, with equality at K ∝ H⁻¹.
        """
        values, vectors = np.linalg.eigh(self.hessian)
        # Without this, directions in which public rows hardly vary would be scaled without bound.
        values = np.maximum(values, _SMALLEST_EIGENVALUE * max(values.mean(), 1e-300))
        return (vectors / np.sqrt(values)) @ vectors.T

    def over(self, rows: Rows) -> "PublicObjective":
        """Returns the objective over other rows; its minimisation starts at this minimiser."""
        return dataclasses.replace(self, rows=rows, init=self.minimizer)

    @classmethod
    def cross_validated(
        cls, family: Family, rows: Rows, *, penalized: np.ndarray, rng: np.random.Generator
    ) -> "PublicObjective":
        """Returns the objective whose ridge predicts held-out public rows best.

        Args:
            family: the family of the loss.
            rows: the public rows.
            penalized: an array of shape (d,): one for coefficients and zero for an intercept.
            rng: a generator that deals the rows into folds; it need not be secret.
        """
        init = np.zeros((rows.features.shape[1], rows.targets.shape[1]))
        if family == POISSON and not penalized.all():
            # Counts in the thousands are far away from a start with mean one.
            init[np.argmin(penalized)] = np.log(max(rows.targets.mean(), 1e-3))
        curvature = rows.weighted(family.curvature(rows.features @ init))
        level = float(np.mean(curvature[:, None] * rows.features**2)) or 1.0
        # From strong to weak, so that each solution is a good start for the next.
        candidates = [level * ridge for ridge in sorted(RELATIVE_RIDGES, reverse=True)]
        folds = min(_FOLDS, len(rows))
        losses = np.zeros(len(candidates))
        fold = rng.permutation(np.arange(len(rows)) % folds)
        for held_out in range(folds if folds > 1 else 0):
            fitted, validation = rows.take(fold != held_out), rows.take(fold == held_out)
            theta = init
            for index, ridge in enumerate(candidates):
                theta = cls(family, fitted, ridge * penalized, theta).minimizer
                held_out_losses = family.loss(validation.features @ theta, validation.targets)
                losses[index] += validation.weighted(held_out_losses).sum()
        return cls(family, rows, candidates[int(np.argmin(losses))] * penalized, init)


def _solve(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Returns matrix⁻¹ vectors for a positive semidefinite matrix that may be rounded."""
    jitter = 1e-12 * max(float(np.mean(np.diag(matrix))), 1e-300)
    return np.linalg.solve(matrix + jitter * np.eye(len(matrix)), vectors)


def _newton(objective: PublicObjective) -> np.ndarray:
    """Minimises Ψ by Newton's method with step halving."""
    family, rows = objective.family, objective.rows
    features, targets = rows.features, rows.targets
    ridge = objective.ridge[:, None]
    width, outputs = objective.init.shape

    def value_at(theta: np.ndarray) -> float:
        return float(mean_loss(family, theta, rows) + 0.5 * np.sum(ridge * theta**2))

    theta, value = objective.init, value_at(objective.init)
    for _ in range(_MAX_NEWTON_STEPS):
        scores = features @ theta
        residuals = rows.weighted(family.residuals(scores, targets))
        grad = features.T @ residuals / len(rows) + ridge * theta
        weights = rows.weighted(family.covariance(scores)) / len(rows)
        hessian = np.empty((width, outputs, width, outputs))
        for k, l in itertools.combinations_with_replacement(range(outputs), 2):
            block = (features * weights[:, k, l, None]).T @ features
            hessian[:, k, :, l] = hessian[:, l, :, k] = block
        hessian = hessian.reshape(theta.size, theta.size) + np.diag(np.repeat(ridge, outputs))
        direction = _solve(hessian, grad.ravel()).reshape(theta.shape)
        decrease = float(np.sum(grad * direction))
        if decrease <= 1e-10 * (1 + abs(value)):
            break
        rate = 1.0
        while not value_at(theta - rate * direction) <= value - 1e-4 * rate * decrease:
            rate /= 2
            if rate < 1e-8:
                return theta
        theta = theta - rate * direction
        value = value_at(theta)
    return theta


class DescentSettings(NamedTuple):
    """The settings of a private descent, fixed before it begins.

    Attributes:
        l2_clip_norm: C.
        num_steps: T, which is 0 if the private rows are not worth their noise.
        learning_rate: η.
    """

    l2_clip_norm: float
    num_steps: int
    learning_rate: float


def choose_settings(
    public: PublicObjective,
    geometry: Callable[[PublicObjective], np.ndarray],
    *,
    num_private: int,
    one_step_noise: float,
    rng: np.random.Generator,
    l2_clip_norm: float | None = None,
    num_steps: int | None = None,
    learning_rate: float | None = None,
    step_counts: Sequence[int] = NUM_STEPS,
) -> DescentSettings:
    """Chooses clip norm, step count and learning rate from public rows and the budget alone.

    A bootstrap rehearses the private run. The public rows stand for the population, with Ψ (whose
    minimiser is known) in place of the private loss; a resample of them stands for the public rows
    that give the start and the geometry. From there every combination of candidates descends on
    clipped gradients of the population, to which are added

    - the noise of the private run, of standard deviation σ₁√T·C/n in each coordinate;
    - one fixed deviation, because n private rows are a sample too: its covariance is that of a
      clipped gradient over n, taken as isotropic.

    The candidate with the largest average gain in Ψ over several resamples is chosen. If none has
    a gain, there is no descent.

    Args:
        public: Ψ, in standardised features.
        geometry: a function that finds the change of coordinates B from an objective.
        num_private: n.
        one_step_noise: σ₁, the noise multiplier that spends the whole budget in one step. By exact
            composition T steps need σ₁√T.
        rng: a generator for resamples and noise; it need not be secret.
        l2_clip_norm: C, if it is given. Otherwise the result's `l2_clip_norm` is a quantile of the
            public gradient norms.
        num_steps: T, if it is given.
        learning_rate: η, if it is given.
        step_counts: candidates for T, if it is not given.
    """
    clips = np.array(CLIP_QUANTILES if l2_clip_norm is None else (l2_clip_norm,))
    rates = np.array(LEARNING_RATES if learning_rate is None else (learning_rate,))
    if num_steps is not None:
        step_counts = (num_steps,)
    clips, rates = (axis.ravel() for axis in np.meshgrid(clips, rates, indexing="ij"))
    gains = np.zeros((len(step_counts), len(rates)))
    num_public = len(public.rows)
    if num_public > _MAX_ROWS:
        public = public.over(public.rows.take(rng.permutation(num_public)[:_MAX_ROWS]))
    for _ in range(_REPETITIONS):
        resample = public.over(
            public.rows.take(rng.integers(len(public.rows), size=len(public.rows)))
        )
        basis = geometry(resample)
        # A resample of fewer rows has a larger error than all public rows have.
        error = math.sqrt(len(public.rows) / num_public) * (resample.minimizer - public.minimizer)
        start = np.linalg.solve(basis, public.minimizer + error)
        rehearsal = _Rehearsal(public, basis)
        limits = clips
        if l2_clip_norm is None:
            limits = np.quantile(gradient_norms(public.family, start, rehearsal.rows), clips)
        limits = np.maximum(limits, 1e-30)
        deviation = rng.normal(size=(*start.shape, 1)) / math.sqrt(start.size * num_private)
        for index, steps in enumerate(step_counts):
            scale = one_step_noise * math.sqrt(steps) * limits / num_private
            gains[index] += rehearsal.gain(start, limits, rates, steps, scale, deviation, rng)
    gains = np.nan_to_num(gains / _REPETITIONS, nan=-np.inf)
    best = gains.max()
    if best <= 0 and num_steps is None and learning_rate is None:
        return DescentSettings(float(clips[0]), 0, 0.0)
    # Among candidates that are about equally good, take the one that can move furthest: where noise
    # does not matter, the private optimum may still be further away than expected.
    good = gains >= best - (1 - _AS_GOOD_AS_BEST) * abs(best)
    reach = np.where(good, np.array(step_counts)[:, None] * rates, 0.0)
    furthest = np.where(reach == reach.max(), gains, -np.inf)
    row, column = np.unravel_index(int(np.argmax(furthest)), gains.shape)
    return DescentSettings(float(clips[column]), int(step_counts[int(row)]), float(rates[column]))


class _Rehearsal:
    """A descent on the public objective in place of the private one, in float32 for speed."""

    def __init__(self, public: PublicObjective, basis: np.ndarray):
        self._family = public.family
        weights = public.rows.weights
        self.rows = Rows(
            (public.rows.features @ basis).astype(np.float32),
            public.rows.targets.astype(np.float32),
            weights=None if weights is None else weights.astype(np.float32),
        )
        self._ridge = (basis.T @ (public.ridge[:, None] * basis)).astype(np.float32)

    def _value(self, theta: np.ndarray) -> np.ndarray:
        penalty = np.sum(theta * scores_of(self._ridge, theta), axis=(0, 1))
        return mean_loss(self._family, theta, self.rows) + 0.5 * penalty

    def gain(self, start, limits, rates, num_steps, noise_scale, deviation, rng) -> np.ndarray:
        """Returns by how much each candidate lowers the objective."""
        limits, rates, noise_scale = (v.astype(np.float32) for v in (limits, rates, noise_scale))
        clipped_sum = ClippedSum(self._family, limits)
        theta = np.repeat(start[:, :, None], len(limits), axis=2).astype(np.float32)
        norms = gradient_norms(self._family, start.astype(np.float32), self.rows)
        spread = np.sqrt(np.mean(np.minimum(norms[:, None], limits) ** 2, axis=0))
        fixed = (deviation * spread).astype(np.float32)

        def gradient(theta: np.ndarray) -> np.ndarray:
            # All candidates get the same noise, so that they differ by their settings alone.
            noise = rng.normal(size=(*theta.shape[:2], 1)).astype(np.float32) * noise_scale
            mean = clipped_sum(theta, self.rows) / np.float32(len(self.rows))
            return mean + scores_of(self._ridge, theta) + fixed + noise

        with np.errstate(over="ignore", invalid="ignore"):
            end = descend(gradient, theta, num_steps=num_steps, learning_rate=rates)
            return self._value(theta[:, :, :1]) - self._value(end)
