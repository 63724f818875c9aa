"""Training: what a step is, and the one loop that takes steps."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.training.central import (
        TrainInfo as TrainInfo,
        TrainState as TrainState,
        TrainStep as TrainStep,
        train as train,
    )
    from mirrordp.training.checkpoint import (
        Checkpoint as Checkpoint,
        CheckpointError as CheckpointError,
    )
    from mirrordp.training.exact import (
        exact_mirror_descent as exact_mirror_descent,
        paper_mechanism as paper_mechanism,
    )
    from mirrordp.training.federated import (
        AdaptiveClip as AdaptiveClip,
        federated_train as federated_train,
        server_sgd as server_sgd,
        warm_start_clients as warm_start_clients,
    )
    from mirrordp.training.sweep import (
        SweepRun as SweepRun,
        train_sweep as train_sweep,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
