"""Kills runs with SIGKILL at random moments and resumes them.

    python -m tests.soak_crash --kills 50

Half of the kills come from outside after a random time, half from within a random file operation
(a write is then cut in the middle). Checked after every kill and at every end:

- the ledger covers every step that was begun;
- one noise state, and one batch, never meet two different data sets, parameters or sums;
- the result equals that of the run that was never interrupted, bit for bit;
- everything was charged exactly once, and nothing secret is left behind.

The process that kills imports everything and then forks, so that a victim costs a second or two.
"""

import contextlib
import csv
import hashlib
import inspect
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp
from mirrordp import cli
from mirrordp.linear import descent as linear
from mirrordp.spending.ledger import FileLedger
from mirrordp.tables import fitting as tabular
from mirrordp.training import engine
from mirrordp.training.checkpoint import checkpoint_files
from tests import tools
from tests.soak import run_soak

# What they do to a file decides where a crash can hit.
OPERATIONS = ("write", "fsync", "replace", "unlink", "truncate", "ftruncate")
_write = os.write


def digest(*trees) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def note(folder: Path, **line) -> None:
    """One line in the log of what was begun; survives a kill, as it is in the kernel's hands."""
    handle = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _write(handle, json.dumps(line).encode() + b"\n")
    os.close(handle)


def log(folder: Path) -> list[dict]:
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def die_at(number: int, rng: random.Random) -> None:
    """The `number`-th file operation is the last."""
    left = [number]

    def doomed(name: str) -> Callable:
        operation = getattr(os, name)

        def perform(*args, **options):
            left[0] -= 1
            if left[0] > 0:
                return operation(*args, **options)
            if name == "write":
                operation(args[0], bytes(args[1])[: rng.randrange(len(args[1]) + 1)])
            elif rng.random() < 0.5:
                operation(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        return perform

    for name in OPERATIONS:
        setattr(os, name, doomed(name))


def in_child(work: Callable[[], None], kill_after: float | None = None) -> bool:
    """Runs `work` in a child, killed after so many seconds of it; whether it came to its end."""
    ready, begin = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; its backend has not started yet
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ready)
            jax.devices()
            _write(begin, b"!")
            os.close(begin)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(begin)
    os.read(ready, 1)
    os.close(ready)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0, "a run failed, and nobody had killed it"
    return True


# Training.


PRIVATE = mirrordp.PrivateData(tools.features())
PUBLIC = mirrordp.PublicData(tools.features(rows=10, seed=1))
START = np.array([0.5, -0.5, 0.25], np.float32)


def note_calls(folder: Path) -> None:
    """Makes every compiled call note what it is about to compute."""
    real = engine._run_passes
    signature = inspect.signature(real)

    def noted(*args):
        given = signature.bind(*args).arguments
        state, inputs = given["state"], given["inputs"]
        note(
            folder,
            noise=digest(state.noise_state),
            batch=digest(inputs.numbers),
            data=digest(given["private"]),
            sums=digest(state.params, given["partial_sum"]),
            steps=int(np.max(state.step)) + int(inputs.is_last.sum()),
            runs=len(inputs.alpha),
        )
        return real(*args)

    engine._run_passes = noted


def train(folder: Path) -> None:
    """Trains in a folder, going on with what is there, and leaves a digest of the result.

    The noise is correlated, so that its state is more than a key, and checkpoints are rare.
    """
    note_calls(folder)
    sampling = mirrordp.privacy.CyclicPoissonSampling.for_batch_size(
        5, num_examples=tools.ROWS, num_groups=3
    )
    noise = mirrordp.privacy.BandedNoise((1.0, 0.5, 0.2))
    checkpoint = mirrordp.Checkpoint(folder / "run", every=2, resume=True, keep=True)
    finish(folder, checkpoint, lambda: tools.train(
        tools.squared_distance,
        START,
        PRIVATE,
        PUBLIC,
        mechanism=tools.mechanism(sampling=sampling, noise=noise),
        optimizer=optax.adam(0.1),
        alpha=0.5,
        average=mirrordp.UniformAverage(),
        steps_per_call=2,
        seed=11,
        checkpoint=checkpoint,
    ))  # fmt: skip


