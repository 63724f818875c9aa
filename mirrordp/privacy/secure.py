"""Random numbers that an adversary cannot predict, with exact distributions.

Bits come from AES-256 in counter mode (the `cryptography` library), under a key and a counter that
the operating system provides afresh for every call. There is no state between calls that could be
stolen, repeated, or shared by accident between threads and forked processes. The distributions
below are exact functions of uniform bits; see docs/secure-noise.md.
"""

import concurrent.futures
import decimal
import functools
import math
import os
from decimal import Decimal
from types import ModuleType

import numpy as np
from scipy import special

from mirrordp import _validate

# A bound on the error of the float64 inverse below, in standard deviations. 63 bits of a tail
# probability above 2⁻²⁴ determine the quantile up to 2⁻⁴², and the rest of the bound is more than
# 400 times the documented error of `ndtri`.
_QUANTILE_ERROR = 2.0**-39
_SMALLEST_TAIL = 2.0**-24
_CHUNK = 2**16


def require_cryptography() -> ModuleType:
    """Returns the module of ciphers, or raises an error that says what to install."""
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError as error:
        raise ImportError(
            "secure randomness needs the package 'cryptography', which is not installed; run: "
            "pip install 'mirrordp[secure]'."
        ) from error
    return ciphers


class SecureRandom:
    """The source of randomness of a secure run, in place of `numpy.random.Generator`.

    It has no seed and no state, and all instances are alike.
    """

    def __init__(self):
        require_cryptography()

    def words(self, count: int) -> np.ndarray:
        """Returns `count` independent uniform 64-bit integers."""
        ciphers = require_cryptography()
        cipher = ciphers.Cipher(
            ciphers.algorithms.AES(os.urandom(32)), ciphers.modes.CTR(os.urandom(16))
        )
        return np.frombuffer(cipher.encryptor().update(bytes(8 * count)), np.uint64)

    def bernoulli(self, probability: float, count: int) -> np.ndarray:
        """Returns `count` coins that are True with probability ⌊2⁶⁴·probability⌋ / 2⁶⁴.

        Rounding down never costs privacy, since a smaller sampling probability leaks less.
        """
        _validate.probability(probability=probability)
        if probability == 1:
            return np.ones(count, bool)
        # Scaling by a power of two is exact, so int() is the floor.
        return self.words(count) < np.uint64(int(math.ldexp(probability, 64)))

    def poisson_sample(self, probability: float, count: int) -> np.ndarray:
        """Returns which of `count` coins of `bernoulli` are True, without tossing each of them.

        With T = ⌊2⁶⁴·probability⌋ and the largest k for which 2ᵏ T ≤ 2⁶⁴, a coin of probability
        T / 2⁶⁴ is k fair coins and one of probability 2ᵏ T / 2⁶⁴ that are all True. How many of
        `count` places survive the k fair coins is a number of random bits that are one: of `count`
        bits, then of as many bits as were one, and so on. Given their number M, all sets of M
        places are equally likely, and each survivor then tosses its last coin. So every place is
        in the result with probability T / 2⁶⁴, independently of all others, and the cost is that
        of 2·count random *bits* and of a few words for each place that is found.
        """
        _validate.probability(probability=probability)
        threshold = int(math.ldexp(probability, 64))
        if threshold == 0:
            return np.zeros(0, np.int64)
        halvings = 64 - (threshold - 1).bit_length()
        survivors = count
        for _ in range(halvings):
            survivors = self._heads(survivors)
        places = self.subset(survivors, count)
        return places[self.bernoulli(math.ldexp(threshold, halvings - 64), survivors)]

    def _heads(self, count: int) -> int:
        """Returns how many of `count` fair coins are True."""
        total = 0
        for start in range(0, count, 64 * _CHUNK):
            bits = min(64 * _CHUNK, count - start)
            words = self.words(-(-bits // 64))
            total += int(np.bitwise_count(words).sum())
            # The last word has bits that belong to no coin.
            unused = 64 * len(words) - bits
            total -= (int(words[-1]) >> (64 - unused)).bit_count() if unused else 0
        return total

    def below(self, bound: int, count: int) -> np.ndarray:
        """Returns `count` independent uniform integers from 0 to `bound` − 1 < 2⁶³."""
        limit = np.uint64(2**64 // bound * bound - 1)
        found = np.zeros(0, np.uint64)
        while len(found) < count:
            # All words up to a multiple of the bound: every remainder is equally likely.
            words = self.words(count - len(found))
            found = np.concatenate([found, words[words <= limit] % np.uint64(bound)])
        return found.astype(np.int64)

    def subset(self, size: int, count: int) -> np.ndarray:
        """Returns a uniformly random subset of `size` of the integers below `count`.

        The subset comes in random order, so that any first part of it is a uniform subset too. A
        small one is drawn one by one, and what was drawn before is skipped.
        """
        if size == 0:
            return np.zeros(0, np.int64)
        if 4 * size < count:
            drawn = self.below(count, size + size // 2 + 8)
            while True:
                first = np.sort(np.unique(drawn, return_index=True)[1])
                if len(first) >= size:
                    return drawn[first[:size]]
                drawn = np.concatenate([drawn, self.below(count, size)])
        while True:
            words = self.words(count)
            if len(np.unique(words)) == count:
                return np.argsort(words)[:size]

    def rounded_gaussian(self, stddev: float, count: int) -> np.ndarray:
        """Returns `count` independent draws of round(stddev · Z), Z standard normal, as int32.

        P[K = k] = Φ((k + ½) / stddev) − Φ((k − ½) / stddev), exactly.
        """
        _validate.positive(stddev=stddev)
        if stddev > 2**25:
            raise ValueError(
                f"stddev must be at most 2**25, got {stddev!r}. Use a coarser lattice."
            )
        sizes = [min(_CHUNK, count - start) for start in range(0, count, _CHUNK)]
        if len(sizes) <= 1:
            return rounded_gaussian_of(self.words(count), stddev, self)
        draw = functools.partial(self._chunk, stddev)
        return np.concatenate(list(_pool(os.getpid()).map(draw, sizes)))

    def _chunk(self, stddev: float, count: int) -> np.ndarray:
        return rounded_gaussian_of(self.words(count), stddev, self)


@functools.cache
def _pool(pid: int) -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads of this process; NumPy, scipy and OpenSSL release the interpreter's lock."""
    del pid
    return concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def rounded_gaussian_of(words: np.ndarray, stddev: float, more: SecureRandom) -> np.ndarray:
    """Returns the draw K of round(stddev · Z) that each 64-bit word begins.

    The lowest bit is the sign, the others are the first 63 bits of U, uniform on [0, 1), and
    |K| = round(−stddev · Φ⁻¹(U / 2)). If they do not decide K, `more` provides further bits.
    """
    bits = words >> np.uint64(1)
    tail = (bits.astype(np.float64) + 0.5) * 2.0**-64
    magnitude = -stddev * special.ndtri(tail)
    nearest = np.rint(magnitude)
    from_boundary = 0.5 - np.abs(magnitude - nearest)
    unsure = (from_boundary <= stddev * _QUANTILE_ERROR) | (tail < _SMALLEST_TAIL)
    result = nearest.astype(np.int32)
    for place in np.flatnonzero(unsure):
        result[place] = _exact_magnitude(int(bits[place]), stddev, more)
    return np.where(words & np.uint64(1), -result, result)


def _exact_magnitude(bits: int, stddev: float, more: SecureRandom) -> int:
    """Returns |K| for the U that begins with these 63 bits.

    With n bits known, U / 2 lies in [bits, bits + 1) / 2^(n + 1), and |K| = k where
    Φ(−(k + ½) / stddev) ≤ U / 2 < Φ(−(k − ½) / stddev).
    """
    length = 63
    guess = _magnitude_near(bits, length, stddev)
    while True:
        # The digits are far more precise than the bits, so that only the bits are in doubt.
        digits = 40 + length // 3
        with decimal.localcontext() as context:
            context.prec = digits
            doubt = Decimal(10) ** (10 - digits)
            scale = Decimal(2) ** (length + 1)
            low, high = Decimal(bits) / scale, Decimal(bits + 1) / scale
            outer = normal_tail(guess + 0.5, stddev)
            inner = normal_tail(guess - 0.5, stddev) if guess > 0 else Decimal(1)
            if low >= outer + doubt and high <= inner - doubt:
                return guess
            if high <= outer - doubt:
                guess += 1
                continue
            if low >= inner + doubt:
                guess -= 1
                continue
        bits, length = (bits << 64) | int(more.words(1)[0]), length + 64
        guess = _magnitude_near(bits, length, stddev)


def _magnitude_near(bits: int, length: int, stddev: float) -> int:
    log_tail = math.log(bits + 0.5) - (length + 1) * math.log(2)
    return round(-stddev * float(special.ndtri_exp(log_tail)))


def normal_tail(x: float, stddev: float) -> Decimal:
    """Returns Φ(−x / stddev) for x ≥ 0, to nine digits less than the context's precision.

    Φ(−z) = ½ − φ(z) (z + z³/3 + z⁵/(3·5) + ...): all terms are positive, so each of the n terms
    adds at most n + 2 units in the last place of a sum below ½.
    """
    z = Decimal(x) / Decimal(stddev)
    square = z * z
    term = total = z
    smallest = Decimal(10) ** -(decimal.getcontext().prec + 5)
    odd = 1
    # Once each term is at most half of the one before, the rest is no more than the last of them.
    while term > smallest * total or odd < 2 * square:
        odd += 2
        term = term * square / odd
        total += term
    density = (-square / 2).exp() / (2 * _pi()).sqrt()
    return Decimal("0.5") - density * total


def _pi() -> Decimal:
    """Returns π to the context's precision, by Machin's formula."""
    return _machin(decimal.getcontext().prec)


@functools.cache
def _machin(digits: int) -> Decimal:
    one = 10 ** (digits + 10)

    def arccot(n: int) -> int:
        power = total = one // n
        k, sign = 1, 1
        while power:
            power //= n * n
            k, sign = k + 2, -sign
            total += sign * (power // k)
        return total

    return Decimal(4 * (4 * arccot(5) - arccot(239))).scaleb(-(digits + 10))
