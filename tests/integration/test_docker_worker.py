"""Containers on the host of a worker: whole jobs, through its relay, whoever is killed meanwhile."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.docker_engine import Lab, lab
from tests.integration.docker_lab import BUSYBOX, a_pool, import_images, until_no_rules

from kici.testing.programs import CoordinatorProgram, until
from kici.testing.worker_program import WorkerProgram

pytestmark = [pytest.mark.engine("docker"), pytest.mark.xdist_group("docker-worker"), pytest.mark.timeout(280)]
UNTIL_TOLD = "echo begun; while ! test -e /tmp-stop; do sleep 0.1; done; echo told"


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        yield running


class Pair:
    """A coordinator that makes nothing itself, and a worker with an engine."""

    def __init__(self, engine: Lab, name: str) -> None:
        self.engine = engine
        nothing = engine.folder / f"{name}-nothing.yaml"
        nothing.write_text("version: 1\nscalers: []\n")
        extra = ["--scalers", str(nothing)]
        self.coordinator = CoordinatorProgram(engine.folder / name, extra=extra, within=engine.command())
        self.name = name

    def worker_of(self) -> WorkerProgram:
        address = f"http://127.0.0.1:{self.coordinator.port}"
        folder = self.engine.folder / f"{self.name}-worker"
        worker = WorkerProgram(folder, [address], within=self.engine.command(), extra=("--host", "0.0.0.0"))
        worker.scalers.write_text(json.dumps({"version": 1, "scalers": [a_pool(self.engine, "far")]}))
        return worker.takes_token(self.coordinator)

    def containers(self, worker: WorkerProgram) -> list[str]:
        owner = (worker.data_dir / "instance-id").read_text().strip()
        return [one["Id"] for one in self.engine.containers(kici_managed="true", kici_owner=owner)]


@contextmanager
def a_pair(engine: Lab, name: str) -> Iterator[tuple[Pair, CoordinatorProgram, WorkerProgram]]:
    pair = Pair(engine, name)
    with pair.coordinator as coordinator:
        worker = pair.worker_of()
        try:
            with worker:
                worker.waits_until_linked(coordinator)
                yield pair, coordinator, worker
        except BaseException:
            print(worker.log.read_text()[-6000:], coordinator.log.read_text()[-6000:])
            raise


@pytest.mark.spec("D5")
def test_a_job_runs_in_a_container_on_the_workers_host(engine: Lab) -> None:
    with a_pair(engine, "runs") as (pair, coordinator, worker):
        done = coordinator.run("run", "-l", "far", "--", "sh", "-c", "echo inside; exit 4")
        assert (done.stdout, done.returncode) == ("inside\n", 4), done.stderr
        until(lambda: not pair.containers(worker), seconds=60, what="its container is gone")
        until_no_rules(engine)


@pytest.mark.spec("D5", "D11")
def test_a_job_brings_its_own_image_to_a_worker(engine: Lab) -> None:
    with a_pair(engine, "image") as (pair, coordinator, worker):
        document = {"name": "own", "runsOn": ["far"], "container": {"image": BUSYBOX}, "run": "echo of my own"}
        done = coordinator.run("submit", "-", given=json.dumps({"jobs": {"own": document}}))
        assert "of my own" in done.stdout, done.stderr
        until(lambda: not pair.containers(worker), seconds=60, what="its container is gone")


@pytest.mark.spec("D5", "D28")
@pytest.mark.parametrize("who", ["worker", "coordinator"])
def test_kill_9_costs_no_job_in_a_container_of_a_worker(engine: Lab, who: str) -> None:
    with a_pair(engine, f"killed-{who}") as (pair, coordinator, worker):
        job = coordinator.submit(UNTIL_TOLD, "-l", "far")
        until(lambda: "begun" in coordinator.output(job), seconds=60, what="the job has begun")
        (container,) = pair.containers(worker)
        killed = worker if who == "worker" else coordinator
        killed.stop(signal.SIGKILL)
        killed.start()
        worker.waits_until_linked(coordinator)
        engine.run("docker", "-H", f"unix://{engine.socket}", "exec", container, "/bin/sh", "-c", "echo > /tmp-stop")
        until(lambda: coordinator.job(job)["finishedAt"], seconds=60, what="the job ends")
        assert coordinator.job(job)["status"] == "success", coordinator.job(job)
        assert coordinator.output(job) == "begun\ntold\n"
        until(lambda: not pair.containers(worker), seconds=60, what="its container is gone")
        until(lambda: coordinator.admin("agents") == [], seconds=60, what="nobody looks after any agent")
