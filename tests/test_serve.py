"""The service of `mirrordp serve`, in this process."""

import asyncio
import contextlib
import dataclasses
import importlib
import json
import logging
import socket
import sys
import threading
import time

import httpx
import pytest

from mirrordp import cli
from mirrordp.cli import serve
from mirrordp.tables import CategoryColumn, TableError, serving
from tests import soak_serve
from tests.soak_serve import GOOD
from tests.test_export import make_model, with_dates


class Client:
    """Sends requests to an application in this process; what it raises is raised here."""

    def __init__(self, app):
        self._app = app

    def request(self, method, path, **options):
        async def send():
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, **options):
        return self.request("POST", path, **options)


def client_of(task="regression", **limits):
    return Client(serving.make_app(make_model(task), serving.Limits(**limits)))


@pytest.fixture(scope="module")
def client():
    return client_of()


def test_health_and_description(client):
    assert client.get("/health").json()["status"] == "ok"
    about = client.get("/model").json()
    assert about["task"] == "regression"
    assert [column["name"] for column in about["columns"]] == list(GOOD)
    assert about["privacy"]["epsilon"] == 1.0


@pytest.mark.parametrize("task", ["regression", "two classes", "five classes", "ordered classes"])
def test_predictions_are_those_of_the_model(task):
    client, model = client_of(task), make_model(task)
    rows = [GOOD, GOOD | {"x": None, "code": 17}, GOOD | {"x": "2.5", "colour": "pink", "more": []}]
    cells = {name: [row[name] for row in rows] for name in GOOD}
    expected = model.predict(cells)
    found = client.post("/predict", json=rows).json()
    single = client.post("/predict", json=rows[0]).json()
    assert single["prediction"] == found["predictions"][0]["prediction"]
    assert [row["prediction"] for row in found["predictions"]] == expected["prediction"].tolist()
    if len(expected) > 1:
        for name in model.encoding.target.classes:
            shares = [row["probabilities"][name] for row in found["predictions"]]
            assert shares == expected[f"probability of {name}"].tolist()
    assert single["unfamiliar"] == {}
    assert set(found["unfamiliar"]) == {"code", "colour"}
    assert client.post("/predict", json=[]).json() == {"predictions": [], "unfamiliar": {}}


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("x", "abc", "expected a number or null, got text"),
        ("x", True, "got true or false"),
        ("x", [1], "got a list"),
        ("x", 10**400, "finite"),
        ("colour", 5, "expected text or null, got a number"),
        ("colour", {"a": 1}, "got an object"),
        ("code", [], "got a list"),
    ],
)
def test_a_bad_cell_is_named(client, column, value, words):
    response = client.post("/predict", content=json.dumps([GOOD, GOOD | {column: value}]))
    assert response.status_code == 422
    (problem,) = response.json()["problems"]
    assert (problem["row"], problem["column"]) == (1, column)
    assert words in problem["problem"]


def test_numbers_may_be_categories(client):
    """Also zero, which is a number like any other."""
    for code in (0, 0.0, "0", -1):
        found = client.post("/predict", json=GOOD | {"code": code}).json()
        expected = make_model("regression").predict(
            {k: [v] for k, v in (GOOD | {"code": code}).items()}
        )
        assert found["prediction"] == expected["prediction"][0]
        assert found["unfamiliar"] == {}
    column = CategoryColumn("code", ("0", "a"), "a", False)
    assert serving._cell(column, {"code": 0}) == "0"


def test_dates():
    client = Client(serving.make_app(with_dates()))
    for when in ("01.02.2020", None, "NA"):
        assert client.post("/predict", json=GOOD | {"when": when}).status_code == 200
    for when in ("2020-02-01", 17, "soon"):
        (problem,) = client.post("/predict", json=GOOD | {"when": when}).json()["problems"]
        assert problem["column"] == "when"
        assert "expected a date (%d.%m.%Y) or null" in problem["problem"]


def test_a_missing_column_is_named(client):
    rest = {name: value for name, value in GOOD.items() if name != "half"}
    response = client.post("/predict", json=rest)
    assert response.status_code == 422
    assert response.json()["problems"][0]["column"] == "half"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b'{"x": NaN}', 400),
        (b"[" * 100_000, 400),
        (b"\xff", 400),
        (b"3", 422),
        (b"[3]", 422),
        (b"{}", 422),
    ],
)
def test_other_bodies_are_refused(client, body, status):
    response = client.post("/predict", content=body)
    assert response.status_code == status
    assert response.json()["error"].startswith("expected ")


def test_limits():
    client = client_of(max_rows=2, max_bytes=1000)
    assert client.post("/predict", json=[GOOD] * 2).status_code == 200
    assert client.post("/predict", json=[GOOD] * 3).status_code == 413
    assert client.post("/predict", content=b" " * 1001).status_code == 413
    assert client.get("/predict").status_code == 405
    assert client.get("/nothing").status_code == 404


def test_a_request_that_arrives_too_slowly():
    app = serving.make_app(make_model("regression"), serving.Limits(seconds=0.05))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "headers": [],
        "query_string": b"",
    }
    sent = []

    async def receive():
        await asyncio.sleep(5)

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 503


@dataclasses.dataclass
class Connect:
    """Connects to a service."""

    address: tuple
    held: set

    def __call__(self):
        return socket.create_connection(self.address, timeout=10)


