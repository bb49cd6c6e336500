"""`make storm`: a real cluster at work while its parts are killed and cut off, and what became of every job.

python -m kici.testing.storm [--short] [--jobs 500] [--seed 1]

Needs root, for network namespaces, and an installed PostgreSQL.  Scripts of jobs write down themselves that they
start and end, so nothing rests on what the cluster says of itself.
"""

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kici.domain.errors import StoreDown
from kici.domain.ids import JobId
from kici.domain.job import Job
from kici.testing.storm_stage import CAPS, COORDINATORS, DATABASE, WORKERS, Census, Stage, ended, marks

LOOK_SECONDS: Final = 1.0
CALM_SECONDS: Final = 3.0
DOWN_SECONDS: Final = 5.0
END_SECONDS: Final = 400.0
CLEAN_SECONDS: Final = 240.0
"""Longer than the longest documented window: rows of a host that was silent go after two minutes."""
TAKEOVER_SECONDS: Final = 5.0
PINNED_SHARE: Final = 0.2
LONG_SHARE: Final = 0.1
Links = tuple[tuple[str, str], ...]
ROUNDS: Final[tuple[Links, ...]] = tuple(
    ((DATABASE, COORDINATORS[n]), (WORKERS[0], COORDINATORS[n - 2]), (WORKERS[1], COORDINATORS[n - 1]))
    for n in range(len(COORDINATORS))
)
"""Every link that the cluster uses is cut in one of these; at each moment every worker and every job has a way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    jobs: int = 500
    cuts_seconds: tuple[float, ...] = (5, 40, 180)
    job_seconds: float = 8.0
    """At most, for nine of ten jobs."""
    long_seconds: float = 50.0
    """At most, for the tenth."""
    seed: int = 1


SHORT: Final = Plan(jobs=54, cuts_seconds=(5,), job_seconds=4.0, long_seconds=12.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault, in the table."""

    what: str
    seconds: float
    running: int
    """Agents that ran when it began."""
    ended: int
    """Jobs that ended from its beginning to that of the next."""
    failed: int
    note: str


@dataclass(slots=True)
class Report:
    rows: list[Row] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def text(self) -> str:
        lines = [f"{'fault':34} {'s':>5} {'agents':>6} {'ended':>5} {'failed':>6}  note"]
        lines += [
            f"{row.what:34} {row.seconds:5.0f} {row.running:6} {row.ended:5} {row.failed:6}  {row.note}"
            for row in self.rows
        ]
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        caps = ", ".join(f"{host} {self.most[host]} of {cap}" for host, cap in CAPS.items())
        lines += ["", f"jobs: {counts}", f"most agents at once: {caps}", f"{self.seconds:.0f} s in all"]
        lines += [f"  {count} x {reason}" for reason, count in self.reasons.most_common(10)]
        lines += self.violations or ["nothing was violated"]
        return "\n".join(lines)


