"""`mirrordp calibrate`."""

import argparse
from typing import Any

from mirrordp.cli._common import add_command, check_epsilon, positive
from mirrordp.cli._mechanism import (
    accountant_options,
    add_mechanism_options,
    computing,
    mechanism_of,
    print_guarantee,
)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "calibrate",
        _run,
        "find the least noise for a given epsilon",
        "calibrate --epsilon 3 --num-examples 48000 --batch-size 500 --steps 9600 --delta 1e-5",
    )
    parser.add_argument(
        "--epsilon", type=positive, required=True, metavar="E", help="the epsilon not to exceed"
    )
    add_mechanism_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    make_event, sampling_prob = mechanism_of(arguments)
    target = arguments.epsilon
    check_epsilon(target)
    with computing():
        from mirrordp.privacy import accounting

        noise_multiplier = accounting.calibrate(
            make_event,
            epsilon_target=target,
            delta=arguments.delta,
            **accountant_options(arguments),
        )
    print_guarantee(arguments, make_event, noise_multiplier, sampling_prob, epsilon_target=target)
    return 0
