"""Private training on users: federated averaging with noise, and public users on the server's side.

One step of the paper's federated form. A user, with all of its rows, is one record:

    Δ_k = θ − (θ after local SGD over user k's rows)       user by user
    s   = Σ_{k ∈ cohort} clip(Δ_k, C)                      equal weights: row counts play no role
    g   = (s + noise) / expected cohort                    the release; the rest is post-processing
    u   = α_t g + (1 − α_t) g_pub                          g_pub: the same from public users
    θ  ← θ + server_optimizer(u)

With α = 1 this is DP-FedAvg: cold, or warm if θ comes from `warm_start_clients`.

Compiled code sees *passes* of a few users each. The users of a step are sorted by how many local
batches they have, so that a pass runs no longer than its largest user; the number of batches is a
number and not a shape, so nothing is compiled twice. `examples/federated_by_hand.py` is the same
algorithm in plain loops.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _validate
from mirrordp.data import (
    ClientData,
    Gather,
    Overlap,
    PrivateClients,
    PublicClients,
    PublicData,
    excluded_users,
    read_rows,
    refuse_shared_users,
    require_private_clients,
)
from mirrordp.data.sources import on_disk
from mirrordp.privacy import _isolation, accounting
from mirrordp.privacy._convolutions import apart, where_faster
from mirrordp.privacy.clipping import (
    clip_factors,
    example_key,
    example_of,
    scaled,
    squared_norm,
    takes_key,
    value_and_grad_program,
    with_key,
)
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PADDING
from mirrordp.privacy.sums import ExactSum
from mirrordp.privacy.trainable import Trainable
from mirrordp.training.step import (
    PrivateSum,
    PublicGradient,
    StepInfo,
    Unprivatized,
    check_loss,
    check_options,
    record_keys,
    updated,
    warn_of_unused,
)
from mirrordp.types import Array, Batch, LossFn, Params, PyTree
from mirrordp.updates.averages import Average
from mirrordp.updates.public import WarmStart, public_grad, warm_start

# A clipped delta is multiplied a few times in float32 before it is summed. Clipping to slightly
# less than C keeps the bound true rather than nearly true.
_ROUNDING = 2.0**-14


def local_order(key: jax.Array, num_rows: int, num_examples: jax.typing.ArrayLike) -> jax.Array:
    """A random order of the first `num_examples` of `num_rows` rows; the padding comes last."""
    places = jax.random.uniform(key, (num_rows,))
    return jnp.argsort(jnp.where(jnp.arange(num_rows) < num_examples, places, 2.0))


def local_update(
    loss_fn: LossFn,
    params: Params,
    examples: Batch,
    num_examples: jax.typing.ArrayLike,
    key: jax.Array,
    *,
    learning_rate: jax.typing.ArrayLike,
    batch_size: int = 16,
    epochs: int = 1,
    num_batches: jax.typing.ArrayLike | None = None,
    trainable: PyTree | Trainable | None = None,
) -> tuple[PyTree, jax.Array]:
    """What one user computes: Δ = θ − θ_local after epochs of SGD over its own rows.

        θ_local ← θ_local − η ∇ mean_{d ∈ batch} ℓ(θ_local; d),     batch after batch, shuffled

    The last batch of an epoch may be smaller; a user without rows returns zeros.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        params: θ, the server's model.
        examples: the user's rows, padded to any common number.
        num_examples: how many of them are real.
        key: shuffles the rows, and feeds the loss function if it takes a key.
        learning_rate: η.
        batch_size: rows of a local batch.
        epochs: how often each row is used.
        num_batches: an upper bound on the batches of an epoch; by default what all rows need. A
            smaller bound saves time where users are padded alike, and must cover `num_examples`.
        trainable: as in `mirrordp.clipped_grad`; the other leaves of Δ are None.

    Returns:
        Δ, which points where a gradient points, and the mean loss of the first epoch's batches.
    """
    keyed, loss_fn = takes_key(loss_fn), where_faster(loss_fn, side_by_side=True)
    keyed_loss = with_key(loss_fn)
    examples = jax.tree.map(jnp.asarray, examples)
    num_rows = jax.tree.leaves(examples)[0].shape[0]
    num_examples = jnp.asarray(num_examples)
    limit = -(-num_rows // batch_size) if num_batches is None else num_batches
    trainable = Trainable.of(trainable)
    start = trainable.part(params)

    # Of all rows: a kernel that each row has of its own is one convolution of groups here.
    @apart
    def mean_loss(local, batch, is_real, keys):
        losses = jax.vmap(keyed_loss, (None, 0, 0))(trainable.merge(local, params), batch, keys)
        return jnp.sum(jnp.where(is_real, losses, 0)) / jnp.maximum(jnp.sum(is_real), 1)

    def epoch(carry, epoch_key):
        order_key, loss_key = jax.random.split(epoch_key)
        order = local_order(order_key, num_rows, num_examples)

        def step(number, carry):
            local, loss_sum = carry
            places = number * batch_size + jnp.arange(batch_size)
            is_real = places < num_examples
            # Padding repeats a row of the same user: no other user's NaN can enter.
            rows = order[jnp.clip(places, 0, jnp.maximum(num_examples - 1, 0))]
            batch = jax.tree.map(lambda leaf: leaf[rows], examples)
            keys = jnp.zeros(batch_size)
            if keyed:
                keys = jax.random.split(jax.random.fold_in(loss_key, number), batch_size)
            loss, grad = jax.value_and_grad(mean_loss)(local, batch, is_real, keys)
            is_active = is_real[0]
            local = jax.tree.map(
                lambda p, g: p - jnp.where(is_active, learning_rate * g, 0).astype(p.dtype),
                local,
                grad,
            )
            return local, loss_sum + jnp.where(is_active, loss, 0).astype(jnp.float32)

        local, loss_sum = jax.lax.fori_loop(0, limit, step, (carry, jnp.zeros([])))
        return local, loss_sum

    local, loss_sums = jax.lax.scan(epoch, start, jax.random.split(key, epochs))
    own_batches = jnp.maximum(-(-num_examples // batch_size), 1)
    delta = jax.tree.map(lambda old, new: old - new, start, local)
    return delta, loss_sums[0] / own_batches


class ClippedDelta(NamedTuple):
    """A user's clipped delta and two facts about it, which are not private."""

    delta: PyTree
    unprivatized_norm: jax.Array
    unprivatized_is_finite: jax.Array


