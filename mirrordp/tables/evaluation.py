"""How well models do on test rows: predictions and truth in, measures with intervals out.

The measures are scikit-learn's. Their standard errors come from a jackknife that leaves out one of
25 random groups of rows at a time, which holds for all of them alike; an interval is the value and
Student's t of 24 degrees of freedom times the standard error to either side, within the bounds of
the measure. It covers the choice of test rows, not that of training rows or noise. Of many test
rows, a sample of 10,000 tells the standard error, which is then scaled to all of them.

    target     measures
    class      loss (log loss), accuracy, auc, average_precision, calibration_error
    number     rmse, mae, r2, median_error, error_90 (the 90% quantile of |error|)
    count      deviance (Poisson), and those of a number

Several targets have these measures each, such as "rmse of price".

With more than two classes, auc and average_precision are means over the classes, each against the
rest, and the calibration error is that of the predicted class.

Predictions do not need scikit-learn, which is therefore imported where it is used.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mirrordp.tables.columns import CategoryColumn, ClassTarget, Target
from mirrordp.tables.encoding import TableEncoding

MODEL, PUBLIC, GUESS = "this model", "public rows alone", "guess without features"
INTERVAL = "95%, by a jackknife over test rows"
_GROUPS = 25
_MAX_ROWS = 10_000
_BINS = 10
_LARGEST_FIGURE = 20

Measure = Callable[[np.ndarray, np.ndarray], float]


class Measured(NamedTuple):
    """One measure of one model.

    Attributes:
        value: on all test rows.
        standard_error: by the jackknife; None where the measure is not defined on a part.
        low: the lower end of the 95% interval, or None.
        high: the upper end.
    """

    value: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None


def measure(target: Target, truth: np.ndarray, predicted: np.ndarray) -> dict[str, Measured]:
    """Returns all measures that are defined on these rows.

    Args:
        target: the target.
        truth: numbers, or indices of classes.
        predicted: numbers, or for classes the probabilities, shape (rows, classes).
    """
    import scipy.stats

    sample = np.random.default_rng(0).permutation(len(truth))[:_MAX_ROWS]
    used = min(_GROUPS, len(sample))
    parts = [np.delete(sample, np.s_[group::used]) for group in range(used)] if used > 2 else []
    found = {}
    for name, (function, low, high) in _measures(target).items():
        value = _value(function, truth, predicted)
        if not math.isfinite(value):
            continue
        values = np.array([_value(function, truth[part], predicted[part]) for part in parts])
        found[name] = Measured(value)
        if len(values) and np.isfinite(values).all():
            error = math.sqrt((used - 1) * np.var(values) * len(sample) / len(truth))
            reach = float(scipy.stats.t.ppf(0.975, used - 1)) * error
            found[name] = Measured(value, error, max(low, value - reach), min(high, value + reach))
    return found


def measure_all(
    targets: Sequence[Target], truth: np.ndarray, predicted: np.ndarray
) -> dict[str, Measured]:
    """Returns the measures of one target, or of several with the name of the target each.

    Args:
        targets: the targets.
        truth: as `measure` takes it; of several targets, numbers of shape (rows, targets).
        predicted: likewise.
    """
    if len(targets) == 1:
        return measure(targets[0], truth, predicted)
    return {
        f"{name} of {target.name}": measured
        for target, y, p in zip(targets, truth.T, predicted.T, strict=True)
        for name, measured in measure(target, y, p).items()
    }


def _value(function: Measure, truth: np.ndarray, predicted: np.ndarray) -> float:
    """Returns a measure, NaN where it is not defined."""
    try:
        with warnings.catch_warnings():
            # What is not defined is left out, without a warning.
            warnings.simplefilter("ignore")
            return float(function(truth, predicted))
    except ValueError:
        return math.nan


def _measures(target: Target) -> dict[str, tuple[Measure, float, float]]:
    """Returns the measures of a target with their smallest and largest possible values."""
    from sklearn import metrics

    if isinstance(target, ClassTarget):
        labels = list(range(len(target.classes)))
        return {
            "loss": (lambda y, p: metrics.log_loss(y, p, labels=labels), 0.0, math.inf),
            "accuracy": (lambda y, p: metrics.accuracy_score(y, p.argmax(axis=1)), 0.0, 1.0),
            "auc": (_over_classes(metrics.roc_auc_score), 0.0, 1.0),
            "average_precision": (_over_classes(metrics.average_precision_score), 0.0, 1.0),
            "calibration_error": (_calibration_error, 0.0, 1.0),
        }
    found: dict[str, tuple[Measure, float, float]] = {
        "rmse": (metrics.root_mean_squared_error, 0.0, math.inf),
        "mae": (metrics.mean_absolute_error, 0.0, math.inf),
        "r2": (metrics.r2_score, -math.inf, 1.0),
        "median_error": (metrics.median_absolute_error, 0.0, math.inf),
        "error_90": (lambda y, p: np.quantile(np.abs(y - p), 0.9), 0.0, math.inf),
    }
    if target.is_count:

        def deviance(y: np.ndarray, p: np.ndarray) -> float:
            # An expected count that underflows is still above zero.
            return metrics.mean_poisson_deviance(y, np.maximum(p, 1e-300))

        found["deviance"] = (deviance, 0.0, math.inf)
    return found


def _over_classes(function: Callable[..., float]) -> Measure:
    """Returns a measure of the second of two classes, or the mean over more than two."""

    def value(truth: np.ndarray, shares: np.ndarray) -> float:
        classes = [1] if shares.shape[1] == 2 else range(shares.shape[1])
        present = [k for k in classes if 0 < np.count_nonzero(truth == k) < len(truth)]
        values = [function(truth == k, shares[:, k]) for k in present]
        return float(np.mean(values)) if values else math.nan

    return value


def _calibration_error(truth: np.ndarray, shares: np.ndarray) -> float:
    """Returns Σ_b n_b/n |share of hits − mean probability| over bins with as many rows each."""
    predicted, hits = _events(truth, shares)
    return sum(
        len(part) / len(truth) * abs(hits[part].mean() - predicted[part].mean())
        for part in _equal_parts(predicted, _BINS)
    )


def _events(truth: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns probabilities, and what came true: the second class, or the predicted one of many."""
    if shares.shape[1] == 2:
        return shares[:, 1], truth == 1
    return shares.max(axis=1), truth == shares.argmax(axis=1)


