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

import collections
import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import inspect
import itertools
import math
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import dp_accounting
import numpy as np

try:
    import torch
    from opacus.accountants.accountant import IAccountant
    from opacus.data_loader import DPDataLoader
    from opacus.grad_sample import (
        AbstractGradSampleModule,
        GradSampleHooks,
        GradSampleHooksFastGradientClipping,
    )
    from opacus.layers.dp_rnn import DPRNNBase
    from opacus.optimizers import (
        AdaClipDPOptimizer,
        DistributedDPOptimizer,
        DistributedDPOptimizerFastGradientClipping,
        DPOptimizer,
        DPOptimizerFastGradientClipping,
        DPPerLayerOptimizer,
    )
    from opacus.utils import batch_memory_manager
    from opacus.utils.batch_memory_manager import BatchSplittingSampler
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
    from opacus.utils.uniform_sampler import (
        DistributedUniformWithReplacementSampler,
        UniformWithReplacementSampler,
    )
    from torch.utils import _pytree
    from torch.utils.weak import WeakTensorKeyDictionary
except ImportError as error:
    raise ImportError(
        "mirrordp.integrations.opacus needs PyTorch and Opacus 1.6 or newer. Install them: "
        "pip install 'mirrordp[opacus]'."
    ) from error

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Accountant, Adjacency, DpEvent, Epsilon
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.report import RunReport
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Block, FileLedger, Ledger, event_from_dict
from mirrordp.training.bookkeeping import check_spend
from mirrordp.types import AlphaSchedule
from mirrordp.updates import schedules
from mirrordp.updates.public import WarmStart

Loss: TypeAlias = "torch.Tensor | DPTensorFastGradientClipping"

# Optimisers of Opacus whose noise and clip norm are known here; others are refused.
_OPTIMIZERS = (
    DPOptimizer,
    DPPerLayerOptimizer,
    DPOptimizerFastGradientClipping,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
)
_SAVED = "mirrordp"


class _Part(NamedTuple):
    """A Poisson batch as a loader yields it, or a part of one that BatchMemoryManager made.

    Attributes:
        batch: the number of the batch.
        position: the number of the part within the batch, from 0.
        rows: the number of rows that the model should be given.
        is_last: whether the batch ends with this part.
        number: counts what loaders have yielded, from 1.
    """

    batch: int
    position: int
    rows: int
    is_last: bool = True
    number: int = 0


