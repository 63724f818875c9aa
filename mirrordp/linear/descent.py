"""The private descent behind the estimators, for generalised linear models in closed form.

In: rows u_i and targets y_i, already scaled by rules that come from public data. Out: parameters.
The loss of a row is A(s_i) − ⟨y_i, s_i⟩ with scores s_i = Θᵀu_i (`mirrordp.mirror.families`), so
that its gradient is the outer product u_i ⊗ r_i of the row and its residual r_i = ∇A(s_i) − y_i.
The norm of the gradient is ‖u_i‖·‖r_i‖, and the clipped sum of Algorithm 1 (lines 3 and 4) is one
matrix product,

    Σ_i clip(u_i ⊗ r_i, C) = Uᵀ diag(c) R,     c_i = min(1, C / (‖u_i‖ ‖r_i‖)).

A weight w_i ≥ 0 multiplies the loss of its row, and hence r_i, before the clip. Whatever the
weight, the row changes the sum by at most C.

`private_descent` is Algorithm 1 with full batches of this sum, and with a geometry that corrects
itself where the private loss is steeper than the public one; `mirrordp.linear.tuning` chooses its
settings. Everything is computed in float64 by NumPy: a step passes over the rows twice, which
leaves nothing for a compiler to gain. Dense rows are read in the blocks of `data.sources`, and may
be memory maps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import issparse

from mirrordp import _validate
from mirrordp.data.sources import computed_rows, row_blocks
from mirrordp.linear._noting import tell
from mirrordp.mirror.families import Family
from mirrordp.privacy import sums
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import Noise, interruptible
from mirrordp.types import PyTree

_LARGEST_NORM, _SMALLEST_NORM = 1e140, 1e-140
_BLOCK = 4096
_ALL = slice(None)
# A step is taken back if the curvature exceeds 1/η by so much, and by so many standard errors.
_TOLERANCE, _STANDARD_ERRORS = 0.25, 3.0


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Scaled rows and their targets.

    Attributes:
        features: U, shape (n, d), with the column of an intercept; for private rows also a CSR
            array. A row that overflowed is replaced by zeros and does not count, since zero times
            infinity would spoil every sum.
        targets: Y, shape (n, m).
        counts: a mask of the rows that take part; the others have gradient zero. None stands for
            all rows.
        weights: w, shape (n,): the loss of row i is multiplied by w_i ≥ 0, before its gradient is
            clipped. None stands for ones.
    """

    features: Any
    targets: np.ndarray
    counts: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __post_init__(self):
        features = self.features
        if issparse(features):
            if np.isfinite(features.data).all():
                return
            row_of = np.repeat(np.arange(len(self)), np.diff(features.indptr))
            finite = np.ones(len(self), bool)
            finite[row_of[~np.isfinite(features.data)]] = False
            features = features.copy()
            features.data = np.where(finite[row_of], features.data, 0.0)
        else:
            if all(np.isfinite(features[block]).all() for block in row_blocks(features)):
                return
            finite = computed_rows(lambda rows: np.isfinite(rows).all(axis=1), features)
            features = computed_rows(
                lambda rows, finite: np.where(finite[:, None], rows, 0.0), features, finite
            )
        counts = finite
        if self.counts is not None:
            counts = computed_rows(np.logical_and, self.counts, finite)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "features", features)

    def __len__(self) -> int:
        return self.features.shape[0]

    def take(self, rows: np.ndarray) -> "Rows":
        """Returns some of the rows."""
        counts = None if self.counts is None else self.counts[rows]
        weights = None if self.weights is None else self.weights[rows]
        return Rows(self.features[rows], self.targets[rows], counts, weights)

    def weighted(self, values: np.ndarray, block: slice = _ALL) -> np.ndarray:
        """Returns values that belong to rows, along their first axis, times the weights."""
        if self.weights is None:
            return values
        return values * self.weights[block].reshape((-1,) + (1,) * (values.ndim - 1))

    def blocks(self) -> Iterator[slice]:
        """Yields the rows in blocks; those of a sparse array, which is small, as one."""
        if issparse(self.features):
            return iter([_ALL])
        return row_blocks(self.features, self.targets, self.counts, self.weights, self.norms)

    @functools.cached_property
    def norms(self) -> np.ndarray:
        """The norms ‖u_i‖."""
        with np.errstate(over="ignore"):
            if issparse(self.features):
                return np.sqrt(self.features.multiply(self.features).sum(axis=1))
            return computed_rows(lambda rows: np.linalg.norm(rows, axis=1), self.features)


