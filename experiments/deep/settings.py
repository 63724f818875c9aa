"""Settings of a run: one TOML file, checked before anything is computed.

A file may name another one in `extends`, whose values it overrides.
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments import datasets, records, settings_files
from experiments.settings_files import SettingsError

ALGORITHMS = ("cold", "warm", "pda")
OPTIMIZERS = ("adam", "sgd")
VOCABULARIES = ("public", "train")
PUBLIC_TEXTS = ("other", "split")
CONFIGS = Path(__file__).parents[1] / "configs"
BASE = "base"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartSettings:
    """Pre-training on public data; see `mirrordp.warm_start`.

    `optimizer` is `adam`, or `sgd` with the gradient clipped to norm 1. With `average_decay` an
    exponential average of the iterates is taken, with 0 the last one.
    """

    optimizer: str = "adam"
    learning_rate: float = 1e-3
    batch_size: int = 64
    patience: int = 20
    max_epochs: int = 300
    average_decay: float = 0.0
    refit: bool = True

    def identity(self) -> dict[str, Any]:
        """Returns the values that decide the start.

        Adam and no average are left out, as in lines from before they could be chosen.
        """
        values = dataclasses.asdict(self)
        for name, usual in (("optimizer", "adam"), ("average_decay", 0.0)):
            if values[name] == usual:
                del values[name]
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The values that a sweep tries.

    Attributes:
        learning_rates: where the search begins; it goes on along {1, 2, 5}·10^i until the best
            rate has a neighbour on either side.
        decays: values of K.
        rate_from: the settings file whose best rate K is searched at, for PDA-DPMD.
        seed: the one seed of a sweep.
    """

    learning_rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    rate_from: str | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSettings:
    """One row of the table.

    Attributes:
        name: path of the file below `experiments/configs`, without its ending.
        dataset: `cifar10`, `emnist` or `wikitext2`.
        algorithm: `cold` or `warm` DP-SGD, or `pda`: PDA-DPMD in the first-order form.
        noise_multiplier: σ; or
        target_epsilon: ε from which σ follows, by PLD accounting.
        delta: δ.
        batch_size: expected size of a Poisson batch.
        epochs: n·epochs / batch_size is the number of steps, rounded down.
        learning_rate: η.
        decay: K of α_t = cos(πt / 2K), for `pda`.
        decay_unit: what K counts: `epochs` or `steps`.
        l2_clip_norm: C.
        noisy_clip_norm: clip of the released gradient; 0 for none.
        scale_noise: α(g + b) if true, αg + b if not.
        public_batch_size: public examples of a step of PDA-DPMD.
        augment_public: random changes of public images, or dropout on public text (see `tasks`), in
            the warm start and in ∇Ψ.
        average_decay: decay of the exponential average that is evaluated beside the last iterate.
        holdout: private images that judge a sweep.
        vocabulary: of text, see `experiments.datasets.prepare`.
        public_text: of text, likewise.
        seeds: of the final runs.
        together: how many runs train in one compiled call.
        about: what the run is there for.
    """

    name: str
    dataset: str
    algorithm: str
    delta: float
    batch_size: int
    epochs: float
    learning_rate: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    decay: float | None = None
    decay_unit: str = "epochs"
    l2_clip_norm: float = 1.0
    noisy_clip_norm: float = 0.0
    scale_noise: bool = True
    public_batch_size: int = 256
    augment_public: bool = False
    average_decay: float = 0.999
    holdout: int = 0
    vocabulary: str = "train"
    public_text: str = "split"
    seeds: tuple[int, ...] = (1, 2, 3)
    together: int = 1
    about: str = ""
    warm_start: WarmStartSettings = WarmStartSettings()
    sweep: SweepSettings = SweepSettings()

    def __post_init__(self):
        def check(condition: bool, expected: str):
            if not condition:
                raise SettingsError(f"{self.name}: {expected}")

        check(
            self.dataset in datasets.NAMES, f"dataset must be one of {', '.join(datasets.NAMES)}."
        )
        check(self.algorithm in ALGORITHMS, f"algorithm must be one of {', '.join(ALGORITHMS)}.")
        check(
            (self.noise_multiplier is None) != (self.target_epsilon is None),
            "expected exactly one of noise_multiplier and target_epsilon.",
        )
        check(
            (self.decay is not None) == (self.algorithm == "pda"),
            f"decay (K) belongs to pda and to nothing else, got {self.decay!r} for "
            f"{self.algorithm}.",
        )
        check(
            self.warm_start.optimizer in OPTIMIZERS,
            f"[warm_start] optimizer must be one of {', '.join(OPTIMIZERS)}.",
        )
        check(self.decay_unit in ("epochs", "steps"), "decay_unit must be epochs or steps.")
        check(
            self.vocabulary in VOCABULARIES,
            f"vocabulary must be one of {', '.join(VOCABULARIES)}, got {self.vocabulary!r}.",
        )
        check(
            self.public_text in PUBLIC_TEXTS,
            f"public_text must be one of {', '.join(PUBLIC_TEXTS)}, got {self.public_text!r}.",
        )
        check(0 < self.delta < 1, f"delta must be between 0 and 1, got {self.delta}.")
        here, warm, sweep = ("", self), ("[warm_start] ", self.warm_start), ("[sweep] ", self.sweep)
        for (table, owner), names in (
            (here, "batch_size epochs learning_rate noise_multiplier target_epsilon decay"),
            (here, "l2_clip_norm public_batch_size together"),
            (warm, "learning_rate batch_size patience max_epochs"),
            (sweep, "learning_rates decays"),
        ):
            for name in names.split():
                values = getattr(owner, name)
                for value in values if isinstance(values, tuple) else (values,):
                    check(
                        value is None or 0 < value < math.inf,
                        f"{table}{name} must be positive and finite, got {value}.",
                    )
        for (table, owner), name in ((here, "noisy_clip_norm"), (here, "holdout"), (sweep, "seed")):
            value = getattr(owner, name)
            check(0 <= value < math.inf, f"{table}{name} must be 0 or more, got {value}.")
        for table, owner in (here, warm):
            value = owner.average_decay
            check(0 <= value < 1, f"{table}average_decay must be in [0, 1), got {value}.")
        check(bool(self.seeds), "seeds must name at least one seed.")
        check(
            min(self.seeds) >= 0 and len(set(self.seeds)) == len(self.seeds),
            f"seeds must be different and 0 or more, got {list(self.seeds)}.",
        )
        check(
            self.sweep.seed not in self.seeds,
            "a final run must have another seed than the sweep that chose its settings.",
        )

    def identity(self) -> dict[str, Any]:
        """Returns the values that decide the numbers of one run, apart from its seed."""
        values = dataclasses.asdict(self)
        for unimportant in ("name", "seeds", "together", "about", "sweep", "holdout"):
            del values[unimportant]
        values["warm_start"] = self.warm_start.identity()
        if self.algorithm == "cold":
            del values["warm_start"]
        if self.algorithm != "pda":
            del values["public_batch_size"], values["decay"], values["decay_unit"]
        return values


