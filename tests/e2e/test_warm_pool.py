"""A warm pool of ten: full before the first job, never more than ten, none left behind by a kill and restart."""

import signal
import time
from pathlib import Path

import pytest

from kici.testing.programs import CoordinatorProgram, until

pytestmark = pytest.mark.timeout(180)
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


def test_kill_and_restart_leave_ten_warm_agents(tmp_path: Path) -> None:
    scalers = tmp_path / "scalers.yaml"
    scalers.write_text(SCALERS)
    with CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(scalers)]) as kici:
        until(lambda: idle(kici) == SIZE, seconds=30, what="the pool is full")
        for _ in range(2):
            kici.stop(signal.SIGKILL)
            assert len(kici.agent_processes()) == SIZE
            kici.start()
            ends_at = time.monotonic() + 8
            while time.monotonic() < ends_at:
                assert len(kici.agent_processes()) <= SIZE
                time.sleep(0.1)
            assert idle(kici) == SIZE
        began = time.monotonic()
        assert kici.run("run", "--", "echo", "warm").stdout == "warm\n"
        assert time.monotonic() - began < 5
        until(lambda: idle(kici) == SIZE, seconds=30, what="the pool is full again")
        assert len(kici.agent_processes()) == SIZE
        kici.stop(signal.SIGTERM)
        assert kici.is_clean()
