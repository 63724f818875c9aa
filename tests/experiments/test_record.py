"""The modern recipe: network, changes of images, settings, public and private training."""

import dataclasses
import functools
import json
import math
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

import mirrordp
from experiments import __main__ as dispatcher, datasets, records
from experiments.datasets import images as files
from experiments.record import augmentation, command, data, pretraining, private
from experiments.record.network import WideResNet, num_parameters, standardised
from experiments.record.settings import (
    CONFIGS,
    PrivateSettings,
    PublicSettings,
    RecordSettings,
    SettingsError,
    load,
)
from mirrordp.privacy import ghost

CONFIG = CONFIGS / "base.toml"
SMALL = WideResNet(depth=10, width=1)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A network that compiles in no time."""

    num_classes: int = 10

    def init(self, key):
        return {"out": {"kernel": 0.01 * jax.random.normal(key, (48, 10)), "bias": jnp.zeros(10)}}

    def predict(self, params, images):
        rows = images.reshape(len(images), 4, 8, 4, 8, 3).mean((2, 4)).reshape(len(images), -1)
        return rows @ params["out"]["kernel"] + params["out"]["bias"]


@functools.cache
def examples():
    parts = data.synthetic()
    return parts, parts.scaled(parts.public), parts.scaled(parts.private)


# Network


def test_members_are_networks_whose_mean_logits_are_the_logits():
    network = dataclasses.replace(SMALL, members=2)
    assert (str(network), str(network.member)) == ("2 WRN-10-1", "WRN-10-1")
    params = jax.jit(network.init)(jax.random.key(0))
    for number, member in enumerate(params):
        member["out"]["kernel"] = jax.random.normal(jax.random.key(number), (64, 10))
    pixels = jax.random.normal(jax.random.key(2), (2, 32, 32, 3))
    each = [SMALL.predict(member, pixels) for member in params]
    assert not np.allclose(*each)
    np.testing.assert_allclose(network.predict(params, pixels), (each[0] + each[1]) / 2, rtol=1e-5)


def test_no_two_runs_share_a_member():
    settings = load(CONFIG, ["network.members=3"])
    seeds = [seed for run in range(6) for seed in settings.member_seeds(run)]
    assert seeds == sorted(set(seeds))
    assert len(seeds) == 18
    assert load(CONFIG).member_seeds(4) == (4,)
    # A member's start is that of a network alone, and older lines keep their identity.
    assert settings.public_identity() == load(CONFIG).public_identity()
    assert "members" not in load(CONFIG).private_identity()["network"]
    assert "bands" not in load(CONFIG).private_identity()["private"]
    assert settings.private_identity()["network"]["members"] == 3
    with pytest.raises(SettingsError, match="members must be at least 1"):
        load(CONFIG, ["network.members=0"])


def test_predictions_are_averaged_over_mirrored_and_shifted_copies():
    params = Linear().init(jax.random.key(0))
    params["out"]["kernel"] = jax.random.normal(jax.random.key(1), params["out"]["kernel"].shape)
    pixels = np.asarray(jax.random.normal(jax.random.key(2), (300, 32, 32, 3)))
    labels = np.asarray(jax.random.randint(jax.random.key(3), (300,), 0, 10))

    def accuracy(shifts, flips):
        total = 0
        for row, column in shifts:
            padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
            moved = np.roll(padded, (-row, -column), (1, 2))[:, 1:-1, 1:-1]
            for flip in flips:
                logits = Linear().predict(params, jnp.asarray(moved[:, :, ::flip]))
                total = total + np.asarray(jax.nn.log_softmax(logits))
        return (total.argmax(1) == labels).mean()

    found = command.evaluate(Linear(), params, (jnp.asarray(pixels), jnp.asarray(labels)))
    cross = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    expected = {
        "accuracy": accuracy([(0, 0)], [1]),
        "mirrored_accuracy": accuracy([(0, 0)], [1, -1]),
        "shifted_accuracy": accuracy(cross, [1, -1]),
    }
    assert len(set(expected.values())) == 3
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("depth", "width", "count"), [(16, 4, 2_752_506), (28, 10, 36_489_290)])
def test_network_has_the_parameters_of_its_name(depth, width, count):
    shapes = jax.eval_shape(WideResNet(depth, width).init, jax.random.key(0))
    # Published counts differ by how norms and biases are counted, not by 1%.
    assert num_parameters(shapes) == pytest.approx(count, rel=0.01)


def test_standardised_kernels_have_mean_zero_and_the_length_of_their_gain():
    kernel = 3 + jax.random.normal(jax.random.key(0), (3, 3, 4, 5))
    gain = jnp.arange(1.0, 6)
    found = standardised({"kernel": kernel, "gain": gain})
    np.testing.assert_allclose(found.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(jnp.sqrt((found**2).sum((0, 1, 2))), gain, rtol=1e-5)
    again = standardised({"kernel": 7 * kernel, "gain": gain})
    np.testing.assert_allclose(found, again, atol=1e-5)


def test_network_does_not_mix_examples():
    params = jax.jit(SMALL.init)(jax.random.key(0))
    params["out"]["kernel"] = jax.random.normal(jax.random.key(1), (64, 10))
    pixels = jax.random.normal(jax.random.key(2), (2, 32, 32, 3))
    predict = jax.jit(SMALL.predict)
    both, other = predict(params, pixels), predict(params, pixels.at[1].multiply(-5.0))
    np.testing.assert_allclose(both[0], other[0], rtol=1e-5, atol=1e-5)
    assert jnp.abs(both[1] - other[1]).max() > 0.1


@pytest.mark.parametrize("depth", [4, 12, 17])
def test_a_depth_that_no_network_has_is_refused(depth):
    with pytest.raises(ValueError, match="6 n \\+ 4"):
        WideResNet(depth)


def test_ghost_clipping_finds_every_parameter_of_the_loss_of_views(capsys):
    network = WideResNet(16, 4, dtype="bfloat16")
    params = jax.eval_shape(network.init, jax.random.key(0))
    batch = jnp.zeros((8, 32, 32, 3)), jnp.zeros(8, jnp.int32)
    loss = private.loss_of_views(network, 4, 0)
    paths = ghost.explain(loss, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params), batch)
    capsys.readouterr()
    kernels = [path for path in paths if path.name.endswith("['kernel']")]
    assert len(kernels) == 1 + 12 + 3 + 1
    assert {path.path for path in paths} <= {"explicit", "product", "gram"}
    # Only the kernel's own pull-back, never that of the whole loss.
    reasons = {path.reason.split(",")[0] for path in kernels if path.path == "explicit"}
    assert reasons == {"behind a function of parameters"}


def test_clipped_views_in_bfloat16_stay_within_the_clip_norm():
    network = WideResNet(10, 1, dtype="bfloat16")
    params = jax.jit(network.init)(jax.random.key(0))
    params["out"]["kernel"] = 3 * jax.random.normal(jax.random.key(1), (64, 10))
    pixels = jax.random.normal(jax.random.key(2), (2, 32, 32, 3))
    clipped = ghost.clipped_grad(private.loss_of_views(network, 2, 0), l2_clip_norm=0.5)
    keys = jax.random.split(jax.random.key(3), 2)
    one_left = jnp.array([False, True])
    total, stats = jax.jit(
        lambda params, padding: clipped.with_stats(
            params, (pixels, jnp.array([1, 2])), padding, keys=keys
        )
    )(params, one_left)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]
    norm = math.sqrt(sum((leaf**2).sum() for leaf in leaves))
    assert float(stats.unprivatized_norms[0]) > 1.0
    assert 0.49 < norm <= 0.5 * (1 + 1e-5)


# Changes of images


def test_shift_and_mirror_moves_pixels_and_changes_none():
    image = jnp.arange(32 * 32 * 3.0).reshape(32, 32, 3)
    seen = set()
    shift_and_mirror = jax.jit(augmentation.shift_and_mirror)
    for number in range(20):
        changed = shift_and_mirror(jax.random.key(number), image)
        assert changed.shape == image.shape
        middle = np.asarray(changed[8:24, 8:24])
        assert np.isin(middle, np.asarray(image)).all()
        seen.add(float(changed[0, 0, 0]))
    assert len(seen) > 10


def test_cut_out_sets_a_square_to_zero():
    cut_out = jax.jit(functools.partial(augmentation.cut_out, size=16))
    cut = [np.asarray(cut_out(jax.random.key(n), np.ones((32, 32, 3)))) for n in range(20)]
    areas = [(image == 0).mean() for image in cut]
    # The square may hang over the edge, but its centre does not.
    assert all(0.25 / 4 - 0.02 <= area <= 0.25 + 0.02 for area in areas)
    assert max(areas) - min(areas) > 0.02


def test_colours_and_warps_of_strength_zero_change_nothing_and_others_do():
    image = jax.random.normal(jax.random.key(0), (32, 32, 3))
    for change in (augmentation.change_colours, augmentation.warp):
        compiled = jax.jit(change)
        same = compiled(jax.random.key(1), image, strength=0.0)
        np.testing.assert_allclose(same, image, atol=1e-4)
        other = compiled(jax.random.key(1), image, strength=0.5)
        assert jnp.abs(other - image).mean() > 0.01


@pytest.mark.parametrize("mix", [augmentation.mix_up, augmentation.cut_mix])
def test_targets_are_mixed_as_images_are(mix):
    """Image k holds the number k everywhere, so that its mean tells the share of each."""
    count = 6
    pixels = jnp.broadcast_to(jnp.arange(1.0, 1 + count)[:, None, None, None], (count, 32, 32, 3))
    mixed, targets = jax.jit(functools.partial(mix, concentration=0.5))(
        jax.random.key(0), pixels, jnp.eye(count)
    )
    np.testing.assert_allclose(targets.sum(1), 1, rtol=1e-5)
    expected = targets @ jnp.arange(1.0, 1 + count)
    np.testing.assert_allclose(mixed.mean((1, 2, 3)), expected, rtol=1e-4)
    assert float(targets.max(1).min()) < 0.999


@pytest.mark.parametrize("mix", ["none", "both"])
def test_changed_public_batches_keep_their_shapes(mix):
    settings = PublicSettings(mix=mix, cutout=8, colours=0.2, warp=0.5, smoothing=0.1)
    pixels, targets = jnp.ones((4, 32, 32, 3)), jnp.eye(4, 10)
    changed, mixed = jax.jit(pretraining.changed, static_argnums=0)(
        settings, jax.random.key(0), pixels, targets
    )
    assert (changed.shape, mixed.shape) == (pixels.shape, targets.shape)
    np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-5)
    assert float(mixed.min()) >= 0.01 - 1e-6


# Settings


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_settings_file_can_be_meant(path):
    settings = load(path)
    assert settings.name == path.stem
    assert settings.private.delta == 1e-5
    kind, _, level = path.stem.partition("-e")
    if level:
        assert settings.private.target_epsilon == float(level)
        assert (settings.private.alpha < 1) == (kind == "pda")


def test_changes_override_the_file_and_types_are_checked():
    settings = load(CONFIG, ["private.views=8", "public.mix=cutmix", "private.learning_rate=1"])
    assert (settings.private.views, settings.public.mix) == (8, "cutmix")
    assert type(settings.private.learning_rate) is float
    assert load(CONFIG, ["private.other_decays=[0.9]"]).private.other_decays == (0.9,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("views=8", "like private.views=8"),
        ("private.view=8", "unknown setting private.view"),
        ("private.views=0", "views must be positive"),
        ("private.views=two", "of type int"),
        ("private.alpha=1.5", "in \\[0, 1\\]"),
        ("private.alpha=0.0", "above 0"),
        ("private.rate=steep", "constant, linear, cosine"),
        ("public.mix=blend", "none, mixup"),
        ("public.momentum=1.0", "in \\[0, 1\\)"),
        ("network.dtype=int8", "float32, bfloat16"),
        ("network.depth=17", "6 n \\+ 4"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        load(CONFIG, [change])


# Public training


def test_public_training_learns_and_is_reproducible():
    _, public, _ = examples()
    settings = PublicSettings(steps=60, batch_size=16, mix="both", cutout=4)
    steps = []
    found = [
        pretraining.pretrain(
            Linear(), settings, *public, seed=seed, on_progress=lambda step, *_: steps.append(step)
        )
        for seed in (0, 0, 1)
    ]
    assert steps == [60, 60, 60]
    assert command.evaluate(Linear(), found[0], public)["accuracy"] > 0.7
    assert (found[0]["out"]["kernel"] == found[1]["out"]["kernel"]).all()
    assert (found[0]["out"]["kernel"] != found[2]["out"]["kernel"]).any()


def test_stop_ends_the_same_schedule_earlier(monkeypatch):
    monkeypatch.setattr(pretraining, "STEPS_PER_CALL", 10)
    _, public, _ = examples()
    iterates = {}
    whole = PublicSettings(steps=20, batch_size=8, mix="none")

    def keep(step, last, average):
        iterates[step] = average

    pretraining.pretrain(Linear(), whole, *public, seed=0, on_progress=keep)
    stopped = dataclasses.replace(whole, stop=10)
    early = pretraining.pretrain(Linear(), stopped, *public, seed=0)
    np.testing.assert_allclose(early["out"]["kernel"], iterates[10]["out"]["kernel"], rtol=1e-5)
    assert (early["out"]["kernel"] != iterates[20]["out"]["kernel"]).any()


def test_no_steps_leave_a_cold_start():
    _, public, _ = examples()
    start = pretraining.pretrain(Linear(), PublicSettings(steps=0), *public, seed=3)
    expected = Linear().init(jax.random.split(jax.random.key(3))[0])
    assert (start["out"]["kernel"] == expected["out"]["kernel"]).all()


def test_teachers_decide_the_targets():
    """A teacher that always says class 3 teaches that, whatever the labels are."""
    _, public, _ = examples()
    teacher = Linear().init(jax.random.key(0))
    teacher["out"]["bias"] = 50 * jax.nn.one_hot(3, 10)
    settings = PublicSettings(steps=60, batch_size=16, mix="none")
    taught = pretraining.pretrain(
        Linear(), settings, *public, seed=0, teachers=[(Linear(), teacher)]
    )
    assert (Linear().predict(taught, public[0]).argmax(1) == 3).mean() > 0.95


def test_sharpness_changes_the_result():
    _, public, _ = examples()
    settings = PublicSettings(steps=20, batch_size=8, mix="none")
    plain, sharp = (
        pretraining.pretrain(
            Linear(), dataclasses.replace(settings, sharpness=radius), *public, seed=0
        )
        for radius in (0.0, 0.5)
    )
    assert jnp.abs(plain["out"]["kernel"] - sharp["out"]["kernel"]).max() > 1e-4


# Private training


def test_noise_keeps_the_promise_of_the_settings():
    settings = load(CONFIGS / "warm-e2.toml").private
    found = private.mechanism(settings, 48_000)
    assert 1.98 < found.epsilon(settings.delta) <= 2.0
    assert found.sampling.expected_batch_size == settings.batch_size
    weaker = dataclasses.replace(found, noise_multiplier=0.95 * found.noise_multiplier)
    assert weaker.epsilon(settings.delta) > 2.05


def test_correlated_noise_adds_up_to_less_at_the_same_epsilon():
    settings = load(CONFIGS / "bands-e8.toml").private
    found = {
        bands: private.mechanism(dataclasses.replace(settings, bands=bands), 48_000)
        for bands in (1, settings.bands)
    }
    ends = {}
    for bands, one in found.items():
        assert 7.9 < one.epsilon(settings.delta) <= 8.0
        coefficients = getattr(one.noise, "coefficients", (1.0,))
        impulse = np.eye(1, settings.steps)[0]
        moved = np.cumsum(scipy.signal.lfilter([1.0], coefficients, impulse))
        ends[bands] = one.noise_stddev * math.hypot(*coefficients) * np.linalg.norm(moved)
    assert found[settings.bands].sampling.num_groups == settings.bands > 1
    assert found[settings.bands].noise_multiplier > 1.5 * found[1].noise_multiplier
    assert ends[settings.bands] < 0.85 * ends[1]


def test_views_are_of_one_example_and_averaged():
    loss = jax.jit(private.loss_of_views(Linear(), 64, 0))
    params = Linear().init(jax.random.key(0))
    pixels = jax.random.normal(jax.random.key(1), (32, 32, 3))
    keys = jax.random.split(jax.random.key(2), 2)
    values = [float(loss(params, (pixels, jnp.array(1)), key)) for key in keys]
    assert values[0] != values[1]
    single = private.loss_of_views(Linear(), 1, 0)
    many = jax.jit(jax.vmap(single, (None, None, 0)))(
        params, (pixels, jnp.array(1)), jax.random.split(keys[0], 40)
    )
    spread = np.std(many)
    assert abs(values[0] - np.mean(many)) < 4 * spread * math.sqrt(1 / 64 + 1 / 40)


@pytest.mark.parametrize(
    ("rate", "last"), [("constant", 0.4), ("linear", 0.4 * 0.1), ("cosine", 0.4 * 0.1)]
)
def test_learning_rates_rise_and_then_fall(rate, last):
    settings = PrivateSettings(steps=100, learning_rate=0.4, warm_up=10, rate=rate, last_rate=0.1)
    rates = np.array([float(private.learning_rates(settings)(step)) for step in range(101)])
    assert rates[0] == pytest.approx(0.04)
    assert rates[9] == pytest.approx(0.4)
    assert (np.diff(rates[:10]) > 0).all()
    assert (np.diff(rates[10:]) <= 1e-9).all()
    assert rates[100] == pytest.approx(last, rel=1e-4)


def test_public_networks_add_their_log_probabilities():
    params = Linear().init(jax.random.key(0))
    pixels = np.asarray(jax.random.normal(jax.random.key(2), (300, 32, 32, 3)))
    labels = np.asarray(jax.random.randint(jax.random.key(3), (300,), 0, 10))
    added = 0.05 * np.asarray(jax.random.normal(jax.random.key(4), (300, 10)))
    logits = np.asarray(Linear().predict(params, jnp.asarray(pixels)))
    seen = set()
    for weight in (0.0, 0.5, 2.0):
        found = command.evaluate(Linear(), params, (pixels, labels, added), weight)
        expected = jax.nn.log_softmax(logits + weight * added)
        assert found["accuracy"] == pytest.approx(float((expected.argmax(1) == labels).mean()))
        assert found["loss"] == pytest.approx(
            float(-expected[np.arange(300), labels].mean()), abs=1e-5
        )
        seen.add(found["loss"])
    assert len(seen) == 3
    # So does the loss of one private example, whose part they are.
    one = (pixels[0], labels[0])
    loss = private.loss_of_views(Linear(), 2, 0)
    key = jax.random.key(5)
    assert loss(params, one, key) == loss(params, (*one, np.zeros(10, "f4")), key)
    sure = np.where(np.arange(10) == labels[0], 50.0, 0.0).astype("f4")
    assert loss(params, (*one, sure), key) < 1e-6


def some_mechanism(settings, num_private):
    """A mechanism that need not be calibrated, which takes seconds."""
    return mirrordp.Mechanism(
        sampling=mirrordp.PoissonSampling.for_batch_size(
            settings.batch_size, num_examples=num_private
        ),
        num_steps=settings.steps,
        l2_clip_norm=settings.l2_clip_norm,
        noise_multiplier=1.0,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"alpha": 0.5},
        {"alpha": 0.5, "public_mix": True},
        {"geometry": "mirror"},
        {"geometry": "chart", "public_mix": True},
    ],
)
def test_private_training_goes_from_the_start_and_averages(changes):
    _, public, rows = examples()
    settings = PrivateSettings(
        steps=6, batch_size=32, views=2, average_decay=0.5, other_decays=(0.9,),
        target_epsilon=8.0, microbatch_size=16, public_batch_size=8, **changes,
    )  # fmt: skip
    found = some_mechanism(settings, len(rows[0]))
    start = Linear().init(jax.random.key(0))
    steps = []
    iterates, seen = private.train_privately(
        Linear(), settings, PublicSettings(mix="both"), found, start, rows, public, seed=0, every=3,
        on_progress=lambda step, iterates: steps.append((step, sorted(iterates))),
    )  # fmt: skip
    assert steps == [(step, ["average 0.5", "average 0.9", "last"]) for step in (3, 6)]
    assert seen["noisy_grad_norm"] > 0
    moved = [
        float(jnp.abs(one["out"]["kernel"] - start["out"]["kernel"]).max())
        for one in iterates.values()
    ]
    assert min(moved) > 0
    assert (iterates["last"]["out"]["kernel"] != iterates["average 0.5"]["out"]["kernel"]).any()


def test_a_deadline_that_has_passed_ends_training(monkeypatch):
    _, public, rows = examples()
    start, past = Linear().init(jax.random.key(0)), time.monotonic() - 1
    with pytest.raises(TimeoutError):
        pretraining.pretrain(Linear(), PublicSettings(steps=2), *public, seed=0, deadline=past)
    settings = PrivateSettings(steps=2, batch_size=32, views=1, target_epsilon=8.0)
    taken = []

    def train(step, params, *_, **options):
        for number in (1, 2):
            taken.append(number)
            info = {"step": number, "noisy_grad_norm": [1.0], "unprivatized": ([1.0], [0.5])}
            yield types.SimpleNamespace(params=params), types.SimpleNamespace(**info)

    monkeypatch.setattr(private, "train", train)
    found = some_mechanism(settings, len(rows[0]))
    arguments = (Linear(), settings, PublicSettings(), found, start, rows, public)
    with pytest.raises(TimeoutError):
        private.train_privately(*arguments, seed=0, deadline=past)
    assert taken == [1]
    private.train_privately(*arguments, seed=0, deadline=time.monotonic() + 1e6)
    assert taken == [1, 1, 2]


# Data


@pytest.fixture
def cifar10(tmp_path):
    """Files of CIFAR-10's form with ten images each; without test images."""
    folder = tmp_path / files.CIFAR10_FOLDER
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in files.CIFAR10_TRAIN:
        rows = rng.integers(0, 256, (10, files.CIFAR10_RECORD), dtype=np.uint8)
        rows[:, 0] = np.arange(10)
        rows.tofile(folder / name)
    return tmp_path


