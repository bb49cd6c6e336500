"""A scalers file is edited while jobs run through it: no job is lost, nothing of a rejected file is ever made."""

import json
from functools import partial
from pathlib import Path

import pytest

from kici.testing.agent_watch import AgentWatch, together
from kici.testing.programs import CoordinatorProgram, until

pytestmark = pytest.mark.timeout(300)
JOBS = 200

BASE = """
version: 1
globalMaxAgents: {total}
scalers:
  - name: work
    type: bare-metal
    maxAgents: {agents}
    {more}
    labelSets:
      - labels: [linux, work{label}]
        binaryPath: kici-agent
"""
ASIDE = """
version: 1
scalers:
  - name: aside
    type: bare-metal
    maxAgents: 2
    labelSets:
      - labels: [aside]
        binaryPath: kici-agent
"""
NEVER = """
  - name: never
    type: bare-metal
    maxAgents: 3
    warmPool: {{enabled: true, size: 3}}
    labelSets:
      - labels: [never]
        binaryPath: {program}
        resources: {{cpus: 0.1, memory: 64m}}
"""
"""Of the files that are rejected: a pool that would be filled at once, by a program that leaves a trace."""

GOOD = BASE.format(total=50, agents=12, more="", label="")
INVALID = GOOD.replace("maxAgents: 12", "maxAgents: twelve") + NEVER
OTHER_TYPE = (
    GOOD.replace("type: bare-metal", "type: event").replace(
        "maxAgents: 12", "maxAgents: 12\n    provisioningTargets: [a/b]"
    )
    + NEVER
)
EDITS = (
    BASE.format(total=50, agents=20, more="", label=""),
    BASE.format(total=50, agents=6, more="maxConcurrentSpawns: 2", label=""),
    BASE.format(total=50, agents=12, more="", label=", extra"),
    ASIDE,
    GOOD,
    INVALID,
    OTHER_TYPE,
    BASE.format(total=10, agents=12, more="resourceCap: {maxCpu: 8}", label=""),
    ASIDE,
    GOOD,
)
OUTCOMES = [*["applied"] * 5, "rejected", "rejected", *["applied"] * 3]


@pytest.mark.spec("scaler 19.8.3", "scaler 19.8.4", "scaler 19.8.5", "scaler 49.5")
def test_two_hundred_jobs_survive_ten_edits(tmp_path: Path) -> None:
    scalers, trace, never = tmp_path / "scalers.yaml", tmp_path / "trace", tmp_path / "never"
    scalers.write_text(GOOD)
    never.write_text(f"#!/bin/sh\necho made >> {trace}\nexit 1\n")
    never.chmod(0o755)
    with (
        CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(scalers)]) as kici,
        AgentWatch(kici.data_dir) as watch,
    ):
        run = tmp_path / "run.json"
        job = {"runsOn": ["linux", "work"], "run": "sleep 2; echo done"}
        run.write_text(json.dumps({"name": "many", "jobs": {f"j{n}": job for n in range(JOBS)}}))
        following = kici.background("submit", str(run))
        outcomes, succeeded = [], 0
        for edit in EDITS:
            until(lambda: together(kici.data_dir) or scalers.read_text() == ASIDE, seconds=60, what="jobs run")
            scalers.write_text(edit.replace("{program}", str(never)))
            outcomes.append(reload(kici))
            if edit != ASIDE:
                until(partial(goes_on, kici, succeeded), seconds=60, what=f"jobs go on after {outcomes}")
            succeeded = ended(kici)
        assert outcomes == OUTCOMES
        assert succeeded < JOBS, "every edit met jobs that waited or ran"
        output, errors = following.communicate(timeout=200)
        assert following.returncode == 0, (output[-2000:], errors[-2000:])
        jobs = kici.jobs(limit=JOBS)
        assert [found["status"] for found in jobs.values()] == ["success"] * JOBS
        assert {found["scaler"] for found in jobs.values()} == {"work"}
        assert len(watch.most) <= 20, "the largest cap of any file"
        until(kici.is_clean, seconds=60, what="nothing is left of the agents")
        until(
            lambda: [row["state"] for row in kici.admin("scaler", "status")] == ["ready"],
            seconds=60,
            what="the scaler that was taken out has retired",
        )
        assert not trace.exists(), "an agent of a rejected file was made"
        scalers.write_text((GOOD + NEVER).format(program=never))
        assert reload(kici) == "applied"
        until(trace.exists, seconds=60, what="the trace is left by who is accepted")


def reload(kici: CoordinatorProgram) -> str:
    outcome: str = json.loads(kici.run("admin", "scaler", "reload", "--json").stdout)[0]["outcome"]
    return outcome


def ended(kici: CoordinatorProgram) -> int:
    return sum(job["status"] == "success" for job in kici.jobs(limit=JOBS).values())


def goes_on(kici: CoordinatorProgram, before: int) -> bool:
    return ended(kici) > before
