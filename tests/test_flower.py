"""The server's side of Flower runs, without processes: what replies can and cannot do."""

import collections
import copy
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import pickle
import re
import threading
import time
import warnings

import pytest

if importlib.util.find_spec("flwr") is None and "MIRRORDP_REQUIRE_FLOWER" not in os.environ:
    # CI sets the variable, and a missing Flower fails there.
    reason = "Flower is an extra that is not installed (mirrordp[flower]); CI runs these with it"
    pytest.skip(reason, allow_module_level=True)
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
    import flwr.serverapp.strategy  # noqa: F401

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity

import mirrordp
from mirrordp import Adjacency, Mechanism, PoissonSampling, PublicData
from mirrordp.integrations import flower
from mirrordp.privacy import (
    Accountant,
    BandedNoise,
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullBatch,
)
from mirrordp.privacy.accounting import UnsupportedError
from mirrordp.spending.budget import BudgetError
from mirrordp.training import federated
from tests import tools

CLIP, USERS, ROUNDS, DELTA = 0.5, 6, 3, 1e-3
NODES = [900 + user for user in range(USERS)]
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros([])}
# Messages can be made inside a run only.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def loss_fn(params, example):
    return tools.squared_distance(params["w"] + params["b"], example)


def mechanism(**options):
    defaults = {
        "sampling": FullBatch.of(USERS),
        "l2_clip_norm": CLIP,
        "noise_multiplier": 0.0,
        "num_steps": ROUNDS,
        "unit": "user",
    }
    return Mechanism(**(defaults | options))


def strategy(*, step=None, params=PARAMS, mech=None, **options):
    step = federated.FederatedStep(
        **(
            {
                "loss_fn": loss_fn,
                "mechanism": mechanism() if mech is None else mech,
                "optimizer": federated.server_sgd(1.0, 0.0),
                "client_learning_rate": 0.1,
            }
            | (step or {})
        )
    )
    defaults = {"delta": DELTA, "users": NODES, "seed": 1, "reply_timeout": 5.0}
    return flower.PrivateStrategy(step, params, **(defaults | options))


class FakeGrid:
    """Keeps messages, and answers each with what `answer(message)` returns."""

    def __init__(self, answer=lambda message: []):
        self.answer, self.sent, self.replies = answer, [], {}

    def get_node_ids(self):
        return list(reversed(NODES))

    def push_messages(self, messages):
        names = []
        for message in messages:
            names.append(str(len(self.sent)))
            message.metadata.__dict__["_message_id"] = names[-1]
            self.sent.append(message)
            self.replies[names[-1]] = self.answer(message)
        return names

    def pull_messages(self, message_ids):
        return [reply for name in message_ids for reply in self.replies.pop(name, [])]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


def ask(server, number=1, grid=None):
    return server.configure_train(number, server.arrays, ConfigRecord(), grid or FakeGrid())


def delta(value=0.1):
    return {"b": np.float32(value), "w": np.full(3, value, np.float32)}


def masked(array, ticket, name):
    """What a node of ours makes of an array before it is sent."""
    stream = hashlib.shake_128(f"mirrordp {ticket} {name}".encode()).digest(len(array.data))
    data = bytes(one ^ other for one, other in zip(array.data, stream, strict=True))
    return Array(array.dtype, array.shape, array.stype, data)


def reply(message, tree=None, *, ticket=None, arrays=None, **records):
    if arrays is None:
        arrays = flower.to_arrays(delta() if tree is None else tree)
    own = message.content.config_records["config"]["ticket"]
    if isinstance(arrays, ArrayRecord):
        arrays = ArrayRecord({name: masked(array, own, name) for name, array in arrays.items()})
    shown = ConfigRecord({"ticket": own if ticket is None else ticket})
    return Message(RecordDict({"arrays": arrays, "config": shown} | records), reply_to=message)


def one_round(answer, server=None, number=1):
    """The server after a round in which `answer(place, message)` gives the replies of each user."""
    server = server or strategy()
    messages = ask(server, number)
    replies = [found for place, m in enumerate(messages) for found in answer(place, m)]
    server.aggregate_train(number, replies)
    return server


def honest(place, message):
    return [reply(message, delta(0.01 * (place + 1)))]


def wide(tree):
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def raw(data, *, shape=(3,), dtype="float32", stype="numpy.ndarray"):
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


def with_w(array, name="['w']"):
    record = flower.to_arrays(delta())
    del record["['w']"]
    record[name] = array
    return record


