"""Tables of numbers, categories and dates: files or frames in, arrays for the estimators out.

`learn_encoding` (or `PublicEncoder`, for data frames) learns everything that decides the encoding
from the public table: the type of a column, its categories, its mean, scale and range, the format
of its dates, the replacement of a missing value, and the classes of the target. `TableEncoding`
then treats each row by itself:

    cell                                     becomes
    a number                                 (x clamped to the public range − public mean) / scale
    a missing or unreadable number           the public mean, i.e. zero
    a date                                   elapsed days like a number; time of the year and of
                                             the day as sine and cosine; 1 in its weekday's feature
    a missing or unreadable date             zero in all of these
    a category                               1 in its own feature
    a category unknown to the public table   0 in all features of the column
    a missing category                       the column's most common public category
    missing, where public cells were too     1 in the feature "... is missing" (numbers: besides
                                             the mean, categories: instead of the most common)
    a missing or unusable target             the row is marked and must contribute nothing

The encoding of a private row thus depends on that row and on public data alone. Messages about
private cells are for the operator and carry the mark `UNPROTECTED`.
"""

from typing import TYPE_CHECKING, Any

from mirrordp.tables.columns import (
    CategoryColumn,
    ClassTarget,
    DateColumn,
    NumberColumn,
    NumberTarget,
)
from mirrordp.tables.encoding import EncodedTable, FeatureEncoding, TableEncoding
from mirrordp.tables.files import Table, TableError, read_batches, read_table, write_table
from mirrordp.tables.learning import (
    TASKS,
    LearnedEncoding,
    LearnedFeatures,
    learn_encoding,
    learn_features,
)

if TYPE_CHECKING:
    from mirrordp.tables.transformer import PublicEncoder

__all__ = [
    "TASKS",
    "CategoryColumn",
    "ClassTarget",
    "DateColumn",
    "EncodedTable",
    "FeatureEncoding",
    "LearnedEncoding",
    "LearnedFeatures",
    "NumberColumn",
    "NumberTarget",
    "PublicEncoder",
    "Table",
    "TableEncoding",
    "TableError",
    "learn_encoding",
    "learn_features",
    "read_batches",
    "read_table",
    "write_table",
]


def __getattr__(name: str) -> Any:
    # `mirrordp fit` reads files before it needs scikit-learn, which takes a while to import.
    if name == "PublicEncoder":
        from mirrordp.tables.transformer import PublicEncoder

        return PublicEncoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
