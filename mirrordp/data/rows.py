"""Private and public rows as two types, so that neither can be mistaken for the other.

Both hold a pytree of arrays whose leaves share one leading axis, the example axis. Private rows may
stay on disk (`mirrordp.data.sources`); all checks here go over them part by part. The types of
`mirrordp.data.users` take their place if the unit of privacy is the user. What depends on private
rows (how many equal a public row, which column holds a NaN) is told to the operator by warnings and
exceptions that carry the mark `UNPROTECTED`; it never reaches a report, a card or a model.
"""

import array
import base64
import collections
import dataclasses
import enum
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _show, _validate
from mirrordp._warn import warn
from mirrordp.data import sources
from mirrordp.data.sources import UNPROTECTED
from mirrordp.types import PyTree

_HASHES = 2**23
HIDDEN = "rows are not shown, nor is their number n, which may be private"


class UnprotectedWarning(UserWarning):
    """A warning that depends on private rows without noise, for the operator only."""


class Overlap(enum.Enum):
    """The ways to treat private rows that equal a public row."""

    DROP = "drop"
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True, eq=False)
class _Examples:
    """A pytree of arrays with one common leading axis, checked when it is made."""

    arrays: PyTree

    def __new__(cls, arrays: PyTree = None, *others: Any, **options: Any):
        del arrays, options
        if others and not isinstance(others[0], bool):
            raise TypeError(
                f"{cls.__name__} takes one tree of arrays, got {1 + len(others)}. Name them: "
                f"{cls.__name__}({{'x': X, 'y': y}})."
            )
        return super().__new__(cls)

    def __post_init__(self):
        self._check(self.arrays)

    def _check(self, arrays: PyTree, *, check_finite: bool = True, in_memory: bool = True) -> None:
        name, remark = self._words()
        arrays = as_arrays(name, arrays)
        check_arrays(name, remark, arrays)
        if in_memory:
            arrays = sources.in_memory(arrays)
        object.__setattr__(self, "arrays", arrays)
        if check_finite:
            refuse_non_finite(name, remark, arrays)

    def _words(self) -> tuple[str, str]:
        """Returns the type's name and the remark that its error messages carry."""
        return type(self).__name__, ""

    def __len__(self) -> int:
        return jax.tree.leaves(self.arrays)[0].shape[0]

    @property
    def nbytes(self) -> int:
        """The memory that the arrays take, in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.arrays))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_show.listed_kinds(_show.array_kinds(self.arrays))})"

    def _repr_html_(self) -> str:
        return _show.table(type(self).__name__, _show.array_kinds(self.arrays))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrivateData(_Examples):
    """Rows whose privacy a mechanism protects; reading them outside of one is not protected.

    Args:
        arrays: a pytree of arrays with one common leading axis. Memory maps, and the sources of
            `mirrordp.data.sources` in place of arrays, stay on disk: training reads them batch by
            batch.
        check_finite: whether to go over all rows now and refuse NaN and infinity. Without it, a row
            whose gradient is not finite contributes zero to training.
    """

    check_finite: dataclasses.InitVar[bool] = True

    def __post_init__(self, check_finite: bool):  # pyright: ignore[reportIncompatibleMethodOverride]
        self._check(self.arrays, check_finite=check_finite, in_memory=False)

    def _words(self) -> tuple[str, str]:
        return "PrivateData", UNPROTECTED

    def __repr__(self) -> str:
        kinds = _show.listed_kinds(_show.array_kinds(self.arrays, rows="n"))
        return f"PrivateData({kinds}; {HIDDEN})"

    def _repr_html_(self) -> str:
        kinds = _show.array_kinds(self.arrays, rows="n")
        return _show.table("PrivateData", kinds, f"{HIDDEN.capitalize()}.")


class PublicData(_Examples):
    """Rows that anyone may read: everything learned from them is free.

    Args:
        arrays: a pytree of arrays with one common leading axis. Sources are read into memory.
    """


def as_arrays(name: str, tree: PyTree) -> PyTree:
    """Returns the tree with NumPy arrays, or columns of sources, as its leaves.

    Refuses leaves that are data set objects.

    NumPy would read any object with `__getitem__` item by item until an IndexError, which a data
    set need never raise.
    """

    def as_array(path: tuple, leaf: object) -> PyTree:
        if isinstance(leaf, sources.Column):
            return leaf
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(
                f"{name} takes arrays without a mask, since it would take masked values for "
                f"numbers, got a masked array at {_path(path)}. Pass array.filled(value), or leave "
                "out their rows."
            )
        known = ("__array__", "__array_interface__", "__dlpack__")
        plain = bool | int | float | complex | str | bytes | range | memoryview | array.array
        if isinstance(leaf, plain) or any(hasattr(leaf, attribute) for attribute in known):
            # A view: a memory map is not copied.
            return np.asarray(leaf)
        if isinstance(leaf, sources.RowSource):
            return sources.columns_of(leaf)
        advice = "Read its examples when they are needed: mirrordp.data.dataset_rows(dataset), or "
        advice += "collect them: np.stack([dataset[i] for i in range(len(dataset))])."
        if hasattr(leaf, "tensors"):
            advice = f"Pass its tensors: {name}(tuple(np.asarray(t) for t in dataset.tensors))."
        raise TypeError(
            f"{name} takes arrays, or a tree of them, got {type(leaf).__name__} at {_path(path)}. "
            f"{advice}"
        )

    return jax.tree_util.tree_map_with_path(as_array, tree)


def check_arrays(name: str, remark: str, arrays: PyTree) -> None:
    """Raises unless the leaves hold numbers and share one leading axis that is not empty."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if not leaves:
        raise ValueError(f"{name} needs at least one array, got an empty tree.")
    for path, leaf in leaves:
        if leaf.ndim == 0:
            raise ValueError(
                f"every array of {name} needs a leading example axis, got a scalar at "
                f"{_path(path)}. Make an array of a list (np.asarray); repeat a constant for each "
                "example, or put it into the loss function."
            )
        if not is_numeric(leaf.dtype):
            raise TypeError(
                f"{name} must hold numbers, got dtype {leaf.dtype} at {_path(path)}. Encode text, "
                "categories and times first, by rules that come from public data."
            )
    lengths = {_path(path): leaf.shape[0] for path, leaf in leaves}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"all arrays of {name} must have the same number of rows, got {lengths}. {remark}"
        )
    if leaves[0][1].shape[0] == 0:
        raise ValueError(f"{name} needs at least one row, got none.")
    if leaves[0][1].shape[0] >= 2**31:
        raise ValueError(f"{name} holds at most 2³¹ − 1 rows, got more. Use a part of them.")


