"""A rehearsal of private runs on public rows, which costs no privacy.

Some public rows play the private ones, others play the public ones, and the rest judges. A private
step releases the mean clipped gradient of B rows with noise of standard deviation σC/B. With n' < n
rows to play with, the rehearsal takes

    B' = min(B, n'),     σ' = σ B'/B,

so that C, the number of steps and the noise σ'C/B' on the mean gradient are those of the real run.
If B' = B the rows of a batch vary as much as in the real run, too.

What differs is that few rows are seen often, so that the model fits them in a way that it cannot
fit n rows. For least squares and a fit that is linear in the targets, with noise of variance s² in
them and predictions S y on the rows that were learned from, the expected loss is, up to factors ½,

    H = b + tr(SᵀS) s²/n'            on rows that judge,
    P = H − 2 tr(S) s²/n'            on rows that were played,

where b is what is left without overfitting. The second term of H shrinks to n'/n of itself in the
real run. With ρ = tr(SᵀS)/tr(S), which is one for a fit that does not shrink and smaller for one
that is stopped early, that term is ρ (H − P)/2, and the loss of the real run is about

    H − (1 − n'/n) (ρ/2) (H − P).

Candidates are compared by it, with ρ = ½. Without it, those that learn fast or long would be
punished for overfitting that the real run does not have.

The roles go round: in each repetition other rows judge and other rows play. Candidates that the
first repetition finds far behind are not rehearsed again; if one is left, it is the best.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from mirrordp import _validate
from mirrordp.data import PrivateData, PublicData, UnprotectedWarning
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.noise import GaussianNoise
from mirrordp.privacy.sampling import PoissonSampling
from mirrordp.training.step import check_loss
from mirrordp.tuning.progress import Show
from mirrordp.tuning.scores import PublicScore, check_score, example_scores, minus_loss
from mirrordp.tuning.settings import Settings
from mirrordp.tuning.trials import Makings, Trial, batched, trained
from mirrordp.types import Params, PyTree

_LEAST_ROWS = 20
_FEW_JUDGES = 50
_PLAY_PUBLIC = 0.5
# ρ of the module's docstring.
_SHRINKAGE = 0.5
# In standard errors. The first repetition cannot tell how much repetitions differ.
_FAR_BEHIND = 4.0
# How often a list of rates is made longer, by a factor of ten each time.
_LONGER = 3
Further = Callable[[Sequence[Settings], Settings], Sequence[Settings]]
"""Given all candidates and the best one, returns further ones to try."""
# Of a candidate, in each repetition: the scores of rows that judge, and of those that were played.
_Scores = list[list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """How candidates did on public rows, the best first.

    Attributes:
        settings: the candidates.
        scores: the mean score of each, corrected for rows that are seen too often.
        differences: by how much the best was better than each.
        standard_errors: the standard error of each difference, over rows and repetitions.
        num_rows: how many public rows played the private ones, played the public ones, and judged.
        remarks: what limits the rehearsal, in sentences.
    """

    settings: tuple[Settings, ...]
    scores: tuple[float, ...]
    differences: tuple[float, ...]
    standard_errors: tuple[float, ...]
    num_rows: tuple[int, int, int]
    remarks: tuple[str, ...]

    @property
    def is_sure(self) -> bool:
        """Whether the best is better than the next by more than two standard errors."""
        return len(self.settings) == 1 or self.differences[1] > 2 * self.standard_errors[1]

    def narrowed(self, keep: int) -> list[Settings]:
        """Returns at most `keep` candidates, none of them clearly worse than the best.

        A difference of more than two standard errors counts as clear.
        """
        close = [
            candidate
            for candidate, difference, error in zip(
                self.settings, self.differences, self.standard_errors, strict=True
            )
            if difference <= 2 * error
        ]
        return close[:keep]

    def __str__(self) -> str:
        behind = [
            f" (behind by {difference:.2g} ± {error:.2g})"
            for difference, error in zip(self.differences, self.standard_errors, strict=True)
        ]
        lines = [
            f"{score:.4g}{place}: {settings}"
            for settings, score, place in zip(
                self.settings, self.scores, [" (best)", *behind[1:]], strict=True
            )
        ]
        return "\n".join([*lines, *self.remarks])


def rehearse(
    makings: Makings,
    candidates: Sequence[Settings],
    mechanism_of: Callable[[Settings], Mechanism],
    *,
    score: PublicScore,
    repetitions: int,
    show: Show,
    further: Further | None = None,
) -> Rehearsal:
    """Rehearses every candidate, each repetition with other rows in each role.

    Randomness comes from fixed seeds: nothing here is secret, and a search that is resumed
    rehearses as before.

    Args:
        makings: what the runs have in common.
        candidates: the settings to compare.
        mechanism_of: the mechanism of the real run with given settings.
        score: how a model is judged.
        repetitions: how often a candidate is rehearsed that is not far behind.
        show: tells the operator how far it is.
        further: where the list of candidates is not the caller's, what to try beyond it.
    """
    _validate.positive_integer(repetitions=repetitions)
    candidates = list(candidates)
    public = makings.playing()
    score_fn = score.score_fn or minus_loss(makings.loss_fn)
    real = [mechanism_of(settings) for settings in candidates]
    num_rows = _shares(len(public), score, has_public_role=makings.uses_public(candidates))
    weights = _weights(num_rows[0], len(makings.private), score)
    found: list[_Scores] = [[] for _ in candidates]
    left, before = list(range(len(candidates))), 0

    def take_turn(numbers: Sequence[int], repetition: int) -> None:
        nonlocal before
        total = before + (repetitions - repetition) * len(numbers)
        scored = _rehearsed(
            makings, [candidates[number] for number in numbers],
            [real[number] for number in numbers],
            _dealt(public, num_rows, score, turn=repetition / repetitions),
            weights, score_fn, repetition,
        )  # fmt: skip
        for place, own in scored:
            found[numbers[place]].append(own)
            before += 1
            best = max(_mean(found[number], weights) for number in left if found[number])
            text = f"{before} of {total} rehearsals, best public score {best:.4g}, epsilon 0 so far"
            show(text, done=before, total=total)

    for repetition in range(repetitions):
        take_turn(left, repetition)
        if repetition == 0:
            for _ in range(_LONGER if further else 0):
                assert further is not None
                more = further(candidates, candidates[_compared(found, weights)[0]])
                if not more:
                    break
                new = range(len(candidates), len(candidates) + len(more))
                candidates += more
                real += [mechanism_of(settings) for settings in more]
                found += [[] for _ in more]
                left += new
                take_turn(new, repetition)
            _, differences, errors = _compared(found, weights)
            left = [n for n in left if differences[n] <= _FAR_BEHIND * errors[n]]
        if len(left) == 1:
            break
    rehearsal = _judged(candidates, found, weights, num_rows)
    batch_size = max(mechanism.sampling.expected_batch_size for mechanism in real)
    remarks = _remarks(rehearsal, batch_size, is_own_list=further is None)
    return dataclasses.replace(rehearsal, remarks=remarks)


def _weights(num_played: int, num_private: int, score: PublicScore) -> list[float]:
    """Returns how much rows that judge count, and those that were played if they do."""
    # Rows of the caller's own may come from elsewhere, and then H − P is no overfitting.
    if score.rows is not None or num_played >= num_private:
        return [1.0]
    correction = _SHRINKAGE / 2 * (1 - num_played / num_private)
    return [1 - correction, correction]


def _shares(rows: int, score: PublicScore, *, has_public_role: bool) -> tuple[int, int, int]:
    """Returns how many rows play the private ones, play the public ones, and judge."""
    judges = 0 if score.rows is not None else round(score.fraction * rows)
    others = round(_PLAY_PUBLIC * rows) if has_public_role else 0
    played = rows - judges - others
    if rows < _LEAST_ROWS or played < 2:
        raise ValueError(
            f"a rehearsal needs at least {_LEAST_ROWS} public rows, some of which play the private "
            f"ones, got {rows}. Bring more public rows, or search with way=Paid(...)."
        )
    return played, others, len(score.rows) if score.rows is not None else judges


def _dealt(
    public: PublicData, num_rows: tuple[int, int, int], score: PublicScore, *, turn: float
) -> tuple[PrivateData, PublicData | None, PublicData]:
    order = np.random.default_rng(0).permutation(len(public))
    order = np.roll(order, round(turn * len(public)))

    def part(first: int, count: int) -> dict:
        rows = np.sort(order[first : first + count])
        return jax.tree.map(lambda leaf: leaf[rows], public.arrays)

    played, others, judges = num_rows
    return (
        PrivateData(part(0, played)),
        PublicData(part(played, others)) if others else None,
        score.rows or PublicData(part(played + others, judges)),
    )


def _rehearsed(
    makings: Makings,
    candidates: Sequence[Settings],
    real: Sequence[Mechanism],
    parts: tuple[PrivateData, PublicData | None, PublicData],
    weights: Sequence[float],
    score_fn: Callable,
    repetition: int,
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yields the place of each candidate with its scores, for each kind of rows with a weight."""
    played, others, judges = parts
    scored = (judges, played)[: len(weights)]
    params = makings.begin(others)
    check_loss("loss_fn", makings.loss_fn, params, played.arrays)
    check_score(score_fn, params, judges)
    # All candidates have the same batches and noise, as far as they can, for a fair comparison.
    trials = [Trial(settings, seed=repetition) for settings in candidates]

    def scores_of(model: Params, arrays: PyTree) -> np.ndarray:
        scores = np.asarray(example_scores(score_fn, model, arrays), np.float64)
        # A model that diverged is worse than any other.
        return np.where(np.isfinite(scores), scores, -np.inf)

    with warnings.catch_warnings():
        # Public rows may equal each other.
        warnings.simplefilter("ignore", UnprotectedWarning)
        for numbers in batched(trials, makings.together):
            mechanism = scaled(real[numbers[0]], len(played))
            models = trained(
                makings, mechanism, [trials[number] for number in numbers], params, played, others
            )
            for number, model in zip(numbers, models, strict=True):
                yield number, [scores_of(model, part.arrays) for part in scored]


