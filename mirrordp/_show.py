"""Short descriptions of objects, for a prompt and for a notebook."""

import html
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mirrordp.types import PyTree

_MOST_ARRAYS = 4
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)


def escaped(text: str) -> str:
    """Escapes text for HTML and SVG, and spells out characters that are invisible or turn text.

    >>> escaped('<b>"\\u202e')
    '&lt;b&gt;&quot;\\\\u202e'
    """
    shown = _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    # A lone surrogate, which JSON may hold, cannot be written as UTF-8.
    return html.escape(shown.encode("utf-8", "backslashreplace").decode("utf-8"))


def array_kinds(arrays: "PyTree", rows: str | None = None) -> list[tuple[str, str]]:
    """Returns the name and the kind of each array, such as ("x", "float32[200, 5]").

    Args:
        arrays: a tree of arrays with one common leading axis. Their content is never shown.
        rows: what to show in place of the length of that axis, which may be a secret.
    """
    import jax

    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        first, *others = leaf.shape
        sizes = (first if rows is None else rows, *others)
        found.append((name, f"{leaf.dtype}[{', '.join(map(str, sizes))}]"))
    return found


def listed_kinds(kinds: list[tuple[str, str]]) -> str:
    """Joins the first few kinds into one line, and says how many more there are."""
    shown = [f"{name}: {kind}" if name else kind for name, kind in kinds[:_MOST_ARRAYS]]
    more = len(kinds) - _MOST_ARRAYS
    return ", ".join([*shown, f"{more} more arrays"] if more > 0 else shown)


def table(title: str, rows: Iterable[tuple[str, str]], note: str = "") -> str:
    """Returns a heading, names with values, and a note as HTML with every text escaped."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escaped(name)}</th>'
        f'<td style="text-align:left">{escaped(value)}</td></tr>'
        for name, value in rows
    )
    end = f"<p>{escaped(note)}</p>" if note else ""
    return f"<div><b>{escaped(title)}</b><table>{lines}</table>{end}</div>"
