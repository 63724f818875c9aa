"""scikit-learn estimators: `fit(X, y, X_public=..., y_public=...)` under differential privacy.

In: private rows, and optionally public rows of the same kind. Out: `coef_`, `intercept_` and
`privacy_`, the report of what was promised. With public rows this is Algorithm 1 of the paper with
full batches on the quadratic mirror map of the public loss: features are scaled by public moments,
the descent starts at the public optimum, and clipping, noise and steps follow the public Hessian.
Without them it is DP-SGD from zero.

Clip norm, step count and learning rate come from public rows and the budget (see `descent`), so
that setting ε alone gives a good model; where the budget is too small for a private gradient to be
of use, the public model is what comes back, and nothing is spent. Nothing is learned from private
rows without noise except their number, which counts as public, and, where nobody states it, the set
of their labels; `privacy_` says so.
"""

import abc
import contextlib
import dataclasses
import math
import numbers
import secrets
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.data import (
    UNPROTECTED,
    PrivateData,
    PublicData,
    UnprotectedWarning,
    excluded_rows,
    refuse_private_rows,
)
from mirrordp.linear import descent as linear
from mirrordp.linear.descent import Family, PublicObjective, Rows, Settings
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise, Noise, SecureGaussianNoise
from mirrordp.privacy.sampling import FullBatch
from mirrordp.privacy.secure import require_cryptography
from mirrordp.report import RunReport, upwards
from mirrordp.spending import fingerprint as _fingerprint
from mirrordp.spending._fits import Fits, Lineage, Together
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Block
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.bookkeeping import require_repeatable
from mirrordp.training.central import randomness
from mirrordp.training.checkpoint import Checkpoint

METHODS = ("auto", "exact", "dpsgd")
# What a caller may have chosen by looking at private rows.
_SETTINGS = (
    *("num_steps", "l2_clip_norm", "learning_rate", "row_norm_bound", "target_range"),
    *("method", "fit_intercept"),
)
_TUNING_ON_BUDGET = (
    "charged, as far as it was made by what runs on the same budget released; a choice by scores "
    "on private records is not covered"
)
_FITS = Fits()
# The search for settings on public rows is no secret, and the same rows give the same settings.
_PUBLIC_SEED = 0
# DP-SGD without public rows: at most so many steps.
_MAX_COLD_STEPS = 300


