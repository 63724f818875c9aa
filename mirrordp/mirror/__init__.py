"""Mirror maps: the public loss as geometry for noisy gradients. See `mirrordp.mirror.base`."""

from mirrordp.mirror.algorithms import (
    AcceleratedState,
    LazyState,
    LinearizedLazyState,
    accelerated_init,
    accelerated_query,
    accelerated_step,
    lazy_init,
    lazy_step,
    linearized_lazy_init,
    linearized_lazy_step,
)
from mirrordp.mirror.base import MirrorMap, Solution
from mirrordp.mirror.convex import ConvexMap
from mirrordp.mirror.euclidean import EuclideanMap
from mirrordp.mirror.glm import GLMMap
from mirrordp.mirror.projection import Ball, Constraint, TheoremSet, WholeSpace
from mirrordp.mirror.quadratic import QuadraticMap
from mirrordp.mirror.subspace import SubspaceMap

__all__ = [
    "AcceleratedState",
    "Ball",
    "Constraint",
    "ConvexMap",
    "EuclideanMap",
    "GLMMap",
    "LazyState",
    "LinearizedLazyState",
    "MirrorMap",
    "QuadraticMap",
    "Solution",
    "SubspaceMap",
    "TheoremSet",
    "WholeSpace",
    "accelerated_init",
    "accelerated_query",
    "accelerated_step",
    "lazy_init",
    "lazy_step",
    "linearized_lazy_init",
    "linearized_lazy_step",
]
