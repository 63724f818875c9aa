"""`python -m experiments table`: the paper's Table 2 beside our result lines; computes no run.

Prints Markdown. `--readme` writes it between the markers of `experiments/README.md` and draws the
figures anew: one command after new results.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import sections
from experiments.deep import paper, results
from experiments.deep.results import Place
from experiments.deep.settings import ALGORITHMS, DeepSettings
from experiments.deep.sweep import sweep_of
from experiments.deep.titles import DATASETS, LABELS, order, title_of
from experiments.deep.training import alpha
from experiments.options import existing_file
from experiments.records import Record
from mirrordp.report import upwards

README = Path(__file__).parents[1] / "README.md"
NONE, MISSING = "–", "*missing*"
OURS = ("ours: ε RDP / PLD (δ)", "accuracy, last", "loss, last", "accuracy, averaged",
        "loss, averaged", "seeds", "η", "K", "data")  # fmt: skip
UNCHARGED = (
    "**Tuning is not charged to the privacy budget**, as in the paper: ε is that of one final run. "
    'The table "What was searched" lists the search.'
)


@dataclasses.dataclass(frozen=True)
class Found:
    """Result lines and settings files, as every table needs them."""

    lines: Sequence[Record]
    settings: dict[str, DeepSettings]

    def places(
        self, *, family: str = "", variants: bool = False
    ) -> list[tuple[Place, DeepSettings]]:
        """Returns the settings of a family in the order of the tables: data, noise, algorithm."""
        found = [
            (place, settings)
            for name, settings in self.settings.items()
            if (place := Place.of(name)) is not None
            and place.family == family
            and bool(place.variant) == variants
        ]
        return sorted(found, key=lambda item: order(item[0]))

    def final(self, settings: DeepSettings) -> list[Record]:
        """Returns the final runs of these settings, of all seeds."""
        return results.final_lines(self.lines, settings)

    def rows(self, settings: DeepSettings) -> list[list[Record]]:
        """Returns the final runs behind each row, one row per data set; one empty row for none."""
        return [results.own_seeds(lines, settings) for lines in _by_data(self.final(settings))]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns mean and standard deviation (n − 1) over seeds; None for the latter of one seed."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return statistics.fmean(values), spread


def over_seeds(values: Sequence[float | None], digits: int, *, sign: str = "") -> str:
    """Formats `mean ± std`; says so if there is no run or if one diverged."""
    if not values:
        return MISSING
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return f"{len(values) - len(finite)} of {len(values)} diverged"
    mean, spread = mean_and_std(finite)
    return f"{mean:{sign}.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _metric(lines: Sequence[Record], name: str) -> str:
    values = [line["final"].get(name) for line in lines]
    if name.endswith("accuracy"):
        return over_seeds([None if value is None else 100 * value for value in values], 2)
    return over_seeds(values, 4)


def _by_data(lines: Sequence[Record]) -> list[list[Record]]:
    """Groups lines by label, so that no mean mixes data; without lines, one empty list."""
    groups: dict[Any, list[Record]] = {}
    for line in lines:
        data = line["data"]
        groups.setdefault((data["label"], data["num_private"]), []).append(line)
    return list(groups.values()) or [[]]


def _ours(lines: Sequence[Record], settings: DeepSettings) -> list[str]:
    """Returns the cells under `OURS`, all of which belong to our own run."""
    metrics = [
        _metric(lines, f"{iterate}_test_{name}")
        for iterate in ("last", "average")
        for name in ("accuracy", "loss")
    ]
    there, wanted = len({line["seed"] for line in lines}), len(settings.seeds)
    return [
        _epsilon(lines),
        *metrics,
        f"{there}" if there >= wanted else f"{there} of {wanted}",
        f"{settings.learning_rate:g}",
        NONE if settings.decay is None else f"{settings.decay:g} {settings.decay_unit}",
        _data(lines),
    ]


def _epsilon(lines: Sequence[Record]) -> str:
    if not lines:
        return NONE
    privacy = lines[0]["privacy"]
    return (
        f"{upwards(privacy['epsilon_rdp'])} / {upwards(privacy['epsilon_pld'])} "
        f"({_power(privacy['delta'])})"
    )


def _power(delta: float) -> str:
    return f"{delta:.0e}".replace("e-0", "e-")


def _data(lines: Sequence[Record]) -> str:
    if not lines:
        return NONE
    data = lines[0]["data"]
    return "complete" if data["is_complete"] else f"**{data['label']}**"


def _has_incomplete(lines: Iterable[Record], dataset: str) -> bool:
    return any(
        line["settings"]["dataset"] == dataset and not line["data"]["is_complete"] for line in lines
    )


def _cell(cell: paper.Cell | None) -> str:
    if cell is None:
        return NONE
    return f"{cell.loss:.4f}" if cell.accuracy is None else f"{cell.accuracy:.2f} / {cell.loss:.4f}"


def table2(found: Found) -> str:
    """Tabulates every cell of the paper's Table 2 beside ours."""
    used: list[Record] = []
    parts = [
        "Accuracy in percent on the test split, mean ± standard deviation over seeds. The paper "
        "reports means over 3 runs without deviations; its ε comes from RDP accounting and is "
        "shown beside its own numbers only. " + UNCHARGED
    ]
    for dataset, title in DATASETS.items():
        # The paper's ε belongs to its number of examples, not to a sample's result.
        quote = not _has_incomplete(found.lines, dataset)
        heads = ["σ", "algorithm", *(["paper: ε (δ)"] if quote else []), "paper", *OURS]
        rows = []
        for setting in (s for s in paper.SETTINGS if s.dataset == dataset and not s.other_text):
            sigma = setting.noise_multiplier
            for algorithm in ALGORITHMS:
                cell = paper.CELLS[dataset, sigma, algorithm]
                quoted = [f"{setting.epsilon:g} ({_power(setting.delta)})"] if quote else []
                left = [f"{sigma:g}", LABELS[algorithm], *quoted, _cell(cell)]
                settings = found.settings.get(f"{dataset}/{algorithm}-s{sigma:g}")
                if settings is None:
                    rows.append([*left, MISSING + " settings", *[NONE] * (len(OURS) - 1)])
                    continue
                for lines in found.rows(settings):
                    rows.append([*left, *_ours(lines, settings)])
                    used += lines
        parts += [f"**{title}**", markdown(heads, rows)]
    return "\n\n".join([*parts, *_what_epsilon_means(used)])