@dataclasses.dataclass(frozen=True, eq=False)
class _Scaling:
    """x ↦ u = ((x − shift) · factor, 1) B: what is done to a row before its gradient is taken.

    With a `row_norm_bound` R, x is first scaled down to norm R where it is longer.
    """

    shift: np.ndarray
    factor: np.ndarray
    intercept: bool
    row_norm_bound: float | None = None
    basis: np.ndarray | None = None

    @classmethod
    def of(cls, x: np.ndarray, *, intercept: bool, row_norm_bound: float | None) -> "_Scaling":
        """Public mean and standard deviation; an indicator is divided by its range instead.

        The ridge takes all coefficients to be of one size. Effects of categories are, rare or not,
        per indicator, not per standard deviation of it: a rare one divided by its tiny standard
        deviation would escape the ridge just where public rows know least. A column that is
        constant on public rows counts zero: they say nothing about its scale.

        Without an intercept nothing is shifted, since it is the intercept that undoes the shift.
        """
        x = _bounded(x, row_norm_bound)
        shift = x.mean(axis=0) if intercept else np.zeros(x.shape[1])
        deviation = np.sqrt(np.mean((x - shift) ** 2, axis=0))
        low, high = x.min(axis=0), x.max(axis=0)
        is_indicator = ((x == low) | (x == high)).all(axis=0) & (low < high)
        scale = np.where(is_indicator, high - low, deviation)
        constant = high - low <= 10 * np.finfo(float).eps * np.abs(x).max(axis=0)
        if not intercept:
            constant &= deviation == 0
        factor = np.where(constant, 0.0, 1 / np.where(constant, 1.0, scale))
        return cls(shift, factor, intercept, row_norm_bound)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (_bounded(x, self.row_norm_bound) - self.shift) * self.factor
            if self.intercept:
                scaled = np.column_stack([scaled, np.ones(len(x))])
            return scaled if self.basis is None else scaled @ self.basis

    def original(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients (m, d) and intercepts (m,) for rows as they came."""
        if self.basis is not None:
            theta = self.basis @ theta
        width = len(self.factor)
        coefficients = theta[:width] * self.factor[:, None]
        intercepts = theta[width] if self.intercept else np.zeros(theta.shape[1])
        return coefficients.T, intercepts - self.shift @ coefficients


def _bounded(x: np.ndarray, row_norm_bound: float | None) -> np.ndarray:
    if row_norm_bound is None:
        return x
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x * (row_norm_bound / np.maximum(norms, row_norm_bound))


@dataclasses.dataclass(frozen=True, eq=False)
class _Problem:
    """Targets as the loss wants them; each row's depends on that row and public values only.

    Attributes:
        family: the loss.
        targets: private targets, shape (n, m).
        public_targets: public targets, if there are any.
        prior: the targets of one further public row that the public model is fitted to, if any.
        counts: which private rows take part; None: all.
        shift: what was taken off the targets.
        scale: what they were then divided by.
        shown: what this says about private rows without protection.
    """

    family: Family
    targets: np.ndarray
    public_targets: np.ndarray | None
    prior: float | None = None
    counts: np.ndarray | None = None
    shift: float = 0.0
    scale: float = 1.0
    shown: tuple[str, ...] = ()

    def without(self, left_out: np.ndarray) -> "_Problem":
        """The same, less the private rows in a mask."""
        counts = ~left_out if self.counts is None else self.counts & ~left_out
        return dataclasses.replace(self, counts=counts)


class _PrivateLinearModel(BaseEstimator, abc.ABC):
    """What the estimators share: validation, scaling, settings, the private descent, the report."""

    coef_: np.ndarray
    intercept_: Any
    n_features_in_: int

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
        adjacency: str = "zero-out",
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
        self.adjacency = adjacency
        self.secure = secure
        self.random_state = random_state

    @abc.abstractmethod
    def _encode(self, y: np.ndarray, y_public: np.ndarray | None) -> _Problem:
        """Targets for the loss."""

    @abc.abstractmethod
    def _decode(
        self, problem: _Problem, coefficients: np.ndarray, intercepts: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        """`coef_` and `intercept_`, from shapes (m, d) and (m,)."""

    def fit(self, X, y, X_public=None, y_public=None, *, counts=None, budget=None, checkpoint=None):
        """Fits the model to private rows under (ε, δ)-differential privacy.

        As in `mirrordp.train`, a private row that equals a public one, target included, is not used
        twice: it stays in n and contributes zero, and a warning tells the operator. Where public
        rows equal each other, values repeat by chance (a few categories, say) and equality is no
        sign of a copy: then nothing is left out. The guarantee is the same either way. Public rows
        that are mostly private rows are refused.

        Args:
            X: private features, shape (n, d). Each row is one unit of protection.
            y: private targets, n of them.
            X_public: public features, shape (n_pub, d): everything about them may be learned. The
                steps of a `Pipeline` do not transform them; fit those on public rows and give the
                estimator both tables transformed.
            y_public: public targets.
            counts: a mask of the private rows that take part, decided row by row; the others (such
                as rows without a target) stay in n and contribute exactly zero. Default: all.
            budget: a `mirrordp.Budget`, opened with the data, that the fit is charged to before the
                descent begins; it is refused if it does not fit.
            checkpoint: a `mirrordp.Checkpoint`: keeps the randomness, so that a fit that was cut
                off and is resumed is the same fit and is charged once. Not with `secure=True`.

        Returns:
            The fitted estimator.
        """
        self._check_parameters()
        if (X_public is None) != (y_public is None):
            raise ValueError(
                "X_public and y_public go together, got one of them. Pass both or neither."
            )
        X, y = self._validated(X, y, public=False)
        delta = self._delta(len(X))
        if X_public is not None:
            X_public, y_public = self._validated(X_public, y_public, public=True)
            used = slice(None) if counts is None else _mask(counts, len(X))
            self._compare(X, y[used], X_public, y_public)
        problem = self._encode(y, y_public)
        if counts is not None:
            problem = problem.without(~_mask(counts, len(X)))
        if X_public is not None:
            problem = problem.without(_copies(problem, X, X_public))
        if X_public is None:
            scaling, theta, settings = self._plan_cold(problem, len(X), X.shape[1], delta)
        else:
            scaling, theta, settings = self._plan(problem, X_public, len(X), delta)
        seed = _seed(self.random_state)
        noise = SecureGaussianNoise.of(theta) if self.secure else GaussianNoise()
        mechanism = self._mechanism(len(X), delta, settings, noise)
        if checkpoint is not None:
            _validate.instance_of(Checkpoint, "Use Checkpoint(folder).", checkpoint=checkpoint)
            require_repeatable(mechanism)
        together = None
        if settings.num_steps > 0:
            if budget is None:
                together = self._count(mechanism, delta, X.shape)
            rows = Rows(scaling(X), problem.targets, problem.counts)
            with self._charged(
                mechanism, settings, theta, rows, seed, budget, checkpoint
            ) as entropy:
                _, keys = randomness(entropy, secure=mechanism.is_secure)
                theta = linear.private_descent(
                    problem.family,
                    theta,
                    rows,
                    mechanism,
                    learning_rate=settings.learning_rate,
                    key=keys.noise,
                )
        self.coef_, self.intercept_ = self._decode(problem, *scaling.original(theta))
        self.n_iter_ = settings.num_steps
        num_public = 0 if X_public is None else len(X_public)
        self.privacy_ = self._report(
            mechanism, delta, settings, num_public, problem.shown, seed, budget, together
        )
        return self

    @contextlib.contextmanager
    def _charged(
        self,
        mechanism: Mechanism,
        settings: Settings,
        theta: np.ndarray,
        rows: Rows,
        seed: int | None,
        budget: Budget | None,
        checkpoint: Checkpoint | None,
    ) -> Iterator[int | None]:
        """Charges the whole descent, once its randomness is on disk, and yields its seed.

        Nothing of a descent can be seen before its end, so it is one block: after a crash all of it
        is computed again, with the same randomness, and it is not charged again.
        """
        steps = mechanism.num_steps
        if budget is not None:
            _validate.instance_of(Budget, "Use Budget.open(folder, data=...).", budget=budget)
            budget.require_data()
        if checkpoint is None:
            if budget is not None:
                budget.admit(mechanism, num_steps=steps)
                name = secrets.token_hex(8)
                budget.claim_seed(seed, name)
                budget.charge(mechanism.event, block=Block(name, 0, steps))
            yield seed
            return
        run = checkpoint.open(mechanism.adjacency, budget=budget)
        with contextlib.closing(run):
            parameters = self.get_params() | {"random_state": None}
            secret = _fingerprint.of_arrays(
                run.key, (rows.features, rows.targets, () if rows.counts is None else rows.counts)
            )
            configuration = {
                "estimator": type(self).__name__,
                **{name: repr(value) for name, value in parameters.items()},
                **checkpoints.fields("mechanism", mechanism),
                **checkpoints.fields("settings", settings),
                "public rows": _fingerprint.of_arrays(run.key, theta),
                "private data": secret,
            }
            if budget is not None:
                budget.check_seed(seed, run.id)
            entropy = run.verify(configuration, seed)
            if run.saved is None:
                run.save({}, {})
            done = run.charged_steps
            if done < steps:
                if budget is not None:
                    budget.admit(mechanism, charged_steps=done, num_steps=steps)
                    budget.claim_seed(seed, run.id)
                charged_to = run.ledger if budget is None else budget
                charged_to.charge(
                    mechanism.event_between(done, steps), block=Block(run.id, done, steps)
                )
            yield entropy
            run.finish()

    def _check_parameters(self) -> None:
        _validate.positive(epsilon=self.epsilon)
        if self.delta is not None:
            _validate.open_unit_interval(delta=self.delta)
        _validate.instance_of(bool, allow_large_delta=self.allow_large_delta)
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {self.method!r}.")
        for name, check in (
            ("num_steps", _validate.positive_integer),
            ("l2_clip_norm", _validate.positive),
            ("learning_rate", _validate.positive),
        ):
            value = getattr(self, name)
            if not (isinstance(value, str) and value == "auto"):
                check(**{name: value})
        if self.row_norm_bound is not None:
            _validate.positive(row_norm_bound=self.row_norm_bound)
        if self.adjacency not in ("zero-out", "replace"):
            raise ValueError(
                f"adjacency must be 'zero-out' or 'replace', got {self.adjacency!r}: the number of "
                "rows divides the noisy sum, so that it counts as public."
            )
        _validate.instance_of(bool, secure=self.secure)
        if self.secure:
            require_cryptography()
            if self.random_state is not None:
                raise ValueError(
                    "a secure fit draws its noise from the operating system and cannot be "
                    f"repeated, got random_state={self.random_state!r}. Leave random_state out, or "
                    "use secure=False."
                )

    def _validated(self, X: Any, y: Any, *, public: bool) -> tuple[np.ndarray, np.ndarray]:
        suffix, remark = ("_public", "") if public else ("", f" {UNPROTECTED}")
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y{suffix} to be passed, but the target y is None."
            )
        _refuse_text_and_times(f"X{suffix}", X, remark)
        try:
            # One layout in memory for all that may come: the last bit of a product follows from it.
            X = validate_data(
                self,
                X,
                reset=not public,
                dtype=np.float64,
                order="C",
                ensure_all_finite=False,
            )
        except ValueError as error:
            if public and "feature names should match" in str(error):
                raise ValueError(
                    "X_public must have the columns of X in the same order, got others. "
                    "Pass X_public[X.columns]."
                ) from None
            if str(error).startswith(("Expected 2D array", "Complex data")):
                # The original message goes on with the array itself.
                first = str(error).splitlines()[0].rstrip(":")
                raise ValueError(
                    f"{first}. X{suffix} must hold real numbers in the shape (rows, features)."
                    f"{remark}"
                ) from None
            if "could not convert" not in str(error):
                raise
            # The original message quotes the value.
            raise ValueError(
                f"X{suffix} must hold numbers, got text. Encode it first, by rules that come from "
                f"public data.{remark}"
            ) from None
        y = column_or_1d(_each_by_itself(y), warn=True)
        if y.dtype.kind in "mM":
            raise ValueError(
                f"y{suffix} must hold numbers or text, got dates or durations, {y.dtype}. Turn "
                f"them into numbers or text one by one.{remark}"
            )
        if len(y) != len(X):
            raise ValueError(
                f"X{suffix} and y{suffix} must have equally many rows, got {len(X)} and {len(y)}."
            )
        _refuse_non_finite(f"X{suffix}", X, remark)
        if y.dtype.kind == "f":
            _refuse_non_finite(f"y{suffix}", y, remark)
        return X, y

    def _compare(
        self, X: np.ndarray, y: np.ndarray, X_public: np.ndarray, y_public: np.ndarray
    ) -> None:
        """Tells the operator of columns whose private values are mostly beyond the public range.

        Scales come from public rows. Where a pipeline has scaled private rows only, or units
        differ, a model comes out all the same, and a poor one.
        """
        found = [f"column {index}" for index in np.flatnonzero(_mostly_beyond(X, X_public))]
        kinds = y.dtype.kind + y_public.dtype.kind
        if isinstance(self, RegressorMixin) and len(y) and set(kinds) <= set("fiu"):
            found += ["y"] if _mostly_beyond(y, y_public) else []
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            warn(
                f"{UNPROTECTED} most private values are beyond the range of public ones in "
                f"{', '.join(found[:5])}{more}. Give both tables the same units: a Pipeline "
                "transforms X, but not X_public.",
                UnprotectedWarning,
            )

    def _delta(self, num_private: int) -> float:
        if self.delta is None:
            return accounting.default_delta(num_private)
        if not self.allow_large_delta:
            accounting.require_small_delta(self.delta, num_private)
        return self.delta

    def _mechanism(
        self, num_private: int, delta: float, settings: Settings, noise: Noise
    ) -> Mechanism:
        return Mechanism.calibrate(
            epsilon=self.epsilon,
            delta=delta,
            sampling=FullBatch.of(num_private),
            num_steps=max(settings.num_steps, 1),
            l2_clip_norm=settings.l2_clip_norm,
            adjacency=Adjacency(self.adjacency),
            noise=noise,
        )

    def _one_step_noise(self, num_private: int, delta: float) -> float:
        """The noise multiplier that spends the budget in one step, to choose settings by."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the run itself warns of a large delta
            return self._mechanism(
                num_private, delta, Settings(1.0, 1, 1.0), GaussianNoise()
            ).noise_multiplier

    def _given(self, name: str) -> Any:
        value = getattr(self, name)
        return None if isinstance(value, str) else value

    def _plan(
        self, problem: _Problem, x: np.ndarray, num_private: int, delta: float
    ) -> tuple[_Scaling, np.ndarray, Settings]:
        """Scaling, start and settings, from public rows and the budget."""
        targets = problem.public_targets
        assert targets is not None
        if problem.prior is not None:
            targets = (len(x) * targets + problem.prior) / (len(x) + 1)
        rng = np.random.default_rng(_PUBLIC_SEED)
        follows_hessian = self.method != "dpsgd"
        scaling = _Scaling.of(
            x,
            intercept=bool(self.fit_intercept),
            row_norm_bound=self.row_norm_bound,
        )
        rows = Rows(scaling(x), targets)
        penalized = np.arange(rows.features.shape[1]) < x.shape[1]
        public = PublicObjective.cross_validated(
            problem.family, rows, penalized=penalized.astype(float), rng=rng
        )

        def geometry(objective: PublicObjective) -> np.ndarray:
            if follows_hessian:
                return objective.whitening
            # Mean curvature one, so that learning rates mean the same as with the Hessian.
            return np.eye(len(penalized)) / math.sqrt(np.mean(np.diag(objective.hessian)))

        settings = linear.choose_settings(
            public,
            geometry,
            num_private=num_private,
            one_step_noise=self._one_step_noise(num_private, delta),
            rng=rng,
            l2_clip_norm=self._given("l2_clip_norm"),
            num_steps=self._given("num_steps"),
            learning_rate=self._given("learning_rate"),
        )
        basis = geometry(public)
        theta = np.linalg.solve(basis, public.minimizer)
        if self._given("l2_clip_norm") is None:
            whitened = Rows(rows.features @ basis, targets)
            norms = linear.gradient_norms(problem.family, theta, whitened)
            clip = float(np.quantile(norms, settings.l2_clip_norm))
            # All public residuals are zero: any clip norm will do.
            settings = settings._replace(l2_clip_norm=clip if clip > 0 else 1.0)
        return dataclasses.replace(scaling, basis=basis), theta, settings

    def _plan_cold(
        self, problem: _Problem, num_private: int, width: int, delta: float
    ) -> tuple[_Scaling, np.ndarray, Settings]:
        """DP-SGD from zero, in the features as they are or divided by the caller's bound."""
        bound = self.row_norm_bound
        if bound is None:
            warn(
                "without public rows and without row_norm_bound nothing is scaled, and the clip "
                "norm is a guess. Pass X_public and y_public, or bounds that you know beforehand.",
                UserWarning,
            )
        scaling = _Scaling(
            shift=np.zeros(width),
            factor=np.full(width, 1.0 if bound is None else 1 / bound),
            intercept=bool(self.fit_intercept),
            row_norm_bound=bound,
        )
        theta = np.zeros((width + scaling.intercept, problem.targets.shape[1]))
        clip = self._given("l2_clip_norm") or 1.0
        noise = self._one_step_noise(num_private, delta)
        # Rows of norm at most √2 (with a bound), or of entries of order one (without).
        smoothness = (2.0 if bound else width + 1.0) * problem.family.largest_curvature
        # After T steps the noise has moved Θ by about η σ₁ C T √p / n; that shall not exceed one.
        reach = num_private / (noise * clip * math.sqrt(theta.size))
        steps = self._given("num_steps")
        if steps is None:
            steps = int(np.clip(reach * smoothness, 5, _MAX_COLD_STEPS))
        rate = self._given("learning_rate") or min(1 / smoothness, reach / steps)
        return scaling, theta, Settings(clip, steps, rate)

    def _report(
        self,
        mechanism: Mechanism,
        delta: float,
        settings: Settings,
        num_public: int,
        shown: tuple[str, ...],
        seed: int | None,
        budget: Budget | None,
        together: Together | None,
    ) -> RunReport:
        method = "cold DP-SGD"
        if num_public:
            method = "warm DP-SGD" if self.method == "dpsgd" else "exact mirror descent"
        source = "public rows" if num_public else "constants"
        tuning = _TUNING_ON_BUDGET
        if budget is None:
            tuning = self._tuning(source, together, delta, mechanism.adjacency)
        return RunReport.of(
            mechanism,
            delta,
            charged_steps=settings.num_steps,
            spend=budget,
            title=f"{type(self).__name__} on {self.n_features_in_} features",
            tuning=tuning,
            shown_without_protection=shown,
            seed=seed,
            seeded=seed is not None,
            results={
                "method": method,
                "num_public": num_public,
                "num_steps": settings.num_steps,
                "learning_rate": settings.learning_rate,
            },
        )

    def __sklearn_clone__(self):
        copy: Any = super().__sklearn_clone__()
        copy._lineage = self._with_lineage()
        copy._lineage.copies += 1
        return copy

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
                f"{epsilon(of_so_many_like_the_last=1)}; 20 fits like this one have "
                f"{epsilon(of_so_many_like_the_last=20)}. Scores on private rows are not covered "
                "at all. Choose settings on public rows, or charge all fits to one Budget: "
                "fit(..., budget=budget)."
            )
        return found

    def _tuning(
        self, source: str, together: Together | None, delta: float, adjacency: Adjacency
    ) -> str:
        """What is known about how the settings were chosen."""
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
            known.append(
                f"this was one of {together.fits} fits, by copies of one estimator or on tables of "
                "one shape, which if they read the same records have epsilon "
                f"{upwards(together.epsilon(delta, adjacency))} together; a choice among them by "
                "scores on private records is not covered at all"
            )
        if known:
            return f"not charged: {'; '.join(known)}"
        return f"nothing to charge: all settings follow from {source} and the budget"

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return X @ np.atleast_2d(self.coef_).T + np.atleast_1d(self.intercept_)


