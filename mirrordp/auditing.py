"""Attacks that try to prove a stated ε wrong, and a replay that measures sensitivity.

An audit inserts *canaries*, records made to be noticed, trains, and guesses from the result which
of them took part. Whoever guesses too well for an (ε, δ)-private mechanism has refuted the claim,
at a stated confidence: the audit is a lower bound on ε. A bound below the reported ε proves
nothing; one above it proves a mistake. The statistics are those of `jax_privacy.auditing`:

- `one_run_epsilon`: many canaries in one run (Steinke, Nasr and Jagielski 2023);
- `paired_epsilon`: one canary, many runs with and without it, Clopper-Pearson bounds;
- `gaussian_mu`: the same bounds as the μ of Gaussian differential privacy, where the noise of a
  single full-batch step is seen. Halved noise is found here, where the others have no power.

`audit` runs them on the library's own algorithms. `neighbour_replay` asks another question, of
any loss function: under the same randomness, how far apart are the releases of two neighbouring
data sets, at worst? What each of them can and cannot find is in docs/auditing.md.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import auditing as statistics
from scipy import stats

from mirrordp import _validate, mirror
from mirrordp.accounting import Adjacency
from mirrordp.data import PrivateClients, PrivateData, PublicData
from mirrordp.federated import federated_train
from mirrordp.mechanism import Mechanism
from mirrordp.noise import GaussianNoise
from mirrordp.sampling import FullBatch, PoissonSampling
from mirrordp.sweeps import Run, train_sweep
from mirrordp.training import TrainStep, train
from mirrordp.types import Batch, Params, PyTree
from mirrordp.updates import mirror_descent


def one_run_epsilon(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    delta: float,
    significance: float,
    num_guesses: int | None = None,
) -> float:
    """A lower bound on ε from one run in which each canary took part with probability one half.

    The `num_guesses` canaries of the highest score are guessed to have taken part. How many are
    guessed is fixed beforehand, so no correction for the choice of a threshold is needed.

    Args:
        scores: one per canary, a function of what the run released alone; higher means "took part".
        included: which canaries took part, drawn independently with probability one half.
        delta: δ of the claim.
        significance: the probability with which the bound may be above the true ε.
        num_guesses: by default a third of the canaries.
    """
    scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
    if scores.shape != included.shape or scores.ndim != 1:
        raise ValueError(
            f"scores and included must have one entry per canary, got shapes {scores.shape} and "
            f"{included.shape}."
        )
    guesses = len(scores) // 3 if num_guesses is None else num_guesses
    _validate.positive_integer(num_guesses=guesses)
    if included.all() or not included.any():
        return 0.0
    # Ties are broken by position, which knows nothing of who took part.
    ranked = np.empty(len(scores))
    ranked[np.argsort(scores, kind="stable")] = np.arange(len(scores))
    auditor = statistics.CanaryScoreAuditor(ranked[included], ranked[~included])
    return float(
        auditor.epsilon_one_run(
            significance,
            delta,
            threshold_strategy=statistics.Explicit(len(scores) - guesses),
        )
    )


def paired_epsilon(
    with_canary: np.ndarray,
    without: np.ndarray,
    *,
    threshold: float,
    delta: float,
    significance: float,
) -> float:
    """A lower bound on ε from scores of independent runs with and without one canary.

    Args:
        with_canary: scores of the runs in which it took part.
        without: scores of the others.
        threshold: a run scoring at least this is guessed to be one with the canary; fixed
            beforehand.
        delta: δ of the claim.
        significance: the probability with which the bound may be above the true ε.
    """
    auditor = statistics.CanaryScoreAuditor(with_canary, without)
    return float(
        auditor.epsilon_clopper_pearson(
            significance,
            delta,
            one_sided=False,
            threshold_strategy=statistics.Explicit(threshold),
        )
    )


def gaussian_mu(
    with_canary: np.ndarray, without: np.ndarray, *, threshold: float, significance: float
) -> float:
    """A lower bound on the μ of Gaussian differential privacy from independent scores.

    A μ-private mechanism allows no test whose rates of false alarms and of misses, a and b, satisfy
    Φ⁻¹(1 − a) − Φ⁻¹(b) > μ. Both rates are replaced by Clopper-Pearson upper bounds, each at half
    of `significance`. Arguments as in `paired_epsilon`.
    """
    alarms = _rate_at_most(int(np.sum(without >= threshold)), len(without), significance / 2)
    misses = _rate_at_most(int(np.sum(with_canary < threshold)), len(with_canary), significance / 2)
    return max(0.0, float(stats.norm.isf(alarms) - stats.norm.ppf(misses)))


def _rate_at_most(count: int, trials: int, significance: float) -> float:
    if count == trials:
        return 1.0
    return float(stats.beta.ppf(1 - significance, count + 1, trials - count))


class Algorithm(enum.Enum):
    """What can be audited."""

    DP_SGD = "dp-sgd"
    FIRST_ORDER = "pda-dpmd"
    EXACT = "exact-pda-dpmd"
    FEDERATED = "federated-pda-dpmd"


class Attack(enum.Enum):
    """How."""

    ONE_RUN = "one-run"
    PAIRED = "paired"
    GAUSSIAN = "gaussian"


@dataclasses.dataclass(frozen=True)
class Audit:
    """What one attack on one algorithm found.

    Attributes:
        algorithm: who was attacked.
        attack: how.
        measure: what is bounded: "epsilon" at `delta`, or "mu" of one step.
        reported: what is claimed.
        lower_bound: what was proved; the claim is refuted where this is larger.
        confidence: with which, after correction for the number of audits made together.
        delta: δ of the claim.
    """

    algorithm: Algorithm
    attack: Attack
    measure: str
    reported: float
    lower_bound: float
    confidence: float
    delta: float

    @property
    def refuted(self) -> bool:
        """Whether the claim was proved wrong."""
        return self.lower_bound > self.reported


def audit(
    mechanism: Mechanism,
    *,
    algorithms: Sequence[Algorithm] = tuple(Algorithm),
    attacks: Sequence[Attack] = tuple(Attack),
    delta: float = 1e-5,
    confidence: float = 0.95,
    num_runs: int = 200,
    seed: int | None = None,
) -> list[Audit]:
    """Attacks the library's algorithms, run with `mechanism`; all bounds hold together.

    Canary i pulls on coordinate i, harder than the clip norm allows, at every step that draws it,
    and the attacker sees the parameters. With probability at least `confidence` no lower bound is
    above what is true (each audit has its share of the error, Bonferroni).

    Args:
        mechanism: Poisson or full-batch sampling of a public number of rows; there are as many
            canaries as rows. The Gaussian attack uses its clip norm and noise with full batches.
        algorithms: which to attack.
        attacks: how.
        delta: δ of the claim.
        confidence: of all bounds together.
        num_runs: runs with, and as many without, the canary of the paired attack.
        seed: makes the audit repeatable.
    """
    _validate.instance_of(Mechanism, mechanism=mechanism)
    _validate.instance_of((PoissonSampling, FullBatch), sampling=mechanism.sampling)
    _validate.positive(noise_multiplier=mechanism.noise_multiplier)
    _validate.instance_of(
        GaussianNoise, "Audit it with GaussianNoise(), which has a seed.", noise=mechanism.noise
    )
    _validate.open_unit_interval(delta=delta, confidence=confidence)
    _validate.positive_integer(num_runs=num_runs)
    if mechanism.sampling.num_examples is None or mechanism.adjacency is not Adjacency.ZERO_OUT:
        raise ValueError(
            "an audit needs a public number of rows and adjacency='zero-out': canaries that take "
            "no part are rows of zeros. Use PoissonSampling.for_batch_size(...)."
        )
    made = [
        (algorithm, attack)
        for algorithm in algorithms
        for attack in attacks
        if (algorithm, attack) != (Algorithm.FEDERATED, Attack.PAIRED)
    ]
    if not made:
        raise ValueError(
            "expected an attack on an algorithm, got none: the federated algorithm has no paired "
            "attack (its runs are not made side by side). Use Attack.ONE_RUN or Attack.GAUSSIAN."
        )
    # The statistics take less than one half; to err less often than is allowed is no error.
    significance = min((1 - confidence) / len(made), 0.49)
    rng = np.random.default_rng(seed)
    epsilon = None
    found = []
    for algorithm, attack in made:
        if attack is Attack.GAUSSIAN:
            measure, reported = "mu", 1 / mechanism.noise_multiplier
            bound = _gaussian(mechanism, algorithm, significance, rng)
        else:
            if epsilon is None:
                epsilon = mechanism.epsilon(delta)
            measure, reported = "epsilon", epsilon
            if attack is Attack.ONE_RUN:
                bound = _one_run(mechanism, algorithm, delta, significance, rng)
            else:
                bound = _paired(mechanism, algorithm, delta, significance, num_runs, rng)
        found.append(Audit(algorithm, attack, measure, reported, bound, 1 - significance, delta))
    return found


# Canaries are longer than the clip norm, so that they show where clipping is left out.
_LENGTH = 100.0


def _pull(params, example):
    """−⟨θ, x⟩: a record pulls in its own direction, wherever θ is."""
    return -jnp.dot(params, example)


def _public_pull(params, example):
    """½‖θ − z‖², for the public gradient."""
    return 0.5 * jnp.sum((params - example) ** 2)


@functools.cache
def _setting(algorithm: Algorithm, dims: int) -> tuple[dict[str, Any], np.ndarray]:
    """Options for `train`, and the matrix that turns parameters into scores.

    Public data is known to the attacker, who subtracts its effect; it is made to have none: public
    rows come in opposite pairs, and the mirror map has its centre at the start.
    """
    rng = np.random.default_rng(1)
    if algorithm is Algorithm.EXACT:
        basis = np.linalg.qr(rng.normal(size=(dims, dims)))[0]
        hessian = basis * np.linspace(1, 4, dims) @ basis.T
        mirror_map = mirror.QuadraticMap.from_hessian(hessian, np.zeros(dims))
        return {"optimizer": mirror_descent(mirror_map, 0.1)}, hessian
    options: dict[str, Any] = {"optimizer": optax.sgd(0.1)}
    if algorithm in (Algorithm.FIRST_ORDER, Algorithm.FEDERATED):
        half = rng.normal(size=(2, dims)).astype(np.float32)
        options |= {
            "public": PublicData(np.concatenate([half, -half])),
            "public_loss_fn": _public_pull,
            "alpha": 0.5,
        }
    return options, np.eye(dims)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**62))


def _trained(
    algorithm: Algorithm, rows: np.ndarray, mechanism: Mechanism, seed: int, options: dict[str, Any]
) -> Any:
    """The last state of a run from zero in which every row is a record, or a user."""
    start = jnp.zeros(rows.shape[1])
    if algorithm is Algorithm.FEDERATED:
        steps = federated_train(
            _pull,
            start,
            # A user's update after one local step at rate 1 is its row.
            PrivateClients.from_users(list(rows[:, None]), max_examples_per_user=1),
            mechanism=dataclasses.replace(mechanism, unit="user"),
            client_learning_rate=1.0,
            client_batch_size=1,
            seed=seed,
            **options,
        )
    else:
        steps = train(_pull, start, PrivateData(rows), mechanism=mechanism, seed=seed, **options)
    *_, (state, _) = steps
    return state


def _canaries(mechanism: Mechanism, included: np.ndarray) -> np.ndarray:
    """Canary i pulls on coordinate i, or is a row of zeros."""
    return _LENGTH * mechanism.l2_clip_norm * np.diag(included).astype(np.float32)


def _one_run(mechanism, algorithm, delta, significance, rng) -> float:
    canaries = mechanism.sampling.num_examples
    included = rng.random(canaries) < 0.5
    rows = _canaries(mechanism, included)
    options, to_scores = _setting(algorithm, canaries)
    state = _trained(algorithm, rows, mechanism, _seed(rng), options)
    scores = to_scores @ np.asarray(state.params, np.float64)
    return one_run_epsilon(scores, included, delta=delta, significance=significance)


def _paired(mechanism, algorithm, delta, significance, num_runs, rng) -> float:
    rows = mechanism.sampling.num_examples
    options, to_scores = _setting(algorithm, 2)
    alpha = options.get("alpha", 1.0)
    scores = []
    for present in (True, False):
        private = np.zeros((rows, 2), np.float32)
        private[0, 0] = _LENGTH * mechanism.l2_clip_norm * present
        *_, (states, _) = train_sweep(
            _pull,
            jnp.zeros(2),
            PrivateData(private),
            runs=[Run(alpha=alpha, seed=_seed(rng)) for _ in range(num_runs)],
            mechanism=mechanism,
            **{name: value for name, value in options.items() if name != "alpha"},
        )
        scores.append((np.asarray(states.params, np.float64) @ to_scores.T)[:, 0])
    return paired_epsilon(
        scores[0],
        scores[1],
        threshold=_signal(mechanism, algorithm) / 2,
        delta=delta,
        significance=significance,
    )


def _signal(mechanism: Mechanism, algorithm: Algorithm) -> float:
    """The score of a canary that takes part as often as expected, without noise."""
    sampling = mechanism.sampling
    once = 0.1 * mechanism.l2_clip_norm * sampling.sampling_prob / sampling.expected_batch_size
    total = 0.0
    for _ in range(mechanism.num_steps):
        if algorithm is Algorithm.FIRST_ORDER:
            total += 0.5 * once - 0.1 * 0.5 * total
        else:
            total += once
    return total


def _gaussian(mechanism, algorithm, significance, rng) -> float:
    """Half of 400 full-batch canaries take part; every step shows each through fresh noise."""
    canaries, steps = 400, 10
    full = dataclasses.replace(
        mechanism, sampling=FullBatch.of(canaries), num_steps=steps, accountant=None, orders=None
    )
    included = np.arange(canaries) % 2 == 0
    options, _ = _setting(algorithm, canaries)
    # Where θ stands still the public gradient is zero.
    still = options["optimizer"] if algorithm is Algorithm.EXACT else optax.sgd(0.0)
    recorded: dict[str, Any] = options | {"optimizer": _recording(still, steps)}
    rows = _canaries(mechanism, included)
    state = _trained(algorithm, rows, full, _seed(rng), recorded)
    seen = -np.asarray(state.opt_state[1]) * canaries / options.get("alpha", 1.0)
    return gaussian_mu(
        seen[:, included].ravel(),
        seen[:, ~included].ravel(),
        threshold=mechanism.l2_clip_norm / 2,
        significance=significance,
    )


def _recording(
    optimizer: optax.GradientTransformation, num_steps: int
) -> optax.GradientTransformation:
    """The same optimiser, keeping the gradient of each step: state (inner, gradients, count)."""

    def init(params):
        kept = jax.tree.map(lambda leaf: jnp.zeros((num_steps, *leaf.shape), leaf.dtype), params)
        return optimizer.init(params), kept, jnp.zeros([], jnp.int32)

    def update(updates, state, params=None):
        inner, kept, count = state
        kept = jax.tree.map(lambda all_, one: all_.at[count].set(one), kept, updates)
        updates, inner = optimizer.update(updates, inner, params)
        return updates, (inner, kept, count + 1)

    return optax.GradientTransformation(init, update)


def repeated_noise(
    released: np.ndarray, stddev: float, *, significance: float = 1e-6
) -> list[tuple[int, int]]:
    """Pairs of steps whose noise cannot have been independent.

    The difference of two releases is a difference of sums plus N(0, 2·stddev² I). Its squared norm
    over 2·stddev² is χ² with as many degrees as coordinates, or larger: a value far *below* shows
    that noise was used twice, whatever the sums were.

    Args:
        released: noisy sums, [steps, coordinates].
        stddev: of the noise on each coordinate.
        significance: the probability of a false alarm, over all pairs together.
    """
    _validate.positive(stddev=stddev)
    steps, coordinates = released.shape
    limit = stats.chi2.ppf(significance / max(1, math.comb(steps, 2)), coordinates)
    found = []
    for first in range(steps - 1):
        gaps = np.sum((released[first + 1 :] - released[first]) ** 2, axis=1) / (2 * stddev**2)
        found += [(first, first + 1 + int(later)) for later in np.flatnonzero(gaps < limit)]
    return found


@dataclasses.dataclass(frozen=True)
class Replay:
    """The worst pair of neighbours that a search found.

    Attributes:
        largest: the largest distance between the two sums, before noise.
        allowed: the distance that the accountant assumes: C, or 2C for replace.
        description: how the worst pair came about.
        num_pairs: how many were tried.
    """

    largest: float
    allowed: float
    description: str
    num_pairs: int

    def exceeded(self, tolerance: float = 1e-3) -> bool:
        """Whether the sensitivity is more than is charged, beyond a relative rounding error."""
        return not self.largest <= (1 + tolerance) * self.allowed


def neighbour_replay(
    train_step: TrainStep,
    params: Params,
    rows: Batch,
    *,
    public: Batch | None = None,
    alpha: float = 1.0,
    num_pairs: int = 200,
    seed: int = 0,
) -> Replay:
    """Searches neighbouring data sets for the largest difference of what is released.

    Both data sets go through the whole step with the same batch, the same noise and the same keys,
    so what differs between the released gradients, times the divisor B over α, is the difference
    of the clipped sums: it must stay below C (2C for replace), whatever the rows are. For your own
    loss function:

        step = TrainStep(loss_fn=my_loss, mechanism=mechanism, optimizer=optax.sgd(0.1))
        assert not neighbour_replay(step, my_params, my_rows).exceeded()

    The search begins with rows from `rows` and hostile ones (NaN, infinities, huge, tiny and zero
    values, the extremes of integers, duplicates), in batches drawn by the mechanism, alone, and in
    crowds; then it varies the worst pair found so far: scaled, negated, mixed with other rows.

    Args:
        train_step: the step; its optimiser is replaced by one that keeps the gradient.
        params: where to look.
        rows: arrays with at least two rows, as the mechanism would sample from.
        public: public rows, where α < 1.
        alpha: the weight of the private gradient.
        num_pairs: how many pairs of neighbours to try.
        seed: of the search.
    """
    _validate.instance_of(TrainStep, train_step=train_step)
    _validate.positive_integer(num_pairs=num_pairs)
    _validate.probability("A step at α = 0 releases nothing.", alpha=alpha)
    mechanism = train_step.mechanism
    if not isinstance(mechanism.noise, GaussianNoise):
        mechanism = dataclasses.replace(mechanism, noise=GaussianNoise())
    step = dataclasses.replace(
        train_step, mechanism=mechanism, optimizer=_LAST_GRADIENT, average=None
    )
    rows = jax.tree.map(np.asarray, rows)
    count = len(jax.tree.leaves(rows)[0])
    if count < 2:
        raise ValueError(f"a replay needs at least two rows, got {count}.")
    rng = np.random.default_rng(seed)
    state = step.init(jax.tree.map(jnp.asarray, params), jax.random.key(seed))
    takes_key = step.clipped_grad.takes_key
    keys = jax.random.split(jax.random.key(seed + 1), count) if takes_key else None
    arguments = {} if public is None else {"public": public, "alpha": alpha}

    @jax.jit
    def released(data, index, is_padding):
        batch = jax.tree.map(lambda leaf: leaf[index], data)
        batch_keys = None if keys is None else keys[index]
        after, _ = step(state, batch, is_padding, keys=batch_keys, **arguments)
        return after.opt_state

    worst, description, best, tried = 0.0, "none", None, 0
    while tried < num_pairs and worst < math.inf:
        victim, other, what = _propose(rows, count, rng, best)
        drawn = _company(mechanism, count, rng, tried)
        place = rng.choice(drawn)
        tried += 1
        data = _with_row(rows, place, victim)
        index, is_padding = _padded(drawn, count)
        # A row that does not count may hold anything: what it holds must not reach the others.
        neighbour, hidden = _with_row(rows, place, other), is_padding | (index == place)
        if mechanism.adjacency is Adjacency.REPLACE:
            hidden = is_padding
        one = released(data, index, is_padding)
        two = released(neighbour, index, hidden)
        distance = _distance(one, two) * mechanism.sampling.expected_batch_size / alpha
        if not distance <= worst:
            worst = math.inf if math.isnan(distance) else distance
            description = f"{what}; {len(set(drawn))} of {count} rows in the batch"
            best = (victim, other, what)
    allowed = mechanism.adjacency.distance * mechanism.l2_clip_norm
    return Replay(worst, allowed, description, tried)


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
    """A batch of at least one row: as drawn by the mechanism, of one row, or of all."""
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
    *("nan", "one nan", "inf", "-inf", "huge", "-huge", "tiny", "zero", "duplicate", "as it is"),
)


def _hostile(kind: str, row: PyTree, other: PyTree) -> PyTree:
    """A row made to break things. Integers take their extremes where floats take infinities."""
    if kind in ("duplicate", "as it is"):
        return other if kind == "duplicate" else row

    def make(leaf):
        leaf = np.array(leaf)
        if np.issubdtype(leaf.dtype, np.floating):
            limits = np.finfo(leaf.dtype)
            value = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": limits.max,
                     "-huge": -limits.max, "tiny": limits.tiny, "zero": 0}  # fmt: skip
            if kind == "one nan":
                leaf.ravel()[:1] = np.nan
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
    """Two versions of a row and how they came about: hostile ones, or variations of the best."""

    def pick():
        place = rng.integers(count)
        return jax.tree.map(lambda leaf: leaf[place], rows)

    if best is None or rng.random() < 0.5:
        first, second = rng.choice(_HOSTILE, 2)
        return (
            _hostile(first, pick(), pick()),
            _hostile(second, pick(), pick()),
            f"{first} and, where it is replaced, {second}",
        )
    victim, other, what = best
    share = rng.choice([0.0, 0.0, 0.3])
    varied = _combined(victim, pick(), rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(-3, 3), share)
    if rng.random() < 0.5:
        other = _combined(varied, varied, -1.0, 0.0)
    return varied, other, f"a variation of: {what.removeprefix('a variation of: ')}"


def _combined(row: PyTree, other: PyTree, factor: float, share: float) -> PyTree:
    """factor · ((1 − share) · row + share · other) where there are floats, else the row."""

    def one(leaf, other_leaf):
        leaf = np.asarray(leaf)
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        with np.errstate(over="ignore", invalid="ignore"):
            mixed = leaf if share == 0 else (1 - share) * leaf + share * other_leaf
            return np.asarray(factor * mixed, leaf.dtype)

    return jax.tree.map(one, row, other)
