"""What acts before the clip: sums by their definition, the bound on them, and whole runs."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import mirrordp
from mirrordp import Checkpoint, PrivateData, PublicData, SweepRun, auditing, updates
from mirrordp.mirror import KroneckerMap, SubspaceMap
from mirrordp.privacy import FullBatch, clipping, ghost
from mirrordp.privacy.charts import Chart
from mirrordp.privacy.turns import Turn
from tests import tools

CLIP = 0.5
RNG = np.random.default_rng(0)
START = {"b": np.float32([0.1, -0.2]), "w": RNG.normal(size=(3, 2)).astype("f4")}
PRIVATE = PrivateData((tools.features(), tools.features(seed=1, columns=2)))
PUBLIC = PublicData((tools.features(rows=20, seed=2), tools.features(rows=20, seed=3, columns=2)))
FLAT, UNRAVEL = ravel_pytree(jax.tree.map(jnp.asarray, START))


def loss(params, example):
    x, y = example
    return 0.5 * jnp.sum((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def gradients(rows, params=START):
    """Returns each row's gradient as a vector."""
    each = jax.vmap(lambda row: ravel_pytree(jax.grad(loss)(params, row))[0])
    return np.asarray(each(rows.arrays), np.float64)


KRONECKER = KroneckerMap.from_public(loss, START, PUBLIC, damping=0.3)
SUBSPACE = SubspaceMap.from_directions(gradients(PUBLIC), 3)
CHARTS = {
    "recentred": updates.recentred(),
    "scaled": updates.scaled_by_public_gradients(decay=0.9),
    "kronecker": updates.kronecker(KRONECKER),
    "embedded": updates.embedded(SUBSPACE, residual_weight=2.0),
    "by group": updates.clipped_by_group({"b": 3.0, "w": 1.0}),
}


@pytest.fixture(params=list(CHARTS))
def name(request):
    return request.param


def step_with(name, **options):
    defaults = {"l2_clip_norm": CLIP, "num_steps": 4, "noise_multiplier": 1.0}
    mechanism = tools.mechanism(**(defaults | options))
    return mirrordp.TrainStep(loss, mechanism, tools.sgd(0.1), chart=CHARTS[name])


def clip(rows, limit):
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, limit / norms)


def hessian_root():
    """Returns H^{-1/2} U, and c, of the Kronecker map, from its definition."""
    blocks = []
    for path in ("b", "w"):
        grads = gradients(PUBLIC)
        part = grads[:, :2].reshape(-1, 1, 2) if path == "b" else grads[:, 2:].reshape(-1, 3, 2)
        left = np.einsum("ikn,iln->kl", part, part) / len(part)
        right = np.einsum("ikn,ikm->nm", part, part) / len(part)
        blocks.append(np.kron(left, right) / np.trace(left))
    zeros = np.zeros((2, 6))
    fisher = np.block([[blocks[0], zeros], [zeros.T, blocks[1]]])
    damped = fisher + 0.3 * np.trace(fisher) / 8 * np.eye(8)
    hessian = damped / np.linalg.eigvalsh(damped).min()
    values, vectors = np.linalg.eigh(hessian)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    return root, np.sqrt(np.trace(fisher) / np.trace(np.linalg.inv(hessian) @ fisher)), hessian


def expected_gradient(name, limit):
    """Returns the mean of clipped contributions as a gradient, by the formulas, without noise."""
    g, v = gradients(PRIVATE), gradients(PUBLIC).mean(axis=0)
    if name == "recentred":
        return clip(g - v, limit).mean(axis=0) + v
    if name == "scaled":
        scales = 1 / (np.abs(v) + 0.1 * np.sqrt(np.mean(v**2)))
        scales *= np.linalg.norm(v) / np.linalg.norm(scales * v)
        return clip(scales * g, limit).mean(axis=0)
    if name == "kronecker":
        root, c, _ = hessian_root()
        return root @ clip(c * g @ root, limit).mean(axis=0) / c
    if name == "by group":
        norms = limit * np.array([3.0, 1.0]) / np.sqrt(10)
        parts = (clip(g[:, :2], norms[0]), clip(g[:, 2:], norms[1]))
        return np.concatenate(parts, axis=1).mean(axis=0)
    basis = np.asarray(SUBSPACE.basis)
    inside = g @ basis
    rest = 2.0 * (g - inside @ basis.T)
    half = limit / np.sqrt(2)
    rest = clip(rest, half).mean(axis=0) / 2.0
    return basis @ clip(inside, half).mean(axis=0) + rest - basis @ (basis.T @ rest)


