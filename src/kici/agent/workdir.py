"""Work directories: a fresh one for each job, nothing left behind.

A job's directory holds `work` (where the step runs) and `tmp` (its TMPDIR).  It is made in a directory of the agent:
where the agent was started, if that place bears its name (a backend made it, and removes it), else in
`<tmp>/kici-work-<uid>/<agent>.<pid>/`.  There the agent holds a lock as long as it lives, however it ends; whoever
starts next collects directories without one.
"""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from kici.domain.errors import Permanent

LOCK: Final = ".lock"
DEAD_PREFIX: Final = ".dead-"
BATCH: Final = 64


class WorkRoot(Protocol):
    """Where one agent makes directories for jobs."""

    def new(self, *, owner: tuple[int, int] | None = None) -> Path:
        """An empty directory for a job, with `work` and `tmp` in it.  Raises `OSError`."""
        ...

    def stale(self) -> list[Path]:
        """Directories of agents that are gone, for the caller to remove."""
        ...

    def remove(self) -> Iterator[None]:
        """Remove everything of this agent, a little at each step."""
        ...


def work_root(tmp: str, agent_id: str, *, start: Path, shared: bool) -> WorkRoot:
    """The place for this agent.  `shared`: steps run as another user, who must be able to pass through it.

    Raises `Permanent` when it cannot be made.
    """
    return GivenRoot(start) if start.name == agent_id and not shared else TmpRoot(tmp, agent_id, shared=shared)


class GivenRoot:
    """A directory that somebody made for this agent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: list[Path] = []

    def new(self, *, owner: tuple[int, int] | None = None) -> Path:
        path = self._path / str(len(self._made) + 1)
        self._made.append(path)
        return _fresh(path, 0o700, owner)

    def stale(self) -> list[Path]:
        return []

    def remove(self) -> Iterator[None]:
        for path in self._made:
            yield from remove_tree(path)


class TmpRoot:
    """A directory in a place for temporary files, locked by this process."""

    def __init__(self, tmp: str, agent_id: str, *, shared: bool) -> None:
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
        self._count += 1
        return _fresh(self._path / str(self._count), self._mode, owner)

    def stale(self) -> list[Path]:
        with self._locked_base():
            for entry in self._base.iterdir():
                if entry != self._path and entry.is_dir() and not entry.name.startswith(DEAD_PREFIX):
                    self._set_apart_if_dead(entry)
            return [entry for entry in self._base.iterdir() if entry.name.startswith(DEAD_PREFIX)]

    def remove(self) -> Iterator[None]:
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


def _fresh(path: Path, mode: int, owner: tuple[int, int] | None) -> Path:
    path.mkdir(mode=mode)
    for name in ("work", "tmp"):
        (path / name).mkdir(mode=0o700)
        if owner is not None:
            os.chown(path / name, *owner)
    return path


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
