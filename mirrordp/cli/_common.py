"""Options and their types, errors in one line, interruptions and progress: for all commands."""

import argparse
import contextlib
import contextvars
import itertools
import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from mirrordp import cli

ADJACENCIES = ("add-remove", "replace", "zero-out")

# A larger epsilon protects nothing.
_LARGEST_TARGET = 1000.0

# Seconds after which a computation is first mentioned, and after which it is mentioned again.
_PATIENCE = 2.0
_REMINDER = 30.0

quiet = contextvars.ContextVar("quiet", default=False)


class UsageError(Exception):
    """Bad input; the message is one line for standard error."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises a `UsageError` instead of printing its usage.

    It names an unknown option, and the one that may have been meant, before it complains about a
    missing one: the missing option usually is the one that was mistyped.
    """

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parses the arguments after checking that every option is known."""
        given = list(sys.argv[1:] if args is None else args)
        for word in self._own_words(given):
            name = word.partition("=")[0]
            if _OPTION.match(name) and name not in self._option_string_actions:
                known = [option for option in self._option_string_actions if option[:2] == "--"]
                self.error(f"expected only known options, got {name}{did_you_mean(name, known)}")
        return super().parse_known_args(args, namespace)

    def _own_words(self, words: list[str]) -> list[str]:
        """Returns the words that this parser reads itself, not those of a command below it."""
        if "--" in words:
            words = words[: words.index("--")]
        if self._subparsers is not None:
            words = list(itertools.takewhile(lambda word: word.startswith("-"), words))
        return words

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(action.choices)
            near = did_you_mean(value, known)
            self.error(f"expected a command ({', '.join(known)}), got {value!r}{near}")

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError`."""
        raise UsageError(f"{message}; see '{self.prog} --help'.")


# A sign followed by a digit is a number.
_OPTION = re.compile(r"--?[A-Za-z]")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question in parentheses if an unknown word is close to a known one.

    >>> did_you_mean("--epsilom", ["--delta", "--epsilon"])
    ' (did you mean --epsilon?)'
    """
    import difflib

    known = sorted(known)
    bare = word.lstrip("-").replace("_", "-").lower()
    near = [name for name in known if len(bare) > 1 and name.lstrip("-").startswith(bare)]
    near = near or difflib.get_close_matches(f"--{bare}" if word[:1] == "-" else bare, known, 1)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """Adds a command, or a command of a command, with the options that all commands have."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: mirrordp {example}",
        allow_abbrev=False,
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--quiet", action="store_true", help="show no progress, only results and warnings"
    )
    parser.set_defaults(run=run, prog=parser.prog)
    return parser


def add_adjacency(parser: argparse.ArgumentParser) -> None:
    """Adds the option --adjacency."""
    parser.add_argument(
        "--adjacency",
        type=one_of(*ADJACENCIES),
        default="zero-out",
        metavar=f"{{{','.join(ADJACENCIES)}}}",
        help="which data sets are neighbours (default: %(default)s, where N is public)",
    )


# Types of arguments. Each says what it expected and what was given; argparse names the option.


def _expected(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def _number(expected: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    def check(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise _expected(expected, text) from None
        if not holds(value):
            raise _expected(expected, text)
        return value

    return check


positive = _number("a positive finite number", lambda value: 0 < value < math.inf)
probability = _number("a probability above 0 and at most 1", lambda value: 0 < value <= 1)
open_unit_interval = _number("a number between 0 and 1, both excluded", lambda value: 0 < value < 1)
_whole = _number("a positive integer", lambda value: value >= 1 and value.is_integer())


def positive_integer(text: str) -> int:
    """Reads a positive integer, which may be written as 1e4."""
    value = int(_whole(text))
    # Beyond 2^53 a float is not the number that was written.
    return int(text) if text.isdecimal() else value


def seed(text: str) -> int:
    """Reads a non-negative integer."""
    if not text.isdecimal():
        raise _expected("a non-negative integer", text)
    return int(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Returns a function that reads one of several words."""

    def check(text: str) -> str:
        if text not in choices:
            raise _expected(f"one of {', '.join(choices)}", text)
        return text

    return check


def check_epsilon(epsilon: float) -> None:
    """Refuses a target that protects nothing."""
    if epsilon > _LARGEST_TARGET:
        raise UsageError(
            f"expected --epsilon of at most {_LARGEST_TARGET:g}, got {epsilon:g}, which protects "
            "nothing; choose a smaller one."
        )


@contextlib.contextmanager
def library_errors(advice: str = "use fewer rows or columns") -> Iterator[None]:
    """Turns an error about the caller's input into a `UsageError` with the same message.

    Args:
        advice: what to do if memory is exhausted.
    """
    from mirrordp.spending.files import StorageError

    try:
        yield
    except (ValueError, TypeError, OverflowError, StorageError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(
            f"expected files that can be read and written, got {str(error.filename)!r} "
            f"({error.strerror}); choose another."
        ) from None
    except MemoryError:
        raise UsageError(
            f"expected a computation that fits in memory, got one that does not; {advice}."
        ) from None


@contextlib.contextmanager
def interruptible(advice: str = "") -> Iterator[None]:
    """Lets Ctrl-C end the work inside with a `KeyboardInterrupt`, so that it can clean up.

    Outside, the installed command ends at once, which leaves no traceback even if Ctrl-C comes in
    the middle of an import. Do such imports before.

    Args:
        advice: what the user is told about the state of the work.
    """
    is_command = signal.getsignal(signal.SIGINT) is cli.leave
    if is_command:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as interruption:
        raise KeyboardInterrupt(str(interruption) or advice) from None
    finally:
        if is_command:
            signal.signal(signal.SIGINT, cli.leave)


@contextlib.contextmanager
def patiently(doing: str) -> Iterator[Callable[[str], None]]:
    """Says on standard error what is going on if it takes more than two seconds.

    On a terminal the line counts the seconds and goes away at the end; elsewhere it is a plain line
    after two seconds and another one every half minute. Yields a function that takes how far the
    work is, for the next line.
    """
    if quiet.get():
        yield lambda _: None
        return
    done = threading.Event()
    terminal = sys.stderr.isatty()
    began = time.monotonic()
    so_far = ""

    def note(text: str) -> None:
        nonlocal so_far
        so_far = f" {text},"

    def tell() -> None:
        shown = not done.wait(_PATIENCE)
        if shown and not terminal:
            print(f"mirrordp: {doing} ...", file=sys.stderr, flush=True)
        while not done.is_set():
            if terminal:
                line = f"mirrordp: {doing} ...{so_far} {time.monotonic() - began:.0f} s"
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            if not done.wait(1.0 if terminal else _REMINDER) and not terminal:
                line = f"mirrordp: {doing} ...{so_far} {time.monotonic() - began:.0f} s"
                print(line, file=sys.stderr, flush=True)
        if shown and terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        done.set()
        thread.join()


def print_json(result: Mapping[str, Any]) -> None:
    """Prints one JSON object on one line."""
    print(json.dumps(result, allow_nan=False))


def print_rows(rows: Mapping[str, str]) -> None:
    """Prints names and values in two columns."""
    for name, value in rows.items():
        print(f"{name:<12}{value}")


def counted(count: int, what: str) -> str:
    """Returns '1 run' or '2 runs'."""
    return f"1 {what}" if count == 1 else f"{count} {what}s"
