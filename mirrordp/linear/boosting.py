"""Private boosting: a linear model, and the values of cells, learned one term at a time.

In: private rows and the terms that public rows have chosen (`mirrordp.tables.cells`). Out: values.
The first rounds are steps of `mirrordp.linear.descent` from the linear model of the public rows.
Then round k reads the residuals r_i of all rows once and releases, for each cell of term k, the
sums

    G = Σ clip(−r_i, c),        H = Σ h_i,

with Gaussian noise, where h_i in [0, 1] is the relative curvature of the row's loss. A row is in
one cell of a term, so that it adds a vector of norm at most C = c √(1 + a²) to the release, which
holds H times ac. Everything after that is post-processing. Without noise a cell's value would be
G/H. With noise it is shrunk by the share of G² that is noise, which the sizes of all G of a term
tell (empirical Bayes):

    v = G H τ² / (H² τ² + Var G),       τ² = max(0, Σ (G² − Var G)/H) / Σ H.

A term that explains nothing gets values near zero. This is what makes many pairs of columns
affordable: the noise grows with the square root of the number of terms, and not with the number of
their cells. How many terms there are depends on the noise (`most_terms`).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from mirrordp.data.sources import computed_columns, computed_rows, row_blocks
from mirrordp.linear._planning import Plan, Scaling
from mirrordp.linear.descent import ClippedSum, NoiseStream, Rows, descend_safely
from mirrordp.mirror.families import LOGISTIC, MULTINOMIAL, SQUARED_ERROR, Family
from mirrordp.privacy import sums
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.tables.cells import TreesScorer

_CURVATURE_WEIGHT = 0.15
"""a: the length of a row's curvature in the release, relative to its residual."""
_PAIR_RATE = 0.8
_CLIP_QUANTILE = 0.95
_LARGEST_LOG_STEP = 2.0
_BLOCK = 2**18
_NOISE_PER_CELL = 0.15
_LINEAR_STEPS = (2, 8)
_MAX_TERMS, _FEWEST_TERMS = 160, 12
_NOISE_PER_ROW = 1e-3


class Release(NamedTuple):
    """What a round releases, and in which units.

    Attributes:
        clip_norm: c, the bound on the norm of a residual.
        largest_curvature: the curvature that counts as h = 1.
        spread: the variance of a residual that explains nothing, for a curvature of one.
        largest_step: the largest value of a cell; steps of logarithms are cut.
    """

    clip_norm: float
    largest_curvature: float
    spread: float
    largest_step: float

    @property
    def l2_clip_norm(self) -> float:
        """C = c √(1 + a²), the norm of a row's contribution."""
        return self.clip_norm * float(np.hypot(1.0, _CURVATURE_WEIGHT))

    @classmethod
    def of(cls, family: Family, scores: np.ndarray, targets: np.ndarray) -> "Release":
        """Chooses by public rows and their scores. Residuals of classes need no clipping."""
        if family in (LOGISTIC, MULTINOMIAL):
            return cls(
                1.0 if family == LOGISTIC else float(np.sqrt(2)), 0.25, 1.0, _LARGEST_LOG_STEP
            )
        norms = np.linalg.norm(family.residuals(scores, targets), axis=1)
        clip = float(np.quantile(norms, _CLIP_QUANTILE)) or 1.0
        if family == SQUARED_ERROR:
            spread = float(np.mean(np.minimum(norms, clip) ** 2)) / targets.shape[1]
            return cls(clip, 1.0, spread, np.inf)
        largest = float(np.quantile(family.mean(scores), _CLIP_QUANTILE)) or 1.0
        return cls(clip, largest, 1.0, _LARGEST_LOG_STEP)


