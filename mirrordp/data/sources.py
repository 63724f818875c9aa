"""Rows that stay on disk: memory maps, Parquet, HDF5, data sets of other libraries, and your own.

A *source* has a length and gives rows by their numbers (`RowSource`). In a tree of arrays it stands
for one `Column` per array of a row: an object with the shape and dtype of an array that holds no
rows. Everything that looks at rows goes through two functions: `read_rows` reads some of them, in
the order of the disk and with a few threads, and `chunks` goes over all of them part by part.

Rows must not change while they are used: what was checked, compared with public rows and
fingerprinted would no longer be what is trained on.
"""

import bisect
import contextlib
import copy
import functools
import importlib
import math
import mmap
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from mirrordp.types import PyTree

UNPROTECTED = "[not covered by the privacy guarantee; for the operator only]"

CHUNK = 2**25
"""How many bytes of rows `chunks` holds at a time."""
_BLOCK_NUMBERS = 2**20
_KEPT_BLOCKS = 2**28
_THREADS = 4
# The kernel maps up to 16 pages around a row that it reads: this keeps it to 64 MiB per thread.
_PART = 2**10


@runtime_checkable
class RowSource(Protocol):
    """Anything that has a number of rows and gives rows by their numbers.

    It is called by one thread at a time, though not always by the same one, and what it returns is
    copied before the next call.
    """

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def rows(self, numbers: np.ndarray) -> PyTree:
        """Returns the rows of these numbers, in this order: a tree of arrays, rows first.

        All rows have the same structure, shapes and dtypes. A number stands for the same row
        whenever it is asked for.
        """
        ...


class Column:
    """One array of a source: a shape and a dtype, whose rows `read_rows` and `chunks` read."""

    def __init__(self, opened: "_Opened", place: int):
        self._opened, self._place = opened, place
        shape, self.dtype = opened.kinds[place]
        self.shape = (opened.length, *shape)
        self.ndim = len(self.shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "expected rows in memory here, got rows on disk, which are read part by part. Use "
            "mirrordp.data.read_rows(arrays, numbers)."
        )


class _Opened:
    """A source whose structure is known from its first row, and checked whenever rows are read."""

    def __init__(self, source: RowSource):
        self.source, self.length = source, len(source)
        if self.length == 0:
            raise ValueError("a source needs at least one row, got none.")
        found = source.rows(np.zeros(1, np.int64))
        self.structure = jax.tree.structure(found)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
        if not leaves or any(leaf.shape[:1] != (1,) for leaf in leaves):
            raise ValueError(
                "rows(numbers) of a source must return arrays with one row for each number, got "
                f"shapes {[leaf.shape for leaf in leaves]} for one number."
            )
        self.kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        self._lock = threading.Lock()

    def read(self, numbers: np.ndarray, places: Sequence[int]) -> list[np.ndarray]:
        """Returns some of the arrays of these rows."""
        if isinstance(self.source, _Blocks):
            leaves = self.source.leaves(numbers, places)
        elif isinstance(self.source, _Picked):
            leaves = self._leaves(numbers, places)
        else:
            # Other people's code may keep a position in a file, or return the same buffer again:
            # rows of two calls would be mixed, and one record could stand in many places. Rows that
            # it reads through this module are read by this very thread, because the other readers
            # may be waiting for the lock.
            with self._lock, _as_reader():
                leaves = [np.array(leaf) for leaf in self._leaves(numbers, places)]
        for place, leaf in zip(places, leaves, strict=True):
            shape, dtype = self.kinds[place]
            _refuse_kinds({(dtype, shape), (leaf.dtype, leaf.shape[1:])})
            if len(leaf) != len(numbers):
                raise ValueError(
                    f"rows(numbers) of a source must return one row for each number, got "
                    f"{len(leaf)} rows for {len(numbers)} numbers."
                )
        return leaves

    def _leaves(self, numbers: np.ndarray, places: Sequence[int]) -> list[np.ndarray]:
        found = self.source.rows(numbers)
        if jax.tree.structure(found) != self.structure:
            raise ValueError(
                f"all rows of a source must have one structure, got {self.structure} and "
                f"{jax.tree.structure(found)}. {UNPROTECTED}"
            )
        every = jax.tree.leaves(found)
        return [np.asarray(every[place]) for place in places]


