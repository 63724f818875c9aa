"""No import circles in `experiments` and `benchmarks`; import-linter checks `mirrordp` itself."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imports(root: Path, package: str) -> dict[str, set[str]]:
    """What each module of a package imports from it, imports inside functions included."""
    paths = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / package).rglob("*.py")
    }
    found = {}
    for name, path in paths.items():
        used: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                used |= inner & set(paths) or {node.module}
        found[name] = used & set(paths) - {name}
    return found


@pytest.mark.parametrize("package", ["experiments", "benchmarks"])
def test_a_package_has_no_import_circle(package):
    graph = imports(ROOT, package)
    assert len(graph) > 5
    graphlib.TopologicalSorter(graph).prepare()


def test_a_circle_through_a_function_is_found(tmp_path):
    package = tmp_path / "pair"
    package.mkdir()
    (package / "one.py").write_text("def f():\n    from pair import two\n")
    (package / "two.py").write_text("from pair.one import f\n")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports(tmp_path, "pair")).prepare()
