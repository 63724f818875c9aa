"""Rows and users, private and public, as different types."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.data.rows import (
        UNPROTECTED as UNPROTECTED,
        Gather as Gather,
        Overlap as Overlap,
        PrivateData as PrivateData,
        PublicData as PublicData,
        UnprotectedWarning as UnprotectedWarning,
        excluded_rows as excluded_rows,
        have_same_structure as have_same_structure,
        refuse_private_rows as refuse_private_rows,
        require_private as require_private,
        require_public as require_public,
        require_same_structure as require_same_structure,
        split_rows as split_rows,
    )
    from mirrordp.data.sources import (
        RowSource as RowSource,
        copy_rows as copy_rows,
        dataset_rows as dataset_rows,
        decoded_rows as decoded_rows,
        hdf5_rows as hdf5_rows,
        parquet_rows as parquet_rows,
        read_rows as read_rows,
    )
    from mirrordp.data.users import (
        ClientData as ClientData,
        PrivateClients as PrivateClients,
        PublicClients as PublicClients,
        excluded_users as excluded_users,
        one_row_per_user as one_row_per_user,
        refuse_shared_users as refuse_shared_users,
        require_private_clients as require_private_clients,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
