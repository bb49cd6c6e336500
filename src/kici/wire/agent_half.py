"""The agent's side of the conversation, without I/O: frames, step events and time in, effects out.

It connects, authenticates, registers and keeps coming back; holds the one job with its unacknowledged output and
final status across connections, so that no byte is lost or doubled; and knows when the agent's purpose is over.

A step is started on `job.start` only: until then the coordinator may give the job to somebody else.  A listed job
for which `register.ack` has no verdict is dropped.  Times are seconds of a monotonic clock.
"""

from collections.abc import Callable
from typing import assert_never

from msgspec import structs

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
from kici.wire.agent_settings import AgentSettings
from kici.wire.agent_states import (
    CANCEL_GRACE_SECONDS_MAX,
    FLUSH_SECONDS,
    HANDSHAKE_SECONDS,
    HEARTBEAT_SECONDS_MIN,
    SILENCE_SECONDS,
    STOP_GRACE_SECONDS,
    STOP_SECONDS,
    TIMEOUT_GRACE_SECONDS,
    Phase,
    Timer,
)
from kici.wire.codec import BadFrame, UnknownType, decode_from_coordinator
from kici.wire.held_job import HeldJob, JobPhase
from kici.wire.leaving import leaves_after
from kici.wire.messages import (
    AgentExit,
    AgentLeaving,
    AgentStatus,
    AuthFailure,
    AuthRequest,
    AuthSuccess,
    ClaimCredentials,
    ClaimCredentialsResponse,
    CloseCode,
    ConfigAck,
    CoordinatorMessage,
    CoordinatorsChanged,
    ErrorMessage,
    Heartbeat,
    JobAck,
    JobCancel,
    JobDispatch,
    JobReject,
    JobStart,
    JobStatusAck,
    JobStatusReport,
    JobVerdict,
    LogAck,
    RegisterAck,
    StreamNumber,
    Unsupported,
)
from kici.wire.outbox import Outbox
from kici.wire.route import Route
from kici.wire.timers import Timers


