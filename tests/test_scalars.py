"""NumPy's scalars compute in their own width: 100 · 3 is 44 in int8. Privacy must not notice."""

import dataclasses
import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrordp
from mirrordp import Ledger, Mechanism, PoissonSampling
from mirrordp.privacy import accounting, ghost
from mirrordp.privacy.accounting import Accountant
from mirrordp.privacy.noise import GaussianNoise, SecureGaussianNoise
from mirrordp.privacy.sampling import CyclicPoissonSampling, FixedSizeSampling, FullBatch
from mirrordp.training.federated import AdaptiveClip
from mirrordp.tuning import PrivateScore

int8, float16 = np.int8, np.float16
SAMPLING = PoissonSampling.for_batch_size(50, num_examples=1000)
ZERO_OUT = mirrordp.Adjacency.ZERO_OUT
NOISE = np.float32(1.1)


def plain_copy(value: Any) -> Any:
    """Returns a frozen dataclass made anew from Python's numbers."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    numbers = {k: v.item() if isinstance(v, np.generic) else v for k, v in fields.items()}
    return type(value)(**numbers)


class TestNumbersOfAMechanism:
    def test_the_scale_of_the_noise_does_not_overflow(self):
        mechanism = Mechanism(
            sampling=SAMPLING, l2_clip_norm=int8(3), noise_multiplier=int8(100), num_steps=1
        )
        assert mechanism.noise_stddev == 300
        noise = GaussianNoise()
        like = {"w": jnp.zeros(20_000)}
        state = noise.init(jax.random.key(0), like)
        noisy, _ = noise.add(like, state, mechanism.noise_stddev)
        assert float(jnp.std(noisy["w"])) == pytest.approx(300, rel=0.05)

    def test_the_scale_of_the_noise_does_not_underflow(self):
        mechanism = Mechanism(
            sampling=SAMPLING,
            l2_clip_norm=float16(1e-7),
            noise_multiplier=float16(1e-1),
            num_steps=1,
        )
        assert mechanism.noise_stddev == float(float16(1e-7)) * float(float16(1e-1)) > 0

    @pytest.mark.parametrize(
        "make",
        [
            lambda: SAMPLING.for_batch_size(float16(50.5), num_examples=np.int32(1000)),
            lambda: PoissonSampling(sampling_prob=float16(0.1), expected_batch_size=np.float32(10)),
            lambda: CyclicPoissonSampling.for_batch_size(
                int8(10), num_groups=int8(100), num_examples=np.int16(10_000)
            ),
            lambda: FixedSizeSampling(batch_size=int8(100), num_examples=np.int16(1000)),
            lambda: FullBatch.of(np.int16(1000)),
            lambda: SecureGaussianNoise(num_params=int8(100), bits=int8(20)),
            lambda: Mechanism(
                sampling=SAMPLING,
                l2_clip_norm=float16(1),
                noise_multiplier=NOISE,
                num_steps=int8(9),
            ),
            lambda: AdaptiveClip(quantile=float16(0.5), learning_rate=float16(0.2)),
            lambda: PrivateScore(lambda params, example: 0.0, low=int8(-100), high=int8(100)),
        ],
    )
    def test_what_decides_privacy_is_held_as_numbers_of_python(self, make):
        value = make()
        for field in dataclasses.fields(value):
            assert not isinstance(getattr(value, field.name), np.generic), field.name
        assert value == plain_copy(value)

    def test_many_groups_are_charged(self):
        sampling = CyclicPoissonSampling(
            sampling_prob=0.5, num_groups=int8(100), expected_batch_size=10, num_examples=2000
        )
        mechanism = Mechanism(
            sampling=sampling, l2_clip_norm=1.0, noise_multiplier=1.0, num_steps=120
        )
        for steps in (int8(120), 120):
            assert mechanism.event_between(int8(0), steps) == mechanism.event
        assert not isinstance(mechanism.event, dp_accounting.NoOpDpEvent)

    def test_a_target_in_half_precision_is_kept(self):
        target = float16(0.1)
        found = Mechanism.calibrate(
            epsilon=target, delta=float16(1e-4), sampling=SAMPLING, num_steps=5, l2_clip_norm=1.0
        )
        assert found.epsilon(float(float16(1e-4))) <= float(target)

    def test_the_interval_of_a_score_does_not_overflow(self):
        assert PrivateScore(lambda p, e: 0.0, low=int8(-100), high=int8(100)).half_width == 100


class TestClipNorms:
    @pytest.mark.parametrize("make", [mirrordp.clipped_grad, ghost.clipped_grad])
    @pytest.mark.parametrize("groups", [None, [0, 1, 2]])
    def test_are_not_rounded_up(self, make, groups):
        # √3 in half precision, and the quotient rounded to it, made three groups 1.0006 C long.
        limit = float16(1.001)
        grad = make(
            lambda params, row: sum(jnp.vdot(leaf, row) for leaf in params),
            l2_clip_norm=limit,
            groups=groups,
            microbatch_size=int8(1),
        )
        params = [jnp.zeros(5) for _ in range(3)]
        total = grad(params, jnp.full((1, 5), 1e3), jnp.zeros(1, bool))
        norm = math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in total))
        assert norm <= float(limit) == grad.l2_clip_norm
        assert type(grad.l2_clip_norm) is float
        assert norm == pytest.approx(float(limit), rel=1e-4)


class TestEvents:
    def test_counts_of_a_narrow_type_are_charged_in_full(self):
        ledger = Ledger(adjacency=ZERO_OUT)
        gaussian = dp_accounting.GaussianDpEvent(float16(8.0))
        for _ in range(3):
            ledger.charge(dp_accounting.SelfComposedDpEvent(gaussian, int8(100)))
        exact = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(8.0), 300)
        assert ledger.epsilon(1e-5).epsilon >= accounting.epsilon(
            exact, 1e-5, adjacency=ZERO_OUT
        ).epsilon * (1 - 1e-9)

    def test_an_epsilon_is_that_of_the_same_python_numbers(self):
        narrow = accounting.poisson_event(
            float16(2.0), sampling_prob=float16(0.25), num_steps=int8(100)
        )
        plain = accounting.poisson_event(2.0, sampling_prob=0.25, num_steps=100)
        for accountant in Accountant:
            found = accounting.epsilon(
                narrow, np.float32(1e-5), adjacency=ZERO_OUT, accountant=accountant
            )
            exact = accounting.epsilon(
                plain, float(np.float32(1e-5)), adjacency=ZERO_OUT, accountant=accountant
            )
            assert found == exact


class TestOrders:
    EVENT = dp_accounting.GaussianDpEvent(1.0)

    @pytest.mark.parametrize(
        "orders", [[2.0, math.inf], [math.nan], [0.5], [1.0], [], ["3"], [True], [-2.0]]
    )
    def test_that_are_none_are_refused(self, orders):
        with pytest.raises((ValueError, TypeError), match="order"):
            accounting.epsilon(
                self.EVENT, 1e-5, adjacency=ZERO_OUT, accountant=Accountant.RDP, orders=orders
            )
        with pytest.raises((ValueError, TypeError), match="order"):
            Mechanism(
                sampling=SAMPLING,
                l2_clip_norm=1.0,
                noise_multiplier=1.0,
                num_steps=5,
                accountant=Accountant.RDP,
                orders=tuple(orders),
            )
        with pytest.raises((ValueError, TypeError), match="order"):
            accounting.renyi_divergences(self.EVENT, orders, adjacency=ZERO_OUT)

    @pytest.mark.parametrize("orders", [{math.inf: 1e-6}, {1.0: 1e-6}, {"2": 1e-6}])
    def test_of_a_budget_are_numbers_above_one(self, tmp_path, orders):
        data = mirrordp.PrivateData({"x": np.zeros((5, 1))})
        with pytest.raises((ValueError, TypeError), match="order"):
            mirrordp.Budget.create(
                tmp_path / "budget", epsilon=1.0, delta=1e-5, data=data, orders=orders
            )
