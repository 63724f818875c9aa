"""Ledgers and budgets of what was spent, in files that survive a crash."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.spending.budget import (
        Budget as Budget,
        BudgetError as BudgetError,
    )
    from mirrordp.spending.files import (
        StorageError as StorageError,
    )
    from mirrordp.spending.ledger import (
        FileLedger as FileLedger,
        Ledger as Ledger,
        LedgerError as LedgerError,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
