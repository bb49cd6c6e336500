"""Routable label sets: what each scaler offers, demands and carries, one value for each label set.

Made once for each configuration, from the entry and the host.  Retiring scalers are left out, which is how a
removed scaler stops taking work the moment that a reload commits.  Everything that a spawn needs to know of
its set is here, so that no later step looks a set up by index.
"""

from collections.abc import Set
from dataclasses import dataclass

from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.config.model import Cap as ConfigCap
from kici.decide.admit import Cap, HostCaps, ScalerCaps
from kici.domain.ids import ScalerName
from kici.domain.labels import canonical, scaler_agent_labels
from kici.domain.platform import Host, Platform, gate_of, os_arch_labels, structured_taints
from kici.domain.resources import UNDECLARED, ResourceRequest, Shape, resolve

NONE_RETIRING: frozenset[ScalerName] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routable:
    """One label set of one scaler."""

    scaler: ScalerName
    backend_type: str
    set_index: int
    label_set: tuple[str, ...]
    """Declared labels, in the order of the file."""
    offers: frozenset[str]
    """What a job may ask for: declared, os and arch, taints, and the `kici:` labels of agent, scaler and roles."""
    agent_labels: tuple[str, ...]
    """What an agent of this set carries, and what its token is bound to."""
    gate: frozenset[str]
    """What a job must ask for."""
    taints: tuple[str, ...] = ()
    """Platform tokens; the agent carries them, and a warm pool must count with them."""
    roles: tuple[str, ...] | None = None
    """None: all roles."""
    resources: ResourceRequest = UNDECLARED
    """Of the set."""
    defaults: ResourceRequest = UNDECLARED
    """Of the whole configuration."""
    runs_job_image: bool = False
    """An agent for a job with its own image is started inside that image."""

    def shape(self, job: ResourceRequest = UNDECLARED) -> Shape:
        """Resources of an agent of this set for a job.  Raises `ValueError` for a memory string that cannot be read."""
        return resolve(job, self.resources, self.defaults)


def routables(config: ScalersConfig, host: Host, *, retiring: Set[ScalerName] = NONE_RETIRING) -> tuple[Routable, ...]:
    """Every label set that takes work, in the order of the configuration."""
    return tuple(
        _routable(config, entry, index, host)
        for entry in config.scalers
        if entry.name not in retiring
        for index in range(len(entry.label_sets))
    )


def host_caps(config: ScalersConfig) -> HostCaps:
    return HostCaps(
        agents_max=config.global_max_agents,
        resources=_cap(config.global_resource_cap),
        machine_pools={pool.name: _cap(pool.cap) for pool in config.machine_pools},
    )


def scaler_caps(entry: ScalerEntry) -> ScalerCaps:
    return ScalerCaps(
        scaler=entry.name,
        agents_max=entry.max_agents,
        resources=_cap(entry.resource_cap),
        is_cluster_counted=entry.type is BackendType.EVENT,
    )


def platform_of(entry: ScalerEntry, host: Host) -> Platform | None:
    """Declared, or for agents that are processes of this host, the host's.  None: no taint follows from it."""
    if entry.platform is None and entry.type is BackendType.BARE_METAL:
        return host.platform
    return entry.platform


def taints_of(entry: ScalerEntry, host: Host) -> tuple[str, ...]:
    """Platform tokens of a scaler: what its sets offer and demand and its agents carry.  Computed nowhere else."""
    return structured_taints(platform_of(entry, host))


def _routable(config: ScalersConfig, entry: ScalerEntry, index: int, host: Host) -> Routable:
    label_set = entry.label_sets[index]
    taints = taints_of(entry, host)
    agent_labels = scaler_agent_labels(
        label_set.labels, backend_type=entry.type, scaler=entry.name, roles=entry.role_names, taints=taints
    )
    return Routable(
        scaler=entry.name,
        backend_type=entry.type.value,
        set_index=index,
        label_set=label_set.labels,
        offers=frozenset((*agent_labels, *_os_arch(entry, host))),
        agent_labels=agent_labels,
        gate=gate_of(canonical(entry.mandatory_labels), platform_of(entry, host), label_set.labels),
        taints=taints,
        roles=entry.role_names,
        resources=label_set.resources,
        defaults=config.defaults.resources,
        runs_job_image=_runs_job_image(entry.type, label_set),
    )


def _os_arch(entry: ScalerEntry, host: Host) -> tuple[str, ...]:
    platform = platform_of(entry, host)
    if platform is not None:
        return os_arch_labels(platform.os, platform.arch)
    # A container, microVM or machine without a declared platform is taken for Linux on a processor like ours.
    system = host.system if entry.type is BackendType.BARE_METAL else "linux"
    return os_arch_labels(system, host.machine)


def _runs_job_image(backend_type: BackendType, label_set: LabelSet) -> bool:
    match backend_type:
        case BackendType.CONTAINER:
            return True
        case BackendType.BARE_METAL:
            return label_set.image is not None and label_set.binary_path is None
        case BackendType.FIRECRACKER | BackendType.EVENT:
            return False


def _cap(cap: ConfigCap) -> Cap:
    return Cap(cpus=cap.max_cpu, memory_bytes=cap.max_memory_bytes)
