"""A TCP relay on loopback that can cut, stall and refuse, so that tests break a link when they like."""

import asyncio
from typing import Self

BLOCK_BYTES = 65536


class CuttableProxy:
    """Relays to `port`.  Connections are cut with a reset, or after so many bytes towards the server."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._stalled: list[asyncio.Event] = []
        self._group = asyncio.TaskGroup()
        self.refuses = False
        """New connections are closed at once."""
        self.cut_after_bytes: int | None = None
        """Cut everything when that many more bytes went towards the server."""
        self.cuts = 0

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        self.resume()
        await self._group.__aexit__(None, None, None)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Abort every connection that there is."""
        self.cuts += 1
        for writer in tuple(self._open):
            writer.transport.abort()

    def stall(self) -> None:
        """The connections that there are go half-open: they stay, and nothing passes any more."""
        self._flowing.clear()
        self._stalled.append(self._flowing)
        self._flowing = asyncio.Event()
        self._flowing.set()

    def resume(self) -> None:
        """What was stalled flows again."""
        while self._stalled:
            self._stalled.pop().set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._group.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        flowing = self._flowing
        self._open |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer, flowing, counts=True))
                group.create_task(self._pump(far_reader, writer, flowing, counts=False))
        finally:
            for end in ends:
                end.transport.abort()
            self._open -= ends

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, flowing: asyncio.Event, *, counts: bool
    ) -> None:
        try:
            while data := await source.read(BLOCK_BYTES):
                await flowing.wait()
                if counts and self.cut_after_bytes is not None:
                    sink.write(data[: self.cut_after_bytes])
                    self.cut_after_bytes -= len(data)
                    if self.cut_after_bytes <= 0:
                        self.cut_after_bytes = None
                        await sink.drain()
                        self.cut()
                        return
                else:
                    sink.write(data)
                await sink.drain()
            sink.close()
        except OSError:
            sink.transport.abort()
