"""A random walk over a store: seeded calls of every kind, right ones and stale ones.

Two stores that are walked with one seed must answer every call alike, and each must keep the rules on its way.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, is_dataclass
from random import Random
from typing import Any

from kici.domain.errors import Conflict
from kici.domain.ids import ClassId, ConnectionId, InstanceId, JobId, RunId
from kici.domain.job import JOB_MOVES, TERMINAL, JobStatus, NewJob, Outcome
from kici.domain.logs import NewChunk, Stream
from kici.domain.moves import sources
from kici.domain.spawn import SERVING
from kici.ports.store import JobFilter, Offer, Store
from kici.testing.builders import a_new_job, a_new_run, a_reservation, a_session, a_spawn, an_agent_token
from kici.testing.contracts.store_rules import a_claim, after, agent

AGENTS = 6
LABELS = ("x", "y", "z")
UNLIKE = frozenset({"seq", "oldest_seq", "position", "revoked_at"})
"""Fields that count what a store tried, or hold its own time."""

Call = Callable[[Store], Awaitable[object]]


def plain(value: object) -> object:
    """A value without the fields in which two stores may differ."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.name not in UNLIKE}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


class Walk:
    """Draws calls.  What it draws depends on the seed alone, never on an answer."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._now = 0
        self._runs: list[RunId] = []
        self._jobs: list[JobId] = []
        self._classes: set[ClassId] = set()
        self._kinds: list[Callable[[], Call]] = [
            *[self._submit] * 4,
            *[self._claim_oldest] * 4,
            *[self._claim_job] * 2,
            *[self._start] * 5,
            *[self._finish] * 5,
            *[self._requeue] * 2,
            *[self._recover, self._resume, self._cancel_job, self._cancel_run],
            *[self._expire, self._provisioning_error, self._mark, self._clear, self._expire_unroutable],
            *[self._insert_spawn] * 2,
            *[self._register] * 2,
            *[self._end_spawn, self._delete_spawn, self._release, self._prune],
            *[self._append] * 2,
            *[self._read] * 3,
        ]

    def draw(self) -> tuple[str, Call]:
        """A name for people, and the call."""
        self._now += self._random.choice((0, 0, 1, 5))
        kind = self._random.choice(self._kinds)
        return kind.__name__, kind()

    async def do(self, call: Call, store: Store) -> object:
        try:
            return plain(await call(store))
        except Conflict:
            return "conflict"

    async def see(self, store: Store) -> object:
        """All there is."""
        return plain(
            [
                await store.jobs(JobFilter(limit=10_000)),
                await store.runs(before=None, limit=10_000),
                await store.waiting_classes(limit=100),
                await store.counts_by_status(),
                await store.spawns(owner=None, limit=1000),
                await store.sessions(instance_id=None, limit=1000),
                await store.agent_tokens(limit=1000),
            ]
        )

    # --- what the calls are about

    def _agent(self) -> Any:
        return agent(self._random.randrange(AGENTS))

    def _job(self) -> JobId:
        recent = self._jobs[-12:] if self._random.random() < 0.8 else self._jobs
        return self._random.choice(recent or [JobId("unknown")])

    def _run(self) -> RunId:
        return self._random.choice(self._runs[-6:] or [RunId("unknown")])

    def _instance(self) -> InstanceId:
        return InstanceId(self._random.choice(("instance-a", "instance-b")))

    def _text(self) -> str:
        return self._random.choice(("no room", "it's late", "☃ \0"))

    # --- calls

    def _submit(self) -> Call:
        number = len(self._runs)
        count = self._random.choice((1, 1, 1, 3, 5))
        jobs: list[NewJob] = []
        for n in range(count):
            needs = tuple(each.id for each in jobs if self._random.random() < 0.4)
            expires = after(self._now + self._random.randrange(60)) if self._random.random() < 0.5 else None
            claimed = self._agent() if not needs and self._random.random() < 0.1 else None
            labels = self._random.sample(LABELS, self._random.randrange(2))
            jobs.append(a_new_job(f"{number}-{n}", *labels, needs=needs, expires_at=expires, claimed_by=claimed))
        self._random.shuffle(jobs)
        run = a_new_run(id=RunId(f"run-{number}"))
        key = f"key-{self._random.randrange(40)}" if self._random.random() < 0.3 else None
        self._runs.append(run.id)
        self._jobs += [each.id for each in jobs]
        now, claim = after(self._now), a_claim(scaler="local")
        return lambda store: store.submit(run, jobs, claim=claim, idempotency_key=key, now=now)

    def _claim_oldest(self) -> Call:
        claim, now, place = a_claim(self._agent(), self._instance()), after(self._now), self._random.randrange(1, 4)

        async def call(store: Store) -> object:
            classes = [each.class_id for each in await store.waiting_classes(limit=place)]
            return await store.claim_oldest(classes, claim, now=now)

        return call

    def _claim_job(self) -> Call:
        job, claim, now = self._job(), a_claim(self._agent(), self._instance()), after(self._now)
        return lambda store: store.claim_job(job, claim, now=now)

    def _start(self) -> Call:
        """By whoever holds it, mostly."""
        job, stranger, now = self._job(), self._agent() if self._random.random() < 0.2 else None, after(self._now)

        async def call(store: Store) -> object:
            held = await store.job(job)
            by = stranger or (held and held.agent_id) or agent(0)
            return await store.start_job(job, by, now=now)

        return call

    def _finish(self) -> Call:
        status = self._random.choice(sorted(TERMINAL - {JobStatus.SKIPPED}))
        outcome = Outcome(status=status, exit_code=self._random.randrange(3), reason=self._text())
        by = self._agent() if self._random.random() < 0.3 else None
        job, now, any_of = self._job(), after(self._now), sources(JOB_MOVES, status)
        return lambda store: store.finish_job(job, outcome, agent_id=by, from_statuses=any_of, now=now)

    def _requeue(self) -> Call:
        job, now, reason, counts = self._job(), after(self._now), self._text(), self._random.random() < 0.8
        late = int(self._random.random() < 0.2)

        async def call(store: Store) -> object:
            held = await store.job(job)
            by = (held and held.agent_id) or agent(0)
            offer = Offer(job, by, None if held is None else held.offers - late)
            return await store.requeue_job(offer, reason=reason, attempts_max=2, count_attempt=counts, now=now)

        return call

    def _recover(self) -> Call:
        job, by, deadline = self._job(), self._agent(), after(self._now + 9)
        return lambda store: store.recover_job(job, by, deadline=deadline)

    def _resume(self) -> Call:
        job, by, instance = self._job(), self._agent(), self._instance()
        return lambda store: store.resume_job(job, by, instance)

    def _cancel_job(self) -> Call:
        job, reason, now = self._job(), self._text(), after(self._now)

        async def call(store: Store) -> object:
            found = await store.job(job)
            return await store.cancel(found.run_id if found else RunId("unknown"), job, reason=reason, now=now)

        return call

    def _cancel_run(self) -> Call:
        run, reason, now = self._run(), self._text(), after(self._now)
        return lambda store: store.cancel(run, None, reason=reason, now=now)

    def _expire(self) -> Call:
        limit, now = self._random.randrange(1, 4), after(self._now)
        return lambda store: store.expire_queued(limit=limit, now=now)

    def _provisioning_error(self) -> Call:
        job, text = self._job(), self._text()
        return lambda store: store.set_provisioning_error(job, text)

    def _of_a_class(self, call: Callable[[Store, ClassId], Awaitable[object]]) -> Call:
        place = self._random.randrange(4)

        async def found(store: Store) -> object:
            classes = await store.waiting_classes(limit=place + 1)
            return await call(store, classes[-1].class_id) if classes else None

        return found

    def _mark(self) -> Call:
        now = after(self._now)
        return self._of_a_class(lambda store, class_id: store.mark_unroutable(class_id, now=now))

    def _clear(self) -> Call:
        return self._of_a_class(lambda store, class_id: store.clear_unroutable(class_id))

    def _expire_unroutable(self) -> Call:
        now = after(self._now)
        return self._of_a_class(
            lambda store, class_id: store.expire_unroutable(class_id, grace_ms=4, reason="nobody", limit=3, now=now)
        )

    def _insert_spawn(self) -> Call:
        by, job, now = self._agent(), self._job() if self._random.random() < 0.8 else None, after(self._now)
        spawn = a_spawn(agent_id=by, bound_job_id=job, owner_instance_id=self._instance())
        token = an_agent_token(id=f"t-{by}", hash=f"h-{by}-{self._now}", agent_id=by)
        return lambda store: store.insert_spawn(spawn, a_reservation(spawn), token, now=now)

    def _register(self) -> Call:
        by, now = self._agent(), after(self._now)
        session = a_session(
            agent_id=by, instance_id=self._instance(), connection_id=ConnectionId(f"c{self._now}"), registered_at=now
        )
        needs, bound = self._random.random() < 0.7, a_claim(by) if self._random.random() < 0.7 else None
        return lambda store: store.register_agent(session, needs_spawn=needs, bound=bound, now=now)

    def _end_spawn(self) -> Call:
        by, now = self._agent(), after(self._now)
        return lambda store: store.end_spawn(by, reason="idle", from_states=SERVING, now=now)

    def _delete_spawn(self) -> Call:
        by = self._agent()
        return lambda store: store.delete_spawn(by)

    def _release(self) -> Call:
        by = self._agent()

        async def call(store: Store) -> object:
            session = await store.session(by)
            return session and await store.release_agent(by, session.connection_id)

        return call

    def _prune(self) -> Call:
        limit, older = self._random.randrange(1, 3), after(self._now - 60)
        return lambda store: store.prune_jobs(older_than=older, limit=limit)

    def _append(self) -> Call:
        chunks = [
            NewChunk(
                job_id=self._job(),
                stream=self._random.choice(list(Stream)),
                offset=self._random.choice((0, 0, 2, 4)),
                data=b"ab"[: self._random.randrange(1, 3)],
            )
            for _ in range(self._random.randrange(1, 4))
        ]
        now = after(self._now)
        return lambda store: store.append_log(chunks, now=now)

    def _read(self) -> Call:
        job, by, now = self._job(), self._agent(), after(self._now)
        status, instance = self._random.choice(list(JobStatus)), self._instance()
        reads: list[Call] = [
            lambda store: store.jobs(JobFilter(status=status, limit=5)),
            lambda store: store.read_log(job, after=0, bytes_max=3),
            lambda store: store.held_jobs(by),
            lambda store: store.jobs_owned_by(instance, limit=5),
            lambda store: store.overdue_acks(limit=5, now=now),
            lambda store: store.overdue_recoveries(limit=5, now=now),
            lambda store: store.spawn_for_job(job),
            lambda store: store.ended_jobs([job, JobId("unknown")]),
        ]
        return self._random.choice(reads)
