"""`mirrordp budget init` and `mirrordp budget show`."""

import argparse
import json
from pathlib import Path
from typing import Any

from mirrordp.accounting import Adjacency
from mirrordp.budget import Budget, BudgetStatus
from mirrordp.cli._common import (
    Parser,
    UsageError,
    add_adjacency,
    add_command,
    counted,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    table_errors,
)
from mirrordp.mechanism import UNITS
from mirrordp.report import percent_upwards, upwards


def add_budget_commands(commands: Any) -> None:
    """Registers `budget` and its two commands."""
    summary = "one budget for all runs on the same private data"
    budget = add_command(
        commands,
        "budget",
        _no_budget_command,
        summary,
        "example: mirrordp budget init b --epsilon 3 --delta 1e-6 --data private.csv",
    )
    kinds = budget.add_subparsers(metavar="COMMAND", parser_class=Parser)
    init = add_command(
        kinds,
        "init",
        _budget_init,
        "a new budget, bound to a data file",
        "example: mirrordp budget init b --epsilon 3 --delta 1e-6 --data private.csv",
    )
    init.add_argument("folder", type=Path, metavar="DIR", help="a new folder; keep it to yourself")
    init.add_argument(
        "--epsilon",
        type=positive,
        required=True,
        metavar="E",
        help="epsilon of all runs together, however they are chosen",
    )
    init.add_argument(
        "--delta", type=open_unit_interval, required=True, metavar="D", help="delta, below 1/N"
    )
    init.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="the private data; a fingerprint of it, keyed with a secret in DIR, is kept",
    )
    add_adjacency(init)
    init.add_argument(
        "--unit",
        type=one_of(*UNITS),
        default=UNITS[0],
        metavar=f"{{{','.join(UNITS)}}}",
        help="what one record is (default: %(default)s)",
    )
    show = add_command(
        kinds,
        "show",
        _budget_show,
        "what a budget promises and how much of it is used",
        "example: mirrordp budget show b",
    )
    show.add_argument("folder", type=Path, metavar="DIR", help="the budget's folder")
    for parser in (init, show):
        parser.add_argument("--json", action="store_true", help="print one JSON object")


def _no_budget_command(arguments: argparse.Namespace) -> int:
    raise UsageError(f"expected a command (init or show), got none; see '{arguments.prog} --help'.")


def _budget_init(arguments: argparse.Namespace) -> int:
    with (
        table_errors(),
        patiently(f"reading {arguments.data}"),
        Budget.create(
            arguments.folder,
            epsilon=arguments.epsilon,
            delta=arguments.delta,
            data=arguments.data,
            adjacency=Adjacency(arguments.adjacency),
            unit=arguments.unit,
        ) as budget,
    ):
        status = budget.status
    _print_status(arguments, status)
    return 0


def _budget_show(arguments: argparse.Namespace) -> int:
    with table_errors():
        status = Budget.status_of(arguments.folder)
    _print_status(arguments, status)
    return 0


def _print_status(arguments: argparse.Namespace, status: BudgetStatus) -> None:
    if arguments.json:
        result = {
            "epsilon": status.epsilon,
            "delta": status.delta,
            "adjacency": status.adjacency.value,
            "unit": status.unit,
            "used": status.used,
            "runs": status.runs,
            "largest_epsilon_left": status.largest_epsilon,
            "ledger": status.position._asdict(),
        }
        print(json.dumps(result, allow_nan=False))
        return
    room = "nothing"
    if status.largest_epsilon > 0:
        fits = status.unit == "example" and status.adjacency.num_examples_is_public
        room = (
            f"a full-batch run{' (mirrordp fit)' if fits else ''} of epsilon "
            f"{status.largest_epsilon:g} at delta {status.delta:g}, for example"
        )
    rows = [
        (
            "promise",
            f"epsilon {upwards(status.epsilon, 6)}, delta {upwards(status.delta, 6)} for all runs "
            "together, however they are chosen",
        ),
        ("adjacency", status.adjacency.value),
        ("unit", f"one {status.unit}"),
        ("used", f"{percent_upwards(status.used)}, by {counted(status.runs, 'run')}"),
        ("room for", room),
        ("ledger", f"{counted(status.position.length, 'record')}, head {status.position.head}"),
    ]
    for name, value in rows:
        print(f"{name:<12}{value}")
