"""Keyed fingerprints of data, which are equal for equal data and useless without the key.

Anyone can confirm a guess of a record with a plain hash of the data set: hash the guess and
compare. HMAC-SHA-256 under a random key does not allow that. The key stays in a file that only its
owner can read.
"""

import hashlib
import hmac
import operator
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from mirrordp.spending import files as _files
from mirrordp.types import PyTree

KEY_FILE = "secret.key"
_CHUNK = 1 << 20


def make_key(folder: Path) -> bytes:
    """Returns the folder's key, which is drawn from the operating system if there is none yet."""
    if not (folder / KEY_FILE).exists():
        _files.write_atomically(
            folder / KEY_FILE, secrets.token_hex(32).encode(), mode=_files.PRIVATE_FILE
        )
    return read_key(folder)


def read_key(folder: Path) -> bytes:
    """Returns the folder's key.

    Raises:
        StorageError: if there is none.
    """
    path = folder / KEY_FILE
    try:
        key = bytes.fromhex(path.read_text())
        if len(key) == 32:
            return key
    except (OSError, ValueError):
        pass
    raise _files.StorageError(
        f"expected the key of the data fingerprint in {str(path)!r}, got a missing or damaged file."
        " Restore it from a copy; without it nobody can tell whether the data is the same."
    )


def of_file(key: bytes, path: str | os.PathLike[str]) -> str:
    """Returns the HMAC of a file's bytes."""
    digest = hmac.new(key, b"file", hashlib.sha256)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def of_arrays(key: bytes, arrays: PyTree) -> str:
    """Returns the HMAC of the paths, types, shapes and contents of a tree of arrays."""
    digest = hmac.new(key, b"arrays", hashlib.sha256)
    _feed(digest.update, arrays)
    return digest.hexdigest()


def of_seed(key: bytes, seed: int) -> str:
    """Returns the HMAC of a seed; the seed itself would give the noise away."""
    return hmac.new(key, b"seed" + str(operator.index(seed)).encode(), hashlib.sha256).hexdigest()


def of_text(parts: Mapping[str, str]) -> str:
    """Returns a plain hash of texts that are not secret, such as programs."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(f"{name}\0{parts[name]}\0".encode())
    return digest.hexdigest()


def _feed(update: Callable[[bytes], object], arrays: PyTree) -> None:
    # Imported here: a budget for a file needs neither, and JAX takes seconds to import.
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mirrordp.data import sources

    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = leaf if isinstance(leaf, sources.Column) else np.asarray(leaf)
        name = f"{jax.tree_util.keystr(path)} {leaf.dtype.name} {leaf.shape}\0"
        update(name.encode())
        # The same bytes in the same order, whether they are in memory or on disk.
        parts = (part for _, part in sources.chunks(leaf)) if sources.is_on_disk(leaf) else [leaf]
        for part in parts:
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            for start in range(0, len(flat), _CHUNK):
                update(flat[start : start + _CHUNK].tobytes())
