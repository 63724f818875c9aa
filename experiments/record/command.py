"""`python -m experiments record`: the recipe's public starts and private runs.

    split FOLDER            write the images of a search, without test images
    public CONFIG           learn from public images; writes a start and a line
    private CONFIG          go on from that start under differential privacy; writes a line

With `--split FOLDER` validation images judge (a search); without it the test images do, once, at
the end of a final run. A run that has its line is skipped, so that a command can be repeated.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import datasets, records
from experiments.record import data as images, pretraining, private
from experiments.record.network import WideResNet, num_parameters
from experiments.record.settings import RecordSettings, SettingsError, load
from mirrordp.report import upwards
from mirrordp.types import Params

RESULTS = Path(__file__).parents[1] / "results" / "record"
PACKAGES = ("mirrordp", "jax", "jaxlib", "optax", "jax-privacy", "dp-accounting", "numpy")
EVALUATED_AT_A_TIME = 1000
WEIGHTS_TO_LOOK_AT = (0.25, 0.5, 1.0, 2.0)

Found = dict[str, float | None]


# Evaluation


def evaluate(
    network: WideResNet, params: Params, examples: images.Examples, beside: float = 0.0
) -> Found:
    """Returns accuracy and loss on scaled images, and accuracies of means of predictions.

    These are over an image and its mirrored copy (`mirrored_accuracy`), and over both of them in
    their place and shifted by a pixel to each side (`shifted_accuracy`).

    Args:
        network: that predicts.
        params: its parameters.
        examples: images, labels and, if public networks predict too, their log-probabilities.
        beside: the weight of these.
    """
    pixels, labels, *added = examples
    added = beside * (added[0] if added else np.zeros((1, 1), np.float32))
    added = np.broadcast_to(added, (len(pixels), network.num_classes))
    sums = np.zeros(4)
    for first in range(0, len(pixels), EVALUATED_AT_A_TIME):
        some = slice(first, first + EVALUATED_AT_A_TIME)
        sums += np.asarray(_sums(network, params, pixels[some], labels[some], added[some]))
    accuracy, mirrored, shifted, loss = (float(value) for value in sums / len(pixels))
    return {
        "accuracy": accuracy,
        "mirrored_accuracy": mirrored,
        "shifted_accuracy": shifted,
        "loss": finite(loss),
    }


@functools.partial(jax.jit, static_argnames="network")
def _sums(
    network: WideResNet, params: Params, pixels: jax.Array, labels: jax.Array, added: jax.Array
):
    def log_probabilities(row: int, column: int) -> jax.Array:
        """Sums over the images and their mirrored copies, moved by up to a pixel."""
        padded = jnp.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
        height, width = pixels.shape[1:3]
        moved = padded[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]
        return sum(
            jax.nn.log_softmax(network.predict(params, one) + added)
            for one in (moved, moved[:, :, ::-1])
        )

    logits, both = network.predict(params, pixels) + added, log_probabilities(0, 0)
    shifted = both + sum(log_probabilities(*by) for by in ((-1, 0), (1, 0), (0, -1), (0, 1)))
    losses = jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(labels)), labels]
    right = [(one.argmax(1) == labels).sum() for one in (logits, both, shifted)]
    return jnp.stack([*right, losses.sum()])


def log_probabilities_of(starts: Sequence[Path], dtype: str, pixels: np.ndarray) -> np.ndarray:
    """Returns mean log-probabilities [n, classes] of public networks, images and mirrored ones."""
    loaded = [load_start(path, dtype)[:2] for path in starts]
    parts = []
    for first in range(0, len(pixels), EVALUATED_AT_A_TIME):
        some = pixels[first : first + EVALUATED_AT_A_TIME]
        parts.append(sum(np.asarray(_mirrored(*one, some)) for one in loaded) / len(loaded))
    return np.concatenate(parts)


@functools.partial(jax.jit, static_argnames="network")
def _mirrored(network: WideResNet, params: Params, pixels: jax.Array) -> jax.Array:
    one, other = (network.predict(params, some) for some in (pixels, pixels[:, :, ::-1]))
    return (jax.nn.log_softmax(one) + jax.nn.log_softmax(other)) / 2


def finite(value: float) -> float | None:
    """Returns the number as JSON has it, or None if it is not finite."""
    return round(value, 5) if np.isfinite(value) else None


# Starts


def save_start(path: Path, network: WideResNet, params: Params, about: records.Record) -> None:
    """Writes parameters and the network that they belong to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(params))}
    partial = path.with_suffix(".partial.npz")
    about = about | {"network": {"depth": network.depth, "width": network.width}}
    np.savez(partial, allow_pickle=False, about=json.dumps(about), **leaves)
    partial.rename(path)