class _Draws:
    """The Poisson batches that were drawn from a loader, and which of them steps have used.

    Two steps on one batch would be charged as two independent samples, which cost less. Hence all
    optimisers over a loader share this object, and no step may use a batch that has been used.

    A step belongs to the batch whose tensors were passed to the model, or else to the batch that
    was yielded last, because most programs move or augment their batches first. Steps follow the
    order of the batches, and what was passed over is gone.
    """

    def __init__(self, rows_if_empty: int) -> None:
        self.batches = self.yielded = 0
        self.largest_rate = 0.0
        self.latest: _Part | None = None
        self.optimizers: weakref.WeakSet[PublicGradientOptimizer] = weakref.WeakSet()
        # Drawn in the pass that begins, but not yet yielded: workers fetch batches in advance.
        self.waiting: collections.deque[_Part] = collections.deque()
        self._rows_if_empty = rows_if_empty
        self._marks = WeakTensorKeyDictionary()
        self._running: tuple[weakref.ref[Any], collections.deque[_Part]] | None = None
        # The last part that a step used, and the last one that had been yielded by that time.
        self._used = self._seen = 0

    def record(self, batches: Iterable[Any], sampler: Any) -> Iterator[Any]:
        """Returns the batches of a sampler, each of which is noted when it is drawn."""
        waiting = self.waiting

        def recorded() -> Iterator[Any]:
            for batch in batches:
                self.batches += 1
                self.largest_rate = max(self.largest_rate, float(sampler.sample_rate))
                waiting.append(_Part(self.batches, 0, len(batch) or self._rows_if_empty))
                yield batch

        return recorded()

    def split(self, sampler: Iterable[Any], max_rows: int) -> Iterator[list[int]]:
        """Returns the parts of a sampler's batches, as Opacus divides them."""
        waiting, batches = self.waiting, iter(sampler)

        def parted() -> Iterator[list[int]]:
            for batch in batches:
                whole = waiting.pop()
                parts = np.array_split(batch, max(1, math.ceil(len(batch) / max_rows)))
                for position, part in enumerate(parts):
                    rows = len(part) or self._rows_if_empty
                    waiting.append(_Part(whole.batch, position, rows, position == len(parts) - 1))
                    yield part.tolist()

        return parted()

    def follow(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begins a pass; returns its batches, whose tensors are marked when they are yielded."""
        for optimizer in self.optimizers:
            optimizer.drop_parts()
        waiting = self.waiting = collections.deque()
        batches = begin()
        # What else iterates over the sampler, and is not followed, must not mix with this pass.
        self.waiting = collections.deque()
        if self._running is not None and self._running[0]() is batches:
            # Persistent workers have left an earlier pass for this one.
            self._running[1].clear()
        self._running = weakref.ref(batches), waiting

        def followed() -> Iterator[Any]:
            for batch in batches:
                if not waiting:
                    raise RuntimeError(
                        "expected one pass over the private loader at a time, got another one "
                        "from the same workers. Complete a pass before you begin the next one."
                    )
                self.yielded += 1
                self.latest = waiting.popleft()._replace(number=self.yielded)
                for leaf in _pytree.tree_leaves(batch):
                    if isinstance(leaf, torch.Tensor):
                        self._marks[leaf] = self.latest
                yield batch

        return followed()

    def marked(self, inputs: Any) -> _Part | None:
        """Returns the part that tensors belong to, if they are just as they were yielded."""
        leaves = _pytree.tree_leaves(inputs)
        found = [self._marks.get(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return max((part for part in found if part), key=lambda part: part.number, default=None)

    def use(self, marked: _Part | None) -> _Part:
        """Notes a step on the part that the model's inputs belong to, or on the latest one.

        Raises:
            RuntimeError: if it has been used, or was passed over.
        """
        part, newest = marked or self.latest, self._used if marked else self._seen
        if part is None or self.latest is None or part.number <= newest:
            raise RuntimeError(
                "expected a step on a batch of its own, got one without a new batch from the "
                "private loader given to with_public_gradient. Iterate over that loader itself "
                "and take one step on each of its batches, in their order, before you fetch the "
                "next one: two steps on one batch cost more than two steps on two."
            )
        self._used, self._seen = part.number, self.latest.number
        return part


def _recording(kind: type) -> type:
    """Returns a class of Opacus' samplers whose objects note their batches in `draws`."""

    class Recording(kind):
        def __iter__(self) -> Iterator[Any]:
            return self.draws.record(super().__iter__(), self)

    return Recording


_RECORDING = {
    kind: _recording(kind)
    for kind in (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
}


class _Splitting(BatchSplittingSampler):
    """BatchMemoryManager's sampler, which tells our optimisers about parts by their `_Part`.

    Opacus keeps a queue of announcements instead, one for each part that was drawn. It shifts when
    the training loop leaves out a part, and outlives the pass.
    """

    sampler: Any

    def __iter__(self) -> Any:
        if not self.is_followed:
            return super().__iter__()
        return self.sampler.draws.split(self.sampler, self.max_batch_size)

    @property
    def is_followed(self) -> bool:
        """Whether an optimiser with public gradients takes the steps."""
        is_recording = type(self.sampler) in _RECORDING.values()
        return is_recording and isinstance(self.optimizer, PublicGradientOptimizer)


class _FollowedLoader(torch.utils.data.DataLoader):
    """A loader that says which batch it yields, to the draws of its sampler."""

    def __iter__(self) -> Any:
        sampler: Any = self.batch_sampler
        if isinstance(sampler, _Splitting):
            if not sampler.is_followed:
                return super().__iter__()
            sampler = sampler.sampler
        return sampler.draws.follow(super().__iter__)


def _follow(loader: torch.utils.data.DataLoader) -> torch.utils.data.DataLoader:
    """Makes a loader say which batch it yields; the object stays the same."""
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, BatchSplittingSampler):
        sampler.__class__ = _Splitting
    if not isinstance(loader, _FollowedLoader):
        kind = type(loader)
        loader.__class__ = type(kind.__name__, (_FollowedLoader, kind), {})
    return loader


@functools.wraps(batch_memory_manager.wrap_data_loader)
def _wrap_data_loader(**options: Any) -> torch.utils.data.DataLoader:
    return _follow(_opacus_wrap_data_loader(**options))


# BatchMemoryManager makes its loader with this function, and offers no other place to learn which
# part the training loop has received. For other optimisers the loader does what it did.
_opacus_wrap_data_loader = batch_memory_manager.wrap_data_loader
batch_memory_manager.wrap_data_loader = _wrap_data_loader


def _draws_of(loader: torch.utils.data.DataLoader) -> tuple[_Draws, int]:
    """Makes a loader say which batch it yields; returns its draws and the number of rows."""
    _validate.instance_of(
        torch.utils.data.DataLoader, "Pass the loader that make_private returned.", loader=loader
    )
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    if type(sampler) in _RECORDING:
        # The object stays the same, since BatchMemoryManager may hold it.
        sampler.__class__ = _RECORDING[type(sampler)]
        sampler.draws = _Draws(int(getattr(loader.collate_fn, "rand_on_empty", False)))
    if type(sampler) not in _RECORDING.values():
        raise ValueError(
            f"expected a loader with Poisson sampling, which epsilon is computed for, got one "
            f"with {type(sampler).__name__}. Use the loader that PrivacyEngine.make_private "
            "returns with poisson_sampling=True, its default."
        )
    _follow(loader)
    rows = getattr(sampler, "total_size", None) or sampler.num_samples
    return sampler.draws, int(rows)


class Charge(NamedTuple):
    """Consecutive steps of one kind that were charged.

    Attributes:
        noise_multiplier: σ, relative to the clip norm.
        sampling_prob: q.
        num_steps: their number.
    """

    noise_multiplier: float
    sampling_prob: float
    num_steps: int

    @property
    def event(self) -> DpEvent:
        """Their cost."""
        return accounting.poisson_event(
            self.noise_multiplier, sampling_prob=self.sampling_prob, num_steps=self.num_steps
        )


# For each accountant of Opacus and each ledger or budget; several optimisers may share both.
_SEEN: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, int]] = (
    weakref.WeakKeyDictionary()
)


