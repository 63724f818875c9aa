"""What decides ε: sampling, clipping, noise and accounting, joined in a `Mechanism`."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.privacy.accounting import (
        Accountant as Accountant,
        Adjacency as Adjacency,
        UnsupportedError as UnsupportedError,
    )
    from mirrordp.privacy.clipping import (
        ClippedGrad as ClippedGrad,
        clipped_grad as clipped_grad,
    )
    from mirrordp.privacy.mechanism import (
        Mechanism as Mechanism,
    )
    from mirrordp.privacy.noise import (
        BandedNoise as BandedNoise,
        GaussianNoise as GaussianNoise,
        SecureGaussianNoise as SecureGaussianNoise,
    )
    from mirrordp.privacy.sampling import (
        CyclicPoissonSampling as CyclicPoissonSampling,
        FixedSizeSampling as FixedSizeSampling,
        FullBatch as FullBatch,
        PoissonSampling as PoissonSampling,
    )
    from mirrordp.privacy.selection import NumberOfRuns as NumberOfRuns
    from mirrordp.privacy.trainable import Trainable as Trainable
    from mirrordp.privacy.views import averaged_over_views as averaged_over_views

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
