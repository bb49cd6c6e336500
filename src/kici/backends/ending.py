"""What ending agents is the same for every kind of compute."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.domain.spawn import ScaleDownReason
from kici.kit.finish import finish

REMEMBERED_MAX: Final = 200
"""Agents that are gone whose last output can still be asked for."""


async def to_its_end(work: Coroutine[Any, Any, None], *, seconds: float, what: str) -> None:
    """Let clean-up come to its end whatever happens to the caller.  Raises `Retryable` when it takes too long."""
    try:
        await finish(work, seconds=seconds, what=what)
    except TimeoutError as error:
        raise Retryable(str(error)) from error


async def end_all(
    agents: Iterable[AgentId], destroy: Callable[[AgentId, ScaleDownReason], Coroutine[Any, Any, None]]
) -> None:
    """End these agents side by side, because of a shutdown.  Raises `Retryable` naming every one that is left."""
    failures: list[str] = []

    async def end(agent_id: AgentId) -> None:
        try:
            await destroy(agent_id, ScaleDownReason.SHUTDOWN)
        except Retryable as error:
            failures.append(str(error))

    async with asyncio.TaskGroup() as group:
        for agent_id in list(agents):
            group.create_task(end(agent_id), name=f"end {agent_id}")
    if failures:
        raise Retryable("; ".join(sorted(failures)))


class LastOutputs:
    """The last lines of agents that are gone, of the latest of them."""

    def __init__(self) -> None:
        self._lines: OrderedDict[AgentId, list[str]] = OrderedDict()

    def keep(self, agent_id: AgentId, lines: list[str]) -> None:
        self._lines[agent_id] = lines
        while len(self._lines) > REMEMBERED_MAX:
            self._lines.popitem(last=False)

    def of(self, agent_id: AgentId) -> list[str] | None:
        """None: not known to be gone."""
        return self._lines.get(agent_id)
