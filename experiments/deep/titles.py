"""Names of data sets, algorithms and runs, and their order, as tables and figures show them."""

from experiments.deep.results import Place
from experiments.deep.settings import ALGORITHMS, DeepSettings

DATASETS = {"cifar10": "CIFAR-10", "emnist": "EMNIST", "wikitext2": "WikiText-2"}
LABELS = {"cold": "cold DP-SGD", "warm": "warm DP-SGD", "pda": "PDA-DPMD"}


def order(place: Place) -> tuple:
    """Sorts by data set, family, noise (little first), algorithm and variant."""
    kind, value = place.level[0], float(place.level[1:])
    # Little noise first: a small σ, a large ε.
    noise = value if kind == "s" else -value
    algorithm = ALGORITHMS.index(place.algorithm)
    return place.dataset, place.family, kind != "s", noise, algorithm, place.variant


def title_of(settings: DeepSettings) -> str:
    """Returns data set and noise of settings, in words that quote no ε of the paper."""
    parts = [DATASETS.get(settings.dataset, settings.dataset)]
    if settings.vocabulary == "public":
        parts.append("public vocabulary")
    if settings.public_text == "other":
        parts.append("other public text")
    if settings.noise_multiplier is not None:
        parts.append(f"σ = {settings.noise_multiplier:g}")
    else:
        parts.append(f"σ for ε = {settings.target_epsilon:g} (PLD)")
    return ", ".join(parts)
