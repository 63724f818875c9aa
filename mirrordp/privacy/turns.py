"""Coordinates of one array of parameters that keep the form of a matrix: Mφ = U (s ⊙ φ) Vᵀ.

An example's gradient in φ is s ⊙ (Uᵀ G V). Where G is a sum of outer products Σ_t L_t ⊗ R_t, this
is s ⊙ Σ_t (Uᵀ L_t) ⊗ (Vᵀ R_t), so that a layer's few positions can be turned in place of its whole
gradient; `mirrordp.privacy.ghost` does the cheaper of the two.

Either way, the norm is that of the very numbers that are summed. So any rounding is allowed here,
and products have the precision of an ordinary step, whose gradients have no more bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mirrordp.privacy.sums import float32_or_wider

Array = jax.Array


class Turn(NamedTuple):
    """U, V and s of one array of parameters, as a matrix whose columns are the array's last axis.

    They must come from public data.

    Attributes:
        left: U, [K, K]; None for the unit matrix.
        right: V, [N, N]; None for the unit matrix.
        scale: s, [K, N].
    """

    left: Array | None
    right: Array | None
    scale: Array

    def of_gradients(self, gradients: Array) -> Array:
        """Returns s ⊙ (Uᵀ G_i V) of gradients [B, *shape], in float32 or wider."""
        matrices = gradients.reshape(len(gradients), *self.scale.shape)
        matrices = matrices.astype(float32_or_wider(matrices))
        if self.left is not None:
            matrices = jnp.einsum("kj,bkn->bjn", self.left.astype(matrices.dtype), matrices)
        if self.right is not None:
            matrices = jnp.matmul(matrices, self.right.astype(matrices.dtype))
        return (self.scale * matrices).astype(matrices.dtype).reshape(gradients.shape)


def of_vectors(vectors: Array, matrix: Array) -> Array:
    """Returns Uᵀ L_t of vectors [..., K], in float32 or wider."""
    dtype = float32_or_wider(vectors)
    return jnp.matmul(vectors.astype(dtype), matrix.astype(dtype))