def released(name, clip_norm):
    """Returns what a step without noise releases on all private rows."""
    rows = len(PRIVATE)
    step = step_with(
        name,
        l2_clip_norm=clip_norm,
        sampling=FullBatch(expected_batch_size=rows, num_examples=rows),
    )
    state = step.init(jax.tree.map(jnp.asarray, START), jax.random.key(0))
    found = step.public_grad(state, PUBLIC.arrays, jax.random.key(1))
    state = step.prepare(state, found)
    total = step.private_sum(state, PRIVATE.arrays, jnp.zeros(rows, bool), None)
    mean = jax.tree.map(lambda leaf: leaf / rows, total.total.floats())
    return np.asarray(ravel_pytree(step.chart.release(state.chart, mean))[0])


@pytest.mark.parametrize("clip_norm", [0.5, 1e4])
def test_is_what_its_formula_says(name, clip_norm):
    np.testing.assert_allclose(
        released(name, clip_norm), expected_gradient(name, clip_norm), rtol=1e-3, atol=1e-5
    )


def test_unclipped_gradients_are_those_of_the_loss(name):
    mean = gradients(PRIVATE).mean(axis=0)
    expected = {"recentred": mean, "embedded": mean, "by group": mean, "scaled": None}
    expected["kronecker"] = np.linalg.solve(hessian_root()[2], mean)
    if expected[name] is not None:
        np.testing.assert_allclose(released(name, 1e4), expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2)])
def test_an_array_without_numbers_changes_nothing(shape):
    def with_nothing(params, example):
        return loss(params[0], example) + params[1].sum()

    def trained(loss_fn, start):
        chart = updates.kronecker(KroneckerMap.from_public(loss_fn, start, PUBLIC, damping=0.3))
        mechanism = tools.mechanism(l2_clip_norm=CLIP, num_steps=1, noise_multiplier=0.0)
        step = mirrordp.TrainStep(loss_fn, mechanism, tools.sgd(0.1), chart=chart)
        *_, (state, _) = mirrordp.train(step, start, PRIVATE, PUBLIC, seed=0)
        return state.params

    found, nothing = trained(with_nothing, (START, np.zeros(shape, np.float32)))
    assert nothing.shape == shape
    jax.tree.map(np.testing.assert_allclose, found, trained(loss, START))


def test_public_gradients_keep_their_size():
    g = gradients(PUBLIC)
    root, c, _ = hessian_root()
    np.testing.assert_allclose(np.sum((c * g @ root) ** 2), np.sum(g**2), rtol=0.35)
    state = updates.before_clip.PublicSizes.init(START)
    state = state.updated(UNRAVEL(jnp.asarray(g.mean(axis=0), "f4")), 0.9)
    scaled = ravel_pytree(state.scales(0.1))[0] * g.mean(axis=0)
    np.testing.assert_allclose(np.linalg.norm(scaled), np.linalg.norm(g.mean(axis=0)), rtol=1e-5)


def test_no_pair_of_neighbours_differs_by_more_than_is_charged(name):
    step = step_with(name)
    found = auditing.neighbour_replay(
        step, START, PRIVATE.arrays, public=PUBLIC.arrays, num_pairs=60
    )
    assert not found.exceeded(), found
    assert found.largest > 0.9 * CLIP / np.sqrt(2)


@pytest.mark.parametrize("name", ["embedded", "by group"])
def test_the_replay_sees_groups_that_are_clipped_too_late(monkeypatch, name):
    monkeypatch.setattr(clipping, "_limit_of_group", lambda l2_clip_norm, count: l2_clip_norm)
    step = step_with(name)
    assert auditing.neighbour_replay(step, START, PRIVATE.arrays, num_pairs=60).exceeded()


