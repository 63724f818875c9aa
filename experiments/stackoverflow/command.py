"""`python -m experiments stackoverflow`: what to run, in which order, and the command line.

Stages, each from what the one before it found:

    rates   warm start; server rate, client rate and clip norm on a grid, half of the rounds
    alpha   PDA-DPMD at these; i of alpha_t = cos(pi t / (i T)), half of the rounds
    final   cold, warm and PDA-DPMD over all rounds, several seeds: table and figure
    check   noise multiplier 0.4 as in the paper, a few rounds: the mechanics, not a result

Settings are chosen by the perplexity of held-out private users, which the guarantee does not
cover, and never by test users. Noise adds up from round to round, so that far fewer rounds would
choose a server rate that is too high for the final runs; and where the best rate is the smallest
or the largest that was tried, the next one is tried too. A finished run is one line; a run that
time cuts short leaves its state in a file and goes on from there in the next call.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp
from experiments import models, records
from experiments.options import at_least, existing_file
from experiments.stackoverflow import report
from experiments.stackoverflow.data import (
    NUM_PUBLIC_USERS,
    NUM_SPECIAL,
    PAD,
    SEQUENCE_LENGTH,
    VOCABULARY_SIZE,
    Prepared,
    prepare,
)
from mirrordp import Adjacency, FederatedStep, Mechanism, PoissonSampling, TrainOptions
from mirrordp.privacy import FixedSizeSampling
from mirrordp.privacy.accounting import Epsilon
from mirrordp.training.engine import randomness

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "stackoverflow"
PACKAGES = ("mirrordp", "jax", "jaxlib", "numpy", "optax", "jax-privacy", "dp-accounting")
COLD, WARM, PDA = "cold", "warm", "pda"
EPSILON, DELTA, PAPER_NOISE = 8.32, 1e-6, 0.4
USERS_PER_ROUND, CLIENT_BATCH = 100, 16
# The paper's grid and two smaller server rates: few users need more noise, and it lasts.
SERVER_RATES, CLIENT_RATES, CLIPS = (0.1, 0.3, 0.5, 1.0, 3.0), (0.1, 0.2, 0.5), (0.3, 1.0)
WARM_START_RATE = 5.0
MAX_EXTENSIONS = 12
DIVISORS = (2, 3, 4, 5, 8)
ROUNDS_PER_CALL = 5
clock = time.monotonic


class OutOfTime(Exception):
    """Raised when the time of this call is used up; unfinished work is on disk."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run. Jobs of equal `identity` are the same line."""

    stage: str
    method: str
    seed: int
    rounds: int
    server_rate: float
    client_rate: float
    clip: float
    divisor: int | None = None
    noise_multiplier: float = 0.0

    @property
    def identity(self) -> "Job":
        """The job without the last digits of a calibration, in which machines differ."""
        return dataclasses.replace(self, noise_multiplier=float(f"{self.noise_multiplier:.6g}"))


@dataclasses.dataclass(frozen=True)
class Task:
    """The settings and data that all runs of a call share."""

    prepared: Prepared
    network: models.Network
    size: dict[str, int]
    public_per_round: int | None
    total_rounds: int
    users_per_pass: int | None
    deadline: float
    out: Path
    fixed_size: bool = False

    @property
    def key(self) -> str:
        """Identifies the settings that every line shares."""
        shared = {"facts": self.prepared.facts, "size": self.size, "users": USERS_PER_ROUND}
        shared["public_per_round"] = self.public_per_round
        shared["warm_start"] = f"SGD, rate {WARM_START_RATE:g}, gradient clipped to norm 1"
        return records.fingerprint(shared | ({"fixed_size": True} if self.fixed_size else {}))