class _Books:
    """The charges of one run.

    They are never fewer than the steps in the history of Opacus' accountant: steps that it knows
    of and that were not charged here, such as those of another optimiser of the same engine, are
    charged as its history states them.
    """

    def __init__(
        self,
        spend: Ledger | Budget,
        accountant: IAccountant,
        accountant_rate: float,
        draws: _Draws,
        *,
        is_shared: bool,
    ):
        self.spend, self.draws, self.is_shared = spend, draws, is_shared
        self.name = secrets.token_hex(8)
        self.charges: list[Charge] = []
        self._accountant, self._accountant_rate = accountant, accountant_rate

    @property
    def _seen(self) -> int:
        """How many steps of the accountant's history are in the ledger, whoever charged them."""
        return _SEEN.get(self._accountant, {}).get(self.spend, 0)

    @_seen.setter
    def _seen(self, count: int) -> None:
        of_accountant = _SEEN.setdefault(self._accountant, weakref.WeakKeyDictionary())
        of_accountant[self.spend] = count

    @property
    def charged_steps(self) -> int:
        """The number of charged steps."""
        return sum(charge.num_steps for charge in self.charges)

    @property
    def _file(self) -> FileLedger | None:
        found = self.spend.ledger if isinstance(self.spend, Budget) else self.spend
        return found if isinstance(found, FileLedger) else None

    @property
    def sampling_prob(self) -> float:
        """q: the larger of what is sampled with and what Opacus' accountant is told.

        They differ where 1/q is not a whole number in floating point.
        """
        return max(self.draws.largest_rate, self._accountant_rate)

    def charge_step(self, noise_multiplier: float) -> None:
        """Charges a step, which may be taken once this returns."""
        self.reconcile()
        self._charge(Charge(noise_multiplier, self.sampling_prob, 1))

    def reconcile(self) -> None:
        """Charges what Opacus' accountant knows of and these books do not."""
        history = self._accountant.history
        known, stop = self._seen, 0
        for noise_multiplier, rate, count in list(history):
            start, stop = stop, stop + int(count)
            if stop > known:
                taken = stop - max(start, known)
                self._charge(Charge(float(noise_multiplier), float(rate), taken))
                self._seen = stop
        # The history may also have been replaced by a shorter one.
        self._seen = stop

    def note_accounted(self) -> None:
        """Notes that the accountant was told of the last step."""
        self._seen = sum(int(count) for _, _, count in self._accountant.history)

    def _charge(self, charge: Charge) -> None:
        file = self._file
        start = self.charged_steps if file is None else file.charged_steps(self.name)
        self.spend.charge(charge.event, block=Block(self.name, start, start + charge.num_steps))
        self._keep(charge)

    def _keep(self, charge: Charge) -> None:
        if self.charges and self.charges[-1][:2] == charge[:2]:
            charge = charge._replace(num_steps=charge.num_steps + self.charges.pop().num_steps)
        self.charges.append(charge)

    def saved(self) -> dict[str, Any]:
        """Returns what `restore` needs, as plain types."""
        self.reconcile()
        history = [
            [float(noise), float(rate), int(n)] for noise, rate, n in self._accountant.history
        ]
        charges = [list(charge) for charge in self.charges]
        return {"run": self.name, "charges": charges, "accounted": history}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues a run that was saved; nothing that was charged since is taken back."""
        if saved["run"] == self.name:
            return
        before, here = [Charge(*each) for each in saved["charges"]], self.charges
        count = sum(charge.num_steps for charge in before)
        self.name, self.charges = saved["run"], []
        paid = 0 if self._file is None else self._file.charged_steps(self.name)
        if self._file is not None and paid >= count:
            # The file may also have steps that were taken after the state was saved.
            before = _charges_in(self._file, self.name)
        unpaid = count - paid
        for charge in reversed(before):
            if unpaid > 0:
                taken = min(charge.num_steps, unpaid)
                unpaid -= taken
                self._charge(charge._replace(num_steps=taken))
        self.charges = []
        for charge in (*before, *here):
            self._keep(charge)
        # The ledger now also has the steps that the accountant knew of when the state was saved.
        # A history that does not begin with them has other steps, which are charged.
        accounted = [Charge(*each) for each in saved.get("accounted", [])]
        if _begins_with([Charge(*each) for each in self._accountant.history], accounted):
            self._seen = max(self._seen, sum(charge.num_steps for charge in accounted))

    @property
    def varies(self) -> bool:
        """Whether not all steps were alike."""
        return len({charge[:2] for charge in self.charges}) > 1

    @property
    def accountant(self) -> Accountant | None:
        """RDP for steps that were not alike, where PLD would take seconds for each kind of step."""
        has_rdp = self.spend.adjacency is not Adjacency.REPLACE
        return Accountant.RDP if self.varies and has_rdp else None

    def ledger_of_run(self, stop: int | None = None) -> Ledger:
        """Returns a ledger of this run alone, or of its first `stop` charges."""
        found = Ledger(self.spend.adjacency)
        for charge in self.charges[:stop]:
            found.charge(charge.event)
        return found


def _charges_in(file: FileLedger, run: str) -> list[Charge]:
    """Returns what a file says was charged for a run."""
    found = []
    for record in file.records:
        if record["kind"] == "charge" and record.get("run") == run:
            event = cast(dp_accounting.SelfComposedDpEvent, event_from_dict(record["event"]))
            step: Any = event.event
            rate = 1.0
            if isinstance(step, dp_accounting.PoissonSampledDpEvent):
                rate, step = step.sampling_probability, step.event
            found.append(Charge(step.noise_multiplier, rate, event.count))
    return found


def _begins_with(history: Sequence[Charge], start: Sequence[Charge]) -> bool:
    """Returns whether the first steps of a history are those of another one."""
    steps = itertools.chain.from_iterable([step[:2]] * int(step.num_steps) for step in history)
    wanted = itertools.chain.from_iterable([step[:2]] * int(step.num_steps) for step in start)
    return all(step == next(steps, None) for step in wanted)


def _worst(charges: Sequence[Charge]) -> tuple[float, float]:
    """Returns the least noise multiplier and the largest sampling rate."""
    return min(c.noise_multiplier for c in charges), max(c.sampling_prob for c in charges)


class _Clipped(NamedTuple):
    """What a backward pass of ghost clipping left in `p.grad`; good for one step.

    Attributes:
        rows: the number of rows that were clipped.
        clip_norm: the norm that they were clipped to.
        grads: the gradients, and how often each had been changed by then.
    """

    rows: int
    clip_norm: float
    grads: list[tuple[torch.Tensor | None, int]]


class _Layer(NamedTuple):
    """A call of a layer in the graph of a loss: the part whose gradient Opacus' hooks see.

    Attributes:
        inputs: the graph nodes where the part ends.
        owned: the ids of the layer's parameters.
    """

    inputs: set[Any]
    owned: set[int]


def _nodes(tensors: Any) -> list[Any]:
    """Returns the graph nodes of the tensors in a tree."""
    leaves = _pytree.tree_leaves(tensors)
    nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [node for node in nodes if node is not None]


def _walk(nodes: Iterable[Any], skip: Callable[[Any], Iterable[Any] | None]) -> Iterator[Any]:
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


@dataclasses.dataclass
class _Mixing:
    """The state of a `PublicGradientOptimizer`.

    Attributes:
        hooks: Opacus' hooks on the module.
        alphas: α_t for each step number.
        scale_noise: whether α multiplies the noise.
        noisy_clip_norm: the norm to which the released gradient is clipped, or None.
        num_steps: the number of steps of the run, or None if it has no end.
        num_examples: n.
        books: what was charged.
        step: the number of steps taken, virtual ones not counted.
        public_grad: the public gradient of the next step, one tensor per parameter, or None.
        marked: the part that the inputs of the last private forward pass belong to, if known.
        accumulated: the last part in the sum of the next step's batch, or None.
        is_split: whether a part of the next step's batch was accumulated since `public_step`.
        clip_norm: the largest clip norm of the parts of the next step's batch.
        may_step: whether the optimiser under Opacus' may be stepped, which is so after the noise.
        forwards: for each forward pass of the module that Opacus keeps activations of, the graph
            nodes of its output.
        kept: the number of activations that Opacus kept after the last of them.
        trained: the parameters that Opacus clips the gradients of.
        clipped: with ghost clipping, what the last backward pass left; None once it is used.
        layers: with ghost clipping, the calls of layers by the graph nodes of their outputs.
    """

    hooks: GradSampleHooks
    alphas: Callable[[int], np.float32]
    scale_noise: bool
    noisy_clip_norm: float | None
    num_steps: int | None
    num_examples: int
    books: _Books
    step: int = 0
    public_grad: list[torch.Tensor | None] | None = None
    marked: _Part | None = None
    accumulated: _Part | None = None
    is_split: bool = False
    clip_norm: float = 0.0
    may_step: bool = False
    forwards: list[list[Any]] = dataclasses.field(default_factory=list)
    kept: int = 0
    trained: list[torch.nn.Parameter] = dataclasses.field(default_factory=list)
    clipped: _Clipped | None = None
    layers: dict[Any, _Layer] = dataclasses.field(default_factory=dict)

    @property
    def module(self) -> torch.nn.Module:
        """The module that the hooks are on."""
        return cast(torch.nn.Module, self.hooks._module)

    @property
    def num_activations(self) -> int:
        """How many activations Opacus keeps for backward passes to come."""
        return sum(len(getattr(module, "activations", ())) for module in self.module.modules())

    def is_private(self, module: torch.nn.Module) -> bool:
        """Whether Opacus' hooks note a forward pass of a module."""
        return self.hooks.hooks_enabled and module.training and torch.is_grad_enabled()

    def before_forward(self, module: torch.nn.Module, inputs: Any, options: Any) -> None:
        """Forgets forward passes that backward passes have followed; a hook of the module."""
        if self.num_activations == 0:
            self.forwards.clear()
            self.layers.clear()
        if self.is_private(module):
            self.marked = self.books.draws.marked((inputs, options))

    def after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Notes a forward pass in which Opacus kept activations; a hook of the module."""
        del inputs
        if self.is_private(module):
            self.forwards.append(_nodes(output))
            self.kept = self.num_activations

    def after_layer(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Notes the call of a layer that ghost clipping takes norms of; a hook of the layer."""
        if self.is_private(layer):
            call = _Layer(set(_nodes(inputs)), {id(param) for param in layer.parameters()})
            self.layers.update(dict.fromkeys(_nodes(output), call))

    def name_of(self, param: torch.Tensor) -> str:
        """Returns the name of a parameter."""
        named = self.module.named_parameters()
        return next((name for name, each in named if each is param), "unknown")

    def check_graph(self, losses: torch.Tensor) -> None:
        """Raises if a loss depends on parameters by a way that Opacus' hooks do not see.

        Ghost clipping takes norms from the hooks, and the sum from automatic differentiation.
        """
        calls: list[tuple[Any, _Layer]] = []

        def beyond(node: Any) -> Iterable[Any] | None:
            call = self.layers.get(node)
            if call is None:
                return None
            calls.append((node, call))
            return [following for each in call.inputs for following, _ in each.next_functions]

        trained = {id(param) for param in self.trained}
        for node in _walk(_nodes(losses), beyond):
            self._refuse_param(node, trained)
        for first, call in calls:
            inside = _walk([first], lambda node, call=call: () if node in call.inputs else None)
            for node in inside:
                self._refuse_param(node, trained - call.owned)

    def _refuse_param(self, node: Any, refused: set[int]) -> None:
        param = getattr(node, "variable", None)
        if param is not None and id(param) in refused:
            raise ValueError(
                f"expected a loss that depends on the parameter {self.name_of(param)} only by the "
                "layer that owns it, got one that uses it elsewhere too, such as in a penalty "
                "that was added to the loss. Ghost clipping does not clip that part. Use the "
                "optimiser's weight_decay instead of a penalty, or grad_sample_mode='hooks'."
            )

    def forget_activations(self) -> None:
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
        self.forwards.clear()
        self.layers.clear()
        self.kept = 0

    def next_step(self) -> None:
        """Notes that a step was taken."""
        self.step += 1
        self.public_grad, self.accumulated, self.is_split, self.clip_norm = None, None, False, 0.0
        self.forwards.clear()


