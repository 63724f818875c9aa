"""Result files: one JSON object per line, each with what is needed to trust and repeat it.

A finished unit of work is one line. Appending is the only way to write, so an interrupted run loses
at most its last line, and a damaged line is reported and skipped instead of hiding the others.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def fingerprint(value: Any) -> str:
    """Returns twelve hexadecimal digits that identify a JSON-serialisable value."""
    canonical = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def append(path: Path, record: Record) -> None:
    """Appends one record as one line, and first ends a line that a crash cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, allow_nan=False) + "\n"
    with open(path, "a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """Returns the records of `path`, with a warning for each line that is not a JSON object."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_refuse)
        except ValueError as error:
            record = error
        if isinstance(record, dict):
            found.append(record)
        else:
            warnings.warn(
                f"{path.name}, line {number}: expected one JSON object, got {line[:40]!r}; "
                "the line is skipped and its work counts as not done. Delete it to silence this.",
                stacklevel=2,
            )
    return found


def _refuse(constant: str) -> None:
    # `append` never writes NaN or Infinity, and JSON does not have them.
    raise ValueError(f"{constant} is not JSON")


def provenance(packages: Iterable[str], sources: Iterable[Path], device: str) -> Record:
    """Returns which code, which package versions and which kind of machine made a record.

    Args:
        packages: distributions whose versions matter; one that is not installed is recorded as
            null.
        sources: files whose contents decide the numbers; their common hash also identifies code
            that was run from a working tree without a commit.
        device: what computed, in words.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return {
        "commit": _commit(),
        "source": digest.hexdigest()[:12],
        "python": platform.python_version(),
        "packages": {name: _installed_version(name) for name in packages},
        "machine": {
            "system": sys.platform,
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "device": device,
        },
    }


def keep_provenance(path: Path, about: Record) -> str:
    """Appends a provenance that the file does not have yet; returns what lines refer to it by."""
    name = fingerprint(about)
    if name not in {line["id"] for line in read(path)}:
        append(path, {"id": name, **about})
    return name


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit, marked if the tree differs from it, or None without one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return result.stdout.strip() or None
