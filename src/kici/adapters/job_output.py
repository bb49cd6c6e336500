"""A job's output on this process's own two streams, which its agent reads.  A full pipe is waited for."""

import asyncio
import os
from typing import Final

from kici.domain.errors import Permanent

STDERR: Final = 2


class JobOutput:
    """Contract: `backends.container.job_run.Output`."""

    def __init__(self) -> None:
        for stream in (1, STDERR):
            os.set_blocking(stream, False)

    async def write(self, stream: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(stream, view) :]
            except BlockingIOError:
                await self._room(stream)
            except BrokenPipeError:
                raise Permanent("nobody reads the job's output any more") from None

    def tell(self, text: str) -> None:
        lines = "".join(f"kici: {line}\n" for line in text.splitlines() if line.strip())
        try:
            os.write(STDERR, lines.encode())
        except (BlockingIOError, BrokenPipeError):
            return  # a reader who is so far behind can do without

    async def _room(self, stream: int) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(stream, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(stream)
