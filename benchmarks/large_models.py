"""Models that people train today, written in JAX as users write them, for `benchmarks.models`.

A model is a dictionary of parameters, the loss of one example as a pure function of them, and a
batch of noise in the right shape. Names say what a model is:

    gpt2-{small,medium,large}-{512,128,1024}[-scan][-tied][-checkpoint][-bf16]
    lora-{8,64}-{added,merged}      adapters of GPT-2 small, 512 positions, the rest frozen
    vit-base  bert-base-mlm  roberta-base-classify  wrn-16-4  wrn-16-4-views

Without options GPT-2 has a Python loop over its layers, an output layer of its own, and float32
throughout. Size "full" is the published one, "tiny" has two layers of width 32 and a batch of four.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.record.network import WideResNet
from mirrordp.types import Batch, LossFn, Params, PyTree


class Model(NamedTuple):
    """A model with a batch; arrays are on the host.

    Attributes:
        params: the parameters.
        loss: `loss(params, example) -> scalar`.
        batch: arrays with an axis of examples first.
        trainable: a tree of booleans, a prefix of one over the parameters; None for all of them.
    """

    params: Params
    loss: LossFn
    batch: Batch
    trainable: PyTree = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """The shape of a stack of transformer layers; MLPs are four times as wide."""

    layers: int
    width: int
    heads: int


TINY = Stack(2, 32, 2)
BASE = Stack(12, 768, 12)
GPT2 = {"small": BASE, "medium": Stack(24, 1024, 16), "large": Stack(36, 1280, 20)}
BATCHES = {512: 16, 128: 64, 1024: 8}
TINY_BATCH = 4
OPTIONS = ("scan", "tied", "checkpoint", "bf16")


# Parts of transformers. Parameters are float32; `dtype` is that of the matrix products.


def dense(x: jax.Array, layer: Params, dtype: Any) -> jax.Array:
    return x.astype(dtype) @ layer["w"].astype(dtype) + layer["b"].astype(dtype)


def layer_norm(x: jax.Array, layer: Params) -> jax.Array:
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * layer["gain"] + layer["bias"]


def attention(inputs: jax.Array, heads: int, causal: bool) -> jax.Array:
    """Mixes positions: [positions, 3 * width], queries, keys and values, to [positions, width]."""
    positions = inputs.shape[0]
    query, key, value = (
        part.reshape(positions, heads, -1) for part in jnp.split(inputs, 3, axis=-1)
    )
    scores = jnp.einsum("qhd,khd->hqk", query, key).astype(jnp.float32)
    scores *= query.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(np.tri(positions, dtype=bool), scores, -1e9)
    weights = jax.nn.softmax(scores).astype(inputs.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(positions, -1)


def mlp(x: jax.Array, layer: Params, dtype: Any) -> jax.Array:
    return dense(jax.nn.gelu(dense(x, layer["up"], dtype)), layer["down"], dtype)


def block(layer: Params, x: jax.Array, *, heads: int, causal: bool, dtype: Any) -> jax.Array:
    """One layer that normalises first, as in GPT-2 and ViT."""
    mixed = attention(dense(layer_norm(x, layer["norm1"]), layer["qkv"], dtype), heads, causal)
    x = x + dense(mixed, layer["out"], dtype)
    return x + mlp(layer_norm(x, layer["norm2"]), layer, dtype)


def bert_block(layer: Params, x: jax.Array, *, heads: int) -> jax.Array:
    """One layer that normalises last, as in BERT."""
    mixed = attention(dense(x, layer["qkv"], x.dtype), heads, causal=False)
    x = layer_norm(x + dense(mixed, layer["out"], x.dtype), layer["norm1"])
    return layer_norm(x + mlp(x, layer, x.dtype), layer["norm2"])


def through_layers(
    apply: Callable[[Params, jax.Array], jax.Array], layers: Params, x: jax.Array, checkpoint: bool
) -> jax.Array:
    """Applies a list of layers in a loop, or one dictionary of stacked layers by `lax.scan`."""
    if checkpoint:
        apply = jax.checkpoint(apply)
    if isinstance(layers, dict):
        return lax.scan(lambda x, layer: (apply(layer, x), None), x, layers)[0]
    for layer in layers:
        x = apply(layer, x)
    return x


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log p(label) at each position."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


class Draw:
    """Random parameters, from NumPy, which has nothing to compile."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 0.02) -> np.ndarray:
        return scale * self.rng.standard_normal(shape, np.float32)

    def tokens(self, vocabulary: int, *shape: int) -> np.ndarray:
        return self.rng.integers(0, vocabulary, shape, dtype=np.int32)

    def dense(self, inputs: int, outputs: int, *, scale: float | None = None) -> Params:
        return {
            "w": self.normal(inputs, outputs, scale=scale or inputs**-0.5),
            "b": np.zeros(outputs, np.float32),
        }

    def norm(self, width: int) -> Params:
        return {"gain": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    def layer(self, width: int) -> Params:
        return {
            "norm1": self.norm(width),
            "qkv": self.dense(width, 3 * width),
            "out": self.dense(width, width),
            "norm2": self.norm(width),
            "up": self.dense(width, 4 * width),
            "down": self.dense(4 * width, width),
        }

    def layers(self, stack: Stack) -> list[Params]:
        return [self.layer(stack.width) for _ in range(stack.layers)]


# Models


def gpt2(
    stack: Stack,
    positions: int,
    batch_size: int,
    *,
    vocabulary: int = 50257,
    scan: bool = False,
    tied: bool = False,
    checkpoint: bool = False,
    bf16: bool = False,
) -> Model:
    """A causal language model; an example is `positions + 1` tokens."""
    draw = Draw(0)
    dtype = jnp.bfloat16 if bf16 else jnp.float32
    layers = draw.layers(stack)
    params = {
        "tokens": draw.normal(vocabulary, stack.width),
        "positions": draw.normal(positions, stack.width),
        "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers) if scan else layers,
        "norm": draw.norm(stack.width),
    }
    if not tied:
        params["head"] = draw.normal(stack.width, vocabulary, scale=stack.width**-0.5)
    apply = functools.partial(block, heads=stack.heads, causal=True, dtype=dtype)

    def loss(params, tokens):
        x = params["tokens"][tokens[:-1]] + params["positions"]
        x = through_layers(apply, params["layers"], x, checkpoint)
        head = params["tokens"].T if tied else params["head"]
        logits = layer_norm(x, params["norm"]).astype(dtype) @ head.astype(dtype)
        return cross_entropy(logits, tokens[1:]).mean()

    return Model(params, loss, draw.tokens(vocabulary, batch_size, positions + 1))


def lora(
    stack: Stack,
    positions: int,
    batch_size: int,
    *,
    rank: int,
    merged: bool,
    vocabulary: int = 50257,
) -> Model:
    """GPT-2 with trainable low-rank adapters on the input of attention, everything else frozen."""
    base = gpt2(stack, positions, batch_size, vocabulary=vocabulary)
    draw = Draw(1)
    adapters = [
        # Training starts with b = 0, which would leave a without a gradient.
        {"a": draw.normal(stack.width, rank), "b": draw.normal(rank, 3 * stack.width)}
        for _ in range(stack.layers)
    ]

    def adapted(x, layer, adapter):
        if merged:
            return x @ (layer["w"] + adapter["a"] @ adapter["b"]) + layer["b"]
        return x @ layer["w"] + (x @ adapter["a"]) @ adapter["b"] + layer["b"]

    def loss(params, tokens):
        base = params["base"]
        x = base["tokens"][tokens[:-1]] + base["positions"]
        for layer, adapter in zip(base["layers"], params["adapters"], strict=True):
            inputs = adapted(layer_norm(x, layer["norm1"]), layer["qkv"], adapter)
            x = x + dense(attention(inputs, stack.heads, causal=True), layer["out"], x.dtype)
            x = x + mlp(layer_norm(x, layer["norm2"]), layer, x.dtype)
        logits = layer_norm(x, base["norm"]) @ base["head"]
        return cross_entropy(logits, tokens[1:]).mean()

    params = {"base": base.params, "adapters": adapters}
    return Model(params, loss, base.batch, {"base": False, "adapters": True})


def vit(stack: Stack, side: int, patch: int, batch_size: int, *, classes: int) -> Model:
    """A vision transformer with a class token; an example is an image and its label."""
    draw = Draw(0)
    params = {
        "patches": {
            "w": draw.normal(patch, patch, 3, stack.width, scale=(3 * patch**2) ** -0.5),
            "b": np.zeros(stack.width, np.float32),
        },
        "class": draw.normal(1, stack.width),
        "positions": draw.normal((side // patch) ** 2 + 1, stack.width),
        "layers": draw.layers(stack),
        "norm": draw.norm(stack.width),
        "head": draw.dense(stack.width, classes),
    }
    apply = functools.partial(block, heads=stack.heads, causal=False, dtype=jnp.float32)

    def loss(params, example):
        image, label = example
        patches = lax.conv_general_dilated(
            image[None],
            params["patches"]["w"],
            (patch, patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )[0]
        patches = patches.reshape(-1, stack.width) + params["patches"]["b"]
        x = jnp.concatenate([params["class"], patches]) + params["positions"]
        x = through_layers(apply, params["layers"], x, checkpoint=False)
        logits = dense(layer_norm(x[0], params["norm"]), params["head"], x.dtype)
        return cross_entropy(logits, label)

    images = draw.normal(batch_size, side, side, 3, scale=1.0)
    return Model(params, loss, (images, draw.tokens(classes, batch_size)))


def bert(
    stack: Stack, positions: int, batch_size: int, *, vocabulary: int, classes: int | None = None
) -> Model:
    """An encoder of text: predicts masked words, or one of `classes` from the first position.

    An example is its tokens and a label, or its tokens, the words behind them and 1 where a word is
    masked. The words' output layer is tied to the embedding.
    """
    draw = Draw(0)
    width = stack.width
    params = {
        "tokens": draw.normal(vocabulary, width),
        "positions": draw.normal(positions, width),
        "type": draw.normal(width),
        "norm": draw.norm(width),
        "layers": draw.layers(stack),
        "pooler": draw.dense(width, width),
    }
    apply = functools.partial(bert_block, heads=stack.heads)
    tokens = draw.tokens(vocabulary, batch_size, positions)

    def encode(params, tokens):
        x = params["tokens"][tokens] + params["positions"] + params["type"]
        x = layer_norm(x, params["norm"])
        return through_layers(apply, params["layers"], x, checkpoint=False)

    if classes is not None:
        params["head"] = draw.dense(width, classes)

        def label_loss(params, example):
            tokens, label = example
            x = encode(params, tokens)[0]
            x = jnp.tanh(dense(x, params["pooler"], x.dtype))
            return cross_entropy(dense(x, params["head"], x.dtype), label)

        return Model(params, label_loss, (tokens, draw.tokens(classes, batch_size)))

    params["head"] = {"norm": draw.norm(width), "bias": np.zeros(vocabulary, np.float32)}

    def masked_loss(params, example):
        tokens, words, is_masked = example
        x = jax.nn.gelu(dense(encode(params, tokens), params["pooler"], jnp.float32))
        x = layer_norm(x, params["head"]["norm"])
        losses = cross_entropy(x @ params["tokens"].T + params["head"]["bias"], words)
        return (losses * is_masked).sum() / is_masked.sum()

    words = draw.tokens(vocabulary, batch_size, positions)
    is_masked = (draw.rng.random((batch_size, positions)) < 0.15).astype(np.float32)
    is_masked[:, 0] = 1
    return Model(params, masked_loss, (tokens, words, is_masked))


def wide_resnet(network: WideResNet, side: int, batch_size: int, *, views: int) -> Model:
    """The network of `experiments.record`; an example is views of one image, and its label.

    The views are made beforehand: what random shifts cost is not the question here.
    """
    draw = Draw(0)

    def start(path, leaf):
        if "gain" in jax.tree_util.keystr(path):
            return np.ones(leaf.shape, np.float32)
        if "bias" in jax.tree_util.keystr(path):
            return np.zeros(leaf.shape, np.float32)
        return draw.normal(*leaf.shape, scale=math.prod(leaf.shape[:-1]) ** -0.5)

    # Not `init` itself: with its output layer of zeros the other layers would have no gradient.
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(start, shapes)

    def loss(params, example):
        images, label = example
        logits = network.predict(params, images)
        return (jax.nn.logsumexp(logits, axis=1) - logits[:, label]).mean()

    images = draw.normal(batch_size, views, side, side, 3, scale=1.0)
    return Model(params, loss, (images, draw.tokens(network.num_classes, batch_size)))


# Names


def _gpt2_named(size: str, positions: int, options: tuple[str, ...], tiny: bool) -> Model:
    flags = dict.fromkeys(options, True)
    if tiny:
        return gpt2(TINY, positions // 32, TINY_BATCH, vocabulary=61, **flags)
    return gpt2(GPT2[size], positions, BATCHES[positions], **flags)


def _lora_named(rank: int, merged: bool, tiny: bool) -> Model:
    if tiny:
        return lora(TINY, 16, TINY_BATCH, rank=max(2, rank // 16), merged=merged, vocabulary=61)
    return lora(BASE, 512, BATCHES[512], rank=rank, merged=merged)


def _vit_named(tiny: bool) -> Model:
    if tiny:
        return vit(TINY, 16, 4, TINY_BATCH, classes=10)
    return vit(BASE, 224, 16, 64, classes=1000)


def _bert_named(vocabulary: int, classes: int | None, tiny: bool) -> Model:
    if tiny:
        return bert(TINY, 8, TINY_BATCH, vocabulary=61, classes=classes)
    return bert(BASE, 128, 64, vocabulary=vocabulary, classes=classes)


def _wrn_named(views: int, batch_size: int, tiny: bool) -> Model:
    if tiny:
        return wide_resnet(WideResNet(10, 1), 8, TINY_BATCH, views=min(views, 2))
    return wide_resnet(WideResNet(16, 4), 32, batch_size, views=views)


def _named() -> dict[str, Callable[[bool], Model]]:
    found = {}
    for size, positions in itertools.product(GPT2, BATCHES):
        for used in itertools.product((False, True), repeat=len(OPTIONS)):
            options = tuple(itertools.compress(OPTIONS, used))
            name = "-".join(["gpt2", size, str(positions), *options])
            found[name] = functools.partial(_gpt2_named, size, positions, options)
    for rank, form in itertools.product((8, 64), ("added", "merged")):
        found[f"lora-{rank}-{form}"] = functools.partial(_lora_named, rank, form == "merged")
    return found | {
        "vit-base": _vit_named,
        "bert-base-mlm": functools.partial(_bert_named, 30522, None),
        "roberta-base-classify": functools.partial(_bert_named, 50265, 2),
        "wrn-16-4": functools.partial(_wrn_named, 1, 512),
        "wrn-16-4-views": functools.partial(_wrn_named, 16, 64),
    }


MODELS = _named()
"""All models by name; a value takes whether the model is tiny."""

TABLE = (
    *(f"gpt2-small-{positions}" for positions in BATCHES),
    *(f"gpt2-small-{positions}-scan-tied" for positions in BATCHES),
    "gpt2-small-512-tied",
    "gpt2-small-512-scan",
    "gpt2-small-512-checkpoint",
    "gpt2-small-512-scan-tied-checkpoint",
    "gpt2-small-512-bf16",
    "gpt2-small-512-scan-tied-bf16",
    *(f"gpt2-medium-{positions}" for positions in BATCHES),
    "gpt2-medium-512-scan-tied",
    "gpt2-medium-512-scan-tied-checkpoint",
    *(f"gpt2-large-{positions}-scan-tied" for positions in BATCHES),
    "gpt2-large-512-scan-tied-checkpoint",
    "vit-base",
    "bert-base-mlm",
    "roberta-base-classify",
    "lora-8-added",
    "lora-8-merged",
    "lora-64-added",
    "lora-64-merged",
    "wrn-16-4",
    "wrn-16-4-views",
)
"""The rows of the table, in its order."""


def table_names(sizes: str) -> list[str]:
    """Returns the table's rows; tiny GPT-2 is the same for all three widths, so it appears once."""
    larger = ("gpt2-medium", "gpt2-large")
    return [name for name in TABLE if sizes == "full" or not name.startswith(larger)]


def make(name: str, sizes: str) -> Model:
    """Makes a model, of size "full" or "tiny"."""
    return MODELS[name](sizes == "tiny")
