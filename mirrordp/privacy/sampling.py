"""Samplers, which decide both the records of each step and what these draws cost.

A sampler is a frozen value made of public constants (inclusion probability, expected batch size,
capacity). It draws batches of indices with `batches`, and states the privacy event of these draws
with `event`; nothing else in the library decides an amplification factor.

Draws vary in size. `passes` cuts each draw into rows of `capacity` indices, padded with -1, so that
the compiled step always sees one shape. A draw above the capacity takes further rows, so nothing is
dropped and Poisson sampling stays Poisson sampling.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jax_privacy import batch_selection

from mirrordp import _validate
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency, DpEvent
from mirrordp.privacy.secure import SecureRandom

PADDING = -1

DRAWS = "number first, then records"
"""How batches follow from a generator. A run that began otherwise cannot be resumed."""


@runtime_checkable
class Sampling(Protocol):
    """The interface of samplers. All of it is public except the draws of `batches`."""

    name: ClassVar[str]
    """The sampler in one or two words, as reports print it."""

    @property
    def sampling_prob(self) -> float:
        """q: the probability that a record joins a step in which it may take part."""
        ...

    @property
    def expected_batch_size(self) -> float:
        """The public constant by which the noisy sum is divided."""
        ...

    @property
    def capacity(self) -> int:
        """Rows of one padded pass."""
        ...

    @property
    def num_examples(self) -> int | None:
        """The number of records that the sampler was made for if it is public, else None."""
        ...

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """Returns the privacy event of `num_steps` noisy sums over batches of this sampler."""
        ...

    def check(self, adjacency: Adjacency) -> None:
        """Raises `UnsupportedError` if the sampler gives no guarantee under `adjacency`."""
        ...

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Draws the indices of each of `num_steps` batches out of `num_examples` records."""
        ...


def default_capacity(expected_batch_size: float) -> int:
    """Returns the expected batch size plus 3.5 standard deviations, as a multiple of eight.

    About one step in four thousand draws more records and takes a second pass.
    """
    wanted = expected_batch_size + 3.5 * math.sqrt(expected_batch_size)
    return 8 * math.ceil(wanted / 8)


def in_random_places(
    indices: np.ndarray, capacity: int, rng: np.random.Generator | SecureRandom
) -> np.ndarray:
    """Returns the indices in random places of as many whole passes as they need, else PADDING.

    Without one of its indices, a uniformly random placement is a uniformly random placement of the
    others, as long as they need the same number of passes.
    """
    places = max(1, math.ceil(len(indices) / capacity)) * capacity
    found = np.full(places, PADDING, np.int32)
    if isinstance(rng, SecureRandom):
        chosen = rng.subset(len(indices), places)
    else:
        chosen = rng.permutation(places)[: len(indices)]
    found[chosen] = indices
    return found


def poisson_sample(
    sampling_prob: float, num_examples: int, rng: np.random.Generator | SecureRandom
) -> np.ndarray:
    """Draws a set that holds each of n records independently with probability q.

    Tossing n coins costs time for each record, also for those that stay out. Instead the *number*
    of heads is drawn, M ~ Bin(n, q), and then which M records it was, all sets of M being equally
    likely. Any set S of m records then has the probability that n coins give it:

        P[M = m] / C(n, m) = C(n, m) qᵐ (1 − q)ⁿ⁻ᵐ / C(n, m) = qᵐ (1 − q)ⁿ⁻ᵐ.

    NumPy draws the set by Floyd's algorithm, or by a partial shuffle if M is more than n / 50; the
    time is proportional to M in both cases. Both are exact, and so is `SecureRandom`'s own way. The
    order of the result follows no rule that a caller may use.
    """
    if isinstance(rng, SecureRandom):
        return rng.poisson_sample(sampling_prob, num_examples)
    size = rng.binomial(num_examples, sampling_prob)
    return rng.choice(num_examples, size=size, replace=False, shuffle=False)


