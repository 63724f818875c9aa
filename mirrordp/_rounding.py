"""Numbers as text, rounded in the safe direction.

A guarantee must not read stronger than it is, so ε, δ and shares of a budget are rounded up. What
was proved, or how much noise there was, is rounded down. The slack of 1e-9 units in the last digit
keeps 0.1 + 0.2 at 0.3.
"""

import math


def upwards(value: float, digits: int = 4) -> str:
    """Returns a positive number with `digits` significant digits, rounded up.

    >>> upwards(1.23412)
    '1.235'
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "infinite"
    unit = 10.0 ** max(math.floor(math.log10(value)) - digits + 1, -323)
    return f"{math.ceil(value / unit - 1e-9) * unit:.{digits}g}"


def percent_upwards(share: float) -> str:
    """Returns a share as a percentage with one decimal, rounded up.

    >>> percent_upwards(0.1 + 0.2)
    '30%'
    """
    if not math.isfinite(share):
        return "far more than 100%"
    return f"{math.ceil(1000 * share - 1e-9) / 10:.12g}%"


def floored(value: float, decimals: int) -> float:
    """Returns a number rounded down to `decimals` decimals.

    >>> floored(1.2349, 3)
    1.234
    """
    return math.floor(10**decimals * value) / 10**decimals


def downwards(bound: float) -> str:
    """Returns a lower bound rounded down to three decimals, or to one digit from a million on.

    >>> downwards(1.2349), downwards(4.5e6)
    ('1.234', '4e+06')
    """
    if bound < 1e6:
        return f"{floored(bound, 3):.3f}"
    if not math.isfinite(bound):
        return "infinite"
    unit = 10.0 ** math.floor(math.log10(bound))
    return f"{math.floor(bound / unit) * unit:.0e}"
