"""Opacus with public data: DP-SGD from a cold and from a warm start, and PDA-DPMD, at one epsilon.

python examples/opacus/cifar10.py                   # random images, half a minute on a CPU
python examples/opacus/cifar10.py --paper FOLDER    # the paper's CIFAR-10 setting, on a GPU

Random images show that it runs; their accuracies say nothing about the methods.
"""

import argparse
import time

import torch
from images import like_cifar10, read_cifar10, shifted_and_mirrored
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

from mirrordp import schedules
from mirrordp.integrations.opacus import public_batches, warm_start, with_public_gradient

parser = argparse.ArgumentParser()
parser.add_argument("--paper", metavar="FOLDER", help="the folder of cifar-10-batches-bin")
paper = parser.parse_args().paper
device = "cuda" if torch.cuda.is_available() else "cpu"
private, public, test = read_cifar10(paper) if paper else like_cifar10()
width, batch_size, epochs = (32, 500, 100) if paper else (4, 40, 2)
patience, limit = (30, 300) if paper else (3, 12)
sigma, learning_rate, decay = (1.51, 0.2, 1000) if paper else (1.0, 0.1, 3)


def network():
    layers = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*layers).to(device)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0].to(device)), batch[1].to(device))


def public_loss(model, batch):
    return loss_fn(model, (shifted_and_mirrored(batch[0]), batch[1]))


def train(is_warm, alpha):
    torch.manual_seed(0)
    model = network()
    if is_warm:
        adam = torch.optim.Adam(model.parameters(), lr=1e-3 if paper else 1e-2)
        rows = DataLoader(public, batch_size=64)
        warm_start(model, public_loss, rows, optimizer=adam, patience=patience, max_epochs=limit)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate),
        data_loader=DataLoader(private, batch_size=batch_size),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
    )
    with_public_gradient(optimizer, model, loader, alpha=alpha, noisy_clip_norm=1.0)
    public_rows = public_batches(DataLoader(public, batch_size=256, shuffle=True))
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.public_step(lambda: public_loss(model, next(public_rows)))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [model(x.to(device)).argmax(1).cpu() == y for x, y in DataLoader(test, 500)]
    return torch.cat(right).float().mean().item(), optimizer


cosine = schedules.cosine(decay_epochs=decay, steps_per_epoch=len(private) / batch_size)
found = {}
for name, is_warm, alpha in (("cold", False, 1), ("warm", True, 1), ("PDA-DPMD", True, cosine)):
    start = time.perf_counter()
    found[name], optimizer = train(is_warm, alpha)
    seconds = time.perf_counter() - start
    epsilon = optimizer.spent(1e-5).epsilon
    print(f"{name}: accuracy {found[name]:.1%}, epsilon {epsilon:.3f}, {seconds:.0f} s")
optimizer.report(1e-5, results={"accuracy": found["PDA-DPMD"]}, seeded=True).write("opacus-report")