def passes(indices: np.ndarray, capacity: int) -> np.ndarray:
    """Cuts one draw into rows of `capacity` indices, the last one padded with -1.

    An empty draw is one row of padding, and an ordinary step that sums nothing.

    >>> passes(np.array([4, 2, 7]), capacity=2)
    array([[ 4,  2],
           [ 7, -1]], dtype=int32)
    >>> passes(np.array([], int), capacity=2)
    array([[-1, -1]], dtype=int32)
    """
    rows = batch_selection.split_and_pad_global_batch(indices.astype(np.int32), capacity)
    return np.stack(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Sampling in which every record joins every batch independently with probability q.

    If the number of records n is public (zero-out and replace adjacency), build it with
    `PoissonSampling.for_batch_size`. Under add-remove adjacency n is secret, and the caller states
    q and the divisor.

    Args:
        sampling_prob: q.
        expected_batch_size: the divisor of the noisy sum; n·q if n is public.
        num_examples: n if it is public; a run on another number of records is refused.
        capacity: rows of one padded pass; by default `default_capacity(expected_batch_size)`.
    """

    sampling_prob: float
    expected_batch_size: float
    num_examples: int | None = None
    capacity: int = 0

    name: ClassVar[str] = "Poisson"

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.probability(sampling_prob=self.sampling_prob)
        _check_constants(self)

    @classmethod
    def for_batch_size(
        cls, batch_size: float, *, num_examples: int, capacity: int = 0
    ) -> "PoissonSampling":
        """Returns Poisson sampling of `batch_size` out of `num_examples` records on average.

        Args:
            batch_size: the expected number of records in a batch, and the divisor. It need not be
                whole: a batch has as many records as are drawn, and only their probability
                q = batch_size / num_examples follows from it.
            num_examples: n, which is public.
            capacity: as in `PoissonSampling`.
        """
        batch_size, num_examples = map(_validate.plain, (batch_size, num_examples))
        _check_batch_size(batch_size, num_examples)
        return cls(
            sampling_prob=batch_size / num_examples,
            expected_batch_size=batch_size,
            num_examples=num_examples,
            capacity=capacity,
        )

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """Returns the event of `num_steps` Poisson-sampled Gaussians."""
        return accounting.poisson_event(
            noise_multiplier, sampling_prob=self.sampling_prob, num_steps=num_steps
        )

    def check(self, adjacency: Adjacency) -> None:
        """Allows any adjacency, and add-remove only if the sampler was made without n."""
        _refuse_public_n(self, adjacency)

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Draws independent Poisson samples; see `poisson_sample`."""
        return (poisson_sample(self.sampling_prob, num_examples, rng) for _ in range(num_steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling:
    """Sampling from b groups of records in turn: step t draws a Poisson sample of group t mod b.

    A record takes part at most every `num_groups` steps, as correlated noise with that many bands
    requires. With `sampling_prob=1` nothing is random once the records are dealt into groups, and
    nothing is amplified: each record takes part in exactly every b-th step (a minimum separation of
    b).

    Args:
        sampling_prob: q within the group whose turn it is.
        num_groups: b.
        expected_batch_size: the divisor of the noisy sum; n·q/b if n is public.
        num_examples: n if it is public. Groups then have equal sizes, and the n mod b records that
            are left over take no part; otherwise each record picks its group by itself.
        capacity: rows of one padded pass; by default `default_capacity(expected_batch_size)`.
    """

    sampling_prob: float
    num_groups: int
    expected_batch_size: float
    num_examples: int | None = None
    capacity: int = 0

    name: ClassVar[str] = "cyclic Poisson"

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.probability(sampling_prob=self.sampling_prob)
        _validate.positive_integer(num_groups=self.num_groups)
        _check_constants(self)

    @classmethod
    def for_batch_size(
        cls, batch_size: float, *, num_examples: int, num_groups: int, capacity: int = 0
    ) -> "CyclicPoissonSampling":
        """Returns cyclic Poisson sampling of `batch_size` records on average, whole or not."""
        _validate.positive_integer(num_groups=num_groups, num_examples=num_examples)
        batch_size, num_examples, num_groups = map(
            _validate.plain, (batch_size, num_examples, num_groups)
        )
        group_size = num_examples // num_groups
        if group_size == 0:
            raise ValueError(
                f"num_groups must be at most num_examples={num_examples}, got {num_groups}. Use "
                "fewer groups."
            )
        _check_batch_size(batch_size, group_size, "the size of a group, num_examples // num_groups")
        return cls(
            sampling_prob=batch_size / group_size,
            num_groups=num_groups,
            expected_batch_size=batch_size,
            num_examples=num_examples,
            capacity=capacity,
        )

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """Returns the event of ⌈num_steps / b⌉ Poisson-sampled Gaussians.

        No record can take part more often. This holds for independent noise, and for banded noise
        of at most b bands whose columns have unit norm (Choquette-Choo et al. 2023, "(Amplified)
        Banded Matrix Factorization").
        """
        return accounting.poisson_event(
            noise_multiplier,
            sampling_prob=self.sampling_prob,
            num_steps=math.ceil(num_steps / self.num_groups),
        )

    def check(self, adjacency: Adjacency) -> None:
        """Allows add-remove and zero-out, and replace only without amplification."""
        _refuse_public_n(self, adjacency)
        if adjacency is Adjacency.REPLACE and self.sampling_prob < 1:
            raise accounting.UnsupportedError(
                "there is no analysis of cyclic Poisson sampling under adjacency='replace'. Use "
                "'zero-out', or sampling_prob=1 (no amplification)."
            )
        if adjacency is Adjacency.REPLACE and self.num_examples is None:
            raise accounting.UnsupportedError(
                "cyclic sampling under adjacency='replace' needs groups of fixed size. State "
                "num_examples."
            )

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Draws Poisson samples of the groups in turn."""
        if isinstance(rng, SecureRandom):
            raise TypeError("cyclic Poisson sampling has no secure form; use PoissonSampling.")
        kinds = batch_selection.PartitionType
        strategy = batch_selection.CyclicPoissonSampling(
            sampling_prob=self.sampling_prob,
            iterations=num_steps,
            cycle_length=self.num_groups,
            partition_type=kinds.INDEPENDENT if self.num_examples is None else kinds.EQUAL_SPLIT,
        )
        return strategy.batch_iterator(num_examples, rng=rng)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """Sampling in which every batch is a uniformly random subset of `batch_size` records.

    Args:
        batch_size: the number of records in each batch, and the divisor; a whole number, unlike the
            expected batch size of Poisson sampling.
        num_examples: n, which is public.
        capacity: rows of one pass; by default `batch_size`.
    """

    batch_size: int
    num_examples: int
    capacity: int = 0

    name: ClassVar[str] = "fixed size"

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.positive_integer(accounting.WHOLE_BATCHES, batch_size=self.batch_size)
        _validate.positive_integer(num_examples=self.num_examples)
        _check_batch_size(self.batch_size, self.num_examples)
        _check_constants(self, math.ceil)

    @property
    def sampling_prob(self) -> float:
        """The share of the records in each batch."""
        return self.batch_size / self.num_examples

    @property
    def expected_batch_size(self) -> float:
        """The batch size, which does not vary."""
        return float(self.batch_size)

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """Returns the event of `num_steps` Gaussians over samples without replacement."""
        return accounting.fixed_size_event(
            noise_multiplier,
            num_examples=self.num_examples,
            batch_size=self.batch_size,
            num_steps=num_steps,
        )

    def check(self, adjacency: Adjacency) -> None:
        """Allows replace only, since the analysis of sampling without replacement keeps n fixed."""
        if adjacency is not Adjacency.REPLACE:
            raise accounting.UnsupportedError(
                f"there is no analysis of fixed-size sampling under adjacency={adjacency.value!r}. "
                "Use 'replace', or PoissonSampling, which costs less."
            )

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Draws independent uniform subsets."""
        if isinstance(rng, SecureRandom):
            return (rng.subset(self.batch_size, num_examples) for _ in range(num_steps))
        strategy = batch_selection.FixedBatchSampling(
            batch_size=self.batch_size, iterations=num_steps
        )
        return strategy.batch_iterator(num_examples, rng=rng)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Sampling in which every record joins every batch, as in the paper's Algorithm 1.

    Args:
        expected_batch_size: the divisor of the noisy sum; n if n is public.
        num_examples: n if it is public.
        capacity: rows of one padded pass; by default all n in one.
    """

    expected_batch_size: float
    num_examples: int | None = None
    capacity: int = 0

    name: ClassVar[str] = "full batch"

    def __post_init__(self):
        _validate.make_plain(self)
        _check_constants(self, math.ceil)

    @property
    def sampling_prob(self) -> float:
        """Always 1."""
        return 1.0

    @classmethod
    def of(cls, num_examples: int, *, capacity: int = 0) -> "FullBatch":
        """Returns full batches of a public number of records."""
        _validate.positive_integer(num_examples=num_examples)
        return cls(
            expected_batch_size=float(num_examples), num_examples=num_examples, capacity=capacity
        )

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """Returns the event of `num_steps` Gaussians."""
        return accounting.full_batch_event(noise_multiplier, num_steps=num_steps)

    def check(self, adjacency: Adjacency) -> None:
        """Allows any adjacency, and add-remove only if the sampler was made without n."""
        _refuse_public_n(self, adjacency)

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Returns all indices for every step."""
        del rng
        everyone = np.arange(num_examples, dtype=np.int32)
        return (everyone for _ in range(num_steps))


def _check_constants(
    sampler: Sampling, capacity_for: Callable[[float], int] = default_capacity
) -> None:
    """Checks the constants that all samplers have, and fills in a missing capacity."""
    _validate.positive(expected_batch_size=sampler.expected_batch_size)
    if sampler.num_examples is not None:
        _validate.positive_integer(num_examples=sampler.num_examples)
    if sampler.capacity == 0:
        object.__setattr__(sampler, "capacity", capacity_for(sampler.expected_batch_size))
    _validate.positive_integer(capacity=sampler.capacity)


def _check_batch_size(batch_size: float, available: int, what: str = "num_examples") -> None:
    _validate.positive(batch_size=batch_size)
    _validate.positive_integer(num_examples=available)
    if batch_size > available:
        raise ValueError(
            f"batch_size must be at most {what} ({available}), got {batch_size}. "
            "Choose a smaller batch, or use FullBatch."
        )


def _refuse_public_n(sampler: Sampling, adjacency: Adjacency) -> None:
    if adjacency is Adjacency.ADD_REMOVE and sampler.num_examples is not None:
        raise accounting.UnsupportedError(
            "under adjacency='add-remove' the number of records is secret, but the sampler was "
            f"made from num_examples={sampler.num_examples}. State sampling_prob and "
            "expected_batch_size as constants of your own, or use adjacency='zero-out', where n "
            "is public."
        )
