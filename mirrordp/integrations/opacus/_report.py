# pyright: reportMissingImports=false
"""What an optimiser's charges amount to: a mechanism for budgets and reports, and the report."""

import dataclasses
import importlib.metadata
import math
from typing import Any

from opacus.optimizers import DPOptimizer

from mirrordp.integrations.opacus._charges import Books, Charge
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.report import RunReport
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import FileLedger, Ledger


def mechanism_of(optimizer: DPOptimizer, books: Books, num_examples: int) -> Mechanism:
    """Returns a mechanism that costs at least as much as the charges, or as the next step."""
    now = Charge(float(optimizer.noise_multiplier), books.sampling_prob, 1)
    charges = books.charges or [now]
    divisor = 1.0
    if optimizer.loss_reduction == "mean":
        divisor = float(optimizer.expected_batch_size or 1) * getattr(optimizer, "world_size", 1)
    return Mechanism(
        sampling=PoissonSampling(
            sampling_prob=max(charge.sampling_prob for charge in charges),
            expected_batch_size=divisor,
            num_examples=num_examples,
        ),
        l2_clip_norm=float(optimizer.max_grad_norm),
        noise_multiplier=min(charge.noise_multiplier for charge in charges),
        num_steps=max(books.charged_steps, 1),
        adjacency=books.spend.adjacency,
        accountant=books.accountant,
    )


def report_of(
    optimizer: DPOptimizer, books: Books, num_examples: int, delta: float, options: dict[str, Any]
) -> RunReport:
    """Returns the privacy report of a run; `PublicGradientOptimizer.report` describes it."""
    books.reconcile()
    options = {"title": "A model trained with Opacus and mirrordp"} | options
    if optimizer.secure_mode:
        options = {"seeded": False} | options
    if isinstance(books.spend, Budget) or (books.is_shared and not books.varies):
        options["spend"] = books.spend
    mechanism = mechanism_of(optimizer, books, num_examples)
    made = RunReport.of(mechanism, delta, charged_steps=books.charged_steps, **options)
    theirs = {name: importlib.metadata.version(name) for name in ("torch", "opacus")}
    made = dataclasses.replace(made, versions={**made.versions, **theirs})
    return _of_charges(made, books, options.get("scope")) if books.varies else made


def _of_charges(made: RunReport, books: Books, scope: str | None) -> RunReport:
    """Returns a report whose ε is that of steps that were not all alike."""
    spend, charges = books.spend, books.charges
    shared = books.is_shared and not isinstance(spend, Budget)
    ledger = spend if isinstance(spend, Ledger) and shared else books.ledger_of_run()
    found = ledger.epsilon(made.delta, accountant=books.accountant)
    noises = [charge.noise_multiplier for charge in charges]
    covered = "everything charged to the ledger" if shared else "this run"
    covered += f", with noise multipliers from {min(noises):.4g} to {max(noises):.4g}"
    # A schedule may change the noise at every step, and a figure needs a few points.
    stops = sorted({math.ceil(len(charges) * i / 8) for i in range(1, 9)})
    over_steps = tuple(
        (
            sum(charge.num_steps for charge in charges[:stop]),
            books.ledger_of_run(stop).epsilon(made.delta, accountant=books.accountant).epsilon,
        )
        for stop in stops
    )
    return dataclasses.replace(
        made,
        epsilon=found.epsilon,
        accountant=found.accountant.value,
        accountant_method=found.method,
        scope=scope or covered,
        epsilon_over_steps=over_steps,
        ledger=spend.position._asdict() if isinstance(spend, FileLedger) else made.ledger,
    )
