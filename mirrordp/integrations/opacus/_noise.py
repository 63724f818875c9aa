# pyright: reportMissingImports=false
"""Which noise a run has drawn, so that one noise does not meet two different sums.

Two sums under the same noise show their difference without any. Noise repeats if its generator goes
back to where it was, such as after `torch.manual_seed(0)` in each epoch, or at the top of a script
that resumes. Hence it is noted which parts of which streams of random numbers were noise.
"""

import base64
import hashlib
import struct
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from opacus.optimizers import DPOptimizer

from mirrordp._warn import warn
from mirrordp.integrations.opacus._batches import Draws
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger

_SAVED = struct.Struct("<8sQ")  # how a place is saved
_END = 2**63  # a position behind all others


class Place(NamedTuple):
    """Where the next random number of a generator comes from."""

    stream: bytes  # a digest of what the numbers are computed from
    position: int  # the position of the next one


# Up to which position noise was drawn from each stream, in this process and for each ledger. What a
# ledger states covers the steps of all its runs together, so they may not share noise.
_OF_PROCESS: dict[bytes, int] = {}
_OF_LEDGERS: weakref.WeakKeyDictionary[Any, dict[bytes, int]] = weakref.WeakKeyDictionary()


class Noises:
    """The streams that a run has drawn noise from, also before it was resumed."""

    def __init__(self, spend: Ledger | Budget) -> None:
        key = spend.ledger if isinstance(spend, Budget) else spend
        self._of_ledger = _OF_LEDGERS.setdefault(key, {})
        self._of_run: dict[bytes, int] = {}
        self._has_warned = False

    def unused(self, optimizer: DPOptimizer) -> list[Place]:
        """Returns the places that a step is about to draw noise from.

        Raises:
            RuntimeError: if the run or its ledger has drawn noise from them before.
        """
        places = _places(optimizer)
        if len({place.stream for place in places}) < len(places):
            raise RuntimeError(
                "expected other noise on each device, got several devices with the same seed, "
                "where layers would have the same noise. Seed each one by itself, as in "
                "'with torch.cuda.device(i): torch.cuda.manual_seed(seed + i)'."
            )
        if any(_is_used(used, places) for used in (self._of_ledger, self._of_run)):
            raise RuntimeError(
                "expected new noise for each step, got a noise generator that went back to where "
                "it was at an earlier step of this run or of its ledger: the difference of the two "
                "steps would show private rows without noise. Seed once, before the first step, "
                "and with another number after each resume, as in torch.manual_seed(seed + step); "
                "torch.seed() is a number that nobody knows."
            )
        return places

    def note(self, before: list[Place], optimizer: DPOptimizer) -> None:
        """Notes that noise was drawn from some places up to where the generators are now."""
        if not self._has_warned and _is_used(_OF_PROCESS, before):
            self._has_warned = True
            warn(
                "a step has the same noise as a step of another run in this process, because both "
                "runs had the same seed. That suits a comparison, but do not release both models: "
                "the noise cancels in their difference. Use another seed for each run, or pass "
                "one ledger to both as spend, which then refuses shared noise.",
                RuntimeWarning,
            )
        after = _places(optimizer)
        drawn = [
            start._replace(position=end.position if start.stream == end.stream else _END)
            for start, end in zip(before, after, strict=True)
        ]
        for used in (_OF_PROCESS, self._of_ledger, self._of_run):
            _add(used, [*drawn, *after])

    # Digests are saved, and not a generator's state, from which anyone could compute the noise.

    def saved(self) -> str:
        """Returns what `restore` needs."""
        return base64.b85encode(
            b"".join(_SAVED.pack(*each) for each in self._of_run.items())
        ).decode()

    def restore(self, saved: str) -> None:
        """Adds what was saved."""
        found = [Place(*each) for each in _SAVED.iter_unpack(base64.b85decode(saved))]
        for used in (self._of_ledger, self._of_run):
            _add(used, found)


def _is_used(used: dict[bytes, int], places: Iterable[Place]) -> bool:
    return any(place.position < used.get(place.stream, 0) for place in places)


def _add(used: dict[bytes, int], places: Iterable[Place]) -> None:
    for place in places:
        used[place.stream] = max(place.position, used.get(place.stream, 0))


def check_seeds(optimizer: DPOptimizer, draws: Draws) -> None:
    """Raises if noise and sampling are made of the same random numbers.

    PyTorch makes normal numbers of the uniform ones that decide who is sampled, so with one seed
    for two generators, the noise of a step shows whose rows were in a batch.
    """
    sampling: torch.Generator | None = draws.sampler.generator
    is_default = optimizer.generator is None
    if optimizer.secure_mode or (is_default and optimizer.params[0].device.type != "cpu"):
        return
    pair = [torch.default_generator if g is None else g for g in (optimizer.generator, sampling)]
    if pair[0] is pair[1] or pair[0].device.type != pair[1].device.type:
        return
    if pair[0].initial_seed() == pair[1].initial_seed():
        raise ValueError(
            "expected a seed for the noise and another one for the sampling, got two generators "
            "with the same seed, whose noise shows whose rows were sampled. Seed the loader's "
            "generator and the noise generator (or torch.manual_seed) with different numbers, or "
            "use the global generator for both."
        )


def _places(optimizer: DPOptimizer) -> list[Place]:
    """Returns where noise would be drawn from now."""
    is_drawing = getattr(optimizer, "rank", 0) == 0  # other processes add no noise
    # A secure generator reads from the operating system and has no state.
    if optimizer.secure_mode or not is_drawing or not optimizer.noise_multiplier:
        return []
    if optimizer.generator is not None:
        return [_place(optimizer.generator.device, optimizer.generator.get_state())]
    devices = sorted({param.device for param in optimizer.params}, key=str)
    return [_place(device, _default_state(device)) for device in devices]


def _default_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    module: Any = torch.get_device_module(device)
    return module.get_rng_state() if device.index is None else module.get_rng_state(device)


def _place(device: torch.device, state: torch.Tensor) -> Place:
    """Returns where a generator is.

    On a CPU, numbers come from a Mersenne twister in blocks of 624: the state has the next position
    at byte 16, and from byte 24 on the block. On CUDA, it is a seed and an offset.
    """
    content, position = state.cpu().numpy().tobytes(), 0
    if device.type == "cpu" and len(content) == 5056:
        position, content = int.from_bytes(content[16:24], "little"), content[24:5016]
    elif device.type == "cuda" and len(content) == 16:
        position, content = int.from_bytes(content[8:], "little"), content[:8]
    digest = hashlib.blake2b(device.type.encode() + content, digest_size=8).digest()
    return Place(digest, position)
