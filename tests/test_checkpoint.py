"""Checkpoints: resuming is the same run to the bit, damage is survived or named, secrets stay."""

import errno
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp import Budget, Checkpoint, FileLedger, Ledger, PrivateData, PublicData, cli
from mirrordp.cli import fit as cli_fit
from mirrordp.linear import descent as linear
from mirrordp.privacy import accounting
from mirrordp.spending.budget import BudgetError
from mirrordp.spending.files import LockedError
from mirrordp.spending.ledger import LedgerError, Position
from mirrordp.training import engine
from mirrordp.training.bookkeeping import Books
from mirrordp.training.checkpoint import (
    CheckpointError,
    Saved,
    checkpoint_files,
    from_arrays,
    is_unfinished,
    machine,
    program,
    to_arrays,
)
from mirrordp.training.shown import digest
from tests import tools
from tests.test_cli_fit import fit_options, make_table, two_tables
from tests.test_training import bits
from tests.tools import last, mechanism, sgd

PRIVATE = PrivateData(tools.features())
PUBLIC = PublicData(tools.features(rows=10, seed=1))
THETA = jnp.array([0.5, -0.5, 0.25])
ADAM = optax.adam(0.1)
MECHANISM = mechanism()


def run(folder=None, *, private=PRIVATE, public=PUBLIC, loss=tools.squared_distance, **options):
    """A small run; with a folder it keeps checkpoints there."""
    checkpoint = {
        name: options.pop(name) for name in ("every", "resume", "keep") if name in options
    }
    defaults = {
        "mechanism": MECHANISM,
        "optimizer": ADAM,
        "alpha": 0.5,
        "average": mirrordp.UniformAverage(),
        "seed": 0,
        "steps_per_call": 3,
        "checkpoint": None if folder is None else Checkpoint(folder, **checkpoint),
    }
    return tools.train(loss, options.pop("params", THETA), private, public,
                          **(defaults | options))  # fmt: skip


def interrupted(folder, yields, **options):
    """A run that stops after so many yields, as a process that was killed there."""
    steps = run(folder, **options)
    for _ in range(yields):
        next(steps)
    steps.close()


@functools.cache
def uninterrupted():
    return last(run())


def contents(folder):
    """The files of a run folder, except locks, which hold nothing."""
    files = [path for path in folder.iterdir() if not path.name.endswith("lock")]
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run that was left after one yield; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    interrupted(folder, 1)
    return folder


