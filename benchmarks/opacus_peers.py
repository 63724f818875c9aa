"""Opacus on the paper's networks, for `benchmarks.clipping --peers`; needs torch and opacus."""

import time
import warnings
from collections.abc import Iterator

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn

from benchmarks.timing import Contender

MODES = ("not private", "hooks", "functorch", "ghost")


class LanguageModel(nn.Module):
    """Embedding, two LSTM layers of width 120, dense output over 8,000 words."""

    def __init__(self, lstm: type[nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(8000, 120)
        self.lstm = lstm(120, 120, num_layers=2, batch_first=True)
        self.out = nn.Linear(120, 8000)

    def forward(self, tokens):
        return self.out(self.lstm(self.embedding(tokens))[0])


def network(name: str, mode: str) -> nn.Module:
    """Makes the same network as `experiments.models`, in PyTorch."""
    if name == "wikitext2":
        return LanguageModel(nn.LSTM if mode == "not private" else DPLSTM)
    if name == "emnist":
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 47),
        )  # fmt: skip
    layers, inputs = [], 3
    for number, width in enumerate((32, 32, 64, 64, 128, 128)):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.Tanh()]
        layers += [nn.MaxPool2d(2)] if number % 2 else []
        inputs = width
    head = [nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10)]
    return nn.Sequential(*layers, *head)


def data(name: str, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a batch of noise in the right shape."""
    if name == "wikitext2":
        tokens = torch.randint(0, 8000, (batch_size, 36))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (3, 32, 32) if name == "cifar10" else (1, 28, 28)
    return torch.randn(batch_size, *shape), torch.arange(batch_size) % 10


def opacus_contenders(
    name: str, batch_size: int, device: str
) -> Iterator[Contender | tuple[str, str, str]]:
    """Makes steps of plain PyTorch and of each Opacus mode, or (framework, mode, error)."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    warnings.filterwarnings("ignore")
    where = torch.device("cuda" if device == "gpu" else "cpu")
    wait = torch.cuda.synchronize if device == "gpu" else (lambda: None)
    inputs, targets = (part.to(where) for part in data(name, batch_size))
    for mode in MODES:
        try:
            yield _contender(name, mode, inputs, targets, where, wait)
        except Exception as error:
            yield "PyTorch", mode, f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _contender(name, mode, inputs, targets, where, wait) -> Contender:
    start = time.perf_counter()
    model = network(name, mode).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    if mode != "not private":
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        loader = torch.utils.data.DataLoader(dataset, batch_size=len(inputs))
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        model, optimizer = made[0], made[1]
        criterion = made[2] if mode == "ghost" else criterion

    def run():
        optimizer.zero_grad()
        logits = model(inputs)
        if name == "wikitext2":
            # Opacus' ghost mode wants to know how the flat losses belong to sequences.
            shape = {"shape": logits.shape} if mode == "ghost" else {}
            loss = criterion(logits.flatten(0, 1), targets.flatten(), **shape)
        else:
            loss = criterion(logits, targets)
        loss.backward()
        optimizer.step()

    peak = None
    if where.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    run()
    wait()
    if where.type == "cuda":
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return Contender("PyTorch", mode, run, wait, time.perf_counter() - start, peak)
