"""Choosing settings: free on public rows, or by private runs whose cost is part of ε."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.privacy.selection import NumberOfRuns as NumberOfRuns
    from mirrordp.tuning.automatic import automatic_space as automatic_space
    from mirrordp.tuning.bands import (
        public_bands as public_bands,
        public_noise_loss as public_noise_loss,
    )
    from mirrordp.tuning.planning import Plan as Plan, plan as plan
    from mirrordp.tuning.rehearsal import Rehearsal as Rehearsal
    from mirrordp.tuning.rules import (
        public_alpha as public_alpha,
        public_clip_norm as public_clip_norm,
        public_learning_rate as public_learning_rate,
    )
    from mirrordp.tuning.scores import (
        PrivateScore as PrivateScore,
        PublicScore as PublicScore,
    )
    from mirrordp.tuning.search import (
        Both as Both,
        Free as Free,
        Paid as Paid,
        TuneResult as TuneResult,
        tune as tune,
    )
    from mirrordp.tuning.settings import Settings as Settings, grid as grid

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
