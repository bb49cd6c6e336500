"""The agent program: the protocol half in the middle, a connection on one side, a step on the other.

Whatever happens (a frame, a block of output, a signal, a timer) is told to the half, and what the half answers is
done at once, on the one loop.  Nothing here decides.
"""

import asyncio
import os
import pwd
import random
import signal
import sys
import traceback
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, assert_never

from kici.agent import host
from kici.agent.connection import NO_CLOSE_FRAME, Connection, open_connection
from kici.agent.container_records import has_records, records_folder
from kici.agent.environment import ProgramSettings, may_reach_steps, read_settings
from kici.agent.figures import Figures
from kici.agent.health import Facts, serve
from kici.agent.mask import needles_of
from kici.agent.notes import Notes
from kici.agent.signals import handle_signals
from kici.agent.step import RunAs, Step, StepOrder
from kici.agent.workdir import remove_tree, work_root
from kici.domain.errors import Misconfigured, Permanent
from kici.kit.supervise import Supervisor
from kici.kit.version import VERSION
from kici.wire.agent_effects import (
    Connect,
    Disconnect,
    Effect,
    Exit,
    ExitCode,
    Note,
    Send,
    StartStep,
    StepEnd,
    StopStep,
)
from kici.wire.agent_half import AgentHalf
from kici.wire.agent_states import STOP_GRACE_SECONDS, Phase
from kici.wire.codec import encode
from kici.wire.messages import JobStart, StreamNumber

FAREWELL_SECONDS: Final = 0.3
CLEANUP_SECONDS: Final = 10.0
HURRIED_CLEANUP_SECONDS: Final = 0.2
"""After TERM: what is not removed by then is collected by the next agent here."""
NO_ENGINE: Final = (
    "the job runs in a container, and this agent has no engine to make it: install Docker or Podman on its host, let "
    "its user use the engine's socket (or set DOCKER_HOST), and start the agent again"
)


def run(environ: Mapping[str, str]) -> int:
    """Run an agent to its end; its exit code.  Reads nothing of the process's own environment.

    Call it in the main thread of a process of its own: it takes over signals and children.
    """
    try:
        settings = read_settings(environ, host.facts(environ), version=VERSION)
        run_as = None if settings.runner_user is None else find_user(settings.runner_user)
    except Misconfigured as error:
        return refused(error)
    host.shield()
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(Program(settings, run_as).run())
    finally:
        loop.close()  # without waiting for a name look-up that hangs in a thread


def refused(error: Misconfigured) -> int:
    """Say why it cannot start; the exit code."""
    sys.stderr.write(f"kici-agent: cannot start:\n{error}\n")
    return ExitCode.MISCONFIGURED


