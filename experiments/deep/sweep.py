"""`python -m experiments sweep CONFIG...`: searches learning rate and K, and writes the best back.

In stages, one seed: for cold and warm DP-SGD the learning rate along {1, 2, 5}·10^i until the best
one has been tried with a neighbour on either side; for PDA-DPMD K at warm's best rate, then one
neighbour of that rate each way. The judge is the averaged iterate on the validation part: private
examples held out (images) or the official validation split (text), never the test split. Images
choose the rate by accuracy and K by loss: the loss of a network that grows confident rises long
before its accuracy falls, so by loss alone a rate wins that hardly leaves the warm start; among
values of K accuracy differs by less than its own error. Text chooses by loss. None of this is
charged to the privacy budget, as in the paper.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence

from experiments import records
from experiments.deep.run import Session, add_options, guarded, open_session
from experiments.deep.settings import (
    CONFIGS,
    DeepSettings,
    SettingsError,
    files_of,
    load,
    set_values,
)

_MAX_WIDENINGS = 12


def neighbour(learning_rate: float, direction: int) -> float:
    """Returns the next rate up (+1) or down (−1) along {1, 2, 5}·10^i.

    >>> [neighbour(rate, 1) for rate in (0.1, 0.2, 0.5)], neighbour(1.0, -1)
    ([0.2, 0.5, 1.0], 0.5)
    """
    exponent = math.floor(math.log10(learning_rate) + 1e-9)
    digit = round(learning_rate / 10.0**exponent)
    if digit not in (1, 2, 5):
        raise SettingsError(
            f"a learning rate of a sweep must be 1, 2 or 5 times a power of ten, got "
            f"{learning_rate:g}."
        )
    position = 3 * exponent + (1, 2, 5).index(digit) + direction
    return float(f"{(1, 2, 5)[position % 3]}e{position // 3}")


def loss(line: records.Record) -> float:
    """Returns the validation loss; a run that diverged is worse than any other."""
    value = line["final"].get("average_validation_loss")
    return math.inf if value is None else value


def score_of_rate(line: records.Record) -> float:
    """Returns what the learning rate shall minimise: errors on images, the loss on text."""
    if line["settings"]["dataset"] == "wikitext2" or math.isinf(loss(line)):
        return loss(line)
    return -line["final"]["average_validation_accuracy"]


def search_rate(settings: DeepSettings, session: Session) -> float:
    """Returns the best learning rate, after trying its neighbours."""
    if not settings.sweep.learning_rates:
        raise SettingsError(f"{settings.name}: [sweep] learning_rates is empty.")
    rates = sorted(settings.sweep.learning_rates)
    for _ in range(_MAX_WIDENINGS):
        points = [
            (dataclasses.replace(settings, learning_rate=rate), settings.sweep.seed)
            for rate in rates
        ]
        scores = [score_of_rate(line) for line in session.lines(points, kind="sweep")]
        best = rates[scores.index(min(scores))]
        wanted = {neighbour(best, -1), neighbour(best, 1)} - set(rates)
        if not wanted:
            return best
        rates = sorted({*rates, *wanted})
    raise SettingsError(f"{settings.name}: the best learning rate keeps moving, last {best:g}.")


def search_decay(settings: DeepSettings, session: Session, rate: float) -> tuple[float, float]:
    """Returns the best K at `rate`, and the best of the neighbouring rates at that K."""
    if not settings.sweep.decays:
        raise SettingsError(f"{settings.name}: [sweep] decays is empty.")
    seed = settings.sweep.seed

    def best_of(candidates: Sequence[tuple[float, float]], score) -> tuple[float, float]:
        points = [
            (dataclasses.replace(settings, learning_rate=eta, decay=decay), seed)
            for eta, decay in candidates
        ]
        scores = [score(line) for line in session.lines(points, kind="sweep")]
        return candidates[scores.index(min(scores))]

    _, decay = best_of([(rate, decay) for decay in settings.sweep.decays], loss)
    rates = (rate, neighbour(rate, -1), neighbour(rate, 1))
    return best_of([(eta, decay) for eta in rates], score_of_rate)


def sweep_of(settings: DeepSettings, session: Session) -> dict[str, float]:
    """Searches the settings of one file; returns the chosen values."""
    if settings.algorithm != "pda":
        return {"learning_rate": search_rate(settings, session)}
    if settings.sweep.rate_from is None:
        raise SettingsError(f"{settings.name}: [sweep] rate_from must name warm's settings.")
    warm = load(CONFIGS / f"{settings.sweep.rate_from}.toml")
    rate, decay = search_decay(settings, session, search_rate(warm, session))
    return {"learning_rate": rate, "decay": decay}


def main(argv: Sequence[str] | None = None) -> int:
    """Sweeps the given settings."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--keep", action="store_true", help="print the best settings, leave the files alone"
    )
    arguments = parser.parse_args(argv)

    def work() -> None:
        session = open_session(arguments)
        for path in files_of(arguments.configs):
            chosen = sweep_of(load(path), session)
            print(f"{path.stem}: best {chosen}", flush=True)
            if not (arguments.keep or arguments.synthetic):
                set_values(path, **chosen)

    return guarded(work)
