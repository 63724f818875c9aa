"""`mirrordp serve`."""

import argparse
import asyncio
import socket
from pathlib import Path
from typing import Any

from mirrordp.cli._common import (
    UsageError,
    add_command,
    interruptible,
    library_errors,
    positive,
    positive_integer,
    print_json,
)

_MOST_CONNECTIONS = 64


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "serve",
        _run,
        "answer predictions over HTTP (needs pip install 'mirrordp[serve]')",
        "serve --model model --port 8000",
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="the folder that fit made"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: %(default)s, which only this machine reaches)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    for name, kind, default, summary in (
        ("--max-bytes", positive_integer, 1_000_000, "largest request in bytes"),
        ("--max-rows", positive_integer, 10_000, "most rows in a request"),
        (
            "--timeout",
            positive,
            10.0,
            "most seconds for a request's headers, for its rest, and to read the answer",
        ),
    ):
        parser.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{summary} (default: %(default)s)"
        )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    from mirrordp.tables import serving
    from mirrordp.tables.fitting import load_model

    with library_errors():
        limits = serving.Limits(arguments.max_bytes, arguments.max_rows, arguments.timeout)
        app = serving.make_app(load_model(arguments.model), limits)
        server = _server(app, limits.seconds)
    with _listening(arguments.host, arguments.port) as listener:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if arguments.json:
            print_json({"address": address, "model": str(arguments.model)})
        else:
            print(f"Serving {arguments.model} at {address}; Ctrl-C ends it.", flush=True)
        with interruptible("The service has ended."):
            server.run(sockets=[listener])
    return 0


def _server(app: Any, seconds: float) -> Any:
    """Returns a server that ends a connection whose client sends or reads too slowly."""
    try:
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol
    except ImportError:
        raise UsageError(
            "expected the package uvicorn, but it is not installed; run pip install "
            "'mirrordp[serve]'."
        ) from None
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_impatient(AutoHTTPProtocol, seconds),
            ws="none",
            # A line of the access log may hold what a client wrote into the address.
            access_log=False,
            log_level="warning",
            # Python's own handler prints warnings; to configure others closes existing ones.
            log_config=None,
            limit_concurrency=_MOST_CONNECTIONS,
            server_header=False,
            lifespan="off",
        )
    )


def _impatient(protocol: Any, seconds: float) -> Any:
    """Returns a protocol of uvicorn that waits `seconds` for headers, and for a reader of answers.

    The time for headers runs from the connection on, or from the first byte of a further request;
    uvicorn ends a connection that is idle between requests. The application bounds the time after
    the headers. The time to read runs while something that was answered cannot be sent.
    """

    class Impatient(protocol):
        _deadline: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        @property
        def _awaits_headers(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            # Writing pauses while anything is left to be sent, also once the connection is closing.
            transport.set_write_buffer_limits(high=0)
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._is_read()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            self._is_read()
            super().connection_lost(exc)

        def _look(self) -> None:
            if not self._awaits_headers:
                self._forget()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(seconds, self._give_up)

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _is_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _give_up(self) -> None:
            self._deadline = None
            # Nothing is left to be sent, and a client that reads nothing must not delay the end.
            self.transport.abort()

    return Impatient


def _listening(host: str, port: int) -> socket.socket:
    """Opens the port before anything is announced; port 0 becomes a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"expected an address to listen on, got {host!r} port {port} ({error.strerror}); "
            "choose another --host or --port."
        ) from None
