"""Differentially private training with the help of a little public data (PDA-DPMD), in JAX."""

from mirrordp._lazy import lazily
from mirrordp._versions import VERSION

# What type checkers read; without `typing`, the package is imported in a moment.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mirrordp import mirror as mirror
    from mirrordp.data import (
        PrivateClients as PrivateClients,
        PrivateData as PrivateData,
        PublicClients as PublicClients,
        PublicData as PublicData,
        split_rows as split_rows,
    )
    from mirrordp.privacy.accounting import (
        Adjacency as Adjacency,
    )
    from mirrordp.privacy.clipping import (
        clipped_grad as clipped_grad,
    )
    from mirrordp.privacy.mechanism import (
        Mechanism as Mechanism,
    )
    from mirrordp.privacy.noise import (
        GaussianNoise as GaussianNoise,
        SecureGaussianNoise as SecureGaussianNoise,
    )
    from mirrordp.privacy.sampling import (
        PoissonSampling as PoissonSampling,
    )
    from mirrordp.privacy.views import (
        averaged_over_views as averaged_over_views,
    )
    from mirrordp.report.statement import (
        RunReport as RunReport,
    )
    from mirrordp.spending.budget import (
        Budget as Budget,
    )
    from mirrordp.spending.ledger import (
        FileLedger as FileLedger,
        Ledger as Ledger,
    )
    from mirrordp.tables.fitting import load_model as load_model
    from mirrordp.training.central import TrainStep as TrainStep
    from mirrordp.training.checkpoint import Checkpoint as Checkpoint
    from mirrordp.training.engine import (
        SweepRun as SweepRun,
        TrainOptions as TrainOptions,
    )
    from mirrordp.training.federated import (
        FederatedStep as FederatedStep,
        warm_start_clients as warm_start_clients,
    )
    from mirrordp.training.progress import with_progress as with_progress
    from mirrordp.training.sweep import train_sweep as train_sweep
    from mirrordp.tuning.front import train as train
    from mirrordp.tuning.search import tune as tune
    from mirrordp.updates import schedules as schedules
    from mirrordp.updates.averages import (
        ExponentialAverage as ExponentialAverage,
        UniformAverage as UniformAverage,
    )
    from mirrordp.updates.descent import mirror_descent as mirror_descent
    from mirrordp.updates.mixing import mix_public_gradient as mix_public_gradient
    from mirrordp.updates.public import (
        warm_start as warm_start,
    )

__version__ = VERSION
__getattr__, __dir__, __all__ = lazily(__name__, __file__)
