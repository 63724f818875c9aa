"""Which records join which step, and what that costs: one object answers both questions.

A sampler is a frozen value made of public constants (inclusion probability, expected batch size,
capacity). It draws batches of indices with `batches`, and states the event those draws amount to
with `event`; nothing else in the library decides an amplification factor.

Draws vary in size. `passes` cuts each into rows of `capacity` indices, padded with -1, so that the
compiled step always sees one shape. A draw above the capacity takes further rows: nothing is
dropped, and Poisson stays Poisson.
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


@runtime_checkable
class Sampling(Protocol):
    """What every sampler offers; all of it is public knowledge except what `batches` draws."""

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
        """The number of records the sampler was made for, where that is public; else None."""
        ...

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """The privacy event of `num_steps` noisy sums over batches drawn by this sampler."""
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
    """Room for the expected batch and 3.5 standard deviations, in multiples of eight.

    Above it, once in about four thousand steps, a step takes a second pass.
    """
    wanted = expected_batch_size + 3.5 * math.sqrt(expected_batch_size)
    return 8 * math.ceil(wanted / 8)


def in_random_places(
    indices: np.ndarray, capacity: int, rng: np.random.Generator | SecureRandom
) -> np.ndarray:
    """The indices in random places of as many whole passes as they need, PADDING elsewhere.

    Taking an index away from a uniformly random placement leaves one of the others, as long as
    they need the same number of passes.
    """
    places = max(1, math.ceil(len(indices) / capacity)) * capacity
    found = np.full(places, PADDING, np.int32)
    if isinstance(rng, SecureRandom):
        chosen = rng.subset(len(indices), places)
    else:
        chosen = rng.permutation(places)[: len(indices)]
    found[chosen] = indices
    return found


def passes(indices: np.ndarray, capacity: int) -> np.ndarray:
    """Cuts one draw into rows of `capacity` indices, the last one padded with -1.

    An empty draw is one row of padding: an ordinary step that happens to sum nothing.

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
    """Every record joins every batch independently with probability q.

    Where the number of records n is public (zero-out and replace adjacency) build it with
    `PoissonSampling.for_batch_size`. Under add-remove adjacency n is secret, and the caller states
    q and the divisor.

    Args:
        sampling_prob: q.
        expected_batch_size: the divisor of the noisy sum; n·q where n is public.
        num_examples: n, where it is public; a run on another number of records is refused.
        capacity: rows of one padded pass; by default `default_capacity(expected_batch_size)`.
    """

    sampling_prob: float
    expected_batch_size: float
    num_examples: int | None = None
    capacity: int = 0

    name: ClassVar[str] = "Poisson"

    def __post_init__(self):
        _validate.probability(sampling_prob=self.sampling_prob)
        _check_constants(self)

    @classmethod
    def for_batch_size(
        cls, batch_size: float, *, num_examples: int, capacity: int = 0
    ) -> "PoissonSampling":
        """Poisson sampling whose batches hold `batch_size` of `num_examples` on average."""
        _check_batch_size(batch_size, num_examples)
        return cls(
            sampling_prob=batch_size / num_examples,
            expected_batch_size=batch_size,
            num_examples=num_examples,
            capacity=capacity,
        )

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """`num_steps` Poisson-sampled Gaussians."""
        return accounting.poisson_event(
            noise_multiplier, sampling_prob=self.sampling_prob, num_steps=num_steps
        )

    def check(self, adjacency: Adjacency) -> None:
        """Any adjacency; under add-remove n must not have entered."""
        _refuse_public_n(self, adjacency)

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Independent Poisson draws."""
        if isinstance(rng, SecureRandom):
            return (
                np.flatnonzero(rng.bernoulli(self.sampling_prob, num_examples))
                for _ in range(num_steps)
            )
        strategy = batch_selection.CyclicPoissonSampling(
            sampling_prob=self.sampling_prob, iterations=num_steps
        )
        return strategy.batch_iterator(num_examples, rng=rng)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling:
    """Records are dealt into groups; step t draws a Poisson sample from group t mod b.

    A record takes part at most every `num_groups` steps, which is what correlated noise with that
    many bands needs. With `sampling_prob=1` nothing is random after the dealing and nothing is
    amplified: each record takes part in every b-th step exactly (a minimum separation of b).

    Args:
        sampling_prob: q within the group whose turn it is.
        num_groups: b.
        expected_batch_size: the divisor of the noisy sum; n·q/b where n is public.
        num_examples: n, where it is public. If it is, groups are equal in size and the n mod b
            records left over take no part; otherwise each record picks its group by itself.
        capacity: rows of one padded pass; by default `default_capacity(expected_batch_size)`.
    """

    sampling_prob: float
    num_groups: int
    expected_batch_size: float
    num_examples: int | None = None
    capacity: int = 0

    name: ClassVar[str] = "cyclic Poisson"

    def __post_init__(self):
        _validate.probability(sampling_prob=self.sampling_prob)
        _validate.positive_integer(num_groups=self.num_groups)
        _check_constants(self)

    @classmethod
    def for_batch_size(
        cls, batch_size: float, *, num_examples: int, num_groups: int, capacity: int = 0
    ) -> "CyclicPoissonSampling":
        """Cyclic Poisson sampling whose batches hold `batch_size` records on average."""
        _validate.positive_integer(num_groups=num_groups, num_examples=num_examples)
        group_size = num_examples // num_groups
        if group_size == 0:
            raise ValueError(
                f"num_groups must be at most num_examples={num_examples}, got {num_groups}."
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
        """⌈num_steps / b⌉ Poisson-sampled Gaussians: as often as any one record can take part.

        Holds for independent noise, and for banded noise of at most b bands whose columns have
        unit norm (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization").
        """
        return accounting.poisson_event(
            noise_multiplier,
            sampling_prob=self.sampling_prob,
            num_steps=math.ceil(num_steps / self.num_groups),
        )

    def check(self, adjacency: Adjacency) -> None:
        """Add-remove or zero-out; replace only without amplification."""
        _refuse_public_n(self, adjacency)
        if adjacency is Adjacency.REPLACE and self.sampling_prob < 1:
            raise accounting.UnsupportedError(
                "cyclic Poisson sampling is not analysed under adjacency='replace'. Use "
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
        """Poisson draws from the groups in turn."""
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
    """Every batch is a uniformly random subset of exactly `batch_size` records.

    Args:
        batch_size: the number of records in each batch, and the divisor.
        num_examples: n, which is public.
        capacity: rows of one pass; by default `batch_size`.
    """

    batch_size: int
    num_examples: int
    capacity: int = 0

    name: ClassVar[str] = "fixed size"

    def __post_init__(self):
        _validate.positive_integer(batch_size=self.batch_size, num_examples=self.num_examples)
        _check_batch_size(self.batch_size, self.num_examples)
        _check_constants(self, math.ceil)

    @property
    def sampling_prob(self) -> float:
        """The share of the records in each batch."""
        return self.batch_size / self.num_examples

    @property
    def expected_batch_size(self) -> float:
        """The batch size, which is the same each time."""
        return float(self.batch_size)

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """`num_steps` Gaussians over samples without replacement."""
        return accounting.fixed_size_event(
            noise_multiplier,
            num_examples=self.num_examples,
            batch_size=self.batch_size,
            num_steps=num_steps,
        )

    def check(self, adjacency: Adjacency) -> None:
        """Replace only: the analysis of sampling without replacement holds n fixed."""
        if adjacency is not Adjacency.REPLACE:
            raise accounting.UnsupportedError(
                f"fixed-size sampling is not analysed under adjacency={adjacency.value!r}. Use "
                "'replace', or PoissonSampling, which costs less."
            )

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Independent uniform subsets."""
        if isinstance(rng, SecureRandom):
            return (rng.subset(self.batch_size, num_examples) for _ in range(num_steps))
        strategy = batch_selection.FixedBatchSampling(
            batch_size=self.batch_size, iterations=num_steps
        )
        return strategy.batch_iterator(num_examples, rng=rng)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Every record joins every batch, as in the paper's Algorithm 1.

    Args:
        expected_batch_size: the divisor of the noisy sum; n where n is public.
        num_examples: n, where it is public.
        capacity: rows of one padded pass; by default all n in one.
    """

    expected_batch_size: float
    num_examples: int | None = None
    capacity: int = 0

    name: ClassVar[str] = "full batch"

    def __post_init__(self):
        _check_constants(self, math.ceil)

    @property
    def sampling_prob(self) -> float:
        """1: everybody is in."""
        return 1.0

    @classmethod
    def of(cls, num_examples: int, *, capacity: int = 0) -> "FullBatch":
        """Full batches of a public number of records."""
        _validate.positive_integer(num_examples=num_examples)
        return cls(
            expected_batch_size=float(num_examples), num_examples=num_examples, capacity=capacity
        )

    def event(self, noise_multiplier: float, num_steps: int) -> DpEvent:
        """`num_steps` Gaussians."""
        return accounting.full_batch_event(noise_multiplier, num_steps=num_steps)

    def check(self, adjacency: Adjacency) -> None:
        """Any adjacency; under add-remove n must not have entered."""
        _refuse_public_n(self, adjacency)

    def batches(
        self, num_examples: int, num_steps: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """All indices, each time."""
        del rng
        everyone = np.arange(num_examples, dtype=np.int32)
        return (everyone for _ in range(num_steps))


def _check_constants(
    sampler: Sampling, capacity_for: Callable[[float], int] = default_capacity
) -> None:
    """Checks what all samplers have, and fills in the capacity where none was given."""
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
