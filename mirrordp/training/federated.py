"""User-level privacy: federated averaging with noise, and public users on the server's side.

One round of the paper's federated form. A user, with all of its rows, is one record:

    Δ_k = θ − (θ after local SGD over user k's rows)       user by user
    s   = Σ_{k ∈ cohort} clip(Δ_k, C)                      equal weights: row counts play no role
    g   = (s + noise) / expected cohort                    the release; all below is post-processing
    u   = α_t g + (1 − α_t) g_pub                          g_pub: the same from public users
    θ  ← θ + server_optimizer(u)

With α = 1 this is DP-FedAvg: cold, or warm if θ comes from `warm_start_clients`.

Compiled code sees *passes* of a few users each. The users of a round are sorted by how many local
batches they have, so that a pass runs no longer than its largest user; the number of batches is a
number and not a shape, and nothing is compiled twice. `examples/federated_by_hand.py` is the same
algorithm in plain loops.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _validate
from mirrordp.data import (
    ClientData,
    Overlap,
    PrivateClients,
    PublicClients,
    PublicData,
    excluded_users,
    require_private_clients,
)
from mirrordp.privacy import _isolation, accounting
from mirrordp.privacy._convolutions import where_faster
from mirrordp.privacy.clipping import (
    check_trainable,
    clip_factors,
    example_key,
    example_of,
    frozen_mask,
    merge,
    scaled,
    squared_norm,
    takes_key,
    thawed_mask,
    trainable_part,
    value_and_grad_program,
    with_key,
    zero_sum,
)
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import interruptible
from mirrordp.privacy.sampling import PADDING, passes
from mirrordp.privacy.secure import SecureRandom
from mirrordp.privacy.sums import ExactSum
from mirrordp.spending import fingerprint as _fingerprint
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger, ledger_for
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.bookkeeping import Books, Kept, check_books
from mirrordp.training.central import (
    Keys,
    Unprivatized,
    add_sums,
    check_charged_steps,
    check_loss,
    check_options,
    described_loss,
    described_step,
    fits_on_device,
    info_fields,
    prepared_ahead,
    randomness,
    shown_arrays,
    updated,
    warn_of_unused,
    whole_steps,
)
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.types import AlphaSchedule, Array, Batch, LossFn, Params, PyTree
from mirrordp.updates import mix_gradients, schedules
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
    trainable: PyTree | None = None,
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
    start = trainable_part(params, trainable)

    def mean_loss(local, batch, is_real, keys):
        losses = jax.vmap(keyed_loss, (None, 0, 0))(merge(local, params), batch, keys)
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
    """What the next round needs. `noise_state` is secret: who holds it can subtract the noise.

    `clip_norm` and `client_learning_rate` are numbers here and not constants of the program, so
    that runs which differ in them share one compilation (`state._replace(clip_norm=...)`): a user's
    part is scaled to the mechanism's norm before the noise and back after it.
    """

    round: jax.Array
    params: Params
    opt_state: PyTree
    noise_state: PyTree
    clip_norm: jax.Array
    client_learning_rate: jax.Array
    average: Params | None


class RoundInfo(NamedTuple):
    """What one round may show. Everything but `unprivatized` follows from released values."""

    noisy_grad_norm: jax.Array
    public_loss: jax.Array
    clip_norm: jax.Array
    unprivatized: Unprivatized


@dataclasses.dataclass(frozen=True)
class FederatedInfo:
    """What may be plotted, one entry per round of the call that just finished.

    Attributes:
        round: rounds done so far.
        charged_rounds: how many of them read private data; `mechanism.epsilon(delta,
            num_steps=charged_rounds)` is what they cost.
        alpha: α_t.
        noisy_grad_norm: norm of the released pseudo-gradient (zero where α_t = 0).
        public_loss: mean loss of public users (or rows); NaN where no public gradient was computed.
        clip_norm: C_t.
        unprivatized: quantities without noise, if the caller asked for them, else None; its
            `batch_size` counts users.
        seeded: whether the run was given a seed, and is therefore not for release.
    """

    round: int
    charged_rounds: int
    alpha: np.ndarray
    noisy_grad_norm: np.ndarray
    public_loss: np.ndarray
    clip_norm: np.ndarray
    unprivatized: Unprivatized | None
    seeded: bool


class ClientArrays(NamedTuple):
    """Users as arrays for a device: the rows of all, and where each user's begin."""

    arrays: Batch
    starts: Array
    num_examples: Array

    @classmethod
    def of(cls, clients: ClientData) -> "ClientArrays":
        """The arrays of `clients`, on the default device."""
        return jax.device_put(cls(clients.arrays, clients.starts, clients.num_examples))