def _what_epsilon_means(lines: Sequence[Record]) -> list[str]:
    """States the terms that belong to an ε, and what the guarantee does not cover."""
    if not lines:
        return []
    meanings = {(line["privacy"].get("adjacency"), line["privacy"].get("unit")) for line in lines}
    said = "; ".join(f"{adjacency} adjacency, unit: {unit}" for adjacency, unit in meanings)
    notes = [f"ε: Poisson sampling, {said}."]
    uncovered = sorted(
        {(line["data"]["label"], note) for line in lines for note in line["data"]["not_covered"]}
    )
    if uncovered:
        listed = [f"- {label}: {note}" for label, note in uncovered]
        notes.append("\n".join(["Not covered by the guarantee:", "", *listed]))
    return notes


def gains(found: Found) -> str:
    """Shows by paired seeds whether PDA-DPMD is below warm, and warm below cold."""
    rows = []
    for family in ("", "public-vocabulary", "other-text"):
        places = found.places(family=family)
        levels = dict.fromkeys((place.dataset, place.level) for place, _ in places)
        for dataset, level in levels:
            own = {p.algorithm: s for p, s in places if (p.dataset, p.level) == (dataset, level)}
            for worse, better in (("cold", "warm"), ("warm", "pda")):
                if worse in own and better in own:
                    rows += _gain_rows(found, own[worse], own[better], family)
    head = ["run", "difference in test loss", "paper", "ours, last", "ours, averaged", "pairs",
            "same start", "data"]  # fmt: skip
    return (
        "Test loss of the first minus that of the second, paired by seed; a positive number means "
        "that the second is better. Where two paired runs did not begin at the same warm start "
        "(because they ran in different processes on a GPU), the difference between their starts "
        "is part of the number.\n\n" + markdown(head, rows)
    )


