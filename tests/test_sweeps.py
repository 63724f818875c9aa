"""Runs trained together are the runs that `train` makes one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp import Ledger, PrivateData, PublicData
from mirrordp.training import engine
from mirrordp.training.sweep import SweepRun, run_state
from tests import tools
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
        {},
        # Draws above the capacity: the runs need further passes at different steps.
        {"mechanism": mechanism(sampling=tools.poisson(capacity=5))},
        {"stream": True, "average": mirrordp.ExponentialAverage(0.9)},
        {"loss": keyed, "scale_noise": False, "noisy_clip_norm": 0.5},
    ],
    ids=["plain", "overflow", "stream", "keyed"],
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
    steps = sweep([run._replace(seed=number) for number, run in enumerate(RUNS)], spend=ledger)
    next(steps)
    # Three runs read private data in all five steps of the first block, one in four of them.
    one = mechanism()
    expected = one.sampling.event(one.noise_multiplier, 19)
    assert ledger.event == expected
    for _ in steps:
        pass
    assert ledger.event == one.sampling.event(one.noise_multiplier, 3 * 12 + 9)


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
