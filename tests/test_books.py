"""Users and sweeps: charged before anything can be seen, kept like any run, or refused."""

import itertools
import shutil

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrordp
from mirrordp import (
    Adjacency,
    Budget,
    Checkpoint,
    FileLedger,
    Ledger,
    PrivateData,
    SecureGaussianNoise,
)
from mirrordp.privacy import CyclicPoissonSampling
from mirrordp.spending.budget import BudgetError
from mirrordp.training import AdaptiveClip, engine, federated
from mirrordp.training.bookkeeping import Books, SharedBooks
from mirrordp.training.checkpoint import CheckpointError, checkpoint_files, is_unfinished
from mirrordp.training.sweep import SweepRun
from tests import test_federated, tools
from tests.test_checkpoint import contents
from tests.test_federated import PUBLIC, clients
from tests.test_training import bits
from tests.tools import last

USERS = clients()
NOISY = test_federated.mechanism(noise_multiplier=4.0)
SERVER = optax.adam(0.1)
SCHEDULE = [0.5, 0.0, 1.0, 0.5, 0.9, 0.2]
"""Five of the six rounds read private data, one of them in the first block of two."""


def rounds(private=USERS, **options):
    """Six rounds of PDA-DPMD, two between yields, with everything that a state can hold."""
    defaults = {
        "public": PUBLIC,
        "mechanism": NOISY,
        "optimizer": SERVER,
        "alpha": SCHEDULE,
        "average": mirrordp.UniformAverage(),
        "steps_per_call": 2,
    }
    return test_federated.run(private, **(defaults | options))


def interrupted(iterator, yields):
    for _ in range(yields):
        next(iterator)
    iterator.close()


def recorded(order, name, function):
    def called(*args, **options):
        order.append(name)
        return function(*args, **options)

    return called


def distinct(order):
    return [name for name, _ in itertools.groupby(order)]


@pytest.fixture
def budget(tmp_path):
    options = {"epsilon": 3.0, "delta": 1e-6, "data": USERS, "unit": "user"}
    with Budget.create(tmp_path / "budget", **options) as budget:
        yield budget


def fail(*_):
    raise AssertionError("a private row was read")


