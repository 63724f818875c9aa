"""Training of `mirrordp.tables.network.NetworkScorer`: its public start, and the private part."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp.data import PrivateData, PublicData
from mirrordp.data.sources import computed_columns
from mirrordp.linear._noting import tell
from mirrordp.linear._planning import Scaling
from mirrordp.linear.descent import Rows
from mirrordp.mirror.families import CUMULATIVE, LOGISTIC, MULTINOMIAL, SQUARED_ERROR, Family
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.tables.network import HIDDEN, NUM_BINS, NetworkScorer, forward, inputs
from mirrordp.training import TrainOptions, TrainStep, train
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.types import Params

_SEED = 0
_HELD_OUT = 5
_BATCH, _STEPS_PER_LOOK, _LOOKS = 256, 25, 24
_RATE, _WEIGHT_DECAY = 1e-3, 1e-2
_PRIVATE_BLOCKS = 20
_AT_ONCE = 64


def learning_rate(family: Family) -> float:
    """Returns the rate of Adam at the beginning.

    Adam takes steps of one size whatever the noise. Losses of classes and counts are flatter than
    squared errors and pull back less of what noise has moved.
    """
    return 5e-3 if family == SQUARED_ERROR else 1.5e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """A network after public rows.

    Attributes:
        family: the family of the loss.
        network: with the parameters of the start.
        params: the same in JAX, layers and linear part.
        clip_norm: a clip norm for private gradients: the root mean square of the norms of public
            ones. Where one class is rare, the median would be that of rows which are predicted
            well, and rows of the rare class would hardly count.
        public: scaled public rows, targets and weights to learn from.
        held_out: likewise, to judge by.
    """

    family: Family
    network: NetworkScorer
    params: Params
    clip_norm: float
    public: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, family: Family, rows: Rows) -> "Start":
        """Trains on four fifths of public rows; the iterate that is best on the rest is kept."""
        scaling = Scaling.of(rows.features, intercept=True, row_norm_bound=None, stays_sparse=False)
        scaled = (rows.features - scaling.shift) * scaling.factor
        weights = np.ones(len(rows)) if rows.weights is None else rows.weights
        arrays = tuple(np.asarray(a, np.float32) for a in (scaled, rows.targets, weights))
        order = np.random.default_rng(_SEED).permutation(len(rows))
        judges, known = order[: len(order) // _HELD_OUT], order[len(order) // _HELD_OUT :]
        public, held_out = (tuple(a[some] for a in arrays) for some in (known, judges))
        cut, edges = _bins(scaled)
        size = scaled.shape[1] + sum(len(borders) - 1 for borders in edges)
        blank = NetworkScorer(
            scaling.shift,
            scaling.factor,
            cut,
            edges,
            tuple((np.zeros(shape), np.zeros(shape[1])) for shape in _shapes(size, rows)),
            np.zeros((size, rows.targets.shape[1])),
        )
        loss = Loss(family, cut, edges)
        params = _init(_shapes(size, rows), blank.skip.shape)
        params = _warm(loss, params, public, held_out)
        clip = float(np.sqrt(np.mean(_squared_norms(loss, params, public)))) or 1.0
        return cls(family, _with(blank, params), params, clip, public, held_out)


def _squared_norms(loss: "Loss", params: Params, rows: tuple[np.ndarray, ...]) -> np.ndarray:
    """Returns the squared norm of each row's gradient, a few gradients at a time."""
    found = np.zeros(len(rows[0]))
    for start in range(0, len(found), _AT_ONCE):
        # The last block overlaps with the one before, so that one size is compiled.
        block = slice(min(start, max(0, len(found) - _AT_ONCE)), start + _AT_ONCE)
        found[block] = _norms_of_some(loss, params, tuple(array[block] for array in rows))
    return found


@jax.jit
def _norms_of_some(loss: "Loss", params: Params, rows: tuple[Any, ...]) -> jax.Array:
    def norm(row: tuple[Any, ...]) -> jax.Array:
        return optax.tree.norm(jax.grad(loss)(params, row), squared=True)

    return jax.vmap(norm)(rows)