def train_users(folder: Path) -> None:
    """The same for a federated run."""
    note_calls(folder)
    rows = [tools.features(rows=1 + number % 4, seed=number) for number in range(tools.ROWS)]
    checkpoint = mirrordp.Checkpoint(folder / "run", resume=True, keep=True)
    finish(folder, checkpoint, lambda: tools.federated_train(
        tools.squared_distance,
        START,
        mirrordp.PrivateClients.from_users(rows, max_examples_per_user=4),
        PUBLIC,
        mechanism=tools.mechanism(unit="user"),
        client_learning_rate=0.1,
        alpha=0.5,
        adaptive_clip=mirrordp.training.AdaptiveClip(),
        steps_per_call=2,
        users_per_pass=8,
        seed=11,
        checkpoint=checkpoint,
    ))  # fmt: skip


def train_sweep(folder: Path) -> None:
    """The same for a sweep of two runs, which is charged to a budget."""
    note_calls(folder)
    checkpoint = mirrordp.Checkpoint(folder / "run", resume=True, keep=True)
    with mirrordp.Budget.open(folder / "budget") as budget:
        finish(folder, checkpoint, lambda: tools.train_sweep(
            tools.squared_distance,
            START,
            PRIVATE,
            PUBLIC,
            runs=[mirrordp.SweepRun(alpha=0.5, seed=11), mirrordp.SweepRun(alpha=0.9, seed=12)],
            mechanism=tools.mechanism(),
            optimizer=optax.adam(0.1),
            steps_per_call=2,
            spend=budget,
            checkpoint=checkpoint,
        ))  # fmt: skip


def finish(folder: Path, checkpoint: mirrordp.Checkpoint, begin: Callable) -> None:
    """Runs to the end, or is done with a run whose result is there."""
    if (folder / "result").exists():
        return checkpoint.remove()
    for state, found in begin():
        infos = found if isinstance(found, list) else [found]
        norms = [[float(norm) for norm in info.noisy_grad_norm] for info in infos]
        result = [digest(state), infos[0].step, norms]
    temporary = folder / "result.part"
    temporary.write_text(json.dumps(result))
    os.rename(temporary, folder / "result")
    checkpoint.remove()


def ledger_of(folder: Path) -> FileLedger:
    on_budget = (folder / "budget").exists()
    return FileLedger.read(folder / ("budget" if on_budget else "run") / "ledger.jsonl")


def check_train(folder: Path) -> None:
    """What must hold after any kill."""
    begun = log(folder)
    for name in ("noise", "batch"):
        met: dict[str, tuple] = {}
        for line in begun:
            # A batch may by chance be drawn in two steps; which step it was is part of its name.
            key = f"{line[name]} {line['steps']}" if name == "batch" else line[name]
            what = (line["data"], line["sums"], line["batch"])
            assert met.setdefault(key, what) == what, f"one {name} met two different sums"
    if begun:
        charged = {r["run"]: r["stop"] for r in ledger_of(folder).records if "stop" in r}
        assert len(charged) == begun[0]["runs"], "a run was begun and not charged"
        begun_steps = max(line["steps"] for line in begun)
        assert min(charged.values()) >= begun_steps, "a step was begun and not charged"


def check_train_end(folder: Path, reference: Path) -> None:
    assert (folder / "result").read_text() == (reference / "result").read_text()
    mine, theirs = ledger_of(folder), ledger_of(reference)
    assert mine.event == theirs.event, "not charged exactly once"
    seeds = [record["kind"] for record in mine.records].count("seed")
    assert seeds == (2 if (folder / "budget").exists() else 0), "a seed was not noted once"
    left = {path.name for path in (folder / "run").iterdir()}
    assert left <= {"lock", "ledger.jsonl", "ledger.jsonl.head", "ledger.jsonl.lock"}, left


# Fitting.


def write_tables(folder: Path) -> None:
    for name, rows, seed in (("private", 300, 0), ("public", 40, 1)):
        rng = np.random.default_rng(seed)
        x, z = rng.normal(size=rows), rng.normal(size=rows)
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["x", "z", "y"])
            writer.writerows(zip(x, z, x - 2 * z + 0.1 * rng.normal(size=rows), strict=True))


def fit(folder: Path, tables: Path) -> None:
    """One `mirrordp fit` on a budget, resumed if there is something to resume."""
    real = linear.private_descent

    def noted(family, theta, rows, mechanism, **options):
        note(
            folder,
            noise=digest(options["key"]),
            data=digest(rows.features, rows.targets, theta),
            steps=mechanism.num_steps,
        )
        return real(family, theta, rows, mechanism, **options)

    linear.private_descent = noted
    command = [
        *("fit", "--private", tables / "private.csv", "--public", tables / "public.csv"),
        *("--target", "y", "--task", "regression", "--epsilon", "2.5", "--seed", "3", "--json"),
        *("--budget", folder / "budget", "--out", folder / "model"),
    ]
    if checkpoint_files(folder / "model.run") or (folder / "model").exists():
        command.append("--resume")
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        assert cli.main([str(word) for word in command]) == 0