class TestUsersOnABudget:
    def test_a_block_is_charged_before_it_runs(self, budget, monkeypatch):
        seen = []

        def look(*_, **__):
            seen.append(FileLedger.read(budget.ledger.path).event)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "_run_passes", look)
        with pytest.raises(KeyboardInterrupt):
            next(rounds(alpha=1.0, spend=budget))
        assert seen == [NOISY.event_between(0, 2)]

    def test_runs_compose_until_one_is_refused_before_any_row_is_used(self, budget, monkeypatch):
        last(rounds(spend=budget))
        assert budget.ledger.event == NOISY.event_between(0, 5)
        assert (budget.status.runs, budget.status.charges) == (1, 3)
        monkeypatch.setattr(federated, "excluded_users", fail)
        monkeypatch.setattr("mirrordp.spending.fingerprint.of_arrays", fail)
        with pytest.raises(BudgetError, match="within the budget"):
            rounds(mechanism=test_federated.mechanism(noise_multiplier=0.3), spend=budget)
        assert budget.status.runs == 1

    def test_other_users_and_other_kinds_are_refused(self, budget):
        folder = budget.folder
        budget.close()
        lists = [*test_federated.LISTS]
        lists[3] = lists[3] + 1
        with Budget.open(folder) as opened:
            with pytest.raises(BudgetError, match="no fresh budget"):
                rounds(clients(lists), spend=opened)
            # The same rows, dealt to the users in another way.
            moved = [*test_federated.LISTS]
            moved[0], moved[1] = moved[0][:2], np.concatenate([moved[0][2:], moved[1]])
            with pytest.raises(BudgetError, match="no fresh budget"):
                rounds(clients(moved), spend=opened)
            with pytest.raises(BudgetError, match="One budget has one of each"):
                tools.train(
                    tools.squared_distance, jnp.zeros(3), PrivateData(tools.features()),
                    mechanism=tools.mechanism(), optimizer=tools.sgd(0.1), spend=opened,
                )  # fmt: skip
            assert opened.status.charges == 0
            last(rounds(spend=opened))
        with pytest.raises(BudgetError, match="expected the users that the budget"):
            Budget.open(folder, data=PrivateData(tools.features()))

    def test_going_on_from_a_state_pays_for_the_rest(self, budget):
        half, _ = next(rounds())
        last(rounds(state=half, spend=budget))
        assert budget.ledger.event == NOISY.event_between(1, 5)

    @pytest.mark.parametrize(("done", "rounds_left"), [(1, 2), (3, 1), (4, 1)])
    def test_going_on_pays_for_a_round_that_began_before(self, tmp_path, done, rounds_left):
        """Who paid for the steps before it is not known here: it may be another ledger."""
        sampling = CyclicPoissonSampling(
            sampling_prob=0.5, num_groups=3, expected_batch_size=5, num_examples=30
        )
        cyclic = tools.mechanism(sampling=sampling, num_steps=6)
        rows, other = (PrivateData(np.full((30, 3), x, np.float32)) for x in (1.0, 0.0))
        step = mirrordp.TrainStep(tools.squared_distance, cyclic, tools.sgd(0.1))
        options = mirrordp.TrainOptions(steps_per_call=1)
        start, seed = np.zeros(3, np.float32), {"seed": 1, "options": options}
        begun = mirrordp.train(step, start, other, **seed)
        state, _ = next(itertools.islice(begun, done - 1, None))
        expected = cyclic.event_between(0, 3 * rounds_left)
        folder, limits = tmp_path / "budget", {"epsilon": 50.0, "delta": 1e-6}
        with Budget.create(folder, data=rows, **limits) as budget:
            last(mirrordp.train(step, start, rows, state=state, spend=budget, **seed))
            assert budget.ledger.event == expected
        small = {"epsilon": 0.1, "delta": 1e-6}
        with (
            Budget.create(tmp_path / "small", data=rows, **small) as budget,
            pytest.raises(BudgetError, match="within the budget"),
        ):
            mirrordp.train(step, start, rows, state=state, spend=budget, **seed)

    def test_two_runs_from_one_state_share_their_noise(self, budget):
        half, _ = next(rounds())
        last(rounds(state=half, spend=budget))
        other = half._replace(client_learning_rate=2 * half.client_learning_rate)
        with pytest.raises(BudgetError, match="got seed 3 again"):
            last(rounds(state=other, spend=budget))
        with pytest.raises(BudgetError, match="got seed 3 again"):
            last(rounds(spend=budget))
        assert budget.status.runs == 1


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run that was left after one yield, begun in two attempts."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    interrupted(rounds(checkpoint=Checkpoint(folder)), 0)
    interrupted(rounds(checkpoint=Checkpoint(folder, resume=True)), 1)
    return folder


