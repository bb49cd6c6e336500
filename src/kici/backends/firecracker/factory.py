"""From a configuration entry to the settings of a backend, and what this host lacks for it."""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from kici.backends.firecracker.settings import MicroVmSet, MicroVmSettings
from kici.config.model import FirecrackerNetwork, LabelSet, NetworkPolicy, ScalerEntry
from kici.decide.isolate import Policy
from kici.decide.microvm import Bridge
from kici.decide.microvm_boot import guest_env, url_problem
from kici.domain.resources import ResourceRequest, resolve

log = logging.getLogger(__name__)

PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
TOOLS: Final = {"ip": "iproute2", "nft": "nftables", "mkfs.ext4": "e2fsprogs", "sysctl": "procps"}
INITRD_SUFFIX: Final = ".initrd"
"""A file of the kernel's name and this ending is its initial RAM disk: kernels of distributions need one."""


def bridge_of(network: FirecrackerNetwork) -> Bridge:
    return Bridge(
        name=network.bridge_name,
        cidr=network.cidr,
        gateway=network.gateway_address,
        netmask=network.guest_netmask,
        table=network.table,
    )


def settings_of(
    entry: ScalerEntry,
    network: FirecrackerNetwork,
    *,
    data_dir: Path,
    environ: Mapping[str, str],
    defaults: Callable[[], ResourceRequest],
) -> MicroVmSettings:
    """`environ`: the coordinator's own environment, for what it forwards to agents.

    `defaults()`: resources that the scalers file in force gives to who declares none.
    """
    return MicroVmSettings(
        scaler=entry.name,
        max_agents=entry.max_agents,
        sets=tuple(microvm_set(entry, label_set, environ, defaults) for label_set in entry.label_sets),
        base=Path(entry.chroot_base_dir),
        data_dir=data_dir.resolve(),
        extra_hosts=entry.extra_hosts,
        auto_provision=network.auto_provision_host,
    )


def microvm_set(
    entry: ScalerEntry, label_set: LabelSet, environ: Mapping[str, str], defaults: Callable[[], ResourceRequest]
) -> MicroVmSet:
    kernel = Path(label_set.kernel_path or entry.kernel_path or "")
    initrd = kernel.with_name(kernel.name + INITRD_SUFFIX) if kernel.name else kernel
    env, left_out = guest_env(environ, label_set.env)
    if left_out:
        fields = {"scaler": entry.name, "label_set": list(label_set.labels), "names": list(left_out)}
        log.warning("vm.env_left_out", extra={"kici": fields})
    mode = label_set.backpressure_mode
    return MicroVmSet(
        labels=label_set.labels,
        kernel=kernel,
        initrd=initrd if kernel.name and initrd.exists() else None,
        rootfs=Path(label_set.rootfs_path or ""),
        overlay_mib=label_set.overlay_drive_size_mib,
        policy=policy_of(label_set.network_policy),
        env=env,
        backpressure=None if mode is None else mode.value,
        hardware=partial(entry.vm_size, label_set),
        snapshot_start=label_set.snapshot_start,
        declared=lambda: resolve(label_set.resources, defaults()).limits,
    )


def policy_of(policy: NetworkPolicy) -> Policy:
    return Policy(allowlist=policy.allowlist, deny_all=policy.deny_all, host_access=policy.host_access)


def readiness_problems(entry: ScalerEntry, *, url: str, system: str) -> list[str]:
    """What this host lacks whatever the VMM: a sentence each.  The VMM and the bridge say what they lack."""
    where = f"scaler {entry.name}"
    if system != "linux":
        return [f"{where}: microVMs need Linux"]
    problems = []
    tools = [package for tool, package in TOOLS.items() if shutil.which(tool, path=PATH) is None]
    if tools:
        problems.append(f"{where}: install {' '.join(sorted(tools))}")
    problem = url_problem(entry.orchestrator_url or url)
    if problem is not None:
        problems.append(f"{where}: {problem}")
    for path in _images(entry):
        if not os.access(path, os.R_OK):
            state = "may not be read by us" if Path(path).exists() else "is not there"
            problems.append(f"{where}: {path} {state}; `kici-admin firecracker rootfs` makes root file systems")
    base = next(each for each in (Path(entry.chroot_base_dir), *Path(entry.chroot_base_dir).parents) if each.exists())
    if not os.access(base, os.W_OK):
        problems.append(f"{where}: chrootBaseDir {entry.chroot_base_dir} cannot be written by us")
    return problems


def _images(entry: ScalerEntry) -> list[str]:
    wanted = [entry.kernel_path]
    for label_set in entry.label_sets:
        wanted += [label_set.kernel_path, label_set.rootfs_path]
    return sorted({path for path in wanted if path})
