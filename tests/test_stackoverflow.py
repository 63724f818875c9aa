"""The StackOverflow experiment: files, splits, the network, metrics, and stages that resume."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrordp
from experiments import models
from experiments.stackoverflow import command, data, report
from mirrordp.report import upwards

FACTS = {
    "stand_in": True,
    "private_users": 2860,
    "public_users": 100,
    "vocabulary_words": 6969,
    "vocabulary_from": "public",
    "test_unknown": 0.08,
    "public_from": "held-out users",
    "not_covered": ["the choice of settings"],
}
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "fast", "slow", "and", "or", "not"]


@pytest.fixture(scope="module")
def users():
    """Forty users with 1 to 40 sentences; two of them with more than 256."""
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 40, 38), 300, 600]
    return {
        f"user {number}": [" ".join(rng.choice(WORDS, rng.integers(2, 30))) for _ in range(size)]
        for number, size in enumerate(sizes)
    }


@pytest.fixture(scope="module")
def tsv(users, tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "users.tsv"
    path.write_text("".join(f"{user}\tsite\t{s}\n" for user, own in users.items() for s in own))
    return path


class TestReaders:
    def test_every_format_gives_the_same_users(self, users, tsv, tmp_path):
        import h5py
        import pyarrow as pa
        import pyarrow.parquet

        with h5py.File(tmp_path / "users.h5", "w") as file:
            for user, own in users.items():
                group = file.create_group(f"examples/{user}")
                group.create_dataset("tokens", data=[s.encode() for s in own])
                group.create_dataset("title", data=[b"" for _ in own])
        rows = [{"user": user, "text": s} for user, own in users.items() for s in own]
        (tmp_path / "users.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "users.parquet")
        for path in (tsv, *(tmp_path / f"users.{kind}" for kind in ("h5", "jsonl", "parquet"))):
            assert dict(data.read(path)) == users, path.suffix

    def test_mistakes(self, tmp_path):
        with pytest.raises(ValueError, match="expected one of"):
            data.read(tmp_path / "users.txt")
        (tmp_path / "bad.tsv").write_text("only a user\n")
        with pytest.raises(ValueError, match="line 1: expected a user and a sentence"):
            dict(data.read(tmp_path / "bad.tsv"))
        for text in ('{"name": 1}\n', "no JSON\n", "[1, 2]\n"):
            (tmp_path / "bad.jsonl").write_text(text)
            with pytest.raises(ValueError, match=r"line 1: .* the fields 'user' and 'text', got"):
                dict(data.read(tmp_path / "bad.jsonl"))
        (tmp_path / "bad.jsonl").write_text('\n{"user": 1, "text": null}\n')
        with pytest.raises(ValueError, match="row 1: expected a user and a text"):
            dict(data.read(tmp_path / "bad.jsonl"))
        (tmp_path / "blank.tsv").write_text("a\tone two\n\n")
        assert dict(data.read(tmp_path / "blank.tsv")) == {"a": ["one two"]}


class TestPrepare:
    def test_splits_are_of_users_and_disjoint(self, tsv):
        made = data.prepare(tsv, num_public_users=5, test_fraction=0.1)
        facts = made.facts
        assert (facts["test_users"], facts["public_users"], facts["validation_users"]) == (4, 5, 2)
        assert len(made.private) == 40 - 4 - 5 - 2
        assert not set(made.private.ids) & set(made.public.ids)
        assert made.private.num_examples.max() <= 256
        assert facts["stand_in"]

    def test_too_few_users(self, tsv):
        with pytest.raises(ValueError, match="got 4 test, 36 public, 0 validation, 0 private"):
            data.prepare(tsv, num_public_users=100)

    def test_a_user_decides_for_itself(self, users, tmp_path):
        """Which sentences are kept and which side a user is on do not follow from other users."""
        big = [(u, s) for u, s in users.items() if len(s) > 256]
        for user, own in big:
            kept, over = data.cut(user, own, 0)
            assert len(kept) == 256
            assert len(over) == min(256, len(own) - 256)
            assert sorted(kept + over) == sorted(own) or len(own) > 512
        ranks = [data._rank(user, "split", 0) for user in users]
        assert len(set(ranks)) == len(users)

    def test_a_sample_of_very_many_test_sentences(self, tsv, monkeypatch):
        whole = data.prepare(tsv, num_public_users=5).test
        monkeypatch.setattr(data, "MAX_EVALUATION", 7)
        some = data.prepare(tsv, num_public_users=5)
        assert len(some.test) == some.facts["test_sentences"] == 7 < len(whole)
        assert {tuple(row) for row in some.test} <= {tuple(row) for row in whole}

    def test_the_vocabulary_is_public_unless_asked_otherwise(self, tsv):
        made = data.prepare(tsv, num_public_users=5)
        assert made.facts["vocabulary_from"] == "public"
        assert not any("vocabulary" in line for line in made.facts["not_covered"])
        made = data.prepare(tsv, num_public_users=5, vocabulary_from="train")
        assert any("vocabulary" in line for line in made.facts["not_covered"])

    def test_overflow_warns(self, tsv):
        with pytest.warns(mirrordp.data.UnprotectedWarning, match="sentences of private users"):
            made = data.prepare(tsv, overflow=True, test_data=tsv)
        authors = {name.removeprefix("overflow of ") for name in made.public.ids}
        assert authors == {"user 38", "user 39"} & set(made.private.ids)
        assert authors
        assert any("above 256" in line for line in made.facts["not_covered"])

    def test_overflow_shares_no_sentence_with_private_rows(self, tmp_path):
        """Every sentence is there once, so that a row says which sentence it is."""
        codes = itertools.product(WORDS, repeat=4)
        path = tmp_path / "unique.tsv"
        path.write_text(
            "".join(
                f"user {number}\t{' '.join(next(codes))}\n"
                for number in range(30)
                for _ in range(700 if number < 12 else 3)
            )
        )
        with pytest.warns(mirrordp.data.UnprotectedWarning):
            made = data.prepare(path, overflow=True, num_public_users=5)
        public, private = (
            {tuple(row) for row in part.arrays.tolist()} for part in (made.public, made.private)
        )
        assert len(public) == 5 * 256
        assert len(private) > 5 * 256
        assert not public & private
        # Nor is it test data: test users are set aside first, with all that they wrote.
        assert not public & {tuple(row) for row in made.test.tolist()}

    def test_overflow_is_of_private_users_alone(self, tmp_path):
        """What users wrote who choose the settings is not learned from either."""
        path = tmp_path / "long.tsv"
        path.write_text("".join(f"user {n}\ta {n}\n" for n in range(20) for _ in range(260)))
        with pytest.warns(mirrordp.data.UnprotectedWarning):
            made = data.prepare(path, overflow=True, validation_fraction=0.5)
        authors = {name.removeprefix("overflow of ") for name in made.public.ids}
        assert authors == set(made.private.ids)
        assert made.facts["validation_users"] == len(authors) == 9

    def test_rows(self):
        vocabulary = {"cat": 4, "sat": 5}
        short, long = data.encode(["Cat sat flew", "cat " * 30], vocabulary)
        begin = [data.BEGIN, 4, 5, data.UNKNOWN, data.END]
        assert short.tolist() == begin + [data.PAD] * 16
        assert long.tolist() == [data.BEGIN] + [4] * 20
        assert data.encode(["", " "], vocabulary).shape == (0, 21)

    def test_published_sentences_are_split_at_spaces(self, users, tsv, tmp_path):
        """As in TensorFlow Federated's pipeline: tokens with marks inside stay whole."""
        import h5py

        with h5py.File(tmp_path / "train.h5", "w") as file:
            for user in users:
                file.create_dataset(f"examples/{user}/tokens", data=[b"asp.net and c# , 3.5"])
        made = data.prepare(tmp_path / "train.h5", num_public_users=5)
        assert not made.facts["stand_in"]
        assert made.facts["vocabulary_words"] == 5
        # Begin, five tokens, end.
        assert ((made.private.arrays != data.PAD).sum(axis=1) == 7).all()
        assert data.words("asp.net") == ["asp", ".", "net"]
        with pytest.raises(ValueError, match=r"got both: train\.h5, users\.tsv"):
            data.prepare(tmp_path / "train.h5", test_data=tsv)

    def test_the_most_frequent_words(self):
        made = data.make_vocabulary([("a", ["x x y", "z y x"]), ("b", ["w"])], size=3)
        assert made == {"x": 4, "y": 5, "w": 6}


