"""CIFAR-10 with 2,000 public images and today's recipe: a wide residual network and many views.

`network` is the model, `augmentation` changes images at random, `pretraining` learns from public
images alone, `private` goes on from there under differential privacy, `settings` reads TOML files
and `command` is `python -m experiments record`.
"""

from experiments.record.command import main

__all__ = ["main"]
