"""The cost of a mechanism: DP events in, ε out. A thin layer over `dp_accounting`.

One convention holds everywhere in mirrordp: a *noise multiplier* is the standard deviation of the
noise divided by the clip norm C, the largest norm that one record can contribute, whatever the
adjacency is. The distance between neighbouring sums (C, or 2C when one record replaces another) is
decided here and nowhere else:

    adjacency     neighbours                               ‖sum − sum'‖ ≤
    add-remove    one record more or less                  C
    zero-out      one record's contribution set to zero    C
    replace       one record becomes another               2C

The PLD accountant of dp-accounting doubles the distance for replace-one by itself, and its RDP
accountant does not. `epsilon` makes up for the difference, so events are always stated relative to
C.
"""

import contextlib
import dataclasses
import enum
import functools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import gaussian_mechanism
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon
from scipy import optimize, special

from mirrordp import _validate
from mirrordp._warn import warn

# Leaving out a Rényi order, which dp-accounting notes order by order, is safe.
logging.getLogger("absl").addFilter(
    lambda record: not record.getMessage().startswith("_compute_log_a_frac failed to converge")
)

DpEvent = dp_accounting.DpEvent

UNITS = ("example", "user")
"""What one record can be."""

WHOLE_BATCHES = (
    "Every batch of fixed-size sampling has this many records; only the expected batch size of "
    "Poisson sampling may be a fraction."
)
"""The advice for a batch size that is not whole."""


class Adjacency(enum.Enum):
    """The data sets that count as neighbours, which decides the sensitivity."""

    ADD_REMOVE = "add-remove"
    ZERO_OUT = "zero-out"
    REPLACE = "replace"

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """The same relation in dp-accounting."""
        return {
            Adjacency.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
            Adjacency.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
            Adjacency.REPLACE: dp_accounting.NeighboringRelation.REPLACE_ONE,
        }[self]

    @property
    def distance(self) -> int:
        """The largest ‖sum − sum'‖ between neighbours in clip norms: 1, or 2 for replace."""
        return 2 if self is Adjacency.REPLACE else 1

    @property
    def num_examples_is_public(self) -> bool:
        """Whether neighbours have the same number of records, so that n may be known to all."""
        return self is not Adjacency.ADD_REMOVE


class Accountant(enum.Enum):
    """The analysis of a composition: privacy loss distributions (tighter) or Rényi orders."""

    PLD = "pld"
    RDP = "rdp"


COARSE_ORDERS: tuple[float, ...] = (
    *(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(float(order) for order in range(5, 64)),
    *(128.0, 256.0, 512.0),
)
"""The Rényi orders that give ε = 8.32, which the paper quotes for StackOverflow."""


# A Rényi divergence of sampled sums that is smaller may have lost its digits to cancellation.
_ROUNDING = 1e-12
# Above that, it is at most this much too small.
_LAST_DIGITS = 1e-14
# Beyond this noise the analyses of sampling lose all digits, or fail.
_MOST_SAMPLED_NOISE = 1e8
# The square of a noise multiplier must be a float.
_MOST_NOISE = 1e100


class UnsupportedError(ValueError):
    """A combination of sampling, adjacency and accountant that has no analysis here."""


def poisson_event(noise_multiplier: float, *, sampling_prob: float, num_steps: int) -> DpEvent:
    """Returns the event of Gaussian sums over Poisson samples with inclusion probability q.

    Args:
        noise_multiplier: standard deviation of the noise over the clip norm.
        sampling_prob: q, the probability with which each record joins each batch; q = 1 is a
            full batch and is analysed as such.
        num_steps: the number of sums.
    """
    _validate.non_negative(noise_multiplier=noise_multiplier)
    _validate.probability(sampling_prob=sampling_prob)
    gaussian = dp_accounting.GaussianDpEvent(float(noise_multiplier))
    if sampling_prob == 1:
        return _repeated(gaussian, num_steps)
    # ε grows with q, and dp-accounting's bounds overflow where 1 / q does.
    prob = max(float(sampling_prob), sys.float_info.min)
    return _repeated(dp_accounting.PoissonSampledDpEvent(prob, gaussian), num_steps)


def full_batch_event(noise_multiplier: float, *, num_steps: int) -> DpEvent:
    """Returns the event of `num_steps` Gaussian sums over all records."""
    return poisson_event(noise_multiplier, sampling_prob=1.0, num_steps=num_steps)


def fixed_size_event(
    noise_multiplier: float, *, num_examples: int, batch_size: int, num_steps: int
) -> DpEvent:
    """Returns the event of Gaussian sums over `batch_size` of `num_examples` records at random."""
    _validate.non_negative(noise_multiplier=noise_multiplier)
    _validate.positive_integer(num_examples=num_examples)
    _validate.positive_integer(WHOLE_BATCHES, batch_size=batch_size)
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size must be at most num_examples={num_examples}, got {batch_size}. Choose a "
            "smaller batch."
        )
    gaussian = dp_accounting.GaussianDpEvent(float(noise_multiplier))
    if batch_size == num_examples:
        return _repeated(gaussian, num_steps)
    return _repeated(
        dp_accounting.SampledWithoutReplacementDpEvent(
            int(num_examples), int(batch_size), gaussian
        ),
        num_steps,
    )


