"""Settings of the recipe: one TOML file with the tables [network], [public] and [private].

A file may name another one in `extends`, whose values it overrides; `--set TABLE.NAME=VALUE` on the
command line overrides both.
"""

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import records, settings_files
from experiments.record.network import WideResNet
from experiments.settings_files import SettingsError

CONFIGS = Path(__file__).parent / "configs"
MIXES = ("none", "mixup", "cutmix", "both")
RATES = ("constant", "linear", "cosine")
GEOMETRIES = ("none", "mirror", "chart")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicSettings:
    """Pre-training on public images by SGD with Nesterov momentum and a cosine schedule.

    Attributes:
        steps: length of the schedule; 0 leaves the network as it was initialised (a cold start).
        stop: the step after which to stop, before the rate is zero; 0 for the end.
        batch_size: images per step.
        learning_rate: at the beginning.
        weight_decay: of kernels.
        momentum: Nesterov's.
        average_decay: of the exponential average of the iterates, which is what comes out.
        mix: how images and targets are mixed: `none`, `mixup`, `cutmix` or `both` in turn.
        mix_concentration: of the Beta distribution of the mixing weights.
        cutout: side of the square that is set to zero, 0 for none.
        colours: strength of changes of brightness, contrast and saturation.
        warp: strength of rotation, scaling and shear.
        smoothing: label smoothing.
        sharpness: radius of sharpness-aware minimisation, 0 for none (twice the cost otherwise).
        distillation: weight of the teachers' predictions in the targets, where there are teachers.
    """

    steps: int = 24_000
    stop: int = 0
    batch_size: int = 128
    learning_rate: float = 0.05
    weight_decay: float = 1e-3
    momentum: float = 0.9
    average_decay: float = 0.999
    mix: str = "mixup"
    mix_concentration: float = 0.5
    cutout: int = 16
    colours: float = 0.0
    warp: float = 0.0
    smoothing: float = 0.0
    sharpness: float = 0.0
    distillation: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateSettings:
    """DP-SGD from the public start, or PDA-DPMD where alpha is below 1.

    Attributes:
        target_epsilon: ε, by PLD accounting, from which σ follows.
        delta: δ.
        steps: number of steps.
        batch_size: expected size of a Poisson batch.
        views: random views of an example whose mean loss is the example's loss.
        learning_rate: its largest value.
        warm_up: steps in which the rate rises from zero.
        rate: what follows: `constant`, or `linear` or `cosine` down to `last_rate` of it.
        last_rate: see `rate`.
        momentum: of SGD.
        l2_clip_norm: C.
        bands: of the matrix that correlates the noise of steps; 1 for independent noise. More need
            cyclic Poisson sampling, with as many groups.
        alpha: weight of the private gradient.
        public_batch_size: public examples of a step with alpha below 1.
        public_mix: whether the public loss is that of the public start, with mixed images.
        geometry: what a Kronecker-factored public curvature does: nothing (`none`), shape the step
            after the noise (`mirror`), or shape gradients before the clip too (`chart`).
        damping: of that curvature.
        largest_side: of sides of kernels with more rows or columns, the curvature is diagonal.
        cutout: side of the square that is set to zero in each view, 0 for none.
        beside: weight of the mean log-probabilities of public networks, which stay as they are, in
            the logits that predict.
        beside_seeds: seeds of the starts that are these networks.
        beside_in_loss: whether the loss has these logits too, or the trained network's alone.
        average_decay: of the exponential average of the iterates that is the result.
        other_decays: further averages to look at in a search.
        microbatch_size: examples at a time.
    """

    target_epsilon: float = 2.0
    delta: float = 1e-5
    steps: int = 352
    batch_size: int = 4096
    views: int = 4
    learning_rate: float = 0.5
    warm_up: int = 0
    rate: str = "constant"
    last_rate: float = 0.0
    momentum: float = 0.0
    l2_clip_norm: float = 1.0
    bands: int = 1
    alpha: float = 1.0
    public_batch_size: int = 256
    public_mix: bool = False
    geometry: str = "none"
    damping: float = 1.0
    largest_side: int = 1024
    cutout: int = 0
    beside: float = 0.0
    beside_seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    beside_in_loss: bool = True
    average_decay: float = 0.99
    other_decays: tuple[float, ...] = ()
    microbatch_size: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """All of them, and the seeds of the final runs."""

    name: str
    network: WideResNet
    public: PublicSettings
    private: PrivateSettings
    seeds: tuple[int, ...] = (1, 2, 3)

    def __post_init__(self):
        def check(condition: bool, expected: str):
            if not condition:
                raise SettingsError(f"{self.name}: {expected}")

        public, private = self.public, self.private
        check(public.mix in MIXES, f"public.mix must be one of {', '.join(MIXES)}.")
        check(private.rate in RATES, f"private.rate must be one of {', '.join(RATES)}.")
        kinds = ", ".join(GEOMETRIES)
        check(private.geometry in GEOMETRIES, f"private.geometry must be one of {kinds}.")
        check(self.network.dtype in DTYPES, f"network.dtype must be one of {', '.join(DTYPES)}.")
        for table, names in (
            (public, "batch_size learning_rate mix_concentration"),
            (private, "target_epsilon delta steps batch_size views learning_rate l2_clip_norm"),
            (private, "bands public_batch_size microbatch_size damping largest_side"),
        ):
            for name in names.split():
                value = getattr(table, name)
                check(value > 0, f"{name} must be positive, got {value}.")
        for table, names in (
            (public, "steps stop weight_decay cutout colours warp sharpness"),
            (private, "warm_up cutout beside"),
        ):
            for name in names.split():
                value = getattr(table, name)
                check(value >= 0, f"{name} must be 0 or more, got {value}.")
        for table, names in (
            (public, "momentum average_decay smoothing"),
            (private, "momentum average_decay"),
        ):
            for name in names.split():
                value = getattr(table, name)
                check(0 <= value < 1, f"{name} must be in [0, 1), got {value}.")
        for name, value in (
            ("private.alpha", private.alpha),
            ("private.last_rate", private.last_rate),
            ("public.distillation", public.distillation),
        ):
            check(0 <= value <= 1, f"{name} must be in [0, 1], got {value}.")
        check(private.alpha > 0, "private.alpha must be above 0, or nothing private is learned.")

    def member_seeds(self, seed: int) -> tuple[int, ...]:
        """Returns the seeds of the public starts of a run's members: no two runs share one."""
        members = self.network.members
        return tuple(range(members * seed, members * (seed + 1)))

    def public_identity(self) -> records.Record:
        """Returns the values that decide the public start of one member, apart from its seed."""
        return {
            "network": _network_identity(self.network.member),
            "public": dataclasses.asdict(self.public),
        }

    def private_identity(self) -> records.Record:
        """Returns the values that decide a private run, apart from its seed and start."""
        private = dataclasses.asdict(self.private)
        # Public networks are known by their starts.
        del private["microbatch_size"], private["other_decays"], private["beside_seeds"]
        # Lines that were written before these settings existed keep their identity.
        if self.private.geometry == "none":
            del private["geometry"], private["damping"], private["largest_side"]
        if not self.private.public_mix:
            del private["public_mix"]
        if self.private.bands == 1:
            del private["bands"]
        if self.private.beside == 0:
            del private["beside"], private["beside_in_loss"]
        return {"network": _network_identity(self.network), "private": private}


