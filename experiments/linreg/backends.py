"""The three algorithms, many grid points at a time, on a CPU (SciPy) or an accelerator (JAX).

In: a `Trial` and `Columns` of grid points with the same number of steps. Out: averaged and last
iterates and their losses. Both backends use the same data and the same noise, so they differ by
rounding only.
"""

import os
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from dp_accounting import GaussianDpEvent

from experiments.linreg.simulation import Trial
from mirrordp.privacy import accounting


@cache
def noise_multiplier(epsilon: float, delta: float, num_steps: int) -> float:
    """Returns the noise over the clip norm for `num_steps` full-batch releases.

    The composition of T Gaussian mechanisms with multiplier σ is one with σ/√T, so σ = σ₁ √T with
    σ₁ the exact calibration of a single release (sensitivity C: add/remove or zero-out adjacency).
    """
    one_step = accounting.calibrate(
        GaussianDpEvent,
        epsilon_target=epsilon,
        delta=delta,
        adjacency=accounting.Adjacency.ZERO_OUT,
        tolerance=1e-12,
    )
    return one_step * num_steps**0.5


def clip_residuals(residuals: Any, row_norms: Any, clip_norms: Any) -> Any:
    """Clips per-example gradients of many linear models in closed form.

    The gradient of example i is r_i x_i with norm |r_i| ‖x_i‖, so scaling it to norm at most C is
    scaling r_i by min(1, C / (|r_i| ‖x_i‖)), that is, clipping r_i to ±C/‖x_i‖.

    Args:
        residuals: (n, G), one column per model.
        row_norms: (n,), positive.
        clip_norms: (G,).
    """
    limits = clip_norms / row_norms[:, None]
    return residuals.clip(-limits, limits)


def mirror_scaling(eigenvalues: np.ndarray, ridge: float) -> np.ndarray:
    """Returns the eigenvalues of P = (λ_min + ρ)(H + ρI)⁻¹, of which the largest is 1."""
    return (eigenvalues[0] + ridge) / (eigenvalues + ridge)


class Columns(NamedTuple):
    """Grid points that run together, one per column; the last M of the G columns are pda-dpmd.

    Attributes:
        start: θ_0, (p, G).
        learning_rates: η, (G,).
        clip_norms: C, (G,).
        scaling: eigenvalues of P, (p, M).
    """

    start: np.ndarray
    learning_rates: np.ndarray
    clip_norms: np.ndarray
    scaling: np.ndarray


class Iterates(NamedTuple):
    """What T steps return: both (p, G), and the private mean squared error of each, (2, G)."""

    average: np.ndarray
    last: np.ndarray
    empirical_losses: np.ndarray


def zero_below_rounding(eigenvalues: np.ndarray) -> np.ndarray:
    """Sets the eigenvalues that cannot be told from zero in float64 to exactly zero."""
    threshold = len(eigenvalues) * np.finfo(np.float64).eps * eigenvalues[-1]
    return np.where(eigenvalues > threshold, eigenvalues, 0.0)