def _repeated(event: DpEvent, count: int) -> DpEvent:
    if count != 0:
        _validate.positive_integer(num_steps=count)
    return (
        dp_accounting.NoOpDpEvent()
        if count == 0
        else dp_accounting.SelfComposedDpEvent(event, int(count))
    )


@dataclasses.dataclass(frozen=True)
class Epsilon:
    """An ε together with everything that it depends on."""

    epsilon: float
    delta: float
    adjacency: Adjacency
    accountant: Accountant
    method: str


def epsilon(
    event: DpEvent,
    delta: float,
    *,
    adjacency: Adjacency,
    accountant: Accountant | None = None,
    orders: Sequence[float] | None = None,
) -> Epsilon:
    """Returns an ε for which `event` is (ε, δ)-differentially private, as one accountant finds it.

    PLD is the tighter analysis with few exceptions: where ε is small after very many steps, its
    discretisation adds up, and RDP may find less.

    Args:
        event: the mechanism, with noise multipliers relative to the clip norm C.
        delta: δ in (0, 1).
        adjacency: the neighbours that the guarantee refers to.
        accountant: the analysis; by default PLD if it covers the event, else RDP.
        orders: Rényi orders for RDP; by default those of dp-accounting.

    Raises:
        UnsupportedError: if the given accountant, or every accountant, lacks an analysis of the
            event under this adjacency. The message says what can be analysed.
    """
    _validate.open_unit_interval(delta=delta)
    delta = float(delta)
    chosen = resolve_accountant(event, adjacency, accountant)
    event = _analysable(event)
    orders = None if orders is None else checked_orders(orders)
    if orders is not None and chosen is Accountant.PLD:
        raise ValueError(
            "orders belong to the RDP accountant, got the PLD accountant. Choose RDP, or leave the "
            "orders out."
        )
    if chosen is Accountant.RDP:
        value = _rdp_epsilon(event, delta, adjacency, orders)
        method = f"RDP, {'dp-accounting default' if orders is None else len(orders)} orders"
    elif (mu := _gaussian_mu(event)) is not None:
        value = _gaussian_epsilon(adjacency.distance * mu, delta)
        method = "PLD, exact: the composition is one Gaussian"
    else:
        value = _pld_epsilon(event, delta, adjacency)
        method = "PLD, discretised upwards at 1e-4"
    # A failed computation promises nothing.
    return Epsilon(math.inf if math.isnan(value) else value, delta, adjacency, chosen, method)


def checked_orders(orders: Iterable[float]) -> tuple[float, ...]:
    """Returns Rényi orders as floats; raises unless they are finite numbers above one."""
    found = tuple(orders)
    for order in found:
        _validate.positive("A Renyi order is a finite number above 1.", order=order)
        if not order > 1:
            raise ValueError(
                f"Renyi orders must be finite numbers above 1, got {order!r}. Leave it out."
            )
    if not found:
        raise ValueError(
            "orders must name at least one Renyi order, got none. Leave orders out for those of "
            "dp-accounting."
        )
    return tuple(map(float, found))


