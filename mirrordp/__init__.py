"""Differentially private training with the help of a little public data (PDA-DPMD), in JAX."""

from mirrordp import accounting, federated, ghost, mirror, schedules, theory
from mirrordp.accounting import Accountant, Adjacency, UnsupportedError
from mirrordp.clipping import ClippedGrad, clipped_grad
from mirrordp.data import (
    Overlap,
    PrivateClients,
    PrivateData,
    PublicClients,
    PublicData,
    UnprotectedWarning,
    split,
)
from mirrordp.federated import AdaptiveClip, federated_train, warm_start_clients
from mirrordp.ledger import Ledger
from mirrordp.mechanism import Mechanism
from mirrordp.noise import BandedNoise, GaussianNoise
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
    "AdaptiveClip",
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
    "PrivateClients",
    "PrivateData",
    "PublicClients",
    "PublicData",
    "RunReport",
    "TrainInfo",
    "TrainState",
    "TrainStep",
    "UniformAverage",
    "UnprotectedWarning",
    "UnsupportedError",
    "WarmStart",
    "accounting",
    "clipped_grad",
    "federated",
    "federated_train",
    "ghost",
    "mirror",
    "mix_public_gradient",
    "schedules",
    "split",
    "theory",
    "train",
    "warm_start",
    "warm_start_clients",
]
