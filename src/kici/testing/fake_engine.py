"""A container engine under the contract of real ones: images say what becomes of containers made of them.

The engine outlives the clients of one coordinator: `FakeEngine` is a client, `EngineRoom` is what it talks to.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Final

from kici.decide.container_plan import AGENT
from kici.decide.isolate import SENDERS_MAP
from kici.domain.container import ContainerFile, ContainerSpec, NetworkSpec, RegistryAuth, with_tag
from kici.domain.errors import Conflict, NotFound, Retryable
from kici.ports.engine import (
    ContainerInfo,
    EngineAddress,
    EngineDown,
    EngineEvent,
    EngineInfo,
    EngineKind,
    EngineRefused,
    ImageInfo,
    ImageRefused,
    OnProgress,
    Ready,
)

ADDRESS: Final = EngineAddress(url="unix:///fake/docker.sock", kind=EngineKind.DOCKER, is_local=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageScript:
    """An image, and what its containers do."""

    output: tuple[str, ...] = ()
    """Lines that a container prints when it starts."""
    lives_seconds: float | None = None
    """When it ends by itself; None: when it is ended."""
    exit_code: int = 0
    oom: bool = False
    refuses: str = ""
    """Why the engine will not start it."""
    create_seconds: float = 0.0
    start_seconds: float = 0.0
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    passwd: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InRegistry:
    """What a registry does when somebody pulls."""

    script: ImageScript = field(default_factory=ImageScript)
    log_in: tuple[str, str] | None = None
    """User and password that it wants."""
    failures: int = 0
    """How many pulls fail before one succeeds."""
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class FakeContainer:
    id: str
    spec: ContainerSpec
    script: ImageScript
    address: str
    is_running: bool = False
    is_connected: bool = True
    """To the network that it was made for."""
    exit_code: int | None = None
    output: list[str] = field(default_factory=list)
    files: dict[str, ContainerFile] = field(default_factory=dict)
    given: bytes = b""
    printed: asyncio.Event = field(default_factory=asyncio.Event)
    death: asyncio.TimerHandle | None = None


class EngineRoom:
    """Images, containers, volumes and networks.  Tests put things here, and end and break them."""

    def __init__(self) -> None:
        self.images: dict[str, ImageScript] = {}
        self.registry: dict[str, InRegistry] = {}
        self.pulls: list[str] = []
        self.containers: dict[str, FakeContainer] = {}
        self.networks: dict[str, NetworkSpec] = {}
        self.volume_labels: dict[str, Mapping[str, str]] = {}
        self.volume_files: dict[str, dict[str, bytes]] = {}
        self.archives_put: list[str] = []
        self.put_fails: list[str] = []
        """Reasons; each makes one unpacking of an archive fail half-way."""
        self.is_down = False
        self.folder: str | None = "/fake"
        self.pids: dict[str, int] = {}
        """Of the containers of these names, while they run."""
        self.listeners: list[asyncio.Queue[EngineEvent | None]] = []
        self._numbers = itertools.count(1)

    def add(self, spec: ContainerSpec, script: ImageScript) -> FakeContainer:
        number = next(self._numbers)
        made = FakeContainer(f"{number:064x}", spec, script, f"172.30.{number // 256}.{number % 256}")
        self.containers[made.id] = made
        for bind in spec.binds:
            source = bind.split(":")[0]
            if not source.startswith("/"):
                self.volume_files.setdefault(source, {})
        return made

    def find(self, handle: str) -> FakeContainer | None:
        for one in self.containers.values():
            if handle in (one.id, one.spec.name):
                return one
        return None

    def begin(self, one: FakeContainer) -> None:
        one.is_running = True
        one.output += one.script.output
        one.printed.set()
        self.tell(one, "start")
        if one.script.lives_seconds is not None:
            loop = asyncio.get_running_loop()
            one.death = loop.call_later(one.script.lives_seconds, self.end, one, one.script.exit_code)

    def end(self, one: FakeContainer, exit_code: int) -> None:
        if one.is_running:
            one.is_running = False
            one.exit_code = exit_code
            one.printed.set()
            self.tell(one, "die")
        if one.death is not None:
            one.death.cancel()

    def remove(self, one: FakeContainer) -> None:
        self.end(one, 137)
        self.containers.pop(one.id, None)
        self.tell(one, "destroy")

    def tell(self, one: FakeContainer, action: str) -> None:
        for listener in self.listeners:
            listener.put_nowait(EngineEvent(action=action, container_id=one.id, labels=dict(one.spec.labels)))

    def stop_engine(self) -> None:
        """As when it is stopped: containers die with it, nobody is told."""
        self.is_down = True
        listeners, self.listeners = self.listeners, []
        for listener in listeners:
            listener.put_nowait(None)
        for one in self.containers.values():
            self.end(one, 137)

    def start_engine(self) -> None:
        self.is_down = False

    def agents(self) -> set[str]:
        return {one.spec.labels[AGENT] for one in self.containers.values() if AGENT in one.spec.labels}


class FakeEngine:
    """Contract of every call: `ports.engine.Engine`."""

    def __init__(self, room: EngineRoom, address: EngineAddress = ADDRESS) -> None:
        self._room = room
        self._address = address
        self.is_closed = False

    @property
    def address(self) -> EngineAddress:
        return self._address

    async def info(self) -> EngineInfo:
        await self._up()
        return EngineInfo(version="fake", machine="x86_64", system="linux")

    async def folder(self) -> str | None:
        await self._up()
        return self._room.folder

    async def image(self, name: str) -> ImageInfo | None:
        await self._up()
        script = self._room.images.get(with_tag(name))
        if script is None:
            return None
        return ImageInfo(id=f"sha256:{name}", user=script.user, machine="x86_64", labels=script.labels)

    async def pull(self, image: str, auth: RegistryAuth | None, on_progress: OnProgress) -> None:
        await self._up()
        room, name = self._room, with_tag(image)
        room.pulls.append(name)
        offered = room.registry.get(name)
        on_progress(f"Pulling {name}")
        if offered is None:
            raise ImageRefused(f"image {image} is not in the registry")
        await asyncio.sleep(offered.seconds)
        if offered.failures >= room.pulls.count(name):
            raise Retryable(f"image {image} could not be pulled: the registry is away")
        if offered.log_in is not None and (auth is None or (auth.username, auth.password) != offered.log_in):
            raise ImageRefused(f"image {image} may not be pulled: unauthorized")
        room.images[name] = offered.script

    async def create(self, spec: ContainerSpec) -> str:
        await self._up()
        room = self._room
        script = room.images.get(with_tag(spec.image))
        if script is None:
            raise NotFound(f"no such image: {spec.image}")
        if room.find(spec.name) is not None:
            raise Conflict(f"the name {spec.name} is taken")
        made = room.add(spec, script)
        await asyncio.sleep(script.create_seconds)
        return made.id

    async def put(self, container: str, files: Sequence[ContainerFile]) -> None:
        one = await self._the(container)
        for file in files:
            one.files[file.path] = file
            for volume, inside in _volumes(one):
                if file.path.startswith(f"{inside}/") and file.content is not None:
                    self._room.volume_files[volume][file.path.removeprefix(f"{inside}/")] = file.content

    async def put_archive(self, container: str, folder: str, tar: bytes | IO[bytes]) -> None:
        one = await self._the(container)
        content = tar if isinstance(tar, bytes) else tar.read()
        await asyncio.sleep(0.1)
        for volume, inside in _volumes(one):
            if f"/{inside}" == folder:
                self._room.volume_files[volume]["archive"] = content
                self._room.archives_put.append(volume)
        if self._room.put_fails:
            raise Retryable(self._room.put_fails.pop())

    async def read(self, container: str, path: str, *, bytes_max: int) -> bytes | None:
        one = await self._the(container)
        for volume, inside in _volumes(one):
            if path.startswith(f"/{inside}/"):
                return self._room.volume_files[volume].get(path.removeprefix(f"/{inside}/"))
        if path == "/etc/passwd" and one.script.passwd is not None:
            return one.script.passwd.encode()[:bytes_max]
        return None

    async def start(self, container: str, *, given: bytes = b"", ready: Ready | None = None) -> None:
        one = await self._the(container)
        assert not given or one.spec.reads_input, "a container without a standard input is given nothing"
        if one.script.refuses:
            raise EngineRefused(f"cannot start container {container}: {one.script.refuses}")
        await asyncio.sleep(one.script.start_seconds)
        self._room.begin(one)
        if ready is not None:
            await ready()
        one.given = given

    async def connect(self, container: str, network: str) -> None:
        one = await self._the(container)
        if one.is_connected:
            raise EngineRefused(f"endpoint with name {one.spec.name} already exists in network {network}")
        await asyncio.sleep(0.01)
        one.is_connected = True

    async def disconnect(self, container: str, network: str) -> None:
        one = await self._the(container)
        assert network == one.spec.network
        one.is_connected = False

    async def inspect(self, container: str) -> ContainerInfo | None:
        await self._up()
        one = self._room.find(container)
        return None if one is None else replace(_info(one), pid=self._room.pids.get(one.spec.name))

    async def containers(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        await self._up()
        return [_info(one) for one in self._room.containers.values() if labels.items() <= one.spec.labels.items()]

    async def stop(self, container: str, grace_seconds: int) -> None:
        await self._up()
        one = self._room.find(container)
        if one is not None:
            await asyncio.sleep(0.01)
            self._room.end(one, 0)

    async def remove(self, container: str) -> bool:
        await self._up()
        one = self._room.find(container)
        if one is None:
            return False
        await asyncio.sleep(0.01)
        self._room.remove(one)
        return True

    async def logs(self, container: str, *, lines: int) -> list[str]:
        one = await self._the(container)
        return one.output[-lines:]

    async def follow(self, container: str, *, lines: int) -> AsyncIterator[str]:
        one = await self._the(container)
        told = max(0, len(one.output) - lines)
        while True:
            one.printed.clear()
            for line in one.output[told:]:
                yield line
            told = len(one.output)
            if one.exit_code is not None:
                return
            await one.printed.wait()

    async def network(self, name: str) -> str | None:
        await self._up()
        spec = self._room.networks.get(name)
        return None if spec is None else spec.bridge

    async def create_network(self, spec: NetworkSpec) -> None:
        await self._up()
        if spec.name in self._room.networks:
            raise Conflict(f"network {spec.name} is there")
        if any(other.subnet == spec.subnet for other in self._room.networks.values()):
            raise EngineRefused("pool overlaps with other one on this address space")
        self._room.networks[spec.name] = spec

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        await self._up()
        self._room.volume_labels.setdefault(name, labels)
        self._room.volume_files.setdefault(name, {})

    async def remove_volume(self, name: str) -> bool:
        await self._up()
        in_use = any(volume == name for one in self._room.containers.values() for volume, _ in _volumes(one))
        if in_use or name not in self._room.volume_files:
            return False
        del self._room.volume_files[name]
        self._room.volume_labels.pop(name, None)
        return True

    async def volumes(self, labels: Mapping[str, str]) -> list[str]:
        await self._up()
        return [name for name, has in self._room.volume_labels.items() if labels.items() <= has.items()]

    async def events(self, labels: Mapping[str, str]) -> AsyncIterator[EngineEvent | None]:
        await self._up()
        queue: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        self._room.listeners.append(queue)
        try:
            yield None
            while (event := await queue.get()) is not None:
                if labels.items() <= event.labels.items():
                    yield event
        finally:
            if queue in self._room.listeners:
                self._room.listeners.remove(queue)

    async def close(self) -> None:
        self.is_closed = True

    async def _up(self) -> None:
        await asyncio.sleep(0)
        if self._room.is_down:
            raise EngineDown(f"the container engine at {self._address.url} does not answer")

    async def _the(self, handle: str) -> FakeContainer:
        await self._up()
        one = self._room.find(handle)
        if one is None:
            raise NotFound(f"no such container: {handle}")
        return one


class FakePackets:
    """A packet filter that keeps what it is told.  Understands elements of maps and names of chains, no rules."""

    def __init__(self) -> None:
        self.scripts: list[str] = []
        self.maps: dict[tuple[str, str], dict[str, str]] = {}
        self.chains: dict[tuple[str, str], list[str]] = {}
        self.why_not: str | None = None
        self.refusal: Callable[[], Exception] | None = None

    async def apply(self, script: str) -> None:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal()
        before = {key: dict(value) for key, value in self.maps.items()}
        chains = {key: list(value) for key, value in self.chains.items()}
        try:
            for line in script.splitlines():
                self._line(line)
        except Conflict:
            self.maps, self.chains = before, chains
            raise
        self.scripts.append(script)

    async def elements(self, table: str, verdict_map: str) -> dict[str, str]:
        await asyncio.sleep(0)
        return dict(self.maps.get((table, verdict_map), {}))

    async def problem(self) -> str | None:
        return self.why_not

    def rules_of(self, table: str, chain: str) -> list[str]:
        return self.chains.get((table, chain), [])

    def addresses(self) -> set[str]:
        return {address for elements in self.maps.values() for address in elements}

    def borrowers_of(self, address: str) -> list[str]:
        """Rules for whoever sends from this address."""
        (chain,) = {elements[address] for (_, name), elements in self.maps.items() if name == SENDERS_MAP}
        (found,) = {tuple(rules) for (_, name), rules in self.chains.items() if name == chain}
        return list(found)

    def _line(self, line: str) -> None:
        verb, kind, _, table, *rest = line.split()
        match verb, kind:
            case "add", "map":
                self.maps.setdefault((table, rest[0]), {})
            case "add", "chain":
                self.chains.setdefault((table, rest[0]), [])
            case "flush", "chain":
                self._chain(table, rest[0]).clear()
            case "add", "rule":
                self._chain(table, rest[0]).append(" ".join(rest[1:]))
            case "add", "element":
                elements = self._map(table, rest[0])
                if elements.setdefault(rest[2], rest[5]) != rest[5]:
                    raise Conflict("File exists")
            case "delete", "element":
                if self._map(table, rest[0]).pop(rest[2], None) is None:
                    raise Conflict("No such file")
            case "delete", "chain":
                _ = self._chain(table, rest[0])
                del self.chains[table, rest[0]]
            case _:
                assert (verb, kind) == ("add", "table"), line

    def _chain(self, table: str, name: str) -> list[str]:
        if (table, name) not in self.chains:
            raise Conflict("No such file")
        return self.chains[table, name]

    def _map(self, table: str, name: str) -> dict[str, str]:
        if (table, name) not in self.maps:
            raise Conflict("No such file")
        return self.maps[table, name]


def _volumes(one: FakeContainer) -> list[tuple[str, str]]:
    """Named volumes and where they are, without a leading slash."""
    parts = [bind.split(":") for bind in one.spec.binds]
    return [(part[0], part[1].removeprefix("/")) for part in parts if not part[0].startswith("/")]


def _info(one: FakeContainer) -> ContainerInfo:
    on_network = one.is_running and one.is_connected and one.spec.network is not None
    return ContainerInfo(
        id=one.id,
        name=one.spec.name,
        labels=dict(one.spec.labels),
        is_running=one.is_running,
        addresses={one.spec.network: one.address} if on_network and one.spec.network is not None else {},
        exit_code=one.exit_code,
        oom_killed=one.script.oom and one.exit_code is not None,
    )
