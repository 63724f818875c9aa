"""A fit to rows on disk is the fit to the same rows in memory, to the bit, in little memory."""

import contextlib
import tempfile
import tracemalloc
import types
import warnings
from typing import Any, cast

import numpy as np
import pytest

from mirrordp import cli
from mirrordp.data import PrivateData, rows, sources
from mirrordp.linear import _network
from mirrordp.linear._noting import tell
from mirrordp.linear.descent import ClippedSum, Rows
from mirrordp.linear.estimators import PrivateLinearRegression
from mirrordp.mirror.families import LOGISTIC
from mirrordp.tables import TableError, files as files_of_tables
from mirrordp.tables.fitting import fit_files
from tests.test_sources import memory_maps, resident


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    """Hundreds of rows are several blocks, and temporary files have a folder of their own."""
    monkeypatch.setattr(sources, "_BLOCK_NUMBERS", 2**11)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def draw(size, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 4))
    return x, x @ [1.0, -2.0, 0.5, 0.0] + 0.3 * rng.normal(size=size)


@pytest.fixture
def files(tmp_path):
    for name, size in (("private", 2500), ("public", 120), ("test", 50)):
        x, y = draw(size, len(name))
        kind = np.array(["red", "green", "odd"])[np.where(x[:, 1] > 2, 2, x[:, 0] > 0)]
        lines = [",".join([*map(str, row), word]) for row, word in zip(x, kind, strict=True)]
        targets = (
            f"{value},{int(value > 0)},{max(0, int(3 + value))}" if number % 50 else ",,"
            for number, value in enumerate(y)
        )
        text = "\n".join(f"{one},{other}" for one, other in zip(lines, targets, strict=True))
        (tmp_path / f"{name}.csv").write_text(f"a,b,c,d,kind,y,class,count\n{text}\n")
    return tmp_path


def fitted(folder, target="y", task="regression", **options):
    others = {"y", "class", "count"} - {target}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cells beyond those of public rows, and of many fits
        found = fit_files(
            folder / "private.csv", folder / "public.csv", target=target, task=task, epsilon=2.0,
            delta=1e-5, seed=0, ignore=sorted(others), **options,
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("target", "task", "options"),
    [
        ("y", "regression", {"model": "linear", "guard": True}),
        ("class", "classification", {"model": "linear"}),
        ("count", "ordinal", {}),
        ("count", "count", {"model": "trees"}),
    ],
)
def test_the_model_is_the_same(files, target, task, options):
    small, large = (
        fitted(files, target, task, memory=memory, **options) for memory in (1000, np.inf)
    )
    assert small.model.scorer.to_dict() == large.model.scorer.to_dict()
    assert small.report.epsilon == large.report.epsilon
    assert small.report.charged_steps == large.report.charged_steps > 0
    assert small.unprotected_cells == large.unprotected_cells
    assert "of 2500 rows without a usable target" in small.unprotected_cells[target]


def test_a_network_has_the_same_rows(tmp_path):
    """Training on memory maps is compared in test_sources.py."""
    x, y = draw(1500, 0)
    x[700] = 1e300  # more than float32 can hold
    maps = memory_maps(tmp_path, {"x": x, "y": y})
    network = cast(Any, types.SimpleNamespace(shift=np.ones(4), factor=np.full(4, 0.5)))
    found = [
        _network.scaled_rows(network, Rows(arrays["x"], arrays["y"][:, None], counts=y < 1))
        for arrays in ({"x": x, "y": y}, maps)
    ]
    assert [sources.is_on_disk(array) for array in found[1]] == [True] * 3
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
        assert not one[700].any()
    np.testing.assert_allclose(found[0][0][:700], (x[:700] - 1) / 2, rtol=1e-6)


