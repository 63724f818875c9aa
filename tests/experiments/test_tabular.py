"""The comparison on real tables, run on small tables made up here."""

import json
import sys

import numpy as np
import pytest

from experiments import __main__ as dispatcher, records
from experiments.tabular import command, data, methods, report
from mirrordp.tables import Table


@pytest.fixture
def root(tmp_path):
    """Files of the same form as the real ones."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "tabular"
    folder.mkdir()
    names = "longitude,latitude,median_income,median_house_value,ocean_proximity"
    rows = [
        f"{a:.2f},{b:.2f},{'' if i % 50 == 7 else f'{c:.2f}'},{200_000 + 50_000 * c:.0f},{place}"
        for i, (a, b, c, place) in enumerate(
            zip(*rng.normal(size=(3, 800)), rng.choice(["INLAND", "ISLAND"], 800), strict=True)
        )
    ]
    (folder / "california_housing.csv").write_text("\n".join([names, *rows]) + "\n")

    def people(count, end):
        ages, hours = rng.integers(20, 60, count), rng.integers(10, 60, count)
        labels = np.where(ages + hours + rng.normal(size=count) > 75, ">50K", "<=50K")
        return [
            f"{age}, Private, 1, HS-grad, 9, Divorced, Sales, Wife, White, Male, 0, 0, {hour}, "
            f"{rng.choice(['Cuba', '?'])}, {label}{end}"
            for age, hour, label in zip(ages, hours, labels, strict=True)
        ]

    (folder / "adult.data").write_text("\n".join(people(800, "")) + "\n\n")
    (folder / "adult.test").write_text("\n".join(["|1x3 Cross validator", *people(200, ".")]))
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """Candidates and steps that cost little."""
    cold = (("learning_rate", 1.0), ("num_steps", 5), ("l2_clip_norm", 0.3))
    other = (("learning_rate", 0.1), ("num_steps", 2), ("l2_clip_norm", 0.3))
    peer = (("num_features", 1),)
    choices = {methods.COLD: [cold, other], methods.PEER: [peer]}
    monkeypatch.setattr(command, "candidates", lambda method, task: choices.get(method, [()]))
    for module in (command, report):
        monkeypatch.setattr(module, "EPSILONS", (0.1, 3.0))


def test_adult_is_read_as_its_owners_wrote_it(root):
    adult = data.adult(root / "tabular")
    assert len(adult.train) == 800
    assert adult.test is not None
    assert len(adult.test) == 200
    assert set(adult.test.columns["income"]) == {">50K", "<=50K"}


@pytest.mark.parametrize("name", data.DATASETS)
@pytest.mark.filterwarnings("ignore:.*beyond the range of the public table")
def test_parts_do_not_overlap(root, name):
    dataset = data.DATASETS[name](root / "tabular")
    # Every row carries its number, so that it can be found again.
    ids = np.arange(len(dataset.train), dtype=float)
    numbered = Table("train", {**dataset.train.columns, "id": ids})
    test = dataset.test
    if test is not None:
        test = Table("test", {**test.columns, "id": 10_000 + np.arange(len(test), dtype=float)})
    dataset = data.Dataset(
        dataset.name, dataset.task, dataset.target, dataset.target_range, numbered, test
    )
    split = data.split_dataset(dataset, 3)
    column = split.encoding.features.index("id")
    sizes = [len(part) for part in (split.private, split.public, split.test)]
    num_train = len(numbered) if test is not None else round(0.8 * len(numbered))
    assert sizes[1] == round(0.04 * num_train)
    assert sizes[0] + sizes[1] == num_train
    if test is None:
        assert sum(sizes) == len(numbered)
    # Clamping to the public range hides the ends; what lies inside is told apart.
    private, public, test_ids = (
        set(part.features[:, column].tolist()) for part in (split.private, split.public, split.test)
    )
    assert len(private & public) <= 2
    assert len(public & test_ids) <= 2
    assert len(private & test_ids) <= 2
    again = data.split_dataset(dataset, 3)
    np.testing.assert_array_equal(split.public.features, again.public.features)
    assert not np.array_equal(split.public.features, data.split_dataset(dataset, 4).public.features)


@pytest.mark.filterwarnings("ignore:this is one of [0-9]+ private fits")
@pytest.mark.filterwarnings("ignore:.*private rows equal a public row")
def test_test_rows_decide_nothing(root):
    """Other test rows: the same encoding, and the same model."""
    dataset = data.adult(root / "tabular")
    assert dataset.test is not None
    other = data.Dataset(
        dataset.name, dataset.task, dataset.target, dataset.target_range, dataset.train,
        dataset.test.rows(np.arange(len(dataset.test)) % 2 == 0),
    )  # fmt: skip
    one, two = data.split_dataset(dataset, 0), data.split_dataset(other, 0)
    assert one.encoding == two.encoding
    job = methods.Job(methods.OURS, 1.0, 0)
    np.testing.assert_array_equal(methods._fit(job, one)[0].coef_, methods._fit(job, two)[0].coef_)


def test_metrics():
    class Dataset:
        task = "regression"

    class Split:
        dataset = Dataset()
        test = data.Arrays(np.zeros((4, 1)), np.array([0.0, 2.0, 0.0, 2.0]))

    split = Split()
    found = methods.evaluate(np.ones(4), split)  # pyright: ignore[reportArgumentType]
    assert found == {"rmse": 1.0, "r2": 0.0}
    found = methods.evaluate(np.full(4, np.inf), split)  # pyright: ignore[reportArgumentType]
    assert found["rmse"] is None
    Dataset.task = "classification"
    Split.test = data.Arrays(np.zeros((2, 1)), np.array([0, 1]))
    shares = np.array([[0.5, 0.5], [0.75, 0.25]])
    found = methods.evaluate(shares, split)  # pyright: ignore[reportArgumentType]
    assert found["log_loss"] == pytest.approx((np.log(2) + np.log(4)) / 2)
    assert found["accuracy"] == 0.5


@pytest.mark.filterwarnings("ignore:this is one of [0-9]+ private fits")
@pytest.mark.filterwarnings("ignore:.*beyond the range of public ones")
def test_start_is_the_limit_of_no_budget(root):
    """What is called public-only is where our private run starts."""
    split = data.split_dataset(data.housing(root / "tabular"), 0)
    start = methods._fit(methods.Job(methods.START, None, 0), split)[0]
    other_rows = data.Split(
        split.dataset, split.encoding,
        data.Arrays(-split.private.features, 7 * split.private.target), split.public, split.test,
    )  # fmt: skip
    again = methods._fit(methods.Job(methods.START, None, 1), other_rows)[0]
    np.testing.assert_allclose(start.coef_, again.coef_)


def test_command_writes_lines_table_and_figure_and_skips_what_is_done(root, small, capsys):
    out = root / "out"
    options = ["--quick", "--seeds", "1", "--data-root", str(root), "--out", str(out)]
    options += ["--peer-python", str(root / "none")]
    readme = root / "README.md"
    readme.write_text("before <!-- tabular quick: begin -->old<!-- tabular quick: end --> after")
    assert dispatcher.main(["tabular", *options]) == 0
    captured = capsys.readouterr()
    assert "diffprivlib is left out" in captured.err
    lines = records.read(out / "quick.jsonl")
    # Per data set: 1 tuning seed x 2 ε x 2 candidates; 1 seed x (3 methods x 2 ε + 3).
    assert len(lines) == 2 * (4 + 9)
    assert {line["seed"] for line in lines} == {command.FIRST_SEED, command.TUNING_SEED}
    first = lines[0]
    assert first["provenance"]["packages"]["numpy"]
    assert first["provenance"]["source"]
    assert first["seconds"] >= 0
    private = [line for line in lines if line["epsilon"] is not None]
    assert all(line["details"]["epsilon_reported"] <= line["epsilon"] for line in private)
    table = (out / "quick.md").read_text()
    assert "California housing" in table
    assert "UCI Adult" in table
    assert "1 splits (seeds 100 to 100)" in table
    assert "Made by: cpu, Python" in table
    assert (out / "quick.png").read_bytes().startswith(b"\x89PNG")

    before = (out / "quick.jsonl").read_bytes()
    assert command.main([*options, "--readme", str(readme)]) == 0
    assert (out / "quick.jsonl").read_bytes() == before
    assert readme.read_text().startswith("before <!-- tabular quick: begin -->\n**California")
    assert readme.read_text().endswith("<!-- tabular quick: end --> after")


def test_tuning_takes_the_least_loss(root, small, tmp_path):
    dataset = data.housing(root / "tabular")
    log = command.Log(tmp_path / "log.jsonl", "housing", {})
    for job in command.tuning_jobs(dataset, [methods.COLD], 2):
        slow = dict(job.settings)["num_steps"] == 2
        rmse = None if slow and job.epsilon == 3.0 else 1.0 if slow else 2.0
        log.add(job, methods.Outcome({"rmse": rmse, "r2": 0.0}, 0.0, {}))
    steps = {
        epsilon: dict(command.chosen(log, dataset, methods.COLD, epsilon, 2))["num_steps"]
        for epsilon in (0.1, 3.0)
    }
    assert steps == {0.1: 2, 3.0: 5}


@pytest.mark.parametrize("first", [-1, 981])
def test_seeds_for_tuning_are_for_tuning_only(root, capsys, first):
    with pytest.raises(SystemExit):
        command.main(["--data-root", str(root), "--first-seed", str(first)])
    assert "the others are for tuning" in capsys.readouterr().err


def test_missing_data_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--data-root", str(tmp_path)])
    assert "unpack.py" in capsys.readouterr().err


def fake_records(better):
    """Two seeds of every method on housing; ours is better by `better` dollars."""
    lines = []
    for method in methods.LABELS:
        for epsilon in methods.EPSILONS if method in methods.PRIVATE else (None,):
            for seed in range(2):
                rmse = 100.0 + seed - (better if method == methods.OURS else 0)
                lines.append(
                    {
                        "dataset": "housing",
                        "method": method,
                        "epsilon": epsilon,
                        "seed": seed,
                        "metrics": {"rmse": rmse, "r2": -rmse},
                    }
                )
    return lines


def test_the_verdict_is_paired_and_honest():
    assert report.verdict(fake_records(better=5)) == []
    missed = report.verdict(fake_records(better=-5))
    assert len(missed) == 2 * 3 * 5
    assert "warm DP-SGD is better by 5" in missed[0]
    assert report.ties(fake_records(better=5)) == []
    assert len(report.ties(fake_records(better=0))) == 2 * 3 * 3
    mean, error = report.advantage(fake_records(5), "housing", methods.WARM, 1.0, "rmse", -1)
    assert (mean, error) == (5.0, 0.0)


def test_peer_runs_in_its_own_interpreter(root, tmp_path):
    """A stand-in for the script: the arrays arrive, and test targets do not."""
    split = data.split_dataset(data.housing(root / "tabular"), 0)
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import sys, json, numpy as np\n"
        "data = dict(np.load(sys.argv[2]))\n"
        "assert 'test_y' not in data\n"
        "jobs = json.loads(str(data['jobs']))\n"
        "np.savez(sys.argv[2] + '.out.npz', job0=np.full(len(data['test_x']), 2e5))\n"
        "print(json.dumps({'seconds': [1.0], 'versions': {'diffprivlib': '0'}}))\n"
    )
    fake.chmod(0o755)
    job = methods.Job(methods.PEER, 1.0, 0, (("num_features", 1),))
    ((outcome, versions),) = methods.run_peer([job], split, fake)
    assert versions == {"diffprivlib": "0"}
    assert outcome.metrics["rmse"] is not None
    fake.write_text(f"#!{sys.executable}\nraise SystemExit('no diffprivlib here')\n")
    with pytest.raises(RuntimeError, match="no diffprivlib here"):
        methods.run_peer([job], split, fake)


def test_lines_are_json(root, tmp_path):
    log = command.Log(tmp_path / "log.jsonl", "housing", {})
    job = methods.Job(methods.COLD, 1.0, 0, (("num_steps", 5),))
    log.add(job, methods.Outcome({"rmse": 1.0, "r2": 0.0}, 0.1, {}))
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert command.job_of(json.loads(line)) == job
    assert command.Log(tmp_path / "log.jsonl", "housing", {}).missing([job]) == []
    assert command.Log(tmp_path / "log.jsonl", "adult", {}).missing([job]) == [job]
