"""A search for the neighbouring data sets whose releases differ most: a step in, a distance out."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _validate
from mirrordp.data import PrivateClients
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise
from mirrordp.privacy.sums import ExactSum
from mirrordp.training.central import TrainStep
from mirrordp.training.federated import ClientArrays, FederatedStep, UserBatch, pad_users
from mirrordp.training.step import record_keys
from mirrordp.types import Batch, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Replay:
    """The worst pair of neighbours that a search found.

    Attributes:
        largest: the largest distance between the two sums, before noise.
        allowed: the distance that the accountant assumes: C, or 2C for replace.
        description: how the worst pair was made.
        num_pairs: the number of pairs that were tried.
    """

    largest: float
    allowed: float
    description: str
    num_pairs: int

    def exceeded(self, tolerance: float = 1e-3) -> bool:
        """Returns whether the sensitivity is more than is charged, beyond rounding errors."""
        return not self.largest <= (1 + tolerance) * self.allowed


def neighbour_replay(
    step: TrainStep | FederatedStep,
    params: Params,
    rows: Batch | PrivateClients,
    *,
    public: Batch | None = None,
    alpha: float = 1.0,
    num_pairs: int = 200,
    seed: int = 0,
) -> Replay:
    """Searches for the neighbouring data sets whose releases differ most.

    Both data sets go through the whole step with the same batch, the same noise and the same keys.
    The difference of the released gradients, times the divisor B over α, is therefore the
    difference of the clipped sums, which must not exceed C (2C for replace), whatever the rows are.
    For your own loss function:

        step = TrainStep(loss_fn=my_loss, mechanism=mechanism, optimizer=optax.sgd(0.1))
        assert not neighbour_replay(step, my_params, my_rows).exceeded()

    With a chart, the sums before the noise are compared in its place.

    In a `FederatedStep` a record is a user with all of its rows. The sums before the noise are
    compared as well, because they hold what a user adds to the count of an adaptive clip.

    The search begins with rows from `rows` and hostile ones (NaN, infinities, huge, tiny and zero
    values, the extremes of integers, duplicates; users with none, one and all of their rows), in
    batches drawn by the mechanism, alone, and together with all others. Then it varies the worst
    pair found so far: scaled, negated, mixed with other rows.

    Args:
        step: a step of central training or, for users, of federated training; its optimiser is
            replaced by one that keeps the gradient.
        params: the parameters at which to search.
        rows: arrays with at least two rows, as the mechanism would sample from; for a federated
            step `PrivateClients` of at least two users.
        public: public rows, if α < 1 or if the step has a chart that needs them.
        alpha: the weight of the private gradient.
        num_pairs: the number of pairs of neighbours to try.
        seed: the seed of the search.
    """
    _validate.instance_of((TrainStep, FederatedStep), step=step)
    _validate.positive_integer(num_pairs=num_pairs)
    _validate.probability("A step with α = 0 releases nothing.", alpha=alpha)
    if alpha < 1 and public is None:
        raise ValueError(
            f"alpha={alpha:g} needs public rows to mix in their gradient, got none. Pass "
            "public=arrays, or leave alpha at 1."
        )
    mechanism = step.mechanism
    if not isinstance(mechanism.noise, GaussianNoise):
        mechanism = dataclasses.replace(mechanism, noise=GaussianNoise())
    step = dataclasses.replace(step, mechanism=mechanism, optimizer=_LAST_GRADIENT, average=None)
    params = jax.tree.map(jnp.asarray, params)
    if isinstance(step, FederatedStep):
        _validate.instance_of(PrivateClients, "A record of a federated step is a user.", rows=rows)
        records, what = _users(rows), "users"
        released = _released_by_users(step, params, public, alpha, seed)
    else:
        records, what = jax.tree.map(np.asarray, rows), "rows"
        released = _released_by_rows(step, params, records, public, alpha, seed)
    count = len(jax.tree.leaves(records)[0])
    if count < 2:
        raise ValueError(f"a replay needs at least two {what}, got {count}. Pass more.")
    rng = np.random.default_rng(seed)
    worst, description, best, tried = 0.0, "none", None, 0
    while tried < num_pairs and worst < math.inf:
        victim, other, how = _propose(records, count, rng, best)
        drawn = _company(mechanism, count, rng, tried)
        place = rng.choice(drawn)
        tried += 1
        data = _with_row(records, place, victim)
        index, is_padding = _padded(drawn, count)
        # A record that does not count may hold anything, and must not affect the others.
        neighbour, hidden = _with_row(records, place, other), is_padding | (index == place)
        if mechanism.adjacency is Adjacency.REPLACE:
            hidden = is_padding
        one = released(data, index, is_padding)
        two = released(neighbour, index, hidden)
        distance = max(map(_distance, one, two))
        if not distance <= worst:
            worst = math.inf if math.isnan(distance) else distance
            description = f"{how}; {len(set(drawn))} of {count} {what} in the batch"
            best = (victim, other, how)
    allowed = mechanism.adjacency.distance * mechanism.l2_clip_norm
    return Replay(worst, allowed, description, tried)


def _released_by_rows(
    step: TrainStep, params: Params, rows: Batch, public: Batch | None, alpha: float, seed: int
) -> Callable[..., list[PyTree]]:
    """Returns a function that computes what a step releases, in units of the clipped sum."""
    state = step.init(params, jax.random.key(seed))
    count = len(jax.tree.leaves(rows)[0])
    takes_key = step.clipped_grad.takes_key
    keys = jax.random.split(_replay_key(seed + 1), count) if takes_key else None
    arguments = {} if public is None else {"public": public, "alpha": alpha}
    unit = step.mechanism.sampling.expected_batch_size / alpha
    if step.prepares:
        if public is None:
            raise ValueError("the chart of the step needs public rows, got none. Pass public=...")
        state = step.prepare(state, step.public_grad(state, public, _replay_key(seed + 2)))

    def with_keys(data, index):
        batch = jax.tree.map(lambda leaf: leaf[index], data)
        return batch, None if keys is None else keys[index]

    @jax.jit
    def summed(data, index, is_padding):
        batch, batch_keys = with_keys(data, index)
        return step.private_sum(state, batch, is_padding, batch_keys).total

    if step.chart is not None:
        # The sum itself: what follows from it has other units.
        return lambda *batch: [_numbers(summed(*batch))]

    @jax.jit
    def run(data, index, is_padding):
        batch, batch_keys = with_keys(data, index)
        after, _ = step(state, batch, is_padding, keys=batch_keys, **arguments)
        return after.opt_state

    return lambda *batch: [_scaled(run(*batch), unit)]


def _users(clients: PrivateClients) -> UserBatch:
    """Returns the padded rows of all users, in the form that a replay edits."""
    return pad_users(ClientArrays.of(clients), np.arange(len(clients)))


def _released_by_users(
    step: FederatedStep, params: Params, public: Batch | None, alpha: float, seed: int
) -> Callable[..., list[PyTree]]:
    """Returns a function that computes a step's sum, and what it releases in the same units."""
    state = step.init(params, jax.random.key(seed))
    step_key, public_key = jax.random.split(_replay_key(seed + 1))
    public_gradient = None if public is None else step.public_grad(state, public, public_key)
    # The norm that a clipped delta has in the sum, over the norm that it has in the gradient.
    share = 0.0 if step.adaptive_clip is None else step.adaptive_clip.budget_share
    mechanism = step.mechanism
    unit = math.sqrt(1 - share) * mechanism.sampling.expected_batch_size / alpha

    @jax.jit
    def run(data, index, is_padding):
        # As in a run, a pass is as long as its largest user, which must not affect the others.
        batch = jax.tree.map(lambda leaf: leaf[index], data)
        total = step.private_sum(state, batch, is_padding, record_keys(step_key, index))
        after, _ = step.finish(state, total, public_gradient, alpha)
        return total.total, after.opt_state

    def released(*batch):
        total, gradient = run(*batch)
        return [_numbers(total), _scaled(gradient, unit)]

    return released


