"""Private and public data: two types, so that neither can be taken for the other.

Both hold a pytree of arrays whose leaves share one leading axis, the example axis; where the unit
of privacy is the user, `PrivateClients` and `PublicClients` hold users who own rows. What depends
on private rows (how many equal a public row, which column holds a NaN) is told to the operator
through `warnings` and exceptions, marked `UNPROTECTED`; it never reaches a report, a card or a
model.
"""

import array
import collections
import dataclasses
import enum
import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _show, _validate
from mirrordp._warn import warn
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
        name, remark = self._words()
        arrays = _as_arrays(name, self.arrays)
        object.__setattr__(self, "arrays", arrays)
        _check_arrays(name, remark, arrays)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_show.listed_kinds(_show.array_kinds(self.arrays))})"

    def _repr_html_(self) -> str:
        return _show.table(type(self).__name__, _show.array_kinds(self.arrays))


_HIDDEN = "rows are not shown, nor is their number n, which may be private"


class PrivateData(_Examples):
    """Rows whose privacy is protected. Reading them outside a mechanism is not.

    Args:
        arrays: a pytree of arrays with one common leading axis.
    """

    def _words(self) -> tuple[str, str]:
        return "PrivateData", UNPROTECTED

    def __repr__(self) -> str:
        kinds = _show.listed_kinds(_show.array_kinds(self.arrays, rows="n"))
        return f"PrivateData({kinds}; {_HIDDEN})"

    def _repr_html_(self) -> str:
        kinds = _show.array_kinds(self.arrays, rows="n")
        return _show.table("PrivateData", kinds, f"{_HIDDEN.capitalize()}.")


