"""Settings, runs and sweeps of the paper's deep networks."""

import concurrent.futures
import dataclasses
import doctest
import functools
import json
import math
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrordp
from experiments import __main__ as dispatcher, datasets, models
from experiments.deep import paper, results, run, sweep, tasks, training
from experiments.deep.settings import (
    CONFIGS,
    SettingsError,
    WarmStartSettings,
    files_of,
    line_id,
    load,
    point_id,
    set_values,
)
from mirrordp.privacy import Accountant
from tests.experiments import deep_lines

NAMES = sorted(
    str(path.relative_to(CONFIGS).with_suffix(""))
    for path in CONFIGS.glob("*/*.toml")
    if path.stem != "base"
)
NAME = "emnist/cold-s1.89"
# Private examples of the data that we have, with and without those held out for a sweep.
SIZES = {
    ("cifar10", "split"): (48_000, 46_000),
    ("emnist", "split"): (95_851, 93_851),
    ("wikitext2", "split"): (43_543,),
    ("wikitext2", "other"): (45_358,),
}


def settings_of(name, **changes):
    return dataclasses.replace(load(CONFIGS / f"{name}.toml"), **changes)


# Settings files


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_can_be_planned(name):
    settings = load(CONFIGS / f"{name}.toml")
    assert settings.name == name
    place = results.Place.of(name)
    assert place is not None
    assert (place.dataset, place.algorithm) == (settings.dataset, settings.algorithm)
    level = float(place.level[1:])
    assert level == (
        settings.noise_multiplier if place.level[0] == "s" else settings.target_epsilon
    )
    assert tasks.task(settings.dataset).network.init is not None
    if settings.algorithm == "pda":
        warm = load(CONFIGS / f"{settings.sweep.rate_from}.toml")
        same = ("dataset", "noise_multiplier", "target_epsilon", "public_text", "vocabulary")
        assert [getattr(warm, key) for key in same] == [getattr(settings, key) for key in same]
        assert warm.algorithm == "warm"
        assert settings.sweep.decays
    else:
        assert len(settings.sweep.learning_rates) >= 3
    for num_private in SIZES[settings.dataset, settings.public_text]:
        # Calibration takes seconds of accounting and is tested once, below.
        noise = {"noise_multiplier": settings.noise_multiplier or 1.0, "target_epsilon": None}
        found = training.mechanism(dataclasses.replace(settings, **noise), num_private)
        num_steps = found.num_steps
        assert num_steps == int(num_private * settings.epochs / settings.batch_size)
        assert found.noise_multiplier == noise["noise_multiplier"]
        assert found.sampling.sampling_prob == settings.batch_size / num_private
        assert found.l2_clip_norm == 1.0
        assert_step_of(settings, found)
        schedule = training.alpha(settings, num_private)
        if settings.algorithm != "pda":
            assert schedule == 1.0
            continue
        weights = np.asarray(schedule(np.arange(num_steps)))
        assert weights[0] == 1.0
        assert np.all((weights >= 0.0) & (weights <= 1.0))
        # The reading that the table uses never stops looking at private data.
        assert (weights[-1] > 0) == (settings.decay_unit == "epochs")


def assert_step_of(settings, found):
    """Checks that the step of a run can be made, and is what the settings say."""
    step, task = training.train_step(settings, found), tasks.task(settings.dataset)
    mixes = settings.algorithm == "pda"
    assert (step.loss_fn, step.mechanism) == (task.network.loss, found)
    assert step.public_batch_size == (settings.public_batch_size if mixes else None)
    changes_public = mixes and settings.augment_public
    assert step.public_loss_fn is (task.augmented_loss if changes_public else None)
    assert step.scale_noise == settings.scale_noise
    assert step.noisy_clip_norm == (settings.noisy_clip_norm or None)
    assert step.average == mirrordp.ExponentialAverage(settings.average_decay)


@pytest.mark.parametrize("setting", paper.SETTINGS[:6], ids=str)
def test_settings_have_the_papers_epsilon_at_the_papers_size(setting):
    settings = settings_of(f"{setting.dataset}/warm-s{setting.noise_multiplier:g}")
    assert (settings.batch_size, settings.epochs, settings.delta) == (
        setting.batch_size,
        setting.epochs,
        setting.delta,
    )
    found = dataclasses.replace(
        training.mechanism(settings, setting.num_private), accountant=Accountant.RDP
    )
    epsilon = found.epsilon(settings.delta)
    assert epsilon == pytest.approx(setting.epsilon, rel=0.03 if setting.epsilon < 1 else 0.006)
    weaker = dataclasses.replace(found, noise_multiplier=0.9 * found.noise_multiplier)
    assert weaker.epsilon(settings.delta) > 1.05 * setting.epsilon


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.41, 56.63), (1.89, 1.363)])
def test_the_sample_of_emnist_has_an_epsilon_of_its_own(sigma, epsilon):
    """Fewer examples at the same σ, batch size and epochs."""
    settings = settings_of(f"emnist/pda-s{sigma:g}")
    found = dataclasses.replace(training.mechanism(settings, 95_851), accountant=Accountant.RDP)
    assert found.num_steps == 9585
    assert found.epsilon(settings.delta) == pytest.approx(epsilon, rel=1e-3)


def test_calibrated_noise_keeps_its_promise():
    settings = settings_of("emnist/warm-e0.48", epochs=1.0)
    found = training.mechanism(settings, 95_851)
    spent = training.privacy(found, settings.delta)
    assert 0.47 < spent["epsilon_pld"] <= 0.48
    assert spent["epsilon_pld"] < spent["epsilon_rdp"]
    assert (spent["num_steps"], spent["tuning_charged"]) == (191, False)


GOOD = """
dataset = "emnist"
algorithm = "warm"
delta = 1e-6
batch_size = 500
epochs = 50
learning_rate = 1
noise_multiplier = 1.89
"""


def written(folder, text):
    path = folder / "one.toml"
    path.write_text(text)
    return path


