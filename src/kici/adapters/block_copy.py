"""Copies of drive images that take no room and no time where the file system allows it."""

import ctypes
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_FICLONE: Final = 0x40049409
_CHUNK: Final = 16 * 1024 * 1024
_HOLE: Final = 64 * 1024
_ZEROS: Final = bytes(_HOLE)
_PUNCH_AND_KEEP_SIZE: Final = 0x03
_libc: Final = ctypes.CDLL(None, use_errno=True)
_NOT_HERE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS})


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file: shared blocks where the file system has them, else only what is not a hole.

    Blocking.  Whole or not at all: a failed copy is removed.  Raises `OSError`.
    """
    try:
        with source.open("rb") as reader, open(target, "xb", opener=_private) as writer:
            if not _share(reader.fileno(), writer.fileno()):
                _copy_data(reader.fileno(), writer.fileno())
    except FileExistsError:
        raise
    except OSError:
        with suppress(OSError):
            target.unlink()
        raise


def dig_holes(path: Path) -> None:
    """Give back the room of whatever in a file is zero; it reads as before.  Blocking.  Raises `OSError`.

    Where the file system cannot, nothing happens.
    """
    with path.open("r+b", buffering=0) as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while at < size:
            chunk = os.pread(file.fileno(), _CHUNK, at)
            if not chunk:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            for start in range(0, len(chunk), _HOLE):
                block = chunk[start : start + _HOLE]
                if block == _ZEROS[: len(block)] and not _punch(file.fileno(), at + start, len(block)):
                    return
            at += len(chunk)


def _punch(file: int, offset: int, count: int) -> bool:
    """False: this file system has no such thing."""
    if _libc.fallocate(file, _PUNCH_AND_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(count)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code))


def _private(path: str, flags: int) -> int:
    """A copy is for whom it is given to, whoever may read its source."""
    return os.open(path, flags, 0o600)


def _share(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return False
        raise
    return True


def _copy_data(reader: int, writer: int) -> None:
    size = os.fstat(reader).st_size
    os.ftruncate(writer, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(reader, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(reader, at, os.SEEK_HOLE)
        while at < end:
            at += _copy_some(reader, writer, at, min(_CHUNK, end - at))


def _copy_some(reader: int, writer: int, at: int, count: int) -> int:
    try:
        copied = os.copy_file_range(reader, writer, count, at, at)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        copied = os.pwrite(writer, os.pread(reader, count, at), at)
    if copied == 0:
        raise OSError(errno.EIO, "the source became shorter while it was copied")
    return copied