class TestNetwork:
    def test_the_papers_parameter_count(self):
        shapes = jax.eval_shape(models.stackoverflow_lstm().init, jax.random.key(0))
        sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(shapes[name])) for name in shapes}
        assert sizes == {
            "embedding": 960_384,
            "cell": 2_055_560,
            "projection": 64_416,
            "out": 970_388,
        }
        assert sum(sizes.values()) == 4_050_748

    def test_the_recurrent_gradient_is_that_of_the_plain_lstm(self):
        """Over rows and over users with weights of their own."""
        keys = jax.random.split(jax.random.key(0), 3)
        init = models.stackoverflow_lstm(20, embedding=4, width=5).init
        nets = jax.jit(jax.vmap(init))(keys)
        inputs = jax.random.normal(jax.random.key(1), (3, 2, 7, 4))

        def gradients(lstm):
            def loss(cell, rows):
                return jnp.sum(jnp.sin(jax.vmap(lstm, (None, 0))(cell, rows)))

            return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1))))(nets["cell"], inputs)

        plain, fast = gradients(models._lstm), gradients(models._fast_lstm)
        for expected, got in zip(jax.tree.leaves(plain), jax.tree.leaves(fast), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)

    def test_padding_has_no_loss(self):
        net = models.stackoverflow_lstm(20, embedding=4, width=5)
        params = jax.jit(net.init)(jax.random.key(0))
        row = jnp.array([1, 7, 8, 2, 0, 0])
        full = jax.nn.log_softmax(jax.jit(net.predict)(params, row[:-1]))
        expected = -(full[0, 7] + full[1, 8] + full[2, 2]) / 5
        assert float(jax.jit(net.loss)(params, row)) == pytest.approx(float(expected), rel=1e-5)

    def test_metrics(self):
        """A network that always prefers token 5: right where a word is 5, never on special ones."""
        logits = jnp.zeros(10).at[5].set(2.0).at[2].set(1.0)
        net = models.Network(None, lambda params, row: jnp.tile(logits, (len(row), 1)), None)
        rows = np.array([[1, 5, 6, 3, 2, 0], [1, 5, 5, 2, 0, 0]])
        found = command.evaluate(net, {}, rows)
        assert found["accuracy"] == pytest.approx(3 / 4)
        losses = np.asarray(-jax.nn.log_softmax(logits))
        all_targets = [5, 6, 3, 2, 5, 5, 2]
        assert found["perplexity"] == pytest.approx(np.exp(losses[all_targets].mean()), rel=1e-5)
        words = [5, 6, 5, 5]
        assert found["word_perplexity"] == pytest.approx(np.exp(losses[words].mean()), rel=1e-5)


