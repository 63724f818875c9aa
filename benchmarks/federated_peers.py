"""The round of `benchmarks.federated` in Flower's simulation and in pfl-research, in PyTorch.

Each runs with its own DP: central clipping and Gaussian noise. Nothing here imports mirrordp.
"""

import os
import time

import numpy as np
import torch

from benchmarks.federated_task import CLASSES, FEATURES, ROWS, VOCABULARY, user_rows, versions
from benchmarks.processes import tree_cpu_seconds

CLIP, NOISE, RATE, BATCH = 0.3, 1.0, 0.1, 16


class Small(torch.nn.Module):
    """One hidden layer."""

    def __init__(self, width: int):
        super().__init__()
        self.hidden = torch.nn.Linear(FEATURES, width, bias=False)
        self.out = torch.nn.Linear(width, CLASSES, bias=False)

    def loss(self, x, y):
        logits = self.out(torch.tanh(self.hidden(x)))
        return torch.nn.functional.cross_entropy(logits, y)


class Lstm(torch.nn.Module):
    """The paper's network."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 96)
        self.cell = torch.nn.LSTM(96, width, batch_first=True)
        self.projection = torch.nn.Linear(width, 96)
        self.out = torch.nn.Linear(96, VOCABULARY)

    def loss(self, rows, _):
        outputs, _ = self.cell(self.embedding(rows[:, :-1]))
        logits = self.out(self.projection(outputs))
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), rows[:, 1:].reshape(-1)
        )


def make(model: str, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return Lstm(width) if model == "lstm" else Small(width)


def tensors(model: str, num_users: int):
    """Returns inputs and labels by user."""
    rows = user_rows(model, num_users)
    if model == "lstm":
        x = torch.from_numpy(rows).long()
        return x, torch.zeros(num_users, ROWS)
    return torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"]).long()


def local_epoch(network: torch.nn.Module, x, y) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for batch in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        network.loss(x[batch], y[batch]).backward()
        optimizer.step()


def now() -> tuple[float, float]:
    """Returns the clock, and processor seconds of this process and its children."""
    return time.perf_counter(), tree_cpu_seconds(os.getpid())


def measure(peer: str, model: str, cohort: int, rounds: int, width: int) -> dict:
    run = {"flower": flower, "pfl": pfl_research}[peer]
    start = time.perf_counter()
    times = np.asarray(run(model, cohort, rounds + 2, width))
    seconds, cpu_seconds = np.diff(times, axis=0)[1:].T
    return {
        "seconds_per_round": float(np.median(seconds)),
        "cpu_seconds_per_round": float(np.mean(cpu_seconds)),
        "first_call_seconds": float(times[1, 0] - start),
        "versions": versions(),
    }


def flower(model: str, cohort: int, rounds: int, width: int) -> list[tuple[float, float]]:
    """Returns the times at which Flower's server began its rounds."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from flwr.simulation import run_simulation

    # Ray runs its workers at a low priority, which would cost Flower on a machine with other work.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
    num_users = 4 * cohort
    client_app, server_app = ClientApp(), ServerApp()
    times: list[tuple[float, float]] = []
    cache: dict = {}

    @client_app.train()
    def train(message, context):
        torch.set_num_threads(1)
        if "data" not in cache:
            cache["data"], cache["network"] = tensors(model, num_users), make(model, width)
        x, y = cache["data"]
        network = cache["network"]
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        user = int(context.node_config["partition-id"])
        local_epoch(network, x[user], y[user])
        content = {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, *args, **options):
            times.append(now())
            return super().configure_train(*args, **options)

    @server_app.main()
    def main(grid, context):
        strategy = Timed(
            fraction_train=cohort / num_users,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_available_nodes=num_users,
        )
        private = DifferentialPrivacyServerSideFixedClipping(
            strategy, noise_multiplier=NOISE, clipping_norm=CLIP, num_sampled_clients=cohort
        )
        arrays = ArrayRecord(make(model, width).state_dict())
        private.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=num_users,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return times


def pfl_research(model: str, cohort: int, rounds: int, width: int) -> list[tuple[float, float]]:
    """Returns the times at which pfl-research finished its rounds."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    num_users = 4 * cohort
    x, y = tensors(model, num_users)
    network = make(model, width)
    plain_loss = type(network).loss

    def loss(self, x, y, eval=False):
        return plain_loss(self, x, y)

    def metrics(self, x, y, eval=True):
        return {"loss": Weighted(0.0, 1)}

    type(network).loss, type(network).metrics = loss, metrics
    users = FederatedDataset(
        lambda user: Dataset([x[user], y[user]]), get_user_sampler("random", list(range(num_users)))
    )
    times = [now()]

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            times.append(now())
            return False, type(aggregate_metrics)()

    noise = GaussianMechanism(clipping_bound=CLIP, relative_noise_stddev=NOISE)
    backend = SimulatedBackend(
        training_data=users,
        val_data=users,
        postprocessors=[CentrallyAppliedPrivacyMechanism(noise)],
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=10**6,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=backend,
        model=PyTorchModel(
            network, local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH
        ),
        callbacks=[Clock()],
    )  # fmt: skip
    return times
