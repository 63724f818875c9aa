"""The bytes of a compiled program's kernels against programs whose bytes are known."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.traffic import traffic


def moved(function, *arguments) -> int:
    return traffic(jax.jit(function).lower(*arguments).compile().as_text()).total()


def test_reads_and_writes_are_counted_once():
    numbers = jnp.ones(1000)
    assert moved(lambda x: x + 1, numbers) == 8_000
    assert moved(lambda x: x.astype(jnp.bfloat16), numbers) == 6_000
    assert moved(lambda x, y: x * y, numbers, numbers) == 12_000
    assert moved(lambda x: x.reshape(10, 100), numbers) <= 8_000  # a copy at most


def test_loops_count_as_often_as_they_run():
    step = lambda x, _: (jnp.sin(x) @ x, None)  # noqa: E731
    x = jnp.ones((50, 50))
    few, many = (moved(lambda x, n=n: lax.scan(step, x, None, n)[0], x) for n in (10, 20))
    assert few > 10 * 3 * 4 * 50 * 50
    assert 1.5 * few < many < 2.1 * few
