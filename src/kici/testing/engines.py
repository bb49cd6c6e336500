"""Real engines that tests need: which this machine has, and which it is required to have.

A test says `@pytest.mark.engine("postgres")`.  Where the engine is absent it is skipped with the reason, unless
`REQUIRE_ENGINES` (names with commas) lists it: then the run refuses to start.  The hooks are in `tests/conftest.py`.
"""

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

REQUIRE_ENGINES: Final = "REQUIRE_ENGINES"
POSTGRES_URL: Final = "KICI_TEST_POSTGRES_URL"
"""A PostgreSQL server on which tests may create databases, instead of one that they start themselves."""

_CGROUP: Final = Path("/sys/fs/cgroup")
_CONTROLLERS: Final = frozenset({"cpu", "memory", "pids"})


def postgres_bin() -> Path | None:
    """The folder that holds `initdb`, `pg_ctl` and `postgres`: on the path, else Debian's newest."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    return debian[-1].parent if debian else None


def _postgres() -> str | None:
    return (
        None
        if os.environ.get(POSTGRES_URL) or postgres_bin()
        else "no initdb on the path or in /usr/lib/postgresql; install postgresql"
    )


def _cgroups() -> str | None:
    version_1 = all(os.access(_CGROUP / name, os.W_OK) for name in _CONTROLLERS)
    unified = _CGROUP / "cgroup.controllers"
    version_2 = unified.exists() and set(unified.read_text().split()) >= _CONTROLLERS and os.access(_CGROUP, os.W_OK)
    return None if version_1 or version_2 else f"no writable cpu, memory and pids controllers below {_CGROUP}"


def _systemd() -> str | None:
    return None if Path("/run/systemd/system").exists() else "this machine was not booted with systemd"


_DOCKER_NEEDS: Final = {
    "dockerd": "docker.io",
    "containerd": "containerd",
    "nft": "nftables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "busybox": "busybox-static",
}


def _docker() -> str | None:
    """Tests start an engine of their own, in a network namespace of their own."""
    if os.geteuid() != 0:
        return "only root can start a Docker engine in a network namespace"
    return _absent(_DOCKER_NEEDS)


def _namespaces() -> str | None:
    """Tests put hosts into network namespaces, on a switch of their own."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    return _absent({"nft": "nftables", "ip": "iproute2", "nsenter": "util-linux"})


def _absent(needs: Mapping[str, str]) -> str | None:
    """What to install.  `needs`: programs and their packages."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [package for program, package in needs.items() if shutil.which(program, path=path) is None]
    return f"install {' '.join(sorted(set(absent)))}" if absent else None


_PODMAN_NEEDS: Final = {
    "podman": "podman",
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "busybox": "busybox-static",
}


def _podman() -> str | None:
    """Tests start one of their own, in namespaces of their own."""
    if os.geteuid() != 0:
        return "only root can start a Podman in a network namespace"
    return _absent(_PODMAN_NEEDS)


_VM_NETWORK_NEEDS: Final = {
    "nft": "nftables",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "mkfs.ext4": "e2fsprogs",
    "sysctl": "procps",
}


def _microvm_host(**more: str) -> str | None:
    """Tests make a host of microVMs in a network namespace of their own.  `more`: programs and their packages."""
    if os.geteuid() != 0:
        return "only root can make a host of microVMs in a network namespace"
    if (absent := _absent({**_VM_NETWORK_NEEDS, **more})) is not None:
        return absent
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


def _firecracker() -> str | None:
    """The programs themselves are fetched by the tests; the guest is compiled."""
    if platform.machine() != "x86_64":
        return f"the programs that tests fetch are for x86_64, not {platform.machine()}"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm is not there, or not for us"
    return _microvm_host(gcc="gcc")


def _qemu() -> str | None:
    """Kernel and root file system of the guest are made by the tests from Debian packages."""
    if platform.machine() != "x86_64":
        return f"the guest of the tests is for x86_64, not {platform.machine()}"
    more = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "dpkg-deb": "dpkg", "lz4": "lz4"}
    return _microvm_host(**more, strip="binutils")


def _registry() -> str | None:
    return _absent({"docker-registry": "docker-registry", "htpasswd": "apache2-utils"})


_PROBES: Final[dict[str, Callable[[], str | None]]] = {
    "cgroups": _cgroups,
    "docker": _docker,
    "firecracker": _firecracker,
    "namespaces": _namespaces,
    "podman": _podman,
    "postgres": _postgres,
    "registry": _registry,
    "qemu": _qemu,
    "systemd": _systemd,
}
ENGINES: Final = tuple(sorted(_PROBES))


@cache
def absence(name: str) -> str | None:
    """Why this machine cannot run tests that need `name`; None when it can.  Raises `LookupError` for no engine."""
    if name not in _PROBES:
        raise LookupError(f"no engine is called {name!r}; there are {', '.join(ENGINES)}")
    return _PROBES[name]()


def missing(required: str) -> list[str]:
    """One sentence for each name of a `REQUIRE_ENGINES` value that is absent here or unknown."""
    sentences = []
    for name in filter(None, (part.strip() for part in required.split(","))):
        try:
            reason = absence(name)
        except LookupError as error:
            reason = str(error)
        if reason is not None:
            sentences.append(f"engine {name} is required but absent: {reason}")
    return sentences
