"""Control groups: limits on a program with all its children, and a way to end every one of them."""

from pathlib import Path
from typing import Protocol

from kici.decide.launch import CgroupPlan, CgroupSupport


class Cgroup(Protocol):
    """One group, which may be a directory in each of several hierarchies."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Its directories; what to remember in order to find it again."""
        ...

    @property
    def entries(self) -> tuple[Path, ...]:
        """Files through which a process enters."""
        ...

    def kill(self) -> bool:
        """KILL every member, however they fork.  Returns whether it was empty already."""
        ...

    def remove(self) -> bool:
        """Remove it.  Whether it is gone: a group with members cannot be removed."""
        ...


class Cgroups(Protocol):
    @property
    def support(self) -> CgroupSupport:
        """What this host lets us do; found out once."""
        ...

    def folders(self, name: str, plan: CgroupPlan) -> tuple[Path, ...]:
        """Where `create` will make it: what to remember before it is made."""
        ...

    def create(self, name: str, plan: CgroupPlan) -> Cgroup:
        """Make a group with these limits.  Raises `Retryable` when the host does not let us; then nothing is left."""
        ...

    def find(self, folders: tuple[Path, ...]) -> Cgroup:
        """A group made earlier, by this process or another.  Directories that are gone count as empty."""
        ...
