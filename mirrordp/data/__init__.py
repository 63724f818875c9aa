"""Rows and users, private and public, as different types."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.data.rows import (
        UNPROTECTED as UNPROTECTED,
        ClientData as ClientData,
        Overlap as Overlap,
        PrivateClients as PrivateClients,
        PrivateData as PrivateData,
        PublicClients as PublicClients,
        PublicData as PublicData,
        UnprotectedWarning as UnprotectedWarning,
        excluded_rows as excluded_rows,
        excluded_users as excluded_users,
        have_same_structure as have_same_structure,
        refuse_private_rows as refuse_private_rows,
        require_private as require_private,
        require_private_clients as require_private_clients,
        require_public as require_public,
        require_same_structure as require_same_structure,
        split_rows as split_rows,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
