"""Machine pools in memory: one `PooledHost` for each host, one `FakeLedger` for each coordinator on it.

The rules are the real ones; only files and locks are make-believe.  A process that was made with a `descriptor`
tells the host when it starts (`inherits`) and ends (`agent_ended`).
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kici.decide.admit import Cap
from kici.decide.ledger import EMPTY, Kind, Ledger, Life, Outcome, Row, declare, living, only, reserve, restore, without
from kici.domain.errors import KiciError
from kici.domain.ids import AgentId, InstanceId
from kici.domain.spawn import Reservation

CALL_SECONDS: Final = 0.001
_PROCESS: Final = "the process itself"


@dataclass(slots=True, eq=False)
class PooledHost:
    boot: str = "boot-1"
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    instances: set[InstanceId] = field(default_factory=set)
    """Those that run."""
    proofs: dict[AgentId, set[str]] = field(default_factory=dict)
    """Who holds the file of each agent."""

    def inherits(self, agent_id: AgentId) -> None:
        """Its process was started with the descriptor."""
        self.proofs.setdefault(agent_id, set()).add(_PROCESS)

    def agent_ended(self, agent_id: AgentId) -> None:
        self.proofs.get(agent_id, set()).discard(_PROCESS)

    def is_killed(self, instance_id: InstanceId) -> None:
        """As kill -9 of a coordinator."""
        self.instances.discard(instance_id)
        for holders in self.proofs.values():
            holders.discard(instance_id)

    def restarts(self, boot: str) -> None:
        """The machine is started anew."""
        self.boot = boot
        self.instances.clear()
        self.proofs.clear()

    def life(self) -> Life:
        return Life(
            boot=self.boot,
            instances=frozenset(self.instances),
            agents=frozenset(agent_id for agent_id, holders in self.proofs.items() if holders),
        )

    def rows(self, pool: str) -> tuple[Row, ...]:
        """What stands in a ledger and lives."""
        return living(self.ledgers.get(pool, EMPTY), self.life()).rows


class FakeLedger:
    def __init__(self, host: PooledHost, instance_id: InstanceId) -> None:
        self.host = host
        self.faults: list[KiciError] = []
        """What the next calls raise, before they do anything."""
        self.gate: asyncio.Event | None = None
        """Where calls wait, after they did what they do, until it is set."""
        self.calls = 0
        self.is_dead = False
        """The program was killed: none of its calls reaches the host any more."""
        self._me = instance_id
        self._descriptors: dict[AgentId, int] = {}
        self._numbers = count(1000)

    async def refresh(self, pool: str, cap: Cap | None) -> Ledger:
        return await self._change(pool, lambda now: declare(now, self._me, cap))

    async def try_reserve(self, pool: str, cap: Cap, reservation: Reservation, kind: Kind) -> Outcome:
        row = self._row(reservation, kind)
        return await self._step(pool, lambda now: self._reserve(now, row, cap, pool, reservation))

    async def restore(self, pool: str, held: Mapping[AgentId, tuple[Reservation, Kind]]) -> Ledger:
        rows = [self._row(reservation, kind) for reservation, kind in held.values()]

        for row in rows:
            self._hold(row)
        return await self._change(pool, lambda now: restore(now, self._me, rows))

    async def release(self, pool: str, agent_id: AgentId) -> Ledger:
        if not self.is_dead:
            self.host.proofs.pop(agent_id, None)
        self._descriptors.pop(agent_id, None)
        return await self._change(pool, lambda now: without(now, self._me, {agent_id}))

    async def leave(self, kept: frozenset[AgentId]) -> None:
        self.host.is_killed(self._me)
        for pool in await self.pools():
            await self._change(pool, lambda now: declare(only(now, self._me, kept), self._me, None))
        self.host.instances.discard(self._me)

    async def pools(self) -> list[str]:
        return sorted(self.host.ledgers)

    async def sweep(self) -> None:
        for agent_id in [agent_id for agent_id, holders in self.host.proofs.items() if not holders]:
            del self.host.proofs[agent_id]

    def held(self) -> set[AgentId]:
        """Agents of which descriptors are open here."""
        return set(self._descriptors)

    def descriptor(self, agent_id: AgentId) -> int | None:
        return self._descriptors.get(agent_id)

    async def _change(self, pool: str, step: Callable[[Ledger], Ledger]) -> Ledger:
        return (await self._step(pool, lambda now: Outcome(ledger=step(now)))).ledger

    async def _step(self, pool: str, step: Callable[[Ledger], Outcome]) -> Outcome:
        self.calls += 1
        await asyncio.sleep(CALL_SECONDS)
        if self.is_dead:
            raise asyncio.CancelledError
        if self.faults:
            raise self.faults.pop(0)
        self.host.instances.add(self._me)
        outcome = step(living(self.host.ledgers.get(pool, EMPTY), self.host.life()))
        self.host.ledgers[pool] = outcome.ledger
        if self.gate is not None:
            await self.gate.wait()
        return outcome

    def _reserve(self, now: Ledger, row: Row, cap: Cap, pool: str, reservation: Reservation) -> Outcome:
        outcome = reserve(now, row, cap=cap, pool=pool, scaler=reservation.scaler)
        if outcome.refused is None:
            self._hold(row)
        return outcome

    def _hold(self, row: Row) -> None:
        if row.kind is Kind.PROCESS:
            self.host.proofs.setdefault(row.agent_id, set()).add(self._me)
            self._descriptors[row.agent_id] = next(self._numbers)

    def _row(self, reservation: Reservation, kind: Kind) -> Row:
        return Row(
            instance_id=self._me,
            agent_id=reservation.agent_id,
            requests=reservation.shape.requests,
            reserved_at=reservation.reserved_at,
            boot=self.host.boot,
            kind=kind,
        )