class PublicGradientOptimizer(DPOptimizer):
    """An optimiser of Opacus that mixes in public gradients; made by `with_public_gradient`.

    It is the optimiser that Opacus returned, with its class changed, so that `BatchMemoryManager`,
    schedulers and ghost clipping's criterion, which hold that object, go on working.
    """

    _mixing: _Mixing

    @property
    def alpha(self) -> float:
        """α of the next step."""
        return float(self._alpha())

    @property
    def charged_steps(self) -> int:
        """The number of charged steps, including those of before a resume."""
        return self._mixing.books.charged_steps

    @property
    def spend(self) -> Ledger | Budget:
        """The ledger or budget that steps are charged to."""
        return self._mixing.books.spend

    @contextlib.contextmanager
    def public_pass(self) -> Iterator[None]:
        """Turns Opacus' hooks off, so that nothing inside is taken for private gradients."""
        hooks = self._mixing.hooks
        before = hooks.hooks_enabled
        hooks.hooks_enabled = False
        try:
            yield
        finally:
            hooks.hooks_enabled = before

    def public_step(self, loss: "Loss | Callable[[], Loss]") -> torch.Tensor | None:
        """Takes the gradient of a public loss, which the next `step()` mixes in.

        `p.grad` and `p.grad_sample` stay as they are, so it may be called before or after the
        private backward pass.

        A function is the better form. It is called with Opacus' hooks off, once for each step that
        has α < 1 and not at all for other steps. When `BatchMemoryManager` splits a batch, it is
        called for the first part only. How many parts there are depends on the private batch, so
        the function should also fetch the public rows: otherwise the parts would decide which rows
        are used. A tensor must come from a forward pass in `public_pass()`, or from one of the
        whole module while no private forward pass waits for its backward pass.

        Args:
            loss: the mean loss on public rows, or a function that returns it. Do not call
                `backward()` on it.

        Returns:
            The loss without its graph; None if the function was not called.
        """
        mixing = self._mixing
        given = not callable(loss) or isinstance(loss, torch.Tensor)
        if mixing.public_grad is not None:
            if not given and mixing.is_split:
                return None
            raise RuntimeError(
                "expected one public_step before each step, got a second one. To use more public "
                "rows, average their losses; with BatchMemoryManager, pass a function that fetches "
                "its rows, which is called once for each whole batch."
            )
        if not given and self._alpha() == 1:
            return None
        if given and mixing.num_activations > 0:
            self._disown(_mean(loss))
        with self.public_pass(), torch.enable_grad():
            found = _mean(loss if given else cast(Callable[[], Loss], loss)())
            mixing.public_grad = self._gradient(found)
        return found.detach()

    def _disown(self, loss: torch.Tensor) -> None:
        """Takes the activations of a public forward pass away from Opacus, if it kept any."""
        mixing = self._mixing
        reached = [_reaches(loss, nodes) for nodes in mixing.forwards]
        # Parts of the module may have been called by themselves, and outputs may be opaque.
        is_known = mixing.num_activations <= mixing.kept and all(mixing.forwards)
        if is_known and not any(reached):
            return
        mixing.forget_activations()
        if not (is_known and all(reached)):
            raise RuntimeError(
                "expected a public loss from a forward pass without Opacus' hooks, got one whose "
                "activations cannot be told from private ones. Pass a function, "
                "public_step(lambda: criterion(model(x), y)), or compute the loss inside "
                "'with optimizer.public_pass():'; repeat the private forward pass."
            )

    def _gradient(self, loss: torch.Tensor) -> list[torch.Tensor | None]:
        devices = {param.device for param in self.params}
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
            found = torch.autograd.grad(loss, self.params, allow_unused=True)
        if all(grad is None for grad in found):
            raise ValueError(
                "expected a public loss that depends on the parameters of the optimiser, got one "
                "that depends on none of them. Compute it with the model that make_private "
                "returned."
            )
        return [None if grad is None else grad.detach() for grad in found]

    def _alpha(self) -> np.float32:
        step, end = self._mixing.step, self._mixing.num_steps
        if end is not None and step >= end:
            raise RuntimeError(
                f"expected at most {end} steps, for which with_public_gradient was called, got "
                "one more. Pass a larger num_steps."
            )
        return self._mixing.alphas(step)

    def signal_skip_step(self, do_skip: bool = True) -> NoReturn:
        """Refuses to accumulate batches; the loader of BatchMemoryManager announces its parts."""
        raise RuntimeError(
            f"expected no signal_skip_step, got signal_skip_step({do_skip}): a record may appear "
            "more than once in several batches. To accumulate the parts of one batch, iterate over "
            "the loader of opacus.utils.batch_memory_manager.BatchMemoryManager, which was made "
            "after mirrordp.integrations.opacus was imported."
        )

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        """Returns whether the batch of this step has further parts; read by Opacus' `pre_step`."""
        del pop_next
        part = self._mixing.marked or self._mixing.books.draws.latest
        return part is not None and not part.is_last

    def drop_parts(self) -> None:
        """Forgets the accumulated parts of a batch that will not be completed."""
        mixing = self._mixing
        if mixing.is_split:
            mixing.public_grad = None
        mixing.accumulated, mixing.is_split, mixing.clip_norm = None, False, 0.0
        self._is_last_step_skipped = False
        for param in self.params:
            param.summed_grad = None  # pyright: ignore[reportAttributeAccessIssue]

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Does what Opacus does before the optimiser under it steps, and mixes the gradients."""
        del closure
        mixing, alpha = self._mixing, self._alpha()
        is_part = self._check_skip_next_step()
        if alpha < 1 and mixing.public_grad is None and not is_part:
            raise RuntimeError(
                f"expected a public gradient for step {mixing.step}, where alpha is {alpha:.4g}, "
                "got none. Call optimizer.public_step(...) before optimizer.step()."
            )
        if alpha == 0:
            self._discard(is_part)
        else:
            self._check_part()
            if not super().pre_step():
                mixing.is_split = True
                return False
            mixing.books.note_accounted()
            if mixing.noisy_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.params, mixing.noisy_clip_norm)
        if is_part:
            mixing.is_split = True
            return False
        if alpha < 1:
            self._mix(float(alpha), float(np.float32(1) - alpha))
        mixing.next_step()
        mixing.may_step = True
        return True

    def _discard(self, is_part: bool) -> None:
        """Drops the private gradient of a batch or of a part of one."""
        self._is_last_step_skipped = is_part
        for param in self.params:
            param.grad_sample = param.summed_grad = None  # pyright: ignore
            param.grad = torch.zeros_like(param)

    def _check_part(self) -> None:
        """Refuses what one clip norm does not bound, and notes the clip norm of a part."""
        mixing = self._mixing
        self._check_trained()
        self._check_present()
        if self.accumulated_iterations != 1:
            raise RuntimeError(
                "expected one Poisson batch for each step, got several accumulated ones, in which "
                "a record may appear more than once. Use a larger batch with BatchMemoryManager."
            )
        if hasattr(self, "_adjusted_noise_multiplier"):
            _refuse_adaptive_clipping()
        part, before = mixing.books.draws.use(mixing.marked), mixing.accumulated
        self._check_order(part, before)
        self._check_rows(part)
        if mixing.clipped is not None:
            self._check_clipped(mixing.clipped)
        mixing.accumulated = part
        mixing.clip_norm = max(mixing.clip_norm, self._clip_norm())
        mixing.clipped = None

    @property
    def _is_ghost(self) -> bool:
        return isinstance(self, DPOptimizerFastGradientClipping)

    def _names(self, params: Iterable[torch.Tensor]) -> str:
        return ", ".join(self._mixing.name_of(param) for param in params)

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Checks before Opacus' hooks fail on a parameter that is new to them; a hook."""
        del inputs
        if self._mixing.is_private(module):
            self._check_trained()

    def _check_trained(self) -> None:
        """Refuses parameters whose gradients Opacus does not clip."""
        trained = {id(param) for param in self._mixing.trained}
        added = [param for param in self.params if id(param) not in trained]
        if added:
            raise RuntimeError(
                "expected the parameters that were trainable when the model was made private, got "
                f"others besides: {self._names(added)}. Opacus does not clip their gradients. "
                "Set requires_grad before make_private, and call make_private anew to unfreeze."
            )
        if self._is_ghost and len(self.params) < len(trained):
            raise RuntimeError(
                "expected all parameters that were trainable when the model was made private, got "
                f"{len(self.params)} of {len(trained)}. Ghost clipping takes norms over all of "
                "them. Call make_private anew after you freeze parameters."
            )

    def _check_present(self) -> None:
        """Refuses a step without the gradients of a backward pass."""
        if self._is_ghost:
            if self._mixing.clipped is None:
                raise RuntimeError(
                    "expected a backward pass with ghost clipping before each step and each part, "
                    "got none since the last one. Compute the loss with the criterion that "
                    "make_private returned, call backward() on it, and then step() once: other "
                    "losses are not clipped."
                )
            return
        missing = [param for param in self.params if getattr(param, "grad_sample", None) is None]
        if missing:
            raise RuntimeError(
                "expected the gradients of each row for all parameters, got none for "
                f"{self._names(missing)}. Call backward() before each step on a loss that depends "
                "on all of them; freeze parameters that the model does not use before make_private."
            )

    def clipped_backward(self, loss: DPTensorFastGradientClipping) -> None:
        """Takes Opacus' two passes of ghost clipping, and checks that they clip what they should.

        The first pass finds the norm of each row's gradient, from which Opacus computes a
        coefficient c_i for each row. The second pass adds up c_i ∇ℓ_i into `p.grad`.
        """
        mixing, losses = self._mixing, loss.loss_per_sample
        hooks = cast(GradSampleHooksFastGradientClipping, mixing.hooks)
        mixing.clipped = None
        self._check_trained()
        if loss.module is not hooks or not hooks.hooks_enabled:
            raise RuntimeError(
                "expected a private loss of the module that was given to with_public_gradient, "
                "got one of another module or one inside public_pass(). Use the module and the "
                "criterion of the same make_private call."
            )
        try:
            _check_one_per_row(losses, None)
            mixing.check_graph(losses)
            for param in self.params:
                param._norm_sample = None  # pyright: ignore[reportAttributeAccessIssue]
            reduce = torch.mean if loss.loss_reduction == "mean" else torch.sum
            reduce(losses, dim=0).backward(retain_graph=True)
            self.zero_grad()
            unknown = [p for p in self.params if p._norm_sample is None]  # pyright: ignore
            if unknown:
                raise RuntimeError(
                    "expected a loss that depends on all trainable parameters by forward passes "
                    f"in training mode, got one that does not on {self._names(unknown)}. Freeze "
                    "parameters that the model does not use before make_private."
                )
            coefficients = hooks.get_clipping_coef().to(losses.device)
            _check_one_per_row(losses, len(coefficients))
            hooks.disable_hooks()
            torch.sum(coefficients * losses).backward()
        except BaseException:
            mixing.forget_activations()
            raise
        finally:
            hooks.enable_hooks()
        mixing.layers.clear()
        grads = [(param.grad, _version(param.grad)) for param in self.params]
        mixing.clipped = _Clipped(len(losses), float(hooks.max_grad_norm), grads)

    def _check_clipped(self, clipped: _Clipped) -> None:
        """Refuses gradients that are not those which ghost clipping left."""
        found = [(param.grad, _version(param.grad)) for param in self.params]
        same = zip(found, clipped.grads, strict=True)
        if any(new[0] is not old[0] or new[1] != old[1] for new, old in same):
            self.drop_parts()
            raise RuntimeError(
                "expected the gradients that ghost clipping computed, got others. Between "
                "backward() and step(), leave p.grad as it is, and call no backward() of another "
                "loss: its gradient would not be clipped."
            )
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(grad.float()) for grad, _ in found])  # pyright: ignore
        )
        bound = clipped.rows * clipped.clip_norm
        # Half precision and TF32 compute the norms of rows to less than three digits.
        if norm > bound * 1.01:
            self.drop_parts()
            raise RuntimeError(
                f"expected a sum of {clipped.rows} rows of norm {clipped.clip_norm:.4g} at most, "
                f"got one of norm {float(norm):.4g}. Ghost clipping does not clip this model; use "
                "grad_sample_mode='hooks'."
            )

    def _check_order(self, part: _Part, before: _Part | None) -> None:
        """Refuses a sum that would hold parts of two batches, or lack a part of one."""
        expected = (part.batch, 0) if before is None else (before.batch, before.position + 1)
        if (part.batch, part.position) == expected:
            return
        self.drop_parts()
        raise RuntimeError(
            f"expected a step on part {expected[1]} of Poisson batch {expected[0]}, got one on "
            f"part {part.position} of batch {part.batch}. Take a step on every part that "
            "BatchMemoryManager yields, also after an error: a sum of parts of two batches may "
            "have a record twice. The accumulated parts have been dropped. Go on with the next "
            "batch or begin the next pass."
        )

    def _check_rows(self, part: _Part) -> None:
        """Refuses a part whose records do not have one row each, which are clipped one by one."""
        found = self._num_rows()
        if found == part.rows:
            return
        self.drop_parts()
        raise RuntimeError(
            f"expected gradients of the {part.rows} rows that the loader yielded, got those of "
            f"{found} rows. Pass each record of the batch to the model in one row: rows are "
            "clipped one by one, so a record with several rows has more influence than is "
            "accounted for. Fetch the next batch only after the step."
        )

    def _num_rows(self) -> int:
        """Returns the number of rows that were clipped."""
        clipped = self._mixing.clipped
        return len(cast(Any, self.params[0]).grad_sample) if clipped is None else clipped.rows

    def _clip_norm(self) -> float:
        """Returns the largest norm that one record can have in the sum."""
        if self._mixing.clipped is not None:
            return self._mixing.clipped.clip_norm
        if isinstance(self, DPPerLayerOptimizer):
            return torch.norm(torch.Tensor(self.max_grad_norms), p=2).item()
        return float(self.max_grad_norm)

    def add_noise(self) -> None:
        """Charges the step, and then adds Opacus' noise to the sum."""
        mixing, alpha = self._mixing, self._alpha()
        # The noise is a multiple of the optimiser's clip norm. The sum was clipped by the module
        # (ghost clipping), by a list of norms, or by what the norm was before a scheduler set it.
        stddev = float(self.noise_multiplier) * float(self.max_grad_norm)
        clip_norm = mixing.clip_norm or self._clip_norm()
        real = stddev / clip_norm if clip_norm != self.max_grad_norm else math.inf
        mixing.books.charge_step(min(float(self.noise_multiplier), real))
        if not mixing.scale_noise and alpha < 1:
            for param in self.params:
                param.summed_grad *= float(alpha)  # pyright: ignore
        super().add_noise()

    def _mix(self, alpha: float, rest: float) -> None:
        mixing = self._mixing
        assert mixing.public_grad is not None
        if self.loss_reduction == "sum":
            # Opacus then adds up the gradients of all processes, where it otherwise averages them.
            rest /= getattr(self, "world_size", 1)
        with torch.no_grad():
            for param, public in zip(self.params, mixing.public_grad, strict=True):
                assert param.grad is not None
                grad = alpha * param.grad if mixing.scale_noise else param.grad
                if public is not None:
                    grad = grad + rest * public.to(param.dtype)
                param.grad = grad

    def _guard(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Refuses a step of the optimiser under Opacus' that did not go through Opacus."""
        del optimizer, args, kwargs
        if not self._mixing.may_step:
            raise RuntimeError(
                "expected a step of the optimiser that with_public_gradient returned, got one of "
                "the optimiser under it, which adds no noise. Call optimizer.step()."
            )
        self._mixing.may_step = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimiser, the step number and what was charged."""
        saved = {"step": self._mixing.step, **self._mixing.books.saved()}
        return {**super().state_dict(), _SAVED: saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`.

        Charges that the ledger does not hold are charged to it. With a `FileLedger` or a `Budget`
        it also holds the steps that were taken after the state was saved, before a crash; these
        stay charged.
        """
        state = dict(state_dict)
        saved = state.pop(_SAVED, None)
        super().load_state_dict(state)
        if saved is not None:
            self._mixing.books.restore(saved)
            self._mixing.step = int(saved["step"])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimiser with public gradients cannot be copied, since the copy would charge a "
            "ledger of its own. Use state_dict()."
        )

    def spent(self, delta: float) -> Epsilon:
        """Returns ε at δ of all steps of this run so far."""
        books = self._mixing.books
        books.reconcile()
        return books.ledger_of_run().epsilon(delta, accountant=books.accountant)

    def report(self, delta: float, **options: Any) -> RunReport:
        """Returns the privacy report of the run so far.

        If the noise or the sampling rate changed during the run, ε is that of the steps as they
        were charged, and the report states the least noise and the largest rate.

        Args:
            delta: δ in (0, 1).
            **options: `title`, `results`, `seeded` and other arguments of `RunReport.of`. State
                `seeded=False` if neither PyTorch nor the noise generator was given a seed.
        """
        books = self._mixing.books
        books.reconcile()
        charges = books.charges
        options = {"title": "A model trained with Opacus and mirrordp"} | options
        if self.secure_mode:
            options = {"seeded": False} | options
        if isinstance(books.spend, Budget) or (books.is_shared and not books.varies):
            options["spend"] = books.spend
        made = RunReport.of(
            _mechanism(self, self._mixing, charges),
            delta,
            charged_steps=self.charged_steps,
            **options,
        )
        theirs = {name: importlib.metadata.version(name) for name in ("torch", "opacus")}
        made = dataclasses.replace(made, versions={**made.versions, **theirs})
        return self._with_charges(made, options.get("scope")) if books.varies else made

    def _with_charges(self, made: RunReport, scope: str | None) -> RunReport:
        """Returns a report whose ε is that of steps that were not all alike."""
        books = self._mixing.books
        spend = books.spend
        shared = books.is_shared and not isinstance(spend, Budget)
        ledger = spend if isinstance(spend, Ledger) and shared else books.ledger_of_run()
        found = ledger.epsilon(made.delta, accountant=books.accountant)
        noises = [charge.noise_multiplier for charge in books.charges]
        covered = "everything charged to the ledger" if shared else "this run"
        covered += f", with noise multipliers from {min(noises):.4g} to {max(noises):.4g}"
        # A schedule may change the noise at every step, and a figure needs a few points.
        stops = {math.ceil(len(books.charges) * i / 8) for i in range(1, 9)}
        over_steps = tuple(
            (
                sum(charge.num_steps for charge in books.charges[:stop]),
                books.ledger_of_run(stop).epsilon(made.delta, accountant=books.accountant).epsilon,
            )
            for stop in sorted(stops)
        )
        position = spend.position._asdict() if isinstance(spend, FileLedger) else made.ledger
        return dataclasses.replace(
            made,
            epsilon=found.epsilon,
            accountant=found.accountant.value,
            accountant_method=found.method,
            scope=scope or covered,
            epsilon_over_steps=over_steps,
            ledger=position,
        )


