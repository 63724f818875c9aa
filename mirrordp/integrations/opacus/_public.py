# pyright: reportMissingImports=false
"""Public rows: their batches, and the gradient of their loss."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch.utils.data import DataLoader

from mirrordp import _validate
from mirrordp.integrations.opacus._batches import check_data


def public_batches(loader: DataLoader) -> Iterator[Any]:
    """Yields the batches of a public loader without end, shuffled anew in each pass.

    Raises:
        ValueError: for a loader with Poisson sampling, which is a private one.
    """
    require_public_loader(loader)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def require_public_loader(loader: Any) -> None:
    """Raises for what is not a loader, or is the private one."""
    _validate.instance_of(DataLoader, loader=loader)
    if isinstance(loader, DPDataLoader):
        raise ValueError(
            "expected a loader of public rows, got the private loader of make_private. Make a "
            "DataLoader of public rows."
        )
    check_data(loader.dataset, is_private=False)


def mean_loss(loss: Any) -> torch.Tensor:
    """Returns a loss as a tensor; ghost clipping's criterion returns one loss for each row."""
    if isinstance(loss, DPTensorFastGradientClipping):
        return torch.mean(loss.loss_per_sample)
    _validate.instance_of(
        torch.Tensor, "Return the loss of the public batch from the function.", loss=loss
    )
    return loss


def public_gradient(
    loss: torch.Tensor, params: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor | None]:
    """Returns the gradient of a public loss, one tensor per parameter that it depends on."""
    devices = {param.device for param in params}
    if loss.device not in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"expected a public loss on the device of the model, {names}, got one on "
            f"{loss.device}. Move the public batch to the device of the model."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"expected the mean loss of a public batch, got a tensor of shape "
            f"{tuple(loss.shape)}. Use a criterion with reduction='mean'."
        )
    found: Sequence[torch.Tensor | None] = [None]
    if loss.requires_grad:
        found = torch.autograd.grad(loss, params, allow_unused=True)
    if all(grad is None for grad in found):
        raise ValueError(
            "expected a public loss that depends on the parameters of the optimiser, got one "
            "that depends on none of them. Compute it with the model that make_private "
            "returned."
        )
    return [None if grad is None else grad.detach() for grad in found]
