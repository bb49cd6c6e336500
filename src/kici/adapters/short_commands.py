"""What every short command of ours shares: how it is given its input, waited for, and ended when it takes too long."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


async def outputs(process: asyncio.subprocess.Process, *, seconds: float) -> tuple[bytes, bytes]:
    """Standard output and error of a process, once it has ended.

    Raises `TimeoutError`.  However the wait ends, the process has ended too: by KILL when it had not.
    """
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return output, errors or b""


@contextmanager
def as_stdin(text: str) -> Iterator[int]:
    """A descriptor to read `text` from.  No pipe: a command that ends without reading must not break the writer."""
    given = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(given, rest) :]
        os.lseek(given, 0, os.SEEK_SET)
        yield given
    finally:
        os.close(given)
