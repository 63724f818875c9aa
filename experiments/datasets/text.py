"""WikiText-2, or a stand-in of the same format, as sequences of 35 words.

Each line (a paragraph or a heading) is cut into chunks of 35 words, and what is left over is
dropped; a line shorter than that gives none. A chunk is one unit of privacy: no word is in two
chunks, and inputs and targets of the language model stay inside one. Words are those between white
space; no end-of-line token is added. Word 0 is `<unk>`; the 7,999 most frequent other words follow,
most frequent first.
"""

import array
import collections
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments import records
from experiments.datasets import download
from experiments.datasets.prepared import DataError, Prepared, has_digest, split_indices

LENGTH = 35
VOCABULARY_SIZE = 8_000
UNKNOWN = "<unk>"
# As many public sequences as the paper has private ones.
NUM_OTHER_PUBLIC = 48_764

TRAIN, VALID, TEST = (f"wikitext-2/wiki.{part}.tokens" for part in ("train", "valid", "test"))
OTHER = "wikitext-103/wiki.train.tokens"
STAND_IN_TRAIN = "wikipedia/wiki.train.tokens"
STAND_IN_OTHER = "wikipedia/wiki.public.tokens"
SHA1 = {
    TRAIN: "863f29c46ef9d167fff4940ec821195882fe29d1",
    VALID: "0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422",
    TEST: "c7b8ce0aa086fb34dab808c5c49224211eb2b172",
    OTHER: "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
}

Index = collections.defaultdict[str, int]


def new_index() -> Index:
    """Returns a dictionary that numbers words in the order in which they are first looked up."""
    return collections.defaultdict(itertools.count().__next__)


