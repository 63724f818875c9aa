import dataclasses
import json
import logging
import signal
import subprocess
import sys
import time

import pytest

import mirrordp
from mirrordp import cli, demo
from mirrordp.cli import _common, budget, fit
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency, epsilon as exact_epsilon, full_batch_event
from mirrordp.tables import TASKS
from tests.test_demo import TINY

CIFAR = ["--num-examples", "48000", "--batch-size", "500", "--steps", "9600", "--delta", "1e-5"]
SMALL = ["--sampling-prob", "0.01", "--steps", "100", "--delta", "1e-5"]
ACCOUNT = ["account", "--noise-multiplier", "1.5"]
# What is tuned, and how well, is none of the command's business.
ONE_RATE = dataclasses.replace(TINY, learning_rates=(1.0,), num_steps=6)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """How long things take must not decide what tests see."""
    monkeypatch.setattr(_common, "_PATIENCE", 1e6)


def run_json(capsys, *arguments):
    assert cli.main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


# Field notes, section 1: noise multiplier, n, batch, steps, delta, RDP, PLD. The rows of little
# noise, which take long, are in test_accounting.py.
PAPER = [
    (1.51, 48_000, 500, 9_600, 1e-5, 3.508, 3.230),
    (20.0, 48_000, 500, 9_600, 1e-5, 0.185, 0.164),
    (1.89, 670_014, 500, 67_001, 1e-6, 0.478, 0.443),
    (1.08, 46_813, 250, 3_745, 1e-5, 1.712, 1.550),
    (1.49, 48_764, 250, 3_901, 1e-5, 1.006, 0.916),
]


@pytest.mark.parametrize(("sigma", "n", "batch", "steps", "delta", "rdp", "pld"), PAPER)
def test_account_gives_the_columns_of_the_paper(capsys, sigma, n, batch, steps, delta, rdp, pld):
    options = [
        *("account", "--noise-multiplier", str(sigma), "--num-examples", str(n)),
        *("--batch-size", str(batch), "--steps", str(steps), "--delta", str(delta)),
        *("--adjacency", "add-remove"),
    ]
    assert run_json(capsys, *options)["epsilon"] == pytest.approx(pld, abs=0.01)
    found = run_json(capsys, *options, "--accountant", "rdp")["epsilon"]
    assert found == pytest.approx(rdp, abs=0.01)


def test_a_number_of_records_that_is_secret_is_asked_for_as_a_guess(capsys):
    options = ["account", "--noise-multiplier", "2", "--steps", "9", "--delta", "1e-5"]
    options += ["--adjacency", "add-remove", "--accountant", "rdp"]
    assert cli.main([*options, "--num-examples", "1000", "--batch-size", "10"]) == 0
    assert "is secret: take a public guess for --num-examples" in capsys.readouterr().out
    assert cli.main([*options, "--sampling-prob", "0.01"]) == 0
    assert "is secret\n" in capsys.readouterr().out


def test_coarse_orders_give_the_quoted_value(capsys):
    found = run_json(
        capsys,
        *("account", "--noise-multiplier", "0.4", "--num-examples", "342477"),
        *("--batch-size", "100", "--steps", "1600", "--delta", "1e-6"),
        *("--accountant", "rdp", "--orders", "coarse"),
    )
    assert found["epsilon"] == pytest.approx(8.3208, abs=1e-3)


