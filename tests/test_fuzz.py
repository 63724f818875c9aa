"""Input that wants to break it: only declared errors, nothing half-written, nothing charged.

Hypothesis damages files that were good and makes up arguments that were not. A few hundred cases
run by default; `python -m tests.fuzz --cases 10000` runs as many as asked for.
"""

import contextlib
import csv
import io
import json
import os
import shutil
import warnings

import dp_accounting
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import mirrordp
from experiments.deep.settings import SettingsError, load
from mirrordp import Adjacency, Budget, FileLedger, Mechanism, PrivateData, cli
from mirrordp.linear import descent, tuning
from mirrordp.linear.estimators import PrivateLinearRegression, PrivateLogisticRegression
from mirrordp.spending import StorageError
from mirrordp.spending.ledger import Position
from mirrordp.training.checkpoint import Saved

fuzz = settings(
    max_examples=int(os.environ.get("MIRRORDP_FUZZ_CASES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="MIRRORDP_FUZZ_CASES" not in os.environ,
)


class Accepted(BaseException):
    """The input reached the private descent: it was taken for good."""


@pytest.fixture(scope="module", autouse=True)
def no_descent():
    """What is tested here happens before the descent, which would only take time."""

    def accepted(*_, **__):
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tuning, "choose_settings", lambda *_, **__: tuning.DescentSettings(1.0, 4, 0.1)
        )
        patch.setattr(descent, "private_descent", accepted)
        yield


def call(arguments: list[str]) -> tuple[int | None, str]:
    """Exit code and output of the command line; None if the input was accepted."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = cli.main(arguments)
        except Accepted:
            code = None
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    text = output.getvalue()
    assert "Traceback" not in text
    if code not in (0, None):
        assert code == 2
        assert len(text.strip()) > 10, "an error says what it is"
    return code, text


def table(rows: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["x", "colour", "y"])
    for _ in range(rows):
        writer.writerow([f"{rng.normal():.3f}", rng.choice(["red", "blue"]), f"{rng.normal():.3f}"])
    return file.getvalue().encode()


PRIVATE, PUBLIC = table(30, 0), table(20, 1)

NASTY = [
    b"", b"\x00", b"\xff\xfe", b'"', b'"""', b",", b",,,,", b"\r", b"\n\n", b"nan", b"inf",
    b"-1e400", b"1e309", b"x" * 200, b";", b"\t", "É✓".encode(), b"=cmd()", b"NULL", b"0x1F",
    b"1_000", b"9" * 400,
]  # fmt: skip


