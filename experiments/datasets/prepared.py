"""What a data set looks like to an experiment, and how its training examples are split."""

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np


class DataError(RuntimeError):
    """A file of a data set is missing, damaged or not what it should be."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A data set, split and encoded.

    Images are pairs of float32 [n, height, width, channels] and int32 labels [n]; text is
    int32 [n, 35], where a row is one unit of privacy and holds both inputs and targets.

    Attributes:
        private: examples that only a mechanism may read.
        public: examples that anyone may read.
        validation: judges a sweep. Images: private examples taken out of `private`, None where none
            were asked for. Text: the official validation split.
        test: the official test split.
        label: what the data are, in words.
        is_complete: whether these are the published data, whole and unchanged. Where they are not,
            every table and figure prints the label.
        facts: JSON values that belong beside a result: counts, scaling constants, vocabulary,
            rates of unknown words, and under `not_covered` whatever was learned from private
            examples without noise.
    """

    # Not in repr: a traceback that prints this object must not print private examples.
    private: Any = dataclasses.field(repr=False)
    public: Any = dataclasses.field(repr=False)
    validation: Any = dataclasses.field(repr=False)
    test: Any = dataclasses.field(repr=False)
    label: str
    is_complete: bool
    facts: dict[str, Any]


def split_indices(
    count: int, *, public_fraction: float, holdout: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the indices of private, public and held-out examples, each ascending.

    The public ones are the first ⌈public_fraction · count⌉ of a permutation that the seed alone
    decides, the held-out ones follow: asking for a holdout never changes who is public. Rounding up
    gives the paper's 670,014 private examples of EMNIST and 46,813 of WikiText-2.
    """
    if not 0 < public_fraction < 1:
        raise ValueError(f"public_fraction must be a number in (0, 1), got {public_fraction!r}.")
    # 0.04 * 50,000 must not become 2,001 because of the last bit of the product.
    num_public = math.ceil(round(public_fraction * count, 6))
    if not 0 <= holdout < count - num_public:
        raise ValueError(
            f"holdout must be at least 0 and leave private examples over: expected less than "
            f"{count - num_public:,}, got {holdout!r}."
        )
    order = np.random.default_rng(seed).permutation(count)
    public, held_out, private = np.split(order, [num_public, num_public + holdout])
    return np.sort(private), np.sort(public), np.sort(held_out)


def has_digest(path: Path, algorithm: str, digest: str) -> bool:
    """Returns whether the file has this checksum."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest() == digest


def thousands(count: int) -> str:
    """Returns the count as labels and messages show it: 99,845."""
    return f"{count:,}"