@pytest.fixture
def folder(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


class TestResume:
    @pytest.mark.parametrize("yields", [0, 1, 3, 4])
    def test_to_the_bit(self, tmp_path, yields):
        state, info = uninterrupted()
        interrupted(tmp_path / "run", yields)
        resumed = list(run(tmp_path / "run", resume=True))
        # The state of the checkpoint comes once more: its receiver may not have survived it.
        assert [found.step for _, found in resumed] == [3, 6, 9, 12][max(0, yields - 1) :]
        assert bits(resumed[-1][0]) == bits(state)
        assert all(found.seeded for _, found in resumed)
        np.testing.assert_array_equal(resumed[-1][1].noisy_grad_norm, info.noisy_grad_norm)
        assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").event == MECHANISM.event

    @pytest.mark.parametrize(
        "options",
        [
            {
                "mechanism": mechanism(
                    sampling=mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
                        5, num_examples=40, num_groups=3
                    ),
                    noise=mirrordp.privacy.BandedNoise((1.0, 0.5, 0.2)),
                )
            },
            {"alpha": [0.5, 0.0, 1.0] * 4, "show_unprivatized": True, "public_batch_size": 4},
            {
                "loss": tools.keyed_distance,
                "private": PrivateData({"x": tools.features(), "weight": np.ones(40, np.float32)}),
                "public": None,
                "alpha": 1.0,
                "stream": True,
            },
            {
                "optimizer": mirrordp.updates.mirror_descent(mirrordp.mirror.EuclideanMap(3), 0.1),
                "alpha": 1.0,
                "every": 2,
                "params": {"a": THETA.astype(jnp.bfloat16)[:1].astype(jnp.float32), "b": THETA[1:]},
                "loss": lambda p, x: tools.squared_distance(jnp.concatenate([p["a"], p["b"]]), x),
            },
        ],
        ids=["banded noise", "alpha schedule", "keyed loss, streamed", "mirror descent"],
    )
    def test_every_part_of_the_state(self, tmp_path, options):
        plain = {name: value for name, value in options.items() if name != "every"}
        state, info = last(run(**plain))
        interrupted(tmp_path / "run", 3, **options)
        again, found = last(run(tmp_path / "run", resume=True, **options))
        assert bits(again) == bits(state)
        assert found.charged_steps == info.charged_steps
        if info.unprivatized is not None:
            assert found.unprivatized is not None
            assert bits(found.unprivatized) == bits(info.unprivatized)
        charged = options.get("mechanism", MECHANISM).event_between(0, info.charged_steps)
        assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").event == charged

    def test_a_finished_run_whose_last_block_was_short(self, tmp_path):
        interrupted(tmp_path / "run", 3, steps_per_call=5)
        resumed = list(run(tmp_path / "run", resume=True, steps_per_call=5))
        assert [found.step for _, found in resumed] == [12]
        assert bits(resumed[-1][0]) == bits(uninterrupted()[0])
        assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").event == MECHANISM.event

    def test_randomness_of_the_system_is_kept_until_the_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr("secrets.randbits", lambda _: 123)
        whole, _ = last(run(seed=None))
        interrupted(tmp_path / "run", 2, seed=None)
        # Fresh randomness now would be another run.
        monkeypatch.setattr("secrets.randbits", lambda _: 456)
        resumed = list(run(tmp_path / "run", resume=True, seed=None))
        assert bits(resumed[-1][0]) == bits(whole)
        # What the run folder keeps is no seed of the caller's.
        assert [info.seeded for _, info in resumed] == [False] * 3

    def test_a_step_that_was_charged_and_not_kept_is_charged_once(self, tmp_path, monkeypatch):
        steps = run(tmp_path / "run")
        next(steps)
        monkeypatch.setattr(Books, "_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        monkeypatch.undo()
        assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").records[-1]["stop"] == 6
        state, _ = last(run(tmp_path / "run", resume=True))
        assert bits(state) == bits(uninterrupted()[0])
        assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").event == MECHANISM.event

    def test_the_order_is_randomness_charge_result_checkpoint_yield(self, tmp_path, monkeypatch):
        folder, order = tmp_path / "run", []

        def record(name, function):
            def called(*args, **options):
                order.append(name)
                return function(*args, **options)

            return called

        monkeypatch.setattr(Books, "_save", record("save", Books._save))
        monkeypatch.setattr(FileLedger, "charge", record("charge", FileLedger.charge))
        monkeypatch.setattr(engine, "_run_passes", record("run", engine._run_passes))
        for _ in run(folder):
            order.append("yield")
        assert order == ["save", *["charge", "run", "save", "yield"] * 4]

    def test_two_runs_in_one_folder_share_its_ledger(self, tmp_path):
        for _ in range(2):
            last(run(tmp_path / "run"))
        ledger = FileLedger.read(tmp_path / "run" / "ledger.jsonl")
        assert ledger.event == dp_accounting_repeated(MECHANISM.event, 2)

    def test_an_unfinished_run_is_not_overwritten(self, folder):
        with pytest.raises(CheckpointError, match="Resume it"):
            run(folder)

    def test_a_seed_however_it_is_written(self, tmp_path):
        interrupted(tmp_path / "run", 1, seed=True)
        state, _ = last(run(tmp_path / "run", resume=True, seed=np.uint8(1)))
        assert bits(state) == bits(last(run(seed=1))[0])

    def test_with_a_ledger_file_of_ones_own(self, tmp_path):
        with FileLedger.create(tmp_path / "ledger.jsonl", MECHANISM.adjacency) as ledger:
            interrupted(tmp_path / "run", 2, spend=ledger)
            last(run(tmp_path / "run", resume=True, spend=ledger))
            assert ledger.event == MECHANISM.event
        assert not (tmp_path / "run" / "ledger.jsonl").exists()

    def test_a_ledger_in_memory_would_not_survive(self, tmp_path):
        with pytest.raises(ValueError, match="survives a crash"):
            run(tmp_path / "run", spend=Ledger(MECHANISM.adjacency))

    def test_a_budget_pays_once_and_is_asked_again(self, tmp_path):
        options = {"epsilon": 3.0, "delta": 1e-6, "data": PRIVATE}
        with Budget.create(tmp_path / "budget", **options) as budget:
            interrupted(tmp_path / "run", 2, spend=budget)
            assert budget.ledger.event == MECHANISM.event_between(0, 6)
            last(run(tmp_path / "run", resume=True, spend=budget))
            assert budget.ledger.event == MECHANISM.event
            # Another run took what the unfinished one would need.
            interrupted(tmp_path / "other", 1, spend=budget, seed=None)
            budget.charge(accounting.full_batch_event(1.01 * budget.least_noise, num_steps=1))
            with pytest.raises(BudgetError, match="within the budget"):
                run(tmp_path / "other", resume=True, spend=budget, seed=None)


def dp_accounting_repeated(event, count):
    return type(event)(event.event, count * event.count)


def interrupt(*_, **__):
    raise KeyboardInterrupt


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"mechanism": mechanism(noise_multiplier=5.0)}, "mechanism"),
            (
                {"mechanism": mechanism(l2_clip_norm=2.0)},
                r" mechanism.l2_clip_norm \(1.0 then, 2.0 now\)\. Resume",
            ),
            ({"optimizer": optax.adam(0.1001)}, "optimizer"),
            ({"optimizer": sgd(0.1)}, "optimizer"),
            ({"alpha": 0.6}, "alpha"),
            ({"average": None}, "average"),
            ({"seed": 1}, "seed"),
            ({"seed": None}, "seed"),
            ({"steps_per_call": 4}, "steps_per_call"),
            ({"noisy_clip_norm": 1.0}, "noisy_clip_norm"),
            ({"automatic_clip": True}, "automatic_clip"),
            ({"scale_noise": False}, "scale_noise"),
            ({"params": THETA + 1}, "starting parameters"),
            ({"loss": lambda p, x: 2 * tools.squared_distance(p, x)}, "loss_fn"),
            ({"private": PrivateData(tools.features() + np.float32(1e-6))}, "private data"),
            ({"private": PrivateData(tools.features()[::-1].copy())}, "private data"),
            ({"public": PublicData(tools.features(rows=10, seed=2))}, "public data"),
        ],
    )
    def test_another_run(self, folder, options, named):
        before = contents(folder)
        with pytest.raises(CheckpointError, match=f"differs in:.*{named}"):
            run(folder, resume=True, **options)
        # Nothing was lost by trying, and the folder is not left locked.
        assert contents(folder) == before
        assert is_unfinished(folder)

    def test_nothing_is_lost_by_trying_another_run(self, folder):
        with pytest.raises(CheckpointError, match=r"differs in:.*alpha"):
            run(folder, resume=True, alpha=0.6)
        state, _ = last(run(folder, resume=True))
        assert bits(state) == bits(uninterrupted()[0])

    def test_another_version_of_a_library(self, folder, monkeypatch):
        monkeypatch.setattr(
            "mirrordp.training.checkpoint.library_versions", lambda: {"jax": "0.0.1"}
        )
        with pytest.raises(CheckpointError, match=r"version of jax \(.* then, 0.0.1 now\)"):
            run(folder, resume=True)

    def test_a_run_of_a_version_that_drew_other_batches(self, folder, monkeypatch):
        monkeypatch.setattr("mirrordp.training.checkpoint.DRAWS", "a permutation first")
        with pytest.raises(CheckpointError, match="differs in: way of drawing batches"):
            run(folder, resume=True)

    def test_another_way_to_draw_from_a_key(self, tmp_path):
        """Steps that were shown and not kept would be shown again with other noise, for nothing."""
        interrupted(tmp_path / "run", 1, every=2)
        before = jax.config.jax_threefry_partitionable
        jax.config.update("jax_threefry_partitionable", not before)
        try:
            with pytest.raises(CheckpointError, match="differs in: noise of a key"):
                run(tmp_path / "run", resume=True, every=2)
        finally:
            jax.config.update("jax_threefry_partitionable", before)
        state, _ = last(run(tmp_path / "run", resume=True, every=2))
        assert bits(state) == bits(uninterrupted()[0])

    def test_batches_that_come_out_another_way(self, folder, monkeypatch):
        right = engine.randomness

        def other_batches(*args, **options):
            return np.random.default_rng(99), right(*args, **options)[1]

        monkeypatch.setattr(engine, "randomness", other_batches)
        with pytest.raises(CheckpointError, match="to be drawn again as they were"):
            next(run(folder, resume=True))

    def test_another_number_of_processors_where_steps_are_replayed(self, tmp_path, monkeypatch):
        """What counts are those that the process may use: `taskset` changes how sums are cut."""
        for every in (1, 2):
            interrupted(tmp_path / str(every), 3, every=every)
        interrupted(tmp_path / "damaged", 3)
        spoil(max(checkpoint_files(tmp_path / "damaged").items())[1], "cut")
        many = {0} | set(range(2, 1000))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: many, raising=False)
        last(run(tmp_path / "1", resume=True))
        for every in (2, 1):
            with pytest.raises(CheckpointError, match="differs in: number of processors"):
                run(tmp_path / "2", resume=True, every=every)
        with (
            pytest.warns(UserWarning, match="going on from the one before"),
            pytest.raises(CheckpointError, match="differs in: number of processors"),
        ):
            run(tmp_path / "damaged", resume=True)

    def test_a_run_that_is_over_is_not_begun_again_in_silence(self, tmp_path):
        last(run(tmp_path / "run", resume=True))
        with pytest.warns(UserWarning, match="which is charged in addition"):
            last(run(tmp_path / "run", resume=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            last(run(tmp_path / "run"))
            last(run(tmp_path / "kept", keep=True, resume=True))
            last(run(tmp_path / "kept", keep=True, resume=True))

    def test_another_kind_of_machine_where_steps_are_replayed(self, tmp_path, monkeypatch):
        """An older processor has other instructions, which round differently."""
        for every in (1, 2):
            interrupted(tmp_path / str(every), 3, every=every)
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2")
        last(run(tmp_path / "1", resume=True))
        with pytest.raises(CheckpointError, match="differs in: kind of processor, its memory"):
            run(tmp_path / "2", resume=True, every=2)
        monkeypatch.undo()
        last(run(tmp_path / "2", resume=True, every=2))

    def test_another_memory_where_it_decides_how_a_step_is_computed(self, tmp_path, monkeypatch):
        """How many rows are taken at a time follows from it, and rounding from that."""
        for name, size in (("by memory", None), ("given", 20)):
            interrupted(tmp_path / name, 3, every=2, microbatch_size=size)
        monkeypatch.setattr("mirrordp.training.checkpoint.device_memory", lambda: 2**30)
        last(run(tmp_path / "given", resume=True, every=2, microbatch_size=20))
        with pytest.raises(CheckpointError, match="differs in: kind of processor, its memory"):
            run(tmp_path / "by memory", resume=True, every=2)

    def test_a_machine_is_described_by_what_compilers_look_at(self, monkeypatch):
        here = machine(sizes_follow_memory=True)
        assert here == machine(sizes_follow_memory=True) != machine(sizes_follow_memory=False)
        text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        if "avx2" in text:
            read = Path.read_text
            monkeypatch.setattr(
                Path,
                "read_text",
                lambda path, **options: (
                    text.replace("avx2", "sse")
                    if path == Path("/proc/cpuinfo")
                    else read(path, **options)
                ),
            )
            assert machine(sizes_follow_memory=True) != here
            monkeypatch.undo()
        with jax.default_matmul_precision("bfloat16"):
            assert machine(sizes_follow_memory=True) != here

    def test_a_device_that_cannot_replay(self, tmp_path, monkeypatch):
        """The checkpoint before the newest is behind what was shown, and rare ones always are."""
        interrupted(tmp_path / "rare", 1, every=2)
        interrupted(tmp_path / "damaged", 3)
        spoil(max(checkpoint_files(tmp_path / "damaged").items())[1], "cut")
        interrupted(tmp_path / "intact", 3)
        monkeypatch.setattr("mirrordp.training.checkpoint._is_exact", lambda: False)
        last(run(tmp_path / "intact", resume=True))
        with pytest.raises(CheckpointError, match="replay steps to the bit"):
            run(tmp_path / "rare", resume=True)
        with (
            pytest.warns(UserWarning, match="going on from the one before"),
            pytest.raises(CheckpointError, match="replay steps to the bit"),
        ):
            run(tmp_path / "damaged", resume=True)

    def test_the_values_a_loss_closes_over(self):
        def loss(scale):
            return lambda x: jnp.sum(jnp.asarray(scale) * x)

        def hashed(scale):
            return program("loss", loss(scale), jax.ShapeDtypeStruct((100,), jnp.float32))

        ones, other = np.ones(100, np.float32), np.ones(100, np.float32)
        other[7] = 2
        assert hashed(ones) == hashed(ones.copy())
        assert hashed(ones) != hashed(other)
        assert hashed(jnp.asarray(ones)) != hashed(jnp.asarray(other))

    def test_a_ledger_with_a_cut_tail_or_another_one(self, tmp_path):
        with FileLedger.create(tmp_path / "a.jsonl", MECHANISM.adjacency) as ledger:
            interrupted(tmp_path / "run", 2, spend=ledger)
        with (
            FileLedger.create(tmp_path / "b.jsonl", MECHANISM.adjacency) as other,
            pytest.raises(LedgerError, match="old copy"),
        ):
            run(tmp_path / "run", resume=True, spend=other)

    def test_two_at_once(self, tmp_path):
        steps = run(tmp_path / "run")
        next(steps)
        with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
            run(tmp_path / "run", resume=True)
        steps.close()
        last(run(tmp_path / "run", resume=True))

    def test_a_mistake_leaves_no_lock_behind(self, folder):
        with pytest.raises(CheckpointError, match="differs") as kept:
            run(folder, resume=True, seed=5)
        last(run(folder, resume=True))
        assert kept.tb is not None  # its frames were alive all the while

    def test_rare_checkpoints_need_exact_replay(self, tmp_path, monkeypatch):
        class Gpu:
            platform = "gpu"

        monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
        Checkpoint(tmp_path)
        with pytest.raises(ValueError, match="deterministic_ops"):
            Checkpoint(tmp_path, every=2)
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
        Checkpoint(tmp_path, every=2)


class Scale:
    """A number that a loss reads when it is traced."""

    value = 1.0


def scaled_distance(params, example):
    return Scale.value * tools.squared_distance(params, example)


class TestWhatWasShown:
    """Two sums under one noise: what is computed again is compared before it is shown again."""

    def test_other_values_are_not_shown(self, tmp_path, monkeypatch):
        """A program that was compiled before a number changed is not the one that is compared."""
        last(run(loss=scaled_distance))
        monkeypatch.setattr(Scale, "value", 0.5)
        interrupted(tmp_path / "run", 3, loss=scaled_distance, every=2)
        shown = (tmp_path / "run" / "shown").read_text()
        assert [int(line.split()[0]) for line in shown.splitlines()] == [3, 6, 9]
        jax.clear_caches()
        resumed = run(tmp_path / "run", loss=scaled_distance, every=2, resume=True)
        assert next(resumed)[1].step == 6
        with pytest.raises(CheckpointError, match=r"step 9 .* got other values"):
            next(resumed)

    def test_a_state_that_only_a_damaged_checkpoint_holds(self, tmp_path):
        interrupted(tmp_path / "run", 3)
        spoil(max(checkpoint_files(tmp_path / "run").items())[1], "cut")
        shown, other = tmp_path / "run" / "shown", f"9 {'0' * 32}"
        line = f"{other} {zlib.crc32(other.encode()):08x}"
        shown.write_text(re.sub("^9 .*$", line, shown.read_text(), flags=re.MULTILINE))
        with pytest.warns(UserWarning, match="going on from the one before"):
            resumed = run(tmp_path / "run", resume=True)
        assert next(resumed)[1].step == 6
        with pytest.raises(CheckpointError, match="step 9"):
            next(resumed)

    @pytest.mark.parametrize("tail", [b"12 abc", b"12 " + 32 * b"0", b"\xff"])
    def test_a_line_that_is_cut_is_of_a_state_that_nobody_saw(self, tmp_path, tail):
        interrupted(tmp_path / "run", 3, every=2)
        path = tmp_path / "run" / "shown"
        intact = path.read_bytes()
        path.write_bytes(intact + tail)
        steps = run(tmp_path / "run", every=2, resume=True, keep=True)
        assert [info.step for _, info in steps] == [6, 9, 12]
        assert path.read_bytes().startswith(intact)
        assert len(path.read_bytes().splitlines()) == 4

    @pytest.mark.parametrize("damage", ["flipped", "joined", "zeros"])
    def test_a_damaged_line_is_named(self, tmp_path, damage):
        interrupted(tmp_path / "run", 3)
        path = tmp_path / "run" / "shown"
        first, *others = path.read_bytes().splitlines(keepends=True)
        if damage == "flipped":
            first = first[:5] + (b"1" if first[5:6] == b"0" else b"0") + first[6:]
        else:
            first = first.rstrip(b"\n") if damage == "joined" else bytes(len(first) - 1) + b"\n"
        path.write_bytes(b"".join([first, *others]))
        with pytest.raises(CheckpointError, match=r"list of what was shown .* \(line 1\)"):
            run(tmp_path / "run", resume=True)

    def test_what_a_resumed_run_shows_first_is_noted(self, tmp_path):
        """It may have been killed between the checkpoint and the note."""
        interrupted(tmp_path / "run", 2)
        path = tmp_path / "run" / "shown"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(lines[0])
        interrupted(tmp_path / "run", 1, resume=True)
        assert path.read_bytes().splitlines(keepends=True) == lines

    def test_a_checkpoint_that_was_damaged_is_remembered(self, tmp_path, monkeypatch):
        """The first attempt removes it; the second one must be as careful."""
        interrupted(tmp_path / "run", 3)
        spoil(max(checkpoint_files(tmp_path / "run").items())[1], "cut")
        monkeypatch.setattr("mirrordp.training.checkpoint._is_exact", lambda: False)
        refused = functools.partial(pytest.raises, CheckpointError, match="replay steps to the bit")
        with pytest.warns(UserWarning, match="going on from the one before"), refused():
            run(tmp_path / "run", resume=True)
        with refused():
            run(tmp_path / "run", resume=True)

    @pytest.mark.parametrize("every", [1, 3])
    def test_a_mirror_map_keeps_its_float64(self, tmp_path, every):
        rng = np.random.default_rng(0)
        hessian = np.cov(rng.normal(size=(20, 3)).T)
        geometry = mirrordp.mirror.QuadraticMap.from_hessian(hessian, np.zeros(3))
        ball = mirrordp.mirror.Ball(0.5)
        options = {
            "optimizer": mirrordp.updates.mirror_descent(geometry, 0.1, constraint=ball),
            "alpha": 1.0,
            "every": every,
        }
        whole, _ = last(run(**{name: value for name, value in options.items() if name != "every"}))
        interrupted(tmp_path / "run", 2, **options)
        resumed, _ = last(run(tmp_path / "run", resume=True, **options))
        assert bits(resumed) == bits(whole)
        wide = [leaf.dtype for leaf in jax.tree.leaves(resumed.opt_state)]
        assert np.dtype("float64") in wide

    def test_it_goes_with_the_other_secrets(self, tmp_path):
        last(run(tmp_path / "run"))
        assert not (tmp_path / "run" / "shown").exists()
        last(run(tmp_path / "run", keep=True, every=2))
        assert (tmp_path / "run" / "shown").stat().st_mode & 0o077 == 0
        Checkpoint(tmp_path / "run").remove()
        assert not (tmp_path / "run" / "shown").exists()

    def test_numbers_of_a_weak_type_take_the_same_type_after_a_crash(self, tmp_path):
        """A checkpoint knows nothing of weak types: with them, bfloat16 would become float32."""

        def init(params):
            return jnp.asarray(0.3)

        def update(gradient, rate, params=None):
            return jax.tree.map(lambda g: -(rate * g) * 1.7, gradient), rate * 0.95

        options = {
            "optimizer": optax.GradientTransformation(init, update),
            "params": THETA.astype(jnp.bfloat16),
            "average": None,
        }
        state, _ = last(run(**options))
        interrupted(tmp_path / "run", 3, every=2, **options)
        resumed = last(run(tmp_path / "run", resume=True, every=2, **options))
        assert bits(resumed[0]) == bits(state)
        assert not state.opt_state.weak_type

    def test_a_digest_depends_on_every_bit_and_on_nothing_else(self):
        tree = {
            "a": jnp.arange(12.0).reshape(3, 4),
            "half": jnp.ones(5, jnp.bfloat16),
            "small": jnp.arange(3, dtype=jnp.int8),
            "flag": jnp.array([True, False]),
            "z": jnp.array([1 + 2j]),
            "key": jax.random.key(1),
            "none": jnp.zeros((0, 2)),
        }
        known = digest(tree)
        assert re.fullmatch("[0-9a-f]{32}", known)
        assert digest(jax.tree.map(jnp.copy, tree)) == known
        assert digest({**tree, "a": np.asarray(tree["a"])}) == known
        seen = {known}
        for place in range(12):
            for bit in range(32):
                words = np.asarray(tree["a"]).view(np.uint32).copy().ravel()
                words[place] ^= np.uint32(1 << bit)
                seen.add(digest({**tree, "a": words.view(np.float32).reshape(3, 4)}))
        assert len(seen) == 1 + 12 * 32
        for name, other in (
            ("half", tree["half"].at[2].set(2)),
            ("small", tree["small"].at[0].set(1)),
            ("flag", ~tree["flag"]),
            ("z", tree["z"].conj()),
            ("key", jax.random.key(2)),
            ("a", tree["a"][::-1]),
        ):
            assert digest({**tree, name: other}) != known


class TestDamage:
    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "garbage"])
    def test_the_one_before_is_used(self, tmp_path, damage):
        interrupted(tmp_path / "run", 3)
        newest = max(checkpoint_files(tmp_path / "run").items())[1]
        spoil(newest, damage)
        with pytest.warns(UserWarning, match="going on from the one before"):
            resumed = list(run(tmp_path / "run", resume=True))
        assert [info.step for _, info in resumed] == [6, 9, 12]
        assert bits(resumed[-1][0]) == bits(uninterrupted()[0])
        assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").event == MECHANISM.event

    def test_none_left_is_an_error(self, tmp_path):
        interrupted(tmp_path / "run", 3)
        files = checkpoint_files(tmp_path / "run")
        assert len(files) == 2
        for path in files.values():
            spoil(path, "flipped")
        with pytest.raises(CheckpointError, match="only damaged ones"):
            run(tmp_path / "run", resume=True)

    def test_any_flipped_bit_is_noticed(self):
        saved = Saved("a", [5, 6], {"x": "y"}, Position(1, "h"), {"step": 3}, {"w": np.arange(3.0)})
        content = saved.to_bytes()
        back = Saved.from_bytes(content)
        assert (back.run, back.entropy, back.position) == ("a", [5, 6], {"step": 3})
        np.testing.assert_array_equal(back.arrays["w"], np.arange(3.0))
        for at in range(len(content)):
            changed = bytearray(content)
            changed[at] ^= 1 << (at % 8)
            with pytest.raises(ValueError):
                Saved.from_bytes(bytes(changed))

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
    def test_what_cannot_be_written_can_be_resumed_later(self, tmp_path, monkeypatch, code):
        def fail(*_, **__):
            raise OSError(code, os.strerror(code))

        steps = run(tmp_path / "run")
        next(steps)
        real = mirrordp.spending.files.write_atomically

        def only_checkpoints(path, *args, **options):
            return fail() if "checkpoint" in path.name else real(path, *args, **options)

        monkeypatch.setattr(mirrordp.spending.files, "write_atomically", only_checkpoints)
        with pytest.raises(CheckpointError, match="resumed from the checkpoint before"):
            next(steps)
        monkeypatch.undo()
        state, _ = last(run(tmp_path / "run", resume=True))
        assert bits(state) == bits(uninterrupted()[0])

    def test_a_ledger_that_cannot_be_written_stops_the_run_before_the_block(
        self, tmp_path, monkeypatch
    ):
        steps = run(tmp_path / "run")
        next(steps)
        monkeypatch.setattr(engine, "_run_passes", pytest.fail)
        monkeypatch.setattr(os, "write", functools.partial(raise_full, os.write))
        with pytest.raises(LedgerError, match="No space left"):
            next(steps)
        monkeypatch.undo()
        state, _ = last(run(tmp_path / "run", resume=True))
        assert bits(state) == bits(uninterrupted()[0])

    def test_a_real_full_disk(self, tmp_path):
        """A limit on the size of files, which the kernel enforces."""
        steps = run(tmp_path / "run", params=jnp.zeros(1000), loss=first_three)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"run folder .*File too large"):
                next(steps)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        assert not FileLedger.read(tmp_path / "run" / "ledger.jsonl").records[1:]

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="can be made and written"):
            run(tmp_path / "file" / "run")