def check_fit(folder: Path) -> None:
    begun = log(folder)
    assert len({line["noise"] for line in begun}) <= 1
    assert len({line["data"] for line in begun}) <= 1, "one noise met two different sums"
    records = FileLedger.read(folder / "budget" / "ledger.jsonl").records
    charged = sum(record["stop"] - record["start"] for record in records if "stop" in record)
    if begun:
        assert charged == begun[0]["steps"], "begun and not charged, or charged twice"


def check_fit_end(folder: Path, reference: Path) -> None:
    mine, theirs = (tabular.TableModel.load(path / "model") for path in (folder, reference))
    assert mine.coefficients.tobytes() == theirs.coefficients.tobytes()
    assert mine.intercepts.tobytes() == theirs.intercepts.tobytes()
    check_fit(folder)
    assert not (folder / "model.run").exists(), "the randomness was left behind"


def soak(kills: int, seed: int, root: Path) -> dict[str, int]:
    """Kills until there were enough kills of each kind of run; returns what happened."""
    rng = random.Random(seed)
    # The references compile; the victims then load what they compiled.
    jax.config.update("jax_compilation_cache_dir", str(root / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    tables = root / "tables"
    tables.mkdir()
    write_tables(tables)

    def budget(folder: Path, data=tables / "private.csv") -> None:
        mirrordp.Budget.create(folder / "budget", epsilon=3, delta=1e-6, data=data).close()

    kinds = {
        "rows": (None, train, check_train, check_train_end),
        "users": (None, train_users, check_train, check_train_end),
        "sweep": (
            lambda folder: budget(folder, PRIVATE),
            train_sweep,
            check_train,
            check_train_end,
        ),
        "fit": (budget, lambda folder: fit(folder, tables), check_fit, check_fit_end),
    }
    happened = {"kills": 0, "runs": 0, "resumed": 0}
    lasting, operations = {}, {}
    for name, (prepare, work, _, _) in kinds.items():
        reference = root / f"reference-{name}"
        reference.mkdir()
        count = root / f"count-{name}"

        def counted(reference=reference, work=work, prepare=prepare, count=count):
            if prepare is not None:
                prepare(reference)
            calls = [0]
            for operation in OPERATIONS:
                real = getattr(os, operation)

                def perform(*args, real=real, **options):
                    calls[0] += 1
                    return real(*args, **options)

                setattr(os, operation, perform)
            began = time.monotonic()
            work(reference)
            count.write_text(json.dumps([calls[0], time.monotonic() - began]))

        assert in_child(counted)
        operations[name], lasting[name] = json.loads(count.read_text())
    # Several kills in a row of one kind, so that some hit a run that was resumed.
    wanted = [name for _ in range(kills) for name in kinds for _ in range(3)][:kills]
    while wanted:
        name = wanted[0]
        prepare, work, check, check_end = kinds[name]
        folder = root / f"run-{happened['runs']}"
        folder.mkdir()
        if prepare is not None:
            in_child(lambda prepare=prepare, folder=folder: prepare(folder))
        happened["runs"] += 1
        finished = False
        while not finished:
            doomed = bool(wanted) and wanted[0] == name
            from_within = rng.random() < 0.5
            is_resumed = bool(log(folder))
            # A run that is resumed has less before it; a moment after its end would kill nobody.
            at = rng.randrange(1, operations[name] // (1 + is_resumed) + 1)
            chance = random.Random(rng.random())

            def attempt(work=work, folder=folder, doomed=doomed, within=from_within, at=at,
                        chance=chance):  # fmt: skip
                if doomed and within:
                    die_at(at, chance)
                work(folder)

            last = lasting[name] / (1 + is_resumed)
            after = rng.uniform(0, last) if doomed and not from_within else None
            happened["resumed"] += is_resumed
            began = time.monotonic()
            finished = in_child(attempt, kill_after=after)
            check(folder)
            if finished:
                # The reference compiled; this one did not.
                lasting[name] = min(lasting[name], time.monotonic() - began)
            if not finished:
                happened["kills"] += 1
                wanted.pop(0)
                if happened["kills"] % 25 == 0:
                    print(json.dumps(happened), flush=True)
        check_end(folder, root / f"reference-{name}")
        shutil.rmtree(folder)
    return happened


if __name__ == "__main__":
    run_soak(soak, __doc__.splitlines()[0], kills=50)
