"""The ledgers of machine pools for the event loop: threads do the file work, one call of ours at a time per pool."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from kici.adapters.ledger_files import Busy, LedgerFiles
from kici.decide.admit import Cap
from kici.decide.ledger import Kind, Ledger, Outcome, Row, declare, only, reserve, restore, without
from kici.domain.errors import KiciError, Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.domain.spawn import Reservation
from kici.kit.finish import finish
from kici.observe.events import Event, emit

T = TypeVar("T")

LOCK_SECONDS: Final = 5.0
"""How long a call waits for other processes; each of them needs the pool for a few milliseconds."""
CALL_SECONDS_MAX: Final = 60.0
"""A disk that does not answer."""


class FileLedger:
    """As `ports.ledger.MachineLedger`.  The folder is found, and the instance shown there, at the first call."""

    def __init__(
        self, *, instance_id: InstanceId, boot: str, folder: Callable[[], Path], lock_seconds: float = LOCK_SECONDS
    ) -> None:
        """`folder()` finds it or raises `Misconfigured`."""
        self._me = instance_id
        self._boot = boot
        self._find = folder
        self._lock_seconds = lock_seconds
        self._opening = threading.Lock()
        self._opened: LedgerFiles | None = None
        self._owed: dict[AgentId, str] = {}
        """Agents that were given back, with their pools, for as long as that is not written down."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._busy: dict[str, tuple[int, str]] = {}
        """How often a pool could not be locked, and what was said the last time."""

    async def refresh(self, pool: str, cap: Cap | None) -> Ledger:
        return await self._change(pool, lambda ledger: declare(ledger, self._me, cap))

    async def try_reserve(self, pool: str, cap: Cap, reservation: Reservation, kind: Kind) -> Outcome:
        return await self._in_turn(
            pool, partial(self._reserve, pool, cap, self._row(reservation, kind), reservation.scaler)
        )

    async def restore(self, pool: str, held: Mapping[AgentId, tuple[Reservation, Kind]]) -> Ledger:
        rows = [self._row(reservation, kind) for reservation, kind in held.values()]
        return await self._in_turn(pool, partial(self._restore, pool, rows))

    async def release(self, pool: str, agent_id: AgentId) -> Ledger:
        self._owed[agent_id] = pool
        return await self._in_turn(pool, partial(self._release, pool, agent_id))

    async def leave(self, kept: frozenset[AgentId]) -> None:
        if self._opened is None:
            return
        self._opened.let_go()
        faults: list[KiciError] = []
        for pool in await self.pools():
            try:
                await self._change(pool, lambda ledger: declare(only(ledger, self._me, kept), self._me, None))
            except KiciError as error:
                faults.append(error)
        self.close()
        if faults:
            raise faults[0]

    async def pools(self) -> list[str]:
        return await _aside(lambda: self._files().pools())

    async def sweep(self) -> None:
        await _aside(lambda: self._files().sweep())

    def descriptor(self, agent_id: AgentId) -> int | None:
        return None if self._opened is None else self._opened.descriptor(agent_id)

    def close(self) -> None:
        """As the end of the program would: this instance does not run, and proves nothing."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # ------------------------------------------------------------------ turns

    async def _change(self, pool: str, step: Callable[[Ledger], Ledger]) -> Ledger:
        outcome = await self._in_turn(pool, lambda: self._write(pool, lambda now: Outcome(ledger=step(now))))
        return outcome.ledger

    async def _in_turn(self, pool: str, work: Callable[[], T]) -> T:
        """Those who stood in line behind one that waited in vain do not wait as long again, one after the other."""
        before, _ = self._busy.get(pool, (0, ""))
        async with self._turns[pool]:
            count, said = self._busy.get(pool, (0, ""))
            if count != before:
                raise Busy(said)
            try:
                return await _aside(work)
            except Busy as error:
                self._busy[pool] = (count + 1, str(error))
                raise

    # ------------------------------------------------------------------ in threads

    def _files(self) -> LedgerFiles:
        with self._opening:
            if self._opened is None:
                folder = self._find()
                self._opened = LedgerFiles(
                    folder, instance_id=self._me, boot=self._boot, lock_seconds=self._lock_seconds
                )
                emit(Event.LEDGER_OPENED, folder=str(folder))
            return self._opened

    def _write(self, pool: str, step: Callable[[Ledger], Outcome]) -> Outcome:
        """With this step, the releases that are still owed take effect."""
        owed = {agent_id for agent_id, where in self._owed.copy().items() if where == pool}
        outcome = self._files().change(pool, lambda now: step(without(now, self._me, owed)))
        for agent_id in owed:
            self._owed.pop(agent_id, None)
        return outcome

    def _reserve(self, pool: str, cap: Cap, row: Row, scaler: ScalerName) -> Outcome:
        files = self._files()
        if row.kind is Kind.PROCESS and not files.hold(row.agent_id):
            raise Retryable(f"agent id {row.agent_id} is in use on this host; another one is tried with the next spawn")
        is_reserved = False
        try:
            outcome = self._write(pool, lambda now: reserve(now, row, cap=cap, pool=pool, scaler=scaler))
            is_reserved = outcome.refused is None
            return outcome
        finally:
            if not is_reserved:
                files.drop(row.agent_id)

    def _restore(self, pool: str, rows: list[Row]) -> Ledger:
        files = self._files()
        for row in rows:
            if row.kind is Kind.PROCESS:
                files.hold(row.agent_id, seconds=0)  # where the agent does so itself, all the better
        return self._write(pool, lambda now: Outcome(ledger=restore(now, self._me, rows))).ledger

    def _release(self, pool: str, agent_id: AgentId) -> Ledger:
        try:
            return self._write(pool, lambda now: Outcome(ledger=now)).ledger
        finally:
            self._files().drop(agent_id)

    def _row(self, reservation: Reservation, kind: Kind) -> Row:
        return Row(
            instance_id=self._me,
            agent_id=reservation.agent_id,
            requests=reservation.shape.requests,
            reserved_at=reservation.reserved_at,
            boot=self._boot,
            kind=kind,
        )


async def _aside(work: Callable[[], T]) -> T:
    """Off the loop, and to its end even if the caller is cancelled: what is half done could not be undone."""
    try:
        return await finish(asyncio.to_thread(work), seconds=CALL_SECONDS_MAX, what="a call on the machine ledger")
    except TimeoutError as error:
        raise Retryable(str(error)) from error
