"""Data sets: small files in the owners' formats, and downloads from a server in this process."""

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import struct
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tqdm import tqdm

from experiments import datasets
from experiments.datasets import DataError, download, images, prepare, synthetic, text
from experiments.datasets.prepared import split_indices


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A test that would fetch something from outside fails at once."""

    def refuse(root, source, **_):
        raise AssertionError(f"{source.url} was asked for")

    monkeypatch.setattr(download, "fetch", refuse)


# Images


def write_cifar10(root, per_batch=20):
    rng = np.random.default_rng(0)
    folder = root / images.CIFAR10_FOLDER
    folder.mkdir()
    pixels = rng.integers(256, size=(6, per_batch, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(10, size=(6, per_batch, 1), dtype=np.uint8)
    for name, x, y in zip(
        (*images.CIFAR10_TRAIN, images.CIFAR10_TEST), pixels, labels, strict=True
    ):
        (folder / name).write_bytes(np.hstack([y, x.reshape(per_batch, -1)]).tobytes())
    return pixels.transpose(0, 1, 3, 4, 2), labels[..., 0]


def write_idx(path, values, compress=True):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    content = header + values.tobytes()
    path.write_bytes(gzip.compress(content) if compress else content)


def write_emnist(root, counts=(60, 10), compress=True):
    rng = np.random.default_rng(0)
    folder = root / images.EMNIST_FOLDER
    folder.mkdir()
    written = []
    for part, count in zip(("train", "test"), counts, strict=True):
        upright = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = rng.integers(47, size=count, dtype=np.uint8)
        end = ".gz" if compress else ""
        stored = np.ascontiguousarray(upright.transpose(0, 2, 1))
        write_idx(folder / f"emnist-bymerge-{part}-images-idx3-ubyte{end}", stored, compress)
        write_idx(folder / f"emnist-bymerge-{part}-labels-idx1-ubyte{end}", labels, compress)
        written.append((upright, labels))
    return written


def unscaled(prepared, examples):
    scaling = prepared.facts["scaling"]
    return np.rint(255 * (examples[0] * scaling["std"] + scaling["mean"])).astype(np.uint8)


def rows(array):
    return {row.tobytes() for row in array}


def test_cifar10_is_read_as_its_owners_wrote_it(tmp_path):
    pixels, labels = write_cifar10(tmp_path)
    prepared = prepare("cifar10", tmp_path)
    np.testing.assert_array_equal(unscaled(prepared, prepared.test), pixels[5])
    np.testing.assert_array_equal(prepared.test[1], labels[5])
    train = pixels[:5].reshape(-1, 32, 32, 3)
    wanted = {x.tobytes(): y for x, y in zip(train, labels[:5].ravel(), strict=True)}
    for part, count in ((prepared.private, 96), (prepared.public, 4)):
        assert part[0].shape == (count, 32, 32, 3)
        assert (part[0].dtype, part[1].dtype) == (np.float32, np.int32)
        for image, label in zip(unscaled(prepared, part), part[1], strict=True):
            assert wanted.pop(image.tobytes()) == label
    assert not wanted  # every image is in exactly one part
    assert prepared.label.startswith("CIFAR-10, a sample of 100 of 50,000 training images")
    assert not prepared.is_complete
    assert json.loads(json.dumps(prepared.facts)) == prepared.facts
    assert prepared.facts["not_covered"] == []
    assert "array" not in repr(prepared)


@pytest.mark.parametrize("compress", [True, False])
def test_emnist_is_turned_upright(tmp_path, compress):
    _, (test_images, test_labels) = write_emnist(tmp_path, compress=compress)
    prepared = prepare("emnist", tmp_path)
    np.testing.assert_array_equal(unscaled(prepared, prepared.test)[..., 0], test_images)
    np.testing.assert_array_equal(prepared.test[1], test_labels)
    assert prepared.private[0].shape == (57, 28, 28, 1)
    assert prepared.public[0].shape == (3, 28, 28, 1)


def test_label_and_completeness_follow_the_published_counts(tmp_path, monkeypatch):
    write_emnist(tmp_path)
    monkeypatch.setattr(images, "EMNIST_COUNTS", (60, 10))
    whole = prepare("emnist", tmp_path)
    assert (whole.label, whole.is_complete) == ("EMNIST ByMerge", True)
    monkeypatch.setattr(images, "EMNIST_COUNTS", (697_932, 10))
    sample = prepare("emnist", tmp_path)
    assert sample.label == "EMNIST ByMerge, a sample of 60 of 697,932 training images"
    assert not sample.is_complete
    write_cifar10(tmp_path)
    monkeypatch.setattr(images, "CIFAR10_COUNTS", (100, 20))
    altered = prepare("cifar10", tmp_path)
    assert "differ" in altered.label
    assert not altered.is_complete


def test_scaling_depends_on_public_images_only(tmp_path):
    pixels, _ = write_cifar10(tmp_path)
    before = prepare("cifar10", tmp_path)
    _, public, _ = split_indices(100, public_fraction=0.04, holdout=0, seed=0)
    public_pixels = pixels[:5].reshape(-1, 32, 32, 3)[public] / 255
    np.testing.assert_allclose(before.facts["scaling"]["mean"], public_pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(before.facts["scaling"]["std"], public_pixels.std((0, 1, 2)))
    np.testing.assert_allclose(before.public[0].mean((0, 1, 2)), 0, atol=1e-5)

    def blacken(index):
        path = tmp_path / images.CIFAR10_FOLDER / images.CIFAR10_TRAIN[index // 20]
        records = np.fromfile(path, np.uint8).reshape(-1, 3073)
        records[index % 20, 1:] = 0
        records.tofile(path)

    for index in set(range(100)) - set(public.tolist()):
        blacken(index)
    assert prepare("cifar10", tmp_path).facts["scaling"] == before.facts["scaling"]
    blacken(int(public[0]))
    assert prepare("cifar10", tmp_path).facts["scaling"] != before.facts["scaling"]


def test_constant_images_stay_finite():
    mean, std = images.scaling(np.full((2, 3, 3, 1), 7, np.uint8))
    np.testing.assert_allclose(images.scale(np.full((1, 3, 3, 1), 7, np.uint8), mean, std), 0)


def test_split_is_a_partition_that_the_seed_decides():
    parts = split_indices(1000, public_fraction=0.04, holdout=50, seed=3)
    assert [len(part) for part in parts] == [910, 40, 50]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    again = split_indices(1000, public_fraction=0.04, holdout=0, seed=3)
    np.testing.assert_array_equal(again[1], parts[1])  # a holdout leaves the public part alone
    other = split_indices(1000, public_fraction=0.04, holdout=0, seed=4)
    assert not np.array_equal(other[1], parts[1])
    # Pinned, so that no version of the code moves an example from one side to the other.
    assert split_indices(100, public_fraction=0.04, holdout=0, seed=0)[1].tolist() == [
        5,
        20,
        36,
        82,
    ]


@pytest.mark.parametrize(
    ("count", "num_private"), [(50_000, 48_000), (697_932, 670_014), (48_764, 46_813)]
)
def test_split_has_the_papers_counts(count, num_private):
    private, public, _ = split_indices(count, public_fraction=0.04, holdout=0, seed=0)
    assert (len(private), len(public)) == (num_private, count - num_private)


def test_holdout_comes_out_of_private(tmp_path):
    write_cifar10(tmp_path)
    whole, held = prepare("cifar10", tmp_path), prepare("cifar10", tmp_path, holdout=10)
    assert whole.validation is None
    assert rows(held.private[0]) | rows(held.validation[0]) == rows(whole.private[0])
    assert len(held.validation[0]) == 10
    assert len(held.private[0]) == 86
    np.testing.assert_array_equal(held.public[0], whole.public[0])
    assert "not covered" in held.facts["not_covered"][0]
    for holdout in (96, -1):
        with pytest.raises(ValueError, match="holdout must be"):
            prepare("cifar10", tmp_path, holdout=holdout)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_public_fraction_is_checked(tmp_path, fraction):
    write_emnist(tmp_path)
    with pytest.raises(ValueError, match="public_fraction must be"):
        prepare("emnist", tmp_path, public_fraction=fraction)


def test_damaged_cifar10_is_refused(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / images.CIFAR10_FOLDER / "data_batch_3.bin"
    content = path.read_bytes()
    for damaged in (content[:-1], b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"_3\.bin should hold records of 3,073 bytes"):
            prepare("cifar10", tmp_path)
    path.write_bytes(bytes([10]) + content[1:])
    with pytest.raises(DataError, match="labels below 10"):
        prepare("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-20], "cut or damaged gzip"),
        (lambda content: content[:40] + b"\xff" * 40 + content[80:], "cut or damaged gzip"),
        (lambda content: gzip.compress(gzip.decompress(content)[:-1]), "announces 60 x 28 x 28"),
        (lambda content: gzip.compress(gzip.decompress(content) + b"0"), "announces 60 x 28 x 28"),
        (lambda content: gzip.decompress(content)[4:], "begin like an IDX file"),
        (lambda content: b"", "begin like an IDX file"),
        (lambda content: b"\0\0\x08\x03\0", "begin like an IDX file"),
    ],
)
def test_damaged_idx_is_refused(tmp_path, damage, message):
    write_emnist(tmp_path)
    path = tmp_path / images.EMNIST_FOLDER / "emnist-bymerge-train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        prepare("emnist", tmp_path)


def test_idx_files_that_do_not_belong_together_are_refused(tmp_path):
    write_emnist(tmp_path)
    path = tmp_path / images.EMNIST_FOLDER / "emnist-bymerge-train-labels-idx1-ubyte.gz"
    write_idx(path, np.zeros(59, np.uint8))
    with pytest.raises(DataError, match="do not belong together"):
        prepare("emnist", tmp_path)
    write_idx(path, np.full(60, 47, np.uint8))
    with pytest.raises(DataError, match="labels below 47"):
        prepare("emnist", tmp_path)


# Text


def write_text(root, path, lines):
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text("".join(f" {line} \n" for line in lines), encoding="utf-8")


def paragraph(prefix, count):
    return " ".join(f"{prefix}{number}" for number in range(count))


@pytest.fixture
def corpus(tmp_path):
    """Fifty paragraphs of 35 to 84 words with words of their own, between headings and blanks."""
    train = []
    for number in range(50):
        train += [f" = Title {number} = ", "", paragraph(f"{number}:", 35 + number)]
    write_text(tmp_path, text.TRAIN, train)
    write_text(tmp_path, text.VALID, [paragraph("v", 40)])
    write_text(tmp_path, text.TEST, [paragraph("0:", 34) + " <unk>", paragraph("t", 70)])
    return tmp_path


def test_chunks_stay_inside_lines_and_share_no_word(tmp_path):
    lines = [paragraph("a", 34), paragraph("b", 35), "", paragraph("c", 104), " = Heading = "]
    write_text(tmp_path, text.TRAIN, lines)
    index = text.new_index()
    chunks = text.read_chunks(tmp_path / text.TRAIN, index)
    names = {number: word for word, number in index.items()}
    words = [[names[number] for number in row] for row in chunks]
    b, c = lines[1].split(), lines[3].split()
    assert words == [b, c[:35], c[35:70]]
    assert chunks.dtype == np.int32


def test_paragraph_separators_inside_a_line_do_not_end_it(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(paragraph("a", 20) + "\x85 \u2028 \r " + paragraph("b", 15), encoding="utf-8")
    assert text.read_chunks(path, text.new_index()).shape == (1, 35)


def test_vocabulary_has_the_most_frequent_words(monkeypatch):
    monkeypatch.setattr(text, "VOCABULARY_SIZE", 4)
    counts = {"rare": 1, "b": 5, "<unk>": 9, "a": 5, "often": 7}
    assert text.most_frequent(counts) == ["<unk>", "often", "a", "b"]


def test_words_outside_the_vocabulary_become_unknown(corpus, monkeypatch):
    train_words = (corpus / text.TRAIN).read_text().split()
    monkeypatch.setattr(text, "VOCABULARY_SIZE", 1 + len(set(train_words)))
    prepared = prepare("wikitext2", corpus)
    assert prepared.facts["vocabulary"]["size"] == 1 + len(set(train_words))
    assert not prepared.facts["vocabulary"]["covered_by_the_guarantee"]
    assert prepared.facts["not_covered"][0].startswith("vocabulary: ")
    # Known words but one in the first test chunk, none in the other two; train knows all.
    assert prepared.facts["unknown_rate"] == pytest.approx(
        {"private": 0, "public": 0, "validation": 1, "test": 1 - 34 / 105}
    )
    assert prepared.test[0, -1] == 0
    assert np.all(prepared.test[1:] == 0)
    assert np.all(prepared.test[0, :-1] > 0)


def test_text_split_is_disjoint_and_stable(corpus):
    prepared, again = prepare("wikitext2", corpus), prepare("wikitext2", corpus)
    # Paragraphs of 70 words and more give two chunks: 50 + 15.
    assert prepared.facts["counts"]["train"] == 65
    assert (prepared.private.shape, prepared.public.shape) == ((62, 35), (3, 35))
    assert not rows(prepared.private) & rows(prepared.public)
    assert len(rows(prepared.private) | rows(prepared.public)) == 65
    np.testing.assert_array_equal(prepared.public, again.public)
    assert prepared.public.dtype == prepared.test.dtype == np.int32
    other = prepare("wikitext2", corpus, seed=1)
    assert rows(other.public) != rows(prepared.public)
    assert json.loads(json.dumps(prepared.facts)) == prepared.facts


def test_public_vocabulary_knows_public_words_only(corpus):
    prepared = prepare("wikitext2", corpus, vocabulary="public")
    assert prepared.facts["vocabulary"]["covered_by_the_guarantee"]
    assert prepared.facts["vocabulary"]["size"] == 1 + 3 * 35
    assert prepared.facts["unknown_rate"]["public"] == 0
    assert prepared.facts["unknown_rate"]["private"] > 0.9
    assert not any(note.startswith("vocabulary") for note in prepared.facts["not_covered"])


def test_other_public_text_has_no_private_sequence(corpus, monkeypatch):
    shared = paragraph("7:", 35)
    write_text(
        corpus, text.OTHER, [shared, *(paragraph(f"{n}:", 34) + " new" for n in range(30)), shared]
    )
    prepared = prepare("wikitext2", corpus, public_text="other")
    assert len(prepared.private) == 65
    assert len(prepared.public) == 30
    assert prepared.facts["other_public_text"] == {"read": 32, "equal_to_private": 2}
    assert not rows(prepared.private) & rows(prepared.public)
    assert np.all(prepared.public[:, -1] == 0)  # "new" is not a word of the training text
    assert any(note.startswith("public text: ") for note in prepared.facts["not_covered"])
    monkeypatch.setattr(text, "NUM_OTHER_PUBLIC", 12)
    sample = prepare("wikitext2", corpus, public_text="other").public
    assert len(rows(sample)) == 12
    assert rows(sample) < rows(prepared.public)
    different = prepare("wikitext2", corpus, public_text="other", seed=1).public
    assert rows(sample) != rows(different)


def test_a_vocabulary_of_other_public_text_knows_its_words_only(corpus):
    """All of the training text is private then."""
    lines = [paragraph(f"{n}:", 34) + " new" for n in range(3)]
    write_text(corpus, text.OTHER, lines)
    prepared = prepare("wikitext2", corpus, public_text="other", vocabulary="public")
    assert prepared.facts["vocabulary"]["size"] == 1 + 3 * 34 + 1
    assert prepared.facts["vocabulary"]["covered_by_the_guarantee"]
    assert prepared.facts["unknown_rate"]["public"] == 0
    assert prepared.facts["unknown_rate"]["private"] == pytest.approx(1 - 3 * 34 / (65 * 35))


def test_other_public_text_that_is_private_altogether_is_refused(corpus):
    write_text(corpus, text.OTHER, [paragraph("7:", 35)])
    with pytest.raises(DataError, match="none is left"):
        prepare("wikitext2", corpus, public_text="other")


def test_stand_ins_are_labelled_and_published_files_preferred(corpus, monkeypatch):
    for path in (text.TRAIN, text.VALID, text.TEST):
        digest = hashlib.sha1((corpus / path).read_bytes()).hexdigest()
        monkeypatch.setitem(text.SHA1, path, digest)
    write_text(corpus, text.STAND_IN_TRAIN, [paragraph("s", 80)] * 10)
    write_text(corpus, text.STAND_IN_OTHER, [paragraph("s", 80)] * 10)
    published = prepare("wikitext2", corpus)
    assert (published.label, published.is_complete) == ("WikiText-2", True)
    mixed = prepare("wikitext2", corpus, public_text="other")
    assert (mixed.label, mixed.is_complete) == ("Wikipedia stand-in for WikiText-103", False)
    write_text(corpus, text.TEST, [paragraph("t", 90)])
    assert prepare("wikitext2", corpus).label == "altered WikiText-2 test"
    (corpus / text.TRAIN).unlink()
    stand_in = prepare("wikitext2", corpus)
    assert stand_in.label == "Wikipedia stand-in for WikiText-2 train, altered WikiText-2 test"
    assert stand_in.facts["counts"]["train"] == 20
    assert not stand_in.is_complete


def test_damaged_text_is_refused(corpus):
    (corpus / text.VALID).write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(DataError, match="should be UTF-8"):
        prepare("wikitext2", corpus)
    (corpus / text.VALID).write_bytes(b"")
    with pytest.raises(DataError, match="lines of at least 35 words"):
        prepare("wikitext2", corpus)


def test_options_are_checked(corpus):
    with pytest.raises(ValueError, match="name must be one of cifar10, emnist, wikitext2"):
        prepare("cifar100", corpus)
    with pytest.raises(ValueError, match="vocabulary must be 'train' or 'public'"):
        prepare("wikitext2", corpus, vocabulary="test")
    with pytest.raises(ValueError, match="public_text must be 'split' or 'other'"):
        prepare("wikitext2", corpus, public_text="none")
    with pytest.raises(ValueError, match="official validation split"):
        prepare("wikitext2", corpus, holdout=5)
    with pytest.raises(ValueError, match="options of wikitext2"):
        prepare("cifar10", corpus, vocabulary="public")


def test_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRRORDP_DATA", str(tmp_path / "set"))
    assert datasets.data_folder(tmp_path) == tmp_path
    assert datasets.data_folder() == tmp_path / "set"
    monkeypatch.delenv("MIRRORDP_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.data_folder() == tmp_path / ".cache" / "mirrordp"


# Synthetic


@pytest.mark.parametrize(
    ("name", "shape", "num_classes"), [("cifar10", (32, 32, 3), 10), ("emnist", (28, 28, 1), 47)]
)
def test_synthetic_images(name, shape, num_classes):
    prepared = synthetic(name, num_private=30, num_public=5, num_validation=0, num_test=7)
    for part, count in ((prepared.private, 30), (prepared.public, 5), (prepared.test, 7)):
        x, y = part
        assert (x.shape, x.dtype) == ((count, *shape), np.float32)
        assert (y.shape, y.dtype) == ((count,), np.int32)
        assert y.min() >= 0
        assert y.max() < num_classes
    assert prepared.validation is None
    assert not prepared.is_complete
    assert "synthetic" in prepared.label
    again = synthetic(name, num_private=30, num_public=5, num_validation=0, num_test=7)
    np.testing.assert_array_equal(again.private[0], prepared.private[0])


def test_synthetic_text():
    prepared = synthetic("wikitext2", num_private=40, seed=1)
    assert (prepared.private.shape, prepared.private.dtype) == ((40, 35), np.int32)
    assert prepared.private.min() >= 0
    assert prepared.private.max() < 8000
    assert not np.array_equal(
        prepared.private, synthetic("wikitext2", num_private=40, seed=2).private
    )


# Downloads


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`, in a way that `behaviour` can spoil; `requests` lists the Range headers."""

    daemon_threads = True

    def __init__(self, content, behaviour=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.behaviour, self.requests = content, behaviour or {}, []
        self.released = threading.Event()

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is what some tests are about


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        number = len(server.requests)
        server.requests.append(asked)
        how = server.behaviour
        if "status" in how and number < how.get("times", 10**9):
            self.send_error(how["status"])
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if how.get("ignores_range"):
            start = 0
        elif start >= len(server.content) and asked:
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            end = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if number < how.get("times", 10**9) and "cut_after" in how:
            body = body[: how["cut_after"]]
        self.wfile.write(body)
        if number < how.get("times", 10**9) and how.get("stalls"):
            self.wfile.flush()
            server.released.wait(30)
        if how.get("drips"):
            for _ in range(250):
                self.wfile.write(b"0")
                if server.released.wait(0.02):
                    break

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(content, **behaviour):
    server = Server(content, behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


CONTENTS = {"folder/one.bin": b"one" * 5000, "folder/two.bin": bytes(range(256)) * 100}


def zip_of(contents):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(contents, links=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, str(target)
            archive.addfile(member)
    return buffer.getvalue()


ARCHIVE = zip_of(CONTENTS)
real_fetch = download.fetch


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "data"


def source_at(server, content=None, members=None):
    return download.Source(
        title="two files",
        url=f"http://127.0.0.1:{server.server_address[1]}/two.zip",
        algorithm="sha256",
        digest=hashlib.sha256(server.content if content is None else content).hexdigest(),
        members=members or {"folder/one.bin": "a/one.bin", "folder/two.bin": "b/two.bin"},
    )


def fetch(root, source, **options):
    real_fetch(root, source, **{"timeout": 20, "attempts": 3, "pause": 0} | options)


def assert_unpacked(root):
    assert (root / "a/one.bin").read_bytes() == CONTENTS["folder/one.bin"]
    assert (root / "b/two.bin").read_bytes() == CONTENTS["folder/two.bin"]
    left = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert sorted(path.name for path in left) == ["one.bin", "two.bin"]


@pytest.mark.parametrize("content", [ARCHIVE, tar_of(CONTENTS)], ids=["zip", "tar.gz"])
def test_fetch_unpacks_what_is_named_where_it_is_named(root, content):
    with serving(content) as server:
        fetch(root, source_at(server))
        assert server.requests == [None]
    assert_unpacked(root)


def test_require_fetches_only_what_is_missing(root, monkeypatch):
    with serving(ARCHIVE) as server:
        monkeypatch.setattr(download, "fetch", fetch)
        (root / "a").mkdir(parents=True)
        (root / "a/one.bin").write_bytes(b"mine")
        wanted = [root / "a/one.bin", root / "b/two.bin"]
        download.require(root, source_at(server), wanted)
        download.require(root, source_at(server), wanted)
        assert len(server.requests) == 1
    assert (root / "a/one.bin").read_bytes() == b"mine"
    assert (root / "b/two.bin").read_bytes() == CONTENTS["folder/two.bin"]


def test_wrong_checksum_is_refused_and_nothing_is_used(root):
    with serving(ARCHIVE) as server:
        source = source_at(server, content=b"something else")
        with pytest.raises(DataError, match="does not have the published sha256") as caught:
            fetch(root, source)
        assert len(server.requests) == 1
    message = str(caught.value)
    for expected in (source.url, source.digest, str(root / "a/one.bin"), "MIRRORDP_DATA"):
        assert expected in message
    assert [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_cut_connection_is_resumed(root):
    with serving(ARCHIVE, cut_after=10_000, times=2) as server:
        fetch(root, source_at(server))
        assert server.requests == [None, "bytes=10000-", "bytes=20000-"]
    assert_unpacked(root)


def test_interrupted_process_is_resumed_by_the_next(root):
    with serving(ARCHIVE, cut_after=0) as server:
        source = source_at(server)
        with pytest.raises(DataError, match="connection ended after 0 of"):
            fetch(root, source)
        assert len(server.requests) == 3
        (partial,) = (root / ".downloads").glob("*.part")
        partial.write_bytes(ARCHIVE[:777])
        server.requests.clear()
        server.behaviour = {}
        fetch(root, source)
        assert server.requests == ["bytes=777-"]
    assert_unpacked(root)


@pytest.mark.parametrize("kept", [b"x" * 500, ARCHIVE + b"x"], ids=["other bytes", "too long"])
def test_a_wrong_partial_file_is_thrown_away(root, kept):
    with serving(ARCHIVE) as server:
        source = source_at(server)
        (root / ".downloads").mkdir(parents=True)
        (root / f".downloads/{source.digest[:12]}-two.zip.part").write_bytes(kept)
        fetch(root, source)
        assert server.requests == [f"bytes={len(kept)}-", None]
    assert_unpacked(root)


def test_a_complete_partial_file_needs_no_server(root):
    with serving(ARCHIVE, status=500) as server:
        source = source_at(server)
        (root / ".downloads").mkdir(parents=True)
        (root / f".downloads/{source.digest[:12]}-two.zip.part").write_bytes(ARCHIVE)
        fetch(root, source)
        assert server.requests == []
    assert_unpacked(root)


def test_server_without_ranges_begins_anew(root):
    with serving(ARCHIVE, cut_after=10_000, times=1, ignores_range=True) as server:
        fetch(root, source_at(server))
        assert server.requests == [None, "bytes=10000-"]
    assert_unpacked(root)


def test_server_without_ranges_that_always_cuts_is_given_up(root):
    with serving(ARCHIVE, cut_after=10_000, ignores_range=True) as server:
        with pytest.raises(DataError, match="connection ended after 10,000 of"):
            fetch(root, source_at(server))
        assert len(server.requests) == 4  # one brought something new, three did not


def test_stalled_server_times_out_and_is_resumed(root):
    with serving(ARCHIVE, cut_after=5000, stalls=True, times=1) as server:
        # A busy machine may be slower than the timeout; what counts is that it goes on at the end.
        fetch(root, source_at(server), timeout=0.3, attempts=20)
        assert server.requests[0] is None
        assert server.requests[-1] == "bytes=5000-"
    assert_unpacked(root)


def test_a_file_appears_whole_or_not_at_all(root, monkeypatch):
    """A process that ends while it unpacks leaves nothing that the next one would take."""

    def interrupted(content, file, length):
        file.write(content.read(100))
        raise KeyboardInterrupt

    with serving(ARCHIVE) as server:
        with monkeypatch.context() as patch:
            patch.setattr(download.shutil, "copyfileobj", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fetch(root, source_at(server))
        assert not (root / "a/one.bin").exists()
        fetch(root, source_at(server))
        # What was downloaded before is still good.
        assert len(server.requests) == 1
    assert_unpacked(root)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_sees_how_far_a_download_is(root, monkeypatch, terminal):
    """A resumed one begins where it stopped; a log file sees nothing."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    bars, hidden = [], []

    def bar(**options):
        bars.append(tqdm(file=screen, **options))
        hidden.append(bool(bars[-1].disable))
        return bars[-1]

    monkeypatch.setattr(download, "tqdm", bar)
    with serving(ARCHIVE, cut_after=10_000, times=1) as server:
        fetch(root, source_at(server))
    assert hidden == [not terminal] * 2
    if terminal:
        assert [bar.n for bar in bars] == [10_000, len(ARCHIVE)]
        assert [bar.total for bar in bars] == [len(ARCHIVE)] * 2
        assert "two files" in screen.getvalue()
        assert bars[1].initial == 10_000
    else:
        assert screen.getvalue() == ""


def test_silent_server_is_given_up(root):
    stalled = serving(ARCHIVE, cut_after=0, stalls=True)
    with stalled as server, pytest.raises(DataError, match="timed out"):
        fetch(root, source_at(server), timeout=0.2, attempts=2)


def test_dripping_server_counts_as_stalled(root):
    with serving(ARCHIVE, cut_after=0, drips=True) as server:
        source = source_at(server)
        (root / ".downloads").mkdir(parents=True)
        partial = root / f".downloads/{source.digest[:12]}-two.zip.part"
        with pytest.raises(TimeoutError, match="only"):
            download._transfer(partial, source, timeout=1.0)


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (503, 3)])
def test_refusing_server_is_named(root, status, requests):
    with serving(ARCHIVE, status=status) as server:
        with pytest.raises(DataError, match=f"HTTP Error {status}"):
            fetch(root, source_at(server))
        assert len(server.requests) == requests


def test_busy_server_is_asked_again(root):
    with serving(ARCHIVE, status=503, times=2) as server:
        fetch(root, source_at(server))
    assert_unpacked(root)


def test_offline_says_what_belongs_where(root):
    with serving(ARCHIVE) as server:
        source = source_at(server)
    with pytest.raises(DataError, match="could not fetch two files") as caught:
        fetch(root, source)
    for expected in (str(root / "b/two.bin"), "(folder/two.bin)", source.url, source.digest):
        assert expected in str(caught.value)


def test_unwritable_folder_says_what_belongs_where(root):
    root.parent.joinpath("data").write_text("a file where the folder should be")
    with serving(ARCHIVE) as server, pytest.raises(DataError, match="Expected these files"):
        fetch(root, source_at(server))


def test_hostile_paths_decide_nothing(root):
    hostile = {"../evil": b"!", "/tmp/../evil": b"!", "folder/../../evil": b"!"}
    for content in (zip_of(hostile | CONTENTS), tar_of(hostile | CONTENTS)):
        with serving(content) as server:
            fetch(root, source_at(server))
        assert_unpacked(root)
        assert [path.name for path in root.parent.iterdir()] == ["data"]
        for path in ("a/one.bin", "b/two.bin"):
            (root / path).unlink()


def test_links_in_an_archive_are_refused(root, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    content = tar_of({"folder/two.bin": b"2"}, links=[("folder/one.bin", secret)])
    with serving(content) as server, pytest.raises(DataError, match="has no regular file"):
        fetch(root, source_at(server))
    assert not (root / "a/one.bin").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zip_of({"folder/one.bin": b"1"}), "no regular file 'folder/two.bin'"),
        (b"neither zip nor tar", "no archive that can be unpacked"),
        (tar_of(CONTENTS)[:-500], "no archive that can be unpacked"),
    ],
)
def test_unusable_archives_are_refused(root, content, message):
    with serving(content) as server, pytest.raises(DataError, match=message):
        fetch(root, source_at(server))
    assert not (root / "b/two.bin").exists()


def test_two_at_once_download_once(root):
    with serving(ARCHIVE) as server:
        source = source_at(server)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(fetch, root, source) for _ in range(4)]:
                done.result()
        assert len(server.requests) == 1
    assert_unpacked(root)


def test_sources_supply_every_file_that_is_read(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        download, "require", lambda root, source, paths: asked.append((source, list(paths)))
    )
    for name, options in (("cifar10", {}), ("emnist", {}), ("wikitext2", {"public_text": "other"})):
        with pytest.raises(FileNotFoundError):
            prepare(name, tmp_path, **options)
    assert [source.title.split(",")[0] for source, _ in asked] == [
        "CIFAR-10",
        "EMNIST",
        "WikiText-2",
        "WikiText-103",
    ]
    for source, paths in asked:
        assert {path.relative_to(tmp_path).as_posix() for path in paths} == set(
            source.members.values()
        )
        assert source.url.startswith("https://")