class PublicData(_Examples):
    """Rows that anyone may read: everything learned from them is free.

    Args:
        arrays: a pytree of arrays with one common leading axis.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class ClientData:
    """Users who own rows, each at most `max_examples_per_user` of them; see the two kinds below.

    The rows of all users lie one after the other, user by user, without padding. Make it with
    `from_rows` (one table with a column of users) or `from_users` (one entry per user): both bound
    the contribution *before* anything is sampled. Who has more rows than the bound keeps a random
    subset, decided by `seed` and the user's own name and rows, and by nobody else's.

    Args:
        arrays: a pytree of arrays with one common leading axis, user by user.
        num_examples: how many rows each user owns; zero is allowed.
        ids: the users' names, which need not be known; a run refuses or drops a private user whose
            name is also a public user's.
        max_examples_per_user: the bound, a public constant.
    """

    arrays: PyTree
    num_examples: np.ndarray
    ids: tuple[Hashable, ...] | None
    max_examples_per_user: int

    def __post_init__(self):
        name, remark = self._words()
        _validate.positive_integer(max_examples_per_user=self.max_examples_per_user)
        object.__setattr__(self, "arrays", _as_arrays(name, self.arrays))
        counts = np.asarray(self.num_examples, np.int32)
        object.__setattr__(self, "num_examples", counts)
        if counts.ndim != 1 or counts.size == 0:
            raise ValueError(f"{name} needs at least one user, got counts of shape {counts.shape}.")
        if self.ids is not None:
            if missing := _num_missing(self.ids):
                raise ValueError(
                    f"every user needs a name, got {missing} that are None, NaN or empty. Leave "
                    f"ids out if no name is known. {remark}".rstrip()
                )
            different = len({_spelling(user) for user in self.ids})
            if different != len(counts) or len(self.ids) != len(counts):
                raise ValueError(
                    f"{name} needs one name per user, each once, got {different} different names "
                    f"for {len(counts)} users (3 and '3' are one name). {remark}".rstrip()
                )
        if counts.min() < 0 or counts.max() > self.max_examples_per_user:
            raise ValueError(
                f"every user of {name} may own 0 to {self.max_examples_per_user} rows, got "
                f"{counts.min()} to {counts.max()}. from_rows and from_users choose a subset. "
                f"{remark}".rstrip()
            )
        _check_arrays(name, remark, self.arrays)
        rows = len(jax.tree.leaves(self.arrays)[0])
        if rows != counts.sum():
            raise ValueError(
                f"the users of {name} must own all rows, got {rows} rows and users who own "
                f"{counts.sum()}. {remark}".rstrip()
            )

    def _words(self) -> tuple[str, str]:
        """The type's name and the remark that its error messages carry."""
        raise TypeError(
            "ClientData is either private or public: expected PrivateClients or PublicClients, "
            "got neither."
        )

    @classmethod
    def from_rows(
        cls,
        arrays: PyTree,
        user_ids: Sequence[Hashable] | np.ndarray,
        *,
        users: Iterable[Hashable] | None = None,
        max_examples_per_user: int = 256,
        seed: int = 0,
    ) -> Self:
        """Users from one table and a column that says whose each row is.

        Args:
            arrays: a pytree of arrays with one common leading axis.
            user_ids: the owner of each row.
            users: all users, where some own no rows; by default those of `user_ids`, sorted.
            max_examples_per_user: the bound.
            seed: decides, with the user's name, which rows are kept.
        """
        owners = _uncast(user_ids)
        arrays = _as_arrays(cls.__name__, arrays)
        _validate.positive_integer(max_examples_per_user=max_examples_per_user)
        lengths = {len(leaf) for leaf in jax.tree.leaves(arrays)}
        if owners.ndim != 1 or lengths != {len(owners)}:
            raise ValueError(
                f"user_ids must name the owner of each row, got {owners.shape} names for "
                f"{sorted(lengths)} rows."
            )
        missing = _num_missing(user_ids)
        if missing:
            raise ValueError(
                f"every row must have an owner, got {missing} rows whose user is None, NaN or "
                "empty: taken together they would be one user who is nobody, and a user with some "
                f"of them would count twice. Leave such rows out. {UNPROTECTED}"
            )
        names, owner_numbers = _distinct_names(owners)
        if users is not None:
            listed = list(users)
            known = {_spelling(name): number for number, name in enumerate(listed)}
            if len(known) < len(listed):
                raise ValueError(
                    f"users must list every user once, got {len(listed) - len(known)} names again. "
                    f"{UNPROTECTED}"
                )
            unknown = sum(_spelling(name) not in known for name in names)
            if unknown:
                raise ValueError(
                    f"every row must belong to one of users, got {unknown} owners who are not "
                    f"among them. {UNPROTECTED}"
                )
            numbers = np.array([known[_spelling(name)] for name in names], np.int64)
            owner_numbers, names = numbers[owner_numbers], listed
        order = np.argsort(owner_numbers, kind="stable")
        counts = np.bincount(owner_numbers, minlength=len(names))
        return cls._bounded(
            lambda rows: jax.tree.map(lambda leaf: leaf[order[rows]], arrays),
            counts,
            names,
            tuple(names),
            max_examples_per_user,
            seed,
        )

    @classmethod
    def from_users(
        cls,
        users: Sequence[PyTree],
        *,
        ids: Sequence[Hashable] | None = None,
        dtypes: PyTree | None = None,
        max_examples_per_user: int = 256,
        seed: int = 0,
    ) -> Self:
        """Users from one pytree of arrays each; an empty array is a user without rows.

        Args:
            users: the rows of each user, all of one structure.
            ids: the users' names; without them a user is known by its rows.
            dtypes: the dtypes that the arrays shall have, fixed without a look at private rows: one
                for all arrays, or a tree like a user's with a dtype or an array in each place (for
                private users, `public.arrays` say). Each user's rows are converted by themselves;
                integers that do not fit are refused. Without it all users who have rows must have
                the same dtypes.
            max_examples_per_user: the bound.
            seed: decides, with the user's name or rows, which rows are kept.
        """
        _validate.positive_integer(max_examples_per_user=max_examples_per_user)
        if isinstance(users, Mapping):
            raise TypeError(
                "users must be a list with the rows of one user each, got a mapping. Pass "
                "list(users.values()) and ids=list(users)."
            )
        if len(users) == 0:
            raise ValueError("from_users needs at least one user, got an empty list.")
        users = [_as_arrays(cls.__name__, user) for user in users]
        if dtypes is not None:
            users = [_converted(number, user, dtypes) for number, user in enumerate(users)]
        counts = _rows_of_users(users)
        # Empty arrays are of float64 unless told otherwise; they must not turn labels into floats.
        arrays = jax.tree.map(
            lambda *leaves: np.concatenate([x for x in leaves if len(x)] or leaves), *users
        )
        too_many = counts > max_examples_per_user
        names = None if ids is None else tuple(ids)
        if names is not None and len(names) != len(users):
            raise ValueError(f"ids must name {len(users)} users, got {len(names)} names.")
        return cls._bounded(
            lambda rows: jax.tree.map(lambda leaf: leaf[rows], arrays),
            counts,
            # A place in the list is no name: it depends on who else is in it.
            [_rows_digest(user) if over else "" for user, over in zip(users, too_many, strict=True)]
            if names is None
            else names,
            names,
            max_examples_per_user,
            seed,
        )

    @classmethod
    def _bounded(
        cls,
        take_rows: Callable[[np.ndarray], PyTree],
        counts: np.ndarray,
        names: Sequence[Hashable],
        ids: tuple[Hashable, ...] | None,
        bound: int,
        seed: int,
    ) -> Self:
        starts = np.concatenate([[0], np.cumsum(counts)])
        keep = np.ones(int(starts[-1]), bool)
        for user in np.flatnonzero(counts > bound):
            rng = np.random.default_rng([seed, *_name_entropy(names[int(user)])])
            mask = np.zeros(counts[user], bool)
            mask[rng.choice(counts[user], bound, replace=False)] = True
            keep[starts[user] : starts[user + 1]] = mask
        return cls(take_rows(np.flatnonzero(keep)), np.minimum(counts, bound), ids, bound)

    def __len__(self) -> int:
        """The number of users."""
        return len(self.num_examples)

    @property
    def nbytes(self) -> int:
        """Memory that the arrays take."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.arrays))

    @property
    def starts(self) -> np.ndarray:
        """Where each user's rows begin."""
        return np.concatenate([[0], np.cumsum(self.num_examples)[:-1]]).astype(np.int32)

    def user(self, number: int) -> PyTree:
        """The rows of one user, without padding."""
        start = self.starts[number]
        stop = start + self.num_examples[number]
        return jax.tree.map(lambda leaf: leaf[start:stop], self.arrays)

    def take(self, users: Sequence[int] | np.ndarray) -> Self:
        """Some of the users, in the given order."""
        users = np.asarray(users, np.int64)
        parts = [np.arange(s, s + c) for s, c in zip(self.starts, self.num_examples, strict=True)]
        rows = np.concatenate([parts[user] for user in users]) if len(users) else np.zeros(0, int)
        return type(self)(
            jax.tree.map(lambda leaf: leaf[rows], self.arrays),
            self.num_examples[users],
            None if self.ids is None else tuple(self.ids[user] for user in users),
            self.max_examples_per_user,
        )


