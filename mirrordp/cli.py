"""The command line: `mirrordp account | calibrate | demo | fit | predict | ...`; see `--help`.

With `--json` exactly one JSON object goes to standard output; warnings and progress always go to
standard error, progress as plain lines where that is no terminal, and not at all with `--quiet`.
Nothing ends in a traceback unless MIRRORDP_TRACEBACK is set. Bad input ends with exit code 2 and
one sentence that says what was expected, what came and what to do.
"""

import argparse
import contextlib
import contextvars
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mirrordp
from mirrordp import accounting, tabular
from mirrordp._files import HAS_LOCKS, StorageError
from mirrordp.accounting import Accountant, Adjacency, DpEvent
from mirrordp.budget import Budget, BudgetStatus
from mirrordp.checkpoint import (
    Checkpoint,
    checkpoint_files,
    is_unfinished,
    remove_checkpoints,
)
from mirrordp.mechanism import UNITS
from mirrordp.report import NOT_FOR_RELEASE, ReportError, RunReport, percent_upwards, upwards
from mirrordp.report_commands import add_report_commands
from mirrordp.secure import require_cryptography
from mirrordp.tables import TASKS

DEFAULT_FOLDER = "mirrordp-demo"
RUN_SUFFIX = ".run"
SAMPLINGS = ("poisson", "fixed", "full")
ORDERS = {"default": None, "coarse": accounting.COARSE_ORDERS}

# Beyond these nothing is protected, and computing by how much would take minutes or all memory.
_LEAST_NOISE = 0.01
_MOST_STEPS = 10**7
_LARGEST_TARGET = 1000.0
_LARGEST_FOR_PLD = 1e5


# Seconds after which something that goes on is mentioned, and after which it is mentioned again.
_PATIENCE = 2.0
_REMINDER = 30.0

_quiet = contextvars.ContextVar("quiet", default=False)


class UsageError(Exception):
    """Bad input; the message is one sentence for standard error."""


class _Parser(argparse.ArgumentParser):
    """argparse, except that an error is one sentence and no usage text."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_rephrased(message)}; see '{self.prog} --help'.")


def _rephrased(message: str) -> str:
    """argparse's own messages in the form: expected, came."""
    missing = "the following arguments are required: "
    if message.startswith(missing):
        return f"expected {message.removeprefix(missing)}, got nothing for it"
    if (choice := re.search(r"invalid choice: ('.*?') \(choose from (.*)\)$", message)) is not None:
        return f"expected a command ({choice[2].replace(chr(39), '')}), got {choice[1]}"
    if message.endswith("expected one argument"):
        message = message.replace("expected one argument", "expected a value, got none")
    return message.removeprefix("argument ")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        # What a terminal cannot show is spelt out instead of ending the program.
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        parser = _parser()
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            raise UsageError(
                f"expected only known options, got {' '.join(unknown)}; see "
                f"'{arguments.prog} --help'."
            )
        arguments.command = list(sys.argv[1:] if argv is None else argv)
        with _quiet_accountant(), _one_line_warnings():
            token = _quiet.set(getattr(arguments, "quiet", False))
            try:
                return _finished(arguments.run(arguments))
            finally:
                _quiet.reset(token)
    except (UsageError, ReportError) as error:
        print(f"mirrordp: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interruption:
        advice = f" {interruption}" if str(interruption) else ""
        print(f"mirrordp: interrupted.{advice}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does; Python must not try to flush again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(
            "mirrordp: error: expected files that can be read and written, got "
            f"{str(error.filename)!r} ({error.strerror}); make room or choose another place.",
            file=sys.stderr,
        )
        return 2
    except Exception as error:
        if os.environ.get("MIRRORDP_TRACEBACK"):
            raise
        # The message may quote private data, so the operator has to ask for it.
        print(
            f"mirrordp: error: expected to finish, got {type(error).__name__} "
            f"({_place(error)}), which should not happen; set MIRRORDP_TRACEBACK=1 to see where "
            "from, which may show private data, and please report it.",
            file=sys.stderr,
        )
        return 70


def command() -> NoReturn:
    """What the installed `mirrordp` calls."""
    code = main()
    if code == 130:
        # Computations may be in flight, and would meet what Python takes down at a regular exit.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _finished(code: int) -> int:
    """Flushes here, where a reader that has gone away can still be dealt with."""
    sys.stdout.flush()
    return code


def _place(error: Exception) -> str:
    """File and line of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown place"
    return f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"


@contextlib.contextmanager
def _quiet_accountant() -> Iterator[None]:
    """Hides dp-accounting's notes on Rényi orders it leaves out: leaving one out is safe."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Shows each library warning once, as `mirrordp: warning: ...`, without source code."""
    shown: set[str] = set()

    def show(message, category, filename, lineno, file=None, line=None):
        del category, filename, lineno, file, line
        if (text := f"mirrordp: warning: {message}") not in shown:
            shown.add(text)
            print(text, file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mirrordp",
        allow_abbrev=False,
        description="Differentially private training with the help of a little public data.",
        epilog="example: mirrordp account --noise-multiplier 1.51 --num-examples 48000 "
        "--batch-size 500 --steps 9600 --delta 1e-5",
    )
    parser.add_argument("--version", action="version", version=f"mirrordp {mirrordp.__version__}")
    parser.set_defaults(run=_no_command, prog=parser.prog)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)

    account = _command(
        commands,
        "account",
        _account,
        "epsilon of a mechanism",
        "example: mirrordp account --noise-multiplier 1.51 --num-examples 48000 --batch-size 500 "
        "--steps 9600 --delta 1e-5",
    )
    account.add_argument(
        "--noise-multiplier",
        type=_positive,
        required=True,
        metavar="S",
        help="standard deviation of the noise over the clip norm",
    )
    _add_mechanism_options(account)

    calibrate = _command(
        commands,
        "calibrate",
        _calibrate,
        "the least noise for a given epsilon",
        "example: mirrordp calibrate --epsilon 3 --num-examples 48000 --batch-size 500 "
        "--steps 9600 --delta 1e-5",
    )
    calibrate.add_argument(
        "--epsilon", type=_positive, required=True, metavar="E", help="the epsilon not to exceed"
    )
    _add_mechanism_options(calibrate)

    demo = _command(
        commands,
        "demo",
        _demo,
        "train three ways on generated data and compare",
        f"example: mirrordp demo --out {DEFAULT_FOLDER}",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path(DEFAULT_FOLDER),
        metavar="DIR",
        help="folder for report.json, privacy_card.md and results.png (default: %(default)s)",
    )
    demo.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help="of data, sampling and noise (default: %(default)s)",
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    _add_table_commands(commands)
    _add_budget_commands(commands)
    _add_audit_command(commands)
    add_report_commands(commands, _command)
    return parser


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=example,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no progress; errors and warnings are still shown"
    )
    parser.set_defaults(run=run, prog=parser.prog)
    return parser