def load_start(path: Path, dtype: str) -> tuple[WideResNet, Params, records.Record]:
    """Returns the network, with activations of `dtype`, its parameters, and the notes."""
    if not path.exists():
        raise SettingsError(f"there is no start {path}. Make it with `record public` first.")
    with np.load(path) as arrays:
        about = json.loads(str(arrays["about"]))
        network = WideResNet(**about["network"], dtype=dtype)
        like = jax.eval_shape(network.init, jax.random.key(0))
        leaves, tree = jax.tree.flatten(like)
        params = tree.unflatten(
            [jnp.asarray(arrays[str(n)], jnp.float32) for n in range(len(leaves))]
        )
    return network, params, about


def load_starts(paths: Sequence[Path], dtype: str) -> tuple[WideResNet, Params, records.Record]:
    """Returns starts side by side as the members of one network; one start is itself."""
    loaded = [load_start(path, dtype) for path in paths]
    if len(loaded) == 1:
        return loaded[0]
    networks = {network for network, *_ in loaded}
    if len(networks) > 1:
        raise SettingsError("members must be equal networks; these starts are of different ones.")
    ids = [about["id"] for *_, about in loaded]
    network = dataclasses.replace(networks.pop(), members=len(loaded))
    return network, [params for _, params, _ in loaded], {"id": ", ".join(ids)}


def start_id(
    settings: RecordSettings, seed: int, teachers: Sequence[str], begin: str | None = None
) -> str:
    """Identifies a public start."""
    begun = [] if begin is None else [begin]
    return records.fingerprint([settings.public_identity(), seed, sorted(teachers), *begun])


# The two kinds of run


