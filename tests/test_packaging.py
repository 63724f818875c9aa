import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mirrordp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("block", "lines"), list(zip(BLOCKS, (10, 20), strict=True)))
def test_readme_code_is_short(block, lines):
    assert sum(bool(line.strip()) for line in block.splitlines()) <= lines


def test_readme_has_the_two_commands():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/mirrordp demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest",
    ]


def test_version_is_stated_once_and_alike():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == mirrordp.__version__
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_exist():
    assert sorted(mirrordp.__all__) == sorted(set(mirrordp.__all__))
    assert all(hasattr(mirrordp, name) for name in mirrordp.__all__)


def test_no_file_names_this_machine():
    """Addresses and absolute paths of whoever wrote a file do not belong in the repository."""
    if not (ROOT / ".git").exists():
        # An unpacked archive: which of the files around it belong to it, only git could say.
        pytest.skip("an unpacked archive, in which git cannot list the repository's files")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    pattern = re.compile(rb"/(?:home|root|Users)/\w")
    suffixes = {".py", ".md", ".toml", ".yaml", ".json", ".jsonl", ".svg", ""}
    found = [
        name
        for name in listed.stdout.splitlines()
        if Path(name).suffix in suffixes
        and name != "tests/test_packaging.py"
        and (ROOT / name).is_file()
        and pattern.search((ROOT / name).read_bytes())
    ]
    assert found == []


def test_importing_the_library_prints_nothing():
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:mirrordp", "-c", "import mirrordp.cli"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == result.stderr == ""


@pytest.mark.parametrize("name", ["optax_only.py"])
def test_example_runs(name):
    """The others take longer; `.ci/run` runs all of them."""
    runpy.run_path(str(ROOT / "examples" / name))
