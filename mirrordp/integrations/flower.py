"""Federated training with user-level privacy on Flower: `pip install 'mirrordp[flower]'`.

`PrivateStrategy` runs federated training on a Flower server. One node is one user. In each round
the server

    charges the ledger or budget;  draws the cohort with the mechanism's sampler;  sends θ to it;
    adds up clip(Δ_k, C) over the valid replies, each with weight one;
    adds noise, divides by the expected cohort size, mixes in the public gradient, takes its step.

Clients are not trusted. A reply changes the sum by at most C whatever it contains, and no reply,
error or silence affects the noise, the divisor or the next cohort. The server and Flower's
SuperLink are trusted, since they see the delta of each user; see `docs/federated.md`.

`client_app` turns a function `(params, data) -> params` into the app of a user's node.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        MetricRecordValues,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
except ImportError as error:
    raise ImportError(
        "mirrordp.integrations.flower needs Flower 1.41 or newer. Install it: "
        "pip install 'mirrordp[flower]'."
    ) from error

from mirrordp import _validate
from mirrordp._rounding import upwards
from mirrordp.data import PublicClients, PublicData
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency, Epsilon
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PADDING, FixedSizeSampling, FullBatch
from mirrordp.privacy.trainable import Trainable
from mirrordp.report import RunReport
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger, ledger_for
from mirrordp.training.bookkeeping import Books, check_spend
from mirrordp.training.engine import check_charged_steps, randomness
from mirrordp.training.federated import (
    FederatedState,
    FederatedStep,
    clip_delta,
    local_update,
)
from mirrordp.training.step import PrivateSum, PublicGradient, needs_public_grad
from mirrordp.types import AlphaSchedule, LossFn, Params, PyTree
from mirrordp.updates import schedules

ARRAYS, CONFIG = "arrays", "config"
TICKET, CLIP_NORM, ROUND = "ticket", "clip-norm", "server-round"

# The most bytes that a .npy header may take.
_HEADER = 4096

# Flower's error code for an app that raised an exception.
_FAILED = 2

# After so many seconds a fetch continues in the background while the next ones start, and after a
# hundredth of it if so many are there already: nodes that stall cost the others no more than that.
_MOMENT = 0.5
_HANGING = 8

_OPERATOR = "[operator only, not covered by the guarantee]"

# Flower's logger, so that our lines go where Flower's go.
_log = logging.getLogger("flwr")


def to_arrays(tree: PyTree, *, ticket: str | None = None) -> ArrayRecord:
    """Returns a tree as a Flower record: one named array per leaf, without frozen leaves (None).

    SuperLink keeps what is sent under its hash, and tells any node whether it has an object of a
    given hash. A node that guesses a user's rows can compute the delta, and could ask whether it
    was sent. With a ticket, which only this node and the server know, there is nothing to ask for.

    Args:
        tree: arrays.
        ticket: combines all bytes (XOR) with a stream that follows from it.
    """
    record = {}
    for name, leaf in _named_leaves(tree).items():
        array = np.asarray(leaf)
        # NumPy's file format loses dtypes that NumPy does not have, such as bfloat16.
        array = Array(array if array.dtype.isbuiltin == 1 else array.astype(np.float32))
        if ticket is not None:
            mixed = _mixed(array.data, ticket, name)
            array = Array(array.dtype, array.shape, array.stype, mixed)
        record[name] = array
    return ArrayRecord(record)


def _mixed(data: bytes, ticket: str, name: str) -> bytes:
    """Combines bytes with a stream that follows from the ticket; twice gives them back."""
    stream = hashlib.shake_128(f"mirrordp {ticket} {name}".encode()).digest(len(data))
    return (np.frombuffer(data, np.uint8) ^ np.frombuffer(stream, np.uint8)).tobytes()


def from_arrays(record: ArrayRecord, like: PyTree, *, ticket: str | None = None) -> PyTree:
    """Inverts `to_arrays`: returns a tree with the structure, shapes and dtypes of `like`.

    Args:
        record: the named arrays.
        like: a tree of arrays, or of `jax.ShapeDtypeStruct`s.
        ticket: as given to `to_arrays`.

    Raises:
        ReplyError: if `record` does not have exactly the arrays of `like`.
    """
    wanted = _named_leaves(like)
    if set(record) != set(wanted):
        raise ReplyError(
            "malformed",
            f"expected arrays named {sorted(wanted)}, got {sorted(record)!r:.500}. Use the same "
            "model on the server and on the nodes.",
        )
    found = []
    for name, leaf in wanted.items():
        dtype = np.dtype(leaf.dtype)
        wire = dtype if dtype.isbuiltin == 1 else np.dtype(np.float32)
        read = functools.partial(_mixed, ticket=ticket, name=name) if ticket else bytes
        found.append(_read_array(record[name], leaf.shape, wire, read).astype(dtype))
    return jax.tree.unflatten(jax.tree.structure(like), found)


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "params": leaf for path, leaf in leaves}


class ReplyError(ValueError):
    """A record that is not what was asked for.

    Attributes:
        reason: one of a few fixed words, for counting; the message may quote what a client sent.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def _read_array(
    array: Array, shape: Sequence[int], dtype: np.dtype, read: Callable[[bytes], bytes]
) -> np.ndarray:
    """Returns the numbers of a Flower array; checks its header before allocating memory for them.

    `array.numpy()` would trust the header, which a hostile client may have written.
    """
    if array.stype != "numpy.ndarray":
        raise ReplyError("malformed", f"expected a NumPy array, got {array.stype!r:.50}.")
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if len(array.data) > nbytes + _HEADER:
        raise ReplyError("oversized", f"expected {nbytes} bytes, got {len(array.data)}.")
    data = read(array.data)
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        found_shape, is_fortran, found_dtype = header(file)
    except Exception as error:
        raise ReplyError("malformed", "expected NumPy's file format, got another.") from error
    if found_shape != tuple(shape):
        raise ReplyError("wrong shape", f"expected {tuple(shape)}, got {found_shape!r:.100}.")
    if found_dtype != dtype:
        raise ReplyError("wrong dtype", f"expected {dtype}, got {found_dtype!s:.50}.")
    numbers = data[file.tell() :]
    if len(numbers) != nbytes:
        raise ReplyError("malformed", f"expected {nbytes} bytes of numbers, got {len(numbers)}.")
    return np.frombuffer(numbers, dtype).reshape(shape, order="F" if is_fortran else "C")


