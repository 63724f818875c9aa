"""The app in `examples/flower`, end to end: Flower's simulation engine, and separate processes."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mirrordp

if importlib.util.find_spec("flwr") is None and "MIRRORDP_REQUIRE_FLOWER" not in os.environ:
    # CI sets the variable, and a missing Flower fails there.
    reason = "Flower is an extra that is not installed (mirrordp[flower]); CI runs these with it"
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PATIENCE = 240.0  # seconds for what should take a few


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """Flower's commands in a home of their own, without a word to the outside world."""

    def __init__(self, home):
        self.home, self.started, self.port = home, [], free_port()
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Whoever tries to reach another machine all the same gets nowhere.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            # Every answer of a client is a process of its own; they compile once for all.
            "JAX_COMPILATION_CACHE_DIR": str(home / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        (home / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self, name, *command):
        with (self.home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.home,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def log(self, name):
        return (self.home / f"{name}.log").read_text(errors="replace")

    def wait(self, what, condition, *running):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            dead = [process.args for process in running if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"--- {p.name}\n{p.read_text()}" for p in self.home.glob("*.log"))
                pytest.fail(f"waited for {what}; ended: {dead}\n{logs}")
            time.sleep(0.2)

    def superlink(self, *options):
        """Returns the seconds until it answers, a measure of how busy the machine is."""
        begun = time.monotonic()
        process = self.start(
            "superlink", BIN / "flower-superlink", "--insecure", "--host", "127.0.0.1",
            "--port", str(self.port), "--disable-runtime-dependency-installation", *options,
        )  # fmt: skip
        self.wait("the SuperLink", lambda: "startup complete" in self.log("superlink"), process)
        return time.monotonic() - begun

    def supernode(self, number):
        return self.start(
            f"supernode-{number}", BIN / "flower-supernode", "--insecure", "--superlink",
            self.address, "--port", str(free_port()), "--node-config", f"partition-id={number}",
        )  # fmt: skip

    def run_app(self, config, *options):
        config = {"report-directory": f'"{self.home / "report"}"', **config}
        text = " ".join(f"{name}={value}" for name, value in config.items())
        return self.start(
            "run", BIN / "flwr", "run", str(ROOT / "examples" / "flower"), "here",
            "--stream", "--run-config", text, *options,
        )  # fmt: skip

    def report(self, run):
        path = self.home / "report" / "report.json"
        self.wait("the report", lambda: path.exists() or run.poll() is not None)
        assert path.exists(), self.log("run")
        return json.loads(path.read_text())

    @property
    def replies(self):
        """Of each round, how many replies came to which end."""
        found = re.findall(r"not covered by the guarantee\] replies: (.*)", self.log("run"))
        parts = [re.findall(r"(\d+) ([a-z ]+)", line) for line in found]
        return [{name.strip(): int(count) for count, name in line} for line in parts]

    def kill(self):
        """Ends what was started, and what that started: all of it lives in this home."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        mark = f"FLWR_HOME={self.home}\0".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)


@pytest.fixture
def homes(tmp_path):
    """Two deployments that know nothing of each other."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in ("processes", "simulation"):
            (tmp_path / name).mkdir()
            found.append(Processes(tmp_path / name))
            stack.callback(found[-1].kill)
        yield found


def epsilon(rounds, users, expected, noise_multiplier, **options):
    mechanism = mirrordp.Mechanism(
        sampling=mirrordp.PoissonSampling.for_batch_size(expected, num_examples=users),
        l2_clip_norm=0.5,
        noise_multiplier=noise_multiplier,
        num_steps=rounds,
        unit="user",
    )
    return mechanism.epsilon(1e-2)


def check_simulation(flower):
    flower.superlink("--simulation")
    config = {"num-users": 4, "expected-users": 3.0, "rounds": 2, "noise-multiplier": 3.0}
    run = flower.run_app(config, "--federation-config", "num-supernodes=4")
    report = flower.report(run)
    assert report["epsilon"] == pytest.approx(epsilon(2, 4, 3.0, 3.0))
    seen = report["results"]["epsilon_of_this_run_if_participation_is_seen"]
    assert seen == pytest.approx(epsilon(2, 4, 4.0, 3.0))
    assert report["unit"] == "user"
    assert report["charged_steps"] == 2
    flower.wait("the end of the log", lambda: "accuracy" in flower.log("run"))
    assert re.findall(r"round (\d): epsilon", flower.log("run")) == ["1", "2"]
    assert len(flower.replies) == 2
    assert {name for round_ in flower.replies for name in round_} <= {"accepted"}


def test_processes_with_hostile_nodes_and_one_that_dies_and_a_simulation(homes):
    """Two honest users and six liars; one honest user's node is killed while it computes.

    The server then waits for this user until time is up, long enough for a whole simulation.
    """
    flower, simulation = homes
    seconds = flower.superlink()
    honest, victim = flower.supernode(0), flower.supernode(1)
    kinds = ["huge", "nan", "shape", "repeated", "stalled", "junk"]
    liars = flower.start(
        "liars", sys.executable, Path(__file__).parent / "hostile_flower_node.py",
        flower.address, *kinds,
    )  # fmt: skip
    # With q = 1 everyone is asked in every round, and the counts are known.
    config = {
        "num-users": 8,
        "expected-users": 8.0,
        "rounds": 2,
        "noise-multiplier": 3.0,
        "participation-is-seen": "true",
        # An honest reply of the first round takes a few times as long as the SuperLink's start.
        "reply-timeout": max(30.0, 6 * seconds),
    }
    run = flower.run_app(config)
    flower.wait("round 1", lambda: "round 1: epsilon" in flower.log("run"), run, honest, liars)
    os.killpg(victim.pid, signal.SIGKILL)
    check_simulation(simulation)
    report = flower.report(run)
    flower.wait("the end of the log", lambda: "accuracy" in flower.log("run"))
    # The huge delta is in order, and clipped; of the repeated ones the first counts.
    expected = {"accepted": 6, "not finite": 1, "wrong shape": 1}
    first, second = flower.replies
    # Junk costs nobody a reply. When it is handed out is Flower's choice.
    assert first.pop("unsolicited", 0) + second.pop("unsolicited", 0) > 0
    assert first == expected, flower.log("run")
    unanswered = second.pop("missing", 0) + second.pop("failed", 0)
    # The one that was killed, and the one whose reply was announced and never came.
    assert unanswered == 2
    assert second == expected | {"accepted": 4}
    assert flower.log("liars").count("repeated: sent 1") == 2
    # Silence and lies have changed neither what was charged nor that it was.
    assert report["epsilon"] == pytest.approx(epsilon(2, 8, 8.0, 3.0))
    assert report["charged_steps"] == 2
    assert "q = 1" in report["scope"]
    # One step of the server is bounded: eight clipped deltas over eight users, and the noise.
    assert 0.3 < report["results"]["accuracy_on_public_test_rows"] <= 1
