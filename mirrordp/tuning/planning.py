"""Batch size, number of steps and noise, chosen together for a given ε, n and compute.

Compute is the number of per-example gradients, B·T, stated in passes over the n private rows. With
learning rate η, T steps move the parameters by η times the sum of T noisy mean gradients, whose
noise has standard deviation

    η √T σC/B = ηT · C · ρ,     ρ = σ / (B √T).

ρ is the noise on the average gradient of a run, in clip norms. At fixed compute it falls as batches
grow, and levels off; but larger batches leave fewer steps to take. The plan is the smallest batch,
and so the largest number of steps, whose ρ is within a stated share of the least one.

Nothing here reads a row: n counts as public.
"""

import dataclasses
import math
from typing import Any

from mirrordp import _validate
from mirrordp._rounding import upwards
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Accountant, Adjacency

_LEAST_STEPS = 20
_LEAST_BATCH = 8
# Enough to compare; the noise of the chosen plan is found by the default accountant.
_ORDERS = tuple(float(order) for order in range(2, 128))


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to spend compute.

    Attributes:
        batch_size: B.
        num_steps: T.
        noise_multiplier: σ that keeps to (ε, δ).
    """

    batch_size: int
    num_steps: int
    noise_multiplier: float

    @property
    def average_noise(self) -> float:
        """ρ = σ/(B√T): the noise on the average gradient of the run, in clip norms."""
        return self.noise_multiplier / (self.batch_size * math.sqrt(self.num_steps))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A choice, and those that it was made from.

    Attributes:
        epsilon: ε.
        delta: δ.
        num_examples: n.
        epochs: compute, in passes over the private rows.
        chosen: the choice.
        choices: all of them, by batch size; their noise may be larger by a few percent, since a
            faster accountant found it.
    """

    epsilon: float
    delta: float
    num_examples: int
    epochs: float
    chosen: Choice
    choices: tuple[Choice, ...]

    @property
    def compared(self) -> Choice:
        """The choice with the noise that it was compared by, which may be larger."""
        return next(each for each in self.choices if each.batch_size == self.chosen.batch_size)

    @property
    def _by(self) -> str:
        """Names the accountant of the table, if it is not that of the chosen noise."""
        return "" if self.compared == self.chosen else " by RDP"

    def __str__(self) -> str:
        lines = [f"{'batch':>8} {'steps':>8} {'noise multiplier':>17} {'average noise':>14}"]
        for choice in self.choices:
            mark = " *" if choice.batch_size == self.chosen.batch_size else ""
            lines.append(
                f"{choice.batch_size:>8} {choice.num_steps:>8} "
                f"{upwards(choice.noise_multiplier):>17} {choice.average_noise:>14.4g}{mark}"
            )
        chosen = self.chosen
        found = (
            f"* chosen: {chosen.num_steps} steps of {chosen.batch_size} records with noise "
            f"multiplier {upwards(chosen.noise_multiplier, 6)}"
        )
        if self._by:
            more = 100 * (self.compared.noise_multiplier / chosen.noise_multiplier - 1)
            found += (
                f", by PLD. The table compares{self._by}, which is faster and asks for "
                f"{more:.1f}% more noise here"
            )
        return "\n".join([*lines, f"{found}."])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""

        def plain(choice: Choice) -> dict[str, Any]:
            return dataclasses.asdict(choice) | {"average_noise": choice.average_noise}

        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "num_examples": self.num_examples,
            "epochs": self.epochs,
            **plain(self.chosen),
            "choices": [plain(choice) for choice in self.choices],
        }

    def figure(self) -> Any:
        """Returns a Matplotlib figure of the trade-off."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        from mirrordp.report.charts import PALETTE

        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.subplots()
        batches = [choice.batch_size for choice in self.choices]
        noise = [choice.average_noise for choice in self.choices]
        axes.loglog(batches, noise, color=PALETTE[0], marker="o", ms=5, lw=1.8)
        axes.plot(
            self.compared.batch_size,
            self.compared.average_noise,
            color=PALETTE[1],
            marker="s",
            ms=11,
            ls="",
            label=f"chosen: {self.chosen.num_steps} steps of {self.chosen.batch_size} records",
        )
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.set(
            xlabel="batch size B (the number of steps is proportional to 1/B)",
            ylabel=f"noise on the average gradient{self._by}, in clip norms",
        )
        axes.set_title(
            f"Noise and batch size: ε = {self.epsilon:g}, δ = {self.delta:g}, "
            f"{self.num_examples:,} records, {self.epochs:g} epochs",
            loc="left",
            fontweight="bold",
            fontsize=11,
        )
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        return figure


def plan(
    *,
    epsilon: float,
    delta: float,
    num_examples: int,
    epochs: float = 20.0,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    slack: float = 0.1,
) -> Plan:
    """Chooses batch size, number of steps and noise for a given ε and compute.

    >>> found = plan(epsilon=2.0, delta=1e-5, num_examples=10_000, epochs=20)
    >>> found.chosen.batch_size * found.chosen.num_steps <= 200_000
    True

    Args:
        epsilon: ε of the run.
        delta: δ; a warning is given above 1/n.
        num_examples: n, which is public.
        epochs: compute, in passes over the private rows: B·T/n.
        adjacency: the neighbours.
        slack: how much more noise than the least is worth more steps, as a share.

    Returns:
        A `Plan`.
    """
    _validate.positive(epsilon=epsilon, epochs=epochs)
    _validate.open_unit_interval(delta=delta)
    _validate.positive_integer(num_examples=num_examples)
    _validate.non_negative(slack=slack)
    accounting.warn_of_large_delta(delta, num_examples)
    compute = epochs * num_examples
    most = min(num_examples, int(compute // _LEAST_STEPS))
    if most < _LEAST_BATCH:
        raise ValueError(
            f"expected compute for {_LEAST_STEPS} steps of at least {_LEAST_BATCH} rows, got "
            f"{compute:g} rows in all. Use more epochs."
        )
    sizes = [most]
    while sizes[-1] // 2 >= _LEAST_BATCH and compute / (sizes[-1] // 2) <= 100_000:
        sizes.append(sizes[-1] // 2)

    def choice(batch_size: int, **options) -> Choice:
        steps = int(compute // batch_size)
        sigma = accounting.calibrate(
            lambda sigma: accounting.poisson_event(
                sigma, sampling_prob=batch_size / num_examples, num_steps=steps
            ),
            epsilon_target=epsilon,
            delta=delta,
            adjacency=adjacency,
            **options,
        )
        return Choice(batch_size, steps, sigma)

    fast = {"accountant": Accountant.RDP, "orders": _ORDERS}
    if adjacency is Adjacency.REPLACE:
        fast = {}
    found = [choice(size, **fast) for size in sorted(sizes)]
    least = min(each.average_noise for each in found)
    best = next(each for each in found if each.average_noise <= (1 + slack) * least)
    return Plan(epsilon, delta, num_examples, epochs, choice(best.batch_size), tuple(found))
