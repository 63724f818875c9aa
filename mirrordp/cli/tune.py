"""`mirrordp tune`."""

import argparse
import contextlib
import dataclasses
import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrordp.cli._common import (
    UsageError,
    add_command,
    did_you_mean,
    interruptible,
    library_errors,
    print_json,
)

if TYPE_CHECKING:
    from mirrordp.spending.budget import Budget

_NEEDED = ("epsilon", "delta", "loss", "start", "private")
_KNOWN = (
    *_NEEDED,
    *("public", "way", "score", "private_score", "runs", "optimizer", "seed", "budget"),
    *("checkpoint", "title", "allow_large_delta", "space", "step"),
)
# Arguments of TrainStep that other settings give, or that are Python objects.
_NOT_IN_TOML = ("loss_fn", "mechanism", "optimizer", "public_loss_fn", "average", "chart")
_FILES = (".npz", ".npy", ".parquet")
_DISTRIBUTIONS = {"logarithmic": 0.0, "geometric": 1.0, "poisson": float("inf")}


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "tune",
        _run,
        "choose settings and train, as a file of settings says, at one total epsilon",
        "tune --config experiment.toml --out tuned",
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="the settings, in TOML; see docs/tuning.md"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="a folder for the model and its report"
    )
    parser.add_argument(
        "--progress",
        action="store_true",
        help="show how far the search is; for a paid search, the operator alone may see it",
    )


def _run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.config)
    config = _read(path)
    with library_errors("use smaller batches"):
        import mirrordp
        from mirrordp.spending.budget import Budget
        from mirrordp.tables.fitting import check_new_folder
        from mirrordp.training.checkpoint import Checkpoint

        folder, out = path.resolve().parent, Path(arguments.out)
        is_again = "checkpoint" in config and _was_cut_short(folder / config["checkpoint"], out)
        if not is_again:
            check_new_folder(out)
        _check_tables(config, path)
        options: dict[str, Any] = {}
        with (
            contextlib.ExitStack() as stack,
            interruptible("Nothing was released."),
            _refusals_advise_epsilon(),
        ):
            found = _Names(folder)
            private = found.rows(config["private"], "private")
            if "budget" in config:
                budget = stack.enter_context(Budget.open(folder / config["budget"]))
                _compare_file(budget, found.file(config["private"]), config["private"])
                options["spend"] = budget
            if "checkpoint" in config:
                # Kept until the model is on disk: only then is there nothing left to go on with.
                options["checkpoint"] = Checkpoint(
                    folder / config["checkpoint"], resume=True, keep=True
                )
            if "space" in config:
                options["space"] = mirrordp.tuning.grid(**config["space"])
            if "optimizer" in config:
                options["optimizer"] = found(config["optimizer"], "optimizer")
            public = config.get("public")
            result = mirrordp.tune(
                found(config["loss"], "loss"),
                found(config["start"], "start"),
                mirrordp.PrivateData(private),
                None if public is None else mirrordp.PublicData(found.rows(public, "public")),
                epsilon=config["epsilon"],
                delta=config["delta"],
                allow_large_delta=config.get("allow_large_delta", False),
                way=_way(config, found),
                seed=config.get("seed"),
                progress=arguments.progress,
                title=config.get("title", "A model tuned and trained with mirrordp"),
                **options,
                **config.get("step", {}),
            )
        if is_again:
            _require_same(result, out)
        _write(result, out)
        if "checkpoint" in options:
            options["checkpoint"].remove()
    settings = None if result.settings is None else result.settings.to_dict()
    if arguments.json:
        print_json({"settings": settings, "score": result.score, "report": result.report.to_dict()})
        return 0
    if result.rehearsal is not None:
        print(f"Rehearsal on public rows, score of each candidate:\n{result.rehearsal}")
    score = "" if result.score is None else f", by its score of {result.score:.4g}"
    print(f"Chosen: {'the start' if result.settings is None else result.settings}{score}.")
    print(result.report.statement())
    print(f"Wrote model.npz, report.json and privacy_card.md to {arguments.out}/")
    return 0


