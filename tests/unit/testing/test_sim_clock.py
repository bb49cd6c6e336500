import asyncio

from kici.ports.clock import Clock
from kici.testing.sim_clock import SIM_START, SimClock
from kici.testing.virtual_time import SimLoop, virtual


@virtual
async def test_wall_time_follows_the_loop_and_keeps_its_skew() -> None:
    true: Clock = SimClock()
    ahead = SimClock(skew_ms=5000)
    assert true.now() == SIM_START
    await true.sleep(1.5)
    assert true.now() == SIM_START + 1500
    assert ahead.now() - true.now() == 5000
    assert ahead.monotonic() == true.monotonic() == 1.5


@virtual
async def test_sleeping_for_nothing_still_lets_others_run() -> None:
    ran: list[str] = []
    asyncio.get_running_loop().call_soon(ran.append, "other")
    await SimClock().sleep(-1)
    assert ran == ["other"]


def test_a_given_loop_can_be_read_from_outside() -> None:
    loop = SimLoop()
    clock = SimClock(start=SIM_START, loop=loop)
    loop.run_until_complete(asyncio.sleep(2))
    assert clock.now() == SIM_START + 2000
    loop.close()
