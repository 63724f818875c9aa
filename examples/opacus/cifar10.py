"""Opacus with public data: DP-SGD from a cold and from a warm start, and PDA-DPMD, at one epsilon.

python examples/opacus/cifar10.py           # random images, which only show that it runs
python examples/opacus/cifar10.py FOLDER    # the paper's setting with FOLDER/cifar-10-batches-bin
"""

import sys
import time

import torch
from images import setting, shifted_and_mirrored
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

from mirrordp import schedules
from mirrordp.integrations.opacus import public_batches, warm_start, with_public_gradient

s = setting(*sys.argv[1:])


def network():
    layers = []
    for before, after in ((3, s.width), (s.width, 2 * s.width), (2 * s.width, 4 * s.width)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * s.width, 4 * s.width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(4 * s.width, 10)).to(s.test.tensors[0].device)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def public_loss(model, batch):
    return loss_fn(model, (shifted_and_mirrored(batch[0]), batch[1]))


def train(is_warm, alpha):
    torch.manual_seed(0)
    model = network()
    if is_warm:
        adam = torch.optim.Adam(model.parameters(), lr=s.public_rate)
        rows = DataLoader(s.public, batch_size=64, collate_fn=tuple)
        stop = {"patience": s.patience, "max_epochs": s.max_epochs}
        warm_start(model, public_loss, rows, optimizer=adam, **stop)
    sgd = torch.optim.SGD(model.parameters(), lr=s.learning_rate)
    loader = DataLoader(s.private, batch_size=s.batch_size, collate_fn=tuple)
    noise = {"noise_multiplier": s.noise_multiplier, "max_grad_norm": 1.0}
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=sgd, data_loader=loader, **noise
    )
    with_public_gradient(optimizer, model, loader, alpha=alpha, noisy_clip_norm=1.0)
    public = DataLoader(s.public, batch_size=256, shuffle=True, collate_fn=tuple)
    public_rows = public_batches(public)
    for batch in (batch for _ in range(s.epochs) for batch in loader):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.public_step(lambda: public_loss(model, next(public_rows)))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        test = DataLoader(s.test, batch_size=500, collate_fn=tuple)
        right = [model(x).argmax(1) == y for x, y in test]
    return torch.cat(right).float().mean().item(), optimizer


steps = len(s.private) / s.batch_size
cosine = schedules.cosine(decay_epochs=s.alpha_decay_epochs, steps_per_epoch=steps)
for name, is_warm, alpha in (("cold", False, 1), ("warm", True, 1), ("PDA-DPMD", True, cosine)):
    start = time.perf_counter()
    accuracy, optimizer = train(is_warm, alpha)
    epsilon, seconds = optimizer.spent(1e-5).epsilon, time.perf_counter() - start
    print(f"{name}: accuracy {accuracy:.1%}, epsilon {epsilon:.3f}, {seconds:.0f} s", flush=True)
optimizer.report(1e-5, results={"accuracy": accuracy}, seeded=True).write("opacus-report")
