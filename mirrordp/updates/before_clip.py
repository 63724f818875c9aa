"""Methods that act before the clip, as charts (`mirrordp.privacy.charts`).

`TrainStep(..., chart=recentred())` clips each example's distance from the public gradient in place
of its gradient. The others choose coordinates in which examples are clipped: scaled by the sizes of
public gradients, turned and scaled by a Kronecker-factored public curvature, or split into a public
subspace and the rest; or layer by layer. Each is made of public data, so ε is what it is without
it.

`scaled_by_public_gradients` and `kronecker` are scaled so that the expected squared norm of a
public gradient stays what it is: a clip norm keeps its meaning.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _validate
from mirrordp.mirror.kronecker import KroneckerMap, turned
from mirrordp.mirror.subspace import SubspaceMap
from mirrordp.privacy.charts import Chart
from mirrordp.privacy.sums import float32_or_wider
from mirrordp.privacy.trainable import children
from mirrordp.privacy.turns import Turn
from mirrordp.types import PyTree
from mirrordp.updates.public_sizes import PublicSizes


def _zeros(part: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, float32_or_wider(leaf)), part)


def recentred() -> Chart:
    """Returns the chart of DOPE-SGD (Nasr et al., 2023), which clips around the public gradient.

        s = Σ_i clip(∇ℓ(θ; d_i) − ∇Ψ(θ), C),     gradient = s/B + noise + ∇Ψ(θ).

    Where private gradients lie near the public one, a small C loses little of them, and noise is
    proportional to C. `tuning.public_clip_norm` states norms of gradients, not of these distances.
    """

    def release(centre: PyTree, mean: PyTree) -> PyTree:
        return jax.tree.map(lambda m, c: m + c.astype(m.dtype), mean, centre)

    return Chart(
        init=_zeros,
        like=_zeros,
        move=lambda centre, phi: phi,
        centre=lambda centre: centre,
        release=release,
        prepare=lambda centre, public_grad: jax.tree.map(
            lambda old, new: new.astype(old.dtype), centre, public_grad
        ),
    )


def scaled_by_public_gradients(*, decay: float = 0.99, epsilon: float = 0.1) -> Chart:
    """Returns the chart of AdaDPS (Li et al., 2022), which divides by the size of public gradients.

        s = Σ_i clip(D ∇ℓ(θ; d_i), C),     D = c / (√v + ε̄),     gradient = s/B + noise,

    where v is a running mean of squared public gradients, number by number. Noise is the same for
    all parameters while the gradients of rarely used ones are enlarged.

    Args:
        decay: of the running mean.
        epsilon: ε̄ in units of the root mean square of √v; a larger number scales less.
    """
    _validate.probability(decay=decay)
    _validate.positive(epsilon=epsilon)

    def move(state: PublicSizes, phi: PyTree) -> PyTree:
        scales = state.scales(epsilon)
        return jax.tree.map(lambda scale, p: (scale * p).astype(p.dtype), scales, phi)

    return Chart(
        init=PublicSizes.init,
        like=_zeros,
        move=move,
        centre=None,
        release=lambda state, mean: mean,
        prepare=lambda state, public_grad: state.updated(public_grad, decay),
    )


class Turned(NamedTuple):
    """What `kronecker` keeps, in the parameters' type: U, V and c H^{−1/2} of each array, and c."""

    turns: tuple[Turn, ...]
    c: Any