def test_whole_numbers_are_numbers(tmp_path):
    settings = load(written(tmp_path, GOOD + "[sweep]\nlearning_rates = [1, 2.0]\n"))
    assert settings.name == "one"
    assert type(settings.learning_rate) is float
    assert [type(rate) for rate in settings.sweep.learning_rates] == [float, float]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "learning_rats = 0.1\n", "one: unknown setting 'learning_rats'. Known are: "),
        (GOOD + "[sweep]\nrates = [1.0]\n", r"one, \[sweep\]: unknown setting 'rates'"),
        (GOOD.replace("batch_size = 500", ""), "one: the setting 'batch_size' is missing"),
        (GOOD.replace("= 500", "= 500.5"), "batch_size must be of type int, got 500.5"),
        (GOOD.replace("= 500", "= true"), "batch_size must be of type int, got True"),
        (GOOD.replace("= 1.89", '= "1.89"'), "noise_multiplier must be of type float, got '1.89'"),
        (GOOD + "seeds = 3\n", "seeds must be a list of int, got 3"),
        (GOOD + "seeds = [1.5]\n", "seeds must be of type int"),
        (GOOD + "seeds = []\n", "at least one seed"),
        (GOOD + "seeds = [0, 1]\n", "another seed than the sweep"),
        (GOOD + "sweep = 3\n", r"expected a table \[sweep\], got 3"),
        (GOOD.replace('"warm"', '"hot"'), "algorithm must be one of cold, warm, pda"),
        (GOOD.replace('"emnist"', '"mnist"'), "dataset must be one of cifar10, emnist, wikitext2"),
        (GOOD + "target_epsilon = 1.0\n", "exactly one of noise_multiplier and target_epsilon"),
        (GOOD + "decay = 100\n", r"decay \(K\) belongs to pda"),
        (GOOD.replace('"warm"', '"pda"'), r"decay \(K\) belongs to pda"),
        (GOOD + 'decay_unit = "days"\n', "decay_unit must be epochs or steps"),
        (GOOD + "learning_rate = 2\n", "one.toml is not TOML: "),
        ('extends = "two.toml"\n' + GOOD, r"cannot read .*two\.toml: No such file"),
        (GOOD.replace("= 500", "= 0"), "batch_size must be positive and finite, got 0"),
        (GOOD.replace("learning_rate = 1", "learning_rate = -1"), "learning_rate must be positive"),
        (
            GOOD.replace("epochs = 50", "epochs = inf"),
            "epochs must be positive and finite, got inf",
        ),
        (GOOD.replace("= 1.89", "= nan"), "noise_multiplier must be positive and finite, got nan"),
        (GOOD.replace("1e-6", "1"), r"delta must be between 0 and 1, got 1\.0"),
        (GOOD + "average_decay = 1\n", r"average_decay must be in \[0, 1\), got 1\.0"),
        (GOOD + "noisy_clip_norm = -1\n", r"noisy_clip_norm must be 0 or more, got -1\.0"),
        (GOOD + "holdout = -1\n", "holdout must be 0 or more, got -1"),
        (GOOD + "seeds = [1, 1]\n", r"seeds must be different and 0 or more, got \[1, 1\]"),
        (GOOD + "seeds = [-1]\n", r"seeds must be different and 0 or more, got \[-1\]"),
        (GOOD + 'vocabulary = "privat"\n', "vocabulary must be one of public, train"),
        (GOOD + 'public_text = "none"\n', "public_text must be one of other, split"),
        (GOOD + "[warm_start]\npatience = 0\n", r"\[warm_start\] patience must be positive"),
        (GOOD + "[sweep]\nlearning_rates = [0]\n", r"\[sweep\] learning_rates must be positive"),
        (GOOD + "[sweep]\nseed = -1\n", r"\[sweep\] seed must be 0 or more, got -1"),
    ],
)
def test_errors_say_what_is_wrong_with_a_file(tmp_path, text, message):
    with pytest.raises(SettingsError, match=message):
        load(written(tmp_path, text))


def test_a_file_overrides_what_it_extends(tmp_path):
    (tmp_path / "base.toml").write_text(GOOD + "[warm_start]\npatience = 3\nbatch_size = 8\n")
    text = 'extends = "base.toml"\nlearning_rate = 0.5\n[warm_start]\npatience = 7\n'
    settings = load(written(tmp_path, text))
    assert settings.learning_rate == 0.5
    assert settings.warm_start == WarmStartSettings(patience=7, batch_size=8)


def test_a_folder_stands_for_its_files():
    found = files_of([CONFIGS / "emnist", CONFIGS / "cifar10" / "base.toml"])
    assert [path.stem for path in found[:2]] == ["cold-e0.48", "cold-e25.80"]
    assert len(found) == 13
    # A file that is named is meant, even where it is no run.
    assert found[-1].stem == "base"
    assert len(files_of([CONFIGS])) == len(NAMES)


def test_a_folder_without_settings_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"holds no settings file \(\*.toml\)"):
        files_of([tmp_path])


def test_set_values_writes_numbers_in_place(tmp_path):
    text = "# about\nlearning_rate = 0.2  # old\ndecay = 2000\n\n[sweep]\ndecays = [1]\n"
    path = written(tmp_path, text)
    set_values(path, learning_rate=0.5, decay=200.0)
    assert path.read_text() == (
        "# about\nlearning_rate = 0.5\ndecay = 200\n\n[sweep]\ndecays = [1]\n"
    )
    with pytest.raises(SettingsError, match=r"expected one line 'eta = ...', found 0"):
        set_values(path, eta=1.0)


# Runs on made-up data of the right shapes


@pytest.fixture
def three_steps(monkeypatch):
    """A function that takes three steps of a settings file on a few made-up rows."""

    def run(name, made):
        settings = load(CONFIGS / f"{name}.toml")
        monkeypatch.setattr(tasks, "task", made.__getitem__)
        # K is as short as the run, so that α moves; with one σ, one δ and one rate of the warm
        # start, runs share compiled programs and accounting.
        decay = settings.decay and 2.5 * (24 / 2) ** (settings.decay_unit == "steps")
        settings = dataclasses.replace(
            settings,
            batch_size=2,
            epochs=2.0,
            public_batch_size=2,
            noise_multiplier=2.0,
            target_epsilon=None,
            delta=1e-5,
            decay=decay,
            warm_start=dataclasses.replace(
                settings.warm_start, learning_rate=0.1, max_epochs=1, batch_size=4, refit=False
            ),
        )
        sizes = {"num_private": 24, "num_public": 8, "num_validation": 4, "num_test": 4}
        data = training.Loaded.of(datasets.synthetic(settings.dataset, **sizes))
        warm_starts = training.WarmStarts()
        if settings.algorithm != "cold":
            with pytest.warns(RuntimeWarning, match="the warm start did not converge"):
                warm_starts.get(settings, data, 1)
        [line] = training.run_points([(settings, 1)], data, warm_starts, kind="final", max_steps=3)
        assert line["config"] == name
        assert line["curve"]["step"] == [0, 1, 2, 3]
        assert all(math.isfinite(value) for value in line["final"].values())
        losses = line["curve"]["last_test_loss"]
        assert len(set(losses)) == 4, losses
        return line

    return run


