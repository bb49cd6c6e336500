"""Every background service keeps the service contract; and the contract notices those that do not."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Never

import pytest

from kici.apps.assembly import Coordinator
from kici.kit.finish import finish
from kici.kit.ticker import Ticker
from kici.services.retention import Retention
from kici.services.settings import SettingsRefresh
from kici.services.tokens import TokenPurge
from kici.testing.contracts import service as contract
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.virtual_time import run_virtual


@dataclass(frozen=True)
class Shaped:
    """A service whose pass wants an argument, or does not wait."""

    run: Callable[[], Coroutine[Any, Any, Never]]
    tick: Callable[[], Coroutine[Any, Any, object]]


def _pending_scale(coordinator: Coordinator) -> contract.Service:
    return Shaped(coordinator.pending.run, lambda: coordinator.pending.tick("sweep"))


def _stale_spawns(coordinator: Coordinator) -> contract.Service:
    async def tick() -> int:
        return coordinator.stale.tick()

    return Shaped(coordinator.stale.run, tick)


def _retirement(coordinator: Coordinator) -> contract.Service:
    assert coordinator.reload is not None
    return coordinator.reload


def _retention(coordinator: Coordinator) -> contract.Service:
    given = coordinator.given
    return Retention(
        store=given.store,
        clock=given.clock,
        settings=coordinator.settings,
        metrics=coordinator.metrics,
        is_leader=lambda: True,
    )


class Good:
    """The shape itself."""

    def __init__(self) -> None:
        self._ticker = Ticker(5.0)

    async def run(self) -> Never:
        while True:
            _ = await self.tick()
            _ = await self._ticker.next()

    async def tick(self) -> int:
        await asyncio.sleep(0.01)
        return 1


class Raises(Good):
    async def tick(self) -> int:
        raise ValueError("a pass failed")


class LeavesLate(Good):
    """Protects far too much from its cancellation."""

    async def run(self) -> Never:
        while True:
            await finish(asyncio.sleep(700), seconds=1000, what="a pass")


class Leaks(Good):
    """Leaves a task behind."""

    async def tick(self) -> int:
        self._lost = asyncio.create_task(asyncio.sleep(86_000))
        return 1


class StartsOnce(Good):
    """Breaks when it is run again."""

    started = False

    async def run(self) -> Never:
        assert not self.started
        self.started = True
        await super().run()


COORDINATORS: dict[str, Callable[[Coordinator], contract.Service]] = {
    "heartbeat": lambda coordinator: coordinator.heartbeat,
    "election": lambda coordinator: coordinator.elector,
    "settings": lambda coordinator: SettingsRefresh(settings=coordinator.settings),
    "sessions": lambda coordinator: coordinator.sessions,
    "pending-scale": _pending_scale,
    "queue": lambda coordinator: coordinator.queue,
    "stale-spawns": _stale_spawns,
    "warm-pools": lambda coordinator: coordinator.pools,
    "retirement": _retirement,
    "token-purge": lambda coordinator: TokenPurge(tokens=coordinator.tokens),
    "retention": _retention,
}


@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
def test_the_shape_itself(case: contract.Case) -> None:
    run_virtual(lambda: case(Good))


@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", COORDINATORS)
def test_services_of_a_coordinator(name: str, case: contract.Case) -> None:
    @benched(a_scaler(), is_started=False)
    async def run(bench: Bench) -> None:
        await bench.boots_up()
        await case(lambda: COORDINATORS[name](bench.coordinator))

    run()


@benched(a_scaler())
async def test_no_service_of_a_coordinator_is_forgotten_here(bench: Bench) -> None:
    running = {task.get_name().removeprefix("bench.") for task in asyncio.all_tasks()}
    others = {"grace-after-restart"}
    assert {name for name in running if not name.startswith("Task-")} - others == set(COORDINATORS)


@pytest.mark.parametrize(
    ("bad", "case"),
    [
        (Raises, contract.runs_and_stops),
        (LeavesLate, contract.runs_and_stops),
        (LeavesLate, contract.stops_twice),
        (Leaks, contract.ticks_alone),
        (Leaks, contract.is_cancelled_while_it_starts),
        (StartsOnce, contract.starts_again_after_a_stop),
        (StartsOnce, contract.bears_stress),
    ],
)
def test_the_contract_notices(bad: contract.ServiceFactory, case: contract.Case) -> None:
    with pytest.raises(AssertionError):
        run_virtual(lambda: case(bad))
