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
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.special

from mirrordp import _validate
from mirrordp.accounting import Adjacency
from mirrordp.mechanism import Mechanism

# exp of more is no count that anyone could observe, and its square is still finite.
_LARGEST_LOG_COUNT = 100.0


@dataclasses.dataclass(frozen=True)
class Family:
    """A cumulant function A and what follows from it. Scores have shape (rows, outputs, ...).

    Attributes:
        name: of the loss.
        cumulant: A, over axis 1.
        mean: ∇A.
        curvature: the diagonal of ∇²A averaged over outputs, one number per row: what the Hessian
            of the loss weighs the row with.
    """

    name: str
    cumulant: Callable[[np.ndarray], np.ndarray]
    mean: Callable[[np.ndarray], np.ndarray]
    curvature: Callable[[np.ndarray], np.ndarray]

    def loss(self, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """A(s) − ⟨y, s⟩ of each row."""
        return self.cumulant(scores) - np.sum(_expand(targets, scores) * scores, axis=1)

    def residuals(self, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """∇A(s) − y."""
        return self.mean(scores) - _expand(targets, scores)


def _expand(targets: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Targets of shape (rows, outputs) against scores with further axes behind."""
    return targets.reshape(targets.shape + (1,) * (scores.ndim - 2))


def _softmax(scores: np.ndarray) -> np.ndarray:
    return scipy.special.softmax(scores, axis=1)


def _exp(scores: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(scores, _LARGEST_LOG_COUNT))


SQUARED_ERROR = Family(
    "squared error",
    cumulant=lambda s: 0.5 * s[:, 0] ** 2,
    mean=lambda s: s,
    curvature=lambda s: np.ones_like(s[:, 0]),
)
LOGISTIC = Family(
    "logistic",
    cumulant=lambda s: np.logaddexp(0.0, s[:, 0]),
    mean=scipy.special.expit,
    curvature=lambda s: scipy.special.expit(s[:, 0]) * scipy.special.expit(-s[:, 0]),
)
MULTINOMIAL = Family(
    "multinomial",
    cumulant=lambda s: scipy.special.logsumexp(s, axis=1),
    mean=_softmax,
    curvature=lambda s: np.mean(_softmax(s) * (1 - _softmax(s)), axis=1),
)
POISSON = Family(
    "Poisson",
    cumulant=lambda s: _exp(s[:, 0]),
    mean=_exp,
    curvature=lambda s: _exp(s[:, 0]),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Scaled rows and their targets.

    Attributes:
        features: U, shape (n, d), an intercept's column included.
        targets: Y, shape (n, m).
        counts: which rows take part; the others have gradient zero. None: all.
    """

    features: np.ndarray
    targets: np.ndarray
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: np.ndarray) -> "Rows":
        """Some of the rows."""
        counts = None if self.counts is None else self.counts[rows]
        return Rows(self.features[rows], self.targets[rows], counts)

    @functools.cached_property
    def norms(self) -> np.ndarray:
        """‖u_i‖."""
        return np.linalg.norm(self.features, axis=1)


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """Σ_i clip(u_i ⊗ r_i, C) in closed form, and its sensitivity.

    The same guarantees as `mirrordp.ClippedGrad`: a row adds a matrix of norm at most C that
    depends on this row only; one that does not count, or whose gradient norm is not finite, adds
    exactly zero.

    Args:
        family: the loss.
        l2_clip_norm: C; an array of k values goes with parameters of shape (d, m, k).
    """

    family: Family
    l2_clip_norm: float | np.ndarray

    def __call__(self, theta: np.ndarray, rows: Rows) -> np.ndarray:
        """The sum at Θ of shape (d, m) or, k of them side by side, (d, m, k)."""
        # Overflow is an infinite norm, which the next lines know how to treat.
        with np.errstate(over="ignore", invalid="ignore"):
            residuals = self.family.residuals(_scores(rows.features, theta), rows.targets)
            row_norms = rows.norms.reshape((-1,) + (1,) * (theta.ndim - 2))
            norms = np.linalg.norm(residuals, axis=1) * row_norms
            factors = self.l2_clip_norm / np.maximum(norms, self.l2_clip_norm)
        keep = np.isfinite(norms)
        if rows.counts is not None:
            keep &= rows.counts.reshape((-1,) + (1,) * (theta.ndim - 2))
        clipped = np.where(keep[:, None], residuals * np.where(keep, factors, 0.0)[:, None], 0.0)
        return (rows.features.T @ clipped.reshape(len(rows), -1)).reshape(theta.shape)

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
    """Full-batch private gradient descent from Θ; returns the average of the last half:

        Θ_{t+1} = Θ_t − η (Σ_i clip(u_i ⊗ r_i(Θ_t), C) + N(0, σ²C²)) / n,    t = 0, ..., T − 1,

    and of Θ_1, ..., Θ_T the last ⌈T/2⌉ are averaged. In features scaled by the inverse root of a
    Hessian it is mirror descent on the quadratic map with that Hessian.

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
    clipped_sum = ClippedSum(family, mechanism.l2_clip_norm)
    with jax.enable_x64(True):
        privatizer = mechanism.privatizer(key)
        state = privatizer.init(jnp.asarray(theta, jnp.float64))
        add_noise = jax.jit(privatizer.update)

    def gradient(theta: np.ndarray) -> np.ndarray:
        nonlocal state
        with jax.enable_x64(True):
            noisy_sum, state = add_noise(jnp.asarray(clipped_sum(theta, rows)), state)
            return np.asarray(mechanism.mean(noisy_sum))

    return descend(gradient, theta, num_steps=mechanism.num_steps, learning_rate=learning_rate)


def descend(
    gradient: Callable[[np.ndarray], np.ndarray],
    theta: np.ndarray,
    *,
    num_steps: int,
    learning_rate: float | np.ndarray,
) -> np.ndarray:
    """Θ ← Θ − η · gradient(Θ), `num_steps` times; the mean of the last half of the iterates."""
    first = num_steps // 2
    total = np.zeros_like(theta)
    for step in range(num_steps):
        theta = theta - learning_rate * gradient(theta)
        if step >= first:
            total += theta
    return total / (num_steps - first)


def public_fit(
    family: Family, rows: Rows, *, ridge: float, penalized: np.ndarray, init: np.ndarray
) -> np.ndarray:
    """argmin over Θ of the mean loss + ½ ridge Σ_j penalized_j ‖Θ_j‖², by L-BFGS.

    Args:
        family: the loss.
        rows: public rows.
        ridge: the weight of the penalty.
        penalized: shape (d,), one for coefficients and zero for an intercept.
        init: where to start, shape (d, m).
    """
    weights = ridge * penalized[:, None]
    if family is SQUARED_ERROR:
        gram = rows.features.T @ rows.features / len(rows) + np.diag(ridge * penalized)
        moment = rows.features.T @ rows.targets / len(rows)
        return scipy.linalg.lstsq(gram, moment)[0]

    def value_and_grad(flat: np.ndarray) -> tuple[float, np.ndarray]:
        theta = flat.reshape(init.shape)
        scores = rows.features @ theta
        value = family.loss(scores, rows.targets).mean() + 0.5 * np.sum(weights * theta**2)
        residuals = family.residuals(scores, rows.targets)
        grad = rows.features.T @ residuals / len(rows) + weights * theta
        return float(value), grad.ravel()

    found = scipy.optimize.minimize(
        value_and_grad, init.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 500}
    )
    return found.x.reshape(init.shape)


def choose_ridge(
    family: Family,
    rows: Rows,
    *,
    penalized: np.ndarray,
    candidates: Sequence[float],
    init: np.ndarray,
    rng: np.random.Generator,
    folds: int = 5,
) -> float:
    """The candidate with the least loss under cross-validation on public rows."""
    folds = min(folds, len(rows))
    if folds < 2:
        return max(candidates)
    fold = rng.permutation(np.arange(len(rows)) % folds)
    losses = np.zeros(len(candidates))
    for held_out in range(folds):
        fitted, validation = rows.take(fold != held_out), rows.take(fold == held_out)
        theta = init
        # From strong to weak, each the start of the next.
        for index in np.argsort(candidates)[::-1]:
            theta = public_fit(
                family, fitted, ridge=candidates[index], penalized=penalized, init=theta
            )
            losses[index] += np.sum(family.loss(validation.features @ theta, validation.targets))
    return float(candidates[int(np.argmin(losses))])


def whitening(family: Family, theta: np.ndarray, rows: Rows, *, ridge: float) -> np.ndarray:
    """B = (H + ridge I)^{-1/2}, H the (feature part of the) Hessian of the public loss at Θ.

    In features u' = B u the Hessian is the identity, up to the ridge. A gradient step on Θ' = B⁻¹Θ
    is the mirror step with H + ridge I on Θ. Clipping and noise then follow the same geometry:
    of all linear changes of coordinates this one has the least noise in the loss, since for noise
    that is isotropic after a change with K = BBᵀ it is tr(K H) tr((K H)⁻¹) ≥ d² up to a factor.

    Args:
        family: the loss.
        theta: the public optimum, shape (d, m).
        rows: public rows.
        ridge: relative to the mean eigenvalue of H.
    """
    weights = family.curvature(rows.features @ theta)
    hessian = (rows.features * weights[:, None]).T @ rows.features / len(rows)
    values, vectors = np.linalg.eigh(hessian)
    values = np.maximum(values, 0.0)
    level = values.mean() if values.any() else 1.0
    return (vectors / np.sqrt(values + ridge * level)) @ vectors.T


class Settings(NamedTuple):
    """What a private descent needs to know beforehand.

    Attributes:
        l2_clip_norm: C.
        num_steps: T; 0 if the private rows are not worth their noise.
        learning_rate: η.
        predicted_gain: by how much the loss is expected to fall below that of the public model.
    """

    l2_clip_norm: float
    num_steps: int
    learning_rate: float
    predicted_gain: float


NUM_STEPS = (1, 2, 4, 8, 16, 32, 64)
LEARNING_RATES = (0.1, 0.2, 0.35, 0.6, 1.0, 1.5, 2.5, 4.0, 7.0)
CLIP_QUANTILES = (0.05, 0.2, 0.4, 0.6, 0.75, 0.87, 0.95, 0.99)
_MAX_ROWS = 4000
_SPLITS = 6


def choose_settings(
    family: Family,
    rows: Rows,
    *,
    fit: Callable[[Rows], np.ndarray],
    geometry: Callable[[np.ndarray, Rows], np.ndarray],
    num_private: int,
    one_step_noise: float,
    rng: np.random.Generator,
    l2_clip_norm: float | None = None,
    num_steps: int | None = None,
    learning_rate: float | None = None,
) -> Settings:
    """Clip norm, step count and learning rate, from public rows and the budget alone.

    The public rows are split in two halves. One plays the private population, the other the public
    data that scaling and start come from; the start is moved towards the population's optimum until
    its error is the one to be expected of all public rows,

        Θ_0 = Θ_B + √((1/n_pub + 1/n) / (1/n_A + 1/n_B)) (Θ_A − Θ_B).

    Every combination of candidates then runs with noise of standard deviation σ₁√T·C/n on its mean
    gradient, as the private run would have it, and is judged by the population's loss. The average
    over several splits decides. Staying at the public model is one of the candidates.

    Args:
        family: the loss.
        rows: public rows in standardised features.
        fit: the public optimum of some of the rows.
        geometry: the change of coordinates B found from an optimum and its rows.
        num_private: n.
        one_step_noise: σ₁, the noise multiplier that spends the whole budget in one step; exact
            composition makes it σ₁√T for T steps.
        rng: for the splits and the noise; no secret.
        l2_clip_norm: C, if it is given.
        num_steps: T, if it is given.
        learning_rate: η, if it is given.
    """
    if len(rows) > _MAX_ROWS:
        rows = rows.take(rng.permutation(len(rows))[:_MAX_ROWS])
        # A smaller public set would start further away; the formula below speaks of all rows.
    all_steps = NUM_STEPS if num_steps is None else (num_steps,)
    rates = np.array(LEARNING_RATES if learning_rate is None else (learning_rate,))
    clips = np.array(CLIP_QUANTILES if l2_clip_norm is None else (l2_clip_norm,))
    grid_clips, grid_rates = (axis.ravel() for axis in np.meshgrid(clips, rates, indexing="ij"))
    gain = np.zeros((len(all_steps), len(grid_rates)))
    for _ in range(_SPLITS):
        order = rng.permutation(len(rows))
        half = len(rows) // 2
        seen, population = rows.take(order[:half]), rows.take(order[half:])
        theta, target = fit(seen), fit(population)
        basis = geometry(theta, seen)
        shrink = math.sqrt(
            (1 / len(rows) + 1 / num_private) / (1 / len(seen) + 1 / len(population))
        )
        start = np.linalg.solve(basis, target + shrink * (theta - target))
        population = Rows(population.features @ basis, population.targets)
        norms = gradient_norms(family, start, population)
        limits = np.quantile(norms, grid_clips) if l2_clip_norm is None else grid_clips
        limits = np.maximum(limits, np.finfo(float).tiny)
        clipped_sum = ClippedSum(family, limits)
        before = mean_loss(family, start, population)
        starts = np.repeat(start[:, :, None], len(limits), axis=2)
        for index, steps in enumerate(all_steps):
            scale = one_step_noise * math.sqrt(steps) * limits / num_private

            def gradient(theta, population=population, clipped_sum=clipped_sum, scale=scale):
                # The same noise for all candidates, so that they differ in what matters.
                noise = rng.normal(size=(*theta.shape[:2], 1)) * scale
                return clipped_sum(theta, population) / len(population) + noise

            with np.errstate(over="ignore", invalid="ignore"):
                end = descend(gradient, starts, num_steps=steps, learning_rate=grid_rates)
                gain[index] += before - mean_loss(family, end, population)
    gain = np.nan_to_num(gain / _SPLITS, nan=-np.inf)
    best_steps, best = np.unravel_index(int(np.argmax(gain)), gain.shape)
    if gain[best_steps, best] <= 0 and num_steps is None and learning_rate is None:
        return Settings(float(grid_clips[best]), 0, 0.0, 0.0)
    return Settings(
        float(grid_clips[best]),
        int(all_steps[best_steps]),
        float(grid_rates[best]),
        float(gain[best_steps, best]),
    )