class LinearPart(NamedTuple):
    """The start of the linear part and its descent, in units of the release.

    Attributes:
        scaling: what is done to a row before its gradient is taken.
        theta: the public model, in the coordinates of scaled rows.
        num_steps: the number of rounds, 0 if the private rows are not worth their noise.
        learning_rate: η.
    """

    scaling: Scaling
    theta: np.ndarray
    num_steps: int
    learning_rate: float

    @classmethod
    def of(cls, plan: Plan, l2_clip_norm: float) -> "LinearPart":
        """Changes the unit of a planned descent, so that its clip norm is that of the release.

        Rows that are multiplied by f have gradients that are f times as long, and the same
        iterates for parameters divided by f and a rate divided by f².
        """
        _, steps, rate = plan.settings
        factor = l2_clip_norm / plan.settings.l2_clip_norm
        assert plan.scaling.basis is not None
        scaling = dataclasses.replace(plan.scaling, basis=plan.scaling.basis * factor)
        return cls(scaling, plan.theta / factor, steps, rate / factor**2)


def most_terms(num_private: int, one_step_noise: float) -> int:
    """Returns how many terms to learn: the noise of a release is to be small against all rows."""
    affordable = (_NOISE_PER_ROW * num_private / one_step_noise) ** 2
    return int(np.clip(affordable, _FEWEST_TERMS, _MAX_TERMS))