def eventually(happens):
    end = time.monotonic() + 10
    while not (found := happens()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def running(seconds):
    """Yields a function that connects to a service in a thread."""
    app = serving.make_app(make_model("regression"), serving.Limits(seconds=seconds))
    server = serve._server(app, seconds)
    with serve._listening("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield Connect(listener.getsockname(), server.server_state.connections)
        finally:
            server.should_exit = True
            thread.join()


def drips(connection, text, *, every):
    """Sends one byte at a time; returns after how many seconds the connection was closed."""
    began = time.monotonic()
    connection.settimeout(every)
    for byte in text:
        try:
            connection.sendall(bytes([byte]))
            if connection.recv(1) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        raise AssertionError("the connection stays open")
    return time.monotonic() - began


HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
ENDLESS = b"GET /health HTTP/1.1\r\nSlow: " + b"a" * 100


@pytest.mark.parametrize("protocol", ["h11_impl.H11Protocol", "httptools_impl.HttpToolsProtocol"])
def test_a_client_whose_headers_take_too_long_is_cut_off(protocol, monkeypatch):
    module, name = protocol.split(".")
    kind = getattr(importlib.import_module(f"uvicorn.protocols.http.{module}"), name)
    monkeypatch.setattr("uvicorn.protocols.http.auto.AutoHTTPProtocol", kind)
    with running(seconds=0.5) as connect:
        with connect() as silent:
            assert silent.recv(1) == b""
        with connect() as slow:
            assert 0.3 < drips(slow, ENDLESS, every=0.05) < 3
        with connect() as again:
            again.sendall(HEALTH)
            assert b"200 OK" in again.recv(1000)
            time.sleep(0.7)  # Idle, which is none of its business.
            again.sendall(HEALTH)
            assert b"200 OK" in again.recv(1000)
            assert 0.3 < drips(again, ENDLESS, every=0.05) < 3


@pytest.mark.parametrize("protocol", ["h11_impl.H11Protocol", "httptools_impl.HttpToolsProtocol"])
def test_a_client_that_reads_no_answer_is_cut_off(protocol, monkeypatch):
    module, name = protocol.split(".")
    kind = getattr(importlib.import_module(f"uvicorn.protocols.http.{module}"), name)
    monkeypatch.setattr("uvicorn.protocols.http.auto.AutoHTTPProtocol", kind)
    with running(seconds=0.5) as connect, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(connect.address)
        # So many answers that they fit into no buffer.
        asked = HEALTH.replace(b"health", b"model") * 20_000
        deaf.settimeout(1)
        with contextlib.suppress(OSError):
            deaf.sendall(asked)
        assert eventually(lambda: not connect.held)


def test_a_client_that_is_slow_within_the_limit_is_answered():
    body = json.dumps(GOOD).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with running(seconds=2.0) as connect, connect() as patient:
        for part in (head[:20], head[20:], body[:5], body[5:]):
            # In all more than the limit, which holds for the headers and for the rest.
            time.sleep(0.6)
            patient.sendall(part)
        assert b"200 OK" in patient.recv(1000)


def test_a_number_does_not_say_which_of_two_names_it_is(client):
    for name in ("007", "7"):
        found = client.post("/predict", json=GOOD | {"letter": name})
        assert found.json()["unfamiliar"] == {}
    refused = client.post("/predict", json=GOOD | {"letter": 7})
    assert refused.status_code == 422
    assert refused.json()["problems"][0]["problem"] == "expected text or null, got a number"


def test_problems_are_listed_up_to_a_limit(client):
    content = client.post("/predict", json=[{}] * 500).json()
    assert "2500 problems (the first 100 are listed)" in content["error"]
    assert len(content["problems"]) == 100


def test_an_unexpected_error_tells_nothing_of_the_row(client, caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError(f"cell {soak_serve.SECRET}")

    monkeypatch.setattr(serving, "_table", fail)
    with caplog.at_level(logging.DEBUG, logger="mirrordp"):
        response = client.post("/predict", json=GOOD | {"colour": soak_serve.SECRET})
    assert response.status_code == 500
    assert "unexpected RuntimeError at test_serve.py" in caplog.text
    assert soak_serve.SECRET not in response.text + caplog.text


def test_random_requests(client, caplog):
    with caplog.at_level(logging.DEBUG, logger="mirrordp"):
        for method, path, body, headers in soak_serve.requests(400, seed=1):
            response = client.request(method, path, content=body, headers=headers)
            soak_serve.check(method, path, response)
    assert caplog.text == ""
    assert client.post("/predict", json=GOOD).status_code == 200


def test_the_command_refuses_what_it_cannot_serve(tmp_path, capsys, monkeypatch):
    assert cli.main(["serve", "--model", str(tmp_path / "none")]) == 2
    (tmp_path / "model.json").write_text(make_model("count").to_json())
    options = ["serve", "--model", str(tmp_path)]
    assert cli.main([*options, "--port", "70000"]) == 2
    assert "expected a port" in capsys.readouterr().err
    assert cli.main([*options, "--host", "256.0.0.1"]) == 2
    assert "expected an address" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert cli.main(options) == 2
    assert "mirrordp[serve]" in capsys.readouterr().err


def test_the_command_serves(tmp_path, capsys, monkeypatch):
    """All but the loop of the server, which the soak script runs."""
    import uvicorn

    (tmp_path / "model.json").write_text(make_model("count").to_json())
    served = {}

    def run(self, sockets):
        served.update(app=self.config.app, port=sockets[0].getsockname()[1])
        assert not self.config.access_log

    monkeypatch.setattr(uvicorn.Server, "run", run)
    options = ["--port", "0", "--max-rows", "1", "--json"]
    assert cli.main(["serve", "--model", str(tmp_path), *options]) == 0
    assert json.loads(capsys.readouterr().out)["address"].endswith(f":{served['port']}")
    assert Client(served["app"]).post("/predict", json=[GOOD] * 2).status_code == 413


def test_limits_must_make_sense():
    with pytest.raises(ValueError, match="max_rows"):
        serving.Limits(max_rows=0)


def test_starlette_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(TableError, match=r"mirrordp\[serve\]"):
        serving.make_app(make_model("regression"))