def scaled(mechanism: Mechanism, num_rows: int) -> Mechanism:
    """Returns the mechanism of a rehearsal with `num_rows` rows in the place of the private ones.

    The noise on the mean gradient, σC/B, stays the same.
    """
    batch_size = mechanism.sampling.expected_batch_size
    smaller = min(batch_size, num_rows)
    return dataclasses.replace(
        mechanism,
        sampling=PoissonSampling.for_batch_size(smaller, num_examples=num_rows),
        noise_multiplier=mechanism.noise_multiplier * smaller / batch_size,
        noise=GaussianNoise(),
        accountant=None,
    )


def _judged(
    candidates: Sequence[Settings],
    found: Sequence[_Scores],
    weights: Sequence[float],
    num_rows: tuple[int, int, int],
) -> Rehearsal:
    """Orders the candidates by how far they are behind the best one."""
    best, differences, errors = _compared(found, weights)
    order = sorted(range(len(found)), key=lambda number: (number != best, differences[number]))
    score = _mean(found[best], weights)
    return Rehearsal(
        settings=tuple(candidates[number] for number in order),
        scores=tuple(score - differences[number] for number in order),
        differences=tuple(differences[number] for number in order),
        standard_errors=tuple(errors[number] for number in order),
        num_rows=num_rows,
        remarks=(),
    )


