"""Backends by their type: what an entry of the configuration becomes on this host."""

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kici.adapters.files import RealFiles
from kici.adapters.this_host import launch_host, this_cgroups, this_processes
from kici.adapters.zygote_client import Zygote
from kici.backends.bare_metal.compute import Tools
from kici.backends.bare_metal.factory import make_backend
from kici.config.model import BackendType, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.errors import Misconfigured
from kici.domain.platform import Host
from kici.kit.supervise import Supervisor
from kici.ports.backend import Backend, OnExit
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


def fleet_of(config: ScalersConfig, site: Site) -> Fleet:
    """All scalers of a configuration.  Raises `Misconfigured` for what this version cannot make."""
    runtimes = {entry.name: _runtime(entry, site) for entry in config.scalers}
    return Fleet(
        runtimes=runtimes,
        router=Router(routables(config, site.host)),
        caps=host_caps(config),
    )


def _runtime(entry: ScalerEntry, site: Site) -> ScalerRuntime:
    return ScalerRuntime(
        name=entry.name,
        backend=_MAKERS[entry.type](entry, site),
        caps=scaler_caps(entry),
        orchestrator_url=entry.orchestrator_url or site.url,
        spawns_at_once=entry.max_concurrent_spawns,
        machine_pool=entry.machine_pool,
        provisioning_targets=entry.provisioning_targets,
        reuse_idle_seconds=entry.reuse.idle_seconds if entry.reuse else None,
        reuse_max_jobs=entry.reuse.max_jobs if entry.reuse else None,
    )


def _bare_metal(entry: ScalerEntry, site: Site) -> Backend:
    return make_backend(
        entry,
        data_dir=site.data_dir,
        host=launch_host(site.environ, site.tools.cgroups.support),
        tools=site.tools,
        supervisor=site.supervisor,
        on_exit=site.on_exit,
    )


def _not_yet(entry: ScalerEntry, site: Site) -> Backend:
    raise Misconfigured(
        f"scaler {entry.name}: this version makes bare-metal agents only, not {entry.type} ones; "
        "take the entry out of the file that this host reads"
    )


_MAKERS: Mapping[BackendType, Callable[[ScalerEntry, Site], Backend]] = {
    BackendType.BARE_METAL: _bare_metal,
    BackendType.CONTAINER: _not_yet,
    BackendType.FIRECRACKER: _not_yet,
    BackendType.EVENT: _not_yet,
}
