"""Both halves over a link that is cut wherever it hurts: no byte is lost or doubled, every job ends once."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kici.wire import agent_effects
from kici.wire.agent_half import AgentHalf
from kici.wire.agent_settings import AgentSettings
from kici.wire.codec import encode
from kici.wire.coordinator_half import Authenticate, Close, CoordinatorHalf, Effect, Received, Register, Send
from kici.wire.messages import (
    AgentMessage,
    AgentRegister,
    JobAck,
    JobDispatch,
    JobStart,
    JobStatusAck,
    JobStatusReport,
    JobVerdict,
    LogAck,
    LogChunkMessage,
    RegisterAck,
)


class Store:
    """What a coordinator keeps of the one job."""

    def __init__(self) -> None:
        self.state = "queued"
        self.output = {1: b"", 2: b""}
        self.final: JobStatusReport | None = None

    def append(self, chunk: LogChunkMessage) -> int:
        stored = self.output[chunk.stream]
        assert chunk.offset <= len(stored), "a gap"
        overlap = len(stored) - chunk.offset
        assert stored[chunk.offset :].startswith(chunk.data[:overlap]), "other bytes than before"
        self.output[chunk.stream] = stored + chunk.data[overlap:]
        return len(self.output[chunk.stream])

    def finish(self, report: JobStatusReport) -> None:
        assert (report.stdout_bytes, report.stderr_bytes) == (len(self.output[1]), len(self.output[2]))
        assert self.final in (None, report), "it ended twice, differently"
        self.final = report


class World:
    """One agent, one coordinator that may die and come back, and what is on the wire between them."""

    def __init__(self, window_bytes: int) -> None:
        self.now = 0.0
        self.store = Store()
        self.starts = 0
        self.written = {1: b"", 2: b""}
        self.is_running = False
        self.is_open = False
        self.to_agent: deque[bytes] = deque()
        self.to_server: deque[bytes] = deque()
        agent_settings = AgentSettings(
            url="ws://a",
            register=AgentRegister(agent_id="a"),
            token="t",
            window_bytes=window_bytes,
            orphan_seconds=None,
        )
        self.agent = AgentHalf(agent_settings, jitter=lambda: 0.5)
        self.server = CoordinatorHalf(auth_required=True, now=0.0)
        self.do_agent(self.agent.start(self.now))

    # --- what may happen

    def connect(self) -> None:
        if not self.is_open and self.agent.phase.value == "connecting":
            self.is_open = True
            self.server = CoordinatorHalf(auth_required=True, now=self.now)
            self.do_agent(self.agent.connected(self.now))

    def cut(self) -> None:
        if self.is_open or self.agent.phase.value == "connecting":
            self.is_open = False
            self.to_agent.clear()
            self.to_server.clear()
            self.do_agent(self.agent.disconnected(1006, "cut", self.now))

    def deliver_to_agent(self) -> None:
        if self.to_agent:
            self.do_agent(self.agent.receive(self.to_agent.popleft(), self.now))

    def deliver_to_server(self) -> None:
        if self.to_server:
            self.do_server(self.server.receive(self.to_server.popleft(), self.now))

    def flow(self, frames: int) -> None:
        for _ in range(frames):
            self.deliver_to_server()
            self.deliver_to_agent()

    def write(self, stream: int, data: bytes) -> None:
        if self.is_running and self.agent.wants_output:
            self.written[stream] += data
            self.do_agent(self.agent.output(stream, data, self.now))  # type: ignore[arg-type]  # 1 or 2

    def end(self) -> None:
        if self.is_running:
            self.is_running = False
            self.do_agent(self.agent.step_ended(agent_effects.StepEnd(exit_code=0), self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do_agent(self.agent.tick(self.now))

    # --- what follows

    def do_agent(self, effects: list[agent_effects.Effect]) -> None:
        for effect in effects:
            match effect:
                case agent_effects.Send(message):
                    if self.is_open:
                        self.to_server.append(encode(message))
                case agent_effects.StartStep():
                    assert self.store.state == "running", "started before the coordinator said so"
                    self.starts += 1
                    self.is_running = True
                case agent_effects.StopStep() | agent_effects.Exit():
                    raise AssertionError(effect)
                case agent_effects.Disconnect():
                    self.cut()
                case _:
                    pass

    def do_server(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.to_agent.append(encode(message))
                case Authenticate():
                    self.do_server(self.server.authenticated("c", self.now))
                case Register(message):
                    self.register(message)
                case Received(message):
                    self.receive(message)
                case Close():
                    self.cut()
                case _:
                    pass

    def register(self, message: AgentRegister) -> None:
        verdicts = [self.verdict(ref.job_id) for ref in message.in_flight_jobs]
        self.do_server(self.server.registered(RegisterAck(agent_id="a", jobs=verdicts)))
        if any(verdict.action == "start" for verdict in verdicts):
            self.start()
        if self.store.state == "queued" or (self.store.state == "dispatched" and not verdicts):
            self.store.state = "dispatched"
            self.to_agent.append(encode(JobDispatch(job_id="j", run_id="r")))

    def verdict(self, job_id: str) -> JobVerdict:
        if self.store.final is not None:
            return JobVerdict(job_id=job_id, action="drop")
        if self.store.state == "dispatched":
            return JobVerdict(job_id=job_id, action="start")
        if self.starts == 0:  # it was committed, but the order to start was lost
            return JobVerdict(job_id=job_id, action="start")
        out, err = self.store.output[1], self.store.output[2]
        return JobVerdict(job_id=job_id, action="resume", stdout_offset=len(out), stderr_offset=len(err))

    def start(self) -> None:
        self.store.state = "running"
        self.to_agent.append(encode(JobStart(job_id="j", run_id="r", command=["x"])))

    def receive(self, message: AgentMessage) -> None:
        match message:
            case JobAck():
                if self.store.state == "dispatched":
                    self.start()
            case LogChunkMessage(stream=stream):
                offset = self.store.append(message)
                self.to_agent.append(encode(LogAck(job_id="j", stream=stream, offset=offset)))
            case JobStatusReport(state=state) if state != "running":
                self.store.finish(message)
                self.to_agent.append(encode(JobStatusAck(job_id="j")))
            case _:
                pass


STEPS = 250


def something(world: World, chance: random.Random) -> None:
    """One random event; what a link does most of the time happens most of the time."""
    match chance.randrange(20):
        case 0 | 1 | 2 | 3 | 4 | 5:
            world.write(chance.choice([1, 2]), chance.randbytes(chance.choice([1, 10, 300])))
        case 6 | 7 | 8:
            world.deliver_to_server()
        case 9 | 10 | 11:
            world.deliver_to_agent()
        case 12 | 13:
            world.flow(chance.randrange(10))
        case 14 | 15:
            world.wait(chance.choice([0.01, 0.1, 3.0]))
        case 16 | 17 | 18:
            world.connect()
        case _ if chance.random() < 0.9:
            world.cut()
        case _:
            world.end()


@settings(max_examples=500, deadline=None)
@given(window_bytes=st.sampled_from([300, 2000, 1_000_000]), seed=st.integers(0, 2**32))
def test_no_byte_is_lost_or_doubled_and_the_job_ends_once(window_bytes: int, seed: int) -> None:
    world = World(window_bytes)
    chance = random.Random(seed)
    for _ in range(STEPS):
        something(world, chance)
    # then the faults stop
    for _ in range(1000):
        world.connect()
        while world.to_agent or world.to_server:
            world.deliver_to_server()
            world.deliver_to_agent()
        if world.starts and world.is_running:
            world.end()
        if world.store.final is not None and world.agent.active_jobs == 0:
            break
        world.wait(1.0)
    assert world.starts == 1
    assert world.store.final is not None
    assert world.store.output == world.written
    assert world.agent.active_jobs == 0