def _refuse_kinds(kinds: set[tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Raises if rows have several dtypes or shapes."""
    if len(kinds) > 1:
        named = sorted(f"{dtype}{[*shape]}" for dtype, shape in kinds)
        raise ValueError(
            f"all rows must have one shape and dtype, got {' and '.join(named)}. Values may be "
            f"missing; bring rows into one form with decode=. {UNPROTECTED}"
        )


def columns_of(source: RowSource) -> PyTree:
    """Returns the arrays of a source as a tree of `Column`."""
    opened = _Opened(source)
    columns = [Column(opened, place) for place in range(len(opened.kinds))]
    return jax.tree.unflatten(opened.structure, columns)


def is_on_disk(leaf: Any) -> bool:
    """Returns whether an array's rows are read from elsewhere: a `Column` or a memory map."""
    return isinstance(leaf, Column) or _memory_map(leaf) is not None


def on_disk(tree: PyTree) -> bool:
    """Returns whether any array of a tree is on disk."""
    return any(map(is_on_disk, jax.tree.leaves(tree)))


def _memory_map(leaf: Any) -> np.memmap | None:
    """Returns the memory map that an array is a view of, if it is one."""
    while isinstance(leaf, np.ndarray):
        # The result of arithmetic on a memory map has its type too, but lies in memory.
        if isinstance(leaf, np.memmap) and leaf._mmap is not None:  # pyright: ignore[reportAttributeAccessIssue]
            return leaf
        leaf = leaf.base
    return None


def read_rows(tree: PyTree, numbers: np.ndarray) -> PyTree:
    """Returns the rows of these numbers, an array of any shape, as arrays in memory.

    Rows on disk are read in the order in which they lie there, by a few threads. Rows in memory are
    indexed.
    """
    leaves, structure = jax.tree.flatten(tree)
    numbers = np.asarray(numbers)
    # Wide enough for a source that computes places in a file.
    flat = numbers.reshape(-1).astype(np.int64, copy=False)
    found = [
        np.empty((len(flat), *leaf.shape[1:]), leaf.dtype) if is_on_disk(leaf) else leaf[flat]
        for leaf in leaves
    ]
    places = [place for place, leaf in enumerate(leaves) if is_on_disk(leaf)]
    if places:
        order = np.argsort(flat, kind="stable")

        def read(start: int) -> None:
            where = order[start : start + _PART]
            # A row that is asked for several times, as for padding, is read once.
            wanted, which = np.unique(flat[where], return_inverse=True)
            for place, rows in _read([leaves[place] for place in places], wanted):
                found[places[place]][where] = rows[which]

        _each(read, range(0, len(flat), _PART))
    shaped = [leaf.reshape(*numbers.shape, *leaf.shape[1:]) for leaf in found]
    return jax.tree.unflatten(structure, shaped)


def _read(leaves: Sequence[Any], wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the place of each array on disk and its rows of these numbers, which are sorted."""
    grouped: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Column):
            grouped.setdefault(id(leaf._opened), []).append(place)
            continue
        _advise(leaf, "MADV_RANDOM")
        yield place, leaf[wanted]
        if len(wanted):
            _forget(leaf, int(wanted[0]), int(wanted[-1]) + 1)
    for places in grouped.values():
        opened = leaves[places[0]]._opened
        yield from zip(
            places, opened.read(wanted, [leaves[place]._place for place in places]), strict=True
        )


def chunks(tree: PyTree, nbytes: int | None = None) -> Iterator[tuple[int, PyTree]]:
    """Yields all rows in order, the first number of each part and its rows: `CHUNK` bytes or so.

    The next part is read while the caller looks at this one.
    """
    leaves, structure = jax.tree.flatten(tree)
    length = len(leaves[0])
    nbytes = CHUNK if nbytes is None else nbytes
    size = max(1, int(nbytes * length // max(1, sum(leaf.nbytes for leaf in leaves))))

    def part(start: int) -> PyTree:
        stop = min(start + size, length)
        found = [
            None if isinstance(leaf, Column) else np.asarray(leaf[start:stop]) for leaf in leaves
        ]
        columns = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Column)]
        for place, rows in _read([leaves[place] for place in columns], np.arange(start, stop)):
            found[columns[place]] = rows
        return jax.tree.unflatten(structure, found)

    for leaf in leaves:
        _advise(leaf, "MADV_SEQUENTIAL")
    starts = range(0, length, size)
    ahead = any(isinstance(leaf, Column) for leaf in leaves) and not _is_reader.here
    upcoming = _pool(os.getpid()).submit(part, 0) if ahead else None
    for start in starts:
        found = part(start) if upcoming is None else upcoming.result()
        if upcoming is not None and start + size < length:
            upcoming = _pool(os.getpid()).submit(part, start + size)
        yield start, found
        for leaf in leaves:
            _forget(leaf, start, min(start + size, length))


def row_blocks(*arrays: Any) -> Iterator[slice]:
    """Yields slices of the rows of arrays, for code whose temporaries must not be as large as they.

    A block has at most 8 MiB of the widest array as float64. Its number of rows is a power of two
    that follows from the shapes alone, so that sums over blocks are rounded in the same way in
    memory and on disk. Once a block was used, the memory of its rows of memory maps is given back.

    Args:
        *arrays: arrays of the same length; None stands for an array that there is not.
    """
    arrays = tuple(array for array in arrays if array is not None)
    length = arrays[0].shape[0]
    width = max(1, *(math.prod(array.shape[1:]) for array in arrays))
    size = 1 << max(0, (_BLOCK_NUMBERS // width).bit_length() - 1)
    for array in arrays:
        _advise(array, "MADV_SEQUENTIAL")
    for start in range(0, length, size):
        stop = min(start + size, length)
        yield slice(start, stop)
        for array in arrays:
            _forget(array, start, stop)


def computed_rows(function: Callable[..., np.ndarray], *arrays: Any) -> np.ndarray:
    """Returns what a function makes of each row, computed block by block.

    The result is in memory; if one of the arrays is on disk, it is in an unnamed temporary file.

    Args:
        function: takes rows of the arrays and returns one row for each. What it makes of a row must
            not depend on the others.
        *arrays: arrays of the same length; the function gets None for None.
    """
    return computed_columns(lambda *rows: (function(*rows),), *arrays)[0]


def computed_columns(
    function: Callable[..., Sequence[np.ndarray]], *arrays: Any
) -> Sequence[np.ndarray]:
    """Does what `computed_rows` does for a function that returns several arrays."""
    on_disk = any(map(is_on_disk, arrays))
    length = next(array.shape[0] for array in arrays if array is not None)
    if length == 0:
        return function(*arrays)
    found = GatheredRows(0 if on_disk else math.inf, expected=length)
    for block in row_blocks(*arrays):
        found.append(*function(*(None if array is None else array[block] for array in arrays)))
    return found.finish()


class GatheredRows:
    """Rows that come in batches: in memory, or in unnamed temporary files if they are too many.

    Such a file is in the folder for temporary files (TMPDIR), only its owner could open it, and it
    goes away with the memory map or the process, however that ends.

    Args:
        memory: the largest number of bytes in memory.
        expected: the number of rows to make room for.
    """

    def __init__(self, memory: float, expected: int = 0):
        self._memory, self._expected, self._count = memory, expected, 0
        self._arrays: list[np.ndarray] = []
        self._files: list[Any] = []

    def append(self, *batch: np.ndarray) -> None:
        """Adds a batch: rows of one or more arrays, the same number of each."""
        start, self._count = self._count, self._count + len(batch[0])
        if not self._arrays:
            self._arrays = [np.empty((0, *rows.shape[1:]), rows.dtype) for rows in batch]
        sizes = [rows.dtype.itemsize * math.prod(rows.shape[1:]) for rows in batch]
        if not self._files and self._count * sum(sizes) > self._memory:
            self._files = [_temporary_file() for _ in batch]
            self._write([array[:start] for array in self._arrays])
            self._arrays = [array[:0].copy() for array in self._arrays]
        if self._files:
            self._write(batch)
            return
        for array, rows in zip(self._arrays, batch, strict=True):
            if self._count > len(array):
                # A large array grows where it is. Batches that are joined at the end would be in
                # memory twice.
                room = max(self._count, self._expected, 9 * start // 8)
                array.resize((room, *array.shape[1:]), refcheck=False)
            array[start : self._count] = rows

    def _write(self, batch: Sequence[np.ndarray]) -> None:
        try:
            for file, rows in zip(self._files, batch, strict=True):
                file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
                file.flush()
        except OSError as error:
            raise _no_room(error) from None

    def finish(self) -> list[np.ndarray]:
        """Returns the arrays; temporary files are memory maps, which can be written to."""
        if not self._files or self._count == 0:
            for array in self._arrays:
                array.resize((self._count, *array.shape[1:]), refcheck=False)
            return self._arrays
        found = []
        for file, array in zip(self._files, self._arrays, strict=True):
            with file:
                shape = (self._count, *array.shape[1:])
                found.append(np.asarray(np.memmap(file, array.dtype, "r+", shape=shape)))
        return found


def _temporary_file() -> Any:
    try:
        return tempfile.TemporaryFile(prefix="mirrordp.")
    except OSError as error:
        raise _no_room(error) from None


def _no_room(error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"{error.strerror}; rows beyond memory are kept in temporary files, so set TMPDIR to a "
        "folder on a disk with more room",
        tempfile.gettempdir(),
    )


def in_memory(tree: PyTree) -> PyTree:
    """Returns the tree with all rows of sources read into memory; memory maps stay as they are."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Column)]
    if not places:
        return tree
    columns = [leaves[place] for place in places]
    found = [np.empty(column.shape, column.dtype) for column in columns]
    for start, part in chunks(columns):
        for whole, rows in zip(found, part, strict=True):
            whole[start : start + len(rows)] = rows
    for place, whole in zip(places, found, strict=True):
        leaves[place] = whole
    return jax.tree.unflatten(structure, leaves)


def _advise(leaf: Any, name: str) -> None:
    mapped = _memory_map(leaf)
    if mapped is not None and hasattr(mmap, name):
        mapped._mmap.madvise(getattr(mmap, name))  # pyright: ignore[reportAttributeAccessIssue]


def _forget(leaf: Any, start: int, stop: int) -> None:
    """Gives back the memory of rows of a memory map; the next reader gets them from the file.

    Not for a map of mode "c": what was written to it is nowhere else.
    """
    mapped = _memory_map(leaf)
    if mapped is None or mapped.mode == "c" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    if leaf.strides[0] <= 0:
        return
    whole = mapped._mmap  # pyright: ignore[reportAttributeAccessIssue]
    base = np.frombuffer(whole, np.uint8).__array_interface__["data"][0]
    first = leaf.__array_interface__["data"][0] - base
    page = mmap.PAGESIZE
    begin = (first + start * leaf.strides[0]) // page * page
    end = min(first + stop * leaf.strides[0] + page, len(whole))
    if begin < end:
        whole.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class _Reader(threading.local):
    """Whether this thread is one of the readers, which do not wait for each other."""

    here = False


_is_reader = _Reader()


@contextlib.contextmanager
def _as_reader() -> Iterator[None]:
    """Makes this thread one of the readers for a while."""
    before, _is_reader.here = _is_reader.here, True
    try:
        yield
    finally:
        _is_reader.here = before


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Returns the readers of this process; threads do not survive a fork."""
    del pid

    def begin() -> None:
        _is_reader.here = True

    return ThreadPoolExecutor(_THREADS, "mirrordp-rows", initializer=begin)


def _each(function: Callable[[int], None], starts: range) -> None:
    """Calls the function for each start, in the threads of the pool unless this is one of them."""
    if len(starts) <= 1 or _is_reader.here:
        for start in starts:
            function(start)
        return
    for _ in _pool(os.getpid()).map(function, starts):
        pass


# Sources.


class _Picked:
    """Some of the rows of arrays, in any order; the rows stay where they are."""

    def __init__(self, tree: PyTree, index: np.ndarray):
        self._tree, self._index = tree, index

    def __len__(self) -> int:
        return len(self._index)

    def rows(self, numbers: np.ndarray) -> PyTree:
        return read_rows(self._tree, self._index[numbers])


def pick_rows(tree: PyTree, index: np.ndarray) -> PyTree:
    """Returns some of the rows of arrays: as they are on disk, by their numbers, else copied."""
    if not on_disk(tree):
        return jax.tree.map(lambda leaf: leaf[index], tree)
    length = len(jax.tree.leaves(tree)[0])
    if len(index) == length and np.array_equal(index, np.arange(length)):
        return tree
    if len(index) == 0:
        return read_rows(tree, index)
    return columns_of(_Picked(tree, index.astype(np.int32 if length < 2**31 else np.int64)))


class _Decoded:
    """A source whose rows go through a function, one by one."""

    def __init__(self, tree: PyTree, decode: Callable[[Any], PyTree]):
        self._tree, self._decode = tree, decode

    def __len__(self) -> int:
        return len(jax.tree.leaves(self._tree)[0])

    def rows(self, numbers: np.ndarray) -> PyTree:
        found = read_rows(self._tree, numbers)
        return _stacked(
            self._decode(jax.tree.map(lambda leaf, row=row: _cell(leaf, row), found))
            for row in range(len(numbers))
        )


def _cell(leaf: np.ndarray, row: int) -> Any:
    # An object may be kept for the next reading, and a function may change what it is given.
    return copy.deepcopy(leaf[row]) if leaf.dtype == object else leaf[row]


def decoded_rows(arrays: PyTree, decode: Callable[[Any], PyTree]) -> PyTree:
    """Applies a function to each row when it is read, such as a tokenizer or an image decoder.

    Args:
        arrays: a tree of arrays or sources.
        decode: takes one row, as a tree without the row axis, and returns a tree of arrays or
            numbers, of the same shapes and dtypes for all rows. It must depend on its row alone,
            and what it knows (a vocabulary, a mean) must come from public data.

    Returns:
        A tree to pass to `PrivateData` or `PublicData`.
    """
    arrays = jax.tree.map(lambda leaf: columns_of(leaf) if _is_source(leaf) else leaf, arrays)
    lengths = {len(leaf) for leaf in jax.tree.leaves(arrays)}
    if len(lengths) != 1:
        raise ValueError(f"all arrays must have the same number of rows, got {sorted(lengths)}.")
    return columns_of(_Decoded(arrays, decode))


def _is_source(leaf: Any) -> bool:
    # A data frame of polars has a method of the same name, and is an array.
    return isinstance(leaf, RowSource) and not hasattr(leaf, "__array__")


def _stacked(items: Iterable[Any]) -> PyTree:
    """Returns rows as arrays with one row for each; a list counts as an array.

    Each item is copied before the next one is asked for, which may have the same buffer.
    """
    is_list = lambda item: isinstance(item, list)  # noqa: E731
    rows: list[list[np.ndarray]] = []
    structure = None
    for item in items:
        leaves, found = jax.tree.flatten(item, is_leaf=is_list)
        structure = found if structure is None else structure
        if found != structure:
            raise ValueError(
                f"all rows must have one structure, got {structure} and {found}. {UNPROTECTED}"
            )
        rows.append([np.array(leaf) for leaf in leaves])
    assert structure is not None
    columns = []
    for arrays in zip(*rows, strict=True):
        _refuse_kinds({(array.dtype, array.shape) for array in arrays})
        columns.append(np.stack(arrays))
    return jax.tree.unflatten(structure, columns)


def _refuse_one_buffer(items: Sequence[Any]) -> None:
    """Raises if items that were returned together lie in the same memory."""
    arrays = [leaf for leaf in jax.tree.leaves(list(items)) if isinstance(leaf, np.ndarray)]
    places = [leaf.__array_interface__["data"][0] for leaf in arrays if leaf.size]
    if len(set(places)) < len(places):
        raise ValueError(
            "__getitems__ of a data set must return items of their own, got several in the same "
            "memory. Copy each of them."
        )


class _Dataset:
    """A data set of another library: a length and items by number."""

    def __init__(self, dataset: Any, decode: Callable[[Any], PyTree] | None):
        self._dataset, self._decode = dataset, decode

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, numbers: np.ndarray) -> PyTree:
        places = [int(number) for number in numbers]
        many = getattr(self._dataset, "__getitems__", None)
        if many is None:
            items: Iterable[Any] = (self._dataset[place] for place in places)
        else:
            items = list(many(places))
            _refuse_one_buffer(items)
        return _stacked(items if self._decode is None else map(self._decode, items))


def dataset_rows(dataset: Any, *, decode: Callable[[Any], PyTree] | None = None) -> PyTree:
    """Returns the rows of a random-access data set, such as one of Hugging Face, Grain or PyTorch.

    Args:
        dataset: any object with `__len__` and `__getitem__`, or `__getitems__` for several items
            at once. An item is a tree of arrays and numbers; lists count as arrays.
        decode: as in `decoded_rows`, applied to each item.

    Returns:
        A tree to pass to `PrivateData` or `PublicData`. Items are read when they are needed.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            "dataset must have a length and give items by number (__len__ and __getitem__), got "
            f"{type(dataset).__name__}. Turn a stream into files or a list first."
        )
    return columns_of(_Dataset(dataset, decode))


class _Blocks:
    """Rows that can only be read in whole blocks, such as row groups or compressed chunks.

    Args:
        starts: the number of each block's first row, and at last the number of rows.
        names: the arrays of a row.
        read: `read(block, name)` returns one array of a block.
    """

    def __init__(
        self, starts: np.ndarray, names: Sequence[str], read: Callable[[int, str], np.ndarray]
    ):
        self._starts, self._names, self._read = starts.tolist(), sorted(names), read
        self._kept: OrderedDict[tuple[int, str], Future] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, numbers: np.ndarray) -> PyTree:
        leaves = self.leaves(numbers, range(len(self._names)))
        return dict(zip(self._names, leaves, strict=True))

    def leaves(self, numbers: np.ndarray, places: Sequence[int]) -> list[np.ndarray]:
        """Returns some of the arrays of these rows, in the order of their names."""
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order].tolist()
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        spans, at = [], 0
        while at < len(ordered):
            block = bisect.bisect_right(self._starts, ordered[at]) - 1
            stop = bisect.bisect_left(ordered, self._starts[block + 1], at)
            spans.append((block, np.asarray(ordered[at:stop]) - self._starts[block]))
            at = stop
        found = []
        for name in (self._names[place] for place in places):
            parts = [self._block(block, name)[rows] for block, rows in spans]
            _refuse_kinds({(part.dtype, part.shape[1:]) for part in parts})
            found.append(np.concatenate(parts)[back])
        return found

    def _block(self, block: int, name: str) -> np.ndarray:
        """Returns one array of a block; the latest blocks are kept, and none is read twice."""
        key = (block, name)
        mine: Future = Future()
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                self._kept[key] = mine
            else:
                self._kept.move_to_end(key)
        if known is not None:
            return known.result()
        try:
            array = self._read(block, name)
        except BaseException as error:
            mine.set_exception(error)
            with self._lock:
                self._kept.pop(key, None)
            raise
        mine.set_result(array)
        with self._lock:
            self._size += _nbytes(array)
            for old, future in list(self._kept.items()):
                if self._size <= _KEPT_BLOCKS:
                    break
                if future.done() and old != key:
                    del self._kept[old]
                    self._size -= _nbytes(future.result())
        return array