def _sampling(task: Task) -> dict[str, Any]:
    """Samples 100 users a round, or all if there are fewer: expected, or exactly.

    Exactly 100 are accounted for under replacement of a user, which has sensitivity 2C.
    """
    num_users = len(task.prepared.private)
    users = min(USERS_PER_ROUND, num_users)
    if task.fixed_size:
        sampling = FixedSizeSampling(batch_size=users, num_examples=num_users)
        return {"sampling": sampling, "adjacency": Adjacency.REPLACE}
    return {"sampling": PoissonSampling.for_batch_size(users, num_examples=num_users)}


def mechanism(task: Task, noise_multiplier: float) -> Mechanism:
    """Returns the mechanism in units of the clip norm.

    Made for the rounds of the final runs also where a run takes fewer: all are one program.
    """
    return Mechanism(
        l2_clip_norm=1.0,
        noise_multiplier=noise_multiplier,
        num_steps=task.total_rounds,
        unit="user",
        **_sampling(task),
    )


def calibrated(task: Task) -> float:
    """Returns the noise multiplier that gives ε = 8.32 after the final runs' rounds."""
    found = Mechanism.calibrate(
        epsilon=EPSILON,
        delta=DELTA,
        num_steps=task.total_rounds,
        l2_clip_norm=1.0,
        unit="user",
        **_sampling(task),
    )
    return found.noise_multiplier


@functools.partial(jax.jit, static_argnames="network")
def _totals(network: models.Network, params, rows: jax.Array) -> jax.Array:
    """Sums over targets: right words, words, their loss; loss and number without padding."""

    def one(row):
        logits, targets = network.predict(params, row[:-1]), row[1:]
        losses = jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(
            logits, targets[:, None], axis=1
        ).squeeze(1)
        is_word, is_real = targets >= NUM_SPECIAL, targets != PAD
        right = is_word & (jnp.argmax(logits, axis=1) == targets)
        return jnp.stack(
            [right.sum(), is_word.sum(), (losses * is_word).sum(), (losses * is_real).sum(),
             is_real.sum()]
        )  # fmt: skip

    return jax.lax.map(one, rows, batch_size=512)


def evaluate(network: models.Network, params, rows: np.ndarray) -> dict[str, float | None]:
    """Returns accuracy on known words, and perplexity over all targets and over such words.

    Special tokens (padding, begin, end, unknown) never count as right or wrong; perplexity counts
    end and unknown, which a model must predict to be a distribution over sentences.
    """
    sums = np.asarray(_totals(network, params, rows), np.float64).sum(axis=0)
    right, words, word_loss, loss, targets = sums
    metrics = {
        "accuracy": right / words,
        "perplexity": np.exp(loss / targets),
        "word_perplexity": np.exp(word_loss / words),
    }
    return {name: float(v) if np.isfinite(v) else None for name, v in metrics.items()}


@functools.cache
def _server_sgd() -> optax.GradientTransformation:
    """Makes SGD with momentum 0.9 whose rate is part of its state."""
    return optax.inject_hyperparams(optax.sgd, static_args="momentum")(
        learning_rate=1.0, momentum=0.9
    )


@functools.cache
def _pretraining() -> optax.GradientTransformation:
    # On held-out public users this reached a loss of 5.27, Adam (2e-3) one of 5.52; and what
    # Adam leaves is sharper than rounds with noise can go on from (experiments/README.md).
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(WARM_START_RATE))


