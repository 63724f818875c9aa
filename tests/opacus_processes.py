"""Two processes that train one model with Opacus over Gloo: `python tests/opacus_processes.py`.

Each process checks one step against the formula, with gradients from plain autograd and no noise:

    θ' = θ − η (α Σ_ranks Σ_i clip(∇ℓ_i) / B + (1 − α) mean_ranks ∇Ψ_rank).
"""

import os
import tempfile
import warnings

import torch
import torch.multiprocessing
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mirrordp.integrations.opacus import with_public_gradient

ROWS, BATCH, CLIP, WORLD = 60, 30, 0.7, 2
ALPHAS = [0.3, 0.0, 1.0]


def rows(seed):
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(1) > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def summed(tensors):
    for tensor in tensors:
        distributed.all_reduce(tensor)
    return tensors


def expected(plain, batch, public, alpha, divisor):
    """The step by hand; `plain` is a copy of the module without hooks."""
    parameters = list(plain.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for x, y in zip(*batch, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(plain(x[None]), y[None]), parameters)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        total = [t + g * min(1.0, CLIP / (norm + 1e-6)) for t, g in zip(total, grads, strict=True)]
    mean = torch.autograd.grad(F.cross_entropy(plain(public[0]), public[1]), parameters)
    total, mean = summed(total), summed([g.clone() for g in mean])
    return [
        p - 0.5 * (alpha * t / divisor + (1 - alpha) * g / WORLD)
        for p, t, g in zip(parameters, total, mean, strict=True)
    ]


def check(mode, rank, reduction="mean"):
    module = DPDDP(network())
    module, optimizer, *criterion, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(*rows(0)), batch_size=BATCH),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        grad_sample_mode=mode,
        loss_reduction=reduction,
    )
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=reduction)
    optimizer = with_public_gradient(optimizer, module, loader, alpha=ALPHAS)
    plain, public = network(), [t[:8] for t in rows(10 + rank)]
    for alpha, batch in zip(ALPHAS, [*loader, *loader], strict=False):
        plain.load_state_dict(
            {n.removeprefix("module."): p for n, p in module._module.state_dict().items()}
        )
        wanted = expected(plain, batch, public, alpha, BATCH if reduction == "mean" else 1)
        optimizer.zero_grad()
        criterion(module(batch[0]), batch[1]).backward()
        optimizer.public_step(lambda: F.cross_entropy(module(public[0]), public[1]))
        optimizer.step()
        for a, b in zip(wanted, optimizer.params, strict=True):
            torch.testing.assert_close(a, b.detach())
    assert optimizer.charged_steps == 2
    print(f"{mode}: {type(optimizer).__name__} of rank {rank} agrees", flush=True)


def work(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD
    )
    torch.manual_seed(100 + rank)
    for mode in ("hooks", "ghost"):
        check(mode, rank)
    # Opacus then adds up the gradients of the processes.
    check("hooks", rank, "sum")
    distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        # Forked, since importing all of this takes seconds; nothing has started threads yet.
        torch.multiprocessing.start_processes(work, (folder,), nprocs=WORLD, start_method="fork")