def without_amplification(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism as seen by someone who knows who takes part in which round: q = 1.

    Sampling amplifies privacy only against those who do not see the sample. For an observer of the
    network, each round in which a user takes part is a Gaussian mechanism without amplification,
    and in the worst case the user takes part whenever possible. The result is for accounting only;
    it does not sample like the original.

    Raises:
        UnsupportedError: under add-remove adjacency, which hides who is present at all.
    """
    if mechanism.adjacency is Adjacency.ADD_REMOVE:
        raise accounting.UnsupportedError(
            "someone who sees who takes part also sees who is enrolled, which is what add-remove "
            "adjacency hides. Use Adjacency.ZERO_OUT, which protects what users contribute."
        )
    sampling = mechanism.sampling
    if isinstance(sampling, FixedSizeSampling):
        sampling = FullBatch(
            expected_batch_size=sampling.expected_batch_size, num_examples=sampling.num_examples
        )
    elif not isinstance(sampling, FullBatch):
        sampling = dataclasses.replace(sampling, sampling_prob=1.0)  # pyright: ignore
    return dataclasses.replace(mechanism, sampling=sampling)


def wait_for_users(grid: Grid, num_users: int, *, poll_interval: float = 1.0) -> list[int]:
    """Waits until `num_users` nodes are connected, and returns their identifiers.

    The list is fixed for the run. Nodes that disconnect stay on it, so that the sampling is the one
    that was accounted for; nodes that connect later, or return under a new identifier, are not
    added.
    """
    _validate.positive_integer(num_users=num_users)
    connected = None
    while len(nodes := sorted(grid.get_node_ids())) < num_users:
        if len(nodes) != connected:
            connected = len(nodes)
            _log.info("Waiting for %d nodes, %d are connected", num_users, connected)
        time.sleep(poll_interval)
    return nodes[:num_users]


def exchange(
    grid: Grid, messages: Iterable[Message], timeout: float, *, poll_interval: float = 0.5
) -> list[Message]:
    """Sends messages and collects replies until all have arrived or `timeout` seconds have passed.

    Like `grid.send_and_receive`, except that each reply is fetched on its own. With the former, a
    reply of one node can cost others theirs: if it names the wrong message or none, if it cannot be
    unpacked, or if it is announced and never uploaded, which blocks the server for minutes. Here
    the server waits for a reply that names the message, and only the node that received the message
    knows its name.
    """
    found: dict[str, list[Message]] = {
        name: [] for message in messages for name in grid.push_messages([message]) if name
    }
    fetched: queue.SimpleQueue[tuple[str, list[Message]]] = queue.SimpleQueue()
    in_flight: collections.Counter[str] = collections.Counter()
    deadline = time.monotonic() + timeout

    def fetch(name: str) -> None:
        replies = []
        try:
            replies = list(grid.pull_messages([name]))
        except Exception as error:
            _log.warning("%s a reply could not be fetched (%s)", _OPERATOR, type(error).__name__)
        fetched.put((name, replies))

    def answers(name: str) -> list[Message]:
        return [reply for reply in found[name] if reply.metadata.reply_to_message_id == name]

    def is_settled(name: str) -> bool:
        # SuperLink announces a reply once and then reports that there is none, which means
        # nothing while the reply itself may still be on its way.
        own = answers(name)
        return any(not reply.has_error() for reply in own) or bool(own and not in_flight[name])

    waiting = list(found)
    while waiting:
        for name in waiting:
            # While a fetch is on its way, another one would find nothing.
            if not answers(name) and not in_flight[name]:
                moment = _MOMENT if in_flight.total() < _HANGING else _MOMENT / 100
                in_flight[name] += 1
                # A daemon, because a fetch that hangs cannot be stopped, only left behind.
                worker = threading.Thread(target=fetch, args=(name,), daemon=True)
                worker.start()
                worker.join(min(moment, max(deadline - time.monotonic(), 0)))
        while not fetched.empty():
            name, replies = fetched.get()
            in_flight[name] -= 1
            found[name] += replies
        waiting = [name for name in waiting if not is_settled(name)]
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if waiting:
            time.sleep(min(poll_interval, left))
    # An error counts only if nothing else came.
    return [
        reply
        for own in found.values()
        for reply in [reply for reply in own if not reply.has_error()] or own
    ]


class PrivateStrategy(Strategy):
    """PDA-DPMD and DP-FedAvg under user-level privacy, as a Flower strategy.

    In a `ServerApp`:

        strategy = PrivateStrategy(step, params, delta=1e-6, public=public, alpha=alpha)
        params = strategy.run(grid)
        strategy.report(title="Next words").write("report")

    Flower's own loop, `strategy.start(grid, strategy.arrays, num_rounds)`, gives the same guarantee
    but tolerates fewer faults (see `exchange`). A strategy runs once.

    Args:
        step: the mechanism (`unit="user"`), the server's optimiser and the public loss.
        params: the initial parameters, which must not come from private data.
        delta: δ of the ε in the log and the report.
        users: the nodes that may take part, one per user, in a fixed order; by default, the first
            `mechanism.sampling.num_examples` that connect.
        public: as in `mirrordp.train`; needed if α < 1.
        alpha: as in `mirrordp.train`.
        num_steps: the number of rounds; by default, the number that the mechanism was made for.
        participation_is_seen: state ε for an observer who sees who takes part, with q = 1.
        reply_timeout: the number of seconds after which a round continues without missing replies.
        round_seconds: the number of seconds from the beginning of one round to that of the next.
            Without it a round ends with its last reply, so that users who look at the clock learn
            how long others train. It needs `run`, and must be longer than `reply_timeout`.
        spend: a `Ledger`, which composes several runs that are fixed beforehand, or a `Budget` made
            with `unit="user"` and opened with its data. The server has no rows, so this data is a
            file that lists who is enrolled. A budget refuses a run that does not fit before any
            user is asked.
        seed: makes sampling and noise reproducible, so the result must not be released.

    Attributes:
        state: a `FederatedState`, whose noise state is secret.
        ledger: what was charged; with a budget, what this run was charged.
        charged_steps: the number of rounds that read private data.
        unprivatized_replies: how many replies were accepted, dropped (and why) or missing. Not
            covered by the guarantee, so for the operator only.
    """

    def __reduce__(self):
        raise TypeError(
            "a PrivateStrategy cannot be copied: its copies would add the same noise to other "
            "sums. Make another one."
        )

    def __init__(
        self,
        step: FederatedStep,
        params: Params,
        *,
        delta: float,
        users: Sequence[int] | None = None,
        public: PublicClients | PublicData | None = None,
        alpha: float | Sequence[float] | AlphaSchedule = 1.0,
        num_steps: int | None = None,
        participation_is_seen: bool = False,
        reply_timeout: float = 3600.0,
        round_seconds: float | None = None,
        spend: Ledger | Budget | None = None,
        seed: int | None = None,
    ):
        _validate.instance_of(FederatedStep, step=step)
        _validate.open_unit_interval(delta=delta)
        _validate.positive(reply_timeout=reply_timeout)
        if round_seconds is not None:
            _validate.positive(round_seconds=round_seconds)
            if round_seconds <= reply_timeout:
                raise ValueError(
                    f"round_seconds must be longer than reply_timeout, {reply_timeout:g}, got "
                    f"{round_seconds:g}. Leave time for the server's own step."
                )
        mechanism = step.mechanism
        if isinstance(mechanism.sampling, FixedSizeSampling) and not participation_is_seen:
            raise ValueError(
                "with cohorts of a fixed size, users together know who else took part, so that "
                "sampling does not amplify their privacy against each other, got "
                "participation_is_seen=False. Pass participation_is_seen=True, or use "
                "PoissonSampling."
            )
        check_spend(mechanism, spend, None)
        total = mechanism.num_steps if num_steps is None else num_steps
        _validate.positive_integer(num_steps=total)
        self.alphas = schedules.evaluate(schedules.as_schedule(alpha), total)
        check_charged_steps(self.alphas, mechanism)
        params = jax.tree.map(jnp.asarray, params)
        self._needs_public_grad = needs_public_grad(step, params, has_public=public is not None)
        if public is not None:
            _validate.instance_of((PublicClients, PublicData), public=public)
        elif self._needs_public_grad or (self.alphas < 1).any():
            reason = f"alpha goes down to {float(self.alphas.min()):g}"
            if self._needs_public_grad:
                reason = "the optimizer takes a public gradient"
            raise ValueError(
                f"{reason}, so public data is needed, got none. Pass "
                "public=PublicClients.from_rows(...), or alpha=1 for DP-FedAvg with an optimizer "
                "that takes no public gradient."
            )
        self.budget = spend if isinstance(spend, Budget) else None
        if self.budget is not None:
            self.budget.require_data()
        self.accounted = without_amplification(mechanism) if participation_is_seen else mechanism
        self._is_only_run = not isinstance(spend, Ledger)
        self.ledger = ledger_for(
            mechanism.adjacency,
            spend if isinstance(spend, Ledger) else None,
            mechanism.unit,
            participation_is_seen=participation_is_seen,
        )
        self._covers = (
            "this run"
            if self._is_only_run
            else "everything charged to the ledger, by runs that were fixed beforehand"
        )
        self.step, self.delta, self.seed = step, delta, seed
        self._books = Books(self.accounted, self.budget or self.ledger, seeds=[seed])
        self._admit()
        self.participation_is_seen, self.reply_timeout = participation_is_seen, reply_timeout
        self.round_seconds = round_seconds
        self.charged_steps = 0
        self._spent_after: dict[int, float] = {}
        self.unprivatized_replies: collections.Counter[str] = collections.Counter()
        self._rng, keys = randomness(seed, secure=mechanism.is_secure)
        self._public_key = keys.public
        self.state: FederatedState = step.init(params, keys.noise)
        self._public = None if public is None else jax.device_put(step.records(public))
        self.users: tuple[int, ...] | None = None
        self._cohorts = iter(())
        self._tickets: dict[str, int] = {}
        self._asked = 0
        self._mutex = threading.Lock()
        if users is not None:
            self._fix_users(users)

    def _admit(self) -> None:
        """Raises a BudgetError unless the whole run fits and no other run has the seed."""
        self._books.admit([int((self.alphas > 0).sum())])

    def _fix_users(self, users: Sequence[int]) -> tuple[int, ...]:
        self.users = tuple(int(user) for user in users)
        if len(set(self.users)) != len(self.users):
            raise ValueError("users must be different nodes, got one twice. List each node once.")
        self._cohorts = self.step.mechanism.batches(len(self.users), self._rng)
        return self.users

    def _wait(self, grid: Grid) -> tuple[int, ...]:
        expected = self.step.mechanism.sampling.num_examples
        if expected is None:
            raise ValueError(
                "the mechanism does not say how many users there are, got users=None. Pass the "
                "list of nodes."
            )
        return self._fix_users(wait_for_users(grid, expected))

    @property
    def params(self) -> Params:
        """The model: the average of the iterates if one is kept, else the last iterate."""
        return self.state.params if self.state.average is None else self.state.average

    @property
    def arrays(self) -> ArrayRecord:
        """The current iterate as a record, from which clients start."""
        return to_arrays(self.state.params)

    def run(
        self, grid: Grid, *, on_step: Callable[["PrivateStrategy"], None] | None = None
    ) -> Params:
        """Waits for the users, takes all rounds, and returns the model.

        Args:
            grid: Flower's grid, as a `ServerApp` receives it.
            on_step: called with the strategy after each round, for instance to evaluate
                `strategy.params` on public rows.
        """
        self.summary()
        for number in range(1, len(self.alphas) + 1):
            begun = time.monotonic()
            messages = self.configure_train(number, self.arrays, ConfigRecord(), grid)
            self.aggregate_train(number, exchange(grid, messages, self.reply_timeout))
            if on_step is not None:
                on_step(self)
            if self.round_seconds is not None:
                left = begun + self.round_seconds - time.monotonic()
                if left < 0:
                    _log.warning("%s round %d took %.1f s too long", _OPERATOR, number, -left)
                time.sleep(max(left, 0))
        return self.params

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Charges the round, draws its cohort and returns the messages to it; none if α = 0."""
        if server_round != int(self.state.step) + 1 or server_round > len(self.alphas):
            raise ValueError(
                f"expected round {int(self.state.step) + 1} of {len(self.alphas)}, got "
                f"{server_round}. A strategy runs once: make another with the same spend=."
            )
        if server_round == self._asked and self.step.mechanism.noise.num_bands > 1:
            raise ValueError(
                f"round {server_round} was asked for twice: with correlated noise, a second cohort "
                "in one round would move users' turns closer together than accounting assumes. "
                "Make another strategy with the same spend=."
            )
        if arrays != self.arrays:
            raise ValueError(
                "a round starts from strategy.arrays, and the first one from the params that the "
                "strategy was made with, got other arrays. Pass strategy.arrays."
            )
        users = self.users or self._wait(grid)
        if server_round == 1:
            # The budget may have been charged since the strategy was made.
            self._admit()
            self._books.claim()
        self._tickets = {}
        if self.alphas[server_round - 1] == 0:
            return []
        charged = self.charged_steps
        self._books.charge([charged], [charged + 1])
        if self.budget is not None:
            # A budget states no ε of this run alone.
            self.ledger.charge(self.accounted.event_between(charged, charged + 1))
        self.charged_steps += 1
        # To adapt the clip norm, the server has to see whether a norm is above C.
        slack = 1.0 if self.step.adaptive_clip is None else 2.0
        clip_norm = slack * float(self.state.clip_norm)
        messages = []
        self._asked = server_round
        cohort = np.asarray(next(self._cohorts))
        for user in cohort[cohort != PADDING].tolist():
            # Only the node that received this message knows its ticket, whereas the metadata of a
            # reply is whatever the sender claims.
            ticket = secrets.token_hex(16)
            self._tickets[ticket] = user
            content = {TICKET: ticket, CLIP_NORM: clip_norm, ROUND: server_round}
            messages.append(
                Message(
                    RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, **content})}),
                    dst_node_id=users[user],
                    message_type=MessageType.TRAIN,
                    ttl=self.reply_timeout,
                )
            )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Adds up the valid replies, adds noise, and takes the server's step.

        Everything returned may be released: it follows from the noisy sums and public data.
        """
        # Two threads in one round would add its noise to two sums.
        with self._mutex:
            return self._aggregated(server_round, replies)

    def _aggregated(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        if server_round != int(self.state.step) + 1:
            raise ValueError(
                f"expected the replies of round {int(self.state.step) + 1}, got {server_round}."
            )
        alpha = self.alphas[server_round - 1]
        total = self.private_sum(replies)
        public_gradient = None
        reads_public = alpha < 1 or self._needs_public_grad
        if self._public is not None:
            public_gradient = PublicGradient(total.total.zeros().delta, jnp.full([], jnp.nan))
            if reads_public:
                key = jax.random.fold_in(self._public_key, self.state.step)
                public_gradient = _public_grad(self.step, self.state, self._public, key)
        self.state, info = _finish(self.step, self.state, total, public_gradient, alpha)
        spent = self.spent()
        self._spent_after[self.charged_steps] = spent.epsilon
        _log.info(
            "round %d: epsilon %s at delta %g, unit: user, %s, %s",
            server_round, upwards(spent.epsilon), spent.delta, spent.adjacency.value, self._against,
        )  # fmt: skip
        metrics: dict[str, MetricRecordValues] = {
            "epsilon": spent.epsilon,
            "delta": spent.delta,
            "alpha": float(alpha),
            "noisy-grad-norm": float(info.noisy_grad_norm),
            "clip-norm": float(info.clip_norm),
        }
        if reads_public:
            metrics["public-loss"] = float(info.public_loss)
        return self.arrays, MetricRecord(metrics)

    def private_sum(self, replies: Iterable[Message]) -> PrivateSum:
        """Returns Σ clip(Δ_k, C) over the valid replies, which is not private yet.

        Formal guarantee: the sum has at most one term for each user of the cohort. Its norm is at
        most C, it depends only on what that user's node was sent and replied, and it is zero unless
        the reply has a finite array of the right shape and dtype for every leaf.
        """
        counts: collections.Counter[str] = collections.Counter()
        answers: dict[int, tuple[str, Message]] = {}
        tickets, seen = self._tickets, set()
        self._tickets = {}
        for reply in replies:
            if reply.has_error():
                counts["failed"] += 1
                continue
            ticket = _ticket(reply)
            if ticket in seen:
                counts["repeated"] += 1
            elif ticket not in tickets:
                counts["unsolicited"] += 1
            else:
                seen.add(ticket)
                answers[tickets[ticket]] = ticket, reply
        total = self.step.zero_sum(self.state)
        for _, (ticket, reply) in sorted(answers.items()):
            try:
                delta = self._read(reply, ticket)
            except ReplyError as error:
                counts[error.reason] += 1
                continue
            total = _add(self.step, total, delta, self.state.clip_norm)
            counts["accepted"] += 1
        counts["missing"] = max(len(tickets) - len(answers) - counts["failed"], 0)
        self.unprivatized_replies.update(counts)
        _log.info(
            "%s replies: %s",
            _OPERATOR,
            ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
            or "none asked for",
        )
        if tickets and not counts["accepted"]:
            _log.warning(
                "%s no valid reply came in time: this round's private gradient is noise alone. "
                "See the logs of the nodes; if they are slow, use a longer reply_timeout",
                _OPERATOR,
            )
        return total

    def _read(self, reply: Message, ticket: str) -> PyTree:
        like = self.step.zero_sum(self.state).total.zeros().delta
        try:
            delta = from_arrays(reply.content.array_records[ARRAYS], like, ticket=ticket)
        except ReplyError:
            raise
        except Exception as error:
            # A hostile client can make the parser fail in ways that cannot be listed.
            raise ReplyError("malformed", "expected a record of arrays.") from error
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(delta)):
            raise ReplyError("not finite", "expected finite numbers.")
        return delta

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Asks no one: what users measure on their rows is not covered by the guarantee."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Returns None, since no one is asked."""
        return None

    def spent(self) -> Epsilon:
        """Returns ε of everything charged so far; with a budget, of this run."""
        return self.ledger.epsilon(
            self.delta, accountant=self.accounted.accountant, orders=self.accounted.orders
        )

    @property
    def _against(self) -> str:
        if self.participation_is_seen:
            return "also against those who see who takes part (q = 1)"
        return "against those who do not see who takes part"

    def report(self, *, results: Mapping[str, Any] | None = None, **options: Any) -> RunReport:
        """Returns the privacy report; its results include ε for an observer of the network.

        `epsilon_over_steps` has ε after each round, as logged. If the ledger is shared with other
        runs, it has a few values of this run alone.

        Args:
            results: released quantities, such as the accuracy on public rows.
            **options: `title`, `tuning` and other arguments of `RunReport.of`.
        """
        found = dict(results or {})
        if self.step.mechanism.adjacency is not Adjacency.ADD_REMOVE:
            seen = without_amplification(self.step.mechanism)
            found["epsilon_of_this_run_if_participation_is_seen"] = seen.epsilon(
                self.delta, num_steps=self.charged_steps
            )
        made = RunReport.of(
            self.accounted,
            self.delta,
            charged_steps=self.charged_steps,
            spend=self.ledger if self.budget is None else self.budget,
            seed=self.seed,
            seeded=self.seed is not None,
            results=found,
            **(
                {
                    "scope": f"{self._covers}, {self._against}",
                    "shown_without_protection": ["counts of replies, in the server's log"],
                }
                | options
            ),
        )
        if not (self._is_only_run and self._spent_after):
            return made
        return dataclasses.replace(made, epsilon_over_steps=tuple(self._spent_after.items()))

    def summary(self) -> None:
        """Logs the cost of the whole run."""
        mechanism = self.accounted
        _log.info(
            "%d rounds, expected cohort %g, clip norm %g, noise multiplier %.4g: epsilon %s at "
            "delta %g when done, %s",
            len(self.alphas),
            mechanism.sampling.expected_batch_size,
            mechanism.l2_clip_norm,
            mechanism.noise_multiplier,
            upwards(mechanism.epsilon(self.delta, num_steps=int((self.alphas > 0).sum()))),
            self.delta,
            self._against,
        )


