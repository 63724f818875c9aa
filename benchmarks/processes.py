"""Memory and processor time of a process together with its descendants (Linux)."""

import contextlib
import os
from pathlib import Path


def tree_megabytes(pid: int) -> float:
    """Adds up the memory of a process and its descendants; a shared page counts once in all."""
    total = 0.0
    for entry in _descendants(pid):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{entry}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) / 1024
    return total


def tree_cpu_seconds(pid: int) -> float:
    """Adds up the processor time of a process and its living descendants.

    Other work on the machine distorts it less than it distorts the clock.
    """
    ticks = 0
    for entry in _descendants(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found
