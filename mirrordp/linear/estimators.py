"""scikit-learn estimators: `fit(X, y, X_public=..., y_public=...)` under differential privacy.

In: private rows, and optionally public rows of the same kind. Out: `coef_`, `intercept_` and
`privacy_`, the report of the guarantee. With public rows this is Algorithm 1 of the paper with full
batches on the quadratic mirror map of the public loss: features are scaled by public moments, the
descent starts at the public optimum, and clipping, noise and steps follow the public Hessian.
Without them it is DP-SGD from zero.

Clip norm, step count and learning rate come from public rows and the budget (see `tuning`), so that
setting ε alone gives a good model. If the budget is too small for a private gradient to be of use,
the estimator returns the public model and spends nothing. Nothing is learned from private rows
without noise except their number, which counts as public, and the set of their labels if neither
`classes` nor public rows state it; `privacy_` then says so.
"""

import abc
import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from mirrordp import _validate
from mirrordp._rounding import upwards
from mirrordp._warn import warn
from mirrordp.data import UNPROTECTED, UnprotectedWarning
from mirrordp.data.sources import computed_rows, row_blocks
from mirrordp.linear import _inputs, _pipelines, descent, uncertainty
from mirrordp.linear._planning import FitPlan, Plan, plan_cold, plan_warm
from mirrordp.linear.descent import Rows, SparseRows
from mirrordp.linear.tuning import DescentSettings
from mirrordp.mirror import families
from mirrordp.mirror.families import Family
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise, Noise, SecureGaussianNoise
from mirrordp.privacy.sampling import FullBatch
from mirrordp.privacy.secure import require_cryptography
from mirrordp.report import RunReport
from mirrordp.spending import fingerprint as _fingerprint
from mirrordp.spending._fits import Fits, Lineage, Together
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.tables.encoding import FeatureEncoding
from mirrordp.tables.frames import is_frame, names_of
from mirrordp.tables.learning import LARGEST_COUNT, too_extreme
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.bookkeeping import Books, check_spend
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.training.engine import randomness

METHODS = ("auto", "exact", "dpsgd")
# In the coordinates of the Hessian rows are dense, and made so anew in every step.
_WIDEST_SPARSE = 200
# Settings that a caller may have chosen by looking at private rows.
_SETTINGS = (
    *("num_steps", "l2_clip_norm", "learning_rate", "row_norm_bound", "target_range"),
    *("method", "fit_intercept", "class_weight"),
)
# Squares of moves and noise must be finite; a fit that fails later has been charged.
_LARGEST_RATE = 1e100
_TUNING_ON_BUDGET = (
    "charged, if it was made from results of runs on the same budget alone; a choice by scores on "
    "private records is not covered"
)
_FITS = Fits()


@dataclasses.dataclass(frozen=True, eq=False)
class _Problem:
    """Targets in the form that the loss needs; each depends on its row and public values only.

    Attributes:
        family: the family of the loss.
        targets: the private targets, shape (n, m).
        public_targets: the public targets, if there are any.
        prior: the targets of one further public row that the public model is fitted to, if any.
        counts: a mask of the private rows that take part. None stands for all rows.
        weights: the weights of private rows. None stands for ones.
        public_weights: the weights of public rows. None stands for ones.
        shift: what was subtracted from the targets, one number per output.
        scale: what they were then divided by.
        shown: what the encoding reveals about private rows without protection.
    """

    family: Family
    targets: np.ndarray
    public_targets: np.ndarray | None
    prior: np.ndarray | float | None = None
    counts: np.ndarray | None = None
    weights: np.ndarray | None = None
    public_weights: np.ndarray | None = None
    shift: np.ndarray | float = 0.0
    scale: np.ndarray | float = 1.0
    shown: tuple[str, ...] = ()

    def without(self, left_out: np.ndarray) -> "_Problem":
        """Returns the problem in which the private rows of a mask do not take part."""
        counts = computed_rows(
            lambda counts, out: ~out if counts is None else counts & ~out, self.counts, left_out
        )
        return dataclasses.replace(self, counts=counts)

    def weighted(self, weights: _inputs.Weights) -> "_Problem":
        """Returns the problem in which rows have these weights besides those that they had."""
        return dataclasses.replace(
            self,
            weights=_product(self.weights, weights.private),
            public_weights=_product(self.public_weights, weights.public),
        )


def _parts(matrix: Any) -> Any:
    """Returns the arrays of a sparse matrix; what else there is stays as it is."""
    return (matrix.data, matrix.indices, matrix.indptr) if issparse(matrix) else matrix


