"""One process of runs of several, as the tests and the soak start it.

    python -m tests.process_worker INDEX COUNT PORT '{"folder": ..., "cases": {...}}'

Trains on its own part of the rows of `test_mesh`, case by case, and writes into the folder what
each ended with, as `CASE-INDEX`: a result, or an error in one sentence.
"""

import functools
import inspect
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

COUNT, DEVICES, STEPS = 2, 2, 6


def main() -> None:
    """Joins the others, trains, and leaves the results in the folder."""
    index, count, port = map(int, sys.argv[1:4])
    options = json.loads(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_compilation_cache_dir", options["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Before `train` is called, JAX alone notices that another process has ended.
    jax.distributed.initialize(
        f"localhost:{port}", count, index, initialization_timeout=40, heartbeat_timeout_seconds=40
    )
    folder = Path(options["folder"])
    for name, case in options["cases"].items():
        own = case | case.get(f"process {index}", {})
        try:
            result = trained(folder, index, count, own)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
            if options["is_alone"]:
                raise
        temporary = folder / f"{name}-{index}.part"
        temporary.write_text(json.dumps(result))
        os.rename(temporary, folder / f"{name}-{index}")


def mechanism(case: dict):
    """Returns the mechanism of a case."""
    import mirrordp
    from tests import tools

    if case.get("adjacency") == "add-remove":
        sampling = mirrordp.PoissonSampling(sampling_prob=0.3, expected_batch_size=12.0)
        kind = {"sampling": sampling, "adjacency": mirrordp.Adjacency.ADD_REMOVE}
    else:
        kind = {"sampling": tools.poisson(capacity=case.get("capacity", 0))}
    noise = case.get("noise", 1.0)
    return tools.mechanism(num_steps=STEPS, noise_multiplier=noise, **kind)


def begun(case: dict, rows, **options):
    """Returns a run of a case on some rows."""
    import mirrordp
    from tests import test_mesh, tools

    def loss(params, example):
        return case.get("scale", 1.0) * test_mesh.loss(params, example)

    if "users" in case:
        return begun_on_users(case["users"], **options)
    public = None
    if "public" in case:
        # So many of the private rows, and as many others.
        copied = jax.tree.map(lambda leaf: leaf[: case["public"]], test_mesh.ROWS.arrays)
        public = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf + 1]), copied)
        public = mirrordp.PublicData(copied if case.get("all copied") else public)
    return tools.train(
        loss,
        test_mesh.START,
        mirrordp.PrivateData(rows),
        public,
        alpha=1.0 if public is None else 0.5,
        mechanism=mechanism(case),
        optimizer=tools.sgd(0.1),
        steps_per_call=2,
        stream=case.get("stream"),
        seed=case.get("seed", 1),
        **options,
    )


def begun_on_users(names: list[str], **options):
    """Returns a run of one step on users of these names, whose number follows from the memory."""
    import mirrordp
    from mirrordp.privacy import FullBatch
    from tests import tools

    users = [np.full((2, 3), len(name), np.float32) for name in names]
    return tools.federated_train(
        lambda params, row: ((params - row) ** 2).sum(),
        np.zeros(3, np.float32),
        mirrordp.PrivateClients.from_users(users, ids=names, max_examples_per_user=2),
        mechanism=tools.mechanism(sampling=FullBatch.of(4), num_steps=1, unit="user"),
        client_learning_rate=0.1,
        seed=1,
        **options,
    )


def state_after(case: dict, rows, mesh):
    """Returns the state of a case after so many steps, or one that was changed since."""
    from mirrordp.training.processes import on_host

    ahead = {info.step: state for state, info in begun(case, rows, mesh=mesh)}
    state = on_host(ahead[case["from"]])
    moved = jax.tree.map(lambda leaf: leaf + case.get("moved", 0), state.params)
    return state._replace(params=moved)


