"""California housing and UCI Adult, split into private, public and test rows.

The files are those that `shared/data/unpack.py` writes. Everything that an estimator sees is
encoded by `mirrordp.tables` from the public rows, as `mirrordp fit` does. Test rows are encoded by
the same rules and are used for evaluation only.
"""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mirrordp.tables import Table, TableEncoding, learn_encoding, read_table

PUBLIC_FRACTION = 0.04
TEST_FRACTION = 0.2
ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows, and how they are to be split.

    Attributes:
        name: of the data set.
        task: as in `mirrordp fit`.
        target: the column to predict.
        target_range: bounds of the target that hold whatever the data, for methods without public
            rows: median house values of the 1990 census are cut at 500,001 dollars.
        train: rows for training, or all rows where `test` is None.
        test: rows for evaluation, where the owners set them aside.
    """

    name: str
    task: str
    target: str
    target_range: tuple[float, float] | None
    train: Table
    test: Table | None


def housing(root: Path) -> Dataset:
    """Reads California housing: the median house value of 20,640 districts."""
    table = read_table(root / "california_housing.csv")
    return Dataset("housing", "regression", "median_house_value", (0.0, 500_001.0), table, None)


def adult(root: Path) -> Dataset:
    """Reads UCI Adult: does a person earn more than 50,000 dollars a year?"""
    train, test = (_adult_table(root / name) for name in ("adult.data", "adult.test"))
    return Dataset("adult", "classification", "income", None, train, test)


def _adult_table(path: Path) -> Table:
    """Reads a file without header; the test file has a remark first and dots at line ends."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if len(row) > 1]
    columns = dict(zip(ADULT_COLUMNS, zip(*rows, strict=True), strict=True))
    columns["income"] = tuple(label.rstrip(".") for label in columns["income"])
    return Table(path.name, columns)


DATASETS: dict[str, Callable[[Path], Dataset]] = {"housing": housing, "adult": adult}


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Features and targets of some rows."""

    features: np.ndarray
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.target)


@dataclasses.dataclass(frozen=True)
class Split:
    """One seed's rows, encoded by rules that come from the public ones."""

    dataset: Dataset
    encoding: TableEncoding
    private: Arrays
    public: Arrays
    test: Arrays


def split_dataset(dataset: Dataset, seed: int) -> Split:
    """Chooses test rows (unless they are given) and 4% of the others as public, by the seed."""
    order = np.random.default_rng(seed).permutation(len(dataset.train))
    train, test = dataset.train, dataset.test
    if test is None:
        num_test = round(TEST_FRACTION * len(order))
        test = train.rows(_mask(order[:num_test], len(train)))
        order = order[num_test:]
    num_public = round(PUBLIC_FRACTION * len(order))
    public = train.rows(_mask(order[:num_public], len(train)))
    private = train.rows(_mask(order[num_public:], len(train)))
    encoding = learn_encoding(public, target=dataset.target, task=dataset.task).encoding

    def arrays(table: Table) -> Arrays:
        encoded = encoding.encode([table], private=False)
        if encoded.unusable.any():
            raise ValueError(f"expected a target in every row of {table.source}, got gaps.")
        return Arrays(encoded.features, encoded.target)

    return Split(dataset, encoding, arrays(private), arrays(public), arrays(test))


def _mask(rows: np.ndarray, length: int) -> np.ndarray:
    mask = np.zeros(length, bool)
    mask[rows] = True
    return mask
