"""Rules between values: each function reads as the sentence that must hold, and yields what breaks it.

They run on what the walker made, whether or not all of it could be read: a rule asks `sound` whether the values
that it goes by were read, and is silent otherwise, because that was reported already.  None looks at the machine:
one file serves many hosts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from kici.config.grammar import batch_syntax
from kici.config.model import Accel, BackendType, LabelSet, ScalerEntry, ScalersConfig, Vmm
from kici.config.problems import Path, did_you_mean
from kici.domain.labels import set_key
from kici.domain.platform import Os, gate_of, structured_taints

Sound: TypeAlias = Callable[[Path], bool]
NAMES_SHOWN_MAX: Final = 8
SMALLEST_PREFIX: Final = 30
"""A bridge needs an address for itself and one for a guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A broken rule, at a path among all scalers."""

    path: Path
    found: str
    expected: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class EntryView:
    """One scaler as a rule sees it."""

    entry: ScalerEntry
    at: Path
    config: ScalersConfig
    sound: Sound

    def has(self, *keys: str) -> bool:
        """Whether these keys of the entry were read."""
        return all(self.sound((*self.at, key)) for key in keys)

    def is_a(self, kind: BackendType) -> bool:
        return self.has("type") and self.entry.type is kind

    def sets(self, *keys: str) -> Iterator[tuple[LabelSet, Path]]:
        """Label sets of which these keys were read."""
        for index, label_set in enumerate(self.entry.label_sets):
            at = (*self.at, "labelSets", index)
            if all(self.sound((*at, key)) for key in keys):
                yield label_set, at


def broken_rules(config: ScalersConfig, sound: Sound) -> Iterator[Fault]:
    """Everything that the values say together and must not."""
    for whole in CONFIG_RULES:
        yield from whole(config, sound)
    for index, entry in enumerate(config.scalers):
        view = EntryView(entry, ("scalers", index), config, sound)
        for rule in ENTRY_RULES:
            yield from rule(view)


# --- rules of one scaler


def event_scalers_name_their_targets(view: EntryView) -> Iterator[Fault]:
    if view.is_a(BackendType.EVENT) and view.has("provisioningTargets") and not view.entry.provisioning_targets:
        yield Fault(
            path=(*view.at, "provisioningTargets"),
            found="none",
            expected="at least one workflow or webhook that makes the machines",
        )


def container_sets_have_an_image(view: EntryView) -> Iterator[Fault]:
    if view.is_a(BackendType.CONTAINER):
        for label_set, at in view.sets("image"):
            if label_set.image is None:
                yield Fault(path=(*at, "image"), found="nothing", expected="the image that agents run in")


def bare_metal_sets_have_a_program_or_an_image(view: EntryView) -> Iterator[Fault]:
    if view.is_a(BackendType.BARE_METAL):
        for label_set, at in view.sets("image", "binaryPath"):
            if label_set.image is None and label_set.binary_path is None:
                yield Fault(
                    path=(*at, "binaryPath"),
                    found="nothing",
                    expected="the agent program, or an image",
                    hint="binaryPath: kici-agent is the agent of this installation",
                )


def microvm_sets_have_a_root_file_system(view: EntryView) -> Iterator[Fault]:
    if view.is_a(BackendType.FIRECRACKER):
        for label_set, at in view.sets("rootfsPath"):
            if label_set.rootfs_path is None:
                yield Fault(path=(*at, "rootfsPath"), found="nothing", expected="the root file system of the guest")


def microvms_have_what_starts_them(view: EntryView) -> Iterator[Fault]:
    """QEMU brings what the jailer and its user are for."""
    if not view.is_a(BackendType.FIRECRACKER) or not view.has("vmm"):
        return
    entry = view.entry
    needs: dict[str, object] = {"kernelPath": entry.kernel_path}
    if entry.vmm is Vmm.FIRECRACKER:
        needs |= {
            "firecrackerPath": entry.firecracker_path,
            "jailerPath": entry.jailer_path,
            "uid": entry.uid,
            "gid": entry.gid,
        }
    for key, value in needs.items():
        if value is None and view.has(key):
            hint = "" if key == "kernelPath" else "or use vmm: qemu, which needs no jailer"
            yield Fault(path=(*view.at, key), found="nothing", expected="a value, as microVMs need it", hint=hint)


def the_firecracker_program_is_called_firecracker(view: EntryView) -> Iterator[Fault]:
    """The jailer names its directories after the program, and everything else finds them by that name."""
    path = view.entry.firecracker_path
    if view.is_a(BackendType.FIRECRACKER) and view.has("firecrackerPath") and path is not None:
        name = PurePosixPath(path).name
        if name != "firecracker":
            yield Fault(
                path=(*view.at, "firecrackerPath"),
                found=f'a file called "{name}"',
                expected='one called exactly "firecracker"',
                hint="a symbolic link of that name will do",
            )


def microvm_extra_hosts_are_plain(view: EntryView) -> Iterator[Fault]:
    """Guests get them in their hosts file, not from an engine that knows more spellings."""
    if view.is_a(BackendType.FIRECRACKER) and view.has("extraHosts"):
        for index, extra in enumerate(view.entry.extra_hosts):
            if not extra.plain:
                yield Fault(
                    path=(*view.at, "extraHosts", index),
                    found="a spelling that only container engines know",
                    expected="<name>:<address or host-gateway>",
                    hint=f"write {extra}",
                )


def only_qemu_emulates(view: EntryView) -> Iterator[Fault]:
    if not view.is_a(BackendType.FIRECRACKER) or not view.has("vmm", "accel"):
        return
    if view.entry.vmm is Vmm.FIRECRACKER and view.entry.accel is Accel.TCG:
        yield Fault(
            path=(*view.at, "accel"),
            found="emulation",
            expected="kvm or auto, as firecracker has nothing else",
            hint="vmm: qemu can emulate",
        )


def gate_labels_can_be_requested(view: EntryView) -> Iterator[Fault]:
    """A label that a job must name, but that the set does not have, makes a set that nobody can reach."""
    if not view.has("mandatoryLabels", "platform"):
        return
    taints = set(structured_taints(view.entry.platform))
    for label_set, at in view.sets("labels"):
        gate = gate_of(view.entry.mandatory_labels, view.entry.platform, label_set.labels)
        missing = gate - set(label_set.labels) - taints
        if missing:
            names = _listed(sorted(missing))
            yield Fault(
                path=(*at, "labels"),
                found=f"no {names} among [{_listed(label_set.labels)}]",
                expected=f"every mandatory label of scaler {view.entry.name}, or no job could ever come here",
                hint=f"add {names} here or take it out of mandatoryLabels",
            )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN_MAX])
    return shown if len(names) <= NAMES_SHOWN_MAX else f"{shown}, ..."


def the_machine_pool_exists(view: EntryView) -> Iterator[Fault]:
    pool = view.entry.machine_pool
    if pool is None or not view.has("machinePool") or not view.sound(("machinePools",)):
        return
    if view.config.machine_pool(pool) is None:
        known = [declared.name for declared in view.config.machine_pools]
        yield Fault(
            path=(*view.at, "machinePool"),
            found=f'an unknown pool "{pool}"',
            expected=f"one of {_listed(known)}" if known else "a pool that machinePools declares; it declares none",
            hint=did_you_mean(pool, known),
        )


def windows_batch_paths_are_no_syntax(view: EntryView) -> Iterator[Fault]:
    platform = view.entry.platform
    if not view.is_a(BackendType.BARE_METAL) or platform is None or platform.os is not Os.WINDOWS:
        return
    for label_set, at in view.sets("binaryPath"):
        syntax = batch_syntax(label_set.binary_path or "")
        if syntax is not None:
            yield Fault(
                path=(*at, "binaryPath"),
                found=f"a batch file whose path contains {syntax!r}",
                expected="a path that cmd.exe does not read as syntax",
                hint="move or rename the file",
            )


# --- rules of the whole


def scaler_names_are_unique(config: ScalersConfig, sound: Sound) -> Iterator[Fault]:
    """Whatever their case: labels carry them, and labels have none."""
    seen: set[str] = set()
    for index, entry in enumerate(config.scalers):
        at = ("scalers", index, "name")
        if not sound(at):
            continue
        if entry.name.lower() in seen:
            yield Fault(path=at, found=f'"{entry.name}" again', expected="a name that no other scaler has")
        seen.add(entry.name.lower())


def pool_names_are_unique(config: ScalersConfig, sound: Sound) -> Iterator[Fault]:
    seen: set[str] = set()
    for index, pool in enumerate(config.machine_pools):
        at = ("machinePools", index, "name")
        if not sound(at):
            continue
        if pool.name in seen:
            yield Fault(path=at, found=f'"{pool.name}" again', expected="a name that no other pool has")
        seen.add(pool.name)


def a_label_set_belongs_to_one_scaler(config: ScalersConfig, sound: Sound) -> Iterator[Fault]:
    """Otherwise the order of the file would decide which of two scalers a job gets."""
    seen: dict[str, int] = {}
    for index, entry in enumerate(config.scalers):
        for set_index, label_set in enumerate(entry.label_sets):
            at = ("scalers", index, "labelSets", set_index, "labels")
            if not sound(at):
                continue
            first = seen.setdefault(set_key(label_set.labels), index)
            if first != index:
                other = config.scalers[first].name
                yield Fault(
                    path=at,
                    found=f"the same labels as in scaler {other}",
                    expected="a set of labels that no other scaler has",
                    hint="add a label that tells them apart",
                )


def the_bridge_address_is_in_its_network(config: ScalersConfig, sound: Sound) -> Iterator[Fault]:
    bridge = config.firecracker
    if not sound(("firecracker", "cidr")):
        return
    if bridge.cidr.prefixlen > SMALLEST_PREFIX:
        yield Fault(
            path=("firecracker", "cidr"),
            found=f"room for no guest in {bridge.cidr}",
            expected=f"a network of at least /{SMALLEST_PREFIX}",
        )
        return
    ends = {bridge.cidr.network_address, bridge.cidr.broadcast_address}
    gateway = bridge.gateway_address
    if sound(("firecracker", "gateway")) and (gateway not in bridge.cidr or gateway in ends):
        yield Fault(
            path=("firecracker", "gateway"),
            found=str(gateway),
            expected=f"an address inside {bridge.cidr}",
            hint=f"did you mean {bridge.cidr.network_address + 1}?",
        )
    if sound(("firecracker", "netmask")) and bridge.guest_netmask != bridge.cidr.netmask:
        yield Fault(
            path=("firecracker", "netmask"),
            found=str(bridge.guest_netmask),
            expected=f"{bridge.cidr.netmask}, the mask of {bridge.cidr}",
        )


EntryRule: TypeAlias = Callable[[EntryView], Iterator[Fault]]
ConfigRule: TypeAlias = Callable[[ScalersConfig, Sound], Iterator[Fault]]

CONFIG_RULES: Final[tuple[ConfigRule, ...]] = (
    scaler_names_are_unique,
    pool_names_are_unique,
    a_label_set_belongs_to_one_scaler,
    the_bridge_address_is_in_its_network,
)
ENTRY_RULES: Final[tuple[EntryRule, ...]] = (
    event_scalers_name_their_targets,
    container_sets_have_an_image,
    bare_metal_sets_have_a_program_or_an_image,
    microvm_sets_have_a_root_file_system,
    microvms_have_what_starts_them,
    the_firecracker_program_is_called_firecracker,
    microvm_extra_hosts_are_plain,
    only_qemu_emulates,
    gate_labels_can_be_requested,
    the_machine_pool_exists,
    windows_batch_paths_are_no_syntax,
)
