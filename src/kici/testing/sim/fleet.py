"""The scalers of a simulated coordinator: what they offer and may use, and the backends that make their agents."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kici.config.model import BackendType, Cap, LabelSet, Reuse, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.errors import Retryable
from kici.domain.ids import ScalerName
from kici.domain.platform import Host
from kici.domain.resources import Ask, ResourceRequest
from kici.ports.backend import OnExit
from kici.ports.clock import Clock
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.testing.fake_backend import FakeBackend, SpawnScript, _Tracked, refuses
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.hosts import HostView
from kici.testing.sim.plan import Plan

HOST: Final = Host("linux", "x86_64")
GIB: Final = 1024**3
SPAWNS_AT_ONCE: Final = 4


def scalers(plan: Plan) -> ScalersConfig:
    """A plain scaler with caps, one behind a gate, one whose agents take several jobs, and a small one."""
    share = max(1, plan.agents_max // 3)
    return ScalersConfig(
        global_max_agents=plan.agents_max,
        global_resource_cap=Cap(max_memory_bytes=48 * GIB),
        scalers=(
            ScalerEntry(
                name=ScalerName("plain"),
                type=BackendType.BARE_METAL,
                max_agents=2 * share,
                max_concurrent_spawns=SPAWNS_AT_ONCE,
                label_sets=(
                    LabelSet(
                        labels=("linux", "x64"),
                        resources=ResourceRequest(requests=Ask(cpus=1, memory="1g")),
                    ),
                    LabelSet(labels=("linux", "x64", "large"), resources=ResourceRequest(requests=Ask(cpus=4))),
                ),
                resource_cap=Cap(max_cpu=1.5 * share + 4),
            ),
            ScalerEntry(
                name=ScalerName("gated"),
                type=BackendType.BARE_METAL,
                max_agents=share,
                label_sets=(LabelSet(labels=("linux", "gpu")),),
                mandatory_labels=("gpu",),
            ),
            ScalerEntry(
                name=ScalerName("reusing"),
                type=BackendType.BARE_METAL,
                max_agents=share,
                label_sets=(LabelSet(labels=("linux", "again")),),
                reuse=Reuse(idle_seconds=8.0, max_jobs=3),
            ),
            ScalerEntry(
                name=ScalerName("single"),
                type=BackendType.BARE_METAL,
                max_agents=1,
                label_sets=(LabelSet(labels=("linux", "rare")),),
            ),
        ),
    )


def fleet_of(plan: Plan, *, view: HostView, clock: Clock, url: str, entropy: SeededEntropy, on_exit: OnExit) -> Fleet:
    """All scalers at work on one host, for one run of a coordinator."""
    config = scalers(plan)
    scripts = spawn_scripts(plan, entropy)
    return Fleet(
        runtimes={
            entry.name: ScalerRuntime(
                name=entry.name,
                backend=SimBackend(entry, view=view, clock=clock, on_exit=on_exit, scripts=scripts),
                caps=scaler_caps(entry),
                orchestrator_url=url,
                spawns_at_once=entry.max_concurrent_spawns,
                reuse_idle_seconds=entry.reuse.idle_seconds if entry.reuse else None,
                reuse_max_jobs=entry.reuse.max_jobs if entry.reuse else None,
            )
            for entry in config.scalers
        },
        router=Router(routables(config, HOST)),
        caps=host_caps(config),
    )


class SimBackend(FakeBackend):
    """A fake backend on a simulated host: it tells agents to end before it ends their machines."""

    def __init__(
        self, entry: ScalerEntry, *, view: HostView, clock: Clock, on_exit: OnExit, scripts: Iterator[SpawnScript]
    ) -> None:
        super().__init__(
            scaler=entry.name,
            machines=view,
            clock=clock,
            on_exit=on_exit,
            sets=tuple(chosen.labels for chosen in entry.label_sets),
            max_agents=entry.max_agents,
        )
        self._view = view
        self.scripts = scripts

    async def _end(self, agent: _Tracked) -> None:
        self._view.terminate(agent.order.agent_id)
        await super()._end(agent)


def spawn_scripts(plan: Plan, entropy: SeededEntropy) -> Iterator[SpawnScript]:
    """What becomes of one spawn after the other."""
    while True:
        yield _script(plan, entropy)


def _script(plan: Plan, entropy: SeededEntropy) -> SpawnScript:
    def happens(kind: str) -> bool:
        return entropy.chance(plan.odds.get(kind, 0.0))

    seconds = entropy.uniform(5, 60) if happens("slow-boot") else entropy.uniform(0.01, 0.5)
    if happens("refuses"):
        return refuses()
    if happens("hangs"):
        return SpawnScript(seconds=float("inf"), makes=False)
    if happens("fails"):
        return SpawnScript(seconds=seconds, makes=False, error=Retryable("it could not be made"))
    script = SpawnScript(
        seconds=seconds,
        settle_seconds=entropy.uniform(0.1, 8) if happens("slow-settle") else 0.0,
        destroy_seconds=entropy.uniform(0.5, 8) if happens("slow-destroy") else 0.0,
        destroy_failures=round(entropy.uniform(1, 4)) if happens("destroy-fails") else 0,
        repeats_events=happens("repeats"),
    )
    if happens("fails-after-making"):
        return replace(script, error=Retryable("it was made and did not work"))
    return script