def _equals(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, str | bool) and value == default)


def _mostly_beyond(private: np.ndarray, public: np.ndarray) -> np.ndarray:
    """Of which columns more than half of the private values are beyond the public range.

    Columns that are constant on public rows do not matter: they are left out.
    """
    low, high = public.min(axis=0), public.max(axis=0)
    return (((private < low) | (private > high)).mean(axis=0) > 0.5) & (low < high)


def _refuse_text_and_times(name: str, array: Any, remark: str) -> None:
    """Refuses arrays of which one row may have decided how the numbers of all are written.

    Among datetimes the finest unit becomes everyone's; as text a float32 has other digits.
    """
    dtypes = getattr(array, "dtypes", None)  # of a data frame
    found = [getattr(array, "dtype", None)] if dtypes is None else list(dtypes)
    kinds = {getattr(dtype, "kind", "") for dtype in found}
    if not kinds & set("mMUS"):
        return
    what, advice = "text", "Encode it first, by rules that come from public data"
    if kinds & set("mM"):
        what, advice = "dates or durations", "Count them in a unit of your choice"
    raise ValueError(f"{name} must hold numbers, got {what}. {advice}.{remark}")


def _each_by_itself(y: Any) -> Any:
    """Targets of several types as objects, where NumPy would make text of all if one is text."""
    if isinstance(y, list | tuple) and _is_mixed(y):
        return np.fromiter(y, object, len(y))
    return y


