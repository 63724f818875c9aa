# pyright: reportMissingImports=false
"""Which Poisson batch a step belongs to.

A private loader comes in and goes on yielding what it did. Each batch is numbered when its sampler
draws it, and its tensors are remembered when the loader yields it, so that a forward pass can tell
whose rows it was given. `Draws.use` then allows one step for each batch.
"""

import collections
import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus.utils import batch_memory_manager
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from mirrordp import _validate


class Part(NamedTuple):
    """A Poisson batch as a loader yields it, or a part of one that BatchMemoryManager made."""

    batch: int  # the number of the batch
    position: int  # the number of the part within the batch, from 0
    rows: int  # the number of rows that the model should be given
    is_last: bool  # whether the batch ends with this part
    number: int = 0  # counts what loaders have yielded, from 1


# What has been yielded before the first batch; no step may use it.
NOTHING = Part(0, 0, 0, True)
# The draws of every tensor that a private loader has yielded.
_OWNERS = WeakTensorKeyDictionary()
# The data sets of private and of public loaders, by id.
_DATA: dict[bool, weakref.WeakValueDictionary[int, Any]] = {
    is_private: weakref.WeakValueDictionary() for is_private in (True, False)
}
# The largest probability of a local batch without rows that a distributed sampler may have.
_LARGEST_GAP = 1e-8


def check_order(part: Part, before: Part | None) -> None:
    """Refuses a sum that would hold parts of two batches, or lack a part of one."""
    expected = (part.batch, 0) if before is None else (before.batch, before.position + 1)
    if (part.batch, part.position) != expected:
        raise RuntimeError(
            f"expected a step on part {expected[1]} of Poisson batch {expected[0]}, got one on "
            f"part {part.position} of batch {part.batch}. Take a step on every part that "
            "BatchMemoryManager yields, also after an error: a sum of parts of two batches may "
            "have a record twice. The accumulated parts have been dropped. Go on with the next "
            "batch or begin the next pass."
        )


class Rows(NamedTuple):
    """The rows that a forward pass was given."""

    part: Part
    is_copy: bool  # whether `part` is an assumption: the tensors are not those that were yielded
    newest: int  # the number of the part that had been yielded last


class Draws:
    """The Poisson batches that were drawn from a loader, and which of them steps have used.

    Two steps on one batch would be charged as two independent samples, which cost less. Hence all
    optimisers over a loader share this object, and no step may use a batch that has been used.

    Rows belong to the batch whose tensors were passed to the model, or else to the batch that had
    been yielded last, because most programs move or augment their batches first. Steps follow the
    order of the batches, and what was passed over is gone.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.largest_rate = sampler, _rate(sampler)
        self.latest = NOTHING
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._batches = self._yielded = 0
        # Drawn in the pass that begins, but not yet yielded: workers fetch batches in advance.
        self.waiting: collections.deque[Part] = collections.deque()
        self._marks = WeakTensorKeyDictionary()
        # The last part that a step used, and the last one that its rows may have been copied from.
        self._used = self._passed = 0

    def record(
        self, waiting: collections.deque[Part], batches: Iterator[Any], sampler: Any, max_rows: Any
    ) -> Iterator[Any]:
        """Yields the batches of a sampler, or parts of them, each noted when it is drawn."""
        for batch in batches:
            self._batches += 1
            self.largest_rate = max(self.largest_rate, _rate(sampler))
            parts = [batch]
            if max_rows is not None:  # as Opacus divides them
                count = max(1, math.ceil(len(batch) / max_rows))
                parts = [part.tolist() for part in np.array_split(batch, count)]
            for position, part in enumerate(parts):
                is_last = position == len(parts) - 1
                waiting.append(Part(self._batches, position, len(part), is_last))
                yield part

    def follow(self, begin: Callable[[], Any]) -> Iterator[Any]:
        """Begins a pass; returns its batches, whose tensors are marked when they are yielded."""
        for optimizer in self.optimizers:
            optimizer.drop_parts()
        waiting = self.waiting = collections.deque()
        batches = begin()
        # What else iterates over the sampler, and is not followed, must not mix with this pass.
        self.waiting = collections.deque()
        # Persistent workers leave an earlier pass, whose iterator is the same object, for this one.
        batches.waiting = waiting

        def followed() -> Iterator[Any]:
            while batches.waiting is waiting:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                self._yielded += 1
                self.latest = waiting.popleft()._replace(number=self._yielded)
                for tensor in _tensors(batch):
                    self._marks[tensor], _OWNERS[tensor] = self.latest, self
                yield batch
            raise RuntimeError(
                "expected one pass over the private loader at a time, got another one "
                "from the same workers. Complete a pass before you begin the next one."
            )

        return followed()

    def marked(self, inputs: Any) -> set[Part]:
        """Returns the parts that tensors belong to, if they are just as they were yielded."""
        found = [self._marks.get(tensor) for tensor in _tensors(inputs)]
        return {part for part in found if part is not None}

    def rows(self, inputs: Any) -> set[Rows]:
        """Returns the rows that a forward pass with these inputs is given; of one part normally."""
        if any(_OWNERS.get(tensor, self) is not self for tensor in _tensors(inputs)):
            raise RuntimeError(
                "expected rows of the private loader that was given to with_public_gradient, got "
                "rows of another private loader, which would not be charged there. Take separate "
                "steps, each with the optimiser and the loader of one make_private call."
            )
        marked = self.marked(inputs)
        return {Rows(part, not marked, self.latest.number) for part in marked or {self.latest}}

    def use(self, rows: set[Rows]) -> Part:
        """Notes a step on rows, and returns the part that they are of.

        Raises:
            RuntimeError: if they are not of one part, or if it has been used or was passed over.
        """
        parts = {each.part for each in rows}
        if len(parts) > 1:
            raise RuntimeError(
                "expected one Poisson batch for each step, got gradients of rows of several, in "
                "which a record may appear more than once. Compute the loss of each step from "
                "forward passes on one batch; use BatchMemoryManager for a larger one."
            )
        if len({each.is_copy for each in rows}) > 1:
            raise RuntimeError(
                "expected gradients of the rows that the private loader yielded, got those of "
                "further tensors too. A row is clipped together with the row of the same number "
                "in each forward pass, so both must be of one record. Use public rows in "
                "public_step; for views of the private rows, call the model once with all of "
                "them, or with copies (x.clone()) of the loader's tensors."
            )
        before = self._passed if any(each.is_copy for each in rows) else self._used
        if not parts or max(parts).number <= before:
            raise RuntimeError(
                "expected a step on a batch of its own, got one without a new batch from the "
                "private loader given to with_public_gradient, or one whose gradients haven't been "
                "computed since. Iterate over that loader itself and take one step on each of its "
                "batches, in their order, before you fetch the next one: two steps on one batch "
                "cost more than two steps on two."
            )
        (part,) = parts
        self._used = part.number
        self._passed = max(self._passed, *(each.newest for each in rows))
        return part


def on_grid(rate: float) -> float:
    """Returns the probability with which torch.rand, of 24 binary digits, is below a rate."""
    return min(1.0, math.ceil(rate * 2**24) / 2**24)


def _rate(sampler: Any) -> float:
    """Returns the probability that a batch of a sampler has a record."""
    rate = on_grid(float(sampler.sample_rate))
    if not isinstance(sampler, DistributedUniformWithReplacementSampler):
        return rate
    # It passes over batches of its process without rows, after which others are more likely.
    empty = (1 - rate) ** sampler.num_samples
    if empty > _LARGEST_GAP:
        raise ValueError(
            f"expected batches that are next to never empty in any process, since Opacus' "
            f"distributed sampler leaves out empty ones, got a probability of {empty:.2g}. Use a "
            "larger batch_size, of at least 20 rows for each process, or fewer processes."
        )
    return min(1.0, rate / (1 - empty))


def check_data(data: Any, *, is_private: bool) -> None:
    """Raises if a data set is used as private and as public rows."""
    if _DATA[not is_private].get(id(data)) is data:
        raise ValueError(
            "expected public rows in another data set than the private rows, got the same data "
            "set for both. Make a data set of rows that are public."
        )
    with contextlib.suppress(TypeError):  # such as a list, which has no weak references
        _DATA[is_private][id(data)] = data


def is_private(inputs: Any) -> bool:
    """Whether some tensors are just as a private loader yielded them."""
    return any(tensor in _OWNERS for tensor in _tensors(inputs))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _recording(kind: type) -> type:
    """Returns a class of Opacus' samplers whose objects note their batches in `draws`."""

    class Recording(kind):
        def __iter__(self) -> Iterator[Any]:
            return self.parts(None)

        def parts(self, max_rows: int | None) -> Iterator[Any]:
            return self.draws.record(self.draws.waiting, super().__iter__(), self, max_rows)

    return Recording


