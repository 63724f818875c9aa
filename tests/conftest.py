"""Settings of the test suite as a whole."""

import gc
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

# Tests compile much and compute little: without optimisations they take a third of the time.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib") < "0.11":  # later versions refuse a flag that they lack
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# Tracing makes many objects and few cycles, so collecting them often is wasted time.
gc.set_threshold(100_000, 20, 100)

# Assertions inside the shared contracts and statistics explain themselves like those of tests.
pytest.register_assert_rewrite("tests.contracts", "tests.statistical", "tests.tools")


@pytest.fixture
def nothing_reserved(monkeypatch):
    """For close comparisons: clips at C itself, and keeps more digits of few rows.

    Ghost clipping leaves up to 2⁻⁷ of C to the rounding of its blocks; test_sums.py is about that.
    """
    # Imported here: the flags above come before JAX.
    from mirrordp.privacy import sums
    from mirrordp.privacy.ghost import _factors

    monkeypatch.setattr(_factors, "disturbance", lambda roundoffs: 0.0)
    monkeypatch.setattr(sums, "RESERVE", 0.0)
    monkeypatch.setattr(sums, "GRAIN_BITS", 50)


@pytest.fixture
def by_gram(monkeypatch):
    """Finds all norms by Gram matrices that can be found so, whatever that costs."""
    from mirrordp.privacy.ghost import _plan

    monkeypatch.setattr(_plan, "_prefers_gram", lambda task, machine: True)


@pytest.fixture(autouse=True)
def _no_earlier_fits():
    """Estimators count the fits of a process; a test begins as a process does."""
    if (estimators := sys.modules.get("mirrordp.linear.estimators")) is not None:
        estimators._FITS.clear()


# Every compiled program takes pieces of memory of its own. A process may have 65,530 of them, and
# JAX keeps all programs: after some thousand tests a worker would crash, or run out of memory.
_MOST_MAPPINGS = 12_000


@pytest.fixture(autouse=True)
def _few_programs():
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()
