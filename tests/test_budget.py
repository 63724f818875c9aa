"""Budgets that span runs: the filter, what is refused, what is bound to what, the command line."""

import copy
import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy import integrate, stats

import mirrordp
from mirrordp import Adjacency, Budget, Mechanism, PrivateData, cli
from mirrordp.linear import descent as linear
from mirrordp.linear.estimators import PrivateLinearRegression
from mirrordp.privacy import accounting
from mirrordp.spending import files as _files
from mirrordp.spending.budget import BudgetError, choose_orders, renyi_limit
from mirrordp.spending.files import LockedError, StorageError
from mirrordp.spending.ledger import Block, FileLedger, LedgerError
from mirrordp.training.sweep import SweepRun
from tests import tools
from tests.test_cli_fit import make_table
from tests.tools import last, mechanism, sgd

EPSILON, DELTA = 3.0, 1e-6
ROWS = PrivateData(tools.features())
GAUSSIAN = dp_accounting.GaussianDpEvent(4.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "budget"


@pytest.fixture
def budget(folder):
    with Budget.create(folder, epsilon=EPSILON, delta=DELTA, data=ROWS) as made:
        yield made


SEEDS = itertools.count()
"""Runs on one budget must not share their noise."""


def until_refused(action) -> int:
    """How often it can be done."""
    for count in itertools.count():
        try:
            action()
        except BudgetError:
            return count
    raise AssertionError


def train(budget, private=ROWS, **options):
    defaults = {
        "mechanism": mechanism(), "optimizer": sgd(0.1), "seed": next(SEEDS), "steps_per_call": 5
    }  # fmt: skip
    theta = np.zeros(tools.FEATURES, np.float32)
    return tools.train(tools.squared_distance, theta, private, spend=budget, **(defaults | options))


class TestFilter:
    @pytest.mark.parametrize("order", [5.0, 8.5, 30.0])
    def test_the_limit_is_the_inverse_of_the_known_conversion(self, order):
        limit = renyi_limit(EPSILON, DELTA, order)
        found, _ = dp_accounting.rdp.compute_epsilon([order], [limit], DELTA)
        assert found == pytest.approx(EPSILON, rel=1e-12)

    @pytest.mark.parametrize("epsilon", [0.05, 1.0, 3.0, 20.0])
    def test_orders_share_delta_and_are_useful(self, epsilon):
        orders = choose_orders(epsilon, DELTA)
        assert sum(orders.values()) <= DELTA * (1 + 1e-12)
        assert all(renyi_limit(epsilon, share, order) > 0 for order, share in orders.items())
        best, share = max(orders.items(), key=lambda pair: pair[1])
        value = renyi_limit(epsilon, share, best) / best
        for other in (0.9 * best, 1.1 * best):
            assert renyi_limit(epsilon, share, other) / other < value

    def test_admits_until_some_order_allows_no_more(self, budget):
        spent = until_refused(lambda: budget.charge(GAUSSIAN))
        # The same from the definition: α·spent/2σ² within the limit at some order.
        room = max(
            2 * 4.0**2 * renyi_limit(EPSILON, share, order) / order
            for order, share in choose_orders(EPSILON, DELTA).items()
        )
        assert spent == math.floor(room)
        whole = dp_accounting.SelfComposedDpEvent(GAUSSIAN, spent)
        exact = accounting.epsilon(whole, DELTA, adjacency=Adjacency.ZERO_OUT)
        assert 0.8 * EPSILON < exact.epsilon <= EPSILON
        assert budget.status.used <= 1

    @staticmethod
    def adaptive_delta(first: float, next_noise) -> float:
        """Exact δ(ε) of two Gaussians, the second with noise chosen after the first was seen.

        Given x, the privacy loss so far is (2x − 1)/2σ² under x ~ N(1, σ²), and what is left is the
        profile of one Gaussian at the remaining ε.
        """
        x = np.linspace(1 - 12 * first, 1 + 12 * first, 20_001)
        density = stats.norm.pdf(x, 1, first)
        left = EPSILON - (2 * x - 1) / (2 * first**2)
        mu = np.array([1 / next_noise(value) for value in x])
        with np.errstate(over="ignore"):
            delta = stats.norm.cdf(mu / 2 - left / mu) - np.exp(left) * stats.norm.cdf(
                -mu / 2 - left / mu
            )
        return float(integrate.trapezoid(density * delta, x))

    def test_adaptive_runs_stay_private_and_a_careless_filter_would_not(self, tmp_path):
        """The second run spends all that is left where the first already gave much away."""
        first = 2.0
        with Budget.create(tmp_path / "b", epsilon=EPSILON, delta=DELTA, data=ROWS) as budget:
            budget.charge(dp_accounting.GaussianDpEvent(first))
            strongest, meek = budget.least_noise, 50.0
        found = self.adaptive_delta(first, lambda x: strongest if x > 1 else meek)
        assert 0 < found <= DELTA
        # A filter that takes ε itself for the limit lets far too much through.
        order = max(choose_orders(EPSILON, DELTA))
        careless = math.sqrt(order / (2 * (EPSILON - order / (2 * first**2))))
        assert self.adaptive_delta(first, lambda x: careless if x > 1 else meek) > DELTA

    def test_the_least_noise_fits_and_a_little_less_does_not(self, budget):
        budget.charge(GAUSSIAN)
        noise = budget.least_noise
        budget.admit_event(dp_accounting.GaussianDpEvent(noise * (1 + 1e-6)))
        with pytest.raises(BudgetError):
            budget.admit_event(dp_accounting.GaussianDpEvent(noise * (1 - 1e-6)))

    def test_replace_counts_twice_the_distance(self, tmp_path):
        found = {}
        for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE):
            with Budget.create(
                tmp_path / adjacency.value, epsilon=1, delta=1e-6, data=ROWS, adjacency=adjacency
            ) as budget:
                found[adjacency] = budget.least_noise
        assert found[Adjacency.REPLACE] == pytest.approx(2 * found[Adjacency.ZERO_OUT])

    def test_what_has_no_renyi_analysis_is_refused(self, tmp_path):
        with Budget.create(
            tmp_path / "b", epsilon=1, delta=1e-6, data=ROWS, adjacency=Adjacency.REPLACE
        ) as budget:
            event = accounting.poisson_event(4.0, sampling_prob=0.1, num_steps=3)
            with pytest.raises(BudgetError, match="Renyi analysis"):
                budget.admit_event(event)

    @pytest.mark.parametrize("sigma", [1e8, 1e12, 1e300])
    @pytest.mark.parametrize("sampling_prob", [1.0, 0.01])
    def test_much_noise_is_charged_a_little_and_never_nothing(self, budget, sampling_prob, sigma):
        event = accounting.poisson_event(sigma, sampling_prob=sampling_prob, num_steps=10)
        budget.charge(event)
        assert 0 < budget.status.used < 1e-6
        assert budget.ledger.event == event
        with Budget.view(budget.folder) as again:
            assert again.status.used == budget.status.used

    @pytest.mark.parametrize("sigma", [math.inf, math.nan, -1.0])
    def test_noise_that_is_no_finite_number_is_charged_nowhere(self, budget, tmp_path, sigma):
        event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(sigma))
        with FileLedger.create(tmp_path / "ledger", Adjacency.ZERO_OUT) as ledger:
            for target in (budget, ledger, mirrordp.Ledger(Adjacency.ZERO_OUT)):
                with pytest.raises(ValueError, match=r"noise multipliers are finite .* got"):
                    target.charge(event)
            assert len(ledger.records) == 1
        assert budget.status.charges == 0
        budget.charge(GAUSSIAN)

    def test_no_noise_is_refused(self, budget):
        with pytest.raises(BudgetError):
            budget.charge(dp_accounting.GaussianDpEvent(0.0))
        assert budget.status.charges == 0