def _nbytes(array: np.ndarray) -> int:
    if array.dtype != object:
        return array.nbytes
    return 64 * array.size + sum(
        len(value) for value in array.flat if isinstance(value, str | bytes)
    )


def _require(package: str, what: str, extra: str) -> None:
    """Raises unless an optional package can be imported."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{what} files need {package}, which is not installed; run: pip install "
            f"'mirrordp[{extra}]'."
        ) from error


def parquet_rows(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    decode: Callable[[Any], PyTree] | None = None,
) -> PyTree:
    """Returns the rows of Parquet files, which stay on disk; needs pyarrow.

    Parquet is compressed in groups of rows, and to read one row its group is unpacked. Random
    batches of large files are therefore slow to read; `copy_rows` makes memory maps of them once.

    Args:
        path: a file, a folder of files (in the order of their names), or a list of files.
        columns: the columns to read, each an array; or a mapping from the name of an array to a
            column, or to several columns of numbers, which become a matrix. By default all columns,
            each an array.
        decode: as in `decoded_rows`; a row is a dictionary of these names.

    Returns:
        A tree to pass to `PrivateData` or `PublicData`.
    """
    _require("pyarrow", "Parquet", "parquet")
    import pyarrow.dataset

    paths = [os.fspath(part) for part in path] if isinstance(path, list | tuple) else path
    if isinstance(paths, list) and len({os.path.realpath(part) for part in paths}) < len(paths):
        raise ValueError(
            f"every file must be named once, got {paths}, some twice. The privacy of a row covers "
            "one copy of it."
        )
    dataset = pyarrow.dataset.dataset(paths, format="parquet", partitioning="hive")
    chosen = dataset.schema.names if columns is None else columns
    named = dict(chosen) if isinstance(chosen, Mapping) else {name: name for name in chosen}
    wanted = [name for part in named.values() for name in ([part] if _is_one(part) else part)]
    unknown = [name for name in wanted if name not in dataset.schema.names]
    if unknown or not named:
        raise ValueError(
            f"columns must name columns of the file, got {unknown}. Its columns are "
            f"{dataset.schema.names}."
        )
    fragments = list(dataset.get_fragments())
    _check_types(fragments, wanted)
    groups = [
        (fragment, group.id, group.num_rows)
        for fragment in fragments
        for group in fragment.row_groups
        if group.num_rows
    ]
    starts = np.concatenate([[0], np.cumsum([rows for *_, rows in groups])]).astype(np.int64)

    def read(block: int, name: str) -> np.ndarray:
        fragment, group, _ = groups[block]
        part = named[name]
        names = [part] if _is_one(part) else list(part)
        table = fragment.subset(row_group_ids=[group]).to_table(
            schema=dataset.schema, columns=names, use_threads=False
        )
        arrays = [_of_arrow(table.column(each), raw=decode is not None) for each in names]
        return arrays[0] if _is_one(part) else np.stack(arrays, axis=1)

    return _decoded(columns_of(_Blocks(starts, list(named), read)), decode)


def _check_types(fragments: Sequence[Any], names: Sequence[Any]) -> None:
    """Raises a ValueError if a column has another type in another file.

    Arrow would give all files the types of the first one, which may be one person's: her numbers of
    half precision would round those of everyone.
    """
    types: dict[str, Any] = {}
    for fragment in fragments:
        for field in fragment.physical_schema:
            kind = _kind_of_values(field.type)
            # A file in which every value is missing has no type of its own.
            if field.name not in names or kind == "null":
                continue
            if types.setdefault(field.name, kind) != kind:
                raise ValueError(
                    f"column {field.name!r} must have one type in all files, got "
                    f"{types[field.name]} and {kind}. Write all of them with the same types. "
                    f"{UNPROTECTED}"
                )


def _kind_of_values(kind: Any) -> str:
    """Returns the name of a type of Arrow's without how its values are stored."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _kind_of_values(kind.value_type)
    if types.is_fixed_size_list(kind):
        return f"{kind.list_size} of {_kind_of_values(kind.value_type)}"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"list of {_kind_of_values(kind.value_type)}"
    if types.is_timestamp(kind):
        return f"timestamp in {kind.unit}"
    if types.is_large_string(kind) or str(kind) == "string_view":
        return "string"
    return str(kind)


