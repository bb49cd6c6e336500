"""Many agents in one process: the agent's own half of the conversation, each with jobs that end at once.

`python -m tests.bench.instant_agents COUNT LABEL [PREFIX]`, with the agents' environment.  Their ids begin with
PREFIX, or with the label.  What they hold, list on their return, repeat and how long they stay away is up to that
half, as in the real program.  Prints `ready` each time that all are registered; ends with TERM.
"""

import asyncio
import os
import random
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import uvloop

from kici.wire.agent_effects import Connect, Disconnect, Effect, Exit, Send, StartStep, StepEnd
from kici.wire.agent_half import AgentHalf
from kici.wire.agent_settings import AgentSettings
from kici.wire.agent_states import Phase
from kici.wire.codec import encode
from kici.wire.messages import FRAME_BYTES_MAX, AgentRegister

OPEN_SECONDS: Final = 60.0
"""A connection that is not there by then is tried again.  Longer than the real program waits: here one process stands
for as many machines, and takes its time."""
NO_CLOSE_FRAME: Final = 1006


@dataclass
class Crowd:
    http: aiohttp.ClientSession
    count: int
    registered: set[str] = field(default_factory=set)

    def saw(self, half: AgentHalf) -> None:
        if half.phase is not Phase.REGISTERED:
            self.registered.discard(half.agent_id)
        elif half.agent_id not in self.registered:
            self.registered.add(half.agent_id)
            if len(self.registered) == self.count:
                print("ready", flush=True)


class Agent:
    """One of them.  Frames leave in the order in which the half said so."""

    def __init__(self, crowd: Crowd, name: str, label: str) -> None:
        settings = AgentSettings(
            url=os.environ["KICI_ORCHESTRATOR_URL"],
            token=os.environ["KICI_AGENT_TOKEN"],
            register=AgentRegister(agent_id=name, labels=[label]),
        )
        self._crowd = crowd
        self._half = AgentHalf(settings, jitter=random.random)
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None
        self._timer: asyncio.Handle | None = None
        self._wanted: str | None = None
        self._is_wanted = asyncio.Event()
        self._unsent: list[bytes] = []
        self._is_unsent = asyncio.Event()
        self._closing: tuple[int, str] | None = None

    async def run(self) -> None:
        self._apply(self._half.start(self._loop.time()))
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            code, reason = await self._converse(str(self._wanted))
            self._apply(self._half.disconnected(code, reason, self._loop.time()))

    async def _converse(self, url: str) -> tuple[int, str]:
        """One connection, from the attempt to its end; how it ended."""
        self._unsent, self._closing = [], None
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                socket = await self._crowd.http.ws_connect(url, max_msg_size=FRAME_BYTES_MAX, compress=0)
        except (aiohttp.ClientError, OSError) as error:
            return NO_CLOSE_FRAME, str(error)
        async with socket:
            writer = asyncio.create_task(self._write(socket))
            try:
                self._apply(self._half.connected(self._loop.time()))
                async for frame in socket:
                    if frame.type is aiohttp.WSMsgType.TEXT:
                        self._apply(self._half.receive(frame.data, self._loop.time()))
                    self._half.heard(self._loop.time())
            except (aiohttp.ClientError, OSError) as error:  # it broke while a ping was answered
                return NO_CLOSE_FRAME, str(error)
            finally:
                writer.cancel()
        return socket.close_code or NO_CLOSE_FRAME, ""

    async def _write(self, socket: "aiohttp.ClientWebSocketResponse[bool]") -> None:
        with suppress(aiohttp.ClientError, OSError):
            while True:
                await self._is_unsent.wait()
                self._is_unsent.clear()
                while self._unsent:
                    await socket.send_str(self._unsent.pop(0).decode())
                if self._closing is not None:
                    await socket.close(code=self._closing[0])
                    return

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._do(effect)
        self._crowd.saw(self._half)
        self._arm()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Connect(url):
                self._wanted = url
                self._is_wanted.set()
            case Send(message):
                self._unsent.append(encode(message))
                self._is_unsent.set()
            case Disconnect(code, reason):
                self._closing = code, reason
                self._is_unsent.set()
            case StartStep():
                self._apply(self._half.step_started())
                self._apply(self._half.step_ended(StepEnd(exit_code=0), self._loop.time()))
            case Exit(_, reason):
                raise SystemExit(f"agent {self._half.agent_id} ended: {reason}")
            case _:
                pass

    def _arm(self) -> None:
        deadline = self._half.next_deadline()
        if self._timer is not None:
            if deadline == self._deadline:
                return
            self._timer.cancel()
        self._deadline = deadline  # uvloop's handle of one that is past does not tell
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._half.tick(self._loop.time()))


async def main(count: int, label: str, prefix: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        crowd = Crowd(http, count)
        for number in range(count):
            group.create_task(Agent(crowd, f"{prefix}-{number}", label).run())
            if number % 50 == 49:
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], (sys.argv[3:] or sys.argv[2:])[0]))
