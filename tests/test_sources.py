"""Rows on disk are the rows in memory: read, checked, compared, fingerprinted and trained alike."""

import mmap
import os
import stat
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import mirrordp
from mirrordp import (
    Budget,
    Checkpoint,
    PrivateClients,
    PrivateData,
    PublicClients,
    PublicData,
    SweepRun,
)
from mirrordp.data import (
    UNPROTECTED,
    UnprotectedWarning,
    copy_rows,
    dataset_rows,
    decoded_rows,
    excluded_rows,
    hdf5_rows,
    parquet_rows,
    read_rows,
    sources,
)
from mirrordp.privacy.noise import SecureGaussianNoise
from mirrordp.spending import fingerprint
from mirrordp.training import engine
from mirrordp.training.checkpoint import CheckpointError
from tests import tools

ROWS = {"x": tools.features(), "y": np.arange(tools.ROWS, dtype=np.int32) % 3}


class Own:
    """A source as a user would write it, which counts what is read."""

    def __init__(self, arrays):
        self.arrays, self.largest, self.read = arrays, 0, 0

    def __len__(self):
        return len(jax.tree.leaves(self.arrays)[0])

    def rows(self, numbers):
        self.largest, self.read = max(self.largest, len(numbers)), self.read + len(numbers)
        return jax.tree.map(lambda leaf: leaf[numbers], self.arrays)


class Items:
    """A random-access data set: one item at a time, or several as in Hugging Face and Grain."""

    def __init__(self, arrays, several):
        self.arrays = arrays
        if several:
            self.__getitems__ = lambda places: [self[place] for place in places]

    def __len__(self):
        return len(self.arrays["x"])

    def __getitem__(self, place):
        if isinstance(place, np.ndarray | np.integer) or not 0 <= place < len(self):
            raise IndexError(place)
        # Lists and Python numbers, as a table of Arrow gives them.
        return {"x": self.arrays["x"][place], "y": self.arrays["y"][place]}


def memory_maps(folder, arrays):
    return copy_rows(arrays, folder / "maps")


def hdf5(folder, arrays, **options):
    with h5py.File(folder / "rows.h5", "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)
    return hdf5_rows(folder / "rows.h5")


def parquet(folder, arrays, files=3, group=5):
    (folder / "parquet").mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(arrays["y"])), files)):
        x, y = arrays["x"][part], arrays["y"][part]
        columns = {f"x{column}": x[:, column] for column in range(x.shape[1])}
        pa.parquet.write_table(
            pa.table(columns | {"y": y}),
            folder / "parquet" / f"part-{number}.parquet",
            row_group_size=group,
        )
    return parquet_rows(folder / "parquet", columns={"x": ["x0", "x1", "x2"], "y": "y"})


KINDS = {
    "memory map": memory_maps,
    "parquet": parquet,
    "hdf5": hdf5,
    "chunked hdf5": lambda folder, rows: hdf5(folder, rows, chunks=True, compression="gzip"),
    "items": lambda folder, rows: dataset_rows(Items(rows, several=False)),
    "several items": lambda folder, rows: dataset_rows(Items(rows, several=True)),
    "own": lambda folder, rows: Own(rows),
    "decoded": lambda folder, rows: decoded_rows(memory_maps(folder, rows), lambda row: row),
    "mixed": lambda folder, rows: {
        "x": memory_maps(folder, rows)["x"],
        "y": Own(rows["y"]),
    },
}


@pytest.fixture(params=KINDS)
def on_disk(request, tmp_path):
    return KINDS[request.param](tmp_path, ROWS)


@pytest.fixture(params=["memory map", "parquet", "own"])
def few_kinds(request, tmp_path):
    return KINDS[request.param](tmp_path, ROWS)


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


