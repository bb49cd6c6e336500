"""The object graph of one coordinator, over whatever store, clock and backends it is given.

The program (`apps.coordinator`) gives it the real ones, a simulation gives it simulated ones; everything between
is the same.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from kici.apps.cluster import Cluster
from kici.apps.counting import Counting
from kici.apps.eventing import Eventing
from kici.apps.given import Given
from kici.apps.housekeeping import JobEnds, keep_house
from kici.apps.workers import WorkerParts
from kici.decide.admit import Book
from kici.decide.backoff import BackoffSettings
from kici.domain import knobs
from kici.domain.agent import AgentKind, AgentToken
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, InstanceId, JobId
from kici.domain.spawn import Spawn
from kici.observe.metrics import Metrics
from kici.services.absences import Absences
from kici.services.access_log import AccessLog
from kici.services.agent_connection import FrameWork
from kici.services.agent_sessions import AgentSessions
from kici.services.claim_store import ClaimStore
from kici.services.container_spawn import ContainerSpawn, JobRefuser
from kici.services.demand_index import DemandIndex
from kici.services.dispatcher import Dispatcher
from kici.services.drain_state import DrainState
from kici.services.elector import Elector
from kici.services.explain import Explain
from kici.services.instance_heartbeat import InstanceHeartbeat
from kici.services.job_lifecycle import JobLifecycle
from kici.services.job_service import JobService
from kici.services.job_start import JobStarts
from kici.services.job_watch import JobWatch
from kici.services.launch_failures import LaunchFailures
from kici.services.log_store import LogStore
from kici.services.machine_pools import MachinePools
from kici.services.orphan_sweeper import OrphanSweeper
from kici.services.pending_scale_sweeper import PendingScaleSweeper
from kici.services.queue_sweeper import QueueSweeper
from kici.services.recovery import Recovery
from kici.services.registration import Registration
from kici.services.registry import AgentRegistry
from kici.services.reload import Reload, ReloadReport, warm_pools
from kici.services.scaler_manager import ScalerManager
from kici.services.scaler_runtime import ScalerRuntime, reserved
from kici.services.secret_box import SecretBox
from kici.services.settings import LiveSettings, SettingsRefresh
from kici.services.shared_deferrals import SharedDeferrals
from kici.services.shutdown import Shutdown
from kici.services.spawn_book import SpawnBook
from kici.services.spawn_story import SpawnStories
from kici.services.spawner import Spawner
from kici.services.stale_spawn_sweeper import StaleSpawnSweeper
from kici.services.teardown import Teardown
from kici.services.tokens import Tokens
from kici.services.warm_pool import WarmPoolManager
from kici.services.workflows import EventSecrets
from kici.wire.codec import encode

STATIC_GRACE_MS: Final = 120_000
"""How long a static agent may stay away with a job: twice its longest reconnect delay."""


class Coordinator:
    """One coordinator: its services, and their start and end in order."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.instance_id: InstanceId = given.instance.id
        self.metrics = Metrics()
        self.drain = DrainState()
        self.settings = LiveSettings(store=given.store, clock=given.clock, configured=given.configured)
        self.tokens = Tokens(store=given.store, clock=given.clock, entropy=given.entropy)
        self.secrets = SecretBox(store=given.store, sealer=given.sealer, clock=given.clock)
        self.claims = ClaimStore(store=given.store, mints=self.tokens, clock=given.clock, entropy=given.entropy)
        self.event_secrets = EventSecrets(box=self.secrets, store=given.store, sealer=given.sealer)
        self.access_log = AccessLog(store=given.store)
        self.logs = LogStore(store=given.store, entropy=given.entropy, metrics=self.metrics)
        self.watch = JobWatch()
        self.registry = AgentRegistry()
        self.demands = DemandIndex(given.store)
        self.book = Book()
        self.spawns = SpawnBook()
        self.machine_pools = MachinePools(
            ledger=given.ledger, caps=lambda: self.manager.fleet.caps.machine_pools, clock=given.clock
        )
        self._work_with_jobs()
        self._scale()
        self._keep_warm()
        self._meet_agents()
        self.events = Eventing(self, retired=self._retired, note=self._note)
        self.counting = Counting(self)
        self._sweep()
        self.events.lead()
        self.cluster = Cluster(self)
        self.workers = WorkerParts(self)
        self._end()
        self.is_recovered = False

    # ------------------------------------------------------------------ wiring

    def _work_with_jobs(self) -> None:
        given = self.given
        self.dispatcher = Dispatcher(
            store=given.store,
            registry=self.registry,
            demands=self.demands,
            drain=self.drain,
            supervisor=given.supervisor,
            clock=given.clock,
            instance_id=self.instance_id,
            ack_ms=partial(self.settings.peek, knobs.DISPATCH_ACK_TIMEOUT_MS),
        )
        self.lifecycle = JobLifecycle(
            store=given.store,
            registry=self.registry,
            dispatcher=self.dispatcher,
            starts=JobStarts(secrets=self.event_secrets, log_bytes_max=given.log_bytes_max),
            watch=self.watch,
            instance_id=self.instance_id,
        )
        self.jobs = JobService(
            store=given.store,
            dispatcher=self.dispatcher,
            lifecycle=self.lifecycle,
            watch=self.watch,
            supervisor=given.supervisor,
            clock=given.clock,
            entropy=given.entropy,
            queue_depth_max=partial(self.settings.peek, knobs.QUEUE_MAX_DEPTH),
            queue_timeout_ms=partial(self.settings.peek, knobs.QUEUE_TIMEOUT_MS),
        )

    def _scale(self) -> None:
        given = self.given
        self.failures = LaunchFailures(clock=given.clock, settings=self._backoff, on_failure=self._count_failure)
        self.teardown = Teardown(
            store=given.store,
            jobs=given.store,
            book=self.book,
            machine_pools=self.machine_pools,
            spawns=self.spawns,
            supervisor=given.supervisor,
            clock=given.clock,
            instance_id=self.instance_id,
        )
        self.deferrals = SharedDeferrals(
            store=given.store,
            clock=given.clock,
            settings=self._backoff,
            is_needed=lambda: self.events.has_event_scalers(),
        )
        self.failures.shared_refusal = self.deferrals.refusal
        self.stories = SpawnStories(write=self.logs.notes, supervisor=given.supervisor, clock=given.clock)
        self.manager = ScalerManager(
            fleet=given.fleet,
            spawner=self._spawner(),
            stories=self.stories,
            book=self.book,
            machine_pools=self.machine_pools,
            spawns=self.spawns,
            failures=self.failures,
            teardown=self.teardown,
            supervisor=given.supervisor,
            drain=self.drain,
            clock=given.clock,
            on_refusal=self.metrics.spawn_refusals.inc,
        )
        self.pending = PendingScaleSweeper(
            store=given.store,
            demands=self.demands,
            dispatcher=self.dispatcher,
            registry=self.registry,
            manager=self.manager,
            drain=self.drain,
            clock=given.clock,
            interval_seconds=given.sweep_seconds,
            on_redispatch=lambda trigger: self.metrics.redispatch.labels(trigger=trigger).inc(),
        )
        self.dispatcher.scale = self.manager
        self.lifecycle.computes = JobEnds(self)
        self.teardown.capacity_freed = self.pending.capacity_freed
        self.manager.retry_later = self.pending.retry_in
        self.machine_pools.capacity_freed = self.pending.capacity_freed
        self.teardown.closing = self.registry.close

    def _spawner(self) -> Spawner:
        given = self.given
        spawner = Spawner(
            store=given.store,
            mint=self._mint if given.authenticates_agents else None,
            book=self.book,
            machine_pools=self.machine_pools,
            spawns=self.spawns,
            failures=self.failures,
            teardown=self.teardown,
            supervisor=given.supervisor,
            clock=given.clock,
            entropy=given.entropy,
            instance_id=self.instance_id,
            deadline_ms=partial(self.settings.peek, knobs.SCALER_SPAWN_TIMEOUT_MS),
            stories=self.stories,
            images=ContainerSpawn(secrets=self.secrets),
            refuse=JobRefuser(store=given.store, lifecycle=self.lifecycle, instance_id=self.instance_id).refuse,
            deferrals=self.deferrals,
            lock_wait_ms=given.lock_wait_ms,
        )
        spawner.cap_lock_failed = lambda reason: self.metrics.cap_lock_failures.labels(reason=reason).inc()
        return spawner

    def _keep_warm(self) -> None:
        given, configuration = self.given, self.given.configuration
        entries = given.fleet.router.entries
        self.pools = WarmPoolManager(
            pools=() if configuration is None else warm_pools(configuration.config, entries),
            store=given.store,
            registry=self.registry,
            spawns=self.spawns,
            book=self.book,
            manager=self.manager,
            drain=self.drain,
            clock=given.clock,
            gauges=self.metrics,
        )
        self.pending.crowded = self.pools.crowded
        self.reload: Reload | None = None
        if configuration is not None:
            self.reload = Reload(
                config=configuration.config,
                read=configuration.read,
                builder=configuration.builder,
                host=configuration.host,
                manager=self.manager,
                pools=self.pools,
                spawns=self.spawns,
                clock=given.clock,
                on_result=lambda result: self.metrics.config_reloads.labels(result=result).inc(),
                capacity_changed=self.pending.capacity_freed,
            )
            self.teardown.all_gone = self.reload.agent_gone

    def _meet_agents(self) -> None:
        given = self.given
        self.absences = Absences(
            store=given.store,
            dispatcher=self.dispatcher,
            lifecycle=self.lifecycle,
            clock=given.clock,
            compute_gone=self.manager.agent_gone,
            condemn=self.manager.condemn,
        )
        self.registration = Registration(
            store=given.store,
            registry=self.registry,
            dispatcher=self.dispatcher,
            lifecycle=self.lifecycle,
            absences=self.absences,
            computes=self.manager,
            drain=self.drain,
            clock=given.clock,
            instance_id=self.instance_id,
            requires_token=given.authenticates_agents,
            coordinators=lambda: self.cluster.hand_over.addresses(),
        )
        self.sessions = AgentSessions(
            tokens=self.tokens if given.authenticates_agents else None,
            store=given.store,
            registry=self.registry,
            registration=self.registration,
            absences=self.absences,
            computes=self.manager,
            work=FrameWork(
                clock=given.clock,
                registry=self.registry,
                lifecycle=self.lifecycle,
                logs=self.logs,
                claims=self.claims,
                encode=encode,
            ),
            drain=self.drain,
            supervisor=given.supervisor,
            clock=given.clock,
            entropy=given.entropy,
            grace_ms=self.grace_ms,
        )
        self.tokens.on_revoked(self.sessions.revoked)
        self.recovery = Recovery(
            store=given.store,
            fleet=given.fleet,
            book=self.book,
            machine_pools=self.machine_pools,
            spawns=self.spawns,
            teardown=self.teardown,
            absences=self.absences,
            clock=given.clock,
            instance_id=self.instance_id,
            grace_ms=self.grace_ms,
            retired=self._retired,
        )

    def _sweep(self) -> None:
        given = self.given
        grace_ms = partial(self.settings.peek, knobs.UNROUTABLE_GRACE_MS)
        self.explain = Explain(
            store=given.store,
            registry=self.registry,
            manager=self.manager,
            failures=self.failures,
            unroutable_grace_ms=grace_ms,
        )
        self.queue = QueueSweeper(
            store=given.store,
            registry=self.registry,
            demands=self.demands,
            dispatcher=self.dispatcher,
            lifecycle=self.lifecycle,
            sessions=self.sessions,
            manager=self.manager,
            clock=given.clock,
            unroutable_grace_ms=grace_ms,
        )
        self.stale = StaleSpawnSweeper(
            spawns=self.spawns,
            manager=self.manager,
            clock=given.clock,
            spawn_timeout_ms=partial(self.settings.peek, knobs.SCALER_SPAWN_TIMEOUT_MS),
        )
        self.elector = Elector(
            store=given.store,
            clock=given.clock,
            entropy=given.entropy,
            instance_id=self.instance_id,
            ttl_seconds=given.leader_ttl_seconds,
        )
        self.orphans = OrphanSweeper(manager=self.manager, spawns=self.spawns)
        self.heartbeat = InstanceHeartbeat(
            store=given.store,
            clock=given.clock,
            me=given.instance,
            is_draining=lambda: self.drain.closed,
        )

    def _end(self) -> None:
        given = self.given
        self._shutdown = Shutdown(
            store=given.store,
            lifecycle=self.lifecycle,
            sessions=self.sessions,
            spawns=self.spawns,
            machine_pools=self.machine_pools,
            teardown=self.teardown,
            manager=self.manager,
            heartbeat=self.heartbeat,
            elector=self.elector,
            drain=self.drain,
            clock=given.clock,
            instance_id=self.instance_id,
        )

    # ------------------------------------------------------------------ life

    async def recover(self) -> None:
        """Before agents are accepted."""
        await self.settings.view()
        await self.cluster.peers.look()  # agents of one that is cut off right after its start need a way out, too
        await self.recovery.computes()

    async def start(self) -> None:
        """Once agents are accepted: services run, and what was interrupted waits for its agents."""
        given = self.given
        await self.heartbeat.tick()
        await self.recovery.jobs(self._is_connected)
        supervisor = given.supervisor
        supervisor.service("heartbeat", self.heartbeat.run)
        supervisor.service("election", self.elector.run)
        supervisor.service("settings", SettingsRefresh(settings=self.settings).run)
        self.cluster.start(supervisor)
        supervisor.service("sessions", self.sessions.run)
        supervisor.service("pending-scale", self.pending.run)
        supervisor.service("queue", self.queue.run)
        supervisor.service("stale-spawns", self.stale.run)
        supervisor.service("warm-pools", self.pools.run)
        supervisor.service("orphans", self.orphans.run)
        supervisor.service("machine-pools", self.machine_pools.run)
        if self.reload is not None:
            supervisor.service("retirement", self.reload.run)
        keep_house(self)
        self.events.start()
        self.workers.start(supervisor)
        supervisor.start("grace-after-restart", self._end_of_grace())
        self.is_recovered = True
        self.pending.capacity_freed()

    async def reload_scalers(self) -> ReloadReport:
        """Take over the scalers files as they are now."""
        if self.reload is None:
            return ReloadReport(outcome="rejected", problems=("this coordinator was started without scalers files",))
        self.orphans.nudge()
        report = await self.reload.reload()
        await self.machine_pools.tick()
        return report

    async def _end_of_grace(self) -> None:
        await self.given.clock.sleep(self.grace_ms(True) / 1000)  # noqa: FBT003 - scaler-made agents
        try:
            await self.recovery.expire(self._is_connected, self.cluster.own_rows.is_elsewhere)
        except StoreDown:
            self.given.supervisor.start("grace-after-restart", self._end_of_grace())

    async def shutdown(self, *, keep_agents: bool) -> None:
        """End in order, within bounded time."""
        await self._shutdown.run(keep_agents=keep_agents)
        await self.workers.links.leave()

    # ------------------------------------------------------------------ small answers

    def _is_connected(self, agent_id: AgentId) -> bool:
        return self.registry.get(agent_id) is not None

    def _backoff(self) -> BackoffSettings:
        return BackoffSettings(
            base_ms=self.settings.peek(knobs.SCALER_PROVISION_BACKOFF_BASE_MS),
            max_ms=self.settings.peek(knobs.SCALER_PROVISION_BACKOFF_MAX_MS),
            failures_max=self.settings.peek(knobs.SCALER_PROVISION_MAX_CONSECUTIVE_FAILURES),
        )

    def _count_failure(self, backend_type: str, is_bound: bool) -> None:  # noqa: FBT001 - a label value
        self.metrics.spawn_failures.labels(backend=backend_type, bound=str(is_bound).lower()).inc()

    def grace_ms(self, scaler_managed: bool) -> int:  # noqa: FBT001 - the question itself
        return self.settings.peek(knobs.AGENT_RECONNECT_GRACE_MS) if scaler_managed else STATIC_GRACE_MS

    def _retired(self, row: Spawn) -> ScalerRuntime | None:
        configuration = self.given.configuration
        return None if configuration is None else configuration.builder.build_retired(row)

    def _mint(self, agent_id: AgentId, labels: Sequence[str], gate: frozenset[str]) -> tuple[AgentToken, str]:
        return self.tokens.new_agent_token(
            kind=AgentKind.EPHEMERAL,
            labels=frozenset(labels),
            gate=gate,
            agent_id=agent_id,
            expires_in_ms=self.settings.peek(knobs.AGENT_TOKEN_TTL_MS),
        )

    def _note(self, job_id: JobId, text: str) -> None:
        self.given.supervisor.start(f"note.{job_id}", self.logs.note(job_id, text))

    def work_of(self, agent_id: str) -> dict[str, str]:
        """The job of an agent, as fields of a log record; empty: none that is known here."""
        tracked = self.spawns.get(AgentId(agent_id))
        agent = self.registry.get(AgentId(agent_id))
        if tracked is not None and tracked.story_of is not None:
            run = {} if tracked.story_run is None else {"run_id": tracked.story_run}
            return {"job_id": tracked.story_of, **run}
        job = None if agent is None else next(filter(None, reversed(agent.jobs.values())), None)
        return {} if job is None else {"job_id": job.id, "run_id": job.run_id}

    def render_metrics(self) -> bytes:
        """The scrape answer; derived gauges are read now."""
        self.metrics.agents_active.set(len(self.registry))
        self.metrics.draining.set(int(self.drain.draining))
        self.events.publish()
        self.counting.publish()
        fleet = self.manager.fleet
        self.metrics.set_reserved(reserved(self.book, fleet), self.machine_pools.usage(), scalers=fleet.runtimes)
        return self.metrics.render()
