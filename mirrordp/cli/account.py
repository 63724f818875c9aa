"""`mirrordp account`."""

import argparse
from typing import Any

from mirrordp.cli._common import UsageError, add_command, positive
from mirrordp.cli._mechanism import add_mechanism_options, mechanism_of, print_guarantee

# With less noise nothing is protected, and computing by how much would take all memory.
_LEAST_NOISE = 0.01


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "account",
        _run,
        "compute epsilon of a mechanism",
        "account --noise-multiplier 1.51 --num-examples 48000 --batch-size 500 --steps 9600 "
        "--delta 1e-5",
    )
    parser.add_argument(
        "--noise-multiplier",
        type=positive,
        required=True,
        metavar="S",
        help="standard deviation of the noise over the clip norm",
    )
    add_mechanism_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    make_event, sampling_prob = mechanism_of(arguments)
    if arguments.noise_multiplier < _LEAST_NOISE:
        raise UsageError(
            f"expected --noise-multiplier of at least {_LEAST_NOISE}, got "
            f"{arguments.noise_multiplier:g}, which protects nothing; use more noise."
        )
    print_guarantee(arguments, make_event, arguments.noise_multiplier, sampling_prob)
    return 0