def _gain_rows(
    found: Found, worse: DeepSettings, better: DeepSettings, family: str
) -> list[list[str]]:
    theirs = [paper.cell_of(settings) for settings in (worse, better)]
    quoted = NONE
    if family != "public-vocabulary" and theirs[0] and theirs[1]:
        quoted = f"{theirs[0].loss - theirs[1].loss:+.4f}"
    pairs = _pairs(found.final(worse), found.final(better))
    rows = []
    for lines in _by_data([line for _, line in pairs]):
        matched = [pair for pair in pairs if any(pair[1] is line for line in lines)]
        cells = [
            over_seeds(_differences(matched, f"{iterate}_test_loss"), 4, sign="+")
            for iterate in ("last", "average")
        ]
        rows.append(
            [
                title_of(worse),
                f"{worse.algorithm} − {better.algorithm}",
                quoted,
                *cells,
                str(len(matched)),
                _starts(matched),
                _data(lines),
            ]
        )
    return rows


def _pairs(first: Sequence[Record], second: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Returns pairs of runs of two settings with the same seed and data."""
    by_key = {_run_key(line): line for line in first}
    return [(by_key[key], line) for line in second if (key := _run_key(line)) in by_key]


def _differences(pairs: Sequence[tuple[Record, Record]], metric: str) -> list[float | None]:
    """Returns first minus second, or None if one of them diverged."""
    values = [[line["final"].get(metric) for line in pair] for pair in pairs]
    return [None if None in pair else pair[0] - pair[1] for pair in values]


def _starts(pairs: Sequence[tuple[Record, Record]]) -> str:
    """Says in how many pairs both runs began at the same warm start; nothing for cold."""
    if not pairs or pairs[0][0]["settings"]["algorithm"] == "cold":
        return NONE
    same = sum(results.same_start(*pair) for pair in pairs)
    return "all" if same == len(pairs) else f"{same} of {len(pairs)}"


def _run_key(line: Record) -> tuple:
    return line["seed"], line["data"]["label"], line["data"]["num_private"]


def _further(
    found: Found, chosen: Iterable[tuple[Place, DeepSettings]], **columns: Callable[..., str]
) -> str:
    """Returns our rows with further columns before them, and what their ε means."""
    rows = []
    used: list[Record] = []
    for _, settings in chosen:
        for lines in found.rows(settings):
            used += lines
            extra = [column(settings, lines) for column in columns.values()]
            rows.append(
                [title_of(settings), LABELS[settings.algorithm], *extra, *_ours(lines, settings)]
            )
    heads = [name.replace("_", " ") for name in columns]
    text = markdown(["run", "algorithm", *heads, *OURS], rows)
    return "\n\n".join([text, *_what_epsilon_means(used)])


def calibrated(found: Found) -> str:
    """Tabulates the runs whose σ follows from ε."""
    chosen = [item for item in found.places() if item[1].target_epsilon is not None]
    return (
        "σ is calibrated so that our run, on the examples we have, has the ε named in the first "
        "column. The paper's results at this ε come from more data.\n\n"
        + _further(found, chosen, σ=_sigma)
    )


def _sigma(settings: DeepSettings, lines: Sequence[Record]) -> str:
    return f"{lines[0]['privacy']['noise_multiplier']:.4g}" if lines else NONE


def reading_of_k(found: Found) -> str:
    """Compares K in epochs with K in steps."""
    chosen = [
        item
        for item in found.places() + found.places(variants=True)
        if item[1].algorithm == "pda"
        and item[0].variant in ("", "steps")
        and f"{item[0].dataset}/pda-{item[0].level}-steps" in found.settings
    ]
    chosen.sort(key=lambda item: order(item[0]))

    def paper_cell(settings: DeepSettings, lines: Sequence[Record]) -> str:
        return _cell(paper.cell_of(settings))

    def last_alpha(settings: DeepSettings, lines: Sequence[Record]) -> str:
        if not lines:
            return NONE
        step = lines[0]["privacy"]["num_steps"] - 1
        return f"{float(alpha(settings, lines[0]['data']['num_private'])(step)):.3f}"

    return (
        "α = cos(πt / 2K) with t in epochs or in steps, at the best K of each sweep. Where α is 0, "
        "no private data are read; ε still counts all steps and is then an upper bound.\n\n"
        + _further(found, chosen, paper=paper_cell, α_at_the_last_step=last_alpha)
    )


def ablations(found: Found) -> str:
    """Tabulates the runs that differ from the table's in one setting."""
    variants = [item for item in found.places(variants=True) if item[0].variant != "steps"]
    bases = {dataclasses.replace(place, variant="") for place, _ in variants}
    chosen = [item for item in found.places() if item[0] in bases] + variants
    chosen.sort(key=lambda item: order(item[0]))
    own = {place: settings for place, settings in chosen}

    def base_of(settings: DeepSettings) -> DeepSettings | None:
        place = Place.of(settings.name)
        if place is None or not place.variant:
            return None
        return own.get(dataclasses.replace(place, variant=""))

    def what(settings: DeepSettings, lines: Sequence[Record]) -> str:
        base = base_of(settings)
        return "as in the table" if base is None else _difference(base, settings)

    def change(settings: DeepSettings, lines: Sequence[Record]) -> str:
        base = base_of(settings)
        if base is None:
            return NONE
        pairs = _pairs(lines, found.final(base))
        if _same_warm_start(base, settings):
            pairs = [pair for pair in pairs if results.same_start(*pair)]
        if not pairs:
            return NONE
        return f"{over_seeds(_differences(pairs, 'average_test_loss'), 4, sign='+')} ({len(pairs)})"

    return (
        "The change in loss is the loss of the averaged iterate minus that of the table's run with "
        "the same seed; the number of such pairs is in brackets. Where an ablation leaves the warm "
        "start alone, only pairs that began at the same one count.\n\n"
        + _further(found, chosen, what_differs=what, change_in_loss=change)
    )


def _same_warm_start(one: DeepSettings, two: DeepSettings) -> bool:
    """Returns whether two settings pre-train alike."""
    return (one.warm_start, one.augment_public) == (two.warm_start, two.augment_public)


def _difference(base: DeepSettings, other: DeepSettings) -> str:
    """Says in words where two settings differ, apart from the searched values."""
    one, two = base.identity(), other.identity()
    as_it_is = (
        "no dropout on public text"
        if other.dataset == "wikitext2"
        else "public images not augmented"
    )
    words = {
        ("scale_noise", False): "noise not scaled by α",
        ("noisy_clip_norm", 0.0): "no second clip",
        ("augment_public", False): as_it_is,
    }
    found = []
    for key, value in two.items():
        if key in ("learning_rate", "decay") or one.get(key) == value:
            continue
        if isinstance(value, dict):
            before = one.get(key, {})
            inner = {k: v for k, v in value.items() if before.get(k) != v}
            found += [f"{key}.{k} = {v}" for k, v in inner.items()]
            if before.get("average_decay") and "average_decay" not in value:
                found.append("no average in the warm start")
        else:
            found.append(words.get((key, value), f"{key} = {value}"))
    return ", ".join(found) or "nothing"


def public_vocabulary(found: Found) -> str:
    """Tabulates WikiText-2 with a vocabulary that is covered, which the paper does not report."""

    def unknown(settings: DeepSettings, lines: Sequence[Record]) -> str:
        rate = lines[0]["data"].get("unknown_rate", {}).get("test") if lines else None
        return NONE if rate is None else f"{100 * rate:.1f}%"

    return (
        "An unknown word is easy to predict, so these losses can be compared with each other, but "
        "with those of no other table.\n\n"
        + _further(
            found, found.places(family="public-vocabulary"), unknown_words_of_the_test_text=unknown
        )
    )


def other_text(found: Found) -> str:
    """Tabulates WikiText-2 with other public text beside the paper's and Asi et al.'s values."""
    rows = []
    used: list[Record] = []
    for place, settings in found.places(family="other-text"):
        setting = paper.setting_of(settings)
        asi = {"cold": paper.ASI_COLD, "warm": paper.ASI_LARGE_AUX}.get(place.algorithm)
        quoted = NONE if setting is None or asi is None else f"{asi[setting.epsilon]:.4f}"
        epsilon = NONE if settings.target_epsilon is None else f"{settings.target_epsilon:g}"
        left = [epsilon, LABELS[place.algorithm], _cell(paper.cell_of(settings)), quoted]
        for lines in found.rows(settings):
            rows.append([*left, _sigma(settings, lines), *_ours(lines, settings)])
            used += lines
    heads = [
        "ε",
        "algorithm",
        "paper: loss",
        "Asi et al. (cold / LargeAux): loss",
        "ours: σ",
        *OURS,
    ]
    about = (
        "The paper, and Asi et al. as quoted there, use WikiText-103; the paper shows PDA-DPMD in "
        "a plot only. All runs have the ε of the first column: theirs by RDP on their data, ours "
        "by PLD on the sequences we have, from which our σ follows. The vocabulary, and the choice "
        "of public sequences to leave out, are read from private text without noise, as in the "
        "paper: **not covered by the guarantee**."
    )
    return "\n\n".join([about, markdown(heads, rows), *_what_epsilon_means(used)])


class _Untried(Exception):
    """A sweep asks for a run that has no line yet."""


@dataclasses.dataclass(frozen=True)
class _Replay:
    """A session of `sweep` that knows finished lines only."""

    found: Sequence[Record]

    def lines(self, points: Sequence[tuple[DeepSettings, int]], *, kind: str) -> list[Record]:
        chosen = []
        for settings, seed in points:
            identity = settings.identity()
            matching = [
                line
                for line in self.found
                if (line["kind"], line["seed"], line["settings"]) == (kind, seed, identity)
            ]
            if not matching:
                raise _Untried
            chosen.append(matching[0])
        return chosen


def _state_of_sweep(lines: Sequence[Record], settings: DeepSettings) -> str:
    try:
        best = sweep_of(settings, _Replay(lines))
    except _Untried:
        return "not finished"
    wanted = ", ".join(f"{_symbol(key)} = {value:g}" for key, value in best.items())
    if all(getattr(settings, key) == value for key, value in best.items()):
        return "finished"
    return f"finished with {wanted}, which is not in the settings file"


def _symbol(name: str) -> str:
    return {"learning_rate": "η", "decay": "K"}[name]


def searched(found: Found) -> str:
    """Lists what each sweep tried."""
    rows, untouched = [], []
    for name, settings in found.settings.items():
        lines = results.sweep_lines(found.lines, settings)
        if not lines:
            untouched.append(f"`{name}`")
            continue
        for group in _by_data(lines):
            by_rate: dict[float, list[str]] = {}
            for line in group:
                mark = "" if results.same_start(line, group[0]) else " †"
                by_rate.setdefault(line["settings"]["learning_rate"], []).append(
                    _tried(line, settings) + mark
                )
            tried = "; ".join(f"η = {rate:g}: " + ", ".join(t) for rate, t in by_rate.items())
            label = group[0]["data"]["label"]
            same_data = [line for line in found.lines if line["data"]["label"] == label]
            rows.append([f"`{name}`", tried, _state_of_sweep(same_data, settings), _data(group)])
    text = (
        "One seed each. A score is accuracy in percent / loss of the averaged iterate on the "
        "validation part: held-out private examples for images, the official validation split for "
        "text. Bold marks what the settings file has now. † marks a run from another warm start "
        "than the first of its row; the difference between the starts is part of its score. "
        "Choices by these scores, and the settings of the warm start, are **not charged**.\n\n"
        + markdown(["settings", "tried", "search", "data"], rows)
    )
    if untouched:
        text += "\n\nNo sweep result yet: " + ", ".join(untouched) + "."
    return text


def _tried(line: Record, settings: DeepSettings) -> str:
    values = line["settings"]
    text = f"K = {values['decay']:g}: " if values.get("decay") is not None else ""
    accuracy = line["final"].get("average_validation_accuracy")
    loss = line["final"].get("average_validation_loss")
    if loss is None or accuracy is None:
        text += "diverged"
    else:
        text += f"{100 * accuracy:.2f} / {loss:.4f}"
    chosen = values["learning_rate"] == settings.learning_rate
    chosen = chosen and values.get("decay") == settings.decay
    return f"**{text}**" if chosen else text


def cost(found: Found) -> str:
    """Tabulates seconds per run and in all, by machine."""
    main = {
        id(line): place.dataset
        for place, settings in found.places()
        if settings.noise_multiplier is not None
        for lines in found.rows(settings)
        for line in lines
    }
    sorts: dict[tuple[str, str], list[Record]] = {}
    for line in found.lines:
        machine = line["made_by"]["machine"]
        where = f"{machine.get('device', 'unknown')}, {machine.get('cores', '?')} cores"
        dataset = line["settings"]["dataset"]
        if id(line) in main:
            names = [f"Table 2: {DATASETS.get(dataset, dataset)}", "Table 2: all of it"]
        elif line["kind"] == "final":
            names = [f"other final runs: {DATASETS.get(dataset, dataset)}"]
        else:
            names = [f"sweeps: {DATASETS.get(dataset, dataset)}"]
        for name in [*names, "everything"]:
            sorts.setdefault((where, name), []).append(line)
    wanted = sum(
        len(settings.seeds)
        for _, settings in found.places()
        if settings.noise_multiplier is not None
    )
    order = [
        "Table 2: C",
        "Table 2: E",
        "Table 2: W",
        "Table 2: a",
        "other",
        "sweeps",
        "everything",
    ]
    rank = {key: next(i for i, o in enumerate(order) if key[1].startswith(o)) for key in sorts}
    rows = []
    for where, name in sorted(sorts, key=lambda key: (key[0], rank[key], key[1])):
        lines = sorts[where, name]
        seconds = [line["seconds"] for line in lines]
        labels = sorted({_data([line]) for line in lines})
        numbers = [f"{len(lines)}", f"{statistics.median(seconds):.0f}", f"{sum(seconds):.0f}"]
        rows.append([where, name, *numbers, "; ".join(labels)])
    packages = sorted(
        {
            f"{name} {version}"
            for line in found.lines
            for name, version in line["made_by"].get("packages", {}).items()
            if version
        }
    )
    return (
        "Wall-clock seconds, including compilation and warm start; runs that train together share "
        f"their time equally. The whole of Table 2 has {wanted} final runs.\n\n"
        + markdown(["machine", "what", "runs", "median per run, s", "total, s", "data"], rows)
        + ("\n\nMade with " + ", ".join(packages) + "." if packages else "")
    )


def unusable(found: Found, problems: Sequence[str]) -> str:
    """Lists damaged lines, and lines that no table shows."""
    notes = list(problems)
    shown = {id(line) for s in found.settings.values() for line in found.final(s)}
    shown |= {
        id(line) for s in found.settings.values() for line in results.sweep_lines(found.lines, s)
    }
    stale: dict[str, int] = {}
    for line in found.lines:
        if id(line) not in shown:
            key = f"{line['kind']} lines of {line['config']}"
            stale[key] = stale.get(key, 0) + 1
    notes += [
        f"{count} {key} have other settings than any settings file now; no table shows them."
        for key, count in stale.items()
    ]
    notes += [
        f"{name} is not named DATASET/[FAMILY-]ALGORITHM-LEVEL[-VARIANT]; no table shows it."
        for name in found.settings
        if Place.of(name) is None
    ]
    return "\n".join(f"- {note}" for note in notes) if notes else "None."


def blocks(
    lines: Sequence[Record], settings: dict[str, DeepSettings], problems: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Returns title and Markdown of every table, by the name in its markers."""
    found = Found(lines, settings)
    return {
        "table2": ("The paper's Table 2 beside ours", table2(found)),
        "gains": ("Cold against warm against PDA-DPMD", gains(found)),
        "calibrated": ("EMNIST with σ calibrated on the sample", calibrated(found)),
        "k": ("The unit of K", reading_of_k(found)),
        "ablations": ("Ablations", ablations(found)),
        "other-text": ("WikiText-2 with other public text", other_text(found)),
        "public-vocabulary": (
            "WikiText-2 with a vocabulary from public text",
            public_vocabulary(found),
        ),
        "searched": ("What was searched", searched(found)),
        "cost": ("Cost", cost(found)),
        "unusable": ("Lines that no table shows", unusable(found, problems)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables, or refreshes them in the README."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of results")
    parser.add_argument(
        "--readme", type=existing_file, nargs="?", const=README, metavar="FILE",
        help="rewrite the marked blocks of this file (experiments/README.md) and draw the figures",
    )  # fmt: skip
    parser.add_argument("--no-figures", action="store_true", help="with --readme: tables only")
    arguments = parser.parse_args(argv)
    lines, problems = results.collect(arguments.results)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    configurations = results.configurations()
    tables = blocks(lines, configurations, problems)
    if arguments.readme is None:
        print("\n\n".join(f"## {title}\n\n{text}" for title, text in tables.values()))
        return 0
    contents = {name: text for name, (_, text) in tables.items()}
    if not arguments.no_figures:
        from experiments.deep import figures

        drawn = figures.draw_all(lines, configurations, arguments.results)
        contents["figures"] = figures.links(drawn, arguments.readme.parent)
    text = arguments.readme.read_text(encoding="utf-8")
    try:
        for name, content in contents.items():
            text = sections.replaced(text, f"deep {name}", f"\n{content}\n\n")
    except ValueError as error:
        print(f"error: {arguments.readme.name}: {error}", file=sys.stderr)
        return 2
    arguments.readme.write_text(text, encoding="utf-8")
    return 0
