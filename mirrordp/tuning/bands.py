"""Correlated noise that is shaped by the public curvature."""

import numpy as np
from scipy import optimize, signal

from mirrordp import _validate
from mirrordp.data import PublicData
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import BandedNoise
from mirrordp.privacy.trainable import Trainable
from mirrordp.tuning.rules import public_spectrum
from mirrordp.types import LossFn, Params, PyTree


def public_bands(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    *,
    learning_rate: float,
    num_steps: int,
    num_bands: int,
    trainable: PyTree | Trainable | None = None,
    seed: int = 0,
) -> BandedNoise:
    """Returns the correlated noise that raises the public loss least (as in NoiseCurve, 2025).

    Noise n_t of step t moves θ, and with it all gradients that follow. On a quadratic with Hessian
    H, whose eigenvalues are λ_i, SGD of rate η makes of it, along the eigenvector i and after step
    t, a shift of

        e_t = −η Σ_{s ≤ t} (1 − ηλ_i)^{t−s} n_s,

    which costs ½ λ_i E[e_t²]. `BandedNoise.optimal` takes H for zero and so cancels noise that the
    curvature would have taken back anyway. This function minimises the mean over steps of
    Σ_i ½ λ_i E[e_t²] over banded Toeplitz matrices C, where n = C⁻¹z and z is independent noise
    whose size grows with the norm of C's columns. H is the Hessian of the public loss, of which
    Lanczos' method gives sums over eigenvalues.

    The coefficients come from public rows, so the guarantee is that of any `BandedNoise`: it needs
    `CyclicPoissonSampling` with at least `num_bands` groups, whose amplification is weaker than
    that of `PoissonSampling`. Whether the exchange pays, `public_noise_loss` tells: at ε = 8 it
    often does, at ε = 1 it seldom does.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        params: θ, where the private run begins.
        public: the public rows.
        learning_rate: η of SGD; with momentum m, η/(1 − m).
        num_steps: T.
        num_bands: the number of bands of C.
        trainable: as in `mirrordp.clipped_grad`.
        seed: decides the directions of Lanczos' method.

    Raises:
        ValueError: if gradient descent of this rate diverges on the public loss.
    """
    _validate.positive(learning_rate=learning_rate)
    start = BandedNoise.optimal(num_steps, num_bands)
    values, counts = public_spectrum(loss_fn, params, public, trainable=trainable, seed=seed)
    return shaped_bands(start, values, counts, learning_rate, num_steps)


def public_noise_loss(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    mechanism: Mechanism,
    *,
    learning_rate: float,
    num_steps: int | None = None,
    trainable: PyTree | Trainable | None = None,
    seed: int = 0,
) -> float:
    """Returns by how much a mechanism's noise raises the public loss, as a mean over steps.

    This is Σ_i ½ λ_i E[e_t²] in the notation of `public_bands`, averaged over t, for independent
    and for banded noise: a number with which mechanisms of one ε can be compared.

    Args:
        loss_fn: as in `public_bands`.
        params: likewise.
        public: likewise.
        mechanism: whose noise.
        learning_rate: as in `public_bands`.
        num_steps: T; by default that of the mechanism.
        trainable: as in `mirrordp.clipped_grad`.
        seed: decides the directions of Lanczos' method.
    """
    _validate.positive(learning_rate=learning_rate)
    steps = mechanism.num_steps if num_steps is None else num_steps
    values, counts = public_spectrum(loss_fn, params, public, trainable=trainable, seed=seed)
    _check_rate(values, learning_rate)
    noise = mechanism.noise
    coefficients = noise.coefficients if isinstance(noise, BandedNoise) else (1.0,)
    size = mechanism.noise_stddev / mechanism.sampling.expected_batch_size
    one, _ = _harm(np.asarray(coefficients), values, counts, learning_rate, steps)
    return float(size**2 * one)


def shaped_bands(
    start: BandedNoise,
    values: np.ndarray,
    counts: np.ndarray,
    learning_rate: float,
    num_steps: int,
) -> BandedNoise:
    """Returns the best coefficients for eigenvalues λ_i, each of which occurs `counts` times."""
    _check_rate(values, learning_rate)
    if start.num_bands == 1 or not np.any(values * counts > 0):
        return start

    def objective(rest: np.ndarray) -> tuple[float, np.ndarray]:
        harm, gradient = _harm(np.r_[1.0, rest], values, counts, learning_rate, num_steps)
        return float(np.log(harm)), gradient[1:] / harm

    first = np.asarray(start.coefficients[1:]) / start.coefficients[0]
    found = optimize.minimize(objective, first, jac=True, method="L-BFGS-B")
    best = found.x if found.fun < objective(first)[0] else first
    return BandedNoise((1.0, *(float(each) for each in best)))


def _harm(
    coefficients: np.ndarray,
    values: np.ndarray,
    counts: np.ndarray,
    learning_rate: float,
    num_steps: int,
) -> tuple[float, np.ndarray]:
    """Returns the mean loss of noise with `stddev` one, and its gradient in the coefficients.

    The inverse of a Toeplitz matrix is one, and so is its product with the matrix of powers of
    1 − ηλ. Their first columns p and u are impulse responses of linear filters. The derivative of p
    in coefficient j is −(p * p), delayed by j steps.
    """
    one = np.zeros(num_steps)
    one[0] = 1.0
    inverse = signal.lfilter([1.0], coefficients, one)
    squared = signal.lfilter([1.0], coefficients, inverse)
    # u_k is part of the shifts of all steps but the first k.
    share = 1 - np.arange(num_steps) / num_steps
    total, gradient = 0.0, np.zeros(len(coefficients))
    for value, weight in zip(values, counts * values / 2, strict=True):
        if weight == 0:
            continue
        back = [1.0, learning_rate * value - 1.0]
        shift = signal.lfilter([learning_rate], back, inverse)
        total += weight * (share @ np.square(shift))
        moved = signal.lfilter([learning_rate], back, squared)
        weighted = share * shift
        for delay in range(len(coefficients)):
            gradient[delay] -= 2 * weight * (weighted[delay:] @ moved[: num_steps - delay])
    column = float(coefficients @ coefficients)
    return column * total, column * gradient + 2 * total * coefficients


def _check_rate(values: np.ndarray, learning_rate: float) -> None:
    largest = float(values.max(initial=0.0))
    if learning_rate * largest >= 2:
        raise ValueError(
            f"learning_rate must be below {2 / largest:.3g}, got {learning_rate:g}. Above it, "
            "gradient descent diverges on the public loss, whose largest curvature is "
            f"{largest:.3g}."
        )
