"""PostgreSQL's pool without PostgreSQL: what becomes of a call that is cancelled."""

import asyncio
from typing import Any, cast

import asyncpg
import pytest

from kici.stores.postgres.engine import Pool


class CutInSilence:
    """A pool whose connections cannot be given back: nobody answers, and the driver gives up."""

    def acquire(self, *, timeout: float) -> "CutInSilence":
        assert timeout > 0
        return self

    async def __aenter__(self) -> object:
        return object()

    async def __aexit__(self, *_: object) -> None:
        raise TimeoutError


async def test_a_cancelled_call_stays_cancelled_when_its_connection_cannot_be_given_back() -> None:
    pool = Pool("postgresql://nobody/", pool_max=1, acquire_timeout_seconds=1, statement_timeout_seconds=1)
    pool._pool = cast("asyncpg.Pool[asyncpg.Record]", CutInSilence())

    async def waits(_: Any) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(pool._with_connection(waits))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
