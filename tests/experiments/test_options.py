"""Options that cannot be meant are refused before anything is computed."""

import pytest

from experiments import __main__ as dispatcher


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("linreg --dims 500 0", "--dims: expected a whole number of at least 200, got '0'"),
        ("linreg --seed -1", "--seed: expected a whole number of at least 0, got '-1'"),
        ("linreg --readme none.md", "--readme: expected a file that is there, got 'none.md'"),
        ("tabular --seeds 0", "--seeds: expected a whole number of at least 1, got '0'"),
        ("tabular --plot-only --readme none.md", "--readme: expected a file that is there"),
        ("table --readme none.md", "--readme: expected a file that is there, got 'none.md'"),
        ("stackoverflow --rounds 0", "--rounds: expected a whole number of at least 1, got '0'"),
        ("stackoverflow --public-users x", "--public-users: expected a whole number of at least 1"),
        ("stackoverflow --plot-only --readme none.md", "--readme: expected a file that is there"),
    ],
)
def test_options_out_of_range(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        dispatcher.main(options.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_users_that_are_too_few_end_in_one_line(tmp_path, capsys):
    users = tmp_path / "users.tsv"
    users.write_text("user\ttext\nann\tone two three\nbob\tfour five\n")
    with pytest.raises(SystemExit) as end:
        dispatcher.main(["stackoverflow", "--data", str(users), "--out", str(tmp_path)])
    assert end.value.code == 2
    assert "Give more users, or ask for fewer public ones" in capsys.readouterr().err
