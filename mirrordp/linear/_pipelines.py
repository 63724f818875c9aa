"""Noticing rows that were transformed by rules that come from private rows.

A `Pipeline` fits its steps to the private rows and transforms X, but not X_public. Whatever a step
has learned (means, scales, categories, components) is then released without noise, as part of the
pipeline and through its predictions, and the estimator compares rows in two different units. There
are two ways to notice. Who called `fit` is certain: a Pipeline, or another meta-estimator of
scikit-learn that transforms what it passes on, is on the stack, and its steps say whether they
learn. Without a Pipeline, the rows themselves tell of a `StandardScaler`: columns whose mean is
zero and whose deviation is one to six digits were standardised by their own moments.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import FeatureUnion, Pipeline

from mirrordp.data import UNPROTECTED
from mirrordp.data.sources import row_blocks

_SAFE_WAY = (
    "Fit it on public rows and freeze it: step.fit(X_public), then make_pipeline("
    "sklearn.frozen.FrozenEstimator(step), model), and pass step.transform(X_public) as X_public. "
    "Scaling needs no step: the estimators scale by public rows themselves. For data frames, "
    "mirrordp.tables.PublicEncoder is such a step"
)
_EXACT = 1e-6
_FEWEST_ROWS = 10


def refuse_private_steps(estimator: BaseEstimator) -> None:
    """Raises a ValueError if a Pipeline that is being fitted has steps that learn from its rows."""
    for caller in _callers(estimator):
        if isinstance(caller, TransformedTargetRegressor):
            steps = [("transformer", caller.transformer)]
        else:
            steps = caller.steps[:-1]
        for name, step in steps:
            if _learns(step):
                raise ValueError(
                    f"{type(estimator).__name__} must be given rows that were transformed by "
                    f"rules from public rows, got a {type(caller).__name__} that has fitted its "
                    f"step {name!r} to the private rows, without noise, and left X_public as it "
                    f"was. {_SAFE_WAY}."
                )


def _callers(estimator: BaseEstimator) -> Iterator[Any]:
    """Yields the meta-estimators on the stack that transform the rows of this estimator."""
    # The estimator, and those that are fitting it: a search or one model per class, for example.
    inner: list[Any] = [estimator]
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if "fit" in frame.f_code.co_name else None
        is_last = isinstance(caller, Pipeline) and any(caller.steps[-1][1] is one for one in inner)
        if is_last or isinstance(caller, TransformedTargetRegressor):
            yield caller
        if isinstance(caller, BaseEstimator):
            inner.append(caller)
        frame = frame.f_back


def _learns(step: Any) -> bool:
    """Returns whether fitting a step makes it depend on the rows that it is fitted to."""
    if step is None or isinstance(step, str | FrozenEstimator):
        return False
    if isinstance(step, Pipeline):
        return any(_learns(part) for _, part in step.steps)
    if isinstance(step, FeatureUnion):
        return any(_learns(part) for _, part in step.transformer_list)
    if isinstance(step, ColumnTransformer):
        parts = [step.remainder, *(part for _, part, _ in step.transformers)]
        return any(map(_learns, parts))
    tags = getattr(step, "__sklearn_tags__", None)
    return tags is None or tags().requires_fit


def refuse_private_moments(rows: np.ndarray) -> None:
    """Raises a ValueError if all columns were standardised by their own mean and deviation.

    No other table looks like this: with n rows the moments of a sample differ by about 1/√n from
    those of any other. Columns of one or two values are left out of account, because a balanced ±1
    has these moments too.
    """
    if len(rows) < _FEWEST_ROWS:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        means = _column_means(lambda block: block, rows)
        if not (np.abs(means) < _EXACT).any():
            return
        deviations = np.sqrt(_column_means(lambda block: (block - means) ** 2, rows))
        low, high = rows[0].copy(), rows[0].copy()
        for block in row_blocks(rows):
            low = np.minimum(low, rows[block].min(axis=0))
            high = np.maximum(high, rows[block].max(axis=0))
        between = _column_means(lambda block: (block != low) & (block != high), rows)
    varied = between > 0
    exact = (np.abs(means) < _EXACT) & (np.abs(deviations - 1) < _EXACT)
    if varied.any() and exact[varied].all():
        raise ValueError(
            "X must not be scaled by what private rows say, got columns whose means are zero and "
            "whose deviations are one to six digits, as a StandardScaler leaves the rows that it "
            "was fitted to. Its means and scales would be released without noise. Pass the rows as "
            f"they are, or scale them by public rows: scaler.fit(X_public). {UNPROTECTED}"
        )


def _column_means(function: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Returns the mean of a function of the rows in each column."""
    total = np.zeros(rows.shape[1])
    for block in row_blocks(rows):
        total += function(rows[block]).sum(axis=0)
    return total / len(rows)
