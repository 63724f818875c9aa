"""Checks of the rows and targets that are given to `fit`, and of its other arguments.

What one row holds must not decide how the numbers or labels of the others are read, or the private
sum would move by more than its sensitivity. Messages about private rows carry the mark
`UNPROTECTED`; they quote no value and go to the operator only.
"""

import hashlib
import itertools
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator
from sklearn.utils import column_or_1d
from sklearn.utils.validation import validate_data

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.data import (
    UNPROTECTED,
    PrivateData,
    PublicData,
    UnprotectedWarning,
    excluded_rows,
    refuse_private_rows,
)
from mirrordp.data.sources import row_blocks
from mirrordp.tables.columns import is_plain, kinds_of_values
from mirrordp.tables.encoding import LEFT_AS_TEXT, FeatureEncoding
from mirrordp.tables.files import Table, listed
from mirrordp.tables.frames import (
    foreign_type,
    is_frame,
    names_of,
    needs_encoding,
    table_of,
    with_columns,
)
from mirrordp.tables.learning import learn_features, likely_codes, maybe_codes
from mirrordp.tables.transformer import encode_and_count, mention

_SAFE_WAY = (
    "Pass public rows of the same columns as X_public, or encode all rows by "
    "mirrordp.tables.PublicEncoder().fit(public rows)"
)


class EncodedFrames(NamedTuple):
    """Frames as arrays.

    Attributes:
        X: the private features.
        X_public: the public features.
        public: the public rows before.
        encoding: how both were made, learned from public rows.
        unprotected_cells: by column, how many private cells public rows do not cover.
    """

    X: np.ndarray
    X_public: np.ndarray
    public: Table
    encoding: FeatureEncoding
    unprotected_cells: dict[str, str]

    def offer_categories(self, outcomes: np.ndarray) -> None:
        """Tells the operator of numbers that public rows and targets suggest to be codes."""
        for name in likely_codes(self.public, self.encoding, outcomes):
            warn(
                f"{maybe_codes(name, self.public.source)}, make the column categorical in both "
                f"frames: frame.astype({{{name!r}: 'category'}})."
            )


def encoded_frames(X: Any, X_public: Any) -> EncodedFrames | None:
    """Encodes frames that hold more than numbers; returns None if public rows hold numbers alone.

    Public rows alone decide whether there is an encoding. If one private row could decide it, it
    would decide how all others are read.
    """
    what = None if X_public is None else needs_encoding(X_public)
    if what is None:
        return None
    if not is_frame(X):
        raise ValueError(
            f"X_public must hold numbers as X does, got {what}. Pass X as a data frame with the "
            "same columns."
        )
    found = table_of(X_public, "X_public", private=False)
    learned = learn_features(found.table, categorical=found.categorical)
    encoding = learned.encoding
    if not encoding.columns:
        raise ValueError("X_public must have a column that varies, got none. Add public rows.")
    public = encoding.encode_features(found.table)
    kinds = kinds_of_values(found.table.columns)
    private, unfamiliar = encode_and_count(encoding, X, "X", private=True, kinds=kinds)
    mention_unused(X, [*found.table.columns, *found.table.unreadable])
    if learned.left_out:
        reasons = ", ".join(f"{name!r} ({why})" for name, why in learned.left_out.items())
        warn(f"columns of X_public that no feature can be made of: {reasons}.")
    mention(unfamiliar, private=True)
    return EncodedFrames(private, public, found.table, encoding, unfamiliar)


def mention_unused(X: Any, known: Iterable[str]) -> None:
    """Warns of columns that only the private frame has."""
    known = set(known)
    if unused := [name for name in names_of(X) if name not in known]:
        warn(
            f"{UNPROTECTED} columns {listed(unused)} of X are not in X_public and cannot be used. "
            "Add the columns to use to X_public.",
            UnprotectedWarning,
        )


def of_columns(names: list[str], X: Any, known: str) -> Any:
    """Returns a frame of numbers with these columns in this order; anything else as it is.

    Columns are found by name and others are left out, as in frames that hold more than numbers.
    """
    if not is_frame(X) or (found := names_of(X)) == names:
        return X
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"X must have all columns of {known}, got none named {listed(missing)}. Add them to X."
        )
    return with_columns(X, names)