TABLES = {"warm_start": WarmStartSettings, "sweep": SweepSettings}


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Returns settings files; a folder stands for all files below it except base files."""
    found = []
    for path in paths:
        if path.is_dir():
            below = sorted(file for file in path.rglob("*.toml") if file.stem != BASE)
            if not below:
                raise SettingsError(f"the folder {path} holds no settings file (*.toml).")
            found += below
        else:
            found.append(path)
    return found


def load(path: Path) -> DeepSettings:
    """Reads a settings file; the file that it extends provides the other values."""
    path = Path(path)
    values = settings_files.read(path, TABLES)
    try:
        name = str(path.resolve().relative_to(CONFIGS.resolve()).with_suffix(""))
    except ValueError:
        name = path.stem
    for key, kind in TABLES.items():
        below = values.get(key, {})
        if not isinstance(below, dict):
            raise SettingsError(f"{name}: expected a table [{key}], got {below!r}.")
        values[key] = _make(kind, f"{name}, [{key}]", below)
    return _make(DeepSettings, name, values | {"name": name})


def set_values(path: Path, **values: float) -> None:
    """Replaces numbers in a settings file."""
    text = path.read_text()
    for key, value in values.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value:g}", text)
        if count != 1:
            raise SettingsError(f"{path.name}: expected one line '{key} = ...', found {count}.")
    path.write_text(text)


def point_id(settings: DeepSettings, *, kind: str, seed: int, num_private: int, label: str) -> str:
    """Identifies one run, so that it is computed once."""
    return _id(settings.identity(), kind=kind, seed=seed, num_private=num_private, label=label)


def line_id(line: records.Record) -> str:
    """Returns the `point_id` of the run that made a result line."""
    return _id(
        line["settings"],
        kind=line["kind"],
        seed=line["seed"],
        num_private=line["data"]["num_private"],
        label=line["data"]["label"],
    )


def _id(identity: dict[str, Any], **others: Any) -> str:
    # K = 200 and K = 200.0 are one run, however a TOML file or a JSON line spells it.
    return records.fingerprint(json.loads(json.dumps({**identity, **others}), parse_int=float))


def _make(kind: type, name: str, values: dict[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise SettingsError(
            f"{name}: unknown setting {unknown[0]!r}. Known are: {', '.join(sorted(fields))}."
        )
    missing = [
        field.name
        for field in fields.values()
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise SettingsError(f"{name}: the setting {missing[0]!r} is missing.")
    checked = {}
    for key, value in values.items():
        try:
            checked[key] = _as(fields[key].type, value)
        except TypeError as error:
            raise SettingsError(f"{name}: {key} must be {error}, got {value!r}.") from None
    return kind(**checked)


def _as(expected: Any, value: Any) -> Any:
    """Converts the value to the type of its field; a whole number is accepted as a float."""
    if isinstance(expected, types.UnionType):
        expected = next(kind for kind in typing.get_args(expected) if kind is not types.NoneType)
    if typing.get_origin(expected) is tuple:
        inner = typing.get_args(expected)[0]
        if not isinstance(value, list):
            raise TypeError(f"a list of {inner.__name__}")
        return tuple(_as(inner, one) for one in value)
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise TypeError(f"of type {expected.__name__}")
    return value
