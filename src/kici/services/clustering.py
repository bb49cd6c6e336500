"""What a coordinator does differently because others share its store.

A job waits a moment before a machine is made for it where another coordinator has an idle agent; cancels reach
agents that are connected elsewhere; an agent that came to another coordinator is not lost; a compute whose agent
ended elsewhere is taken down by the one that made it.
"""

from collections.abc import Mapping
from typing import Final, Never, Protocol

from kici.decide.prune import EVENT
from kici.domain.errors import Permanent, Retryable, StoreDown
from kici.domain.ids import AgentId, InstanceId, JobId, RunId
from kici.domain.job import Job, JobStatus
from kici.domain.peer import RequestKind
from kici.domain.spawn import SERVING, ScaleDownReason, Spawn, SpawnState
from kici.kit.supervise import Supervisor
from kici.ports.clock import Clock
from kici.ports.peers import PeerStore
from kici.ports.store import AgentStore, Cancelled, InstanceStore, JobFilter, JobStore, SpawnStore
from kici.services.job_lifecycle import JobLifecycle
from kici.services.peers import PeerRequests, PeerView
from kici.services.scaler_manager import ScalerManager
from kici.services.spawn_book import SpawnBook
from kici.services.store_outages import sits_out_outages
from kici.services.teardown import Teardown
from kici.services.tokens import Tokens

PATIENCE_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 2.0
CLEAR_SECONDS: Final = 9.0
"""Less than an agent has to acknowledge its job, whose start waits for it."""
ROWS_MAX: Final = 100_000
RUN_JOBS_MAX: Final = 1000
TOKENS_MAX: Final = 1000
INSTANCES_MAX: Final = 1000


class PatientScaling:
    """Asks the scalers at once, or a moment later where an idle agent elsewhere may be claiming the job."""

    def __init__(
        self, *, manager: ScalerManager, peers: PeerView, store: JobStore, supervisor: Supervisor, clock: Clock
    ) -> None:
        self._manager = manager
        self._peers = peers
        self._store = store
        self._supervisor = supervisor
        self._clock = clock

    def wanted(self, job: Job) -> None:
        if self._peers.has_idle(job.demand):
            self._supervisor.start(f"patience.{job.id}", self._later(job.id))
        else:
            self._manager.wanted(job)

    def gave_back(self, agent_id: AgentId, job_id: JobId) -> None:
        self._manager.gave_back(agent_id, job_id)

    async def _later(self, job_id: JobId) -> None:
        await self._clock.sleep(PATIENCE_SECONDS)
        try:
            job = await self._store.job(job_id)
        except StoreDown:
            return  # the sweep finds it
        if job is not None and job.status is JobStatus.QUEUED:
            self._manager.wanted(job)


class RemoteCancels:
    """Cancels of jobs whose agents are connected to other coordinators."""

    def __init__(
        self, *, store: JobStore, requests: PeerRequests, lifecycle: JobLifecycle, instance_id: InstanceId
    ) -> None:
        self._store = store
        self._requests = requests
        self._lifecycle = lifecycle
        self._instance_id = instance_id

    async def cancelled(
        self, run_id: RunId, job_id: JobId | None, moved: Cancelled, *, force: bool, reason: str
    ) -> None:
        """Tell every other coordinator that holds an agent with such a job."""
        told = list(moved.told)
        if force:
            jobs = await self._store.jobs(JobFilter(run_id=run_id, status=JobStatus.CANCELLING, limit=RUN_JOBS_MAX))
            told += [job for job in jobs if job_id in (None, job.id)]
        owners = {job.owner_instance_id for job in told} - {None, self._instance_id}
        for owner in sorted(owner for owner in owners if owner is not None):
            payload = {"runId": run_id, "jobId": job_id, "force": force, "reason": reason}
            await self._requests.tell(owner, RequestKind.CANCEL, payload)

    async def asked(self, payload: Mapping[str, object]) -> object:
        """The act that a request of another coordinator asks for."""
        job_id = payload.get("jobId")
        self._lifecycle.stop(
            RunId(str(payload["runId"])),
            None if job_id is None else JobId(str(job_id)),
            reason=str(payload.get("reason", "")),
            force=payload.get("force") is True,
        )
        return {}


