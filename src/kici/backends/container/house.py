"""One engine as all scalers of this process share it: its client, its pulls, its runtime volume, its network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kici.backends.container.fencing import DEFAULT_NETWORK, AgentNetwork, Fencing
from kici.backends.container.flights import Flights
from kici.backends.container.images import Images
from kici.backends.container.room import DiskRoom, FreeBytes
from kici.backends.container.runtime import FindArchive, Runtimes
from kici.kit.supervise import Supervisor
from kici.ports.clock import Clock
from kici.ports.engine import Engine, EngineAddress, EngineAt
from kici.ports.network import PacketFilter

PortOf = Callable[[int], str | None]
"""This host's end of the link to the network of a process of a container; None: it cannot be told."""


@dataclass(slots=True, kw_only=True, eq=False)
class House:
    engine: Engine
    images: Images
    runtimes: Runtimes
    room: DiskRoom
    fencing: Fencing | None
    """None: the engine is on another machine, whose packet filter is not ours."""
    port_of: PortOf


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTools:
    """How container backends reach the world."""

    engine_at: EngineAt
    packets: PacketFilter
    find_archive: FindArchive
    clock: Clock
    supervisor: Supervisor
    environment: Mapping[str, str] = field(repr=False)
    """The coordinator's own."""
    resolvers: Callable[[], Sequence[str]]
    """Name servers of this host, now."""
    network: AgentNetwork = DEFAULT_NETWORK
    port_of: PortOf = lambda _: None
    free_bytes: FreeBytes | None = None
    """None: nobody looks after the engine's disk."""


class Houses:
    """By address.  A house lives as long as the program."""

    def __init__(self, tools: ContainerTools) -> None:
        self._tools = tools
        self._houses: dict[EngineAddress, House] = {}

    def at(self, address: EngineAddress) -> House:
        house = self._houses.get(address)
        if house is None:
            house = self._houses[address] = self._make(address)
        return house

    def _make(self, address: EngineAddress) -> House:
        tools = self._tools
        engine = tools.engine_at(address)
        flights = Flights(tools.supervisor)
        fencing = Fencing(engine=engine, packets=tools.packets, network=tools.network, resolvers=tools.resolvers)
        runtimes = Runtimes(engine=engine, flights=flights, clock=tools.clock, find_archive=tools.find_archive)
        return House(
            engine=engine,
            images=Images(engine=engine, flights=flights, clock=tools.clock),
            runtimes=runtimes,
            room=DiskRoom(engine=engine, flights=flights, runtimes=runtimes, free_bytes=tools.free_bytes),
            fencing=fencing if address.is_local else None,
            port_of=tools.port_of,
        )