class PrivateClients(ClientData):
    """Users whose privacy is protected: a user, with all of its rows, is one record.

    Rows are not looked at: a user whose data leads to a NaN contributes nothing.
    """

    def _words(self) -> tuple[str, str]:
        return "PrivateClients", UNPROTECTED

    def __repr__(self) -> str:
        kinds = _show.listed_kinds(_show.array_kinds(self.arrays, rows="n"))
        return f"PrivateClients({kinds}, at most {self.max_examples_per_user} of a user; {_HIDDEN})"

    def _repr_html_(self) -> str:
        bound = ("rows of a user", f"at most {self.max_examples_per_user}")
        kinds = _show.array_kinds(self.arrays, rows="n")
        return _show.table("PrivateClients", [*kinds, bound], f"{_HIDDEN.capitalize()}.")


class PublicClients(ClientData):
    """Users whose rows anyone may read: everything learned from them is free."""

    def __post_init__(self):
        super().__post_init__()
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.arrays):
            _refuse_non_finite("PublicClients", "", _path(path), leaf)

    def _words(self) -> tuple[str, str]:
        return "PublicClients", ""

    def __repr__(self) -> str:
        kinds = _show.listed_kinds(_show.array_kinds(self.arrays))
        return f"PublicClients({len(self)} users, {kinds})"

    def _repr_html_(self) -> str:
        return _show.table(f"PublicClients: {len(self)} users", _show.array_kinds(self.arrays))

    @property
    def examples(self) -> PublicData:
        """All rows, without regard to whose they are."""
        return PublicData(self.arrays)


