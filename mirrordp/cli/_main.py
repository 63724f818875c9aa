"""Parses the arguments, runs the command, and turns every failure into one line."""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

from mirrordp._versions import VERSION
from mirrordp.cli import (
    INTERRUPTED,
    account,
    audit,
    budget,
    calibrate,
    compare,
    demo,
    export,
    fit,
    plan,
    predict,
    report,
    serve,
    tune,
)
from mirrordp.cli._common import Parser, UsageError, quiet


def run(argv: Sequence[str] | None) -> int:
    """Runs the command line and returns the exit code."""
    try:
        # Characters that a terminal cannot show are escaped instead of ending the program.
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            raise UsageError(
                f"expected only known options, got {' '.join(unknown)}; see "
                f"'{arguments.prog} --help'."
            )
        arguments.command = list(sys.argv[1:] if argv is None else argv)
        with _one_line_warnings():
            token = quiet.set(getattr(arguments, "quiet", False))
            try:
                code = arguments.run(arguments)
                # Flushed here, where a reader that has gone away can still be dealt with.
                sys.stdout.flush()
                return code
            finally:
                quiet.reset(token)
    except UsageError as error:
        return _failed(f"error: {error}")
    except KeyboardInterrupt as interruption:
        return _failed(f"interrupted. {interruption}".rstrip(), INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output has gone, as `head` does; Python must not flush again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _failed(
            "error: expected files that can be read and written, got "
            f"{str(error.filename)!r} ({error.strerror}); make room or choose another place."
        )
    except Exception as error:
        if os.environ.get("MIRRORDP_TRACEBACK"):
            raise
        # The message may quote private data, so it is shown only on request.
        return _failed(
            f"error: an unexpected {type(error).__name__} occurred ({_place(error)}). Please "
            "report it. MIRRORDP_TRACEBACK=1 shows the traceback, which may hold private data.",
            70,
        )


def _failed(message: str, code: int = 2) -> int:
    print(f"mirrordp: {message}", file=sys.stderr)
    return code


def _place(error: Exception) -> str:
    """Returns the file and line of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown place"
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}, line {trace.tb_lineno}"


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
    parser.add_argument("--version", action="version", version=f"mirrordp {VERSION}")
    parser.set_defaults(run=_no_command, prog=parser.prog)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for module in (
        *(account, calibrate, plan, demo, fit, predict, export, serve, tune),
        *(budget, audit, report, compare),
    ):
        module.add(commands)
    return parser


def _no_command(arguments: argparse.Namespace) -> NoReturn:
    del arguments
    raise UsageError(
        "expected a command (account, calibrate, plan, demo, fit, predict, export, serve, tune, "
        "budget, audit, report or compare), got none; see 'mirrordp --help'."
    )
