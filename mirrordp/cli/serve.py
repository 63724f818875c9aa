"""`mirrordp serve`."""

import argparse
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
        ("--timeout", positive, 10.0, "longest time for a request in seconds"),
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
        try:
            import uvicorn
        except ImportError:
            raise UsageError(
                "expected the package uvicorn, but it is not installed; run pip install "
                "'mirrordp[serve]'."
            ) from None
        server = uvicorn.Server(
            uvicorn.Config(
                app,
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