def _product(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    if one is None or other is None:
        return other if one is None else one
    with np.errstate(over="ignore"):
        return one * other


class _PrivateLinearModel(BaseEstimator, abc.ABC):
    """The base of the estimators: one fit, from checked rows to coefficients and a report."""

    coef_: np.ndarray
    intercept_: Any
    n_features_in_: int
    # For models that were stored before there were encodings.
    encoding_: FeatureEncoding | None = None

    _takes_several_outputs = False

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        *,
        allow_large_delta: bool = False,
        fit_intercept: bool = True,
        method: str = "auto",
        num_steps: int | str = "auto",
        l2_clip_norm: float | str = "auto",
        learning_rate: float | str = "auto",
        row_norm_bound: float | None = None,
        guard: bool = False,
        adjacency: str = "zero-out",
        unit: str = "example",
        secure: bool = False,
        random_state: Any = None,
    ):
        self.epsilon = epsilon
        self.delta = delta
        self.allow_large_delta = allow_large_delta
        self.fit_intercept = fit_intercept
        self.method = method
        self.num_steps = num_steps
        self.l2_clip_norm = l2_clip_norm
        self.learning_rate = learning_rate
        self.row_norm_bound = row_norm_bound
        self.guard = guard
        self.adjacency = adjacency
        self.unit = unit
        self.secure = secure
        self.random_state = random_state

    @abc.abstractmethod
    def _encode(self, y: np.ndarray, y_public: np.ndarray | None) -> _Problem:
        """Returns the targets for the loss."""

    @abc.abstractmethod
    def _decode(
        self, problem: _Problem, coefficients: np.ndarray, intercepts: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        """Returns `coef_` and `intercept_`, from arrays of shapes (m, d) and (m,)."""

    def fit(
        self,
        X,
        y,
        X_public=None,
        y_public=None,
        *,
        sample_weight=None,
        sample_weight_public=None,
        counts=None,
        spend=None,
        checkpoint=None,
    ):
        """Fits the model to private rows under (ε, δ)-differential privacy.

        As in `mirrordp.train`, a private row that equals a public row, target included, is not used
        twice: it stays in n and contributes zero, and a warning tells the operator. If public rows
        equal each other, values repeat by chance (a few categories, for example) and equality does
        not suggest a copy: then nothing is left out. The guarantee is the same either way. Public
        rows that are mostly private rows are refused.

        Args:
            X: private features, shape (n, d), or a data frame (pandas, polars and others), or a
                sparse matrix, of which only blocks are made dense, or a memory map of float64,
                which stays on disk. Each row is one unit of protection (see `unit`).
            y: n private targets, which may also be a memory map. What is computed from memory maps
                is kept in unnamed temporary files (in TMPDIR).
            X_public: public features, shape (n_pub, d), or a data frame with the columns of X;
                everything about them may be learned. If the frame holds more than numbers
                (categories, dates, missing values), both frames are encoded by rules that are
                learned from it, as `mirrordp fit` does, and `encoding_` keeps them for `predict`.
                The steps of a `Pipeline` do not transform X_public. Fit those steps on public
                rows, freeze them, and give the estimator both tables transformed.
            y_public: public targets.
            sample_weight: n weights of at least 0, about 1 on average. A weight multiplies the loss
                of its row before the gradient is clipped, and the sum is divided by n, not by the
                sum of weights. A row of any weight therefore changes the sum by at most the clip
                norm. A weight is as protected as the rest of its row, if it follows from that row
                and public values alone.
            sample_weight_public: weights of public rows. Both kinds of weights are divided by their
                mean. By default public rows have weight 1.
            counts: a mask of the private rows that take part, decided row by row. The others (such
                as rows without a target) stay in n and contribute exactly zero. By default all
                rows take part.
            spend: a `mirrordp.Budget`, opened with the data, or a `mirrordp.Ledger` that the fit is
                charged to before the descent begins. A budget refuses a fit that it has no room
                for. With a ledger, `privacy_` covers everything that was charged to it.
            checkpoint: a `mirrordp.Checkpoint` that keeps the randomness. A fit that was
                interrupted and is resumed is then the same fit and is charged once. It cannot be
                combined with `secure=True`.

        Returns:
            The fitted estimator.
        """
        self._check_parameters()
        self._refuse_private_steps()
        if (X_public is None) != (y_public is None):
            raise ValueError(
                "X_public and y_public go together, got one of them. Pass both or neither."
            )
        if self.guard and (X_public is None or issparse(X)):
            raise ValueError(
                "guard=True compares with the model of public rows, and takes dense rows. Pass "
                "X_public and y_public as arrays or frames, or leave guard out."
            )
        frames = _inputs.encoded_frames(X, X_public)
        self.encoding_ = None if frames is None else frames.encoding
        self.unprotected_cells_ = {} if frames is None else frames.unprotected_cells
        columns = X_public
        if frames is not None:
            X, X_public = frames.X, frames.X_public
        elif X_public is not None and is_frame(X_public):
            names = names_of(X_public)
            if is_frame(X):
                _inputs.mention_unused(X, names)
            X = _inputs.of_columns(names, X, "X_public")
        X, y = _inputs.validated(self, X, y, public=False)
        delta = self._delta(X.shape[0])
        if counts is not None:
            counts = _inputs.as_mask(counts, X.shape[0])
        if X_public is not None:
            X_public, y_public = _inputs.validated(self, X_public, y_public, public=True)
            targets = y if isinstance(self, RegressorMixin) else None
            _inputs.mention_other_units(X, targets, X_public, y_public, counts)
        if frames is not None:
            # The columns of the frame, rather than the features that they became.
            validate_data(self, columns, skip_check_array=True)  # pyright: ignore[reportArgumentType]
        weights = _inputs.Weights.of(sample_weight, sample_weight_public, X, X_public)
        problem = self._encode(y, y_public).weighted(weights)
        if counts is not None:
            problem = problem.without(computed_rows(np.logical_not, counts))
        if X_public is not None:
            assert problem.public_targets is not None
            if frames is not None:
                frames.offer_categories(problem.public_targets)
            problem = problem.without(
                _inputs.copies(X, problem.targets, X_public, problem.public_targets)
            )
            # After public rows that are private rows, which have the same moments, were refused.
            if frames is None and not issparse(X):
                _pipelines.refuse_private_moments(X)
        plan = self._plan(problem, X_public, X, delta)
        noise = SecureGaussianNoise.of(plan.theta) if self.secure else GaussianNoise()
        mechanism = self._mechanism(X.shape[0], delta, plan.settings, noise)
        check_spend(mechanism, spend, checkpoint)
        seed = _inputs.as_seed(self.random_state)
        found, together = None, None
        if plan.settings.num_steps > 0:
            if not isinstance(spend, Budget):
                together = self._count(mechanism, delta, X.shape)
            rows = self._rows(plan, X, problem)
            public = (X_public, problem.public_targets, problem.public_weights)
            found = self._run(
                plan, problem.family, rows, mechanism, seed, spend, checkpoint, public
            )
        self._keep(problem, plan, found, X_public, mechanism)
        self.n_iter_ = mechanism.num_steps if plan.settings.num_steps else 0
        num_public = 0 if X_public is None else len(X_public)
        method = "cold DP-SGD"
        if num_public:
            method = self._method(X.shape[1], issparse(X))
        self.privacy_ = RunReport.of(
            mechanism,
            delta,
            charged_steps=self.n_iter_,
            spend=spend,
            title=f"{type(self).__name__} on {self.n_features_in_} features",
            tuning=_TUNING_ON_BUDGET
            if isinstance(spend, Budget)
            else self._tuning(num_public > 0, together, delta),
            shown_without_protection=problem.shown,
            seed=seed,
            seeded=seed is not None,
            results={
                "method": method,
                "num_public": num_public,
                "num_steps": self.n_iter_,
                "learning_rate": plan.settings.learning_rate,
                **(
                    {"kept": "public model" if found is plan.theta else "private model"}
                    if self.guard and plan.settings.num_steps
                    else {}
                ),
            },
        )
        return self

    def _method(self, width: int, sparse: bool) -> str:
        """Returns the name of the method for the report of a fit with public rows."""
        return "exact mirror descent" if self._follows_hessian(width, sparse) else "warm DP-SGD"

    def _rows(self, plan: Any, X: Any, problem: _Problem) -> Rows | SparseRows:
        """Returns the private rows in the form that the private part of the fit needs."""
        others = (problem.targets, problem.counts, problem.weights)
        if not issparse(X):
            return Rows(plan.scaling(X), *others)
        if (features := plan.scaling.sparsely(X)) is not None:
            return Rows(features, *others)
        return SparseRows(X, plan.scaling, *others)

    def _learn(self, plan: Any, family: Family, rows: Any, mechanism: Mechanism, key: Any) -> Any:
        """Computes the private part of the fit, once it is charged."""
        return descent.private_descent(
            family,
            plan.theta,
            rows,
            mechanism,
            learning_rate=plan.settings.learning_rate,
            key=key,
            guard=plan.guard if self.guard else None,
        )

    def _keep(
        self,
        problem: _Problem,
        plan: Any,
        found: Any,
        x_public: np.ndarray | None,
        mechanism: Mechanism,
    ) -> None:
        """Sets what was fitted; `found` is what `_learn` returned, None if nothing was learned."""
        theta = plan.theta if found is None else found
        self.coef_, self.intercept_ = self._decode(problem, *plan.scaling.original(theta))
        if x_public is not None:
            self._keep_public_parts(problem, x_public, plan, theta, mechanism)

    def _keep_public_parts(
        self, problem: _Problem, x: np.ndarray, plan: Plan, theta: np.ndarray, mechanism: Mechanism
    ) -> None:
        """Keeps the public model, and how far noise alone moves the released coefficients."""
        start = self._decode(problem, *plan.scaling.original(plan.theta))
        self.public_coef_, self.public_intercept_ = start
        self.noise_root_ = self.noise_stddev_ = None
        if theta is plan.theta:
            self.noise_root_ = np.zeros((theta.shape[1], x.shape[1], 1))
        elif theta.size <= uncertainty.MAX_PARAMETERS:
            assert problem.public_targets is not None
            root = uncertainty.noise_root(
                problem.family,
                theta,
                Rows(plan.scaling(x), problem.public_targets, weights=problem.public_weights),
                l2_clip_norm=mechanism.l2_clip_norm,
                noise=mechanism.noise_stddev / mechanism.sampling.expected_batch_size,
                num_steps=plan.settings.num_steps,
                learning_rate=plan.settings.learning_rate,
            )
            columns, _ = plan.scaling.original(root.reshape(len(theta), -1))
            scale = np.reshape(problem.scale, (-1, 1, 1))
            columns = columns.reshape(*root.shape[1:], -1) * scale
            self.noise_root_ = np.moveaxis(columns, 1, 2)
        if self.noise_root_ is not None:
            self.noise_stddev_ = np.linalg.norm(self.noise_root_, axis=2)

    def _check_parameters(self) -> None:
        _validate.positive(epsilon=self.epsilon)
        if self.delta is not None:
            _validate.open_unit_interval(delta=self.delta)
        _validate.instance_of(bool, allow_large_delta=self.allow_large_delta)
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {self.method!r}.")
        for name, value in self._given().items():
            check = _validate.positive_integer if name == "num_steps" else _validate.positive
            check(**{name: value})
            if name == "learning_rate" and value > _LARGEST_RATE:
                raise ValueError(f"learning_rate must be at most {_LARGEST_RATE:g}, got {value:g}.")
        if self.row_norm_bound is not None:
            _validate.positive(row_norm_bound=self.row_norm_bound)
        if self.adjacency not in ("zero-out", "replace"):
            raise ValueError(
                f"adjacency must be 'zero-out' or 'replace', got {self.adjacency!r}. The noisy sum "
                "is divided by the number of rows, which therefore counts as public."
            )
        _validate.instance_of(bool, secure=self.secure, guard=self.guard)
        if self.secure:
            require_cryptography()
            if self.random_state is not None:
                raise ValueError(
                    "a secure fit draws its noise from the operating system and cannot be "
                    f"repeated, got random_state={self.random_state!r}. Leave random_state out, or "
                    "use secure=False."
                )

    def _given(self) -> dict[str, Any]:
        """Returns the settings of the descent that the caller has fixed."""
        values = {n: getattr(self, n) for n in ("num_steps", "l2_clip_norm", "learning_rate")}
        return {n: v for n, v in values.items() if not (isinstance(v, str) and v == "auto")}

    def _delta(self, num_private: int) -> float:
        if self.delta is None:
            return accounting.default_delta(num_private)
        accounting.require_small_delta(self.delta, num_private, allow_large=self.allow_large_delta)
        return self.delta

    def _mechanism(
        self, num_private: int, delta: float, settings: DescentSettings, noise: Noise
    ) -> Mechanism:
        return Mechanism.calibrate(
            epsilon=self.epsilon,
            delta=delta,
            sampling=FullBatch.of(num_private),
            num_steps=max(settings.num_steps, 1) + (self.guard and settings.num_steps > 0),
            l2_clip_norm=settings.l2_clip_norm,
            adjacency=Adjacency(self.adjacency),
            noise=noise,
            unit=self.unit,
        )

    def _one_step(self, num_private: int, delta: float) -> Mechanism:
        """Returns the mechanism that spends the whole budget on one sum over all rows."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # The run itself warns of a large delta.
            return Mechanism.calibrate(
                epsilon=self.epsilon,
                delta=delta,
                sampling=FullBatch.of(num_private),
                num_steps=1,
                l2_clip_norm=1.0,
                adjacency=Adjacency(self.adjacency),
            )

    def _follows_hessian(self, width: int, sparse: bool) -> bool:
        """Returns whether the descent has the geometry of the public Hessian."""
        too_wide = sparse and width > _WIDEST_SPARSE
        return self.method == "exact" or (self.method == "auto" and not too_wide)

    def _plan(self, problem: _Problem, x: np.ndarray | None, private: Any, delta: float) -> FitPlan:
        """Returns scaling, start and settings, which follow from public rows and the budget.

        Of private rows only the shape is used, and whether they are sparse.
        """
        num_private, width = private.shape
        options: Mapping[str, Any] = {
            "intercept": bool(self.fit_intercept),
            "row_norm_bound": self.row_norm_bound,
            "num_private": num_private,
            "one_step_noise": self._one_step(num_private, delta).noise_multiplier,
            "given": self._given(),
        }
        if x is None:
            return plan_cold(problem.family, width, problem.targets.shape[1], **options)
        targets = problem.public_targets
        assert targets is not None
        if problem.prior is not None:
            targets = (len(x) * targets + problem.prior) / (len(x) + 1)
        if problem.public_weights is not None:
            options = {**options, "weights": problem.public_weights}
        follows_hessian = self._follows_hessian(width, issparse(private))
        if issparse(private) and not follows_hessian:
            options = {**options, "stays_sparse": True}
        return plan_warm(problem.family, x, targets, follows_hessian=follows_hessian, **options)

    def _from_public_rows(self, plan: Any) -> Any:
        """Returns arrays that differ if the private part would compute something else."""
        scaling = plan.scaling
        return scaling.shift, scaling.factor, scaling.basis, plan.theta

    def _run(
        self,
        plan: Any,
        family: Family,
        rows: Any,
        mechanism: Mechanism,
        seed: int | None,
        spend: Ledger | Budget | None,
        checkpoint: Checkpoint | None,
        public: Any,
    ) -> Any:
        """Runs the private part once its randomness is on disk and all of it is charged.

        Nothing of it can be seen before its end, so that it is one block: after a crash all of it
        is computed again, with the same randomness, and is not charged again.
        """
        if isinstance(spend, Budget):
            spend.require_data()

        def configuration(key: bytes) -> dict[str, str]:
            parameters = self.get_params() | {"random_state": None}
            counts = () if rows.counts is None else rows.counts
            weights = () if rows.weights is None else (rows.weights,)
            features: Any = rows.matrix if isinstance(rows, SparseRows) else rows.features
            # All of the public rows as well: what was made of them may be the same by chance.
            made = (*map(_parts, public), self._from_public_rows(plan))
            return {
                checkpoints.REPEATS: str(checkpoint is not None and checkpoint.keep),
                "estimator": type(self).__name__,
                **{name: repr(value) for name, value in parameters.items()},
                **checkpoints.fields("mechanism", mechanism),
                **checkpoints.fields("settings", plan.settings),
                "public rows": _fingerprint.of_arrays(key, made),
                "private data": _fingerprint.of_arrays(
                    key, (_parts(features), rows.targets, counts, *weights)
                ),
            }

        steps = [mechanism.num_steps]
        books = Books.open(
            mechanism, None, num_steps=steps, seeds=[seed], spend=spend, checkpoint=checkpoint
        )
        with contextlib.closing(books):
            (entropy,) = books.verified(configuration)
            _, keys = randomness(entropy, secure=mechanism.is_secure)
            books.begin(())
            books.charge([0], steps)
            found = self._learn(plan, family, rows, mechanism, keys.noise)
            # With `keep`, a fit that is over is computed again: the same, or not at all.
            books.show(mechanism.num_steps, _digest(found))
            books.finish()
        return found

    def __sklearn_clone__(self):
        self._refuse_private_steps()
        copy: Any = super().__sklearn_clone__()
        copy._lineage = self._with_lineage()
        copy._lineage.copies += 1
        return copy

    def _refuse_private_steps(self) -> None:
        lineage = getattr(self, "_lineage", None)
        _pipelines.refuse_private_steps(self, None if lineage is None else lineage.name)

    def _with_lineage(self) -> Lineage:
        if not hasattr(self, "_lineage"):
            self._lineage = Lineage()
        return self._lineage

    def _count(self, mechanism: Mechanism, delta: float, shape: tuple[int, int]) -> Together:
        """Counts this fit among those of the process, and tells the operator of their total."""
        accounted = mechanism.noise.accounted_multiplier(
            mechanism.noise_multiplier, mechanism.l2_clip_norm
        )
        found = _FITS.add(self._with_lineage(), shape, mechanism.num_steps, accounted)
        if found.is_news:

            def epsilon(**options: int) -> str:
                return upwards(found.epsilon(delta, mechanism.adjacency, **options))

            where = f", {found.elsewhere} of them in other processes" if found.elsewhere else ""
            warn(
                f"this is one of {found.fits} private fits{where}, by copies of one estimator or "
                "on tables of one shape, as searches and cross-validation make them. If they read "
                f"the same people, they have epsilon {epsilon()} together at delta {delta:g}, not "
                f"{epsilon(fits_like_the_last=1)}; 20 fits like this one have "
                f"{epsilon(fits_like_the_last=20)}. Scores on private rows are not covered "
                "at all. Choose settings on public rows, or charge all fits to one Budget: "
                "fit(..., spend=budget)."
            )
        return found

    def _tuning(self, is_warm: bool, together: Together | None, delta: float) -> str:
        """Returns what is known about how the settings were chosen."""
        defaults = type(self)().get_params()
        given = [
            name
            for name in _SETTINGS
            if name in defaults and not _equals(getattr(self, name), defaults[name])
        ]
        known = []
        if given:
            known.append(
                f"{', '.join(given)}: given by the caller, and how they were chosen is not known"
            )
        if together is not None and together.fits > 1:
            epsilon = upwards(together.epsilon(delta, Adjacency(self.adjacency)))
            known.append(
                f"this was one of {together.fits} fits, by copies of one estimator or on tables of "
                f"one shape, which if they read the same records have epsilon {epsilon} together; "
                "a choice among them by scores on private records is not covered at all"
            )
        if known:
            return f"not charged: {'; '.join(known)}"
        source = "public rows" if is_warm else "constants"
        rule = f"; {self._rule()}" if is_warm else ""
        return f"nothing to charge: all settings follow from {source} and the budget{rule}"

    def _rule(self) -> str:
        """Returns how public rows chose the settings."""
        return "a rehearsal on public rows chose clip norm, steps and learning rate"

    def __getstate__(self):
        # A Pipeline that lets other processes fit its model sends it there while it is fitted.
        self._refuse_private_steps()
        # Counts of private cells are for the operator and never part of a stored model.
        state: Any = super().__getstate__()
        return {name: {} if name == "unprotected_cells_" else state[name] for name in state}

    def _features(self, X: Any) -> Any:
        """Returns rows to predict for as features."""
        check_is_fitted(self)
        if self.encoding_ is not None:
            return _inputs.encoded_rows(self.encoding_, X)
        names = getattr(self, "feature_names_in_", None)
        if names is not None:
            X = _inputs.of_columns(list(names), X, "the rows of fit")
        return validate_data(self, X, reset=False, dtype=np.float64, accept_sparse="csr")

    def _scores(self, X: Any) -> np.ndarray:
        return self._features(X) @ np.atleast_2d(self.coef_).T + np.atleast_1d(self.intercept_)


def _digest(found: Any) -> str:
    """Returns a hash of what `_learn` returned: an array, or a model that has JSON."""
    content = (
        found.tobytes()
        if isinstance(found, np.ndarray)
        else json.dumps(found.to_dict(), sort_keys=True).encode()
    )
    return hashlib.sha256(content).hexdigest()[:32]


def _equals(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, str | bool) and value == default)


_SHARED_PARAMETERS = """
    Args:
        epsilon: ε, the budget of the fit; `privacy_.epsilon` states what was spent, never more.
        delta: δ, which should be well below 1/n. The default is 1/(10 n) rounded down to a power of
            ten, and at most 1e-5; n counts as public.
        allow_large_delta: whether to accept a δ above 1/n. Otherwise it is refused, because a
            mechanism that publishes one row at random would satisfy it.
{own}        fit_intercept: whether to fit an intercept.
        method: "exact" clips, adds noise and steps in the geometry of the public Hessian; "dpsgd"
            does so in standardised features. "auto" is "exact", except for sparse rows of more
            than 200 features. Without public rows all three are cold DP-SGD, which starts at zero.
        num_steps: T, or "auto".
        l2_clip_norm: C in units of the scaled features and targets, or "auto".
        learning_rate: η in the same units, or "auto".
        guard: whether to spend one more step on a private test of the result. If private rows do
            not seem to fit it better than the public model, the public model is the result.
        row_norm_bound: R. Private and public rows longer than R are scaled down to norm R in
            training. Without public rows, features are also divided by R.
        adjacency: "zero-out", or "replace" for the stronger guarantee with twice the noise.
        unit: what each row is, "example" or "user": one row of each person, with all that is used
            of them (`mirrordp.data.one_row_per_user`). The report says so, and a budget must have
            the same unit. Nothing else changes: that no user has two rows is the caller's word.
        secure: whether to draw the noise exactly, on a lattice, from a cryptographic generator
            (`mirrordp.SecureGaussianNoise`; needs `pip install 'mirrordp[secure]'`). This is meant
            for models to release. Such a fit cannot be repeated, so that it takes neither a
            random_state nor a checkpoint.
        random_state: None takes randomness from the operating system. An integer (or a NumPy
            generator) makes the fit reproducible and therefore unfit for release.

    Attributes:
        coef_: coefficients.
        intercept_: the intercept.
{fitted}        n_features_in_: d.
        encoding_: how the columns of a data frame become features, or None if they are numbers.
        unprotected_cells_: by column, how many cells of private frames were clamped, unknown or
            left out. Not covered by the guarantee and not stored with the model: for the operator.
        n_iter_: the number of steps that read private rows, which is 0 if the public model was
            the better choice.
        privacy_: the `RunReport`, which states the guarantee.
        public_coef_, public_intercept_: the model of the public rows alone, from which the descent
            started; only with public rows.
        noise_stddev_: the standard deviations that the noise alone gives the coefficients, shape
            (outputs, d), by `mirrordp.linear.uncertainty`; only with public rows. It is None for
            more parameters than are handled there.
        noise_root_: a square root of their covariance, shape (outputs, d, k): a linear function of
            the coefficients has the norm of that function of these as its standard deviation.
    """


def _documented(own: str = "", fitted: str = ""):
    """Adds the shared part of the documentation to a class."""

    def decorate(cls):
        cls.__doc__ = (
            cls.__doc__.rstrip() + "\n" + _SHARED_PARAMETERS.format(own=own, fitted=fitted)
        )
        return cls

    return decorate


@_documented(
    own="""        target_range: (low, high). Private targets are clipped to it. Without public
            rows they are also scaled by it, otherwise by mean and deviation of public targets.
"""
)
class PrivateLinearRegression(RegressorMixin, _PrivateLinearModel):
    """Least squares under differential privacy, with the help of public rows.

    The loss is ½‖Θᵀx + b − y‖²; see `mirrordp.linear.descent` for the descent. Targets of shape
    (n, m) are m outputs: the gradients of one row for all of them are clipped together, so that one
    guarantee covers them all.
    """

    _takes_several_outputs = True

    def __init__(
        self,
        epsilon=1.0,
        delta=None,
        *,
        allow_large_delta=False,
        target_range=None,
        fit_intercept=True,
        method="auto",
        num_steps="auto",
        l2_clip_norm="auto",
        learning_rate="auto",
        row_norm_bound=None,
        guard=False,
        adjacency="zero-out",
        unit="example",
        secure=False,
        random_state=None,
    ):
        super().__init__(
            epsilon, delta, allow_large_delta=allow_large_delta, fit_intercept=fit_intercept,
            method=method, num_steps=num_steps, l2_clip_norm=l2_clip_norm,
            learning_rate=learning_rate, row_norm_bound=row_norm_bound, guard=guard,
            adjacency=adjacency, unit=unit, secure=secure, random_state=random_state,
        )  # fmt: skip
        self.target_range = target_range

    def _encode(self, y, y_public):
        y = _inputs.as_numbers("y", y, f" {UNPROTECTED}")
        y = y.reshape(len(y), -1)
        outputs = y.shape[1]
        shift, scale = np.zeros(outputs), np.ones(outputs)
        low, high = -np.inf, np.inf
        if self.target_range is None and y_public is None:
            warn(
                "without public targets and without target_range nothing says how large targets "
                "are: they are taken to lie near zero, within a few units. Pass y_public, or "
                "target_range=(low, high) that you know beforehand.",
                UserWarning,
            )
        if self.target_range is not None:
            low, high = self.target_range
            _validate.positive("target_range is (low, high).", width_of_target_range=high - low)
            shift, scale = np.full(outputs, (low + high) / 2), np.full(outputs, (high - low) / 2)
        if y_public is not None:
            y_public = _inputs.as_numbers("y_public", y_public, "").reshape(len(y_public), -1)
            if y_public.shape[1] != outputs:
                raise ValueError(
                    f"y and y_public must have the same outputs, got {outputs} and "
                    f"{y_public.shape[1]}."
                )
            for column in y_public.T:
                if (extreme := too_extreme(column)) is not None:
                    raise ValueError(
                        f"y_public must hold numbers that can be computed with, got {extreme}. Use "
                        "another unit in y and y_public."
                    )
            shift = np.array([column.mean() for column in y_public.T])
            scale = np.array([column.std() for column in y_public.T])
        # Only an intercept can undo the shift.
        shift = shift if self.fit_intercept else np.zeros(outputs)
        scale = np.where(scale > 0, scale, 1.0)

        def scaled(y: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                return (np.clip(y, low, high) - shift) / scale

        return _Problem(
            families.SQUARED_ERROR,
            computed_rows(scaled, y),
            None if y_public is None else (y_public - shift) / scale,
            shift=shift,
            scale=scale,
        )

    def _decode(self, problem, coefficients, intercepts):
        scale = np.asarray(problem.scale)
        coefficients = coefficients * scale[:, None]
        intercepts = intercepts * scale + problem.shift
        if len(scale) > 1:
            return coefficients, intercepts
        return coefficients[0], float(intercepts[0])

    def predict(self, X):
        """Returns the expected target of each row, or one per output."""
        scores = self._scores(X)
        return scores if scores.shape[1] > 1 else scores[:, 0]

    def __sklearn_tags__(self):
        tags = _with_our_tags(super().__sklearn_tags__())
        tags.target_tags.multi_output = True
        return tags


@_documented()
class PrivatePoissonRegressor(RegressorMixin, _PrivateLinearModel):
    """Poisson regression with logarithmic link under differential privacy.

    The loss is e^s − y s with s = ⟨θ, x⟩ + b, for counts y ≥ 0; see `mirrordp.linear.descent`.
    """

    def _encode(self, y, y_public):
        y = _inputs.as_counts("y", y, f" {UNPROTECTED}")
        if y_public is not None:
            y_public = _inputs.as_counts("y_public", y_public, "")[:, None]
            if y_public.max() > LARGEST_COUNT:
                raise ValueError(
                    f"y_public must hold counts of at most {LARGEST_COUNT}, got "
                    f"{y_public.max():g}. Correct them, or use PrivateLinearRegression."
                )
        return _Problem(families.POISSON, y[:, None], y_public)

    def _decode(self, problem, coefficients, intercepts):
        return coefficients[0], float(intercepts[0])

    def predict(self, X):
        """Returns the expected count of each row."""
        return families.POISSON.mean(self._scores(X))[:, 0]

    def __sklearn_tags__(self):
        tags = _with_our_tags(super().__sklearn_tags__())
        tags.target_tags.positive_only = True
        return tags


class _PrivateClassifier(ClassifierMixin, _PrivateLinearModel):
    """The base of the classifiers: labels in, targets and weights for the loss out."""

    classes_: np.ndarray

    def __init__(
        self,
        epsilon=1.0,
        delta=None,
        *,
        allow_large_delta=False,
        classes=None,
        class_weight=None,
        fit_intercept=True,
        method="auto",
        num_steps="auto",
        l2_clip_norm="auto",
        learning_rate="auto",
        row_norm_bound=None,
        guard=False,
        adjacency="zero-out",
        unit="example",
        secure=False,
        random_state=None,
    ):
        super().__init__(
            epsilon, delta, allow_large_delta=allow_large_delta, fit_intercept=fit_intercept,
            method=method, num_steps=num_steps, l2_clip_norm=l2_clip_norm,
            learning_rate=learning_rate, row_norm_bound=row_norm_bound, guard=guard,
            adjacency=adjacency, unit=unit, secure=secure, random_state=random_state,
        )  # fmt: skip
        self.classes = classes
        self.class_weight = class_weight

    @abc.abstractmethod
    def _family(self) -> Family:
        """Returns the family of the loss for `classes_`."""

    @abc.abstractmethod
    def _targets_of(self, index: np.ndarray) -> np.ndarray:
        """Returns the targets for the loss from indices of classes."""

    @abc.abstractmethod
    def predict_proba(self, X) -> np.ndarray:
        """Returns the probability of each class, in the order of `classes_`."""

    def _in_order(self, labels: np.ndarray) -> np.ndarray:
        """Returns the distinct labels in the order of `classes_`."""
        return np.unique(labels)

    def _encode(self, y, y_public):
        known = self.classes if self.classes is not None else y_public
        labels = y if known is None else np.asarray(known)
        if known is None and _inputs.is_mixed(y.tolist()):
            # Here all labels together decide the classes, which the report says.
            labels = np.asarray(y.tolist())
        # The values that define the classes must be labels; any other private value is no class.
        check_classification_targets(labels)
        self.classes_ = self._in_order(labels)
        _inputs.check_distinct(self.classes_)
        if len(self.classes_) < 2:
            remark = f" {UNPROTECTED}" if known is None else ""
            raise ValueError(
                "a classifier needs at least two classes, got one class only: "
                f"{self.classes_.tolist()}. Pass all of them as classes=.{remark}"
            )
        index = computed_rows(lambda labels: _inputs.class_indices(self.classes_, labels), y)
        unknown = sum(int(np.count_nonzero(index[block] < 0)) for block in row_blocks(index))
        _inputs.refuse_lost_labels(self.classes_, y, index)
        if unknown:
            warn(
                f"{UNPROTECTED} {unknown} private rows have a label that is not "
                f"among the classes {self.classes_.tolist()}; they contribute nothing.",
                UnprotectedWarning,
            )
        public_index = public_targets = prior = None
        every_class = np.arange(len(self.classes_))
        if y_public is not None:
            public_index = _inputs.class_indices(self.classes_, y_public)
            if (public_index < 0).any():
                raise ValueError(
                    f"y_public must hold labels out of classes={self.classes_.tolist()}, got "
                    f"{np.unique(y_public[public_index < 0])[:5].tolist()}. Extend classes=."
                )
            public_targets = self._targets_of(public_index)
            # One more row, shared by all classes, keeps an absent class from being impossible.
            prior = self._targets_of(every_class).mean(axis=0)
        weights = self._class_weights(public_index)
        shown = ()
        if known is None:
            shown = ("the set of labels: taken from the private rows, it counted as public",)
        return _Problem(
            self._family(),
            # A row of another label does not count, whatever target it has.
            computed_rows(lambda index: self._targets_of(np.maximum(index, 0)), index),
            public_targets,
            prior,
            computed_rows(lambda index: index >= 0, index),
            weights=None
            if weights is None
            else computed_rows(lambda index: weights[np.maximum(index, 0)], index),
            public_weights=None
            if weights is None or public_index is None
            else weights[public_index],
            shown=shown,
        )

    def _class_weights(self, public_index: np.ndarray | None) -> np.ndarray | None:
        """Returns the weight of each class, from public rows or the caller."""
        if self.class_weight is None:
            return None
        if isinstance(self.class_weight, Mapping):
            return _inputs.weights_of_classes(self.class_weight, self.classes_)
        if self.class_weight != "balanced":
            raise ValueError(
                "class_weight must be None, 'balanced' or a dictionary from labels to weights, got "
                f"{self.class_weight!r}."
            )
        if public_index is None:
            raise ValueError(
                "class_weight='balanced' needs public rows, because the shares of classes among "
                "private rows are private. Pass X_public and y_public, or a dictionary of weights "
                "that you know beforehand."
            )
        # Each class gets a share of one further row, so that an absent class has a finite weight.
        shares = np.bincount(public_index, minlength=len(self.classes_)) + 1 / len(self.classes_)
        return shares.sum() / (len(self.classes_) * shares)

    def predict(self, X):
        """Returns the most probable class of each row."""
        probabilities = self.predict_proba(X)
        return self.classes_[np.argmax(probabilities, axis=1)]

    def _decode(self, problem, coefficients, intercepts):
        return coefficients, intercepts

    def __sklearn_tags__(self):
        return _with_our_tags(super().__sklearn_tags__())


_CLASS_WEIGHT = """        class_weight: None, or a dictionary from labels to weights (1 for
            labels that it lacks), or "balanced" for weights inverse to the shares of classes among
            public rows. The loss of a row is multiplied by the weight of its class before the
            gradient is clipped, so that weights change no sensitivity.
"""


@_documented(
    own="""        classes: all labels, needed if public rows lack some. By default they come from
            `y_public` or, without public rows, from `y`; the report then says so.
"""
    + _CLASS_WEIGHT,
    fitted="""        classes_: the labels in the order of `predict_proba`.
""",
)
class PrivateLogisticRegression(_PrivateClassifier):
    """Logistic regression under differential privacy, for two classes or (by softmax) more.

    The loss is log Σ_k e^{s_k} − s_y with scores s = Θᵀx + b (one score for two classes). A private
    row whose label is not among the classes contributes nothing, but still counts in n. Labels that
    read as the same number (1, 1.0, "1") are one label.
    """

    def _family(self):
        return families.LOGISTIC if len(self.classes_) == 2 else families.MULTINOMIAL

    def _targets_of(self, index):
        one_hot = np.eye(len(self.classes_))[index]
        return one_hot[:, 1:] if len(self.classes_) == 2 else one_hot

    def decision_function(self, X):
        """Returns one score per class, or for two classes the log odds of the second."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X):
        """Returns the probability of each class, in the order of `classes_`."""
        return families.class_probabilities(self._scores(X))


@_documented(
    own="""        classes: all labels from lowest to highest, needed if they are text or if public
            rows lack some. By default they are the sorted labels of `y_public` or, without public
            rows, of `y`; the report then says so.
"""
    + _CLASS_WEIGHT,
    fitted="""        classes_: the labels from lowest to highest, the order of `predict_proba`.
""",
)
class PrivateOrdinalRegression(_PrivateClassifier):
    """Regression on ordered classes (grades, stages, ratings) under differential privacy.

    For K classes there are K − 1 thresholds, and a logistic model for each of them says how likely
    the class is to be beyond it: P[y > k] is the sigmoid of ⟨θ_k, x⟩ + b_k. The loss of a row is
    the sum of the K − 1 logistic losses, whose gradients are clipped together.

    The models of the thresholds have coefficients of their own. Under proportional odds they would
    share them; then the gradient of a row is no longer the product of the row and its residuals,
    which is what makes clipping exact and fast here. The price is K − 1 times as many coefficients
    to which noise is added, as in `PrivateLogisticRegression`.
    """

    def _family(self):
        return families.CUMULATIVE

    def _targets_of(self, index):
        return (index[:, None] > np.arange(len(self.classes_) - 1)).astype(float)

    def _in_order(self, labels):
        if self.classes is None:
            classes = np.unique(labels)
            if classes.dtype.kind not in "iufb":
                warn(
                    f"classes that are text are taken in alphabetical order: {classes.tolist()}. "
                    "Pass classes= from lowest to highest."
                )
            return classes
        # In the given order; numbers of one array are compared as they are.
        _, first = np.unique(labels, return_index=True)
        return labels[np.sort(first)]

    def predict_proba(self, X):
        """Returns the probability of each class, from lowest to highest."""
        return families.ordered_probabilities(self._scores(X))


def _with_our_tags(tags):
    """Tells scikit-learn's checks not to expect good scores from a few dozen private rows.

    It also says that sparse rows are taken.
    """
    for kind in (tags.regressor_tags, tags.classifier_tags):
        if kind is not None:
            kind.poor_score = True
    tags.input_tags.sparse = True
    return tags