@contextlib.contextmanager
def _refusals_advise_epsilon() -> Iterator[None]:
    """Lets a budget's refusal advise a smaller epsilon, which decides the noise here."""
    from mirrordp.spending.budget import BudgetError

    try:
        yield
    except BudgetError as error:
        raise error.advising("Lower epsilon in the settings") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"expected a file that can be read, got {str(path)!r} ({error.strerror}); check the "
            "path."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"expected TOML in {str(path)!r}, got {error}; repair it.") from None
    for name in config:
        if name not in _KNOWN:
            raise UsageError(
                f"expected known settings in {str(path)!r}, got {name!r}"
                f"{did_you_mean(name, _KNOWN)}; see docs/tuning.md."
            )
    for name in _NEEDED:
        if name not in config:
            raise UsageError(f"expected {name!r} in {str(path)!r}, got none; add it.")
    for name in ("space", "step"):
        if not isinstance(config.get(name, {}), Mapping):
            raise UsageError(f"expected a table [{name}] in {str(path)!r}; write it as one.")
    return config


def _check_tables(config: Mapping[str, Any], path: Path) -> None:
    """Refuses names in [space] and [step] that are none of the arguments these tables stand for."""
    from mirrordp.training.central import TrainStep
    from mirrordp.tuning.settings import Settings

    space = {field.name: field for field in dataclasses.fields(Settings)}
    step = [field.name for field in dataclasses.fields(TrainStep) if field.name not in _NOT_IN_TOML]
    for table, known in (("space", list(space)), ("step", step)):
        for name in config.get(table, {}):
            if name not in known:
                raise UsageError(
                    f"expected known names in [{table}] of {str(path)!r}, got {name!r}"
                    f"{did_you_mean(name, known)}; choose among {', '.join(known)}."
                )
    for name, field in space.items():
        is_needed = "space" in config and field.default is dataclasses.MISSING
        if is_needed and name not in config["space"]:
            raise UsageError(f"expected {name!r} in [space] of {str(path)!r}, got none; add it.")


def _compare_file(budget: "Budget", path: Path | None, private: Any) -> None:
    """Compares the private file with that of the budget, if the budget is for a file.

    Call it after the rows were read: a file that changes in between is then refused. A budget for
    rows compares the rows themselves, before it is charged.
    """
    if budget.kind_of_data != "file":
        return
    if path is None or not path.is_file():
        raise UsageError(
            f"expected private = a file, as the budget {str(budget.folder)!r} is for one, got "
            f"{private!r}; name the file that the budget was made for."
        )
    budget.check_data(path)