def clip_delta(delta: PyTree, l2_clip_norm: jax.typing.ArrayLike) -> ClippedDelta:
    """Δ · min(1, C / ‖Δ‖), and zero where Δ holds a NaN or an infinity.

    Formal guarantee: the norm of the result, computed exactly from its float32 entries, is at most
    C for every input; therefore what is clipped ends slightly (2⁻¹⁴) below C.

    >>> float(optax.tree.norm(clip_delta({"w": jnp.array([3.0, 4.0])}, 1.0).delta)) <= 1
    True

    Args:
        delta: one user's delta.
        l2_clip_norm: C; may be traced.
    """
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], delta)
    leaves = jax.tree.leaves(rows)
    # In float64: a running sum of millions of squares in float32 stops growing at some point.
    factors, norms = clip_factors(
        [squared_norm(leaf) for leaf in leaves],
        jnp.zeros(1, bool),
        l2_clip_norm,
        jnp.result_type(jnp.float32, *leaves),
        reserve=_ROUNDING,
    )
    clipped = jax.tree.map(lambda leaf: scaled(leaf, factors)[0], rows)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
    return ClippedDelta(clipped, norms[0], finite)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A clip norm that follows a quantile of the users' norms (Andrew et al. 2021).

    Besides its clipped delta, each user contributes whether its norm was at most C_t, and the noisy
    share b of those moves the clip norm: C_{t+1} = C_t · exp(−η (b − γ)).

    Both go through *one* Gaussian of the mechanism's noise multiplier z, so that the stated ε holds
    unchanged: a user contributes (√(1−ρ) Δ/C_t, √ρ · (±1)), a vector of norm at most one. In that
    paper's words the count has noise σ_b = z / (2√ρ) and the deltas z_Δ = z / √(1−ρ), which is its
    z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2).

    Args:
        quantile: γ, the share of users that shall stay unclipped.
        learning_rate: η.
        budget_share: ρ, the share of z⁻² that the count takes.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    budget_share: float = 0.01

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.open_unit_interval(quantile=self.quantile, budget_share=self.budget_share)
        _validate.positive(learning_rate=self.learning_rate)

    def next_clip_norm(
        self, clip_norm: jax.Array, share_below: jax.Array, start: float
    ) -> jax.Array:
        """C_{t+1} from the released share, never a million times away from where it began."""
        moved = clip_norm * jnp.exp(-self.learning_rate * (share_below - self.quantile))
        return jnp.clip(moved, 1e-6 * start, 1e6 * start)


