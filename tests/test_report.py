import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import mirrordp
from mirrordp import Adjacency, Budget, Ledger, Mechanism, PoissonSampling
from mirrordp._rounding import downwards, floored, percent_upwards, upwards
from mirrordp._versions import library_versions
from mirrordp.privacy import Accountant, FullBatch
from mirrordp.report import NOT_FOR_RELEASE, Curve, ReportError, RunReport, comparison_figure
from mirrordp.spending import BudgetError
from mirrordp.spending.files import write_atomically
from tests import remembered

DELTA = 1e-5


@pytest.fixture(autouse=True)
def _few_computations(monkeypatch):
    remembered.versions(monkeypatch)


def make_mechanism(**changes):
    options = {
        "sampling": PoissonSampling.for_batch_size(50, num_examples=1_000),
        "l2_clip_norm": 2.0,
        "noise_multiplier": 1.5,
        "num_steps": 20,
        "accountant": Accountant.RDP,
    }
    return Mechanism(**options | changes)


def test_report_names_everything_that_epsilon_depends_on():
    mechanism = make_mechanism()
    report = json.loads(RunReport.of(mechanism, DELTA).to_json())
    assert report["epsilon"] == mechanism.epsilon(DELTA)
    expected = {
        "delta": DELTA,
        "adjacency": "zero-out",
        "unit": "example",
        "sampling": "Poisson",
        "sampling_prob": 0.05,
        "noise_multiplier": 1.5,
        "l2_clip_norm": 2.0,
        "divisor": 50.0,
        "charged_steps": 20,
        "accountant": "rdp",
        "num_examples_is_public": True,
        "num_examples": 1_000,
        "scope": "this run",
    }
    assert {name: report[name] for name in expected} == expected
    assert report["tuning"].startswith("not charged")
    assert report["shown_without_protection"] == []
    assert "RDP" in report["accountant_method"]


def test_versions_are_those_installed():
    versions = library_versions()
    assert versions["mirrordp"] == mirrordp.__version__
    assert {"jax", "jaxlib", "optax", "jax-privacy", "dp-accounting", "numpy", "python"} <= set(
        versions
    )


def test_key_order_is_stable_and_values_are_plain():
    report = RunReport.of(make_mechanism(), DELTA, results={"loss": np.float32(0.5), "n": [1, 2]})
    assert report.to_json() == report.to_json()
    names = ["schema_version", "title", "epsilon", "delta", "adjacency"]
    assert list(report.to_dict())[:5] == names
    assert list(report.to_dict())[-1] == "results"
    assert json.loads(report.to_json()) == report.to_dict()
    assert report.to_dict()["results"] == {"loss": 0.5, "n": [1, 2]}


def test_fewer_charged_steps_cost_less():
    mechanism = make_mechanism()
    report = RunReport.of(mechanism, DELTA, charged_steps=5)
    assert report.epsilon == mechanism.epsilon(DELTA, num_steps=5) < mechanism.epsilon(DELTA)
    assert report.charged_steps == 5


@dataclasses.dataclass(frozen=True)
class Info:
    seeded: object


def test_a_mechanism_alone_does_not_know_of_a_seed():
    report = RunReport.of(make_mechanism(), DELTA)
    assert report.seeded is None
    assert report.to_dict()["seeded"] is None
    assert report.to_dict()["randomness"].startswith("not known")
    assert "from the operating system" not in report.privacy_card()
    assert "Whether there was a seed is not known" in [w.title for w in report.warnings()]
    assert RunReport.from_dict(report.to_dict()) == report


@pytest.mark.parametrize("seeded", [True, False])
def test_a_run_says_whether_it_had_a_seed(seeded):
    for options in ({"info": Info(seeded)}, {"seeded": seeded}):
        report = RunReport.of(make_mechanism(), DELTA, **options)
        assert report.seeded is seeded
        assert "seed" not in report.to_dict()
        assert (NOT_FOR_RELEASE in report.privacy_card()) is seeded
        assert ("from the operating system" in report.privacy_card()) is not seeded
        assert RunReport.from_dict(report.to_dict()) == report


@pytest.mark.parametrize(
    "options",
    [
        {"info": Info(False), "seed": 7},
        {"info": Info(False), "seeded": True},
        {"info": Info(True), "seeded": False},
        {"seed": 7, "seeded": False},
        {"info": Info(True), "seed": 7, "seeded": False},
    ],
)
def test_contradictions_about_the_seed_are_refused(options):
    with pytest.raises(ValueError, match=r"seeded=.*(Leave both out|State what)"):
        RunReport.of(make_mechanism(), DELTA, **options)


def test_only_one_run_can_be_reported():
    with pytest.raises(TypeError, match="got list"):
        RunReport.of(make_mechanism(), DELTA, info=[Info(True)])


def test_reports_of_earlier_versions():
    """They said "operating system" if no seed was stated, even after a run with a seed."""
    for seed, expected in ((None, None), (7, True)):
        content = RunReport.of(make_mechanism(), DELTA, seed=seed).to_dict()
        del content["seeded"]
        assert RunReport.from_dict(content | {"schema_version": 2}).seeded is expected
    with pytest.raises(ReportError, match="intact"):
        RunReport.from_dict(content | {"seeded": False})
    with pytest.raises(ReportError, match="seeded is of the wrong type"):
        RunReport.from_dict(content | {"seeded": "no"})