def pad_users(users: ClientArrays, numbers: Any, width: int) -> tuple[Batch, Any]:
    """The rows of some users as [users, width, ...] and how many are real; PADDING owns none."""
    numpy = jnp if isinstance(numbers, jax.Array) else np
    is_padding = numbers == PADDING
    safe = numpy.maximum(numbers, 0)
    counts = numpy.where(is_padding, 0, users.num_examples[safe])
    total = jax.tree.leaves(users.arrays)[0].shape[0]
    rows = users.starts[safe][:, None] + numpy.arange(width)
    rows = numpy.minimum(rows, total - 1)
    return jax.tree.map(lambda leaf: leaf[rows], users.arrays), counts


def server_sgd(learning_rate: float = 1.0, momentum: float = 0.9) -> optax.GradientTransformation:
    """The usual server optimiser, one object per setting so that equal rounds compile once."""
    return _server_sgd(float(learning_rate), float(momentum))


@functools.cache
def _server_sgd(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=momentum or None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedStep:
    """The pure functions of one round; a value, so that equal rounds compile once.

    `federated_train` simulates with it. A server of real clients uses its parts: `init`; for each
    reply `one_sum` of its `contribution(delta, state.clip_norm)`, added up from `zero_sum`;
    `finish` for the noise, the public gradient and the server's step.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a third argument, a random key.
        mechanism: samples, adds noise, accounts; its unit is the user.
        optimizer: the server's optax transformation; receives the (mixed) pseudo-gradient.
        client_learning_rate: η of the users.
        client_batch_size: rows of a local batch.
        local_epochs: how often a user goes over its rows.
        public_loss_fn: ℓ_pub, if it differs from the private loss.
        public_batch_size: public users per round, or rows where public data is a plain table; None
            takes all.
        scale_noise: see `mirrordp.mix_public_gradient`.
        adaptive_clip: let the clip norm follow a quantile; begins at `mechanism.l2_clip_norm`.
        average: an average of the iterates to keep, or None.
        trainable: frozen form of the tree of booleans; see `mirrordp.privacy.clipping.frozen_mask`.
        show_unprivatized: compute `info.unprivatized`; zeros otherwise.
    """

    loss_fn: LossFn
    mechanism: Mechanism
    optimizer: optax.GradientTransformation
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
    show_unprivatized: bool = False

    def __post_init__(self):
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
        if self.adaptive_clip is not None:
            _validate.instance_of(AdaptiveClip, adaptive_clip=self.adaptive_clip)
            if self.mechanism.noise.num_bands > 1:
                raise accounting.UnsupportedError(
                    "correlated noise cancels between rounds that share one clip norm, so it is "
                    "refused together with adaptive_clip. Use GaussianNoise(), or a fixed clip."
                )

    @property
    def _mask(self) -> PyTree | None:
        return thawed_mask(self.trainable)

    def init(self, params: Params, key: jax.Array) -> FederatedState:
        """The state before the first round; `key` seeds the noise and must be secret."""
        part = trainable_part(params, self._mask)
        check_trainable(part)
        return FederatedState(
            round=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=self.optimizer.init(part),
            noise_state=self.mechanism.privatizer(key).init(_tree(self._zeros(params))),
            clip_norm=jnp.asarray(self.mechanism.l2_clip_norm, jnp.float32),
            client_learning_rate=jnp.asarray(self.client_learning_rate, jnp.float32),
            average=None if self.average is None else params,
        )

    def _zeros(self, params: Params) -> Contribution:
        count = None if self.adaptive_clip is None else jnp.zeros([])
        return Contribution(zero_sum(params, self._mask), count)

    def zero_sum(self, params: Params) -> ExactSum:
        """The sum over nobody, of a `Contribution` for everybody."""
        return ExactSum.zero(self._zeros(params), self.mechanism.l2_clip_norm)

    def one_sum(self, contribution: Contribution) -> ExactSum:
        """The sum over one user; sums add up with `+`, exactly and in any order."""
        return ExactSum.of(contribution, self.mechanism.l2_clip_norm)

    def local_updates(
        self,
        loss_fn: LossFn,
        state: FederatedState,
        examples: Batch,
        num_examples: jax.Array,
        keys: jax.Array,
        num_batches: jax.typing.ArrayLike | None = None,
    ) -> tuple[PyTree, jax.Array]:
        """`local_update` of several users at once, on [users, rows, ...]."""
        update = functools.partial(
            local_update,
            loss_fn,
            learning_rate=state.client_learning_rate,
            batch_size=self.client_batch_size,
            epochs=self.local_epochs,
            num_batches=num_batches,
            trainable=self._mask,
        )
        return jax.vmap(update, in_axes=(None, 0, 0, 0))(state.params, examples, num_examples, keys)

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
            trainable=self._mask,
        )
        program = jax.make_jaxpr(update)(params, examples, 1, key)
        _isolation.check("the local training of a user", program)

    def contribution(
        self, delta: PyTree, clip_norm: jax.typing.ArrayLike
    ) -> tuple[Contribution, ClippedDelta]:
        """What one user adds to the round's sum: a tree of norm at most `mechanism.l2_clip_norm`.

        It depends on this user alone. A delta with a NaN or an infinity adds exactly zero.
        """
        clipped = clip_delta(delta, clip_norm)
        weight, count_weight = self._budget
        scaled = jax.tree.map(
            lambda leaf: leaf * jnp.asarray(weight / clip_norm, leaf.dtype), clipped.delta
        )
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
        examples: Batch,
        num_examples: jax.Array,
        is_padding: jax.Array,
        keys: jax.Array,
        num_batches: jax.typing.ArrayLike | None = None,
    ) -> tuple[ExactSum, Unprivatized]:
        """The sum over one pass of users, not yet private, with *sums* of unprivatized values."""
        self.check_isolated(state.params, example_of(examples), example_of(keys))
        deltas, losses = self.local_updates(
            self.loss_fn, state, examples, num_examples, keys, num_batches
        )

        def contribute(delta, is_padding):
            contribution, clipped = self.contribution(delta, state.clip_norm)
            contribution = jax.tree.map(
                lambda leaf: jnp.where(is_padding, jnp.zeros_like(leaf), leaf), contribution
            )
            return contribution, clipped.unprivatized_norm

        contributions, norms = jax.vmap(contribute)(deltas, is_padding)
        total = ExactSum.over(contributions, self.mechanism.l2_clip_norm)
        if not self.show_unprivatized:
            return total, Unprivatized.zero()
        # A norm that is not a number was not below C either.
        return total, Unprivatized.sums(losses, ~(norms <= state.clip_norm), is_padding)

    def public_grad(
        self,
        state: FederatedState,
        public: ClientArrays | Batch,
        key: jax.Array,
        *,
        width: int = 0,
        users_per_pass: int = 8,
    ) -> tuple[PyTree, jax.Array]:
        """g_pub and the public loss: from public users as `ClientArrays`, or rows as plain arrays.

        Public users do what private users do: local SGD, the same clip, equal weights. Rows give
        the ordinary gradient of the mean loss.

        Args:
            state: the model and the clip norm.
            public: public users, or a tree of arrays.
            key: chooses and shuffles.
            width: rows that a user is padded to.
            users_per_pass: users computed side by side.
        """
        loss_fn = self.public_loss_fn or self.loss_fn
        if not isinstance(public, ClientArrays):
            gradient = public_grad(loss_fn, batch_size=self.public_batch_size, trainable=self._mask)
            loss, grad = gradient(state.params, public, key)
            return grad, loss
        choice_key, update_key = jax.random.split(key)
        num_users = public.starts.shape[0]
        chosen = min(self.public_batch_size or num_users, num_users)
        users = jnp.arange(num_users)
        if chosen < num_users:
            users = jax.random.permutation(choice_key, num_users)[:chosen]
        users = users[jnp.argsort(public.num_examples[users])]
        per_pass = min(users_per_pass, chosen)
        users = jnp.concatenate([users, jnp.full(-chosen % per_pass, PADDING)])

        def add_pass(carry, numbers):
            examples, counts = pad_users(public, numbers, width)
            keys = user_keys(update_key, numbers)
            batches = jnp.max(-(-counts // self.client_batch_size))
            deltas, losses = self.local_updates(loss_fn, state, examples, counts, keys, batches)
            clipped = jax.vmap(lambda delta: clip_delta(delta, state.clip_norm).delta)(deltas)
            # A user of padding owns no rows, so its delta and loss are zero.
            new = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), (clipped, losses))
            return jax.tree.map(jnp.add, carry, new), None

        zero = (zero_sum(state.params, self._mask), jnp.zeros([]))
        total, _ = jax.lax.scan(add_pass, zero, users.reshape(-1, per_pass))
        return jax.tree.map(lambda leaf: leaf / chosen, total)

    def finish(
        self,
        state: FederatedState,
        total: ExactSum,
        unprivatized: Unprivatized,
        public_gradient: PyTree | None,
        alpha: jax.typing.ArrayLike,
        public_loss: jax.typing.ArrayLike = jnp.nan,
    ) -> tuple[FederatedState, RoundInfo]:
        """Adds the noise to a whole round's sum and takes the server's step; at α = 0 no noise.

        Args:
            state: the state before the round.
            total: the sum of the users' contributions.
            unprivatized: sums of unprivatized values; `Unprivatized.zero()` if there are none.
            public_gradient: g_pub, or None for DP-FedAvg.
            alpha: α_t in [0, 1]; only 1 without a public gradient.
            public_loss: passed on to the info.
        """
        alpha = jnp.asarray(alpha, jnp.float32)

        def release(noise_state):
            # A public constant of at most 1: the weighted sum has sensitivity at most C.
            weight = None
            if not self.scale_noise:
                # The count is mixed with nothing.
                count_weight = None if self.adaptive_clip is None else jnp.ones([])
                weight = Contribution(jnp.clip(alpha, 0, 1), count_weight)
            # The privatizer's key lives in its state; the one given here is never used.
            noisy, noise_state = self.mechanism.privatizer(jax.random.key(0)).update(
                _tree(total), noise_state, weight=weight
            )
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
            return total.zeros().delta, noise_state, state.clip_norm

        private_grad, noise_state, clip_norm = jax.lax.cond(
            alpha > 0, release, skip, state.noise_state
        )
        update = private_grad
        if public_gradient is not None:
            update = mix_gradients(
                private_grad, public_gradient, alpha=alpha, scale_noise=self.scale_noise
            )
        number = state.round + 1
        params, opt_state, average = updated(self, state, update, number)
        info = RoundInfo(
            noisy_grad_norm=optax.tree.norm(private_grad).astype(jnp.float32),
            public_loss=jnp.asarray(public_loss, jnp.float32),
            clip_norm=state.clip_norm,
            unprivatized=unprivatized.per_record(),
        )
        new_state = FederatedState(
            number, params, opt_state, noise_state, clip_norm, state.client_learning_rate, average
        )
        return new_state, info


