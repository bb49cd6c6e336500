"""Jobs in containers of a Podman, from the command line: its own way with volumes, standard input and networks."""

import json
from collections.abc import Iterator

import pytest
from tests.docker_engine import Lab
from tests.integration.docker_lab import (
    BUSYBOX,
    EMPTY,
    USER,
    LabCoordinator,
    a_pool,
    coordinator,
    import_images,
    until_no_rules,
)
from tests.podman_engine import podman_lab

from kici.testing.programs import until

pytestmark = [pytest.mark.engine("podman"), pytest.mark.xdist_group("podman-jobs"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with podman_lab() as running:
        import_images(running)
        yield running


@pytest.fixture(scope="module")
def kici(engine: Lab) -> Iterator[LabCoordinator]:
    with coordinator(engine, "jobs", a_pool(engine, runtime="podman")) as running:
        yield running


@pytest.mark.parametrize("image", [None, BUSYBOX, USER])
def test_a_job_runs_and_nothing_is_left(kici: LabCoordinator, image: str | None) -> None:
    own = () if image is None else ("--image", image)
    done = kici.run("run", "-l", "pool", *own, "--", "/bin/sh", "-c", "echo $(id -u); touch here; exit 4")
    assert done.returncode == 4, done.stderr
    assert done.stdout == ("1234\n" if image == USER else "0\n")
    kici.settle()
    until_no_rules(kici.lab)


def test_a_job_runs_in_an_image_that_holds_nothing(kici: LabCoordinator) -> None:
    done = kici.run("run", "-l", "pool", "--image", EMPTY, "--", "/opt/kici/lib/ld.so", "--help")
    assert done.returncode == 0, done.stderr


def test_the_token_is_not_to_be_read_from_it(kici: LabCoordinator) -> None:
    job = kici.submit("sleep 100", "-l", "pool", "--cpus", "0.5", "--memory", "96m")
    until(lambda: kici.job(job)["status"] == "running", seconds=60, what="it runs")
    (one,) = kici.containers()
    inspected = kici.lab.ask("GET", f"/containers/{one['Id']}/json")
    assert "kat_" not in json.dumps(inspected)
    assert inspected["HostConfig"]["Memory"] == 96 * 2**20
    assert kici.run("cancel", job).returncode == 0
    kici.settle()