def _replay_key(seed: int) -> jax.Array:
    """Makes a key of the kind that training uses, whatever JAX's default kind is."""
    return jax.random.key(seed, impl="threefry2x32")


def _numbers(total: ExactSum) -> PyTree:
    """Converts a sum to numbers."""
    return jax.tree.map(np.asarray, total.floats())


def _scaled(tree: PyTree, factor: float) -> PyTree:
    return jax.tree.map(lambda leaf: factor * np.asarray(leaf, np.float64), tree)


def _keep_last(updates, state, params=None):
    del state, params
    return jax.tree.map(jnp.zeros_like, updates), updates


_LAST_GRADIENT = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params),
    _keep_last,
)


def _distance(one: PyTree, two: PyTree) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return math.hypot(*(np.linalg.norm(np.ravel(np.float64(a) - np.float64(b))) for a, b in pairs))


def _company(mechanism: Mechanism, count: int, rng: np.random.Generator, number: int) -> np.ndarray:
    """Draws a batch of at least one row: as the mechanism draws, of one row, or of all rows."""
    drawn = np.asarray(next(iter(mechanism.sampling.batches(count, 1, rng))), int)
    if number % 4 == 2:
        return np.arange(count)
    return rng.integers(count, size=1) if number % 4 == 1 or len(drawn) == 0 else drawn


