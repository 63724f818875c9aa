"""`mirrordp predict`."""

import argparse
from pathlib import Path
from typing import Any

from mirrordp.cli._common import (
    add_command,
    interruptible,
    library_errors,
    patiently,
    print_json,
)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "predict",
        _run,
        "predict the target of a table with a fitted model",
        "predict --model model --input c.csv --output d.csv",
    )
    for name, metavar, summary in (
        ("--model", "DIR", "the folder that fit made"),
        ("--input", "FILE", "CSV or Parquet"),
        ("--output", "FILE", "Parquet if the name ends in .parquet, else CSV"),
    ):
        parser.add_argument(name, type=Path, required=True, metavar=metavar, help=summary)
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="copy this column of the input into the output; may be repeated",
    )


def _run(arguments: argparse.Namespace) -> int:
    from mirrordp.tables import fitting
    from mirrordp.tables.encoding import by_column

    with library_errors(), interruptible("Nothing was written; run the command again."):
        model = fitting.TableModel.load(arguments.model)
        predicted = fitting.predict_file(
            model, arguments.input, arguments.output, keep=arguments.keep, stage=patiently
        )
    if arguments.json:
        print_json(
            {
                "rows": predicted.num_rows,
                "output": str(arguments.output),
                "unfamiliar": predicted.unfamiliar,
            }
        )
    else:
        print(f"Wrote {predicted.num_rows} predictions to {arguments.output}")
        for words in by_column(predicted.unfamiliar):
            print(f"{words[0].upper()}{words[1:]}.")
    return 0