# The paper's networks with fewer channels; test_models.py is about their sizes.
NARROW = {
    "cifar10": models.cifar10_cnn((2, 2, 2, 2, 3, 3), hidden=4),
    "emnist": models.emnist_cnn((2, 3), hidden=4),
    "wikitext2": models.lstm_language_model(width=3, layers=1),
}
NARROW = {
    name: tasks.with_network(name, network._replace(init=jax.jit(network.init)))
    for name, network in NARROW.items()
}


@pytest.mark.parametrize("name", ["cifar10/pda-s20", "emnist/pda-s1.89", "wikitext2/pda-s1.08"])
def test_every_network_runs_three_steps(name, three_steps):
    """PDA-DPMD goes through all losses of a network; the algorithms are compared below."""
    line = three_steps(name, NARROW)
    assert set(line["final"]) == {
        f"{iterate}_{part}_{metric}"
        for iterate in ("last", "average")
        for part in ("validation", "test")
        for metric in ("loss", "accuracy")
    }
    assert line["privacy"]["epsilon_pld"] > 0
    assert line["data"]["label"] == f"synthetic data in the shape of {name.split('/')[0]}"
    assert line_id(line) == line["id"]
    json.dumps(line, allow_nan=False)


def _linear_task(num_inputs, num_classes, changed=None):
    """An image task with a linear network, which compiles sooner."""

    def init(key):
        shape = (num_inputs, num_classes)
        return {"weights": 0.01 * jax.random.normal(key, shape), "bias": jnp.zeros(num_classes)}

    def augmented_loss(params, example, key):
        image, label = example
        return network.loss(params, (changed(image, key), label))

    network = models._classifier(init, _linear)
    metrics = functools.partial(tasks._image_metrics, network)
    loss = augmented_loss if changed else network.loss
    return tasks.Task(network, loss, metrics, loss)


def _linear(params, image):
    return image.reshape(-1) @ params["weights"] + params["bias"]


def _bigram_task():
    """WikiText-2's task with a network that knows one word of the past."""

    def init(key):
        return {"table": 0.1 * jax.random.normal(key, (8000, 2)), "out": jnp.ones((2, 8000))}

    def predict(params, tokens):
        return params["table"][tokens] @ params["out"]

    network = models.lstm_language_model()._replace(init=init, predict=predict)
    network = network._replace(
        loss=lambda params, row: tasks._text_metrics(network, params, row)["loss"]
    )
    metrics = functools.partial(tasks._text_metrics, network)
    return tasks.Task(network, network.loss, metrics, network.loss)


LINEAR = _linear_task(784, 47)
SMALL = {
    "cifar10": _linear_task(32 * 32 * 3, 10, tasks.shift_and_mirror),
    "emnist": _linear_task(784, 47, tasks.warp),
    "wikitext2": _bigram_task(),
}


def code_path(settings):
    """Returns everything that decides which code a run executes, apart from the data set."""
    reads_public, mixes = settings.algorithm != "cold", settings.algorithm == "pda"
    start = settings.warm_start
    return (
        settings.algorithm,
        settings.noisy_clip_norm > 0,
        reads_public and (settings.augment_public, start.optimizer, start.average_decay > 0),
        mixes and (settings.decay_unit, settings.scale_noise),
    )


# The first settings file of each code path; what differs within one is numbers and data.
PATHS = {code_path(load(CONFIGS / f"{name}.toml")): name for name in reversed(NAMES)}


@pytest.mark.parametrize("name", sorted(PATHS.values()))
def test_every_code_path_runs_three_steps(name, three_steps, monkeypatch):
    """Small networks suffice: networks and accountants have tests of their own."""
    monkeypatch.setattr(training, "privacy", lambda found, delta: {"num_steps": found.num_steps})
    line = three_steps(name, SMALL)
    assert (line["warm_start"] == {}) == (line["settings"]["algorithm"] == "cold")


@pytest.fixture(scope="module")
def small_runs():
    """Two runs of PDA-DPMD in one call, and each alone."""
    data = training.Loaded.of(datasets.synthetic("emnist", num_private=48, num_public=16))
    settings = settings_of(
        "emnist/pda-s1.89",
        batch_size=8,
        epochs=2.0,
        public_batch_size=4,
        average_decay=0.5,
        warm_start=WarmStartSettings(max_epochs=2, batch_size=4),
    )
    points = [
        # Both reach α = 0, at different times, so that alone they share one program.
        (dataclasses.replace(settings, learning_rate=0.5, decay=1.5), 1),
        (dataclasses.replace(settings, learning_rate=0.1, decay=1.0), 2),
    ]
    warm_starts = training.WarmStarts()

    def go(points, kind="final"):
        return training.run_points(points, data, warm_starts, kind=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "task", lambda dataset: LINEAR)
        patch.setattr(training, "privacy", lambda found, delta: {"delta": delta})
        for point in points:
            with pytest.warns(RuntimeWarning, match="the warm start did not converge"):
                warm_starts.get(point[0], data, point[1])
        yield points, go


def test_runs_together_are_the_runs_alone(small_runs):
    points, go = small_runs
    together = go(points)
    for point, found in zip(points, together, strict=True):
        [alone] = go([point])
        assert found["id"] == alone["id"]
        assert (found["trained_together"], alone["trained_together"]) == (2, 1)
        for name, values in alone["curve"].items():
            np.testing.assert_allclose(found["curve"][name], values, atol=2e-5, err_msg=name)
    first, second = (np.array(found["curve"]["last_test_loss"]) for found in together)
    assert np.abs(first - second).max() > 1e-3
    other = dataclasses.replace(points[0][0], noisy_clip_norm=0.0)
    with pytest.raises(ValueError, match="may differ in learning rate, K and seed only"):
        go([points[0], (other, 1)])


def test_a_sweep_never_looks_at_the_test_split(small_runs):
    points, go = small_runs
    [found] = go(points[:1], kind="sweep")
    assert "test" not in json.dumps(found)
    assert "average_validation_loss" in found["final"]


# What a settings file says reaches the library


