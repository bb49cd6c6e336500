"""What is valid and probably not meant: reported beside the problems, and no reason to refuse anything."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig, Vmm
from kici.config.names import AGENT_NAMES, PREFIX, UNUSED_NAMES
from kici.config.problems import Path, did_you_mean
from kici.config.shapes import table_of
from kici.domain.labels import set_key
from kici.domain.platform import Os, plain_taints
from kici.domain.resources import Amount, Shape, resolve

COMFORTABLE_VM_MIB: Final = 2048
"""Below this, jobs are ended by the guest's own memory killer after minutes that look like a hang."""


@dataclass(frozen=True, slots=True)
class Advice:
    path: Path
    """Among all scalers."""
    text: str


@dataclass(frozen=True, slots=True)
class EntryView:
    entry: ScalerEntry
    at: Path
    config: ScalersConfig
    written: Callable[[Path], frozenset[str]]
    """The keys that the file has at a path."""

    def shape(self, label_set: LabelSet) -> Shape:
        """Resources of an agent that is made without a job."""
        return resolve(label_set.resources, self.config.defaults.resources)

    def sets(self) -> Iterator[tuple[LabelSet, Path]]:
        for index, label_set in enumerate(self.entry.label_sets):
            yield label_set, (*self.at, "labelSets", index)


def advice_on(config: ScalersConfig, written: Callable[[Path], frozenset[str]]) -> Iterator[Advice]:
    """Advice on a configuration without problems."""
    for index, entry in enumerate(config.scalers):
        view = EntryView(entry, ("scalers", index), config, written)
        for advise in ENTRY_ADVICE:
            yield from advise(view)


def keys_without_effect(view: EntryView) -> Iterator[Advice]:
    """A key of another backend type is allowed, so that an entry can be moved, but it does nothing."""
    kind = view.entry.type.value
    places = [(ScalerEntry, view.at), *((LabelSet, at) for _, at in view.sets())]
    for model, at in places:
        keys = table_of(model).keys
        for name in sorted(view.written(at) & keys.keys()):
            if kind not in keys[name].applies:
                yield Advice((*at, name), f"{name} has no effect on a {kind} scaler")


def plain_platform_labels(view: EntryView) -> Iterator[Advice]:
    if view.entry.platform is not None:
        return
    plain = list(dict.fromkeys(label for label_set, _ in view.sets() for label in plain_taints(label_set.labels)))
    if plain:
        yield Advice(
            view.at,
            f"{', '.join(plain)} in the labels of scaler {view.entry.name} only looks like a platform; "
            "declare it with platform: {os: ..., arch: ...}, so that the automatic labels are right too",
        )


def small_microvms(view: EntryView) -> Iterator[Advice]:
    if view.entry.type is not BackendType.FIRECRACKER:
        return
    for label_set, at in view.sets():
        _, mib = view.entry.vm_size(label_set, view.shape(label_set).limits)
        if mib < COMFORTABLE_VM_MIB:
            yield Advice(at, f"a guest with {mib} MiB boots, but few jobs fit; {COMFORTABLE_VM_MIB} MiB are advised")


def sizes_that_no_cap_admits(view: EntryView) -> Iterator[Advice]:
    pool = view.config.machine_pool(view.entry.machine_pool or "")
    caps = {"resourceCap": view.entry.resource_cap, "globalResourceCap": view.config.global_resource_cap}
    if pool is not None:
        caps[f"machine pool {pool.name}"] = pool.cap
    for label_set, at in view.sets():
        shape = view.shape(label_set)
        for name, cap in caps.items():
            if _exceeds(shape.requests, cap.max_cpu, cap.max_memory_bytes):
                yield Advice(
                    at, f"one agent alone requests more than the {name} allows: only a job that asks less fits"
                )
        if _is_above(shape.requests, shape.limits):
            yield Advice((*at, "resources"), "an agent requests more than its limits let it use")


def _exceeds(amount: Amount, max_cpu: float | None, max_memory: int | None) -> bool:
    return (max_cpu is not None and amount.cpus > max_cpu) or (
        max_memory is not None and amount.memory_bytes > max_memory
    )


