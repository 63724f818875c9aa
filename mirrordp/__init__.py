"""Differentially private training with the help of a little public data (PDA-DPMD), in JAX."""

from mirrordp import accounting, ghost, mirror, schedules, theory
from mirrordp.accounting import Accountant, Adjacency, UnsupportedError
from mirrordp.clipping import ClippedGrad, clipped_grad
from mirrordp.data import Overlap, PrivateData, PublicData, UnprotectedWarning, split
from mirrordp.ledger import Ledger
from mirrordp.mechanism import Mechanism
from mirrordp.noise import BandedNoise, GaussianNoise, SecureGaussianNoise
from mirrordp.public import WarmStart, warm_start
from mirrordp.report import RunReport
from mirrordp.sampling import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
)
from mirrordp.training import TrainInfo, TrainState, TrainStep, train
from mirrordp.updates import ExponentialAverage, UniformAverage, mix_public_gradient

__version__ = "0.1.0"

__all__ = [
    "Accountant",
    "Adjacency",
    "BandedNoise",
    "ClippedGrad",
    "CyclicPoissonSampling",
    "ExponentialAverage",
    "FixedSizeSampling",
    "FullBatch",
    "GaussianNoise",
    "Ledger",
    "Mechanism",
    "Overlap",
    "PoissonSampling",
    "PrivateData",
    "PublicData",
    "RunReport",
    "SecureGaussianNoise",
    "TrainInfo",
    "TrainState",
    "TrainStep",
    "UniformAverage",
    "UnprotectedWarning",
    "UnsupportedError",
    "WarmStart",
    "accounting",
    "clipped_grad",
    "ghost",
    "mirror",
    "mix_public_gradient",
    "schedules",
    "split",
    "theory",
    "train",
    "warm_start",
]
