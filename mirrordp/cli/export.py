"""`mirrordp export`."""

import argparse
from pathlib import Path
from typing import Any

from mirrordp.cli._common import (
    add_command,
    interruptible,
    library_errors,
    one_of,
    print_json,
)

_FORMATS = ("numpy", "onnx")


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "export",
        _run,
        "write a fitted model as one file that runs without mirrordp",
        "export --model model --to numpy predictor.py",
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="the folder that fit made"
    )
    parser.add_argument(
        "--to",
        type=one_of(*_FORMATS),
        required=True,
        metavar=f"{{{','.join(_FORMATS)}}}",
        help="a Python file that needs NumPy alone, or ONNX (needs pip install 'mirrordp[onnx]')",
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="the file to write")


def _run(arguments: argparse.Namespace) -> int:
    from mirrordp.tables import export
    from mirrordp.tables.fitting import load_model

    with library_errors(), interruptible("Nothing was written; run the command again."):
        export.export_model(load_model(arguments.model), arguments.to, arguments.output)
    if arguments.json:
        print_json({"output": str(arguments.output), "format": arguments.to})
    else:
        print(f"Wrote {arguments.output}")
    return 0
