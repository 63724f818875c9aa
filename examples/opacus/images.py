"""Images and settings for the example: CIFAR-10 as in the paper, or random images of its shape."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset


class Rows(TensorDataset):
    """Rows in the device's memory that are read a batch at a time, which is faster than singly.

    Loaders need `collate_fn=tuple`, since nothing is left to collate.
    """

    def __init__(self, *tensors):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(*(tensor.to(device) for tensor in tensors))

    def __getitems__(self, numbers):
        return self[torch.tensor(numbers, dtype=torch.long, device=self.tensors[0].device)]


class Setting(NamedTuple):
    """What is trained on, and how."""

    private: Rows
    public: Rows
    test: Rows
    width: int
    batch_size: int
    epochs: int
    noise_multiplier: float
    learning_rate: float
    alpha_decay_epochs: float
    public_rate: float
    patience: int
    max_epochs: int


def setting(folder=None):
    """The paper's setting with CIFAR-10 from a folder, or a small one with random images."""
    if folder is None:
        return Setting(*like_cifar10(), 4, 40, 2, 1.0, 0.1, 3, 1e-2, 3, 12)
    return Setting(*read_cifar10(folder), 32, 500, 100, 1.51, 0.2, 1000, 1e-3, 30, 300)


def like_cifar10():
    """240 private, 200 public and 300 test images, each a pattern of its class and noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(10, 3, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(coarse + coarse.flip(3), size=32, mode="bilinear")

    def draw(count):
        labels = torch.randint(0, 10, (count,), generator=generator)
        noise = torch.randn(count, 3, 32, 32, generator=generator)
        return Rows(patterns[labels] + noise, labels)

    return draw(240), draw(200), draw(300)


def read_cifar10(folder, *, num_public=2_000, seed=0):
    """48,000 private, 2,000 public and 10,000 test images, scaled by constants of the public ones.

    Args:
        folder: where the binary version of CIFAR-10 lies, in `cifar-10-batches-bin`.
        num_public: the number of training images that count as public.
        seed: decides which.
    """
    names = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
    paths = [Path(folder) / "cifar-10-batches-bin" / name for name in names]
    rows = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, 3073)
    images, labels = torch.tensor(rows[:, 1:]).reshape(-1, 3, 32, 32), torch.tensor(rows[:, 0])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(50_000))
    public, private = order[:num_public], order[num_public:]
    known = images[public].float()
    mean = known.mean((0, 2, 3), keepdim=True)
    std = known.std((0, 2, 3), keepdim=True)

    def part(chosen):
        return Rows((images[chosen].float() - mean) / std, labels[chosen].long())

    return part(private), part(public), part(torch.arange(50_000, 60_000))


def shifted_and_mirrored(images, *, margin=4):
    """Returns images that are shifted by up to `margin` pixels, and half of them mirrored."""
    count, _, height, width = images.shape
    device = images.device
    padded = torch.nn.functional.pad(images, (margin,) * 4, mode="replicate")
    down, right = torch.randint(0, 2 * margin + 1, (2, count, 1), device=device)
    columns = right + torch.arange(width, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    rows = (down + torch.arange(height, device=device))[:, None, :, None]
    index = torch.arange(count, device=device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=device)[None, :, None, None]
    return padded[index, channels, rows, columns[:, None, None, :]]
