"""Gaussian noise for the clipped sum: independent, correlated over steps, or secure.

The first two are thin over jax_privacy's privatizers: optax transformations that add noise to the
clipped sum, drawn in float32 or wider from a key that has no default. `SecureGaussianNoise` adds
integers from a cryptographic generator. `stddev` is always noise_multiplier · C, the noise on the
*sum*, before any division.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import io_callback
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz
from scipy import signal

from mirrordp import _validate
from mirrordp.privacy._float64 import float64_call
from mirrordp.privacy.secure import SecureRandom, require_cryptography
from mirrordp.privacy.sums import ExactSum, float32_or_wider
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import Params, PyTree


@runtime_checkable
class Noise(Protocol):
    """A way to add noise of a given scale to a stream of sums."""

    @property
    def num_bands(self) -> int:
        """Over how many neighbouring steps noise is correlated; 1 is independent noise."""
        ...

    def accounted_multiplier(self, noise_multiplier: float, l2_clip_norm: float) -> float:
        """The noise over the distance of neighbouring sums that the accountant is told of."""
        ...

    def init(self, key: jax.Array, like: PyTree) -> PyTree:
        """Returns the state before the first sum. It holds the key, so it must be kept secret.

        Args:
            key: where the randomness of all steps comes from.
            like: a tree of the shapes and types of the sums, or an `ExactSum`.
        """
        ...

    def add(
        self,
        total: ExactSum | PyTree,
        state: PyTree,
        stddev: float,
        *,
        weight: PyTree | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Returns weight · total + noise, and the next state.

        The sum and the noise are added in float64 and rounded once, afterwards, so that a large sum
        does not swallow the noise.

        Args:
            total: an `ExactSum`, or a tree of sums in float32 or wider.
            state: what `init` or the previous call returned.
            stddev: the standard deviation of the noise.
            weight: a public constant in [0, 1], or a prefix tree of such constants; None is 1.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GaussianNoise:
    """Independent N(0, stddev²) in every coordinate of every step."""

    @property
    def num_bands(self) -> int:
        """1: steps are independent."""
        return 1

    def accounted_multiplier(self, noise_multiplier: float, l2_clip_norm: float) -> float:
        """The noise multiplier itself: the sum is not altered before the noise."""
        del l2_clip_norm
        return noise_multiplier

    def init(self, key: jax.Array, like: PyTree) -> PyTree:
        """Returns the state before the first sum."""
        return _init_streams(self._stream, key, like)

    def add(
        self,
        total: ExactSum | PyTree,
        state: PyTree,
        stddev: float,
        *,
        weight: PyTree | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Adds fresh Gaussian noise."""
        return _add_streams(self._stream, total, state, stddev, weight)

    def _stream(self, key: jax.Array, stddev: float) -> optax.GradientTransformation:
        return noise_addition.gaussian_privatizer(stddev=stddev, prng_key=key, dtype=_noise_dtype())