def test_operating_system_randomness_is_not_written_down():
    report = RunReport.of(make_mechanism(), DELTA, seeded=False)
    assert "seed" not in report.to_dict()
    assert "operating system" in report.to_dict()["randomness"]
    assert NOT_FOR_RELEASE not in report.privacy_card()


def test_given_seed_is_reported_as_not_for_release():
    report = RunReport.of(make_mechanism(), DELTA, seed=7)
    assert report.to_dict()["seed"] == 7
    assert NOT_FOR_RELEASE in report.to_dict()["randomness"]
    assert NOT_FOR_RELEASE in report.privacy_card()


def test_number_of_examples_stays_out_where_it_is_secret():
    sampling = PoissonSampling(sampling_prob=0.05, expected_batch_size=50)
    mechanism = make_mechanism(sampling=sampling, adjacency=Adjacency.ADD_REMOVE)
    report = RunReport.of(mechanism, DELTA)
    assert report.num_examples is None
    assert not report.num_examples_is_public
    assert "is not revealed either" in report.privacy_card()


def test_ledger_covers_everything_charged_to_it():
    mechanism = make_mechanism()
    ledger = Ledger(mechanism.adjacency)
    for _ in range(3):
        ledger.charge(mechanism.event)
    report = RunReport.of(mechanism, DELTA, spend=ledger)
    assert report.epsilon == ledger.epsilon(DELTA, accountant=Accountant.RDP).epsilon
    assert report.epsilon > mechanism.epsilon(DELTA)
    assert "ledger" in report.scope


def test_ledger_without_the_run_is_refused():
    mechanism = make_mechanism()
    with pytest.raises(ValueError, match="at least this run"):
        RunReport.of(mechanism, DELTA, spend=Ledger(mechanism.adjacency))


def test_ledger_of_another_adjacency_is_refused():
    with pytest.raises(ValueError, match="one adjacency"):
        RunReport.of(make_mechanism(), DELTA, spend=Ledger(Adjacency.REPLACE))


def test_budget_of_another_kind_is_refused(tmp_path):
    rows = mirrordp.PrivateData(np.zeros((1_000, 2), np.float32))
    with Budget.create(tmp_path, epsilon=3, delta=DELTA, data=rows) as budget:
        assert RunReport.of(make_mechanism(), DELTA, spend=budget).ledger["budget"]["epsilon"] == 3
        replaced = {"adjacency": Adjacency.REPLACE, "sampling": FullBatch.of(1_000)}
        for kind in (replaced | {"accountant": None}, {"unit": "user"}):
            with pytest.raises(BudgetError, match="one example as unit"):
                RunReport.of(make_mechanism(**kind), DELTA, spend=budget)


def test_spend_is_a_ledger_or_a_budget(tmp_path):
    with pytest.raises(TypeError, match="spend must be Ledger or Budget, got PosixPath"):
        RunReport.of(make_mechanism(), DELTA, spend=tmp_path)


@pytest.mark.parametrize("results", [{"unprivatized_loss": 1.0}, {"a": {"Unprivatized": 1}}])
def test_unprivatized_results_are_refused(results):
    with pytest.raises(ValueError, match="not covered"):
        RunReport.of(make_mechanism(), DELTA, results=results)


@pytest.mark.parametrize("value", [object(), np.zeros(3), mirrordp.PrivateData(np.zeros(3))])
def test_results_that_are_not_plain_are_refused(value):
    with pytest.raises(TypeError, match=r"results\['x'\]"):
        RunReport.of(make_mechanism(), DELTA, results={"x": value})


def test_one_string_for_a_list_is_refused():
    with pytest.raises(TypeError, match="list of strings"):
        RunReport.of(make_mechanism(), DELTA, shown_without_protection="loss")


def test_no_noise_means_no_protection():
    sampling = FullBatch.of(100)
    mechanism = make_mechanism(sampling=sampling, noise_multiplier=0.0, accountant=None)
    report = RunReport.of(mechanism, DELTA)
    assert math.isinf(report.epsilon)
    assert json.loads(report.to_json())["epsilon"] is None
    assert "No protection" in report.privacy_card()


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("unit", ["example", "user"])
def test_card_is_whole_for_every_adjacency_and_unit(adjacency, unit):
    sampling = FullBatch(expected_batch_size=100.0)
    mechanism = make_mechanism(
        sampling=sampling, adjacency=adjacency, unit=unit, accountant=None, noise_multiplier=20.0
    )
    shown = ["batch loss | terminal"]
    card = RunReport.of(mechanism, DELTA, shown_without_protection=shown).privacy_card()
    tables = [line for line in card.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in tables)
    for words in (adjacency.value, unit, "batch loss", "What is not protected", "full batch"):
        assert words in card
    # No noise of ours holds against those who break the generator behind it.
    assert "any computing power short of what breaks the random generator" in card
    assert "None" not in card
    assert "nan" not in card