@pytest.fixture
def asked(monkeypatch):
    """`train_sweep` without training: what it was asked, and a state that is not where it began."""
    found = {}

    def fake(step, params, private, public, *, runs, num_steps, options):
        found.update(step=step, private=private, public=public, runs=runs, num_steps=num_steps)
        found["steps_per_call"] = options.steps_per_call
        states = types.SimpleNamespace(params=_moved(runs, 1.0), average=_moved(runs, 2.0))
        yield states, [types.SimpleNamespace(step=num_steps)]

    def pretrain(settings, data, cold, seed):
        params = jax.tree.map(lambda leaf: leaf + 0.1, cold)
        return params, {"digest": training._digest(params)}

    monkeypatch.setattr(training, "train_sweep", fake)
    monkeypatch.setattr(training, "_warm_start", pretrain)
    monkeypatch.setattr(training, "privacy", lambda found, delta: {"delta": delta})
    monkeypatch.setattr(tasks, "task", SMALL.__getitem__)
    return found


def _moved(runs, scale):
    """Parameters of all runs, one row each, away from their starts."""
    leaves = [jax.tree.map(lambda leaf: leaf + scale * jnp.cos(leaf), run.params) for run in runs]
    return training._stacked(leaves)


@pytest.fixture(scope="module")
def made_up():
    """Data whose parts differ in size, so that none can pass for another."""
    return training.Loaded.of(
        datasets.synthetic("emnist", num_private=24, num_public=8, num_validation=5, num_test=7)
    )


def points_of(algorithm, seeds=(4, 5), **changes):
    small = {"batch_size": 2, "epochs": 3.0} | changes
    settings = settings_of(f"emnist/{algorithm}-s1.89", **small)
    return [(dataclasses.replace(settings, learning_rate=0.1 * seed), seed) for seed in seeds]


def run_these(points, data, kind="final"):
    return training.run_points(points, data, training.WarmStarts(), kind=kind)


def test_a_run_is_what_its_settings_say(asked, made_up):
    points = points_of(
        "pda",
        l2_clip_norm=0.7,
        noisy_clip_norm=0.3,
        scale_noise=False,
        average_decay=0.5,
        public_batch_size=3,
        decay=2.0,
    )
    run_these(points, made_up)
    step, mechanism = asked["step"], asked["step"].mechanism
    assert mechanism.l2_clip_norm == 0.7
    assert mechanism.noise_multiplier == 1.89
    assert mechanism.sampling.sampling_prob == 2 / 24
    assert asked["num_steps"] == mechanism.num_steps == 36
    assert (step.noisy_clip_norm, step.scale_noise) == (0.3, False)
    assert step.average == mirrordp.ExponentialAverage(0.5)
    assert step.public_batch_size == 3
    # Public images are changed at random, private ones never.
    assert step.loss_fn is SMALL["emnist"].network.loss
    assert step.public_loss_fn is SMALL["emnist"].augmented_loss
    assert asked["private"] is made_up.private
    assert asked["public"] is made_up.public
    assert (len(made_up.private), len(made_up.public)) == (24, 8)
    # Every run has its own seed, which decides its batches and its noise, and its own start.
    assert [run.seed for run in asked["runs"]] == [4, 5]
    assert [run.hyperparams for run in asked["runs"]] == [
        {"learning_rate": 0.1 * seed} for seed in (4, 5)
    ]
    first, second = (run.params["weights"] for run in asked["runs"])
    assert not np.allclose(first, second)
    # K = 2 epochs of 12 steps.
    np.testing.assert_allclose(asked["runs"][0].alpha(12), math.cos(math.pi / 4), rtol=1e-6)

    run_these(points_of("pda", scale_noise=True, noisy_clip_norm=0.0), made_up)
    assert (asked["step"].noisy_clip_norm, asked["step"].scale_noise) == (None, True)
    run_these(points_of("pda", augment_public=False), made_up)
    assert asked["step"].public_loss_fn is None


@pytest.mark.parametrize("algorithm", ["cold", "warm"])
def test_dp_sgd_sees_no_public_gradient(algorithm, asked, made_up):
    run_these(points_of(algorithm), made_up)
    assert asked["public"] is None
    assert [run.alpha for run in asked["runs"]] == [1.0, 1.0]
    starts = [SMALL["emnist"].network.init(jax.random.key(seed)) for seed in (4, 5)]
    same = [
        np.array_equal(run.params["weights"], start["weights"])
        for run, start in zip(asked["runs"], starts, strict=True)
    ]
    assert same == [algorithm == "cold"] * 2


def test_warm_and_pda_begin_at_one_point_and_cold_elsewhere(asked, made_up):
    warm_starts = training.WarmStarts()
    cold, warm, pda = (
        training.run_points(points_of(name, (1,)), made_up, warm_starts, kind="final")[0]
        for name in ("cold", "warm", "pda")
    )
    assert [line["settings"]["algorithm"] for line in (cold, warm, pda)] == ["cold", "warm", "pda"]
    assert cold["warm_start"] == {}
    assert results.same_start(warm, pda)
    assert not results.same_start(cold, warm)


def test_curves_are_of_the_part_and_the_iterate_that_they_name(asked, made_up):
    points = points_of("cold")
    [_, line] = run_these(points, made_up)
    for iterate, scale in (("last", 1.0), ("average", 2.0)):
        params = _moved(asked["runs"], scale)
        for part, examples in (("validation", made_up.validation), ("test", made_up.test)):
            values = tasks.evaluate(SMALL["emnist"], params, examples, batch_size=99)
            for name, value in values.items():
                key = f"{iterate}_{part}_{name}"
                assert line["final"][key] == pytest.approx(float(value[1]), abs=1e-5), key
                assert line["curve"][key][-1] == line["final"][key]
    assert len({value for key, value in line["final"].items() if "loss" in key}) == 4
    [sweep_line, _] = run_these(points, made_up, kind="sweep")
    assert set(sweep_line["final"]) == {key for key in line["final"] if "validation" in key}


def test_curves_have_about_twenty_points_evenly_apart(asked, made_up):
    """A last block of a few steps would be drawn as a spike at the end of every curve."""
    for epochs, num_steps in ((10.0, 120), (798.75, 9585), (0.25, 3)):
        run_these(points_of("cold", epochs=epochs), made_up)
        assert asked["num_steps"] == num_steps
        blocks, rest = divmod(num_steps, asked["steps_per_call"])
        assert blocks + (rest > 0) == min(num_steps, 20)
        assert rest == 0 or rest > asked["steps_per_call"] / 2


