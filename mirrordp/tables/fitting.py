"""Models of tables: the functions behind `mirrordp fit` and `mirrordp predict`.

In: a private and a public file. Out: a `TableModel` (encoding, coefficients, privacy statement),
and its predictions for further tables. A model is stored as JSON, so that opening one runs no code.
The encoding follows from the public file; the coefficients come from `mirrordp.linear`.
Nothing else of the private file is kept, except its number of rows, which counts as public.
"""

import collections
import contextlib
import dataclasses
import filecmp
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dp_accounting import gaussian_mechanism

from mirrordp._warn import warn
from mirrordp.data import PrivateData, PublicData, UnprotectedWarning, refuse_private_rows
from mirrordp.data.sources import GatheredRows, computed_rows, is_on_disk, read_rows
from mirrordp.data.users import RowOwners
from mirrordp.mirror import families
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency
from mirrordp.report import RunReport, write_atomically
from mirrordp.spending import files as _files
from mirrordp.spending.budget import Budget, BudgetError
from mirrordp.spending.ledger import Ledger
from mirrordp.tables import (
    TASKS,
    ClassTarget,
    EncodedTable,
    NumberTarget,
    Table,
    TableEncoding,
    TableError,
    evaluation,
    learn_encoding,
    read_batches,
    read_table,
    write_table,
)
from mirrordp.tables.columns import MISSING, Tally, kinds_of_values
from mirrordp.tables.files import listed, mark, nearest
from mirrordp.tables.frames import is_frame, table_of
from mirrordp.tables.learning import target_names
from mirrordp.tables.rows import columns_of
from mirrordp.tables.scorers import SCORERS, LinearScorer, Scorer
from mirrordp.training.checkpoint import Checkpoint

MODEL_FILE = "model.json"
FORMAT = "mirrordp table model"
VERSION = 2
"""The version of model.json. Version 1 knew linear models alone."""
MODELS = ("auto", "linear", "trees", "network")
"""The kinds of models that can be asked for."""
MIN_PUBLIC_ROWS = 10
"""The smallest number of public rows, since fewer do not determine a scale."""

CEILING_SHOWN = "the scores on test rows of a model without protection, on the operator's terminal"

ROWS_IN_MEMORY = 2**28
"""The number of bytes that encoded private rows may take in memory; more are kept on disk."""

Stage = Callable[[str], contextlib.AbstractContextManager[Callable[[str], object]]]
"""A function that takes a description of a stage and returns a context to run it in. The context
gives a function that takes how far the stage is."""


def _silent(doing: str) -> contextlib.AbstractContextManager[Callable[[str], object]]:
    del doing
    return contextlib.nullcontext(lambda _: None)


