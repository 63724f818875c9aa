"""Commands side by side: what runs when, what a failure and the end of the time do."""

import json
import os
import time
from pathlib import Path

import pytest

from experiments import lanes
from experiments.__main__ import COMMANDS
from experiments.settings_files import SettingsError

ROOT = Path(__file__).parents[2]

# A command of the package that does what a test wants, by way of its import.
SCRIPT = """
import json, os, sys, time
def main(argv):
    print("output of", *argv)
    with open(os.environ["SEEN"], "a") as file:
        print(json.dumps([argv[0], time.time(), dict(os.environ)]), file=file)
    time.sleep(float(argv[1]))
    return int(argv[2])
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Replaces `python -m experiments` by a script; returns what its commands wrote."""
    package = tmp_path / "code" / "experiments"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(f"{SCRIPT}\nsys.exit(main(sys.argv[1:]))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.chdir(tmp_path / "code")

    def read():
        lines = (tmp_path / "seen").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return read


def test_stages_follow_each_other_and_lanes_do_not(seen, tmp_path):
    plan = [{"a": ["one 1 0", "two 0 0"], "b": ["three 1 0"]}, {"a": ["four 0 0"]}]
    begun = time.monotonic()
    found = lanes.run(plan, tmp_path / "logs", say=lambda line: None)
    assert time.monotonic() - begun < 30
    assert found == dict.fromkeys(["one 1 0", "two 0 0", "three 1 0", "four 0 0"], 0)
    times = {name: at for name, at, _ in seen()}
    assert abs(times["one"] - times["three"]) < times["two"] - times["one"]
    assert times["four"] > max(times[name] for name in ("one", "two", "three"))
    log = (tmp_path / "logs" / "a.log").read_text()
    assert log.index("output of one") < log.index("output of two") < log.index("output of four")
    assert "three" not in log


def test_a_lane_goes_on_after_a_failure(seen, tmp_path):
    said = []
    plan = [{"a": ["one 0 3", "two 0 0"]}]
    assert lanes.run(plan, tmp_path, say=said.append) == {"one 0 3": 3, "two 0 0": 0}
    assert any("status 3" in line for line in said)


def test_the_end_of_the_time(seen, tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    plan.write_text('[[stages]]\na = ["one 600 0", "two 0 0"]\n[[stages]]\nb = ["three 0 0"]\n')
    begun = time.monotonic()
    assert lanes.main([str(plan), "--minutes", "0.1", "--logs", str(tmp_path / "logs")]) == 1
    assert time.monotonic() - begun < 60
    assert [name for name, *_ in seen()] == ["one"]
    output = capsys.readouterr()
    assert "a: not begun: two 0 0" in output.out
    assert "b: not begun: three 0 0" in output.out
    assert "status -15: one 600 0" in output.err


def test_lanes_share_a_gpu_where_they_can(seen, tmp_path, monkeypatch):
    service = tmp_path / "bin" / "nvidia-cuda-mps-control"
    service.parent.mkdir()
    calls = tmp_path / "calls"
    service.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $@ $(cat)" >> {calls}\n')
    service.chmod(0o755)
    monkeypatch.setenv("PATH", f"{service.parent}{os.pathsep}{os.environ['PATH']}")
    lanes.run([{"a": ["one 0 0"]}], tmp_path, say=lambda line: None)
    ((_, _, environment),) = seen()
    folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert calls.read_text().split("\n")[:2] == [f"{folder} -d ", f"{folder}  quit"]
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1", "expected tables"),
        ('[[stages]]\na = "one"', "expected a list of commands for 'a', got 'one'"),
        ('[[stages]]\na = [""]', "stage 1: expected a list of commands"),
    ],
)
def test_plans_are_checked_before_anything_runs(text, message, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    with pytest.raises(SettingsError, match=message):
        lanes.stages(plan)


def test_a_plan_that_is_not_there(tmp_path, capsys):
    assert lanes.main([str(tmp_path / "plan.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_the_plans_that_are_here_name_commands_and_files_that_exist():
    paths = sorted(ROOT.glob("experiments/**/plan*.toml"))
    assert paths
    for path in paths:
        for stage in lanes.stages(path):
            for command in (one.split() for commands in stage.values() for one in commands):
                assert command[0] in COMMANDS
                assert all((ROOT / word).is_file() for word in command if word.endswith(".toml"))
