"""Gaussian noise for the clipped sum, independent or correlated over steps.

Both kinds are thin over jax_privacy's privatizers: optax transformations that add noise to the
clipped sum. `stddev` is always noise_multiplier · C, the noise on the *sum*, before any division.
Noise is drawn in float32 or wider, from a key that has no default.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz

from mirrordp import _validate


@runtime_checkable
class Noise(Protocol):
    """A way to add noise of a given scale to a stream of sums."""

    @property
    def num_bands(self) -> int:
        """Over how many neighbouring steps noise is correlated; 1 is independent noise."""
        ...

    def privatizer(self, stddev: float, key: jax.Array) -> optax.GradientTransformation:
        """The transformation that adds the noise; its state holds the key, so keep it secret."""
        ...


@dataclasses.dataclass(frozen=True)
class GaussianNoise:
    """Independent N(0, stddev²) in every coordinate of every step."""

    @property
    def num_bands(self) -> int:
        """1: steps are independent."""
        return 1

    def privatizer(self, stddev: float, key: jax.Array) -> optax.GradientTransformation:
        """Adds fresh Gaussian noise to each sum."""
        return _with_full_tails(
            lambda stddev, key: noise_addition.gaussian_privatizer(
                stddev=stddev, prng_key=key, dtype=_noise_dtype()
            ),
            stddev,
            key,
        )


@dataclasses.dataclass(frozen=True)
class BandedNoise:
    """Noise C⁻¹z that is correlated over steps, for a banded Toeplitz strategy matrix C.

    Negatively correlated noise partly cancels in the sum over steps that training computes. The
    guarantee is that of z alone if a record takes part at most once in any `num_bands` consecutive
    steps: use `CyclicPoissonSampling` with at least as many groups.

    Args:
        coefficients: the first column of C: c_0 > 0, c_1, ..., one per band.
    """

    coefficients: tuple[float, ...]

    def __post_init__(self):
        if len(self.coefficients) == 0 or not np.all(np.isfinite(self.coefficients)):
            raise ValueError(
                f"coefficients must be finite numbers, at least one, got {self.coefficients!r}. "
                "BandedNoise.optimal(num_steps, num_bands) computes good ones."
            )
        _validate.positive(coefficients_0=self.coefficients[0])
        object.__setattr__(self, "coefficients", tuple(float(c) for c in self.coefficients))

    @classmethod
    def optimal(cls, num_steps: int, num_bands: int) -> "BandedNoise":
        """The coefficients with the least mean squared error of prefix sums (BandMF)."""
        _validate.positive_integer(num_steps=num_steps, num_bands=num_bands)
        if num_bands > num_steps:
            raise ValueError(f"num_bands must be at most num_steps={num_steps}, got {num_bands}.")
        found = toeplitz.optimize_banded_toeplitz(n=num_steps, bands=num_bands)
        return cls(tuple(float(c) for c in found))

    @property
    def num_bands(self) -> int:
        """The number of bands of C."""
        return len(self.coefficients)

    def privatizer(self, stddev: float, key: jax.Array) -> optax.GradientTransformation:
        """Adds correlated noise, scaled up by the column norm of C so that z has `stddev`."""
        return _with_full_tails(
            lambda stddev, key: noise_addition.matrix_factorization_privatizer(
                toeplitz.inverse_as_streaming_matrix(jnp.asarray(self.coefficients)),
                stddev=stddev,
                prng_key=key,
                dtype=_noise_dtype(),
            ),
            stddev * math.hypot(*self.coefficients),
            key,
        )


def _with_full_tails(
    make: Callable[[float, jax.Array], optax.GradientTransformation], stddev: float, key: jax.Array
) -> optax.GradientTransformation:
    """Four independent streams of half the scale: a Gaussian whose tails are not cut.

    JAX draws float32 normals from 23 random bits, and so never beyond about 5.4 standard
    deviations. A value out there would prove that a record took part; at small noise multipliers
    that alone breaks the stated δ. The sum of four reaches 10.8, where nothing is left to prove.
    """
    parts = jax.random.split(key, 4)
    return optax.chain(*(make(stddev / 2, part) for part in parts))


def _noise_dtype() -> jnp.dtype:
    return jnp.promote_types(jnp.result_type(float), jnp.float32)
