"""`mirrordp fit` and `mirrordp predict`."""

import argparse
import contextlib
import json
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mirrordp._warn import warn
from mirrordp.cli._common import (
    UsageError,
    add_command,
    check_epsilon,
    counted,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    seed,
    sentence,
    table_errors,
    told_on_interruption,
)
from mirrordp.privacy.secure import require_cryptography
from mirrordp.report import NOT_FOR_RELEASE, RunReport, percent_upwards, upwards
from mirrordp.spending.budget import Budget
from mirrordp.spending.files import HAS_LOCKS
from mirrordp.tables import TASKS, fitting as tabular
from mirrordp.training.checkpoint import (
    Checkpoint,
    checkpoint_files,
    is_unfinished,
    remove_checkpoints,
)

RUN_SUFFIX = ".run"
_TABLE = "CSV or Parquet"


def add_table_commands(commands: Any) -> None:
    """Registers both."""
    _add_fit(commands)
    _add_predict(commands)


def _add_fit(commands: Any) -> None:
    fit = add_command(
        commands,
        "fit",
        _fit,
        "a linear model of a private table, with the help of a public one",
        "example: mirrordp fit --private a.csv --public b.csv --target y --task regression "
        "--epsilon 1 --delta 1e-5 --out model",
    )
    for name, summary in (
        ("--private", f"{_TABLE}; every row is protected"),
        ("--public", f"{_TABLE} with the same columns; types, categories and scales come from it"),
    ):
        fit.add_argument(name, type=Path, required=True, metavar="FILE", help=summary)
    fit.add_argument("--target", required=True, metavar="COLUMN", help="the column to predict")
    fit.add_argument(
        "--task",
        type=one_of(*TASKS),
        required=True,
        metavar=f"{{{','.join(TASKS)}}}",
        help="what the target is: a number, a class, or a count",
    )
    fit.add_argument(
        "--epsilon", type=positive, required=True, metavar="E", help="epsilon of this run"
    )
    fit.add_argument(
        "--delta",
        type=open_unit_interval,
        metavar="D",
        help="delta, well below one over the number of private rows N (default: that of the "
        "budget; without one, 1/(10 N) rounded down to a power of ten, and at most 1e-05)",
    )
    fit.add_argument(
        "--allow-large-delta",
        action="store_true",
        help="take a delta above 1/N, at which publishing one row at random would pass",
    )
    fit.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="new folder for model.json, report.json and privacy_card.md",
    )
    for name, summary in (
        ("--categorical", "its numbers are codes of categories; may be repeated"),
        ("--ignore", "leave it out, as for an identifier; may be repeated"),
    ):
        fit.add_argument(name, action="append", default=[], metavar="COLUMN", help=summary)
    fit.add_argument(
        "--test",
        type=Path,
        metavar="FILE",
        help=f"{_TABLE}; further rows that need no protection, to judge the model by",
    )
    fit.add_argument(
        "--secure",
        action="store_true",
        help="noise from a cryptographic generator, exact on a lattice, for models to release "
        "(needs pip install 'mirrordp[secure]'); such a run cannot be repeated or resumed",
    )
    fit.add_argument(
        "--seed", type=seed, metavar="N", help="for a run that can be repeated: not for release"
    )
    fit.add_argument(
        "--budget",
        type=Path,
        metavar="BUDGET",
        help="charge to this budget (see 'mirrordp budget --help'); refused if it does not fit",
    )
    fit.add_argument(
        "--data-changed",
        action="store_true",
        help="the private file was changed: go on with what is left of the same budget",
    )
    fit.add_argument(
        "--resume",
        action="store_true",
        help="finish a run that was cut off; give the options that it began with",
    )
    fit.add_argument(
        "--wait",
        type=positive,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for another process on the same budget (default: not at all)",
    )
    fit.add_argument(
        "--keep-checkpoint",
        action="store_true",
        help=f"keep OUT{RUN_SUFFIX}, which is secret: who has it can subtract the noise",
    )
    fit.add_argument("--json", action="store_true", help="print one JSON object")


def _add_predict(commands: Any) -> None:
    predict = add_command(
        commands,
        "predict",
        _predict,
        "predictions of a fitted model for a table",
        "example: mirrordp predict --model model --input c.csv --output d.csv",
    )
    for name, metavar, summary in (
        ("--model", "DIR", "the folder that fit made"),
        ("--input", "FILE", _TABLE),
        ("--output", "FILE", "Parquet where the name ends in .parquet, else CSV"),
    ):
        predict.add_argument(name, type=Path, required=True, metavar=metavar, help=summary)
    predict.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="copy this column of the input into the output; may be repeated",
    )
    predict.add_argument("--json", action="store_true", help="print one JSON object")


