"""What a run computes, as checkpoints compare it: value and gradient, with all constants.

A variant is a pair of losses (or optimisers) that differ in one thing only. Resuming with the other
one of the pair would show the same noise over another gradient.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_batching import custom_vmap

import mirrordp
from mirrordp import Checkpoint, PrivateData, PublicData, SweepRun, TrainStep
from mirrordp.training import engine
from mirrordp.training.checkpoint import CheckpointError, program
from mirrordp.training.federated import FederatedStep
from tests import test_federated, tools

THETA = jnp.array([0.5, -0.5, 0.25])
PRIVATE = PrivateData(tools.features())
PUBLIC = PublicData(tools.features(rows=10, seed=1))
USERS = test_federated.clients()


def scaled(inner, position):
    """Returns the loss ½‖position(θ) − inner(x)‖²."""
    return lambda params, x: 0.5 * jnp.sum((position(params) - inner(x)) ** 2)


def custom_vjp(factor, forward=1.0):
    @jax.custom_vjp
    def function(x):
        return forward * x

    function.defvjp(lambda x: (forward * x, None), lambda _, g: (factor * g,))
    return function


def custom_vjp_residual(factor):
    """The factor is in what the forward rule keeps."""

    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(lambda x: (x, factor), lambda kept, g: (kept * g,))
    return function


def custom_jvp(factor):
    @jax.custom_jvp
    def function(x):
        return x

    function.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
    return function


def custom_jvps(factor):
    @jax.custom_jvp
    def function(x):
        return x

    function.defjvps(lambda tangent, out, x: factor * tangent)
    return function


def in_scan(function):
    def looped(x):
        return jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=2)[0]

    return looped


def in_cond(function):
    return lambda x: jax.lax.cond(x[0] > 0, function, lambda x: x, x)


def in_map(function):
    return lambda x: jax.lax.map(function, x)


def solved(factor):
    """A linear solve whose transposed solver is the caller's."""

    def function(x):
        return jax.lax.custom_linear_solve(
            lambda v: v, x, lambda _, b: b, transpose_solve=lambda _, b: factor * b
        )

    return function


def large(value):
    array = np.ones(3000, np.float32)
    array[1500] = value
    return array


def nested(array):
    inner = jax.jit(lambda x: x + jnp.sum(jnp.asarray(array)))
    return lambda x: jax.jit(in_scan(inner))(x)


def mapped_with(factor):
    @custom_vmap
    def function(x):
        return x

    function.def_vmap(lambda size, batched, x: (factor * x, True))
    return function


def of_position(make):
    return lambda value: scaled(lambda x: x, make(value))


def of_example(make):
    return lambda value: scaled(make(value), lambda params: params)


LOSSES = {
    "custom_vjp": of_position(custom_vjp),
    "custom_vjp, kept by the forward rule": of_position(custom_vjp_residual),
    "custom_vjp, only its forward rule": lambda value: scaled(
        lambda x: x, custom_vjp(1.0, forward=value)
    ),
    "custom_vjp in jit": of_position(lambda value: jax.jit(custom_vjp(value))),
    "custom_vjp in scan": of_position(lambda value: in_scan(custom_vjp(value))),
    "custom_vjp in cond": of_position(lambda value: in_cond(custom_vjp(value))),
    "custom_vjp in a map": of_position(lambda value: in_map(custom_vjp(value))),
    "custom_vjp in checkpoint": of_position(lambda value: jax.checkpoint(custom_vjp(value))),
    "custom_vjp in jit in scan in checkpoint": of_position(
        lambda value: jax.checkpoint(in_scan(jax.jit(custom_vjp(value))))
    ),
    "custom_vjp with an array": of_position(
        lambda value: custom_vjp(jnp.array([1.0, 1.0, value], jnp.float32))
    ),
    "custom_jvp": of_position(custom_jvp),
    "custom_jvp by defjvps": of_position(custom_jvps),
    "custom_jvp in scan": of_position(lambda value: in_scan(custom_jvp(value))),
    "custom_jvp in cond": of_position(lambda value: in_cond(custom_jvp(value))),
    "a transposed solver": of_position(solved),
    "stop_gradient": of_position(
        lambda value: jax.lax.stop_gradient if value == 1.0 else lambda x: x
    ),
    "stop_gradient of a part": of_position(
        lambda value: lambda p: p * jax.lax.stop_gradient(value * p) / value
    ),
    "a number": of_example(lambda value: lambda x: value * x),
    "a NumPy array": of_example(lambda value: lambda x: x + np.sum(large(value))),
    "an array closed over": of_example(
        lambda value: functools.partial(lambda a, x: x + jnp.sum(a), jnp.asarray(large(value)))
    ),
    "an array in nested calls": of_example(lambda value: nested(large(value))),
    "an array in a branch": of_example(
        lambda value: in_cond(lambda x: x + jnp.sum(jnp.asarray(large(value))))
    ),
    "a precision": of_example(
        lambda value: (
            lambda x: jnp.dot(jnp.eye(3), x, precision="highest" if value == 1.0 else "default")
        )
    ),
}
OPTIMIZERS = {
    "a learning rate": lambda value: optax.sgd(0.1 * value),
    "a schedule": lambda value: optax.sgd(optax.cosine_decay_schedule(0.1, int(10 * value))),
    "steps of a schedule": lambda value: optax.sgd(
        optax.piecewise_constant_schedule(0.1, {int(5 * value): 0.5})
    ),
    "an array of scales": lambda value: optax.stateless(
        lambda updates, params: updates * jnp.array([1.0, 1.0, value])
    ),
    "a mirror map": lambda value: mirrordp.updates.mirror_descent(
        mirrordp.mirror.EuclideanMap(3), 0.1 * value
    ),
    "a required public gradient": lambda value: optax.chain(
        mirrordp.mix_public_gradient(0.25 * value), optax.sgd(0.1)
    ),
    "an optional public gradient": lambda value: optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None, *, public_grad=None, **extra_args: (
            updates if public_grad is None else updates + value * public_grad,
            state,
        ),
    ),
}
CALLBACKS = {
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential"),
    "io_callback": lambda x: jax.experimental.io_callback(np.sin, x, x),
    "ffi_call": lambda x: jax.ffi.ffi_call("absent", x, vmap_method="sequential")(x),
}


