"""A folder in memory, for tests on virtual time."""

from collections.abc import Sequence
from pathlib import Path


class FakeFiles:
    def __init__(self) -> None:
        self.contents: dict[Path, bytes] = {}
        self.folders: set[Path] = set()

    def append(self, path: Path, data: bytes) -> None:
        """What a program does with its output file."""
        self.contents[path] = self.contents.get(path, b"") + data

    def make_folder(self, path: Path) -> None:
        self.folders |= {path, *path.parents}

    def read(self, path: Path) -> bytes | None:
        return self.contents.get(path)

    def write(self, path: Path, data: bytes) -> None:
        self.contents[path] = data

    def names(self, folder: Path) -> Sequence[str]:
        return sorted(path.name for path in self.contents if path.parent == folder)

    def size(self, path: Path) -> int:
        return len(self.contents.get(path, b""))

    def read_from(self, path: Path, offset: int, bytes_max: int) -> bytes:
        return self.contents.get(path, b"")[offset : offset + bytes_max]

    def truncate(self, path: Path) -> None:
        if path in self.contents:
            self.contents[path] = b""

    def remove(self, path: Path) -> None:
        self.contents.pop(path, None)

    async def remove_folder(self, path: Path) -> None:
        self.folders = {folder for folder in self.folders if folder != path and path not in folder.parents}
        self.contents = {name: data for name, data in self.contents.items() if path not in name.parents}
