"""Opening the store of a cluster."""

from typing import Final

from kici.ports.store import Store
from kici.stores.postgres.engine import Pool
from kici.stores.store import SqlStore

POOL_MAX: Final = 20
ACQUIRE_TIMEOUT_SECONDS: Final = 5.0
STATEMENT_TIMEOUT_SECONDS: Final = 30.0


def open_postgres(
    url: str,
    *,
    pool_max: int = POOL_MAX,
    acquire_timeout_seconds: float = ACQUIRE_TIMEOUT_SECONDS,
    statement_timeout_seconds: float = STATEMENT_TIMEOUT_SECONDS,
) -> Store:
    """The store in the PostgreSQL database at `url`.  Connects at first use.  Call `migrate` before anything else.

    `acquire_timeout_seconds` is how long a caller waits for a free connection before it is told `StoreDown`.
    """
    return SqlStore(
        Pool(
            url,
            pool_max=pool_max,
            acquire_timeout_seconds=acquire_timeout_seconds,
            statement_timeout_seconds=statement_timeout_seconds,
        )
    )