class TestUsersWithACheckpoint:
    @pytest.mark.parametrize("yields", [0, 1, 3])
    def test_resumed_to_the_bit(self, tmp_path, yields):
        options = {"adaptive_clip": AdaptiveClip(), "show_unprivatized": True}
        whole, info = last(rounds(**options))
        folder = tmp_path / "run"
        interrupted(rounds(**options, checkpoint=Checkpoint(folder)), yields)
        resumed = list(rounds(**options, checkpoint=Checkpoint(folder, resume=True)))
        assert [found.step for _, found in resumed] == [2, 4, 6][max(0, yields - 1) :]
        state, found = resumed[-1]
        assert bits(state) == bits(whole)
        assert found.charged_steps == 5
        for name in ("alpha", "noisy_grad_norm", "public_loss", "clip_norm"):
            np.testing.assert_array_equal(getattr(found, name), getattr(info, name))
        assert bits(found.unprivatized) == bits(info.unprivatized)
        assert FileLedger.read(folder / "ledger.jsonl").event == NOISY.event_between(0, 5)
        assert not checkpoint_files(folder)

    def test_the_order_is_randomness_charge_result_checkpoint_yield(self, tmp_path, monkeypatch):
        order = []
        for name, owner, attribute in (
            ("save", Books, "_save"),
            ("charge", FileLedger, "charge"),
            ("run", engine, "_run_passes"),
        ):
            function = recorded(order, name, getattr(owner, attribute))
            monkeypatch.setattr(owner, attribute, function)
        for _ in rounds(checkpoint=Checkpoint(tmp_path / "run")):
            order.append("yield")
        # A block of users takes several compiled calls.
        assert distinct(order) == ["save", *["charge", "run", "save", "yield"] * 3]

    def test_charged_once_on_a_budget(self, tmp_path, budget, monkeypatch):
        steps = rounds(spend=budget, checkpoint=Checkpoint(tmp_path / "run"))
        next(steps)

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(Books, "_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        monkeypatch.undo()
        assert budget.ledger.event == NOISY.event_between(0, 3)
        state, _ = last(rounds(spend=budget, checkpoint=Checkpoint(tmp_path / "run", resume=True)))
        assert bits(state) == bits(last(rounds())[0])
        assert budget.ledger.event == NOISY.event_between(0, 5)
        assert budget.status.runs == 1

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"client_learning_rate": 0.2}, r"client_learning_rate \(0.3 then, 0.2 now\)"),
            ({"users_per_pass": 5}, "users_per_pass"),
            ({"alpha": 0.5}, "alpha"),
            ({"mechanism": test_federated.mechanism(noise_multiplier=5.0)}, "mechanism"),
            ({"private": clients([*test_federated.LISTS[:-1], np.ones((1, 3), "f4")])},
             "private data"),
            ({"public": clients([tools.features(2)], mirrordp.PublicClients)}, "public data"),
            ({"loss": lambda p, x: 2 * tools.squared_distance(p, x)}, "loss_fn"),
            ({"seed": 4}, "seed"),
            # Other shapes are another program, which need not round alike.
            ({"private": clients(max_examples_per_user=test_federated.BOUND + 1)},
             "form of the private data"),
            ({"stream": False}, "stream"),
        ],
    )  # fmt: skip
    def test_another_run(self, begun, tmp_path, options, named):
        folder = shutil.copytree(begun, tmp_path / "run")
        with pytest.raises(CheckpointError, match=f"differs in: .*{named}"):
            rounds(**options, checkpoint=Checkpoint(folder, resume=True))
        # Nothing was lost by trying, and the folder is not left locked.
        assert contents(folder) == contents(begun)
        assert is_unfinished(folder)

    def test_refused(self, tmp_path):
        state, _ = next(rounds())
        with pytest.raises(ValueError, match="a state or a checkpoint, got both"):
            rounds(state=state, checkpoint=Checkpoint(tmp_path / "run"))
        secure = test_federated.mechanism(
            noise_multiplier=4.0, noise=SecureGaussianNoise(num_params=3)
        )
        with pytest.raises(ValueError, match="secure noise cannot be repeated"):
            rounds(mechanism=secure, seed=None, checkpoint=Checkpoint(tmp_path / "run"))
        with pytest.raises(ValueError, match="survives a crash"):
            rounds(spend=Ledger(Adjacency.ZERO_OUT), checkpoint=Checkpoint(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


ROWS = PrivateData(tools.features())
RATED = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


def sweep(runs, **options):
    defaults = {"mechanism": tools.mechanism(), "optimizer": RATED, "steps_per_call": 5}
    public = mirrordp.PublicData(tools.features(rows=10, seed=1))
    return tools.train_sweep(
        tools.squared_distance, jnp.zeros(3), ROWS, public, runs=runs, **(defaults | options)
    )


def test_the_log_says_what_was_charged_kept_and_resumed(tmp_path, caplog):
    with caplog.at_level("DEBUG", logger="mirrordp"):
        interrupted(rounds(checkpoint=Checkpoint(tmp_path / "run")), 1)
        last(rounds(checkpoint=Checkpoint(tmp_path / "run", resume=True)))
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert lines == [
        "checkpoint after step 0",
        "charged private steps 1 to 1",
        "checkpoint after step 2",
        "resumed after step 2",
        "charged private steps 2 to 3",
        "checkpoint after step 4",
        "charged private steps 4 to 5",
        "checkpoint after step 6",
    ]
    assert {record.name for record in caplog.records} == {"mirrordp"}


class TestSweeps:
    """Every run of a sweep is a release, and all of them are charged."""

    @pytest.fixture
    def budget(self, tmp_path):
        with Budget.create(tmp_path / "budget", epsilon=3, delta=1e-6, data=ROWS) as budget:
            yield budget

    def test_every_run_is_charged_before_a_block_of_any_runs(self, budget, monkeypatch):
        seen = []

        def look(*_):
            records = FileLedger.read(budget.ledger.path).records
            seen.append([record for record in records if record["kind"] == "charge"])
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "_run_passes", look)
        runs = [
            SweepRun(seed=1),
            SweepRun(seed=2, alpha=[0.0] * 5 + [0.5] * 7),
            SweepRun(seed=3, alpha=0.5),
        ]
        with pytest.raises(KeyboardInterrupt):
            next(sweep(runs, spend=budget))
        # The second run reads nothing in the first block.
        assert [(record["start"], record["stop"]) for record in seen[0]] == [(0, 5), (0, 5)]
        assert len({record["run"] for record in seen[0]}) == 2

    def test_all_runs_are_charged_to_the_end(self, budget):
        last(sweep([SweepRun(seed=1), SweepRun(seed=2, alpha=[0.0] * 5 + [0.5] * 7)], spend=budget))
        one = tools.mechanism()
        assert budget.ledger.event == dp_accounting.SelfComposedDpEvent(one.event.event, 12 + 7)
        assert budget.status.runs == 2

    def test_admitted_together_or_not_at_all(self, budget, monkeypatch):
        mechanism = tools.mechanism(noise_multiplier=2.5)
        fitting = 0
        while budget._fits(budget._divergences(mechanism.event) * (fitting + 1), margin=1e-9):
            fitting += 1
        assert fitting > 1
        monkeypatch.setattr("mirrordp.training.central.excluded_rows", fail)
        monkeypatch.setattr("mirrordp.spending.fingerprint.of_arrays", fail)
        with pytest.raises(BudgetError, match="within the budget"):
            sweep([SweepRun(seed=seed) for seed in range(fitting + 1)], mechanism=mechanism,
                  spend=budget)  # fmt: skip
        assert budget.status.charges == 0
        monkeypatch.undo()
        last(sweep([SweepRun(seed=s) for s in range(fitting)], mechanism=mechanism, spend=budget))
        assert budget.status.runs == fitting
        with pytest.raises(BudgetError, match="within the budget"):
            sweep([SweepRun()], mechanism=mechanism, spend=budget)

    def test_refused(self, budget):
        with pytest.raises(BudgetError, match="One budget has one of each"):
            sweep([SweepRun()], spend=budget, mechanism=tools.mechanism(unit="user"))
        with pytest.raises(ValueError, match="do not share their noise, got seed 3 twice"):
            sweep([SweepRun(seed=3), SweepRun(seed=4), SweepRun(seed=3)], spend=budget)
        assert budget.status.charges == 0


TWO = [SweepRun(seed=1), SweepRun(seed=2, alpha=[0.0] * 5 + [0.5] * 7)]
"""The second run reads nothing in the first block of five."""
SHORT = tools.mechanism(num_steps=2)


def steps_of_the_books(monkeypatch, number):
    """Makes step `number` of the bookkeeping of a sweep fail, as if the process had been killed.

    Returns:
        What was done, in order.
    """
    done = []

    def dying(name, right):
        def called(*args, **options):
            if len(done) == number:
                raise KeyboardInterrupt
            done.append(name)
            return right(*args, **options)

        return called

    for name, owner, attribute in (
        ("save", Books, "_save"),
        ("claim", Budget, "claim_seed"),
        ("charge", Budget, "charge"),
        ("run", engine, "_run_passes"),
        ("finish", Books, "finish"),
    ):
        monkeypatch.setattr(owner, attribute, dying(name, getattr(owner, attribute)))
    return done


class TestSweepsWithACheckpoint:
    @pytest.fixture
    def nothing_compared(self):
        """Runs that are the same need not be compared, which takes most of the time."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_configuration", lambda *_: {})
            patch.setattr("mirrordp.training.checkpoint._noise_program", lambda: "")
            yield

    @pytest.fixture
    def budget(self, tmp_path):
        with Budget.create(tmp_path / "budget", epsilon=3, delta=1e-6, data=ROWS) as budget:
            yield budget

    @pytest.mark.parametrize("yields", [0, 1, 3])
    def test_resumed_to_the_bit(self, tmp_path, yields):
        whole = list(sweep(TWO, show_unprivatized=True))
        folder = tmp_path / "run"
        options = {"runs": TWO, "show_unprivatized": True}
        interrupted(sweep(**options, checkpoint=Checkpoint(folder)), yields)
        resumed = list(sweep(**options, checkpoint=Checkpoint(folder, resume=True)))
        assert len(resumed) == 3 - max(0, yields - 1)
        for (state, infos), (expected, shown) in zip(resumed[::-1], whole[::-1], strict=False):
            assert bits(state) == bits(expected)
            for info, other in zip(infos, shown, strict=True):
                assert (info.step, info.charged_steps) == (other.step, other.charged_steps)
                assert bits((info.alpha, info.noisy_grad_norm, info.unprivatized)) == bits(
                    (other.alpha, other.noisy_grad_norm, other.unprivatized)
                )
        ledger = FileLedger.read(folder / "ledger.jsonl")
        one = tools.mechanism().event.event
        assert ledger.event == dp_accounting.SelfComposedDpEvent(one, 12 + 7)
        names = {record["run"] for record in ledger.records if "run" in record}
        (name,) = {run.rpartition("-")[0] for run in names}
        assert names == {f"{name}-0", f"{name}-1"}
        assert not checkpoint_files(folder)

    def test_randomness_of_the_system_is_kept_for_every_run(self, tmp_path):
        runs = [SweepRun(), SweepRun()]
        steps = sweep(runs, checkpoint=Checkpoint(tmp_path / "run"))
        before, _ = next(steps)
        steps.close()
        resumed = sweep(runs, checkpoint=Checkpoint(tmp_path / "run", resume=True))
        (again, infos), (after, _) = next(resumed), next(resumed)
        assert bits(again) == bits(before)
        assert [info.seeded for info in infos] == [False, False]
        keys = np.asarray(jax.random.key_data(after.noise_state[0])).reshape(2, -1)
        assert not np.array_equal(keys[0], keys[1])

    def test_a_crash_between_any_two_steps(self, tmp_path, monkeypatch, nothing_compared):
        """Whatever was done last: the same result, every seed noted and every step charged once."""
        runs = [SweepRun(seed=1), SweepRun(seed=2, alpha=0.5)]
        options = {"runs": runs, "mechanism": SHORT, "steps_per_call": 1}
        whole, _ = last(sweep(**options))
        block = ["charge", "charge", "run", "save"]
        everything = ["save", "claim", "claim", *block, *block, "finish"]
        for number in range(len(everything) + 1):
            folder = tmp_path / str(number)
            with Budget.create(folder / "b", epsilon=3, delta=1e-6, data=ROWS) as budget:
                options |= {"spend": budget}
                done = steps_of_the_books(monkeypatch, number)
                try:
                    list(sweep(**options, checkpoint=Checkpoint(folder / "run")))
                except KeyboardInterrupt:
                    assert number < len(everything)
                monkeypatch.undo()
                assert done == everything[:number]
                if number < len(everything):
                    resumed = sweep(**options, checkpoint=Checkpoint(folder / "run", resume=True))
                    assert bits(last(resumed)[0]) == bits(whole), done
                kinds = [record["kind"] for record in budget.ledger.records]
                assert kinds.count("seed") == 2
                assert budget.ledger.event == dp_accounting.SelfComposedDpEvent(
                    SHORT.event.event, 4
                )
                assert budget.status.runs == 2
            assert not checkpoint_files(folder / "run")

    def test_a_seed_that_another_run_took_before_it_was_noted(self, budget, tmp_path, monkeypatch):
        options = {"mechanism": SHORT, "spend": budget}
        steps_of_the_books(monkeypatch, 2)  # one of the two seeds is noted
        with pytest.raises(KeyboardInterrupt):
            next(sweep([TWO[0], SweepRun(seed=5)], **options,
                       checkpoint=Checkpoint(tmp_path / "run")))  # fmt: skip
        monkeypatch.undo()
        with pytest.raises(BudgetError, match="got seed 1 again"):
            sweep([SweepRun(seed=1)], **options)
        last(sweep([SweepRun(seed=5)], **options))
        spent = budget.status
        with pytest.raises(BudgetError, match="got seed 5 again"):
            sweep([TWO[0], SweepRun(seed=5)], **options,
                  checkpoint=Checkpoint(tmp_path / "run", resume=True))  # fmt: skip
        assert budget.status == spent

    def test_what_was_charged_needs_no_room_and_the_rest_does(self, budget, tmp_path):
        """One sweep was charged in full before the budget was used up, another one in part."""
        full, part = Checkpoint(tmp_path / "full", keep=True), Checkpoint(tmp_path / "part")
        runs = [SweepRun(seed=3), SweepRun(seed=4)]
        last(sweep(TWO, spend=budget, checkpoint=full))
        interrupted(sweep(runs, spend=budget, checkpoint=part), 1)
        budget.charge(dp_accounting.GaussianDpEvent(1.01 * budget.least_noise))
        spent = budget.status
        again = Checkpoint(full.folder, keep=True, resume=True)
        assert len(list(sweep(TWO, spend=budget, checkpoint=again))) == 1
        with pytest.raises(BudgetError, match="within the budget"):
            sweep(runs, spend=budget, checkpoint=Checkpoint(part.folder, resume=True))
        assert budget.status == spent

    @pytest.mark.parametrize(
        ("runs", "named"),
        [
            (TWO[::-1], "seed"),
            (TWO[:1], "seed"),
            ([*TWO, SweepRun(seed=3)], "seed"),
            ([TWO[0], SweepRun(seed=2)], "alpha"),
            ([TWO[0]._replace(hyperparams={"learning_rate": 0.2}), TWO[1]], "starting parameters"),
        ],
    )
    def test_another_sweep(self, tmp_path, runs, named):
        folder = tmp_path / "run"
        interrupted(sweep(TWO, checkpoint=Checkpoint(folder)), 1)
        before = contents(folder)
        with pytest.raises(CheckpointError, match=f"differs in: .*{named}"):
            sweep(runs, checkpoint=Checkpoint(folder, resume=True))
        assert contents(folder) == before
        assert is_unfinished(folder)

    def test_fewer_steps_than_were_charged(self, budget, tmp_path):
        folder = tmp_path / "run"
        interrupted(sweep(TWO[:1], spend=budget, checkpoint=Checkpoint(folder)), 2)
        with pytest.raises(CheckpointError, match=r"differs in: .*alpha"):
            sweep(TWO[:1], num_steps=5, spend=budget, checkpoint=Checkpoint(folder, resume=True))


def test_processes_in_different_steps_are_refused_before_the_charge():
    class Group:
        is_first = True

        def to_first(self, value):
            return [value, [[0], [4]]]

    ledger = Ledger(tools.mechanism().adjacency)
    books = SharedBooks(Books(tools.mechanism(), ledger), Group(), None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match=r"same private steps, got \[\[\[0\], \[2\]\], \[\[0\]"):
        books.charge([0], [2])
    assert ledger.event == Ledger(tools.mechanism().adjacency).event