class TestReading:
    @pytest.mark.parametrize(
        "numbers", [[0], [39, 0, 39, 7], [[5, 5, 6], [1, 0, 39]], [], range(40)], ids=str
    )
    def test_rows_by_number(self, on_disk, numbers):
        data = PrivateData(on_disk)
        numbers = np.asarray(numbers, np.int64)
        same(read_rows(data.arrays, numbers), jax.tree.map(lambda leaf: leaf[numbers], ROWS))

    @pytest.mark.parametrize("nbytes", [1, 100, 2**20])
    def test_chunks_are_all_rows_in_order(self, on_disk, nbytes):
        parts = list(sources.chunks(PrivateData(on_disk).arrays, nbytes))
        assert [start for start, _ in parts] == np.cumsum(
            [0, *(len(part["y"]) for _, part in parts[:-1])]
        ).tolist()
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part for _, part in parts))
        same(whole, ROWS)
        assert (len(parts) == 1) == (nbytes == 2**20)

    def test_what_is_known_without_reading(self, on_disk):
        data, plain = PrivateData(on_disk), PrivateData(ROWS)
        assert len(data) == 40
        assert data.nbytes == plain.nbytes
        assert repr(data) == repr(plain)
        assert sources.on_disk(data.arrays)
        assert not sources.on_disk(plain.arrays)

    def test_public_rows_are_read_into_memory(self, on_disk):
        same(PublicData(on_disk).arrays, ROWS)

    def test_many_parts_and_threads(self, monkeypatch):
        monkeypatch.setattr(sources, "_PART", 7)
        rows, threads = np.arange(3000).reshape(1000, 3), set()

        class Slow(Own):
            def rows(self, numbers):
                threads.add(threading.current_thread().name)
                assert len(numbers) <= 7
                # A source that reads from another one must not wait for its own thread.
                return read_rows(inner, numbers)

        inner = PrivateData(Own(rows)).arrays
        data = PrivateData(Slow(rows), check_finite=False)
        numbers = np.random.default_rng(0).integers(1000, size=(30, 40))
        same(read_rows(data.arrays, numbers), rows[numbers])
        assert 1 < len(threads) <= 5

    def test_other_peoples_code_is_asked_by_one_thread_at_a_time(self, monkeypatch):
        """As for a position in a file; two callers that wait for each other would hang."""
        monkeypatch.setattr(sources, "_PART", 7)
        rows, inside = np.arange(3000).reshape(1000, 3), []

        class OneFile(Own):
            def rows(self, numbers):
                assert numbers.dtype == np.int64
                inside.append(None)
                alone = len(inside) == 1
                found = read_rows(inner, numbers)
                inside.pop()
                assert alone
                return found

        inner = PrivateData(Own(rows)).arrays
        data = PrivateData(OneFile(rows), check_finite=False).arrays
        numbers = np.random.default_rng(0).integers(1000, size=900).astype(np.int32)
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(read_rows, data, numbers) for _ in range(3)]
            few = [pool.submit(read_rows, data, numbers[:6]) for _ in range(20)]
            for one in found:
                same(one.result(timeout=60), rows[numbers])
            for one in few:
                same(one.result(timeout=60), rows[numbers[:6]])

    @pytest.mark.parametrize("kind", ["source", "decode", "data set", "data set, decoded"])
    def test_a_buffer_may_be_used_again(self, kind, monkeypatch):
        """Otherwise one record would stand in many places, and its contribution be many times C."""
        monkeypatch.setattr(sources, "_PART", 7)
        monkeypatch.setattr(sources, "CHUNK", 200)
        rows, buffer = tools.features(), np.empty_like(tools.features())

        class Source(Own):
            def rows(self, numbers):
                return np.take(rows, numbers, axis=0, out=buffer[: len(numbers)])

        class DataSet(Own):
            def __getitem__(self, place):
                buffer[0] = rows[place]
                return buffer[0]

        def decode(row):
            buffer[0] = row
            return buffer[0]

        tree = {
            "source": lambda: Source(rows),
            "decode": lambda: sources.decoded_rows(Own(rows), decode),
            "data set": lambda: dataset_rows(DataSet(rows)),
            "data set, decoded": lambda: dataset_rows(DataSet(rows), decode=lambda row: row),
        }[kind]()
        data = PrivateData(tree).arrays
        numbers = np.random.default_rng(0).permutation(len(rows))
        same(read_rows(data, numbers), rows[numbers])
        parts = [(start, part) for start, part in sources.chunks(data)]
        same(np.concatenate([part for _, part in parts]), rows)

    def test_items_in_the_same_memory_are_refused(self):
        class DataSet(Own):
            def __getitem__(self, place):
                raise AssertionError

            def __getitems__(self, places):
                return [self.arrays[0]] * len(places)

        with pytest.raises(ValueError, match="in the same memory"):
            read_rows(dataset_rows(DataSet(tools.features())), np.arange(3))

    def test_decode_may_change_its_row(self, tmp_path):
        pa.parquet.write_table(pa.table({"list": [[1, 2], [3]]}), tmp_path / "list.parquet")

        def decode(row):
            row["list"].append(10)
            return np.float32(sum(row["list"]))

        data = PrivateData(parquet_rows(tmp_path / "list.parquet", decode=decode))
        for _ in range(2):
            same(read_rows(data.arrays, np.arange(2)), np.array([13, 13], "f4"))

    def test_an_error_of_a_source_is_the_callers(self):
        class Broken(Own):
            def rows(self, numbers):
                if numbers.max() > 30:
                    raise OSError("the disk is gone")
                return super().rows(numbers)

        data = PrivateData(Broken(ROWS["y"]))
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                read_rows(data.arrays, np.arange(40))

    def test_memory_maps_are_neither_copied_nor_kept_in_memory(self, tmp_path, monkeypatch):
        maps = memory_maps(tmp_path, ROWS)
        data = PrivateData(maps)
        assert np.shares_memory(data.arrays["x"], maps["x"])
        forgotten = []
        monkeypatch.setattr(
            sources, "_forget", lambda leaf, start, stop: forgotten.append((start, stop))
        )
        read_rows(data.arrays, np.array([3, 30]))
        assert forgotten == [(3, 31), (3, 31)]

    def test_what_was_computed_from_a_memory_map_is_in_memory(self, tmp_path):
        mapped = memory_maps(tmp_path, ROWS)["x"]
        assert sources.is_on_disk(mapped[3:, 1])
        assert not sources.is_on_disk(mapped + 1)
        same(read_rows(PrivateData(mapped + 1).arrays, np.arange(40)), ROWS["x"] + 1)

    @pytest.mark.skipif(
        not hasattr(mmap, "MADV_DONTNEED"),
        reason="without madvise nothing is forgotten, so nothing written can be lost",
    )
    def test_what_was_written_to_a_private_map_is_not_forgotten(self, tmp_path):
        np.save(tmp_path / "x.npy", np.zeros((4000, 3)))
        for mode, kept in (("c", 7.0), ("r+", 7.0)):
            mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
            mapped[:] = 7.0
            data = PrivateData(mapped[5:])
            assert (read_rows(data.arrays, np.arange(3995)) == kept).all()
            assert (mapped == kept).all()

    def test_resident_memory_stays_small(self, tmp_path):
        """200 MB of rows go by; the process grows by a fraction."""
        mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (500_000, 100))
        del mapped
        before = resident()
        data = PrivateData(np.load(tmp_path / "x.npy", mmap_mode="r"))
        rng = np.random.default_rng(0)
        for _ in range(5):
            read_rows(data.arrays, rng.integers(500_000, size=20_000))
            assert resident() - before < 100e6
        assert data.arrays.sum() == 0  # by hand: everything is mapped
        assert resident() - before > 150e6


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class TestSources:
    def test_parquet_columns(self, tmp_path):
        lists = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32()))
        fixed = pa.array([[1.0], [2.0], [3.0]], pa.list_(pa.float64(), 1))
        table = pa.table({"lists": lists, "fixed": fixed, "flag": [True, False, True]})
        pa.parquet.write_table(table, tmp_path / "one.parquet", row_group_size=2)
        data = PrivateData(parquet_rows(tmp_path / "one.parquet"))
        found = read_rows(data.arrays, np.arange(3))
        np.testing.assert_array_equal(found["lists"], [[1, 2], [3, 4], [5, 6]])
        np.testing.assert_array_equal(found["fixed"], [[1.0], [2.0], [3.0]])
        np.testing.assert_array_equal(found["flag"], [True, False, True])
        assert found["lists"].dtype == np.int32
        with pytest.raises(ValueError, match=r"got \['z'\]. Its columns are"):
            parquet_rows(tmp_path / "one.parquet", columns=["z"])
        pa.parquet.write_table(table, tmp_path / "two.parquet")
        names = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
        some = parquet_rows(names, columns=["flag"])
        assert list(some) == ["flag"]
        assert len(some["flag"]) == 6
        (tmp_path / "link.parquet").symlink_to(names[0])
        for again in (names[0], tmp_path / "link.parquet"):
            with pytest.raises(ValueError, match="every file must be named once"):
                parquet_rows([*names, again])

    def test_text_and_lists_of_any_length_need_decode(self, tmp_path):
        table = pa.table({"text": ["a", "bcd", "ef"], "list": [[1], [1, 2], [3]]})
        pa.parquet.write_table(table, tmp_path / "text.parquet", row_group_size=2)
        with pytest.raises(TypeError, match="must hold numbers, got dtype object"):
            PrivateData(parquet_rows(tmp_path / "text.parquet", columns=["text"]))

        def decode(row):
            return {"length": np.int32(len(row["text"])), "sum": np.float32(sum(row["list"]))}

        data = PrivateData(parquet_rows(tmp_path / "text.parquet", decode=decode))
        same(
            read_rows(data.arrays, np.array([2, 1, 0])),
            {"length": np.array([2, 3, 1], "i4"), "sum": np.array([3, 3, 1], "f4")},
        )

    @pytest.mark.parametrize("bad", [None, "ragged"])
    def test_a_missing_value_in_a_later_group_is_refused(self, tmp_path, bad):
        values = [[1, 2], [3, 4], [5] if bad else [5, None]]
        table = pa.table({"v": pa.array(values, pa.list_(pa.float64()))})
        pa.parquet.write_table(table, tmp_path / "bad.parquet", row_group_size=2)
        with pytest.raises(ValueError, match="one shape and dtype") as caught:
            PrivateData(parquet_rows(tmp_path / "bad.parquet"), check_finite=True)
        assert UNPROTECTED in str(caught.value)

    def test_blocks_are_read_once_and_not_all_kept(self, tmp_path, monkeypatch):
        read = []

        def block(number, name):
            read.append(number)
            return np.arange(10 * number, 10 * number + 10)

        starts = np.arange(0, 101, 10)
        source = sources._Blocks(starts, ["v"], block)
        np.testing.assert_array_equal(source.rows(np.arange(100))["v"], np.arange(100))
        source.rows(np.array([55, 3, 55]))
        assert read == list(range(10))
        monkeypatch.setattr(sources, "_KEPT_BLOCKS", 200)
        few = sources._Blocks(starts, ["v"], block)
        few.rows(np.arange(100))
        assert few._size <= 200
        assert len(few._kept) <= 3

    def test_hdf5_of_plain_numbers_is_a_memory_map(self, tmp_path):
        found = hdf5(tmp_path, {"plain": np.arange(6.0), "big": np.arange(6, dtype=">i4")})
        assert isinstance(found["plain"], np.memmap)
        assert PrivateData(found).arrays["big"].dtype == np.dtype("i4")
        with pytest.raises(ValueError, match=r"\['z'\]"):
            hdf5_rows(tmp_path / "rows.h5", names=["z"])

    def test_structure_and_dtypes_must_be_those_of_all_rows(self):
        class Other(Own):
            def rows(self, numbers):
                found = super().rows(numbers)
                return found.astype(np.float64) if 20 in numbers else found

        with pytest.raises(ValueError, match="one shape and dtype, got float32") as caught:
            PrivateData(Other(ROWS["x"]))
        assert UNPROTECTED in str(caught.value)
        items = [{"x": 1.0}, {"x": 2}, {"y": 1.0}, {"x": [1.0]}]
        for second in (1, 2, 3):
            data = PrivateData(dataset_rows([items[0], items[second]]), check_finite=False)
            with pytest.raises(ValueError, match=r"one (shape|structure)") as caught:
                read_rows(data.arrays, np.arange(2))
            assert UNPROTECTED in str(caught.value)

    def test_refused(self):
        with pytest.raises(ValueError, match="at least one row"):
            PrivateData(Own(np.zeros((0, 3))))
        with pytest.raises(TypeError, match="__len__ and __getitem__"):
            dataset_rows(iter([1]))
        with pytest.raises(TypeError, match=r"mirrordp.data.dataset_rows\(dataset\)"):
            PrivateData(Items(ROWS, several=True))
        with pytest.raises(TypeError, match="got rows on disk"):
            np.asarray(PrivateData(Own(ROWS)).arrays["x"])
        with pytest.raises(ValueError, match="same number of rows"):
            PrivateData({"x": Own(ROWS["x"]), "y": ROWS["y"][:-1]})

    def test_copies_are_for_their_owner_alone(self, tmp_path):
        found = copy_rows({"a/b": Own(ROWS["x"]), "a_b": ROWS["y"]}, tmp_path / "copy")
        same(jax.tree.map(np.asarray, found), {"a/b": ROWS["x"], "a_b": ROWS["y"]})
        assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == 0o700
        for path in (tmp_path / "copy").iterdir():
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(FileExistsError):
            copy_rows(ROWS, tmp_path / "copy")
        with pytest.raises(TypeError, match="rows must be numbers"):
            copy_rows(np.array(["a", None], object), tmp_path / "text")


