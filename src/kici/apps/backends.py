"""Backends by their type: what an entry of the configuration becomes on this host."""

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kici.adapters.docker_engine_find import has_engine
from kici.adapters.files import RealFiles
from kici.adapters.this_host import launch_host, this_cgroups, this_processes
from kici.adapters.zygote_client import Zygote
from kici.apps.provisioning import Provisioning
from kici.backends.bare_metal.backend import BareMetalBackend
from kici.backends.bare_metal.compute import Tools
from kici.backends.bare_metal.factory import make_backend, settings_of
from kici.backends.bare_metal.records import AgentFiles
from kici.backends.container.backend import ContainerBackend
from kici.backends.container.factory import makes_containers
from kici.backends.event.backend import EventBackend
from kici.backends.event.factory import event_settings
from kici.config.model import BackendType, FirecrackerNetwork, LabelSet, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.launch import LaunchHost
from kici.decide.route import Router
from kici.domain.errors import Misconfigured
from kici.domain.ids import InstanceId, ScalerName
from kici.domain.platform import Host
from kici.domain.resources import UNDECLARED
from kici.domain.spawn import Spawn
from kici.kit.supervise import Supervisor
from kici.ports.addresses import AddressStore
from kici.ports.backend import Backend, OnExit
from kici.ports.clock import Clock
from kici.services.scaler_runtime import Fleet, ScalerRuntime

if TYPE_CHECKING:
    from kici.apps.containers import Containers
    from kici.apps.microvms import MicroVms

AGENT: Final = "kici.agent.program:run"
"""What the zygote runs in each process that it makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where backends work: this host and this installation."""

    data_dir: Path
    environ: Mapping[str, str] = field(repr=False)
    url: str
    """Where agents of this host connect to, unless their scaler says otherwise."""
    clock: Clock
    supervisor: Supervisor
    on_exit: OnExit
    tools: Tools
    instance_id: InstanceId
    """What is made on shared engines carries it."""
    provisioning: Provisioning
    """How event scalers ask for machines."""
    addresses: AddressStore | None = None
    """Where addresses of microVMs are kept; None: in memory."""
    socket_wait_ms: Callable[[], int] = lambda: 30_000
    """How long a new VMM may take to answer, as set now."""

    @property
    def host(self) -> Host:
        return Host(sys.platform, platform.machine())


def local_zygote(clock: Clock) -> Zygote | None:
    """What starts this installation's own agents without starting an interpreter for each; None: not here."""
    return Zygote(python=sys.executable, target=AGENT, env={}, clock=clock) if sys.platform == "linux" else None


def local_tools(clock: Clock, zygote: Zygote | None) -> Tools:
    """The means to start processes on this host."""
    return Tools(
        processes=this_processes(),
        files=RealFiles(),
        cgroups=this_cgroups(),
        clock=clock,
        zygote=zygote,
    )


