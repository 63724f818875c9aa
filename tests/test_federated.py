"""User-level privacy: users as records, local training, clipping, the step, and its twin."""

import dataclasses
import functools
import math
import runpy
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest

import mirrordp
from mirrordp import Adjacency, Mechanism, PoissonSampling, PrivateClients, PublicClients
from mirrordp.privacy import Accountant, accounting, sampling
from mirrordp.training import AdaptiveClip, engine, federated
from mirrordp.training.step import PublicGradient
from mirrordp.updates import schedules
from tests import tools

CLIP, ROUNDS, USERS, BOUND, BATCH = 0.5, 6, 20, 6, 2
SIZES = [3, 1, 0, 6, 2, 5, 4, 1, 6, 3, 2, 2, 1, 5, 6, 0, 4, 3, 2, 1]
TWIN = Path(__file__).parents[1] / "examples" / "federated_by_hand.py"


def rows(size, seed=0):
    return tools.features(rows=size, seed=seed)


LISTS = [rows(size, seed) for seed, size in enumerate(SIZES)]


def clients(lists=None, kind=PrivateClients, **options):
    return kind.from_users(
        LISTS if lists is None else lists, **({"max_examples_per_user": BOUND} | options)
    )


def mechanism(**options):
    defaults = {
        "sampling": PoissonSampling.for_batch_size(5, num_examples=USERS, capacity=4),
        "l2_clip_norm": CLIP,
        "noise_multiplier": 0.0,
        "num_steps": ROUNDS,
        "unit": "user",
    }
    return Mechanism(**(defaults | options))


EVERYONE = mechanism(sampling=mirrordp.privacy.FullBatch(expected_batch_size=5.0))
PUBLIC = clients([rows(3, 50), rows(5, 51), rows(1, 52)], PublicClients)


def run(private=None, public=None, *, loss=tools.squared_distance, start=None, **options):
    defaults = {
        "mechanism": mechanism(),
        "client_learning_rate": 0.3,
        "client_batch_size": BATCH,
        "optimizer": tools.recorder(ROUNDS),
        "seed": 3,
        "steps_per_call": 3,
        "users_per_pass": 4,
        # Shapes then depend on the number of users alone, and all data sets share one compilation.
        "stream": True,
    }
    return tools.federated_train(
        loss,
        jnp.ones(3) if start is None else start,
        clients() if private is None else private,
        public,
        **(defaults | options),
    )


def sums(*args, **options):
    """Returns B times the pseudo-gradient of each step: the sums of clipped deltas plus noise."""
    state, _ = tools.last(run(*args, **options))
    return 5.0 * np.asarray(state.opt_state[1], np.float64)


