"""`mirrordp fit`."""

import argparse
import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrordp._rounding import percent_upwards, upwards
from mirrordp._warn import warn
from mirrordp.cli._common import (
    UsageError,
    add_command,
    check_epsilon,
    counted,
    interruptible,
    library_errors,
    one_of,
    open_unit_interval,
    patiently,
    positive,
    print_json,
    seed,
)
from mirrordp.cli.report import print_scores

if TYPE_CHECKING:
    from mirrordp.spending.budget import Budget
    from mirrordp.tables.fitting import FittedTable

TASKS = ("regression", "classification", "count", "ordinal")
RUN_SUFFIX = ".run"
_MODELS = ("auto", "linear", "trees", "network")
_METHODS = ("auto", "exact", "dpsgd")
_TABLE = "CSV or Parquet"


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "fit",
        _run,
        "fit a model to a private table, with the help of a public one",
        "fit --private a.csv --public b.csv --target y --task regression --epsilon 1 --delta 1e-5 "
        "--out model",
    )
    for name, summary in (
        ("--private", f"{_TABLE}; every row is protected, or every user with --user"),
        ("--public", f"{_TABLE} with the same columns; types, categories and scales come from it"),
    ):
        parser.add_argument(name, type=Path, required=True, metavar="FILE", help=summary)
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="COLUMN",
        help="the column to predict; may be repeated for regression, which one epsilon covers",
    )
    parser.add_argument(
        "--task",
        type=one_of(*TASKS),
        required=True,
        metavar=f"{{{','.join(TASKS)}}}",
        help="whether the target is a number, a class, a count or an ordered class such as a grade",
    )
    parser.add_argument(
        "--user",
        metavar="COLUMN",
        help="protect users, whom this column of the private table names, instead of rows: one row "
        "of each is used, which depends on that user's name and rows alone",
    )
    parser.add_argument(
        "--epsilon", type=positive, required=True, metavar="E", help="epsilon of this run"
    )
    parser.add_argument(
        "--delta",
        type=open_unit_interval,
        metavar="D",
        help="delta, well below one over the number N of private rows or users (default: that of "
        "the budget; without one, 1/(10 N) rounded down to a power of ten, and at most 1e-05)",
    )
    parser.add_argument(
        "--allow-large-delta",
        action="store_true",
        help="accept a delta above 1/N, which publishing one row at random would satisfy",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="new folder for model.json, report.json and privacy_card.md",
    )
    for name, summary in (
        ("--categorical", "treat the numbers of this column as categories; may be repeated"),
        ("--ignore", "leave this column out, such as an identifier; may be repeated"),
    ):
        parser.add_argument(name, action="append", default=[], metavar="COLUMN", help=summary)
    parser.add_argument(
        "--decimal", default=".", metavar="C", help="the decimal separator, . or , (default: .)"
    )
    parser.add_argument(
        "--thousands",
        default="",
        metavar="C",
        help="what separates groups of three digits in numbers (default: nothing)",
    )
    parser.add_argument(
        "--test",
        type=Path,
        metavar="FILE",
        help=f"{_TABLE}; further rows that need no protection, to evaluate the model on",
    )
    parser.add_argument(
        "--ceiling",
        action="store_true",
        help="also fit without protection (a linear model, and gradient boosting if --model is not "
        "linear), and show on standard error how well that does on test rows: for the operator "
        "only, never written",
    )
    parser.add_argument(
        "--model",
        type=one_of(*_MODELS),
        default="auto",
        metavar=f"{{{','.join(_MODELS)}}}",
        help="linear, values of cells of columns and pairs of columns, or a small network "
        "(default: auto, which rehearses all three on public rows, or is linear if these are few, "
        "or if one of --method, --learning-rate and --guard is given)",
    )
    parser.add_argument(
        "--method",
        type=one_of(*_METHODS),
        default="auto",
        metavar=f"{{{','.join(_METHODS)}}}",
        help="exact mirror descent or DP-SGD, both from the public model (default: auto, which is "
        "exact)",
    )
    parser.add_argument(
        "--learning-rate",
        type=positive,
        metavar="R",
        help="learning rate of the private descent (default: chosen on public rows)",
    )
    parser.add_argument(
        "--guard",
        action="store_true",
        help="spend one more noisy step on a test of a linear model against that of the public "
        "rows, which is kept if private rows fit it as well",
    )
    parser.add_argument(
        "--secure",
        action="store_true",
        help="take noise from a cryptographic generator, exact on a lattice, for models to release "
        "(needs pip install 'mirrordp[secure]'); such a run cannot be repeated or resumed",
    )
    parser.add_argument(
        "--seed", type=seed, metavar="N", help="make the run repeatable, and not for release"
    )
    parser.add_argument(
        "--budget",
        type=Path,
        metavar="BUDGET",
        help="charge this budget (see 'mirrordp budget --help'); refused if the run does not fit",
    )
    parser.add_argument(
        "--data-changed",
        action="store_true",
        help="continue with what is left of the budget although the private file was changed",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="finish a run that was cut off; give the options that it began with",
    )
    parser.add_argument(
        "--wait",
        type=positive,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for another process on the same budget (default: not at all)",
    )
    parser.add_argument(
        "--keep-checkpoint",
        action="store_true",
        help=f"keep OUT{RUN_SUFFIX}, which is secret: anyone who has it can subtract the noise",
    )