def _tree(tree: Any) -> Any:
    """Optax's types leave out named tuples, which are trees like others."""
    return tree


def user_keys(round_key: jax.Array, numbers: jax.Array) -> jax.Array:
    """A key per user of a round, bound to the user and not to its place among the others."""
    return jax.vmap(lambda user: jax.random.fold_in(round_key, user))(jnp.maximum(numbers, 0))


class _Passes(NamedTuple):
    """Inputs of a compiled call: one row per pass, padded with idle passes to a fixed number."""

    users: Any  # [passes, users], PADDING where there is none
    streamed: Any  # (rows, counts) of the users where data is streamed, else None
    num_batches: Any  # [passes] local batches of the largest user
    alpha: Any  # [passes]
    is_active: Any  # [passes] False for idle passes at the end of a call
    is_last: Any  # [passes] True where a round's sum is complete


@functools.partial(jax.jit, static_argnames=("step", "width", "public_width"))
def _run_passes(
    step: FederatedStep,
    state: FederatedState,
    partial_sum: tuple[ExactSum, Unprivatized],
    inputs: _Passes,
    private: ClientArrays | None,
    excluded: jax.Array,
    public: ClientArrays | Batch | None,
    keys: Any,
    *,
    width: int,
    public_width: int,
):
    """Scans over passes; carries the state and the sum of the round in progress."""
    users_per_pass = inputs.users.shape[1]
    zero = (step.zero_sum(state.params), Unprivatized.zero())
    no_info = RoundInfo(jnp.zeros([]), jnp.zeros([]), jnp.zeros([]), zero[1])

    def add_pass(state, partial_sum, x):
        is_padding = (x.users == PADDING) | excluded[jnp.maximum(x.users, 0)]
        examples, counts = x.streamed if private is None else pad_users(private, x.users, width)
        round_key = jax.random.fold_in(keys.loss, state.round)
        new = step.private_sum(
            state, examples, counts, is_padding, user_keys(round_key, x.users), x.num_batches
        )
        return add_sums(partial_sum, new)

    def public_side(state, alpha):
        def compute():
            key = jax.random.fold_in(keys.public, state.round)
            grad, loss = step.public_grad(
                state, public, key, width=public_width, users_per_pass=users_per_pass
            )
            return grad, loss.astype(jnp.float32)

        nothing = (zero[0].zeros().delta, jnp.full([], jnp.nan))
        # At α = 1 the public gradient has no weight: it is not computed.
        return jax.lax.cond(alpha < 1, compute, lambda: nothing)

    def body(carry, x):
        def active(carry):
            state, partial_sum = carry
            partial_sum = jax.lax.cond(
                x.alpha > 0, lambda: add_pass(state, partial_sum, x), lambda: partial_sum
            )

            def finish():
                grad, loss = None, jnp.nan
                if public is not None:
                    grad, loss = public_side(state, x.alpha)
                new_state, info = step.finish(
                    state, partial_sum[0], partial_sum[1], grad, x.alpha, loss
                )
                return (new_state, zero), info

            return jax.lax.cond(x.is_last, finish, lambda: ((state, partial_sum), no_info))

        return jax.lax.cond(x.is_active, active, lambda carry: (carry, no_info), carry)

    (state, partial_sum), infos = jax.lax.scan(body, (state, partial_sum), inputs)
    return state, partial_sum, infos