def test_groups_are_the_children_of_the_tree():
    chart = updates.clipped_by_group({"b": 1.0, "weights": 2.0})
    step = mirrordp.TrainStep(loss, tools.mechanism(), tools.sgd(0.1), chart=chart)
    with pytest.raises(ValueError, match=r"each of \['b', 'w'\].* got \['b', 'weights'\]"):
        step.init(START, jax.random.key(0))
    for norms in ({"b": 0.0, "w": 1.0}, {"b": float("nan"), "w": 1.0}):
        with pytest.raises(ValueError, match=r"norms\['b'\] must be a positive"):
            updates.clipped_by_group(norms)
    with pytest.raises(ValueError, match="got none"):
        updates.clipped_by_group({})
    with pytest.raises(TypeError, match="name_in_norms must be str"):
        updates.clipped_by_group(cast("dict[str, float]", {0: 1.0, "w": 1.0}))
    norms = mirrordp.tuning.public_clip_norm(loss, START, PUBLIC, by_group=True)
    assert updates.clipped_by_group(norms).init(START).shape == (2,)


@pytest.mark.parametrize("name", ["recentred", "scaled"])
def test_every_step_has_the_noise_that_is_charged(name):
    def no_loss(params, example):
        return 0.0 * (jnp.sum(params["w"]) + jnp.sum(params["b"]) + jnp.sum(example[0]))

    steps = 200
    mechanism = tools.mechanism(num_steps=steps, l2_clip_norm=CLIP, noise_multiplier=1.0)
    step = mirrordp.TrainStep(no_loss, mechanism, tools.recorder(steps), chart=CHARTS[name])
    state, _ = tools.last(mirrordp.train(step, START, PRIVATE, PUBLIC, seed=1))
    noise = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.opt_state[1])])
    # 1,600 numbers: five standard errors are 9%.
    assert np.std(noise) == pytest.approx(CLIP / 8, rel=0.09)
    assert abs(np.mean(noise)) < 5 * CLIP / 8 / np.sqrt(noise.size)


@pytest.mark.parametrize("module", [clipping, ghost])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_groups_are_clipped_apart_and_a_bad_row_counts_as_zero(module, poison):
    def linear(params, row):
        return params["a"] @ row[:2] + params["b"] @ row[2:]

    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    clipped = module.clipped_grad(linear, l2_clip_norm=1.0, groups=(0, 1))
    rows = jnp.asarray([[3.0, 4.0, 0.1], [0.3, 0.4, 7.0], [0.1, 0.1, poison]])
    found = clipped(params, rows, jnp.asarray([False, False, False]))
    half = np.sqrt(0.5)
    last = np.asarray([0.1, 0.1]) if poison == 1e30 else 0.0
    expected = half * np.asarray([0.6, 0.8]) + np.asarray([0.3, 0.4]) + last
    np.testing.assert_allclose(found["a"], expected, rtol=0.02)
    np.testing.assert_allclose(found["b"], [0.1 + half + half * (poison == 1e30)], rtol=0.02)
    for row in rows[:2]:
        one = clipped(params, row[None], jnp.asarray([False]))
        assert np.linalg.norm(ravel_pytree(one)[0]) <= 1.0
    with pytest.raises(ValueError, match="groups must be numbers"):
        module.clipped_grad(linear, l2_clip_norm=1.0, groups=(0, 2))(
            params, rows, jnp.zeros(3, bool)
        )


def run(name, **options):
    defaults = {"seed": 1, "options": mirrordp.training.TrainOptions(steps_per_call=2)}
    return mirrordp.train(step_with(name), START, PRIVATE, PUBLIC, **(defaults | options))


def test_trains_resumes_and_mixes(name, tmp_path):
    whole, info = tools.last(run(name, alpha=0.8))
    assert info.charged_steps == 4
    checkpoint = Checkpoint(tmp_path / "run", resume=True)
    begun = run(name, alpha=0.8, checkpoint=checkpoint)
    next(begun)
    begun.close()
    resumed, _ = tools.last(run(name, alpha=0.8, checkpoint=checkpoint))
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    # A chart is not left without effect.
    plain = mirrordp.TrainStep(loss, step_with(name).mechanism, tools.sgd(0.1))
    without, _ = tools.last(mirrordp.train(plain, START, PRIVATE, PUBLIC, alpha=0.8, seed=1))
    assert not np.array_equal(without.params["w"], whole.params["w"])


def test_another_chart_is_not_resumed(tmp_path):
    checkpoint = Checkpoint(tmp_path / "run", resume=True)
    begun = run("recentred", checkpoint=checkpoint)
    next(begun)
    begun.close()
    with pytest.raises(mirrordp.training.CheckpointError, match="chart"):
        next(run("scaled", checkpoint=checkpoint))