def test_a_search_needs_no_test_images_and_its_parts_are_disjoint(cifar10, tmp_path):
    sizes = data.write_split(cifar10, tmp_path / "split", holdout=7)
    assert sizes == {"public": 2, "validation": 7, "private": 41}
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == [
        "private.npz", "public.npz", "validation.npz",
    ]  # fmt: skip
    parts = data.read_split(tmp_path / "split", private=True)
    assert parts.judged_by == "validation"
    everything = np.concatenate([parts.public[0], parts.private[0], parts.judges[0]])
    assert len(np.unique(everything.reshape(50, -1), axis=0)) == 50
    scaled, _ = parts.scaled(parts.public)
    np.testing.assert_allclose(scaled.mean((0, 1, 2)), 0, atol=1e-5)


def test_missing_parts_of_a_split_are_named(tmp_path):
    with pytest.raises(datasets.DataError, match=r"public\.npz"):
        data.read_split(tmp_path, private=False)


def test_final_runs_have_all_private_images_and_are_judged_by_test_images(cifar10):
    rows = np.zeros((4, files.CIFAR10_RECORD), np.uint8)
    rows.tofile(cifar10 / files.CIFAR10_FOLDER / files.CIFAR10_TEST)
    parts = data.read_final(cifar10)
    assert (len(parts.public[0]), len(parts.private[0]), len(parts.judges[0])) == (2, 48, 4)
    assert parts.judged_by == "test"


