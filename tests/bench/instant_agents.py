"""Many agents in one process: each a connection that speaks the protocol and ends every job at once.

`python -m tests.bench.instant_agents COUNT LABEL [PREFIX]`, with the agents' environment.  Their ids begin with
PREFIX, or with the label.  Those that lose their connection come back within a few seconds.  Prints `ready` each time
that all are registered; ends with TERM.
"""

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import aiohttp
import uvloop

from kici.wire.codec import decode_from_coordinator, encode
from kici.wire.messages import (
    AgentRegister,
    AuthRequest,
    AuthSuccess,
    Heartbeat,
    JobAck,
    JobDispatch,
    JobStart,
    JobStatusReport,
    Message,
    RegisterAck,
)

AWAY_SECONDS_MAX: Final = 5.0
BEAT_SECONDS: Final = 30.0


class Crowd:
    def __init__(self, http: aiohttp.ClientSession, count: int, label: str, prefix: str) -> None:
        self._http = http
        self._count = count
        self._label = label
        self._prefix = prefix
        self._registered: set[int] = set()

    async def agent(self, number: int) -> None:
        while True:
            with suppress(aiohttp.ClientError, OSError, ExceptionGroup):
                await self._connected(number)
            self._registered.discard(number)
            await asyncio.sleep(random.uniform(0, AWAY_SECONDS_MAX))

    async def _connected(self, number: int) -> None:
        url = os.environ["KICI_ORCHESTRATOR_URL"]
        beats: asyncio.Task[None] | None = None
        async with (
            self._http.ws_connect(url, max_msg_size=0, compress=0) as socket,
            asyncio.TaskGroup() as group,
        ):

            async def send(message: Message) -> None:
                await socket.send_str(encode(message).decode())

            await send(AuthRequest(token=os.environ["KICI_AGENT_TOKEN"]))
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.TEXT:
                    break
                match decode_from_coordinator(frame.data):
                    case AuthSuccess():
                        await send(AgentRegister(agent_id=f"{self._prefix}-{number}", labels=[self._label]))
                    case RegisterAck():
                        self._registered.add(number)
                        if len(self._registered) == self._count:
                            print("ready", flush=True)
                        beats = beats or group.create_task(self._beats(send))
                    case JobDispatch(job_id=job_id):
                        await send(JobAck(job_id=job_id))
                    case JobStart(job_id=job_id):
                        await send(JobStatusReport(job_id=job_id, state="success", exit_code=0))
                    case _:
                        pass
            if beats is not None:
                beats.cancel()

    async def _beats(self, send: Callable[[Message], Awaitable[None]]) -> None:
        with suppress(aiohttp.ClientError, OSError):
            while True:
                await send(Heartbeat())
                await asyncio.sleep(BEAT_SECONDS)


async def main(count: int, label: str, prefix: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        crowd = Crowd(http, count, label, prefix)
        for number in range(count):
            group.create_task(crowd.agent(number))
            if number % 50 == 49:
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], (sys.argv[3:] or sys.argv[2:])[0]))
