"""The worker program: settings in, a host that spawns for its coordinators out, an ordered end."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Final, Never
from urllib.parse import urlsplit

from aiohttp import ClientSession, TCPConnector, web

from kici.adapters.clock import RealClock
from kici.adapters.data_dir import DataDir
from kici.adapters.entropy import SystemEntropy
from kici.adapters.files import RealFiles
from kici.adapters.worker_keys import FileWorkerKeys
from kici.apps.backends import FleetBuilder, Site, local_tools, local_zygote
from kici.apps.provisioning import Provisioning
from kici.apps.starting import (
    address_of,
    host_ledger,
    listener_at,
    read_scalers,
    room_for_microvms,
    start_logging,
)
from kici.config.environment import CoordinatorSettings
from kici.config.model import BackendType, ScalersConfig
from kici.decide.pool import Pool
from kici.domain.errors import KiciError, Misconfigured
from kici.domain.ids import AgentId, Instant
from kici.domain.resources import Shape
from kici.domain.spawn import Spawn, SpawnState
from kici.gateway.worker_relay import Relay
from kici.gateway.workers import WebSocketDialer
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.services.config_watch import ReloadSignals
from kici.services.machine_pools import MachinePools
from kici.services.reload import Reload
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.worker_agents import HostAgents
from kici.services.worker_host import WorkerHost
from kici.services.worker_links import WorkerIdentity, WorkerLinks
from kici.services.worker_records import HostRecord, HostRecords

RECORDS: Final = "worker"
"""Folder of the data directory: what is known of each agent that coordinators ordered."""
LINK_PATH: Final = "/ws/worker"
AGENTS_PATH: Final = "/ws"
CLOSE_SECONDS: Final = 2.0
LEAVE_SECONDS: Final = 20.0
LAST_WORDS_SECONDS: Final = 0.5
"""After the agents have ended: how long their last frames and ours may take to leave."""
BACKLOG: Final = 1024
_SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker is told beside the settings that it shares with coordinators."""

    join: tuple[str, ...]
    """Addresses of coordinators."""
    join_token: str | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """What to tell the person who started it."""

    name: str
    relay_url: str
    coordinators: tuple[str, ...]
    notices: tuple[str, ...]


def serve(
    settings: CoordinatorSettings,
    options: WorkerOptions,
    environ: Mapping[str, str],
    on_ready: Callable[[WorkerReady], None],
) -> None:
    """Run a worker until TERM, INT or USR2.  Raises `KiciError` when it cannot start, or no coordinator wants it."""
    start_logging(settings)
    program = _Program(settings, options, environ, on_ready)
    if sys.platform == "win32":
        asyncio.run(program.run())
        return
    import uvloop

    uvloop.run(program.run())


def link_url(address: str) -> str:
    """Where the link to a coordinator is, however its address is written.  Raises `Misconfigured`."""
    parts = urlsplit(address if "://" in address else f"ws://{address}")
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise Misconfigured(f"--join {address}: an address such as https://coordinator:4000 is expected")
    base = parts.path.rstrip("/").removesuffix("/worker").removesuffix(AGENTS_PATH)
    return f"{scheme}://{parts.netloc}{base}{LINK_PATH}"


