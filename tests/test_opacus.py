"""Opacus' optimisers with public gradients: what they compute, what they charge, what they refuse.

Runs are tiny: 40 rows, batches of 10 on average. The noise is Opacus' own unless a test needs to
know it.
"""

import collections
import contextlib
import copy
import importlib.util
import os
import random
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

if importlib.util.find_spec("opacus") is None and "MIRRORDP_REQUIRE_OPACUS" not in os.environ:
    # CI sets the variable, and a missing Opacus fails there.
    reason = "Opacus is an extra that is not installed (mirrordp[opacus]); CI runs these with it"
    pytest.skip(reason, allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
import opacus.optimizers.optimizer
import optax
import torch
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mirrordp
from mirrordp import Adjacency, Budget, FileLedger, Ledger, PrivateData, schedules
from mirrordp.integrations.opacus import public_batches, warm_start, with_public_gradient
from mirrordp.privacy import Accountant, accounting
from mirrordp.report import RunReport
from mirrordp.report.page import report_page
from mirrordp.spending.budget import BudgetError

ROWS, BATCH, SIGMA, CLIP, DELTA = 40, 10, 3.0, 0.7, 1e-3
RATE = BATCH / ROWS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:PrivacyEngine detected new dataset object"),
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    # All tests have one seed.
    pytest.mark.filterwarnings("ignore:a step has the same noise as a step of another run"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    # The tensors are tiny, and the sum of a split batch must not depend on threads.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def rows(count=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return x, (x.sum(1) > 0).long()


PUBLIC = rows(12, seed=1)


def network():
    with torch.random.fork_rng():  # the noise goes on
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def private(
    mode="hooks", *, module=None, data=None, noise=SIGMA, rate=0.5, accountant="prv",
    engine=None, batch=BATCH, workers=0, persistent=False, **options
):  # fmt: skip
    """A module, optimiser, criterion and loader that Opacus made private, in one namespace."""
    module = network() if module is None else module
    engine = engine or opacus.PrivacyEngine(accountant=accountant)
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=rate),
        data_loader=DataLoader(
            TensorDataset(*(data or rows())), batch_size=batch,
            num_workers=workers, persistent_workers=persistent,
        ),
        noise_multiplier=noise,
        **{"max_grad_norm": CLIP, "grad_sample_mode": mode} | options,
    )  # fmt: skip
    module, optimizer, *criterion, loader = made
    return types.SimpleNamespace(
        module=module, optimizer=optimizer, loader=loader, engine=engine,
        criterion=criterion[0] if criterion else nn.CrossEntropyLoss(),
    )  # fmt: skip


def mixed(mode="hooks", alpha=0.5, *, made=None, scale_noise=True, num_steps=None, spend=None, **o):
    made = made or private(mode, **o)
    with_public_gradient(
        made.optimizer, made.module, made.loader,
        alpha=alpha, scale_noise=scale_noise, num_steps=num_steps, spend=spend,
    )  # fmt: skip
    return made


def public_loss(made):
    return F.cross_entropy(made.module(PUBLIC[0]), PUBLIC[1])


def backward(made, batch):
    made.optimizer.zero_grad()
    made.criterion(made.module(batch[0]), batch[1]).backward()


def train(made, steps=6, *, loader=None, public=True):
    """Takes steps as an Opacus user would, and returns the parameters."""
    taken = 0
    while taken < steps:
        for batch in loader or made.loader:
            backward(made, batch)
            if public:
                made.optimizer.public_step(lambda: public_loss(made))
            made.optimizer.step()
            taken += 1
            if taken == steps:
                break
    return params(made)


def params(made):
    return [p.detach().clone() for p in made.optimizer.params]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def noises(monkeypatch):
    """Replaces Opacus' noise by noise from a list, which tests read."""
    drawn = []

    def noise(std, reference, generator=None, secure_mode=False):
        generator = torch.Generator().manual_seed(100 + len(drawn))
        drawn.append(std * torch.randn(reference.shape, generator=generator, dtype=reference.dtype))
        return drawn[-1]

    for module in ("optimizer", "optimizer_fast_gradient_clipping"):
        monkeypatch.setattr(f"opacus.optimizers.{module}._generate_noise", noise)
    return drawn


# What a step computes.


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost", "per_layer", "unwrapped"])
def test_alpha_one_is_opacus_to_the_bit(mode):
    options = {
        "per_layer": {"clipping": "per_layer", "max_grad_norm": [CLIP] * 4, "mode": "hooks"},
        "unwrapped": {"wrap_model": False, "mode": "hooks"},
    }.get(mode, {"mode": mode})

    def run(wrap):
        module = network()
        made = private(module=module, **options)
        if mode == "unwrapped":
            made.hooks, made.module = made.module, module
        if wrap:
            hooks = getattr(made, "hooks", made.module)
            with_public_gradient(made.optimizer, hooks, made.loader, alpha=1.0)
        torch.manual_seed(3)
        return train(made, public=wrap)

    assert same(run(False), run(True))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("scale_noise", [True, False])
def test_a_step_is_the_formula(mode, scale_noise, noises):
    made = mixed(mode, 0.3, scale_noise=scale_noise)
    batch = next(iter(made.loader))
    before = params(made)
    # The clipped sum from one row at a time, by plain autograd on a copy without hooks.
    plain = network()
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for x, y in zip(*batch, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(plain(x[None]), y[None]), plain.parameters())
        norm = torch.cat([g.flatten() for g in grads]).norm()
        total = [t + g * min(1.0, CLIP / (norm + 1e-6)) for t, g in zip(total, grads, strict=True)]
    loss = F.cross_entropy(plain(PUBLIC[0]), PUBLIC[1])
    public = torch.autograd.grad(loss, plain.parameters())
    backward(made, batch)
    returned = made.optimizer.public_step(lambda: public_loss(made))
    made.optimizer.step()
    assert float(returned) == pytest.approx(float(loss.detach()))
    assert len(noises) == 4
    for i, found in enumerate(made.optimizer.params):
        weight = 0.3 if scale_noise else 1.0
        expected = (0.3 * total[i] + weight * noises[i]) / BATCH + 0.7 * public[i]
        torch.testing.assert_close(before[i] - 0.5 * expected, found.detach())


def test_the_released_gradient_is_clipped_before_it_is_mixed(noises):
    made = private()
    with_public_gradient(
        made.optimizer, made.module, made.loader, alpha=[1.0, 0.5], noisy_clip_norm=1e-3
    )
    before = params(made)
    moves = []
    for _ in range(2):
        after = train(made, 1)
        moves.append(torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]))
        before = after
    assert float(moves[0].norm()) == pytest.approx(0.5e-3, rel=1e-2)
    assert float(moves[1].norm()) > 1e-2


def as_jax(module):
    return {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * 9, 2)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.conv(x)), 2)
        return self.out(x.flatten(1))