@dataclasses.dataclass(frozen=True)
class BandedNoise:
    """Noise C⁻¹z that is correlated over steps, for a banded Toeplitz strategy matrix C.

    Negatively correlated noise partly cancels in the sum over steps that training computes. The
    guarantee is that of z alone if a record takes part at most once in any `num_bands` consecutive
    steps: use `CyclicPoissonSampling` with at least as many groups.

    Args:
        coefficients: the first column of C: c_0 > 0, c_1, ..., one per band.
    """

    coefficients: tuple[float, ...]

    def __post_init__(self):
        if len(self.coefficients) == 0 or not np.all(np.isfinite(self.coefficients)):
            raise ValueError(
                f"coefficients must be finite numbers, at least one, got {self.coefficients!r}. "
                "BandedNoise.optimal(num_steps, num_bands) computes good ones."
            )
        _validate.positive(coefficients_0=self.coefficients[0])
        object.__setattr__(self, "coefficients", tuple(float(c) for c in self.coefficients))

    @classmethod
    def optimal(cls, num_steps: int, num_bands: int) -> "BandedNoise":
        """The coefficients with the least mean squared error of prefix sums (BandMF)."""
        _validate.positive_integer(num_steps=num_steps, num_bands=num_bands)
        if num_bands > num_steps:
            raise ValueError(f"num_bands must be at most num_steps={num_steps}, got {num_bands}.")
        found = toeplitz.optimize_banded_toeplitz(n=num_steps, bands=num_bands)
        return cls(tuple(float(c) for c in found))

    @property
    def num_bands(self) -> int:
        """The number of bands of C."""
        return len(self.coefficients)

    def growth(self, num_steps: int) -> float:
        """Returns how many times as large as independent noise that of the last step is.

        It is the norm of the last row of C⁻¹, for columns of C of norm one. Where the polynomial of
        the coefficients has a root within the unit circle, it grows without bound, until numbers of
        that size keep no digit of z, on which the guarantee rests.
        """
        one = np.zeros(num_steps)
        one[0] = math.hypot(*self.coefficients)
        with np.errstate(over="ignore", invalid="ignore"):
            row = signal.lfilter([1.0], self.coefficients, one)
            return float(np.linalg.norm(row))

    def accounted_multiplier(self, noise_multiplier: float, l2_clip_norm: float) -> float:
        """The noise multiplier itself: the sum is not altered before the noise."""
        del l2_clip_norm
        return noise_multiplier

    def init(self, key: jax.Array, like: PyTree) -> PyTree:
        """Returns the state before the first sum: a key, and the noise of the last steps."""
        return _init_streams(self._stream, key, like)

    def add(
        self,
        total: ExactSum | PyTree,
        state: PyTree,
        stddev: float,
        *,
        weight: PyTree | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Adds correlated noise, scaled up by the column norm of C so that z has `stddev`."""
        scaled = _validate.plain(stddev) * math.hypot(*self.coefficients)
        return _add_streams(self._stream, total, state, scaled, weight)

    def _stream(self, key: jax.Array, stddev: float) -> optax.GradientTransformation:
        return noise_addition.matrix_factorization_privatizer(
            toeplitz.inverse_as_streaming_matrix(jnp.asarray(self.coefficients)),
            stddev=stddev,
            prng_key=key,
            dtype=_noise_dtype(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecureGaussianNoise:
    """Independent Gaussian noise from a cryptographic generator, on a lattice, in integers.

    With g = 2^(⌊log₂ stddev⌋ − bits) and K = round(stddev / g · Z), Z standard normal, drawn
    exactly,

        release g · (round(s / g) + K).

    The addition is in 64-bit integers, so nothing leaks through the gaps of floating point. Since
    round(s / g) is an integer, the release is round(s / g + stddev / g · Z): post-processing of a
    Gaussian mechanism. Rounding adds at most g·√p to the distance C of neighbours, which is
    charged; the sampler is exact and adds nothing to δ. There is no seed and no key, and no run
    can be repeated. See docs/secure-noise.md.

    Args:
        num_params: p, the largest number of coordinates that the noise may be added to.
        bits: lattice points per standard deviation of the noise, as a power of two; 1 to 24.
    """

    num_params: int
    bits: int = 20

    def __post_init__(self):
        _validate.make_plain(self)
        _validate.positive_integer(num_params=self.num_params, bits=self.bits)
        if self.bits > 24:
            raise ValueError(f"bits must be at most 24, got {self.bits}. The default is 20.")
        require_cryptography()

    @classmethod
    def of(cls, params: Params, *, trainable: PyTree | None = None, **options: Any) -> Self:
        """The secure noise for a model: p is the number of its trainable parameters.

        >>> SecureGaussianNoise.of({"w": np.zeros((3, 2)), "b": np.zeros(2)}).num_params
        8

        Args:
            params: the model's parameters; only their shapes are looked at.
            trainable: as in `mirrordp.train`.
            **options: the remaining arguments.
        """
        leaves = jax.tree.leaves(Trainable.of(trainable).part(params))
        return cls(num_params=sum(np.size(leaf) for leaf in leaves), **options)

    @property
    def num_bands(self) -> int:
        """1: steps are independent."""
        return 1

    def granularity(self, stddev: float) -> float:
        """g: the distance of lattice points, a power of two."""
        stddev = _validate.plain(stddev)
        _validate.positive(
            "Secure noise needs some noise: noise_multiplier must be above zero.", stddev=stddev
        )
        return math.ldexp(1.0, math.frexp(stddev)[1] - 1 - self.bits)

    def accounted_multiplier(self, noise_multiplier: float, l2_clip_norm: float) -> float:
        """σC / (C + g·√p): the noise over the enlarged distance."""
        noise_multiplier, l2_clip_norm = map(_validate.plain, (noise_multiplier, l2_clip_norm))
        stddev = noise_multiplier * l2_clip_norm
        rounding = self.granularity(stddev) * math.sqrt(self.num_params)
        return stddev / (l2_clip_norm + rounding)

    def init(self, key: jax.Array, like: PyTree) -> PyTree:
        """Returns the state before the first sum: a count of steps. The key is not used."""
        del key
        self._check_size(_like(like))
        return jnp.zeros([], jnp.int32)

    def add(
        self,
        total: ExactSum | PyTree,
        state: PyTree,
        stddev: float,
        *,
        weight: PyTree | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Adds fresh lattice noise."""
        stddev = _validate.plain(stddev)
        granularity = self.granularity(stddev)
        like = _like(total)
        self._check_size(like)
        leaves, tree = jax.tree.flatten(like)
        sizes = [leaf.size for leaf in leaves]
        # The state is an argument so that steps mapped over each call for their own noise.
        noise = io_callback(
            functools.partial(_lattice_noise, stddev / granularity, sum(sizes)),
            jax.ShapeDtypeStruct((sum(sizes),), jnp.int32),
            state,
        )
        parts = jnp.split(noise, np.cumsum(sizes)[:-1])
        shaped = [
            _on_every_device(part.reshape(leaf.shape))
            for leaf, part in zip(leaves, parts, strict=True)
        ]
        add = functools.partial(_add_on_lattice, granularity=granularity)
        return _added(add, total, jax.tree.unflatten(tree, shaped), weight), state + 1

    def _check_size(self, tree) -> None:
        found = sum(leaf.size for leaf in jax.tree.leaves(tree))
        if found > self.num_params:
            raise ValueError(
                f"the noise was made for num_params={self.num_params} coordinates, got {found}: "
                "rounding so many costs more than was charged. Raise num_params."
            )


def _lattice_noise(stddev: float, count: int, step: np.ndarray) -> np.ndarray:
    del step
    return SecureRandom().rounded_gaussian(stddev, count)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C while the host draws secure noise, which JAX reports as an error of its own."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "KeyboardInterrupt" not in str(error):
            raise
        raise KeyboardInterrupt from None


def to_lattice(values: jax.Array, granularity: float) -> jax.Array:
    """The nearest lattice points, as 64-bit integers; to be called where 64-bit types are on.

    Dividing by a power of two is exact. The clamp is far out and moves no two values apart.
    """
    steps = jnp.rint(values.astype(jnp.float64) / granularity)
    return jnp.clip(steps, -(2.0**62), 2.0**62).astype(jnp.int64)


def _add_on_lattice(values: jax.Array, noise: jax.Array, *, granularity: float) -> jax.Array:
    noisy = to_lattice(values, granularity) + noise.astype(jnp.int64)
    return noisy.astype(jnp.float64) * granularity


def _added(
    add: Callable[[jax.Array, jax.Array], jax.Array],
    total: ExactSum | PyTree,
    noise: PyTree,
    weight: PyTree | None,
) -> PyTree:
    """add(weight · sum, noise) in float64, leaf by leaf, and rounded once, at the end.

    What is rounded is noisy already. Noise added in float32, in several parts, would be lost where
    each part is below half a unit in the last place of the sum.
    """

    def weighted(total: jax.Array, noise: jax.Array, *weight: jax.Array) -> jax.Array:
        for factor in weight:
            total = lax.convert_element_type(factor, jnp.float64) * total
        return add(total, noise)

    weights = [] if weight is None else [jax.tree.broadcast(weight, noise)]
    if isinstance(total, ExactSum):
        return total.map_wide(weighted, noise, *weights)

    def of_floats(total: jax.Array, *others: jax.Array) -> jax.Array:
        wide = weighted(lax.convert_element_type(total, jnp.float64), *others)
        return lax.convert_element_type(wide, total.dtype)

    return jax.tree.map(functools.partial(float64_call, of_floats), total, noise, *weights)


def _like(total: ExactSum | PyTree) -> PyTree:
    """Zeros of the shapes and types of a tree of sums, which must not be narrow."""
    if isinstance(total, ExactSum):
        return total.zeros()
    for leaf in jax.tree.leaves(total):
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                f"noise is real and would leave imaginary parts bare: expected real sums, got "
                f"{leaf.dtype}. Use real parameters, and as many again for imaginary parts."
            )
        if float32_or_wider(leaf) != leaf.dtype:
            raise TypeError(
                f"a sum of few digits swallows its noise, or part of it: expected float32 or "
                f"wider, got {leaf.dtype}. Clipped sums of mirrordp are; leave them so."
            )
    return jax.tree.map(jnp.zeros_like, total)


