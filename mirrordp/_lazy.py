"""Packages that import their exports when they are first used.

`mirrordp account` needs only the accountant, and JAX takes seconds to import. A package therefore
lists its exports once, under `if TYPE_CHECKING:`, where editors and type checkers read them, and
ends with

    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
"""

from __future__ import annotations

import ast
import importlib
import os

# Not imported from typing: until the command line has started, Ctrl-C shows a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def lazily(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package (PEP 562).

    Args:
        package: the package's `__name__`.
        file: its `__file__`; the imports under `if TYPE_CHECKING:` in it are the exported names.
    """
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    sources = {
        alias.asname or alias.name: (statement.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }

    def get(name: str) -> Any:
        module, original = sources.get(name, (package, name))
        # An import from the package itself, such as `from mirrordp import mirror`, is a module.
        if module != package:
            return getattr(importlib.import_module(module), original)
        path = os.path.join(os.path.dirname(file), name)
        if os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py")):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        modules = (found.partition(".")[0] for found in os.listdir(os.path.dirname(file)))
        return sorted(
            {*sources, *(name for name in modules if name.isidentifier() and name[0] != "_")}
        )

    return get, names, sorted(sources)