SAMPLINGS = {
    "poisson": lambda q: mirrordp.PoissonSampling(sampling_prob=q, expected_batch_size=400 * q),
    "cyclic": lambda q: mirrordp.privacy.CyclicPoissonSampling(
        sampling_prob=q, num_groups=3, expected_batch_size=400 * q / 3
    ),
    "full": lambda q: mirrordp.privacy.FullBatch(expected_batch_size=400),
}


class TestPlanning:
    """What is proposed is accepted, and is not far from the least that is."""

    @hypothesis.settings(max_examples=25, deadline=None)
    @hypothesis.given(
        epsilon=st.floats(0.1, 8.0),
        delta=st.sampled_from([1e-9, 1e-6, 1e-4]),
        kind=st.sampled_from(sorted(SAMPLINGS)),
        q=st.floats(0.001, 0.3),
        steps=st.integers(1, 2_000),
        before=st.just(0.0) | st.floats(0.01, 0.9),
        fraction=st.floats(0.05, 1.0),
        adjacency=st.sampled_from([Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE]),
        unit=st.sampled_from(["example", "user"]),
    )
    def test_what_is_proposed_is_accepted_and_two_percent_less_noise_is_not(
        self, epsilon, delta, kind, q, steps, before, fraction, adjacency, unit
    ):
        if adjacency is Adjacency.REPLACE:
            kind = "full"
        options = {"adjacency": adjacency, "unit": unit}
        with (
            tempfile.TemporaryDirectory() as folder,
            Budget.create(
                f"{folder}/b", epsilon=epsilon, delta=delta, data=ROWS, **options
            ) as budget,
        ):
            if before > 0:
                budget.charge(
                    dp_accounting.GaussianDpEvent(budget.least_noise * 1.001 / math.sqrt(before))
                )
            made = {"sampling": SAMPLINGS[kind](q), "num_steps": steps, "l2_clip_norm": 0.7}
            part = Mechanism.calibrate(spend=budget, fraction=fraction, **made)
            whole = Mechanism.calibrate(spend=budget, **made)
            assert (part.adjacency, part.unit) == (adjacency, unit)
            assert part.noise_multiplier >= whole.noise_multiplier
            assert not budget.fits(
                part.with_noise(part.noise_multiplier / 1.02).event, fraction=fraction
            )
            with pytest.raises(BudgetError):
                budget.admit(whole.with_noise(whole.noise_multiplier / 1.02), num_steps=steps)
            # Accepted as it will be charged: block by block.
            budget.admit(whole, num_steps=steps)
            first = steps // 3
            for start, stop in ((0, first), (first, steps)):
                if start < stop:
                    budget.charge(whole.event_between(start, stop), block=Block("r", start, stop))
            assert budget.status.used <= 1
            found = accounting.epsilon(
                budget.ledger.event,
                delta,
                adjacency=adjacency,
                accountant=accounting.Accountant.RDP,
                orders=sorted(choose_orders(epsilon, delta)),
            )
            assert found.epsilon <= epsilon * (1 + 1e-9)

    def test_fractions_of_what_is_left(self, budget):
        """Half, and then all of the other half."""
        made = {"sampling": tools.poisson(), "num_steps": 20, "l2_clip_norm": 1.0}
        half = Mechanism.calibrate(spend=budget, fraction=0.5, **made)
        last(train(budget, mechanism=half))
        assert budget.status.used == pytest.approx(0.5, abs=0.01)
        rest = Mechanism.calibrate(spend=budget, **made)
        last(train(budget, mechanism=rest))
        assert 0.99 < budget.status.used <= 1
        assert rest.noise_multiplier == pytest.approx(half.noise_multiplier, rel=0.01)

    def test_nothing_left_is_said(self, budget):
        budget.charge(dp_accounting.GaussianDpEvent(budget.least_noise * (1 + 1e-12)))
        with pytest.raises(BudgetError, match="nothing is left"):
            Mechanism.calibrate(
                spend=budget, sampling=tools.poisson(), num_steps=20, l2_clip_norm=1.0
            )

    def test_a_secure_run_is_calibrated_with_what_it_is_charged_for(self, budget):
        pytest.importorskip("cryptography")
        found = Mechanism.calibrate(
            spend=budget,
            sampling=tools.poisson(),
            num_steps=20,
            l2_clip_norm=1.0,
            noise=mirrordp.SecureGaussianNoise.of(np.zeros(3, np.float32)),
        )
        budget.admit(found, num_steps=20)
        with pytest.raises(BudgetError):
            budget.admit(found.with_noise(found.noise_multiplier / 1.02), num_steps=20)

    def test_epsilon_or_a_budget(self, budget):
        made = {"sampling": tools.poisson(), "num_steps": 20, "l2_clip_norm": 1.0}
        with pytest.raises(ValueError, match="got both"):
            Mechanism.calibrate(spend=budget, epsilon=1.0, **made)
        with pytest.raises(TypeError, match="spend=budget"):
            Mechanism.calibrate(epsilon=1.0, **made)
        with pytest.raises(ValueError, match="without a budget"):
            Mechanism.calibrate(epsilon=1.0, delta=1e-5, fraction=0.5, **made)
        with pytest.raises(TypeError, match="spend must be"):
            Mechanism.calibrate(spend=mirrordp.Ledger(Adjacency.ZERO_OUT), **made)
        with pytest.raises(BudgetError, match="One budget has one of each"):
            Mechanism.calibrate(spend=budget, unit="user", **made)
        for fraction in (0.0, 1.5):
            with pytest.raises(ValueError, match="fraction must be"):
                Mechanism.calibrate(spend=budget, fraction=fraction, **made)

    def test_a_refusal_says_what_would_fit_and_it_does(self, budget):
        wanted = mechanism(noise_multiplier=2.0, num_steps=200)
        with pytest.raises(BudgetError, match="With its own sampling 200 steps") as refused:
            train(budget, mechanism=wanted)
        noise = float(re.search(r"noise_multiplier=([\d.]+), or", str(refused.value))[1])
        steps = int(re.search(r", or (\d+) steps as it is;", str(refused.value))[1])
        budget.admit(wanted.with_noise(noise), num_steps=200)
        budget.admit(wanted, num_steps=steps)
        assert steps == budget.most_steps(wanted)
        with pytest.raises(BudgetError):
            budget.admit(wanted.with_noise(noise / 1.02), num_steps=200)
        with pytest.raises(BudgetError):
            budget.admit(wanted, num_steps=steps + 1)

    def test_a_refused_sequel_says_how_many_steps_are_left(self, budget):
        wanted = mechanism(noise_multiplier=2.0, num_steps=200)
        with pytest.raises(BudgetError, match=r"\d+ more steps as it is would fit"):
            budget.admit(wanted, charged_steps=20, num_steps=200)

    def test_a_refused_sweep_says_what_would_fit_and_it_does(self, budget):
        wanted = mechanism(noise_multiplier=5.0, num_steps=60)
        with pytest.raises(BudgetError, match="All 9 runs would fit at") as refused:
            budget.admit_all(wanted, [60] * 9)
        noise = float(re.search(r"noise_multiplier=([\d.]+), or", str(refused.value))[1])
        runs = int(re.search(r"the first (\d+) as they are", str(refused.value))[1])
        budget.admit_all(wanted.with_noise(noise), [60] * 9)
        budget.admit_all(wanted, [60] * runs)
        with pytest.raises(BudgetError):
            budget.admit_all(wanted, [60] * (runs + 1))


