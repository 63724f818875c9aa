"""Assertions inside the shared contracts and statistics explain themselves like those of tests."""

import pytest

pytest.register_assert_rewrite("tests.contracts", "tests.statistical", "tests.tools")