def encoded_rows(encoding: FeatureEncoding, X: Any) -> np.ndarray:
    """Encodes rows to predict for, and warns of cells that public rows do not cover."""
    if not is_frame(X):
        names = [column.name for column in encoding.columns]
        raise ValueError(f"X must be a data frame with the columns {listed(names)}, as in fit.")
    features, unfamiliar = encode_and_count(encoding, X, "X", private=False)
    mention(unfamiliar, private=False)
    return features


def validated(
    estimator: BaseEstimator, X: Any, y: Any, *, public: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns features as a float64 matrix and targets as a vector, or refuses them."""
    suffix, remark = ("_public", "") if public else ("", f" {UNPROTECTED}")
    if y is None:
        raise ValueError(
            f"{type(estimator).__name__} requires y{suffix} to be passed, but the target y is None."
        )
    _refuse_text_and_times(f"X{suffix}", X, remark)
    X = _matrix(estimator, X, public, suffix, remark)
    y = _targets(estimator, y, remark)
    if y.dtype.kind in "mM":
        raise ValueError(
            f"y{suffix} must hold numbers or text, got dates or durations, {y.dtype}. Turn them "
            f"into numbers or text one by one.{remark}"
        )
    if len(y) != X.shape[0]:
        raise ValueError(
            f"X{suffix} and y{suffix} must have the same number of rows, got {X.shape[0]} and "
            f"{len(y)}."
        )
    refuse_non_finite(f"X{suffix}", X.data if issparse(X) else X, remark)
    if public and issparse(X):
        X = X.toarray()
    if y.dtype.kind == "f":
        refuse_non_finite(f"y{suffix}", y, remark)
    return X, y


def _targets(estimator: Any, y: Any, remark: str) -> np.ndarray:
    """Returns a vector, or for estimators that take them a matrix of several outputs."""
    if np.ma.isMaskedArray(y):
        raise ValueError(
            "y must have a target in every row, got a masked array, whose mask is lost. Leave out "
            f"the rows without one.{remark}"
        )
    y = _each_by_itself(y)
    if estimator._takes_several_outputs and not isinstance(y, list | tuple):
        matrix = np.asarray(y)
        if matrix.ndim == 2 and matrix.shape[1] > 1:
            return matrix
    elif estimator._takes_several_outputs and y and isinstance(y[0], list | tuple | np.ndarray):
        return np.array(y, object)
    try:
        return column_or_1d(y, warn=True)
    except ValueError as error:
        # scikit-learn shows the values in the lines behind the first.
        first, *others = str(error).splitlines()
        if not others:
            raise
        raise ValueError(f"{first}.{remark}") from None


class Weights(NamedTuple):
    """Weights of private and of public rows; None stands for ones."""

    private: np.ndarray | None
    public: np.ndarray | None

    @classmethod
    def of(cls, private: Any, public: Any, X: Any, X_public: Any) -> "Weights":
        """Returns weights divided by the mean of public ones, or refuses them."""
        if public is not None and X_public is None:
            raise ValueError("sample_weight_public goes with X_public, got no X_public.")
        if private is not None:
            private = _as_weights("sample_weight", private, X, f" {UNPROTECTED}")
        if public is None:
            return cls(private, None)
        public = _as_weights("sample_weight_public", public, X_public, "")
        mean = public.mean()
        with np.errstate(over="ignore"):
            return cls(None if private is None else private / mean, public / mean)


def _as_weights(name: str, weights: Any, X: Any, remark: str) -> np.ndarray:
    try:
        given = np.asarray(weights)
        refused = np.ma.isMaskedArray(weights) or given.dtype.kind in "US" or holds_text(given)
        found = None if refused else given.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None:
        raise ValueError(f"{name} must hold numbers, got something else.{remark}")
    rows = X.shape[0]
    if found.shape != (rows,):
        raise ValueError(f"{name} must have shape ({rows},), got {found.shape}.")
    refuse_non_finite(name, found, remark)
    if (found < 0).any():
        raise ValueError(
            f"{name} must hold weights of at least 0, got {int((found < 0).sum())} negative "
            f"ones.{remark}"
        )
    if not found.any():
        raise ValueError(
            f"Sample weights must contain a non-zero one, got zeros in {name}.{remark}"
        )
    return found


def weights_of_classes(given: Mapping[Any, float], classes: np.ndarray) -> np.ndarray:
    """Returns the weight of each class, 1 where none is given, or refuses them."""
    labels = np.fromiter(given, object, len(given))
    index = class_indices(classes, labels)
    if (index < 0).any():
        raise ValueError(
            f"class_weight must have labels among the classes {classes.tolist()}, got "
            f"{labels[index < 0].tolist()}."
        )
    weights = np.ones(len(classes))
    for label, value in zip(index, given.values(), strict=True):
        _validate.non_negative(class_weight=value)
        weights[label] = value
    return weights


def _matrix(estimator: BaseEstimator, X: Any, public: bool, suffix: str, remark: str) -> np.ndarray:
    """Runs scikit-learn's own checks, and replaces messages that would quote values."""
    try:
        # All inputs get one memory layout, on which the last bit of a matrix product depends.
        matrix: Any = validate_data(
            estimator, X, reset=not public, dtype=np.float64, order="C", ensure_all_finite=False,
            accept_sparse="csr",
        )  # fmt: skip
        return matrix
    except (TypeError, OverflowError) as error:
        # They name the type of a cell.
        raise type(error)(f"X{suffix} must hold numbers: {error}.{remark}") from None
    except ValueError as error:
        if public and "feature names should match" in str(error):
            raise ValueError(
                "X_public must have the columns of X in the same order, got other columns. "
                "Pass X_public[X.columns]."
            ) from None
        if str(error).startswith(("Expected 2D array", "Complex data")):
            first = str(error).splitlines()[0].rstrip(":")
            raise ValueError(
                f"{first}. X{suffix} must hold real numbers in the shape (rows, features).{remark}"
            ) from None
        if str(error).startswith(("setting an array element", "cannot convert")):
            raise ValueError(f"X{suffix} must hold numbers: {error}{remark}") from None
        if "could not convert" not in str(error):
            raise
        raise ValueError(f"X{suffix} must hold numbers, got text. {_SAFE_WAY}.{remark}") from None


def _refuse_text_and_times(name: str, array: Any, remark: str) -> None:
    """Refuses arrays in which one row may have decided how the numbers of all rows are written.

    Datetimes are all counted in the finest unit among them, and a float32 has other digits as text.
    """
    if np.ma.isMaskedArray(array):
        raise ValueError(
            f"{name} must say which cells are missing, got a masked array, whose mask is lost. "
            f"Encode array.filled(numpy.nan) by mirrordp.tables.PublicEncoder.{remark}"
        )
    if is_frame(array):
        what = foreign_type(array)
    elif holds_text(np.asarray(array, object) if isinstance(array, list | tuple) else array):
        what = "text"
    else:
        kind = getattr(getattr(array, "dtype", None), "kind", "")
        what = {"m": "dates or durations", "M": "dates or durations", "U": "text", "S": "text"}.get(
            kind
        )
    if what is None:
        return
    raise ValueError(f"{name} must hold numbers, got {what}. {_SAFE_WAY}.{remark}")


def refuse_lost_labels(classes: np.ndarray, y: np.ndarray, index: np.ndarray) -> None:
    """Raises a ValueError if private labels are text where classes are values, or the reverse.

    A single one may be an odd label. Of several, one row may have decided how all are read.

    Args:
        classes: the classes.
        y: the private labels.
        index: their classes, from `class_indices`.
    """
    kinds = {isinstance(label, str) for label in classes.tolist()}
    unknown = y[np.flatnonzero(index < 0)].tolist()
    texts = {label for label in unknown if isinstance(label, str)}
    if y.dtype.kind in "OU":
        texts |= {label for label in y.tolist() if isinstance(label, str) and not is_plain(label)}
    values = {repr(label) for label in unknown if isinstance(label, bool | int | float)}
    has_digit = any(character.isdigit() for label in texts for character in label)
    if kinds == {False} and (has_digit or len(texts) > 1):
        expected, got = "numbers, true or false", "text"
    elif kinds == {True} and (len(values) > 1 or (values and (index < 0).all())):
        expected, got = "text", "numbers, true or false"
    else:
        return
    raise ValueError(
        f"y must hold {expected}, as the classes do, got {got}. {LEFT_AS_TEXT}. {UNPROTECTED}"
    )


def holds_text(array: Any) -> bool:
    """Returns whether an array of objects holds text.

    A column may be text because of one cell, and its numbers were to be read differently.
    """
    is_object = isinstance(array, np.ndarray) and array.dtype == object
    return is_object and any(isinstance(cell, str | bytes) for cell in array.flat)


def _each_by_itself(y: Any) -> Any:
    """Returns targets of several types as objects; NumPy would turn all into text if one is."""
    if isinstance(y, list | tuple) and is_mixed(y):
        return np.fromiter(y, object, len(y))
    return y


def is_mixed(values: Iterable[Any]) -> bool:
    """Returns whether the values have more than one type."""
    return len({type(value) for value in values}) > 1


def refuse_non_finite(name: str, array: np.ndarray, remark: str) -> None:
    """Raises a ValueError that counts NaN and infinity, and names the columns that hold them."""
    bad = np.zeros(array.shape[1:], np.int64)
    for block in row_blocks(array):
        bad += np.count_nonzero(~np.isfinite(array[block]), axis=0)
    if not bad.any():
        return
    columns = np.flatnonzero(bad)
    where = "" if array.ndim == 1 else f" in columns {columns[:5].tolist()}"
    raise ValueError(
        f"{name} must be finite, got {int(bad.sum())} values that are NaN or infinity{where}. Drop "
        "or impute them row by row, by rules that come from public data, as "
        f"mirrordp.tables.PublicEncoder does.{remark}"
    )


def mention_other_units(
    X: np.ndarray,
    y: np.ndarray | None,
    X_public: np.ndarray,
    y_public: np.ndarray,
    counts: np.ndarray | None,
) -> None:
    """Warns of columns in which most private values are beyond the public range.

    Scales come from public rows. If a pipeline has scaled the private rows only, or if units
    differ, the fit still succeeds, with a poor model. Targets of rows that take part are compared
    if `y` is given.
    """
    found = [f"column {index}" for index in np.flatnonzero(_mostly_beyond(X, X_public))]
    if y is not None and y.shape[1:] == y_public.shape[1:]:
        are_numbers = set(y.dtype.kind + y_public.dtype.kind) <= set("fiu")
        found += ["y"] if are_numbers and np.any(_mostly_beyond(y, y_public, counts)) else []
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        warn(
            f"{UNPROTECTED} most private values are beyond the range of public ones in "
            f"{', '.join(found[:5])}{more}. Give both tables the same units: a Pipeline "
            "transforms X, but not X_public.",
            UnprotectedWarning,
        )


def _mostly_beyond(
    private: Any, public: np.ndarray, counts: np.ndarray | None = None
) -> np.ndarray:
    """Returns in which columns more than half of the private values are beyond the public range.

    Columns that are constant on public rows do not matter, because the model leaves them out.
    """
    low, high = public.min(axis=0), public.max(axis=0)
    if issparse(private):
        # A stored zero counts like any other number; what is not stored is zero.
        zeros_beyond = (low > 0) | (high < 0)
        entries = private.tocoo()
        column = entries.coords[1] if hasattr(entries, "coords") else entries.col
        beyond = (entries.data < low[column]) | (entries.data > high[column])
        stored = np.bincount(column, minlength=private.shape[1])
        share = np.bincount(column, weights=beyond, minlength=private.shape[1])
        share += np.where(zeros_beyond, private.shape[0] - stored, 0)
        return (share / private.shape[0] > 0.5) & (low < high)
    beyond, rows = np.zeros(private.shape[1:], np.int64), 0
    for block in row_blocks(private, counts):
        part = private[block] if counts is None else private[block][counts[block]]
        beyond += np.count_nonzero((part < low) | (part > high), axis=0)
        rows += len(part)
    return (2 * beyond > rows) & (low < high)


def copies(
    x: np.ndarray, targets: np.ndarray, x_public: np.ndarray, public_targets: np.ndarray
) -> np.ndarray:
    """Returns a mask of the private rows that equal a public row, if equality suggests a copy.

    If all public rows are distinct, few private rows equal one of them by chance: about the share
    that one public row is of all. Otherwise the most common rows would be the ones left out, so
    that nothing is. Public rows that are mostly private rows are refused.
    """
    if issparse(x):
        x, x_public = _digests(x), _digests(csr_array(x_public))
    # Features were found to be finite before, and a target may have overflowed in scaling.
    private = PrivateData({"x": x, "y": targets}, check_finite=False)
    public = PublicData({"x": x_public, "y": public_targets})
    if len(np.unique(np.column_stack([x_public, public_targets]), axis=0)) < len(x_public):
        refuse_private_rows(private, public)
        return np.zeros(len(x), bool)
    return excluded_rows(private, public)


def _digests(matrix: Any) -> np.ndarray:
    """Returns two float64 numbers per row of a sparse matrix, the same for rows that are equal.

    For other rows they are the same only if a hash of 96 bits collides.
    """
    matrix = csr_array(matrix, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    columns = matrix.indices.astype(np.int64)
    found = np.empty((matrix.shape[0], 2))
    for row, (start, end) in enumerate(itertools.pairwise(matrix.indptr.tolist())):
        content = columns[start:end].tobytes() + matrix.data[start:end].tobytes()
        digest = hashlib.blake2b(content, digest_size=12).digest()
        found[row] = (int.from_bytes(digest[:6]), int.from_bytes(digest[6:]))
    return found


def as_numbers(name: str, y: np.ndarray, remark: str) -> np.ndarray:
    """Returns targets as finite float64 numbers, or refuses them."""
    try:
        # In an array of text the numbers may have lost digits because of one row.
        is_text = y.dtype.kind in "US" or holds_text(y)
        numbers = None if is_text else y.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None:
        raise ValueError(
            f"{name} must hold numbers, got dtype {y.dtype}. Use PrivateLogisticRegression for "
            f"classes.{remark}"
        ) from None
    refuse_non_finite(name, numbers, remark)
    return numbers


def as_counts(name: str, y: np.ndarray, remark: str) -> np.ndarray:
    """Returns targets as numbers of at least zero, or refuses them."""
    y = as_numbers(name, y, remark)
    negative = sum(int(np.count_nonzero(y[block] < 0)) for block in row_blocks(y))
    if negative:
        raise ValueError(
            f"{name} must hold counts of at least 0, got {negative} negative values. "
            f"Correct them, or use PrivateLinearRegression.{remark}"
        )
    return y


def as_mask(counts: Any, rows: int) -> np.ndarray:
    """Returns the mask of the private rows that take part, or refuses it."""
    counts = np.asarray(counts)
    if counts.shape != (rows,) or counts.dtype != bool:
        raise ValueError(
            f"counts must be {rows} booleans, one per private row, got {counts.dtype} of shape "
            f"{counts.shape}. {UNPROTECTED}"
        )
    return counts


def as_seed(random_state: Any) -> int | None:
    """Returns the seed of a reproducible run, or None for randomness of the operating system."""
    if random_state is None:
        return None
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**63))
    if isinstance(random_state, numbers.Integral) and int(random_state) >= 0:
        return int(random_state)
    raise ValueError(
        "random_state must be None, a non-negative integer or a NumPy generator, got "
        f"{random_state!r}."
    )