class FakeLog(command.Log):
    """A log whose runs have the loss that a function says."""

    def __init__(self, loss):
        self.loss, self.asked = loss, []

    def validation_loss(self, job):
        if job not in self.asked:
            self.asked.append(job)
        return self.loss(job)


def far_from(server_rate, client_rate=0.2):
    """A loss whose best rates are given, and whose best clip norm is 0.3."""

    def loss(job):
        distances = (job.server_rate / server_rate, job.client_rate / client_rate)
        return sum(abs(np.log(distance)) for distance in distances) + job.clip

    return loss


class TestSearchOfRates:
    def search(self, loss, **grid):
        log = FakeLog(loss)
        return command.search_rates(log, command.Grid(**grid), 4, 1.0), log.asked

    def test_the_default_grid_begins_low(self):
        assert {0.1, 0.3} <= set(command.SERVER_RATES)

    def test_the_best_inside_the_grid_ends_the_search(self):
        best, asked = self.search(far_from(0.3))
        assert (best.server_rate, best.client_rate, best.clip) == (0.3, 0.2, 0.3)
        assert asked == list(command.jobs_of_rates(command.Grid(), 4, 1.0))

    @pytest.mark.parametrize(("wanted", "last"), [(0.01, 0.003), (30.0, 100.0)])
    def test_a_best_server_rate_at_an_end_extends_the_grid(self, wanted, last):
        best, asked = self.search(far_from(wanted))
        assert best.server_rate == wanted
        extended = asked[2 * 3 * 5 :]
        assert {job.clip for job in extended} == {0.3}
        server_rates = [job.server_rate for job in extended if job.client_rate == 0.2]
        assert server_rates[-1] == last
        assert sorted(server_rates, reverse=wanted < 1) == server_rates
        # The client rate may have another best at another server rate: its neighbours are tried.
        assert {0.1, 0.5} <= {job.client_rate for job in extended if job.server_rate == wanted}

    def test_client_rates_likewise_and_both_together(self):
        best, asked = self.search(far_from(0.03, 1.0), server_rates=(0.1, 0.3))
        assert (best.server_rate, best.client_rate) == (0.03, 1.0)
        tried = {(job.server_rate, job.client_rate) for job in asked if job.clip == 0.3}
        assert {(0.01, 1.0), (0.1, 1.0), (0.03, 0.5), (0.03, 3.0)} <= tried

    def test_single_values_are_taken_as_given(self):
        best, asked = self.search(far_from(0.3), server_rates=(1.0,), client_rates=(0.5,))
        assert (best.server_rate, best.client_rate) == (1.0, 0.5)
        assert len(asked) == 2

    def test_runs_that_diverge_lead_down_and_the_search_ends(self, capsys):
        best, _ = self.search(lambda job: np.inf if job.server_rate > 0.02 else -job.server_rate)
        assert best.server_rate == 0.01
        best, asked = self.search(lambda job: job.server_rate)
        assert best.server_rate < 1e-5
        assert len(asked) <= 30 + 4 * command.MAX_EXTENSIONS
        assert "keep moving" in capsys.readouterr().err


