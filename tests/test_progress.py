"""The line that shows how far a run is: steps per second, ε so far, time left."""

import dataclasses
import io
import itertools
import types

import jax.numpy as jnp
import pytest

import mirrordp
from mirrordp import _rounding
from mirrordp.training import progress
from tests import tools

DELTA = 1e-3


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def steps(clock, *, count=6, per_block=10, seconds=5.0, charged=lambda step: step):
    """What a run yields, each block after some seconds; the first one takes a minute longer."""
    clock.seconds += 60
    for block in range(1, count + 1):
        clock.seconds += seconds
        done = block * per_block
        info = types.SimpleNamespace(
            step=done, num_steps=count * per_block, charged_steps=charged(done)
        )
        yield f"state {block}", info


def lines(run, mechanism, **options):
    file = io.StringIO()
    yielded = list(mirrordp.with_progress(run, mechanism, delta=DELTA, file=file, **options))
    return yielded, file.getvalue().splitlines()


def epsilon(mechanism, num_steps):
    return _rounding.upwards(mechanism.epsilon(DELTA, num_steps=num_steps))


def test_the_line_says_speed_cost_and_time_left(clock):
    mechanism = tools.mechanism(num_steps=60)
    yielded, shown = lines(steps(clock), mechanism)
    assert [state for state, _ in yielded] == [f"state {n}" for n in range(1, 7)]
    all_of_it = epsilon(mechanism, 60)
    # Ten steps in five seconds; the minute before the first yield does not count.
    assert shown == [
        f"step 10 of 60, ε = {epsilon(mechanism, 10)} of {all_of_it} at δ = 0.001",
        f"step 30 of 60, 2.000 steps/s, ε = {epsilon(mechanism, 30)} of {all_of_it} at δ = 0.001, "
        "00:15 left",
        f"step 50 of 60, 2.000 steps/s, ε = {epsilon(mechanism, 50)} of {all_of_it} at δ = 0.001, "
        "00:05 left",
        f"step 60 of 60, 2.000 steps/s, ε = {all_of_it} of {all_of_it} at δ = 0.001",
    ]


def test_steps_that_read_no_private_data_cost_nothing(clock):
    mechanism = tools.mechanism(num_steps=30)
    _, shown = lines(steps(clock, seconds=20.0, charged=lambda step: max(0, step - 30)), mechanism)
    assert "ε = 0 of" in shown[0]
    assert f"ε = {epsilon(mechanism, 10)} of" in shown[3]
    assert f"ε = {epsilon(mechanism, 30)} of {epsilon(mechanism, 30)}" in shown[5]


def test_slow_accounting_is_done_seldom(clock, monkeypatch):
    """Where ε takes two seconds, lines are at least forty seconds apart."""
    asked = []

    def slowly(mechanism, delta, *, num_steps=None):
        clock.seconds += 2
        asked.append(num_steps)
        return 1.0

    monkeypatch.setattr(mirrordp.Mechanism, "epsilon", slowly)
    _, shown = lines(steps(clock, count=30), tools.mechanism())
    assert asked[:3] == [None, 10, 90]
    assert len(shown) == len(asked) - 1 <= 5


def test_on_a_terminal_a_bar_moves(clock):
    file = Terminal()
    for _ in mirrordp.with_progress(
        steps(clock), tools.mechanism(num_steps=60), delta=DELTA, file=file
    ):
        pass
    states = file.getvalue().split("\r")
    assert any("0%|" in state and "before the first steps" in state for state in states)
    assert any(" 50%|" in state and "step 30 of 60, 2.000 steps/s" in state for state in states)
    assert "100%|" in states[-1]
    assert "step 60 of 60" in states[-1]


def train(**options):
    defaults = {"mechanism": tools.mechanism(), "optimizer": tools.sgd(0.1), "seed": 0}
    return tools.train(
        tools.squared_distance,
        jnp.zeros(3),
        mirrordp.PrivateData(tools.features()),
        **(defaults | {"steps_per_call": 4} | options),
    )


def test_a_run_is_the_same_with_and_without(capsys):
    shown = list(mirrordp.with_progress(train(), tools.mechanism(), delta=DELTA))
    plain = list(train())
    assert [info.step for _, info in shown] == [info.step for _, info in plain] == [4, 8, 12]
    for (one, _), (other, _) in zip(shown, plain, strict=True):
        assert (one.params == other.params).all()
    assert "step 12 of 12, " in capsys.readouterr().err


def test_a_run_knows_its_length(tmp_path):
    assert [info.num_steps for _, info in train(num_steps=6)] == [6, 6]
    kept = mirrordp.Checkpoint(tmp_path / "run")
    first, _ = itertools.islice(train(checkpoint=kept), 2)
    resumed, *_ = train(checkpoint=dataclasses.replace(kept, resume=True))
    assert first[1].num_steps == resumed[1].num_steps == 12
    assert resumed[1].step == 8


def test_a_run_that_is_left_early_is_closed():
    closed = []

    def run():
        try:
            yield from train()
        finally:
            closed.append(True)

    shown = mirrordp.with_progress(run(), tools.mechanism(), delta=DELTA, file=io.StringIO())
    next(shown)
    assert not closed
    shown.close()
    assert closed


def test_any_iterator_will_do(clock):
    yielded, shown = lines(iter(list(steps(clock))), tools.mechanism(num_steps=60))
    assert len(yielded) == 6
    assert shown[-1].startswith("step 60 of 60")


def test_a_sweep_shows_the_cost_of_one_run():
    mechanism = tools.mechanism()
    run = tools.train_sweep(
        tools.squared_distance,
        jnp.zeros(3),
        mirrordp.PrivateData(tools.features()),
        mirrordp.PublicData(tools.features(8, seed=1)),
        mechanism=mechanism,
        optimizer=tools.sgd(0.1),
        runs=[mirrordp.SweepRun(alpha=[0.0] * 6 + [0.5] * 6), mirrordp.SweepRun(alpha=0.5)],
        num_steps=12,
        steps_per_call=6,
    )
    yielded, shown = lines(run, mechanism)
    assert [infos[0].step for _, infos in yielded] == [6, 12]
    assert f"ε = {epsilon(mechanism, 6)} of" in shown[0]
    assert shown[-1].endswith("at δ = 0.001 for each run")


@pytest.mark.parametrize(
    ("mechanism", "delta", "error", "message"),
    [
        (tools.mechanism(), 2.0, ValueError, "delta must be a number in"),
        (tools.mechanism(), "1e-5", TypeError, "delta must be a number in"),
        ("mechanism", DELTA, TypeError, "mechanism must be Mechanism"),
    ],
)
def test_mistakes_show_before_the_first_step(mechanism, delta, error, message):
    def run():
        raise AssertionError("a step was taken")
        yield

    with pytest.raises(error, match=message):
        mirrordp.with_progress(run(), mechanism, delta=delta)