@dataclasses.dataclass(frozen=True, eq=False)
class TableModel:
    """A model of table rows; `mirrordp.load_model(folder)` reads what `mirrordp fit` wrote.

    Attributes:
        task: one of `mirrordp.tables.TASKS`.
        encoding: the rules by which rows become features.
        scorer: the function from features to scores. Classification has one score per class, except
            that two classes share a single one. Ordinal regression has one per threshold between
            two classes, regression one per target.
        privacy: the statement of the run, as in report.json.
    """

    task: str
    encoding: TableEncoding
    scorer: Scorer
    privacy: Mapping[str, Any]

    def __post_init__(self):
        target, targets = self.encoding.target, self.encoding.targets
        if self.task in ("classification", "ordinal"):
            classes = len(target.classes) if isinstance(target, ClassTarget) else 0
            outputs = classes - 1 if classes == 2 or self.task == "ordinal" else classes
        else:
            matches = self.task in TASKS and all(
                isinstance(one, NumberTarget) and one.is_count == (self.task == "count")
                for one in targets
            )
            outputs = len(targets) if matches else 0
        shape = (outputs, len(self.encoding.features))
        too_many = len(targets) > 1 and self.task != "regression"
        if outputs < 1 or too_many or self.scorer.shape != shape:
            raise ValueError(f"expected {shape} outputs and features of a {self.task} model")

    @property
    def coefficients(self) -> np.ndarray:
        """The coefficients of a linear model, of shape (outputs, features)."""
        return self._linear.coefficients

    @property
    def intercepts(self) -> np.ndarray:
        """The intercepts of a linear model, of shape (outputs,)."""
        return self._linear.intercepts

    @property
    def _linear(self) -> LinearScorer:
        if not isinstance(self.scorer, LinearScorer):
            raise TypeError(f"only a linear model has coefficients, got {self.scorer.kind}.")
        return self.scorer

    def predict(self, rows: Any, tallies: dict[str, Tally] | None = None) -> dict[str, np.ndarray]:
        """Returns columns: the expected value, or the class and every class's probability.

        Args:
            rows: a data frame of pandas or polars, a dictionary of columns, or a `Table`. Columns
                that the model does not know are ignored, the target among them.
            tallies: see `TableEncoding.encode_features`.

        Returns:
            A dictionary with the array "prediction" and, for classes, one array "probability of
            ..." for each; of several targets, one array "prediction of ..." for each.
            `pandas.DataFrame(...)` makes a frame of it.

        Raises:
            TableError: if a column is missing or of another type.
        """
        table = as_table(rows)
        return self.predictions(self.encoding.encode_features(table, tallies))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the scores: a class, or a target."""
        target = self.encoding.target
        if not isinstance(target, ClassTarget):
            return tuple(one.name for one in self.encoding.targets)
        if self.task == "ordinal":
            return tuple(f"above {name}" for name in target.classes[:-1])
        return target.classes[1:] if len(target.classes) == 2 else target.classes

    def expected(self, features: np.ndarray) -> np.ndarray:
        """Returns the expected value of each encoded row, or the probability of each class.

        Several targets have the shape (rows, targets), classes (rows, classes), a number (rows,).
        """
        scores, target = self.scorer(features), self.encoding.target
        if self.task == "ordinal":
            return families.ordered_probabilities(scores)
        if isinstance(target, ClassTarget):
            return families.class_probabilities(scores)
        means = (families.POISSON if target.is_count else families.SQUARED_ERROR).mean(scores)
        return means if self.encoding.further_targets else means[:, 0]

    def predictions(self, features: np.ndarray) -> dict[str, np.ndarray]:
        """Returns what `predict` does, for rows that are already encoded."""
        shares, target = self.expected(features), self.encoding.target
        if self.encoding.further_targets:
            names = (f"prediction of {one.name}" for one in self.encoding.targets)
            return dict(zip(names, shares.T, strict=True))
        if isinstance(target, NumberTarget):
            return {"prediction": shares}
        columns = {"prediction": np.array(target.classes)[shares.argmax(axis=1)]}
        return columns | {
            f"probability of {name}": shares[:, index] for index, name in enumerate(target.classes)
        }

    def to_json(self) -> str:
        """Returns JSON text, which ends with a checksum of the rest."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "task": self.task,
            "encoding": self.encoding.to_dict(),
            "features": list(self.encoding.features),
            "scorer": {"kind": self.scorer.kind, **self.scorer.to_dict()},
            "privacy": dict(self.privacy),
        }
        content["sha256"] = _checksum(content)
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> "TableModel":
        """Inverts `to_json`.

        Args:
            text: the text that `to_json` returned.
            source: the origin of the text, for messages.

        Raises:
            TableError: if it is anything else, or was changed or cut.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise TableError(
                f"expected a model written by mirrordp fit, got something else in {source!r}; "
                "check the path, or fit again."
            )
        if content.get("version") not in range(1, VERSION + 1):
            raise TableError(
                f"expected a model file of version 1 to {VERSION}, got version "
                f"{content.get('version')!r} in {source!r}; use the mirrordp that wrote it."
            )
        damaged = TableError(
            f"expected an intact model file, got changed or missing parts in {source!r}; restore "
            "it from a copy, or fit again."
        )
        if content.pop("sha256", None) != _checksum(content):
            raise damaged
        try:
            stored = content["scorer"] if content["version"] > 1 else {"kind": "linear", **content}
            return cls(
                task=content["task"],
                encoding=TableEncoding.from_dict(content["encoding"]),
                scorer=SCORERS[stored["kind"]].from_dict(stored),
                privacy=dict(content["privacy"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise damaged from None

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "TableModel":
        """Reads the model from a folder that `mirrordp fit` or `FittedTable.write` made.

        This runs no code of the file, and `predict` needs nothing but the model.

        Args:
            folder: the folder with model.json, `--out` of `mirrordp fit`.

        Raises:
            TableError: if there is none, or it was changed or cut.
        """
        path = Path(folder) / MODEL_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            raise TableError(
                f"expected a folder with {MODEL_FILE} as written by mirrordp fit, got "
                f"{str(folder)!r} ({error.strerror}); check the path."
            ) from None
        return cls.from_json(text, str(path))


def load_model(folder: str | os.PathLike[str]) -> TableModel:
    """Reads the model that `mirrordp fit` wrote into a folder.

    This runs no code of the folder, and `predict` needs nothing but the model:

        model = mirrordp.load_model("model")
        model.predict(frame)["prediction"]

    Args:
        folder: the folder, `--out` of `mirrordp fit`.

    Raises:
        TableError: if it holds no model, or the model was changed or cut.
    """
    return TableModel.load(folder)


def as_table(rows: Any) -> Table:
    """Returns a data frame of pandas or polars, or a dictionary of columns, as a `Table`.

    Raises:
        TableError: if it is something else, or a cell cannot be read.
    """
    if isinstance(rows, Table):
        return rows
    try:
        if is_frame(rows):
            return table_of(rows, "the rows", private=False).table
        return Table("the rows", columns_of(rows))
    except ValueError as error:
        raise TableError(str(error)) from None


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class FittedTable:
    """A fitted model.

    Attributes:
        model: the model.
        report: its privacy report.
        left_out: the columns that were left out because of the public table, with the reason.
        unprotected_cells: by column, how many private cells the public table does not cover. Not
            covered by the guarantee, so for the operator only.
        unprotected_ceiling: how well models that are fitted without protection do on test rows, by
            name of the model, if that was asked for. Not covered by the guarantee either.
    """

    model: TableModel
    report: RunReport
    left_out: Mapping[str, str]
    unprotected_cells: Mapping[str, str]
    unprotected_ceiling: Mapping[str, Mapping[str, evaluation.Measured]] | None = None

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Makes the folder with model.json, report.json and privacy_card.md in one step.

        Raises:
            TableError: see `check_new_folder`.
        """
        folder = Path(folder)
        check_new_folder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The three files appear together, so that a crash leaves no model without its card.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as parent:
            complete = Path(parent) / folder.name
            self.report.write(complete)
            write_atomically(complete / MODEL_FILE, self.model.to_json().encode())
            os.replace(complete, folder)
            _files.sync_folder(folder.parent)


