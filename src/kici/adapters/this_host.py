"""The machine that we run on, in the terms that decisions about launching need."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from kici.adapters.cgroups import LinuxCgroups, NoCgroups
from kici.adapters.processes import LinuxProcesses
from kici.adapters.processes_portable import PortableProcesses
from kici.decide.launch import CgroupSupport, LaunchHost, Systemd, systemd_of
from kici.ports.cgroups import Cgroups
from kici.ports.processes import Processes


def this_processes() -> Processes:
    return LinuxProcesses() if sys.platform == "linux" else PortableProcesses()


def this_cgroups() -> Cgroups:
    return LinuxCgroups() if sys.platform == "linux" else NoCgroups()


def launch_host(environment: Mapping[str, str], support: CgroupSupport) -> LaunchHost:
    """`environment` is the coordinator's own."""
    return LaunchHost(
        system=sys.platform,
        environment=environment,
        python=sys.executable,
        program_folder=str(Path(sys.executable).parent),
        systemd=_systemd(environment),
        cgroups=support,
    )


def _systemd(environment: Mapping[str, str]) -> Systemd:
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return systemd_of(
        is_booted=Path("/run/systemd/system").is_dir(),
        has_user_manager=bool(runtime) and Path(runtime, "systemd", "private").exists(),
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
    )


def resolvers() -> list[str]:
    """The name servers of this machine, as programs find them."""
    try:
        lines = Path("/etc/resolv.conf").read_text(errors="replace").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [each[1] for each in words if len(each) >= 2 and each[0] == "nameserver"]


def port_of(pid: int) -> str | None:
    """The interface of this host that is the other end of a container's `eth0`; None: it cannot be told.

    `pid` is a process of the container.  Its root must be ours to look into, and its network one hop away.
    """
    try:
        index = int(Path(f"/proc/{pid}/root/sys/class/net/eth0/iflink").read_text())
        return socket.if_indextoname(index)
    except (OSError, ValueError):
        return None
