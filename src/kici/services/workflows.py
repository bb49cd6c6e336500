"""Event-driven workflows: applied, listed and deleted by people; started by events; explained when they fail."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from kici.domain.access import Actor
from kici.domain.document import SubmitRun
from kici.domain.errors import Misconfigured, NotFound
from kici.domain.event import SCALE_UP, EventId, Payload, StoredEvent, sealing_place
from kici.domain.ids import DEFAULT_ORG, JobId, OrgId, RunId
from kici.domain.job import Demand, Job, JobStatus
from kici.domain.secret import SecretRef
from kici.domain.workflow import (
    EVENT_CONTEXT,
    Registration,
    RegistrationKind,
    jobs_of,
    read_workflow,
    run_for,
    secrets_of,
)
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.event_store import EventStore
from kici.ports.sealer import Sealer
from kici.ports.store import JobFilter, JobStore, LogStorage, Submitted
from kici.services.secret_box import SecretMissing

LISTED_MAX: Final = 10_000
TAIL_BYTES: Final = 64 * 1024
LINE_CHARS_MAX: Final = 300
_BAD: Final = frozenset({JobStatus.FAILED, JobStatus.TIMED_OUT, JobStatus.UNROUTABLE, JobStatus.CANCELLED})


class Runs(Protocol):
    """Who starts runs that nobody submitted."""

    async def start_run(self, request: SubmitRun, *, by: str, run_id: RunId | None, key: str | None) -> Submitted: ...


class Store(EventStore, JobStore, LogStorage, Protocol):
    """What workflows read and write."""


class Workflows:
    def __init__(
        self, *, store: Store, runs: Runs, clock: Clock, served_by: Callable[[Demand, str], str | None]
    ) -> None:
        """`served_by(demand, ref)`: the event scaler that would serve a demand and asks workflow `ref` for machines."""
        self._store = store
        self._runs = runs
        self._clock = clock
        self._served_by = served_by

    async def apply(self, raw: object, actor: Actor) -> Registration:
        """Take a document over, in place of the one with the same ref.

        Raises `Faulty`, `Misconfigured` for a provisioning job that could only run on what it provisions, or `Denied`
        for secrets that the actor's own jobs may not name.
        """
        ref, kind, events = read_workflow(raw)
        assert isinstance(raw, dict)
        if kind is RegistrationKind.WORKFLOW and SCALE_UP in events:
            self._check_circle(ref, raw)
        registration = Registration(
            ref=ref,
            kind=kind,
            events=events,
            document=raw,
            applied_by=actor.name,
            updated_at=self._clock.now(),
        )
        actor.check_secrets(secrets_of(registration))
        await self._store.put_registration(registration)
        emit(Event.WORKFLOW_APPLIED, ref=ref, kind=kind, events=list(events), by=actor.name)
        return registration

    async def workflows(self) -> list[Registration]:
        return await self._store.registrations(limit=LISTED_MAX)

    async def delete(self, ref: str) -> None:
        if not await self._store.delete_registration(ref):
            raise NotFound(f"no workflow {ref}")
        emit(Event.WORKFLOW_DELETED, ref=ref)

    async def start(self, registration: Registration, event: StoredEvent, *, run_id: RunId | None) -> Submitted:
        """Start the run of an event: the one with this id, or (None) one that is never started twice."""
        request = run_for(registration, event)
        key = event.id if run_id is None else None
        return await self._runs.start_run(request, by=f"workflow {registration.ref}", run_id=run_id, key=key)

    async def why_failed(self, run_id: RunId) -> str:
        """What to tell of a run that did not succeed: its first bad job, and the last line that it printed."""
        for job in sorted(await self._store.jobs(JobFilter(run_id=run_id, limit=100)), key=lambda job: job.seq):
            if job.status in _BAD:
                return await self._why(job)
        return f"run {run_id} did not succeed"

    async def _why(self, job: Job) -> str:
        reason = job.reason or (f"exit code {job.exit_code}" if job.exit_code is not None else job.status.value)
        if job.last_provisioning_error and job.started_at is None:
            reason = f"{reason}: {job.last_provisioning_error}"
        last = await self._last_line(job.id)
        return f"job {job.id} ({job.name}) {job.status}: {reason}" + (f": {last}" if last else "")

    async def _last_line(self, job_id: JobId) -> str:
        chunks = await self._store.read_log(job_id, after=0, bytes_max=TAIL_BYTES)
        text = b"".join(chunk.data for chunk in chunks).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:LINE_CHARS_MAX] if lines else ""

    def _check_circle(self, ref: str, raw: Payload) -> None:
        for job in jobs_of(ref, raw, SCALE_UP).jobs:
            scaler = self._served_by(job.demand, ref)
            if scaler is not None:
                raise Misconfigured(
                    f"job {job.name} of {ref} would run on machines of scaler {scaler}, which asks {ref} for them: "
                    "none would ever be made.  Give the job labels that another scaler or an agent of yours has"
                )


class Secrets(Protocol):
    async def resolve(self, org: OrgId, refs: Iterable[SecretRef]) -> dict[SecretRef, str]: ...


class EventSecrets:
    """Values of secret references, those to the sealed fields of an event among them.

    Such references are made by us only: submitted documents that name a reserved context are refused.
    """

    def __init__(self, *, box: Secrets, store: EventStore, sealer: Sealer) -> None:
        self._box = box
        self._store = store
        self._sealer = sealer

    async def resolve(self, org: OrgId, refs: Iterable[SecretRef]) -> dict[SecretRef, str]:
        asked = list(refs)
        values = await self._box.resolve(org, [ref for ref in asked if ref.context != EVENT_CONTEXT])
        for ref in asked:
            if ref.context == EVENT_CONTEXT:
                values[ref] = await self._field(ref)
        return values

    async def resolve_default(self, ref: SecretRef) -> str:
        """One stored secret of the default org."""
        return (await self._box.resolve(DEFAULT_ORG, [ref]))[ref]

    async def _field(self, ref: SecretRef) -> str:
        emission_id, _, field = ref.key.rpartition(".")
        fields = await self.fields(EventId(emission_id))
        if field not in fields:
            raise SecretMissing(f"{field} of event {emission_id} is erased: the event is handled or expired")
        return fields[field]

    async def fields(self, emission_id: EventId) -> dict[str, str]:
        """The sealed fields of an event; empty when there are none (any more)."""
        sealed = await self._store.sealed_fields(emission_id)
        return {} if sealed is None else self.opened(emission_id, sealed)

    def opened(self, emission_id: EventId, sealed: bytes) -> dict[str, str]:
        return msgspec.json.decode(self._sealer.open(sealed, place=sealing_place(emission_id)), type=dict[str, str])
