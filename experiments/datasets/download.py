"""Files from their owners' addresses."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.datasets.prepared import DataError


@dataclasses.dataclass(frozen=True)
class Source:
    """An archive at its owner's address.

    Attributes:
        title: what it is.
        url: where the archive is.
        algorithm: of the checksum.
        digest: the published checksum of the archive.
        members: the members that are needed, and where each belongs under the data root.
    """

    title: str
    url: str
    algorithm: str
    digest: str
    members: Mapping[str, str]


CIFAR10 = Source(
    title="CIFAR-10, binary version",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    algorithm="md5",
    digest="c32a1d4ab5d03f1284b67883e8d87530",
    members={
        name: name
        for name in (
            *(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
            "cifar-10-batches-bin/test_batch.bin",
        )
    },
)
EMNIST = Source(
    title="EMNIST, gzip version",
    url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    algorithm="md5",
    digest="58c8d27c78d21e728a6bc7b3cc06412e",
    members={
        f"gzip/{name}": f"emnist/{name}"
        for name in (
            f"emnist-bymerge-{part}-{kind}-ubyte.gz"
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        )
    },
)
# The address in the paper of Merity et al. is gone; this is the first author's own site. The
# checksums were published (by several libraries) for the archives at the former address.
WIKITEXT2 = Source(
    title="WikiText-2, word level",
    url="https://wikitext.smerity.com/wikitext-2-v1.zip",
    algorithm="sha256",
    digest="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    members={
        name: name
        for name in (f"wikitext-2/wiki.{part}.tokens" for part in ("train", "valid", "test"))
    },
)
WIKITEXT103 = Source(
    title="WikiText-103, word level",
    url="https://wikitext.smerity.com/wikitext-103-v1.zip",
    algorithm="sha256",
    digest="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    members={"wikitext-103/wiki.train.tokens": "wikitext-103/wiki.train.tokens"},
)


def require(root: Path, source: Source, paths: Iterable[Path]) -> None:
    """Raise unless every file is there."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise DataError(
            f"missing: {', '.join(map(str, missing))}. Get {source.url} ({source.algorithm} "
            f"{source.digest}) and put its files there, or set MIRRORDP_DATA to their folder."
        )
