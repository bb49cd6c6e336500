"""The coordinator's side of the zygote: a `Starter` for this installation's agent.

The zygote is started when it is first needed and again after it was lost, though not more often than every few
seconds; meanwhile `start` raises `Retryable`, and whoever asked starts the program in the plain way.
"""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from signal import SIGKILL
from typing import Any, Final

from kici.adapters import proc
from kici.adapters.processes import LinuxProcess, exit_of, hold_child
from kici.domain.errors import Retryable
from kici.kit.finish import finish
from kici.ports.clock import Clock
from kici.ports.processes import MARK, Exit, Process, ProcessId, Program

READY_SECONDS: Final = 15.0
ANSWER_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 10.0
STATUS_SECONDS: Final = 1.0
"""How long after the end of an agent the zygote may take to say how it ended."""
PADDING: Final = 2048
"""Room for a mark in what `/proc` shows of a child."""
IN_FLIGHT_MAX: Final = 16
_BYTES_MAX: Final = 4096


class ForkedProcess(LinuxProcess):
    """An agent that the zygote started, and reaps."""

    def __init__(self, process_id: ProcessId, pidfd: int) -> None:
        super().__init__(process_id, pidfd, lambda _pidfd: Exit())
        self._status = Exit()
        self._told = asyncio.Event()

    async def wait(self) -> Exit:
        await super().wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_SECONDS):
                await self._told.wait()
        return self._status

    def tell(self, status: Exit) -> None:
        """How it ended, or that nobody will ever say."""
        self._status = status
        self._told.set()


