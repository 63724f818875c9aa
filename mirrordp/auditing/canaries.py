"""Runs that are made to be attacked: canaries and an algorithm in, what the attacker sees out.

A canary is a record, or a user of one row, whose gradient points in a direction of its own wherever
the parameters are. It is longer than the clip norm, so that it shows if clipping is left out.
"""

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import mirror
from mirrordp.data import PrivateClients, PrivateData, PublicData
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.training.central import TrainStep
from mirrordp.training.engine import SweepRun, train
from mirrordp.training.federated import FederatedStep
from mirrordp.training.sweep import train_sweep
from mirrordp.types import Params
from mirrordp.updates import mirror_descent

# The length of a canary, in clip norms.
LENGTH = 100.0

_RATE = 0.1
_STILL = optax.sgd(0.0)


class Algorithm(enum.Enum):
    """The algorithms that can be audited."""

    DP_SGD = "dp-sgd"
    FIRST_ORDER = "pda-dpmd"
    EXACT = "exact-pda-dpmd"
    FEDERATED = "federated-pda-dpmd"


def one_per_coordinate(mechanism: Mechanism, included: np.ndarray) -> np.ndarray:
    """Returns a row per canary: canary i pulls on coordinate i, or is zero if not included."""
    return LENGTH * mechanism.l2_clip_norm * np.diag(included).astype(np.float32)


@functools.lru_cache(maxsize=4)
def directions(dims: int) -> np.ndarray:
    """Returns orthogonal unit vectors as rows, each with something in every coordinate."""
    return np.linalg.qr(np.random.default_rng(1).normal(size=(dims, dims)))[0]


def scores(
    mechanism: Mechanism, algorithm: Algorithm, rows: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Trains once; returns how far the parameters moved along each coordinate, one per canary."""
    options, to_scores = _setting(algorithm, rows.shape[1])
    state = _trained(algorithm, rows, mechanism, _seed(rng), options)
    return to_scores @ np.asarray(_joined(state.params), np.float64)


def paired_scores(
    mechanism: Mechanism,
    algorithm: Algorithm,
    num_examples: int,
    num_runs: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Trains `num_runs` times with one canary and as often without it; returns both scores."""
    options, to_scores = _setting(algorithm, 2)
    alpha, public = options.pop("alpha", 1.0), options.pop("public", None)
    step = TrainStep(_pull, mechanism, **options)
    found = []
    for present in (True, False):
        private = np.zeros((num_examples, 2), np.float32)
        private[0, 0] = LENGTH * mechanism.l2_clip_norm * present
        *_, (states, _) = train_sweep(
            step,
            _start(2),
            PrivateData(private),
            public,
            runs=[SweepRun(alpha=alpha, seed=_seed(rng)) for _ in range(num_runs)],
        )
        found.append((np.asarray(_joined(states.params), np.float64) @ to_scores.T)[:, 0])
    return found


def noisy_sums(
    mechanism: Mechanism, algorithm: Algorithm, rows: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Trains once; returns the noisy sum that each step released, [steps, coordinates]."""
    options, _ = _setting(algorithm, rows.shape[1])
    # Parameters that stand still have a public gradient of zero.
    still = options["optimizer"] if algorithm is Algorithm.EXACT else _STILL
    recorded = options | {"optimizer": _recording(still, mechanism.num_steps)}
    state = _trained(algorithm, rows, mechanism, _seed(rng), recorded)
    kept = np.asarray(_joined(state.opt_state[1]), np.float64)
    return -kept * mechanism.sampling.expected_batch_size / options.get("alpha", 1.0)


def weights(mechanism: Mechanism, algorithm: Algorithm) -> np.ndarray:
    """Returns the weight of each step's noisy sum in the score at the end."""
    alpha = 0.5 if algorithm in (Algorithm.FIRST_ORDER, Algorithm.FEDERATED) else 1.0
    kept = (1 - _RATE * (1 - alpha)) ** np.arange(mechanism.num_steps)[::-1]
    return _RATE * alpha * kept / mechanism.sampling.expected_batch_size


def _start(dims: int) -> Params:
    """Returns zeros in two leaves, so that noise that misses a leaf, or is shared, shows."""
    return {"first": jnp.zeros(dims // 2), "second": jnp.zeros(dims - dims // 2)}


def _joined(params: Params) -> Any:
    return jnp.concatenate([params["first"], params["second"]], axis=-1)


def _pull(params, example):
    """Computes −⟨θ, x⟩: a record pulls in its own direction, wherever θ is."""
    return -jnp.dot(_joined(params), example)


def _public_pull(params, example):
    """Computes ½‖θ − z‖², for the public gradient."""
    return 0.5 * jnp.sum((_joined(params) - example) ** 2)


@functools.cache
def _setting(algorithm: Algorithm, dims: int) -> tuple[dict[str, Any], np.ndarray]:
    """Returns options for `train`, and the matrix that turns parameters into scores.

    Public data is known to the attacker, who subtracts its effect. It is made to have none: public
    rows come in opposite pairs, and the mirror map has its centre at the start.
    """
    rng = np.random.default_rng(1)
    if algorithm is Algorithm.EXACT:
        hessian = directions(dims).T * np.linspace(1, 4, dims) @ directions(dims)
        mirror_map = mirror.QuadraticMap.from_hessian(hessian, np.zeros(dims))
        return {"optimizer": mirror_descent(mirror_map, _RATE)}, hessian
    options: dict[str, Any] = {"optimizer": optax.sgd(_RATE)}
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
    """Returns the last state of a run from zero in which every row is a record, or a user."""
    options = dict(options)
    public, alpha = options.pop("public", None), options.pop("alpha", 1.0)
    if algorithm is Algorithm.FEDERATED:
        # A user's update after one local step at rate 1 is its row.
        private = PrivateClients.from_users(list(rows[:, None]), max_examples_per_user=1)
        users = dataclasses.replace(mechanism, unit="user")
        step = FederatedStep(_pull, users, client_learning_rate=1.0, client_batch_size=1, **options)
    else:
        private, step = PrivateData(rows), TrainStep(_pull, mechanism, **options)
    *_, (state, _) = train(step, _start(rows.shape[1]), private, public, alpha=alpha, seed=seed)
    return state


@functools.lru_cache(maxsize=8)
def _recording(
    optimizer: optax.GradientTransformation, num_steps: int
) -> optax.GradientTransformation:
    """Wraps an optimiser so that its state, (inner, gradients, count), keeps all gradients."""

    def init(params):
        kept = jax.tree.map(lambda leaf: jnp.zeros((num_steps, *leaf.shape), leaf.dtype), params)
        return optimizer.init(params), kept, jnp.zeros([], jnp.int32)

    def update(updates, state, params=None):
        inner, kept, count = state
        kept = jax.tree.map(lambda all_, one: all_.at[count].set(one), kept, updates)
        updates, inner = optimizer.update(updates, inner, params)
        return updates, (inner, kept, count + 1)

    return optax.GradientTransformation(init, update)