def _network_identity(network: WideResNet) -> records.Record:
    values = dataclasses.asdict(network)
    if network.members == 1:
        del values["members"]
    return values


TABLES = {"network": WideResNet, "public": PublicSettings, "private": PrivateSettings}


def load(path: Path, changes: Sequence[str] = ()) -> RecordSettings:
    """Reads a settings file and changes some of its values.

    Args:
        path: the file.
        changes: like `private.views=8`; the value is TOML, or a word.
    """
    path = Path(path)
    values = settings_files.read(path, TABLES)
    for change in changes:
        name, equals, text = change.partition("=")
        table, dot, key = name.partition(".")
        if not (equals and dot and table in TABLES):
            raise SettingsError(
                f"expected a change like private.views=8 in one of {', '.join(TABLES)}, got "
                f"{change!r}."
            )
        values.setdefault(table, {})[key] = _value(text)
    known = {"seeds", *TABLES}
    if unknown := sorted(set(values) - known):
        raise SettingsError(
            f"{path.stem}: unknown {unknown[0]!r}. Known are: {', '.join(sorted(known))}."
        )
    made = {name: _make(kind, name, values.get(name, {})) for name, kind in TABLES.items()}
    if "seeds" in values:
        made["seeds"] = tuple(values["seeds"])
    return RecordSettings(name=path.stem, **made)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _make(kind: type, table: str, values: dict[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    checked = {}
    for key, value in values.items():
        if key not in fields:
            raise SettingsError(
                f"unknown setting {table}.{key}. Known are: {', '.join(sorted(fields))}."
            )
        default = fields[key].default
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if isinstance(default, tuple) and isinstance(value, list):
            value = tuple(value)
        if type(value) is not type(default):
            raise SettingsError(
                f"{table}.{key} must be of type {type(default).__name__}, got {value!r}."
            )
        checked[key] = value
    try:
        return kind(**checked)
    except ValueError as error:
        raise SettingsError(f"{table}: {error}") from error