def run_public(
    settings: RecordSettings,
    parts: images.Images,
    starts: Path,
    *,
    seed: int,
    teachers: Sequence[Path] = (),
    begin: Path | None = None,
    deadline: float | None = None,
    shared: bool = False,
) -> records.Record:
    """Pre-trains one member, keeps the start, and reports how good it is.

    Args:
        settings: how.
        parts: the images.
        starts: folder to keep the start in.
        seed: of the member.
        teachers: files of starts whose mean prediction is a part of the targets.
        begin: file of the parameters to begin with; the end of a private run may be one.
        deadline: see `pretraining.pretrain`.
        shared: whether other work runs beside this.
    """
    member = settings.network.member
    loaded = [load_start(path, settings.network.dtype) for path in teachers]
    taught_by = [about["id"] for *_, about in loaded]
    first, begun_at = None, None
    if begin is not None:
        _, first, about = load_start(begin, settings.network.dtype)
        begun_at = about["id"]
    name = start_id(settings, seed, taught_by, begun_at)
    judges = parts.scaled(parts.judges)
    curve: list[list[Any]] = []
    best: tuple[float, int, Params | None] = (0.0, 0, None)
    is_search = parts.judged_by == "validation"
    every = max(1, settings.public.steps // (12 * pretraining.STEPS_PER_CALL))

    def on_progress(step: int, last: Params, average: Params) -> None:
        nonlocal best
        call = -(-step // pretraining.STEPS_PER_CALL)
        if is_search and call % every == 0:
            found = [evaluate(member, one, judges)["accuracy"] for one in (last, average)]
            curve.append([step, *found, round(time.monotonic() - begun, 1)])
            print(*curve[-1], flush=True)
            if (accuracy := found[1] or 0.0) > best[0]:
                best = accuracy, step, average

    begun = time.monotonic()
    params = pretraining.pretrain(
        member,
        settings.public,
        *parts.scaled(parts.public),
        seed=seed,
        start=first,
        teachers=[(network, params) for network, params, _ in loaded],
        on_progress=on_progress,
        deadline=deadline,
    )
    jax.block_until_ready(params)
    seconds = time.monotonic() - begun
    save_start(starts / f"{name}.npz", member, params, {"id": name, "seed": seed})
    if best[2] is not None:
        about = {"id": f"{name} at {best[1]}", "seed": seed}
        save_start(starts / f"{name}-best.npz", member, best[2], about)
    return {
        "kind": "search public" if is_search else "final public",
        "id": name,
        "config": settings.name,
        "seed": seed,
        "settings": settings.public_identity(),
        "teachers": taught_by,
        **({} if begun_at is None else {"begin": begun_at}),
        "num_parameters": num_parameters(params),
        "judged_by": parts.judged_by,
        "num_judges": len(judges[0]),
        "final": evaluate(member, params, judges),
        "curve": {"columns": ["step", "last", "average", "seconds"], "rows": curve},
        "seconds": round(seconds, 1),
        "made_by": made_by(shared),
    }


def run_private(
    settings: RecordSettings,
    parts: images.Images,
    starts: Sequence[Path],
    *,
    seed: int,
    beside: Sequence[Path] = (),
    keep: Path | None = None,
    deadline: float | None = None,
    shared: bool = False,
) -> records.Record:
    """Trains from a start; validation images judge along the way, test images at the end only.

    Args:
        settings: how.
        parts: the images.
        starts: files of the members' starts.
        seed: of the run.
        beside: files of public networks that predict too, with the weight `private.beside`.
        keep: folder for the parameters at the end, in a file named by the run's identity.
        deadline: see `private.train_privately`.
        shared: whether other work runs beside this.
    """
    network, params, about = load_starts(starts, settings.network.dtype)
    if network != settings.network:
        raise SettingsError(f"expected a start of {settings.network}, got one of {network}.")
    assert parts.private is not None
    judges, examples, public = map(parts.scaled, (parts.judges, parts.private, parts.public))
    weight, ids = settings.private.beside, []
    if weight:
        add = functools.partial(log_probabilities_of, beside, settings.network.dtype)
        ids = [load_start(path, "float32")[2]["id"] for path in beside]
        judges = *judges, add(judges[0])
        if settings.private.beside_in_loss:
            examples = *examples, weight * add(examples[0])
            public = *public, weight * add(public[0])
    found = private.mechanism(settings.private, len(parts.private[0]))
    is_search = parts.judged_by == "validation"
    curve: list[dict[str, Any]] = []

    def judged(iterates: dict[str, Params]) -> dict[str, Found]:
        return {name: evaluate(network, one, judges, weight) for name, one in iterates.items()}

    def on_progress(step: int, iterates: dict[str, Params]) -> None:
        if is_search:
            accuracies = {name: one["accuracy"] for name, one in judged(iterates).items()}
            curve.append({"step": step, **accuracies})
            print(step, accuracies, flush=True)

    begun = time.monotonic()
    iterates, seen = private.train_privately(
        network,
        settings.private,
        settings.public,
        found,
        params,
        examples,
        public,
        seed=seed,
        on_progress=on_progress,
        deadline=deadline,
    )
    average = f"average {settings.private.average_decay:g}"
    shown = iterates if is_search else {average: iterates[average]}
    name = private_id(settings, seed, about["id"], parts, ids)
    if keep is not None and settings.network.members == 1:
        save_start(keep / f"{name}.npz", network, iterates[average], {"id": name, "seed": seed})
    line = {
        "kind": "search" if is_search else "final",
        "id": name,
        "config": settings.name,
        "seed": seed,
        "start": about["id"],
        "settings": settings.private_identity(),
        "judged_by": parts.judged_by,
        "num_judges": len(judges[0]),
        "privacy": {
            "epsilon_pld": found.epsilon(settings.private.delta),
            "delta": settings.private.delta,
            "noise_multiplier": found.noise_multiplier,
            "num_steps": found.num_steps,
            "num_private": len(parts.private[0]),
            "adjacency": found.adjacency.value,
            "unit": found.unit,
            "tuning_charged": False,
        },
        "before": evaluate(network, params, judges),
        "final": judged(shown),
        "seen": seen,
        "curve": curve,
        "seconds": round(time.monotonic() - begun, 1),
        "made_by": made_by(shared),
    }
    if weight:
        line["beside"] = {
            "starts": ids,
            "public_alone": float(np.mean(judges[2].argmax(1) == judges[1])),
            "alone": evaluate(network, iterates[average], judges),
        }
        if is_search:
            line["beside"]["other weights"] = {
                str(other): evaluate(network, iterates[average], judges, other)
                for other in WEIGHTS_TO_LOOK_AT
            }
    return line


def private_id(
    settings: RecordSettings,
    seed: int,
    start: str,
    parts: images.Images,
    beside: Sequence[str] = (),
) -> str:
    """Identifies a private run."""
    assert parts.private is not None
    names = [sorted(beside)] if beside else []
    return records.fingerprint(
        [settings.private_identity(), seed, start, parts.judged_by, len(parts.private[0]), *names]
    )


@functools.cache
def made_by(shared: bool) -> records.Record:
    """Returns the versions of the code and the packages, and the machine."""
    root = Path(__file__).parents[2]
    sources = sorted([*root.glob("mirrordp/**/*.py"), *root.glob("experiments/record/*.py")])
    device = jax.devices()[0]
    where = f"{device.platform}, {device.device_kind}"
    if shared:
        where += " shared with other runs"
    return records.provenance(PACKAGES, sources, where)


# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the three commands."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    split = commands.add_parser("split", help="write the images of a search")
    split.add_argument("folder", type=Path)
    split.add_argument("--data-root", type=Path, help="folder of the data (or MIRRORDP_DATA)")
    split.add_argument("--holdout", type=int, default=4000, help="validation images (4000)")
    for name, about in (("public", "learn from public images"), ("private", "and from private")):
        command = commands.add_parser(name, help=about)
        command.add_argument("config", type=Path, help="a TOML file")
        command.add_argument(
            "--set", action="append", default=[], metavar="TABLE.NAME=VALUE", dest="changes"
        )
        where = command.add_mutually_exclusive_group()
        where.add_argument("--data-root", type=Path, help="folder of the data (or MIRRORDP_DATA)")
        where.add_argument("--split", type=Path, help="a search: the folder that `split` wrote")
        where.add_argument(
            "--synthetic", action="store_true", help="made-up images, to try the machinery"
        )
        command.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
        command.add_argument("--starts", type=Path, help="folder of starts (RESULTS/starts)")
        command.add_argument("--seeds", type=int, nargs="+", help="instead of the file's")
        command.add_argument("--max-seconds", type=float, help="give up after so long")
        command.add_argument("--shared", action="store_true", help="other work runs beside it")
        command.add_argument(
            "--teachers",
            type=Path,
            nargs="*",
            default=[],
            help="starts that the start learned from",
        )
        if name == "private":
            command.add_argument(
                "--start", type=Path, nargs="+", help="files of starts, instead of the seed's"
            )
            command.add_argument(
                "--beside",
                type=Path,
                nargs="*",
                default=[],
                help="starts that predict beside it, instead of private.beside_seeds'",
            )
        else:
            command.add_argument(
                "--begin", type=Path, help="begin there, and not with random parameters"
            )
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "split":
            sizes = images.write_split(
                arguments.data_root, arguments.folder, holdout=arguments.holdout
            )
            print(", ".join(f"{count:,} {part}" for part, count in sizes.items()))
        else:
            _run(arguments)
    except (SettingsError, datasets.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TimeoutError:
        print("stopped at --max-seconds; this run left no line.", flush=True)
        return 3
    return 0


def _run(arguments: argparse.Namespace) -> None:
    settings = load(arguments.config, arguments.changes)
    is_private = arguments.command == "private"
    if arguments.synthetic:
        parts = images.synthetic()
    elif arguments.split is not None:
        parts = images.read_split(arguments.split, private=is_private)
    else:
        parts = images.read_final(arguments.data_root)
    if arguments.synthetic and arguments.results == RESULTS:
        raise SettingsError("--synthetic needs --results FOLDER: made-up runs are no results.")
    starts = arguments.starts or arguments.results / "starts"
    kind = "search" if parts.judged_by == "validation" else "final"
    lines = arguments.results / f"{kind}.jsonl"
    there = {line["id"] for line in records.read(lines)}
    deadline = None
    if arguments.max_seconds is not None:
        deadline = time.monotonic() + arguments.max_seconds
    taught_by = [load_start(path, "float32")[2]["id"] for path in arguments.teachers]
    options: dict[str, Any] = {"deadline": deadline, "shared": arguments.shared}
    if is_private:
        others = arguments.beside or [
            starts / f"{start_id(settings, seed, taught_by)}.npz"
            for seed in settings.private.beside_seeds
        ]
        others = others if settings.private.beside else []
        options |= {"beside": others, "keep": arguments.results / "ends"}
        ids = [load_start(path, "float32")[2]["id"] for path in others]
        begun_at = None
    else:
        options |= {"begin": arguments.begin, "teachers": arguments.teachers}
        begin = arguments.begin
        begun_at = None if begin is None else load_start(begin, "float32")[2]["id"]
    for seed in arguments.seeds or settings.seeds:
        members = {
            member_seed: starts / f"{start_id(settings, member_seed, taught_by, begun_at)}.npz"
            for member_seed in settings.member_seeds(seed)
        }
        runs: list[tuple[bool, Callable[[], records.Record]]] = []
        if is_private:
            paths = arguments.start or list(members.values())
            about = load_starts(paths, "float32")[2]
            name = private_id(settings, seed, about["id"], parts, ids)
            run = functools.partial(run_private, settings, parts, paths, seed=seed, **options)
            runs.append((name in there, run))
        else:
            for member_seed, path in members.items():
                run = functools.partial(
                    run_public, settings, parts, starts, seed=member_seed, **options
                )
                runs.append((path.stem in there and path.exists(), run))
        for is_done, run in runs:
            if is_done:
                continue
            line = run()
            records.append(lines, line)
            print(_summary(line), flush=True)


def _summary(line: records.Record) -> str:
    def shown(found: Found) -> str:
        loss = "not finite" if found["loss"] is None else f"{found['loss']:.4f}"
        return f"{found['accuracy']:.2%} / {loss}"

    about = f"{line['config']} seed {line['seed']}, {line['judged_by']} images"
    if "privacy" not in line:
        return f"{about}: {shown(line['final'])} ({line['seconds']:.0f} s, start {line['id']})"
    values = ", ".join(f"{name} {shown(found)}" for name, found in line["final"].items())
    return (
        f"{about}, ε={upwards(line['privacy']['epsilon_pld'])}: {values} ({line['seconds']:.0f} s)"
    )