def test_what_is_known_of_private_text_stays_out_of_the_line(asked, made_up):
    notes = ["vocabulary: read", "unknown_rate.private: a rate over private text"]
    facts = made_up.prepared.facts | {
        "unknown_rate": {"private": 0.123456, "public": 0.2, "test": 0.3},
        "not_covered": notes,
    }
    prepared = dataclasses.replace(made_up.prepared, facts=facts)
    [line] = run_these(
        points_of("cold", seeds=(1,)), dataclasses.replace(made_up, prepared=prepared)
    )
    assert line["data"]["unknown_rate"] == {"public": 0.2, "test": 0.3}
    assert line["data"]["not_covered"] == notes[:1]
    assert "0.123456" not in json.dumps(line)


@pytest.mark.parametrize("augment", [True, False])
def test_the_warm_start_reads_public_data_only(augment, monkeypatch, made_up):
    asked = {}

    def fake(loss_fn, params, public, **options):
        asked.update(options, loss_fn=loss_fn, params=params, public=public)
        return mirrordp.updates.public.WarmStart(params, True, 1, np.ones(1), np.ones(1))

    monkeypatch.setattr(mirrordp, "warm_start", fake)
    monkeypatch.setattr(tasks, "task", SMALL.__getitem__)
    chosen = WarmStartSettings(batch_size=3, patience=4, max_epochs=5, refit=augment)
    [(settings, seed)] = points_of("warm", seeds=(6,), warm_start=chosen, augment_public=augment)
    training.WarmStarts().get(settings, made_up, seed)
    task = SMALL["emnist"]
    assert asked["public"] is made_up.public
    np.testing.assert_array_equal(
        asked["params"]["weights"], task.network.init(jax.random.key(6))["weights"]
    )
    names = ("batch_size", "patience", "max_epochs", "refit", "seed")
    assert [asked[name] for name in names] == [3, 4, 5, augment, 6]
    assert asked["loss_fn"] is (task.augmented_loss if augment else task.network.loss)
    assert asked["holdout_loss_fn"] is (task.judging_loss if augment else None)


def test_sgd_of_the_warm_start_clips_its_gradient():
    optimizer = training._pretraining("sgd", 2.0)
    gradient = {"a": jnp.array([3.0, 4.0])}
    update, _ = optimizer.update(gradient, optimizer.init(gradient))
    np.testing.assert_allclose(update["a"], [-1.2, -1.6], rtol=1e-6)


def test_settings_that_pretrain_otherwise_share_no_warm_start(monkeypatch, made_up):
    """Two vocabularies give the same words other numbers: their starts must never be mixed up."""
    calls = []
    monkeypatch.setattr(tasks, "task", SMALL.__getitem__)
    monkeypatch.setattr(
        training, "_warm_start", lambda settings, data, cold, seed: (cold, calls.append(seed))
    )
    [(base, seed)] = points_of("warm", seeds=(1,))
    starts = training.WarmStarts()
    different = [
        {"vocabulary": "public"},
        {"public_text": "other"},
        {"augment_public": False},
        {"warm_start": dataclasses.replace(base.warm_start, learning_rate=0.5)},
    ]
    for changes in ({}, *different):
        for learning_rate in (0.1, 0.2):
            settings = dataclasses.replace(base, learning_rate=learning_rate, **changes)
            starts.get(settings, made_up, seed)
    other_data = dataclasses.replace(made_up.prepared, label="other data")
    starts.get(base, dataclasses.replace(made_up, prepared=other_data), seed)
    assert len(calls) == 1 + len(different) + 1


# Metrics


@pytest.mark.parametrize("batch_size", [3, 7, 10])
def test_metrics_are_means_over_all_examples(batch_size):
    """Each example counts once, also where the last batch is not full."""
    rng = np.random.default_rng(0)
    params = {
        "weights": rng.standard_normal((2, 784, 47)).astype(np.float32),
        "bias": np.zeros((2, 47), np.float32),
    }
    images = rng.standard_normal((7, 28, 28, 1)).astype(np.float32)
    labels = np.array([0, 1, 2, 3, 4, 5, 6], np.int32)
    logits = images.reshape(7, -1) @ params["weights"]
    # The first run is right about two examples of seven, the second about none.
    labels[:2] = logits[0, :2].argmax(axis=1)
    right = (logits.argmax(axis=2) == labels).mean(axis=1)
    assert right[0] >= 2 / 7
    largest = logits.max(axis=2, keepdims=True)
    normaliser = np.log(np.exp(logits - largest).sum(axis=2)) + largest[..., 0]
    losses = normaliser - logits[:, np.arange(7), labels]
    found = tasks.evaluate(LINEAR, params, (images, labels), batch_size=batch_size)
    np.testing.assert_allclose(found["accuracy"], right, rtol=1e-6)
    np.testing.assert_allclose(found["loss"], losses.mean(axis=1), rtol=1e-5)


def test_metrics_of_text_are_of_the_next_word():
    """A network that always repeats the word before it, on two rows."""

    def predict(params, tokens):
        return 10.0 * jax.nn.one_hot(tokens, 4)

    network = models.Network(None, predict, None)
    rows = jnp.array([[1, 1, 1, 2, 2], [0, 1, 2, 3, 0]])
    metrics = functools.partial(tasks._text_metrics, network)
    task = tasks.Task(network, None, metrics, None)
    found = tasks.evaluate(task, {"none": jnp.zeros((1, 1))}, rows, batch_size=2)
    assert found["accuracy"] == pytest.approx(3 / 8)
    right, wrong = math.log1p(3 * math.exp(-10)), math.log(3 + math.exp(10))
    assert found["loss"] == pytest.approx((3 * right + 5 * wrong) / 8, rel=1e-5)


# Sessions: what is there is not computed again


def test_a_sweep_holds_examples_out_and_final_runs_have_all(tmp_path):
    asked = []

    def read(settings, holdout):
        asked.append((settings.dataset, holdout, settings.vocabulary, settings.public_text))
        return datasets.synthetic(settings.dataset, num_private=8, num_public=2, num_test=2)

    own = run.Session(tmp_path, read, quiet=True)
    images = settings_of("cifar10/warm-s20")
    for kind in ("sweep", "sweep", "final", "final"):
        own.data(images, kind)
    assert asked == [("cifar10", 2000, "train", "split"), ("cifar10", 0, "train", "split")]
    asked.clear()
    for name in ("warm-s0.5", "public-vocabulary-warm-s0.5", "other-text-warm-e1"):
        for kind in ("sweep", "final"):
            own.data(settings_of(f"wikitext2/{name}"), kind)
    assert asked == [
        ("wikitext2", 0, "train", "split"),
        ("wikitext2", 0, "public", "split"),
        ("wikitext2", 0, "train", "other"),
    ]


