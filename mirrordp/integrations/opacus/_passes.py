# pyright: reportMissingImports=false
"""Forward and backward passes of a module, as Opacus' hooks see them.

Opacus' hooks keep the inputs of each layer (its activations) in the forward pass and compute the
gradients of rows from them in the backward pass. `Passes` notes whose rows the activations are
of, and thus which rows are in the gradient of each parameter.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from mirrordp.integrations.opacus import _layers
from mirrordp.integrations.opacus._batches import NOTHING, Draws, Rows, is_private

# Opacus' hooks are on the parts of these layers, which own their parameters too.
RECURRENT = (DPRNN, DPLSTM, DPGRU)
# Of activations that Opacus kept before it was watched; no step may use them.
_UNKNOWN = {Rows(NOTHING, True, 0)}


class _Forward(NamedTuple):
    """A forward pass of the module that Opacus keeps activations of."""

    nodes: list[Any]  # the graph nodes of its output
    rows: set[Rows]  # what it was given
    kept: int  # the number of activations after it


class Call(NamedTuple):
    """A call of a layer: the part of a loss's graph whose gradient Opacus' hooks see."""

    inputs: set[Any]  # the graph nodes where the part ends
    owned: set[int]  # the ids of the layer's parameters


class _Hook:
    """A function for a hook, which copies of a module share and saved modules go without."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *given: Any) -> None:
        self._function(*given)

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return self

    def __reduce__(self) -> Any:
        return _Hook, (_do_nothing,)


def _do_nothing(*given: Any) -> None:
    del given


