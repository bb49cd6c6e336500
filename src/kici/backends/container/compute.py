"""One agent in a container, as the backend tracks it, and what its container's labels tell after a restart."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kici.decide import container_plan as plan
from kici.decide.agent_output import without_tokens
from kici.domain.ids import AgentId, Instant
from kici.ports.backend import Compute, ComputeState, OnEvent
from kici.ports.engine import ContainerInfo

OUTPUT_LINES: Final = 200
"""Lines of an agent program's own output that are remembered here; its engine keeps more."""
LINE_CHARACTERS_MAX: Final = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class Tracked:
    """One compute in the backend's hands."""

    id: AgentId
    label_set: tuple[str, ...]
    spawned_at: Instant
    on_event: OnEvent | None
    """None: found again after a restart."""
    container: str = ""
    """The engine's id; empty: not made yet, or not seen since a restart."""
    is_attempted: bool = False
    """The engine was asked for a container; whether it made one may be unknown."""
    address: str | None = None
    """Where it is on the isolated network, once its rules are there."""
    state: ComputeState = ComputeState.SPAWNING
    registered: bool = False
    output: deque[str] = field(default_factory=lambda: deque(maxlen=OUTPUT_LINES))
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Its `spawn` call is over, either way."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    capture: asyncio.Task[None] | None = None

    @property
    def ref(self) -> str:
        return self.container[:12] or self.id

    @property
    def handle(self) -> str:
        """What the engine knows it by: containers are named after their agents."""
        return self.container or self.id

    def compute(self) -> Compute:
        return Compute(
            agent_id=self.id,
            label_set=self.label_set,
            ref=self.ref,
            spawned_at=self.spawned_at,
            state=self.state,
            registered=self.registered,
        )

    def printed(self, line: str) -> None:
        self.output.append(without_tokens(line)[:LINE_CHARACTERS_MAX])

    def let_go(self) -> None:
        if self.capture is not None:
            self.capture.cancel()


def tracked_again(found: ContainerInfo, *, now: Instant) -> Tracked:
    """A running container that was made before this process started."""
    told: Mapping[str, str] = found.labels
    spawned_at = told.get(plan.SPAWNED_AT, "")
    agent = Tracked(
        id=AgentId(told[plan.AGENT]),
        label_set=tuple(filter(None, told.get(plan.LABEL_SET, "").split(","))),
        spawned_at=Instant(int(spawned_at)) if spawned_at.isdigit() else now,
        on_event=None,
        container=found.id,
        state=ComputeState.RUNNING,
    )
    agent.settled.set()
    return agent


def unseen(agent_id: AgentId, *, now: Instant) -> Tracked:
    """One that must be somewhere, while the engine does not answer."""
    agent = Tracked(id=agent_id, label_set=(), spawned_at=now, on_event=None, state=ComputeState.RUNNING)
    agent.settled.set()
    return agent


def how_it_ended(found: ContainerInfo | None) -> str:
    """Follows "the container": what the engine says of its end."""
    if found is None:
        return "is gone; somebody removed it"
    if found.oom_killed:
        return "was killed because it used more memory than it may (raise resources.limits.memory of the job)"
    if found.error:
        return f"ended: {found.error}"
    return "ended" if found.exit_code is None else f"ended with exit code {found.exit_code}"