def _mechanism(optimizer: DPOptimizer, mixing: _Mixing, charges: Sequence[Charge]) -> Mechanism:
    """Returns a mechanism that costs at least as much as the charges, or as the next step."""
    now = Charge(float(optimizer.noise_multiplier), mixing.books.sampling_prob, 1)
    noise_multiplier, sampling_prob = _worst(charges or [now])
    divisor = 1.0
    if optimizer.loss_reduction == "mean":
        divisor = float(optimizer.expected_batch_size or 1) * getattr(optimizer, "world_size", 1)
    return Mechanism(
        sampling=PoissonSampling(
            sampling_prob=sampling_prob,
            expected_batch_size=divisor,
            num_examples=mixing.num_examples,
        ),
        l2_clip_norm=float(optimizer.max_grad_norm),
        noise_multiplier=noise_multiplier,
        num_steps=max(sum(charge.num_steps for charge in charges), 1),
        adjacency=mixing.books.spend.adjacency,
        accountant=mixing.books.accountant,
    )


def _mean(loss: Any) -> torch.Tensor:
    """Returns a loss as a tensor; ghost clipping's criterion returns one loss for each row."""
    if isinstance(loss, DPTensorFastGradientClipping):
        return torch.mean(loss.loss_per_sample)
    _validate.instance_of(
        torch.Tensor, "Return the loss of the public batch from the function.", loss=loss
    )
    return loss


