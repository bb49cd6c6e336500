"""What the store's methods need of a database: run a named query, run several as one unit.

Methods are written once, over this; engines and query files differ by dialect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kici.stores.query import Query

Value = str | int | float | bytes | None
Params = Mapping[str, Value]


class Row(Protocol):
    """One row, by column name.  What a column holds is known to its query, not to the type checker."""

    def __getitem__(self, column: str, /) -> Any: ...


Rows = Sequence[Row]


@dataclass(frozen=True, slots=True)
class Step:
    """One query of a unit."""

    query: Query
    params: Params
    guard: bool = False
    """No row means: stop, and undo the whole unit."""
    told_apart_by: str | None = None
    """A parameter, and the column of its rows with the same value.  An engine may write several units as one, when the
    last step of each has this; steps without it are then run once for all."""
    alike_in: str | None = None
    """A parameter in which all those that are written together agree."""


class Database(Protocol):
    """Raises what `ports.store` promises: `StoreDown`, and `Conflict` where a key is taken.  Nothing of a driver."""

    async def read(self, query: Query, params: Params, *, told_apart_by: str | None = None) -> Rows:
        """Rows of a query that changes nothing.  Sees what its caller wrote before.

        `told_apart_by`, as in `Step`: an engine may answer several readers at once.
        """
        ...

    async def unit(self, steps: Sequence[Step]) -> list[Rows] | None:
        """Run steps as one: all of them or none.  Rows of each; None when a guard undid it."""
        ...

    async def migrate(self) -> list[int]: ...

    async def close(self) -> None: ...


class Part:
    """A part of the store: the methods of some tables, over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _write(
        self, query: Query, params: Params, *, told_apart_by: str | None = None, alike_in: str | None = None
    ) -> Rows:
        """Run one writing query as a unit of its own, or with others like it (see `Step`)."""
        results = await self._database.unit((Step(query, params, told_apart_by=told_apart_by, alike_in=alike_in),))
        assert results is not None, query
        return results[0]

    async def _one(self, query: Query, params: Params, *, told_apart_by: str | None = None) -> Row | None:
        rows = await self._database.read(query, params, told_apart_by=told_apart_by)
        return rows[0] if rows else None
