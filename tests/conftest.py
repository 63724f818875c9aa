"""Settings of the test suite as a whole."""

import os
import sys

import pytest

# Tests compile much and compute little: without LLVM's optimisations they take half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Assertions inside the shared contracts and statistics explain themselves like those of tests.
pytest.register_assert_rewrite("tests.contracts", "tests.statistical", "tests.tools")


@pytest.fixture(autouse=True)
def _no_earlier_fits():
    """Estimators count the fits of a process; a test begins as a process does."""
    if (estimators := sys.modules.get("mirrordp.estimators")) is not None:
        estimators._FITS.clear()