def steps(loss, public_loss=None, optimizer=None):
    """Returns a step of each kind of run."""
    options = {"loss_fn": loss, "public_loss_fn": public_loss}
    made = optimizer or tools.sgd(0.1)
    central = TrainStep(mechanism=tools.mechanism(), optimizer=made, **options)
    users = FederatedStep(
        mechanism=test_federated.mechanism(), optimizer=made, client_learning_rate=0.1, **options
    )
    return central, users


def described(kinds=slice(None), *, has_public=False, **options):
    """Returns what a checkpoint compares, for a step of each kind."""
    found, run = [], SweepRun()
    data = ((PRIVATE, PUBLIC), (USERS, test_federated.PUBLIC))[kinds]
    for step, (private, public) in zip(steps(**options)[kinds], data, strict=True):
        plan = engine._Plan(
            step=step, params=THETA, runs=[run], alphas=np.ones((1, 1)), private=private,
            public=public if has_public else None, needs_public_grad=False,
            excluded=np.zeros(len(private), bool), steps_per_call=1, stream=False, is_sweep=False,
        )  # fmt: skip
        starts = [engine._starting_point(step, THETA, run)]
        found.append(engine._configuration(plan, starts, None, b"k" * 32))
    return found


def described_loss(name, loss):
    step, _ = steps(tools.squared_distance)
    return engine.described_loss(name, step, loss, THETA, PRIVATE)


CENTRAL = slice(1)


