# Gigabytes that not every developer has installed; CI has, and checks the types.
# pyright: reportMissingImports=false
"""Public data for PyTorch models that Opacus trains: `pip install 'mirrordp[opacus]'`.

After `PrivacyEngine.make_private(...)`, `with_public_gradient` turns Opacus' optimiser into one
that takes the paper's first-order step,

    θ_{t+1} = θ_t − η (α_t (g_t + b_t) + (1 − α_t) ∇Ψ(θ_t)),

where g_t + b_t is the private gradient as Opacus clips it and adds noise to it, and ∇Ψ is the
gradient of the loss passed to `public_step`. What follows the noise is post-processing. A step is
charged before its noise is drawn, for the noise, clip norm and sampling rate that it really has; a
step with α_t = 0 discards the private gradient and costs nothing.

The number of records n counts as public, because Opacus computes the sampling rate and the divisor
from it. ε therefore refers to zero-out adjacency, which under Poisson sampling gives the same
number as add-remove.

`warm_start` pre-trains a module on public rows.
"""

# The files, in the order of a step: `_batches` knows which batch rows are of, `_layers` which
# layers treat rows one by one, `_passes` which rows are in a gradient, `_ghost` that it is clipped,
# `_optimizer` takes the step, `_charges` charges it, `_noise` knows that its noise is new,
# `_report` sums up. `_public` and `_warm_start` are for public rows. Here is what is refused before
# the first step.

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

try:
    import torch
    from opacus import optimizers
    from opacus.accountants.accountant import IAccountant
    from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
    from opacus.optimizers import DPOptimizer
except ImportError as error:
    raise ImportError(
        "mirrordp.integrations.opacus needs PyTorch and Opacus 1.6 or newer. Install them: "
        "pip install 'mirrordp[opacus]'."
    ) from error

from mirrordp import _validate
from mirrordp.integrations.opacus._batches import draws_of
from mirrordp.integrations.opacus._charges import Books, Charge
from mirrordp.integrations.opacus._layers import use_safe_norms
from mirrordp.integrations.opacus._noise import Noises, check_seeds
from mirrordp.integrations.opacus._optimizer import (
    Mixing,
    PublicGradientOptimizer,
    refuse_adaptive_clipping,
)
from mirrordp.integrations.opacus._passes import RECURRENT, Passes
from mirrordp.integrations.opacus._public import public_batches
from mirrordp.integrations.opacus._report import mechanism_of
from mirrordp.integrations.opacus._warm_start import warm_start
from mirrordp.privacy.accounting import Adjacency
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.training.bookkeeping import check_spend
from mirrordp.types import AlphaSchedule
from mirrordp.updates import schedules

__all__ = [
    "Charge",
    "PublicGradientOptimizer",
    "public_batches",
    "warm_start",
    "with_public_gradient",
]

# Optimisers of Opacus whose noise and clip norm are known here; others are refused.
_OPTIMIZERS = (
    DPOptimizer,
    optimizers.DPPerLayerOptimizer,
    optimizers.DPOptimizerFastGradientClipping,
    optimizers.DistributedDPOptimizer,
    optimizers.DistributedDPOptimizerFastGradientClipping,
)