def read_chunks(
    path: Path, index: Index, counts: collections.Counter[str] | None = None
) -> np.ndarray:
    """Returns chunks of a file as int32 [n, 35], in the numbers of `index`, which grows.

    Args:
        path: UTF-8 text, one paragraph a line, tokens separated by white space.
        index: numbers of words, shared between the files of a data set.
        counts: where given, every word of the file is counted here, also those that are dropped.
    """
    kept = array.array("i")
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for line in file:
                words = line.split()
                if counts is not None:
                    counts.update(words)
                kept.extend(map(index.__getitem__, words[: len(words) // LENGTH * LENGTH]))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} should be UTF-8 text, but is not ({error}). Put the published file there."
        ) from error
    if not kept:
        raise DataError(
            f"{path} should hold lines of at least {LENGTH} words, but has none. It is empty or "
            "no file of WikiText tokens."
        )
    return np.frombuffer(kept, np.int32).reshape(-1, LENGTH)


def most_frequent(counts: dict[str, int]) -> list[str]:
    """Returns `<unk>` and the most frequent other words; equally frequent ones by name."""
    words = (word for word in counts if word != UNKNOWN)
    ordered = sorted(words, key=lambda word: (-counts[word], word))
    return [UNKNOWN, *ordered[: VOCABULARY_SIZE - 1]]


def count_words(chunks: np.ndarray, index: Index) -> dict[str, int]:
    """Returns how often each word occurs in these chunks."""
    counts = np.bincount(chunks.ravel(), minlength=len(index))
    return {word: int(counts[number]) for word, number in index.items() if counts[number]}


def encode(chunks: np.ndarray, index: Index, vocabulary: list[str]) -> np.ndarray:
    """Renumbers words by the vocabulary; all other words become 0, `<unk>`."""
    lookup = np.zeros(len(index), np.int32)
    for position, word in enumerate(vocabulary):
        if word in index:
            lookup[index[word]] = position
    return lookup[chunks]


def without_equal(chunks: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the chunks that equal no row of `others`, in their order."""
    known = {row.tobytes() for row in others}
    keep = np.fromiter((row.tobytes() not in known for row in chunks), bool, len(chunks))
    return chunks[keep]


def prepare_wikitext2(
    root: Path,
    *,
    holdout: int,
    public_fraction: float,
    seed: int,
    vocabulary: str,
    public_text: str,
) -> Prepared:
    """Prepares WikiText-2 as the paper does; see `experiments.datasets.prepare`."""
    if holdout:
        raise ValueError(
            f"holdout must be 0 for text, got {holdout!r}: the official validation split judges "
            "sweeps, and no private example needs to be held out."
        )
    _one_of(vocabulary, ("train", "public"), "vocabulary")
    _one_of(public_text, ("split", "other"), "public_text")
    train_path, other_path = _locate(root, public_text)

    index, train_counts = new_index(), collections.Counter()
    train = read_chunks(train_path, index, train_counts)
    num_train = len(train)
    if other_path is None:
        rows, public_rows, _ = split_indices(
            num_train, public_fraction=public_fraction, holdout=0, seed=seed
        )
        private, public = train[rows], train[public_rows]
        public_counts = count_words(public, index)
    else:
        private = train
        public_counts = collections.Counter() if vocabulary == "public" else None
        public = read_chunks(other_path, index, public_counts)

    words = most_frequent(train_counts if vocabulary == "train" else public_counts)
    valid_and_test = [read_chunks(root / path, index) for path in (VALID, TEST)]
    private, public, validation, test = (
        encode(chunks, index, words) for chunks in (private, public, *valid_and_test)
    )
    facts = {}
    not_covered = []
    if vocabulary == "train":
        not_covered.append(
            "vocabulary: the most frequent words of all training text, private text included and "
            "without noise, as in the paper"
        )
    if other_path is not None:
        num_read = len(public)
        public = without_equal(public, private)
        not_covered.append(
            "public text: sequences that equal a private one were removed and counted "
            "(other_public_text), which reads private text without noise, as in the paper"
        )
        facts["other_public_text"] = {"read": num_read, "equal_to_private": num_read - len(public)}
        if not len(public):
            raise DataError(f"every sequence of {other_path} equals a private one: none is left.")
        sample = np.random.default_rng(seed).permutation(len(public))[:NUM_OTHER_PUBLIC]
        public = public[np.sort(sample)]

    splits = {"private": private, "public": public, "validation": validation, "test": test}
    label, is_complete = _describe(root, train_path, other_path)
    return Prepared(
        **splits,
        label=label,
        is_complete=is_complete,
        facts=facts
        | {
            "counts": {"train": num_train} | {name: len(part) for name, part in splits.items()},
            "public_fraction": public_fraction if other_path is None else None,
            "seed": seed,
            "sequence_length": LENGTH,
            "vocabulary": {
                "from": "all training text" if vocabulary == "train" else "public text",
                "size": len(words),
                "fingerprint": records.fingerprint(words),
                "covered_by_the_guarantee": vocabulary == "public",
            },
            "unknown_rate": {name: float(np.mean(part == 0)) for name, part in splits.items()},
            "not_covered": [
                *not_covered,
                "unknown_rate.private: a rate over private text without noise, for the operator",
            ],
        },
    )


def _locate(root: Path, public_text: str) -> tuple[Path, Path | None]:
    """Finds training text and other public text: published, stand-in, or fetched."""
    has_stand_in = (root / STAND_IN_TRAIN).exists()
    train = STAND_IN_TRAIN if has_stand_in and not (root / TRAIN).exists() else TRAIN
    needed = [root / path for path in (train, VALID, TEST)]
    download.require(root, download.WIKITEXT2, needed)
    if public_text == "split":
        return root / train, None
    has_stand_in = (root / STAND_IN_OTHER).exists()
    other = STAND_IN_OTHER if has_stand_in and not (root / OTHER).exists() else OTHER
    download.require(root, download.WIKITEXT103, [root / other])
    return root / train, root / other


def _describe(root: Path, train_path: Path, other_path: Path | None) -> tuple[str, bool]:
    """Returns the label, and whether everything is as published."""
    parts = []
    for path, title, published in (
        (train_path, "WikiText-2 train", TRAIN),
        (root / VALID, "WikiText-2 validation", VALID),
        (root / TEST, "WikiText-2 test", TEST),
        (other_path, "WikiText-103", OTHER),
    ):
        if path is None or (path == root / published and has_digest(path, "sha1", SHA1[published])):
            continue
        is_stand_in = path != root / published
        parts.append(f"Wikipedia stand-in for {title}" if is_stand_in else f"altered {title}")
    if parts:
        return ", ".join(parts), False
    return "WikiText-2" + (" with WikiText-103 as public text" if other_path else ""), True


def _one_of(value: str, allowed: Iterable[str], name: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}.")
