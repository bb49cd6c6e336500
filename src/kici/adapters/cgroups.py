"""Control groups of Linux, made below our own group: both the old hierarchies and the unified one.

Staying below our own group keeps whatever limits the coordinator itself is under.  Where systemd runs, a tree
that it did not delegate to us is left alone.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kici.adapters import proc
from kici.decide.launch import CgroupPlan, CgroupSetting, CgroupSupport, LimitsBy
from kici.domain.errors import Retryable
from kici.ports.cgroups import Cgroup

SYSTEMD: Final = Path("/run/systemd/system")
FOLDER: Final = "kici"
"""Our groups lie in this one, below the group that we run in."""
_NEEDED: Final = ("cpu", "memory")
_CONTROLLERS: Final = " ".join(f"+{name}" for name in (*_NEEDED, "pids"))
_HIERARCHIES: Final = ("", "freezer", *_NEEDED, "pids")
_ENTRY: Final = "cgroup.procs"


class LinuxCgroup:
    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)

    @property
    def folders(self) -> tuple[Path, ...]:
        return self._folders

    @property
    def entries(self) -> tuple[Path, ...]:
        return tuple(folder / _ENTRY for folder in self._folders)

    def kill(self) -> bool:
        empty = True
        for folder in self._folders:
            with suppress(OSError):
                (folder / "cgroup.kill").write_text("1")
            empty = _kill_members(folder) and empty
        return empty

    def remove(self) -> bool:
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()  # only when this was the last group in it
        return not any(folder.exists() for folder in self._folders)


class LinuxCgroups:
    """`root` and `own` are given by tests; `own` maps a controller ("" for the unified hierarchy) to our folder."""

    def __init__(self, *, root: Path = Path("/sys/fs/cgroup"), own: dict[str, Path] | None = None) -> None:
        self._own = own_folders(root) if own is None else own
        self._support = _probe(self._own)

    @property
    def support(self) -> CgroupSupport:
        return self._support

    def folders(self, name: str, plan: CgroupPlan) -> tuple[Path, ...]:
        return tuple(self._folders(name, plan).values())

    def create(self, name: str, plan: CgroupPlan) -> Cgroup:
        folders = self._folders(name, plan)
        group = LinuxCgroup(tuple(folders.values()))
        try:
            for key, folder in folders.items():
                folder.parent.mkdir(exist_ok=True)
                if key == "" and self._support.limits is LimitsBy.V2:
                    (folder.parent / "cgroup.subtree_control").write_text(_CONTROLLERS)
                folder.mkdir(exist_ok=True)
            for setting in plan.settings:
                _apply(folders, setting)
        except OSError as error:
            group.remove()
            raise Retryable(f"cannot make control group {name}: {error.filename}: {error.strerror}") from error
        return group

    def find(self, folders: tuple[Path, ...]) -> Cgroup:
        return LinuxCgroup(folders)

    def _folders(self, name: str, plan: CgroupPlan) -> dict[str, Path]:
        controllers = {"", "freezer"} | {setting.controller for setting in plan.settings}
        return {key: self._own[key] / FOLDER / name for key in sorted(controllers) if key in self._own}


class NoCgroups:
    """A host without control groups."""

    @property
    def support(self) -> CgroupSupport:
        return CgroupSupport(problem="this system has no control groups")

    def folders(self, name: str, plan: CgroupPlan) -> tuple[Path, ...]:
        return ()

    def create(self, name: str, plan: CgroupPlan) -> Cgroup:
        raise Retryable(f"cannot make control group {name}: this system has none")

    def find(self, folders: tuple[Path, ...]) -> Cgroup:
        return LinuxCgroup(folders)


def own_folders(root: Path, membership: str | None = None) -> dict[str, Path]:
    """Our own group in each hierarchy that is mounted below `root`, by controller."""
    if membership is None:
        membership = Path("/proc/self/cgroup").read_text()
    found: dict[str, Path] = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in sorted(set(controllers.split(",")) & set(_HIERARCHIES)):
            for base in (root, root / "unified") if controller == "" else (root / controllers, root / controller):
                folder = base / path.lstrip("/")
                if (folder / _ENTRY).exists() and (controller or (folder / "cgroup.controllers").exists()):
                    found.setdefault(controller, folder)
    return found


def _probe(own: dict[str, Path]) -> CgroupSupport:
    if SYSTEMD.exists() and not _is_delegated(own.get("")):
        return CgroupSupport(problem="systemd has not delegated a control group to us (Delegate=yes)")
    usable = {key for key, folder in own.items() if _can_make(folder)}
    unified = own.get("")
    if "" in usable and unified is not None and _enable(unified):
        return CgroupSupport(tracking=True, limits=LimitsBy.V2)
    if usable.issuperset(_NEEDED):
        return CgroupSupport(tracking=True, limits=LimitsBy.V1)
    problem = "no control group with cpu and memory controllers that we may write to"
    return CgroupSupport(tracking=bool({"", "freezer"} & usable), problem=problem)


def _is_delegated(folder: Path | None) -> bool:
    if folder is None:
        return False
    with suppress(OSError):
        return os.getxattr(folder, "user.delegate") == b"1"
    return False


def _can_make(folder: Path) -> bool:
    ours = folder / FOLDER
    try:
        ours.mkdir(exist_ok=True)
    except OSError:
        return False
    is_writable = os.access(ours, os.W_OK | os.X_OK) and os.access(folder / _ENTRY, os.W_OK)
    with suppress(OSError):
        ours.rmdir()
    return is_writable


def _enable(unified: Path) -> bool:
    """Turn the controllers on for our groups.  Whether they are.

    A group with processes in it cannot pass controllers on, so we ourselves move into a leaf first.
    """
    try:
        if not set(_NEEDED) <= set((unified / "cgroup.controllers").read_text().split()):
            return False
        with suppress(OSError):
            (unified / "cgroup.subtree_control").write_text(_CONTROLLERS)
        if not set(_NEEDED) <= set((unified / "cgroup.subtree_control").read_text().split()):
            leaf = unified / f"{FOLDER}-coordinator"
            leaf.mkdir(exist_ok=True)
            (leaf / _ENTRY).write_text(str(os.getpid()))
            (unified / "cgroup.subtree_control").write_text(_CONTROLLERS)
    except OSError:
        return False
    return True


def _apply(folders: dict[str, Path], setting: CgroupSetting) -> None:
    folder = folders.get(setting.controller)
    try:
        if folder is None:
            raise OSError(f"no {setting.controller} hierarchy")
        (folder / setting.file).write_text(setting.value)
    except OSError:
        if setting.required:
            raise


def _kill_members(folder: Path) -> bool:
    """KILL the members one by one, for hierarchies without `cgroup.kill`.  Whether there were none.

    They are frozen meanwhile where that is possible, so that none forks away.
    """
    try:
        pids = [int(word) for word in (folder / _ENTRY).read_text().split()]
    except OSError:
        return True
    if not pids:
        return True
    with suppress(OSError):
        (folder / "freezer.state").write_text("FROZEN")
    for pid in pids:
        _kill_member(folder, pid)
    with suppress(OSError):
        (folder / "freezer.state").write_text("THAWED")
    return False


def _kill_member(folder: Path, pid: int) -> None:
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            # Still a member, now that the pidfd holds it: then it is nobody else's pid.
            if str(pid) in (folder / _ENTRY).read_text().split() and proc.look(pid) is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
