"""Estimators that are not linear: trees (cells of columns), a network, and a choice among them.

All need public rows, which decide everything but the values that are learned under privacy:

- trees: a linear model that starts from the public rows, and values of cells of one or two columns,
  both learned from private rows by `mirrordp.linear.boosting`;
- network: a network that starts from the public rows, trained by `mirrordp.train`;
- auto: the one of linear, trees and network that a rehearsal on public rows prefers, which is free.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import scipy.special
from scipy.sparse import issparse

from mirrordp import _validate
from mirrordp.linear import _network, boosting
from mirrordp.linear._noting import tell
from mirrordp.linear._planning import plan_warm
from mirrordp.linear.descent import Rows
from mirrordp.linear.estimators import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
    _PrivateLinearModel,
    _Problem,
)
from mirrordp.linear.tuning import DescentSettings
from mirrordp.mirror.families import POISSON, SQUARED_ERROR, Family
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.spending.budget import Budget
from mirrordp.tables import cells
from mirrordp.tables.cells import TreesScorer
from mirrordp.tables.network import NetworkScorer
from mirrordp.tables.scorers import LinearScorer, Scorer

_MODELS = ("linear", "trees", "network")
_PUBLIC_SEED = 0
_FOLDS = 4
# So many standard errors behind another model, a network has no chance in later folds.
_HOPELESS = 4
_LARGEST_BATCH, _EPOCH_BATCHES = 4096, 32
_NUM_STEPS = 1000
# With fewer public rows, bins and a rehearsal say too little.
_FEWEST_PUBLIC = 500


class _Nonlinear(_PrivateLinearModel):
    """What trees and networks share: settings that do not apply to them, and a stored scorer."""

    scorer_: Scorer
    public_scorer_: Scorer
    groups: Sequence[Sequence[int]] | None

    # Settings of linear models.
    fit_intercept: Any = True
    method: Any = "auto"
    num_steps: Any = "auto"
    l2_clip_norm: Any = "auto"
    learning_rate: Any = "auto"
    row_norm_bound: Any = None
    target_range: Any = None
    guard: Any = False

    def __init__(
        self, epsilon=1.0, delta=None, *, allow_large_delta=False, groups=None,
        adjacency="zero-out", unit="example", secure=False, random_state=None,
    ):  # fmt: skip
        _set(
            self, epsilon=epsilon, delta=delta, allow_large_delta=allow_large_delta, groups=groups,
            adjacency=adjacency, unit=unit, secure=secure, random_state=random_state,
        )  # fmt: skip

    def _groups(self, width: int) -> Sequence[Sequence[int]] | None:
        """Returns the features that are indicators of one column's categories."""
        if self.encoding_ is not None:
            return self.encoding_.groups
        if self.groups is None:
            return None
        flat = [int(feature) for group in self.groups for feature in group]
        if sorted(set(flat)) != sorted(flat) or (flat and not 0 <= min(flat) <= max(flat) < width):
            raise ValueError(
                f"groups must hold different features from 0 to {width - 1}, got {self.groups!r}."
            )
        return self.groups

    def _public(self, problem: _Problem, x: np.ndarray | None, private: Any) -> Rows:
        if x is None:
            raise ValueError(
                f"{type(self).__name__} needs public rows, got none. Pass X_public and y_public, "
                "or use a linear model."
            )
        if issparse(private):
            raise ValueError(
                f"{type(self).__name__} takes dense rows, got a sparse matrix. Use a linear model."
            )
        return _public_rows(problem, x)

    def _rows(self, plan: Any, X: Any, problem: _Problem) -> Rows:
        del plan
        return Rows(X, problem.targets, problem.counts, problem.weights)

    def _scores(self, X: Any) -> np.ndarray:
        return self.scorer_(self._features(X))


class _Classifier(_Nonlinear):
    """The parameters of a classifier."""

    class_weight: Any = None

    def __init__(
        self, epsilon=1.0, delta=None, *, allow_large_delta=False, classes=None, groups=None,
        adjacency="zero-out", unit="example", secure=False, random_state=None,
    ):  # fmt: skip
        _set(
            self, epsilon=epsilon, delta=delta, allow_large_delta=allow_large_delta,
            classes=classes, groups=groups, adjacency=adjacency, unit=unit, secure=secure,
            random_state=random_state,
        )  # fmt: skip