def _fit(arguments: argparse.Namespace) -> int:
    check_epsilon(arguments.epsilon)
    _check_secure(arguments)
    began = time.perf_counter()
    out, run_folder = arguments.out, _run_folder(arguments.out)
    with table_errors(), _resumable(arguments, run_folder) as charged_to:
        if arguments.resume and (out / tabular.MODEL_FILE).exists():
            return _already_finished(arguments, run_folder)
        tabular.check_new_folder(out)
        _check_run_folder(arguments, run_folder)
        if arguments.data_changed and arguments.budget is None:
            raise UsageError("expected --budget with --data-changed, got none; leave it out.")
        with contextlib.ExitStack() as stack:
            budget = None
            if arguments.budget is not None:
                budget = stack.enter_context(Budget.open(arguments.budget, wait=arguments.wait))
                charged_to.append((budget, budget.status.charges))
            fitted = tabular.fit_files(
                arguments.private,
                arguments.public,
                target=arguments.target,
                task=arguments.task,
                epsilon=arguments.epsilon,
                delta=arguments.delta,
                allow_large_delta=arguments.allow_large_delta,
                secure=arguments.secure,
                seed=arguments.seed,
                categorical=arguments.categorical,
                ignore=arguments.ignore,
                test=arguments.test,
                spend=budget,
                data_changed=arguments.data_changed,
                # Kept until the model is on disk: only then is there nothing left to resume.
                checkpoint=Checkpoint(run_folder, resume=arguments.resume, keep=True)
                if HAS_LOCKS and not arguments.secure
                else None,
                stage=patiently,
            )
            fitted.write(out)
            _remove_secrets(arguments, run_folder)
    _print_fitted(arguments, fitted, time.perf_counter() - began)
    return 0


def _print_fitted(
    arguments: argparse.Namespace, fitted: tabular.FittedTable, seconds: float
) -> None:
    report, model = fitted.report, fitted.model
    if arguments.json:
        result = {
            "epsilon": report.epsilon,
            "delta": report.delta,
            "adjacency": report.adjacency.value,
            "unit": report.unit,
            "sampling": report.sampling,
            "steps": report.charged_steps,
            "accountant": report.accountant,
            "noise": report.noise,
            "tuning": report.tuning,
            "task": model.task,
            "target": arguments.target,
            "features": list(model.encoding.features),
            "left_out": dict(fitted.left_out),
            "out": str(arguments.out),
            "seconds": round(seconds, 1),
        }
        if report.seed is not None:
            result |= {"seed": report.seed, "randomness": NOT_FOR_RELEASE}
        if report.ledger is not None:
            result["ledger"] = dict(report.ledger)
        print(json.dumps(result, allow_nan=False))
        return
    print(
        f"Fitted {model.task} of {arguments.target!r} on {len(model.encoding.columns)} columns, "
        f"{len(model.encoding.features)} features, in {report.charged_steps} noisy steps."
    )
    for name, reason in fitted.left_out.items():
        print(f"Left out: {name!r}, {reason}.")
    if report.charged_steps == 0:
        print(
            "At this epsilon private rows would bring more noise than knowledge: this is the model "
            "of the public rows alone."
        )
    print(
        f"Privacy: epsilon {upwards(report.epsilon)}, delta {upwards(report.delta, 6)} for every "
        "private row; the number of rows counts as public."
    )
    print(
        f"Accountant: {report.accountant_method}. Adjacency: {report.adjacency.value}. Sampling: "
        f"{report.sampling}. Choice of settings: {report.tuning}."
    )
    if report.is_secure and report.charged_steps > 0:
        print("Noise: from a cryptographic generator, exact on a lattice; rounding is charged.")
    if report.ledger is not None:
        budget = report.ledger["budget"]
        print(
            f"Budget: {percent_upwards(budget['used'])} used after {counted(budget['runs'], 'run')}"
            f"; all of them together have at most epsilon "
            f"{upwards(budget['epsilon'], 6)}, delta {upwards(budget['delta'], 6)}."
        )
    if report.seed is not None:
        print(f"Seed {report.seed}: {NOT_FOR_RELEASE}; leave --seed out to publish the model.")
    for name in ("rmse", "loss", "accuracy"):
        if f"test_{name}" in report.results:
            baseline = report.results.get(f"baseline_{name}")
            guess = "" if baseline is None else f" (without features: {baseline:.4g})"
            print(f"On test rows: {name} {report.results[f'test_{name}']:.4g}{guess}.")
    print(f"Wrote {tabular.MODEL_FILE}, report.json and privacy_card.md to {arguments.out}/")
    print(f"Took {seconds:.0f} s.")