def trained(folder: Path, index: int, count: int, case: dict) -> dict:
    """Returns the parameters, what was seen on the way, and what was charged."""
    import mirrordp
    from mirrordp.spending import FileLedger
    from mirrordp.training import bookkeeping
    from tests import test_mesh

    rows = jax.tree.map(lambda leaf: np.array_split(leaf, count)[index], test_mesh.ROWS.arrays)
    kind = case.get("dtype", "float32")
    rows = jax.tree.map(lambda leaf: leaf[case.get("left out", 0) :].astype(kind), rows)
    rows = jax.tree.map(lambda leaf: leaf + case.get("shift", 0), rows)
    kept = mechanism(case).adjacency
    spend = mirrordp.Ledger(mirrordp.Adjacency(case.get("ledger for", kept.value)))
    if "ledger" in case:
        path = folder / case["ledger"]
        spend = FileLedger.open(path) if path.exists() else FileLedger.create(path, kept)
    elif index == 0 and "budget" in case:
        path, data = folder / case["budget"], mirrordp.PrivateData(rows)
        spend = (
            mirrordp.Budget.open(path, data=data)
            if path.exists()
            else mirrordp.Budget.create(path, epsilon=20.0, delta=1e-5, data=data)
        )
    elif index == 0 and "checkpoint" in case:
        spend = None
    os.environ["XLA_FLAGS"] = case.get("flags", "")
    checkpoint = None
    if "checkpoint" in case:
        path = folder / case["checkpoint"]
        checkpoint = mirrordp.Checkpoint(path, every=case.get("every", 1), resume=True, keep=True)
    try:
        note_calls(folder / f"{case.get('log', 'log')}-{index}")
        if "refuse" in case:
            spend.charge = refuse  # pyright: ignore[reportOptionalMemberAccess]
        if "hasty" in case:
            bookkeeping.SharedBooks.charge = bookkeeping.SharedBooks._agree  # pyright: ignore[reportAttributeAccessIssue]
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        state = state_after(case, rows, mesh) if "from" in case else None
        run = begun(case, rows, mesh=mesh, spend=spend, checkpoint=checkpoint, state=state)
        seen, params = [], {}
        for state, info in run:
            params = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes().hex(), state.params)
            seen.append([info.step, info.charged_steps, info.noisy_grad_norm.tolist()])
            if info.step == case.get("stop"):
                run.close()  # pyright: ignore[reportAttributeAccessIssue]
                break
            time.sleep(case.get("pause", 0.0))
    finally:
        if isinstance(spend, FileLedger | mirrordp.Budget):
            spend.close()
    ledger = spend.ledger if isinstance(spend, mirrordp.Budget) else spend
    return {"params": params, "seen": seen, "charged": ledger and str(ledger.event)}


def refuse(*args, **options) -> None:
    """Stands in for a ledger whose disk is full."""
    raise OSError("no space left")


def note_calls(path: Path) -> None:
    """Makes every compiled call note the last step that it is about to compute."""
    from mirrordp.training import engine

    real = inspect.unwrap(engine._run_passes, stop=lambda f: not hasattr(f, "noted"))

    @functools.wraps(real)
    def noted(*args):
        steps = int(np.asarray(args[4].step)) + int(args[6].is_last.sum())
        with open(path, "a") as file:
            file.write(f"{steps}\n")
        return real(*args)

    noted.noted = True  # pyright: ignore[reportAttributeAccessIssue]
    engine._run_passes = noted


def start(folder: Path, cases: dict, cache: Path) -> list[subprocess.Popen]:
    """Starts the processes, with their output in the folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = json.dumps(
        {"folder": str(folder), "cases": cases, "cache": str(cache), "is_alone": len(cases) == 1}
    )
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "device_count" not in flag]
    root = Path(__file__).parent.parent
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(root)}
    found = []
    for index in range(COUNT):
        with open(folder / f"output-{index}", "w") as output:
            command = [sys.executable, "-m", "tests.process_worker"]
            command += [str(index), str(COUNT), str(port), options]
            found.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=root)
            )
    return found


def finish(processes: list[subprocess.Popen], seconds: float) -> list[int]:
    """Waits for processes that must end within some seconds; returns their exit codes."""
    limit = time.monotonic() + seconds
    try:
        return [process.wait(max(0.0, limit - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
