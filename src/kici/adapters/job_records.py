"""Which containers of jobs this user's agents have made: a file each, locked by the process that answers for it.

A file is there before its container is, and goes after it, so whoever finds one without a holder knows what is left
and on which engine.  The same folder holds the locks that keep equal builds apart, and the runtime's archive.
"""

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kici.domain.errors import Permanent

CONTAINERS: Final = "containers"
LOCKS: Final = "locks"
MEMORY: Final = "memory"
RUNTIME: Final = "runtime"


class JobRecords:
    """One folder, of one user."""

    def __init__(self, folder: Path) -> None:
        """Raises `Permanent` when the folder cannot be made, or is somebody else's."""
        self.folder = folder
        try:
            for path in (folder, folder / CONTAINERS, folder / LOCKS, folder / MEMORY):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.lstat()
            if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o022:
                raise PermissionError("it belongs to somebody else, or others may write to it")
        except OSError as error:
            raise Permanent(f"cannot keep records of containers in {folder}: {error}; set TMPDIR") from error

    @property
    def runtime(self) -> Path:
        return self.folder / RUNTIME

    @contextmanager
    def held(self, container: str, engine: str) -> Iterator[None]:
        """Answer for a container as long as the block runs, and until somebody forgets it."""
        path = self.folder / CONTAINERS / container
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, engine.encode())  # an empty one is not yet anybody's
            yield
        finally:
            os.close(handle)

    @contextmanager
    def stale(self) -> Iterator[list[tuple[str, str]]]:
        """Containers that nobody answers for, with their engines.  They are ours until the block ends."""
        handles: list[int] = []
        found = []
        try:
            for path in sorted((self.folder / CONTAINERS).iterdir()):
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                handles.append(handle)
                if _locks(handle) and (engine := os.read(handle, 4096).decode()):
                    found.append((path.name, engine))
            yield found
        finally:
            for handle in handles:
                os.close(handle)

    def forget(self, container: str) -> None:
        (self.folder / CONTAINERS / container).unlink(missing_ok=True)

    def recall(self, key: str) -> bytes | None:
        try:
            return self._memory(key).read_bytes()
        except OSError:
            return None

    def remember(self, key: str, value: bytes | None) -> None:
        path = self._memory(key)
        with suppress(OSError):
            if value is None:
                path.unlink(missing_ok=True)
                return
            handle, draft = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(value)
            os.replace(draft, path)

    def _memory(self, key: str) -> Path:
        return self.folder / MEMORY / hashlib.sha256(key.encode()).hexdigest()[:32]

    def take(self, name: str) -> int | None:
        """A lock that ends with its handle, or with this process; None: another process has it."""
        handle = os.open(self.folder / LOCKS / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if _locks(handle):
            os.utime(handle)
            return handle
        os.close(handle)
        return None

    def drop_old_locks(self, *, older_than_hours: int) -> None:
        before = time.time() - older_than_hours * 3600
        for path in (self.folder / LOCKS).iterdir():
            with suppress(OSError):
                if path.stat().st_mtime < before and (handle := self.take(path.name)) is not None:
                    path.unlink()
                    os.close(handle)


def _locks(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