class TestChecks:
    def test_finiteness(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sources, "CHUNK", 64)
        x = tools.features()
        x[17, 1] = np.nan
        for rows in (Own(x), memory_maps(tmp_path, x)):
            with pytest.raises(ValueError, match=r"got 1 NaN .* column 1 \(1\)"):
                PrivateData(rows)
            assert len(PrivateData(rows, check_finite=False)) == 40

    def test_without_the_check_no_row_but_the_first_is_read(self):
        source = Own(ROWS)
        PrivateData(source, check_finite=False)
        assert source.read == 1

    def test_overlap(self, on_disk, monkeypatch):
        monkeypatch.setattr(sources, "CHUNK", 64)
        others = {"x": tools.features(seed=1), "y": ROWS["y"]}
        public = jax.tree.map(lambda a, b: np.concatenate([a[[3, 38]], b]), ROWS, others)
        with pytest.warns(UnprotectedWarning, match="2 private rows"):
            mask = excluded_rows(PrivateData(on_disk), PublicData(public))
        assert np.flatnonzero(mask).tolist() == [3, 38]
        with pytest.raises(ValueError, match="must be other rows than the private ones"):
            excluded_rows(PrivateData(on_disk), PublicData(ROWS))

    def test_minus_zero_is_zero(self):
        private = np.array([[1.0, 0.0], [2.0, 3.0]], np.float32)
        public = np.array([[1.0, -0.0], [5.0, 6.0], [7.0, 8.0], [9.0, 9.0]], np.float32)
        with pytest.warns(UnprotectedWarning, match="1 private row"):
            mask = excluded_rows(PrivateData(private), PublicData(public))
        assert mask.tolist() == [True, False]

    def test_fingerprints_do_not_depend_on_where_rows_are(self, on_disk, monkeypatch):
        monkeypatch.setattr(sources, "CHUNK", 64)
        key = bytes(32)
        found = fingerprint.of_arrays(key, PrivateData(on_disk).arrays)
        assert found == fingerprint.of_arrays(key, ROWS)
        other = {"x": ROWS["x"].copy(), "y": ROWS["y"]}
        other["x"][39, 2] += 1
        assert found != fingerprint.of_arrays(key, PrivateData(Own(other)).arrays)


