"""Opening the embedded store."""

from collections.abc import Callable

from kici.ports.store import Store
from kici.stores.sqlite.core import IN_MEMORY, Core, wall_now_ms
from kici.stores.sqlite.engine import Inline, Threads
from kici.stores.store import SqlStore


def open_sqlite(path: str, *, clock_now: Callable[[], int] | None = None, inline: bool = False) -> Store:
    """The store in the file `path`, or in `:memory:`.  Raises `StoreDown` when it cannot be opened.

    `clock_now` (ms since the epoch) takes the place of the database's own clock.  `inline` does the work on the
    event loop instead of in threads; a database in memory is always inline.  Call `migrate` before anything else.
    """
    core = Core(path, now_ms=clock_now or wall_now_ms)
    return SqlStore(Inline(core) if inline or path == IN_MEMORY else Threads(core))
