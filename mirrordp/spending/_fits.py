"""The fits that one process makes: which of them belong together, and what they cost together.

A search or a cross-validation fits a private estimator many times, each time at its full ε, and
nobody adds that up. The rows of two fits are never compared to find out whether they describe the
same people, since a report states the total, and a report must not depend on whether a person is
in both tables. Instead, fits count as related if their estimators are copies of one another
(`sklearn.clone`) or if their tables have the same shape, which is public. The stated total holds if
they read the same people.
"""

import dataclasses
import math
import secrets

from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency


@dataclasses.dataclass
class Lineage:
    """A value that an estimator shares with its copies.

    Attributes:
        name: a name that a copy keeps when it is sent to another process.
        copies: the number of copies that were made in this process.
        fits: the number of fits that they made in this process.
    """

    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    copies: int = 0
    fits: int = 0


@dataclasses.dataclass(frozen=True)
class Together:
    """Fits that may have read the same rows, the last one included.

    Attributes:
        fits: the number of fits, including those of `elsewhere`.
        elsewhere: the number of copies of the estimator that were not fitted in this process; each
            counts as fitted like the last one.
        precision: Σ T/σ² over all fits, with T steps at noise multiplier σ.
        of_one: T/σ² of the last fit.
        is_news: whether the operator should be told now. This is so at the second fit, when fits of
            parts are followed by one of a larger table (a search ends with a fit of all rows), and
            when fits were made in other processes.
    """

    fits: int
    elsewhere: int
    precision: float
    of_one: float
    is_news: bool

    def epsilon(
        self, delta: float, adjacency: Adjacency, *, fits_like_the_last: int | None = None
    ) -> float:
        """Returns ε of all fits, or of a number of fits like the last one.

        Gaussian mechanisms add up in Σ T/σ².
        """
        precision = self.precision
        if fits_like_the_last is not None:
            precision = fits_like_the_last * self.of_one
        event = accounting.full_batch_event(1 / math.sqrt(precision), num_steps=1)
        return accounting.epsilon(event, delta, adjacency=adjacency).epsilon


@dataclasses.dataclass
class _Group:
    fits: int = 0
    precision: float = 0.0
    # The number of fits since the operator was last told, and the most rows that one of them had.
    untold: int = 0
    most_rows: int = 0


class Fits:
    """The fits of this process that were charged to no budget."""

    def __init__(self):
        self._groups: dict[object, _Group] = {}

    def clear(self) -> None:
        """Forgets all of them."""
        self._groups.clear()

    def add(
        self, lineage: Lineage, shape: tuple[int, int], num_steps: int, noise_multiplier: float
    ) -> Together:
        """Counts a fit, and returns it together with its related fits."""
        group = self._group(lineage.name, shape)
        of_one = num_steps / noise_multiplier**2
        group.fits += 1
        group.precision += of_one
        group.untold += 1
        lineage.fits += 1
        unseen = lineage.copies - lineage.fits
        # A search makes its copies from a few that are never fitted.
        elsewhere = unseen if unseen > 1 + lineage.fits else 0
        # Folds differ from one another by a row or two, and from the whole by at least 2%.
        is_whole = group.untold > 1 and shape[0] > 1.01 * group.most_rows + 1 > 1
        is_news = group.fits == 2 or is_whole or elsewhere > 0
        group.most_rows = 0 if is_whole else max(group.most_rows, shape[0])
        group.untold = 0 if is_news else group.untold
        return Together(
            fits=group.fits + elsewhere,
            elsewhere=elsewhere,
            precision=group.precision + elsewhere * of_one,
            of_one=of_one,
            is_news=is_news,
        )

    def _group(self, *keys: object) -> _Group:
        """Returns the group of all keys, after merging the groups that they had before."""
        found = list({id(g): g for key in keys if (g := self._groups.get(key))}.values())
        group, *others = found or [_Group()]
        for other in others:
            group.fits += other.fits
            group.precision += other.precision
            group.untold += other.untold
            group.most_rows = max(group.most_rows, other.most_rows)
            self._groups |= {key: group for key, old in self._groups.items() if old is other}
        self._groups |= dict.fromkeys(keys, group)
        return group
