"""`mirrordp compare`."""

import argparse
from pathlib import Path
from typing import Any

from mirrordp.cli._common import add_command, interruptible, library_errors, print_json
from mirrordp.cli.report import add_html, print_written, write_all


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "compare",
        _run,
        "show several runs in one table and one privacy-utility plot",
        "compare run-1 run-2 --html compare.html --png compare.png",
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="folders with report.json"
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="quantity to compare by (default: the first that all runs have)",
    )
    add_html(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the plot to this file")


def _run(arguments: argparse.Namespace) -> int:
    from mirrordp.report import Comparison, comparison_page

    with library_errors(), interruptible():
        comparison = Comparison.read(arguments.folders, arguments.metric)
        wrote = write_all(
            [
                (arguments.html, lambda: comparison_page(comparison).encode()),
                (arguments.png, comparison.figure),
            ]
        )
    if arguments.json:
        print_json(comparison.to_dict() | {"wrote": wrote})
    else:
        print(comparison.text())
        print_written(wrote)
    return 0
