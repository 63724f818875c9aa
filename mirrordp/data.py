"""Private and public data: two types, so that neither can be taken for the other.

Both hold a pytree of arrays whose leaves share one leading axis, the example axis. What depends on
private rows (how many equal a public row, which column holds a NaN) is told to the operator through
`warnings` and exceptions, marked `UNPROTECTED`; it never reaches a report, a card or a model.
"""

import dataclasses
import enum
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _validate
from mirrordp.types import PyTree

UNPROTECTED = "[not covered by the privacy guarantee; for the operator only]"


class UnprotectedWarning(UserWarning):
    """Tells the operator something that depends on private rows without noise."""


class Overlap(enum.Enum):
    """What to do about private rows that equal a public row."""

    DROP = "drop"
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True, eq=False)
class _Examples:
    """A pytree of arrays with one common leading axis, checked when it is made."""

    arrays: PyTree

    def __post_init__(self):
        arrays = jax.tree.map(np.asarray, self.arrays)
        object.__setattr__(self, "arrays", arrays)
        name, remark = self._words()
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        if not leaves:
            raise ValueError(f"{name} needs at least one array, got an empty tree.")
        for path, leaf in leaves:
            if leaf.ndim == 0:
                raise ValueError(
                    f"every array of {name} needs a leading example axis, got a scalar at "
                    f"{_path(path)}. Repeat it for each example or put it into the loss function."
                )
            if not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool):
                raise TypeError(
                    f"{name} must hold numbers, got dtype {leaf.dtype} at {_path(path)}. "
                    "Encode text and categories first, by rules that come from public data."
                )
        lengths = {_path(path): leaf.shape[0] for path, leaf in leaves}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"all arrays of {name} must have the same number of rows, got {lengths}. {remark}"
            )
        if len(self) == 0:
            raise ValueError(f"{name} is empty: expected at least one row.")
        for path, leaf in leaves:
            _refuse_non_finite(name, remark, _path(path), leaf)

    def _words(self) -> tuple[str, str]:
        """The type's name and the remark that its error messages carry."""
        return type(self).__name__, ""

    def __len__(self) -> int:
        return jax.tree.leaves(self.arrays)[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Memory that the arrays take."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.arrays))


class PrivateData(_Examples):
    """Rows whose privacy is protected. Reading them outside a mechanism is not.

    Args:
        arrays: a pytree of arrays with one common leading axis.
    """

    def _words(self) -> tuple[str, str]:
        return "PrivateData", UNPROTECTED


class PublicData(_Examples):
    """Rows that anyone may read: everything learned from them is free.

    Args:
        arrays: a pytree of arrays with one common leading axis.
    """


def _path(path: tuple) -> str:
    return f"arrays{jax.tree_util.keystr(path)}"


def _refuse_non_finite(name: str, remark: str, path: str, leaf: np.ndarray) -> None:
    if not jnp.issubdtype(leaf.dtype, np.inexact):
        return
    bad = ~np.isfinite(leaf)
    if not bad.any():
        return
    per_column = bad.reshape(len(leaf), -1).sum(axis=0)
    columns = np.flatnonzero(per_column)
    where = (
        f"{path}"
        if leaf.ndim == 1
        else ", ".join(f"{path} column {c} ({per_column[c]})" for c in columns[:5])
        + (f" and {len(columns) - 5} more columns" if len(columns) > 5 else "")
    )
    raise ValueError(
        f"{name} must be finite, got {int(bad.sum())} NaN or infinite values in {where}. "
        f"Drop or impute them row by row, by rules that come from public data. {remark}".rstrip()
    )


def require_private(data: object, name: str = "private") -> None:
    """Raises a TypeError unless `data` is `PrivateData`."""
    _validate.instance_of(
        PrivateData, f"Wrap the sensitive rows: {name}=PrivateData(arrays).", **{name: data}
    )


def require_public(data: object, name: str = "public") -> None:
    """Raises a TypeError unless `data` is `PublicData`."""
    _validate.instance_of(
        PublicData, f"Wrap the public rows: {name}=PublicData(arrays).", **{name: data}
    )


def require_same_structure(private: PrivateData, public: PublicData) -> None:
    """Raises unless both hold the same tree of arrays, equal in dtype and trailing axes."""

    def shape_of(data: PrivateData | PublicData) -> PyTree:
        return jax.tree.map(lambda leaf: f"{leaf.dtype}[n{_dims(leaf)}]", data.arrays)

    if shape_of(private) != shape_of(public):
        raise ValueError(
            "private and public rows must have the same structure, got "
            f"private {shape_of(private)} and public {shape_of(public)}. Bring both into the same "
            "tree of arrays, or give the public rows a loss of their own (public_loss_fn)."
        )


def _dims(leaf: np.ndarray) -> str:
    return "".join(f", {size}" for size in leaf.shape[1:])


def excluded_rows(
    private: PrivateData, public: PublicData, overlap: Overlap = Overlap.DROP
) -> np.ndarray:
    """A mask of the private rows that equal a public row and so shall contribute nothing.

    A row that is also public is not used twice. Each row is judged by itself and against public
    data only, and it is masked (its gradient counts as zero) rather than removed: the number of
    rows, the sampling probability and the divisor stay the public constants that they were, so
    this is one record's own pre-processing under every adjacency.

    Args:
        private: the private rows.
        public: the public rows, of the same structure.
        overlap: mask such rows (`DROP`), with a warning that goes to the operator only, or raise.

    Returns:
        A boolean array of length `len(private)`.
    """
    require_same_structure(private, public)
    public_rows = set(_row_bytes(public))
    mask = np.fromiter((row in public_rows for row in _row_bytes(private)), bool, len(private))
    count = int(mask.sum())
    if not count:
        return mask
    message = f"{count} private rows equal a public row"
    if overlap is Overlap.REFUSE:
        raise ValueError(
            f"{message}, and overlap='refuse' was asked for. Remove them from one of the two "
            f"sides or pass overlap=Overlap.DROP. {UNPROTECTED}"
        )
    warnings.warn(
        f"{UNPROTECTED} {message}; they contribute nothing to training.",
        UnprotectedWarning,
        stacklevel=3,
    )
    return mask


def _row_bytes(data: PrivateData | PublicData):
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(data.arrays)]
    for row in range(len(data)):
        yield b"".join(leaf[row].tobytes() for leaf in leaves)


def split(arrays: PyTree, *, public_fraction: float, seed: int) -> tuple[PrivateData, PublicData]:
    """Sets a random part of the rows aside as public, as the paper does with 4% of each data set.

    This is for experiments: real private rows do not become public by being chosen.

    Args:
        arrays: a pytree of arrays with one common leading axis.
        public_fraction: the share of rows, rounded, that becomes public.
        seed: decides which; the same seed gives the same split.

    Returns:
        The private rows and the public rows.
    """
    _validate.open_unit_interval(public_fraction=public_fraction)
    rows = len(jax.tree.leaves(arrays)[0])
    order = np.random.default_rng(seed).permutation(rows)
    num_public = max(1, round(public_fraction * rows))
    chosen, rest = np.sort(order[:num_public]), np.sort(order[num_public:])
    return (
        PrivateData(jax.tree.map(lambda leaf: np.asarray(leaf)[rest], arrays)),
        PublicData(jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], arrays)),
    )
