"""Noticing what scikit-learn's meta-estimators do with private rows, besides fitting a model.

A `Pipeline` fits its steps to the private rows and transforms X, but not X_public. Whatever a step
has learned (means, scales, categories, components) is then released without noise, as part of the
pipeline and through its predictions, and the estimator compares rows in two different units. There
are two ways to notice. Who called `fit` is certain: a Pipeline, or another meta-estimator of
scikit-learn that transforms what it passes on, is on the stack, and its steps say whether they
learn. Where other threads or processes fit the model of a Pipeline, it is on the stack of some
thread while the model is copied, sent away or fitted. Without a Pipeline, the rows themselves tell
of a `StandardScaler`: columns whose mean is zero and whose deviation is one to six digits were
standardised by their own moments.

Other meta-estimators learn beside the model that they fit, from private rows and without noise, or
give it labels that private rows have numbered, or rows of their choice; `_LEARNING` names them.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
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
_NUMBERS_LABELS = (
    "numbers the labels by those that occur in the private rows, so that one row may change all"
)
_CHOOSES_ROWS = "draws and weights rows by how models err on private rows"
_LEARNS = "learns from the private rows itself, without noise"
_LEARNING = {
    **dict.fromkeys(
        ("VotingClassifier", "BaggingClassifier", "OneVsRestClassifier", "OneVsOneClassifier",
         "OutputCodeClassifier"),
        _NUMBERS_LABELS,
    ),
    "BaggingRegressor": "draws rows, some of them several times, or by the weights of others",
    **dict.fromkeys(("AdaBoostClassifier", "AdaBoostRegressor", "RANSACRegressor"), _CHOOSES_ROWS),
    **dict.fromkeys(
        ("StackingClassifier", "StackingRegressor", "CalibratedClassifierCV",
         "TunedThresholdClassifierCV", "SelfTrainingClassifier", "RFE", "RFECV", "SelectFromModel",
         "SequentialFeatureSelector", "IterativeImputer"),
        _LEARNS,
    ),
}  # fmt: skip
"""What meta-estimators of scikit-learn do that no noise covers, by name."""

_EXACT = 1e-6
_FEWEST_ROWS = 10
_MOST_PARTS = 1000  # a longer list holds something else


def refuse_private_steps(estimator: BaseEstimator, name: str | None = None) -> None:
    """Raises a ValueError if a meta-estimator that is being fitted learns from its rows.

    A Pipeline does if its steps do.

    Args:
        estimator: the model that is fitted to what the Pipeline transformed, or may be.
        name: what the model shares with its copies, if it has any.
    """
    for frame in sys._current_frames().values():
        if (what := _called_by(frame, estimator, name)) is not None:
            raise ValueError(
                f"{type(estimator).__name__} must be given the private rows and targets as they "
                f"are, got {what}. Fit the model by itself."
            )
    for caller in itertools.chain(_callers(estimator), _fitted_elsewhere(estimator, name)):
        if (reason := _learning(caller)) is not None:
            raise ValueError(
                f"{type(estimator).__name__} must be given the private rows and targets as they "
                f"are, got {type(caller).__name__}, which {reason}. Fit the model by itself."
            )
        if isinstance(caller, TransformedTargetRegressor):
            steps = [("transformer", caller.transformer)]
        else:
            steps = caller.steps[:-1]
        for step_name, step in steps:
            if _learns(step):
                raise ValueError(
                    f"{type(estimator).__name__} must be given rows that were transformed by "
                    f"rules from public rows, got a {type(caller).__name__} that has fitted its "
                    f"step {step_name!r} to the private rows, without noise, and left X_public as "
                    f"it was. {_SAFE_WAY}."
                )


def _callers(estimator: BaseEstimator) -> Iterator[Any]:
    """Yields the meta-estimators on this thread's stack that transform rows of the estimator."""
    # The estimator, and those that are fitting it: a search or one model per class, for example.
    inner: list[Any] = [estimator]
    for caller in _fitting(sys._getframe(1)):
        is_last = isinstance(caller, Pipeline) and any(caller.steps[-1][1] is one for one in inner)
        if is_last or isinstance(caller, TransformedTargetRegressor) or _learning(caller):
            yield caller
        inner.append(caller)


def _fitted_elsewhere(estimator: BaseEstimator, name: str | None) -> Iterator[Any]:
    """Yields those on the stacks of all threads whose model has the estimator or a copy of it."""
    for frame in sys._current_frames().values():
        for caller in _fitting(frame):
            if isinstance(caller, Pipeline) and caller.steps:
                model = caller.steps[-1][1]
            elif isinstance(caller, TransformedTargetRegressor):
                model = caller.regressor
            elif _learning(caller):
                model = list(vars(caller).values())
            else:
                continue
            if any(_is_copy(part, estimator, name) for part in _with_parts(model)):
                yield caller


def _called_by(frame: FrameType | None, estimator: BaseEstimator, name: str | None) -> str | None:
    """Returns which function of scikit-learn changes the estimator's rows, on a stack, and how."""
    while frame is not None:
        function, own = frame.f_code.co_name, frame.f_locals
        if frame.f_globals.get("__name__") == "sklearn.model_selection._validation" and any(
            _is_copy(part, estimator, name) for part in _with_parts(own.get("estimator"))
        ):
            if function == "cross_val_predict" and own.get("encode"):
                return (
                    f"cross_val_predict with another method than predict, which {_NUMBERS_LABELS}"
                )
            if function == "permutation_test_score":
                return "permutation_test_score, which puts the target of one row into another"
        frame = frame.f_back
    return None


def _learning(caller: BaseEstimator) -> str | None:
    """Returns what a meta-estimator does that no noise covers, if it does."""
    for kind in type(caller).__mro__:
        if kind.__module__.startswith("sklearn.") and kind.__name__ in _LEARNING:
            return _LEARNING[kind.__name__]
    return None


def _fitting(frame: FrameType | None) -> Iterator[BaseEstimator]:
    """Yields the estimators of which a method is on a stack, the innermost first."""
    while frame is not None:
        caller = frame.f_locals.get("self") if "fit" in frame.f_code.co_name else None
        if isinstance(caller, BaseEstimator):
            yield caller
        frame = frame.f_back


def _with_parts(model: Any, depth: int = 6) -> Iterator[Any]:
    """Yields a model and the models in it, parameters or not, except those that are frozen."""
    if depth == 0 or isinstance(model, type | FrozenEstimator):
        return
    if isinstance(model, BaseEstimator):
        yield model
        parts = vars(model).values()
    elif isinstance(model, list | tuple | dict) and len(model) <= _MOST_PARTS:
        parts = model.values() if isinstance(model, dict) else model
    else:
        return
    for part in list(parts):
        yield from _with_parts(part, depth - 1)


def _is_copy(part: Any, estimator: BaseEstimator, name: str | None) -> bool:
    lineage = getattr(part, "_lineage", None)
    return part is estimator or (name is not None and getattr(lineage, "name", None) == name)


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
