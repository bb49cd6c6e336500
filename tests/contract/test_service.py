"""Every background service keeps the service contract; and the contract notices those that do not."""

import asyncio
from typing import Never

import pytest

from kici.kit.finish import finish
from kici.kit.ticker import Ticker
from kici.testing.contracts import service as contract
from kici.testing.virtual_time import run_virtual


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


SERVICES: dict[str, contract.ServiceFactory] = {"Good": Good}


@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", SERVICES)
def test_service(name: str, case: contract.Case) -> None:
    run_virtual(lambda: case(SERVICES[name]))


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
