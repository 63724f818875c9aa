"""The options that describe a mechanism, and its guarantee: for account, calibrate and plan."""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mirrordp._rounding import upwards
from mirrordp.cli._common import (
    UsageError,
    add_adjacency,
    library_errors,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    positive_integer,
    print_json,
    print_rows,
    probability,
)

if TYPE_CHECKING:
    from mirrordp.privacy.accounting import Accountant, DpEvent

MakeEvent = Callable[[float, int], "DpEvent"]
"""Maps a noise multiplier and a number of steps to the event of a run."""

MOST_STEPS = 10**7
"""More steps protect nothing, and analysing them would take minutes or all memory."""
_LARGEST_FOR_PLD = 1e5


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how batches are drawn; `sampling_of` reads them."""
    parser.add_argument(
        "--num-examples", type=positive_integer, metavar="N", help="number of private records"
    )
    parser.add_argument(
        "--batch-size",
        type=_batch_size,
        metavar="B",
        help="records per step; with Poisson sampling the expected number, which may be a fraction",
    )
    parser.add_argument(
        "--sampling-prob",
        type=probability,
        metavar="Q",
        help="probability that a record joins a step, in place of N and B",
    )
    parser.add_argument(
        "--sampling",
        type=one_of("poisson", "fixed", "full"),
        default="poisson",
        metavar="{poisson,fixed,full}",
        help="how batches are drawn (default: %(default)s)",
    )


def _batch_size(text: str) -> int | float:
    """Reads a number of records; `sampling_of` refuses a fraction where it makes no sense."""
    value = positive(text)
    return positive_integer(text) if value.is_integer() else value


def add_steps_options(parser: argparse.ArgumentParser) -> Any:
    """Adds the two ways to give a number of steps, and returns their group; see `steps_of`."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--steps", type=positive_integer, metavar="T", help="training steps")
    group.add_argument(
        "--epochs",
        type=positive,
        metavar="E",
        help="passes over the records in place of steps: E times N/B steps, rounded up",
    )
    return group


def add_mechanism_options(parser: argparse.ArgumentParser) -> None:
    """Adds everything that decides ε apart from the noise; `mechanism_of` reads it."""
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
        type=one_of("default", "coarse"),
        metavar="{default,coarse}",
        help="Renyi orders for --accountant rdp; coarse is the grid behind the paper's 8.32",
    )
    add_adjacency(parser)


def mechanism_of(arguments: argparse.Namespace) -> tuple[Callable[[float], "DpEvent"], float]:
    """Returns the event as a function of the noise multiplier, and the sampling probability.

    It also stores the number of steps in `arguments.steps`.
    """
    event, q = sampling_of(arguments, arguments.adjacency)
    arguments.steps = steps = steps_of(arguments, q)
    if arguments.orders is not None and arguments.accountant != "rdp":
        raise UsageError(
            "expected --accountant rdp with --orders, got "
            f"{'--accountant pld' if arguments.accountant else 'no --accountant'}; add "
            "--accountant rdp or leave --orders out."
        )
    from mirrordp.privacy import accounting

    accounting.warn_of_large_delta(arguments.delta, arguments.num_examples)
    return lambda sigma: event(sigma, steps), float(q)


def steps_of(arguments: argparse.Namespace, q: Fraction) -> int:
    """Returns the number of steps, which may be given in epochs; refuses too many."""
    steps = arguments.steps
    if steps is None:
        # Rounded up: a run of more steps than were accounted for would cost more than was stated.
        steps = math.ceil(Fraction(repr(arguments.epochs)) / q)
    if steps > MOST_STEPS:
        raise UsageError(f"expected at most {MOST_STEPS} steps, got {steps}; take fewer.")
    return steps