def _is_above(requests: Amount, limits: Amount) -> bool:
    return _exceeds(requests, limits.cpus or None, limits.memory_bytes or None)


def warm_pools_that_stay_empty(view: EntryView) -> Iterator[Advice]:
    pool = view.entry.warm_pool
    if not pool.enabled:
        return
    if pool.size == 0:
        yield Advice((*view.at, "warmPool"), "a warm pool of size 0 keeps no agents")
        return
    for label_set, at in view.sets():
        if not view.shape(label_set).requests:
            yield Advice(at, "no warm agents here: no resources are declared, so their size is unknown")
    wanted = pool.size * len(view.entry.label_sets)
    if wanted > view.entry.max_agents:
        yield Advice(
            (*view.at, "warmPool"), f"{wanted} warm agents are wanted, and maxAgents is {view.entry.max_agents}"
        )


def more_agents_than_the_orchestrator_may_have(view: EntryView) -> Iterator[Advice]:
    most = view.config.global_max_agents
    if view.entry.max_agents > most:
        yield Advice((*view.at, "maxAgents"), f"globalMaxAgents lets this orchestrator have {most} agents in all")


def engines_named_twice(view: EntryView) -> Iterator[Advice]:
    if view.entry.type is BackendType.CONTAINER and view.entry.host is not None and view.entry.socket_path is not None:
        yield Advice((*view.at, "socketPath"), "host names a remote engine, so the socket is not used")


def process_agents_that_nothing_confines(view: EntryView) -> Iterator[Advice]:
    if view.entry.type is not BackendType.BARE_METAL:
        return
    for label_set, at in view.sets():
        if label_set.binary_path is None:
            continue
        if "networkPolicy" in view.written(at):
            yield Advice((*at, "networkPolicy"), "processes of the host are not filtered; this policy is not enforced")
        if "/" in label_set.binary_path and not _is_absolute(label_set.binary_path):
            yield Advice((*at, "binaryPath"), "a relative path is looked up from wherever the orchestrator was started")
    platform = view.entry.platform
    if view.entry.enforce_cgroups and platform is not None and platform.os is not Os.LINUX:
        yield Advice((*view.at, "enforceCgroups"), f"there are no control groups on {platform.os.value}")


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "\\")) or path[1:2] == ":"


def label_sets_given_twice(view: EntryView) -> Iterator[Advice]:
    seen: set[str] = set()
    for label_set, at in view.sets():
        key = set_key(label_set.labels)
        if key in seen:
            yield Advice((*at, "labels"), "these labels were given before in this scaler, and the first set wins")
        seen.add(key)


def variables_that_agents_do_not_know(view: EntryView) -> Iterator[Advice]:
    """An agent refuses to start with one, and every spawn of the set would fail."""
    for label_set, at in view.sets():
        for name in label_set.env:
            if name.startswith(PREFIX) and name not in AGENT_NAMES and name not in UNUSED_NAMES:
                hint = did_you_mean(name, AGENT_NAMES)
                yield Advice(
                    (*at, "env", name),
                    f"agents know no variable {name} and refuse to start" + (f"; {hint}" if hint else ""),
                )


def settings_of_the_other_machine_program(view: EntryView) -> Iterator[Advice]:
    if view.entry.type is BackendType.FIRECRACKER and view.entry.vmm is Vmm.QEMU:
        for name in sorted(view.written(view.at) & {"firecrackerPath", "jailerPath", "uid", "gid"}):
            yield Advice((*view.at, name), f"{name} has no effect with vmm: qemu")


EntryAdvice: TypeAlias = Callable[[EntryView], Iterator[Advice]]
ENTRY_ADVICE: Final[tuple[EntryAdvice, ...]] = (
    keys_without_effect,
    plain_platform_labels,
    small_microvms,
    sizes_that_no_cap_admits,
    warm_pools_that_stay_empty,
    more_agents_than_the_orchestrator_may_have,
    engines_named_twice,
    process_agents_that_nothing_confines,
    label_sets_given_twice,
    variables_that_agents_do_not_know,
    settings_of_the_other_machine_program,
)