STEPS = 6
MECHANISM = tools.mechanism(num_steps=STEPS, sampling=tools.poisson(capacity=5))


def loss(params, example):
    return 0.5 * jnp.sum((params - example["x"]) ** 2) * (1 + example["y"])


def run(private=ROWS, **options):
    if not isinstance(private, PrivateData):
        private = PrivateData(private)
    public = PublicData({"x": tools.features(9, seed=5), "y": np.zeros(9, np.int32)})
    defaults = {
        "mechanism": MECHANISM,
        "optimizer": tools.sgd(0.1),
        "public": public,
        "alpha": 0.5,
        "steps_per_call": 3,
        "seed": 1,
    }
    return tools.train(loss, jnp.ones(3), private, **(defaults | options))


def bits(state):
    params = jax.device_get(state.params)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def ended(*args, **options):
    return bits(tools.last(run(*args, **options))[0])


def mesh(size):
    return jax.make_mesh((size,), ("data",), devices=jax.devices()[:size])


@pytest.fixture(scope="module")
def in_memory():
    return ended()


class TestTraining:
    """Training from a source is training on the same rows in memory, to the bit."""

    def test_every_kind(self, on_disk, in_memory):
        assert ended(on_disk) == in_memory
        assert ended({"x": ROWS["x"] + 1, "y": ROWS["y"]}) != in_memory

    def test_held_in_small_calls(self, in_memory, monkeypatch):
        """A bound of one pass: more calls of fewer rows, and the same result."""
        source = Own(ROWS)
        monkeypatch.setattr(engine, "_MAX_STREAMED", 1)
        assert ended(source) == in_memory
        # A pass has 5 places; the only larger read was that of the checks.
        assert source.largest == 40
        source = Own(ROWS)
        data = PrivateData(source, check_finite=False)
        tools.last(run(data, public=None, alpha=1.0))
        assert source.largest <= 5

    def test_not_streamed_if_asked(self, in_memory):
        assert ended(Own(ROWS), stream=False) == in_memory

    def test_masked_rows(self):
        public = PublicData(jax.tree.map(lambda leaf: leaf[[1, 2, 3, 4]] + 1, ROWS))
        public.arrays["x"][0], public.arrays["y"][0] = ROWS["x"][9], ROWS["y"][9]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert ended(Own(ROWS), public=public) == ended(public=public)

    def test_resumed(self, few_kinds, in_memory, tmp_path):
        folder = tmp_path / "run"
        first = run(few_kinds, checkpoint=Checkpoint(folder))
        next(first)
        first.close()
        state, _ = tools.last(run(few_kinds, checkpoint=Checkpoint(folder, resume=True)))
        assert bits(state) == in_memory

    @pytest.mark.parametrize("begins_on_disk", [False, True])
    def test_rows_move_before_it_is_resumed(self, few_kinds, in_memory, tmp_path, begins_on_disk):
        before, after = (few_kinds, ROWS) if begins_on_disk else (ROWS, few_kinds)
        first = run(before, checkpoint=Checkpoint(tmp_path / "run"), stream=True)
        next(first)
        first.close()
        again = Checkpoint(tmp_path / "run", resume=True)
        # Without streaming it is another program, whose rounding may differ on other devices.
        with pytest.raises(CheckpointError, match=r"stream \(True then, False now"):
            run(after, checkpoint=again, stream=False)
        assert ended(after, checkpoint=again, stream=True) == in_memory

    def test_resumed_on_other_rows_is_refused(self, tmp_path):
        first = run(Own(ROWS), checkpoint=Checkpoint(tmp_path / "run"))
        next(first)
        first.close()
        other = Own({"x": ROWS["x"][::-1], "y": ROWS["y"]})
        with pytest.raises(CheckpointError, match="differs in: private data"):
            run(other, checkpoint=Checkpoint(tmp_path / "run", resume=True))

    def test_a_budget_knows_the_rows_on_disk(self, few_kinds, tmp_path):
        budget = Budget.create(tmp_path / "budget", epsilon=9.0, delta=1e-3, data=PrivateData(ROWS))
        tools.last(run(few_kinds, spend=budget))
        with pytest.raises(mirrordp.spending.budget.BudgetError):
            run(Own({"x": ROWS["x"] + 1, "y": ROWS["y"]}), spend=budget)

    @pytest.mark.parametrize("size", [2, 4])
    def test_on_a_mesh(self, few_kinds, size):
        options = {"mesh": mesh(size), "shards": 4, "mechanism": tools.mechanism(num_steps=STEPS)}
        assert ended(few_kinds, **options) == ended(**options)

    def test_on_a_mesh_of_secret_n(self):
        sampling = mirrordp.PoissonSampling(sampling_prob=0.2, expected_batch_size=8)
        mechanism = tools.mechanism(
            num_steps=STEPS, sampling=sampling, adjacency=mirrordp.Adjacency.ADD_REMOVE
        )
        options = {"mesh": mesh(2), "mechanism": mechanism}
        assert ended(Own(ROWS), **options) == ended(**options)
        assert ended(Own(ROWS), **options, stream=False) == ended(**options)

    def test_sweep(self, few_kinds):
        runs = [SweepRun(seed=seed, alpha=alpha) for seed, alpha in ((1, 0.5), (2, 1.0))]

        def swept(private):
            public = PublicData({"x": tools.features(9, seed=5), "y": np.zeros(9, np.int32)})
            found = tools.train_sweep(
                loss, jnp.ones(3), PrivateData(private), public, runs=runs,
                mechanism=MECHANISM, optimizer=tools.sgd(0.1), steps_per_call=3,
            )  # fmt: skip
            return bits(tools.last(found)[0])

        assert swept(few_kinds) == swept(ROWS)

    def test_secure(self):
        mechanism = tools.mechanism(noise=SecureGaussianNoise(num_params=3), num_steps=2)
        state, _ = tools.last(run(Own(ROWS), mechanism=mechanism, seed=None))
        assert np.isfinite(state.params).all()

    def test_an_error_of_the_source_ends_the_run(self):
        class Late(Own):
            broken = False

            def rows(self, numbers):
                if self.broken:
                    raise OSError("the disk is gone")
                return super().rows(numbers)

        source = Late(ROWS)
        steps = run(source, steps_per_call=1)
        next(steps)
        source.broken = True
        with pytest.raises(OSError, match="the disk is gone"):
            tools.last(steps)


