"""A scalers file is edited while jobs run through it: no job is lost, nothing of a rejected file is ever made."""

import json
import time
from pathlib import Path

import pytest

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
GOOD = BASE.format(total=50, agents=12, more="", label="")
EDITS = (
    BASE.format(total=50, agents=20, more="", label=""),
    BASE.format(total=50, agents=6, more="maxConcurrentSpawns: 2", label=""),
    BASE.format(total=50, agents=12, more="", label=", extra"),
    ASIDE,
    GOOD,
    GOOD.replace("maxAgents: 12", "maxAgents: twelve"),
    GOOD.replace("type: bare-metal", "type: event").replace(
        "maxAgents: 12", "maxAgents: 12\n    provisioningTargets: [a/b]"
    ),
    BASE.format(total=10, agents=12, more="resourceCap: {maxCpu: 8}", label=""),
    ASIDE,
    GOOD,
)


def test_two_hundred_jobs_survive_ten_edits(tmp_path: Path) -> None:
    scalers = tmp_path / "scalers.yaml"
    scalers.write_text(GOOD)
    with CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(scalers)]) as kici:
        run = tmp_path / "run.json"
        job = {"runsOn": ["linux", "work"], "run": "sleep 0.3; echo done"}
        run.write_text(json.dumps({"name": "many", "jobs": {f"j{n}": job for n in range(JOBS)}}))
        following = kici.background("submit", str(run))
        until(lambda: len(kici.agent_processes()) > 0, seconds=20, what="jobs run")
        outcomes = []
        for edit in EDITS:
            scalers.write_text(edit)
            done = kici.run("admin", "scaler", "reload", "--json")
            outcomes.append(json.loads(done.stdout)[0]["outcome"])
            time.sleep(0.5)
        assert outcomes == [*["applied"] * 5, "rejected", "rejected", *["applied"] * 3]
        output, errors = following.communicate(timeout=200)
        assert following.returncode == 0, (output[-2000:], errors[-2000:])
        jobs = kici.jobs(limit=JOBS)
        assert [found["status"] for found in jobs.values()] == ["success"] * JOBS
        assert {found["scaler"] for found in jobs.values()} == {"work"}
        until(kici.is_clean, seconds=20, what="nothing is left of the agents")
        until(
            lambda: [row["state"] for row in kici.admin("scaler", "status")] == ["ready"],
            seconds=40,
            what="the scaler that was taken out has retired",
        )
