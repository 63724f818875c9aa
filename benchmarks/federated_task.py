"""The rows of a federated round, the same for every method, and the versions of what takes part.

This module needs NumPy alone, so that interpreters without JAX and without PyTorch can import it.
"""

import contextlib
import platform
from importlib import metadata

import numpy as np

ROWS, FEATURES, CLASSES = 32, 32, 10
VOCABULARY, LENGTH = 10_004, 21


def user_rows(model: str, num_users: int):
    """Makes the rows that every method trains on: 32 examples per user."""
    rng = np.random.default_rng(0)
    if model == "lstm":
        return rng.integers(1, VOCABULARY, (num_users, ROWS, LENGTH)).astype(np.int32)
    x = rng.normal(size=(num_users, ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, (num_users, ROWS)).astype(np.int32)}


def versions() -> dict:
    """Looks up the versions of Python and of the participating packages that are installed."""
    found = {"python": platform.python_version()}
    for name in ("mirrordp", "jax", "jaxlib", "numpy", "flwr", "ray", "pfl", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
