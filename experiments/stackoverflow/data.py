"""Users and their sentences: files in, padded token rows per user out.

A sentence becomes one row of 21 numbers: its begin, at most 20 words and, if there is room, its
end; the first 20 are what the model reads and the last 20 what it predicts, as in the TensorFlow
Federated pipeline that the paper used. A user keeps at most 256 sentences.

Splits are by user and follow the user's name and a seed alone. Which part is covered by the privacy
guarantee: only the private users' rows, through training. `facts["not_covered"]` names the rest.
"""

import collections
import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mirrordp import PrivateClients, PublicClients
from mirrordp.data import UnprotectedWarning

PAD, BEGIN, END, UNKNOWN = range(4)
NUM_SPECIAL = 4
VOCABULARY_SIZE = 10_000
SEQUENCE_LENGTH = 20
MAX_SENTENCES = 256
NUM_PUBLIC_USERS = 100
# The published test users have millions of sentences; a sample of this size is enough.
MAX_EVALUATION = 100_000

User = tuple[str, list[str]]
Splitter = Callable[[str], list[str]]

_WORDS = re.compile(r"<code>|[\w']+|[^\w\s]")


def words(sentence: str) -> list[str]:
    """Returns lower-case words and punctuation marks of running text.

    >>> words("It's <code>, isn't it?")
    ["it's", '<code>', ',', "isn't", 'it', '?']
    """
    return _WORDS.findall(sentence.lower())


PUBLISHED = (".h5", ".hdf5")


def splitter(*paths: Path | None) -> Splitter:
    """Returns the function that splits the sentences of these files into words.

    The published sentences are tokens with spaces between them ("asp.net", "c#"), and the paper's
    pipeline takes them as they are.
    """
    published = {path.suffix in PUBLISHED for path in paths if path is not None}
    if len(published) > 1:
        raise ValueError(
            f"expected either the published files ({', '.join(PUBLISHED)}) or others, got both: "
            f"{', '.join(path.name for path in paths if path is not None)}. Their words are made "
            "in different ways."
        )
    return str.split if published == {True} else words


def read_hdf5(path: Path) -> Iterator[User]:
    """Reads the published files: group `examples`, one group per client, data set `tokens`."""
    import h5py

    with h5py.File(path, "r") as file:
        if "examples" not in file:
            raise ValueError(
                f"{path.name}: expected a group 'examples' with one group per client, got "
                f"{list(file)}. These are the files that TensorFlow Federated downloads."
            )
        for client, group in file["examples"].items():
            if "tokens" not in group:
                raise ValueError(
                    f"{path.name}: expected a data set 'tokens' for every client, got "
                    f"{list(group)} for {client!r}."
                )
            yield client, [sentence.decode("utf-8", "replace") for sentence in group["tokens"][()]]


def read_tsv(path: Path) -> Iterator[User]:
    """Reads lines whose first column is the user and whose last is a sentence."""

    def rows():
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                columns = line.rstrip("\n").split("\t")
                if len(columns) < 2:
                    raise ValueError(
                        f"{path.name}, line {number}: expected a user and a sentence with a tab "
                        f"between them, got {len(columns)} column."
                    )
                yield columns[0], columns[-1]

    return _grouped(path, rows())


def read_jsonl(path: Path, *, user: str = "user", text: str = "text") -> Iterator[User]:
    """Reads one JSON object per line, with a user and a sentence."""

    def rows():
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    record = None
                if not isinstance(record, dict) or not {user, text} <= set(record):
                    found = sorted(record) if isinstance(record, dict) else "no JSON object"
                    raise ValueError(
                        f"{path.name}, line {number}: expected an object with the fields {user!r} "
                        f"and {text!r}, got {found}."
                    )
                yield record[user], record[text]

    return _grouped(path, rows())