def _run(arguments: argparse.Namespace) -> int:
    check_epsilon(arguments.epsilon)
    _check_secure(arguments)
    if arguments.data_changed and arguments.budget is None:
        raise UsageError("expected --budget with --data-changed, got none; leave it out.")

    from mirrordp.data import UNPROTECTED
    from mirrordp.report.evaluation import Score, lines_of_scores
    from mirrordp.spending.budget import Budget
    from mirrordp.spending.files import HAS_LOCKS
    from mirrordp.tables import fitting
    from mirrordp.tables.encoding import by_column
    from mirrordp.training.checkpoint import Checkpoint

    began = time.perf_counter()
    # Beside the folder that is released, never in it: it holds the randomness of the run.
    run_folder = arguments.out.absolute().with_name(arguments.out.absolute().name + RUN_SUFFIX)
    with library_errors(), interruptible(), _resumable(arguments, run_folder) as charged_to:
        if arguments.resume and (arguments.out / fitting.MODEL_FILE).exists():
            return _finish_again(arguments, run_folder)
        fitting.check_new_folder(arguments.out)
        _check_run_folder(arguments, run_folder)
        with contextlib.ExitStack() as stack:
            budget = None
            if arguments.budget is not None:
                budget = stack.enter_context(Budget.open(arguments.budget, wait=arguments.wait))
                charged_to.append((budget, budget.status.charges))
            fitted = fitting.fit_files(
                arguments.private,
                arguments.public,
                target=arguments.target,
                task=arguments.task,
                epsilon=arguments.epsilon,
                delta=arguments.delta,
                allow_large_delta=arguments.allow_large_delta,
                user=arguments.user,
                model=arguments.model,
                method=arguments.method,
                guard=arguments.guard,
                learning_rate=arguments.learning_rate or "auto",
                secure=arguments.secure,
                seed=arguments.seed,
                categorical=arguments.categorical,
                ignore=arguments.ignore,
                decimal=arguments.decimal,
                thousands=arguments.thousands,
                test=arguments.test,
                ceiling=arguments.ceiling,
                spend=budget,
                data_changed=arguments.data_changed,
                # Kept until the model is on disk: only then is there nothing left to resume.
                checkpoint=Checkpoint(run_folder, resume=arguments.resume, keep=True)
                if HAS_LOCKS and not arguments.secure
                else None,
                stage=patiently,
            )
            fitted.write(arguments.out)
            _remove_secrets(arguments, run_folder)
    _print_fitted(arguments, fitted, time.perf_counter() - began)
    # On standard error, since what is printed may be passed on.
    for words in by_column(fitted.unprotected_cells):
        print(f"mirrordp: {UNPROTECTED} {words}.", file=sys.stderr)
    if fitted.unprotected_ceiling:
        ceiling = {
            name: {measure: Score(one.value, one.low, one.high) for measure, one in found.items()}
            for name, found in fitted.unprotected_ceiling.items()
        }
        print(f"mirrordp: {UNPROTECTED} models without protection:", file=sys.stderr)
        print(*lines_of_scores(ceiling), sep="\n", file=sys.stderr)
    return 0


