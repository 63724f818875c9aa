"""A grid without ends and the search on it.

In: a starting grid, and trials to run it on. Out: the losses of every point that was evaluated,
such that a point as good as the best of each algorithm is surrounded by evaluated points (`ends`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.linreg.backends import Backend, Columns, mirror_scaling, noise_multiplier
from experiments.linreg.simulation import Trial, population_loss

ALGORITHMS = ("cold", "warm", "pda-dpmd")
OUTPUTS = ("average", "last")


class Point(NamedTuple):
    """A grid point: an algorithm and integer positions on the axes of a `Lattice`."""

    algorithm: str
    travel: int
    clip_norm: int
    num_steps: int
    ridge: int


AXES = ("travel", "clip_norm", "num_steps", "ridge")


def axes_of(algorithm: str) -> tuple[str, ...]:
    """Returns the axes that an algorithm is tuned on; only pda-dpmd has a ridge."""
    return AXES if algorithm == "pda-dpmd" else AXES[:-1]


@dataclasses.dataclass(frozen=True)
class Lattice:
    """A grid without ends: geometric axes, indexed by integers of either sign.

    The axes are clip norm C, number of steps T, ridge ρ in units of the median eigenvalue of H, and
    travel = η T C · median(eigenvalues of PH) instead of the learning rate η. Where most gradients
    are clipped, a run moves in proportion to ηTC; so the best travel hardly depends on the other
    axes nor on the algorithm, and the axes can be searched one by one. Its unit comes from public
    data only.

    Attributes:
        travel_ratio: ratio of neighbouring values of travel; index 0 is travel 1.
        clip_norm_ratio: likewise for C; index 0 is 0.03.
        num_steps_ratio: likewise for T; index 0 is `base_steps`.
        ridge_ratio: likewise for ρ; index 0 is 0.1.
        base_steps: T at index 0.
        max_steps: T does not go beyond this.
    """

    travel_ratio: float
    clip_norm_ratio: float
    num_steps_ratio: float
    ridge_ratio: float
    base_steps: int
    max_steps: int

    def travel(self, point: Point) -> float:
        """Returns ηTC in units of the median relaxation rate."""
        return self.travel_ratio**point.travel

    def clip_norm(self, point: Point) -> float:
        """Returns the clip norm C."""
        return 0.03 * self.clip_norm_ratio**point.clip_norm

    def num_steps(self, point: Point) -> int:
        """Returns the number of steps T."""
        return round(self.base_steps * self.num_steps_ratio**point.num_steps)

    def ridge(self, point: Point) -> float:
        """Returns ρ divided by the median eigenvalue of the public Hessian."""
        return 0.1 * self.ridge_ratio**point.ridge

    def allows(self, point: Point) -> bool:
        """Returns whether the point exists: at least one and at most `max_steps` steps."""
        return 1 <= self.num_steps(point) <= self.max_steps

    def scaling_and_learning_rate(
        self, point: Point, eigenvalues: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Returns the eigenvalues of P, and η, for one point and one public Hessian."""
        scaling = np.ones_like(eigenvalues)
        if point.algorithm == "pda-dpmd":
            ridge = self.ridge(point) * np.median(eigenvalues)
            scaling = mirror_scaling(eigenvalues, ridge)
        rate = np.median(scaling * eigenvalues)
        return scaling, self.travel(point) / (self.num_steps(point) * self.clip_norm(point) * rate)


class Outcome(NamedTuple):
    """Losses of one grid point: (trials, 2) each, one column per entry of `OUTPUTS`."""

    empirical: np.ndarray
    population: np.ndarray
    learning_rates: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Empirical loss of each output averaged over the trials."""
        return self.empirical.mean(axis=0)


def run_batch(
    trial: Trial,
    points: Sequence[Point],
    lattice: Lattice,
    backend: Backend,
    *,
    epsilon: float,
    delta: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs points with one common number of steps, pda-dpmd last, on one trial.

    Returns:
        Empirical losses (2, G), population losses (2, G) and learning rates (G,). A run that
        diverged has infinite losses.
    """
    num_steps = lattice.num_steps(points[0])
    chosen = [lattice.scaling_and_learning_rate(point, trial.eigenvalues) for point in points]
    cold = np.array([point.algorithm == "cold" for point in points])
    mirrored = sum(point.algorithm == "pda-dpmd" for point in points)
    columns = Columns(
        start=np.where(cold, np.float32(0), trial.public_model[:, None]),
        learning_rates=np.array([learning_rate for _, learning_rate in chosen]),
        clip_norms=np.array([lattice.clip_norm(point) for point in points]),
        scaling=np.stack([scaling for scaling, _ in chosen], axis=1, dtype=np.float32)[
            :, len(points) - mirrored :
        ],
    )
    iterates = backend.run(trial, columns, num_steps, noise_multiplier(epsilon, delta, num_steps))
    with np.errstate(over="ignore", invalid="ignore"):
        population = np.stack(
            [population_loss(models, trial.true_model) for models in iterates[:2]]
        )
    empirical = iterates.empirical_losses.astype(np.float64)
    diverged = ~(np.isfinite(empirical) & np.isfinite(population))
    empirical[diverged] = population[diverged] = np.inf
    return empirical, population, columns.learning_rates


