"""Where result lines are, and how commands read and extend them."""

from pathlib import Path

from experiments import records

RESULTS = Path(__file__).parents[1] / "results" / "deep"


def file_of(folder: Path, config: str) -> Path:
    """The result file of a configuration: one per data set."""
    return folder / f"{Path(config).parts[0]}.jsonl"


def by_id(folder: Path) -> dict[str, records.Record]:
    """All result lines, the first one where a run was recorded twice."""
    found: dict[str, records.Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in records.read(path):
            found.setdefault(str(record.get("id")), record)
    return found