def test_a_row_on_disk_moves_the_sum_by_at_most_the_clip_norm(tmp_path):
    x, y = draw(1300, 0)
    sums = []
    for value in (x[700], np.full(4, 1e9), np.full(4, np.inf), np.zeros(4)):
        x[700] = value
        mapped = np.memmap(tmp_path / "x", np.float64, "w+", shape=x.shape)
        mapped[:] = x
        found = Rows(mapped, (y > 0)[:, None] * 1.0, counts=y < 1)
        sums.append(ClippedSum(LOGISTIC, 0.5)(np.ones((4, 1)), found))
        in_memory = Rows(x.copy(), (y > 0)[:, None] * 1.0, counts=y < 1)
        same = ClippedSum(LOGISTIC, 0.5)(np.ones((4, 1)), in_memory)
        np.testing.assert_array_equal(sums[-1], same)
    *others, without = sums
    moved = [np.linalg.norm(one - without) for one in others]
    assert 0 < moved[0] <= 0.5
    assert moved[1] == pytest.approx(0.5, rel=1e-4)
    assert moved[1] <= 0.5
    assert moved[2] == 0.0


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK_NUMBERS", 2**17)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400_000, 20))
    maps = memory_maps(tmp_path, {"x": x, "y": x[:, 0]})
    public = rng.normal(size=(200, 20))
    tracemalloc.start()
    model = PrivateLinearRegression(num_steps=2, learning_rate=0.5, l2_clip_norm=1.0)
    model.fit(maps["x"], maps["y"], public, public[:, 0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes / 2
    # Mapped pages do not count as allocated.
    fresh, before = np.load(maps["x"].filename, mmap_mode="r"), resident()
    for block in sources.row_blocks(fresh):
        fresh[block].sum()
    assert resident() - before < x.nbytes / 2


def test_temporary_files_have_no_name(tmp_path):
    gathered = sources.GatheredRows(memory=400)
    for start in range(0, 50, 10):
        gathered.append(np.arange(start, start + 10), np.ones((10, 2), np.float32))
    numbers, ones = gathered.finish()
    assert sources.is_on_disk(numbers)
    assert sources.is_on_disk(ones)
    np.testing.assert_array_equal(numbers, np.arange(50))
    assert ones.shape == (50, 2)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_no_room_is_one_sentence(files, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(files / "missing"))
    monkeypatch.setattr("mirrordp.tables.fitting.fit_files.__kwdefaults__", {
        **fit_files.__kwdefaults__, "memory": 1000,
    })  # fmt: skip
    options = {"--private": files / "private.csv", "--public": files / "public.csv"}
    options |= {"--target": "y", "--task": "regression", "--epsilon": 1, "--out": files / "model"}
    assert cli.main(["fit", *(str(word) for pair in options.items() for word in pair)]) == 2
    assert "set TMPDIR to a folder on a disk with more room" in capsys.readouterr().err


def test_a_ceiling_needs_rows_in_memory(files):
    with pytest.raises(TableError, match="expected private rows that fit in memory for --ceiling"):
        fitted(files, test=files / "test.csv", ceiling=True, memory=1000)


@pytest.mark.parametrize("model", ["linear", "trees"])
def test_it_says_how_far_it_is(files, model):
    noted = []
    found = fitted(files, model=model, stage=lambda _: contextlib.nullcontext(noted.append))
    assert noted[0] == "2,500 rows"
    steps = found.report.charged_steps
    ends = [f"step {step} of {steps}" for step in range(1, steps + 1)]
    assert noted[1:] == ends
    tell("nobody listens any more")
    assert noted[-1] == ends[-1]


def test_the_share_of_repeated_rows_needs_no_room(monkeypatch):
    x = np.random.default_rng(0).integers(40, size=(3000, 2)).astype(np.float64)
    _, counts = np.unique(x, axis=0, return_counts=True)
    expected = counts[counts > 1].sum() / len(x)
    for at_once in (2**23, 100):
        monkeypatch.setattr(rows, "_HASHES", at_once)
        assert rows._share_repeated(PrivateData(x), len(x), rows._alone) == expected


def test_a_parquet_file_is_never_all_in_memory(tmp_path):
    """Arrow's own default keeps the bytes of every group that was read."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    x = np.random.default_rng(0).normal(size=2**20)
    pyarrow.parquet.write_table(pa.table({"x": x}), tmp_path / "rows.parquet", row_group_size=2**14)
    before, most, count = pa.total_allocated_bytes(), 0, 0
    for batch in files_of_tables.read_batches(tmp_path / "rows.parquet", private=True):
        count += len(batch)
        most = max(most, pa.total_allocated_bytes() - before)
    assert count == len(x)
    assert most < x.nbytes / 2