def _print_fitted(arguments: argparse.Namespace, fitted: "FittedTable", seconds: float) -> None:
    from mirrordp.report import NOT_FOR_RELEASE
    from mirrordp.tables.files import listed

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
            "model": model.scorer.kind,
            "target": arguments.target if len(arguments.target) > 1 else arguments.target[0],
            "features": list(model.encoding.features),
            "left_out": dict(fitted.left_out),
            "out": str(arguments.out),
            "seconds": round(seconds, 1),
        }
        if "test" in report.results:
            result["test"] = report.results["test"]["models"]
        if report.seed is not None:
            result |= {"seed": report.seed, "randomness": NOT_FOR_RELEASE}
        if report.ledger is not None:
            result["ledger"] = dict(report.ledger)
        print_json(result)
        return
    print(
        f"Fitted {model.task} of {listed(arguments.target)} on {len(model.encoding.columns)} "
        f"columns, {len(model.encoding.features)} features, in {report.charged_steps} noisy steps "
        f"(model: {model.scorer.kind})."
    )
    if "rehearsal" in report.results:
        print(_rehearsed(report.results["rehearsal"], model.scorer.kind))
    for name, reason in fitted.left_out.items():
        print(f"Left out: {name!r}, {reason}.")
    if report.charged_steps == 0:
        print(
            "At this epsilon, private rows would add more noise than knowledge: this is the model "
            "of the public rows alone."
        )
    whom = "private row; the number of rows counts"
    if report.unit == "user":
        whom = "user, of whom one row was used; the number of users counts"
    print(
        f"Privacy: epsilon {upwards(report.epsilon)}, delta {upwards(report.delta, 6)} for every "
        f"{whom} as public."
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
    for caution in report.warnings():
        if caution.weakens:
            print(f"{caution.title}: {caution.text}")
    if report.ledger is None and report.charged_steps:
        print("Fits of one file add up: with --budget they are counted, and the card says so.")
    print_scores(report.results)
    print(f"Wrote model.json, report.json and privacy_card.md to {arguments.out}/")
    print(f"Took {seconds:.0f} s.")


def _rehearsed(rehearsal: Mapping[str, Any], chosen: str) -> str:
    """Says how the models did on public rows, and why one of them was taken."""
    from mirrordp.report.evaluation import Score

    models = rehearsal["models"].items()
    values = ", ".join(f"{name} {Score(value, None, None)}" for name, value in models)
    measure = {"loss": "log loss"}.get(rehearsal["measure"], rehearsal["measure"])
    return (
        f"Rehearsal on public rows, {measure}: {values}. Taken: {chosen}, because "
        f"{rehearsal['reason']}."
    )


def _check_run_folder(arguments: argparse.Namespace, run_folder: Path) -> None:
    from mirrordp.training.checkpoint import is_unfinished

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


def _finish_again(arguments: argparse.Namespace, run_folder: Path) -> int:
    """Removes the secrets of a run that was cut off after its model had been written."""
    from mirrordp.report import RunReport
    from mirrordp.tables.fitting import TableModel

    TableModel.load(arguments.out)
    report = RunReport.read(arguments.out)
    _remove_secrets(arguments, run_folder)
    if arguments.json:
        result = {"epsilon": report.epsilon, "delta": report.delta, "out": str(arguments.out)}
        print_json({**result, "finished": "before"})
    else:
        # The options of this call were compared with nothing, so the line says what the run was.
        print(
            f"The run had finished: {arguments.out}/ holds its model, {report.title}, epsilon "
            f"{upwards(report.epsilon)}, delta {upwards(report.delta, 6)}."
        )
    return 0


def _remove_secrets(arguments: argparse.Namespace, run_folder: Path) -> None:
    from mirrordp.training.checkpoint import remove_checkpoints

    if arguments.keep_checkpoint or not run_folder.is_dir():
        return
    try:
        remove_checkpoints(run_folder)
        shutil.rmtree(run_folder)
    except OSError as error:
        warn(
            f"{str(run_folder)!r} could not be removed ({error.strerror}); remove it by hand: "
            "anyone who has it can subtract the noise."
        )


def _check_secure(arguments: argparse.Namespace) -> None:
    """Refuses options that a run that cannot be repeated does not have, and a missing library."""
    if not arguments.secure:
        return
    for option, given in (
        ("--seed", arguments.seed is not None),
        ("--resume", arguments.resume),
        ("--keep-checkpoint", arguments.keep_checkpoint),
    ):
        if given:
            raise UsageError(
                f"expected --secure or {option}, got both, and a secure run cannot be repeated, "
                "since its noise is not recorded anywhere; leave one of them out."
            )
    from mirrordp.privacy.secure import require_cryptography

    try:
        require_cryptography()
    except ImportError as error:
        raise UsageError(str(error)) from None


@contextlib.contextmanager
def _resumable(
    arguments: argparse.Namespace, run_folder: Path
) -> Iterator[list[tuple["Budget", int]]]:
    """Tells the user after Ctrl-C how to continue.

    Yields a list for the budget that the run is charged to and its number of charges before.
    """
    from mirrordp.tables.fitting import MODEL_FILE
    from mirrordp.training.checkpoint import checkpoint_files

    charged_to: list[tuple[Budget, int]] = []
    model = arguments.out / MODEL_FILE
    was_there = model.exists()
    try:
        yield charged_to
    except KeyboardInterrupt:
        if checkpoint_files(run_folder):
            command = [word for word in arguments.command if word != "--resume"]
            advice = f"To finish the run: {shlex.join(['mirrordp', *command, '--resume'])}"
        elif model.exists() and not was_there:
            advice = f"The run had finished: {arguments.out}/ holds its model."
        elif any(budget.status.charges > before for budget, before in charged_to):
            advice = (
                "The run was charged, and a secure run cannot be resumed, since its noise is not "
                "recorded anywhere. What was charged stays charged."
            )
        else:
            advice = "Nothing was charged."
        raise KeyboardInterrupt(advice) from None
