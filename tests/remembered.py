"""Functions that remember, for tests that fit many models: the same question, the same answer.

What is remembered follows from the arguments alone, so that a test sees what it would see without.
"""

import functools

from mirrordp.linear import estimators
from mirrordp.linear.estimators import plan_warm as honest_plan
from mirrordp.report import statement

_versions = functools.cache(statement.library_versions)
_plans = {}


def _plain(options):
    """Options in one order, and arrays in full."""
    return [
        (name, value.tobytes() if hasattr(value, "tobytes") else value)
        for name, value in sorted(options.items())
    ]


def _plan(family, x, targets, **options):
    """A plan follows from public rows and the budget; nobody may write into one."""
    arrays = [(part.shape, part.dtype.str, part.tobytes()) for part in (x, targets)]
    question = repr((family.name, *arrays, _plain(options)))
    if question not in _plans:
        _plans[question] = plan = honest_plan(family, x, targets, **options)
        for part in (plan.theta, plan.scaling.shift, plan.scaling.factor, plan.scaling.basis):
            part.flags.writeable = False
    return _plans[question]


def versions(monkeypatch):
    """The versions of libraries are looked up once."""
    monkeypatch.setattr(statement, "library_versions", lambda: dict(_versions()))


def plans(monkeypatch):
    """The public part of a fit is computed once for the same public rows and settings."""
    monkeypatch.setattr(estimators, "plan_warm", _plan)
