"""`mirrordp plan`."""

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrordp.cli._common import (
    UsageError,
    add_adjacency,
    add_command,
    check_epsilon,
    library_errors,
    open_unit_interval,
    patiently,
    positive,
    positive_integer,
    print_json,
)
from mirrordp.cli.report import print_written, write_all

if TYPE_CHECKING:
    from mirrordp.tuning.planning import Plan

_FIGURES = (".png", ".pdf", ".svg")


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "plan",
        _run,
        "choose batch size, steps and noise for an epsilon and a number of epochs",
        "plan --epsilon 3 --num-examples 48000 --epochs 100 --delta 1e-5",
    )
    parser.add_argument(
        "--epsilon", type=positive, required=True, metavar="E", help="the epsilon not to exceed"
    )
    parser.add_argument(
        "--delta", type=open_unit_interval, required=True, metavar="D", help="delta, below 1/N"
    )
    parser.add_argument(
        "--num-examples",
        type=positive_integer,
        required=True,
        metavar="N",
        help="number of private records",
    )
    parser.add_argument(
        "--epochs",
        type=positive,
        default=20.0,
        metavar="P",
        help="compute, in passes over the records (default: 20)",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="write the trade-off as a figure (.png, .pdf or .svg)",
    )
    add_adjacency(parser)


def _run(arguments: argparse.Namespace) -> int:
    check_epsilon(arguments.epsilon)
    _check_figure(arguments.figure)
    with library_errors("use fewer epochs"), patiently("computing the noise of each batch size"):
        from mirrordp.privacy.accounting import Adjacency
        from mirrordp.tuning import planning

        found = planning.plan(
            epsilon=arguments.epsilon,
            delta=arguments.delta,
            num_examples=arguments.num_examples,
            epochs=arguments.epochs,
            adjacency=Adjacency(arguments.adjacency),
        )
        wrote = write_all([(arguments.figure, lambda: _drawn(found, arguments.figure))])
    if arguments.json:
        print_json(found.to_dict())
        return 0
    print(found)
    print_written(wrote)
    return 0


def _check_figure(path: Path | None) -> None:
    """Refuses a figure that cannot be written, before anything is computed."""
    if path is None:
        return
    if path.suffix.lower() not in _FIGURES:
        raise UsageError(
            f"expected --figure with the ending {', '.join(_FIGURES[:-1])} or {_FIGURES[-1]}, got "
            f"{str(path)!r}; choose one of them."
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"expected --figure in a folder that exists, got {str(path)!r}; make the folder, or "
            "choose another."
        )


def _drawn(found: "Plan", path: Path) -> bytes:
    buffer = io.BytesIO()
    found.figure().savefig(buffer, format=path.suffix[1:].lower(), dpi=150)
    return buffer.getvalue()
