"""Mirror maps: the public loss as geometry for noisy gradients. See `mirrordp.mirror.base`."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.mirror.algorithms import (
        AcceleratedState as AcceleratedState,
        LazyState as LazyState,
        LinearizedLazyState as LinearizedLazyState,
        accelerated_init as accelerated_init,
        accelerated_query as accelerated_query,
        accelerated_step as accelerated_step,
        lazy_init as lazy_init,
        lazy_step as lazy_step,
        linearized_lazy_init as linearized_lazy_init,
        linearized_lazy_step as linearized_lazy_step,
    )
    from mirrordp.mirror.base import MirrorMap as MirrorMap, Solution as Solution
    from mirrordp.mirror.convex import ConvexMap as ConvexMap
    from mirrordp.mirror.euclidean import EuclideanMap as EuclideanMap
    from mirrordp.mirror.glm import GLMMap as GLMMap
    from mirrordp.mirror.kronecker import KroneckerMap as KroneckerMap
    from mirrordp.mirror.projection import (
        Ball as Ball,
        Constraint as Constraint,
        TheoremSet as TheoremSet,
        WholeSpace as WholeSpace,
    )
    from mirrordp.mirror.quadratic import QuadraticMap as QuadraticMap
    from mirrordp.mirror.subspace import SubspaceMap as SubspaceMap

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
