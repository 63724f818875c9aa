"""A language model: a small GPT, pre-trained on public text, adapted to private text under DP.

    python examples/language_model.py
    python examples/language_model.py --public wiki.txt --private users.tsv [--size gpt2]

Without files, the docstrings of Python's standard library are public, and those of NumPy, SciPy and
scikit-learn stand in for private text, so that nothing is downloaded. With files, the public one is
running text, and each line of the private one is a user and a sentence with a tab between them.
Both may be compressed with xz. `--size gpt2` has the shape of GPT-2 small and needs a GPU.

- One user is one row: the first tokens of what the user wrote, and nothing else of it. The unit of
  privacy is therefore the user. Of docstrings, it is one docstring.
- Tokens are the most frequent words of the *public* text; all other words are spelled in bytes.
  A vocabulary counted in private text would tell what is in it, and no noise would cover that.
- Only adapters are trained privately (LoRA: x W + (x a) b with thin matrices a and b), because
  fewer numbers bear less noise.
- PDA-DPMD mixes the gradient of public text into the noisy private one. The comparison is DP alone:
  the same start, steps, batches and noise with alpha = 1.
"""

import argparse
import collections
import functools
import importlib.util
import itertools
import json
import lzma
import math
import pathlib
import re
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrordp

SIZES = {
    "small": {
        **{"layers": 2, "width": 64, "heads": 4, "positions": 48, "words": 1_000},
        **{"public_steps": 200, "public_batch": 64, "public_rate": 5e-3},
        **{"private_steps": 25, "private_batch": 256, "private_rate": 0.02, "microbatch": None},
    },
    "gpt2": {
        **{"layers": 12, "width": 768, "heads": 12, "positions": 256, "words": 50_000},
        **{"public_steps": 1_600, "public_batch": 64, "public_rate": 6e-4},
        **{"private_steps": 40, "private_batch": 768, "private_rate": 1e-3, "microbatch": 64},
    },
}
RANK, CLIP_NORM, ALPHA, DELTA, NUM_TEST, SEED = 8, 0.3, 0.9, 1e-5, 400, 0
END, PAD, FIRST_WORD = 256, 257, 258  # The tokens below are bytes, those above are words.
PIECES = re.compile(r" ?[^\W\d_]+| ?[^\w\s]|\s|[\d_]")


# Text


def docstrings(folder):
    """Returns what stands between triple quotes in a folder's Python files, each text once."""
    skipped = {"site-packages", "test", "tests"}
    texts = {}
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(folder).parts):
            found = re.findall(r'"""(.*?)"""', path.read_text("utf-8", "replace"), re.DOTALL)
            texts |= dict.fromkeys(re.sub(r"\n[ \t]+", "\n", text).strip() for text in found)
    return [text for text in texts if len(text) >= 200]


def lines(path):
    with (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8") as file:
        return [line for line in file.read().split("\n") if line.strip()]


def users(path):
    """Returns one text for every user of a file."""
    texts = collections.defaultdict(list)
    for line in lines(path):
        user, *_, sentence = line.split("\t")
        texts[user].append(sentence)
    return ["\n".join(sentences) for sentences in texts.values()]


def encode(text, words):
    pieces = PIECES.findall(text)
    numbers = ([words[piece]] if piece in words else piece.encode() for piece in pieces)
    return [END, *itertools.chain.from_iterable(numbers)]


def decode(tokens, words):
    spelled = {number: word.encode() for word, number in words.items()}
    parts = (bytes([t]) if t < END else spelled.get(t, b"") for t in tokens)
    return b"".join(parts).decode("utf-8", "replace")


def windows(texts, words, length):
    """Returns all texts, one after the other, cut into rows."""
    stream = np.concatenate([np.asarray(encode(text, words), np.int32) for text in texts])
    return stream[: len(stream) // length * length].reshape(-1, length)


def first_tokens(texts, words, length):
    """Returns one row for each text: its first tokens, filled up with PAD."""
    rows = np.full((len(texts), length), PAD, np.int32)
    for row, text in zip(rows, texts, strict=True):
        tokens = [*encode(text[: 50 * length], words), END][:length]
        row[: len(tokens)] = tokens
    return rows


# The model


def init(size, vocabulary):
    rng = np.random.default_rng(SEED)
    width = size["width"]
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}

    def normal(*shape, scale=0.02):
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32))

    def layer():
        matrices = {name: normal(*shape) for name, shape in shapes.items()}
        return matrices | {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}

    def adapter(rows, columns):
        # With b = 0, the adapted model is the pre-trained one.
        return {"a": normal(rows, RANK, scale=rows**-0.5), "b": jnp.zeros((RANK, columns))}

    return {
        "base": {
            "tokens": normal(vocabulary, width),
            "positions": normal(size["positions"], width),
            "layers": [layer() for _ in range(size["layers"])],
            "norm": jnp.ones(width),
        },
        "adapters": [
            {name: adapter(*shape) for name, shape in shapes.items()} for _ in range(size["layers"])
        ],
    }


