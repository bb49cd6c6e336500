"""The coordinator program: settings in, a running coordinator out, an ordered end.

The only module that names the implementations that a coordinator is made of.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from aiohttp import web

from kici.adapters.clock import RealClock
from kici.adapters.data_dir import DATABASE, DataDir
from kici.adapters.entropy import SystemEntropy
from kici.adapters.no_peers import NoPeers
from kici.adapters.peer_probe import HttpPeerProbe
from kici.adapters.sealer import AesGcmSealer, parse_key
from kici.adapters.webhooks import HttpWebhooks
from kici.apps.assembly import Coordinator
from kici.apps.backends import FleetBuilder, Site, local_tools, local_zygote
from kici.apps.given import Configuration, Given
from kici.apps.provisioning import Provisioning
from kici.apps.starting import (
    address_of,
    host_ledger,
    listener_at,
    read_scalers,
    room_for_microvms,
    start_logging,
)
from kici.apps.surface import surface_of
from kici.config.environment import AgentAuth, CoordinatorSettings
from kici.config.model import ScalersConfig
from kici.domain import knobs
from kici.domain.errors import Misconfigured
from kici.domain.ids import InstanceId
from kici.domain.instance import Instance
from kici.gateway.agents import Gateway
from kici.kit.supervise import Supervisor
from kici.observe.attribution import attribute_logs
from kici.ports.peers import Notifier
from kici.ports.sealer import Sealer
from kici.ports.store import Store
from kici.services.config_watch import ConfigWatch, ReloadSignals
from kici.services.secret_box import check_key
from kici.web.app import build_app
from kici.web.logins import Logins

CLOSE_SECONDS: Final = 2.0
"""How long open HTTP requests may take to end when the program stops."""
BACKLOG: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What to tell the person who started it."""

    url: str
    login_url: str
    data_dir: Path
    notices: tuple[str, ...]


OnReady = Callable[[Ready], None]


def serve(settings: CoordinatorSettings, environ: Mapping[str, str], on_ready: OnReady) -> None:
    """Run a coordinator until TERM, INT or USR2.  Raises `KiciError` when it cannot start."""
    start_logging(settings)
    program = _Program(settings, environ, on_ready)
    if sys.platform == "win32":
        asyncio.run(program.run())
        return
    import uvloop

    uvloop.run(program.run())