def first_three(params, example):
    return tools.squared_distance(params[:3], example)


def raise_full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def spoil(path, damage):
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "flipped": content[:-3] + bytes([content[-3] ^ 4]) + content[-2:],
            "empty": b"",
            "garbage": b"\x80\x04cos\nsystem\n",
        }[damage]
    )


class TestSecrets:
    def test_for_the_owner_alone_and_gone_at_the_end(self, tmp_path):
        folder = tmp_path / "run"
        interrupted(folder, 3)
        assert folder.stat().st_mode & 0o777 == 0o700
        names = {path.name for path in folder.iterdir()}
        assert {"checkpoint-00000003", "checkpoint-00000004", "secret.key"} <= names
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
        last(run(folder, resume=True))
        assert {path.name for path in folder.iterdir()} == {
            "lock", "ledger.jsonl", "ledger.jsonl.head", "ledger.jsonl.lock",
        }  # fmt: skip

    def test_gone_at_the_end_wherever_the_process_goes(self, tmp_path, monkeypatch):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / "one")
        steps = run("run")
        next(steps)
        monkeypatch.chdir(tmp_path / "two")
        last(steps)
        assert not [*tmp_path.rglob("checkpoint-*"), *tmp_path.rglob("secret.key")]
        assert not [*(tmp_path / "two").iterdir()]

    def test_a_budget_keeps_its_key(self, tmp_path):
        folder = tmp_path / "budget"
        with mirrordp.Budget.create(folder, epsilon=30, delta=1e-6, data=PRIVATE) as budget:
            for spend in (budget, None):
                with pytest.raises(CheckpointError, match="which holds a budget"):
                    next(run(folder, spend=spend))
            last(run(spend=budget))
            with pytest.raises(BudgetError, match="got seed 0 again"):
                next(run(spend=budget))

    def test_half_a_checkpoint_is_as_secret(self, tmp_path):
        """What a process leaves that was killed while it wrote."""
        interrupted(tmp_path / "run", 1)
        for name in (".checkpoint-00000003.a1b2", ".secret.key.c3", ".ledger.jsonl.head.d4"):
            (tmp_path / "run" / name).write_bytes(b"noise")
        last(run(tmp_path / "run", resume=True))
        assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]

    def test_kept_if_asked_for(self, tmp_path):
        state, _ = last(run(tmp_path / "run", keep=True))
        assert len(checkpoint_files(tmp_path / "run")) == 2
        # A result that was lost after the end is still there, and costs nothing.
        again = list(run(tmp_path / "run", keep=True, resume=True))
        assert [info.step for _, info in again] == [12]
        assert bits(again[0][0]) == bits(state)
        Checkpoint(tmp_path / "run").remove()
        assert not checkpoint_files(tmp_path / "run")
        assert not (tmp_path / "run" / "secret.key").exists()
        assert FileLedger.read(tmp_path / "run" / "ledger.jsonl").event == MECHANISM.event

    def test_a_run_leaves_another_one_in_its_place_alone(self, tmp_path):
        """Someone gives a run up and removes its folder, and the run is still alive."""
        ledger = FileLedger.create(tmp_path / "ledger", mirrordp.Adjacency.ZERO_OUT)
        old = run(tmp_path / "run", spend=ledger)
        next(old)
        (tmp_path / "run").rename(tmp_path / "removed")
        interrupted(tmp_path / "run", 1)
        before = contents(tmp_path / "run")
        with pytest.raises(CheckpointError, match="another one in its place"):
            list(old)
        assert contents(tmp_path / "run") == before
        assert bits(last(run(tmp_path / "run", resume=True))[0]) == bits(uninterrupted()[0])

    def test_a_folder_that_is_gone_does_not_take_the_result_with_it(self, tmp_path):
        """What was paid for is returned; another run's folder in its place is left alone."""
        for place in ("gone", "another"):
            ledger = FileLedger.create(tmp_path / f"{place}.ledger", mirrordp.Adjacency.ZERO_OUT)
            checkpoint = Checkpoint(tmp_path / place)
            opened = checkpoint.open(mirrordp.Adjacency.ZERO_OUT, ledger)
            (tmp_path / place).rename(tmp_path / f"{place}-moved")
            if place == "gone":
                opened.finish()
                continue
            interrupted(tmp_path / place, 1)
            before = contents(tmp_path / place)
            with pytest.warns(UserWarning, match="was exchanged"):
                opened.finish()
            assert contents(tmp_path / place) == before

    def test_secrets_are_removed_where_they_are_and_not_from_a_run_that_goes_on(self, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        link = tmp_path / "run"
        link.symlink_to(tmp_path / "one")
        checkpoint = Checkpoint(link, keep=True)
        tools.last(run(link, keep=True))
        link.unlink()
        link.symlink_to(tmp_path / "two")
        interrupted(link, 1)
        checkpoint.remove()
        assert not checkpoint_files(tmp_path / "one")
        assert checkpoint_files(tmp_path / "two")
        steps = run(tmp_path / "three")
        next(steps)
        with pytest.raises(LockedError):
            Checkpoint(tmp_path / "three").remove()
        list(steps)

    def test_a_link_that_is_moved_leaves_no_secrets(self, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        link = tmp_path / "run"
        link.symlink_to(tmp_path / "one")
        steps = run(link)
        next(steps)
        link.unlink()
        link.symlink_to(tmp_path / "two")
        list(steps)
        assert not checkpoint_files(tmp_path / "one")
        assert not (tmp_path / "one" / "secret.key").exists()
        assert not list((tmp_path / "two").iterdir())

    def test_an_open_folder_is_closed_to_others(self, tmp_path):
        (tmp_path / "run").mkdir(mode=0o755)
        interrupted(tmp_path / "run", 1)
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700

    def test_data_appears_as_a_keyed_fingerprint_only(self, tmp_path):
        found = set()
        for name in ("a", "b"):
            interrupted(tmp_path / name, 1)
            newest = max(checkpoint_files(tmp_path / name).items())[1].read_bytes()
            assert PRIVATE.arrays[0].tobytes() not in newest
            found.add(Saved.from_bytes(newest).configuration["private data"])
        assert len(found) == 2


def test_trees_survive():
    tree = {
        "key": jax.random.key(3),
        "half": jnp.ones(3, jnp.bfloat16),
        "scalar": jnp.asarray(2),
        "none": None,
        "bool": jnp.array([True, False]),
    }
    content = Saved("a", [0], {}, Position(1, ""), {}, to_arrays(tree, "t")).to_bytes()
    back = from_arrays(tree, Saved.from_bytes(content).arrays, "t")
    assert bits(back) == bits(tree)
    assert jax.tree.map(lambda leaf: leaf.dtype, back) == jax.tree.map(
        lambda leaf: leaf.dtype, tree
    )
    with pytest.raises(CheckpointError, match="half"):
        from_arrays(tree | {"half": jnp.ones(4)}, Saved.from_bytes(content).arrays, "t")


class TestFit:
    """`mirrordp fit`: all of a descent is one block."""

    @pytest.fixture
    def files(self, tmp_path):
        return two_tables(tmp_path)

    @staticmethod
    def coefficients(files):
        return json.loads((files["out"] / "model.json").read_text())["scorer"]["coefficients"]

    def test_interrupted_and_resumed(self, files, tmp_path, capsys, monkeypatch):
        budget = tmp_path / "budget"
        options = {"seed": 7, "budget": budget, "epsilon": 1}
        Budget.create(budget, epsilon=3, delta=1e-4, data=files["private"]).close()
        # The same run on a budget of its own: one budget would not have it twice.
        whole = files | {"out": tmp_path / "whole"}
        other = tmp_path / "other"
        Budget.create(other, epsilon=3, delta=1e-4, data=files["private"]).close()
        assert cli.main(fit_options(whole, **(options | {"budget": other}))) == 0
        used = Budget.status_of(other).used
        capsys.readouterr()

        monkeypatch.setattr(linear, "private_descent", interrupt)
        assert cli.main(fit_options(files, **options)) == 130
        message = capsys.readouterr().err
        command = "mirrordp " + " ".join(fit_options(files, **options))
        assert f"To finish the run: {command} --resume\n" in message
        assert not files["out"].exists()
        assert Budget.status_of(budget).used == pytest.approx(used)
        monkeypatch.undo()

        assert cli.main(fit_options(files, **options)) == 2
        assert "add --resume" in capsys.readouterr().err
        assert cli.main([*fit_options(files, **(options | {"epsilon": 1.1})), "--resume"]) == 2
        assert "differs in:" in capsys.readouterr().err
        without = {name: value for name, value in options.items() if name != "budget"}
        assert cli.main([*fit_options(files, **without), "--resume"]) == 2
        assert "expected the budget or ledger that the run" in capsys.readouterr().err
        assert not (tmp_path / "model.run" / "ledger.jsonl").exists()
        assert cli.main([*fit_options(files, **options), "--resume"]) == 0
        assert Budget.status_of(budget).used == pytest.approx(used)
        assert self.coefficients(files) == self.coefficients(whole)
        assert not (tmp_path / "model.run").exists()

    def test_a_run_that_was_paid_for_needs_no_more_room(self, files, tmp_path, monkeypatch):
        budget = tmp_path / "budget"
        options = {"budget": budget, "epsilon": 2.5}
        Budget.create(budget, epsilon=3, delta=1e-4, data=files["private"]).close()
        monkeypatch.setattr(linear, "private_descent", interrupt)
        assert cli.main(fit_options(files, **options)) == 130
        monkeypatch.undo()
        used = Budget.status_of(budget).used
        assert used > 0.7
        assert cli.main([*fit_options(files, **options), "--resume"]) == 0
        assert Budget.status_of(budget).used == used

    @pytest.mark.parametrize("task", ["regression", "classification"])
    def test_trees(self, tmp_path, capsys, monkeypatch, task):
        files = {
            "private": make_table(tmp_path / "private.csv", 400, 0, task=task),
            "public": make_table(tmp_path / "public.csv", 60, 1, task=task),
            "out": tmp_path / "model",
        }
        budget, other = tmp_path / "budget", tmp_path / "other"
        for folder in (budget, other):
            Budget.create(folder, epsilon=100, delta=1e-4, data=files["private"]).close()
        options = {"task": task, "model": "trees", "seed": 7, "budget": budget, "epsilon": 30}
        whole = files | {"out": tmp_path / "whole"}
        assert cli.main(fit_options(whole, **(options | {"budget": other}))) == 0
        monkeypatch.setattr("mirrordp.linear.boosting.private_values", interrupt)
        assert cli.main(fit_options(files, **options)) == 130
        monkeypatch.undo()
        capsys.readouterr()
        # The same noise must not meet the sums of other cells.
        changed = make_table(tmp_path / "changed.csv", 60, 5, task=task)
        command = fit_options(files | {"public": changed}, **options)
        assert cli.main([*command, "--resume"]) == 2
        assert "public rows" in capsys.readouterr().err
        assert cli.main([*fit_options(files, **options), "--resume"]) == 0
        assert Budget.status_of(budget).used == pytest.approx(Budget.status_of(other).used)
        found, expected = (
            json.loads((one["out"] / "model.json").read_text())["scorer"] for one in (files, whole)
        )
        assert found == expected
        assert found["kind"] == "trees"
        assert np.ptp(np.concatenate(found["values"])) > 0

    def test_randomness_of_the_system_is_kept(self, files, tmp_path, monkeypatch):
        keys = []

        def remember(*args, key, **_):
            keys.append(jax.random.key_data(key).tolist())
            raise KeyboardInterrupt

        monkeypatch.setattr(linear, "private_descent", remember)
        assert cli.main(fit_options(files)) == 130
        assert cli.main([*fit_options(files), "--resume"]) == 130
        assert keys[0] == keys[1]
        other = files | {"out": tmp_path / "other"}
        assert cli.main(fit_options(other)) == 130
        assert keys[2] != keys[0]

    def test_killed_after_the_model_was_written(self, files, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(cli_fit, "_remove_secrets", interrupt)
        assert cli.main(fit_options(files)) == 130
        monkeypatch.undo()
        kept = self.coefficients(files)
        assert cli.main([*fit_options(files), "--resume"]) == 0
        assert re.search(
            r"had finished: .* regression of 'y' .* epsilon [0-9.]+, delta", capsys.readouterr().out
        )
        assert self.coefficients(files) == kept
        assert not (tmp_path / "model.run").exists()

    def test_interrupted_after_everything_was_done(self, files, capsys, monkeypatch):
        remove = cli_fit._remove_secrets

        def removed_then_interrupted(*args):
            remove(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(cli_fit, "_remove_secrets", removed_then_interrupted)
        assert cli.main(fit_options(files)) == 130
        message = capsys.readouterr().err
        assert "The run had finished" in message
        assert "charged" not in message

    def test_an_interruption_before_anything_was_charged(self, files, capsys, monkeypatch):
        monkeypatch.setattr("mirrordp.tables.fitting.read_table", interrupt)
        assert cli.main(fit_options(files)) == 130
        assert "Nothing was charged" in capsys.readouterr().err

    def test_nothing_to_resume(self, files, capsys):
        assert cli.main([*fit_options(files), "--resume"]) == 2
        assert "expected a run to resume" in capsys.readouterr().err

    def test_kept_on_request_apart_from_what_is_released(self, files, tmp_path):
        assert cli.main([*fit_options(files), "--keep-checkpoint"]) == 0
        folder = tmp_path / "model.run"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert checkpoint_files(folder)

    def test_the_estimator_alone(self, tmp_path, monkeypatch):
        rng = np.random.default_rng(0)
        x, public = rng.normal(size=(300, 3)), rng.normal(size=(50, 3))
        weights = np.array([1.0, -1.0, 2.0])
        data = (x, x @ weights + rng.normal(size=300), public, public @ weights)

        def model():
            from mirrordp.linear.estimators import PrivateLinearRegression

            return PrivateLinearRegression(epsilon=2.0, num_steps=20, random_state=1)

        whole = model().fit(*data)
        monkeypatch.setattr(linear, "private_descent", interrupt)
        # A fit that was interrupted counts as one that ran.
        with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="one of 2 private"):
            model().fit(*data, checkpoint=Checkpoint(tmp_path / "run"))
        monkeypatch.undo()
        resumed = model().fit(*data, checkpoint=Checkpoint(tmp_path / "run", resume=True))
        assert resumed.coef_.tobytes() == whole.coef_.tobytes()
        assert not checkpoint_files(tmp_path / "run")
        ledger = FileLedger.read(tmp_path / "run" / "ledger.jsonl")
        assert ledger.epsilon(1e-5).epsilon == pytest.approx(whole.privacy_.epsilon)


def test_killed_at_random_moments():
    """Ten kills; `python -m tests.soak_crash --kills 500` for more."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak_crash", "--kills", "10"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == 10
