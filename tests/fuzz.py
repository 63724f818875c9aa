"""`python -m tests.fuzz --cases 10000`: as many generated cases over `tests/test_fuzz.py`."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).with_name("test_fuzz.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, over all targets")
    cases = parser.parse_args().cases
    targets = FILE.read_text().count("\n@fuzz\n")
    each = -(-cases // targets)
    print(f"{targets} targets, {each} cases each", flush=True)
    command = [sys.executable, "-m", "pytest", str(FILE), "-n", "auto", "--durations=0"]
    return subprocess.call(command, env=os.environ | {"MIRRORDP_FUZZ_CASES": str(each)})


if __name__ == "__main__":
    sys.exit(main())
