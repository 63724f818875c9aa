"""Runs that survive a crash: everything the next step needs is on disk.

A run folder, which only its owner can read, holds

    checkpoint-N     the newest two: random seed, parameters, optimiser, noise state, position
    shown            a digest of each state that was yielded
    secret.key       the key of the data fingerprints
    ledger.jsonl     what was charged, unless the run is charged to a budget or another ledger
    lock             held by the process that runs

A checkpoint is written under a temporary name, synced to disk and renamed, so that it exists as a
whole or not at all, and a checksum detects later damage. It consists of a JSON header and plain
bytes, so reading one runs no code. Anyone who holds it can subtract the noise: it must not lie in
the folder that is released, and it is removed when the run ends.

Resuming repeats the steps after the checkpoint. The seed determines batches and noise, and the
configuration (mechanism, programs of the losses with their gradients and of the optimiser, data,
versions, device) is compared before anything runs. A step that ran before the crash and runs again
therefore has the same data, parameters, batch and noise, and is charged once. What comes out is
compared with what was shown, before it is shown again.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import operator
import os
import platform
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _validate
from mirrordp._versions import library_versions
from mirrordp._warn import warn
from mirrordp.privacy import _isolation, _jaxprs
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.ghost import device_memory
from mirrordp.privacy.noise import GaussianNoise
from mirrordp.privacy.sampling import DRAWS
from mirrordp.spending import files as _files, fingerprint as _fingerprint
from mirrordp.spending.budget import LEDGER_FILE, Budget
from mirrordp.spending.files import StorageError
from mirrordp.spending.ledger import FileLedger, Ledger, Position, check_position
from mirrordp.training.shown import FILE as SHOWN_FILE, Shown
from mirrordp.types import PyTree

MAGIC = b"mirrordp checkpoint 2\n"
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{8})")


_IS_RARE = "whether steps are shown before they are kept"
REPEATS = "whether a finished run may be computed again"
"""The name of whether all of a run is repeated after its result may have been seen."""
# Compared only if steps are repeated, as are the two below.
_PROCESSORS = "number of processors"
PLACEMENT = "devices"
"""The name of what a configuration says about devices."""
MACHINE = "kind of processor, its memory and settings of the compiler"
"""The name of what a configuration says about the machine; those of further processes follow."""
PROCESSES = "number of processes"
"""The name of the number of processes in a configuration; without it, there is one."""


class CheckpointError(StorageError):
    """A checkpoint that cannot be written, read, or used for this run."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where a run keeps what it needs to go on after a crash.

    Args:
        folder: a folder for this run alone, apart from what is released.
        every: a checkpoint is written each time `train` has yielded this often. With 1, the
            default, a result is yielded only after its checkpoint is on disk, so nothing that
            anyone saw is ever computed again. With more, repeated steps must be exact to the bit.
            CPUs guarantee that; other devices only with
            XLA_FLAGS=--xla_gpu_deterministic_ops=true.
        resume: continue the run in the folder, if there is one. Otherwise a folder with an
            unfinished run is refused.
        keep: keep the last checkpoint, which is secret, when the run ends. A finished run can then
            be resumed and yields its last state again. Call `remove` once the result is on disk.
        wait: how many seconds to wait for another process that uses the folder.
    """

    folder: str | os.PathLike[str]
    every: int = 1
    resume: bool = False
    keep: bool = False
    wait: float = 0.0

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.positive_integer(every=self.every)
        _validate.non_negative(wait=self.wait)
        # A link may point elsewhere when the run ends, and its secrets would stay.
        object.__setattr__(self, "_folder", Path(os.path.realpath(self.folder)))
        if self.every > 1 and not _is_exact():
            raise ValueError(
                f"every={self.every} needs steps that can be replayed to the bit, got a "
                f"{jax.devices()[0].platform} without that promise. Use every=1, or set "
                "XLA_FLAGS=--xla_gpu_deterministic_ops=true."
            )

    def remove(self) -> None:
        """Removes the secrets in the folder; call it once the result is safe elsewhere.

        Raises:
            LockedError: if a run in the folder is not over.
        """
        folder = self.real_folder
        if folder.is_dir():
            lock = _files.Lock(
                folder / _files.RUN_LOCK, f"the run folder {str(folder)!r}", wait=self.wait
            )
            remove_checkpoints(folder)
            lock.close()

    @property
    def real_folder(self) -> Path:
        """The folder without links, as they were when this was made."""
        return self._folder  # pyright: ignore[reportAttributeAccessIssue]

    def open(self, adjacency: Adjacency, spend: Ledger | Budget | None = None) -> "RunFolder":
        """Locks the folder and reads the newest intact checkpoint in it.

        Args:
            adjacency: the adjacency of the folder's own ledger, used if `spend` is None.
            spend: what the run is charged to; by default, a ledger in the folder.
        """
        ledger = spend.ledger if isinstance(spend, Budget) else spend
        return RunFolder(self, adjacency, ledger if isinstance(ledger, FileLedger) else None)


@dataclasses.dataclass(frozen=True)
class Saved:
    """The content of a checkpoint.

    Attributes:
        run: the run's name in the ledger.
        entropy: the seed of each run's randomness. Secret.
        configuration: what must be unchanged when the run is resumed.
        ledger: how far the ledger reached.
        position: how far the run got, such as the number of steps.
        arrays: the state by name, with random keys as their data.
    """

    run: str
    entropy: Sequence[int]
    configuration: Mapping[str, str]
    ledger: Position
    position: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    def to_bytes(self) -> bytes:
        """Returns a checksum, a JSON header and the bytes of the arrays."""
        contents = {name: np.asarray(array) for name, array in self.arrays.items()}
        header = {
            "run": self.run,
            "entropy": [str(number) for number in self.entropy],
            "configuration": dict(self.configuration),
            "ledger": list(self.ledger),
            "position": dict(self.position),
            "arrays": [
                [name, array.dtype.name, list(array.shape)] for name, array in contents.items()
            ],
        }
        text = json.dumps(header, allow_nan=False).encode()
        body = b"".join(
            [b"%d\n" % len(text), text, *(array.tobytes() for array in contents.values())]
        )
        return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, content: bytes) -> "Saved":
        """Inverts `to_bytes`.

        Raises:
            ValueError: if a single bit differs.
        """
        start = len(MAGIC) + 65
        body = content[start:]
        seal = MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n"
        if content[:start] != seal:
            raise ValueError("not an intact checkpoint")
        length, rest = body.split(b"\n", 1)
        header, data = json.loads(rest[: int(length)]), rest[int(length) :]
        arrays, at = {}, 0
        for name, kind, shape in header["arrays"]:
            dtype, count = jnp.dtype(kind), math.prod(shape)
            arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += dtype.itemsize * count
        return cls(
            run=header["run"],
            entropy=[int(number) for number in header["entropy"]],
            configuration=header["configuration"],
            ledger=Position(*header["ledger"]),
            position=header["position"],
            arrays=arrays,
        )


class RunFolder:
    """A run folder that is locked, with the checkpoint found in it; see `Checkpoint.open`."""

    def __init__(self, checkpoint: Checkpoint, adjacency: Adjacency, ledger: FileLedger | None):
        self._checkpoint = checkpoint
        folder = self.folder = checkpoint.real_folder
        self._owned: FileLedger | None = None
        path = folder / LEDGER_FILE
        if path.exists() and "budget" in FileLedger.read(path).records[0]:
            raise CheckpointError(
                f"expected a folder of the run's own for its checkpoints, got {str(folder)!r}, "
                "which holds a budget: the key there would go when the run ends, and with it what "
                "the budget knows of seeds and data. Choose another folder."
            )
        with self._named_errors("made and written"):
            _files.make_private_folder(folder)
            self._lock = _files.Lock(
                folder / _files.RUN_LOCK, f"the run folder {str(folder)!r}", wait=checkpoint.wait
            )
        try:
            _remove_leftovers(folder)
            self.key = _fingerprint.make_key(folder)
            self._is_behind = False
            self.saved = self._load()
            if self.saved is None:
                (folder / SHOWN_FILE).unlink(missing_ok=True)
            try:
                self._shown = Shown(folder)
            except ValueError as error:
                raise CheckpointError(
                    f"expected an intact list of what was shown in {str(folder)!r}, got a damaged "
                    f"one ({error}). Restore it from a copy, or remove the folder and start over; "
                    "what was charged stays charged."
                ) from None
            if self.saved is not None:
                # The newest checkpoint may have been damaged, and removed, at an earlier attempt.
                self._is_behind |= self._shown.last > self.saved.position.get("step", 0)
            if self.saved is not None and not checkpoint.resume:
                raise CheckpointError(
                    f"expected a folder without an unfinished run, got one in {str(folder)!r}. "
                    "Resume it (resume=True, --resume), or remove the folder to give it up; what "
                    "was charged stays charged."
                )
            if self.saved is not None and ledger is None and not path.exists():
                raise CheckpointError(
                    f"expected the budget or ledger that the run in {str(folder)!r} began with, "
                    "got none. Name it again (spend=, --budget)."
                )
            if ledger is None:
                ledger = self._owned = (
                    FileLedger.open(path) if path.exists() else FileLedger.create(path, adjacency)
                )
                if self.saved is None and checkpoint.resume and ledger.num_charges:
                    warn(
                        f"there is no run to resume in {str(folder)!r}, but its ledger says that "
                        "one has been charged. A new run begins, which is charged in addition. To "
                        "get the result of a finished run again, train with "
                        "Checkpoint(keep=True), and call remove() once the result is on disk.",
                        UserWarning,
                    )
            self.ledger = ledger
            if self.saved is not None:
                check_position(ledger, self.saved.ledger, f"the checkpoint in {str(folder)!r}")
        except OSError as error:
            self.close()
            self._raise("read and written", error)
        except BaseException:
            self.close()
            raise
        self.id = secrets.token_hex(8) if self.saved is None else self.saved.run
        self._entropy: Sequence[int] = () if self.saved is None else self.saved.entropy
        self._configuration: Mapping[str, str] | None = None

    def verify(
        self, configuration: Mapping[str, str], seeds: Sequence[int | None]
    ) -> Sequence[int]:
        """Compares the configuration with that of the run in the folder, if there is one.

        Args:
            configuration: what must be unchanged, by name; long texts as hashes.
            seeds: the caller's seed of each run, or None.

        Returns:
            The seed of each run's randomness: the caller's, or one that is kept with the run.

        Raises:
            CheckpointError: if anything differs; the message says what.
        """
        described = {
            MACHINE: machine(sizes_follow_memory=False),
            **configuration,
            **surroundings(seeds),
            "device": f"{jax.devices()[0].platform} {jax.devices()[0].device_kind}",
            # The rounding of a matrix product depends on how it is divided among threads.
            _PROCESSORS: str(_num_processors()),
            _IS_RARE: str(self._checkpoint.every > 1),
        }
        if self.saved is None:
            self._entropy = [
                secrets.randbits(128) if seed is None else operator.index(seed) for seed in seeds
            ]
        self._configuration = described
        if self.saved is not None:
            self._compare_processes(self.saved.configuration, described)
            self._compare(self.saved.configuration, described)
        return self._entropy

    def _compare_processes(self, then: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Refuses another number of processes in one sentence, since much else differs then."""
        before, after = (each.get(PROCESSES, "1") for each in (then, now))
        if before != after:
            raise CheckpointError(
                f"expected the number of processes that began the run in {str(self.folder)!r}, "
                f"{before}, got {after}. Start {before} with the rows that each had, or use "
                "another folder for a new run."
            )

    def _compare(self, then: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Refuses another configuration; rounding matters if steps that were seen run again."""
        replays = self._is_behind or "True" in (then.get(_IS_RARE), now[_IS_RARE])
        repeats = "True" in (then.get(REPEATS), now.get(REPEATS))
        if (replays or repeats) and not _is_exact():
            raise CheckpointError(
                f"expected a device that can replay steps to the bit, since the newest checkpoint "
                f"in {str(self.folder)!r} may be older than what was shown, got a "
                f"{jax.devices()[0].platform} without that promise. Set "
                "XLA_FLAGS=--xla_gpu_deterministic_ops=true if the run began so, or begin another "
                "run; what was charged stays charged."
            )
        left_out = {_IS_RARE, REPEATS}
        if not (replays or repeats):
            machines = {name for name in {**then, **now} if name.startswith(MACHINE)}
            left_out |= {_PROCESSORS, PLACEMENT} | machines
        then, now = ({k: v for k, v in c.items() if k not in left_out} for c in (then, now))
        _compare(then, now, self.folder)

    def save(self, position: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a checkpoint, which is on disk when this returns."""
        assert self._configuration is not None
        self._require_place()
        content = Saved(
            run=self.id,
            entropy=self._entropy,
            configuration=self._configuration,
            ledger=self.ledger.position,
            position=position,
            arrays=arrays,
        ).to_bytes()
        found = self._files()
        number = 1 + max(found, default=0)
        with self._named_errors(
            "written; the checkpoint before it is intact. Make room, then resume"
        ):
            _files.write_atomically(
                self.folder / f"checkpoint-{number:08d}", content, mode=_files.PRIVATE_FILE
            )
            for old in sorted(found)[: len(found) + 1 - KEPT]:
                found[old].unlink()

    def note_shown(self, step: int, digest: str) -> None:
        """Notes a state that is about to be shown; it is on disk when this returns."""
        self._require_place()
        with self._named_errors("written"):
            self._shown.note(step, digest)

    def compare_shown(self, step: int, digest: str) -> None:
        """Raises a `CheckpointError` if another state was shown after this step before a crash."""
        if not self._shown.agrees(step, digest):
            raise CheckpointError(
                f"expected step {step} of the run in {str(self.folder)!r} to come out as it did "
                "before the run was interrupted, got other values, which would tell what the noise "
                "was. Resume it where it began: same machine, same program, same settings of JAX. "
                "What was charged stays charged."
            )

    def finish(self) -> None:
        """Removes the checkpoints and the key unless they are to be kept; the ledger stays."""
        if self._lock.is_in_place:
            if not self._checkpoint.keep:
                remove_checkpoints(self.folder)
        elif self.folder.exists():
            # The result has been paid for; what another run keeps here is not this run's to remove.
            warn(
                f"the run folder {str(self.folder)!r} was exchanged while the run went on. The one "
                "in its place is left alone; the secrets of this run are where the old one is.",
                UserWarning,
            )
        self.close()

    def _require_place(self) -> None:
        """Refuses to write where another run keeps its own, after the folder was removed."""
        if not self._lock.is_in_place:
            raise CheckpointError(
                f"expected the run folder {str(self.folder)!r} as it was opened, got none or "
                "another one in its place. Leave a run's folder alone until the run is over; what "
                "was charged stays charged."
            )

    def close(self) -> None:
        """Unlocks the folder; an unfinished run can be resumed."""
        if self._owned is not None:
            self._owned.close()
        self._lock.close()

    def _files(self) -> dict[int, Path]:
        return checkpoint_files(self.folder)

    def _load(self) -> Saved | None:
        """Returns the newest intact checkpoint, or None if there never was one."""
        found = self._files()
        for number in sorted(found, reverse=True):
            try:
                saved = Saved.from_bytes(found[number].read_bytes())
            except (ValueError, KeyError, TypeError):
                continue
            if number != max(found):
                warn(
                    f"the newest checkpoint in {str(self.folder)!r} is damaged; going on from the "
                    "one before it.",
                    UserWarning,
                )
                self._is_behind = True
                # A damaged file with a higher number would count as the newest again.
                for damaged in set(found) - {number}:
                    if damaged > number:
                        found[damaged].unlink()
            return saved
        if found:
            raise CheckpointError(
                f"expected an intact checkpoint in {str(self.folder)!r}, got only damaged ones. "
                "Restore one from a copy, or remove the folder and start over; what was charged "
                "stays charged."
            )
        return None

    @contextlib.contextmanager
    def _named_errors(self, what: str):
        try:
            yield
        except OSError as error:
            self._raise(what, error)

    def _raise(self, what: str, error: OSError):
        raise CheckpointError(
            f"expected a run folder that can be {what}, got {str(self.folder)!r} "
            f"({error.strerror or error}). Make room or give access; a run that had begun can then "
            "be resumed from the checkpoint before."
        ) from error


def surroundings(seeds: Sequence[int | None]) -> dict[str, str]:
    """Returns what decides a run beside its arguments: versions, seeds, and ways of drawing."""
    return {
        **{f"version of {name}": version for name, version in library_versions().items()},
        "seed": ", ".join(
            "from the operating system" if seed is None else str(operator.index(seed))
            for seed in seeds
        ),
        "way of drawing batches": DRAWS,
        # The noise of a key also depends on settings of JAX (jax_threefry_partitionable).
        "noise of a key": _noise_program(),
    }


def is_unfinished(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder holds a run that can be resumed.

    Raises:
        LockedError: if another process is using the folder.
    """
    if not checkpoint_files(folder):
        return False
    _files.Lock(Path(folder) / _files.RUN_LOCK, f"the run folder {str(folder)!r}").close()
    return True


def checkpoint_files(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the checkpoints in a folder by number."""
    if not Path(folder).is_dir():
        return {}
    matches = ((_NAME.fullmatch(path.name), path) for path in Path(folder).iterdir())
    return {int(match[1]): path for match, path in matches if match}


def remove_checkpoints(folder: str | os.PathLike[str]) -> None:
    """Removes the secrets in a run folder; the ledger stays."""
    folder = Path(folder)
    if not folder.is_dir():
        return
    _remove_leftovers(folder)
    # The rest goes last: a checkpoint that is still there could not be resumed without the key, nor
    # compared with what was shown.
    (folder / SHOWN_FILE).unlink(missing_ok=True)
    for _, path in sorted(checkpoint_files(folder).items()):
        path.unlink(missing_ok=True)
    (folder / _fingerprint.KEY_FILE).unlink(missing_ok=True)
    _files.sync_folder(folder)


def _remove_leftovers(folder: Path) -> None:
    # A checkpoint that was being written when the process was killed is as secret as a whole one.
    for name in ("checkpoint-", _fingerprint.KEY_FILE):
        _files.remove_leftovers(folder, name)


def _is_exact() -> bool:
    """Returns whether running a program twice on this device gives the same bits."""
    deterministic = "xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "")
    return jax.devices()[0].platform == "cpu" or deterministic


def _num_processors() -> int:
    """Returns the number of processors that this process, and so the compiler, may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# What a processor is, as Linux describes it; Eigen divides products by the size of caches.
_OF_A_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)
_OF_THE_COMPILER = (
    *("jax_default_matmul_precision", "jax_compiler_enable_remat_pass", "jax_optimization_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort"),
    *("jax_disable_most_optimizations", "jax_num_cpu_devices", "jax_default_device"),
)


def machine(*, sizes_follow_memory: bool) -> str:
    """Returns a hash of what decides, beside a program, which instructions it becomes.

    Processors of one platform differ in their instructions, and these in how they round.

    Args:
        sizes_follow_memory: whether the number of rows that a step takes at a time depends on how
            much memory there is.
    """
    found = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "processor": platform.processor()}
    # The number of threads that XLA has, where it is not that of the processors.
    found["threads"] = os.environ.get("NPROC", "")
    found |= {name: str(getattr(jax.config, name, None)) for name in _OF_THE_COMPILER}
    if sizes_follow_memory:
        found["memory"] = str(device_memory())
    about = Path("/proc/cpuinfo")
    if about.exists():
        first, *_ = about.read_text(errors="replace").split("\n\n", 1)
        values = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
        described = {name.strip(): value.strip() for name, value in values.items()}
        found |= {name: described[name] for name in _OF_A_PROCESSOR if name in described}
    return _fingerprint.of_text(found)


def _noise_program() -> str:
    noise, sums = GaussianNoise(), {"matrix": jnp.zeros((3, 2)), "vector": jnp.zeros(4)}
    add = functools.partial(noise.add, stddev=1.0)
    return program("the noise", add, sums, noise.init(jax.random.key(0), sums))


def _compare(then: Mapping[str, str], now: Mapping[str, str], folder: Path) -> None:
    different = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if not different:
        return
    parts = []
    for name in different:
        before, after = then.get(name, "nothing"), now.get(name, "nothing")
        is_long = any(len(t) > 300 or re.fullmatch("[0-9a-f]{64}", t) for t in (before, after))
        parts.append(name if is_long else f"{name} ({before} then, {after} now)")
    raise CheckpointError(
        f"expected the same run as the one in {str(folder)!r}, got one that differs in: "
        f"{'; '.join(parts)}. Resume with what it began with, or use another folder for a new run."
    )


def to_arrays(tree: PyTree, prefix: str) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree by path, with random keys as their data."""
    return {
        prefix + jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf) if _is_key(leaf) else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def from_arrays(like: PyTree, arrays: Mapping[str, np.ndarray], prefix: str) -> PyTree:
    """Inverts `to_arrays` for a tree with the structure of `like`."""

    def restored(path, leaf):
        found = arrays.get(prefix + jax.tree_util.keystr(path))
        plain = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        plain = jax.random.key_data(leaf) if _is_key(leaf) else plain
        if found is None or found.shape != plain.shape or found.dtype != plain.dtype:
            raise CheckpointError(
                f"expected {plain.dtype} of shape {plain.shape} at {jax.tree_util.keystr(path)} in "
                "the checkpoint, got something else. Use the model and optimiser that wrote it."
            )
        # A mirror map has float64, which JAX alone would cut.
        with jax.enable_x64(True):
            value = jnp.asarray(found)
        return (
            jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
            if _is_key(leaf)
            else value
        )

    return jax.tree_util.tree_map_with_path(restored, like)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def program(name: str, function: Any, *like: Any) -> str:
    """Returns a hash of what a function computes: its program and the arrays that it holds.

    Equal programs have equal hashes in every process, whatever their functions are called. To
    include the custom rules of a gradient, pass `jax.value_and_grad(...)`. The text that
    `jax.debug.print` prints does not count, but the fact that it prints does, since it can change
    how the compiler rounds.

    Args:
        name: what the function is, for messages.
        function: any JAX function.
        *like: arguments, or their shapes and types.

    Raises:
        CheckpointError: if the function calls code outside the program, such as a host callback,
            which cannot be compared.
    """
    traced = jax.jit(function).trace(*like)
    for equation in _jaxprs.equations(traced.jaxpr):
        operation = equation.primitive.name
        if _isolation.is_opaque(operation):
            raise CheckpointError(
                f"expected {name} to be a program that can be compared when the run is resumed, "
                f"got one with the operation {operation!r}, whose code is not part of it. Compute "
                "it with JAX (jax.debug.print is allowed), or train without a checkpoint."
            )
    held = _fingerprint.of_arrays(b"no secret", _jaxprs.constants(traced.jaxpr))
    text = _without_names(_MESH.sub("", traced.lower().as_text()))
    return _fingerprint.of_text({"program": text, "constants": held})


# How many devices there are is not what a function computes; see `PLACEMENT`.
_MESH = re.compile(r"mhlo\.num_partitions = \d+|^ *sdy\.mesh .*$", re.MULTILINE)
_SYMBOL = re.compile(r'@(?:"[^"]*"|[\w.$-]+)')
_DEFINED = re.compile(rf"(?:^module|\bfunc\.func(?: \w+)?) ({_SYMBOL.pattern})", re.MULTILINE)


def _without_names(text: str) -> str:
    """Returns the text of a module with numbers for the names of its functions."""
    numbers: dict[str, str] = {}
    for symbol in _DEFINED.findall(text):
        numbers.setdefault(symbol, f"@{len(numbers)}")
    return _SYMBOL.sub(lambda match: numbers.get(match[0], match[0]), text)


def fields(name: str, value: Any) -> dict[str, str]:
    """Returns one entry per field of a dataclass, so that a message can name what differs."""
    if isinstance(value, np.ndarray | jax.Array):
        # The repr of a long array leaves out the middle.
        return {name: _fingerprint.of_arrays(b"no secret", value)}
    if not dataclasses.is_dataclass(value):
        return {name: repr(value)}
    found = {name: type(value).__name__}
    for field in dataclasses.fields(value):
        if field.repr:
            found |= fields(f"{name}.{field.name}", getattr(value, field.name))
    return found


def outline(values: Sequence[float] | np.ndarray) -> str:
    """Returns the length of a list of numbers and a hash of them."""
    array = np.asarray(values)
    return f"{len(array)} values, {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
