"""Files from their owners' addresses: fetched once, resumed, verified, then unpacked.

An archive grows in `.downloads/` under the data root, so that an interrupted transfer goes on where
it stopped. Nothing of it is used before its checksum is right. Only the members that are named here
are unpacked, to places that are named here: paths inside an archive decide nothing. Each file
appears under its final name whole or not at all, and files that are already there stay as they are.
"""

import dataclasses
import http.client
import os
import shutil
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from tqdm import tqdm

from experiments.datasets.prepared import DataError, has_digest
from experiments.locks import locked

# Some hosts refuse the default name of urllib.
USER_AGENT = "mirrordp-experiments/0.1"
# A server that sends less than this counts as stalled.
MIN_BYTES_PER_SECOND = 1024
NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    TimeoutError,
    ConnectionError,
    ssl.SSLError,
)


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
    """Fetches `source` unless all these files exist.

    Raises:
        DataError: it cannot be fetched. The message says which file belongs where.
    """
    missing = [path for path in paths if not path.exists()]
    if missing:
        fetch(root, source)
    still_missing = [path for path in missing if not path.exists()]
    if still_missing:
        raise DataError(f"{source.url} does not contain {', '.join(map(str, still_missing))}.")


def fetch(
    root: Path,
    source: Source,
    *,
    timeout: float = 30.0,
    attempts: int = 4,
    pause: float = 0.5,
) -> None:
    """Downloads, verifies and unpacks an archive; of several processes, one does it.

    Args:
        root: the folder of the data.
        source: what to fetch.
        timeout: seconds of silence after which a connection is given up.
        attempts: how many connections in a row may bring nothing new.
        pause: seconds before the next attempt; doubles with each that brings nothing new.

    Raises:
        DataError: as above.
    """
    try:
        folder = root / ".downloads"
        folder.mkdir(parents=True, exist_ok=True)
        archive = folder / f"{source.digest[:12]}-{source.url.rsplit('/', 1)[-1]}.part"
        with locked(archive.with_suffix(".lock")):
            # Another process may have been faster while this one waited.
            if all((root / path).exists() for path in source.members.values()):
                return
            _download(archive, source, timeout=timeout, attempts=attempts, pause=pause)
            _unpack(archive, source, root)
            archive.unlink()
    except (*NETWORK_ERRORS, OSError, DataError) as error:
        wanted = "\n".join(
            f"  {root / path}   ({member})"
            for member, path in source.members.items()
            if not (root / path).exists()
        )
        raise DataError(
            f"could not fetch {source.title}: {_reason(error)}\n"
            f"Expected these files (in brackets: their names in the archive):\n{wanted}\n"
            f"Get {source.url} ({source.algorithm} {source.digest}) on a machine that can reach it "
            "and put them there, or set MIRRORDP_DATA to the folder that holds them."
        ) from error


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _download(
    archive: Path, source: Source, *, timeout: float, attempts: int, pause: float
) -> None:
    """Completes `archive` and checks it; one that was made from pieces gets a second chance.

    Pieces may come from different versions of the file, so that a wrong checksum of the whole
    proves nothing about the address.
    """
    for _ in range(2):
        is_pieced = archive.exists()
        if is_pieced and has_digest(archive, source.algorithm, source.digest):
            return
        furthest, failures = _size(archive), 0
        while True:
            try:
                _transfer(archive, source, timeout)
                break
            except NETWORK_ERRORS as error:
                # Asking again does not help where the server understood and declined.
                if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404, 410):
                    raise
                is_pieced = True
                size = _size(archive)
                failures = 0 if size > furthest else failures + 1
                furthest = max(furthest, size)
                if failures >= attempts:
                    raise
                time.sleep(pause * 2**failures)
        if has_digest(archive, source.algorithm, source.digest):
            return
        size = _size(archive)
        archive.unlink()
        if not is_pieced:
            break
    raise DataError(
        f"what {source.url} sent ({size:,} bytes) does not have the published {source.algorithm} "
        f"{source.digest}. It was deleted and nothing of it was used."
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(archive: Path, source: Source, timeout: float) -> None:
    """Makes one connection that appends the missing part, or begins anew without resumption."""
    offset = _size(archive)
    headers = {"User-Agent": USER_AGENT} | ({"Range": f"bytes={offset}-"} if offset else {})
    request = urllib.request.Request(source.url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            archive.unlink()
        raise
    with response:
        if response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            mode = "ab"
        else:
            mode, offset = "wb", 0
        length = response.headers.get("Content-Length")
        total = None if length is None else offset + int(length)
        with open(archive, mode) as file, _progress(source, offset, total) as bar:
            for block in _blocks(response, timeout):
                file.write(block)
                bar.update(len(block))
    if total is not None and _size(archive) < total:
        raise ConnectionError(
            f"the connection ended after {_size(archive):,} of {total:,} bytes of {source.url}"
        )


def _blocks(response: http.client.HTTPResponse, timeout: float) -> Iterator[bytes]:
    """Yields whatever has arrived; raises TimeoutError when next to nothing arrives.

    The timeout of the socket only sees silence. A byte now and then is no progress either.
    """
    since, received = time.monotonic(), 0
    while block := response.read1(1 << 18):
        yield block
        received += len(block)
        elapsed = time.monotonic() - since
        if elapsed > timeout:
            if received < MIN_BYTES_PER_SECOND * elapsed:
                raise TimeoutError(f"only {received:,} bytes came in {elapsed:.0f} seconds")
            since, received = time.monotonic(), 0


def _progress(source: Source, offset: int, total: int | None) -> tqdm:
    """Shows a bar on a terminal, and nothing in a log file."""
    options = {"unit": "B", "unit_scale": True, "desc": source.title, "disable": None}
    return tqdm(total=total, initial=offset, **options)


def _unpack(archive: Path, source: Source, root: Path) -> None:
    """Puts each member in its place, whole or not at all; existing files stay."""
    wanted = {
        member: root / path for member, path in source.members.items() if not (root / path).exists()
    }
    try:
        is_zip = zipfile.is_zipfile(archive)
        for member, content in (_zip_members if is_zip else _tar_members)(archive, wanted):
            target = wanted.pop(member)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.part")
            with open(partial, "wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{source.url} is no archive that can be unpacked: {error}") from error
    if wanted:
        raise DataError(f"{source.url} has no regular file {' and '.join(map(repr, wanted))}.")


def _zip_members(archive: Path, wanted: Mapping[str, Path]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if name in wanted:
                with opened.open(name) as content:
                    yield name, content


def _tar_members(archive: Path, wanted: Mapping[str, Path]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as opened:
        for member in opened:
            # A link could point anywhere; extractfile would follow it.
            if member.isfile() and member.name in wanted:
                content = opened.extractfile(member)
                assert content is not None
                with content:
                    yield member.name, content