def npy(header, numbers=b"\0" * 12):
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + numbers


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n"
HOSTILE = {
    "not finite": lambda m: reply(m, {"b": np.float32(np.nan), "w": np.zeros(3, np.float32)}),
    "infinite": lambda m: reply(m, {"b": np.float32(0), "w": np.full(3, -np.inf, np.float32)}),
    "wrong shape": lambda m: reply(m, {"b": np.float32(0), "w": np.zeros((3, 1), np.float32)}),
    "scalar": lambda m: reply(m, {"b": np.zeros(1, np.float32), "w": np.zeros(3, np.float32)}),
    "wrong dtype": lambda m: reply(m, {"b": np.float32(0), "w": np.zeros(3, np.float64)}),
    "other byte order": lambda m: reply(m, arrays=with_w(Array(np.zeros(3, ">f4")))),
    "text": lambda m: reply(m, arrays=with_w(Array(np.array(["a", "b", "c"])))),
    "oversized": lambda m: reply(m, {"b": np.float32(0), "w": np.zeros(2000, np.float32)}),
    "padded": lambda m: reply(m, arrays=with_w(raw(npy(HUGE) + b"\0" * 10_000))),
    "header lies": lambda m: reply(m, arrays=with_w(raw(npy(HUGE)))),
    "header is code": lambda m: reply(m, arrays=with_w(raw(npy("__import__('os')")))),
    "no header": lambda m: reply(m, arrays=with_w(raw(b"\x80\x04pickle"))),
    "zip": lambda m: reply(m, arrays=with_w(raw(b"PK\x03\x04" + b"\0" * 40))),
    "cut off": lambda m: reply(m, arrays=with_w(raw(Array(np.zeros(3, np.float32)).data[:-4]))),
    "other encoding": lambda m: reply(m, arrays=with_w(raw(b"", stype="torch"))),
    "other name": lambda m: reply(m, arrays=with_w(Array(np.zeros(3, np.float32)), "w")),
    "leaf missing": lambda m: reply(m, {"b": np.float32(0)}),
    "leaf too many": lambda m: reply(m, delta() | {"c": np.float32(0)}),
    "nothing": lambda m: reply(m, arrays=ArrayRecord()),
    "no record": lambda m: Message(
        RecordDict({"config": m.content.config_records["config"]}), reply_to=m
    ),
    "record of another kind": lambda m: reply(m, arrays=MetricRecord({"w": 1.0})),
    "no ticket": lambda m: Message(RecordDict({"arrays": flower.to_arrays(delta())}), reply_to=m),
    "ticket of another kind": lambda m: reply(m, ticket=3),
    "wrong ticket": lambda m: reply(m, ticket="0" * 32),
    "error": lambda m: Message(Error(1, "reason"), reply_to=m),
}


def test_a_round_is_the_mean_of_clipped_deltas():
    sizes = [0.001, 0.1, 1.0, 100.0, 0.0, 1e30]
    server = one_round(lambda place, m: [reply(m, delta(sizes[place]))])
    expected = sum(wide(federated.clip_delta(delta(size), CLIP).delta) for size in sizes)
    np.testing.assert_allclose(wide(server.params), -expected / USERS, rtol=1e-5)
    assert server.unprivatized_replies["accepted"] == USERS


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_in_order_adds_nothing(kind):
    server = one_round(lambda place, m: [HOSTILE[kind](m)] if place == 2 else honest(place, m))
    silent = one_round(lambda place, m: [] if place == 2 else honest(place, m))
    np.testing.assert_array_equal(wide(server.params), wide(silent.params))
    counts = server.unprivatized_replies
    assert counts["accepted"] == USERS - 1
    assert sum(counts.values()) - counts["missing"] == USERS
    names = {"not finite", "wrong shape", "wrong dtype", "oversized", "malformed", "failed"}
    dropped = {name for name in counts if counts[name]} - {"accepted", "missing"}
    assert len(dropped) == 1
    assert dropped <= names | {"unsolicited"}
    if kind in names:
        assert dropped == {kind}


@pytest.mark.parametrize("value", [1e38, -1e38, 1e-3, 7.0, np.nan])
@pytest.mark.parametrize("copies", [1, 5])
def test_one_hostile_client_moves_the_sum_by_at_most_the_clip_norm(value, copies):
    def total(hostile):
        server = strategy()
        messages = ask(server)
        replies = [found for place, m in enumerate(messages[1:]) for found in honest(place, m)]
        return wide(server.private_sum(hostile(messages[0]) + replies).total.floats())

    def hostile(message):
        replies = [reply(message, delta(value)) for _ in range(copies)]
        # Not its own: what it could learn or guess of the others' messages carries no ticket.
        return [*replies, reply(message, delta(value), ticket="f" * 32)]

    assert np.linalg.norm(total(hostile) - total(lambda message: [])) <= CLIP * (1 + 1e-6)


def test_a_repeated_reply_counts_once():
    once = one_round(honest)
    twice = one_round(lambda place, m: 2 * honest(place, m))
    np.testing.assert_array_equal(wide(once.params), wide(twice.params))
    assert twice.unprivatized_replies["repeated"] == USERS


def test_a_late_reply_counts_in_no_other_round():
    server = strategy()
    late = [reply(message) for message in ask(server)]
    server.aggregate_train(1, [])
    ask(server, 2)
    server.aggregate_train(2, late)
    assert server.unprivatized_replies == {"missing": 2 * USERS, "unsolicited": USERS}
    np.testing.assert_array_equal(wide(server.params), 0)


def test_what_users_claim_about_themselves_has_no_weight():
    def boasting(place, message):
        claim = MetricRecord({"num-examples": 10**9, "weight": 1e9})
        return [reply(message, delta(0.01 * (place + 1)), metrics=claim)]

    np.testing.assert_array_equal(wide(one_round(boasting).params), wide(one_round(honest).params))


def some(place, message):
    return honest(place, message) if place < 2 else []