def check_new_folder(folder: str | os.PathLike[str]) -> None:
    """Raises a TableError unless the folder is new or empty and can be made; does not make it."""
    folder = Path(folder)
    problem = None
    if folder.is_dir():
        if any(folder.iterdir()):
            problem = "it is not empty"
    elif folder.exists() or folder.is_symlink():
        problem = "it is not a folder"
    existing = folder.absolute().parent
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        problem = "no folder can be made there"
    if problem is not None:
        raise TableError(
            f"expected --out to be a new or empty folder, got {str(folder)!r} ({problem}); choose "
            "another."
        )


def fit_files(
    private: str | os.PathLike[str],
    public: str | os.PathLike[str],
    *,
    target: str | Sequence[str],
    task: str,
    epsilon: float,
    delta: float | None = None,
    allow_large_delta: bool = False,
    user: str | None = None,
    model: str = "auto",
    method: str = "auto",
    learning_rate: float | str = "auto",
    guard: bool = False,
    secure: bool = False,
    seed: int | None = None,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
    decimal: str = ".",
    thousands: str = "",
    test: str | os.PathLike[str] | None = None,
    ceiling: bool = False,
    spend: Ledger | Budget | None = None,
    data_changed: bool = False,
    checkpoint: Checkpoint | None = None,
    memory: float = ROWS_IN_MEMORY,
    stage: Stage = _silent,
) -> FittedTable:
    """Fits a model to the private file under (ε, δ)-differential privacy.

    All checks come before the mechanism reads the private rows, so that an error spends nothing.
    The private file is read in batches. Rows that would take too much memory are kept on disk, and
    the model is the same, to the bit.

    Args:
        private: the CSV or Parquet file whose rows are protected; each row is one unit, unless
            `user` is given.
        public: a CSV or Parquet file with the same columns that anyone may know.
        target: the column to predict, or several for regression, which one guarantee covers.
        task: one of `mirrordp.tables.TASKS`.
        epsilon: ε.
        delta: δ. The default is that of the budget or, without a budget, one that follows from the
            number of rows or users (`accounting.default_delta`).
        allow_large_delta: whether to accept a δ above one over the number of private rows or users.
        user: the column that names the owner of each private row, to protect users instead of rows.
            One row of each is used: `mirrordp.data.one_row_per_user` chooses among those with a
            target, if there are any. No feature is made of the column, and the public file may lack
            it. Its cells are text as it is written, so that 7 and 7.0 are two users, or the numbers
            of a Parquet file.
        model: "linear", "trees" (values of cells of one or two columns), "network" (a small one),
            or "auto": the one that a rehearsal on public rows prefers. `method`, `learning_rate`
            and `guard` are settings of linear models, and "auto" is linear if one of them is
            given. So is every ordinal model.
        method: "exact" (mirror descent), "dpsgd" (warm DP-SGD), or "auto"; see the estimators.
        learning_rate: η of the descent, or "auto".
        guard: whether to test the linear model privately against that of the public rows, which
            takes the place of a model that private rows do not fit better.
        secure: whether the noise comes from a cryptographic generator; see the estimators.
        seed: makes the run reproducible and unfit for release; None for a run to release.
        categorical: columns whose numbers are codes of categories.
        ignore: columns to leave out.
        decimal: what stands before the fraction of a number in all files, "." or ",".
        thousands: what stands between groups of three digits; nothing by default.
        test: a CSV or Parquet file of further rows that need no protection. The report states how
            well the model does on them, beside the model of the public rows alone and a guess.
        ceiling: whether to fit without protection too, to see on test rows what protection costs:
            a linear model and, if the model is not linear, scikit-learn's gradient boosting. Their
            scores are for the operator only and are not in the report, which says that they were
            shown.
        spend: the budget or ledger that the fit is charged to, under its adjacency. A budget that
            has no room for the run refuses it before any file is read.
        data_changed: acknowledges that the budget was made for another private file.
        checkpoint: keeps the randomness, so that a fit that was interrupted can be resumed.
        memory: the largest number of bytes that private rows may take in memory, as float64. More
            are kept in unnamed temporary files (in TMPDIR), as is what is computed from them.
        stage: wraps each stage of the work in a context, for example to report progress.

    Raises:
        StorageError: if the budget does not admit the run, or it cannot be resumed.
        TableError: if the files do not fit the task or each other.
    """
    private, public = Path(private), Path(public)
    if ceiling and test is None:
        raise TableError("expected --test with --ceiling, got none; add test rows.")
    kind, settings = _kind(task, model, method, learning_rate, guard)
    names = target_names(target, task)
    if user in (*names, *categorical):
        raise TableError(
            f"expected a column of its own that names the users, got {user!r}, which is also the "
            "target or declared categorical; leave one of them out."
        )
    unit = "example" if user is None else "user"
    ignore = (*ignore,) if user is None else (*ignore, user)
    if _same_content(private, public):
        raise TableError(
            f"expected two different files, got {str(private)!r} as private and as public table; "
            "calling private rows public does not make them public."
        )
    adjacency = Adjacency.ZERO_OUT if spend is None else _adjacency_of(spend, unit)
    budget = spend if isinstance(spend, Budget) else None
    if budget is not None:
        delta = budget.status.delta if delta is None else delta
        # A resumed run may have been charged already; the rest is admitted later.
        if checkpoint is None or not checkpoint.resume:
            _require_room(budget, epsilon, delta)
        if not data_changed:
            with stage(f"comparing {private} with the data of the budget"):
                budget.check_data(private)
    with stage(f"reading {public}"):
        table = read_table(public)
        learned = learn_encoding(
            table,
            target=names,
            task=task,
            categorical=categorical,
            ignore=ignore,
            decimal=decimal,
            thousands=thousands,
        )
        encoding = learned.encoding
        known = encoding.encode([table], private=False)
    usable = ~known.unusable
    if np.count_nonzero(usable) < MIN_PUBLIC_ROWS:
        raise TableError(
            f"expected at least {MIN_PUBLIC_ROWS} rows with a target in the public table "
            f"{str(public)!r}, got {np.count_nonzero(usable)}; add public rows."
        )
    rows_to_judge_by = None
    if test is not None:
        rows_to_judge_by = _read_test(encoding, Path(test), private, public)
    with stage(f"reading {private}") as note:
        if user is None:
            compared, rows = None, None
            batches = _counted(read_batches(private, private=True), note)
        else:
            owners, compared = _rows_of_users(private, user, encoding, memory)
            rows = owners.one_row_each(~compared.unusable)
            batches = _rows_of(private, user, owners, rows)
        secret = encoding.encode(
            _mention_unused(batches, table, ignore, user),
            private=True,
            memory=memory,
            kinds=kinds_of_values(table.columns),
        )
    if rows is not None:
        secret = _in_order(secret, rows, ", ".join(names), memory)
    compared = secret if compared is None else compared
    if rows_to_judge_by is not None:
        test_x, test_y = rows_to_judge_by
        refuse_private_rows(
            PrivateData({"x": compared.features, "y": compared.target}),
            PublicData({"x": test_x, "y": test_y}),
            "test rows",
        )
    if user is not None:
        # The estimator compares public rows with the chosen ones alone.
        refuse_private_rows(
            PrivateData({"x": compared.features, "y": compared.target}),
            PublicData({"x": known.features[usable], "y": known.target[usable]}),
        )
        if spend is not None:
            (spend.ledger if isinstance(spend, Budget) else spend).require_users(user)
    del compared
    if ceiling and is_on_disk(secret.features):
        raise TableError(
            f"expected private rows that fit in memory for --ceiling, got {len(secret.features)} "
            "rows, which are kept on disk; leave --ceiling out."
        )
    if budget is not None and data_changed:
        # Whatever was compared before the file was read, the estimator compares once more.
        with stage(f"comparing {private} with the data of the budget"):
            budget.check_data(private, data_changed=True)
    from mirrordp.linear._noting import told

    rows = "rows" if user is None else "users, a row each,"
    doing = f"training on {len(secret.features)} {rows} of {len(encoding.features)} features"
    with stage(doing) as note, told(note):
        estimator = _estimator(
            task,
            kind,
            encoding,
            epsilon=epsilon,
            delta=delta,
            allow_large_delta=allow_large_delta,
            adjacency=adjacency.value,
            unit=unit,
            secure=secure,
            random_state=seed,
            **settings,
        )
        try:
            estimator.fit(
                secret.features,
                secret.target,
                X_public=known.features[usable],
                y_public=known.target[usable],
                counts=computed_rows(np.logical_not, secret.unusable),
                spend=spend,
                checkpoint=checkpoint,
            )
        except BudgetError as error:
            # Only a network costs more than the room that was asked for above.
            raise error.advising("Lower --epsilon, use --model linear or trees") from None
    scorer, public_scorer = _scorers(estimator)
    fitted = TableModel(task=task, encoding=encoding, scorer=scorer, privacy={})
    results = {
        **estimator.privacy_.results,
        "task": task,
        "target": ", ".join(names),
        "model": scorer.kind,
    }
    if (rehearsal := getattr(estimator, "rehearsal_", None)) is not None:
        results["rehearsal"] = {
            "measure": rehearsal.measure,
            "models": dict(rehearsal.values),
            "reason": rehearsal.reason,
        }
    if isinstance(scorer, LinearScorer):
        results["coefficients"] = evaluation.largest_effects(
            encoding,
            fitted.outputs,
            scorer.coefficients,
            estimator.noise_root_,
            classes_share_constant=task == "classification",
        )
    shown, unprotected = estimator.privacy_.shown_without_protection, None
    if rows_to_judge_by is not None:
        test_x, test_y = rows_to_judge_by
        public_model = dataclasses.replace(fitted, scorer=public_scorer)
        guess = evaluation.guess(encoding.target, known.target[usable], len(test_y))
        results |= evaluation.evaluate(
            encoding.targets,
            test_y,
            {
                evaluation.MODEL: fitted.expected(test_x),
                evaluation.PUBLIC: public_model.expected(test_x),
                evaluation.GUESS: guess,
            },
        )
        if ceiling:
            with stage("fitting a model without protection"):
                unprotected = _ceiling_if_any(fitted, secret, known, test_x, test_y)
            shown = (*shown, CEILING_SHOWN)
    report = dataclasses.replace(
        estimator.privacy_,
        tuning=_tuning(estimator.privacy_.tuning, model),
        title=f"{task} of {listed(names)} from {len(encoding.columns)} columns of a table"
        + (f", one row of each {user!r}" if user is not None else ""),
        results=results,
        shown_without_protection=shown,
    )
    fitted = dataclasses.replace(fitted, privacy=report.to_dict())
    left_out = {
        name: "it names the users" if name == user else reason
        for name, reason in learned.left_out.items()
    }
    return FittedTable(fitted, report, left_out, secret.unfamiliar, unprotected)