def warm_start(task: Task, seed: int) -> Any:
    """Returns parameters pre-trained on public users, a fifth of whom decide when to stop.

    They are kept in a file. The same users judge for all seeds, so that all have the same shapes.
    """
    start = task.network.init(jax.random.key(seed))
    path = task.out / "unfinished" / f"warm-{task.key}-{seed}.npz"
    if not path.exists():
        began = clock()
        public = task.prepared.public
        order = np.random.default_rng(0).permutation(len(public))
        judges = max(1, len(order) // 5)
        found = mirrordp.warm_start(
            task.network.loss,
            start,
            public.take(order[judges:]).examples,
            holdout=public.take(order[:judges]).examples,
            optimizer=_pretraining(),
            batch_size=CLIENT_BATCH,
            patience=4,
            max_epochs=40,
            refit=True,
            seed=seed,
        )
        save(path, found.params, {"epochs": found.num_epochs})
        print(
            f"warm start {seed}: {found.num_epochs} epochs, {clock() - began:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return load(path, start)[0]


def _state_path(task: Task, job: Job) -> Path:
    name = records.fingerprint({"key": task.key, **dataclasses.asdict(job)})
    return task.out / "unfinished" / f"{name}.npz"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def save(path: Path, tree: Any, notes: Any) -> None:
    """Writes a tree of arrays and notes; the file takes the place of an older one at once.

    A training state holds the key of the noise: this is for experiments with a known seed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = [
        np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]
    draft = path.with_suffix(".draft.npz")
    np.savez(draft, *leaves, notes=np.asarray(json.dumps(notes)))
    draft.replace(path)


def load(path: Path, like: Any) -> tuple[Any, Any]:
    """Reads what `save` wrote, in the structure of `like`, and the notes."""
    leaves, treedef = jax.tree.flatten(like)
    with np.load(path) as stored:
        notes = json.loads(str(stored["notes"]))
        read = [jnp.asarray(stored[f"arr_{number}"]) for number in range(len(leaves))]
    made = [
        jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if _is_key(old) else new
        for new, old in zip(read, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, made), notes


def run(task: Task, job: Job) -> records.Record:
    """Makes one run from its beginning, or from where it was cut, to its end."""
    began = clock()
    private, public = task.prepared.private, task.prepared.public
    start = (
        task.network.init(jax.random.key(job.seed))
        if job.method == COLD
        else warm_start(task, job.seed)
    )
    made = mechanism(task, job.noise_multiplier)
    alpha = 1.0
    if job.divisor is not None:
        alpha = mirrordp.schedules.cosine(decay_steps=job.divisor * job.rounds / 2)
    step = FederatedStep(
        task.network.loss,
        made,
        _server_sgd(),
        client_learning_rate=job.client_rate,
        client_batch_size=CLIENT_BATCH,
        public_batch_size=task.public_per_round,
        users_per_pass=task.users_per_pass,
    )
    # Rates and clip norm travel in the state, so that the whole grid is one compiled program.
    state = step.init(start, randomness(job.seed)[1].noise)
    state.opt_state.hyperparams["learning_rate"] = jnp.asarray(job.server_rate, jnp.float32)
    state = state._replace(clip_norm=jnp.asarray(job.clip, jnp.float32))
    path = _state_path(task, job)
    curve: list[dict[str, Any]] = []
    seconds = 0.0
    if path.exists():
        state, notes = load(path, state)
        curve, seconds = notes["curve"], notes["seconds"]
        print(f"  goes on after round {int(state.step)}", file=sys.stderr, flush=True)
    elif job.stage == "final":
        curve.append(
            {"round": 0, "seconds": 0.0} | evaluate(task.network, start, task.prepared.test)
        )
    # A curve of the final runs; the others are judged at their end.
    parts = range(1, 11) if job.stage == "final" else ()
    evaluations = {round(job.rounds * part / 10) for part in parts} - {0}
    # All methods share noise and cohorts: differences between methods are paired.
    iterator = mirrordp.train(
        step,
        start,
        private,
        public if job.divisor is not None else None,
        alpha=alpha,
        num_steps=job.rounds,
        seed=job.seed,
        state=state,
        options=TrainOptions(steps_per_call=ROUNDS_PER_CALL),
    )
    done = int(state.step)
    ended, paces = clock(), []
    for state, info in iterator:
        paces.append((clock() - ended) / (info.step - done))
        now = seconds + clock() - began
        if any(done < number <= info.step for number in evaluations):
            curve.append(
                {"round": info.step, "seconds": round(now, 1)}
                | evaluate(task.network, state.params, task.prepared.test)
            )
        done = info.step
        if clock() > task.deadline and info.step < job.rounds:
            save(path, state, {"curve": curve, "seconds": round(now, 1)})
            raise OutOfTime
        ended = clock()
    guarantee = _guarantee(made, job.rounds)
    path.unlink(missing_ok=True)
    return {
        "metrics": evaluate(task.network, state.params, task.prepared.test),
        "validation": evaluate(task.network, state.params, task.prepared.validation),
        "curve": curve,
        "epsilon": guarantee.epsilon if np.isfinite(guarantee.epsilon) else None,
        "delta": DELTA,
        "adjacency": made.adjacency.value,
        "unit": made.unit,
        "sampling": f"{made.sampling.name}, q = {made.sampling.sampling_prob:.6g}",
        "accountant": guarantee.method,
        "tuning_charged": False,
        "seconds": round(seconds + clock() - began, 1),
        "seconds_per_round": round(float(np.median(paces)), 4),
    }


@functools.cache
def _guarantee(made: Mechanism, rounds: int) -> Epsilon:
    # The accounting of a thousand rounds takes seconds.
    return made.guarantee(DELTA, num_steps=rounds)


class Log:
    """Finished runs: which there are, and where the next ones go."""

    def __init__(self, path: Path, task: Task):
        self._path, self._task = path, task
        patterns = ("experiments/stackoverflow/*.py", "experiments/models.py", "mirrordp/**/*.py")
        sources = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
        device = jax.devices()[0]
        self._provenance = records.provenance(
            PACKAGES, sources, f"{device.platform}, {device.device_kind}"
        )
        self._found = {
            Job(**record["job"]).identity: record
            for record in records.read(path)
            if record.get("key") == task.key
        }

    def record(self, job: Job) -> records.Record:
        """Returns the line of a job, and runs the job first if there is none."""
        if job.identity not in self._found:
            if clock() > self._task.deadline:
                raise OutOfTime
            print(f"{job}", file=sys.stderr, flush=True)
            record = {
                "experiment": "stackoverflow",
                "key": self._task.key,
                "job": dataclasses.asdict(job),
                "facts": self._task.prepared.facts,
                **run(self._task, job),
                "provenance": self._provenance,
            }
            records.append(self._path, record)
            self._found[job.identity] = record
            print(
                f"  {record['metrics']}, {record['seconds']} s, "
                f"{record['seconds_per_round']} s a round",
                file=sys.stderr,
                flush=True,
            )
        return self._found[job.identity]

    def validation_loss(self, job: Job) -> float:
        """Returns the perplexity of held-out private users; infinite if the run diverged."""
        value = self.record(job)["validation"]["perplexity"]
        return np.inf if value is None else value

    def all(self) -> list[records.Record]:
        """Returns every line of this task."""
        return list(self._found.values())


class Grid(NamedTuple):
    """The values to search; by default the paper's grid and smaller server rates."""

    server_rates: Sequence[float] = SERVER_RATES
    client_rates: Sequence[float] = CLIENT_RATES
    clips: Sequence[float] = CLIPS
    divisors: Sequence[int] = DIVISORS


def jobs_of_rates(grid: Grid, rounds: int, noise: float) -> Iterator[Job]:
    """Yields the grid's jobs, which begin at the warm start."""
    for clip in grid.clips:
        for client_rate in grid.client_rates:
            for server_rate in grid.server_rates:
                yield Job(
                    "rates", WARM, 0, rounds, server_rate, client_rate, clip,
                    noise_multiplier=noise,
                )  # fmt: skip


def next_rate(rate: float, direction: int) -> float:
    """Returns the next rate up (+1) or down (-1) along {1, 3} * 10^i.

    >>> next_rate(0.1, -1), next_rate(0.1, 1), next_rate(0.5, 1), next_rate(0.5, -1)
    (0.03, 0.3, 1.0, 0.3)
    """
    exponent = math.floor(math.log10(rate))
    ladder = [float(f"{digit}e{exponent + up}") for up in (-1, 0, 1) for digit in (1, 3)]
    if direction > 0:
        return min(step for step in ladder if step > rate * (1 + 1e-6))
    return max(step for step in ladder if step < rate * (1 - 1e-6))


def beyond(best: Job, tried: Sequence[Job], grid: Grid) -> list[Job]:
    """Returns the untried neighbours of the best rates, with its other settings.

    They come from the rates tried elsewhere, and after the last of these from `next_rate`. A rate
    with a single value in the grid is taken as given.
    """
    wanted = []
    for name, values in (("server_rate", grid.server_rates), ("client_rate", grid.client_rates)):
        if len(set(values)) < 2:
            continue
        own = getattr(best, name)
        known = {getattr(job, name) for job in tried}
        neighbours = (
            max((rate for rate in known if rate < own), default=next_rate(own, -1)),
            min((rate for rate in known if rate > own), default=next_rate(own, 1)),
        )
        wanted += [dataclasses.replace(best, **{name: rate}) for rate in neighbours]
    return [job for job in wanted if job not in tried]


def search_rates(log: Log, grid: Grid, rounds: int, noise: float) -> Job:
    """Returns the best of the grid, extended until its neighbours have been tried."""

    def score(job: Job) -> tuple[float, ...]:
        # Where all diverge, lower rates are the way on.
        return log.validation_loss(job), job.server_rate, job.client_rate

    tried = list(jobs_of_rates(grid, rounds, noise))
    for _ in range(MAX_EXTENSIONS):
        best = min(tried, key=score)
        more = beyond(best, tried, grid)
        if not more:
            return best
        tried += more
    best = min(tried, key=score)
    print(f"the best rates keep moving; taken: {best}", file=sys.stderr, flush=True)
    return best


def staged(
    log: Log,
    stages: Sequence[str],
    grid: Grid,
    rounds: int,
    tuning_rounds: int,
    seeds: int,
    noise: float,
) -> None:
    """Runs the stages; each needs the ones before it."""
    if "check" in stages:
        log.record(Job("check", PDA, 0, min(tuning_rounds, 20), 1.0, 0.2, 0.3, 5, PAPER_NOISE))
    if not {"rates", "alpha", "final"} & set(stages):
        return
    rates = search_rates(log, grid, tuning_rounds, noise)
    if not {"alpha", "final"} & set(stages):
        return
    candidates = [
        dataclasses.replace(rates, stage="alpha", method=PDA, divisor=divisor)
        for divisor in grid.divisors
    ]
    best = min(candidates, key=log.validation_loss)
    if "final" not in stages:
        return
    for seed in range(1, seeds + 1):
        for method, divisor in ((COLD, None), (WARM, None), (PDA, best.divisor)):
            log.record(
                dataclasses.replace(
                    rates, stage="final", method=method, divisor=divisor, seed=seed, rounds=rounds
                )
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments stackoverflow",
        description="Next-word prediction under user-level privacy: cold, warm, PDA-DPMD.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data/stackexchange/users.tsv"),
        help="training users: .h5 as published, or .tsv, .jsonl, .parquet (default: %(default)s)",
    )
    parser.add_argument("--test-data", type=Path, help="test users; else 10%% of the users")
    parser.add_argument("--public-data", type=Path, help="users 100 of whom are public")
    parser.add_argument(
        "--overflow",
        action="store_true",
        help="public users from sentences of private users beyond 256, as the paper's text has it",
    )
    parser.add_argument("--vocabulary", choices=("public", "train"), default="public")
    parser.add_argument("--stages", nargs="+", default=["rates", "alpha", "final"],
                        choices=("rates", "alpha", "final", "check"))  # fmt: skip
    parser.add_argument("--rounds", type=at_least(1), default=1600, help="rounds of the final runs")
    parser.add_argument(
        "--tuning-rounds",
        type=at_least(1),
        help="rounds of runs that choose settings (half of --rounds)",
    )
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--server-rates", type=float, nargs="+", default=SERVER_RATES,
                        help="extended where the best is at an end; a single one is taken as given "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--client-rates", type=float, nargs="+", default=CLIENT_RATES,
                        help="likewise (default: %(default)s)")  # fmt: skip
    parser.add_argument("--clips", type=float, nargs="+", default=CLIPS)
    parser.add_argument("--divisors", type=at_least(1), nargs="+", default=DIVISORS,
                        help="i of alpha_t = cos(pi t / (i T))")  # fmt: skip
    parser.add_argument("--public-per-round", type=at_least(1), help="public users a round (all)")
    parser.add_argument("--fixed-size", action="store_true",
                        help="exactly 100 users a round, with the accounting of that")  # fmt: skip
    parser.add_argument("--users-per-pass", type=at_least(1),
                        help="users computed side by side (what memory allows)")  # fmt: skip
    parser.add_argument("--max-seconds", type=float, default=np.inf,
                        help="stop after about these seconds; the next call goes on")  # fmt: skip
    parser.add_argument(
        "--words", type=at_least(1), default=VOCABULARY_SIZE, help="of the vocabulary"
    )
    parser.add_argument("--public-users", type=at_least(1), default=NUM_PUBLIC_USERS)
    parser.add_argument(
        "--width", type=at_least(1), default=670, help="of the LSTM; 670 is the paper's"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument(
        "--plot-only", action="store_true", help="table and figure of finished runs; reads no data"
    )
    parser.add_argument(
        "--readme",
        type=existing_file,
        help="also write the table into the marked section of this file",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Computes what is missing, then writes table and figure; see `--help`."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    began = clock()
    lines = arguments.out / "runs.jsonl"
    if arguments.plot_only:
        found = records.read(lines)
        if not found:
            parser.error(f"expected finished runs in {lines}, got none; leave out --plot-only")
        report.write(report.newest(found), arguments.out, readme=arguments.readme)
        return 0
    if not arguments.data.exists():
        parser.error(
            f"expected the users in {arguments.data}, got no such file; run unpack.py data "
            "stackexchange, or give --data"
        )
    try:
        prepared = prepare(
            arguments.data,
            test_data=arguments.test_data,
            public_data=arguments.public_data,
            overflow=arguments.overflow,
            vocabulary_from=arguments.vocabulary,
            vocabulary_size=arguments.words,
            num_public_users=arguments.public_users,
        )
    except ValueError as error:
        parser.error(str(error))
    num_tokens = arguments.words + NUM_SPECIAL
    size = {"tokens": num_tokens, "width": arguments.width, "length": SEQUENCE_LENGTH}
    task = Task(
        prepared,
        models.stackoverflow_lstm(num_tokens, width=arguments.width, pad=PAD),
        size,
        arguments.public_per_round,
        arguments.rounds,
        arguments.users_per_pass,
        began + arguments.max_seconds,
        arguments.out,
        arguments.fixed_size,
    )
    log = Log(lines, task)
    grid = Grid(arguments.server_rates, arguments.client_rates, arguments.clips, arguments.divisors)
    # The noise of the long runs, also in the short ones that choose settings.
    noise = calibrated(task)
    print(f"{prepared.facts}\nnoise multiplier {noise:.4f}", file=sys.stderr, flush=True)
    complete = True
    try:
        staged(
            log,
            arguments.stages,
            grid,
            arguments.rounds,
            arguments.tuning_rounds or max(1, arguments.rounds // 2),
            arguments.seeds,
            noise,
        )
    except OutOfTime:
        complete = False
        print("out of time; call again to go on", file=sys.stderr)
    report.write(log.all(), arguments.out, readme=arguments.readme)
    # 75 says "try again" to a script.
    return 0 if complete else 75
