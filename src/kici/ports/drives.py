"""Files that a microVM is made of: read-only images that many share, and a drive of its own to write on."""

from pathlib import Path
from typing import Protocol

from kici.domain.ids import Instant


class Drives(Protocol):
    """Raises `Retryable` (disk full, I/O) or `DeterministicRefusal` (a source is not there, no way to make a drive)."""

    async def prewarm(self, size_mib: int) -> None:
        """Make the template of this size, unless a sound one is there."""
        ...

    async def make_overlay(self, target: Path, size_mib: int, *, owner: tuple[int, int] | None) -> None:
        """A formatted drive of this size that takes no room until it is written on.  `owner`: uid and gid."""
        ...

    async def bring(self, source: Path, target: Path, *, reader: int | None) -> None:
        """Have a read-only file at another place, which `reader` (a uid) can read: a link where that will do.

        The source, its owner and its mode are not changed.
        """
        ...

    async def make_folder(self, path: Path) -> None:
        """With its parents; nobody but us can look into the last one.  Raises `Conflict` when it is there already."""
        ...

    async def make_file(self, path: Path, *, owner: tuple[int, int] | None) -> None:
        """An empty one."""
        ...

    async def open_up(self, root: Path) -> None:
        """Let us into folders below `root` that another user made for itself.  Only with sudo is that needed."""
        ...

    async def remove(self, folder: Path) -> None:
        """With everything in it, whoever owns that.  None there: no-op."""
        ...

    def identity(self, path: Path) -> str:
        """Which file this is, and when it was written."""
        ...

    async def keep(self, source: Path, target: Path, *, root: Path) -> None:
        """Move what a machine's user wrote below its root to a folder of ours: nobody writes on it any more."""
        ...

    async def copy(self, source: Path, target: Path, *, owner: tuple[int, int] | None) -> None:
        """A drive like another, which takes room only where that was written on."""
        ...

    def rename(self, folder: Path, target: Path) -> None: ...

    def touch(self, folder: Path) -> None:
        """Say that it is in use.  None there: no-op."""
        ...

    async def discard(self) -> int:
        """Remove what can be made again, templates and snapshots, of everybody who shares this base.  How many."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Of the disk that a path is on, or will be."""
        ...

    def folders(self, base: Path) -> dict[str, Instant]:
        """Names of folders below a base that are not hidden, and when each was last changed."""
        ...