@st.composite
def damaged(draw, good: bytes) -> bytes:
    """Good bytes with a few pieces cut, doubled, swapped for garbage or flipped."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        size = len(content)
        start = draw(st.integers(0, size))
        stop = min(size, start + draw(st.integers(0, 12)))
        match draw(st.sampled_from(["replace", "cut", "tail", "double", "flip"])):
            case "replace":
                content[start:stop] = draw(st.sampled_from(NASTY) | st.binary(max_size=8))
            case "cut":
                del content[start:stop]
            case "tail":
                del content[start:]
            case "double":
                content[start:start] = content[start : start + 60]
            case "flip" if size:
                content[min(start, size - 1)] ^= draw(st.integers(1, 255))
    return bytes(content)


@pytest.fixture(scope="module")
def budget(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    (folder / "private.csv").write_bytes(PRIVATE)
    with Budget.create(folder / "b", epsilon=50.0, delta=1e-4, data=folder / "private.csv"):
        pass
    return folder / "b"


def fit(folder, task, *more) -> list[str]:
    return [
        "fit", "--private", str(folder / "private.csv"), "--public", str(folder / "public.csv"),
        "--target", "y", "--task", task, "--epsilon", "0.5", "--delta", "1e-4",
        "--out", str(folder / "model"), *more,
    ]  # fmt: skip


def predict(folder) -> list[str]:
    return [
        "predict", "--model", str(folder / "model"), "--input", str(folder / "input.csv"),
        "--output", str(folder / "output.csv"),
    ]  # fmt: skip


@contextlib.contextmanager
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def charged(folder) -> int:
    return FileLedger.read(folder / "ledger.jsonl").position.length


TASKS = st.sampled_from(["regression", "classification", "count"])


@fuzz
@given(data=st.data(), task=TASKS, which=st.sampled_from(["private", "public"]))
def test_a_damaged_csv_file(tmp_path_factory, budget, data, task, which):
    """Refused in a sentence, with no folder left and nothing charged; or accepted and charged."""
    with fresh(tmp_path_factory) as folder:
        good = {"private": PRIVATE, "public": PUBLIC}
        good[which] = data.draw(damaged(good[which]))
        for name, content in good.items():
            (folder / f"{name}.csv").write_bytes(content)
        before = charged(budget)
        more = ["--budget", str(budget), "--data-changed"]
        code, _ = call(fit(folder, task, *more))
        assert not (folder / "model").exists()
        if code is None:
            assert charged(budget) > before
        else:
            assert code == 2
            # Acknowledging changed data is itself a record, and no charge.
            kinds = [r["kind"] for r in FileLedger.read(budget / "ledger.jsonl").records[before:]]
            assert "charge" not in kinds
            assert not list(folder.glob("model.run/checkpoint-*"))


CELLS = st.one_of(
    st.none(),
    st.floats(),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=6),
    st.booleans(),
    st.binary(max_size=4),
)


@fuzz
@given(data=st.data(), task=TASKS)
def test_a_made_up_parquet_file(tmp_path_factory, data, task):
    import pyarrow
    from pyarrow import parquet

    with fresh(tmp_path_factory) as folder:
        rows = data.draw(st.integers(0, 6))
        names = data.draw(st.lists(st.sampled_from(["x", "colour", "y", "", "é"]), max_size=4))
        kinds = (st.floats(), st.text(max_size=4), st.integers(-9, 9), st.booleans(), CELLS)
        columns = []
        for _ in names:
            kind = data.draw(st.sampled_from(kinds))
            columns.append(data.draw(st.lists(kind | st.none(), min_size=rows, max_size=rows)))
        try:
            made = pyarrow.Table.from_arrays([pyarrow.array(c) for c in columns], names=names)
        except (pyarrow.ArrowException, OverflowError):
            return
        file = io.BytesIO()
        parquet.write_table(made, file)
        content = file.getvalue()
        if data.draw(st.booleans()):
            content = data.draw(damaged(content))
        (folder / "private.parquet").write_bytes(content)
        (folder / "public.csv").write_bytes(PUBLIC)
        arguments = fit(folder, task)
        arguments[2] = str(folder / "private.parquet")
        call(arguments)
        assert not (folder / "model").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A stored model: of public rows alone, since no descent is run here."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "private.csv").write_bytes(PRIVATE)
    (folder / "public.csv").write_bytes(PUBLIC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tuning, "choose_settings", lambda *_, **__: tuning.DescentSettings(1.0, 0, 0.1)
        )
        code, text = call(fit(folder, "regression"))
    assert code == 0, text
    return folder / "model"


@fuzz
@given(data=st.data())
def test_a_damaged_input_or_model_of_predict(tmp_path_factory, model, data):
    with fresh(tmp_path_factory) as folder:
        shutil.copytree(model, folder / "model")
        source = PRIVATE
        if data.draw(st.booleans()):
            source = data.draw(damaged(PRIVATE))
        else:
            stored = folder / "model" / "model.json"
            stored.write_bytes(data.draw(damaged(stored.read_bytes())))
        (folder / "input.csv").write_bytes(source)
        output = folder / "output.csv"
        code, _ = call(predict(folder))
        assert output.exists() == (code == 0)
        left = {path.name for path in folder.iterdir()} - {"model", "input.csv", "output.csv"}
        assert left == set()


@st.composite
def damaged_json(draw, good):
    """A JSON value with one node swapped for something else."""
    value = json.loads(json.dumps(good))
    holder, key, node = None, None, value
    while isinstance(node, dict | list) and node and (holder is None or draw(st.booleans())):
        keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
        holder, key = node, draw(st.sampled_from(keys))
        node = holder[key]
    other = draw(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just([]) | st.just({})
        | st.floats(allow_nan=False, allow_infinity=False)
    )  # fmt: skip
    if holder is None:
        return other
    if isinstance(holder, dict) and draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = other
    return value


@fuzz
@given(data=st.data())
def test_a_model_file_of_other_values(tmp_path_factory, model, data):
    with fresh(tmp_path_factory) as folder:
        shutil.copytree(model, folder / "model")
        stored = folder / "model" / "model.json"
        stored.write_text(json.dumps(data.draw(damaged_json(json.loads(stored.read_text())))))
        (folder / "input.csv").write_bytes(PRIVATE)
        output = folder / "output.csv"
        code, _ = call(predict(folder))
        assert output.exists() == (code == 0)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """A ledger of three charges, as files."""
    folder = tmp_path_factory.mktemp("ledger")
    with FileLedger.create(folder / "ledger.jsonl", Adjacency.ZERO_OUT) as made:
        for count in (3, 4, 5):
            made.charge(
                dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), count)
            )
    return folder


@fuzz
@given(data=st.data())
def test_a_damaged_ledger_never_says_less(tmp_path_factory, ledger, data):
    """Reading fails, or gives what was charged; a record that was torn had no result."""
    with fresh(tmp_path_factory) as folder:
        shutil.copytree(ledger, folder, dirs_exist_ok=True)
        name = data.draw(st.sampled_from(sorted(path.name for path in ledger.iterdir())))
        (folder / name).write_bytes(data.draw(damaged((ledger / name).read_bytes())))
        truth = FileLedger.read(ledger / "ledger.jsonl").event
        try:
            found = FileLedger.read(folder / "ledger.jsonl").event
        except StorageError:
            return
        assert found == truth


@fuzz
@given(data=st.data())
def test_a_damaged_checkpoint_is_noticed(data):
    """Every change of a byte is noticed, and nothing is executed."""
    content = Saved(
        run="r",
        entropy=(7,),
        configuration={"mechanism": "m"},
        ledger=Position(1, "ab"),
        position={"step": 4},
        arrays={"params": np.arange(5.0), "key": np.arange(2, dtype=np.uint32)},
    ).to_bytes()
    changed = data.draw(damaged(content))
    if changed != content:
        with pytest.raises(ValueError):
            Saved.from_bytes(changed)


GOOD_TOML = b"""extends = "base.toml"
algorithm = "pda"
noise_multiplier = 1.51
learning_rate = 0.2
decay = 2000