def _is_mixed(values: Iterable[Any]) -> bool:
    return len({type(value) for value in values}) > 1


def _refuse_non_finite(name: str, array: np.ndarray, remark: str) -> None:
    bad = ~np.isfinite(array)
    if not bad.any():
        return
    columns = np.flatnonzero(bad.reshape(len(array), -1).any(axis=0))
    where = "" if array.ndim == 1 else f" in columns {columns[:5].tolist()}"
    raise ValueError(
        f"{name} must be finite, got {int(bad.sum())} values that are NaN or infinity{where}. Drop "
        f"or impute them row by row, by rules that come from public data.{remark}"
    )


def _copies(problem: _Problem, x: np.ndarray, x_public: np.ndarray) -> np.ndarray:
    """A mask of the private rows that equal a public one, where that is a sign of a copy.

    If public rows are all distinct, few private rows equal one of them by chance: about as many of
    n as one public row is of all. Otherwise the most common rows would be the ones left out. Public
    rows that are mostly private ones are refused.
    """
    targets = problem.public_targets
    assert targets is not None
    # A target that overflowed in scaling is infinite, which PrivateData refuses.
    private = PrivateData({"x": x, "y": np.nan_to_num(problem.targets)})
    public = PublicData({"x": x_public, "y": targets})
    if len(np.unique(np.column_stack([x_public, targets]), axis=0)) < len(x_public):
        refuse_private_rows(private, public)
        return np.zeros(len(x), bool)
    return excluded_rows(private, public)


