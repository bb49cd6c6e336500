"""The contract of backends notices backends that break it."""

import asyncio
from typing import Any

import pytest
from tests.contract.backend_benches import FakeBench

from kici.domain.errors import KiciError, Retryable
from kici.domain.ids import AgentId
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import Compute, OnEvent, SpawnEvent, SpawnEventType, SpawnOrder
from kici.testing.contracts.backend import CASES, Case
from kici.testing.fake_backend import FakeBackend
from kici.testing.virtual_time import run_virtual


class AdmitsLate(FakeBackend):
    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        await asyncio.sleep(0)
        return await super().spawn(order, on_event)

    def _admit(self, order: SpawnOrder) -> None:
        self.max_agents += 1
        super()._admit(order)


class FailsInSilence(FakeBackend):
    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        def quiet(event: SpawnEvent) -> None:
            if event.type is not SpawnEventType.FAILED:
                on_event(event)

        return await super().spawn(order, quiet)


class RepeatsItself(FakeBackend):
    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        def twice(event: SpawnEvent) -> None:
            on_event(event)
            on_event(event)

        return await super().spawn(order, twice)


class Softens(FakeBackend):
    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        try:
            return await super().spawn(order, on_event)
        except KiciError as error:
            raise Retryable(str(error)) from error


class KeepsWhatFailed(FakeBackend):
    async def _undo(self, agent: Any) -> None:
        self.machines.remove(agent.order.agent_id)


class KeepsMachines(FakeBackend):
    async def _undo(self, agent: Any) -> None:
        self._agents.pop(agent.order.agent_id, None)


class ForgetsRegistrations(FakeBackend):
    def mark_registered(self, agent_id: AgentId) -> None:
        return


class RecoversEverything(FakeBackend):
    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        return await super().recover(frozenset(self.machines.alive))


class RecoversNothing(FakeBackend):
    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        return ()


class ReapsInVain(FakeBackend):
    async def reap_unowned(self, agent_id: AgentId) -> bool:
        return True


class SweepsTooMuch(FakeBackend):
    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        return await super().cleanup_orphans(frozenset())


class DestroysLater(FakeBackend):
    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        self._agents.pop(agent_id, None)


class CanBeCutShort(FakeBackend):
    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        await asyncio.sleep(0.1)
        await super().destroy(agent_id, reason)


class ReleasesByEnding(FakeBackend):
    async def release_all(self) -> None:
        await self.shutdown_all()


BROKEN: list[type[FakeBackend]] = [
    AdmitsLate,
    FailsInSilence,
    RepeatsItself,
    Softens,
    KeepsWhatFailed,
    KeepsMachines,
    ForgetsRegistrations,
    RecoversEverything,
    RecoversNothing,
    ReapsInVain,
    SweepsTooMuch,
    DestroysLater,
    CanBeCutShort,
    ReleasesByEnding,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_contract_notices(broken: type[FakeBackend]) -> None:
    noticed = [case.__name__ for case in CASES if _fails(broken, case)]
    assert noticed
    assert len(noticed) < len(CASES), "it works in part, so the cases tell what is wrong"


def _fails(broken: type[FakeBackend], case: Case) -> bool:
    class Bench(FakeBench):
        make = broken

    async def main() -> None:
        await case(Bench())

    try:
        run_virtual(main)
    except Exception:  # noqa: BLE001  # however it is noticed
        return True
    return False
