"""The demonstration: cold DP-SGD, warm DP-SGD and PDA-DPMD on generated data at the same (ε, δ).

Cold training begins at zero, warm training at the optimum of the public rows. The task is
multinomial logistic regression on features whose variance falls as 1/j along direction j, with few
public rows. Every trial draws private rows, public rows and noise afresh. All methods get the same
rows, mechanism, optimiser, averaging and learning-rate grid, and each uses the rate that does best
on validation rows over separate tuning trials. Each method is a `Method`, and others can be added.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from mirrordp._rounding import upwards
from mirrordp.data import PrivateData, PublicData
from mirrordp.privacy.accounting import Accountant
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.report import Curve, RunReport, comparison_figure
from mirrordp.spending.files import write_atomically
from mirrordp.spending.ledger import Ledger
from mirrordp.training.central import TrainStep
from mirrordp.training.engine import TrainOptions, train
from mirrordp.types import AlphaSchedule, Batch, Params, PyTree
from mirrordp.updates.averages import UniformAverage
from mirrordp.updates.public import warm_start

TUNING = (
    "not charged: each method's learning rate was chosen on other generated rows. On real data the "
    "runs that choose it read private rows too, and belong in the ledger"
)

SETTING = (
    "chosen among 16 that were tried on other seeds, as one in which public data helps a lot; with "
    "many private rows or very few public ones the gain was small or none (docs/overview.md)"
)


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """The settings that, with the seed, decide what the demonstration computes."""

    epsilon: float = 0.5
    delta: float = 1e-5
    num_private: int = 4_000
    num_public: int = 400
    num_features: int = 100
    num_classes: int = 10
    num_test: int = 5_000
    batch_size: int = 200
    num_steps: int = 150
    steps_per_call: int = 15
    l2_clip_norm: float = 1.0
    learning_rates: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    tuning_trials: int = 2
    trials: int = 8

    def mechanism(self) -> Mechanism:
        """Makes the mechanism that all methods share: sampling, clip norm and noise."""
        return Mechanism.calibrate(
            epsilon=self.epsilon,
            delta=self.delta,
            sampling=PoissonSampling.for_batch_size(self.batch_size, num_examples=self.num_private),
            num_steps=self.num_steps,
            l2_clip_norm=self.l2_clip_norm,
            accountant=Accountant.PLD,
        )


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train: the start, α, and the optimiser.

    Attributes:
        name: the key of the method in the report.
        label: its name in table and figure.
        warm: whether training begins at the public optimum instead of at zero.
        alpha: the weight of the private gradient.
        optimizer: `(learning_rate, task, start) -> optax transformation`.
    """

    name: str
    label: str
    warm: bool
    alpha: float | AlphaSchedule
    optimizer: Callable[[float, "Task", Params], optax.GradientTransformation]


class RateState(NamedTuple):
    """The optimiser state that holds the learning rate, so that a compiled step can read it."""

    learning_rate: jax.Array


@dataclasses.dataclass(frozen=True)
class _RateInit:
    """A function that puts the rate into the state. All rates compare equal and share a program."""

    learning_rate: float = dataclasses.field(compare=False)

    def __call__(self, params: Params) -> RateState:
        del params
        return RateState(jnp.asarray(self.learning_rate, jnp.float32))


def _descend(updates: PyTree, state: Any, params: Params | None = None):
    del params
    return jax.tree.map(lambda leaf: -state.learning_rate * leaf, updates), state


def sgd(learning_rate: float, task: "Task", start: Params) -> optax.GradientTransformation:
    """Makes `optax.sgd(learning_rate)`, except that trying another rate compiles nothing."""
    del task, start
    return optax.GradientTransformation(_RateInit(learning_rate), _descend)


METHODS = (
    Method("cold", "DP-SGD, cold", False, 1.0, sgd),
    Method("warm", "DP-SGD, warm", True, 1.0, sgd),
    # The search that chose the setting (`SETTING`) chose α, too; the demo does not tune it.
    Method("pda_dpmd", "PDA-DPMD", True, 0.25, sgd),
)


class Task(NamedTuple):
    """The data of one trial: private and public rows to train on, and rows to judge by."""

    private: PrivateData
    public: PublicData
    judge: Batch


