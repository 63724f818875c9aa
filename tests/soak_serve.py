"""Sends random and hostile requests to the service of `mirrordp serve`.

    python -m tests.soak_serve --requests 10000

The requests go to a served process over HTTP, and `tests/test_serve.py` sends a few hundred of the
same kind to the application in its own process. Checked for each answer:

- the status is one of those that the service documents, and never 500;
- the body is JSON; an error has a text, a 422 names row, column and problem;
- no answer and no line of the log repeats the secret text that the requests carry.

At the end the service must still be alive and predict as it did before.
"""

import argparse
import collections
import json
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECRET = "zanzibar"
STATUSES = {200, 400, 404, 405, 413, 422}
GOOD = {"x": 1.0, "half": -1000.0, "colour": "red", "code": 2, "letter": "b"}

_CELLS = [
    *(None, True, False, 0, -1, 1.5, 10**30, 10**400, -0.0, 5e-324, 1.7e308, "", " ", "?", "1"),
    *("1e999", "nan", "red", SECRET, "\u0000", "\ud800", "ü" * 50, "1_0", "٣", "0x1", "7" * 5000),
    *([], {}, [1], {"x": 1}, [[[]]]),
]
_BODIES = [
    *(b"", b"{", b"[", b"null", b"1", b'"text"', b"NaN", b"[NaN]", b"\xff\xfe", b"\x00" * 100),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b"[" + b"1," * 50_000 + b"1]"),
    *(
        b"{}" * 10,
        b"[]",
        b"[[]]",
        b"[null]",
        b'{"x": 1e999}',
        b'{"x": 1, "x": 2}',
        b"x" * 2_000_000,
    ),
]


def requests(count: int, seed: int):
    """Yields (method, path, body, headers)."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(["/predict"] * 20 + ["/health", "/model", "/", f"/{SECRET}?{SECRET}=1"])
        method = "POST" if path == "/predict" else rng.choice(["GET", "POST", "PUT", "HEAD"])
        if method == "POST" and rng.random() < 0.02:
            method = rng.choice(["GET", "DELETE", "OPTIONS"])
        yield method, path, _body(rng), _headers(rng)


def _headers(rng: random.Random) -> dict[str, str]:
    kind = rng.choice(["application/json", "text/plain", SECRET, "multipart/form-data"])
    return {"content-type": kind}


def _body(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(_BODIES)
    if kind < 0.2:
        return rng.randbytes(rng.randrange(300))
    rows = [_row(rng) for _ in range(rng.choice([0, 1, 1, 2, 3, 30]))]
    text = json.dumps(rows[0] if rows and rng.random() < 0.5 else rows).encode()
    if kind < 0.35 and text:
        # One byte is changed, or the end is cut off.
        place = rng.randrange(len(text))
        text = text[:place] + (bytes([rng.randrange(256)]) + text[place + 1 :]) * (kind < 0.3)
    return text


def _row(rng: random.Random) -> Any:
    if rng.random() < 0.03:
        return rng.choice(_CELLS)
    row: dict[str, Any] = dict(GOOD)
    for name in GOOD:
        if rng.random() < 0.2:
            row[name] = rng.choice(_CELLS)
        elif rng.random() < 0.03:
            del row[name]
    if rng.random() < 0.2:
        row[rng.choice(["other", SECRET, "", "prediction", "\ud800"])] = rng.choice(_CELLS)
    return row


def check(method: str, path: str, response: Any) -> None:
    """Raises an AssertionError for an answer that should not be."""
    assert response.status_code in STATUSES, (method, path, response.status_code)
    assert SECRET.encode() not in response.content, (method, path, response.content)
    if method == "HEAD":
        return
    content = response.json()
    if response.status_code != 200:
        assert isinstance(content["error"], str)
    for problem in content.get("problems", ()):
        assert set(problem) == {"row", "column", "problem"}
        assert problem["column"] is None or problem["column"] in GOOD


def main() -> int:
    import httpx

    from tests.test_export import make_model

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    statuses: collections.Counter[int] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.json").write_text(make_model("two classes").to_json())
        command = [sys.executable, "-m", "mirrordp", "serve", "--json", "--port", "0"]
        with (
            open(Path(folder) / "log", "w+") as log,
            subprocess.Popen(
                [*command, "--model", folder], stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            try:
                assert process.stdout is not None
                address = json.loads(process.stdout.readline())["address"]
                with httpx.Client(base_url=address, timeout=30) as client:
                    before = client.post("/predict", json=GOOD).json()
                    sent = requests(arguments.requests, arguments.seed)
                    for method, path, body, headers in sent:
                        response = client.request(method, path, content=body, headers=headers)
                        check(method, path, response)
                        statuses[response.status_code] += 1
                    assert client.post("/predict", json=GOOD).json() == before
                assert process.poll() is None, "the service has ended"
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(30)
            log.seek(0)
            lines = log.read()
            assert SECRET not in lines
            assert "Traceback" not in lines, lines[-2000:]
    print(f"{arguments.requests} requests, answers {dict(sorted(statuses.items()))}, no crash")
    return 0


if __name__ == "__main__":
    sys.exit(main())