def _as_numbers(name: str, y: np.ndarray, remark: str) -> np.ndarray:
    try:
        # A text of all numbers has lost the digits that one number wanted.
        numbers = None if y.dtype.kind in "US" else y.astype(np.float64)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None:
        raise ValueError(
            f"{name} must hold numbers, got dtype {y.dtype}. Use PrivateLogisticRegression for "
            f"classes.{remark}"
        ) from None
    _refuse_non_finite(name, numbers, remark)
    return numbers


def _mask(counts: Any, rows: int) -> np.ndarray:
    counts = np.asarray(counts)
    if counts.shape != (rows,) or counts.dtype != bool:
        raise ValueError(
            f"counts must be {rows} booleans, one per private row, got {counts.dtype} of shape "
            f"{counts.shape}."
        )
    return counts


def _seed(random_state: Any) -> int | None:
    """The seed of a reproducible run, or None for randomness from the operating system."""
    if random_state is None:
        return None
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**63))
    if isinstance(random_state, numbers.Integral) and int(random_state) >= 0:
        return int(random_state)
    raise ValueError(
        "random_state must be None, a non-negative integer or a NumPy generator, got "
        f"{random_state!r}."
    )


_SHARED_PARAMETERS = """
    Args:
        epsilon: ε, the budget; `privacy_.epsilon` is what was spent, never more.
        delta: δ, well below 1/n. By default 1/(10 n) rounded down to a power of ten, and at most
            1e-5; n counts as public.
        allow_large_delta: whether to take a δ above 1/n, which is refused otherwise: publishing a
            row at random would pass there.
{own}        fit_intercept: whether to fit an intercept.
        method: "exact" clips, adds noise and steps in the geometry of the public Hessian; "dpsgd"
            does so in standardised features. "auto" is "exact" with public rows. Without them both
            are cold DP-SGD.
        num_steps: T, or "auto".
        l2_clip_norm: C in units of the scaled features and targets, or "auto".
        learning_rate: η in the same units, or "auto".
        row_norm_bound: R: private and public rows longer than R are scaled down to norm R in
            training. Without public rows features are divided by R too.
        adjacency: "zero-out", or "replace" for the stronger guarantee with twice the noise.
        secure: draw the noise from a cryptographic generator, exactly, on a lattice
            (`mirrordp.SecureGaussianNoise`; needs `pip install 'mirrordp[secure]'`). For models to
            release. Such a fit cannot be repeated: it takes neither a random_state nor a
            checkpoint.
        random_state: None takes randomness from the operating system. An integer (or a NumPy
            generator) makes the fit reproducible and therefore not for release.

    Attributes:
        coef_: coefficients.
        intercept_: the intercept.
{fitted}        n_features_in_: d.
        n_iter_: steps that read private rows; 0 if the public model was the better choice.
        privacy_: the `RunReport`: what is promised to whom.
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
    own="""        target_range: (low, high): private targets are clipped to it and, without public
            rows, scaled by it. Public targets otherwise give mean and standard deviation.