def _add_mechanism_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-examples", type=_positive_integer, metavar="N", help="private records"
    )
    parser.add_argument(
        "--batch-size", type=_positive_integer, metavar="B", help="(expected) records per step"
    )
    parser.add_argument(
        "--sampling-prob",
        type=_probability,
        metavar="Q",
        help="probability of a record to join a step, instead of N and B",
    )
    parser.add_argument(
        "--steps", type=_positive_integer, required=True, metavar="T", help="training steps"
    )
    parser.add_argument(
        "--delta", type=_open_unit_interval, required=True, metavar="D", help="delta, below 1/N"
    )
    parser.add_argument(
        "--accountant",
        type=_one_of("pld", "rdp"),
        metavar="{pld,rdp}",
        help="default: pld where it can analyse the mechanism, else rdp",
    )
    parser.add_argument(
        "--orders",
        type=_one_of(*ORDERS),
        metavar="{default,coarse}",
        help="Renyi orders, for --accountant rdp; coarse is the grid behind the paper's 8.32",
    )
    parser.add_argument(
        "--sampling",
        type=_one_of(*SAMPLINGS),
        default="poisson",
        metavar="{poisson,fixed,full}",
        help="how batches are drawn (default: %(default)s)",
    )
    _add_adjacency(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_adjacency(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adjacency",
        type=_one_of(*(kind.value for kind in Adjacency)),
        default=Adjacency.ZERO_OUT.value,
        metavar="{add-remove,replace,zero-out}",
        help="which data sets are neighbours (default: %(default)s, where N is public)",
    )


def _no_command(arguments: argparse.Namespace) -> int:
    del arguments
    raise UsageError(
        "expected a command (account, calibrate, demo, fit, predict, budget, audit, report or "
        "compare), got none; see 'mirrordp --help'."
    )


# Types of arguments. Each says what it expected and what came; the parser adds what to do.


def _float(text: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _expected(expected, text) from None


def _expected(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def _positive(text: str) -> float:
    expected = "a positive finite number"
    value = _float(text, expected)
    if not (math.isfinite(value) and value > 0):
        raise _expected(expected, text)
    return value


def _positive_integer(text: str) -> int:
    expected = "a positive integer"
    value = _float(text, expected)
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise _expected(expected, text)
    return int(text) if text.isdecimal() else int(value)


def _probability(text: str) -> float:
    expected = "a probability above 0 and at most 1"
    value = _float(text, expected)
    if not 0 < value <= 1:
        raise _expected(expected, text)
    return value


def _open_unit_interval(text: str) -> float:
    expected = "a number between 0 and 1, both excluded"
    value = _float(text, expected)
    if not 0 < value < 1:
        raise _expected(expected, text)
    return value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise _expected("a non-negative integer", text)
    return int(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in choices:
            raise _expected(f"one of {', '.join(choices)}", text)
        return text

    return check


# account and calibrate.


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
    if arguments.epsilon > _LARGEST_TARGET:
        raise UsageError(
            f"expected --epsilon of at most {_LARGEST_TARGET:g}, got {arguments.epsilon:g}, which "
            "protects nothing; choose a smaller one."
        )
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
    n, batch, q = arguments.num_examples, arguments.batch_size, arguments.sampling_prob
    steps = arguments.steps
    if steps > _MOST_STEPS:
        raise UsageError(f"expected --steps of at most {_MOST_STEPS}, got {steps}; take fewer.")
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
    if n is not None and arguments.delta > 1 / n:
        warnings.warn(
            f"delta={arguments.delta:g} is above 1/n = {1 / n:.2g}: a mechanism that publishes a "
            "random record would qualify; choose a delta well below 1/n.",
            stacklevel=1,
        )
    adjacency = Adjacency(arguments.adjacency)
    if arguments.sampling == "full":
        if (q is not None and q != 1) or (batch is not None and batch != n):
            came = f"--sampling-prob {q:g}" if q is not None else f"--batch-size {batch}"
            raise UsageError(
                f"expected every record in every batch with --sampling full, got {came}; leave it "
                "out, or use --sampling poisson."
            )
        return lambda sigma: accounting.full_batch_event(sigma, num_steps=steps), 1.0
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
        return (
            lambda sigma: accounting.fixed_size_event(
                sigma, num_examples=n, batch_size=batch, num_steps=steps
            ),
            batch / n,
        )
    if q is None:
        if n is None or batch is None:
            raise UsageError(
                "expected --num-examples with --batch-size, or --sampling-prob, got "
                f"{_given(arguments)}; give one of the two."
            )
        q = batch / n
    return lambda sigma: accounting.poisson_event(sigma, sampling_prob=q, num_steps=steps), q


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
        with _patiently("computing epsilon"):
            return compute()
    except accounting.UnsupportedError as error:
        if arguments.accountant is None:
            raise UsageError(_sentence(error)) from None
        other = "rdp" if arguments.accountant == "pld" else "pld"
        raise UsageError(
            f"expected an accountant for {arguments.sampling} sampling under "
            f"{arguments.adjacency} adjacency, got --accountant {arguments.accountant}; use "
            f"--accountant {other} or leave it out."
        ) from None
    except (ValueError, OverflowError) as error:
        raise UsageError(_sentence(error)) from None
    except MemoryError:
        raise UsageError(
            "expected a mechanism whose privacy loss fits in memory, got too little noise for so "
            "many steps; use more noise, or --accountant rdp."
        ) from None


# The end of a sentence and, unless it is a name in code or an abbreviation, the next one's word.
_NEXT_SENTENCE = re.compile(r"(?<!e\.g)(?<!i\.e)\. (?:([A-Z][a-z]*)(?=[ ,;:\']))?")


def _sentence(error: Exception) -> str:
    """A message of the library as one sentence.

    >>> _sentence(ValueError("expected a file, got none. Check the path."))
    'expected a file, got none; check the path.'
    """

    def joined(end: re.Match[str]) -> str:
        return "; " + (end[1] or "").lower()

    return _NEXT_SENTENCE.sub(joined, str(error).strip().rstrip(".")) + "."


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
        ("epsilon", f"{upwards(found.epsilon, 6)} at delta {arguments.delta:g}"),
        (
            "noise",
            f"{noise_multiplier:.6g} times the clip norm, in each of {arguments.steps} steps",
        ),
        ("sampling", f"{arguments.sampling}, probability {sampling_prob:.6g}"),
        ("adjacency", f"{adjacency.value}; the number of records {kept}"),
        ("unit", "one example; for user-level privacy let one record be one user"),
        ("accountant", found.method),
        ("tuning", "not charged: this is the cost of one run"),
    ]
    for name, value in rows:
        print(f"{name:<12}{value}")


# demo.


def _demo(arguments: argparse.Namespace) -> int:
    folder = _writable(arguments.out)
    # Training needs the whole library; account and calibrate do not.
    from mirrordp import demo

    settings = demo.Settings()
    if not arguments.quiet:
        print(
            f"Training {len(demo.METHODS)} ways at epsilon {settings.epsilon:g}, delta "
            f"{settings.delta:g}; seed {arguments.seed} ({NOT_FOR_RELEASE}).",
            file=sys.stderr,
        )
    with _told_on_interruption("Nothing was written: begin again, the demo keeps nothing."):
        result = demo.run_demo(
            folder, seed=arguments.seed, settings=settings, progress=not arguments.quiet
        )
    report = result.report
    if arguments.json:
        print(
            json.dumps(
                {
                    "epsilon": report.epsilon,
                    "delta": report.delta,
                    "noise_multiplier": report.noise_multiplier,
                    "adjacency": report.adjacency.value,
                    "unit": report.unit,
                    "sampling": report.sampling,
                    "steps": report.charged_steps,
                    "accountant": report.accountant,
                    "method": report.accountant_method,
                    "tuning": report.tuning,
                    "seed": report.seed,
                    "randomness": NOT_FOR_RELEASE,
                    **report.results,
                    "out": str(folder),
                    "seconds": round(result.seconds, 1),
                },
                allow_nan=False,
            )
        )
        return 0
    together = report.results["epsilon_of_all_methods_on_the_same_rows"]
    print(result.table)
    print()
    print(
        f"Each model: epsilon {upwards(report.epsilon)}, delta {report.delta:g}, "
        f"{report.adjacency.value} adjacency, {report.sampling} sampling, "
        f"{report.accountant.upper()} accountant. All {len(demo.METHODS)} models of the same rows "
        f"together: epsilon {upwards(together)}."
    )
    print(f"Tuning: {demo.TUNING}.")
    print(f"Wrote report.json, privacy_card.md and results.png to {folder}/")
    print(f"Took {result.seconds:.0f} s.")
    return 0


# fit and predict.


def _add_table_commands(commands: Any) -> None:
    fit = _command(
        commands,
        "fit",
        _fit,
        "a linear model of a private table, with the help of a public one",
        "example: mirrordp fit --private a.csv --public b.csv --target y --task regression "
        "--epsilon 1 --delta 1e-5 --out model",
    )
    table = "CSV or Parquet"
    for name, summary in (
        ("--private", f"{table}; every row is protected"),
        ("--public", f"{table} with the same columns; types, categories and scales come from it"),
    ):
        fit.add_argument(name, type=Path, required=True, metavar="FILE", help=summary)
    fit.add_argument("--target", required=True, metavar="COLUMN", help="the column to predict")
    fit.add_argument(
        "--task",
        type=_one_of(*TASKS),
        required=True,
        metavar=f"{{{','.join(TASKS)}}}",
        help="what the target is: a number, a class, or a count",
    )
    fit.add_argument(
        "--epsilon", type=_positive, required=True, metavar="E", help="epsilon of this run"
    )
    fit.add_argument(
        "--delta",
        type=_open_unit_interval,
        metavar="D",
        help="delta, below one over the number of private rows (default: that of the budget, or "
        "1e-05)",
    )
    fit.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="new folder for model.json, report.json and privacy_card.md",
    )
    for name, summary in (
        ("--categorical", "its numbers are codes of categories; may be repeated"),
        ("--ignore", "leave it out, as for an identifier; may be repeated"),
    ):
        fit.add_argument(name, action="append", default=[], metavar="COLUMN", help=summary)
    fit.add_argument(
        "--test",
        type=Path,
        metavar="FILE",
        help=f"{table}; further rows that need no protection, to judge the model by",
    )
    fit.add_argument(
        "--secure",
        action="store_true",
        help="noise from a cryptographic generator, exact on a lattice, for models to release "
        "(needs pip install 'mirrordp[secure]'); such a run cannot be repeated or resumed",
    )
    fit.add_argument(
        "--seed", type=_seed, metavar="N", help="for a run that can be repeated: not for release"
    )
    fit.add_argument(
        "--budget",
        type=Path,
        metavar="BUDGET",
        help="charge to this budget (see 'mirrordp budget --help'); refused if it does not fit",
    )
    fit.add_argument(
        "--data-changed",
        action="store_true",
        help="the private file was changed: go on with what is left of the same budget",
    )
    fit.add_argument(
        "--resume",
        action="store_true",
        help="finish a run that was cut off; give the options that it began with",
    )
    fit.add_argument(
        "--wait",
        type=_positive,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for another process on the same budget (default: not at all)",
    )
    fit.add_argument(
        "--keep-checkpoint",
        action="store_true",
        help=f"keep OUT{RUN_SUFFIX}, which is secret: who has it can subtract the noise",
    )
    fit.add_argument("--json", action="store_true", help="print one JSON object")

    predict = _command(
        commands,
        "predict",
        _predict,
        "predictions of a fitted model for a table",
        "example: mirrordp predict --model model --input c.csv --output d.csv",
    )
    for name, metavar, summary in (
        ("--model", "DIR", "the folder that fit made"),
        ("--input", "FILE", table),
        ("--output", "FILE", "Parquet where the name ends in .parquet, else CSV"),
    ):
        predict.add_argument(name, type=Path, required=True, metavar=metavar, help=summary)
    predict.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="copy this column of the input into the output; may be repeated",
    )
    predict.add_argument("--json", action="store_true", help="print one JSON object")


def _fit(arguments: argparse.Namespace) -> int:
    if arguments.epsilon > _LARGEST_TARGET:
        raise UsageError(
            f"expected --epsilon of at most {_LARGEST_TARGET:g}, got {arguments.epsilon:g}, which "
            "protects nothing; choose a smaller one."
        )
    _check_secure(arguments)
    began = time.perf_counter()
    out, run_folder = arguments.out, _run_folder(arguments.out)
    with _table_errors(), _resumable(arguments, run_folder) as charged_to:
        if arguments.resume and (out / tabular.MODEL_FILE).exists():
            return _already_finished(arguments, run_folder)
        tabular.check_new_folder(out)
        _check_run_folder(arguments, run_folder)
        if arguments.data_changed and arguments.budget is None:
            raise UsageError("expected --budget with --data-changed, got none; leave it out.")
        with contextlib.ExitStack() as stack:
            budget = None
            if arguments.budget is not None:
                budget = stack.enter_context(Budget.open(arguments.budget, wait=arguments.wait))
                charged_to.append((budget, budget.status.charges))
            delta = arguments.delta or (1e-5 if budget is None else budget.status.delta)
            fitted = tabular.fit_files(
                arguments.private,
                arguments.public,
                target=arguments.target,
                task=arguments.task,
                epsilon=arguments.epsilon,
                delta=delta,
                secure=arguments.secure,
                seed=arguments.seed,
                categorical=arguments.categorical,
                ignore=arguments.ignore,
                test=arguments.test,
                budget=budget,
                data_changed=arguments.data_changed,
                # Kept until the model is on disk: only then is there nothing left to resume.
                checkpoint=Checkpoint(run_folder, resume=arguments.resume, keep=True)
                if HAS_LOCKS and not arguments.secure
                else None,
                stage=_patiently,
            )
            fitted.write(out)
            _remove_secrets(arguments, run_folder)
    report, model, seconds = fitted.report, fitted.model, time.perf_counter() - began
    if arguments.json:
        result = {
            "epsilon": report.epsilon,
            "delta": report.delta,
            "adjacency": report.adjacency.value,
            "unit": report.unit,
            "steps": report.charged_steps,
            "accountant": report.accountant,
            "noise": report.noise,
            "tuning": report.tuning,
            "task": model.task,
            "target": arguments.target,
            "features": list(model.encoding.features),
            "left_out": dict(fitted.left_out),
            "out": str(arguments.out),
            "seconds": round(seconds, 1),
        }
        if report.seed is not None:
            result |= {"seed": report.seed, "randomness": NOT_FOR_RELEASE}
        if report.ledger is not None:
            result["ledger"] = dict(report.ledger)
        print(json.dumps(result, allow_nan=False))
        return 0
    print(
        f"Fitted {model.task} of {arguments.target!r} on {len(model.encoding.columns)} columns, "
        f"{len(model.encoding.features)} features, in {report.charged_steps} noisy steps."
    )
    for name, reason in fitted.left_out.items():
        print(f"Left out: {name!r}, {reason}.")
    if report.charged_steps == 0:
        print(
            "At this epsilon private rows would bring more noise than knowledge: this is the model "
            "of the public rows alone."
        )
    print(
        f"Privacy: epsilon {upwards(report.epsilon)}, delta {report.delta:g} for every private "
        "row; the number of rows counts as public."
    )
    if report.is_secure and report.charged_steps > 0:
        print("Noise: from a cryptographic generator, exact on a lattice; rounding is charged.")
    if report.ledger is not None:
        budget = report.ledger["budget"]
        print(
            f"Budget: {percent_upwards(budget['used'])} used after {_count(budget['runs'], 'run')}"
            f"; all of them together have at most epsilon {budget['epsilon']:g}, delta "
            f"{budget['delta']:g}."
        )
    if report.seed is not None:
        print(f"Seed {report.seed}: {NOT_FOR_RELEASE}; leave --seed out to publish the model.")
    for name in ("rmse", "loss", "accuracy"):
        if f"test_{name}" in report.results:
            baseline = report.results.get(f"baseline_{name}")
            guess = "" if baseline is None else f" (without features: {baseline:.4g})"
            print(f"On test rows: {name} {report.results[f'test_{name}']:.4g}{guess}.")
    print(f"Wrote {tabular.MODEL_FILE}, report.json and privacy_card.md to {arguments.out}/")
    print(f"Took {seconds:.0f} s.")
    return 0


def _run_folder(out: Path) -> Path:
    """Where a fit keeps its randomness: beside the folder that is released, never in it."""
    return out.absolute().with_name(out.absolute().name + RUN_SUFFIX)


def _check_run_folder(arguments: argparse.Namespace, run_folder: Path) -> None:
    unfinished = is_unfinished(run_folder)
    if unfinished and not arguments.resume:
        raise UsageError(
            f"expected no unfinished run for --out {arguments.out}, got one in "
            f"{str(run_folder)!r}; add --resume to finish it, or remove that folder to give it up "
            "(what was charged stays charged)."
        )
    if arguments.resume and not unfinished:
        raise UsageError(
            f"expected a run to resume in {str(run_folder)!r}, got none; leave --resume out."
        )


def _already_finished(arguments: argparse.Namespace, run_folder: Path) -> int:
    """The model was written, and only what is secret had not been removed."""
    tabular.TableModel.load(arguments.out)
    report = RunReport.read(arguments.out)
    _remove_secrets(arguments, run_folder)
    if arguments.json:
        result = {"epsilon": report.epsilon, "delta": report.delta, "out": str(arguments.out)}
        print(json.dumps({**result, "finished": "before"}, allow_nan=False))
    else:
        # Nothing was compared with the options of this call, so it says what the run was.
        print(
            f"The run had finished: {arguments.out}/ holds its model, {report.title}, epsilon "
            f"{upwards(report.epsilon)}, delta {report.delta:g}."
        )
    return 0


def _remove_secrets(arguments: argparse.Namespace, run_folder: Path) -> None:
    if arguments.keep_checkpoint or not run_folder.is_dir():
        return
    try:
        remove_checkpoints(run_folder)
        shutil.rmtree(run_folder)
    except OSError as error:
        warnings.warn(
            f"{str(run_folder)!r} could not be removed ({error.strerror}); remove it by hand: who "
            "has it can subtract the noise.",
            stacklevel=1,
        )


def _check_secure(arguments: argparse.Namespace) -> None:
    """Refuses what a run that cannot be repeated has no use for, and a missing library."""
    if not arguments.secure:
        return
    for option, given in (
        ("--seed", arguments.seed is not None),
        ("--resume", arguments.resume),
        ("--keep-checkpoint", arguments.keep_checkpoint),
    ):
        if given:
            raise UsageError(
                f"expected --secure or {option}, got both, and a secure run cannot be repeated: "
                "its noise is written down nowhere; leave one of them out."
            )
    try:
        require_cryptography()
    except ImportError as error:
        raise UsageError(_sentence(error)) from None


@contextlib.contextmanager
def _resumable(
    arguments: argparse.Namespace, run_folder: Path
) -> Iterator[list[tuple[Budget, int]]]:
    """Says after Ctrl-C how to go on.

    Yields a list for the budget that the run is charged to and its number of charges before.
    """
    charged_to: list[tuple[Budget, int]] = []
    model = arguments.out / tabular.MODEL_FILE
    was_there = model.exists()
    try:
        yield charged_to
    except KeyboardInterrupt:
        if not checkpoint_files(run_folder):
            if model.exists() and not was_there:
                raise KeyboardInterrupt(
                    f"The run had finished: {arguments.out}/ holds its model."
                ) from None
            if any(budget.status.charges > before for budget, before in charged_to):
                raise KeyboardInterrupt(
                    "The run was charged, and a secure run cannot be resumed: its noise is written "
                    "down nowhere. What was charged stays charged."
                ) from None
            raise KeyboardInterrupt("Nothing was charged.") from None
        command = [word for word in arguments.command if word != "--resume"]
        raise KeyboardInterrupt(
            f"To finish the run: {shlex.join(['mirrordp', *command, '--resume'])}"
        ) from None


@contextlib.contextmanager
def _told_on_interruption(advice: str) -> Iterator[None]:
    """Says after Ctrl-C what is left of a run that cannot be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice) from None


def _predict(arguments: argparse.Namespace) -> int:
    with _table_errors(), _told_on_interruption("Nothing was written: run the command again."):
        model = tabular.TableModel.load(arguments.model)
        rows = tabular.predict_file(
            model, arguments.input, arguments.output, keep=arguments.keep, stage=_patiently
        )
    if arguments.json:
        print(json.dumps({"rows": rows, "output": str(arguments.output)}))
    else:
        print(f"Wrote {rows} predictions to {arguments.output}")
    return 0


# budget.


def _add_budget_commands(commands: Any) -> None:
    summary = "one budget for all runs on the same private data"
    budget = _command(
        commands,
        "budget",
        _no_budget_command,
        summary,
        "example: mirrordp budget init b --epsilon 3 --delta 1e-6 --data private.csv",
    )
    kinds = budget.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    init = _command(
        kinds,
        "init",
        _budget_init,
        "a new budget, bound to a data file",
        "example: mirrordp budget init b --epsilon 3 --delta 1e-6 --data private.csv",
    )
    init.add_argument("folder", type=Path, metavar="DIR", help="a new folder; keep it to yourself")
    init.add_argument(
        "--epsilon",
        type=_positive,
        required=True,
        metavar="E",
        help="epsilon of all runs together, however they are chosen",
    )
    init.add_argument(
        "--delta", type=_open_unit_interval, required=True, metavar="D", help="delta, below 1/N"
    )
    init.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="the private data; a fingerprint of it, keyed with a secret in DIR, is kept",
    )
    _add_adjacency(init)
    init.add_argument(
        "--unit",
        type=_one_of(*UNITS),
        default=UNITS[0],
        metavar=f"{{{','.join(UNITS)}}}",
        help="what one record is (default: %(default)s)",
    )
    show = _command(
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
        _table_errors(),
        _patiently(f"reading {arguments.data}"),
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
    with _table_errors():
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
        room = (
            f"a full-batch run (mirrordp fit) of epsilon {status.largest_epsilon:g} at delta "
            f"{status.delta:g}, for example"
        )
    rows = [
        (
            "promise",
            f"epsilon {status.epsilon:g}, delta {status.delta:g} for all runs together, however "
            "they are chosen",
        ),
        ("adjacency", status.adjacency.value),
        ("unit", f"one {status.unit}"),
        ("used", f"{percent_upwards(status.used)}, by {_count(status.runs, 'run')}"),
        ("room for", room),
        ("ledger", f"{_count(status.position.length, 'record')}, head {status.position.head}"),
    ]
    for name, value in rows:
        print(f"{name:<12}{value}")


def _count(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


@contextlib.contextmanager
def _table_errors() -> Iterator[None]:
    """Turns what can be wrong with tables into one sentence."""
    try:
        yield
    except (ValueError, TypeError, StorageError) as error:
        raise UsageError(_sentence(error)) from None
    except OSError as error:
        raise UsageError(
            f"expected files that can be read and written, got {str(error.filename)!r} "
            f"({error.strerror}); choose another."
        ) from None
    except MemoryError:
        raise UsageError(
            "expected tables that fit in memory, got too large a one; use fewer rows or columns."
        ) from None


# audit.


def _add_audit_command(commands: Any) -> None:
    audit = _command(
        commands,
        "audit",
        _audit,
        "attack the library's own algorithms and compare with the stated epsilon",
        "example: mirrordp audit --noise-multiplier 3 --steps 16 --canaries 240; exit code 1 means "
        "that a claim was refuted",
    )
    options = [
        ("--noise-multiplier", _positive, 3.0, "S", "standard deviation over the clip norm"),
        ("--sampling-prob", _probability, 0.25, "Q", "probability of a record to join a step"),
        ("--steps", _positive_integer, 16, "T", "number of steps"),
        ("--canaries", _positive_integer, 240, "N", "records, all of them canaries"),
        ("--runs", _positive_integer, 200, "N", "runs with, and without, the paired canary"),
        ("--delta", _open_unit_interval, 1e-5, "D", "delta of the claim"),
        ("--confidence", _open_unit_interval, 0.95, "P", "of all bounds together"),
    ]
    for name, kind, default, metavar, text in options:
        audit.add_argument(
            name, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)"
        )
    algorithms, attacks = (
        ("dp-sgd", "pda-dpmd", "exact-pda-dpmd", "federated-pda-dpmd"),
        ("one-run", "paired", "gaussian"),
    )
    for name, choices in (("--algorithm", algorithms), ("--attack", attacks)):
        audit.add_argument(
            name,
            type=_one_of("all", *choices),
            default="all",
            metavar="NAME",
            help=f"{', '.join(choices)} or all (default: %(default)s)",
        )
    audit.add_argument("--seed", type=_seed, metavar="N", help="makes the audit repeatable")
    audit.add_argument("--json", action="store_true", help="print one JSON object")


def _chosen(kind: Any, name: str) -> list[Any]:
    return list(kind) if name == "all" else [kind(name)]


def _audit(arguments: argparse.Namespace) -> int:
    from mirrordp import auditing
    from mirrordp.mechanism import Mechanism
    from mirrordp.sampling import PoissonSampling

    if arguments.canaries < 30:
        raise UsageError(
            f"expected --canaries of at least 30, got {arguments.canaries}; fewer prove nothing."
        )
    if (arguments.algorithm, arguments.attack) == ("federated-pda-dpmd", "paired"):
        raise UsageError(
            "expected --attack one-run or gaussian for the federated algorithm, got paired; choose "
            "one of them."
        )
    mechanism = Mechanism(
        sampling=PoissonSampling.for_batch_size(
            arguments.sampling_prob * arguments.canaries, num_examples=arguments.canaries
        ),
        l2_clip_norm=1.0,
        noise_multiplier=arguments.noise_multiplier,
        num_steps=arguments.steps,
    )
    with (
        _told_on_interruption("Begin again: an audit keeps nothing."),
        _patiently("training canaries and attacking them"),
    ):
        found = auditing.audit(
            mechanism,
            algorithms=_chosen(auditing.Algorithm, arguments.algorithm),
            attacks=_chosen(auditing.Attack, arguments.attack),
            delta=arguments.delta,
            confidence=arguments.confidence,
            num_runs=arguments.runs,
            seed=arguments.seed,
        )
    refuted = any(result.refuted for result in found)
    if arguments.json:
        rows = [
            {
                "algorithm": result.algorithm.value,
                "attack": result.attack.value,
                "measure": result.measure,
                "reported": result.reported,
                "lower_bound": result.lower_bound,
                "refuted": result.refuted,
            }
            for result in found
        ]
        shared = {"delta": arguments.delta, "confidence": arguments.confidence}
        print(json.dumps({"refuted": refuted, **shared, "audits": rows}))
        return int(refuted)
    print(f"{'algorithm':<20}{'attack':<10}{'of':<9}{'reported':>9}{'at least':>10}")
    for result in found:
        print(
            f"{result.algorithm.value:<20}{result.attack.value:<10}{result.measure:<9}"
            f"{result.reported:>9.3f}{result.lower_bound:>10.3f}"
            + ("  REFUTED" if result.refuted else "")
        )
    print(
        f"All {len(found)} lower bounds hold together with confidence {arguments.confidence:g} "
        f"(delta {arguments.delta:g})."
    )
    print(
        "A claim was refuted: do not release models trained with this installation."
        if refuted
        else "No claim was refuted, which does not prove that they are true; see docs/auditing.md."
    )
    return int(refuted)


@contextlib.contextmanager
def _patiently(doing: str) -> Iterator[None]:
    """Says on standard error what is going on where it takes more than two seconds.

    On a terminal the line counts the seconds and goes away at the end; elsewhere it is a plain line
    after two seconds and another one every half minute.
    """
    if _quiet.get():
        yield
        return
    done = threading.Event()
    terminal = sys.stderr.isatty()
    began = time.monotonic()

    def tell() -> None:
        shown = not done.wait(_PATIENCE)
        if shown and not terminal:
            print(f"mirrordp: {doing} ...", file=sys.stderr, flush=True)
        while not done.is_set():
            if terminal:
                line = f"mirrordp: {doing} ... {time.monotonic() - began:.0f} s"
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            if not done.wait(1.0 if terminal else _REMINDER) and not terminal:
                line = f"mirrordp: {doing} ... {time.monotonic() - began:.0f} s"
                print(line, file=sys.stderr, flush=True)
        if shown and terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _writable(folder: Path) -> Path:
    """Makes the folder before the work begins, rather than failing after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".mirrordp-writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"expected --out to be a folder that can be written, got {str(folder)!r} "
            f"({error.strerror}); choose another."
        ) from None
    return folder


if __name__ == "__main__":
    command()