def test_another_turn_is_not_resumed(tmp_path):
    """A step takes `turns` in place of `move`, which here says nothing of them."""

    def steps(size):
        chart = Chart(
            init=lambda part: (),
            like=lambda part: jax.tree.map(jnp.zeros_like, part),
            move=lambda state, phi: phi,
            centre=None,
            release=lambda state, mean: mean,
            turns=lambda state: [Turn(None, None, jnp.full((1, 3), size))],
        )
        step = mirrordp.TrainStep(
            lambda w, x: jnp.vdot(w, x), tools.mechanism(), tools.sgd(0.1), chart=chart
        )
        rows = PrivateData(np.ones((40, 1, 3), np.float32))
        checkpoint = Checkpoint(tmp_path / "run", resume=True)
        return mirrordp.train(step, jnp.zeros((1, 3)), rows, checkpoint=checkpoint)

    begun = steps(1.0)
    next(begun)
    begun.close()
    with pytest.raises(mirrordp.training.CheckpointError, match="chart"):
        next(steps(2.0))
    tools.last(steps(1.0))


@pytest.mark.parametrize("name", ["scaled", "kronecker"])
def test_runs_of_a_sweep_are_those_of_single_runs(name):
    runs = [SweepRun(seed=1), SweepRun(seed=2, alpha=0.5)]
    options = mirrordp.training.TrainOptions(steps_per_call=2)
    both, _ = tools.last(
        mirrordp.train_sweep(step_with(name), START, PRIVATE, PUBLIC, runs=runs, options=options)
    )
    for number, alpha in enumerate([1.0, 0.5]):
        alone, _ = tools.last(run(name, seed=number + 1, alpha=alpha))
        np.testing.assert_allclose(both.params["w"][number], alone.params["w"], atol=1e-5)


@pytest.mark.parametrize("name", ["recentred", "embedded"])
def test_a_mesh_changes_nothing(name):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    options = mirrordp.training.TrainOptions(steps_per_call=2, shards=2)
    one, _ = tools.last(run(name, options=options))
    two, _ = tools.last(run(name, options=options, mesh=mesh))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one.params, two.params)


def test_a_step_that_takes_several_passes_is_prepared_once():
    small = step_with("scaled", sampling=tools.poisson(capacity=4))
    large = step_with("scaled", sampling=tools.poisson(capacity=40))
    ends = [
        tools.last(mirrordp.train(step, START, PRIVATE, PUBLIC, seed=1))[0]
        for step in (small, large)
    ]
    assert int(ends[0].chart.step) == int(ends[1].chart.step) == 4
    np.testing.assert_allclose(ends[0].params["w"], ends[1].params["w"], atol=1e-4)


def test_a_chart_without_public_rows_is_refused():
    with pytest.raises(ValueError, match="the chart takes a public gradient"):
        next(mirrordp.train(step_with("recentred"), START, PRIVATE))
    with pytest.raises(TypeError, match="chart"):
        mirrordp.TrainStep(loss, tools.mechanism(), optax.sgd(0.1), chart="recentred")
    other = updates.kronecker(KRONECKER)
    step = mirrordp.TrainStep(
        loss, tools.mechanism(), optax.sgd(0.1), chart=other, trainable={"b": True, "w": False}
    )
    with pytest.raises(ValueError, match="arrays with sides"):
        next(mirrordp.train(step, START, PRIVATE, PUBLIC))


def _refusals():
    rng = np.random.default_rng(0)
    known = mirrordp.PublicData(rng.normal(size=(20, 6)).astype("f4"))
    made = {"w": rng.normal(size=(6, 4)).astype("f4")}
    curvature = KroneckerMap.from_public(
        lambda p, row: jnp.sum(jnp.tanh(row @ p["w"])), made, known
    )
    chart = updates.recentred()
    return {
        "another shape": (updates.kronecker(curvature), "arrays with sides"),
        "a release of another shape": (
            chart._replace(release=lambda c, mean: {"w": mean["w"][:1]}),
            "a chart's release",
        ),
    }


