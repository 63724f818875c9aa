"""The best of a random number of runs, and what it costs.

Whoever trains K times and keeps the best model has looked at private rows K times. If K is fixed,
the costs of all K runs add up. If K is random and nobody learns it, the cost grows only with the
logarithm of its mean (Papernot and Steinke 2022, "Hyperparameter Tuning with Rényi Differential
Privacy", arXiv:2110.03620). Let a run, together with its score, have Rényi divergence ε(λ) at order
λ. For K from the truncated negative binomial distribution of shape η and stopping probability γ,

    ε'(λ) = ε(λ) + (1 + η) min_λ̂ [(1 − 1/λ̂) ε(λ̂) + log(1/γ)/λ̂] + log(E K)/(λ − 1)   (Theorem 2)

at every order λ > 1, and for K from the Poisson distribution of mean μ, where a run is
(ε̂, δ̂)-differentially private at ε̂ = log(1 + 1/(λ − 1)),

    ε'(λ) = ε(λ) + μ δ̂ + log(μ)/(λ − 1).                                                (Theorem 6)

Both need runs that are independent and alike: each draws its settings at random from the same list.
They need K to be drawn from a distribution that was fixed beforehand, and to stay secret: they
bound what the best run reveals, and not the best run together with K.
"""

import dataclasses
import math

import dp_accounting
import numpy as np
import scipy.optimize
import scipy.special

from mirrordp import _validate
from mirrordp.privacy.accounting import DpEvent

_LEAST_SHAPE = 0.01
# Beyond, the stopping probability is lost in rounding.
_LEAST_MEAN, _MOST_RUNS = 1 + 1e-6, 1e9


@dataclasses.dataclass(frozen=True)
class NumberOfRuns:
    """The distribution of the number K of runs whose best is released.

    The truncated negative binomial distribution with shape η and stopping probability γ is

        P[K = k] ∝ (1 − γ)^k Γ(k + η) / k!     for k = 1, 2, ...

    and γ follows from the mean. Shape 0 is the logarithmic distribution, P[K = k] ∝ (1 − γ)^k / k,
    which costs least for a mean; shape 1 is the geometric one. An infinite shape stands for the
    Poisson distribution, where K may be 0 and then nothing is trained. The logarithmic distribution
    has K = 1 most often and a long tail; the Poisson one keeps K near its mean, and costs far more
    if the mean is large.

    >>> NumberOfRuns(10).stopping_probability < NumberOfRuns.geometric(10).stopping_probability
    True

    Args:
        mean: E K, at least 1.
        shape: η: 0, or at least 0.01; infinity for the Poisson distribution.
    """

    mean: float
    shape: float = 0.0

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.positive(mean=self.mean)
        if self.mean < 1:
            raise ValueError(
                f"mean must be at least 1, got {self.mean!r}. Choose how many runs there shall be "
                "on average."
            )
        if 1 < self.mean < _LEAST_MEAN or self.mean > _MOST_RUNS:
            raise ValueError(
                f"mean must be 1, or between {_LEAST_MEAN} and {_MOST_RUNS:g}, got {self.mean!r}. "
                "Choose how many runs there shall be on average."
            )
        if self.shape != math.inf:
            _validate.non_negative("Or math.inf, for the Poisson distribution.", shape=self.shape)
            if 0 < self.shape < _LEAST_SHAPE:
                raise ValueError(
                    f"shape must be 0 or at least {_LEAST_SHAPE}, got {self.shape!r}. Use 0, which "
                    "is the logarithmic distribution."
                )

    @classmethod
    def geometric(cls, mean: float) -> "NumberOfRuns":
        """Returns the geometric distribution."""
        return cls(mean, 1.0)

    @classmethod
    def poisson(cls, mean: float) -> "NumberOfRuns":
        """Returns the Poisson distribution."""
        return cls(mean, math.inf)

    @property
    def name(self) -> str:
        """The name of the distribution, as reports print it."""
        known = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson"}
        name = known.get(self.shape)
        return name or f"truncated negative binomial of shape {self.shape:g}"

    def __str__(self) -> str:
        return f"{self.name} with mean {self.mean:g}"

    @property
    def stopping_probability(self) -> float:
        """γ: the parameter that gives the mean; there is none for the Poisson distribution."""
        if self.shape == math.inf:
            raise ValueError(
                "the Poisson distribution has no stopping probability, got shape=inf. Use its mean."
            )
        if self.mean == 1:
            return 1.0
        if self.shape == 1:
            return 1 / self.mean
        # In the logarithm of γ, where the mean falls from huge to 1.
        root = scipy.optimize.brentq(
            lambda log_gamma: math.log(self._mean_at(math.exp(log_gamma)) / self.mean),
            math.log(1e-12 / self.mean), -1e-9, xtol=1e-14,
        )  # fmt: skip
        return math.exp(root)  # pyright: ignore[reportArgumentType]

    def _mean_at(self, gamma: float) -> float:
        odds = (1 - gamma) / gamma
        if self.shape == 0:
            return odds / -math.log(gamma)
        return self.shape * odds / -math.expm1(self.shape * math.log(gamma))

    def probabilities(self, most: int) -> np.ndarray:
        """Returns P[K = k] for k = 0, ..., most."""
        k = np.arange(most + 1)
        if self.shape == math.inf:
            return np.exp(k * math.log(self.mean) - self.mean - scipy.special.gammaln(k + 1))
        gamma = self.stopping_probability
        if gamma == 1:
            return (k == 1).astype(float)
        k = k[1:]
        if self.shape == 0:
            found = np.exp(k * math.log1p(-gamma)) / (k * -math.log(gamma))
        else:
            ways = scipy.special.gammaln(k + self.shape) - scipy.special.gammaln(k + 1)
            ways -= scipy.special.gammaln(self.shape)
            total = math.log(math.expm1(-self.shape * math.log(gamma)))
            found = np.exp(ways + k * math.log1p(-gamma) - total)
        return np.concatenate([[0.0], found])

    def draw(self, rng: np.random.Generator) -> int:
        """Draws K. It is secret, also when the search is over."""
        _validate.instance_of(np.random.Generator, rng=rng)
        if self.shape == math.inf:
            return int(rng.poisson(self.mean))
        gamma = self.stopping_probability
        if gamma == 1:
            return 1
        if self.shape == 0:
            return int(rng.logseries(1 - gamma))
        while (drawn := int(rng.negative_binomial(self.shape, gamma))) == 0:
            pass
        return drawn

    def event(self, run: DpEvent) -> DpEvent:
        """Returns the cost of a whole search.

        Args:
            run: the cost of one run together with its score.
        """
        return dp_accounting.dp_event.RepeatAndSelectDpEvent(run, float(self.mean), self.shape)
