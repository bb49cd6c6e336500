"""Who did what: a row for each act that people may ask about later.

Writing is best effort: an audit row that cannot be written must not keep an operator from acting in an outage,
so it goes to the program's log instead.  `strictly` is for acts that must not happen unrecorded.
"""

import logging
from typing import Final

from kici.domain.access import AccessRecord
from kici.domain.errors import StoreDown
from kici.domain.paging import Mark
from kici.observe.events import Event, emit
from kici.ports.store import AccessLogStore

_TEXT_MAX: Final = 500


class AccessLog:
    def __init__(self, *, store: AccessLogStore) -> None:
        self._store = store

    async def record(self, record: AccessRecord) -> None:
        """Never raises for a store that is down."""
        try:
            await self.strictly(record)
        except StoreDown:
            emit(
                Event.ACCESS_UNRECORDED,
                level=logging.WARNING,
                actor=record.actor,
                action=record.action,
                target=record.target,
                outcome=record.outcome,
            )

    async def strictly(self, record: AccessRecord) -> None:
        """Raises `StoreDown`: then the act must not happen."""
        await self._store.record_access(
            AccessRecord(
                at=record.at,
                actor=record.actor[:_TEXT_MAX],
                action=record.action[:_TEXT_MAX],
                target=record.target[:_TEXT_MAX],
                outcome=record.outcome[:_TEXT_MAX],
                detail=record.detail[:_TEXT_MAX],
            )
        )

    async def read(self, *, before: Mark | None, limit: int) -> list[AccessRecord]:
        """Newest first."""
        return await self._store.access_log(before=before, limit=limit)
