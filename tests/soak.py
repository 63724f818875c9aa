"""The command line of soaks, which kill runs at random moments."""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def run_soak(soak: Callable[[int, int, Path], dict], description: str, kills: int) -> None:
    """Runs a soak from the command line: `soak(kills, seed, folder)` returns what happened."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: random")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**31)
    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        happened = soak(arguments.kills, seed, Path(root))
    print(json.dumps(happened | {"seconds": round(time.monotonic() - began)}))
