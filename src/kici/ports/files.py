"""Small files of the data directory: records, and output that programs append to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """Everything here is small and quick, except `remove_folder`.  `OSError` is translated to `Retryable`."""

    def make_folder(self, path: Path) -> None:
        """Make a folder (0700) and its parents; one that exists is left as it is."""
        ...

    def read(self, path: Path) -> bytes | None:
        """The whole file; None when there is none."""
        ...

    def write(self, path: Path, data: bytes) -> None:
        """Replace the file (0600) in one step: readers see the old or the new content."""
        ...

    def names(self, folder: Path) -> Sequence[str]:
        """Sorted names in a folder; empty when there is none."""
        ...

    def size(self, path: Path) -> int:
        """Bytes; 0 when there is no such file."""
        ...

    def read_from(self, path: Path, offset: int, bytes_max: int) -> bytes:
        """At most `bytes_max` bytes from `offset`; empty when there is nothing (yet)."""
        ...

    def truncate(self, path: Path) -> None:
        """Empty a file that others append to.  No such file: no-op."""
        ...

    def remove(self, path: Path) -> None:
        """No such file: no-op."""
        ...

    async def remove_folder(self, path: Path) -> None:
        """Remove a folder with everything in it, however long that takes.  No such folder: no-op."""
        ...
