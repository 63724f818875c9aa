"""Generalised linear models in closed form: the private descent behind the estimators.

In: rows u_i and targets y_i, already scaled by rules that come from public data. Out: parameters.
The loss of a row is A(s_i) − ⟨y_i, s_i⟩ with scores s_i = Θᵀu_i, so that its gradient is the outer
product u_i ⊗ r_i of row and residual r_i = ∇A(s_i) − y_i. Its norm is ‖u_i‖·‖r_i‖, and the clipped
sum of Algorithm 1 (lines 3 and 4) is one matrix product,

    Σ_i clip(u_i ⊗ r_i, C) = Uᵀ diag(c) R,     c_i = min(1, C / (‖u_i‖ ‖r_i‖)).

`private_descent` is Algorithm 1 with full batches on it. `choose_settings` finds clip norm, step
count and learning rate by acting the private run out on public rows, with the noise that it would
have; it costs nothing. All of this is float64 NumPy: two passes over the rows per step leave
nothing for a compiler to gain.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special

from mirrordp import _validate
from mirrordp.privacy import sums
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import Noise, interruptible
from mirrordp.types import PyTree

# exp of more is no count that anyone could observe, and its square is still finite.
_LARGEST_LOG_COUNT = 100.0
_LARGEST_NORM, _SMALLEST_NORM = 1e140, 1e-140
_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class Family:
    """A cumulant function A and what follows from it. Scores have shape (rows, outputs, ...).

    Attributes:
        name: of the loss.
        cumulant: A, over axis 1.
        mean: ∇A.
        covariance: ∇²A, from scores (rows, outputs) to (rows, outputs, outputs).
        largest_curvature: a bound on the eigenvalues of ∇²A; a guess where there is none.
    """

    name: str
    cumulant: Callable[[np.ndarray], np.ndarray]
    mean: Callable[[np.ndarray], np.ndarray]
    covariance: Callable[[np.ndarray], np.ndarray]
    largest_curvature: float

    def loss(self, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """A(s) − ⟨y, s⟩ of each row."""
        return self.cumulant(scores) - np.sum(_expand(targets, scores) * scores, axis=1)

    def residuals(self, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """∇A(s) − y."""
        return self.mean(scores) - _expand(targets, scores)

    def curvature(self, scores: np.ndarray) -> np.ndarray:
        """The diagonal of ∇²A averaged over outputs: one number per row."""
        return np.einsum("imm->i", self.covariance(scores)) / scores.shape[1]


def _expand(targets: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Targets of shape (rows, outputs) against scores with further axes behind."""
    return targets.reshape(targets.shape + (1,) * (scores.ndim - 2))


def _softmax(scores: np.ndarray) -> np.ndarray:
    return scipy.special.softmax(scores, axis=1)


def _softmax_covariance(scores: np.ndarray) -> np.ndarray:
    mean = _softmax(scores)
    return mean[:, :, None] * np.eye(mean.shape[1]) - mean[:, :, None] * mean[:, None, :]


def _exp(scores: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(scores, _LARGEST_LOG_COUNT))


