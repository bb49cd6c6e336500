"""The real agent behind a link that breaks."""

import random
import sys

import pytest

from kici.testing.agent_harness import AgentHarness, AgentProcess
from kici.testing.cuttable_proxy import CuttableProxy
from kici.wire.messages import CloseCode, ConfigAck

SCALER = {"KICI_SCALER_MANAGED": "1"}


@pytest.fixture(autouse=True)
def quick_returns(coordinator: AgentHarness) -> None:
    """Agents come back within a second."""
    coordinator.behaviour.ack = {"reconnect_max_ms": 1000}


COUNT = """
import sys, time
for number in range({lines}):
    print(number, "x" * {width}, flush=True)
    if number % 50 == 0: time.sleep(0.01)
"""


def counted(lines: int, width: int) -> bytes:
    return b"".join(b"%d %s\n" % (number, b"x" * width) for number in range(lines))


@pytest.mark.spec("T3.5")
async def test_a_job_goes_on_while_the_network_is_away_and_all_output_arrives(coordinator: AgentHarness) -> None:
    async with (
        CuttableProxy(coordinator.port) as proxy,
        AgentProcess(f"ws://127.0.0.1:{proxy.port}/ws", **SCALER) as agent,
    ):
        _ = await coordinator.agent()
        job = coordinator.dispatch(sys.executable, "-c", COUNT.format(lines=1000, width=20))
        await coordinator.until(lambda: job.stdout)
        proxy.refuses = True
        proxy.cut()
        await coordinator.until(lambda: not coordinator.agents)
        stored = len(job.stdout)
        with pytest.raises(TimeoutError):
            await coordinator.until(lambda: job.final, 1.5)
        assert len(job.stdout) == stored
        proxy.refuses = False
        await coordinator.until(lambda: job.final)
        assert job.state == "success"
        assert job.stdout == counted(1000, 20)
        assert await agent.exited() == 0


@pytest.mark.parametrize("seed", range(4))
async def test_links_cut_at_random_lose_and_double_nothing(coordinator: AgentHarness, seed: int) -> None:
    chance = random.Random(seed)
    async with (
        CuttableProxy(coordinator.port) as proxy,
        AgentProcess(f"ws://127.0.0.1:{proxy.port}/ws", **SCALER) as agent,
    ):
        _ = await coordinator.agent()
        job = coordinator.dispatch(sys.executable, "-c", COUNT.format(lines=4000, width=200))
        for _ in range(4):
            proxy.cut_after_bytes = chance.randrange(1, 150_000)
            cuts = proxy.cuts
            await coordinator.until(lambda cuts=cuts: proxy.cuts > cuts or job.final)  # type: ignore[misc]  # binds
        await coordinator.until(lambda: job.final, 30)
        assert job.stdout == counted(4000, 200)
        assert job.state == "success"
        assert await agent.exited() == 0


async def test_a_final_status_survives_a_cut_before_it_is_acknowledged(coordinator: AgentHarness) -> None:
    coordinator.behaviour.acknowledges_status = False
    async with (
        CuttableProxy(coordinator.port) as proxy,
        AgentProcess(f"ws://127.0.0.1:{proxy.port}/ws", **SCALER) as agent,
    ):
        job = await coordinator.run("sh", "-c", "exit 5")
        proxy.cut()
        await coordinator.until(lambda: len(coordinator.sessions) == 2 and coordinator.agents)
        registration = coordinator.sessions[1].registration
        assert registration is not None
        assert [(ref.job_id, ref.phase) for ref in registration.in_flight_jobs] == [("job-1", "finished")]
        assert await agent.exited() == 0, "the verdict was: drop, since it is known already"
        assert job.state == "failed"


async def test_a_job_that_was_given_up_meanwhile_is_killed_on_return(coordinator: AgentHarness) -> None:
    async with CuttableProxy(coordinator.port) as proxy, AgentProcess(f"ws://127.0.0.1:{proxy.port}/ws") as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch("sh", "-c", "echo $$; exec sleep 1000")
        await coordinator.until(lambda: job.stdout.endswith(b"\n"))
        proxy.cut()
        del coordinator.jobs["job-1"]
        await coordinator.until(lambda: not coordinator.agents)
        _ = await coordinator.run("true", job_id="job-2")  # not rejected as busy: the other one is gone
        agent.terminate()
        assert await agent.exited() == 0


async def test_a_restarting_coordinator_is_found_again(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch("sh", "-c", "echo a; sleep 0.5; echo b")
        await coordinator.until(lambda: job.stdout)
        coordinator.gateway.close_all(CloseCode.GOING_AWAY, "restarting")
        await coordinator.until(lambda: job.final)
        assert job.stdout == b"a\nb\n"
        assert len(coordinator.sessions) == 2
        coordinator.gateway.close_all(CloseCode.DISMISSED, "no use for you")
        assert await agent.exited() == 0


async def test_an_agent_goes_where_the_other_coordinators_are(coordinator: AgentHarness) -> None:
    async with AgentHarness() as other, AgentProcess(coordinator.url):
        coordinator.behaviour.ack = {"coordinators": [other.url]}
        _ = await coordinator.agent()
        await coordinator.until(lambda: any(isinstance(message, ConfigAck) for message in coordinator.heard))
        coordinator.gateway.close_all(CloseCode.HANDOVER, "the database is away")
        _ = await other.agent()


async def test_a_dismissed_agent_kills_its_job_and_ends(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch("sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.1; done")
        await coordinator.until(lambda: job.stdout.endswith(b"\n"))
        coordinator.gateway.close_all(CloseCode.DISMISSED, "no use for you")
        assert await agent.exited() == 0
        assert agent.work_left() == []


async def test_a_cut_between_acknowledgement_and_start_starts_the_job_once(coordinator: AgentHarness) -> None:
    coordinator.behaviour.starts_jobs = False
    async with AgentProcess(coordinator.url, **SCALER):
        _ = await coordinator.agent()
        job = coordinator.dispatch("sh", "-c", "echo once")
        await coordinator.until(lambda: any(type(message).__name__ == "JobAck" for message in coordinator.heard))
        coordinator.gateway.close_all(CloseCode.INTERNAL, "store down")
        await coordinator.until(lambda: job.final)
        assert job.stdout == b"once\n"


IMPATIENT = """
import kici.agent.connection as connection, kici.wire.agent_half as half
connection.PING_SECONDS = 0.1
half.SILENCE_SECONDS = 0.6
"""


@pytest.mark.spec("T2.12")
async def test_a_half_open_link_is_left_for_a_fresh_socket_and_the_job_goes_on(coordinator: AgentHarness) -> None:
    async with CuttableProxy(coordinator.port) as proxy:
        url = f"ws://127.0.0.1:{proxy.port}/ws"
        async with AgentProcess(url, prelude=IMPATIENT, **SCALER):
            _ = await coordinator.agent()
            job = coordinator.dispatch("sh", "-c", "echo a; while [ ! -e ../go ]; do sleep 0.02; done; echo b")
            await coordinator.until(lambda: job.stdout)
            with pytest.raises(TimeoutError):
                await coordinator.until(lambda: len(coordinator.sessions) > 1, 1.0)  # pings are answered: it stays
            proxy.stall()
            await coordinator.until(lambda: len(coordinator.agents) == 2)
            coordinator.cancel(grace_ms=1000)
            await coordinator.until(lambda: job.final)
            assert job.state == "cancelled"
            assert job.stdout == b"a\n"
            assert not coordinator.sessions[0].is_closed, "nobody told the coordinator of the old one"