def _kind(
    task: str, model: str, method: str, learning_rate: float | str, guard: bool
) -> tuple[str, dict[str, Any]]:
    """Returns the kind of model to fit, and the settings that only linear ones have."""
    settings = {"method": method, "learning_rate": learning_rate, "guard": guard}
    given = [name for name, value in settings.items() if value not in ("auto", False)]
    if model not in MODELS:
        raise TableError(f"expected --model {listed(MODELS)}, got {model!r}; choose one.")
    if model in ("trees", "network"):
        if given or task == "ordinal":
            what = f"--{given[0].replace('_', '-')}" if given else "--task ordinal"
            raise TableError(
                f"expected {what} with a linear model, got --model {model}; leave one of them out."
            )
        return model, {}
    if model == "linear" or given or task == "ordinal":
        return "linear", settings
    return "auto", {}


def _tuning(found: str, model: str) -> str:
    """Adds that the caller chose the kind of model, which may have followed from private rows."""
    known = "given by the caller, and how they were chosen is not known"
    if model == "auto" or found.startswith("charged"):
        return found
    if known in found:
        return found.replace("not charged: ", "not charged: model, ", 1)
    return "not charged: model: given by the caller, and how it was chosen is not known"


def _scorers(estimator: Any) -> tuple[Scorer, Scorer]:
    """Returns the fitted model, and that of the public rows alone."""
    if hasattr(estimator, "scorer_"):
        return estimator.scorer_, estimator.public_scorer_
    return (
        _linear(estimator.coef_, estimator.intercept_),
        _linear(estimator.public_coef_, estimator.public_intercept_),
    )