class TestUsers:
    OWNERS = np.random.default_rng(0).integers(9, size=tools.ROWS)

    def clients(self, rows, **options):
        return PrivateClients.from_rows(
            rows, self.OWNERS, users=range(12), **({"max_examples_per_user": 4} | options)
        )

    def rounds(self, private, **options):
        mechanism = tools.mechanism(
            unit="user", num_steps=3, sampling=tools.poisson(batch_size=5, rows=12)
        )
        defaults = {"mechanism": mechanism, "client_learning_rate": 0.1, "seed": 1}
        found = tools.federated_train(loss, jnp.ones(3), private, **(defaults | options))
        return bits(tools.last(found)[0])

    def test_rows_by_user(self, on_disk):
        """Users 9 to 11 own nothing, some own more than the bound."""
        assert np.bincount(self.OWNERS).max() > 4
        found, expected = self.clients(on_disk), self.clients(ROWS)
        np.testing.assert_array_equal(found.num_examples, expected.num_examples)
        for user in range(12):
            same(found.user(user), expected.user(user))
        some = [3, 11, 0]
        for user in range(3):
            same(found.take(some).user(user), expected.take(some).user(user))
        assert repr(found) == repr(expected)

    @pytest.mark.parametrize("options", [{}, {"mesh": 2}, {"users_per_pass": 2}, {"stream": False}])
    def test_training(self, few_kinds, options):
        if "mesh" in options:
            options = {"mesh": mesh(options["mesh"])}
        found = self.rounds(self.clients(few_kinds), **options)
        assert found == self.rounds(self.clients(ROWS), **options)

    def test_only_the_rows_of_the_cohort_are_read(self):
        rows = {"x": np.ones((1000, 3), np.float32), "y": np.zeros(1000, np.int32)}
        source = Own(rows)
        private = PrivateClients(source, np.full(500, 2), None, 50)
        sampling = tools.poisson(batch_size=5, rows=500)
        mechanism = tools.mechanism(unit="user", num_steps=3, sampling=sampling)
        self.rounds(private, mechanism=mechanism)
        assert source.read < 100

    def test_public_users_are_read_into_memory(self, on_disk):
        found = PublicClients.from_rows(on_disk, self.OWNERS)
        assert not sources.on_disk(found.arrays)
        same(found.user(2), PublicClients.from_rows(ROWS, self.OWNERS).user(2))


