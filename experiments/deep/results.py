"""Where result lines are, how commands extend them, and which of them speak for a settings file."""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from experiments import records
from experiments.deep.settings import CONFIGS, Settings, files_of, line_id, load

RESULTS = Path(__file__).parents[1] / "results" / "deep"

# What a line must have for a table: its keys, and the keys of those.
_NEEDED: dict[str, tuple[str, ...]] = {
    "settings": ("dataset", "algorithm", "learning_rate"),
    "data": ("label", "is_complete", "num_private"),
    "privacy": ("epsilon_rdp", "epsilon_pld", "delta", "noise_multiplier", "num_steps"),
    "curve": ("step",),
    "final": (),
    "made_by": ("machine",),
}
_NEEDED_PLAIN = ("kind", "config", "seed", "seconds")

_NAME = re.compile(
    r"(?P<dataset>[^/]+)/(?P<family>.*?)-?(?P<algorithm>cold|warm|pda)"
    r"-(?P<level>[se][\d.]+)(?:-(?P<variant>.+))?"
)


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """Where a settings file belongs, by its name `DATASET/[FAMILY-]ALGORITHM-LEVEL[-VARIANT]`.

    Attributes:
        dataset: data set.
        family: runs that are not of the paper's Table 2: `public-vocabulary`, `other-text`.
        level: `s` and σ, or `e` and ε.
        algorithm: `cold`, `warm` or `pda`.
        variant: what differs from the run of the table; empty for the run itself.
    """

    dataset: str
    family: str
    level: str
    algorithm: str
    variant: str = ""

    @classmethod
    def of(cls, name: str) -> "Place | None":
        """The place of a settings file, None for a name of another form."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(**{key: value or "" for key, value in match.groupdict().items()})


def file_of(folder: Path, config: str) -> Path:
    """The result file of a configuration: one per data set."""
    return folder / f"{Path(config).parts[0]}.jsonl"


def by_id(folder: Path) -> dict[str, records.Record]:
    """All result lines, the first one where a run was recorded twice."""
    return {line_id(line): line for line in reversed(collect(folder, warn=True)[0])}


def collect(folder: Path, *, warn: bool = False) -> tuple[list[records.Record], list[str]]:
    """All result lines, each run once, and what is wrong with the lines that were left out.

    Args:
        folder: of the result files.
        warn: also warn of what is wrong.
    """
    found: dict[str, records.Record] = {}
    problems: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lines = records.read(path)
        problems += [str(warning.message) for warning in caught]
        for line in lines:
            missing = _missing(line)
            if missing:
                problems.append(
                    f"{path.name}: a line {str(line.get('id', 'without id'))!r} has no {missing}; "
                    "it is skipped and its run counts as not done. Delete it to silence this."
                )
            else:
                found.setdefault(line_id(line), line)
    if warn:
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
    return list(found.values()), problems


def _missing(line: records.Record) -> str:
    """The first thing that a line lacks; empty where it has everything."""
    for key in _NEEDED_PLAIN:
        if key not in line:
            return key
    for key, below in _NEEDED.items():
        if not isinstance(line.get(key), dict):
            return key
        for name in below:
            if name not in line[key]:
                return f"{key}.{name}"
    return ""


def configurations(folder: Path = CONFIGS) -> dict[str, Settings]:
    """All settings files by name, without those that others extend."""
    found = map(load, files_of(sorted(path for path in folder.iterdir() if path.is_dir())))
    return {settings.name: settings for settings in found}


def final_lines(lines: Sequence[records.Record], settings: Settings) -> list[records.Record]:
    """Final runs of exactly these settings, by seed.

    A line of the same file with other settings, as they were before another sweep, is not one.
    """
    identity = settings.identity()
    found = [line for line in lines if line["kind"] == "final" and line["settings"] == identity]
    return sorted(found, key=lambda line: line["seed"])


def sweep_lines(lines: Sequence[records.Record], settings: Settings) -> list[records.Record]:
    """Sweep runs that differ from the settings in learning rate and K only, in order of both."""
    wanted = _fixed(settings.identity())
    found = [
        line for line in lines if line["kind"] == "sweep" and _fixed(line["settings"]) == wanted
    ]
    return sorted(found, key=_searched)


def same_start(line: records.Record, other: records.Record) -> bool:
    """Whether two runs began at the same pre-trained parameters.

    On a GPU the same seed does not pre-train to the same parameters in another process, and early
    stopping makes the difference larger: a comparison of such runs also compares their starts.
    """
    starts = [
        {key: value for key, value in one.get("warm_start", {}).items() if key != "seconds"}
        for one in (line, other)
    ]
    return starts[0] == starts[1]


def _fixed(identity: dict) -> dict:
    return {key: value for key, value in identity.items() if key not in ("learning_rate", "decay")}


def _searched(line: records.Record) -> tuple[float, float]:
    return line["settings"]["learning_rate"], line["settings"].get("decay") or 0.0
