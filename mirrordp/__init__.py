"""Differentially private training with the help of a little public data (PDA-DPMD), in JAX."""

from mirrordp import mirror
from mirrordp._versions import VERSION as __version__
from mirrordp.data import (
    Overlap,
    PrivateClients,
    PrivateData,
    PublicClients,
    PublicData,
    UnprotectedWarning,
    split,
)
from mirrordp.mirror import theory
from mirrordp.privacy import accounting, ghost
from mirrordp.privacy.accounting import Accountant, Adjacency, UnsupportedError
from mirrordp.privacy.clipping import ClippedGrad, clipped_grad
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import BandedNoise, GaussianNoise, SecureGaussianNoise
from mirrordp.privacy.sampling import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
)
from mirrordp.report import RunReport
from mirrordp.spending.budget import Budget
from mirrordp.spending.files import StorageError
from mirrordp.spending.ledger import FileLedger, Ledger
from mirrordp.training import federated
from mirrordp.training.central import TrainInfo, TrainState, TrainStep, train
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.training.exact import algorithm_1, paper_mechanism
from mirrordp.training.federated import AdaptiveClip, federated_train, warm_start_clients
from mirrordp.training.sweep import Run, train_sweep
from mirrordp.updates import (
    accelerated_mirror_descent,
    lazy_mirror_descent,
    linearized_lazy_mirror_descent,
    mirror_descent,
    mix_public_gradient,
    schedules,
)
from mirrordp.updates.averages import ExponentialAverage, UniformAverage
from mirrordp.updates.public import WarmStart, warm_start

__all__ = [
    "__version__",
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
