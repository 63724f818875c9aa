"""Additive models of cells: one table of values per column, and per pair of columns.

Columns are cut into bins by public rows. A pair of columns then divides the rows into cells, as a
tree of two levels does, and each cell has a value per output:

    s(x) = Θᵀx + b + Σ_k V_k[cell of x in term k].

Public rows choose the columns and the bins; the linear part and the values are learned from private
rows by `mirrordp.linear.boosting`. Only NumPy is used, because this code is also part of exported
predictors.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

_PAIR_BINS, _FINE_BINS = 16, 32
_FEWEST_BINS = 4
_ROUNDING = 1e-12
_LARGEST_BLOCK = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A column as a number of bins.

    Attributes:
        features: the feature that is cut at `edges`; or, without edges, indicators of which at most
            one is set: bin 0 stands for none of them.
        edges: increasing numbers; a feature in [e_k, e_{k+1}) is in bin k + 1.
    """

    features: tuple[int, ...]
    edges: np.ndarray

    def __post_init__(self):
        is_cut = len(self.edges) > 0
        if (is_cut and len(self.features) != 1) or not self.features or min(self.features) < 0:
            raise ValueError("expected one feature to cut, or indicators")
        if not np.isfinite(self.edges).all() or (np.diff(self.edges) <= 0).any():
            raise ValueError("expected increasing edges")

    @property
    def size(self) -> int:
        """The number of bins."""
        return 1 + (len(self.edges) or len(self.features))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns the bin of each row."""
        if len(self.edges):
            return np.searchsorted(self.edges, features[:, self.features[0]], side="right")
        indicators = features[:, list(self.features)] > 0.5
        return np.where(indicators.any(axis=1), 1 + indicators.argmax(axis=1), 0)


@dataclasses.dataclass(frozen=True, eq=False)
class TreesScorer:
    """A scorer: a linear function of the features, and the values of the cells that they fall in.

    Attributes:
        coefficients: Θᵀ, shape (outputs, features).
        intercepts: b, shape (outputs,).
        cuts: the columns as bins.
        terms: for each term the positions in `cuts` of its one or two columns.
        values: for each term an array of shape (cells, outputs).
    """

    coefficients: np.ndarray
    intercepts: np.ndarray
    cuts: tuple[Cut, ...]
    terms: tuple[tuple[int, ...], ...]
    values: tuple[np.ndarray, ...]
    kind: ClassVar[str] = "trees"

    def __post_init__(self):
        outputs, width = self.coefficients.shape
        if self.intercepts.shape != (outputs,) or len(self.values) != len(self.terms):
            raise ValueError("expected intercepts and values of the same outputs")
        if any(max(cut.features) >= width for cut in self.cuts):
            raise ValueError("expected cuts of features that exist")
        for term, values in zip(self.terms, self.values, strict=True):
            if not 1 <= len(term) <= 2 or not all(0 <= k < len(self.cuts) for k in term):
                raise ValueError("expected terms of one or two columns")
            if values.shape != (self.num_cells(term), outputs):
                raise ValueError("expected a value per cell and output")
        arrays = (self.coefficients, self.intercepts, *self.values)
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError("expected finite values")

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and of features."""
        return self.coefficients.shape

    def num_cells(self, term: Sequence[int]) -> int:
        """Returns the number of cells of a term."""
        return int(np.prod([self.cuts[k].size for k in term]))

    def bins(self, features: np.ndarray) -> list[np.ndarray]:
        """Returns the bin of each row, for every cut."""
        return [cut(features).astype(np.int32) for cut in self.cuts]

    def cells(
        self, bins: Sequence[np.ndarray] | Mapping[int, np.ndarray], term: Sequence[int]
    ) -> np.ndarray:
        """Returns the cell of each row in a term."""
        if len(term) == 1:
            return bins[term[0]]
        return bins[term[0]] * self.cuts[term[1]].size + bins[term[1]]

    def start(self, features: np.ndarray) -> np.ndarray:
        """Returns the linear part of the scores."""
        return features @ self.coefficients.T + self.intercepts

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns the scores of each row, shape (rows, outputs)."""
        scores, bins = self.start(features), self.bins(features)
        for term, values in zip(self.terms, self.values, strict=True):
            scores = scores + values[self.cells(bins, term)]
        return scores

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        return {
            "coefficients": self.coefficients.tolist(),
            "intercepts": self.intercepts.tolist(),
            "cuts": [
                {"features": list(cut.features), "edges": cut.edges.tolist()} for cut in self.cuts
            ],
            "terms": [list(term) for term in self.terms],
            "values": [values.tolist() for values in self.values],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "TreesScorer":
        """Inverts `to_dict`; raises ValueError, TypeError or KeyError for anything else."""
        return cls(
            np.array(value["coefficients"], np.float64),
            np.array(value["intercepts"], np.float64),
            tuple(
                Cut(tuple(map(int, cut["features"])), np.array(cut["edges"], np.float64))
                for cut in value["cuts"]
            ),
            tuple(tuple(map(int, term)) for term in value["terms"]),
            tuple(np.array(values, np.float64) for values in value["values"]),
        )


def without_values(
    coefficients: np.ndarray,
    intercepts: np.ndarray,
    x: np.ndarray,
    residuals: np.ndarray,
    *,
    groups: Sequence[Sequence[int]] | None,
    largest: float,
    most: int,
) -> TreesScorer:
    """Chooses columns, bins and pairs by public rows; all values are zero.

    Args:
        coefficients: the linear part, shape (outputs, features).
        intercepts: its intercepts.
        x: public features.
        residuals: what the linear part leaves of the public targets, shape (rows, outputs).
        groups: features that are indicators of one column's categories.
        largest: the most cells of a term that the noise leaves of use.
        most: the most terms. If there are more, those are taken whose cells explain most of the
            residuals.
    """
    columns = _columns(x, groups)
    fine = [_cut(x, column, int(min(_FINE_BINS, max(2, largest)))) for column in columns]
    coarse_bins = int(min(_PAIR_BINS, np.sqrt(largest)))
    coarse = [_cut(x, column, max(2, coarse_bins)) for column in columns]
    fine, coarse = ([cut for cut in cuts if cut is not None] for cuts in (fine, coarse))
    cuts = (*fine, *coarse)
    singles = [(k,) for k in range(len(fine))]
    pairs: list[tuple[int, ...]] = []
    if coarse_bins >= _FEWEST_BINS:
        pairs = [
            (k, j)
            for k, j in itertools.combinations(range(len(fine), len(cuts)), 2)
            if cuts[k].size * cuts[j].size <= 4 * largest
        ]
    empty = TreesScorer(coefficients, intercepts, cuts, (), ())
    terms = (*singles, *pairs)
    if len(terms) > most:
        gains = _gains(empty, terms, x, residuals)
        terms = tuple(terms[k] for k in sorted(np.argsort(-gains, kind="stable")[:most]))
    values = tuple(np.zeros((empty.num_cells(term), len(intercepts))) for term in terms)
    return dataclasses.replace(empty, terms=terms, values=values)


def num_terms(x: np.ndarray, groups: Sequence[Sequence[int]] | None) -> int:
    """Returns the number of columns and pairs of columns."""
    return math.comb(len(_columns(x, groups)) + 1, 2)


def _columns(x: np.ndarray, groups: Sequence[Sequence[int]] | None) -> list[tuple[int, ...]]:
    """Returns the features of each column: the indicators of a category, or a feature alone."""
    found, taken = [], set()
    for group in groups or ():
        part = x[:, list(group)]
        if len(group) > 1 and np.isin(part, (0.0, 1.0)).all() and (part.sum(axis=1) <= 1).all():
            found.append(tuple(group))
            taken.update(group)
    return found + [(k,) for k in range(x.shape[1]) if k not in taken]


def _cut(x: np.ndarray, column: tuple[int, ...], num_bins: int) -> Cut | None:
    """Cuts a column near public quantiles; None if it is constant on public rows.

    An edge is midway between two values, since other programs, to which models are exported, may
    round features in another way: a value that is an edge could then be on either side.
    """
    if len(column) > 1:
        return Cut(column, np.zeros(0))
    feature = max(column)
    values = np.unique(x[:, feature])
    # The sine of 1:00 and that of 11:00 are one value, however they are rounded.
    apart = np.diff(values) > _ROUNDING * np.abs(values).max()
    edges = ((values[1:] + values[:-1]) / 2)[apart]
    if len(edges) >= num_bins:
        quantiles = np.quantile(x[:, feature], np.linspace(0, 1, num_bins + 1)[1:-1])
        # The edge below the values that hold the quantile.
        place = np.searchsorted(np.append(values[:-1][apart], values[-1]), quantiles)
        edges = edges[np.unique(place[place > 0] - 1)]
    return Cut(column, edges) if len(edges) else None


def _gains(
    model: TreesScorer, terms: Sequence[Sequence[int]], x: np.ndarray, residuals: np.ndarray
) -> np.ndarray:
    """Returns how much of the residuals the cells' means explain, less what noise would, per term.

    All terms with the same first column are counted at once, which is much faster than one by one.
    """
    bins = model.bins(x)
    spread = float(np.sum(residuals.var(axis=0)))
    gains = np.zeros(len(terms))
    numbers = sorted(range(len(terms)), key=lambda number: (len(terms[number]), terms[number][0]))
    for _, same in itertools.groupby(numbers, key=lambda k: (len(terms[k]), terms[k][0])):
        together = list(same)
        sizes = [model.num_cells(terms[k]) for k in together]
        starts = np.cumsum([0, *sizes[:-1]])
        total = np.zeros((1 + residuals.shape[1], sum(sizes)))
        per_block = max(1, _LARGEST_BLOCK // len(together))
        for first in range(0, len(x), per_block):
            block = slice(first, first + per_block)
            some = [column[block] for column in bins]
            where = [s + model.cells(some, terms[k]) for k, s in zip(together, starts, strict=True)]
            where = np.concatenate(where)
            total[0] += np.bincount(where, minlength=total.shape[1])
            for column, sums in zip(residuals[block].T, total[1:], strict=True):
                weights = np.tile(column, len(together))
                sums += np.bincount(where, weights, total.shape[1])
        counts, sums = total[0], total[1:]
        explained = np.sum(sums**2, axis=0) / np.maximum(counts, 1) - spread * (counts > 0)
        gains[together] = np.add.reduceat(explained, starts)
    return gains
