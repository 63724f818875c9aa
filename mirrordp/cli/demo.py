"""`mirrordp demo`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from mirrordp._rounding import upwards
from mirrordp.cli._common import UsageError, add_command, interruptible, print_json, seed

DEFAULT_FOLDER = "mirrordp-demo"


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "demo",
        _run,
        "train three ways on generated data and compare",
        f"demo --out {DEFAULT_FOLDER}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(DEFAULT_FOLDER),
        metavar="DIR",
        help="folder for report.json, privacy_card.md and results.png (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="seed of data, sampling and noise (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> int:
    folder = _writable(arguments.out)

    from mirrordp import demo
    from mirrordp.report import NOT_FOR_RELEASE

    settings = demo.DemoSettings()
    if not arguments.quiet:
        print(
            f"Training {len(demo.METHODS)} ways at epsilon {settings.epsilon:g}, delta "
            f"{settings.delta:g}; seed {arguments.seed} ({NOT_FOR_RELEASE}).",
            file=sys.stderr,
        )
    with interruptible("Nothing was written, and the demo cannot be resumed; run it again."):
        result = demo.run_demo(
            folder, seed=arguments.seed, settings=settings, progress=not arguments.quiet
        )
    report = result.report
    if arguments.json:
        print_json(
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
            }
        )
        return 0
    together = report.results["epsilon_of_all_methods_on_the_same_rows"]
    print(result.table)
    print()
    print(
        f"Each model: epsilon {upwards(report.epsilon)}, delta {upwards(report.delta, 6)}, "
        f"{report.adjacency.value} adjacency, {report.sampling} sampling, "
        f"{report.accountant.upper()} accountant. All {len(demo.METHODS)} models of the same rows "
        f"together: epsilon {upwards(together)}."
    )
    print(f"Tuning: {demo.TUNING}.")
    print(f"Wrote report.json, privacy_card.md and results.png to {folder}/")
    print(f"Took {result.seconds:.0f} s.")
    return 0


def _writable(folder: Path) -> Path:
    """Makes the folder before the work begins, so that a bad choice fails early."""
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