def _reaches(loss: torch.Tensor, nodes: Sequence[Any]) -> bool:
    """Returns whether the graph of a loss has one of the nodes."""
    found = _walk([loss.grad_fn], lambda node: None)
    return any(node is other for node in found for other in nodes)


def _version(tensor: torch.Tensor | None) -> int:
    """Returns how often a tensor was changed in place."""
    return -1 if tensor is None else tensor._version


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


def _clipped_backward(self: DPTensorFastGradientClipping) -> None:
    if isinstance(self.optimizer, PublicGradientOptimizer):
        self.optimizer.clipped_backward(self)
    else:
        _opacus_backward(self)


# Ghost clipping's criterion makes these losses by itself, so their class is the only place to see
# what was clipped. Losses of other optimisers do what they did.
_opacus_backward = DPTensorFastGradientClipping.backward
DPTensorFastGradientClipping.backward = _clipped_backward


def _refuse_adaptive_clipping() -> NoReturn:
    raise ValueError(
        "expected an optimiser with a fixed clip norm, got adaptive clipping, which divides by the "
        "exact size of the private batch and so releases more than is accounted for. Use "
        "clipping='flat'."
    )


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
    if isinstance(optimizer, AdaClipDPOptimizer):
        _refuse_adaptive_clipping()
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
        if not isinstance(module, DPRNNBase)  # its parts own its parameters too
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
    draws, num_examples = _draws_of(loader)
    books = _Books(
        spend or Ledger(Adjacency.ZERO_OUT), accountant, rate, draws, is_shared=spend is not None
    )
    mixing = _Mixing(
        module, alphas, scale_noise, noisy_clip_norm, num_steps, num_examples, books,
        trained=list(optimizer.params),
    )  # fmt: skip
    kind = type(optimizer)
    mixed = type(f"PublicGradient{kind.__name__}", (PublicGradientOptimizer, kind), {})
    if isinstance(spend, Budget):
        _admit(spend, optimizer, mixing)
    optimizer.__class__ = mixed
    found = cast(PublicGradientOptimizer, optimizer)
    found._mixing = mixing
    draws.optimizers.add(found)
    mixing.module.register_forward_pre_hook(mixing.before_forward, with_kwargs=True)
    mixing.module.register_forward_pre_hook(found._before_forward)
    mixing.module.register_forward_hook(mixing.after_forward)
    if isinstance(module, GradSampleHooksFastGradientClipping):
        for layer in module.iterate_submodules(mixing.module):
            # The hooks of a recurrent layer are on its parts, which own its parameters too.
            if not isinstance(layer, DPRNNBase):
                layer.register_forward_hook(mixing.after_layer)
    optimizer.original_optimizer.register_step_pre_hook(found._guard)
    return found


