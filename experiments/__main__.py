"""Dispatcher: `python -m experiments <command> [options]`.

Each command is a module of this package with `main(argv) -> int`. It is imported only when it is
asked for, so that one command never needs the dependencies of another.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "run": ("experiments.deep.run", "final runs of settings files: CIFAR-10, EMNIST, WikiText-2"),
    "sweep": ("experiments.deep.sweep", "search of learning rate and K for settings files"),
    "table": ("experiments.deep.table", "the paper's Table 2 beside the results of these runs"),
    "figures": ("experiments.deep.figures", "their losses and accuracies against steps"),
    "record": ("experiments.record", "CIFAR-10 with 2,000 public images and a modern recipe"),
    "methods": ("experiments.methods", "every use of public data at one ε: EMNIST, CIFAR-10"),
    "features": ("experiments.features", "a private linear model on features of a public network"),
    "linreg": ("experiments.linreg", "Figure 1: simulated linear regression"),
    "stackoverflow": ("experiments.stackoverflow", "user-level privacy: next words of users"),
    "tabular": ("experiments.tabular", "housing and Adult: linear models of real tables"),
    "models": ("experiments.table_models", "real tables: linear models, trees, networks and peers"),
    "tuning": ("experiments.tuned", "real tables: settings by hand, free, paid, or none"),
    "bands": ("experiments.bands", "real tables: noise that is correlated over steps"),
    "lanes": ("experiments.lanes", "several of these commands at a time on one GPU"),
    "shift": ("experiments.shift", "real tables whose public rows are no random sample"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command named by the first argument and returns its exit status."""
    listing = "\n".join(f"  {name:14} {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Reproduce the paper's tables and figures.",
        epilog=f"commands:\n{listing}\n\n'<command> --help' lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    given = sys.argv[1:] if argv is None else argv
    if not given:
        parser.print_help()
        return 2
    arguments = parser.parse_args(given)
    module, _ = COMMANDS[arguments.command]
    try:
        return importlib.import_module(module).main(arguments.options)
    except KeyboardInterrupt:
        print(
            "interrupted. What was finished has its lines; the same command continues.",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