def _linear(coefficients: np.ndarray, intercepts: Any) -> LinearScorer:
    return LinearScorer(np.atleast_2d(coefficients), np.atleast_1d(intercepts))


def _ceiling_if_any(
    model: TableModel,
    secret: EncodedTable,
    known: EncodedTable,
    test_x: np.ndarray,
    test_y: np.ndarray,
) -> dict[str, dict[str, evaluation.Measured]] | None:
    """Returns the ceiling, or None where rows are too extreme for models without protection."""
    try:
        # What libraries say of private numbers here would look like a message that may be shown.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _ceiling(model, secret, known, test_x, test_y)
    except (ArithmeticError, ValueError, np.linalg.LinAlgError) as error:
        warn(
            f"{mark(True)}no model could be fitted without protection ({error}), so there is no "
            "ceiling. The private model is not affected.",
            UserWarning,
        )
        return None


def _ceiling(
    model: TableModel,
    secret: EncodedTable,
    known: EncodedTable,
    test_x: np.ndarray,
    test_y: np.ndarray,
) -> dict[str, dict[str, evaluation.Measured]]:
    """Returns how well models would do without protection. Not covered by any guarantee."""
    parts = [
        (rows.features[~rows.unusable], rows.target[~rows.unusable]) for rows in (secret, known)
    ]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    targets = model.encoding.targets
    scorer = _linear(*evaluation.fit_without_protection(model.task, targets[0], x, y))
    found = {"a linear model": dataclasses.replace(model, scorer=scorer).expected(test_x)}
    if not isinstance(model.scorer, LinearScorer):
        boosted = evaluation.boost_without_protection(targets, x, y, test_x)
        found["gradient boosting"] = boosted
    return {
        name: evaluation.measure_all(targets, test_y, predicted)
        for name, predicted in found.items()
    }


def _mention_unused(
    batches: Iterable[Table], public: Table, ignore: Sequence[str], user: str | None
) -> Iterator[Table]:
    """Warns of columns that are not used, once the first batch was found to fit.

    A name to ignore that neither table has is refused: the column that was meant would be used.
    """
    for number, batch in enumerate(batches):
        present = {*public.columns, *public.unreadable, *batch.columns, *batch.unreadable}
        for name in ignore:
            if name not in present:
                raise TableError(
                    f"expected column {name!r} to ignore in the public or the private table, got "
                    f"it in neither{nearest(name, public.columns)}; check the name."
                )
        yield batch
        known = {*public.columns, *public.unreadable, *ignore}
        unused = [name for name in (*batch.columns, *batch.unreadable) if name not in known]
        if number == 0 and unused:
            warn(
                f"{mark(True)}column{'s' * (len(unused) > 1)} {listed(unused)} of {batch.source!r} "
                f"{'are' if len(unused) > 1 else 'is'} not in the public table and cannot be used; "
                "add the columns to use to the public table."
                + (" If one says whose a row is, protect persons with --user." * (user is None)),
                UnprotectedWarning,
            )


def _counted(batches: Iterable[Table], note: Callable[[str], object]) -> Iterator[Table]:
    """Notes how many rows were read. Fits have an adjacency under which their number is public."""
    rows = 0
    for batch in batches:
        yield batch
        rows += len(batch)
        note(f"{rows:,} rows")


