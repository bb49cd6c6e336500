"""An agent of the bench: a connection, and messages that a test writes by hand.

It answers nothing by itself, so a test decides what an agent does, and when: it registers, acknowledges, reports
the end, or vanishes.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from kici.domain.ids import AgentId, JobId
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_link import ABNORMAL, LinkClosed, SimEnd, SimWire
from kici.wire.codec import decode_from_coordinator, encode
from kici.wire.messages import (
    STDOUT,
    AgentLeaving,
    AgentRegister,
    AuthRequest,
    AuthSuccess,
    JobAck,
    JobDispatch,
    JobRef,
    JobReject,
    JobStart,
    JobState,
    JobStatusReport,
    LogChunkMessage,
    Message,
    RegisterAck,
    StreamNumber,
)

M = TypeVar("M", bound=Message)
PATIENCE_SECONDS: Final = 60.0
MEANWHILE_SECONDS: Final = 0.5
"""After which what was sent has arrived and was handled, unless something holds it up."""


class BenchAgent:
    """One agent program.  `accept` is what lets a new connection into the coordinator."""

    def __init__(
        self,
        agent_id: AgentId,
        *,
        labels: Iterable[str],
        token: str | None,
        entropy: SeededEntropy,
        accept: Callable[[SimEnd], None],
        slots: int = 1,
    ) -> None:
        self.agent_id = agent_id
        self.labels = list(labels)
        self.token = token
        self.slots = slots
        self.heard: list[Message] = []
        """Everything that came, on all connections, in order."""
        self.wires: list[SimWire] = []
        self.closed_with: int | None = None
        """Code with which the present connection ended."""
        self._entropy = entropy
        self._accept = accept
        self._unread: list[Message] = []
        self._changed = asyncio.Event()
        self._readers: set[asyncio.Task[None]] = set()

    # --- the connection

    def connects(self) -> SimWire:
        """Open a connection; an older one stays as it is."""
        wire = SimWire(self._entropy, names=(self.agent_id, "coordinator"))
        self.wires.append(wire)
        self.closed_with = None
        reader = asyncio.get_running_loop().create_task(self._read(wire), name=f"agent {self.agent_id}")
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        self._accept(wire.b)
        return wire

    async def authenticates(self) -> None:
        """Connect, and present the token."""
        self.connects()
        if self.token is not None:
            self.says(AuthRequest(token=self.token))
            await self.hears(AuthSuccess)

    async def registers(self, *jobs: tuple[JobId, str]) -> RegisterAck:
        """Connect and register, with these jobs and their phases at hand."""
        await self.authenticates()
        self.says(self.registration(*jobs))
        return await self.hears(RegisterAck)

    async def tries_to_register(self, *jobs: tuple[JobId, str]) -> None:
        """Connect and register, and do not mind being refused."""
        self.connects()
        if self.token is not None:
            self.says(AuthRequest(token=self.token))
        await asyncio.sleep(MEANWHILE_SECONDS)
        self.says(self.registration(*jobs))

    def registration(self, *jobs: tuple[JobId, str]) -> AgentRegister:
        return AgentRegister(
            agent_id=self.agent_id,
            labels=self.labels,
            max_concurrency=self.slots,
            in_flight_jobs=[JobRef(job_id=job_id, run_id="", phase=phase) for job_id, phase in jobs],
        )

    def closes(self, code: int = 1000) -> None:
        self.wires[-1].a.close(code, "")

    def cut(self) -> None:
        """Its connection breaks; both ends are told."""
        self.wires[-1].cut()

    def goes_silent(self) -> None:
        """Nothing arrives any more, in either direction, and nobody is told."""
        self.wires[-1].half_open()

    async def is_closed(self) -> int:
        """The code with which the coordinator closed the connection, once it did."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.closed_with is None:
                self._changed.clear()
                await self._changed.wait()
        return self.closed_with

    # --- messages

    def says(self, message: Message) -> None:
        self.wires[-1].a.send(encode(message))

    async def hears(self, kind: type[M], *, within: float = PATIENCE_SECONDS) -> M:
        """The next message of this kind that was not looked at yet."""
        async with asyncio.timeout(within):
            message = await self._next(kind)
        assert isinstance(message, kind)
        return message

    async def _next(self, *kinds: type[Message]) -> Message:
        while True:
            for message in self._unread:
                if isinstance(message, kinds):
                    self._unread.remove(message)
                    return message
            self._changed.clear()
            await self._changed.wait()

    def all(self, kind: type[M]) -> list[M]:
        """Every message of this kind that ever came."""
        return [message for message in self.heard if isinstance(message, kind)]

    # --- jobs

    async def is_offered(self, *, within: float = PATIENCE_SECONDS) -> JobId:
        return JobId((await self.hears(JobDispatch, within=within)).job_id)

    async def is_left_alone(self, seconds: float = MEANWHILE_SECONDS) -> None:
        """Assert that no job is offered for a while."""
        await asyncio.sleep(seconds)
        offers = [message for message in self._unread if isinstance(message, JobDispatch)]
        assert not offers, f"{self.agent_id} was offered {offers}"

    def acks(self, job_id: JobId) -> None:
        self.says(JobAck(job_id=job_id))

    async def starts(self, *, within: float = PATIENCE_SECONDS) -> JobId:
        """Acknowledge what is offered until a job is started."""
        async with asyncio.timeout(within):
            while True:
                message = await self._next(JobDispatch, JobStart)
                if isinstance(message, JobStart):
                    return JobId(message.job_id)
                assert isinstance(message, JobDispatch)
                self.acks(JobId(message.job_id))

    def rejects(self, job_id: JobId, reason: str = "busy") -> None:
        self.says(JobReject(job_id=job_id, reason=reason))

    def writes(self, job_id: JobId, data: bytes, *, offset: int = 0, stream: StreamNumber = STDOUT) -> None:
        self.says(LogChunkMessage(job_id=job_id, stream=stream, offset=offset, data=data))

    def ends(self, job_id: JobId, state: JobState = "success", *, exit_code: int | None = None) -> None:
        code = 0 if state == "success" and exit_code is None else exit_code
        self.says(JobStatusReport(job_id=job_id, state=state, exit_code=code))

    def leaves(self, reason: str = "done") -> None:
        """Say good-bye and exit."""
        self.says(AgentLeaving(reason=reason))
        self.closes()

    async def _read(self, wire: SimWire) -> None:
        try:
            while True:
                message = decode_from_coordinator(await wire.a.receive())
                self.heard.append(message)
                self._unread.append(message)
                self._changed.set()
        except LinkClosed as closed:
            if wire is self.wires[-1]:
                self.closed_with = closed.code or ABNORMAL
        self._changed.set()
