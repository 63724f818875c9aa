"""CIFAR-10 and EMNIST ByMerge from the files that their owners publish.

Pixels are divided by 255 and then scaled channel by channel to mean 0 and standard deviation 1 of
the public images: constants from private images would be outside the guarantee.
"""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from experiments.datasets import download
from experiments.datasets.prepared import DataError, Prepared, has_digest, split_indices, thousands

CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_COUNTS = (50_000, 10_000)
CIFAR10_CLASSES = 10
CIFAR10_RECORD = 1 + 3 * 32 * 32

EMNIST_FOLDER = "emnist"
EMNIST_COUNTS = (697_932, 116_323)
EMNIST_CLASSES = 47

Examples = tuple[np.ndarray, np.ndarray]


def read_cifar10(path: Path) -> Examples:
    """Returns the images, uint8 [n, 32, 32, 3], and labels of one binary batch.

    A record is one byte of label and 3,072 of pixels: the red plane, then green, then blue.
    """
    raw = np.fromfile(path, np.uint8)
    if not raw.size or raw.size % CIFAR10_RECORD:
        raise DataError(
            f"{path} should hold records of {CIFAR10_RECORD:,} bytes, but has {raw.size:,} bytes. "
            "It is cut or no CIFAR-10 binary batch: delete it, and it is fetched again."
        )
    records = raw.reshape(-1, CIFAR10_RECORD)
    labels = _checked_labels(records[:, 0], CIFAR10_CLASSES, path)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Returns the uint8 array of an IDX file, compressed by gzip or plain.

    The header is big-endian: two zero bytes, the type (8: unsigned byte), the number of dimensions,
    then each dimension as 32 bits.
    """
    again = "Delete it, and it is fetched again."
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        raw = gzip.decompress(path.read_bytes()) if is_gzip else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a cut or damaged gzip file ({error}). {again}") from error
    header = 4 + 4 * dimensions
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) < header:
        raise DataError(
            f"{path} should begin like an IDX file of unsigned bytes in {dimensions} dimensions "
            f"(0, 0, 8, {dimensions}), but begins with {tuple(raw[:4])}. {again}"
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(raw) != expected:
        raise DataError(
            f"{path} announces {' x '.join(map(str, shape))} bytes and should be {expected:,} "
            f"bytes long without compression, but is {len(raw):,}. {again}"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_emnist(folder: Path, part: str) -> Examples:
    """Returns upright images, uint8 [n, 28, 28, 1], and labels of `train` or `test`."""
    image_path = _either(folder / f"emnist-bymerge-{part}-images-idx3-ubyte")
    label_path = _either(folder / f"emnist-bymerge-{part}-labels-idx1-ubyte")
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if images.shape[1:] != (28, 28) or len(images) != len(labels) or not len(images):
        raise DataError(
            f"{image_path} and {label_path} should hold 28 x 28 images with one label each, but "
            f"have the shapes {images.shape} and {labels.shape}. They do not belong together."
        )
    # The owners store columns before rows.
    upright = images.transpose(0, 2, 1)[..., None]
    return upright, _checked_labels(labels, EMNIST_CLASSES, label_path)


def prepare_cifar10(root: Path, **options: Any) -> Prepared:
    """Prepares CIFAR-10: 50,000 training and 10,000 test images of 10 classes."""
    folder = root / CIFAR10_FOLDER
    paths = [folder / name for name in (*CIFAR10_TRAIN, CIFAR10_TEST)]
    download.require(root, download.CIFAR10, paths)
    batches = [read_cifar10(path) for path in paths]
    images, labels = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
    is_published = all(has_digest(path, "md5", CIFAR10_MD5[path.name]) for path in paths)
    return _prepare(
        "CIFAR-10",
        (images, labels),
        batches[-1],
        published_counts=CIFAR10_COUNTS,
        num_classes=CIFAR10_CLASSES,
        is_published=is_published,
        **options,
    )


def prepare_emnist(root: Path, **options: Any) -> Prepared:
    """Prepares EMNIST ByMerge: 697,932 training and 116,323 test images of 47 classes.

    Its files have no published checksums of their own, only their archive has; that they are whole
    is judged by the number of images.
    """
    folder = root / EMNIST_FOLDER
    names = [
        f"emnist-bymerge-{part}-{kind}-ubyte"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    download.require(root, download.EMNIST, [_either(folder / name) for name in names])
    return _prepare(
        "EMNIST ByMerge",
        read_emnist(folder, "train"),
        read_emnist(folder, "test"),
        published_counts=EMNIST_COUNTS,
        num_classes=EMNIST_CLASSES,
        is_published=True,
        **options,
    )


def scaling(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each channel's mean and standard deviation as float64, in units of 1/255."""
    mean, std = [], []
    for channel in range(images.shape[-1]):
        counts = np.bincount(images[..., channel].ravel(), minlength=256)
        values = np.arange(256) / 255
        mean.append(np.average(values, weights=counts))
        std.append(np.sqrt(np.average((values - mean[-1]) ** 2, weights=counts)))
    # A channel that is constant in public images stays finite: one grey level counts as one.
    return np.array(mean), np.maximum(std, 1 / 255)