def _ticket(reply: Message) -> str | None:
    """Returns the ticket of a reply, or None if it has none."""
    try:
        ticket = reply.content.config_records[CONFIG][TICKET]
    except Exception:
        return None
    return ticket if isinstance(ticket, str) else None


@functools.partial(jax.jit, static_argnames="step")
def _add(step: FederatedStep, total: PrivateSum, delta: PyTree, clip_norm: jax.Array):
    contribution, _ = step.contribution(delta, clip_norm)
    return total + step.one_sum(contribution)


@functools.partial(jax.jit, static_argnames="step")
def _public_grad(step: FederatedStep, state: FederatedState, public: Any, key: Any):
    return step.public_grad(state, public, key)


@functools.partial(jax.jit, static_argnames="step")
def _finish(
    step: FederatedStep,
    state: FederatedState,
    total: PrivateSum,
    public_gradient: PublicGradient | None,
    alpha: Any,
):
    return step.finish(state, total, public_gradient, alpha)


def client_app(
    train: Callable[[Params, Any], Params],
    load: Callable[[Context], Any],
    like: Params,
    *,
    trainable: PyTree | None = None,
) -> ClientApp:
    """Returns the app of a user's node, which trains on its own rows and sends the clipped delta.

        Δ = θ − train(θ, load(context)),    reply clip(Δ, C)

    Nothing else leaves the node: neither a loss nor the number of rows. If `train` or `load` raises
    an exception, it is logged on the node. The reply only says that training failed, since the
    exception's message may quote a row.

    Args:
        train: `(params, data) -> params`; `local_sgd` makes one from a loss function.
        load: returns the user's data, given Flower's context (`context.node_config`).
        like: a tree with the model's structure, shapes and dtypes.
        trainable: as in the server's `FederatedStep`; only these leaves are sent.
    """
    app, chosen = ClientApp(), Trainable.of(trainable)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        config = message.content.config_records[CONFIG]
        params = from_arrays(message.content.array_records[ARRAYS], like)
        try:
            trained = train(params, load(context))
            clipped = _clipped_difference(
                chosen.part(params),
                chosen.part(trained),
                cast(float, config[CLIP_NORM]),
            )
        except (Exception, SystemExit):
            # Flower would send the exception's message to the server.
            _log.exception("Training failed on this node; the server is told nothing more")
            return Message(Error(_FAILED, "training failed; see the node's log"), reply_to=message)
        ticket = cast(str, config[TICKET])
        arrays = to_arrays(clipped, ticket=ticket)
        content = {ARRAYS: arrays, CONFIG: ConfigRecord({TICKET: ticket})}
        return Message(RecordDict(content), reply_to=message)

    return app