class _Program:
    def __init__(self, settings: CoordinatorSettings, environ: Mapping[str, str], on_ready: OnReady) -> None:
        self._settings = settings
        self._environ = environ
        self._on_ready = on_ready
        self._clock = RealClock()
        self._entropy = SystemEntropy()
        self._stopped = asyncio.Event()
        self._keeps_agents = False
        self._zygote = local_zygote(self._clock)
        self._webhooks = HttpWebhooks(self._clock)

    def stop(self, keep_agents: bool) -> None:  # noqa: FBT001 - the one thing to say
        self._keeps_agents = keep_agents
        self._stopped.set()

    async def run(self) -> None:
        data_dir = DataDir.open(self._settings.data_dir)
        try:
            await room_for_microvms(self._settings, data_dir.path, self._clock)
            listener = listener_at(self._settings.host, self._settings.port)
            store = _open_store(self._settings, data_dir)
            try:
                await store.migrate()
                await self._serve(store, data_dir, listener)
            finally:
                await store.close()
        finally:
            data_dir.close()

    async def _serve(self, store: Store, data_dir: DataDir, listener: socket.socket) -> None:
        sealer = _sealer(self._settings, data_dir, self._entropy)
        await check_key(store, sealer)
        async with Supervisor("coordinator") as supervisor:
            coordinator = self._coordinator(store, data_dir, listener, supervisor, sealer)
            owner_token = await _owner_token(coordinator, data_dir, wanted=self._settings.bootstrap_admin_token)
            attribute_logs(coordinator.work_of)
            await coordinator.recover()
            logins = Logins(coordinator.tokens, self._clock, self._entropy)
            surface = surface_of(coordinator, version=version("kici"), stop=self.stop)
            gateway = Gateway(coordinator.sessions, clock=self._clock, tasks=supervisor)
            app = build_app(surface, logins)
            app.router.add_get("/ws", gateway.handle)
            workers = Gateway(coordinator.workers.links, clock=self._clock, tasks=supervisor)
            app.router.add_get("/ws/worker", workers.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
            await runner.setup()
            try:
                await web.SockSite(runner, listener, backlog=BACKLOG).start()
                supervisor.service("gateway", gateway.run)
                supervisor.service("workers-gateway", workers.run)
                if self._zygote is not None:
                    supervisor.start("zygote", self._zygote.open())  # so that the first job need not wait for it
                await coordinator.start()
                if self._settings.scaler_config_watch:
                    watch = ConfigWatch(
                        fingerprint=lambda: _fingerprint(self._settings),
                        reload=coordinator.reload_scalers,
                        clock=self._clock,
                    )
                    supervisor.service("config-watch", watch.run)
                self._listen_to_signals(coordinator, supervisor)
                url = f"http://{address_of(listener, self._settings.host)}"
                with data_dir.endpoint(url):
                    self._announce(url, logins, owner_token, data_dir)
                    await self._stopped.wait()
                    await coordinator.shutdown(keep_agents=self._keeps_agents)
            finally:
                await runner.cleanup()
                await self._webhooks.close()
                if self._zygote is not None:
                    await self._zygote.close()

    def _coordinator(
        self, store: Store, data_dir: DataDir, listener: socket.socket, supervisor: Supervisor, sealer: Sealer
    ) -> Coordinator:
        settings = self._settings
        config = read_scalers(settings)
        if not isinstance(config, ScalersConfig):
            raise Misconfigured("\n".join(config))
        url = settings.orchestrator_url or f"ws://{address_of(listener, settings.host)}/ws"

        site = Site(
            data_dir=data_dir.path,
            environ=self._environ,
            url=url,
            clock=self._clock,
            supervisor=supervisor,
            on_exit=lambda agent_id, how: coordinator.sessions.compute_ended(agent_id, how),
            tools=local_tools(self._clock, self._zygote),
            instance_id=data_dir.instance_id(self._entropy),
            provisioning=Provisioning(
                find_events=lambda: coordinator.events.emitter,
                find_claims=lambda: coordinator.claims,
                entropy=self._entropy,
            ),
            addresses=store,
            socket_wait_ms=lambda: coordinator.settings.peek(knobs.FIRECRACKER_API_SOCKET_WAIT_MS),
        )
        builder = FleetBuilder(site)

        async def read() -> ScalersConfig | tuple[str, ...]:
            found = await asyncio.to_thread(read_scalers, settings)
            if isinstance(found, ScalersConfig):
                builder.network = found.firecracker
            return found

        coordinator = Coordinator(
            Given(
                store=store,
                clock=self._clock,
                entropy=self._entropy,
                supervisor=supervisor,
                sealer=sealer,
                instance=self._instance(data_dir.instance_id(self._entropy), settings.cluster_address or url),
                fleet=builder.fleet(config),
                notifier=self._notifier(settings, data_dir.instance_id(self._entropy)),
                configuration=Configuration(config=config, read=read, builder=builder, host=site.host),
                ledger=host_ledger(settings, self._environ, data_dir.instance_id(self._entropy)),
                configured=_configured(settings),
                authenticates_agents=settings.agent_auth is AgentAuth.TOKEN,
                leader_ttl_seconds=settings.cluster_leader_ttl_ms / 1000,
                sweep_seconds=settings.scaler_pending_sweep_interval_ms / 1000,
                addresses=(settings.cluster_address or url,),
                webhooks=self._webhooks,
                probe=HttpPeerProbe(),
                deep_queue_jobs=settings.queue_backpressure_threshold,
                lock_wait_ms=settings.db_pool_acquire_timeout_ms,
            )
        )
        return coordinator

    def _instance(self, id: InstanceId, address: str) -> Instance:
        now = self._clock.now()
        return Instance(
            id=id, role="coordinator", version=version("kici"), address=address, started_at=now, last_beat_at=now
        )

    def _notifier(self, settings: CoordinatorSettings, instance_id: InstanceId) -> Notifier:
        if settings.database_url is None:
            return NoPeers()
        from kici.stores.postgres.notifier import PostgresNotifier

        return PostgresNotifier(settings.database_url, clock=self._clock, name=instance_id)

    def _announce(self, url: str, logins: Logins, owner_token: str, data_dir: DataDir) -> None:
        code, _ = logins.code(owner_token)
        self._on_ready(
            Ready(
                url=url,
                login_url=f"{url}/login?code={code}",
                data_dir=data_dir.path,
                notices=self._settings.notices,
            )
        )

    def _listen_to_signals(self, coordinator: Coordinator, supervisor: Supervisor) -> None:
        if sys.platform == "win32":
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, False)  # noqa: FBT003 - end the agents
        loop.add_signal_handler(signal.SIGUSR2, self.stop, True)  # noqa: FBT003 - keep the agents
        reloads = ReloadSignals(reload=coordinator.reload_scalers, clock=self._clock)
        supervisor.service("reload-at-signals", reloads.run)
        loop.add_signal_handler(signal.SIGHUP, reloads.signal)