def _equal_parts(values: np.ndarray, count: int) -> list[np.ndarray]:
    """Returns the indices of rows in the order of their values, in parts of about equal size.

    Rows of one value stay together, so that a constant is a single part.
    """
    order = np.argsort(values, kind="stable")
    edges = np.unique(np.quantile(values, np.arange(1, count) / count))
    cuts = np.unique(np.searchsorted(values[order], edges, side="right"))
    return [part for part in np.split(order, cuts) if len(part)]


def calibration_curve(truth: np.ndarray, shares: np.ndarray) -> list[dict[str, float]]:
    """Returns the points of a calibration curve, with 95% Wilson intervals of the hits."""
    import scipy.stats

    predicted, hits = _events(truth, shares)
    points = []
    for part in _equal_parts(predicted, _BINS):
        test = scipy.stats.binomtest(int(hits[part].sum()), len(part))
        interval = test.proportion_ci(method="wilson")
        points.append(
            {
                "predicted": float(predicted[part].mean()),
                "observed": float(hits[part].mean()),
                "low": float(interval.low),
                "high": float(interval.high),
                "rows": len(part),
            }
        )
    return points


def residual_curve(truth: np.ndarray, predicted: np.ndarray) -> list[dict[str, float]]:
    """Returns what was observed where a number was predicted: mean, 10% and 90% quantiles."""
    points = []
    for part in _equal_parts(predicted, 2 * _BINS):
        low, high = np.quantile(truth[part], [0.1, 0.9])
        points.append(
            {
                "predicted": float(predicted[part].mean()),
                "observed": float(truth[part].mean()),
                "low": float(low),
                "high": float(high),
                "rows": len(part),
            }
        )
    return points


def guess(target: Target, y_public: np.ndarray, rows: int) -> np.ndarray:
    """Returns the predictions that use no feature: public means, or public shares of classes."""
    if isinstance(target, ClassTarget):
        shares = np.bincount(y_public.astype(int), minlength=len(target.classes)) / len(y_public)
        return np.tile(shares, (rows, 1))
    return np.tile(y_public.mean(axis=0), (rows, *[1] * (y_public.ndim - 1)))


