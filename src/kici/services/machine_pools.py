"""What this coordinator holds of the machine pools that it shares with others of its host.

The ledger decides, under its lock; what it said last is kept, so that questions are answered at once and a pool
that is full is not asked for each of a thousand jobs.  What was refused is looked at again every second: others
give back without telling us.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Never

from kici.decide.admit import MICROS, NO_USAGE, Cap, Usage
from kici.decide.ledger import Kind, Ledger, refusal
from kici.domain.errors import KiciError, Misconfigured
from kici.domain.ids import AgentId, ScalerName
from kici.domain.resources import Amount
from kici.domain.scale import AtCapacity, Failed
from kici.domain.spawn import Reservation
from kici.domain.verdict import AtCap
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.ledger import MachineLedger

REFRESH_SECONDS: Final = 30.0
LOOK_AGAIN_SECONDS: Final = 1.0


class MachinePools:
    def __init__(self, *, ledger: MachineLedger | None, caps: Callable[[], Mapping[str, Cap]], clock: Clock) -> None:
        """`caps()`: the pools of the configuration as it is now.  None: a coordinator that can have none."""
        self._ledger = ledger
        self._caps = caps
        self._clock = clock
        self._known: dict[str, Ledger] = {}
        self._under_way: dict[str, Usage] = {}
        """Asked for, not answered yet."""
        self._refused: dict[str, set[Amount]] = {}
        """Requests that did not fit."""
        self._faults: dict[str, str] = {}
        self._owed: dict[AgentId, str] = {}
        """What could not be given back: agents and their pools."""
        self._shared: set[str] = set()
        """Pools in whose ledger our cap may stand."""
        self._ticker = Ticker(REFRESH_SECONDS)
        self._swept_at = clock.monotonic()
        self.capacity_freed: Callable[[], None] = lambda: None
        """Set by the composition root: told when something that was refused would fit now."""

    # ------------------------------------------------------------------ the request path

    def foresee(self, pool: str | None, requests: Amount, scaler: ScalerName) -> AtCapacity | Failed | None:
        """Why a reservation would be refused, as far as is known here; None: it has to be tried."""
        if pool is None:
            return None
        if pool in self._faults:
            return Failed(error=self._faults[pool])
        if pool not in self._known:
            return None
        under_way = self._under_way.get(pool, NO_USAGE)
        refused = refusal(self._known[pool], requests, pool=pool, scaler=scaler, under_way=under_way)
        if refused is None:
            return None
        self._wait(pool, requests, refused)
        return AtCapacity(verdict=refused)

    async def reserve(self, reservation: Reservation, kind: Kind) -> AtCap | None:
        """Take what a spawn requests; why it does not fit, else.

        Raises a `KiciError` when the ledger cannot be used.  Whenever this does not return None, whoever calls
        releases: the answer may have been lost after the deed.
        """
        pool, requests = reservation.machine_pool, reservation.shape.requests
        if pool is None:
            return None
        cap = self._caps().get(pool)
        if self._ledger is None or cap is None:
            raise Misconfigured(f"scaler {reservation.scaler}: this coordinator shares no machine pool {pool}")
        self._shared.add(pool)
        self._under_way[pool] = self._under_way.get(pool, NO_USAGE).plus(requests)
        try:
            answer = await self._ledger.try_reserve(pool, cap, reservation, kind)
        except KiciError as error:
            self._failed(pool, error)
            raise
        finally:
            self._under_way[pool] = self._under_way[pool].minus(requests)
        self._see(pool, answer.ledger)
        if answer.refused is not None:
            self._wait(pool, requests, answer.refused)
        return answer.refused

    async def release(self, pool: str | None, agent_id: AgentId) -> None:
        """Give back what an agent holds of the pool that it was billed to.  Safe to repeat; does not fail.

        When the ledger cannot be used, `tick` tries again until it can: nothing else would ever free it.
        """
        if pool is None or self._ledger is None:
            return
        self._owed[agent_id] = pool
        try:
            self._see(pool, await self._ledger.release(pool, agent_id))
        except KiciError as error:
            self._failed(pool, error)
        else:
            self._owed.pop(agent_id, None)

    def descriptor(self, agent_id: AgentId) -> int | None:
        """What the agent's process must inherit to prove that it lives."""
        return None if self._ledger is None else self._ledger.descriptor(agent_id)

    # ------------------------------------------------------------------ start, reload, end

    async def restore(self, held: Iterable[tuple[Reservation, Kind]]) -> None:
        """After a restart: what this instance holds, and nothing else, is in the ledgers.  Then as `tick`."""
        by_pool: dict[str, dict[AgentId, tuple[Reservation, Kind]]] = {pool: {} for pool in self._caps()}
        for reservation, kind in held:
            if reservation.machine_pool is not None:
                by_pool.setdefault(reservation.machine_pool, {})[reservation.agent_id] = (reservation, kind)
        if self._ledger is None or not by_pool:
            return
        try:
            self._shared |= by_pool.keys() | set(await self._ledger.pools())
        except KiciError as error:
            for pool in by_pool:
                self._failed(pool, error)
            return
        for pool in sorted(self._shared):
            try:
                await self._ledger.restore(pool, by_pool.get(pool, {}))
            except KiciError as error:
                self._failed(pool, error)
        await self.tick()

    async def leave(self, kept: frozenset[AgentId]) -> None:
        """The program ends: give back everything but what these agents hold, which could not be ended."""
        ledger, self._ledger = self._ledger, None
        if ledger is None or not self._shared:
            return
        try:
            await ledger.leave(kept)
        except KiciError as error:
            emit(Event.LEDGER_FAILED, level=logging.WARNING, error=str(error))

    # ------------------------------------------------------------------ looking

    async def run(self) -> Never:
        """Keep up with the others for ever.  Leave by cancellation."""
        while True:
            self._ticker.seconds = (
                LOOK_AGAIN_SECONDS if self._refused or self._faults or self._owed else REFRESH_SECONDS
            )
            await self._ticker.next()
            await self.tick()

    async def tick(self) -> None:
        """Declare our caps as they are now, and see what others hold.  A pool in trouble does not stop the others."""
        caps = self._caps()
        self._shared |= caps.keys()
        for agent_id, pool in list(self._owed.items()):
            await self.release(pool, agent_id)
        for pool in sorted(self._shared):
            if self._ledger is None:
                return
            try:
                self._see(pool, await self._ledger.refresh(pool, caps.get(pool)))
            except KiciError as error:
                self._failed(pool, error)
        for pool in self._shared - caps.keys() - self._faults.keys():
            self._shared.remove(pool)
            self._known.pop(pool, None)
            self._refused.pop(pool, None)
        await self._sweep()

    def known(self) -> Mapping[str, Ledger]:
        """What the ledgers of the configured pools said last."""
        return {pool: self._known[pool] for pool in self._caps() if pool in self._known}

    def faults(self) -> Mapping[str, str | None]:
        """The pools of the configuration, and what keeps us from using each of them."""
        return {pool: self._faults.get(pool) for pool in self._caps()}

    def usage(self) -> dict[str, Amount]:
        """What everybody on this host holds of them."""
        used = {pool: ledger.usage for pool, ledger in self.known().items()}
        return {
            pool: Amount(cpus=usage.cpu_micros / MICROS, memory_bytes=usage.memory_bytes)
            for pool, usage in used.items()
        }

    async def _sweep(self) -> None:
        if self._ledger is None or not self._shared or self._clock.monotonic() < self._swept_at + REFRESH_SECONDS:
            return
        self._swept_at = self._clock.monotonic()
        try:
            await self._ledger.sweep()
        except KiciError as error:
            emit(Event.LEDGER_FAILED, level=logging.WARNING, error=str(error))

    def _see(self, pool: str, ledger: Ledger) -> None:
        before = self._known.get(pool)
        self._known[pool] = ledger
        if ledger.is_disputed and (before is None or before.caps != ledger.caps):
            emit(
                Event.LEDGER_DISPUTED,
                level=logging.WARNING,
                pool=pool,
                in_force=cap_text(ledger.cap),
                declared={instance: cap_text(cap) for instance, cap in ledger.caps.items()},
            )
        had_fault = self._faults.pop(pool, None) is not None
        waiting = self._refused.get(pool, set())
        if had_fault or any(refusal(ledger, each, pool=pool, scaler=_ANY) is None for each in waiting):
            self._refused.pop(pool, None)
            self.capacity_freed()

    def _wait(self, pool: str, requests: Amount, refused: AtCap) -> None:
        if refused.is_hopeless:
            return  # nothing that others give back would help
        if not self._refused:
            self._ticker.nudge()
        self._refused.setdefault(pool, set()).add(requests)

    def _failed(self, pool: str, error: KiciError) -> None:
        if pool not in self._faults:
            emit(Event.LEDGER_FAILED, level=logging.WARNING, pool=pool, error=str(error))
            self._ticker.nudge()
        self._faults[pool] = str(error)


_ANY: Final = ScalerName("")


def cap_text(cap: Cap) -> str:
    parts = [] if cap.cpus is None else [f"{cap.cpus:g} cpus"]
    parts += [] if cap.memory_bytes is None else [f"{cap.memory_bytes} bytes"]
    return ", ".join(parts) or "no limit"