@pytest.mark.parametrize("name", _refusals())
def test_a_chart_that_does_not_fit_costs_nothing(name):
    """It was refused after its first block of steps had been charged."""
    chart, said = _refusals()[name]
    mechanism = mirrordp.Mechanism(
        sampling=FullBatch.of(10), l2_clip_norm=1.0, noise_multiplier=5.0, num_steps=4
    )
    step = mirrordp.TrainStep(
        lambda p, row: jnp.sum(jnp.tanh(p["w"] @ row)), mechanism, optax.sgd(0.1), chart=chart
    )
    ledger = mirrordp.Ledger(mirrordp.Adjacency.ZERO_OUT)
    rows = np.ones((10, 6), "f4")
    start = {"w": np.ones((4, 6), "f4")}
    with pytest.raises((ValueError, TypeError), match=said):
        list(
            mirrordp.train(
                step, start, mirrordp.PrivateData(rows), mirrordp.PublicData(rows[:2] + 1),
                spend=ledger,
            )
        )  # fmt: skip
    assert ledger.epsilon(1e-3).epsilon == 0


@pytest.mark.parametrize("other", ["recentred", "kronecker", None])
def test_a_state_goes_on_with_its_own_chart(other):
    """The state holds what was made of the chart: another one would be ignored, or not fit."""
    options = {"seed": 0, "num_steps": 2}
    *_, (state, _) = mirrordp.train(step_with("embedded"), START, PRIVATE, PUBLIC, **options)
    plain = mirrordp.TrainStep(loss, step_with("recentred").mechanism, tools.sgd(0.1))
    step = plain if other is None else step_with(other)
    with pytest.raises(ValueError, match="with the chart of this step"):
        next(mirrordp.train(step, START, PRIVATE, PUBLIC, state=state, seed=0))


@pytest.mark.parametrize("factor", [1e39, 1e-39])
def test_factors_that_float32_does_not_hold_are_refused(factor):
    basis = SubspaceMap.from_directions(np.eye(8)[:4], 2)
    with pytest.raises(ValueError, match="between 1e-30 and 1e30"):
        updates.embedded(basis, residual_weight=factor)
    with pytest.raises(ValueError, match="between 1e-30 and 1e30"):
        updates.clipped_by_group({"w": min(factor, 1 / factor), "b": 1.0})


def test_the_kronecker_chart_takes_the_mean_steps_of_the_mirror_map():
    mean = gradients(PRIVATE).mean(axis=0)
    change = KRONECKER.step(jnp.zeros(8), jnp.asarray(mean, "f4"), 1.0).params
    np.testing.assert_allclose(-change, released("kronecker", 1e4), rtol=1e-3, atol=1e-5)


def test_optimisers_of_public_sizes_and_momentum():
    optimizer = optax.chain(updates.scale_by_public_gradients(decay=0.5), optax.sgd(1.0))
    state = optimizer.init(START)
    public = [UNRAVEL(jnp.asarray(RNG.normal(size=8), "f4")) for _ in range(2)]
    squares = np.zeros(8)
    for number, grad in enumerate(public):
        change, state = optimizer.update(START, state, START, public_grad=grad)
        weight = 1.0 if number == 0 else 0.5
        squares += weight * (np.asarray(ravel_pytree(grad)[0]) ** 2 - squares)
    scales = 1 / (np.sqrt(squares) + 0.1 * np.sqrt(squares.mean()))
    scales *= np.sqrt(squares.sum() / np.sum(scales**2 * squares))
    np.testing.assert_allclose(ravel_pytree(change)[0], -scales * FLAT, rtol=1e-4)
    optimizer = optax.chain(updates.add_public_momentum(0.5, decay=0.9), optax.sgd(1.0))
    state = optimizer.init(START)
    for grad in public:
        change, state = optimizer.update(START, state, START, public_grad=grad)
    mean = 0.1 * ravel_pytree(public[1])[0] + 0.09 * ravel_pytree(public[0])[0]
    np.testing.assert_allclose(ravel_pytree(change)[0], -(FLAT + 0.5 * mean), rtol=1e-4)


@pytest.mark.parametrize(("factor", "said"), [(np.nan, "finite gradients"), (0.0, "not all zero")])
def test_a_kronecker_map_needs_public_gradients(factor, said):
    with pytest.raises(ValueError, match=said):
        KroneckerMap.from_public(lambda p, row: factor * loss(p, row), START, PUBLIC, damping=1.0)