def _alphas(schedule: AlphaSchedule, num_steps: int | None) -> Callable[[int], np.float32]:
    if num_steps is not None:
        _validate.positive_integer(num_steps=num_steps)
        return schedules.evaluate(schedule, num_steps).__getitem__

    @functools.lru_cache(maxsize=1)
    def alpha_of(step: int) -> np.float32:
        return schedules.evaluate(lambda offset: schedule(step + offset), 1)[0]

    return alpha_of


def _admit(budget: Budget, optimizer: DPOptimizer, mixing: _Mixing) -> None:
    """Raises unless a budget has room for the whole run."""
    if mixing.num_steps is None:
        raise ValueError(
            "expected the number of steps with a budget, which admits a run as a whole, got "
            "num_steps=None. Pass num_steps=epochs * len(loader)."
        )
    budget.require_data()
    charged = sum(mixing.alphas(step) > 0 for step in range(mixing.num_steps))
    mechanism = _mechanism(optimizer, mixing, [])
    mechanism = dataclasses.replace(mechanism, num_steps=max(int(charged), 1))
    budget.admit(mechanism, num_steps=int(charged))


def public_batches(loader: torch.utils.data.DataLoader) -> Iterator[Any]:
    """Yields the batches of a public loader without end, shuffled anew in each pass.

    Raises:
        ValueError: for a loader with Poisson sampling, which is a private one.
    """
    _require_public_loader(loader)
    return _endless(loader)


