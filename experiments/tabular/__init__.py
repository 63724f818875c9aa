"""Proof on real data: California housing and UCI Adult, 4% of the training rows public."""

from experiments.tabular.command import main

__all__ = ["main"]