def conv_net(p, x):
    x = jax.lax.conv(x[None], p["conv.weight"], (1, 1), "SAME")[0] + p["conv.bias"][:, None, None]
    x = jax.lax.reduce_window(jnp.tanh(x), -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID")
    return p["out.weight"] @ x.reshape(-1) + p["out.bias"]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(4, 2)
        self.lstm = opacus.layers.DPLSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.out(self.lstm(self.embed(x))[0][:, -1])


def recurrent(p, tokens):
    def cell(carry, x):
        h, c = carry
        gates = p["lstm.weight_ih_l0"] @ x + p["lstm.bias_ih_l0"]
        i, f, g, o = jnp.split(gates + p["lstm.weight_hh_l0"] @ h + p["lstm.bias_hh_l0"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    (h, _), _ = jax.lax.scan(cell, (jnp.zeros(4), jnp.zeros(4)), p["embed.weight"][tokens])
    return p["out.weight"] @ h + p["out.bias"]


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.attend, self.project, self.out = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.attend(self.norm(x)).split(4, dim=-1)
        weights = torch.softmax(q @ k.transpose(1, 2) / 2, dim=-1)
        return self.out((x + self.project(weights @ v)).mean(1))


def transformer(p, tokens):
    x = p["embed.weight"][tokens]
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    normed = normed * p["norm.weight"] + p["norm.bias"]
    q, k, v = jnp.split(normed @ p["attend.weight"].T + p["attend.bias"], 3, axis=-1)
    mixed = jax.nn.softmax(q @ k.T / 2, axis=-1) @ v @ p["project.weight"].T + p["project.bias"]
    return p["out.weight"] @ (x + mixed).mean(0) + p["out.bias"]


@pytest.mark.parametrize(
    ("make", "forward"),
    [(ConvNet, conv_net), (Recurrent, recurrent), (Transformer, transformer)],
)
def test_twenty_steps_agree_with_jax(make, forward, noises):
    generator = torch.Generator().manual_seed(5)
    if make is ConvNet:
        x = torch.randn(ROWS, 1, 6, 6, generator=generator, dtype=torch.float64)
    else:
        x = torch.randint(0, 5, (ROWS, 6), generator=generator)
    y = torch.randint(0, 2, (ROWS,), generator=generator)
    public = x[:8], y[:8]
    alpha, steps = schedules.cosine(decay_steps=19), 20
    made = private(module=make().double(), data=(x, y), noise=1.0, rate=0.2)
    with jax.enable_x64(True):
        theta = as_jax(made.module._module)
        transform = optax.chain(mirrordp.mix_public_gradient(alpha), optax.sgd(0.2))
        state = transform.init(theta)

        def loss_fn(p, x, y):
            logits = forward(p, x)
            return jax.nn.logsumexp(logits) - logits[y]

        @jax.jit
        def take(theta, state, x, y, weight, noise):
            grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(theta, x, y)
            squares = [(g.reshape(len(g), -1) ** 2).sum(1) for g in jax.tree.leaves(grads)]
            # Opacus' rule, which adds 1e-6 to the norm.
            factor = jnp.minimum(1, CLIP / (jnp.sqrt(sum(squares)) + 1e-6)) * weight
            total = jax.tree.map(lambda g: jnp.tensordot(factor, g, 1), grads)
            noisy = jax.tree.map(lambda t, b: (t + b) / BATCH, total, noise)
            mean = lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(p, *public_arrays))  # noqa: E731
            updates, state = transform.update(
                noisy, state, theta, public_grad=jax.grad(mean)(theta)
            )
            return optax.apply_updates(theta, updates), state

        public_arrays = [jnp.asarray(a.numpy()) for a in public]
        mixed(alpha=alpha, made=made)
        names = [name for name, _ in made.module._module.named_parameters()]
        taken = 0
        while taken < steps:
            for batch in made.loader:
                taken += 1
                backward(made, batch)
                made.optimizer.public_step(
                    lambda: F.cross_entropy(made.module(public[0]), public[1])
                )
                noises.clear()
                made.optimizer.step()
                size = len(batch[0])
                padded = [np.concatenate([b, np.zeros((30 - size, *b.shape[1:]), b.numpy().dtype)])
                          for b in batch]  # fmt: skip
                drawn = noises or [torch.zeros_like(p) for p in made.optimizer.params]
                noise = {n: jnp.asarray(b.numpy()) for n, b in zip(names, drawn, strict=True)}
                weight = (np.arange(30) < size).astype(float)
                theta, state = take(theta, state, *padded, weight, noise)
                if taken == steps:
                    break
        for name, found in made.module._module.named_parameters():
            np.testing.assert_allclose(theta[name], found.detach().numpy(), rtol=0, atol=1e-6)
    assert made.optimizer.charged_steps == 19


@pytest.mark.parametrize(
    "alpha",
    [0.25, [0.25, 0.5, 1.0], schedules.linear(0.25, 1.0, num_steps=3), schedules.constant(0.25)],
)
@pytest.mark.parametrize("num_steps", [None, 3])
def test_every_schedule_is_followed(alpha, num_steps):
    made = mixed(alpha=alpha, num_steps=num_steps)
    expected = schedules.evaluate(schedules.as_schedule(alpha), 3)
    for value in expected:
        assert made.optimizer.alpha == pytest.approx(float(value))
        train(made, 1)
    if num_steps or isinstance(alpha, list):
        with pytest.raises((RuntimeError, ValueError), match="steps"):
            train(made, 1)
    assert made.optimizer.charged_steps == 3


def in_parts(made, size):
    """Trains for one pass with batches in parts of this size; yields after each part."""
    manager = BatchMemoryManager(
        data_loader=made.loader, max_physical_batch_size=size, optimizer=made.optimizer
    )
    with manager as loader:
        for batch in loader:
            backward(made, batch)
            made.optimizer.public_step(lambda: public_loss(made))
            made.optimizer.step()
            yield


# Steps that read no private data.


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("split", [False, True])
def test_alpha_zero_reads_nothing_private(mode, split, noises):
    def run(data):
        made = mixed(mode, alpha=0.0, data=data)
        if not split:
            return made, train(made)
        for _ in in_parts(made, 4):
            pass
        return made, params(made)

    torch.manual_seed(1)
    made, one = run(rows(seed=2))
    torch.manual_seed(1)
    _, other = run(rows(seed=3))
    assert same(one, other)
    assert not same(one, list(network().parameters()))
    assert noises == []
    assert made.engine.accountant.history == []
    assert made.optimizer.charged_steps == 0
    assert made.optimizer.spent(DELTA).epsilon == 0
    assert made.optimizer.report(DELTA).epsilon == 0


# The public pass and Opacus' hooks.


def traces(made):
    """Everything that Opacus' hooks keep on parameters and modules."""
    kept = [len(getattr(m, "activations", [])) for m in made.module.modules()]
    for p in made.optimizer.params:
        kept += [p.grad_sample, p.grad, p.summed_grad, p._forward_counter]
    return copy.deepcopy(kept)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("form", ["function", "context", "only forward", "ghost criterion"])
@pytest.mark.parametrize("when", ["first", "between", "last"])
def test_the_public_pass_leaves_no_trace(mode, form, when):
    def public(made):
        if form == "function":
            made.optimizer.public_step(lambda: public_loss(made))
        elif form == "context":
            with made.optimizer.public_pass():
                loss = public_loss(made)
            made.optimizer.public_step(loss)
        elif form == "ghost criterion":
            made.optimizer.public_step(lambda: made.criterion(made.module(PUBLIC[0]), PUBLIC[1]))
        else:
            made.optimizer.public_step(public_loss(made))

    def run(call):
        made = mixed(mode)
        batch = next(iter(made.loader))
        made.optimizer.zero_grad()
        if call and when == "first":
            public(made)
        loss = made.criterion(made.module(batch[0]), batch[1])
        if call and when == "between":
            public(made)
        loss.backward()
        if call and when == "last":
            public(made)
        return traces(made)

    if form == "only forward" and when == "between":
        # With ghost clipping, Opacus itself refuses the second forward pass.
        with pytest.raises(RuntimeError, match=r"without Opacus' hooks|tying"):
            run(True)
        return
    torch.manual_seed(1)
    expected = run(False)
    torch.manual_seed(1)
    found = run(True)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_private_forward_pass_is_not_taken_for_the_public_one():
    made = mixed()
    batch = next(iter(made.loader))
    loss = made.criterion(made.module(batch[0]), batch[1])
    made.module.eval()
    public = public_loss(made)
    made.module.train()
    made.optimizer.public_step(public)  # leaves the private pass alone
    loss.backward()
    made.optimizer.step()
    loss = made.criterion(made.module(batch[0]), batch[1])
    public = public_loss(made)
    with pytest.raises(RuntimeError, match="repeat the private forward pass"):
        made.optimizer.public_step(public)
    # What Opacus kept of the private pass is gone, so it cannot be mixed up later.
    with pytest.raises(IndexError):
        loss.backward()


def test_an_opaque_output_is_refused():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return types.SimpleNamespace(logits=self.inner(x))

    made = mixed(module=Wrapped())
    loss = F.cross_entropy(made.module(PUBLIC[0]).logits, PUBLIC[1])
    with pytest.raises(RuntimeError, match="cannot be told from private ones"):
        made.optimizer.public_step(loss)
    made.optimizer.public_step(lambda: F.cross_entropy(made.module(PUBLIC[0]).logits, PUBLIC[1]))


def test_parts_of_the_module_by_themselves():
    made = mixed()
    x = made.module._module[0](PUBLIC[0])
    loss = F.cross_entropy(made.module._module[2](x), PUBLIC[1])
    with pytest.raises(RuntimeError, match="cannot be told from private ones"):
        made.optimizer.public_step(loss)
    train(made, 2)
    assert made.optimizer.charged_steps == 2


def test_a_failed_public_pass_leaves_hooks_on():
    made = mixed()
    with pytest.raises(ZeroDivisionError):
        made.optimizer.public_step(lambda: 1 / 0)
    assert made.module.hooks_enabled
    train(made, 2)
    assert made.optimizer.charged_steps == 2


def test_private_rows_are_not_public():
    for mode in ("hooks", "ghost"):
        made = mixed(mode)
        x, y = next(iter(made.loader))
        with pytest.raises(ValueError, match="rows that the private loader yielded"):
            made.optimizer.public_step(lambda: F.cross_entropy(made.module(x), y))  # noqa: B023
        with pytest.raises(ValueError, match="rows that the private loader yielded"):
            made.optimizer.public_step(F.cross_entropy(made.module(x), y))

        def nested():
            with made.optimizer.public_pass():  # noqa: B023
                return F.cross_entropy(made.module(x), y)  # noqa: B023

        with pytest.raises(ValueError, match="rows that the private loader yielded"):
            made.optimizer.public_step(nested)
        train(made, 1)
        assert made.optimizer.charged_steps == 1


def test_a_module_can_be_copied():
    made = mixed()
    train(made, 1)
    twin = copy.deepcopy(made.module).eval()
    with made.optimizer.public_pass():
        assert torch.equal(twin(PUBLIC[0]), made.module(PUBLIC[0]))
    train(made, 1)
    assert made.optimizer.charged_steps == 2


def test_mixed_precision():
    made = mixed()
    for batch in made.loader:
        made.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = made.criterion(made.module(batch[0]), batch[1])
            made.optimizer.public_step(lambda: public_loss(made))
        loss.backward()
        made.optimizer.step()
    assert all(p.grad.dtype is torch.float32 and p.isfinite().all() for p in made.optimizer.params)
    assert made.optimizer.charged_steps == 4


@pytest.mark.parametrize("before", [True, False])
def test_learning_rate_schedulers(before):
    made = private()
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.0)
    mixed(made=made)
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.0)
    first = train(made, 1)
    scheduler.step()
    # At rate zero nothing moves, and the step is still charged.
    assert same(first, train(made, 1))
    assert made.optimizer.charged_steps == 2


