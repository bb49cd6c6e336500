"""A coordinator as the HTTP API sees it: drained, stopped, asked about its peers."""

from dataclasses import dataclass, field
from typing import Final

from kici.decide.forget import ForgetOutcome, Forgotten
from kici.domain.ids import InstanceId, Instant
from kici.domain.instance import Instance
from kici.web.surface import DrainState

ME: Final = InstanceId("instance-1")
START: Final = Instant(1_750_000_000_000)


@dataclass
class FakeCoordinator:
    draining: bool = False
    running: int = 0
    stopped: list[bool] = field(default_factory=list)
    """`keep_agents` of each stop."""
    forgotten: list[tuple[str, bool]] = field(default_factory=list)
    forget_outcome: ForgetOutcome = ForgetOutcome.FORGOTTEN
    trouble: str | None = None

    async def drain_state(self) -> DrainState:
        return DrainState(draining=self.draining, jobs_running=self.running)

    async def set_draining(self, draining: bool) -> DrainState:  # noqa: FBT001  # the protocol's signature
        self.draining = draining
        return await self.drain_state()

    def stop(self, *, keep_agents: bool) -> None:
        self.stopped.append(keep_agents)

    async def forget_peer(self, peer: str, *, is_acknowledged: bool) -> Forgotten:
        self.forgotten.append((peer, is_acknowledged))
        return Forgotten(outcome=self.forget_outcome, detail="why")

    async def leader(self) -> InstanceId | None:
        return ME

    async def instances(self) -> list[Instance]:
        row = Instance(
            id=ME,
            role="coordinator",
            version="1",
            address="ws://127.0.0.1:4000/ws",
            started_at=START,
            last_beat_at=START,
        )
        return [row]

    async def not_ready(self) -> str | None:
        return self.trouble
