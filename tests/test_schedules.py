"""α_t: in [0, 1], in an explicit unit, covering the run."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mirrordp.updates import schedules

alphas = st.floats(0, 1, width=32)


class TestShapes:
    def test_constant(self):
        np.testing.assert_array_equal(
            schedules.evaluate(schedules.constant(0.25), 3), np.float32([0.25] * 3)
        )

    def test_cosine_in_steps(self):
        found = schedules.evaluate(schedules.cosine(decay_steps=10), 15)
        t = np.arange(15)
        expected = np.where(t < 10, np.cos(math.pi * t / 20), 0.0)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        # Exactly zero from K on: such steps are not charged.
        assert np.all(found[10:] == 0)
        assert np.all(found[:10] > 0)

    def test_cosine_in_epochs(self):
        """CIFAR-10 of the paper: K = 2000 epochs of 96 steps, 9,600 steps, α ends at 0.997."""
        found = schedules.evaluate(schedules.cosine(decay_epochs=2000, steps_per_epoch=96), 9600)
        assert found[0] == 1
        assert found[-1] == pytest.approx(0.997, abs=5e-4)
        same = schedules.evaluate(schedules.cosine(decay_steps=2000 * 96), 9600)
        np.testing.assert_array_equal(found, same)

    @pytest.mark.parametrize(
        ("epochs", "per_epoch", "steps", "end"),
        [(500, 1340, 67_001, 0.988), (100, 187.25, 3_745, 0.951), (50, 187.25, 3_745, 0.809)],
    )
    def test_the_ends_that_the_field_notes_state(self, epochs, per_epoch, steps, end):
        schedule = schedules.cosine(decay_epochs=epochs, steps_per_epoch=per_epoch)
        assert schedules.evaluate(schedule, steps)[-1] == pytest.approx(end, abs=1e-3)

    def test_linear(self):
        found = schedules.evaluate(schedules.linear(1.0, 0.0, num_steps=5), 7)
        np.testing.assert_allclose(found, [1, 0.75, 0.5, 0.25, 0, 0, 0], atol=1e-7)
        assert found[4] == 0
        assert schedules.evaluate(schedules.linear(0.3, 0.9, num_steps=1), 1) == np.float32(0.3)

    def test_table(self):
        values = [0.0, 1.0, 0.5]
        np.testing.assert_array_equal(schedules.evaluate(schedules.table(values), 3), values)

    def test_traced_steps(self):
        for schedule in (
            schedules.constant(0.5),
            schedules.cosine(decay_steps=4),
            schedules.linear(1, 0, num_steps=4),
            schedules.table([1.0, 0.5, 0.25, 0.0]),
        ):
            scanned = jax.jit(jax.vmap(schedule))(jnp.arange(4))
            np.testing.assert_allclose(scanned, schedules.evaluate(schedule, 4), atol=1e-7)


class TestAsSchedule:
    def test_numbers_lists_and_functions(self):
        assert schedules.evaluate(schedules.as_schedule(1), 2).tolist() == [1, 1]
        assert schedules.evaluate(schedules.as_schedule([1, 0.5]), 2).tolist() == [1, 0.5]
        assert schedules.evaluate(schedules.as_schedule(np.array([1, 0.5])), 2).tolist() == [1, 0.5]
        own = lambda step: 1 / (1 + step)  # noqa: E731
        assert schedules.as_schedule(own) is own
        np.testing.assert_allclose(schedules.evaluate(own, 3), [1, 1 / 2, 1 / 3], rtol=1e-6)

    def test_a_function_of_python_integers_only(self):
        own = lambda step: 1.0 if step < 2 else 0.5  # noqa: E731
        assert schedules.evaluate(own, 3).tolist() == [1, 1, 0.5]


class TestNeverOutside:
    @settings(max_examples=40, deadline=None)
    @given(alphas, alphas, st.integers(1, 60))
    def test_linear(self, start, end, steps):
        # One length for all, so that nothing compiles again.
        found = schedules.evaluate(schedules.linear(start, end, num_steps=steps), 60)
        assert np.all((found >= 0) & (found <= 1))

    @settings(max_examples=40, deadline=None)
    @given(st.floats(0.1, 1e6))
    def test_cosine(self, decay):
        found = schedules.evaluate(schedules.cosine(decay_steps=decay), 60)
        assert np.all((found >= 0) & (found <= 1))
        np.testing.assert_array_equal(found == 0, np.arange(60) >= np.float32(decay))

    @pytest.mark.parametrize("steps", [1, 2, 7, 49, 1000])
    def test_linear_from_one_to_one_is_exactly_one(self, steps):
        assert np.all(schedules.evaluate(schedules.linear(1, 1, num_steps=steps), steps) == 1)

    def test_what_the_device_would_flush_to_zero_is_zero_on_the_host_too(self):
        """Host and device must agree on which steps read private data."""
        found = schedules.evaluate(schedules.constant(1e-40), 2)
        on_device = jax.jit(lambda alpha: alpha > 0)(found)
        np.testing.assert_array_equal(found > 0, on_device)


class TestBadInput:
    @pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, math.inf, -math.inf])
    def test_alpha_outside(self, bad):
        message = r"alpha must be in \[0, 1\], got"
        with pytest.raises(ValueError, match=message):
            schedules.constant(bad)
        with pytest.raises(ValueError, match=message):
            schedules.linear(1.0, bad, num_steps=3)
        with pytest.raises(ValueError, match=message):
            schedules.table([1.0, bad])

    def test_a_function_that_leaves_the_interval(self):
        """cos(πt / 2K) with t in steps and K in epochs: the trap that the field notes describe."""
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\], got -0\.1"):
            schedules.evaluate(lambda t: jnp.cos(math.pi * t / 9), 8)

    def test_a_table_shorter_than_the_run(self):
        with pytest.raises(ValueError, match="cover all 5 steps, but ends before step 2"):
            schedules.evaluate(schedules.table([1.0, 0.5]), 5)

    def test_a_table_longer_than_the_run(self):
        assert schedules.evaluate(schedules.table([1.0, 0.5, 0.0]), 2).tolist() == [1, 0.5]

    @pytest.mark.parametrize("bad", [[], [[1.0]]])
    def test_an_empty_or_deep_table(self, bad):
        with pytest.raises(ValueError, match="must be a non-empty list"):
            schedules.table(bad)

    def test_the_unit_of_k_is_explicit(self):
        with pytest.raises(ValueError, match="K in exactly one unit"):
            schedules.cosine()
        with pytest.raises(ValueError, match="K in exactly one unit"):
            schedules.cosine(decay_steps=5, decay_epochs=5)
        with pytest.raises(ValueError, match="decay_epochs needs steps_per_epoch"):
            schedules.cosine(decay_epochs=5)
        with pytest.raises(TypeError):
            schedules.cosine(2000)

    @pytest.mark.parametrize("bad", [0, -1, math.nan])
    def test_k_must_be_positive(self, bad):
        with pytest.raises(ValueError, match="decay_steps must be a positive finite number"):
            schedules.cosine(decay_steps=bad)
        with pytest.raises(ValueError, match="decay_epochs must be a positive finite number"):
            schedules.cosine(decay_epochs=bad, steps_per_epoch=10)