class TestClientData:
    def test_rows_and_users_agree(self):
        owners = np.repeat(np.arange(USERS), SIZES)
        order = np.random.default_rng(0).permutation(len(owners))
        shuffled = np.concatenate(LISTS)[order]
        made = PrivateClients.from_rows(
            shuffled, owners[order], users=range(USERS), max_examples_per_user=BOUND
        )
        assert len(made) == USERS
        np.testing.assert_array_equal(made.num_examples, SIZES)
        for user in range(USERS):
            expected = {tuple(row) for row in LISTS[user]}
            assert {tuple(row) for row in made.user(user)} == expected

    def test_without_a_list_of_users_only_owners_of_rows_exist(self):
        made = PrivateClients.from_rows(np.arange(4.0), ["b", "a", "b", "c"])
        assert made.ids == ("a", "b", "c")
        np.testing.assert_array_equal(made.user(1), [0.0, 2.0])

    def test_the_bound_is_enforced_before_anything_is_sampled(self):
        lists = [np.arange(1000.0), np.arange(3.0), np.arange(257.0)]
        made = PrivateClients.from_users(lists)
        np.testing.assert_array_equal(made.num_examples, [256, 3, 256])
        assert len(np.unique(made.user(0))) == 256
        assert len(made.arrays) == 256 + 3 + 256
        # A random subset, not the first rows.
        assert made.user(0).max() > 800

    def test_the_subset_follows_seed_and_name_and_no_other_user(self):
        lists = [np.arange(40.0), np.arange(50.0)]
        make = functools.partial(PrivateClients.from_users, max_examples_per_user=5)
        base = make(lists, ids=["a", "b"])
        np.testing.assert_array_equal(
            base.user(1), make([1e9 * np.ones(90), lists[1]], ids=["x", "b"]).user(1)
        )
        np.testing.assert_array_equal(base.user(1), make([lists[1]], ids=["b"]).user(0))
        assert (base.user(1) != make(lists, ids=["a", "b"], seed=1).user(1)).any()
        assert (base.user(1) != make([lists[1]], ids=["c"]).user(0)).any()

    def test_without_names_the_subset_follows_from_the_users_own_rows(self):
        """Under add-remove adjacency a user's place in the list depends on who else is there."""
        lists = [np.arange(20.0) + 100 * k for k in range(4)]
        make = functools.partial(PrivateClients.from_users, max_examples_per_user=5)
        everyone, without_the_first = make(lists), make(lists[1:])
        for number in range(3):
            np.testing.assert_array_equal(everyone.user(number + 1), without_the_first.user(number))
        chosen = [set(everyone.user(k) - 100 * k) for k in range(4)]
        assert any(a != chosen[0] for a in chosen)

    def test_private_and_public_cannot_be_confused(self):
        with pytest.raises(TypeError, match="private must be PrivateClients"):
            run(PUBLIC)
        with pytest.raises(TypeError, match="public must be PublicClients or PublicData"):
            run(public=clients(), alpha=0.5)
        with pytest.raises(TypeError, match="either private or public"):
            mirrordp.data.ClientData.from_users([np.ones(2)])

    def test_public_rows_must_be_finite_and_private_ones_may_be_anything(self):
        broken = [np.array([[np.nan, 1, 2]], np.float32)]
        with pytest.raises(ValueError, match="PublicClients must be finite"):
            clients(broken, PublicClients)
        assert len(clients(broken)) == 1

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: PrivateClients.from_users([]), "at least one user"),
            (lambda: PrivateClients.from_users([np.zeros((0, 2))]), "at least one row"),
            (lambda: PrivateClients.from_users([np.ones(2)], ids=["a", "b"]), "2 names"),
            (lambda: PrivateClients.from_users([np.ones(1)] * 2, ids=["a", "a"]), "each once"),
            (lambda: PrivateClients.from_users([{"x": [1.0, 2.0]}]), "leading row axis"),
            (lambda: PrivateClients.from_users([{}]), "arrays of the same names"),
            (
                lambda: PrivateClients.from_users([{"x": np.ones(1)}, {"y": np.ones(1)}]),
                "arrays of the same names, got .* for user 1",
            ),
            (
                lambda: PrivateClients.from_users([np.ones((2, 3)), np.ones((2, 4))]),
                "the same shape, got .* for user 1",
            ),
            (lambda: PrivateClients.from_rows(np.ones(3), [1, 2]), "owner of each row"),
            (lambda: PrivateClients.from_rows(np.ones(2), [1, 2], users=[1]), "among them"),
            # A name that comes again would give the rows of one user to another.
            (
                lambda: PrivateClients.from_rows(np.ones(2), ["a", "a"], users=["a", "a", "b"]),
                "list every user once",
            ),
            (lambda: PrivateClients.from_rows(np.ones(3), ["a", None, "b"]), "1 rows whose user"),
            (lambda: PrivateClients.from_rows(np.ones(3), ["a", np.nan, "b"]), "1 rows whose user"),
            (
                lambda: PrivateClients.from_rows(np.ones(2), np.array([np.nan, 3])),
                "is None, NaN or empty",
            ),
            (lambda: PrivateClients.from_rows(np.ones(3), ["a", " ", ""]), "2 rows whose user"),
            (lambda: PrivateClients.from_rows(np.ones(2), np.array([b"a", b""])), "1 rows whose"),
            (
                lambda: PrivateClients.from_rows(
                    np.ones(3), np.ma.array([1, 1, 2], mask=[1, 0, 0])
                ),
                "1 rows whose user",
            ),
            (
                lambda: PrivateClients.from_rows(np.ones(3), pd.array([1, None, 2], dtype="Int64")),
                "1 rows whose user",
            ),
            (
                lambda: PrivateClients.from_rows(np.ones(2), pd.array(["a", None], dtype="string")),
                "1 rows whose user",
            ),
            (
                lambda: PrivateClients.from_rows(np.ones(3), np.array(["NaT", 1, "NaT"], "M8[D]")),
                "2 rows whose user",
            ),
            # One person under two spellings would count twice.
            (
                lambda: PrivateClients.from_users([np.ones(1)] * 3, ids=[3, "3", 3.0]),
                "each once, got 1 different names for 3 users",
            ),
            (
                lambda: PrivateClients.from_users([np.ones(1)] * 2, ids=[b"a", "a"]),
                "each once, got 1 different names for 2 users",
            ),
            (
                lambda: PrivateClients.from_rows(np.ones(1), [3], users=[3, "3"]),
                "list every user once",
            ),
            (
                lambda: PrivateClients.from_users([np.ones(1)] * 2, ids=[float("nan"), None]),
                "every user needs a name, got 2 that are",
            ),
            (
                lambda: PrivateClients.from_rows(np.ones(2), [("A", 7), ("A", float("nan"))]),
                "1 rows whose user",
            ),
            (
                lambda: PrivateClients.from_users([np.ones(1)] * 2, ids=[("A", 7), ("A", 7.0)]),
                "each once, got 1 different names for 2 users",
            ),
            (
                lambda: PrivateClients.from_users([np.ones(1)] * 2, ids=["é ", "e\u0301"]),
                "each once, got 1 different names for 2 users",
            ),
            (lambda: PrivateClients(np.ones(3), np.array([2]), None, 8), "own all rows"),
            (lambda: PrivateClients(np.ones(3), np.array([3.0]), None, 8), "whole numbers"),
            (lambda: PrivateClients(np.ones(3), np.array([3]), None, 2), "may own 0 to 2 rows"),
        ],
    )
    def test_mistakes(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()

    def test_mistakes_in_types(self):
        with pytest.raises(TypeError, match=r"ids=list\(users\)"):
            PrivateClients.from_users({"a": np.ones(2), "b": np.ones(1)})  # pyright: ignore
        mixed = PrivateClients.from_rows(np.ones(2), np.array(["a", 3], object))
        assert mixed.ids == (3, "a")

    def test_owners_are_found_under_another_type(self):
        made = PrivateClients.from_rows(np.arange(3), ["2", "1", "2"], users=range(4))
        np.testing.assert_array_equal(made.num_examples, [0, 1, 2, 0])
        np.testing.assert_array_equal(made.user(2), [0, 2])
        assert made.ids == (0, 1, 2, 3)

    def test_spellings_of_one_name_are_one_user(self):
        made = PrivateClients.from_rows(np.arange(4), np.array(["a", "b", "a ", " a"]))
        np.testing.assert_array_equal(made.num_examples, [3, 1])

    def test_counts_of_rows_are_its_own(self):
        counts = np.array([2, 1], np.int32)
        made = PrivateClients(np.arange(3), counts, None, 8)
        counts[:] = [1, 2]
        np.testing.assert_array_equal(made.num_examples, [2, 1])

    def test_no_user_shifts_the_rows_of_another(self):
        """Arrays of unequal length whose totals agree: labels of one user on rows of another."""
        users = [{"x": np.ones(2), "y": np.ones(3)}, {"x": np.ones(3), "y": np.ones(2)}]
        with pytest.raises(ValueError, match=r"same number of rows, got \[2, 3\] for user 0"):
            PrivateClients.from_users(users)

    def test_no_user_changes_the_type_of_anothers_rows(self):
        numbers, none = np.array([1, 2], np.int32), np.zeros(0)
        made = PrivateClients.from_users([none, numbers, none])
        assert made.arrays.dtype == np.int32
        np.testing.assert_array_equal(made.num_examples, [0, 2, 0])
        with pytest.raises(TypeError, match=r"the same dtypes, got .* for user 2"):
            PrivateClients.from_users([none, numbers, np.array([0.5])])

    @pytest.mark.parametrize("name", ["3", 3.0, b"3", np.int64(3)])
    def test_a_number_and_its_text_are_one_name(self, name):
        public = clients([rows(2, 9)], PublicClients, ids=[name])
        with pytest.warns(mirrordp.data.UnprotectedWarning):
            mask = mirrordp.data.excluded_users(clients(ids=range(USERS)), public)
        assert np.flatnonzero(mask).tolist() == [3]

    def test_a_user_on_both_sides_is_dropped_or_refused(self):
        names = [f"user {number}" for number in range(USERS)]
        private = clients(ids=names)
        public = clients([rows(2, 9)], PublicClients, ids=["user 3"])
        with pytest.warns(
            mirrordp.data.UnprotectedWarning, match="1 private users are also public"
        ):
            mixed = sums(private, public, alpha=0.5, scale_noise=False)
        without = [np.zeros((0, 3), np.float32) if n == 3 else x for n, x in enumerate(LISTS)]
        expected = sums(clients(without), public, alpha=0.5, scale_noise=False)
        np.testing.assert_allclose(mixed, expected, atol=1e-6)
        with pytest.raises(ValueError, match=r"overlap=Overlap\.REFUSE allows none"):
            run(private, public, alpha=0.5, overlap=mirrordp.data.Overlap.REFUSE)


clip_delta = jax.jit(federated.clip_delta)


class TestClipDelta:
    @pytest.mark.parametrize("size", [1, 7, 1_000_000])
    @pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4, 1e19, 3e38])
    def test_the_norm_of_float32_entries_never_exceeds_the_bound(self, size, scale):
        rng = np.random.default_rng(size)
        for delta in (rng.normal(size=size), np.ones(size)):
            with np.errstate(over="ignore"):
                scaled = np.clip(delta * scale, -3e38, 3e38).astype(np.float32)
            for clip in (0.3, 1.0):
                result = clip_delta({"a": scaled[: size // 2], "b": scaled[size // 2 :]}, clip)
                exact = np.sqrt(
                    sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(result.delta))
                )
                assert exact <= clip
                own = np.linalg.norm(np.float64(scaled))
                if scale > 1e30 and exact == 0:
                    continue  # in units of C it is infinite
                assert exact == pytest.approx(min(own, clip), rel=2e-4)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_zero(self, bad):
        result = federated.clip_delta({"a": jnp.ones(3), "b": jnp.array([1.0, bad])}, 1.0)
        assert not result.unprivatized_is_finite
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(result.delta))

    def test_a_short_delta_is_left_alone(self):
        delta = np.array([0.3, -0.1], np.float32)
        np.testing.assert_allclose(federated.clip_delta(delta, 1.0).delta, delta, rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Local:
    """Reference local SGD on ½‖θ − x‖² in closed form: every batch moves θ towards its mean."""

    rate: float = 0.3

    def delta(self, x, order, epochs=1):
        theta = np.ones(3)
        for epoch in range(epochs):
            own = x[order[epoch]]
            for start in range(0, len(own), BATCH):
                theta = theta - self.rate * (theta - own[start : start + BATCH].mean(axis=0))
        return np.ones(3) - theta


local_update = jax.jit(
    functools.partial(
        federated.local_update,
        tools.squared_distance,
        learning_rate=0.3,
        batch_size=BATCH,
        epochs=2,
    )
)
local_order = jax.jit(federated.local_order, static_argnums=1)


class TestLocalUpdate:
    @pytest.mark.parametrize("size", [0, 1, 2, 5, 6])
    def test_equals_plain_sgd(self, size):
        key = jax.random.key(size)
        x = rows(size, 3)
        padded = np.full((BOUND, 3), np.nan, np.float32)  # padding must never matter
        padded[:size] = x
        delta, loss = local_update(jnp.ones(3), padded, size, key)
        order = [
            np.asarray(local_order(jax.random.split(part)[0], BOUND, size))[:size]
            for part in jax.random.split(key, 2)
        ]
        assert all(sorted(part) == list(range(size)) for part in order)
        np.testing.assert_allclose(delta, Local().delta(x, order, 2), atol=1e-6)
        assert np.isfinite(loss)

    def test_rows_are_shuffled_anew_in_every_epoch_and_by_every_key(self):
        orders = {tuple(np.asarray(local_order(jax.random.key(n), 6, 6))) for n in range(40)}
        assert len(orders) > 30

    def test_a_loss_with_a_key_gets_one_per_row(self):
        def loss(params, example, key):
            return jnp.sum(params) * jax.random.uniform(key)

        delta, _ = federated.local_update(
            loss, jnp.ones(2), rows(4), 4, jax.random.key(0), learning_rate=1.0, batch_size=4
        )
        assert 0 < float(delta[0]) < 1

    def test_frozen_parameters_stay(self):
        params = {"a": jnp.ones(3), "b": jnp.ones(3)}
        delta, _ = federated.local_update(
            lambda p, x: tools.squared_distance(p["a"] + p["b"], x), params, rows(4), 4,
            jax.random.key(0), learning_rate=0.1, trainable={"a": True, "b": False},
        )  # fmt: skip
        assert delta["b"] is None
        assert (delta["a"] != 0).all()


class TestStep:
    def test_dp_fedavg_is_the_reference_formula(self):
        """θ ← θ − η_s (Σ clip(Δ_k, C) + noise) / (q n), with the draws of the sampler."""
        made = sums()
        rng, keys = mirrordp.training.engine.randomness(3)
        cohorts = list(mechanism().batches(USERS, rng))
        for number, cohort in enumerate(cohorts):
            expected = np.zeros(3)
            for user in cohort:
                key = jax.random.fold_in(jax.random.fold_in(keys.loss, number), int(user))
                order_key = jax.random.split(jax.random.split(key, 1)[0])[0]
                order = np.asarray(local_order(order_key, BOUND, SIZES[user]))
                delta = Local().delta(LISTS[user], [order[: SIZES[user]]])
                expected += delta * min(1, CLIP / max(np.linalg.norm(delta), 1e-12))
            np.testing.assert_allclose(made[number], expected, atol=2e-4)

    def test_equals_its_plain_loop_twin(self):
        by_hand = runpy.run_path(str(TWIN))["train"]
        options = {
            "mechanism": mechanism(noise_multiplier=1.0),
            "client_learning_rate": 0.3,
            "alpha": [0.7, 0.0, 1.0],
            "num_steps": 3,
            "seed": 8,
        }
        slow = by_hand(
            tools.squared_distance, jnp.ones(3), clients(), PUBLIC, batch_size=BATCH, epochs=2,
            server_learning_rate=0.5, **options,
        )  # fmt: skip
        state, info = tools.last(
            run(public=PUBLIC, local_epochs=2, optimizer=federated.server_sgd(0.5), **options)
        )
        np.testing.assert_allclose(state.params, slow, rtol=1e-4, atol=1e-4)
        assert info.charged_steps == 2

    @pytest.mark.parametrize(
        "options",
        [{"users_per_pass": 1}, {"users_per_pass": 16}, {"steps_per_call": 1}, {"stream": False}],
        ids=str,
    )
    def test_the_layout_changes_nothing(self, options):
        np.testing.assert_allclose(sums(**options), sums(), atol=1e-5)

    def test_nothing_compiles_after_the_first_call(self):
        """It does not matter which users are drawn, nor how many rows they own."""
        iterator = run()
        next(iterator)
        compiled = engine._run_passes._cache_size()
        tools.last(iterator)
        tools.last(run(clients([rows(number % 7, number) for number in range(USERS)]), seed=9))
        assert engine._run_passes._cache_size() == compiled
        # Another mechanism is another program: the count would show it.
        tools.last(run(mechanism=mechanism(l2_clip_norm=0.7)))
        assert engine._run_passes._cache_size() == compiled + 1

    def test_a_run_goes_on_where_it_stopped(self):
        options = {
            "mechanism": mechanism(noise_multiplier=1.0),
            "public": PUBLIC,
            "alpha": [0.5, 0.0, 1.0, 0.5, 0.9, 0.2],
        }
        parts = list(run(**options))
        (half, info), (whole, whole_info) = parts
        assert (info.step, info.charged_steps) == (3, 2)
        ledger = mirrordp.Ledger(Adjacency.ZERO_OUT)
        again, again_info = tools.last(run(**options, state=half, spend=ledger))
        np.testing.assert_array_equal(again.opt_state[1], whole.opt_state[1])
        assert again_info.charged_steps == whole_info.charged_steps == 5
        assert ledger.event.count == 3
        with pytest.raises(ValueError, match="the seed it began with"):
            run(**options, state=half, **{"seed": None})

    def test_weights_do_not_depend_on_the_number_of_rows(self):
        """Users with one row and users with many copies of it pull alike once clipped."""
        far = np.full((1, 3), 100.0, np.float32)
        few = sums(clients([far] * USERS))
        many = sums(clients([np.repeat(far, 1 + n % BOUND, axis=0) for n in range(USERS)]))
        np.testing.assert_allclose(few, many, atol=1e-5)
        assert np.abs(few).max() > CLIP

    def test_the_divisor_is_the_expected_number_of_users(self):
        far = np.full((1, 3), 100.0, np.float32)
        made = sums(clients([far] * 4), mechanism=EVERYONE)
        assert np.linalg.norm(made[0]) == pytest.approx(4 * CLIP, rel=1e-3)

    def test_momentum_is_the_servers_default(self):
        step = federated.FederatedStep(
            tools.squared_distance, mechanism(), client_learning_rate=0.1
        )
        assert step.optimizer is federated.server_sgd()
        optimizers = step.optimizer, optax.sgd(1.0, momentum=0.9), optax.sgd(1.0)
        states = [optimizer.init(jnp.ones(3)) for optimizer in optimizers]
        for gradient in rows(2):
            taken = zip(optimizers, states, strict=True)
            updates, states = zip(
                *[optimizer.update(gradient, state) for optimizer, state in taken], strict=True
            )
            np.testing.assert_array_equal(updates[0], updates[1])
        assert np.abs(updates[0] - updates[2]).max() > 0.05
        first, _ = tools.last(run(optimizer=None, num_steps=1))
        np.testing.assert_allclose(first.params, 1 - sums()[0] / 5, atol=1e-5)

    def test_public_users_and_public_rows(self):
        """At α = 0 the update is the public side alone; a plain table gives ∇Ψ."""
        state, info = tools.last(run(public=PUBLIC, alpha=0.0))
        assert info.charged_steps == 0
        assert 0 < np.linalg.norm(state.opt_state[1][0]) <= CLIP
        state, _ = tools.last(run(public=PUBLIC.examples, alpha=0.0, num_steps=1))
        np.testing.assert_allclose(state.opt_state[1][0], 1 - PUBLIC.arrays.mean(axis=0), atol=1e-6)

    def test_public_users_weigh_alike_however_they_are_laid_out(self):
        """Three users in passes of two: the empty place weighs nothing."""
        in_twos, in_one = (sums(public=PUBLIC, alpha=0.0, users_per_pass=n) for n in (2, 4))
        np.testing.assert_allclose(in_twos, in_one, atol=1e-5)

    def test_some_public_users_per_round(self):
        few = sums(public=PUBLIC, alpha=0.0, public_batch_size=1)
        assert len({tuple(np.round(row, 4)) for row in few}) > 1

    def test_the_noise_has_the_stated_scale(self):
        """σC/B on each coordinate; two thirds and three halves of it would be rejected."""
        start = {"w": jnp.ones(3), "wide": jnp.zeros(4000)}
        state, _ = tools.last(
            run(
                loss=lambda p, x: tools.squared_distance(p["w"], x) + 0.0 * p["wide"].sum(),
                start=start,
                mechanism=mechanism(noise_multiplier=2.0),
            )
        )
        noise = np.asarray(state.opt_state[1]["wide"]) * 5.0
        assert noise.std() == pytest.approx(2.0 * CLIP, rel=0.03)

    @pytest.mark.parametrize("scale_noise", [True, False])
    def test_noise_before_or_after_the_weight(self, scale_noise):
        start = {"w": jnp.ones(3), "wide": jnp.zeros(4000)}
        state, _ = tools.last(
            run(
                loss=lambda p, x: tools.squared_distance(p["w"], x) + 0.0 * p["wide"].sum(),
                start=start,
                public=PUBLIC,
                alpha=0.25,
                mechanism=mechanism(noise_multiplier=2.0),
                scale_noise=scale_noise,
            )
        )
        noise = np.asarray(state.opt_state[1]["wide"]) * 5.0
        weight = 0.25 if scale_noise else 1.0
        assert noise.std() == pytest.approx(weight * 2.0 * CLIP, rel=0.03)

    def test_without_noise_the_place_of_the_weight_does_not_matter(self):
        """α(g + b) and αg + b differ in b alone."""
        before, after = (
            sums(public=PUBLIC, alpha=0.25, scale_noise=scaled) for scaled in (True, False)
        )
        np.testing.assert_allclose(before, after, atol=1e-5)
        assert np.abs(before - sums()).max() > 0.1

    def test_an_alpha_above_one_does_not_enlarge_the_sum_before_its_noise(self):
        """`train` refuses it, but a server that calls `finish` itself may pass anything."""
        step = federated.FederatedStep(
            loss_fn=tools.squared_distance, mechanism=mechanism(), optimizer=optax.sgd(1.0),
            client_learning_rate=0.1, scale_noise=False,
        )  # fmt: skip
        state = step.init(jnp.zeros(3), jax.random.key(0))
        total = step.one_sum(step.contribution(jnp.ones(3), state.clip_norm)[0])
        public = PublicGradient(jnp.zeros(3), jnp.zeros([]))
        finish = jax.jit(step.finish)
        norms = [
            float(finish(state, total, public, alpha)[1].noisy_grad_norm) for alpha in (1.0, 50.0)
        ]
        assert norms[1] == pytest.approx(norms[0])

    def test_every_round_has_noise_of_its_own(self):
        replay = tools.Replay(base=mechanism().sampling, draws=NOBODY)
        made = sums(mechanism=mechanism(sampling=replay, noise_multiplier=1.0))
        assert len(np.unique(made)) == made.size

    def test_unprivatized_values_only_on_request(self):
        _, info = tools.last(run())
        assert info.unprivatized is None
        _, info = tools.last(run(show_unprivatized=True))
        assert info.unprivatized is not None
        assert (info.unprivatized.batch_size > 0).any()
        assert (
            (info.unprivatized.clip_fraction >= 0) & (info.unprivatized.clip_fraction <= 1)
        ).all()

    def test_paper_schedules(self):
        for i in (2, 3, 4, 5, 8):
            values = schedules.evaluate(schedules.cosine(decay_steps=i * 1600 / 2), 1600)
            np.testing.assert_allclose(
                values, np.cos(np.pi * np.arange(1600) / (i * 1600)), atol=1e-6
            )
            assert (values > 0).all()


NOBODY = tuple(() for _ in range(ROUNDS))
# Users that an adversary would be: enormous, opposite, NaN, infinite, tiny, many rows.
EXTREME = [
    np.full((BOUND, 3), 1e18, np.float32),
    np.full((1, 3), -1e18, np.float32),
    np.full((BOUND, 3), 3e38, np.float32),
    np.full((2, 3), np.nan, np.float32),
    np.array([[np.inf, 0, 0]], np.float32),
    np.array([[4.0, 1, 1]], np.float32),
    np.zeros((0, 3), np.float32),
]
SLACK = 1e-5 * CLIP * 20


class TestNeighbours:
    """One user changes the sum of any round by at most C, or 2C when it is replaced."""

    @staticmethod
    def sums_with(rows):
        """The sums where user 0 owns `rows`; the draws of this seed contain it in some rounds."""
        return sums(clients([rows, *LISTS[1:]]), seed=7)

    def distances(self):
        cohorts = mechanism().batches(USERS, mirrordp.training.engine.randomness(7)[0])
        assert 0 < sum(0 in cohort for cohort in cohorts) < ROUNDS
        base = self.sums_with(np.zeros((0, 3), np.float32))
        changed = [self.sums_with(extreme) for extreme in EXTREME]
        assert all(np.isfinite(part).all() for part in changed)
        return [np.linalg.norm(part - base, axis=1).max() for part in changed]

    def test_one_user_with_any_data(self):
        distances = self.distances()
        assert max(distances) <= CLIP + SLACK
        assert max(distances) >= CLIP - 1e-3

    def test_without_clipping_it_fails(self, monkeypatch):
        def no_clip(delta, l2_clip_norm):
            return federated.ClippedDelta(delta, jnp.zeros([]), jnp.ones([], bool))

        monkeypatch.setattr(federated, "clip_delta", no_clip)
        monkeypatch.setattr(engine, "_run_passes", uncached(engine._run_passes))
        base, changed = self.sums_with(EXTREME[-1]), self.sums_with(EXTREME[0])
        assert np.linalg.norm(changed - base, axis=1).max() > 100 * CLIP

    def test_clipping_the_sum_of_several_users_fails(self, monkeypatch):
        """Clipping after adding lets one user turn the whole sum."""
        clip = federated.clip_delta

        def late(self, state, batch, is_padding, keys):
            deltas, _ = self.local_updates(self.loss_fn, state, batch, keys)
            total = jax.tree.map(lambda leaf: leaf.sum(axis=0), deltas)
            total = clip(total, len(is_padding) * CLIP).delta
            return self.one_sum(federated.Contribution(total, None))

        monkeypatch.setattr(federated.FederatedStep, "private_sum", late)
        monkeypatch.setattr(engine, "_run_passes", uncached(engine._run_passes))
        distances = self.distances()
        assert max(distances) > 1.5 * CLIP

    def test_replace(self):
        """The most that replacing does is 2C: from one extreme to the opposite."""
        one, other = self.sums_with(EXTREME[0]), self.sums_with(EXTREME[1])
        distance = np.linalg.norm(one - other, axis=1).max()
        assert 2 * CLIP - 1e-3 <= distance <= 2 * CLIP + SLACK

    def test_add_remove(self):
        """The larger set has one user more; common users are drawn by the same coins."""
        secret = PoissonSampling(sampling_prob=0.25, expected_batch_size=5.0, capacity=4)
        draws = tuple(
            tuple(int(user) for user in draw)
            for draw in secret.batches(USERS + 1, ROUNDS, np.random.default_rng(1))
        )
        assert 0 < sum(USERS in draw for draw in draws) < ROUNDS

        def with_draws(lists, draws):
            made = mechanism(
                sampling=tools.Replay(base=secret, draws=draws), adjacency=Adjacency.ADD_REMOVE
            )
            return sums(clients(lists), mechanism=made)

        small = with_draws(LISTS, tuple(tuple(u for u in d if u != USERS) for d in draws))
        takes_part = np.array([USERS in draw for draw in draws])
        for extreme in EXTREME:
            distance = np.linalg.norm(with_draws([*LISTS, extreme], draws) - small, axis=1)
            assert distance[~takes_part].max() <= SLACK
            assert distance.max() <= CLIP + SLACK

    def test_no_user_changes_places_when_another_one_has_other_rows(self):
        """Passes are [passes, places]; users are drawn, and gaps left, as before."""
        rng = np.random.default_rng(0)
        step = federated.FederatedStep(
            loss_fn=tools.squared_distance,
            mechanism=mechanism(),
            client_learning_rate=0.1,
            users_per_pass=4,
        )
        for _ in range(200):
            sizes = rng.integers(0, BOUND + 1, USERS)
            batch = rng.permutation(USERS)[: rng.integers(1, USERS + 1)]
            if rng.random() < 0.5:
                batch = sampling.in_random_places(batch, 12, rng)

            def places(sizes, batch=batch):
                lists = [np.zeros((size, 3), np.float32) for size in sizes]
                rows = sampling.passes(step.ordered(batch, clients(lists)), 4)
                return rows, {int(user): place for *_, place, user in listed(rows)}

            rows, before = places(sizes)
            assert sorted(before) == sorted(batch[batch != sampling.PADDING])
            for column in rows.T:
                own = [sizes[user] if user >= 0 else -1 for user in column]
                assert own == sorted(own, reverse=True)
            sizes[rng.integers(USERS)] = rng.integers(0, BOUND + 1)
            assert places(sizes)[1] == before
            if sampling.PADDING in batch:
                gone = rng.choice(batch[batch != sampling.PADDING])
                left = np.where(batch == gone, sampling.PADDING, batch)
                found = places(sizes, left)[1]
                assert found == {user: at for user, at in before.items() if user != gone}

    def test_scores_that_depend_on_the_place(self, monkeypatch):
        """A product over all users rounds the last ones differently; rows at a threshold show it.

        Users sorted by size would all move by one place where one user is emptied.
        """
        users, columns, per_pass = 301, 300, 9
        rng = np.random.default_rng(0)
        w = jnp.asarray(rng.normal(size=(columns, 1)).astype(np.float32))
        x = rng.normal(size=(users, 1, columns)).astype(np.float32)
        scores = jax.jit(jax.vmap(lambda rows: (rows @ w)[:, 0]))

        def scores_in(order):
            found = np.zeros(users, np.float32)
            padded = np.concatenate([x[order], np.zeros((-users % per_pass, 1, columns), "f4")])
            found[order] = np.ravel([scores(part) for part in np.split(padded, len(padded) // 9)])[
                :users
            ]
            return found

        here, moved = scores_in(np.arange(users)), scores_in(np.roll(np.arange(users), -1))
        edges = np.where(here != moved, np.maximum(here, moved), -100).astype(np.float32)
        signs = np.where(here > moved, 1, -1).astype(np.float32)

        def loss(params, row):
            is_above = (row["x"] @ params["w"])[0] >= row["edge"]
            return row["sign"] * params["b"] * jnp.where(is_above, 1.0, -1.0)

        def total(empty):
            lists = [
                {"x": x[i, :n], "edge": edges[i : i + n], "sign": signs[i : i + n]}
                for i, n in enumerate([0 if i == empty else 1 for i in range(users)])
            ]
            sampler = mirrordp.privacy.FullBatch(expected_batch_size=1, num_examples=users)
            step = mirrordp.FederatedStep(
                loss,
                mechanism(sampling=sampler, num_steps=1, l2_clip_norm=1.0),
                mirrordp.training.server_sgd(1.0, 0.0),
                client_learning_rate=100.0, client_batch_size=1, users_per_pass=per_pass,
                trainable={"w": False, "b": True},
            )  # fmt: skip
            private = PrivateClients.from_users(lists, dtypes=np.float32)
            state, _ = tools.last(
                mirrordp.train(step, {"w": w, "b": jnp.zeros([])}, private, seed=0)
            )
            return float(state.params["b"])

        assert abs(total(0) - total(None)) <= 1.0
        if (here != moved).sum() > 10:  # which the compiler decides

            def by_size(self, batch, private):
                return batch[np.argsort(-np.asarray(private.num_examples)[batch], kind="stable")]

            monkeypatch.setattr(federated.FederatedStep, "ordered", by_size)
            assert abs(total(0) - total(None)) > 5.0

    @pytest.mark.parametrize(
        ("seed", "kind"),
        [(3, jnp.float32), (4, jnp.float32), (3, jnp.bfloat16), (3, np.float16), (4, float)],
    )
    def test_adaptive_clipping(self, seed, kind):
        """Delta and count together are one contribution of norm at most C."""
        step = federated.FederatedStep(
            loss_fn=tools.squared_distance,
            mechanism=mechanism(),
            optimizer=tools.recorder(1),
            client_learning_rate=0.1,
            adaptive_clip=AdaptiveClip(budget_share=0.3),
        )
        rng = np.random.default_rng(seed)
        norms = []
        for scale in (1e-8, 0.1, 1.0, 1e10, 3e38):
            for clip_norm in (1e-3, 0.7, 50.0):
                delta = jnp.asarray(rng.uniform(-1, 1, 50) * scale, jnp.float32)
                made, _ = step.contribution({"w": delta}, kind(clip_norm))
                norms.append(
                    np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(made)))
                )
        assert max(norms) <= CLIP
        assert max(norms) >= CLIP * (1 - 1e-3)
        broken, _ = step.contribution({"w": jnp.array([jnp.nan])}, jnp.float32(1.0))
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(broken))

    @pytest.mark.parametrize("clip_norm", [1e-9, 1e-30, 1e-40, 0.0])
    def test_a_clip_norm_next_to_zero(self, clip_norm):
        """C divided by it overflows."""
        step = federated.FederatedStep(
            tools.squared_distance, mechanism(l2_clip_norm=1e30), client_learning_rate=0.1
        )
        for delta in ([1.0, 2.0], [1e-38, 1e-30], [3e38, 1.0]):
            made, _ = step.contribution(jnp.array(delta), jnp.float32(clip_norm))
            leaves = jax.tree.leaves(step.one_sum(made).total.floats())
            assert math.hypot(*(float(value) for leaf in leaves for value in leaf)) <= 1e30


def listed(rows):
    """The passes as (pass, place, user), without gaps."""
    return [(*at, rows[at]) for at in np.ndindex(rows.shape) if rows[at] != sampling.PADDING]


def uncached(jitted):
    """Compiles `jitted` anew, so that a sabotaged function is traced."""

    def fresh(*args):
        return jitted.__wrapped__(*args)

    return jax.jit(fresh, static_argnums=(0, 1, 2))


class TestEdges:
    def test_nobody_is_sampled(self):
        """The noise is added and the step is charged all the same."""
        replay = tools.Replay(base=mechanism().sampling, draws=NOBODY)
        assert (sums(mechanism=mechanism(sampling=replay)) == 0).all()
        ledger = mirrordp.Ledger(Adjacency.ZERO_OUT)
        noisy = mechanism(sampling=replay, noise_multiplier=1.0)
        made = sums(mechanism=noisy, spend=ledger)
        assert (np.abs(made) > 0).all()
        assert ledger.event.count == ROUNDS

    @pytest.mark.parametrize(
        "data",
        [
            np.zeros((0, 3), np.float32),
            np.full((3, 3), np.nan, np.float32),
            np.array([[1, np.inf, 0]], np.float32),
        ],
        ids=["no rows", "NaN", "infinite"],
    )
    def test_a_user_who_contributes_nothing(self, data):
        with_user = sums(clients([*LISTS[:3], data]), mechanism=EVERYONE)
        without = sums(clients(LISTS[:3]), mechanism=EVERYONE)
        np.testing.assert_allclose(with_user, without, atol=1e-6)

    def test_one_row(self):
        x, none = np.array([[1.2, 0.9, 1.0]], np.float32), np.zeros((0, 3), np.float32)
        made = sums(clients([none, x, none]), mechanism=EVERYONE)
        np.testing.assert_allclose(made[0], 0.3 * (1 - x[0]), atol=1e-6)

    def test_parameters_that_only_noise_would_move(self):
        def loss(params, x):
            return jnp.sum((params["head"] * jax.lax.stop_gradient(params["body"]) - x) ** 2)

        start = {"body": jnp.ones(3), "head": jnp.ones(3)}
        with pytest.warns(UserWarning, match=r"no gradient in params\['body'\]:"):
            run(loss=loss, start=start)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(loss=loss, start=start, trainable={"body": False, "head": True})

    @pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
    def test_parameters_are_real_floats(self, dtype):
        """Noise is real: the imaginary part of a complex sum would be released without any."""
        options = {
            "loss": lambda p, x: jnp.sum(jnp.abs(p["w"] - x) ** 2),
            "start": {"w": jnp.ones(3, dtype)},
            "spend": (ledger := mirrordp.Ledger(Adjacency.ZERO_OUT)),
            "mechanism": mechanism(noise_multiplier=1.0),
        }
        with pytest.raises(TypeError, match=r"must be floating point, got .* at params\['w'\]"):
            run(**options)
        step = federated.FederatedStep(
            loss_fn=options["loss"],
            mechanism=options["mechanism"],
            optimizer=federated.server_sgd(),
            client_learning_rate=0.1,
        )
        with pytest.raises(TypeError, match="must be floating point"):
            step.init(options["start"], jax.random.key(0))
        assert mechanism().event_between(0, 0) == ledger.event

    def test_accounting_is_the_same_whatever_the_data(self):
        noisy = mechanism(noise_multiplier=1.0)
        ledgers = []
        for lists in (LISTS, [EXTREME[3]] * USERS):
            ledger = mirrordp.Ledger(Adjacency.ZERO_OUT)
            tools.last(run(clients(lists), mechanism=noisy, spend=ledger))
            ledgers.append(ledger.event)
        assert ledgers[0] == ledgers[1] == noisy.event

    def test_charged_before_it_runs(self):
        events = []

        class Watching(mirrordp.Ledger):
            def charge(self, event, *, block=None):
                events.append(event.count)
                super().charge(event, block=block)

        watching = Watching(Adjacency.ZERO_OUT)
        iterator = run(mechanism=mechanism(noise_multiplier=1.0), spend=watching)
        assert events == []
        next(iterator)
        assert events == [3]

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"mechanism": tools.mechanism()}, ValueError, 'unit="user"'),
            ({"alpha": 0.5}, ValueError, "public data is needed"),
            ({"client_learning_rate": 0.0}, ValueError, "client_learning_rate must be"),
            ({"users_per_pass": 0}, ValueError, "users_per_pass must be"),
            ({"num_steps": 7}, ValueError, "made for 6 steps"),
            ({"spend": mirrordp.Ledger(Adjacency.REPLACE)}, ValueError, "one adjacency"),
            ({"loss": lambda p, x: p - x}, ValueError, "one scalar"),
        ],
    )
    def test_mistakes(self, options, error, message):
        with pytest.raises(error, match=message):
            run(**options)


