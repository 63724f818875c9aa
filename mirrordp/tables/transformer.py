"""`PublicEncoder`, the encoding of tables as a scikit-learn transformer."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from mirrordp._warn import warn
from mirrordp.data import UNPROTECTED, UnprotectedWarning
from mirrordp.tables.columns import Tally, kinds_of_values
from mirrordp.tables.encoding import FeatureEncoding, by_column
from mirrordp.tables.frames import is_frame, table_of
from mirrordp.tables.learning import learn_features


def encode_frame(
    encoding: FeatureEncoding,
    rows: Any,
    source: str,
    *,
    private: bool,
    kinds: Mapping[str, str] | None = None,
) -> np.ndarray:
    """Encodes a frame and tells the operator of the cells that public rows do not cover.

    Args:
        encoding: the encoding.
        rows: the frame or array.
        source: its name, for messages.
        private: whether messages about its cells need the mark `UNPROTECTED`.
        kinds: what the public columns hold; see `kinds_of_values`.
    """
    features, unfamiliar = encode_and_count(encoding, rows, source, private=private, kinds=kinds)
    mention(unfamiliar, private=private)
    return features


def encode_and_count(
    encoding: FeatureEncoding,
    rows: Any,
    source: str,
    *,
    private: bool,
    kinds: Mapping[str, str] | None = None,
) -> tuple[np.ndarray, dict[str, str]]:
    """Returns features, and by column how many cells public rows do not cover, in words."""
    tallies: dict[str, Tally] = collections.defaultdict(Tally)
    table = table_of(rows, source, private=private).table
    encoding.refuse_lost_values(kinds, table)
    features = encoding.encode_features(table, tallies, private=private)
    encoding.judge(tallies, source, private=private)
    return features, encoding.unfamiliar(tallies)


def mention(unfamiliar: dict[str, str], *, private: bool) -> None:
    """Warns of cells that were clamped, unknown or left out, column by column."""
    if unfamiliar:
        words = "; ".join(by_column(unfamiliar))
        start, category = (f"{UNPROTECTED} ", UnprotectedWarning) if private else ("", UserWarning)
        warn(f"{start}{words}.", category)


class PublicEncoder(TransformerMixin, BaseEstimator):
    """The encoding of `mirrordp fit` for data frames: `fit` on public rows, `transform` any rows.

    Numbers, categories, true or false, dates and missing values become features of finite numbers,
    by rules that come from the rows given to `fit` alone (see `mirrordp.tables` for the table of
    rules). Each row is then encoded by itself, so that encoded private rows are as private as they
    were before. Therefore `fit` must see public rows only. In a `Pipeline`, whose `fit` would show
    it the private rows, freeze it after it was fitted:

        encoder = PublicEncoder().fit(X_public)
        model = make_pipeline(FrozenEstimator(encoder), PrivateLogisticRegression())
        model.fit(
            X, y,
            privatelogisticregression__X_public=encoder.transform(X_public),
            privatelogisticregression__y_public=y_public,
        )

    Args:
        categorical: columns whose numbers are codes of categories. Columns of a categorical type
            are categories anyway.
        ignore: columns to leave out, such as identifiers.
        decimal: what stands before the fraction of a number in cells of text, "." or ",".
        thousands: what stands between groups of three digits in cells of text; nothing by default.

    Attributes:
        encoding_: the `FeatureEncoding`.
        left_out_: the columns that are not used, with the reasons.
        n_features_in_: the number of columns that `fit` saw.
        feature_names_in_: their names, if the rows were a frame.
    """

    n_features_in_: int

    def __init__(
        self,
        *,
        categorical: Sequence[str] = (),
        ignore: Sequence[str] = (),
        decimal: str = ".",
        thousands: str = "",
    ):
        self.categorical = categorical
        self.ignore = ignore
        self.decimal = decimal
        self.thousands = thousands

    def fit(self, X: Any, y: Any = None) -> "PublicEncoder":
        """Learns the encoding from public rows.

        Args:
            X: a data frame or array of public rows.
            y: ignored.

        Returns:
            The fitted encoder.
        """
        del y
        found = table_of(self._checked(X, reset=True), "X", private=False)
        learned = learn_features(
            found.table,
            categorical=(*self.categorical, *found.categorical),
            ignore=self.ignore,
            decimal=self.decimal,
            thousands=self.thousands,
        )
        self.encoding_, self.left_out_ = learned.encoding, dict(learned.left_out)
        self._kinds = kinds_of_values(found.table.columns)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Returns the features of rows that may be private, an array of float64.

        Args:
            X: a frame with the columns that `fit` saw, in any order, or an array as given to `fit`.
                Warnings about its cells are for the operator only.
        """
        check_is_fitted(self)
        rows = self._checked(X, reset=False)
        kinds = getattr(self, "_kinds", None)  # not in pickles of earlier versions
        return encode_frame(self.encoding_, rows, "X", private=True, kinds=kinds)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Returns the names of the features, such as "colour=red".

        Args:
            input_features: the names of the columns, which can only be those that `fit` saw.
        """
        check_is_fitted(self)
        if input_features is not None:
            known = getattr(self, "feature_names_in_", None)
            if known is not None and list(input_features) != list(known):
                raise ValueError("input_features is not equal to feature_names_in_")
            if len(input_features) != self.n_features_in_:
                raise ValueError(
                    "input_features should have length equal to number of features "
                    f"({self.n_features_in_}), got {len(input_features)}"
                )
        return np.array(self.encoding_.features, dtype=object)

    def _checked(self, X: Any, *, reset: bool) -> Any:
        """Returns a frame as it is, and anything else as an array of numbers or objects."""
        if is_frame(X):
            if reset or not hasattr(self, "feature_names_in_"):
                validate_data(self, X, reset=reset, skip_check_array=True)
            return X
        kind = getattr(getattr(X, "dtype", None), "kind", "O")
        if kind in "USmM":
            raise ValueError(
                "X must be a data frame or an array of numbers or objects, got text or dates, "
                "which have one length or unit for all rows. Pass a data frame."
            )
        if issparse(X):
            raise TypeError("PublicEncoder takes no sparse rows, which hold nothing but numbers.")
        if isinstance(X, list | tuple):
            # NumPy would turn every cell into text if one of them is.
            X = np.array(X, object)
        try:
            return validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
        except ValueError as error:
            # scikit-learn shows the rows in the lines behind the first.
            first, *others = str(error).splitlines()
            if not others:
                raise
            advice = " Reshape your data to the shape (rows, columns)." * ("2D" in first)
            remark = "" if reset else f" {UNPROTECTED}"
            raise ValueError(f"{first.rstrip(':')}.{advice}{remark}") from None

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags
