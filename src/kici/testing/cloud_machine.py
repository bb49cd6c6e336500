"""A machine of the simulated cloud: it boots, and the agent's real protocol half trades its code and runs jobs.

It connects to any coordinator that is up, as behind a load balancer, anew each time.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, assert_never

from kici.domain.ids import JobId
from kici.testing.cloud_bench import CloudBench, Node
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_link import ABNORMAL, LinkClosed, SimWire
from kici.wire.agent_effects import Connect, Disconnect, Effect, Exit, Note, Send, StartStep, StepEnd, StopStep
from kici.wire.agent_half import AgentHalf
from kici.wire.agent_settings import AgentSettings
from kici.wire.codec import encode
from kici.wire.messages import AgentRegister, JobAck, JobStart

CONNECT_SECONDS: Final = 0.05
PING_SECONDS: Final = 20.0
STEP_SECONDS: Final = (1.0, 90.0)


class CloudMachine:
    """`started(job)` is called when it starts a step."""

    def __init__(
        self,
        bench: CloudBench,
        up: Mapping[str, Any],
        entropy: SeededEntropy,
        *,
        started: Callable[[JobId], None],
    ) -> None:
        self.agent_id: str = up["agentId"]
        self.job: JobId | None = None
        """Whose step it runs."""
        self.last_job: JobId | None = None
        """That it took last: it may not be told yet to start it, or not have told its end."""
        self.is_alive = True
        self.node: Node | None = None
        """That it is connected to, or was."""
        self._bench = bench
        self._entropy = entropy
        self._started = started
        self._half = AgentHalf(
            AgentSettings(
                url=up["orchestratorUrl"],
                register=AgentRegister(agent_id=self.agent_id, labels=list(up["labels"]), max_concurrency=1),
                claim_code=up["claimCode"],
            ),
            jitter=lambda: entropy.uniform(0, 1),
        )
        self._loop = asyncio.get_running_loop()
        self._wire: SimWire | None = None
        self._reader: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._step: asyncio.TimerHandle | None = None

    def boots(self, seconds: float) -> None:
        self._loop.call_later(seconds, self._boot)

    def ends(self) -> None:
        """Power off: its connection breaks."""
        self.is_alive = False
        self.job = None
        for handle in (self._timer, self._step):
            if handle is not None:
                handle.cancel()
        self.cut()

    def cut(self) -> None:
        if self._wire is not None:
            self._wire.cut()

    def _boot(self) -> None:
        if self.is_alive:
            self._apply(self._half.start(self._loop.time()))
            self._loop.call_later(PING_SECONDS, self._ping)

    def _ping(self) -> None:
        if self.is_alive:
            if self._wire is not None:
                self._half.heard(self._loop.time())
            self._loop.call_later(PING_SECONDS, self._ping)

    async def _converse(self) -> None:
        code, reason = ABNORMAL, "nobody is there"
        await asyncio.sleep(CONNECT_SECONDS)
        up = [node for node in self._bench.nodes if node.is_up]
        if up and self.is_alive:
            self.node = node = self._entropy.choice(up)
            wire = self._wire = SimWire(self._entropy, names=(self.agent_id, node.name))
            node.accept(wire.b)
            self._apply(self._half.connected(self._loop.time()))
            try:
                while True:
                    frame = await wire.a.receive()
                    self._half.heard(self._loop.time())
                    self._apply(self._half.receive(frame, self._loop.time()))
            except LinkClosed as closed:
                code, reason = closed.code, closed.reason
            self._wire = None
        self._apply(self._half.disconnected(code, reason, self._loop.time()))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects if self.is_alive else ():
            self._do(effect)
        if self.is_alive:
            self._arm()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                if isinstance(message, JobAck):
                    self.last_job = JobId(message.job_id)
                self._send(encode(message))
            case Connect():
                self._reader = self._loop.create_task(self._converse(), name=f"connection of {self.agent_id}")
            case Disconnect(code, reason):
                self._close(code, reason)
            case StartStep(start):
                self._start(start)
            case StopStep():
                self._stop()
            case Exit(_, reason):
                self._close(1000, reason)
                self.is_alive = False
            case Note():
                pass
            case _:
                assert_never(effect)

    def _send(self, frame: bytes) -> None:
        if self._wire is not None:
            self._wire.a.send(frame)

    def _close(self, code: int, reason: str) -> None:
        if self._wire is not None:
            self._wire.a.close(code, reason)

    def _start(self, start: JobStart) -> None:
        self.job = JobId(start.job_id)
        self._started(self.job)
        self._apply(self._half.step_started())
        seconds = self._entropy.uniform(*STEP_SECONDS)
        self._step = self._loop.call_later(seconds, self._step_over, StepEnd(exit_code=0))

    def _stop(self) -> None:
        if self._step is not None:
            self._step.cancel()
            self._loop.call_soon(self._step_over, StepEnd(signal=15))

    def _step_over(self, end: StepEnd) -> None:
        self.job = None
        self._step = None
        if self.is_alive:
            self._apply(self._half.step_ended(end, self._loop.time()))

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._half.tick(self._loop.time()))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._half.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._tick)
