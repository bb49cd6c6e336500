"""Many agents in one process: each a connection that speaks the protocol and ends every job at once.

`python -m tests.bench.instant_agents COUNT LABEL`, with the agents' environment.  Prints `ready` when all are
registered; ends with TERM.
"""

import asyncio
import os
import sys

import aiohttp

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


async def agent(http: aiohttp.ClientSession, number: int, label: str, registered: asyncio.Semaphore) -> None:
    async with http.ws_connect(os.environ["KICI_ORCHESTRATOR_URL"], max_msg_size=0, compress=0) as socket:

        async def send(message: Message) -> None:
            await socket.send_str(encode(message).decode())

        await send(AuthRequest(token=os.environ["KICI_AGENT_TOKEN"]))
        async for frame in socket:
            if frame.type is not aiohttp.WSMsgType.TEXT:
                break
            match decode_from_coordinator(frame.data):
                case AuthSuccess():
                    await send(AgentRegister(agent_id=f"{label}-{number}", labels=[label]))
                case RegisterAck():
                    registered.release()
                    await send(Heartbeat())
                case JobDispatch(job_id=job_id):
                    await send(JobAck(job_id=job_id))
                case JobStart(job_id=job_id):
                    await send(JobStatusReport(job_id=job_id, state="success", exit_code=0))
                case _:
                    pass


async def main(count: int, label: str) -> None:
    registered = asyncio.Semaphore(0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(agent(http, number, label, registered))
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        for _ in range(count):
            await registered.acquire()
        print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