def _is_one(part: str | Sequence[str]) -> bool:
    return isinstance(part, str)


def _of_arrow(column: Any, *, raw: bool) -> np.ndarray:
    """Returns a column as numbers where it holds numbers or equally long lists, else as objects."""
    import pyarrow as pa

    kind = column.type
    is_fixed = pa.types.is_fixed_size_list(kind)
    is_list = is_fixed or (not raw and (pa.types.is_list(kind) or pa.types.is_large_list(kind)))
    plain = lambda kind: pa.types.is_primitive(kind) and not pa.types.is_temporal(kind)  # noqa: E731
    if not column.null_count:
        if plain(kind):
            return column.to_numpy()
        if is_list and plain(kind.value_type):
            whole = column.combine_chunks()
            values = whole.flatten()
            lengths = {kind.list_size} if is_fixed else set(whole.value_lengths().to_pylist())
            if len(lengths) == 1 and not values.null_count:
                return values.to_numpy(zero_copy_only=False).reshape(len(column), lengths.pop())
    found = np.empty(len(column), object)
    for row, value in enumerate(column.to_pylist()):
        found[row] = value
    return found


def hdf5_rows(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    decode: Callable[[Any], PyTree] | None = None,
) -> PyTree:
    """Returns the rows of an HDF5 file, which stay on disk; needs h5py.

    A data set that is neither compressed nor chunked becomes a memory map. Others are read in whole
    chunks; choose small ones, or use `copy_rows`.

    Args:
        path: the file.
        names: the data sets to read; by default all of them. Their first axis is that of rows.
        decode: as in `decoded_rows`; a row is a dictionary of these names.

    Returns:
        A tree to pass to `PrivateData` or `PublicData`.
    """
    _require("h5py", "HDF5", "hdf5")
    import h5py

    file = h5py.File(path, "r")
    if names is None:
        names = []
        file.visititems(
            lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
        )
    missing = [name for name in names if name not in file]
    if missing or not names:
        raise ValueError(f"expected the data sets {missing or 'of the file'}, got none in it.")
    return _decoded({name: _of_hdf5(path, name, file[name]) for name in names}, decode)


