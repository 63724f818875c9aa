"""Searches for settings whose cost is part of ε, or that have none.

    Free    rehearse on public rows, then one private run with all of ε
    Paid    the best of a random number of private runs, which share ε
    Both    the rehearsal narrows the list, and the paid search decides

A paid search goes in this order, and the first three happen before a private row is used:

    calibrate the noise for the whole search  →  secret randomness on disk  →  charge everything
    →  draw the number of runs, and the settings and seeds of each  →  train, score, keep the best

The number of runs comes from a key of its own and is never shown or returned. Other runs than the
best leave no trace, an unfinished search returns nothing, and one that is resumed after a crash has
the same draws.
"""

import contextlib
import dataclasses
import functools
import os
import secrets
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import jax
import numpy as np
import optax

from mirrordp import _validate
from mirrordp._rounding import upwards
from mirrordp._warn import warn
from mirrordp.data import UNPROTECTED, PrivateData, PublicData, refuse_private_rows
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency, DpEvent
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise, Noise
from mirrordp.privacy.selection import NumberOfRuns
from mirrordp.report.statement import RunReport
from mirrordp.spending import fingerprint as _fingerprint
from mirrordp.spending.budget import Budget, BudgetError
from mirrordp.spending.ledger import Block, Ledger, ledger_for
from mirrordp.training import checkpoint as checkpoints
from mirrordp.training.bookkeeping import check_spend
from mirrordp.training.central import TrainState
from mirrordp.training.checkpoint import Checkpoint, RunFolder
from mirrordp.training.engine import (
    TrainOptions,
    described_chart,
    described_loss,
    described_optimizer,
    train,
)
from mirrordp.training.step import TrainInfo, check_loss
from mirrordp.tuning.automatic import automatic_space, further_rates
from mirrordp.tuning.progress import Show, nothing_shown, shown_if
from mirrordp.tuning.rehearsal import Further, Rehearsal, rehearse
from mirrordp.tuning.scores import (
    PrivateScore,
    PublicScore,
    ScoreFn,
    check_score,
    described_score,
    example_scores,
    minus_loss,
)
from mirrordp.tuning.settings import Settings
from mirrordp.tuning.trials import (
    MakeOptimizer,
    Makings,
    Start,
    Trial,
    batched,
    kind_of,
    model_of,
    trained,
)
from mirrordp.types import LossFn, Params


@dataclasses.dataclass(frozen=True)
class Free:
    """A search on public rows alone, which costs no privacy.

    Args:
        score: how a model is judged.
        repetitions: how often a candidate is rehearsed, each time with other public rows in each
            role; those that are far behind after the first time are left out.
    """

    score: PublicScore = dataclasses.field(default_factory=PublicScore)
    repetitions: int = 4


@dataclasses.dataclass(frozen=True)
class Paid:
    """A search by private runs, of which there is a random number, all covered by ε.

    Args:
        runs: the distribution of the number of runs.
        score: how a model is judged; on private rows this costs privacy, which is charged too.
    """

    runs: NumberOfRuns = dataclasses.field(default_factory=lambda: NumberOfRuns(10))
    score: PublicScore | PrivateScore = dataclasses.field(default_factory=PublicScore)


@dataclasses.dataclass(frozen=True)
class Both:
    """A rehearsal on public rows that narrows the candidates, and a paid search among the rest.

    Args:
        free: the rehearsal.
        paid: the search.
        keep: how many candidates the paid search chooses from at most; those that the rehearsal
            found clearly worse than its best are left out in any case.
    """

    free: Free = dataclasses.field(default_factory=Free)
    paid: Paid = dataclasses.field(default_factory=lambda: Paid(NumberOfRuns(5)))
    keep: int = 4


