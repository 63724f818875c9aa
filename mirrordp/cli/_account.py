"""`mirrordp account` and `mirrordp calibrate`."""

import argparse
import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mirrordp._warn import warn
from mirrordp.cli._common import (
    UsageError,
    add_adjacency,
    add_command,
    check_epsilon,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    positive_integer,
    probability,
    sentence,
)
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Accountant, Adjacency, DpEvent
from mirrordp.report import upwards

SAMPLINGS = ("poisson", "fixed", "full")
ORDERS = {"default": None, "coarse": accounting.COARSE_ORDERS}

# Beyond these nothing is protected, and computing by how much would take minutes or all memory.
_LEAST_NOISE = 0.01
MOST_STEPS = 10**7
_LARGEST_FOR_PLD = 1e5


def add_account_commands(commands: Any) -> None:
    """Registers both."""
    account = add_command(
        commands,
        "account",
        _account,
        "epsilon of a mechanism",
        "example: mirrordp account --noise-multiplier 1.51 --num-examples 48000 --batch-size 500 "
        "--steps 9600 --delta 1e-5",
    )
    account.add_argument(
        "--noise-multiplier",
        type=positive,
        required=True,
        metavar="S",
        help="standard deviation of the noise over the clip norm",
    )
    _add_mechanism_options(account)

    calibrate = add_command(
        commands,
        "calibrate",
        _calibrate,
        "the least noise for a given epsilon",
        "example: mirrordp calibrate --epsilon 3 --num-examples 48000 --batch-size 500 "
        "--steps 9600 --delta 1e-5",
    )
    calibrate.add_argument(
        "--epsilon", type=positive, required=True, metavar="E", help="the epsilon not to exceed"
    )
    _add_mechanism_options(calibrate)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How batches are drawn; `sampling_of` reads it."""
    parser.add_argument(
        "--num-examples", type=positive_integer, metavar="N", help="private records"
    )
    parser.add_argument(
        "--batch-size", type=positive_integer, metavar="B", help="(expected) records per step"
    )
    parser.add_argument(
        "--sampling-prob",
        type=probability,
        metavar="Q",
        help="probability of a record to join a step, instead of N and B",
    )
    parser.add_argument(
        "--sampling",
        type=one_of(*SAMPLINGS),
        default="poisson",
        metavar="{poisson,fixed,full}",
        help="how batches are drawn (default: %(default)s)",
    )


def add_steps_options(parser: argparse.ArgumentParser) -> Any:
    """How many steps, in one of two ways; `steps_of` reads it. Returns the group of both."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--steps", type=positive_integer, metavar="T", help="training steps")
    group.add_argument(
        "--epochs",
        type=positive,
        metavar="E",
        help="passes over the records instead of steps: E times N/B steps, rounded up",
    )
    return group


