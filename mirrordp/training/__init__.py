"""Training: what a step is, and the one loop that takes steps."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.training.central import TrainState as TrainState, TrainStep as TrainStep
    from mirrordp.training.checkpoint import (
        Checkpoint as Checkpoint,
        CheckpointError as CheckpointError,
    )
    from mirrordp.training.engine import (
        SweepRun as SweepRun,
        TrainOptions as TrainOptions,
        train as train,
    )
    from mirrordp.training.exact import (
        ExactResult as ExactResult,
        exact_mirror_descent as exact_mirror_descent,
        paper_mechanism as paper_mechanism,
    )
    from mirrordp.training.federated import (
        AdaptiveClip as AdaptiveClip,
        FederatedState as FederatedState,
        FederatedStep as FederatedStep,
        server_sgd as server_sgd,
        warm_start_clients as warm_start_clients,
    )
    from mirrordp.training.progress import with_progress as with_progress
    from mirrordp.training.step import (
        Step as Step,
        StepInfo as StepInfo,
        TrainInfo as TrainInfo,
        Unprivatized as Unprivatized,
    )
    from mirrordp.training.sweep import run_state as run_state, train_sweep as train_sweep

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
