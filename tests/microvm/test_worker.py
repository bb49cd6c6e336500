"""MicroVMs on the host of a worker: jobs through its relay, a worker that is killed, machines that operators list."""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.microvm.lab import namespace, until
from tests.microvm.orchestra import GATEWAY, PORT, Orchestra, firecracker_entry

from kici.testing.programs import CoordinatorProgram
from kici.testing.worker_program import WorkerProgram

pytestmark = [pytest.mark.xdist_group("microvms"), pytest.mark.timeout(240)]
RELAY_PORT = 4100


class Far(Orchestra):
    """The same host, whose machines a worker makes for a coordinator without any."""

    def __init__(self, folder: Path, host: Any, entry: Mapping[str, Any], network: Mapping[str, Any]) -> None:
        mine = {**entry, "orchestratorUrl": f"ws://{GATEWAY}:{RELAY_PORT}/ws"}
        super().__init__(folder, host, mine, network)
        nothing = folder / "nothing.yaml"
        nothing.write_text("version: 1\nscalers: []\n")
        self.coordinator = CoordinatorProgram(
            folder / "coordinator", port=PORT, extra=("--host", "0.0.0.0", "--scalers", str(nothing))
        )
        address = f"http://127.0.0.1:{PORT}"
        extra = ("--host", "0.0.0.0", "--port", str(RELAY_PORT))
        self.worker = WorkerProgram(folder / "worker", [address], extra=extra)
        scaler = {"name": "vms", "type": "firecracker", "maxAgents": 4, "chrootBaseDir": str(self.base), **mine}
        self.worker.scalers.write_text(
            yaml.safe_dump({"version": 1, "firecracker": dict(network), "scalers": [scaler]})
        )

    def log(self) -> str:
        return self.worker.log.read_text()


@contextmanager
def far(entry: Mapping[str, Any]) -> Iterator[Far]:
    folder = Path(tempfile.mkdtemp(prefix="kici-far-"))
    try:
        with namespace() as host, host.enter():
            one = Far(folder, host, entry, {"cidr": "10.200.0.0/24", "bridgeName": "kici-br0"})
            try:
                with one.coordinator, one.worker.takes_token(one.coordinator):
                    one.worker.waits_until_linked(one.coordinator)
                    yield one
                one.until_clean()
            except BaseException:
                print(one.log()[-6000:])
                raise
            finally:
                for pid in one.vm_processes().values():
                    subprocess.run(("kill", "-KILL", str(pid)), check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.engine("firecracker")
@pytest.mark.spec("D5")
def test_a_job_runs_in_a_microvm_on_the_workers_host_and_nothing_is_left() -> None:
    with far(firecracker_entry()) as one:
        done = one.coordinator.run("run", "-l", "tiny", "--", "hello")
        assert done.returncode == 0, done.stderr + one.log()[-3000:]
        assert done.stdout == "hello from a microVM\n"
        one.until_clean()


@pytest.mark.engine("firecracker")
@pytest.mark.spec("D28", "scaler 42.7.5")
def test_a_worker_that_is_killed_takes_its_microvms_back_and_operators_see_them() -> None:
    with far(firecracker_entry()) as one:
        job = one.coordinator.run("run", "-d", "-l", "tiny", "--", "hold").stdout.strip()
        until(lambda: one.coordinator.job(job)["status"] == "running", seconds=120, what="the job runs")
        before = one.vm_processes()
        (vm_id,) = before
        one.worker.stop(signal.SIGKILL)
        one.worker.start()
        one.worker.waits_until_linked(one.coordinator)
        assert one.vm_processes() == before
        (peer,) = [each for each in one.coordinator.admin("peers") if each["role"] == "worker"]
        words = ("scaler", "orphans", "list", "--all", "--node", peer["id"])
        # The store may still remember the link that broke.
        until(lambda: one.coordinator.run("admin", *words).returncode == 0, seconds=60, what="it is linked again")
        listed = one.coordinator.admin(*words)
        assert listed["instance"] == peer["id"]
        assert [(each["id"], each["status"]) for each in listed["items"]] == [(vm_id, "tracked")]
        stopped = one.coordinator.run("admin", "scaler", "orphans", "stop", vm_id, "--yes", "--node", peer["id"])
        assert stopped.returncode == 1
        assert f"{vm_id} is not stopped - tracked" in stopped.stderr
        assert one.coordinator.job(job)["status"] in ("running", "recovering")
        one.coordinator.run("cancel", job, "--force")  # the tiny guest does not come back by itself


@pytest.mark.engine("firecracker")
@pytest.mark.spec("scaler 36.18.18")
def test_a_job_on_a_workers_host_cannot_read_what_its_guest_was_told_at_its_boot() -> None:
    with far(firecracker_entry()) as one:
        done = one.coordinator.run("run", "-l", "tiny", "--", "metadata")
        assert done.returncode == 0, done.stderr + one.log()[-3000:]
        assert done.stdout == "status 200 {}\n"
