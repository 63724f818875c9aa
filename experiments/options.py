"""Types of command-line options, so that what cannot be meant is refused before hours of work."""

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Makes a parser of whole numbers that are not below `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return number

    return read


def add_result_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """Adds `--out`, the folder of the result files, and `--readme`, a file that shows the table."""
    parser.add_argument("--out", type=Path, default=results, help="folder of the result files")
    parser.add_argument("--readme", type=existing_file, help="rewrite the section of this file")


def existing_file(text: str) -> Path:
    """Parses the path of an existing file, which will be rewritten."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"expected a file that is there, got {text!r}")
    return path
