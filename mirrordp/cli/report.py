"""`mirrordp report`."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mirrordp.cli._common import (
    UsageError,
    add_command,
    interruptible,
    library_errors,
    print_json,
)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "report",
        _run,
        "show what a run promises, as text or as a web page",
        "report mirrordp-demo --html report.html",
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="a folder with report.json (demo and fit make one)"
    )
    add_html(parser)
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="write calibration or residuals on test rows, and coefficients, as PNG files there",
    )


def add_html(parser: argparse.ArgumentParser) -> None:
    """Adds the option --html."""
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a web page that needs no network"
    )


def _run(arguments: argparse.Namespace) -> int:
    from mirrordp.report import RunReport, evaluation_figures, report_page

    name = arguments.folder.absolute().name
    with library_errors(), interruptible():
        report = RunReport.read(arguments.folder)
        wanted: list[tuple[Path | None, Callable[[], bytes]]] = [
            (arguments.html, lambda: report_page(report, run=name).encode())
        ]
        if arguments.figures is not None:
            drawn = evaluation_figures(report.results)
            wanted += [(arguments.figures / file, lambda c=c: c) for file, c in drawn.items()]
        wrote = write_all(wanted)
    if arguments.json:
        print_json(report.to_dict() | {"wrote": wrote})
    elif wrote:
        print_written(wrote)
    else:
        print(report.privacy_card(), end="")
        print_scores(report.results, before="\n")
    return 0


def print_scores(results: Mapping[str, Any], before: str = "") -> None:
    """Prints the scores on test rows, if a report has some."""
    from mirrordp.report.evaluation import lines_of_scores, results_on_test_rows

    if (test := results_on_test_rows(results)) is None:
        return
    print(f"{before}On {test.rows} test rows (intervals: {test.interval}):")
    print(*lines_of_scores(test.models), sep="\n")


def write_all(wanted: list[tuple[Path | None, Callable[[], bytes]]]) -> list[str]:
    """Writes the files that were asked for, and returns their paths.

    All contents are made before the first file is written.
    """
    from mirrordp.spending.files import write_atomically

    made = [(path, make()) for path, make in wanted if path is not None]
    for path, content in made:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise UsageError(
                f"expected a file that can be written, got {str(path)!r} ({error.strerror}); "
                "choose another."
            ) from None
    return [str(path) for path, _ in made]


def print_written(paths: list[str]) -> None:
    """Prints a line for each file that was written."""
    for path in paths:
        print(f"Wrote {path}")
