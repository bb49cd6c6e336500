"""The isolated network of agents on this host: the bridge, its static rules, and the rules of each agent."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from kici.decide import isolate
from kici.decide.container_plan import MANAGED
from kici.domain.container import NetworkSpec
from kici.domain.errors import Conflict, DeterministicRefusal, KiciError
from kici.domain.ids import AgentId
from kici.ports.engine import Engine, EngineRefused
from kici.ports.network import PacketFilter

log = logging.getLogger(__name__)

TRIES: Final = 4
_SUBNET: Final = IPv4Network("172.30.0.0/16")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNetwork:
    """The network of all isolated agents of an engine."""

    name: str = "kici-agent-net"
    subnet: IPv4Network = _SUBNET
    bridge: str = "kici-agents"

    @property
    def gateway(self) -> IPv4Address:
        return self.subnet.network_address + 1


DEFAULT_NETWORK: Final = AgentNetwork()


class Fencing:
    """Of one engine on this host.  Several scalers, and several installations, share the network and its rules."""

    def __init__(
        self,
        *,
        engine: Engine,
        packets: PacketFilter,
        network: AgentNetwork,
        resolvers: Callable[[], Sequence[str]],
    ) -> None:
        self._engine = engine
        self._packets = packets
        self._network = network
        self._resolvers = resolvers
        self._fence: isolate.Fence | None = None
        self._making = asyncio.Lock()
        """Two who make the network at once take each other's addresses for taken."""
        self._binds = False
        """Whether frames can be filtered here: then an address belongs to a port of the bridge."""

    @property
    def network(self) -> AgentNetwork:
        return self._network

    async def ensure(self) -> isolate.Fence:
        """The network and its static rules.  Raises `DeterministicRefusal` where they cannot be had."""
        async with self._making:
            if self._fence is None:
                fence = await self._find()
                await self._lay(fence)
                self._fence = fence
            return self._fence

    async def _lay(self, fence: isolate.Fence) -> None:
        """The static rules; agents' own stay."""
        await self._packets.apply(isolate.base_script(fence))
        try:
            await self._packets.apply(isolate.bridge_script(fence) + isolate.senders_script(fence))
            self._binds = True
        except KiciError as error:  # frames pass the other rules wherever an engine has switched that on
            self._binds = False
            log.warning("fence.no_bridge_rules", extra={"kici": {"error": str(error)}})

    def forget(self) -> None:
        """Look anew next time: the engine was away, or refused."""
        self._fence = None

    async def admit(
        self,
        agent_id: AgentId,
        address: str,
        policy: isolate.Policy,
        url: str,
        names: dict[str, str],
        *,
        port: str | None = None,
    ) -> None:
        """Rules of one agent, whoever had the address before.

        `port`: its port of the bridge, where that is known: nobody else can send from its address.
        """
        fence = await self.ensure()
        needs = isolate.needs_of(url, resolvers=self._resolvers(), names=names)
        replaces: str | None = None
        for attempt in range(1, TRIES + 1):
            script = isolate.admit_script(
                fence, agent=agent_id, address=address, policy=policy, needs=needs, replaces=replaces
            )
            if self._binds:
                script += isolate.bind_script(fence, agent=agent_id, address=address, port=port, replaces=replaces)
            try:
                await self._packets.apply(script)
            except Conflict:
                if attempt == TRIES:
                    raise
                if attempt == 2:  # somebody removed our static part as well
                    await self._lay(fence)
                chain = (await self._packets.elements(fence.table, isolate.FORWARD_MAP)).get(address)
                replaces = None if chain is None else isolate.agent_of_chain(chain)
            else:
                return

    async def dismiss(self, agent_id: AgentId, address: str) -> None:
        """Take one agent's rules away; nothing when they are gone, or the address is another's by now."""
        fence = await self.ensure()
        try:
            await self._packets.apply(self._dismissal(fence, agent_id, address))
        except Conflict:
            return

    def _dismissal(self, fence: isolate.Fence, agent: str, address: str) -> str:
        script = isolate.dismiss_script(fence, agent=agent, address=address)
        return script + isolate.unbind_script(fence, agent=agent, address=address) if self._binds else script

    async def rules_of(self, agent_id: AgentId) -> str | None:
        """The address for which this agent has rules."""
        fence = await self.ensure()
        name = isolate.name_of(agent_id)
        for address, chain in (await self._packets.elements(fence.table, isolate.FORWARD_MAP)).items():
            if isolate.agent_of_chain(chain) == name:
                return address
        return None

    async def reclaim(self, tracked: Callable[[], Collection[str]]) -> int:
        """Remove the rules of addresses that nobody has: no agent of ours, no container of anybody.  How many.

        A listing that fails removes nothing.  The rules are read first: what came after that is not among them.
        """
        fence = await self.ensure()
        elements = await self._packets.elements(fence.table, isolate.FORWARD_MAP)
        if not elements:
            return 0
        before = set(tracked())
        containers = await self._engine.containers({MANAGED: "true"})
        alive = {one.addresses.get(self._network.name, "") for one in containers}
        stale = isolate.stale(elements, before | alive | set(tracked()))
        scripts = [self._dismissal(fence, agent, address) for address, agent in stale]
        if len(scripts) > 1 and await self._fits("".join(scripts)):
            return len(scripts)
        return sum([await self._fits(script) for script in scripts])

    async def _fits(self, script: str) -> bool:
        """Apply it.  False: another agent has the address by now, or somebody else was faster."""
        try:
            await self._packets.apply(script)
        except Conflict:
            return False
        return True

    async def _find(self) -> isolate.Fence:
        wanted = self._network
        bridge = await self._engine.network(wanted.name)
        if bridge is None:
            try:
                await self._engine.create_network(
                    NetworkSpec(
                        name=wanted.name,
                        subnet=str(wanted.subnet),
                        gateway=str(wanted.gateway),
                        bridge=wanted.bridge,
                        labels={MANAGED: "true"},
                    )
                )
            except Conflict:
                pass  # another orchestrator was faster
            except EngineRefused as error:
                if await self._engine.network(wanted.name) is not None:
                    return await self._find()  # another orchestrator was making it
                raise DeterministicRefusal(
                    f"the network {wanted.name} for agents cannot be made: {error}; free {wanted.subnet}, "
                    "or set networkIsolation: false on the scaler"
                ) from error
            bridge = await self._engine.network(wanted.name)
        if bridge is None:
            raise DeterministicRefusal(f"the network {wanted.name} was made and is not there; look at the engine's log")
        return isolate.Fence(network=wanted.name, bridge=bridge, gateway=wanted.gateway, subnet=wanted.subnet)