class Contribution(NamedTuple):
    """What users add to a round: as a tree, of norm at most C for one user.

    Attributes:
        delta: the clipped delta.
        below_clip: with `AdaptiveClip`, ± whether the norm was at most C_t; else None.
    """

    delta: PyTree
    below_clip: jax.Array | None


class FederatedState(NamedTuple):
    """What the next step needs. Anyone who holds `noise_state` can subtract the noise.

    `clip_norm` and `client_learning_rate` are numbers here and not constants of the program, so
    that runs which differ in them share one compilation (`state._replace(clip_norm=...)`): a user's
    part is scaled to the mechanism's norm before the noise and back after it.
    """

    step: jax.Array
    params: Params
    opt_state: PyTree
    noise_state: PyTree
    clip_norm: jax.Array
    client_learning_rate: jax.Array
    average: Params | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "starts", "num_examples"],
    meta_fields=["width"],
)
@dataclasses.dataclass(frozen=True)
class ClientArrays:
    """Users as arrays for a device.

    Attributes:
        arrays: the rows of all users.
        starts: where each user's rows begin.
        num_examples: how many rows each user has.
        width: how many rows a user is padded to.
    """

    arrays: Batch
    starts: Array
    num_examples: Array
    width: int

    @classmethod
    def of(cls, clients: ClientData) -> "ClientArrays":
        """Returns the arrays of `clients`."""
        return cls(
            clients.arrays, clients.starts, clients.num_examples, clients.max_examples_per_user
        )

    def part(self, users: np.ndarray) -> "ClientArrays":
        """Returns some of the users, padded to the same width; on the host."""
        counts = self.num_examples[users]
        ends = np.cumsum(counts)
        # Row r of the result is row r − (its user's new start) of this user.
        shift = np.repeat(self.starts[users] - (ends - counts), counts)
        rows = shift + np.arange(len(shift))
        arrays = read_rows(self.arrays, rows)
        return ClientArrays(arrays, (ends - counts).astype(np.int32), counts, self.width)


class UserBatch(NamedTuple):
    """The rows of some users, padded alike, and how many of each user's rows are real."""

    examples: Batch
    num_examples: Any


def pad_users(users: ClientArrays, numbers: Any) -> UserBatch:
    """Returns the rows of some users as [..., width, ...]; PADDING owns no rows."""
    numpy = jnp if isinstance(numbers, jax.Array) else np
    safe = numpy.maximum(numbers, 0)
    counts = numpy.where(numbers == PADDING, 0, users.num_examples[safe])
    total = jax.tree.leaves(users.arrays)[0].shape[0]
    places = numpy.arange(users.width)
    rows = users.starts[safe][..., None] + places
    if numpy is np and on_disk(users.arrays):
        return UserBatch(_own_rows(users.arrays, rows, places < counts[..., None]), counts)
    rows = numpy.minimum(rows, total - 1)
    return UserBatch(jax.tree.map(lambda leaf: leaf[rows], users.arrays), counts)


def _own_rows(arrays: Batch, rows: Any, is_own: Any) -> Batch:
    """Returns rows that users own and zeros elsewhere: no local training looks at the others."""

    def filled(own: np.ndarray) -> np.ndarray:
        found = np.zeros((*rows.shape, *own.shape[1:]), own.dtype)
        found[is_own] = own
        return found

    return jax.tree.map(filled, read_rows(arrays, rows[is_own]))