def make_task(settings: DemoSettings, seed: int, trial: Sequence[int]) -> Task:
    """Draws the rows of one trial; the labelling rule depends on the seed alone."""
    scales = np.arange(1, settings.num_features + 1) ** -0.5
    scales /= np.linalg.norm(scales)
    rule = np.random.default_rng([seed, 0]).normal(
        size=(settings.num_features, settings.num_classes)
    )
    rng = np.random.default_rng([seed, 1, *trial])

    def draw(rows: int) -> Batch:
        features = rng.normal(size=(rows, settings.num_features)) * scales
        # This samples from a softmax by the Gumbel trick; 20 is how sharp the classes are.
        noise = rng.gumbel(size=(rows, settings.num_classes))
        labels = np.argmax(20 * features @ rule + noise, axis=1)
        return {"x": features.astype(np.float32), "y": labels.astype(np.int32)}

    return Task(
        PrivateData(draw(settings.num_private)),
        PublicData(draw(settings.num_public)),
        jax.device_put(draw(settings.num_test)),
    )


def loss_fn(params: Params, example: Batch) -> jax.Array:
    """Computes the cross-entropy of one example under a linear model."""
    logits = example["x"] @ params["w"] + params["b"]
    return -jax.nn.log_softmax(logits)[example["y"]]


@jax.jit
def evaluate(params: Params, rows: Batch) -> tuple[jax.Array, jax.Array]:
    """Computes mean loss and accuracy on rows that need no protection."""
    losses = jax.vmap(loss_fn, in_axes=(None, 0))(params, rows)
    guesses = jnp.argmax(rows["x"] @ params["w"] + params["b"], axis=1)
    return jnp.mean(losses), jnp.mean(guesses == rows["y"])


class Outcome(NamedTuple):
    """The result of one run: the loss at the start and after each call, and the final accuracy."""

    losses: np.ndarray
    accuracy: float


def run_method(
    method: Method,
    task: Task,
    warm: Params,
    *,
    settings: DemoSettings,
    mechanism: Mechanism,
    learning_rate: float,
    seed: int,
    spend: Ledger | None = None,
) -> Outcome:
    """Trains once and judges the averaged iterate after every call."""
    start = warm if method.warm else jax.tree.map(jnp.zeros_like, warm)
    evaluations = [evaluate(start, task.judge)]
    optimizer = method.optimizer(learning_rate, task, start)
    average = UniformAverage(start=settings.num_steps // 2)
    step = TrainStep(loss_fn, mechanism, optimizer, average=average)
    for state, _ in train(
        step,
        start,
        task.private,
        task.public,
        alpha=method.alpha,
        seed=seed,
        spend=spend,
        options=TrainOptions(steps_per_call=settings.steps_per_call),
    ):
        evaluations.append(evaluate(state.average, task.judge))
    return Outcome(np.array([float(loss) for loss, _ in evaluations]), float(evaluations[-1][1]))


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """The findings of the demonstration, and the folder that holds them."""

    report: RunReport
    curves: tuple[Curve, ...]
    table: str
    folder: Path
    seconds: float


def run_demo(
    folder: Path,
    *,
    seed: int = 0,
    settings: DemoSettings | None = None,
    methods: Sequence[Method] = METHODS,
    progress: bool = True,
) -> DemoResult:
    """Trains every method, writes report, card and figure into `folder`, and returns the findings.

    Args:
        folder: the folder to write to; it is made if it does not exist.
        seed: the seed of data, sampling and noise.
        settings: the sizes; by default those of `mirrordp demo`.
        methods: the methods to compare.
        progress: whether to show a progress bar on standard error.
    """
    began = time.perf_counter()
    settings = settings or DemoSettings()
    mechanism = settings.mechanism()
    tuning_runs = len(methods) * len(settings.learning_rates) * settings.tuning_trials
    total = tuning_runs + len(methods) * settings.trials
    with _Progress(total, progress) as bar:
        bar.phase("choosing learning rates")
        rates = _choose_rates(settings, mechanism, methods, seed, bar)
        bar.phase("training")
        outcomes, together = _compare(settings, mechanism, methods, rates, seed, bar)
    steps = np.arange(0, settings.num_steps + 1, settings.steps_per_call)
    if steps[-1] != settings.num_steps:
        steps = np.append(steps, settings.num_steps)
    curves = tuple(
        Curve(method.label, steps, np.stack([o.losses for o in outcomes[method.name]]), "test loss")
        for method in methods
    )
    results = _results(settings, methods, rates, outcomes, together)
    report = RunReport.of(
        mechanism,
        settings.delta,
        title="mirrordp demo",
        scope=f"each model by itself; all {len(methods)} models, trained on the same private rows, "
        f"have epsilon {upwards(together)} together",
        tuning=TUNING,
        seed=seed,
        curves=curves,
        results=results,
    )
    subtitle = (
        f"Each model: ε = {settings.epsilon:g}, δ = {settings.delta:g}. "
        f"{settings.num_private} private and {settings.num_public} public rows. Mean of "
        f"{settings.trials} trials; bars and bands are two standard errors."
    )
    figure = comparison_figure(
        curves, title=_headline(results, methods), quantity="test loss", subtitle=subtitle
    )
    report.write(folder)
    write_atomically(folder / "results.png", figure)
    return DemoResult(report, curves, _table(results, methods), folder, time.perf_counter() - began)


class _Progress:
    """A progress bar on standard error, or a plain line now and then if that is no terminal."""

    def __init__(self, total: int, show: bool):
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, disable=not (show and on_terminal), unit="run")
        self._plain = show and not on_terminal
        self._total, self._done, self._phase = total, 0, ""
        self._shown = -math.inf

    def phase(self, name: str) -> None:
        """Says what the next runs are for."""
        self._phase = name
        self._bar.set_description(name)

    def update(self) -> None:
        """Counts one more finished run."""
        self._done += 1
        self._bar.update()
        now = time.monotonic()
        if self._plain and (now - self._shown > 10 or self._done == self._total):
            self._shown = now
            print(f"{self._phase}: run {self._done} of {self._total}", file=sys.stderr)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def warm_params(settings: DemoSettings, task: Task, seed: int) -> Params:
    """Fits the public rows: held-out rows decide for how long, then all rows are fitted as long.

    Without the second fit the held-out fifth would be lost to the warm start but not to PDA-DPMD,
    which reads all public rows in every step, and the comparison would flatter the latter.
    """
    cold = {
        "w": jnp.zeros((settings.num_features, settings.num_classes)),
        "b": jnp.zeros(settings.num_classes),
    }
    optimizer = optax.adam(0.03)
    judged = warm_start(
        loss_fn,
        cold,
        task.public,
        optimizer=optimizer,
        batch_size=None,
        patience=20,
        max_epochs=4_000,
        seed=seed,
    )
    epochs = int(np.argmin(judged.holdout_losses)) + 1
    return _fit(cold, task.public.arrays, epochs)


