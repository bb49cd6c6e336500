"""Where the agents of one user write down which containers they have made, for whoever clears up after them."""

import os
from pathlib import Path


def records_folder(tmp: str) -> Path:
    return Path(tmp) / f"kici-containers-{os.getuid()}"


def has_records(folder: Path) -> bool:
    """Whether any agent of this user has a container, or had one and died."""
    try:
        return bool(os.listdir(folder / "containers"))
    except OSError:
        return False