def _rows_of_users(
    path: Path, user: str, encoding: TableEncoding, memory: float
) -> tuple[RowOwners, EncodedTable]:
    """Returns the owners of all rows, and all rows as they are, not judged.

    How many rows there are is secret if users are protected.
    """
    owners = RowOwners()

    def noted() -> Iterator[Table]:
        for batch in read_batches(path, private=True, names=user):
            owners.append(_names_in(batch, user))
            yield batch

    table = encoding.encode(noted(), private=True, memory=memory, judged=False)
    if owners.missing:
        raise TableError(
            f"{mark(True)}expected a user in column {user!r} for every row of {str(path)!r}, got "
            f"{owners.missing} rows without one (an empty cell, or a word for missing such as NA); "
            "leave such rows out."
        )
    return owners, table


def _names_in(batch: Table, user: str) -> list[Any]:
    if user not in batch.columns:
        got = batch.unreadable.get(user, f"no such column{nearest(user, batch.columns)}")
        raise TableError(
            f"{mark(True)}expected text or numbers that name the users in column {user!r} of "
            f"{batch.source!r}, got {got}; check the name, or convert the column."
        )
    cells: Iterable[Any] = batch.columns[user]
    return [None if isinstance(c, str) and c.strip() in MISSING else c for c in cells]


def _rows_of(path: Path, user: str, owners: RowOwners, rows: np.ndarray) -> Iterator[Table]:
    """Yields the chosen rows in the order of the file, which must be what it was.

    What is refused and what is warned of follows from them alone: a user with many rows has one.
    """
    again, start = RowOwners(), 0
    rows = np.sort(rows)
    for batch in read_batches(path, private=True, names=user):
        again.append(_names_in(batch, user))
        first, last = np.searchsorted(rows, (start, start + len(batch)))
        keep = np.zeros(len(batch), bool)
        keep[rows[first:last] - start] = True
        start += len(batch)
        if keep.any():
            yield batch.rows(keep)
    if again != owners:
        raise TableError(
            f"expected {str(path)!r} to stay as it is while it is read, got another one; run the "
            "command again."
        )


def _in_order(table: EncodedTable, rows: np.ndarray, target: str, memory: float) -> EncodedTable:
    """Returns rows that were read in the order of the file in the order of `rows`."""
    places = np.argsort(np.argsort(rows))
    found = GatheredRows(memory, expected=len(rows))
    for start in range(0, len(rows), 2**14):
        some = places[start : start + 2**14]
        found.append(*read_rows([table.features, table.target, table.unusable], some))
    features, targets, unusable = found.finish()
    unfamiliar = dict(table.unfamiliar)
    if target in unfamiliar:
        unfamiliar[target] = unfamiliar[target].replace(" rows ", " users ", 1)
    return EncodedTable(features, targets, unusable, unfamiliar)


def _same_content(one: Path, other: Path) -> bool:
    """Returns whether two paths are the same file, or copies of each other."""
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False