def test_the_commands_read_the_data_that_the_settings_name(tmp_path, counted, monkeypatch):
    asked = []

    def prepare(name, data_root, **options):
        asked.append((name, data_root, options))
        return datasets.synthetic(name, num_private=8, num_public=2, num_test=2)

    monkeypatch.setattr(datasets, "prepare", prepare)
    options = ["--quiet", "--results", str(tmp_path), "--data-root", str(tmp_path / "data")]
    for name in ("wikitext2/public-vocabulary-cold-s0.5", "wikitext2/other-text-cold-e1", NAME):
        assert dispatcher.main(["run", str(CONFIGS / f"{name}.toml"), *options]) == 0
    data = tmp_path / "data"
    assert asked == [
        ("wikitext2", data, {"holdout": 0, "vocabulary": "public", "public_text": "split"}),
        ("wikitext2", data, {"holdout": 0, "vocabulary": "train", "public_text": "other"}),
        ("emnist", data, {"holdout": 0}),
    ]


@pytest.fixture
def counted(monkeypatch):
    """`run_points` without training; returns the list of the points that were asked for."""
    asked = []

    def fake(points, data, warm_starts, *, kind, on_progress, max_steps, shared):
        asked.append([(settings.name, settings.learning_rate, seed) for settings, seed in points])
        data = {"label": data.prepared.label, "num_private": len(data.private)}
        return [deep_lines.line(settings, seed, kind=kind, **data) for settings, seed in points]

    monkeypatch.setattr(run, "run_points", fake)
    return asked


def session(folder, **options):
    def read(settings, holdout):
        return datasets.synthetic(settings.dataset, num_private=8, num_public=2, num_test=2)

    return run.Session(folder, read, quiet=True, **options)


# The line that was cut stays in the file, so that every later look warns again.
@pytest.mark.filterwarnings("ignore:emnist.jsonl, line 3")
def test_a_finished_run_is_skipped_and_a_cut_one_is_computed_again(tmp_path, counted):
    settings = settings_of("emnist/pda-s1.89", together=1)
    points = [(settings, seed) for seed in (1, 2, 3)]
    first = session(tmp_path).lines(points, kind="final")
    assert [found["seed"] for found in first] == [1, 2, 3]
    assert len(counted) == 3
    assert session(tmp_path).lines(points, kind="final") == first
    assert len(counted) == 3
    path = tmp_path / "emnist.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"emnist.jsonl, line 3: expected one JSON object"):
        again = session(tmp_path).lines(points, kind="final")
    assert again == first
    assert counted[3:] == [[(settings.name, settings.learning_rate, 3)]]
    # Another kind of run, other settings and another K are other runs.
    session(tmp_path).lines(points[:1], kind="sweep")
    session(tmp_path).lines([(dataclasses.replace(settings, decay=9.0), 1)], kind="final")
    assert len(counted) == 6


def test_a_sweep_that_goes_on_compares_runs_from_one_start(tmp_path, monkeypatch):
    """Another machine, another warm start: what was tried before is tried again from there."""
    starts, computed = [{"digest": "here"}], []

    def fake(points, data, warm_starts, *, kind, **_):
        computed.append([(settings.decay, starts[0]["digest"]) for settings, _ in points])
        facts = {"label": data.prepared.label, "num_private": len(data.private)}
        made = [deep_lines.line(settings, seed, kind=kind, **facts) for settings, seed in points]
        return [one | {"warm_start": starts[0]} for one in made]

    class Starts:
        def __init__(self, folder):
            pass

        def get(self, *_):
            return None, starts[0]

    monkeypatch.setattr(run, "run_points", fake)
    monkeypatch.setattr(run, "WarmStarts", Starts)
    settings = settings_of("emnist/pda-s1.89", together=1)
    points = [(dataclasses.replace(settings, decay=decay), 0) for decay in (1.0, 2.0, 3.0)]
    session(tmp_path).lines(points[:2], kind="sweep")
    starts[0] = {"digest": "there"}
    # Nothing is missing: what is there stays.
    session(tmp_path).lines(points[:2], kind="sweep")
    assert computed == [[(1.0, "here")], [(2.0, "here")]]
    found = session(tmp_path).lines(points, kind="sweep")
    assert computed[2:] == [[(1.0, "there")], [(2.0, "there")], [(3.0, "there")]]
    assert [line["warm_start"]["digest"] for line in found] == ["there"] * 3
    assert session(tmp_path).lines(points, kind="sweep") == found
    assert len(computed) == 5
    # Final runs are never made anew; tables say which pairs have one start.
    session(tmp_path).lines(points[:2], kind="final")
    starts[0] = {"digest": "elsewhere"}
    session(tmp_path).lines(points, kind="final")
    assert len(computed) == 8


def test_how_a_number_is_spelled_makes_no_other_run():
    settings = settings_of("emnist/pda-s1.89", decay=200.0)
    spelled = settings_of("emnist/pda-s1.89", decay=200)
    options = {"kind": "sweep", "seed": 0, "num_private": 8, "label": "x"}
    assert point_id(settings, **options) == point_id(spelled, **options)
    other = dataclasses.replace(settings, decay=201.0)
    assert point_id(settings, **options) != point_id(other, **options)


def test_runs_train_together_as_settings_say(tmp_path, counted):
    settings = settings_of("emnist/warm-s1.89", together=2)
    lines = session(tmp_path).lines([(settings, seed) for seed in (1, 2, 3)], kind="final")
    # The second group has the first one's program, filled up with its last run (one line is kept).
    assert [[point[-1] for point in group] for group in counted] == [[1, 2], [3, 3]]
    assert [line["seed"] for line in lines] == [1, 2, 3]
    assert len(results.by_id(tmp_path)) == 3
    assert len((tmp_path / "emnist.jsonl").read_text().splitlines()) == 3
    # A run alone stays alone.
    counted.clear()
    session(tmp_path).lines([(settings, 4)], kind="final")
    assert [len(group) for group in counted] == [1]


def test_no_run_begins_that_would_not_end_in_time(tmp_path, counted, monkeypatch):
    clock = [0.0]

    def compute(points, data, warm_starts, **options):
        clock[0] += 40.0
        counted.append(points)
        data = {"label": data.prepared.label, "num_private": len(data.private)}
        return [deep_lines.line(settings, seed, **data) for settings, seed in points]

    monkeypatch.setattr(run, "run_points", compute)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    settings = settings_of("emnist/warm-s1.89", together=1)
    points = [(settings, seed) for seed in (1, 2, 3)]
    with pytest.raises(run.OutOfTime):
        session(tmp_path, deadline=100.0).lines(points, kind="final")
    # A third run would have ended after 120.
    assert len(counted) == 2
    assert len(results.by_id(tmp_path)) == 2


