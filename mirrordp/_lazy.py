"""Packages that import what they export when it is first asked for.

`mirrordp account` needs the accountant alone, and JAX takes seconds to import. A package therefore
lists what it exports once, under `if TYPE_CHECKING:`, where editors and type checkers read it, and
ends with

    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazily(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package (PEP 562).

    Args:
        package: the package's `__name__`.
        file: its `__file__`; the imports under `if TYPE_CHECKING:` in it are the exported names.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    sources = {
        alias.asname or alias.name: (statement.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
    modules = {found.name for found in pkgutil.iter_modules([str(Path(file).parent)])}

    def get(name: str) -> Any:
        # Modules first: `from mirrordp import mirror` asks this function for the module itself.
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in sources:
            module, original = sources[name]
            return getattr(importlib.import_module(module), original)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*sources, *modules})

    return get, names, sorted(sources)
