"""Kills one of two processes that train together, at random moments, and resumes them.

    python -m tests.soak_processes --kills 100

After every kill the other process must end by itself within a minute, with one sentence, and the
ledger must cover every step that any process began. A process that has begun to train ends with a
sentence of ours; before, JAX says it. In the end the run must be, to the bit, the one that was
never interrupted, and charged once.
"""

import contextlib
import json
import random
import shutil
import subprocess
import time
from pathlib import Path

from mirrordp.spending import FileLedger
from tests import process_worker
from tests.soak import run_soak

CASE = {"run": {"checkpoint": "run", "every": 2, "pause": 0.3}}
LIMIT = 300  # seconds of a run that nobody kills, also on a busy machine
OURS = "ProcessLost: "
THEIRS = "Terminating process because the JAX distributed service detected"
ENDS = WITH_OURS, WITH_THEIRS, WELL = (
    "ended with our sentence",
    "ended with JAX's before training",
    "ended well",
)


def check(folder: Path) -> None:
    """Raises unless every step that was begun is charged."""
    begun = [
        int(line)
        for index in range(process_worker.COUNT)
        if (folder / f"log-{index}").exists()
        for line in (folder / f"log-{index}").read_text().split()
    ]
    if begun:
        records = FileLedger.read(folder / "run" / "ledger.jsonl").records
        charged = max((record["stop"] for record in records if "stop" in record), default=0)
        assert charged >= max(begun), f"step {max(begun)} was begun, and {charged} are charged"


def results(folder: Path) -> list[dict]:
    """Returns what the processes ended with."""
    found = [json.loads((folder / f"run-{n}").read_text()) for n in range(process_worker.COUNT)]
    return [{"params": each["params"], "last": each["seen"][-1]} for each in found]


def wait_for_the_moment(folder: Path, processes: list, lasting: float, rng: random.Random) -> None:
    """Waits for any moment, or for one soon after some block of steps has begun."""
    if rng.random() < 0.2:
        return time.sleep(lasting * rng.uniform(0.0, 1.0))
    wanted = calls(folder) + rng.randint(1, 3)
    while calls(folder) < wanted and all(process.poll() is None for process in processes):
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 0.4))


def calls(folder: Path, index: int = 0) -> int:
    """Returns how many blocks a process has begun."""
    log = folder / f"log-{index}"
    return len(log.read_text().split()) if log.exists() else 0


def killed(folder: Path, processes: list, victim: int, before: int) -> tuple[str, float]:
    """Kills one of two processes; returns how the other ended and after how many seconds.

    Args:
        folder: the folder of the run.
        processes: both processes.
        victim: the number of the one to kill.
        before: how many blocks the other had begun when it was started.
    """
    other = 1 - victim
    processes[victim].kill()
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process_worker.finish([processes[other]], 60)
    took = time.monotonic() - began
    processes[victim].wait()
    output = folder / f"output-{other}"
    assert took < 60, f"no end after a kill of {victim}: {output.read_text()}"
    if (folder / f"run-{other}").exists():
        return WELL, took
    # The sentence may come from the shell that outlives the process. It need not be the last one,
    # since JAX may abort while Python shows the error.
    limit = time.monotonic() + 2
    while OURS not in output.read_text():
        if time.monotonic() > limit:
            is_theirs = THEIRS in output.read_text() and calls(folder, other) == before
            assert is_theirs, f"no sentence after a kill of {victim}: {output.read_text()}"
            return WITH_THEIRS, took
        time.sleep(0.1)
    return WITH_OURS, took


def soak(kills: int, seed: int, root: Path) -> dict[str, float]:
    """Kills until there were enough kills; returns what happened."""
    rng = random.Random(seed)
    reference = root / "reference"
    reference.mkdir()
    cache = root / "cache"
    began = time.monotonic()
    assert process_worker.finish(process_worker.start(reference, CASE, cache), LIMIT) == [0, 0]
    lasting = time.monotonic() - began
    expected = results(reference)
    happened = {"kills": 0, "runs": 0, "resumed": 0, "longest end": 0.0}
    happened |= dict.fromkeys(ENDS, 0)
    while happened["kills"] < kills:
        folder = root / f"run-{happened['runs']}"
        folder.mkdir()
        happened["runs"] += 1
        while not (folder / "run-0").exists() or not (folder / "run-1").exists():
            happened["resumed"] += (folder / "log-0").exists()
            for index in range(process_worker.COUNT):
                (folder / f"run-{index}").unlink(missing_ok=True)
            before = [calls(folder, index) for index in range(process_worker.COUNT)]
            processes = process_worker.start(folder, CASE, cache)
            if happened["kills"] < kills:
                wait_for_the_moment(folder, processes, lasting, rng)
                victim = rng.randrange(process_worker.COUNT)
                if all(process.poll() is None for process in processes):
                    kind, took = killed(folder, processes, victim, before[1 - victim])
                    happened["kills"] += 1
                    happened[kind] += 1
                    happened["longest end"] = max(happened["longest end"], round(took, 1))
                    check(folder)
                    print(f"killed {victim}, {kind} after {took:.1f} s", flush=True)
                    continue
            codes = process_worker.finish(processes, LIMIT)
            outputs = [(folder / f"output-{n}").read_text() for n in range(process_worker.COUNT)]
            assert codes == [0, 0], f"codes {codes} without a kill: {outputs}"
        check(folder)
        assert results(folder) == expected, "another result than without interruption"
        mine, whole = (
            FileLedger.read(path / "run" / "ledger.jsonl").event for path in (folder, reference)
        )
        assert mine == whole, "not charged exactly once"
        shutil.rmtree(folder)
    return happened


if __name__ == "__main__":
    run_soak(soak, "Kills processes that train together.", kills=10)