[sweep]
decays = [200, 500]
rate_from = "cifar10/warm-s1.51"
"""


@fuzz
@given(content=damaged(GOOD_TOML))
def test_a_damaged_settings_file(tmp_path_factory, content):
    with fresh(tmp_path_factory) as folder:
        (folder / "base.toml").write_text(
            'dataset = "cifar10"\ndelta = 1e-5\nbatch_size = 500\nepochs = 100\n'
        )
        path = folder / "pda.toml"
        path.write_bytes(content)
        with contextlib.suppress(SettingsError):
            load(path)


NUMBERS = st.one_of(
    st.floats(), st.integers(-(10**6), 10**6), st.none(), st.text(max_size=3), st.booleans()
)


@fuzz
@given(
    sampling_prob=NUMBERS,
    expected_batch_size=NUMBERS,
    l2_clip_norm=NUMBERS,
    noise_multiplier=NUMBERS,
    num_steps=NUMBERS,
    adjacency=st.sampled_from([*Adjacency, None, "zero-out"]),
)
def test_made_up_mechanisms(
    sampling_prob, expected_batch_size, l2_clip_norm, noise_multiplier, num_steps, adjacency
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError, TypeError):
            Mechanism(
                sampling=mirrordp.PoissonSampling(
                    sampling_prob=sampling_prob, expected_batch_size=expected_batch_size
                ),
                l2_clip_norm=l2_clip_norm,
                noise_multiplier=noise_multiplier,
                num_steps=num_steps,
                adjacency=adjacency,
            )


ARRAYS = st.one_of(
    st.lists(st.lists(CELLS, max_size=3), max_size=4),
    st.lists(CELLS, max_size=4),
    st.floats(),
    st.none(),
    st.text(max_size=3),
)


@fuzz
@given(
    X=ARRAYS, y=ARRAYS, classifier=st.booleans(), secure=st.booleans(), X_public=ARRAYS,
    y_public=ARRAYS,
)  # fmt: skip
def test_made_up_arrays(X, y, classifier, secure, X_public, y_public):
    kind = PrivateLogisticRegression if classifier else PrivateLinearRegression
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError, TypeError, Accepted):
            kind(epsilon=1.0, delta=1e-3, secure=secure).fit(X, y, X_public, y_public)
        with contextlib.suppress(ValueError, TypeError):
            PrivateData(X)


WORDS = st.sampled_from(
    ["--epsilon", "--delta", "--noise-multiplier", "--steps", "--batch-size", "--num-examples",
     "--adjacency", "--accountant", "--json", "--out", "--seed", "1", "0", "-1", "1e-5", "0.5",
     "nan", "inf", "1e400", "rdp", "replace", "zero-out", "add-remove", "", "--", "x", "--secure",
     "--resume", "--budget", "--quiet", "--keep-checkpoint"]
)  # fmt: skip


@fuzz
@given(
    command=st.sampled_from(["account", "calibrate", "fit", "predict", "budget", "bogus"]),
    words=st.lists(WORDS, max_size=12),
)
def test_made_up_command_lines(command, words):
    # RDP: what is tried is the reading of arguments, not how long an accountant can take.
    code, _ = call([command, *words, *(["--accountant", "rdp"] if command == "account" else [])])
    assert code in (0, 2)