def read_parquet(path: Path, *, user: str = "user", text: str = "text") -> Iterator[User]:
    """Reads two columns, user and sentence."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    missing = {user, text} - set(table.column_names)
    if missing:
        raise ValueError(
            f"{path.name}: expected the columns {user!r} and {text!r}, got {table.column_names}."
        )
    return _grouped(path, zip(table[user].to_pylist(), table[text].to_pylist(), strict=True))


def _grouped(path: Path, rows: Iterable[tuple[Any, Any]]) -> Iterator[User]:
    users: dict[str, list[str]] = {}
    for number, (name, sentence) in enumerate(rows, start=1):
        if name is None or not isinstance(sentence, str):
            raise ValueError(
                f"{path.name}, row {number}: expected a user and a text, got user {name!r} and "
                f"{type(sentence).__name__} for the text. Leave such rows out."
            )
        users.setdefault(str(name), []).append(sentence)
    return iter(users.items())


READERS: dict[str, Callable[[Path], Iterator[User]]] = {
    ".h5": read_hdf5,
    ".hdf5": read_hdf5,
    ".tsv": read_tsv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}


def read(path: Path) -> Iterator[User]:
    """Reads the users of a file in the format that its ending names."""
    if path.suffix not in READERS:
        raise ValueError(f"{path.name}: expected one of {sorted(READERS)}, got {path.suffix!r}.")
    return READERS[path.suffix](path)


def _rank(name: str, purpose: str, seed: int) -> int:
    """Returns a number that is random over names and depends on this name alone."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def cut(name: str, sentences: list[str], seed: int) -> tuple[list[str], list[str]]:
    """Returns at most 256 sentences of a user, at random, and at most 256 of those left over."""
    if len(sentences) <= MAX_SENTENCES:
        return sentences, []
    order = np.random.default_rng(_rank(name, "sentences", seed)).permutation(len(sentences))
    kept, over = np.sort(order[:MAX_SENTENCES]), np.sort(order[MAX_SENTENCES : 2 * MAX_SENTENCES])
    return [sentences[row] for row in kept], [sentences[row] for row in over]


