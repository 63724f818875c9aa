"""Several devices, as eight virtual ones: the same run on every mesh, and one message per step."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mirrordp
from mirrordp import Adjacency, Checkpoint, Ledger, PrivateData, SweepRun
from mirrordp.privacy import CyclicPoissonSampling, noise
from mirrordp.privacy.noise import BandedNoise, SecureGaussianNoise
from mirrordp.privacy.sampling import PADDING
from mirrordp.training import engine
from mirrordp.training.checkpoint import CheckpointError
from mirrordp.training.placement import Layout, placement_for, rows_per_shard
from tests import test_federated, tools

SIZES = (1, 2, 4, 8)
STEPS = 3
ROWS = PrivateData((tools.features(), tools.features(seed=1, columns=8)))
START = {"w": tools.features(rows=8, seed=2), "b": np.zeros(8, np.float32)}
MOMENTUM = optax.sgd(0.1, momentum=0.5)


def mesh(*shape: int, names=("data", "model"), **options):
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names[: len(shape)], devices=jax.devices()[:count], **options)


def loss(params, example):
    """A dense layer, whose clipped sum is made of blocks of rows."""
    x, y = example
    return 0.5 * jnp.sum((jnp.tanh(params["w"] @ x + params["b"]) - y) ** 2)


def run(loss=loss, start=START, private=ROWS, **options):
    defaults = {
        "mechanism": tools.mechanism(num_steps=STEPS, noise_multiplier=1.0),
        "optimizer": tools.sgd(0.1),
        "steps_per_call": 2,
        "seed": 1,
    }
    return tools.train(loss, start, private, **(defaults | options))


def ended(**options):
    """Returns the last state, on the host."""
    return jax.device_get(tools.last(run(**options))[0].params)


def compiled(monkeypatch, make, **options) -> str:
    """Returns the text of the program of a run."""
    real, texts = engine._run_passes, []

    def look(*args):
        texts.append(real.lower(*args).compile().as_text())
        return real(*args)

    monkeypatch.setattr(engine, "_run_passes", look)
    next(make(**options))
    return texts[0]


def messages(text: str) -> collections.Counter:
    """Returns how many messages of each kind a program has."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return collections.Counter(re.findall(rf"= .* ({kinds})(?:-start)?\(", text))


def test_a_checkpoint_knows_the_devices_of_each_process():
    described = set()
    for owners in ((0, 0, 1, 1), (0, 0, 0, 1)):
        placement = placement_for(mesh(4), None)
        placement.__dict__["owners"] = owners
        described.add(placement.described(START))
    assert len(described) == 2


class TestTheSameRunOnEveryMesh:
    @pytest.mark.parametrize(("shape", "spec"), [((1, 2), P("model")), ((1,), P("data"))])
    def test_placed_parameters_where_records_lie_on_one_device(self, shape, spec):
        placed = {"w": jax.device_put(START["w"], NamedSharding(mesh(*shape), spec))}
        # An optimiser whose state takes the place of what `zeros_like` has made.
        keeps = optax.GradientTransformation(
            optax.tree.zeros_like, lambda grad, _, params=None: (optax.tree.scale(-0.1, grad), grad)
        )
        options = {"optimizer": keeps, "show_unprivatized": True}
        found = ended(start=START | placed, mesh=mesh(*shape), **options)
        close = functools.partial(np.testing.assert_allclose, atol=1e-5)
        jax.tree.map(close, found, ended(**options))

    def test_to_the_bit_with_equally_many_shards(self):
        without = ended(shards=8)
        for size in SIZES:
            jax.tree.map(np.testing.assert_array_equal, ended(mesh=mesh(size), shards=8), without)

    def test_up_to_rounding_with_other_numbers_of_shards(self, nothing_reserved):
        without = ended()
        for size in (2, 8):
            found = ended(mesh=mesh(size))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, without)

    def test_the_noise_alone_to_the_bit(self):
        """Added twice, or drawn by each device for itself, it would differ."""
        without = ended(loss=lambda p, e: 0.0 * (p["w"].sum() + p["b"].sum() + e[0].sum()))
        found = ended(
            loss=lambda p, e: 0.0 * (p["w"].sum() + p["b"].sum() + e[0].sum()), mesh=mesh(4, 2)
        )
        assert np.ptp(without["b"]) > 0
        jax.tree.map(np.testing.assert_array_equal, found, without)

    @pytest.mark.parametrize(
        "options",
        [
            {"mechanism": tools.mechanism(num_steps=STEPS, sampling=tools.poisson(capacity=8))},
            {"stream": True},
        ],
        ids=["further passes", "streamed"],
    )
    def test_other_ways_to_drive_it(self, options):
        found = ended(mesh=mesh(4), shards=4, **options)
        jax.tree.map(np.testing.assert_array_equal, found, ended(shards=4, **options))

    def test_add_remove(self, nothing_reserved):
        sampling = mirrordp.PoissonSampling(sampling_prob=0.3, expected_batch_size=12.0)
        made = tools.mechanism(
            sampling=sampling, adjacency=Adjacency.ADD_REMOVE, num_steps=STEPS, noise_multiplier=1.0
        )
        found, without = ended(mesh=mesh(8), mechanism=made), ended(mechanism=made)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, without)
        again = ended(mesh=mesh(2), shards=8, mechanism=made)
        jax.tree.map(np.testing.assert_array_equal, found, again)

    def test_keys_and_public_rows_and_overlap(self):
        """A row that is public too is left out on its device, and keys belong to rows."""

        def keyed(params, example, key):
            kept = jax.random.bernoulli(key, 0.5, (3,))
            return loss(params, (example[0] * kept, example[1]))

        public = mirrordp.PublicData(
            jax.tree.map(lambda leaf: np.concatenate([leaf[:5], leaf[:20] + 1]), ROWS.arrays)
        )
        options = {"loss": keyed, "public": public, "alpha": [1.0, 0.0, 0.5], "shards": 4}
        with pytest.warns(mirrordp.data.UnprotectedWarning, match="5 private rows"):
            found, without = ended(mesh=mesh(4), **options), ended(**options)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, without
        )

    def test_users(self):
        options = {"mechanism": test_federated.mechanism(noise_multiplier=1.0), "stream": False}
        options |= {"shards": 4, "show_unprivatized": True}
        found, info = tools.last(test_federated.run(mesh=mesh(4), **options))
        without, expected = tools.last(test_federated.run(**options))
        np.testing.assert_array_equal(found.opt_state[1], without.opt_state[1])
        np.testing.assert_array_equal(
            info.unprivatized.batch_size, expected.unprivatized.batch_size
        )
        plain = test_federated.sums(**options | {"shards": None})
        np.testing.assert_allclose(5.0 * found.opt_state[1], plain, atol=1e-5)

    def test_sweeps(self):
        runs = [SweepRun(seed=1), SweepRun(seed=2, alpha=1.0)]
        options = {"mechanism": tools.mechanism(num_steps=STEPS), "optimizer": tools.sgd(0.1)}
        options |= {"runs": runs, "shards": 4}
        found, _ = tools.last(tools.train_sweep(loss, START, ROWS, mesh=mesh(4), **options))
        without, _ = tools.last(tools.train_sweep(loss, START, ROWS, **options))
        jax.tree.map(np.testing.assert_array_equal, found.params, without.params)
        assert np.ptp(np.asarray(found.params["b"]), axis=0).min() > 0


