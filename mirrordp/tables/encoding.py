"""The encoding of a whole table: rows in, arrays out; stored as plain types for JSON."""

import collections
import dataclasses
import datetime
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mirrordp._warn import warn
from mirrordp.data import UnprotectedWarning
from mirrordp.data.sources import GatheredRows, row_blocks
from mirrordp.tables.columns import (
    ISO,
    CategoryColumn,
    ClassTarget,
    Column,
    DateColumn,
    NumberColumn,
    NumberTarget,
    Tally,
    Target,
    kinds_of_values,
    lost_values,
)
from mirrordp.tables.files import Table, TableError, listed, mark

LEFT_AS_TEXT = (
    "Programs such as pandas.read_csv leave a whole column as text if one of its cells is no "
    "value, and others are then read differently. Read the column as text in both tables "
    "(dtype=str), or as values in both"
)


@dataclasses.dataclass(frozen=True)
class EncodedTable:
    """Arrays for an estimator.

    Attributes:
        features: a finite float64 array of shape (rows, features).
        target: an array of shape (rows,), which holds class indices for classification; of shape
            (rows, targets) if there are several.
        unusable: a mask of the rows without a usable target. They count as rows and contribute
            nothing.
        unfamiliar: for the operator of these rows, by column: how many cells the public table does
            not cover, and what became of them.
    """

    features: np.ndarray
    target: np.ndarray
    unusable: np.ndarray
    unfamiliar: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class FeatureEncoding:
    """The rules by which rows become features, made by `learn_features`."""

    columns: tuple[Column, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the encoded features."""
        return tuple(itertools.chain.from_iterable(column.features for column in self.columns))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the features that each column became."""
        sizes = [len(column.features) for column in self.columns]
        ends = itertools.accumulate(sizes)
        return tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))

    def encode_features(
        self, table: Table, tallies: dict[str, Tally] | None = None, *, private: bool = False
    ) -> np.ndarray:
        """Encodes the features of rows, and ignores their target, if any.

        Args:
            table: the rows.
            tallies: counts over several batches, which the caller passes to `judge` at the end. By
                default this batch is judged by itself.
            private: whether messages about its cells need the mark `UNPROTECTED`.
        """
        counts = collections.defaultdict(Tally) if tallies is None else tallies
        # The message needs the mark, because names are cells of a row if the header is missing.
        require_columns(table, [column.name for column in self.columns], private)
        features = np.empty((len(table), len(self.features)))
        self._encode_features(table, counts, features)
        if tallies is None:
            self.judge(counts, table.source, private=private)
        return features

    def unfamiliar(self, tallies: Mapping[str, Tally]) -> dict[str, str]:
        """Returns by column how many cells the public table does not cover, in words."""
        found = {}
        for column in self.columns:
            tally = tallies[column.name]
            words = []
            if tally.unfamiliar:
                words.append(_unfamiliar(column, tally))
            if tally.wrong and not isinstance(column, CategoryColumn):
                expected, _, _ = _KINDS[type(column)]
                words.append(f"{tally.wrong} of {tally.filled} cells no {expected}, left out")
            if words:
                found[column.name] = "; ".join(words)
        return found

    def refuse_lost_values(self, kinds: Mapping[str, str] | None, table: Table) -> None:
        """Raises a TableError for private text where public cells are values, or the reverse.

        Args:
            kinds: what the public columns hold; see `kinds_of_values`. None for rows that are not
                private.
            table: private rows.
        """
        if table.is_text or kinds is None:
            return
        for name, column in self._kinds().items():
            labels = getattr(column, "categories", getattr(column, "classes", None))
            kind = kinds.get(name)
            if name not in table.columns:
                continue
            cells = table.columns[name]
            # What tells day and month apart in the public text did not read the private values.
            other_format = (
                isinstance(column, DateColumn)
                and column.date_format != ISO
                and kind is None
                and bool(kinds_of_values({name: cells}))
            )
            if other_format or lost_values(kind, cells, labels):
                got = "text" if kind else "values that it does not name"
                raise TableError(
                    f"{mark(True)}expected {kind or 'text'} in column {name!r} of "
                    f"{table.source!r}, as in the public table, got {got}. {LEFT_AS_TEXT}."
                )

    def _encode_features(self, table: Table, tallies: dict[str, Tally], out: np.ndarray) -> None:
        start = 0
        for column in self.columns:
            stop = start + len(column.features)
            column.encode(table.columns[column.name], out[:, start:stop], tallies[column.name])
            start = stop

    def judge(self, tallies: Mapping[str, Tally], source: str, *, private: bool) -> None:
        """Refuses columns that mostly have another type, and warns of single cells that do.

        It also warns of columns whose cells are mostly beyond those of the public table, usually
        because of another unit or spelling: after clamping they tell the model nothing.
        """
        kinds = self._kinds()
        for name, tally in tallies.items():
            kind = kinds[name]
            which = advice = ""
            if isinstance(kind, NumberColumn) and 2 * tally.unfamiliar > tally.filled:
                which, advice = "beyond the range", "compare the units, or ignore an identifier"
            elif isinstance(kind, DateColumn) and 2 * tally.unfamiliar > tally.filled:
                which, advice = "beyond the dates", "add public rows of these times"
            # Rare categories are unknown in either table, which is no reason to warn.
            elif isinstance(kind, CategoryColumn) and 10 * tally.unfamiliar > 9 * tally.filled:
                which = "none of the common categories"
                advice = "compare the spelling, or ignore an identifier"
            if which and 2 * tally.wrong <= tally.filled:
                warn(
                    f"{mark(private)}{tally.unfamiliar} of {tally.filled} filled cells of column "
                    f"{name!r} in {source!r} are {which} of the public table and tell the model "
                    f"little; {advice}.",
                    UnprotectedWarning if private else UserWarning,
                )
            if not tally.wrong:
                continue
            expected, given, rule = _KINDS[type(kind)]
            if isinstance(kind, NumberTarget) and kind.is_count:
                expected, given = "whole numbers of at least zero", "other values"
            where = f"{tally.wrong} of {tally.filled} filled cells of column {name!r} in {source!r}"
            if 2 * tally.wrong > tally.filled:
                raise TableError(
                    f"{mark(private)}expected {expected} as in the public table, got {given} in "
                    f"{where}; bring both tables into the same form."
                )
            if not isinstance(kind, CategoryColumn):
                warn(
                    f"{mark(private)}expected {expected}, got {given} in {where}; {rule}.",
                    UnprotectedWarning if private else UserWarning,
                )

    def _kinds(self) -> dict[str, Column | Target]:
        return {column.name: column for column in self.columns}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        return {"columns": [_tagged(column) for column in self.columns]}


