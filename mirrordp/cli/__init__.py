"""The command line: `mirrordp account | calibrate | demo | fit | predict | ...`; see `--help`.

With `--json` exactly one JSON object goes to standard output; warnings and progress always go to
standard error, progress as plain lines where that is no terminal, and not at all with `--quiet`.
Nothing ends in a traceback unless MIRRORDP_TRACEBACK is set. Bad input ends with exit code 2 and
one sentence that says what was expected, what came and what to do.
"""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import mirrordp
from mirrordp.cli._account import add_account_commands
from mirrordp.cli._audit import add_audit_command
from mirrordp.cli._budget import add_budget_commands
from mirrordp.cli._common import Parser, UsageError, quiet
from mirrordp.cli._demo import add_demo_command
from mirrordp.cli._reports import add_report_commands
from mirrordp.cli._tables import add_table_commands
from mirrordp.report import ReportError


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
            token = quiet.set(getattr(arguments, "quiet", False))
            try:
                return _finished(arguments.run(arguments))
            finally:
                quiet.reset(token)
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


def _parser() -> Parser:
    parser = Parser(
        prog="mirrordp",
        allow_abbrev=False,
        description="Differentially private training with the help of a little public data.",
        epilog="example: mirrordp account --noise-multiplier 1.51 --num-examples 48000 "
        "--batch-size 500 --steps 9600 --delta 1e-5",
    )
    parser.add_argument("--version", action="version", version=f"mirrordp {mirrordp.__version__}")
    parser.set_defaults(run=_no_command, prog=parser.prog)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    add_account_commands(commands)
    add_demo_command(commands)
    add_table_commands(commands)
    add_budget_commands(commands)
    add_audit_command(commands)
    add_report_commands(commands)
    return parser


def _no_command(arguments: argparse.Namespace) -> NoReturn:
    del arguments
    raise UsageError(
        "expected a command (account, calibrate, demo, fit, predict, budget, audit, report or "
        "compare), got none; see 'mirrordp --help'."
    )
