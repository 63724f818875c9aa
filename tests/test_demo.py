import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from mirrordp import demo
from mirrordp._rounding import upwards
from mirrordp.demo import METHODS, DemoSettings, Method, make_task, run_demo, run_method, sgd
from mirrordp.training import engine

# More features than public rows: the loss of held-out ones soon rises, and the warm start ends.
TINY = DemoSettings(
    num_private=200,
    num_public=20,
    num_features=40,
    num_classes=3,
    num_test=100,
    batch_size=20,
    num_steps=7,
    steps_per_call=3,
    learning_rates=(1.0, 4.0),
    tuning_trials=1,
    trials=2,
)


_mechanism = functools.cache(DemoSettings.mechanism)


@pytest.fixture(autouse=True, scope="module")
def _noise_is_chosen_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DemoSettings, "mechanism", _mechanism)
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A finished demonstration, and the seeds of the models that it charged."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    seeds = []
    honest = demo.train

    def train(*arguments, **options):
        if options["spend"] is not None:
            seeds.append(options["seed"])
        return honest(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "train", train)
        return run_demo(folder, seed=1, settings=TINY, progress=False), seeds


@pytest.fixture(scope="module")
def finished(recorded):
    return recorded[0]


def test_demo_leaves_three_files(finished):
    names = {path.name for path in finished.folder.iterdir()}
    assert names == {"report.json", "privacy_card.md", "results.png"}
    report = json.loads((finished.folder / "report.json").read_text())
    assert report["epsilon"] <= TINY.epsilon
    assert report["seed"] == 1
    assert report["seeded"] is True
    assert report["tuning"].startswith("not charged")
    assert set(report["results"]["methods"]) == {"cold", "warm", "pda_dpmd"}
    assert (finished.folder / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "not for release" in (finished.folder / "privacy_card.md").read_text()


def test_all_models_together_cost_more_than_one(finished):
    report = finished.report
    together = report.results["epsilon_of_all_methods_on_the_same_rows"]
    assert report.epsilon < together < 3 * report.epsilon
    assert upwards(together) in report.scope


def test_models_that_are_added_up_have_noise_of_their_own(recorded):
    """Composition relies on it: noise that is added to two sums cancels in their difference."""
    _, seeds = recorded
    assert len(seeds) == len(set(seeds)) == len(METHODS)


def test_same_seed_same_numbers(finished, tmp_path):
    again = run_demo(tmp_path, seed=1, settings=TINY, progress=False)
    assert again.report.results == finished.report.results


def test_methods_share_rows_but_trials_do_not():
    first, second = (make_task(TINY, 0, (1, trial)) for trial in range(2))
    same = make_task(TINY, 0, (1, 0))
    assert (first.private.arrays["x"] == same.private.arrays["x"]).all()
    assert (first.private.arrays["x"] != second.private.arrays["x"]).all()
    tuning = make_task(TINY, 0, (0, 0))
    assert (first.private.arrays["x"] != tuning.private.arrays["x"]).all()


def test_data_is_not_isotropic():
    settings = DemoSettings()
    x = make_task(settings, 0, (1, 0)).private.arrays["x"]
    variances = x.var(axis=0)
    assert variances[0] > 50 * variances[-1]


def test_no_recompilation_for_another_rate():
    mechanism = TINY.mechanism()
    task = make_task(TINY, 0, (1, 0))
    warm = demo.warm_params(TINY, task, 0)

    def run(rate):
        return run_method(
            METHODS[1],
            task,
            warm,
            settings=TINY,
            mechanism=mechanism,
            learning_rate=rate,
            seed=0,
        ).losses[-1]

    first = run(1.0)
    compiled = engine._run_passes._cache_size()
    assert run(2.0) != first
    assert engine._run_passes._cache_size() == compiled


def test_rate_in_the_state_is_plain_sgd():
    params = jnp.array([1.0, 2.0])
    optimizer = sgd(0.5, None, params)
    updates, _ = optimizer.update(params, optimizer.init(params))
    assert (updates == -0.5 * params).all()


def test_a_fourth_method_fits(tmp_path):
    methods = (*METHODS, Method("half", "alpha = 1/2", True, 0.5, sgd))
    result = run_demo(tmp_path, settings=TINY, methods=methods, progress=False)
    assert list(result.report.results["methods"])[-1] == "half"
    assert "alpha = 1/2" in result.table


@pytest.mark.parametrize(
    ("gap", "words"), [(0.1, "has the lowest loss"), (0.01, "No clear winner")]
)
def test_headline_claims_no_more_than_the_error_allows(gap, words):
    results = {
        "best": "pda_dpmd",
        "methods": {method.name: {"test_loss": 1.0} for method in METHODS},
        "behind_best_paired_by_trial": {
            "cold": {"test_loss_gap": 0.5, "standard_error": 0.01},
            "warm": {"test_loss_gap": gap, "standard_error": 0.01},
        },
    }
    assert words in demo._headline(results, METHODS)


def test_pda_wins_by_more_than_the_error_bar():
    """This is the claim of the demonstration at its real size, with the rates that it chooses."""
    settings = DemoSettings()
    mechanism = settings.mechanism()
    gaps = []
    for trial in range(4):
        task = make_task(settings, 11, (1, trial))
        warm = demo.warm_params(settings, task, trial)

        def best(method, rates, task=task, warm=warm, trial=trial):
            return min(
                run_method(
                    method,
                    task,
                    warm,
                    settings=settings,
                    mechanism=mechanism,
                    learning_rate=rate,
                    seed=trial,
                ).losses[-1]
                for rate in rates
            )

        # Warm DP-SGD gets its best rate in hindsight and PDA-DPMD only one, against our claim.
        # Its loss has the minimum between 2 and 4: at 1 and 8 it was larger in every trial.
        gaps.append(best(METHODS[1], (2.0, 4.0)) - best(METHODS[2], (16.0,)))
    error = np.std(gaps, ddof=1) / np.sqrt(len(gaps))
    assert np.mean(gaps) > 3 * error
    assert np.mean(gaps) > 0.02
