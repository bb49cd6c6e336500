"""Where the containers of jobs live: a bridge of their own, apart from each other, behind rules where that is possible.

Rules are set between the start of a container and the moment when it is told what to run.  A bridge with rules drops
whoever has none, so agents that may not set any use another bridge.
"""

from ipaddress import IPv4Network
from typing import Final

from kici.backends.container.fencing import AgentNetwork, Fencing
from kici.decide.container_plan import MANAGED
from kici.decide.isolate import DEFAULT_POLICY
from kici.domain.container import NetworkSpec
from kici.domain.errors import Conflict, DeterministicRefusal, Retryable
from kici.domain.ids import AgentId
from kici.ports.engine import Engine, EngineRefused

JOB_NETWORK: Final = AgentNetwork(name="kici-jobs", subnet=IPv4Network("172.31.0.0/16"), bridge="kici-jobs")
OPEN_NETWORK: Final = "kici-jobs-open"
"""Of agents that set no rules; also the name of its bridge."""
NOBODY: Final = ""
"""Jobs' containers have no coordinator to reach."""


class JobNetwork:
    def __init__(self, *, engine: Engine, fencing: Fencing, is_isolated: bool) -> None:
        self._engine = engine
        self._fencing = fencing
        self._is_isolated = is_isolated
        self._address: str | None = None

    @property
    def name(self) -> str:
        return JOB_NETWORK.name if self._is_isolated else OPEN_NETWORK

    async def ensure(self) -> None:
        """The network, and its rules.  Raises `DeterministicRefusal` where they cannot be had."""
        if await self._engine.network(self.name) is None:
            try:
                await self._engine.create_network(self._wanted())
            except Conflict:
                pass  # another agent was faster
            except EngineRefused as error:
                raise DeterministicRefusal(
                    f"the network {self.name} for jobs cannot be made: {error}; free its addresses on this host, "
                    f"{JOB_NETWORK.subnet}"
                ) from error
        if self._is_isolated:
            _ = await self._fencing.ensure()

    def _wanted(self) -> NetworkSpec:
        fixed = JOB_NETWORK if self._is_isolated else None
        return NetworkSpec(
            name=self.name,
            subnet=None if fixed is None else str(fixed.subnet),
            gateway="" if fixed is None else str(fixed.gateway),
            bridge=self.name if fixed is None else fixed.bridge,
            labels={MANAGED: "true"},
            keeps_members_apart=True,
        )

    async def admit(self, container: str) -> None:
        """Let a container that runs reach what jobs may reach."""
        if not self._is_isolated:
            return
        found = await self._engine.inspect(container)
        address = None if found is None else found.addresses.get(self.name)
        if address is None:
            raise Retryable(f"container {container} has no address on {self.name}: it ended at once")
        self._address = address
        await self._fencing.admit(AgentId(container), address, DEFAULT_POLICY, NOBODY, {})

    async def dismiss(self, container: str) -> None:
        if self._address is not None:
            await self._fencing.dismiss(AgentId(container), self._address)

    async def reclaim(self) -> None:
        """Take away rules of containers that are gone."""
        if self._is_isolated:
            _ = await self._fencing.reclaim(lambda: [self._address] if self._address else [])