def _public_rows(problem: _Problem, x: np.ndarray) -> Rows:
    targets = problem.public_targets
    assert targets is not None
    if problem.prior is not None:
        targets = (len(x) * targets + problem.prior) / (len(x) + 1)
    return Rows(x, targets, weights=problem.public_weights)


# Trees


class _TreesPlan(NamedTuple):
    model: TreesScorer
    linear: boosting.LinearPart
    release: boosting.Release
    settings: DescentSettings
    theta: np.ndarray

    @classmethod
    def of(
        cls,
        family: Family,
        rows: Rows,
        groups: Sequence[Sequence[int]] | None,
        *,
        num_private: int,
        one_step_noise: float,
    ) -> "_TreesPlan":
        """Chooses the terms by public rows, and their number and size by the noise."""
        most = boosting.most_terms(num_private, one_step_noise)
        most = min(most, cells.num_terms(rows.features, groups))
        steps = boosting.linear_steps(most)
        # Each step has the same noise, so the linear part has this share of the budget.
        share = steps / (steps + most)
        plan = plan_warm(
            family,
            rows.features,
            rows.targets,
            follows_hessian=True,
            intercept=True,
            row_norm_bound=None,
            num_private=num_private,
            one_step_noise=one_step_noise / np.sqrt(share),
            given={"step_counts": (steps,)},
            weights=rows.weights,
        )
        linear = plan.scaling.original(plan.theta)
        residuals = -family.residuals(rows.features @ linear[0].T + linear[1], rows.targets)

        def terms(largest: float) -> TreesScorer:
            return cells.without_values(
                *linear, rows.features, residuals, groups=groups, largest=largest, most=most
            )

        # More terms leave fewer cells to each, which may leave out pairs and so fewer terms.
        num_terms = len(terms(np.inf).terms) or 1
        model = terms(boosting.largest_term(num_private, one_step_noise, steps + num_terms))
        release = boosting.Release.of(family, model.start(rows.features), rows.targets)
        steps = plan.settings.num_steps + len(model.terms)
        return cls(
            model,
            boosting.LinearPart.of(plan, release.l2_clip_norm),
            release,
            DescentSettings(release.l2_clip_norm, steps, 1.0),
            np.zeros(boosting.release_size(model)),
        )


class _Trees(_Nonlinear):
    def _rule(self) -> str:
        linear = _PrivateLinearModel._rule(self)
        return f"public rows chose the cells and their clip norm; for the linear part, {linear}"

    def _plan(
        self, problem: _Problem, x: np.ndarray | None, private: Any, delta: float
    ) -> _TreesPlan:
        rows = self._public(problem, x, private)
        return _TreesPlan.of(
            problem.family,
            rows,
            self._groups(private.shape[1]),
            num_private=len(private),
            one_step_noise=self._one_step(len(private), delta).noise_multiplier,
        )

    def _method(self, width: int, sparse: bool) -> str:
        return "private boosting of cells chosen by public rows"

    def _from_public_rows(self, plan: Any) -> tuple[np.ndarray, ...]:
        text = json.dumps([plan.model.to_dict(), *plan.release, plan.linear.learning_rate])
        scaling = plan.linear.scaling
        arrays = (scaling.shift, scaling.factor, scaling.basis, plan.linear.theta)
        return (np.frombuffer(text.encode(), np.uint8), *arrays)

    def _learn(
        self, plan: Any, family: Family, rows: Any, mechanism: Mechanism, key: Any
    ) -> TreesScorer:
        return boosting.private_values(
            plan.model, plan.linear, family, rows.features, rows, plan.release, mechanism, key
        )

    def _keep(self, problem, plan, found, x_public, mechanism) -> None:
        self.scorer_ = _unscaled(plan.model if found is None else found, problem)
        self.public_scorer_ = _unscaled(plan.model, problem)


def _unscaled(model: TreesScorer, problem: _Problem) -> TreesScorer:
    """Returns the model for targets as they were."""
    scale = np.broadcast_to(problem.scale, model.intercepts.shape)
    return dataclasses.replace(
        model,
        coefficients=model.coefficients * scale[:, None],
        intercepts=model.intercepts * scale + problem.shift,
        values=tuple(values * scale for values in model.values),
    )


# Networks


class _NetworkPlan(NamedTuple):
    start: _network.Start
    settings: DescentSettings
    theta: Any


