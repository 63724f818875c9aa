"""Figure 1's simulation: the vectorised algorithms against plain loops, the search, the records."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.stats
from dp_accounting import gaussian_mechanism

from experiments import __main__ as dispatcher, records
from experiments.linreg import command, report
from experiments.linreg.backends import (
    Columns,
    JaxBackend,
    SparseBackend,
    clip_residuals,
    mirror_scaling,
    noise_multiplier,
)
from experiments.linreg.search import Lattice, Outcome, Point, centre, ends, evaluate, search
from experiments.linreg.simulation import (
    block_sizes,
    make_trial,
    population_loss,
    sample_design,
    sample_subsets,
)

DIMENSION = 250
NUM_PRIVATE = 300
LATTICE = Lattice(2.0, 2.0, 2.0, 10.0, base_steps=8, max_steps=32)


@pytest.fixture(scope="module")
def trial():
    """A trial in double precision throughout."""
    decompositions = []

    def decompose(design):
        decompositions.append(SparseBackend(1).decompose(design))
        return decompositions[-1]

    made = make_trial(decompose, DIMENSION, 0, seed=7, num_private=NUM_PRIVATE)
    made.extend_noise(40)
    return dataclasses.replace(
        made,
        design=made.design.astype(np.float64),
        targets=made.targets.astype(np.float64),
        public_model=made.public_model.astype(np.float64),
        eigenvectors=decompositions[0][1],
    )


def clipped_mean_gradient(design, targets, theta, clip_norm):
    """Example by example, with the whole gradient vector in hand."""
    total = np.zeros_like(theta)
    for row, target in zip(design, targets, strict=True):
        gradient = (row @ theta - target) * row
        norm = np.linalg.norm(gradient)
        total += gradient * min(1.0, clip_norm / norm) if norm > 0 else 0.0
    return total / len(design)


def plain_loop(trial, start, preconditioner, learning_rate, clip_norm, num_steps, multiplier):
    design = trial.design.toarray()
    theta, iterates = start.copy(), []
    for noise in trial.noise[:num_steps]:
        gradient = clipped_mean_gradient(design, trial.targets, theta, clip_norm)
        gradient = gradient + multiplier * clip_norm / len(design) * noise
        theta = theta - learning_rate * preconditioner @ gradient
        iterates.append(theta)
    return np.mean(iterates, axis=0), theta


def columns_for(trial, ridge):
    """A cold, a warm and a mirror-descent column, with different learning rates and clip norms."""
    zero, warm = np.zeros_like(trial.public_model), trial.public_model
    return Columns(
        np.stack([zero, warm, warm], axis=1),
        np.array([4.0, 3.0, 200.0]),
        np.array([0.2, 0.05, 0.02]),
        mirror_scaling(trial.eigenvalues, ridge)[:, None],
    )


def test_closed_form_clipping_equals_clipping_each_gradient():
    rng = np.random.default_rng(0)
    design, targets = rng.standard_normal((20, 5)), rng.standard_normal(20)
    models, clip_norms = rng.standard_normal((5, 3)), np.array([0.1, 1.0, 100.0])
    residuals = design @ models - targets[:, None]
    clipped = clip_residuals(residuals, np.linalg.norm(design, axis=1), clip_norms)
    vectorised = design.T @ clipped / len(design)
    for column, clip_norm in enumerate(clip_norms):
        explicit = clipped_mean_gradient(design, targets, models[:, column], clip_norm)
        np.testing.assert_allclose(vectorised[:, column], explicit, rtol=1e-12, atol=1e-14)


def test_the_vectorised_run_equals_a_plain_loop(trial):
    ridge, num_steps, multiplier = 1e-4, 6, 5.0
    columns = columns_for(trial, ridge)
    iterates = SparseBackend(1).run(trial, columns, num_steps, multiplier)
    hessian = (trial.eigenvectors * trial.eigenvalues) @ trial.eigenvectors.T
    inverse = np.linalg.inv(hessian + ridge * np.eye(DIMENSION))
    preconditioner = inverse / np.linalg.eigvalsh(inverse)[-1]
    for column, matrix in enumerate([np.eye(DIMENSION), np.eye(DIMENSION), preconditioner]):
        average, last = plain_loop(
            trial,
            columns.start[:, column],
            matrix,
            columns.learning_rates[column],
            columns.clip_norms[column],
            num_steps,
            multiplier,
        )
        np.testing.assert_allclose(iterates.average[:, column], average, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(iterates.last[:, column], last, rtol=1e-8, atol=1e-9)
        losses = [np.mean((trial.design @ model - trial.targets) ** 2) for model in (average, last)]
        np.testing.assert_allclose(iterates.empirical_losses[:, column], losses, rtol=1e-8)


@pytest.mark.parametrize(
    "num_steps", [6, 33]
)  # less and more than one call of the compiled function
def test_both_backends_agree(trial, num_steps):
    columns = columns_for(trial, 1e-4)
    single = columns._replace(start=columns.start.astype(np.float32))
    sparse = SparseBackend(1).run(trial, columns, num_steps, 5.0)
    dense = JaxBackend().run(trial, single, num_steps, 5.0)
    for expected, got in zip(sparse, dense, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)


def test_both_backends_give_the_same_figure():
    points = [
        Point("cold", -2, 2, 0, 0),
        Point("warm", -4, 0, 1, 0),
        Point("pda-dpmd", -4, 0, 0, 0),
    ]
    outcomes = []
    for backend in (SparseBackend(1), JaxBackend()):
        trials = [
            make_trial(backend.decompose, DIMENSION, t, seed=1, num_private=NUM_PRIVATE)
            for t in range(2)
        ]
        outcomes.append(evaluate(points, trials, LATTICE, backend, epsilon=1.0, delta=1e-5))
        backend.release()
    for point in points:
        for expected, got in zip(outcomes[0][point], outcomes[1][point], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3)


def test_mirror_descent_with_a_multiple_of_the_identity_is_warm_sgd(trial):
    rate, clip_norm, num_steps = 3.0, 0.05, 5
    flat = dataclasses.replace(trial, eigenvalues=np.full(DIMENSION, 0.3))
    warm = trial.public_model[:, None]
    settings = (np.array([rate]), np.array([clip_norm]))
    sgd = Columns(warm, *settings, np.ones((DIMENSION, 0)))
    mirror = Columns(warm, *settings, mirror_scaling(flat.eigenvalues, 0.01)[:, None])
    of_sgd = SparseBackend(1).run(flat, sgd, num_steps, 5.0)
    of_mirror = SparseBackend(1).run(flat, mirror, num_steps, 5.0)
    np.testing.assert_allclose(of_mirror.average, of_sgd.average, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(mirror_scaling(flat.eigenvalues, 0.01), np.ones(DIMENSION))


def test_a_large_ridge_turns_mirror_descent_into_warm_sgd(trial):
    points = [Point("warm", -3, 0, 0, 0), Point("pda-dpmd", -3, 0, 0, 7)]
    single = dataclasses.replace(trial, public_model=trial.public_model.astype(np.float32))
    found = evaluate(points, [single], LATTICE, SparseBackend(1), epsilon=1.0, delta=1e-5)
    warm, mirror = (found[point].empirical for point in points)
    np.testing.assert_allclose(mirror, warm, rtol=1e-3)


def test_mirror_scaling_is_the_normalised_inverse():
    eigenvalues = np.array([0.0, 1.0, 4.0])
    scaling = mirror_scaling(eigenvalues, 0.5)
    inverse = 1 / (eigenvalues + 0.5)
    np.testing.assert_allclose(scaling, inverse / inverse.max())


@pytest.mark.parametrize(("epsilon", "num_steps"), [(1.0, 1), (1.0, 200), (0.1, 37), (8.0, 25)])
def test_the_noise_multiplier_spends_exactly_epsilon(epsilon, num_steps):
    delta = 1e-5

    def spent(multiplier):
        return gaussian_mechanism.get_epsilon_gaussian(multiplier / num_steps**0.5, delta)

    multiplier = noise_multiplier(epsilon, delta, num_steps)
    assert spent(multiplier) == pytest.approx(epsilon, rel=1e-6)
    assert spent(multiplier * 2 / 3) > 1.3 * epsilon
    assert spent(multiplier * 3 / 2) < epsilon / 1.3


@pytest.mark.parametrize("backend", [SparseBackend(1), JaxBackend()], ids=["sparse", "jax"])
def test_the_noise_has_the_stated_scale(trial, backend):
    """From a perfect fit the gradient is zero, so one step of size 1 is the noise itself."""
    clip_norm, num_steps = 0.4, 200
    multiplier = noise_multiplier(1.0, 1e-5, num_steps)
    fitted = dataclasses.replace(
        trial,
        targets=(trial.design @ trial.public_model).astype(np.float32),
        noise=np.random.default_rng(3).standard_normal((1, DIMENSION), np.float32),
    )
    columns = Columns(
        trial.public_model[:, None].astype(np.float32),
        np.ones(1),
        np.array([clip_norm]),
        np.ones((DIMENSION, 0), np.float32),
    )
    last = backend.run(fitted, columns, 1, multiplier).last[:, 0]
    moved = last - trial.public_model

    def plausible(scale):
        statistic = np.sum((moved / scale) ** 2)
        tail = scipy.stats.chi2.cdf(statistic, DIMENSION)
        return 1e-6 < tail < 1 - 1e-6

    scale = 3.730631634815944 * 200**0.5 * clip_norm / NUM_PRIVATE
    assert plausible(scale)
    assert not plausible(scale * 2 / 3)
    assert not plausible(scale * 3 / 2)


def test_subsets_are_distinct_and_uniform():
    subsets = sample_subsets(np.random.default_rng(1), 4000, 6, 3)
    assert all(len(set(row)) == 3 for row in subsets.tolist())
    _, counts = np.unique(np.sort(subsets, axis=1), axis=0, return_counts=True)
    assert len(counts) == 20
    assert scipy.stats.chisquare(counts).pvalue > 1e-4
    with pytest.raises(ValueError, match="size"):
        sample_subsets(np.random.default_rng(1), 1, 3, 4)


def test_the_design_has_the_papers_rows():
    design = sample_design(np.random.default_rng(2), 50, 300).toarray()
    first, last = block_sizes(300)
    assert (first, last) == (60, 240)
    np.testing.assert_array_equal((design[:, :first] > 0).sum(axis=1), 40)
    np.testing.assert_array_equal((design[:, first:] > 0).sum(axis=1), 80)
    np.testing.assert_array_equal(np.unique(design), np.float32([0, 0.05]))
    with pytest.raises(ValueError, match="dimension >= 200"):
        sample_design(np.random.default_rng(2), 50, 199)


def test_the_population_loss_equals_the_second_moment_of_the_design():
    rng = np.random.default_rng(4)
    true_model, models = rng.standard_normal(DIMENSION), rng.standard_normal((DIMENSION, 2))
    mean, moment = np.zeros(DIMENSION), np.zeros((DIMENSION, DIMENSION))
    begin = 0
    for size, active in zip(block_sizes(DIMENSION), (40, 80), strict=True):
        block = slice(begin, begin + size)
        mean[block] = active / size
        moment[block, block] = active * (active - 1) / (size * (size - 1))
        begin += size
    cross = np.outer(mean, mean)
    moment = np.where(moment == 0, cross, moment)
    np.fill_diagonal(moment, mean)
    errors = models - true_model[:, None]
    expected = 0.01 + 0.05**2 * np.einsum("pg,pq,qg->g", errors, moment, errors)
    np.testing.assert_allclose(population_loss(models, true_model), expected, rtol=1e-10)
    np.testing.assert_allclose(population_loss(true_model[:, None], true_model), 0.01)


def test_the_public_model_is_the_least_squares_optimum_and_one_direction_is_null():
    seen = []

    def decompose(design):
        seen.append(design.toarray().astype(np.float64))
        return SparseBackend(1).decompose(design)

    made = make_trial(decompose, DIMENSION, 3, seed=0, num_private=50)
    assert np.sum(made.eigenvalues == 0) == 1
    null = np.repeat([2.0, -1.0], block_sizes(DIMENSION))
    np.testing.assert_allclose(seen[0] @ null, 0, atol=1e-5)
    assert abs(made.public_model @ null) < 1e-3
    again = make_trial(SparseBackend(1).decompose, DIMENSION, 3, seed=0, num_private=50)
    np.testing.assert_array_equal(again.targets, made.targets)
    # Without noise in the responses the optimum would be θ* up to the null direction; with it the
    # population loss is about 0.01 (1 + p / (n_pub − p)).
    loss = population_loss(made.public_model[:, None], made.true_model)[0]
    assert 0.02 < loss < 0.05


def test_more_noise_rows_leave_the_earlier_ones_alone():
    made = make_trial(SparseBackend(1).decompose, DIMENSION, 0, seed=0, num_private=20)
    made.extend_noise(3)
    early = made.noise.copy()
    made.extend_noise(10)
    np.testing.assert_array_equal(made.noise[:3], early)
    assert made.noise.shape == (10, DIMENSION)


def run_on(loss):
    """A stand-in for `evaluate`: the loss is a function of the point."""

    def run(points):
        return {
            point: Outcome(np.full((2, 2), loss(point)), np.zeros((2, 2)), np.ones(2))
            for point in points
        }

    return run


def test_the_search_leaves_the_starting_grid_and_encloses_the_optimum():
    def bowl(point):
        return 1 + 0.1 * ((point.travel + 4) ** 2 + (point.clip_norm - 3) ** 2 + point.num_steps**2)

    lattice = dataclasses.replace(LATTICE, max_steps=1000)
    found = search(
        run_on(bowl), [Point("warm", 0, 0, 2, 0)], lattice, tolerance=0.005, max_rounds=50
    )
    losses = {point: outcome.mean.min() for point, outcome in found.items()}
    best = min(losses, key=losses.get)
    assert best == Point("warm", -4, 3, 0, 0)
    assert {status for status, _ in ends(losses, best, lattice, 0.005).values()} == {"inside"}


def test_the_search_stops_on_a_plateau_and_reports_a_limit():
    def saturating(point):
        return 1 + 0.1 * point.travel**2 + 0.1 * 4.0**-point.num_steps

    def falling(point):
        return 1 + 0.1 * point.travel**2 + 2.0**-point.num_steps

    free = dataclasses.replace(LATTICE, max_steps=10**9)
    statuses = {}
    for name, loss, lattice in (("flat", saturating, free), ("limit", falling, LATTICE)):
        found = search(
            run_on(loss), [Point("warm", 0, 0, 0, 0)], lattice, tolerance=0.005, max_rounds=50
        )
        losses = {point: outcome.mean.min() for point, outcome in found.items()}
        middle = centre(losses, "warm", lattice, 0.005)
        statuses[name] = ends(losses, middle, lattice, 0.005)["num_steps", 1][0]
        assert all(lattice.num_steps(point) <= lattice.max_steps for point in found)
    assert statuses["limit"] == "limit"
    assert statuses["flat"] in ("flat", "inside")


def test_the_learning_rate_is_the_same_for_warm_and_mirror_where_the_hessian_is_a_multiple_of_one():
    eigenvalues = np.full(10, 0.2)
    warm = LATTICE.scaling_and_learning_rate(Point("warm", -2, 1, 1, 0), eigenvalues)
    mirror = LATTICE.scaling_and_learning_rate(Point("pda-dpmd", -2, 1, 1, 0), eigenvalues)
    assert warm[1] == pytest.approx(mirror[1])
    # travel = η T C λ
    assert warm[1] * 16 * 0.06 * 0.2 == pytest.approx(0.25)


def test_a_diverged_run_counts_as_infinite_and_not_as_best(trial):
    single = dataclasses.replace(
        trial,
        design=trial.design.astype(np.float32),
        targets=trial.targets.astype(np.float32),
        public_model=trial.public_model.astype(np.float32),
    )
    lattice = dataclasses.replace(LATTICE, travel_ratio=1e15)
    points = [Point("warm", 2, 0, 2, 0), Point("warm", -1, 0, 2, 0)]
    found = evaluate(points, [single], lattice, SparseBackend(1), epsilon=1.0, delta=1e-5)
    assert np.isinf(found[points[0]].empirical).all()
    assert np.isfinite(found[points[1]].empirical).all()


def tiny_settings(**changes):
    return command.LinregSettings(
        num_trials=2,
        seed=changes.get("seed", 0),
        lattice=LATTICE,
        start={name: {"travel": (-3, -2)} for name in ("cold", "warm", "pda-dpmd")},
        num_private=100,
        max_rounds=1,
    )


@pytest.fixture
def tiny(monkeypatch):
    """The command with settings of a few milliseconds; returns the list of dimensions computed."""
    computed = []
    compute = command.run_dimension

    def counted(dimension, *rest):
        computed.append(dimension)
        return compute(dimension, *rest)

    monkeypatch.setattr(command, "quick_settings", tiny_settings)
    monkeypatch.setattr(command, "run_dimension", counted)
    return computed


OPTIONS = ["--quick", "--dims", "200", "250", "--device", "cpu", "--no-plot"]


@pytest.mark.filterwarnings("ignore:p=")
def test_a_rerun_skips_what_is_finished(tiny, tmp_path):
    assert command.main([*OPTIONS, "--out", str(tmp_path)]) == 0
    assert tiny == [200, 250]
    path = tmp_path / "quick.jsonl"
    found = records.read(path)
    assert [(r["dimension"], r["algorithm"]) for r in found] == [
        (p, a) for p in (200, 250) for a in ("cold", "warm", "pda-dpmd")
    ]
    for record in found:
        assert len(record["best"]["losses"]) == 2
        assert record["provenance"]["packages"]["numpy"]
        assert record["settings"]["seed"] == 0
        assert record["seconds"]["search"] >= 0

    assert command.main([*OPTIONS, "--out", str(tmp_path)]) == 0
    assert tiny == [200, 250]
    assert len(records.read(path)) == 6

    assert command.main([*OPTIONS, "--seed", "1", "--out", str(tmp_path)]) == 0
    assert tiny == [200, 250, 200, 250]


@pytest.mark.filterwarnings("ignore:p=")
def test_a_damaged_line_is_reported_and_only_its_work_is_repeated(tiny, tmp_path):
    path = tmp_path / "quick.jsonl"
    command.main([*OPTIONS, "--out", str(tmp_path)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n" + lines[5][:50])
    with pytest.warns(UserWarning, match=r"quick\.jsonl, line 6: expected one JSON object"):
        command.main([*OPTIONS, "--out", str(tmp_path)])
    assert tiny == [200, 250, 250]
    with pytest.warns(UserWarning, match="line 6"):
        found = records.read(path)
    assert len(found) == 6
    assert json.loads(path.read_text().splitlines()[-1])["algorithm"] == "pda-dpmd"


def made_up_records():
    spectrum = {"largest": [4.0, 6.0], "smallest_nonzero": [2.0, 2.0], "median": [3.0, 3.0]}
    found = []
    for dimension in (1000, 500):
        for algorithm, level in (("cold", 0.04), ("warm", 0.02), ("pda-dpmd", 0.015)):
            best = {
                "output": "last",
                "learning_rate": 12.0,
                "clip_norm": 0.03,
                "num_steps": 200,
                "ridge": 0.1 if algorithm == "pda-dpmd" else None,
                "losses": [level, level + 0.002],
                "population_losses": [level + 0.01, level + 0.01],
            }
            found.append(
                {
                    "dimension": dimension,
                    "algorithm": algorithm,
                    "best": best,
                    "best_by_output": {"average": best, "last": best},
                    "ends": {"travel": ["inside", "inside"], "num_steps": ["flat", "limit"]},
                    "start_losses": [0.03, 0.03],
                    "spectrum": spectrum,
                    "grid": [{}] * 9,
                    "seconds": {"prepare": 1.0, "search": 2.0, "cpu": 3.0},
                    "settings": command.quick_settings(num_trials=2).as_json(),
                    "provenance": {
                        "source": "0" * 12,
                        "python": "3.12",
                        "packages": {"numpy": "2.0", "absent": None},
                        "machine": {"device": "a machine"},
                    },
                }
            )
    return found


def test_the_report_shows_what_the_records_say(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- linreg quick: begin -->\nprevious\n<!-- linreg quick: end -->\nafter\n"
    )
    report.write(made_up_records(), tmp_path, "quick", readme=readme)
    assert (tmp_path / "quick.png").stat().st_size > 10_000
    table = (tmp_path / "quick.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith(("| 500", "| 1000"))]
    assert rows[0].startswith("| 500 | 0.03000 ± 0.00000 | 0.04100 ± 0.01271 | 0.02100 ± 0.01271 |")
    assert "0.00500 ± 0.00000" in rows[0]  # the paired gain is constant over the trials
    assert rows[0].endswith("| 2 |")  # the mean of 4/2 and 6/2, rounded to even
    assert "num_steps (limit)" in table
    assert "numpy 2.0" in table
    assert "absent" not in table
    text = readme.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "previous" not in text
    assert table.strip() in text


def test_the_report_can_do_with_less(tmp_path, capsys):
    report.write([], tmp_path, "quick")
    assert "nothing to draw" in capsys.readouterr().out
    report.write(made_up_records()[:2], tmp_path, "quick")
    assert (tmp_path / "quick.png").exists()
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        report.write(made_up_records()[:2], tmp_path, "quick", readme=tmp_path / "README.md")


def test_the_interval_is_students():
    mean, half_width = report.mean_and_interval([1.0, 2.0, 3.0])
    low, high = scipy.stats.t.interval(0.95, 2, loc=2.0, scale=1 / 3**0.5)
    assert (mean - half_width, mean + half_width) == pytest.approx((low, high))
    assert np.isnan(report.mean_and_interval([1.0])[1])


@pytest.mark.parametrize(("argv", "status"), [(["linreg", "--help"], 0), (["no-such"], 2)])
def test_the_dispatcher(argv, status, capsys):
    with pytest.raises(SystemExit) as exit_:
        dispatcher.main(argv)
    assert exit_.value.code == status
    assert "linreg" in "".join(capsys.readouterr())
