"""People and CI systems: they submit runs of several shapes, more than there is capacity for, and cancel some.

A client does what `kici submit` does: it tries again when it got no answer, with the same idempotency key if it
uses one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kici.domain.access import Actor, Role
from kici.domain.document import JobRequest, SubmitRun
from kici.domain.errors import Conflict, NotFound, StoreDown
from kici.domain.ids import DEFAULT_ORG
from kici.domain.job import TERMINAL, Demand, JobSpec
from kici.domain.resources import UNDECLARED, Ask, ResourceRequest
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.coordinator import SimCoordinator
from kici.testing.sim.ledger import Ledger
from kici.testing.sim.plan import Plan
from kici.testing.sim.trace import Trace

CLIENT: Final = Actor(name="client", role=Role.OWNER)
RETRY_SECONDS: Final = 2.0
ASKED_SECONDS_MAX: Final = 30.0
"""How long a client waits for an answer."""
WISH: Final = "a person wished it"
SECRET: Final = "deploy:token"
CLOUD_SECRET: Final = "hooks:cloud"
NO_SECRET: Final = "deploy:missing"


def _ask(cpus: float | None = None, memory: str | None = None) -> ResourceRequest:
    return ResourceRequest(requests=Ask(cpus=cpus, memory=memory))


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of job: how often, what it demands, and the longest it may wait."""

    weight: float
    labels: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    resources: ResourceRequest = UNDECLARED
    queue_seconds: float | None = None


KINDS: Final = (
    Kind(8, ()),
    Kind(8, ("linux",)),
    Kind(6, ("linux", "x64")),
    Kind(3, ("linux", "x64"), resources=_ask(cpus=2, memory="2g")),
    Kind(2, ("linux", "x64"), resources=_ask(cpus=0.5)),
    Kind(2, ("large",), resources=_ask(cpus=4)),
    Kind(3, ("linux", "gpu")),
    Kind(5, ("linux", "again")),
    Kind(4, ("linux", "quick")),
    Kind(1, ("linux", "quick"), resources=_ask(cpus=2)),
    Kind(2, ("linux", "rare")),
    Kind(2, ("metal",)),
    Kind(1, ("metal", "heavy"), queue_seconds=120),
    Kind(1, ("kici:host:static-0",)),
    Kind(2, ("linux",), exclude=("x64",)),
    Kind(1, ("no-such-label",)),
    Kind(1, ("linux", "x64"), resources=_ask(cpus=900), queue_seconds=40),
    Kind(2, ("linux", "x64"), queue_seconds=5),
)


CLOUD_KINDS: Final = (
    Kind(14, ("cloud",)),
    Kind(4, ("linux", "cloud"), queue_seconds=150),
)
"""Where there is a cloud."""


WORKER_KINDS: Final = (
    Kind(10, ("yard",)),
    Kind(3, ("linux", "yard"), queue_seconds=150),
)
"""Where there are workers."""


class Workload:
    """`reach()` is where the next request goes."""

    def __init__(
        self, plan: Plan, entropy: SeededEntropy, trace: Trace, ledger: Ledger, reach: Callable[[], SimCoordinator]
    ) -> None:
        self._plan = plan
        self._entropy = entropy
        self._trace = trace
        self._ledger = ledger
        self._reach = reach
        self._kinds: list[Kind] = [*KINDS]
        self._kinds += CLOUD_KINDS if plan.cloud_agents else ()
        self._kinds += WORKER_KINDS if plan.workers else ()
        self._runs = 0
        self._jobs = 0

    async def submit_all(self) -> None:
        """Everything, in bursts, spread over the time of the plan."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._plan.chaos_seconds * 0.8
        async with asyncio.TaskGroup() as group:
            while self._jobs < self._plan.jobs:
                left = self._plan.jobs - self._jobs
                for _ in range(1 if self._entropy.chance(0.6) else round(self._entropy.uniform(2, 8))):
                    request = self._run_request()
                    _ = group.create_task(self._submit(request), name=f"submit {request.name}")
                pause = 2 * (ends_at - loop.time()) / max(1, left)
                await asyncio.sleep(self._entropy.uniform(0, max(0.1, pause)))

    async def cancel_some(self, kind: str) -> None:
        """Cancel one job or run that is not over."""
        live = [job for job in self._ledger.jobs.values() if job.status not in TERMINAL]
        if not live:
            return
        job = self._entropy.choice(live)
        force = self._entropy.chance(0.3)
        self._trace.tell(f"somebody cancels the {kind}, force {force}", job.job_id)
        try:
            if kind == "job":
                _ = await self._reach().ask(lambda it: it.jobs.cancel_job(job.job_id, force=force, reason=WISH))
            else:
                _ = await self._reach().ask(lambda it: it.jobs.cancel_run(job.run_id, force=force, reason=WISH))
        except (ConnectionError, StoreDown, NotFound, Conflict) as error:
            self._trace.tell(f"the cancel failed: {error}", job.job_id)
        else:
            self._trace.count(f"{kind} cancelled")

    def _run_request(self) -> SubmitRun:
        self._runs += 1
        name = f"run{self._runs}"
        count = 1 if self._entropy.chance(0.7) else round(self._entropy.uniform(2, 6))
        jobs: list[JobRequest] = []
        for place in range(count):
            before = [job.key for job in jobs]
            needs = tuple(key for key in before if self._entropy.chance(0.4))
            jobs.append(self._job_request(f"{name}-{place}", needs))
        self._jobs += count
        return SubmitRun(name=name, org=DEFAULT_ORG, jobs=tuple(jobs))

    def _job_request(self, name: str, needs: tuple[str, ...]) -> JobRequest:
        kind = self._kind()
        demand = Demand(labels=frozenset(kind.labels), exclude=frozenset(kind.exclude), resources=kind.resources)
        self._ledger.demands[name] = demand
        secrets = {}
        if self._entropy.chance(0.1):
            secrets = {"TOKEN": SECRET if self._entropy.chance(0.8) else NO_SECRET}
        return JobRequest(
            key=name,
            name=name,
            demand=demand,
            spec=JobSpec(
                command=("step", name),
                timeout_ms=round(self._entropy.uniform(2000, 40_000)) if self._entropy.chance(0.1) else None,
                secrets=secrets,
            ),
            needs=needs,
            queue_timeout_ms=None if kind.queue_seconds is None else round(kind.queue_seconds * 1000),
        )

    def _kind(self) -> Kind:
        at = self._entropy.uniform(0, sum(kind.weight for kind in self._kinds))
        for kind in self._kinds:
            at -= kind.weight
            if at <= 0:
                return kind
        return KINDS[-1]

    async def _submit(self, request: SubmitRun) -> None:
        """As a client does: again until there is an answer, which a lost one may make a second time."""
        key = f"key of {request.name}" if self._entropy.chance(0.5) else None
        while True:
            try:
                async with asyncio.timeout(ASKED_SECONDS_MAX):
                    submitted = await self._reach().ask(lambda it: it.jobs.submit(request, CLIENT, key))
            except (ConnectionError, StoreDown, TimeoutError):
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for job in submitted.jobs:
                self._trace.check(job.id in self._ledger.jobs, "an accepted job is not stored", job.id)
            if key is not None:
                again = [one.job_id for one in self._ledger.jobs.values() if one.name == request.jobs[0].name]
                self._trace.check(len(again) == 1, "an idempotency key made two runs", *again)
            return
