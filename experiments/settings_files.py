"""Settings files: TOML in, nested dictionaries out.

A file may name another one in `extends`, whose values it overrides.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """Settings that cannot be meant as they are."""


def read(path: Path, tables: Iterable[str]) -> dict[str, Any]:
    """Reads a settings file together with the files that it extends.

    Args:
        path: the file.
        tables: names of tables that are merged value by value; anything else is replaced as a
            whole.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path.name} is not TOML: {error}.") from error
    base = values.pop("extends", None)
    if base is None:
        return values
    below = read(path.parent / base, tables)
    merged = below | values
    for key in tables:
        if isinstance(below.get(key), dict) and isinstance(values.get(key), dict):
            merged[key] = below[key] | values[key]
    return merged
