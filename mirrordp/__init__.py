"""Differentially private training with the help of a little public data (PDA-DPMD), in JAX."""

from mirrordp import accounting, federated, ghost, mirror, schedules, theory
from mirrordp._files import StorageError
from mirrordp.accounting import Accountant, Adjacency, UnsupportedError
from mirrordp.averages import ExponentialAverage, UniformAverage
from mirrordp.budget import Budget
from mirrordp.checkpoint import Checkpoint
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
from mirrordp.exact import algorithm_1, paper_mechanism
from mirrordp.federated import AdaptiveClip, federated_train, warm_start_clients
from mirrordp.ledger import FileLedger, Ledger
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
from mirrordp.sweeps import Run, train_sweep
from mirrordp.training import TrainInfo, TrainState, TrainStep, train
from mirrordp.updates import (
    accelerated_mirror_descent,
    lazy_mirror_descent,
    linearized_lazy_mirror_descent,
    mirror_descent,
    mix_public_gradient,
)

__version__ = "0.2.0"

__all__ = [
    "Accountant",
    "AdaptiveClip",
    "Adjacency",
    "BandedNoise",
    "Budget",
    "Checkpoint",
    "ClippedGrad",
    "CyclicPoissonSampling",
    "ExponentialAverage",
    "FileLedger",
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
    "Run",
    "RunReport",
    "SecureGaussianNoise",
    "StorageError",
    "TrainInfo",
    "TrainState",
    "TrainStep",
    "UniformAverage",
    "UnprotectedWarning",
    "UnsupportedError",
    "WarmStart",
    "accelerated_mirror_descent",
    "accounting",
    "algorithm_1",
    "clipped_grad",
    "federated",
    "federated_train",
    "ghost",
    "lazy_mirror_descent",
    "linearized_lazy_mirror_descent",
    "mirror",
    "mirror_descent",
    "mix_public_gradient",
    "paper_mechanism",
    "schedules",
    "split",
    "theory",
    "train",
    "train_sweep",
    "warm_start",
    "warm_start_clients",
]