def with_public_gradient(
    optimizer: DPOptimizer,
    module: GradSampleHooks,
    loader: torch.utils.data.DataLoader,
    *,
    alpha: float | Sequence[float] | AlphaSchedule,
    scale_noise: bool = True,
    noisy_clip_norm: float | None = None,
    num_steps: int | None = None,
    spend: Ledger | Budget | None = None,
) -> PublicGradientOptimizer:
    """Makes an optimiser of Opacus mix in public gradients, and charge its steps.

    The same object is returned, with its class changed. Call `optimizer.public_step(...)` before
    each `optimizer.step()`, and take a step on every batch of the loader, empty ones included. At
    α = 1 the steps are Opacus' to the bit.

    In a distributed run, public gradients are averaged over the processes, and only the process of
    rank 0 should be given `spend`.

    Args:
        optimizer: what `PrivacyEngine.make_private` returned.
        module: what it returned as module (or as hooks, with `wrap_model=False`).
        loader: what it returned as data loader, with Poisson sampling.
        alpha: α: a number, a list, or a schedule of `mirrordp.schedules`. It must not depend on
            private data.
        scale_noise: True is the paper: α multiplies the private sum and its noise. With False,
            α multiplies the sum before the noise, which stays as large as it is.
        noisy_clip_norm: clips the released gradient to this norm once more, as the paper does for
            images. Not in distributed runs.
        num_steps: the number of steps of the run, where further ones are refused. A budget needs
            it, and admits the run as a whole.
        spend: the ledger or budget to charge; by default a new ledger in memory.

    Raises:
        ValueError, TypeError: if steps of this kind could not be accounted for. Nothing is changed.
        BudgetError: if the budget does not admit the run.
    """
    _check_optimizer(optimizer)
    _check_module(module, optimizer)
    if isinstance(module, GradSampleHooksFastGradientClipping):
        _check_ghost(module, optimizer)
    accountant, rate = _accountant_of(optimizer)
    check_spend(None, spend, None)
    if spend is not None and spend.adjacency is Adjacency.ADD_REMOVE:
        raise ValueError(
            "expected a ledger or budget of zero-out or replace adjacency, got add-remove, under "
            "which the number of records is secret: Opacus' sampling rate and divisor reveal it. "
            "Use Adjacency.ZERO_OUT, which costs the same epsilon."
        )
    if noisy_clip_norm is not None:
        _validate.positive(noisy_clip_norm=noisy_clip_norm)
        if hasattr(optimizer, "world_size"):
            raise ValueError(
                "expected no noisy_clip_norm in a distributed run, where each process has a part "
                "of the gradient when it would be clipped. Leave it out."
            )
    alphas = _alphas(schedules.as_schedule(alpha), num_steps)
    draws, num_examples = draws_of(loader)
    books = Books(
        spend or Ledger(Adjacency.ZERO_OUT), accountant, rate, draws, is_shared=spend is not None
    )
    passes = Passes(module, draws, optimizer.params)
    passes.check_layers()
    check_seeds(optimizer, draws)
    if isinstance(module, GradSampleHooksFastGradientClipping):
        use_safe_norms(module)
    mixing = Mixing(
        alphas, scale_noise, noisy_clip_norm, num_steps, num_examples, books, passes,
        Noises(books.spend), optimizer.expected_batch_size,
    )  # fmt: skip
    if isinstance(spend, Budget):
        _admit(spend, optimizer, mixing)
    kind = type(optimizer)
    optimizer.__class__ = type(
        f"PublicGradient{kind.__name__}", (PublicGradientOptimizer, kind), {}
    )
    found = cast(PublicGradientOptimizer, optimizer)
    found._mixing = mixing
    draws.optimizers.add(found)
    passes.watch(found._check_trained)
    found.original_optimizer.register_step_pre_hook(lambda *step: found._guard())
    return found


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, PublicGradientOptimizer):
        raise ValueError(
            "expected an optimiser as make_private returned it, got one that mixes in public "
            "gradients already. Call with_public_gradient once."
        )
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(
            f"expected an optimiser that was made private, got {type(optimizer).__name__}. Pass "
            "the one that PrivacyEngine.make_private returned."
        )
    if isinstance(optimizer, optimizers.AdaClipDPOptimizer):
        refuse_adaptive_clipping()
    if type(optimizer) not in _OPTIMIZERS:
        names = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
        raise TypeError(
            f"expected one of Opacus' optimisers {names}, got {type(optimizer).__name__}, whose "
            "noise is not known here. Use grad_sample_mode 'hooks', 'functorch' or 'ghost'."
        )


