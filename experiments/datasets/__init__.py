"""Data sets of the paper's experiments on images and text, split into private and public parts.

`prepare` reads the published files (fetching them where they are missing), `synthetic` makes up
data of the same shapes for quick tests. Both return a `Prepared`.
"""

import os
from pathlib import Path

import numpy as np

from experiments.datasets import images, text
from experiments.datasets.prepared import DataError, Prepared

__all__ = ["NAMES", "DataError", "Prepared", "data_folder", "prepare", "synthetic"]

NAMES = ("cifar10", "emnist", "wikitext2")


def data_folder(data_root: Path | None = None) -> Path:
    """Returns the folder of the data: `folder`, `MIRRORDP_DATA` or `~/.cache/mirrordp`."""
    if data_root is not None:
        return Path(data_root)
    return Path(os.environ.get("MIRRORDP_DATA") or Path.home() / ".cache" / "mirrordp")


def prepare(
    name: str,
    data_root: Path | None,
    *,
    holdout: int = 0,
    public_fraction: float = 0.04,
    seed: int = 0,
    vocabulary: str = "train",
    public_text: str = "split",
) -> Prepared:
    """Reads a data set, splits its training examples and encodes everything.

    Of n training examples ⌈public_fraction · n⌉ are public; which ones depends on the seed only.

    Args:
        name: `cifar10`, `emnist` (ByMerge) or `wikitext2`.
        data_root: folder of the data, see `data_folder`.
        holdout: images only: how many private examples are taken out of `private` to judge a
            sweep. What is learned from them is not covered by the guarantee.
        public_fraction: part of the training examples that is public.
        seed: decides the split and, for other public text, the sample.
        vocabulary: text only. `train`: the most frequent words of all training text, as in the
            paper; this is not covered by the guarantee. `public`: those of public text.
        public_text: text only. `split`: a part of the training sequences. `other`: all training
            sequences are private, and 48,764 public ones come from WikiText-103 (or its stand-in)
            as in the paper's appendix: words outside the vocabulary become unknown and sequences
            that equal a private one are left out, which reads private text.

    Raises:
        DataError: a file is missing and cannot be fetched, or is damaged.
    """
    _check_name(name)
    root = data_folder(data_root)
    options = {"holdout": holdout, "public_fraction": public_fraction, "seed": seed}
    if name == "wikitext2":
        return text.prepare_wikitext2(
            root, **options, vocabulary=vocabulary, public_text=public_text
        )
    if (vocabulary, public_text) != ("train", "split"):
        raise ValueError(
            f"vocabulary and public_text are options of wikitext2, got them for {name}."
        )
    read = images.prepare_cifar10 if name == "cifar10" else images.prepare_emnist
    return read(root, **options)


def synthetic(
    name: str,
    *,
    num_private: int = 512,
    num_public: int = 64,
    num_validation: int = 64,
    num_test: int = 128,
    seed: int = 0,
) -> Prepared:
    """Returns made-up data of the shapes and types of `prepare`, for tests.

    Images are a pattern of their class plus noise and words follow Zipf's law, so that a model can
    learn something; the numbers mean nothing beyond that.
    """
    _check_name(name)
    rng = np.random.default_rng(seed)
    sizes = {
        "private": num_private,
        "public": num_public,
        "validation": num_validation,
        "test": num_test,
    }
    facts = {"counts": {"train": num_private + num_validation + num_public} | sizes, "seed": seed}
    if name == "wikitext2":
        weights = 1 / np.arange(1, text.VOCABULARY_SIZE + 1)

        def make(count: int):
            words = rng.choice(
                text.VOCABULARY_SIZE, (count, text.LENGTH), p=weights / weights.sum()
            )
            return words.astype(np.int32)

        facts |= {
            "sequence_length": text.LENGTH,
            "vocabulary": {"from": "made up", "size": text.VOCABULARY_SIZE},
        }
    else:
        shape = (32, 32, 3) if name == "cifar10" else (28, 28, 1)
        num_classes = images.CIFAR10_CLASSES if name == "cifar10" else images.EMNIST_CLASSES
        patterns = rng.standard_normal((num_classes, *shape), np.float32)

        def make(count: int):
            labels = rng.integers(num_classes, size=count, dtype=np.int32)
            noise = rng.standard_normal((count, *shape), np.float32)
            return patterns[labels] + noise, labels

        facts |= {"num_classes": num_classes, "image_shape": list(shape)}
    return Prepared(
        **{part: make(count) if count else None for part, count in sizes.items()},
        label=f"synthetic data in the shape of {name}",
        is_complete=False,
        facts=facts | {"not_covered": []},
    )


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}.")