def make_vocabulary(
    users: Iterable[User], size: int = VOCABULARY_SIZE, split: Splitter = words
) -> dict[str, int]:
    """Returns the most frequent words and their numbers, which begin after the special tokens."""
    counts = collections.Counter(
        word for _, sentences in users for sentence in sentences for word in split(sentence)
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {word: NUM_SPECIAL + number for number, (word, _) in enumerate(ranked[:size])}


def encode(
    sentences: Iterable[str], vocabulary: dict[str, int], split: Splitter = words
) -> np.ndarray:
    """Returns rows of 21 tokens."""
    rows = []
    for sentence in sentences:
        tokens = [vocabulary.get(word, UNKNOWN) for word in split(sentence)[:SEQUENCE_LENGTH]]
        if not tokens:
            continue
        tokens = [BEGIN, *tokens, END][: SEQUENCE_LENGTH + 1]
        rows.append(tokens + [PAD] * (SEQUENCE_LENGTH + 1 - len(tokens)))
    return np.asarray(rows, np.int32).reshape(-1, SEQUENCE_LENGTH + 1)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The parts of an experiment.

    Attributes:
        private: users whose privacy the run protects.
        public: users on the server's side.
        validation: rows of private users held out to choose settings; what they tell is not
            covered by the guarantee. A sample where they are very many.
        test: rows of test users, likewise.
        facts: counts and choices, stored with every result.
    """

    private: PrivateClients
    public: PublicClients
    validation: np.ndarray
    test: np.ndarray
    facts: dict


def prepare(
    data: Path,
    *,
    test_data: Path | None = None,
    public_data: Path | None = None,
    overflow: bool = False,
    vocabulary_from: str = "public",
    vocabulary_size: int = VOCABULARY_SIZE,
    num_public_users: int = NUM_PUBLIC_USERS,
    test_fraction: float = 0.1,
    validation_fraction: float = 0.05,
    seed: int = 0,
) -> Prepared:
    """Reads, splits by user, builds the vocabulary and encodes.

    Test users are set aside before anything else is looked at.

    Args:
        data: the training users.
        test_data: test users, where they have a file of their own; else `test_fraction` of users.
        public_data: held-out users, where they have a file of their own; 100 of them are public.
            Else 100 of the training users are held out.
        overflow: the paper's text instead: public users are made of the sentences above 256 of
            *private* users. Their authors are then not protected in these sentences, and the
            statement about a user as a whole does not hold for them.
        vocabulary_from: "public", or "train" as in the paper: that counts private words without
            noise and is not covered by the guarantee.
        vocabulary_size: words besides the special tokens; 10,000 in the paper.
        num_public_users: how many; 100 in the paper.
        test_fraction: share of users.
        validation_fraction: share of the remaining private users, set aside to choose settings.
        seed: decides all of it.
    """
    if vocabulary_from not in ("public", "train"):
        raise ValueError(f"vocabulary_from must be 'public' or 'train', got {vocabulary_from!r}.")
    split = splitter(data, test_data, public_data)
    not_covered = ["the choice of settings, by the loss of held-out private users"]
    kept, over = [], []
    for name, sentences in read(data):
        own, rest = cut(name, sentences, seed)
        kept.append((name, own))
        if rest and overflow:
            over.append((f"overflow of {name}", rest))
    kept.sort(key=lambda user: _rank(user[0], "split", seed))
    if test_data is None:
        num_test = round(test_fraction * len(kept))
        test, kept = kept[:num_test], kept[num_test:]
    else:
        test = [(name, cut(name, sentences, seed)[0]) for name, sentences in read(test_data)]
    public = []
    if public_data is not None and not overflow:
        held_out = [(name, cut(name, sentences, seed)[0]) for name, sentences in read(public_data)]
        held_out.sort(key=lambda user: _rank(user[0], "split", seed))
        public = held_out[:num_public_users]
    elif not overflow:
        public, kept = kept[:num_public_users], kept[num_public_users:]
    num_validation = round(validation_fraction * len(kept))
    validation, private = kept[:num_validation], kept[num_validation:]
    if overflow:
        # Nobody who judges, be it a test or a validation user, may have taught.
        inside = {f"overflow of {name}" for name, _ in private}
        over = [user for user in over if user[0] in inside]
        over.sort(key=lambda user: _rank(user[0], "split", seed))
        public = over[:num_public_users]
        not_covered.append(
            f"the sentences above {MAX_SENTENCES} of {len(public)} private users, used as public"
        )
        warnings.warn(
            f"{len(public)} public users are made of sentences of private users: these sentences "
            "are not protected at all, and the user-level statement does not hold for their "
            "authors. Use held-out users (the default) outside of experiments.",
            UnprotectedWarning,
            stacklevel=2,
        )
    parts = {"test": test, "public": public, "validation": validation, "private": private}
    empty = [name for name, users in parts.items() if not users]
    if empty:
        raise ValueError(
            f"{data.name}: expected users for testing, public, validation and private ones, got "
            f"{', '.join(f'{len(users)} {name}' for name, users in parts.items())}. Give more "
            "users, or ask for fewer public ones (--public-users)."
        )
    if vocabulary_from == "train":
        not_covered.append("the vocabulary, counted over private sentences")
    source = public if vocabulary_from == "public" else private
    vocabulary = make_vocabulary(source, vocabulary_size, split)

    def clients(kind, users):
        return kind.from_users(
            [encode(sentences, vocabulary, split) for _, sentences in users],
            ids=[name for name, _ in users],
            max_examples_per_user=MAX_SENTENCES,
            seed=seed,
        )

    def rows(users):
        made = np.concatenate([encode(sentences, vocabulary, split) for _, sentences in users])
        if len(made) <= MAX_EVALUATION:
            return made
        return made[np.random.default_rng(seed).choice(len(made), MAX_EVALUATION, replace=False)]

    private, public = clients(PrivateClients, private), clients(PublicClients, public)
    validation, test_rows = rows(validation), rows(test)
    targets = test_rows[:, 1:]
    facts = {
        "data": data.name,
        "stand_in": data.suffix not in PUBLISHED,
        "split_seed": seed,
        "private_users": len(private),
        "public_users": len(public),
        "validation_users": num_validation,
        "test_users": len(test),
        "private_sentences": int(private.num_examples.sum()),
        "public_sentences": int(public.num_examples.sum()),
        "validation_sentences": len(validation),
        "test_sentences": len(test_rows),
        "public_from": "overflow" if overflow else "held-out users",
        "vocabulary_from": vocabulary_from,
        "vocabulary_words": len(vocabulary),
        "test_unknown": round(float((targets == UNKNOWN).sum() / (targets >= UNKNOWN).sum()), 4),
        "not_covered": not_covered,
    }
    return Prepared(private, public, validation, test_rows, facts)