def server_sgd(learning_rate: float = 1.0, momentum: float = 0.9) -> optax.GradientTransformation:
    """The usual server optimiser, one object per setting so that equal rounds compile once."""
    return _server_sgd(float(learning_rate), float(momentum))


@functools.cache
def _server_sgd(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=momentum or None)


@dataclasses.dataclass(frozen=True)
class FederatedStep:
    """One step of federated training on users: a value, so that equal steps compile once.

    `mirrordp.train(step, params, private, public)` simulates with it. A server of real clients uses
    its parts: `init`; for each reply `one_sum` of its `contribution(delta, state.clip_norm)`, added
    up from `zero_sum`; `finish` for the noise, the public gradient and the server's update.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, a function of *one* example; optionally with
            a third argument, a random key, for dropout.
        mechanism: decides sampling, clipping, noise and cost; made with `unit="user"`.
        optimizer: the server's optax transformation; by default `server_sgd()`, SGD with momentum.
            It receives the mixed pseudo-gradient, and the public one as the extra argument
            `public_grad`.
        client_learning_rate: η of the users' local SGD.
        client_batch_size: the number of rows in a local batch.
        local_epochs: how often a user goes over its rows in one step.
        public_loss_fn: ℓ_pub, if it differs from `loss_fn`.
        public_batch_size: the number of public users per step, or of rows where the public data is
            a plain table, drawn at random; None takes all of them.
        scale_noise: True for α(g + b), the paper; False for αg + b, the authors' federated code.
        adaptive_clip: lets the clip norm follow a quantile of the users' norms; it begins at
            `mechanism.l2_clip_norm`.
        average: `UniformAverage()` or `ExponentialAverage(decay)` of the iterates, or None.
        trainable: a tree of booleans over the parameters, or a prefix of one; the rest is frozen.
        users_per_pass: how many users are computed side by side; by default as many as memory
            allows.
        show_unprivatized: fills `info.unprivatized` with the users' loss, clip fraction and number,
            which are not covered by the guarantee.
    """

    loss_fn: LossFn
    mechanism: Mechanism
    optimizer: optax.GradientTransformation = None  # pyright: ignore[reportAssignmentType]
    _: dataclasses.KW_ONLY
    # Only `init` reads it, so steps that differ in it alone are one program.
    client_learning_rate: float = dataclasses.field(compare=False)
    client_batch_size: int = 16
    local_epochs: int = 1
    public_loss_fn: LossFn | None = None
    public_batch_size: int | None = None
    scale_noise: bool = True
    adaptive_clip: AdaptiveClip | None = None
    average: Average | None = None
    trainable: Any = None
    users_per_pass: int | None = None
    show_unprivatized: bool = False

    steps_per_call: ClassVar[int] = 10
    branches: ClassVar[bool] = True

    def __post_init__(self):
        _validate.make_plain(self)
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", server_sgd())
        object.__setattr__(self, "trainable", Trainable.of(self.trainable))
        check_options(self, "Use server_sgd(1.0).")
        if self.mechanism.unit != "user":
            raise ValueError(
                f"here one record is one user, got a mechanism of unit {self.mechanism.unit!r}. "
                'Make it with unit="user" and sample users.'
            )
        _validate.positive(client_learning_rate=self.client_learning_rate)
        _validate.positive_integer(
            client_batch_size=self.client_batch_size, local_epochs=self.local_epochs
        )
        for name in ("public_batch_size", "users_per_pass"):
            if getattr(self, name) is not None:
                _validate.positive_integer(**{name: getattr(self, name)})
        if self.adaptive_clip is not None:
            _validate.instance_of(AdaptiveClip, adaptive_clip=self.adaptive_clip)
            if self.mechanism.noise.num_bands > 1:
                raise accounting.UnsupportedError(
                    "correlated noise cancels between steps that share one clip norm, so it is "
                    "refused together with adaptive_clip. Use GaussianNoise(), or a fixed clip."
                )

    def check(
        self, params: Params, private: PrivateClients, public: PublicClients | PublicData | None
    ) -> None:
        """Raises for data of the wrong kind and for a loss that does not fit; reads no row.

        The local training is read as a program before it runs: one that could see other users is
        refused.
        """
        require_private_clients(private)
        check_loss("loss_fn", self.loss_fn, params, private.arrays)
        if public is not None:
            _validate.instance_of(
                (PublicClients, PublicData), "Wrap public users: PublicClients(...).", public=public
            )
        self.trainable.check(params)
        traced = value_and_grad_program(
            self.loss_fn, params, self.trainable, example_of(private.arrays), example_key()
        )
        warn_of_unused(traced, self.trainable.part(params))
        self.check_isolated(params, _padded_user(private), example_key())

    def fitted(
        self, params: Params, private: PrivateClients, *, gather: Gather | None = None
    ) -> Self:
        """Returns the step with `users_per_pass` decided: the smallest of all processes."""
        found = self.users_per_pass or default_users_per_pass(self, params, private)
        if gather is not None:
            found = min(gather(found))
        return dataclasses.replace(self, users_per_pass=found)

    def excluded(
        self,
        private: PrivateClients,
        public: PublicClients | PublicData | None,
        overlap: Overlap,
        *,
        gather: Gather | None = None,
    ) -> np.ndarray:
        """Returns which private users have the name of a public user and are left out.

        Raises:
            ValueError: if several processes have rows of one user.
        """
        if gather is not None:
            refuse_shared_users(private, gather)
        if not isinstance(public, PublicClients):
            return np.zeros(len(private), bool)
        return excluded_users(private, public, overlap)

    def records(self, data: PrivateClients | PublicClients | PublicData) -> ClientArrays | Batch:
        """Returns users, or the rows of a plain table, as a tree of arrays."""
        return ClientArrays.of(data) if isinstance(data, ClientData) else data.arrays

    @property
    def pass_size(self) -> int:
        """How many users one pass computes."""
        assert self.users_per_pass is not None, "call fitted() first"
        return self.users_per_pass

    def ordered(self, batch: np.ndarray, private: PrivateClients) -> np.ndarray:
        """Returns the users of a cohort, so that users of one pass have about equally many rows.

        None then waits for a much larger one. A product over all users of a pass may be rounded
        differently in each of its places, so no user's place may depend on the rows of another.
        Hence place j has every `pass_size`-th user as drawn, and these take turns by size.
        """
        size = self.pass_size
        turns = np.full((-(-len(batch) // size), size), PADDING, np.int32)
        turns.flat[: len(batch)] = batch
        counts = np.where(turns == PADDING, -1, np.asarray(private.num_examples)[turns])
        order = np.argsort(-counts, axis=0, kind="stable")
        cohort = np.take_along_axis(turns, order, axis=0).ravel()
        return cohort[: 1 + np.max(np.flatnonzero(cohort != PADDING), initial=-1)]

    def part(self, records: ClientArrays, numbers: np.ndarray) -> ClientArrays:
        """Returns the users of these numbers, on the host."""
        return records.part(numbers)

    def take(self, records: ClientArrays, numbers: Any) -> UserBatch:
        """Returns the rows of these users, on the host or on the device."""
        return pad_users(records, numbers)

    def init(self, params: Params, key: jax.Array) -> FederatedState:
        """Returns the state before the first step; `key` seeds the noise and must be secret."""
        self.trainable.check(params)
        return FederatedState(
            step=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=self.optimizer.init(self.trainable.part(params)),
            noise_state=self.mechanism.init_noise(key, self._zeros(params)),
            clip_norm=jnp.asarray(self.mechanism.l2_clip_norm, jnp.float32),
            client_learning_rate=jnp.asarray(self.client_learning_rate, jnp.float32),
            average=None if self.average is None else params,
        )

    def _zeros(self, params: Params) -> Contribution:
        count = None if self.adaptive_clip is None else jnp.zeros([])
        return Contribution(self.trainable.zero_sum(params), count)

    def zero_sum(self, state: FederatedState) -> PrivateSum:
        """Returns what `private_sum` gives for an empty cohort."""
        zeros = self._zeros(state.params)
        return PrivateSum(ExactSum.zero(zeros, self.mechanism.l2_clip_norm), Unprivatized.zero())

    def one_sum(self, contribution: Contribution) -> PrivateSum:
        """Returns the sum over one user; sums add up exactly, in any order."""
        return PrivateSum(
            ExactSum.of(contribution, self.mechanism.l2_clip_norm), Unprivatized.zero()
        )

    def local_updates(
        self, loss_fn: LossFn, state: FederatedState, batch: UserBatch, keys: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Returns `local_update` of several users at once."""
        update = functools.partial(
            local_update,
            loss_fn,
            learning_rate=state.client_learning_rate,
            batch_size=self.client_batch_size,
            epochs=self.local_epochs,
            num_batches=jnp.max(-(-batch.num_examples // self.client_batch_size)),
            trainable=self.trainable,
        )
        return jax.vmap(update, in_axes=(None, 0, 0, 0))(
            state.params, batch.examples, batch.num_examples, keys
        )

    def check_isolated(self, params: Params, examples: Batch, key: Any) -> None:
        """Raises if the local training of a user, mapped over users, could see other users.

        The rows of one user may see each other; see `mirrordp.clipped_grad` for what is refused.

        Args:
            params: the parameters, or their shapes.
            examples: shapes and types of one user's rows, padded.
            key: a user's key, or its shape.
        """
        update = functools.partial(
            local_update,
            self.loss_fn,
            learning_rate=self.client_learning_rate,
            batch_size=self.client_batch_size,
            epochs=self.local_epochs,
            trainable=self.trainable,
        )
        program = jax.make_jaxpr(update)(params, examples, 1, key)
        _isolation.check("the local training of a user", program)

    def contribution(
        self, delta: PyTree, clip_norm: jax.typing.ArrayLike
    ) -> tuple[Contribution, ClippedDelta]:
        """What one user adds to the round's sum: a tree of norm at most `mechanism.l2_clip_norm`.

        It depends on this user alone. A delta with a NaN or an infinity adds exactly zero.
        """
        # A quotient of 16 bits may be too large by more than is reserved for rounding.
        clip_norm = jnp.asarray(_validate.plain(clip_norm))
        clip_norm = clip_norm.astype(jnp.promote_types(jnp.float32, clip_norm.dtype))
        clipped = clip_delta(delta, clip_norm)
        weight, count_weight = self._budget

        def scale(leaf: jax.Array) -> jax.Array:
            found = leaf * jnp.asarray(weight / clip_norm, leaf.dtype)
            # For a tiny clip norm the quotient overflows.
            return jnp.where(jnp.isfinite(found), found, jnp.zeros_like(found))

        scaled = jax.tree.map(scale, clipped.delta)
        if self.adaptive_clip is None:
            return Contribution(scaled, None), clipped
        sign = jnp.where(clipped.unprivatized_norm <= clip_norm, 1.0, -1.0)
        sign = jnp.where(clipped.unprivatized_is_finite, sign, 0.0)
        return Contribution(scaled, count_weight * sign), clipped

    @property
    def _budget(self) -> tuple[float, float]:
        """Norms, together C, that a user's clipped delta and its count may have."""
        clip = self.mechanism.l2_clip_norm
        share = 0.0 if self.adaptive_clip is None else self.adaptive_clip.budget_share
        return clip * math.sqrt(1 - share), clip * math.sqrt(share) * (1 - _ROUNDING)

    def private_sum(
        self,
        state: FederatedState,
        batch: UserBatch,
        is_padding: jax.Array,
        keys: jax.Array | None,
    ) -> PrivateSum:
        """Returns the sum of the users' contributions over one pass of users."""
        assert keys is not None, "local training shuffles: pass one key per user"
        self.check_isolated(state.params, example_of(batch.examples), example_of(keys))
        deltas, losses = self.local_updates(self.loss_fn, state, batch, keys)

        def contribute(delta, is_padding):
            contribution, clipped = self.contribution(delta, state.clip_norm)
            contribution = jax.tree.map(
                lambda leaf: jnp.where(is_padding, jnp.zeros_like(leaf), leaf), contribution
            )
            return contribution, clipped.unprivatized_norm

        contributions, norms = jax.vmap(contribute)(deltas, is_padding)
        total = ExactSum.over(contributions, self.mechanism.l2_clip_norm)
        if not self.show_unprivatized:
            return PrivateSum(total, Unprivatized.zero())
        # A norm that is not a number was not below C either.
        shown = Unprivatized.sums(losses, ~(norms <= state.clip_norm), is_padding)
        return PrivateSum(total, shown)

    def public_grad(
        self, state: FederatedState, public: ClientArrays | Batch, key: jax.Array
    ) -> PublicGradient:
        """Returns g_pub and the public loss, from public users or from rows as plain arrays.

        Public users do what private users do: local SGD, the same clip, equal weights. Rows give
        the ordinary gradient of the mean loss.

        Args:
            state: the model and the clip norm.
            public: public users, or a tree of arrays.
            key: chooses and shuffles.
        """
        loss_fn = self.public_loss_fn or self.loss_fn
        if not isinstance(public, ClientArrays):
            gradient = public_grad(
                loss_fn, batch_size=self.public_batch_size, trainable=self.trainable
            )
            loss, grad = gradient(state.params, public, key)
            return PublicGradient(grad, loss)
        choice_key, update_key = jax.random.split(key)
        num_users = public.starts.shape[0]
        chosen = min(self.public_batch_size or num_users, num_users)
        users = jnp.arange(num_users)
        if chosen < num_users:
            users = jax.random.permutation(choice_key, num_users)[:chosen]
        users = users[jnp.argsort(public.num_examples[users])]
        per_pass = min(self.users_per_pass or 8, chosen)
        users = jnp.concatenate([users, jnp.full(-chosen % per_pass, PADDING)])

        def add_pass(carry, numbers):
            batch, keys = pad_users(public, numbers), record_keys(update_key, numbers)
            deltas, losses = self.local_updates(loss_fn, state, batch, keys)
            clipped = jax.vmap(lambda delta: clip_delta(delta, state.clip_norm).delta)(deltas)
            # A user of padding owns no rows, so its delta and loss are zero.
            new = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), (clipped, losses))
            return jax.tree.map(jnp.add, carry, new), None

        zero = (self.trainable.zero_sum(state.params), jnp.zeros([]))
        total, _ = jax.lax.scan(add_pass, zero, users.reshape(-1, per_pass))
        return PublicGradient(*jax.tree.map(lambda leaf: leaf / chosen, total))

    @property
    def prepares(self) -> bool:
        """False: nothing public acts before the clip."""
        return False

    def prepare(self, state: FederatedState, public_gradient: PublicGradient) -> FederatedState:
        """Returns the state itself."""
        del public_gradient
        return state

    def finish(
        self,
        state: FederatedState,
        total: PrivateSum,
        public_gradient: PublicGradient | None,
        alpha: jax.typing.ArrayLike,
    ) -> tuple[FederatedState, StepInfo]:
        """Adds the noise to a whole step's sum and takes the server's step; at α = 0, no noise.

        Args:
            state: the state before the step.
            total: the sum of the users' contributions.
            public_gradient: g_pub, or None for DP-FedAvg.
            alpha: α_t in [0, 1]; only 1 without a public gradient.
        """
        alpha = jnp.asarray(alpha, jnp.float32)

        def release(noise_state):
            # A public constant of at most 1: the weighted sum has sensitivity at most C.
            weight = None
            if not self.scale_noise:
                # The count is mixed with nothing.
                count_weight = None if self.adaptive_clip is None else jnp.ones([])
                weight = Contribution(jnp.clip(alpha, 0, 1), count_weight)
            noisy, noise_state = self.mechanism.add_noise(total.total, noise_state, weight=weight)
            mean = self.mechanism.mean(noisy)
            weight, count_weight = self._budget
            grad = jax.tree.map(
                lambda leaf: leaf * (state.clip_norm / weight).astype(leaf.dtype), mean.delta
            )
            if self.adaptive_clip is None:
                return grad, noise_state, state.clip_norm
            share_below = (mean.below_clip / count_weight + 1) / 2
            clip_norm = self.adaptive_clip.next_clip_norm(
                state.clip_norm, share_below, self.mechanism.l2_clip_norm
            )
            return grad, noise_state, clip_norm

        def skip(noise_state):
            if self.mechanism.noise.num_bands > 1:
                # As in `TrainStep.finish`: correlated noise is used up where nothing is released.
                _, noise_state, _ = release(noise_state)
            return total.total.zeros().delta, noise_state, state.clip_norm

        private_grad, noise_state, clip_norm = jax.lax.cond(
            alpha > 0, release, skip, state.noise_state
        )
        params, opt_state, average = updated(self, state, private_grad, public_gradient, alpha)
        public_loss = jnp.nan if public_gradient is None else public_gradient.loss
        info = StepInfo(
            noisy_grad_norm=optax.tree.norm(private_grad).astype(jnp.float32),
            public_loss=jnp.asarray(public_loss, jnp.float32),
            clip_norm=state.clip_norm,
            unprivatized=total.unprivatized.per_record(),
        )
        new_state = FederatedState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            noise_state=noise_state,
            clip_norm=clip_norm,
            client_learning_rate=state.client_learning_rate,
            average=average,
        )
        return new_state, info


def _padded_user(clients: ClientData) -> Batch:
    """Shapes and types of one user's rows, padded."""
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct((clients.max_examples_per_user, *row.shape), row.dtype),
        example_of(clients.arrays),
    )


