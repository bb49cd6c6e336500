"""Three coordinators share the cpus of one host, and one of them is killed again and again.

What counts is what really runs: living processes that carry the mark of an agent.
"""

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kici.testing.agent_watch import AgentWatch, marked
from kici.testing.programs import CoordinatorProgram, until

SECONDS = float(os.environ.get("KICI_TEST_POOL_SECONDS", "20"))
"""How long it goes on; `make soak` takes two minutes."""
CPUS = 4
BETWEEN_KILLS_SECONDS = 3.0
JOBS_EACH = round(3 * SECONDS)
SCALERS = """
version: 1
machinePools:
  - name: shared
    cap: {maxCpu: 4}
scalers:
  - name: local
    type: bare-metal
    maxAgents: 10
    machinePool: shared
    labelSets:
      - labels: [linux]
        binaryPath: kici-agent
        resources: {cpus: 1}
"""

pytestmark = pytest.mark.timeout(120 + 3 * SECONDS)


def rows(folder: Path) -> list[str]:
    return [row["agentId"] for row in json.loads((folder / "shared.json").read_text())["reservations"]]


@pytest.mark.spec("D18", "scaler 38.7.1", "scaler 38.7.9", "scaler 50.17")
def test_the_cap_holds_whoever_is_killed_and_in_the_end_the_ledger_is_empty(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    (tmp_path / "scalers.yaml").write_text(SCALERS)
    job = {"runsOn": ["linux"], "run": "sleep 0.5; echo done"}
    (tmp_path / "run.json").write_text(json.dumps({"name": "load", "jobs": {f"j{n}": job for n in range(JOBS_EACH)}}))
    with ExitStack() as stack:
        coordinators = [
            stack.enter_context(
                CoordinatorProgram(
                    tmp_path / name,
                    extra=["--scalers", str(tmp_path / "scalers.yaml")],
                    env={"KICI_MACHINE_LEDGER_DIR": str(ledger)},
                )
            )
            for name in ("one", "two", "three")
        ]
        watch = AgentWatch(tmp_path)
        stack.callback(watch.end)
        for kici in coordinators:
            done = kici.run("submit", "-d", str(tmp_path / "run.json"))
            assert done.returncode == 0, done.stderr
        watch.start()
        ends_at, kills = time.monotonic() + SECONDS, 0
        while time.monotonic() < ends_at:
            victim = coordinators[kills % 3]
            time.sleep(BETWEEN_KILLS_SECONDS)
            victim.stop(signal.SIGKILL)
            victim.start()
            kills += 1
        for kici in coordinators:
            assert kici.run("admin", "queue", "clear", "--yes").returncode == 0
        until(lambda: all(over(kici) for kici in coordinators), seconds=60, what="jobs that run come to their end")
        until(lambda: rows(ledger) == [], seconds=45, what="the ledger is empty while all of them run")
        watch.end()
        succeeded = 0
        for kici in coordinators:
            statuses = [found["status"] for found in kici.jobs(limit=JOBS_EACH).values()]
            assert set(statuses) <= {"success", "cancelled"}, "a kill costs no job"
            succeeded += statuses.count("success")
        print(f"{kills} kills, {succeeded} jobs, at most {len(watch.most)} agents at once in {watch.looks} looks")
        assert len(watch.most) == CPUS, sorted(watch.most)
        assert succeeded > 0
        for kici in coordinators:
            kici.stop(signal.SIGTERM)
            assert kici.is_clean()
    assert json.loads((ledger / "shared.json").read_text()) == {"version": 2, "caps": {}, "reservations": []}
    assert list(marked(tmp_path)) == []


def over(kici: CoordinatorProgram) -> bool:
    return all(job["finishedAt"] for job in kici.jobs(limit=JOBS_EACH).values())