@jax.jit
def _fit(params: Params, rows: Batch, epochs: jax.typing.ArrayLike) -> Params:
    optimizer = optax.adam(0.03)

    def mean_loss(params: Params) -> jax.Array:
        return jnp.mean(jax.vmap(loss_fn, in_axes=(None, 0))(params, rows))

    def step(_, carry):
        params, state = carry
        updates, state = optimizer.update(jax.grad(mean_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, epochs, step, (params, optimizer.init(params)))[0]


def _choose_rates(
    settings: DemoSettings,
    mechanism: Mechanism,
    methods: Sequence[Method],
    seed: int,
    bar: _Progress,
) -> dict[str, float]:
    """Chooses each method's rate from the grid by the mean validation loss of tuning trials."""
    losses = {method.name: np.zeros(len(settings.learning_rates)) for method in methods}
    for trial in range(settings.tuning_trials):
        task = make_task(settings, seed, (0, trial))
        warm = warm_params(settings, task, trial)
        for method in methods:
            for index, rate in enumerate(settings.learning_rates):
                outcome = run_method(
                    method, task, warm, settings=settings, mechanism=mechanism,
                    learning_rate=rate, seed=_run_seed(seed, 0, trial),
                )  # fmt: skip
                losses[method.name][index] += np.nan_to_num(outcome.losses[-1], nan=np.inf)
                bar.update()
    return {name: settings.learning_rates[int(np.argmin(v))] for name, v in losses.items()}


def _compare(
    settings: DemoSettings,
    mechanism: Mechanism,
    methods: Sequence[Method],
    rates: dict[str, float],
    seed: int,
    bar: _Progress,
) -> tuple[dict[str, list[Outcome]], float]:
    """Runs all trials; the methods of a trial share fresh rows, and each has fresh noise.

    Returns:
        The outcomes by method, and the ε of all methods on the same rows taken together.
    """
    outcomes: dict[str, list[Outcome]] = {method.name: [] for method in methods}
    ledger = Ledger(mechanism.adjacency)
    for trial in range(settings.trials):
        task = make_task(settings, seed, (1, trial))
        warm = warm_params(settings, task, trial)
        for number, method in enumerate(methods):
            outcome = run_method(
                method, task, warm, settings=settings, mechanism=mechanism,
                learning_rate=rates[method.name],
                # The costs of two models do not add up if they share their noise.
                seed=_run_seed(seed, 1, trial, number),
                # Each trial has private rows of its own, so one trial is all that they pay for.
                spend=ledger if trial == 0 else None,
            )  # fmt: skip
            outcomes[method.name].append(outcome)
            bar.update()
    return outcomes, ledger.epsilon(settings.delta, accountant=mechanism.accountant).epsilon


def _run_seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    array = np.asarray(values, float)
    error = array.std(ddof=1) / np.sqrt(len(array)) if len(array) > 1 else 0.0
    return float(array.mean()), float(error)


def _results(
    settings: DemoSettings,
    methods: Sequence[Method],
    rates: dict[str, float],
    outcomes: dict[str, list[Outcome]],
    together: float,
) -> dict[str, Any]:
    by_method = {}
    final = {name: np.array([o.losses[-1] for o in runs]) for name, runs in outcomes.items()}
    for method in methods:
        loss, loss_error = _mean_and_error(final[method.name])
        accuracy, accuracy_error = _mean_and_error([o.accuracy for o in outcomes[method.name]])
        by_method[method.name] = {
            "label": method.label,
            "learning_rate": rates[method.name],
            "test_loss": loss,
            "test_loss_standard_error": loss_error,
            "test_accuracy": accuracy,
            "test_accuracy_standard_error": accuracy_error,
            "test_losses": final[method.name].tolist(),
        }
    best = min(by_method, key=lambda name: by_method[name]["test_loss"])
    paired = {}
    for method in methods:
        if method.name != best:
            gap, error = _mean_and_error(final[method.name] - final[best])
            paired[method.name] = {"test_loss_gap": gap, "standard_error": error}
    return {
        "measured": "loss and accuracy on generated test rows, which need no protection",
        "choice_of_setting": SETTING,
        "best": best,
        "methods": by_method,
        "behind_best_paired_by_trial": paired,
        "epsilon_of_all_methods_on_the_same_rows": together,
        "settings": dataclasses.asdict(settings),
    }


def _headline(results: dict[str, Any], methods: Sequence[Method]) -> str:
    """States the finding in one line; a lead of less than three standard errors is no win."""
    labels = {method.name: method.label for method in methods}
    paired = results["behind_best_paired_by_trial"]
    if not paired:
        return labels[results["best"]]
    second = min(paired, key=lambda name: paired[name]["test_loss_gap"])
    gap, error = paired[second]["test_loss_gap"], paired[second]["standard_error"]
    if gap <= 3 * error:
        return f"No clear winner between {labels[results['best']]} and {labels[second]}"
    share = gap / results["methods"][second]["test_loss"]
    return f"{labels[results['best']]} has the lowest loss, {share:.1%} below {labels[second]}"


def _table(results: dict[str, Any], methods: Sequence[Method]) -> str:
    lines = [f"{'method':<16}{'learning rate':>14}{'test loss':>20}{'test accuracy':>20}"]
    for method in methods:
        row = results["methods"][method.name]
        loss = f"{row['test_loss']:.4f} +- {row['test_loss_standard_error']:.4f}"
        accuracy = (
            f"{100 * row['test_accuracy']:.2f} +- {100 * row['test_accuracy_standard_error']:.2f} %"
        )
        mark = "  <- best" if method.name == results["best"] else ""
        lines.append(f"{method.label:<16}{row['learning_rate']:>14g}{loss:>20}{accuracy:>20}{mark}")
    for name, gap in results["behind_best_paired_by_trial"].items():
        label = results["methods"][name]["label"]
        lines.append(
            f"{label} is behind by {gap['test_loss_gap']:.4f} +- {gap['standard_error']:.4f} "
            "in loss (paired by trial)"
        )
    lines.append("+- is one standard error of the mean over trials")
    lines.append(f"The setting was {SETTING}.")
    return "\n".join(lines)
