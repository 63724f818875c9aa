"""How uncertain noise makes the coefficients of a private fit: post-processing, free of charge.

In: public rows, the released parameters and the settings of the descent. Out: the standard
deviation that the noise alone gives each coefficient, that is, over fits of the same private rows.

Around the released Θ the mean clipped gradient is linear with a Jacobian H. The error e_t of an
iterate then follows e_{t+1} = (I − ηH) e_t − ην_t with the noise ν_t ~ N(0, s²I), s = σC/n, and the
mean over the iterates f + 1, ..., T has the covariance

    s² Σ_j K_j K_jᵀ,    K_j = η/(T − f) Σ_{t = max(j, f)}^{T − 1} (I − ηH)^{t − j},    j < T.

H is taken from public rows, so that nothing private is read; it differs from that of the private
rows as far as these are of another kind. Steps that the descent takes back are not modelled.
"""

import itertools

import numpy as np

from mirrordp.linear.descent import Rows, scores_of
from mirrordp.mirror.families import Family

MAX_PARAMETERS = 1000
"""The largest number of parameters for which the covariance is computed."""

# Along steeper directions the descent takes steps back until they have about this length.
_LONGEST_STEP = 1.25


def clipped_jacobian(family: Family, theta: np.ndarray, rows: Rows, clip: float) -> np.ndarray:
    """Returns the symmetric part of the Jacobian of the mean clipped gradient, (d·m, d·m).

    A row u with residual r and curvature W has the gradient u ⊗ r and the Jacobian uuᵀ ⊗ W. If it
    is clipped, its gradient has the constant length C, and the Jacobian is
    C/(‖u‖‖r‖) · uuᵀ ⊗ (I − r rᵀ/‖r‖²) W.
    """
    scores = scores_of(rows.features, theta)
    residuals = rows.weighted(family.residuals(scores, rows.targets))
    curvatures = rows.weighted(family.covariance(scores))
    lengths = np.linalg.norm(residuals, axis=1)
    norms = rows.norms * lengths
    is_clipped = norms > clip
    directions = residuals / np.maximum(lengths, 1e-300)[:, None]
    along = np.einsum("ik,il,ilm->ikm", directions, directions, curvatures)
    factors = np.where(is_clipped, clip / np.maximum(norms, 1e-300), 1.0) / len(rows)
    weights = factors[:, None, None] * (curvatures - is_clipped[:, None, None] * along)
    width, outputs = theta.shape
    found = np.empty((width, outputs, width, outputs))
    for k, l in itertools.product(range(outputs), repeat=2):
        found[:, k, :, l] = (rows.features * weights[:, k, l, None]).T @ rows.features
    found = found.reshape(theta.size, theta.size)
    return (found + found.T) / 2


def noise_gains(curvatures: np.ndarray, *, num_steps: int, learning_rate: float) -> np.ndarray:
    """Returns √(Σ_j K_j²) for each eigenvalue of H."""
    first = num_steps // 8
    steps = learning_rate * np.clip(curvatures, 0.0, _LONGEST_STEP / learning_rate)
    powers = (1 - steps)[:, None] ** np.arange(num_steps)
    sums = np.concatenate([np.zeros((len(steps), 1)), np.cumsum(powers, axis=1)], axis=1)
    j = np.arange(num_steps)
    gains = sums[:, num_steps - j] - sums[:, np.maximum(first - j, 0)]
    return learning_rate / (num_steps - first) * np.sqrt(np.sum(gains**2, axis=1))


def noise_root(
    family: Family,
    theta: np.ndarray,
    rows: Rows,
    *,
    l2_clip_norm: float,
    noise: float,
    num_steps: int,
    learning_rate: float,
) -> np.ndarray:
    """Returns a square root of the covariance that noise gives Θ, as columns (d, m, d·m).

    Args:
        family: the family of the loss.
        theta: the released Θ, shape (d, m), in the coordinates of the descent.
        rows: public rows in the same coordinates.
        l2_clip_norm: C.
        noise: s, the standard deviation of the noise in each coordinate of the mean gradient.
        num_steps: T.
        learning_rate: η.
    """
    values, vectors = np.linalg.eigh(clipped_jacobian(family, theta, rows, l2_clip_norm))
    gains = noise_gains(values, num_steps=num_steps, learning_rate=learning_rate)
    return (noise * vectors * gains).reshape(*theta.shape, theta.size)