class TestSensitivity:
    def test_one_row_moves_the_sum_by_the_clip_norm_on_every_mesh(self):
        everyone = mirrordp.privacy.FullBatch.of(tools.ROWS)
        made = tools.mechanism(sampling=everyone, noise_multiplier=0.0, num_steps=1)
        rng = np.random.default_rng(0)
        for size in (2, 8):
            sums = []
            for scale in (1.0, 1e6):
                x, y = jax.tree.map(np.copy, ROWS.arrays)
                y[17] = scale * rng.normal(size=8)
                state, _ = tools.last(
                    run(private=PrivateData((x, y)), mechanism=made, mesh=mesh(size),
                        optimizer=tools.recorder(1))
                )  # fmt: skip
                released = [np.ravel(leaf[0]) for leaf in jax.tree.leaves(state.opt_state[1])]
                sums.append(tools.ROWS * np.concatenate(released).astype(np.float64))
            assert 0.5 < np.linalg.norm(sums[0] - sums[1]) <= 2.0


class TestPlacement:
    @pytest.mark.parametrize(("spec", "shape"), [(P(None, "data"), (3,)), (P("model"), (2, 2))])
    def test_sharded_parameters_stay_so(self, spec, shape):
        placed = mesh(*shape)
        start = START | {"w": jax.device_put(START["w"], NamedSharding(placed, spec))}
        options = {"shards": 12, "optimizer": MOMENTUM}
        state, _ = tools.last(run(start=start, mesh=placed, **options))
        assert state.params["w"].sharding.spec == spec
        assert state.opt_state[0].trace["w"].sharding.spec == spec
        assert state.params["b"].sharding.is_fully_replicated
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            jax.device_get(state.params),
            ended(**options),
        )

    def test_the_state_of_banded_noise_is_split(self, monkeypatch):
        monkeypatch.setattr(noise, "_LARGE_LEAF", 2000)
        sampling = CyclicPoissonSampling.for_batch_size(5, num_examples=tools.ROWS, num_groups=4)
        banded = BandedNoise.optimal(STEPS, 3)
        made = tools.mechanism(sampling=sampling, noise=banded, num_steps=STEPS)
        placed = mesh(4)
        start = {"w": np.zeros((64, 40), np.float32), "b": np.zeros(300, np.float32)}
        own = start | {"w": jax.device_put(start["w"], NamedSharding(placed, P(None, "data")))}

        def zero(params, example):
            return 0.0 * (params["w"].sum() + params["b"].sum() + example[0].sum())

        options = {"loss": zero, "mechanism": made}
        state, _ = tools.last(run(start=own, mesh=placed, **options))
        split = {leaf.sharding.spec for leaf in jax.tree.leaves(state.noise_state) if leaf.ndim > 1}
        assert split == {P(None, None, "data"), P(None, None, None, "data")}
        without = ended(start=start, **options)
        assert np.std(without["w"]) > 0
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), without)

    @pytest.mark.parametrize("by_name", [True, False])
    def test_constraints_inside_the_loss(self, by_name):
        placed = mesh(4, 2, axis_types=(AxisType.Auto,) * 2)
        where = P("model") if by_name else NamedSharding(placed, P("model"))

        def constrained(params, example):
            x, y = example
            hidden = jnp.tanh(params["w"] @ x + params["b"])
            return 0.5 * jnp.sum((jax.lax.with_sharding_constraint(hidden, where) - y) ** 2)

        found = ended(loss=constrained, mesh=placed)
        without = ended(shards=4)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, without)

    def test_secure_noise_is_drawn_once_per_step(self, monkeypatch):
        calls, real = [], noise._lattice_noise

        def noted(*args):
            calls.append(1)
            return real(*args)

        monkeypatch.setattr(noise, "_lattice_noise", noted)
        made = tools.mechanism(noise=SecureGaussianNoise.of(START), num_steps=STEPS)
        state, _ = tools.last(run(mechanism=made, mesh=mesh(4), seed=None, steps_per_call=STEPS))
        assert len(calls) == STEPS
        copies = [np.asarray(part.data) for part in state.params["w"].addressable_shards]
        assert all((copy == copies[0]).all() for copy in copies)


