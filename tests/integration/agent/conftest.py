"""A coordinator for tests and real agents."""

from collections.abc import AsyncIterator

import pytest

from kici.testing.agent_harness import AgentHarness


@pytest.fixture
async def coordinator() -> AsyncIterator[AgentHarness]:
    async with AgentHarness() as harness:
        yield harness
        assert harness.faults == []