@dataclasses.dataclass(frozen=True, repr=False)
class TuneResult:
    """The result of a search. All of it is covered by the report's ε.

    Attributes:
        params: the model.
        settings: the settings of its run; None if a Poisson number of runs was zero, and the model
            is the start.
        score: its score, by which it was chosen among private runs; None after a free search.
        mechanism: the mechanism of its run alone.
        report: the guarantee of the whole search.
        rehearsal: how candidates did on public rows, if there was a rehearsal.
    """

    params: Params
    settings: Settings | None
    score: float | None
    mechanism: Mechanism
    report: RunReport
    rehearsal: Rehearsal | None

    def __repr__(self) -> str:
        # The parameters would fill screens.
        arrays = jax.tree.leaves(self.params)
        numbers = sum(int(np.size(leaf)) for leaf in arrays)
        lines = [f"model: {numbers:,} numbers in {len(arrays)} array{'s' * (len(arrays) != 1)}"]
        lines.append(f"settings: {self.settings or 'none: no run was drawn, this is the start'}")
        if self.score is not None:
            lines.append(f"score: {self.score:.4g}")
        epsilon, delta = upwards(self.report.epsilon), upwards(self.report.delta, 6)
        lines.append(f"privacy: epsilon {epsilon} at delta {delta}")
        if self.rehearsal is not None:
            lines.append(f"rehearsal: {len(self.rehearsal.settings)} candidates on public rows")
        return "\n".join(["TuneResult", *(f"    {line}" for line in lines)])


def tune(
    loss_fn: LossFn,
    start: Start,
    private: PrivateData,
    public: PublicData | None = None,
    *,
    epsilon: float,
    delta: float,
    allow_large_delta: bool = False,
    space: Sequence[Settings] | None = None,
    way: Free | Paid | Both = Free(),
    optimizer: MakeOptimizer = optax.sgd,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    noise: Noise = GaussianNoise(),
    seed: int | None = None,
    spend: Ledger | Budget | None = None,
    checkpoint: Checkpoint | None = None,
    mesh: jax.sharding.Mesh | None = None,
    options: TrainOptions = TrainOptions(),
    together: int = 8,
    progress: bool = False,
    title: str = "A model tuned and trained with mirrordp",
    **step_options: Any,
) -> TuneResult:
    """Chooses settings and trains with them; the search and the model together cost (ε, δ).

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, as in `TrainStep`.
        start: where runs begin, or a function that learns the start from public rows, such as
            `lambda rows: mirrordp.warm_start(loss_fn, params, rows).params`. With a function, rows
            that judge are not among those that the start has seen.
        private: the sensitive rows.
        public: the public rows.
        epsilon: ε of everything.
        delta: δ of everything; above 1/n it is refused.
        allow_large_delta: whether to accept a δ above 1/n.
        space: the candidates, such as `mirrordp.tuning.grid(...)`; by default those that
            `automatic_space` finds from public rows, which are made for plain SGD. They must not
            come from a look at private rows. All candidates of a paid search have one batch size
            and one number of private steps.
        way: `Free()`, `Paid()` or `Both()`.
        optimizer: makes an optax optimiser from a learning rate.
        adjacency: the neighbours of the guarantee; the number of rows is public.
        noise: the noise of private runs; secure noise for the single private run of `Free` only.
        seed: makes everything reproducible and therefore not for release.
        spend: a ledger or budget that is charged, before a private row is used. (Where public
            rows are learned from, private ones are compared with them first.)
        checkpoint: keeps what is needed to go on after a crash, in a secret folder of its own. A
            search that goes on has the same number of runs, settings and noise.
        mesh: several devices, as in `mirrordp.train`.
        options: how runs are driven, as in `mirrordp.train`.
        together: how many runs are trained at a time.
        progress: shows how far the search is on standard error. For a paid search that is for the
            operator alone: the guarantee covers neither the number of runs nor the other models.
        title: what was trained, for the report.
        **step_options: further arguments of `TrainStep`, such as `public_batch_size=`.

    Returns:
        A `TuneResult`.

    Raises:
        UnsupportedError: if the cost of a paid search has no analysis.
        BudgetError: if the budget does not admit it.
    """
    _validate.positive(epsilon=epsilon)
    _validate.open_unit_interval(delta=delta)
    _validate.instance_of((Free, Paid, Both), "Use Free(), for one.", way=way)
    makings = Makings(
        loss_fn=loss_fn, start=start, private=private, public=public, optimizer=optimizer,
        adjacency=adjacency, noise=noise, step_options=step_options, options=options, mesh=mesh,
        together=together,
    )  # fmt: skip
    accounting.require_small_delta(delta, len(private), allow_large=allow_large_delta)
    candidates = _checked(automatic(makings, epsilon, delta) if space is None else space)
    check_spend(None, spend, checkpoint)
    with shown_if(progress) as show:
        call = Call(
            epsilon, delta, seed, spend, checkpoint, progress, show, title,
            further=further_rates if space is None else None,
        )  # fmt: skip
        if isinstance(way, Free):
            return _free(makings, candidates, way, call)
        rehearsal = None
        paid = way.paid if isinstance(way, Both) else way
        plan = _Search.planned(makings, candidates, paid, call)
        if isinstance(way, Both):
            _validate.positive_integer(keep=way.keep)
            plan.admit(call)
            rehearsal = rehearse(
                makings, candidates, plan.mechanism_of, score=way.free.score,
                repetitions=way.free.repetitions, show=show, further=call.further,
            )  # fmt: skip
            plan = dataclasses.replace(plan, candidates=tuple(rehearsal.narrowed(way.keep)))
        return _paid(plan, call, rehearsal, [paid, way.free] if isinstance(way, Both) else [paid])