def _endless(loader: torch.utils.data.DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _require_public_loader(loader: Any) -> None:
    _validate.instance_of(torch.utils.data.DataLoader, loader=loader)
    if isinstance(loader, DPDataLoader):
        raise ValueError(
            "expected a loader of public rows, got the private loader of make_private. Make a "
            "DataLoader of public rows."
        )


def warm_start(
    module: torch.nn.Module,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    public: torch.utils.data.DataLoader,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    holdout_fraction: float = 0.2,
    holdout: torch.utils.data.DataLoader | None = None,
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
    _require_public_loader(public)
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
            best, best_loss, best_epoch = (
                copy.deepcopy(module.state_dict()),
                holdout_losses[-1],
                number,
            )
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
    return WarmStart(
        best, converged, number + 1, np.asarray(train_losses), np.asarray(holdout_losses)
    )


def _split(
    public: torch.utils.data.DataLoader,
    holdout: torch.utils.data.DataLoader | None,
    holdout_fraction: float,
    generator: torch.Generator,
) -> tuple[torch.utils.data.DataLoader, ...]:
    """Returns loaders of the rows to learn from, of those that judge, and of both together."""
    rows = len(public.dataset)  # pyright: ignore[reportArgumentType]
    if holdout is None and rows < 2:
        raise ValueError("warm_start needs at least 2 public rows: one to learn and one to judge.")
    data, judges = public.dataset, holdout
    options = {
        "batch_size": public.batch_size or 32,
        "collate_fn": public.collate_fn,
        "num_workers": public.num_workers,
    }
    if judges is None:
        count = min(max(1, round(holdout_fraction * rows)), rows - 1)
        order = torch.randperm(rows, generator=generator).tolist()
        held = torch.utils.data.Subset(public.dataset, order[:count])
        data = torch.utils.data.Subset(public.dataset, order[count:])
        judges = torch.utils.data.DataLoader(held, **options)
        both = public.dataset
    else:
        _require_public_loader(judges)
        both = torch.utils.data.ConcatDataset([public.dataset, judges.dataset])
    shuffled = {"shuffle": True, "generator": generator, **options}
    train = torch.utils.data.DataLoader(data, **shuffled)
    return train, judges, torch.utils.data.DataLoader(both, **shuffled)


def _learn(
    module: torch.nn.Module,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    descent: torch.optim.Optimizer,
    rows: torch.utils.data.DataLoader,
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
    judges: torch.utils.data.DataLoader,
) -> float:
    """Returns the mean loss on held-out rows, without dropout."""
    module.eval()
    losses, sizes = [], []
    for batch in judges:
        losses.append(float(loss_fn(module, batch)))
        sizes.append(_num_rows(batch))
    return float(np.average(losses, weights=sizes))


def _num_rows(batch: Any) -> int:
    leaves = _pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def _warn_not_converged(best_loss: float, num_epochs: int, patience: int) -> None:
    if not math.isfinite(best_loss):
        warn(
            f"the warm start did not converge: the held-out loss was not finite after any of "
            f"{num_epochs} passes over the public rows, and the parameters are those that you "
            "gave. Use a smaller learning rate, or look for the NaN in the loss function.",
            RuntimeWarning,
        )
        return
    warn(
        f"the warm start did not converge: after {num_epochs} passes over the public rows the "
        f"held-out loss still improves (it is {best_loss:.4g}; {patience} passes without "
        "improvement end the warm start). Use an optimizer with a larger learning rate (the "
        "default is Adam with 1e-3), or more passes (max_epochs).",
        RuntimeWarning,
    )
