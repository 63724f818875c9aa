"""Simulated data of Figure 1: the sparse design, the true model, the noise, the exact risk.

In: a dimension, a trial number and a seed. Out: a `Trial`, which depends on these three only, so
that any trial can be drawn again on any machine.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

FEATURE_VALUE = 0.05
ACTIVE_FEATURES = (40, 80)  # non-zero entries among the first p/5 and the last 4p/5 features
TARGET_STD = 0.1
PUBLIC_PER_DIMENSION = 1.5

Decompose = Callable[[scipy.sparse.csr_matrix], tuple[np.ndarray, np.ndarray]]


def block_sizes(dimension: int) -> tuple[int, int]:
    """Returns how many features belong to the first and to the last block."""
    first = dimension // 5
    return first, dimension - first


def sample_subsets(
    rng: np.random.Generator, count: int, population: int, size: int
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Draws `count` uniform subsets of {0, ..., population-1} with `size` elements each.

    Robert Floyd's algorithm, all subsets at once: for j = population − size, ..., population − 1
    draw t ≤ j and add t, or j where t is already in the subset.
    """
    if not 0 < size <= population:
        raise ValueError(f"expected 0 < size <= population, got size={size}, {population=}")
    subsets = np.empty((count, size), np.int32)
    for filled, j in enumerate(range(population - size, population)):
        drawn = rng.integers(0, j + 1, size=count, dtype=np.int32)
        taken = (subsets[:, :filled] == drawn[:, None]).any(axis=1)
        subsets[:, filled] = np.where(taken, j, drawn)
    return subsets


def sample_design(rng: np.random.Generator, rows: int, dimension: int) -> scipy.sparse.csr_matrix:
    """Draws feature vectors: a sparse matrix with the same number of entries in every row."""
    first, last = block_sizes(dimension)
    if first < ACTIVE_FEATURES[0]:
        raise ValueError(
            f"expected dimension >= {5 * ACTIVE_FEATURES[0]}, so that {ACTIVE_FEATURES[0]} of the "
            f"first dimension/5 features can be active; got {dimension}"
        )
    indices = np.concatenate(
        [
            sample_subsets(rng, rows, first, ACTIVE_FEATURES[0]),
            first + sample_subsets(rng, rows, last, ACTIVE_FEATURES[1]),
        ],
        axis=1,
    )
    indices.sort(axis=1)
    per_row = indices.shape[1]
    return scipy.sparse.csr_matrix(
        (
            np.full(rows * per_row, FEATURE_VALUE, np.float32),
            indices.ravel(),
            np.arange(0, rows * per_row + 1, per_row, dtype=np.int32),
        ),
        shape=(rows, dimension),
    )


def population_loss(models: np.ndarray, true_model: np.ndarray) -> np.ndarray:
    """Returns the expected squared error E(y − ⟨θ, x⟩)² of each column θ of `models`, exactly.

    With Δ = θ − θ*, block k contributes 0.05 times the sum of m_k of its q_k entries of Δ, drawn
    without replacement: mean m_k·mean(Δ_k), variance m_k (1 − m_k/q_k) s²(Δ_k), where s² has the
    divisor q_k − 1; the blocks are independent.
    """
    errors = models.astype(np.float64) - true_model[:, None]
    first, _ = block_sizes(len(true_model))
    mean, variance = 0.0, 0.0
    for block, active in zip((errors[:first], errors[first:]), ACTIVE_FEATURES, strict=True):
        mean = mean + active * block.mean(axis=0)
        variance = variance + active * (1 - active / len(block)) * block.var(axis=0, ddof=1)
    return TARGET_STD**2 + FEATURE_VALUE**2 * (mean**2 + variance)


@dataclasses.dataclass
class Trial:
    """One draw of everything random: data, true model, and the noise of step t = 0, 1, ...

    Attributes:
        design: private feature vectors, (n, p) sparse.
        targets: private responses, (n,).
        true_model: θ*, (p,).
        public_model: θ_pub, the public least-squares optimum of smallest norm, (p,).
        eigenvalues: of the public Hessian H = XᵀX/n_pub, ascending, (p,).
        eigenvectors: of H, as columns, (p, p).
        noise_source: generator behind `noise`.
        noise: standard normal rows, one per step. Grid points share them (common random numbers),
            so that two points differ by their parameters and not by their luck.
    """

    design: scipy.sparse.csr_matrix
    targets: np.ndarray
    true_model: np.ndarray
    public_model: np.ndarray
    eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    noise_source: np.random.Generator
    noise: np.ndarray

    @property
    def row_norms(self) -> np.ndarray:
        """‖x_i‖ of the private feature vectors."""
        return np.sqrt(np.asarray(self.design.power(2).sum(axis=1)).ravel())

    def extend_noise(self, num_steps: int) -> None:
        """Makes at least `num_steps` rows of noise available; earlier rows stay the same."""
        missing = num_steps - len(self.noise)
        if missing > 0:
            rows = self.noise_source.standard_normal((missing, len(self.true_model)), np.float32)
            self.noise = np.concatenate([self.noise, rows])


def make_trial(
    decompose: Decompose, dimension: int, trial: int, *, seed: int, num_private: int
) -> Trial:
    """Draws trial number `trial` of dimension `dimension`.

    Args:
        decompose: returns the eigenvalues (ascending) and eigenvectors of XᵀX / rows, see
            `backends`.
        dimension: p.
        trial: the number of the trial.
        seed: trials with another seed are independent.
        num_private: n.
    """
    data_seed, noise_seed = np.random.SeedSequence([seed, dimension, trial]).spawn(2)
    rng = np.random.default_rng(data_seed)
    true_model = rng.standard_normal(dimension)

    def sample(rows: int) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
        design = sample_design(rng, rows, dimension)
        targets = design @ true_model + TARGET_STD * rng.standard_normal(rows)
        return design, targets

    design, targets = sample(num_private)
    public_design, public_targets = sample(int(PUBLIC_PER_DIMENSION * dimension))
    eigenvalues, eigenvectors = decompose(public_design)
    moment = eigenvectors.T @ (public_design.T @ public_targets / len(public_targets))
    # Every row has exactly 40 and 80 active features, so 2·Σ(first block) − Σ(last block) is zero
    # for each of them: H has an exact null direction and the least-squares optimum is a pseudo-
    # inverse.
    nonzero = eigenvalues > 0
    public_model = eigenvectors[:, nonzero] @ (moment[nonzero] / eigenvalues[nonzero])
    return Trial(
        design,
        targets.astype(np.float32),
        true_model,
        public_model.astype(np.float32),
        eigenvalues,
        eigenvectors.astype(np.float32),
        np.random.default_rng(noise_seed),
        np.empty((0, dimension), np.float32),
    )
