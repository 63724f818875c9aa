"""`mirrordp plan`."""

import argparse
from typing import Any

from mirrordp.cli._common import (
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
        "--figure", metavar="FILE", help="write the trade-off as a figure (.png, .pdf or .svg)"
    )
    add_adjacency(parser)


def _run(arguments: argparse.Namespace) -> int:
    check_epsilon(arguments.epsilon)
    with library_errors("use fewer epochs"), patiently("computing the noise of each batch size"):
        from mirrordp.privacy.accounting import Adjacency
        from mirrordp.tuning.planning import plan

        found = plan(
            epsilon=arguments.epsilon,
            delta=arguments.delta,
            num_examples=arguments.num_examples,
            epochs=arguments.epochs,
            adjacency=Adjacency(arguments.adjacency),
        )
        if arguments.figure is not None:
            found.figure().savefig(arguments.figure)
    if arguments.json:
        print_json(found.to_dict())
        return 0
    print(found)
    chosen = found.chosen
    print(
        f"chosen (*): {chosen.num_steps} steps of {chosen.batch_size} records with noise "
        f"multiplier {chosen.noise_multiplier:.6g} (by PLD; the table's accountant is faster and "
        "states somewhat more)"
    )
    return 0