class TestMessages:
    def test_one_reduction_of_the_clipped_sum(self, monkeypatch):
        text = compiled(monkeypatch, run, mesh=mesh(8))
        assert messages(text) == {"all-reduce": 1}
        (sent,) = re.findall(r"= \((.*)\) all-reduce", text)
        # The bias and the weight, as integers of 64 bits, and nothing else.
        assert sorted(re.findall(r"(\w+\[[\d,]*\])", sent)) == ["s64[8,3]", "s64[8]"]

    def test_users_send_one_sum_per_step_not_per_pass(self, monkeypatch):
        text = compiled(monkeypatch, test_federated.run, mesh=mesh(2), users_per_pass=1)
        assert messages(text) == {"all-reduce": 1}

    def test_a_sharded_parameter_is_gathered_and_its_sum_scattered(self, monkeypatch):
        placed = mesh(4)
        start = START | {"w": jax.device_put(START["w"], NamedSharding(placed, P("data")))}
        found = messages(compiled(monkeypatch, run, start=start, mesh=placed))
        assert found["reduce-scatter"] == 1
        assert found["all-gather"] == 1
        assert not found.keys() & {"all-to-all", "collective-permute"}

    def test_a_mesh_of_one_device_is_the_same_program(self):
        ended()
        before = engine._run_passes._cache_size()
        ended(mesh=mesh(1))
        ended(mesh=mesh(1, 1))
        assert engine._run_passes._cache_size() == before


