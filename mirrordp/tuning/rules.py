"""Settings that follow from public rows by a rule, at no cost in privacy."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mirrordp import _validate
from mirrordp.data import PublicData, require_public
from mirrordp.privacy.clipping import squared_norm, with_key
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.trainable import Trainable, children
from mirrordp.types import LossFn, Params, PyTree

_ROWS_AT_A_TIME = 64
_LANCZOS_STEPS = 16
_RESAMPLES = 3
_RATES = np.geomspace(1e-6, 1e4, 501)


def public_clip_norm(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    *,
    quantile: float = 0.9,
    by_group: bool = False,
    trainable: PyTree | Trainable | None = None,
) -> Any:
    """Returns a quantile of the norms ‖∇ℓ(θ; d)‖ of the public rows' gradients, as a clip norm.

    At the default, a tenth of the public rows would be clipped. A much smaller norm is tempting,
    since noise grows with it, but biases the sum: at a start that has learned from public rows,
    most rows have small gradients, and those that have something to teach have the largest. On
    UCI Adult and California housing (10,000 private rows, ε = 1, one seed each), a network from a
    public start had a loss 5% higher at C = 2, not far above the median, than at C = 6, which 95%
    of the public rows stay below.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        params: θ, where the private run begins.
        public: the public rows.
        quantile: the share of rows that would not be clipped.
        by_group: whether to return one norm for each child of the tree of parameters, such as the
            layers of a network, in place of one norm for all of them; see
            `updates.clipped_by_group`.
        trainable: as in `mirrordp.clipped_grad`.

    Returns:
        The norm, or a dictionary of norms by the child's name.
    """
    require_public(public)
    _validate.probability(quantile=quantile)
    names, squares = _squared_norms(loss_fn, Trainable.of(trainable), params, public.arrays)
    squares = np.asarray(squares, np.float64)
    usable = squares[np.isfinite(squares).all(axis=1)]
    if len(usable) == 0:
        raise ValueError(
            "expected public rows with finite gradients, got none. Look for the NaN in the loss "
            "function, or begin elsewhere."
        )
    if not by_group:
        return _norm_at(np.sqrt(usable.sum(axis=1)), quantile, "the parameters")
    return {
        name: _norm_at(np.sqrt(column), quantile, name)
        for name, column in zip(names, usable.T, strict=True)
    }


def _norm_at(norms: np.ndarray, quantile: float, what: str) -> float:
    # A row above the quantile, so that the share is reached with few rows, too.
    found = float(np.quantile(norms, quantile, method="higher"))
    if found == 0:
        raise ValueError(
            f"expected public rows with a gradient in {what}, got a norm of zero at quantile "
            f"{quantile:g}. Use a larger quantile, or begin elsewhere."
        )
    return found


def _squared_norms(
    loss_fn: LossFn, trainable: Trainable, params: Params, arrays: PyTree
) -> tuple[list[str], jax.Array]:
    """Returns the names of the groups and the squared norms, [rows, groups]."""
    params = jax.tree.map(jnp.asarray, params)
    groups = children(trainable.part(params))
    names = list(dict.fromkeys(groups))
    squares = _leaf_squares(loss_fn, trainable, params, arrays)
    member = jnp.asarray([[group == name for name in names] for group in groups], squares.dtype)
    return names, squares @ member


@functools.partial(jax.jit, static_argnames=("loss_fn", "trainable"))
def _leaf_squares(
    loss_fn: LossFn, trainable: Trainable, params: Params, arrays: PyTree
) -> jax.Array:
    keyed = with_key(loss_fn)
    rows = jax.tree.leaves(arrays)[0].shape[0]
    keys = jax.random.split(jax.random.key(0), rows)

    def of_row(row: tuple[PyTree, jax.Array]) -> jax.Array:
        example, key = row
        part = trainable.part(params)
        grad = jax.grad(lambda p: keyed(trainable.merge(p, params), example, key))(part)
        leaves = [squared_norm(leaf[None])[0] for leaf in jax.tree.leaves(grad)]
        return jnp.stack([leaf.astype(jnp.float32) for leaf in leaves])

    return jax.lax.map(of_row, (arrays, keys), batch_size=_ROWS_AT_A_TIME)


def public_learning_rate(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    mechanism: Mechanism,
    *,
    num_steps: int | None = None,
    trainable: PyTree | Trainable | None = None,
    seed: int = 0,
) -> float:
    """Returns the learning rate that noisy SGD would like best on the public loss near the start.

    Let H be the Hessian of the public loss at θ, with eigenvalues λ_i, and g a gradient with parts
    g_i along its eigenvectors. Noise of standard deviation s in every direction is added to each of
    T steps. On the quadratic with this H and g, the expected loss after T steps of rate η is, up to
    a constant,

        Σ_i (g_i²/2λ_i) (1 − ηλ_i)^{2T} + Σ_i ½ λ_i η² s² (1 + r_i + ... + r_i^{T−1}),

    where r_i = (1 − ηλ_i)². The first sum is what is left to learn, the second is the public
    curvature along the noise. Lanczos' method gives both sums without the eigenvalues of H, from
    products with H: the first one started at g, the second one at random directions. Directions of
    negative curvature count as flat.

    Gradients are those of random resamples of the public rows: even at a start that minimises the
    public loss, private rows have as much to teach as the public ones leave uncertain. That
    clipping shortens g is left out: it does so less and less as the loss falls, and a rate that
    made up for it at the start would be too large at the end, where noise counts most.

    The rule is for plain SGD with a constant rate. With momentum m, multiply by 1 − m.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        params: θ, where the private run begins.
        public: the public rows.
        mechanism: the mechanism of the private run; it states C, σ and B.
        num_steps: T; by default that of the mechanism.
        trainable: as in `mirrordp.clipped_grad`.
        seed: decides resamples and directions.
    """
    near = _near(loss_fn, params, public, Trainable.of(trainable), mechanism.l2_clip_norm, seed)
    steps = mechanism.num_steps if num_steps is None else num_steps
    _validate.positive_integer(num_steps=steps)
    noise = mechanism.noise_stddev / mechanism.sampling.expected_batch_size
    left = sum(_left_to_learn(values, weights, steps) for values, weights in near.learning)
    lost = sum(_lost_to_noise(values, weights, steps) for values, weights in near.curvature)
    total = left / len(near.learning) + noise**2 * lost / len(near.curvature)
    return float(_RATES[int(np.argmin(total))])


def public_alpha(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    mechanism: Mechanism,
    *,
    trainable: PyTree | Trainable | None = None,
    seed: int = 0,
) -> float:
    """Returns the weight α of the private gradient that minimises the variance of the mixture.

    The private gradient of a step has variance v = d s² + tr(Σ)/B, where Σ is the covariance of
    clipped gradients and s = σC/B the noise, and over T steps it averages to v/T. The public
    gradient of m rows has variance w = tr(Σ)/m, which is the same error in every step. Weights in
    inverse proportion are

        α = w / (w + v/T).

    It takes public rows to come from the same distribution as the private ones; where they do not,
    a larger α is better.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        params: θ, where the private run begins.
        public: the public rows.
        mechanism: the mechanism of the private run.
        trainable: as in `mirrordp.clipped_grad`.
        seed: decides resamples.
    """
    near = _near(loss_fn, params, public, Trainable.of(trainable), mechanism.l2_clip_norm, seed)
    batch_size = mechanism.sampling.expected_batch_size
    noise = mechanism.noise_stddev / batch_size
    private = (near.num_params * noise**2 + near.variance / batch_size) / mechanism.num_steps
    shared = near.variance / len(public)
    return float(shared / (shared + private)) if shared > 0 else 1.0


def public_spectrum(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    *,
    trainable: PyTree | Trainable | None = None,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns eigenvalues of the public Hessian and how many of them there are, by Lanczos' method.

    A few nodes stand for all eigenvalues: Σ_i f(λ_i) over the d eigenvalues of H is about the sum
    of count · f(value). Negative eigenvalues count as zero.
    """
    require_public(public)
    near = _near(loss_fn, params, public, Trainable.of(trainable), 1.0, seed)
    values, counts = (np.concatenate(parts) for parts in zip(*near.curvature, strict=True))
    return values, counts / len(near.curvature)