@pytest.mark.parametrize(
    ("answer", "answered"),
    [(lambda place, m: [], 0), (lambda place, m: [HOSTILE["error"](m)], 0), (some, 2)],
    ids=["nobody", "errors", "some"],
)
def test_noise_and_divisor_do_not_depend_on_replies(answer, answered):
    """What differs is what was sent, and nothing of it is left in the next round's noise."""
    noisy = mechanism(noise_multiplier=3.0)
    first, second = strategy(mech=noisy), strategy(mech=noisy)
    one_round(honest, first), one_round(answer, second)
    lost = sum(wide(delta(0.01 * (k + 1))) for k in range(answered, USERS))
    np.testing.assert_allclose(
        wide(second.params) - wide(first.params), lost / USERS, rtol=1e-4, atol=1e-6
    )
    for server in (first, second):
        server.state = server.state._replace(params=PARAMS)
        one_round(lambda place, m: [], server, 2)
    np.testing.assert_array_equal(wide(first.params), wide(second.params))
    assert first.spent() == second.spent()


def test_dropped_replies_leave_the_same_bits():
    noisy = mechanism(noise_multiplier=3.0)
    hostile = one_round(lambda place, m: [HOSTILE["not finite"](m)], strategy(mech=noisy))
    nobody = one_round(lambda place, m: [], strategy(mech=noisy))
    np.testing.assert_array_equal(wide(hostile.params), wide(nobody.params))
    assert np.abs(wide(nobody.params)).min() > 0


def test_a_round_is_charged_before_anything_is_sent():
    noisy = mechanism(noise_multiplier=2.0)
    server = strategy(mech=noisy)
    seen = []

    def broken(message):
        seen.append(server.spent().epsilon)
        raise ConnectionError("the network is gone")

    with pytest.raises(ConnectionError):
        server.run(FakeGrid(broken))
    assert seen == [noisy.epsilon(DELTA, num_steps=1)]
    assert server.spent().epsilon == noisy.epsilon(DELTA, num_steps=1)


def test_secure_noise():
    secure = mechanism(
        sampling=PoissonSampling.for_batch_size(3, num_examples=USERS),
        noise=mirrordp.SecureGaussianNoise(num_params=4),
        noise_multiplier=1.0,
        accountant=Accountant.RDP,
    )
    first, second = (one_round(honest, strategy(mech=secure, seed=None)) for _ in range(2))
    assert np.all(wide(first.params) != wide(second.params))
    with pytest.raises(ValueError, match="seed"):
        strategy(mech=secure, seed=1)


def test_a_crash_leaves_what_was_sent_charged(tmp_path):
    noisy = mechanism(noise_multiplier=2.0)
    with mirrordp.FileLedger.create(tmp_path / "ledger", noisy.adjacency) as ledger:
        ask(strategy(mech=noisy, spend=ledger))
    found = mirrordp.FileLedger.read(tmp_path / "ledger").epsilon(DELTA)
    assert found.epsilon == noisy.epsilon(DELTA, num_steps=1)


@pytest.fixture
def enrolled(tmp_path):
    """A file that lists the users, and a budget bound to it."""
    path = tmp_path / "users.csv"
    path.write_text("".join(f"{node}\n" for node in NODES))
    with mirrordp.Budget.create(
        tmp_path / "budget", epsilon=3.0, delta=DELTA, data=path, unit="user"
    ) as budget:
        yield path, budget


class TestBudget:
    """Runs on one budget, each chosen after the ones before it were seen."""

    def test_a_round_is_charged_before_anything_is_sent(self, enrolled):
        _, budget = enrolled
        noisy = mechanism(noise_multiplier=5.0)
        server = strategy(mech=noisy, spend=budget)
        on_disk = []

        def broken(message):
            on_disk.append(mirrordp.FileLedger.read(budget.folder / "ledger.jsonl").event)
            raise ConnectionError("the network is gone")

        with pytest.raises(ConnectionError):
            server.run(FakeGrid(broken))
        assert on_disk == [noisy.event_between(0, 1)]
        assert budget.status.used > 0

    def test_a_run_that_does_not_fit_is_refused_before_anybody_is_asked(self, enrolled):
        _, budget = enrolled
        costly = mechanism(noise_multiplier=2.5)
        late = strategy(mech=costly, reply_timeout=0.01, spend=budget, seed=2)
        grid = FakeGrid()
        strategy(mech=costly, reply_timeout=0.01, spend=budget).run(grid)
        sent, position = len(grid.sent), budget.ledger.position
        # One round would fit, all of them do not.
        budget.admit(costly, num_steps=1)
        with pytest.raises(BudgetError, match="within the budget"):
            strategy(mech=costly, reply_timeout=0.01, spend=budget, seed=3)
        with pytest.raises(BudgetError, match="within the budget"):
            late.run(grid)
        assert (len(grid.sent), budget.ledger.position) == (sent, position)
        strategy(mech=costly, reply_timeout=0.01, spend=budget, seed=3, num_steps=1).run(grid)

    def test_report_states_the_run_and_the_budget(self, enrolled):
        _, budget = enrolled
        noisy = mechanism(noise_multiplier=5.0)
        for seed in (1, 2):
            server = strategy(mech=noisy, reply_timeout=0.01, spend=budget, seed=seed)
            server.run(FakeGrid())
            report = server.report()
            assert report.epsilon == server.spent().epsilon == noisy.epsilon(DELTA)
            assert "this run" in report.scope
            assert report.ledger["budget"]["runs"] == seed
            assert report.ledger["head"] == budget.ledger.position.head

    def test_an_observer_of_the_network_is_paid_for(self, enrolled):
        _, budget = enrolled
        rare = mechanism(
            sampling=PoissonSampling.for_batch_size(2, num_examples=USERS),
            noise_multiplier=5.0,
            accountant=Accountant.RDP,
        )
        used = []
        for seen in (False, True):
            before = budget.status.used
            server = strategy(mech=rare, spend=budget, seed=int(seen), participation_is_seen=seen)
            one_round(honest, server)
            used.append(budget.status.used - before)
        assert used[1] > 2 * used[0]

    def test_one_seed_for_one_run(self, enrolled):
        _, budget = enrolled
        noisy = mechanism(noise_multiplier=9.0)
        first, second = (strategy(mech=noisy, spend=budget) for _ in range(2))
        one_round(honest, first)
        with pytest.raises(BudgetError, match="seed 1 again"):
            ask(second)
        with pytest.raises(BudgetError, match="seed 1 again"):
            strategy(mech=noisy, spend=budget)
        # A strategy that is in the middle of its run goes on.
        one_round(honest, first, 2)

    def test_other_users_and_other_kinds_are_refused(self, enrolled):
        path, budget = enrolled
        noisy = mechanism(noise_multiplier=5.0)
        replace = mechanism(noise_multiplier=5.0, adjacency=Adjacency.REPLACE)
        with pytest.raises(BudgetError, match="zero-out adjacency"):
            strategy(mech=replace, spend=budget)
        budget.close()
        with (
            mirrordp.Budget.open(budget.folder) as unknown,
            pytest.raises(BudgetError, match="opened with the data"),
        ):
            strategy(mech=noisy, spend=unknown)
        path.write_text("somebody else\n")
        with pytest.raises(BudgetError, match="differs from it"):
            mirrordp.Budget.open(budget.folder, data=path)