class _Request:
    """A fork that was asked for, and what tells the child to go on."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.process: ForkedProcess | None = None
        self.error: str | None = None
        self.environment = os.memfd_create("environment", os.MFD_CLOEXEC)
        self.waits, self.go = os.pipe2(os.O_CLOEXEC)

    def let_go(self, environment: Mapping[str, str]) -> None:
        """The child may become an agent."""
        os.write(self.environment, json.dumps(dict(environment)).encode())
        os.lseek(self.environment, 0, os.SEEK_SET)
        with suppress(BrokenPipeError):  # it has ended already, which its exit will tell
            os.write(self.go, b"1")

    def close(self) -> None:
        """A child that was not let go ends by this."""
        for descriptor in (self.environment, self.waits, self.go):
            if descriptor >= 0:
                os.close(descriptor)
        self.environment = self.waits = self.go = -1


class Channel:
    """One life of a zygote."""

    def __init__(self, control: socket.socket, server: LinuxProcess, boot: str) -> None:
        self._control = control
        self._server = server
        self._boot = boot
        self._numbers = 0
        self._requests: dict[int, _Request] = {}
        self._children: dict[int, ForkedProcess] = {}
        self.ready = asyncio.Event()
        self.is_open = True
        asyncio.get_running_loop().add_reader(control, self._on_readable)

    @property
    def pid(self) -> int:
        return self._server.id.pid

    async def fork(self, program: Program) -> Process:
        try:
            request = _Request()
        except OSError as error:
            raise Retryable(f"the zygote cannot be asked: {error}") from error
        try:
            await self._ask(request, program)
            if request.process is None:
                raise Retryable(f"the zygote could not start an agent: {request.error}")
            request.let_go({**program.env, MARK: program.mark})
        finally:
            request.close()
        return request.process

    def close(self) -> None:
        """The zygote ends; agents do not."""
        if self.is_open:
            self.is_open = False
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._server.send(SIGKILL)
            for request in self._requests.values():
                request.error = "it is gone"
                request.answered.set()
            for child in self._children.values():
                child.tell(Exit())
            self._requests.clear()
            self._children.clear()
            self.ready.set()

    async def ended(self) -> None:
        await self._server.wait()

    async def _ask(self, request: _Request, program: Program) -> None:
        """Have it fork, and wait until it is known who the child is.  Called off: until the child is gone."""
        self._send(request, program)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await request.answered.wait()
        except TimeoutError as error:
            self.close()
            raise Retryable("the zygote does not answer") from error
        except asyncio.CancelledError:
            await finish(self._abandon(request), seconds=2 * ANSWER_SECONDS, what="calling off a fork")
            raise

    def _send(self, request: _Request, program: Program) -> None:
        self._numbers += 1
        groups = [str(group) for group in program.groups]
        message = {"number": self._numbers, "mark": program.mark, "cwd": str(program.cwd), "groups": groups}
        try:
            output = os.open(program.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                descriptors = [output, request.environment, request.waits, *program.inherits]
                socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
            finally:
                os.close(output)
        except OSError as error:
            raise Retryable(f"the zygote cannot be asked: {error}") from error
        self._requests[self._numbers] = request

    async def _abandon(self, request: _Request) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await request.answered.wait()
        except TimeoutError:
            self.close()
        if request.process is not None:
            request.process.send(SIGKILL)
            await request.process.wait()

    def _on_readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, _BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.close()
            return
        self._take(json.loads(data), descriptors)

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "ready" in message:
            self.ready.set()
        elif "exited" in message:
            child = self._children.pop(message["exited"], None)
            if child is not None:
                child.tell(exit_of(message["status"]))
        else:
            request = self._requests.pop(message["number"])
            request.error = message.get("error")
            if descriptors:
                identity = ProcessId(pid=message["pid"], started=message["started"], boot=self._boot)
                request.process = self._children[identity.pid] = ForkedProcess(identity, descriptors[0])
            request.answered.set()


class Zygote:
    """`target` is `module:function` of the agent; `env` is all that the zygote itself may see."""

    def __init__(self, *, python: str, target: str, env: Mapping[str, str], clock: Clock) -> None:
        self._python = python
        self._target = target
        self._env = dict(env)
        self._clock = clock
        self._boot = proc.boot_id()
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._in_flight = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._not_before = 0.0

    @property
    def pid(self) -> int | None:
        """Of the zygote, while there is one."""
        return self._channel.pid if self._channel is not None and self._channel.is_open else None

    async def start(self, program: Program) -> Process:
        """As `Starter`; `program.argv` is not looked at.  Raises only `Retryable`."""
        if len(f"{MARK}={program.mark}") > PADDING:
            raise Retryable("the data directory's path is too long for the zygote")
        channel = await self.open()
        async with self._in_flight:
            return await channel.fork(program)

    async def open(self) -> Channel:
        """Have it ready; safe to call at any time.  Raises `Retryable`."""
        async with self._opening:
            if self._channel is not None and self._channel.is_open:
                return self._channel
            if self._clock.monotonic() < self._not_before:
                raise Retryable("the zygote was lost and is not started again yet")
            self._not_before = self._clock.monotonic() + AGAIN_SECONDS
            channel = self._launch()
            try:
                async with asyncio.timeout(READY_SECONDS):
                    await channel.ready.wait()
            except BaseException as error:
                channel.close()
                if isinstance(error, TimeoutError):
                    raise Retryable(f"the zygote was not ready within {READY_SECONDS:g} s") from error
                raise
            if not channel.is_open:
                raise Retryable("the zygote ended while it started; its standard error says why")
            self._channel = channel
            return channel

    async def close(self) -> None:
        """End it.  Agents that it started live on."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()
            await channel.ended()

    def _launch(self) -> Channel:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.settimeout(0)
            argv = [self._python, "-P", "-m", "kici.adapters.zygote", str(theirs.fileno()), self._target, "-" * PADDING]
            try:
                child = subprocess.Popen(
                    argv,
                    env={**self._env, MARK: "-" * PADDING},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise Retryable(f"cannot start the zygote with {self._python}: {error.strerror}") from error
        return Channel(ours, hold_child(child, self._boot), self._boot)
