"""What a run has shown, by digest: a step that is repeated must come out the same to the bit.

Resuming repeats the steps after a checkpoint with the noise that they had. If their sums came out
otherwise (another processor, another compiler, anything that nobody thought of), two sums would
meet one noise, and their difference would be free of it. Therefore a digest of every state that is
yielded is on disk before anyone sees it, and a state that is computed again is compared with its
digest before it is yielded.
"""

import os
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp

from mirrordp.spending import files as _files
from mirrordp.training.processes import on_host
from mirrordp.types import PyTree

FILE = "shown"
"""The name of the file in a run folder: one line for each step after which a state was shown."""
_LINE = re.compile(rb"((\d+) ([0-9a-f]{32})) ([0-9a-f]{8})")
_LANES = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)


class Shown:
    """The digests of a run folder. Like its checkpoints they are secret: they tell of noise.

    Args:
        folder: the run folder.

    Raises:
        ValueError: if a line is damaged; the message says which.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
        content = self._path.read_bytes() if self._path.exists() else b""
        *lines, rest = content.split(b"\n")
        self._digests: dict[int, str] = {}
        for number, line in enumerate(lines, start=1):
            found = _LINE.fullmatch(line)
            if found is None or zlib.crc32(found[1]) != int(found[4], 16):
                raise ValueError(f"line {number}")
            self._digests[int(found[2])] = found[3].decode()
        if rest:
            # A line that is cut belongs to a state that nobody saw.
            os.truncate(self._path, len(content) - len(rest))

    @property
    def last(self) -> int:
        """The last step after which a state was shown; 0 if there was none."""
        return max(self._digests, default=0)

    def agrees(self, step: int, digest: str) -> bool:
        """Returns whether the state after `step` was not shown before, or was the same."""
        return self._digests.get(step, digest) == digest

    def note(self, step: int, digest: str) -> None:
        """Notes a state that is about to be shown, which is on disk when this returns."""
        if step in self._digests:
            return
        is_new = not self._path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        handle = os.open(self._path, flags, _files.PRIVATE_FILE)
        try:
            content = f"{step} {digest}".encode()
            _files.write_all(handle, b"%s %08x\n" % (content, zlib.crc32(content)))
            os.fsync(handle)
        finally:
            os.close(handle)
        if is_new:
            _files.sync_folder(self._path.parent)
        self._digests[step] = digest


def digest(tree: PyTree) -> str:
    """Returns 128 bits that depend on every bit of a tree's arrays, and on nothing else.

    They are computed where the arrays are, in integers, whose sums have no order. Two trees of the
    same form that differ in one array element have different digests; others have the same one by
    chance alone. Of 64-bit numbers in NumPy's arrays, only the 32 bits that JAX would keep count.
    It is no defence against someone who chooses the arrays.
    """
    lanes = on_host(_lanes(jax.tree.leaves(tree)))
    return "".join(f"{int(lane):08x}" for lane in lanes)


@jax.jit
def _lanes(leaves: list[jax.Array]) -> jax.Array:
    total = jnp.zeros(len(_LANES), jnp.uint32)
    for number, leaf in enumerate(leaves, start=1):
        words = _words(leaf)
        place = jnp.arange(words.size, dtype=jnp.uint32)
        place = place * jnp.uint32(2654435769) + jnp.uint32(number * 40503)
        sums = [
            jnp.sum(_mixed(words ^ (place + jnp.uint32(lane))), dtype=jnp.uint32) for lane in _LANES
        ]
        total = _mixed(total + jnp.uint32(number)) + jnp.stack(sums)
    return total


def _words(leaf: jax.Array) -> jax.Array:
    """Returns the bits of an array as a list of words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == bool or jax.dtypes.itemsize_bits(leaf.dtype) < 8:
        # Such numbers are numbers of 32 bits as well.
        leaf = leaf.astype(jnp.float32)
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, kind).ravel().astype(jnp.uint32)


def _mixed(word: jax.Array) -> jax.Array:
    """Returns a word whose bits each depend on all bits of another one; no two words share it."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