class Backend(Protocol):
    """Where the matrix products run."""

    device: str
    workers: int

    def decompose(self, design: scipy.sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        """Returns eigenvalues (ascending) and eigenvectors of XᵀX / rows, in float64."""
        ...

    def run(
        self, trial: Trial, columns: Columns, num_steps: int, noise_multiplier: float
    ) -> Iterates:
        """Runs all columns for `num_steps` steps."""
        ...

    def release(self) -> None:
        """Releases the memory that holds the trials seen so far."""
        ...


class SparseBackend:
    """NumPy and SciPy on a CPU, with the private design in compressed sparse rows."""

    def __init__(self, workers: int | None = None):
        self.workers = workers or os.cpu_count() or 1
        self.device = f"cpu, scipy.sparse, {self.workers} threads"

    def decompose(self, design: scipy.sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        """See `Backend.decompose`."""
        exact = design.astype(np.float64)
        eigenvalues, eigenvectors = np.linalg.eigh((exact.T @ exact).toarray() / design.shape[0])
        return zero_below_rounding(eigenvalues), eigenvectors

    def run(
        self, trial: Trial, columns: Columns, num_steps: int, noise_multiplier: float
    ) -> Iterates:
        """See `Backend.run`. The precision is that of `columns.start`."""
        dtype = columns.start.dtype
        num_examples = trial.design.shape[0]
        first_mirror = columns.start.shape[1] - columns.scaling.shape[1]
        noise_scales = (noise_multiplier * columns.clip_norms / num_examples).astype(dtype)
        learning_rates = columns.learning_rates.astype(dtype)
        clip_norms = columns.clip_norms.astype(dtype)
        row_norms = trial.row_norms.astype(dtype)
        targets = trial.targets[:, None]
        theta = columns.start.copy()
        total = np.zeros_like(theta)
        with np.errstate(over="ignore", invalid="ignore"):
            for noise in trial.noise[:num_steps]:
                residuals = trial.design @ theta - targets
                clipped = clip_residuals(residuals, row_norms, clip_norms)
                gradient = trial.design.T @ clipped / num_examples
                gradient += noise[:, None] * noise_scales
                if first_mirror < theta.shape[1]:
                    rotated = trial.eigenvectors.T @ gradient[:, first_mirror:]
                    rotated *= columns.scaling
                    gradient[:, first_mirror:] = trial.eigenvectors @ rotated
                gradient *= learning_rates
                theta -= gradient
                total += theta
            average = total / num_steps
            losses = [
                np.mean((trial.design @ models - targets) ** 2, axis=0)
                for models in (average, theta)
            ]
        return Iterates(average, theta, np.stack(losses))

    def release(self) -> None:
        """See `Backend.release`; nothing is held."""


class JaxBackend:
    """JAX on an accelerator (or a CPU), with the private design dense in float32."""

    STEPS_PER_CALL = 25

    def __init__(self) -> None:
        device = jax.devices()[0]
        self.workers = 4  # so that the host draws and copies one trial while another is computed
        self.device = f"{device.platform}, jax, {device.device_kind}"
        self._resident: dict[int, tuple[jax.Array, ...]] = {}

    def decompose(self, design: scipy.sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        """See `Backend.decompose`."""
        with jax.enable_x64(True):
            exact = jnp.asarray(design.toarray()).astype(jnp.float64)
            eigenvalues, eigenvectors = jnp.linalg.eigh(exact.T @ exact / design.shape[0])
            return zero_below_rounding(np.asarray(eigenvalues)), np.asarray(eigenvectors)

    def release(self) -> None:
        """See `Backend.release`; the trials are held in the device's memory."""
        self._resident.clear()

    def run(
        self, trial: Trial, columns: Columns, num_steps: int, noise_multiplier: float
    ) -> Iterates:
        """See `Backend.run`. Columns are padded with η = 0, so that few shapes are compiled."""
        if id(trial) not in self._resident:
            arrays = (
                trial.design.toarray(),
                trial.targets,
                trial.row_norms.astype(np.float32),
                trial.eigenvectors,
            )
            self._resident[id(trial)] = tuple(jnp.asarray(array) for array in arrays)
        design, targets, row_norms, eigenvectors = self._resident[id(trial)]

        count, mirrored = columns.start.shape[1], columns.scaling.shape[1]
        euclidean_width = _padded_width(count - mirrored)
        mirror_width = _padded_width(mirrored)
        position = np.arange(count)
        position[count - mirrored :] += euclidean_width - (count - mirrored)

        def pad(values: np.ndarray, width: int, at: np.ndarray) -> jax.Array:
            padded = np.zeros((*values.shape[:-1], width), np.float32)
            padded[..., at] = values
            return jnp.asarray(padded)

        width = euclidean_width + mirror_width
        theta = pad(columns.start, width, position)
        total = jnp.zeros_like(theta)
        constants = dict(
            design=design,
            targets=targets,
            row_norms=row_norms,
            eigenvectors=eigenvectors,
            learning_rates=pad(columns.learning_rates, width, position),
            clip_norms=pad(columns.clip_norms, width, position),
            noise_multiplier=jnp.float32(noise_multiplier),
            scaling=pad(columns.scaling, mirror_width, np.arange(mirrored)),
        )
        for begin in range(0, num_steps, self.STEPS_PER_CALL):
            end = min(begin + self.STEPS_PER_CALL, num_steps)
            noise = np.zeros((self.STEPS_PER_CALL, theta.shape[0]), np.float32)
            noise[: end - begin] = trial.noise[begin:end]
            theta, total = _advance(theta, total, noise=noise, count=end - begin, **constants)
        average = total / num_steps
        losses = _empirical_losses(average, theta, design, targets)
        average, theta, losses = (
            np.asarray(array)[..., position] for array in (average, theta, losses)
        )
        return Iterates(average, theta, losses)


def _padded_width(count: int) -> int:
    """Returns the smallest of 0, 8, 32, 128, ... that is not below `count`."""
    width = 8 if count else 0
    while width < count:
        width *= 4
    return width


_product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@partial(jax.jit, donate_argnames=("theta", "total"))
def _advance(
    theta: jax.Array,
    total: jax.Array,
    *,
    design: jax.Array,
    targets: jax.Array,
    row_norms: jax.Array,
    eigenvectors: jax.Array,
    learning_rates: jax.Array,
    clip_norms: jax.Array,
    noise_multiplier: jax.Array,
    scaling: jax.Array,
    noise: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Takes `count` steps with the first rows of `noise`; returns θ and the sum of iterates."""
    num_examples = design.shape[0]
    first_mirror = theta.shape[1] - scaling.shape[1]
    noise_scales = noise_multiplier * clip_norms / num_examples

    def step(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        theta, total = state
        residuals = _product(design, theta) - targets[:, None]
        clipped = clip_residuals(residuals, row_norms, clip_norms)
        gradient = _product(design.T, clipped) / num_examples
        gradient = gradient + noise[index][:, None] * noise_scales
        if scaling.shape[1]:
            rotated = _product(eigenvectors.T, gradient[:, first_mirror:])
            mirrored = _product(eigenvectors, scaling * rotated)
            gradient = jnp.concatenate([gradient[:, :first_mirror], mirrored], axis=1)
        theta = theta - learning_rates * gradient
        return theta, total + theta

    return jax.lax.fori_loop(0, count, step, (theta, total))


@jax.jit
def _empirical_losses(
    average: jax.Array, last: jax.Array, design: jax.Array, targets: jax.Array
) -> jax.Array:
    models = (average, last)
    return jnp.stack([jnp.mean((_product(design, m) - targets[:, None]) ** 2, 0) for m in models])