def test_a_round_with_nobody_in_it():
    rare = mechanism(
        sampling=PoissonSampling(sampling_prob=1e-9, expected_batch_size=2.0, num_examples=USERS),
        noise_multiplier=1.0,
    )
    server = strategy(mech=rare)
    assert ask(server) == []
    server.aggregate_train(1, [])
    assert server.charged_steps == 1
    assert np.abs(wide(server.params)).min() > 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_strategy_cannot_be_copied(duplicate):
    """Both would add the same noise."""
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(strategy())


def test_cohorts_are_those_of_the_mechanism():
    poisson = mechanism(
        sampling=PoissonSampling.for_batch_size(2, num_examples=USERS), num_steps=40
    )
    server = strategy(mech=poisson)
    found = []
    for number in range(1, 41):
        messages = ask(server, number)
        found.append([m.metadata.dst_node_id - NODES[0] for m in messages])
        server.aggregate_train(number, [])
    rng, _ = mirrordp.training.engine.randomness(1)
    assert found == [draw.tolist() for draw in poisson.batches(USERS, rng)]
    assert len({len(cohort) for cohort in found}) > 2


def test_the_log_never_states_less_than_was_spent():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    try:
        for noise_multiplier in (2.0, 2.3, 2.7):
            mech = mechanism(noise_multiplier=noise_multiplier)
            server = strategy(mech=mech, reply_timeout=0.01)  # nobody replies
            server.run(FakeGrid())
            stated = [float(m[1]) for line in lines if (m := re.search(r"epsilon ([\d.]+)", line))]
            assert min(stated[0], stated[-1]) >= server.spent().epsilon
            lines.clear()
    finally:
        logging.getLogger("flwr").removeHandler(handler)