def is_numeric(dtype: np.dtype) -> bool:
    """Returns whether a dtype holds numbers or booleans.

    A duration does not count, although NumPy treats it as an integer: its unit follows from all
    rows together.
    """
    return dtype.kind != "m" and (jnp.issubdtype(dtype, np.number) or dtype.kind == "b")


def refuse_non_finite(name: str, remark: str, arrays: PyTree) -> None:
    """Raises a ValueError that counts NaN and infinity in the first array that holds any."""
    found = jax.tree_util.tree_leaves_with_path(arrays)
    found = [(path, leaf) for path, leaf in found if jnp.issubdtype(leaf.dtype, np.inexact)]
    if not found:
        return
    counts = [np.zeros(leaf.shape[1:], np.int64) for _, leaf in found]
    for _, part in sources.chunks([leaf for _, leaf in found]):
        for count, rows in zip(counts, part, strict=True):
            count += (~np.isfinite(rows)).sum(axis=0)
    for (path, leaf), count in zip(found, counts, strict=True):
        if not count.any():
            continue
        where = _path(path)
        if leaf.ndim > 1:
            per_column = count.reshape(-1)
            columns = np.flatnonzero(per_column)
            more = f" and {len(columns) - 5} more columns" if len(columns) > 5 else ""
            where = ", ".join(f"{where} column {c} ({per_column[c]})" for c in columns[:5]) + more
        raise ValueError(
            f"{name} must be finite, got {int(count.sum())} NaN or infinite values in {where}. "
            "Drop or impute them row by row, by rules that come from public data. "
            f"{remark}".rstrip()
        )


def _path(path: tuple) -> str:
    return f"arrays{jax.tree_util.keystr(path)}"


def require_private(data: object, name: str = "private") -> None:
    """Raises a TypeError unless `data` is `PrivateData`."""
    advice = f"Wrap the sensitive rows: {name}=PrivateData(arrays)."
    if type(data).__name__ == "PrivateClients":
        advice = "Protect users with a FederatedStep, which takes them."
    _validate.instance_of(PrivateData, advice, **{name: data})


def require_public(data: object, name: str = "public") -> None:
    """Raises a TypeError unless `data` is `PublicData`."""
    _validate.instance_of(
        PublicData, f"Wrap the public rows: {name}=PublicData(arrays).", **{name: data}
    )


def have_same_structure(private: PrivateData, public: PublicData) -> bool:
    """Returns whether both hold the same tree of arrays, equal in dtype and trailing axes."""
    return _structure(private) == _structure(public)


