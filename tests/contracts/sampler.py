"""What every sampler must obey.

Subclass `SamplerContract` in a test file and give it the fixtures `sampler` and `rows`, the number
of records it draws from.
"""

import dataclasses

import dp_accounting
import numpy as np
import pytest

from mirrordp.privacy.sampling import Sampling, passes


def participation(sampler, rows: int, num_steps: int, seed=0) -> np.ndarray:
    """A table [steps, rows] of who took part when."""
    table = np.zeros((num_steps, rows), bool)
    draws = list(sampler.batches(rows, num_steps, np.random.default_rng(seed)))
    assert len(draws) == num_steps
    for step, draw in enumerate(draws):
        assert draw.ndim == 1
        assert len(set(draw.tolist())) == len(draw), "a record was drawn twice in one batch"
        assert draw.size == 0 or (draw.min() >= 0 and draw.max() < rows)
        table[step, draw] = True
    return table


class SamplerContract:
    """Inherit, name the class Test..., and provide the fixtures `sampler` and `rows`."""

    def test_is_a_frozen_value_of_public_constants(self, sampler):
        assert isinstance(sampler, Sampling)
        assert hash(sampler) == hash(dataclasses.replace(sampler))
        assert 0 < sampler.sampling_prob <= 1
        assert sampler.expected_batch_size > 0
        assert sampler.capacity >= 1
        assert sampler.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            sampler.capacity = 3

    def test_draws_are_sets_of_valid_indices(self, sampler, rows):
        assert participation(sampler, rows, 30).any()

    def test_the_average_batch_is_the_divisor(self, sampler, rows):
        sizes = participation(sampler, rows, 400).sum(axis=1)
        error = sizes.std() / np.sqrt(len(sizes)) + 1e-9
        assert abs(sizes.mean() - sampler.expected_batch_size) <= 6 * error
        assert abs(sizes.mean() - 1.3 * sampler.expected_batch_size) > 6 * error

    def test_the_same_seed_draws_the_same(self, sampler, rows):
        first = participation(sampler, rows, 20, seed=5)
        np.testing.assert_array_equal(first, participation(sampler, rows, 20, seed=5))

    def test_another_seed_draws_something_else(self, sampler, rows):
        first = participation(sampler, rows, 20, seed=5)
        if sampler.name == "full batch":
            assert first.all()
        else:
            assert (first != participation(sampler, rows, 20, seed=6)).any()

    def test_passes_lose_nothing_and_have_one_shape(self, sampler, rows):
        for draw in sampler.batches(rows, 20, np.random.default_rng(0)):
            for capacity in (1, 3, sampler.capacity):
                table = passes(draw, capacity)
                assert table.shape[1] == capacity
                assert table.dtype == np.int32
                assert len(table) == max(1, -(-len(draw) // capacity))
                kept = table[table >= 0]
                assert sorted(kept) == sorted(draw)
                assert np.all(table[table < 0] == -1)

    def test_no_steps_cost_nothing_and_more_steps_more(self, sampler):
        assert sampler.event(1.0, 0) == dp_accounting.NoOpDpEvent()
        few, many = sampler.event(1.0, 3), sampler.event(1.0, 300)
        assert 1 <= few.count < many.count
        assert few.event == many.event