def _rows_of_users(users: Sequence[PyTree]) -> np.ndarray:
    """How many rows each user owns, after a check that all of them have rows of one kind.

    A user with unequally long arrays would shift the rows of those who come after it. One array
    holds the rows of all, so that a user with uint16 among users with uint8 would change everyone's
    arithmetic: no user would contribute from its own rows alone.
    """
    structure = jax.tree.structure(users[0])
    shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(users[0])]
    counts: list[int] = []
    dtypes: list[str] | None = None
    for number, user in enumerate(users):
        leaves = jax.tree.leaves(user)
        if jax.tree.structure(user) != structure or not leaves:
            raise ValueError(
                f"all users must have arrays of the same names, got {structure} for user 0 and "
                f"{jax.tree.structure(user)} for user {number} of the list. {UNPROTECTED}"
            )
        if any(leaf.ndim == 0 for leaf in leaves):
            raise ValueError(
                f"a user's rows must be arrays with a leading row axis, got a scalar for user "
                f"{number} of the list. Turn lists into arrays: np.asarray(rows). {UNPROTECTED}"
            )
        if [leaf.shape[1:] for leaf in leaves] != shapes:
            raise ValueError(
                f"rows of all users must have the same shape, got {shapes} for user 0 and "
                f"{[leaf.shape[1:] for leaf in leaves]} for user {number} of the list. A user "
                f"without rows has arrays of length zero, np.zeros((0, ...)). {UNPROTECTED}"
            )
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) > 1:
            raise ValueError(
                f"all arrays of a user must have the same number of rows, got {sorted(lengths)} "
                f"for user {number} of the list. {UNPROTECTED}"
            )
        counts.append(lengths.pop())
        if counts[-1] == 0:
            continue
        own = [leaf.dtype.name for leaf in leaves]
        dtypes = own if dtypes is None else dtypes
        if own != dtypes:
            raise TypeError(
                f"arrays of all users must have the same dtypes, got {dtypes} and, for user "
                f"{number} of the list, {own}: put together, they would change the numbers of all "
                "users. Declare the dtypes, for example dtypes=np.float32 or dtypes={'x': "
                f"np.uint8, 'y': np.int32}}, and each user is converted alone. {UNPROTECTED}"
            )
    return np.array(counts)


def _converted(number: int, user: PyTree, dtypes: PyTree) -> PyTree:
    """A user's arrays in the declared dtypes, decided by that user's own rows and nobody else's."""
    leaves, structure = jax.tree.flatten(user)
    declared = jax.tree.leaves(dtypes)
    if len(declared) == 1:
        declared = declared * len(leaves)
    elif jax.tree.structure(dtypes) != structure:
        raise ValueError(
            f"dtypes must be one dtype or a tree like a user's, got {jax.tree.structure(dtypes)} "
            f"and {structure} for user {number} of the list. {UNPROTECTED}"
        )
    # np.float32.dtype is a descriptor, an array's a dtype.
    wanted = [
        np.dtype(leaf if isinstance(leaf, type) else getattr(leaf, "dtype", leaf))
        for leaf in declared
    ]
    return jax.tree.unflatten(
        structure, [_convert(number, *pair) for pair in zip(leaves, wanted, strict=True)]
    )