class AgentHalf:
    """One agent, over all its connections.  `jitter` gives numbers from 0 to 1."""

    def __init__(self, settings: AgentSettings, *, jitter: Callable[[], float]) -> None:
        self._settings = settings
        self._register = settings.register
        self._token = settings.token
        self.route = Route(settings.url, jitter=jitter)
        self._timers: Timers[Timer] = Timers()
        self._phase = Phase.OFFLINE
        self._job: HeldJob | None = None
        self._ack = RegisterAck(agent_id=settings.register.agent_id)
        self._is_dying = False
        """The step of a job that was dropped is being killed; whatever a step reports is of that one."""
        self._next_start: JobStart | None = None
        """Told to start while the one before was dying."""
        self._jobs_done = 0
        self._connections = 0
        self._is_draining = False
        self._is_stopping = False

    # --- what the program may ask

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def agent_id(self) -> str:
        return self._register.agent_id

    @property
    def active_jobs(self) -> int:
        return 0 if self._job is None and not self._is_dying else 1

    @property
    def dropped_lines(self) -> int:
        return 0 if self._job is None else self._job.outbox.dropped_lines

    @property
    def wants_output(self) -> bool:
        """Whether the program should read on what the step writes."""
        job = self._job
        return job is None or self._is_dying or job.outbox.wants_more or self._phase is Phase.OVER

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return self._timers.next()

    # --- the connection

    def start(self, now: float) -> list[Effect]:
        self._register = structs.replace(self._register, incarnation=f"{now:.6f}")
        self._arm_orphan(now)
        return self._connect()

    def connected(self, now: float) -> list[Effect]:
        """The connection that `Connect` asked for is open."""
        if self._phase is not Phase.CONNECTING:
            return []
        self._timers.set(Timer.HANDSHAKE, now + HANDSHAKE_SECONDS)
        if self._token is not None:
            self._phase = Phase.AUTHENTICATING
            return [Send(AuthRequest(token=self._token))]
        if self._settings.claim_code is not None:
            self._phase = Phase.CLAIMING
            return [Send(ClaimCredentials(request_id="claim", claim_code=self._settings.claim_code))]
        return self._send_register()

    def disconnected(self, code: int, reason: str, now: float) -> list[Effect]:
        """The connection is gone or could not be opened (1006)."""
        if self._phase is Phase.OVER:
            return []
        was_registered = self._phase is Phase.REGISTERED
        self._phase = Phase.OFFLINE
        self._timers.clear(Timer.HANDSHAKE, Timer.HEARTBEAT, Timer.SILENCE, Timer.FLUSH, Timer.IDLE)
        if code in CloseCode.PERMANENT:
            is_dismissed = code == CloseCode.DISMISSED
            return self._exit(ExitCode.DONE if is_dismissed else ExitCode.REFUSED, reason or f"closed with {code}")
        if self._is_draining and self._job is None:
            return self._exit(ExitCode.DONE, "drained")
        if self._is_stopping and (self._job is None or self._job.phase is not JobPhase.RUNNING):
            return self._exit(ExitCode.DONE, "signal")
        if was_registered:
            self._arm_orphan(now)
        delay_seconds = self.route.lost(
            code, was_registered=was_registered, delay_ms_max=self._ack.reconnect_max_ms, in_hurry=self._job is not None
        )
        self._timers.set(Timer.RETRY, now + delay_seconds)
        return [Note("agent.disconnected", f"{code} {reason}: next try in {delay_seconds:.1f} s")]

    def heard(self, now: float) -> None:
        """The coordinator gave a sign of life, be it a ping."""
        if self._phase is Phase.REGISTERED:
            self._timers.set(Timer.SILENCE, now + SILENCE_SECONDS)

    def receive(self, frame: bytes | str, now: float) -> list[Effect]:
        """Handle one frame of the coordinator."""
        if self._phase in (Phase.OFFLINE, Phase.CONNECTING, Phase.OVER):
            return []
        try:
            message = decode_from_coordinator(frame)
        except UnknownType as error:
            return [Send(Unsupported(what=error.what))]
        except BadFrame as error:
            return [Disconnect(CloseCode.INVALID_MESSAGE, f"invalid message: {error}")]
        if self._phase is Phase.REGISTERED:
            return self._handle_registered(message, now)
        return self._handle_handshake(message, now)

    # --- the step

    def step_started(self) -> list[Effect]:
        """The step's process is there."""
        job = self._job
        if job is None or self._phase is not Phase.REGISTERED:
            return []
        return [Send(JobStatusReport(job_id=job.job_id, state="running"))]

    def output(self, stream: StreamNumber, data: bytes, now: float) -> list[Effect]:
        """The step wrote something."""
        job = self._job
        if job is None or self._is_dying or self._phase is Phase.OVER:
            return []
        job.outbox.add(stream, data)
        if self._phase is not Phase.REGISTERED:
            return []
        if job.outbox.is_due or not self._timers.is_set(Timer.FLUSH):
            return self._flush(now)
        return []

    def step_ended(self, end: StepEnd, now: float) -> list[Effect]:
        """Nothing of the step is left, and all its output was given to `output`."""
        job = self._job
        if self._is_dying:
            self._is_dying = False
            order, self._next_start = self._next_start, None
            return [] if job is None or order is None else self._begin(job, order, now)
        if job is None or self._phase is Phase.OVER:
            return []
        self._timers.clear(Timer.STEP_TIMEOUT)
        job.end(end)
        if self._phase is Phase.REGISTERED:
            return self._flush(now)
        return self._exit(ExitCode.DONE, "signal") if self._is_stopping else []

    # --- the agent itself

    def drain(self, now: float) -> list[Effect]:
        """Take no new job, and exit once there is none."""
        if self._is_draining or self._phase is Phase.OVER:
            return []
        self._is_draining = True
        if self._job is None:
            return self._leave("drained")
        if self._phase is not Phase.REGISTERED:
            return []
        return [Send(AgentStatus(active_jobs=self.active_jobs, draining=True))]

    def stop(self, now: float) -> list[Effect]:
        """Exit soon: end the step at once, report it if there is time."""
        job = self._job
        if self._is_stopping or self._phase is Phase.OVER:
            return []
        self._is_draining = self._is_stopping = True
        if job is None or job.phase is JobPhase.ACKED or self._is_dying:
            return self._leave("signal")
        self._timers.set(Timer.STOP, now + STOP_SECONDS)
        if job.phase is JobPhase.FINISHED:
            return [] if self._phase is Phase.REGISTERED else self._leave("signal")
        job.is_stopped = True
        return [StopStep(job.job_id, STOP_GRACE_SECONDS)]

    def tick(self, now: float) -> list[Effect]:
        """Let time act; call it at `next_deadline`."""
        effects: list[Effect] = []
        for timer in self._timers.due(now):
            effects += self._ring(timer, now)
        return effects

    def _ring(self, timer: Timer, now: float) -> list[Effect]:
        match timer:
            case Timer.RETRY:
                return self._connect()
            case Timer.HANDSHAKE:
                reason = f"not registered within {HANDSHAKE_SECONDS:g} s"
                return [Disconnect(CloseCode.TIMEOUT, reason)]
            case Timer.SILENCE:
                return [Disconnect(CloseCode.HEARTBEAT, f"nothing heard for {SILENCE_SECONDS:g} s")]
            case Timer.HEARTBEAT:
                self._arm_heartbeat(now)
                return [Send(Heartbeat(active_jobs=self.active_jobs))]
            case Timer.FLUSH:
                job = self._job
                return self._flush(now) if job is not None and job.outbox.has_unsent else []
            case Timer.IDLE:
                return self._leave("done" if self._jobs_done else "idle")
            case Timer.STEP_TIMEOUT:
                return self._time_out()
            case Timer.ORPHAN:
                return self._exit(ExitCode.ORPHANED, "orphaned")
            case Timer.STOP:
                return self._leave("signal")
            case _:
                assert_never(timer)

    # --- messages

    def _handle_handshake(self, message: CoordinatorMessage, now: float) -> list[Effect]:
        match message:
            case ClaimCredentialsResponse() if self._phase is Phase.CLAIMING:
                return self._take_credentials(message)
            case AuthSuccess() if self._phase is Phase.AUTHENTICATING:
                return self._send_register()
            case AuthFailure(reason=reason):
                return self._exit(ExitCode.REFUSED, f"authentication failed: {reason}")
            case RegisterAck() if self._phase is Phase.REGISTERING:
                return self._registered(message, now)
            case JobCancel() if self._phase is Phase.REGISTERING:
                return self._cancel(message, now)
            case ErrorMessage(code=code, message=text):
                return [Note("coordinator.error", f"{code} {text}")]
            case _:
                return []

    def _handle_registered(self, message: CoordinatorMessage, now: float) -> list[Effect]:
        match message:
            case AgentExit():
                return self.drain(now)
            case CoordinatorsChanged(coordinators=urls):
                self.route.registered(urls)
                return []
            case RegisterAck():
                return self._registered(message, now)
            case ErrorMessage(code=code, message=text):
                return [Note("coordinator.error", f"{code} {text}")]
            case Unsupported(what=what):
                return [Note("coordinator.unsupported", what)]
            case _:
                return self._handle_job(message, now)

    def _handle_job(self, message: CoordinatorMessage, now: float) -> list[Effect]:
        match message:
            case JobDispatch():
                return self._offered(message)
            case JobStart():
                return self._start_step(message, now)
            case JobCancel():
                return self._cancel(message, now)
            case LogAck(job_id=job_id, stream=stream, offset=offset):
                if self._job is not None and self._job.job_id == job_id:
                    self._job.outbox.acknowledge(stream, offset)
                return []
            case JobStatusAck(job_id=job_id):
                return self._status_acknowledged(job_id, now)
            case _:
                return []

    def _take_credentials(self, answer: ClaimCredentialsResponse) -> list[Effect]:
        given = answer.credentials
        if given is None:
            if answer.retryable:
                return [Disconnect(CloseCode.GOING_AWAY, f"claim code not redeemed: {answer.error}")]
            return self._exit(ExitCode.REFUSED, f"claim code refused: {answer.error}")
        self._token = given.agent_token
        labels = [*given.labels, *self._settings.self_labels]
        self._register = structs.replace(self._register, agent_id=given.agent_id, labels=labels, scaler_managed=True)
        self.route.learn([given.orchestrator_url] if given.orchestrator_url else [])
        self._phase = Phase.AUTHENTICATING
        return [Send(AuthRequest(token=self._token))]

    def _registered(self, ack: RegisterAck, now: float) -> list[Effect]:
        self._phase = Phase.REGISTERED
        self._ack = ack
        self.route.registered(ack.coordinators)
        self._timers.clear(Timer.HANDSHAKE, Timer.ORPHAN)
        self._arm_heartbeat(now)
        self.heard(now)
        effects: list[Effect] = [Send(ConfigAck())]
        if self._is_draining:
            effects.append(Send(AgentStatus(active_jobs=self.active_jobs, draining=True)))
        if self._job is not None:
            verdicts = {verdict.job_id: verdict for verdict in ack.jobs}
            effects += self._resume(self._job, verdicts.get(self._job.job_id), now)
        return effects + self._wait(now)

    def _resume(self, job: HeldJob, verdict: JobVerdict | None, now: float) -> list[Effect]:
        match None if verdict is None else verdict.action:
            case "resume" | "start" if verdict is not None:
                job.outbox.rewind(stdout_offset=verdict.stdout_offset, stderr_offset=verdict.stderr_offset)
                return self._flush(now)
            case _:
                return self._drop(job, now)

    def _offered(self, offer: JobDispatch) -> list[Effect]:
        if self._job is not None and self._job.job_id == offer.job_id:
            return [Send(JobAck(job_id=offer.job_id))]
        if self._job is not None or self._is_draining:
            reason = "draining" if self._is_draining else "busy"
            return [Send(JobReject(job_id=offer.job_id, reason=reason))]
        self._timers.clear(Timer.IDLE)
        self._job = HeldJob(offer.job_id, offer.run_id)
        return [Send(JobAck(job_id=offer.job_id))]

    def _start_step(self, order: JobStart, now: float) -> list[Effect]:
        job = self._job
        if job is None or job.job_id != order.job_id:
            reason = "the agent does not hold this job"
            return [Send(JobStatusReport(job_id=order.job_id, state="failed", reason=reason))]
        if job.phase is not JobPhase.ACKED:
            return []
        limit = self._settings.log_bytes_max if order.max_log_bytes is None else order.max_log_bytes
        outbox = Outbox(
            limit_bytes=max(0, limit), window_bytes=self._settings.window_bytes, drop=self._settings.drops_output
        )
        job.start(outbox, timeout_ms=order.timeout_ms or self._settings.step_timeout_ms)
        if self._is_dying:
            self._next_start = order
            return []
        return self._begin(job, order, now)

    def _begin(self, job: HeldJob, order: JobStart, now: float) -> list[Effect]:
        self._timers.set(Timer.STEP_TIMEOUT, now + job.timeout_ms / 1000)
        return [StartStep(order)]

    def _cancel(self, message: JobCancel, now: float) -> list[Effect]:
        job = self._job
        if job is None or job.job_id != message.job_id or job.phase is JobPhase.FINISHED:
            return []
        job.is_cancelled = True
        if job.phase is JobPhase.ACKED or self._is_dying:
            self._next_start = None
            job.end(StepEnd(error="cancelled before it started"))
            return self._flush(now)
        grace_seconds = min(max(0, message.grace_ms) / 1000, CANCEL_GRACE_SECONDS_MAX)
        return [StopStep(job.job_id, 0.0 if message.force else grace_seconds)]

    def _status_acknowledged(self, job_id: str, now: float) -> list[Effect]:
        job = self._job
        if job is None or job.job_id != job_id:
            return []
        return self._job_over(now) if job.phase is JobPhase.FINISHED else self._drop(job, now)

    # --- parts

    def _connect(self) -> list[Effect]:
        self._phase = Phase.CONNECTING
        self._connections += 1
        return [Connect(self.route.url)]

    def _send_register(self) -> list[Effect]:
        self._phase = Phase.REGISTERING
        held = [] if self._job is None else [self._job.ref()]
        message = structs.replace(self._register, in_flight_jobs=held, connection_number=self._connections)
        return [Send(message)]

    def _flush(self, now: float) -> list[Effect]:
        job = self._job
        if job is None:
            return []
        self._timers.set(Timer.FLUSH, now + FLUSH_SECONDS)
        effects: list[Effect] = [Send(chunk) for chunk in job.outbox.take(job.job_id)]
        if job.final is not None:
            effects.append(Send(job.final))
        return effects

    def _drop(self, job: HeldJob, now: float) -> list[Effect]:
        self._next_start = None
        if job.phase is not JobPhase.RUNNING or self._is_dying:
            return self._job_over(now)
        self._is_dying = True
        return [StopStep(job.job_id, 0.0), *self._job_over(now)]

    def _time_out(self) -> list[Effect]:
        job = self._job
        if job is None or job.phase is not JobPhase.RUNNING:
            return []
        job.timed_out = True
        return [StopStep(job.job_id, TIMEOUT_GRACE_SECONDS)]

    def _job_over(self, now: float) -> list[Effect]:
        self._job = None
        self._jobs_done += 1
        self._timers.clear(Timer.FLUSH, Timer.STEP_TIMEOUT)
        return self._wait(now)

    def _wait(self, now: float) -> list[Effect]:
        """Decide how long to wait for the next job, if there is none."""
        self._timers.clear(Timer.IDLE)
        if self._job is not None:
            return []
        if self._is_stopping:
            return self._leave("signal")
        if self._is_draining:
            return self._leave("drained")
        if self._phase is not Phase.REGISTERED:
            return []
        seconds = leaves_after(
            self._ack,
            scaler_managed=self._ack.scaler_managed or self._register.scaler_managed,
            jobs_done=self._jobs_done,
            patience=self._settings.patience,
        )
        if seconds == 0.0:
            return self._leave("done")
        if seconds is not None:
            self._timers.set(Timer.IDLE, now + seconds)
        return []

    def _leave(self, reason: str) -> list[Effect]:
        """Say good-bye and exit."""
        farewell: list[Effect] = [Send(AgentLeaving(reason=reason))] if self._phase is Phase.REGISTERED else []
        return farewell + self._exit(ExitCode.DONE, reason)

    def _exit(self, code: ExitCode, reason: str) -> list[Effect]:
        self._phase = Phase.OVER
        self._timers.clear(*Timer)
        return [Exit(code, reason)]

    def _arm_heartbeat(self, now: float) -> None:
        self._timers.set(Timer.HEARTBEAT, now + max(HEARTBEAT_SECONDS_MIN, self._ack.heartbeat_ms / 1000))

    def _arm_orphan(self, now: float) -> None:
        if self._settings.orphan_seconds is not None:
            self._timers.set(Timer.ORPHAN, now + self._settings.orphan_seconds)