def test_card_rounds_epsilon_up():
    report = dataclasses.replace(RunReport.of(make_mechanism(), DELTA), epsilon=1.23412)
    assert "epsilon = 1.235 " in report.privacy_card()
    exact = dataclasses.replace(report, epsilon=0.5)
    assert "epsilon = 0.5 " in exact.privacy_card()


def test_card_rounds_delta_up_and_what_a_budget_promises():
    """If they were rounded to the nearest, each of these would read smaller than it is."""
    report = dataclasses.replace(
        RunReport.of(make_mechanism(), DELTA),
        delta=1.2345641e-6,
        ledger={
            "length": 2,
            "head": "abc",
            "budget": {"epsilon": 3.1415921, "delta": 1.0000001e-5, "runs": 1, "used": 0.5},
        },
    )
    card = report.privacy_card()
    assert "delta = 1.23457e-06" in card
    assert "| delta | 1.23457e-06 |" in card
    assert "1.23456e-06" not in card
    assert "at most epsilon 3.1416, delta 1.00001e-05, however" in card


def test_card_names_the_delta_of_two_records():
    """A chain of two neighbours has 2ε and (1 + e^ε) δ, which changes delta a lot."""
    report = dataclasses.replace(RunReport.of(make_mechanism(), DELTA), epsilon=8.0)
    assert "(epsilon 16 for two, at delta 0.02982)" in report.privacy_card()
    assert (1 + math.exp(8)) * DELTA <= 0.02982
    huge = dataclasses.replace(report, epsilon=5_000.0)
    assert "for two, at delta 1)" in huge.privacy_card()


def test_card_of_a_run_that_read_nothing():
    report = RunReport.of(make_mechanism(), DELTA, charged_steps=0)
    assert report.epsilon == 0
    assert "learned from private records" not in report.privacy_card()
    assert "No step of training read private records" in report.privacy_card()


def test_an_infinite_epsilon_is_not_put_down_to_noise_that_was_added():
    report = dataclasses.replace(RunReport.of(make_mechanism(), DELTA), epsilon=math.inf)
    assert "no noise was added" not in report.privacy_card()
    assert "no finite epsilon" in report.privacy_card()


def test_certainty_bound_on_the_card():
    report = dataclasses.replace(RunReport.of(make_mechanism(), DELTA), epsilon=math.log(3))
    assert "right at most 75.1% of the time" in report.privacy_card()
    huge = dataclasses.replace(report, epsilon=5_000.0)
    assert "at most 100% of the time" in huge.privacy_card()


def test_write_makes_the_folder_and_leaves_no_temporary_files(tmp_path):
    folder = tmp_path / "a" / "b"
    report, card = RunReport.of(make_mechanism(), DELTA).write(folder)
    assert json.loads(report.read_text())["delta"] == DELTA
    assert card.read_text().startswith("# Privacy card")
    assert {path.name for path in folder.iterdir()} == {"report.json", "privacy_card.md"}


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_figure_is_a_png():
    rng = np.random.default_rng(0)
    steps = np.arange(5)
    curves = [Curve(name, steps, rng.random((3, 5))) for name in ("a", "b", "c", "d")]
    image = comparison_figure(curves, title="t", quantity="loss", subtitle="s")
    assert image.startswith(b"\x89PNG")
    assert comparison_figure(curves[:1], title="t", quantity="loss").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="1 to 6"):
        comparison_figure([], title="t", quantity="loss")


def test_curve_standard_error():
    values = np.array([[1.0, 2.0], [3.0, 2.0]])
    curve = Curve("a", np.arange(2), values)
    assert curve.standard_error.tolist() == [1.0, 0.0]
    assert Curve("a", np.arange(2), values[:1]).standard_error.tolist() == [0.0, 0.0]


def test_rounding_is_in_the_safe_direction():
    for value in np.random.default_rng(0).lognormal(0, 5, 500):
        assert value <= float(upwards(value)) <= 1.001 * value
        assert 0 <= value - floored(value, 3) <= 0.001 + 1e-12 * value
        assert float(downwards(value)) <= value
        assert 0 <= float(percent_upwards(value)[:-1]) - 100 * value < 0.1 + 1e-9 * value
    assert [upwards(x) for x in (0.5, 0.1 + 0.2, 0.0, math.inf)] == ["0.5", "0.3", "0", "infinite"]
    assert float(upwards(1e-320)) > 0
    assert percent_upwards(math.inf) == "far more than 100%"
    assert downwards(math.inf) == "infinite"


def test_reading_a_report_imports_neither_jax_nor_matplotlib(tmp_path):
    RunReport.of(make_mechanism(), DELTA).write(tmp_path)
    program = (
        "import sys; from mirrordp.report import RunReport, comparison_page, report_page, upwards; "
        "report_page(RunReport.read(sys.argv[1]), run='run'); "
        "print({'jax', 'optax', 'matplotlib', 'sklearn'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, check=True, text=True
    )
    assert found.stdout == "set()\n"
