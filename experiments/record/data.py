"""The images of a run: public, private, and validation or test images.

A search needs no test images, so that `split` can write a folder without them, and a machine that
only searches never holds them.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import datasets
from experiments.datasets import download, images as files
from experiments.datasets.prepared import split_indices

PARTS = ("public", "validation", "private")
PUBLIC_FRACTION = 0.04

Examples = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Images:
    """uint8 images [n, 32, 32, 3] and labels of each part, and the scaling from public ones.

    Attributes:
        public: learned from at no cost.
        private: what is protected; None where only public images are learned from.
        judges: validation images of a search, taken out of the private ones and *not* covered by
            the guarantee, or the test images of a final run.
        judged_by: `validation` or `test`.
    """

    public: Examples
    private: Examples | None
    judges: Examples
    judged_by: str

    def scaled(self, examples: Examples) -> Examples:
        """Returns float32 images, scaled by the public mean and standard deviation, and labels."""
        mean, std = files.scaling(self.public[0])
        return files.scale(examples[0], mean, std), examples[1].astype(np.int32)


def write_split(data_root: Path | None, folder: Path, *, holdout: int) -> dict[str, int]:
    """Writes the parts of a search below `folder`, without test images; returns their sizes."""
    images, labels = _read(data_root, files.CIFAR10_TRAIN)
    private, public, validation = split_indices(
        len(images), public_fraction=PUBLIC_FRACTION, holdout=holdout, seed=0
    )
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"public": public, "validation": validation, "private": private}
    for part in PARTS:
        np.savez(folder / f"{part}.npz", images=images[rows[part]], labels=labels[rows[part]])
    return {part: len(rows[part]) for part in PARTS}


def read_split(folder: Path, *, private: bool) -> Images:
    """Returns the parts that `write_split` wrote, without private ones if not needed."""
    found: dict[str, Examples] = {}
    for part in PARTS if private else PARTS[:2]:
        path = folder / f"{part}.npz"
        if not path.exists():
            raise datasets.DataError(
                f"expected {path}. Write it with `python -m experiments record split {folder}`."
            )
        with np.load(path) as arrays:
            found[part] = arrays["images"], arrays["labels"]
    return Images(found["public"], found.get("private"), found["validation"], "validation")


def read_final(data_root: Path | None) -> Images:
    """Returns all 48,000 private images, and the test images as judges."""
    images, labels = _read(data_root, files.CIFAR10_TRAIN)
    private, public, _ = split_indices(
        len(images), public_fraction=PUBLIC_FRACTION, holdout=0, seed=0
    )
    take = lambda rows: (images[rows], labels[rows])  # noqa: E731
    test = _read(data_root, [files.CIFAR10_TEST])
    return Images(take(public), take(private), test, "test")


def _read(data_root: Path | None, names: Sequence[str]) -> Examples:
    root = datasets.data_folder(data_root)
    paths = [root / files.CIFAR10_FOLDER / name for name in names]
    download.require(root, download.CIFAR10, paths)
    batches = [files.read_cifar10(path) for path in paths]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return images, labels


def synthetic(*, num_private: int = 256, seed: int = 0) -> Images:
    """Makes up images for tests: a pattern of large squares for each class, plus noise."""
    rng = np.random.default_rng(seed)
    left = rng.integers(0, 256, (10, 4, 2, 3))
    patterns = np.concatenate([left, left[:, :, ::-1]], axis=2).repeat(8, axis=1).repeat(8, axis=2)

    def part(count: int) -> Examples:
        labels = rng.integers(0, 10, count)
        noise = rng.integers(-60, 60, (count, 32, 32, 3))
        return np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels.astype(np.int32)

    return Images(part(64), part(num_private), part(64), "validation")
