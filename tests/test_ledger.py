"""The ledger: append-only, asking changes nothing; in a file, damage is noticed."""

import copy
import errno
import json
import os
import pickle
import random
import re
import threading
import time
import warnings

import dp_accounting
import pytest

from mirrordp import Adjacency, FileLedger, Ledger
from mirrordp.privacy import Accountant, accounting
from mirrordp.spending import ledger as ledger_module
from mirrordp.spending.files import LockedError
from mirrordp.spending.ledger import (
    Block,
    LedgerError,
    Position,
    check_position,
    event_from_dict,
    event_to_dict,
    ledger_for,
)

POISSON = accounting.poisson_event(3.0, sampling_prob=0.1, num_steps=5)
GAUSSIAN = dp_accounting.GaussianDpEvent(2.0)


@pytest.fixture
def ledger():
    return Ledger(Adjacency.ZERO_OUT)


UNREADABLE = {
    "a fraction of a record": dp_accounting.SampledWithoutReplacementDpEvent(1000, 1.9, GAUSSIAN),
    "empty batches": dp_accounting.SampledWithoutReplacementDpEvent(10, 0, GAUSSIAN),
    "no sampling at all": dp_accounting.PoissonSampledDpEvent(0.0, GAUSSIAN),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_charge_that_could_not_be_read_again_is_not_written(name, tmp_path):
    """Nor is one that would be read as less: 1.9 records as 1."""
    with FileLedger.create(tmp_path / "ledger", Adjacency.REPLACE) as ledger:
        with pytest.raises(LedgerError, match="expected an event"):
            ledger.charge(UNREADABLE[name])
        ledger.charge(GAUSSIAN)
    with FileLedger.open(tmp_path / "ledger") as ledger:
        assert len(ledger.records) == 2


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_one_ledger_covers_one_unit_against_the_same_people(kind, tmp_path):
    """A sum over runs on rows and on users would be an ε of neither."""
    path = tmp_path / "ledger"
    made = Ledger(Adjacency.ZERO_OUT)
    if kind == "file":
        made = FileLedger.create(path, Adjacency.ZERO_OUT)
    for _ in range(2):
        ledger_for(Adjacency.ZERO_OUT, made, "user")
    if kind == "file":
        made.close()
        made = FileLedger.open(path)
        assert [record["kind"] for record in made.records] == ["ledger", "covers"]
    with pytest.raises(ValueError, match="covers one example"):
        ledger_for(Adjacency.ZERO_OUT, made, "example")
    with pytest.raises(ValueError, match="against those who see who takes part"):
        ledger_for(Adjacency.ZERO_OUT, made, "user", participation_is_seen=True)
    ledger_for(Adjacency.ZERO_OUT, made, "user")


def test_an_empty_ledger_has_spent_nothing(ledger):
    assert ledger.event == dp_accounting.NoOpDpEvent()
    assert ledger.epsilon(1e-5).epsilon == 0
    assert ledger.adjacency is Adjacency.ZERO_OUT


def test_equal_blocks_are_one_event_with_a_count(ledger):
    for _ in range(3):
        ledger.charge(POISSON)
    assert ledger.event == dp_accounting.SelfComposedDpEvent(POISSON.event, 15)


def test_different_events_are_composed_in_order(ledger):
    for event in (POISSON, GAUSSIAN, GAUSSIAN, POISSON):
        ledger.charge(event)
    parts = ledger.event.events
    assert [part.event for part in parts] == [POISSON.event, GAUSSIAN, POISSON.event]
    assert [part.count for part in parts] == [5, 2, 5]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_a_copy_is_charged_would_be_lost(ledger, duplicate):
    """A search with several processes sends its arguments to them as copies."""
    with pytest.raises(TypeError, match="belongs to one process"):
        duplicate(ledger)


def test_a_forked_process_cannot_charge_a_ledger_in_memory(ledger):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of threads that are left behind
        child = os.fork()
    if child == 0:
        try:
            ledger.charge(GAUSSIAN)
        except LedgerError as error:
            os._exit(7 if "forked from" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class SlowToCompare(dp_accounting.GaussianDpEvent):
    """An event during whose comparison other threads have their turn."""

    def __eq__(self, other):
        time.sleep(1e-5)
        return self.noise_multiplier == other.noise_multiplier

    __hash__ = None


def test_threads_may_charge_one_ledger_in_memory(ledger):
    events = [SlowToCompare(sigma) for sigma in (2.0, 3.0, 4.0)]

    def charge():
        for _ in range(30):
            for event in events:
                ledger.charge(event)

    threads = [threading.Thread(target=charge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = dict.fromkeys((2.0, 3.0, 4.0), 0)
    for part in ledger.event.events:
        counts[part.event.noise_multiplier] += part.count
    assert set(counts.values()) == {120}


def test_nothing_charged_changes_nothing(ledger):
    ledger.charge(POISSON)
    ledger.charge(dp_accounting.NoOpDpEvent())
    assert ledger.event == POISSON


@pytest.mark.parametrize("count", [1.9, -3, 0, float("nan")])
def test_charges_come_in_whole_numbers(ledger, count, tmp_path):
    """In memory 1.9 was charged as 1.9, in a file as 1, and -3 gave something back."""
    odd = dp_accounting.SelfComposedDpEvent(GAUSSIAN, count)
    file = FileLedger.create(tmp_path / "ledger", Adjacency.ZERO_OUT)
    for event in (odd, dp_accounting.ComposedDpEvent([GAUSSIAN, odd])):
        for target in (ledger, file):
            with pytest.raises(LedgerError, match="a whole number of times"):
                target.charge(event)
            assert target.event == dp_accounting.NoOpDpEvent()
    file.close()


def test_asking_changes_nothing(ledger):
    ledger.charge(POISSON)
    before = ledger.event
    first = ledger.epsilon(1e-5)
    assert ledger.epsilon(1e-5) == first
    assert ledger.epsilon(1e-3).epsilon < first.epsilon
    assert ledger.event == before


def test_epsilon_is_that_of_the_composition(ledger):
    ledger.charge(POISSON)
    ledger.charge(accounting.poisson_event(5.0, sampling_prob=0.3, num_steps=4))
    for accountant in Accountant:
        found = ledger.epsilon(1e-5, accountant=accountant)
        composed = accounting.epsilon(
            ledger.event, 1e-5, adjacency=Adjacency.ZERO_OUT, accountant=accountant
        )
        assert found == composed
        alone = accounting.epsilon(
            POISSON, 1e-5, adjacency=Adjacency.ZERO_OUT, accountant=accountant
        )
        assert found.epsilon > alone.epsilon


def test_many_small_charges_cost_what_one_large_one_does(ledger):
    whole = Ledger(Adjacency.ZERO_OUT)
    whole.charge(accounting.poisson_event(3.0, sampling_prob=0.1, num_steps=40))
    for steps in (1, 7, 32):
        ledger.charge(accounting.poisson_event(3.0, sampling_prob=0.1, num_steps=steps))
    assert ledger.epsilon(1e-5) == whole.epsilon(1e-5)


def test_replace_counts_twice_the_distance():
    ledger = Ledger(Adjacency.REPLACE)
    ledger.charge(GAUSSIAN)
    single = accounting.epsilon(
        dp_accounting.GaussianDpEvent(1.0), 1e-5, adjacency=Adjacency.ZERO_OUT
    )
    assert ledger.epsilon(1e-5).epsilon == pytest.approx(single.epsilon, rel=1e-9)


class TestFile:
    """The ledger in a file: durable, chained, honest about damage."""

    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "ledger.jsonl"

    @pytest.fixture
    def filled(self, path):
        with FileLedger.create(path, Adjacency.ZERO_OUT) as ledger:
            for stop in (5, 10, 15):
                ledger.charge(POISSON, block=Block("a", stop - 5, stop))
            ledger.charge(GAUSSIAN)
        return path

    def test_charges_go_where_it_was_opened_wherever_the_process_goes(self, tmp_path, monkeypatch):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            FileLedger.create(tmp_path / name / "ledger", Adjacency.ZERO_OUT).close()
        monkeypatch.chdir(tmp_path / "one")
        with FileLedger.open("ledger") as opened:
            monkeypatch.chdir(tmp_path / "two")
            opened.charge(GAUSSIAN)
        assert len(FileLedger.read(tmp_path / "one" / "ledger").records) == 2
        assert len(FileLedger.read(tmp_path / "two" / "ledger").records) == 1

    def test_another_file_in_its_place_is_not_charged(self, filled, tmp_path):
        with FileLedger.open(filled) as opened:
            filled.rename(tmp_path / "moved")
            filled.write_bytes((tmp_path / "moved").read_bytes())
            with pytest.raises(LedgerError, match="got another one in its place"):
                opened.charge(GAUSSIAN)
        assert filled.read_bytes() == (tmp_path / "moved").read_bytes()

    def test_two_holders_do_not_both_spend(self, filled):
        """Without a lock file, as on a file system whose locks do nothing."""
        with FileLedger.open(filled) as first:
            filled.with_name(filled.name + ".lock").unlink()
            with FileLedger.open(filled) as second:
                second.charge(GAUSSIAN)
                second.charge(GAUSSIAN)
                with pytest.raises(LedgerError, match="as this process left it"):
                    first.charge(GAUSSIAN)
        assert len(FileLedger.read(filled).records) == 7

    def test_another_history_in_the_same_file_is_not_charged(self, filled, tmp_path):
        """As after a removal, where the new file may have the old one's number, and its size."""
        head = filled.with_name(filled.name + ".head")
        with FileLedger.open(filled) as opened:
            with FileLedger.create(tmp_path / "other", Adjacency.ZERO_OUT) as other:
                for stop in (5, 10, 15):
                    other.charge(POISSON, block=Block("a", stop - 5, stop))
                other.charge(GAUSSIAN)
            with open(filled, "r+b") as file:
                file.write((tmp_path / "other").read_bytes())
            head.write_bytes((tmp_path / "other.head").read_bytes())
            before = filled.read_bytes()
            assert len(before) == (tmp_path / "other").stat().st_size
            with pytest.raises(LedgerError, match="another head beside it"):
                opened.charge(GAUSSIAN)
        assert filled.read_bytes() == before

    def test_what_is_appended_while_it_is_opened_is_no_torn_record(self, filled, monkeypatch):
        right = ledger_module._read
        copy = filled.read_bytes()

        def appended(path):
            found = right(path)
            path.write_bytes(copy + b"more\n")
            return found

        monkeypatch.setattr(ledger_module, "_read", appended)
        with pytest.raises(LedgerError, match="another process that writes"):
            FileLedger.open(filled)
        assert filled.read_bytes() == copy + b"more\n"

    def test_records_have_no_time_of_day(self, filled):
        """Seconds between charges would tell how many runs a paid search had."""
        for record in FileLedger.read(filled).records:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["time"])

    def test_replays_to_the_same_epsilon(self, ledger, filled):
        for event in (POISSON, POISSON, POISSON, GAUSSIAN):
            ledger.charge(event)
        with FileLedger.open(filled) as opened:
            assert opened.event == ledger.event
            for accountant in Accountant:
                assert opened.epsilon(1e-5, accountant=accountant) == ledger.epsilon(
                    1e-5, accountant=accountant
                )
            assert opened.charged_steps("a") == 15
            assert opened.charged_steps("b") == 0
            assert opened.adjacency is Adjacency.ZERO_OUT
        assert FileLedger.read(filled).position == opened.position

    @pytest.mark.parametrize(
        "event",
        [
            POISSON,
            GAUSSIAN,
            accounting.fixed_size_event(1.0, num_examples=10, batch_size=3, num_steps=2),
            dp_accounting.ComposedDpEvent([POISSON, GAUSSIAN, dp_accounting.NoOpDpEvent()]),
            dp_accounting.GaussianDpEvent(0.1 + 0.2),
        ],
    )
    def test_events_survive_as_text(self, event):
        text = json.dumps(event_to_dict(event))
        assert event_from_dict(json.loads(text)) == event

    def test_unknown_events_are_refused_both_ways(self, path):
        with FileLedger.create(path, Adjacency.ZERO_OUT) as ledger:
            with pytest.raises(LedgerError, match="LaplaceDpEvent"):
                ledger.charge(dp_accounting.LaplaceDpEvent(1.0))
            assert ledger.position.length == 1
        for bad in (
            {"name": "laplace", "noise_multiplier": 1.0},
            {"name": "gaussian", "noise_multiplier": float("nan")},
            {"name": "gaussian", "noise_multiplier": 1.0, "extra": 1},
            {"name": "repeated", "count": 0, "event": {"name": "nothing"}},
            {"name": "poisson-sampled", "sampling_prob": 1.5, "event": {"name": "nothing"}},
            ["gaussian"],
        ):
            with pytest.raises(LedgerError, match="expected an event"):
                event_from_dict(bad)

    def test_any_flipped_bit_is_noticed(self, filled):
        content = filled.read_bytes()
        rng = random.Random(0)
        for at in [0, len(content) - 2, *rng.sample(range(len(content)), 40)]:
            changed = bytearray(content)
            changed[at] ^= 1 << rng.randrange(7)
            filled.write_bytes(bytes(changed))
            with pytest.raises(LedgerError):
                FileLedger.open(filled)
        filled.write_bytes(content)
        FileLedger.open(filled).close()

    @pytest.mark.parametrize("keep", [1, 3, 4])
    def test_a_cut_tail_is_noticed(self, filled, keep):
        lines = filled.read_bytes().splitlines(keepends=True)
        filled.write_bytes(b"".join(lines[:keep]))
        with pytest.raises(LedgerError, match="tail was cut"):
            FileLedger.open(filled)
        with pytest.raises(LedgerError, match="tail was cut"):
            FileLedger.read(filled)

    def test_swapped_records_are_noticed(self, filled):
        lines = filled.read_bytes().splitlines(keepends=True)
        filled.write_bytes(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))
        with pytest.raises(LedgerError, match="damaged"):
            FileLedger.open(filled)

    def test_a_rewritten_history_is_noticed(self, filled, tmp_path):
        """A well-formed chain that is not the one whose head is kept."""
        other = tmp_path / "other.jsonl"
        with FileLedger.create(other, Adjacency.ZERO_OUT) as ledger:
            for _ in range(4):
                ledger.charge(GAUSSIAN)
        filled.write_bytes(other.read_bytes())
        with pytest.raises(LedgerError, match="another history"):
            FileLedger.open(filled)

    @pytest.mark.parametrize("content", [None, b"", b"{}", b'{"length":1,"head":"0","sha256":"0"}'])
    def test_a_lost_or_damaged_head_is_an_error(self, filled, content):
        head = filled.with_name("ledger.jsonl.head")
        head.unlink() if content is None else head.write_bytes(content)
        with pytest.raises(LedgerError, match="length and head"):
            FileLedger.open(filled)

    @pytest.mark.parametrize("part", [1, 10, 100, -1])
    def test_a_torn_last_line_is_dropped(self, filled, part, monkeypatch):
        """What a crash within `charge` leaves: it never returned, so nothing of it was seen."""
        before = FileLedger.read(filled)
        with FileLedger.open(filled) as ledger:
            monkeypatch.setattr(ledger_module, "_write_head", lambda *_: None)
            ledger.charge(GAUSSIAN)
        monkeypatch.undo()
        lines = filled.read_bytes().splitlines(keepends=True)
        filled.write_bytes(b"".join(lines[:-1]) + lines[-1][:part])
        assert FileLedger.read(filled).position == before.position
        with FileLedger.open(filled) as ledger:
            assert ledger.position == before.position
            ledger.charge(GAUSSIAN)
        assert len(FileLedger.read(filled).records) == len(before.records) + 1

    def test_a_whole_last_line_counts_although_its_charge_never_returned(self, filled, monkeypatch):
        with FileLedger.open(filled) as ledger:
            monkeypatch.setattr(ledger_module, "_write_head", lambda *_: None)
            ledger.charge(GAUSSIAN)
            charged = ledger.event
        monkeypatch.undo()
        with FileLedger.open(filled) as ledger:
            assert ledger.event == charged
        assert FileLedger.read(filled).event == charged

    @pytest.mark.parametrize("operation", ["write", "fsync", "replace"])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
    def test_what_cannot_be_written_is_not_charged(self, filled, monkeypatch, operation, code):
        def fail(*args, **options):
            raise OSError(code, os.strerror(code))

        before = FileLedger.read(filled).event
        with FileLedger.open(filled) as ledger:
            monkeypatch.setattr(os, operation, fail)
            with pytest.raises(LedgerError, match="nothing ran"):
                ledger.charge(GAUSSIAN)
            monkeypatch.undo()
            # What the file holds is unknown now: no further charge before it is opened anew.
            with pytest.raises(LedgerError, match=r"FileLedger\.open"):
                ledger.charge(GAUSSIAN)
        with FileLedger.open(filled) as ledger:
            more = ledger.event != before
            # At most one charge too many, never one too few.
            assert len(ledger.records) - 5 == int(more) <= 1

    def test_a_full_disk_in_the_middle_of_a_line(self, filled, monkeypatch):
        real = os.write

        def half(handle, content):
            if len(content) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(handle, bytes(content)[: len(content) // 2])

        before = filled.read_bytes()
        with FileLedger.open(filled) as ledger:
            monkeypatch.setattr(os, "write", half)
            with pytest.raises(LedgerError, match="No space left"):
                ledger.charge(GAUSSIAN)
            monkeypatch.undo()
        assert filled.read_bytes() == before

    def test_two_holders(self, filled):
        with FileLedger.open(filled):
            with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
                FileLedger.open(filled)
            assert FileLedger.read(filled).position.length == 5
            with pytest.raises(LedgerError, match="view"):
                FileLedger.read(filled).charge(GAUSSIAN)
        FileLedger.open(filled).close()

    def test_waiting_for_the_other_holder(self, filled):
        first = FileLedger.open(filled)
        threading.Timer(0.3, first.close).start()
        with FileLedger.open(filled, wait=30):
            pass

    def test_blocks_are_charged_in_order(self, filled):
        with FileLedger.open(filled) as ledger:
            for block in (Block("a", 14, 16), Block("a", 16, 17), Block("a", 15, 15)):
                with pytest.raises(ValueError, match="Charge in order"):
                    ledger.charge(POISSON, block=block)

    def test_an_old_copy_is_noticed_by_whoever_knows_the_head(self, filled):
        with FileLedger.open(filled) as ledger:
            newest = ledger.position
        check_position(ledger, newest, "the report")
        check_position(ledger, Position(2, ledger.records[1]["hash"]), "the report")
        with pytest.raises(LedgerError, match="old copy"):
            check_position(ledger, Position(newest.length + 1, newest.head), "the report")
        with pytest.raises(LedgerError, match="another ledger"):
            check_position(ledger, Position(2, newest.head), "the report")

    def test_it_is_not_made_twice_and_not_found_where_it_is_not(self, filled, tmp_path):
        with pytest.raises(LedgerError, match="exists"):
            FileLedger.create(filled, Adjacency.ZERO_OUT)
        with pytest.raises(LedgerError, match="no such file"):
            FileLedger.open(tmp_path / "other.jsonl")
        # The ledger is lost, but its head knows that something was charged.
        filled.unlink()
        with pytest.raises(LedgerError, match="exists"):
            FileLedger.create(filled, Adjacency.ZERO_OUT)

    def test_another_version_is_refused(self, path, monkeypatch):
        monkeypatch.setattr(ledger_module, "VERSION", 2)
        FileLedger.create(path, Adjacency.ZERO_OUT).close()
        monkeypatch.undo()
        with pytest.raises(LedgerError, match="version 2"):
            FileLedger.open(path)

    def test_the_file_is_for_its_owner(self, filled):
        assert filled.stat().st_mode & 0o777 == 0o600
