"""What the commands share: options and their types, errors as one sentence, signs of life."""

import argparse
import contextlib
import contextvars
import difflib
import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from mirrordp.privacy.accounting import Adjacency
from mirrordp.spending.files import StorageError

# A larger epsilon protects nothing.
_LARGEST_TARGET = 1000.0

# Seconds after which something that goes on is mentioned, and after which it is mentioned again.
_PATIENCE = 2.0
_REMINDER = 30.0

quiet = contextvars.ContextVar("quiet", default=False)


class UsageError(Exception):
    """Bad input; the message is one sentence for standard error."""


class Parser(argparse.ArgumentParser):
    """argparse, except that an error is one sentence and no usage text.

    An option that is unknown is said to be so, with the one that may have been meant, before
    anything is said to be missing: what is missing usually is the one that was mistyped.
    """

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parses, once every option is known."""
        given = list(sys.argv[1:] if args is None else args)
        for word in self._own_words(given):
            name = word.partition("=")[0]
            if _OPTION.match(name) and name not in self._option_string_actions:
                known = [option for option in self._option_string_actions if option[:2] == "--"]
                raise UsageError(
                    f"expected only known options, got {name}"
                    f"{did_you_mean(name, known)}; see '{self.prog} --help'."
                )
        return super().parse_known_args(args, namespace)

    def _own_words(self, words: list[str]) -> list[str]:
        """The words that this parser reads itself, not the ones of a command below it."""
        if "--" in words:
            words = words[: words.index("--")]
        if self._subparsers is not None:
            words = list(itertools.takewhile(lambda word: word.startswith("-"), words))
        return words

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError`."""
        raise UsageError(f"{_rephrased(message)}; see '{self.prog} --help'.")


# Not the sign of a number.
_OPTION = re.compile(r"--?[A-Za-z]")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that follows a word that is none of those known, where one of them is near.

    >>> did_you_mean("--epsilom", ["--delta", "--epsilon"])
    ' (did you mean --epsilon?)'
    """
    known = sorted(known)
    bare = word.lstrip("-").replace("_", "-").lower()
    near = [name for name in known if len(bare) > 1 and name.lstrip("-").startswith(bare)]
    near = near or difflib.get_close_matches(f"--{bare}" if word[0] == "-" else bare, known, 1)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _rephrased(message: str) -> str:
    """argparse's own messages in the form: expected, came."""
    missing = "the following arguments are required: "
    if message.startswith(missing):
        return f"expected {message.removeprefix(missing)}, got nothing for it"
    one_of_them = re.search(r"^one of the arguments (.*) is required$", message)
    if one_of_them is not None:
        return f"expected one of {', '.join(one_of_them[1].split())}, got none of them"
    if (
        both := re.search(r"^argument (\S+): not allowed with argument (\S+)$", message)
    ) is not None:
        return f"expected either {both[2]} or {both[1]}, got both"
    if (choice := re.search(r"invalid choice: ('.*?') \(choose from (.*)\)$", message)) is not None:
        known = choice[2].replace("'", "")
        near = did_you_mean(choice[1].strip("'"), known.split(", "))
        return f"expected a command ({known}), got {choice[1]}{near}"
    if message.endswith("expected one argument"):
        message = message.replace("expected one argument", "expected a value, got none")
    return message.removeprefix("argument ")


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """A command of its own, or of another command, with the options that all have."""
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


def add_adjacency(parser: argparse.ArgumentParser) -> None:
    """The option --adjacency."""
    parser.add_argument(
        "--adjacency",
        type=one_of(*(kind.value for kind in Adjacency)),
        default=Adjacency.ZERO_OUT.value,
        metavar="{add-remove,replace,zero-out}",
        help="which data sets are neighbours (default: %(default)s, where N is public)",
    )


# Types of arguments. Each says what it expected and what came; the parser adds what to do.


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
    """Also 1e4 is one."""
    value = int(_whole(text))
    # Beyond 2^53 a float is not the number that was written.
    return int(text) if text.isdecimal() else value


def seed(text: str) -> int:
    """A number 0, 1, ..."""
    if not text.isdecimal():
        raise _expected("a non-negative integer", text)
    return int(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """One of some words."""

    def check(text: str) -> str:
        if text not in choices:
            raise _expected(f"one of {', '.join(choices)}", text)
        return text

    return check


def check_epsilon(epsilon: float) -> None:
    """Refuses a target that means nothing."""
    if epsilon > _LARGEST_TARGET:
        raise UsageError(
            f"expected --epsilon of at most {_LARGEST_TARGET:g}, got {epsilon:g}, which protects "
            "nothing; choose a smaller one."
        )


# The end of a sentence and, unless it is a name in code or an abbreviation, the next one's word.
_NEXT_SENTENCE = re.compile(r"(?<!e\.g)(?<!i\.e)\. (?:([A-Z][a-z]*)(?=[ ,;:\']))?")


def sentence(error: Exception) -> str:
    """A message of the library as one sentence.

    >>> sentence(ValueError("expected a file, got none. Check the path."))
    'expected a file, got none; check the path.'
    """

    def joined(end: re.Match[str]) -> str:
        return "; " + (end[1] or "").lower()

    return _NEXT_SENTENCE.sub(joined, str(error).strip().rstrip(".")) + "."


@contextlib.contextmanager
def table_errors() -> Iterator[None]:
    """Turns what can be wrong with tables into one sentence."""
    try:
        yield
    except (ValueError, TypeError, StorageError) as error:
        raise UsageError(sentence(error)) from None
    except OSError as error:
        raise UsageError(
            f"expected files that can be read and written, got {str(error.filename)!r} "
            f"({error.strerror}); choose another."
        ) from None
    except MemoryError:
        raise UsageError(
            "expected tables that fit in memory, got too large a one; use fewer rows or columns."
        ) from None


@contextlib.contextmanager
def told_on_interruption(advice: str) -> Iterator[None]:
    """Says after Ctrl-C what is left of a run that cannot be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice) from None


@contextlib.contextmanager
def patiently(doing: str) -> Iterator[None]:
    """Says on standard error what is going on where it takes more than two seconds.

    On a terminal the line counts the seconds and goes away at the end; elsewhere it is a plain line
    after two seconds and another one every half minute.
    """
    if quiet.get():
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


def counted(count: int, what: str) -> str:
    """'1 run', '2 runs'."""
    return f"1 {what}" if count == 1 else f"{count} {what}s"
