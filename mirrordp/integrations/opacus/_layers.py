# pyright: reportMissingImports=false
"""Layers whose rows are not clipped one by one, or that remember rows without noise.

`check_call` refuses calls of layers that couple rows or that rows change. Ghost clipping multiplies
the loss of each row by C / (its norm), so `check_ghost` refuses layers whose norms Opacus cannot
be relied on for; in the other modes a wrong gradient of a row is clipped like a right one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from opacus.grad_sample.linear import compute_linear_norm_sample
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.rnn import PackedSequence

# What `check_call` looks at.
CHECKED = (_BatchNorm, _InstanceNorm, nn.Embedding, nn.EmbeddingBag, DPRNNBase)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Layers whose norms in ghost clipping agree with automatic differentiation, whatever the input.
_GHOST = (
    nn.Linear,
    nn.Embedding,
    *_CONVOLUTIONS,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.RMSNorm,
    RNNLinear,
    SequenceBias,
)


def check_call(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises if a layer would couple the rows that it is given, or keep something of them."""
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        raise ValueError(
            f"expected layers that treat each row by itself, got {type(layer).__name__} in "
            "training mode, whose statistics are those of a whole private batch and are kept "
            "without noise. Use GroupNorm or LayerNorm (opacus.validators.ModuleValidator.fix "
            "replaces it), or call eval() on layers of a frozen body after model.train()."
        )
    if isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats:
        raise ValueError(
            f"expected layers that keep nothing of private rows, got {type(layer).__name__} with "
            "running statistics, which have no noise. Use track_running_stats=False, or call "
            "eval() on the layer."
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        raise ValueError(
            f"expected layers that keep nothing of private rows, got {type(layer).__name__} with "
            f"max_norm={layer.max_norm}, which rescales the vectors of the tokens that it is "
            "given, without noise. Use max_norm=None."
        )
    if isinstance(layer, DPRNNBase):
        for given in (*args, *kwargs.values()):
            if isinstance(given, PackedSequence) and not _is_in_order(given.sorted_indices):
                raise ValueError(
                    f"expected packed sequences in the order of the batch, got a "
                    f"{type(layer).__name__} with sequences in another order, in which rows of "
                    "different records would be clipped together. Sort the records by length in "
                    "the loader's collate_fn and use pack_padded_sequence(..., "
                    "enforce_sorted=True), or pass padded tensors."
                )


def _is_in_order(indices: torch.Tensor | None) -> bool:
    return indices is None or indices.tolist() == list(range(len(indices)))


def check_ghost(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises for layers whose norms in ghost clipping could be smaller than they are."""
    for name, layer in layers:
        kind, setting = type(layer).__name__, ""
        if type(layer) not in _GHOST or "forward" in vars(layer):
            setting = kind
        elif isinstance(layer, _CONVOLUTIONS) and layer.padding_mode != "zeros":
            setting = f"{kind}(padding_mode={layer.padding_mode!r})"
        elif isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.sparse):
            setting = f"{kind} with scale_grad_by_freq or sparse"
        if setting:
            known = ", ".join(each.__name__ for each in _GHOST)
            raise ValueError(
                f"expected layers whose norms ghost clipping is known to compute, {known}, got "
                f"{setting} in {name or 'the model'}. Use grad_sample_mode='hooks', which clips "
                "the gradients of all layers, or freeze this one before make_private."
            )


def use_safe_norms(hooks: GradSampleHooksFastGradientClipping) -> None:
    """Replaces Opacus' norms of linear layers, which rounding can make much too small."""
    hooks.NORM_SAMPLERS = {**hooks.NORM_SAMPLERS, nn.Linear: _linear_norms}


def _linear_norms(
    layer: nn.Linear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Returns upper bounds of the norms of the rows' gradients.

    The gradient of a row is Σ_t g_t a_tᵀ over its positions t, and its squared norm
    Σ_st (g_s·g_t)(a_s·a_t), as Opacus computes it in the precision of the layer. Where positions
    cancel, the second backward pass is off by up to n ε Σ_t ‖g_t‖ ‖a_t‖ for n positions. Hence
    32 ε (Σ_t ‖g_t‖ ‖a_t‖)² is added to the square, which is more than that for n up to 10,000 in
    float32. Where nothing cancels, it changes the last digits.
    """
    if backprops.dim() == 2:  # one position, and nothing to cancel
        return compute_linear_norm_sample(layer, activations, backprops)
    # In float64 the products are exact enough for any width and number of positions.
    g, a = (each.flatten(1, -2).double() for each in (backprops, activations[0]))
    eps, found = torch.finfo(backprops.dtype).eps, {}
    if layer.weight.requires_grad:
        squares = (g @ g.mT * (a @ a.mT)).sum((1, 2))
        found[layer.weight] = _bounded(squares, g.norm(dim=2) * a.norm(dim=2), eps)
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = _bounded(g.sum(1).square().sum(1), g.norm(dim=2), eps)
    return {param: norms.to(backprops.dtype) for param, norms in found.items()}


def _bounded(squares: torch.Tensor, terms: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns norms from their squares, which are sums of terms of these norms for each row."""
    error = 32 * eps * terms.sum(1).square()
    return (squares.clamp(min=0) + error).sqrt()
