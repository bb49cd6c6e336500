"""What goes wrong now and then: each kind of fault of a plan in a loop of its own, with pauses drawn from the seed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.agent import SimAgent
from kici.testing.sim.fleet import edited, scalers
from kici.testing.sim.site import Site
from kici.testing.sim.trace import WORLD
from kici.wire.messages import STDOUT, JobStatusReport, LogChunkMessage

if TYPE_CHECKING:
    from kici.testing.sim.world import World

JUMPS_MS = (-900_000, -60_000, -1000, 1000, 60_000, 900_000)


class Chaos:
    def __init__(self, world: "World", entropy: SeededEntropy) -> None:
        self._world = world
        self._entropy = entropy
        self._acts: dict[str, Callable[[], Awaitable[None]]] = {
            "cut": self._cut,
            "half-open": self._half_open,
            "blackhole": self._black_hole,
            "outage": self._outage,
            "kill": self._kill,
            "stop": self._stop,
            "shutdown": self._shut_down,
            "jump": self._jump,
            "crash": self._crash,
            "death": self._death,
            "freeze": self._freeze,
            "term": self._terminate,
            "lie": self._lie,
            "worker-kill": self._worker_kill,
            "worker-cut": self._worker_cut,
            "worker-dark": self._worker_dark,
            "worker-death": self._worker_death,
            "pause": self._pause,
            "partition": self._partition,
            "cloud-cut": self._cloud_cut,
            "cloud-death": self._cloud_death,
            "drain": self._drain,
            "drain-agent": self._drain_agent,
            "revoke": self._revoke,
            "reload": self._reload,
            "cancel-job": lambda: world.workload.cancel_some("job"),
            "cancel-run": lambda: world.workload.cancel_some("run"),
        }

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind, seconds in self._world.plan.every.items():
                group.create_task(self._now_and_then(seconds, self._acts[kind]), name=f"chaos {kind}")

    async def _now_and_then(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._entropy.uniform(0.2 * seconds, 1.8 * seconds))
            await act()

    def _any(self, agents: list[SimAgent]) -> SimAgent | None:
        return self._entropy.choice(agents) if agents else None

    def _site(self) -> Site:
        return self._entropy.choice(self._world.sites)

    async def _cut(self) -> None:
        connected = self._world.network.connected()
        if connected:
            self._world.trace.count("link cut")
            self._world.network.cut(self._entropy.choice(connected))

    async def _half_open(self) -> None:
        connected = self._world.network.connected()
        if connected:
            self._world.trace.count("link half open")
            way = self._entropy.choice(["both", "both", "agent", "coordinator"])
            self._world.network.half_open(
                self._entropy.choice(connected), to_agent=way != "coordinator", to_coordinator=way != "agent"
            )

    async def _black_hole(self) -> None:
        """Nothing can be connected for a while."""
        self._world.trace.tell("nothing can connect", WORLD)
        self._world.trace.count("black hole")
        self._world.network.is_black_hole = True
        try:
            await asyncio.sleep(self._entropy.uniform(1, 30))
        finally:
            self._world.network.is_black_hole = False

    async def _outage(self) -> None:
        """The store is down, for one coordinator or for all."""
        seconds = self._entropy.uniform(0.5, 8) if self._entropy.chance(0.7) else self._entropy.uniform(8, 100)
        sites = self._world.sites if self._entropy.chance(0.5) else [self._site()]
        async with asyncio.TaskGroup() as group:
            for site in sites:
                group.create_task(site.lose_store(seconds, self._world.trace), name=f"outage of {site.name}")

    async def _kill(self) -> None:
        self._site().coordinator.kill(self._down_seconds())

    async def _stop(self) -> None:
        self._site().coordinator.stop(keep_agents=True, down_seconds=self._down_seconds())

    async def _shut_down(self) -> None:
        site = self._site()
        site.doom("the coordinator was shut down")
        site.coordinator.stop(keep_agents=False, down_seconds=self._down_seconds())

    def _down_seconds(self) -> float:
        return self._entropy.uniform(0.1, 5) if self._entropy.chance(0.7) else self._entropy.uniform(5, 60)

    async def _jump(self) -> None:
        """The wall time of a coordinator jumps, with that of its database if it is an embedded one."""
        self._world.trace.count("clock jump")
        self._world.jump(self._site(), self._entropy.choice(JUMPS_MS))

    async def _crash(self) -> None:
        agent = self._any(self._world.statics.alive())
        if agent is not None:
            self._world.trace.count("static agent crashed")
            self._world.statics.crash(agent, self._entropy.uniform(0.5, 60))

    async def _death(self) -> None:
        host = self._site().host
        if host.alive:
            host.ends(self._entropy.choice(list(host.alive)), "was killed by signal 9")

    async def _freeze(self) -> None:
        agent = self._any(self._world.agents())
        if agent is not None:
            self._world.trace.count("agent frozen")
            seconds = self._entropy.uniform(1, 20) if self._entropy.chance(0.7) else self._entropy.uniform(20, 300)
            agent.freeze(seconds)

    async def _terminate(self) -> None:
        agent = self._any(self._world.agents())
        if agent is not None:
            self._world.trace.count("agent told to end")
            agent.truth.doomed = "somebody sent TERM"
            agent.terminate()

    async def _pause(self) -> None:
        """A coordinator stands still, now and then for longer than its term."""
        long = self._entropy.chance(0.3)
        await self._site().coordinator.freeze(self._entropy.uniform(*((10, 100) if long else (1, 10))))

    async def _partition(self) -> None:
        """No agent reaches a coordinator, which reaches its store."""
        coordinator = self._site().coordinator
        self._world.trace.tell(f"{coordinator.name}: no agent reaches it", WORLD)
        self._world.trace.count("partition")
        await self._darkens(coordinator.url, seconds_max=80)

    async def _darkens(self, url: str, *, seconds_max: float) -> None:
        """Nothing arrives at an address for a while, and nobody is told."""
        self._world.network.darken(url, loses=True)
        try:
            await asyncio.sleep(self._entropy.uniform(1, seconds_max))
        finally:
            self._world.network.lighten(url)

    async def _cloud_cut(self) -> None:
        site, cloud = self._site(), self._world.cloud
        self._world.trace.tell(f"{site.name}: it cannot reach the cloud", WORLD)
        self._world.trace.count("cloud cut off")
        cloud.cut_off.add(site.name)
        try:
            await asyncio.sleep(self._entropy.uniform(1, 80))
        finally:
            cloud.cut_off.discard(site.name)

    async def _cloud_death(self) -> None:
        machines = self._world.cloud.machines
        if machines:
            self._world.cloud.takes_away(self._entropy.choice(list(machines)))

    async def _worker_kill(self) -> None:
        self._entropy.choice(self._world.workers).kill(self._down_seconds())

    async def _worker_cut(self) -> None:
        self._world.trace.count("worker cut off")
        self._entropy.choice(self._world.workers).cut()

    async def _worker_dark(self) -> None:
        """A coordinator and all workers do not reach each other for a while, and are not told."""
        coordinator = self._site().coordinator
        self._world.trace.tell(f"{coordinator.name}: no worker reaches it", WORLD)
        self._world.trace.count("workers in the dark")
        await self._darkens(coordinator.workers_url, seconds_max=90)

    async def _worker_death(self) -> None:
        host = self._entropy.choice(self._world.workers).host
        if host.alive:
            host.ends(self._entropy.choice(list(host.alive)), "was killed by signal 9")

    async def _lie(self) -> None:
        """An agent tells of a job that another has: it is mad, or somebody else's program with its token."""
        agent = self._any(self._world.agents())
        jobs = [job for job in self._world.ledger.jobs.values() if job.is_held and agent and job.agent_id != agent.id]
        if agent is None or not jobs:
            return
        job = self._entropy.choice(jobs)
        self._world.trace.count("lie")
        if self._entropy.chance(0.7):
            agent.blurt(JobStatusReport(job_id=job.job_id, state="success", exit_code=42))
        else:
            agent.blurt(LogChunkMessage(job_id=job.job_id, stream=STDOUT, offset=job.stored[STDOUT], data=b"a lie"))

    async def _drain(self) -> None:
        program = self._site().coordinator.program
        if program is not None:
            self._world.trace.tell(f"{program.instance_id} drains", WORLD)
            self._world.trace.count("coordinator drained")
            program.drain.draining = True
            await asyncio.sleep(self._entropy.uniform(1, 20))
            program.drain.draining = False
            program.pending.capacity_freed()

    async def _drain_agent(self) -> None:
        program, agent = self._site().coordinator.program, self._any(self._world.agents())
        if program is not None and agent is not None and program.sessions.drain_agent(agent.id):
            self._world.trace.tell("is drained by an operator", agent.id)
            self._world.trace.count("agent drained")

    async def _revoke(self) -> None:
        """Revoke the token of a scaler-made agent."""
        site = self._site()
        agent, program = self._any(list(site.host.agents.values())), site.coordinator.program
        registered = None if program is None or agent is None else program.registry.get(agent.id)
        if agent is None or registered is None or registered.token_id is None:
            return
        agent.truth.doomed = "its token was revoked"
        self._world.trace.tell("its token is revoked", agent.id)
        self._world.trace.count("token revoked")
        token_id = registered.token_id
        await self._world.patiently(lambda it: it.tokens.revoke_agent_token(token_id))

    async def _reload(self) -> None:
        """An operator edits the scalers files, or takes the edit back."""
        world = self._world
        config = scalers(world.plan) if self._entropy.chance(0.4) else edited(world.files.config, self._entropy)
        await world.reload(config)