def _of_hdf5(path: Any, name: str, dataset: Any) -> Any:
    if dataset.ndim == 0 or len(dataset) == 0:
        raise ValueError(f"every data set needs rows, got shape {dataset.shape} at {name!r}.")
    offset = dataset.id.get_offset()
    is_plain = dataset.chunks is None and dataset.dtype.kind in "biuf" and dataset.dtype.isnative
    if is_plain and offset is not None and dataset.external is None:
        return np.memmap(path, dataset.dtype, "r", offset, dataset.shape)
    per_chunk = 1 if dataset.chunks is None else dataset.chunks[0]
    row = max(1, dataset.dtype.itemsize * math.prod(dataset.shape[1:]))
    size = per_chunk * max(1, 2**20 // (row * per_chunk))
    starts = np.append(np.arange(0, len(dataset), size), len(dataset))

    def read(block: int, _: str) -> np.ndarray:
        found = dataset[starts[block] : starts[block + 1]]
        return found.astype(found.dtype.newbyteorder("="), copy=False)

    return columns_of(_Blocks(starts, [name], read))[name]


def _decoded(arrays: PyTree, decode: Callable[[Any], PyTree] | None) -> PyTree:
    return arrays if decode is None else decoded_rows(arrays, decode)


def copy_rows(arrays: PyTree, folder: str | os.PathLike[str]) -> PyTree:
    """Copies rows once into files of plain numbers, which random batches are fast to read from.

    Args:
        arrays: a tree of arrays or sources, such as that of `parquet_rows`.
        folder: a new folder, which only its owner can read. Each array becomes a file NAME.npy
            (`np.load(path, mmap_mode="r")` opens it again). It holds the rows as they are: remove
            it when they are to be removed.

    Returns:
        The same tree with memory maps.
    """
    arrays = jax.tree.map(lambda leaf: columns_of(leaf) if _is_source(leaf) else leaf, arrays)
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True)
    paths, kinds = [], jax.tree_util.tree_leaves_with_path(arrays)
    for number, (path, leaf) in enumerate(kinds):
        if leaf.dtype == object:
            raise TypeError(
                f"rows must be numbers, got dtype {leaf.dtype} at {jax.tree_util.keystr(path)}. "
                "Turn text and images into numbers with decode=."
            )
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "rows"
        safe = "".join(each if each.isalnum() or each in "._-" else "_" for each in name)
        paths.append(folder / f"{safe}.npy")
        if paths[-1] in paths[:-1]:
            paths[-1] = folder / f"{safe}-{number}.npy"
    of_owner = functools.partial(os.open, mode=0o600)
    files = [open(path, "xb", opener=of_owner) for path in paths]  # noqa: SIM115
    try:
        for file, (_, leaf) in zip(files, kinds, strict=True):
            header = {"descr": leaf.dtype.str, "fortran_order": False, "shape": leaf.shape}
            np.lib.format.write_array_header_2_0(file, header)
        for _, part in chunks([leaf for _, leaf in kinds]):
            for file, rows in zip(files, part, strict=True):
                file.write(np.ascontiguousarray(rows).data)
    finally:
        for file in files:
            file.close()
    maps = [np.load(path, mmap_mode="r") for path in paths]
    return jax.tree.unflatten(jax.tree.structure(arrays), maps)