@jax.jit
def _clipped_difference(old: PyTree, new: PyTree, clip_norm: Any) -> PyTree:
    def difference(before, after):
        wide = jnp.promote_types(before.dtype, jnp.float32)
        return before.astype(wide) - after.astype(wide)

    return clip_delta(jax.tree.map(difference, old, new), clip_norm).delta


def local_sgd(
    loss_fn: LossFn,
    *,
    learning_rate: float,
    batch_size: int = 16,
    epochs: int = 1,
    max_examples: int = 256,
    trainable: PyTree | None = None,
) -> Callable[[Params, Any], Params]:
    """Returns a function `(params, rows) -> params` that takes the paper's local SGD steps.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, or with a random key as third argument.
        learning_rate: η.
        batch_size: the number of rows in a local batch.
        epochs: how often each row is used.
        max_examples: a user with more rows uses a new random choice of this many in each round.
        trainable: a tree of booleans over the parameters, or a prefix of one.
    """
    _validate.positive_integer(batch_size=batch_size, epochs=epochs, max_examples=max_examples)
    chosen = Trainable.of(trainable)
    update = jax.jit(
        functools.partial(
            local_update,
            loss_fn,
            learning_rate=learning_rate,
            batch_size=batch_size,
            epochs=epochs,
            trainable=trainable,
        )
    )

    def train(params: Params, rows: Any) -> Params:
        params = jax.tree.map(jnp.asarray, params)
        num_rows = len(jax.tree.leaves(rows)[0])
        if num_rows == 0:
            return params
        if num_rows > max_examples:
            kept = np.random.default_rng().choice(num_rows, max_examples, replace=False)
            rows, num_rows = jax.tree.map(lambda leaf: np.asarray(leaf)[kept], rows), max_examples
        delta, _ = update(params, rows, num_rows, jax.random.key(secrets.randbits(32)))
        part = jax.tree.map(lambda old, d: old - d, chosen.part(params), delta)
        return chosen.merge(part, params)

    return train