class Store(SpawnStore, AgentStore, PeerStore, InstanceStore, Protocol):
    """What looking after one's own rows reads and writes."""

    async def held_jobs(self, agent_id: AgentId) -> list[Job]: ...


class OwnRows:
    """Rows of this coordinator that others have moved: spawns to end or registered elsewhere, revoked tokens."""

    def __init__(
        self,
        *,
        store: Store,
        peers: PeerView,
        spawns: SpawnBook,
        manager: ScalerManager,
        teardown: Teardown,
        tokens: Tokens,
        requests: PeerRequests,
        supervisor: Supervisor,
        clock: Clock,
        instance_id: InstanceId,
    ) -> None:
        self._store = store
        self._peers = peers
        self._requests = requests
        self._spawns = spawns
        self._manager = manager
        self._teardown = teardown
        self._tokens = tokens
        self._supervisor = supervisor
        self._clock = clock
        self._instance_id = instance_id

    async def run(self) -> Never:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            with sits_out_outages("looking at own rows"):
                await self.tick()

    async def tick(self) -> None:
        """One look.  Alone on the store there is nobody who moves our rows."""
        if not self._peers.others:
            return
        for token_id in await self._store.revoked_session_tokens(self._instance_id, limit=TOKENS_MAX):
            self._tokens.forget(token_id)
        for row in await self._store.spawns(owner=self._instance_id, limit=ROWS_MAX):
            tracked = self._spawns.get(row.agent_id)
            if tracked is None or tracked.is_ending:
                continue
            if row.state is SpawnState.ENDING:
                self._teardown.begin(tracked, ScaleDownReason.SHUTDOWN)
            elif row.state is SpawnState.REGISTERED and tracked.is_booting and await self.is_elsewhere(row.agent_id):
                self._manager.registered(row)  # one that is nowhere may have gone since: its deadline stands

    async def is_elsewhere(self, agent_id: AgentId) -> bool:
        """Whether an agent is connected to another coordinator, or was since: then that one waits for it."""
        session = await self._store.session(agent_id)
        if session is not None:
            return session.instance_id != self._instance_id
        held = await self._store.held_jobs(agent_id)
        return bool(held) and all(job.owner_instance_id not in (None, self._instance_id) for job in held)

    async def _delete_if_ownerless(self, agent_id: AgentId) -> None:
        """The row of a compute whose maker was forgotten waits for nobody."""
        row = await self._store.spawn(agent_id)
        if row is None or row.backend_type == EVENT or row.worker_id is not None:
            return
        known = {one.id for one in await self._store.instances(limit=INSTANCES_MAX)}
        if row.owner_instance_id not in known:
            await self._store.delete_spawn(agent_id)

    async def clear_boot_data(self, spawn: Spawn) -> None:
        """Have the maker of an agent that came here clear what that was told at its boot.

        Raises a `KiciError` when it did not say that it has, `StoreDown` among them.
        """
        maker = spawn.owner_instance_id
        answer = await self._requests.ask(
            maker, RequestKind.BOOT_DATA, {"agentId": spawn.agent_id}, seconds=CLEAR_SECONDS
        )
        if answer != {"cleared": True}:
            what = "gave no answer" if answer is None else f"answered {answer}"
            raise Retryable(f"coordinator {maker}, which made agent {spawn.agent_id}, {what}")

    async def asked_to_clear(self, payload: Mapping[str, object]) -> object:
        """The act that a request of another coordinator asks for."""
        tracked = self._spawns.get(AgentId(str(payload["agentId"])))
        if tracked is None:
            raise Permanent("this coordinator does not look after that agent")
        await self._manager.clear_boot_data(tracked.spawn)
        return {"cleared": True}

    def ended_here(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """An agent ended here that another coordinator made: ask its maker, by its row, to take the compute down."""
        self._supervisor.start(f"end.{agent_id}", self._ask_to_end(agent_id, reason))

    async def _ask_to_end(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        while True:
            try:
                await self._store.end_spawn(agent_id, reason=reason, from_states=SERVING)
                await self._delete_if_ownerless(agent_id)
                return
            except StoreDown:
                await self._clock.sleep(LOOK_SECONDS)