def federated_train(
    loss_fn: LossFn,
    params: Params,
    private: PrivateClients,
    public: PublicClients | PublicData | None = None,
    *,
    mechanism: Mechanism,
    client_learning_rate: float,
    optimizer: optax.GradientTransformation | None = None,
    alpha: float | Sequence[float] | AlphaSchedule = 1.0,
    num_rounds: int | None = None,
    client_batch_size: int = 16,
    local_epochs: int = 1,
    public_loss_fn: LossFn | None = None,
    public_batch_size: int | None = None,
    scale_noise: bool = True,
    adaptive_clip: AdaptiveClip | None = None,
    average: Average | None = None,
    trainable: PyTree | None = None,
    overlap: Overlap = Overlap.DROP,
    seed: int | None = None,
    rounds_per_call: int = 10,
    users_per_pass: int | None = None,
    stream: bool | None = None,
    ledger: Ledger | None = None,
    budget: Budget | None = None,
    checkpoint: Checkpoint | None = None,
    state: FederatedState | None = None,
    show_unprivatized: bool = False,
) -> Iterator[tuple[FederatedState, FederatedInfo]]:
    """Simulates federated training under user-level privacy; yields every few rounds.

    With the default `alpha=1` this is DP-FedAvg: cold, or warm if `params` come from
    `warm_start_clients`. With `alpha` below one it is PDA-DPMD in its federated form; the paper's
    schedule cos(πt/(iT)) is `schedules.cosine(decay_steps=i * T / 2)`.

    Everything is checked, and a mistake raised, before the first private row is used. A block of
    rounds is charged to `ledger` (or `budget`) before it runs.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, a function of *one* example; optionally with
            a third argument, a random key, for dropout.
        params: where to begin; must not come from private data.
        private: the private users.
        public: `PublicClients` for a pseudo-gradient by the same local training, or `PublicData`
            for the plain gradient of its rows; needed where α < 1.
        mechanism: decides sampling, clipping, noise and cost; made with `unit="user"`.
        client_learning_rate: η of the users' local SGD.
        optimizer: the server's optax transformation; by default `server_sgd()`, SGD with momentum.
        alpha: α_t as a number, a list or a schedule (`mirrordp.schedules`), fixed beforehand.
        num_rounds: rounds to take; by default as many as the mechanism was made for. Rounds with
            α_t = 0 read no private data, are not charged, and do not count against the mechanism.
        client_batch_size: rows of a local batch.
        local_epochs: how often a user goes over its rows in a round.
        public_loss_fn: ℓ_pub, if it differs from `loss_fn`.
        public_batch_size: public users (or rows) per round, at random; None takes all of them.
        scale_noise: True for α(g + b), the paper; False for αg + b, the authors' federated code.
        adaptive_clip: let the clip norm follow a quantile of the users' norms.
        average: `UniformAverage()` or `ExponentialAverage(decay)` of the iterates.
        trainable: a tree of booleans over `params` (or a prefix of it); the rest stays frozen.
        overlap: what to do about private users whose name is also a public user's.
        seed: makes the run reproducible and therefore not for release; by default all randomness
            comes from the operating system.
        rounds_per_call: rounds per compiled call, and between two yields.
        users_per_pass: users computed side by side; by default what memory allows.
        stream: keep private rows in host memory and send them pass by pass; by default only if they
            do not fit on the device.
        ledger: where to charge; pass one to compose several runs.
        budget: charge to a budget that spans runs instead, one made with `unit="user"`; the run is
            refused before any row is used if all of it does not fit.
        checkpoint: keep what is needed to go on after a crash, as in `mirrordp.train`.
        state: instead of a checkpoint, go on from the state that an earlier call with the same
            arguments and seed yielded; what came before was charged there. The remaining rounds
            draw as they would have.
        show_unprivatized: fill `info.unprivatized` with the users' loss, clip fraction and number,
            which are not covered by the guarantee.

    Returns:
        An iterator of `(FederatedState, FederatedInfo)`.
    """
    require_private_clients(private)
    check_books(mechanism, ledger, budget, checkpoint)
    params = jax.tree.map(jnp.asarray, params)
    step = FederatedStep(
        loss_fn=loss_fn,
        mechanism=mechanism,
        optimizer=server_sgd() if optimizer is None else optimizer,
        client_learning_rate=client_learning_rate,
        client_batch_size=client_batch_size,
        local_epochs=local_epochs,
        public_loss_fn=public_loss_fn,
        public_batch_size=public_batch_size,
        scale_noise=scale_noise,
        adaptive_clip=adaptive_clip,
        average=average,
        trainable=frozen_mask(trainable, params),
        show_unprivatized=show_unprivatized,
    )
    _validate.instance_of(Overlap, "Use Overlap.DROP.", overlap=overlap)
    _validate.positive_integer(rounds_per_call=rounds_per_call)
    total = mechanism.num_steps if num_rounds is None else num_rounds
    _validate.positive_integer(num_rounds=total)
    alphas = schedules.evaluate(schedules.as_schedule(alpha), total)
    check_charged_steps(alphas, mechanism)
    if public is not None:
        _validate.instance_of(
            (PublicClients, PublicData), "Wrap public users: PublicClients(...).", public=public
        )
    elif (alphas < 1).any():
        raise ValueError(
            f"alpha goes down to {float(alphas.min()):g}, so public data is needed, got none. Pass "
            "public=PublicClients.from_rows(...), or alpha=1 for DP-FedAvg."
        )
    check_trainable(trainable_part(params, step._mask))
    check_loss("loss_fn", loss_fn, params, private.arrays)
    traced = value_and_grad_program(
        loss_fn, params, step._mask, example_of(private.arrays), example_key()
    )
    warn_of_unused(traced, trainable_part(params, step._mask))
    step.check_isolated(params, _padded_user(private), example_key())
    if public is not None:
        check_loss("public_loss_fn", public_loss_fn or loss_fn, params, public.arrays)
    ledger_for(mechanism.adjacency, ledger)
    mechanism.check_num_examples(len(private))
    if state is not None and seed is None:
        raise ValueError(
            "to go on from a state the run needs the seed it began with, got seed=None: other "
            "draws would follow than the ones that the state belongs to."
        )
    if state is not None and checkpoint is not None:
        raise ValueError("a run goes on from a state or a checkpoint, got both. Leave one out.")
    if users_per_pass is None:
        users_per_pass = default_users_per_pass(step, params, private)
    _validate.positive_integer(users_per_pass=users_per_pass)
    first = 0 if state is None else int((alphas[: int(state.round)] > 0).sum())
    with contextlib.ExitStack() as stack:
        books = Books.open(
            mechanism, private, num_steps=int((alphas > 0).sum()), ledger=ledger, budget=budget,
            checkpoint=checkpoint, first=first,
        )  # fmt: skip
        stack.callback(books.close)
        excluded = np.zeros(len(private), bool)
        if isinstance(public, PublicClients):
            excluded = excluded_users(private, public, overlap)
        run = _Simulation(
            step=step,
            params=params,
            private=private,
            public=public if (alphas < 1).any() else None,
            excluded=excluded,
            alphas=alphas,
            rounds_per_call=rounds_per_call,
            users_per_pass=users_per_pass,
            stream=not fits_on_device(private) if stream is None else stream,
        )
        rng, keys = randomness(
            books.verified(functools.partial(_configuration, run), seed),
            secure=mechanism.is_secure,
        )
        rounds = _generate(run, state, rng, keys, books)
        stack.pop_all()  # from here on the generator closes the books
    return rounds