@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows:
    """The rows of a sparse matrix, which are dense and scaled only one block at a time.

    Attributes:
        matrix: X as a CSR array, shape (n, d).
        scale: what is done to each row, from (b, d) to (b, d').
        targets: see `Rows`, as are the others.
    """

    matrix: Any
    scale: Callable[[np.ndarray], np.ndarray]
    targets: np.ndarray
    counts: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def blocks(self) -> Iterator[Rows]:
        """Yields the rows in blocks of at most 64 MiB."""
        size = int(np.clip(2**23 // max(self.matrix.shape[1], 1), 1, _BLOCK))
        for start in range(0, len(self), size):
            block = slice(start, start + size)
            yield Rows(
                self.scale(self.matrix[block].toarray()),
                self.targets[block],
                None if self.counts is None else self.counts[block],
                None if self.weights is None else self.weights[block],
            )


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """The function Σ_i clip(w_i u_i ⊗ r_i, C) in closed form, and its sensitivity.

    It gives the same guarantees as `mirrordp.clipped_grad`: a row adds a matrix of norm at most C
    that depends on this row only. A row adds exactly zero if it does not count, or if its gradient
    norm is not finite (or so large or small that float64 cannot represent it). Rows are summed in
    float64 in blocks of b, and the blocks are summed exactly (`privacy.sums`). A row thus changes
    the rounding of its own block alone, by at most 2b²·2⁻⁵³ C, which is part of `sums.RESERVE`.

    Args:
        family: the family of the loss.
        l2_clip_norm: C. An array of k values goes with parameters of shape (d, m, k); it is meant
            for trials on public rows, whose sum need not be exact.
    """

    family: Family
    l2_clip_norm: float | np.ndarray

    def __call__(self, theta: np.ndarray, rows: Rows | SparseRows) -> np.ndarray:
        """Returns the sum at Θ of shape (d, m), or at k of them side by side, (d, m, k)."""
        if isinstance(rows, SparseRows):
            total = np.zeros(theta.shape, np.int64)
            for block in rows.blocks():
                total += self._grains(theta, block)
        elif isinstance(self.l2_clip_norm, np.ndarray):
            clipped = self._clipped_residuals(theta, rows)
            return (rows.features.T @ clipped).reshape(theta.shape)
        else:
            total = self._grains(theta, rows)
        return (self._grain * total).reshape(theta.shape)

    @property
    def _grain(self) -> float:
        return 2.0 ** sums.grain_exponent(float(self.l2_clip_norm))

    def _grains(self, theta: np.ndarray, rows: Rows) -> np.ndarray:
        """Returns the sum as a whole number of grains, of which any number can be added exactly."""
        total = np.zeros((len(theta), theta.size // len(theta)), np.int64)
        for block in rows.blocks():
            clipped = self._clipped_residuals(theta, rows, block)
            features = rows.features[block]
            for start in range(0, len(clipped), _BLOCK):
                some = slice(start, start + _BLOCK)
                part = features[some].T @ clipped[some]
                total += np.trunc(part / self._grain).astype(np.int64)
        return total

    def _clipped_residuals(self, theta: np.ndarray, rows: Rows, block: slice = _ALL) -> np.ndarray:
        """Returns w_i r_i, scaled so that its product with u_i is clipped, shape (b, m or m·k)."""
        # An overflow gives an infinite norm, which the lines below turn into a zero.
        with np.errstate(over="ignore", invalid="ignore"):
            scores = scores_of(rows.features[block], theta)
            residuals = self.family.residuals(scores, rows.targets[block])
            residuals = rows.weighted(residuals, block)
            row_norms = rows.norms[block].reshape((-1,) + (1,) * (theta.ndim - 2))
            # A residual whose square underflows still counts where the row is long.
            norms = np.maximum(np.linalg.norm(residuals, axis=1), _SMALLEST_NORM) * row_norms
            # Beyond these bounds the squares behind a norm, or the factor, lose their digits.
            keep = np.isfinite(norms) & (norms <= _LARGEST_NORM) & (row_norms >= _SMALLEST_NORM)
            if rows.counts is not None:
                keep &= rows.counts[block].reshape((-1,) + (1,) * (theta.ndim - 2))
            limit = self.l2_clip_norm * (1 - sums.RESERVE)
            factors = limit / np.maximum(norms, limit)
            clipped = np.where(keep[:, None], residuals * factors[:, None], 0.0)
        return clipped.reshape(len(clipped), -1)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the largest distance between the sums of neighbouring data sets."""
        _validate.instance_of(Adjacency, adjacency=adjacency)
        return adjacency.distance * float(np.max(self.l2_clip_norm))


def scores_of(features: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Returns Θᵀu for every row, for parameters with any number of axes behind the first."""
    return (features @ theta.reshape(len(theta), -1)).reshape((-1, *theta.shape[1:]))


def gradient_norms(family: Family, theta: np.ndarray, rows: Rows) -> np.ndarray:
    """Returns w_i ‖u_i‖ ‖r_i‖ for each row without noise, and so is meant for public rows."""
    residuals = rows.weighted(family.residuals(scores_of(rows.features, theta), rows.targets))
    return rows.norms * np.linalg.norm(residuals, axis=1)


def mean_loss(family: Family, theta: np.ndarray, rows: Rows) -> np.ndarray:
    """Returns the mean weighted loss over the rows, one number per parameter matrix."""
    losses = family.loss(scores_of(rows.features, theta), rows.targets)
    return rows.weighted(losses).mean(axis=0)


def private_descent(
    family: Family,
    theta: np.ndarray,
    rows: Rows | SparseRows,
    mechanism: Mechanism,
    *,
    learning_rate: float,
    key: jax.Array,
    guard: Callable[[np.ndarray], float] | None = None,
) -> np.ndarray:
    """Runs full-batch private gradient descent from Θ_0 and returns the average of its iterates:

        Θ_{t+1} = Θ_t − η M⁻¹ (Σ_i clip(u_i ⊗ r_i(Θ_t), C) + N(0, σ²C²)) / n,    t = 0, ..., T − 1.

    The first ⌊T/8⌋ iterates are left out of the average. M is the identity as long as the private
    loss is not much steeper than 1/η; see `descend_safely` for what happens elsewhere. In features
    scaled by the inverse root of a Hessian this is mirror descent on the quadratic map with that
    Hessian.

    With a guard, the last of the T steps is a test instead: the sum over private rows of what each
    gains, its loss at Θ_0 less its loss at the end, clipped to ±B and scaled by C/B, with the noise
    of a step. If that is negative, Θ_0 is returned.

    Args:
        family: the family of the loss.
        theta: Θ_0, which must not come from private rows.
        rows: the private rows.
        mechanism: decides T, C, σ and n. Its noise is added here, once per step, in float64.
        learning_rate: η.
        key: the seed of the noise, which must be secret.
        guard: returns B for the Θ at the end; public rows decide it.
    """
    expected = mechanism.sampling.num_examples
    if mechanism.sampling.sampling_prob != 1 or expected != len(rows):
        raise ValueError(
            f"the descent needs a mechanism of full batches of {len(rows)} rows, got "
            f"{mechanism.sampling.name} sampling of {expected}. Use FullBatch.of({len(rows)})."
        )
    sums.check_count(len(rows))
    clipped_sum = ClippedSum(family, mechanism.l2_clip_norm)
    add_noise = NoiseStream(mechanism, theta.size, key)

    def gradient(theta: np.ndarray) -> np.ndarray:
        return mechanism.mean(add_noise(clipped_sum(theta, rows)))

    end = descend_safely(
        gradient,
        theta,
        num_steps=mechanism.num_steps - (guard is not None),
        learning_rate=learning_rate,
        noise=mechanism.noise_stddev / len(rows),
    )
    if guard is None:
        return end
    assert isinstance(rows, Rows)
    gain = clipped_gain(family, theta, end, rows, guard(end), mechanism.l2_clip_norm)
    return end if add_noise(np.array([gain]))[0] >= 0 else theta


def row_gains(
    family: Family, start: np.ndarray, end: np.ndarray, rows: Rows, block: slice = _ALL
) -> np.ndarray:
    """Returns by how much the loss of each row is lower at the end, without noise."""
    features, targets = rows.features[block], rows.targets[block]
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = (family.loss(scores_of(features, theta), targets) for theta in (start, end))
        return rows.weighted(before - after, block)


def clipped_gain(
    family: Family, start: np.ndarray, end: np.ndarray, rows: Rows, bound: float, limit: float
) -> float:
    """Returns Σ_i clip(gain_i, ±B) C/B as an exact sum to which a row adds at most C."""
    grain, total = 2.0 ** sums.grain_exponent(limit), 0
    for block in rows.blocks():
        with np.errstate(over="ignore", invalid="ignore"):
            gains = np.clip(row_gains(family, start, end, rows, block) / bound, -1.0, 1.0)
        keep = (
            np.isfinite(gains) if rows.counts is None else np.isfinite(gains) & rows.counts[block]
        )
        grains = np.trunc(np.where(keep, gains, 0.0) * (limit * (1 - sums.RESERVE) / grain))
        total += int(grains.astype(np.int64).sum())
    return grain * total


class NoiseStream:
    """A function that adds a mechanism's noise to one sum after the other, in float64.

    The noise is added in units of its standard deviation, σC (s/(σC) + N(0, 1)), on a vector padded
    to a round length. One compiled function then serves every σ and C, and most numbers of
    parameters. Secure noise is added to the sum as it is, since its lattice was accounted for with
    this σC and p.
    """

    def __init__(self, mechanism: Mechanism, size: int, key: jax.Array):
        _validate.positive("Without noise there is no privacy.", noise=mechanism.noise_stddev)
        self._unit, self._stddev, length = mechanism.noise_stddev, 1.0, 64 * -(-size // 64)
        if mechanism.is_secure:
            self._unit, self._stddev, length = 1.0, mechanism.noise_stddev, size
        self._noise, self._step, self._num_steps = mechanism.noise, 0, mechanism.num_steps
        self._padded = np.zeros(length)
        with jax.enable_x64(True):
            self._state = self._noise.init(key, jnp.asarray(self._padded))

    def __call__(self, clipped_sum: np.ndarray) -> np.ndarray:
        """Returns a sum of at most `size` numbers with noise."""
        self._step += 1
        tell(f"step {self._step} of {self._num_steps}")
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
    """Repeats Θ ← Θ − η · gradient(Θ), T times; returns the mean of all but the first ⌊T/8⌋ Θ."""
    first = num_steps // 8
    total = np.zeros_like(theta)
    for step in range(num_steps):
        theta = theta - learning_rate * gradient(theta)
        if step >= first:
            total += theta
    return total / (num_steps - first)


def descend_safely(
    gradient: Callable[[np.ndarray], np.ndarray],
    theta: np.ndarray,
    *,
    num_steps: int,
    learning_rate: float,
    noise: float,
) -> np.ndarray:
    """Descends as `descend` does, and stays stable where the loss is steeper than expected.

    In the coordinates of the descent the public Hessian is the identity, so a step of η < 2 is
    stable if the private rows are of the same kind. If they are not, the curvature λ of the private
    loss can exceed 2/η in some direction, and plain steps diverge along it. But two noisy gradients
    tell the curvature between two iterates: with s = Θ_{t+1} − Θ_t and y = g_{t+1} − g_t,

        y = H s + noise,    so that r = ηy − Ms estimates (ηH − M)s.

    If ⟨r, s⟩ says that ηH exceeds M along s, by a quarter and by three standard errors, the step is
    taken back and M becomes M + r rᵀ/⟨r, s⟩: the symmetric rank-one update, which makes Ms = ηy.
    The part of r that is orthogonal to s is first shrunk by the share of it that is noise. Since s
    contains the noise ν of g_t, ⟨s, −ν⟩ has a positive mean, η tr(M⁻¹) times the variance of the
    noise. It is subtracted from ⟨r, s⟩, and its spread is part of the standard error.

    A step can be taken back because of noise alone, or a steep direction may not stand out from the
    noise; both cost accuracy and no privacy.

    All of this uses gradients that are already private, so ε is the same. A step that is taken back
    still counts as one of T. As long as none is, the iterates are those of `descend`.

    Args:
        gradient: returns the noisy mean gradient; it is called T times.
        theta: Θ_0.
        num_steps: T.
        learning_rate: η.
        noise: the standard deviation of the noise in each coordinate of the gradient.
    """
    # M = I + W Wᵀ, where W has one column for each step that was taken back.
    learned = np.zeros((theta.size, 0))
    here, total, first = theta.ravel(), np.zeros(theta.size), num_steps // 8
    grad = gradient(theta).ravel()
    for step in range(num_steps):
        small = np.linalg.inv(np.eye(learned.shape[1]) + learned.T @ learned)
        move = -learning_rate * (grad - learned @ (small @ (learned.T @ grad)))
        there = here + move
        if step + 1 < num_steps:
            grad_there = gradient(there.reshape(theta.shape)).ravel()
            expected = move + learned @ (learned.T @ move)
            column = _excess_curvature(
                move,
                expected,
                learning_rate * (grad_there - grad) - expected,
                variance=(learning_rate * noise) ** 2,
                trace=theta.size - learned.shape[1] + np.trace(small),
            )
            if column is None:
                grad = grad_there
            else:
                there, learned = here, np.column_stack([learned, column])
        here = there
        if step >= first:
            total += here
    return (total / (num_steps - first)).reshape(theta.shape)


def _excess_curvature(
    move: np.ndarray, expected: np.ndarray, excess: np.ndarray, *, variance: float, trace: float
) -> np.ndarray | None:
    """Returns the column w of the update M + wwᵀ of `descend_safely`, or None if M is good enough.

    Args:
        move: s.
        expected: Ms.
        excess: r = ηy − Ms.
        variance: of the noise in each coordinate of a gradient, times η².
        trace: tr(M⁻¹).
    """
    square = move @ move
    along = excess @ move - variance * trace
    error = math.sqrt(2 * variance * (square + variance * len(move)))
    if along <= max(_TOLERANCE * (move @ expected), _STANDARD_ERRORS * error):
        return None
    across = excess - (excess @ move / square) * move
    signal = max(0.0, 1 - 2 * variance * (len(move) - 1) / max(across @ across, 1e-300))
    return ((along / square) * move + signal * across) / math.sqrt(along)
