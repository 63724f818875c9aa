"""What follows the noise, as optax transformations, and what public data gives.

What public data gives before the clip is in `mirrordp.updates.before_clip`.
"""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.updates.averages import (
        ExponentialAverage as ExponentialAverage,
        UniformAverage as UniformAverage,
    )
    from mirrordp.updates.before_clip import (
        clipped_by_group as clipped_by_group,
        embedded as embedded,
        kronecker as kronecker,
        recentred as recentred,
        scaled_by_public_gradients as scaled_by_public_gradients,
    )
    from mirrordp.updates.descent import (
        LearningRate as LearningRate,
        accelerated_mirror_descent as accelerated_mirror_descent,
        accelerated_result as accelerated_result,
        lazy_mirror_descent as lazy_mirror_descent,
        linearized_lazy_mirror_descent as linearized_lazy_mirror_descent,
        mirror_descent as mirror_descent,
    )
    from mirrordp.updates.mixing import (
        mix_gradients as mix_gradients,
        mix_public_gradient as mix_public_gradient,
    )
    from mirrordp.updates.public import (
        WarmStart as WarmStart,
        public_grad as public_grad,
        warm_start as warm_start,
    )
    from mirrordp.updates.public_sizes import (
        add_public_momentum as add_public_momentum,
        scale_by_public_gradients as scale_by_public_gradients,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