def _compared(
    found: Sequence[_Scores], weights: Sequence[float]
) -> tuple[int, list[float], list[float]]:
    """Returns the number of the best, and how far each one is behind it with a standard error.

    Candidates are compared on the repetitions that they have had; the best has had all of them.
    """
    most = max(map(len, found))
    means = [_mean(own, weights) if len(own) == most else -np.inf for own in found]
    best = int(np.argmax(means))
    if not np.isfinite(means[best]):
        raise ValueError(
            "every candidate of the rehearsal diverged: no score was finite. Use smaller learning "
            "rates."
        )
    differences, errors = [], []
    for own in found:
        pairs = list(zip(found[best], own, strict=False))
        if not all(np.isfinite(each).all() for _, scores in pairs for each in scores):
            differences.append(math.inf)
            errors.append(0.0)
            continue
        ahead = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
        differences.append(_mean(ahead, weights))
        errors.append(_standard_error(ahead, weights))
    return best, differences, errors


def _mean(scores: _Scores, weights: Sequence[float]) -> float:
    """Returns the mean over repetitions."""
    return float(np.mean([_weighted(each, weights) for each in scores]))


def _weighted(scores: Sequence[np.ndarray], weights: Sequence[float]) -> float:
    """Returns the weighted mean over the rows of one repetition."""
    return sum(weight * float(each.mean()) for weight, each in zip(weights, scores, strict=True))


def _standard_error(differences: _Scores, weights: Sequence[float]) -> float:
    """Returns the standard error of a weighted mean of differences over rows and repetitions."""
    count = len(differences)
    over_rows = sum(
        weight**2 * each.var(ddof=1 if len(each) > 1 else 0) / len(each)
        for own in differences
        for weight, each in zip(weights, own, strict=True)
    )
    means = [_weighted(own, weights) for own in differences]
    over_runs = np.var(means, ddof=1) / count if count > 1 else 0.0
    return math.sqrt(over_rows / count**2 + over_runs)


def _remarks(rehearsal: Rehearsal, largest_batch: float, *, is_own_list: bool) -> tuple[str, ...]:
    """Returns what limits the rehearsal; the caller can change only a list of their own."""
    found = []
    played, _, judges = rehearsal.num_rows
    if played < largest_batch:
        found.append(
            f"the rehearsal has {played} rows to play the private ones and batches of "
            f"{largest_batch:g} in the real run, so each of its steps sees the same rows; bring "
            f"more public rows{', or try smaller batches' * is_own_list}."
        )
    if judges < _FEW_JUDGES:
        found.append(
            f"only {judges} public rows judge the rehearsal, too few to tell settings apart; bring "
            "more public rows, or search with way=Paid(...)."
        )
    if not rehearsal.is_sure:
        found.append(
            "the rehearsal cannot tell the best settings from the next: they differ by "
            f"{rehearsal.differences[1]:.2g} with a standard error of "
            f"{rehearsal.standard_errors[1]:.2g}."
        )
    rates = sorted({each.learning_rate for each in rehearsal.settings})
    best = rehearsal.settings[0].learning_rate
    if len(rates) > 1 and best in (rates[0], rates[-1]):
        end, beyond = ("smallest", "smaller") if best == rates[0] else ("largest", "larger")
        found.append(
            f"the best learning rate of the rehearsal, {best:.3g}, is the {end} of the list"
            + (f"; try {beyond} ones, too." if is_own_list else ".")
        )
    return tuple(found)
