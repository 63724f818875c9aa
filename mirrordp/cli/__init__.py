"""The command line: `mirrordp account | calibrate | demo | fit | predict | ...`; see `--help`.

With `--json`, exactly one JSON object goes to standard output. Warnings and progress always go to
standard error: progress as plain lines where standard error is not a terminal, and not at all with
`--quiet`. No command ends in a traceback unless MIRRORDP_TRACEBACK is set. Bad input ends with exit
code 2 and one line that says what was expected, what was given and what to do; the messages of the
library are printed as they are.

Every command is one module. The modules import the library inside the functions that use it, so
that `mirrordp --help` does not wait for JAX and `mirrordp account` never loads it.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    from mirrordp.cli import _main

    return _main.run(argv)


def command() -> NoReturn:
    """Runs the installed `mirrordp` command and ends the process.

    Ctrl-C ends the process at once, also in the middle of an import, except where a command asks
    for a `KeyboardInterrupt` in order to clean up (`_common.interruptible`).
    """
    # A command in the background of a script ignores the signal, and must go on doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    sys.unraisablehook = _leave_if_interrupted
    code = main()
    if signal.getsignal(signal.SIGINT) is leave:
        # The work is done, so Ctrl-C while Python shuts down no longer interrupts it.
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    if code == INTERRUPTED:
        # Computations may be in flight, and would fail noisily in a regular shutdown.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def leave(*_: object) -> NoReturn:
    """Ends the process with one line on standard error; a handler of signals."""
    # Printing could fail, since the signal may have come in the middle of a print.
    os.write(2, b"\r\033[K" * os.isatty(2) + b"mirrordp: interrupted.\n")
    os._exit(INTERRUPTED)


def _leave_if_interrupted(unraisable: Any) -> None:
    """Ends the process where Python would print an interruption that it cannot raise."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        leave()
    sys.__unraisablehook__(unraisable)