def test_a_split_leaves_private_rows_on_disk():
    private, public = mirrordp.split_rows(Own(ROWS), public_fraction=0.2, seed=0)
    expected = mirrordp.split_rows(ROWS, public_fraction=0.2, seed=0)
    assert sources.on_disk(private.arrays)
    same(read_rows(private.arrays, np.arange(len(private))), expected[0].arrays)
    same(public.arrays, expected[1].arrays)


def test_one_file_does_not_decide_the_type_of_all(tmp_path):
    """Arrow would round the numbers of all files to the precision of the first one."""
    folder = tmp_path / "users"
    folder.mkdir()
    numbers = np.random.default_rng(0).normal(size=5)
    for name, dtype in (("a", "float16"), ("b", "float32")):
        table = pa.table({"x": numbers.astype(dtype), "unused": numbers.astype(dtype)})
        pa.parquet.write_table(table, folder / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"column 'x' must have one type .* halffloat and float"):
        parquet_rows(folder, columns=["x"])
    pa.parquet.write_table(
        pa.table({"x": numbers.astype("float32"), "unused": numbers}), folder / "a.parquet"
    )
    assert parquet_rows(folder, columns=["x"])["x"].dtype == np.float32


def test_names_may_be_stored_as_dictionaries_of_any_size(tmp_path):
    for name, index in (("a", pa.int8()), ("b", pa.int16())):
        names = pa.array(["x", "y"], pa.dictionary(index, pa.string()))
        pa.parquet.write_table(pa.table({"name": names}), tmp_path / f"{name}.parquet")
    parquet_rows(tmp_path)


def test_types_that_say_how_values_are_stored_may_differ(tmp_path):
    numbers = [[1.0], [2.0]]
    schemas = (
        [pa.string(), pa.list_(pa.float64()), pa.timestamp("us"), pa.float32()],
        [pa.large_string(), pa.large_list(pa.float64()), pa.timestamp("us", "UTC"), pa.null()],
    )
    for name, types in zip("ab", schemas, strict=True):
        cells = (["x", "y"], numbers, [1, 2], [None, None])
        columns = [pa.array(cell, kind) for cell, kind in zip(cells, types, strict=True)]
        table = pa.table(dict(zip(("text", "list", "time", "none"), columns, strict=True)))
        pa.parquet.write_table(table, tmp_path / f"{name}.parquet")
    parquet_rows(tmp_path, columns=["text", "list", "time", "none"], decode=lambda row: {"a": 1.0})