class Call(NamedTuple):
    """The remaining arguments of `tune`."""

    epsilon: float
    delta: float
    seed: int | None = None
    spend: Ledger | Budget | None = None
    checkpoint: Checkpoint | None = None
    progress: bool = False
    show: Show = nothing_shown
    title: str = ""
    further: Further | None = None

    @property
    def may_be_charged(self) -> bool:
        """Whether there may be a run to go on with, which has been charged."""
        return self.checkpoint is not None and os.path.exists(self.checkpoint.folder)


def automatic(makings: Makings, epsilon: float, delta: float) -> list[Settings]:
    """Returns candidates where none are given."""
    public = makings.playing()
    if makings.optimizer is not optax.sgd:
        raise ValueError(
            "learning rates are found for optax.sgd where none are given, got another optimizer. "
            "Pass space=tuning.grid(...), or leave optimizer out."
        )
    params = makings.begin(public)
    check_loss("loss_fn", makings.loss_fn, params, public.arrays)
    return automatic_space(
        makings.loss_fn, params, public, epsilon=epsilon, delta=delta,
        num_examples=len(makings.private), adjacency=makings.adjacency,
        trainable=makings.step_options.get("trainable"),
    )  # fmt: skip


def _checked(space: Sequence[Settings]) -> tuple[Settings, ...]:
    candidates = tuple(space)
    if not candidates:
        raise ValueError("space must hold at least one candidate, got none. Use tuning.grid(...).")
    for number, candidate in enumerate(candidates):
        _validate.instance_of(Settings, "Use tuning.grid(...).", **{f"space[{number}]": candidate})
    return candidates


# Free.


class Chosen(NamedTuple):
    """What the rehearsal of a free search chose."""

    settings: Settings
    mechanism: Mechanism
    rehearsal: Rehearsal