def _bins(scaled: np.ndarray) -> tuple[tuple[int, ...], tuple[np.ndarray, ...]]:
    """Returns the features with several public values, and the borders of their bins."""
    found = {}
    for feature, column in enumerate(scaled.T):
        if len(np.unique(column)) > 3:
            # Distinct as float32 too, in which the network is trained.
            borders = np.quantile(column, np.linspace(0, 1, NUM_BINS + 1)).astype(np.float32)
            borders = np.unique(borders).astype(np.float64)
            if len(borders) > 2:
                found[feature] = borders
    return tuple(found), tuple(found.values())


def _shapes(size: int, rows: Rows) -> list[tuple[int, int]]:
    sizes = [size, *HIDDEN, rows.targets.shape[1]]
    return list(itertools.pairwise(sizes))


def _init(shapes: list[tuple[int, int]], skip: tuple[int, ...]) -> Params:
    """Draws the first layers at random; the last one and the linear part start at zero."""
    keys = jax.random.split(jax.random.key(_SEED), len(shapes))
    layers = [
        (jax.random.normal(key, shape) * np.sqrt(2 / shape[0]), jnp.zeros(shape[1]))
        for key, shape in zip(keys, shapes, strict=True)
    ]
    layers[-1] = (jnp.zeros(shapes[-1]), jnp.zeros(shapes[-1][1]))
    return {"layers": layers, "skip": jnp.zeros(skip)}


def _with(network: NetworkScorer, params: Params) -> NetworkScorer:
    found: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    layers = tuple((weights, bias) for weights, bias in found["layers"])
    return dataclasses.replace(network, layers=layers, skip=found["skip"])


@jax.tree_util.register_pytree_node_class
class Loss:
    """The weighted loss of one scaled row.

    A pytree, whose leaves are the borders of bins: networks of the same shape, such as those of a
    rehearsal, then share compiled programs.
    """

    def __init__(self, family: Family, cut: tuple[int, ...], edges: tuple[np.ndarray, ...]):
        self._family, self._cut = family, cut
        self._edges = tuple(borders.astype(np.float32) for borders in edges)

    def tree_flatten(self) -> tuple[Any, Any]:
        return self._edges, (self._family, self._cut)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> "Loss":
        found = object.__new__(cls)
        found._family, found._cut = aux
        found._edges = tuple(leaves)
        return found

    def __call__(self, params: Any, example: tuple[Any, ...]) -> jax.Array:
        row, targets, weight = example
        z = inputs(jnp, row, self._cut, self._edges)
        scores = forward(jnp, params["layers"], params["skip"], z)
        return weight * self._family.loss(scores[None], targets[None])[0]


_OPTIMIZER = optax.adamw(_RATE, weight_decay=_WEIGHT_DECAY)


@jax.jit
def _mean(loss: Loss, params: Params, rows: tuple[Any, ...]) -> jax.Array:
    return jax.vmap(loss, in_axes=(None, 0))(params, rows).mean()


@jax.jit
def _steps(
    loss: Loss, params: Params, state: Any, public: tuple[Any, ...], key: jax.Array
) -> tuple[Params, Any]:
    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        chosen = jax.random.randint(key, (_BATCH,), 0, len(public[0]))
        grads = jax.grad(_mean, argnums=1)(loss, params, tuple(a[chosen] for a in public))
        updates, state = _OPTIMIZER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), jax.random.split(key, _STEPS_PER_LOOK))[0]


def _warm(
    loss: Loss, params: Params, public: tuple[np.ndarray, ...], held_out: tuple[np.ndarray, ...]
) -> Params:
    """Learns from public rows, and returns the iterate that is best on held-out ones."""
    state, best = _OPTIMIZER.init(params), params
    lowest = float(_mean(loss, params, held_out))
    for look in range(_LOOKS):
        params, state = _steps(loss, params, state, public, jax.random.key(look))
        judged = float(_mean(loss, params, held_out))
        if judged < lowest:
            best, lowest = params, judged
    return best


