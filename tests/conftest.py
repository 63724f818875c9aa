"""Settings of the test suite as a whole."""

import os

import pytest

# Tests compile much and compute little: without LLVM's optimisations they take half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Assertions inside the shared contracts and statistics explain themselves like those of tests.
pytest.register_assert_rewrite("tests.contracts", "tests.statistical", "tests.tools")
