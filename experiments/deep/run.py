"""`python -m experiments run CONFIG...`: the final runs of settings files.

A run that has its line in the results is skipped, so an interrupted command can be repeated.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from experiments import datasets, records
from experiments.deep import results
from experiments.deep.settings import DeepSettings, SettingsError, files_of, load, point_id
from experiments.deep.training import Loaded, WarmStarts, run_points
from mirrordp.report import upwards


class OutOfTime(Exception):
    """Raised when the next run would not end within the time that was given."""


@dataclasses.dataclass
class Session:
    """What the runs of one command share: data, warm starts, results, time.

    Attributes:
        folder: of the result lines.
        read: gives the data of settings, with or without a holdout.
        deadline: when to stop, by `time.monotonic`; None for never.
        quiet: no progress.
        max_steps: cut every run short, for tests of the machinery.
        warm_starts: folder of pre-trained parameters.
        shared: other work runs on the same machine.
    """

    folder: Path
    read: Callable[[DeepSettings, int], datasets.Prepared]
    deadline: float | None = None
    quiet: bool = False
    max_steps: int | None = None
    warm_starts: Path | None = None
    shared: bool = False

    def __post_init__(self):
        self._loaded: dict = {}
        self._warm_starts = WarmStarts(self.warm_starts)
        self._slowest: dict = {}
        self._compiled: set[tuple[str, str]] = set()

    def data(self, settings: DeepSettings, kind: str) -> Loaded:
        """Returns the data of a sweep or of final runs; one data set is in memory at a time."""
        holdout = settings.holdout if kind == "sweep" else 0
        key = (settings.dataset, holdout, settings.vocabulary, settings.public_text)
        if key not in self._loaded:
            self._loaded = {key: Loaded.of(self.read(settings, holdout))}
        return self._loaded[key]

    def lines(
        self, points: Sequence[tuple[DeepSettings, int]], *, kind: str
    ) -> list[records.Record]:
        """Returns the result lines of points and computes those that are missing.

        What a sweep compares begins at one point: where some of its lines are missing, those that
        began at another warm start than the one at hand are made anew with them.
        """
        data = self.data(points[0][0], kind)
        ids = [
            point_id(
                settings,
                kind=kind,
                seed=seed,
                num_private=len(data.private),
                label=data.prepared.label,
            )
            for settings, seed in points
        ]
        there = results.by_id(self.folder)
        if kind == "sweep" and not set(ids) <= set(there):
            self._check_time(0.0)
            for (settings, seed), name in zip(points, ids, strict=True):
                if name in there:
                    _, start = self._warm_starts.get(settings, data, seed)
                    if not results.same_start(there[name], {"warm_start": start}):
                        del there[name]
        todo = [point for point, name in zip(points, ids, strict=True) if name not in there]
        for group in _groups(todo):
            there |= {line["id"]: line for line in self._compute(group, data, kind)}
        return [there[name] for name in ids]

    def _compute(self, group, data: Loaded, kind: str) -> list[records.Record]:
        settings, seed = group[0]
        sort = (settings.dataset, settings.algorithm, len(group))
        expected = self._slowest.get(sort, 0.0)
        self._check_time(expected)
        what = f"{settings.name} η={settings.learning_rate:g}"
        if settings.decay is not None:
            what += f" K={settings.decay:g}"
        what += f" seed {seed}" if len(group) == 1 else f" and {len(group) - 1} more"
        begun = time.monotonic()
        with tqdm(desc=what, unit="step", disable=self.quiet or not sys.stderr.isatty()) as bar:

            def on_progress(step: int, total: int) -> None:
                bar.total = total
                bar.update(step - bar.n)

            lines = run_points(
                self._filled(group, kind),
                data,
                self._warm_starts,
                kind=kind,
                on_progress=on_progress,
                max_steps=self.max_steps,
                shared=self.shared,
            )[: len(group)]
        for line in lines:
            records.append(results.file_of(self.folder, settings.name), line)
            if not self.quiet:
                print(_summary(line), flush=True)
        self._slowest[sort] = max(expected, 1.1 * (time.monotonic() - begun))
        return lines

    def _check_time(self, seconds: float) -> None:
        """Raises if fewer than these seconds are left."""
        if self.deadline is not None and time.monotonic() + seconds > self.deadline:
            raise OutOfTime

    def _filled(self, group, kind: str):
        """Returns a full group if the program for groups of that size is compiled already.

        A smaller group would be another program to compile, which takes longer than to train the
        last run of the group once more.
        """
        settings = group[0][0]
        if len(group) == settings.together:
            self._compiled.add((settings.name, kind))
        if (settings.name, kind) not in self._compiled:
            return group
        return [*group, *[group[-1]] * (settings.together - len(group))]


def _groups(points: Sequence[tuple[DeepSettings, int]]) -> Iterable[list[tuple[DeepSettings, int]]]:
    """Splits points into groups of neighbours that train together, as the settings say."""
    group: list[tuple[DeepSettings, int]] = []
    for settings, seed in points:
        if group and (group[0][0].name != settings.name or len(group) >= settings.together):
            yield group
            group = []
        group.append((settings, seed))
    if group:
        yield group


def _summary(line: records.Record) -> str:
    values = ", ".join(
        f"{name.replace('_', ' ')} {value:.4f}" if value is not None else f"{name} not finite"
        for name, value in line["final"].items()
    )
    settings = line["settings"]
    decay = f" K={settings['decay']:g}" if settings.get("decay") else ""
    return (
        f"{line['config']} η={settings['learning_rate']:g}{decay} seed {line['seed']} "
        f"[{line['data']['label']}] ε={upwards(line['privacy']['epsilon_pld'])}: {values} "
        f"({line['seconds']:.0f} s)"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `run` and `sweep` have in common."""
    parser.add_argument(
        "configs", nargs="+", type=Path, metavar="CONFIG", help="a TOML file, or a folder of them"
    )
    parser.add_argument("--data-root", type=Path, help="folder of the data (or MIRRORDP_DATA)")
    parser.add_argument(
        "--synthetic", action="store_true", help="made-up data, to try the machinery"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help=f"folder of results ({results.RESULTS.relative_to(results.RESULTS.parents[2])}); "
        "needed with --synthetic",
    )
    parser.add_argument(
        "--max-seconds", type=float, help="begin no run that would not end in this time"
    )
    parser.add_argument("--max-steps", type=int, help="cut every run short (needs --synthetic)")
    parser.add_argument(
        "--warm-starts",
        type=Path,
        help="folder that keeps pre-trained parameters",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="other work runs on this machine: record that the seconds are no measure of cost",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def open_session(arguments: argparse.Namespace) -> Session:
    """Makes a session from parsed options."""
    if arguments.max_steps is not None and not arguments.synthetic:
        raise SettingsError("--max-steps is for --synthetic data: a cut run is no result.")
    if arguments.max_steps is not None and arguments.max_steps < 1:
        raise SettingsError(f"--max-steps must be at least 1, got {arguments.max_steps}.")
    if arguments.synthetic and arguments.results is None:
        raise SettingsError(
            "--synthetic needs --results FOLDER: made-up runs do not belong among the results."
        )
    folder = arguments.results or results.RESULTS
    _check_can_be_written(folder)

    def read(settings: DeepSettings, holdout: int) -> datasets.Prepared:
        if arguments.synthetic:
            text = settings.dataset == "wikitext2"
            return datasets.synthetic(
                settings.dataset,
                num_private=max(1024, 2 * settings.batch_size),
                num_validation=64 if holdout or text else 0,
            )
        text = {"vocabulary": settings.vocabulary, "public_text": settings.public_text}
        return datasets.prepare(
            settings.dataset,
            arguments.data_root,
            holdout=holdout,
            **(text if settings.dataset == "wikitext2" else {}),
        )

    deadline = None
    if arguments.max_seconds is not None:
        deadline = time.monotonic() + arguments.max_seconds
    return Session(
        folder,
        read,
        deadline,
        quiet=arguments.quiet,
        max_steps=arguments.max_steps,
        warm_starts=arguments.warm_starts or folder / "warm_starts",
        shared=arguments.shared,
    )


def _check_can_be_written(folder: Path) -> None:
    """Raises if a line could not be kept, before hours are spent on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"expected a folder that can be written for --results, got {folder} ({error.strerror})."
        ) from error


def guarded(work: Callable[[], None]) -> int:
    """Runs a command; a mistake of the caller ends in one line and not in a traceback."""
    try:
        work()
    except (SettingsError, datasets.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OutOfTime:
        print("stopped before --max-seconds; the same command continues.", flush=True)
        return 3
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the final runs of the given settings."""
    parser = argparse.ArgumentParser(prog="python -m experiments run", description=__doc__)
    add_options(parser)
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the settings")
    arguments = parser.parse_args(argv)

    def work() -> None:
        configs = [load(path) for path in files_of(arguments.configs)]
        if arguments.seeds:
            configs = [dataclasses.replace(one, seeds=tuple(arguments.seeds)) for one in configs]
        session = open_session(arguments)
        for settings in configs:
            session.lines([(settings, seed) for seed in settings.seeds], kind="final")

    return guarded(work)