def _padded_user(clients: ClientData) -> Batch:
    """Shapes and types of one user's rows, padded."""
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct((clients.max_examples_per_user, *row.shape), row.dtype),
        example_of(clients.arrays),
    )


class _Simulation(NamedTuple):
    """A checked request: all that the rounds need but randomness."""

    step: FederatedStep
    params: Params
    private: PrivateClients
    public: PublicClients | PublicData | None
    excluded: np.ndarray
    alphas: np.ndarray
    rounds_per_call: int
    users_per_pass: int
    stream: bool


def _configuration(run: _Simulation, key: bytes) -> dict[str, str]:
    """Everything that decides what the run computes, in words or as a fingerprint."""
    step, params, private, public = run.step, run.params, run.private, run.public
    described = described_step(step, params, private.arrays, key) | {
        "alpha": checkpoints.outline(run.alphas),
        "rounds_per_call": str(run.rounds_per_call),
        # The order of additions, and so the last digits, follow from it.
        "users_per_pass": str(run.users_per_pass),
        "max_examples_per_user": str(private.max_examples_per_user),
        "stream": str(run.stream),
        "private data": _fingerprint.of_arrays(
            key, (private.arrays, private.num_examples, run.excluded)
        ),
    }
    if public is not None:
        users = ()
        if isinstance(public, PublicClients):
            users = (public.num_examples, public.max_examples_per_user)
        described["public data"] = _fingerprint.of_arrays(key, (public.arrays, users))
        described["public_loss_fn"] = described_loss(
            "public_loss_fn",
            step.public_loss_fn or step.loss_fn,
            params,
            step._mask,
            public.arrays,
        )
    return described


