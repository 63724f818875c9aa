# pyright: reportMissingImports=false
"""What ghost clipping clips.

Opacus finds the norm of each row's gradient with its hooks in a first backward pass, and computes a
coefficient c_i for each row. A second backward pass adds up c_i ∇ℓ_i into `p.grad` by automatic
differentiation. The sum is clipped only if both passes differentiate the same function, and if
`p.grad` holds nothing else.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

from mirrordp.integrations.opacus._passes import Call, Passes, nodes_of, walk


class Clipped(NamedTuple):
    """What a backward pass left in `p.grad`; good for one step."""

    num_rows: int  # how many rows were clipped
    clip_norm: float  # the norm that they were clipped to
    grads: list[torch.Tensor]
    versions: list[int]  # how often each had been changed by then


def clipped_backward(
    loss: DPTensorFastGradientClipping,
    params: Sequence[torch.nn.Parameter],
    zero_grad: Callable[[], None],
    passes: Passes,
) -> Clipped:
    """Takes Opacus' two backward passes, and checks that they clip what they should."""
    hooks, losses = cast(GradSampleHooksFastGradientClipping, passes.hooks), loss.loss_per_sample
    if loss.module is not hooks or not hooks.hooks_enabled:
        raise RuntimeError(
            "expected a private loss of the module that was given to with_public_gradient, got one "
            "of another module or one inside public_pass(). Use the module and the criterion of "
            "the same make_private call."
        )
    passes.forget_rows()
    try:
        _check_one_per_row(losses, None)
        _check_graph(losses, passes)
        for param in passes.trained:
            param._norm_sample = None  # pyright: ignore[reportAttributeAccessIssue]
        reduce = torch.mean if loss.loss_reduction == "mean" else torch.sum
        reduce(losses, dim=0).backward(retain_graph=True)
        zero_grad()
        unknown = [param for param in params if getattr(param, "_norm_sample", None) is None]
        if unknown:
            raise RuntimeError(
                "expected a loss that depends on all trainable parameters by forward passes in "
                f"training mode, got one that does not on {passes.names(unknown)}. Freeze "
                "parameters that the model does not use before make_private."
            )
        coefficients = hooks.get_clipping_coef().to(losses.device)
        _check_one_per_row(losses, len(coefficients))
        hooks.disable_hooks()
        torch.sum(coefficients * losses).backward()
    except BaseException:
        passes.forget()
        raise
    finally:
        hooks.enable_hooks()
    passes.calls.clear()
    grads = [param.grad for param in params if param.grad is not None]
    versions = [grad._version for grad in grads]
    return Clipped(len(losses), float(hooks.max_grad_norm), grads, versions)


def check_unchanged(clipped: Clipped, params: Sequence[torch.nn.Parameter]) -> None:
    """Refuses gradients that are not those which ghost clipping left."""
    found = [param.grad for param in params if param.grad is not None]
    ids = [id(grad) for grad in found], [id(grad) for grad in clipped.grads]
    if ids[0] != ids[1] or [grad._version for grad in found] != clipped.versions:
        raise RuntimeError(
            "expected the gradients that ghost clipping computed, got others. Between backward() "
            "and step(), leave p.grad as it is, and call no backward() of another loss: its "
            "gradient would not be clipped."
        )
    norms = [torch.linalg.vector_norm(grad.float()) for grad in found]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    # Half precision and TF32 compute the norms of rows to less than three digits.
    if norm > clipped.num_rows * clipped.clip_norm * 1.01:
        raise RuntimeError(
            f"expected a sum of {clipped.num_rows} rows of norm {clipped.clip_norm:.4g} at most, "
            f"got one of norm {float(norm):.4g}. Ghost clipping does not clip this model; use "
            "grad_sample_mode='hooks'."
        )


def _check_one_per_row(losses: torch.Tensor, num_rows: int | None) -> None:
    """Raises unless there is one loss for each row, since otherwise coefficients spread."""
    if losses.dim() != 1 or (num_rows is not None and len(losses) != num_rows):
        rows = "each row" if num_rows is None else f"each of {num_rows} rows"
        raise ValueError(
            f"expected one loss for {rows}, in a tensor of one dimension, got losses of shape "
            f"{tuple(losses.shape)}. Ghost clipping multiplies each row's loss with a coefficient. "
            "Squeeze outputs and targets of shape (rows, 1), as in criterion(model(x).squeeze(1), "
            "y); average over further dimensions in a criterion of your own."
        )


def _check_graph(losses: torch.Tensor, passes: Passes) -> None:
    """Raises if a loss depends on parameters by a way that Opacus' hooks do not see."""
    trained = {id(param) for param in passes.trained}
    found: list[tuple[Any, Call]] = []

    def beyond(node: Any) -> Iterable[Any] | None:
        call = passes.calls.get(node)
        if call is None:
            return None
        found.append((node, call))
        return [following for each in call.inputs for following, _ in each.next_functions]

    def refuse(nodes: Iterable[Any], params: set[int]) -> None:
        for node in nodes:
            param = getattr(node, "variable", None)
            if param is not None and id(param) in params:
                raise ValueError(
                    f"expected a loss that depends on the parameter {passes.names([param])} only "
                    "by the layer that owns it, got one that uses it elsewhere too, such as in a "
                    "penalty that was added to the loss. Ghost clipping does not clip that part. "
                    "Use the optimiser's weight_decay instead of a penalty, or "
                    "grad_sample_mode='hooks'."
                )

    refuse(walk(nodes_of(losses), beyond), trained)
    for first, call in found:
        inside = walk([first], lambda node, call=call: () if node in call.inputs else None)
        refuse(inside, trained - call.owned)


def _checked(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns an operation of two losses, which refuses terms that are not one for each row."""

    @functools.wraps(operation)
    def checked(self: DPTensorFastGradientClipping, other: Any) -> Any:
        if hasattr(self.optimizer, "clipped_backward"):
            _check_term(self.loss_per_sample, getattr(other, "loss_per_sample", other))
        return operation(self, other)

    return checked


def _check_term(losses: torch.Tensor, term: Any) -> None:
    """Raises if a term of the loss would give one row's gradient to another one."""
    if not isinstance(term, torch.Tensor) or not term.requires_grad:
        return
    if term.shape != losses.shape or 0 in term.stride():
        raise ValueError(
            f"expected terms of the loss of shape {tuple(losses.shape)}, one for each row, got "
            f"one of shape {tuple(term.shape)} that depends on all rows or on parameters. Ghost "
            "clipping multiplies each row's loss with a coefficient. Average the term over other "
            "dimensions only, as in criterion(...) + (h ** 2).sum(1); for a penalty on parameters "
            "use the optimiser's weight_decay."
        )


def _backward(self: DPTensorFastGradientClipping) -> None:
    ours = getattr(self.optimizer, "clipped_backward", None)
    return _opacus_backward(self) if ours is None else ours(self)


# Ghost clipping's criterion makes these losses by itself, so their class is the only place to see
# what was clipped. Losses of other optimisers do what they did.
_opacus_backward = DPTensorFastGradientClipping.backward
DPTensorFastGradientClipping.backward = _backward
for _name in ("__add__", "__sub__", "__rsub__", "__mul__", "__truediv__"):
    _operation = getattr(DPTensorFastGradientClipping, _name)
    setattr(DPTensorFastGradientClipping, _name, _checked(_operation))
