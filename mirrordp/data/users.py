"""Users who own rows, private and public as two types, where the unit of privacy is the user.

What one user's rows or name are must not decide how those of another user are read, ordered or
chosen: every check and conversion here treats each user alone.
"""

import collections
import dataclasses
import decimal
import hashlib
import itertools
import math
import secrets
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _show, _validate
from mirrordp._warn import warn
from mirrordp.data import sources
from mirrordp.data.rows import (
    HIDDEN,
    UNPROTECTED,
    Gather,
    Overlap,
    PublicData,
    UnprotectedWarning,
    announce_overlap,
    as_arrays,
    check_arrays,
    is_numeric,
    refuse_non_finite,
)
from mirrordp.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class ClientData:
    """Users who each own at most `max_examples_per_user` rows: `PrivateClients` or `PublicClients`.

    The rows of all users are stored one after the other, user by user, without padding. Make an
    object with `from_rows` (one table with a column of users) or `from_users` (one entry per user):
    both bound the contribution *before* anything is sampled. A user who has more rows than the
    bound keeps a random subset, which is decided by `seed` and by this user's own name and rows.

    Args:
        arrays: a pytree of arrays with one common leading axis, user by user. Private rows that are
            memory maps or sources (`mirrordp.data.sources`) stay on disk.
        num_examples: the number of rows that each user owns, which may be zero.
        ids: the users' names, or None if they are not known. A run refuses or drops a private user
            whose name is also a public user's, and a run of several processes refuses users of whom
            two processes have rows. Without names, the caller vouches that there are none.
        max_examples_per_user: the bound, a public constant.
    """

    arrays: PyTree
    num_examples: np.ndarray
    ids: tuple[Hashable, ...] | None
    max_examples_per_user: int

    def __post_init__(self):
        name, remark = self._words()
        _validate.make_plain(self)
        _validate.positive_integer(max_examples_per_user=self.max_examples_per_user)
        object.__setattr__(self, "arrays", as_arrays(name, self.arrays))
        counts = np.array(self.num_examples)
        if counts.dtype.kind not in "iu" or (counts.size and counts.max() >= 2**31):
            raise ValueError(
                f"{name} needs the number of rows of each user as whole numbers, got "
                f"{counts.dtype}. {remark}".rstrip()
            )
        counts = counts.astype(np.int32)
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
        check_arrays(name, remark, self.arrays)
        rows = len(jax.tree.leaves(self.arrays)[0])
        if rows != counts.sum():
            raise ValueError(
                f"the users of {name} must own all rows, got {rows} rows and users who own "
                f"{counts.sum()}. {remark}".rstrip()
            )

    def _words(self) -> tuple[str, str]:
        """Returns the type's name and the remark that its error messages carry."""
        raise TypeError(
            "users are either private or public: expected PrivateClients or PublicClients, got "
            "ClientData. Use one of the two."
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
        """Makes users from one table and a column that names the owner of each row.

        Rows on disk stay there, in their own order; a number for each row in memory says which row
        of which user it is. Reading is fastest if the rows of a user lie side by side.

        Args:
            arrays: a pytree of arrays with one common leading axis.
            user_ids: the owner of each row.
            users: all users, needed if some own no rows; by default those of `user_ids`, sorted.
            max_examples_per_user: the bound.
            seed: decides, together with a user's name, which of its rows are kept.
        """
        owners = _uncast(user_ids)
        arrays = as_arrays(cls.__name__, arrays)
        _validate.positive_integer(max_examples_per_user=max_examples_per_user)
        max_examples_per_user = int(max_examples_per_user)
        lengths = {len(leaf) for leaf in jax.tree.leaves(arrays)}
        if owners.ndim != 1 or lengths != {len(owners)}:
            raise ValueError(
                f"user_ids must name the owner of each row, got {owners.shape} names for "
                f"{sorted(lengths)} rows. Pass one name per row."
            )
        _refuse_missing(_num_missing(user_ids))
        names, owner_numbers = _distinct_names(owners)
        if users is not None:
            listed = list(users)
            known = {_spelling(name): number for number, name in enumerate(listed)}
            if len(known) < len(listed):
                raise ValueError(
                    f"users must list every user once, got {len(listed) - len(known)} names more "
                    f"than once. {UNPROTECTED}"
                )
            unknown = sum(_spelling(name) not in known for name in names)
            if unknown:
                raise ValueError(
                    f"every row must belong to one of users, got {unknown} owners who are not "
                    f"among them. Add them, or leave out their rows. {UNPROTECTED}"
                )
            numbers = np.array([known[_spelling(name)] for name in names], np.int64)
            owner_numbers, names = numbers[owner_numbers], listed
        order = np.argsort(owner_numbers, kind="stable")
        counts = np.bincount(owner_numbers, minlength=len(names))
        return cls._bounded(
            lambda rows: sources.pick_rows(arrays, order[rows]),
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
        """Makes users from one pytree of arrays each; an empty array is a user without rows.

        Args:
            users: the rows of each user, all of one structure.
            ids: the users' names; without them a user is known by its rows.
            dtypes: the dtypes that the arrays shall have, fixed without looking at private rows:
                one for all arrays, or a tree like a user's with a dtype or an array in each place
                (`public.arrays`, for example). Each user's rows are converted by themselves;
                integers that do not fit are refused. Without it, all users who have rows must have
                the same dtypes.
            max_examples_per_user: the bound.
            seed: decides, together with a user's name or rows, which of its rows are kept.
        """
        _validate.positive_integer(max_examples_per_user=max_examples_per_user)
        max_examples_per_user = int(max_examples_per_user)
        if isinstance(users, Mapping):
            raise TypeError(
                "users must be a list with the rows of one user each, got a mapping. Pass "
                "list(users.values()) and ids=list(users)."
            )
        if len(users) == 0:
            raise ValueError("from_users needs at least one user, got an empty list.")
        users = [as_arrays(cls.__name__, user) for user in users]
        if dtypes is not None:
            users = [_converted(number, user, dtypes) for number, user in enumerate(users)]
        counts = _rows_of_users(users)
        # Empty arrays have dtype float64 by default; they must not turn labels into floats.
        arrays = jax.tree.map(
            lambda *leaves: np.concatenate([x for x in leaves if len(x)] or leaves), *users
        )
        too_many = counts > max_examples_per_user
        names = None if ids is None else tuple(ids)
        if names is not None and len(names) != len(users):
            raise ValueError(f"ids must name all {len(users)} users, got {len(names)} names.")
        return cls._bounded(
            lambda rows: jax.tree.map(lambda leaf: leaf[rows], arrays),
            counts,
            # The place in the list cannot serve as a name: it depends on the other users.
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
        """The memory that the arrays take, in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.arrays))

    @property
    def starts(self) -> np.ndarray:
        """The index of each user's first row."""
        ends = np.cumsum(self.num_examples, dtype=np.int64)
        return np.concatenate([[0], ends[:-1]]).astype(np.int32)

    def user(self, number: int) -> PyTree:
        """Returns the rows of one user, without padding."""
        start = self.starts[number]
        stop = start + self.num_examples[number]
        return sources.read_rows(self.arrays, np.arange(start, stop))

    def take(self, users: Sequence[int] | np.ndarray) -> Self:
        """Returns some of the users, in the given order."""
        users = np.asarray(users, np.int64)
        spans = zip(self.starts[users].tolist(), self.num_examples[users].tolist(), strict=True)
        parts = [np.arange(start, start + count) for start, count in spans]
        return type(self)(
            sources.pick_rows(self.arrays, np.concatenate([np.zeros(0, np.int64), *parts])),
            self.num_examples[users],
            None if self.ids is None else tuple(self.ids[user] for user in users),
            self.max_examples_per_user,
        )


class PrivateClients(ClientData):
    """Users whose privacy is protected: a user, with all of its rows, is one record.

    Values are not checked here: a user whose data leads to a NaN contributes nothing.
    """

    def _words(self) -> tuple[str, str]:
        return "PrivateClients", UNPROTECTED

    def __repr__(self) -> str:
        kinds = _show.listed_kinds(_show.array_kinds(self.arrays, rows="n"))
        return f"PrivateClients({kinds}, at most {self.max_examples_per_user} of a user; {HIDDEN})"

    def _repr_html_(self) -> str:
        bound = ("rows of a user", f"at most {self.max_examples_per_user}")
        kinds = _show.array_kinds(self.arrays, rows="n")
        return _show.table("PrivateClients", [*kinds, bound], f"{HIDDEN.capitalize()}.")


class PublicClients(ClientData):
    """Users whose rows anyone may read: everything learned from them is free."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "arrays", sources.in_memory(self.arrays))
        refuse_non_finite("PublicClients", "", self.arrays)

    def _words(self) -> tuple[str, str]:
        return "PublicClients", ""

    def __repr__(self) -> str:
        kinds = _show.listed_kinds(_show.array_kinds(self.arrays))
        return f"PublicClients({len(self)} users, {kinds})"

    def _repr_html_(self) -> str:
        return _show.table(f"PublicClients: {len(self)} users", _show.array_kinds(self.arrays))

    @property
    def examples(self) -> PublicData:
        """All rows, regardless of their owners."""
        return PublicData(self.arrays)


_UNNAMED = frozenset({"none", "<na>", "nat", "nan", "na", "n/a", "null", "?"})
"""Text that programs write for a missing name."""


class RowOwners:
    """The owners of rows that come in batches; see `one_row_per_user`."""

    def __init__(self):
        self._numbers: dict[str, int] = {}
        self._owners: list[np.ndarray] = []
        self.missing = 0

    def append(self, user_ids: Sequence[Hashable] | np.ndarray) -> None:
        """Adds the owners of further rows."""
        self.missing += _num_missing(user_ids)
        names, which = _distinct_names(_uncast(user_ids))
        numbers = [self._numbers.setdefault(_spelling(n), len(self._numbers)) for n in names]
        self._owners.append(np.array(numbers, np.int32)[which])

    def __eq__(self, other: object) -> bool:
        """Whether the same users own the same rows."""
        if not isinstance(other, RowOwners):
            return NotImplemented
        mine, theirs = (np.concatenate(owners or [[]]) for owners in (self._owners, other._owners))
        return self._numbers == other._numbers and np.array_equal(mine, theirs)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def one_row_each(self, usable: np.ndarray | None = None) -> np.ndarray:
        """Returns the number of one row of each user, in the order of their names."""
        _refuse_missing(self.missing)
        keys = sorted(map(_name_order, self._numbers))
        # Longer numbers may be the same float and different names.
        alike = sum(
            one[0] == other[0] and abs(one[0]) < 2**53 for one, other in itertools.pairwise(keys)
        )
        if alike:
            warn(
                f"{UNPROTECTED} {alike} names are the same number as another user's name, written "
                "in another way, such as 7 and 7.0 or 07. They count as different users. If they "
                "are not, write them in one way: anyone with two names is protected less.",
                UnprotectedWarning,
            )
        if unnamed := sorted(_UNNAMED & {name.casefold() for name in self._numbers}):
            warn(
                f"{UNPROTECTED} there are users named {' and '.join(map(repr, unnamed))} (in upper "
                "or lower case). If programs wrote that for missing names, these rows are those of "
                "several people, who are protected less. Leave such rows out.",
                UnprotectedWarning,
            )
        names = [name for _, name in keys]
        place = np.empty(len(names), np.int32)
        place[[self._numbers[name] for name in names]] = np.arange(len(names))
        owners = place[np.concatenate(self._owners)]
        rows = np.arange(len(owners))
        if usable is not None:
            has_usable = np.zeros(len(names), bool)
            has_usable[owners[usable]] = True
            rows = np.flatnonzero(usable | ~has_usable[owners])
        rows = rows[np.argsort(owners[rows], kind="stable")]
        counts = np.bincount(owners[rows], minlength=len(names))
        chosen = [_hashed(n) % count for n, count in zip(names, counts.tolist(), strict=True)]
        return rows[np.cumsum(counts) - counts + np.array(chosen, np.int64)]


def one_row_per_user(
    user_ids: Sequence[Hashable] | np.ndarray, usable: Sequence[bool] | np.ndarray | None = None
) -> np.ndarray:
    """Chooses one row of each user, for models that protect rows to protect users.

    Sensitive are the rows of a user: what they hold, how many there are, and where they are in the
    table. Of the k rows that a user owns, in their order, the one with the number SHA-256(name)
    mod k is chosen, which depends on nobody else. The chosen rows are in the order of the names, so
    that the place of a row does not depend on anybody's rows. Whatever rows one of n users has, n
    rows are chosen, and at most one of them changes, at its place. A sum over them therefore has
    the sensitivity of one row, and a guarantee for every row is a guarantee for every user.

    The number of users counts as public (zero-out adjacency). A user who joins or leaves changes
    it, moves the chosen rows of others and changes none of them.

        rows = one_row_per_user(visits["patient"])  # positions: use .iloc with pandas
        model = PrivateLinearRegression(unit="user").fit(x.iloc[rows], y.iloc[rows], ...)

    >>> one_row_per_user(["Ann", "Bob", "Ann", "Cy", " Ann"])
    array([4, 1, 3])

    Args:
        user_ids: the owner of each row. Names are compared as in `PrivateClients.from_rows`: 7,
            7.0, "7" and " 7" are one, "7.0" is another. A row without an owner is refused.
        usable: a mask of the rows to choose among where a user has any, such as those with a
            target. Whether a row is usable must depend on that row and public values alone.

    Returns:
        The numbers of the rows, one for each user, in the order of their names.
    """
    shape = _uncast(user_ids).shape
    mask = None if usable is None else np.asarray(usable)
    if len(shape) != 1 or (mask is not None and (mask.shape != shape or mask.dtype != bool)):
        raise ValueError(
            f"user_ids must name the owner of each row, and usable hold a boolean for each, got "
            f"names of shape {shape} and {'none' if mask is None else (mask.dtype, mask.shape)}. "
            "Pass one name per row."
        )
    owners = RowOwners()
    owners.append(user_ids)
    return owners.one_row_each(mask)


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest())


def _refuse_missing(count: int) -> None:
    """Raises a ValueError if rows lack an owner."""
    if count:
        raise ValueError(
            f"every row must have an owner, got {count} rows whose user is None, NaN or "
            "empty. Together they would count as one user, and whoever really owns some of "
            f"them would count twice. Leave such rows out. {UNPROTECTED}"
        )


def _rows_of_users(users: Sequence[PyTree]) -> np.ndarray:
    """Returns how many rows each user owns, after checking that all have rows of one kind.

    A user whose arrays differ in length would shift the rows of the users after it. One array holds
    the rows of all, so that a user with uint16 among users with uint8 would change the arithmetic
    of everyone, and contributions would no longer depend on the own rows of a user alone.
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
    """Returns a user's arrays in the declared dtypes; no other user's rows take part."""
    leaves, structure = jax.tree.flatten(user)
    declared = jax.tree.leaves(dtypes)
    if len(declared) == 1:
        declared = declared * len(leaves)
    elif jax.tree.structure(dtypes) != structure:
        raise ValueError(
            f"dtypes must be one dtype or a tree like a user's, got {jax.tree.structure(dtypes)} "
            f"and {structure} for user {number} of the list. {UNPROTECTED}"
        )
    # The attribute np.float32.dtype is a descriptor; only that of an array is a dtype.
    wanted = [
        np.dtype(leaf if isinstance(leaf, type) else getattr(leaf, "dtype", leaf))
        for leaf in declared
    ]
    return jax.tree.unflatten(
        structure, [_convert(number, *pair) for pair in zip(leaves, wanted, strict=True)]
    )


def _convert(number: int, leaf: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rounds to a float of any width; every other conversion must leave each number unchanged."""
    if leaf.dtype == dtype:
        return leaf
    is_real = np.isrealobj(leaf) and is_numeric(leaf.dtype)
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
    """Returns names as an array without converting them; NumPy turns all into text if one is."""
    if isinstance(names, list | tuple):
        return np.fromiter(names, object, len(names))
    return np.asarray(names)


def _distinct_names(owners: np.ndarray) -> tuple[list[Hashable], np.ndarray]:
    """Returns the distinct names in order, and for each row the index of its name.

    The order compares two names by their spelling alone, so that a name of another type does not
    move the other users.
    """
    rows = None
    if owners.dtype != object:
        # Names of one type: each of them is looked at once.
        owners, rows = np.unique(owners, return_inverse=True)
        owners = _uncast(owners.tolist())
    numbers: dict[str, int] = {}
    which = np.array([numbers.setdefault(_spelling(n), len(numbers)) for n in owners], np.intp)
    first = np.full(len(numbers), len(owners))
    np.minimum.at(first, which, np.arange(len(owners)))
    names: list[Hashable] = owners[first].tolist()
    if rows is not None:
        which = which[rows]
    order = sorted(range(len(names)), key=lambda number: _name_order(names[number]))
    place = np.empty(len(names), np.intp)
    place[order] = np.arange(len(names))
    return [names[number] for number in order], place[which]


def _name_order(name: Hashable) -> tuple[float, str]:
    """Returns a sort key: numbers by size, then text in alphabetical order."""
    text = _spelling(name)
    try:
        number = float(text)
    except ValueError:
        return math.inf, text
    return (number if math.isfinite(number) else math.inf), text


def _num_missing(names: Sequence[Hashable] | np.ndarray) -> int:
    """Counts names that are masked, None, NaN, NaT or empty."""
    if isinstance(names, np.ma.MaskedArray):
        return int(np.ma.count_masked(names)) + _num_missing(names.compressed())
    names = _uncast(names)
    if names.dtype.kind in "biu":
        return 0
    if names.dtype.kind in "fcmM":
        return int(np.count_nonzero(names != names))
    return sum(map(_is_missing, names))


def _is_missing(name: Hashable) -> bool:
    if isinstance(name, tuple):
        return any(map(_is_missing, name))
    if name is None or isinstance(name, str | bytes):
        return not (name and name.strip())
    try:
        return bool(name != name)
    except (TypeError, ValueError):  # pandas.NA compares as itself.
        return True


def _spelling(name: Hashable) -> str:
    """Returns a name as text: one file may hold 3 where another holds '3', 3.0, b'3' or ' 3'."""
    if isinstance(name, tuple):
        return str(tuple(map(_spelling, name)))
    if isinstance(name, bytes):
        name = name.decode(errors="backslashreplace")
    if isinstance(name, decimal.Decimal):
        # 7.0 beside 7.25 is written with two digits by some programs: one name would change others.
        name = _plain(name)
    if isinstance(name, float | np.floating) and name.is_integer():
        name = int(name)
    return unicodedata.normalize("NFC", str(name).strip())


def _plain(number: decimal.Decimal) -> str:
    """Returns all digits of a number, without zeros at the end."""
    text = format(number, "f") if number else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _name_entropy(name: Hashable) -> list[int]:
    """Returns four numbers that follow from a user's name, the same on every machine."""
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


def refuse_shared_users(private: PrivateClients, gather: Gather) -> None:
    """Refuses users whose name several processes have: each adds up to C to the sum there.

    Users without names are not compared.

    Args:
        private: the users of this process.
        gather: gives the values of all processes, which all make this call.

    Raises:
        ValueError: if there are any, for the operator only.
    """
    # Names shall not stand in messages, nor hashes that confirm a guess of a name later.
    key = bytes.fromhex(gather(secrets.token_hex(32))[0])
    spelled = map(_spelling, private.ids or ())
    own = [hashlib.blake2b(name.encode(), key=key, digest_size=16).hexdigest() for name in spelled]
    counts = collections.Counter(itertools.chain.from_iterable(gather(own)))
    shared = sum(count > 1 for count in counts.values())
    if shared:
        raise ValueError(
            f"a user belongs to one process with all of its rows, got {shared} whose name several "
            f"processes have. Bring all rows of a user into one process. {UNPROTECTED}"
        )


def excluded_users(
    private: PrivateClients, public: PublicClients, overlap: Overlap = Overlap.DROP
) -> np.ndarray:
    """Returns a mask of the private users whose name is also a public user's.

    As with `excluded_rows`, such a user is masked, contributes nothing, and still counts in n.

    Args:
        private: the private users.
        public: the public users.
        overlap: whether to mask them (`DROP`), with a warning for the operator only, or to raise.

    Returns:
        A boolean array of length `len(private)`, all False if either side has no names.
    """
    mask = np.zeros(len(private), bool)
    if private.ids is None or public.ids is None:
        return mask
    names = {_spelling(name) for name in public.ids}
    mask[:] = [_spelling(name) in names for name in private.ids]
    announce_overlap(mask, "private users are also public users", overlap)
    return mask
