"""The encoding of single columns: cells in, features or targets out.

Whether a cell counts as missing depends on its own text (`MISSING`), never on other rows.
"""

import collections
import dataclasses
import datetime
import fractions
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from mirrordp.tables.files import Cells, PackedText, ValueText

MISSING = frozenset({"", "?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null"})
"""Cells that count as missing, once spaces around them are removed."""


_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*")


def has_decimal_comma(cell: str) -> bool:
    """Returns whether a cell reads like a number with a decimal comma instead of a point."""
    return _DECIMAL_COMMA.fullmatch(cell) is not None


def number(cell: str) -> float | None:
    """Returns a cell as a float, NaN if it counts as missing, None if it is something else."""
    try:
        value = float(cell)
    except ValueError:
        return math.nan if cell.strip() in MISSING else None
    return value if math.isfinite(value) else math.nan


@functools.cache
def _spelled(decimal: str, thousands: str) -> re.Pattern[str]:
    """Returns the pattern of a number that is written with other separators."""
    whole = r"\d*"
    if thousands:
        whole = rf"(?:\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+|\d*)"
    return re.compile(rf"([+-]?{whole})(?:{re.escape(decimal)}(\d*))?([eE][+-]?\d+)?")


def _with_point(cell: str, decimal: str, thousands: str) -> str:
    """Returns a number as Python writes it; any other text stays text, 1.5 with commas included."""
    if isinstance(cell, ValueText) or cell.strip() in MISSING:
        return cell
    found = _spelled(decimal, thousands).fullmatch(cell.strip())
    if found is None:
        return "text"
    whole, fraction, exponent = (part or "" for part in found.groups())
    if thousands:
        whole = whole.replace(thousands, "")
    return f"{whole}.{fraction}{exponent}"


