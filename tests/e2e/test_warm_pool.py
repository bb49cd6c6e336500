"""A warm pool of ten: full before the first job, never more than ten, none left behind by a kill and restart.

What counts is what really runs, looked at all the time and from the first process on.
"""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from kici.testing.agent_watch import AgentWatch, marked, together
from kici.testing.programs import CoordinatorProgram, until

pytestmark = pytest.mark.timeout(240)
SIZE = 10
SCALERS = """
version: 1
scalers:
  - name: pool
    type: bare-metal
    maxAgents: 20
    warmPool: {enabled: true, size: 10}
    labelSets:
      - labels: [linux]
        binaryPath: kici-agent
        resources: {cpus: 1, memory: 64m}
"""


def idle(kici: CoordinatorProgram) -> int:
    return sum(agent["state"] == "idle" for agent in kici.admin("agents"))


def has(kici: CoordinatorProgram, count: int) -> bool:
    return len(together(kici.data_dir)) >= count


def is_full(kici: CoordinatorProgram) -> bool:
    return idle(kici) == SIZE == len(together(kici.data_dir))


@pytest.mark.spec("D28", "scaler 18.14.2")
def test_kill_and_restart_leave_ten_warm_agents(tmp_path: Path) -> None:
    scalers = tmp_path / "scalers.yaml"
    scalers.write_text(SCALERS)
    with CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(scalers)]) as kici:
        with AgentWatch(kici.data_dir) as watch:
            for enough in (1, 4, 8):  # killed in the middle of the first filling
                until(partial(has, kici, enough), seconds=60, what="it fills")
                kici.stop(signal.SIGKILL)
                kici.start()
            until(lambda: is_full(kici), seconds=60, what="the pool is full")
            kept = together(kici.data_dir)
            kici.stop(signal.SIGKILL)
            assert together(kici.data_dir) == kept, "agents outlive their coordinator"
            kici.start()
            until(lambda: is_full(kici), seconds=60, what="the pool is full after a kill")
            assert together(kici.data_dir) == kept, "and serve the next one"
            kici.stop(signal.SIGKILL)
            lost = sorted(kept)[:3]
            for pid, _, mark in marked(kici.data_dir):
                if mark in lost:
                    os.kill(int(pid), signal.SIGKILL)
            kici.start()
            until(lambda: is_full(kici), seconds=120, what="those that died meanwhile are replaced")
            assert len(together(kici.data_dir) & kept) == SIZE - len(lost)
        assert len(watch.most) == SIZE, sorted(watch.most)
        warm = together(kici.data_dir)
        assert kici.run("run", "--", "echo", "warm").stdout == "warm\n"
        (job,) = kici.jobs().values()
        assert any(mark.endswith(job["agentId"]) for mark in warm), "the job went to one that was there"
        until(lambda: is_full(kici), seconds=60, what="the pool is full again")
        kici.stop(signal.SIGTERM)
        assert kici.is_clean()
