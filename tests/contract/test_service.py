"""Every background service keeps the service contract; and the contract notices those that do not."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Never, cast

import pytest

from kici.kit.finish import finish
from kici.kit.supervise import Supervisor
from kici.kit.ticker import Ticker
from kici.testing.contracts import service as contract
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.virtual_time import run_virtual


@dataclass(frozen=True)
class Shaped:
    """A service of a coordinator, as it was given to the supervisor."""

    run: Callable[[], Coroutine[Any, Any, Never]]

    async def tick(self) -> object:
        """One pass, where it is one without arguments; some passes do not wait."""
        tick = getattr(getattr(self.run, "__self__", None), "tick", None)
        if tick is None or inspect.signature(tick).parameters:
            return None
        answer = tick()
        return await answer if inspect.isawaitable(answer) else answer


class Collected(dict[str, Shaped]):
    """Stands in for a supervisor that starts nothing."""

    def service(self, name: str, run: Callable[[], Coroutine[Any, Any, Never]]) -> None:
        self[name] = Shaped(run)

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        work.close()


async def services_of(bench: Bench) -> Collected:
    """Every service that the coordinator of a bench would run; none of them runs."""
    collected = Collected()
    await bench.boots_up()
    given = bench.coordinator.given
    bench.coordinator.given = replace(given, supervisor=cast(Supervisor, collected))  # it uses no more of it
    await bench.coordinator.start()
    bench.coordinator.given = given
    return collected


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


@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
def test_the_shape_itself(case: contract.Case) -> None:
    run_virtual(lambda: case(Good))


def names_of_services() -> list[str]:
    names: list[str] = []

    @benched(a_scaler(), is_started=False)
    async def look(bench: Bench) -> None:
        names.extend(await services_of(bench))

    look()
    return names


@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
def test_every_service_of_a_coordinator(case: contract.Case) -> None:
    @benched(a_scaler(), is_started=False)
    async def run(bench: Bench, name: str) -> None:
        service = (await services_of(bench))[name]
        await case(lambda: service)

    names = names_of_services()
    assert {"heartbeat", "election", "queue", "sessions"} <= set(names)
    for name in names:
        try:
            run(name)
        except BaseException as error:
            error.add_note(f"the service is {name!r}")
            raise


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
