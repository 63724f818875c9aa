"""The planner: batch size, steps and noise for a given ε and compute."""

import json
import math
import subprocess
import sys

import pytest

from mirrordp import Adjacency, cli
from mirrordp.privacy import accounting
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


def test_command_does_not_wait_for_jax():
    code = "import sys, mirrordp.tuning.planning; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
