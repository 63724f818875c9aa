"""Runs trained together are the runs that `train` makes one by one, also after a crash."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp import Budget, Checkpoint, FileLedger, Ledger, PrivateData, PublicData, updates
from mirrordp.mirror import KroneckerMap
from mirrordp.training import engine
from mirrordp.training.checkpoint import CheckpointError
from mirrordp.training.sweep import SweepRun, run_state
from tests import test_federated, tools
from tests.test_training import bits
from tests.tools import last, mechanism

PRIVATE = PrivateData(tools.features())
PUBLIC = PublicData(tools.features(rows=10, seed=1))
THETA = jnp.array([0.5, -0.5, 0.25])
RATED = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5)

RUNS = [
    SweepRun(seed=1),
    SweepRun(seed=2, alpha=0.5, hyperparams={"learning_rate": 0.1}),
    SweepRun(seed=3, alpha=[0.9] * 4 + [0.0] * 3 + [0.2] * 5, hyperparams={"learning_rate": 0.2}),
    SweepRun(seed=2, params=2 * THETA, hyperparams={"learning_rate": 0.1, "momentum": 0.0}),
]


# Runs that are charged must not share their noise.
INDEPENDENT = [run._replace(seed=number) for number, run in enumerate(RUNS)]
CHARGED = [12, 12, 9, 12]


def sweep(runs=RUNS, loss=tools.squared_distance, **options):
    defaults = {"mechanism": mechanism(), "optimizer": RATED, "steps_per_call": 5}
    return tools.train_sweep(loss, THETA, PRIVATE, PUBLIC, runs=runs, **(defaults | options))


def keyed(params, example, key):
    return tools.squared_distance(params, example + 0.1 * jax.random.normal(key, example.shape))


def alone(run: SweepRun, loss=tools.squared_distance, **options):
    optimizer = optax.inject_hyperparams(optax.sgd)(
        **({"learning_rate": 1.0, "momentum": 0.5} | dict(run.hyperparams))
    )
    params = THETA if run.params is None else run.params
    defaults = {"mechanism": mechanism(), "optimizer": optimizer, "steps_per_call": 5}
    return last(
        tools.train(
            loss, params, PRIVATE, PUBLIC, alpha=run.alpha, seed=run.seed, **(defaults | options)
        )
    )


@pytest.mark.parametrize(
    "options",
    [
        {
            # Draws above the capacity: the runs need further passes at different steps.
            "mechanism": mechanism(sampling=tools.poisson(capacity=5)),
            "stream": True,
            "average": mirrordp.ExponentialAverage(0.9),
        },
        {"loss": keyed, "scale_noise": False, "noisy_clip_norm": 0.5},
    ],
    ids=["overflow, streamed", "keyed"],
)
def test_a_sweep_is_its_runs(options):
    states, infos = last(sweep(**options, show_unprivatized=True))
    for number, run in enumerate(RUNS):
        expected, info = alone(run, **options, show_unprivatized=True)
        got = run_state(states, number)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(
            jax.tree.leaves((got.params, got.average)),
            jax.tree.leaves((expected.params, expected.average)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        assert infos[number].step == info.step
        assert infos[number].charged_steps == info.charged_steps
        np.testing.assert_array_equal(infos[number].alpha, info.alpha)
        np.testing.assert_allclose(infos[number].noisy_grad_norm, info.noisy_grad_norm, rtol=1e-5)
        np.testing.assert_allclose(
            infos[number].unprivatized.batch_size, info.unprivatized.batch_size
        )


@pytest.mark.filterwarnings("error")
def test_rates_beside_a_mirror_map_leave_the_map_alone():
    geometry = KroneckerMap.from_public(tools.squared_distance, THETA, PUBLIC, damping=1.0)
    steps = updates.mirror_descent(geometry, 1.0), optax.scale(-1.0)
    rated = optax.chain(*steps, optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    runs = [SweepRun(seed=1, hyperparams={"learning_rate": rate}) for rate in (0.1, 0.2)]
    states, _ = last(sweep(runs, optimizer=rated))
    for number, rate in enumerate((0.1, 0.2)):
        expected, _ = alone(SweepRun(seed=1), optimizer=updates.mirror_descent(geometry, rate))
        np.testing.assert_allclose(states.params[number], expected.params, rtol=2e-5)


def test_a_sweep_of_one():
    states, [info] = last(sweep(RUNS[2:3]))
    expected, _ = alone(RUNS[2])
    np.testing.assert_allclose(states.params[0], expected.params, rtol=2e-5)
    assert info.charged_steps == 9


def test_runs_have_their_own_noise_and_batches():
    states, infos = last(sweep([SweepRun(seed=seed) for seed in (1, 2, 1)], show_unprivatized=True))
    first, second, again = (np.asarray(row) for row in states.params)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, second)
    sizes = [info.unprivatized.batch_size for info in infos]
    assert not np.array_equal(sizes[0], sizes[1])


def test_runs_without_a_seed_differ():
    states, infos = last(sweep([SweepRun(), SweepRun(), SweepRun(seed=3)]))
    assert not np.allclose(states.params[0], states.params[1])
    assert [info.seeded for info in infos] == [False, False, True]


def test_every_run_is_charged_before_it_runs():
    ledger = Ledger(mirrordp.Adjacency.ZERO_OUT)
    steps = sweep(INDEPENDENT, spend=ledger)
    next(steps)
    # Three runs read private data in all five steps of the first block, one in four of them.
    one = mechanism()
    expected = one.sampling.event(one.noise_multiplier, 19)
    assert ledger.event == expected
    for _ in steps:
        pass
    assert ledger.event == one.sampling.event(one.noise_multiplier, sum(CHARGED))


def test_runs_that_share_their_noise_do_not_add_up():
    """They are for comparisons: in the difference of two releases the noise would cancel."""
    ledger = Ledger(mirrordp.Adjacency.ZERO_OUT)
    with pytest.raises(ValueError, match="share their noise, got seed 2 twice"):
        sweep(spend=ledger)
    next(sweep())


def test_one_compilation_for_all_blocks_and_rates():
    list(sweep())
    compiled = engine._run_passes._cache_size()
    faster = [run._replace(hyperparams={"learning_rate": 0.3}) for run in RUNS]
    list(sweep(faster))
    assert engine._run_passes._cache_size() == compiled


def test_a_sweep_of_users_is_its_runs():
    """Cohorts of different sizes, a schedule that reads no private data at times, two starts."""
    start = jnp.ones(3)
    runs = [
        SweepRun(seed=1, alpha=0.5),
        SweepRun(seed=2, alpha=[1.0, 0.0, 0.7, 0.5, 1.0, 0.2], params=2 * start),
    ]
    step = mirrordp.FederatedStep(
        tools.squared_distance, test_federated.mechanism(noise_multiplier=1.0),
        client_learning_rate=0.3, client_batch_size=2, users_per_pass=4, show_unprivatized=True,
    )  # fmt: skip
    data = test_federated.clients(), test_federated.PUBLIC
    options = {"options": mirrordp.TrainOptions(steps_per_call=3)}
    states, infos = last(mirrordp.train_sweep(step, start, *data, runs=runs, **options))
    for number, run in enumerate(runs):
        begin = start if run.params is None else run.params
        expected, info = last(
            mirrordp.train(step, begin, *data, alpha=run.alpha, seed=run.seed, **options)
        )
        got = run_state(states, number)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            if not jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        assert bits(got.noise_state) == bits(expected.noise_state)
        assert infos[number].charged_steps == info.charged_steps
        np.testing.assert_allclose(infos[number].noisy_grad_norm, info.noisy_grad_norm, rtol=1e-5)
        for a, b in zip(infos[number].unprivatized, info.unprivatized, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert np.abs(states.params[0] - states.params[1]).max() > 0.01


@functools.cache
def uninterrupted():
    return last(sweep(INDEPENDENT))


def charged_steps(ledger):
    """For each run of a sweep, the steps of its charges, in the order of the ledger."""
    found = {}
    for record in ledger.records:
        if record["kind"] == "charge":
            steps = range(record["start"], record["stop"])
            found.setdefault(record["run"], []).extend(steps)
    return [found[name] for name in sorted(found)]


class TestCheckpoint:
    """A sweep that is interrupted and resumed is the sweep that never was."""

    def assert_complete(self, resumed, ledger):
        states, infos = uninterrupted()
        assert bits(resumed[-1][0]) == bits(states)
        for info, expected in zip(resumed[-1][1], infos, strict=True):
            assert (info.step, info.charged_steps) == (12, expected.charged_steps)
            np.testing.assert_array_equal(info.noisy_grad_norm, expected.noisy_grad_norm)
        assert charged_steps(ledger) == [list(range(count)) for count in CHARGED]

    @pytest.mark.parametrize("yields", [0, 1, 2])
    def test_resumed_after_a_block(self, tmp_path, yields):
        steps = sweep(INDEPENDENT, checkpoint=Checkpoint(tmp_path))
        for _ in range(yields):
            next(steps)
        steps.close()
        resumed = list(sweep(INDEPENDENT, checkpoint=Checkpoint(tmp_path, resume=True)))
        assert [infos[0].step for _, infos in resumed] == [5, 10, 12][max(0, yields - 1) :]
        self.assert_complete(resumed, FileLedger.read(tmp_path / "ledger.jsonl"))

    @pytest.mark.parametrize("charges", [5, 8])
    def test_resumed_within_a_block(self, tmp_path, monkeypatch, charges):
        """The second block is charged, for one run or for all of them, but not computed."""
        charge, counted = FileLedger.charge, []

        def breaks(self, *args, **options):
            charge(self, *args, **options)
            counted.append(1)
            if len(counted) == charges:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FileLedger, "charge", breaks)
            with pytest.raises(KeyboardInterrupt):
                list(sweep(INDEPENDENT, checkpoint=Checkpoint(tmp_path)))
        ledger = FileLedger.read(tmp_path / "ledger.jsonl")
        before = [10, 5, 4, 5] if charges == 5 else [10, 10, 7, 10]
        assert charged_steps(ledger) == [list(range(count)) for count in before]
        resumed = list(sweep(INDEPENDENT, checkpoint=Checkpoint(tmp_path, resume=True)))
        self.assert_complete(resumed, FileLedger.read(tmp_path / "ledger.jsonl"))

    def test_randomness_of_the_system_is_kept(self, tmp_path):
        """Without seeds, the runs go on with the noise and the batches that they began with."""
        unseeded = [run._replace(seed=None) for run in RUNS]
        steps = sweep(unseeded, checkpoint=Checkpoint(tmp_path / "run"))
        next(steps)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        expected, _ = last(steps)
        resumed, infos = last(
            sweep(unseeded, checkpoint=Checkpoint(tmp_path / "copy", resume=True))
        )
        assert bits(resumed) == bits(expected) != bits(uninterrupted()[0])
        assert [info.seeded for info in infos] == [False] * len(RUNS)

    def test_other_runs_are_refused(self, tmp_path):
        steps = sweep(INDEPENDENT, checkpoint=Checkpoint(tmp_path))
        next(steps)
        steps.close()
        resume = Checkpoint(tmp_path, resume=True)
        others = {
            "alpha": INDEPENDENT[0]._replace(alpha=0.3),
            "starting parameters": INDEPENDENT[0]._replace(hyperparams={"momentum": 0.1}),
            "seed": INDEPENDENT[0]._replace(seed=9),
        }
        for name, other in others.items():
            with pytest.raises(CheckpointError, match=f"differs in: {name}"):
                sweep([other, *INDEPENDENT[1:]], checkpoint=resume)

    def test_on_a_budget_it_is_admitted_and_charged_once(self, tmp_path):
        """The budget holds this sweep once: admitted as a whole again, it would be refused."""
        folder, options = tmp_path / "budget", {"data": PRIVATE}
        with Budget.create(folder, epsilon=1.25, delta=1e-3, **options) as budget:
            steps = sweep(INDEPENDENT, spend=budget, checkpoint=Checkpoint(tmp_path / "run"))
            next(steps)
            steps.close()
        with Budget.open(folder, **options) as budget:
            resume = Checkpoint(tmp_path / "run", resume=True)
            resumed = list(sweep(INDEPENDENT, spend=budget, checkpoint=resume))
            self.assert_complete(resumed, budget.ledger)
            assert budget.status.runs == len(RUNS)
            assert 0.75 < budget.status.used <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": []}, "at least one run"),
        ({"runs": [{"seed": 1}]}, r"runs\[0\]"),
        ({"runs": [SweepRun(hyperparams={"rate": 1.0})]}, "keeps no setting"),
        ({"runs": [SweepRun(params=jnp.zeros(4))]}, "same network"),
        ({"runs": [SweepRun(alpha=2.0)]}, "alpha must be in"),
    ],
)
def test_bad_input(options, message):
    ledger = Ledger(mirrordp.Adjacency.ZERO_OUT)
    with pytest.raises((ValueError, TypeError), match=message):
        sweep(**options, spend=ledger)
    assert ledger.event == Ledger(mirrordp.Adjacency.ZERO_OUT).event