class TestOptions:
    def test_adaptive_clip_finds_the_quantile(self):
        """Deltas of norm 0.1, 0.2, ..., all taking part: the clip norm settles between two."""
        norms = np.arange(1, USERS + 1) / 10
        lists = [np.array([[1 + norm / 0.3, 1, 1]], np.float32) for norm in norms]
        rounds = 80
        made = mechanism(
            sampling=mirrordp.privacy.FullBatch.of(USERS), noise_multiplier=1.0, num_steps=rounds
        )
        _, info = tools.last(
            run(
                clients(lists), mechanism=made, optimizer=tools.recorder(rounds),
                steps_per_call=rounds, users_per_pass=USERS,
                adaptive_clip=AdaptiveClip(quantile=0.75, budget_share=0.2),
            )
        )  # fmt: skip
        assert info.clip_norm[0] == CLIP
        assert np.mean(info.clip_norm[-30:]) == pytest.approx(1.5, abs=0.2)

    def test_adaptive_clip_splits_the_noise_as_its_paper_does(self):
        """z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2), seen in the released gradient; no clip norm is free."""
        share, sigma = 0.36, 2.0
        start = {"w": jnp.ones(3), "wide": jnp.zeros(4000)}
        loss = lambda p, x: tools.squared_distance(p["w"], x) + 0.0 * p["wide"].sum()  # noqa: E731
        state, info = tools.last(
            run(
                loss=loss, start=start, mechanism=mechanism(noise_multiplier=sigma),
                adaptive_clip=AdaptiveClip(budget_share=share), steps_per_call=ROUNDS,
            )
        )  # fmt: skip
        count_noise = sigma / (2 * np.sqrt(share))
        delta_noise = (sigma**-2 - (2 * count_noise) ** -2) ** -0.5
        noise = np.asarray(state.opt_state[1]["wide"]) * 5.0 / info.clip_norm[:, None]
        assert noise.std() == pytest.approx(delta_noise, rel=0.03)
        assert noise.std() > 1.1 * sigma

    def test_adaptive_clip_counts_with_noise(self):
        """Over an empty cohort, the share that moves the clip norm is ½ with noise σ_b / B."""
        share, sigma, eta, rounds = 0.36, 2.0, 0.2, 200
        replay = tools.Replay(base=mechanism().sampling, draws=((),) * rounds)
        made = mechanism(sampling=replay, noise_multiplier=sigma, num_steps=rounds)
        _, info = tools.last(
            run(
                mechanism=made, optimizer=tools.recorder(rounds), steps_per_call=rounds,
                adaptive_clip=AdaptiveClip(budget_share=share, learning_rate=eta),
            )
        )  # fmt: skip
        steps = -np.diff(np.log(info.clip_norm)) / eta
        expected = sigma / (2 * np.sqrt(share)) / 5.0
        assert steps.std() == pytest.approx(expected, rel=0.2)
        assert abs(steps.mean()) < 4 * expected / np.sqrt(rounds)

    def test_correlated_noise(self):
        sampling = mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
            5, num_examples=USERS, num_groups=2, capacity=4
        )
        banded = mechanism(
            sampling=sampling,
            noise_multiplier=1.0,
            noise=mirrordp.privacy.BandedNoise.optimal(ROUNDS, num_bands=2),
        )
        made = sums(mechanism=banded)
        # At the start the gradient of these rows is zero.
        noise = sums(clients([np.ones((1, 3), np.float32)] * USERS), mechanism=banded)
        assert np.isfinite(made).all()
        assert np.abs(noise).min() > 0
        assert np.abs(made - noise).max() > 0.1
        with pytest.raises(
            mirrordp.privacy.UnsupportedError, match="refused together with adaptive_clip"
        ):
            run(mechanism=banded, adaptive_clip=AdaptiveClip())
        with pytest.raises(ValueError, match="needs every step to be a private one"):
            run(mechanism=banded, public=PUBLIC, alpha=[1, 1, 0, 1, 1, 1])
        with pytest.raises(mirrordp.privacy.UnsupportedError, match="neighbouring steps"):
            mechanism(noise=mirrordp.privacy.BandedNoise.optimal(ROUNDS, num_bands=2))

    def test_fixed_size_cohorts_have_their_own_accounting(self):
        sampling = mirrordp.privacy.FixedSizeSampling(batch_size=5, num_examples=USERS)
        with pytest.raises(mirrordp.privacy.UnsupportedError, match="fixed-size"):
            mechanism(sampling=sampling)
        fixed = mechanism(sampling=sampling, adjacency=Adjacency.REPLACE, noise_multiplier=2.0)
        _, info = tools.last(run(mechanism=fixed, show_unprivatized=True))
        assert (info.unprivatized.batch_size == 5).all()
        poisson = mechanism(noise_multiplier=2.0, accountant=Accountant.RDP)
        assert fixed.epsilon(1e-3) > poisson.epsilon(1e-3)

    def test_clip_norm_and_client_rate_belong_to_the_state(self):
        """A run with other numbers equals the run of a mechanism made for them, with its noise."""
        _, keys = mirrordp.training.engine.randomness(3)
        unit = mechanism(noise_multiplier=1.0, l2_clip_norm=1.0)
        step = federated.FederatedStep(
            loss_fn=tools.squared_distance,
            mechanism=unit,
            optimizer=tools.recorder(ROUNDS),
            client_learning_rate=0.7,
            client_batch_size=BATCH,
        )
        assert step == dataclasses.replace(step, client_learning_rate=0.3)
        state = step.init(jnp.ones(3), keys.noise)
        state = state._replace(clip_norm=jnp.float32(CLIP), client_learning_rate=jnp.float32(0.3))
        made = sums(mechanism=unit, client_learning_rate=0.7, state=state)
        expected = sums(mechanism=mechanism(noise_multiplier=1.0))
        np.testing.assert_allclose(made, expected, atol=1e-5)

    def test_averages_and_frozen_parameters(self):
        params = {"a": jnp.ones(3), "b": jnp.zeros(3)}
        state, _ = tools.last(
            run(
                loss=lambda p, x: tools.squared_distance(p["a"] + p["b"], x), start=params,
                trainable={"a": True, "b": False}, average=mirrordp.UniformAverage(),
                optimizer=federated.server_sgd(0.1),
            )
        )  # fmt: skip
        assert (state.params["b"] == 0).all()
        assert (state.params["a"] != 1).all()
        assert (state.average["a"] != state.params["a"]).all()

    def test_memory_decides_how_many_users_run_side_by_side(self):
        step = federated.FederatedStep(
            loss_fn=lambda p, x: tools.squared_distance(p[:3], x),
            mechanism=mechanism(sampling=PoissonSampling.for_batch_size(90, num_examples=1000)),
            optimizer=tools.recorder(1),
            client_learning_rate=0.1,
        )
        capacity = step.mechanism.sampling.capacity
        small = federated.default_users_per_pass(step, jnp.zeros(3), clients())
        assert small == -(-capacity // 4)
        large = jax.eval_shape(lambda: jnp.zeros(10**8))
        assert federated.default_users_per_pass(step, large, clients()) == 1

    def test_warm_start_judges_by_users(self):
        public = clients([rows(4, n) for n in range(6)], PublicClients)
        warm = mirrordp.warm_start_clients(
            tools.squared_distance, 5 * jnp.ones(3), public, optimizer=optax.adam(0.3),
            patience=5, max_epochs=60,
        )  # fmt: skip
        assert np.linalg.norm(warm.params - public.arrays.mean(axis=0)) < 1
        with pytest.raises(ValueError, match="2 public users with rows"):
            mirrordp.warm_start_clients(
                tools.squared_distance, jnp.ones(3), clients([rows(4)], PublicClients)
            )


class TestAccounting:
    """The paper's setting: 342,477 users, 100 expected, 1,600 rounds, σ = 0.4, δ = 1e-6."""

    def stackoverflow(self, **options):
        return Mechanism(
            sampling=PoissonSampling.for_batch_size(100, num_examples=342_477),
            l2_clip_norm=1.0,
            noise_multiplier=0.4,
            num_steps=1600,
            unit="user",
            **options,
        )

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"accountant": Accountant.RDP}, 7.513),
            ({"accountant": Accountant.RDP, "orders": accounting.COARSE_ORDERS}, 8.3208),
            ({}, 6.052),
        ],
        ids=["rdp", "coarse", "pld"],
    )
    def test_golden_values(self, options, expected):
        assert self.stackoverflow(**options).epsilon(1e-6) == pytest.approx(expected, abs=6e-4)

    def test_the_report_names_the_unit(self):
        made = mechanism(noise_multiplier=4.0)
        report = mirrordp.RunReport.of(made, delta=1e-3, charged_steps=ROUNDS)
        assert report.unit == "user"
        assert "one user each" in report.privacy_card()

    @pytest.mark.parametrize("seed", [None, 7])
    def test_the_report_knows_of_a_seed(self, seed):
        made = mechanism(noise_multiplier=4.0)
        _, info = tools.last(run(mechanism=made, seed=seed))
        report = mirrordp.RunReport.of(made, 1e-3, info=info)
        assert report.seeded is (seed is not None)