def default_delta(num_examples: int) -> float:
    """Returns 1/(10 n) rounded down to a power of ten, and at most 1e-5, for a public n.

    >>> [default_delta(n) for n in (100, 10_000, 10_001, 300_000)]
    [1e-05, 1e-05, 1e-06, 1e-07]
    """
    _validate.positive_integer(num_examples=num_examples)
    return float(f"1e-{max(5, len(str(10 * int(num_examples) - 1)))}")


def require_small_delta(delta: float, num_examples: int, *, allow_large: bool = False) -> None:
    """Raises a ValueError if δ > 1/n, or warns if that is confirmed.

    What trains a model to (ε, δ) calls this before anything is spent. What only computes ε or noise
    calls `warn_of_large_delta`.

    Args:
        delta: δ.
        num_examples: n, which is public.
        allow_large: whether the caller has confirmed a large δ.
    """
    _validate.instance_of(bool, allow_large_delta=allow_large)
    if allow_large:
        return warn_of_large_delta(delta, num_examples)
    problem = _large_delta(delta, num_examples)
    if problem is not None:
        raise ValueError(
            f"{problem} Use delta={default_delta(num_examples):g}, or confirm it "
            "(allow_large_delta=True, or --allow-large-delta with mirrordp fit)."
        )


def warn_of_large_delta(delta: float, num_examples: int | None) -> None:
    """Warns if δ > 1/n; `num_examples` is None where n is secret."""
    problem = None if num_examples is None else _large_delta(delta, num_examples)
    if problem is not None:
        warn(f"{problem} Choose a delta well below 1/n.", UserWarning)


def _large_delta(delta: float, num_examples: int) -> str | None:
    """Says what is wrong with δ > 1/n: publishing a random record would then pass."""
    delta, num_examples = float(delta), int(num_examples)
    if delta <= 1 / num_examples:
        return None
    return (
        f"expected delta of at most 1/n = {1 / num_examples:.2g} for n = {num_examples} records, "
        f"got {delta:g}, at which a mechanism that publishes a random record passes."
    )


def renyi_divergences(
    event: DpEvent, orders: Sequence[float], *, adjacency: Adjacency
) -> np.ndarray:
    """Returns an upper bound on the Rényi divergence between neighbours at each order.

    The bounds of several events add up.

    Args:
        event: the mechanism, with noise multipliers relative to the clip norm C.
        orders: the orders, each above one.
        adjacency: the neighbours.

    Raises:
        UnsupportedError: if there is no Rényi analysis (Poisson sampling under replace).
    """
    resolve_accountant(event, adjacency, Accountant.RDP)
    event, orders = plain_event(event), checked_orders(orders)
    recurse = functools.partial(renyi_divergences, orders=orders, adjacency=adjacency)
    match event:
        case dp_accounting.SelfComposedDpEvent():
            return event.count * recurse(event.event)
        case dp_accounting.ComposedDpEvent() if event.events:
            return np.sum([recurse(part) for part in event.events], axis=0)
    event = _analysable(event)
    found, whole = _divergences(event, orders, adjacency), _without_sampling(event)
    if event != whole:
        found = found + _LAST_DIGITS
    if not (lost := ~((found >= _ROUNDING) & (found < np.inf))).any():
        return found
    # Not a number, or small enough to be rounding: what has no sampling needs no cancellation.
    bound = _divergences(whole, orders, adjacency)
    found = np.where(found < _ROUNDING, np.minimum(bound, _ROUNDING), np.where(lost, bound, found))
    # An order at which the computation failed promises nothing.
    return np.where(np.isnan(found), np.inf, found)


def _divergences(event: DpEvent, orders: Sequence[float], adjacency: Adjacency) -> np.ndarray:
    """Returns what dp-accounting computes at each order."""
    # The bound on a selection at one order is a minimum over others, so it is given more of them.
    others = DEFAULT_RDP_ORDERS if has_selection(event) else ()
    every = sorted({*map(float, orders), *map(float, others)})
    accountant = RdpAccountant(every, adjacency.neighboring_relation)
    found = accountant.compose(_noise_over_distance(event, adjacency)).rdp
    return found[np.searchsorted(every, [float(order) for order in orders])]