SQUARED_ERROR = Family(
    "squared error",
    cumulant=lambda s: 0.5 * s[:, 0] ** 2,
    mean=lambda s: s,
    covariance=lambda s: np.ones_like(s[:, :, None]),
    largest_curvature=1.0,
)
LOGISTIC = Family(
    "logistic",
    cumulant=lambda s: np.logaddexp(0.0, s[:, 0]),
    mean=scipy.special.expit,
    covariance=lambda s: (scipy.special.expit(s) * scipy.special.expit(-s))[:, :, None],
    largest_curvature=0.25,
)
MULTINOMIAL = Family(
    "multinomial",
    cumulant=lambda s: np.asarray(scipy.special.logsumexp(s, axis=1)),
    mean=_softmax,
    covariance=_softmax_covariance,
    largest_curvature=0.5,
)
POISSON = Family(
    "Poisson",
    cumulant=lambda s: _exp(s[:, 0]),
    mean=_exp,
    covariance=lambda s: _exp(s)[:, :, None],
    largest_curvature=1.0,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Scaled rows and their targets.

    Attributes:
        features: U, shape (n, d), an intercept's column included. A row that overflowed becomes
            zero and does not count: zero times infinity would spoil every sum.
        targets: Y, shape (n, m).
        counts: which rows take part; the others have gradient zero. None: all.
    """

    features: np.ndarray
    targets: np.ndarray
    counts: np.ndarray | None = None

    def __post_init__(self):
        finite = np.asarray(np.isfinite(self.features).all(axis=1))
        if not finite.all():
            counts = finite if self.counts is None else self.counts & finite
            object.__setattr__(self, "counts", counts)
            object.__setattr__(self, "features", np.where(finite[:, None], self.features, 0.0))

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: np.ndarray) -> "Rows":
        """Some of the rows."""
        counts = None if self.counts is None else self.counts[rows]
        return Rows(self.features[rows], self.targets[rows], counts)

    @functools.cached_property
    def norms(self) -> np.ndarray:
        """‖u_i‖."""
        with np.errstate(over="ignore"):
            return np.linalg.norm(self.features, axis=1)


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """Σ_i clip(u_i ⊗ r_i, C) in closed form, and its sensitivity.

    The same guarantees as `mirrordp.clipped_grad`: a row adds a matrix of norm at most C that
    depends on this row only; one that does not count, or whose gradient norm is not finite (or so
    large or small that float64 cannot tell it), adds exactly zero. Rows are summed in blocks of b,
    in float64, and the blocks exactly (`privacy.sums`), so that a row changes the rounding of its
    block alone: by at most 2b²·2⁻⁵³ C, which is part of `sums.RESERVE`.

    Args:
        family: the loss.
        l2_clip_norm: C; an array of k values goes with parameters of shape (d, m, k), for a trial
            on public rows, which are summed as they are.
    """

    family: Family
    l2_clip_norm: float | np.ndarray

    def __call__(self, theta: np.ndarray, rows: Rows) -> np.ndarray:
        """The sum at Θ of shape (d, m) or, k of them side by side, (d, m, k)."""
        # Overflow is an infinite norm, which the next lines know how to treat.
        with np.errstate(over="ignore", invalid="ignore"):
            residuals = self.family.residuals(_scores(rows.features, theta), rows.targets)
            row_norms = rows.norms.reshape((-1,) + (1,) * (theta.ndim - 2))
            # Squares that underflow would hide a residual that a long row makes count again.
            norms = np.maximum(np.linalg.norm(residuals, axis=1), _SMALLEST_NORM) * row_norms
            # Beyond these the squares behind a norm, or the factor, lose their digits.
            keep = np.isfinite(norms) & (norms <= _LARGEST_NORM) & (row_norms >= _SMALLEST_NORM)
            if rows.counts is not None:
                keep &= rows.counts.reshape((-1,) + (1,) * (theta.ndim - 2))
            limit = self.l2_clip_norm * (1 - sums.RESERVE)
            factors = limit / np.maximum(norms, limit)
            clipped = np.where(keep[:, None], residuals * factors[:, None], 0.0)
        clipped = clipped.reshape(len(rows), -1)
        if isinstance(self.l2_clip_norm, np.ndarray):
            return (rows.features.T @ clipped).reshape(theta.shape)
        grain = 2.0 ** sums.grain_exponent(self.l2_clip_norm)
        total = np.zeros((len(theta), clipped.shape[1]), np.int64)
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            total += np.trunc(rows.features[block].T @ clipped[block] / grain).astype(np.int64)
        return (grain * total).reshape(theta.shape)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """The largest distance between the sums of neighbouring data sets."""
        _validate.instance_of(Adjacency, adjacency=adjacency)
        return adjacency.distance * float(np.max(self.l2_clip_norm))


def _scores(features: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Θᵀu for every row, for parameters with any number of axes behind the first."""
    return (features @ theta.reshape(len(theta), -1)).reshape((-1, *theta.shape[1:]))


def gradient_norms(family: Family, theta: np.ndarray, rows: Rows) -> np.ndarray:
    """‖u_i‖·‖r_i‖ of each row, without noise: for public rows."""
    residuals = family.residuals(_scores(rows.features, theta), rows.targets)
    return rows.norms * np.linalg.norm(residuals, axis=1)


def mean_loss(family: Family, theta: np.ndarray, rows: Rows) -> np.ndarray:
    """The mean loss over the rows, one number per parameter matrix."""
    return family.loss(_scores(rows.features, theta), rows.targets).mean(axis=0)


def private_descent(
    family: Family,
    theta: np.ndarray,
    rows: Rows,
    mechanism: Mechanism,
    *,
    learning_rate: float,
    key: jax.Array,
) -> np.ndarray:
    """Full-batch private gradient descent from Θ_0, and the average of its iterates:

        Θ_{t+1} = Θ_t − η (Σ_i clip(u_i ⊗ r_i(Θ_t), C) + N(0, σ²C²)) / n,    t = 0, ..., T − 1.

    The first ⌊T/8⌋ iterates are left out of the average. In features scaled by the inverse root of
    a Hessian this is mirror descent on the quadratic map with that Hessian.

    Args:
        family: the loss.
        theta: Θ_0, which must not come from private rows.
        rows: the private rows.
        mechanism: decides T, C, σ and n. Its noise is added here, once per step, in float64.
        learning_rate: η.
        key: seeds the noise; must be secret.
    """
    expected = mechanism.sampling.num_examples
    if mechanism.sampling.sampling_prob != 1 or expected != len(rows):
        raise ValueError(
            f"the descent needs a mechanism of full batches of {len(rows)} rows, got "
            f"{mechanism.sampling.name} sampling of {expected}. Use FullBatch.of({len(rows)})."
        )
    sums.check_count(len(rows))
    clipped_sum = ClippedSum(family, mechanism.l2_clip_norm)
    add_noise = _NoiseStream(mechanism, theta.size, key)

    def gradient(theta: np.ndarray) -> np.ndarray:
        return mechanism.mean(add_noise(clipped_sum(theta, rows)))

    return descend(gradient, theta, num_steps=mechanism.num_steps, learning_rate=learning_rate)


class _NoiseStream:
    """Adds a mechanism's noise to one sum after the other, in float64.

    The privatizer runs in units of the noise, σC (s/(σC) + N(0, 1)), on a vector padded to a round
    length: one compiled function then serves every σ and C, and most numbers of parameters. Secure
    noise is added to the sum as it is: what its lattice costs was charged for σC and p.
    """

    def __init__(self, mechanism: Mechanism, size: int, key: jax.Array):
        _validate.positive("Without noise there is no privacy.", noise=mechanism.noise_stddev)
        self._unit, self._stddev, length = mechanism.noise_stddev, 1.0, 64 * -(-size // 64)
        if mechanism.is_secure:
            self._unit, self._stddev, length = 1.0, mechanism.noise_stddev, size
        self._noise = mechanism.noise
        self._padded = np.zeros(length)
        with jax.enable_x64(True):
            self._state = self._noise.init(key, jnp.asarray(self._padded))

    def __call__(self, clipped_sum: np.ndarray) -> np.ndarray:
        padded = self._padded.copy()
        padded[: clipped_sum.size] = clipped_sum.ravel() / self._unit
        with jax.enable_x64(True), interruptible():
            noisy, self._state = _add_noise(
                self._noise, self._stddev, jnp.asarray(padded), self._state
            )
            noisy = np.asarray(noisy)
        return self._unit * noisy[: clipped_sum.size].reshape(clipped_sum.shape)


@functools.partial(jax.jit, static_argnames=("noise", "stddev"))
def _add_noise(
    noise: Noise, stddev: float, clipped_sum: jax.Array, state: PyTree
) -> tuple[Any, PyTree]:
    return noise.add(clipped_sum, state, stddev)


def descend(
    gradient: Callable[[np.ndarray], np.ndarray],
    theta: np.ndarray,
    *,
    num_steps: int,
    learning_rate: float | np.ndarray,
) -> np.ndarray:
    """Θ ← Θ − η · gradient(Θ), `num_steps` times; the mean of all but the first ⌊T/8⌋ iterates."""
    first = num_steps // 8
    total = np.zeros_like(theta)
    for step in range(num_steps):
        theta = theta - learning_rate * gradient(theta)
        if step >= first:
            total += theta
    return total / (num_steps - first)


@dataclasses.dataclass(frozen=True, eq=False)
class PublicObjective:
    """Ψ(Θ) = mean loss over public rows + ½ Σ_j ridge_j ‖Θ_j‖²: start and geometry of a descent.

    Attributes:
        family: the loss.
        rows: public rows.
        ridge: shape (d,); zero for an intercept.
        init: where its minimisation starts, shape (d, m).
    """

    family: Family
    rows: Rows
    ridge: np.ndarray
    init: np.ndarray

    @functools.cached_property
    def minimizer(self) -> np.ndarray:
        """argmin Ψ: a linear system for squared error, else by Newton's method or L-BFGS."""
        features, targets = self.rows.features, self.rows.targets
        if self.family is SQUARED_ERROR:
            gram = features.T @ features / len(features) + np.diag(self.ridge)
            return _solve(gram, features.T @ targets / len(features))
        if self.init.size <= _MAX_NEWTON_SIZE:
            return _newton(self)
        penalty = self.ridge[:, None]

        def value_and_grad(flat: np.ndarray) -> tuple[float, np.ndarray]:
            theta = flat.reshape(self.init.shape)
            scores = features @ theta
            value = self.family.loss(scores, targets).mean() + 0.5 * np.sum(penalty * theta**2)
            residuals = self.family.residuals(scores, targets)
            return value, (features.T @ residuals / len(features) + penalty * theta).ravel()

        found = scipy.optimize.minimize(
            value_and_grad, self.init.ravel(), jac=True, method="L-BFGS-B",
            options={"maxiter": 500, "gtol": 1e-6},
        )  # fmt: skip
        return found.x.reshape(self.init.shape)

    @functools.cached_property
    def hessian(self) -> np.ndarray:
        """∇²Ψ at the minimiser, shape (d, d); averaged over outputs where there are several."""
        weights = self.family.curvature(self.rows.features @ self.minimizer)
        weighted = self.rows.features * weights[:, None]
        return weighted.T @ self.rows.features / len(self.rows) + np.diag(self.ridge)

    @functools.cached_property
    def whitening(self) -> np.ndarray:
        """B = (∇²Ψ)^{-1/2}, symmetric.

        In features u' = Bu the Hessian is the identity, and a gradient step on Θ' = B⁻¹Θ is the
        mirror step (∇²Ψ)⁻¹ g on Θ. Clipping and noise then follow the geometry too, which is the
        best choice: with noise that is isotropic after a change of coordinates by B, K = BBᵀ,
        typical gradients have squared norm tr(KH), and noise of that size costs a loss of
        tr(KH) tr((KH)⁻¹) ≥ d² up to a factor, with equality at K ∝ H⁻¹.
        """
        values, vectors = np.linalg.eigh(self.hessian)
        # Directions in which public rows hardly vary would otherwise be scaled without bound.
        values = np.maximum(values, _SMALLEST_EIGENVALUE * max(values.mean(), 1e-300))
        return (vectors / np.sqrt(values)) @ vectors.T

    def over(self, rows: Rows) -> "PublicObjective":
        """The same over other rows, minimised from here."""
        return dataclasses.replace(self, rows=rows, init=self.minimizer)

    @classmethod
    def cross_validated(
        cls, family: Family, rows: Rows, *, penalized: np.ndarray, rng: np.random.Generator
    ) -> "PublicObjective":
        """The objective whose ridge predicts held-out public rows best.

        Args:
            family: the loss.
            rows: public rows.
            penalized: shape (d,), one for coefficients and zero for an intercept.
            rng: deals the rows into folds; no secret.
        """
        init = np.zeros((rows.features.shape[1], rows.targets.shape[1]))
        if family is POISSON and not penalized.all():
            # From a mean of one, counts in the thousands are a long way.
            init[np.argmin(penalized)] = np.log(max(rows.targets.mean(), 1e-3))
        curvature = family.curvature(rows.features @ init)
        level = float(np.mean(curvature[:, None] * rows.features**2)) or 1.0
        # Weak after strong, so that each is a start for the next.
        candidates = [level * ridge for ridge in sorted(RELATIVE_RIDGES, reverse=True)]
        folds = min(_FOLDS, len(rows))
        losses = np.zeros(len(candidates))
        fold = rng.permutation(np.arange(len(rows)) % folds)
        for held_out in range(folds if folds > 1 else 0):
            fitted, validation = rows.take(fold != held_out), rows.take(fold == held_out)
            theta = init
            for index, ridge in enumerate(candidates):
                theta = cls(family, fitted, ridge * penalized, theta).minimizer
                losses[index] += family.loss(validation.features @ theta, validation.targets).sum()
        return cls(family, rows, candidates[int(np.argmin(losses))] * penalized, init)


def _solve(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """matrix⁻¹ vectors for a positive semidefinite matrix; rounding may make it look indefinite."""
    jitter = 1e-12 * max(float(np.mean(np.diag(matrix))), 1e-300)
    return np.linalg.solve(matrix + jitter * np.eye(len(matrix)), vectors)


def _newton(objective: PublicObjective) -> np.ndarray:
    """argmin Ψ by Newton's method with step halving."""
    family, rows = objective.family, objective.rows
    features, targets = rows.features, rows.targets
    ridge = objective.ridge[:, None]
    width, outputs = objective.init.shape

    def value_at(theta: np.ndarray) -> float:
        return float(mean_loss(family, theta, rows) + 0.5 * np.sum(ridge * theta**2))

    theta, value = objective.init, value_at(objective.init)
    for _ in range(_MAX_NEWTON_STEPS):
        scores = features @ theta
        grad = features.T @ family.residuals(scores, targets) / len(rows) + ridge * theta
        weights = family.covariance(scores) / len(rows)
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


RELATIVE_RIDGES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
"""Candidates for the ridge, over the mean curvature of the loss per feature."""

_SMALLEST_EIGENVALUE = 0.01
_FOLDS = 5
_MAX_NEWTON_STEPS = 50
_MAX_NEWTON_SIZE = 400


class Settings(NamedTuple):
    """What a private descent needs to know beforehand.

    Attributes:
        l2_clip_norm: C.
        num_steps: T; 0 if the private rows are not worth their noise.
        learning_rate: η.
    """

    l2_clip_norm: float
    num_steps: int
    learning_rate: float


NUM_STEPS = (8, 24, 64)
LEARNING_RATES = (0.03, 0.1, 0.2, 0.4, 0.8)
CLIP_QUANTILES = (0.6, 0.85, 0.95, 0.98, 0.995, 1.0)
_MAX_ROWS = 1000
_REPETITIONS = 3
_AS_GOOD_AS_BEST = 0.99


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
) -> Settings:
    """Clip norm, step count and learning rate, from public rows and the budget alone.

    A bootstrap acts the private run out. The public rows are the population, with Ψ as its loss
    (whose minimiser is known) in place of the private one; a resample of them plays the public
    rows that a start and a geometry come from. From there every combination of candidates descends
    on clipped gradients of the population with

    - the noise of the private run, of standard deviation σ₁√T·C/n in each coordinate;
    - one fixed deviation, since n private rows are a sample too: its covariance is that of a
      clipped gradient over n, taken as isotropic;

    and is judged by Ψ. The average gain over several resamples decides; no gain means no descent.

    Args:
        public: Ψ, in standardised features.
        geometry: the change of coordinates B found from an objective.
        num_private: n.
        one_step_noise: σ₁, the noise multiplier that spends the whole budget in one step. Exact
            composition makes it σ₁√T for T steps.
        rng: for resamples and noise; no secret.
        l2_clip_norm: C, if it is given.
        num_steps: T, if it is given.
        learning_rate: η, if it is given.
    """
    clips = np.array(CLIP_QUANTILES if l2_clip_norm is None else (l2_clip_norm,))
    rates = np.array(LEARNING_RATES if learning_rate is None else (learning_rate,))
    step_counts = NUM_STEPS if num_steps is None else (num_steps,)
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
        # A resample of fewer rows errs more than all public rows do.
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
        return Settings(float(clips[0]), 0, 0.0)
    # Of candidates that promise the same take the one that would get furthest: where noise does not
    # matter, a private optimum that is further away than expected is what can still go wrong.
    good = gains >= best - (1 - _AS_GOOD_AS_BEST) * abs(best)
    reach = np.where(good, np.array(step_counts)[:, None] * rates, 0.0)
    furthest = np.where(reach == reach.max(), gains, -np.inf)
    row, column = np.unravel_index(int(np.argmax(furthest)), gains.shape)
    return Settings(float(clips[column]), int(step_counts[row]), float(rates[column]))


class _Rehearsal:
    """Descent on the public objective in place of the private one, in float32: it is a trial."""

    def __init__(self, public: PublicObjective, basis: np.ndarray):
        self._family = public.family
        self.rows = Rows(
            (public.rows.features @ basis).astype(np.float32),
            public.rows.targets.astype(np.float32),
        )
        self._ridge = (basis.T @ (public.ridge[:, None] * basis)).astype(np.float32)

    def _value(self, theta: np.ndarray) -> np.ndarray:
        penalty = np.sum(theta * _scores(self._ridge, theta), axis=(0, 1))
        return mean_loss(self._family, theta, self.rows) + 0.5 * penalty

    def gain(self, start, limits, rates, num_steps, noise_scale, deviation, rng) -> np.ndarray:
        """By how much each candidate lowers the objective."""
        limits, rates, noise_scale = (v.astype(np.float32) for v in (limits, rates, noise_scale))
        clipped_sum = ClippedSum(self._family, limits)
        theta = np.repeat(start[:, :, None], len(limits), axis=2).astype(np.float32)
        norms = gradient_norms(self._family, start.astype(np.float32), self.rows)
        spread = np.sqrt(np.mean(np.minimum(norms[:, None], limits) ** 2, axis=0))
        fixed = (deviation * spread).astype(np.float32)

        def gradient(theta: np.ndarray) -> np.ndarray:
            # The same noise for all candidates, so that they differ in what matters.
            noise = rng.normal(size=(*theta.shape[:2], 1)).astype(np.float32) * noise_scale
            mean = clipped_sum(theta, self.rows) / np.float32(len(self.rows))
            return mean + _scores(self._ridge, theta) + fixed + noise

        with np.errstate(over="ignore", invalid="ignore"):
            end = descend(gradient, theta, num_steps=num_steps, learning_rate=rates)
            return self._value(theta[:, :, :1]) - self._value(end)