def norm(x, gain):
    return gain * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def logits_fn(params, tokens, heads):
    """Returns the logits of the next token at every position of one text."""
    base = params["base"]
    x = base["tokens"][tokens] + base["positions"]
    for number, layer in enumerate(base["layers"]):

        def dense(x, name, number=number, layer=layer):
            if "adapters" not in params:
                return x @ layer[name]
            adapter = params["adapters"][number][name]
            return x @ layer[name] + (x @ adapter["a"]) @ adapter["b"]

        inputs = dense(norm(x, layer["norm1"]), "qkv").reshape(len(x), 3, heads, -1)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(inputs, 1, 0), is_causal=True)
        x = x + dense(mixed.reshape(x.shape), "out")
        x = x + dense(jax.nn.relu(dense(norm(x, layer["norm2"]), "up")), "down")
    return norm(x, base["norm"]) @ base["tokens"].T


def summed_loss(params, row, heads):
    """Returns the loss of one row, summed over its tokens, and how many they are."""
    logits, is_token = logits_fn(params, row[:-1], heads), row[1:] != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, row[1:])
    return jnp.sum(losses * is_token), jnp.sum(is_token)


@functools.partial(jax.jit, static_argnames="heads")
def loss_sums(params, rows, heads):
    return jax.lax.map(lambda row: summed_loss(params, row, heads), rows, batch_size=50)


def perplexity(params, rows, heads):
    losses, counts = loss_sums(params, rows, heads)
    return math.exp(losses.sum() / counts.sum())


def sample(params, words, prompt, size, *, num_tokens=40, temperature=0.7):
    """Continues a prompt, one random token after the other."""
    tokens = encode(prompt, words)
    for key in jax.random.split(jax.random.key(SEED), num_tokens):
        row = np.pad(tokens, (0, size["positions"] - len(tokens)), constant_values=PAD)
        logits = jax.jit(logits_fn, static_argnames="heads")(params, row, heads=size["heads"])
        logits = logits[len(tokens) - 1].at[PAD].set(-jnp.inf)
        tokens.append(int(jax.random.categorical(key, logits / temperature)))
    return decode(tokens, words)


# Training