class TestCommand:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(command, "USERS_PER_ROUND", 6)
        monkeypatch.setattr(command, "ROUNDS_PER_CALL", 2)
        # A PLD of much less noise takes seconds.
        monkeypatch.setattr(command, "calibrated", lambda task: 4.0)
        ticks = itertools.count()
        monkeypatch.setattr(command, "clock", lambda: next(ticks))

    def arguments(self, tsv, out, *more):
        return [
            "--data", str(tsv), "--out", str(out), "--words", "10", "--width", "4",
            "--public-users", "4", "--rounds", "4", "--tuning-rounds", "4", "--seeds", "1",
            "--server-rates", "1", "--client-rates", "0.5", "--clips", "0.3", "--divisors", "3",
            "--users-per-pass", "3", *more,
        ]  # fmt: skip

    def test_stops_goes_on_and_ends_with_the_same_numbers(self, tsv, tmp_path, capsys):
        """On a clock that ticks whenever it is read, an uninterrupted run agrees with a cut one."""
        assert command.main(self.arguments(tsv, tmp_path / "whole")) == 0
        codes = []
        while not codes or codes[-1] == 75:
            # Enough for one run, and too little for the one after it.
            codes.append(command.main(self.arguments(tsv, tmp_path / "cut", "--max-seconds", "7")))
            assert len(codes) < 9
        whole, cut = (
            {json.dumps(r["job"]): r for r in command.records.read(tmp_path / name / "runs.jsonl")}
            for name in ("whole", "cut")
        )
        assert len(codes) > 2
        assert "goes on after round 2" in capsys.readouterr().err
        assert whole.keys() == cut.keys()
        assert len(whole) == 1 + 1 + 3
        for job, record in whole.items():
            assert record["metrics"] == pytest.approx(cut[job]["metrics"], rel=1e-5)
            assert record["unit"] == "user"
            assert record["epsilon"] <= command.EPSILON
        table = (tmp_path / "cut" / "table.md").read_text()
        assert "STAND-IN" in table
        assert "PDA-DPMD warm | 1 |" in table
        assert "not charged" in table
        # Nothing is computed twice.
        before = (tmp_path / "whole" / "runs.jsonl").read_text()
        assert command.main(self.arguments(tsv, tmp_path / "whole")) == 0
        assert (tmp_path / "whole" / "runs.jsonl").read_text() == before

    def test_lines_of_another_machine_are_used(self, tsv, tmp_path, monkeypatch):
        """Calibration differs in the last digits from machine to machine; the runs are the same."""
        prepared = data.prepare(tsv, num_public_users=5)
        task = command.Task(prepared, None, {}, None, 4, None, np.inf, tmp_path)
        job = command.Job("rates", "warm", 0, 4, 1.0, 0.5, 0.3, noise_multiplier=0.7397203861501742)
        record = {"key": task.key, "job": dataclasses.asdict(job), "metrics": "known"}
        command.records.append(tmp_path / "runs.jsonl", record)
        log = command.Log(tmp_path / "runs.jsonl", task)
        here = dataclasses.replace(job, noise_multiplier=0.7397203864650386)
        assert log.record(here) == record

        def run(task, job):
            raise RuntimeError("a run begins")

        monkeypatch.setattr(command, "run", run)
        for other in ({"noise_multiplier": 0.7398}, {"rounds": 3}, {"server_rate": 0.3}):
            with pytest.raises(RuntimeError, match="a run begins"):
                log.record(dataclasses.replace(job, **other))

    def test_settings_are_searched_over_half_of_the_rounds(self, tsv, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(command, "staged", lambda *options: asked.append(options[3:5]))
        for more in ([], ["--tuning-rounds", "7"]):
            arguments = ["--data", str(tsv), "--out", str(tmp_path), "--rounds", "240", *more]
            assert command.main([*arguments, "--public-users", "4"]) == 0
        assert asked == [(240, 120), (240, 7)]

    def test_the_check_with_the_papers_noise(self, tsv, tmp_path, monkeypatch):
        assert command.PAPER_NOISE == 0.4
        # With as little noise as that the accounting takes a minute.
        monkeypatch.setattr(command, "PAPER_NOISE", 4.0)
        assert command.main(self.arguments(tsv, tmp_path, "--stages", "check")) == 0
        (record,) = command.records.read(tmp_path / "runs.jsonl")
        assert record["job"]["noise_multiplier"] == 4.0
        assert record["job"]["stage"] == "check"
        assert np.isfinite(record["metrics"]["perplexity"])
        text = (tmp_path / "table.md").read_text()
        assert text.startswith("No final run yet.")
        assert "Mechanics only, not a result: 4 rounds" in text
        assert f"ε = {upwards(record['epsilon'])} here" in text

    def test_fixed_size_cohorts_have_their_own_accounting(self, tsv):
        prepared = data.prepare(tsv, num_public_users=5)
        poisson = command.Task(prepared, None, {}, None, 4, None, 0.0, None)
        fixed = dataclasses.replace(poisson, fixed_size=True)
        made = command.mechanism(fixed, 4.0)
        assert made.sampling.batch_size == 6
        assert made.adjacency is mirrordp.Adjacency.REPLACE
        assert made.epsilon(1e-6) > command.mechanism(poisson, 4.0).epsilon(1e-6)
        assert fixed.key != poisson.key

    def test_selection_never_sees_the_test_users(self):
        class Fake(command.Log):
            def __init__(self):
                pass

            def record(self, job):
                return {
                    "validation": {"perplexity": abs(job.client_rate - 0.1) + (job.divisor or 0)},
                    "metrics": {"perplexity": -job.client_rate},
                }

        grid = command.Grid(client_rates=(0.5, 0.1, 0.2))
        best = min(command.jobs_of_rates(grid, 2, 1.0), key=Fake().validation_loss)
        assert best.client_rate == 0.1

    def test_table_and_figure_from_lines_alone(self, tmp_path, capsys):
        """Three methods, two seeds, a search and a check.

        Lines of other data, of an earlier choice of settings and of a shorter search are left out.
        """

        def line(stage, method, seed=0, *, perplexity=100.0, accuracy=0.2, key="new", **job):
            values = {"accuracy": accuracy, "perplexity": perplexity, "word_perplexity": perplexity}
            settings = command.Job(
                stage, method, seed, 20, 1.0, 0.5, 0.3, noise_multiplier=job.pop("noise", 0.7)
            )
            return {
                "experiment": "stackoverflow",
                "key": key,
                "job": dataclasses.asdict(dataclasses.replace(settings, **job)),
                "facts": FACTS,
                "metrics": values,
                "validation": values,
                "curve": [{"round": number, "seconds": 1.0} | values for number in (0, 10, 20)],
                "epsilon": 123.4 if stage == "check" else 8.29,
                "delta": 1e-6,
                "adjacency": "zero-out",
                "unit": "user",
                "sampling": "Poisson, q = 0.035",
                "accountant": "pld",
            }

        lines = [
            line("final", "pda", perplexity=1.0, accuracy=0.99, key="old"),
            line("final", "warm", 1, perplexity=2.0, accuracy=0.99, server_rate=3.0),
            line("final", "pda", 1, perplexity=2.0, accuracy=0.99, divisor=8),
            line("rates", "warm", perplexity=2.0, server_rate=3.0, rounds=5),
            line("rates", "warm", perplexity=90.0),
            line("rates", "warm", perplexity=1.2e139, client_rate=0.2),
            line("rates", "warm", perplexity=None, clip=1.0),
            line("alpha", "pda", divisor=8, perplexity=2.0, server_rate=3.0),
            line("alpha", "pda", divisor=3, perplexity=80.0, noise=0.7 * (1 + 1e-9)),
            line("check", "pda", divisor=5, noise=0.4),
        ]
        for seed in (1, 2):
            lines += [
                line("final", "cold", seed, perplexity=200.0 + seed, accuracy=0.10),
                line("final", "warm", seed, perplexity=110.0 + seed, accuracy=0.20),
                line("final", "pda", seed, perplexity=100.0 + seed, accuracy=0.21, divisor=3),
            ]
        for made in lines:
            command.records.append(tmp_path / "runs.jsonl", made)
        readme = tmp_path / "README.md"
        begin, end = "<!-- stackoverflow: begin -->", "<!-- stackoverflow: end -->"
        readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
        out = str(tmp_path)
        assert command.main(["--out", out, "--plot-only", "--readme", str(readme)]) == 0
        text = (tmp_path / "table.md").read_text()
        assert text in capsys.readouterr().out
        assert "STAND-IN" in text
        assert "ε = 8.29 at δ = 1e-06 per user" in text
        assert "| DP-FedAvg cold | 2 | 10.00 ± 0.00 | 201.50 ± 0.71 |" in text
        assert "| PDA-DPMD warm | 2 | 21.00 ± 0.00 | 101.50 ± 0.71 |" in text
        assert "accuracy 1.00 ± 0.00 points, perplexity -10.00 ± 0.00" in text
        assert "| 1, 0.5, 0.3 | 90.0 |\n| 1, 0.2, 0.3 | > 1e6 |\n| 1, 0.5, 1 | diverged |" in text
        assert "| 3 | 80.0 |" in text
        assert "with i = 3." in text
        assert "| 8 |" not in text
        assert "| 3, 0.5, 0.3 |" not in text
        assert "Mechanics only, not a result: 20 rounds" in text
        assert "ε = 123.4" in text
        assert readme.read_text() == f"before\n{begin}\n{text}{end}\nafter\n"
        figure = (tmp_path / "figure.svg").read_text()
        assert "STAND-IN" in figure
        assert "ε = 8.29" in figure

    def test_plotting_without_lines(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            command.main(["--out", str(tmp_path), "--plot-only"])
        assert "expected finished runs" in capsys.readouterr().err

    def test_what_has_a_hundred_digits(self):
        assert report._mean([1.2e139, 100.0]) == "> 1e6"
        assert report._mean([-1.2e139]) == "< -1e6"
        assert report._mean([100.0, 102.0]) == "101.00 ± 1.41"

    def test_a_table_without_runs(self):
        assert report.table([]) == "No final run yet.\n"
