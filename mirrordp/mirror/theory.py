"""The paper's theory of linear regression in numbers.

In: the eigenvalues λ_i of the Hessian (of the population loss for the bounds, of the scaled public
loss for the noise of a step), sample sizes and privacy parameters. Out: χ and the excess-risk
bounds of the theorem on linear regression, the step sizes and step count of its proof, the noise
per direction of the theorem on local noise stability, Gaussian widths, and Algorithm 1's noise
scale. `docs/theory.md` compares them with measurements.

Bounds are stated up to a constant and up to factors polylogarithmic in n_priv, n_pub and λ_min,
which the paper hides in Õ(·). Compare their growth and their ratios, not their values. The factor
log(1/δ) is not hidden; it is part of the result.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from mirrordp import _validate
from mirrordp.privacy.accounting import Adjacency, UnsupportedError


def _positive_vector(**values: Any) -> np.ndarray:
    ((name, value),) = values.items()
    array = np.asarray(value, np.float64)
    if array.ndim != 1 or array.size == 0 or not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(
            f"{name} must be a non-empty list of positive finite numbers, got {value!r}. Add a "
            "ridge to a Hessian without full rank."
        )
    return array


def _theorem_radii(eigenvalues: np.ndarray, num_public: int, delta: float) -> np.ndarray:
    """Returns half-axes min{1, √(log(1/δ)/n_pub) / λ_i} of an ellipsoid that encloses C."""
    return np.minimum(1.0, math.sqrt(math.log(1 / delta) / num_public) / eigenvalues)


def chi(eigenvalues: Any, num_public: int, delta: float) -> float:
    """Returns χ of the theorem on linear regression:

        χ = max{1/λ_min, λ_max n_pub} · Σ_i min{1, log(1/δ) / (λ_i² n_pub)}.

    The first factor is one over the strong convexity of Ψ in the norm of C (without its log(1/δ)),
    and the second is the squared Gaussian width of C. If all λ_i = 1/p and n_pub ≈ p, then χ is p².
    If one eigenvalue is 1/p^1.5 and n_pub = p^c with 2 ≤ c ≤ 2.5, then χ is p^(4.5 − c).

    Args:
        eigenvalues: λ, the eigenvalues of the Hessian of the population loss.
        num_public: n_pub.
        delta: δ.
    """
    values = _positive_vector(eigenvalues=eigenvalues)
    _validate.positive_integer(num_public=num_public)
    _validate.open_unit_interval(delta=delta)
    curvature = max(1 / values.min(), values.max() * num_public)
    return float(curvature * np.sum(_theorem_radii(values, num_public, delta) ** 2))


class ExcessRiskBound(NamedTuple):
    """The two terms of an excess-risk bound, each up to the constants that Õ(·) hides.

    Attributes:
        privacy: the cost of the noise, which falls as 1/n_priv².
        sampling: the cost of the finite private sample, the same with and without public data.
    """

    privacy: float
    sampling: float

    @property
    def total(self) -> float:
        """The sum of both terms."""
        return self.privacy + self.sampling


def excess_risk_bound_pda(
    eigenvalues: Any, *, num_public: int, num_private: int, epsilon: float, delta: float
) -> ExcessRiskBound:
    """Returns the bound of PDA-DPMD, χ log(1/δ)/(ε n_priv)² + 1/(λ_min n_priv).

    Args:
        eigenvalues: λ, the eigenvalues of the Hessian of the population loss.
        num_public: n_pub.
        num_private: n_priv.
        epsilon: ε.
        delta: δ.
    """
    return _bound(eigenvalues, chi(eigenvalues, num_public, delta), num_private, epsilon, delta)


def excess_risk_bound_dpsgd(
    eigenvalues: Any, *, num_private: int, epsilon: float, delta: float
) -> ExcessRiskBound:
    """Returns the bound of DP-SGD, p log(1/δ)/(λ_min (ε n_priv)²) + 1/(λ_min n_priv).

    The paper leaves log(1/δ) out here. It is included so that the two bounds can be compared.

    Args:
        eigenvalues: λ, the p eigenvalues of the Hessian of the population loss.
        num_private: n_priv.
        epsilon: ε.
        delta: δ.
    """
    values = _positive_vector(eigenvalues=eigenvalues)
    return _bound(values, len(values) / float(values.min()), num_private, epsilon, delta)


def _bound(eigenvalues, factor, num_private, epsilon, delta) -> ExcessRiskBound:
    values = _positive_vector(eigenvalues=eigenvalues)
    _validate.positive_integer(num_private=num_private)
    _validate.positive(epsilon=epsilon)
    _validate.open_unit_interval(delta=delta)
    return ExcessRiskBound(
        privacy=factor * math.log(1 / delta) / (epsilon * num_private) ** 2,
        sampling=1 / (float(values.min()) * num_private),
    )


def predicted_noise(
    coefficients: Any, eigenvalues: Any, *, learning_rate: float, noise_stddev: float
) -> float:
    """Returns how far the noise of one step moves θ along v = Σ a_i v_i, on average:

        E|⟨θ̂ − θ̄, v⟩| = η σ √(2/π · Σ_i (a_i/λ_i)²)

    (the theorem on local noise stability), where θ̂ is the iterate with noise and θ̄ the one without.
    DP-SGD has λ_i = 1, which gives η σ √(2/π) in every direction.

    Args:
        coefficients: a, the direction in the eigenbasis; a unit vector for the paper's statement.
        eigenvalues: λ, the eigenvalues of the Hessian that the step divides by, with the map's
            scale as in `QuadraticMap.scaled_eigenvalues`.
        learning_rate: η.
        noise_stddev: σ, the standard deviation of each coordinate of the gradient's noise.
    """
    values = _positive_vector(eigenvalues=eigenvalues)
    weights = np.asarray(coefficients, np.float64)
    if weights.shape != values.shape:
        raise ValueError(
            f"coefficients must have one entry per eigenvalue, shape {values.shape}, got shape "
            f"{weights.shape}."
        )
    _validate.positive(learning_rate=learning_rate)
    _validate.non_negative(noise_stddev=noise_stddev)
    return learning_rate * noise_stddev * math.sqrt(2 / math.pi * np.sum((weights / values) ** 2))


def predicted_noise_per_direction(
    eigenvalues: Any, *, learning_rate: float, noise_stddev: float
) -> np.ndarray:
    """Returns `predicted_noise` along each eigenvector, η σ √(2/π) / λ_i.

    Args:
        eigenvalues: λ, as in `predicted_noise`.
        learning_rate: η.
        noise_stddev: σ.
    """
    values = _positive_vector(eigenvalues=eigenvalues)
    _validate.positive(learning_rate=learning_rate)
    _validate.non_negative(noise_stddev=noise_stddev)
    return learning_rate * noise_stddev * math.sqrt(2 / math.pi) / values


def gaussian_width_ellipsoid(radii: Any) -> float:
    """Returns the Gaussian width E max_{x ∈ Q} ⟨g, x⟩ = E √(Σ r_i² g_i²) of an ellipsoid Q.

    Here g ~ N(0, I). The result is the exact value, not the paper's estimate √(Σ r_i²); it lies
    between √(2/π) times that estimate (one axis) and the estimate (many equal axes). It is found by

        E √S = 1/(2√π) ∫_0^∞ (1 − E e^{−sS}) s^{−3/2} ds,   E e^{−sS} = Π_i (1 + 2 s r_i²)^{−1/2},

    with the trapezoidal rule in log s, which is exact to about 1e-12 for this integrand.

    Args:
        radii: the half-axes r_i ≥ 0.
    """
    axes = np.asarray(radii, np.float64)
    if axes.ndim != 1 or axes.size == 0 or not (np.isfinite(axes).all() and (axes >= 0).all()):
        raise ValueError(f"radii must be a list of finite numbers of at least 0, got {radii!r}.")
    estimate = float(np.linalg.norm(axes))
    if estimate == 0:
        return 0.0
    squares = (axes / estimate) ** 2
    # The integrand falls as e^{−|u|/2} on both sides: at ±64 it is 1e-14 of its peak.
    spacing = 0.25
    log_s = np.arange(-64.0, 64.0, spacing)
    log_laplace = np.array([-0.5 * np.sum(np.log1p(2 * s * squares)) for s in np.exp(log_s)])
    integral = spacing * np.sum(-np.expm1(log_laplace) * np.exp(-log_s / 2))
    return float(estimate * integral / (2 * math.sqrt(math.pi)))


class TheoremSchedule(NamedTuple):
    """The choice of η_t and T in the proof of the theorem on linear regression.

    Attributes:
        num_steps: T.
        strong_convexity: Δ, of Ψ in the norm of C.
        radius: ‖C‖, the longest half-axis.
        gaussian_width: G_C, as the proof bounds it: √(Σ r_i²).
        scale: the scale of the map that the learning rates are for.
    """

    num_steps: int
    strong_convexity: float
    radius: float
    gaussian_width: float
    scale: float

    def learning_rate(self, step: Any) -> Any:
        """Returns η for step = 0, 1, ..., T − 1; arrays and traced integers are allowed."""
        return self.scale / (step + 1)


def theorem_schedule(
    eigenvalues: Any,
    *,
    num_public: int,
    num_private: int,
    epsilon: float,
    delta: float,
    scale: float = 1.0,
) -> TheoremSchedule:
    """Returns η_t and T of the theorem's proof, with the constants hidden in Θ(·) set to one.

        T = ‖C‖² (ε n_priv)² / (‖C‖² + G_C²),   η_t = 1/t for the unscaled Ψ,  t = 1, ..., T.

    The proof sets η'_t = 1/(Δt) for the map Ψ' = Ψ/Δ. A step with (Ψ', η') equals the step with
    (Ψ, Δη'), so that η_t = 1/t. (The paper writes η' = Δη where the equivalence needs η' = η/Δ; its
    stability argument, with Σ η_t ≈ log T, uses 1/t as well.) A map scaled by s needs s/t.

    T serves the proof and is large, about (ε n_priv)²/p; far fewer steps are better in practice.

    Args:
        eigenvalues: λ, the eigenvalues of the unscaled Hessian of the public loss.
        num_public: n_pub.
        num_private: n_priv.
        epsilon: ε.
        delta: δ.
        scale: s, the `QuadraticMap.scale` of the map in use.
    """
    values = _positive_vector(eigenvalues=eigenvalues)
    _validate.positive_integer(num_public=num_public, num_private=num_private)
    _validate.positive(epsilon=epsilon, scale=scale)
    _validate.open_unit_interval(delta=delta)
    radii = _theorem_radii(values, num_public, delta)
    radius, width = float(radii.max()), float(np.linalg.norm(radii))
    num_steps = radius**2 * (epsilon * num_private) ** 2 / (radius**2 + width**2)
    return TheoremSchedule(
        num_steps=max(1, round(num_steps)),
        strong_convexity=float(np.min(values * radii**2)),
        radius=radius,
        gaussian_width=width,
        scale=float(scale),
    )


def paper_noise_stddev(
    *,
    l2_clip_norm: float,
    num_steps: int,
    num_private: int,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
) -> float:
    """Returns Algorithm 1's σ of the *mean* gradient, σ² = 8 L² T log(1/δ) / (ε n_priv)².

    It is sufficient for (ε, δ) if T full batches are released, and loose: a claimed ε = 1 at
    δ = 1e-5 is really 0.356. Calibration by exact composition adds less noise; this function is
    for comparison with the paper.

    Args:
        l2_clip_norm: L.
        num_steps: T.
        num_private: n_priv, the number by which the sum is divided.
        epsilon: ε, at most 8 log(1/δ).
        delta: δ.
        adjacency: add-remove or zero-out. Under replace the sensitivity is twice what the formula
            assumes.

    Raises:
        UnsupportedError: if the formula does not give (ε, δ).
    """
    _validate.positive(l2_clip_norm=l2_clip_norm, epsilon=epsilon)
    _validate.positive_integer(num_steps=num_steps, num_private=num_private)
    _validate.open_unit_interval(delta=delta)
    _validate.instance_of(Adjacency, adjacency=adjacency)
    if adjacency is Adjacency.REPLACE:
        raise UnsupportedError(
            "the paper's noise formula holds when one record is added or removed, got "
            f"adjacency={adjacency.value!r}, where it is violated from epsilon ≈ 8 on. Use the "
            "exact calibration."
        )
    limit = 8 * math.log(1 / delta)
    if epsilon > limit:
        raise UnsupportedError(
            f"the paper's noise formula holds for epsilon ≤ 8 log(1/delta) = {limit:.4g}, got "
            f"{epsilon!r}. Use the exact calibration."
        )
    variance = 8 * num_steps * math.log(1 / delta) * (l2_clip_norm / (epsilon * num_private)) ** 2
    return math.sqrt(variance)
