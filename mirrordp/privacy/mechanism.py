"""The one place that couples sampler, clip, noise and event.

Whoever holds a `Mechanism` holds everything that decides ε, and there is no other way to get a
private gradient out of the library: `batches` samples, `clipped_grad` clips, `privatizer` adds the
noise, `mean` divides by a public constant, and `event` says what that costs.
"""

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from mirrordp import _show, _validate
from mirrordp.privacy import accounting, ghost, sums
from mirrordp.privacy.accounting import UNITS, Accountant, Adjacency, DpEvent, Epsilon
from mirrordp.privacy.clipping import ClippedGrad
from mirrordp.privacy.noise import BandedNoise, GaussianNoise, Noise, SecureGaussianNoise
from mirrordp.privacy.sampling import CyclicPoissonSampling, FullBatch, Sampling, in_random_places
from mirrordp.privacy.secure import SecureRandom
from mirrordp.privacy.sums import ExactSum
from mirrordp.privacy.turns import Turn
from mirrordp.types import LossFn, PyTree

_LEAST_NOISE = 2.0**-20
_MOST_GROWTH = 2.0**8


@runtime_checkable
class Spendable(Protocol):
    """What has room for a limited cost, as calibration sees it: a `mirrordp.Budget`."""

    @property
    def adjacency(self) -> Adjacency:
        """The neighbours that the cost speaks of."""
        ...

    @property
    def unit(self) -> str:
        """What one record is."""
        ...

    def check_kind(self, mechanism: "Mechanism") -> None:
        """Raises for a mechanism of another adjacency or unit."""
        ...

    def fits(self, event: DpEvent, *, fraction: float = 1.0) -> bool:
        """Whether an event costs at most a fraction of what is left."""
        ...

    def admit(self, mechanism: "Mechanism", *, num_steps: int) -> None:
        """Raises unless a run fits."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Noisy sums of clipped gradients over sampled batches, and what they cost.

    At each step, with q, C, σ and B public constants,

        draw a batch S;     s = Σ_{i ∈ S} clip(∇ℓ(θ; d_i), C);     release (s + N(0, σ²C² I)) / B.

    Args:
        sampling: how batches are drawn; its expected batch size is the divisor B.
        l2_clip_norm: C.
        noise_multiplier: σ, relative to C whatever the adjacency.
        num_steps: how many releases the mechanism is made for; more are refused.
        adjacency: the neighbours of the guarantee. Zero-out (the default) and replace treat the
            number of records as public, add-remove does not.
        noise: independent Gaussian noise; or `BandedNoise` together with `CyclicPoissonSampling`;
            or `SecureGaussianNoise`, with which batches come from the secure generator too.
        accountant: by default PLD where it can analyse the mechanism, else RDP.
        orders: Rényi orders for the RDP accountant.
        unit: what one record is: "example" or "user". That a record holds all rows of one user is
            the caller's word, which reports repeat; `federated_train` sees to it.
    """

    sampling: Sampling
    l2_clip_norm: float
    noise_multiplier: float
    num_steps: int
    adjacency: Adjacency = Adjacency.ZERO_OUT
    noise: Noise = dataclasses.field(default_factory=GaussianNoise)
    accountant: Accountant | None = None
    orders: tuple[float, ...] | None = None
    unit: str = "example"

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.instance_of(Sampling, "Use PoissonSampling, for one.", sampling=self.sampling)
        # `train` relies on the key living in the noise's state, and the event on its scale.
        _validate.instance_of((GaussianNoise, BandedNoise, SecureGaussianNoise), noise=self.noise)
        _validate.instance_of(Adjacency, "Use Adjacency.ZERO_OUT.", adjacency=self.adjacency)
        sums.check_clip_norm(self.l2_clip_norm)
        _validate.non_negative(noise_multiplier=self.noise_multiplier)
        if 0 < self.noise_multiplier < _LEAST_NOISE:
            raise ValueError(
                f"noise_multiplier must be 0 (no privacy) or at least {_LEAST_NOISE:.1g}, got "
                f"{self.noise_multiplier:g}: sums are kept to {2.0**-sums.GRAIN_BITS:.1g} of the "
                "clip norm, which must stay far below the noise."
            )
        _validate.positive_integer(num_steps=self.num_steps)
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, got {self.unit!r}.")
        self.sampling.check(self.adjacency)
        self._check_noise()
        chosen = accounting.resolve_accountant(self.event, self.adjacency, self.accountant)
        if self.orders is not None:
            object.__setattr__(self, "orders", accounting.checked_orders(self.orders))
            if chosen is Accountant.PLD:
                raise ValueError("orders belong to the RDP accountant; pass accountant=RDP too.")

    def __repr__(self) -> str:
        return f"Mechanism({'; '.join(value for _, value in self._described())})"

    def _repr_html_(self) -> str:
        return _show.table("Mechanism", self._described())

    def _described(self) -> list[tuple[str, str]]:
        """What decides ε; n appears only where the sampler was told it, which makes it public."""
        sampling, n = self.sampling, self.sampling.num_examples
        drawn = f"{sampling.name} sampling, q={sampling.sampling_prob:.6g}, expected batch "
        drawn += f"{sampling.expected_batch_size:.6g}"
        noise = f"noise_multiplier={self.noise_multiplier:.6g}"
        noise += f", l2_clip_norm={self.l2_clip_norm:.6g}"
        kind = type(self.noise).__name__
        return [
            ("sampling", drawn if n is None else f"{drawn} of {n}"),
            ("noise", noise if kind == "GaussianNoise" else f"{kind}, {noise}"),
            ("steps", f"num_steps={self.num_steps}"),
            ("guarantee", f"{self.adjacency.value}, one {self.unit}"),
        ]

    @property
    def is_secure(self) -> bool:
        """Whether all randomness that privacy rests on comes from a cryptographic generator."""
        return isinstance(self.noise, SecureGaussianNoise)

    def _check_noise(self) -> None:
        if self.is_secure:
            _validate.positive(
                "SecureGaussianNoise has no noiseless form.", noise_multiplier=self.noise_multiplier
            )
            if isinstance(self.sampling, CyclicPoissonSampling):
                raise accounting.UnsupportedError(
                    "secure noise is independent over steps and draws from PoissonSampling, "
                    "FixedSizeSampling or FullBatch, got cyclic Poisson sampling. Use one of them."
                )
        bands = self.noise.num_bands
        if bands == 1:
            return
        if not isinstance(self.sampling, CyclicPoissonSampling):
            advice = (
                "every record takes part in every step"
                if isinstance(self.sampling, FullBatch)
                else "a record may be drawn in neighbouring steps"
            )
            raise accounting.UnsupportedError(
                f"correlated noise of {bands} bands needs records to take part at most every "
                f"{bands} steps, but under {self.sampling.name} sampling {advice}. Use "
                f"CyclicPoissonSampling with num_groups={bands} or more, or GaussianNoise()."
            )
        if self.sampling.num_groups < bands:
            raise accounting.UnsupportedError(
                f"correlated noise of {bands} bands needs at least {bands} groups, got "
                f"num_groups={self.sampling.num_groups}. Raise num_groups or use fewer bands."
            )
        assert isinstance(self.noise, BandedNoise)
        growth = self.noise.growth(self.num_steps)
        if not growth <= _MOST_GROWTH:
            raise accounting.UnsupportedError(
                f"correlated noise may grow to {_MOST_GROWTH:g} times the size of independent "
                f"noise, got {growth:.3g} times within {self.num_steps} steps, where rounding "
                "takes the guarantee away. Use BandedNoise.optimal(num_steps, num_bands), or "
                "coefficients whose polynomial has no root within the unit circle."
            )

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        spend: Spendable | None = None,
        fraction: float = 1.0,
        sampling: Sampling,
        num_steps: int,
        l2_clip_norm: float,
        **options: Any,
    ) -> "Mechanism":
        """The mechanism with the least noise that keeps to a target ε at δ, or to a budget.

        The search stays on the safe side: `mechanism.epsilon(delta)` is never above `epsilon`, and
        within 1% of it. With `spend=budget` instead of `epsilon` and `delta` the whole run is
        admitted by the budget as it is now, and less noise, by 1%, would not be.

        Args:
            epsilon: the target.
            delta: δ; a warning is given above 1/n.
            spend: the `mirrordp.Budget` that the run will be charged to. Its own rule decides what
                fits, and adjacency and unit are the budget's unless stated. Nothing is charged or
                reserved here.
            fraction: the share of what the budget has left that the run may take.
            sampling: as in `Mechanism`.
            num_steps: as in `Mechanism`.
            l2_clip_norm: as in `Mechanism`.
            **options: the remaining arguments of `Mechanism`.

        Raises:
            BudgetError: if nothing is left of the budget, or it is of another kind.
        """
        _check_target(epsilon, delta, spend, fraction)
        epsilon, delta, fraction = map(_validate.plain, (epsilon, delta, fraction))
        if spend is not None:
            options = {"adjacency": spend.adjacency, "unit": spend.unit} | options
        template = cls(
            sampling=sampling,
            l2_clip_norm=l2_clip_norm,
            noise_multiplier=1.0,
            num_steps=num_steps,
            **options,
        )
        if spend is not None:
            return template._within(spend, fraction)
        assert epsilon is not None
        assert delta is not None
        accounting.warn_of_large_delta(delta, sampling.num_examples)
        noise_multiplier = accounting.calibrate(
            lambda sigma: template.with_noise(sigma).event,
            epsilon_target=epsilon,
            delta=delta,
            adjacency=template.adjacency,
            accountant=template.accountant,
            orders=template.orders,
        )
        mechanism = template.with_noise(noise_multiplier)
        reached = accounting.epsilon(
            mechanism.event,
            delta,
            adjacency=mechanism.adjacency,
            accountant=mechanism.accountant,
            orders=mechanism.orders,
        ).epsilon
        if not reached <= epsilon:
            raise AssertionError(f"calibration overshot: {reached} > {epsilon}; please report.")
        return mechanism

    def _within(self, spend: Spendable, fraction: float) -> "Mechanism":
        """This mechanism with the least noise that a fraction of what is left allows."""
        spend.check_kind(self)
        noise = accounting.least_noise(
            lambda sigma: spend.fits(self.with_noise(sigma).event, fraction=fraction)
        )
        # Without room even this is refused, in the budget's words.
        found = self.with_noise(2.0**30 if noise is None else noise)
        spend.admit(found, num_steps=self.num_steps)
        if noise is None:
            raise accounting.UnsupportedError(
                f"no noise multiplier up to {2.0**30:.0e} keeps {self.num_steps} steps within "
                f"{fraction:g} of what is left. Allow a larger fraction or fewer steps."
            )
        return found

    def with_noise(self, noise_multiplier: float) -> "Mechanism":
        """The same mechanism with another noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    @property
    def event(self) -> DpEvent:
        """The cost of all `num_steps` steps."""
        return self._event(self.num_steps)

    def _event(self, num_steps: int) -> DpEvent:
        accounted = self.noise.accounted_multiplier(self.noise_multiplier, self.l2_clip_norm)
        return self.sampling.event(accounted, num_steps)

    def event_between(self, start: int, stop: int) -> DpEvent:
        """What charged steps number `start` to `stop` − 1 add to the cost of the first `start`."""
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop:
            raise ValueError(f"steps must satisfy 0 <= start <= stop, got {start} and {stop}.")
        if stop > self.num_steps:
            raise ValueError(
                f"the mechanism was made for {self.num_steps} steps, got a request for step "
                f"{stop}. Make it for more steps (which needs more noise for the same epsilon)."
            )
        if isinstance(self.sampling, CyclicPoissonSampling):
            # One more round is entered whenever the first group's turn comes.
            groups = self.sampling.num_groups
            rounds = -(-stop // groups) - (-(-start // groups))
            return self._event(rounds * groups)
        return self._event(stop - start)

    def guarantee(self, delta: float, *, num_steps: int | None = None) -> Epsilon:
        """ε at δ after `num_steps` charged steps (by default all), and how it was found."""
        _validate.open_unit_interval(delta=delta)
        accounting.warn_of_large_delta(delta, self.sampling.num_examples)
        steps = self.num_steps if num_steps is None else num_steps
        if steps != 0:
            _validate.positive_integer(num_steps=steps)
        return accounting.epsilon(
            self.event_between(0, steps),
            delta,
            adjacency=self.adjacency,
            accountant=self.accountant,
            orders=self.orders,
        )

    def epsilon(self, delta: float, *, num_steps: int | None = None) -> float:
        """ε at δ after `num_steps` charged steps (by default all).

        Charged are steps that release something private, and with correlated noise all steps.
        """
        return self.guarantee(delta, num_steps=num_steps).epsilon

    @property
    def noise_stddev(self) -> float:
        """σ·C: the standard deviation of the noise on the sum."""
        return self.noise_multiplier * self.l2_clip_norm

    def check_num_examples(self, num_examples: int) -> None:
        """Refuses data with another number of rows than the mechanism was made for."""
        expected = self.sampling.num_examples
        if expected is not None and expected != num_examples:
            raise ValueError(
                f"the mechanism was made for num_examples={expected}, but the private data has "
                f"another number of rows, {num_examples}. Make the mechanism for this data."
            )

    def batches(
        self, num_examples: int, rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        """Draws the batches of all `num_steps` steps, as arrays of indices.

        Under add-remove adjacency the indices lie in random places of whole passes, with `PADDING`
        between them. A record that is taken away then leaves a gap, and all others stay in the rows
        that they are computed in; moved up, they might be rounded differently.
        """
        _validate.instance_of(SecureRandom if self.is_secure else np.random.Generator, rng=rng)
        self.check_num_examples(num_examples)
        return self._placed(self.sampling.batches(num_examples, self.num_steps, rng), rng)

    def _placed(
        self, batches: Iterator[np.ndarray], rng: np.random.Generator | SecureRandom
    ) -> Iterator[np.ndarray]:
        for batch in batches:
            sums.check_count(len(batch))
            if self.adjacency is Adjacency.ADD_REMOVE:
                batch = in_random_places(batch, self.sampling.capacity, rng)
            yield batch

    def clipped_grad(
        self,
        loss_fn: LossFn,
        *,
        trainable: PyTree | None = None,
        microbatch_size: int | None = None,
        groups: Sequence[int] | None = None,
        turns: Sequence[Turn] | None = None,
        automatic: bool = False,
    ) -> ClippedGrad:
        """The clipped sum at this mechanism's clip norm; see `mirrordp.privacy.ghost`.

        With `groups` or `turns`, see `mirrordp.clipped_grad`.
        """
        return ghost.clipped_grad(
            loss_fn,
            l2_clip_norm=self.l2_clip_norm,
            trainable=trainable,
            microbatch_size=microbatch_size,
            groups=groups,
            turns=turns,
            automatic=automatic,
        )

    def init_noise(self, key: jax.Array, like: PyTree) -> PyTree:
        """Returns the state of the noise before the first step; see `Noise.init`."""
        return self.noise.init(key, like)

    def add_noise(
        self, clipped_sum: ExactSum | PyTree, state: PyTree, *, weight: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        """Returns weight · clipped_sum + this mechanism's noise, and the next state.

        This is the release of a step: everything before it is sensitive, and everything after it is
        post-processing. See `Noise.add`.
        """
        return self.noise.add(clipped_sum, state, self.noise_stddev, weight=weight)

    def mean(self, noisy_sum: PyTree) -> PyTree:
        """The noisy sum divided by the expected batch size, never by the realised one."""
        return jax.tree.map(lambda leaf: leaf / self.sampling.expected_batch_size, noisy_sum)


def _check_target(
    epsilon: float | None, delta: float | None, spend: Spendable | None, fraction: float
) -> None:
    """Raises unless `calibrate` was given (ε, δ) or a budget, and not both."""
    if spend is not None:
        _validate.instance_of(Spendable, "Use Budget.open(folder, data=...).", spend=spend)
        _validate.probability(fraction=fraction)
        if epsilon is not None or delta is not None:
            raise ValueError(
                "calibrate keeps to epsilon and delta, or to what a budget has left, got both. "
                "Leave out epsilon and delta, or spend."
            )
        return
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if value is None:
            raise TypeError(
                f"{name} must be a number where no budget is given, got None. Pass epsilon and "
                "delta, or spend=budget."
            )
    if fraction != 1:
        raise ValueError(
            f"fraction is the share of what a budget has left, got {fraction:g} without a budget. "
            "Pass spend=budget, or a smaller epsilon."
        )
    _validate.positive(epsilon=epsilon)
    _validate.open_unit_interval(delta=delta)
