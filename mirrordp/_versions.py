"""Versions of what decides the outcome of a run."""

import contextlib
import importlib.metadata
import platform

VERSION = "0.3.0"
LIBRARIES = ("mirrordp", "jax", "jaxlib", "optax", "jax-privacy", "dp-accounting", "numpy")


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a run does."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"python": platform.python_version()}