Stream = Callable[[jax.Array, float], optax.GradientTransformation]
"""A jax-privacy privatizer, made from a key and a standard deviation."""


def _init_streams(stream: Stream, key: jax.Array, like: ExactSum | PyTree) -> PyTree:
    """Returns the states of four independent streams; see `_add_streams`."""
    joined = _join(_like(like))
    return jax.vmap(lambda key: stream(key, 1.0).init(joined))(jax.random.split(key, 4))


def _add_streams(
    stream: Stream,
    total: ExactSum | PyTree,
    state: PyTree,
    stddev: float,
    weight: PyTree | None,
) -> tuple[PyTree, PyTree]:
    """Adds four independent streams of half the scale: a Gaussian whose tails are not cut.

    JAX draws float32 normals from 23 random bits, and so never beyond about 5.4 standard
    deviations. A value out there would prove that a record took part; at small noise multipliers
    that alone breaks the stated δ. The sum of four reaches 10.8, where nothing is left to prove.

    Small leaves are joined to one vector, and the streams are one loop. Every draw of another shape
    is a kernel of its own, which takes a CPU's compiler about a second: leaf by leaf, compiling the
    noise would take longer than compiling the rest of a step.
    """

    half = _validate.plain(stddev) / 2

    def add_one(noise: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return stream(state[0], half).update(noise, state)

    like = _like(total)
    noise, state = lax.scan(add_one, _join(like), state)
    return _added(jnp.add, total, _separate(noise, like), weight), state


# Leaves of more numbers keep a draw of their own, which spares copying them. They keep their shape
# too, so that their noise can be drawn wherever parts of them lie.
_LARGE_LEAF = 2**20
# Vectors of many numbers can be divided among devices evenly.
_MULTIPLE = 64


def _join(tree: PyTree) -> dict[str, jax.Array]:
    parts: dict[str, list[jax.Array]] = {}
    for name, leaf in _groups(tree):
        parts.setdefault(name, []).append(leaf)
    return {name: _joined(leaves) for name, leaves in parts.items()}


def _joined(leaves: list[jax.Array]) -> jax.Array:
    if leaves[0].size > _LARGE_LEAF:
        return leaves[0]
    vector = jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])
    return jnp.pad(vector, (0, -vector.size % _MULTIPLE if vector.size > _MULTIPLE else 0))