def scale(images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Returns (images / 255 - mean) / std as contiguous float32, with one copy in float32."""
    scaled = np.ascontiguousarray(images).astype(np.float32).reshape(len(images), -1)
    # One long row of constants: broadcasting along a last axis of three is slow.
    num_pixels = scaled.shape[1] // len(mean)
    scaled -= np.tile(255 * mean, num_pixels).astype(np.float32)
    scaled /= np.tile(255 * std, num_pixels).astype(np.float32)
    return scaled.reshape(images.shape)


def _prepare(
    title: str,
    train: Examples,
    test: Examples,
    *,
    published_counts: tuple[int, int],
    num_classes: int,
    is_published: bool,
    holdout: int,
    public_fraction: float,
    seed: int,
) -> Prepared:
    images, labels = train
    private, public, held_out = split_indices(
        len(images), public_fraction=public_fraction, holdout=holdout, seed=seed
    )
    mean, std = scaling(images[public])

    def part(rows: np.ndarray) -> Examples:
        return scale(images[rows], mean, std), labels[rows]

    counts = (len(images), len(test[0]))
    label = title
    if counts[0] != published_counts[0]:
        label += f", a sample of {thousands(counts[0])} of {thousands(published_counts[0])}"
        label += " training images"
    if counts[1] != published_counts[1]:
        label += f", a sample of {thousands(counts[1])} of {thousands(published_counts[1])}"
        label += " test images"
    if counts == published_counts and not is_published:
        label += ", files that differ from the published ones"
    not_covered = []
    if holdout:
        not_covered.append(
            f"validation: {thousands(holdout)} private examples, read without noise; scores on "
            "them, and choices by these scores, are not covered by the guarantee"
        )
    return Prepared(
        private=part(private),
        public=part(public),
        validation=part(held_out) if holdout else None,
        test=(scale(test[0], mean, std), test[1]),
        label=label,
        is_complete=counts == published_counts and is_published,
        facts={
            "counts": {
                "train": counts[0],
                "private": len(private),
                "public": len(public),
                "validation": len(held_out),
                "test": counts[1],
            },
            "public_fraction": public_fraction,
            "seed": seed,
            "num_classes": num_classes,
            "image_shape": list(images.shape[1:]),
            "scaling": {"from": "public images", "mean": mean.tolist(), "std": std.tolist()},
            "not_covered": not_covered,
        },
    )


def _either(path: Path) -> Path:
    """Returns the plain file where there is one, else the compressed one."""
    return path if path.exists() else path.with_name(path.name + ".gz")


def _checked_labels(labels: np.ndarray, num_classes: int, path: Path) -> np.ndarray:
    if labels.max() >= num_classes:
        raise DataError(
            f"{path} should hold labels below {num_classes}, but has {labels.max()}. It is damaged "
            "or belongs to another data set."
        )
    return labels.astype(np.int32)
