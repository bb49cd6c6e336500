"""Free space of the disk that a path is on, or will be."""

import shutil
from pathlib import Path

from kici.domain.errors import Retryable


def free_bytes(path: Path) -> int:
    """What this user may still write there; of the nearest folder that exists.  Raises `Retryable`."""
    existing = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    try:
        return shutil.disk_usage(existing).free
    except OSError as error:
        raise Retryable(f"free space of {existing} cannot be read: {error}") from error