class _Networks(_Nonlinear):
    steps: int

    def __init__(
        self, epsilon=1.0, delta=None, *, allow_large_delta=False, steps=_NUM_STEPS, groups=None,
        adjacency="zero-out", unit="example", secure=False, random_state=None,
    ):  # fmt: skip
        _set(
            self, epsilon=epsilon, delta=delta, allow_large_delta=allow_large_delta, steps=steps,
            groups=groups, adjacency=adjacency, unit=unit, secure=secure, random_state=random_state,
        )  # fmt: skip

    def _check_parameters(self) -> None:
        _PrivateLinearModel._check_parameters(self)
        _validate.positive_integer(steps=self.steps)
        if self.adjacency != "zero-out":
            raise ValueError(
                f"a network samples its batches, got adjacency={self.adjacency!r}. Use 'zero-out', "
                "or trees."
            )

    def _rule(self) -> str:
        return "the clip norm follows from public gradients; steps and learning rate are constants"

    def _plan(
        self, problem: _Problem, x: np.ndarray | None, private: Any, delta: float
    ) -> _NetworkPlan:
        rows = self._public(problem, x, private)
        start = _network.Start.of(problem.family, rows)
        settings = DescentSettings(
            start.clip_norm, self.steps, _network.learning_rate(problem.family)
        )
        return _NetworkPlan(start, settings, start.params)

    def _mechanism(self, num_private, delta, settings, noise) -> Mechanism:
        batch_size = int(np.clip(num_private // _EPOCH_BATCHES, 1, _LARGEST_BATCH))
        return Mechanism.calibrate(
            epsilon=self.epsilon,
            delta=delta,
            sampling=PoissonSampling.for_batch_size(batch_size, num_examples=num_private),
            num_steps=settings.num_steps,
            l2_clip_norm=settings.l2_clip_norm,
            adjacency=Adjacency(self.adjacency),
            noise=noise,
            unit=self.unit,
        )

    def _method(self, width: int, sparse: bool) -> str:
        return "PDA-DPMD of a network from a public start"

    def _count(self, mechanism: Mechanism, delta: float, shape: tuple[int, int]):
        # Related fits add up as one Gaussian step each with the same ε: close, and for the
        # operator's eyes only.
        one_step = self._one_step(shape[0], delta)
        return _PrivateLinearModel._count(self, one_step, delta, shape)

    def _run(self, plan, family, rows, mechanism, seed, spend, checkpoint, public) -> NetworkScorer:
        # The network sees scaled features, of frames encoded ones.
        made = spend.with_made_rows() if isinstance(spend, Budget) else contextlib.nullcontext()
        with made:
            return _network.train_privately(
                plan.start,
                rows,
                mechanism,
                learning_rate=plan.settings.learning_rate,
                seed=seed,
                spend=spend,
                checkpoint=checkpoint,
            )

    def _keep(self, problem, plan, found, x_public, mechanism) -> None:
        public = plan.start.network
        self.public_scorer_ = _rescaled(public, problem)
        self.scorer_ = _rescaled(public if found is None else found, problem)


def _rescaled(network: NetworkScorer, problem: _Problem) -> NetworkScorer:
    """Returns the network for targets as they were."""
    scale = np.broadcast_to(problem.scale, network.skip.shape[1:])
    *hidden, (weights, bias) = network.layers
    return dataclasses.replace(
        network,
        layers=(*hidden, (weights * scale, bias * scale + problem.shift)),
        skip=network.skip * scale,
    )


_PARAMETERS = """

    Args:
        epsilon: ε, the budget of the fit; `privacy_.epsilon` states what was spent, never more.
        delta: δ; see `PrivateLinearRegression`.
        allow_large_delta: whether to accept a δ above 1/n.
{own}        groups: lists of features that are indicators of one column's categories, which then
            count as one column. Data frames need no groups.
        adjacency: "zero-out", or "replace" with twice the noise (not for networks).
        unit: what each row is, "example" or "user"; see `PrivateLinearRegression`.
        secure: whether the noise comes from a cryptographic generator.
        random_state: None for a fit to release; an integer makes it reproducible.

    Attributes:
        scorer_: what was fitted, a function from features to scores.
        public_scorer_: the model of the public rows alone, from which the private part started.
        n_iter_: the number of times that private rows were read.
        privacy_: the `RunReport`, which states the guarantee.
    """
_CLASSES = """        classes: all labels, needed if public rows lack some.
"""


def _documented(own: str = ""):
    def decorate(cls):
        cls.__doc__ = cls.__doc__.rstrip() + _PARAMETERS.format(own=own)
        return cls

    return decorate


def _set(estimator: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(estimator, name, value)


@_documented()
class PrivateTreesRegressor(_Trees, PrivateLinearRegression):
    """Least squares by private values of cells of columns and pairs of columns."""


@_documented()
class PrivateTreesPoissonRegressor(_Trees, PrivatePoissonRegressor):
    """Poisson regression by private values of cells of columns and pairs of columns."""


@_documented(_CLASSES)
class PrivateTreesClassifier(_Classifier, _Trees, PrivateLogisticRegression):
    """Classification by private values of cells of columns and pairs of columns."""


_STEPS = """        steps: the number of private steps.
"""


@_documented(_STEPS)
class PrivateNetworkRegressor(_Networks, PrivateLinearRegression):
    """Least squares by a small network from a public start."""


@_documented(_STEPS)
class PrivateNetworkPoissonRegressor(_Networks, PrivatePoissonRegressor):
    """Poisson regression by a small network from a public start."""


@_documented(_STEPS + _CLASSES)
class PrivateNetworkClassifier(_Networks, PrivateLogisticRegression):
    """Classification by a small network from a public start."""

    class_weight: Any = None

    def __init__(
        self, epsilon=1.0, delta=None, *, allow_large_delta=False, steps=_NUM_STEPS, classes=None,
        groups=None, adjacency="zero-out", unit="example", secure=False, random_state=None,
    ):  # fmt: skip
        _set(
            self, epsilon=epsilon, delta=delta, allow_large_delta=allow_large_delta, steps=steps,
            classes=classes, groups=groups, adjacency=adjacency, unit=unit, secure=secure,
            random_state=random_state,
        )  # fmt: skip


# The choice


class Rehearsal(NamedTuple):
    """How models did on public rows that they had not seen.

    Attributes:
        losses: the mean loss of each model, less that of exact predictions: the log loss, half the
            Poisson deviance, or half the squared error of targets in units of their standard
            deviation, summed over targets.
        chosen: the model that was chosen.
        reason: why it was chosen.
        measure: the name of a measure, as in results on test rows: "loss" (the log loss),
            "deviance" or "rmse".
        values: that measure of each model.
    """

    losses: Mapping[str, float]
    chosen: str
    reason: str
    measure: str = "loss"
    values: Mapping[str, float] = MappingProxyType({})


def _measured(problem: _Problem, rehearsal: Rehearsal) -> Rehearsal:
    """Adds a measure that people know."""
    factor, power, measure = 1.0, 1.0, "loss"
    if problem.family == POISSON:
        factor, measure = 2.0, "deviance"
    elif problem.family == SQUARED_ERROR:
        scale = np.ravel(problem.scale)
        factor, power, measure = 2.0 * scale[0] ** 2, 0.5, "rmse"
        if len(scale) > 1:
            factor, measure = 2.0 / len(scale), "rmse in standard deviations of each target"
    values = {
        # Of NaN, the other order would make zero.
        name: float(max(factor * loss, 0.0) ** power)
        for name, loss in rehearsal.losses.items()
    }
    return rehearsal._replace(measure=measure, values=values)


_NOW = "it is better than the others by more than one standard error"
_LATER = (
    "it is expected to be better than the others by more than one standard error when it has as "
    "many rows as are private"
)
_CONTAINED = (
    "they contain the linear model and are not worse than it by more than one standard error"
)


def _least_loss(family: Family, targets: np.ndarray) -> np.ndarray:
    """Returns the loss of each row if its target is predicted exactly."""
    if family == SQUARED_ERROR:
        return -0.5 * (targets**2).sum(axis=1)
    if family == POISSON:
        return (targets - scipy.special.xlogy(targets, targets)).sum(axis=1)
    return np.zeros(len(targets))


def rehearse(
    family: Family,
    rows: Rows,
    groups: Sequence[Sequence[int]] | None,
    *,
    num_private: int,
    one_step_noise: float,
) -> Rehearsal:
    """Compares the models on public rows alone, which costs nothing.

    Public rows play private ones: in each fold, trees learn their values from the other folds with
    noise that is as large for these rows as it will be for the private ones, and a network is
    trained as its public start will be. For squared errors, all is done with half of these rows
    too, because there are many more private rows and a model that gains much by the second half
    will gain by them. If what a model can still learn falls with the root of the number of rows,
    then r times as many rows lower its loss by D times what the second half did,

        D = Σ_k 2^{−k/2} = (1 − r^{−1/2}) / (√2 − 1),      k = 1, ..., log₂ r.

    Trees are chosen unless they are worse than the linear model by more than a standard error,
    because they contain it; a network if it is better than the others, or is then expected to be,
    by more than one. A network of classes or counts that has few rows is too sure of itself, and
    more rows cure that first, which says little about what comes then. It has to be better as it
    is. A network takes longest: one that is far worse than another model after a fold is not tried
    in the next ones.

    Args:
        family: the family of the loss.
        rows: public rows.
        groups: features that are indicators of one column's categories.
        num_private: n.
        one_step_noise: σ₁, the noise multiplier of a single step with the whole budget.
    """
    rng = np.random.default_rng(_PUBLIC_SEED)
    fold = rng.permutation(np.arange(len(rows)) % _FOLDS)
    extrapolates = family == SQUARED_ERROR
    seen: dict[str, list[np.ndarray]] = {name: [] for name in _MODELS}
    expected: dict[str, list[np.ndarray]] = {name: [] for name in _MODELS}
    least: list[np.ndarray] = []
    views = (seen, expected) if extrapolates else (seen,)
    more = (1 - (len(rows) / max(num_private, len(rows))) ** 0.5) / (2**0.5 - 1)

    def is_worse(losses: Mapping[str, list[np.ndarray]], one: str, other: str, by: float) -> bool:
        """Returns whether a model is worse by so many standard errors of the difference."""
        pairs = zip(losses[one], losses[other], strict=False)
        difference = np.concatenate([ours - theirs for ours, theirs in pairs])
        return bool(difference.mean() > by * difference.std() / np.sqrt(len(difference)))

    others = ("linear", "trees")
    tried = _MODELS
    for number in range(_FOLDS):
        tell(f"rehearsal {number + 1} of {_FOLDS} on public rows")
        known, judges = np.flatnonzero(fold != number), rows.take(fold == number)
        found = []
        for some in (known[: len(known) // 2], known) if extrapolates else (known,):
            scorers = _rehearsed(
                family, rows.take(some), groups, num_private, one_step_noise, rng, tried
            )
            found.append(
                {
                    name: judges.weighted(family.loss(scorer(judges.features), judges.targets))
                    for name, scorer in scorers.items()
                }
            )
        least.append(judges.weighted(_least_loss(family, judges.targets)))
        for name in tried:
            half, whole = found[0][name], found[-1][name]
            seen[name].append(whole)
            expected[name].append(whole - more * (half - whole))
        if all(
            any(is_worse(losses, "network", other, by=_HOPELESS) for other in others)
            for losses in views
        ):
            tried = others

    means = {
        # A network that was given up has seen fewer folds.
        name: float(np.concatenate(losses).mean() - np.concatenate(least[: len(losses)]).mean())
        for name, losses in seen.items()
    }
    ahead = [
        "network" in tried and all(is_worse(losses, other, "network", by=1) for other in others)
        for losses in views
    ]
    if any(ahead):
        return Rehearsal(means, "network", _NOW if ahead[0] else _LATER)
    if is_worse(seen, "trees", "linear", by=1):
        chosen, reason = "linear", "trees are worse by more than one standard error"
    elif means["trees"] < means["linear"]:
        chosen, reason = "trees", "they are better than the linear model"
    else:
        chosen, reason = "trees", _CONTAINED
    if means["network"] < means[chosen]:
        reason += ", and the network is not ahead of both by more than one standard error"
    return Rehearsal(means, chosen, reason)


def _rehearsed(
    family: Family,
    rows: Rows,
    groups: Sequence[Sequence[int]] | None,
    num_private: int,
    one_step_noise: float,
    rng: np.random.Generator,
    tried: Sequence[str],
) -> dict[str, Scorer]:
    """Returns each model, learned from public rows; a network only if it is still to be tried."""
    plan = _TreesPlan.of(
        family, rows, groups, num_private=num_private, one_step_noise=one_step_noise
    )
    scale = plan.release.l2_clip_norm * one_step_noise * np.sqrt(plan.settings.num_steps)
    stddev = scale * len(rows) / num_private
    trees = boosting.learn_values(
        plan.model,
        family,
        rows.features,
        rows,
        plan.release,
        noise_stddev=stddev,
        add_noise=lambda total: total + rng.normal(size=total.shape) * stddev,
    )
    linear = LinearScorer(plan.model.coefficients, plan.model.intercepts)
    found: dict[str, Scorer] = {"linear": linear, "trees": trees}
    if "network" in tried:
        found["network"] = _network.Start.of(family, rows).network
    return found


class _Auto(_Nonlinear):
    """A model that a rehearsal on public rows has chosen."""

    rehearsal_: Rehearsal | None
    steps = _NUM_STEPS
    _kind: type[_PrivateLinearModel] = _PrivateLinearModel

    def _plan(self, problem: _Problem, x: np.ndarray | None, private: Any, delta: float) -> Any:
        self.rehearsal_, chosen = None, "linear"
        if x is not None and len(x) >= _FEWEST_PUBLIC and not issparse(private):
            found = rehearse(
                problem.family,
                _public_rows(problem, x),
                self._groups(x.shape[1]),
                num_private=len(private),
                one_step_noise=self._one_step(len(private), delta).noise_multiplier,
            )
            self.rehearsal_ = _measured(problem, found)
            chosen = self.rehearsal_.chosen
            if chosen == "network" and self.adjacency != "zero-out":
                chosen = "trees"
                reason = f"a network needs zero-out adjacency, got {self.adjacency}"
                self.rehearsal_ = self.rehearsal_._replace(chosen=chosen, reason=reason)
        self._kind = {"linear": _PrivateLinearModel, "trees": _Trees, "network": _Networks}[chosen]
        self.model_ = chosen
        return self._kind._plan(self, problem, x, private, delta)

    def _mechanism(self, num_private, delta, settings, noise) -> Mechanism:
        return self._kind._mechanism(self, num_private, delta, settings, noise)

    def _method(self, width: int, sparse: bool) -> str:
        return self._kind._method(self, width, sparse)

    def _rule(self) -> str:
        rule = self._kind._rule(self)
        if self.rehearsal_ is None:
            return rule
        return f"a rehearsal on public rows chose the kind of model, {self.model_}; {rule}"

    def _count(self, mechanism, delta, shape):
        return self._kind._count(self, mechanism, delta, shape)

    def _from_public_rows(self, plan: Any) -> Any:
        return self._kind._from_public_rows(self, plan)

    def _rows(self, plan: Any, X: Any, problem: _Problem) -> Any:
        return self._kind._rows(self, plan, X, problem)

    def _learn(self, plan, family, rows, mechanism, key) -> Any:
        return self._kind._learn(self, plan, family, rows, mechanism, key)

    def _run(self, plan, family, rows, mechanism, seed, spend, checkpoint, public) -> Any:
        return self._kind._run(self, plan, family, rows, mechanism, seed, spend, checkpoint, public)

    def _keep(self, problem, plan, found, x_public, mechanism) -> None:
        self._kind._keep(self, problem, plan, found, x_public, mechanism)
        if self.model_ == "linear":
            self.scorer_ = scorer_of(self.coef_, self.intercept_)
            if x_public is not None:
                self.public_scorer_ = scorer_of(self.public_coef_, self.public_intercept_)


def scorer_of(coefficients: np.ndarray, intercepts: Any) -> LinearScorer:
    """Returns a linear model as a scorer."""
    return LinearScorer(np.atleast_2d(coefficients), np.atleast_1d(intercepts))


@_documented()
class PrivateAutoRegressor(_Auto, PrivateLinearRegression):
    """Least squares by the model that public rows prefer: linear, trees or a network.

    `rehearsal_` keeps how the models did on public rows, and `model_` names the chosen one. With
    fewer than 500 public rows it is the linear one.
    """


@_documented()
class PrivateAutoPoissonRegressor(_Auto, PrivatePoissonRegressor):
    """Poisson regression by the model that public rows prefer: linear, trees or a network.

    `rehearsal_` keeps how the models did on public rows, and `model_` names the chosen one.
    """


@_documented(_CLASSES)
class PrivateAutoClassifier(_Classifier, _Auto, PrivateLogisticRegression):
    """Classification by the model that public rows prefer: linear, trees or a network.

    `rehearsal_` keeps how the models did on public rows, and `model_` names the chosen one.
    """
