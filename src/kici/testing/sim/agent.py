"""A simulated agent: the real protocol machine between a simulated connection and a simulated step.

It does what the agent program does with the machine's effects, and three things more that the program cannot do at
will: crash, freeze and be told to end.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, assert_never

from kici.domain.ids import AgentId
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.checkers import Checkers
from kici.testing.sim.ledger import AgentTruth, Ledger
from kici.testing.sim.network import Network
from kici.testing.sim.steps import SimStep, step_script
from kici.testing.sim.trace import Trace
from kici.testing.sim_link import ABNORMAL, LinkClosed, SimEnd
from kici.wire.agent_effects import Connect, Disconnect, Effect, Exit, Note, Send, StartStep, StepEnd, StopStep
from kici.wire.agent_half import AgentHalf
from kici.wire.agent_settings import AgentSettings
from kici.wire.agent_states import Phase
from kici.wire.codec import encode
from kici.wire.messages import CloseCode, JobStart, Message, StreamNumber

PING_SECONDS: Final = 20.0
CLOSE_SECONDS: Final = 1.0
EXIT_SECONDS: Final = 0.1
"""From the decision to exit to the end of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """What agents need of the world around them."""

    network: Network
    trace: Trace
    ledger: Ledger
    checkers: Checkers
    entropy: SeededEntropy


