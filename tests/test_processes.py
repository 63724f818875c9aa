"""Several processes on this machine: the run of one process, one ledger, and one sentence."""

import json

import jax
import numpy as np
import pytest

import mirrordp
from mirrordp import Ledger
from mirrordp.spending import FileLedger
from mirrordp.training.checkpoint import CheckpointError
from tests import process_worker, test_mesh

CASES = {
    "plain": {},
    "further": {"capacity": 8},
    "streamed": {"stream": True},
    "add-remove": {"adjacency": "add-remove"},
    "seeds": {"process 1": {"seed": 2}},
    "losses": {"process 1": {"scale": 2.0}},
    "rows": {"process 1": {"left out": 1}},
    "mechanisms": {"process 1": {"noise": 1.5}, "process 0": {"ledger": "refused.jsonl"}},
    "kinds": {"process 1": {"dtype": "float16"}},
    "gone on": {"from": 2},
    "other steps": {"from": 4, "process 1": {"from": 2}},
    "moved": {"from": 4, "process 1": {"moved": 3}},
    "public": {"public": 5},
    "copied": {"public": 40, "all copied": True},
    "users": {"users": ["a", "bb"], "process 1": {"users": ["ccc", "dddd"]}},
    "user twice": {"users": ["a", "bb"], "process 1": {"users": ["ccc", " bb"]}},
    "adjacencies": {"process 1": {"ledger for": "add-remove"}},
    "two ledgers": {"process 0": {"ledger": "a.jsonl"}, "process 1": {"ledger": "b.jsonl"}},
    "fresh": {"seed": None, "process 0": {"ledger": "fresh.jsonl"}},
    "bound": {"budget": "budget", "seed": 11},
    "changed": {"budget": "budget", "seed": 12, "process 1": {"shift": 1}},
    "unlike": {"checkpoint": "u", "every": 2, "process 1": {"flags": "--xla_cpu_max_isa=AVX"}},
    "stopped": {"checkpoint": "run", "stop": 2},
    "other": {"checkpoint": "run", "scale": 2.0},
    "resumed": {"checkpoint": "run"},
    "more": {"checkpoint": "alone"},
    # Last, since processes that lost each other in a run end without a goodbye.
    "uncharged": {"log": "uncharged-log", "process 0": {"refuse": True}},
    # Sabotage: process 1 does not wait for the charge, and so for a reduction that never comes.
    "hasty": {"log": "hasty-log", "process 0": {"refuse": True}, "process 1": {"hasty": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All cases, one after the other in the same two processes, whose start takes the time."""
    found = tmp_path_factory.mktemp("processes")
    run = resumed_alone(found / "alone")
    next(run)
    run.close()  # pyright: ignore[reportAttributeAccessIssue]
    (found / "charged alone").write_bytes((found / "alone" / "ledger.jsonl").read_bytes())
    processes = process_worker.start(found, CASES, found / "cache")
    process_worker.finish(processes, 240)
    ends = [(found / f"uncharged-{index}").exists() for index in range(2)]
    assert all(ends), (found / "output-0").read_text() + (found / "output-1").read_text()
    return found


def resumed_alone(folder):
    """The run of one process, begun or resumed."""
    checkpoint = mirrordp.Checkpoint(folder, resume=True, keep=True)
    rows = test_mesh.ROWS.arrays
    return process_worker.begun({}, rows, mesh=test_mesh.mesh(4), checkpoint=checkpoint)


def result(folder, name):
    """What both processes ended with; all but the ledgers is the same."""
    found = [json.loads((folder / f"{name}-{index}").read_text()) for index in range(2)]
    assert [each.get("error") for each in found] == [None, None]
    assert found[0]["params"] == found[1]["params"]
    assert found[0]["seen"] == found[1]["seen"]
    return found[0]


def errors(folder, name):
    found = [json.loads((folder / f"{name}-{index}").read_text()) for index in range(2)]
    assert all("error" in each for each in found), found
    return [each["error"] for each in found]


def alone(case):
    """The same run of one process that holds all rows, on as many devices."""
    ledger = Ledger(process_worker.mechanism(case).adjacency)
    run = process_worker.begun(case, test_mesh.ROWS.arrays, mesh=test_mesh.mesh(4), spend=ledger)
    *_, (state, info) = run
    return jax.device_get(state.params), info, str(ledger.event)


@pytest.mark.filterwarnings("ignore:.*equal a public row")
@pytest.mark.parametrize("name", ["plain", "further", "streamed", "public"])
def test_the_run_is_that_of_one_process_to_the_bit(folder, name):
    expected, info, charged = alone(CASES[name])
    found = result(folder, name)
    assert found["params"] == {k: leaf.tobytes().hex() for k, leaf in expected.items()}
    assert found["seen"][-1][2] == info.noisy_grad_norm.tolist()
    assert found["charged"] == charged


def test_add_remove_keeps_records_in_their_process(folder):
    """Records draw other shards than in one process, and the rest is the same up to rounding."""
    expected, _, charged = alone(CASES["add-remove"])
    found = result(folder, "add-remove")
    for name, leaf in expected.items():
        own = np.frombuffer(bytes.fromhex(found["params"][name]), np.float32).reshape(leaf.shape)
        np.testing.assert_allclose(own, leaf, atol=2e-2)
    assert found["charged"] == charged


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seeds", "seed (1 in process 0, 2 in process 1)"),
        ("losses", "differences in: loss_fn."),
        ("mechanisms", "mechanism.noise_multiplier (1.0 in process 0, 1.5 in process 1)"),
        ("rows", "num_examples=40"),
        ("kinds", "private[1] (float32[8] in process 0, float16[8] in process 1)"),
        ("other steps", "step of the state (4 in process 0, 2 in process 1)"),
        ("moved", "differences in: state."),
        ("unlike", "differences in: kind of processor"),
        ("copied", "got 40 of 40 public rows that equal a private row"),
        ("user twice", "got 1 whose name several processes have"),
    ],
)
def test_differences_are_named_everywhere(folder, name, message):
    for error in errors(folder, name):
        assert message in error


def test_nothing_was_charged_by_what_was_refused(folder):
    records = FileLedger.read(folder / "refused.jsonl").records
    assert not [record for record in records if "stop" in record]


def test_a_run_goes_on_from_a_state(folder):
    whole, rest = result(folder, "plain"), result(folder, "gone on")
    assert rest["params"] == whole["params"]
    assert rest["seen"] == whole["seen"][1:]


def test_users_of_several_processes(folder):
    """Nobody has said how many are computed side by side."""
    names = CASES["users"]["users"] + CASES["users"]["process 1"]["users"]
    run = process_worker.begun_on_users(names, mesh=test_mesh.mesh(4))
    *_, (state, _) = run
    assert result(folder, "users")["params"] == np.asarray(state.params).tobytes().hex()


def test_every_process_has_a_ledger_of_the_same_kind(folder):
    first, second = errors(folder, "adjacencies")
    assert second.startswith("ValueError: one ledger has one adjacency, got a ledger of 'add-remo")
    assert first == f"ProcessLost: process 1 stopped the run: {second}"


def test_an_error_of_one_process_ends_the_others(folder):
    first, second = errors(folder, "two ledgers")
    assert second.startswith("ValueError: process 0 alone keeps the ledger")
    assert first == f"ProcessLost: process 1 stopped the run: {second}"


def test_no_process_computes_what_is_not_charged(folder):
    first, second = errors(folder, "uncharged")
    assert first == "OSError: no space left"
    assert second == "ProcessLost: process 0 stopped the run: OSError: no space left"
    assert not has_computed(folder, "uncharged")


def test_a_process_that_does_not_wait_for_the_charge_is_seen(folder):
    """Nothing else differs from the run of the test before."""
    assert json.loads((folder / "hasty-0").read_text()) == {"error": "OSError: no space left"}
    assert has_computed(folder, "hasty")


def has_computed(folder, name):
    """Whether process 1 has begun a block."""
    return (folder / f"{name}-log-1").exists()


def test_one_ledger_in_the_file_of_process_0(folder):
    found = result(folder, "fresh")
    ledger = FileLedger.read(folder / "fresh.jsonl")
    assert str(ledger.event) == found["charged"] == result(folder, "plain")["charged"]
    # All randomness comes from process 0, and is another one in every run.
    assert found["params"] != result(folder, "plain")["params"]


def test_a_budget_is_for_the_rows_of_all_processes(folder):
    first, second = errors(folder, "changed")
    assert first.startswith("BudgetError: expected the rows that earlier runs on the budget")
    assert "got others in process 1." in first
    assert second == f"ProcessLost: process 0 stopped the run: {first}"
    # One run of three blocks; the rows of process 1 were noted before the first charge.
    records = mirrordp.Budget.view(folder / "budget").ledger.records
    kinds = ["ledger", "parts", "seed", "charge", "charge", "charge"]
    assert [record["kind"] for record in records] == kinds
    result(folder, "bound")


def test_resumed_to_the_bit_and_charged_once(folder):
    whole, resumed = result(folder, "plain"), result(folder, "resumed")
    assert result(folder, "stopped")["seen"] == whole["seen"][:1]
    assert resumed["seen"] == whole["seen"]
    assert resumed["params"] == whole["params"]
    ledger = FileLedger.read(folder / "run" / "ledger.jsonl")
    assert str(ledger.event) == whole["charged"]
    copy = json.loads((folder / "resumed-1").read_text())
    assert copy["charged"] == whole["charged"]


def test_another_run_is_not_resumed(folder):
    first, second = errors(folder, "other")
    assert "CheckpointError: expected the same run" in first
    assert "loss_fn" in first
    assert "CheckpointError: expected the same run" in second


def test_another_number_of_processes_is_not_resumed(folder):
    first, second = errors(folder, "more")
    assert first.startswith("CheckpointError: expected the number of processes")
    assert ", 1, got 2. Start 1 with" in first
    assert second == f"ProcessLost: process 0 stopped the run: {first}"
    charged = (folder / "alone" / "ledger.jsonl").read_bytes()
    assert charged == (folder / "charged alone").read_bytes()
    charged = (folder / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"number of processes .*, 2, got 1\."):
        resumed_alone(folder / "run")
    assert charged == (folder / "run" / "ledger.jsonl").read_bytes()
