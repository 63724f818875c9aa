"""User-level privacy on StackOverflow's next-word task, or on a stand-in of the same shape."""

from experiments.stackoverflow.command import main

__all__ = ["main"]
