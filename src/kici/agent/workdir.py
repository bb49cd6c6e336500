"""Work directories: a fresh one for each job, nothing left behind.

`<tmp>/kici-work-<uid>/<agent>/<number>/` holds `work` (where the step runs) and `tmp` (its TMPDIR).  An agent holds
a lock in its directory as long as it lives, however it ends; whoever starts next collects directories without one.
"""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kici.domain.errors import Permanent

LOCK: Final = ".lock"
DEAD_PREFIX: Final = ".dead-"
BATCH: Final = 64


class WorkRoot:
    """The directory of one agent."""

    def __init__(self, tmp: str, agent_id: str, *, shared: bool) -> None:
        """Raises `Permanent` when it cannot be made.  `shared`: steps run as another user and pass through it."""
        name = "".join(char if char.isalnum() or char in "-_" else "-" for char in agent_id)[:40]
        self._base = Path(tmp) / f"kici-work-{os.getuid()}"
        self._path = self._base / f"{name}.{os.getpid()}"
        self._mode = 0o711 if shared else 0o700
        self._count = 0
        try:
            self._lock = self._make()
        except OSError as error:
            raise Permanent(f"cannot make the work directory {self._path}: {error}; set TMPDIR") from error

    def new(self, *, owner: tuple[int, int] | None = None) -> Path:
        """An empty directory for a job, with `work` and `tmp` in it.  Raises `OSError`."""
        self._count += 1
        path = self._path / str(self._count)
        path.mkdir(mode=self._mode)
        for name in ("work", "tmp"):
            (path / name).mkdir(mode=0o700)
            if owner is not None:
                os.chown(path / name, *owner)
        return path

    def stale(self) -> list[Path]:
        """Directories of agents that are gone, set apart so that nobody else collects them too."""
        with self._locked_base():
            for entry in self._base.iterdir():
                if entry != self._path and entry.is_dir() and not entry.name.startswith(DEAD_PREFIX):
                    self._set_apart_if_dead(entry)
            return [entry for entry in self._base.iterdir() if entry.name.startswith(DEAD_PREFIX)]

    def remove(self) -> Iterator[None]:
        """Remove the agent's own directory, a little at each step."""
        yield from remove_tree(self._path)
        os.close(self._lock)

    def _make(self) -> int:
        self._base.mkdir(mode=self._mode, parents=True, exist_ok=True)
        facts = self._base.lstat()
        if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
            raise PermissionError(f"{self._base} belongs to somebody else")
        self._base.chmod(self._mode)
        with self._locked_base():
            for _ in remove_tree(self._path):
                pass  # of an earlier process with our id and pid
            self._path.mkdir(mode=self._mode)
            lock = os.open(self._path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def _locked_base(self) -> "_Locked":
        return _Locked(self._base / LOCK)

    def _set_apart_if_dead(self, entry: Path) -> None:
        try:
            lock = os.open(entry / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            pass  # directories get their lock while the base is locked: this one lost it
        else:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            finally:
                os.close(lock)
        entry.rename(self._base / f"{DEAD_PREFIX}{entry.name}")


class _Locked:
    """A file lock as a block.  Held for renames only, never for removals."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def remove_tree(path: Path) -> Iterator[None]:
    """Remove a directory with everything in it, yielding after each batch.  What cannot be removed stays.

    Links are removed, never followed.  Directories that a job made read-only are opened first.
    """
    pending = [(path, False)]
    done = 0
    while pending:
        directory, is_empty = pending.pop()
        if is_empty:
            _quietly(directory.rmdir)
            continue
        pending.append((directory, True))
        for entry in _entries(directory):
            if entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), False))
            else:
                _quietly(Path(entry.path).unlink)
            done += 1
            if done % BATCH == 0:
                yield


def _entries(directory: Path) -> list["os.DirEntry[str]"]:
    _quietly(lambda: directory.chmod(0o700))
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _quietly(act: Callable[[], None]) -> None:
    try:
        act()
    except OSError:
        pass
