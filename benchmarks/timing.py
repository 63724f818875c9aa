"""Timing of several contenders side by side."""

import dataclasses
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass
class Contender:
    """A step to be timed: `run()` does one step and `wait()` waits for all of them."""

    framework: str
    method: str
    run: Callable[[], None]
    wait: Callable[[], None]
    compile_seconds: float | None
    peak_megabytes: float | None


def measure(contenders: list[Contender], *, rounds: int, seconds_per_round: float) -> list[float]:
    """Returns milliseconds per step of each contender: the median over rounds that alternate."""
    repeats = []
    for contender in contenders:
        for _ in range(2):
            contender.run()
        contender.wait()
        start = time.perf_counter()
        contender.run()
        contender.wait()
        once = time.perf_counter() - start
        repeats.append(max(1, min(200, round(seconds_per_round / once))))
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for number, contender in enumerate(contenders):
            start = time.perf_counter()
            for _ in range(repeats[number]):
                contender.run()
            contender.wait()
            times[number].append((time.perf_counter() - start) / repeats[number])
    return [1e3 * statistics.median(part) for part in times]