def _generate(
    run: _Simulation,
    given: FederatedState | None,
    rng: np.random.Generator | SecureRandom,
    keys: Keys,
    books: Books,
) -> Iterator[tuple[FederatedState, FederatedInfo]]:
    with contextlib.closing(books):
        batches = books.batches(len(run.private), rng)
        if given is not None:
            # Another run from this state would have the same noise.
            books.claim(books.seed)
            state, first = given, int(given.round)
            for _ in range(int((run.alphas[:first] > 0).sum())):
                next(batches)
        else:
            state, kept = books.begin(run.step.init(run.params, keys.noise), batches)
            first = 0 if kept is None else kept.step
            if kept is not None:
                shown, seeded = info_fields(kept.shown), books.seed is not None
                yield state, FederatedInfo(first, kept.charged_steps, **shown, seeded=seeded)
        yield from _rounds(run, state, first, batches, keys, books)
        books.finish()


def _rounds(
    run: _Simulation,
    state: FederatedState,
    first: int,
    batches: Iterator[np.ndarray],
    keys: Keys,
    books: Books,
) -> Iterator[tuple[FederatedState, FederatedInfo]]:
    """Rounds from number `first` on: charged, computed, kept, yielded, a few at a time."""
    step, params, private, public = run.step, run.params, run.private, run.public
    alphas, rounds_per_call, users_per_pass = run.alphas, run.rounds_per_call, run.users_per_pass
    partial_sum = (step.zero_sum(params), Unprivatized.zero())
    on_host = ClientArrays(private.arrays, private.starts, private.num_examples)
    on_device = None if run.stream else ClientArrays.of(private)
    public_width, public_arrays = 0, None
    if isinstance(public, PublicClients):
        public_width, public_arrays = public.max_examples_per_user, ClientArrays.of(public)
    elif public is not None:
        public_arrays = jax.device_put(public.arrays)
    excluded = jax.device_put(run.excluded)
    width = private.max_examples_per_user
    capacity = step.mechanism.sampling.capacity
    passes_per_call = rounds_per_call * math.ceil(capacity / users_per_pass)

    def prepare(start: int) -> list[_Passes]:
        return _pack(
            alphas[start : start + rounds_per_call],
            batches,
            on_host,
            users_per_pass,
            passes_per_call,
            step.client_batch_size,
            width if run.stream else 0,
        )

    charged = int((alphas[:first] > 0).sum())
    for start, calls in prepared_ahead(prepare, range(first, len(alphas), rounds_per_call)):
        block = alphas[start : start + rounds_per_call]
        reads = int((block > 0).sum())
        books.charge(charged, charged + reads)
        charged += reads
        infos = []
        with interruptible():
            for inputs in calls:
                state, partial_sum, info = _run_passes(
                    step, state, partial_sum, inputs, on_device, excluded,
                    public_arrays, keys, width=width, public_width=public_width,
                )  # fmt: skip
                infos.append(info)
            info = whole_steps(calls, infos)
        found = FederatedInfo(
            round=start + len(block),
            charged_rounds=charged,
            alpha=block,
            noisy_grad_norm=info.noisy_grad_norm,
            public_loss=info.public_loss,
            clip_norm=info.clip_norm,
            unprivatized=info.unprivatized if step.show_unprivatized else None,
            seeded=books.seed is not None,
        )
        kept = Kept(found.round, charged, shown_arrays(found))
        books.keep(state, kept, start // rounds_per_call, is_last=found.round == len(alphas))
        yield state, found


def _pack(
    alphas: np.ndarray,
    batches: Iterator[np.ndarray],
    private: ClientArrays,
    users_per_pass: int,
    passes_per_call: int,
    client_batch_size: int,
    stream_width: int,
) -> list[_Passes]:
    """Draws the cohorts of a block of rounds and lays them out as calls of one fixed shape."""
    counts = np.asarray(private.num_examples)
    users, alpha, is_last = [], [], []
    for weight in alphas:
        # A round that reads no private data draws no cohort either.
        cohort = np.asarray(next(batches)) if weight > 0 else np.zeros(0, np.int32)
        cohort = cohort[cohort != PADDING]
        # Users with equally many batches side by side: none waits for a larger one.
        rows = passes(cohort[np.argsort(-counts[cohort], kind="stable")], users_per_pass)
        users.extend(rows)
        alpha.extend([weight] * len(rows))
        is_last.extend([False] * (len(rows) - 1) + [True])
    idle = -len(users) % passes_per_call
    users = np.concatenate([users, np.full((idle, users_per_pass), PADDING, "i4")])
    alpha = np.concatenate([alpha, np.zeros(idle)]).astype(np.float32)
    is_last = np.concatenate([is_last, np.zeros(idle, bool)])
    is_active = np.arange(len(users)) < len(users) - idle
    own = np.where(users == PADDING, 0, counts[np.maximum(users, 0)])
    num_batches = -(-own.max(axis=1) // client_batch_size)
    calls = []
    for start in range(0, len(users), passes_per_call):
        part = slice(start, start + passes_per_call)
        streamed = None
        if stream_width:
            flat = users[part].reshape(-1)
            rows, real = pad_users(private, flat, stream_width)
            shape = users[part].shape
            streamed = jax.tree.map(
                lambda leaf, shape=shape: leaf.reshape(*shape, *leaf.shape[1:]), (rows, real)
            )
        inputs = _Passes(
            users[part], streamed, num_batches[part], alpha[part], is_active[part], None
        )
        calls.append(jax.device_put(inputs)._replace(is_last=is_last[part]))
    return calls


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
        return jax.vjp(lambda part: losses(merge(part, params), batch, keys), params)[1]

    def nbytes(tree):
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    kept = nbytes(jax.eval_shape(residuals, jax.eval_shape(lambda: params), batch))
    rows = clients.max_examples_per_user * clients.nbytes / max(int(clients.num_examples.sum()), 1)
    per_user = 2 * kept + 4 * nbytes(params) + rows
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
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