def test_the_operator_hears_how_many_nodes_are_missing(caplog, monkeypatch):
    """Flower's simulation has two nodes unless told otherwise: eight would be awaited for ever."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    connected = iter([[], [7, 5], [7, 5], [5, 6, 7]])
    grid = FakeGrid()
    monkeypatch.setattr(grid, "get_node_ids", lambda: next(connected))
    with caplog.at_level(logging.INFO, "flwr"):
        assert flower.wait_for_users(grid, 3, poll_interval=0.0) == [5, 6, 7]
    assert [record.getMessage() for record in caplog.records] == [
        "Waiting for 3 nodes, 0 are connected",
        "Waiting for 3 nodes, 2 are connected",
    ]


def test_the_operator_hears_of_a_round_without_replies(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    one_round(some)
    assert "noise alone" not in caplog.text
    server = strategy(public=PublicData(np.ones((1, 3), np.float32)), alpha=[0.0, 1.0, 1.0])
    one_round(honest, server)  # asks nobody
    assert "noise alone" not in caplog.text
    one_round(lambda place, m: [], server, 2)
    assert "not covered by the guarantee] no valid reply came in time" in caplog.text


def test_the_report_holds_epsilon_after_every_round():
    rounds = 11  # more than the points of other reports
    mech = mechanism(noise_multiplier=2.0, accountant=Accountant.RDP, num_steps=rounds)
    ledger = mirrordp.Ledger(mech.adjacency)
    ledger.charge(mech.event)
    for options in ({}, {"spend": ledger}):
        server = strategy(mech=mech, reply_timeout=0.01, **options)
        logged = []
        server.run(FakeGrid(), on_step=lambda own, out=logged: out.append(own.spent().epsilon))
        report = mirrordp.RunReport.from_dict(json.loads(server.report().to_json()))
        assert report.seeded is (server.seed is not None)
        found = dict(report.epsilon_over_steps)
        if options:  # of this run alone, whatever else the ledger holds
            assert found[rounds] == pytest.approx(mech.epsilon(DELTA))
            assert found[rounds] < logged[-1]
        else:
            assert found == dict(enumerate(logged, start=1))
            assert found[3] == pytest.approx(mech.epsilon(DELTA, num_steps=3))


def test_epsilon_without_amplification():
    # RDP, because it is the quicker of the two.
    fast = {"noise_multiplier": 2.0, "accountant": Accountant.RDP}
    poisson = mechanism(sampling=PoissonSampling.for_batch_size(2, num_examples=USERS), **fast)
    everyone = mechanism(**fast)
    hidden, seen = (strategy(mech=poisson, participation_is_seen=s) for s in (False, True))
    for server in (hidden, seen):
        for number in range(1, ROUNDS + 1):
            one_round(honest, server, number)
    assert hidden.spent().epsilon == pytest.approx(poisson.epsilon(DELTA))
    assert seen.spent().epsilon == pytest.approx(everyone.epsilon(DELTA))
    assert seen.spent().epsilon > 1.5 * hidden.spent().epsilon
    # The cohorts and the noise are the same: only the statement differs.
    np.testing.assert_array_equal(wide(hidden.params), wide(seen.params))
    for server, statement in ((hidden, "do not see"), (seen, "q = 1")):
        report = server.report(results={"accuracy": 0.5})
        assert report.epsilon == server.spent().epsilon
        assert report.unit == "user"
        assert statement in report.scope
        name = "epsilon_of_this_run_if_participation_is_seen"
        assert report.results[name] == pytest.approx(everyone.epsilon(DELTA))
        assert "accepted" not in report.to_json()
        assert report.results["accuracy"] == 0.5
    fixed = mechanism(
        sampling=mirrordp.privacy.FixedSizeSampling(batch_size=2, num_examples=USERS),
        adjacency=Adjacency.REPLACE,
        **fast,
    )
    replace = dataclasses.replace(everyone, adjacency=Adjacency.REPLACE)
    assert flower.without_amplification(fixed).epsilon(DELTA) == replace.epsilon(DELTA)
    with pytest.raises(UnsupportedError, match="sees who"):
        flower.without_amplification(
            mechanism(
                sampling=PoissonSampling(sampling_prob=0.1, expected_batch_size=1.0),
                adjacency=Adjacency.ADD_REMOVE,
            )
        )


def test_public_side_and_alpha():
    """At α = 0 nobody is asked and nothing charged; in between the two sides are mixed."""
    rows = PublicData(tools.features(rows=4, seed=3))
    server = strategy(public=rows, alpha=[0.0, 0.25, 1.0])
    assert ask(server) == []
    server.aggregate_train(1, [])
    assert server.charged_steps == 0
    gradient = jax.grad(lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0))(p, rows.arrays)))
    np.testing.assert_allclose(wide(server.params), -wide(gradient(PARAMS)), rtol=1e-5)
    before = server.params
    one_round(honest, server, 2)
    sent = sum(wide(delta(0.01 * (place + 1))) for place in range(USERS)) / USERS
    expected = wide(before) - 0.25 * sent - 0.75 * wide(gradient(before))
    np.testing.assert_allclose(wide(server.params), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="public data is needed"):
        strategy(alpha=0.5)


def _pulled(updates, state, params=None, *, public_grad, **_):
    del params
    return jax.tree.map(lambda own, public: -own - public, updates, public_grad), state


PULLED = optax.GradientTransformationExtraArgs(lambda params: (), _pulled)
"""A server optimiser that takes the public gradient as an argument of its own."""


def test_an_optimizer_that_takes_the_public_gradient():
    """It is given it in every round, also where α = 1 leaves no weight to it in the mixture."""
    rows = PublicData(tools.features(rows=4, seed=3))
    server = strategy(step={"optimizer": PULLED}, public=rows)
    one_round(honest, server)
    sent = sum(wide(delta(0.01 * (place + 1))) for place in range(USERS)) / USERS
    gradient = jax.grad(lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0))(p, rows.arrays)))(PARAMS)
    np.testing.assert_allclose(wide(server.params), -sent - wide(gradient), rtol=1e-4)
    with pytest.raises(ValueError, match="takes a public gradient, so public data is needed"):
        strategy(step={"optimizer": PULLED})


def test_adaptive_clip_sees_norms_above_the_clip_norm():
    clip = mirrordp.training.AdaptiveClip()
    small = one_round(lambda p, m: [reply(m, delta(1e-4))], strategy(step={"adaptive_clip": clip}))
    large = strategy(step={"adaptive_clip": clip})
    messages = ask(large)
    allowed = messages[0].content.config_records["config"]["clip-norm"]
    large.aggregate_train(1, [
        reply(m, federated.clip_delta(delta(9.0), allowed).delta) for m in messages
    ])  # fmt: skip
    assert float(small.state.clip_norm) < CLIP < float(large.state.clip_norm)


def client(train=lambda params, data: params, like=PARAMS, **options):
    return flower.client_app(train, lambda context: context.node_config, like, **options)


CONTEXT = Context(run_id=1, node_id=900, node_config={"k": 2}, state=RecordDict(), run_config={})


def test_server_and_clients_speak_the_same_language():
    """A whole run over a fake grid: waits for nodes, trains, clips on both sides, reports."""

    def train(params, config):
        return jax.tree.map(lambda leaf: leaf - 0.01 * config["k"], params)

    app = client(train)
    server = strategy(users=None)
    rounds = []
    grid = FakeGrid(lambda message: [app(message, CONTEXT)])
    params = server.run(grid, on_step=lambda s: rounds.append(int(s.state.step)))
    assert rounds == [1, 2, 3]
    assert server.users == tuple(NODES)
    np.testing.assert_allclose(wide(params), -0.06, rtol=1e-4)
    assert server.unprivatized_replies == {"accepted": ROUNDS * USERS, "missing": 0}
    with pytest.raises(ValueError, match="runs once"):
        server.run(grid)


def test_a_run_is_what_train_simulates():
    """Same seed, same cohorts, same noise: deployment and simulation are one algorithm."""
    lists = [tools.features(rows=3 if user else 0, seed=user) for user in range(USERS)]
    start = jnp.ones(3)
    common = {"client_learning_rate": 0.3, "client_batch_size": 4, "average": None}
    noisy = mechanism(
        sampling=PoissonSampling.for_batch_size(4, num_examples=USERS),
        noise_multiplier=1.0,
        accountant=Accountant.RDP,
    )
    public = mirrordp.PublicClients.from_users(
        [tools.features(rows=3, seed=50), tools.features(rows=2, seed=51)], max_examples_per_user=4
    )
    optimizer = federated.server_sgd(0.5)
    *_, (simulated, _) = tools.federated_train(
        tools.squared_distance,
        start,
        mirrordp.PrivateClients.from_users(lists, max_examples_per_user=4),
        public,
        mechanism=noisy,
        optimizer=optimizer,
        alpha=[1.0, 0.7, 0.4],
        seed=5,
        users_per_pass=USERS,
        **common,
    )
    train = flower.local_sgd(tools.squared_distance, learning_rate=0.3, batch_size=4)
    app = flower.client_app(train, lambda context: lists[context.node_config["user"]], start)

    def answer(message):
        user = message.metadata.dst_node_id - NODES[0]
        return [app(message, dataclasses.replace(CONTEXT, node_config={"user": user}))]

    server = strategy(
        step=common | {"loss_fn": tools.squared_distance, "optimizer": optimizer},
        params=start,
        mech=noisy,
        public=public,
        alpha=[1.0, 0.7, 0.4],
        seed=5,
    )
    np.testing.assert_allclose(server.run(FakeGrid(answer)), simulated.params, rtol=1e-4)


def test_flowers_own_loop():
    app = client(lambda params, _: jax.tree.map(lambda leaf: leaf - 0.01, params))
    server = strategy()
    grid = FakeGrid(lambda message: [app(message, CONTEXT)])
    result = server.start(grid, server.arrays, num_rounds=ROUNDS)
    np.testing.assert_allclose(wide(flower.from_arrays(result.arrays, PARAMS)), -0.03, rtol=1e-4)
    assert [int(number) for number in result.train_metrics_clientapp] == [1, 2, 3]
    assert set(result.train_metrics_clientapp[3]) == {
        "epsilon", "delta", "alpha", "noisy-grad-norm", "clip-norm",
    }  # fmt: skip
    assert not result.evaluate_metrics_clientapp


def test_another_model_on_the_client_is_named():
    message = ask(strategy())[0]
    with pytest.raises(flower.ReplyError, match="same model"):
        client(like={"w": jnp.zeros(3)})(message, CONTEXT)


def test_clients_clip():
    message = ask(strategy())[0]
    answer = client(lambda params, _: jax.tree.map(lambda p: p + 100, params))(message, CONTEXT)
    ticket = message.content.config_records["config"]["ticket"]
    sent = flower.from_arrays(answer.content.array_records["arrays"], PARAMS, ticket=ticket)
    assert CLIP * (1 - 1e-3) < np.linalg.norm(wide(sent)) <= CLIP
    assert list(answer.content) == ["arrays", "config"]


@pytest.mark.parametrize("params", [jnp.ones(2), {"a": [jnp.ones(2, jnp.bfloat16), jnp.ones(1)]}])
def test_trees_survive_the_journey(params):
    found = flower.from_arrays(flower.to_arrays(params), params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [
        leaf.dtype for leaf in jax.tree.leaves(params)
    ]
    np.testing.assert_array_equal(wide(found), wide(params))


def test_frozen_leaves_are_not_sent():
    mask = {"w": True, "b": False}
    rows = np.ones((5, 3), np.float32)
    train = flower.local_sgd(loss_fn, learning_rate=0.1, batch_size=2, trainable=mask)
    app = client(lambda params, _: train(params, rows), trainable=mask)
    server = strategy(step={"trainable": mask})
    messages = ask(server)
    replies = [app(message, CONTEXT) for message in messages]
    assert list(replies[0].content.array_records["arrays"]) == ["['w']"]
    server.aggregate_train(1, replies)
    assert server.unprivatized_replies["accepted"] == USERS
    assert float(server.params["b"]) == 0
    assert np.all(np.asarray(server.params["w"]) > 0)


def test_local_sgd_is_the_local_update():
    rows = tools.features(rows=4, seed=0)
    found = flower.local_sgd(loss_fn, learning_rate=0.1, batch_size=4)(PARAMS, rows)
    change, _ = federated.local_update(
        loss_fn, PARAMS, rows, 4, jax.random.key(0), learning_rate=0.1, batch_size=4
    )
    np.testing.assert_allclose(wide(found), wide(PARAMS) - wide(change), rtol=1e-5, atol=1e-7)
    nothing = flower.local_sgd(loss_fn, learning_rate=0.1)(PARAMS, rows[:0])
    np.testing.assert_array_equal(wide(nothing), wide(PARAMS))


def test_local_sgd_uses_at_most_so_many_rows():
    """Each row of its own axis: what has moved tells which rows were used."""
    train = flower.local_sgd(lambda w, x: -x @ w, learning_rate=1.0, batch_size=1, max_examples=4)
    moved = [np.asarray(train(jnp.zeros(9), np.eye(9, dtype=np.float32))) for _ in range(20)]
    assert {float(w.sum()) for w in moved} == {4.0}
    assert len({tuple(w) for w in moved}) > 1
    few = train(jnp.zeros(9), np.eye(9, dtype=np.float32)[:3])
    np.testing.assert_array_equal(few, [1] * 3 + [0] * 6)
    with pytest.raises(ValueError, match="max_examples must be a positive integer"):
        flower.local_sgd(loss_fn, learning_rate=0.1, max_examples=0)


def test_one_broken_reply_does_not_cost_the_others_theirs():
    class Broken(FakeGrid):
        def pull_messages(self, message_ids):
            if message_ids == ["2"]:
                raise ValueError("cannot unpack")
            return super().pull_messages(message_ids)

    app = client()
    server = strategy(num_steps=1, reply_timeout=1.0)
    server.run(Broken(lambda message: [app(message, CONTEXT)]))
    assert server.unprivatized_replies == {"accepted": USERS - 1, "missing": 1}


def junk(name=""):
    """What a node may push that answers nobody; Flower hands it to whoever asks for replies."""
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = name
    return message


class Late(FakeGrid):
    """Hands out the reply to message 2 at the third time of asking, and `first` at the first."""

    def __init__(self, answer, first):
        super().__init__(answer)
        self.first, self.asked = first, 0

    def pull_messages(self, message_ids):
        if message_ids != ["2"]:
            return super().pull_messages(message_ids)
        self.asked += 1
        if self.asked == 1:
            return self.first()
        return [] if self.asked == 2 else super().pull_messages(message_ids)


def cannot_be_unpacked():
    raise KeyError("no such object")


@pytest.mark.parametrize(
    ("first", "unsolicited"),
    [(lambda: [junk(), junk()], 2), (cannot_be_unpacked, 0), (lambda: time.sleep(3) or [], 0)],
    ids=["junk", "cannot be unpacked", "stalled"],
)
def test_nobody_can_take_anothers_reply_away(first, unsolicited, monkeypatch):
    monkeypatch.setattr(flower, "_MOMENT", 0.1)
    app = client()
    server = strategy(num_steps=1)
    server.run(Late(lambda message: [app(message, CONTEXT)], first))
    counts = +server.unprivatized_replies
    assert counts == +collections.Counter(accepted=USERS, unsolicited=unsolicited)


def test_the_order_of_arrival_changes_no_bit():
    rng = np.random.default_rng(0)
    sizes = rng.normal(size=USERS) * 10.0 ** rng.integers(-4, 0, USERS)

    def params(order):
        server = strategy()
        replies = [reply(m, delta(size)) for m, size in zip(ask(server), sizes, strict=True)]
        server.aggregate_train(1, [replies[place] for place in order])
        return wide(server.params)

    expected = params(range(USERS))
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(USERS)
        np.testing.assert_array_equal(params(order), expected)


def test_stragglers_are_left_behind():
    app = client()
    server = strategy(num_steps=1, reply_timeout=0.2)
    grid = FakeGrid(lambda m: [] if m.metadata.dst_node_id == 903 else [app(m, CONTEXT)])
    server.run(grid)
    assert server.unprivatized_replies == {"accepted": USERS - 1, "missing": 1}


def test_a_reply_that_never_arrives_holds_nobody_up():
    """Announced and not uploaded: Flower waits for it, for minutes, inside of `pull_messages`."""
    let_go, over = threading.Event(), threading.Event()

    class Stalling(FakeGrid):
        def pull_messages(self, message_ids):
            if message_ids == ["2"]:
                let_go.wait(20)
                over.set()
            return super().pull_messages(message_ids)

    app = client()
    server = strategy(num_steps=1, reply_timeout=1.0)
    server.run(Stalling(lambda message: [app(message, CONTEXT)]))
    assert not over.is_set()
    let_go.set()
    assert server.unprivatized_replies == {"accepted": USERS - 1, "missing": 1}


def test_a_slow_reply_still_counts(monkeypatch):
    """While it is on its way, Flower says that there is none."""

    monkeypatch.setattr(flower, "_MOMENT", 0.1)

    class Slow(FakeGrid):
        asked = 0

        def pull_messages(self, message_ids):
            if message_ids == ["2"]:
                self.asked += 1
                if self.asked > 1:
                    return [Message(Error(3, "unavailable"), reply_to=self.sent[2])]
                time.sleep(4 * flower._MOMENT)
            return super().pull_messages(message_ids)

    app = client()
    server = strategy(num_steps=1, reply_timeout=30.0)
    server.run(Slow(lambda message: [app(message, CONTEXT)]))
    assert server.unprivatized_replies == {"accepted": USERS, "missing": 0}


@pytest.mark.parametrize("where", ["train", "load", "result"])
def test_what_an_exception_says_stays_on_the_node(where):
    def fail(*args):
        raise ValueError("could not read 'a secret of this user'")

    def result(params, data):
        return {"a secret of this user": params["w"]}

    app = flower.client_app(
        {"train": fail, "result": result}.get(where, lambda params, data: params),
        fail if where == "load" else lambda context: None,
        PARAMS,
    )
    server = strategy()
    messages = ask(server)
    answer = app(messages[0], CONTEXT)
    assert answer.has_error()
    assert "secret" not in answer.error.reason
    server.aggregate_train(1, [answer])
    assert server.unprivatized_replies == {"failed": 1, "missing": USERS - 1}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"users": [1, 1]}, "different nodes"),
        ({"users": [1, 2]}, "made for num_examples"),
        ({"num_steps": 9}, "made for 3 steps"),
        ({"spend": mirrordp.Ledger(Adjacency.REPLACE)}, "one adjacency"),
        ({"mech": Mechanism(sampling=FullBatch.of(6), l2_clip_norm=1.0, noise_multiplier=1.0,
                            num_steps=3)}, "one record is one user"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        strategy(**options)


def test_other_initial_arrays_are_refused():
    server = strategy()
    with pytest.raises(ValueError, match=r"strategy\.arrays"):
        server.configure_train(1, flower.to_arrays(delta()), ConfigRecord(), FakeGrid())
    assert server.charged_steps == 0


def test_a_reply_tells_nobody_what_was_computed():
    """Any node may ask SuperLink whether it has an object of a given hash."""
    app = flower.client_app(lambda params, data: params, lambda context: None, PARAMS)
    sent, server = [], strategy()
    for number in (1, 2):
        messages = ask(server, number)
        replies = [app(message, CONTEXT) for message in messages]
        sent += [
            array.data
            for found in replies
            for array in found.content.array_records["arrays"].values()
        ]
        server.aggregate_train(number, replies)
    # All deltas are zero, and all honest replies are accepted, but no two have the same bytes.
    assert server.unprivatized_replies["accepted"] == 2 * len(NODES)
    assert len(set(sent)) == len(sent) == 4 * len(NODES)
    zeros = flower.to_arrays(jax.tree.map(np.zeros_like, PARAMS))
    assert not {array.data for array in zeros.values()} & set(sent)


def test_the_clock_says_nothing_with_rounds_of_one_length(monkeypatch):
    now, slept = [0.0], []

    def pass_by(seconds):
        slept.append(seconds)
        now[0] += seconds

    def answer(grid, messages, timeout):
        now[0] += timeout * len(begun) / 4  # users who train for longer and longer
        return []

    begun = []
    monkeypatch.setattr(flower.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(flower.time, "sleep", pass_by)
    monkeypatch.setattr(flower, "exchange", answer)
    server = strategy(reply_timeout=8.0, round_seconds=10.0)
    real = server.configure_train
    monkeypatch.setattr(
        server, "configure_train", lambda *args: begun.append(now[0]) or real(*args)
    )
    server.run(FakeGrid())
    assert begun == [0.0, 10.0, 20.0]
    assert slept == [8.0, 6.0, 4.0]
    with pytest.raises(ValueError, match="longer than reply_timeout"):
        strategy(reply_timeout=8.0, round_seconds=8.0)


def test_cohorts_of_a_fixed_size_are_seen_by_users_together():
    """Colluders who were asked less often than cohorts are large know that the target was."""
    fixed = Mechanism(
        sampling=FixedSizeSampling(batch_size=2, num_examples=6),
        l2_clip_norm=1.0, noise_multiplier=4.0, num_steps=3, adjacency=Adjacency.REPLACE,
        unit="user",
    )  # fmt: skip
    with pytest.raises(ValueError, match="users together know"):
        strategy(mech=fixed)
    assert isinstance(
        strategy(mech=fixed, participation_is_seen=True).accounted.sampling, FullBatch
    )


def test_correlated_noise_has_one_cohort_in_a_round():
    banded = Mechanism(
        sampling=CyclicPoissonSampling.for_batch_size(2, num_examples=6, num_groups=3),
        l2_clip_norm=1.0, noise_multiplier=4.0, num_steps=3, unit="user",
        noise=BandedNoise.optimal(3, 3),
    )  # fmt: skip
    server = strategy(mech=banded)
    ask(server)
    with pytest.raises(ValueError, match="asked for twice"):
        ask(server)


def test_two_threads_release_one_sum():
    server = strategy()
    replies = [found for m in ask(server) for found in [reply(m)]]
    released, refused = [], []
    start = threading.Barrier(2)

    def aggregate(chosen):
        start.wait()
        try:
            released.append(server.aggregate_train(1, chosen))
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=aggregate, args=(c,)) for c in (replies, [])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(released), len(refused)) == (1, 1)
    assert "expected the replies of round 2" in refused[0]


def test_nodes_that_stall_cost_the_others_nothing():
    let_go = threading.Event()

    class Stalling(FakeGrid):
        def pull_messages(self, message_ids):
            if int(message_ids[0]) < 20:
                let_go.wait(60)
            return super().pull_messages(message_ids)

    grid = Stalling(lambda message: [Message(RecordDict(), reply_to=message)])
    messages = [Message(RecordDict(), dst_node_id=n, message_type="train") for n in range(40)]
    found = flower.exchange(grid, messages, 8.0, poll_interval=0.05)
    let_go.set()
    assert len(found) == 20