def test_commands_say_in_one_line_what_is_wrong(tmp_path, counted, capsys):
    config = str(CONFIGS / f"{NAME}.toml")
    options = ["--synthetic", "--quiet", "--results", str(tmp_path)]
    assert dispatcher.main(["run", config, *options, "--max-seconds", "-1"]) == 3
    assert "the same command continues" in capsys.readouterr().out
    assert counted == []
    assert dispatcher.main(["run", config, *options, "--seeds", "5"]) == 0
    assert counted == [[(NAME, settings_of(NAME).learning_rate, 5)]]
    assert dispatcher.main(["run", config, "--results", str(tmp_path), "--max-steps", "3"]) == 2
    assert "a cut run is no result" in capsys.readouterr().err
    assert dispatcher.main(["run", config, *options, "--seeds", "0"]) == 2
    assert "another seed than the sweep" in capsys.readouterr().err
    assert dispatcher.main(["run", config, "--synthetic"]) == 2
    assert "--synthetic needs --results FOLDER" in capsys.readouterr().err
    assert len(counted) == 1
    assert dispatcher.main(["sweep", str(tmp_path / "none.toml"), *options]) == 2
    assert f"error: cannot read {tmp_path / 'none.toml'}" in capsys.readouterr().err
    assert dispatcher.main(["run", config, *options, "--seeds", "1", "1"]) == 2
    assert "seeds must be different" in capsys.readouterr().err
    assert dispatcher.main(["run", config, *options, "--max-steps", "0"]) == 2
    assert "--max-steps must be at least 1, got 0" in capsys.readouterr().err
    assert len(counted) == 1


def test_results_that_could_not_be_kept_are_not_computed(tmp_path, counted, capsys):
    (tmp_path / "file").write_text("")
    config = str(CONFIGS / f"{NAME}.toml")
    options = ["--synthetic", "--quiet", "--results", str(tmp_path / "file")]
    assert dispatcher.main(["run", config, *options]) == 2
    assert "expected a folder that can be written for --results" in capsys.readouterr().err
    assert counted == []


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_points", interrupted)
    config = str(CONFIGS / f"{NAME}.toml")
    options = ["--synthetic", "--quiet", "--results", str(tmp_path)]
    assert dispatcher.main(["run", config, *options]) == 130
    assert "the same command continues" in capsys.readouterr().err


# Sweeps


class FakeSession:
    """Answers a sweep from a formula, and remembers what was asked."""

    def __init__(self, score):
        self.score, self.tried = score, []

    def lines(self, points, *, kind):
        assert kind == "sweep"
        found = []
        for settings, seed in points:
            assert seed == settings.sweep.seed == 0
            point = (settings.algorithm, settings.learning_rate, settings.decay)
            if point not in self.tried:
                self.tried.append(point)
            loss, accuracy = self.score(settings)
            found.append(deep_lines.line(settings, 0, kind=kind, loss=loss, accuracy=accuracy))
        return found


def peak(rate):
    """Accuracy is best at `rate`; the loss would choose the smallest rate."""

    def score(settings):
        return 1 + settings.learning_rate, 0.7 - 0.1 * abs(math.log(settings.learning_rate / rate))

    return score


@pytest.mark.parametrize("best", [5.0, 0.2, 0.01])
def test_a_sweep_widens_until_the_best_rate_has_neighbours(best):
    fake = FakeSession(peak(best))
    settings = settings_of("cifar10/warm-s1.51")
    assert settings.sweep.learning_rates == (0.1, 0.2, 0.5)
    assert sweep.sweep_of(settings, fake) == {"learning_rate": best}
    rates = sorted(rate for _, rate, _ in fake.tried)
    assert {sweep.neighbour(best, -1), best, sweep.neighbour(best, 1)} <= set(rates)
    low, high = min(best, 0.2), max(best, 0.2)
    assert rates[0] == sweep.neighbour(low, -1)
    assert rates[-1] == sweep.neighbour(high, 1)


def test_a_sweep_without_end_is_given_up():
    settings = settings_of("cifar10/warm-s1.51")
    with pytest.raises(SettingsError, match="keeps moving"):
        sweep.sweep_of(settings, FakeSession(lambda settings: (1.0, settings.learning_rate / 1e9)))


def test_text_is_judged_by_its_loss():
    fake = FakeSession(
        lambda settings: (5 + abs(math.log(settings.learning_rate / 2)), settings.learning_rate)
    )
    assert sweep.sweep_of(settings_of("wikitext2/warm-s0.5"), fake) == {"learning_rate": 2.0}


def test_a_run_that_diverged_is_never_chosen():
    def score(settings):
        diverged = settings.learning_rate > 0.2
        return (None, 0.99) if diverged else (1.0, 0.5 + settings.learning_rate)

    fake = FakeSession(score)
    assert sweep.sweep_of(settings_of("cifar10/cold-s1.51"), fake) == {"learning_rate": 0.2}


def test_k_is_searched_by_loss_at_the_best_rate_of_warm():
    def score(settings):
        if settings.algorithm == "warm":
            return peak(0.2)(settings)
        # The loss wants K = 500, the accuracy K = 5000, and then a larger rate.
        loss = 1 + abs(math.log(settings.decay / 500))
        return loss, 0.5 + settings.decay / 1e5 + 0.01 * settings.learning_rate

    settings = settings_of("cifar10/pda-s1.51")
    fake = FakeSession(score)
    assert sweep.sweep_of(settings, fake) == {"learning_rate": 0.5, "decay": 500.0}
    tried = [point[1:] for point in fake.tried if point[0] == "pda"]
    assert tried == [(0.2, decay) for decay in settings.sweep.decays] + [(0.1, 500), (0.5, 500)]
    assert {point[1] for point in fake.tried if point[0] == "warm"} == {0.1, 0.2, 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cifar10/pda-s20", {"rate_from": None}, "rate_from must name warm's settings"),
        ("cifar10/pda-s20", {"decays": ()}, "decays is empty"),
        ("cifar10/warm-s20", {"learning_rates": ()}, "learning_rates is empty"),
        ("cifar10/warm-s20", {"learning_rates": (0.3,)}, "1, 2 or 5 times a power of ten"),
    ],
)
def test_a_sweep_that_cannot_begin_says_why(name, changes, message):
    settings = settings_of(name)
    settings = dataclasses.replace(settings, sweep=dataclasses.replace(settings.sweep, **changes))
    with pytest.raises(SettingsError, match=message):
        sweep.sweep_of(settings, FakeSession(peak(0.05)))


