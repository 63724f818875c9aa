"""`mirrordp demo`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mirrordp.cli._common import UsageError, add_command, seed, told_on_interruption
from mirrordp.report import NOT_FOR_RELEASE, upwards

DEFAULT_FOLDER = "mirrordp-demo"


def add_demo_command(commands: Any) -> None:
    """Registers it."""
    demo = add_command(
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
        type=seed,
        default=0,
        metavar="N",
        help="of data, sampling and noise (default: %(default)s)",
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object")


def _demo(arguments: argparse.Namespace) -> int:
    folder = _writable(arguments.out)
    # Training needs the whole library; account and calibrate do not.
    from mirrordp import demo

    settings = demo.DemoSettings()
    if not arguments.quiet:
        print(
            f"Training {len(demo.METHODS)} ways at epsilon {settings.epsilon:g}, delta "
            f"{settings.delta:g}; seed {arguments.seed} ({NOT_FOR_RELEASE}).",
            file=sys.stderr,
        )
    with told_on_interruption("Nothing was written: begin again, the demo keeps nothing."):
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
