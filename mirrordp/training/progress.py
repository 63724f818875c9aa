"""A line that says how far a run is: steps per second, ε so far, and the time that is left.

`with_progress` goes around the iterator of `train` or `train_sweep` and passes on what it yields.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from mirrordp import _rounding, _validate
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.training.step import TrainInfo

Yielded = TypeVar("Yielded", bound=tuple[Any, Any])

# Seconds between two lines, on a terminal and elsewhere.
_ON_TERMINAL, _ELSEWHERE = 1.0, 10.0
# ε takes a fraction of a second to compute, and at most this share of the time is spent on it.
_ACCOUNTING_SHARE = 0.05


def with_progress(
    run: Iterator[Yielded], mechanism: Mechanism, *, delta: float, file: TextIO | None = None
) -> Iterator[Yielded]:
    """Yields what `run` yields, and shows how far it is.

    On a terminal this is a bar that moves; elsewhere it is a plain line every ten seconds or more,
    and one at the end:

        step 400 of 1,000, 12.5 steps/s, ε = 2.445 of 4.069 at δ = 1e-05, 00:48 left

    The first number of ε is the cost of the run so far, by the mechanism's accountant; the second
    one is the cost of all steps that the mechanism was made for. Other runs that a ledger or a
    budget has seen are not part of it, and in a sweep it is the cost of one run. The rate counts
    from the first yield on. It so leaves out compilation, except where a run is resumed from a
    checkpoint and the first yield comes before it.

    The line is meant for the operator, because how long a step takes may depend on private batches.

    Args:
        run: the iterator that `mirrordp.train` or `mirrordp.train_sweep` returned.
        mechanism: the mechanism of the run's step.
        delta: δ.
        file: where to write; standard error by default.

    Returns:
        An iterator over the same values.
    """
    _validate.instance_of(Mechanism, mechanism=mechanism)
    # Before the first step, so that a δ that cannot be accounted for costs no privacy.
    planned = mechanism.epsilon(delta)
    return _shown(run, _Line(mechanism, delta, planned), sys.stderr if file is None else file)


def _shown(run: Iterator[Yielded], line: "_Line", file: TextIO) -> Iterator[Yielded]:
    on_terminal = file.isatty()
    every = _ON_TERMINAL if on_terminal else _ELSEWHERE
    due = -math.inf
    with contextlib.ExitStack() as stack:
        if hasattr(run, "close"):
            # A run that is left early closes its books at once.
            stack.enter_context(contextlib.closing(run))  # pyright: ignore[reportArgumentType]
        bar = stack.enter_context(
            tqdm(
                total=1,  # until the first yield tells
                desc="before the first steps",
                bar_format="{percentage:3.0f}%|{bar:20}| {desc}",
                file=file,
                disable=not on_terminal,
            )
        )
        for yielded in run:
            infos = yielded[1] if isinstance(yielded[1], list) else [yielded[1]]
            done, total = infos[0].step, infos[0].num_steps
            began = time.monotonic()
            line.saw(done, began)
            if began >= due or done == total:
                text = line.text(infos)
                due = began + max(every, (time.monotonic() - began) / _ACCOUNTING_SHARE)
                if on_terminal:
                    bar.n, bar.total = done, total
                    bar.set_description_str(text)
                else:
                    print(text, file=file, flush=True)
            yield yielded


class _Line:
    """The text of the line, and the times from which it tells how fast a run is."""

    def __init__(self, mechanism: Mechanism, delta: float, planned: float):
        self._mechanism, self._delta, self._planned = mechanism, delta, planned
        self._first: tuple[int, float] | None = None
        self._rate: float | None = None

    def saw(self, step: int, now: float) -> None:
        """Notes when a step was done."""
        if self._first is None:
            self._first = step, now
        elif now > self._first[1]:
            self._rate = (step - self._first[0]) / (now - self._first[1])

    def text(self, infos: list[TrainInfo]) -> str:
        """Returns the line; computes ε, which takes a moment."""
        done, total = infos[0].step, infos[0].num_steps
        charged = max(info.charged_steps for info in infos)
        so_far, planned = (
            _rounding.upwards(epsilon)
            for epsilon in (self._mechanism.epsilon(self._delta, num_steps=charged), self._planned)
        )
        parts = [f"step {done:,} of {total:,}"]
        if self._rate:
            parts.append(f"{self._rate:.{1 if self._rate >= 10 else 3}f} steps/s")
        each = " for each run" if len(infos) > 1 else ""
        parts.append(f"ε = {so_far} of {planned} at δ = {self._delta:g}{each}")
        if self._rate and done < total:
            parts.append(f"{tqdm.format_interval((total - done) / self._rate)} left")
        return ", ".join(parts)