def class_indices(classes: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the class of each label, −1 if it is none; each label is looked up by itself.

    An array has one dtype: one text among numbers makes NumPy write all of them as text, and one
    fraction makes 1 a 1.0. If that changed the class of the other labels, one row would decide
    over all others. A label is therefore the class that it equals, or else the class that reads as
    the same number: 1, 1.0, True, "1", "1.0" and "TRUE" are one label.
    """
    known = {label: index for index, label in enumerate(classes.tolist())}
    by_number = {_as_number(label): index for label, index in known.items()}
    by_number.pop(None, None)

    def find(label: Any) -> int:
        if isinstance(label, bytes):
            label = label.decode("latin-1")
        return known.get(label, by_number.get(_as_number(label), -1))

    found: dict[Any, int] = {}

    def index(label: Any) -> int:
        try:
            if label not in found:
                found[label] = find(label)
            return found[label]
        except (TypeError, ValueError, ArithmeticError):
            # What cannot be hashed or compared, such as a list or pandas.NA, is no class.
            return -1

    return np.fromiter(map(index, y.tolist()), np.intp, len(y))


def check_distinct(classes: np.ndarray) -> None:
    """Refuses classes that would be the same number if the dtype of the array changed."""
    read = map(_as_number, classes.tolist())
    numbers = [number for number in read if number is not None]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            "classes must differ as float64 numbers where they read as numbers, got two that do "
            "not, such as '1' and '1.0', or integers beyond 2**53. Rename them."
        )


def _as_number(label: Any) -> complex | None:
    """Returns a label as a number, if it reads as one; equal numbers of any type are equal here."""
    if isinstance(label, str) and label.lower() in ("true", "false"):
        # However it is spelled, pandas reads it as true or false unless one label is neither.
        return complex(label.lower() == "true")
    try:
        number = complex(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == number else None
