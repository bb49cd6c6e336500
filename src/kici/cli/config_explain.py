"""What a scalers file amounts to on a host: labels, gates, sizes, caps, and warm pools that cannot fill.

One document serves both readers: programs take it as JSON, people get it told.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kici.config.model import BackendType, Cap, LabelSet, PullPolicy, Runtime, ScalerEntry, ScalersConfig, Vmm
from kici.decide.entries import Routable, platform_of, routables
from kici.domain.platform import Host
from kici.domain.resources import Amount

_GIB: Final = 1024**3
_MIB: Final = 1024**2
_PULLED: Final = {
    PullPolicy.ALWAYS: "every time",
    PullPolicy.IF_NOT_PRESENT: "when absent",
    PullPolicy.NEVER: "never",
}


class Size(msgspec.Struct, frozen=True, rename="camel"):
    """Cpus and memory; None: not declared, not capped."""

    cpus: float | None
    memory_bytes: int | None

    def __str__(self) -> str:
        cpus = "" if self.cpus is None else f"{self.cpus:g} cpus"
        memory = "" if self.memory_bytes is None else _memory(self.memory_bytes)
        return " and ".join(part for part in (cpus, memory) if part)


class Machine(msgspec.Struct, frozen=True, rename="camel"):
    vcpus: int
    memory_mib: int


class WarmAgents(msgspec.Struct, frozen=True, rename="camel"):
    size: int
    obstacle: str | None
    """Why none can be kept ready."""


class SetExplained(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    labels: tuple[str, ...]
    automatic_labels: tuple[str, ...]
    gate: tuple[str, ...]
    requests: Size
    limits: Size
    machine: Machine | None
    runs_in: str
    warm_pool: WarmAgents


class ScalerExplained(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    type: str
    made_by: str
    max_agents: int
    max_concurrent_spawns: int
    platform: str | None
    is_platform_declared: bool
    jobs_per_agent: str
    resource_cap: Size
    machine_pool: str | None
    label_sets: tuple[SetExplained, ...]


class PoolExplained(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    cap: Size


class Explained(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    global_max_agents: int
    global_resource_cap: Size
    machine_pools: tuple[PoolExplained, ...]
    scalers: tuple[ScalerExplained, ...]


def explained(config: ScalersConfig, host: Host) -> Explained:
    """The effective configuration on a host."""
    by_scaler: dict[str, list[Routable]] = {}
    for routable in routables(config, host):
        by_scaler.setdefault(routable.scaler, []).append(routable)
    return Explained(
        global_max_agents=config.global_max_agents,
        global_resource_cap=_cap(config.global_resource_cap),
        machine_pools=tuple(PoolExplained(pool.name, _cap(pool.cap)) for pool in config.machine_pools),
        scalers=tuple(_scaler(entry, by_scaler[entry.name], host) for entry in config.scalers),
    )


def _scaler(entry: ScalerEntry, sets: Sequence[Routable], host: Host) -> ScalerExplained:
    platform = platform_of(entry, host)
    return ScalerExplained(
        name=entry.name,
        type=entry.type.value,
        made_by=_maker(entry),
        max_agents=entry.max_agents,
        max_concurrent_spawns=entry.max_concurrent_spawns,
        platform=None if platform is None else f"{platform.os.value}/{platform.arch.value}",
        is_platform_declared=entry.platform is not None,
        jobs_per_agent=_jobs_per_agent(entry),
        resource_cap=_cap(entry.resource_cap),
        machine_pool=entry.machine_pool,
        label_sets=tuple(_label_set(entry, routable) for routable in sets),
    )


def _label_set(entry: ScalerEntry, routable: Routable) -> SetExplained:
    label_set = entry.label_sets[routable.set_index]
    shape = routable.shape()
    is_machine = entry.type is BackendType.FIRECRACKER
    return SetExplained(
        labels=routable.label_set,
        automatic_labels=tuple(sorted(routable.offers - set(routable.label_set))),
        gate=tuple(sorted(routable.gate)),
        requests=_amount(shape.requests),
        limits=_amount(shape.limits),
        machine=Machine(*entry.vm_size(label_set, shape.limits)) if is_machine else None,
        runs_in=_runs_in(entry, label_set),
        warm_pool=_warm_agents(entry, routable),
    )


def _warm_agents(entry: ScalerEntry, routable: Routable) -> WarmAgents:
    pool = entry.warm_pool
    size = pool.size if pool.enabled else 0
    return WarmAgents(size, _obstacle(routable) if size else None)


def _obstacle(routable: Routable) -> str | None:
    if not routable.gate <= {*routable.label_set, *routable.taints}:
        return "its gate is not among its own labels, so its agents could not be counted"
    if not routable.shape().requests:
        return "no resources are declared, so the size of an agent without a job is unknown"
    return None


def _maker(entry: ScalerEntry) -> str:
    match entry.type:
        case BackendType.CONTAINER:
            return f"containers of {_engine(entry)}"
        case BackendType.BARE_METAL:
            return "processes of this host"
        case BackendType.FIRECRACKER:
            how = f"acceleration {entry.accel.value}" if entry.vmm is Vmm.QEMU else "jailed"
            return f"microVMs of {entry.vmm.value}, {how}"
        case BackendType.EVENT:
            return f"machines made by {', '.join(entry.provisioning_targets)}"


def _engine(entry: ScalerEntry) -> str:
    named = entry.host or entry.socket_path
    if named is not None:
        return f"the engine at {named}"
    return "the first engine that answers" if entry.runtime is Runtime.AUTO else f"{entry.runtime.value} on this host"


def _runs_in(entry: ScalerEntry, label_set: LabelSet) -> str:
    match entry.type:
        case BackendType.CONTAINER:
            return f"image {label_set.image}, pulled {_PULLED[label_set.image_pull_policy]}"
        case BackendType.BARE_METAL:
            return _program(label_set.binary_path)
        case BackendType.FIRECRACKER:
            return f"root file system {label_set.rootfs_path}, kernel {label_set.kernel_path or entry.kernel_path}"
        case BackendType.EVENT:
            return "whatever its machine brings"


def _program(path: str | None) -> str:
    if path is None:
        return "the job's own image"
    is_own = "/" not in path and "\\" not in path
    return f"program {path}{' of this installation' if is_own else ''}"


def _jobs_per_agent(entry: ScalerEntry) -> str:
    if entry.reuse is None:
        return "one job"
    most = "any number of jobs" if entry.reuse.max_jobs is None else f"up to {entry.reuse.max_jobs} jobs"
    return f"{most}, waiting {entry.reuse.idle_seconds:g} s for each further one"


def _cap(cap: Cap) -> Size:
    return Size(cap.max_cpu, cap.max_memory_bytes)


def _amount(amount: Amount) -> Size:
    return Size(amount.cpus or None, amount.memory_bytes or None)


def _memory(size: int) -> str:
    return f"{size / _GIB:g} GiB" if size >= _GIB else f"{size / _MIB:g} MiB"


# --- telling it


def told(document: Explained) -> str:
    """The document in sentences."""
    return "".join(f"{line}\n" for line in _lines(document))


def _lines(document: Explained) -> Iterator[str]:
    together = f", requesting {document.global_resource_cap} together" if str(document.global_resource_cap) else ""
    yield f"At most {document.global_max_agents} agents in all{together}."
    for pool in document.machine_pools:
        yield f"Machine pool {pool.name}: {str(pool.cap) or 'no ceiling'}, shared with other orchestrators of its host."
    if not document.scalers:
        yield "No scalers: only agents that register by themselves run jobs."
    for scaler in document.scalers:
        yield ""
        yield from _scaler_lines(scaler)


def _scaler_lines(scaler: ScalerExplained) -> Iterator[str]:
    yield f"{scaler.name} ({scaler.type}): {scaler.made_by}"
    yield f"  agents      at most {scaler.max_agents}, {scaler.max_concurrent_spawns} starting at one time"
    yield f"  platform    {_platform_words(scaler)}"
    yield f"  each runs   {scaler.jobs_per_agent}"
    billed = [f"{scaler.resource_cap} together"] if str(scaler.resource_cap) else []
    billed += [f"machine pool {scaler.machine_pool}"] if scaler.machine_pool else []
    yield f"  caps        {', '.join(billed) or 'none of its own'}"
    for label_set in scaler.label_sets:
        yield from _set_lines(label_set)


def _platform_words(scaler: ScalerExplained) -> str:
    if scaler.platform is None:
        return "not declared; taken for Linux on a processor like this host's"
    return scaler.platform if scaler.is_platform_declared else f"{scaler.platform}, as this host"


def _set_lines(label_set: SetExplained) -> Iterator[str]:
    yield f"  [{', '.join(label_set.labels)}]"
    yield f"    also has  {', '.join(label_set.automatic_labels)}"
    gate = ", ".join(label_set.gate)
    yield f"    gate      {f'jobs must name {gate}' if gate else 'none; jobs without labels may come here'}"
    yield f"    size      {_size_words(label_set)}"
    if label_set.machine is not None:
        yield f"    machine   {label_set.machine.vcpus} vcpus, {label_set.machine.memory_mib} MiB"
    yield f"    runs in   {label_set.runs_in}"
    warm = label_set.warm_pool
    if warm.size:
        yield f"    warm      {f'stays empty: {warm.obstacle}' if warm.obstacle else f'{warm.size} kept ready'}"


def _size_words(label_set: SetExplained) -> str:
    if not str(label_set.requests):
        return "not declared: counts against numbers of agents only, and is not limited"
    return f"requests {label_set.requests}, is limited to {label_set.limits}"
