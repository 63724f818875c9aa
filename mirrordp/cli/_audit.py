"""`mirrordp audit`."""

import argparse
import json
import math
from typing import Any

from mirrordp.cli._common import (
    UsageError,
    add_command,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    positive_integer,
    probability,
    seed,
    told_on_interruption,
)


def add_audit_command(commands: Any) -> None:
    """Registers it."""
    audit = add_command(
        commands,
        "audit",
        _audit,
        "attack the library's own algorithms and compare with the stated epsilon",
        "example: mirrordp audit --noise-multiplier 3 --steps 16 --canaries 240; exit code 1 means "
        "that a claim was refuted",
    )
    options = [
        ("--noise-multiplier", positive, 3.0, "S", "standard deviation over the clip norm"),
        ("--sampling-prob", probability, 0.25, "Q", "probability of a record to join a step"),
        ("--steps", positive_integer, 16, "T", "number of steps"),
        ("--canaries", positive_integer, 240, "N", "records, all of them canaries"),
        ("--runs", positive_integer, 200, "N", "runs with, and without, the paired canary"),
        ("--delta", open_unit_interval, 1e-5, "D", "delta of the claim"),
        ("--confidence", open_unit_interval, 0.95, "P", "of all bounds together"),
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
            type=one_of("all", *choices),
            default="all",
            metavar="NAME",
            help=f"{', '.join(choices)} or all (default: %(default)s)",
        )
    audit.add_argument("--seed", type=seed, metavar="N", help="makes the audit repeatable")
    audit.add_argument("--json", action="store_true", help="print one JSON object")


def _downwards(bound: float) -> str:
    """Three decimals, rounded down: no more than was proved."""
    return f"{math.floor(1000 * bound) / 1000:.3f}"


def _chosen(kind: Any, name: str) -> list[Any]:
    return list(kind) if name == "all" else [kind(name)]


def _audit(arguments: argparse.Namespace) -> int:
    from mirrordp import auditing
    from mirrordp.mechanism import Mechanism
    from mirrordp.report import upwards
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
        told_on_interruption("Begin again: an audit keeps nothing."),
        patiently("training canaries and attacking them"),
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
            f"{upwards(result.reported):>9}{_downwards(result.lower_bound):>10}"
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
