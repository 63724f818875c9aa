"""The versions of the libraries that decide the outcome of a run."""

VERSION = "0.9.0"
LIBRARIES = ("mirrordp", "jax", "jaxlib", "optax", "jax-privacy", "dp-accounting", "numpy")


def library_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that decide what a run does."""
    # Imported here, since `mirrordp --version` reads this file and should not wait for them.
    import contextlib
    import importlib.metadata
    import platform

    # An editable installation keeps the number that it was installed with; ours is in the code.
    found = {"mirrordp": VERSION}
    for name in LIBRARIES[1:]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"python": platform.python_version()}
