"""`mirrordp tune`."""

import errno
import json
import re
import shutil
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest

import mirrordp
from mirrordp import cli
from mirrordp.cli import tune
from mirrordp.cli._common import UsageError
from mirrordp.spending import Budget
from mirrordp.tuning import NumberOfRuns, grid

MODEL = """
import jax.numpy as jnp

start = {"w": jnp.zeros(2)}


def loss_fn(params, example):
    return 0.5 * (example["x"] @ params["w"] - example["y"]) ** 2


def near(params, example):
    return (jnp.abs(example["x"] @ params["w"] - example["y"]) < 0.5).astype(float)
"""
SETTINGS = """
epsilon = 2.0
delta = 1e-5
loss = "NAME:loss_fn"
start = "NAME:start"
private = "private.npz"
public = "public.npz"
seed = 0
"""
SPACE = """
[space]
learning_rate = [0.05, 0.5]
l2_clip_norm = 1.0
batch_size = 300
num_steps = 8
"""


@pytest.fixture
def folder(tmp_path):
    """An experiment with a module of its own name, since modules are imported once."""
    rng = np.random.default_rng(0)
    for name, count in (("private", 300), ("public", 200)):
        x = rng.normal(size=(count, 2)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=x @ np.array([1.0, -2.0], np.float32))
    (tmp_path / f"m_{tmp_path.name}.py").write_text(MODEL)
    return tmp_path


def run(folder, extra="", *, change=lambda text: text, options=()):
    text = change((SETTINGS + extra).replace("NAME", f"m_{folder.name}"))
    (folder / "experiment.toml").write_text(text)
    words = ["tune", "--config", str(folder / "experiment.toml"), "--out", str(folder / "out")]
    return cli.main([*words, *options])


def test_free_search_writes_a_model_and_its_report(folder, capsys):
    assert run(folder, SPACE) == 0
    shown = capsys.readouterr().out
    assert "learning_rate=0.5" in shown
    assert "epsilon = 2" in shown or "epsilon = 1.9" in shown
    with np.load(folder / "out" / "model.npz") as model:
        weights = model["['w']"]
    assert np.linalg.norm(weights - [1.0, -2.0]) < 1.0
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["epsilon"] <= 2.0
    assert (folder / "out" / "privacy_card.md").exists()