def _separate(joined: Any, like: PyTree) -> PyTree:
    """The inverse of `_join`."""
    ends = dict.fromkeys(joined, 0)
    leaves = []
    for name, leaf in _groups(like):
        if leaf.size > _LARGE_LEAF:
            leaves.append(joined[name])
            continue
        start, ends[name] = ends[name], ends[name] + leaf.size
        own = joined[name][start : ends[name]].reshape(leaf.shape)
        leaves.append(_on_every_device(own))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _on_every_device(leaf: jax.Array) -> jax.Array:
    """Lets every device of a mesh, if one is in use, draw all noise of a small leaf.

    Otherwise the compiler might divide the vector of many leaves as one of them is divided, and
    would have to send around what belongs to the others.
    """
    if set(jax.sharding.get_abstract_mesh().axis_types) != {jax.sharding.AxisType.Auto}:
        return leaf
    return lax.with_sharding_constraint(leaf, jax.sharding.PartitionSpec())


def _groups(tree: PyTree) -> Iterator[tuple[str, jax.Array]]:
    """Every leaf with the name of the vector that it becomes a part of."""
    for index, leaf in enumerate(map(jnp.asarray, jax.tree.leaves(tree))):
        yield (f"leaf {index}" if leaf.size > _LARGE_LEAF else leaf.dtype.name), leaf


def _noise_dtype() -> jnp.dtype:
    return jnp.promote_types(jnp.result_type(float), jnp.float32)