class TestRuns:
    def test_runs_compose_and_one_too_many_is_refused_before_it_starts(self, budget):
        one = mechanism(noise_multiplier=2.5)
        runs = until_refused(lambda: last(train(budget, mechanism=one)))
        assert runs == budget.status.runs > 1
        assert budget.ledger.event == dp_accounting.SelfComposedDpEvent(
            one.event.event, runs * one.num_steps
        )

    @pytest.mark.parametrize("data", [ROWS, None])
    def test_every_run_is_compared_with_the_data(self, folder, data):
        Budget.create(folder, epsilon=EPSILON, delta=DELTA, data=ROWS).close()
        with Budget.open(folder, data=data) as budget:
            last(train(budget))
            with pytest.raises(BudgetError, match="data that differs"):
                last(train(budget, PrivateData(tools.features(seed=3))))
            last(train(budget, PrivateData(tools.features())))
            assert budget.status.runs == 2

    def test_a_file_that_changes_while_the_budget_is_open(self, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        np.save("rows.npy", ROWS.arrays)
        made = Budget.create(folder, epsilon=EPSILON, delta=DELTA, data="rows.npy")
        monkeypatch.chdir("/")
        last(train(made))
        made.close()
        with Budget.open(folder, data=tmp_path / "rows.npy") as opened:
            last(train(opened))
            np.save(tmp_path / "rows.npy", ROWS.arrays + 1)
            with pytest.raises(BudgetError, match="got data that differs"):
                train(opened, PrivateData(np.load(tmp_path / "rows.npy")))
            model = PrivateLinearRegression(epsilon=0.1, delta=1e-6, row_norm_bound=1.0)
            with pytest.raises(BudgetError, match="got data that differs"):
                model.fit(np.ones((50, 2)), np.ones(50), spend=opened)
            assert opened.status.runs == 2

    def test_a_folder_of_checkpoints_is_no_place_for_a_budget(self, folder, tmp_path):
        with FileLedger.create(tmp_path / "ledger", mechanism().adjacency) as ledger:
            run = train(ledger, checkpoint=mirrordp.Checkpoint(folder))
            next(run)
            with pytest.raises(LedgerError, match="the checkpoint of a run"):
                Budget.create(folder, epsilon=EPSILON, delta=DELTA, data=ROWS)
            last(run)

    def test_refused_before_any_row_is_used(self, budget, monkeypatch):
        def fail(*_):
            raise AssertionError("a private row was read")

        monkeypatch.setattr("mirrordp.training.central.excluded_rows", fail)
        monkeypatch.setattr("mirrordp.spending.fingerprint.of_arrays", fail)
        with pytest.raises(BudgetError, match="within the budget"):
            train(
                budget,
                mechanism=mechanism(noise_multiplier=0.3),
                public=mirrordp.PublicData(tools.features(rows=4, seed=1)),
            )
        assert budget.status.charges == 0

    def test_an_aborted_run_pays_for_the_blocks_that_were_charged(self, budget):
        steps = train(budget)
        next(steps)
        steps.close()
        assert budget.ledger.event == mechanism().event_between(0, 5)

    def test_a_block_is_charged_before_it_runs(self, budget, monkeypatch):
        seen = []

        def look(*_):
            seen.append(FileLedger.read(budget.ledger.path).event)
            raise KeyboardInterrupt

        monkeypatch.setattr("mirrordp.training.engine._run_passes", look)
        with pytest.raises(KeyboardInterrupt):
            next(train(budget))
        assert seen == [mechanism().event_between(0, 5)]

    def test_a_fit_without_a_checkpoint_is_charged_before_its_descent(self, budget, monkeypatch):
        rng = np.random.default_rng(0)
        x, public_x = rng.normal(size=(300, 2)), rng.normal(size=(40, 2))
        seen = []
        honest = linear.private_descent

        def watched(*arguments, **options):
            seen.append(budget.status.used)
            return honest(*arguments, **options)

        monkeypatch.setattr(linear, "private_descent", watched)
        model = PrivateLinearRegression(1.0, DELTA, random_state=0)
        model.fit(x, x[:, 0], public_x, public_x[:, 0] + rng.normal(size=40), spend=budget)
        assert model.n_iter_ > 0
        expected = 1.0 / EPSILON**2
        assert seen == [budget.status.used]
        assert 0.5 * expected < seen[0] < 2 * expected
        assert model.privacy_.ledger["budget"]["used"] == seen[0]

    @pytest.mark.parametrize(
        "other",
        [
            {"unit": "user"},
            {"adjacency": Adjacency.REPLACE, "sampling": mirrordp.privacy.FullBatch.of(40)},
        ],
    )
    def test_one_adjacency_and_one_unit(self, budget, other):
        with pytest.raises(BudgetError, match="One budget has one of each"):
            train(budget, mechanism=mechanism(**other))

    def test_other_rows_are_refused_or_acknowledged_never_a_fresh_start(self, folder, budget):
        budget.charge(GAUSSIAN)
        used = budget.status.used
        budget.close()
        other = PrivateData(tools.features(seed=9))
        with Budget.open(folder) as opened, pytest.raises(BudgetError, match="no fresh budget"):
            train(opened, private=other)
        with pytest.raises(BudgetError, match="no fresh budget"):
            Budget.open(folder, data=other)
        with Budget.open(folder, data=other, data_changed=True) as opened:
            assert opened.status.used == used
            last(train(opened, private=other))
            assert opened.status.used > used
        with pytest.raises(BudgetError, match="no fresh budget"):
            Budget.open(folder, data=ROWS)
        with pytest.raises(LedgerError, match="never made afresh"):
            Budget.create(folder, epsilon=EPSILON, delta=DELTA, data=ROWS)

    def test_rows_of_other_processes(self, folder, budget):
        budget.check_parts(["a", "b"])
        budget.check_parts(["c"])
        budget.claim_parts(["a", "b"])
        budget.claim_parts(["a", "b"])
        with pytest.raises(BudgetError, match=r"got others in process 2\."):
            budget.check_parts(["a", "c"])
        with pytest.raises(BudgetError, match="in 2 processes instead of 3"):
            budget.claim_parts(["a"])
        budget.close()
        with Budget.open(folder, data=ROWS, data_changed=True) as opened:
            opened.claim_parts(["a", "c"])
            other = PrivateData(ROWS.arrays + 1)
            opened.check_data(other, data_changed=True)
            # Together with the data, by a charge: a run that was killed before it binds nothing.
            opened.claim_parts(["d", "e"])
        with Budget.open(folder, data=ROWS) as opened:
            opened.claim_parts(["a", "c"])
            with pytest.raises(BudgetError, match="in process 2"):
                opened.check_parts(["a", "b"])
        found = [r["parts"] for r in opened.ledger.records if r["kind"] == "parts"]
        assert found == [["a", "b"], ["a", "c"]]

    def test_a_crash_leaves_the_data_and_the_parts_of_one_run(self, folder, budget, monkeypatch):
        """The data and the parts of other processes were bound by one record each."""
        budget.claim_parts(["a", "b"])
        budget.charge(GAUSSIAN)
        budget.close()
        other = PrivateData(ROWS.arrays + 1)
        runs = {"before": (ROWS, ["a", "b"]), "after": (other, ["c", "d"])}

        def accepted():
            found = set()
            for data, parts in itertools.product(*zip(*runs.values(), strict=True)):
                try:
                    with Budget.open(folder, data=data) as opened:
                        opened.check_parts(parts)
                        found |= {name for name, run in runs.items() if run == (data, parts)} or {
                            "a mixture"
                        }
                except BudgetError:
                    pass
            return found

        class Crash(BaseException):
            """The power is gone."""

        files = sorted(folder.iterdir())
        copies = {path: path.read_bytes() for path in files if path.is_file()}
        used = Budget.status_of(folder).used
        seen = []
        # A charge writes its record and the head beside it; there must be no third.
        for crash, halves in itertools.product(range(4), (False, True)):
            for path, content in copies.items():
                path.write_bytes(content)
            left = itertools.count(crash, -1)

            def write(handle, content, *, left=left, halves=halves, write=_files.write_all):
                if next(left) == 0:
                    write(handle, content[: len(content) // 2 if halves else 0])
                    raise Crash
                write(handle, content)

            opened = Budget.open(folder, data=other, data_changed=True)
            opened.claim_parts(["c", "d"])
            with monkeypatch.context() as patch:
                patch.setattr(_files, "write_all", write)
                try:
                    opened.charge(GAUSSIAN)
                except Crash:
                    pass
                else:
                    assert crash >= 2
            opened.close()
            (now,) = accepted()
            seen.append(now)
            assert Budget.status_of(folder).used == (used if now == "before" else 2 * used)
            # It is of use to both: at once to the data that it is for, else by acknowledgement.
            for data, parts in runs.values():
                with Budget.open(folder, data=data, data_changed=True) as opened:
                    opened.claim_parts(parts)
                    opened.admit_event(GAUSSIAN)
            with Budget.open(folder, data=other, data_changed=True) as opened:
                opened.claim_parts(["c", "d"])
                opened.charge(GAUSSIAN)
            assert accepted() == {"after"}
        assert seen == ["before"] * 2 + ["after"] * 6

    def test_charging_needs_the_data(self, folder, budget):
        budget.close()
        with Budget.open(folder) as opened, pytest.raises(BudgetError, match="data="):
            opened.charge(GAUSSIAN)

    def test_a_report_states_the_budget_and_nothing_about_the_data(self, budget):
        last(train(budget))
        report = mirrordp.RunReport.of(mechanism(), 1e-6, spend=budget)
        text = report.to_json() + report.privacy_card()
        assert report.ledger == {
            **budget.ledger.position._asdict(),
            "budget": {
                "epsilon": EPSILON, "delta": DELTA, "runs": 1, "used": budget.status.used,
            },
        }  # fmt: skip
        assert "however they were chosen" in text
        assert budget.ledger.position.head in text
        secrets = [record["data"]["fingerprint"] for record in budget.ledger.records[:1]]
        secrets.append((budget.folder / "secret.key").read_text())
        assert not any(secret in text for secret in secrets)

    def test_fingerprints_are_keyed(self, tmp_path):
        found = set()
        for name in ("a", "b"):
            with Budget.create(tmp_path / name, epsilon=1, delta=1e-6, data=ROWS) as budget:
                found.add(budget.ledger.records[0]["data"]["fingerprint"])
        assert len(found) == 2

    def test_only_its_owner_can_read_it(self, budget):
        assert budget.folder.stat().st_mode & 0o777 == 0o700
        for path in budget.folder.iterdir():
            assert path.stat().st_mode & 0o777 == 0o600

    def test_a_lost_key_is_an_error(self, folder, budget):
        budget.close()
        (folder / "secret.key").unlink()
        with pytest.raises(StorageError, match="key of the data fingerprint"):
            Budget.open(folder, data=ROWS)

    def test_a_plain_ledger_is_no_budget(self, tmp_path):
        (tmp_path / "b").mkdir()
        FileLedger.create(tmp_path / "b" / "ledger.jsonl", Adjacency.ZERO_OUT).close()
        with pytest.raises(LedgerError, match="budget init"):
            Budget.open(tmp_path / "b")

    def test_its_folder_is_no_budget_to_spend(self, budget, folder):
        with pytest.raises(TypeError, match="spend must be Ledger or Budget, got str"):
            train(str(folder))


HOLD = """
import sys, mirrordp
budget = mirrordp.Budget.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_two_processes(folder, budget):
    budget.charge(GAUSSIAN, block=Block("a", 0, 1))
    budget.close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(LockedError, match=f"process {holder.pid} on"):
            Budget.open(folder)
        assert Budget.status_of(folder).runs == 1
        # However it ends, the budget is free again.
        holder.kill()
        holder.wait()
        Budget.open(folder, wait=10).close()


class TestOneHolder:
    """Who holds a budget knows all that was charged: no other can charge beside it."""

    def test_threads_lose_no_charge_and_stay_within_the_limit(self, budget, folder):
        def charge_all():
            return until_refused(lambda: budget.charge(dp_accounting.GaussianDpEvent(20.0)))

        with ThreadPoolExecutor(4) as threads:
            charged = sum(task.result() for task in [threads.submit(charge_all) for _ in range(4)])
        budget.close()
        status = Budget.status_of(folder)
        assert status.charges == charged > 20
        assert status.used <= 1

    def test_two_threads_cannot_have_one_seed(self, budget):
        with ThreadPoolExecutor(8) as threads:
            claims = [threads.submit(budget.claim_seed, 7, name) for name in "abcdefgh"]
        assert sum(task.exception() is None for task in claims) == 1

    def test_a_forked_process_cannot_charge(self, budget, folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX and Python warn of threads that are left behind
            child = os.fork()
        if child == 0:
            try:
                budget.charge(GAUSSIAN)
            except LedgerError as error:
                os._exit(7 if "forked from" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        budget.charge(GAUSSIAN)
        budget.close()
        assert Budget.status_of(folder).charges == 1

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_there_is_no_copy_of_it(self, budget, duplicate):
        for held in (budget, budget.ledger, budget.ledger._lock):
            with pytest.raises(TypeError, match="belongs to one process"):
                duplicate(held)

    def test_its_ledger_is_not_charged_behind_its_back(self, budget, folder):
        step = mirrordp.TrainStep(tools.squared_distance, mechanism(), sgd(0.1))
        for charge in (mirrordp.train, mirrordp.train_sweep):
            runs = {"runs": [SweepRun()]} if charge is mirrordp.train_sweep else {}
            with pytest.raises(ValueError, match="the ledger of a budget"):
                charge(step, np.zeros(tools.FEATURES), ROWS, spend=budget.ledger, **runs)

    def test_what_is_charged_behind_its_back_counts_all_the_same(self, budget, folder):
        event = dp_accounting.GaussianDpEvent(1.01 * budget.least_noise)
        budget.ledger.charge(event)
        assert budget.status.used > 0.9
        with pytest.raises(BudgetError, match="within the budget"):
            budget.charge(event)
        used = budget.status.used
        budget.close()
        assert Budget.status_of(folder).used == used


class TestSeeds:
    """Costs add up only if no two runs share their noise."""

    def test_a_seed_serves_one_run(self, budget):
        tools.last(train(budget, seed=7))
        spent = budget.status
        with pytest.raises(BudgetError, match="got seed 7 again"):
            tools.last(train(budget, seed=7))
        assert budget.status == spent
        tools.last(train(budget, seed=8))
        tools.last(train(budget, seed=None))
        assert budget.status.runs == 3

    def test_also_after_opening_it_again_and_for_a_sweep(self, budget, folder):
        tools.last(train(budget, seed=7))
        budget.close()
        with Budget.open(folder, data=ROWS) as budget:
            length = budget.ledger.position
            with pytest.raises(BudgetError, match="got seed 7 again"):
                tools.train_sweep(
                    tools.squared_distance,
                    np.zeros(tools.FEATURES, np.float32),
                    ROWS,
                    mechanism=mechanism(),
                    optimizer=sgd(0.1),
                    runs=[SweepRun(seed=3), SweepRun(seed=7)],
                    spend=budget,
                )
            assert budget.ledger.position == length

    def test_one_that_a_sweep_had(self, budget):
        tools.last(tools.train_sweep(
            tools.squared_distance, np.zeros(tools.FEATURES, np.float32), ROWS,
            mechanism=mechanism(), optimizer=sgd(0.1), runs=[SweepRun(seed=3)], spend=budget,
        ))  # fmt: skip
        with pytest.raises(BudgetError, match="got seed 3 again"):
            train(budget, seed=3)

    def test_one_that_a_fit_had(self, budget):
        rng = np.random.default_rng(0)
        x, public_x = rng.normal(size=(300, 2)), rng.normal(size=(40, 2))
        model = PrivateLinearRegression(0.5, DELTA, random_state=3)
        data = x, x[:, 0], public_x, public_x[:, 0] + rng.normal(size=40)
        model.fit(*data, spend=budget)
        assert model.n_iter_ > 0
        with pytest.raises(BudgetError, match="got seed 3 again"):
            model.set_params(num_steps=9).fit(*data, spend=budget)
        assert budget.status.runs == 1

    def test_one_that_a_run_with_a_checkpoint_has(self, budget, tmp_path):
        steps = train(budget, seed=3, checkpoint=mirrordp.Checkpoint(tmp_path / "run"))
        next(steps)
        with pytest.raises(BudgetError, match="got seed 3 again"):
            train(budget, seed=3)
        steps.close()
        again = mirrordp.Checkpoint(tmp_path / "run", resume=True)
        tools.last(train(budget, seed=3, checkpoint=again))
        assert budget.status.runs == 1

    @pytest.mark.parametrize("same", [True, np.uint8(1)])
    def test_one_number_is_one_seed_however_it_is_written(self, budget, same):
        tools.last(train(budget, seed=1))
        with pytest.raises(BudgetError, match="again"):
            tools.last(train(budget, seed=same))

    def test_a_seed_is_an_integer(self, budget):
        """NumPy draws the same from [5] as from 5."""
        for spend in (budget, None):
            with pytest.raises(TypeError):
                train(spend, seed=[5])

    def test_the_ledger_does_not_show_it(self, budget, folder):
        tools.last(train(budget, seed=123456789))
        assert b"123456789" not in (folder / "ledger.jsonl").read_bytes()


class TestCommandLine:
    @pytest.fixture
    def files(self, tmp_path):
        make_table(tmp_path / "private.csv", 400, 0)
        make_table(tmp_path / "public.csv", 60, 1)
        return tmp_path

    def init(self, files, *options):
        data = ["--data", str(files / "private.csv"), *options]
        return cli.main(
            ["budget", "init", str(files / "b"), "--epsilon", "3", "--delta", "1e-6", *data]
        )

    def fit(self, files, out="model", epsilon="1", *options):
        return cli.main(
            [
                *("fit", "--private", str(files / "private.csv"), "--target", "y", "--task"),
                *("regression", "--public", str(files / "public.csv"), "--ignore", "id"),
                *("--budget", str(files / "b"), "--epsilon", epsilon, "--out", str(files / out)),
                *options,
            ]
        )

    def test_init_fit_show(self, files, capsys):
        assert self.init(files) == 0
        assert "epsilon 3, delta 1e-06 for all runs together" in capsys.readouterr().out
        assert self.fit(files) == 0
        assert "Budget: 16% used after 1 run" in capsys.readouterr().out
        assert {path.name for path in files.iterdir()} == {
            *("private.csv", "public.csv", "b", "model"),
        }
        assert cli.main(["budget", "show", str(files / "b"), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        report = json.loads((files / "model" / "report.json").read_text())
        assert report["delta"] == 1e-6
        assert report["ledger"]["head"] == shown["ledger"]["head"]
        assert shown["runs"] == 1
        assert 0.15 < shown["used"] < 0.17

    def plan(self, files, capsys, *options):
        capsys.readouterr()
        assert cli.main(["budget", "plan", str(files / "b"), *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    @pytest.mark.parametrize(
        ("sampling", "probability"),
        [
            (["--num-examples", "400", "--batch-size", "40"], 0.1),
            (["--sampling-prob", "0.05"], 0.05),
            (["--sampling", "full"], 1.0),
        ],
    )
    def test_plan(self, files, capsys, sampling, probability):
        """It says what fits; less noise or more steps do not."""
        assert self.init(files) == 0
        with Budget.open(files / "b", data=files / "private.csv") as budget:
            budget.charge(GAUSSIAN)
        found = self.plan(files, capsys, *sampling, "--epochs", "3", "--fraction", "0.5")
        assert found["steps"] == math.ceil(3 / probability)
        assert found["used"] > 0
        at_noise = ["--noise-multiplier", repr(found["noise_multiplier"])]
        again = self.plan(files, capsys, *sampling, *at_noise, "--fraction", "0.5")
        # The noise is the least up to 0.1%, of which more steps may be made.
        assert found["steps"] <= again["steps"] <= 1.01 * found["steps"] + 1

        def event(noise, steps):
            return accounting.poisson_event(noise, sampling_prob=probability, num_steps=steps)

        budget = Budget.view(files / "b")
        noise, steps = found["noise_multiplier"], again["steps"]
        assert budget.fits(event(noise, steps), fraction=0.5)
        assert not budget.fits(event(noise, steps + 1), fraction=0.5)
        assert not budget.fits(event(noise / 1.02, found["steps"]), fraction=0.5)
        alone = accounting.epsilon(event(noise, found["steps"]), DELTA, adjacency=budget.adjacency)
        assert found["epsilon_alone"] == alone.epsilon

    def test_plan_in_words(self, files, capsys):
        assert self.init(files) == 0
        capsys.readouterr()
        plan = ["budget", "plan", str(files / "b"), "--sampling", "full"]
        assert cli.main([*plan, "--steps", "30"]) == 0
        out = capsys.readouterr().out
        assert "30 steps at noise multiplier" in out
        assert "all of what is left; 0% is used" in out
        assert cli.main([*plan, "--noise-multiplier", "0.1"]) == 2
        assert "at least one step fits" in capsys.readouterr().err
        assert cli.main([*plan, "--noise-multiplier", "3", "--steps", "30"]) == 2
        assert "not allowed with argument" in capsys.readouterr().err
        with Budget.open(files / "b", data=files / "private.csv") as budget:
            budget.charge(dp_accounting.GaussianDpEvent(budget.least_noise * (1 + 1e-12)))
            # Whoever uses it: asking takes no lock.
            assert cli.main([*plan, "--steps", "30"]) == 2
        assert "something left" in capsys.readouterr().err

    def test_the_promise_is_rounded_up(self, files, capsys):
        assert self.init(files, "--epsilon", "1.00000049", "--delta", "1.00000049e-6") == 0
        assert "epsilon 1.00001, delta 1.00001e-06 for all" in capsys.readouterr().out

    def test_too_much_is_refused_before_any_file_is_read(self, files, capsys, monkeypatch):
        assert self.init(files) == 0
        for name in ("read_table", "read_batches"):
            monkeypatch.setattr(f"mirrordp.tables.fitting.{name}", pytest.fail)
        monkeypatch.setattr("mirrordp.spending.fingerprint.of_file", pytest.fail)
        capsys.readouterr()
        assert self.fit(files, epsilon="3") == 2
        message = capsys.readouterr().err
        assert "at most epsilon 2.7" in message
        assert re.search(r" Lower --epsilon to at most 2\.7\d*, or stop here\. ", message)
        assert "Add noise" not in message
        assert not (files / "model").exists()
        assert not (files / "model.run").exists()

    def test_the_epsilon_that_a_refusal_names_fits(self, files, capsys):
        assert self.init(files) == 0
        assert self.fit(files, epsilon="3") == 2
        (room,) = re.findall(r"Lower --epsilon to at most (\S+),", capsys.readouterr().err)
        assert self.fit(files, epsilon=room) == 0
        # Little is left.
        capsys.readouterr()
        assert self.fit(files, "other", "1") == 2
        (left,) = re.findall(r"Lower --epsilon to at most (\S+),", capsys.readouterr().err)
        assert float(left) < 0.5
        with Budget.open(files / "b", data=files / "private.csv") as budget:
            budget.charge(dp_accounting.GaussianDpEvent(budget.least_noise * (1 + 1e-12)))
        assert self.fit(files, "other", "1") == 2
        message = capsys.readouterr().err
        assert "nothing is left. Stop here. " in message
        assert "epsilon to at most" not in message

    def test_a_network_that_is_refused_names_models_that_fit(self, files, capsys):
        """It samples its batches, so it takes more of a budget than other models of its epsilon."""
        assert self.init(files) == 0
        with Budget.open(files / "b") as budget:
            room = budget.largest_epsilon(1e-6)
        assert self.fit(files, "model", str(room), "--model", "network") == 2
        message = capsys.readouterr().err
        assert " Lower --epsilon, use --model linear or trees, or stop here. " in message
        assert "noise_multiplier" not in message
        assert "Add noise" not in message
        assert self.fit(files, "model", str(room), "--model", "linear") == 0

    def test_what_it_says_would_fit_does(self, files, capsys):
        assert self.init(files) == 0
        assert self.fit(files, epsilon="2.7") == 0
        assert cli.main(["budget", "show", str(files / "b")]) == 0
        assert "98" in capsys.readouterr().out

    def test_a_changed_file(self, files, capsys):
        assert self.init(files) == 0
        make_table(files / "private.csv", 401, 5)
        assert self.fit(files) == 2
        assert "no fresh budget" in capsys.readouterr().err
        assert self.fit(files, "model", "1", "--data-changed") == 0
        assert cli.main(["budget", "show", str(files / "b")]) == 0
        assert "by 1 run" in capsys.readouterr().out

    def test_a_refused_run_on_a_changed_file_binds_nothing(self, files, capsys, monkeypatch):
        """The run that is resumed had other rows, so it is refused, whatever is acknowledged."""
        assert self.init(files) == 0
        whole = (files / "private.csv").read_bytes()

        def killed(*_, **__):
            raise SystemExit(9)

        with monkeypatch.context() as patch:
            patch.setattr("mirrordp.tables.fitting._scorers", killed)
            with pytest.raises(SystemExit):
                self.fit(files)
        (files / "private.csv").write_bytes(whole.replace(b"1", b"2", 1))
        records = (files / "b" / "ledger.jsonl").read_bytes()
        assert self.fit(files, "model", "1", "--resume", "--data-changed") == 2
        assert (files / "b" / "ledger.jsonl").read_bytes() == records
        (files / "private.csv").write_bytes(whole)
        assert self.fit(files, "model", "1", "--resume") == 0
        kinds = [record["kind"] for record in FileLedger.read(files / "b" / "ledger.jsonl").records]
        assert "data" not in kinds

    def test_a_file_that_changes_after_it_was_compared(self, files, capsys, monkeypatch):
        from mirrordp.tables import fitting

        assert self.init(files) == 0
        right = fitting.read_batches

        def changed(path, **options):
            text = path.read_bytes()
            path.write_bytes(text.replace(b"1", b"2", 1))
            return right(path, **options)

        monkeypatch.setattr(fitting, "read_batches", lambda path, **o: changed(Path(path), **o))
        assert self.fit(files) == 2
        assert "data that differs" in capsys.readouterr().err

    def test_a_changed_file_that_cannot_be_read_binds_nothing(self, files, capsys):
        """Bound to it, the budget would refuse the file that it was made for."""
        assert self.init(files) == 0
        whole = (files / "private.csv").read_bytes()
        (files / "private.csv").write_bytes(whole[:500] + b"\x00\xff\n" + whole[500:])
        assert self.fit(files, "model", "1", "--data-changed") == 2
        (files / "private.csv").write_bytes(whole)
        assert self.fit(files) == 0

    @pytest.mark.parametrize("options", [["--adjacency", "add-remove"], ["--unit", "user"]])
    def test_a_budget_of_another_kind(self, files, capsys, options):
        assert self.init(files, *options) == 0
        assert "(mirrordp fit)" not in capsys.readouterr().out
        assert self.fit(files) == 2
        assert "this fit cannot be charged" in capsys.readouterr().err

    def test_replace(self, files):
        assert self.init(files, "--adjacency", "replace") == 0
        assert self.fit(files) == 0
        report = json.loads((files / "model" / "report.json").read_text())
        assert report["adjacency"] == "replace"
        assert 0.15 < report["ledger"]["budget"]["used"] < 0.17

    def test_another_process_has_it(self, files, capsys):
        assert self.init(files) == 0
        with Budget.open(files / "b"):
            assert self.fit(files) == 2
            message = capsys.readouterr().err
            assert f"in use by process {os.getpid()}" in message
            assert cli.main(["budget", "show", str(files / "b")]) == 0

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["budget"], "init, show or plan"),
            (
                ["budget", "show", "nowhere"],
                "expected a budget in 'nowhere', got no such folder. Check the path.",
            ),
            (["budget", "init", "x", "--epsilon", "1", "--delta", "1e-6"], "--data"),
            (
                ["budget", "init", "x", "--epsilon", "1", "--delta", "1e-6", "--data", "nowhere"],
                "expected a data file that can be read",
            ),
        ],
    )
    def test_bad_input(self, capsys, arguments, expected, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert cli.main(arguments) == 2
        assert expected in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
