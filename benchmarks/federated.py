"""What a federated round costs: `python -m benchmarks.federated [--peers] [--models small lstm]`.

A round: every sampled user takes one epoch of local SGD in batches of 16 over its own rows, its
delta is clipped and added, the server adds noise and steps. The same work is given to Flower's
simulation and to pfl-research where they are installed, with the same model in PyTorch. Each
measurement is a process of its own (`--python` names the interpreter that has the peers); the
methods take turns, `--repeats` times, on the same cores, and the median round counts. Start-up,
compilation and one round of warming up are not in it; they are printed beside. Peak memory is that
of the process and all its children together, pages that several share counted once; processor time
likewise, which says more than the clock where the machine has other work.

    python -m benchmarks.federated                              ours, small model and the LSTM
    python -m benchmarks.federated --peers --python PEER/bin/python --out FILE
    python -m benchmarks.federated --scaling                    cost against users and model size
    python -m benchmarks.federated --paper-size --out FILE      a round of the paper's run
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.federated_task import (
    CLASSES,
    FEATURES,
    LENGTH,
    ROWS,
    VOCABULARY,
    user_rows,
    versions,
)
from benchmarks.processes import tree_cpu_seconds, tree_megabytes

MODELS = ("small", "lstm")
OTHER_WIDTHS = {"small": (256, 1024), "lstm": (167, 335)}
PEERS = ("flower", "pfl")
PAPER_USERS, PAPER_ROWS, PAPER_ROUNDS = 342_477, 256, 1_600


def ours(model: str, cohort: int, rounds: int, width: int, users_per_pass: int | None) -> dict:
    """Measures a round of our training, on four times as many users as a cohort holds."""
    import jax
    import jax.numpy as jnp
    import optax

    import mirrordp
    from experiments import models
    from mirrordp.privacy import FixedSizeSampling

    num_users = 4 * cohort
    rows = user_rows(model, num_users)
    users = [jax.tree.map(lambda leaf, u=u: leaf[u], rows) for u in range(num_users)]
    if model == "lstm":
        network = models.stackoverflow_lstm(width=width)
        params, loss = network.init(jax.random.key(0)), network.loss
    else:
        params = {
            "w1": 0.1 * jax.random.normal(jax.random.key(0), (FEATURES, width)),
            "w2": 0.1 * jax.random.normal(jax.random.key(1), (width, CLASSES)),
        }

        def loss(params, example):
            logits = jnp.tanh(example["x"] @ params["w1"]) @ params["w2"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])

    private = mirrordp.PrivateClients.from_users(users, max_examples_per_user=ROWS)
    block = max(1, rounds // 5)
    mechanism = mirrordp.Mechanism(
        sampling=FixedSizeSampling(batch_size=cohort, num_examples=num_users),
        l2_clip_norm=0.3,
        noise_multiplier=1.0,
        num_steps=rounds + 2 * block,
        adjacency=mirrordp.Adjacency.REPLACE,
        unit="user",
    )
    step = mirrordp.FederatedStep(
        loss, mechanism, client_learning_rate=0.1, users_per_pass=users_per_pass
    )
    options = mirrordp.TrainOptions(steps_per_call=block)
    run = mirrordp.train(step, params, private, seed=0, options=options)
    start = time.perf_counter()
    jax.block_until_ready(next(run)[0])
    first = time.perf_counter() - start
    seconds = []
    cpu = tree_cpu_seconds(os.getpid())
    for _ in range(-(-rounds // block)):
        start = time.perf_counter()
        jax.block_until_ready(next(run)[0])
        seconds.append((time.perf_counter() - start) / block)
    cpu = tree_cpu_seconds(os.getpid()) - cpu
    device = jax.devices()[0]
    return {
        "seconds_per_round": statistics.median(seconds),
        "cpu_seconds_per_round": cpu / (len(seconds) * block),
        "first_call_seconds": first - block * statistics.median(seconds),
        "versions": versions(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "device": f"{device.platform}, {device.device_kind}",
    }


def paper_size(
    num_users: int, public_users: int, rows: int, rounds: int, users_per_pass: int | None
) -> dict:
    """Times rounds of the paper's StackOverflow run on made-up text, extrapolated to 1,600.

    Every user has as many sentences as the paper allows, so no real cohort has more to do. With
    public users this is PDA-DPMD, all of them in every round; without, DP-FedAvg.
    """
    import jax
    import numpy as np

    import mirrordp
    from experiments import models

    start = time.perf_counter()
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCABULARY, (num_users * rows, LENGTH), dtype=np.int16)
    private = mirrordp.PrivateClients(tokens, np.full(num_users, rows), None, rows)
    public = None
    if public_users:
        own = rng.integers(1, VOCABULARY, (public_users * rows, LENGTH), dtype=np.int16)
        public = mirrordp.PublicClients(own, np.full(public_users, rows), None, rows)
    network = models.stackoverflow_lstm()
    params = network.init(jax.random.key(0))
    cohort = min(100, num_users // 2)
    block = max(1, min(5, rounds))
    mechanism = mirrordp.Mechanism(
        sampling=mirrordp.PoissonSampling.for_batch_size(cohort, num_examples=num_users),
        l2_clip_norm=0.3,
        noise_multiplier=0.4,
        num_steps=PAPER_ROUNDS,
        unit="user",
    )
    step = mirrordp.FederatedStep(
        network.loss, mechanism, client_learning_rate=0.5, users_per_pass=users_per_pass
    )
    run = mirrordp.train(
        step,
        params,
        private,
        public,
        alpha=0.9 if public_users else 1.0,
        seed=0,
        options=mirrordp.TrainOptions(steps_per_call=block),
    )
    made = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(next(run)[0])
    first = time.perf_counter() - start
    times = []
    for _ in range(-(-rounds // block)):
        start = time.perf_counter()
        jax.block_until_ready(next(run)[0])
        times.append((time.perf_counter() - start) / block)
    run.close()
    seconds = sum(times) / len(times)
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get(
        "peak_bytes_in_use", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return {
        "seconds_per_round": seconds,
        "label": "synthetic users of the paper's shape; 1,600 rounds are extrapolated",
        "users": num_users,
        "public_users": public_users,
        "expected_users_per_round": cohort,
        "sentences_per_user": rows,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "users_per_pass": users_per_pass,
        "measured_rounds": len(times) * block,
        "fastest_and_slowest_block": [min(times), max(times)],
        "extrapolated_minutes_of_1600_rounds": PAPER_ROUNDS * seconds / 60,
        "data_seconds": made,
        "first_call_seconds": first - block * seconds,
        "peak_megabytes": peak / 2**20,
        "device": f"{device.platform}, {device.device_kind}",
        "versions": versions(),
    }


def row_of(case: dict) -> str:
    """Formats one line of the table: the median of the repeats."""
    start = f"| {case['model']} | {case['users']} | {case['width']} | {case['method']} |"
    runs = [run for run in case["runs"] if "error" not in run]
    if not runs:
        return f"{start} {case['runs'][-1]['error']} | - | - | - |"

    def median(name: str) -> float:
        return statistics.median(run[name] for run in runs)

    return (
        f"{start} {median('seconds_per_round'):.3g} | {median('cpu_seconds_per_round'):.3g} | "
        f"{median('first_call_seconds'):.1f} | {median('peak_megabytes'):.0f} |"
    )


def in_process(arguments: list[str], python: str) -> dict:
    """Runs one measurement in a process of its own; its last line is the result."""
    command = [python, "-m", "benchmarks.federated", *arguments]
    root = Path(__file__).parents[1]
    environment = dict(os.environ, PYTHONPATH=str(root))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, text=True, cwd=root, env=environment
        )
        began, peak = time.monotonic(), 0.0
        while process.poll() is None:
            peak = max(peak, tree_megabytes(process.pid))
            if time.monotonic() - began > 3600:
                process.kill()
                return {"error": "no result within an hour"}
            time.sleep(0.5)
        output.seek(0)
        errors.seek(0)
        lines = [line for line in output if line.startswith('{"seconds_per_round"')]
        if process.returncode or not lines:
            tail = (errors.read().strip().splitlines() or ["no output"])[-1]
            return {"error": f"failed: {tail[:80]}"}
    return {"peak_megabytes": peak} | json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.federated", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--users", type=int, nargs="+", default=[100], help="users of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, help="hidden units (small: 64, lstm: 670)")
    parser.add_argument("--users-per-pass", type=int)
    parser.add_argument("--scaling", action="store_true", help="several cohorts and widths")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="also these, by default both")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the peers")
    parser.add_argument("--paper-size", action="store_true", help="ours alone, on one device")
    parser.add_argument("--num-users", type=int, default=PAPER_USERS, help="with --paper-size")
    parser.add_argument("--public-users", type=int, default=100, help="with --paper-size")
    parser.add_argument("--rows", type=int, default=PAPER_ROWS, help="with --paper-size")
    parser.add_argument("--out", type=Path, help="also write the results here, as JSON")
    parser.add_argument("--one", choices=("ours", *PEERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peers == []:
        arguments.peers = PEERS
    if arguments.one:
        model, cohort = arguments.models[0], arguments.users[0]
        if arguments.one == "ours":
            result = ours(
                model, cohort, arguments.rounds, arguments.width, arguments.users_per_pass
            )
        else:
            from benchmarks import federated_peers

            result = federated_peers.measure(
                arguments.one, model, cohort, arguments.rounds, arguments.width
            )
        print(json.dumps(result))
        return
    if arguments.paper_size:
        result = paper_size(
            arguments.num_users,
            arguments.public_users,
            arguments.rows,
            arguments.rounds,
            arguments.users_per_pass,
        )
        text = json.dumps(result, indent=1)
        print(text)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(text + "\n")
        return
    cases = []
    for model in arguments.models:
        width = arguments.width or {"small": 64, "lstm": 670}[model]
        sizes = [(users, width) for users in arguments.users]
        if arguments.scaling:
            most = max(arguments.users)
            sizes = [(users, width) for users in (most // 4, most // 2, most)]
            sizes += [(most, other) for other in OTHER_WIDTHS[model]]
        cases += [
            {"model": model, "users": users, "width": size, "method": method, "runs": []}
            for users, size in sizes
            for method in ("ours", *(arguments.peers or ()))
        ]
    for _ in range(arguments.repeats):
        for case in cases:
            options = [
                "--one", case["method"], "--models", case["model"], "--users", str(case["users"]),
                "--rounds", str(arguments.rounds), "--width", str(case["width"]),
            ]  # fmt: skip
            if arguments.users_per_pass:
                options += ["--users-per-pass", str(arguments.users_per_pass)]
            is_ours = case["method"] == "ours"
            case["runs"].append(
                in_process(options, sys.executable if is_ours else arguments.python)
            )
            print(row_of(case), file=sys.stderr, flush=True)
            result = {
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "rows_per_user": ROWS,
                "rounds": arguments.rounds,
                "load_average": os.getloadavg(),
                "cases": cases,
            }
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores; {ROWS} rows per user in batches of 16")
    print(
        "| model | users | width | method | s per round | CPU s per round | start, s | peak, MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(map(row_of, cases)))


if __name__ == "__main__":
    main()
