"""What was spent: events in the order in which they were charged.

A run charges a block of steps *before* it executes them, so the ledger never says less than what
results can reveal. The ledger is a value and a reader: it keeps events, and ε is computed from
them when asked, never stored.
"""

from collections.abc import Sequence

import dp_accounting

from mirrordp import accounting
from mirrordp.accounting import Accountant, Adjacency, DpEvent, Epsilon


class Ledger:
    """An append-only list of charged events under one adjacency."""

    def __init__(self, adjacency: Adjacency):
        self._adjacency = adjacency
        self._blocks: list[tuple[DpEvent, int]] = []

    @property
    def adjacency(self) -> Adjacency:
        """The neighbours that the spent ε speaks of."""
        return self._adjacency

    def charge(self, event: DpEvent) -> None:
        """Appends an event; equal neighbours are kept as one with a count."""
        if isinstance(event, dp_accounting.NoOpDpEvent):
            return
        inner, count = event, 1
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            inner, count = event.event, event.count
        if self._blocks and self._blocks[-1][0] == inner:
            count += self._blocks.pop()[1]
        self._blocks.append((inner, count))

    @property
    def event(self) -> DpEvent:
        """Everything charged so far, as one event."""
        parts: list[DpEvent] = [
            dp_accounting.SelfComposedDpEvent(event, count) for event, count in self._blocks
        ]
        if not parts:
            return dp_accounting.NoOpDpEvent()
        return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)

    def epsilon(
        self,
        delta: float,
        *,
        accountant: Accountant | None = None,
        orders: Sequence[float] | None = None,
    ) -> Epsilon:
        """ε of everything charged so far; asking changes nothing."""
        return accounting.epsilon(
            self.event, delta, adjacency=self._adjacency, accountant=accountant, orders=orders
        )