def test_the_command_writes_the_best_back_unless_told_not_to(tmp_path, counted, monkeypatch):
    base = (CONFIGS / "emnist" / "base.toml").read_text()
    (tmp_path / "base.toml").write_text(base)
    path = tmp_path / "cold-s1.89.toml"
    path.write_text((CONFIGS / f"{NAME}.toml").read_text())
    monkeypatch.setattr(sweep, "open_session", lambda arguments: FakeSession(peak(0.5)))
    before = path.read_text()
    for option in ("--keep", "--synthetic"):
        assert dispatcher.main(["sweep", str(path), option]) == 0
        assert path.read_text() == before
    assert dispatcher.main(["sweep", str(path)]) == 0
    assert load(path).learning_rate == 0.5


def test_the_judge_is_the_averaged_iterate():
    final = {
        "average_validation_loss": 1.0,
        "last_validation_loss": 2.0,
        "average_validation_accuracy": 0.3,
        "last_validation_accuracy": 0.4,
    }
    for dataset, score in (("cifar10", -0.3), ("emnist", -0.3), ("wikitext2", 1.0)):
        line = {"settings": {"dataset": dataset}, "final": final}
        assert (sweep.loss(line), sweep.score_of_rate(line)) == (1.0, score)


def test_neighbours():
    examined = doctest.testmod(sweep)
    assert examined.attempted > 0
    assert examined.failed == 0
    rate = 1e-3
    for _ in range(12):
        assert sweep.neighbour(sweep.neighbour(rate, 1), -1) == rate
        rate = sweep.neighbour(rate, 1)
    assert rate == 10.0


def test_warm_starts_are_kept_in_files(tmp_path, monkeypatch):
    """Another process begins where the first one did, also where pre-training would differ."""
    data = training.Loaded.of(datasets.synthetic("emnist", num_private=64, num_public=16))
    base = load(CONFIGS / "emnist" / "warm-s1.89.toml")
    calls = []

    def pretrain(settings, data, cold, seed):
        calls.append(seed)
        return jax.tree.map(lambda leaf: leaf + len(calls), cold), {"digest": str(len(calls))}

    monkeypatch.setattr(tasks, "task", SMALL.__getitem__)
    monkeypatch.setattr(training, "_warm_start", pretrain)
    first, about = training.WarmStarts(tmp_path).get(base, data, 1)
    again, about_again = training.WarmStarts(tmp_path).get(base, data, 1)
    other, _ = training.WarmStarts(tmp_path).get(base, data, 2)
    assert calls == [1, 2]
    assert about == about_again == {"digest": "1"}
    for a, b, c in zip(*map(jax.tree.leaves, (first, again, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
    forgetful, _ = training.WarmStarts().get(base, data, 1)
    assert calls == [1, 2, 1]
    assert not np.array_equal(jax.tree.leaves(forgetful)[0], jax.tree.leaves(first)[0])


def test_processes_that_share_a_folder_share_a_warm_start(tmp_path, monkeypatch):
    """The second one waits for the first one's file instead of pre-training on its own."""
    data = training.Loaded.of(datasets.synthetic("emnist", num_private=64, num_public=16))
    base = load(CONFIGS / "emnist" / "warm-s1.89.toml")
    calls = []
    begun = threading.Event()

    def pretrain(settings, data, cold, seed):
        calls.append(seed)
        begun.set()
        time.sleep(0.5)
        return jax.tree.map(lambda leaf: leaf + len(calls), cold), {"digest": str(len(calls))}

    monkeypatch.setattr(tasks, "task", SMALL.__getitem__)
    monkeypatch.setattr(training, "_warm_start", pretrain)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(training.WarmStarts(tmp_path).get, base, data, 1)
        assert begun.wait(10)
        second = pool.submit(training.WarmStarts(tmp_path).get, base, data, 1)
    assert calls == [1]
    assert first.result()[1] == second.result()[1]


def test_the_optimizer_of_the_warm_start():
    """SGD is another start than Adam; lines from before the choice existed are Adam's."""
    base = load(CONFIGS / "emnist" / "warm-s1.89.toml")
    assert "optimizer" not in base.identity()["warm_start"]
    sgd = dataclasses.replace(
        base, warm_start=dataclasses.replace(base.warm_start, optimizer="sgd")
    )
    assert sgd.identity()["warm_start"]["optimizer"] == "sgd"
    averaged = dataclasses.replace(base.warm_start, average_decay=0.9)
    averaged = dataclasses.replace(base, warm_start=averaged)
    assert "average_decay" not in base.identity()["warm_start"]
    assert averaged.identity()["warm_start"]["average_decay"] == 0.9
    with pytest.raises(SettingsError, match="average_decay must be in"):
        dataclasses.replace(
            base, warm_start=dataclasses.replace(base.warm_start, average_decay=1.0)
        )
    with pytest.raises(SettingsError, match="adam, sgd"):
        dataclasses.replace(base, warm_start=dataclasses.replace(base.warm_start, optimizer="lion"))


@pytest.mark.parametrize(
    ("decay", "average"), [(0.0, None), (0.9, mirrordp.ExponentialAverage(0.9))]
)
def test_the_warm_start_is_averaged_as_the_settings_say(decay, average, monkeypatch):
    asked = {}

    def fake(loss_fn, params, public, **options):
        asked.update(options)
        return mirrordp.updates.public.WarmStart(params, True, 1, np.ones(1), np.ones(1))

    monkeypatch.setattr(tasks, "task", SMALL.__getitem__)
    monkeypatch.setattr(mirrordp, "warm_start", fake)
    data = training.Loaded.of(datasets.synthetic("emnist", num_private=64, num_public=16))
    base = load(CONFIGS / "emnist" / "warm-s1.89.toml")
    chosen = dataclasses.replace(base.warm_start, average_decay=decay)
    training.WarmStarts().get(dataclasses.replace(base, warm_start=chosen), data, 0)
    assert asked["average"] == average


def test_a_shared_machine_is_said_in_the_line():
    """The table of costs must not mix seconds of runs that had the machine to themselves."""
    alone, shared = training.made_by(), training.made_by(True)
    assert "shared" not in alone["machine"]["device"]
    assert shared["machine"]["device"] == alone["machine"]["device"] + " shared with other runs"
    assert shared["source"] == alone["source"]
