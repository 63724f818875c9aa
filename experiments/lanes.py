"""`python -m experiments lanes PLAN`: several experiments at a time on one GPU.

A small network leaves most of a large GPU idle. A plan is a TOML file of stages, one after the
other; a stage has lanes, which run side by side; a lane is a list of commands of this package:

    [[stages]]
    first = ["record public experiments/record/configs/base.toml --seeds 1"]
    second = ["record public experiments/record/configs/base.toml --seeds 2", "methods"]

The lanes share the GPU through NVIDIA's Multi-Process Service where it is installed, and JAX's
compiled programs through a folder. Commands skip work that has its line in a result file, so the
same plan goes on where its time was over.
"""

import argparse
import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.settings_files import SettingsError, read

Lanes = dict[str, list[str]]

# Seconds in which a command that is told to end may write what it has.
GRACE = 10.0


def stages(path: Path) -> list[Lanes]:
    """Reads a plan and checks its form."""
    plan = read(path, ())
    found = plan.get("stages")
    if set(plan) != {"stages"} or not isinstance(found, list):
        raise SettingsError(f"{path.name}: expected tables [[stages]] and nothing else.")
    for number, stage in enumerate(found, start=1):
        for name, commands in stage.items():
            if not _is_lane(commands):
                raise SettingsError(
                    f"{path.name}, stage {number}: expected a list of commands for {name!r}, got "
                    f"{commands!r}."
                )
    return found


def _is_lane(commands: Any) -> bool:
    return isinstance(commands, list) and all(isinstance(one, str) and one for one in commands)


def run(
    plan: Sequence[Lanes],
    logs: Path,
    *,
    seconds: float = math.inf,
    say: Callable[[str], None] = print,
) -> dict[str, int]:
    """Runs the stages; returns the exit status of each command that ran.

    A lane goes on after a command that failed. At the end of the time, commands are told to end
    (SIGTERM, and SIGKILL ten seconds later).

    Args:
        plan: what `stages` returns.
        logs: folder for a file of output per lane.
        seconds: how long all of it may take.
        say: takes a line when a command begins and when it ends.
    """
    logs.mkdir(parents=True, exist_ok=True)
    begun, found = time.monotonic(), {}
    deadline = begun + seconds

    def work(name: str, commands: Sequence[str], environment: Mapping[str, str]) -> None:
        for command in commands:
            if (left := deadline - time.monotonic()) <= 0:
                say(f"{name}: not begun: {command}")
                continue
            say(f"{name}: {command}")
            at = time.monotonic()
            with open(logs / f"{name}.log", "a") as log:
                status = _finished(command, log, environment, left)
            found[command] = status
            took = time.monotonic() - at
            say(f"{name}: {'done' if status == 0 else f'status {status}'} after {took:.0f} s")

    with _shared_gpu() as environment:
        for stage in plan:
            threads = [
                threading.Thread(target=work, args=(name, commands, environment))
                for name, commands in stage.items()
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return found


def _finished(command: str, log, environment: Mapping[str, str], seconds: float) -> int:
    """Runs one command; returns its exit status, which is negative if a signal ended it."""
    words = [sys.executable, "-m", "experiments", *shlex.split(command)]
    print(f"$ {shlex.join(words[1:])}", file=log, flush=True)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment)
    )
    try:
        return process.wait(None if math.isinf(seconds) else seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextlib.contextmanager
def _shared_gpu() -> Iterator[dict[str, str]]:
    """Yields the environment of commands that share a GPU, and a service that lets them."""
    control = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            # Each process would take three quarters of the memory otherwise.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # Runs of one kind differ in data alone: the first of them compiles for all.
            "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "experiments-compiled"),
        }
        if control is None:
            yield environment
            return
        environment |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], env=environment, check=True)
        try:
            yield environment
        finally:
            subprocess.run([control], env=environment, input="quit\n", text=True, check=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a plan; the exit status is 1 if a command failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments lanes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, help="a TOML file")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end everything after them")
    parser.add_argument("--logs", type=Path, default=Path("lanes"), help="folder of output (lanes)")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    try:
        plan = stages(arguments.plan)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = run(
        plan,
        arguments.logs,
        seconds=60 * arguments.minutes,
        say=lambda line: print(f"[{time.monotonic() - begun:5.0f} s] {line}", flush=True),
    )
    failed = {command: status for command, status in found.items() if status}
    for command, status in failed.items():
        print(f"status {status}: {command}", file=sys.stderr)
    return 1 if failed else 0