@dataclasses.dataclass(frozen=True)
class TableEncoding(FeatureEncoding):
    """The rules by which rows become arrays, made by `learn_encoding` and kept in model files.

    Attributes:
        columns: the columns that become features.
        target: the target, or the first of several.
        further_targets: the others, all numbers.
    """

    target: Target
    further_targets: tuple[NumberTarget, ...] = ()

    @property
    def targets(self) -> tuple[Target, ...]:
        """All targets."""
        return (self.target, *self.further_targets)

    def encode(
        self,
        batches: Iterable[Table],
        *,
        private: bool,
        memory: float = math.inf,
        kinds: Mapping[str, str] | None = None,
        judged: bool = True,
    ) -> EncodedTable:
        """Encodes features and target.

        Args:
            batches: the pieces of one table.
            private: whether messages about its cells need the mark `UNPROTECTED`.
            memory: the largest number of bytes to hold in memory. If the arrays are larger, they
                are memory maps of unnamed temporary files (see `mirrordp.data.sources`).
            kinds: what the public columns hold, for private rows; see `kinds_of_values`.
            judged: whether to refuse and warn of what the public table does not cover.

        Raises:
            TableError: if a column is missing, if most of its filled cells have another type, or if
                they are text where public ones are values.
        """
        tallies: dict[str, Tally] = collections.defaultdict(Tally)
        found, source = GatheredRows(memory), ""
        names = [target.name for target in self.targets]
        for table in batches:
            source = table.source
            require_columns(table, [*(column.name for column in self.columns), *names], private)
            self.refuse_lost_values(kinds, table)
            features = np.empty((len(table), len(self.features)))
            self._encode_features(table, tallies, features)
            found.append(features, *self._encode_targets(table, tallies))
        if judged:
            self.judge(tallies, source, private=private)
        features, target, unusable = found.finish()
        num_unusable = sum(np.count_nonzero(unusable[block]) for block in row_blocks(unusable))
        if num_unusable == len(unusable):
            raise TableError(
                f"{mark(private)}expected a usable target {listed(names)} in {source!r}, "
                "got none in any row; check the column."
            )
        unfamiliar = self.unfamiliar(tallies)
        if num_unusable:
            unfamiliar[", ".join(names)] = (
                f"{num_unusable} of {len(unusable)} rows without a usable target, which contribute "
                "nothing"
            )
        return EncodedTable(features, target, unusable, unfamiliar)

    def _encode_targets(
        self, table: Table, tallies: dict[str, Tally]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the targets, and a mask of the rows that lack one of them."""
        found = [
            target.encode(table.columns[target.name], tallies[target.name])
            for target in self.targets
        ]
        if len(found) == 1:
            return found[0]
        values, unusable = zip(*found, strict=True)
        return np.column_stack(values), np.logical_or.reduce(unusable)

    def _kinds(self) -> dict[str, Column | Target]:
        return super()._kinds() | {target.name: target for target in self.targets}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        found = super().to_dict() | {"target": _tagged(self.target)}
        if self.further_targets:
            found["further_targets"] = [_tagged(target) for target in self.further_targets]
        return found

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "TableEncoding":
        """Inverts `to_dict`; raises ValueError, TypeError or KeyError for anything else."""
        columns = tuple(
            _untagged(column, (NumberColumn, CategoryColumn, DateColumn))
            for column in value["columns"]
        )
        further = value.get("further_targets", [])
        return cls(
            columns,
            _untagged(value["target"], (NumberTarget, ClassTarget)),
            tuple(_untagged(target, (NumberTarget,)) for target in further),
        )


def require_columns(table: Table, needed: Sequence[str], private: bool) -> None:
    """Raises a TableError unless the table has every column that is needed."""
    for name in needed:
        if name in table.unreadable:
            raise TableError(
                f"{mark(private)}expected numbers, text, dates or true/false in column {name!r} of "
                f"{table.source!r} as in the public table, got {table.unreadable[name]}; convert "
                "it."
            )
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise TableError(
            f"{mark(private)}expected column{'s' * (len(missing) > 1)} {listed(missing)} in "
            f"{table.source!r} as in the public table, got columns "
            f"{listed(list(table.columns))}; add what is missing."
        )


def by_column(unfamiliar: Mapping[str, str], most: int = 10) -> list[str]:
    """Returns a line for each column; of many with numbers beyond the range alone, one in the end.

    That line has the counts of all but the `most` columns with the most such numbers.
    """

    def count(name: str) -> int:
        return int(unfamiliar[name].split(" ", 1)[0])

    clamped = [
        name for name, words in unfamiliar.items() if words.endswith(_CLAMPED) and ";" not in words
    ]
    short = sorted(clamped, key=count, reverse=True)[most:] if len(clamped) > most + 1 else []
    lines = [f"column {name!r}: {unfamiliar[name]}" for name in unfamiliar if name not in short]
    if short:
        counts = ", ".join(f"{name!r} {count(name)}" for name in short)
        lines.append(f"{len(short)} more columns with numbers beyond the public range: {counts}")
    return lines


_CLAMPED = "moved to its ends"


def _unfamiliar(column: Column, tally: Tally) -> str:
    share = f"{tally.unfamiliar} of {tally.filled}"
    if isinstance(column, NumberColumn):
        return (
            f"{share} numbers beyond the public range of {column.low:g} to {column.high:g}, "
            f"{_CLAMPED}"
        )
    if isinstance(column, DateColumn):
        first, last = (
            (datetime.datetime(1970, 1, 1) + datetime.timedelta(days)).isoformat(" ", "minutes")
            for days in (column.low, column.high)
        )
        return (
            f"{share} dates beyond the public range of {first} to {last}, counted as its ends in "
            "elapsed days"
        )
    return f"{share} cells of no common public category, treated as unknown"


_KINDS: dict[type, tuple[str, str, str]] = {
    NumberColumn: ("numbers", "text", "each counts as missing"),
    DateColumn: ("dates in the public format", "something else", "each counts as missing"),
    CategoryColumn: ("categories", "numbers", "each counts as an unknown category"),
    NumberTarget: ("numbers", "text", "these rows contribute nothing"),
    ClassTarget: ("known classes", "others", "these rows contribute nothing"),
}
_TAGS = {
    "number": NumberColumn,
    "category": CategoryColumn,
    "date": DateColumn,
    "number target": NumberTarget,
    "class target": ClassTarget,
}


def _tagged(value: Any) -> dict[str, Any]:
    (tag,) = (tag for tag, kind in _TAGS.items() if kind is type(value))
    fields = dataclasses.asdict(value)
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
    return {"kind": tag, **plain}


def _untagged(value: Mapping[str, Any], kinds: tuple[type, ...]) -> Any:
    kind = _TAGS[value["kind"]]
    if kind not in kinds:
        raise ValueError(f"{value['kind']!r} is out of place")
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        # Models of earlier versions lack the fields that have defaults.
        has_default = field.default is not dataclasses.MISSING
        item = value.get(field.name, field.default) if has_default else value[field.name]
        fields[field.name] = tuple(item) if isinstance(item, list) else item
        _check_field(field.name, field.type, fields[field.name])
    return kind(**fields)


def _check_field(name: str, kind: Any, value: Any) -> None:
    good = {
        str: lambda: isinstance(value, str),
        bool: lambda: isinstance(value, bool),
        float: lambda: (
            isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
        ),
        tuple[str, ...]: lambda: (
            isinstance(value, tuple) and value and all(isinstance(item, str) for item in value)
        ),
    }[kind]()
    if not good or (name == "scale" and value < sys.float_info.min):
        # A number is divided by its scale.
        raise ValueError(f"{name} is not a {kind}")