def test_json_names_everything(capsys):
    found = run_json(capsys, *ACCOUNT, *CIFAR)
    assert list(found)[:3] == ["epsilon", "delta", "noise_multiplier"]
    expected = {
        "delta": 1e-5,
        "noise_multiplier": 1.5,
        "adjacency": "zero-out",
        "unit": "example",
        "sampling": "poisson",
        "num_examples": 48_000,
        "batch_size": 500,
        "steps": 9_600,
        "accountant": "pld",
        "num_examples_is_public": True,
        "tuning": "not charged",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["sampling_prob"] == pytest.approx(500 / 48_000)


@pytest.mark.parametrize("adjacency", [kind.value for kind in Adjacency])
@pytest.mark.parametrize("given", [["--sampling", "full"], ["--sampling-prob", "1"]])
def test_full_batch_is_the_closed_form(capsys, adjacency, given):
    found = run_json(
        capsys,
        *("account", "--noise-multiplier", "20", "--steps", "30", "--delta", "1e-5"),
        *("--adjacency", adjacency, *given),
    )
    expected = exact_epsilon(
        full_batch_event(20.0, num_steps=30), 1e-5, adjacency=Adjacency(adjacency)
    )
    assert found["epsilon"] == expected.epsilon
    assert found["accountant"] == "pld"


def test_fixed_size_falls_back_to_rdp_and_says_so(capsys):
    found = run_json(
        capsys,
        *("account", "--noise-multiplier", "1.51", *CIFAR),
        *("--sampling", "fixed", "--adjacency", "replace"),
    )
    assert found["accountant"] == "rdp"
    assert found["epsilon"] == pytest.approx(22.16, abs=0.01)


@pytest.mark.parametrize(
    ("epochs", "sampling", "steps"),
    [
        ("100", ["--num-examples", "48000", "--batch-size", "500"], 9_600),
        ("0.1", ["--num-examples", "1000", "--batch-size", "10"], 10),
        ("1.5", ["--num-examples", "1000", "--batch-size", "300"], 5),
        ("1", ["--num-examples", "1001", "--batch-size", "10"], 101),
        ("3", ["--sampling-prob", "0.01"], 300),
        ("7", ["--sampling", "full"], 7),
    ],
)
def test_epochs_are_steps(capsys, epochs, sampling, steps):
    """Rounded up, and not by the rounding of a division."""
    options = [*sampling, "--delta", "1e-6", "--accountant", "rdp", "--orders", "coarse"]
    noise = ["account", "--noise-multiplier", "3"]
    found = run_json(capsys, *noise, *options, "--epochs", epochs)
    assert found["steps"] == steps
    assert found == run_json(capsys, *noise, *options, "--steps", str(steps))
    found = run_json(capsys, "calibrate", "--epsilon", "3", *options, "--epochs", epochs)
    assert found["steps"] == steps


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibrate_stays_below_the_target(capsys, accountant):
    found = run_json(capsys, "calibrate", "--epsilon", "3", *CIFAR, "--accountant", accountant)
    assert 2.97 <= found["epsilon"] <= 3.0
    again = run_json(
        capsys,
        *("account", "--noise-multiplier", repr(found["noise_multiplier"]), *CIFAR),
        *("--accountant", accountant),
    )
    assert again["epsilon"] == found["epsilon"]


def test_text_output(capsys):
    assert cli.main([*ACCOUNT, *SMALL]) == 0
    captured = capsys.readouterr()
    for words in ("epsilon", "delta 1e-05", "zero-out", "poisson", "PLD", "not charged"):
        assert words in captured.out
    assert captured.err == ""


def test_large_delta_warns_on_standard_error_only(capsys):
    options = ["--num-examples", "100", "--batch-size", "10", "--steps", "10", "--delta", "0.1"]
    assert cli.main([*ACCOUNT, *options, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["delta"] == 0.1
    assert captured.err.startswith("mirrordp: warning: expected delta of at most 1/n = 0.01")
    assert captured.err.count("\n") == 1


def test_a_plan_warns_of_a_large_delta_too(capsys):
    options = ["--num-examples", "100", "--delta", "0.1", "--adjacency", "zero-out"]
    assert cli.main(["plan", "--epsilon", "2", *options, "--json"]) == 0
    error = capsys.readouterr().err
    assert "mirrordp: warning: expected delta of at most 1/n = 0.01 for n = 100" in error


def test_an_expected_batch_size_may_be_a_fraction(capsys):
    options = ["--num-examples", "1000", "--steps", "10", "--delta", "1e-5"]
    found = run_json(capsys, *ACCOUNT, *options, "--batch-size", "100.5")
    assert (found["batch_size"], found["sampling_prob"]) == (100.5, 0.1005)
    by_prob = ["--sampling-prob", "0.1005"]
    assert run_json(capsys, *ACCOUNT, *options, *by_prob)["epsilon"] == found["epsilon"]
    whole = run_json(capsys, *ACCOUNT, *options, "--batch-size", "1e2")
    assert isinstance(whole["batch_size"], int)


def test_dropped_orders_are_not_reported(capsys, caplog):
    with caplog.at_level(logging.WARNING):
        options = ["--sampling-prob", "0.9", "--steps", "10", "--delta", "1e-5"]
        run_json(capsys, "account", "--noise-multiplier", "0.3", *options, "--accountant", "rdp")
    assert not [record for record in caplog.records if record.name == "absl"]


BAD = {
    "a fraction of a fixed batch": (
        [
            *ACCOUNT,
            "--num-examples",
            "1000",
            "--batch-size",
            "100.5",
            "--steps",
            "10",
            "--delta",
            "1e-5",
            "--sampling",
            "fixed",
            "--adjacency",
            "replace",
        ],
        "expected a whole number for --batch-size with --sampling fixed, got 100.5",
    ),
    "no command": ([], "expected a command"),
    "unknown command": (["train"], "got 'train'"),
    "unknown option": ([*ACCOUNT, *SMALL, "--frobnicate", "3"], "got --frobnicate; see"),
    "abbreviated option": ([*ACCOUNT, *SMALL, "--acc", "rdp"], "did you mean --accountant?"),
    "mistyped option": (
        ["account", "--noise-multipler", "1.5", *SMALL],
        "got --noise-multipler (did you mean --noise-multiplier?); see 'mirrordp account --help'",
    ),
    "mistyped option with a value": (
        ["calibrate", "--epsilom=1", *SMALL],
        "got --epsilom (did you mean --epsilon?)",
    ),
    "one dash": (["calibrate", "-epsilon", "1", *SMALL], "(did you mean --epsilon?)"),
    "underscores": ([*ACCOUNT, "--sampling_prob", "0.1"], "(did you mean --sampling-prob?)"),
    "mistyped option of a command's command": (
        ["budget", "init", "b", "--epsilon", "3", "--dleta", "1e-6", "--data", "x.csv"],
        "got --dleta (did you mean --delta?); see 'mirrordp budget init --help'",
    ),
    "mistyped option before the command": (["--verison"], "(did you mean --version?)"),
    "mistyped command": (["calibrat"], "got 'calibrat' (did you mean calibrate?)"),
    "mistyped command of a command": (["budget", "shwo"], "got 'shwo' (did you mean show?)"),
    "missing steps": ([*ACCOUNT, "--delta", "1e-5"], "arguments --steps --epochs is required"),
    "steps and epochs": (
        [*ACCOUNT, *SMALL, "--epochs", "3"],
        "argument --epochs: not allowed with argument --steps",
    ),
    "too many epochs": (
        [*ACCOUNT, *SMALL[:2], "--epochs", "1e6", "--delta", "1e-5"],
        "at most 10000000 steps, got 100000000",
    ),
    "missing value": (["account", "--noise-multiplier"], "expected one argument"),
    "not a number": ([*ACCOUNT, *SMALL[:2], "--steps", "many"], "got 'many'"),
    "fractional steps": ([*ACCOUNT, *SMALL[:2], "--steps", "1.5"], "positive integer, got '1.5'"),
    "too many steps": (
        [*ACCOUNT, *SMALL[:2], "--steps", "1e12", "--delta", "1e-5"],
        "expected at most 10000000 steps",
    ),
    "no noise": (["account", "--noise-multiplier", "0", *SMALL], "positive finite number"),
    "NaN noise": (["account", "--noise-multiplier", "nan", *SMALL], "got 'nan'"),
    "hardly any noise": (["account", "--noise-multiplier", "1e-9", *SMALL], "got 1e-09"),
    "epsilon zero": (["calibrate", "--epsilon", "0", *SMALL], "got '0'"),
    "epsilon negative": (["calibrate", "--epsilon", "-1", *SMALL], "got '-1'"),
    "epsilon NaN": (["calibrate", "--epsilon", "nan", *SMALL], "got 'nan'"),
    "epsilon infinite": (["calibrate", "--epsilon", "inf", *SMALL], "got 'inf'"),
    "epsilon huge": (["calibrate", "--epsilon", "1e6", *SMALL], "at most 1000"),
    "delta zero": ([*ACCOUNT, *SMALL[:4], "--delta", "0"], "got '0'"),
    "delta one": ([*ACCOUNT, *SMALL[:4], "--delta", "1"], "between 0 and 1"),
    "delta NaN": ([*ACCOUNT, *SMALL[:4], "--delta", "nan"], "between 0 and 1"),
    "probability": ([*ACCOUNT, "--sampling-prob", "1.5", *SMALL[2:]], "at most 1, got '1.5'"),
    "no sampling": ([*ACCOUNT, *SMALL[2:]], "got neither"),
    "half of the sampling": (
        [*ACCOUNT, *SMALL[2:], "--num-examples", "9000"],
        "got --num-examples",
    ),
    "both samplings": ([*ACCOUNT, *CIFAR, "--sampling-prob", "0.1"], "got both"),
    "large batch": (
        [*ACCOUNT, "--num-examples", "10", "--batch-size", "20", *SMALL[2:]],
        "expected --batch-size of at most --num-examples (10), got 20",
    ),
    "orders without rdp": ([*ACCOUNT, *SMALL, "--orders", "coarse"], "got no --accountant"),
    "orders with pld": (
        [*ACCOUNT, *SMALL, "--orders", "coarse", "--accountant", "pld"],
        "got --accountant pld",
    ),
    "unknown accountant": ([*ACCOUNT, *SMALL, "--accountant", "gdp"], "one of pld, rdp"),
    "unknown adjacency": ([*ACCOUNT, *SMALL, "--adjacency", "edit"], "got 'edit'"),
    "fixed without n": (
        [*ACCOUNT, *SMALL, "--sampling", "fixed", "--adjacency", "replace"],
        "got --sampling-prob",
    ),
    "fixed with zero-out": ([*ACCOUNT, *CIFAR, "--sampling", "fixed"], "--adjacency replace"),
    "fixed with pld": (
        [*ACCOUNT, *CIFAR, "--sampling", "fixed", "--adjacency", "replace", "--accountant", "pld"],
        "PLD cannot analyse fixed-size sampling under replace adjacency. Use RDP.",
    ),
    "rdp with Poisson and replace": (
        [*ACCOUNT, *SMALL, "--adjacency", "replace", "--accountant", "rdp"],
        "RDP cannot analyse Poisson sampling under replace adjacency. Use PLD.",
    ),
    "full with a batch": ([*ACCOUNT, *CIFAR, "--sampling", "full"], "got --batch-size 500"),
    "full with q": ([*ACCOUNT, *SMALL, "--sampling", "full"], "got --sampling-prob 0.01"),
    "seed": (["demo", "--seed", "-1"], "non-negative integer, got '-1'"),
    "folder": (["demo", "--out", f"{__file__}/folder"], "choose another"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mirrordp: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(".\n")
    assert "Traceback" not in captured.err


def test_too_little_noise_for_pld_is_analysed_with_rdp(capsys):
    options = ["--sampling-prob", "0.5", "--steps", "100000", "--delta", "1e-5"]
    noise = ["account", "--noise-multiplier", "0.01"]
    assert run_json(capsys, *noise, *options)["accountant"] == "rdp"
    assert cli.main([*noise, *options, "--accountant", "pld"]) == 2
    assert "use --accountant rdp" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["account", "--help"], ["demo", "--help"]])
def test_help_shows_an_example(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 0
    assert "example: mirrordp" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"mirrordp {mirrordp.__version__}\n"


def test_demo_prints_one_object(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DemoSettings", lambda: ONE_RATE)
    assert (
        cli.main(["demo", "--out", str(tmp_path / "out"), "--seed", "3", "--json", "--quiet"]) == 0
    )
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert found["epsilon"] <= TINY.epsilon
    assert found["seed"] == 3
    assert found["randomness"] == "reproducible, not for release"
    assert set(found["methods"]) == {"cold", "warm", "pda_dpmd"}
    for method in found["methods"].values():
        assert method["test_loss_standard_error"] > 0


def test_demo_prints_a_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DemoSettings", lambda: ONE_RATE)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    for words in ("DP-SGD, cold", "DP-SGD, warm", "PDA-DPMD", "<- best", str(tmp_path), "Took"):
        assert words in captured.out
    assert "not for release" in captured.err
    # Plain lines of progress, since this is no terminal.
    assert "run 9 of 9" in captured.err
    assert not {"\r", "\033"} & set(captured.err + captured.out)


def test_interrupt_has_no_traceback(capsys, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_installed_command():
    result = subprocess.run(
        [sys.executable, "-m", "mirrordp", *ACCOUNT, *SMALL, "--json", "--quiet"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)["accountant"] == "pld"
    assert result.stderr == ""


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (False, False), (False, True)])
def test_what_takes_long_is_said(capsys, monkeypatch, terminal, quiet):
    monkeypatch.setattr(_common, "_PATIENCE", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    slow = accounting.epsilon
    monkeypatch.setattr(
        accounting, "epsilon", lambda *a, **k: time.sleep(0.2) or slow(*a, **k)
    )  # fmt: skip
    assert cli.main([*ACCOUNT, *SMALL, *(["--quiet"] if quiet else [])]) == 0
    captured = capsys.readouterr()
    assert ("computing epsilon ..." in captured.err) is not quiet
    # On a terminal the line is wiped at the end; elsewhere nothing is overwritten.
    assert captured.err.endswith("\r\033[K") is terminal
    assert ("\033" in captured.err) is terminal


def test_what_should_not_happen_has_no_traceback(capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("row 17 is Alice")

    monkeypatch.setattr(accounting, "epsilon", broken)
    assert cli.main([*ACCOUNT, *SMALL]) == 70
    captured = capsys.readouterr()
    assert "unexpected RuntimeError occurred (test_cli.py, line" in captured.err
    assert "Alice" not in captured.err
    assert captured.err.count("\n") == 1
    monkeypatch.setenv("MIRRORDP_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="Alice"):
        cli.main([*ACCOUNT, *SMALL])


def test_a_full_disk_is_one_sentence(capsys, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "results.png")

    monkeypatch.setattr(demo, "run_demo", full)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "got 'results.png' (No space left on device)" in capsys.readouterr().err


def test_a_reader_that_goes_away_leaves_no_traceback():
    command = [sys.executable, "-m", "mirrordp", *ACCOUNT, *SMALL, "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 141
    assert errors == b""


def test_jax_is_not_imported():
    """It takes seconds."""
    code = f"""
import sys
from mirrordp import cli
for arguments in (["--help"], ["--version"], {[*ACCOUNT, *SMALL]!r}):
    try:
        assert cli.main(arguments) == 0
    except SystemExit as stopped:
        assert stopped.code == 0
    found = {{"jax", "jax_privacy", "optax", "sklearn", "matplotlib"}} & set(sys.modules)
    assert not found, (arguments, found)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_choices_are_those_of_the_library():
    """The command line repeats them, since it parses options before it imports the library."""
    assert set(_common.ADJACENCIES) == {kind.value for kind in Adjacency}
    assert budget.UNITS == accounting.UNITS
    assert fit.TASKS == TASKS


# Runs the installed command, and says when Python itself and the package have started.
STARTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mirrordp import cli
main = cli.main
def started():
    print("started", flush=True)
    return main(sys.argv[1:])
cli.main = started
cli.command()
"""


@pytest.mark.parametrize(
    ("command", "delay"),
    [("--help", 0.0), *(("demo", delay) for delay in (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0))],
)
def test_interruption_at_any_time_has_no_traceback(tmp_path, command, delay):
    """Also in the middle of an import."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, command, *(["--quiet"] if command == "demo" else [])],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "started\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    if process.returncode in (0, -signal.SIGINT):
        # It had finished before, perhaps up to the point where Python forgets our handler.
        assert errors == ""
    else:
        assert process.returncode == 130
        assert errors.startswith("mirrordp: interrupted.")
        assert errors.count("\n") == 1