class _Near(NamedTuple):
    """The public loss near the start.

    Attributes:
        learning: for each resample, eigenvalues and the share of ‖g‖² along each.
        curvature: for each random direction, eigenvalues and how many of them there are.
        variance: tr(Σ) of the clipped gradients.
        num_params: d.
    """

    learning: list[tuple[np.ndarray, np.ndarray]]
    curvature: list[tuple[np.ndarray, np.ndarray]]
    variance: float
    num_params: int


def _near(
    loss_fn: LossFn,
    params: Params,
    public: PublicData,
    trainable: Trainable,
    l2_clip_norm: float,
    seed: int,
) -> _Near:
    require_public(public)
    params = jax.tree.map(jnp.asarray, params)
    rng = np.random.default_rng(seed)
    rows = len(public)
    arrays = jax.tree.map(jnp.asarray, public.arrays)
    product = functools.partial(_hessian_product, loss_fn, trainable, params, arrays)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(trainable.part(params)))
    learning, curvature = [], []
    for _ in range(_RESAMPLES):
        weights = rng.multinomial(rows, np.full(rows, 1 / rows)) / rows
        means = _mean_gradients(
            loss_fn, trainable, params, arrays, jnp.asarray(weights, jnp.float32), l2_clip_norm
        )
        plain = np.asarray(means[0], np.float64)
        values, shares = _lanczos(product, plain)
        learning.append((values, shares * (plain @ plain)))
        direction = rng.normal(size=num_params)
        values, shares = _lanczos(product, direction)
        curvature.append((values, shares * num_params))
    everyone = jnp.full(rows, 1 / rows, jnp.float32)
    _, mean, squares = _mean_gradients(loss_fn, trainable, params, arrays, everyone, l2_clip_norm)
    mean = np.asarray(mean, np.float64)
    variance = max(float(squares) - float(mean @ mean), 0.0)
    return _Near(learning, curvature, variance, num_params)


