"""Formatted drives by copying one that was formatted before.

Formatting takes as long as the disk is busy; copying a drive that is all holes does not.  One template for each size
lies in a hidden folder beside the machines, and is made by the first who needs it.
"""

import asyncio
import os
import struct
from pathlib import Path
from typing import Final

from kici.adapters.block_copy import copy_sparse
from kici.adapters.host_commands import HostCommands
from kici.domain.errors import KiciError, Retryable
from kici.kit.finish import finish

FOLDER: Final = ".overlay-templates"
MKFS_SECONDS: Final = 300.0
COPY_SECONDS: Final = 30.0
MIB: Final = 1024 * 1024
_MAGIC: Final = 0xEF53
_MAGIC_AT: Final = 1080
_MKFS: Final = ("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard")
"""No journal: a drive dies with its machine, and a journal is zeros to write before anything is."""


class OverlayTemplates:
    """Drives below one base folder."""

    def __init__(self, base: Path, commands: HostCommands) -> None:
        self._folder = base / FOLDER
        self._commands = commands
        self._builds: dict[int, asyncio.Task[Path]] = {}
        """Under way, by size: those who need the same one wait for one build."""

    def path(self, size_mib: int) -> Path:
        return self._folder / f"overlay-{size_mib}mib.ext4"

    async def ensure(self, size_mib: int) -> Path:
        """A sound template of this size, made if there is none.  Raises `Retryable`."""
        if is_template(self.path(size_mib), size_mib):
            return self.path(size_mib)
        build = self._builds.get(size_mib)
        if build is None:
            # Not in a group: whoever asked first may be called off, and others wait for the same build.
            build = asyncio.create_task(self._build(size_mib), name=f"overlay template {size_mib} MiB")
            self._builds[size_mib] = build
            build.add_done_callback(lambda _: self._builds.pop(size_mib, None))
        await asyncio.wait({build})
        return build.result()

    async def create(self, target: Path, size_mib: int) -> None:
        """A new drive.  Raises `Retryable`."""
        template = await self.ensure(size_mib)
        try:
            await finish(
                asyncio.to_thread(copy_sparse, template, target), seconds=COPY_SECONDS, what=f"the copy to {target}"
            )
        except OSError as error:  # a TimeoutError is one
            raise Retryable(f"cannot make drive {target} from {template}: {error.strerror or error}") from error

    async def _build(self, size_mib: int) -> Path:
        path = self.path(size_mib)
        beside = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            beside.unlink(missing_ok=True)
            with beside.open("xb") as file:
                file.truncate(size_mib * MIB)
            await self._commands.run(*_MKFS, str(beside), seconds=MKFS_SECONDS)
            if not is_template(beside, size_mib):
                raise Retryable(f"mkfs.ext4 made no file system of {size_mib} MiB in {beside}")
            beside.replace(path)
        except OSError as error:
            raise Retryable(f"cannot make drive template {path}: {error.strerror or error}") from error
        except KiciError as error:
            raise Retryable(f"cannot make drive template {path}: {error}") from error
        finally:
            beside.unlink(missing_ok=True)
        return path


def is_template(path: Path, size_mib: int) -> bool:
    """Whether a file is a whole ext4 drive of this size."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size_mib * MIB:
                return False
            magic = os.pread(file.fileno(), 2, _MAGIC_AT)
    except OSError:
        return False
    return len(magic) == 2 and bool(struct.unpack("<H", magic)[0] == _MAGIC)