def linear_steps(num_terms: int) -> int:
    """Returns the number of rounds for the linear part: few where there are few terms."""
    return int(np.clip(2 * num_terms // 3, *_LINEAR_STEPS))


def largest_term(num_private: int, one_step_noise: float, num_steps: int) -> float:
    """Returns how many cells of equal size a term may have: noise is small against their rows."""
    return _NOISE_PER_CELL * num_private / (one_step_noise * np.sqrt(num_steps))


def release_sums(
    release: Release, family: Family, scores: np.ndarray, rows: Rows, where: np.ndarray, size: int
) -> np.ndarray:
    """Returns G and ac·H, without noise, as an array of shape (cells, outputs + 1).

    Each row's contribution is truncated to the grain of `privacy.sums` by itself, and integers are
    added, so that a row changes the sums by its own contribution and by nothing else. A row that
    does not count, or whose scores are not finite, adds exactly zero.
    """
    grain = 2.0 ** sums.grain_exponent(release.l2_clip_norm)
    total = np.zeros((size, rows.targets.shape[1] + 1), np.int64)
    for block in row_blocks(scores, where, rows.targets, rows.counts, rows.weights):
        grains = np.trunc(_contributions(release, family, scores[block], rows, block) / grain)
        cells = where[block]
        # Sums of this many integers below 2³⁵ are exact in float64.
        for start in range(0, len(grains), _BLOCK):
            some = slice(start, start + _BLOCK)
            for column, one in enumerate(grains[some].T):
                total[:, column] += np.bincount(cells[some], one, size).astype(np.int64)
    return grain * total


def _contributions(
    release: Release, family: Family, scores: np.ndarray, rows: Rows, block: slice
) -> np.ndarray:
    """Returns what each row of a block adds to G and ac·H of its cell."""
    with np.errstate(over="ignore", invalid="ignore"):
        residuals = rows.weighted(family.residuals(scores, rows.targets[block]), block)
        curvature = family.curvature(scores) / release.largest_curvature
        curvature = rows.weighted(curvature, block)
        norms = np.linalg.norm(residuals, axis=1)
        keep = np.isfinite(norms) & np.isfinite(curvature)
        if rows.counts is not None:
            keep &= rows.counts[block]
        limit = release.clip_norm * (1 - sums.RESERVE)
        factors = limit / np.maximum(norms, limit)
        added = np.column_stack(
            [-residuals * factors[:, None], _CURVATURE_WEIGHT * limit * np.clip(curvature, 0, 1)]
        )
        return np.where(keep[:, None], added, 0.0)


def learn_values(
    model: TreesScorer,
    family: Family,
    features: np.ndarray,
    rows: Rows,
    release: Release,
    *,
    noise_stddev: float,
    add_noise: Callable[[np.ndarray], np.ndarray],
) -> TreesScorer:
    """Learns the values of all terms, one release per term.

    Args:
        model: the terms; its values are not used.
        family: the family of the loss.
        features: the features of the rows, not scaled.
        rows: the targets of the rows, and which of them count; its features are not used.
        release: the units of the release.
        noise_stddev: the standard deviation of the noise in each coordinate of a release.
        add_noise: adds it to one release after the other.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scores = computed_rows(model.start, features)
    bins, values = computed_columns(model.bins, features), []
    for term in model.terms:
        where = computed_rows(
            lambda *own, term=term: model.cells(dict(zip(term, own, strict=True)), term),
            *(bins[cut] for cut in term),
        )
        size = model.num_cells(term)
        noisy = add_noise(release_sums(release, family, scores, rows, where, size))
        found = _shrunk(noisy, release, noise_stddev)
        found *= 1.0 if len(term) == 1 else _PAIR_RATE
        for block in row_blocks(scores, where):
            scores[block] += found[where[block]]
        values.append(found)
    return dataclasses.replace(model, values=tuple(values))


def _shrunk(noisy: np.ndarray, release: Release, noise_stddev: float) -> np.ndarray:
    """Returns the values of the cells of a term, from its noisy sums."""
    gradient = noisy[:, :-1]
    scale = release.largest_curvature / (_CURVATURE_WEIGHT * release.clip_norm)
    # A cell with less curvature than the noise could be empty.
    curvature = np.maximum(noisy[:, -1:], noise_stddev) * scale
    variance = noise_stddev**2 + release.spread * curvature
    signal = np.sum((gradient**2 - variance) / curvature)
    signal = max(0.0, float(signal)) / (gradient.shape[1] * float(np.sum(curvature)))
    values = gradient * curvature * signal / (curvature**2 * signal + variance)
    return np.clip(values, -release.largest_step, release.largest_step)


def private_values(
    model: TreesScorer,
    linear: LinearPart,
    family: Family,
    features: np.ndarray,
    rows: Rows,
    release: Release,
    mechanism: Mechanism,
    key: jax.Array,
) -> TreesScorer:
    """Learns the linear part and the values of all terms from private rows; see `learn_values`.

    Args:
        model: the terms, which must not come from private rows.
        linear: the start of the linear part, which must not either.
        family: the family of the loss.
        features: private features.
        rows: private targets.
        release: the units of the release.
        mechanism: full batches, with the clip norm of the release; the steps of the linear part,
            and one per term.
        key: the seed of the noise, which must be secret.
    """
    if mechanism.sampling.sampling_prob != 1 or mechanism.sampling.num_examples != len(features):
        raise ValueError(
            f"boosting needs a mechanism of full batches of {len(features)} rows, got "
            f"{mechanism.sampling.name} sampling of {mechanism.sampling.num_examples}."
        )
    expected = (linear.num_steps + len(model.terms), release.l2_clip_norm)
    if (mechanism.num_steps, mechanism.l2_clip_norm) != expected:
        raise ValueError(
            f"boosting needs {expected[0]} steps and the clip norm {expected[1]:.6g}, got "
            f"{mechanism.num_steps} and {mechanism.l2_clip_norm:.6g}."
        )
    sums.check_count(len(features))
    stream = NoiseStream(mechanism, release_size(model), key)
    if linear.num_steps:
        scaled = Rows(linear.scaling(features), rows.targets, rows.counts, rows.weights)
        clipped_sum = ClippedSum(family, mechanism.l2_clip_norm)
        theta = descend_safely(
            lambda theta: mechanism.mean(stream(clipped_sum(theta, scaled))),
            linear.theta,
            num_steps=linear.num_steps,
            learning_rate=linear.learning_rate,
            noise=mechanism.noise_stddev / len(features),
        )
        coefficients, intercepts = linear.scaling.original(theta)
        model = dataclasses.replace(model, coefficients=coefficients, intercepts=intercepts)
    return learn_values(
        model,
        family,
        features,
        rows,
        release,
        noise_stddev=mechanism.noise_stddev,
        add_noise=stream,
    )


def release_size(model: TreesScorer) -> int:
    """Returns the number of coordinates of the largest release."""
    outputs, width = model.shape
    sizes = [model.num_cells(term) * (outputs + 1) for term in model.terms]
    return max([outputs * (width + 1), *sizes])
