"""PostgreSQL's and its driver's errors as ours.  SQLSTATE codes appear nowhere else."""

from typing import Final

import asyncpg
from asyncpg import exceptions

from kici.domain.errors import Bug, Conflict, KiciError, LockContended, StoreDown

DRIVER_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""What a call of the driver may raise; `InternalClientError` when the server goes away between two statements."""

_BUG_CLASSES: Final = ("22", "23", "42")
"""Values, constraints, statements: the same call would fail again."""


def is_undone_by_others(error: Exception) -> bool:
    """Whether the unit was rolled back because of what others did at the same time: it can be run again."""
    return isinstance(error, exceptions.DeadlockDetectedError | exceptions.SerializationError)


def translated(error: Exception) -> KiciError | Bug:
    """What the caller of a unit or a read is told."""
    match error:
        case exceptions.UniqueViolationError():
            return Conflict(f"the store already has a row with this key ({error.detail}); use another one")
        case exceptions.LockNotAvailableError():
            return LockContended("others hold a lock of the store for longer than this could wait; try again")
        case exceptions.PostgresError() if str(error.sqlstate).startswith(_BUG_CLASSES):
            return Bug(f"PostgreSQL refused a statement: {error}")
        case exceptions.DataError() | exceptions.InterfaceError() if "invalid input for query argument" in str(error):
            return Bug(f"PostgreSQL cannot take these values: {error}")
        case TimeoutError():
            return StoreDown("PostgreSQL did not answer in time, or no connection was free; is it overloaded?")
        case _:
            return StoreDown(
                f"PostgreSQL failed ({type(error).__name__}: {error}); the write may or may not have happened: "
                "check that the server runs, is writable and can be reached"
            )