class TestLayout:
    @pytest.mark.parametrize("adjacency", Adjacency)
    def test_every_record_is_computed_once_by_the_device_that_holds_it(self, adjacency):
        rng = np.random.default_rng(0)
        made = tools.mechanism(adjacency=Adjacency.ZERO_OUT)
        object.__setattr__(made, "adjacency", adjacency)
        for records in (8, 41, 200):
            layout = Layout.of(made, records, 8, size=3, entropy=records)
            held = layout.of_devices(4)
            np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(records))
            for step in range(10):
                draw = np.flatnonzero(rng.random(records) < 0.5).astype(np.int32)
                numbers = layout.passes(draw, lambda part: part, step)
                assert numbers.shape[1:] == (8, 3)
                np.testing.assert_array_equal(np.sort(numbers[numbers != PADDING]), draw)
                places = layout.places(numbers, 4)
                for device in range(4):
                    own = np.s_[:, 2 * device : 2 * device + 2]
                    real = numbers[own] != PADDING
                    np.testing.assert_array_equal(
                        held[device][places[own][real]], numbers[own][real]
                    )

    def test_without_a_record_the_others_stay_where_they_are(self):
        """Under add-remove adjacency: in the same shard with the same probability, and place."""
        made = tools.mechanism()
        object.__setattr__(made, "adjacency", Adjacency.ADD_REMOVE)
        shards = np.stack(
            [Layout.of(made, 10, 4, size=3, entropy=seed).shard for seed in range(4000)]
        )
        # Independent and uniform: the shard of a record says nothing about that of another.
        joint = np.array([[np.mean((shards[:, 3] == a) & (shards[:, 7] == b)) for a in range(4)]
                          for b in range(4)])  # fmt: skip
        np.testing.assert_allclose(joint, 1 / 16, atol=0.02)
        layout = Layout.of(made, 300, 4, size=40, entropy=1)
        draw = np.flatnonzero(layout.shard == 0)[:5].astype(np.int32)
        found = {tuple(layout.passes(draw, np.sort, step)[0, 0]) for step in range(20)}
        assert len(found) == 20

    def test_few_steps_need_a_further_pass(self):
        sampling = tools.poisson(4096, rows=100_000)
        size = rows_per_shard(tools.mechanism(sampling=sampling), 8)
        assert 512 < size < 1.3 * 512
        draws = np.random.default_rng(0).binomial(100_000 // 8, 0.04096, size=(20_000, 8))
        assert (draws.max(axis=1) > size).mean() < 1e-3

    def test_a_full_batch_is_cut_in_equal_parts(self):
        everyone = tools.mechanism(sampling=mirrordp.privacy.FullBatch.of(1000))
        assert rows_per_shard(everyone, 8) == 125


class TestCheckpoints:
    def test_a_run_is_resumed_on_another_mesh(self, tmp_path):
        options = {"shards": 4, "steps_per_call": 1}
        first = run(mesh=mesh(4), checkpoint=Checkpoint(tmp_path), **options)
        next(first), next(first)
        first.close()
        resumed = run(mesh=mesh(2), checkpoint=Checkpoint(tmp_path, resume=True), **options)
        state, info = tools.last(resumed)
        assert info.charged_steps == STEPS
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), ended(**options))

    @pytest.mark.parametrize(
        ("every", "now", "named"),
        [(1, {"mesh": mesh(2)}, r"shards \(4 then, 2 now\)"),
         (2, {"mesh": mesh(2), "shards": 4}, r"devices \({'data': 4}")],
    )  # fmt: skip
    def test_what_would_not_be_exact_is_refused(self, tmp_path, every, now, named):
        options = {"steps_per_call": 1}
        first = run(mesh=mesh(4), checkpoint=Checkpoint(tmp_path, every=every), **options)
        next(first)
        first.close()
        resume = Checkpoint(tmp_path, every=every, resume=True)
        with pytest.raises(CheckpointError, match=named):
            run(checkpoint=resume, **options, **now)

    def test_a_state_goes_on_on_another_mesh(self):
        options = {"shards": 4, "steps_per_call": 1}
        state, _ = next(run(mesh=mesh(4), **options))
        found = ended(mesh=mesh(2), state=jax.device_get(state), **options)
        jax.tree.map(np.testing.assert_array_equal, found, ended(**options))


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mesh": mesh(2, names=("rows",))}, "needs an axis 'data'.*got the axes"),
            ({"mesh": mesh(4), "shards": 6}, "equally many shards, got shards=6 for 4 devices"),
            ({"mesh": mesh(4), "mechanism": tools.mechanism(sampling=tools.poisson(capacity=10))},
             "divided among 4 shards, got capacity=10"),
            ({"shards": 41}, "fewer records than 41 shards.*operator"),
            ({"mesh": mesh(4), "start": jax.device_put(START, NamedSharding(mesh(2), P()))},
             "on the mesh of the run"),
        ],
    )  # fmt: skip
    def test_one_sentence_before_the_first_charge(self, options, message):
        ledger = Ledger(Adjacency.ZERO_OUT)
        with pytest.raises(ValueError, match=message):
            run(spend=ledger, **options)
        assert ledger.event == Ledger(Adjacency.ZERO_OUT).event

    def test_something_else_than_a_mesh(self):
        with pytest.raises(TypeError, match="make_mesh"):
            run(mesh=8)

    def test_devices_of_other_processes(self, monkeypatch):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with pytest.raises(ValueError, match="mesh must consist of devices of this process"):
            run(mesh=mesh(2))