# Command

calibrated_once = functools.cache(private.mechanism)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The command with a linear network in place of the real one; its fixed arguments."""
    for name in ("init", "predict"):
        several = getattr(WideResNet, name)
        one = getattr(Linear(), name)
        monkeypatch.setattr(
            WideResNet,
            name,
            lambda self, *arguments, one=one, several=several: (
                one(*arguments) if self.members == 1 else several(self, *arguments)
            ),
        )
    monkeypatch.setattr(private, "mechanism", calibrated_once)
    changes = (
        # A width of its own: what was compiled for a real network must not be found.
        "network.width=7 public.steps=20 public.stop=0 public.batch_size=8 private.steps=4 "
        "private.batch_size=32 private.views=2 private.microbatch_size=16"
    )
    options = [word for change in changes.split() for word in ("--set", change)]
    return ["--synthetic", "--results", str(tmp_path), "--seeds", "0", *options]


def test_both_commands_leave_lines_and_are_not_run_twice(quick, tmp_path, capsys):
    for verb in ("public", "private", "public", "private"):
        assert dispatcher.main(["record", verb, str(CONFIG), *quick]) == 0
    first, second = records.read(tmp_path / "search.jsonl")
    assert (first["kind"], second["kind"]) == ("search public", "search")
    assert second["start"] == first["id"]
    assert "public" not in second["settings"]  # the start says it
    assert second["privacy"]["epsilon_pld"] <= 2.0
    assert second["privacy"]["tuning_charged"] is False
    assert set(second["final"]) == {"last", "average 0.9"}
    assert [point["step"] for point in second["curve"]] == [4]
    assert "validation images" in capsys.readouterr().out
    json.dumps(first, allow_nan=False)


def test_members_have_starts_of_their_own(quick, tmp_path, capsys):
    several = [*quick, "--set", "network.members=2"]
    assert command.main(["public", str(CONFIG), *quick, "--seeds", "1"]) == 0
    for verb in ("public", "private", "public", "private"):
        assert command.main([verb, str(CONFIG), *several]) == 0
    *starts, run = records.read(tmp_path / "search.jsonl")
    # The start of seed 1 was there, and is not learned again.
    assert [start["seed"] for start in starts] == [1, 0]
    assert run["start"] == f"{starts[1]['id']}, {starts[0]['id']}"
    assert run["settings"]["network"]["members"] == 2
    path = tmp_path / "starts" / f"{starts[0]['id']}.npz"
    assert command.main(["private", str(CONFIG), *several, "--start", str(path)]) == 2
    assert "expected a start of 2 WRN-16-7, got one of WRN-16-7" in capsys.readouterr().err


def test_final_runs_look_at_test_images_once(quick, tmp_path, monkeypatch):
    parts = dataclasses.replace(data.synthetic(), judged_by="test")
    monkeypatch.setattr(data, "read_final", lambda root: parts)
    looks = []
    evaluate = command.evaluate

    def counted(*arguments):
        looks.append(1)
        return evaluate(*arguments)

    def train_privately(
        network, settings, public_settings, found, start, *_, on_progress, **options
    ):
        """What training reports, twice on the way and at its end."""
        iterates = {"last": start, "average 0.9": start}
        for step in (1, 2, settings.steps):
            on_progress(step, iterates)
        return iterates, {"seconds_per_step": 0.0}

    monkeypatch.setattr(command, "evaluate", counted)
    monkeypatch.setattr(private, "train_privately", train_privately)
    options = [word for word in quick if word != "--synthetic"]
    # A private run: of its start and of its result, at the end.
    for verb, expected in (("public", 1), ("private", 3)):
        assert command.main([verb, str(CONFIG), *options]) == 0
        assert len(looks) == expected
    public, final = records.read(tmp_path / "final.jsonl")
    assert (public["kind"], final["kind"]) == ("final public", "final")
    assert public["curve"]["rows"] == final["curve"] == []
    assert list(final["final"]) == ["average 0.9"]


def test_a_start_says_who_taught_it(quick, tmp_path):
    assert command.main(["public", str(CONFIG), *quick]) == 0
    (first,) = records.read(tmp_path / "search.jsonl")
    teacher = str(tmp_path / "starts" / f"{first['id']}.npz")
    assert command.main(["public", str(CONFIG), *quick, "--teachers", teacher]) == 0
    _, taught = records.read(tmp_path / "search.jsonl")
    assert taught["teachers"] == [first["id"]]
    assert taught["id"] != first["id"]


def test_training_may_begin_where_another_ended(quick, tmp_path):
    assert command.main(["public", str(CONFIG), *quick]) == 0
    (first,) = records.read(tmp_path / "search.jsonl")
    begin = ["--begin", str(tmp_path / "starts" / f"{first['id']}.npz")]
    for _ in range(2):
        assert command.main(["public", str(CONFIG), *quick, *begin]) == 0
    _, further = records.read(tmp_path / "search.jsonl")
    assert further["begin"] == first["id"] != further["id"]
    assert further["final"]["loss"] < first["final"]["loss"]


def test_public_networks_beside_a_private_one(quick, tmp_path, capsys):
    beside = [*quick, "--set", "private.beside=1"]
    assert command.main(["public", str(CONFIG), *quick, "--seeds", "0", "1"]) == 0
    ids = [line["id"] for line in records.read(tmp_path / "search.jsonl")]
    starts = [tmp_path / "starts" / f"{one}.npz" for one in ids]
    assert command.main(["private", str(CONFIG), *beside]) == 2
    assert "there is no start" in capsys.readouterr().err
    beside += ["--set", "private.beside_seeds=[0, 1]"]
    files = ["--beside", *map(str, starts)]
    after = ["--set", "private.beside_in_loss=false"]
    for extra in ([], after):
        for _ in range(2):
            assert command.main(["private", str(CONFIG), *beside, *extra]) == 0
    # Named one by one they are the same.
    assert command.main(["private", str(CONFIG), *beside, *files]) == 0
    # Without a weight they do nothing.
    assert command.main(["private", str(CONFIG), *quick, *files]) == 0
    *_, first, second, alone = records.read(tmp_path / "search.jsonl")
    assert first["beside"]["starts"] == ids
    assert len({first["id"], second["id"], alone["id"]}) == 3
    assert "beside" not in alone
    # Beside the network at the end only, they do not change how it was trained.
    assert second["beside"]["alone"] == pytest.approx(alone["final"]["average 0.9"])
    assert first["beside"]["alone"] != second["beside"]["alone"]
    assert second["final"]["average 0.9"] == second["beside"]["other weights"]["1.0"]
    for line in (first, second, alone):
        assert (tmp_path / "ends" / f"{line['id']}.npz").exists()


def test_mistakes_end_in_one_line(quick, tmp_path, capsys):
    assert command.main(["private", str(CONFIG), *quick]) == 2
    assert "Make it with `record public` first" in capsys.readouterr().err
    assert command.main(["public", str(CONFIG), "--synthetic"]) == 2
    assert "needs --results" in capsys.readouterr().err
    assert command.main(["public", str(CONFIG), *quick, "--max-seconds", "-1"]) == 3
    assert not (tmp_path / "search.jsonl").exists()
    assert command.main(["public", str(CONFIG), *quick]) == 0
    start = next((tmp_path / "starts").glob("*.npz"))
    other = ["--start", str(start), "--set", "network.width=8"]
    assert command.main(["private", str(CONFIG), *quick, *other]) == 2
    assert "expected a start of WRN-16-8, got one of WRN-16-7" in capsys.readouterr().err


# Results


def test_lines_of_the_search_are_readable_and_not_of_test_images():
    lines = records.read(command.RESULTS / "search.jsonl")
    assert lines
    assert {line["judged_by"] for line in lines} == {"validation"}
    # A start that was lost with its machine and learned again has a line for each time.
    assert len({(line["id"], line["final"].get("loss")) for line in lines}) == len(lines)
    runs = [line["id"] for line in lines if line["kind"] == "search"]
    assert len(set(runs)) == len(runs)
    for line in lines:
        if line["kind"] == "search":
            found = [line["settings"], line["seed"], line["start"], "validation"]
            found += [line["privacy"]["num_private"]]
            if "beside" in line:
                found += [sorted(line["beside"]["starts"])]
            assert line["id"] == records.fingerprint(found)
            assert line["privacy"]["epsilon_pld"] <= line["settings"]["private"]["target_epsilon"]


def test_the_base_settings_are_those_of_the_best_line():
    settings = load(CONFIGS / "warm-e2.toml")
    assert isinstance(settings, RecordSettings)
    # Among runs of the same budget and cost; eight views take twice the time.
    lines = [
        line
        for line in records.read(command.RESULTS / "search.jsonl")
        if "privacy" in line
        and line["settings"]["private"]["target_epsilon"] == settings.private.target_epsilon
        and line["settings"]["private"]["views"] == settings.private.views
    ]
    best = min(lines, key=lambda line: line["final"]["average 0.9"]["loss"])
    ours, theirs = settings.private_identity()["private"], best["settings"]["private"]
    differing = {key for key in ours if ours[key] != theirs[key]}
    assert differing <= {"average_decay"}  # all averages of a search are in one line
