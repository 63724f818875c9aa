"""`mirrordp report` and `mirrordp compare`: what stored reports say, as text, page or picture."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirrordp.cli._common import add_command
from mirrordp.report import ReportError, RunReport, write_atomically
from mirrordp.report.comparison import Comparison
from mirrordp.report.page import comparison_page, report_page


def add_report_commands(commands: Any) -> None:
    """Registers both."""
    report = add_command(
        commands,
        "report",
        _report,
        "what a run promises, as text or as a web page",
        "example: mirrordp report mirrordp-demo --html report.html",
    )
    report.add_argument(
        "folder", type=Path, metavar="DIR", help="a folder with report.json (demo and fit make one)"
    )
    report.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page that needs no network"
    )
    report.add_argument("--json", action="store_true", help="print one JSON object")

    compare = add_command(
        commands,
        "compare",
        _compare,
        "several runs in one table and one privacy-utility plot",
        "example: mirrordp compare run-1 run-2 --html compare.html --png compare.png",
    )
    compare.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="folders with report.json"
    )
    compare.add_argument(
        "--metric",
        metavar="NAME",
        help="quantity to compare by (default: the first that all runs have)",
    )
    compare.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page that needs no network"
    )
    compare.add_argument("--png", type=Path, metavar="FILE", help="write the plot")
    compare.add_argument("--json", action="store_true", help="print one JSON object")


def _report(arguments: argparse.Namespace) -> int:
    report = RunReport.read(arguments.folder)
    name = arguments.folder.absolute().name
    wrote = _write_all([(arguments.html, lambda: report_page(report, run=name).encode())])
    if arguments.json:
        print(json.dumps(report.to_dict() | {"wrote": wrote}, allow_nan=False))
    elif wrote:
        _say_written(wrote)
    else:
        print(report.privacy_card(), end="")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    comparison = Comparison.read(arguments.folders, arguments.metric)
    wrote = _write_all(
        [
            (arguments.html, lambda: comparison_page(comparison).encode()),
            (arguments.png, comparison.figure),
        ]
    )
    if arguments.json:
        print(json.dumps(comparison.to_dict() | {"wrote": wrote}, allow_nan=False))
        return 0
    print(comparison.text())
    _say_written(wrote)
    return 0


def _write_all(wanted: list[tuple[Path | None, Callable[[], bytes]]]) -> list[str]:
    """Writes the files asked for; makes all of them before the first is written."""
    made = [(path, make()) for path, make in wanted if path is not None]
    for path, content in made:
        try:
            if path.is_dir():
                raise IsADirectoryError(None, "Is a directory")
            write_atomically(path, content)
        except OSError as error:
            raise ReportError(
                f"expected a file that can be written, got {str(path)!r} ({error.strerror}); "
                "choose another."
            ) from None
    return [str(path) for path, _ in made]


def _say_written(paths: list[str]) -> None:
    for path in paths:
        print(f"Wrote {path}")
