"""What agent programs print, in the log of whoever made them."""

import json
import logging

import pytest

from kici.backends.agent_lines import LINES_MAX, WINDOW_SECONDS, AgentLines
from kici.domain.ids import AgentId, Instant

AGENT = AgentId("scaler-bare-metal-0badc0de")


class HandClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> Instant:
        return Instant(0)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def lines(clock: HandClock, caplog: pytest.LogCaptureFixture) -> AgentLines:
    caplog.set_level(logging.DEBUG, logger="kici.agents")
    return AgentLines(AGENT, source="container", clock=clock)


def facts(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    return [record.__dict__["kici"] for record in caplog.records if record.getMessage() == "agent.output"]


@pytest.mark.spec("scaler 39.4.1", "scaler 39.4.2")
def test_a_line_is_logged_as_the_agents_at_its_own_level(lines: AgentLines, caplog: pytest.LogCaptureFixture) -> None:
    lines.say('{"level":"warn","message":"x","service":"evil","size":3}')
    lines.say("hello")
    lines.say("[1,2]")
    origin = {"service": "agent", "agent_id": AGENT, "logs_source": "container"}
    assert facts(caplog) == [
        {**origin, "text": "x", "more": json.dumps({"size": 3})},
        {**origin, "text": "hello"},
        {**origin, "text": "[1,2]"},
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]


def test_blocks_are_put_together_to_lines(lines: AgentLines, caplog: pytest.LogCaptureFixture) -> None:
    for block in (b"one\ntw", b"o\nthr", b"ee"):
        lines.feed(block)
    assert [each["text"] for each in facts(caplog)] == ["one", "two"]
    lines.finish()
    assert [each["text"] for each in facts(caplog)] == ["one", "two", "three"]
    assert lines.read_bytes == len(b"one\ntwo\nthree")


def test_an_agent_that_prints_without_end_does_not_fill_the_log(
    lines: AgentLines, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(LINES_MAX + 50):
        lines.say(f"line {number}")
    assert len(facts(caplog)) == LINES_MAX
    clock.seconds += WINDOW_SECONDS
    lines.say("later")
    assert [each["text"] for each in facts(caplog)[LINES_MAX:]] == ["[dropped 50 lines]", "later"]
