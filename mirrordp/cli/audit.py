"""`mirrordp audit`."""

import argparse
import json
import math
import textwrap
from typing import Any

from mirrordp._rounding import downwards, upwards
from mirrordp.cli._common import (
    UsageError,
    add_command,
    interruptible,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    positive_integer,
    probability,
    seed,
)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "audit",
        _run,
        "attack the library's own algorithms and compare with the stated epsilon",
        "audit --noise-multiplier 3 --steps 16 --canaries 240; exit code 1 means that a claim was "
        "refuted",
    )
    options = [
        ("--noise-multiplier", positive, 3.0, "S", "standard deviation over the clip norm"),
        ("--sampling-prob", probability, 0.25, "Q", "probability that a record joins a step"),
        ("--steps", positive_integer, 16, "T", "number of steps"),
        ("--canaries", positive_integer, 240, "N", "records, all of which are canaries"),
        ("--runs", positive_integer, 200, "N", "runs with, and without, the paired canary"),
        ("--delta", open_unit_interval, 1e-5, "D", "delta of the claim"),
        ("--confidence", open_unit_interval, 0.95, "P", "confidence of all bounds together"),
    ]
    for name, kind, default, metavar, text in options:
        parser.add_argument(
            name, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)"
        )
    algorithms, attacks = (
        ("dp-sgd", "pda-dpmd", "exact-pda-dpmd", "federated-pda-dpmd"),
        ("one-run", "paired", "gaussian", "noise", "sampling"),
    )
    for name, choices in (("--algorithm", algorithms), ("--attack", attacks)):
        parser.add_argument(
            name,
            type=one_of("all", *choices),
            default="all",
            metavar="NAME",
            help=f"{', '.join(choices)} or all (default: %(default)s)",
        )
    parser.add_argument("--seed", type=seed, metavar="N", help="makes the audit repeatable")


def _chosen(kind: Any, name: str) -> list[Any]:
    return list(kind) if name == "all" else [kind(name)]


def _run(arguments: argparse.Namespace) -> int:
    if arguments.canaries < 30:
        raise UsageError(
            f"expected --canaries of at least 30, got {arguments.canaries}; fewer prove nothing."
        )
    if (arguments.algorithm, arguments.attack) == ("federated-pda-dpmd", "paired"):
        raise UsageError(
            "expected --attack one-run, gaussian, noise or sampling for the federated algorithm, "
            "got paired; choose one of them."
        )
    if arguments.attack == "sampling" and arguments.sampling_prob == 1:
        raise UsageError(
            "expected --sampling-prob below 1 for --attack sampling, got 1; nothing is drawn where "
            "every record joins every step."
        )
    from mirrordp import auditing
    from mirrordp.privacy.mechanism import Mechanism
    from mirrordp.privacy.sampling import PoissonSampling

    mechanism = Mechanism(
        sampling=PoissonSampling.for_batch_size(
            arguments.sampling_prob * arguments.canaries, num_examples=arguments.canaries
        ),
        l2_clip_norm=1.0,
        noise_multiplier=arguments.noise_multiplier,
        num_steps=arguments.steps,
    )
    with (
        interruptible("An audit cannot be resumed; run it again."),
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
                "problems": list(result.problems),
                "notices": dict(result.notices),
            }
            for result in found
        ]
        shared = {
            "delta": arguments.delta,
            "confidence": arguments.confidence,
            "power": auditing.POWER,
        }
        print(json.dumps({"refuted": refuted, **shared, "audits": rows}))
        return int(refuted)
    print(
        f"{'algorithm':<20}{'attack':<10}{'of':<9}{'stated':>8}{'at least':>10}  would have noticed"
    )
    for result in found:
        print(
            f"{result.algorithm.value:<20}{result.attack.value:<10}{result.measure:<9}"
            f"{upwards(result.reported):>8}{downwards(result.lower_bound):>10}  "
            + ("REFUTED" if result.refuted else _noticed(result.notices))
        )
        for problem in result.problems:
            print(f"{'':<20}{problem}")
    print()
    for text in _explanations(found, arguments, auditing):
        print(textwrap.fill(text, 100))
    print(
        "A claim was refuted: do not release models trained with this installation."
        if refuted
        else "No claim was refuted, which does not prove that they are true; see docs/auditing.md."
    )
    return int(refuted)


# How a deviation is printed in the table and in a sentence, to which side its size is rounded, and
# which of two sizes belongs to the weaker audit.
_DEVIATIONS = {
    "noise": ("noise x {}", "noise below {} of what is stated", math.floor, min),
    "clip": ("clip norm x {}", "a clip norm above {} of what is stated", math.ceil, max),
    "q": ("q x {}", "a sampling probability above {} of what is stated", math.ceil, max),
    "correlation": ("correlation {}", "two steps with noise correlated above {}", math.ceil, max),
}


def _size(name: str, size: float) -> str:
    return f"{_DEVIATIONS[name][2](100 * size) / 100:.2f}"


def _noticed(notices: Any) -> str:
    parts = [_DEVIATIONS[name][0].format(_size(name, size)) for name, size in notices.items()]
    return ", ".join(parts) or "nothing: too few trials"


def _explanations(found: Any, arguments: argparse.Namespace, auditing: Any) -> list[str]:
    """Explains the numbers that occur in the table."""
    attacks = {result.attack.value for result in found}
    together = (
        "The lower bound holds"
        if len(found) == 1
        else f"All {len(found)} lower bounds hold together"
    )
    of_epsilon = f"; epsilon is at delta {arguments.delta:g}"
    texts = [
        "A claim is refuted if an attack proves more (at least) than is stated, or if a problem is "
        f"listed below it. {together} with confidence {arguments.confidence:g}"
        + (f"{of_epsilon}." if attacks & {"one-run", "paired"} else ".")
    ]
    noticed = []
    for name, (_, sentence, _, weaker) in _DEVIATIONS.items():
        # The best attack on each algorithm, and the algorithm for which that is weakest.
        best: dict[Any, float] = {}
        for result in found:
            if name in result.notices:
                sizes = [result.notices[name], best.get(result.algorithm, result.notices[name])]
                best[result.algorithm] = min(sizes) if weaker is max else max(sizes)
        if len(best) == len({result.algorithm for result in found}):
            noticed.append(sentence.format(_size(name, weaker(best.values()))))
    if noticed:
        texts.append(
            f"With probability {auditing.POWER:.0%} or more this audit would have noticed, in any "
            f"algorithm above: {'; '.join(noticed)}. It may have missed less."
        )
    if "gaussian" in attacks:
        texts.append(
            f"The Gaussian attack runs at a noise multiplier of its own, {auditing.AUDIT_NOISE:g}, "
            "at which it sees most. Its result carries over to the stated noise multiplier if the "
            "noise is proportional to it, which the noise attack measures."
        )
    return texts
