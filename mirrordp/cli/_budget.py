"""`mirrordp budget init`, `mirrordp budget show` and `mirrordp budget plan`."""

import argparse
import json
from pathlib import Path
from typing import Any

from mirrordp.cli._account import (
    MOST_STEPS,
    add_sampling_options,
    add_steps_options,
    sampling_of,
    steps_of,
)
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
    probability,
    table_errors,
)
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import UNITS
from mirrordp.report import percent_upwards, upwards
from mirrordp.spending.budget import Budget, BudgetStatus


def add_budget_commands(commands: Any) -> None:
    """Registers `budget` and its commands."""
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
    plan = add_command(
        kinds,
        "plan",
        _budget_plan,
        "what may still be run: the least noise for some steps, or the most steps at some noise",
        "example: mirrordp budget plan b --num-examples 48000 --batch-size 500 --epochs 20",
    )
    plan.add_argument("folder", type=Path, metavar="DIR", help="the budget's folder")
    add_sampling_options(plan)
    add_steps_options(plan).add_argument(
        "--noise-multiplier",
        type=positive,
        metavar="S",
        help="noise over the clip norm, to be told how many steps fit",
    )
    plan.add_argument(
        "--fraction",
        type=probability,
        default=1.0,
        metavar="F",
        help="share of what is left that the run may take (default: all)",
    )
    for parser in (init, show, plan):
        parser.add_argument("--json", action="store_true", help="print one JSON object")


def _no_budget_command(arguments: argparse.Namespace) -> int:
    raise UsageError(
        f"expected a command (init, show or plan), got none; see '{arguments.prog} --help'."
    )


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


def _budget_plan(arguments: argparse.Namespace) -> int:
    with table_errors(), patiently("searching what fits"):
        budget = Budget.view(arguments.folder)
        event, q = sampling_of(arguments, budget.adjacency)
        noise = arguments.noise_multiplier
        if noise is None:
            steps = steps_of(arguments, q)
            noise = accounting.least_noise(
                lambda sigma: budget.fits(event(sigma, steps), fraction=arguments.fraction)
            )
        else:
            steps = accounting.most_steps(
                lambda steps: (
                    steps <= MOST_STEPS
                    and budget.fits(event(noise, steps), fraction=arguments.fraction)
                )
            )
        if noise is None or steps == 0:
            raise UsageError(_nothing_fits(budget, arguments))
        delta = budget.status.delta
        alone = accounting.epsilon(event(noise, steps), delta, adjacency=budget.adjacency)
    if arguments.json:
        result = {
            "noise_multiplier": noise,
            "steps": steps,
            "epochs": float(steps * q),
            "sampling": arguments.sampling,
            "sampling_prob": float(q),
            "fraction": arguments.fraction,
            "adjacency": budget.adjacency.value,
            "unit": budget.unit,
            "epsilon_alone": alone.epsilon,
            "delta": delta,
            "used": budget.status.used,
        }
        print(json.dumps(result, allow_nan=False))
        return 0
    share = "all" if arguments.fraction == 1 else f"{arguments.fraction:g}"
    rows = [
        ("fits", f"{counted(steps, 'step')} at noise multiplier {upwards(noise, 6)}"),
        ("sampling", f"{arguments.sampling}, probability {float(q):.6g}"),
        ("epochs", f"{float(steps * q):.6g}, if an epoch is as many draws as there are records"),
        ("takes", f"{share} of what is left; {percent_upwards(budget.status.used)} is used"),
        ("adjacency", budget.adjacency.value),
        ("unit", f"one {budget.unit}"),
        ("alone", f"epsilon {upwards(alone.epsilon, 6)} at delta {upwards(delta, 6)}"),
    ]
    for name, value in rows:
        print(f"{name:<12}{value}")
    return 0


def _nothing_fits(budget: Budget, arguments: argparse.Namespace) -> str:
    status = budget.status
    if status.largest_epsilon <= 0:
        return (
            f"expected a budget with something left, got {str(arguments.folder)!r}, of which "
            f"{percent_upwards(status.used)} is used; stop here."
        )
    return (
        "expected settings of which at least one step fits, got too much for what is left "
        f"({percent_upwards(status.used)} is used); use more noise or a larger --fraction."
    )


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
