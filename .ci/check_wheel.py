"""Fails unless a wheel installs the package `mirrordp`, its metadata, and nothing else."""

import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = wheel.namelist()
top = {name.split("/")[0] for name in names}
packages = {name for name in top if not name.endswith(".dist-info")}
assert packages == {"mirrordp"}, f"expected mirrordp alone at top level, got {sorted(packages)}"
assert "mirrordp/cli/__init__.py" in names, "expected the command line in the wheel, got none"
assert "mirrordp/py.typed" in names, "expected the marker py.typed in the wheel, got none"
print(f"the wheel installs {len(names)} files, all under mirrordp/ and its metadata")