def sampling_of(arguments: argparse.Namespace, adjacency: str) -> tuple[MakeEvent, Fraction]:
    """Returns the event as a function of noise multiplier and steps, and the probability q."""
    n, batch, q = arguments.num_examples, arguments.batch_size, arguments.sampling_prob
    options = {"--num-examples": n, "--batch-size": batch, "--sampling-prob": q}
    given = " and ".join(name for name in options if options[name] is not None) or "neither"
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
    if arguments.sampling == "fixed" and isinstance(batch, float):
        raise UsageError(
            f"expected a whole number for --batch-size with --sampling fixed, got {batch!r}; only "
            "the expected batch size of --sampling poisson may be a fraction."
        )
    if arguments.sampling == "full":
        if (q is not None and q != 1) or (batch is not None and batch != n):
            given = f"--sampling-prob {q:g}" if q is not None else f"--batch-size {batch}"
            raise UsageError(
                f"expected every record in every batch with --sampling full, got {given}; leave it "
                "out, or use --sampling poisson."
            )
        prob = Fraction(1)
    elif q is not None and arguments.sampling == "poisson":
        prob = Fraction(repr(q))
    elif n is not None and batch is not None:
        prob = Fraction(repr(batch)) / n
    elif arguments.sampling == "fixed":
        raise UsageError(
            f"expected --num-examples and --batch-size with --sampling fixed, got {given}; give "
            "both."
        )
    else:
        raise UsageError(
            f"expected --num-examples with --batch-size, or --sampling-prob, got {given}; give one "
            "of the two."
        )
    if arguments.sampling == "fixed" and adjacency != "replace":
        raise UsageError(
            f"expected --adjacency replace with --sampling fixed, got {adjacency}, for which there "
            "is no analysis; use --adjacency replace or --sampling poisson, which costs less."
        )

    def event(noise_multiplier: float, num_steps: int) -> "DpEvent":
        from mirrordp.privacy import accounting

        if arguments.sampling == "fixed":
            sizes = {"num_examples": arguments.num_examples, "batch_size": arguments.batch_size}
            return accounting.fixed_size_event(noise_multiplier, num_steps=num_steps, **sizes)
        return accounting.poisson_event(
            noise_multiplier, sampling_prob=float(prob), num_steps=num_steps
        )

    return event, prob


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Says that ε is being computed if that takes long; prints refusals in one line."""
    with patiently("computing epsilon"), library_errors("use more noise, or --accountant rdp"):
        yield


def accountant_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the adjacency, accountant and orders for the functions of `accounting`."""
    from mirrordp.privacy import accounting

    accountant = arguments.accountant
    return {
        "adjacency": accounting.Adjacency(arguments.adjacency),
        "accountant": None if accountant is None else accounting.Accountant(accountant),
        "orders": accounting.COARSE_ORDERS if arguments.orders == "coarse" else None,
    }


def _affordable(arguments: argparse.Namespace, event: "DpEvent") -> "Accountant | None":
    """Returns the accountant asked for, or RDP where a PLD would not fit into memory."""
    from mirrordp.privacy import accounting

    options = accountant_options(arguments)
    if arguments.accountant == "rdp" or arguments.sampling == "full":
        return options["accountant"]
    try:
        bound = accounting.epsilon(
            event,
            arguments.delta,
            adjacency=options["adjacency"],
            accountant=accounting.Accountant.RDP,
            orders=tuple(range(2, 64)),
        )
    except accounting.UnsupportedError:
        return options["accountant"]
    if bound.epsilon < _LARGEST_FOR_PLD:
        return options["accountant"]
    if arguments.accountant == "pld":
        raise UsageError(
            "expected enough noise for the PLD accountant, got a mechanism that protects next to "
            "nothing; use --accountant rdp or more noise."
        )
    return accounting.Accountant.RDP


def print_guarantee(
    arguments: argparse.Namespace,
    make_event: Callable[[float], "DpEvent"],
    noise_multiplier: float,
    sampling_prob: float,
    **others: float,
) -> None:
    """Prints ε of a mechanism, and everything that the number depends on.

    Args:
        arguments: what `mechanism_of` read.
        make_event: the event as a function of the noise multiplier.
        noise_multiplier: the standard deviation of the noise over the clip norm.
        sampling_prob: q.
        others: what the JSON object states besides.
    """
    with computing():
        from mirrordp.privacy import accounting

        event = make_event(noise_multiplier)
        options = accountant_options(arguments)
        options["accountant"] = _affordable(arguments, event)
        found = accounting.epsilon(event, arguments.delta, **options)
    if not math.isfinite(found.epsilon):
        raise UsageError(
            f"expected enough noise for a finite epsilon, got --noise-multiplier "
            f"{noise_multiplier:g} over {arguments.steps} steps; use more noise or fewer steps."
        )
    n_is_public = found.adjacency.num_examples_is_public
    if arguments.json:
        result = {
            "epsilon": found.epsilon,
            "delta": arguments.delta,
            "noise_multiplier": noise_multiplier,
            "adjacency": arguments.adjacency,
            "unit": "example",
            "sampling": arguments.sampling,
            "sampling_prob": sampling_prob,
            "num_examples": arguments.num_examples,
            "batch_size": arguments.batch_size,
            "steps": arguments.steps,
            "accountant": found.accountant.value,
            "method": found.method,
            "num_examples_is_public": n_is_public,
            "tuning": "not charged",
        }
        print_json(result | others)
        return
    known = "counts as public" if n_is_public else "is secret"
    if not n_is_public and arguments.num_examples is not None:
        known += ": take a public guess for --num-examples, and fix probability and divisor with it"
    print_rows(
        {
            "epsilon": f"{upwards(found.epsilon, 6)} at delta {upwards(arguments.delta, 6)}",
            # Rounded up too: epsilon must hold for whoever copies the noise from here.
            "noise": f"{upwards(noise_multiplier, 6)} times the clip norm, in each of "
            f"{arguments.steps} steps",
            "sampling": f"{arguments.sampling}, probability {sampling_prob:.6g}",
            "adjacency": f"{arguments.adjacency}; the number of records {known}",
            "unit": "one example; for user-level privacy let one record be one user",
            "accountant": found.method,
            "tuning": "not charged: this is the cost of one run",
        }
    )
