"""Mutation testing: breaks the library on purpose, one line at a time, and looks who notices.

    python tests/mutate.py --sample 40 --seed 0 --out mutants.jsonl mirrordp/privacy

A mutant is a copy of the package in which one expression is changed: a comparison, an arithmetic
or boolean operator, a constant, a condition, or a `raise` that is left out. The tests that
`TESTS` names for its file run against the copy; a mutant that passes them all survives, and is
either equivalent to the original or a gap in the tests. This takes about a minute per mutant, so it
is not part of the suite; run it before and after a change of the tests, with the same seed.
"""

import argparse
import ast
import collections
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WINGS = ["mirrordp/privacy", "mirrordp/spending", "mirrordp/training"]

# For the files of a folder, or for one file, the tests that are to notice.
TESTS = {
    "mirrordp/privacy/accounting.py": ["test_accounting.py"],
    "mirrordp/privacy/clipping.py": ["test_clipping.py", "test_sums.py"],
    "mirrordp/privacy/ghost": ["ghost", "test_sums.py"],
    "mirrordp/privacy/mechanism.py": ["test_mechanism.py"],
    "mirrordp/privacy/noise.py": ["test_noise.py", "test_secure.py"],
    "mirrordp/privacy/sampling.py": ["test_sampling.py"],
    "mirrordp/privacy/secure.py": ["test_secure.py"],
    "mirrordp/privacy/sums.py": ["test_sums.py"],
    "mirrordp/privacy/trainable.py": ["test_clipping.py", "test_training.py"],
    "mirrordp/privacy/_isolation.py": ["test_isolation.py"],
    "mirrordp/privacy/_convolutions.py": ["test_convolutions.py"],
    "mirrordp/privacy": ["test_clipping.py", "test_training.py"],
    "mirrordp/spending/budget.py": ["test_budget.py"],
    "mirrordp/spending": ["test_ledger.py", "test_budget.py", "test_checkpoint.py"],
    "mirrordp/training/bookkeeping.py": ["test_books.py", "test_checkpoint.py"],
    "mirrordp/training/checkpoint.py": ["test_checkpoint.py", "test_programs.py"],
    "mirrordp/training/exact.py": ["test_mirror_descent.py"],
    "mirrordp/training/federated.py": ["test_federated.py"],
    "mirrordp/training/sweep.py": ["test_sweeps.py"],
    "mirrordp/training": ["test_training.py", "test_federated.py", "test_sweeps.py"],
}

_SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Yields the line, a description and the changed tree of every mutant."""
    for number, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            other = copy.deepcopy(tree)
            twin = next(n for i, n in enumerate(ast.walk(other)) if i == number)
            change(twin)
            yield getattr(node, "lineno", 0), what, ast.fix_missing_locations(other)


def _changes(node: ast.AST) -> Iterator[tuple[str, collections.abc.Callable]]:
    def operator(twin):
        if isinstance(twin, ast.Compare):
            twin.ops[0] = _SWAPS[type(twin.ops[0])]()
        else:
            twin.op = _SWAPS[type(twin.op)]()

    def negate(twin):
        twin.test = ast.UnaryOp(ast.Not(), twin.test)

    def constant(twin):
        twin.value = not twin.value if isinstance(twin.value, bool) else twin.value + 1

    def no_raise(twin):
        twin.body[-1] = ast.Pass()

    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield f"{type(node.ops[0]).__name__} swapped", operator
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPS:
        yield f"{type(node.op).__name__} swapped", operator
    if isinstance(node, ast.If | ast.IfExp):
        yield "condition negated", negate
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        yield "raise left out", no_raise
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield f"{node.value!r} changed", constant


def tests_of(path: str) -> list[str]:
    """Returns the tests for a file: those of the longest entry of `TESTS` that covers it."""
    entry = max((e for e in TESTS if path == e or path.startswith(f"{e}/")), key=len)
    return [f"tests/{name}" for name in TESTS[entry]]


def outcome(path: str, source: str, seconds: float) -> str:
    """Runs the tests of a file against a copy of the package with this source in its place."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "mirrordp", Path(folder) / "mirrordp")
        (Path(folder) / path).write_text(source)
        for name in ("tests", "examples", "experiments", "pyproject.toml", "README.md", "docs"):
            (Path(folder) / name).symlink_to(ROOT / name)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *tests_of(path)], cwd=folder, timeout=seconds,
                env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "killed (time ran out)"
    return "survived" if done.returncode == 0 else "killed"


def main() -> int:
    """Prints a line per mutant and the share that was killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", nargs="*", default=WINGS, help="folders and files")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="decides which ones")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per mutant")
    parser.add_argument("--out", type=Path, help="a file for one JSON line per mutant")
    options = parser.parse_args()
    files = [
        file
        for place in options.where
        for file in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]
    ]
    every = [
        (str(file.relative_to(ROOT)), line, what, tree)
        for file in files
        if file.name != "__init__.py"
        for line, what, tree in mutants(ast.parse(file.read_text()))
    ]
    chosen = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    counts: collections.Counter[str] = collections.Counter()
    for path, line, what, tree in chosen:
        began = time.monotonic()
        found = outcome(path, ast.unparse(tree), options.timeout)
        counts[found] += 1
        print(f"{found:22} {path}:{line} {what} [{time.monotonic() - began:.0f} s]", flush=True)
        if options.out is not None:
            facts = {"path": path, "line": line, "what": what, "outcome": found}
            with options.out.open("a") as out:
                out.write(json.dumps(facts) + "\n")
    print(f"{len(every)} mutants, {len(chosen)} tried: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
