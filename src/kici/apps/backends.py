"""Backends by their type: what an entry of the configuration becomes on this host."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kici.adapters.files import RealFiles
from kici.adapters.this_host import launch_host, this_cgroups, this_processes
from kici.adapters.zygote_client import Zygote
from kici.backends.bare_metal.backend import BareMetalBackend
from kici.backends.bare_metal.compute import Tools
from kici.backends.bare_metal.factory import make_backend, settings_of
from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.launch import LaunchHost
from kici.decide.route import Router
from kici.domain.errors import Misconfigured
from kici.domain.platform import Host
from kici.domain.spawn import Spawn
from kici.kit.supervise import Supervisor
from kici.ports.backend import OnExit
from kici.ports.clock import Clock
from kici.services.scaler_runtime import Fleet, ScalerRuntime

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

    def fleet(self, config: ScalersConfig) -> Fleet:
        """All scalers of a configuration.  Raises `Misconfigured` for what this version cannot make."""
        return Fleet(
            runtimes={entry.name: self.build(entry) for entry in config.scalers},
            router=Router(routables(config, self._site.host)),
            caps=host_caps(config),
        )

    def build(self, entry: ScalerEntry) -> ScalerRuntime:
        self.check(entry)
        runtime = ScalerRuntime(
            name=entry.name,
            backend=make_backend(
                entry,
                data_dir=self._site.data_dir,
                host=self._host(),
                tools=self._site.tools,
                supervisor=self._site.supervisor,
                on_exit=self._site.on_exit,
            ),
            caps=scaler_caps(entry),
            orchestrator_url=self._site.url,
        )
        self._settle(runtime, entry)
        return runtime

    def check(self, entry: ScalerEntry) -> None:
        if entry.type is not BackendType.BARE_METAL:
            raise Misconfigured(
                f"scaler {entry.name}: this version makes bare-metal agents only, not {entry.type} ones; "
                "take the entry out of the file that this host reads"
            )

    def apply(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        assert isinstance(runtime.backend, BareMetalBackend), runtime.backend
        runtime.backend.configure(settings_of(entry, self._site.data_dir))
        runtime.caps = scaler_caps(entry)
        self._settle(runtime, entry)

    def build_retired(self, row: Spawn) -> ScalerRuntime | None:
        if row.backend_type != BackendType.BARE_METAL:
            return None
        labels = LabelSet(labels=row.label_set, binary_path=sys.executable)
        return self.build(ScalerEntry(name=row.scaler, type=BackendType.BARE_METAL, max_agents=1, label_sets=(labels,)))

    def _settle(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        runtime.widen(entry.max_concurrent_spawns)
        runtime.orchestrator_url = entry.orchestrator_url or self._site.url
        runtime.machine_pool = entry.machine_pool
        runtime.provisioning_targets = entry.provisioning_targets
        runtime.reuse_idle_seconds = entry.reuse.idle_seconds if entry.reuse else None
        runtime.reuse_max_jobs = entry.reuse.max_jobs if entry.reuse else None

    def _host(self) -> LaunchHost:
        return launch_host(self._site.environ, self._site.tools.cgroups.support)