def evaluate(
    points: Iterable[Point],
    trials: Sequence[Trial],
    lattice: Lattice,
    backend: Backend,
    *,
    epsilon: float,
    delta: float,
) -> dict[Point, Outcome]:
    """Runs every point on every trial; points with the same number of steps run as one matrix."""
    batches: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.algorithm == "pda-dpmd"):
        batches.setdefault(lattice.num_steps(point), []).append(point)
    longest_first = sorted(batches, reverse=True)
    for trial in trials:
        trial.extend_noise(max(longest_first, default=0))
    run = partial(run_batch, lattice=lattice, backend=backend, epsilon=epsilon, delta=delta)
    outcomes = {}
    with ThreadPoolExecutor(backend.workers) as pool:
        pending = {
            num_steps: [pool.submit(run, trial, batches[num_steps]) for trial in trials]
            for num_steps in longest_first
        }
        for num_steps, futures in pending.items():
            results = zip(*(future.result() for future in futures), strict=True)
            empirical, population, learning_rates = (np.stack(values) for values in results)
            for column, point in enumerate(batches[num_steps]):
                outcomes[point] = Outcome(
                    empirical[..., column], population[..., column], learning_rates[:, column]
                )
    return outcomes


def directions(lattice: Lattice, algorithm: str) -> dict[tuple[str, int], dict[str, int]]:
    """Returns the moves to neighbouring points, named by what changes and the sign of the change.

    Besides a move along each axis there are two diagonals that keep the learning rate: where it is
    as large as stability allows, more steps or a larger clip norm help only if they also travel
    further.
    """
    moves: dict[str, dict[str, int]] = {axis: {axis: 1} for axis in axes_of(algorithm)}
    for axis, ratio in (
        ("clip_norm", lattice.clip_norm_ratio),
        ("num_steps", lattice.num_steps_ratio),
    ):
        travel = round(np.log(ratio) / np.log(lattice.travel_ratio))
        moves[f"{axis} at constant learning rate"] = {axis: 1, "travel": travel}
    return {
        (name, sign): {axis: sign * change for axis, change in move.items()}
        for name, move in moves.items()
        for sign in (-1, 1)
    }


def moved(point: Point, move: Mapping[str, int], sign: int = 1) -> Point:
    """Returns the point after a move, or after the opposite move with sign −1."""
    return point._replace(**{a: getattr(point, a) + sign * change for a, change in move.items()})


def ends(
    losses: Mapping[Point, float], point: Point, lattice: Lattice, tolerance: float
) -> dict[tuple[str, int], tuple[str, Point]]:
    """Says for each direction what lies beyond a point.

    Returns:
        For each direction the neighbour of `point` and one of

        - 'inside': the neighbour was evaluated;
        - 'flat': it was not, but the step that led here gained less than `tolerance` (relative), so
          that going on in the same direction is not worth while;
        - 'limit': it was not, it might be better, and the lattice ends here;
        - 'open': it was not, it might be better, and it can be evaluated.
    """
    found = {}
    for direction, move in directions(lattice, point.algorithm).items():
        ahead, behind = moved(point, move), moved(point, move, -1)
        if ahead in losses:
            status = "inside"
        elif losses.get(behind, np.inf) <= (1 + tolerance) * losses[point]:
            status = "flat"
        else:
            status = "open" if lattice.allows(ahead) else "limit"
        found[direction] = (status, ahead)
    return found


def unfinished(found: Mapping[tuple[str, int], tuple[str, Point]]) -> int:
    """Returns how many ends are open or at a limit."""
    return sum(status in ("open", "limit") for status, _ in found.values())


def centre(
    losses: Mapping[Point, float], algorithm: str, lattice: Lattice, tolerance: float
) -> Point:
    """Returns the most enclosed of the points that are good enough; the grid widens around it.

    Good enough is a loss within `tolerance` (relative) of the algorithm's smallest; widening around
    the very smallest would chase ties along flat axes.
    """
    own = {point: loss for point, loss in losses.items() if point.algorithm == algorithm}
    good = [point for point, loss in own.items() if loss <= (1 + tolerance) * min(own.values())]
    return min(
        good, key=lambda point: (unfinished(ends(own, point, lattice, tolerance)), own[point])
    )


def search(
    run: Callable[[Iterable[Point]], Mapping[Point, Outcome]],
    starts: Iterable[Point],
    lattice: Lattice,
    *,
    tolerance: float,
    max_rounds: int,
) -> dict[Point, Outcome]:
    """Evaluates `starts` and widens the grid until no algorithm's `centre` has an open end.

    A round evaluates the open neighbours of each algorithm's centre. After `max_rounds` the ends
    that are still open stay so, and `ends` says it.
    """
    outcomes = dict(run(starts))
    algorithms = dict.fromkeys(point.algorithm for point in outcomes)
    for _ in range(max_rounds):
        losses = {point: float(outcome.mean.min()) for point, outcome in outcomes.items()}
        wanted = {
            neighbour
            for algorithm in algorithms
            for status, neighbour in ends(
                losses, centre(losses, algorithm, lattice, tolerance), lattice, tolerance
            ).values()
            if status == "open"
        }
        if not wanted:
            break
        outcomes |= run(sorted(wanted))
    return outcomes
