"""Marked sections of a README, which commands rewrite from their results."""

MARKERS = "<!-- {name}: begin -->", "<!-- {name}: end -->"


def replaced(text: str, name: str, content: str) -> str:
    """Returns `text` with `content` between the markers of section `name`."""
    begin, end = (marker.format(name=name) for marker in MARKERS)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected the markers {begin!r} and {end!r} once each; add them.")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}{end}{rest.split(end)[1]}"