class FleetBuilder:
    """Makes scalers at work from entries of the configuration, and changes them when it changes."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._makes_containers: dict[ScalerName, bool] = {}
        self.network = FirecrackerNetwork()
        """The bridge of microVMs that are built from now on."""
        self.defaults = UNDECLARED

    def fleet(self, config: ScalersConfig) -> Fleet:
        """All scalers of a configuration.  Raises `Misconfigured` for what this version cannot make."""
        self.network = config.firecracker
        self.defaults = config.defaults.resources
        return Fleet(
            runtimes={entry.name: self.build(entry) for entry in config.scalers},
            router=Router(routables(config, self._site.host)),
            caps=host_caps(config),
        )

    def build(self, entry: ScalerEntry) -> ScalerRuntime:
        self.check(entry)
        runtime = ScalerRuntime(
            name=entry.name,
            backend=self._backend(entry),
            caps=scaler_caps(entry),
            orchestrator_url=self._site.url,
        )
        self._settle(runtime, entry)
        return runtime

    def check(self, entry: ScalerEntry) -> None:
        if entry.type is BackendType.FIRECRACKER:
            self._microvms.check(entry)
        if self._makes_containers.get(entry.name, makes_containers(entry)) != makes_containers(entry):
            raise Misconfigured(
                f"scaler {entry.name}: its agents cannot become containers, or processes, while it runs; "
                "give the changed scaler another name, or restart the coordinator"
            )

    def apply(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        if isinstance(runtime.backend, EventBackend):
            runtime.backend.settings = event_settings(entry)
        elif isinstance(runtime.backend, BareMetalBackend):
            runtime.backend.configure(settings_of(entry, self._site.data_dir))
        elif entry.type is BackendType.FIRECRACKER:
            self._microvms.apply(runtime.backend, entry)
        else:
            assert isinstance(runtime.backend, ContainerBackend), runtime.backend
            self._containers.apply(runtime.backend, entry)
        runtime.caps = scaler_caps(entry)
        self._settle(runtime, entry)

    def build_retired(self, row: Spawn) -> ScalerRuntime | None:
        if row.backend_type == BackendType.CONTAINER:
            labels = LabelSet(labels=row.label_set, image="gone")
        elif row.backend_type == BackendType.BARE_METAL:
            labels = self._retired_bare_metal(row)
        elif row.backend_type == BackendType.EVENT:
            labels = LabelSet(labels=row.label_set)
        elif row.backend_type == BackendType.FIRECRACKER:
            return self._retired_microvms(row)
        else:
            return None
        kind = BackendType(row.backend_type)
        targets = row.provisioning_targets
        return self.build(
            ScalerEntry(name=row.scaler, type=kind, max_agents=1, label_sets=(labels,), provisioning_targets=targets)
        )

    def _backend(self, entry: ScalerEntry) -> Backend:
        self._makes_containers[entry.name] = makes_containers(entry)
        if entry.type is BackendType.EVENT:
            return EventBackend(
                settings=event_settings(entry),
                events=self._site.provisioning.events(),
                claims=self._site.provisioning.claims(),
                clock=self._site.clock,
                entropy=self._site.provisioning.entropy,
            )
        if entry.type is BackendType.FIRECRACKER:
            return self._microvms.build(entry, self.network)
        if makes_containers(entry):
            return self._containers.build(entry)
        return make_backend(
            entry,
            data_dir=self._site.data_dir,
            host=self._host(),
            tools=self._site.tools,
            supervisor=self._site.supervisor,
            on_exit=self._site.on_exit,
        )

    def _retired_bare_metal(self, row: Spawn) -> LabelSet:
        """A process has a record on this host; what has none was a container, if there can be any here."""
        is_process = AgentFiles(self._site.tools.files, self._site.data_dir).read(row.agent_id) is not None
        if is_process or not has_engine(self._site.environ):
            return LabelSet(labels=row.label_set, binary_path=sys.executable)
        return LabelSet(labels=row.label_set, image="gone")

    def _retired_microvms(self, row: Spawn) -> ScalerRuntime | None:
        """As its machines' records say that they were made."""
        entry = self._microvms.entry_of_records(row)
        return None if entry is None else self.build(entry)

    @cached_property
    def _microvms(self) -> "MicroVms":
        from kici.apps.microvms import MicroVms

        return MicroVms(self._site, lambda: self.defaults)

    @cached_property
    def _containers(self) -> "Containers":
        """Made, and what it takes loaded, when there is a container scaler."""
        from kici.apps.containers import Containers

        return Containers(
            data_dir=self._site.data_dir,
            owner=self._site.instance_id,
            environ=dict(self._site.environ),
            processes=self._site.tools.processes,
            host=self._site,
        )

    def _settle(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        runtime.widen(entry.max_concurrent_spawns)
        runtime.orchestrator_url = entry.orchestrator_url or self._site.url
        runtime.machine_pool = entry.machine_pool
        runtime.provisioning_targets = entry.provisioning_targets
        runtime.warm_pool = entry.warm_pool
        runtime.reuse_idle_seconds = entry.reuse.idle_seconds if entry.reuse else None
        runtime.reuse_max_jobs = entry.reuse.max_jobs if entry.reuse else None

    def _host(self) -> LaunchHost:
        return launch_host(self._site.environ, self._site.tools.cgroups.support)