def choose(makings: Makings, candidates: Sequence[Settings], way: Free, call: "Call") -> Chosen:
    """Rehearses on public rows; returns the settings of the one private run, which has all of ε."""

    @functools.cache
    def calibrated(batch_size: float, charged_steps: int, l2_clip_norm: float) -> float:
        # The rounding of secure noise is charged relative to the clip norm.
        kind = batch_size, charged_steps, l2_clip_norm
        like = next(
            each
            for each in candidates
            if (each.batch_size, each.charged_steps, each.l2_clip_norm) == kind
        )
        template = makings.mechanism(like, 1.0)
        return Mechanism.calibrate(
            epsilon=call.epsilon, delta=call.delta, sampling=template.sampling,
            num_steps=template.num_steps, l2_clip_norm=template.l2_clip_norm,
            adjacency=makings.adjacency, noise=makings.noise,
        ).noise_multiplier  # fmt: skip

    def mechanism_of(settings: Settings) -> Mechanism:
        sigma = calibrated(settings.batch_size, settings.charged_steps, settings.l2_clip_norm)
        return makings.mechanism(settings, sigma)

    kinds = {kind_of(each): each for each in candidates}
    _admit_one([mechanism_of(each) for each in kinds.values()], makings.private, call)
    rehearsal = rehearse(
        makings, candidates, mechanism_of, score=way.score, repetitions=way.repetitions,
        show=call.show, further=call.further,
    )  # fmt: skip
    for remark in rehearsal.remarks:
        warn(remark, UserWarning)
    best = rehearsal.settings[0]
    return Chosen(best, mechanism_of(best), rehearsal)


def _admit_one(mechanisms: Sequence[Mechanism], private: PrivateData, call: "Call") -> None:
    """Refuses a search none of whose runs the budget would admit, before hours of rehearsals."""
    # A run that is resumed may have been charged already; the loop knows.
    if not isinstance(call.spend, Budget) or call.may_be_charged:
        return
    call.spend.check_rows(private)
    refused = None
    for mechanism in mechanisms:
        call.spend.check_kind(mechanism)
        try:
            call.spend.admit_event(mechanism.event, delta=call.delta)
            return
        except BudgetError as error:
            refused = error.advising("Lower epsilon")
    assert refused is not None
    raise refused


def private_run(
    makings: Makings, chosen: Chosen, call: "Call"
) -> Iterator[tuple[TrainState, TrainInfo]]:
    """Takes the one private run of a free search; see `mirrordp.train`."""
    best = chosen.settings
    return train(
        makings.step(chosen.mechanism, best.learning_rate), makings.begin(makings.public),
        makings.private, makings.public,
        alpha=best.alpha, num_steps=best.num_steps, seed=call.seed, spend=call.spend,
        checkpoint=call.checkpoint, mesh=makings.mesh, options=makings.options,
    )  # fmt: skip


def _free(makings: Makings, candidates: Sequence[Settings], way: Free, call: "Call") -> TuneResult:
    chosen = choose(makings, candidates, way, call)
    state = info = None
    for state, info in private_run(makings, chosen, call):  # noqa: B007
        steps = f"step {info.step:,} of {info.num_steps:,}"
        text = f"private run: {steps}, epsilon {call.epsilon:g} in all"
        call.show(text, done=info.step, total=info.num_steps)
    assert state is not None
    assert info is not None
    _refuse_private_judges(makings, way)
    number = len(chosen.rehearsal.settings)
    report = RunReport.of(
        chosen.mechanism, call.delta, info=info, spend=call.spend, seed=call.seed, title=call.title,
        tuning=f"at no cost: {number} candidate{'s were' if number != 1 else ' was'} rehearsed on "
        "public rows alone",
        results={"settings": chosen.settings.to_dict()},
    )  # fmt: skip
    return TuneResult(
        model_of(state), chosen.settings, None, chosen.mechanism, report, chosen.rehearsal
    )


def _refuse_private_judges(makings: Makings, way: Free | Paid) -> None:
    """Refuses private rows that judge as if they were public. Call it after a charge."""
    rows = getattr(way.score, "rows", None)
    if rows is not None:
        refuse_private_rows(makings.private, rows, "rows that judge")


# Paid.


