"""Files of microVMs on this host: links, copies, folders, owners.  Contract: `ports.drives.Drives`.

Images are linked, not copied, where the machine's user may read them anyway; their owner and mode are never changed,
since a link and its source are one file.
"""

import asyncio
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kici.adapters.block_copy import copy_sparse, dig_holes
from kici.adapters.block_templates import FOLDER, OverlayTemplates
from kici.adapters.disk import free_bytes
from kici.adapters.host_commands import HostCommands
from kici.decide.microvm_snapshot import FOLDER as SNAPSHOTS
from kici.domain.errors import Conflict, DeterministicRefusal, Retryable
from kici.domain.ids import Instant
from kici.kit.finish import finish

BRING_SECONDS: Final = 120.0
REMOVE_SECONDS: Final = 60.0
PRIVATE: Final = 0o700


class HostDrives:
    def __init__(self, base: Path, commands: HostCommands) -> None:
        self._base = base
        self._commands = commands
        self._templates = OverlayTemplates(base, commands)

    async def prewarm(self, size_mib: int) -> None:
        await self._templates.ensure(size_mib)

    async def make_overlay(self, target: Path, size_mib: int, *, owner: tuple[int, int] | None) -> None:
        await self._templates.create(target, size_mib)
        await self._give(target, owner)

    async def bring(self, source: Path, target: Path, *, reader: int | None) -> None:
        if _may_read(_image(source), reader) and _link(source, target):
            return
        await self._in_thread(lambda: copy_sparse(source, target), f"the copy of {source}")
        await self._give(target, None if reader is None else (reader, -1))

    def identity(self, path: Path) -> str:
        found = _image(path)
        return f"{path}:{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"

    async def keep(self, source: Path, target: Path, *, root: Path) -> None:
        if self._commands.sudo:
            await self.open_up(root)
            await self._commands.run("chown", f"{os.getuid()}:{os.getgid()}", str(source))
        _keep(source, target)
        await self._in_thread(lambda: _settle(target), f"keeping {target}")

    async def copy(self, source: Path, target: Path, *, owner: tuple[int, int] | None) -> None:
        await self._in_thread(lambda: copy_sparse(source, target), f"the copy of {source}")
        await self._give(target, owner)

    def rename(self, folder: Path, target: Path) -> None:
        try:
            folder.rename(target)
        except OSError as error:
            raise Retryable(f"cannot rename {folder} to {target}: {error.strerror}") from error

    def touch(self, folder: Path) -> None:
        with suppress(FileNotFoundError):
            os.utime(folder)

    async def discard(self) -> int:
        templates = _entries(self._base / FOLDER)
        snapshots = [each for owner in _entries(self._base / SNAPSHOTS) for each in _entries(owner)]
        for folder in (self._base / FOLDER, self._base / SNAPSHOTS):
            await self.remove(folder)
        return len(templates) + len(snapshots)

    def free_bytes(self, path: Path) -> int:
        return free_bytes(path)

    async def make_folder(self, path: Path) -> None:
        _make_folder(path)

    async def make_file(self, path: Path, *, owner: tuple[int, int] | None) -> None:
        _make_file(path)
        await self._give(path, owner)

    async def open_up(self, root: Path) -> None:
        if self._commands.sudo:
            await self._commands.run("chmod", "-R", "go+rwX", str(root))

    async def remove(self, folder: Path) -> None:
        if self._commands.sudo and _exists(folder):
            await self._commands.run("chown", "-R", f"{os.getuid()}:{os.getgid()}", str(folder), seconds=REMOVE_SECONDS)
        await self._in_thread(lambda: _remove_tree(folder), f"the removal of {folder}")

    def folders(self, base: Path) -> dict[str, Instant]:
        found: dict[str, Instant] = {}
        try:
            for entry in os.scandir(base):
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    found[entry.name] = Instant(int(entry.stat(follow_symlinks=False).st_mtime * 1000))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise Retryable(f"cannot list {base}: {error.strerror}") from error
        return found

    async def _give(self, path: Path, owner: tuple[int, int] | None) -> None:
        if owner is None or owner[0] == os.geteuid():
            return
        if self._commands.sudo:
            group = "" if owner[1] < 0 else f":{owner[1]}"
            await self._commands.run("chown", f"{owner[0]}{group}", str(path))
            return
        try:
            os.chown(path, *owner)
        except OSError as error:
            raise DeterministicRefusal(
                f"cannot give {path} to user {owner[0]}: {error.strerror}; run as root, with CAP_CHOWN, "
                "or with requireSudo: true"
            ) from error

    async def _in_thread(self, work: Callable[[], object], what: str) -> None:
        try:
            await finish(asyncio.to_thread(work), seconds=BRING_SECONDS, what=what)
        except OSError as error:
            raise Retryable(f"{what} failed: {error.strerror or error}") from error


def _image(source: Path) -> os.stat_result:
    try:
        found = source.stat()
    except OSError as error:
        raise DeterministicRefusal(f"{source} cannot be read: {error.strerror}; mend the path or the file") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size == 0:
        raise DeterministicRefusal(f"{source} is no file with content; a kernel or an image is expected")
    return found


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source.resolve(), target)  # a symbolic link would point to nowhere in a machine's own root
    except OSError:  # another file system, or somebody else's file: a copy will do
        return False
    return True


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _keep(source: Path, target: Path) -> None:
    try:
        os.chown(source, os.getuid(), os.getgid())
        source.chmod(0o600)
        source.rename(target)
    except OSError as error:
        raise DeterministicRefusal(f"cannot move {source} to {target}: {error.strerror}") from error


def _settle(path: Path) -> None:
    dig_holes(path)  # memory of a guest is mostly empty
    path.chmod(0o444)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE)
    except FileExistsError as error:
        raise Conflict(f"folder {path} is there already, and not ours") from error
    except OSError as error:
        raise Retryable(f"cannot make folder {path}: {error.strerror}") from error


def _make_file(path: Path) -> None:
    try:
        path.touch(mode=0o600)
    except OSError as error:
        raise Retryable(f"cannot make file {path}: {error.strerror}") from error


def _may_read(found: os.stat_result, reader: int | None) -> bool:
    if reader is None or reader == 0:
        return True
    return bool(found.st_mode & stat.S_IROTH) or (found.st_uid == reader and bool(found.st_mode & stat.S_IRUSR))


def _remove_tree(folder: Path) -> None:
    """A folder in which something appears meanwhile is looked at again."""
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    shutil.rmtree(folder)