def test_two_processes():
    script = Path(__file__).with_name("opacus_processes.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 6


# Virtual steps.


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("scale_noise", [True, False])
def test_split_batches_are_one_step(mode, scale_noise, noises):
    def run(size):
        made = mixed(mode, 0.4, scale_noise=scale_noise)
        torch.manual_seed(7)
        calls = []
        manager = BatchMemoryManager(
            data_loader=made.loader, max_physical_batch_size=size, optimizer=made.optimizer
        )

        def public():
            calls.append(1)
            return public_loss(made)

        parts = 0
        with manager as loader:
            for batch in loader:
                parts += 1
                backward(made, batch)
                made.optimizer.public_step(public)
                made.optimizer.step()
        noises.clear()
        return made, params(made), parts, len(calls)

    whole, expected, parts, calls = run(ROWS)
    assert (parts, calls, whole.optimizer.charged_steps) == (4, 4, 4)
    split, found, parts, calls = run(3)
    # How often the public loss is evaluated must not depend on the size of private batches.
    assert parts > 10
    assert (calls, split.optimizer.charged_steps) == (4, 4)
    assert len(split.engine.accountant.history) == 1
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_tensor_for_each_part_is_refused():
    made = mixed()
    manager = BatchMemoryManager(
        data_loader=made.loader, max_physical_batch_size=2, optimizer=made.optimizer
    )

    def run():
        with manager as loader:
            for batch in loader:
                made.optimizer.public_step(public_loss(made))
                backward(made, batch)
                made.optimizer.step()

    with pytest.raises(RuntimeError, match="pass a function that fetches its rows"):
        run()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_parts_without_a_private_pass_are_one_step(mode):
    def run(size):
        made = mixed(mode, alpha=[1.0] + [0.0] * 50)
        torch.manual_seed(7)
        calls = []
        for batch in parts_of(made, size):
            if made.optimizer.alpha > 0:
                backward(made, batch)
            made.optimizer.public_step(lambda: calls.append(1) or public_loss(made))
            made.optimizer.step()
        return len(calls)

    # The number of public steps must not depend on the size of private batches.
    assert run(ROWS) == run(3) == 3


def test_empty_batches_are_charged():
    made = mixed(noise=2.0)
    made.loader.batch_sampler.sample_rate = 1e-9
    before = params(made)
    train(made, 3)
    assert not same(before, params(made))
    assert made.optimizer.charged_steps == 3


# What is charged.


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_step_is_charged_before_its_noise(mode, monkeypatch):
    made = mixed(mode)
    order = []
    noise = opacus.optimizers.optimizer._generate_noise
    for module in ("optimizer", "optimizer_fast_gradient_clipping"):
        monkeypatch.setattr(
            f"opacus.optimizers.{module}._generate_noise",
            lambda **o: order.append("noise") or noise(**o),
        )
    charge = made.optimizer.spend.charge
    monkeypatch.setattr(
        made.optimizer.spend, "charge", lambda *a, **o: order.append("charge") or charge(*a, **o)
    )
    train(made, 2)
    assert order == ["charge", *["noise"] * 4] * 2


@pytest.mark.parametrize("noise", [1.2, 3.0])
def test_epsilon_is_not_below_that_of_opacus(noise):
    made = mixed(noise=noise)
    train(made, 12)
    # Opacus adds its tolerance of 0.01 to epsilon, at a delta smaller by a thousandth, and
    # computes both on a grid.
    theirs = made.engine.get_epsilon(DELTA)
    assert theirs - 0.0101 <= made.optimizer.spent(DELTA * 0.999).epsilon < theirs + 0.01
    expected = accounting.poisson_event(noise, sampling_prob=RATE, num_steps=12)
    found = accounting.epsilon(expected, DELTA, adjacency=Adjacency.ZERO_OUT).epsilon
    assert made.optimizer.spent(DELTA).epsilon == found


def test_the_report_and_its_page(tmp_path):
    made = mixed(alpha=[0.5, 0.0, 1.0])
    train(made, 3)
    report = made.optimizer.report(DELTA, results={"public_accuracy": 0.75}, seeded=True)
    assert report.charged_steps == 2
    assert report.epsilon == made.optimizer.spent(DELTA).epsilon
    assert (report.sampling_prob, report.divisor, report.num_examples) == (RATE, BATCH, ROWS)
    assert report.noise_multiplier == SIGMA
    assert report.l2_clip_norm == CLIP
    assert {"torch", "opacus"} <= set(report.versions)
    report.write(tmp_path)
    assert RunReport.read(tmp_path).to_dict() == report.to_dict()
    page = report_page(report, run="opacus")
    assert "not for release" in page
    assert "public_accuracy" in page or "public accuracy" in page
    assert not made.optimizer.report(DELTA, seeded=False).warnings()[0].grave


def test_a_ledger_is_shared_by_runs():
    ledger = Ledger(Adjacency.ZERO_OUT)
    for _ in range(2):
        train(made := mixed(spend=ledger), 3)
    one, both = made.optimizer.spent(DELTA), ledger.epsilon(DELTA)
    assert both.epsilon > one.epsilon
    report = made.optimizer.report(DELTA)
    assert report.epsilon == both.epsilon
    assert "ledger" in report.scope


def budget_of(tmp_path, epsilon):
    data = PrivateData([array.numpy() for array in rows()])
    return Budget.create(tmp_path / "budget", epsilon=epsilon, delta=DELTA, data=data)


def test_a_budget_admits_and_refuses(tmp_path):
    with budget_of(tmp_path, 20.0) as budget:
        made = mixed(spend=budget, num_steps=4)
        train(made, 4)
        assert budget.status.charges == 4
        report = made.optimizer.report(DELTA)
        assert report.ledger["budget"]["used"] == budget.status.used
        used = budget.status.used
        with pytest.raises(BudgetError, match="within the budget"):
            mixed(spend=budget, num_steps=20_000)
        with pytest.raises(ValueError, match="num_steps"):
            mixed(spend=budget)
        # Noise that a scheduler takes away later is refused when it is charged.
        made = mixed(spend=budget, num_steps=1)
        made.optimizer.noise_multiplier = 0.05
        before = params(made)
        with pytest.raises(BudgetError):
            train(made, 1)
        assert same(before, params(made))
        assert budget.status.used == used


def test_noise_schedulers_are_charged_as_they_ran():
    made = mixed()
    scheduler = ExponentialNoise(made.optimizer, gamma=0.8)
    for _ in range(3):
        train(made, 1)
        scheduler.step()
    sigmas = [SIGMA, 0.8 * SIGMA, 0.64 * SIGMA]
    ledger = Ledger(Adjacency.ZERO_OUT)
    for sigma in sigmas:
        ledger.charge(accounting.poisson_event(sigma, sampling_prob=RATE, num_steps=1))
    expected = ledger.epsilon(DELTA, accountant=Accountant.RDP).epsilon
    assert made.optimizer.spent(DELTA).epsilon == pytest.approx(expected)
    report = made.optimizer.report(DELTA)
    assert report.epsilon == made.optimizer.spent(DELTA).epsilon
    assert report.noise_multiplier == pytest.approx(sigmas[-1])
    assert [steps for steps, _ in report.epsilon_over_steps] == [1, 2, 3]
    assert report.epsilon_over_steps[-1][1] == pytest.approx(report.epsilon)
    assert "noise multipliers from" in report.scope


def last_sigma(made):
    return made.optimizer._mixing.books.charges[-1].noise_multiplier


def test_noise_is_charged_relative_to_the_clip_norm_that_was_used():
    ghost = mixed("ghost")
    ghost.optimizer.max_grad_norm = CLIP / 2  # the module still clips to CLIP
    train(ghost, 1)
    assert last_sigma(ghost) == pytest.approx(SIGMA / 2)
    ghost.optimizer.max_grad_norm = 2 * CLIP
    train(ghost, 1)
    assert last_sigma(ghost) == SIGMA
    layers = mixed(clipping="per_layer", max_grad_norm=[CLIP] * 4)
    layers.optimizer.max_grad_norm = CLIP
    train(layers, 1)
    assert last_sigma(layers) == pytest.approx(SIGMA / 2)
    # A scheduler that steps between the parts of a batch.
    made = mixed()
    for _ in in_parts(made, 2):
        if made.optimizer.charged_steps:
            break
        made.optimizer.max_grad_norm = CLIP / 4
    assert last_sigma(made) == pytest.approx(SIGMA / 4)


# What could make the ledger say less than was spent.


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_two_steps_on_one_batch_are_refused(mode):
    made = mixed(mode)
    for batch in made.loader:
        for number in range(2):
            backward(made, batch)
            made.optimizer.public_step(lambda: public_loss(made))
            if number == 1:
                before = params(made)
                with pytest.raises(RuntimeError, match="a batch of its own"):
                    made.optimizer.step()
                assert same(before, params(made))
                assert made.optimizer.charged_steps == 1
                return
            made.optimizer.step()


def test_batches_of_another_loader_are_refused():
    made = mixed()
    other = DataLoader(TensorDataset(*rows()), batch_size=BATCH, shuffle=True)
    with pytest.raises(RuntimeError, match="private loader given to with_public_gradient"):
        train(made, 1, loader=other)
    assert made.optimizer.charged_steps == 0
    # Batches of an earlier pass over the loader make no room for it.
    made = mixed()
    list(made.loader)
    train(made, 1)
    with pytest.raises(RuntimeError, match="a batch of its own"):
        train(made, 1, loader=other)


def test_batches_drawn_ahead_are_fine():
    made = mixed()
    train(made, 4, loader=list(made.loader))
    assert made.optimizer.charged_steps == 4


def test_two_optimizers_over_one_loader():
    made, other = mixed(), private()
    with_public_gradient(other.optimizer, other.module, made.loader, alpha=0.5)
    batch = next(iter(made.loader))
    for each in (made, other):
        backward(each, batch)
        each.optimizer.public_step(lambda each=each: public_loss(each))
    made.optimizer.step()
    with pytest.raises(RuntimeError, match="a batch of its own"):
        other.optimizer.step()


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_steps_that_only_opacus_counted_are_charged(accountant):
    made = mixed(accountant=accountant)
    train(made, 2)
    # Another optimiser of the same engine, without public gradients.
    other = private(engine=made.engine)
    train(other, 3, public=False)
    assert made.optimizer.spent(DELTA).epsilon == other_epsilon(5)
    train(made, 1)
    assert made.optimizer.charged_steps == 6
    assert made.optimizer.spent(DELTA).epsilon == other_epsilon(6)


def test_optimizers_that_share_engine_and_ledger_are_charged_once():
    ledger = Ledger(Adjacency.ZERO_OUT)
    made = mixed(spend=ledger)
    other = mixed(spend=ledger, engine=made.engine)
    for each in (made, other, made):
        train(each, 2)
    assert ledger.epsilon(DELTA).epsilon == other_epsilon(6)
    assert (made.optimizer.charged_steps, other.optimizer.charged_steps) == (4, 2)


def test_a_refused_charge_is_tried_again(tmp_path):
    with budget_of(tmp_path, 20.0) as budget:
        made = mixed(spend=budget, num_steps=4)
        other = private(engine=made.engine, noise=0.05)
        train(other, 1, public=False)
        for _ in range(2):
            with pytest.raises(BudgetError):
                made.optimizer.spent(DELTA)


def other_epsilon(steps):
    event = accounting.poisson_event(SIGMA, sampling_prob=RATE, num_steps=steps)
    return accounting.epsilon(event, DELTA, adjacency=Adjacency.ZERO_OUT).epsilon


def test_steps_of_before_the_wrapper_are_charged():
    made = private()
    train(made, 3, public=False)
    mixed(made=made)
    assert made.optimizer.report(DELTA).charged_steps == 3


def test_a_removed_hook_changes_no_charge():
    made = mixed()
    made.optimizer.attach_step_hook(lambda optimizer: None)
    train(made, 3)
    assert made.optimizer.charged_steps == 3


def test_the_optimizer_under_opacus_cannot_be_stepped():
    made = mixed()
    backward(made, next(iter(made.loader)))
    before = params(made)
    with pytest.raises(RuntimeError, match="adds no noise"):
        made.optimizer.original_optimizer.step()
    assert same(before, params(made))


def test_noise_is_good_for_one_step():
    made = mixed(alpha=1.0)
    first, second = list(made.loader)[:2]
    backward(made, first)
    assert made.optimizer.pre_step()
    backward(made, second)
    with pytest.raises(RuntimeError, match="adds no noise"):
        made.optimizer.original_optimizer.step()


def test_accumulated_batches_are_refused():
    made = mixed()
    made.module.allow_grad_accumulation()
    for batch in list(made.loader)[:2]:
        made.criterion(made.module(batch[0]), batch[1]).backward()
    made.optimizer.public_step(lambda: public_loss(made))
    with pytest.raises(RuntimeError, match="appear more than once"):
        made.optimizer.step()
    assert made.optimizer.charged_steps == 0


def test_a_batch_accumulated_twice_is_refused():
    made = one_record(count=2)  # as many rows as backward passes
    made.module.allow_grad_accumulation()
    x, y = next(iter(made.loader))
    for _ in range(2):
        made.criterion(made.module(x), y).backward()
    with pytest.raises(RuntimeError, match="appear more than once"):
        made.optimizer.step()
    assert made.optimizer.charged_steps == 0


def test_batches_accumulated_by_hand_are_refused():
    made = mixed()

    def run():
        for batch in made.loader:
            made.optimizer.signal_skip_step(True)
            backward(made, batch)
            made.optimizer.step()

    with pytest.raises(RuntimeError, match="appear more than once"):
        run()


def test_a_copy_is_refused():
    made = mixed()
    with pytest.raises(TypeError, match="ledger of its own"):
        copy.deepcopy(made.optimizer)


def test_a_larger_rate_is_charged():
    made = mixed()
    made.loader.batch_sampler.sample_rate = 0.75
    train(made, 1)
    assert made.optimizer.report(DELTA).sampling_prob == 0.75


# Which batch a step belongs to.


def one_record(mode="hooks", *, workers=0, count=8, **options):
    """A run in which every batch has all rows, and one row alone has a gradient, a large one."""
    x, y = torch.zeros(count, 3), torch.zeros(count).long()
    x[count // 2, 0] = 100.0
    module = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(module.weight)
    settings = {"noise": 1e-9, "rate": 0.0, "batch": count, "workers": workers}
    return mixed(mode, 1.0, module=module, data=(x, y), **settings, **options)


def influence(made):
    """The norm of the released sum, in clip norms; it is one record's at most."""
    total = torch.cat([p.grad.flatten() for p in made.optimizer.params]).norm()
    return float(total) * made.optimizer.expected_batch_size / CLIP


def parts_of(made, size=2):
    manager = BatchMemoryManager(
        data_loader=made.loader, max_physical_batch_size=size, optimizer=made.optimizer
    )
    with manager as loader:
        yield from loader


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_without_a_step_are_no_credit(workers):
    made = mixed(workers=workers)
    batches = iter(made.loader)
    for _ in range(3):
        batch = next(batches)
    for number in range(2):
        backward(made, batch)
        made.optimizer.public_step(lambda: public_loss(made))
        if number == 1:
            with pytest.raises(RuntimeError, match="a batch of its own"):
                made.optimizer.step()
            break
        made.optimizer.step()
    assert made.optimizer.charged_steps == 1


def test_a_batch_is_known_by_its_tensors():
    made = mixed(alpha=1.0)
    first, second = list(made.loader)[:2]
    for batch in (first, second):
        backward(made, batch)
        made.optimizer.step()
    for again in (first, [first[0].clone(), first[1]]):
        backward(made, again)
        with pytest.raises(RuntimeError, match="a batch of its own"):
            made.optimizer.step()
    # Copies belong to the batch that was yielded last, and the others are gone.
    made = mixed(alpha=1.0)
    batches = list(made.loader)
    backward(made, [t.clone() for t in batches[-1]])
    made.optimizer.step()
    backward(made, batches[0])
    with pytest.raises(RuntimeError, match="a batch of its own"):
        made.optimizer.step()


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("after_step", [True, False])
def test_a_pass_that_ends_between_parts(mode, workers, after_step):
    made = one_record(mode, workers=workers)
    for _ in range(3):
        for number, batch in enumerate(parts_of(made)):
            if not after_step and number == 3:
                break
            backward(made, batch)
            made.optimizer.step()
            if after_step and number == 2:  # the record's part
                break
    assert made.optimizer.charged_steps == 0
    for batch in parts_of(made):
        backward(made, batch)
        made.optimizer.step()
    assert influence(made) == pytest.approx(1, rel=1e-4)
    assert made.optimizer.charged_steps == 1


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("left_out", [0, 2, 3])
def test_a_part_without_a_step(mode, workers, left_out):
    made = one_record(mode, workers=workers)
    made.loader.batch_sampler.steps = 3
    found, refused = [], []
    for number, batch in enumerate(parts_of(made)):
        if number == left_out:
            continue  # such as after an error on this part
        backward(made, batch)
        before = made.optimizer.charged_steps
        try:
            made.optimizer.step()
        except RuntimeError as error:
            refused.append(str(error))
        if made.optimizer.charged_steps > before:
            found.append(influence(made))
    assert "Take a step on every part" in refused[0]
    assert found == pytest.approx([1] * len(found), rel=1e-4)
    # Four parts each; where the last part is left out, that shows in the next batch only.
    assert len(found) == (1 if left_out == 3 else 2)


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_and_parts(persistent):
    made = mixed(workers=2, persistent=persistent)
    made.loader.batch_sampler.sample_rate = 0.1
    for _ in range(2):
        for batch in parts_of(made, 3):
            backward(made, batch)
            made.optimizer.public_step(lambda: public_loss(made))
            made.optimizer.step()
    train(made, 4)
    train(made, 4)
    assert made.optimizer.charged_steps == 16


def test_a_pass_inside_a_pass():
    made = mixed(alpha=1.0)
    for batch in made.loader:
        with torch.no_grad():
            for other in made.loader:
                made.module(other[0])
        backward(made, batch)
        made.optimizer.step()
    assert made.optimizer.charged_steps == 4
    # A step on a batch of the inner pass, and none on that of the outer one.
    for _ in made.loader:
        train(made, 1, public=False)
    assert made.optimizer.charged_steps == 8


@pytest.mark.filterwarnings("ignore:.*fork")
def test_two_passes_by_the_same_workers():
    made = mixed(alpha=1.0, workers=1, persistent=True)
    outer, inner = iter(made.loader), iter(made.loader)
    next(inner)
    with pytest.raises(RuntimeError, match="one pass over the private loader at a time"):
        next(outer)


def test_loaders_that_cannot_be_followed():
    made = mixed(alpha=1.0)
    other = DataLoader(made.loader.dataset, batch_sampler=made.loader.batch_sampler)
    with pytest.raises(RuntimeError, match="Iterate over that loader itself"):
        train(made, 1, loader=other, public=False)


def test_other_optimizers_split_batches_as_before():
    torch.manual_seed(4)
    expected = private(rate=0.1)
    for batch in parts_of(expected, 3):
        backward(expected, batch)
        expected.optimizer.step()
    torch.manual_seed(4)
    found, mixing = private(rate=0.1), private()
    # The loader is that of another optimiser with public gradients.
    with_public_gradient(mixing.optimizer, mixing.module, found.loader, alpha=0.5)
    for batch in parts_of(found, 3):
        backward(found, batch)
        found.optimizer.step()
    assert same(params(expected), params(found))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("times", [4, 0.5])
def test_records_have_one_row_each(mode, times):
    made = one_record(mode)
    x, y = next(iter(made.loader))
    if times == 4:
        x, y = torch.cat([x] * 4), torch.cat([y] * 4)  # four augmentations
    else:
        x, y = x[:4], y[:4]
    backward(made, (x, y))
    with pytest.raises(RuntimeError, match="one row for each record") as refused:
        made.optimizer.step()
    assert not any(c.isdigit() for c in str(refused.value))  # the size of the batch is private
    assert made.optimizer.charged_steps == 0


def test_random_rows_in_empty_batches():
    with pytest.raises(ValueError, match="rand_on_empty"):
        mixed(alpha=1.0, rand_on_empty=True)


@pytest.mark.parametrize("is_copy", [False, True])
def test_rows_of_two_batches_in_one_step(is_copy):
    made = one_record()
    made.loader.batch_sampler.steps = 3
    batches = iter(made.loader)
    a = next(batches)
    loss = made.criterion(made.module(a[0]), a[1])
    b = next(batches)
    if is_copy:
        b = [t.flip(0) for t in b]  # the record is in another row, and each row is clipped
    (loss + made.criterion(made.module(b[0]), b[1])).backward()
    with pytest.raises(RuntimeError, match=r"rows of several.*appear more than once"):
        made.optimizer.step()
    backward(made, next(batches))
    made.optimizer.step()
    assert influence(made) == pytest.approx(1, rel=1e-4)
    assert made.optimizer.charged_steps == 1


def test_rows_of_two_batches_in_one_forward_pass():
    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, other):
            return self.linear(x - other)

    made = mixed(alpha=1.0, module=Difference(), batch=ROWS)
    made.loader.batch_sampler.steps = 2
    a, b = made.loader
    made.criterion(made.module(a[0], b[0]), a[1]).backward()
    with pytest.raises(RuntimeError, match="appear more than once"):
        made.optimizer.step()


def test_batches_fetched_between_forward_pass_and_step():
    made = mixed(alpha=1.0)
    batches = iter(made.loader)
    batch = next(batches)
    while batch is not None:
        backward(made, [t.clone() for t in batch])
        batch = next(batches, None)
        made.optimizer.step()
    assert made.optimizer.charged_steps == 4


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("late", [False, True])
def test_batches_that_are_skipped_after_the_backward_pass(mode, late):
    made = mixed(mode, alpha=1.0)
    for number, batch in enumerate(made.loader):
        if not late:
            made.module.zero_grad()
        loss = made.criterion(made.module(batch[0]), batch[1])
        if late:
            made.optimizer.zero_grad()
        loss.backward()
        if number != 1:
            made.optimizer.step()
    assert made.optimizer.charged_steps == 3


def test_layers_that_see_other_rows():
    class Flattens(nn.Module):
        """Its second layer sees each value of the first one in a row of its own."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(1, 2)

        def forward(self, x):
            return self.second(self.first(x).reshape(-1, 1)).reshape(-1, 2, 2).sum(1)

    options = {"clipping": "per_layer", "max_grad_norm": [CLIP] * 4}
    made = mixed(alpha=1.0, module=Flattens(), **options)
    batch = next(iter(made.loader))
    backward(made, batch)
    with pytest.raises(RuntimeError, match="one row for each record"):
        made.optimizer.step()
    assert made.optimizer.charged_steps == 0


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_pass_that_is_refused_takes_no_part():
    made = one_record(workers=1, persistent=True)
    made.loader.batch_sampler.steps = 4
    manager = BatchMemoryManager(
        data_loader=made.loader, max_physical_batch_size=4, optimizer=made.optimizer
    )
    with manager as loader:
        outer, inner = iter(loader), iter(loader)
        for number, batch in enumerate(inner):
            backward(made, batch)
            made.optimizer.step()
            if number == 0:
                with pytest.raises(RuntimeError, match="one pass over the private loader"):
                    next(outer)
    assert made.optimizer.charged_steps == 4


class Programs:
    """Random programs of Opacus' calls on rows whose clipped gradients are C e_i for row i.

    The released sum then shows which rows were in it and how often. Calls may fail in any way.
    """

    size = 6
    weights = {  # noqa: RUF012
        "iterate": 6, "fetch": 4, "begin": 0.4, "forward": 5, "backward": 5, "add": 1,
        "zero_grad": 2, "zero_module": 1, "step": 5, "pre_step": 0.3, "under": 0.3, "public": 1,
    }  # fmt: skip

    class Loss(nn.Module):
        reduction = "mean"

        def forward(self, outputs, targets):
            losses = -outputs.squeeze(1)
            return losses if self.reduction == "none" else losses.mean()

    def __init__(self, seed):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        mode = self.random.choice(["hooks", "functorch", "ghost"])
        # Ghost clipping allows several calls of the second kind of layer.
        kind = self.random.choice([nn.Linear, opacus.layers.dp_rnn.RNNLinear])
        layer = kind(self.size, 1, bias=False)
        layer.weight = nn.Parameter(torch.zeros(1, self.size))
        self.alphas = [float(self.random.random() < 0.8) for _ in range(60)]
        options = {"criterion": self.Loss()} if mode == "ghost" else {}
        data = 100 * torch.eye(self.size), torch.arange(self.size)
        settings = {"noise": 1e-9, "rate": 0.0, "batch": self.size // 2}
        self.made = mixed(mode, self.alphas, module=layer, data=data, **settings, **options)
        if mode != "ghost":
            self.made.criterion = self.Loss()
        self.made.loader.batch_sampler.steps = 3
        if self.random.random() < 0.5:
            self.made.module.allow_grad_accumulation()
        self.yielded, self.losses = [], []
        self.rows, self.whole = collections.defaultdict(list), []  # of batches
        self.begin()

    def begin(self):
        is_split = self.random.random() < 0.5
        self.pass_ = parts_of(self.made, 2) if is_split else iter(self.made.loader)

    def fetch(self):
        batch = next(self.pass_, None)
        if batch is None:
            return self.begin()
        part = self.made.optimizer._mixing.books.draws.latest
        self.rows[part.batch] += batch[1].tolist()
        self.whole += [part.batch] * part.is_last
        self.yielded.append(batch)
        return batch

    def iterate(self):
        batch = self.fetch()
        if batch is None:
            return
        if self.random.random() < 0.8:
            self.zero_grad()
        self.forward()
        self.backward()
        if self.made.optimizer.alpha < 1:
            self.public()
        if self.random.random() < 0.9:
            self.step()

    def forward(self):
        back = min(self.random.choice([1, 1, 1, 2, 3]), len(self.yielded))
        batch = self.yielded[-back]
        if back == 1 and self.random.random() < 0.4:
            batch = [t.clone() for t in batch]
        self.losses.append(self.made.criterion(self.made.module(batch[0]), batch[1]))

    def backward(self):
        self.losses.pop(self.random.choice([-1, -1, 0])).backward()

    def add(self):
        (self.losses.pop() + self.losses.pop()).backward()

    def zero_grad(self):
        self.made.optimizer.zero_grad()

    def zero_module(self):
        self.made.module.zero_grad()

    def step(self):
        self.made.optimizer.step()

    def pre_step(self):
        self.made.optimizer.pre_step()

    def under(self):
        self.made.optimizer.original_optimizer.step()

    def public(self):
        x = torch.ones(2, self.size)
        self.made.optimizer.public_step(lambda: self.made.module(x).mean())

    def run(self):
        """Returns the number of charged steps, each of which must be on one batch of its own."""
        optimizer, charged = self.made.optimizer, 0
        for name in self.random.choices([*self.weights], [*self.weights.values()], k=25):
            with contextlib.suppress(Exception):
                getattr(self, name)()
            if optimizer.charged_steps > charged:
                charged += 1
                total = -optimizer.params[0].grad.flatten() * optimizer.expected_batch_size
                counts = (total / CLIP).round(decimals=3)
                assert set(counts.tolist()) <= {0, 1}
                found = counts.nonzero().flatten().tolist()
                self.whole.remove(next(b for b in self.whole if sorted(self.rows[b]) == found))
        return charged


def test_random_programs():
    # Many end early: what Opacus' hooks keep of a forward pass without a backward pass stays.
    assert sum(Programs(seed).run() for seed in range(150)) > 100


# What ghost clipping clips.


def regression(criterion, targets, *, outputs=1, **options):
    torch.manual_seed(0)
    module, (x, _) = nn.Linear(3, outputs), rows()
    return mixed("ghost", 1.0, module=module, data=(x, targets), criterion=criterion, **options)


@pytest.mark.parametrize(
    ("criterion", "outputs"), [(nn.MSELoss(), 1), (nn.BCEWithLogitsLoss(), 16)]
)
def test_losses_that_are_not_one_per_row(criterion, outputs):
    # Opacus multiplies losses of shape (rows, 1) with coefficients of shape (rows,).
    made = regression(criterion, torch.ones(ROWS, outputs), outputs=outputs)
    batch = next(iter(made.loader))
    with pytest.raises(ValueError, match=r"one loss for each row.*\(rows, 1\)"):
        backward(made, batch)
    with pytest.raises(RuntimeError, match="criterion that make_private returned"):
        made.optimizer.step()


def test_fewer_losses_than_rows():
    made = mixed("ghost", 1.0)
    x, y = next(iter(made.loader))
    with pytest.raises(ValueError, match=rf"one loss for each of {len(x)} rows"):
        made.criterion(made.module(x)[:1], y[:1]).backward()
    with pytest.raises(RuntimeError, match="criterion that make_private returned"):
        made.optimizer.step()


def test_a_squeezed_regression():
    made = regression(nn.MSELoss(), torch.ones(ROWS), noise=1e-9)
    for x, y in made.loader:
        made.optimizer.zero_grad()
        (2 * made.criterion(made.module(x).squeeze(1), y) + 1).backward()
        made.optimizer.step()
        assert influence(made) <= len(x) * 1.0001
    assert made.optimizer.charged_steps == 4


def test_a_plain_loss_is_not_clipped():
    made = mixed("ghost", 1.0)
    x, y = next(iter(made.loader))
    F.cross_entropy(made.module(x), y).backward()
    with pytest.raises(RuntimeError, match="criterion that make_private returned"):
        made.optimizer.step()
    # Nor is one that adds to the clipped gradient.
    backward(made, (x, y))
    with made.optimizer.public_pass():
        F.cross_entropy(made.module(x), y).backward()
    with pytest.raises(RuntimeError, match="gradients that ghost clipping computed"):
        made.optimizer.step()
    assert made.optimizer.charged_steps == 0


class Failing(nn.Module):
    """A linear layer whose n-th backward pass fails."""

    def __init__(self, fails_at):
        super().__init__()
        self.linear, self.passes, self.fails_at = nn.Linear(3, 2), 0, fails_at

    def forward(self, x):
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(self.count)
        return out

    def count(self, gradient):
        self.passes += 1
        if self.passes == self.fails_at:
            raise MemoryError
        return gradient


@pytest.mark.parametrize("fails_at", [3, 4])
def test_a_failed_backward_pass_leaves_no_gradient(fails_at):
    made = mixed("ghost", 1.0, module=Failing(fails_at))
    for number, batch in enumerate(made.loader):
        if number == 1:
            with pytest.raises(MemoryError):
                backward(made, batch)
            assert made.module.hooks_enabled
            with pytest.raises(RuntimeError, match="backward pass with ghost clipping"):
                made.optimizer.step()
            # The same batch again is fine.
        backward(made, batch)
        made.optimizer.step()
    assert made.optimizer.charged_steps == 4


class Decoder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.decode = Decoder(self.embed.weight)

    def forward(self, x):
        return self.decode(self.embed(x).mean(1))


class TiedInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, x):
        return F.linear(self.embed(x).mean(1), self.embed.weight)


class TiedByHook(nn.Module):
    """The second layer uses the weight of the first one, which is not among its parameters."""

    def __init__(self):
        super().__init__()
        self.embed, self.scale = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        weight = self.embed.weight
        self.scale.register_forward_hook(lambda layer, given, output: output * weight.sum())

    def forward(self, x):
        return self.scale(self.embed(x).mean(1))


def tokens():
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(0, 5, shape, generator=generator) for shape in ((ROWS, 3), (ROWS,)))


def test_tied_weights():
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(9, 3), nn.Linear(3, 5))
    tied[3].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"0\.weight in several.*'hooks'"):
        mixed("ghost", module=tied, data=tokens())
    for module in (TiedInForward(), TiedByHook()):
        made = mixed("ghost", 1.0, module=module, data=tokens())
        with pytest.raises(ValueError, match=r"parameter embed.weight only by the layer"):
            backward(made, next(iter(made.loader)))
    made = mixed("hooks", 1.0, module=Tied(), data=tokens(), noise=1e-9)
    train(made, 4, public=False)
    assert made.optimizer.charged_steps == 4


def test_a_penalty_in_the_loss():
    made = mixed("ghost", 1.0)
    x, y = next(iter(made.loader))
    penalty = sum(p.pow(2).sum() for p in made.module.parameters())
    losses = made.criterion(made.module(x), y)
    with pytest.raises(ValueError, match=r"penalty.*weight_decay"):
        losses + 0.1 * penalty
    loss = losses + 0.1 * penalty.expand(len(x)).clone()
    with pytest.raises(ValueError, match=r"penalty.*weight_decay"):
        loss.backward()
    with pytest.raises(RuntimeError, match="backward pass with ghost clipping"):
        made.optimizer.step()
    train(made, 4, public=False)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("names", [["weight"], ["weight", "bias"]])
def test_parameters_that_are_unfrozen(mode, names):
    module = network()
    frozen = [getattr(module[0], name) for name in names]
    for param in frozen:
        param.requires_grad_(False)
    made = mixed(mode, 1.0, module=module)
    count = len(made.optimizer.params)
    train(made, 1, public=False)
    for param in frozen:
        param.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"others besides: 0\.weight"):
        train(made, 1, public=False)
    for param in frozen:
        param.requires_grad_(False)
    train(made, 1, public=False)
    module[2].bias.requires_grad_(False)
    if mode == "ghost":
        with pytest.raises(RuntimeError, match=f"got {count - 1} of {count}"):
            train(made, 1, public=False)
    else:
        train(made, 1, public=False)


def test_parameters_that_ghost_clipping_does_not_know():
    module = network()
    module[0].requires_grad_(False)
    made = private("ghost", module=module)
    module[0].requires_grad_(True)
    with pytest.raises(ValueError, match="the 2 parameters that ghost clipping takes norms over"):
        mixed(made=made)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_parameters_that_a_loss_leaves_out(mode):
    class Skips(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    made = mixed(mode, 1.0, module=Skips(nn.Linear(3, 2), nn.Linear(2, 2)))

    def run():
        for batch in made.loader:
            backward(made, batch)
            made.optimizer.step()

    with pytest.raises(RuntimeError, match=r"1\.weight, 1\.bias"):
        run()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_two_steps_on_one_part(mode):
    made = one_record(mode)
    for batch in parts_of(made, 4):
        backward(made, batch)
        made.optimizer.step()
        with pytest.raises(RuntimeError, match=r"backward pass with ghost|batch of its own"):
            made.optimizer.step()
    assert made.optimizer.charged_steps == 1
    assert influence(made) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_part_without_a_backward_pass(mode):
    made = one_record(mode)
    batches = parts_of(made, 4)
    backward(made, [t.clone() for t in next(batches)])
    made.optimizer.step()
    next(batches)
    with pytest.raises((RuntimeError, ValueError), match=r"backward pass with ghost|haven't been"):
        made.optimizer.step()


def test_a_sum_that_is_too_large(monkeypatch):
    made = one_record("ghost")
    # As if Opacus had computed other norms.
    monkeypatch.setattr(made.module, "get_clipping_coef", lambda: torch.ones(8))
    backward(made, next(iter(made.loader)))
    with pytest.raises(RuntimeError, match=r"got one of norm 70\.7"):
        made.optimizer.step()


def test_the_clip_norm_of_the_backward_pass_is_charged():
    made = mixed("ghost", 1.0)
    made.module.max_grad_norm = 2 * CLIP
    backward(made, next(iter(made.loader)))
    made.module.max_grad_norm = CLIP
    made.optimizer.step()
    assert last_sigma(made) == pytest.approx(SIGMA / 2)


@pytest.mark.parametrize("make", [ConvNet, Recurrent, Transformer])
def test_ghost_clipping_computes_the_sums_of_hooks(make):
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 5, (ROWS, 6), generator=generator)
    if make is ConvNet:
        x = torch.randn(ROWS, 1, 6, 6, generator=generator)
    data = x, torch.randint(0, 2, (ROWS,), generator=generator)

    def run(mode):
        torch.manual_seed(1)
        made = mixed(mode, 1.0, module=make(), data=data, noise=0.0)
        return train(made, 4, public=False)

    for a, b in zip(run("hooks"), run("ghost"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_other_optimizers_clip_as_before():
    made = private("ghost")
    train(made, 2, public=False)
    assert all(p.grad is not None for p in made.optimizer.params)


# What has noise, and which.


@pytest.mark.parametrize("shift", [0, 50])
@pytest.mark.parametrize("own", [False, True])
def test_noise_is_not_used_again_after_a_resume(shift, own):
    def run(state=None):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(6) if own else None
        made = mixed(alpha=1.0, noise_generator=generator)
        if state is not None:
            made.optimizer.load_state_dict(state)
            torch.rand(shift, generator=generator)  # what else a script may draw
        train(made, 1, public=False)
        return made

    state = run().optimizer.state_dict()
    with pytest.raises(RuntimeError, match="new noise for each step"):
        run(state)
    torch.manual_seed(7)
    resumed = mixed(alpha=1.0)
    resumed.optimizer.load_state_dict(state)
    train(resumed, 2, public=False)
    assert resumed.optimizer.charged_steps == 3


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_seed_in_each_epoch_is_refused(mode):
    made = mixed(mode, alpha=1.0)
    torch.manual_seed(5)
    train(made, 4, public=False)
    torch.manual_seed(5)
    before = params(made)
    with pytest.raises(RuntimeError, match="new noise for each step"):
        train(made, 1, public=False)
    assert same(before, params(made))
    assert made.optimizer.charged_steps == 4
    torch.manual_seed(6)
    train(made, 1, public=False)


def test_runs_with_one_seed():
    def run(seed, **options):
        made = mixed(
            alpha=1.0, data=rows(seed=seed),
            noise_generator=torch.Generator().manual_seed(7), **options,
        )  # fmt: skip
        return train(made, 1, public=False)

    run(3)
    with pytest.warns(RuntimeWarning, match="do not release both"):
        run(4)
    # What one ledger states covers both.
    ledger = Ledger(Adjacency.ZERO_OUT)
    run(3, spend=ledger)
    with pytest.raises(RuntimeError, match="new noise for each step"):
        run(4, spend=ledger)


@pytest.mark.parametrize("is_global", [False, True])
def test_noise_and_sampling_have_other_seeds(is_global):
    torch.manual_seed(42)

    def make(seed):
        made = private(noise_generator=torch.Generator().manual_seed(seed))
        if not is_global:
            made.loader.batch_sampler.generator = torch.Generator().manual_seed(42)
        return made

    with pytest.raises(ValueError, match="two generators with the same seed"):
        mixed(made=make(42))
    made = mixed(alpha=1.0, made=make(43))
    train(made, 1, public=False)
    made.optimizer.generator.manual_seed(42)
    with pytest.raises(ValueError, match="two generators with the same seed"):
        train(made, 1, public=False)
    assert made.optimizer.charged_steps == 1


# What couples rows, or keeps something of them without noise.


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class RunningSum(RunningMean):
    def forward(self, x):
        self.mean.add_(x.detach().sum(0))
        return x


def normed():
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), norm, nn.Flatten())


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.BatchNorm1d(3, affine=False), "BatchNorm1d in training mode"),
        (lambda: nn.BatchNorm1d(3).requires_grad_(False), "BatchNorm1d in training mode"),
        (normed, "InstanceNorm1d with running statistics"),
        (RunningMean, r"changed 0\.mean"),
        (RunningSum, r"changed 0\.mean"),
    ],
)
def test_layers_that_keep_something_of_private_rows(mode, make, message):
    made = mixed(mode, 1.0, module=nn.Sequential(make(), nn.Linear(3, 2)))
    batch = next(iter(made.loader))
    with pytest.raises((ValueError, RuntimeError), match=message):
        backward(made, batch)
    with pytest.raises(RuntimeError):
        made.optimizer.step()
    with made.optimizer.public_pass():
        made.module(PUBLIC[0])
    assert made.optimizer.charged_steps == 0


def test_a_frozen_body_in_evaluation_mode():
    body = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).requires_grad_(False)
    made = mixed(module=nn.Sequential(body, nn.Linear(3, 2)))
    body.eval()
    before = copy.deepcopy(body.state_dict())
    train(made, 2)
    assert same(before.values(), body.state_dict().values())


def test_embeddings_of_bounded_norm():
    module = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Flatten(), nn.Linear(9, 5))
    made = mixed(module=module, data=tokens())
    with pytest.raises(ValueError, match="max_norm"):
        backward(made, next(iter(made.loader)))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("kind", ["DPLSTM", "DPGRU", "DPRNN"])
def test_packed_sequences(mode, kind):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(opacus.layers, kind)(1, 2, batch_first=True)
            self.out = nn.Linear(2, 2)

        def forward(self, x, lengths, enforce_sorted):
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=enforce_sorted
            )
            hidden = self.rnn(packed)[1]
            return self.out((hidden[0] if isinstance(hidden, tuple) else hidden)[-1])

    data = torch.ones(8, 4, 1), torch.zeros(8).long()
    made = mixed(mode, 1.0, module=Packed(), data=data, batch=8)
    x, y = next(iter(made.loader))
    lengths = torch.arange(8) % 3 + 1
    with pytest.raises(ValueError, match="in the order of the batch"):
        made.module(x, lengths, False)
    lengths = lengths.sort(descending=True)[0]
    made.criterion(made.module(x, lengths, True), y).backward()
    made.optimizer.step()
    assert made.optimizer.charged_steps == 1


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_public_rows_in_the_private_loss(mode):
    made = mixed(mode, 1.0)
    x, y = next(iter(made.loader))
    public = rows(len(x), seed=8)
    loss = made.criterion(made.module(x), y) + made.criterion(made.module(public[0]), public[1])
    loss.backward()
    with pytest.raises(RuntimeError, match="those of further tensors too"):
        made.optimizer.step()
    assert made.optimizer.charged_steps == 0


def test_rows_of_another_private_loader():
    made, other = mixed(), mixed(data=rows(seed=9))
    x, y = next(iter(made.loader))
    foreign, labels = next(iter(other.loader))
    with pytest.raises(RuntimeError, match="rows of another private loader"):
        made.module(foreign)
    with pytest.raises(ValueError, match="rows that the private loader yielded"):
        made.optimizer.public_step(lambda: F.cross_entropy(made.module(foreign), labels))
    backward(made, (x, y))
    made.optimizer.public_step(lambda: public_loss(made))
    made.optimizer.step()


def test_the_data_of_the_private_loader_is_not_public():
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    module = network()
    made = opacus.PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=SIGMA, max_grad_norm=CLIP,
    )  # fmt: skip
    with_public_gradient(made[1], made[0], made[2], alpha=0.5)
    with pytest.raises(ValueError, match="another data set"):
        public_batches(loader)
    with pytest.raises(ValueError, match="another data set"):
        warm_start(network(), batch_loss, loader)


# What ghost clipping does not clip.


def test_terms_of_a_loss_that_are_not_one_per_row():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x):
            hidden = self.encode(x)
            return self.decode(hidden), hidden

    for combine in (
        lambda loss, term: loss + term.mean(),
        lambda loss, term: term.mean() + loss,
        lambda loss, term: loss - term.mean(),
        lambda loss, term: loss * term.mean(),
        lambda loss, term: loss / term.mean(),
        lambda loss, term: loss + term.mean().expand(len(term)),
    ):
        made = mixed("ghost", 1.0, module=Encoder())
        x, y = next(iter(made.loader))
        outputs, hidden = made.module(x)
        with pytest.raises(ValueError, match="one for each row"):
            combine(made.criterion(outputs, y), hidden.square().sum(1))
    (made.criterion(outputs, y) + hidden.square().sum(1)).backward()
    made.optimizer.step()
    assert made.optimizer.charged_steps == 1


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    "make",
    [
        Product,
        lambda: nn.EmbeddingBag(5, 2, mode="sum"),
        lambda: nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"),
        lambda: nn.Embedding(5, 2, scale_grad_by_freq=True),
        nn.PReLU,
    ],
)
def test_layers_whose_norms_are_not_known(make):
    with pytest.raises(ValueError, match=r"norms ghost clipping is known.*'hooks'"):
        mixed("ghost", module=nn.Sequential(nn.Linear(3, 3), make()))
    mixed("hooks", module=nn.Sequential(nn.Linear(3, 3), make()))


def test_layers_whose_settings_change():
    module = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten())
    made = mixed("ghost", 1.0, module=module)
    train(made, 1, public=False)
    module[1].padding_mode = "replicate"
    with pytest.raises(ValueError, match="norms ghost clipping is known"):
        train(made, 1, public=False)


class Difference(nn.Module):
    """Subtracts the output at the second position from that at the first one."""

    def forward(self, x):
        return (x[:, 0] - x[:, 1]).squeeze(1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [1e4, 1e5, 1e6])
def test_norms_of_positions_that_cancel(has_bias, size):
    module = nn.Sequential(nn.Linear(1, 1, bias=has_bias), Difference())
    nn.init.ones_(module[0].weight)
    x, y = torch.zeros(8, 2, 1), torch.zeros(8)
    x[3, 0], x[3, 1] = size + 50, size
    settings = {"batch": 8, "noise": 1e-9, "rate": 0.0, "criterion": nn.MSELoss()}
    made = mixed("ghost", 1.0, module=module, data=(x, y), **settings)
    train(made, 1, public=False)
    assert influence(made) <= 1.001


def test_ghost_clipping_in_mixed_precision():
    made = mixed("ghost", 1.0)
    x, _ = next(iter(made.loader))
    with torch.autocast("cpu", torch.bfloat16):
        with made.optimizer.public_pass():
            made.module(PUBLIC[0])
        with pytest.raises(RuntimeError, match="ghost clipping in full precision"):
            made.module(x)


# What else is not clipped, not charged or kept.


def test_parameters_that_are_frozen_before_the_step():
    module = network()
    made = mixed(alpha=1.0, module=module)
    backward(made, next(iter(made.loader)))
    before = module[0].weight.detach().clone()
    module[0].requires_grad_(False)
    made.optimizer.step()
    assert torch.equal(before, module[0].weight)
    assert made.optimizer.charged_steps == 1


@pytest.mark.parametrize("late", [False, True])
def test_parameters_of_another_optimizer(late):
    module = network()
    if late:
        module[0].requires_grad_(False)
    made = private(module=module)
    made.optimizer.param_groups[0]["params"] = list(module[2].parameters())
    if late:
        mixed(made=made)
        module[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"others besides: 0\.weight, 0\.bias"):
            train(made, 1)
        return
    with pytest.raises(ValueError, match=r"without 0\.weight, 0\.bias"):
        mixed(made=made)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_rows_are_clipped_in_full_precision(clipping):
    x, y = torch.ones(257, 1), torch.full((257,), 100.0)
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    options = {"clipping": "per_layer", "max_grad_norm": [CLIP]} if clipping != "flat" else {}
    settings = {"batch": 257, "noise": 1e-9, "rate": 0.0}
    made = mixed(alpha=1.0, module=module, data=(x, y), **settings, **options)
    x, y = next(iter(made.loader))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = made.module(x)
    F.mse_loss(outputs.float().squeeze(1), y).backward()
    made.optimizer.step()
    assert influence(made) == pytest.approx(257, rel=1e-4)


def test_parameters_of_half_precision():
    with pytest.raises(ValueError, match="32 binary digits"):
        mixed(module=network().bfloat16())


def test_the_sampling_rate_of_random_numbers():
    # 1 / 30 in 24 binary digits is a little more.
    made = mixed(alpha=1.0, data=rows(300))
    train(made, 1, public=False)
    found = made.optimizer._mixing.books.charges[-1].sampling_prob
    assert found == (2**24 // 30 + 1) / 2**24 > 1 / 30
    # And where only Opacus' accountant knows of a step.
    train(private(engine=made.engine, data=rows(300)), 1, public=False)
    assert made.optimizer.state_dict()["mirrordp"]["charges"] == [[SIGMA, found, 2]]


def test_empty_batches_of_a_distributed_sampler(monkeypatch):
    kind = opacus.utils.uniform_sampler.DistributedUniformWithReplacementSampler
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    def rate(count):
        made = private(data=rows(count))
        sampler = kind(total_size=count, sample_rate=0.25)
        object.__setattr__(made.loader, "batch_sampler", sampler)
        return mixed(made=made).optimizer._mixing.books.sampling_prob

    with pytest.raises(ValueError, match="next to never empty"):
        rate(40)
    assert 0.25 < rate(140) < 0.25 + 1e-8


def test_the_divisor_is_fixed():
    made = mixed()
    batch = next(iter(made.loader))
    made.optimizer.expected_batch_size = len(batch[0]) + 100
    backward(made, batch)
    made.optimizer.public_step(lambda: public_loss(made))
    with pytest.raises(RuntimeError, match="expected_batch_size of make_private, 10"):
        made.optimizer.step()
    assert made.optimizer.charged_steps == 0


def test_gradient_scalers_are_refused():
    made = mixed(alpha=1.0)
    x, y = next(iter(made.loader))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(made.criterion(made.module(x), y)).backward()
    with pytest.raises(RuntimeError, match="gradient scaler"):
        scaler.step(made.optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(made.optimizer)
    assert made.optimizer.charged_steps == 1


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_nothing_of_single_rows_is_saved(mode, tmp_path):
    made = mixed(mode, 1.0)
    train(made, 1, public=False)
    for number, make in enumerate(
        (
            lambda: made.module,
            lambda: made.optimizer.params,
            lambda: made.module.to_standard_module(),
        )
    ):
        torch.save(make(), tmp_path / str(number))
        loaded = torch.load(tmp_path / str(number), weights_only=False)
        found = loaded if isinstance(loaded, list) else loaded.parameters()
        for name in ("grad_sample", "_norm_sample", "summed_grad", "_current_grad_sample"):
            assert all(getattr(param, name, None) is None for param in found)
        assert getattr(loaded, "_per_sample_gradient_norms", None) is None
    # The last one is an ordinary module.
    copy.deepcopy(loaded)(PUBLIC[0]).sum().backward()


def test_a_forward_pass_that_waits():
    made = mixed(alpha=1.0)
    x, y = next(iter(made.loader))
    made.module(x)
    made.criterion(made.module(x), y).backward()
    with pytest.raises(RuntimeError, match="forward pass that waits"):
        made.optimizer.step()


# Resuming.


def test_a_state_dict_resumes_step_and_charges(tmp_path):
    alphas = [0.2, 0.4, 0.6, 0.8]
    made = mixed(alpha=alphas)
    train(made, 2)
    torch.save(made.optimizer.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state")
    resumed = mixed(alpha=alphas)
    resumed.optimizer.load_state_dict(state)
    assert resumed.optimizer.alpha == pytest.approx(0.6)
    train(resumed, 2)
    assert resumed.optimizer.charged_steps == 4
    assert resumed.optimizer.spent(DELTA).epsilon == other_epsilon(4)
    assert resumed.optimizer.spend.epsilon(DELTA).epsilon == other_epsilon(4)
    # A state that knows nothing of this, as plain Opacus writes it.
    resumed.optimizer.load_state_dict(private().optimizer.state_dict())
    assert resumed.optimizer.charged_steps == 4


def test_going_back_gives_nothing_back():
    made = mixed(alpha=[0.2] * 9)
    train(made, 2)
    state = made.optimizer.state_dict()
    train(made, 3)
    made.optimizer.load_state_dict(state)
    assert made.optimizer.charged_steps == 5
    train(made, 1)
    assert made.optimizer.spent(DELTA).epsilon == other_epsilon(6)


@pytest.mark.parametrize("before", [0, 2])
def test_a_crash_forgets_no_charge(tmp_path, before):
    with FileLedger.create(tmp_path / "ledger", Adjacency.ZERO_OUT) as ledger:
        made = mixed(spend=ledger)
        train(made, before)
        state = made.optimizer.state_dict()
        train(made, 5 - before)  # lost in the crash, but perhaps seen
    with FileLedger.open(tmp_path / "ledger") as ledger:
        resumed = mixed(spend=ledger)
        resumed.optimizer.load_state_dict(state)
        train(resumed, 1)
        assert resumed.optimizer.charged_steps == 6
        assert ledger.epsilon(DELTA).epsilon == other_epsilon(6)
        assert resumed.optimizer.report(DELTA).epsilon == other_epsilon(6)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_steps_of_another_optimizer_after_a_resume(accountant):
    made = mixed(accountant=accountant)
    train(made, 4)
    state = made.optimizer.state_dict()
    resumed = mixed(accountant=accountant)
    resumed.optimizer.load_state_dict(state)  # and not the accountant
    train(private(engine=resumed.engine), 4, public=False)
    train(resumed, 1)
    assert resumed.optimizer.charged_steps == 9
    assert resumed.optimizer.spent(DELTA).epsilon == other_epsilon(9)
    # With the accountant, whose history then goes on from what was saved.
    resumed = mixed(accountant=accountant)
    resumed.engine.accountant.load_state_dict(made.engine.accountant.state_dict())
    resumed.optimizer.load_state_dict(state)
    train(private(engine=resumed.engine), 4, public=False)
    train(resumed, 1)
    assert resumed.optimizer.charged_steps == 9
    # An accountant with other steps.
    resumed = mixed(accountant=accountant)
    train(private(engine=resumed.engine, noise=2 * SIGMA), 3, public=False)
    resumed.optimizer.load_state_dict(state)
    assert resumed.optimizer.state_dict()["mirrordp"]["charges"] == [
        [SIGMA, RATE, 4],
        [2 * SIGMA, RATE, 3],
    ]


def test_the_history_of_another_run_is_charged():
    made, other = mixed(accountant="rdp"), mixed(accountant="rdp", noise=1.0)
    train(made, 3)
    train(other, 3)
    # As long as that of this run, and not among its charges.
    made.engine.accountant.load_state_dict(other.engine.accountant.state_dict())
    assert made.optimizer.report(DELTA, seeded=True).charged_steps == 6
    assert made.optimizer.spent(DELTA).epsilon > other.optimizer.spent(DELTA).epsilon


def test_a_checkpoint_of_the_engine(tmp_path):
    made = mixed()
    train(made, 3)
    made.engine.save_checkpoint(
        path=tmp_path / "checkpoint", module=made.module, optimizer=made.optimizer
    )
    resumed = mixed()
    resumed.engine.load_checkpoint(
        path=tmp_path / "checkpoint", module=resumed.module, optimizer=resumed.optimizer
    )
    train(resumed, 2)
    assert resumed.optimizer.charged_steps == 5
    # Going back gives nothing back and charges nothing again.
    resumed.engine.load_checkpoint(
        path=tmp_path / "checkpoint", module=resumed.module, optimizer=resumed.optimizer
    )
    train(resumed, 1)
    assert resumed.optimizer.charged_steps == 6
    # Without the optimiser's state, the steps are known from Opacus' accountant.
    other = mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.engine.load_checkpoint(path=tmp_path / "checkpoint", module=other.module)
    train(other, 1)
    assert other.optimizer.charged_steps == 4


# Bad input.


def test_what_cannot_be_wrapped():
    made = private()
    parts = made.optimizer, made.module, made.loader

    def wrap(optimizer=parts[0], module=parts[1], loader=parts[2], **options):
        return with_public_gradient(optimizer, module, loader, **{"alpha": 0.5} | options)

    plain = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    with pytest.raises(ValueError, match=r"Poisson sampling.*BatchSampler.*poisson_sampling=True"):
        wrap(loader=plain)
    with pytest.raises(ValueError, match="Poisson sampling"):
        mixed(poisson_sampling=False)
    with pytest.raises(TypeError, match="made private, got SGD"):
        wrap(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"module that make_private returned.*got Sequential"):
        wrap(module=network())
    with pytest.raises(ValueError, match="same make_private call"):
        wrap(module=private().module)
    adaptive = dict.fromkeys(("target_unclipped_quantile", "clipbound_learning_rate"), 0.5)
    adaptive |= {"max_clipbound": 9.0, "min_clipbound": 0.1, "unclipped_num_std": 5.0}
    with pytest.raises(ValueError, match="adaptive clipping"):
        mixed(clipping="adaptive", **adaptive)
    unhooked = private()
    unhooked.optimizer.attach_step_hook(None)
    with pytest.raises(ValueError, match="accountant of a PrivacyEngine"):
        mixed(made=unhooked)
    with pytest.raises(ValueError, match="add-remove"):
        wrap(spend=Ledger(Adjacency.ADD_REMOVE))
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
        wrap(alpha=1.5)
    # None of this has changed the parts.
    wrap()
    with pytest.raises(ValueError, match="already"):
        wrap()


def test_a_frozen_model():
    module = network()
    made = private(module=module)
    for p in module.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        mixed(made=made)
    # A part may be frozen.
    module = network()
    module[0].requires_grad_(False)
    made = mixed(module=module)
    before = copy.deepcopy(module[0].state_dict())
    train(made, 2)
    assert torch.equal(before["weight"], module[0].weight)
    assert made.optimizer.charged_steps == 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda made: public_loss(made).to("meta"), "device of the model, cpu, got one on meta"),
        (lambda made: made.module(PUBLIC[0])[:, 0], "mean loss.*shape"),
        (lambda made: torch.tensor(1.0), "depends on none of them"),
        (lambda made: 1.0, "must be Tensor, got float"),
    ],
)
def test_bad_public_losses(loss, message):
    made = mixed()
    before = params(made)
    backward(made, next(iter(made.loader)))
    with pytest.raises((ValueError, TypeError), match=message):
        made.optimizer.public_step(lambda: loss(made))
    with pytest.raises(RuntimeError, match=r"Call optimizer.public_step"):
        made.optimizer.step()
    assert same(before, params(made))
    assert made.optimizer.charged_steps == 0


def test_a_second_public_step_is_refused():
    made = mixed()
    made.optimizer.public_step(lambda: public_loss(made))
    with pytest.raises(RuntimeError, match="one public_step before each step"):
        made.optimizer.public_step(lambda: public_loss(made))


def test_the_private_loader_is_not_public():
    made = private()
    with pytest.raises(ValueError, match="public rows"):
        public_batches(made.loader)
    with pytest.raises(ValueError, match="public rows"):
        warm_start(network(), batch_loss, made.loader)


def test_public_batches_go_on():
    batches = public_batches(DataLoader(TensorDataset(*PUBLIC), batch_size=5))
    assert [len(next(batches)[0]) for _ in range(5)] == [5, 5, 2, 5, 5]


# Warm starts.


def batch_loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def test_a_warm_start_stops_and_keeps_the_best():
    module, data = network(), TensorDataset(*rows(60, seed=4))
    loader = DataLoader(data, batch_size=20)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.3)
    found = warm_start(module, batch_loss, loader, optimizer=optimizer, patience=4)
    assert found.converged
    assert found.num_epochs == len(found.holdout_losses) < 500
    assert found.holdout_losses.argmin() == found.num_epochs - 5
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:12]
    held = tuple(t[order] for t in data.tensors)
    assert float(batch_loss(module, held).detach()) == pytest.approx(found.holdout_losses.min())
    assert same(found.params.values(), module.state_dict().values())
    assert all(p.grad is None for p in module.parameters())


def test_a_warm_start_with_rows_that_judge():
    module = network()
    loader, judges = (DataLoader(TensorDataset(*rows(20, seed=s)), batch_size=9) for s in (5, 6))
    with pytest.warns(RuntimeWarning, match="did not converge.*still improves"):
        found = warm_start(module, batch_loss, loader, holdout=judges, max_epochs=3)
    expected = float(batch_loss(module, judges.dataset.tensors).detach())
    assert found.holdout_losses.min() == pytest.approx(expected)


@pytest.mark.parametrize("has_judges", [False, True])
def test_a_warm_start_learns_from_all_rows_again(has_judges):
    module, data = network(), TensorDataset(*rows(60, seed=4))
    twin, size = copy.deepcopy(module), len(data)
    learned, judges = (TensorDataset(*data[k::2]) for k in (0, 1))
    given = {"holdout": DataLoader(judges, batch_size=size)} if has_judges else {}
    found = warm_start(
        module,
        batch_loss,
        DataLoader(learned if has_judges else data, batch_size=size),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9),
        patience=3,
        refit=True,
        **given,
    )
    # All rows are one batch, so their order does not matter, and an epoch is a step.
    descent = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
    for _ in range(int(found.holdout_losses.argmin()) + 1):
        descent.zero_grad()
        batch_loss(twin, data.tensors).backward()
        descent.step()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_warm_start_that_diverges():
    module = network()
    before = copy.deepcopy(list(module.parameters()))
    loader = DataLoader(TensorDataset(*PUBLIC), batch_size=6)
    with pytest.warns(RuntimeWarning, match="not finite"):
        found = warm_start(module, lambda m, b: batch_loss(m, b) * float("nan"), loader, patience=2)
    assert not found.converged
    assert same(before, list(module.parameters()))


def test_warm_starts_that_are_refused():
    loader = DataLoader(TensorDataset(*PUBLIC), batch_size=6)
    with pytest.raises(ValueError, match="before make_private"):
        warm_start(private().module, batch_loss, loader)
    frozen = network().requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        warm_start(frozen, batch_loss, loader)
    one = DataLoader(TensorDataset(*rows(1)), batch_size=6)
    with pytest.raises(ValueError, match="at least 2 public rows"):
        warm_start(network(), batch_loss, one)
