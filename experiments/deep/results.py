"""Where result lines are, how commands extend them, and which of them speak for a settings file."""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import records
from experiments.deep.settings import CONFIGS, DeepSettings, files_of, line_id, load

RESULTS = Path(__file__).parents[1] / "results" / "deep"

# What a line must have for tables and figures: its keys and their types.
_NUMBER = (int, float)
_NEEDED: dict[str, Any] = {
    "kind": str,
    "config": str,
    "seed": int,
    "seconds": _NUMBER,
    "settings": {"dataset": str, "algorithm": str, "learning_rate": _NUMBER},
    "data": {"label": str, "is_complete": bool, "num_private": int, "not_covered": list},
    "privacy": {
        "epsilon_rdp": _NUMBER,
        "epsilon_pld": _NUMBER,
        "delta": _NUMBER,
        "noise_multiplier": _NUMBER,
        "num_steps": int,
        "adjacency": str,
        "unit": str,
    },
    "warm_start": {},
    "curve": {"step": list},
    "final": {},
    "made_by": {"machine": {}, "packages": {}},
}

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
        """Returns the place of a settings file, or None for a name of another form."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(**{key: value or "" for key, value in match.groupdict().items()})


def file_of(folder: Path, config: str) -> Path:
    """Returns the result file of a configuration: one per data set."""
    return folder / f"{Path(config).parts[0]}.jsonl"


def by_id(folder: Path) -> dict[str, records.Record]:
    """Returns all result lines by the run they belong to."""
    return {line_id(line): line for line in collect(folder, warn=True)[0]}


def collect(folder: Path, *, warn: bool = False) -> tuple[list[records.Record], list[str]]:
    """Returns the last line of each run, and what is wrong with the lines left out.

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
                    f"{path.name}: a line {str(line.get('id', 'without id'))!r} has no usable "
                    f"{missing}; it is skipped and its run counts as not done. Delete it to "
                    "silence this."
                )
            else:
                found[line_id(line)] = line
    if warn:
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
    return list(found.values()), problems


def _missing(line: records.Record) -> str:
    """Returns the first thing that a line lacks or has in another form; empty if there is none."""
    return (
        _misshaped(line, _NEEDED)
        or next((f"final.{key}" for key, v in line["final"].items() if not _is_value(v)), "")
        or next((f"curve.{key}" for key in line["curve"] if not _is_curve(line, key)), "")
    )


def _misshaped(values: dict[str, Any], needed: dict[str, Any]) -> str:
    for key, kind in needed.items():
        value = values.get(key)
        if isinstance(kind, dict):
            if not isinstance(value, dict):
                return key
            if below := _misshaped(value, kind):
                return f"{key}.{below}"
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return key
    return ""


def _is_value(value: Any) -> bool:
    """Returns whether this is a number, or null for one that is not finite."""
    return value is None or (isinstance(value, _NUMBER) and not isinstance(value, bool))


def _is_curve(line: records.Record, key: str) -> bool:
    values, steps = line["curve"][key], line["curve"]["step"]
    return isinstance(values, list) and len(values) == len(steps) and all(map(_is_value, values))


def configurations(folder: Path = CONFIGS) -> dict[str, DeepSettings]:
    """Returns all settings files by name, without those that others extend."""
    found = map(load, files_of([folder]))
    return {settings.name: settings for settings in found}


def final_lines(lines: Sequence[records.Record], settings: DeepSettings) -> list[records.Record]:
    """Returns the final runs of exactly these settings, by seed.

    A line of the same file with other settings, as they were before another sweep, is not one.
    """
    identity = settings.identity()
    found = [line for line in lines if line["kind"] == "final" and line["settings"] == identity]
    return sorted(found, key=lambda line: line["seed"])


def own_seeds(lines: Sequence[records.Record], settings: DeepSettings) -> list[records.Record]:
    """Returns those final runs on one data set that have the settings file's own seeds.

    Runs of further seeds, made to pair an ablation, would make the algorithms of one table means of
    different warm starts. All count while the file's own seeds are not complete.
    """
    own = [line for line in lines if line["seed"] in settings.seeds]
    return own if {line["seed"] for line in own} >= set(settings.seeds) else list(lines)


def sweep_lines(lines: Sequence[records.Record], settings: DeepSettings) -> list[records.Record]:
    """Returns the sweep runs that differ in learning rate and K only, in order of both."""
    wanted = _fixed(settings.identity())
    found = [
        line for line in lines if line["kind"] == "sweep" and _fixed(line["settings"]) == wanted
    ]
    return sorted(found, key=_searched)


def same_start(line: records.Record, other: records.Record) -> bool:
    """Returns whether two runs began at the same pre-trained parameters.

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