def kronecker(mirror_map: KroneckerMap) -> Chart:
    """Returns the chart in which the public curvature is the same in every direction.

        s = Σ_i clip(c H^{−1/2} ∇ℓ(θ; d_i), C),     gradient = (H^{−1/2}/c) (s/B + noise),

    with the Hessian H of the map. Without the noise the gradient is H⁻¹∇ℓ, so gradient descent
    takes the steps of `mirror_descent` with this map; the noise along an eigenvector is divided by
    the root of its eigenvalue instead of by the eigenvalue. DP-KFC (2026) preconditions before the
    clip likewise.

    Args:
        mirror_map: `KroneckerMap.from_public(...)`.
    """
    _validate.instance_of(KroneckerMap, "Use KroneckerMap.from_public(...).", mirror_map=mirror_map)

    # On the host, since a step may be compiled.
    arrays = jax.tree.map(np.asarray, mirror_map)
    eigenvalues, curvature = np.asarray(mirror_map.eigenvalues), arrays.curvature
    # Public gradients keep their mean squared norm.
    c = np.sqrt(curvature.sum() / (curvature / eigenvalues).sum())
    ends = np.cumsum([rows * columns for rows, columns in mirror_map.shapes])
    roots = np.split(c * eigenvalues**-0.5, ends[:-1])
    blocks = [
        (_unless_one(u), _unless_one(v), root.reshape(shape))
        for u, v, root, shape in zip(
            arrays.left, arrays.right, roots, mirror_map.shapes, strict=True
        )
    ]

    def init(part: PyTree) -> Turned:
        mirror_map.require(part)
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(part))
        kept = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (blocks, c))
        return Turned(tuple(Turn(*block) for block in kept[0]), kept[1])

    def move(state: Turned, phi: PyTree) -> PyTree:
        """Returns c H^{−1/2} φ, where φ are coordinates along the eigenvectors."""
        leaves, tree = jax.tree.flatten(phi)
        found = []
        for leaf, (u, v, scale) in zip(leaves, state.turns, strict=True):
            block = (scale * leaf.reshape(scale.shape)).astype(leaf.dtype)
            found.append(turned(block, u, v).reshape(leaf.shape))
        return tree.unflatten(found)

    return Chart(
        init=init,
        like=_zeros,
        move=move,
        centre=None,
        release=lambda state, mean: jax.tree.map(
            lambda leaf: (leaf / state.c**2).astype(leaf.dtype), move(state, mean)
        ),
        turns=lambda state: state.turns,
    )


def _representable(**factors: float) -> None:
    """Raises unless float32 holds each factor and its inverse: others drop all records, or none."""
    _validate.positive("", **factors)
    for name, factor in factors.items():
        if not 1e-30 <= float(factor) <= 1e30:
            raise ValueError(f"{name} must be between 1e-30 and 1e30, got {factor:g}.")


def _unless_one(side: np.ndarray | None) -> np.ndarray | None:
    """Returns eigenvectors, or None for the number 1, as a bias has for its only row."""
    return None if side is None or side.size == 1 else side


def _check_size(part: PyTree, expected: int) -> None:
    size = sum(leaf.size for leaf in jax.tree.leaves(part))
    if size != expected:
        raise ValueError(
            f"the chart's map is for {expected} parameters, got {size} trainable ones. Build it "
            "with the same params and trainable."
        )