def pretrain(params, public, size):
    """Trains the model without its adapters on public text, as usual."""
    steps = size["public_steps"]
    rate = optax.warmup_cosine_decay_schedule(0, size["public_rate"], steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    @jax.jit
    def step(base, opt_state, rows):
        def mean_loss(base):
            losses, counts = jax.vmap(lambda row: summed_loss({"base": base}, row, size["heads"]))(
                rows
            )
            return losses.sum() / counts.sum()

        loss, grad = jax.value_and_grad(mean_loss)(base)
        updates, opt_state = optimizer.update(grad, opt_state, base)
        return optax.apply_updates(base, updates), opt_state, loss

    rng = np.random.default_rng(SEED)
    base, opt_state = params["base"], optimizer.init(params["base"])
    for number in range(1, steps + 1):
        rows = public[rng.integers(len(public), size=size["public_batch"])]
        base, opt_state, loss = step(base, opt_state, rows)
        if number % (steps // 5) == 0:
            print(f"public step {number} of {steps}, loss {loss:.3f}", flush=True)
    return params | {"base": base}


def train_privately(params, private, public, mechanism, size, alpha):
    """Trains the adapters; returns all parameters and what the run promises."""

    def loss_fn(params, row):
        loss, count = summed_loss(params, row, size["heads"])
        return loss / jnp.maximum(count, 1)

    step = mirrordp.TrainStep(
        loss_fn,
        mechanism,
        optax.adam(size["private_rate"]),
        trainable={"base": False, "adapters": True},
        public_batch_size=size["public_batch"],
        microbatch_size=size["microbatch"],
    )
    private, public = mirrordp.PrivateData(private), mirrordp.PublicData(public)
    options = mirrordp.TrainOptions(steps_per_call=5)
    # The seed makes both runs share batches and noise. Leave it out for a model to be released.
    run = mirrordp.train(step, params, private, public, alpha=alpha, seed=SEED, options=options)
    *_, (state, info) = mirrordp.with_progress(run, mechanism, delta=DELTA)
    return state.params, mirrordp.RunReport.of(mechanism, DELTA, info=info)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--public", help="public text")
    parser.add_argument("--private", help="lines of a user, a tab and a sentence")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--out", help="a file to which the results are added as a line of JSON")
    options = parser.parse_args()
    if (options.public is None) != (options.private is None):
        parser.error("expected both --public and --private, or neither of them")
    began, size = time.monotonic(), SIZES[options.size]

    if options.public:
        public_texts, private_texts = lines(options.public), users(options.private)
        unit, prompt = "user", "I think that"
    else:
        public_texts = docstrings(sysconfig.get_path("stdlib"))
        found = map(importlib.util.find_spec, ("numpy", "scipy", "sklearn"))
        private_texts = [t for spec in found for t in docstrings(pathlib.Path(spec.origin).parent)]
        unit, prompt = "example", "Return the"
    counts = collections.Counter(itertools.chain.from_iterable(map(PIECES.findall, public_texts)))
    words = {w: FIRST_WORD + n for n, (w, _) in enumerate(counts.most_common(size["words"]))}
    public = windows(public_texts, words, size["positions"] + 1)
    rows = first_tokens(private_texts, words, size["positions"] + 1)
    # Scores have no noise, so test rows have to be of people who need no protection.
    shuffled = np.random.default_rng(SEED).permutation
    test, private = np.split(shuffled(rows), [NUM_TEST])
    public_test, public = np.split(shuffled(public), [NUM_TEST])
    print(f"{public.size:,} public tokens, {len(private):,} private rows", flush=True)

    mechanism = mirrordp.Mechanism.calibrate(
        epsilon=options.epsilon,
        delta=DELTA,
        sampling=mirrordp.PoissonSampling.for_batch_size(
            size["private_batch"], num_examples=len(private)
        ),
        num_steps=size["private_steps"],
        l2_clip_norm=CLIP_NORM,
        unit=unit,
    )
    start = pretrain(init(size, FIRST_WORD + len(words)), public, size)
    alone, _ = train_privately(start, private, public, mechanism, size, alpha=1.0)
    mixed, report = train_privately(start, private, public, mechanism, size, alpha=ALPHA)

    models = {"public text only": start, "DP alone": alone, "PDA-DPMD": mixed}
    scores = {
        name: [perplexity(params, rows, size["heads"]) for rows in (test, public_test)]
        for name, params in models.items()
    }
    samples = {name: sample(params, words, prompt, size) for name, params in models.items()}
    print(report.statement())
    for name, (here, elsewhere) in scores.items():
        print(f"{name}: perplexity {here:.2f} of private text, {elsewhere:.2f} of public text")
        print(f"    {samples[name]!r}")
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} seconds")
    if options.out:
        files = [path and pathlib.Path(path).name for path in (options.public, options.private)]
        result = {"files": files, "size": size, "perplexity": scores, "samples": samples}
        result |= {"seconds": seconds, "jax": jax.__version__, "report": report.to_dict()}
        result |= {"device": jax.devices()[0].device_kind, "alpha": ALPHA}
        with open(options.out, "a", encoding="utf-8") as file:
            print(json.dumps(result), file=file)
    assert report.epsilon <= options.epsilon
    before, *after = (here for here, _ in scores.values())
    assert max(after) < 0.95 * before


if __name__ == "__main__":
    main()