"""
)
class PrivateLinearRegression(RegressorMixin, _PrivateLinearModel):
    """Least squares under differential privacy, with the help of public rows.

    Minimises ½(⟨θ, x⟩ + b − y)²; see `mirrordp.linear.descent` for the descent.
    """

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
        adjacency="zero-out",
        secure=False,
        random_state=None,
    ):
        super().__init__(
            epsilon, delta, allow_large_delta=allow_large_delta, fit_intercept=fit_intercept,
            method=method, num_steps=num_steps, l2_clip_norm=l2_clip_norm,
            learning_rate=learning_rate, row_norm_bound=row_norm_bound, adjacency=adjacency,
            secure=secure, random_state=random_state,
        )  # fmt: skip
        self.target_range = target_range

    def _encode(self, y, y_public):
        y = _as_numbers("y", y, f" {UNPROTECTED}")
        shift, scale = 0.0, 1.0
        if self.target_range is not None:
            low, high = self.target_range
            _validate.positive("It is (low, high), low first.", width_of_target_range=high - low)
            y = np.clip(y, low, high)
            shift, scale = (low + high) / 2, (high - low) / 2
        if y_public is not None:
            y_public = _as_numbers("y_public", y_public, "")
            shift = float(y_public.mean())
            scale = float(y_public.std())
        # Without an intercept nothing could undo the shift.
        shift = shift if self.fit_intercept else 0.0
        scale = scale if scale > 0 else 1.0
        with np.errstate(over="ignore"):
            targets = (y[:, None] - shift) / scale
        return _Problem(
            linear.SQUARED_ERROR,
            targets,
            None if y_public is None else (y_public[:, None] - shift) / scale,
            shift=shift,
            scale=scale,
        )

    def _decode(self, problem, coefficients, intercepts):
        return coefficients[0] * problem.scale, float(intercepts[0] * problem.scale + problem.shift)

    def predict(self, X):
        """The expected target of each row."""
        return self._scores(X)[:, 0]

    def __sklearn_tags__(self):
        return _few_rows_are_not_enough(super().__sklearn_tags__())


@_documented()
class PrivatePoissonRegressor(RegressorMixin, _PrivateLinearModel):
    """Poisson regression with logarithmic link under differential privacy.

    Minimises e^s − y s with s = ⟨θ, x⟩ + b, for counts y ≥ 0; see `mirrordp.linear.descent`.
    """

    def _encode(self, y, y_public):
        y = _as_counts("y", y, f" {UNPROTECTED}")
        if y_public is not None:
            y_public = _as_counts("y_public", y_public, "")[:, None]
        return _Problem(linear.POISSON, y[:, None], y_public)

    def _decode(self, problem, coefficients, intercepts):
        return coefficients[0], float(intercepts[0])

    def predict(self, X):
        """The expected count of each row."""
        return linear.POISSON.mean(self._scores(X))[:, 0]

    def __sklearn_tags__(self):
        tags = _few_rows_are_not_enough(super().__sklearn_tags__())
        tags.target_tags.positive_only = True
        return tags


def _as_counts(name: str, y: np.ndarray, remark: str) -> np.ndarray:
    y = _as_numbers(name, y, remark)
    if (y < 0).any():
        raise ValueError(
            f"{name} must hold counts of at least 0, got {int((y < 0).sum())} negative values."
            f"{remark}"
        )
    return y


@_documented(
    own="""        classes: all labels, where public rows do not have them all. Without it they come
            from `y_public`, and without that from `y`: the report then says so.