@dataclasses.dataclass(frozen=True)
class _Search:
    """A paid search with its noise and its cost, fixed before a private row is used."""

    makings: Makings
    candidates: tuple[Settings, ...]
    way: Paid
    noise_multiplier: float
    event: DpEvent

    @classmethod
    def planned(
        cls, makings: Makings, candidates: tuple[Settings, ...], way: Paid, call: Call
    ) -> "_Search":
        """Finds the least noise with which the whole search keeps to (ε, δ)."""
        if makings.is_secure:
            raise ValueError(
                f"runs of a paid search are repeatable, got {type(makings.noise).__name__}. Use "
                "GaussianNoise(), or way=Free() with secure noise."
            )
        kinds = {(each.batch_size, each.charged_steps) for each in candidates}
        if len(kinds) > 1:
            raise ValueError(
                "all runs of a paid search cost the same, so they have one batch size and one "
                f"number of private steps, got {len(kinds)} combinations. Fix both, or choose them "
                "with way=Free()."
            )
        _validate.instance_of(NumberOfRuns, "Use NumberOfRuns(10).", runs=way.runs)
        _validate.instance_of((PublicScore, PrivateScore), score=way.score)
        if isinstance(way.score, PublicScore) and makings.public is None and way.score.rows is None:
            raise ValueError(
                "a score on public rows needs some, got none. Pass public=..., or judge by "
                "Paid(score=PrivateScore(...))."
            )

        def event(noise_multiplier: float) -> DpEvent:
            run = makings.mechanism(candidates[0], noise_multiplier).event
            if isinstance(way.score, PrivateScore):
                score = way.score.mechanism(len(makings.private), makings.adjacency)
                run = dp_accounting.ComposedDpEvent([run, score.event])
            return way.runs.event(run)

        sigma = accounting.calibrate(
            event, epsilon_target=call.epsilon, delta=call.delta, adjacency=makings.adjacency
        )
        return cls(makings, candidates, way, sigma, event(sigma))

    def admit(self, call: Call) -> None:
        """Refuses a search that the budget would not admit, before hours of rehearsals."""
        if isinstance(call.spend, Budget) and not call.may_be_charged:
            call.spend.check_kind(self.mechanism_of(self.candidates[0]))
            call.spend.check_rows(self.makings.private)
            try:
                call.spend.admit_event(self.event, delta=call.delta)
            except BudgetError as error:
                raise error.advising("Lower epsilon") from None

    def mechanism_of(self, settings: Settings) -> Mechanism:
        """Returns the mechanism of one run."""
        return self.makings.mechanism(settings, self.noise_multiplier)

    @functools.cached_property
    def _rows(self) -> tuple[PublicData | None, PublicData | None]:
        """The public rows that runs learn from, and those that judge."""
        public, score = self.makings.public, self.way.score
        if isinstance(score, PrivateScore) or score.rows is not None:
            return public, getattr(score, "rows", None)
        assert public is not None
        if not self.makings.uses_public(self.candidates):
            return public, public
        order = np.random.default_rng(0).permutation(len(public))
        judges = max(1, round(score.fraction * len(public)))
        if judges >= len(public):
            raise ValueError(
                f"runs learn from some public rows and others judge, got {len(public)}. Bring more "
                "public rows, or judge by Paid(score=PrivateScore(...))."
            )
        parts = (np.sort(order[judges:]), np.sort(order[:judges]))
        learned, judging = (
            PublicData(jax.tree.map(lambda leaf: leaf[rows], public.arrays))  # noqa: B023
            for rows in parts
        )
        return learned, judging

    @functools.cached_property
    def start(self) -> Params:
        """The parameters at which every run begins."""
        return self.makings.begin(self._rows[0])

    @property
    def _judging(self) -> tuple[ScoreFn, PrivateData | PublicData]:
        """The score of a row, and the rows that judge."""
        score, judges = self.way.score, self._rows[1]
        if isinstance(score, PrivateScore):
            return score.score_fn, self.makings.private
        assert judges is not None
        return score.score_fn or minus_loss(self.makings.loss_fn), judges

    def drawn(self, entropy: int) -> list[Trial]:
        """Draws the number of runs, then the settings and the seed of each.

        Runs that can be trained together follow each other, in an order that depends on the draws
        alone: how many are done says which, however many are trained at a time.

        Every run draws its settings from the same list and has randomness of its own, so that runs
        are independent and alike, as the theorem has it. It also wants outcomes to be ordered, and
        of equal scores the first one wins. Kinds therefore follow each other as the candidates do:
        in the order in which they were drawn, runs that lost would decide between two that did not.
        Runs of one kind stay in the order of their draws, which says nothing about them.
        """
        number, rest = _children(entropy, 2)
        count = self.way.runs.draw(np.random.default_rng(number))
        trials = []
        for child in rest.spawn(count):
            chosen, seed = child.spawn(2)
            place = int(np.random.default_rng(chosen).integers(len(self.candidates)))
            trials.append(Trial(self.candidates[place], _integer(seed)))
        kinds = list(dict.fromkeys(map(kind_of, self.candidates)))
        return sorted(trials, key=lambda trial: kinds.index(kind_of(trial.settings)))

    def scored(self, trials: Sequence[Trial]) -> Iterator[tuple[float, Params]]:
        """Trains and scores runs of one kind; yields their scores and models in order."""
        makings, score = self.makings, self.way.score
        learned, (score_fn, judges) = self._rows[0], self._judging
        mechanism = self.mechanism_of(trials[0].settings)
        models = trained(makings, mechanism, trials, self.start, makings.private, learned)
        for trial, model in zip(trials, models, strict=True):
            if isinstance(score, PrivateScore):
                # Independent of the run's own noise, which comes from other children of its seed.
                (child,) = np.random.SeedSequence(trial.seed, spawn_key=(1000,)).spawn(1)
                key = jax.random.wrap_key_data(
                    jax.numpy.asarray(child.generate_state(2)), impl="threefry2x32"
                )
                found = score.release(model, makings.private, key)
            else:
                found = float(np.mean(example_scores(score_fn, model, judges.arrays)))
            # A model that diverged is an outcome like any other, and the worst one.
            yield found if np.isfinite(found) else -np.inf, model

    def configuration(self, key: bytes) -> Mapping[str, str]:
        """Returns what must be unchanged when the search is resumed."""
        makings, learned = self.makings, self._rows[0]
        step = makings.step(self.mechanism_of(self.candidates[0]))
        params = jax.tree.map(jax.numpy.asarray, self.start)
        programs = ("loss_fn", "mechanism", "optimizer", "public_loss_fn", "chart")
        names = [f.name for f in dataclasses.fields(step) if f.name not in programs]
        public_loss = ""
        if step.public_loss_fn is not None and learned is not None:
            public_loss = described_loss(
                "public_loss_fn", step, step.public_loss_fn, params, learned
            )
        rows = (self.makings.private.arrays, [each and each.arrays for each in self._rows])
        score, (score_fn, judges) = self.way.score, self._judging
        return {
            **checkpoints.fields("mechanism", step.mechanism),
            **checkpoints.fields("number of runs", self.way.runs),
            "candidates": _fingerprint.of_text(
                {str(number): each.described for number, each in enumerate(self.candidates)}
            ),
            "score": type(score).__name__
            + (
                f" {score.low!r} {score.high!r} {score.noise_multiplier!r}"
                if isinstance(score, PrivateScore)
                else ""
            ),
            "score_fn": described_score(score_fn, params, judges),
            "loss_fn": described_loss("loss_fn", step, step.loss_fn, params, makings.private),
            "optimizer": described_optimizer(step, params, has_public=learned is not None),
            "start": _fingerprint.of_arrays(
                key, (params, step.optimizer.init(step.trainable.part(params)))
            ),
            "data": _fingerprint.of_arrays(key, rows),
            "public_loss_fn": public_loss,
            **described_chart(step, params, key, [params]),
            **{name: str(getattr(step, name)) for name in names},
            **checkpoints.fields("options", makings.options),
            # Both change how sums are rounded, which matters where a run is repeated.
            checkpoints.PLACEMENT: f"{makings.together} runs at a time"
            + ("" if makings.mesh is None else f" on {dict(makings.mesh.shape)}"),
        }


