"""Marked sections of a README, which commands rewrite from their results."""

from pathlib import Path

MARKERS = "<!-- {name}: begin -->", "<!-- {name}: end -->"


def replaced(text: str, name: str, content: str) -> str:
    """Returns `text` with `content` between the markers of section `name`."""
    begin, end = (marker.format(name=name) for marker in MARKERS)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected the markers {begin!r} and {end!r} once each; add them.")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}{end}{rest.split(end)[1]}"


def publish(table: str, name: str, out: Path, readme: Path | None) -> None:
    """Prints a table, writes it to `out`, and puts it into section `name` of a README, if any."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    if readme is not None:
        whole = replaced(readme.read_text(encoding="utf-8"), name, table)
        readme.write_text(whole, encoding="utf-8")