class Passes:
    """What Opacus' hooks keep of the forward passes of a module.

    Attributes:
        hooks: Opacus' hooks.
        module: the module that they are on.
        trained: the parameters whose gradients they see.
        calls: the calls of layers that Opacus keeps activations of, by the graph nodes of their
            outputs.
    """

    def __init__(
        self, hooks: GradSampleHooks, draws: Draws, trained: Sequence[torch.nn.Parameter]
    ) -> None:
        self.hooks, self.module = hooks, cast(torch.nn.Module, hooks._module)
        self.trained = list(trained)
        self.calls: dict[Any, Call] = {}
        self._draws = draws
        self._is_public_step = False
        self._given: set[Rows] | None = None  # to the forward pass that runs
        self._state: _State | None = None  # of the module before it
        self._forwards: list[_Forward] = []
        self._activations = WeakTensorKeyDictionary()  # the rows that they are of
        # The rows in the gradient of each parameter.
        self._gradients: dict[torch.Tensor, set[Rows]] = {}

    def watch(self, check: Callable[[], None]) -> None:
        """Adds hooks beside those of Opacus, and has each private forward pass checked before."""
        added = []
        for _, layer in self._layers():
            added += [
                layer.register_forward_hook(_Hook(self._after_layer)),
                layer.register_full_backward_pre_hook(_Hook(self._before_backward)),
            ]
        for layer in self.module.modules():
            if isinstance(layer, _layers.CHECKED):
                hook = _Hook(self._before_layer)
                added.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        before = _Hook(lambda module, *inputs: self._before_forward(module, inputs, check))
        added += [
            self.module.register_forward_pre_hook(before, with_kwargs=True),
            self.module.register_forward_hook(_Hook(self._after_forward), always_call=True),
        ]
        # Opacus' to_standard_module removes what is in this list.
        cast(Any, self.hooks).autograd_grad_sample_hooks += added

    def _layers(self) -> list[tuple[str, torch.nn.Module]]:
        """Returns the layers that Opacus has hooks on, with their names."""
        names = {id(layer): name for name, layer in self.module.named_modules()}
        found = self.hooks.iterate_submodules(self.module)
        return [(names[id(layer)], layer) for layer in found if type(layer) not in RECURRENT]

    def check_layers(self) -> None:
        """Raises if ghost clipping would not find the norms of all layers."""
        if self.is_ghost:
            _layers.check_ghost(self._layers())

    @property
    def is_ghost(self) -> bool:
        """Whether Opacus clips by ghost clipping."""
        return isinstance(self.hooks, GradSampleHooksFastGradientClipping)

    def _is_private(self, module: torch.nn.Module) -> bool:
        """Whether Opacus' hooks note a forward pass of a module."""
        return self.hooks.hooks_enabled and module.training and torch.is_grad_enabled()

    def _before_forward(
        self, module: torch.nn.Module, inputs: Any, check: Callable[[], None]
    ) -> None:
        if module is not self.module:
            return
        if self.num_activations == 0:  # backward passes have followed all forward passes
            self._forwards.clear()
            self.calls.clear()
        if self._is_public_step and is_private(inputs):
            raise _private_rows()
        self._given = self._state = None
        if self.hooks.hooks_enabled and (module.training or torch.is_grad_enabled()):
            self._state = _state_of(module)
        if self._is_private(module):
            check()
            self.check_layers()
            self._given = self._draws.rows(inputs)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        del inputs
        if module is not self.module:
            return
        given, before, self._given, self._state = self._given, self._state, None, None
        if before is not None:
            self._check_state(before, _state_of(module))
        if given is not None:
            self._forwards.append(_Forward(nodes_of(output), given, self.num_activations))

    def _check_state(self, before: "_State", after: "_State") -> None:
        """Raises if a forward pass has changed the module."""
        changed = [
            name
            for name in before.keys() | after.keys()
            if name not in before
            or name not in after
            or before[name][0] is not after[name][0]
            or before[name][1] != after[name][1]
        ]
        if changed:
            self.forget()
            raise RuntimeError(
                "expected forward passes that leave the model as it is, got one that changed "
                f"{', '.join(sorted(changed))}: these would keep something of private rows without "
                "noise. Remove the running statistics, counters or caches, or fill caches by a "
                "public forward pass inside 'with optimizer.public_pass():'. Build the model anew, "
                "since this one has changed."
            )

    def _before_layer(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self.hooks.hooks_enabled:
            _layers.check_call(layer, args, kwargs)

    def _after_layer(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        activations: Any = getattr(layer, "activations", None)
        if not activations or not self._is_private(layer):
            return
        if self.is_ghost and torch.is_autocast_enabled(activations[-1][0].device.type):
            self.forget()
            raise RuntimeError(
                "expected ghost clipping in full precision, got torch.autocast, which computes "
                "norms to two digits. Leave out autocast, or use grad_sample_mode='hooks'."
            )
        rows = self._draws.rows(inputs) if self._given is None else self._given
        for tensor in activations[-1]:
            self._activations[tensor] = rows
        call = Call(set(nodes_of(inputs)), {id(param) for param in layer.parameters()})
        self.calls.update(dict.fromkeys(nodes_of(output), call))

    def _before_backward(self, layer: torch.nn.Module, gradient: Any) -> None:
        del gradient
        if not self.hooks.hooks_enabled:
            return
        activations: Any = getattr(layer, "activations", None) or [[]]
        rows: set[Rows] = set()
        for tensor in activations[-1]:  # which Opacus takes now
            rows |= self._activations.get(tensor) or _UNKNOWN
        for param in layer.parameters():
            # Opacus adds to what it has not completed, or else to what has not been cleared.
            is_pending = hasattr(param, "_current_grad_sample")
            if not is_pending and getattr(param, "grad_sample", None) is None:
                self._gradients.pop(param, None)
            self._gradients[param] = self._gradients.get(param, set()) | (rows or _UNKNOWN)

    def rows(self, params: Iterable[torch.Tensor]) -> set[Rows]:
        """Returns the rows in the gradients of parameters."""
        return set().union(*(self._gradients.get(param, ()) for param in params))

    def forget_rows(self) -> None:
        """Notes that gradients were used or dropped; Opacus may not have completed others yet."""
        self._gradients = {
            param: rows
            for param, rows in self._gradients.items()
            if hasattr(param, "_current_grad_sample")
        }

    @property
    def num_activations(self) -> int:
        """How many activations Opacus keeps for backward passes to come."""
        return sum(len(getattr(module, "activations", ())) for module in self.module.modules())

    def forget(self) -> None:
        """Undoes what forward passes left for Opacus' backward hooks."""
        for module in self.module.modules():
            if getattr(module, "activations", None):
                cast(Any, module).activations = []
                if hasattr(module, "max_batch_len"):
                    del module.max_batch_len
        for param in self.module.parameters():
            if hasattr(param, "_forward_counter"):
                param._forward_counter = 0  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(param, "_current_grad_sample"):
                del param._current_grad_sample  # pyright: ignore[reportAttributeAccessIssue]
        self._forwards.clear()
        self.calls.clear()

    @contextlib.contextmanager
    def public(self, is_step: bool = False) -> Iterator[None]:
        """Turns Opacus' hooks off; for a public step also refuses rows of the private loader."""
        before = self.hooks.hooks_enabled, self._is_public_step
        self.hooks.hooks_enabled, self._is_public_step = False, is_step or before[1]
        try:
            yield
        finally:
            self.hooks.hooks_enabled, self._is_public_step = before

    def disown(self, loss: torch.Tensor) -> None:
        """Takes the activations of a public forward pass away from Opacus, if it kept any."""
        if self.num_activations == 0:
            return
        forwards, behind = list(self._forwards), set(walk([loss.grad_fn], lambda node: None))
        reached = [forward for forward in forwards if not behind.isdisjoint(forward.nodes)]
        # Parts of the module may have been called by themselves, and outputs may be opaque.
        kept = forwards[-1].kept if forwards else 0
        is_known = self.num_activations <= kept and all(forward.nodes for forward in forwards)
        if is_known and not reached:
            return
        self.forget()
        if not all(rows.is_copy for forward in reached for rows in forward.rows):
            raise _private_rows()
        if not is_known or reached != forwards:
            raise RuntimeError(
                "expected a public loss from a forward pass without Opacus' hooks, got one whose "
                "activations cannot be told from private ones. Pass a function, "
                "public_step(lambda: criterion(model(x), y)), or compute the loss inside "
                "'with optimizer.public_pass():'; repeat the private forward pass."
            )

    def names(self, params: Iterable[torch.Tensor]) -> str:
        """Returns the names of parameters, separated by commas."""
        names = {id(param): name for name, param in self.module.named_parameters()}
        return ", ".join(names.get(id(param), "unknown") for param in params)


_State: TypeAlias = dict[str, tuple[torch.Tensor, int]]


def _state_of(module: torch.nn.Module) -> _State:
    """Returns the parameters and buffers of a module, and how often each has been changed."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: (tensor, tensor._version) for name, tensor in named}


def nodes_of(tensors: Any) -> list[Any]:
    """Returns the graph nodes of the tensors in a tree."""
    leaves = _pytree.tree_leaves(tensors)
    nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [node for node in nodes if node is not None]


def walk(nodes: Iterable[Any], skip: Callable[[Any], Iterable[Any] | None]) -> Iterator[Any]:
    """Yields the graph nodes behind some nodes; goes on where `skip` says, unless it says None."""
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        beyond = skip(node)
        if beyond is None:
            yield node
            beyond = [following for following, _ in node.next_functions]
        waiting += beyond


def _private_rows() -> ValueError:
    return ValueError(
        "expected the loss of public rows in public_step, got one of rows that the private loader "
        "yielded, whose gradient would be neither clipped nor charged. Pass public rows."
    )