def _padded(drawn: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    room = max(2 * count, len(drawn))
    index = np.zeros(room, np.int32)
    index[: len(drawn)] = drawn
    is_padding = np.arange(room) >= len(drawn)
    return index, is_padding


def _with_row(rows: Batch, place: int, row: PyTree) -> Batch:
    def put(leaf, value):
        changed = leaf.copy()
        changed[place] = value
        return changed

    return jax.tree.map(put, rows, row)


_HOSTILE = (
    *("nan", "one nan", "inf", "-inf", "huge", "-huge", "one large", "tiny", "zero", "duplicate"),
    "as it is",
)


def _hostile(kind: str, row: PyTree, other: PyTree) -> PyTree:
    """Makes a row that may break things; for integers, infinities become the extreme values."""
    if isinstance(row, UserBatch):
        return row._replace(examples=_hostile(kind, row.examples, other.examples))
    if kind in ("duplicate", "as it is"):
        return other if kind == "duplicate" else row

    def make(leaf):
        leaf = np.array(leaf)
        if np.issubdtype(leaf.dtype, np.floating):
            limits = np.finfo(leaf.dtype)
            value = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": limits.max,
                     "-huge": -limits.max, "tiny": limits.tiny, "zero": 0}  # fmt: skip
            if kind.startswith("one "):
                # A large value is finite in the row, and infinite once it is squared.
                leaf.ravel()[:1] = np.nan if kind == "one nan" else np.sqrt(limits.max)
                return leaf
            return np.full_like(leaf, value[kind])
        if np.issubdtype(leaf.dtype, np.integer):
            limits = np.iinfo(leaf.dtype)
            extremes = {"huge": limits.max, "inf": limits.max, "-huge": limits.min,
                        "-inf": limits.min, "zero": 0}  # fmt: skip
            return np.full_like(leaf, extremes[kind]) if kind in extremes else leaf
        return leaf

    return jax.tree.map(make, row)


def _propose(
    rows: Batch, count: int, rng: np.random.Generator, best: Any
) -> tuple[PyTree, PyTree, str]:
    """Returns two versions of a record, hostile ones or variations of `best`, and their origin."""

    def pick():
        place = rng.integers(count)
        record = jax.tree.map(lambda leaf: leaf[place], rows)
        if isinstance(record, UserBatch):
            width = len(jax.tree.leaves(record.examples)[0])
            own = rng.choice([record.num_examples, 0, 1, width], p=[0.4, 0.1, 0.1, 0.4])
            record = record._replace(num_examples=own)
        return record

    if best is None or rng.random() < 0.5:
        first, second = rng.choice(_HOSTILE, 2)
        return (
            _hostile(first, pick(), pick()),
            _hostile(second, pick(), pick()),
            f"{first} and, if it is replaced, {second}",
        )
    victim, other, what = best
    share = rng.choice([0.0, 0.0, 0.3])
    varied = _combined(victim, pick(), rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(-3, 3), share)
    if rng.random() < 0.5:
        other = _combined(varied, varied, -1.0, 0.0)
    return varied, other, f"a variation of: {what.removeprefix('a variation of: ')}"


def _combined(row: PyTree, other: PyTree, factor: float, share: float) -> PyTree:
    """Computes factor · ((1 − share) · row + share · other) for floats; keeps other values."""

    def one(leaf, other_leaf):
        leaf = np.asarray(leaf)
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        with np.errstate(over="ignore", invalid="ignore"):
            mixed = leaf if share == 0 else (1 - share) * leaf + share * other_leaf
            return np.asarray(factor * mixed, leaf.dtype)

    return jax.tree.map(one, row, other)