class _Names:
    """Finds Python objects, written as "module:name", and files beside the settings."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __call__(self, text: Any, setting: str) -> Any:
        """Returns the object that a text such as "model:loss_fn" names."""
        module, colon, name = str(text).partition(":")
        if not colon:
            raise UsageError(f'expected {setting} = "module:name", got {text!r}; name a function.')
        # The module of an experiment lies beside its settings.
        sys.path.insert(0, str(self._folder))
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"expected {setting} = {text!r} to exist, got: {error}.") from None
        finally:
            sys.path.remove(str(self._folder))
        return found

    def file(self, text: Any) -> Path | None:
        """Returns the file that rows are read from, or None if they are named "module:name"."""
        path = self._folder / str(text)
        return path if path.suffix in _FILES else None

    def rows(self, text: Any, setting: str) -> Any:
        """Returns the rows of a file, or those that an object named "module:name" is or returns."""
        import numpy as np

        from mirrordp.data import parquet_rows

        path = self.file(text)
        if path is not None:
            if not path.exists():
                raise UsageError(
                    f"expected a file for {setting}, got {str(path)!r}, which does not exist; "
                    "check the path, which begins at the folder of the settings."
                )
            if path.suffix == ".npz":
                with np.load(path) as arrays:
                    return dict(arrays)
            return np.load(path, mmap_mode="r") if path.suffix == ".npy" else parquet_rows(path)
        if ":" in str(text):
            found = self(text, setting)
            return found() if callable(found) else found
        raise UsageError(
            f'expected a file .npz, .npy or .parquet, or "module:name", for {setting}, got '
            f"{text!r}; convert it."
        )


def _way(config: Mapping[str, Any], found: _Names) -> Any:
    """Returns the way of searching."""
    from mirrordp import tuning

    names = ("free", "paid", "both")
    name = config.get("way", "free")
    if name not in names:
        raise UsageError(
            f"expected way = {', '.join(map(repr, names))}, got {name!r}"
            f"{did_you_mean(str(name), names)}; choose one."
        )
    if "score" in config and "private_score" in config:
        raise UsageError("expected score or private_score, got both; leave one of them out.")
    public: Any = tuning.PublicScore()
    if "score" in config:
        public = tuning.PublicScore(found(config["score"], "score"))
    if name == "free":
        for other in ("runs", "private_score"):
            if other in config:
                raise UsageError(f"expected no {other} with way = 'free', got one; leave it out.")
        return tuning.Free(public)
    judge = public
    if "private_score" in config:
        judge = tuning.PrivateScore(found(config["private_score"], "private_score"))
    default = tuning.Both().paid if name == "both" else tuning.Paid()
    paid = tuning.Paid(_number_of_runs(config) or default.runs, judge)
    return paid if name == "paid" else tuning.Both(tuning.Free(public), paid)


def _number_of_runs(config: Mapping[str, Any]) -> Any:
    from mirrordp.privacy.selection import NumberOfRuns

    runs = config.get("runs")
    if runs is None:
        return None
    table = runs if isinstance(runs, Mapping) else {"mean": runs}
    shape = table.get("distribution", "logarithmic")
    if set(table) - {"mean", "distribution"} or "mean" not in table or shape not in _DISTRIBUTIONS:
        raise UsageError(
            "expected runs = 10, or a table with its mean and a distribution "
            f"({', '.join(_DISTRIBUTIONS)}), got {runs!r}; write it so."
        )
    return NumberOfRuns(table["mean"], _DISTRIBUTIONS[shape])


_MODEL = "model.npz"
_WRITTEN = (_MODEL, "report.json", "privacy_card.md")


def _was_cut_short(checkpoint: Path, out: Path) -> bool:
    """Returns whether a search may have been killed while it wrote what it had found."""
    from mirrordp.training.checkpoint import checkpoint_files

    if not checkpoint_files(checkpoint) or not out.is_dir():
        return False
    # The name of a file that was only half written begins with a dot.
    ours = (*_WRITTEN, *(f".{name}." for name in _WRITTEN))
    return all(path.name.startswith(ours) for path in out.iterdir())


def _require_same(result: Any, out: Path) -> None:
    """Refuses to write over another model than the one that the search had written."""
    import numpy as np

    from mirrordp.spending.files import remove_leftovers

    for name in _WRITTEN:
        remove_leftovers(out, name)
    if not (out / _MODEL).exists():
        return
    with np.load(out / _MODEL) as written:
        before, now = dict(written), _arrays(result)
    if before.keys() != now.keys() or any(_bits(before[k]) != _bits(now[k]) for k in now):
        raise UsageError(
            f"expected --out to be a new or empty folder, got {str(out)!r} with another model; "
            "choose another. The search is over, and the same command writes what it found there."
        )


def _bits(array: Any) -> tuple[Any, int, bytes]:
    # Not the dtype: a file knows bfloat16 by its size alone.
    return array.shape, array.dtype.itemsize, array.tobytes()


def _arrays(result: Any) -> dict[str, Any]:
    import jax
    import numpy as np

    leaves = jax.tree_util.tree_leaves_with_path(result.params)
    return {jax.tree_util.keystr(path) or "params": np.asarray(leaf) for path, leaf in leaves}


def _write(result: Any, folder: Path) -> None:
    """Writes the model and its report."""
    import io

    import numpy as np

    from mirrordp.spending.files import write_atomically

    content = io.BytesIO()
    np.savez(content, **_arrays(result))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _MODEL, content.getvalue())
    result.report.write(folder)
