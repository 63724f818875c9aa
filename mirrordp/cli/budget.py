"""`mirrordp budget init`, `mirrordp budget show` and `mirrordp budget plan`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mirrordp._rounding import percent_upwards, upwards
from mirrordp.cli._common import (
    Parser,
    UsageError,
    add_adjacency,
    add_command,
    counted,
    interruptible,
    library_errors,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    print_json,
    print_rows,
    probability,
)
from mirrordp.cli._mechanism import (
    MOST_STEPS,
    add_sampling_options,
    add_steps_options,
    sampling_of,
    steps_of,
)

if TYPE_CHECKING:
    from mirrordp.spending.budget import Budget, BudgetStatus

UNITS = ("example", "user")


def add(commands: Any) -> None:
    """Adds the command and its own commands to the parser."""
    summary = "keep one budget for all runs on the same private data"
    budget = commands.add_parser(
        "budget",
        help=summary,
        description=summary.capitalize() + ".",
        epilog="example: mirrordp budget init b --epsilon 3 --delta 1e-6 --data private.csv",
        allow_abbrev=False,
    )
    budget.set_defaults(run=_no_command, prog=budget.prog)
    kinds = budget.add_subparsers(metavar="COMMAND", parser_class=Parser)
    init = add_command(
        kinds,
        "init",
        _init,
        "make a new budget, bound to a data file",
        "budget init b --epsilon 3 --delta 1e-6 --data private.csv",
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
        help="the private data; DIR keeps a fingerprint of it, keyed with a secret",
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
        _show,
        "show what a budget promises and how much of it is used",
        "budget show b",
    )
    plan = add_command(
        kinds,
        "plan",
        _plan,
        "find what may still be run: the least noise for some steps, or the most steps at some "
        "noise",
        "budget plan b --num-examples 48000 --batch-size 500 --epochs 20",
    )
    for parser in (show, plan):
        parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the budget")
    add_sampling_options(plan)
    add_steps_options(plan).add_argument(
        "--noise-multiplier",
        type=positive,
        metavar="S",
        help="noise over the clip norm, to find how many steps fit",
    )
    plan.add_argument(
        "--fraction",
        type=probability,
        default=1.0,
        metavar="F",
        help="share of what is left that the run may take (default: all)",
    )


def _no_command(arguments: argparse.Namespace) -> NoReturn:
    raise UsageError(
        f"expected a command (init, show or plan), got none; see '{arguments.prog} --help'."
    )


def _init(arguments: argparse.Namespace) -> int:
    from mirrordp.privacy.accounting import Adjacency
    from mirrordp.spending.budget import Budget

    with (
        interruptible(),
        library_errors(),
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


def _show(arguments: argparse.Namespace) -> int:
    with library_errors():
        from mirrordp.spending.budget import Budget

        status = Budget.status_of(arguments.folder)
    _print_status(arguments, status)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    with library_errors(), patiently("searching for what fits"):
        from mirrordp.privacy import accounting
        from mirrordp.spending.budget import Budget

        budget = Budget.view(arguments.folder)
        event, q = sampling_of(arguments, budget.adjacency.value)
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
        status = budget.status
        used = percent_upwards(status.used)
        if noise is None or steps == 0:
            raise UsageError(_nothing_fits(budget, used))
        alone = accounting.epsilon(event(noise, steps), status.delta, adjacency=budget.adjacency)
    if arguments.json:
        print_json(
            {
                "noise_multiplier": noise,
                "steps": steps,
                "epochs": float(steps * q),
                "sampling": arguments.sampling,
                "sampling_prob": float(q),
                "fraction": arguments.fraction,
                "adjacency": budget.adjacency.value,
                "unit": budget.unit,
                "epsilon_alone": alone.epsilon,
                "delta": status.delta,
                "used": status.used,
            }
        )
        return 0
    share = "all" if arguments.fraction == 1 else f"{arguments.fraction:g}"
    print_rows(
        {
            "fits": f"{counted(steps, 'step')} at noise multiplier {upwards(noise, 6)}",
            "sampling": f"{arguments.sampling}, probability {float(q):.6g}",
            "epochs": f"{float(steps * q):.6g}; one epoch draws as many records as there are",
            "takes": f"{share} of what is left; {used} is used",
            "adjacency": budget.adjacency.value,
            "unit": f"one {budget.unit}",
            "alone": f"epsilon {upwards(alone.epsilon, 6)} at delta {upwards(status.delta, 6)}",
        }
    )
    return 0


def _nothing_fits(budget: "Budget", used: str) -> str:
    if budget.status.largest_epsilon <= 0:
        return (
            f"expected a budget with something left, got {str(budget.folder)!r}, of which {used} "
            "is used; stop here."
        )
    return (
        "expected settings of which at least one step fits, got too much for what is left "
        f"({used} is used); use more noise or a larger --fraction."
    )


def _print_status(arguments: argparse.Namespace, status: "BudgetStatus") -> None:

    if arguments.json:
        print_json(
            {
                "epsilon": status.epsilon,
                "delta": status.delta,
                "adjacency": status.adjacency.value,
                "unit": status.unit,
                "used": status.used,
                "runs": status.runs,
                "largest_epsilon_left": status.largest_epsilon,
                "ledger": status.position._asdict(),
            }
        )
        return
    room = "nothing"
    if status.largest_epsilon > 0:
        fits = status.adjacency.num_examples_is_public
        command = "mirrordp fit" if status.unit == "example" else "mirrordp fit --user"
        room = (
            f"for example, a full-batch run{f' ({command})' if fits else ''} of epsilon "
            f"{status.largest_epsilon:g} at delta {status.delta:g}"
        )
    print_rows(
        {
            "promise": f"epsilon {upwards(status.epsilon, 6)}, delta {upwards(status.delta, 6)} "
            "for all runs together, however they are chosen",
            "adjacency": status.adjacency.value,
            "unit": f"one {status.unit}",
            "used": f"{percent_upwards(status.used)}, by {counted(status.runs, 'run')}",
            "room for": room,
            "ledger": f"{counted(status.position.length, 'record')}, head {status.position.head}",
        }
    )