def differing(one, two):
    return {name for name in {**one, **two} if one.get(name) != two.get(name)}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_differ(name):
    """The loss is described alike for both kinds of steps; `TestRuns` takes both."""
    make = LOSSES[name]
    [before], [again], [other] = (described(CENTRAL, loss=make(value)) for value in (1.0, 1.0, 2.0))
    assert before == again
    assert differing(before, other) == {"loss_fn"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_that_differ(name):
    make = OPTIMIZERS[name]
    before, again, other = (
        described(loss=tools.squared_distance, optimizer=make(value), has_public=True)
        for value in (1.0, 1.0, 2.0)
    )
    assert before == again
    for one, two in zip(before, other, strict=True):
        assert differing(one, two) == {"optimizer"}


def test_a_batching_rule_that_differs():
    """Public losses may have one."""

    def hashed(value):
        loss = of_example(mapped_with)(value)
        return described_loss("public_loss_fn", loss)

    assert hashed(1.0) == hashed(1.0) != hashed(2.0)


def test_names_do_not_matter():
    def first(x):
        @jax.jit
        def inner(x):
            return jnp.sin(x)

        return inner(x) + jax.jit(lambda x: x + 1)(x)

    def second(x):
        @jax.jit
        def other(x):
            with jax.named_scope("scope"):
                return jnp.sin(x)

        return other(x) + jax.jit(lambda y: y + 1)(x)

    assert program("f", first, THETA) == program("f", second, THETA)
    # What an operation is called does matter.
    assert program("f", jnp.linalg.eigvalsh, np.eye(3)) != program("f", jnp.linalg.svd, np.eye(3))


def in_backward(function):
    called = jax.custom_vjp(lambda x: x)
    called.defvjp(lambda x: (x, None), lambda _, g: (function(g),))
    return called


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("place", [lambda call: call, jax.jit, in_scan, in_backward])
def test_callbacks_are_refused(name, place):
    call = place(CALLBACKS[name])
    is_backward = place is in_backward
    loss = scaled(lambda x: x, call) if is_backward else scaled(call, lambda params: params)
    with pytest.raises(CheckpointError, match=f"expected public_loss_fn .* operation '{name}'"):
        described_loss("public_loss_fn", loss)
    update = jax.grad(lambda x: jnp.sum(call(x) ** 2)) if is_backward else call
    optimizer = optax.stateless(lambda updates, params: update(updates))
    with pytest.raises(CheckpointError, match=f"expected optimizer .* operation '{name}'"):
        described(loss=tools.squared_distance, optimizer=optimizer)


def central_run(folder, resume, loss=tools.squared_distance, **options):
    defaults = {
        "mechanism": tools.mechanism(),
        "optimizer": tools.sgd(0.1),
        "alpha": 0.5,
        "seed": 0,
        "steps_per_call": 3,
        "checkpoint": None if folder is None else Checkpoint(folder, every=5, resume=resume),
    }
    return tools.train(loss, THETA, PRIVATE, PUBLIC, **(defaults | options))


def federated_run(folder, resume, loss=tools.squared_distance, **options):
    defaults = {
        "alpha": 0.5,
        "public": test_federated.PUBLIC,
        "start": THETA,
        "optimizer": None,
        "checkpoint": None if folder is None else Checkpoint(folder, every=5, resume=resume),
    }
    return test_federated.run(loss=loss, **(defaults | options))


@pytest.mark.parametrize("run", [central_run, federated_run])
class TestRuns:
    @pytest.mark.parametrize("part", ["loss", "public_loss_fn"])
    def test_another_gradient_is_refused_and_the_same_accepted(self, tmp_path, run, part):
        make = LOSSES["custom_vjp"]
        options = [{part: make(value)} for value in (2.0, 2.0, 3.0)]
        begun = run(tmp_path / "run", False, **options[0])
        next(begun)
        begun.close()
        with pytest.raises(CheckpointError, match=f"differs in:.*{part}"):
            run(tmp_path / "run", True, **options[2])
        run(tmp_path / "run", True, **options[1]).close()

    def test_callbacks_are_refused_from_the_start(self, tmp_path, run):
        public_loss = scaled(CALLBACKS["pure_callback"], lambda p: p)
        with pytest.raises(CheckpointError, match=r"pure_callback.*train without a checkpoint"):
            run(tmp_path / "run", False, public_loss_fn=public_loss)
        next(run(None, False, public_loss_fn=public_loss))

    def test_debug_prints_are_allowed(self, tmp_path, run, capfd):
        def loss(params, x):
            jax.debug.print("seen")
            return tools.squared_distance(params, x)

        begun = run(tmp_path / "run", False, loss)
        next(begun)
        begun.close()
        next(run(tmp_path / "run", True, loss))
        assert "seen" in capfd.readouterr().out


def hashes():
    """Returns the hash of every loss and of every optimiser."""
    losses = [described(CENTRAL, loss=make(1.0)) for make in LOSSES.values()]
    options = {"loss": tools.squared_distance, "has_public": True}
    optimizers = [
        described(CENTRAL, optimizer=make(1.0), **options) for make in OPTIMIZERS.values()
    ]
    return [found["loss_fn"] for [found] in losses] + [found["optimizer"] for [found] in optimizers]


def test_another_process_finds_the_same():
    """The addresses of its objects and the order of its sets do not matter."""
    script = "from tests.test_programs import hashes\nprint(*hashes())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == hashes()


def test_a_callback_that_custom_rules_replace_is_seen():
    """With a gradient the rules run; ghost clipping may run what they stand for."""

    def plain(params, row):
        shape = jax.ShapeDtypeStruct(row.shape, row.dtype)
        return jnp.sum(
            params * jax.pure_callback(lambda x: x, shape, row, vmap_method="sequential")
        )

    loss = jax.custom_vjp(plain)
    loss.defvjp(
        lambda params, row: (jnp.sum(params * row), (params, row)),
        lambda kept, cotangent: (cotangent * kept[1], cotangent * kept[0]),
    )
    with pytest.raises(CheckpointError, match="pure_callback"):
        described_loss("loss_fn", loss)