def _children(entropy: int, count: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence(entropy).spawn(count)


def _integer(sequence: np.random.SeedSequence) -> int:
    return int.from_bytes(sequence.generate_state(4).tobytes(), "little")


class _Best(NamedTuple):
    """The best run so far, and how many are done. It is secret until the search is over."""

    done: int
    settings: int
    score: float
    params: Params | None


def _paid(
    search: _Search, call: Call, rehearsal: Rehearsal | None, ways: Sequence[Free | Paid]
) -> TuneResult:
    makings = search.makings
    mechanism = search.mechanism_of(search.candidates[0])
    step, (learned, judging) = makings.step(mechanism), search._rows
    # Everything that can be wrong with the model or the data is found before the search is charged.
    step.check(search.start, makings.private, learned)
    score_fn, judges = search._judging
    check_score(score_fn, search.start, judges)

    def compare() -> None:
        for way in ways:
            _refuse_private_judges(makings, way)
        score = search.way.score
        if isinstance(score, PublicScore) and score.rows is None:
            assert judging is not None
            refuse_private_rows(makings.private, judging, "rows that judge")
        step.excluded(makings.private, learned, makings.options.overlap)

    handled = sys.exc_info()[1]
    try:
        best = _best_run(search, mechanism, call, compare)
    except BaseException as error:
        _forget(error, handled)
        raise
    return _released(search, call, best, rehearsal)


def _best_run(
    search: _Search, mechanism: Mechanism, call: Call, compare: Callable[[], None]
) -> _Best:
    """Charges the search and does what is left of it.

    Args:
        search: the search.
        mechanism: the mechanism of one run.
        call: what else was asked for.
        compare: compares private with public rows; called once the search is charged.
    """
    with _Books.opened(search, mechanism, call) as books:
        best = books.begin(_Best(0, -1, -np.inf, None), search.start)
        trials = search.drawn(books.entropy)
        compare()
        # Nothing is left of a search that was over: it is released as it was.
        left = trials[best.done :]
        for numbers in batched(left, search.makings.together):
            chosen = [left[number] for number in numbers]
            # What there is to say was said by the checks; a warning for each run would count them.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for trial, (score, model) in zip(chosen, search.scored(chosen), strict=True):
                    if best.params is None or score > best.score:
                        place = search.candidates.index(trial.settings)
                        best = best._replace(settings=place, score=score, params=model)
            best = best._replace(done=best.done + len(chosen))
            books.keep(best)
            _show_trials(search, call, best)
        books.finish()
    return best


def _forget(error: BaseException, handled: BaseException | None) -> None:
    """Clears the variables of calls that failed: they hold the number of runs and their models.

    Args:
        error: what ended the search.
        handled: what was being handled before it began, which is left as it is.
    """
    chain: list[BaseException | None] = [error]
    for each in chain:
        if each is not None and each is not handled:
            traceback.clear_frames(each.__traceback__)
            if isinstance(each, OSError):
                # The name of a file says how many checkpoints there were before it.
                del each.filename, each.filename2
            chain += [e for e in (each.__cause__, each.__context__) if e not in chain]


_SHOWN = "how many runs were done, and on public rows how the best did, on the operator's terminal"


def _show_trials(search: _Search, call: Call, best: _Best) -> None:
    """Tells the operator how far the search is; private scores are not shown."""
    shown = ""
    if isinstance(search.way.score, PublicScore):
        shown = f", best public score {best.score:.4g}"
    runs = f"{best.done} run{'s' * (best.done != 1)} done{shown}"
    # The mark first: a narrow terminal cuts the end of the line.
    call.show(f"{UNPROTECTED} {runs}, epsilon {call.epsilon:g} charged")


def _released(search: _Search, call: Call, best: _Best, rehearsal: Rehearsal | None) -> TuneResult:
    settings = None if best.params is None else search.candidates[best.settings]
    mechanism = search.mechanism_of(settings or search.candidates[0])
    judged = "private rows, with noise that is charged too"
    if isinstance(search.way.score, PublicScore):
        judged = "public rows"
    number, narrowed = len(search.candidates), ""
    if rehearsal is not None:
        of = len(rehearsal.settings)
        narrowed = f"; a rehearsal on public rows had narrowed the list from {of} to {number}"
        if number == of:
            narrowed = "; a rehearsal on public rows had left all of them"
    report = RunReport.of(
        mechanism, call.delta, event=search.event, spend=call.spend, seed=call.seed,
        seeded=call.seed is not None, title=call.title,
        tuning=f"charged: epsilon covers the search over {number} candidate{'s' * (number != 1)}, "
        f"judged on {judged}{narrowed}",
        shown_without_protection=[_SHOWN] if call.progress else [],
        results={}
        if settings is None
        else {
            "settings": settings.to_dict(),
            "score": best.score if np.isfinite(best.score) else None,
        },
    )  # fmt: skip
    if settings is None:
        return TuneResult(search.start, None, None, mechanism, report, rehearsal)
    return TuneResult(best.params, settings, best.score, mechanism, report, rehearsal)


class _Books:
    """The charge of a search and its secret folder, in the order of `mirrordp.training`."""

    def __init__(
        self,
        search: _Search,
        spend: Ledger | Budget,
        folder: RunFolder | None,
        seed: int | None,
    ):
        self._search, self._spend, self._folder, self._seed = search, spend, folder, seed
        self._name = secrets.token_hex(8) if folder is None else folder.id
        self.entropy = 0

    @classmethod
    @contextlib.contextmanager
    def opened(cls, search: _Search, mechanism: Mechanism, call: Call) -> "Iterator[_Books]":
        """Opens the folder and asks the budget; reads no row but to compare data."""
        adjacency, spend = mechanism.adjacency, call.spend
        ledger_for(adjacency, spend if isinstance(spend, Ledger) else None, mechanism.unit)
        folder = None if call.checkpoint is None else call.checkpoint.open(adjacency, spend)
        try:
            if spend is None:
                spend = Ledger(adjacency) if folder is None else folder.ledger
            books = cls(search, spend, folder, call.seed)
            books._admit(mechanism)
            if folder is not None:
                (books.entropy,) = folder.verify(search.configuration(folder.key), [call.seed])
            else:
                books.entropy = secrets.randbits(128) if call.seed is None else call.seed
            yield books
        finally:
            if folder is not None:
                folder.close()

    @property
    def _is_charged(self) -> bool:
        return self._folder is not None and self._folder.ledger.charged_steps(self._name) > 0

    def _admit(self, mechanism: Mechanism) -> None:
        if isinstance(self._spend, Budget):
            self._spend.check_kind(mechanism)
            if not self._is_charged:
                self._spend.admit_event(self._search.event)
            self._spend.check_rows(self._search.makings.private)
            self._spend.check_seed(self._seed, self._name)

    def begin(self, best: _Best, like: Params) -> _Best:
        """Puts the randomness on disk, then charges the whole search; returns where it stands."""
        if self._folder is not None and self._folder.saved is None:
            self.keep(best)
        if isinstance(self._spend, Budget):
            self._spend.claim_seed(self._seed, self._name)
        if not self._is_charged:
            self._spend.charge(self._search.event, block=Block(self._name, 0, 1))
        if self._folder is None or self._folder.saved is None:
            return best
        saved = self._folder.saved
        params = None
        if saved.position["settings"] >= 0:
            like = jax.tree.map(jax.numpy.asarray, like)
            params = checkpoints.from_arrays(like, saved.arrays, "params")
        score = float(saved.arrays["score"])
        return _Best(saved.position["done"], saved.position["settings"], score, params)

    def keep(self, best: _Best) -> None:
        """Writes the best run so far into the secret folder."""
        if self._folder is None:
            return
        arrays = {"score": np.float64(best.score)}
        if best.params is not None:
            arrays |= checkpoints.to_arrays(best.params, "params")
        self._folder.save({"done": best.done, "settings": best.settings}, arrays)  # pyright: ignore[reportArgumentType]

    def finish(self) -> None:
        """Removes the secrets of a search that is over."""
        if self._folder is not None:
            self._folder.finish()