def numbers(cells: Cells, decimal: str = ".", thousands: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers, with NaN for other cells, and a mask of cells that hold other text.

    Args:
        cells: the cells.
        decimal: what stands before the fraction in cells of text.
        thousands: what separates groups of three digits in them; nothing by default.
    """
    if isinstance(cells, np.ndarray):
        if cells.dtype.kind == "M":
            return np.full(len(cells), np.nan), ~np.isnat(cells)
        return np.where(np.isfinite(cells), cells, np.nan), np.zeros(len(cells), bool)
    if isinstance(cells, PackedText):
        values, wrong = cells.plain_numbers(decimal, thousands, MISSING)
        if wrong.any():
            left = wrong.copy()
            values = values.copy()  # Arrow's memory is read-only.
            values[left], wrong[left] = numbers(cells.select(left), decimal, thousands)
        return values, wrong
    if (decimal, thousands) != (".", ""):
        cells = [_with_point(cell, decimal, thousands) for cell in cells]
    # The second form takes twice as long as the first, the dictionary below five times as long.
    for candidate in (cells, ("nan" if cell in MISSING else cell for cell in cells)):
        try:
            values = np.fromiter(map(float, candidate), np.float64, len(cells))
        except ValueError:
            continue
        return np.where(np.isfinite(values), values, np.nan), np.zeros(len(cells), bool)
    parsed = {cell: number(cell) for cell in set(cells)}
    wrong = {cell: value is None for cell, value in parsed.items()}
    filled = {cell: math.nan if value is None else value for cell, value in parsed.items()}
    return (
        np.fromiter(map(filled.__getitem__, cells), np.float64, len(cells)),
        np.fromiter(map(wrong.__getitem__, cells), bool, len(cells)),
    )


def distinct_texts(cells: Cells) -> tuple[list[str], np.ndarray]:
    """Returns the distinct cells as text ("" if missing), and the index of each row's cell.

    As in a column of numbers, infinity counts as missing.
    """
    if isinstance(cells, np.ndarray) and cells.dtype.kind == "M":
        times, which = np.unique(cells, return_inverse=True)
        return ["" if time is None else time.isoformat() for time in times.tolist()], which
    if isinstance(cells, np.ndarray):
        # Zero is added because -0.0 and 0.0 are equal, and one of them would name the others too.
        known = np.where(np.isfinite(cells), cells + 0.0, np.nan)
        values, which = np.unique(known, return_inverse=True)
        return ["" if math.isnan(v) else number_text(v) for v in values.tolist()], which
    if isinstance(cells, PackedText):
        distinct, which = cells.distinct()
    else:
        distinct = dict.fromkeys(cells)
        order = {cell: index for index, cell in enumerate(distinct)}
        which = np.fromiter(map(order.__getitem__, cells), np.intp, len(cells))
    stripped = (cell.strip() for cell in distinct)
    return ["" if cell in MISSING or _is_infinite(cell) else cell for cell in stripped], which


def _is_infinite(cell: str) -> bool:
    try:
        return math.isinf(float(cell))
    except ValueError:
        return False


def number_text(value: float) -> str:
    """Returns a number as the name of a category or class, 1 for 1.0 and 0 for -0.0."""
    return format(value + 0.0, ".15g")


def count_texts(cells: Cells) -> collections.Counter[str]:
    """Counts how often each text occurs; "" stands for missing."""
    texts, which = distinct_texts(cells)
    found: collections.Counter[str] = collections.Counter()
    for text, count in zip(texts, np.bincount(which, minlength=len(texts)).tolist(), strict=True):
        found[text] += count
    return found


ISO = "ISO 8601"
"""The name of the format of dates such as 2024-05-31, 2024-05-31 08:30 or 2024-05-31T08:30:00Z."""
_DAYS = (
    *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y"),
    *("%d %b %Y", "%d-%b-%Y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y"),
)
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_DATE_FORMATS = (ISO, *(day + time for day in _DAYS for time in _TIMES))


def moment(cell: str, date_format: str) -> datetime.datetime | None:
    """Returns a cell as date and time (in UTC if it names a zone), or None if it is none.

    What reads as a number, such as 20240531, is no date: in a column of numbers it would be none.
    """
    if number(cell) is not None:
        return None
    try:
        if date_format == ISO or isinstance(cell, ValueText):
            found = datetime.datetime.fromisoformat(cell.strip())
        else:
            found = datetime.datetime.strptime(cell.strip(), date_format)
        if found.tzinfo is not None:
            found = found.astimezone(datetime.UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return None
    return found


def moments(cells: Cells, date_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns datetime64[us], NaT for other cells, and a mask of cells that hold something else."""
    if isinstance(cells, np.ndarray):
        if cells.dtype.kind == "M":
            return cells, np.zeros(len(cells), bool)
        return np.full(len(cells), np.datetime64("NaT"), "M8[us]"), np.isfinite(cells)
    # Keyed by type too, because a time that came as a time is equal to its text.
    keys = [(cell, type(cell)) for cell in cells]
    parsed = {key: moment(key[0], date_format) for key in set(keys)}
    wrong = {key: found is None and key[0].strip() not in MISSING for key, found in parsed.items()}
    return (
        np.array([parsed[key] for key in keys], "M8[us]"),
        np.fromiter(map(wrong.__getitem__, keys), bool, len(keys)),
    )


def find_date_format(cells: Cells) -> str | None:
    """Returns the one format in which all filled cells are dates, None if there is no such format.

    There is none either if two formats differ in what they read, as day and month can.
    """
    if isinstance(cells, np.ndarray):
        return ISO if cells.dtype.kind == "M" else None
    texts = sorted({cell.strip() for cell in cells} - MISSING)
    if not texts:
        return None
    fits = [name for name in _DATE_FORMATS if moment(texts[0], name) is not None]
    read: list[tuple[str, list[datetime.datetime | None]]] = []
    for name in fits:
        found = [moment(text, name) for text in texts]
        if None not in found:
            read.append((name, found))
    agree = all(found == read[0][1] for _, found in read)
    return read[0][0] if read and agree else None


def days_of(times: np.ndarray) -> np.ndarray:
    """Returns the days since 1970-01-01 with their fraction, NaN for NaT."""
    return (times - np.datetime64(0, "us")) / np.timedelta64(1, "D")


@dataclasses.dataclass
class Tally:
    """The number of cells of a column, over all batches, that differ from the public table.

    Attributes:
        filled: the number of cells that are not missing.
        wrong: how many of these have another type.
        unfamiliar: how many have the right type, but are beyond the public range or of no known
            category.
    """

    filled: int = 0
    wrong: int = 0
    unfamiliar: int = 0


def clock_minutes(values: np.ndarray) -> np.ndarray:
    """Returns the minutes since midnight of times such as 1745 for 17:45."""
    return values - 40 * np.floor(values / 100)


@dataclasses.dataclass(frozen=True)
class NumberColumn:
    """A column that becomes the feature (x − mean) / scale, with x clamped to [low, high].

    If it is a clock, whose numbers are hours and minutes such as 1745, x is in minutes after it was
    clamped. A line through the numbers as they are would have a jump at every full hour.
    """

    name: str
    mean: float
    scale: float
    low: float
    high: float
    marks_missing: bool
    decimal: str = "."
    thousands: str = ""
    is_clock: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the encoded features."""
        own = f"{self.name} (minutes)" if self.is_clock else self.name
        return (own, f"{self.name} is missing") if self.marks_missing else (own,)

    def encode(self, cells: Cells, out: np.ndarray, tally: Tally) -> None:
        """Fills the columns of `out` that belong to `features`."""
        values, wrong = numbers(cells, self.decimal, self.thousands)
        missing = np.isnan(values)
        tally.filled += int(np.count_nonzero(~missing | wrong))
        tally.wrong += int(np.count_nonzero(wrong))
        tally.unfamiliar += int(np.count_nonzero((values < self.low) | (values > self.high)))
        clamped = np.clip(values, self.low, self.high)
        scaled = ((clock_minutes(clamped) if self.is_clock else clamped) - self.mean) / self.scale
        out[:, 0] = np.where(missing, 0.0, scaled)
        if self.marks_missing:
            out[:, 1] = missing


@dataclasses.dataclass(frozen=True)
class CategoryColumn:
    """A column that becomes a 0/1 feature per category; an unknown category has all zeros.

    See `positions` for the category that a cell stands for.
    """

    name: str
    categories: tuple[str, ...]
    most_common: str
    marks_missing: bool

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the encoded features."""
        own = tuple(f"{self.name}={category}" for category in self.categories)
        return (*own, f"{self.name} is missing") if self.marks_missing else own

    def encode(self, cells: Cells, out: np.ndarray, tally: Tally) -> None:
        """Fills the columns of `out` that belong to `features`."""
        texts, which = distinct_texts(cells)
        counts = np.bincount(which, minlength=len(texts))
        missing = len(self.categories) if self.marks_missing else self.missing_position
        rows = np.zeros((len(texts), len(self.features)))
        text_only = all(number(category) is None for category in self.categories)
        if isinstance(cells, np.ndarray) and not differ_as_numbers(self.categories):
            # A program that made numbers of 007 and 7 has made the same of both.
            text_only = True
        for index, (text, found) in enumerate(
            zip(texts, positions(self.categories, texts), strict=True)
        ):
            position = found if text else missing
            if position >= 0:
                rows[index, position] = 1.0
            if text:
                tally.filled += int(counts[index])
                tally.wrong += int(counts[index]) if text_only and number(text) is not None else 0
                tally.unfamiliar += int(counts[index]) if position < 0 else 0
        out[:] = rows[which]

    @property
    def missing_position(self) -> int:
        """The category that stands for missing cells, if public rows have none."""
        return positions(self.categories, [self.most_common])[0]


WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclasses.dataclass(frozen=True)
class DateColumn:
    """A column of dates and times, which becomes what a linear model can use of them.

    These features are the days since the public mean, in units of the public deviation and clamped
    to the public range [low, high]; the time of the year and of the day as sine and cosine, so that
    December is beside January and 23:00 beside midnight; and a 0/1 feature per weekday. A missing
    date has zeros in all of them. Days are counted from 1970-01-01.
    """

    name: str
    date_format: str
    mean: float
    scale: float
    low: float
    high: float
    has_months: bool
    has_weekdays: bool
    has_hours: bool
    marks_missing: bool

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the encoded features."""
        parts = ["elapsed days"]
        parts += ["month (sine)", "month (cosine)"] * self.has_months
        parts += ["hour (sine)", "hour (cosine)"] * self.has_hours
        parts += [f"weekday={day}" for day in WEEKDAYS] * self.has_weekdays
        own = tuple(f"{self.name}: {part}" for part in parts)
        return (*own, f"{self.name} is missing") if self.marks_missing else own

    def encode(self, cells: Cells, out: np.ndarray, tally: Tally) -> None:
        """Fills the columns of `out` that belong to `features`."""
        times, wrong = moments(cells, self.date_format)
        missing = np.isnat(times)
        days = np.where(missing, self.mean, days_of(times))
        tally.filled += int(np.count_nonzero(~missing | wrong))
        tally.wrong += int(np.count_nonzero(wrong))
        tally.unfamiliar += int(np.count_nonzero((days < self.low) | (days > self.high)))
        parts = [(np.clip(days, self.low, self.high) - self.mean) / self.scale]
        if self.has_months:
            parts += _around(_share_of_year(times))
        if self.has_hours:
            parts += _around(days % 1)
        if self.has_weekdays:
            # 1970-01-01 was a Thursday. The number of days with its fraction is rounded.
            weekday = (times.astype("M8[D]").astype(np.int64) + 3) % 7
            parts += [weekday == index for index in range(len(WEEKDAYS))]
        out[:, : len(parts)] = np.where(missing[:, None], 0.0, np.column_stack(parts))
        if self.marks_missing:
            out[:, -1] = missing


def months_of(times: np.ndarray) -> np.ndarray:
    """Returns 0 for January to 11 for December; NaT must be removed before."""
    return times.astype("M8[M]").astype(np.int64) % 12


def _share_of_year(times: np.ndarray) -> np.ndarray:
    """Returns 0 at the beginning of a year and nearly 1 at its end."""
    years = times.astype("M8[Y]")
    begin, end = years.astype("M8[us]"), (years + np.timedelta64(1, "Y")).astype("M8[us]")
    return (times - begin) / (end - begin)


def _around(share: np.ndarray) -> list[np.ndarray]:
    angle = 2 * np.pi * share
    return [np.sin(angle), np.cos(angle)]


Column: TypeAlias = NumberColumn | CategoryColumn | DateColumn


@dataclasses.dataclass(frozen=True)
class NumberTarget:
    """A target that is a number; a count must be whole and not negative."""

    name: str
    is_count: bool
    decimal: str = "."
    thousands: str = ""

    def encode(self, cells: Cells, tally: Tally) -> tuple[np.ndarray, np.ndarray]:
        """Returns the targets, and a mask of the rows that have none and get zero."""
        values, wrong = numbers(cells, self.decimal, self.thousands)
        tally.filled += int(np.count_nonzero(~np.isnan(values) | wrong))
        if self.is_count:
            wrong = wrong | not_counts(values)
        tally.wrong += int(np.count_nonzero(wrong))
        unusable = wrong | np.isnan(values)
        return np.where(unusable, 0.0, values), unusable


@dataclasses.dataclass(frozen=True)
class ClassTarget:
    """A target that is the index of a class; see `positions` for the class of a cell."""

    name: str
    classes: tuple[str, ...]
    are_numbers: bool

    def encode(self, cells: Cells, tally: Tally) -> tuple[np.ndarray, np.ndarray]:
        """Returns the class indices, and a mask of the rows whose class is missing or unknown."""
        texts, which = distinct_texts(cells)
        counts = np.bincount(which, minlength=len(texts))
        codes = np.array(positions(self.classes, texts), np.intp)
        if isinstance(cells, np.ndarray) and not differ_as_numbers(self.classes):
            codes[:] = -1  # As for categories.
        for text, code, count in zip(texts, codes.tolist(), counts.tolist(), strict=True):
            tally.filled += count if text else 0
            tally.wrong += count if text and code < 0 else 0
        found = codes[which]
        return np.maximum(found, 0), found < 0


Target: TypeAlias = NumberTarget | ClassTarget


def not_counts(values: np.ndarray) -> np.ndarray:
    """Returns a mask of the numbers that are not counts."""
    return ~np.isnan(values) & ((values < 0) | (values != np.floor(values)))


_TRUTH = ("true", "false")


def positions(labels: Sequence[str], texts: Iterable[str]) -> list[int]:
    """Returns the position of the label that each text stands for, −1 if it is none of them.

    A program may write a whole column in another way because of one of its cells: pandas reads 1.0
    and 007 as numbers, and True as true, unless one cell of the column is something else, and
    writes 2024-05-31 and 1 days with a time if one cell has one. All other rows would then have
    other categories. A text therefore stands for the label that it equals, or else for the only
    label that is the same number, date or duration; and True is true.
    """
    exact = {label: index for index, label in enumerate(labels)}
    truth = {label.lower(): index for label, index in reversed(exact.items())}
    meanings = collections.defaultdict(list)
    for label, index in exact.items():
        meanings[_meaning(label)].append(index)
    only = {meant: found[0] for meant, found in meanings.items() if len(found) == 1}

    def find(text: str) -> int:
        if text.lower() in _TRUTH:
            return truth.get(text.lower(), -1)
        return exact[text] if text in exact else only.get(_meaning(text), -1)

    return [find(text) for text in texts]


_DURATION = re.compile(r"(-?\d+) days?(?: \+?(\d+):(\d\d):(\d\d(?:\.\d+)?))?")


def _meaning(text: str) -> str | datetime.datetime | fractions.Fraction:
    """Returns the number that a text reads as, as text; or its date, or its seconds; or itself."""
    if number(text) is not None:
        return label_of(text, True)
    if (found := moment(text, ISO)) is not None:
        return found
    if (found := _DURATION.fullmatch(text)) is not None:
        days, hours, minutes, seconds = map(
            fractions.Fraction, (part or 0 for part in found.groups())
        )
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return text


def kinds_of_values(cells: Mapping[str, Cells]) -> dict[str, str]:
    """Returns what columns hold, in words, whose filled cells are all values and not text."""

    def kind(column: Cells) -> str | None:
        if isinstance(column, np.ndarray):
            return "dates or times" if column.dtype.kind == "M" else "numbers"
        if isinstance(column, PackedText):
            return None
        filled = {cell for cell in column if cell}
        if not filled or not all(isinstance(cell, ValueText) for cell in filled):
            return None
        return _TRUTH_VALUES if filled <= set(_TRUTH) else "numbers or dates"

    found = {name: kind(column) for name, column in cells.items()}
    return {name: words for name, words in found.items() if words is not None}


def lost_values(kind: str | None, cells: Cells, labels: Sequence[str] | None = None) -> bool:
    """Returns whether a program may have read a private column otherwise for the sake of one cell.

    A program that reads a file, such as `pandas.read_csv`, leaves a whole column as text if one of
    its cells is not what the others are. What it was told of how to read the others (separators,
    formats of dates, words for true) is lost then: one row would decide how all others are read.

    Args:
        kind: what the public column holds, None for text; see `kinds_of_values`.
        cells: the private column.
        labels: the categories or classes of the column, if it has them; they count as read.
    """
    if kind is None:
        found = kinds_of_values({"": cells}).get("")
        return found is not None and labels is not None and not _names(labels, cells, found)
    if isinstance(cells, np.ndarray):
        return False
    distinct = cells.distinct()[0] if isinstance(cells, PackedText) else set(cells)
    values = {cell for cell in distinct if isinstance(cell, ValueText)}
    filled = sorted({cell.strip() for cell in distinct if cell not in values} - MISSING)
    places = positions(labels or (), filled)
    texts = [
        text for text, place in zip(filled, places, strict=True) if place < 0 or not is_plain(text)
    ]
    if kind == _TRUTH_VALUES:
        # One text among others that were read is the cell that was something else.
        return len(texts) > 1 or (len(texts) == len(filled) == 1 and not values)
    return any(character.isdigit() for text in texts for character in text)


def is_plain(text: str) -> bool:
    """Returns whether a text that reads as a number is written as programs write that number.

    1.000 may have been a thousand, and 007 a name.
    """
    value = number(text)
    return value is None or math.isnan(value) or text in (number_text(value), repr(value))


def _names(labels: Sequence[str], cells: Cells, kind: str) -> bool:
    """Returns whether labels of text name private values of a kind, where they were read alike.

    An odd public cell may have left the public column as text, and none the private one.
    """
    texts = [text for text in distinct_texts(cells)[0] if text]
    named = [place >= 0 for place in positions(labels, texts)]
    if kind == _TRUTH_VALUES:
        return all(named)
    alike = [
        (kind != "dates or times" and number(label) is not None)
        or (kind != "numbers" and isinstance(_meaning(label), datetime.datetime))
        for label in labels
    ]
    return not texts or (any(named) and 2 * sum(alike) >= len(labels))


_TRUTH_VALUES = "true and false"


def differ_as_numbers(labels: Iterable[str]) -> bool:
    """Returns whether no two labels are the same number, as 007 and 7 are."""
    return all(len(same) == 1 for same in _by_number(labels).values())


def same_numbers(labels: Iterable[str]) -> dict[str, list[str]]:
    """Returns, for each label that reads as a number, all labels that are the same number."""
    return {label: same for same in _by_number(labels).values() for label in same}


def _by_number(labels: Iterable[str]) -> dict[str, list[str]]:
    """Returns the labels that read as numbers, by the number."""
    found: dict[str, list[str]] = {}
    for label in labels:
        if number(label) is not None:
            found.setdefault(label_of(label, True), []).append(label)
    return found


def label_of(text: str, are_numbers: bool) -> str:
    """Returns the name of the class or category that a cell stands for."""
    value = number(text) if are_numbers and text else None
    return text if value is None or math.isnan(value) else number_text(value)
