"""Several processes train one model together; each holds rows of its own, which never leave it.

Every process runs this file. On one machine, `bash examples/distributed/local.sh` starts two; for
Slurm and Kubernetes there are `slurm.sbatch` and `kubernetes.yaml` beside it. After a crash, start
all processes again with the same folder, and the run goes on where it stood.
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp

ROWS_PER_PROCESS = 4_000


def join() -> None:
    """Joins the other processes, before anything else is done with JAX."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    stated = {}
    if "PROCESS_ID" in os.environ:  # set by local.sh and kubernetes.yaml; Slurm is found by JAX
        stated = {
            "coordinator_address": os.environ["COORDINATOR"],
            "num_processes": int(os.environ["NUM_PROCESSES"]),
            "process_id": int(os.environ["PROCESS_ID"]),
        }
    # If a process dies before training begins, JAX ends the others after this time.
    jax.distributed.initialize(**stated, heartbeat_timeout_seconds=40)


def own_rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of this process; yours come from a file that only this machine has."""
    rng = np.random.default_rng(jax.process_index())
    x = rng.normal(size=(ROWS_PER_PROCESS, 3)).astype(np.float32)
    return x, (x @ np.array([1.0, -2.0, 0.5]) > 0).astype(np.float32)


def loss(theta: jax.Array, example: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the logistic loss of one example."""
    x, y = example
    return optax.sigmoid_binary_cross_entropy(jnp.dot(theta, x), y)


def main() -> None:
    """Trains, and lets process 0 print what was spent."""
    parser = argparse.ArgumentParser(description="Trains with several processes.")
    parser.add_argument("--run", required=True, help="the folder of the run, used by process 0")
    arguments = parser.parse_args()
    join()
    # n and the batch size are those of all processes together.
    rows = ROWS_PER_PROCESS * jax.process_count()
    mechanism = mirrordp.Mechanism.calibrate(
        epsilon=1.0,
        delta=1e-5,
        l2_clip_norm=1.0,
        num_steps=60,
        sampling=mirrordp.PoissonSampling.for_batch_size(256, num_examples=rows),
    )
    step = mirrordp.TrainStep(loss, mechanism, optax.sgd(1.0))
    theta = np.zeros(3, np.float32)
    for state, info in mirrordp.train(
        step,
        theta,
        mirrordp.PrivateData(own_rows()),
        mesh=jax.make_mesh((jax.device_count(),), ("data",)),
        checkpoint=mirrordp.Checkpoint(arguments.run, resume=True),
        options=mirrordp.TrainOptions(steps_per_call=20),
    ):
        theta = np.asarray(state.params)
        if jax.process_index() == 0:
            spent = mechanism.epsilon(1e-5, num_steps=info.charged_steps)
            print(f"step {info.step} of {info.num_steps}: epsilon {spent:.3f}", flush=True)
    if jax.process_index() == 0:
        x, y = own_rows()
        right = np.mean((x @ theta > 0) == y)
        print(f"{jax.process_count()} processes, {jax.device_count()} devices")
        print(f"accuracy {right:.2f} on rows of process 0 (not covered by the guarantee)")


if __name__ == "__main__":
    main()