def _fingerprint(settings: CoordinatorSettings) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the scalers files."""
    main, folder = settings.scaler_config_path, settings.scaler_config_dir
    files = [] if main is None else [main]
    if folder is not None and folder.is_dir():
        files += sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists())


def _open_store(settings: CoordinatorSettings, data_dir: DataDir) -> Store:
    """The embedded store, unless a database is named.  Drivers are imported when they are used."""
    if settings.database_url is None:
        from kici.stores.sqlite.open import open_sqlite

        return open_sqlite(str(data_dir.path / DATABASE))
    from kici.stores.postgres.open import open_postgres

    return open_postgres(
        settings.database_url,
        pool_max=settings.db_pool_max,
        acquire_timeout_seconds=settings.db_pool_acquire_timeout_ms / 1000,
        statement_timeout_seconds=settings.db_statement_timeout_ms / 1000,
    )


def _sealer(settings: CoordinatorSettings, data_dir: DataDir, entropy: SystemEntropy) -> Sealer:
    former = _key(settings.secret_key_old, settings.secret_key_file_old, "KICI_SECRET_KEY_OLD")
    key = _key(settings.secret_key, settings.secret_key_file, "KICI_SECRET_KEY")
    if key is None:
        key = parse_key(data_dir.secret_key(entropy), source=f"{data_dir.path}/secret-key")
    return AesGcmSealer(key, entropy, former=former)


def _key(key: str | None, file: Path | None, name: str) -> bytes | None:
    """A key that is given, itself or in a file."""
    if key is not None:
        return parse_key(key, source=name)
    if file is None:
        return None
    try:
        text = file.read_text()
    except OSError as error:
        raise Misconfigured(f"{name}: cannot read {file}: {error}") from error
    return parse_key(text, source=str(file))


async def _owner_token(coordinator: Coordinator, data_dir: DataDir, *, wanted: str | None) -> str:
    """The owner's token of this data directory; made at the first start, or `wanted` by the operator."""
    current = data_dir.owner_token()
    fresh = await coordinator.tokens.owner_token(current, of=coordinator.instance_id, wanted=wanted)
    if fresh is not None:
        data_dir.write_owner_token(fresh)
    return fresh or current or ""


def _configured(settings: CoordinatorSettings) -> dict[str, int]:
    """Settings of the program that are the defaults of live ones."""
    return {name: getattr(settings, name) for name in knobs.KNOBS if hasattr(settings, name)}
