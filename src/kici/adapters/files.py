"""The real file system."""

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kici.domain.errors import Retryable


class RealFiles:
    def make_folder(self, path: Path) -> None:
        with _translated("make folder", path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, path: Path) -> bytes | None:
        with _translated("read", path), suppress(FileNotFoundError, NotADirectoryError):
            return path.read_bytes()
        return None

    def write(self, path: Path, data: bytes) -> None:
        beside = path.with_name(f".{path.name}.new")
        with _translated("write", path):
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            beside.replace(path)

    def names(self, folder: Path) -> Sequence[str]:
        with _translated("list", folder), suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(folder))
        return []

    def size(self, path: Path) -> int:
        with _translated("look at", path), suppress(FileNotFoundError):
            return path.stat().st_size
        return 0

    def read_from(self, path: Path, offset: int, bytes_max: int) -> bytes:
        with _translated("read", path), suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(offset)
            return file.read(bytes_max)
        return b""

    def truncate(self, path: Path) -> None:
        with _translated("truncate", path), suppress(FileNotFoundError):
            os.truncate(path, 0)

    def remove(self, path: Path) -> None:
        with _translated("remove", path):
            path.unlink(missing_ok=True)

    async def remove_folder(self, path: Path) -> None:
        with _translated("remove folder", path):
            await asyncio.to_thread(_remove_tree, path)


def _remove_tree(path: Path) -> None:
    """Like `rmtree`, but a folder that its owner made unwritable is made writable first."""

    def retry(_function: object, name: str, _info: object) -> None:
        parent = Path(name).parent
        with suppress(OSError):
            parent.chmod(0o700)
            Path(name).chmod(0o700)
        if Path(name).is_dir() and not Path(name).is_symlink():
            shutil.rmtree(name, ignore_errors=True)
        else:
            Path(name).unlink(missing_ok=True)

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=retry)


@contextmanager
def _translated(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Retryable(f"cannot {verb} {path}: {error.strerror or error}") from error