def find_user(name: str) -> RunAs:
    """The user that steps run as.  Raises `Misconfigured`."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise Misconfigured(f"KICI_RUNNER_USER: there is no user {name!r} here") from None
    if os.geteuid() != 0 and user.pw_uid != os.geteuid():
        raise Misconfigured(f"KICI_RUNNER_USER: only root can run steps as {name!r}")
    return RunAs(uid=user.pw_uid, gid=user.pw_gid, groups=tuple(os.getgrouplist(name, user.pw_gid)))


class Program:
    """One agent process."""

    def __init__(self, settings: ProgramSettings, run_as: RunAs | None) -> None:
        self._settings = settings
        self._run_as = run_as
        self._half = AgentHalf(settings.half, jitter=random.random)
        self._notes = Notes(self._half.agent_id)
        self._connection: Connection | None = None
        self._step: Step | None = None
        self._job_path: Path | None = None
        self._figures = Figures()
        self._timer: asyncio.TimerHandle | None = None
        self._cleanups: list[Iterator[None]] = []

    async def run(self) -> int:
        """Until the half says `Exit`."""
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[Exit] = self._loop.create_future()
        self._step_over = asyncio.Event()
        self._step_over.set()
        for warning in self._settings.warnings:
            self._notes.warning("agent.setting", warning)
        try:
            self._work = work_root(
                self._settings.tmp, self._half.agent_id, start=Path.cwd(), shared=self._run_as is not None
            )
        except (OSError, Permanent) as error:
            self._notes.error("agent.failed", str(error))
            return ExitCode.MISCONFIGURED
        if self._settings.inside_vm and (problem := host.close_metadata()):
            self._notes.warning("agent.metadata", problem)
        self._loop.set_exception_handler(lambda _, context: self._crash(context.get("exception"), context["message"]))
        self._handle_signals()
        async with Supervisor("agent") as tasks:
            self._tasks = tasks
            await self._serve_health()
            self._apply(self._half.start(self._loop.time()))
            _ = tasks.spawn("stale", self._guarded(self._collect()))
            last = await self._exit
            code = await self._end(last)
        return code

    # --- inputs

    def _handle_signals(self) -> None:
        handlers = {
            signal.SIGCHLD: self._reap,
            signal.SIGUSR1: lambda: self._apply(self._half.drain(self._loop.time())),
        }
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = lambda: self._apply(self._half.stop(self._loop.time()))
        handle_signals(self._loop, handlers)

    def _reap(self) -> None:
        for pid, code in host.reap():
            if self._step is not None:
                self._step.reaped(pid, code)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._half.tick(self._loop.time()))

    def _on_output(self, stream: StreamNumber, data: bytes) -> None:
        self._figures.wrote(len(data))
        self._apply(self._half.output(stream, data, self._loop.time()))

    def _on_ended(self, end: StepEnd) -> None:
        self._step = None
        self._figures.step_ended(self._loop.time())
        self._step_over.set()
        if self._job_path is not None:
            _ = self._tasks.spawn("clean", self._guarded(self._clean(remove_tree(self._job_path))))
            self._job_path = None
        self._apply(self._half.step_ended(end, self._loop.time()))

    async def _converse(self, url: str) -> None:
        """One connection, from the attempt to its end."""
        try:
            connection = await open_connection(url, lambda: self._half.heard(self._loop.time()))
        except ConnectionError as error:
            self._apply(self._half.disconnected(NO_CLOSE_FRAME, str(error), self._loop.time()))
            return
        self._connection = connection
        writer = self._tasks.spawn("writer", self._guarded(connection.write()))
        self._apply(self._half.connected(self._loop.time()))
        code, reason = await connection.read(lambda frame: self._apply(self._half.receive(frame, self._loop.time())))
        writer.cancel()
        self._connection = None
        self._apply(self._half.disconnected(code, reason, self._loop.time()))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 (nobody above us could do better than to end in order)
            self._crash(error, "task failed")

    def _crash(self, error: BaseException | None, text: str) -> None:
        """A bug: better gone, with the job reported lost, than here and deaf."""
        story = "".join(traceback.format_exception(error)) if error is not None else ""
        self._notes.error("agent.crashed", text, story=story)
        self._do(Exit(ExitCode.CRASHED, "crashed"))

    # --- effects

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._do(effect)
        self._arm()
        if self._step is not None:
            self._figures.reads(self._half.wants_output)
            self._step.set_reading(self._half.wants_output)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send() | Connect() | Disconnect():
                self._talk(effect)
            case StartStep(start):
                self._start_step(start)
            case StopStep(_, grace_seconds):
                if self._step is not None:
                    self._step.stop(grace_seconds)
            case Note(event, text):
                self._notes.info(event, text)
            case Exit():
                if not self._exit.done():
                    self._exit.set_result(effect)
            case _:
                assert_never(effect)

    def _talk(self, effect: Send | Connect | Disconnect) -> None:
        match effect:
            case Send(message):
                if self._connection is not None:
                    active, dropped = self._half.active_jobs, self._half.dropped_lines
                    for each in self._figures.with_report(message, active_jobs=active, dropped_lines=dropped):
                        self._connection.send(encode(each))
            case Connect(url):
                self._notes.agent_id = self._half.agent_id
                _ = self._tasks.spawn("connection", self._guarded(self._converse(url)))
            case Disconnect(code, reason):
                self._notes.warning("agent.disconnects", reason, code=code)
                if self._connection is not None:
                    _ = self._tasks.spawn("close", self._guarded(self._connection.close(code, reason[:100])))
            case _:
                assert_never(effect)

    def _start_step(self, start: JobStart) -> None:
        try:
            self._job_path = self._work.new(
                owner=None if self._run_as is None else (self._run_as.uid, self._run_as.gid)
            )
        except OSError as error:
            self._on_ended(StepEnd(error=f"cannot make a work directory: {error}"))
            return
        step = self._step_of(start, self._job_path)
        if isinstance(step, StepEnd):
            self._on_ended(step)
            return
        self._step_over.clear()
        self._step = step
        self._notes.info("job.started", job_id=start.job_id, run_id=start.run_id)
        self._figures.step_began(self._loop.time())
        if step.start():
            self._apply(self._half.step_started())

    def _step_of(self, start: JobStart, path: Path) -> Step | StepEnd:
        container = None if self._settings.inside_job_image else start.container
        order = StepOrder(
            command=start.command,
            env=self._environment(start, path) if container is None else self._settings.step_env,
            cwd=path / "work",
            needles=needles_of([*start.secrets.values(), (container and container.password) or ""]),
            run_as=self._run_as,
        )
        if container is None:
            return Step(order, on_output=self._on_output, on_ended=self._on_ended)
        if self._settings.engine is None:
            return StepEnd(error=NO_ENGINE)
        from kici.agent import container_step  # most agents never need it, and start sooner

        what = container_step.order_of(start, container, self._settings, self._half.agent_id)
        return container_step.ContainerStep(what, order, on_output=self._on_output, on_ended=self._on_ended)

    def _environment(self, start: JobStart, path: Path) -> dict[str, str]:
        user = {} if self._settings.runner_user is None else _home_of(self._settings.runner_user)
        env = {**self._settings.step_env, **user, "TMPDIR": str(path / "tmp"), **start.env, **start.secrets}
        return {name: value for name, value in env.items() if may_reach_steps(name)}

    def _arm(self) -> None:
        deadline = self._half.next_deadline()
        if self._timer is not None:
            if deadline == self._timer.when():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._tick)

    # --- the rest

    async def _serve_health(self) -> None:
        if self._settings.health_port is not None:
            try:
                self._health = await serve(self._settings.health_port, self._facts)
            except OSError as error:
                self._notes.warning("agent.health", f"no health port: {error}")

    def _facts(self) -> Facts:
        return Facts(
            agent_id=self._half.agent_id,
            version=VERSION,
            connected=self._half.phase is Phase.REGISTERED,
            active_jobs=self._half.active_jobs,
            jobs_total=self._figures.jobs_total,
            output_bytes=self._figures.output_bytes,
        )

    async def _collect(self) -> None:
        """Remove what agents that are gone left behind."""
        if self._settings.engine is not None and has_records(records_folder(self._settings.tmp)):
            from kici.agent.container_step import start_clearing  # as above

            start_clearing(self._settings)
        for path in self._work.stale():
            await self._clean(remove_tree(path))

    async def _clean(self, steps: Iterator[None]) -> None:
        for _ in steps:
            await asyncio.sleep(0)

    async def _end(self, last: Exit) -> int:
        """Kill, clean up, say good-bye."""
        self._notes.info("agent.exits", last.reason, code=int(last.code))
        is_hurried = last.reason == "signal"
        if self._step is not None:
            self._step.set_reading(True)
            self._step.stop(0.0 if is_hurried else STOP_GRACE_SECONDS)
            await self._at_most(STOP_GRACE_SECONDS + 1, self._step_over.wait())
        if self._connection is not None:
            await self._at_most(FAREWELL_SECONDS, self._connection.flush())
        seconds = HURRIED_CLEANUP_SECONDS if is_hurried else CLEANUP_SECONDS
        await self._at_most(seconds, self._clean(self._work.remove()))
        if self._connection is not None:
            await self._at_most(FAREWELL_SECONDS, self._connection.close(1000, last.reason[:100]))
        return int(last.code)

    async def _at_most(self, seconds: float, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(seconds):
                _ = await work
        except TimeoutError:
            pass


def _home_of(user: str) -> dict[str, str]:
    entry = pwd.getpwnam(user)
    return {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user, "SHELL": entry.pw_shell or "/bin/sh"}