def _read_test(
    encoding: TableEncoding, test: Path, private: Path, public: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and targets of the test rows."""
    if _same_content(public, test):
        raise TableError(
            f"expected test rows that the model does not see, got the public table "
            f"{str(public)!r}, which it learns from; pass other rows."
        )
    if _same_content(private, test):
        raise TableError(
            f"expected test rows that need no protection, got the private table {str(private)!r}; "
            "a score on private rows must not be released."
        )
    rows = encoding.encode([read_table(test)], private=False)
    return rows.features[~rows.unusable], rows.target[~rows.unusable]


def _adjacency_of(spend: Ledger | Budget, unit: str) -> Adjacency:
    found = spend.unit if isinstance(spend, Budget) else unit
    if found != unit or not spend.adjacency.num_examples_is_public:
        what = "rows" if unit == "example" else "users"
        advice = "add --user COLUMN, or " if (unit, found) == ("example", "user") else ""
        raise TableError(
            f"expected a budget for {what} whose number is public (unit {unit}, adjacency zero-out "
            f"or replace), got unit {found}, adjacency {spend.adjacency.value}, to which this fit "
            f"cannot be charged; {advice}make a separate budget for it (mirrordp budget init "
            f"--unit {unit}). What the two promise to a row adds up."
        )
    return spend.adjacency


def _require_room(budget: Budget, epsilon: float, delta: float) -> None:
    """Raises unless a fit at (ε, δ) is within the budget.

    Linear models and trees never spend more than the one Gaussian mechanism that has exactly
    (ε, δ), which is known before any file is read. A network may: the budget decides again once
    its mechanism is planned.
    """
    noise = gaussian_mechanism.get_sigma_gaussian(epsilon, delta)
    event = accounting.full_batch_event(budget.adjacency.distance * noise, num_steps=1)
    try:
        budget.admit_event(event, delta=delta)
    except BudgetError as error:
        raise error.advising(f"Lower --epsilon to at most {error.room:g}") from None


def _estimator(task: str, kind: str, encoding: TableEncoding, **options: Any) -> Any:
    from mirrordp.linear import estimators, nonlinear

    if kind != "linear":
        name = {"regression": "Regressor", "classification": "Classifier"}.get(
            task, "PoissonRegressor"
        )
        return getattr(nonlinear, f"Private{kind.title()}{name}")(groups=encoding.groups, **options)
    return {
        "regression": estimators.PrivateLinearRegression,
        "classification": estimators.PrivateLogisticRegression,
        "count": estimators.PrivatePoissonRegressor,
        "ordinal": estimators.PrivateOrdinalRegression,
    }[task](**options)


class Predicted(NamedTuple):
    """What `predict_file` did.

    Attributes:
        num_rows: the number of predictions.
        unfamiliar: by column, how many cells the public table does not cover, and what became of
            them.
    """

    num_rows: int
    unfamiliar: Mapping[str, str]


def predict_file(
    model: TableModel,
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    keep: Sequence[str] = (),
    stage: Stage = _silent,
) -> Predicted:
    """Writes a prediction for each row of a table.

    Args:
        model: the model.
        source: a CSV or Parquet file with the feature columns; other columns are ignored.
        output: the file to write, Parquet if its name ends in .parquet, else CSV.
        keep: columns of the source to copy in front of the predictions, such as an identifier.
        stage: wraps each stage of the work in a context, for example to report progress.

    Raises:
        TableError: if the table does not fit the model or a file cannot be read or written.
    """
    source, output = Path(source), Path(output)
    with contextlib.suppress(OSError):
        if os.path.samefile(source, output):
            raise TableError(
                f"expected --output to be another file than --input, got {str(source)!r} twice; "
                "choose another name."
            )
    columns: dict[str, list[Any]] = {}
    tallies: dict[str, Tally] = collections.defaultdict(Tally)
    with stage(f"predicting for {source}"):
        for table in read_batches(source):
            missing = [name for name in keep if name not in table.columns]
            if missing:
                raise TableError(
                    f"expected column {missing[0]!r} to keep in {str(source)!r}, got no such "
                    f"column{nearest(missing[0], table.columns)}; check the name."
                )
            predicted = model.predict(table, tallies)
            both = [name for name in keep if name in predicted]
            if both:
                raise TableError(
                    f"expected columns to keep that have other names than predictions, got "
                    f"{both[0]!r}; rename that column of {str(source)!r}."
                )
            found = {name: table.columns[name] for name in keep} | predicted
            for name, values in found.items():
                plain = values.tolist() if isinstance(values, np.ndarray) else values
                columns.setdefault(name, []).extend(plain)
        model.encoding.judge(tallies, str(source), private=False)
    with stage(f"writing {output}"):
        _write_whole(output, columns)
    num_rows = max(map(len, columns.values()))
    return Predicted(num_rows, model.encoding.unfamiliar(tallies))


def _write_whole(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes a table through a temporary file beside it, so that it is never seen half-written."""
    # A rename of the link itself would replace it by an ordinary file.
    path = Path(os.path.realpath(path))
    try:
        _files.check_replaceable(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            temporary = Path(folder) / path.name
            write_table(temporary, columns)
            os.replace(temporary, path)
    except OSError as error:
        raise TableError(
            f"expected an output file that can be written, got {str(path)!r} ({error.strerror}); "
            "choose another."
        ) from None