def require_same_structure(private: PrivateData, public: PublicData) -> None:
    """Raises a ValueError unless `have_same_structure`."""
    if not have_same_structure(private, public):
        raise ValueError(
            "private and public rows must have the same structure, got private "
            f"{_structure(private)} and public {_structure(public)}. Bring both into the same "
            "tree of arrays, or give the public rows a loss of their own (public_loss_fn)."
        )


def _structure(data: PrivateData | PublicData) -> PyTree:
    def kind(leaf: np.ndarray) -> str:
        dims = "".join(f", {size}" for size in leaf.shape[1:])
        return f"{leaf.dtype}[n{dims}]"

    return jax.tree.map(kind, data.arrays)


Gather = Callable[[Any], list[Any]]
"""Given a value of this process, returns those of all processes that hold private records.

The values are those that JSON knows."""


def excluded_rows(
    private: PrivateData,
    public: PublicData,
    overlap: Overlap = Overlap.DROP,
    *,
    gather: Gather | None = None,
) -> np.ndarray:
    """Returns a mask of the private rows that equal a public row, which contribute nothing.

    A row that is also public is not used twice. Each row is compared by itself with public data
    only, and it is masked (its gradient counts as zero) rather than removed: the number of rows,
    the sampling probability and the divisor remain the public constants that they were. The mask
    is therefore a pre-processing of single records under every adjacency.

    Args:
        private: the private rows.
        public: the public rows, of the same structure.
        overlap: whether to mask such rows (`DROP`), with a warning for the operator only, or to
            raise.
        gather: where several processes hold parts of the private rows, which are judged together;
            all of them make this call.

    Returns:
        A boolean array of length `len(private)`.

    Raises:
        ValueError: see `refuse_private_rows`; or if rows are equal and `overlap` is `REFUSE`.
    """
    require_same_structure(private, public)
    mask, found = _equal_rows(private, public)
    _refuse_private_rows(private, public, found, "public rows", gather or _alone)
    announce_overlap(mask, "private rows equal a public row", overlap)
    return mask


def refuse_private_rows(private: PrivateData, other: PublicData, what: str = "public rows") -> None:
    """Refuses rows that are declared to need no protection but are mostly private rows.

    Calling private rows public does not make them public. Rows of few values equal each other by
    chance, a public and a private row as often as two private rows. If more than half as many
    private rows have an equal among themselves, only a copy of the whole table, in any order, is
    refused.

    Args:
        private: the private rows.
        other: rows of the same structure that are to be used without noise.
        what: the name of these rows in the message.

    Raises:
        ValueError: if most of them equal a private row. The message is for the operator only.
    """
    _, found = _equal_rows(private, other)
    _refuse_private_rows(private, other, found, what, _alone)


def _alone(value: Any) -> list[Any]:
    return [value]


def _refuse_private_rows(
    private: PrivateData,
    other: PublicData,
    found: collections.Counter[bytes],
    what: str,
    gather: Gather,
) -> None:
    """Does what `refuse_private_rows` says, given what `_equal_rows` found in each process."""
    others = collections.Counter(_row_bytes(other))
    own = [[number, found[row]] for number, row in enumerate(others) if row in found]
    parts = gather([zlib.crc32(_row_hashes(other).tobytes()), len(private), own])
    if len({hashed for hashed, _, _ in parts}) > 1:
        raise ValueError(f"all processes of a run must be given the same {what}, got others.")
    counts = list(others.values())
    num_private, num_equal = 0, [0] * len(counts)
    for _, length, pairs in parts:
        num_private += length
        for number, count in pairs:
            num_equal[number] += count
    shared = sum(count for count, equal in zip(counts, num_equal, strict=True) if equal)
    if 2 * shared <= len(other):
        return
    repeated = _share_repeated(private, num_private, gather)
    is_copy = len(other) == num_private and counts == num_equal
    if shared / len(other) > 2 * repeated or is_copy:
        raise ValueError(
            f"{what} must be other rows than the private ones, got {shared} of {len(other)} "
            f"{what} that equal a private row. Calling private rows public does not make them "
            f"public; if anybody may know these, remove them from the private rows. {UNPROTECTED}"
        )


def announce_overlap(excluded: np.ndarray, what: str, overlap: Overlap) -> None:
    """Warns the operator of records that were found on both sides, or refuses them."""
    if not excluded.any():
        return
    message = f"{int(excluded.sum())} {what}"
    if overlap is Overlap.REFUSE:
        raise ValueError(
            f"{message}, and overlap=Overlap.REFUSE allows none. Remove them from one of the two "
            f"sides, or pass overlap=Overlap.DROP. {UNPROTECTED}"
        )
    warn(f"{UNPROTECTED} {message}; they contribute nothing to training.", UnprotectedWarning)