def _run_folder(out: Path) -> Path:
    """Where a fit keeps its randomness: beside the folder that is released, never in it."""
    return out.absolute().with_name(out.absolute().name + RUN_SUFFIX)


def _check_run_folder(arguments: argparse.Namespace, run_folder: Path) -> None:
    unfinished = is_unfinished(run_folder)
    if unfinished and not arguments.resume:
        raise UsageError(
            f"expected no unfinished run for --out {arguments.out}, got one in "
            f"{str(run_folder)!r}; add --resume to finish it, or remove that folder to give it up "
            "(what was charged stays charged)."
        )
    if arguments.resume and not unfinished:
        raise UsageError(
            f"expected a run to resume in {str(run_folder)!r}, got none; leave --resume out."
        )


def _already_finished(arguments: argparse.Namespace, run_folder: Path) -> int:
    """The model was written, and only what is secret had not been removed."""
    tabular.TableModel.load(arguments.out)
    report = RunReport.read(arguments.out)
    _remove_secrets(arguments, run_folder)
    if arguments.json:
        result = {"epsilon": report.epsilon, "delta": report.delta, "out": str(arguments.out)}
        print(json.dumps({**result, "finished": "before"}, allow_nan=False))
    else:
        # Nothing was compared with the options of this call, so it says what the run was.
        print(
            f"The run had finished: {arguments.out}/ holds its model, {report.title}, epsilon "
            f"{upwards(report.epsilon)}, delta {upwards(report.delta, 6)}."
        )
    return 0


def _remove_secrets(arguments: argparse.Namespace, run_folder: Path) -> None:
    if arguments.keep_checkpoint or not run_folder.is_dir():
        return
    try:
        remove_checkpoints(run_folder)
        shutil.rmtree(run_folder)
    except OSError as error:
        warn(
            f"{str(run_folder)!r} could not be removed ({error.strerror}); remove it by hand: who "
            "has it can subtract the noise.",
        )


def _check_secure(arguments: argparse.Namespace) -> None:
    """Refuses what a run that cannot be repeated has no use for, and a missing library."""
    if not arguments.secure:
        return
    for option, given in (
        ("--seed", arguments.seed is not None),
        ("--resume", arguments.resume),
        ("--keep-checkpoint", arguments.keep_checkpoint),
    ):
        if given:
            raise UsageError(
                f"expected --secure or {option}, got both, and a secure run cannot be repeated: "
                "its noise is written down nowhere; leave one of them out."
            )
    try:
        require_cryptography()
    except ImportError as error:
        raise UsageError(sentence(error)) from None


@contextlib.contextmanager
def _resumable(
    arguments: argparse.Namespace, run_folder: Path
) -> Iterator[list[tuple[Budget, int]]]:
    """Says after Ctrl-C how to go on.

    Yields a list for the budget that the run is charged to and its number of charges before.
    """
    charged_to: list[tuple[Budget, int]] = []
    model = arguments.out / tabular.MODEL_FILE
    was_there = model.exists()
    try:
        yield charged_to
    except KeyboardInterrupt:
        if not checkpoint_files(run_folder):
            if model.exists() and not was_there:
                raise KeyboardInterrupt(
                    f"The run had finished: {arguments.out}/ holds its model."
                ) from None
            if any(budget.status.charges > before for budget, before in charged_to):
                raise KeyboardInterrupt(
                    "The run was charged, and a secure run cannot be resumed: its noise is written "
                    "down nowhere. What was charged stays charged."
                ) from None
            raise KeyboardInterrupt("Nothing was charged.") from None
        command = [word for word in arguments.command if word != "--resume"]
        raise KeyboardInterrupt(
            f"To finish the run: {shlex.join(['mirrordp', *command, '--resume'])}"
        ) from None


def _predict(arguments: argparse.Namespace) -> int:
    with table_errors(), told_on_interruption("Nothing was written: run the command again."):
        model = tabular.TableModel.load(arguments.model)
        rows = tabular.predict_file(
            model, arguments.input, arguments.output, keep=arguments.keep, stage=patiently
        )
    if arguments.json:
        print(json.dumps({"rows": rows, "output": str(arguments.output)}))
    else:
        print(f"Wrote {rows} predictions to {arguments.output}")
    return 0
