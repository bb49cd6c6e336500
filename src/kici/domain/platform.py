"""Platforms, the taints that they imply, and the gate of a label set."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Os(StrEnum):
    LINUX = "linux"
    MACOS = "macos"
    WINDOWS = "windows"


class Arch(StrEnum):
    X64 = "x64"
    ARM64 = "arm64"


@dataclass(frozen=True, slots=True)
class Platform:
    os: Os
    arch: Arch


_OS: Final = {"linux": Os.LINUX, "darwin": Os.MACOS, "win32": Os.WINDOWS}
_ARCH: Final = {
    "x86_64": Arch.X64,
    "amd64": Arch.X64,
    "x64": Arch.X64,
    "aarch64": Arch.ARM64,
    "arm64": Arch.ARM64,
}


@dataclass(frozen=True, slots=True)
class Host:
    """The machine we run on, in the raw words of `sys.platform` and `platform.machine()`."""

    system: str
    machine: str

    @property
    def platform(self) -> Platform | None:
        """None for a host that no declared platform describes."""
        os, arch = _OS.get(self.system), _ARCH.get(self.machine.lower())
        return None if os is None or arch is None else Platform(os, arch)

    @property
    def words(self) -> tuple[str, str]:
        """System and processor as people name them in labels; what nobody declared keeps its raw name."""
        machine = self.machine.lower()
        return str(_OS.get(self.system, self.system)), str(_ARCH.get(machine, machine))


_OS_LABELS: Final = {
    "linux": ("kici:os:linux",),
    "macos": ("kici:os:macos", "kici:os:darwin"),
    "darwin": ("kici:os:macos", "kici:os:darwin"),
    "windows": ("kici:os:windows", "kici:os:win32"),
    "win32": ("kici:os:windows", "kici:os:win32"),
}
_ARCH_LABELS: Final = {
    "x64": ("kici:arch:x64", "kici:arch:amd64"),
    "x86_64": ("kici:arch:x64", "kici:arch:amd64"),
    "amd64": ("kici:arch:x64", "kici:arch:amd64"),
    "arm64": ("kici:arch:arm64",),
    "aarch64": ("kici:arch:arm64",),
}
PLAIN_PLATFORM_LABELS: Final = frozenset({"windows", "win32", "macos", "darwin", "arm64", "aarch64", "arm"})
"""Labels that mean a platform when an operator writes them by hand."""


def os_arch_labels(system: str, machine: str) -> tuple[str, ...]:
    """Automatic `kici:os:` and `kici:arch:` labels of a platform pair, known or raw."""
    return _OS_LABELS.get(system, (f"kici:os:{system}",)) + _ARCH_LABELS.get(
        machine.lower(), (f"kici:arch:{machine.lower()}",)
    )


def structured_taints(platform: Platform | None) -> tuple[str, ...]:
    """Tokens that jobs must name to land on this platform: none for linux and x64."""
    if platform is None:
        return ()
    os = (platform.os.value,) if platform.os is not Os.LINUX else ()
    arch = (platform.arch.value,) if platform.arch is not Arch.X64 else ()
    return os + arch


def plain_taints(declared_labels: Iterable[str]) -> tuple[str, ...]:
    """Taints that the declared labels of one set imply by themselves, in their order."""
    found = (label.strip().lower() for label in declared_labels)
    return tuple(dict.fromkeys(label for label in found if label in PLAIN_PLATFORM_LABELS))


def gate_of(
    mandatory_labels: Iterable[str], platform: Platform | None, declared_labels: Iterable[str]
) -> frozenset[str]:
    """Labels that a job must name to use this label set.

    Reads the declared labels only: an injected taint or os label must not become a second taint.
    """
    return frozenset(mandatory_labels) | set(structured_taints(platform)) | set(plain_taints(declared_labels))