def _equal_rows(
    private: PrivateData, other: PublicData
) -> tuple[np.ndarray, collections.Counter[bytes]]:
    """Returns a mask of the private rows that equal one of the others, and their bytes, counted."""
    known = set(_row_bytes(other))
    hashes = np.unique(_row_hashes(other))
    mask, found = np.zeros(len(private), bool), collections.Counter()
    for start, part in sources.chunks(private.arrays):
        # As a rule few rows have the hash of another; only these can be equal.
        leaves = jax.tree.leaves(part)
        for row in np.flatnonzero(np.isin(_hashes(leaves), hashes)).tolist():
            content = _bytes_of(leaves, row)
            if content in known:
                mask[start + row] = True
                found[content] += 1
    return mask, found


def _share_repeated(data: PrivateData, num_rows: int, gather: Gather) -> float:
    """Returns the share of the rows of all processes that equal another one, as hashes tell."""
    repeated, passes = 0, -(-num_rows // _HASHES)
    for number in range(passes):
        # Equal rows have equal hashes, so that each pass can look at some of the hashes. It is
        # their upper bits that depend on all bits of the values.
        parts = (_hashes(jax.tree.leaves(part)) for _, part in sources.chunks(data.arrays))
        some = [part[(part >> np.uint64(40)) % np.uint64(passes) == number] for part in parts]
        texts = gather(base64.b64encode(np.concatenate(some).tobytes()).decode())
        hashes = np.frombuffer(b"".join(map(base64.b64decode, texts)), np.uint64)
        counts = np.unique(hashes, return_counts=True)[1]
        repeated += int(counts[counts > 1].sum())
    return repeated / num_rows


def _row_hashes(data: PrivateData | PublicData) -> np.ndarray:
    """Returns a number of 64 bits for each row, the same for rows of the same bytes."""
    parts = [_hashes(jax.tree.leaves(part)) for _, part in sources.chunks(data.arrays)]
    return np.concatenate(parts)


def _hashes(leaves: list[np.ndarray]) -> np.ndarray:
    """Returns a number of 64 bits for each row of arrays."""
    found = np.zeros(len(leaves[0]), np.uint64)
    rng = np.random.default_rng(0)
    for leaf in leaves:
        size = leaf.dtype.itemsize if leaf.dtype.itemsize in (1, 2, 4, 8) else 1
        count = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // size
        factors = rng.integers(2**64, size=count, dtype=np.uint64) | np.uint64(1)
        step = max(1, 2**20 // max(count, 1))
        for start in range(0, len(leaf), step):
            block = np.ascontiguousarray(_one_zero(leaf[start : start + step]))
            words = block.reshape(-1).view(f"u{size}").reshape(len(block), count)
            # In round numbers the lower bits are zero, and would be in their product.
            words = words ^ (words >> words.dtype.type(4 * size))
            found[start : start + step] += words @ factors
    return found


def _row_bytes(data: PrivateData | PublicData) -> Iterator[bytes]:
    """Yields the bytes of all rows."""
    for _, part in sources.chunks(data.arrays):
        leaves = jax.tree.leaves(part)
        for row in range(len(leaves[0])):
            yield _bytes_of(leaves, row)


def _bytes_of(leaves: list[np.ndarray], row: int) -> bytes:
    return b"".join(_one_zero(leaf[row]).tobytes() for leaf in leaves)


def _one_zero(values: np.ndarray) -> np.ndarray:
    """Returns numbers without -0.0, which equals 0.0 but has other bits."""
    if np.issubdtype(values.dtype, np.inexact):
        return values + values.dtype.type(0)
    return values


def split_rows(
    arrays: PyTree, *, public_fraction: float, seed: int
) -> tuple[PrivateData, PublicData]:
    """Sets a random part of the rows aside as public, as the paper does with 4% of each data set.

    This is for experiments: real private rows do not become public by being chosen.

    Args:
        arrays: a pytree of arrays with one common leading axis.
        public_fraction: the share of rows, rounded, that becomes public.
        seed: decides which rows; the same seed gives the same split.

    Returns:
        The private rows and the public rows.
    """
    _validate.open_unit_interval(public_fraction=public_fraction)
    arrays = as_arrays("split_rows", arrays)
    rows = len(jax.tree.leaves(arrays)[0])
    order = np.random.default_rng(seed).permutation(rows)
    num_public = max(1, round(public_fraction * rows))
    chosen, rest = np.sort(order[:num_public]), np.sort(order[num_public:])
    return (
        PrivateData(sources.pick_rows(arrays, rest)),
        PublicData(sources.read_rows(arrays, chosen)),
    )