def _check_module(module: Any, optimizer: DPOptimizer) -> None:
    if not isinstance(module, GradSampleHooks):
        raise TypeError(
            f"expected the module that make_private returned, in mode 'hooks', 'functorch' or "
            f"'ghost', got {type(module).__name__}. Pass it as the second argument."
        )
    if isinstance(module._module, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            "expected a module wrapped in Opacus' DPDDP, got PyTorch's DistributedDataParallel, "
            "which averages gradients in the backward pass. Wrap it in "
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel."
        )
    if not optimizer.params:
        raise ValueError(
            "expected a model with parameters to train, got one that is frozen. Set "
            "requires_grad for some of its parameters before make_private."
        )
    owned = {id(param) for param in cast(torch.nn.Module, module._module).parameters()}
    if not all(id(param) in owned for param in optimizer.params):
        raise ValueError(
            "expected an optimiser of the module's parameters, got one of others. Pass module, "
            "optimiser and loader of the same make_private call."
        )
    trained = {id(param) for param in optimizer.params}
    named = cast(torch.nn.Module, module._module).named_parameters()
    others = [name for name, param in named if param.requires_grad and id(param) not in trained]
    if others and not isinstance(module, GradSampleHooksFastGradientClipping):
        raise ValueError(
            "expected an optimiser of all parameters of the module that are not frozen, got one "
            f"without {', '.join(others)}, whose gradients have no noise. Set requires_grad to "
            "False for them before make_private, or pass them to the optimiser too, in a group "
            "with another learning rate for example."
        )
    if any(param.dtype not in (torch.float32, torch.float64) for param in optimizer.params):
        raise ValueError(
            "expected parameters of at least 32 binary digits, got parameters of half precision, "
            "in which neither norms nor noise are as accounted for. Use float32 and torch.autocast."
        )


def _check_ghost(hooks: GradSampleHooksFastGradientClipping, optimizer: DPOptimizer) -> None:
    """Raises if ghost clipping would not take norms over the parameters that are trained."""
    trained = {id(param) for param in hooks.trainable_parameters}
    if trained != {id(param) for param in optimizer.params}:
        raise ValueError(
            f"expected an optimiser of the {len(trained)} parameters that ghost clipping takes "
            f"norms over, got one of {len(optimizer.params)}. Pass all trainable parameters to "
            "the optimiser, and set requires_grad before make_private."
        )
    owners = collections.Counter(
        id(param)
        for module in cast(torch.nn.Module, hooks._module).modules()
        if type(module) not in RECURRENT  # whose parts own their parameters too
        for param in module.parameters(recurse=False)
    )
    named = cast(torch.nn.Module, hooks._module).named_parameters()
    shared = [name for name, param in named if id(param) in trained and owners[id(param)] > 1]
    if shared:
        raise ValueError(
            f"expected parameters that belong to one module each, got {', '.join(shared)} in "
            "several, of which ghost clipping takes the norm in one. Use grad_sample_mode='hooks' "
            "for a model with tied weights."
        )


def _accountant_of(optimizer: DPOptimizer) -> tuple[IAccountant, float]:
    """Returns the engine's accountant and the sampling rate that it is told."""
    hook = optimizer.step_hook
    known = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
    accountant, rate = known.get("self"), known.get("sample_rate")
    if not isinstance(accountant, IAccountant) or rate is None:
        raise ValueError(
            "expected an optimiser with the accountant of a PrivacyEngine attached, got one "
            "without. Make it private with PrivacyEngine.make_private, and attach no other hook."
        )
    return accountant, float(rate)


def _alphas(schedule: AlphaSchedule, num_steps: int | None) -> Callable[[int], np.float32]:
    if num_steps is not None:
        _validate.positive_integer(num_steps=num_steps)
        return schedules.evaluate(schedule, num_steps).__getitem__

    @functools.lru_cache(maxsize=1)
    def alpha_of(step: int) -> np.float32:
        return schedules.evaluate(lambda offset: schedule(step + offset), 1)[0]

    return alpha_of


def _admit(budget: Budget, optimizer: DPOptimizer, mixing: Mixing) -> None:
    """Raises unless a budget has room for the whole run."""
    if mixing.num_steps is None:
        raise ValueError(
            "expected the number of steps with a budget, which admits a run as a whole, got "
            "num_steps=None. Pass num_steps=epochs * len(loader)."
        )
    budget.require_data()
    charged = sum(mixing.alphas(step) > 0 for step in range(mixing.num_steps))
    mechanism = mechanism_of(optimizer, mixing.books, mixing.num_examples)
    mechanism = dataclasses.replace(mechanism, num_steps=max(int(charged), 1))
    budget.admit(mechanism, num_steps=int(charged))