def scaled_rows(network: NetworkScorer, rows: Rows) -> tuple[np.ndarray, ...]:
    """Returns scaled features, targets and weights in float32; rows on disk stay there."""

    def scaled(x: Any, targets: Any, counts: Any, weights: Any) -> tuple[np.ndarray, ...]:
        weights = np.ones(len(x)) if weights is None else weights
        if counts is not None:
            weights = np.where(counts, weights, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            x = (x - network.shift) * network.factor
            arrays = tuple(np.array(array, np.float32) for array in (x, targets, weights))
        # A row that float32 cannot hold adds nothing, instead of ending the fit for all others.
        finite = np.all([np.isfinite(a).reshape(len(x), -1).all(axis=1) for a in arrays], axis=0)
        for array in arrays:
            array[~finite] = 0.0
        return arrays

    return tuple(computed_columns(scaled, rows.features, rows.targets, rows.counts, rows.weights))


def train_privately(
    start: Start,
    rows: Rows,
    mechanism: Mechanism,
    *,
    learning_rate: float,
    seed: int | None,
    spend: Ledger | Budget | None,
    checkpoint: Checkpoint | None,
) -> NetworkScorer:
    """Goes on from a public start by PDA-DPMD.

    The public gradient has the weight that public rows have among all rows. Adam takes steps of
    one size however much of a gradient is noise. Where the noise of a mean gradient, whose norm is
    about σC√p/B for p parameters and batches of B, is longer than C, steps are therefore shorter by
    that factor; with next to no budget, the network stays at its start.
    """
    network = start.network
    loss = Loss(start.family, network.cut, network.edges)
    arrays = scaled_rows(network, rows)
    num_public = len(start.public[0])
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(start.params))
    signal = mechanism.sampling.expected_batch_size / np.sqrt(num_parameters)
    rate = learning_rate * min(1.0, signal / mechanism.noise_multiplier)
    step = TrainStep(
        loss,
        mechanism,
        optax.adam(optax.linear_schedule(rate, 0.0, mechanism.num_steps), b2=0.99),
        public_loss_fn=loss,
        public_batch_size=min(num_public, _BATCH),
    )
    states = train(
        step,
        start.params,
        PrivateData(arrays),
        # As a list: rows of the same structure would be compared with private ones once more, and
        # all rows of a table of few values be left out, which `fit` avoids.
        PublicData(list(start.public)),
        alpha=len(rows) / (len(rows) + num_public),
        seed=seed,
        spend=spend,
        checkpoint=checkpoint,
        options=TrainOptions(steps_per_call=max(1, mechanism.num_steps // _PRIVATE_BLOCKS)),
    )
    last = None
    for last in states:
        tell(f"step {last[1].step} of {mechanism.num_steps}")
    assert last is not None
    return _tempered(start, _with(network, last[0].params))


def _tempered(start: Start, network: NetworkScorer) -> NetworkScorer:
    """Divides scores of classes by the temperature T ≥ 1 that is best on held-out public rows.

    Clipped gradients know the direction of a loss and not where it ends: rows that are predicted
    well pull a network on as hard as the others, until it is too sure of itself. T is
    post-processing and public. With few public rows it stays near one, by a prior
    log T ~ N(0, 1/4).
    """
    if start.family not in (LOGISTIC, MULTINOMIAL, CUMULATIVE):
        return network
    x, targets, weights = (np.asarray(array, np.float64) for array in start.held_out)
    z = inputs(np, x, network.cut, network.edges)
    scores = forward(np, network.layers, network.skip, z)
    temperatures = np.geomspace(1.0, 10.0, 47)

    def minus_log_posterior(temperature: float) -> float:
        losses = start.family.loss(scores / temperature, targets)
        return float(np.sum(weights * losses)) + 2 * np.log(temperature) ** 2

    best = min(temperatures, key=minus_log_posterior)
    layers = (*network.layers[:-1], tuple(part / best for part in network.layers[-1]))
    return dataclasses.replace(network, layers=layers, skip=network.skip / best)