def check_noise(event: DpEvent) -> None:
    """Raises a ValueError unless every noise multiplier in an event is a finite number."""
    for sigma in _noise_multipliers(event):
        if not 0 <= sigma < math.inf:
            raise ValueError(
                f"expected an event whose noise multipliers are finite numbers of at least zero, "
                f"got {sigma!r}. Charge the noise that was added; what releases nothing is not "
                "charged."
            )


def _noise_multipliers(event: DpEvent) -> Iterator[float]:
    match event:
        case dp_accounting.GaussianDpEvent():
            yield event.noise_multiplier
        case dp_accounting.ComposedDpEvent():
            for inner in event.events:
                yield from _noise_multipliers(inner)
        case (
            dp_accounting.SelfComposedDpEvent()
            | dp_accounting.PoissonSampledDpEvent()
            | dp_accounting.SampledWithoutReplacementDpEvent()
            | RepeatAndSelectDpEvent()
        ):
            yield from _noise_multipliers(event.event)


def _analysable(event: DpEvent) -> DpEvent:
    """Returns an event that costs at least as much, and whose noise the analyses can compute with.

    Less noise costs more, and so does the same noise without sampling: Rényi divergences are
    quasi-convex, and for much noise little is lost.
    """
    check_noise(event)
    return _mapped(event, _tamed)


def plain_event(event: DpEvent) -> DpEvent:
    """Returns a copy whose numbers are Python's own, as those of `_validate.plain` are."""

    def change(event: DpEvent) -> DpEvent:
        match event:
            case dp_accounting.GaussianDpEvent(noise_multiplier=sigma):
                return dp_accounting.GaussianDpEvent(float(sigma))
            case _:
                return event

    return _mapped(event, change)


def _tamed(event: DpEvent) -> DpEvent:
    match event:
        case dp_accounting.GaussianDpEvent(noise_multiplier=sigma):
            # A number that nobody can change: what is computed from it is remembered.
            return dp_accounting.GaussianDpEvent(min(float(sigma), _MOST_NOISE))
        case (
            dp_accounting.PoissonSampledDpEvent(
                event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma)
            )
            | dp_accounting.SampledWithoutReplacementDpEvent(
                event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma)
            )
        ) if sigma > _MOST_SAMPLED_NOISE:
            return event.event
        case _:
            return event


def _without_sampling(event: DpEvent) -> DpEvent:
    """Returns the event of which every record is part, which costs at least as much."""

    def whole(event: DpEvent) -> DpEvent:
        match event:
            case (
                dp_accounting.PoissonSampledDpEvent()
                | dp_accounting.SampledWithoutReplacementDpEvent()
            ):
                return event.event
            case _:
                return event

    return _mapped(event, whole)


def _mapped(event: DpEvent, change: Callable[[DpEvent], DpEvent]) -> DpEvent:
    """Changes every event within an event, the innermost first, and then the event itself."""
    recurse = functools.partial(_mapped, change=change)
    match event:
        case dp_accounting.SelfComposedDpEvent():
            event = dp_accounting.SelfComposedDpEvent(recurse(event.event), int(event.count))
        case dp_accounting.ComposedDpEvent():
            event = dp_accounting.ComposedDpEvent([recurse(inner) for inner in event.events])
        case dp_accounting.PoissonSampledDpEvent():
            event = dp_accounting.PoissonSampledDpEvent(
                float(event.sampling_probability), recurse(event.event)
            )
        case dp_accounting.SampledWithoutReplacementDpEvent():
            event = dp_accounting.SampledWithoutReplacementDpEvent(
                int(event.source_dataset_size), int(event.sample_size), recurse(event.event)
            )
        case RepeatAndSelectDpEvent():
            event = RepeatAndSelectDpEvent(
                recurse(event.event), float(event.mean), float(event.shape)
            )
    return change(event)