def embedded(mirror_map: SubspaceMap, *, residual_weight: float = 1.0) -> Chart:
    """Returns the chart of GEP (Yu et al., 2021), which clips a public subspace and the rest apart.

        e_i = Vᵀ ∇ℓ(θ; d_i),   r_i = ρ (I − V Vᵀ) ∇ℓ(θ; d_i),
        s = Σ_i (clip(e_i, C/√2), clip(r_i, C/√2)),   gradient = V s_e/B + s_r/(ρB) + noise.

    The few numbers of e get little noise in all. Both parts are clipped without the one being
    shortened by the other, and together have norm at most C.

    Args:
        mirror_map: holds V, e.g. `SubspaceMap.from_directions(public_gradients, rank)`.
        residual_weight: ρ; above 1, the rest gets less noise and is clipped more.
    """
    _validate.instance_of(
        SubspaceMap, "Use SubspaceMap.from_directions(...).", mirror_map=mirror_map
    )
    _representable(residual_weight=residual_weight)
    basis = np.asarray(mirror_map.basis)
    if not np.isfinite(basis).all():
        raise ValueError("the basis of a SubspaceMap must hold finite numbers, got others.")

    def init(part: PyTree) -> tuple[jax.Array, ...]:
        _check_size(part, mirror_map.num_params)
        leaves = jax.tree.leaves(part)
        ends = np.cumsum([leaf.size for leaf in leaves])
        return tuple(
            jnp.asarray(rows, float32_or_wider(leaf))
            for rows, leaf in zip(np.split(basis, ends[:-1]), leaves, strict=True)
        )

    def combined(
        state: tuple[jax.Array, ...],
        phi: tuple[PyTree, jax.Array],
        weight: float,
        precision: jax.lax.Precision,
    ) -> PyTree:
        """Returns V e + weight (I − V Vᵀ) r for φ = (r, e)."""
        # Array by array: one long vector would be a copy of every example's gradient.
        leaves, tree = jax.tree.flatten(phi[0])
        inside = phi[1]
        for rows, leaf in zip(state, leaves, strict=True):
            inside -= weight * jnp.matmul(leaf.ravel(), rows, precision=precision)
        found = [
            weight * leaf
            + jnp.matmul(rows, inside.astype(leaf.dtype), precision=precision).reshape(leaf.shape)
            for rows, leaf in zip(state, leaves, strict=True)
        ]
        return tree.unflatten(found)

    return Chart(
        init=init,
        like=lambda part: (_zeros(part), jnp.zeros(basis.shape[1], jnp.float32)),
        # For every example, with the bits that its gradient has in an ordinary step.
        move=lambda state, phi: combined(state, phi, residual_weight, jax.lax.Precision.DEFAULT),
        centre=None,
        # The noise on the rest has no part inside the subspace after this.
        release=lambda state, mean: combined(
            state, mean, 1 / residual_weight, jax.lax.Precision.HIGHEST
        ),
        groups=lambda part: (0,) * len(jax.tree.leaves(part)) + (1,),
    )


def clipped_by_group(norms: Mapping[str, float]) -> Chart:
    """Returns the chart that clips each group of parameters by itself, to a norm of its own.

        s_g = Σ_i clip(∇_g ℓ(θ; d_i), C_g),     C_g = C c_g / (Σ_h c_h²)^{1/2},

    with noise in proportion to C_g, so that a layer whose gradients are small gets little. All
    groups together have norm at most C; with C = (Σ_g c_g²)^{1/2}, C_g is c_g itself. A group is a
    child of the tree of parameters, such as a layer.

    Args:
        norms: c_g by the name of the child, for each one that is trained, e.g.
            `tuning.public_clip_norm(loss_fn, params, public, by_group=True)`.
    """
    advice = "Use tuning.public_clip_norm(..., by_group=True)."
    _validate.instance_of(Mapping, advice, norms=norms)
    if not norms:
        raise ValueError(
            f"norms must have a number for each child of the parameters, got none. {advice}"
        )
    for name, norm in norms.items():
        _validate.instance_of(str, "A child of a list has its number as text.", name_in_norms=name)
        _validate.positive("", **{f"norms[{name!r}]": norm})
    limits = {name: float(norm) for name, norm in norms.items()}
    size = float(np.sqrt(np.mean(np.square(list(limits.values())))))
    for name, limit in limits.items():
        _representable(**{f"norms[{name!r}] in units of their root mean square": limit / size})

    def init(part: PyTree) -> jax.Array:
        names = children(part)
        if set(names) != set(limits):
            raise ValueError(
                f"norms must have one number for each of {sorted(set(names))}, the children of the "
                f"tree of parameters that are trained, got {sorted(limits)}."
            )
        return jnp.asarray([size / limits[name] for name in names], jnp.float32)

    def scaled(scales: jax.Array, phi: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(phi)
        pairs = zip(leaves, scales, strict=True)
        return tree.unflatten([(scale * leaf).astype(leaf.dtype) for leaf, scale in pairs])

    return Chart(
        init=init,
        like=_zeros,
        move=scaled,
        centre=None,
        release=lambda scales, mean: scaled(1 / scales, mean),
        groups=lambda part: tuple(sorted(limits).index(name) for name in children(part)),
    )