def test_a_large_delta_can_be_confirmed(folder, capsys):
    confirmed = "allow_large_delta = true\n" + SPACE
    assert run(folder, confirmed, change=lambda text: text.replace("1e-5", "0.01")) == 0
    assert "warning: expected delta of at most 1/n = 0.0033" in capsys.readouterr().err
    assert "above one over the number" in (folder / "out" / "privacy_card.md").read_text()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            'way = "paid"\nruns = 2\nprivate_score = "NAME:near"\n',
            "over 2 candidates, judged on private rows",
        ),
        (
            'way = "both"\nruns = {mean = 2, distribution = "poisson"}\n',
            "had narrowed the list",
        ),
    ],
)
def test_paid_search_is_charged_to_the_budget(folder, capsys, extra, said):
    with np.load(folder / "private.npz") as rows:
        private = mirrordp.PrivateData(dict(rows))
    Budget.create(folder / "budget", epsilon=3.0, delta=1e-4, data=private).close()
    extra = 'budget = "budget"\ncheckpoint = "secret"\n' + extra
    assert run(folder, extra + SPACE, options=["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert said in found["report"]["tuning"]
    assert 1.5 < found["report"]["epsilon"] <= 2.0
    assert found["report"]["ledger"]["budget"]["used"] > 0.5
    # A result is not overwritten, which is said before anything is charged.
    charged = found["report"]["ledger"]["budget"]["used"]
    assert run(folder, extra + SPACE) == 2
    assert "expected --out to be a new or empty folder" in capsys.readouterr().err
    with Budget.open(folder / "budget") as budget:
        assert budget.status.used == charged
    # What is left does not admit a second search.
    shutil.rmtree(folder / "out")
    assert run(folder, extra + SPACE) == 2
    error = capsys.readouterr().err
    assert "budget" in error
    assert " Lower epsilon in the settings, or stop here. " in error
    assert "Add noise" not in error


def budget_for_the_file(folder):
    words = ["budget", "init", str(folder / "budget"), "--epsilon", "3", "--delta", "1e-5"]
    assert cli.main([*words, "--data", str(folder / "private.npz")]) == 0


def used(folder):
    return Budget.status_of(folder / "budget").used


WITH_BUDGET = 'budget = "budget"\n'


@pytest.mark.parametrize("way", ["free", "paid"])
def test_budget_for_a_file_is_charged(folder, capsys, way):
    budget_for_the_file(folder)
    capsys.readouterr()
    extra = f'{WITH_BUDGET}way = "{way}"\nruns = 2\n' if way == "paid" else WITH_BUDGET
    assert run(folder, extra + SPACE, options=["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.5 < found["report"]["ledger"]["budget"]["used"] == used(folder)


def _other_file(folder):
    shutil.copy(folder / "public.npz", folder / "others.npz")
    return "others.npz"


def _changed_file(folder):
    with np.load(folder / "private.npz") as rows:
        arrays = dict(rows)
    arrays["y"][0] += 1
    np.savez(folder / "private.npz", **arrays)
    return "private.npz"


def _object(folder):
    with (folder / f"m_{folder.name}.py").open("a") as module:
        module.write("\nrows = {'x': jnp.ones((300, 2)), 'y': jnp.ones(300)}\n")
    return "NAME:rows"


def _object_with_the_name_of_a_file(folder):
    # It begins like an object's name and ends like a file's, which it is.
    shutil.copy(folder / "public.npz", folder / "private:rows.npz")
    return "private:rows.npz"


def _folder_of_files(folder):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    (folder / "rows.parquet").mkdir()
    pq.write_table(pa.table({"x": [1.0], "y": [1.0]}), folder / "rows.parquet" / "1.parquet")
    return "rows.parquet"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_other_file, "got data that differs from it"),
        (_changed_file, "got data that differs from it"),
        (_object, "expected private = a file"),
        (_object_with_the_name_of_a_file, "got data that differs from it"),
        (_folder_of_files, "expected private = a file"),
    ],
)
def test_budget_for_a_file_refuses_other_rows(folder, capsys, make, said):
    budget_for_the_file(folder)
    private = make(folder)
    extra = WITH_BUDGET + SPACE

    def change(text):
        named = private.replace("NAME", f"m_{folder.name}")
        return text.replace("private.npz", named)

    assert run(folder, extra, change=change) == 2
    assert said in capsys.readouterr().err
    assert used(folder) == 0
    assert not (folder / "out").exists()


def test_file_that_is_changed_while_it_is_read_is_refused(folder, capsys, monkeypatch):
    budget_for_the_file(folder)
    read = tune._Names.rows

    def changing(names, text, setting):
        # Another program writes the file just before it is read.
        if setting == "private":
            _changed_file(folder)
        return read(names, text, setting)

    monkeypatch.setattr(tune._Names, "rows", changing)
    assert run(folder, WITH_BUDGET + SPACE) == 2
    assert "got data that differs from it" in capsys.readouterr().err
    assert used(folder) == 0


def test_budget_for_rows_refuses_other_rows(folder, capsys):
    with np.load(folder / "private.npz") as rows:
        private = mirrordp.PrivateData(dict(rows))
    Budget.create(folder / "budget", epsilon=3.0, delta=1e-4, data=private).close()
    _changed_file(folder)
    assert run(folder, WITH_BUDGET + SPACE) == 2
    assert "got data that differs from it" in capsys.readouterr().err
    assert used(folder) == 0


@pytest.mark.parametrize(
    ("way", "kind"), [("free", "rows"), ("paid", "rows"), ("free", "file"), ("paid", "file")]
)
def test_a_model_that_could_not_be_written_is_not_paid_for_twice(folder, monkeypatch, way, kind):
    if kind == "file":
        budget_for_the_file(folder)
    else:
        with np.load(folder / "private.npz") as rows:
            private = mirrordp.PrivateData(dict(rows))
        Budget.create(folder / "budget", epsilon=3.0, delta=1e-4, data=private).close()
    extra = f'budget = "budget"\ncheckpoint = "secret"\nway = "{way}"\n' + SPACE

    def full(result, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mirrordp.cli.tune._write", full)
        assert run(folder, extra) == 2
    charged = used(folder)
    assert charged > 0
    assert (folder / "secret" / "secret.key").exists()
    assert run(folder, extra) == 0
    assert used(folder) == charged
    assert (folder / "out" / "model.npz").exists()
    assert not (folder / "secret" / "secret.key").exists()


@pytest.mark.parametrize(
    "where", ["mirrordp.report.statement.RunReport.write", "mirrordp.Checkpoint.remove"]
)
def test_a_kill_while_the_model_is_written_leaves_no_secrets(folder, capsys, monkeypatch, where):
    """The same command finds what it had written, writes the rest and removes the secrets."""
    extra = 'checkpoint = "secret"\nway = "paid"\n' + SPACE

    def killed(*_):
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(where, killed)
        with pytest.raises(SystemExit):
            run(folder, extra)
    model = dict(np.load(folder / "out" / "model.npz"))
    (folder / "out" / ".model.npz.half").touch()
    assert run(folder, extra) == 0
    for name, array in np.load(folder / "out" / "model.npz").items():
        np.testing.assert_array_equal(array, model[name])
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(tune._WRITTEN)
    assert not (folder / "secret" / "secret.key").exists()
    # Without secrets that are left, a folder with a model is refused as ever.
    assert run(folder, extra) == 2
    assert "it is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_model_is_known_by_its_bits(tmp_path, dtype):
    """Also NaN, a number that a file knows by its size alone, and another shape."""
    import jax.numpy as jnp

    def found(*numbers):
        return types.SimpleNamespace(params=jnp.asarray(numbers, dtype))

    np.savez(tmp_path / "model.npz", **tune._arrays(found(1.0, np.nan)))
    tune._require_same(found(1.0, np.nan), tmp_path)
    for other in (found(1.0, 2.0), found(1.0), found(1.0, np.nan, 3.0)):
        with pytest.raises(UsageError, match="with another model"):
            tune._require_same(other, tmp_path)


def test_another_model_is_not_written_over(folder, capsys, monkeypatch):
    extra = 'checkpoint = "secret"\nway = "paid"\n' + SPACE
    with monkeypatch.context() as patch:
        patch.setattr("mirrordp.Checkpoint.remove", lambda self: None)
        assert run(folder, extra) == 0
    np.savez(folder / "out" / "model.npz", other=np.zeros(2))
    before = (folder / "out" / "model.npz").read_bytes()
    assert run(folder, extra) == 2
    assert "with another model" in capsys.readouterr().err
    assert (folder / "out" / "model.npz").read_bytes() == before
    assert (folder / "secret" / "secret.key").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("epsilon", "epsilom"), "epsilom"),
        (lambda text: text.replace("delta = 1e-5\n", ""), "'delta'"),
        (
            lambda text: text.replace("1e-5", "0.01") + SPACE,
            "expected delta of at most 1/n = 0.0033 for n = 300 records, got 0.01,",
        ),
        (lambda text: text + 'way = "fre"\n', "did you mean free"),
        (lambda text: text.replace(":loss_fn", ":los_fn"), "los_fn"),
        (lambda text: text.replace(":loss_fn", "_loss"), "module:name"),
        (lambda text: text.replace("private.npz", "private.xlsx"), ".parquet"),
        (lambda text: text.replace("private.npz", "nothing.npz"), "nothing.npz"),
        (lambda text: text + "runs = 3\n", "way = 'free'"),
        (lambda text: text + 'way = "paid"\nruns = {average = 3}\n', "mean"),
        (lambda text: text + "space = 3\n", "[space]"),
        (lambda text: text + "=", "TOML"),
        (lambda text: text.replace("private.npz", "nothing.npz"), "which does not exist; check"),
        (lambda text: text.replace("public.npz", "nothing.npz"), "which does not exist; check"),
        (
            lambda text: text + SPACE.replace("learning_rate", "learning_rat"),
            "got 'learning_rat' (did you mean learning_rate?); choose among learning_rate, "
            "l2_clip_norm, batch_size, num_steps, alpha.",
        ),
        (
            lambda text: text + SPACE.replace("num_steps = 8", ""),
            "expected 'num_steps' in [space]",
        ),
        (
            lambda text: text + SPACE + "[step]\npublic_batchsize = 8\n",
            "got 'public_batchsize' (did you mean public_batch_size?); choose among ",
        ),
        # These would be arguments of the search itself, which no table may set.
        (lambda text: text + SPACE + "[step]\nspend = 8\n", "got 'spend'; choose among "),
        (lambda text: text + SPACE + "[step]\ntogether = 8\n", "got 'together'; choose among "),
        (lambda text: text + SPACE + "[step]\nmechanism = 8\n", "got 'mechanism'; choose among "),
    ],
)
def test_bad_settings_end_with_one_line(folder, capsys, change, said):
    assert run(folder, change=change) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (folder / "out").exists()


def test_missing_file(tmp_path, capsys):
    words = ["tune", "--config", str(tmp_path / "no.toml"), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "no.toml" in capsys.readouterr().err


def test_documented_settings_are_known():
    page = Path(__file__).parent.parent / "docs" / "tuning.md"
    (block,) = re.findall(r"```\n(epsilon = .*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    config = tomllib.loads(block)
    assert set(config) <= set(tune._KNOWN)
    assert tune._number_of_runs(config) == NumberOfRuns(5)
    assert len(grid(**config["space"])) == 3
    tune._check_tables(config, page)