def resolve_accountant(
    event: DpEvent, adjacency: Adjacency, accountant: Accountant | None = None
) -> Accountant:
    """Returns the given accountant, or PLD before RDP, if it can analyse the event."""
    _validate.instance_of(Adjacency, "Use, for example, Adjacency.ZERO_OUT.", adjacency=adjacency)
    if accountant is not None:
        _validate.instance_of(Accountant, "Use Accountant.PLD or None.", accountant=accountant)
    supported = [kind for kind in Accountant if _fresh(kind, adjacency).supports(event)]
    if accountant is None and supported:
        return supported[0]
    if accountant in supported:
        return accountant
    advice = (
        f"Use {supported[0].name}."
        if supported
        else "There are analyses of Poisson sampling under add-remove or zero-out (PLD, RDP) and "
        "replace (PLD), of fixed-size sampling under replace (RDP), and of full batches under any "
        "adjacency."
        + " The best of a random number of runs has an analysis where its runs have one by RDP."
        * has_selection(event)
    )
    asked = "no accountant can" if accountant is None else f"{accountant.name} cannot"
    raise UnsupportedError(
        f"{asked} analyse {_describe(event)} under {adjacency.value} adjacency. {advice}"
    )


def has_selection(event: DpEvent) -> bool:
    """Returns whether an event holds the best of a random number of runs; see `NumberOfRuns`."""
    match event:
        case RepeatAndSelectDpEvent():
            return True
        case dp_accounting.SelfComposedDpEvent():
            return has_selection(event.event)
        case dp_accounting.ComposedDpEvent():
            return any(map(has_selection, event.events))
        case _:
            return False


def _describe(event: DpEvent) -> str:
    """Names the kind of sampling in an event."""
    match event:
        case dp_accounting.SelfComposedDpEvent():
            return _describe(event.event)
        case dp_accounting.ComposedDpEvent():
            return " and ".join(sorted({_describe(inner) for inner in event.events}))
        case dp_accounting.PoissonSampledDpEvent():
            return "Poisson sampling"
        case dp_accounting.SampledWithoutReplacementDpEvent():
            return "fixed-size sampling"
        case dp_accounting.GaussianDpEvent():
            return "full batches"
        case RepeatAndSelectDpEvent():
            return f"the best of a random number of runs with {_describe(event.event)}"
        case _:
            return type(event).__name__


def _fresh(accountant: Accountant, adjacency: Adjacency) -> dp_accounting.PrivacyAccountant:
    kind = PLDAccountant if accountant is Accountant.PLD else RdpAccountant
    return kind(neighboring_relation=adjacency.neighboring_relation)


def _remembered(analysis: Callable[..., float]) -> Callable[..., float]:
    """Keeps what was computed: calibration, budget, report and card ask about the same run."""
    cached = functools.lru_cache(maxsize=4096)(analysis)

    @functools.wraps(analysis)
    def answer(event: DpEvent, *options: Any) -> float:
        try:
            hash(event)
        except TypeError:  # A composition keeps its parts in a list.
            return analysis(event, *options)
        return cached(event, *options)

    return answer


@_remembered
def _pld_epsilon(event: DpEvent, delta: float, adjacency: Adjacency) -> float:
    match event:
        case dp_accounting.SelfComposedDpEvent(
            event=dp_accounting.PoissonSampledDpEvent(
                sampling_probability=q, event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma)
            ),
            count=count,
        ) if sigma > 0 and q > 0:
            steps = _poisson_pld(sigma, q, adjacency).self_compose(count)
            # The accountant also composes with the identity, which may round the tails upwards.
            nothing = privacy_loss_distribution.identity()
            return float(nothing.compose(steps).get_epsilon_for_delta(delta))
    return float(_fresh(Accountant.PLD, adjacency).compose(event).get_epsilon(delta))