class Storm:
    def __init__(self, stage: Stage, plan: Plan, census: Census) -> None:
        self._stage = stage
        self._plan = plan
        self._census = census
        self._random = random.Random(plan.seed)
        self._submitted = 0
        self._pending = (0, "")
        self._ended: dict[JobId, Job] = {}
        self.report = Report()

    def run(self) -> Report:
        began = time.monotonic()
        steps = self._steps()
        share = -(-self._plan.jobs // len(steps))
        for what, act, through in steps:
            self._step(what, act, through, share)
        self._settle()
        self.report.seconds = time.monotonic() - began
        self._judge()
        return self.report

    # ------------------------------------------------------------------ faults

    def _steps(self) -> list[tuple[str, Callable[[], str], str]]:
        """What is done, and the coordinator that is not touched by it."""
        steps: list[tuple[str, Callable[[], str], str]] = [
            ("kill -9 of the leader", self._kill_leader, ""),
            ("kill -9 of a worker", self._kill_worker, COORDINATORS[1]),
            ("kill -9 of PostgreSQL", self._kill_postgres, COORDINATORS[2]),
        ]
        for seconds in self._plan.cuts_seconds:
            for links in ROUNDS:
                # Of what is submitted during a cut, the coordinator without its database would take nothing.
                through = next(host for host in COORDINATORS if (DATABASE, host) not in links)
                what = f"cut {', '.join('-'.join(link) for link in links)}"
                steps.append((what, self._cutting(links, seconds), through))
        return steps

    def _step(self, what: str, act: Callable[[], str], through: str, share: int) -> None:
        before = dict(self._ended)
        self._submit(share // 2, through or COORDINATORS[0])
        self._wait(CALM_SECONDS)
        running, began = sum(self._census.now().values()), time.monotonic()
        self._pending = (share - share // 2, through)
        note = act()
        seconds = time.monotonic() - began
        self._submit_rest()
        self._wait(CALM_SECONDS)
        news = [job for job_id, job in self._ended.items() if job_id not in before]
        failed = sum(job.status != "success" for job in news)
        row = Row(what=what, seconds=seconds, running=running, ended=len(news), failed=failed, note=note)
        self.report.rows.append(row)
        print(f"{what}: {seconds:.0f} s, {len(news)} jobs ended, {failed} failed {note}", flush=True)

    def _kill_leader(self) -> str:
        leader = self._stage.leader()
        assert leader is not None, "nobody leads a cluster at rest"
        program = self._stage.coordinators[leader]
        program.stop(signal.SIGKILL)
        killed_at = time.monotonic()
        while self._stage.leader() in (None, leader):
            self._look()
            assert time.monotonic() < killed_at + 60, "nobody took over"
            time.sleep(0.05)
        seconds = time.monotonic() - killed_at
        if seconds > TAKEOVER_SECONDS:
            self.report.violations.append(f"the next leader came after {seconds:.1f} s")
        self._submit_rest(through=next(host for host in COORDINATORS if host != leader))
        self._wait(DOWN_SECONDS)
        program.start()
        return f"{leader} led; the next one did after {seconds:.1f} s"

    def _kill_worker(self) -> str:
        worker = self._stage.workers[WORKERS[0]]
        worker.stop(signal.SIGKILL)
        self._submit_rest()
        self._wait(DOWN_SECONDS)
        worker.start()
        return f"{WORKERS[0]} was down for {DOWN_SECONDS:.0f} s"

    def _kill_postgres(self) -> str:
        self._stage.postgres.kill()
        self._wait(DOWN_SECONDS)
        self._stage.postgres.start_after_kill()
        up_at = time.monotonic()
        while self._stage.leader() is None:
            assert time.monotonic() < up_at + 60, "nobody leads after the database is back"
            time.sleep(0.05)
        return f"somebody led {time.monotonic() - up_at:.1f} s after it was back"

    def _cutting(self, links: Links, seconds: float) -> Callable[[], str]:
        def cut() -> str:
            before = self._stage.leader()
            self._stage.network.cut(*links)
            self._wait(seconds / 2)
            self._submit_rest()
            self._wait(seconds / 2)
            self._stage.network.cut()
            after = self._stage.leader()
            return f"{after} leads on" if before == after else f"{before} led, then {after}"

        return cut

    # ------------------------------------------------------------------ jobs

    def _submit_rest(self, through: str = "") -> None:
        """The half of a step's jobs that comes during its fault."""
        count, untouched = self._pending
        self._pending = (0, "")
        if count:
            self._submit(count, untouched or through or COORDINATORS[0])

    def _submit(self, count: int, through: str) -> None:
        jobs: dict[str, object] = {}
        for _ in range(min(count, self._plan.jobs - self._submitted)):
            self._submitted += 1
            name = f"j{self._submitted:04}"
            longest = self._plan.long_seconds if self._random.random() < LONG_SHARE else self._plan.job_seconds
            label = self._random.choice(tuple(CAPS)) if self._random.random() < PINNED_SHARE else "linux"
            file = self._stage.starts / name
            script = f"echo start >> {file}; sleep {self._random.uniform(0.5, longest):.1f}; echo end >> {file}"
            jobs[name] = {"runsOn": [label], "run": script}
        if jobs:
            self._stage.submit(through, jobs)

    def _wait(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            self._look()
            time.sleep(min(LOOK_SECONDS, max(0.0, left)))

    def _look(self) -> bool:
        """Note what has ended; what has ended before must stand.  Whether the database answered."""
        try:
            now = ended(self._stage.jobs())
        except StoreDown:
            return False
        for job_id, job in self._ended.items():
            later = now.get(job_id)
            if later is None or (later.status, later.finished_at) != (job.status, job.finished_at):
                self.report.violations.append(f"job {job.name} ended {job.status}, and then again: {later}")
        self._ended = {**self._ended, **now}
        return True

    # ------------------------------------------------------------------ the end

    def _settle(self) -> None:
        ends_at = time.monotonic() + END_SECONDS
        while len(self._ended) < self._plan.jobs and time.monotonic() < ends_at:
            self._wait(LOOK_SECONDS)
        ends_at = time.monotonic() + CLEAN_SECONDS
        while self._left() and time.monotonic() < ends_at:
            time.sleep(LOOK_SECONDS)

    def _left(self) -> list[str]:
        """What is there although nothing runs."""
        rows = [f"{count} rows of {what}" for what, count in self._stage.rows().items() if count]
        folders = [
            f"{host} has leftovers of agents"
            for host, program in self._stage.programs.items()
            if not program.is_clean()
        ]
        processes = [f"a process of {mark}" for mark in sorted(marks()) if mark.startswith(f"{self._stage.folder}/")]
        return [*rows, *folders, *processes]

    def _judge(self) -> None:
        jobs, report = self._stage.jobs(), self.report
        report.violations += [f"there are {len(many)} jobs {name}" for name, many in jobs.items() if len(many) != 1]
        if len(jobs) != self._plan.jobs:
            report.violations.append(f"{len(jobs)} jobs are known, {self._plan.jobs} were submitted")
        for name, (job, *_) in sorted(jobs.items()):
            report.statuses[job.status] += 1
            if job.status != "success":
                report.reasons[job.reason or ""] += 1
            wrote = self._stage.begun(name)
            if job.finished_at is None:
                report.violations.append(f"job {name} has not ended: {job.status}")
            if wrote.count("start") > 1:
                report.violations.append(f"job {name} started {wrote.count('start')} times")
            if job.status == "success" and wrote != ["start", "end"]:
                report.violations.append(f"job {name} succeeded and wrote {wrote}")
            if job.status != "success":
                report.violations.append(f"job {name} {job.status}: {job.reason}")
        report.most = self._census.most
        report.violations += [
            f"{host} had {report.most[host]} agents at once, {cap} at most are allowed"
            for host, cap in CAPS.items()
            if report.most[host] > cap
        ]
        report.violations += [f"left: {each}" for each in self._left()]


def run(plan: Plan) -> Report:
    """The whole storm.  Logs of the programs stay when something was violated."""
    with Stage() as stage, stage.census() as census:
        print(f"logs and data: {stage.folder}", flush=True)
        report = Storm(stage, plan, census).run()
        stage.keeps_folder = bool(report.violations)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing was violated."""
    parser = argparse.ArgumentParser(prog="python -m kici.testing.storm", description="Kill and cut a real cluster.")
    parser.add_argument("--short", action="store_true", help="the form that tests run: two minutes, no long cuts")
    parser.add_argument("--jobs", type=int, help="how many jobs (500; 54 in the short form)")
    parser.add_argument("--seed", type=int, default=1, help="what kinds of jobs (1)")
    chosen = parser.parse_args(arguments)
    plan = SHORT if chosen.short else Plan()
    plan = Plan(
        jobs=chosen.jobs or plan.jobs,
        cuts_seconds=plan.cuts_seconds,
        job_seconds=plan.job_seconds,
        long_seconds=plan.long_seconds,
        seed=chosen.seed,
    )
    report = run(plan)
    print(report.text())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
