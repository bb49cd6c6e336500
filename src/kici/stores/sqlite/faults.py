"""SQLite's errors as ours.  Its codes and texts appear nowhere else."""

import sqlite3
from typing import Final

from kici.domain.errors import Bug, Conflict, KiciError, StoreDown

UNIT_ERRORS: Final = (sqlite3.Error, OverflowError, ValueError, TypeError)
"""What one unit's statements or parameters may raise."""


def translated(error: Exception) -> KiciError | Bug:
    """What the caller of a unit or a read is told."""
    match error:
        case sqlite3.IntegrityError() if "UNIQUE constraint" in str(error):
            return Conflict(f"the store already has a row with this key ({error}); use another one")
        case sqlite3.IntegrityError() | sqlite3.ProgrammingError() | sqlite3.InterfaceError() | sqlite3.DataError():
            return Bug(f"the embedded store refused a statement: {error}")
        case sqlite3.Error():
            return down(error)
        case _:
            return Bug(f"the embedded store cannot take these values: {error!r}")


def down(error: sqlite3.Error) -> StoreDown:
    return StoreDown(
        f"the embedded store failed ({error}); the write may or may not have happened: "
        "check the data directory's disk and permissions"
    )