def default_users_per_pass(step: FederatedStep, params: Params, clients: ClientData) -> int:
    """How many users to compute side by side: what memory allows, and at most a quarter of a round.

    A user needs its own parameters and gradients and what the backward pass of one local batch
    keeps; a quarter, because passes of users with few rows end sooner.
    """
    keyed_loss = with_key(step.loss_fn)
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (step.client_batch_size, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)
        ),
        clients.arrays,
    )

    def residuals(params, batch):
        keys = jax.random.split(jax.random.key(0), step.client_batch_size)
        losses = jax.vmap(keyed_loss, (None, 0, 0))
        return jax.vjp(lambda part: losses(part, batch, keys), params)[1]

    def nbytes(tree):
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    kept = nbytes(jax.eval_shape(residuals, jax.eval_shape(lambda: params), batch))
    rows = clients.max_examples_per_user * clients.nbytes / max(int(clients.num_examples.sum()), 1)
    per_user = 2 * kept + 4 * nbytes(params) + rows
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    budget = 2**29 if limit is None else limit / 3
    wanted = -(-step.mechanism.sampling.capacity // 4)
    return int(max(1, min(wanted, budget // per_user)))


def warm_start_clients(
    loss_fn: LossFn,
    params: Params,
    public: PublicClients,
    *,
    holdout_fraction: float = 0.2,
    seed: int = 0,
    **options: Any,
) -> WarmStart:
    """Pre-trains on the rows of public users until held-out public *users* stop improving.

    Public data only: no cost. As `mirrordp.warm_start`, except that whole users judge, as the model
    will meet whole users.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        params: where to begin.
        public: the public users.
        holdout_fraction: the share of the users that judges.
        seed: decides holdout and order of rows.
        **options: `optimizer`, `batch_size`, `patience`, `max_epochs`, `trainable`, `average` and
            `holdout_loss_fn`, as there.
    """
    _validate.instance_of(PublicClients, public=public)
    _validate.open_unit_interval(holdout_fraction=holdout_fraction)
    with_rows = np.flatnonzero(public.num_examples > 0)
    if len(with_rows) < 2:
        raise ValueError(
            f"warm_start_clients needs 2 public users with rows, one to learn from and one to "
            f"judge, got {len(with_rows)}. Use mirrordp.warm_start(public.examples)."
        )
    order = np.random.default_rng(seed).permutation(with_rows)
    held = min(max(1, round(holdout_fraction * len(order))), len(order) - 1)
    return warm_start(
        loss_fn,
        params,
        public.take(order[held:]).examples,
        holdout=public.take(order[:held]).examples,
        seed=seed,
        **options,
    )
