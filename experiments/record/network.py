"""Wide residual networks with weight-standardised convolutions and group normalisation.

Nothing in them mixes examples, which batch normalisation would do, so that the loss of one example
is one unit of privacy. Order of operations as in De et al. (2022): ReLU, then normalisation, then
convolution.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from mirrordp.types import Params

GROUPS = 16
STEM = 16


@dataclasses.dataclass(frozen=True)
class WideResNet:
    """WRN-`depth`-`width` for images [n, height, width, channels].

    Parameters are float32. Layers compute in `dtype`, norms and logits in float32.

    Attributes:
        depth: 6 n + 4, for n blocks in each of three stages.
        width: multiple of the 16, 32 and 64 channels of the stages.
        num_classes: number of logits.
        dtype: of activations and convolutions.
        members: number of such networks, side by side, whose mean logits are the logits.
    """

    depth: int = 16
    width: int = 4
    num_classes: int = 10
    dtype: str = "float32"
    members: int = 1

    def __post_init__(self):
        if self.depth < 10 or self.depth % 6 != 4:
            raise ValueError(f"depth must be 6 n + 4 with n > 0, got {self.depth}. Use 16 or 28.")
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}.")
        if self.members < 1:
            raise ValueError(f"members must be at least 1, got {self.members}.")

    def __str__(self) -> str:
        name = f"WRN-{self.depth}-{self.width}"
        return name if self.members == 1 else f"{self.members} {name}"

    @property
    def member(self) -> "WideResNet":
        """One of the networks, alone."""
        return dataclasses.replace(self, members=1)

    @property
    def _blocks(self) -> list[tuple[int, int, int]]:
        """Inputs, outputs and stride of each block."""
        found, inputs = [], STEM
        for stage in range(3):
            for number in range((self.depth - 4) // 6):
                outputs = 16 * 2**stage * self.width
                found.append((inputs, outputs, 2 if stage > 0 and number == 0 else 1))
                inputs = outputs
        return found

    def init(self, key: jax.Array) -> Params:
        """Returns random parameters (a list for members); the output layer begins at zero."""
        if self.members > 1:
            return [self.member.init(one) for one in jax.random.split(key, self.members)]
        keys = iter(jax.random.split(key, 3 * len(self._blocks) + 1))
        blocks = []
        for inputs, outputs, stride in self._blocks:
            block = {
                "norm1": _norm_init(inputs),
                "conv1": _conv_init(next(keys), 3, inputs, outputs),
                "norm2": _norm_init(outputs),
                "conv2": _conv_init(next(keys), 3, outputs, outputs),
            }
            if (inputs, stride) != (outputs, 1):
                block["shortcut"] = _conv_init(next(keys), 1, inputs, outputs)
            blocks.append(block)
        last = self._blocks[-1][1]
        return {
            "stem": _conv_init(next(keys), 3, 3, STEM),
            "blocks": blocks,
            "norm": _norm_init(last),
            "out": {
                "kernel": jnp.zeros((last, self.num_classes)),
                "bias": jnp.zeros(self.num_classes),
            },
        }

    def predict(self, params: Params, images: jax.Array) -> jax.Array:
        """Returns logits [n, num_classes] of images [n, height, width, channels]."""
        if self.members > 1:
            logits = [self.member.predict(one, images) for one in params]
            return sum(logits[1:], start=logits[0]) / len(logits)
        x = _conv(images.astype(self.dtype), params["stem"], 1)
        for block, (_, _, stride) in zip(params["blocks"], self._blocks, strict=True):
            y = _norm(jax.nn.relu(x), block["norm1"])
            shortcut = _conv(y, block["shortcut"], stride) if "shortcut" in block else x
            y = _conv(y, block["conv1"], stride)
            y = _norm(jax.nn.relu(y), block["norm2"])
            x = shortcut + _conv(y, block["conv2"], 1)
        x = _norm(jax.nn.relu(x), params["norm"])
        x = x.astype(jnp.float32).mean((1, 2))
        return x @ params["out"]["kernel"] + params["out"]["bias"]


def num_parameters(params: Params) -> int:
    """Returns how many numbers a network has."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _conv_init(key: jax.Array, size: int, inputs: int, outputs: int) -> Params:
    kernel = jax.random.normal(key, (size, size, inputs, outputs))
    kernel *= math.sqrt(1 / (size * size * inputs))
    return {"kernel": kernel, "gain": jnp.ones(outputs), "bias": jnp.zeros(outputs)}


def _norm_init(channels: int) -> Params:
    return {"gain": jnp.ones(channels), "bias": jnp.zeros(channels)}


def standardised(layer: Params) -> jax.Array:
    """Returns a kernel with mean zero and length `gain` for each of its outputs."""
    kernel = layer["kernel"]
    centred = kernel - kernel.mean((0, 1, 2))
    squares = (centred**2).sum((0, 1, 2))
    return centred * layer["gain"] * lax.rsqrt(jnp.maximum(squares, 1e-4))


def _conv(x: jax.Array, layer: Params, stride: int) -> jax.Array:
    out = lax.conv_general_dilated(
        x,
        standardised(layer).astype(x.dtype),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return out + layer["bias"].astype(x.dtype)


def _norm(x: jax.Array, layer: Params) -> jax.Array:
    """Normalises groups to mean 0 and variance 1 over the group's pixels and channels."""
    grouped = x.reshape(*x.shape[:3], GROUPS, -1).astype(jnp.float32)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = (grouped**2).mean((1, 2, 4), keepdims=True) - mean**2
    scaled = (grouped - mean) * lax.rsqrt(jnp.maximum(variance, 0.0) + 1e-5)
    return (scaled.reshape(x.shape) * layer["gain"] + layer["bias"]).astype(x.dtype)
