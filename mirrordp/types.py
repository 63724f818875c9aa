"""Names for the values that flow through the library; no logic.

`Params` and `Batch` are arbitrary pytrees of arrays. Every leaf of a `Batch` has one common leading
axis, the example axis; an `Example` is a `Batch` with that axis removed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax
    import numpy as np

Array: TypeAlias = "jax.Array | np.ndarray"
PyTree: TypeAlias = Any
Params: TypeAlias = PyTree
Batch: TypeAlias = PyTree
Example: TypeAlias = PyTree

LossFn: TypeAlias = Callable[..., "jax.Array"]
"""`loss_fn(params, example) -> scalar`, or `loss_fn(params, example, key) -> scalar`.

The loss sees one example, so examples cannot interact before clipping.
"""

AlphaSchedule: TypeAlias = Callable[[Any], Any]
"""Maps a step number t = 0, 1, ... to α_t in [0, 1]; must accept traced integers."""