""",
    fitted="""        classes_: labels in the order of `predict_proba`.
""",
)
class PrivateLogisticRegression(ClassifierMixin, _PrivateLinearModel):
    """Logistic regression under differential privacy: two classes, or more by softmax.

    Minimises log Σ_k e^{s_k} − s_y with scores s = Θᵀx + b (for two classes, one score). A private
    row whose label is not among the classes contributes nothing; it still counts in n. Labels that
    read as the same number (1, 1.0, "1") are one label.
    """

    classes_: np.ndarray

    def __init__(
        self,
        epsilon=1.0,
        delta=None,
        *,
        allow_large_delta=False,
        classes=None,
        fit_intercept=True,
        method="auto",
        num_steps="auto",
        l2_clip_norm="auto",
        learning_rate="auto",
        row_norm_bound=None,
        adjacency="zero-out",
        secure=False,
        random_state=None,
    ):
        super().__init__(
            epsilon, delta, allow_large_delta=allow_large_delta, fit_intercept=fit_intercept,
            method=method, num_steps=num_steps, l2_clip_norm=l2_clip_norm,
            learning_rate=learning_rate, row_norm_bound=row_norm_bound, adjacency=adjacency,
            secure=secure, random_state=random_state,
        )  # fmt: skip
        self.classes = classes

    def _encode(self, y, y_public):
        known = self.classes if self.classes is not None else y_public
        labels = y if known is None else np.asarray(known)
        if known is None and _is_mixed(y.tolist()):
            # Here all labels together decide what the classes are, which the report says.
            labels = np.asarray(y.tolist())
        # What defines the classes must be labels; elsewhere a number of any kind is no class.
        check_classification_targets(labels)
        self.classes_ = np.unique(labels)
        _check_distinct(self.classes_)
        if len(self.classes_) < 2:
            remark = f" {UNPROTECTED}" if known is None else ""
            raise ValueError(
                "a classifier needs at least two classes, got one class only: "
                f"{self.classes_.tolist()}. Pass classes= if there are others.{remark}"
            )
        targets, counts = self._one_hot(y)
        if not counts.all():
            warn(
                f"{UNPROTECTED} {int((~counts).sum())} private rows have a label that is not "
                f"among the classes {self.classes_.tolist()}; they contribute nothing.",
                UnprotectedWarning,
            )
        public_targets = prior = None
        if y_public is not None:
            public_targets, is_class = self._one_hot(y_public)
            if not is_class.all():
                raise ValueError(
                    f"y_public must hold labels out of classes={self.classes_.tolist()}, got "
                    f"{np.unique(y_public[~is_class])[:5].tolist()}. Extend classes=."
                )
            # One more row, shared by all classes: no class is impossible for being absent.
            prior = 1 / len(self.classes_)
        shown = ()
        if known is None:
            shown = ("the set of labels: taken from the private rows, it counted as public",)
        family = linear.LOGISTIC if len(self.classes_) == 2 else linear.MULTINOMIAL
        return _Problem(family, targets, public_targets, prior, counts, shown=shown)

    def _one_hot(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Targets, and which labels are classes at all."""
        index = _class_indices(self.classes_, y)
        is_class, index = index >= 0, np.maximum(index, 0)
        one_hot = np.eye(len(self.classes_))[index]
        return one_hot[:, 1:] if len(self.classes_) == 2 else one_hot, is_class

    def _decode(self, problem, coefficients, intercepts):
        return coefficients, intercepts

    def decision_function(self, X):
        """Scores: one column per class, or for two classes the log odds of the second."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X):
        """The probability of each class, in the order of `classes_`."""
        scores = self._scores(X)
        if len(self.classes_) == 2:
            scores = np.column_stack([np.zeros(len(scores)), scores[:, 0]])
        return linear.MULTINOMIAL.mean(scores)

    def predict(self, X):
        """The most probable class."""
        probabilities = self.predict_proba(X)
        return self.classes_[np.argmax(probabilities, axis=1)]

    def __sklearn_tags__(self):
        return _few_rows_are_not_enough(super().__sklearn_tags__())


def _class_indices(classes: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which class each label is, −1 where it is none; decided for each label by itself.

    An array has one dtype: one text among numbers makes NumPy write all of them as text, one
    fraction makes 1 a 1.0. Would that change which class the other labels are, one row decided over
    all others. So a label is the class that it equals, else the class that reads as the same
    number: 1, 1.0, True, "1" and "1.0" are one label.
    """
    known = {label: index for index, label in enumerate(classes.tolist())}
    by_number = {_as_number(label): index for label, index in known.items()}
    by_number.pop(None, None)

    def find(label: Any) -> int:
        if isinstance(label, bytes):
            label = label.decode("latin-1")
        return known.get(label, by_number.get(_as_number(label), -1))

    labels = y.tolist()
    found = {label: find(label) for label in set(labels)}
    return np.fromiter(map(found.__getitem__, labels), np.intp, len(labels))


def _check_distinct(classes: np.ndarray) -> None:
    """Refuses classes that are one and the same number once an array's dtype has changed."""
    read = map(_as_number, classes.tolist())
    numbers = [number for number in read if number is not None]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            "classes must differ as float64 numbers where they read as numbers, got two that do "
            "not, such as '1' and '1.0', or integers beyond 2**53. Give them other names."
        )


def _as_number(label: Any) -> complex | None:
    """A label as a number, if it reads as one; equal numbers of any type are equal here."""
    if label in ("True", "False"):
        return complex(label == "True")
    try:
        number = complex(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == number else None


def _few_rows_are_not_enough(tags):
    """scikit-learn's checks fit a few dozen rows, which no private estimator can fit well."""
    for kind in (tags.regressor_tags, tags.classifier_tags):
        if kind is not None:
            kind.poor_score = True
    return tags
