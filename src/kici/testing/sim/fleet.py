"""The scalers of a simulated coordinator: what they offer and may use, and the backends that make their agents."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from kici.apps.assembly import Coordinator
from kici.apps.provisioning import Provisioning
from kici.backends.event.backend import EventBackend
from kici.backends.event.factory import event_settings
from kici.config.model import (
    BackendType,
    Cap,
    LabelSet,
    MachinePool,
    Reuse,
    ScalerEntry,
    ScalersConfig,
    WarmPool,
)
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.errors import DeterministicRefusal, Misconfigured, Retryable
from kici.domain.ids import ScalerName
from kici.domain.labels import set_key
from kici.domain.platform import Host
from kici.domain.resources import UNDECLARED, Ask, ResourceRequest
from kici.domain.spawn import Spawn
from kici.ports.backend import Compute, OnEvent, OnExit, SpawnOrder
from kici.ports.clock import Clock
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.testing.fake_backend import FakeBackend, SpawnScript, _Tracked, refuses
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.cloud_rules import CLOUD
from kici.testing.sim.hosts import HostView
from kici.testing.sim.network import ANYBODY
from kici.testing.sim.plan import LARGEST_CPUS, Plan

HOST: Final = Host("linux", "x86_64")
GIB: Final = 1024**3
REUSED_JOBS: Final = 3
CLOUD_REF: Final = "acme/cloud"
POOL: Final = "box"
POOLED: Final = ("plain", "quick")
"""Scalers whose agents are billed to the machine pool, if there is one."""


def scalers(plan: Plan) -> ScalersConfig:
    """A plain scaler with caps, one behind a gate, one that reuses agents, one for a warm pool, and a small one."""
    config = _scalers(plan)
    if plan.cloud_agents:
        config = replace(config, scalers=(*config.scalers, _cloud(plan)))
    return _pooled(config, plan.pool_cpus) if plan.pool_cpus else config


def _pooled(config: ScalersConfig, cpus: float) -> ScalersConfig:
    """The same with a machine pool; one of its scalers makes containers, which do not prove that they live."""
    entries = tuple(
        replace(entry, machine_pool=POOL, type=BackendType.CONTAINER if entry.name == "quick" else entry.type)
        if entry.name in POOLED
        else entry
        for entry in config.scalers
    )
    return replace(config, machine_pools=(MachinePool(name=POOL, cap=Cap(max_cpu=cpus)),), scalers=entries)


def _cloud(plan: Plan) -> ScalerEntry:
    """One that asks a provider for machines."""
    return ScalerEntry(
        name=ScalerName(CLOUD),
        type=BackendType.EVENT,
        max_agents=plan.cloud_agents,
        label_sets=(LabelSet(labels=("linux", "cloud")),),
        provisioning_targets=(CLOUD_REF,),
    )


def _scalers(plan: Plan) -> ScalersConfig:
    share = max(1, plan.agents_max // 3)
    return ScalersConfig(
        global_max_agents=plan.agents_max,
        global_resource_cap=Cap(max_memory_bytes=(share + max(2, share)) * GIB),
        scalers=(
            ScalerEntry(
                name=ScalerName("plain"),
                type=BackendType.BARE_METAL,
                max_agents=2 * share,
                max_concurrent_spawns=4,
                label_sets=(
                    LabelSet(labels=("linux", "x64"), resources=ResourceRequest(requests=Ask(cpus=1, memory="1g"))),
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
                reuse=Reuse(idle_seconds=8.0, max_jobs=REUSED_JOBS),
            ),
            ScalerEntry(
                name=ScalerName("quick"),
                type=BackendType.BARE_METAL,
                max_agents=share + 1,
                label_sets=(
                    LabelSet(labels=("linux", "quick"), resources=ResourceRequest(requests=Ask(cpus=1, memory="1g"))),
                ),
            ),
            ScalerEntry(
                name=ScalerName("single"),
                type=BackendType.BARE_METAL,
                max_agents=1,
                label_sets=(LabelSet(labels=("linux", "rare")),),
            ),
        ),
    )


def with_pool(config: ScalersConfig, size: int) -> ScalersConfig:
    """The same with a warm pool, which never takes all that its scaler may make."""
    most = max((entry.max_agents - 1 for entry in config.scalers if entry.name == "quick"), default=0)
    pool = WarmPool(enabled=True, size=min(size, most), idle_timeout_seconds=20.0)
    return _changed(config, "quick", warm_pool=pool)


def edited(config: ScalersConfig, entropy: SeededEntropy) -> ScalersConfig:
    """What an operator may make of it."""
    name = entropy.choice([entry.name for entry in config.scalers])
    match entropy.choice(["remove", "shrink", "pool", "relabel", "hasten", *["tighten" for _ in config.machine_pools]]):
        case "remove":
            return replace(config, scalers=tuple(entry for entry in config.scalers if entry.name != name))
        case "shrink":
            return replace(
                _changed(config, name, max_agents=1), global_max_agents=max(1, config.global_max_agents // 2)
            )
        case "pool":
            return with_pool(config, round(entropy.uniform(0, 3)))
        case "relabel":
            return _changed(config, name, label_sets=(LabelSet(labels=("linux", "renamed")),), mandatory_labels=())
        case "tighten":
            cap = Cap(max_cpu=entropy.uniform(LARGEST_CPUS, 2 * LARGEST_CPUS))
            return replace(config, machine_pools=(MachinePool(name=POOL, cap=cap),))
        case _:
            return _changed(config, name, max_concurrent_spawns=1)


def _changed(config: ScalersConfig, name: str, **fields: object) -> ScalersConfig:
    return replace(
        config,
        scalers=tuple(
            replace(entry, **fields) if entry.name == name else entry  # type: ignore[arg-type] # fields of an entry
            for entry in config.scalers
        ),
    )


class SimFleetBuilder:
    """Makes scalers at work on one host, for one run of a coordinator."""

    def __init__(
        self,
        plan: Plan,
        *,
        view: HostView,
        clock: Clock,
        url: str,
        entropy: SeededEntropy,
        on_exit: OnExit,
    ) -> None:
        self.program: Callable[[], Coordinator]
        """Whose backends they are; set before the first of them is used."""
        self.defaults = UNDECLARED
        self._view = view
        self._clock = clock
        self._url = url
        self._on_exit = on_exit
        self._scripts = spawn_scripts(plan, entropy, view)
        self._entropy = entropy
        self._plan = plan

    def fleet(self, config: ScalersConfig) -> Fleet:
        return Fleet(
            runtimes={entry.name: self.build(entry) for entry in config.scalers},
            router=Router(routables(config, HOST)),
            caps=host_caps(config),
        )

    def build(self, entry: ScalerEntry) -> ScalerRuntime:
        if entry.type is BackendType.EVENT:
            return self._build_event(entry)
        backend = SimBackend(entry, self._view, clock=self._clock, on_exit=self._on_exit, scripts=self._scripts)
        runtime = ScalerRuntime(name=entry.name, backend=backend, caps=scaler_caps(entry), orchestrator_url=self._url)
        self.apply(runtime, entry)
        return runtime

    def _build_event(self, entry: ScalerEntry) -> ScalerRuntime:
        find = Provisioning(
            find_events=lambda: self.program().events.emitter,
            find_claims=lambda: self.program().claims,
            entropy=self._entropy,
        )
        backend = EventBackend(
            settings=event_settings(entry),
            events=find.events(),
            claims=find.claims(),
            clock=self._clock,
            entropy=self._entropy,
        )
        url = ANYBODY if self._plan.is_balanced else self._url
        runtime = ScalerRuntime(name=entry.name, backend=backend, caps=scaler_caps(entry), orchestrator_url=url)
        self.apply(runtime, entry)
        return runtime

    def check(self, entry: ScalerEntry) -> None:
        if self._entropy.chance(self._plan.odds.get("reload-fails", 0.0)) and not self._view.is_kind:
            raise Misconfigured(f"scaler {entry.name}: this host cannot serve it")

    def apply(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        if isinstance(runtime.backend, EventBackend):
            runtime.backend.settings = event_settings(entry)
        else:
            assert isinstance(runtime.backend, SimBackend), runtime.backend
            runtime.backend.take(entry)
        runtime.provisioning_targets = entry.provisioning_targets
        runtime.caps = scaler_caps(entry)
        runtime.widen(entry.max_concurrent_spawns)
        runtime.machine_pool = entry.machine_pool
        runtime.reuse_idle_seconds = entry.reuse.idle_seconds if entry.reuse else None
        runtime.reuse_max_jobs = entry.reuse.max_jobs if entry.reuse else None

    def build_retired(self, row: Spawn) -> ScalerRuntime | None:
        sets = (LabelSet(labels=row.label_set),)
        return self.build(
            ScalerEntry(
                name=row.scaler,
                type=BackendType(row.backend_type),
                max_agents=1,
                label_sets=sets,
                provisioning_targets=row.provisioning_targets,
            )
        )


class SimBackend(FakeBackend):
    """A fake backend on a simulated host: it tells agents to end before it ends their machines."""

    def __init__(
        self, entry: ScalerEntry, view: HostView, *, clock: Clock, on_exit: OnExit, scripts: Iterator[SpawnScript]
    ) -> None:
        super().__init__(scaler=entry.name, machines=view, clock=clock, on_exit=on_exit)
        self._view = view
        self.backend_type = entry.type
        self.scripts = scripts
        self.take(entry)

    def take(self, entry: ScalerEntry) -> None:
        """Serve a changed entry from now on."""
        self.max_agents = entry.max_agents
        self._sets = {set_key(chosen.labels) for chosen in entry.label_sets}

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        self._view.is_asked(self.scaler, order.agent_id)
        try:
            return await super().spawn(order, on_event)
        except DeterministicRefusal:
            self._view.refuses(self.scaler)
            raise

    async def _make(self, agent: _Tracked) -> None:
        try:
            await super()._make(agent)
        except BaseException:
            self._view.gives_up(agent.order.agent_id, "its spawn failed")
            raise

    async def _end(self, agent: _Tracked) -> None:
        self._view.terminate(agent.order.agent_id)
        try:
            await super()._end(agent)
        except Retryable:
            self._view.resists(agent.order.agent_id)
            raise


def spawn_scripts(plan: Plan, entropy: SeededEntropy, view: HostView) -> Iterator[SpawnScript]:
    """What becomes of one spawn after the other."""

    def happens(kind: str) -> bool:
        return entropy.chance(plan.odds.get(kind, 0.0)) and not view.is_kind

    while True:
        yield _script(entropy, happens)


def _script(entropy: SeededEntropy, happens: Callable[[str], bool]) -> SpawnScript:

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