_RECORDING = {
    kind: _recording(kind)
    for kind in (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
}


class _Splitting(BatchSplittingSampler):
    """BatchMemoryManager's sampler, which tells our optimisers about parts by their `Part`.

    Opacus keeps a queue of announcements instead, one for each part that was drawn. It shifts when
    the training loop leaves out a part, and outlives the pass.
    """

    sampler: Any

    @property
    def draws(self) -> Draws | None:
        """The draws that are split, if an optimiser with public gradients takes their steps."""
        found = getattr(self.sampler, "draws", None)
        return found if found is not None and self.optimizer in found.optimizers else None

    def __iter__(self) -> Any:
        if self.draws is None:
            return super().__iter__()
        return self.sampler.parts(self.max_batch_size)


class _FollowedLoader(torch.utils.data.DataLoader):
    """A loader that says which batch it yields, to the draws of its sampler."""

    def __iter__(self) -> Any:
        draws = getattr(self.batch_sampler, "draws", None)
        return super().__iter__() if draws is None else draws.follow(super().__iter__)


def _follow(loader: torch.utils.data.DataLoader) -> torch.utils.data.DataLoader:
    """Makes a loader say which batch it yields; the object stays the same."""
    if isinstance(loader.batch_sampler, BatchSplittingSampler):
        loader.batch_sampler.__class__ = _Splitting
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


def draws_of(loader: torch.utils.data.DataLoader) -> tuple[Draws, int]:
    """Makes a loader say which batch it yields; returns its draws and the number of records."""
    _validate.instance_of(
        torch.utils.data.DataLoader, "Pass the loader that make_private returned.", loader=loader
    )
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    if type(sampler) in _RECORDING:
        if getattr(loader.collate_fn, "rand_on_empty", False):
            raise ValueError(
                "expected batches of records only, got rand_on_empty=True, which puts a random row "
                "into an empty batch. Call make_private without it; empty batches are fine."
            )
        draws = Draws(sampler)
        # The object stays the same, since BatchMemoryManager may hold it.
        sampler.__class__ = _RECORDING[type(sampler)]
        sampler.draws = draws
    if type(sampler) not in _RECORDING.values():
        raise ValueError(
            f"expected a loader with Poisson sampling, which epsilon is computed for, got one "
            f"with {type(sampler).__name__}. Use the loader that PrivacyEngine.make_private "
            "returns with poisson_sampling=True, its default."
        )
    check_data(loader.dataset, is_private=True)
    _follow(loader)
    return sampler.draws, int(getattr(sampler, "total_size", None) or sampler.num_samples)
