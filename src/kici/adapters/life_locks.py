"""Files that say who lives: held by an exclusive `flock`, free when everybody who had them open is gone.

The lock belongs to the open file, not to a process: a child that inherits the descriptor holds it together with
its parent and goes on holding it alone.  The kernel lets go of it however the last of them ends, and it knows
no borders of PID namespaces, so a look from inside a container tells as much as one from the host.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

RETRY_SECONDS_MIN: Final = 0.001
RETRY_SECONDS_MAX: Final = 0.02
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE: Final = 0o644
"""Whoever shares the folder may look, whatever our umask."""


def hold(path: Path, *, seconds: float) -> int | None:
    """Make the file and hold it; the descriptor, closed on exec.  None: somebody else held it all the time."""
    while True:
        descriptor = lock(path, seconds=seconds)
        if descriptor is None or _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # somebody removed it before we had it


def lock(path: Path, *, seconds: float) -> int | None:
    """As `hold`, for a file that nobody ever removes."""
    descriptor = os.open(path, _FLAGS | os.O_CREAT, _MODE)
    try:
        with suppress(PermissionError):  # it is another user's
            os.fchmod(descriptor, _MODE)
        ends_at, delay = time.monotonic() + seconds, RETRY_SECONDS_MIN
        while not _takes(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= ends_at:
                os.close(descriptor)
                return None
            time.sleep(delay)
            delay = min(2 * delay, RETRY_SECONDS_MAX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return False
    try:
        return not _takes(descriptor, fcntl.LOCK_SH)  # shared: two that look do not see each other
    finally:
        os.close(descriptor)


def remove_unheld(folder: Path) -> None:
    """Remove every file that nobody holds.  Whoever is about to hold one notices, and makes it anew."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            descriptor = os.open(path, _FLAGS)
            try:
                if _takes(descriptor, fcntl.LOCK_EX):
                    path.unlink()
            finally:
                os.close(descriptor)


def _takes(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