def _add_mechanism_options(parser: argparse.ArgumentParser) -> None:
    add_sampling_options(parser)
    add_steps_options(parser)
    parser.add_argument(
        "--delta", type=open_unit_interval, required=True, metavar="D", help="delta, below 1/N"
    )
    parser.add_argument(
        "--accountant",
        type=one_of("pld", "rdp"),
        metavar="{pld,rdp}",
        help="default: pld where it can analyse the mechanism, else rdp",
    )
    parser.add_argument(
        "--orders",
        type=one_of(*ORDERS),
        metavar="{default,coarse}",
        help="Renyi orders, for --accountant rdp; coarse is the grid behind the paper's 8.32",
    )
    add_adjacency(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _account(arguments: argparse.Namespace) -> int:
    make_event, sampling_prob = _mechanism(arguments)
    if arguments.noise_multiplier < _LEAST_NOISE:
        raise UsageError(
            f"expected --noise-multiplier of at least {_LEAST_NOISE}, got "
            f"{arguments.noise_multiplier:g}, which protects nothing; use more noise."
        )
    _print_guarantee(arguments, make_event, arguments.noise_multiplier, sampling_prob)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    make_event, sampling_prob = _mechanism(arguments)
    check_epsilon(arguments.epsilon)
    noise_multiplier = _advised(
        arguments,
        lambda: accounting.calibrate(
            make_event,
            epsilon_target=arguments.epsilon,
            delta=arguments.delta,
            adjacency=Adjacency(arguments.adjacency),
            accountant=_accountant(arguments),
            orders=_orders(arguments),
        ),
    )
    _print_guarantee(
        arguments, make_event, noise_multiplier, sampling_prob, epsilon_target=arguments.epsilon
    )
    return 0


def _mechanism(arguments: argparse.Namespace) -> tuple[Callable[[float], DpEvent], float]:
    """The event as a function of the noise multiplier, and q; refuses what does not fit."""
    n = arguments.num_examples
    event, q = sampling_of(arguments, Adjacency(arguments.adjacency))
    # What is printed, and what the rest of the command reads.
    arguments.steps = steps = steps_of(arguments, q)
    if n is not None and arguments.delta > 1 / n:
        warn(
            f"delta={arguments.delta:g} is above 1/n = {1 / n:.2g}: a mechanism that publishes a "
            "random record would qualify; choose a delta well below 1/n."
        )
    return lambda sigma: event(sigma, steps), float(q)


def steps_of(arguments: argparse.Namespace, q: Fraction) -> int:
    """The number of steps, given as such or in epochs; refuses too many."""
    steps = arguments.steps
    if steps is None:
        # More steps than asked for cost more than is stated, so that fractions are rounded up.
        steps = math.ceil(Fraction(repr(arguments.epochs)) / q)
    if steps > MOST_STEPS:
        raise UsageError(f"expected at most {MOST_STEPS} steps, got {steps}; take fewer.")
    return steps


def sampling_of(
    arguments: argparse.Namespace, adjacency: Adjacency
) -> tuple[Callable[[float, int], DpEvent], Fraction]:
    """The event as a function of noise multiplier and steps, and q; refuses what does not fit."""
    n, batch, q = arguments.num_examples, arguments.batch_size, arguments.sampling_prob
    if q is not None and batch is not None:
        raise UsageError(
            "expected either --sampling-prob or --num-examples with --batch-size, got both; "
            "leave one out."
        )
    if n is not None and batch is not None and batch > n:
        raise UsageError(
            f"expected --batch-size of at most --num-examples ({n}), got {batch}; choose a smaller "
            "batch."
        )
    if arguments.sampling == "full":
        if (q is not None and q != 1) or (batch is not None and batch != n):
            came = f"--sampling-prob {q:g}" if q is not None else f"--batch-size {batch}"
            raise UsageError(
                f"expected every record in every batch with --sampling full, got {came}; leave it "
                "out, or use --sampling poisson."
            )
        return lambda sigma, steps: accounting.full_batch_event(sigma, num_steps=steps), Fraction(1)
    if arguments.sampling == "fixed":
        if n is None or batch is None:
            raise UsageError(
                "expected --num-examples and --batch-size with --sampling fixed, got "
                f"{_given(arguments)}; give both."
            )
        if adjacency is not Adjacency.REPLACE:
            raise UsageError(
                "expected --adjacency replace with --sampling fixed, got "
                f"{adjacency.value}, for which there is no analysis; use --adjacency replace or "
                "--sampling poisson, which costs less."
            )
        return lambda sigma, steps: accounting.fixed_size_event(
            sigma, num_examples=n, batch_size=batch, num_steps=steps
        ), Fraction(batch, n)
    if q is not None:
        prob = Fraction(repr(q))
    elif n is not None and batch is not None:
        prob = Fraction(batch, n)
    else:
        raise UsageError(
            "expected --num-examples with --batch-size, or --sampling-prob, got "
            f"{_given(arguments)}; give one of the two."
        )
    return lambda sigma, steps: accounting.poisson_event(
        sigma, sampling_prob=float(prob), num_steps=steps
    ), prob


def _given(arguments: argparse.Namespace) -> str:
    names = ("num_examples", "batch_size", "sampling_prob")
    given = [
        f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None
    ]
    return " and ".join(given) or "neither"


def _accountant(arguments: argparse.Namespace) -> Accountant | None:
    return None if arguments.accountant is None else Accountant(arguments.accountant)


def _affordable_accountant(arguments: argparse.Namespace, event: DpEvent) -> Accountant | None:
    """The accountant asked for, or RDP where a PLD would not fit into memory."""
    if arguments.accountant == "rdp":
        return Accountant.RDP
    try:
        bound = accounting.epsilon(
            event,
            arguments.delta,
            adjacency=Adjacency(arguments.adjacency),
            accountant=Accountant.RDP,
            orders=tuple(range(2, 64)),
        )
    except accounting.UnsupportedError:
        return _accountant(arguments)
    if bound.epsilon < _LARGEST_FOR_PLD or arguments.sampling == "full":
        return _accountant(arguments)
    if arguments.accountant == "pld":
        raise UsageError(
            "expected enough noise for the PLD accountant, got a mechanism that protects next to "
            "nothing; use --accountant rdp or more noise."
        )
    return Accountant.RDP


def _orders(arguments: argparse.Namespace) -> tuple[float, ...] | None:
    if arguments.orders is not None and arguments.accountant != "rdp":
        raise UsageError(
            "expected --accountant rdp with --orders, got "
            f"{'--accountant pld' if arguments.accountant else 'no --accountant'}; add "
            "--accountant rdp or leave --orders out."
        )
    return ORDERS[arguments.orders or "default"]


def _advised(arguments: argparse.Namespace, compute: Callable[[], Any]) -> Any:
    """Turns a refusal of the library into one sentence."""
    try:
        with patiently("computing epsilon"):
            return compute()
    except accounting.UnsupportedError as error:
        if arguments.accountant is None:
            raise UsageError(sentence(error)) from None
        other = "rdp" if arguments.accountant == "pld" else "pld"
        raise UsageError(
            f"expected an accountant for {arguments.sampling} sampling under "
            f"{arguments.adjacency} adjacency, got --accountant {arguments.accountant}; use "
            f"--accountant {other} or leave it out."
        ) from None
    except (ValueError, OverflowError) as error:
        raise UsageError(sentence(error)) from None
    except MemoryError:
        raise UsageError(
            "expected a mechanism whose privacy loss fits in memory, got too little noise for so "
            "many steps; use more noise, or --accountant rdp."
        ) from None


def _print_guarantee(
    arguments: argparse.Namespace,
    make_event: Callable[[float], DpEvent],
    noise_multiplier: float,
    sampling_prob: float,
    epsilon_target: float | None = None,
) -> None:
    adjacency = Adjacency(arguments.adjacency)
    event = make_event(noise_multiplier)
    found = _advised(
        arguments,
        lambda: accounting.epsilon(
            event,
            arguments.delta,
            adjacency=adjacency,
            accountant=_affordable_accountant(arguments, event),
            orders=_orders(arguments),
        ),
    )
    if not math.isfinite(found.epsilon):
        raise UsageError(
            f"expected enough noise for a finite epsilon, got --noise-multiplier "
            f"{noise_multiplier:g} over {arguments.steps} steps; use more noise or fewer steps."
        )
    result = {
        "epsilon": found.epsilon,
        "delta": arguments.delta,
        "noise_multiplier": noise_multiplier,
        "adjacency": adjacency.value,
        "unit": "example",
        "sampling": arguments.sampling,
        "sampling_prob": sampling_prob,
        "num_examples": arguments.num_examples,
        "batch_size": arguments.batch_size,
        "steps": arguments.steps,
        "accountant": found.accountant.value,
        "method": found.method,
        "num_examples_is_public": adjacency.num_examples_is_public,
        "tuning": "not charged",
    }
    if epsilon_target is not None:
        result["epsilon_target"] = epsilon_target
    if arguments.json:
        print(json.dumps(result, allow_nan=False))
        return
    kept = "counts as public" if adjacency.num_examples_is_public else "is secret"
    if not adjacency.num_examples_is_public and arguments.num_examples is not None:
        kept += ": take a public guess for --num-examples, and fix probability and divisor with it"
    rows = [
        ("epsilon", f"{upwards(found.epsilon, 6)} at delta {upwards(arguments.delta, 6)}"),
        (
            "noise",
            # Rounded up too: epsilon must hold for who copies it from here.
            f"{upwards(noise_multiplier, 6)} times the clip norm, in each of "
            f"{arguments.steps} steps",
        ),
        ("sampling", f"{arguments.sampling}, probability {sampling_prob:.6g}"),
        ("adjacency", f"{adjacency.value}; the number of records {kept}"),
        ("unit", "one example; for user-level privacy let one record be one user"),
        ("accountant", found.method),
        ("tuning", "not charged: this is the cost of one run"),
    ]
    for name, value in rows:
        print(f"{name:<12}{value}")
