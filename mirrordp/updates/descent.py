"""Exact mirror descent after the noise, as optax transformations. All of it is post-processing.

`mirror_descent(mirror_map, eta)` is Algorithm 1 of the paper; it has an accelerated and two lazy
relatives. Each of them takes the place of the optimiser in `mirrordp.train(step, ...)`, where
`alpha=1` hands it the noisy private gradient alone. The paper's first-order form, which needs no
map, is in `mirrordp.updates.mixing`.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from mirrordp import _validate, mirror
from mirrordp.mirror import Constraint, EuclideanMap, MirrorMap, QuadraticMap, WholeSpace
from mirrordp.types import Params, PyTree

LearningRate: TypeAlias = float | Callable[[jax.Array], jax.typing.ArrayLike]
"""A number, or an optax schedule: a function of the step 0, 1, ..."""


def _rate_at(learning_rate: LearningRate, step: jax.Array, dtype: jnp.dtype) -> jax.Array:
    value = learning_rate(step) if callable(learning_rate) else learning_rate
    return jnp.asarray(value, dtype)


def _check_update(mirror_map: MirrorMap | None, learning_rate: LearningRate) -> None:
    if mirror_map is not None:
        _validate.instance_of(MirrorMap, "Use QuadraticMap.from_data(...).", mirror_map=mirror_map)
    if not callable(learning_rate):
        _validate.positive(learning_rate=learning_rate)


def _ravel(tree: PyTree | None, size: int | None) -> tuple[jax.Array, Callable]:
    """Returns a tree of parameters or gradients as one vector, and the function that undoes it."""
    if tree is None:
        raise ValueError(
            "mirror descent needs the parameters, got params=None. Call "
            "update(grads, state, params), as mirrordp.train does."
        )
    vector, unravel = ravel_pytree(tree)
    if size is not None and vector.size != size:
        raise ValueError(
            f"the mirror map is for {size} parameters, got a tree of {vector.size}. Build the map "
            "for the raveled parameters."
        )
    return vector, unravel


class MirrorDescentState(NamedTuple):
    """What the next mirror step needs.

    Attributes:
        step: the number of steps taken.
        mirror_map: Ψ. It travels with the state because arrays that a jitted function closes over
            become constants of the compiled program.
        converged: whether every solver so far converged; always True for closed forms.
    """

    step: jax.Array
    mirror_map: MirrorMap
    converged: jax.Array


def mirror_descent(
    mirror_map: MirrorMap, learning_rate: LearningRate, *, constraint: Constraint | None = None
) -> optax.GradientTransformation:
    """Returns the step of Algorithm 1 (line 5) as a transformation.

        θ_{t+1} = argmin_{θ ∈ C} η_t ⟨g_t, θ⟩ + B_Ψ(θ, θ_t).

    Use it as the optimiser of a `TrainStep` with `average=UniformAverage()`, and train with the
    default `alpha=1`. On the Euclidean map and the whole space it is `optax.sgd` to the bit.

    Args:
        mirror_map: Ψ, on the parameters raveled into one vector.
        learning_rate: η_t.
        constraint: C; the whole space by default. Rounding of θ_t + update can leave an iterate
            outside by a relative 1e-7 in float32.

    Returns:
        A transformation whose updates are θ_{t+1} − θ_t; it needs `params`. Its state says whether
        the solvers converged.
    """
    _check_update(mirror_map, learning_rate)
    constraint = WholeSpace() if constraint is None else constraint

    def init(params: Params) -> MirrorDescentState:
        _ravel(params, mirror_map.num_params)
        return MirrorDescentState(jnp.zeros([], jnp.int32), mirror_map, jnp.ones([], bool))

    def update(
        updates: PyTree, state: MirrorDescentState, params: Params | None = None
    ) -> tuple[PyTree, MirrorDescentState]:
        theta, unravel = _ravel(params, mirror_map.num_params)
        grad = ravel_pytree(updates)[0].astype(theta.dtype)
        rate = _rate_at(learning_rate, state.step, theta.dtype)
        change, converged = _mirror_change(state.mirror_map, theta, grad, rate, constraint)
        state = MirrorDescentState(state.step + 1, state.mirror_map, state.converged & converged)
        return unravel(change), state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _mirror_change(
    mirror_map: MirrorMap,
    theta: jax.Array,
    grad: jax.Array,
    learning_rate: jax.Array,
    constraint: Constraint,
) -> tuple[jax.Array, jax.Array]:
    """Returns θ_{t+1} − θ_t, and whether the solvers converged."""
    if isinstance(mirror_map, EuclideanMap):
        # As optax.sgd writes it: in another form the compiler may round θ + change differently.
        change = -learning_rate * grad
        converged = jnp.all(jnp.isfinite(change))
    elif isinstance(mirror_map, QuadraticMap):
        # The change does not depend on θ; taken from the origin it has no cancellation.
        change, converged, *_ = mirror_map.step(jnp.zeros_like(theta), grad, learning_rate)
    else:
        free = mirror_map.step(theta, grad, learning_rate)
        change, converged = free.params - theta, free.converged
    if isinstance(constraint, WholeSpace):
        return change, converged
    reached = theta + change
    projected = mirror_map.project(reached, constraint)
    inside = jnp.all(projected.params == reached)
    change = jnp.where(inside, change, projected.params - theta)
    return change, converged & projected.converged


class AcceleratedMirrorDescentState(NamedTuple):
    """Both sequences, the map and whether every solver converged.

    Attributes:
        sequences: y, z and the number of steps, of raveled parameters.
        mirror_map: Ψ.
        converged: as in `MirrorDescentState`.
    """

    sequences: mirror.AcceleratedState
    mirror_map: MirrorMap
    converged: jax.Array


def accelerated_mirror_descent(
    mirror_map: MirrorMap, learning_rate: LearningRate, *, constraint: Constraint | None = None
) -> optax.GradientTransformation:
    """Returns accelerated mirror descent (`mirrordp.mirror.accelerated_step`) as a transformation.

    The parameters that it moves are x_{k+1}, where the next gradient must be taken. The result is
    y_T instead, `accelerated_result(state, params)`; averages of the iterates have no meaning here.

    Args:
        mirror_map: Ψ.
        learning_rate: η_t.
        constraint: C; the whole space by default.
    """
    _check_update(mirror_map, learning_rate)

    def init(params: Params) -> AcceleratedMirrorDescentState:
        theta, _ = _ravel(params, mirror_map.num_params)
        return AcceleratedMirrorDescentState(
            mirror.accelerated_init(theta), mirror_map, jnp.ones([], bool)
        )

    def update(
        updates: PyTree, state: AcceleratedMirrorDescentState, params: Params | None = None
    ) -> tuple[PyTree, AcceleratedMirrorDescentState]:
        theta, unravel = _ravel(params, mirror_map.num_params)
        grad = ravel_pytree(updates)[0].astype(theta.dtype)
        sequences, converged = mirror.accelerated_step(
            state.mirror_map,
            state.sequences,
            grad,
            _rate_at(learning_rate, state.sequences.num_steps, theta.dtype),
            constraint=constraint,
        )
        change = mirror.accelerated_query(sequences) - theta
        state = AcceleratedMirrorDescentState(
            sequences, state.mirror_map, state.converged & converged
        )
        return unravel(change), state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def accelerated_result(state: AcceleratedMirrorDescentState, params: Params) -> Params:
    """Returns y_T of accelerated mirror descent, in the structure of `params`."""
    return ravel_pytree(params)[1](state.sequences.y)


class LazyMirrorDescentState(NamedTuple):
    """The weighted sum of gradients, the map and whether every solver converged.

    Attributes:
        step: the number of steps taken.
        sums: Σ η_i g_i, raveled.
        mirror_map: Ψ̂.
        converged: as in `MirrorDescentState`.
    """

    step: jax.Array
    sums: mirror.LazyState
    mirror_map: MirrorMap
    converged: jax.Array


def lazy_mirror_descent(
    mirror_map: MirrorMap, learning_rate: LearningRate
) -> optax.GradientTransformation:
    """Returns the lazy form of the paper's appendix, solved exactly, without a weight α.

        θ_{t+1} = argmin_θ ⟨Σ_{i ≤ t} η_i g_i, θ⟩ + Ψ̂(θ).

    Started at argmin Ψ̂ it takes the same steps as `mirror_descent` on Ψ̂; started elsewhere, its
    first step forgets the start.

    Args:
        mirror_map: Ψ̂; the paper's Ψ + ½‖θ‖² is `regularized()` of the map of Ψ.
        learning_rate: η_t.
    """
    _check_update(mirror_map, learning_rate)

    def init(params: Params) -> LazyMirrorDescentState:
        theta, _ = _ravel(params, mirror_map.num_params)
        return LazyMirrorDescentState(
            jnp.zeros([], jnp.int32), mirror.lazy_init(theta), mirror_map, jnp.ones([], bool)
        )

    def update(
        updates: PyTree, state: LazyMirrorDescentState, params: Params | None = None
    ) -> tuple[PyTree, LazyMirrorDescentState]:
        theta, unravel = _ravel(params, mirror_map.num_params)
        grad = ravel_pytree(updates)[0].astype(theta.dtype)
        rate = _rate_at(learning_rate, state.step, theta.dtype)
        sums, solution = mirror.lazy_step(state.mirror_map, state.sums, theta, grad, rate)
        converged = state.converged & solution.converged
        state = LazyMirrorDescentState(state.step + 1, sums, state.mirror_map, converged)
        return unravel(solution.params - theta), state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def linearized_lazy_mirror_descent(
    learning_rate: LearningRate,
) -> optax.GradientTransformationExtraArgs:
    """Returns the lazy form with Ψ linearised at each iterate, and weights 1/(tη) in place of α.

        θ_{t+1} = −Σ_{i ≤ t} η_i g_i − 1/t Σ_{i ≤ t} ∇Ψ(θ_i).

    It needs no map, only gradients of the public loss:
    `update(private_grad, state, params, *, public_grad)`. Inside `mirrordp.train`, pass public data
    and leave `alpha` at 1.

    Args:
        learning_rate: η_t.
    """
    _check_update(None, learning_rate)

    def init(params: Params) -> mirror.LinearizedLazyState:
        return mirror.linearized_lazy_init(_ravel(params, None)[0])

    def update(
        updates: PyTree,
        state: mirror.LinearizedLazyState,
        params: Params | None = None,
        *,
        public_grad: PyTree,
        **extra_args,
    ) -> tuple[PyTree, mirror.LinearizedLazyState]:
        del extra_args
        theta, unravel = _ravel(params, None)
        grad, public = (
            ravel_pytree(tree)[0].astype(theta.dtype) for tree in (updates, public_grad)
        )
        rate = _rate_at(learning_rate, state.num_steps, theta.dtype)
        state, following = mirror.linearized_lazy_step(state, grad, public, rate)
        return unravel(following - theta), state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
