"""The planner: batch size, steps and noise for a given ε and compute."""

import json
import math
import subprocess
import sys

import pytest

from mirrordp import Adjacency, cli
from mirrordp._rounding import upwards
from mirrordp.privacy import accounting
from mirrordp.report.charts import PALETTE
from mirrordp.tuning import planning

SMALL = {"epsilon": 1.0, "delta": 1e-5, "num_examples": 1000, "epochs": 10.0}


@pytest.fixture(scope="module")
def found():
    return planning.plan(**SMALL)


def test_the_chosen_noise_keeps_to_epsilon(found):
    chosen = found.chosen
    event = accounting.poisson_event(
        chosen.noise_multiplier,
        sampling_prob=chosen.batch_size / 1000,
        num_steps=chosen.num_steps,
    )
    reached = accounting.epsilon(event, 1e-5, adjacency=Adjacency.ZERO_OUT).epsilon
    assert 0.99 < reached <= 1.0


def test_it_takes_most_steps_among_those_with_little_more_than_the_least_noise(found):
    least = min(choice.average_noise for choice in found.choices)
    good = [choice for choice in found.choices if choice.average_noise <= 1.1 * least]
    assert found.chosen.num_steps == max(choice.num_steps for choice in good)
    assert len(good) < len(found.choices)
    for choice in found.choices:
        assert choice.batch_size * choice.num_steps <= 10_000
        assert choice.average_noise == pytest.approx(
            choice.noise_multiplier / choice.batch_size / math.sqrt(choice.num_steps)
        )


def test_too_little_compute_is_refused():
    with pytest.raises(ValueError, match="more epochs"):
        planning.plan(epsilon=1.0, delta=1e-5, num_examples=50, epochs=1)


def test_command_prints_and_draws(found, capsys, tmp_path):
    options = ["plan", "--epsilon", "1", "--num-examples", "1000", "--epochs", "10"]
    options += ["--delta", "1e-5", "--figure", str(tmp_path / "plan.png")]
    assert cli.main([*options, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(json.dumps(found.to_dict()))
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert cli.main(["plan", "--epsilon", "1", "--num-examples", "5", "--delta", "1e-5"]) == 2


def test_the_noise_to_use_is_stated_and_why_the_table_has_another(found):
    (starred,) = [line for line in str(found).splitlines() if line.endswith(" *")]
    compared = next(c for c in found.choices if c.batch_size == found.chosen.batch_size)
    assert f" {upwards(compared.noise_multiplier)} " in starred
    assert compared.noise_multiplier > found.chosen.noise_multiplier
    more = 100 * (compared.noise_multiplier / found.chosen.noise_multiplier - 1)
    last = str(found).splitlines()[-1]
    assert f"noise multiplier {upwards(found.chosen.noise_multiplier, 6)}, by PLD" in last
    assert f"by RDP, which is faster and asks for {more:.1f}% more noise here" in last
    # The number that people copy keeps to epsilon.
    assert float(upwards(found.chosen.noise_multiplier, 6)) >= found.chosen.noise_multiplier


def test_nothing_is_said_where_the_table_has_the_noise_to_use():
    found = planning.plan(**SMALL, adjacency=Adjacency.REPLACE)
    noise = found.chosen.noise_multiplier
    shown = str(found)
    (starred,) = [line for line in shown.splitlines() if line.endswith(" *")]
    assert f" {upwards(noise)} " in starred
    assert f"with noise multiplier {upwards(noise, 6)}." in shown
    assert "RDP" not in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.txt", "expected --figure with the ending .png, .pdf or .svg, got"),
        ("a", "expected --figure with the ending .png, .pdf or .svg, got"),
        ("no/a.png", "expected --figure in a folder that exists, got"),
    ],
)
def test_figure_that_cannot_be_written_is_refused_at_once(
    capsys, tmp_path, monkeypatch, name, said
):
    monkeypatch.setattr(planning, "plan", lambda **_: pytest.fail("computed"))
    options = ["plan", "--epsilon", "1", "--num-examples", "1000", "--delta", "1e-5"]
    assert cli.main([*options, "--figure", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "start"), [("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_figure_has_the_format_of_its_ending(found, tmp_path, monkeypatch, capsys, name, start):
    monkeypatch.setattr(planning, "plan", lambda **_: found)
    options = ["plan", "--epsilon", "1", "--num-examples", "1000", "--delta", "1e-5"]
    assert cli.main([*options, "--figure", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    assert f"Wrote {tmp_path / name}" in capsys.readouterr().out


def test_figure_looks_like_the_others(found):
    (axes,) = found.figure().axes
    assert not axes.spines["top"].get_visible()
    assert {line.get_color() for line in axes.lines} <= set(PALETTE)
    assert "RDP" in axes.get_ylabel()


def test_command_does_not_wait_for_jax():
    code = "import sys, mirrordp.tuning.planning; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