def _flat_loss(
    loss_fn: LossFn, trainable: Trainable, params: Params
) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """Returns the trainable parameters as a vector, and the loss of a row as its function."""
    from jax.flatten_util import ravel_pytree

    keyed = with_key(loss_fn)
    flat, unflat = ravel_pytree(trainable.part(params))

    def of_row(flat: jax.Array, row: tuple[PyTree, jax.Array]) -> jax.Array:
        return keyed(trainable.merge(unflat(flat), params), *row)

    return flat, of_row


def _keys(arrays: PyTree) -> jax.Array:
    return jax.random.split(jax.random.key(0), jax.tree.leaves(arrays)[0].shape[0])


@functools.partial(jax.jit, static_argnames=("loss_fn", "trainable"))
def _mean_gradients(loss_fn, trainable, params, arrays, weights, l2_clip_norm):
    """Returns weighted means of the gradients, the clipped ones, and the latters' squared norms."""
    flat, of_row = _flat_loss(loss_fn, trainable, params)

    def add(total, row):
        example, key, weight = row
        grad = jax.grad(of_row)(flat, (example, key)).astype(jnp.float32)
        norm = jnp.linalg.norm(grad)
        clipped = grad * jnp.minimum(1.0, l2_clip_norm / jnp.maximum(norm, 1e-30))
        new = (weight * grad, weight * clipped, weight * jnp.sum(clipped**2))
        return jax.tree.map(jnp.add, total, new), None

    zero = jnp.zeros(flat.shape, jnp.float32)
    start = (zero, zero, jnp.zeros([], jnp.float32))
    return jax.lax.scan(add, start, (arrays, _keys(arrays), weights))[0]


@functools.partial(jax.jit, static_argnames=("loss_fn", "trainable"))
def _hessian_product(loss_fn, trainable, params, arrays, vector):
    """Returns the product of the public Hessian with a vector."""
    flat, of_row = _flat_loss(loss_fn, trainable, params)

    def mean(flat):
        losses = jax.lax.map(
            lambda row: of_row(flat, row), (arrays, _keys(arrays)), batch_size=_ROWS_AT_A_TIME
        )
        return jnp.mean(losses)

    return jax.jvp(jax.grad(mean), (flat,), (vector.astype(flat.dtype),))[1]


def _lanczos(
    product: Callable[[jax.Array], jax.Array], start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights that integrate functions of H against the start's directions.

    The weights add up to one. Vectors are orthogonalised against all before them, which a few steps
    can afford.
    """
    norm = np.linalg.norm(start)
    if norm == 0:
        return np.zeros(1), np.ones(1)
    basis, diagonal, beside = [start / norm], [], []
    for _ in range(min(_LANCZOS_STEPS, len(start))):
        vector = np.asarray(product(jnp.asarray(basis[-1], jnp.float32)), np.float64)
        diagonal.append(float(vector @ basis[-1]))
        for _ in range(2):
            for each in basis:
                vector = vector - (vector @ each) * each
        length = np.linalg.norm(vector)
        if length < 1e-5 * max(map(abs, diagonal), default=0.0) or length == 0:
            break
        beside.append(length)
        basis.append(vector / length)
    size = len(diagonal)
    matrix = np.diag(diagonal) + np.diag(beside[: size - 1], 1) + np.diag(beside[: size - 1], -1)
    values, vectors = np.linalg.eigh(matrix)
    return np.maximum(values, 0.0), vectors[0] ** 2


def _left_to_learn(values: np.ndarray, weights: np.ndarray, steps: int) -> np.ndarray:
    """Returns Σ_i (g_i²/2λ_i) ((1 − ηλ_i)^{2T} − 1) for each rate η; −ηT g_i² where λ_i = 0."""
    curved = values > 1e-12
    products = np.outer(_RATES, values[curved])
    with np.errstate(over="ignore"):
        factors = (1 - products) ** (2 * steps) - 1
    flat = -_RATES * steps * weights[~curved].sum()
    return factors @ (weights[curved] / (2 * values[curved])) + flat


def _lost_to_noise(values: np.ndarray, weights: np.ndarray, steps: int) -> np.ndarray:
    """Returns Σ_i ½ λ_i η² (1 + r_i + ... + r_i^{T−1}) for each rate η."""
    ratios = (1 - np.outer(_RATES, values)) ** 2
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        sums = np.where(np.abs(ratios - 1) < 1e-9, steps, (ratios**steps - 1) / (ratios - 1))
    with np.errstate(over="ignore"):
        return _RATES**2 * (sums @ (weights * values / 2))
