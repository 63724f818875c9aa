# pyright: reportMissingImports=false
"""Pre-training of a PyTorch module on public rows."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch.utils import _pytree
from torch.utils.data import ConcatDataset, DataLoader, Subset

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.integrations.opacus._public import require_public_loader
from mirrordp.updates.public import WarmStart


def warm_start(
    module: torch.nn.Module,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    public: DataLoader,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    holdout_fraction: float = 0.2,
    holdout: DataLoader | None = None,
    patience: int = 10,
    max_epochs: int = 500,
    refit: bool = False,
    seed: int = 0,
) -> WarmStart:
    """Pre-trains a module on public rows until a held-out part of them stops improving.

    Call it before `make_private`. The module is left with the best parameters by the held-out
    loss, which `mirrordp.warm_start` would return. Public data only: no cost.

    Args:
        module: the model, which is changed in place.
        loss_fn: `loss_fn(module, batch) -> mean loss` on a batch of the loader.
        public: a loader of public rows. Its data set, batch size and collate function are used;
            rows are set aside and shuffled here.
        optimizer: an optimiser of the module's parameters; by default Adam with rate 1e-3.
        holdout_fraction: the share of the public rows that judges.
        holdout: a loader of public rows of your own that judge; all of `public` is then learned
            from.
        patience: stop after this many epochs without improvement.
        max_epochs: stop after this many epochs at the latest.
        refit: begin again with all public rows, for as many epochs as were best.
        seed: decides which rows judge and the order of the others.

    Returns:
        A `WarmStart`, whose `params` is the state dict of the module.

    Warns:
        RuntimeWarning: if it did not converge.
    """
    require_public_loader(public)
    if isinstance(module, AbstractGradSampleModule) or hasattr(
        module, "autograd_grad_sample_hooks"
    ):
        raise ValueError(
            "expected a module without Opacus' hooks, got one that was made private. Call "
            "warm_start before make_private."
        )
    _validate.open_unit_interval(holdout_fraction=holdout_fraction)
    _validate.positive_integer(patience=patience, max_epochs=max_epochs)
    trained = [param for param in module.parameters() if param.requires_grad]
    if not trained:
        raise ValueError(
            "expected a model with parameters to train, got one that is frozen. Set "
            "requires_grad for some of its parameters."
        )
    generator = torch.Generator().manual_seed(seed)
    train, judges, everything = _split(public, holdout, holdout_fraction, generator)
    descent = torch.optim.Adam(trained, lr=1e-3) if optimizer is None else optimizer
    begin = copy.deepcopy((module.state_dict(), descent.state_dict()))
    best, best_loss, best_epoch, number = begin[0], math.inf, 0, 0
    train_losses, holdout_losses = [], []
    was_training = module.training
    for number in range(max_epochs):
        train_losses.append(_learn(module, loss_fn, descent, train))
        holdout_losses.append(_judge(module, loss_fn, judges))
        if holdout_losses[-1] < best_loss:
            best, best_loss = copy.deepcopy(module.state_dict()), holdout_losses[-1]
            best_epoch = number
        if number - best_epoch >= patience:
            break
    if refit and math.isfinite(best_loss):
        module.load_state_dict(begin[0])
        descent.load_state_dict(begin[1])
        for _ in range(best_epoch + 1):
            _learn(module, loss_fn, descent, everything)
        best = copy.deepcopy(module.state_dict())
    module.load_state_dict(best)
    module.train(was_training)
    module.zero_grad(set_to_none=True)
    converged = number - best_epoch >= patience and math.isfinite(best_loss)
    if not converged:
        _warn_not_converged(best_loss, number + 1, patience)
    losses = np.asarray(train_losses), np.asarray(holdout_losses)
    return WarmStart(best, converged, number + 1, *losses)


def _split(
    public: DataLoader,
    holdout: DataLoader | None,
    holdout_fraction: float,
    generator: torch.Generator,
) -> tuple[DataLoader, DataLoader, DataLoader]:
    """Returns loaders of the rows to learn from, of those that judge, and of both together."""
    data: Any = public.dataset
    options = {
        "batch_size": public.batch_size or 32,
        "collate_fn": public.collate_fn,
        "num_workers": public.num_workers,
    }
    if holdout is not None:
        require_public_loader(holdout)
        train, judges, both = data, holdout, ConcatDataset([data, holdout.dataset])
    else:
        rows = len(data)
        if rows < 2:
            raise ValueError(
                "warm_start needs at least 2 public rows: one to learn and one to judge."
            )
        count = min(max(1, round(holdout_fraction * rows)), rows - 1)
        order = torch.randperm(rows, generator=generator).tolist()
        judges = DataLoader(Subset(data, order[:count]), **options)
        train, both = Subset(data, order[count:]), data
    options |= {"shuffle": True, "generator": generator}
    return DataLoader(train, **options), judges, DataLoader(both, **options)


def _learn(
    module: torch.nn.Module,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    descent: torch.optim.Optimizer,
    rows: DataLoader,
) -> float:
    """Trains for one epoch and returns the mean loss of its batches."""
    module.train()
    losses = []
    for batch in rows:
        descent.zero_grad()
        loss = loss_fn(module, batch)
        loss.backward()
        descent.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses))


@torch.no_grad()
def _judge(
    module: torch.nn.Module,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    judges: DataLoader,
) -> float:
    """Returns the mean loss on held-out rows, without dropout."""
    module.eval()
    losses, sizes = [], []
    for batch in judges:
        losses.append(float(loss_fn(module, batch)))
        tensors = (t for t in _pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim())
        sizes.append(next((len(tensor) for tensor in tensors), 1))
    return float(np.average(losses, weights=sizes))


def _warn_not_converged(best_loss: float, num_epochs: int, patience: int) -> None:
    if math.isfinite(best_loss):
        reason = (
            f"after {num_epochs} passes over the public rows the held-out loss still improves (it "
            f"is {best_loss:.4g}; {patience} passes without improvement end the warm start). Use "
            "an optimizer with a larger learning rate (the default is Adam with 1e-3), or more "
            "passes (max_epochs)."
        )
    else:
        reason = (
            f"the held-out loss was not finite after any of {num_epochs} passes over the public "
            "rows, and the parameters are those that you gave. Use a smaller learning rate, or "
            "look for the NaN in the loss function."
        )
    warn(f"the warm start did not converge: {reason}", RuntimeWarning)