def evaluate(
    targets: Sequence[Target], truth: np.ndarray, predicted: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Returns the results of several models on test rows, as plain types for a report.

    Args:
        targets: the targets.
        truth: the targets of the test rows, which need no protection.
        predicted: the predictions by name of the model, as `measure_all` takes them: `MODEL`, and
            usually `PUBLIC` and `GUESS`.

    Returns:
        The entries `test_...` of the model and `public_...`, `baseline_...` of the other two, by
        which `mirrordp compare` finds them, and `test` with everything that a report shows.
    """
    found = {name: measure_all(targets, truth, values) for name, values in predicted.items()}
    results: dict[str, Any] = {"test_rows": len(truth)}
    for name, prefix in ((MODEL, "test"), (PUBLIC, "public"), (GUESS, "baseline")):
        for quantity, measured in found.get(name, {}).items():
            results[f"{prefix}_{quantity}"] = measured.value
            if measured.standard_error is not None:
                results[f"{prefix}_{quantity}_standard_error"] = measured.standard_error
    pairs = [(truth, predicted[MODEL])]
    if len(targets) > 1:
        pairs = list(zip(truth.T, predicted[MODEL].T, strict=True))
    results["test"] = {
        "rows": len(truth),
        "interval": INTERVAL,
        "models": {
            name: {quantity: measured._asdict() for quantity, measured in values.items()}
            for name, values in found.items()
        },
        "curves": [_curve(target, *pair) for target, pair in zip(targets, pairs, strict=True)],
    }
    return results


def _curve(target: Target, truth: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    is_class = isinstance(target, ClassTarget)
    curve = calibration_curve if is_class else residual_curve
    return {
        "kind": "calibration" if is_class else "residuals",
        "event": _event(target),
        "points": curve(truth, predicted),
    }


def _event(target: Target) -> str:
    if not isinstance(target, ClassTarget):
        return target.name
    return f"{target.name} = {target.classes[1]}" if len(target.classes) == 2 else "predicted class"


def largest_effects(
    encoding: TableEncoding,
    outputs: tuple[str, ...],
    coefficients: np.ndarray,
    noise_root: np.ndarray | None,
    *,
    classes_share_constant: bool = True,
) -> list[dict[str, Any]]:
    """Returns the coefficients of largest size, with the standard deviations by noise.

    Several targets have units of their own, so that each has its own largest coefficients, which
    name the target.

    A constant that is added to all categories of a column, or to all classes, changes no prediction
    (an intercept makes up for it), and noise makes it large. A coefficient of a category is
    therefore shown relative to the mean of its column, and one of several classes relative to the
    mean of all classes.

    Args:
        encoding: the encoding.
        outputs: the names of the outputs.
        coefficients: an array of shape (outputs, features).
        noise_root: a square root of their covariance, shape (outputs, features, k), or None.
        classes_share_constant: whether a constant on all outputs changes no prediction, as with
            softmax.
    """
    if classes_share_constant and len(coefficients) > 1:
        coefficients = coefficients - coefficients.mean(axis=0)
        noise_root = None if noise_root is None else noise_root - noise_root.mean(axis=0)
    values = _centered(encoding, coefficients)
    stddev = None
    if noise_root is not None:
        stddev = np.linalg.norm(_centered(encoding, noise_root), axis=2)
    several = bool(encoding.further_targets)
    found = []
    for part in np.arange(len(outputs)).reshape(len(outputs) if several else 1, -1):
        order = np.argsort(-np.abs(values[part]), axis=None, kind="stable")[:_LARGEST_FIGURE]
        for k, feature in zip(*np.unravel_index(order, values[part].shape), strict=True):
            output = part[k]
            found.append(
                {
                    "feature": encoding.features[feature],
                    "output": outputs[output],
                    "value": float(values[output, feature]),
                    "noise_stddev": None if stddev is None else float(stddev[output, feature]),
                }
                | ({"target": outputs[output]} if several else {})
            )
    return found


def _centered(encoding: TableEncoding, array: np.ndarray) -> np.ndarray:
    """Subtracts means over the categories of each column."""
    found = array.copy()
    start = 0
    for column in encoding.columns:
        part = found[:, start : start + len(column.features)]
        if isinstance(column, CategoryColumn):
            part -= part.mean(axis=1, keepdims=True)
        start += len(column.features)
    return found


def fit_without_protection(
    task: str, target: Target, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fits the same kind of linear model by scikit-learn, without any protection.

    Its coefficients and scores must stay with the operator: they are not covered by any guarantee.

    Returns:
        Coefficients of shape (outputs, features) and intercepts of shape (outputs,).
    """
    if task == "ordinal" and isinstance(target, ClassTarget):
        two = ClassTarget(target.name, ("no", "yes"), False)
        parts = [
            fit_without_protection("classification", two, x, (y > k).astype(int))
            for k in range(len(target.classes) - 1)
        ]
        return np.concatenate([c for c, _ in parts]), np.concatenate([b for _, b in parts])
    from sklearn import linear_model
    from sklearn.exceptions import ConvergenceWarning

    # A weak ridge makes the solution unique where features depend on each other.
    ridge = 1e-6
    if isinstance(target, ClassTarget):
        model: Any = linear_model.LogisticRegression(C=1 / (ridge * len(x)), max_iter=500)
    elif target.is_count:
        model = linear_model.PoissonRegressor(alpha=ridge, max_iter=500)
    else:
        model = linear_model.Ridge(alpha=ridge * len(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y)
    return np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)


def boost_without_protection(
    targets: Sequence[Target], x: np.ndarray, y: np.ndarray, test_x: np.ndarray
) -> np.ndarray:
    """Predicts for test rows by scikit-learn's gradient boosting, without any protection.

    What follows from its predictions must stay with the operator.

    Args:
        targets: the targets.
        x: features to learn from.
        y: their targets, which have every class.
        test_x: features to predict for.

    Returns:
        Predictions as `measure_all` takes them.
    """
    from sklearn import ensemble

    if isinstance(targets[0], ClassTarget):
        classifier = ensemble.HistGradientBoostingClassifier(random_state=0)
        return classifier.fit(x, y).predict_proba(test_x)
    loss = "poisson" if targets[0].is_count else "squared_error"
    found = [
        ensemble.HistGradientBoostingRegressor(loss=loss, random_state=0)
        .fit(x, one)
        .predict(test_x)
        for one in y.reshape(len(y), -1).T
    ]
    return found[0] if len(found) == 1 else np.column_stack(found)