def _convert(number: int, leaf: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rounds to a float of any width; every other conversion must keep each number as it is."""
    if leaf.dtype == dtype:
        return leaf
    is_real = np.isrealobj(leaf) and _is_numeric(leaf.dtype)
    with np.errstate(all="ignore"):
        converted = leaf.astype(dtype) if is_real or not len(leaf) else None
    if converted is None or not (
        jnp.issubdtype(dtype, np.inexact) or np.array_equal(converted, leaf)
    ):
        raise ValueError(
            f"every user's rows must fit the declared dtypes, got {leaf.dtype.name} that cannot "
            f"become {dtype.name} for user {number} of the list. Declare a wider dtype for all "
            f"users, or correct that user's rows. {UNPROTECTED}"
        )
    return converted


def _uncast(names: Sequence[Hashable] | np.ndarray) -> np.ndarray:
    """Names in an array that leaves each as it is; NumPy makes text of all if one is text."""
    if isinstance(names, list | tuple):
        return np.fromiter(names, object, len(names))
    return np.asarray(names)


def _distinct_names(owners: np.ndarray) -> tuple[list[Hashable], np.ndarray]:
    """The different names in order, and for each row which of them it has.

    The order compares two names by their spelling alone: a name of another type among the others
    moves nobody else.
    """
    names: list[Hashable]
    if owners.dtype == object:
        numbers: dict[str, int] = {}
        which = np.array([numbers.setdefault(_spelling(n), len(numbers)) for n in owners], np.intp)
        first = np.full(len(numbers), len(owners))
        np.minimum.at(first, which, np.arange(len(owners)))
        names = owners[first].tolist()
    else:
        found, which = np.unique(owners, return_inverse=True)
        names = found.tolist()
    order = sorted(range(len(names)), key=lambda number: _name_order(names[number]))
    place = np.empty(len(names), np.intp)
    place[order] = np.arange(len(names))
    return [names[number] for number in order], place[which]


def _name_order(name: Hashable) -> tuple[float, str]:
    """Numbers by size, before text by the alphabet."""
    text = _spelling(name)
    try:
        number = float(text)
    except ValueError:
        return math.inf, text
    return (number if math.isfinite(number) else math.inf), text


def _num_missing(names: Iterable[Hashable] | np.ndarray) -> int:
    """How many names are None, NaN or empty; among strings NumPy would make a name of the first."""
    if getattr(getattr(names, "dtype", None), "kind", "O") not in "fOSU":
        return 0
    return sum(
        name is None or name != name or (isinstance(name, str | bytes) and not name.strip())
        for name in names
    )


def _spelling(name: Hashable) -> str:
    """A name as text: of two files, one may hold 3 and the others '3', 3.0 or b'3'."""
    if isinstance(name, bytes):
        return name.decode(errors="backslashreplace")
    if isinstance(name, float | np.floating) and name.is_integer():
        return str(int(name))
    return str(name)


def _name_entropy(name: Hashable) -> list[int]:
    """Four numbers that a user's name decides, the same on every machine."""
    digest = hashlib.blake2b(_spelling(name).encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u4").tolist()


def _rows_digest(user: PyTree) -> str:
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(user)]
    return hashlib.blake2b(b"".join(leaf.tobytes() for leaf in leaves), digest_size=16).hexdigest()


def require_private_clients(data: object, name: str = "private") -> None:
    """Raises a TypeError unless `data` is `PrivateClients`."""
    _validate.instance_of(
        PrivateClients,
        f"Wrap the sensitive users: {name}=PrivateClients.from_rows(arrays, user_ids).",
        **{name: data},
    )


def excluded_users(
    private: PrivateClients, public: PublicClients, overlap: Overlap = Overlap.DROP
) -> np.ndarray:
    """A mask of the private users whose name is also a public user's, who contribute nothing.

    As with `excluded_rows`, such a user is masked and not removed: n stays what it was.

    Args:
        private: the private users.
        public: the public users.
        overlap: mask them (`DROP`), with a warning that goes to the operator only, or raise.

    Returns:
        A boolean array of length `len(private)`; all False where either side has no names.
    """
    mask = np.zeros(len(private), bool)
    if private.ids is None or public.ids is None:
        return mask
    names = {_spelling(name) for name in public.ids}
    mask[:] = [_spelling(name) in names for name in private.ids]
    _announce(mask, "private users are also public users", overlap)
    return mask


def _as_arrays(name: str, tree: PyTree) -> PyTree:
    """The tree with NumPy arrays as its leaves; refuses a leaf that is a data set of its own kind.

    NumPy reads anything with `__getitem__` item by item until an IndexError, which a data set need
    never raise.
    """

    def as_array(path: tuple, leaf: object) -> np.ndarray:
        known = ("__array__", "__array_interface__", "__dlpack__")
        plain = bool | int | float | complex | str | bytes | range | memoryview | array.array
        if isinstance(leaf, plain) or any(hasattr(leaf, attribute) for attribute in known):
            return np.asarray(leaf)
        advice = "Collect its examples: np.stack([dataset[i] for i in range(len(dataset))]), one "
        advice += "array for each part of an example."
        if hasattr(leaf, "tensors"):
            advice = f"Pass its tensors: {name}(tuple(np.asarray(t) for t in dataset.tensors))."
        raise TypeError(
            f"{name} takes arrays, or a tree of them, got {type(leaf).__name__} at {_path(path)}. "
            f"{advice}"
        )

    return jax.tree_util.tree_map_with_path(as_array, tree)


def _check_arrays(name: str, remark: str, arrays: PyTree) -> None:
    """A tree of numbers whose leaves share one leading axis."""
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
        if not _is_numeric(leaf.dtype):
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
        raise ValueError(f"{name} is empty: expected at least one row.")


def _is_numeric(dtype: np.dtype) -> bool:
    """Not so a duration, which NumPy counts among the integers: its unit follows from all rows."""
    return dtype.kind != "m" and (jnp.issubdtype(dtype, np.number) or dtype.kind == "b")


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


def have_same_structure(private: PrivateData, public: PublicData) -> bool:
    """Whether both hold the same tree of arrays, equal in dtype and trailing axes."""
    return _structure(private) == _structure(public)


def _structure(data: PrivateData | PublicData) -> PyTree:
    return jax.tree.map(lambda leaf: f"{leaf.dtype}[n{_dims(leaf)}]", data.arrays)


def require_same_structure(private: PrivateData, public: PublicData) -> None:
    """Raises unless both hold the same tree of arrays, equal in dtype and trailing axes."""
    if not have_same_structure(private, public):
        raise ValueError(
            "private and public rows must have the same structure, got private "
            f"{_structure(private)} and public {_structure(public)}. Bring both into the same "
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

    Raises:
        ValueError: see `refuse_private_rows`, or because of `overlap`.
    """
    require_same_structure(private, public)
    refuse_private_rows(private, public)
    public_rows = set(_row_bytes(public))
    mask = np.fromiter((row in public_rows for row in _row_bytes(private)), bool, len(private))
    _announce(mask, "private rows equal a public row", overlap)
    return mask


def refuse_private_rows(private: PrivateData, other: PublicData, what: str = "public rows") -> None:
    """Refuses rows that are said to need no protection and are mostly private rows.

    Private rows do not become public by being named so. Rows of few values equal each other by
    chance, a public and a private one as often as two private ones: where more than half as many
    private rows have an equal among themselves, only the very same rows, in any order, are refused.

    Args:
        private: the private rows.
        other: rows of the same structure that are to be used without noise.
        what: what they are called in the message.

    Raises:
        ValueError: if most of them equal a private row. The message is for the operator only.
    """
    others = list(_row_bytes(other))
    known = set(others)
    found = {row for row in _row_bytes(private) if row in known}
    shared = sum(row in found for row in others)
    if 2 * shared <= len(others):
        return
    # Digests, since there may be many private rows.
    digest = lambda row: hashlib.blake2b(row, digest_size=16).digest()  # noqa: E731
    counts = collections.Counter(map(digest, _row_bytes(private)))
    repeated = sum(count for count in counts.values() if count > 1) / len(private)
    if shared / len(others) > 2 * repeated or counts == collections.Counter(map(digest, others)):
        raise ValueError(
            f"{what} must be other rows than the private ones, got {shared} of {len(others)} "
            f"{what} that equal a private row. Private rows do not become public by being named "
            f"so; if anybody may know these, leave them out of the private rows. {UNPROTECTED}"
        )


def _announce(excluded: np.ndarray, what: str, overlap: Overlap) -> None:
    """Tells the operator of records that were found on both sides, or refuses them."""
    if not excluded.any():
        return
    message = f"{int(excluded.sum())} {what}"
    if overlap is Overlap.REFUSE:
        raise ValueError(
            f"{message}, and overlap='refuse' was asked for. Remove them from one of the two "
            f"sides or pass overlap=Overlap.DROP. {UNPROTECTED}"
        )
    warn(
        f"{UNPROTECTED} {message}; they contribute nothing to training.",
        UnprotectedWarning,
    )


def _row_bytes(data: PrivateData | PublicData):
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(data.arrays)]
    for row in range(len(data)):
        yield b"".join(leaf[row].tobytes() for leaf in leaves)


def split_rows(
    arrays: PyTree, *, public_fraction: float, seed: int
) -> tuple[PrivateData, PublicData]:
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
    arrays = _as_arrays("split", arrays)
    rows = len(jax.tree.leaves(arrays)[0])
    order = np.random.default_rng(seed).permutation(rows)
    num_public = max(1, round(public_fraction * rows))
    chosen, rest = np.sort(order[:num_public]), np.sort(order[num_public:])
    return (
        PrivateData(jax.tree.map(lambda leaf: leaf[rest], arrays)),
        PublicData(jax.tree.map(lambda leaf: leaf[chosen], arrays)),
    )
