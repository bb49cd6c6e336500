"""How firecracker and its jailer are told what machine to make: a command line, and requests in their order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kici.decide.launch import CPU_PERIOD_US, CgroupSupport, LimitsBy
from kici.decide.microvm import Guest, Machine
from kici.decide.microvm_boot import METADATA_ADDRESS

SOCKET: Final = "api.sock"
PID_FILE: Final = "firecracker.pid"
VMM_LOG: Final = "vmm.log"
KERNEL: Final = "kernel"
INITRD: Final = "initrd"
ROOTFS: Final = "rootfs.ext4"
OVERLAY: Final = "overlay.ext4"
MEMORY: Final = "snapshot.memory"
STATE: Final = "snapshot.state"
RENAMES_SINCE: Final = (1, 12)
"""The first version that gives the interface of a restored machine another name."""
INTERFACE: Final = "eth0"
PIDS_MAX: Final = 64
"""Threads of one VMM: one for each processor, the API, the workers."""
VMM_MEMORY_BYTES: Final = 128 * 1024 * 1024
"""What the VMM itself may need beside the guest's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One request to the VMM."""

    method: str
    path: str
    body: object = field(repr=False)
    """May hold the agent's credential."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """Whom the jailer becomes, and what it starts."""

    jailer: str
    firecracker: str
    base: str
    """Folder that holds `firecracker/<id>`."""
    uid: int
    gid: int
    parent_cgroup: str = "firecracker"
    """The control group below which each machine has its own; the jailer's own default."""


def jailer_argv(jail: Jail, vm_id: str, cgroup: Sequence[str]) -> tuple[str, ...]:
    """The jailer's command line.  Not daemonized, so that the guest's console is our file."""
    return (
        jail.jailer,
        *("--id", vm_id),
        *("--exec-file", jail.firecracker),
        *("--uid", str(jail.uid)),
        *("--gid", str(jail.gid)),
        *("--chroot-base-dir", jail.base),
        "--new-pid-ns",
        *(("--parent-cgroup", jail.parent_cgroup) if cgroup else ()),
        *cgroup,
        "--",
        *("--api-sock", f"/{SOCKET}"),
        *("--log-path", f"/{VMM_LOG}"),
        *("--level", "Warning"),
    )


def cgroup_options(support: CgroupSupport, machine: Machine) -> tuple[str, ...]:
    """Limits of the VMM process itself, where this host lets us set them: a guest cannot exceed its hardware, but
    its VMM could, and part of a processor is no hardware."""
    if support.limits is LimitsBy.NONE:
        return ()
    memory = machine.mem_mib * 1024 * 1024 + VMM_MEMORY_BYTES
    quota = round(machine.limits.cpus * CPU_PERIOD_US) if machine.limits.cpus > 0 else None
    if support.limits is LimitsBy.V1:
        settings = [f"memory.limit_in_bytes={memory}", f"pids.max={PIDS_MAX + machine.vcpus}"]
        settings += [] if quota is None else [f"cpu.cfs_period_us={CPU_PERIOD_US}", f"cpu.cfs_quota_us={quota}"]
    else:
        settings = [f"memory.max={memory}", f"pids.max={PIDS_MAX + machine.vcpus}"]
        settings += [] if quota is None else [f"cpu.max={quota} {CPU_PERIOD_US}"]
    version = "1" if support.limits is LimitsBy.V1 else "2"
    return ("--cgroup-version", version, *(word for setting in settings for word in ("--cgroup", setting)))


def boot_calls(machine: Machine, guest: Guest, *, args: str, has_initrd: bool, metadata: object) -> list[ApiCall]:
    """Everything up to the start of the guest, which finds its boot data already there."""
    source: dict[str, object] = {"kernel_image_path": f"/{KERNEL}", "boot_args": args}
    if has_initrd:
        source["initrd_path"] = f"/{INITRD}"
    return [
        _put("/machine-config", {"vcpu_count": machine.vcpus, "mem_size_mib": machine.mem_mib, "smt": False}),
        _put("/boot-source", source),
        _put("/drives/rootfs", _drive("rootfs", ROOTFS, is_root=True)),
        _put("/drives/overlay", _drive("overlay", OVERLAY, is_root=False)),
        _put(
            f"/network-interfaces/{INTERFACE}",
            {"iface_id": INTERFACE, "guest_mac": guest.mac, "host_dev_name": guest.tap},
        ),
        *metadata_calls(metadata),
        _put("/actions", {"action_type": "InstanceStart"}),
    ]


def metadata_calls(metadata: object) -> list[ApiCall]:
    return [
        _put(
            "/mmds/config",
            {"network_interfaces": [INTERFACE], "version": "V2", "ipv4_address": METADATA_ADDRESS},
        ),
        _put("/mmds", metadata),
    ]


def snapshot_calls() -> list[ApiCall]:
    """Stop the guest, and write it to two files in its root."""
    files = {"snapshot_type": "Full", "snapshot_path": f"/{STATE}", "mem_file_path": f"/{MEMORY}"}
    return [_state("Paused"), _put("/snapshot/create", files)]


def load_call(guest: Guest) -> ApiCall:
    """Become the machine of a snapshot, with another interface.  Memory is shared until it is written on."""
    return _put(
        "/snapshot/load",
        {
            "snapshot_path": f"/{STATE}",
            "mem_backend": {"backend_type": "File", "backend_path": f"/{MEMORY}"},
            "network_overrides": [{"iface_id": INTERFACE, "host_dev_name": guest.tap}],
            "resume_vm": False,
        },
    )


def resume_calls(metadata: object) -> list[ApiCall]:
    """Let a loaded guest go on, which finds its boot data already there.  The service itself was restored."""
    return [_put("/mmds", metadata), _state("Resumed")]


def can_rename(version: str) -> bool:
    """Whether this version can give an interface another name; a version that we cannot read cannot."""
    numbers = version.removeprefix("v").split(".")[:2]
    return all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) >= RENAMES_SINCE


def _drive(name: str, file: str, *, is_root: bool) -> dict[str, object]:
    """The root is read only; what the guest writes goes to the overlay."""
    return {"drive_id": name, "path_on_host": f"/{file}", "is_root_device": is_root, "is_read_only": is_root}


def _state(state: str) -> ApiCall:
    return ApiCall(method="PATCH", path="/vm", body={"state": state})


def _put(path: str, body: object) -> ApiCall:
    return ApiCall(method="PUT", path=path, body=body)
