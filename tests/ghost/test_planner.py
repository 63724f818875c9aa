"""The choice of paths and microbatches, from sizes alone and against what was measured."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp.privacy import ghost
from mirrordp.privacy.ghost import _cost, _memory, _plan, _sum
from mirrordp.privacy.trainable import Trainable

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "paths.jsonl"
LINES = [json.loads(line) for line in MEASURED.read_text().splitlines()]


def task(positions, *, examples=64, left=768, right=768, **changes):
    sizes = {"groups": 1, "inputs": left, "block": 2, "width": 4} | changes
    return _cost.Task(examples, positions, left, right, **sizes)


def name_of(line):
    return " ".join(map(str, [line["device"], *line["case"].values()]))


@pytest.mark.parametrize("line", LINES, ids=map(name_of, LINES))
def test_the_choice_is_near_the_measured_optimum(line):
    """By the planner's own price for time and memory, with the times that were measured."""
    sizes, machine = _cost.Task(**line["task"]), _cost.MACHINES[line["device"]]
    costs = {"gram": _cost.gram_cost(sizes, machine), "product": _cost.product_cost(sizes, machine)}
    prices = {
        path: _cost.price(cost._replace(seconds=line["ms"][path] / 1000), machine)
        for path, cost in costs.items()
    }
    chosen = "gram" if _plan._prefers_gram(sizes, machine) else "product"
    assert prices[chosen] <= 1.15 * min(prices.values()), (chosen, line)


@pytest.mark.parametrize("machine", _cost.MACHINES.values(), ids=_cost.MACHINES)
def test_few_positions_have_gram_matrices_and_many_have_not(machine):
    choices = [_plan._prefers_gram(task(2**n), machine) for n in range(14)]
    assert choices[0]
    assert not choices[-1]
    # Longer sequences never go back to Gram matrices.
    assert choices == sorted(choices, reverse=True)
    # A lookup's gradient is almost all zeros.
    assert _plan._prefers_gram(task(512, left=50_000, picked=True), machine)


def two_layers(params, example):
    return jnp.sum(jnp.tanh(example @ params["into"]) @ params["out"])


PARAMS = {"into": jnp.ones((30, 40)), "out": jnp.ones((40, 5))}


def split_of(rows, loss=two_layers, positions=7):
    batch = jnp.ones((rows, positions, 30))
    return _sum.Split.of(loss, PARAMS, (batch, None), Trainable.of(None), rows)


def test_the_need_of_an_example_is_that_of_the_program():
    found = _memory.need(split_of(16))
    entries = 30 * 40 + 40 * 5
    assert found.fixed == 2 * 4 * entries + 12 * entries
    # The derivative of tanh keeps its result; the products keep their inputs.
    assert found.residuals + found.kept >= 4 * 7 * 40
    assert found.of(16) - found.of(15) == found.per_example
    again = _memory.need(split_of(16, jax.checkpoint(two_layers)))
    assert again.residuals < found.residuals + found.kept


def test_as_many_examples_as_fit():
    split = split_of(64)
    need = _memory.need(split)
    room = lambda examples: math.ceil(need.of(examples) / _memory.SHARE)  # noqa: E731
    assert _memory.largest_microbatch(split, 64, memory=room(64)) == 64
    # 60 would fit, but 32 and 32 are as many programs as 60 and 4.
    assert _memory.largest_microbatch(split, 64, memory=room(60)) == 32
    assert _memory.largest_microbatch(split, 64, memory=room(1)) == 1
    least = 4 * (30 * 40 + 40 * 5) + need.formed
    with pytest.warns(UserWarning, match=r"jax\.checkpoint"):
        size = _memory.largest_microbatch(split, 64, memory=least)
    assert size == 1
    with pytest.raises(MemoryError, match=r"at least .* GiB of memory for one example at a time"):
        _memory.largest_microbatch(split, 64, memory=least - 1)


def test_an_upper_bound_spares_the_tracing(monkeypatch):
    split = split_of(8)
    assert _memory._without_tracing(split, 8) >= _memory.need(split).of(8)
    monkeypatch.setattr(_memory, "need", None)
    assert _memory.largest_microbatch(split, 8, memory=2**40) == 8


@pytest.mark.usefixtures("nothing_reserved")
def test_a_small_device_takes_microbatches_by_itself(monkeypatch, capsys):
    split = split_of(64)
    small = math.ceil(_memory.need(split).of(10) / _memory.SHARE)
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(64, 7, 30)), jnp.float32)
    clipped = ghost.clipped_grad(two_layers, l2_clip_norm=0.5)
    nobody = jnp.zeros(64, bool)
    wanted = clipped(PARAMS, batch, nobody)
    ghost.explain(two_layers, PARAMS, batch)
    assert "64 of 64 examples at a time" in capsys.readouterr().out
    monkeypatch.setattr(_memory, "device_memory", lambda: small)
    program = str(jax.make_jaxpr(clipped)(PARAMS, batch, nobody))
    assert "length=7" in program
    found = clipped(PARAMS, batch, nobody)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)
    ghost.explain(two_layers, PARAMS, batch)
    assert "10 of 64 examples at a time" in capsys.readouterr().out
    # A number that is given stays, whatever fits.
    whole = ghost.clipped_grad(two_layers, l2_clip_norm=0.5, microbatch_size=64)
    assert "length=7" not in str(jax.make_jaxpr(whole)(PARAMS, batch, nobody))