class SimAgent:
    """One process.  `on_exit(how)` is called when it ends by itself."""

    def __init__(
        self,
        truth: AgentTruth,
        settings: AgentSettings,
        place: AgentPlace,
        *,
        on_exit: Callable[[str], None],
        wire_id: AgentId | None = None,
    ) -> None:
        """`wire_id`: what the network knows it by, where several programs have one id."""
        self.truth = truth
        self.id = truth.agent_id
        self._wire_id = wire_id or truth.agent_id
        self._place = place
        self._on_exit = on_exit
        self._half = AgentHalf(settings, jitter=lambda: place.entropy.uniform(0, 1))
        self._loop = asyncio.get_running_loop()
        self._end: SimEnd | None = None
        self._reader: asyncio.Task[None] | None = None
        self._step: SimStep | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._frozen: list[Callable[[], None]] | None = None
        self.is_alive = True
        self.present_at = -inf
        """When it was last seen connected and well, by the stopwatch of the world."""
        self.present_since: float | None = None
        """When it was first seen so, if it has been ever since."""
        self.away_seconds = 0.0
        """Since it was last seen connected and well, by the clock on the wall."""
        self.was_turned_away = False
        """At the last attempt: the store could not be asked."""
        truth.process = self

    @property
    def phase(self) -> Phase:
        return self._half.phase

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the coordinators that it knows."""
        return self._half.route.urls

    @property
    def has_step(self) -> bool:
        return self._step is not None

    @property
    def is_present(self) -> bool:
        """Registered, and what it says and is told arrives."""
        return (
            self.is_alive
            and self._frozen is None
            and self._half.phase is Phase.REGISTERED
            and self._place.network.is_intact(self._wire_id)
        )

    # --- what the world does to it

    def start(self) -> None:
        self._place.trace.tell("agent process started", self.id)
        self._apply(self._half.start(self._loop.time()))
        self._loop.call_later(PING_SECONDS, self._ping)

    def crash(self, how: str, *, silently: bool = False) -> None:
        """It is killed; `silently`: its whole machine is, so that nobody is told."""
        if self.is_alive:
            self._place.trace.tell(f"agent process died: {how}", self.id)
            self._stop_living()
            if silently:
                self._place.network.half_open(self._wire_id)
            else:
                self._place.network.cut(self._wire_id)

    def terminate(self) -> None:
        """TERM."""
        self._place.trace.tell("agent process was told to end", self.id)
        self._post(lambda: self._apply(self._half.stop(self._loop.time())))

    def freeze(self, seconds: float) -> None:
        """It does nothing for a while; what happens meanwhile waits."""
        if self.is_alive and self._frozen is None:
            self._place.trace.tell(f"agent process froze for {seconds:.1f} s", self.id)
            self._frozen = []
            self._loop.call_later(seconds, self._thaw)

    def blurt(self, message: Message) -> None:
        """Say what its protocol would not."""
        if self._end is not None and self._half.phase is Phase.REGISTERED:
            self._place.trace.tell(f"blurts out {type(message).__name__}", self.id)
            self._end.send(encode(message))

    # --- inputs

    def _post(self, act: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self._frozen is not None:
            self._frozen.append(act)
        else:
            act()

    def _thaw(self) -> None:
        waiting, self._frozen = self._frozen or [], None
        for act in waiting:
            self._post(act)

    def _tick(self) -> None:
        self._timer = None
        self._post(lambda: self._apply(self._half.tick(self._loop.time())))

    def _ping(self) -> None:
        if self.is_alive:
            self._loop.call_later(PING_SECONDS, self._ping)
            if self._end is not None and self._place.network.is_intact(self._wire_id):
                self._post(lambda: self._half.heard(self._loop.time()))

    async def _converse(self, url: str) -> None:
        """One connection, from the attempt to its end."""
        try:
            end = await self._place.network.connect(url, self._wire_id)
        except ConnectionError as error:
            self._lost(ABNORMAL, str(error))
            return
        self._end = end
        self._post(lambda: self._apply(self._half.connected(self._loop.time())))
        try:
            while True:
                self._received(await end.receive())
        except LinkClosed as closed:
            self._lost(closed.code, closed.reason)

    def _received(self, frame: bytes) -> None:
        def act() -> None:
            self._place.checkers.agent_hears(self.truth, frame)
            self._half.heard(self._loop.time())
            self._apply(self._half.receive(frame, self._loop.time()))

        self._post(act)

    def _lost(self, code: int, reason: str) -> None:
        self._end = None
        self.was_turned_away = code == CloseCode.INTERNAL
        self._post(lambda: self._apply(self._half.disconnected(code, reason, self._loop.time())))

    def _on_output(self, stream: StreamNumber, data: bytes) -> None:
        def act() -> None:
            self._place.checkers.step_wrote(self.truth, stream, data)
            self._apply(self._half.output(stream, data, self._loop.time()))

        self._post(act)

    def _on_step_end(self, end: StepEnd) -> None:
        def act() -> None:
            self._step = None
            self._apply(self._half.step_ended(end, self._loop.time()))

        self._post(act)

    # --- effects

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._do(effect)
        if self.is_alive:
            self._arm()
            if self._step is not None:
                self._step.set_reading(self._half.wants_output)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._place.checkers.agent_says(self.truth, message)
                if self._end is not None:
                    self._end.send(encode(message))
            case Connect(url):
                self._reader = self._loop.create_task(self._converse(url), name=f"connection of {self.id}")
            case Disconnect(code, reason):
                self._disconnect(code, reason)
            case StartStep(start):
                self._start_step(start)
            case StopStep(_, grace_seconds):
                if self._step is not None:
                    self._step.stop(grace_seconds)
            case Note(event, text):
                self._place.trace.tell(f"{event} {text}", self.id)
            case Exit(_, reason):
                self._exit(reason)
            case _:
                assert_never(effect)

    def _disconnect(self, code: int, reason: str) -> None:
        """Close, and give the connection up when the peer does not answer."""
        end = self._end
        if end is not None:
            end.close(code, reason)
            self._loop.call_later(CLOSE_SECONDS, self._give_up, end)

    def _give_up(self, end: SimEnd) -> None:
        if self._end is end and self._reader is not None:
            self._reader.cancel()
            self._lost(ABNORMAL, "the peer did not answer the close")

    def _start_step(self, start: JobStart) -> None:
        script = step_script(self._place.entropy, start.name)
        self._place.checkers.step_starts(self.truth, start)
        self._step = SimStep(script, on_output=self._on_output, on_end=self._on_step_end)
        if script.end.error is None:
            self._step.start()
            self._apply(self._half.step_started())
        else:
            self._loop.call_soon(self._on_step_end, script.end)

    def _exit(self, reason: str) -> None:
        """Say good-bye and end."""
        self._place.trace.tell(f"agent process exits: {reason}", self.id)
        if self._step is not None:
            self._step.vanish()
        if self._end is not None:
            self._end.close(1000, reason)
        self._loop.call_later(EXIT_SECONDS, self._exited, reason)

    def _exited(self, reason: str) -> None:
        if self.is_alive:
            self._stop_living()
            self._on_exit(f"exited: {reason}")

    def _stop_living(self) -> None:
        self.is_alive = False
        self.truth.process = None
        if self._step is not None:
            self._step.vanish()
        if self._reader is not None:
            self._reader.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        deadline = self._half.next_deadline()
        if self._timer is not None:
            if deadline == self._timer.when():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._tick)
