"""GPT-2 with an output layer of its own under Opacus, for `benchmarks.models --peers`.

`python -m benchmarks.opacus_gpt2 LAYERS WIDTH HEADS POSITIONS BATCH VOCABULARY DEVICE` prints one
JSON object. It needs torch and opacus, but neither JAX nor mirrordp. The timed rounds of the modes
alternate; peak memory is that of PyTorch's allocator, the model included.
"""

import importlib.metadata
import json
import sys
import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional

from benchmarks.timing import Contender, measure

MODES = ("not private", "hooks", "ghost")


class Layer(nn.Module):
    """Causal attention and an MLP, each normalised first."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, positions, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, positions, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        future = torch.ones(positions, positions, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -1e9).softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The model `gpt2` of `benchmarks.large_models`."""

    def __init__(self, layers: int, width: int, heads: int, positions: int, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        # Opacus reads the first axis of every input as that of the examples, and its ghost mode
        # refuses indices that are not contiguous.
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.head(self.norm(self.layers(self.tokens(tokens) + self.positions(places))))


def contender(mode: str, shape: tuple[int, ...], inputs, targets, where) -> Contender:
    on_gpu = where.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model = GPT2(*shape).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    if mode != "not private":
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=torch.utils.data.DataLoader(dataset, batch_size=len(inputs)),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        model, optimizer = made[0], made[1]
        criterion = made[2] if mode == "ghost" else criterion

    def run():
        logits = model(inputs)
        # Opacus' ghost mode wants to know how the flat losses belong to sequences.
        shape = {"shape": logits.shape} if mode == "ghost" else {}
        criterion(logits.flatten(0, 1), targets.flatten(), **shape).backward()
        optimizer.step()
        # Behind the step, so that no mode holds gradients while another one runs.
        optimizer.zero_grad()

    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    run()
    wait()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
    return Contender("PyTorch", mode, run, wait, None, peak)


def main() -> None:
    layers, width, heads, positions, batch, vocabulary = map(int, sys.argv[1:7])
    torch.set_float32_matmul_precision("high")
    warnings.filterwarnings("ignore")
    where = torch.device("cuda" if sys.argv[7] == "gpu" else "cpu")
    tokens = torch.randint(0, vocabulary, (batch, positions + 1), device=where)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (layers, width, heads, positions, vocabulary)
    found, contenders = {}, []
    for mode in MODES:
        try:
            contenders.append(contender(mode, shape, inputs, targets, where))
        except Exception as error:
            found[mode] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    times = measure(contenders, rounds=5, seconds_per_round=0.3)
    for item, milliseconds in zip(contenders, times, strict=True):
        peak = item.peak_megabytes
        found[item.method] = {"ms": milliseconds, "gib": None if peak is None else peak / 1024}
    names = ("torch", "opacus")
    versions = {name: importlib.metadata.version(name) for name in names}
    print(json.dumps({"methods": found, "versions": versions}))


if __name__ == "__main__":
    main()
