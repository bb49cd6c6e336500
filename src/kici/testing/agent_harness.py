"""A coordinator of a few hundred lines for tests of the agent: the real gateway and protocol half, memory for a store.

It keeps output as a store must (by offset, refusing gaps, ignoring what it has) and answers registrations with
verdicts on the jobs that it knows.  `AgentProcess` runs the real program against it.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, assert_never

import msgspec
from aiohttp import web

from kici.adapters.clock import RealClock
from kici.gateway.agents import Gateway
from kici.kit.supervise import Supervisor
from kici.ports.link import Link
from kici.wire.codec import encode
from kici.wire.coordinator_half import (
    Authenticate,
    Close,
    CoordinatorHalf,
    Effect,
    Phase,
    Received,
    Redeem,
    Register,
    Send,
    Unhealthy,
)
from kici.wire.messages import (
    AgentMessage,
    AgentRegister,
    ClaimCredentials,
    ClaimCredentialsResponse,
    CloseCode,
    Credentials,
    JobAck,
    JobCancel,
    JobDispatch,
    JobReject,
    JobStart,
    JobStatusAck,
    JobStatusReport,
    JobVerdict,
    LogAck,
    LogChunkMessage,
    Message,
    RegisterAck,
)

TICK_SECONDS = 0.02
PATIENCE_SECONDS = 40.0
"""For what takes a second on a machine that has nothing else to do."""


@dataclass(kw_only=True)
class HarnessJob:
    """A job as the harness sees it."""

    start: JobStart
    state: str = "queued"
    """`queued`, `dispatched`, `running`, or how it ended."""
    output: dict[int, bytearray] = field(default_factory=lambda: {1: bytearray(), 2: bytearray()})
    order: list[int] = field(default_factory=list)
    """Stream of each stored chunk, as they came."""
    final: JobStatusReport | None = None
    rejections: list[str] = field(default_factory=list)
    process_started: bool = False

    @property
    def stdout(self) -> bytes:
        return bytes(self.output[1])

    @property
    def stderr(self) -> bytes:
        return bytes(self.output[2])


@dataclass(kw_only=True)
class Behaviour:
    """What the harness does; tests change it while it runs."""

    tokens: frozenset[str] | None = None
    """Accepted tokens; None: no authentication."""
    claims: dict[str, Credentials] = field(default_factory=dict)
    ack: dict[str, Any] = field(default_factory=dict)
    """Fields of every `register.ack`."""
    starts_jobs: bool = True
    """Answer `job.ack` by `job.start`."""
    acknowledges_output: bool = True
    acknowledges_status: bool = True
    refuse: tuple[int, str] | None = None
    """Refuse registrations."""


class HarnessSession:
    """One connection."""

    def __init__(self, owner: "AgentHarness", link: Link) -> None:
        self._owner = owner
        self.link = link
        self.half = CoordinatorHalf(auth_required=owner.behaviour.tokens is not None, now=owner.now())
        self.registration: AgentRegister | None = None
        self.is_closed = False

    async def received(self, frame: bytes | str) -> None:
        self.apply(self.half.receive(frame, self._owner.now()))
        await self.link.drain()

    async def closed(self, code: int) -> None:
        self.is_closed = True
        self._owner.closed.append(code)
        self._owner.changed()

    def send(self, message: Message) -> None:
        self.link.send(encode(message))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Close(code, reason):
                    self._owner.closes.append((code, reason))
                    self.link.close(code, reason)
                case Authenticate(token):
                    good = self._owner.behaviour.tokens
                    is_good = good is None or token in good
                    self.apply(self.half.authenticated("c1") if is_good else self.half.auth_failed("bad token"))
                case Register(message):
                    self._register(message)
                case Redeem(message):
                    self.apply(self.half.redeemed(self._owner.redeem(message)))
                case Received(message):
                    self._owner.received(self, message)
                case Unhealthy():
                    pass
                case _:
                    assert_never(effect)
        self._owner.changed()

    def _register(self, message: AgentRegister) -> None:
        if self._owner.behaviour.refuse is not None:
            self.apply(self.half.refused(*self._owner.behaviour.refuse))
            return
        self.registration = message
        verdicts = [self._owner.verdict(ref.job_id) for ref in message.in_flight_jobs]
        fields = {"scaler_managed": message.scaler_managed, **self._owner.behaviour.ack}
        ack = RegisterAck(agent_id=message.agent_id, labels=message.labels, jobs=verdicts, **fields)
        self.apply(self.half.registered(ack))
        for verdict in verdicts:
            if verdict.action == "start":
                self.send(self._owner.jobs[verdict.job_id].start)


class AgentHarness:
    """A coordinator for tests; use it as an async block."""

    def __init__(self, **behaviour: Any) -> None:
        self.behaviour = Behaviour(**behaviour)
        self.jobs: dict[str, HarnessJob] = {}
        self.sessions: list[HarnessSession] = []
        self.closed: list[int] = []
        """Codes with which connections ended."""
        self.closes: list[tuple[int, str]] = []
        """Closes that our side asked for."""
        self.heard: deque[AgentMessage] = deque(maxlen=10_000)
        self.faults: list[str] = []
        """What a correct agent never does."""
        self._clock = RealClock()
        self._change = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = Supervisor("harness")
        await self._tasks.__aenter__()
        self.gateway = Gateway(self, clock=self._clock, tasks=self._tasks)
        app = web.Application()
        app.router.add_get("/ws", self.gateway.handle)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port: int = self._runner.addresses[0][1]
        self.url = f"ws://127.0.0.1:{self.port}/ws"
        _ = self._tasks.spawn("tick", self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.vanish()
        await self._tasks.__aexit__(None, None, None)

    async def vanish(self) -> None:
        """Close the port and every connection, for good."""
        self.gateway.close_all(CloseCode.GOING_AWAY, "gone")
        await self._runner.cleanup()

    def now(self) -> float:
        return self._clock.monotonic()

    def connected(self, link: Link) -> HarnessSession:
        session = HarnessSession(self, link)
        self.sessions.append(session)
        return session

    @property
    def agents(self) -> list[HarnessSession]:
        """Connections of registered agents, oldest first."""
        return [s for s in self.sessions if not s.is_closed and s.half.phase is Phase.REGISTERED]

    def changed(self) -> None:
        self._change.set()

    async def until(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Return once the condition holds.  Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._change.clear()
                await self._change.wait()

    async def agent(self, seconds: float = PATIENCE_SECONDS) -> HarnessSession:
        """The registered agent, once there is one."""
        await self.until(lambda: self.agents, seconds)
        return self.agents[-1]

    def dispatch(self, *command: str, job_id: str = "job-1", **fields: Any) -> HarnessJob:
        """Offer a job to the agent that registered last."""
        start = JobStart(job_id=job_id, run_id="run-1", name=job_id, command=list(command), **fields)
        job = self.jobs[job_id] = HarnessJob(start=start, state="dispatched")
        self.agents[-1].send(JobDispatch(job_id=job_id, run_id="run-1", name=job_id))
        return job

    async def run(
        self, *command: str, job_id: str = "job-1", seconds: float = PATIENCE_SECONDS, **fields: Any
    ) -> HarnessJob:
        """Run a job on the agent to its end."""
        _ = await self.agent()
        job = self.dispatch(*command, job_id=job_id, **fields)
        await self.until(lambda: job.final, seconds)
        return job

    def cancel(self, job_id: str = "job-1", **fields: Any) -> None:
        self.agents[-1].send(JobCancel(job_id=job_id, **fields))

    def verdict(self, job_id: str) -> JobVerdict:
        """What a returning agent shall do with a job."""
        job = self.jobs.get(job_id)
        if job is None or job.final is not None:
            return JobVerdict(job_id=job_id, action="drop")
        if job.state == "dispatched":
            job.state = "running"
            return JobVerdict(job_id=job_id, action="start")
        return JobVerdict(
            job_id=job_id, action="resume", stdout_offset=len(job.output[1]), stderr_offset=len(job.output[2])
        )

    def redeem(self, message: ClaimCredentials) -> ClaimCredentialsResponse:
        credentials = self.behaviour.claims.pop(message.claim_code, None)
        error = None if credentials else "invalid claim code"
        return ClaimCredentialsResponse(request_id=message.request_id, credentials=credentials, error=error)

    def received(self, session: HarnessSession, message: AgentMessage) -> None:
        self.heard.append(message)
        match message:
            case JobAck(job_id=job_id):
                job = self.jobs[job_id]
                if self.behaviour.starts_jobs and job.state == "dispatched":
                    job.state = "running"
                    session.send(job.start)
            case JobReject(job_id=job_id, reason=reason):
                self.jobs[job_id].rejections.append(reason)
            case LogChunkMessage():
                self._store(session, message)
            case JobStatusReport(job_id=job_id, state="running"):
                self.jobs[job_id].process_started = True
            case JobStatusReport():
                self._finish(session, message)
            case _:
                pass

    def _store(self, session: HarnessSession, chunk: LogChunkMessage) -> None:
        job = self.jobs[chunk.job_id]
        stored = job.output[chunk.stream]
        if chunk.offset > len(stored):
            self.faults.append(f"gap: {chunk.offset} after {len(stored)}")
        overlap = bytes(stored[chunk.offset : chunk.offset + len(chunk.data)])
        if overlap != chunk.data[: len(overlap)]:
            self.faults.append(f"other bytes at {chunk.offset} than before")
        new = chunk.data[len(stored) - chunk.offset :] if chunk.offset <= len(stored) else b""
        stored += new
        job.order.append(chunk.stream)
        if self.behaviour.acknowledges_output:
            session.send(LogAck(job_id=chunk.job_id, stream=chunk.stream, offset=len(stored)))

    def acknowledge_all(self) -> None:
        """Say of all stored output that it is stored."""
        for job_id, job in self.jobs.items():
            self.agents[-1].send(LogAck(job_id=job_id, stream=1, offset=len(job.output[1])))
            self.agents[-1].send(LogAck(job_id=job_id, stream=2, offset=len(job.output[2])))

    def _finish(self, session: HarnessSession, report: JobStatusReport) -> None:
        job = self.jobs[report.job_id]
        stored = (len(job.output[1]), len(job.output[2]))
        if stored != (report.stdout_bytes, report.stderr_bytes):
            self.faults.append(
                f"the end came with {stored} of {report.stdout_bytes}, {report.stderr_bytes} bytes stored"
            )
        if job.final is None:
            job.final = report
            job.state = report.state
        if self.behaviour.acknowledges_status:
            session.send(JobStatusAck(job_id=report.job_id))

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_SECONDS)
            for session in self.sessions:
                if not session.is_closed:
                    session.apply(session.half.tick(self.now()))


class AgentProcess:
    """The agent program as a process, its environment exactly as given (and a work directory of its own)."""

    def __init__(self, url: str, *, prelude: str = "", **environ: str) -> None:
        """`prelude`: Python that the process runs first."""
        self._prelude = prelude
        self.tmp = Path(tempfile.mkdtemp(prefix="kici-test-"))
        self.environ = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.tmp),
            "KICI_ORCHESTRATOR_URL": url,
            "KICI_AGENT_ID": "agent-1",
            **environ,
        }
        self.log = self.tmp / "agent.log"

    async def __aenter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                f"{self._prelude}\nimport sys; from kici.apps.agent import main; sys.exit(main([]))",
                env={**self.environ, "PYTHONPATH": _source_path()},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self.exited()
        shutil.rmtree(self.tmp)

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def hang_up(self) -> None:
        self._process.send_signal(signal.SIGHUP)

    def drain(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    async def exited(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The exit code.  Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            return await self._process.wait()

    @property
    def resident_kb(self) -> int:
        """Memory of the process right now."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def events(self) -> list[Mapping[str, Any]]:
        """What it logged."""
        lines = self.log.read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines if line.startswith(b"{")]

    def work_left(self) -> list[str]:
        """Everything below its work directory, except locks."""
        return sorted(
            str(path.relative_to(self.tmp))
            for base in self.tmp.glob("kici-work-*")
            for path in base.rglob("*")
            if path.name != ".lock"
        )


def is_alive(pid: int) -> bool:
    """Whether there is such a process, zombies included."""
    return Path(f"/proc/{pid}").exists()


def _source_path() -> str:
    return str(Path(__file__).parents[2])