class _Program:
    def __init__(
        self,
        settings: CoordinatorSettings,
        options: WorkerOptions,
        environ: Mapping[str, str],
        on_ready: Callable[[WorkerReady], None],
    ) -> None:
        self._settings = settings
        self._urls = tuple(dict.fromkeys(map(link_url, options.join)))
        self._join_token = options.join_token
        self._environ = environ
        self._on_ready = on_ready
        self._clock = RealClock()
        self._entropy = SystemEntropy()
        self._stopped = asyncio.Event()
        self._keeps_agents = False
        self._refused: str | None = None
        self._capacity_changed: Callable[[], None] = lambda: None
        """Tells coordinators that this host offers something else now."""
        self._zygote = local_zygote(self._clock)

    def stop(self, keep_agents: bool) -> None:  # noqa: FBT001 - the one thing to say
        self._keeps_agents = keep_agents
        self._stopped.set()

    def gave_up(self, why: str) -> None:
        """No coordinator will have this host.  What it made for them serves nobody, once it was revoked."""
        self._refused = why
        self.stop("Credential revoked" not in why)

    async def run(self) -> None:
        data_dir = DataDir.open(self._settings.data_dir)
        try:
            keys = FileWorkerKeys(data_dir, self._join_token)
            if keys.credential() is None and keys.join_token() is None:
                raise Misconfigured(
                    "this host is no worker yet: name a file with a join token by --token-file; "
                    "kici-admin join-token create, at a coordinator, makes one"
                )
            await room_for_microvms(self._settings, data_dir.path, self._clock)
            with closing(self._listener(data_dir)) as listener:
                await self._serve(data_dir, keys, listener)
        finally:
            data_dir.close()
        if self._refused is not None:
            raise Misconfigured(
                f"the coordinators refuse this worker: {self._refused}; start it again with a new join token"
            )

    def _listener(self, data_dir: DataDir) -> socket.socket:
        """At the port that agents of an earlier run were told, unless another is named."""
        listener = listener_at(self._settings.host, self._settings.port or data_dir.relay_port())
        data_dir.keep_relay_port(listener.getsockname()[1])
        return listener

    async def _serve(self, data_dir: DataDir, keys: FileWorkerKeys, listener: socket.socket) -> None:
        relay_url = f"ws://{address_of(listener, self._settings.host)}{AGENTS_PATH}"
        connector = TCPConnector(limit=0)
        async with Supervisor("worker") as supervisor, ClientSession(connector=connector) as client:
            agents = self._agents(data_dir, relay_url, supervisor)
            host = WorkerHost(agents=agents, supervisor=supervisor)
            self._capacity_changed = host.offer_again
            links = self._links(data_dir, host, keys, client)
            await agents.recover()
            relay = Relay(upstream=partial(_upstream, host, links), client=client)
            runner = await _listen(relay, listener)
            try:
                supervisor.service("look-again", agents.run)
                supervisor.service("machine-pools", self._pools.run)
                supervisor.service("retirement", self._reload.run)
                supervisor.service("link-timers", links.run_timers)
                if self._zygote is not None:
                    supervisor.start("zygote", self._zygote.open())
                for url in self._urls:
                    supervisor.service(f"link {url}", partial(links.keep_linked, url))
                self._listen_to_signals(supervisor)
                self._announce(data_dir, relay_url)
                await self._stopped.wait()
                await self._leave(host, links)
            finally:
                await runner.cleanup()
                if self._zygote is not None:
                    await self._zygote.close()

    async def _leave(self, host: WorkerHost, links: WorkerLinks) -> None:
        """Agents end first: their last words go through us."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await host.leave(keep_agents=self._keeps_agents)
        except TimeoutError:
            emit(Event.SPAWN_LEFT, error=f"agents did not end within {LEAVE_SECONDS:g} s")
        if not self._keeps_agents:
            await self._clock.sleep(LAST_WORDS_SECONDS)
        links.leave("the worker is stopped")
        await self._clock.sleep(LAST_WORDS_SECONDS)

    def _agents(self, data_dir: DataDir, relay_url: str, supervisor: Supervisor) -> HostAgents:
        config = read_scalers(self._settings)
        if not isinstance(config, ScalersConfig):
            raise Misconfigured("\n".join(config))
        _check(config)
        instance_id = data_dir.instance_id(self._entropy)

        def ended(agent_id: AgentId, how: str) -> None:
            agents.ended(agent_id, how)

        site = Site(
            data_dir=data_dir.path,
            environ=self._environ,
            url=relay_url,
            clock=self._clock,
            supervisor=supervisor,
            on_exit=ended,
            tools=local_tools(self._clock, self._zygote),
            instance_id=instance_id,
            provisioning=Provisioning(find_events=_nowhere, find_claims=_nowhere, entropy=self._entropy),
        )
        builder = FleetBuilder(site)
        fleet = builder.fleet(config)
        self._pools = MachinePools(
            ledger=host_ledger(self._settings, self._environ, instance_id),
            caps=lambda: agents.fleet.caps.machine_pools,
            clock=self._clock,
        )
        agents = HostAgents(
            host_id=instance_id,
            fleet=fleet,
            pools=self._pools,
            records=HostRecords(RealFiles(), data_dir.path / RECORDS),
            supervisor=supervisor,
            clock=self._clock,
            url_for=partial(_url_for, relay_url),
            retired=lambda record: builder.build_retired(_row(record)),
        )
        self._reload = Reload(
            config=config,
            read=partial(self._read, builder),
            builder=builder,
            host=site.host,
            manager=agents,
            pools=_NoPools(),
            spawns=agents.holdings,
            clock=self._clock,
            on_result=lambda result: None,
            capacity_changed=lambda: self._capacity_changed(),
        )
        return agents

    def _links(self, data_dir: DataDir, host: WorkerHost, keys: FileWorkerKeys, client: ClientSession) -> WorkerLinks:
        return WorkerLinks(
            host=host,
            urls=self._urls,
            dialer=WebSocketDialer(client),
            keys=keys,
            identity=WorkerIdentity(
                worker_id=data_dir.instance_id(self._entropy), name=self._name(data_dir), version=version("kici")
            ),
            clock=self._clock,
            entropy=self._entropy,
            gave_up=self.gave_up,
        )

    def _name(self, data_dir: DataDir) -> str:
        """Hosts of a fleet may share a name, but not this."""
        return f"{socket.gethostname().partition('.')[0]}-{data_dir.instance_id(self._entropy)[:4]}"

    def _announce(self, data_dir: DataDir, relay_url: str) -> None:
        clear = [url for url in self._urls if url.startswith("ws://") and not _is_loopback(url)]
        notices = [f"the link to {url} is not encrypted; wss:// is, behind a proxy with a certificate" for url in clear]
        self._on_ready(
            WorkerReady(
                name=self._name(data_dir),
                relay_url=relay_url,
                coordinators=self._urls,
                notices=(*self._settings.notices, *notices),
            )
        )

    def _listen_to_signals(self, supervisor: Supervisor) -> None:
        if sys.platform == "win32":
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, False)  # noqa: FBT003 - end the agents
        loop.add_signal_handler(signal.SIGUSR2, self.stop, True)  # noqa: FBT003 - keep the agents
        reloads = ReloadSignals(reload=self._reload_scalers, clock=self._clock)
        supervisor.service("reload-at-signals", reloads.run)
        loop.add_signal_handler(signal.SIGHUP, reloads.signal)

    async def _reload_scalers(self) -> None:
        """Take over the scalers files as they are now."""
        _ = await self._reload.reload()
        await self._pools.tick()

    async def _read(self, builder: FleetBuilder) -> ScalersConfig | tuple[str, ...]:
        found = await asyncio.to_thread(read_scalers, self._settings)
        if isinstance(found, ScalersConfig):
            try:
                _check(found)
            except Misconfigured as error:
                return (str(error),)
            builder.network = found.firecracker
        return found


class _NoPools:
    """A worker keeps none."""

    def configure(self, pools: Sequence[Pool]) -> None:
        pass


async def _listen(relay: Relay, listener: socket.socket) -> web.AppRunner:
    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "agents": relay.connections})

    app = web.Application()
    app.router.add_get(AGENTS_PATH, relay.handle)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    return runner


def _upstream(host: WorkerHost, links: WorkerLinks, agent_id: AgentId | None) -> str | None:
    """An agent is best served by the coordinator that ordered it, else by any that we are linked to."""
    owner = None if agent_id is None else host.owner_of(agent_id)
    url = links.url_of(owner)
    return None if url is None else url.removesuffix(LINK_PATH) + AGENTS_PATH


def _url_for(relay_url: str, runtime: ScalerRuntime, agent_id: AgentId) -> str:
    """Where an agent connects to: here, with its name, unless its scaler says otherwise."""
    url = runtime.orchestrator_url
    return f"{url}?agent={agent_id}" if url == relay_url else url


def _check(config: ScalersConfig) -> None:
    """What a host without a database cannot do."""
    for entry in config.scalers:
        if entry.type is BackendType.EVENT:
            raise Misconfigured(
                f"scaler {entry.name}: a worker makes agents on its own host, and events are sent by coordinators; "
                "move the entry to the file of a coordinator"
            )


def _row(record: HostRecord) -> Spawn:
    """As much of a spawn as a retired scaler is made from."""
    return Spawn(
        agent_id=record.agent_id,
        scaler=record.scaler,
        backend_type=record.backend_type,
        state=SpawnState.REGISTERED,
        label_set=record.label_set,
        labels=record.label_set,
        gate=frozenset(),
        shape=Shape(),
        machine_pool=record.machine_pool,
        provisioning_targets=(),
        roles=None,
        token_id=None,
        owner_instance_id=record.owner,
        spawned_at=Instant(record.reserved_at),
    )


def _is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")


def _nowhere() -> Never:
    raise KiciError("a worker sends no events")