@functools.lru_cache(maxsize=2)
def _poisson_pld(
    noise_multiplier: float, sampling_prob: float, adjacency: Adjacency
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns one step as `PLDAccountant` discretises it.

    It is cached because computing ε at one step count after another, as training goes on, would
    spend nearly all of its time here.
    """
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        sampling_prob=sampling_prob,
        neighboring_relation=adjacency.neighboring_relation,
    )


@_remembered
def _rdp_epsilon(
    event: DpEvent, delta: float, adjacency: Adjacency, orders: tuple[float, ...] | None
) -> float:
    orders = tuple(map(float, DEFAULT_RDP_ORDERS)) if orders is None else orders
    # Of a divergence that rounding made negative, dp-accounting would conclude that ε is zero.
    found = renyi_divergences(event, orders, adjacency=adjacency)
    return float(compute_epsilon(orders, found.tolist(), delta)[0])


def _noise_over_distance(event: DpEvent, adjacency: Adjacency) -> DpEvent:
    """Restates noise relative to the distance between neighbours, as RDP accounting reads it."""
    if adjacency.distance == 1:
        return event

    def restated(event: DpEvent) -> DpEvent:
        match event:
            case dp_accounting.GaussianDpEvent():
                return dp_accounting.GaussianDpEvent(event.noise_multiplier / adjacency.distance)
            case (
                dp_accounting.SelfComposedDpEvent()
                | dp_accounting.ComposedDpEvent()
                | dp_accounting.SampledWithoutReplacementDpEvent()
                | RepeatAndSelectDpEvent()
                | dp_accounting.NoOpDpEvent()
            ):
                return event
            case _:
                raise UnsupportedError(
                    f"expected an event that RDP can analyse under replace adjacency, got "
                    f"{type(event).__name__}. Use another adjacency."
                )

    return _mapped(event, restated)


def _gaussian_mu(event: DpEvent) -> float | None:
    """Returns μ = sqrt(Σ 1/σ²) if an event is a composition of Gaussians, else None."""
    match event:
        case dp_accounting.NoOpDpEvent():
            return 0.0
        case dp_accounting.GaussianDpEvent():
            return math.inf if event.noise_multiplier == 0 else 1 / event.noise_multiplier
        case dp_accounting.SelfComposedDpEvent():
            mu = _gaussian_mu(event.event)
            return None if mu is None else mu * math.sqrt(event.count)
        case dp_accounting.ComposedDpEvent():
            parts = [_gaussian_mu(inner) for inner in event.events]
            return None if None in parts else math.hypot(*(part or 0.0 for part in parts))
        case _:
            return None


@functools.lru_cache(maxsize=4096)
def _gaussian_epsilon(mu: float, delta: float) -> float:
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    if mu < 1e-3:
        return _small_gaussian_epsilon(mu, delta)
    found = float(gaussian_mechanism.get_epsilon_gaussian(1 / mu, delta))
    # What the root that it searches may be off by.
    return found + 2e-12 if found > 0 else found


def _small_gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns an upper bound on ε that is tight for small μ, where the exact formula cancels.

    With L ~ N(μ²/2, μ²) and z = (ε − μ²/2)/μ, δ(ε) = E[(1 − e^{ε−L})₊] ≤ E[(L − ε)₊] =
    μ (φ(z) − z Φ(−z)). At ε = 0, δ is the total variation.
    """
    if math.erf(mu / math.sqrt(8)) * (1 + 1e-12) <= delta:
        return 0.0

    def excess(z: float) -> float:
        mills_ratio = math.sqrt(math.pi / 2) * special.erfcx(z / math.sqrt(2))
        return math.log1p(-z * mills_ratio) - z * z / 2 - math.log(2 * math.pi) / 2

    sought = math.log(delta) - math.log(mu)
    z = float(optimize.brentq(lambda z: excess(z) - sought, -1, 60))  # pyright: ignore[reportArgumentType]
    # What the root may be off by, and rounding.
    return max((mu / 2 + z + 1e-11) * mu * (1 + 1e-9), 0.0)


def calibrate(
    make_event: Callable[[float], DpEvent],
    *,
    epsilon_target: float,
    delta: float,
    adjacency: Adjacency,
    accountant: Accountant | None = None,
    orders: Sequence[float] | None = None,
    tolerance: float = 5e-3,
) -> float:
    """Returns the smallest noise multiplier, up to `tolerance`, that keeps ε within the target.

    Bisection on the noise multiplier keeps one end that was seen to satisfy the target, and returns
    it. So ε(result) ≤ target always, and ε(result) ≥ (1 − tolerance)·target unless ε jumps there.

    Args:
        make_event: maps a noise multiplier to the event of the whole run.
        epsilon_target: the ε not to exceed.
        delta: δ in (0, 1).
        adjacency: the neighbours that the guarantee refers to.
        accountant: as in `epsilon`.
        orders: as in `epsilon`.
        tolerance: the share of the target that may be left unused.
    """
    _validate.positive(epsilon=epsilon_target)
    _validate.open_unit_interval(delta=delta)
    epsilon_target, delta = float(epsilon_target), float(delta)
    chosen = resolve_accountant(make_event(1.0), adjacency, accountant)
    search = functools.partial(
        _smallest_safe_noise, epsilon_target=epsilon_target, tolerance=tolerance
    )

    def achieved(noise_multiplier: float) -> float:
        event = make_event(noise_multiplier)
        result = epsilon(event, delta, adjacency=adjacency, accountant=chosen, orders=orders)
        return result.epsilon

    start = 1.0
    if chosen is Accountant.PLD and _fresh(Accountant.RDP, adjacency).supports(make_event(1.0)):
        # RDP at integer orders is far cheaper than a PLD, and a good first guess of its answer.
        guess_orders = tuple(range(2, 128))
        # At these orders there is no guess for a tiny ε.
        with contextlib.suppress(UnsupportedError):
            start = search(
                lambda sigma: _rdp_epsilon(make_event(sigma), delta, adjacency, guess_orders),
                start=start,
            )
    return search(achieved, start=start)


def _smallest_safe_noise(
    achieved: Callable[[float], float], *, start: float, epsilon_target: float, tolerance: float
) -> float:
    """Searches in log-log coordinates, and returns only a point that was seen to be safe."""
    safe, safe_epsilon = start, achieved(start)
    while not safe_epsilon <= epsilon_target:  # True for NaN, too.
        if safe > 2**40:
            raise UnsupportedError(
                f"no noise multiplier up to {safe:.0e} reaches epsilon {epsilon_target:g}. Allow a "
                "larger epsilon or fewer steps."
            )
        safe *= 2
        safe_epsilon = achieved(safe)
    unsafe, unsafe_epsilon = 0.0, math.inf
    good_enough = (1 - tolerance) * epsilon_target
    while safe_epsilon < good_enough and safe - unsafe > 1e-9 * safe:
        if unsafe == 0:
            # ε falls no faster than exponentially in σ; 0.7 rarely jumps past the answer.
            guess = safe * max(0.7, min(0.99, (safe_epsilon / epsilon_target) ** 0.8))
            # PLDs of nearly noiseless steps need unbounded memory, and such noise has no use.
            if guess < 1e-2:
                break
        else:
            guess = math.sqrt(safe * unsafe)
            if safe_epsilon > 0 and math.isfinite(unsafe_epsilon):
                aim = math.log((1 - tolerance / 2) * epsilon_target)
                slope = math.log(safe / unsafe) / math.log(safe_epsilon / unsafe_epsilon)
                guess = safe * math.exp(slope * (aim - math.log(safe_epsilon)))
            margin = 0.02 * (safe - unsafe)
            guess = min(max(guess, unsafe + margin), safe - margin)
        value = achieved(guess)
        if not value <= epsilon_target:
            unsafe, unsafe_epsilon = guess, value
        else:
            safe, safe_epsilon = guess, value
    return safe


def least_noise(fits: Callable[[float], bool]) -> float | None:
    """Returns the smallest noise multiplier that fits, up to 0.1%, or None if no noise is enough.

    The result was seen to fit, and has five digits, so that a message can quote it.

    Args:
        fits: says whether a noise multiplier fits; if one does, so must every larger one.
    """
    high = 1.0
    while not fits(high):
        high *= 2
        if high > 2**30:
            return None
    low = high / 2
    while fits(low) and low > 1e-3:
        low, high = low / 2, low
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    unit = 10.0 ** (math.floor(math.log10(high)) - 4)
    rounded = float(f"{math.ceil(high / unit) * unit:.5g}")
    return rounded if fits(rounded) else high


def most_steps(fits: Callable[[int], bool]) -> int:
    """Returns the largest number of steps, up to a billion, that fits, or zero if none does.

    Args:
        fits: says whether a number of steps fits; if one does, so must every smaller one.
    """
    if not fits(1):
        return 0
    fitting, too_many = 1, 2
    while too_many < 10**9 and fits(too_many):
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting
