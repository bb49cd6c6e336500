"""What must hold at every step, checked against what was committed and what agents and machines do.

Moves come from the store's watch (`committed`), from agents (`step_starts`, `agent_says`, ...) and from machines
(`machine_made`, `machine_gone`).  The rules are written down a second time here on purpose: a checker that asked
the program's own functions would share their mistakes.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from kici.decide.admit import Book, Usage
from kici.domain.ids import AgentId, JobId, ScalerName
from kici.domain.job import JOB_MOVES, RUN_MOVES, STARTED, TERMINAL, Demand, JobStatus, RunStatus
from kici.domain.resources import Amount, Ask, Shape, parse_memory
from kici.domain.spawn import SPAWN_MOVES, SpawnState
from kici.ports.backend import SpawnOrder
from kici.testing.sim.cloud_rules import CLOUD, CloudRules
from kici.testing.sim.ledger import (
    SELF_LABELS,
    AgentTruth,
    JobTruth,
    Ledger,
    MachineTruth,
    SpawnTruth,
)
from kici.testing.sim.trace import Trace
from kici.testing.sim.watched import (
    Change,
    JobChange,
    LogChange,
    ReservationChange,
    RunChange,
    SessionChange,
    SpawnChange,
)
from kici.wire.codec import decode_from_coordinator
from kici.wire.messages import AgentRegister, JobAck, JobReject, JobStart, JobStatusAck, JobStatusReport, Message

_S = JobStatus
_BY_AGENT: Final = frozenset({_S.SUCCESS, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT})
LEARNS_SECONDS: Final = 10.0
"""Within which the store surely says what it did."""
ATTEMPTS_MAX: Final = 5


class Checkers:
    def __init__(self, ledger: Ledger, trace: Trace) -> None:
        self._ledger = ledger
        self._trace = trace
        self._check = trace.check
        self.jumps = False
        """Wall time does, so what ends at a moment may end early."""
        self.backoff_seconds = 0.0
        """For how long a scaler that refused is left alone at least."""
        self._registered_at: dict[tuple[str, str], float] = {}
        """When an agent of a scaler on a host registered last: the program may learn of it a while later."""
        self._deferred: dict[tuple[str, str], tuple[int, float, frozenset[AgentId]]] = {}
        self.may_lose: Callable[[AgentTruth], str | None] = lambda agent: None
        """Why the program may give this agent up now; None: it may not."""
        self.is_ending: Callable[[AgentId], bool] = lambda agent_id: False
        """Whether a program is taking a spawn down, be that written yet or not."""
        self.is_absent: Callable[[str], bool] = lambda host: False
        """Whether the coordinator of a host was not heard of for so long that others remove its rows."""
        self.cloud = CloudRules(ledger, trace, may_lose=lambda agent: self.may_lose(agent))

    # ------------------------------------------------------------------ the store

    def committed(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case JobChange():
                    self._job(change)
                case RunChange():
                    self._run(change)
                case SpawnChange():
                    self._spawn(change)
                case ReservationChange():
                    self._reservation(change)
                case LogChange():
                    self._output(change)
                case SessionChange():
                    self._session(change)
                case _:
                    self.cloud.committed(change)

    def _job(self, change: JobChange) -> None:
        who = (change.job_id, *(agent for agent in (change.agent_after or change.agent_before,) if agent))
        before, after = change.before, change.after
        self._trace.tell(
            f"job {before} -> {after} agent {change.agent_after} attempts {change.attempts} "
            f"exit {change.exit_code} signal {change.signal} reason {change.reason}",
            *who,
        )
        if after is None:
            self._trace.violate("a job was deleted", *who)
            return
        if before is None:
            self._job_added(change, after)
            return
        job = self._ledger.jobs[change.job_id]
        self._check(job.status is before, f"the ledger has it {job.status}, the store had it {before}", *who)
        if before is not after:
            self._check(after in JOB_MOVES[before], f"a job moved from {before} to {after}", *who)
            self._trace.count(f"job {after}")
        job.status, job.agent_id = after, change.agent_after
        if after in TERMINAL:
            if before in STARTED:
                self._job_ended(job, change)
            return
        if change.agent_before != change.agent_after:
            is_release = before is _S.DISPATCHED and after is _S.QUEUED
            self._check(after is _S.DISPATCHED or is_release, "a job changed hands while it was held", *who)
        if after is _S.DISPATCHED and before is not after:
            self._job_claimed(job)
        if after is _S.RUNNING and before is _S.DISPATCHED:
            self._job_granted(job)
        self._check(change.attempts < ATTEMPTS_MAX, f"{change.attempts} attempts, and it is not over", *who)

    def _job_added(self, change: JobChange, after: JobStatus) -> None:
        self._check(after in {_S.PENDING, _S.QUEUED, _S.DISPATCHED}, f"a job began as {after}", change.job_id)
        job = JobTruth(
            job_id=change.job_id,
            run_id=change.run_id,
            name=change.name,
            demand=self._ledger.demands[change.name],
            status=after,
            agent_id=change.agent_after,
        )
        self._ledger.jobs[change.job_id] = job
        self._trace.count("job submitted")
        if after is _S.DISPATCHED:
            self._job_claimed(job)

    def _job_claimed(self, job: JobTruth) -> None:
        assert job.agent_id is not None, job
        who = (job.job_id, job.agent_id)
        job.acked_by.discard(job.agent_id)
        agent = self._ledger.agents.get(job.agent_id)
        if agent is None:
            self._trace.violate("a job was claimed for an agent that nobody made", *who)
            return
        runs = self._ledger.coordinator_runs.get(agent.host)
        if agent.jobs_max is not None and agent.made_in_run == runs and len(self._ledger.coordinator_runs) == 1:
            self._check(agent.jobs_started < agent.jobs_max, "an agent that had its jobs was given another", *who)
        misfit = self._misfit(agent, job)
        self._check(misfit is None, f"an agent was given a job that it does not fit: {misfit}", *who)

    def _misfit(self, agent: AgentTruth, job: JobTruth) -> str | None:
        demand = job.demand
        if missing := demand.labels - agent.labels:
            return f"it lacks {sorted(missing)}"
        if excluded := demand.exclude & agent.labels:
            return f"the job excludes {sorted(excluded)}"
        if closed := agent.gate - demand.labels:
            return f"the job does not name {sorted(closed)}"
        order = agent.order
        if order is None or order.bound_job_id == job.job_id:
            return None
        has = Shape(requests=order.requests, limits=order.limits)
        return None if _declares(demand, has) else "it was made with other resources"

    def _job_granted(self, job: JobTruth) -> None:
        assert job.agent_id is not None, job
        who = (job.job_id, job.agent_id)
        self._check(job.granted_to is None, "running was committed twice for a job", *who)
        self._check(job.agent_id in job.acked_by, "running was committed and its agent never acknowledged", *who)
        started = [one.job_id for one in self._ledger.held_by(job.agent_id) if one.status in STARTED and one is not job]
        self._check(not started, "an agent was let start a job while it has another", *who, *started)
        job.granted_to = job.agent_id

    def _job_ended(self, job: JobTruth, change: JobChange) -> None:
        """A started job is over: as its agent said, or because its agent was lost."""
        assert job.agent_id is not None, job
        who = (job.job_id, job.agent_id)
        said = [report for agent_id, report in job.reports if agent_id == job.agent_id]
        for report in said:
            if (report.state, report.exit_code, report.signal) == (job.status, change.exit_code, change.signal):
                self._check(
                    (report.stdout_bytes, report.stderr_bytes) == (job.stored[1], job.stored[2]),
                    f"the end was stored before all of the output: {job.stored} of "
                    f"{report.stdout_bytes} and {report.stderr_bytes} bytes",
                    *who,
                )
                self._trace.count("end as reported")
                return
        is_verdict = change.exit_code is None and change.signal is None
        ends = {_S.FAILED, _S.CANCELLED} if change.before is _S.CANCELLING else {_S.FAILED}
        self._check(is_verdict and job.status in ends, f"its end is not what its agent reported: {said}", *who)
        self._trace.count("end by verdict")
        agent = self._ledger.agents[job.agent_id]
        is_early = change.before is _S.CANCELLING and self.jumps  # by the wall time it may have taken long enough
        if agent.process is not None and job.started_by is not None and not is_early:
            why = self.may_lose(agent)
            self._check(why is not None, "a job was ended while its agent was well", *who)

    def _run(self, change: RunChange) -> None:
        before, after = change.before, change.after
        if after is None:
            return
        if before is not None:
            self._check(
                after in RUN_MOVES[before], f"run {change.run_id} moved from {before} to {after}", change.run_id
            )
        self._ledger.runs[change.run_id] = after
        if after not in {RunStatus.RUNNING, RunStatus.CANCELLING}:
            live = [
                job.job_id
                for job in self._ledger.jobs.values()
                if job.run_id == change.run_id and job.status not in TERMINAL
            ]
            self._check(not live, f"run {change.run_id} ended {after} before its jobs", *live)

    def _spawn(self, change: SpawnChange) -> None:
        who = (change.agent_id, *([change.job_id] if change.job_id else []))
        self._trace.tell(f"spawn {change.before} -> {change.after} {change.reason or ''}".rstrip(), *who)
        if change.before is None:
            self._check(change.after is SpawnState.BOOTING, f"a spawn began as {change.after}", *who)
            self._check_pool(change)
        elif change.after is not None:
            self._check(
                change.after in SPAWN_MOVES[change.before], f"a spawn moved {change.before} -> {change.after}", *who
            )
        if change.after is None:
            del self._ledger.spawns[change.agent_id]
            machine = self._ledger.machines.get(change.agent_id)
            is_right = machine is None or self.is_absent(machine.host)
            self._check(is_right, "a spawn row was deleted while its compute lives", *who)
            if change.scaler == CLOUD:
                self.cloud.spawn(change)
            return
        self._ledger.spawns[change.agent_id] = SpawnTruth(change.after, change.job_id, change.scaler)
        if change.after is SpawnState.REGISTERED and change.agent_id in self._ledger.machines:
            where = self._ledger.machines[change.agent_id].host, change.scaler
            self._registered_at[where] = asyncio.get_running_loop().time()
            self._deferred.pop(where, None)
        if change.scaler == CLOUD:
            self.cloud.spawn(change)
        if change.after is not SpawnState.ENDING and change.job_id is not None:
            serving = [
                agent_id
                for agent_id, spawn in self._ledger.spawns.items()
                if spawn.job_id == change.job_id and spawn.state is not SpawnState.ENDING
            ]
            self._check(len(serving) == 1, f"{len(serving)} spawns serve one job", change.job_id, *serving)

    def _check_pool(self, change: SpawnChange) -> None:
        """No more warm agents are being made at once than are wanted."""
        if change.job_id is None:
            booting = [
                spawn
                for agent_id, spawn in self._ledger.spawns.items()
                if spawn.job_id is None
                and spawn.scaler == change.scaler
                and spawn.state is SpawnState.BOOTING
                and not self.is_ending(agent_id)
            ]
            wanted = self._ledger.warm_max.get(change.scaler, 0) * max(1, len(self._ledger.coordinator_runs))
            is_wanted = len(booting) < wanted
            self._check(
                is_wanted, f"{len(booting) + 1} warm agents are being made, wanted are {wanted}", change.agent_id
            )

    def _reservation(self, change: ReservationChange) -> None:
        if change.is_held:
            self._ledger.reservations[change.agent_id] = None
        else:
            self._ledger.reservations.pop(change.agent_id, None)

    def _output(self, change: LogChange) -> None:
        job = self._ledger.jobs[change.job_id]
        stored, produced = job.stored[change.stream], job.produced[change.stream]
        self._trace.tell(f"output {change.stream} at {change.offset}: {len(change.data)} bytes", change.job_id)
        self._check(change.offset == stored, f"output at {change.offset}, but {stored} bytes are stored", change.job_id)
        end = change.offset + len(change.data)
        self._check(
            bytes(produced[change.offset : end]) == change.data,
            f"stored output differs from what was written, from {change.offset} to {end} of {len(produced)}",
            change.job_id,
        )
        job.stored[change.stream] = end

    def _session(self, change: SessionChange) -> None:
        if change.after is None:
            self._ledger.sessions.pop(change.agent_id, None)
        else:
            self._ledger.sessions[change.agent_id] = change.after

    # ------------------------------------------------------------------ memory

    def usage(self, book: Book) -> None:
        """Usage is what the reservations add up to, in all and for each scaler."""
        shapes: dict[ScalerName, list[Amount]] = {}
        for held in book.reservations.values():
            shapes.setdefault(held.scaler, []).append(held.shape.requests)
        sums = {name: _sum(amounts) for name, amounts in shapes.items()}
        self._usage("all", book.total, tuple(map(sum, zip(*sums.values(), strict=True))) or (0, 0, 0))
        for name, expected in sums.items():
            self._usage(name, book.of(name), expected)

    def _usage(self, name: str, usage: Usage, expected: tuple[int, ...]) -> None:
        found = (usage.agents, usage.cpu_micros, usage.memory_bytes)
        if found != expected:
            self._trace.violate(f"usage of {name} is {found}, reserved is {expected}")

    # ------------------------------------------------------------------ agents

    def step_starts(self, agent: AgentTruth, start: JobStart) -> None:
        job = self._ledger.jobs[JobId(start.job_id)]
        who = (job.job_id, agent.agent_id)
        self._trace.tell("its step starts", *who)
        self._trace.count("step started")
        self._check(job.started_by is None, f"a job was started twice, first by {job.started_by}", *who)
        self._check(job.granted_to == agent.agent_id, "a step started before running was committed for it", *who)
        job.started_by = agent.agent_id
        agent.jobs_started += 1
        agent.running = job.job_id
        if agent.jobs_max is not None:
            self._check(agent.jobs_started <= agent.jobs_max, f"an agent ran {agent.jobs_started} jobs", *who)

    def step_wrote(self, agent: AgentTruth, stream: int, data: bytes) -> None:
        assert agent.running is not None, "a step that writes was started"
        self._ledger.jobs[agent.running].produced[stream] += data

    def agent_says(self, agent: AgentTruth, message: Message) -> None:
        match message:
            case JobAck(job_id=job_id):
                self._trace.tell("acknowledges", agent.agent_id, job_id)
                self._ledger.jobs[JobId(job_id)].acked_by.add(agent.agent_id)
            case AgentRegister(in_flight_jobs=jobs):
                self._ledger.agents[agent.agent_id] = agent
                for ref in jobs:  # what it lists it has, as if it had acknowledged it just now
                    self._ledger.jobs[JobId(ref.job_id)].acked_by.add(agent.agent_id)
            case JobReject(job_id=job_id, reason=reason):
                self._trace.tell(f"declines: {reason}", agent.agent_id, job_id)
                self._check(reason != "busy", "an agent was offered a job while it had another", agent.agent_id, job_id)
            case JobStatusReport(job_id=job_id, state=state) if state != "running":
                job = self._ledger.jobs[JobId(job_id)]
                if (agent.agent_id, message) not in job.reports:
                    self._trace.tell(
                        f"reports {state} exit {message.exit_code} signal {message.signal}", agent.agent_id, job_id
                    )
                    job.reports.append((agent.agent_id, message))

    def agent_hears(self, agent: AgentTruth, frame: bytes) -> None:
        """A frame of the coordinator arrives."""
        if b'"job.status.ack"' not in frame:
            return
        message = decode_from_coordinator(frame)
        assert isinstance(message, JobStatusAck), message
        job = self._ledger.jobs[JobId(message.job_id)]
        self._trace.tell("hears that its report was taken", agent.agent_id, job.job_id)
        is_settled = job.status not in STARTED or job.agent_id != agent.agent_id
        self._check(is_settled, f"a report was taken, and the job is {job.status}", agent.agent_id, job.job_id)

    # ------------------------------------------------------------------ machines

    def machine_made(self, order: SpawnOrder, scaler: str, host: str) -> None:
        agent_id = order.agent_id
        self._trace.tell("its machine was made", agent_id)
        self._trace.count("machine made")
        self._check(agent_id in self._ledger.spawns, "a machine was made without a row", agent_id)
        self._check(agent_id in self._ledger.reservations, "a machine was made without a reservation", agent_id)
        self._ledger.machines[agent_id] = MachineTruth(order, scaler, host)
        self._check_caps(agent_id, scaler, host)
        if scaler in self._ledger.pooled:
            self._check_pool_cap(agent_id)
        self._ledger.agents[agent_id] = AgentTruth(
            agent_id=agent_id,
            labels=frozenset((*order.labels, *SELF_LABELS)),
            gate=order.gate,
            order=order,
            jobs_max=self._ledger.jobs_max[scaler],
            host=host,
            made_in_run=self._ledger.coordinator_runs.get(host, 0),
        )

    def scaler_refused(self, host: str, scaler: str, *, under_way: frozenset[AgentId]) -> None:
        """A scaler will not make agents: it is left alone for a while.  `under_way` were asked for before."""
        now = asyncio.get_running_loop().time()
        if host not in self._ledger.coordinator_runs:
            return  # a worker, which every coordinator leaves alone by itself
        if now - self._registered_at.get((host, scaler), -inf) < LEARNS_SECONDS:
            return
        until = now + self.backoff_seconds
        self._deferred[host, scaler] = (self._ledger.coordinator_runs[host], until, under_way)

    def scaler_asked(self, host: str, scaler: str, agent_id: AgentId) -> None:
        run, until, under_way = self._deferred.get((host, scaler), (0, 0.0, frozenset()))
        is_same_run = run == self._ledger.coordinator_runs.get(host)
        if is_same_run and agent_id not in under_way and not self.jumps:
            left = until - asyncio.get_running_loop().time()
            self._check(left <= 0, f"scaler {scaler} was asked {left:.3f} s before it may be again", agent_id)

    def _check_caps(self, agent_id: AgentId, scaler: str, host: str) -> None:
        """What runs may not exceed any cap; one whose end was tried in vain holds no resources any more."""
        for name in (scaler, ""):
            caps = self._ledger.caps[name]
            there = [one for one in self._ledger.machines.values() if one.host == host]
            machines = [one for one in there if name in ("", one.scaler)]
            asked = [one.order.requests for one in machines if not one.resists]
            for what, used, limit in (
                ("machines", len(machines), caps.agents),
                ("cpus", sum(amount.cpus for amount in asked), caps.cpus),
                ("bytes of memory", sum(amount.memory_bytes for amount in asked), caps.memory_bytes),
            ):
                whose = f"scaler {name}" if name else f"host {host}"
                self._check(used <= limit, f"{used} {what} of {whose}, its cap is {limit}", agent_id)

    def _check_pool_cap(self, agent_id: AgentId) -> None:
        """What all coordinators of the host run may not exceed the machine pool, be it hard to end or not."""
        pooled = [one for one in self._ledger.machines.values() if one.scaler in self._ledger.pooled]
        used, limit = sum(one.order.requests.cpus for one in pooled), self._ledger.pool_cpus
        self._check(used <= limit, f"{used} cpus of the machine pool, its cap is {limit}", agent_id)

    def machine_ended(self, agent_id: AgentId) -> None:
        """A backend ended it, on demand of the program or because its own spawn failed."""
        agent = self._ledger.agents[agent_id]
        for job in self._ledger.held_by(agent_id):
            is_at_work = agent.process is not None and agent.process.has_step and agent.running == job.job_id
            if job.status in {_S.RUNNING, _S.RECOVERING} and is_at_work:
                why = self.may_lose(agent)
                self._check(why is not None, "a machine was ended while its job ran", agent_id, job.job_id)
        self.machine_gone(agent_id, "ended by its backend")

    def machine_gone(self, agent_id: AgentId, how: str) -> None:
        self._trace.tell(f"its machine is gone: {how}", agent_id)
        self._ledger.machines.pop(agent_id, None)


def _sum(amounts: Sequence[Amount]) -> tuple[int, int, int]:
    """Agents, millionths of a cpu, bytes of memory."""
    micros = sum(round(amount.cpus * 1_000_000) for amount in amounts)
    return len(amounts), micros, sum(amount.memory_bytes for amount in amounts)


def _declares(demand: Demand, has: Shape) -> bool:
    """Whether a demand declares nothing else than an agent has."""
    requests, limits = demand.resources.requests, demand.resources.limits
    return all(
        (cpus is None or cpus == amount.cpus) and (memory is None or parse_memory(memory) == amount.memory_bytes)
        for cpus, memory, amount in (
            (*_either(requests, limits), has.requests),
            (*_either(limits, requests), has.limits),
        )
    )


def _either(side: Ask, other: Ask) -> tuple[float | None, str | None]:
    return (other.cpus if side.cpus is None else side.cpus, other.memory if side.memory is None else side.memory)
